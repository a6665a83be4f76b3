//! Measures what the allocator decides and how long a decision takes. Logs of real jobs are replayed on the
//! topologies of real machines and compared with the policies of other allocators. Single decisions on machines of
//! 512 and 8,192 PUs are compared with naive first fit.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use pjw_benches::measure::results::{Figure, print_line, target_directory, write_json};
use pjw_core::topology::{RegularShape, Topology};
use pjw_core::{cpuset::CpuSet, job::Placement};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_sim::replay::{CoreChooser, ProcessorUnit, ReplayOptions, ReplayResult, replay};
use pjw_sim::swf::{JobLog, LoggedJob, parse};
use pjw_sim::{locality::LocalityCounts, reference::ReferencePolicy, seed::RandomStream};

/// The allocator of pjw, which is measured.
const PACK: CoreChooser = CoreChooser::Allocator(Placement::Pack);
const NASA: &str = "NASA-iPSC-1993-first2000.swf";
const LCG: &str = "LCG-2005-one-site-first1000.swf";
const MACHINES: [&str; 6] = [
    "28intel64-2p2g7c-CoDgroups.xml",
    "64amd64-4s2n4ca2co.xml",
    "96em64t-4n4d3ca2co-pci.xml",
    "AMD-19h-Zen3-2xEpyc-7763.xml",
    "AMD-19h-Zen4-2xEpyc-9654.xml",
    "nvidiagpunumanodes.xml",
];
/// Returns the number of domains of one kind that a grant uses.
type Count = fn(&LocalityCounts) -> u32;
/// The kinds of domains that are counted, with their names.
const COUNTS: [(&str, Count); 4] = [
    ("packages", |domains_used| domains_used.packages),
    ("NUMA nodes", |domains_used| domains_used.numa_nodes),
    ("L3s", |domains_used| domains_used.l3_caches),
    ("split cores", |domains_used| domains_used.split_cores),
];

fn main() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the benches are in no workspace")?;
    let mut figures = stream_figures(root)?;
    let small = RegularShape {
        packages: 2,
        numa_nodes_per_package: 4,
        l3s_per_numa_node: 4,
        cores_per_l3: 8,
        pus_per_core: 2,
    };
    let large = RegularShape {
        packages: 8,
        numa_nodes_per_package: 4,
        l3s_per_numa_node: 16,
        cores_per_l3: 8,
        pus_per_core: 2,
    };
    for (name, shape) in [("512 PUs", small), ("8,192 PUs", large)] {
        figures.extend(decision_figures(name, &Topology::from_shape(shape))?);
    }
    figures.push(replay_figure(&Topology::from_shape(small))?);
    let path = write_json(&target_directory()?, "allocator", &figures)?;
    print_line(&format!("written to {}", path.display()))
}

/// Replays every stream of jobs with every policy, and compares the allocator with each other policy.
fn stream_figures(root: &Path) -> anyhow::Result<Vec<Figure>> {
    let read = |name: &str| {
        let bytes =
            std::fs::read(root.join("tests/traces").join(name)).with_context(|| format!("no {name}"))?;
        parse(&bytes).with_context(|| name.to_owned())
    };
    let (nasa, lcg) = (read(NASA)?, read(LCG)?);
    let mut figures = Vec::new();
    print_line(&format!(
        "{:<52}{:<12}{:>9}{:>9}{:>9}{:>9}",
        "mean per job", "", "packages", "nodes", "L3s", "split"
    ))?;
    for machine in MACHINES {
        let path = root.join("crates/pjw-linux/tests/topologies").join(machine);
        let topology = load_topology(TopologySource::Xml(&path))?;
        let name = machine.trim_end_matches(".xml");
        let cores = topology.cores().len();
        let siblings = topology.cpus().len() / cores;
        let mixed = mixed_jobs(cores, 5_000);
        let streams = [
            ("NASA", ProcessorUnit::Core, nasa.clone()),
            ("NASA crowded", ProcessorUnit::Core, scaled_to_machine(&nasa, cores)),
            ("LCG", ProcessorUnit::Core, lcg.clone()),
            ("mixed", ProcessorUnit::Core, mixed.clone()),
            ("mixed, by PU", ProcessorUnit::Pu, by_pu(mixed, siblings)),
        ];
        for (stream, unit, log) in &streams {
            figures.extend(policy_figures(&format!("{name}: {stream}"), &topology, log, *unit)?);
        }
    }
    Ok(figures)
}

/// Replays the jobs of `log` with the allocator of pjw, and with each reference policy. Prints on how many domains a
/// job lies in the mean. Returns the figures that compare the allocator with each reference policy. `stream` is the
/// name of the log in the results, and `unit` the unit of the sizes of its jobs.
fn policy_figures(
    stream: &str,
    topology: &Topology,
    log: &JobLog,
    unit: ProcessorUnit,
) -> anyhow::Result<Vec<Figure>> {
    let run = |chooser| {
        replay(topology, log, &ReplayOptions { unit, chooser, housekeeping_cpus: CpuSet::new() }, |_| {})
    };
    let pack = run(PACK);
    print_means(stream, "pack", &pack)?;
    let mut figures = Vec::new();
    for reference in ReferencePolicy::ALL {
        let peer = run(CoreChooser::Reference(reference));
        print_means("", reference.name(), &peer)?;
        for (domains, count) in COUNTS {
            let name = format!("{stream}: {domains} per job");
            let (value, peer_value) = (pack.mean_count(count), peer.mean_count(count));
            if peer_value > 0.0 {
                figures.push(Figure::new(&name, value, domains, reference.name(), peer_value));
            }
        }
    }
    Ok(figures)
}

fn print_means(stream: &str, policy: &str, replay: &ReplayResult) -> anyhow::Result<()> {
    let means = COUNTS.map(|(_, count)| format!("{:>9.3}", replay.mean_count(count)));
    print_line(&format!("{stream:<52}{policy:<12}{}", means.concat()))
}

/// Scales a log to a machine of `cores` cores. The sizes of the jobs are in proportion, with odd sizes among them.
/// The run times are longer, so that the machine is nearly full.
fn scaled_to_machine(log: &JobLog, cores: usize) -> JobLog {
    let cores = u32::try_from(cores).unwrap_or(u32::MAX);
    let mut log = log.clone();
    for job in &mut log.jobs {
        let odd = if job.processors > 4 { u32::try_from(job.number % 5).unwrap_or(0) } else { 0 };
        job.processors = (job.processors * cores).div_ceil(128) + odd;
        job.run_s *= 8;
    }
    log
}

/// Makes jobs of random sizes up to half the machine, small sizes more often. About nine in ten jobs find enough free
/// cores.
fn mixed_jobs(cores: usize, jobs: u64) -> JobLog {
    let mut chance = RandomStream::from_seed(3).substream("mixed jobs");
    let half = u32::try_from(cores / 2).unwrap_or(1).max(1);
    let mut submit_s = 0;
    let jobs = (1..=jobs).map(|number| {
        submit_s += u64::from(chance.random_below(200));
        let most = chance.random_below(half).min(chance.random_below(half));
        let processors = 1 + chance.random_below(1 + most);
        LoggedJob { number, submit_s, run_s: 60 + u64::from(chance.random_below(1_000)), processors }
    });
    JobLog { jobs: jobs.collect(), skipped_jobs: 0 }
}

/// Turns the sizes of the jobs from cores into PUs, with `siblings` PUs for each core. Every fourth job gets one PU
/// less, so that it leaves a PU of its last core free.
fn by_pu(mut log: JobLog, siblings: usize) -> JobLog {
    let siblings = u32::try_from(siblings).unwrap_or(1);
    for job in &mut log.jobs {
        job.processors = job.processors * siblings - u32::from(siblings > 1 && job.number % 4 == 0);
    }
    log
}

/// Returns the median and the 99th percentile of the time of one decision on a nearly full machine, compared with
/// naive first fit on the same machine.
fn decision_figures(size: &str, topology: &Topology) -> anyhow::Result<Vec<Figure>> {
    let log = mixed_jobs(topology.cores().len(), 5_000);
    let pack = decision_times(topology, &log, PACK);
    let first_fit = decision_times(topology, &log, CoreChooser::Reference(ReferencePolicy::FirstFit));
    let mut figures = Vec::new();
    for percentile in [50, 99] {
        let micros = |times: &[Duration]| {
            times.get(times.len() * percentile / 100).map_or(0.0, |time| time.as_secs_f64() * 1e6)
        };
        let name = format!("one decision on {size}, {percentile} of 100");
        let figure = Figure::new(&name, micros(&pack), "µs", "naive first fit", micros(&first_fit));
        print_line(&format!("{name}: {:.1} µs; naive first fit: {:.1} µs", figure.value, figure.peer_value))?;
        figures.push(figure);
    }
    Ok(figures)
}

/// Returns the time of each decision, sorted, the shortest first. The time of a decision is the shortest of three
/// equal replays, which removes most of the influence of other load.
fn decision_times(topology: &Topology, log: &JobLog, chooser: CoreChooser) -> Vec<Duration> {
    let options = ReplayOptions { unit: ProcessorUnit::Core, chooser, housekeeping_cpus: CpuSet::new() };
    let runs = [(); 3].map(|()| replay(topology, log, &options, |_| {}).started_jobs);
    let [first, second, third] =
        runs.map(|jobs| jobs.into_iter().map(|job| job.decision_time).collect::<Vec<_>>());
    let best = first.into_iter().zip(second).zip(third).map(|((one, two), three)| one.min(two).min(three));
    let mut times: Vec<Duration> = best.collect();
    times.sort_unstable();
    times
}

/// Measures the time for a replay of 100,000 jobs with the allocator of pjw and with naive first fit.
fn replay_figure(topology: &Topology) -> anyhow::Result<Figure> {
    let log = mixed_jobs(topology.cores().len(), 100_000);
    let seconds = |chooser| {
        let begin = Instant::now();
        replay(
            topology,
            &log,
            &ReplayOptions { unit: ProcessorUnit::Core, chooser, housekeeping_cpus: CpuSet::new() },
            |_| {},
        );
        begin.elapsed().as_secs_f64()
    };
    let (pack, first_fit) = (seconds(PACK), seconds(CoreChooser::Reference(ReferencePolicy::FirstFit)));
    let name = "a replay of 100,000 jobs on 512 PUs";
    print_line(&format!("{name}: {pack:.2} s; by naive first fit: {first_fit:.2} s"))?;
    Ok(Figure::new(name, pack, "s", "naive first fit", first_fit))
}
