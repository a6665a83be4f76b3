//! Where threads of owners run, between two samples of their CPU time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_linux::bpf::OwnerRunTime;

/// A PU on which an idle owner has run is reported again when the owner has not run there for this time. Until then,
/// pjwd looks each 2 ms whether the owner runs.
const QUIET_TIME: Duration = Duration::from_millis(6);

/// Where threads of owners ran, by the last look at the monitor.
#[derive(Debug, Default)]
pub(super) struct OwnerRuns {
    /// The lent PUs on which a thread of the owner ran.
    pub(super) running: CpuSet,
    /// For each lent PU on which the owner has run, the time of the last look that showed this.
    last_run_at: BTreeMap<Pu, Instant>,
    /// For each lent PU, how long the owner has run there.
    run_times: BTreeMap<Pu, Duration>,
}

impl OwnerRuns {
    /// Stores `times`, what the monitor returned at the time `now`.
    pub(super) fn update(&mut self, times: &[OwnerRunTime], now: Instant) {
        self.running = times.iter().filter(|time| time.is_running).map(|time| time.pu).collect();
        for time in times {
            let before = self.run_times.insert(time.pu, time.run_time).unwrap_or_default();
            if time.is_running || time.run_time > before {
                self.last_run_at.insert(time.pu, now);
            }
        }
    }

    /// Forgets what is known of all PUs except those in `kept`.
    pub(super) fn retain(&mut self, kept: impl Fn(Pu) -> bool) {
        self.last_run_at.retain(|&pu, _| kept(pu));
        self.run_times.retain(|&pu, _| kept(pu));
    }

    /// Whether the owner has run on `pu` less than [`QUIET_TIME`] before `now`.
    pub(super) fn has_run_recently(&self, pu: Pu, now: Instant) -> bool {
        self.last_run_at.get(&pu).is_some_and(|&at| now < at + QUIET_TIME)
    }
}
