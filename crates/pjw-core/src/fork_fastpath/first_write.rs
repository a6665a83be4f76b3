//! The first write of the fork fast path: the mask of a forked process that is certain before anything else about the
//! process is decided.
//!
//! Most children that are born outside of their job's cores may simply run on all of these cores. Their mask follows
//! from the record of the fork alone. It is written first, because the whole decision takes several times longer: the
//! code and the data that it needs are not in the caches of the CPU after a pause. The decision then follows as for
//! all other processes, from the mask that was read before this write. It writes its own records. If it decides on the
//! same mask, it takes over this write, and otherwise it sets its own mask.

use crate::basics::{BirthTime, CpuSet, Pid, ThreadId, Tid, prelude::*};
use crate::state::masks::target::target_mask;
use crate::state::{Descendant, MaskEntry, MaskLimits, WardenState};
use crate::terms::{
    DaemonMode, ExpectedMask, ForkMaskMismatch, MaskAction, MaskActionKind, MaskProbeResult, Policy, Record,
};

/// The affinity masks of newly forked processes that can be set before the decision about these processes, and the
/// records of these changes. The caller must write the records to the journal (the file with which a restarted daemon
/// restores its state) before it makes the changes.
#[derive(Debug, Default)]
pub struct FirstMaskWrites {
    /// The records for the journal.
    pub records: Vec<Record>,
    /// The changes of masks.
    pub actions: Vec<MaskAction>,
}

/// Returns the changes of the affinity masks of newly forked processes that need no further decision. `expected` has
/// the masks that newly forked processes should have, by pid. `probe` has those of these processes that have another
/// mask. The result has a process if all of these conditions hold:
///
/// - The requests (sched_setaffinity(2)) that the process may have inherited are known, and explain its mask.
/// - Neither its program nor a cpuset binds the process to a part of the job's PUs (logical CPUs).
/// - Nothing else changes at present: no cpuset of the job, and not the job of the parent.
///
/// The caller must then make the whole decision from the same `probe`
/// ([`reconcile_forks`](crate::reconcile::reconcile_forks)).
#[must_use]
pub fn plan_first_mask_writes(
    state: &WardenState,
    policy: &Policy,
    expected: &BTreeMap<Pid, ExpectedMask>,
    probe: &MaskProbeResult,
) -> FirstMaskWrites {
    let mut writes = FirstMaskWrites::default();
    // Kernels before Linux 6.2 set masks themselves, so the request that explains a mask is not certain.
    if policy.mode != DaemonMode::Enforce || !policy.cpuset_support.affinity_persists {
        return writes;
    }
    for forked in &probe.mismatches {
        let mask = expected.get(&forked.id.pid).map(|expected| &expected.mask);
        if let Some((record, action)) = mask.and_then(|mask| first_write(state, forked, mask, probe)) {
            writes.records.push(record);
            writes.actions.push(action);
        }
    }
    writes
}

/// Returns the change of the mask of the forked process `forked`, with its record. `grant` has the PUs that the process
/// should have. `None` if the mask can't be set before the decision.
fn first_write(
    state: &WardenState,
    forked: &ForkMaskMismatch,
    grant: &CpuSet,
    probe: &MaskProbeResult,
) -> Option<(Record, MaskAction)> {
    let ForkMaskMismatch { id, effective_mask } = forked;
    let now = probe.taken_at.since_boot;
    let descendant = state.lineage.descendant(id.pid).filter(|descendant| descendant.was_ancestor_member)?;
    let parent = state.members.get(&descendant.ancestor)?;
    let job = &parent.job;
    let changes = &state.cpusets.delayed_changes;
    let is_settled = parent.id.start <= id.start
        && *job == descendant.job
        && !changes.is_moving(parent.id)
        && !changes.has_change_for(job)
        && !state.cpusets.is_partition_delayed(job);
    if !is_settled {
        return None;
    }
    let birth = BirthTime::from_start_time(id.start, Some(now));
    // The child is in the cgroup of its parent, except if it was forked into another one.
    let limits = state.mask_limits(parent.id.pid, birth.earliest.min(now), true);
    if !is_request_known(state, descendant, &limits, effective_mask) {
        return None;
    }
    let mut entry = MaskEntry::from_inherited(descendant.inherited_mask_requests.iter().cloned(), birth)?;
    entry.record_reading(effective_mask, &limits, now);
    if !entry.needs_restore() {
        entry.mark_not_journaled();
    }
    let original = entry.original_mask().clone();
    if target_mask(&state.topology, grant, &original, parent.inherited_mask.as_ref()) != *grant {
        return None;
    }
    let is_everything = state.pool.online_cpus().is_subset(grant);
    let requested = if is_everything { state.topology.cpus().clone() } else { grant.clone() };
    if !entry.is_mask_from_program() && entry.requested_mask() == Some(&requested) {
        return None;
    }
    entry.add_intended_request(requested.clone(), original, now);
    let record = Record::ForkMaskSet {
        process: *id,
        ancestor: parent.id.pid,
        before: entry.original_mask().clone(),
        set: requested.clone(),
        since: entry.journaled_since().unwrap_or(now),
        at: now,
    };
    let thread = ThreadId { process: *id, tid: Tid(id.pid.0), start: id.start };
    // Only the decision that follows is shown to users, so the reason is left out.
    let kind = MaskActionKind::Confine;
    let action = MaskAction::with_exact_mask(kind, job, thread, effective_mask, grant.clone(), String::new());
    Some((record, MaskAction { requested_mask: requested, ..action }))
}

/// Whether `effective_mask`, the mask of the new process `new`, tells which mask was requested, without the cgroup of
/// the process: the process may have inherited the request, or no cpuset restricts the process and its parent. `limits`
/// has the PUs to which the kernel limits the masks of the parent.
pub(super) fn is_request_known(
    state: &WardenState,
    new: &Descendant,
    limits: &MaskLimits,
    effective_mask: &CpuSet,
) -> bool {
    let online = state.pool.online_cpus();
    let is_unrestricted =
        limits.possible_cpus.iter().chain([effective_mask]).all(|cpus| online.is_subset(cpus));
    let is_result_of = |requested: &CpuSet| limits.may_result_in(requested, effective_mask);
    is_unrestricted || new.inherited_mask_requests.iter().any(|request| is_result_of(&request.mask))
}
