//! The properties of this machine that are needed to read the attributes of a process.

use pjw_core::ids::Uid;

/// The properties of this machine with which its jobs are recognised: its name in lists of hosts, and the
/// account that runs Flux's daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// The name of this machine, short or full: `n1` and `n1.example.org` are names of the same host.
    pub name: String,
    /// The user id under which Flux's system instance runs, usually that of the user `flux`. `None` if there
    /// is no such instance. Every user can choose the cgroup names below their own service manager. So the
    /// names of Flux jobs there are trusted only for this user and for root.
    pub flux_user: Option<Uid>,
}
