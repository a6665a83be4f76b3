//! The path of the metrics from the event loop to the metrics service: a [`MetricsRecorder`] on the loop's thread sends
//! one [`MetricsSnapshot`] per cycle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::{cpuset::CpuSet, state::WardenState, time::UnixMillis};
use pjw_linux::sys::clock;
use tokio::sync::watch;

use super::counters::{CycleCause, MetricCounters};
use crate::config::{MetricsSettings, Settings};
use crate::view::status::StatusSnapshot;
use crate::warden::{CycleReport, OngoingFailures};

/// The counters and the status at the end of a cycle (scan, decision and changes) of the daemon. pjwd computes its
/// metrics from these values.
#[derive(Debug, Clone, Default)]
pub struct MetricsSnapshot {
    /// The counts since metrics were switched on.
    pub counters: MetricCounters,
    /// The status that was published at the end of the cycle.
    pub published: StatusSnapshot,
    /// The PUs (logical CPUs) of the machine that were offline at the end of the cycle.
    pub offline_pus: CpuSet,
    /// The UTC time at which the daemon started.
    pub started_at: UnixMillis,
    /// The UTC time at which this snapshot was published.
    pub published_at: UnixMillis,
}

/// The measurement of a running cycle (scan, decision and changes) of the daemon: the start time and the cause of the
/// cycle. [`MetricsRecorder::end_cycle`] completes the measurement.
#[derive(Debug, Clone, Copy)]
pub struct CycleTimer {
    cause: CycleCause,
    begun: Instant,
    scan_lateness: Option<Duration>,
}

/// Counts the cycles, changes, process events and failures of the event loop for the metrics. After each cycle (scan,
/// decision and changes), sends the counts to the metrics service of pjwd. While metrics are switched off, counts and
/// sends nothing.
#[derive(Debug)]
pub struct MetricsRecorder {
    counters: MetricCounters,
    started_at: UnixMillis,
    snapshot: watch::Sender<Option<Arc<MetricsSnapshot>>>,
    settings: watch::Sender<MetricsSettings>,
}

/// The channels through which the metrics service of pjwd receives values from the [`MetricsRecorder`] of the event
/// loop: the latest counters and status, and the metrics settings.
#[derive(Debug, Clone)]
pub struct MetricsReceiver {
    /// The latest counters and status. `None` while metrics are switched off. After metrics were switched on, `None`
    /// until the first cycle (scan, decision and changes) of the daemon has ended.
    pub snapshot: watch::Receiver<Option<Arc<MetricsSnapshot>>>,
    /// The settings of the metrics, as last read from the configuration.
    pub settings: watch::Receiver<MetricsSettings>,
}

impl MetricsRecorder {
    /// Makes the recorder for the event loop, and the receiver for the metrics service of pjwd. `settings` says whether
    /// metrics are switched on. While metrics are switched off, the recorder counts and sends no metrics, and
    /// [`MetricsReceiver::snapshot`] is `None`. Both values are also needed then, because a changed configuration can
    /// switch metrics on ([`MetricsRecorder::apply_settings`]).
    #[must_use]
    pub fn new(settings: &Settings) -> (Self, MetricsReceiver) {
        let (snapshot_sender, snapshot) = watch::channel(None);
        let (settings_sender, settings) = watch::channel(settings.metrics.clone());
        let recorder = Self {
            counters: MetricCounters::default(),
            started_at: clock::now().wall_clock,
            snapshot: snapshot_sender,
            settings: settings_sender,
        };
        (recorder, MetricsReceiver { snapshot, settings })
    }

    fn is_on(&self) -> bool {
        self.settings.borrow().is_enabled()
    }

    /// Applies the metrics settings in `settings` after the configuration was read again. Passes changed settings on
    /// to the metrics service of pjwd. If the settings switch metrics off, resets all counters.
    pub fn apply_settings(&mut self, settings: &Settings) {
        let new = &settings.metrics;
        if !new.is_enabled() {
            self.counters = MetricCounters::default();
            self.snapshot.send_replace(None);
        }
        if *self.settings.borrow() != *new {
            self.settings.send_replace(new.clone());
        }
    }

    /// Counts process events of the kernel (fork, exec, exit). `event_count` is the number of events that were read
    /// since the last call. `has_lost_events` says whether further events were lost since the last call, because the
    /// kernel dropped them or pjwd could not store them. Does nothing while metrics are switched off.
    pub fn count_process_events(&mut self, event_count: usize, has_lost_events: bool) {
        if self.is_on() {
            self.counters.process_events += event_count as u64;
            self.counters.event_overruns += u64::from(has_lost_events);
        }
    }

    /// Adds one reaction time to the metrics. A reaction time is the time from the fork of a process until pjwd
    /// changed the affinity mask of this process. Does nothing while metrics are switched off.
    pub fn count_reaction(&mut self, reaction_time: Duration) {
        if self.is_on() {
            self.counters.reaction_times.add(reaction_time);
        }
    }

    /// Starts the measurement of a cycle (scan, decision and changes) that begins now. `cause` is the cause of the
    /// cycle. `due_at` is the time at which the scan of the processes of jobs (configuration key `interval`) was due.
    /// `None` if this scan is not a part of the cycle. The metrics show the delay from `due_at` until now.
    ///
    /// The caller must pass the result to [`MetricsRecorder::end_cycle`] at the end of the cycle. Returns `None`
    /// while metrics are switched off.
    #[must_use]
    pub fn begin_cycle(&self, cause: CycleCause, due_at: Option<Instant>) -> Option<CycleTimer> {
        if !self.is_on() {
            return None;
        }
        let begun = Instant::now();
        let scan_lateness = due_at.map(|due| begun.saturating_duration_since(due));
        Some(CycleTimer { cause, begun, scan_lateness })
    }

    /// Counts a cycle (scan, decision and changes) that ends now. `timer` is the value that
    /// [`MetricsRecorder::begin_cycle`] returned for this cycle. If `timer` is `None`, nothing is counted. `report`
    /// has the results of the cycle. `failures` are the failures that still exist at the end of the cycle.
    pub fn end_cycle(&mut self, timer: Option<CycleTimer>, report: &CycleReport, failures: &OngoingFailures) {
        let Some(CycleTimer { cause, begun, scan_lateness }) = timer else { return };
        self.counters.scan_lateness = scan_lateness.unwrap_or(self.counters.scan_lateness);
        self.counters.count_cycle(cause, begun.elapsed(), report, failures);
    }

    /// Counts a failed attempt to rewrite the journal: the files in which pjwd records the granted cores and the
    /// saved affinity masks. Does nothing while metrics are switched off.
    pub fn count_journal_rewrite_failure(&mut self) {
        if self.is_on() {
            self.counters.journal_failures += 1;
        }
    }

    /// Sends the values for the metrics to the metrics service of pjwd: all that this recorder has counted, the status
    /// `status`, and the PUs (logical CPUs) that are offline. `state` is the state of the daemon, which contains the
    /// topology and the online PUs. Must be called after each cycle (scan, decision and changes), with the status that
    /// was published after this cycle. Does nothing while metrics are switched off.
    pub fn publish(&self, status: StatusSnapshot, state: &WardenState) {
        if !self.is_on() {
            return;
        }
        let offline_pus = state.topology.cpus().difference(&state.pool.online_cpus());
        let snapshot = MetricsSnapshot {
            counters: self.counters.clone(),
            published: status,
            offline_pus,
            started_at: self.started_at,
            published_at: clock::now().wall_clock,
        };
        self.snapshot.send_replace(Some(Arc::new(snapshot)));
    }
}
