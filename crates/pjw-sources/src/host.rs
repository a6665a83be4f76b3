//! The properties of this machine that are needed to read the attributes of a process.

use pjw_core::ids::Uid;

/// The facts about this machine that pjw needs to recognise jobs: the host name, and the user id of the batch system
/// Flux. A batch system lists the machines of a job with a number of CPUs or slots for each machine. By the host
/// name, pjw finds the number for this machine. By the user id, pjw recognises the cgroups of Flux's jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LocalHost {
    /// The host name of this machine, with or without its domain, such as `n1` or `n1.example.org`.
    pub name: String,
    /// The user id of the user, usually `flux`, that runs the batch system Flux for the whole machine (Flux's
    /// system instance). `None` if no such instance runs on this machine.
    ///
    /// Flux runs its jobs as units of this user's service manager (`user@UID.service`). pjw recognises the
    /// jobs by the names of their cgroups. Every other user can create cgroups with the same names below the
    /// service manager of their own. Such a cgroup must not be taken for a job. Therefore, a cgroup below a
    /// service manager is taken for a job only if the service manager belongs to this user id or to root.
    pub flux_user: Option<Uid>,
}
