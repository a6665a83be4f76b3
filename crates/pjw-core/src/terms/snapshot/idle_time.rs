//! The time until which a process is known to have been idle.

use super::{Observed, Snapshot};
use crate::basics::{Nanos, Pid};

impl Snapshot {
    /// Returns the time of the last check of the process `pid` before this scan, in ns since boot, if that check found
    /// the process idle. The snapshot has this time only for a process that has ended or that runs again. `None` in all
    /// other cases.
    pub(crate) fn idle_until(&self, pid: Pid) -> Option<Nanos> {
        let before_it_ran = match self.processes.get(&pid) {
            Some(Observed::Present(process)) => process.idle_until,
            _ => None,
        };
        self.ended_idle_until.get(&pid).copied().or(before_it_ran)
    }
}
