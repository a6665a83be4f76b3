//! The checker against an exhaustive search on small machines, and the allocator against the checker.

use std::collections::BTreeMap;

use pjw_core::cpuset::Pu;
use pjw_core::job::Placement;
use pjw_core::topology::{Core, TopologyDomain};
use proptest::prelude::*;

use super::*;
use pjw_sim::replay::{CoreChooser, ReplayOptions, replay};
use pjw_sim::swf::{JobLog, LoggedJob};

/// A machine of L3s, each with a number of cores, in one of three nodes or packages of one of three others. `shape`
/// decides whether the larger domains are packages or NUMA nodes, or whether the L3s span the nodes.
fn machine(shape: u8, leaves: &[(u32, u32, u32)]) -> Topology {
    let (outer, inner, leaf) = match shape {
        0 => (TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3),
        1 => (TopologyLevel::NumaNode, TopologyLevel::Package, TopologyLevel::L3),
        _ => (TopologyLevel::Package, TopologyLevel::L3, TopologyLevel::NumaNode),
    };
    let mut cores = Vec::new();
    let mut domains: BTreeMap<(TopologyLevel, u32), CpuSet> = BTreeMap::new();
    let mut next = 0;
    for (number, &(around, middle, size)) in (0..).zip(leaves) {
        for _ in 0..size {
            let pus: CpuSet = [Pu(next), Pu(next + 1)].into_iter().collect();
            next += 2;
            for domain in [(outer, around), (inner, around * 3 + middle), (leaf, number)] {
                domains.entry(domain).or_default().extend(pus.iter());
            }
            cores.push(Core { pus, kind_index: 0 });
        }
    }
    let domain = |((level, number), cpus)| TopologyDomain { level, number, cpus, memory_bytes: 0 };
    Topology::new(cores, domains.into_iter().map(domain).collect()).unwrap()
}

fn any_machine() -> impl Strategy<Value = Topology> {
    let leaf = (0u32..3, 0u32..3, 1u32..6);
    (0u8..3, proptest::collection::vec(leaf, 1..9)).prop_map(|(shape, leaves)| machine(shape, &leaves))
}

/// The best of all sets of smallest domains that have `n` free cores together.
fn by_trying_everything(fewest_domains: &FewestDomains<'_>, n: usize, free: &CpuSet) -> Option<Vec<usize>> {
    let free_units: Vec<PuLocation> = fewest_domains
        .free_units(ProcessorUnit::Core, free)
        .iter()
        .map(|free_unit| free_unit.location)
        .collect();
    let path = |location: &PuLocation| {
        fewest_domains.levels.iter().map(|&level| location.domain_index(level)).collect::<Vec<_>>()
    };
    let mut leaves: BTreeMap<Vec<Option<u32>>, usize> = BTreeMap::new();
    for free_unit in &free_units {
        *leaves.entry(path(free_unit)).or_default() += 1;
    }
    let leaves: Vec<_> = leaves.into_iter().collect();
    let domains_used = |set: u32| {
        let inside = leaves.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, leaf)| leaf);
        let enough = inside.clone().map(|(_, size)| size).sum::<usize>() >= n;
        let count = |depth: usize| {
            let mut domains: Vec<_> = inside.clone().map(|(path, _)| path[depth]).collect();
            domains.sort_unstable();
            domains.dedup();
            domains.len()
        };
        enough.then(|| (0..fewest_domains.levels.len()).map(count).collect::<Vec<_>>())
    };
    (0..1u32 << leaves.len()).filter_map(domains_used).min()
}

fn counts(fewest_domains: &FewestDomains<'_>, domains_used: LocalityCounts) -> Vec<usize> {
    let count = |level: &TopologyLevel| match level {
        TopologyLevel::L3 => domains_used.l3_caches,
        TopologyLevel::NumaNode => domains_used.numa_nodes,
        TopologyLevel::Package | TopologyLevel::Machine => domains_used.packages,
    };
    fewest_domains.levels.iter().map(|level| count(level) as usize).collect()
}

fn jobs(jobs: &[(u64, u64, u32)]) -> JobLog {
    let job = |(number, &(submit_s, run_s, processors))| LoggedJob { number, submit_s, run_s, processors };
    let mut jobs: Vec<LoggedJob> = (1..).zip(jobs).map(job).collect();
    jobs.sort_by_key(|job| job.submit_s);
    JobLog { jobs, skipped_jobs: 0 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn the_result_equals_that_of_an_exhaustive_search(
        topology in any_machine(),
        taken in proptest::collection::vec(any::<bool>(), 40),
        n in 1u32..24,
    ) {
        let fewest_domains = FewestDomains::new(&topology).unwrap();
        let cores = topology.cores().iter().zip(taken.iter());
        let free: CpuSet =
            cores.filter(|(_, taken)| !**taken).flat_map(|(core, _)| core.pus.iter().collect::<Vec<_>>()).collect();
        let found = fewest_domains.of(n, ProcessorUnit::Core, &free).map(|domains_used| counts(&fewest_domains, domains_used));
        prop_assert_eq!(found, by_trying_everything(&fewest_domains, n as usize, &free));
    }

    #[test]
    fn every_grant_of_pack_uses_the_fewest_domains(
        topology in any_machine(),
        log in proptest::collection::vec((0u64..60, 0u64..40, 1u32..14), 1..40),
        by_pu in any::<bool>(),
    ) {
        let fewest_domains = FewestDomains::new(&topology).unwrap();
        let unit = if by_pu { ProcessorUnit::Pu } else { ProcessorUnit::Core };
        let rules = ReplayOptions { unit, chooser: CoreChooser::Allocator(Placement::Pack), housekeeping_cpus: CpuSet::new() };
        let mut wrong = Vec::new();
        replay(&topology, &jobs(&log), &rules, |turn| {
            let free = turn.holders_before.free_cpus();
            let best = fewest_domains.of(turn.job.processors, unit, &free);
            let got = turn.cpus.map(|cpus| LocalityCounts { split_cores: 0, ..fewest_domains.locality.domains_used(cpus) });
            if got != best {
                wrong.push(format!("{} of {free}: {got:?}, not {best:?}", turn.job.processors));
            }
        });
        prop_assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

#[test]
fn levels_are_ordered_as_they_nest() {
    let leaves = [(0, 0, 2), (0, 0, 2), (0, 1, 4), (1, 0, 3)];
    for (shape, levels) in [
        (0, [TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3]),
        (1, [TopologyLevel::NumaNode, TopologyLevel::Package, TopologyLevel::L3]),
        (2, [TopologyLevel::Package, TopologyLevel::L3, TopologyLevel::NumaNode]),
    ] {
        assert_eq!(FewestDomains::new(&machine(shape, &leaves)).unwrap().levels, levels);
    }
}

#[test]
fn domains_that_cross_have_no_minimum() {
    let cores = (0..4).map(|n| Core { pus: Pu(n).into(), kind_index: 0 }).collect();
    let domain = |level, number, cpus: &str| TopologyDomain {
        level,
        number,
        cpus: cpus.parse().unwrap(),
        memory_bytes: 0,
    };
    let domains = vec![
        domain(TopologyLevel::L3, 0, "1-2"),
        domain(TopologyLevel::Package, 0, "0-1"),
        domain(TopologyLevel::Package, 1, "2-3"),
    ];
    assert!(FewestDomains::new(&Topology::new(cores, domains).unwrap()).is_none());
}

#[test]
fn one_kind_of_core_comes_before_few_domains() {
    let core = |n, kind| Core { pus: Pu(n).into(), kind_index: kind };
    let domain = |number, cpus: &str| TopologyDomain {
        level: TopologyLevel::L3,
        number,
        cpus: cpus.parse().unwrap(),
        memory_bytes: 0,
    };
    let cores = vec![core(0, 1), core(1, 0), core(2, 0), core(3, 1)];
    let topology = Topology::new(cores, vec![domain(0, "0-1"), domain(1, "2-3")]).unwrap();
    let fewest_domains = FewestDomains::new(&topology).unwrap();
    let l3 = |n, free: &str| {
        fewest_domains
            .of(n, ProcessorUnit::Core, &free.parse().unwrap())
            .map(|domains_used| domains_used.l3_caches)
    };
    assert_eq!(l3(2, "0-3"), Some(2));
    assert_eq!(l3(2, "0-1"), Some(1));
    assert_eq!(l3(3, "0-1"), None);
}
