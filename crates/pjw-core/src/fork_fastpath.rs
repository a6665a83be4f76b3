//! The fast path for children that were born outside of their job's cores: they are confined before anything else is
//! read.
//!
//! A child begins as a copy of its parent, except for its process id, its start time and its mask. That is enough to
//! decide which mask the child should have. The scan that follows reads the other facts, and corrects the decision. A
//! job in a cpuset does not need the fast path: its children are born in the cpuset. Where the mask is right, that scan
//! may wait: it would take a PU from the child or its parent while the child executes its program.
//!
//! The `stat` of a newly forked process is not read: while the process executes another program, a reader waits (some
//! milliseconds on a busy PU of Linux 6.18). So the start time is the time of the fork event, which may be some ticks
//! late. A zombie can't be distinguished from a running process. The cgroup of such a process is read only if its
//! mask does not follow from the requests that pjw knows: a program may have requested the mask, or the process may be
//! in a cpuset of its own. There is one exception: if the process has every online PU and no known cpuset restricts its
//! ancestor, the program requested every PU.

mod first_write;

use self::first_write::is_request_known;
pub use self::first_write::{FirstMaskWrites, plan_first_mask_writes};

use crate::basics::{CpuSet, Pid, Pu, Tid, prelude::*};
use crate::state::{Descendant, WardenState};
use crate::terms::{
    ExpectedMask, ForkMaskMismatch, MaskProbeResult, Observed, Process, ScanScope, Snapshot, Thread,
};

/// Returns the affinity mask that each newly forked process of a job should have, by the pid of the process. This mask
/// is the set of online PUs (logical CPUs) that the job holds. The result contains a process if all of these conditions
/// hold:
///
/// - The process descends from a process of a job. pjw has received the fork event of the process, and no scan has read
///   the process since this event.
/// - The job holds cores, and no command such as `pjwctl release` has released the job. pjw does not control the masks
///   of a released job.
/// - The job has no cpuset, or a change of its cpuset is not complete. If the job has a complete cpuset, the mask need
///   not be checked: a new process starts in the cgroup of its parent, so the cpuset restricts the process from its
///   first instruction.
#[must_use]
pub fn expected_fork_masks(state: &WardenState) -> BTreeMap<Pid, ExpectedMask> {
    let unscanned = state.lineage.unscanned_descendants();
    unscanned.filter_map(|(pid, descendant)| Some((pid, expected_of(state, pid, descendant)?))).collect()
}

/// Returns the affinity mask that each unverified new process should have, by pid. A newly forked process of a job is
/// unverified until the daemon has found that its affinity mask is right. The daemon must scan an unverified process
/// at once ([`ScanQueue::immediate_pids`](crate::state::lineage::scan_queue::ScanQueue::immediate_pids)).
#[must_use]
pub fn expected_masks_of_unverified_forks(state: &WardenState) -> BTreeMap<Pid, ExpectedMask> {
    let expected = |&pid: &Pid| Some((pid, expected_of(state, pid, state.lineage.descendant(pid)?)?));
    state.lineage.scan_queue.immediate_pids().iter().filter_map(expected).collect()
}

/// Defers the scan of each newly forked process that has the right affinity mask, by a few milliseconds. The daemon
/// still scans all other newly forked processes at once. The daemon calls this function after it has read the masks
/// ([`MachineInterface::probe_masks`](crate::ports::MachineInterface::probe_masks)).
///
/// `expected` has the masks that newly forked processes should have, by pid. `mismatches` lists the processes in
/// `expected` that have another mask. The mask of a process is right in each of these cases:
///
/// - The process is in `expected`, and not in `mismatches`.
/// - The process is not in `expected`, and was forked in the cpuset of a job. The job holds cores and was not released
///   (`pjwctl release`), and all changes of the cpuset are complete.
pub fn defer_scans_if_masks_match(
    state: &mut WardenState,
    expected: &BTreeMap<Pid, ExpectedMask>,
    mismatches: &[ForkMaskMismatch],
) {
    let wrong: BTreeSet<Pid> = mismatches.iter().map(|forked| forked.id.pid).collect();
    let is_right = |pid: &Pid| match expected.get(pid) {
        Some(_) => !wrong.contains(pid),
        None => is_born_in_job_cpuset(state, *pid),
    };
    let right: Vec<Pid> =
        state.lineage.scan_queue.immediate_pids().iter().copied().filter(is_right).collect();
    right.into_iter().for_each(|pid| state.lineage.scan_queue.lower_urgency(pid));
}

/// Whether the process was forked in a job's cpuset that has the right PUs.
fn is_born_in_job_cpuset(state: &WardenState, pid: Pid) -> bool {
    let descendant = state.lineage.descendant(pid);
    let Some(member) = descendant.and_then(|descendant| state.members.get(&descendant.ancestor)) else {
        return false;
    };
    let is_kept =
        state.jobs.get(&member.job).is_some_and(|job| !job.was_released && job.active_grant().is_some());
    is_kept && state.is_in_job_cpuset(member) && !state.cpusets.delayed_changes.has_change_for(&member.job)
}

/// Returns the mask that the forked process `pid` should have. `None` if a scan has read the process, or if the mask
/// need not be checked ([`expected_fork_masks`]).
fn expected_of(state: &WardenState, pid: Pid, descendant: &Descendant) -> Option<ExpectedMask> {
    let forked_at = descendant.forked_at.filter(|_| !state.processes.contains_key(&pid))?;
    Some(ExpectedMask { mask: expected_mask(state, descendant.ancestor)?, forked_at })
}

fn expected_mask(state: &WardenState, parent: Pid) -> Option<CpuSet> {
    let member = state.members.get(&parent)?;
    let job = state.jobs.get(&member.job).filter(|job| !job.was_released)?;
    let has_cpuset = state.cpusets.cpuset_of(&job.id).is_some() || state.is_in_job_cpuset(member);
    let has_cpuset = has_cpuset && !state.cpusets.delayed_changes.has_change_for(&job.id);
    job.online_granted_cpus(&state.pool.online_cpus()).filter(|_| !has_cpuset)
}

/// Makes a partial snapshot of newly forked processes with wrong affinity masks, so that the next decision corrects
/// these masks at once.
///
/// - `probe` has the pid, the start time and the mask of each of these processes. All other facts about a process, such
///   as its user and its cgroup, are copied from its nearest ancestor in a job ([`Descendant::ancestor`]).
/// - `cpuset_paths` has the cgroups of the processes that [`forked_with_unexplained_masks`] returned, by pid. Each
///   cgroup is given by its path in the hierarchy with the cpuset controller.
///
/// A process is left out if `state` does not contain the ancestor, or if pjw is moving the ancestor to another cgroup.
/// Otherwise, the snapshot contains the process if its mask is explained in one of these ways:
///
/// - The mask can result from a request (sched_setaffinity(2)) that the process may have inherited.
/// - The mask contains all online PUs (logical CPUs), and no cpuset restricts the ancestor. The program then requested
///   the mask.
/// - The process is in the cgroup of the ancestor. The program then requested the mask.
///
/// The next scan reads the processes that are left out.
#[must_use]
pub fn snapshot_of_mismatches(
    state: &WardenState,
    probe: MaskProbeResult,
    cpuset_paths: &BTreeMap<Pid, String>,
) -> Snapshot {
    let MaskProbeResult { taken_at, online, mismatches } = probe;
    let processes: BTreeMap<Pid, Observed<Process>> = mismatches
        .into_iter()
        .filter_map(|forked| {
            let pid = forked.id.pid;
            let descendant = state.lineage.descendant(pid)?;
            let parent = state.process(descendant.ancestor)?;
            let is_in_same_cpuset =
                || cpuset_paths.get(&pid).is_some_and(|path| parent.cgroup.as_deref() == Some(path));
            let is_explained = !state.cpusets.delayed_changes.is_moving(parent.id)
                && (is_request_known(
                    state,
                    descendant,
                    &state.present_mask_limits(parent.id.pid),
                    &forked.effective_mask,
                ) || is_in_same_cpuset());
            is_explained.then(|| (pid, Observed::Present(process_from_parent(parent, forked))))
        })
        .collect();
    let scope = ScanScope::Partial(processes.keys().copied().collect());
    Snapshot::of_processes(scope, taken_at, online, processes)
}

/// Returns the pids of the newly forked processes whose affinity masks pjw can't explain. `expected` has the masks that
/// newly forked processes of jobs should have, by pid. `probe` has the wrong masks that were read. The result contains
/// a process if all of these conditions hold:
///
/// - `state` contains the nearest ancestor of the process in a job ([`Descendant::ancestor`]).
/// - The mask of the process contains PUs (logical CPUs) that are not in its mask in `expected`.
/// - The mask can't result from a request (sched_setaffinity(2)) that the process may have inherited.
/// - The mask lacks an online PU, or a cpuset restricts the ancestor. Otherwise, pjw assumes that the program requested
///   all PUs.
///
/// Such a mask has one of two causes. Either the process or its parent requested the mask just now, or the process is
/// in another cgroup than its parent. To find the cause, the caller reads the cgroups of these processes and passes the
/// cgroups to [`snapshot_of_mismatches`].
#[must_use]
pub fn forked_with_unexplained_masks(
    state: &WardenState,
    expected: &BTreeMap<Pid, ExpectedMask>,
    probe: &MaskProbeResult,
) -> BTreeSet<Pid> {
    let is_unknown = |forked: &&ForkMaskMismatch| {
        let pid = forked.id.pid;
        let descendant = state.lineage.descendant(pid);
        let Some((new, parent)) = descendant.and_then(|new| Some((new, state.process(new.ancestor)?))) else {
            return false;
        };
        expected.get(&pid).is_some_and(|expected| !forked.effective_mask.is_subset(&expected.mask))
            && !is_request_known(
                state,
                new,
                &state.present_mask_limits(parent.id.pid),
                &forked.effective_mask,
            )
    };
    probe.mismatches.iter().filter(is_unknown).map(|forked| forked.id.pid).collect()
}

/// Returns the record of a newly forked process: a copy of `known`, the record of the parent, with the id and the
/// affinity mask of the new process. The record has one thread, the first one, without CPU time.
fn process_from_parent(
    known: &Process,
    ForkMaskMismatch { id, effective_mask: mask }: ForkMaskMismatch,
) -> Process {
    let first = Thread {
        tid: Tid(id.pid.0),
        start: id.start,
        comm: known.comm,
        state: 'R',
        last_cpu: mask.first().unwrap_or(Pu(0)),
        run_ns: 0,
        wait_ns: 0,
        effective_mask: mask.clone(),
    };
    Process {
        id,
        parent: known.id.pid,
        first_thread_mask: Some(mask),
        has_unread_environment: false,
        threads: Some(vec![first]),
        has_all_threads: true,
        ..known.clone()
    }
}
