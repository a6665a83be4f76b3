//! Properties of the allocator, on random machines and request sequences, and on every short sequence.

use std::collections::BTreeMap;
use std::string::ToString;
use std::vec::Vec;

use proptest::prelude::*;

use super::tests::Bench;
use super::*;
use crate::basics::cpuset::Pu;
use crate::machine::topology::Core;
use crate::machine::topology::TopologyDomain;
use crate::testing::{numbered_job, regular_topology};

/// Every sequence of up to six steps on a 2x2x2 machine: requests of one to three cores, and the release of
/// any job that is alive.
#[test]
fn every_short_sequence_keeps_the_pool_valid() {
    let bench = Bench::new(regular_topology(2, 1, 1, 2, 2), "");
    assert!(check_every_sequence(&bench, &[], 0) > 3usize.pow(6), "each step has three requests at least");
}

/// Checks every sequence of further steps, and returns the number of sequences. `alive` has the numbers of the jobs
/// that hold cores. `step` is the number of steps so far.
fn check_every_sequence(bench: &Bench, alive: &[usize], step: usize) -> usize {
    if step == 6 {
        return 1;
    }
    let mut sequence_count = 1;
    for cores in 1..=3 {
        let mut next = bench.clone();
        let free = next.topology.whole_core_count(&next.pool.free_cpus());
        let package_fits =
            holes(&next.topology, TopologyLevel::Package, &next.pool.free_cpus()).iter().any(|&n| n >= cores);
        match next.ask(step, &JobRequest::with_core_count(cores)) {
            Ok(offer) => {
                check_whole_cores(&next.topology, &offer.cpus, cores);
                assert!(
                    !package_fits || domains_used(&next.topology, TopologyLevel::Package, &offer.cpus) == 1
                );
                assert_eq!(next.topology.whole_core_count(&next.pool.free_cpus()), free - cores);
                sequence_count += check_every_sequence(&next, &[alive, &[step]].concat(), step + 1);
            }
            Err(refusal) => {
                let (requested, free_cpus) = (cores, next.pool.free_cpus());
                let max_cores_in_one_l3 = largest_requests(&next.pool, &next.topology).l3;
                let unit = CpuUnit::Core;
                assert_eq!(
                    refusal,
                    Refusal::NotEnoughCores {
                        unit,
                        requested,
                        free,
                        free_cpus,
                        held: 0,
                        max_cores_in_one_l3
                    }
                );
                assert!(free < cores);
                sequence_count += check_every_sequence(&next, alive, step + 1);
            }
        }
    }
    for (index, &released) in alive.iter().enumerate() {
        let mut next = bench.clone();
        let held = next.pool.release(&numbered_job(released));
        assert!(!held.is_empty() && held.is_subset(&next.pool.free_cpus()));
        sequence_count +=
            check_every_sequence(&next, &[&alive[..index], &alive[index + 1..]].concat(), step + 1);
    }
    sequence_count
}

/// Checks that `cpus` are exactly `cores` whole cores.
fn check_whole_cores(topology: &Topology, cpus: &CpuSet, cores: u32) {
    assert_eq!(topology.whole_core_count(cpus), cores);
    let split = topology.cores().iter().find(|core| core.pus.intersects(cpus) && !core.pus.is_subset(cpus));
    assert_eq!(split, None, "a core is split by {cpus}");
}

fn domains_used(topology: &Topology, level: TopologyLevel, cpus: &CpuSet) -> usize {
    topology.domains(level).filter(|domain| domain.cpus.intersects(cpus)).count()
}

/// Returns the number of free whole cores in each domain of the level.
fn holes(topology: &Topology, level: TopologyLevel, free: &CpuSet) -> Vec<u32> {
    let domains = topology.domains(level);
    domains.map(|domain| topology.whole_core_count(&domain.cpus.intersection(free))).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Ask(JobRequest),
    Resize(usize, JobRequest),
    Release(usize),
}

fn any_request() -> impl Strategy<Value = JobRequest> {
    let amount =
        prop_oneof![3 => (1u32..12).prop_map(CpuRequest::Cores), 1 => (1u32..20).prop_map(CpuRequest::Pus)];
    let placement = prop_oneof![2 => Just(Placement::Pack), 1 => Just(Placement::Spread)];
    (amount, placement).prop_map(|(cpu_request, placement)| JobRequest {
        cpu_request,
        placement,
        ..JobRequest::with_core_count(1)
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any_request().prop_map(Step::Ask),
        1 => (0usize..8, any_request()).prop_map(|(n, request)| Step::Resize(n, request)),
        2 => (0usize..8).prop_map(Step::Release),
    ]
}

fn regular_machine() -> impl Strategy<Value = Topology> {
    (1u32..4, 1u32..3, 1u32..4, 1u32..6, 1u32..4).prop_map(|(p, n, l, c, t)| regular_topology(p, n, l, c, t))
}

/// Cores of one to three PUs and of two kinds. If `nested`, L3s lie in NUMA nodes and these in packages; else
/// the domains of a core are independent of each other. Some cores are in no L3, some in no node.
fn irregular_machine(nested: bool) -> impl Strategy<Value = Topology> {
    let core = (1u32..4, 0u32..2, 0u32..4, 0u32..3, 0u32..3);
    proptest::collection::vec(core, 1..24).prop_map(move |cores| {
        let mut domains: BTreeMap<(TopologyLevel, u32), CpuSet> = BTreeMap::new();
        let mut list = Vec::new();
        for (first, (count, kind, l3, node, package)) in (0..).step_by(4).zip(cores) {
            let pus: CpuSet = (first..first + count).map(Pu).collect();
            let node_number = if nested { package * 10 + node } else { node };
            let l3_number = if nested { node_number * 10 + l3 } else { l3 };
            let mut add = |level, number| domains.entry((level, number)).or_default().extend(pus.iter());
            add(TopologyLevel::Package, package);
            if node > 0 {
                add(TopologyLevel::NumaNode, node_number);
            }
            if l3 > 0 && (node > 0 || !nested) {
                add(TopologyLevel::L3, l3_number);
            }
            list.push(Core { pus, kind_index: kind });
        }
        let domain = |((level, number), cpus)| TopologyDomain { level, number, cpus, memory_bytes: 0 };
        Topology::new(list, domains.into_iter().map(domain).collect()).unwrap()
    })
}

/// The same machine with cores of one kind.
fn with_one_kind(topology: &Topology) -> Topology {
    let cores = topology.cores().iter().map(|core| Core { kind_index: 0, ..core.clone() }).collect();
    let domains = [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package]
        .into_iter()
        .flat_map(|l| topology.domains(l).cloned());
    Topology::new(cores, domains.collect()).unwrap()
}

fn any_machine() -> impl Strategy<Value = Topology> {
    prop_oneof![regular_machine(), irregular_machine(true), irregular_machine(false)]
}

/// Runs a sequence of steps, checks the result of every request, and returns all results.
fn run(mut bench: Bench, steps: &[Step]) -> Vec<Result<PuOffer, Refusal>> {
    let usable = bench.pool.free_cpus();
    let mut alive: Vec<usize> = Vec::new();
    let mut results = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let (job, request) = match step {
            Step::Release(n) => {
                if !alive.is_empty() {
                    bench.pool.release(&numbered_job(alive.remove(n % alive.len())));
                }
                continue;
            }
            Step::Ask(request) => (index, request),
            Step::Resize(n, request) if !alive.is_empty() => (alive[n % alive.len()], request),
            Step::Resize(..) => continue,
        };
        let held = bench.pool.pus_of(&numbered_job(job));
        let grants_before: Vec<(usize, CpuSet)> =
            alive.iter().map(|&n| (n, bench.pool.pus_of(&numbered_job(n)))).collect();
        let available = bench.pool.free_cpus().union(&held);
        let result = bench.ask(job, request);
        match &result {
            Ok(offer) => {
                assert!(offer.cpus.is_subset(&available) && offer.cpus.is_subset(&usable), "{offer:?}");
                assert_eq!(bench.pool.pus_of(&numbered_job(job)), offer.cpus);
                let is_unchanged = |(other, cpus): &(usize, CpuSet)| {
                    *other == job || bench.pool.pus_of(&numbered_job(*other)) == *cpus
                };
                assert!(grants_before.iter().all(is_unchanged));
                check_amount(&bench, request, &offer.cpus, &held, &available);
                assert_eq!(bench.ask(job, request).unwrap().cpus, offer.cpus, "the same request again");
                if !alive.contains(&job) {
                    alive.push(job);
                }
            }
            Err(_) => check_refusal(&bench, request, &available),
        }
        results.push(result);
    }
    for n in alive {
        bench.pool.release(&numbered_job(n));
    }
    assert_eq!(bench.pool.free_cpus(), usable, "all is given back");
    results
}

/// Checks the PUs `cpus` that a job got for `request`: their number, and that the job kept what it could of `held`.
/// `available` has the PUs that were free or that the job held.
fn check_amount(bench: &Bench, request: &JobRequest, cpus: &CpuSet, held: &CpuSet, available: &CpuSet) {
    let topology = &bench.topology;
    let kept = held.intersection(cpus);
    match request.cpu_request {
        CpuRequest::Cores(n) => {
            check_whole_cores(topology, cpus, n);
            // A core of which another job has a part (share_smt) can't be kept as a whole one.
            let keepable = topology.cores().iter().filter(|core| core.pus.is_subset(available));
            let before = keepable.filter(|core| core.pus.intersects(held)).count();
            let after = topology.cores().iter().filter(|core| core.pus.intersects(&kept)).count();
            assert_eq!(after, before.min(n as usize), "{held} became {cpus}");
        }
        CpuRequest::Pus(n) if bench.policy.share_smt => {
            assert_eq!(cpus.len(), n as usize);
            assert_eq!(kept.len(), held.len().min(n as usize), "{held} became {cpus}");
        }
        CpuRequest::Pus(n) => {
            check_whole_cores(topology, cpus, topology.whole_core_count(cpus));
            assert!(cpus.len() >= n as usize);
            let given = topology.cores().iter().filter(|core| core.pus.is_subset(cpus));
            let mut new = given.filter(|core| !core.pus.intersects(held));
            let needless = new.find(|core| cpus.len() - core.pus.len() >= n as usize);
            assert_eq!(needless, None, "{n} PUs are in {cpus} without it");
        }
        CpuRequest::Exactly(_) => unreachable!("streams ask for numbers"),
    }
}

/// Checks that the PUs `available` are in fact too few for the refused request.
fn check_refusal(bench: &Bench, request: &JobRequest, available: &CpuSet) {
    let whole = bench.topology.cores().iter().filter(|core| core.pus.is_subset(available));
    match request.cpu_request {
        CpuRequest::Cores(n) => assert!(whole.count() < n as usize),
        CpuRequest::Pus(n) if bench.policy.share_smt => assert!(available.len() < n as usize),
        CpuRequest::Pus(n) => assert!(whole.map(|core| core.pus.len()).sum::<usize>() < n as usize),
        CpuRequest::Exactly(_) => unreachable!("streams ask for numbers"),
    }
}

/// Returns the PUs of the cores that `is_selected` selects. Further cores are not selected.
fn selected_cores(topology: &Topology, is_selected: &[bool]) -> CpuSet {
    let cores = topology.cores().iter().zip(is_selected.iter().chain(std::iter::repeat(&false)));
    let selected = cores.filter(|(_, is_selected)| **is_selected);
    selected.flat_map(|(core, _)| core.pus.iter().collect::<Vec<_>>()).collect()
}

/// The number of cores of which `cpus` has at least one PU.
fn core_count(topology: &Topology, cpus: &CpuSet) -> usize {
    topology.cores().iter().filter(|core| core.pus.intersects(cpus)).count()
}

/// Returns the PUs that the job 1 has after `request`. The job held the PUs `held` before. Each of `groups` has some of
/// these.
fn resize(topology: &Topology, held: &CpuSet, groups: &[CpuSet], request: &JobRequest) -> Option<CpuSet> {
    let mut bench = Bench::new(topology.clone(), "");
    bench.pool.grant_available(&numbered_job(1), held);
    let offer =
        allocate_for_groups(&numbered_job(1), request, &bench.pool, topology, &bench.policy, groups).ok()?;
    Some(offer.cpus)
}

#[test]
fn two_groups_fit_into_a_request_for_an_odd_number_of_pus() {
    // Two NUMA nodes of four cores of two PUs. Core 0 has the PUs 0 and 8.
    let topology = regular_topology(2, 1, 1, 4, 2);
    let groups: [CpuSet; 2] = ["0-1", "4-5"].map(|list| list.parse().unwrap());
    let request = JobRequest { cpu_request: CpuRequest::Pus(7), ..JobRequest::with_core_count(1) };
    let cpus = resize(&topology, topology.cpus(), &groups, &request).unwrap();
    assert_eq!(cpus.to_string(), "0-1,4-5,8-9,12-13");
}

proptest! {
    #[test]
    fn a_resize_divides_a_group_only_if_there_is_no_room_for_it_beside_the_groups_that_stay_whole(
        (topology, counts_pus) in prop_oneof![
            (regular_machine(), any::<bool>()),
            (irregular_machine(true), Just(false)),
        ],
        held in proptest::collection::vec(any::<bool>(), 24),
        cores_of_groups in proptest::collection::vec(
            (any::<proptest::sample::Index>(), proptest::collection::vec(any::<bool>(), 24)), 1..4,
        ),
        amount in 1u32..24,
        placement in prop_oneof![Just(Placement::Pack), Just(Placement::Spread)],
    ) {
        let topology = with_one_kind(&topology);
        let held = selected_cores(&topology, &held);
        let levels = [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter();
        let domains: Vec<&CpuSet> =
            levels.flat_map(|level| topology.domains(level)).map(|domain| &domain.cpus).collect();
        if domains.is_empty() {
            return Ok(());
        }
        // Some cores that the job holds in one L3 cache or NUMA node.
        let group = |(domain, cores): &(proptest::sample::Index, Vec<bool>)| {
            let domain = domains[domain.index(domains.len())];
            selected_cores(&topology, cores).intersection(&held).intersection(domain)
        };
        let groups: Vec<CpuSet> =
            cores_of_groups.iter().map(group).filter(|group| !group.is_empty()).collect();
        let cpu_request = if counts_pus { CpuRequest::Pus(amount) } else { CpuRequest::Cores(amount) };
        let request = JobRequest { cpu_request, placement, ..JobRequest::with_core_count(1) };
        let Some(cpus) = resize(&topology, &held, &groups, &request) else { return Ok(()) };
        let pus_per_unit = if counts_pus { topology.cores()[0].pus.len() } else { 1 };
        let cores = (amount as usize).div_ceil(pus_per_unit);
        let (whole, divided): (Vec<&CpuSet>, Vec<&CpuSet>) =
            groups.iter().partition(|group| group.is_subset(&cpus));
        for group in divided {
            let needed: CpuSet = whole.iter().copied().chain([group]).flat_map(CpuSet::iter).collect();
            prop_assert!(core_count(&topology, &needed) > cores, "{group} of {groups:?} is not in {cpus}");
        }
    }

    #[test]
    fn grants_are_disjoint_exact_whole_stable_and_given_back(
        topology in any_machine(),
        housekeeping in proptest::collection::vec(any::<bool>(), 0..3),
        share_smt in any::<bool>(),
        steps in proptest::collection::vec(any_step(), 1..30),
    ) {
        let mut bench = Bench::new(topology.clone(), &selected_cores(&topology, &housekeeping).to_string());
        bench.policy.share_smt = share_smt;
        let first = run(bench.clone(), &steps);
        prop_assert_eq!(run(bench, &steps), first, "the same stream gives the same grants");
    }

    #[test]
    fn a_request_that_one_domain_holds_gets_one_domain_of_every_level(
        topology in prop_oneof![regular_machine(), irregular_machine(true)],
        taken in proptest::collection::vec(any::<bool>(), 24),
        cores in 1u32..12,
    ) {
        let mut bench = Bench::new(with_one_kind(&topology), &selected_cores(&topology, &taken).to_string());
        let free = bench.pool.free_cpus();
        if let Ok(offer) = bench.ask(1, &JobRequest::with_core_count(cores)) {
            for level in [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package] {
                let fits = holes(&topology, level, &free).iter().any(|&hole| hole >= cores);
                prop_assert!(!fits || domains_used(&topology, level, &offer.cpus) <= 1, "{level}: {offer:?}");
            }
        }
    }

    #[test]
    fn among_the_smallest_sufficient_domains_the_fullest_is_taken(
        topology in regular_machine(),
        taken in proptest::collection::vec(any::<bool>(), 24),
        cores in 1u32..12,
    ) {
        let mut bench = Bench::new(topology.clone(), &selected_cores(&topology, &taken).to_string());
        let free = bench.pool.free_cpus();
        if let Ok(offer) = bench.ask(1, &JobRequest::with_core_count(cores)) {
            let levels = [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package];
            let smallest = levels.into_iter().find_map(|level| {
                let sizes = holes(&topology, level, &free).into_iter();
                sizes.filter(|&size| size >= cores).min().map(|size| (level, size))
            });
            if let Some((level, size)) = smallest {
                let domain = topology.domains(level).find(|domain| offer.cpus.is_subset(&domain.cpus));
                let hole = domain.map(|domain| topology.whole_core_count(&domain.cpus.intersection(&free)));
                // A fuller domain is skipped only if the request would use more L3s or nodes there.
                let fuller = topology.domains(level).filter(|domain| {
                    let size = topology.whole_core_count(&domain.cpus.intersection(&free));
                    size >= cores && Some(size) < hole
                });
                let parts = |cpus: &CpuSet| (domains_used(&topology, TopologyLevel::NumaNode, cpus), domains_used(&topology, TopologyLevel::L3, cpus));
                for domain in fuller {
                    let elsewhere = topology.cpus().difference(&domain.cpus.intersection(&free));
                    let mut fuller_only = Bench::new(topology.clone(), &elsewhere.to_string());
                    let other = fuller_only.ask(1, &JobRequest::with_core_count(cores)).unwrap();
                    prop_assert!(parts(&other.cpus) > parts(&offer.cpus), "{other:?} {offer:?}");
                }
                prop_assert!(hole >= Some(size));
            }
        }
    }

    #[test]
    fn a_request_that_fits_into_one_domain_stays_in_one_domain_also_where_domains_are_not_nested(
        topology in irregular_machine(false),
        cores in 1u32..12,
    ) {
        let mut bench = Bench::new(with_one_kind(&topology), "");
        let free = bench.pool.free_cpus();
        if let Ok(offer) = bench.ask(1, &JobRequest::with_core_count(cores)) {
            // The smallest level with a domain that has enough free cores. The granted cores lie in one domain of this
            // level or of a smaller one. Cores without any domain of a smaller level are right too.
            let mut levels = topology.levels().iter().rev();
            let has_room = |level| holes(&topology, level, &free).iter().any(|&hole| hole >= cores);
            let smallest = levels.find(|&&level| has_room(level));
            let is_in_one_domain = smallest.is_none_or(|&level| {
                let index = topology.levels().iter().position(|&other| other == level).unwrap();
                topology.levels()[index..].iter().any(|&level| domains_used(&topology, level, &offer.cpus) <= 1)
            });
            prop_assert!(is_in_one_domain, "{offer:?}");
        }
    }

    #[test]
    fn a_request_that_no_package_holds_gets_the_fewest_packages(
        topology in prop_oneof![regular_machine(), irregular_machine(true)],
        taken in proptest::collection::vec(any::<bool>(), 24),
        cores in 1u32..24,
    ) {
        let mut bench = Bench::new(with_one_kind(&topology), &selected_cores(&topology, &taken).to_string());
        let mut sizes = holes(&topology, TopologyLevel::Package, &bench.pool.free_cpus());
        if let Ok(offer) = bench.ask(1, &JobRequest::with_core_count(cores)) {
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            let enough = (1..=sizes.len()).find(|&count| sizes[..count].iter().sum::<u32>() >= cores);
            prop_assert_eq!(Some(domains_used(&topology, TopologyLevel::Package, &offer.cpus)), enough);
        }
    }

    #[test]
    fn spreading_is_even_as_far_as_there_are_cores(
        topology in prop_oneof![regular_machine(), irregular_machine(true)],
        taken in proptest::collection::vec(any::<bool>(), 24),
        cores in 1u32..24,
    ) {
        let mut bench = Bench::new(with_one_kind(&topology), &selected_cores(&topology, &taken).to_string());
        let request = JobRequest { placement: Placement::Spread, ..JobRequest::with_core_count(cores) };
        if let Ok(offer) = bench.ask(1, &request) {
            let got = holes(&topology, TopologyLevel::Package, &offer.cpus);
            let left = holes(&topology, TopologyLevel::Package, &bench.pool.free_cpus());
            let largest = got.iter().copied().max().unwrap_or(0);
            for (got, left) in got.iter().zip(left) {
                prop_assert!(left == 0 || got + 1 >= largest, "{offer:?}");
            }
        }
    }

    #[test]
    fn sharing_takes_all_that_is_free_before_anything_else(
        topology in any_machine(),
        housekeeping in proptest::collection::vec(any::<bool>(), 0..3),
        taken in proptest::collection::vec(any::<bool>(), 24),
        cores in 1u32..12,
    ) {
        let mut bench = Bench::new(topology.clone(), &selected_cores(&topology, &housekeeping).to_string());
        bench.pool.grant_available(&numbered_job(1), &selected_cores(&topology, &taken));
        let free = bench.pool.free_cpus();
        let usable = topology.cpus().difference(&bench.pool.housekeeping_cpus());
        let held = [&bench.pool.pus_of(&numbered_job(1))].into_iter().collect();
        match allocate_shared(&numbered_job(2), &JobRequest::with_core_count(cores), &bench.pool, &held, &topology, &bench.policy) {
            Ok(offer) => {
                check_whole_cores(&topology, &offer.cpus, cores);
                prop_assert!(offer.cpus.is_subset(&usable));
                let free_cores = topology.whole_core_count(&free);
                let taken = topology.whole_core_count(&offer.cpus.intersection(&free));
                prop_assert_eq!(taken, free_cores.min(cores));
            }
            Err(refusal) => {
                let usable = topology.whole_core_count(&usable);
                prop_assert_eq!(refusal, Refusal::MoreThanMachine { unit: CpuUnit::Core, requested: cores, usable });
            }
        }
    }

    #[test]
    fn offline_pus_are_never_offered(
        topology in any_machine(),
        online in proptest::collection::vec(any::<bool>(), 96),
        request in any_request(),
        share_smt in any::<bool>(),
    ) {
        let is_online = |pu: &Pu| online.get(pu.0 as usize) != Some(&false);
        let online: CpuSet = topology.cpus().iter().filter(is_online).collect();
        let mut bench = Bench::new(topology, "");
        bench.policy.share_smt = share_smt;
        bench.pool.set_online(&online);
        if let Ok(offer) = bench.ask(1, &request) {
            prop_assert!(offer.cpus.is_subset(&online));
            prop_assert_eq!(bench.ask(1, &request).unwrap().cpus, offer.cpus);
        }
    }
}
