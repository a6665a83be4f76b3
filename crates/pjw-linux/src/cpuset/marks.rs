//! Extended attributes of the warden's own cgroups: the owner of the job, and the cgroup from which the processes came.
//!
//! A warden that has lost its journal finds the cgroups by their names, and knows the rest from the attributes. Only the
//! owner of a cgroup directory can write them, and the directories belong to root.

use std::path::Path;

use pjw_core::ids::Uid;
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};

use crate::cgroup::CgroupDir;

/// Since Linux 5.7 cgroups have `user.` attributes. Before, they have only `trusted.` attributes, which need
/// `CAP_SYS_ADMIN`.
const NAMESPACES: [&str; 2] = ["user", "trusted"];
/// The extended attribute with the user id of the owner of the job.
pub(super) const OWNER: &str = "pjw.owner";
/// The extended attribute with the path of the cgroup from which the processes of the job were moved.
pub(super) const ORIGIN: &str = "pjw.origin";
/// The longest value that the kernel stores (`XATTR_SIZE_MAX`).
pub(super) const MAX_VALUE: usize = 1 << 16;

/// Reads the extended attribute `name` of a cgroup directory. `None` if the attribute does not exist or can't be read.
pub(super) fn read(dir: &Path, name: &str) -> Option<String> {
    let mut buffer = vec![0u8; MAX_VALUE];
    let length = NAMESPACES
        .iter()
        .find_map(|namespace| getxattr(dir, format!("{namespace}.{name}"), &mut buffer[..]).ok())?;
    buffer.truncate(length);
    String::from_utf8(buffer).ok()
}

/// Writes the extended attribute `name` of a cgroup directory. An error is ignored: without the attribute, a daemon
/// that lost its journal knows less about the job.
pub(super) fn write(dir: &Path, name: &str, value: &str) {
    let set = |namespace: &str| {
        setxattr(dir, format!("{namespace}.{name}"), value.as_bytes(), XattrFlags::empty()).is_ok()
    };
    if !NAMESPACES.into_iter().any(set) {
        tracing::debug!(cgroup = %dir.display(), name, "the attribute could not be written");
    }
}

/// Writes the user id of the owner of the job into the attribute [`OWNER`] of the job's cgroup.
pub(super) fn write_owner(group: &CgroupDir, owner: Uid) {
    let value = owner.0.to_string();
    if read(&group.dir, OWNER).as_ref() != Some(&value) {
        write(&group.dir, OWNER, &value);
    }
}

/// Writes the path of `from`, the cgroup from which a process was moved, into the attribute [`ORIGIN`] of the cgroup.
/// If processes came from several cgroups, the attribute is empty. A process that came from the cgroup of another job
/// has the origin of that job.
pub(super) fn note_origin(group: &CgroupDir, from: &CgroupDir) {
    let from = read(&from.dir, ORIGIN).unwrap_or_else(|| from.path.clone());
    match read(&group.dir, ORIGIN) {
        Some(known) if known == from || known.is_empty() => {}
        Some(_) => write(&group.dir, ORIGIN, ""),
        None => write(&group.dir, ORIGIN, &from),
    }
}

/// Removes the attribute [`OWNER`] before the limits of the cpuset are removed: a cpuset without limits and owner
/// belongs to no job.
pub(super) fn remove_owner(group: &CgroupDir) {
    for namespace in NAMESPACES {
        let _ = removexattr(&group.dir, format!("{namespace}.{OWNER}"));
    }
}
