//! Classes of error numbers.

use nix::errno::Errno;

/// The class of an error number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The process, thread or file no longer exists. Normal in /proc.
    Gone,
    /// This user lacks permission.
    Denied,
    /// A later attempt may succeed.
    Busy,
    /// This kernel lacks the feature.
    Unsupported,
    /// Any other error.
    Other,
}

/// The class of an error number from /proc, from a cgroup file or from a scheduling call.
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
