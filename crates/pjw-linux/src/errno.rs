//! What an error number means here, told apart once.

use nix::errno::Errno;

/// The meaning of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The process, thread or file is no longer there: normal in /proc.
    Gone,
    /// This user may not.
    Denied,
    /// Try again later.
    Busy,
    /// This kernel lacks it.
    Unsupported,
    /// Something else.
    Other,
}

/// What an error number means for things in /proc, cgroups and scheduling calls.
#[must_use]
pub fn meaning(errno: Errno) -> Meaning {
    match errno {
        Errno::ENOENT | Errno::ESRCH | Errno::ENODEV => Meaning::Gone,
        Errno::EPERM | Errno::EACCES => Meaning::Denied,
        Errno::EBUSY | Errno::EAGAIN | Errno::EINTR => Meaning::Busy,
        Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
            Meaning::Unsupported
        }
        _ => Meaning::Other,
    }
}
