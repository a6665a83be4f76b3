//! The clock of the simulated machine.

use std::sync::PoisonError;
use std::time::Duration;

use pjw_core::time::{Moment, Nanos, UnixMillis};

use super::{SimMachine, is_in_any};

impl SimMachine {
    /// Returns the current simulated time, as time since boot and as UTC time.
    #[must_use]
    pub fn current_time(&self) -> Moment {
        let wall_clock = UnixMillis(i64::try_from(self.now / 1_000_000).unwrap_or(0));
        Moment { since_boot: Nanos(self.now), wall_clock }
    }

    /// Advances the simulated time by `ns` nanoseconds. All busy threads
    /// ([`SimThread::is_busy`](super::SimThread::is_busy)) run during this time: `ns` is added to the CPU time of each
    /// of them. A thread does not run if the cgroup of its process, or a cgroup above, is frozen. Also reports the
    /// length of this time to [`SimMachine::observer`].
    pub fn advance(&mut self, ns: u64) {
        if let Some(observer) = self.observer.clone() {
            // A panic of an observer fails the test in any case, so a poisoned lock needs no error of its own.
            observer
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .record_period(self, Duration::from_nanos(ns));
        }
        self.now += ns;
        let frozen = &self.frozen_cgroups;
        let running = self.processes.values_mut().filter(|process| !is_in_any(&process.cgroup, frozen));
        let threads = running.flat_map(|process| process.threads.values_mut());
        threads.filter(|thread| thread.is_busy).for_each(|thread| thread.run_ns += ns);
    }
}
