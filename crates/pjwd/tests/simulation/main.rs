//! Whole cycles of the daemon on the simulated kernel, with random workloads and faults. Each seed gives one run. A run
//! has two phases:
//!
//! 1. *Safety*, with faults: processes start and end, request masks and name the jobs of other users, events and
//!    records get lost, masks are refused, PUs go offline, and the daemon is killed between any two steps. After every
//!    cycle, the audit and the checks of this test look for PUs with two holders or none, and compare each mask entry
//!    with the simulated kernel.
//! 2. *Liveness*, without faults: after some cycles each process is on the cores of its job, a cycle plans nothing, and
//!    a release restores every mask.
//!
//! The tests of *lending* have the same phases and conditions. There, jobs are guaranteed and besteffort, the demand of
//! the owners changes, and the daemon samples it as its event loop does. No PU has two owners or two borrowers, no
//! owner waits for a borrower, no borrower is frozen while a core is free, also while records are lost, and a release
//! undoes everything. After a cycle that made all its changes, the cpusets of the simulated kernel let a job run on a PU
//! of another one that is guaranteed only if the job borrows the PU, and at idle priority. One of these tests has the
//! monitor of lent PUs, one has cgroup v1, and one has provisions.
//!
//! A test runs 1,000 seeds: 600 that are the same each time, and 400 that are new each day. The tests of lending with
//! the monitor, with cgroup v1 and with provisions run a third of them. `PJW_SEEDS=100000` runs 100,000 seeds instead,
//! from 0 or from `PJW_FIRST_SEED` on. `PJW_SEED=4711` runs one seed and prints its log. A failure names its seeds. The
//! run depends on the seed only: a seed of another day is repeated by its number.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs,
    unreachable_pub
)] // a test may fail

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

mod run;

use run::{Machine, Run};

/// The number of seeds that are the same each time: `0..FIXED_SEEDS`.
const FIXED_SEEDS: u64 = 600;
/// The number of seeds that are new each day. The first one is `FIRST_SEED_OF_DAY_0` plus this number times the day.
const SEEDS_OF_A_DAY: u64 = 400;
/// The first seed of day 0, which is above all seeds that `PJW_SEEDS` runs.
const FIRST_SEED_OF_DAY_0: u64 = 1_000_000_000;

/// Seeds that failed before. A seed is added with the change that makes it pass.
const FAILED_ONCE: [u64; 98] = [
    862,
    888,
    790,
    1510,
    2039,
    4035,
    7898,
    4640,
    5440,
    6742,
    6774,
    6790,
    7347,
    7377,
    7977,
    1_008_312_121,
    1_008_312_128,
    23,
    159,
    396,
    442,
    11_551,
    17_930,
    53_044,
    54_129,
    55_837,
    1_008_312_666,
    68_245,
    74_739,
    75_366,
    76_572,
    78_919,
    84_832,
    94_929,
    100_832,
    105_673,
    113_996,
    119_087,
    131_335,
    147_160,
    148_559,
    149_022,
    208_563,
    26_675,
    25_940,
    22_319,
    2_305,
    43_944,
    18_350,
    305_442,
    270,
    1_228,
    1_589,
    2_484,
    2_731,
    6_180,
    303_480,
    304_152,
    309_673,
    1_108,
    2_041,
    2_407,
    33_778,
    44_041,
    48_041,
    60_069,
    74_707,
    321_054,
    328_664,
    1_008_312_997,
    147_501,
    150_534,
    7_300,
    136_189,
    9_394,
    103_767,
    10_929,
    145_266,
    6_460,
    20_825,
    21_811,
    126_087,
    26_971,
    1_060,
    13_731,
    33_229,
    404_092,
    403_640,
    40_648,
    42_265,
    44_662,
    25_187,
    88_002,
    75_339,
    3_833,
    19_792,
    40_757,
    74_050,
];

/// Seeds of runs with lending that failed before.
const FAILED_ONCE_WITH_LENDING: [u64; 19] = [
    3_000_190,
    7_928,
    24,
    280,
    299,
    423,
    473,
    544,
    6_507,
    8_625,
    9_244,
    21_815,
    23_480,
    1_008_313_636,
    7_347,
    9_436,
    1_008_313_232,
    1_008_313_328,
    1_008_313_818,
];

/// Seeds of runs with lending and the monitor of lent PUs that failed before.
const FAILED_ONCE_WITH_MONITOR: [u64; 8] =
    [162, 1_008_313_785, 1_008_314_583, 1_008_314_740, 1_008_315_676, 2_001_010, 2_002_475, 2_000_076];

/// Seeds of runs with lending on cgroup v1 that failed before.
const FAILED_ONCE_ON_CGROUP_V1: [u64; 8] = [
    1_008_313_618,
    1_008_313_987,
    1_008_313_785,
    1_008_314_740,
    1_008_315_676,
    2_001_010,
    2_001_064,
    2_000_076,
];

/// The same for the runs with provisions.
const FAILED_ONCE_WITH_PROVISIONS: [u64; 2] = [301_407, 1_008_314_751];

/// The seeds of today, by the clock of the machine in UTC.
fn seeds_of_the_day() -> std::ops::Range<u64> {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("the clock is after 1970");
    let day = since.as_secs() / 86_400;
    let first = FIRST_SEED_OF_DAY_0 + day * SEEDS_OF_A_DAY;
    println!("day {day}: seeds {first} to {}", first + SEEDS_OF_A_DAY - 1);
    first..first + SEEDS_OF_A_DAY
}

/// Runs each of these seeds, on all PUs of this machine. Panics with the numbers of the seeds that failed.
/// `lending_machine` is the simulated machine of runs with lending, and `None` for runs without. `test` is the name of
/// the calling test, for the message.
fn run_all(seeds: &[u64], lending_machine: Option<Machine>, test: &str) -> run::Totals {
    let verbose = seeds.len() == 1;
    let (totals, failed) = (Mutex::new(run::Totals::default()), Mutex::new(Vec::new()));
    let next = AtomicUsize::new(0);
    let run_remaining_seeds = || {
        while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
            match std::panic::catch_unwind(|| Run::new(seed, lending_machine, verbose).run()) {
                Ok(run) => totals.lock().unwrap().add(&run),
                Err(_) => failed.lock().unwrap().push(seed),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run_remaining_seeds))));
    let (totals, mut failed) = (totals.into_inner().unwrap(), failed.into_inner().unwrap());
    failed.sort_unstable();
    assert!(
        failed.is_empty(),
        "seeds {failed:?} failed; to run one with its log: PJW_SEED={} cargo test -p pjwd --test simulation {test} -- --nocapture",
        failed[0]
    );
    println!("{} seeds: {totals:?}", seeds.len());
    totals
}

/// The seeds that the variables of the environment select, else the fixed seeds and those of today.
fn seeds_to_run() -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let first = number("PJW_FIRST_SEED").unwrap_or(0);
    match (number("PJW_SEED"), number("PJW_SEEDS")) {
        (Some(seed), _) => vec![seed],
        (None, Some(seeds)) => (first..first + seeds).collect(),
        (None, None) => (0..FIXED_SEEDS).chain(seeds_of_the_day()).collect(),
    }
}

#[test]
fn runs_with_random_workloads_and_faults_break_no_invariant() {
    let seeds = seeds_to_run();
    let totals = run_all(&seeds, None, "runs_with_random_workloads_and_faults_break_no_invariant");
    if seeds.len() > 1 {
        // Each of these events has happened at least once, so that the conditions on it were checked.
        assert!(
            totals.cycles > 0
                && totals.actions > 0
                && totals.kills > 0
                && totals.jobs > 0
                && totals.refusals > 0
                && totals.moves > 0
                && totals.cpusets > 0
                && totals.attempts > 0
        );
    }
}

fn run_with_lending(seeds: &[u64], machine: Machine, test: &str) {
    let totals = run_all(seeds, Some(machine), test);
    if seeds.len() > 1 {
        assert!(
            totals.kills > 0
                && totals.loans > 0
                && totals.returns > 0
                && totals.lent_at_rest > 0
                && totals.lent_threads > 0
                && totals.frozen > 0
                && [totals.provisions > 0, totals.recognised > 0] == [machine == Machine::WithProvisions; 2]
        );
    }
}

#[test]
fn runs_with_lending_break_no_invariant() {
    let test = "runs_with_lending_break_no_invariant";
    run_with_lending(&seeds_to_run(), Machine::WithoutMonitor, test);
}

/// The seeds that the variables of the environment select, else every third of the usual ones.
fn third_of_the_seeds() -> Vec<u64> {
    let seeds = seeds_to_run();
    if std::env::vars().any(|(name, _)| name == "PJW_SEED" || name == "PJW_SEEDS") {
        return seeds;
    }
    seeds.into_iter().step_by(3).collect()
}

#[test]
fn runs_with_lending_and_the_monitor_of_lent_pus_break_no_invariant() {
    let test = "runs_with_lending_and_the_monitor_of_lent_pus_break_no_invariant";
    run_with_lending(&third_of_the_seeds(), Machine::WithMonitor, test);
}

#[test]
fn runs_with_lending_on_cgroup_v1_break_no_invariant() {
    run_with_lending(
        &third_of_the_seeds(),
        Machine::CgroupV1,
        "runs_with_lending_on_cgroup_v1_break_no_invariant",
    );
}

#[test]
fn runs_with_lending_and_provisions_break_no_invariant() {
    let test = "runs_with_lending_and_provisions_break_no_invariant";
    run_with_lending(&third_of_the_seeds(), Machine::WithProvisions, test);
}

#[test]
fn seeds_that_failed_once_pass() {
    run_all(&FAILED_ONCE, None, "seeds_that_failed_once_pass");
    run_all(&FAILED_ONCE_WITH_LENDING, Some(Machine::WithoutMonitor), "seeds_that_failed_once_pass");
    run_all(&FAILED_ONCE_WITH_MONITOR, Some(Machine::WithMonitor), "seeds_that_failed_once_pass");
    run_all(&FAILED_ONCE_ON_CGROUP_V1, Some(Machine::CgroupV1), "seeds_that_failed_once_pass");
    run_all(&FAILED_ONCE_WITH_PROVISIONS, Some(Machine::WithProvisions), "seeds_that_failed_once_pass");
}
