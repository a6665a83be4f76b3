//! The properties of this machine that are needed to read the attributes of a process.

use pjw_core::ids::Uid;

/// The properties of this machine by which its jobs are recognised: its name in lists of hosts, and the user of Flux's
/// daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// The name of this machine, short or full: `n1` and `n1.example.org` count as the same host.
    pub name: String,
    /// The user id under which Flux's system instance runs, if there is one (usually that of the user `flux`).
    /// Below a user's own service manager every user can choose cgroup names; so names of Flux jobs there are
    /// trusted only for this user and root.
    pub flux_user: Option<Uid>,
}
