//! How many of its cores an owner uses, from samples of its CPU time.
//!
//! A core is *in use* if the owner runs on it for most of the time. On a core with one PU this is nine tenths: in the gaps the
//! borrower runs at idle priority, and the owner does not wait for it. On a core with several PUs it is one tenth: a borrower
//! on one PU slows down the owner on the other.

use core::time::Duration;

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::state::demand::Demand;

/// The time over which the use is averaged.
const AVERAGING_TIME: Duration = Duration::from_millis(100);
/// A shorter sample can't tell a demand that lasts from one that does not.
const LONG_SAMPLE: Duration = Duration::from_millis(10);
/// An owner that used nearly nothing for this time is idle, also if it was busy shortly before.
const QUIET_TIME: Duration = Duration::from_millis(50);
/// For this time after an idle owner has begun to work, short samples count: several of its threads may wake up one after
/// the other.
const WAKE_UP_TIME: Duration = Duration::from_millis(20);

/// The time of the short samples that are judged together where the kernel's figures may be behind by a tick, mostly 4 ms.
const RECENT_TIME: Duration = Duration::from_millis(5);

/// A use of cores. 1,000,000 is one core that is used all the time.
type Millionths = u64;

const ONE_CORE: Millionths = 1_000_000;
/// An owner that uses less is idle.
const IDLE: Millionths = ONE_CORE / 10;
const IN_USE_WITH_ONE_PU: Millionths = ONE_CORE * 9 / 10;
const IN_USE_WITH_SEVERAL_PUS: Millionths = ONE_CORE / 10;
/// An owner that wakes up uses a lent core if it has run there for this time in a sample of 2 ms. The kernel may give the
/// borrower its turn after a slice of the owner: 1.4 ms on 2 or 3 CPUs, more on others (`base_slice_ns`,
/// kernel/sched/fair.c).
const SETTLED: Duration = Duration::from_micros(1300);
/// An owner that wakes up uses as many of its other cores as this part of a short sample shows.
const IN_USE_FOR_SHORT: Millionths = ONE_CORE * 3 / 4;
/// A core that is used for this part of a long sample is in use, whatever the average is.
const SATURATED: Millionths = ONE_CORE * 99 / 100;

/// A thread that waits for less than this share of the time does not compete with other programs.
const MIN_WAITING_PERMILLE: u32 = 100;

/// One measurement of the CPU time that an owner (a job whose idle cores may be lent) used since the previous
/// measurement.
#[derive(Debug, Clone, Copy)]
pub struct OwnerCpuSample<'a> {
    /// The time since the previous sample.
    pub period: Duration,
    /// The CPU time that all processes of the owner used in `period`, on all cores.
    pub cpu_time: Duration,
    /// The lent cores of the owner, with the CPU time that the owner used on each. Empty if the CPU time is not
    /// measured core by core.
    pub lent: &'a [LentCoreSample],
    /// Whether the cores of the owner have more than one PU each.
    pub has_smt: bool,
}

/// The CPU time that an owner (a job whose idle cores may be lent) used on one lent core since the previous
/// measurement. pjw adds up the CPU time of all threads on the core, except these threads:
///
/// - Kernel threads, and the threads of pjwd.
/// - Threads at idle priority (`cpu.idle` or `SCHED_IDLE`). All threads of borrowers (jobs that borrow cores) have
///   idle priority.
/// - Threads that the kernel may run on more PUs than the owner holds. Such a thread belongs to another program. Only
///   io_uring workers always count, because the kernel may allow them all PUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LentCoreSample {
    /// The PUs of the core.
    pub core: CpuSet,
    /// The CPU time that threads of the owner used on these PUs.
    pub cpu_time: Duration,
}

/// How much an owner (a job whose idle cores may be lent) uses its cores: moving averages of its CPU use over about
/// 100 ms. [`CoreUse::add`] adds a measurement of the CPU time to the averages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreUse {
    /// The average use of all cores together, in millionths of one core.
    total: Millionths,
    /// The average use of each lent core by the owner, in millionths of the core. The key is the first PU of
    /// the core.
    lent: BTreeMap<Pu, Millionths>,
    /// For how long each sample has shown less than a tenth of a core.
    quiet_for: Duration,
    /// For how long the owner has not been idle. Zero while it is idle.
    busy_for: Duration,
    /// The last short samples, oldest first: as many as cover [`RECENT_TIME`] with the next one.
    recent: Vec<Span>,
    /// The short samples of an owner that does not wake up, since the last one that was judged: until they cover 10 ms.
    held: Held,
    /// The result of the last sample that was judged.
    verdict: (u32, CpuSet),
}

/// Samples that are judged together as one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Held {
    span: Span,
    /// The CPU time on each lent core. The key is the first PU of the core.
    lent: BTreeMap<Pu, Duration>,
}

impl Held {
    fn add(&mut self, sample: &OwnerCpuSample<'_>) {
        self.span = self.span.joined(Span::of(sample));
        for LentCoreSample { core, cpu_time } in sample.lent {
            if let Some(first) = core.first() {
                *self.lent.entry(first).or_default() += *cpu_time;
            }
        }
    }
}

/// Consecutive samples: the time that they cover, and the CPU time that the owner used in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Span {
    period: Duration,
    cpu_time: Duration,
}

impl Span {
    fn of(sample: &OwnerCpuSample<'_>) -> Self {
        Self { period: sample.period, cpu_time: sample.cpu_time }
    }

    fn joined(self, next: Self) -> Self {
        Self { period: self.period + next.period, cpu_time: self.cpu_time + next.cpu_time }
    }

    fn cores_in_use(self, in_use: Millionths) -> u32 {
        cores_in_use(share(self.cpu_time, self.period), in_use)
    }
}

impl CoreUse {
    /// Whether the owner (a job whose idle cores may be lent) was idle at the last measurement of its CPU time.
    /// Also true before the first measurement. The owner is idle in each of these cases:
    ///
    /// - The moving average of its CPU use, over about 100 ms, is less than a tenth of one core.
    /// - Every measurement of the last 50 ms has shown a use of less than a tenth of one core.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.busy_for.is_zero()
    }

    /// Adds a measurement of the CPU time of the owner (a job whose idle cores may be lent). Returns the number of
    /// cores that the owner uses now, and the PUs of those lent cores that the owner uses now.
    ///
    /// In the following, the minimum share is nine tenths of the time, or one tenth if the owner's cores have several
    /// PUs each. The owner is waking up if it was idle ([`CoreUse::is_idle`]) at most 20 ms ago. The owner uses a
    /// lent core ([`OwnerCpuSample::lent`]) in each of these cases:
    ///
    /// - Averaged over about 100 ms, the owner ran on the core for at least the minimum share.
    /// - `sample` covers at least 10 ms, and the owner ran on the core for at least 99 % of this time.
    /// - `sample` covers at least 10 ms, the owner is waking up, and it ran on the core for at least the minimum
    ///   share of this time.
    /// - `sample` covers less than 10 ms, the owner is waking up, and it ran on the core for at least 1.3 ms.
    ///
    /// The CPU time on all other cores counts as if the owner used as few cores as possible. The last of these cores
    /// counts in the first three cases. It also counts if the owner is waking up, `sample` covers less than 10 ms,
    /// and the owner ran on this core for at least the smaller of two times:
    ///
    /// - If `sample` contains lent cores: three quarters of the time of `sample`, or the minimum share.
    /// - If `sample` contains no lent core: 1.3 ms, or the minimum share. Here the last measurements are added up
    ///   until they cover 5 ms, because the kernel may update the CPU time of a running thread only at each timer
    ///   tick (mostly every 4 ms).
    ///
    /// If the owner is not waking up, measurements of less than 10 ms are joined until they cover 10 ms. Until then
    /// the function returns the previous result.
    pub fn add(&mut self, sample: &OwnerCpuSample<'_>) -> (u32, CpuSet) {
        if self.busy_for > WAKE_UP_TIME {
            self.held.add(sample);
            if self.held.span.period < LONG_SAMPLE {
                return self.verdict.clone();
            }
        }
        let Held { span, lent } = core::mem::take(&mut self.held);
        self.verdict = if span.period > sample.period {
            let joined = |sample: &LentCoreSample| LentCoreSample {
                core: sample.core.clone(),
                cpu_time: sample.core.first().and_then(|first| lent.get(&first).copied()).unwrap_or_default(),
            };
            let lent: Vec<LentCoreSample> = sample.lent.iter().map(joined).collect();
            let Span { period, cpu_time } = span;
            self.judge(&OwnerCpuSample { period, cpu_time, lent: &lent, ..*sample })
        } else {
            self.judge(sample)
        };
        self.verdict.clone()
    }

    /// What [`CoreUse::add`] returns for one sample, or for several that were joined.
    fn judge(&mut self, sample: &OwnerCpuSample<'_>) -> (u32, CpuSet) {
        let in_use = if sample.has_smt { IN_USE_WITH_SEVERAL_PUS } else { IN_USE_WITH_ONE_PU };
        // An owner that wakes up gets its cores after a short sample. Otherwise short samples fluctuate too much, and are joined.
        let (wakes_up, is_long) = (self.busy_for <= WAKE_UP_TIME, sample.period >= LONG_SAMPLE);
        let in_sample = match (wakes_up, is_long) {
            (true, true) => in_use,
            (true, false) => in_use.min(IN_USE_FOR_SHORT),
            (false, _) => SATURATED,
        };
        let average = |before: Millionths, cpu_time: Duration| {
            let now = share(cpu_time, sample.period);
            (averaged(before, now, sample.period), now)
        };
        let (total, total_now) = average(self.total, sample.cpu_time);
        let (mut elsewhere, mut elsewhere_now) = (total, total_now);
        let (mut lent, mut runs_on, mut count) = (BTreeMap::new(), CpuSet::new(), 0);
        for LentCoreSample { core, cpu_time } in sample.lent {
            let Some(first) = core.first() else { continue };
            let before = self.lent.get(&first).copied().unwrap_or(0);
            let (core_average, now) = average(before, *cpu_time);
            let is_in_use_now = if wakes_up && !is_long { *cpu_time >= SETTLED } else { now >= in_sample };
            if core_average >= in_use || is_in_use_now {
                runs_on = runs_on.union(core);
                count += 1;
            }
            elsewhere = elsewhere.saturating_sub(core_average);
            elsewhere_now = elsewhere_now.saturating_sub(now);
            lent.insert(first, core_average);
        }
        let others_now = if sample.lent.is_empty() && !is_long {
            self.cores_in_short_samples(Span::of(sample), in_use)
        } else {
            self.recent.clear();
            cores_in_use(elsewhere_now, in_sample)
        };
        (self.total, self.lent) = (total, lent);
        self.quiet_for = if total_now < IDLE { self.quiet_for + sample.period } else { Duration::ZERO };
        let is_idle = self.total < IDLE || self.quiet_for >= QUIET_TIME;
        self.busy_for = if is_idle { Duration::ZERO } else { self.busy_for + sample.period };
        (count + cores_in_use(elsewhere, in_use).max(others_now), runs_on)
    }

    /// The number of cores that short samples of the CPU time of processes show, of an owner that wakes up: the last ones that cover
    /// [`RECENT_TIME`]. Several samples, because the CPU time of a running thread may be behind by a tick of the kernel. The
    /// times of lent cores that are measured one by one are exact.
    fn cores_in_short_samples(&mut self, sample: Span, in_use: Millionths) -> u32 {
        self.recent.push(sample);
        while self.recent[1..].iter().map(|span| span.period).sum::<Duration>() >= RECENT_TIME {
            self.recent.remove(0);
        }
        let all = self.recent.iter().fold(Span::default(), |all, span| all.joined(*span));
        all.cores_in_use(in_use.min(share(SETTLED, all.period)))
    }
}

/// Returns the number of cores that the threads of an owner (a job whose idle cores may be lent) want which wait for other
/// programs. Such a thread is hot and waits on a run queue for at least a tenth of the time. What a thread wants is the time
/// for which it runs or waits. All of them want at most the cores that their masks have: threads that are bound to one core wait
/// for one another there, and not for other programs. `threads` has the demand and the mask of each thread of the owner, as of
/// the last scan. `count_cores` counts the cores of the owner that have a PU of a set. `has_smt` says whether these cores have
/// more than one PU each.
///
/// The CPU time alone does not show this demand: beside one other program on its core, a thread that always wants to run
/// uses half of the core.
pub fn cores_wanted_by_waiting_threads<'a>(
    threads: impl Iterator<Item = (Demand, &'a CpuSet)>,
    count_cores: impl Fn(&CpuSet) -> u32,
    has_smt: bool,
) -> u32 {
    let is_waiting = |demand: &Demand| demand.is_hot && demand.waiting_permille >= MIN_WAITING_PERMILLE;
    let mut wanted: Millionths = 0;
    let mut within = CpuSet::new();
    for (demand, mask) in threads.filter(|(demand, _)| is_waiting(demand)) {
        wanted += u64::from(demand.permille) * ONE_CORE / 1000;
        within = within.union(mask);
    }
    let cores = cores_in_use(wanted, if has_smt { IN_USE_WITH_SEVERAL_PUS } else { IN_USE_WITH_ONE_PU });
    if cores == 0 { 0 } else { cores.min(count_cores(&within)) }
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
        let lent = lent
            .iter()
            .map(|(core, percent)| LentCoreSample { core: core.parse().unwrap(), cpu_time: time(*percent) });
        let lent: Vec<LentCoreSample> = lent.collect();
        core_use.add(&OwnerCpuSample { period, cpu_time: time(total_percent), lent: &lent, has_smt })
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
        let runs_on = |us: u64| {
            let lent = [LentCoreSample { core: set("0"), cpu_time: Duration::from_micros(us) }];
            let cpu_time = lent[0].cpu_time;
            CoreUse::default()
                .add(&OwnerCpuSample { period: 2 * MS, cpu_time, lent: &lent, has_smt: false })
                .1
        };
        assert_eq!(runs_on(1400), set("0"));
        assert_eq!(runs_on(1200), set(""));
    }

    #[test]
    fn the_fluctuations_of_an_owner_that_is_not_idle_do_not_count() {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, 140, &[("0", 70), ("1", 70)], false);
        assert_eq!(sample(&mut core_use, 2 * MS, 200, &[("0", 100), ("1", 100)], false).0, 0);
        assert_eq!(sample(&mut core_use, 10 * MS, 196, &[("0", 98), ("1", 98)], false).0, 0);
        assert_eq!(sample(&mut core_use, 10 * MS, 200, &[("0", 100), ("1", 100)], false).0, 2);
    }

    /// Adds samples of 2 ms, each with the CPU time in µs that the kernel shows. Returns the numbers of cores in use.
    fn short(core_use: &mut CoreUse, shown_us: &[u64]) -> Vec<u32> {
        let add = |us: &u64| {
            let cpu_time = Duration::from_micros(*us);
            core_use.add(&OwnerCpuSample { period: 2 * MS, cpu_time, lent: &[], has_smt: false }).0
        };
        shown_us.iter().map(add).collect()
    }

    #[test]
    fn an_owner_that_wakes_up_is_heard_in_three_short_samples_although_its_cpu_time_is_behind_by_a_tick() {
        assert_eq!(short(&mut CoreUse::default(), &[0, 0, 1000, 0, 4000]), [0, 0, 0, 0, 1]);
        assert_eq!(short(&mut CoreUse::default(), &[0, 0, 900, 500]), [0, 0, 0, 1]);
        assert_eq!(
            short(&mut CoreUse::default(), &[0, 0, 4000, 12_000, 8000]),
            [0, 0, 1, 3, 4],
            "four threads"
        );
    }

    #[test]
    fn samples_of_1_ms_are_judged_together_as_long_as_a_tick_of_the_kernel_lasts() {
        let one_ms = |core_use: &mut CoreUse, us: u64| {
            let cpu_time = Duration::from_micros(us);
            core_use.add(&OwnerCpuSample { period: MS, cpu_time, lent: &[], has_smt: false }).0
        };
        let mut core_use = CoreUse::default();
        short(&mut core_use, &[0, 0, 900]);
        let shown: Vec<u32> = [0, 0, 500].map(|us| one_ms(&mut core_use, us)).to_vec();
        assert_eq!(shown, [0, 0, 1], "0.9 ms, and 0.5 ms at the next tick");
        let mut core_use = CoreUse::default();
        short(&mut core_use, &[0, 0, 900]);
        let shown: Vec<u32> = [0, 0, 0, 0, 0, 500].map(|us| one_ms(&mut core_use, us)).to_vec();
        assert_eq!(shown, [0; 6], "the first work is over for longer than a tick");
    }

    #[test]
    fn a_busy_owner_that_was_quiet_for_50_ms_is_heard_as_an_idle_one() {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, 60, &[], false);
        short(&mut core_use, &[0; 20]);
        assert_eq!(short(&mut core_use.clone(), &[2000, 2000]), [0, 0], "quiet for 40 ms");
        short(&mut core_use, &[0; 5]);
        assert_eq!(short(&mut core_use, &[2000]), [1]);
    }

    #[test]
    fn work_that_is_over_before_three_short_samples_end_does_not_count() {
        assert_eq!(short(&mut CoreUse::default(), &[0, 0, 1200, 0, 0, 1200, 0]), [0; 7]);
    }

    #[test]
    fn an_owner_that_works_for_long_saturates_another_core_in_all_short_samples_of_10_ms() {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, 140, &[], false);
        assert_eq!(short(&mut core_use, &[4000, 4000, 0, 4000, 4000]), [1; 5]);
        assert_eq!(short(&mut core_use, &[4000, 4000, 4000, 4000, 4000]), [1, 1, 1, 1, 2]);
    }

    #[test]
    fn short_samples_of_an_owner_that_works_for_long_change_nothing_until_they_cover_10_ms() {
        let all = [("0", 100), ("1", 100)];
        let mut core_use = CoreUse::default();
        for _ in 0..3 {
            assert_eq!(sample(&mut core_use, 10 * MS, 200, &all, false), (2, set("0-1")), "it wakes up");
        }
        for _ in 0..10 {
            // Another owner was reported.
            assert_eq!(sample(&mut core_use, 2 * MS, 200, &all, false), (2, set("0-1")));
        }
        let idle = [("0", 0), ("1", 0)];
        let used: Vec<u32> = (0..6).map(|_| sample(&mut core_use, 2 * MS, 0, &idle, false).0).collect();
        assert_eq!(used, [2, 2, 2, 2, 0, 0]);
    }

    #[test]
    fn hot_threads_that_wait_for_other_programs_want_their_cores_whatever_they_get() {
        let demand = |permille: u32, waiting_permille: u32| {
            let mut demand = Demand::default();
            (demand.permille, demand.waiting_permille, demand.is_hot) =
                (permille, waiting_permille, permille >= 600);
            demand
        };
        let wanted_on = |cores: u32, demands: &[(u32, u32)], has_smt| {
            let mask = set("0-7");
            let threads = demands.iter().map(|&(all, waits)| (demand(all, waits), &mask));
            cores_wanted_by_waiting_threads(threads, |_| cores, has_smt)
        };
        let wanted = |demands: &[(u32, u32)], has_smt| wanted_on(8, demands, has_smt);
        assert_eq!(
            wanted_on(1, &[(1000, 750); 4], false),
            1,
            "they are bound to one core and wait for one another"
        );
        assert_eq!(wanted(&[(1000, 500)], false), 1, "it shares its core with another program");
        assert_eq!(wanted(&[(1000, 500), (950, 300), (300, 290)], false), 2, "the third thread is not hot");
        assert_eq!(wanted(&[(1000, 50)], false), 0, "its CPU time shows its demand");
        assert_eq!(wanted(&[(700, 200)], false), 0, "it leaves gaps");
        assert_eq!(
            wanted(&[(700, 200)], true),
            1,
            "a borrower on the other PU of the core would slow it down"
        );
        assert_eq!(wanted(&[], true), 0);
    }

    #[test]
    fn a_sample_without_length_counts_nothing() {
        let mut core_use = CoreUse::default();
        assert_eq!(sample(&mut core_use, Duration::ZERO, 100, &[("0", 100)], false), (0, set("")));
    }
}
