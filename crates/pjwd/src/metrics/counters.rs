//! The counters of the event loop, updated from the report of each cycle.

use std::time::Duration;

use pjw_core::cpuset_group::{CpusetChange, CpusetOutcome};
use pjw_core::event::EventKind;
use pjw_core::plan::{MaskActionKind, MaskOutcome};

use crate::warden::{CycleReport, Faults};

/// The reason for a cycle of the daemon (one scan of processes, a decision, and its changes): process events,
/// the timer, or a full scan. If a cycle has several reasons, this is the one that requires the largest scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum CycleCause {
    /// Kernel events: the cycle scanned some processes.
    Event,
    /// The interval timer: the cycle scanned all jobs.
    Timer,
    /// A full scan: the rescan timer, lost events, or a command.
    Full,
}

impl CycleCause {
    /// All causes of cycles. The counts in [`Counters::cycles`] are in the same order.
    pub const ALL: [CycleCause; 3] = [CycleCause::Event, CycleCause::Timer, CycleCause::Full];

    /// Returns the name of the cause, as the metrics label `cause` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The upper bounds of the buckets of a [`Histogram`]: each as a duration, and as the number of seconds in the
/// Prometheus label `le`.
pub const BUCKET_BOUNDS: [(Duration, &str); 15] = [
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

/// Counts durations by size, for a Prometheus histogram. [`BUCKET_BOUNDS`] has the upper bounds of its buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The number of durations in each bucket. Each duration is counted once: in the first bucket whose upper
    /// bound it does not exceed, or in none if it exceeds all bounds.
    pub buckets: [u64; BUCKET_BOUNDS.len()],
    /// The number of durations that were added.
    pub count: u64,
    /// The sum of all durations that were added.
    pub sum: Duration,
}

impl Histogram {
    /// Adds one measured duration to the histogram.
    pub fn add(&mut self, took: Duration) {
        if let Some(at) = BUCKET_BOUNDS.iter().position(|(bound, _)| took <= *bound) {
            self.buckets[at] += 1;
        }
        self.count += 1;
        self.sum += took;
    }
}

/// The values of the metrics label `outcome` for changes of affinity masks and cpusets. `done`: the change was
/// made. `gone`: the thread or cgroup had ended. `refused`: the kernel refused the change.
pub const OUTCOME_LABELS: [&str; 3] = ["done", "gone", "refused"];

/// The kinds of affinity mask changes that the metrics count. The counts in [`Counters::mask_actions`] are in
/// the same order.
pub const MASK_ACTION_KINDS: [MaskActionKind; 7] = [
    MaskActionKind::Confine,
    MaskActionKind::Repair,
    MaskActionKind::Pin,
    MaskActionKind::Float,
    MaskActionKind::Unbind,
    MaskActionKind::KeepOff,
    MaskActionKind::Restore,
];

/// The names of the kinds of cpuset changes, as the metrics label `kind` has them. In order: create a cpuset,
/// move a process into a cpuset, move a process back, allow all PUs again, remove a cpuset. The counts in
/// [`Counters::cpuset_actions`] are in the same order.
pub const CPUSET_ACTION_NAMES: [&str; 5] = ["raise", "admit", "return", "open", "raze"];

/// The counts for the metrics of pjwd, from the time at which metrics were switched on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// The number of cycles, separately for each cause. The order is that of [`CycleCause::ALL`].
    pub cycles: [u64; CycleCause::ALL.len()],
    /// The durations of the cycles.
    pub cycle_times: Histogram,
    /// The reaction times of pjwd to processes that were forked outside their job's cores. A reaction time is
    /// the time from the fork to the change of the process's affinity mask.
    pub reaction_times: Histogram,
    /// The number of process events (fork, exec, exit) that were read from the kernel.
    pub process_events: u64,
    /// How often the kernel reported that it had dropped process events.
    pub event_overruns: u64,
    /// The number of attempts to change affinity masks, for each kind ([`MASK_ACTION_KINDS`]) and each outcome
    /// ([`OUTCOME_LABELS`]).
    pub mask_actions: [[u64; OUTCOME_LABELS.len()]; MASK_ACTION_KINDS.len()],
    /// The number of attempts to change cpusets, for each kind ([`CPUSET_ACTION_NAMES`]) and each outcome
    /// ([`OUTCOME_LABELS`]).
    pub cpuset_actions: [[u64; OUTCOME_LABELS.len()]; CPUSET_ACTION_NAMES.len()],
    /// The number of violations: threads that were found outside their job's cores, and requests for affinity masks
    /// outside these cores.
    pub violations: u64,
    /// The number of times that the audit rejected a plan or the plan for one job, so that it was not carried
    /// out.
    pub audit_failures: u64,
    /// How often the journal could not be written.
    pub journal_faults: u64,
    /// The delay of the last periodic scan: the time from when it was due to when it began.
    pub scan_lateness: Duration,
}

impl Counters {
    /// Adds a finished cycle of the daemon to the counters. `took` is the duration of the cycle, `report` has
    /// its changes, and `faults` has the failures that still exist after the cycle.
    pub fn count_cycle(&mut self, cause: CycleCause, took: Duration, report: &CycleReport, faults: &Faults) {
        self.cycles[cause as usize] += 1;
        self.cycle_times.add(took);
        for (action, outcome) in &report.mask_outcomes {
            let outcome = match outcome {
                MaskOutcome::Done { .. } => 0,
                MaskOutcome::Gone => 1,
                MaskOutcome::Refused { .. } => 2,
            };
            self.mask_actions[action_index(action.kind)][outcome] += 1;
        }
        for (action, outcome) in &report.cpuset_outcomes {
            let outcome = match outcome {
                CpusetOutcome::Done { .. } => 0,
                CpusetOutcome::Gone => 1,
                CpusetOutcome::Refused { .. } => 2,
            };
            self.cpuset_actions[cpuset_action_index(&action.change)][outcome] += 1;
        }
        let violations = report.events.iter().filter(|event| event.kind == EventKind::Violation);
        self.violations += violations.count() as u64;
        self.audit_failures += faults.audit_violations.len() as u64;
        self.journal_faults += u64::from(faults.journal_error.is_some());
    }
}

fn action_index(kind: MaskActionKind) -> usize {
    match kind {
        MaskActionKind::Confine => 0,
        MaskActionKind::Repair => 1,
        MaskActionKind::Pin => 2,
        MaskActionKind::Float => 3,
        MaskActionKind::Unbind => 4,
        MaskActionKind::KeepOff => 5,
        MaskActionKind::Restore => 6,
    }
}

fn cpuset_action_index(change: &CpusetChange) -> usize {
    match change {
        CpusetChange::Create { .. } => 0,
        CpusetChange::MoveIn { .. } => 1,
        CpusetChange::MoveBack { .. } => 2,
        CpusetChange::Widen { .. } => 3,
        CpusetChange::Remove { .. } => 4,
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::cpuset_group::{CgroupOwner, CpusetAction, CpusetSpec, JobCpuset};
    use pjw_core::event::Event;
    use pjw_core::ids::{Pid, ProcessId, StartTime, ThreadId, Tid, Uid};
    use pjw_core::plan::MaskAction;

    use super::*;

    fn action(kind: MaskActionKind) -> MaskAction {
        let process = ProcessId { pid: Pid(7), start: StartTime(1) };
        let thread = ThreadId { process, tid: Tid(7), start: StartTime(1) };
        let (current_mask, target_mask, requested_mask) = (CpuSet::new(), CpuSet::new(), CpuSet::new());
        MaskAction {
            kind,
            job: "a".parse().unwrap(),
            thread,
            current_mask,
            target_mask,
            requested_mask,
            why: String::new(),
        }
    }

    fn wall_actions() -> Vec<CpusetAction> {
        let job: pjw_core::job::JobId = "a".parse().unwrap();
        let spec = CpusetSpec::from_cpus(CpuSet::new());
        let job_cpuset = JobCpuset {
            job: job.clone(),
            cgroup_owner: CgroupOwner::Warden,
            path: "/pjw/a".to_owned(),
            spec,
        };
        let process = ProcessId { pid: Pid(7), start: StartTime(1) };
        let (from, to) = ("/".to_owned(), "/pjw/a".to_owned());
        let changes = [
            CpusetChange::Create {
                job_cpuset: job_cpuset.clone(),
                owner: Uid(7),
                initial_processes: Vec::new(),
            },
            CpusetChange::MoveIn { process, from: from.clone(), to: to.clone() },
            CpusetChange::MoveBack { process, from, to },
            CpusetChange::Widen { job_cpuset: job_cpuset.clone() },
            CpusetChange::Remove { job_cpuset },
        ];
        let action = |change| CpusetAction { job: job.clone(), change, is_repair: false, why: String::new() };
        changes.into_iter().map(action).collect()
    }

    #[test]
    fn the_index_of_each_action_matches_its_name() {
        for (at, kind) in MASK_ACTION_KINDS.into_iter().enumerate() {
            assert_eq!(action_index(kind), at, "{}", kind.name());
        }
        let names: Vec<&str> = wall_actions().iter().map(CpusetAction::name).collect();
        assert_eq!(names, CPUSET_ACTION_NAMES);
        for (at, action) in wall_actions().iter().enumerate() {
            assert_eq!(cpuset_action_index(&action.change), at, "{}", action.name());
        }
    }

    #[test]
    fn a_report_updates_all_counters() {
        let mut counters = Counters::default();
        let refused = || MaskOutcome::Refused { errno: 1, reason: String::new() };
        let report = CycleReport {
            events: vec![Event::new(EventKind::Violation, "x"), Event::new(EventKind::Repaired, "x")],
            mask_outcomes: vec![
                (action(MaskActionKind::Pin), MaskOutcome::Done { effective: CpuSet::new() }),
                (action(MaskActionKind::Pin), MaskOutcome::Gone),
                (action(MaskActionKind::Repair), refused()),
            ],
            cpuset_outcomes: wall_actions()
                .into_iter()
                .map(|job_cpuset| (job_cpuset, CpusetOutcome::Gone))
                .collect(),
            ..CycleReport::default()
        };
        let mut faults = Faults { journal_error: Some("full".to_owned()), ..Faults::default() };
        faults.audit_violations.insert(None, "two holders".to_owned());
        counters.count_cycle(CycleCause::Timer, Duration::from_millis(3), &report, &faults);
        counters.count_cycle(
            CycleCause::Full,
            Duration::from_secs(60),
            &CycleReport::default(),
            &Faults::default(),
        );
        assert_eq!(counters.cycles, [0, 1, 1]);
        assert_eq!((counters.mask_actions[2], counters.mask_actions[1]), ([1, 1, 0], [0, 0, 1]));
        assert_eq!(counters.cpuset_actions, [[0, 1, 0]; 5]);
        assert_eq!((counters.violations, counters.audit_failures, counters.journal_faults), (1, 1, 1));
        assert_eq!(
            (counters.cycle_times.count, counters.cycle_times.buckets[5]),
            (2, 1),
            "a minute is in no bucket"
        );
        assert_eq!(counters.cycle_times.buckets.iter().sum::<u64>(), 1);
        assert_eq!(counters.cycle_times.sum, Duration::from_millis(60_003));
    }

    #[test]
    fn bucket_bounds_ascend_and_match_their_text() {
        assert!(BUCKET_BOUNDS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for (bound, text) in BUCKET_BOUNDS {
            assert_eq!(format!("{:?}", bound.as_secs_f64()), text);
        }
    }
}
