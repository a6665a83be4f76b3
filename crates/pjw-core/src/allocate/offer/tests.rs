//! The rules of the allocator: a machine and requests in each test.

use super::*;
use crate::basics::cpuset::Pu;
use crate::machine::topology::Core;
use crate::machine::topology::TopologyDomain;
use crate::testing::{numbered_job, regular_topology};
use std::string::String;
use std::string::ToString;
use std::vec::Vec;

#[derive(Clone)]
pub(super) struct Bench {
    pub(super) topology: Topology,
    pub(super) pool: PuPool,
    pub(super) policy: Policy,
}

impl Bench {
    pub(super) fn new(topology: Topology, housekeeping: &str) -> Self {
        let pool = PuPool::new(&topology, &housekeeping.parse().unwrap());
        Self { topology, pool, policy: Policy::default() }
    }

    pub(super) fn ask(&mut self, n: usize, request: &JobRequest) -> Result<PuOffer, Refusal> {
        let offer = allocate(&numbered_job(n), request, &self.pool, &self.topology, &self.policy)?;
        self.pool.commit(&numbered_job(n), &offer).unwrap();
        Ok(offer)
    }

    fn cores(&mut self, n: usize, cores: u32) -> String {
        match self.ask(n, &JobRequest::with_core_count(cores)) {
            Ok(offer) => offer.cpus.to_string(),
            Err(refusal) => format!("{refusal}"),
        }
    }
}

/// A machine of single-PU cores with the given domains.
fn flat(cores: u32, domains: &[(TopologyLevel, u32, &str)]) -> Topology {
    let cores = (0..cores).map(|n| Core { pus: Pu(n).into(), kind_index: 0 }).collect();
    let domains = domains.iter().map(|&(level, number, cpus)| TopologyDomain {
        level,
        number,
        cpus: cpus.parse().unwrap(),
        memory_bytes: 0,
    });
    Topology::new(cores, domains.collect()).unwrap()
}

/// Two fast cores of two PUs, four slow ones of one.
fn hybrid() -> Topology {
    let core = |(list, kind): (&str, u32)| Core { pus: list.parse().unwrap(), kind_index: kind };
    let cores = [("0-1", 1), ("2-3", 1), ("4", 0), ("5", 0), ("6", 0), ("7", 0)].map(core);
    Topology::new(cores.to_vec(), Vec::new()).unwrap()
}

fn pus(n: u32) -> JobRequest {
    JobRequest { cpu_request: CpuRequest::Pus(n), ..JobRequest::with_core_count(1) }
}

fn exactly(list: &str) -> JobRequest {
    JobRequest { cpu_request: CpuRequest::Exactly(list.parse().unwrap()), ..JobRequest::with_core_count(1) }
}

fn spread(n: u32) -> JobRequest {
    JobRequest { placement: Placement::Spread, ..JobRequest::with_core_count(n) }
}

#[test]
fn the_smallest_hole_that_holds_the_request_is_taken() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "");
    assert_eq!(bench.cores(1, 3), "0-2");
    assert_eq!(bench.cores(2, 4), "4-7", "a whole L3 beside, not the rest and a bit");
    assert_eq!(bench.cores(3, 1), "3", "the hole of one is filled first");
    assert_eq!(bench.cores(4, 6), "8-13");
    assert_eq!(
        bench.cores(5, 3),
        "3 cores were asked for and 2 are free (CPUs 14-15); the largest request that fits now is 2, \
         2 within one L3: ask for fewer, or have a job released first (pjwctl jobs shows who holds what)"
    );
}

#[test]
fn among_domains_that_hold_the_request_the_fullest_one_wins_whatever_its_number() {
    let mut bench = Bench::new(regular_topology(1, 1, 3, 4, 1), "4,8-9");
    assert_eq!(bench.cores(1, 2), "10-11", "L3#2 has just 2; L3#1 has 3 and L3#0 has 4");
    assert_eq!(bench.cores(2, 3), "5-7");
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "12-13");
    assert_eq!(bench.cores(1, 4), "8-11", "equal L3s: the one in the package that has less left");
}

#[test]
fn the_rest_of_a_divided_request_fills_the_smallest_hole() {
    let mut bench = Bench::new(regular_topology(1, 1, 3, 4, 1), "4,8-9");
    assert_eq!(bench.cores(1, 6), "0-3,10-11", "L3#0 whole, and the hole of 2 on L3#2");
}

#[test]
fn a_fuller_node_is_passed_over_if_the_request_lies_on_fewer_l3s_in_another() {
    let mut bench = Bench::new(regular_topology(1, 2, 3, 5, 1), "0-2,5-7,10-12,22-24,25-29");
    let offer = bench.ask(1, &JobRequest::with_core_count(6)).unwrap();
    assert_eq!(offer.cpus.to_string(), "15-20", "node 0 has just 6, but on three L3s");
    assert_eq!(offer.reasons[0], "NUMA node 1 has 7 free cores, of which 1 would stay free");
    assert_eq!(offer.second_best, "NUMA node 0 has 6 free cores, of which none would stay free");
}

#[test]
fn the_largest_holes_are_passed_over_if_others_need_fewer_nodes() {
    // Package 0 has 6 free cores on two nodes; packages 1 and 2 have 5 each on one node.
    let mut bench = Bench::new(regular_topology(3, 2, 1, 5, 1), "0-1,5-6,15-19,25-29");
    assert_eq!(bench.cores(1, 10), "10-14,20-24");
}

#[test]
fn a_small_l3_beats_a_package_that_would_fit_more_tightly() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "0-1,4-5");
    assert_eq!(bench.cores(1, 4), "8-11", "package 0 has just 4 left, but in two L3s");
}

#[test]
fn whole_cores_with_both_siblings() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 4, 2), "");
    assert_eq!(bench.cores(1, 2), "0-1,4-5");
    assert_eq!(bench.ask(2, &pus(3)).unwrap().cpus.to_string(), "2-3,6-7", "three PUs are two cores of two");
}

#[test]
fn siblings_may_serve_two_jobs_only_where_the_policy_says() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 2, 2), "");
    bench.policy.share_smt = true;
    assert_eq!(bench.ask(1, &pus(3)).unwrap().cpus.len(), 3);
    assert_eq!(bench.ask(2, &pus(1)).unwrap().cpus.len(), 1);
    assert!(bench.pool.free_cpus().is_empty());
}

#[test]
fn a_request_that_no_domain_holds_gets_the_fewest() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "");
    let offer = bench.ask(1, &JobRequest::with_core_count(10)).unwrap();
    assert_eq!(offer.cpus.to_string(), "0-9");
    assert!(
        offer
            .reasons
            .iter()
            .any(|line| line == "no package has 10 free cores; the largest hole is 8 on package 0"),
        "{offer:#?}"
    );
}

#[test]
fn the_second_best_choice_is_named() {
    let mut bench = Bench::new(regular_topology(1, 1, 3, 4, 1), "0-1");
    let offer = bench.ask(1, &JobRequest::with_core_count(2)).unwrap();
    assert_eq!(offer.reasons, ["L3#0 has 2 free cores, of which none would stay free"]);
    assert_eq!(offer.second_best, "L3#1 has 4 free cores, of which 2 would stay free");
}

#[test]
fn growing_keeps_held_cores_and_stays_near_shrinking_keeps_some_of_them() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "");
    assert_eq!(bench.cores(1, 2), "0-1");
    assert_eq!(bench.cores(2, 2), "2-3");
    assert_eq!(bench.cores(1, 4), "0-1,4-5", "the same package, not the other one");
    assert_eq!(bench.cores(1, 4), "0-1,4-5");
    assert_eq!(bench.cores(1, 1), "0");
}

#[test]
fn spreading_uses_every_domain_evenly() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "");
    assert_eq!(bench.ask(1, &spread(4)).unwrap().cpus.to_string(), "0,4,8,12");
    assert_eq!(bench.ask(1, &spread(6)).unwrap().cpus.to_string(), "0-1,4,8-9,12", "and grows evenly");
    assert_eq!(bench.ask(1, &spread(2)).unwrap().cpus.to_string(), "0,8", "and shrinks evenly");
    assert_eq!(bench.ask(2, &spread(11)).unwrap().cpus.len(), 11);
}

#[test]
fn cores_of_one_kind_are_chosen_if_there_are_enough() {
    let cores = (0..6).map(|n| Core { pus: Pu(n).into(), kind_index: u32::from(n >= 4) });
    let mut bench = Bench::new(Topology::new(cores.collect(), Vec::new()).unwrap(), "");
    assert_eq!(bench.cores(1, 2), "4-5", "the two fast ones");
    assert_eq!(bench.cores(2, 3), "0-2");
}

#[test]
fn an_offline_pu_is_granted_to_no_job() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 4, 1), "");
    bench.pool.set_online(&"0,2-3".parse().unwrap());
    assert_eq!(bench.cores(1, 3), "0,2-3");
}

#[test]
fn explicit_lists_are_refused_with_the_reason() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 4, 2), "0,4");
    for (list, expected) in [
        ("", "the CPU list is empty"),
        ("7-9", "CPUs 8-9 are not on this machine"),
        ("0,4", "CPUs 0,4 are kept for housekeeping"),
        ("1-2,6", "CPU 1 shares its core with 5"),
    ] {
        let refusal = bench.ask(1, &exactly(list)).unwrap_err().to_string();
        assert!(refusal.starts_with(expected), "{list}: {refusal}");
    }
    assert_eq!(bench.ask(1, &exactly("1,5")).unwrap().cpus.to_string(), "1,5");
    assert_eq!(bench.ask(1, &exactly("1,5")).unwrap().cpus.to_string(), "1,5", "its own are not in its way");
    let refusal = bench.ask(2, &exactly("1-2,5-6")).unwrap_err().to_string();
    assert_eq!(refusal, "CPU 1 belongs to manual:1: choose others, or have manual:1 released first");
    bench.policy.share_smt = true;
    assert_eq!(bench.ask(2, &exactly("2")).unwrap().cpus.to_string(), "2", "half a core where allowed");
}

#[test]
fn allocation_works_on_eight_thousand_pus() {
    let mut bench = Bench::new(regular_topology(8, 4, 16, 8, 2), "0,4096");
    assert_eq!(bench.topology.cpus().len(), 8192);
    let offer = bench.ask(1, &JobRequest::with_core_count(8)).unwrap();
    assert_eq!(offer.cpus.len(), 16);
    assert_eq!(bench.cores(2, 4095 - 8).parse::<CpuSet>().unwrap().len(), 2 * (4095 - 8));
    assert!(bench.pool.free_cpus().is_empty());
    assert_eq!(bench.pool.pus_of(&numbered_job(1)), offer.cpus);
    bench.pool.release(&numbered_job(2));
    assert_eq!(
        largest_requests(&bench.pool, &bench.topology),
        LargestRequests { l3: 8, numa_node: 128, package: 512, machine: 4087 }
    );
}

#[test]
fn nodes_that_hold_packages_are_divided_by_packages() {
    let one_node_over_two_packages = flat(
        12,
        &[
            (TopologyLevel::NumaNode, 0, "0-11"),
            (TopologyLevel::Package, 0, "0-5"),
            (TopologyLevel::Package, 1, "6-11"),
            (TopologyLevel::L3, 0, "0-2"),
            (TopologyLevel::L3, 1, "3-5"),
            (TopologyLevel::L3, 2, "6-8"),
            (TopologyLevel::L3, 3, "9-11"),
        ],
    );
    let mut bench = Bench::new(one_node_over_two_packages, "0-1");
    let offer = bench.ask(1, &JobRequest::with_core_count(5)).unwrap();
    assert_eq!(offer.cpus.to_string(), "6-10");
    let because = [
        "package 1 has 6 free cores, of which 1 would stay free",
        "no L3 has 5 free cores; the largest hole is 3 on L3#1 of package 0",
    ];
    assert_eq!(offer.reasons, because);
    assert_eq!(offer.second_best, "", "the node holds it too, but around the package");
}

#[test]
fn nodes_inside_an_l3_are_kept_whole() {
    let nodes_in_l3 = flat(
        12,
        &[
            (TopologyLevel::L3, 0, "0-5"),
            (TopologyLevel::L3, 1, "6-11"),
            (TopologyLevel::NumaNode, 0, "0-2"),
            (TopologyLevel::NumaNode, 1, "3-5"),
            (TopologyLevel::NumaNode, 2, "6-8"),
            (TopologyLevel::NumaNode, 3, "9-11"),
            (TopologyLevel::NumaNode, 4, ""),
        ],
    );
    let mut bench = Bench::new(nodes_in_l3, "0");
    assert_eq!(bench.cores(1, 3), "3-5", "not 1-3, which are on one L3 but on two nodes");
    assert_eq!(bench.cores(2, 4), "6-9");
    assert_eq!(
        largest_requests(&bench.pool, &bench.topology),
        LargestRequests { l3: 2, numa_node: 2, package: 4, machine: 4 }
    );
}

#[test]
fn nodes_of_slow_and_of_fast_memory_over_the_same_cores_count_once() {
    let domains = [
        (TopologyLevel::NumaNode, 0, "0-3"),
        (TopologyLevel::NumaNode, 1, "4-7"),
        (TopologyLevel::NumaNode, 2, "0-3"),
        (TopologyLevel::NumaNode, 3, "4-7"),
    ];
    let mut bench = Bench::new(flat(8, &domains), "");
    let offer = bench.ask(1, &JobRequest::with_core_count(2)).unwrap();
    assert_eq!(offer.reasons, ["NUMA node 0 has 4 free cores, of which 2 would stay free"]);
    assert_eq!(offer.second_best, "NUMA node 1 has 4 free cores, of which 2 would stay free");
}

#[test]
fn equal_holes_go_by_number_and_a_second_domain_is_a_neighbour() {
    let domains = [
        (TopologyLevel::L3, 1, "0-1"),
        (TopologyLevel::L3, 0, "2-3"),
        (TopologyLevel::L3, 3, "4-5"),
        (TopologyLevel::L3, 2, "6-7"),
    ];
    let mut bench = Bench::new(flat(8, &domains), "");
    assert_eq!(bench.cores(1, 1), "2", "L3#0");
    assert_eq!(bench.cores(2, 4), "0-1,4-5", "L3#1, then of two equal ones the nearer");
}

#[test]
fn a_machine_that_shows_no_domains_is_one() {
    let mut bench = Bench::new(flat(4, &[]), "");
    let offer = bench.ask(1, &JobRequest::with_core_count(3)).unwrap();
    assert_eq!(offer.cpus.to_string(), "0-2");
    assert_eq!(
        offer.reasons,
        ["the job gets CPUs 0-2 on the machine, the fewest parts that hold 3 free cores"]
    );
    assert_eq!(
        largest_requests(&bench.pool, &bench.topology),
        LargestRequests { l3: 1, numa_node: 1, package: 1, machine: 1 }
    );
}

#[test]
fn requested_pus_are_counted_on_the_chosen_cores() {
    for (asked, cpus) in [(1, "0-1"), (4, "0-3"), (5, "0-4"), (8, "0-7")] {
        let mut bench = Bench::new(hybrid(), "");
        assert_eq!(bench.ask(1, &pus(asked)).unwrap().cpus.to_string(), cpus, "{asked} PUs");
        assert_eq!(bench.ask(1, &pus(asked)).unwrap().cpus.to_string(), cpus, "{asked} PUs again");
    }
    let mut bench = Bench::new(hybrid(), "0-3");
    assert_eq!(bench.ask(1, &pus(3)).unwrap().cpus.to_string(), "4-6", "the slow ones have one PU each");
}

#[test]
fn remaining_single_pus_come_from_a_core_already_in_use() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 4, 2), "");
    bench.policy.share_smt = true;
    for (n, asked, cpus) in [(1, 3, "0-1,4"), (2, 1, "5"), (3, 3, "2-3,6"), (1, 3, "0-1,4"), (1, 2, "0,4")] {
        assert_eq!(bench.ask(n, &pus(asked)).unwrap().cpus.to_string(), cpus, "job {n}, {asked} PUs");
    }
    let refusal = bench.ask(4, &pus(3)).unwrap_err().to_string();
    assert!(
        refusal.starts_with(
            "3 CPUs were asked for and 2 are free (CPUs 1,7); the largest request that fits now is 2, 2 within one L3:"
        ),
        "{refusal}"
    );
}

#[test]
fn a_request_for_single_pus_is_refused_in_pus() {
    let mut bench = Bench::new(regular_topology(1, 1, 2, 2, 2), "0,4");
    bench.policy.share_smt = true;
    assert_eq!(
        bench.ask(1, &pus(7)).unwrap_err().to_string(),
        "7 CPUs were asked for and this machine has 6 for jobs: ask for at most 6"
    );
    assert_eq!(bench.ask(1, &pus(3)).unwrap().cpus.to_string(), "2-3,6");
    assert_eq!(bench.ask(2, &pus(1)).unwrap().cpus.to_string(), "7");
    let refusal = bench.ask(1, &pus(6)).unwrap_err().to_string();
    assert!(
        refusal.starts_with("6 CPUs were asked for, the job has 3, and 2 are free besides (CPUs 1,5);"),
        "{refusal}"
    );
    assert_eq!(bench.ask(3, &pus(2)).unwrap().cpus.to_string(), "1,5");
    let refusal = bench.ask(4, &pus(1)).unwrap_err().to_string();
    assert!(refusal.starts_with("1 CPU was asked for and no CPU is free:"), "{refusal}");
}

#[test]
fn single_pus_come_from_whole_cores_first() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 2, 4), "");
    bench.policy.share_smt = true;
    assert_eq!(bench.ask(1, &pus(1)).unwrap().cpus.to_string(), "0");
    let cpus = bench.ask(2, &pus(5)).unwrap().cpus.to_string();
    assert_eq!(cpus, "1-3,5,7", "all of the odd core, and one of the other's three");
}

#[test]
fn a_full_machine_is_named_in_the_refusal() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 2, 1), "");
    assert_eq!(bench.cores(1, 2), "0-1");
    assert_eq!(
        bench.cores(2, 2),
        "2 cores were asked for and no whole core is free: \
         have a job released first (pjwctl jobs shows who holds what)"
    );
}

#[test]
fn refusals_state_the_request_and_the_available_cores() {
    let mut bench = Bench::new(regular_topology(2, 1, 1, 4, 2), "0,8");
    let refuse = |bench: &mut Bench, request: &JobRequest| bench.ask(9, request).unwrap_err();
    assert_eq!(refuse(&mut bench, &JobRequest::with_core_count(0)), Refusal::ZeroCores);
    assert_eq!(refuse(&mut bench, &pus(0)), Refusal::ZeroCores);
    let too_many = |requested| Refusal::MoreThanMachine { unit: CpuUnit::Core, requested, usable: 7 };
    assert_eq!(refuse(&mut bench, &JobRequest::with_core_count(8)), too_many(8));
    assert_eq!(refuse(&mut bench, &JobRequest::with_core_count(u32::MAX)), too_many(u32::MAX));
    assert_eq!(refuse(&mut bench, &pus(15)), too_many(8));
    assert_eq!(refuse(&mut bench, &pus(u32::MAX)), too_many(1 << 31));
    assert_eq!(bench.cores(1, 4), "4-7,12-15");
    let not_enough = Refusal::NotEnoughCores {
        unit: CpuUnit::Core,
        requested: 4,
        free: 3,
        free_cpus: "1-3,9-11".parse().unwrap(),
        held: 0,
        max_cores_in_one_l3: 3,
    };
    assert_eq!(refuse(&mut bench, &JobRequest::with_core_count(4)), not_enough);
    assert_eq!(refuse(&mut bench, &pus(7)), not_enough);
}

#[test]
fn an_offline_sibling_is_not_granted_and_does_not_block_its_core() {
    let mut bench = Bench::new(regular_topology(1, 1, 1, 2, 2), "");
    bench.pool.set_online(&"0-2".parse().unwrap());
    assert_eq!(bench.cores(1, 2), "0-2", "core 1 has only PU 1 now");
    assert_eq!(bench.ask(1, &exactly("1")).unwrap().cpus.to_string(), "1", "which is the whole core");
    let refusal = bench.ask(1, &exactly("1,3")).unwrap_err().to_string();
    assert!(refusal.starts_with("CPU 3 is not on this machine or offline"), "{refusal}");
}

#[test]
fn sharing_takes_free_cores_first_and_names_the_overlap() {
    let mut bench = Bench::new(regular_topology(1, 1, 2, 2, 1), "0");
    assert_eq!(bench.cores(1, 2), "2-3");
    let held = [&bench.pool.pus_of(&numbered_job(1))].into_iter().collect();
    let share = |n| {
        allocate_shared(
            &numbered_job(2),
            &JobRequest::with_core_count(n),
            &bench.pool,
            &held,
            &bench.topology,
            &bench.policy,
        )
    };
    let offer = share(2).unwrap();
    assert_eq!(offer.cpus.to_string(), "1-2", "1 is free, 0 is housekeeping");
    assert_eq!(
        offer.reasons,
        ["CPU 2 is other jobs' too, as on_exhausted = \"share\" allows", "CPU 1 was still free, and first"]
    );
    assert_eq!(share(1).unwrap().cpus.to_string(), "1");
    assert_eq!(share(4), Err(Refusal::MoreThanMachine { unit: CpuUnit::Core, requested: 4, usable: 3 }));
}

#[test]
fn sharing_takes_the_cores_that_the_fewest_others_hold() {
    let bench = Bench::new(regular_topology(1, 1, 1, 4, 1), "");
    let mut held = GrantCounts::default();
    held.add(&"0-3".parse().unwrap());
    let mut share = |n| {
        let request = JobRequest::with_core_count(n);
        let offer =
            allocate_shared(&numbered_job(9), &request, &bench.pool, &held, &bench.topology, &bench.policy)
                .unwrap();
        held.add(&offer.cpus);
        offer.cpus.to_string()
    };
    assert_eq!([1, 1, 2, 2, 4, 3].map(&mut share), ["0", "1", "2-3", "0-1", "0-3", "0-2"]);
}

#[test]
fn growing_names_the_kept_and_the_added_cores() {
    let mut bench = Bench::new(regular_topology(2, 1, 2, 4, 1), "");
    bench.cores(1, 2);
    let offer = bench.ask(1, &JobRequest::with_core_count(6)).unwrap();
    let because = [
        "the job keeps CPUs 0-1, which it held",
        "it gets CPUs 2-5 on L3#0 of package 0, L3#1 of package 0, the nearest that could be had",
    ];
    assert_eq!(offer.reasons, because);
    assert_eq!(
        bench.ask(1, &JobRequest::with_core_count(6)).unwrap().reasons,
        ["the job keeps CPUs 0-5, which it holds already"]
    );
    assert_eq!(
        bench.ask(1, &JobRequest::with_core_count(4)).unwrap().reasons,
        ["of what the job held it keeps CPUs 0-3"]
    );
    let one = bench.ask(1, &JobRequest::with_core_count(1)).unwrap();
    assert_eq!(one.reasons, ["of what the job held it keeps CPU 0"], "a CPU number and not a count");
}

#[test]
fn a_core_with_an_offline_pu_of_another_job_is_not_granted() {
    let topology = regular_topology(1, 1, 1, 1, 2);
    let mut pool = PuPool::new(&topology, &CpuSet::new());
    let (a, b): (JobId, JobId) = ("a".parse().unwrap(), "b".parse().unwrap());
    pool.set_online(&"0".parse().unwrap());
    let offer = allocate(&a, &JobRequest::with_core_count(1), &pool, &topology, &Policy::default()).unwrap();
    pool.commit(&a, &offer).unwrap();
    pool.set_online(&"1".parse().unwrap());
    assert!(allocate(&b, &JobRequest::with_core_count(1), &pool, &topology, &Policy::default()).is_err());
}
