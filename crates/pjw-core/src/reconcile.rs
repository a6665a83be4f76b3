//! The decision of one cycle, as a pure function.
//!
//! The input is the facts of a scan, the commands, the state and the policy. The output is the plan of changes, the
//! records to write to the journal before the plan is applied, and the warnings about changes that are not made. The
//! function changes the state, and nothing else. The time is one of the facts. The same input gives the same decision
//! on any machine.
//!
//! ```text
//! Snapshot ─> observe ─> address spaces ─> recovery ─> membership ─> attempts ─> usage ─> jobs ─> hotplug ─> commands
//!          ─> membership ─> jobs ─> lending ─> unassigned ─> cpusets ─> masks, pinning ─> Plan ─> unknown masks ─> warnings, next scan ─> Decision
//! ```

use alloc::sync::Arc;

use crate::basics::prelude::*;
use crate::next_scan::next_scan;
use crate::phases::commands::types::{Command, Reply};
use crate::phases::draft::{CycleDraft, CycleOutput};
use crate::phases::{
    address_spaces, attempts, commands::serve, cpusets, cpusets::planned::PendingCpusetChanges, hotplug,
    jobs, lending, masks, membership, observe, recovery, unassigned, unknown_masks, usage,
};
use crate::state::{DirtySet, WardenState, scans::PARTIAL_RESCANS_PER_FULL_RESCAN};
use crate::terms::{
    Event, JobId, JobReport, Plan, Policy, Record, Refusal, ScanRequest, ScanScope, Snapshot, Warning,
};

/// The decision of one cycle of the daemon. A cycle is a scan, a decision and the decided changes. The decision
/// contains the planned changes of affinity masks and cpusets, and the records of these changes for pjwd's journal
/// files. It also contains the replies to commands, and the events to report.
#[derive(Debug)]
#[must_use = "a decision that is not carried out is lost"]
pub struct Decision {
    /// The records that describe the decided changes, for the journal (the file from which a restarted daemon restores
    /// its state). The caller must write the records before it carries out the plan.
    pub records: Vec<Record>,
    /// The changes of affinity masks and cpusets that are to be made.
    pub plan: Plan,
    /// The warnings for users. A warning is about a change that pjw does not make, or about a state that needs
    /// attention, and has the reason and a remedy. While no warning changes, each decision has the same list.
    pub warnings: Arc<[Arc<Warning>]>,
    /// The events of this cycle, for `pjwctl events` and the log.
    pub events: Vec<Event>,
    /// The replies to the commands, in the order of the commands. An error is the reason why a command was
    /// refused. The caller must send the replies only after it has carried out the plan.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// The scan that the caller must make after it has carried out the plan, in the same cycle. The scan
    /// reads facts that were missing for this decision. It also reads again the processes and cgroups that
    /// the plan changed. `None` if no further scan is needed.
    pub next_scan: Option<ScanRequest>,
    /// The jobs and processes about which this decision was made. For all other jobs and processes, the
    /// earlier decision is still valid.
    pub newly_planned: DirtySet,
    /// The reports of the jobs that ended or were released in this cycle. A report has the CPU time, the memory and the
    /// cores that the job used.
    pub reports: Vec<JobReport>,
}

/// Makes the decision of the daemon after a scan of the machine. Updates `state` from the scan `snapshot`, executes
/// `commands`, and plans the changes of affinity masks and cpusets. Changes only `state`. The caller must first write
/// [`Decision::records`] to pjwd's journal files. After that, the caller must make the changes in [`Decision::plan`].
pub fn reconcile(
    state: &mut WardenState,
    snapshot: &Snapshot,
    commands: &[Command],
    policy: &Policy,
) -> Decision {
    let full = snapshot.scope == ScanScope::Full;
    state.full_scan_due &= !full;
    if full {
        mark_dirty_by_rescan(state);
    }
    if !commands.is_empty() {
        // The scan for a command reads only what the command concerns. The next rescan checks the rest.
        state.periodic_scans_until_full = 0;
    }
    let mut draft = CycleDraft::new(state, snapshot, policy);

    observe::update_state(&mut draft);
    address_spaces::update_address_spaces(&mut draft);
    unknown_masks::begin_unknown_mask_search(&mut draft);
    recovery::recover_cpusets(&mut draft);
    membership::update_members(&mut draft);
    membership::released::track_released_children(&mut draft);
    let reported_attempts = attempts::report_affinity_violations(&mut draft);
    usage::update_usage(&mut draft, commands.is_empty());
    observe::remove_ended_processes(&mut draft);
    jobs::end_finished_jobs(&mut draft);
    hotplug::replace_lost_cores(&mut draft);
    let replies = serve::execute_commands(&mut draft, commands);
    membership::update_members(&mut draft);
    membership::released::track_released_children(&mut draft);
    membership::released::mark_provisions_with_left_children(&mut draft);
    jobs::apply_scheduler_cpusets(&mut draft);
    jobs::waiting::serve_waiting_jobs(&mut draft);
    lending::update_loans(&mut draft);
    unassigned::report_unassigned_processes(&mut draft);
    hotplug::warn_incomplete_grants(&mut draft);
    let PendingCpusetChanges { actions: cpuset_actions, waiting_jobs } = cpusets::plan_cpusets(&mut draft);
    let kept_off = unassigned::restrict_unassigned(&mut draft);
    let restored = masks::plan_mask_restores(&mut draft);
    let confined = masks::plan_masks(&mut draft, &waiting_jobs, reported_attempts);
    // Restoring comes first: threads of a released job must leave the PUs of a new one.
    let online = draft.state.pool.online_cpus();
    let mask_actions =
        [restored, kept_off, confined].map(|actions| masks::sort_mask_actions(actions, &online)).concat();
    let plan = Plan { cpuset_actions, mask_actions };

    recovery::warn_recovered_cpusets(&mut draft);
    address_spaces::warn_shared_address_spaces(&mut draft);
    unknown_masks::report_unknown_masks(&mut draft);
    membership::released::forget_unused_masks(&mut draft);
    report_incomplete_scan(&mut draft, snapshot);

    let planned = draft.jobs_to_plan();
    let CycleDraft { state, out: CycleOutput { records, events, warnings, job_warnings, reports }, .. } =
        draft;
    state.usage.count_violations_and_repairs(&events);
    state.update_job_warnings(&planned, job_warnings);
    let warnings = state.list_warnings(warnings);
    let next_scan = next_scan(state, &plan, full, &records);
    let planned = core::mem::replace(&mut state.dirty, still_dirty(&plan, &waiting_jobs));
    let mut changed = state.members.take_changed_jobs();
    state.mark_waiting_jobs_without_processes(&changed);
    changed.extend(planned.listed_jobs().map(|(job, _)| job.clone()));
    if planned.contains_everything() {
        changed.extend(state.jobs.keys().chain(state.idle_groups.keys()).cloned());
    }
    state.update_idle_groups(&changed);
    Decision { records, plan, warnings, events, replies, next_scan, newly_planned: planned, reports }
}

/// Decides which affinity masks newly forked processes get at once. The processes were forked with masks outside of
/// their jobs' cores. `snapshot` has these processes only
/// ([`snapshot_of_mismatches`](crate::fork_fastpath::snapshot_of_mismatches)). Makes only the part of the decision that
/// these masks need, because the processes run outside of their jobs until then. The caller must carry out the decision
/// as that of [`reconcile`]. In the same cycle, the caller must then scan the processes and call [`reconcile`], which
/// makes the rest of the decision.
///
/// [`Decision::warnings`] are those of the last decision. [`Decision::next_scan`] is `None`.
pub fn reconcile_forks(state: &mut WardenState, snapshot: &Snapshot, policy: &Policy) -> Decision {
    let mut draft = CycleDraft::new(state, snapshot, policy);
    observe::update_state(&mut draft);
    membership::update_members(&mut draft);
    let mask_actions = masks::plan_masks_of_scanned(&mut draft);
    let CycleDraft { state, out: CycleOutput { records, events, reports, .. }, .. } = draft;
    state.usage.count_violations_and_repairs(&events);
    Decision {
        records,
        plan: Plan { cpuset_actions: Vec::new(), mask_actions },
        warnings: state.last_warnings(),
        events,
        replies: Vec::new(),
        next_scan: None,
        newly_planned: DirtySet::default(),
        reports,
    }
}

/// Marks the jobs and processes that the decision after a full scan plans, in addition to the processes that ran.
/// These are the jobs without cores: only a full scan ends the restoring of the masks of their processes. If
/// `periodic_scans_until_full` is 0, all jobs and processes are planned, in case a change was missed.
fn mark_dirty_by_rescan(state: &mut WardenState) {
    let Some(scans_left) = state.periodic_scans_until_full.checked_sub(1) else {
        state.periodic_scans_until_full = PARTIAL_RESCANS_PER_FULL_RESCAN;
        state.dirty = DirtySet::everything();
        return;
    };
    state.periodic_scans_until_full = scans_left;
    state.jobs.jobs_without_cores().for_each(|job| state.dirty.add_job(&job.id));
}

/// Returns the jobs and processes that the next decision plans again: those that `plan` changes, until a plan has no
/// change for them. The result also has the jobs in `waiting_jobs`, which wait for their cpusets.
fn still_dirty(plan: &Plan, waiting_jobs: &BTreeSet<JobId>) -> DirtySet {
    let mut dirty = DirtySet::default();
    waiting_jobs.iter().for_each(|job| dirty.add_job(job));
    plan.mask_actions.iter().for_each(|action| dirty.add_process(&action.job, action.thread.process.pid));
    dirty
}

/// Reports an incomplete scan. What is known of a thing that could not be scanned stays unchanged.
fn report_incomplete_scan(draft: &mut CycleDraft<'_>, snapshot: &Snapshot) {
    let Some(cause) = &snapshot.incomplete_reason else { return };
    draft.state.full_scan_due = true;
    let why = format!("some processes could not be read ({cause}): what is known of them is kept as it is");
    let remedy = "give pjwd more open files and memory (LimitNOFILE=, MemoryMax= of its unit)";
    draft.out.warnings.push(Arc::new(Warning::new("unseen", why, remedy)));
}
