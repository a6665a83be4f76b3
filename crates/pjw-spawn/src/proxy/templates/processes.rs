//! Queries to the kernel about the processes of a template: pidfds, open standard streams, and the online PUs.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use crate::child::{Child, end_without_pidfd};
use crate::failure::{SpawnError, SpawnStep};
use crate::proxy::refusal::{ForkError, TemplateError};

/// Checks whether the calling process can open pidfds by pidfd_open(2), as [`open_child`] does for each process that a
/// template forks. Opens a pidfd of the calling process for this.
///
/// # Errors
/// [`TemplateError::PidfdForbidden`] if the call is forbidden or missing.
pub(super) fn check_pidfd_open() -> Result<(), TemplateError> {
    match open_pidfd(std::process::id().cast_signed()) {
        Ok(_) => Ok(()),
        Err(errno @ (Errno::EPERM | Errno::EACCES | Errno::ENOSYS)) => {
            Err(TemplateError::PidfdForbidden(errno))
        }
        Err(errno) => Err(TemplateError::Failed { step: "pidfd_open", errno }),
    }
}

fn open_pidfd(pid: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes numbers.
    let pidfd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: the kernel has opened the descriptor for this call, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(pidfd).unwrap_or(-1)) })
}

/// Opens the pidfd of a process that a template has forked. If that fails, kills the process.
///
/// # Errors
/// [`ForkError::Ended`] if the process is no child of the calling process. The program of a template may belong to
/// another user, and could name any process.
pub(super) fn open_child(raw_pid: i32) -> Result<Child, ForkError> {
    let pid = Pid(raw_pid.cast_unsigned());
    let pidfd = open_pidfd(raw_pid).map_err(|errno| {
        end_without_pidfd(pid);
        SpawnError { step: SpawnStep::Clone, errno }
    })?;
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
