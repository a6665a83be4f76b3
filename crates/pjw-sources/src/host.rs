//! The properties of this machine that are needed to read the attributes of a process.

use pjw_core::ids::Uid;

/// The properties of this machine that are needed to recognise its jobs: its name, to find it in the batch
/// systems' lists of hosts, and the user id of Flux's daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// The host name of this machine, with or without its domain, such as `n1` or `n1.example.org`.
    pub name: String,
    /// The user id under which the system instance of the batch system Flux runs, usually that of the user
    /// `flux`. `None` if there is no such instance.
    ///
    /// Flux runs its jobs as units of this user's service manager (`user@UID.service`), and pjw recognises the
    /// jobs by the names of their cgroups. Every other user can create cgroups with the same names below their
    /// own service manager. So a cgroup below a service manager is taken for a job only if the service manager
    /// belongs to this user id or to root.
    pub flux_user: Option<Uid>,
}
