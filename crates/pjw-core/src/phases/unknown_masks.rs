//! Masks that an earlier daemon may have set, and that no record explains. They are kept, and named in a warning with the
//! command that widens them: the program itself may have chosen such a mask.

use crate::basics::{CpuSet, Pid, ProcessId, Uid, prelude::*};
use crate::phases::draft::Draft;
use crate::phases::membership::is_orphan_of_unknown_descent;
use crate::state::{KnownProcess, MaskEntry, MaskWriter, WardenState};
use crate::terms::{GrantedBy, Policy, Process, Warning};

/// The largest number of processes that a warning about a job names.
const MAX_NAMED: usize = 8;
/// The largest number of processes whose masks one warning names. The next ones are named when these have other masks.
const MAX_NAMED_MASKS: usize = 4096;

/// Finds processes whose masks may be those of an earlier daemon, and warns about them while they live with these masks.
pub(crate) fn update_and_report(draft: &mut Draft<'_>) {
    let found: Vec<Pid> = if draft.full && draft.state.has_lost_records {
        draft.state.has_lost_records = false;
        let known = draft.state.processes.values().map(|known| &known.process);
        known
            .filter(|process| is_bound(draft.state, draft.policy, process))
            .map(|process| process.id.pid)
            .collect()
    } else {
        let scanned = draft.scanned_pids().filter_map(|pid| draft.state.processes.get(&pid));
        scanned
            .filter(|known| may_inherit_from_root(draft.state, known))
            .map(|known| known.process.id.pid)
            .collect()
    };
    for pid in found {
        let found = draft
            .state
            .process(pid)
            .and_then(|process| Some((process.id, process.first_thread_mask.clone()?)));
        draft.state.masks_of_unknown_origin.extend(found);
    }
    let mut masks = core::mem::take(&mut draft.state.masks_of_unknown_origin);
    let has_mask = |process: &ProcessId, mask: &mut CpuSet| {
        let known = draft.state.process(process.pid).filter(|known| known.id == *process);
        draft.state.tracked(process.pid).is_none()
            && known.is_some_and(|known| known.first_thread_mask.as_ref() == Some(mask))
    };
    masks.retain(has_mask);
    let pids: Vec<Pid> = masks.keys().map(|process| process.pid).collect();
    draft.state.masks_of_unknown_origin = masks;
    draft.out.warnings.extend(warning(draft.state, &pids));
}

/// Whether the mask of a process outside of all jobs is narrower than its cpuset and the online PUs. Except a process in the
/// cgroup of a scheduler's job: the scheduler binds its tasks.
pub(super) fn is_bound(state: &WardenState, policy: &Policy, process: &Process) -> bool {
    let (pid, online) = (process.id.pid, state.pool.online_cpus());
    let is_served = policy.only_managed_user.is_none_or(|user| user == process.uid);
    let is_system = process.is_kernel_thread || pid == Pid(1) || policy.own_pid == Some(pid);
    if is_system || !is_served || state.tracked(pid).is_some() {
        return false;
    }
    let known = state.processes.get(&pid);
    let is_schedulers = known.is_some_and(|known| known.job_marks.job_of_cgroup().is_some());
    let possible =
        state.cpuset_read_around(pid).map_or(online.clone(), |cpuset| cpuset.intersection(&online));
    !is_schedulers && process.first_thread_mask.as_ref().is_some_and(|mask| !possible.is_subset(mask))
}

/// Whether an orphan of root has exactly a mask that pjw set for a job of root. Such an orphan of another user becomes a member.
/// Daemons of root choose masks, so an orphan of root is only named.
fn may_inherit_from_root(state: &WardenState, known: &KnownProcess) -> bool {
    let process = &known.process;
    if process.uid != Uid::ROOT
        || process.is_kernel_thread
        || !known.is_new
        || state.tracked(process.id.pid).is_some()
    {
        return false;
    }
    let Some(mask) =
        process.first_thread_mask.as_ref().filter(|mask| !state.pool.online_cpus().is_subset(mask))
    else {
        return false;
    };
    let has_mask_of_job = || {
        state.jobs.of_owner(Uid::ROOT).any(|job| {
            let members = || state.members_of(&job.id).filter(|member| member.id.start <= process.id.start);
            let entries = members()
                .flat_map(|member| member.threads.values())
                .filter_map(|thread| thread.mask_entry.as_ref());
            let mut requests = entries.flat_map(MaskEntry::last_request_candidates);
            let is_granted = job.grant_chosen_by(GrantedBy::Warden).is_some_and(|grant| grant.cpus == *mask);
            members().next().is_some()
                && (is_granted
                    || requests.any(|request| request.writer == MaskWriter::Warden && request.mask == *mask))
        })
    };
    is_orphan_of_unknown_descent(state, known) && (has_mask_of_job() || state.has_released_mask(process))
}

/// The warning that an earlier daemon may have set the masks of these processes. `None` if there are none.
pub(super) fn warning(state: &WardenState, pids: &[Pid]) -> Option<Warning> {
    let (first, all) = (pids.first()?, state.topology.cpus());
    let text = format!(
        "the masks of some processes may be those that an earlier pjwd set, and are kept: {}",
        first_pids_text(pids, MAX_NAMED_MASKS)
    );
    let remedy = if pids.len() == 1 {
        format!("taskset -pac {all} {first} widens the mask of a process that did not choose it")
    } else {
        let listed: Vec<String> = pids.iter().take(MAX_NAMED_MASKS).map(ToString::to_string).collect();
        format!(
            "for pid in {}; do taskset -pac {all} $pid; done widens the masks of processes that did not choose them",
            listed.join(" ")
        )
    };
    Some(Warning::new("unknown-masks", text, remedy))
}

/// The first of these processes, and the number of the others.
pub(super) fn pids_text(pids: &[Pid]) -> String {
    first_pids_text(pids, MAX_NAMED)
}

fn first_pids_text(pids: &[Pid], most: usize) -> String {
    let named: Vec<String> = pids.iter().take(most).map(ToString::to_string).collect();
    match pids.len().saturating_sub(most) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
