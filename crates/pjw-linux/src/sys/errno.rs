//! Classes of error numbers.

use std::io;

use nix::errno::Errno;

/// Returns whether the error `errno` means that the process, thread, file or cgroup does not exist. True for
/// `ENOENT`, `ENOTDIR`, `ESRCH` and `ENODEV`. Such an error is normal when files in `/proc` are read, because
/// the process can end meanwhile.
#[must_use]
pub fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ENOTDIR | Errno::ESRCH | Errno::ENODEV)
}

/// Returns whether the error `errno` means that the caller has no permission. True for `EPERM` and `EACCES`.
#[must_use]
pub fn is_permission_denied(errno: Errno) -> bool {
    matches!(errno, Errno::EPERM | Errno::EACCES)
}

/// The error number of an I/O error. `EIO` for an error that is not of the system.
pub(crate) fn from_io(error: io::Error) -> Errno {
    Errno::try_from(error).unwrap_or(Errno::EIO)
}

/// The error number of a system call that was made with rustix.
pub(crate) fn from_rustix(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
