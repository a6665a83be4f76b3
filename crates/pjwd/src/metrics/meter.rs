//! From the event loop to the metrics service: a [`Meter`] on the loop's thread, and one [`MetricsSnapshot`] per
//! cycle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::{cpuset::CpuSet, state::WardenState, time::UnixMillis};
use pjw_linux::sys::clock;
use tokio::sync::watch;

use super::counters::{Counters, CycleCause};
use crate::config::{MetricsSettings, Settings};
use crate::view::status::StatusSnapshot;
use crate::warden::{CycleReport, Faults};

/// The counters and the status at the end of a cycle of the daemon. The metrics are computed from these
/// values.
#[derive(Debug, Clone, Default)]
pub struct MetricsSnapshot {
    /// The values that were counted since metrics were switched on.
    pub counters: Counters,
    /// The status that was published at the end of the cycle.
    pub published: StatusSnapshot,
    /// The PUs (logical CPUs) of the machine that were offline at the end of the cycle.
    pub offline_pus: CpuSet,
    /// The UTC time at which the daemon started.
    pub started_at: UnixMillis,
    /// The UTC time at which this snapshot was published.
    pub published_at: UnixMillis,
}

/// A measurement of the cycle that runs now: the start and the cause of the cycle.
#[derive(Debug, Clone, Copy)]
pub struct CycleTimer {
    cause: CycleCause,
    begun: Instant,
    scan_lateness: Option<Duration>,
}

/// The counters of the event loop for the metrics: its cycles, changes, process events and failures. They are
/// published after each cycle. While metrics are switched off, nothing is counted or published.
#[derive(Debug)]
pub struct Meter {
    counters: Counters,
    started: UnixMillis,
    snapshot: watch::Sender<Option<Arc<MetricsSnapshot>>>,
    settings: watch::Sender<MetricsSettings>,
}

/// The receiving end, in the metrics service, of what a [`Meter`] publishes: the latest snapshot and the
/// settings.
#[derive(Debug, Clone)]
pub struct MetricsReceiver {
    /// The latest snapshot. `None` before the first cycle since metrics were switched on.
    pub snapshot: watch::Receiver<Option<Arc<MetricsSnapshot>>>,
    /// The configured outputs of the metrics, as last read from the configuration.
    pub settings: watch::Receiver<MetricsSettings>,
}

impl Meter {
    /// Makes the meter for the event loop, and the receiving end for the metrics service.
    #[must_use]
    pub fn new(settings: &Settings) -> (Self, MetricsReceiver) {
        let (snapshot, receiver) = watch::channel(None);
        let (settings_sender, settings) = watch::channel(settings.metrics.clone());
        let meter = Self {
            counters: Counters::default(),
            started: clock::now().wall_clock,
            snapshot,
            settings: settings_sender,
        };
        (meter, MetricsReceiver { snapshot: receiver, settings })
    }

    fn is_on(&self) -> bool {
        self.settings.borrow().is_on()
    }

    /// Applies the settings of a configuration that was read again. If these settings switch metrics off, all
    /// counters are reset.
    pub fn apply_settings(&mut self, settings: &Settings) {
        let new = &settings.metrics;
        if !new.is_on() {
            self.counters = Counters::default();
            self.snapshot.send_replace(None);
        }
        if *self.settings.borrow() != *new {
            self.settings.send_replace(new.clone());
        }
    }

    /// Adds `events` process events (fork, exec, exit) to the count. `overrun` is true if the kernel dropped
    /// some events.
    pub fn count_process_events(&mut self, events: usize, overrun: bool) {
        if self.is_on() {
            self.counters.process_events += events as u64;
            self.counters.event_overruns += u64::from(overrun);
        }
    }

    /// Counts a reaction time: `took` is the time from the fork of a process to the change of its affinity mask.
    pub fn count_reaction(&mut self, took: Duration) {
        if self.is_on() {
            self.counters.reaction_times.add(took);
        }
    }

    /// Starts to measure a cycle. `scheduled` is the time at which the scan of the cycle was due, or `None` if
    /// no timer started the cycle. Returns `None` if metrics are switched off.
    #[must_use]
    pub fn begin_cycle(&self, cause: CycleCause, scheduled: Option<Instant>) -> Option<CycleTimer> {
        if !self.is_on() {
            return None;
        }
        let begun = Instant::now();
        let scan_lateness = scheduled.map(|due| begun.saturating_duration_since(due));
        Some(CycleTimer { cause, begun, scan_lateness })
    }

    /// Counts a cycle that has ended. `running` is the value that [`Meter::begin_cycle`] returned; with `None`
    /// nothing is counted. `report` has the changes of the cycle, and `faults` has the failures that still
    /// exist after it.
    pub fn end_cycle(&mut self, running: Option<CycleTimer>, report: &CycleReport, faults: &Faults) {
        let Some(CycleTimer { cause, begun, scan_lateness }) = running else { return };
        self.counters.scan_lateness = scan_lateness.unwrap_or(self.counters.scan_lateness);
        self.counters.count_cycle(cause, begun.elapsed(), report, faults);
    }

    /// Counts a failure to write the journal of granted cores and saved masks.
    pub fn count_journal_fault(&mut self) {
        if self.is_on() {
            self.counters.journal_faults += 1;
        }
    }

    /// Publishes a snapshot of the counters and of the status `published` to the metrics service. Called after
    /// each cycle.
    pub fn publish(&self, published: StatusSnapshot, state: &WardenState) {
        if !self.is_on() {
            return;
        }
        let offline_pus = state.topology.cpus().difference(&state.pool.online_cpus());
        let (counters, started_at, published_at) =
            (self.counters.clone(), self.started, clock::now().wall_clock);
        let snapshot = MetricsSnapshot { counters, published, offline_pus, started_at, published_at };
        self.snapshot.send_replace(Some(Arc::new(snapshot)));
    }
}
