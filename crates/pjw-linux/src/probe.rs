//! What this kernel and this user can do, found at start, each with the sentence that people are told.

mod ground;
mod trial;

use std::path::Path;

use nix::unistd::Uid;
use pjw_core::wall::Ground;

use crate::cgroup::Mounts;
use crate::proc_events::{ProcEvents, ProcEventsFault};

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether other users' threads can be moved.
    pub every_user: bool,
    /// Whether the kernel tells how long threads waited for a PU.
    pub schedstat: bool,
    /// The cgroup layout: v1, v2, hybrid or none.
    pub cgroups: &'static str,
    /// What there is for walls.
    pub ground: Ground,
    /// One sentence for each thing found.
    pub sentences: Vec<String>,
}

/// Looks.
#[must_use]
pub fn probe() -> Capabilities {
    let every_user = Uid::effective().is_root();
    let schedstat = Path::new("/proc/self/schedstat").exists();
    let cgroups = Mounts::find().layout();
    let (ground, about_ground) = ground::find();
    let mut sentences = vec![
        if every_user {
            "runs as root: every user's processes can be kept on their cores".to_owned()
        } else {
            format!(
                "runs as user {}: only this user's processes can be kept on their cores",
                Uid::effective()
            )
        },
        if schedstat {
            "schedstat is there: demand counts the time spent waiting for a PU".to_owned()
        } else {
            "schedstat is missing (CONFIG_SCHED_INFO): demand counts run time only".to_owned()
        },
        format!("cgroup layout: {cgroups}"),
    ];
    sentences.extend(about_ground);
    Capabilities { every_user, schedstat, cgroups, ground, sentences }
}

/// What there is for walls, tried with one of the warden's own: it takes a process and a moment.
#[must_use]
pub fn ground() -> Ground {
    ground::find().0
}

/// Opens the kernel's process events, or says in a sentence why new processes are found by polling.
///
/// # Errors
/// That sentence.
pub fn events_or_why_not() -> Result<ProcEvents, String> {
    ProcEvents::open().map_err(|fault| match fault {
        ProcEventsFault::Denied => {
            "the kernel's process events need root (CAP_NET_ADMIN) before Linux 6.6: new processes are found by \
             polling"
                .to_owned()
        }
        ProcEventsFault::Silent => {
            "the kernel tells nothing of processes here, as in a pid, user or network namespace (container): new \
             processes are found by polling"
                .to_owned()
        }
        ProcEventsFault::Unsupported => {
            "this kernel has no process events (CONFIG_PROC_EVENTS): new processes are found by polling"
                .to_owned()
        }
        ProcEventsFault::Other(errno) => {
            format!(
                "the kernel's process events can't be opened ({errno}): new processes are found by polling"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pjw_core::wall::Cpusets;

    #[test]
    fn what_was_found_is_told_and_nothing_is_left_of_the_trial() {
        let found = probe();
        let (is_root, about) = (Uid::effective().is_root(), found.sentences.join("\n"));
        match &found.ground.cpusets {
            Cpusets::Nowhere { why } => assert!(about.contains(why) && about.contains("affinity"), "{about}"),
            _ => assert!(is_root && about.contains("by cpusets"), "{about}"),
        }
        let tree = crate::walls::Tree::find(&Mounts::find());
        let name = format!("probe-{}", std::process::id());
        let left =
            tree.and_then(|tree| tree.group(&format!("/pjw/{name}"))).filter(crate::walls::Group::exists);
        assert!(left.is_none());
    }
}
