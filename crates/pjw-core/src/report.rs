//! Events about the actions that were carried out.

use crate::basics::{CpuSet, Pid, cpus_text, prelude::*};
use crate::state::WardenState;
use crate::terms::{
    CpusetAction, CpusetChange, CpusetOutcome, Event, EventKind, JobId, MaskAction, MaskActionKind,
    MaskOutcome,
};

/// Returns the events that report the changes of cpusets in `outcomes` to users:
///
/// - One event for each cpuset that was created or whose settings were changed. The cpusets of jobs of the class
///   besteffort are left out: these jobs borrow cores, and each change of their cores has an event of its own.
/// - One event for each cpuset that was repaired: another program had changed it.
/// - Two events for each job whose processes had left the cpuset of the job and were moved back. The first
///   event says that the processes had left the cpuset. The second event says that they were moved back.
///
/// Other changes, and changes that failed, are not reported.
#[must_use]
pub fn cpuset_events(outcomes: &[(CpusetAction, CpusetOutcome)]) -> Vec<Event> {
    let mut events = Vec::new();
    let mut moved_back: BTreeMap<(&JobId, &str), Vec<(Pid, &str)>> = BTreeMap::new();
    for (action, outcome) in outcomes {
        if !matches!(outcome, CpusetOutcome::Done { .. }) {
            continue;
        }
        match &action.change {
            // The cores of a borrower change often, and each change has an event of its own.
            CpusetChange::Create { job_cpuset, .. } if job_cpuset.spec.idle && !action.is_repair => {}
            CpusetChange::Create { job_cpuset, .. } => {
                let kind = if action.is_repair { EventKind::Repaired } else { EventKind::Confined };
                let cpus = &job_cpuset.spec.cpus;
                let text = format!("the cpuset of {} keeps it on {}", job_cpuset.path, cpus_text(cpus));
                events.push(Event::new(kind, text).with_job(&action.job).with_cpus(cpus));
            }
            CpusetChange::MoveIn { process, from, to } if action.is_repair => {
                moved_back.entry((&action.job, to)).or_default().push((process.pid, from));
            }
            _ => {}
        }
    }
    for ((job, to), strays) in moved_back {
        let Some(&(pid, from)) = strays.first() else { continue };
        let others = if strays.len() > 1 { format!(" and {} more", strays.len() - 1) } else { String::new() };
        let text = format!("process {pid}{others} had been moved to {from}");
        events.push(Event::new(EventKind::Stray, text).with_job(job).with_pid(pid));
        let text = format!("process {pid}{others} moved back into {to}");
        events.push(Event::new(EventKind::Repaired, text).with_job(job).with_pid(pid));
    }
    events
}

/// Returns the events that report the changes of affinity masks in `outcomes` to users. One event reports all changes
/// of the same kind for the same job, so that the number of events does not depend on the number of threads. It names
/// the PUs (logical CPUs) that the job holds in `state`. If the changes replace masks of programs, it also names these
/// masks and the reason. These changes are not reported:
///
/// - changes that failed,
/// - changes of the kind `float`: a thread is no longer pinned to one PU,
/// - changes of the kind `restore`: a thread got the mask back that it had before pjw changed it.
#[must_use]
pub fn mask_events(state: &WardenState, outcomes: &[(MaskAction, MaskOutcome)]) -> Vec<Event> {
    let mut changed: BTreeMap<(&JobId, MaskActionKind), Vec<&MaskAction>> = BTreeMap::new();
    for (action, outcome) in outcomes {
        if matches!(outcome, MaskOutcome::Done { .. }) {
            changed.entry((&action.job, action.kind)).or_default().push(action);
        }
    }
    let mut events = Vec::new();
    for ((job, kind), actions) in changed {
        let count = actions.len();
        let grant = state.grant_of(job).map(|grant| grant.cpus.clone()).unwrap_or_default();
        let cpus = cpus_text(&grant);
        let threads = if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") };
        let why = || program_request_text(state, &actions, &grant);
        let (event, text) = match kind {
            MaskActionKind::Confine => (EventKind::Confined, format!("{threads} put on {cpus}{}", why())),
            MaskActionKind::Repair => (EventKind::Repaired, format!("{threads} put back on {cpus}{}", why())),
            MaskActionKind::Pin => (EventKind::Rebalanced, format!("{threads} pinned inside {cpus}")),
            MaskActionKind::Unbind => (EventKind::Repaired, unbind_text(&threads, &actions, &cpus)),
            MaskActionKind::Override => (EventKind::Rebalanced, override_text(&threads, &actions, &cpus)),
            MaskActionKind::Rebind => (EventKind::Repaired, rebind_text(&threads, &actions)),
            MaskActionKind::KeepOff => {
                (EventKind::Confined, format!("{threads} of strays kept off the cores of jobs"))
            }
            MaskActionKind::Float | MaskActionKind::Restore => continue,
        };
        events.push(Event::new(event, text).with_job(job).with_cpus(&grant));
    }
    events
}

/// Returns the end of a sentence about `actions`, which are changes of masks of one job: the PUs (logical CPUs) for
/// which programs had asked, and the PUs that their threads get instead. `grant` has the PUs of the job. Empty if no
/// program had asked for PUs that the job does not hold.
fn program_request_text(state: &WardenState, actions: &[&MaskAction], grant: &CpuSet) -> String {
    let replaces_request = |action: &&&MaskAction| {
        action.program_request.as_ref().is_some_and(|requested| !requested.is_subset(grant))
    };
    let replacing: Vec<&MaskAction> = actions.iter().filter(replaces_request).copied().collect();
    if replacing.is_empty() {
        return String::new();
    }
    let requests = || replacing.iter().filter_map(|action| certain_request(state, action));
    let requested = union_of(requests());
    let missing = requested.difference(grant);
    let requested = if requests().all(|requested| state.topology.cpus().is_subset(requested)) {
        "every CPU".to_owned()
    } else if missing.is_empty() {
        "all CPUs of its cpuset, and perhaps for further ones".to_owned()
    } else if missing == requested {
        format!("{}, which the job does not hold", cpus_text(&requested))
    } else {
        format!("{}, of which the job does not hold {}", cpus_text(&requested), cpus_text(&missing))
    };
    let threads = match replacing.len() {
        count if count < actions.len() => format!("for {count} of them, "),
        _ => String::new(),
    };
    let replacement = union_of(replacing.iter().map(|action| &action.target_mask));
    let replacement =
        if replacement == *grant { String::new() } else { format!("; {} instead", cpus_text(&replacement)) };
    format!(": {threads}the program asked for {requested}{replacement}")
}

/// Returns the PUs (logical CPUs) for which the program has certainly asked, if `action` replaces its request. If the
/// program got all PUs of a cpuset, it is only an assumption that it asked for every PU: the cpuset hides the others.
fn certain_request<'a>(state: &WardenState, action: &'a MaskAction) -> Option<&'a CpuSet> {
    let requested = action.program_request.as_ref()?;
    let is_assumed = state.topology.cpus().is_subset(requested)
        && !state.pool.online_cpus().is_subset(&action.current_mask);
    Some(if is_assumed { &action.current_mask } else { requested })
}

fn unbind_text(threads: &str, actions: &[&MaskAction], grant: &str) -> String {
    let bound_to = union_of(actions.iter().map(|action| &action.current_mask));
    format!(
        "{threads} bound to {} moved inside {grant}: too many running threads were bound there, while other CPUs of the job \
         idled",
        cpus_text(&bound_to)
    )
}

fn override_text(threads: &str, actions: &[&MaskAction], grant: &str) -> String {
    let bound_to = union_of(actions.iter().map(|action| &action.current_mask));
    format!(
        "{threads} bound to {} moved inside {grant}: the configuration lifts every binding (affinity = \
         \"override\")",
        cpus_text(&bound_to)
    )
}

fn rebind_text(threads: &str, actions: &[&MaskAction]) -> String {
    let bound_to = union_of(actions.iter().map(|action| &action.target_mask));
    format!(
        "{threads} bound to {} again: moving them did not help, they waited for a CPU as long as before",
        cpus_text(&bound_to)
    )
}

fn union_of<'c>(masks: impl IntoIterator<Item = &'c CpuSet>) -> CpuSet {
    masks.into_iter().fold(CpuSet::new(), |all, mask| all.union(mask))
}
