//! How many of its cores an owner uses, from samples of its CPU time.
//!
//! A core is *in use* if the owner runs on it for most of the time. On a core with one PU this is nine tenths: in the gaps the
//! borrower runs at idle priority, and the owner does not wait for it. On a core with several PUs it is one tenth: a borrower
//! on one PU slows down the owner on the other.

use core::time::Duration;

use crate::basics::{CpuSet, Pu, prelude::*};

/// The time over which the use is averaged.
const AVERAGING_TIME: Duration = Duration::from_millis(100);
/// A shorter sample can't tell a demand that lasts from one that does not.
const LONG_SAMPLE: Duration = Duration::from_millis(10);
/// By how much the CPU time of a process may be too small: the kernel adds that of a running thread at each tick, mostly 250 times
/// a second. The CPU times of lent cores that are measured one by one are exact.
const TICK: Duration = Duration::from_millis(4);

/// A use of cores. 1,000,000 is one core that is used all the time.
type Millionths = u64;

const ONE_CORE: Millionths = 1_000_000;
/// An owner that uses less is idle.
const IDLE: Millionths = ONE_CORE / 10;
const IN_USE_WITH_ONE_PU: Millionths = ONE_CORE * 9 / 10;
const IN_USE_WITH_SEVERAL_PUS: Millionths = ONE_CORE / 10;
/// An owner that was idle uses a core if it runs there for this part of a short sample. The daemon itself may run there for the rest.
const IN_USE_FOR_SHORT: Millionths = ONE_CORE * 3 / 4;
/// A core that is used for this part of a long sample is in use, whatever the average is.
const SATURATED: Millionths = ONE_CORE * 99 / 100;

/// The CPU time that an owner (a job whose idle cores may be lent) used since the previous sample.
#[derive(Debug, Clone, Copy)]
pub struct UseSample<'a> {
    /// The time since the previous sample.
    pub period: Duration,
    /// The CPU time that all processes of the owner used in `period`, on all cores.
    pub cpu_time: Duration,
    /// The lent cores of the owner. Each is a pair: the PUs of the core, and the CPU time that threads of the
    /// owner used on these PUs in `period`. (Borrowers run at idle priority, so these are the threads that
    /// are not at idle priority.) Empty if the CPU time is not measured core by core.
    pub lent: &'a [(CpuSet, Duration)],
    /// Whether the cores of the owner have more than one PU each.
    pub has_smt: bool,
}

/// The use that an owner (a job whose idle cores may be lent) makes of its cores, as a moving average over
/// samples of its CPU time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreUse {
    /// The average use of all cores together, in millionths of one core.
    total: Millionths,
    /// The average use of each lent core by the owner, in millionths of the core. The key is the first PU of
    /// the core.
    lent: BTreeMap<Pu, Millionths>,
}

impl CoreUse {
    /// Returns whether the owner (the job whose use is measured) is idle: it used less than a tenth of one
    /// core, as a moving average over about 100 ms. True before the first sample.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.total < IDLE
    }

    /// Adds a sample of the CPU time of the owner (a job whose idle cores may be lent) to the average.
    /// Returns a pair: the number of cores that the owner uses now, and the PUs of the lent cores that the
    /// owner uses now.
    ///
    /// - A lent core in [`UseSample::lent`] counts if the owner runs on it for at least nine tenths of the
    ///   time, or for at least one tenth if the core has several PUs.
    /// - All other CPU time of the owner counts as if it were used on as few cores as possible.
    ///
    /// These shares of the time are moving averages. A high share in this sample alone also suffices in two
    /// cases: the owner was idle before, or it ran for at least 99 % of a sample of 10 ms or more.
    pub fn add(&mut self, sample: &UseSample<'_>) -> (u32, CpuSet) {
        let in_use = if sample.has_smt { IN_USE_WITH_SEVERAL_PUS } else { IN_USE_WITH_ONE_PU };
        // An owner that was idle gets its cores after a short sample; otherwise short samples fluctuate too much.
        let (was_idle, is_long) = (self.is_idle(), sample.period >= LONG_SAMPLE);
        let in_sample = match (was_idle, is_long) {
            (true, true) => Some(in_use),
            (true, false) => Some(in_use.min(IN_USE_FOR_SHORT)),
            (false, true) => Some(SATURATED),
            (false, false) => None,
        };
        let average = |before: Millionths, cpu_time: Duration| {
            let now = share(cpu_time, sample.period);
            (averaged(before, now, sample.period), now)
        };
        let (total, total_now) = average(self.total, sample.cpu_time);
        let (mut elsewhere, mut elsewhere_now) = (total, total_now);
        let (mut lent, mut runs_on, mut count) = (BTreeMap::new(), CpuSet::new(), 0);
        for (core, cpu_time) in sample.lent {
            let Some(first) = core.first() else { continue };
            let (core_average, now) = average(self.lent.get(&first).copied().unwrap_or(0), *cpu_time);
            if core_average >= in_use || in_sample.is_some_and(|least| now >= least) {
                runs_on = runs_on.union(core);
                count += 1;
            }
            elsewhere = elsewhere.saturating_sub(core_average);
            elsewhere_now = elsewhere_now.saturating_sub(now);
            lent.insert(first, core_average);
        }
        *self = Self { total, lent };
        let others = cores_in_use(elsewhere, in_use);
        let is_behind = was_idle && is_long && sample.lent.is_empty();
        let behind = if is_behind { share(TICK, sample.period) } else { 0 };
        let least_now = in_sample.map(|least| least.saturating_sub(behind).max(IDLE));
        let others_now = least_now.map_or(0, |least| cores_in_use(elsewhere_now, least));
        (count + others.max(others_now), runs_on)
    }
}

/// The number of cores in use, if the use is on as few cores as possible.
fn cores_in_use(used: Millionths, in_use: Millionths) -> u32 {
    u32::try_from((used + (ONE_CORE - in_use)) / ONE_CORE).unwrap_or(u32::MAX)
}

/// The use of cores in a period. Zero if the period has no length.
fn share(cpu_time: Duration, period: Duration) -> Millionths {
    let used = cpu_time.as_nanos() * u128::from(ONE_CORE);
    used.checked_div(period.as_nanos()).and_then(|used| u64::try_from(used).ok()).unwrap_or(0)
}

/// The average after a sample: the longer the sample, the more it counts.
fn averaged(before: Millionths, now: Millionths, period: Duration) -> Millionths {
    let (period, averaging) = (period.as_nanos(), AVERAGING_TIME.as_nanos());
    let sum = u128::from(before) * averaging + u128::from(now) * period;
    u64::try_from(sum / (averaging + period)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Adds samples of 10 ms for a second.
    fn steady(
        core_use: &mut CoreUse,
        total_percent: u32,
        lent: &[(&str, u32)],
        has_smt: bool,
    ) -> (u32, CpuSet) {
        let mut result = (0, CpuSet::new());
        for _ in 0..100 {
            result = sample(core_use, 10 * MS, total_percent, lent, has_smt);
        }
        result
    }

    fn sample(
        core_use: &mut CoreUse,
        period: Duration,
        total_percent: u32,
        lent: &[(&str, u32)],
        has_smt: bool,
    ) -> (u32, CpuSet) {
        let time = |percent: u32| period * percent / 100;
        let lent: Vec<(CpuSet, Duration)> =
            lent.iter().map(|(core, percent)| (core.parse().unwrap(), time(*percent))).collect();
        core_use.add(&UseSample { period, cpu_time: time(total_percent), lent: &lent, has_smt })
    }

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn a_core_with_one_pu_is_in_use_from_nine_tenths_of_the_time() {
        for (percent, expected) in [(0, 0), (85, 0), (95, 1), (185, 1), (195, 2)] {
            let mut core_use = CoreUse::default();
            assert_eq!(steady(&mut core_use, percent, &[], false).0, expected, "{percent} %");
        }
    }

    #[test]
    fn a_core_with_several_pus_is_in_use_from_a_tenth_of_the_time() {
        for (percent, expected) in [(0, 0), (5, 0), (15, 1), (105, 1), (115, 2)] {
            let mut core_use = CoreUse::default();
            assert_eq!(steady(&mut core_use, percent, &[], true).0, expected, "{percent} %");
        }
    }

    #[test]
    fn a_use_that_is_spread_over_lent_cores_leaves_gaps_on_each() {
        let mut core_use = CoreUse::default();
        assert_eq!(steady(&mut core_use, 140, &[("0", 70), ("1", 70)], false), (0, set("")));
        assert_eq!(steady(&mut core_use, 140, &[("0", 96), ("1", 44)], false), (1, set("0")));
        assert_eq!(steady(&mut core_use, 140, &[], false), (1, set("")), "where nothing measures each core");
    }

    #[test]
    fn an_owner_that_was_idle_is_heard_after_a_short_sample() {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, 0, &[("0", 0), ("1", 0)], false);
        assert_eq!(sample(&mut core_use, 2 * MS, 195, &[("0", 95), ("1", 100)], false), (2, set("0-1")));
    }

    #[test]
    fn work_that_is_over_before_the_end_of_a_short_sample_does_not_count() {
        for (percent, expected) in [(70, ""), (80, "0")] {
            let mut core_use = CoreUse::default();
            let runs_on = sample(&mut core_use, 2 * MS, percent, &[("0", percent)], false).1;
            assert_eq!(runs_on, set(expected), "{percent} %");
        }
    }

    #[test]
    fn the_fluctuations_of_an_owner_that_is_not_idle_do_not_count() {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, 140, &[("0", 70), ("1", 70)], false);
        assert_eq!(sample(&mut core_use, 2 * MS, 200, &[("0", 100), ("1", 100)], false).0, 0);
        assert_eq!(sample(&mut core_use, 10 * MS, 196, &[("0", 98), ("1", 98)], false).0, 0);
        assert_eq!(sample(&mut core_use, 10 * MS, 200, &[("0", 100), ("1", 100)], false).0, 2);
    }

    #[test]
    fn the_cpu_time_of_an_idle_owner_that_begins_to_work_is_behind_by_a_tick() {
        let mut core_use = CoreUse::default();
        assert_eq!(sample(&mut core_use, 10 * MS, 40, &[], false).0, 0);
        let mut core_use = CoreUse::default();
        assert_eq!(sample(&mut core_use, 10 * MS, 60, &[], false).0, 1);
        steady(&mut core_use, 60, &[], false);
        assert_eq!(sample(&mut core_use, 10 * MS, 60, &[], false).0, 0, "only of an idle one");
    }

    #[test]
    fn a_sample_without_length_counts_nothing() {
        let mut core_use = CoreUse::default();
        assert_eq!(sample(&mut core_use, Duration::ZERO, 100, &[("0", 100)], false), (0, set("")));
    }
}
