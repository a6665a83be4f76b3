//! Extended attributes of the warden's own cgroups: the owner of the job, and the cgroup from which the processes came.
//!
//! A warden that has lost its journal finds the cgroups by their names, and knows the rest from the attributes. Only
//! the owner of a cgroup directory can write them, and the directories belong to root.

use std::path::Path;

use pjw_core::ids::Uid;
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};

use crate::cgroup::CgroupDir;

/// Since Linux 5.7 cgroups have `user.` attributes. Before, they have only `trusted.` attributes, which need
/// `CAP_SYS_ADMIN`.
const NAMESPACES: [&str; 2] = ["user", "trusted"];
/// The name of the extended attribute of a job's cgroup that contains the user id of the job's owner.
pub(super) const OWNER_ATTRIBUTE: &str = "pjw.owner";
/// The name of the extended attribute of a job's cgroup that contains the path of the cgroup from which pjw moved the
/// processes.
pub(super) const ORIGIN_ATTRIBUTE: &str = "pjw.origin";
/// The maximum size of the value of an extended attribute, in bytes (`XATTR_SIZE_MAX` in the kernel).
pub(super) const MAX_ATTRIBUTE_BYTES: usize = 1 << 16;

/// Reads an extended attribute of the cgroup directory `dir`. `name` is the name of the attribute without its
/// namespace. The attribute is `user.NAME`, or `trusted.NAME` if `user.NAME` can't be read. `None` if neither can be
/// read, or if the value is not UTF-8.
pub(super) fn read_attribute(dir: &Path, name: &str) -> Option<String> {
    let mut buffer = vec![0u8; MAX_ATTRIBUTE_BYTES];
    let length = NAMESPACES
        .iter()
        .find_map(|namespace| getxattr(dir, format!("{namespace}.{name}"), &mut buffer[..]).ok())?;
    buffer.truncate(length);
    String::from_utf8(buffer).ok()
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

/// Writes the user id `owner` to the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`.
pub(super) fn write_owner(group: &CgroupDir, owner: Uid) {
    let value = owner.0.to_string();
    if read_attribute(&group.dir, OWNER_ATTRIBUTE).as_ref() != Some(&value) {
        write_attribute(&group.dir, OWNER_ATTRIBUTE, &value);
    }
}

/// Must be called before a process is moved from the cgroup `from` to the cgroup `group` of a job. Writes the path of
/// `from` to the extended attribute [`ORIGIN_ATTRIBUTE`] of `group`. If `from` has this attribute itself, copies the
/// value of the attribute instead. If processes come from different cgroups, the attribute becomes empty.
pub(super) fn note_origin(group: &CgroupDir, from: &CgroupDir) {
    let from = read_attribute(&from.dir, ORIGIN_ATTRIBUTE).unwrap_or_else(|| from.path.clone());
    match read_attribute(&group.dir, ORIGIN_ATTRIBUTE) {
        Some(known) if known == from || known.is_empty() => {}
        Some(_) => write_attribute(&group.dir, ORIGIN_ATTRIBUTE, ""),
        None => write_attribute(&group.dir, ORIGIN_ATTRIBUTE, &from),
    }
}

/// Removes the extended attribute [`OWNER_ATTRIBUTE`] of the cgroup `group`. Must be called before the limits of the
/// cpuset of `group` are removed. Otherwise, the cgroup would look like a job's cgroup without limits.
pub(super) fn remove_owner(group: &CgroupDir) {
    for namespace in NAMESPACES {
        let _ = removexattr(&group.dir, format!("{namespace}.{OWNER_ATTRIBUTE}"));
    }
}
