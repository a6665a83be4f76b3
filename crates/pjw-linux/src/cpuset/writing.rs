//! Writes the cpuset of a cgroup, and checks the result.

use std::fmt::Display;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetOutcome, CpusetSpec};

use super::context::{Result, refused_outcome};
use crate::cgroup::{CgroupDir, CpusetConfig};
use crate::sys::{errno::is_gone, online};

/// The file of a v2 cgroup with the type of its cpuset partition.
const PARTITION: &str = "cpuset.cpus.partition";

/// The cpusets that were read or written a moment ago, so that they need not be read again.
#[derive(Debug, Default)]
pub(super) struct KnownCpusets {
    /// The cpuset of the cgroup itself. `None` if it must be read.
    pub(super) own: Option<CpusetConfig>,
    /// The cpuset of the parent of the cgroup. `None` if it must be read.
    pub(super) parent: Option<CpusetConfig>,
}

/// Sets the cpuset of the cgroup `group` to the PUs (logical CPUs), the NUMA nodes and the partition type in `spec`.
/// Returns the PUs that the kernel grants. `known` has the cpusets that need not be read.
///
/// - Values that are already right are not written: at each write, older kernels reset the affinity masks of all
///   threads in the cgroup.
/// - If `spec` has no NUMA nodes, a v1 cgroup gets all nodes of its parent.
/// - If `spec` has no NUMA nodes, a v2 cgroup keeps its present nodes if `keep_mems` is true. If not, it gets all
///   nodes.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the cgroup does not exist. [`CpusetOutcome::Refused`] if the kernel refuses a value, or
/// grants no PU or PUs that `spec` does not request. The same for nodes if `spec` has nodes.
pub(super) fn write_cpuset(
    group: &CgroupDir,
    spec: &CpusetSpec,
    keep_mems: bool,
    known: KnownCpusets,
) -> Result<CpuSet> {
    let now = known.own.map_or_else(|| read_cpuset(group), Ok)?;
    if !spec.isolated {
        end_partition(group, &now)?;
    }
    let (cpus, mems) = values_to_write(group, spec, known.parent)?;
    match mems {
        Some(mems) => write_list(group, "cpuset.mems", &now.mems, &mems)?,
        None if keep_mems || now.mems.is_empty() => {}
        None => clear_limit(group, "cpuset.mems", &now.mems)
            .map_err(errno_to_outcome(group, "get all memory nodes"))?,
    }
    write_list(group, "cpuset.cpus", &now.cpus, &cpus)?;
    if spec.isolated {
        isolate(group)?;
    }
    check_effective(group, spec)
}

/// Returns the PUs and the NUMA nodes that [`write_cpuset`] must write to the cgroup `group`. In cgroup v2, these are
/// the values of `spec`: without nodes in `spec`, the nodes are `None`. In cgroup v1, the kernel refuses PUs and
/// nodes that the parent does not have:
///
/// - The result contains only PUs and nodes of `spec` that the parent also has.
/// - If `spec` has no nodes, the result has all nodes of the parent.
///
/// `parent_cpuset` is the cpuset of the parent, or `None` if it must be read.
///
/// # Errors
/// If in v1 no PU or no node is left, or if the values of the parent can't be read.
fn values_to_write(
    group: &CgroupDir,
    spec: &CpusetSpec,
    parent_cpuset: Option<CpusetConfig>,
) -> Result<(CpuSet, Option<CpuSet>)> {
    if group.is_unified() {
        return Ok((spec.cpus.clone(), spec.mems.clone()));
    }
    let parent = group.parent();
    let available = parent_cpuset.map_or_else(|| read_cpuset(&parent), Ok)?;
    let cpus = spec.cpus.intersection(&available.cpus);
    let mems = spec.mems.as_ref().unwrap_or(&available.mems).intersection(&available.mems);
    if cpus.is_empty() {
        return Err(refused_outcome(format!(
            "the cgroup {} has none of the CPUs {}: it has {}",
            parent.path, spec.cpus, available.cpus
        )));
    }
    if mems.is_empty() {
        let wanted = spec.mems.clone().unwrap_or_default();
        return Err(refused_outcome(format!(
            "the cgroup {} has none of the memory nodes {wanted}: it has {}",
            parent.path, available.mems
        )));
    }
    Ok((cpus, Some(mems)))
}

/// Writes `to` to the file `file` of the cgroup `group`, except if `now`, the present value of the file, is the same.
pub(super) fn write_list(group: &CgroupDir, file: &str, now: &CpuSet, to: &CpuSet) -> Result<()> {
    if now == to {
        return Ok(());
    }
    group.write_file(file, &to.to_string()).map_err(errno_to_outcome(group, &format!("get {file} {to}")))
}

/// Removes a limit of the cgroup `group`. `file` is `cpuset.cpus` or `cpuset.mems`, and `now` is its present value.
///
/// - In cgroup v2, writes an empty value. The kernel may refuse the empty value, for example while processes are in
///   the cgroup (`ENOSPC`). Then the new value is all possible PUs, or all NUMA nodes of the parent.
/// - In cgroup v1, the file can't be empty. The new value is that of the parent.
///
/// If the new value is `now`, nothing is written.
fn clear_limit(group: &CgroupDir, file: &str, now: &CpuSet) -> Result<(), Errno> {
    if group.is_unified() && group.write_file(file, "").is_ok() {
        return Ok(());
    }
    let parent = group.parent();
    let all = match (file, group.is_unified()) {
        (_, false) => parent.read_number_list(file),
        ("cpuset.cpus", true) => Ok(online::possible_cpus()),
        (_, true) => parent.effective_mems(),
    }?;
    if *now == all { Ok(()) } else { group.write_file(file, &all.to_string()) }
}

/// If the cgroup `group` is a cpuset partition, makes it a normal member of the partition of its parent. `now` is the
/// present configuration of the cgroup.
pub(super) fn end_partition(group: &CgroupDir, now: &CpusetConfig) -> Result<()> {
    if now.partition.is_empty() || now.partition == "member" {
        return Ok(());
    }
    group
        .write_file(PARTITION, "member")
        .map_err(errno_to_outcome(group, "become a member of its parent's partition"))
}

/// Makes the cgroup `group` an isolated cpuset partition: writes `isolated` to its file `cpuset.cpus.partition`.
///
/// # Errors
/// If the kernel has no such file, refuses the write, or reports afterwards that the partition is invalid.
pub(super) fn isolate(group: &CgroupDir) -> Result<()> {
    let now = group.read_file(PARTITION).map_err(|_| {
        refused_outcome(format!(
            "the cgroup {} can't be isolated: this kernel or hierarchy has no {PARTITION}",
            group.path
        ))
    })?;
    if now != "isolated" {
        group.write_file(PARTITION, "isolated").map_err(errno_to_outcome(group, "be isolated"))?;
    }
    // The kernel accepts the write, and reports in the same file whether the partition is valid.
    let state = group.read_file(PARTITION).map_err(errno_to_outcome(group, "be read"))?;
    if state == "isolated" {
        Ok(())
    } else {
        Err(refused_outcome(format!(
            "the cgroup {} can't be isolated: the kernel reports {state}",
            group.path
        )))
    }
}

/// Checks what the kernel grants the cgroup `group`, and returns the granted PUs (logical CPUs). At least one PU must
/// be granted, and only PUs that `spec` requests. If `spec` requests NUMA nodes, the same must hold for the granted
/// nodes.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the cgroup does not exist. [`CpusetOutcome::Refused`] if the check fails.
pub(super) fn check_effective(group: &CgroupDir, spec: &CpusetSpec) -> Result<CpuSet> {
    let cpus = group.effective_cpus().map_err(errno_to_outcome(group, "be read"))?;
    let is_granted =
        |effective: &CpuSet, requested: &CpuSet| !effective.is_empty() && effective.is_subset(requested);
    if !is_granted(&cpus, &spec.cpus) {
        let parent = group.parent();
        let limit = parent.effective_cpus().unwrap_or_default();
        return Err(refused_outcome(format!(
            "the cgroup {} requests the CPUs {}, but the kernel grants {cpus}: its parent {} has {limit}",
            group.path, spec.cpus, parent.path
        )));
    }
    if let Some(requested) = &spec.mems {
        let mems = group.effective_mems().map_err(errno_to_outcome(group, "be read"))?;
        if !is_granted(&mems, requested) {
            return Err(refused_outcome(format!(
                "the cgroup {} requests the memory nodes {requested}, but the kernel grants {mems}",
                group.path
            )));
        }
    }
    Ok(cpus)
}

/// Removes the limits of the cpuset of the cgroup `group`, and returns the PUs (logical CPUs) that the kernel grants
/// then. The cgroup gets all PUs of its parent, and is no partition afterwards. If `keep_mems` is false, the cgroup
/// also gets all NUMA nodes.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the cgroup does not exist. [`CpusetOutcome::Refused`] if the kernel refuses a step.
pub(super) fn remove_limits(group: &CgroupDir, keep_mems: bool) -> Result<CpuSet> {
    let now = read_cpuset(group)?;
    end_partition(group, &now)?;
    if !keep_mems && !now.mems.is_empty() {
        clear_limit(group, "cpuset.mems", &now.mems)
            .map_err(errno_to_outcome(group, "get all memory nodes"))?;
    }
    if !now.cpus.is_empty() {
        clear_limit(group, "cpuset.cpus", &now.cpus).map_err(errno_to_outcome(group, "get all CPUs"))?;
    }
    group.effective_cpus().map_err(errno_to_outcome(group, "be read"))
}

/// Restores the configuration `before` of the cgroup `group`, after a change of its cpuset has failed. If the cgroup
/// has only some of the earlier PUs (logical CPUs) now, it keeps only these ([`cpus_to_restore`]). Does nothing if
/// the present configuration can't be read. If the kernel refuses a value, logs a warning.
pub(super) fn restore_cpuset(group: &CgroupDir, before: &CpusetConfig) {
    let Ok(now) = group.read_cpuset() else { return };
    let cpus = cpus_to_restore(group, before, &now);
    for (file, now, before) in [("cpuset.mems", &now.mems, &before.mems), ("cpuset.cpus", &now.cpus, &cpus)] {
        let restored = if before == now {
            Ok(())
        } else if before.is_empty() {
            clear_limit(group, file, now)
        } else {
            group.write_file(file, &before.to_string())
        };
        if let Err(errno) = restored {
            tracing::warn!(cgroup = group.path, file, %errno, "the earlier cpuset could not be restored");
        }
    }
    restore_partition(group, before);
}

/// Returns the PUs (logical CPUs) to which the cgroup `group` must be set after a change of its cpuset has failed.
/// Normally, these are the PUs of the earlier configuration `before`. Except: if the present configuration `now` has
/// only some of these PUs, the result is the PUs of `now`. The job has lost the other PUs, and another job may have got
/// them.
pub(super) fn cpus_to_restore(group: &CgroupDir, before: &CpusetConfig, now: &CpusetConfig) -> CpuSet {
    let effective = group.effective_cpus().unwrap_or_default();
    cpus_without_lost(&before.cpus, &now.cpus, &effective).clone()
}

/// Returns the PUs of [`cpus_to_restore`]. `effective` are the PUs that the kernel grants now: all PUs of the parent if
/// the parent has none of the PUs in `now`. If `before` is empty, the cgroup had no limit.
fn cpus_without_lost<'a>(before: &'a CpuSet, now: &'a CpuSet, effective: &CpuSet) -> &'a CpuSet {
    let is_in_force = !effective.is_empty() && effective.is_subset(now);
    let is_narrowed = before.is_empty() || now.is_subset(before);
    if is_in_force && is_narrowed { now } else { before }
}

/// Restores the partition type (`cpuset.cpus.partition`) that the cgroup `group` has in its earlier configuration
/// `before`. If the kernel refuses the type, logs a warning.
pub(super) fn restore_partition(group: &CgroupDir, before: &CpusetConfig) {
    // The kernel appends to an invalid type why it is invalid, such as `isolated invalid (...)`.
    let type_before = before.partition.split(' ').next().unwrap_or_default();
    let state = group.read_file(PARTITION).unwrap_or_default();
    if state == before.partition || type_before.is_empty() {
        return;
    }
    if let Err(errno) = group.write_file(PARTITION, type_before) {
        tracing::warn!(cgroup = group.path, %errno, "the earlier partition could not be restored");
    }
}

/// Reads the configuration of the cpuset of the cgroup `group`.
pub(super) fn read_cpuset(group: &CgroupDir) -> Result<CpusetConfig> {
    group.read_cpuset().map_err(errno_to_outcome(group, "be read"))
}

/// Removes the cgroup `group` and all cgroups below it. `name` stands for the cgroup in the message of an error.
pub(super) fn remove_cgroup(group: &CgroupDir, name: impl Display) -> Result<()> {
    group.remove().map_err(|errno| match errno {
        Errno::EBUSY => {
            refused_outcome(format!("the cgroup {name} can't be removed: processes are still in it"))
        }
        other => errno_to_outcome(group, "be removed")(other),
    })
}

/// Returns a function that converts the error of a file of the cgroup `group` to the outcome of the whole change.
/// `what` completes the sentence "the cgroup can't ..." in the message, for example `be frozen`.
pub(super) fn errno_to_outcome(group: &CgroupDir, what: &str) -> impl FnOnce(Errno) -> CpusetOutcome {
    move |errno| {
        let why = match errno {
            errno if is_gone(errno) => return CpusetOutcome::Gone,
            Errno::EROFS => "cgroups are mounted read-only here: in a container, or by ProtectControlGroups=",
            Errno::EACCES | Errno::EPERM if !nix::unistd::Uid::effective().is_root() => "run pjwd as root",
            Errno::EACCES => "the parent cgroup or a child cgroup does not allow that",
            Errno::EBUSY => "the cgroup is in use, or a child cgroup has more",
            Errno::ENOSPC => "its processes would have no CPU or no memory node left",
            Errno::EINVAL => "another cgroup has them exclusively, or this machine does not have them",
            other => other.desc(),
        };
        refused_outcome(format!("the cgroup {} can't {what}: {why} ({errno:?})", group.path))
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::testing::cpu_set;

    use super::*;

    #[test]
    fn a_failed_change_leaves_no_more_pus_than_before_and_takes_none_back_that_the_job_has_left() {
        let restored = |before, now, effective| {
            cpus_without_lost(&cpu_set(before), &cpu_set(now), &cpu_set(effective)).to_string()
        };
        assert_eq!(restored("0-3", "0-1", "0-1"), "0-1", "narrowed");
        assert_eq!(restored("", "0-1", "0-1"), "0-1", "narrowed from no limit");
        assert_eq!(restored("0-3", "0-1,9", "0-1"), "0-3", "with a PU that it did not have");
        assert_eq!(restored("0-1", "0-3", "0-3"), "0-1", "widened");
        assert_eq!(restored("0-1", "2-3", "2-3"), "0-1", "moved");
        assert_eq!(restored("0-3", "0-1", "4-7"), "0-3", "the parent has none of the new PUs");
        assert_eq!(restored("0-3", "", "0-7"), "0-3", "without a limit");
    }
}
