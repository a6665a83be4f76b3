//! Whether the memory that the workers of a job have for themselves will still fit.
//!
//! Forked workers share the memory of their parent until they write to it. When all of them write, as at the end of a
//! farm, each gets a copy, and the memory of the machine or of the job's cgroup may run out.

use crate::basics::{Nanos, prelude::*};
use crate::diagnosis::words::{bytes_text, counted_noun};

/// How far ahead a lack of memory is predicted.
const HORIZON_SECONDS: u64 = 600;
/// Readings that are older than this say nothing about the present growth.
const MAX_AGE: Nanos = Nanos(600 * 1_000_000_000);
/// The time for which a prediction is made, as a multiple of the time that the readings cover. It is limited, because a
/// job also grows while it loads its data, and then stops growing.
const REACH: u64 = 10;
/// The smallest growth of all workers together between two readings that is more than noise, in bytes.
const MIN_GROWTH: u64 = 8 << 20;

/// One measurement of the workers of a job: their number, and the sum of their private memory in bytes. Private memory
/// is memory that no other address space maps (the unique set size, USS). A worker is a process that has at least a
/// quarter as much memory as the largest process of the job. Processes with a common address space count as one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerMemory {
    /// The time of the measurement, in ns since boot.
    pub at: Nanos,
    /// The number of workers.
    pub workers: u32,
    /// The sum of the private memory of all workers, in bytes.
    pub private_bytes: u64,
}

impl WorkerMemory {
    /// Makes a measurement from `unique_set_sizes`, the private memory of each address space of the job in
    /// bytes. `measured_at` is the time of the measurement, in ns since boot. An address space counts as a
    /// worker if its private memory is at least a quarter of the largest value. So a shell, a launcher, or a
    /// parent that shares its memory with forked workers does not count.
    #[must_use]
    pub fn from_unique_set_sizes(
        measured_at: Nanos,
        unique_set_sizes: impl IntoIterator<Item = u64>,
    ) -> Self {
        let sizes: Vec<u64> = unique_set_sizes.into_iter().collect();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let of_workers = sizes.iter().filter(|size| **size > 0 && **size >= largest / 4);
        let (workers, private_bytes) =
            of_workers.fold((0_u32, 0_u64), |(count, sum), size| (count + 1, sum.saturating_add(*size)));
        Self { at: measured_at, workers, private_bytes }
    }

    /// Estimates the private memory of the workers from memory counters of the kernel, without reading page tables.
    ///
    /// - `measured_at` is the time of the measurement, in ns since boot.
    /// - `charged_bytes` is the anonymous memory of the job's cgroup, in bytes. Each page counts once.
    /// - `anonymous_bytes` has the anonymous memory of each address space of the job, in bytes. A shared page counts in
    ///   each address space that maps the page.
    ///
    /// An address space counts as a worker if it has at least a quarter of the largest value in `anonymous_bytes`.
    /// Shared pages are part of this value. So a parent that shares its memory with forked workers also counts as a
    /// worker. The estimate assumes that each shared page is shared by all workers, as after fork(2).
    #[must_use]
    pub fn from_counters(measured_at: Nanos, charged_bytes: u64, anonymous_bytes: &[u64]) -> Self {
        let largest = anonymous_bytes.iter().copied().max().unwrap_or(0);
        let (mut workers, mut of_workers, mut of_others) = (0_u32, 0_u64, 0_u64);
        for &size in anonymous_bytes.iter().filter(|size| **size > 0) {
            if size >= largest / 4 {
                (workers, of_workers) = (workers + 1, of_workers.saturating_add(size));
            } else {
                of_others = of_others.saturating_add(size);
            }
        }
        let charged = charged_bytes.saturating_sub(of_others);
        // A page that all n workers map is charged once, and counted n times.
        let extra_counts = u64::from(workers.saturating_sub(1)).max(1);
        let shared = of_workers.saturating_sub(charged) / extra_counts;
        Self { at: measured_at, workers, private_bytes: charged.saturating_sub(shared) }
    }
}

/// A prediction that the workers of a job will use all available memory in less than ten minutes. Workers are the
/// processes of the job with much memory, unlike a shell or a launcher ([`WorkerMemory`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedMemoryShortage {
    /// The number of workers. Processes that share an address space count as one.
    pub workers: u32,
    /// The mean private memory of a worker now, in bytes.
    pub private_bytes_per_worker: u64,
    /// The growth of the private memory of each worker, in bytes per minute.
    pub growth_per_minute: u64,
    /// The memory that is still available to the job, in bytes.
    pub available_bytes: u64,
    /// The predicted time until no memory is available, in seconds.
    pub seconds_left: u64,
}

impl PredictedMemoryShortage {
    /// Returns the prediction as one sentence for users: the private memory that each worker has now and will
    /// need in ten minutes, its growth, and the time until no memory is left. Example: `8 workers x 1.2 GiB of
    /// their own will not fit: ...`.
    #[must_use]
    pub fn description(&self) -> String {
        let minutes = HORIZON_SECONDS / 60;
        let wanted =
            self.private_bytes_per_worker.saturating_add(self.growth_per_minute.saturating_mul(minutes));
        format!(
            "{} x {} of their own will not fit: they have {} each, grow by {} a minute each, and {} is left, which is \
             enough for {}",
            counted_noun(usize::try_from(self.workers).unwrap_or(usize::MAX), "worker"),
            bytes_text(wanted),
            bytes_text(self.private_bytes_per_worker),
            bytes_text(self.growth_per_minute),
            bytes_text(self.available_bytes),
            duration(self.seconds_left)
        )
    }

    /// Returns a text that says what the user can do against the predicted shortage, such as to start fewer
    /// workers.
    #[must_use]
    pub fn remedy() -> &'static str {
        "start fewer workers, fork them later, or ask for more memory"
    }
}

fn duration(seconds: u64) -> String {
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds / 60) }
}

/// Predicts whether the private memory of a job's workers will exceed the available memory in less than ten minutes.
/// Private memory is memory that no other address space maps. Workers are the processes of the job with much memory
/// ([`WorkerMemory`]). Returns `None` if no shortage is predicted.
///
/// - `measurements` has the measurements of the job, oldest first. The function uses the newest measurement, and the
///   measurements right before it that have the same number of workers and are at most ten minutes older.
/// - `available_bytes` is the memory that the job can still get, in bytes: the memory that is left on the machine or in
///   the cgroup of the job, whichever is less.
///
/// The predicted rate of growth is the mean rate over the used measurements. If the mean rate over the second half of
/// their time is lower, this lower rate is used instead. No shortage is predicted in each of these cases:
///
/// - The memory grew by less than 8 MiB in the time from which the rate was computed.
/// - At this rate, the available memory suffices for ten minutes or longer.
/// - At this rate, the available memory suffices for ten times the time between the oldest and the newest used
///   measurement, or longer. A job may grow only while it loads its data, so few measurements allow no long prediction.
#[must_use]
pub fn predict_memory_shortage(
    measurements: &[WorkerMemory],
    available_bytes: u64,
) -> Option<PredictedMemoryShortage> {
    let newest = measurements.last().filter(|newest| newest.workers > 0)?;
    let is_comparable = |reading: &&WorkerMemory| {
        reading.workers == newest.workers && newest.at.0.saturating_sub(reading.at.0) <= MAX_AGE.0
    };
    let comparable = measurements.iter().rev().take_while(is_comparable);
    let oldest = comparable.clone().last()?;
    let observed = newest.at.0.saturating_sub(oldest.at.0);
    // The newest reading of the first half.
    let middle = comparable
        .clone()
        .find(|reading| newest.at.0.saturating_sub(reading.at.0) >= observed.div_ceil(2))?;
    let (growth, time) = slower_growth(growth_since(oldest, newest), growth_since(middle, newest));
    if time == 0 || growth < MIN_GROWTH {
        return None;
    }
    let seconds_left = u128::from(available_bytes) * u128::from(time) / u128::from(growth) / 1_000_000_000;
    let reach = (observed / 1_000_000_000).saturating_mul(REACH).min(HORIZON_SECONDS);
    let seconds_left = u64::try_from(seconds_left).ok().filter(|seconds| *seconds < reach)?;
    let workers = u64::from(newest.workers);
    let per_minute = u128::from(growth) * 60_000_000_000 / u128::from(time) / u128::from(workers);
    Some(PredictedMemoryShortage {
        workers: newest.workers,
        private_bytes_per_worker: newest.private_bytes / workers,
        growth_per_minute: u64::try_from(per_minute).unwrap_or(u64::MAX),
        available_bytes,
        seconds_left,
    })
}

/// Returns by how many bytes the private memory grew from `earlier` to `newest`, and in how many nanoseconds.
fn growth_since(earlier: &WorkerMemory, newest: &WorkerMemory) -> (u64, u64) {
    (newest.private_bytes.saturating_sub(earlier.private_bytes), newest.at.0.saturating_sub(earlier.at.0))
}

/// Returns the growth with the smaller rate. A job that grew once and has stopped must not be taken for a growing one.
fn slower_growth(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    let is_slower = u128::from(other.0) * u128::from(one.1) < u128::from(one.0) * u128::from(other.1);
    if is_slower { other } else { one }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000_000;

    fn reading(seconds: u64, workers: u32, private_bytes: u64) -> WorkerMemory {
        WorkerMemory { at: Nanos(seconds * SECOND), workers, private_bytes }
    }

    #[test]
    fn workers_that_outgrow_the_memory_are_told_with_the_time_that_is_left() {
        let readings = [reading(0, 8, 4 * GIB), reading(60, 8, 5 * GIB)];
        let shortage = predict_memory_shortage(&readings, 2 * GIB).unwrap();
        assert_eq!(
            (shortage.workers, shortage.seconds_left, shortage.private_bytes_per_worker),
            (8, 120, 640 * MIB)
        );
        assert_eq!(
            shortage.description(),
            "8 workers x 1.8 GiB of their own will not fit: they have 640.0 MiB each, grow by 128.0 MiB a minute each, and \
             2.0 GiB is left, which is enough for 2 min"
        );
        assert_eq!(predict_memory_shortage(&readings, 0).unwrap().seconds_left, 0);
    }

    #[test]
    fn memory_that_fits_or_does_not_grow_is_no_warning() {
        let growing = [reading(0, 8, 4 * GIB), reading(60, 8, 5 * GIB)];
        assert_eq!(predict_memory_shortage(&growing, 11 * GIB), None, "enough for longer than ten minutes");
        for (case, readings) in [
            ("no reading", vec![]),
            ("one reading", vec![reading(0, 8, GIB)]),
            ("steady", vec![reading(0, 8, GIB), reading(60, 8, GIB)]),
            ("shrinking", vec![reading(0, 8, 2 * GIB), reading(60, 8, GIB)]),
            ("noise", vec![reading(0, 8, GIB), reading(60, 8, GIB + MIB)]),
            ("forked meanwhile", vec![reading(0, 1, GIB), reading(60, 8, 8 * GIB)]),
            ("grew long ago", vec![reading(0, 8, 0), reading(700, 8, 8 * GIB), reading(760, 8, 8 * GIB)]),
            ("no workers", vec![reading(0, 0, 0), reading(60, 0, 0)]),
            ("a clock that stands", vec![reading(5, 8, 0), reading(5, 8, GIB)]),
        ] {
            assert_eq!(predict_memory_shortage(&readings, MIB), None, "{case}");
        }
    }

    #[test]
    fn a_growth_that_has_stopped_is_no_warning() {
        let grown =
            |minutes: u64| (0..=minutes).map(|minute| reading(60 * minute, 8, minute.min(1) * 8 * GIB));
        let flat: Vec<WorkerMemory> = grown(9).collect();
        assert_eq!(predict_memory_shortage(&flat, MIB), None, "one minute of growth, then eight without");
        assert!(predict_memory_shortage(&flat[..2], MIB).is_some());
        let slower = [reading(0, 8, 0), reading(60, 8, 8 * GIB), reading(120, 8, 9 * GIB)];
        let shortage = predict_memory_shortage(&slower, 2 * GIB).unwrap();
        assert_eq!(shortage.growth_per_minute, 128 * MIB, "the present growth");
        let faster = [reading(0, 8, 0), reading(60, 8, 0), reading(120, 8, 2 * GIB)];
        assert_eq!(
            predict_memory_shortage(&faster, 2 * GIB).unwrap().growth_per_minute,
            128 * MIB,
            "the mean"
        );
    }

    #[test]
    fn a_short_growth_predicts_no_far_lack() {
        let loading = [reading(0, 8, 0), reading(2, 8, GIB)];
        assert_eq!(predict_memory_shortage(&loading, 10 * GIB), None, "20 s are ten times the 2 s of growth");
        assert_eq!(predict_memory_shortage(&loading, 9 * GIB).unwrap().seconds_left, 18);
    }

    #[test]
    fn only_large_processes_are_workers() {
        let memory = WorkerMemory::from_unique_set_sizes(Nanos(7), [GIB, GIB, MIB, 0, GIB / 2]);
        assert_eq!(memory, WorkerMemory { at: Nanos(7), workers: 3, private_bytes: 2 * GIB + GIB / 2 });
        assert_eq!(WorkerMemory::from_unique_set_sizes(Nanos(7), []).workers, 0);
        assert_eq!(WorkerMemory::from_unique_set_sizes(Nanos(7), [0, 0]).workers, 0);
    }

    #[test]
    fn what_workers_have_for_themselves_is_estimated_from_the_memory_that_is_charged_once() {
        // A parent with 200 MiB, four workers that share these and have 20 MiB of their own, and a shell.
        let farm = [200, 220, 220, 220, 220, 1].map(|mebibytes| mebibytes * MIB);
        let memory = WorkerMemory::from_counters(Nanos(7), 281 * MIB, &farm);
        assert_eq!(memory, WorkerMemory { at: Nanos(7), workers: 5, private_bytes: 80 * MIB });
        // Each worker has written to 50 MiB of what it shared.
        let later = WorkerMemory::from_counters(Nanos(8), 481 * MIB, &farm);
        assert_eq!((later.workers, later.private_bytes), (5, 330 * MIB), "no less than what was copied");
        let alone = WorkerMemory::from_counters(Nanos(7), GIB, &[GIB]);
        assert_eq!((alone.workers, alone.private_bytes), (1, GIB));
        let more_charged = WorkerMemory::from_counters(Nanos(7), 3 * GIB, &[GIB, GIB]);
        assert_eq!((more_charged.workers, more_charged.private_bytes), (2, 3 * GIB));
        assert_eq!(WorkerMemory::from_counters(Nanos(7), GIB, &[]).workers, 0);
        let huge = WorkerMemory::from_counters(Nanos(7), 0, &[u64::MAX; 3]);
        assert_eq!((huge.workers, huge.private_bytes), (3, 0));
    }
}
