//! How much a thread wants a CPU: two readings of its run and wait time make a demand.
//!
//! Demand = (time running + time waiting on a run queue) / time passed, in permille of one PU. Waiting counts:
//! a thread that is kept from running by others wants the CPU all the same.

use crate::policy::Policy;
use crate::snapshot::Nanos;

/// What is known of a thread's demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Smoothed, in permille of one PU.
    pub permille: u32,
    /// The part of it that waited on a run queue, smoothed alike, in permille of one PU. No decision depends on it.
    pub waiting_permille: u32,
    /// Whether it counts as running; changes at two different thresholds, so that it doesn't flap.
    pub hot: bool,
    /// The last reading: run and wait time in ns, and when it was taken.
    last: Option<Reading>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reading {
    wanted_ns: u64,
    waited_ns: u64,
    at: Nanos,
}

/// Readings closer together than this say nothing: a single tick would look like a whole PU.
const SHORTEST_NS: u64 = 100_000_000;

impl Demand {
    /// When it was read last.
    #[must_use]
    pub fn read_at(&self) -> Option<Nanos> {
        self.last.map(|last| last.at)
    }

    /// The demand after one more reading. The first reading, one that came too soon after the last, and one
    /// that runs backwards (another thread of the same number) change no verdict. `quiet_until` is when it was last
    /// seen not to have run, if nobody looked closer since the last reading.
    #[must_use]
    pub fn after(
        self,
        run_ns: u64,
        wait_ns: u64,
        at: Nanos,
        quiet_until: Option<Nanos>,
        policy: &Policy,
    ) -> Self {
        let reading = Reading { wanted_ns: run_ns.saturating_add(wait_ns), waited_ns: wait_ns, at };
        let Some(last) = self.last else { return Self { last: Some(reading), ..self } };
        if let Some(quiet) = quiet_until.filter(|quiet| last.at < *quiet && *quiet < at) {
            // Until then it wanted nothing, and nobody read that.
            let last = Some(Reading { at: quiet, ..last });
            let asleep = Self { permille: 0, waiting_permille: 0, hot: false, last };
            return asleep.after(run_ns, wait_ns, at, None, policy);
        }
        if reading.wanted_ns < last.wanted_ns {
            return Self { last: Some(reading), ..Self::default() };
        }
        let passed = at.0.saturating_sub(last.at.0);
        if passed < SHORTEST_NS {
            return self;
        }
        let share =
            |ns: u64| u32::try_from(u128::from(ns) * 1000 / u128::from(passed)).unwrap_or(1000).min(1000);
        let weight = policy.smoothing_permille.min(1000);
        let smoothed = |before: u32, now: u32| (before * (1000 - weight) + now * weight) / 1000;
        let permille = smoothed(self.permille, share(reading.wanted_ns - last.wanted_ns));
        let waited = share(reading.waited_ns.saturating_sub(last.waited_ns));
        let waiting_permille = smoothed(self.waiting_permille, waited).min(permille);
        let hot = if self.hot { permille > policy.cold_permille } else { permille >= policy.hot_permille };
        Self { permille, waiting_permille, hot, last: Some(reading) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn run(demands: &[u64]) -> Vec<(u32, bool)> {
        let policy = Policy::default();
        let mut demand = Demand::default().after(0, 0, Nanos(0), None, &policy);
        let mut total = 0;
        demands
            .iter()
            .zip(1..)
            .map(|(permille, second)| {
                total += permille * SECOND / 1000;
                demand = demand.after(total, 0, Nanos(second * SECOND), None, &policy);
                (demand.permille, demand.hot)
            })
            .collect()
    }

    #[test]
    fn a_thread_becomes_hot_slowly_and_cold_slowly() {
        assert_eq!(
            run(&[1000, 1000, 400, 400, 0, 0]),
            [(500, false), (750, true), (575, true), (487, true), (243, false), (121, false)]
        );
    }

    #[test]
    fn waiting_is_wanting() {
        let policy = Policy { smoothing_permille: 1000, ..Policy::default() };
        let demand = Demand::default().after(0, 0, Nanos(0), None, &policy);
        let demand = demand.after(SECOND / 4, SECOND / 2, Nanos(SECOND), None, &policy);
        assert_eq!((demand.permille, demand.hot), (750, true));
        assert_eq!(demand.waiting_permille, 500);
        let calm = demand.after(SECOND / 2, SECOND / 2, Nanos(2 * SECOND), None, &policy);
        assert_eq!((calm.permille, calm.waiting_permille), (250, 0), "it waits no more");
    }

    #[test]
    fn two_readings_at_once_change_nothing() {
        let policy = Policy::default();
        let first = Demand::default().after(5, 0, Nanos(SECOND), None, &policy);
        assert_eq!(first.after(1_000_000, 0, Nanos(SECOND + 1_000_000), None, &policy), first);
    }

    #[test]
    fn who_slept_long_and_runs_is_judged_by_the_time_since_it_woke() {
        let policy = Policy { smoothing_permille: 1000, ..Policy::default() };
        let asleep = Demand::default().after(0, 0, Nanos(0), None, &policy);
        let awake = asleep.after(SECOND, 0, Nanos(60 * SECOND), Some(Nanos(59 * SECOND)), &policy);
        assert!(awake.hot && awake.permille == 1000, "{awake:?}");
    }

    #[test]
    fn a_reused_number_starts_anew() {
        let policy = Policy { smoothing_permille: 1000, ..Policy::default() };
        let hot = Demand::default().after(0, 0, Nanos(0), None, &policy).after(
            SECOND,
            0,
            Nanos(SECOND),
            None,
            &policy,
        );
        assert!(hot.hot);
        let other = hot.after(10, 0, Nanos(2 * SECOND), None, &policy);
        assert!(!other.hot);
    }
}
