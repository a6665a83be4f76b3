//! The fast path for children that were born outside of their job's cores: they are confined before anything else is
//! read.
//!
//! A child begins as a copy of its parent, except for its process id, its start time and its mask. That is enough to
//! decide which mask the child should have. The scan that follows reads the other facts, and corrects the decision. A
//! job in a cpuset does not need the fast path: its children are born in the cpuset.
//!
//! No file of a newborn process is read: while the process executes another program, a reader of its `stat` waits
//! (some milliseconds on a busy PU of Linux 6.18). So the start time is the time of the fork event, which may be some
//! ticks late. A zombie can't be distinguished from a running process.

use crate::basics::{CpuSet, Pid, Pu, Tid, prelude::*};
use crate::state::{Descendant, WardenState};
use crate::terms::{
    ExpectedMask, ForkMaskMismatch, MaskProbe, Observed, Process, ScanScope, Snapshot, Thread,
};

/// Returns the affinity masks that newly forked processes should have, by the pid of the process. A process
/// is included if it descends from a process of a job, and no scan has found it since its fork. The job must
/// hold cores and must not be released. The expected mask is the set of online PUs that the job holds.
///
/// Processes of a job with a cpuset are not included, because the cpuset already limits these processes. The
/// exception is a job with a delayed change of its cpuset (the kernel has begun the change and has not
/// completed it): the processes of such a job are included.
#[must_use]
pub fn expected_masks(state: &WardenState) -> BTreeMap<Pid, ExpectedMask> {
    let expected = |(pid, descendant): (Pid, &Descendant)| {
        let forked_at = descendant.forked_at.filter(|_| !state.processes.contains_key(&pid))?;
        Some((pid, ExpectedMask { mask: expected_mask(state, descendant.ancestor)?, forked_at }))
    };
    state.lineage.unscanned_descendants().filter_map(expected).collect()
}

fn expected_mask(state: &WardenState, parent: Pid) -> Option<CpuSet> {
    let member = state.members.get(&parent)?;
    let job = state.jobs.get(&member.job).filter(|job| !job.released)?;
    let has_cpuset = state.cpusets.cpuset_of(&job.id).is_some() || state.is_in_job_cpuset(member);
    let has_cpuset = has_cpuset && !state.cpusets.delayed.has(&job.id);
    job.online_granted_cpus(&state.pool.online_cpus()).filter(|_| !has_cpuset)
}

/// Makes a snapshot that contains only the processes in `probe`. `probe` has newly forked processes, each
/// with its real affinity mask, which differs from the mask that [`expected_masks`] returned for the process.
/// The mask and the start time of each process are taken from `probe`.
///
/// `probe` has no other facts about these processes. The snapshot has the facts of an ancestor in their
/// place. The ancestor is the nearest one that, at the time of the fork, belonged to a job or was getting its
/// original masks back from pjw. A process whose ancestor is not in `state` is left out of the snapshot.
#[must_use]
pub fn snapshot_of_mismatches(state: &WardenState, probe: MaskProbe) -> Snapshot {
    let MaskProbe { taken_at, online, mismatches } = probe;
    let processes: BTreeMap<Pid, Observed<Process>> = mismatches
        .into_iter()
        .filter_map(|forked| {
            let descendant = state.lineage.descendant(forked.id.pid)?;
            let parent = state.process(descendant.ancestor)?;
            Some((forked.id.pid, Observed::Present(process_from_parent(parent, forked))))
        })
        .collect();
    let scope = ScanScope::Partial(processes.keys().copied().collect());
    Snapshot {
        scope,
        taken_at,
        online,
        processes,
        cgroups: BTreeMap::new(),
        affinity_requests: Vec::new(),
        incomplete_reason: None,
    }
}

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
        threads: Some(vec![first]),
        ..known.clone()
    }
}
