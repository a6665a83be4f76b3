//! The counters of the event loop, updated from the report of each cycle.

use std::time::Duration;

use pjw_core::cpuset_group::{CpusetChange, CpusetOutcome};
use pjw_core::event::EventKind;
use pjw_core::plan::{MaskActionKind, MaskOutcome};

use crate::warden::{CycleReport, OngoingFailures};

/// The cause of a cycle of the daemon, as a metric. A cycle is one scan of processes, a decision, and the resulting
/// changes. If a cycle has several causes, `Full` counts before `Timer`, and `Timer` before `Event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum CycleCause {
    /// An event or a command. Examples of events are a process event of the kernel (fork, exec, exit) and a
    /// change of a job's cgroup. The cycle scanned only the processes that the event or the command concerns.
    Event,
    /// A timer. The cycle scanned the processes of all jobs. If the timer of the configuration key
    /// `rescan_interval` had expired, the cycle also scanned processes that belong to no job and may have
    /// changed.
    Timer,
    /// The need to scan every process, for example because process events were lost or a command concerns all
    /// jobs.
    Full,
}

impl CycleCause {
    /// All causes of a cycle (scan, decision and changes), in the order of the counts in [`MetricCounters::cycles`].
    pub const ALL: [CycleCause; 3] = [CycleCause::Event, CycleCause::Timer, CycleCause::Full];

    /// Returns the name of the cause as a value of the metrics label `cause`: `event`, `timer` or `full`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The inclusive upper bounds of the buckets of a [`DurationHistogram`], in ascending order. Each bound is a
/// pair: a duration, and the same duration in seconds as text for the Prometheus label `le`.
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

/// The counts of durations in buckets, for a Prometheus histogram. [`BUCKET_BOUNDS`] has the upper bounds of the
/// buckets. A duration above the last bound is in no bucket, but counts in the total number and in the sum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DurationHistogram {
    /// The number of durations in each bucket. A duration is counted in the first bucket whose upper bound it
    /// does not exceed. A duration that exceeds all bounds is in no bucket.
    pub bucket_counts: [u64; BUCKET_BOUNDS.len()],
    /// The number of added durations, including the durations that are in no bucket.
    pub count: u64,
    /// The sum of all added durations.
    pub sum: Duration,
}

impl DurationHistogram {
    /// Adds one measured duration to the histogram.
    pub fn add(&mut self, duration: Duration) {
        if let Some(at) = BUCKET_BOUNDS.iter().position(|(bound, _)| duration <= *bound) {
            self.bucket_counts[at] += 1;
        }
        self.count += 1;
        self.sum += duration;
    }
}

/// The values of the metrics label `outcome`, for attempts to change an affinity mask or a cpuset. `done`: the change
/// was made. `gone`: the thread had ended, or the cgroup had been removed, before the change. `refused`: the kernel
/// or systemd refused the change.
pub const CHANGE_OUTCOME_NAMES: [&str; 3] = ["done", "gone", "refused"];

/// The kinds of affinity mask changes that the metrics count, in the order of the counts in
/// [`MetricCounters::mask_actions`].
pub const MASK_ACTION_KINDS: [MaskActionKind; 9] = [
    MaskActionKind::Confine,
    MaskActionKind::Repair,
    MaskActionKind::Pin,
    MaskActionKind::Float,
    MaskActionKind::Unbind,
    MaskActionKind::KeepOff,
    MaskActionKind::Restore,
    MaskActionKind::Override,
    MaskActionKind::Rebind,
];

/// The values of the metrics label `kind` for changes of cpusets, in the order of the counts in
/// [`MetricCounters::cpuset_actions`]. `raise` creates the cpuset of a job, or writes its settings. `admit` moves a
/// process into the cpuset of its job. `return` moves a process back to its original cgroup. `open` removes the limits
/// of a cpuset: its processes can then use all logical CPUs. `raze` removes a cpuset.
pub const CPUSET_ACTION_NAMES: [&str; 5] = ["raise", "admit", "return", "open", "raze"];

/// The counts and durations for the metrics of pjwd, since metrics were switched on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MetricCounters {
    /// The number of cycles (scan, decision and changes) with each cause, in the order of
    /// [`CycleCause::ALL`].
    pub cycles: [u64; CycleCause::ALL.len()],
    /// The durations of the cycles, each from the start of its scan to its last change.
    pub cycle_times: DurationHistogram,
    /// The times from the fork of a process to the change of its affinity mask by pjwd. Only the processes in
    /// [`CycleReport::confined_new_processes`] are measured. These are new processes of jobs, and pjwd changed their
    /// masks before any scan had read the processes.
    pub reaction_times: DurationHistogram,
    /// The number of process events (fork, exec, exit) that were read from the kernel.
    pub process_events: u64,
    /// The number of times that process events were lost, because the kernel dropped them or pjwd had no room
    /// for them.
    pub event_overruns: u64,
    /// The number of attempts to change affinity masks. The first index is the kind of change, in the order
    /// of [`MASK_ACTION_KINDS`]. The second index is the outcome, in the order of [`CHANGE_OUTCOME_NAMES`].
    pub mask_actions: [[u64; CHANGE_OUTCOME_NAMES.len()]; MASK_ACTION_KINDS.len()],
    /// The number of attempts to change cpusets. The first index is the kind of change, in the order of
    /// [`CPUSET_ACTION_NAMES`]. The second index is the outcome, in the order of [`CHANGE_OUTCOME_NAMES`].
    pub cpuset_actions: [[u64; CHANGE_OUTCOME_NAMES.len()]; CPUSET_ACTION_NAMES.len()],
    /// The number of violation events. pjwd reports a violation in two cases. In the first case, a program
    /// changed the affinity mask of a thread of a job, and the new mask contains a PU outside the job's
    /// cores. In the second case, a program requested such a mask. The request counts even if a cpuset
    /// prevented the change. Each process has at most one violation event per cycle.
    pub mask_violations: u64,
    /// The number of failed audits, counted once for each job and cycle. The audit is a check that pjwd makes
    /// before it changes affinity masks and cpusets. It checks the granted cores and the planned changes of
    /// each job. If a job fails the audit, pjwd does not make the planned changes of the job. A failure that
    /// concerns no single job counts as one job.
    pub rejected_plans: u64,
    /// The number of cycles that ended while the journal could not be written, plus the number of failed
    /// attempts to rewrite the journal. The journal is the file with the granted cores and the saved affinity
    /// masks.
    pub journal_failures: u64,
    /// The delay of the last regular scan of the processes of jobs. A regular scan is due after each interval
    /// (configuration key `interval`). The delay is the time from the moment at which the scan was due until
    /// the scan began.
    pub scan_lateness: Duration,
}

impl MetricCounters {
    /// Adds a finished cycle (scan, decision and changes) of the daemon to the counters. `cause` is the cause of
    /// the cycle. `duration` is the duration of the cycle. `report` has the results of the cycle, such as the changed
    /// affinity masks. `failures` are the failures that still existed at the end of the cycle.
    pub fn count_cycle(
        &mut self,
        cause: CycleCause,
        duration: Duration,
        report: &CycleReport,
        failures: &OngoingFailures,
    ) {
        self.cycles[cause as usize] += 1;
        self.cycle_times.add(duration);
        for (action, outcome) in &report.mask_outcomes {
            let outcome = match outcome {
                MaskOutcome::Done { .. } => 0,
                MaskOutcome::Gone => 1,
                MaskOutcome::Refused { .. } => 2,
            };
            self.mask_actions[mask_action_index(action.kind)][outcome] += 1;
        }
        for (action, outcome) in &report.cpuset_outcomes {
            let outcome = match outcome {
                CpusetOutcome::Done { .. } => 0,
                CpusetOutcome::Gone => 1,
                CpusetOutcome::Refused { .. } | CpusetOutcome::NotMoved { .. } => 2,
                // A delayed change is counted when it is complete.
                CpusetOutcome::Delayed => continue,
            };
            self.cpuset_actions[cpuset_action_index(&action.change)][outcome] += 1;
        }
        let violations = report.events.iter().filter(|event| event.kind == EventKind::Violation);
        self.mask_violations += violations.count() as u64;
        self.rejected_plans += failures.audit_violations.len() as u64;
        self.journal_failures += u64::from(failures.journal_error.is_some());
    }
}

/// Returns the index of `kind` in the counters of the mask changes (`mask_actions`).
fn mask_action_index(kind: MaskActionKind) -> usize {
    match kind {
        MaskActionKind::Confine => 0,
        MaskActionKind::Repair => 1,
        MaskActionKind::Pin => 2,
        MaskActionKind::Float => 3,
        MaskActionKind::Unbind => 4,
        MaskActionKind::KeepOff => 5,
        MaskActionKind::Restore => 6,
        MaskActionKind::Override => 7,
        MaskActionKind::Rebind => 8,
    }
}

/// Returns the index of `change` in the counters of the cpuset changes (`cpuset_actions`).
fn cpuset_action_index(change: &CpusetChange) -> usize {
    match change {
        CpusetChange::Create { .. } => 0,
        CpusetChange::MoveIn { .. } => 1,
        CpusetChange::MoveBack { .. } => 2,
        CpusetChange::RemoveLimits { .. } => 3,
        CpusetChange::Remove { .. } => 4,
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::cpuset_group::{CgroupCreator, CpusetAction, CpusetSpec, JobCpuset};
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
            program_request: None,
            reason: String::new(),
        }
    }

    fn cpuset_actions_of_all_kinds() -> Vec<CpusetAction> {
        let job: pjw_core::job::JobId = "a".parse().unwrap();
        let spec = CpusetSpec::from_cpus(CpuSet::new());
        let job_cpuset =
            JobCpuset { job: job.clone(), creator: CgroupCreator::Warden, path: "/pjw/a".to_owned(), spec };
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
            CpusetChange::RemoveLimits { job_cpuset: job_cpuset.clone() },
            CpusetChange::Remove { job_cpuset },
        ];
        let action =
            |change| CpusetAction { job: job.clone(), change, is_repair: false, reason: String::new() };
        changes.into_iter().map(action).collect()
    }

    #[test]
    fn the_index_of_each_action_matches_its_name() {
        for (at, kind) in MASK_ACTION_KINDS.into_iter().enumerate() {
            assert_eq!(mask_action_index(kind), at, "{}", kind.name());
        }
        let names: Vec<&str> = cpuset_actions_of_all_kinds().iter().map(CpusetAction::kind_name).collect();
        assert_eq!(names, CPUSET_ACTION_NAMES);
        for (at, action) in cpuset_actions_of_all_kinds().iter().enumerate() {
            assert_eq!(cpuset_action_index(&action.change), at, "{}", action.kind_name());
        }
    }

    #[test]
    fn a_report_updates_all_counters() {
        let mut counters = MetricCounters::default();
        let refused = || MaskOutcome::Refused { errno: 1, reason: String::new() };
        let report = CycleReport {
            events: vec![Event::new(EventKind::Violation, "x"), Event::new(EventKind::Repaired, "x")],
            mask_outcomes: vec![
                (action(MaskActionKind::Pin), MaskOutcome::Done { effective: CpuSet::new() }),
                (action(MaskActionKind::Pin), MaskOutcome::Gone),
                (action(MaskActionKind::Repair), refused()),
            ],
            cpuset_outcomes: cpuset_actions_of_all_kinds()
                .into_iter()
                .map(|action| (action, CpusetOutcome::Gone))
                .collect(),
            ..CycleReport::default()
        };
        let mut failures =
            OngoingFailures { journal_error: Some("full".to_owned()), ..OngoingFailures::default() };
        failures.audit_violations.insert(None, "two holders".to_owned());
        counters.count_cycle(CycleCause::Timer, Duration::from_millis(3), &report, &failures);
        counters.count_cycle(
            CycleCause::Full,
            Duration::from_secs(60),
            &CycleReport::default(),
            &OngoingFailures::default(),
        );
        assert_eq!(counters.cycles, [0, 1, 1]);
        assert_eq!((counters.mask_actions[2], counters.mask_actions[1]), ([1, 1, 0], [0, 0, 1]));
        assert_eq!(counters.cpuset_actions, [[0, 1, 0]; 5]);
        assert_eq!((counters.mask_violations, counters.rejected_plans, counters.journal_failures), (1, 1, 1));
        assert_eq!(
            (counters.cycle_times.count, counters.cycle_times.bucket_counts[5]),
            (2, 1),
            "a minute is in no bucket"
        );
        assert_eq!(counters.cycle_times.bucket_counts.iter().sum::<u64>(), 1);
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
