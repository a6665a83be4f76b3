//! What a job used: CPU time, cores over time, waiting, and the phases in which it used its cores badly.
//!
//! [`JobUsage`] is added up from samples while the job runs. [`JobReport`] is the report on the job after its end. The
//! verdict on a report is in [`crate::diagnosis::verdict`].

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, Nanos, Uid, UnixMillis, prelude::*};
use crate::terms::job::JobId;

mod histogram;

pub use histogram::TimeHistogram;

/// The minimum length, in ns, of a serial phase that the report on a job counts: 10 s. In a serial phase, a job
/// with two or more cores runs only one thread. A shorter phase may be the start or the end of a parallel
/// phase.
pub const MIN_SERIAL_PHASE_NS: u64 = 10_000_000_000;
/// The largest number of steps to which a report rounds the numbers of PUs that the job used.
const MAX_LEVEL_STEPS: u64 = 16;
/// If runnable threads wait for at least this share of a job's cores while these idle, in permille, the job is slowed
/// down.
const STRANDED_PERMILLE: u64 = 100;

/// The largest share of a sample ([`UsageSample`]) that the scan at its end may take: one part in this number, which
/// is 5 %. A sample ends at the time at which the scan began, and the CPU times are read at the end of the scan. If the
/// scan takes longer, for example because the machine stands still, the sample has too much CPU time, and the next
/// sample too little.
const MAX_SCAN_SHARE: u64 = 20;

/// Returns whether a scan is short enough to end a sample ([`UsageSample`]). In a sample that ends with a long scan,
/// the CPU time is inexact. So the scan may take at most 5 % of the length of the sample.
///
/// - `scan_ns` is the time from the beginning of the scan until all CPU times were read, in ns.
/// - `sample_ns` is the length of the sample, in ns.
#[must_use]
pub fn is_short_scan(scan_ns: u64, sample_ns: u64) -> bool {
    scan_ns <= sample_ns / MAX_SCAN_SHARE
}

/// The use that a job made of its cores in one interval between two scans of its processes: the CPU time, the time for
/// which threads waited for a PU (logical CPU), and the number of hot threads. A hot thread runs or waits for a PU most
/// of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UsageSample {
    /// The length of the interval, in ns.
    pub length_ns: u64,
    /// The CPU time that all processes of the job used in the interval, in ns.
    pub cpu_ns: u64,
    /// The time for which runnable threads of the job waited for a PU, summed over the threads, in ns.
    pub wait_ns: u64,
    /// The number of cores that the job held last, in the interval or before it. 0 if it never held any.
    pub cores: u32,
    /// The number of online PUs (logical CPUs) that the job held last, in the interval or before it. 0 if it never held
    /// any.
    pub pus: u32,
    /// The core time that the job held in the interval, in ns: the sum, over its cores, of the time for which the job
    /// held the core.
    pub held_ns: u64,
    /// The part of the interval in which the job held no PU, in ns.
    pub without_pus_ns: u64,
    /// The number of hot threads at the end of the interval. A hot thread runs or waits for a PU most of the time.
    pub hot_threads: u32,
    /// Whether a hot thread waited for a PU because its program had bound too many hot threads to the same PUs
    /// (sched_setaffinity(2)). Too many means that more hot threads of the job are bound to PUs of the thread's
    /// affinity mask than the mask has PUs.
    pub has_bound_waiters: bool,
}

/// The shared part of a job's memory, for the report on the job: the pages that several processes map, such as
/// pages inherited by fork(2). If pjw read the pages of the processes, the shared part is exact: the sum of the
/// resident set sizes minus the sum of the unique set sizes. Otherwise, pjw estimates the shared part from two
/// counters of anonymous memory. The counter of the job's cgroup counts a shared page once. The sum over the
/// processes counts the page once for each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// The shared part in permille: of the sum of the resident set sizes, or, in an estimate, of the anonymous memory.
    pub permille: u32,
    /// Whether `permille` is an estimate from the counters of the job's cgroup. If false, `permille` was read from the
    /// pages of the processes.
    pub is_estimate: bool,
}

/// The memory use of a job at one measurement: the shared part of the memory, the sum of the proportional set sizes
/// (PSS), the sum of the resident set sizes (RSS), and the peak memory use up to then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryReading {
    /// The shared part of the job's memory. `None` if this measurement does not include it.
    pub shared: Option<SharedMemory>,
    /// The sum of the proportional set sizes (PSS in `/proc/PID/smaps_rollup`) of the job's processes, in bytes. `None`
    /// if their pages were not read.
    pub pss: Option<u64>,
    /// The sum of the resident set sizes of the job's address spaces, in bytes. A page counts once for each address
    /// space that maps the page. `None` if the measurement has the shared part of the memory (`shared`), which is a
    /// better figure.
    pub rss: Option<u64>,
    /// The largest memory use of the job's cgroup up to now, in bytes. `None` if unknown.
    pub peak: Option<u64>,
}

/// How a job used its cores, from the beginning of the job to the last scan of its processes. Most values are
/// sums over many intervals ([`UsageSample`]). pjw writes the values to the journal, so that a restarted daemon
/// can continue the sums.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobUsage {
    /// The time at which the job began, in ns since boot.
    pub began_at: Nanos,
    /// The end of the last sample ([`UsageSample`]), in ns since boot. The other values are complete up to this time.
    /// Set only in the journal (the file from which a restarted daemon restores its state). 0 if there is no sample.
    pub read_until: Nanos,
    /// The CPU time of all processes of the job, including ended processes, in ns.
    pub cpu_ns: u64,
    /// The part of `cpu_ns` that a restarted daemon cannot read again, because the processes have ended, in ns.
    pub ended_cpu_ns: u64,
    /// The total length of all samples ([`UsageSample`]), in ns. Less than the run time of the job if samples are
    /// missing. Includes `without_pus_ns`, which most of the other values leave out.
    pub sampled_ns: u64,
    /// The core time that the job held, in ns: the sum, over its cores, of the time for which the job held the core.
    pub held_ns: u64,
    /// The time for which runnable threads waited for a PU while PUs of their own job idled, summed over the threads,
    /// in ns.
    pub stranded_ns: u64,
    /// The total length of the serial phases, in ns. In a serial phase, a job with two or more cores runs only one
    /// thread for at least 10 s ([`MIN_SERIAL_PHASE_NS`]).
    pub serial_ns: u64,
    /// The length of the serial phase that has not ended yet, in ns.
    pub open_serial_ns: u64,
    /// The number of serial phases.
    pub serial_phases: u32,
    /// The length of the longest serial phase, in ns.
    pub serial_longest_ns: u64,
    /// The time in which the job held PUs but hardly used them, in ns: the job had no hot thread, and used less than
    /// half a PU. A hot thread runs or waits for a PU most of the time.
    pub asleep_ns: u64,
    /// The time in which the job held no PU, in ns, for example because it waited for cores or was frozen.
    pub without_pus_ns: u64,
    /// The CPU time of the job in the time `without_pus_ns`, in ns. The processes of a job that waits for cores may run
    /// on cores that the job does not hold.
    pub without_pus_cpu_ns: u64,
    /// The time in which the job had clearly more runnable threads than PUs, in ns.
    pub crowded_ns: u64,
    /// The CPU time of the job in the time `crowded_ns`, plus the time for which its threads waited for a PU, in ns.
    pub crowded_wanted_ns: u64,
    /// The histogram of the number of hot threads in the part of `crowded_ns` in which the job had more hot threads
    /// than PUs: for each number, the total time. In the rest of `crowded_ns`, the job had many runnable threads of
    /// processes that ended too early to have hot threads.
    pub crowded_threads: TimeHistogram,
    /// The time in which runnable threads waited although PUs of the job were idle, in ns. The cause was a binding: the
    /// program had bound hot threads to some PUs, and there were more of these threads than of these PUs.
    pub bound_ns: u64,
    /// The time in which runnable threads waited although the job did not use all of its PUs, in ns. The program had
    /// not bound too many threads to the same PUs, so other programs ran on the PUs. The time in `crowded_ns` is not
    /// included.
    pub displaced_ns: u64,
    /// The largest number of hot threads in one sample.
    pub threads_max: u32,
    /// The sum of the times of all hot threads, in ns. An interval with n hot threads counts n times.
    pub threads_ns: u64,
    /// The largest number of cores that the job held in one sample.
    pub cores_max: u32,
    /// The number of PUs that the job held in the first sample with `cores_max` cores.
    pub pus_max: u32,
    /// The number of events of the kind `repaired` about the job. For example, another program had changed an affinity
    /// mask of the job, and pjw restored the mask.
    pub repairs: u32,
    /// The number of events `violation` of the job: attempts to leave its cores.
    pub violations: u32,
    /// The largest memory use of the job's cgroup, in bytes. `None` if the job has no cgroup with a memory counter.
    pub memory_peak: Option<u64>,
    /// The limit of the memory use of the job's cgroup, as read last, in bytes. `None` if the job has no cgroup with a
    /// limit.
    pub memory_limit: Option<u64>,
    /// The largest sum of the proportional set sizes (PSS) of the job's processes in one measurement, in bytes. `None`
    /// if the pages of the processes were never read.
    pub largest_pss: Option<u64>,
    /// The largest sum of the resident set sizes of the job's address spaces in one measurement, in bytes
    /// ([`MemoryReading::rss`]). `None` if no measurement has this sum.
    pub largest_rss: Option<u64>,
    /// The shared part of the job's memory. The value is the last exact one, which pjw read from the pages of the
    /// processes. If there is no exact value, it is the last estimate. `None` if pjw never measured the shared part.
    pub shared: Option<SharedMemory>,
    /// The number of tasks (processes that the scheduler starts) of the job on this machine, as its scheduler says.
    /// `None` if that is unknown.
    pub tasks: Option<u32>,
    /// The histogram of the number of PUs that the job used, in permille of one PU: for each number, the total time.
    pub levels: TimeHistogram,
}

impl JobUsage {
    /// Makes the usage of a job that has no samples yet: all sums are 0. `began_at` is the time at which the job
    /// begins, in ns since boot.
    #[must_use]
    pub fn new(began_at: Nanos) -> Self {
        Self { began_at, ..Self::default() }
    }

    /// Adds `sample` (the use of the job's cores in one interval) to the sums. A sample of length 0 changes
    /// nothing. The field `cpu_ns` does not change: the caller itself adds CPU time to this field whenever the
    /// CPU time of a process is read.
    ///
    /// If the job held PUs (logical CPUs) in only a part of the interval, the CPU time and the wait time in this part
    /// are not known. They are estimated: if the part is a third of the interval, the estimate is a third of the CPU
    /// time and a third of the wait time of the interval.
    pub fn add_sample(&mut self, sample: &UsageSample) {
        let length_ns = sample.length_ns;
        let without_ns = if sample.pus == 0 { length_ns } else { sample.without_pus_ns.min(length_ns) };
        let with_ns = length_ns - without_ns;
        let part_with_pus = |ns: u64| {
            let part = u128::from(ns) * u128::from(with_ns) / u128::from(length_ns.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let (cpu_ns, wait_ns) = (part_with_pus(sample.cpu_ns), part_with_pus(sample.wait_ns));
        if without_ns > 0 {
            self.sampled_ns += without_ns;
            self.without_pus_ns += without_ns;
            self.without_pus_cpu_ns += sample.cpu_ns - cpu_ns;
            self.threads_max = self.threads_max.max(sample.hot_threads);
            self.end_serial_phase();
        }
        if with_ns > 0 {
            self.add_time_with_pus(&UsageSample { length_ns: with_ns, cpu_ns, wait_ns, ..*sample });
        }
    }

    /// Adds `sample`, an interval in which the job always held PUs, to the sums.
    fn add_time_with_pus(&mut self, sample: &UsageSample) {
        let UsageSample { length_ns, wait_ns, cores, pus, hot_threads, .. } = *sample;
        let capacity_ns = u64::from(pus).saturating_mul(length_ns);
        // CPU time of an ended process may be read after the interval in which the process used it.
        let cpu_ns = sample.cpu_ns.min(capacity_ns);
        let used_permille = permille(cpu_ns, length_ns);
        self.sampled_ns += length_ns;
        self.held_ns = self.held_ns.saturating_add(sample.held_ns);
        self.threads_ns = self.threads_ns.saturating_add(u64::from(hot_threads).saturating_mul(length_ns));
        self.levels.add(used_permille, length_ns);
        self.threads_max = self.threads_max.max(hot_threads);
        if cores > self.cores_max {
            (self.cores_max, self.pus_max) = (cores, pus);
        }
        let stranded_ns = wait_ns.min(capacity_ns - cpu_ns);
        self.stranded_ns += stranded_ns;
        let is_slowed = permille(stranded_ns, length_ns) >= u64::from(cores) * STRANDED_PERMILLE;
        let is_crowded = is_crowded(sample, cpu_ns, is_slowed);
        if is_crowded {
            self.crowded_ns += length_ns;
            self.crowded_wanted_ns = self.crowded_wanted_ns.saturating_add(cpu_ns).saturating_add(wait_ns);
        }
        if is_crowded && hot_threads > pus {
            self.crowded_threads.add(u64::from(hot_threads), length_ns);
        }
        if is_slowed && sample.has_bound_waiters {
            self.bound_ns += length_ns;
        } else if is_slowed && !is_crowded {
            self.displaced_ns += length_ns;
        }
        if hot_threads == 0 && used_permille < 500 {
            self.asleep_ns += length_ns;
        }
        if cores >= 2 && hot_threads <= 1 && (500..1500).contains(&used_permille) {
            self.open_serial_ns += length_ns;
        } else {
            self.end_serial_phase();
        }
    }

    /// Returns the total length of the samples ([`UsageSample`]) in which the job held PUs, in ns.
    #[must_use]
    pub fn sampled_with_pus_ns(&self) -> u64 {
        self.sampled_ns.saturating_sub(self.without_pus_ns)
    }

    /// Ends the present serial phase of the job, if there is one. In a serial phase, a job with two or more cores
    /// runs only one thread. If the phase lasted at least 10 s ([`MIN_SERIAL_PHASE_NS`]), its length is added to
    /// the field `serial_ns`. [`JobUsage::add_sample`] calls this method when a sample shows that the phase is
    /// over. The caller must also call this method at the end of the job, because a phase may last until then.
    pub fn end_serial_phase(&mut self) {
        let phase = core::mem::take(&mut self.open_serial_ns);
        if phase >= MIN_SERIAL_PHASE_NS {
            self.serial_ns += phase;
            self.serial_phases = self.serial_phases.saturating_add(1);
            self.serial_longest_ns = self.serial_longest_ns.max(phase);
        }
    }
}

/// Returns whether clearly more threads wanted to run than the job had PUs, in the time of `sample`. `cpu_ns` is the
/// CPU time in the sample, but at most the time that the PUs of the job can give. `is_slowed` says whether threads
/// waited beside idle PUs of the job. The job must have held PUs in this time.
fn is_crowded(sample: &UsageSample, cpu_ns: u64, is_slowed: bool) -> bool {
    let UsageSample { length_ns, wait_ns, pus, hot_threads, .. } = *sample;
    let capacity_ns = u64::from(pus).saturating_mul(length_ns);
    let wanted_ns = cpu_ns.saturating_add(wait_ns);
    let uses_most = cpu_ns / 3 >= capacity_ns / 4;
    if hot_threads > pus {
        // Such a job can have a serial part in each step, in which its PUs idle.
        let may_be_serial_part = is_slowed && !sample.has_bound_waiters;
        return wanted_ns / 5 >= capacity_ns / 4 && (uses_most || may_be_serial_part);
    }
    // With one hot thread for each PU, the hot threads wait for helper threads, and the job is not crowded. If fewer
    // threads are hot and so many wait, processes end before they are read often enough to be hot.
    hot_threads < pus && wanted_ns / 2 >= capacity_ns && uses_most
}

/// The report on a job that has ended: its id and owner, the PUs (logical CPUs) that it held, the times of its start
/// and end, and its use of CPU time and memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobReport {
    /// The id of the job, such as `slurm:7`.
    pub id: JobId,
    /// The user that owned the job.
    pub owner: Uid,
    /// The PUs that the job held last. Empty if the job never held a PU.
    pub cpus: CpuSet,
    /// Whether the job was a provision: cores that are promised to a service, which may be idle.
    pub is_provision: bool,
    /// Whether the job had no cores of its own, and borrowed some. Other programs may run on borrowed cores.
    pub is_borrower: bool,
    /// The UTC time at which pjw detected or created the job.
    pub started: UnixMillis,
    /// The UTC time at which the job ended or was released. If pjw noticed the end later, the time at which pjw noticed
    /// it.
    pub ended: UnixMillis,
    /// The time from the beginning to the end of the job, in ns. If the job ended while pjwd was not running, its end
    /// is unknown. The value is then the time from the beginning to the last measurement.
    pub wall_ns: u64,
    /// The CPU time, memory and cores that the job used.
    pub usage: JobUsage,
    /// One sentence with the reason why the values of this report are incomplete. `None` if all values are complete.
    pub incomplete_reason: Option<String>,
}

impl JobReport {
    /// Returns the time for which the job held PUs (logical CPUs), in ns: the time from its start to its end, except
    /// the time in which it waited for cores or was frozen.
    #[must_use]
    pub fn time_with_pus_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.usage.without_pus_ns)
    }

    /// Returns the mean number of PUs (logical CPUs) that the job used while it held PUs, in permille of one PU. The
    /// result is the CPU time that the job used while it held PUs, divided by [`JobReport::time_with_pus_ns`]. 0 if
    /// this time is 0, or if the job never held a PU.
    #[must_use]
    pub fn mean_used_pus_permille(&self) -> u64 {
        let usage = &self.usage;
        if usage.held_ns == 0 && usage.without_pus_ns > 0 {
            return 0;
        }
        permille(usage.cpu_ns.saturating_sub(usage.without_pus_cpu_ns), self.time_with_pus_ns())
    }

    /// Returns the mean number of cores that the job held while it held any, in permille of one core. Each
    /// [`UsageSample`] has the number of cores that the job held. So the mean is over the time that the samples cover
    /// ([`JobUsage::sampled_with_pus_ns`]), which can be shorter than the run of the job. 0 if there are no samples.
    #[must_use]
    pub fn mean_held_cores_permille(&self) -> u64 {
        permille(self.usage.held_ns, self.usage.sampled_with_pus_ns())
    }

    /// Returns the mean number of hot threads of the job while it held PUs, in permille of one thread, over the time
    /// that the samples cover. A hot thread runs or waits for a PU (logical CPU) most of the time. 0 if there are no
    /// samples.
    #[must_use]
    pub fn mean_hot_threads_permille(&self) -> u64 {
        permille(self.usage.threads_ns, self.usage.sampled_with_pus_ns())
    }

    /// Returns how long the job used each number of PUs (logical CPUs) while it held PUs: pairs of a number of PUs and
    /// a time in ns, sorted by the number of PUs. Each number is rounded to the nearest multiple of a step, but is at
    /// most the largest number of PUs that the job held. The step is 1/16 of this largest number, rounded up. So there
    /// are at most 18 pairs.
    #[must_use]
    pub fn time_by_used_pus(&self) -> Vec<(u64, u64)> {
        let step = u64::from(self.usage.pus_max).div_ceil(MAX_LEVEL_STEPS).max(1);
        self.usage.levels.time_by_pu_count(step, u64::from(self.usage.pus_max))
    }

    /// Returns the mean number of PUs (logical CPUs) that the job held, in permille of one PU. The result is the mean
    /// number of cores ([`JobReport::mean_held_cores_permille`]) times the number of PUs per core. The number of PUs
    /// per core is taken from the time when the job held the most cores. 0 if the job held no core.
    #[must_use]
    pub fn mean_held_pus_permille(&self) -> u64 {
        let (cores, pus) = (u64::from(self.usage.cores_max), u64::from(self.usage.pus_max));
        self.mean_held_cores_permille().saturating_mul(pus) / cores.max(1)
    }
}

/// Returns the ratio of `part` to `whole` in permille, rounded down. 0 if `whole` is 0.
pub(crate) fn permille(part: u64, whole: u64) -> u64 {
    let permille = u128::from(part) * 1000 / u128::from(whole.max(1));
    if whole == 0 { 0 } else { u64::try_from(permille).unwrap_or(u64::MAX) }
}

#[cfg(test)]
mod tests;
