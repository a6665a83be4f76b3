//! Capabilities of this kernel and this user, determined at start. Each has a sentence for people.

mod cpuset_support;
mod cpuset_test;

pub(crate) use cpuset_support::{has_freezer, idle_obstacle};

use std::path::Path;

use nix::unistd::Uid;
use pjw_core::cpuset_group::CpusetSupport;
use pjw_core::own_cgroups::OwnCgroupNames;

use crate::cgroup::CgroupMounts;
use crate::proc::events::{ProcEventSocket, ProcEventsError};

/// What the kernel allows this process to do: whether this process can set the affinity masks of all users' threads,
/// and in which cgroup hierarchy it can create cpusets. Also contains a description of these results as text for the
/// user. [`probe_kernel_support`] determines these values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSupport {
    /// Whether this process may set the affinity masks of threads of all users. If false, it may set only the
    /// masks of its own user's threads.
    pub can_set_all_masks: bool,
    /// The cgroup hierarchy in which cpusets can be created, or the reason why none can.
    pub cpuset_support: CpusetSupport,
    /// The results of the probe as text for the user: one sentence for each facility of the kernel. pjwd logs
    /// these sentences when it starts.
    pub descriptions: Vec<String>,
}

/// Determines what the kernel allows this process to do: whether this process can set the affinity masks of all users'
/// threads, and in which cgroup hierarchy it can create cpusets. Only root counts as able to set all masks. If there is
/// a hierarchy for cpusets, the function tests it with temporary cpusets and a temporary process, and removes them
/// before it returns. `own_cgroups` has the names of the cgroups in which pjwd creates the cpusets of jobs. The
/// function creates the temporary cpusets in the same cgroups.
#[must_use]
pub fn probe_kernel_support(own_cgroups: &OwnCgroupNames) -> KernelSupport {
    let can_set_all_masks = Uid::effective().is_root();
    let schedstat = Path::new("/proc/self/schedstat").exists();
    let (cpuset_support, about_cpusets) = cpuset_support::find_cpuset_support(own_cgroups);
    let mut descriptions = vec![
        if can_set_all_masks {
            "runs as root: processes of all users can be confined".to_owned()
        } else {
            format!("runs as user {}: only processes of this user can be confined", Uid::effective())
        },
        if schedstat {
            "schedstat is available: demand includes the time waiting for a PU".to_owned()
        } else {
            "schedstat is missing (CONFIG_SCHED_INFO): demand includes run time only".to_owned()
        },
        format!("cgroup layout: {}", CgroupMounts::read().layout_name()),
    ];
    descriptions.extend(about_cpusets);
    KernelSupport { can_set_all_masks, cpuset_support, descriptions }
}

/// Determines in which cgroup hierarchy this process can create cpusets, or why it can create none. Also determines
/// whether threads keep their affinity masks when their cpuset changes, and whether the processes in a cpuset can be
/// frozen and can have idle priority. The function tests this with temporary cpusets and a temporary process, and
/// removes them before it returns. `own_cgroups` has the names of the cgroups in which pjwd creates the cpusets of
/// jobs. The function creates the temporary cpusets in the same cgroups.
#[must_use]
pub fn probe_cpuset_support(own_cgroups: &OwnCgroupNames) -> CpusetSupport {
    cpuset_support::find_cpuset_support(own_cgroups).0
}

/// Opens the socket on which the kernel reports process events (fork, exec and exit). From these events, pjwd learns of
/// new processes without polling `/proc`. As a test, starts threads, and waits at most 200 ms until the kernel reports
/// the start of one of them.
///
/// # Errors
/// If process events are not available. The error is a sentence for the user that says why.
pub fn open_process_events() -> Result<ProcEventSocket, String> {
    ProcEventSocket::open().map_err(|fault| {
        let why = match fault {
            ProcEventsError::PermissionDenied => {
                "the kernel's process events need root (CAP_NET_ADMIN) before Linux 6.6"
            }
            ProcEventsError::NoEvents => {
                "the kernel sends no process events here, as in a pid, user or network namespace (container)"
            }
            ProcEventsError::Unsupported => "this kernel has no process events (CONFIG_PROC_EVENTS)",
            ProcEventsError::Other(errno) => {
                &format!("the kernel's process events can't be opened ({errno})")
            }
        };
        format!("{why}: new processes are found by polling")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::alone_with_cpusets;
    use pjw_core::cpuset_group::{CpusetHierarchy, IdlePrioritySupport};

    #[test]
    fn the_result_has_sentences_and_the_test_cpuset_is_removed() {
        let _alone = alone_with_cpusets();
        let found = probe_kernel_support(&OwnCgroupNames::default());
        let (is_root, about) = (Uid::effective().is_root(), found.descriptions.join("\n"));
        match &found.cpuset_support.hierarchy {
            CpusetHierarchy::Unavailable { why } => {
                assert!(about.contains(why) && about.contains("affinity"), "{about}");
            }
            _ => assert!(is_root && about.contains("by cpusets"), "{about}"),
        }
        let hierarchy = crate::cgroup::CpusetMount::from_mounts(&CgroupMounts::read());
        let support = &found.cpuset_support;
        if let (Some(mount), false) =
            (&hierarchy, matches!(support.hierarchy, CpusetHierarchy::Unavailable { .. }))
        {
            assert_eq!(support.can_freeze, has_freezer(mount), "{about}");
            match &support.idle_priority {
                IdlePrioritySupport::Available => assert_eq!(idle_obstacle(mount), None),
                IdlePrioritySupport::Unavailable { why } => {
                    // The files do not say whether a thread with a real-time policy is in the way.
                    assert!(idle_obstacle(mount).is_some() || why.contains("real-time"), "{about}");
                }
            }
        }
        let name = format!("probe-{}", std::process::id());
        let left = hierarchy.iter().flat_map(|hierarchy| {
            let path = format!("/pjw_besteffort/{name}");
            let twins =
                [hierarchy.v1_cpu_cgroup(&path), hierarchy.v1_freezer_cgroup(&path), hierarchy.cgroup(&path)];
            twins.into_iter().chain([hierarchy.cgroup(&format!("/pjw/{name}"))]).flatten()
        });
        let left: Vec<_> = left.filter(crate::cgroup::CgroupDir::exists).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
