//! The processes whose memory can't be read, and the reasons.

use nix::errno::Errno;
use nix::unistd::Uid;
use pjw_core::ids::Pid;
use pjw_linux::sys::errno::{is_gone, is_permission_denied};

/// A process of a job whose memory use pjwd could not read, for example because pjwd has no permission. The memory of
/// the other processes is measured all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedProcess {
    /// The process id.
    pub pid: Pid,
    /// The user id of the process.
    pub uid: u32,
    /// The reason, in one sentence.
    pub reason: String,
}

/// Returns the reason why the memory of a process of the user `uid` can't be read. `errno` is the error of the kernel.
pub(super) fn why_unreadable(errno: Errno, uid: u32) -> String {
    let own = Uid::effective().as_raw();
    if is_gone(errno) {
        "the kernel has no such file for it: /proc/PID/smaps_rollup needs Linux 4.14, numa_maps needs CONFIG_NUMA".to_owned()
    } else if is_permission_denied(errno) && uid != own {
        format!(
            "it belongs to user {uid}, and pjwd runs as user {own} without CAP_SYS_PTRACE: have root's pjwd read it"
        )
    } else if is_permission_denied(errno) {
        format!(
            "it forbids to be read (PR_SET_DUMPABLE of prctl(2)), it changed its user, or it has more capabilities than \
             pjwd, which runs as user {own} without CAP_SYS_PTRACE: have root's pjwd read it"
        )
    } else {
        format!("its memory can't be read: {}", errno.desc())
    }
}

/// The reason why a process is left out, because an earlier reading waits for the lock of the memory of a process.
pub(super) fn why_blocked(pid: Pid) -> String {
    format!(
        "its memory is, or may be, locked: an earlier reading still waits for a process of the job. As root: \
         cat /proc/{pid}/task/*/stack says what this one waits for"
    )
}
