//! Prevents moves to another cgroup of processes whose memory is locked.
//!
//! A move to another cpuset waits for the lock of the memory of the process (`mpol_rebind_mm` in `cpuset_attach`,
//! kernel/cgroup/cpuset.c), and no process of the machine can fork or end meanwhile. A process that waits for a file
//! system that does not respond (NFS, FUSE) may hold this lock without end. Except on cgroup v1 since Linux 6.2: there,
//! only a move to other memory nodes waits.
//!
//! These locks are not checked:
//!
//! - The locks of all processes in a cpuset whose memory nodes change (`--bind-memory`).
//! - Before Linux 6.2: the locks of all processes below a cgroup, when the cpuset controller is enabled or disabled for
//!   the children of this cgroup.
//! - A lock that is held for reading, such as that of a process that writes to a mapped page of a file system that does
//!   not respond.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Duration;

use pjw_core::cpuset_group::{CpusetAction, CpusetChange, CpusetOutcome};
use pjw_core::ids::{ProcessId, Uid};

use crate::cgroup::CpusetMount;
use crate::proc::{memory_files::MemoryFiles, procfs::ProcDir};

/// How long the lock of a process may be held before a move. On a busy machine, a process that forks may be preempted
/// with the lock.
const MAX_LOCKED_TIME: Duration = Duration::from_secs(1);

/// Checks the processes that a cpuset change moves to another cgroup, before the change: none of them may have its
/// memory locked (`mmap_lock`). The move of such a process would stop all forks of the machine until the lock is
/// released.
#[derive(Debug)]
pub(super) struct MoveGuard {
    /// Whether moves wait for locks on cgroup v1 too: before Linux 6.2.
    checks_v1: bool,
    memory_files: MemoryFiles,
}

impl MoveGuard {
    /// Makes a guard. `affinity_persists` must be true on Linux 6.2 and later, and false on older kernels. On an older
    /// kernel, the guard checks moves in cgroup v1 and v2. On Linux 6.2 and later, it checks only moves in v2.
    pub(super) fn new(affinity_persists: bool) -> Self {
        Self { checks_v1: !affinity_persists, memory_files: MemoryFiles::new(BTreeSet::new()) }
    }

    /// Returns the cpuset change of `action`, unless it would move a process whose memory is locked (`mmap_lock`).
    /// Such a move would stop all forks of the machine. Waits at most 1 s for each process until its lock is
    /// released. If the change creates a cpuset, leaves out the initial processes whose memory is locked.
    ///
    /// # Errors
    /// [`CpusetOutcome::NotMoved`] if the memory of the process that the change moves is locked. The same error
    /// if the memory of each initial process is locked.
    pub(super) fn without_locked_processes<'a>(
        &mut self,
        proc: &mut ProcDir,
        hierarchy: &CpusetMount,
        action: &'a CpusetAction,
    ) -> Result<Cow<'a, CpusetChange>, CpusetOutcome> {
        if !hierarchy.is_unified && !self.checks_v1 {
            return Ok(Cow::Borrowed(&action.change));
        }
        if let Some(process) = action.moved_process() {
            if self.is_locked(proc, process) {
                return Err(not_moved_outcome(process));
            }
            return Ok(Cow::Borrowed(&action.change));
        }
        let mut change = action.change.clone();
        if let CpusetChange::Create { initial_processes, .. } = &mut change
            && let Some(&first) = initial_processes.first()
        {
            initial_processes.retain(|process| !self.is_locked(proc, *process));
            if initial_processes.is_empty() {
                return Err(not_moved_outcome(first));
            }
        }
        Ok(Cow::Owned(change))
    }

    /// Whether the memory of the process is locked. A process that has ended has no memory.
    fn is_locked(&mut self, proc: &mut ProcDir, process: ProcessId) -> bool {
        let status = proc.status(process.pid);
        status.is_ok_and(|status| {
            self.memory_files.may_be_locked(process.pid, Uid(status.uid), MAX_LOCKED_TIME)
        })
    }
}

fn not_moved_outcome(process: ProcessId) -> CpusetOutcome {
    let reason = format!(
        "process {process} is not moved to another cgroup while its memory is, or may be, locked: the move would stop all \
         forks of the machine until the lock is released. As root: cat /proc/{}/task/*/stack says what it waits for",
        process.pid
    );
    CpusetOutcome::NotMoved { reason }
}
