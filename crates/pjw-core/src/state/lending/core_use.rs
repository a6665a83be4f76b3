//! How many of its cores an owner uses, from samples of its CPU time.
//!
//! A core is *in use* if the owner runs on it for most of the time. On a core with one PU this is nine tenths: in the
//! gaps the borrower runs at idle priority, and the owner does not wait for it. On a core with several PUs it is one
//! tenth: a borrower on one PU slows down the owner on the other.
//!
//! A core with one PU is *too busy to be lent* from three quarters of the time on. So a use that varies around nine
//! tenths does not move a core back and forth.

use core::time::Duration;

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::state::demand::ThreadDemand;

/// The time over which the use is averaged.
const AVERAGING_TIME: Duration = Duration::from_millis(100);
/// The minimum length of a long sample. In a shorter sample, the owner may have run by chance only.
const LONG_SAMPLE: Duration = Duration::from_millis(10);
/// An owner that used less than [`IDLE`] for this time is idle, even if the average over [`AVERAGING_TIME`] is
/// higher.
const QUIET_TIME: Duration = Duration::from_millis(50);
/// For this time after an idle owner has begun to work, short samples count: several of its threads may wake up one
/// after the other.
const WAKE_UP_TIME: Duration = Duration::from_millis(20);

/// The time of the short samples that are judged together. The kernel's figures may be behind by one timer tick,
/// which is mostly 4 ms.
const RECENT_TIME: Duration = Duration::from_millis(5);

/// A use of cores. 1,000,000 is one core that is used all the time.
type Millionths = u64;

const ONE_CORE: Millionths = 1_000_000;
/// An owner that uses less than this in total is idle.
const IDLE: Millionths = ONE_CORE / 10;
/// A core with one PU is in use if the owner uses this part of it.
const IN_USE_WITH_ONE_PU: Millionths = ONE_CORE * 9 / 10;
/// A core with several PUs is in use if the owner uses this part of it.
const IN_USE_WITH_SEVERAL_PUS: Millionths = ONE_CORE / 10;
/// A core with one PU is too busy to be lent if the owner uses this part of it.
const TOO_BUSY_WITH_ONE_PU: Millionths = ONE_CORE * 3 / 4;
/// An owner that wakes up uses a lent core if it has run there for this time in a sample of 2 ms. The kernel may give
/// the borrower its turn after a slice of the owner: 1.4 ms on 2 or 3 CPUs, more on others (`base_slice_ns`,
/// kernel/sched/fair.c).
const WAKE_UP_RUN_TIME: Duration = Duration::from_micros(1300);
/// An owner that wakes up uses one of its other cores if a short sample shows this part of the core.
const IN_USE_IN_SHORT_SAMPLE: Millionths = ONE_CORE * 3 / 4;
/// A core is in use if a long sample shows this part of it, whatever the average is.
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
/// - Threads at idle priority (`cpu.idle` or `SCHED_IDLE`). All threads of borrowers (jobs that borrow cores) have idle
///   priority.
/// - Threads that the kernel may run on more PUs (logical CPUs) than the owner holds. pjw assumes that such a thread
///   belongs to another program. This does not apply to io_uring workers: they always count, because the kernel may
///   give an io_uring worker of the owner a mask of all PUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LentCoreSample {
    /// The PUs of the core.
    pub core: CpuSet,
    /// The time for which the use of the core was measured: since the previous sample, or since the core was lent if
    /// that was later.
    pub period: Duration,
    /// The CPU time that threads of the owner used on these PUs in `period`.
    pub cpu_time: Duration,
}

/// The use of cores by an owner (a job whose idle cores may be lent): how many of its cores are in use, how many are
/// too busy to be lent, and which lent cores are in use. [`CoreUse::add`] returns this result, and says when a core is
/// in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsedCores {
    /// The number of cores in use. pjw takes a lent core that is in use back from the borrower.
    pub in_use: u32,
    /// The number of cores that are too busy to be lent. All cores in use count. If the cores have one PU each, a core
    /// also counts if the owner runs on it for at least three quarters of the time. Such a core stays lent if it is
    /// lent already and not in use.
    pub too_busy_to_lend: u32,
    /// The PUs (logical CPUs) of those lent cores that are in use.
    pub lent_cpus: CpuSet,
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
    /// The short samples since the last judged sample, if the owner is not waking up. They are judged together when
    /// they cover 10 ms.
    unjudged: UnjudgedSamples,
    /// The result of the last sample that was judged.
    verdict: UsedCores,
}

/// Short samples that are added up until they are long enough to be judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct UnjudgedSamples {
    /// The samples of all cores together.
    span: Span,
    /// The samples of each lent core. The key is the first PU of the core.
    lent: BTreeMap<Pu, Span>,
}

impl UnjudgedSamples {
    fn add(&mut self, sample: &OwnerCpuSample<'_>) {
        self.span = self.span.joined(Span::of(sample));
        for LentCoreSample { core, period, cpu_time } in sample.lent {
            if let Some(first) = core.first() {
                let earlier = self.lent.entry(first).or_default();
                *earlier = earlier.joined(Span { period: *period, cpu_time: *cpu_time });
            }
        }
    }

    /// Returns the samples of the lent core `core`, joined to one. The result has length 0 if there are none, because
    /// the core was just lent.
    fn sample_of_core(&self, core: &CpuSet) -> LentCoreSample {
        let joined = core.first().and_then(|first| self.lent.get(&first).copied());
        let Span { period, cpu_time } = joined.unwrap_or_default();
        LentCoreSample { core: core.clone(), period, cpu_time }
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

    fn cores_in_use(self, in_use_share: Millionths) -> u32 {
        cores_in_use(share(self.cpu_time, self.period), in_use_share)
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

    /// Adds a measurement of the CPU time of the owner (a job whose idle cores may be lent) to the moving averages.
    /// Returns which cores the owner uses now.
    ///
    /// A lent core is in use if the average share of time for which the owner ran on it is high enough: nine tenths, or
    /// one tenth if the cores have several PUs (logical CPUs) each. A core also counts at once, without the average, if
    /// the owner has just woken up and works on the core, or has run on it for nearly all of the last 10 ms.
    ///
    /// For the cores that are not lent, only their total CPU time is measured. The result assumes that the owner uses
    /// as few of these cores as possible.
    ///
    /// While the owner is busy, measurements of less than 10 ms are joined until they cover 10 ms. Until then, the
    /// function returns its previous result.
    pub fn add(&mut self, sample: &OwnerCpuSample<'_>) -> UsedCores {
        // Just after the owner woke up, 1.3 ms of work in a short sample are enough (`judge_sample`).
        let is_short = self.busy_for > WAKE_UP_TIME && sample.period < LONG_SAMPLE;
        if is_short {
            self.unjudged.add(sample);
            if self.unjudged.span.period < LONG_SAMPLE {
                return self.verdict.clone();
            }
        }
        let unjudged = core::mem::take(&mut self.unjudged);
        if !unjudged.span.period.is_zero() {
            let lent = sample.lent.iter().map(|now| unjudged.sample_of_core(&now.core));
            let lent: Vec<LentCoreSample> = lent.collect();
            let Span { period, cpu_time } = unjudged.span;
            self.verdict = self.judge_sample(&OwnerCpuSample { period, cpu_time, lent: &lent, ..*sample });
        }
        if !is_short {
            // A long sample is judged by itself. The short samples before it count only in the averages.
            self.verdict = self.judge_sample(sample);
        }
        self.verdict.clone()
    }

    /// Returns the result of [`CoreUse::add`] for one sample, or for several that were joined. In the following, the
    /// minimum share is nine tenths of the time, or one tenth if the owner's cores have several PUs each. The owner is
    /// waking up if it was idle ([`CoreUse::is_idle`]) at most 20 ms ago. The owner uses a lent core
    /// ([`OwnerCpuSample::lent`]) in each of these cases:
    ///
    /// - Averaged over about 100 ms, the owner ran on the core for at least the minimum share.
    /// - The core was measured for at least 10 ms, and the owner ran there for at least 99 % of this time.
    /// - The core was measured for at least 10 ms, the owner is waking up, and it ran there for at least the minimum
    ///   share of this time.
    /// - The core was measured for less than 10 ms, the owner is waking up, and it ran there for at least 1.3 ms. If
    ///   `sample` covers at least 10 ms (the core was just lent), the owner must also have run there for three quarters
    ///   of the measured time, or for the minimum share if that is smaller.
    ///
    /// The CPU time on all other cores counts as if the owner used as few cores as possible. The last of these cores
    /// counts in the first three cases, for the time of `sample`. It also counts if the owner is waking up, `sample`
    /// covers less than 10 ms, and the owner ran on this core for at least the smaller of two times:
    ///
    /// - If `sample` contains lent cores: three quarters of the time of `sample`, or the minimum share.
    /// - If `sample` contains no lent core: 1.3 ms, or the minimum share. Here the last measurements are added up until
    ///   they cover 5 ms, because the kernel may update the CPU time of a running thread only at each timer tick
    ///   (mostly every 4 ms).
    fn judge_sample(&mut self, sample: &OwnerCpuSample<'_>) -> UsedCores {
        let (in_use_share, too_busy_share) = if sample.has_smt {
            (IN_USE_WITH_SEVERAL_PUS, IN_USE_WITH_SEVERAL_PUS)
        } else {
            (IN_USE_WITH_ONE_PU, TOO_BUSY_WITH_ONE_PU)
        };
        // An owner that wakes up gets its cores after a short sample. Otherwise short samples fluctuate too much, and
        // are joined.
        let is_waking_up = self.busy_for <= WAKE_UP_TIME;
        let is_long = sample.period >= LONG_SAMPLE;
        let short_sample_share = in_use_share.min(IN_USE_IN_SHORT_SAMPLE);
        let long_sample_share = if is_waking_up { in_use_share } else { SATURATED };
        let sample_share = if is_waking_up && !is_long { short_sample_share } else { long_sample_share };
        let average = |before: Millionths, cpu_time: Duration| {
            let now = share(cpu_time, sample.period);
            (averaged(before, now, sample.period), now)
        };
        let (total, total_now) = average(self.total, sample.cpu_time);
        let (mut elsewhere, mut elsewhere_now) = (total, total_now);
        let (mut lent, mut lent_cpus) = (BTreeMap::new(), CpuSet::new());
        let (mut in_use_count, mut too_busy_count) = (0, 0);
        for LentCoreSample { core, period, cpu_time } in sample.lent {
            let Some(first) = core.first() else { continue };
            let before = self.lent.get(&first).copied().unwrap_or(0);
            let (core_average, now) = average(before, *cpu_time);
            // A core that was lent since the last sample was not measured for all of this one.
            let now_in_period = share(*cpu_time, *period);
            let is_in_use_now = if *period >= LONG_SAMPLE {
                now_in_period >= long_sample_share
            } else {
                // In a long sample, only a core that was just lent has a short period. Its owner did not begin to run
                // there just now.
                let is_lasting = !is_long || now_in_period >= short_sample_share;
                is_waking_up && *cpu_time >= WAKE_UP_RUN_TIME && is_lasting
            };
            let is_in_use = core_average >= in_use_share || is_in_use_now;
            if is_in_use {
                lent_cpus = lent_cpus.union(core);
            }
            in_use_count += u32::from(is_in_use);
            too_busy_count += u32::from(is_in_use || core_average >= too_busy_share);
            elsewhere = elsewhere.saturating_sub(core_average);
            elsewhere_now = elsewhere_now.saturating_sub(now);
            lent.insert(first, core_average);
        }
        let others_now = if sample.lent.is_empty() && !is_long {
            self.cores_in_short_samples(Span::of(sample), in_use_share)
        } else {
            self.recent.clear();
            cores_in_use(elsewhere_now, sample_share)
        };
        (self.total, self.lent) = (total, lent);
        self.quiet_for = if total_now < IDLE { self.quiet_for + sample.period } else { Duration::ZERO };
        let is_idle = self.total < IDLE || self.quiet_for >= QUIET_TIME;
        self.busy_for = if is_idle { Duration::ZERO } else { self.busy_for + sample.period };
        UsedCores {
            in_use: in_use_count + cores_in_use(elsewhere, in_use_share).max(others_now),
            too_busy_to_lend: too_busy_count + cores_in_use(elsewhere, too_busy_share).max(others_now),
            lent_cpus,
        }
    }

    /// Returns the number of cores that the owner used according to the last short samples, including `sample`. Uses
    /// as many samples as cover [`RECENT_TIME`], because the kernel may update the CPU time of a running thread only
    /// at each timer tick. A core counts as used if the owner ran on it for the part `in_use_share` of this time, or
    /// for [`WAKE_UP_RUN_TIME`]. Called if no core is lent: the CPU times of lent cores are exact.
    fn cores_in_short_samples(&mut self, sample: Span, in_use_share: Millionths) -> u32 {
        self.recent.push(sample);
        while self.recent[1..].iter().map(|span| span.period).sum::<Duration>() >= RECENT_TIME {
            self.recent.remove(0);
        }
        let all = self.recent.iter().fold(Span::default(), |all, span| all.joined(*span));
        if all.period.is_zero() {
            return 0;
        }
        all.cores_in_use(in_use_share.min(share(WAKE_UP_RUN_TIME, all.period)))
    }
}

/// Returns the number of cores that the waiting threads of an owner (a job whose idle cores may be lent) need. A
/// waiting thread runs or waits for a PU (logical CPU) most of the time ([`ThreadDemand::is_hot`]), and waits for at
/// least a tenth of the time. Such a thread needs a PU for all the time in which it runs or waits. These times of all
/// waiting threads are added up, and rounded to a number of cores. Returns 0 if there is no waiting thread.
///
/// - `threads` has the demand and the affinity mask of each thread of the owner, as of the last scan.
/// - `count_cores` returns how many cores of the owner have at least one PU in a given set. The function passes all PUs
///   in the masks of the waiting threads. The waiting threads cannot need more cores than `count_cores` returns,
///   because they cannot run on other PUs.
/// - `has_smt` says whether the cores of the owner have more than one PU each. If true, a fraction of a core is rounded
///   up if it is at least one tenth of a core. If false, a fraction is rounded up if it is at least nine tenths of a
///   core. A smaller fraction is dropped.
pub fn cores_wanted_by_waiting_threads<'a>(
    threads: impl Iterator<Item = (ThreadDemand, &'a CpuSet)>,
    count_cores: impl Fn(&CpuSet) -> u32,
    has_smt: bool,
) -> u32 {
    let is_waiting = |demand: &ThreadDemand| demand.is_hot && demand.waiting_permille >= MIN_WAITING_PERMILLE;
    let mut wanted: Millionths = 0;
    let mut within = CpuSet::new();
    for (demand, mask) in threads.filter(|(demand, _)| is_waiting(demand)) {
        wanted += u64::from(demand.permille) * ONE_CORE / 1000;
        within = within.union(mask);
    }
    let cores = cores_in_use(wanted, if has_smt { IN_USE_WITH_SEVERAL_PUS } else { IN_USE_WITH_ONE_PU });
    if cores == 0 { 0 } else { cores.min(count_cores(&within)) }
}

/// Returns the number of cores in use, if the use `used` is on as few cores as possible. A core is in use if at least
/// the part `in_use_share` of it is used.
fn cores_in_use(used: Millionths, in_use_share: Millionths) -> u32 {
    u32::try_from((used + (ONE_CORE - in_use_share)) / ONE_CORE).unwrap_or(u32::MAX)
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
mod tests;
