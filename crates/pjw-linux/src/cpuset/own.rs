//! The warden's own cgroups: below `/pjw`, and at the root as `/pjw-…` for isolated cpusets.
//!
//! In v2 the cpuset controller must be enabled from the root down. An extended attribute of `/pjw` records
//! that the warden enabled the controller. So the controller can be disabled again when the last cpuset is
//! removed.

use nix::errno::Errno;
use pjw_core::cpuset_group::{CpusetOutcome, PJW_DIRECTORY};
use rustix::fs::XattrFlags;

use super::{
    bounds::refusal,
    context::{Result, refused},
};
use crate::cgroup::{CgroupDir, CpusetMount, SUBTREE_CONTROL};

/// Since Linux 5.7 cgroups have `user.` attributes. Before, they have only `trusted.` attributes, which need
/// `CAP_SYS_ADMIN`.
const ENABLED_MARKS: [&str; 2] = ["user.pjw.switched-on", "trusted.pjw.switched-on"];

/// Creates a cpuset's cgroup and the cgroups above it.
pub(super) fn create(hierarchy: &CpusetMount, job_cpuset: &CgroupDir) -> Result<()> {
    let base = hierarchy
        .cgroup(PJW_DIRECTORY)
        .ok_or_else(|| refused(format!("{PJW_DIRECTORY} is no cgroup path")))?;
    let at_the_top = job_cpuset.parent().path == "/";
    if !is_own(job_cpuset) {
        return Err(refused(format!(
            "the cgroup {} does not belong to pjwd and is not created",
            job_cpuset.path
        )));
    }
    let create_dir = |group: &CgroupDir| group.create().map_err(refusal(group, "be created"));
    if hierarchy.unified {
        // Also for a cgroup at the root: this directory carries the mark.
        create_dir(&base)?;
        enable_controller(&hierarchy.root(), Some(&base))?;
        if !at_the_top {
            enable_controller(&base, None)?;
        }
    } else if !at_the_top {
        create_dir(&base)?;
        sync_with_root(hierarchy, &base)?;
    }
    create_dir(job_cpuset)
}

/// Whether this is a cgroup that the warden creates itself.
pub(super) fn is_own(job_cpuset: &CgroupDir) -> bool {
    let name = job_cpuset.path.strip_prefix(PJW_DIRECTORY).and_then(|rest| rest.strip_prefix(['/', '-']));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Gives `/pjw` all CPUs and nodes of the root cgroup. In v1 this is needed after each hotplug: v1 removes an
/// offline CPU for good.
fn sync_with_root(hierarchy: &CpusetMount, base: &CgroupDir) -> Result<()> {
    let top = hierarchy.root().read_cpuset().map_err(refusal(&hierarchy.root(), "be read"))?;
    let now = base.read_cpuset().map_err(refusal(base, "be read"))?;
    for (file, now, all) in [("cpuset.mems", now.mems, top.mems), ("cpuset.cpus", now.cpus, top.cpus)] {
        if now != all {
            base.write_file(file, &all.to_string()).map_err(refusal(base, &format!("get {file} {all}")))?;
        }
    }
    Ok(())
}

/// Restores what hotplug removed from the parent of one of the warden's own cgroups.
pub(super) fn repair_parent(hierarchy: &CpusetMount, job_cpuset: &CgroupDir) {
    let above = job_cpuset.parent();
    if !hierarchy.unified && above.path == PJW_DIRECTORY {
        // If this fails, the kernel refuses the next write with a reason of its own.
        let _ = sync_with_root(hierarchy, &above);
    }
}

pub(super) fn enable_controller(group: &CgroupDir, mark_on: Option<&CgroupDir>) -> Result<()> {
    if group.enables_controller("cpuset") {
        return Ok(());
    }
    // The mark comes first: when the last cpuset is removed, a mark without an enabled controller does no
    // harm.
    if let Some(base) = mark_on
        && !ENABLED_MARKS
            .iter()
            .any(|name| rustix::fs::setxattr(&base.dir, *name, b"1", XattrFlags::empty()).is_ok())
    {
        tracing::warn!(
            cgroup = base.path,
            "the mark could not be written: the cpuset controller will stay enabled"
        );
    }
    group.write_file(SUBTREE_CONTROL, "+cpuset").map_err(|errno| {
        let why = match errno {
            Errno::ENOENT if group.path != "/" => return CpusetOutcome::Gone,
            Errno::ENOENT | Errno::EINVAL => "this kernel has no cpuset controller in v2, or v1 uses it",
            Errno::EBUSY => "the cgroup holds processes itself",
            other => other.desc(),
        };
        refused(format!("the cpuset controller can't be enabled below {}: {why} ({errno:?})", group.path))
    })
}

/// Called after a cpuset was removed. After the last one, removes `/pjw` and disables the controller again,
/// unless another program uses the controller.
pub(super) fn clean_up(hierarchy: &CpusetMount) {
    let Some(base) = hierarchy.cgroup(PJW_DIRECTORY) else { return };
    let prefix = format!("{PJW_DIRECTORY}-");
    let others = hierarchy.root().children();
    let is_last = base.children().is_empty() && !others.iter().any(|group| group.path.starts_with(&prefix));
    if !base.exists() || !is_last || base.read_file("cgroup.procs").is_ok_and(|procs| !procs.is_empty()) {
        return;
    }
    let mut buffer = [0u8; 8];
    let marked =
        ENABLED_MARKS.iter().any(|name| rustix::fs::getxattr(&base.dir, *name, &mut buffer[..]).is_ok());
    let used = |group: &CgroupDir| {
        let files = group.read_cpuset().unwrap_or_default();
        let is_member = matches!(files.partition.as_str(), "" | "member");
        group.enables_controller("cpuset") || !files.cpus.is_empty() || !files.mems.is_empty() || !is_member
    };
    if hierarchy.unified && marked && !others.iter().filter(|group| group.path != base.path).any(used) {
        let off = base
            .write_file(SUBTREE_CONTROL, "-cpuset")
            .and_then(|()| hierarchy.root().write_file(SUBTREE_CONTROL, "-cpuset"));
        if let Err(errno) = off {
            tracing::warn!(%errno, "the cpuset controller could not be disabled again");
        }
    }
    // Not recursively: another warden may have created a cgroup below it just now.
    let _ = std::fs::remove_dir(&base.dir);
}
