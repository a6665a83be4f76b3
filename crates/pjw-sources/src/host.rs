//! The properties of this machine that are needed to read the attributes of a process.

use pjw_core::ids::Uid;

/// The properties of this machine by which its jobs are recognised: its name in lists of hosts, and the user of Flux's
/// daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// The host name, short or full: `n1` and `n1.example.org` match each other.
    pub name: String,
    /// The user id of Flux's system instance, if there is one (its user is usually called `flux`). Cgroup names below
    /// a service manager are trusted only for this user and root: every other user can choose the names there.
    pub flux_user: Option<Uid>,
}
