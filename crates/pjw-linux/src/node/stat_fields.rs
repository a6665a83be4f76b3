//! The facts with which the observation of a process begins.

use pjw_core::ids::Comm;
use pjw_core::ids::{Pid, StartTime};

use crate::bpf::TaskRecord;
use crate::proc::procfs::Stat;

/// Identity and state of a process, from `/proc` or from the task scan.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatFields {
    pub(super) start: StartTime,
    pub(super) parent: Pid,
    pub(super) group: Pid,
    pub(super) session: Pid,
    pub(super) comm: Comm,
    pub(super) kernel: bool,
    pub(super) state: char,
    pub(super) stack: u64,
}

impl From<Stat> for StatFields {
    fn from(stat: Stat) -> Self {
        let Stat { start, parent, group, session, comm, kernel, state, stack, .. } = stat;
        Self { start, parent, group, session, comm, kernel, state, stack }
    }
}

impl From<&TaskRecord<'_>> for StatFields {
    fn from(task: &TaskRecord<'_>) -> Self {
        let &TaskRecord { start, parent, group, session, comm, kernel, state, stack, .. } = task;
        Self { start, parent, group, session, comm, kernel, state, stack }
    }
}
