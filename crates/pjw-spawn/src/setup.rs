//! The parameters that a context gives to each of its instances: the program, the environment, the credentials, signals
//! and limits.

use std::ffi::CString;
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};

use crate::credentials::Credentials;
use crate::replicate::Replicas;
use crate::signals::KernelSignals;
use crate::tasks::image::TaskProgram;

/// The parameters that all instances (processes) of a [`SpawnContext`](crate::SpawnContext) have in common, such as the
/// program and the credentials.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    /// The path of the program.
    pub(crate) program: CString,
    /// The variables of every instance, each as `NAME=value`.
    pub(crate) environment: Vec<CString>,
    /// The user and the groups. `None` for those of the caller.
    pub(crate) credentials: Option<Credentials>,
    /// The working directory. `None` for that of the caller.
    pub(crate) directory: Option<CString>,
    /// Whether the kernel kills an instance when its spawner thread (the thread that started it) ends.
    pub(crate) ends_with_launcher: bool,
    /// Whether each instance gets `PJW_RANK`, `PJW_SIZE` and `PJW_CPUS`.
    pub(crate) has_rank_variables: bool,
    /// The stop point of the templates from which instances are forked. An instance executes the program instead if the
    /// program can't have a template. `None` if every instance executes the program.
    pub(crate) template_stop_point: Option<TemplateStopPoint>,
    /// The program, if the instances share one address space. `None` if each instance has an address space of its own.
    pub(crate) task_program: Option<Arc<TaskProgram>>,
    /// The copies of the program's files on NUMA nodes, which are used by the instances with a preferred NUMA node.
    /// `None` if there are no copies.
    pub(crate) replicas: Option<Arc<Replicas>>,
    /// The signals that are blocked at the beginning of the program.
    pub(crate) blocked_signals: KernelSignals,
    /// The limit of open descriptors (`RLIMIT_NOFILE`, soft and hard) at the beginning of the program.
    pub(crate) descriptor_limit: Option<(u64, u64)>,
}

/// The point in the program at which a template stops. A template is a process from which instances of the program are
/// forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TemplateStopPoint {
    /// The template stops before `main`, when its program is linked with its libraries.
    Linked,
    /// The template stops when its program calls `fork_here`.
    Late,
}

impl Setup {
    /// Returns the limit of open descriptors (`RLIMIT_NOFILE`) that a new process must set for itself. `None` if the
    /// calling process still has this limit, so that the new process inherits it.
    pub(crate) fn descriptor_limit_to_restore(&self) -> Option<libc::rlimit64> {
        let (soft, hard) = self.descriptor_limit?;
        let current = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
        (current != (soft, hard)).then_some(libc::rlimit64 { rlim_cur: soft, rlim_max: hard })
    }
}
