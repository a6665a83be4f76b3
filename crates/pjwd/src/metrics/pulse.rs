//! From the loop to whoever tells of it: a [`Meter`] on the loop's thread, one [`Pulse`] after each cycle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_core::snapshot::{Scope, UnixMillis};
use pjw_core::state::WardenState;
use pjw_ipc::wire;
use pjw_linux::clock;
use tokio::sync::watch;

use super::counters::{Cause, Counters};
use crate::config::{MetricsSettings, Settings};
use crate::cycle::{Report, Troubles};
use crate::events::Causes;

/// How much a job's threads want its PUs, in permille of one PU, smoothed as their demand is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Running or waiting to run.
    pub wanted_permille: u64,
    /// Waiting to run.
    pub waiting_permille: u64,
}

/// What was published after a cycle.
#[derive(Debug, Clone, Default)]
pub struct Scene {
    /// The view.
    pub status: Arc<wire::Status>,
    /// Of each of its jobs, in the same order.
    pub loads: Vec<Load>,
    /// Processes that belong to no job, of users who have jobs here.
    pub strays: usize,
}

/// Everything that metrics are made of, as of one cycle.
#[derive(Debug, Clone, Default)]
pub struct Pulse {
    /// What was counted.
    pub counters: Counters,
    /// What was published.
    pub scene: Scene,
    /// PUs that are off.
    pub offline: CpuSet,
    /// When the daemon started.
    pub started: UnixMillis,
    /// When this was published.
    pub at: UnixMillis,
}

/// A cycle that runs.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    cause: Cause,
    begun: Instant,
    behind: Option<Duration>,
}

/// The loop's end. Switched off it counts nothing and tells nothing.
#[derive(Debug)]
pub struct Meter {
    counters: Counters,
    started: UnixMillis,
    pulse: watch::Sender<Option<Arc<Pulse>>>,
    settings: watch::Sender<MetricsSettings>,
}

/// The other end.
#[derive(Debug, Clone)]
pub struct Told {
    /// The latest pulse; `None` until a cycle has run since metrics were switched on.
    pub pulse: watch::Receiver<Option<Arc<Pulse>>>,
    /// What is in force.
    pub settings: watch::Receiver<MetricsSettings>,
}

impl Meter {
    /// Both ends.
    #[must_use]
    pub fn new(settings: &Settings) -> (Self, Told) {
        let (pulse, told) = watch::channel(None);
        let (sent, settings) = watch::channel(settings.metrics.clone());
        let meter = Self { counters: Counters::default(), started: clock::now().wall, pulse, settings: sent };
        (meter, Told { pulse: told, settings })
    }

    fn is_on(&self) -> bool {
        self.settings.borrow().is_on()
    }

    /// Puts other settings in force. Who switches metrics on again counts from nothing, as after a restart.
    pub fn apply(&mut self, settings: &Settings) {
        let new = &settings.metrics;
        if !new.is_on() {
            self.counters = Counters::default();
            self.pulse.send_replace(None);
        }
        self.settings.send_if_modified(|old| {
            let changed = old != new;
            if changed {
                old.clone_from(new);
            }
            changed
        });
    }

    /// The kernel told of so many events, and whether it had to drop some.
    pub fn heard(&mut self, events: usize, overrun: bool) {
        if self.is_on() {
            self.counters.kernel_events += events as u64;
            self.counters.overruns += u64::from(overrun);
        }
    }

    /// A newborn was put right so long after its birth.
    pub fn reacted(&mut self, took: Duration) {
        if self.is_on() {
            self.counters.reactions.add(took);
        }
    }

    /// A cycle begins for these causes, and looks so far; `due` is when the next timed look was.
    #[must_use]
    pub fn begin(&self, causes: &Causes, scope: &Scope, due: Instant) -> Option<Running> {
        if !self.is_on() {
            return None;
        }
        let begun = Instant::now();
        let cause = match (*scope == Scope::Full, causes.are_due()) {
            (true, _) => Cause::Full,
            (false, true) => Cause::Timer,
            (false, false) => Cause::Event,
        };
        let behind = causes.timer.then(|| begun.saturating_duration_since(due));
        Some(Running { cause, begun, behind })
    }

    /// A cycle has ended.
    pub fn count(&mut self, running: Option<Running>, report: &Report, troubles: &Troubles) {
        let Some(Running { cause, begun, behind }) = running else { return };
        self.counters.behind = behind.unwrap_or(self.counters.behind);
        self.counters.count(cause, begun.elapsed(), report, troubles);
    }

    /// The journal can't be written.
    pub fn journal_fault(&mut self) {
        if self.is_on() {
            self.counters.journal_faults += 1;
        }
    }

    /// Tells what was published after a cycle.
    pub fn publish(&self, scene: Scene, state: &WardenState) {
        if !self.is_on() {
            return;
        }
        let offline = state.topology.cpus().difference(&state.pool.online());
        let (counters, started, at) = (self.counters.clone(), self.started, clock::now().wall);
        self.pulse.send_replace(Some(Arc::new(Pulse { counters, scene, offline, started, at })));
    }
}
