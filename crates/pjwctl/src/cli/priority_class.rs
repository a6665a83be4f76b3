//! The option `--class`.

use clap::ValueEnum;

/// The value of `--class` of `pjwctl assign`, `pjwctl run` and `pjwctl spawn`: the priority class of the job. The class
/// says whether the job has cores of its own, and whether it lends or borrows cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PriorityClassArg {
    /// Cores of its own; those that it leaves idle may be lent, and come back when it needs them
    Guaranteed,
    /// Cores of its own that are never lent
    Normal,
    /// No cores of its own: at idle priority on at most so many free cores and idle cores of guaranteed jobs
    Besteffort,
}
