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
fn waiting_counts_only_beside_idle_pus_of_the_job() {
    let usage = usage_of([second(3900, 2000, 8)]);
    assert_eq!((usage.stranded_ns, usage.displaced_ns, usage.crowded_ns), (SECOND / 10, 0, SECOND));
    let usage = usage_of([second(1000, 2000, 3)]);
    assert_eq!((usage.stranded_ns, usage.displaced_ns, usage.crowded_ns), (2 * SECOND, SECOND, 0));
    let usage = usage_of([UsageSample { has_bound_waiters: true, ..second(1000, 2000, 3) }]);
    assert_eq!((usage.bound_ns, usage.displaced_ns), (SECOND, 0));
}

#[test]
fn a_serial_phase_counts_from_ten_seconds_on() {
    let serial = |seconds: usize| (0..seconds).map(|_| second(990, 0, 1));
    let mut usage = usage_of(serial(9).chain([second(3900, 0, 4)]).chain(serial(12)));
    assert_eq!((usage.serial_ns, usage.open_serial_ns), (0, 12 * SECOND));
    usage.end_serial_phase();
    assert_eq!((usage.serial_ns, usage.open_serial_ns), (12 * SECOND, 0));
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
    assert_eq!(usage.levels.exceeded_for(50, u64::MAX), 4031);
    assert_eq!((usage.cores_max, usage.pus_max, usage.held_ns), (4, 4, 4 * SECOND));
    assert_eq!(usage_of([UsageSample::default()]), JobUsage::default(), "a sample without a length");
}
