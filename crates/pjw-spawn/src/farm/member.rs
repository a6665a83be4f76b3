//! What the master knows about each other process of its farm.

use crate::child::Child;

/// The role of a process of a farm, other than the master: a worker with its index, the reader of the items, or the
/// writer of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    Worker(usize),
    Reader,
    Writer,
}

/// What the master process of a farm knows about a worker, the reader or the writer: the process if one runs, whether
/// the farm needs such a process, and how many processes with this role have died in a row.
#[derive(Debug, Default)]
pub(crate) struct FarmProcess {
    pub(crate) child: Option<Child>,
    /// Whether the farm needs a process with this role now.
    pub(crate) is_wanted: bool,
    /// The number of deaths in succession. For a worker, deaths between which no item was computed. For the reader or
    /// the writer, deaths at the same item.
    pub(crate) deaths: u32,
    /// The number of items that the reader or the writer had completed when it died last.
    pub(crate) died_at: u64,
}

impl FarmProcess {
    /// Makes the value for a worker, a reader or a writer that does not run yet. `is_wanted` says whether the farm is
    /// to start this process.
    pub(crate) fn new(is_wanted: bool) -> Self {
        Self { is_wanted, ..Self::default() }
    }

    /// Returns whether a process must be started: the farm needs such a process, and none runs.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_wanted && self.child.is_none()
    }
}
