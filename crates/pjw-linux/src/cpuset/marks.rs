//! The extended attributes in which pjwd stores facts about a cgroup:
//!
//! - In a cgroup that pjwd created: the owner of the job, and the cgroup from which the processes came.
//! - In a cgroup of a scheduler: the cpuset that pjwd wrote there, and the name of this pjwd.
//! - In a scope of systemd: whether systemd may have another cpuset for the scope.
//!
//! A pjwd that has lost its journal finds the cgroups by their names, and reads the other facts in the attributes. Only
//! the owner of a cgroup directory can write its attributes, and the directories belong to root.

use std::os::unix::fs::MetadataExt;

use nix::unistd::geteuid;
use pjw_core::cpuset_group::{CgroupCreator, CpusetSpec, JobCpuset};
use pjw_core::ids::Uid;
use pjw_core::own_cgroups::OwnCgroupNames;

use crate::cgroup::CgroupDir;

/// The name of the extended attribute of a job's cgroup that contains the user id of the job's owner.
pub(super) const OWNER_ATTRIBUTE: &str = "pjw.owner";
/// The name of the extended attribute of a job's cgroup that contains the path of the cgroup from which pjw moved the
/// processes.
pub(super) const ORIGIN_ATTRIBUTE: &str = "pjw.origin";
/// The name of the extended attribute of a scheduler's cgroup that contains the cpuset that pjw wrote there: the PUs,
/// the job, and the name of the daemon ([`OwnCgroupNames::name_prefix`]), separated by spaces. Earlier versions of pjw
/// wrote no name.
pub(super) const CPUSET_ATTRIBUTE: &str = "pjw.cpuset";
/// The name of the extended attribute of a scope whose PUs systemd possibly does not know.
const OUTDATED_ATTRIBUTE: &str = "pjw.outdated";

/// Writes the user id `owner` to the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`. Does not look first
/// whether the attribute has this value: that costs as much as the write.
pub(super) fn write_owner(group: &CgroupDir, owner: Uid) {
    group.write_attribute(OWNER_ATTRIBUTE, &owner.0.to_string());
}

/// Must be called before a process is moved from the cgroup `from` to the cgroup `group` of a job. Writes the path of
/// `from` to the extended attribute [`ORIGIN_ATTRIBUTE`] of `group`. If `from` is a cgroup of a daemon of pjw and has
/// this attribute itself, copies the value of the attribute instead. If processes come from different cgroups, the
/// attribute becomes empty.
pub(super) fn record_origin(group: &CgroupDir, from: &CgroupDir) {
    let earlier_origin =
        OwnCgroupNames::from_cgroup_path(&from.path).and_then(|_| from.read_attribute(ORIGIN_ATTRIBUTE));
    let origin = earlier_origin.unwrap_or_else(|| from.path.clone());
    let value = match group.read_attribute(ORIGIN_ATTRIBUTE) {
        Some(recorded) if recorded == origin || recorded.is_empty() => return,
        Some(_) => "",
        None => origin.as_str(),
    };
    group.write_attribute(ORIGIN_ATTRIBUTE, value);
}

/// Removes the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`. Must be called before the limits of the
/// cpuset of `group` are removed. Otherwise, the cgroup would look like a job's cgroup without limits.
pub(super) fn remove_owner(group: &CgroupDir) {
    group.remove_attribute(OWNER_ATTRIBUTE);
}

/// Marks the systemd scope with the cgroup `group`: systemd possibly has other PUs (logical CPUs) for this scope than
/// the cgroup has. Must be called when systemd has refused a change of the cpuset, or has not responded. At its next
/// reload, systemd writes its own PUs to the cgroup again. The mark disappears with the cgroup.
pub(super) fn mark_systemd_outdated(group: &CgroupDir) {
    group.write_attribute(OUTDATED_ATTRIBUTE, "1");
}

/// Returns whether [`mark_systemd_outdated`] has marked the systemd scope with the cgroup `group`: systemd possibly has
/// other PUs (logical CPUs) for the scope than the cgroup has.
pub(super) fn is_systemd_outdated(group: &CgroupDir) -> bool {
    group.has_attribute(OUTDATED_ATTRIBUTE)
}

/// Removes the mark of [`mark_systemd_outdated`] from the systemd scope with the cgroup `group`. Must be called when
/// systemd has accepted the PUs (logical CPUs) of the cgroup.
pub(super) fn unmark_systemd_outdated(group: &CgroupDir) {
    group.remove_attribute(OUTDATED_ATTRIBUTE);
}

/// Records in the cgroup `group` of a batch system which cpuset this daemon is about to write there. Must be called
/// before the cpuset itself is written. Writes the extended attribute [`CPUSET_ATTRIBUTE`]: the PUs and the job of
/// `job_cpuset`, and the text that identifies this daemon ([`OwnCgroupNames::name_prefix`]). `own_cgroups` has the
/// names of this daemon's cgroups. Returns the earlier value of the attribute, for [`restore_scheduler_cpuset`], or
/// `None` if the cgroup had no such attribute.
pub(super) fn write_scheduler_cpuset(
    group: &CgroupDir,
    job_cpuset: &JobCpuset,
    own_cgroups: &OwnCgroupNames,
) -> Option<String> {
    let value = format!("{} {} {}", job_cpuset.spec.cpus, job_cpuset.job, own_cgroups.name_prefix());
    let before = group.read_attribute(CPUSET_ATTRIBUTE);
    if before.as_ref() != Some(&value) {
        group.write_attribute(CPUSET_ATTRIBUTE, &value);
    }
    before
}

/// Must be called after the write of the cpuset was refused. Gives the extended attribute [`CPUSET_ATTRIBUTE`] of the
/// scheduler's cgroup `group` its earlier value `before`, because the attribute must name a cpuset that pjw wrote.
pub(super) fn restore_scheduler_cpuset(group: &CgroupDir, before: Option<&str>) {
    match before {
        Some(value) => {
            group.write_attribute(CPUSET_ATTRIBUTE, value);
        }
        None => remove_scheduler_cpuset(group),
    }
}

/// Removes the extended attribute [`CPUSET_ATTRIBUTE`] of the scheduler's cgroup `group`. Must be called after the
/// limits of its cpuset were removed.
pub(super) fn remove_scheduler_cpuset(group: &CgroupDir) {
    group.remove_attribute(CPUSET_ATTRIBUTE);
}

/// Returns the cpuset that a daemon of pjw wrote in the cgroup `group` of a batch system, and the text that
/// identifies the daemon ([`OwnCgroupNames::name_prefix`]). `None` in each of these cases:
///
/// - No daemon of pjw wrote a cpuset there.
/// - The cpuset has other PUs now.
/// - The cgroup belongs to another user, who could write the attribute.
pub(super) fn read_scheduler_cpuset(group: &CgroupDir) -> Option<(JobCpuset, String)> {
    if !group.has_attribute(CPUSET_ATTRIBUTE) {
        return None;
    }
    let owner = std::fs::metadata(&group.dir).ok()?.uid();
    let value = group.read_attribute(CPUSET_ATTRIBUTE).filter(|_| owner == geteuid().as_raw())?;
    let mut words = value.split(' ');
    let (cpus, job) = (words.next()?, words.next()?);
    // An attribute of an earlier version has no name. It counts as written by the daemon with the usual names.
    let usual = OwnCgroupNames::default();
    let writer = words.next().unwrap_or(usual.name_prefix()).to_owned();
    let spec = CpusetSpec::from_cpus(cpus.parse().ok()?);
    if group.read_cpuset().ok()?.cpus != spec.cpus {
        return None;
    }
    let (job, path) = (job.parse().ok()?, group.path.clone());
    Some((JobCpuset { job, creator: CgroupCreator::Scheduler, path, spec }, writer))
}
