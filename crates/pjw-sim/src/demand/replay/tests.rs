//! The figures of a replay, for curves short enough to compute them by hand.

use pjw_core::testing::{cpu_set, regular_topology};

use super::*;
use crate::demand::curve::parse;

/// Two seconds until a core is lent, at most four at once, one as a buffer.
fn lending() -> LendingPolicy {
    LendingPolicy { enabled: true, ..LendingPolicy::default() }
}

/// On a machine of eight cores with two PUs each.
fn replayed(text: &str, lending: LendingPolicy) -> DemandReplayResult {
    let options = DemandReplayOptions { housekeeping_cpus: CpuSet::new(), lending };
    replay_demand(&regular_topology(1, 1, 2, 4, 2), &parse(text.as_bytes()).unwrap(), &options).unwrap()
}

#[test]
fn without_lending_the_besteffort_job_has_the_free_cores_alone() {
    let result = replayed("time_s,web:6\n0,3\n100,0\n", LendingPolicy::default());
    assert_eq!((result.usable_cores, result.duration), (8, Duration::from_secs(100)));
    assert_eq!((result.owners[0].used_core_s, result.besteffort_core_s), (300.0, 200.0));
    assert_eq!((result.owners[0].lent_core_s, result.owners[0].loans), (0.0, 0));
    assert_eq!(result.utilisation(), 500.0 / 800.0);
}

#[test]
fn idle_cores_beyond_the_buffer_are_lent_after_the_pause() {
    let result = replayed("time_s,web:6\n0,3\n100,0\n", lending());
    // Two cores, from the second second on, and the two free ones.
    let web = &result.owners[0];
    assert_eq!((web.lent_core_s, web.loans, web.revocations), (2.0 * 98.0, 2, 0));
    assert_eq!(result.besteffort_core_s, 200.0 + 196.0);
}

#[test]
fn lent_cores_come_back_with_the_demand_and_each_counts_as_a_revocation() {
    let result = replayed("time_s,web:6\n0,1\n10,5\n20,5\n", lending());
    let web = &result.owners[0];
    assert_eq!((web.lent_core_s, web.loans, web.revocations), (4.0 * 8.0, 4, 4));
    assert_eq!(web.used_core_s, 60.0);
}

#[test]
fn an_owner_goes_before_the_besteffort_job_on_a_lent_core() {
    let no_buffer = LendingPolicy { buffer_cores: 0, cores_at_once: 8, ..lending() };
    let result = replayed("time_s,web:8\n0,0\n10,0.0625\n20,0\n", no_buffer);
    assert_eq!(result.owners[0].lent_core_s, 8.0 * 18.0, "less than a tenth of a core is no core in use");
    assert_eq!(result.besteffort_core_s, 8.0 * 8.0 + 7.9375 * 10.0);
}

#[test]
fn cores_are_lent_a_few_at_a_time() {
    let few = LendingPolicy { buffer_cores: 0, cores_at_once: 3, ..lending() };
    let result = replayed("time_s,web:8\n0,0\n8,0\n", few);
    assert_eq!(result.owners[0].lent_core_s, 3.0 * 2.0 + 6.0 * 2.0 + 8.0 * 2.0);
}

#[test]
fn housekeeping_cores_are_not_usable_and_owners_that_do_not_fit_are_refused() {
    let curve = parse(b"time_s,web:4,db:4\n0,1,1\n9,1,1\n").unwrap();
    let options = DemandReplayOptions { housekeeping_cpus: cpu_set("0,8"), lending: lending() };
    let machine = regular_topology(1, 1, 2, 4, 2);
    let error = replay_demand(&machine, &curve, &options).unwrap_err().to_string();
    let expected = "db can't have 4 cores: the curve asks for 8 cores in total, and the machine has 7 for jobs: \
                    lower the numbers of cores in the curve, or take a larger machine";
    assert_eq!(error, expected);
    let none = DemandReplayOptions { housekeeping_cpus: CpuSet::new(), ..options };
    assert_eq!(replay_demand(&machine, &curve, &none).unwrap().usable_cores, 8);
}

#[test]
fn two_owners_lend_and_an_owner_may_have_the_name_of_the_besteffort_job() {
    let result = replayed("time_s,web:4,besteffort:4\n0,4,0\n10,0,4\n20,0,0\n", lending());
    let lent: Vec<f64> = result.owners.iter().map(|one| one.lent_core_s).collect();
    assert_eq!(lent, [3.0 * 8.0, 3.0 * 8.0]);
    assert_eq!(result.owners[1].revocations, 3);
}

#[test]
fn a_reservation_lasts_for_a_curve_of_any_length() {
    let week = 7 * 86_400;
    let result = replayed(&format!("0,1\n{week},8\n"), lending());
    assert_eq!(result.owners[0].lent_core_s, f64::from(4 * (week - 2) + 2 * (week - 4)));
}

#[test]
fn a_demand_that_changes_each_100_ms_moves_no_core() {
    let lines: String = (0..600).map(|n| format!("{}.{},{}\n", n / 10, n % 10, n % 2 * 8)).collect();
    assert_eq!(replayed(&lines, lending()).owners[0].loans, 0);
}
