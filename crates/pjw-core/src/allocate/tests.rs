//! The allocator's properties, on machines and request streams that chance makes, and on every short stream.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::topology::Regular;

fn job(n: usize) -> JobId {
    format!("manual:{n}").parse().unwrap()
}

fn shape(
    packages: u32,
    numa_per_package: u32,
    l3_per_numa: u32,
    cores_per_l3: u32,
    pus_per_core: u32,
) -> Topology {
    Topology::regular(Regular { packages, numa_per_package, l3_per_numa, cores_per_l3, pus_per_core })
}

struct Bench {
    topology: Topology,
    pool: Pool,
    policy: Policy,
}

impl Bench {
    fn new(topology: Topology, housekeeping: &str) -> Self {
        let pool = Pool::new(&topology, &housekeeping.parse().unwrap());
        Self { topology, pool, policy: Policy::default() }
    }

    fn ask(&mut self, n: usize, request: &Request) -> Result<Offer, Refusal> {
        let offer = allocate(&job(n), request, &self.pool, &self.topology, &self.policy)?;
        self.pool.commit(&job(n), &offer).unwrap();
        Ok(offer)
    }

    fn cores(&mut self, n: usize, cores: u32) -> String {
        match self.ask(n, &Request::cores(cores)) {
            Ok(offer) => offer.cpus.to_string(),
            Err(refusal) => format!("{refusal}"),
        }
    }
}

#[test]
fn the_smallest_hole_that_holds_the_request_is_taken() {
    let mut bench = Bench::new(shape(2, 1, 2, 4, 1), "");
    assert_eq!(bench.cores(1, 3), "0-2");
    assert_eq!(bench.cores(2, 4), "4-7", "a whole L3 beside, not the rest and a bit");
    assert_eq!(bench.cores(3, 1), "3", "the hole of one is filled first");
    assert_eq!(bench.cores(4, 6), "8-13");
    assert_eq!(
        bench.cores(5, 3),
        "3 cores were asked for and 2 are free (14-15); the largest request that fits now is 2, \
         2 within one L3: ask for fewer, or release a job first (pjwctl jobs shows who holds what)"
    );
}

#[test]
fn a_small_l3_beats_a_package_that_would_fit_more_tightly() {
    let mut bench = Bench::new(shape(2, 1, 2, 4, 1), "0-1,4-5");
    assert_eq!(bench.cores(1, 4), "8-11", "package 0 has just 4 left, but in two L3s");
}

#[test]
fn whole_cores_with_both_siblings() {
    let mut bench = Bench::new(shape(1, 1, 1, 4, 2), "");
    assert_eq!(bench.cores(1, 2), "0-1,4-5");
    let pus = Request { amount: Amount::Pus(3), ..Request::cores(1) };
    assert_eq!(bench.ask(2, &pus).unwrap().cpus.to_string(), "2-3,6-7", "three PUs are two cores of two");
}

#[test]
fn siblings_may_serve_two_jobs_only_where_the_policy_says() {
    let mut bench = Bench::new(shape(1, 1, 1, 2, 2), "");
    bench.policy.share_smt = true;
    let pus = |n| Request { amount: Amount::Pus(n), ..Request::cores(1) };
    assert_eq!(bench.ask(1, &pus(3)).unwrap().cpus.len(), 3);
    assert_eq!(bench.ask(2, &pus(1)).unwrap().cpus.len(), 1);
    assert!(bench.pool.free().is_empty());
}

#[test]
fn a_request_that_no_domain_holds_gets_the_fewest() {
    let mut bench = Bench::new(shape(2, 1, 2, 4, 1), "");
    let offer = bench.ask(1, &Request::cores(10)).unwrap();
    assert_eq!(offer.cpus.to_string(), "0-9");
    assert!(
        offer
            .because
            .iter()
            .any(|line| line == "no package has 10 free cores; the largest hole is 8 on package 0"),
        "{offer:#?}"
    );
}

#[test]
fn the_second_best_is_named() {
    let mut bench = Bench::new(shape(1, 1, 3, 4, 1), "0-1");
    let offer = bench.ask(1, &Request::cores(2)).unwrap();
    assert_eq!(offer.because, ["L3#0 has 2 free cores; 2-3 leave 0"]);
    assert_eq!(offer.runner_up, "L3#1, which would be left with 2 free cores");
}

#[test]
fn growing_keeps_what_is_held_and_stays_near_shrinking_keeps_a_part_of_it() {
    let mut bench = Bench::new(shape(2, 1, 2, 4, 1), "");
    assert_eq!(bench.cores(1, 2), "0-1");
    assert_eq!(bench.cores(2, 2), "2-3");
    assert_eq!(bench.cores(1, 4), "0-1,4-5", "the same package, not the other one");
    assert_eq!(bench.cores(1, 4), "0-1,4-5");
    assert_eq!(bench.cores(1, 1), "0");
}

#[test]
fn spreading_uses_every_domain_evenly() {
    let mut bench = Bench::new(shape(2, 1, 2, 4, 1), "");
    let spread = Request { placement: Placement::Spread, ..Request::cores(4) };
    assert_eq!(bench.ask(1, &spread).unwrap().cpus.to_string(), "0,4,8,12");
}

#[test]
fn one_core_kind_where_there_are_enough_of_one() {
    let cores =
        (0..6).map(|n| crate::topology::Core { pus: crate::cpuset::Pu(n).into(), kind: u32::from(n >= 4) });
    let mut bench = Bench::new(Topology::new(cores.collect(), Vec::new()).unwrap(), "");
    assert_eq!(bench.cores(1, 2), "4-5", "the two fast ones");
    assert_eq!(bench.cores(2, 3), "0-2");
}

#[test]
fn an_offline_pu_is_nobodys() {
    let mut bench = Bench::new(shape(1, 1, 1, 4, 1), "");
    bench.pool.set_online(&"0,2-3".parse().unwrap());
    assert_eq!(bench.cores(1, 3), "0,2-3");
}

#[test]
fn explicit_lists_are_refused_for_what_is_wrong_with_them() {
    let mut bench = Bench::new(shape(1, 1, 1, 4, 2), "0,4");
    let exactly =
        |list: &str| Request { amount: Amount::Exactly(list.parse().unwrap()), ..Request::cores(1) };
    for (list, expected) in [
        ("", "the CPU list is empty"),
        ("7-9", "PUs 8-9 are not on this machine"),
        ("0,4", "PUs 0,4 are kept for housekeeping"),
        ("1-2,6", "PU 1 shares its core with 5"),
    ] {
        let refusal = bench.ask(1, &exactly(list)).unwrap_err().to_string();
        assert!(refusal.starts_with(expected), "{list}: {refusal}");
    }
    assert_eq!(bench.ask(1, &exactly("1,5")).unwrap().cpus.to_string(), "1,5");
}

#[test]
fn eight_thousand_pus_are_as_good_as_eight() {
    let mut bench = Bench::new(shape(8, 4, 16, 8, 2), "0,4096");
    assert_eq!(bench.topology.cpus().len(), 8192);
    let offer = bench.ask(1, &Request::cores(8)).unwrap();
    assert_eq!(offer.cpus.len(), 16);
    assert_eq!(bench.cores(2, 4095 - 8).parse::<CpuSet>().unwrap().len(), 2 * (4095 - 8));
    assert!(bench.pool.free().is_empty());
    assert_eq!(bench.pool.of(&job(1)), offer.cpus);
    bench.pool.release(&job(2));
    assert_eq!(
        fits(&bench.pool, &bench.topology),
        Fits { l3: 8, numa_node: 128, package: 512, machine: 4087 }
    );
}

/// Every sequence of up to six requests (sizes 1 to 3, or a release of the oldest) on a 2x2x2 machine.
#[test]
fn every_short_stream_keeps_the_ledger_whole() {
    for code in 0..4u32.pow(6) {
        let mut bench = Bench::new(shape(2, 1, 1, 2, 2), "");
        let mut alive: Vec<usize> = Vec::new();
        for step in 0..6 {
            let choice = code / 4u32.pow(step) % 4;
            if choice == 0 {
                if !alive.is_empty() {
                    bench.pool.release(&job(alive.remove(0)));
                }
            } else if bench.ask(step as usize, &Request::cores(choice)).is_ok() {
                alive.push(step as usize);
            }
            let held: usize = alive.iter().map(|&n| bench.pool.of(&job(n)).len()).sum();
            assert_eq!(held + bench.pool.free().len(), 8, "stream {code}");
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Ask(u32, Placement),
    Resize(usize, u32),
    Release(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    let placement = prop_oneof![Just(Placement::Pack), Just(Placement::Spread)];
    prop_oneof![
        3 => (1u32..12, placement).prop_map(|(n, placement)| Step::Ask(n, placement)),
        1 => (0usize..8, 1u32..12).prop_map(|(n, cores)| Step::Resize(n, cores)),
        2 => (0usize..8).prop_map(Step::Release),
    ]
}

fn any_machine() -> impl Strategy<Value = Topology> {
    let regular =
        (1u32..4, 1u32..3, 1u32..4, 1u32..6, 1u32..4).prop_map(|(p, n, l, c, t)| shape(p, n, l, c, t));
    // Cores of one to three PUs, some in no L3, nodes of unequal size.
    let odd = proptest::collection::vec((1u32..4, 0u32..5, 0u32..3), 1..24).prop_map(|cores| {
        let mut next = 0;
        let mut l3: BTreeMap<u32, CpuSet> = BTreeMap::new();
        let mut nodes: BTreeMap<u32, CpuSet> = BTreeMap::new();
        let list = cores
            .into_iter()
            .map(|(pus, cache, node)| {
                let pus: CpuSet = (next..next + pus).map(crate::cpuset::Pu).collect();
                next += 4;
                if cache > 0 {
                    l3.entry(node * 10 + cache).or_default().extend(pus.iter());
                }
                nodes.entry(node).or_default().extend(pus.iter());
                crate::topology::Core { pus, kind: 0 }
            })
            .collect();
        let domain =
            |level| move |(number, cpus)| crate::topology::Domain { level, number, cpus, memory_bytes: 0 };
        let domains =
            l3.into_iter().map(domain(Level::L3)).chain(nodes.into_iter().map(domain(Level::NumaNode)));
        Topology::new(list, domains.collect()).unwrap()
    });
    prop_oneof![regular, odd]
}

fn domains_of(topology: &Topology, level: Level, cpus: &CpuSet) -> usize {
    topology.domains(level).filter(|domain| domain.cpus.intersects(cpus)).count()
}

proptest! {
    #[test]
    fn grants_are_disjoint_exact_whole_and_given_back(
        topology in any_machine(),
        keep in any::<bool>(),
        steps in proptest::collection::vec(any_step(), 1..40),
    ) {
        let housekeeping = if keep { topology.cores()[0].pus.clone() } else { CpuSet::new() };
        let run = || {
            let mut bench = Bench::new(topology.clone(), &housekeeping.to_string());
            let mut alive: Vec<usize> = Vec::new();
            let mut trace = Vec::new();
            for (at, step) in steps.iter().enumerate() {
                let (who, cores, placement) = match step {
                    Step::Release(n) => {
                        if !alive.is_empty() {
                            bench.pool.release(&job(alive.remove(n % alive.len())));
                        }
                        continue;
                    }
                    Step::Ask(cores, placement) => (at, *cores, *placement),
                    Step::Resize(n, cores) if !alive.is_empty() => (alive[n % alive.len()], *cores, Placement::Pack),
                    Step::Resize(..) => continue,
                };
                let free_before = bench.pool.free();
                let held_before = bench.pool.of(&job(who));
                let request = Request { placement, ..Request::cores(cores) };
                let Ok(offer) = bench.ask(who, &request) else {
                    assert!(bench.topology.whole_cores_in(&free_before.union(&held_before)) < cores);
                    continue;
                };
                assert_eq!(bench.topology.whole_cores_in(&offer.cpus), cores);
                assert_eq!(bench.pool.of(&job(who)), offer.cpus);
                assert!(offer.cpus.is_subset(&free_before.union(&held_before)));
                assert!(!offer.cpus.intersects(&housekeeping));
                for core in bench.topology.cores() {
                    assert!(!core.pus.intersects(&offer.cpus) || core.pus.is_subset(&offer.cpus));
                }
                let kept = bench.topology.whole_cores_in(&held_before).min(cores);
                assert!(bench.topology.whole_cores_in(&held_before.intersection(&offer.cpus)) == kept);
                if placement == Placement::Pack && held_before.is_empty() {
                    for level in [Level::L3, Level::NumaNode, Level::Package] {
                        let fits_one = bench.topology.domains(level).any(|domain| {
                            bench.topology.whole_cores_in(&domain.cpus.intersection(&free_before)) >= cores
                        });
                        assert!(!fits_one || domains_of(&bench.topology, level, &offer.cpus) <= 1);
                    }
                }
                trace.push(offer);
                if !alive.contains(&who) {
                    alive.push(who);
                }
            }
            for n in alive {
                bench.pool.release(&job(n));
            }
            assert_eq!(bench.pool.free(), bench.topology.cpus().difference(&housekeeping));
            trace
        };
        prop_assert_eq!(run(), run(), "the same stream gives the same grants");
    }
}
