//! Logs of real jobs replayed on real machines, every grant judged by what was free at that moment; a curve of demand
//! replayed without and with lending.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a replay that can not be made is a failed test")]

use std::fs;
use std::path::Path;

use pjw_core::cpuset::CpuSet;
use pjw_core::job::Placement;
use pjw_core::policy::LendingPolicy;
use pjw_core::topology::Topology;
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_sim::demand::curve;
use pjw_sim::demand::replay::{DemandReplayOptions, DemandReplayResult, replay_demand};
use pjw_sim::locality::{LocalityCounts, PuLocations};
use pjw_sim::reference::ReferencePolicy;
use pjw_sim::replay::{CoreChooser, ProcessorUnit, ReplayOptions, replay};
use pjw_sim::swf::{JobLog, parse};

mod fewest_domains;

use fewest_domains::FewestDomains;

const NASA: &str = "NASA-iPSC-1993-first2000.swf";
const LCG: &str = "LCG-2005-one-site-first1000.swf";
const PACK: CoreChooser = CoreChooser::Allocator(Placement::Pack);

const MACHINES: [&str; 11] = [
    "16em64t-4s2c2t-offlines.xml",
    "20em64t-hybrid-1p6c2t+2ca4co1t.xml",
    "256ppc-8n8s4t.xml",
    "28intel64-2p2g7c-CoDgroups.xml",
    "32amd64-4s2n4c-cgroup2.xml",
    "64amd64-4s2n4ca2co.xml",
    "64intel64-fakeKNL-SNC4-hybrid.xml",
    "96em64t-4n4d3ca2co-pci.xml",
    "AMD-19h-Zen3-2xEpyc-7763.xml",
    "AMD-19h-Zen4-2xEpyc-9654.xml",
    "nvidiagpunumanodes.xml",
];

fn machine(name: &str) -> Topology {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/pjw-linux/tests/topologies");
    load_topology(TopologySource::Xml(&dir.join(name))).unwrap()
}

fn log(name: &str) -> JobLog {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(name);
    parse(&fs::read(path).unwrap()).unwrap()
}

/// The log as of a machine of this size: sizes in proportion but odd ones among them, and long enough to crowd it.
fn crowded(log: &JobLog, cores: usize) -> JobLog {
    let cores = u32::try_from(cores).unwrap();
    let mut log = log.clone();
    for job in &mut log.jobs {
        let odd = if job.processors > 4 { u32::try_from(job.number % 5).unwrap() } else { 0 };
        job.processors = (job.processors * cores).div_ceil(128) + odd;
        job.run_s *= 8;
    }
    log
}

/// Replays a log and fails at the first grants that are not the fewest domains; returns how many jobs were started.
fn check(name: &str, topology: &Topology, log: &JobLog, unit: ProcessorUnit, housekeeping: &str) -> usize {
    let (fewest_domains, locality) =
        (FewestDomains::new(topology).unwrap(), PuLocations::from_topology(topology));
    let kept: CpuSet = housekeeping.parse().unwrap();
    let rules = ReplayOptions { unit, chooser: PACK, housekeeping_cpus: kept.clone() };
    let mut wrong = Vec::new();
    let mut held = CpuSet::new();
    let done = replay(topology, log, &rules, |turn| {
        let (n, free) = (turn.job.processors, turn.holders_before.free_cpus());
        let got = turn.cpus.map(|cpus| LocalityCounts { split_cores: 0, ..locality.domains_used(cpus) });
        let best = fewest_domains.of(n, unit, &free);
        if got != best {
            wrong.push(format!("job {} of {n}, {free} free: {got:?}, not {best:?}", turn.job.number));
        }
        if let Some(cpus) = turn.cpus {
            let given = if unit == ProcessorUnit::Core {
                topology.whole_core_count(cpus) as usize
            } else {
                cpus.len()
            };
            assert_eq!(given, n as usize, "{name}: job {}", turn.job.number);
            assert!(cpus.is_subset(&free) && !cpus.intersects(&kept), "{name}: job {}", turn.job.number);
            held = held.union(cpus);
        }
    });
    assert!(
        wrong.is_empty(),
        "{name}, {unit:?}: {} of {}: {:#?}",
        wrong.len(),
        done.job_count(),
        &wrong[..1]
    );
    assert!(held.is_subset(&topology.cpus().difference(&kept)));
    done.started_jobs.len()
}

#[test]
fn every_grant_of_every_replay_is_on_the_fewest_domains() {
    let (nasa, lcg) = (log(NASA), log(LCG));
    assert_eq!((nasa.jobs.len(), lcg.jobs.len()), (2_000, 1_000));
    for name in MACHINES {
        let topology = machine(name);
        let scaled = crowded(&nasa, topology.cores().len());
        let started = [&nasa, &lcg, &scaled].map(|log| check(name, &topology, log, ProcessorUnit::Core, ""));
        assert!(started.iter().sum::<usize>() > 900, "{name}: {started:?}");
        let mut short = scaled;
        short.jobs.truncate(400);
        check(name, &topology, &short, ProcessorUnit::Pu, "");
    }
}

#[test]
fn housekeeping_changes_nothing_about_that() {
    let zen = machine("AMD-19h-Zen4-2xEpyc-9654.xml");
    let rule: pjw_core::housekeeping::HousekeepingRule = "1/l3".parse().unwrap();
    let kept = rule.select_housekeeping_cpus(&zen).unwrap().to_string();
    let scaled = crowded(&log(NASA), zen.cores().len());
    assert!(check("Zen 4", &zen, &scaled, ProcessorUnit::Core, &kept) > 500);
}

/// Means of packages, NUMA nodes, L3s and split cores.
fn means(topology: &Topology, log: &JobLog, unit: ProcessorUnit, chooser: CoreChooser) -> [f64; 4] {
    let done =
        replay(topology, log, &ReplayOptions { unit, chooser, housekeeping_cpus: CpuSet::new() }, |_| {});
    assert!(!done.started_jobs.is_empty());
    [
        done.mean_count(|domains_used| domains_used.packages),
        done.mean_count(|domains_used| domains_used.numa_nodes),
        done.mean_count(|domains_used| domains_used.l3_caches),
        done.mean_count(|domains_used| domains_used.split_cores),
    ]
}

#[test]
fn no_policy_of_others_does_better_on_average_over_all_streams() {
    let nasa = log(NASA);
    let mut sums = [[0.0; 4]; 4];
    for name in ["28intel64-2p2g7c-CoDgroups.xml", "64amd64-4s2n4ca2co.xml", "AMD-19h-Zen3-2xEpyc-7763.xml"] {
        let topology = machine(name);
        let log = crowded(&nasa, topology.cores().len());
        let others = ReferencePolicy::ALL.map(CoreChooser::Reference);
        for (sum, chooser) in sums.iter_mut().zip([PACK].into_iter().chain(others)) {
            let means = means(&topology, &log, ProcessorUnit::Core, chooser);
            sum.iter_mut().zip(means).for_each(|(sum, mean)| *sum += mean);
        }
    }
    let [ours, others @ ..] = sums;
    for other in others {
        assert!(ours.iter().zip(other).all(|(ours, other)| *ours <= other), "{ours:?} {other:?}");
    }
}

#[test]
fn lending_uses_what_the_owners_of_the_example_day_leave() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/demand-day.csv");
    let curve = curve::parse(&fs::read(path).unwrap()).unwrap();
    let replayed = |enabled| {
        let lending = LendingPolicy { enabled, ..LendingPolicy::default() };
        let options = DemandReplayOptions { housekeeping_cpus: CpuSet::new(), lending };
        replay_demand(&machine("64amd64-4s2n4ca2co.xml"), &curve, &options).unwrap()
    };
    let (without, with) = (replayed(false), replayed(true));
    let used = |replay: &DemandReplayResult| -> f64 { replay.owners.iter().map(|one| one.used_core_s).sum() };
    assert_eq!(used(&without), used(&with), "lending takes nothing from the owners");
    assert!(without.utilisation() < 0.75 && with.utilisation() > 0.95, "{without:?} {with:?}");
    assert!(with.owners.iter().all(|one| one.revocations > 0 && one.loans >= one.revocations));
}
