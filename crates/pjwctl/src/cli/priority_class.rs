//! The option `--class`.

use clap::ValueEnum;

/// The value of the command line option `--class`: the priority class of a job. The class says whether the job has
/// cores of its own, and whether other jobs can use these cores while the job leaves them idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PriorityClassArg {
    /// Cores of its own. Cores that the job leaves idle may be lent to besteffort jobs, and are taken back when the job
    /// needs them. Nothing is lent unless lending.enabled is true in pjwd.toml; the default is false
    Guaranteed,
    /// Cores of its own that are never lent
    Normal,
    /// No cores of its own. The job runs at idle priority on at most the requested number of cores: free cores and, if
    /// lending.enabled is true, idle cores of guaranteed jobs
    Besteffort,
}
