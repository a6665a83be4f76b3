//! The processes that a reading leaves out, because it would wait for the lock of their memory.

use std::collections::BTreeSet;

use pjw_core::ids::Pid;
use pjw_linux::proc::procfs::ProcDir;

use super::progress::ReadingProgress;
use super::spaces::LiveProcess;

/// Returns the processes whose memory can't be read now, because another thread holds the lock of their address space
/// (`mmap_lock`): reading would block. `processes` are the processes of the job. `spaces` has the number of the
/// address space of each of them, `None` if unknown. `progress` knows the earlier readings that still wait. If none
/// waits for one of the processes, the result is empty. Otherwise it contains:
///
/// 1. The processes for whose `mmap_lock` an earlier reading waits.
/// 2. The processes with a thread in uninterruptible sleep (state `D`), which probably wait for the same file system.
/// 3. The processes that share an address space with a process of 1 or 2.
pub(super) fn find_processes_with_held_mmap_lock(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    spaces: &[Option<u32>],
    progress: &dyn ReadingProgress,
) -> BTreeSet<Pid> {
    let pids = || processes.iter().map(|process| process.id.pid);
    let mut blocked: BTreeSet<Pid> = pids().filter(|pid| progress.is_mmap_lock_awaited(*pid)).collect();
    if blocked.is_empty() {
        return blocked;
    }
    let mut has_blocked_thread = |pid: Pid| {
        let tids = proc.tids(pid).unwrap_or_default();
        tids.into_iter().any(|tid| proc.thread_stat(pid, tid).is_ok_and(|stat| stat.state == 'D'))
    };
    blocked.extend(pids().filter(|pid| has_blocked_thread(*pid)));
    let pids_with_space = || pids().zip(spaces).filter_map(|(pid, space)| Some((pid, (*space)?)));
    let blocked_spaces: BTreeSet<u32> =
        pids_with_space().filter(|(pid, _)| blocked.contains(pid)).map(|(_, space)| space).collect();
    let in_blocked_space = pids_with_space().filter(|(_, space)| blocked_spaces.contains(space));
    blocked.extend(in_blocked_space.map(|(pid, _)| pid));
    blocked
}
