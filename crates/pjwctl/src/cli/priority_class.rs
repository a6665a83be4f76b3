//! The option `--class`.

use clap::ValueEnum;

/// The value of the command line option `--class`: the priority class of a job. The class says whether the job has
/// cores of its own, and whether other jobs can use these cores while the job leaves them idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PriorityClassArg {
    /// Cores of its own; those that it leaves idle may be lent, and come back when it needs them. Nothing is lent
    /// unless lending.enabled is true in pjwd.toml; the default is false
    Guaranteed,
    /// Cores of its own that are never lent
    Normal,
    /// No cores of its own: at idle priority on at most so many free cores and idle cores of guaranteed jobs; only
    /// on free cores unless lending.enabled is true
    Besteffort,
}
