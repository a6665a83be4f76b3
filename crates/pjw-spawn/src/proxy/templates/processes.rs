//! Queries to the kernel about the processes of a template: pidfds, open standard streams, and the online PUs.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use crate::child::{Child, end_without_pidfd};
use crate::failure::{SpawnError, SpawnStep};
use crate::proxy::refusal::ForkError;

/// Opens the pidfd of a process that a template has forked. If that fails, kills the process.
///
/// # Errors
/// [`ForkError::Ended`] if the process is no child of the calling process. The program of a template may belong to
/// another user, and could name any process.
pub(super) fn open_child(raw_pid: i32) -> Result<Child, ForkError> {
    let pid = Pid(raw_pid.cast_unsigned());
    // SAFETY: the call takes numbers.
    let pidfd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, raw_pid, 0) });
    let pidfd = pidfd.map_err(|errno| {
        end_without_pidfd(pid);
        SpawnError { step: SpawnStep::Clone, errno }
    })?;
    // SAFETY: the kernel has opened the descriptor for this call, and nothing else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(RawFd::try_from(pidfd).unwrap_or(-1)) };
    let child = Child { pid, pidfd };
    if child.is_own_or_ended() { Ok(child) } else { Err(ForkError::Ended) }
}

/// Returns the PUs (logical CPUs) that are online. Empty if the kernel does not report them.
pub(super) fn online_cpus() -> CpuSet {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// Returns whether the process `pid` has standard input, output and error open. If one is closed, a descriptor that the
/// process receives could get its number.
pub(super) fn has_streams(pid: Pid) -> bool {
    (0..3).all(|number| fs::symlink_metadata(format!("/proc/{}/fd/{number}", pid.0)).is_ok())
}
