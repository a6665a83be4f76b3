//! Finds the cpuset hierarchy of this machine, and its manager.

use nix::unistd::Uid;
use pjw_core::cpuset_group::{CgroupCreator, CpusetHierarchy, CpusetSupport, IdlePrioritySupport};
use pjw_core::own_cgroups::OwnCgroupNames;

use super::cpuset_test::{self, CpusetTestResult};
use crate::cgroup::{CgroupMounts, CpusetMount};
use crate::{sys::version, systemd};

/// The first kernel with `cpu.idle` (commit 304000390f88).
const FIRST_WITH_IDLE: (u32, u32) = (5, 15);
/// The first kernel with `cgroup.freeze` (commit 76f969e8948d).
const FIRST_WITH_FREEZE: (u32, u32) = (5, 2);

/// Determines whether and how pjwd can use cpusets on this machine, by a test with a temporary cpuset. Also returns
/// sentences for users that describe the result. `own_cgroups` has the names of the cgroups in which the temporary
/// cpuset is created.
pub(super) fn find_cpuset_support(own_cgroups: &OwnCgroupNames) -> (CpusetSupport, Vec<String>) {
    let found = find_hierarchy().map_err(str::to_owned).and_then(|(mount, hierarchy)| {
        let is_systemd = hierarchy == CpusetHierarchy::Systemd;
        let creator = if is_systemd { CgroupCreator::Systemd } else { CgroupCreator::Warden };
        let CpusetTestResult { affinity_persists, measured, idle, can_freeze } =
            cpuset_test::test_cpusets(&mount, own_cgroups, creator)?;
        let idle_priority = match idle_obstacle(&mount).or(idle.err()) {
            None => IdlePrioritySupport::Available,
            Some(why) => IdlePrioritySupport::Unavailable { why },
        };
        let sentences = vec![
            describe_cpusets(&hierarchy, own_cgroups),
            describe_masks(affinity_persists, measured),
            describe_idle_priority(&idle_priority, can_freeze),
        ];
        Ok((CpusetSupport { hierarchy, affinity_persists, idle_priority, can_freeze }, sentences))
    });
    found.unwrap_or_else(|why| {
        let hierarchy = CpusetHierarchy::Unavailable { why: why.clone() };
        let sentence = format!("{}: {why}", describe_cpusets(&hierarchy, own_cgroups));
        let affinity_persists = version::affinity_survives_by_version();
        let idle_priority = IdlePrioritySupport::Unavailable { why };
        (CpusetSupport { hierarchy, affinity_persists, idle_priority, can_freeze: false }, vec![sentence])
    })
}

/// Finds the mounted hierarchy with the cpuset controller, and returns it with the way in which pjwd can use it.
///
/// # Errors
/// The reason why pjwd can't use cpusets, as text for users.
fn find_hierarchy() -> Result<(CpusetMount, CpusetHierarchy), &'static str> {
    let mount = CpusetMount::from_mounts(&CgroupMounts::read());
    let mount = mount.ok_or("no cgroup hierarchy is mounted here, so there are no cpusets")?;
    if !Uid::effective().is_root() {
        return Err("only root may write cpusets: run pjwd as root");
    }
    if !is_complete(&mount) {
        return Err(
            "only a part of the node's cgroups is visible here, as in a container: run pjwd on the node \
             itself",
        );
    }
    let hierarchy = mount.hierarchy_kind(systemd::is_running()).ok_or(
        "cgroup v2 has no cpuset controller here: the kernel lacks CONFIG_CPUSETS, or was booted with \
         cgroup_disable=cpuset",
    )?;
    Ok((mount, hierarchy))
}

/// Whether the mount shows the whole hierarchy. In v2 only the root cgroup lacks `cgroup.events`; in v1 only
/// the root cgroup has `release_agent`.
fn is_complete(mount: &CpusetMount) -> bool {
    let top = mount.root();
    let is_v1_root = || top.dir.join("release_agent").exists();
    if mount.is_unified { top.read_file("cgroup.events").is_err() } else { is_v1_root() }
}

/// Returns the reason why a cgroup can't have idle priority (`cpu.idle`) on this machine, as text for users. `mount`
/// is the hierarchy with the cpuset controller. `None` if neither the kernel version nor the mounted controllers
/// prevent idle priority. Makes no test.
pub(crate) fn idle_obstacle(mount: &CpusetMount) -> Option<String> {
    let why = if !version::is_kernel_at_least(FIRST_WITH_IDLE) {
        "idle priority of cgroups (cpu.idle) needs Linux 5.15"
    } else if !mount.is_unified && mount.v1_cpu_mount_point.is_none() {
        "no v1 hierarchy with the cpu controller and without cpusets is mounted: mount one, or boot with cgroup v2"
    } else if mount.is_unified && mount.root().has_controller("cpu") != Ok(true) {
        "cgroup v2 has no cpu controller here: v1 uses it, or the kernel lacks CONFIG_FAIR_GROUP_SCHED, or was booted \
         with cgroup_disable=cpu"
    } else {
        return None;
    };
    Some(why.to_owned())
}

/// Returns whether the processes of a job cpuset can be frozen on this machine, according to the kernel version and
/// the mounted controllers. `mount` is the hierarchy with the cpuset controller. Makes no test.
pub(crate) fn has_freezer(mount: &CpusetMount) -> bool {
    if mount.is_unified {
        version::is_kernel_at_least(FIRST_WITH_FREEZE)
    } else {
        mount.v1_freezer_mount_point.is_some()
    }
}

/// Returns a sentence for users about how pjwd confines jobs to their cores: by which kind of cpusets, or by affinity
/// masks. `own_cgroups` has the names of the cgroups in which pjwd creates cpusets.
fn describe_cpusets(hierarchy: &CpusetHierarchy, own_cgroups: &OwnCgroupNames) -> String {
    let (directory, slice) = (own_cgroups.default_parent_path(), own_cgroups.slice_name());
    let how = match hierarchy {
        CpusetHierarchy::Systemd => format!("cpusets: systemd scopes below {slice}"),
        CpusetHierarchy::Unified => format!("cpusets: directories below {directory} in cgroup v2"),
        CpusetHierarchy::Legacy => format!("cpusets: directories below {directory} in the v1 hierarchy"),
        CpusetHierarchy::Unavailable { .. } => "affinity masks".to_owned(),
    };
    format!("jobs are confined to their cores by {how}")
}

fn describe_masks(affinity_persists: bool, measured: bool) -> String {
    let how = if measured { "measured" } else { "by the kernel's version, because there is only one CPU" };
    if affinity_persists {
        format!("affinity masks survive cpuset writes ({how})")
    } else {
        format!("cpuset writes reset affinity masks, and pjwd restores the masks ({how})")
    }
}

/// Returns a sentence for users about whether jobs of the class `besteffort` can run at idle priority, and whether
/// they can be frozen (`can_freeze`).
fn describe_idle_priority(idle_priority: &IdlePrioritySupport, can_freeze: bool) -> String {
    let freezing = if can_freeze { "can" } else { "can't" };
    match idle_priority {
        IdlePrioritySupport::Available => {
            format!("best-effort jobs run at idle priority (cpu.idle), and {freezing} be frozen")
        }
        IdlePrioritySupport::Unavailable { why } => {
            format!("best-effort jobs can't run at idle priority, and {freezing} be frozen: {why}")
        }
    }
}
