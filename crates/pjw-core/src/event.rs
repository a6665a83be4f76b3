//! What happened, for people and scripts: one closed list, from which log lines and `events --json` are made.

use std::collections::BTreeMap;

use crate::cpuset::CpuSet;
use crate::job::JobId;
use crate::plan::{Action, ActionKind, Outcome};
use crate::process::{Pid, Tid};
use crate::state::WardenState;
use crate::wall::{WallAction, WallChange, WallOutcome};

/// The kinds of event; their names are public (CONTRACT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventKind {
    /// A job got cores.
    Assigned,
    /// A job got more or fewer cores, or others.
    Resized,
    /// A job ended or was let go; its cores are free.
    Released,
    /// Threads were put inside their job's cores.
    Confined,
    /// A thread left its job's cores.
    Violation,
    /// A process that belongs to no job runs for a user who has jobs here.
    Stray,
    /// Something that was undone by others was put back.
    Repaired,
    /// A request was refused.
    Refused,
    /// Cores were taken back from a job.
    Revoked,
    /// Running threads were spread anew over a job's cores.
    Rebalanced,
    /// PUs came or went.
    Hotplug,
    /// Events were lost, and everything was looked at again.
    Overrun,
    /// The warden started.
    Started,
    /// The warden stopped.
    Stopped,
    /// The configuration was read again.
    Reloaded,
}

impl EventKind {
    /// Its name in `events --json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Assigned => "assigned",
            EventKind::Resized => "resized",
            EventKind::Released => "released",
            EventKind::Confined => "confined",
            EventKind::Violation => "violation",
            EventKind::Stray => "stray",
            EventKind::Repaired => "repaired",
            EventKind::Refused => "refused",
            EventKind::Revoked => "revoked",
            EventKind::Rebalanced => "rebalanced",
            EventKind::Hotplug => "hotplug",
            EventKind::Overrun => "overrun",
            EventKind::Started => "started",
            EventKind::Stopped => "stopped",
            EventKind::Reloaded => "reloaded",
        }
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// To which job.
    pub job: Option<JobId>,
    /// To which process.
    pub pid: Option<Pid>,
    /// To which thread.
    pub tid: Option<Tid>,
    /// With which PUs.
    pub cpus: Option<CpuSet>,
    /// In one sentence.
    pub text: String,
}

impl Event {
    /// An event of a kind with its sentence; the details are added with the other methods.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> Self {
        Self { kind, job: None, pid: None, tid: None, cpus: None, text: text.into() }
    }

    /// The same, of a job.
    #[must_use]
    pub fn of(mut self, job: &JobId) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// The same, with PUs.
    #[must_use]
    pub fn with_cpus(mut self, cpus: &CpuSet) -> Self {
        self.cpus = Some(cpus.clone());
        self
    }

    /// The same, of a process.
    #[must_use]
    pub fn at(mut self, pid: Pid) -> Self {
        self.pid = Some(pid);
        self
    }
}

/// The same of walls: one event where a job's wall was built or repaired, and one where processes were fetched back.
#[must_use]
pub fn of_walls(outcomes: &[(WallAction, WallOutcome)]) -> Vec<Event> {
    let mut events = Vec::new();
    let mut fetched: BTreeMap<(&JobId, &str), Vec<(Pid, &str)>> = BTreeMap::new();
    for (action, outcome) in outcomes {
        if !matches!(outcome, WallOutcome::Done { .. }) {
            continue;
        }
        match &action.change {
            WallChange::Raise { wall, .. } => {
                let kind = if action.again { EventKind::Repaired } else { EventKind::Confined };
                let cpus = &wall.bounds.cpus;
                let text = format!("the cpuset of {} keeps it on {cpus}", wall.path);
                events.push(Event::new(kind, text).of(&action.job).with_cpus(cpus));
            }
            WallChange::Admit { process, from, to } if action.again => {
                fetched.entry((&action.job, to)).or_default().push((process.pid, from));
            }
            _ => {}
        }
    }
    for ((job, to), strays) in fetched {
        let Some(&(pid, from)) = strays.first() else { continue };
        let others = if strays.len() > 1 { format!(" and {} more", strays.len() - 1) } else { String::new() };
        let text = format!("process {pid}{others} had been moved to {from}");
        events.push(Event::new(EventKind::Stray, text).of(job).at(pid));
        let text = format!("process {pid}{others} moved back into {to}");
        events.push(Event::new(EventKind::Repaired, text).of(job).at(pid));
    }
    events
}

/// What the carried-out part of a plan looks like to a person: one event for each job and kind of change, not
/// one for each thread. Threads that vanished meanwhile are no news.
#[must_use]
pub fn of_outcomes(state: &WardenState, outcomes: &[(Action, Outcome)]) -> Vec<Event> {
    let mut counts: BTreeMap<(&JobId, ActionKind), usize> = BTreeMap::new();
    for (action, outcome) in outcomes {
        if matches!(outcome, Outcome::Done { .. }) {
            *counts.entry((&action.job, action.kind)).or_default() += 1;
        }
    }
    let mut events = Vec::new();
    for ((job, kind), count) in counts {
        let grant = state.jobs.get(job).and_then(|job| job.grant.as_ref()).map(|grant| grant.cpus.clone());
        let grant = grant.unwrap_or_default();
        let threads = if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") };
        let (event, text) = match kind {
            ActionKind::Confine => (EventKind::Confined, format!("{threads} put on {grant}")),
            ActionKind::Repair => (EventKind::Repaired, format!("{threads} put back on {grant}")),
            ActionKind::Pin => (EventKind::Rebalanced, format!("{threads} pinned inside {grant}")),
            ActionKind::KeepOff => {
                (EventKind::Confined, format!("{threads} of strays kept off the cores of jobs"))
            }
            ActionKind::Float | ActionKind::Restore => continue,
        };
        events.push(Event::new(event, text).of(job).with_cpus(&grant));
    }
    events
}
