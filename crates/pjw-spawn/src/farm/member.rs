//! The processes of a farm beside the master.

use crate::child::Child;

/// A process of the farm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Worker(usize),
    Reader,
    Writer,
}

/// A process of the farm, and its predecessors.
#[derive(Debug, Default)]
pub(crate) struct Member {
    pub(crate) child: Option<Child>,
    /// Whether a process is to run in this place.
    pub(crate) is_wanted: bool,
    /// The deaths one after the other: of a worker those without an item, of the others those between two items.
    pub(crate) deaths: u32,
    /// How many items the reader or the writer had done when it died last.
    pub(crate) died_at: u64,
}

impl Member {
    /// A place in which a process is to run, or not.
    pub(crate) fn new(is_wanted: bool) -> Self {
        Self { is_wanted, ..Self::default() }
    }

    pub(crate) fn is_missing(&self) -> bool {
        self.is_wanted && self.child.is_none()
    }
}

/// Kills a process of the farm and waits for its end.
pub(crate) fn kill(child: &Child) {
    let _ = child.send_signal(libc::SIGKILL);
    let _ = child.wait();
}
