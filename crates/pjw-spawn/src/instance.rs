//! One process of a group.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::placement::Placement;
use crate::template::Arguments;

/// One process of a group.
#[derive(Debug, Clone)]
pub struct Instance {
    /// The number of the instance in the group, from 0.
    pub rank: u32,
    /// The number of instances in the group.
    pub size: u32,
    /// The arguments. Instances with the same arguments share one list.
    pub arguments: Arc<Arguments>,
    /// Variables of this instance only, each as `NAME=value`. They come after the variables of the context. The caller
    /// must not repeat a name: the first one is found by getenv(3).
    pub variables: Vec<CString>,
    /// Where the instance runs. Instances on the same part share one placement.
    pub placement: Arc<Placement>,
    /// The streams 0 to 2.
    pub stdio: Stdio,
}

/// The streams 0 to 2 of an instance. `None` for the stream of the caller.
#[derive(Debug, Clone, Default)]
pub struct Stdio {
    /// Standard input.
    pub input: Option<Arc<OwnedFd>>,
    /// Standard output.
    pub output: Option<Arc<OwnedFd>>,
    /// Standard error.
    pub error: Option<Arc<OwnedFd>>,
}
