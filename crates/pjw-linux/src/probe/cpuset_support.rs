//! Finds the cpuset hierarchy of this machine, and its manager.

use nix::unistd::Uid;
use pjw_core::cpuset_group::{CgroupCreator, CpusetHierarchy, CpusetSupport};
use pjw_core::own_cgroups::OwnCgroupNames;

use super::cpuset_test;
use crate::cgroup::{CgroupMounts, CpusetMount};
use crate::{sys::version, systemd};

/// Determines the cpuset support with a test cpuset, and describes it in sentences.
pub(super) fn find(own_cgroups: &OwnCgroupNames) -> (CpusetSupport, Vec<String>) {
    let found = find_hierarchy().map_err(str::to_owned).and_then(|(mount, hierarchy)| {
        let is_systemd = hierarchy == CpusetHierarchy::Systemd;
        let cgroup_owner = if is_systemd { CgroupCreator::Systemd } else { CgroupCreator::Warden };
        let result = cpuset_test::run(&mount, own_cgroups, cgroup_owner)?;
        let sentences = vec![describe_cpusets(&hierarchy, own_cgroups), describe_masks(&result)];
        Ok((
            CpusetSupport {
                hierarchy,
                affinity_persists: result.affinity_persists,
                ..CpusetSupport::default()
            },
            sentences,
        ))
    });
    found.unwrap_or_else(|why| {
        let hierarchy = CpusetHierarchy::Unavailable { why: why.clone() };
        let sentence = format!("{}: {why}", describe_cpusets(&hierarchy, own_cgroups));
        let affinity_persists = version::affinity_survives_by_version();
        (CpusetSupport { hierarchy, affinity_persists, ..CpusetSupport::default() }, vec![sentence])
    })
}

/// The cpuset hierarchy, and its kind. The error says why pjwd can't use cpusets.
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
    let hierarchy = mount.kind(systemd::is_running()).ok_or(
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

fn describe_cpusets(hierarchy: &CpusetHierarchy, own_cgroups: &OwnCgroupNames) -> String {
    let (directory, slice) = (own_cgroups.directory_path(), own_cgroups.slice_name());
    let how = match hierarchy {
        CpusetHierarchy::Systemd => format!("cpusets: systemd scopes below {slice}"),
        CpusetHierarchy::Unified => format!("cpusets: directories below {directory} in cgroup v2"),
        CpusetHierarchy::Legacy => format!("cpusets: directories below {directory} in the v1 hierarchy"),
        CpusetHierarchy::Unavailable { .. } => "affinity masks".to_owned(),
    };
    format!("jobs are confined to their cores by {how}")
}

fn describe_masks(result: &cpuset_test::TestResult) -> String {
    let how =
        if result.measured { "measured" } else { "by the kernel's version, because there is only one CPU" };
    if result.affinity_persists {
        format!("affinity masks survive cpuset writes ({how})")
    } else {
        format!("cpuset writes reset affinity masks, and pjwd restores the masks ({how})")
    }
}
