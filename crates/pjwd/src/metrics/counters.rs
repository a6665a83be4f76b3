//! The counters of the event loop, updated from the report of each cycle.

use std::time::Duration;

use pjw_core::cpuset_group::CpusetOutcome;
use pjw_core::event::EventKind;
use pjw_core::plan::{ActionKind, Outcome};

use crate::warden::{Faults, Report};

/// Why a cycle ran. If a cycle had several causes, the cause with the largest scan counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Kernel events: the cycle scanned some processes.
    Event,
    /// The interval timer: the cycle scanned all jobs.
    Timer,
    /// A full scan: the rescan timer, lost events, or a command.
    Full,
}

impl Cause {
    /// Every cause, in the order of the counters.
    pub const ALL: [Cause; 3] = [Cause::Event, Cause::Timer, Cause::Full];

    /// The value of the `cause` label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::Event => "event",
            Cause::Timer => "timer",
            Cause::Full => "full",
        }
    }
}

/// The upper bounds of the histogram buckets, in seconds, with their text form.
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

/// A histogram of durations with the buckets [`BOUNDS`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The number of values in each bucket, without the buckets below.
    pub buckets: [u64; BOUNDS.len()],
    /// The number of all values.
    pub count: u64,
    /// The sum of all values.
    pub sum: Duration,
}

impl Histogram {
    /// Adds a value.
    pub fn add(&mut self, took: Duration) {
        if let Some(at) = BOUNDS.iter().position(|(bound, _)| took <= *bound) {
            self.buckets[at] += 1;
        }
        self.count += 1;
        self.sum += took;
    }
}

/// The values of the `outcome` label, for masks and cpusets.
pub const OUTCOMES: [&str; 3] = ["done", "gone", "refused"];

/// The kinds of mask changes, in the order of the counters.
pub const ACTIONS: [ActionKind; 6] = [
    ActionKind::Confine,
    ActionKind::Repair,
    ActionKind::Pin,
    ActionKind::Float,
    ActionKind::KeepOff,
    ActionKind::Restore,
];

/// The kinds of cpuset changes, in the order of the counters, with their names in plans.
pub const CPUSET_ACTIONS: [&str; 5] = ["raise", "admit", "return", "open", "raze"];

/// All counters since metrics were switched on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Cycles, by [`Cause::ALL`].
    pub cycles: [u64; Cause::ALL.len()],
    /// The duration of cycles.
    pub times: Histogram,
    /// The time from the fork of a new process to its affinity mask.
    pub reaction_times: Histogram,
    /// Process events from the kernel.
    pub kernel_events: u64,
    /// How often the kernel reported dropped events.
    pub overruns: u64,
    /// Mask changes, by [`ACTIONS`] and [`OUTCOMES`].
    pub actions: [[u64; OUTCOMES.len()]; ACTIONS.len()],
    /// Cpuset changes, by [`CPUSET_ACTIONS`] and [`OUTCOMES`].
    pub cpuset_actions: [[u64; OUTCOMES.len()]; CPUSET_ACTIONS.len()],
    /// Violations: threads found outside their job's cores, or affinity requests for other CPUs.
    pub violations: u64,
    /// Plans, or parts of plans, that failed the audit.
    pub audit_failures: u64,
    /// Failures to write the journal.
    pub journal_faults: u64,
    /// How long after its due time the last timed scan began.
    pub scan_lateness: Duration,
}

impl Counters {
    /// Adds the report of one cycle.
    pub fn count(&mut self, cause: Cause, took: Duration, report: &Report, faults: &Faults) {
        self.cycles[cause as usize] += 1;
        self.times.add(took);
        for (action, outcome) in &report.outcomes {
            let outcome = match outcome {
                Outcome::Done { .. } => 0,
                Outcome::Gone => 1,
                Outcome::Refused { .. } => 2,
            };
            if let Some(kind) = ACTIONS.iter().position(|kind| *kind == action.kind) {
                self.actions[kind][outcome] += 1;
            }
        }
        for (action, outcome) in &report.cpuset_outcomes {
            let outcome = match outcome {
                CpusetOutcome::Done { .. } => 0,
                CpusetOutcome::Gone => 1,
                CpusetOutcome::Refused { .. } => 2,
            };
            if let Some(kind) = CPUSET_ACTIONS.iter().position(|name| *name == action.name()) {
                self.cpuset_actions[kind][outcome] += 1;
            }
        }
        let violations = report.events.iter().filter(|event| event.kind == EventKind::Violation);
        self.violations += violations.count() as u64;
        self.audit_failures += faults.audit.len() as u64;
        self.journal_faults += u64::from(faults.journal.is_some());
    }
}
