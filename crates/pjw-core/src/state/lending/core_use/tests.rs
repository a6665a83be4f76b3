//! The cores that an owner uses, from samples of its CPU time.

use super::*;

const MS: Duration = Duration::from_millis(1);

/// Adds samples of 10 ms for a second.
fn steady(core_use: &mut CoreUse, total_percent: u32, lent: &[(&str, u32)], has_smt: bool) -> (u32, CpuSet) {
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
    let used = add(core_use, period, total_percent, lent, has_smt);
    (used.in_use, used.lent_cpus)
}

fn add(
    core_use: &mut CoreUse,
    period: Duration,
    total_percent: u32,
    lent: &[(&str, u32)],
    has_smt: bool,
) -> UsedCores {
    let time = |percent: u32| period * percent / 100;
    let lent = lent.iter().map(|(core, percent)| LentCoreSample {
        core: core.parse().unwrap(),
        period,
        cpu_time: time(*percent),
    });
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
fn a_core_with_one_pu_is_lent_below_three_quarters_of_the_time_and_stays_lent_up_to_nine_tenths() {
    let steady = |percent: u32, lent: &[(&str, u32)], has_smt: bool| {
        let mut core_use = CoreUse::default();
        steady(&mut core_use, percent, lent, has_smt);
        let used = add(&mut core_use, 10 * MS, percent, lent, has_smt);
        (used.too_busy_to_lend, used.in_use)
    };
    assert_eq!(steady(70, &[], false), (0, 0));
    assert_eq!(steady(80, &[], false), (1, 0));
    assert_eq!(steady(95, &[], false), (1, 1));
    assert_eq!(steady(180, &[], false), (2, 1));
    assert_eq!(steady(150, &[("0", 80), ("1", 70)], false), (1, 0), "core by core");
    assert_eq!(steady(5, &[], true), (0, 0), "a core with several PUs");
    assert_eq!(steady(15, &[], true), (1, 1), "a core with several PUs");
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
        let cpu_time = Duration::from_micros(us);
        let lent = [LentCoreSample { core: set("0"), period: 2 * MS, cpu_time }];
        CoreUse::default()
            .add(&OwnerCpuSample { period: 2 * MS, cpu_time, lent: &lent, has_smt: false })
            .lent_cpus
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
        core_use.add(&OwnerCpuSample { period: 2 * MS, cpu_time, lent: &[], has_smt: false }).in_use
    };
    shown_us.iter().map(add).collect()
}

#[test]
fn an_owner_that_wakes_up_is_heard_in_three_short_samples_although_its_cpu_time_is_behind_by_a_tick() {
    assert_eq!(short(&mut CoreUse::default(), &[0, 0, 1000, 0, 4000]), [0, 0, 0, 0, 1]);
    assert_eq!(short(&mut CoreUse::default(), &[0, 0, 900, 500]), [0, 0, 0, 1]);
    assert_eq!(short(&mut CoreUse::default(), &[0, 0, 4000, 12_000, 8000]), [0, 0, 1, 3, 4], "four threads");
}

#[test]
fn samples_of_1_ms_are_judged_together_as_long_as_a_tick_of_the_kernel_lasts() {
    let one_ms = |core_use: &mut CoreUse, us: u64| {
        let cpu_time = Duration::from_micros(us);
        core_use.add(&OwnerCpuSample { period: MS, cpu_time, lent: &[], has_smt: false }).in_use
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
        let mut demand = ThreadDemand::default();
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
    assert_eq!(wanted(&[(700, 200)], true), 1, "a borrower on the other PU of the core would slow it down");
    assert_eq!(wanted(&[], true), 0);
}

#[test]
fn a_sample_without_length_counts_nothing() {
    let mut core_use = CoreUse::default();
    assert_eq!(sample(&mut core_use, Duration::ZERO, 100, &[("0", 100)], false), (0, set("")));
    assert_eq!(sample(&mut core_use, Duration::ZERO, 100, &[], false), (0, set("")));
}
