//! Replays that are short enough to be checked by hand.

use std::time::Duration;

use pjw_core::testing::regular_topology;

use super::*;

/// Two L3s of two cores of two PUs.
fn machine() -> Topology {
    regular_topology(1, 1, 2, 2, 2)
}

/// Jobs by submit time, run time and size.
fn job_log(jobs: &[(u64, u64, u32)]) -> JobLog {
    let job = |(number, &(submit_s, run_s, processors))| LoggedJob { number, submit_s, run_s, processors };
    JobLog { jobs: (1..).zip(jobs).map(job).collect(), skipped_jobs: 0 }
}

fn options(unit: ProcessorUnit, chooser: CoreChooser) -> ReplayOptions {
    ReplayOptions { unit, chooser, housekeeping_cpus: CpuSet::new() }
}

const PACK: CoreChooser = CoreChooser::Allocator(Placement::Pack);

fn cpus(replay: &ReplayResult) -> Vec<(u64, String)> {
    replay.started_jobs.iter().map(|one| (one.job.number, one.cpus.to_string())).collect()
}

fn grants(list: &[(u64, &str)]) -> Vec<(u64, String)> {
    list.iter().map(|&(job, cpus)| (job, cpus.to_owned())).collect()
}

#[test]
fn cores_of_a_job_that_ends_are_free_for_a_job_that_starts_at_the_same_time() {
    let log = job_log(&[(0, 10, 4), (9, 1, 1), (10, 5, 3), (10, 0, 1), (10, 1, 1), (10, 1, 1)]);
    let done = replay(&machine(), &log, &options(ProcessorUnit::Core, PACK), |_| {});
    // The fourth ends when it starts, so the fifth has its core, and the sixth has none.
    assert_eq!(cpus(&done), grants(&[(1, "0-7"), (3, "0-2,4-6"), (4, "3,7"), (5, "3,7")]));
    assert_eq!((done.job_count(), done.refused_count, done.usable_processors), (6, 2, 4));
}

#[test]
fn figures_are_over_the_started_jobs() {
    let log = job_log(&[(100, 10, 3), (100, 10, 2), (105, 10, 1)]);
    let done = replay(&machine(), &log, &options(ProcessorUnit::Core, PACK), |_| {});
    assert_eq!((done.started_jobs.len(), done.refused_count), (2, 1));
    assert!((done.utilisation() - 40.0 / 60.0).abs() < 1e-9, "{}", done.utilisation());
    assert!((done.mean_count(|domains_used| domains_used.l3_caches) - 1.5).abs() < 1e-9);
    assert!((done.mean_count(|domains_used| domains_used.packages) - 1.0).abs() < 1e-9);
    assert_eq!(done.split_core_count(), 0);
    assert!(
        done.decision_time_percentile(50) > Duration::ZERO
            && done.decision_time_percentile(50) <= done.decision_time_percentile(99)
    );
}

#[test]
fn pus_are_allocated_one_by_one_and_split_cores_are_counted() {
    let log = job_log(&[(0, 10, 3), (0, 10, 5), (0, 10, 1)]);
    let done = replay(&machine(), &log, &options(ProcessorUnit::Pu, PACK), |_| {});
    assert_eq!((done.started_jobs.len(), done.refused_count, done.usable_processors), (2, 1, 8));
    assert_eq!(done.split_core_count(), 2);
    assert_eq!(done.started_jobs.iter().map(|one| one.cpus.len()).sum::<usize>(), 8);
    assert!((done.utilisation() - 1.0).abs() < 1e-9);
}

#[test]
fn no_job_gets_housekeeping_and_a_job_that_is_too_large_is_refused() {
    let options =
        ReplayOptions { housekeeping_cpus: "0,4".parse().unwrap(), ..options(ProcessorUnit::Core, PACK) };
    let done = replay(&machine(), &job_log(&[(0, 1, 4), (0, 1, u32::MAX), (0, 1, 3)]), &options, |_| {});
    assert_eq!((cpus(&done), done.refused_count, done.usable_processors), (grants(&[(3, "1-3,5-7")]), 2, 3));
    let all_refused = replay(&machine(), &job_log(&[(0, 1, 9)]), &options, |_| {});
    assert!(all_refused.utilisation().abs() < 1e-9 && all_refused.decision_time_percentile(99).is_zero());
}

#[test]
fn spread_and_the_reference_policies_use_the_same_pool() {
    let log = job_log(&[(0, 10, 1), (0, 10, 2), (0, 10, 1)]);
    let run = |chooser| cpus(&replay(&machine(), &log, &options(ProcessorUnit::Core, chooser), |_| {}));
    assert_eq!(run(PACK), grants(&[(1, "0,4"), (2, "2-3,6-7"), (3, "1,5")]));
    let spread = CoreChooser::Allocator(Placement::Spread);
    assert_eq!(run(spread), grants(&[(1, "0,4"), (2, "1-2,5-6"), (3, "3,7")]));
    for reference in ReferencePolicy::ALL {
        let given = run(CoreChooser::Reference(reference));
        assert_eq!(given.len(), 3, "{reference:?}");
    }
    assert_eq!(
        run(CoreChooser::Reference(ReferencePolicy::FirstFit)),
        grants(&[(1, "0,4"), (2, "1-2,5-6"), (3, "3,7")])
    );
}

#[test]
fn samples_are_even_and_limited() {
    let log = job_log(&[(0, 60, 1), (50, 100, 3), (198, 1, 1)]);
    let done = replay(&machine(), &log, &options(ProcessorUnit::Core, PACK), |_| {});
    assert_eq!(done.free_cores_samples.len(), MAX_FREE_CORES_SAMPLES as usize);
    let at = |time_s| {
        done.free_cores_samples.iter().find(|sample| sample.time_s == time_s).unwrap().largest_requests
    };
    assert_eq!(at(0), LargestRequests { l3: 2, numa_node: 3, package: 3, machine: 3 });
    assert_eq!(at(50).machine, 0);
    assert_eq!(at(60).machine, 1);
    assert_eq!(at(150).machine, 4);
    assert_eq!(at(198).machine, 3);
    let short =
        replay(&machine(), &job_log(&[(7, 1, 1), (9, 1, 1)]), &options(ProcessorUnit::Core, PACK), |_| {});
    assert_eq!(short.free_cores_samples.iter().map(|sample| sample.time_s).collect::<Vec<_>>(), [7, 8, 9]);
    let one = replay(&machine(), &job_log(&[(7, 1, 1)]), &options(ProcessorUnit::Core, PACK), |_| {});
    assert_eq!(one.free_cores_samples.len(), 1);
}

#[test]
fn the_same_log_gives_the_same_grants_and_every_decision_is_reported() {
    let log = job_log(&[(0, 10, 1), (1, 5, 2), (2, 9, 3), (6, 3, 2), (7, 1, 1)]);
    let mut turns = Vec::new();
    let first = replay(&machine(), &log, &options(ProcessorUnit::Core, PACK), |turn| {
        turns.push((turn.job.number, turn.cpus.is_some()));
    });
    assert_eq!(turns, [(1, true), (2, true), (3, false), (4, true), (5, true)]);
    let again = replay(&machine(), &log, &options(ProcessorUnit::Core, PACK), |_| {});
    assert_eq!(cpus(&first), cpus(&again));
}
