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
/// of the same kind for the same job, and names the PUs (logical CPUs) that the job holds in `state`. These changes are
/// not reported:
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
        let (event, text) = match kind {
            MaskActionKind::Confine => (EventKind::Confined, format!("{threads} put on {cpus}")),
            MaskActionKind::Repair => (EventKind::Repaired, format!("{threads} put back on {cpus}")),
            MaskActionKind::Pin => (EventKind::Rebalanced, format!("{threads} pinned inside {cpus}")),
            MaskActionKind::Unbind => (EventKind::Repaired, unbind_text(&threads, &actions, &cpus)),
            MaskActionKind::Override => {
                (EventKind::Rebalanced, format!("the own bindings of {threads} inside {cpus} lifted"))
            }
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

fn unbind_text(threads: &str, actions: &[&MaskAction], grant: &str) -> String {
    let bound_to = actions.iter().fold(CpuSet::new(), |cpus, action| cpus.union(&action.current_mask));
    format!(
        "{threads} bound to {} moved inside {grant}: too many running threads were bound there, while other CPUs of the job \
         idled",
        cpus_text(&bound_to)
    )
}

fn rebind_text(threads: &str, actions: &[&MaskAction]) -> String {
    let bound_to = actions.iter().fold(CpuSet::new(), |cpus, action| cpus.union(&action.target_mask));
    format!(
        "{threads} bound to {} again: moving them did not help, they waited for a CPU as long as before",
        cpus_text(&bound_to)
    )
}
