//! The description of one process of a group.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::arguments::Arguments;
use crate::placement::Placement;

/// The description of one process that is to be started in a group of processes of the same program: its rank,
/// arguments, environment variables, placement and standard streams. The properties that all processes of the group
/// share are in the [`SpawnContext`](crate::SpawnContext).
#[derive(Debug, Clone)]
pub struct Instance {
    /// The position of this process in the group, counted from 0.
    pub rank: u32,
    /// The number of processes in the group.
    pub size: u32,
    /// The argument list, which may contain placeholders for `rank` and `size`. Instances with the same list
    /// should share one `Arc`, which makes their start faster.
    pub arguments: Arc<Arguments>,
    /// The environment variables of this instance only, each as `NAME=value`. They come after the variables that the
    /// [`SpawnContext`](crate::SpawnContext) gives to all instances. A name must not occur twice in this list, and must
    /// not be the name of a variable of the context. This is not checked: getenv(3) then returns the first value.
    pub variables: Vec<CString>,
    /// The affinity mask, the preferred NUMA node and the cgroup of the instance. Instances with the same
    /// placement should share one `Arc`: then one thread starts them without changing its affinity mask.
    pub placement: Arc<Placement>,
    /// The standard streams of the instance: input, output and error.
    pub stdio: Stdio,
}

/// The descriptors that become the standard input, standard output and standard error of a started process. If a
/// descriptor is `None`, the process inherits this stream from the caller.
#[derive(Debug, Clone, Default)]
pub struct Stdio {
    /// The descriptor for standard input. `None` for the standard input of the caller.
    pub input: Option<Arc<OwnedFd>>,
    /// The descriptor for standard output. `None` for the standard output of the caller.
    pub output: Option<Arc<OwnedFd>>,
    /// The descriptor for standard error. `None` for the standard error of the caller.
    pub error: Option<Arc<OwnedFd>>,
}
