//! Affinity masks of threads that a cpuset change does not concern.
//!
//! A kernel before 6.2 resets the affinity of every thread in a cgroup to the whole cpuset when the
//! controller is enabled or disabled for the cgroup, or when a partition changes the cgroup's CPUs. A pinned
//! daemon would then run on any CPU. So the masks are recorded before such a change and restored after it.
//!
//! Later kernels store the requested masks, and nothing is restored there. A mask that a program changed
//! meanwhile is not restored either.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetOutcome};
use pjw_core::ids::{Pid, StartTime, Tid, is_cgroup_within};

use super::context::{CpusetContext, changed_cpuset};
use crate::cgroup::{CgroupDir, CpusetMount};
use crate::proc::procfs::ProcDir;
use crate::sys::{affinity, online};

/// A cache of the effective CPUs of cgroups, by path.
type EffectiveCpus = BTreeMap<String, CpuSet>;

/// The affinity masks of threads that do not belong to the cpuset which pjw changes. A kernel before Linux 6.2 can
/// reset such masks when pjw changes a cpuset. The masks are recorded before a change and restored afterwards.
#[derive(Debug)]
pub(crate) struct UnrelatedThreads {
    /// Whether the kernel keeps the affinity mask of a thread when a cpuset changes. If true, nothing is recorded.
    affinity_persists: bool,
    /// Threads whose masks must be restored later, because their masks have PUs of a partition (a cpuset whose PUs no
    /// other cgroup may use). The masks are restored when the partition ends while this pjwd runs.
    pending: Vec<RecordedThreadMask>,
    /// The PUs of each partition, by the path of its cgroup. A restarted pjwd does not know the earlier partitions
    /// until they end.
    partitions: BTreeMap<String, CpuSet>,
    /// The partitions that ended, while the kernel may still change masks because of that.
    ended: Vec<EndedPartition>,
}

/// A partition that has ended, or that the kernel ends because its cgroup was removed.
#[derive(Debug)]
struct EndedPartition {
    path: String,
    cpus: CpuSet,
    /// Until when the kernel may still change masks. The time is moved on as long as the kernel has not given back
    /// the PUs of the partition.
    until: Instant,
}

/// For how long the kernel can still reset affinity masks after it has given back the PUs of a cpuset partition. After
/// rmdir(2), the kernel ends the partition later, in a work queue (`css_killed_work_fn` in kernel/cgroup/cgroup.c,
/// Linux 6.1). On a busy machine this can take longer than any fixed time.
const RESET_DELAY: Duration = Duration::from_secs(5);

/// A thread that is bound to fewer PUs (logical CPUs) than its cpuset has, with its affinity mask before a cpuset
/// change.
#[derive(Debug, Clone)]
pub(super) struct RecordedThreadMask {
    pub(super) pid: Pid,
    pub(super) tid: Tid,
    pub(super) start: StartTime,
    /// The mask before the change.
    pub(super) mask: CpuSet,
    /// The effective mask after the restore. It has only some PUs of `mask` if the others are not available.
    pub(super) effective: CpuSet,
    /// Whether a cpuset partition (a cgroup whose PUs no other cgroup may use) took PUs of `mask`.
    pub(super) is_displaced: bool,
}

/// Returns whether the cpuset change `change` can change cgroups that pjwd does not manage. In cgroup v2, true in
/// each of these cases:
///
/// - The cpuset is or becomes a partition, whose PUs no other cgroup may use.
/// - The change creates the cpuset while the cpuset controller is disabled at the root. The change then enables it.
/// - The change removes the last cpuset below its parent. The controller may then be disabled.
///
/// Always false in cgroup v1, for the move of a process, and for the cgroup of a batch system.
fn affects_unrelated_cgroups(context: &CpusetContext<'_>, change: &CpusetChange) -> bool {
    let changed = changed_cpuset(change).filter(|changed| changed.creator != CgroupCreator::Scheduler);
    let Some(job_cpuset) = changed else { return false };
    let Some(group) = context.hierarchy.cgroup(&job_cpuset.path) else { return false };
    let is_isolated =
        || job_cpuset.spec.isolated || partition_state(&group).is_some_and(|state| state != "member");
    let switches_controller = match change {
        CpusetChange::Create { .. } => !context.hierarchy.root().enables_controller("cpuset"),
        CpusetChange::Remove { .. } => group.parent().child_count() <= 1,
        _ => false,
    };
    context.hierarchy.is_unified && (switches_controller || is_isolated())
}

/// What the kernel says of the cpuset partition of a cgroup. `None` if the cgroup is gone, or can't be a partition.
fn partition_state(group: &CgroupDir) -> Option<String> {
    group.read_file("cpuset.cpus.partition").ok()
}

impl UnrelatedThreads {
    /// Makes a value without recorded masks. `affinity_persists` says whether the kernel keeps the affinity mask of a
    /// thread when a cpuset changes ([`pjw_core::cpuset_group::CpusetSupport::affinity_persists`]). If true, nothing
    /// is recorded and restored.
    pub(crate) fn new(affinity_persists: bool) -> Self {
        Self { affinity_persists, pending: Vec::new(), partitions: BTreeMap::new(), ended: Vec::new() }
    }

    /// Finds the threads whose affinity masks the kernel may reset when pjw makes the cpuset change `change`. Returns
    /// these threads with their masks. The list is empty if the kernel keeps the masks, or if the change affects no
    /// other cgroups. Also records the partition that the change ends, if an earlier pjwd has made it.
    pub(super) fn find_affected_threads(
        &mut self,
        context: &mut CpusetContext<'_>,
        change: &CpusetChange,
    ) -> Vec<RecordedThreadMask> {
        if self.affinity_persists || !affects_unrelated_cgroups(context, change) {
            return Vec::new();
        }
        let Some(job_cpuset) = changed_cpuset(change) else { return Vec::new() };
        let group = context.hierarchy.cgroup(&job_cpuset.path);
        let is_no_partition = group.is_some_and(|group| partition_state(&group).as_deref() == Some("member"));
        if job_cpuset.spec.isolated && !matches!(change, CpusetChange::Create { .. }) && !is_no_partition {
            // A restarted pjwd has not made the partition itself.
            let cpus = || job_cpuset.spec.cpus.clone();
            self.partitions.entry(job_cpuset.path.clone()).or_insert_with(cpus);
        }
        self.find_threads_with_own_mask(context)
    }

    /// Records that a cpuset partition began or ended by the cpuset change `change`. Must be called after the change,
    /// before masks are restored. `outcome` is the outcome of the change. After a refused change, the records stay the
    /// same: the partition mostly still exists, and another program can end it later. If the refused change has ended
    /// the partition, this is recorded at the next change of the cpuset.
    pub(super) fn record_outcome(&mut self, change: &CpusetChange, outcome: &CpusetOutcome) {
        let Some(job_cpuset) = changed_cpuset(change).filter(|_| !self.affinity_persists) else { return };
        match (change, outcome) {
            (_, CpusetOutcome::Refused { .. } | CpusetOutcome::NotMoved { .. } | CpusetOutcome::Delayed) => {}
            (CpusetChange::Create { .. }, CpusetOutcome::Done { .. }) if job_cpuset.spec.isolated => {
                self.partitions.insert(job_cpuset.path.clone(), job_cpuset.spec.cpus.clone());
            }
            (_, CpusetOutcome::Done { .. } | CpusetOutcome::Gone) => {
                self.record_partition_end(&job_cpuset.path);
            }
        }
    }

    /// Records that the cpuset partition of the cgroup at `path` has ended, because pjw ended it or its cgroup was
    /// removed. A kernel before Linux 6.2 may now, or some seconds later, reset the affinity masks of threads outside
    /// this cgroup. Has no effect if no partition at `path` is recorded.
    pub(crate) fn record_partition_end(&mut self, path: &str) {
        if let Some(cpus) = self.partitions.remove(path) {
            let until = Instant::now() + RESET_DELAY;
            self.ended.push(EndedPartition { path: path.to_owned(), cpus, until });
        }
    }

    /// Returns whether the kernel may still reset affinity masks because a partition has ended.
    pub(crate) fn is_partition_ending(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Restores the affinity masks that contain PUs (logical CPUs) of a partition that has ended. Must be called
    /// repeatedly while [`UnrelatedThreads::is_partition_ending`], because the kernel gives back the PUs some time
    /// after the end, and may then reset the masks again. `now` is the present time.
    pub(crate) fn restore_after_end(&mut self, context: &mut CpusetContext<'_>, now: Instant) {
        if !self.is_partition_ending() {
            return;
        }
        let paths: Vec<String> = self.ended.iter().map(|ended| ended.path.clone()).collect();
        let pending = self.take_pending_threads(context, &mut EffectiveCpus::new());
        let in_no_partition =
            self.partitions.values().fold(online_mask(), |left, cpus| left.difference(cpus));
        for ended in &mut self.ended {
            if !is_given_back(context.hierarchy, &ended.path, &ended.cpus.intersection(&in_no_partition)) {
                ended.until = now + RESET_DELAY;
            }
        }
        self.ended.retain(|ended| ended.until > now);
        self.restore_reset_masks(context, pending, &paths);
    }

    /// Restores the affinity masks of the threads in `recorded` that the kernel has reset. `paths` are the paths of the
    /// cpusets that were changed. These threads are skipped:
    ///
    /// - Threads that have ended.
    /// - Threads in the changed cpusets, because pjwd plans their masks.
    /// - Threads whose masks another program has changed.
    ///
    /// Also records the threads whose masks must be restored again later.
    pub(super) fn restore_reset_masks(
        &mut self,
        context: &mut CpusetContext<'_>,
        recorded: Vec<RecordedThreadMask>,
        paths: &[String],
    ) {
        if recorded.is_empty() {
            return;
        }
        self.pending.clear();
        let mut cache = EffectiveCpus::new();
        let partitions = self.partitions();
        // The kernel may reset a restored mask once more.
        let is_ending = self.is_partition_ending();
        for RecordedThreadMask { pid, tid, start, mask, mut effective, is_displaced } in recorded {
            let Some((cgroup, present)) = current_state(context.proc, pid, tid, start) else { continue };
            if paths.iter().any(|path| is_cgroup_within(&cgroup, path)) {
                continue;
            }
            if present != mask {
                let cpuset = effective_cached(context.hierarchy, &mut cache, cgroup);
                if present != effective && !is_reset_mask(&present, cpuset, &partitions) {
                    continue;
                }
                if let Err(errno) = affinity::set_mask(tid, &mask) {
                    tracing::debug!(pid = pid.0, tid = tid.0, %mask, %errno, "the mask is restored when its CPUs are available");
                }
                effective = affinity::get_mask(tid).unwrap_or_default();
            }
            let is_displaced = is_displaced || effective != mask;
            if effective != mask || (is_ending && is_displaced) {
                self.pending.push(RecordedThreadMask { pid, tid, start, mask, effective, is_displaced });
            }
        }
    }

    /// Returns the user threads on this machine whose affinity masks differ from the effective CPUs of their cgroups.
    /// Leaves out threads that may use all online CPUs, and threads that can't be read. Also returns the threads
    /// whose masks are still to be restored after an earlier change, and removes their records.
    fn find_threads_with_own_mask(&mut self, context: &mut CpusetContext<'_>) -> Vec<RecordedThreadMask> {
        let online = online_mask();
        let partitions = self.partitions();
        let mut cache = EffectiveCpus::new();
        let mut found = self.take_pending_threads(context, &mut cache);
        let pending: BTreeSet<Tid> = found.iter().map(|thread| thread.tid).collect();
        for pid in context.proc.pids().unwrap_or_default() {
            for tid in context.proc.tids(pid).unwrap_or_default() {
                let Ok(mask) = affinity::get_mask(tid) else { continue };
                if online.is_subset(&mask) || pending.contains(&tid) {
                    continue;
                }
                let Ok(stat) = context.proc.thread_stat(pid, tid) else { continue };
                let Some(path) = context.proc.cpuset_path(pid).filter(|_| !stat.is_kernel_thread) else {
                    continue;
                };
                let cpuset = effective_cached(context.hierarchy, &mut cache, path);
                if !is_reset_mask(&mask, cpuset, &partitions) {
                    let (start, effective) = (stat.start, mask.clone());
                    found.push(RecordedThreadMask { pid, tid, start, effective, mask, is_displaced: false });
                }
            }
        }
        found
    }

    /// Returns the records of the threads whose masks are still to be restored. Removes all records from this value,
    /// also those that it does not return: records of threads that have ended, and of threads whose masks another
    /// program has changed since. The function assumes such a change if the present mask is neither the effective mask
    /// after the last restore ([`RecordedThreadMask::effective`]), nor a mask that the kernel sets ([`is_reset_mask`]).
    ///
    /// `cache` has the effective CPUs of the cgroups that were already read. The function adds those that it reads.
    fn take_pending_threads(
        &mut self,
        context: &mut CpusetContext<'_>,
        cache: &mut EffectiveCpus,
    ) -> Vec<RecordedThreadMask> {
        let partitions = self.partitions();
        let mut pending = std::mem::take(&mut self.pending);
        pending.retain(|recorded| {
            let state = current_state(context.proc, recorded.pid, recorded.tid, recorded.start);
            state.is_some_and(|(path, present)| {
                present == recorded.effective
                    || is_reset_mask(&present, effective_cached(context.hierarchy, cache, path), &partitions)
            })
        });
        pending
    }

    /// The PUs of each partition, also of those that ended.
    fn partitions(&self) -> Vec<CpuSet> {
        let ended = self.ended.iter().map(|ended| &ended.cpus);
        self.partitions.values().chain(ended).cloned().collect()
    }
}

/// Whether the kernel has set `mask`: it has all CPUs in `effective`, the effective CPUs of the thread's cgroup. A
/// partition may end after the mask was read and before the effective CPUs were read. So the two sets may differ by all
/// CPUs of some of the `partitions`.
fn is_reset_mask(mask: &CpuSet, effective: &CpuSet, partitions: &[CpuSet]) -> bool {
    let differing = mask.difference(effective).union(&effective.difference(mask));
    let differing_partitions = partitions.iter().filter(|partition| partition.is_subset(&differing));
    differing == differing_partitions.fold(CpuSet::new(), |all, partition| all.union(partition))
}

/// Whether the kernel has given back `cpus`, which the partition at `path` had, to the cgroup above it.
fn is_given_back(hierarchy: &CpusetMount, path: &str, cpus: &CpuSet) -> bool {
    let group = hierarchy.cgroup(path);
    group.is_none_or(|group| cpus.is_subset(&effective_cpus(hierarchy, &group.parent().path)))
}

/// Returns the path of a thread's present cgroup, and its present mask. `None` if the thread has ended.
fn current_state(proc: &mut ProcDir, pid: Pid, tid: Tid, start: StartTime) -> Option<(String, CpuSet)> {
    proc.thread_stat(pid, tid).ok().filter(|stat| stat.start == start)?;
    Some((proc.cpuset_path(pid)?, affinity::get_mask(tid).ok()?))
}

/// Returns the effective CPUs of the cgroup at `path`. Reads them only if they are not in `cache`.
fn effective_cached<'a>(hierarchy: &CpusetMount, cache: &'a mut EffectiveCpus, path: String) -> &'a CpuSet {
    cache.entry(path).or_insert_with_key(|path| effective_cpus(hierarchy, path))
}

/// Returns the PUs (logical CPUs) that the kernel grants the cgroup at `path`. If this cgroup has no cpuset, returns
/// the PUs of the nearest cgroup above that has a cpuset. Returns all online PUs if there is no such cgroup.
pub(super) fn effective_cpus(hierarchy: &CpusetMount, path: &str) -> CpuSet {
    let mut group = hierarchy.cgroup(path);
    while let Some(current) = group {
        match current.effective_cpus() {
            Ok(cpus) => return cpus,
            Err(_) if current.path == "/" => break,
            Err(_) => group = Some(current.parent()),
        }
    }
    online_mask()
}

/// The mask of a thread without a mask of its own: the online PUs.
fn online_mask() -> CpuSet {
    online::read_online_pus().unwrap_or_default()
}
