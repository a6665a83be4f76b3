//! The extended attributes in which pjwd stores facts about a cgroup:
//!
//! - In a cgroup that pjwd created: the owner of the job, and the cgroup from which the processes came.
//! - In a cgroup of a scheduler: the cpuset that pjwd wrote there, and the name of this pjwd.
//! - In a scope of systemd: whether systemd may have another cpuset for the scope.
//!
//! A pjwd that has lost its journal finds the cgroups by their names, and reads the other facts in the attributes. Only
//! the owner of a cgroup directory can write its attributes, and the directories belong to root.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::geteuid;
use pjw_core::cpuset_group::{CgroupCreator, CpusetSpec, JobCpuset};
use pjw_core::ids::Uid;
use pjw_core::own_cgroups::OwnCgroupNames;
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::cgroup::CgroupDir;

/// Since Linux 5.7 cgroups have `user.` attributes. Before, they have only `trusted.` attributes, which need
/// `CAP_SYS_ADMIN`.
const NAMESPACES: [&str; 2] = ["user", "trusted"];
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
/// The maximum size of the value of an extended attribute, in bytes (`XATTR_SIZE_MAX` in the kernel).
pub(super) const MAX_ATTRIBUTE_BYTES: usize = 1 << 16;
/// The size of the buffer with which an attribute is read at first, in bytes. For each read, the kernel allocates and
/// clears as many bytes (`do_getxattr`, fs/xattr.c, Linux 6.18). Paths of cgroups are usually shorter.
const USUAL_ATTRIBUTE_BYTES: usize = 512;

/// Reads an extended attribute of the cgroup directory `dir`. `name` is the name of the attribute without its
/// namespace. The attribute is `user.NAME`, or `trusted.NAME` if `user.NAME` can't be read. `None` if neither can be
/// read, or if the value is not UTF-8.
pub(super) fn read_attribute(dir: &Path, name: &str) -> Option<String> {
    let mut buffer = vec![0u8; USUAL_ATTRIBUTE_BYTES];
    let length = NAMESPACES.iter().find_map(|namespace| {
        let name = format!("{namespace}.{name}");
        match getxattr(dir, name.as_str(), &mut buffer[..]) {
            Err(Errno::RANGE) => {
                buffer.resize(MAX_ATTRIBUTE_BYTES, 0);
                getxattr(dir, name.as_str(), &mut buffer[..]).ok()
            }
            read => read.ok(),
        }
    })?;
    buffer.truncate(length);
    String::from_utf8(buffer).ok()
}

/// Whether the cgroup directory `dir` has the extended attribute `name`. Allocates no buffer for the value, because
/// most cgroups have no such attribute.
fn has_attribute(dir: &Path, name: &str) -> bool {
    // An empty buffer asks for the length.
    NAMESPACES.iter().any(|namespace| getxattr(dir, format!("{namespace}.{name}"), &mut [0u8; 0][..]).is_ok())
}

/// Writes `value` to the extended attribute `name` of the cgroup directory `dir`. An error is only logged, because
/// pjwd reads the attributes only if it has lost its journal.
pub(super) fn write_attribute(dir: &Path, name: &str, value: &str) {
    let set = |namespace: &str| {
        setxattr(dir, format!("{namespace}.{name}"), value.as_bytes(), XattrFlags::empty()).is_ok()
    };
    if !NAMESPACES.into_iter().any(set) {
        tracing::debug!(cgroup = %dir.display(), name, "the attribute could not be written");
    }
}

/// Writes the user id `owner` to the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`. Does not look first
/// whether the attribute has this value: that costs as much as the write.
pub(super) fn write_owner(group: &CgroupDir, owner: Uid) {
    write_attribute(&group.dir, OWNER_ATTRIBUTE, &owner.0.to_string());
}

/// Must be called before a process is moved from the cgroup `from` to the cgroup `group` of a job. Writes the path of
/// `from` to the extended attribute [`ORIGIN_ATTRIBUTE`] of `group`. If `from` is a cgroup of a daemon of pjw and has
/// this attribute itself, copies the value of the attribute instead. If processes come from different cgroups, the
/// attribute becomes empty.
pub(super) fn record_origin(group: &CgroupDir, from: &CgroupDir) {
    let earlier_origin = OwnCgroupNames::from_cgroup_path(&from.path)
        .and_then(|_| read_attribute(&from.dir, ORIGIN_ATTRIBUTE));
    let origin = earlier_origin.unwrap_or_else(|| from.path.clone());
    match read_attribute(&group.dir, ORIGIN_ATTRIBUTE) {
        Some(recorded) if recorded == origin || recorded.is_empty() => {}
        Some(_) => write_attribute(&group.dir, ORIGIN_ATTRIBUTE, ""),
        None => write_attribute(&group.dir, ORIGIN_ATTRIBUTE, &origin),
    }
}

/// Removes the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`. Must be called before the limits of the
/// cpuset of `group` are removed. Otherwise, the cgroup would look like a job's cgroup without limits.
pub(super) fn remove_owner(group: &CgroupDir) {
    remove_attribute(&group.dir, OWNER_ATTRIBUTE);
}

fn remove_attribute(dir: &Path, name: &str) {
    for namespace in NAMESPACES {
        let _ = removexattr(dir, format!("{namespace}.{name}"));
    }
}

/// Marks the systemd scope with the cgroup `group`: systemd possibly has other PUs (logical CPUs) for this scope than
/// the cgroup has. Must be called when systemd has refused a change of the cpuset, or has not responded. At its next
/// reload, systemd writes its own PUs to the cgroup again. The mark disappears with the cgroup.
pub(super) fn mark_systemd_outdated(group: &CgroupDir) {
    write_attribute(&group.dir, OUTDATED_ATTRIBUTE, "1");
}

/// Returns whether [`mark_systemd_outdated`] has marked the systemd scope with the cgroup `group`: systemd possibly has
/// other PUs (logical CPUs) for the scope than the cgroup has.
pub(super) fn is_systemd_outdated(group: &CgroupDir) -> bool {
    has_attribute(&group.dir, OUTDATED_ATTRIBUTE)
}

/// Removes the mark of [`mark_systemd_outdated`] from the systemd scope with the cgroup `group`. Must be called when
/// systemd has accepted the PUs (logical CPUs) of the cgroup.
pub(super) fn unmark_systemd_outdated(group: &CgroupDir) {
    remove_attribute(&group.dir, OUTDATED_ATTRIBUTE);
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
    let before = read_attribute(&group.dir, CPUSET_ATTRIBUTE);
    if before.as_ref() != Some(&value) {
        write_attribute(&group.dir, CPUSET_ATTRIBUTE, &value);
    }
    before
}

/// Must be called after the write of the cpuset was refused. Gives the extended attribute [`CPUSET_ATTRIBUTE`] of the
/// scheduler's cgroup `group` its earlier value `before`, because the attribute must name a cpuset that pjw wrote.
pub(super) fn restore_scheduler_cpuset(group: &CgroupDir, before: Option<&str>) {
    match before {
        Some(value) => write_attribute(&group.dir, CPUSET_ATTRIBUTE, value),
        None => remove_scheduler_cpuset(group),
    }
}

/// Removes the extended attribute [`CPUSET_ATTRIBUTE`] of the scheduler's cgroup `group`. Must be called after the
/// limits of its cpuset were removed.
pub(super) fn remove_scheduler_cpuset(group: &CgroupDir) {
    remove_attribute(&group.dir, CPUSET_ATTRIBUTE);
}

/// Returns the cpuset that a daemon of pjw wrote in the cgroup `group` of a batch system, and the text that
/// identifies the daemon ([`OwnCgroupNames::name_prefix`]). `None` in each of these cases:
///
/// - No daemon of pjw wrote a cpuset there.
/// - The cpuset has other PUs now.
/// - The cgroup belongs to another user, who could write the attribute.
pub(super) fn read_scheduler_cpuset(group: &CgroupDir) -> Option<(JobCpuset, String)> {
    if !has_attribute(&group.dir, CPUSET_ATTRIBUTE) {
        return None;
    }
    let owner = std::fs::metadata(&group.dir).ok()?.uid();
    let value = read_attribute(&group.dir, CPUSET_ATTRIBUTE).filter(|_| owner == geteuid().as_raw())?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_read_whole_if_it_is_longer_than_the_first_buffer() {
        let dir = tempfile::tempdir().unwrap();
        for length in [1, USUAL_ATTRIBUTE_BYTES, USUAL_ATTRIBUTE_BYTES + 1] {
            let value = "p".repeat(length);
            write_attribute(dir.path(), ORIGIN_ATTRIBUTE, &value);
            let read = read_attribute(dir.path(), ORIGIN_ATTRIBUTE);
            if length == 1 && read.is_none() {
                return eprintln!("skipped: {} can't have attributes", dir.path().display());
            }
            assert_eq!(read, Some(value));
        }
        assert_eq!(read_attribute(dir.path(), OWNER_ATTRIBUTE), None);
    }
}
