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

/// Returns the error number of `error`. Returns `EIO` if `error` has no error number, because it is no error of a
/// system call.
pub(crate) fn from_io(error: io::Error) -> Errno {
    Errno::try_from(error).unwrap_or(Errno::EIO)
}

/// Converts `error`, an error number in the type of the library rustix, to the same error number in the type of the
/// library nix.
pub(crate) fn from_rustix(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
