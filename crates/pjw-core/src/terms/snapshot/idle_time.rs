//! The time until which a process is known to have been idle.

use super::{Observed, Snapshot};
use crate::basics::{Nanos, Pid};

impl Snapshot {
    /// Returns the time until which the process `pid` is known to have been idle, in ns since boot, if the process has
    /// ended or ran again after this time. `None` if it was not found idle since it last ran.
    pub(crate) fn idle_until(&self, pid: Pid) -> Option<Nanos> {
        let before_it_ran = match self.processes.get(&pid) {
            Some(Observed::Present(process)) => process.idle_until,
            _ => None,
        };
        self.ended_idle_until.get(&pid).copied().or(before_it_ran)
    }
}
