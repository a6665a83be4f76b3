//! Giving a cgroup its cpuset: what is written in which order, and what must come of it.

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::wall::{Bounds, WallOutcome};

use super::refused;
use super::tree::{Files, Group};

const PARTITION: &str = "cpuset.cpus.partition";

/// Gives a cgroup its bounds and tells what the kernel lets it use then. Nothing is written that is so already:
/// older kernels give every thread the whole cpuset whenever it is written.
pub(super) fn give(group: &Group, bounds: &Bounds, keep_mems: bool) -> Result<CpuSet, WallOutcome> {
    let now = group.files().map_err(|errno| cant(group, "be read", errno))?;
    if !bounds.isolated {
        to_member(group, &now)?;
    }
    let (cpus, mems) = wishes(group, bounds)?;
    match mems {
        Some(mems) => wish(group, "cpuset.mems", &now.mems, &mems)?,
        None if keep_mems || now.mems.is_empty() => {}
        None => clear(group, "cpuset.mems").map_err(|errno| cant(group, "be given all memory", errno))?,
    }
    wish(group, "cpuset.cpus", &now.cpus, &cpus)?;
    if bounds.isolated {
        isolate(group)?;
    }
    judge(group, bounds)
}

/// What is to be written. v1 takes only what the cgroup above has; v2 takes every wish.
fn wishes(group: &Group, bounds: &Bounds) -> Result<(CpuSet, Option<CpuSet>), WallOutcome> {
    if group.is_unified() {
        return Ok((bounds.cpus.clone(), bounds.mems.clone()));
    }
    let above = group.parent();
    let files = above.files().map_err(|errno| cant(&above, "be read", errno))?;
    let cpus = bounds.cpus.intersection(&files.cpus);
    let mems = bounds.mems.as_ref().unwrap_or(&files.mems).intersection(&files.mems);
    if cpus.is_empty() {
        return Err(refused(format!(
            "{} has none of the CPUs {}: it has {}",
            above.path, bounds.cpus, files.cpus
        )));
    }
    if mems.is_empty() {
        let wanted = bounds.mems.clone().unwrap_or_default();
        return Err(refused(format!(
            "{} has no memory of the nodes {wanted}: it has {}",
            above.path, files.mems
        )));
    }
    Ok((cpus, Some(mems)))
}

fn wish(group: &Group, file: &str, now: &CpuSet, to: &CpuSet) -> Result<(), WallOutcome> {
    if now == to {
        return Ok(());
    }
    group.write(file, &to.to_string()).map_err(|errno| cant(group, &format!("get {file} {to}"), errno))
}

/// Takes a wish back. The kernel refuses that while processes are inside (`ENOSPC`), and v1 always needs one: then the
/// wish is all that the machine could have, or in v1 what the cgroup above has.
fn clear(group: &Group, file: &str) -> Result<(), Errno> {
    if group.is_unified() && group.write(file, "").is_ok() {
        return Ok(());
    }
    let above = group.parent();
    let all = match (file, group.is_unified()) {
        ("cpuset.cpus", true) => Ok(super::scope::possible_cpus()),
        ("cpuset.cpus", false) => above.list(file),
        (_, true) => above.effective_mems(),
        (_, false) => above.list(file),
    }?;
    if group.list(file).ok().as_ref() == Some(&all) {
        return Ok(());
    }
    group.write(file, &all.to_string())
}

/// Ends a partition.
pub(super) fn to_member(group: &Group, now: &Files) -> Result<(), WallOutcome> {
    if now.partition.is_empty() || now.partition == "member" {
        return Ok(());
    }
    group
        .write(PARTITION, "member")
        .map_err(|errno| cant(group, "become a member of its parent's partition", errno))
}

/// Makes a partition.
pub(super) fn isolate(group: &Group) -> Result<(), WallOutcome> {
    let now = group.read(PARTITION).map_err(|_| {
        refused(format!("{} can't be isolated: this kernel or hierarchy has no {PARTITION}", group.path))
    })?;
    if now != "isolated" {
        group.write(PARTITION, "isolated").map_err(|errno| cant(group, "be isolated", errno))?;
    }
    // The kernel takes the word and tells afterwards what it thinks of it.
    let state = group.read(PARTITION).map_err(|errno| cant(group, "be read", errno))?;
    if state == "isolated" {
        Ok(())
    } else {
        Err(refused(format!("{} can't be isolated: {state}", group.path)))
    }
}

/// Whether the kernel granted what was wished: if a wish and the cgroup above don't meet, v2 grants all that is above.
pub(super) fn judge(group: &Group, bounds: &Bounds) -> Result<CpuSet, WallOutcome> {
    let cpus = group.effective_cpus().map_err(|errno| cant(group, "be read", errno))?;
    let holds = |granted: &CpuSet, wished: &CpuSet| !granted.is_empty() && granted.is_subset(wished);
    if !holds(&cpus, &bounds.cpus) {
        let above = group.parent();
        let has = above.effective_cpus().unwrap_or_default();
        return Err(refused(format!(
            "{} was to have the CPUs {}, and the kernel gives it {cpus}: {} has {has}",
            group.path, bounds.cpus, above.path
        )));
    }
    if let Some(wished) = &bounds.mems {
        let mems = group.effective_mems().map_err(|errno| cant(group, "be read", errno))?;
        if !holds(&mems, wished) {
            return Err(refused(format!(
                "{} was to have memory of the nodes {wished}, and the kernel gives it {mems}",
                group.path
            )));
        }
    }
    Ok(cpus)
}

/// Lets everything in again, and tells what that is.
pub(super) fn open(group: &Group, keep_mems: bool) -> Result<CpuSet, WallOutcome> {
    let now = group.files().map_err(|errno| cant(group, "be read", errno))?;
    to_member(group, &now)?;
    if !keep_mems && !now.mems.is_empty() {
        clear(group, "cpuset.mems").map_err(|errno| cant(group, "be given all memory", errno))?;
    }
    if !now.cpus.is_empty() {
        clear(group, "cpuset.cpus").map_err(|errno| cant(group, "be given all CPUs", errno))?;
    }
    group.effective_cpus().map_err(|errno| cant(group, "be read", errno))
}

/// Puts back what was there before an attempt that failed. What can't be put back now is seen by the next look.
pub(super) fn put_back(group: &Group, before: &Files) {
    let Ok(now) = group.files() else { return };
    for (file, now, before) in
        [("cpuset.mems", &now.mems, &before.mems), ("cpuset.cpus", &now.cpus, &before.cpus)]
    {
        let done = match before {
            same if same == now => Ok(()),
            none if none.is_empty() => clear(group, file),
            some => group.write(file, &some.to_string()),
        };
        if let Err(errno) = done {
            tracing::warn!(cgroup = group.path, file, %errno, "the cpuset from before could not be put back");
        }
    }
    put_partition_back(group, before);
}

/// Makes a group the kind of partition it was. One that was not valid is asked for again all the same.
pub(super) fn put_partition_back(group: &Group, before: &Files) {
    let was = before.partition.split(' ').next().unwrap_or_default();
    let is = group.read(PARTITION).unwrap_or_default();
    if is != before.partition
        && !was.is_empty()
        && let Err(errno) = group.write(PARTITION, was)
    {
        tracing::warn!(cgroup = group.path, %errno, "the partition from before could not be put back");
    }
}

/// What the kernel's number means for a cgroup.
pub(super) fn cant(group: &Group, what: &str, errno: Errno) -> WallOutcome {
    let path = &group.path;
    let why = match errno {
        Errno::ENOENT | Errno::ENODEV => return WallOutcome::Gone,
        Errno::EROFS => {
            "cgroups are mounted read-only here: in a container, or by ProtectControlGroups=".to_owned()
        }
        Errno::EACCES | Errno::EPERM if !nix::unistd::Uid::effective().is_root() => {
            "run pjwd as root".to_owned()
        }
        Errno::EACCES => "the cgroup above it, or one below, does not allow that".to_owned(),
        Errno::EBUSY => "it is in use, or a cgroup below it has more than that".to_owned(),
        Errno::ENOSPC => "processes are in it, and would have no CPU or memory left".to_owned(),
        Errno::EINVAL => "another cgroup has them for itself, or this machine does not have them".to_owned(),
        other => other.desc().to_owned(),
    };
    refused(format!("the cgroup {path} can't {what}: {why} ({errno:?})"))
}
