//! What the loop counts, fed from the report of each cycle.

use std::time::Duration;

use pjw_core::event::EventKind;
use pjw_core::plan::{ActionKind, Outcome};
use pjw_core::wall::{WallChange, WallOutcome};

use crate::cycle::{Report, Troubles};

/// Why a cycle ran. A cycle that several things caused counts for the one that made it look at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Events of the kernel: a look at those processes.
    Event,
    /// The interval was over: a look at every job.
    Timer,
    /// A look at everything: it was time for one, events were lost, or somebody asked for a change.
    Full,
}

impl Cause {
    /// Every cause, in the order in which they are counted.
    pub const ALL: [Cause; 3] = [Cause::Event, Cause::Timer, Cause::Full];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::Event => "event",
            Cause::Timer => "timer",
            Cause::Full => "full",
        }
    }
}

/// The upper bounds of the buckets for times, in seconds, and as they are written.
pub const BOUNDS: [(Duration, &str); 15] = [
    (Duration::from_micros(100), "0.0001"),
    (Duration::from_micros(250), "0.00025"),
    (Duration::from_micros(500), "0.0005"),
    (Duration::from_millis(1), "0.001"),
    (Duration::from_micros(2_500), "0.0025"),
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_millis(250), "0.25"),
    (Duration::from_millis(500), "0.5"),
    (Duration::from_secs(1), "1.0"),
    (Duration::from_millis(2_500), "2.5"),
    (Duration::from_secs(5), "5.0"),
];

/// How long things took, by [`BOUNDS`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times {
    /// How many fell into each bucket and none below it.
    pub buckets: [u64; BOUNDS.len()],
    /// How many there were in all.
    pub count: u64,
    /// How long they took together.
    pub sum: Duration,
}

impl Times {
    /// Adds one.
    pub fn add(&mut self, took: Duration) {
        if let Some(at) = BOUNDS.iter().position(|(bound, _)| took <= *bound) {
            self.buckets[at] += 1;
        }
        self.count += 1;
        self.sum += took;
    }
}

/// What became of a change, for masks and walls alike.
pub const OUTCOMES: [&str; 3] = ["done", "gone", "refused"];

/// The kinds of change to a mask, in the order in which they are counted.
pub const ACTIONS: [ActionKind; 6] = [
    ActionKind::Confine,
    ActionKind::Repair,
    ActionKind::Pin,
    ActionKind::Float,
    ActionKind::KeepOff,
    ActionKind::Restore,
];

/// The kinds of change to a wall, in the order in which they are counted, by their names in plans.
pub const WALL_ACTIONS: [&str; 5] = ["raise", "admit", "return", "open", "raze"];

/// All of it, since metrics were switched on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Cycles, by [`Cause::ALL`].
    pub cycles: [u64; Cause::ALL.len()],
    /// How long they took.
    pub times: Times,
    /// How long newborns were outside.
    pub reactions: Times,
    /// Events that the kernel told.
    pub kernel_events: u64,
    /// How often the kernel told that it had dropped some.
    pub overruns: u64,
    /// Changes to masks, by [`ACTIONS`] and [`OUTCOMES`].
    pub actions: [[u64; OUTCOMES.len()]; ACTIONS.len()],
    /// Changes to walls, by [`WALL_ACTIONS`] and [`OUTCOMES`].
    pub walls: [[u64; OUTCOMES.len()]; WALL_ACTIONS.len()],
    /// Processes that were found outside their job's cores, or asked for others.
    pub violations: u64,
    /// Plans, or parts of one, that the audit stopped.
    pub audit_failures: u64,
    /// How often the journal could not be written.
    pub journal_faults: u64,
    /// How long after it was due the last timed look began.
    pub behind: Duration,
}

impl Counters {
    /// Takes in what one cycle did.
    pub fn count(&mut self, cause: Cause, took: Duration, report: &Report, troubles: &Troubles) {
        let cause = match cause {
            Cause::Event => 0,
            Cause::Timer => 1,
            Cause::Full => 2,
        };
        self.cycles[cause] += 1;
        self.times.add(took);
        for (action, outcome) in &report.outcomes {
            let outcome = match outcome {
                Outcome::Done { .. } => 0,
                Outcome::Gone => 1,
                Outcome::Refused { .. } => 2,
            };
            self.actions[place_of(action.kind)][outcome] += 1;
        }
        for (action, outcome) in &report.walls {
            let outcome = match outcome {
                WallOutcome::Done { .. } => 0,
                WallOutcome::Gone => 1,
                WallOutcome::Refused { .. } => 2,
            };
            self.walls[place_of_wall(&action.change)][outcome] += 1;
        }
        let violations = report.events.iter().filter(|event| event.kind == EventKind::Violation);
        self.violations += violations.count() as u64;
        self.audit_failures += troubles.audit.len() as u64;
        self.journal_faults += u64::from(troubles.journal.is_some());
    }
}

fn place_of(kind: ActionKind) -> usize {
    match kind {
        ActionKind::Confine => 0,
        ActionKind::Repair => 1,
        ActionKind::Pin => 2,
        ActionKind::Float => 3,
        ActionKind::KeepOff => 4,
        ActionKind::Restore => 5,
    }
}

fn place_of_wall(change: &WallChange) -> usize {
    match change {
        WallChange::Raise { .. } => 0,
        WallChange::Admit { .. } => 1,
        WallChange::Return { .. } => 2,
        WallChange::Open { .. } => 3,
        WallChange::Raze { .. } => 4,
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::event::Event;
    use pjw_core::plan::Action;
    use pjw_core::process::{Pid, ProcessId, StartTime, ThreadId, Tid};
    use pjw_core::wall::{Bounds, Mason, Wall, WallAction};

    use super::*;

    fn action(kind: ActionKind) -> Action {
        let process = ProcessId { pid: Pid(7), start: StartTime(1) };
        let thread = ThreadId { process, tid: Tid(7), start: StartTime(1) };
        let (from, to) = (CpuSet::new(), CpuSet::new());
        Action { kind, job: "a".parse().unwrap(), thread, from, to, walled: false, why: String::new() }
    }

    fn wall_actions() -> Vec<WallAction> {
        let job: pjw_core::job::JobId = "a".parse().unwrap();
        let bounds = Bounds::cpus(CpuSet::new());
        let wall = Wall { job: job.clone(), mason: Mason::Warden, path: "/pjw/a".to_owned(), bounds };
        let process = ProcessId { pid: Pid(7), start: StartTime(1) };
        let (from, to) = ("/".to_owned(), "/pjw/a".to_owned());
        let changes = [
            WallChange::Raise { wall: wall.clone(), founders: Vec::new() },
            WallChange::Admit { process, from: from.clone(), to: to.clone() },
            WallChange::Return { process, from, to },
            WallChange::Open { wall: wall.clone() },
            WallChange::Raze { wall },
        ];
        let action = |change| WallAction { job: job.clone(), change, again: false, why: String::new() };
        changes.into_iter().map(action).collect()
    }

    #[test]
    fn what_is_counted_is_counted_under_its_own_name() {
        for (at, kind) in ACTIONS.into_iter().enumerate() {
            assert_eq!(place_of(kind), at, "{}", kind.name());
        }
        let names: Vec<&str> = wall_actions().iter().map(WallAction::name).collect();
        assert_eq!(names, WALL_ACTIONS);
        for (at, action) in wall_actions().iter().enumerate() {
            assert_eq!(place_of_wall(&action.change), at, "{}", action.name());
        }
    }

    #[test]
    fn a_cycle_is_counted_with_all_it_did() {
        let mut counters = Counters::default();
        let refused = || Outcome::Refused { errno: 1, hint: String::new() };
        let report = Report {
            events: vec![Event::new(EventKind::Violation, "x"), Event::new(EventKind::Repaired, "x")],
            outcomes: vec![
                (action(ActionKind::Pin), Outcome::Done { effective: CpuSet::new() }),
                (action(ActionKind::Pin), Outcome::Gone),
                (action(ActionKind::Repair), refused()),
            ],
            walls: wall_actions().into_iter().map(|wall| (wall, WallOutcome::Gone)).collect(),
            ..Report::default()
        };
        let mut troubles = Troubles { journal: Some("full".to_owned()), ..Troubles::default() };
        troubles.audit.insert(None, "two holders".to_owned());
        counters.count(Cause::Timer, Duration::from_millis(3), &report, &troubles);
        counters.count(Cause::Full, Duration::from_secs(60), &Report::default(), &Troubles::default());
        assert_eq!(counters.cycles, [0, 1, 1]);
        assert_eq!((counters.actions[2], counters.actions[1]), ([1, 1, 0], [0, 0, 1]));
        assert_eq!(counters.walls, [[0, 1, 0]; 5]);
        assert_eq!((counters.violations, counters.audit_failures, counters.journal_faults), (1, 1, 1));
        assert_eq!((counters.times.count, counters.times.buckets[5]), (2, 1), "a minute is in no bucket");
        assert_eq!(counters.times.buckets.iter().sum::<u64>(), 1);
        assert_eq!(counters.times.sum, Duration::from_millis(60_003));
    }

    #[test]
    fn bounds_ascend_and_are_written_as_they_are() {
        assert!(BOUNDS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for (bound, text) in BOUNDS {
            assert_eq!(format!("{:?}", bound.as_secs_f64()), text);
        }
    }
}
