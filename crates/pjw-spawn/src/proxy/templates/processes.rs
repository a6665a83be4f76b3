//! What the kernel tells about a template and its instances: pidfds, streams, and the online PUs.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use crate::child::Child;
use crate::failure::{SpawnError, SpawnStep};
use crate::proxy::refusal::ForkError;

/// Opens the pidfd of a child that was not waited for.
pub(super) fn open_child(pid: i32) -> Result<Child, ForkError> {
    // SAFETY: the call takes numbers.
    let pidfd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) });
    let pidfd = pidfd.map_err(|errno| SpawnError { step: SpawnStep::Clone, errno })?;
    // SAFETY: the kernel has opened the descriptor for this call, and nothing else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(RawFd::try_from(pidfd).unwrap_or(-1)) };
    Ok(Child { pid: Pid(pid.cast_unsigned()), pidfd })
}

/// Returns the PUs that are online. Empty if the kernel does not tell.
pub(super) fn online_cpus() -> CpuSet {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// Whether a process has the streams 0 to 2. Without one, a received descriptor could take its number.
pub(super) fn has_streams(pid: Pid) -> bool {
    (0..3).all(|number| fs::symlink_metadata(format!("/proc/{}/fd/{number}", pid.0)).is_ok())
}
