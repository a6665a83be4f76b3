//! The cgroups that pjwd creates: below its directory `/pjw`, at the root as `/pjw-…` for isolated cpusets, and below
//! `/pjw_besteffort` for jobs at idle priority. A pjwd that runs beside another uses other names ([`OwnCgroupNames`]).
//! The path of a cgroup shows which pjwd created it.
//!
//! In v2, the cpuset controller must be enabled from the root down. The mark, an extended attribute of the directory,
//! records that pjwd enabled the controller. So the controller can be disabled again when the last cpuset is removed.
//! If another pjwd still has cpusets then, its directory gets the mark. In the same way, a mark on the directory
//! `/pjw_besteffort` records that pjwd enabled the cpu controller.

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::{
    context::{Result, refused_outcome},
    writing::{KnownCpusets, errno_to_outcome, read_cpuset, write_list},
};
use crate::cgroup::{CgroupDir, CpusetConfig, CpusetMount, SUBTREE_CONTROL};

/// The name of the extended attribute that is the mark.
const ENABLED_MARK: &str = "pjw.switched-on";
/// The maximum number of attempts to create a cgroup, if its parent disappears meanwhile.
const MAX_ATTEMPTS: usize = 3;
/// The name of the controller that limits the PUs and NUMA nodes of cgroups.
const CPUSET: &str = "cpuset";
/// The name of the controller that gives cgroups idle priority.
pub(super) const CPU: &str = "cpu";

/// Creates the cgroup `job_cpuset`, in which pjwd confines a job, and the cgroups above it. Succeeds if the cgroup
/// already exists. In cgroup v2, also enables the cpuset controller in these cgroups. Returns the cpusets of the
/// cgroup and of its parent, as far as they are known without reading them again.
///
/// # Errors
/// If the path of the cgroup is not one that pjwd uses for jobs, or if the kernel refuses a step.
pub(super) fn create_job_cgroup(hierarchy: &CpusetMount, job_cpuset: &CgroupDir) -> Result<KnownCpusets> {
    let Some(base) = find_top_cgroup(hierarchy, job_cpuset) else {
        return Err(refused_outcome(format!(
            "the cgroup {} does not belong to pjwd and is not created",
            job_cpuset.path
        )));
    };
    let parent_group = job_cpuset.parent();
    let is_parent_root = parent_group.path == "/";
    let create_dir =
        |group: &CgroupDir| group.create_if_missing().map_err(errno_to_outcome(group, "be created"));
    let mut parent_cpuset = None;
    if hierarchy.is_unified {
        // The directory is also needed if the cgroup is not below it, because the directory has the mark.
        create_dir(&base)?;
        enable_controller(&hierarchy.root(), CPUSET, Some(&base))?;
        if !is_parent_root {
            create_dir(&parent_group)?;
            enable_controller(&parent_group, CPUSET, None)?;
        }
    } else if !is_parent_root {
        parent_cpuset = Some(match sync_with_root(hierarchy, &parent_group) {
            Err(CpusetOutcome::Gone) => {
                create_dir(&parent_group)?;
                sync_with_root(hierarchy, &parent_group)?
            }
            synced => synced?,
        });
    }
    // A new cpuset has no settings yet. In v1 it may have those of its parent (`cgroup.clone_children`): pjwd writes
    // its own ones over them.
    let own = create_dir(job_cpuset)?.then(CpusetConfig::default);
    Ok(KnownCpusets { own, parent: parent_cpuset })
}

/// Calls `create`, which creates the cgroup `group` and its parent. If the parent disappears meanwhile, calls `create`
/// again. In total, makes at most [`MAX_ATTEMPTS`] calls. The parent can disappear because another pjwd that removes
/// its last cpuset also removes the parent.
pub(super) fn retry_while_parent_disappears<T>(
    group: &CgroupDir,
    create: impl Fn() -> Result<T>,
) -> Result<T> {
    for _ in 0..MAX_ATTEMPTS {
        match create() {
            Err(CpusetOutcome::Gone) => {}
            created => return created,
        }
    }
    let path = &group.path;
    Err(refused_outcome(format!("the cgroup {path} can't be created: its parent is removed again and again")))
}

/// Returns the top cgroup (such as `/pjw`) of the pjwd that created the cgroup `job_cpuset`. `None` if the path of
/// `job_cpuset` is not one that pjwd uses for jobs.
pub(super) fn find_top_cgroup(hierarchy: &CpusetMount, job_cpuset: &CgroupDir) -> Option<CgroupDir> {
    let own_cgroups = OwnCgroupNames::from_cgroup_path(&job_cpuset.path)?;
    let top_path = own_cgroups.default_parent_path();
    let besteffort = job_cpuset.path.strip_prefix(&own_cgroups.besteffort_parent_path());
    let name = match besteffort {
        Some(below) => below.strip_prefix('/')?,
        None => job_cpuset.path.strip_prefix(&top_path)?.strip_prefix(['/', '-'])?,
    };
    (!name.is_empty() && !name.contains('/')).then(|| hierarchy.cgroup(&top_path))?
}

/// Gives the v1 cgroup `base` all PUs (logical CPUs) and NUMA nodes of the root cgroup, and returns them. `base` is a
/// cgroup in which pjwd creates the cgroups of jobs. This is needed after each hotplug: v1 removes an offline PU for
/// good.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if `base` does not exist. [`CpusetOutcome::Refused`] if the kernel refuses a value.
fn sync_with_root(hierarchy: &CpusetMount, base: &CgroupDir) -> Result<CpusetConfig> {
    let (top, now) = (read_cpuset(&hierarchy.root())?, read_cpuset(base)?);
    write_list(base, "cpuset.mems", &now.mems, &top.mems)?;
    write_list(base, "cpuset.cpus", &now.cpus, &top.cpus)?;
    Ok(top)
}

/// Gives the parent of the cgroup `job_cpuset` all PUs (logical CPUs) and NUMA nodes of the root cgroup. In cgroup
/// v1, this is necessary after CPU hotplug, because v1 removes an offline PU from a cpuset permanently. Has no effect
/// in v2, or if pjwd did not create `job_cpuset`. Errors are ignored.
pub(super) fn repair_parent(hierarchy: &CpusetMount, job_cpuset: &CgroupDir) {
    let parent = job_cpuset.parent();
    if !hierarchy.is_unified && parent.path != "/" && find_top_cgroup(hierarchy, job_cpuset).is_some() {
        // If this fails, the kernel refuses the next write with a reason of its own.
        let _ = sync_with_root(hierarchy, &parent);
    }
}

/// Enables `controller` for the children of the v2 cgroup `group`, if it is not enabled yet. If `mark_on` is a
/// cgroup, writes an extended attribute of this cgroup before, which records that pjw enabled the controller.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if `group` does not exist. [`CpusetOutcome::Refused`] if the kernel refuses the
/// controller.
pub(super) fn enable_controller(
    group: &CgroupDir,
    controller: &str,
    mark_on: Option<&CgroupDir>,
) -> Result<()> {
    if group.enables_controller(controller) {
        return Ok(());
    }
    // The mark is written first: a mark without an enabled controller does no harm when the last cpuset is removed.
    if let Some(base) = mark_on {
        mark(base);
    }
    group.write_file(SUBTREE_CONTROL, &format!("+{controller}")).map_err(|errno| {
        let why = match errno {
            Errno::ENOENT if group.path != "/" => return CpusetOutcome::Gone,
            Errno::EINVAL if group.has_controller(controller) == Ok(true) => {
                "a thread outside the root cgroup has a real-time policy: move it to the root cgroup, or give it \
                 another policy"
            }
            Errno::ENOENT | Errno::EINVAL => "this kernel does not have it in v2, or v1 uses it",
            Errno::EBUSY => "the cgroup holds processes itself",
            other => other.desc(),
        };
        refused_outcome(format!("the controller {controller} can't be enabled below {}: {why} ({errno:?})", group.path))
    })
}

/// Marks the cgroup `base`: records that pjw enabled the controller. An error is only logged.
fn mark(base: &CgroupDir) {
    if !base.write_attribute(ENABLED_MARK, "1") {
        tracing::warn!(cgroup = base.path, "the mark could not be written: the controller will stay enabled");
    }
}

/// Removes `base`, the top cgroup of this pjwd such as `/pjw`, if no job has a cpuset any more. Must be called after
/// the cpuset of a job was removed. Before, removes the cgroup of the jobs at idle priority if it is also unused.
pub(super) fn remove_unused_directory(hierarchy: &CpusetMount, base: &CgroupDir) {
    if let Some(own_cgroups) = OwnCgroupNames::from_cgroup_path(&base.path)
        && let Some(besteffort) = hierarchy.cgroup(&own_cgroups.besteffort_parent_path())
    {
        let path_of = OwnCgroupNames::besteffort_parent_path;
        remove_if_unused(hierarchy, &besteffort, CPU, path_of, uses_cpu_controller);
        if besteffort.exists() {
            return;
        }
    }
    remove_if_unused(hierarchy, base, CPUSET, OwnCgroupNames::default_parent_path, uses_cpuset_controller);
}

/// Removes `directory`, in which this pjwd creates the cgroups of jobs, if it contains no cgroup and no process, and if
/// there is no cgroup of an isolated cpuset beside it. Before, disables `controller` again if `directory` has the mark.
/// Except in these cases:
///
/// - Another pjwd has a directory for the same kind of jobs, such as jobs at idle priority. `path_of` returns the path
///   of this directory. It gets the mark, so that the other pjwd disables the controller later.
/// - Another program uses the controller. `uses_controller` checks this for a cgroup below the root.
fn remove_if_unused(
    hierarchy: &CpusetMount,
    directory: &CgroupDir,
    controller: &str,
    path_of: fn(&OwnCgroupNames) -> String,
    uses_controller: fn(&CgroupDir) -> bool,
) {
    // Before the children of the root are listed: beside many isolated jobs, the root has many children.
    if !exists_without_content(directory) {
        return;
    }
    let mut others = hierarchy.root().children();
    others.retain(|group| group.path != directory.path);
    let prefix = format!("{}-", directory.path);
    if others.iter().any(|group| group.path.starts_with(&prefix)) {
        return;
    }
    if directory.has_attribute(ENABLED_MARK) {
        let is_same_of_other_pjwd = |group: &&CgroupDir| {
            OwnCgroupNames::from_cgroup_path(&group.path).is_some_and(|own| path_of(&own) == group.path)
        };
        let disable = |group: &CgroupDir| group.write_file(SUBTREE_CONTROL, &format!("-{controller}"));
        if let Some(other_directory) = others.iter().find(is_same_of_other_pjwd) {
            mark(other_directory);
        } else if !others.iter().any(uses_controller)
            && let Err(errno) = disable(directory).and_then(|()| disable(&hierarchy.root()))
        {
            tracing::warn!(%errno, "the {controller} controller could not be disabled again");
        }
    }
    // Not recursively: a cgroup may have been created below it just now.
    let _ = std::fs::remove_dir(&directory.dir);
}

/// Whether the cgroup `group` exists, and contains no cgroup and no process. Takes the same time for any number of
/// jobs.
fn exists_without_content(group: &CgroupDir) -> bool {
    group.exists()
        && group.child_count() == 0
        && !group.read_file("cgroup.procs").is_ok_and(|procs| !procs.is_empty())
}

/// Whether a program has changed a setting of the cpuset controller for this cgroup.
fn uses_cpuset_controller(group: &CgroupDir) -> bool {
    let cpuset = group.read_cpuset().unwrap_or_default();
    let is_member = matches!(cpuset.partition.as_str(), "" | "member");
    group.enables_controller(CPUSET) || !cpuset.cpus.is_empty() || !cpuset.mems.is_empty() || !is_member
}

/// Whether a program has changed a setting of the cpu controller for this cgroup.
fn uses_cpu_controller(group: &CgroupDir) -> bool {
    let differs = |file: &str, usual: &str| group.read_file(file).is_ok_and(|now| now != usual);
    group.enables_controller(CPU)
        || differs("cpu.weight", "100")
        || differs("cpu.max", "max 100000")
        || differs("cpu.idle", "0")
}

/// Removes the top cgroups of this pjwd (named in `own_cgroups`) if they contain no cgroups of jobs. An earlier run
/// of pjwd leaves such a cgroup behind if it is killed.
pub(super) fn remove_empty_directories(hierarchy: &CpusetMount, own_cgroups: &OwnCgroupNames) {
    if let Some(base) = hierarchy.cgroup(&own_cgroups.default_parent_path()) {
        remove_unused_directory(hierarchy, &base);
    }
}
