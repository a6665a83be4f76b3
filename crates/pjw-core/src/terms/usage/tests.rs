//! What each sample adds.

use super::*;

const SECOND: u64 = 1_000_000_000;

/// A sample of one second on four cores with one PU each. Run time and wait time are in permille of the second.
fn second(cpu: u64, wait: u64, hot_threads: u32) -> UsageSample {
    let ns = SECOND / 1000;
    UsageSample {
        length_ns: SECOND,
        cpu_ns: cpu * ns,
        wait_ns: wait * ns,
        cores: 4,
        pus: 4,
        held_ns: 4 * SECOND,
        without_pus_ns: 0,
        hot_threads,
        has_bound_waiters: false,
    }
}

fn usage_of(samples: impl IntoIterator<Item = UsageSample>) -> JobUsage {
    let mut usage = JobUsage::default();
    samples.into_iter().for_each(|sample| usage.add_sample(&sample));
    usage
}

#[test]
fn a_scan_may_take_a_twentieth_of_the_sample_that_it_ends() {
    let short = [(0, 0), (SECOND / 20, SECOND), (SECOND / 10, 2 * SECOND)];
    assert!(short.into_iter().all(|(scan_ns, sample_ns)| is_short_scan(scan_ns, sample_ns)));
    let long = [(1, 0), (SECOND / 20 + 1, SECOND), (SECOND, SECOND)];
    assert!(!long.into_iter().any(|(scan_ns, sample_ns)| is_short_scan(scan_ns, sample_ns)));
}

#[test]
fn waiting_counts_only_beside_idle_pus_of_the_job() {
    let usage = usage_of([second(3850, 1500, 8)]);
    assert_eq!((usage.stranded_ns, usage.displaced_ns, usage.crowded_ns), (SECOND * 15 / 100, 0, SECOND));
    let usage = usage_of([second(1000, 2000, 3)]);
    assert_eq!((usage.stranded_ns, usage.displaced_ns, usage.crowded_ns), (2 * SECOND, SECOND, 0));
    let usage = usage_of([UsageSample { has_bound_waiters: true, ..second(1000, 2000, 3) }]);
    assert_eq!((usage.bound_ns, usage.displaced_ns), (SECOND, 0));
}

#[test]
fn more_hot_threads_than_pus_are_crowded_although_a_serial_part_leaves_pus_idle() {
    let usage = usage_of([second(2800, 20_000, 36)]);
    assert_eq!(
        (usage.crowded_ns, usage.displaced_ns, usage.crowded_wanted_ns),
        (SECOND, 0, 22_800 * SECOND / 1000)
    );
    let threads = &usage.crowded_threads;
    assert_eq!((threads.total_ns(), threads.upper_quantile(500, u64::MAX)), (SECOND, 36));
    let usage = usage_of([UsageSample { has_bound_waiters: true, ..second(1000, 7000, 8) }]);
    assert_eq!((usage.crowded_ns, usage.bound_ns), (0, SECOND), "bound to one of four PUs");
    let usage = usage_of([second(2800, 1200, 4)]);
    assert_eq!((usage.crowded_ns, usage.displaced_ns), (0, SECOND), "no more threads than PUs");
}

#[test]
fn helper_threads_beside_one_hot_thread_per_pu_are_not_crowded_and_many_short_processes_are() {
    assert_eq!(usage_of([second(4000, 2400, 4)]).crowded_ns, 0);
    let alone = UsageSample { cores: 1, pus: 1, ..second(1000, 1300, 1) };
    assert_eq!(usage_of([alone]).crowded_ns, 0);
    let usage = usage_of([second(3900, 12_000, 2)]);
    assert_eq!((usage.crowded_ns, usage.crowded_threads.total_ns()), (SECOND, 0));
    assert_eq!(usage_of([second(3900, 3000, 2)]).crowded_ns, 0);
}

#[test]
fn a_job_without_pus_is_not_asleep() {
    let frozen = UsageSample { cores: 0, pus: 0, held_ns: 0, ..second(0, 0, 0) };
    let usage = usage_of([frozen, frozen]);
    assert_eq!((usage.sampled_ns, usage.asleep_ns, usage.held_ns), (2 * SECOND, 0, 0));
    assert_eq!((usage.without_pus_ns, usage.sampled_with_pus_ns()), (2 * SECOND, 0));
    assert_eq!(usage.levels, TimeHistogram::default(), "a time without PUs does not count as unused");
}

#[test]
fn of_a_sample_in_which_the_job_gets_its_pus_only_the_time_with_pus_counts_as_use() {
    let mixed = UsageSample { without_pus_ns: SECOND * 3 / 4, held_ns: SECOND, ..second(2000, 1600, 3) };
    let usage = usage_of([mixed]);
    assert_eq!((usage.sampled_ns, usage.without_pus_ns), (SECOND, SECOND * 3 / 4));
    assert_eq!((usage.without_pus_cpu_ns, usage.stranded_ns), (SECOND * 3 / 2, SECOND * 4 / 10));
    assert_eq!((usage.held_ns, usage.threads_ns), (SECOND, SECOND * 3 / 4));
    assert_eq!(usage.levels.total_ns(), SECOND / 4);
    let late = UsageSample { without_pus_ns: SECOND, ..second(2000, 0, 3) };
    assert_eq!(usage_of([late]).without_pus_cpu_ns, 2 * SECOND, "the job gets its PUs at the end");
}

#[test]
fn a_serial_phase_counts_from_ten_seconds_on() {
    let serial = |seconds: usize| (0..seconds).map(|_| second(990, 0, 1));
    let mut usage = usage_of(serial(9).chain([second(3900, 0, 4)]).chain(serial(12)));
    assert_eq!((usage.serial_ns, usage.open_serial_ns), (0, 12 * SECOND));
    usage.end_serial_phase();
    assert_eq!((usage.serial_ns, usage.open_serial_ns), (12 * SECOND, 0));
    let phases = serial(15).chain([second(3900, 0, 4)]).chain(serial(11)).chain([second(3900, 0, 4)]);
    let usage = usage_of(phases);
    assert_eq!((usage.serial_phases, usage.serial_longest_ns), (2, 15 * SECOND));
    assert_eq!(usage.threads_ns, (15 + 4 + 11 + 4) * SECOND);
    let alone = UsageSample { cores: 1, pus: 1, ..second(990, 0, 1) };
    assert_eq!(usage_of([alone]).open_serial_ns, 0, "one core cannot be used by more than one thread");
}

#[test]
fn short_children_that_follow_each_other_are_a_serial_phase_too() {
    assert_eq!(usage_of((0..11).map(|_| second(900, 0, 0))).open_serial_ns, 11 * SECOND);
    assert_eq!(usage_of([second(400, 0, 0)]).asleep_ns, SECOND);
}

#[test]
fn late_cpu_time_of_a_short_interval_is_cut_to_what_the_cores_can_give() {
    let usage = usage_of([second(9000, 0, 0)]);
    assert_eq!(usage.levels.upper_quantile(50, u64::MAX), 4031);
    assert_eq!((usage.cores_max, usage.pus_max, usage.held_ns), (4, 4, 4 * SECOND));
    assert_eq!(usage_of([UsageSample::default()]), JobUsage::default(), "a sample without a length");
}
