//! Conversions from types of the core to types of the wire format.

use std::sync::Arc;

use jiff::Timestamp;
use pjw_core::cpuset_group::{CpusetAction, CpusetChange};
use pjw_core::job::{GrantedBy, Job, Ownership, PriorityClass};
use pjw_core::plan::{MaskAction, Plan, Warning};
use pjw_core::within_job::NumaNodeRule;
use pjw_core::{
    allocate::defrag::DefragPlan, allocate::offer::LargestRequests, event::Event,
    evidence::MembershipEvidence, state::WardenState, time::UnixMillis,
};
use pjw_ipc::call::{DefragReply, PlanReply};
use pjw_ipc::wire;

use super::counts::ProcessCounts;

/// The maximum length of the text of an event, in bytes. A longer text is cut.
pub(super) const MAX_TEXT_BYTES: usize = 1024;

/// Returns `time` as text in the format of RFC 3339, in UTC with milliseconds. Example: `2026-05-04T12:00:00.000Z`.
#[must_use]
pub fn format_rfc3339(time: UnixMillis) -> String {
    let time = Timestamp::from_millisecond(time.0).unwrap_or(Timestamp::UNIX_EPOCH);
    // Always three digits: columns stay aligned, and text sorts like time.
    format!("{time:.3}")
}

/// Converts a count to `u32`. Returns `u32::MAX` for a larger count.
pub(crate) fn saturating_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Converts `job` to the form in which clients receive jobs. `counts` has the numbers of the job's processes and
/// threads. `state` has the topology and the PUs (logical CPUs) of the machine. `enforcement` says what keeps the job
/// on its cores: `cpuset`, `affinity` or `none`.
pub(crate) fn job_to_wire(
    job: &Job,
    counts: ProcessCounts,
    state: &WardenState,
    enforcement: &str,
) -> wire::Job {
    let (topology, pool) = (&state.topology, &state.pool);
    // A frozen job waits for cores, so the PUs in its grant are not shown.
    let grant = job.grant.as_ref().filter(|grant| grant.ownership != Ownership::Frozen);
    let requested = job.request.as_ref().map(|request| request.cpu_request.core_count(topology));
    let state_name = match (&job.request, grant) {
        _ if job.was_released => "released",
        (None, None) => "observed",
        // A borrower without a process does not wait for cores: it gets cores when it has a process.
        (Some(_), None) if job.is_borrower() && counts.processes == 0 => "reserved",
        (Some(_), None) => "waiting",
        (_, Some(_)) if counts.processes == 0 => "reserved",
        (_, Some(_)) => "running",
    };
    let class = job.request.as_ref().map_or(PriorityClass::Normal, |request| request.class);
    let within_job = job.request.as_ref().map_or(NumaNodeRule::Default, |request| request.within_job);
    wire::Job {
        id: job.id.to_string(),
        source: job.id.source().to_string(),
        owner: job.owner.0,
        state: state_name.to_owned(),
        class: match class {
            PriorityClass::Guaranteed => "guaranteed",
            PriorityClass::Normal => "normal",
            PriorityClass::Besteffort => "besteffort",
        }
        .to_owned(),
        requested_cores: requested.unwrap_or(0),
        cpus: grant.map(|grant| grant.cpus.to_string()).unwrap_or_default(),
        granted_by: match grant.map(|grant| grant.granted_by) {
            Some(GrantedBy::Scheduler) => "scheduler",
            Some(GrantedBy::Warden) | None => "warden",
        }
        .to_owned(),
        shared: grant.is_some_and(|grant| grant.is_shared),
        enforcement: enforcement.to_owned(),
        processes: counts.processes,
        threads: counts.threads,
        hot: counts.hot_threads,
        pinned: counts.pinned_threads,
        violations: counts.outside_threads,
        strays: counts.strays,
        since: format_rfc3339(job.detected_at),
        borrowed: pool.borrowed_by(&job.id).to_string(),
        lent: pool.lent_by(&job.id).to_string(),
        provision: job
            .provision
            .as_ref()
            .map(|provision| provision.rule.as_ref().map(ToString::to_string).unwrap_or_default()),
        wants: job.wanted_core_count(topology),
        within_job: (within_job != NumaNodeRule::Default).then(|| within_job.to_string()),
    }
}

/// Returns the name of a kind of evidence in replies and in JSON, such as `cgroup`. Evidence is the reason why a
/// process belongs to its job.
#[must_use]
pub fn evidence_name(evidence: MembershipEvidence) -> &'static str {
    evidence.into()
}

/// Converts `event` to the form in which clients receive events. The field `time` of the result is the current time.
/// The field `text` has at most 1024 bytes: a longer text of the event is cut, and gets `…` at its end.
#[must_use]
pub fn event_to_wire(event: &Event) -> wire::Event {
    wire::Event {
        time: format_rfc3339(pjw_linux::sys::clock::now().wall_clock),
        event: event.kind.name().to_owned(),
        job: event.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        text: truncated(&event.text),
        pid: event.pid.map(|pid| pid.0),
        tid: event.tid.map(|tid| tid.0),
        cpus: event.cpus.as_ref().map(ToString::to_string),
    }
}

/// Returns `text`, cut to at most [`MAX_TEXT_BYTES`]. Event texts may repeat input of users, which can be long.
fn truncated(text: &str) -> String {
    if text.len() <= MAX_TEXT_BYTES {
        return text.to_owned();
    }
    let mut end = MAX_TEXT_BYTES - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

/// Converts the result of a dry run (a computation of changes without making them) to the reply to a client's call
/// `Plan`. `plan` has the changes of affinity masks and cpusets that the next cycle (scan, decision and changes) of the
/// daemon would make. Each of the `plan_warnings` describes a change that is needed but not planned, or a state that
/// needs attention.
#[must_use]
pub fn plan_to_wire(plan: &Plan, plan_warnings: &[Arc<Warning>]) -> PlanReply {
    let cpuset_actions = plan.cpuset_actions.iter().map(cpuset_action_to_wire);
    PlanReply {
        actions: cpuset_actions.chain(plan.mask_actions.iter().map(mask_action_to_wire)).collect(),
        warnings: plan_warnings.iter().map(|warning| plan_warning_to_wire(warning)).collect(),
    }
}

/// Converts the result of a defragmentation to the reply for a client. A defragmentation moves jobs to other cores,
/// so that larger requests for cores can be served. The reply is for the calls `PlanDefrag` (planned moves) and
/// `Defrag` (completed moves).
#[must_use]
pub fn defrag_to_wire(defrag: &DefragPlan) -> DefragReply {
    let moves = defrag.moves.iter().map(|moved| wire::Move {
        job: moved.job.to_string(),
        from: moved.from.to_string(),
        to: moved.to.to_string(),
        why: moved.improvement.clone(),
    });
    DefragReply {
        moves: moves.collect(),
        largest_requests_before: largest_requests_to_wire(defrag.largest_requests_before),
        largest_requests_after: largest_requests_to_wire(defrag.largest_requests_after),
    }
}

/// Converts the sizes of the largest requests for cores that can be granted now to the form in which clients receive
/// these sizes. There is one size for each part of the machine, such as a package or an L3 cache.
pub(crate) fn largest_requests_to_wire(
    LargestRequests { l3, numa_node, package, machine }: LargestRequests,
) -> wire::Fits {
    wire::Fits { l3, numa_node, package, machine }
}

fn mask_action_to_wire(action: &MaskAction) -> wire::Action {
    wire::Action {
        action: action.kind.name().to_owned(),
        job: action.job.to_string(),
        pid: action.thread.process.pid.0,
        tid: action.thread.tid.0,
        from: action.current_mask.to_string(),
        to: action.target_mask.to_string(),
        why: action.reason.clone(),
    }
}

/// Converts `action`, a change of a cpuset, to the form for clients. `pid` and `tid` of the result are 0 if the change
/// moves no process.
fn cpuset_action_to_wire(action: &CpusetAction) -> wire::Action {
    let pid = action.moved_process().map_or(0, |process| process.pid.0);
    let (from, to) = match &action.change {
        CpusetChange::Create { job_cpuset, .. } => {
            (job_cpuset.path.clone(), job_cpuset.spec.cpus.to_string())
        }
        CpusetChange::MoveIn { from, to, .. } | CpusetChange::MoveBack { from, to, .. } => {
            (from.clone(), to.clone())
        }
        CpusetChange::RemoveLimits { job_cpuset } | CpusetChange::Remove { job_cpuset } => {
            (job_cpuset.path.clone(), String::new())
        }
    };
    let (job, why) = (action.job.to_string(), action.reason.clone());
    wire::Action { action: action.kind_name().to_owned(), job, pid, tid: pid, from, to, why }
}

/// Converts a warning to the form of the warnings in the status that clients receive. A warning describes a condition
/// that needs attention, and its remedy.
#[must_use]
pub fn status_warning_to_wire(warning: &Warning) -> wire::Warning {
    wire::Warning {
        code: warning.code.to_owned(),
        job: warning.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        text: warning.text.clone(),
        remedy: warning.remedy.clone(),
    }
}

fn plan_warning_to_wire(plan_warning: &Warning) -> wire::Abstained {
    wire::Abstained {
        code: plan_warning.code.to_owned(),
        job: plan_warning.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        pid: plan_warning.pid.map(|pid| pid.0),
        why: plan_warning.text.clone(),
        remedy: plan_warning.remedy.clone(),
    }
}
