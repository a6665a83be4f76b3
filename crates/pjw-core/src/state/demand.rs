//! The demand of a thread for CPU time, computed from two readings of its run time and wait time.
//!
//! Demand = (time running + time waiting on a run queue) / elapsed time, in permille of one PU. Waiting time
//! is included because a thread that waits for a busy PU has demand too.

use crate::basics::Nanos;
use crate::terms::Policy;

/// The demand of a thread for CPU time, in permille of one PU (logical CPU). The demand is the share of time in which
/// the thread ran or waited for a PU, smoothed over several readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadDemand {
    /// The smoothed demand, in permille of one PU.
    pub permille: u32,
    /// The smoothed share of time in which the thread was runnable and waited on a run queue, in permille of
    /// the elapsed time. The field [`ThreadDemand::permille`] is the sum of the running time and this waiting time.
    pub waiting_permille: u32,
    /// Whether the thread is hot: it runs or waits for a PU most of the time. A thread becomes hot
    /// at the demand `hot_threshold_permille` of the policy, and is no longer hot at the lower demand
    /// `cold_threshold_permille`. The two limits differ so that a thread does not change its state at each reading.
    pub is_hot: bool,
    /// The last reading of the CPU time of the thread. `None` before the first reading.
    last: Option<Reading>,
}

/// One reading of the CPU time of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reading {
    /// The time for which the thread has run or waited for a PU since its start, in ns.
    wanted_ns: u64,
    /// The time for which the thread has waited for a PU since its start, in ns.
    waited_ns: u64,
    /// The time of the reading, in ns since boot.
    at: Nanos,
}

/// The minimum time between two readings that are compared, in ns. In a shorter time a single timer tick
/// would look like a full PU.
const MIN_INTERVAL_NS: u64 = 100_000_000;

impl ThreadDemand {
    /// Returns the time at which pjw last read the CPU time of the thread that this `ThreadDemand` describes, in ns
    /// since boot. `None` if the CPU time was never read.
    #[must_use]
    pub fn last_read_at(&self) -> Option<Nanos> {
        self.last.map(|last| last.at)
    }

    /// Returns the total time for which the thread had waited for a PU (logical CPU) at the last reading, in ns. 0
    /// before the first reading.
    pub(crate) fn waited_ns(&self) -> u64 {
        self.last.map_or(0, |last| last.waited_ns)
    }

    /// Returns the demand after one more reading of the CPU time of the thread that this `ThreadDemand` describes. The
    /// new demand is the weighted mean of the earlier demand and the share of time in which the thread ran or waited
    /// for a PU (logical CPU) since the last reading.
    ///
    /// - `run_ns` and `wait_ns` are the times for which the thread has run and has waited for a PU since its start, in
    ///   ns.
    /// - `read_at` is the time of the reading, in ns since boot.
    /// - `idle_until` is the time until which the thread was certainly idle, although pjw did not read the thread. The
    ///   demand at this time is 0, and this time replaces the time of the last reading. `None` if pjw knows no such
    ///   time.
    /// - `policy` gives the weight of the new reading, and the two limits for [`ThreadDemand::is_hot`]. A thread is hot
    ///   if it runs or waits for a PU most of the time.
    ///
    /// The first reading does not change the demand. If `run_ns` plus `wait_ns` is less than at the last reading,
    /// another thread now has the thread id, and the demand becomes 0. Otherwise, a reading less than 100 ms after the
    /// last reading does not change the demand, and is not stored.
    #[must_use]
    pub fn with_reading(
        self,
        run_ns: u64,
        wait_ns: u64,
        read_at: Nanos,
        idle_until: Option<Nanos>,
        policy: &Policy,
    ) -> Self {
        let reading = Reading { wanted_ns: run_ns.saturating_add(wait_ns), waited_ns: wait_ns, at: read_at };
        let Some(last) = self.last else { return Self { last: Some(reading), ..self } };
        if let Some(idle_until) = idle_until.filter(|until| last.at < *until && *until < read_at) {
            // The thread had no demand until then, although its totals were not read.
            let last = Some(Reading { at: idle_until, ..last });
            let idle = Self { permille: 0, waiting_permille: 0, is_hot: false, last };
            return idle.with_reading(run_ns, wait_ns, read_at, None, policy);
        }
        if reading.wanted_ns < last.wanted_ns {
            return Self { last: Some(reading), ..Self::default() };
        }
        let passed = read_at.0.saturating_sub(last.at.0);
        if passed < MIN_INTERVAL_NS {
            return self;
        }
        let share =
            |ns: u64| u32::try_from(u128::from(ns) * 1000 / u128::from(passed)).unwrap_or(1000).min(1000);
        let weight = policy.smoothing_weight_permille.min(1000);
        let smoothed = |before: u32, now: u32| (before * (1000 - weight) + now * weight) / 1000;
        let permille = smoothed(self.permille, share(reading.wanted_ns - last.wanted_ns));
        let waited = share(reading.waited_ns.saturating_sub(last.waited_ns));
        let waiting_permille = smoothed(self.waiting_permille, waited).min(permille);
        let is_hot = if self.is_hot {
            permille > policy.cold_threshold_permille
        } else {
            permille >= policy.hot_threshold_permille
        };
        Self { permille, waiting_permille, is_hot, last: Some(reading) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const SECOND: u64 = 1_000_000_000;

    /// Returns the smoothed demand and whether the thread is hot, after each second with one of `demands` in permille.
    fn smoothed(demands: &[u64]) -> Vec<(u32, bool)> {
        let policy = Policy::default();
        let mut demand = ThreadDemand::default().with_reading(0, 0, Nanos(0), None, &policy);
        let mut total = 0;
        demands
            .iter()
            .zip(1..)
            .map(|(permille, second)| {
                total += permille * SECOND / 1000;
                demand = demand.with_reading(total, 0, Nanos(second * SECOND), None, &policy);
                (demand.permille, demand.is_hot)
            })
            .collect()
    }

    #[test]
    fn a_thread_becomes_hot_slowly_and_cold_slowly() {
        assert_eq!(
            smoothed(&[1000, 1000, 400, 400, 0, 0]),
            [(500, false), (750, true), (575, true), (487, true), (243, false), (121, false)]
        );
    }

    #[test]
    fn waiting_time_counts_as_demand() {
        let policy = Policy { smoothing_weight_permille: 1000, ..Policy::default() };
        let demand = ThreadDemand::default().with_reading(0, 0, Nanos(0), None, &policy);
        let demand = demand.with_reading(SECOND / 4, SECOND / 2, Nanos(SECOND), None, &policy);
        assert_eq!((demand.permille, demand.is_hot), (750, true));
        assert_eq!(demand.waiting_permille, 500);
        let calm = demand.with_reading(SECOND / 2, SECOND / 2, Nanos(2 * SECOND), None, &policy);
        assert_eq!((calm.permille, calm.waiting_permille), (250, 0), "the thread no longer waits");
    }

    #[test]
    fn two_readings_at_the_same_time_change_nothing() {
        let policy = Policy::default();
        let first = ThreadDemand::default().with_reading(5, 0, Nanos(SECOND), None, &policy);
        assert_eq!(first.with_reading(1_000_000, 0, Nanos(SECOND + 1_000_000), None, &policy), first);
    }

    #[test]
    fn a_thread_that_was_idle_is_measured_from_its_wakeup() {
        let policy = Policy { smoothing_weight_permille: 1000, ..Policy::default() };
        let idle = ThreadDemand::default().with_reading(0, 0, Nanos(0), None, &policy);
        let awake = idle.with_reading(SECOND, 0, Nanos(60 * SECOND), Some(Nanos(59 * SECOND)), &policy);
        assert!(awake.is_hot && awake.permille == 1000, "{awake:?}");
    }

    #[test]
    fn a_reused_thread_id_resets_the_demand() {
        let policy = Policy { smoothing_weight_permille: 1000, ..Policy::default() };
        let hot = ThreadDemand::default().with_reading(0, 0, Nanos(0), None, &policy).with_reading(
            SECOND,
            0,
            Nanos(SECOND),
            None,
            &policy,
        );
        assert!(hot.is_hot);
        let other = hot.with_reading(10, 0, Nanos(2 * SECOND), None, &policy);
        assert!(!other.is_hot);
    }
}
