//! `simulate`: the result of a replay, as JSON for scripts, as a table for people, as CSV.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableStyle};
use pjw_core::job::Placement;
use pjw_core::topology::{Topology, TopologyLevel};
use pjw_sim::replay::{CoreChooser, FreeCoresSample, ProcessorUnit, ReplayOptions, ReplayResult};
use pjw_sim::swf::JobLog;
use serde::Serialize;

use super::{Terminal, style, text::count_with_noun};

/// The number of samples in the table. JSON and CSV have all samples.
const MAX_ROWS: usize = 10;

/// The result of `pjwctl simulate --trace`, which replays a job log on a simulated machine. Contains how many jobs
/// got cores, how well the machine was used, and how the cores of the jobs were distributed. `--json` prints this
/// type as JSON.
#[derive(Debug, Clone, Serialize)]
pub struct SimulationResult {
    /// The number of jobs that were replayed: the started jobs and the refused jobs.
    pub jobs: u32,
    /// The number of jobs that got cores.
    pub started: usize,
    /// The number of jobs that got no cores because too few were free.
    pub refused: u32,
    /// The number of jobs in the log that can't be replayed, because their size or run time is unknown. They
    /// are not included in the number of replayed jobs.
    pub skipped: u32,
    /// The policy that chose the cores: `pack`, `spread`, or the name of a reference policy. A reference
    /// policy, such as `kubelet`, is simulated instead of pjw's allocator, for comparison.
    pub policy: &'static str,
    /// The unit of the processor counts in the log: `core` or `pu` (logical CPU).
    pub unit: &'static str,
    /// The number of cores or PUs that jobs can use: all of the machine except the housekeeping PUs, which are reserved
    /// for the system. The unit is that of the processor counts in the log.
    #[serde(rename = "usable")]
    pub usable_processors: u32,
    /// The utilisation of the machine, from 0 to 1, between the first submission and the end of the last job. It is the
    /// core time that the started jobs held, divided by the core time of all usable cores. Core time is a number of
    /// cores multiplied by a time. If the log counts PUs (logical CPUs), PUs are counted instead of cores. 0 if no job
    /// was started.
    pub utilisation: f64,
    /// The mean number of packages (sockets) on which a started job has cores.
    pub mean_packages: f64,
    /// The mean number of NUMA nodes on which a started job has cores.
    pub mean_numa_nodes: f64,
    /// The mean number of L3 caches to which the cores of a started job belong.
    pub mean_l3: f64,
    /// The number of split cores of all started jobs together. A core is split if a job got some of its PUs
    /// and not all.
    pub split_cores: u64,
    /// The mean number of split cores of a started job. A core is split if the job got some of its PUs and
    /// not all.
    pub mean_split_cores: f64,
    /// The time that the choice of the cores took for a started job, in nanoseconds of wall-clock time: the
    /// median and the 99th percentile over all started jobs.
    pub decision_ns: DecisionTimes,
    /// The number of free cores and the largest possible requests, at several times of the simulation.
    pub fragmentation: Vec<FragmentationSample>,
    /// The levels of which the simulated machine has at least one domain, of L3 caches, NUMA nodes and packages. The
    /// text leaves out the other levels.
    #[serde(skip)]
    pub levels: Vec<TopologyLevel>,
}

/// The time that a decision took in a simulation, in nanoseconds of wall-clock time: the median and the 99th percentile
/// of all decisions. A decision is the choice of the cores for one job that is started.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct DecisionTimes {
    /// The median of the durations, in ns.
    pub p50: u64,
    /// The 99th percentile of the durations, in ns: at most one percent of the decisions took longer.
    pub p99: u64,
}

/// How fragmented the free cores of the simulated machine are at one time: the number of all free cores, and the
/// largest number of free cores in a single L3 cache, in a single NUMA node and in a single package.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FragmentationSample {
    /// The simulated time of the sample, in seconds since the time 0 of the replayed job log.
    pub time_s: u64,
    /// The number of free whole cores of the machine.
    pub free: u32,
    /// The number of cores of the largest request that the free cores of a single L3 can serve. An L3 that is
    /// partly used counts with its free cores only.
    pub largest_l3: u32,
    /// The number of cores of the largest request that the free cores of a single NUMA node can serve. A NUMA
    /// node that is partly used counts with its free cores only.
    pub largest_numa_node: u32,
    /// The number of cores of the largest request that the free cores of a single package can serve. A
    /// package that is partly used counts with its free cores only.
    pub largest_package: u32,
}

impl SimulationResult {
    /// Computes the result of a finished simulation of the machine `topology`. `replay` is what the simulation returned
    /// for the job log `log` with the options `options`.
    #[must_use]
    pub fn new(replay: &ReplayResult, topology: &Topology, log: &JobLog, options: &ReplayOptions) -> Self {
        let levels = [TopologyLevel::L3, TopologyLevel::NumaNode, TopologyLevel::Package].into_iter();
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            jobs: replay.job_count(),
            started: replay.started_jobs.len(),
            refused: replay.refused_count,
            skipped: log.skipped_jobs,
            policy: match options.chooser {
                CoreChooser::Allocator(Placement::Spread) => "spread",
                CoreChooser::Allocator(_) => "pack",
                CoreChooser::Reference(reference) => reference.name(),
            },
            unit: match options.unit {
                ProcessorUnit::Core => "core",
                ProcessorUnit::Pu => "pu",
            },
            usable_processors: replay.usable_processors,
            utilisation: replay.utilisation(),
            mean_packages: replay.mean_count(|domains_used| domains_used.packages),
            mean_numa_nodes: replay.mean_count(|domains_used| domains_used.numa_nodes),
            mean_l3: replay.mean_count(|domains_used| domains_used.l3_caches),
            split_cores: replay.split_core_count(),
            mean_split_cores: replay.mean_count(|domains_used| domains_used.split_cores),
            decision_ns: DecisionTimes {
                p50: nanoseconds(replay.decision_time_percentile(50)),
                p99: nanoseconds(replay.decision_time_percentile(99)),
            },
            fragmentation: replay.free_cores_samples.iter().map(FragmentationSample::from).collect(),
            levels: levels.filter(|&level| topology.domains(level).next().is_some()).collect(),
        }
    }
}

impl From<&FreeCoresSample> for FragmentationSample {
    fn from(sample: &FreeCoresSample) -> Self {
        Self {
            time_s: sample.time_s,
            free: sample.largest_requests.machine,
            largest_l3: sample.largest_requests.l3,
            largest_numa_node: sample.largest_requests.numa_node,
            largest_package: sample.largest_requests.package,
        }
    }
}

/// Returns the text of `pjwctl simulate --trace`, which replays a job log on a simulated machine. The text has:
///
/// - the numbers of started and refused jobs, and the utilisation of the machine,
/// - the mean numbers of packages, NUMA nodes, L3 caches and split cores of a job (of a split core, the job has only
///   some PUs, which are logical CPUs),
/// - the median and the 99th percentile of the time that choosing the cores of a job took,
/// - a table of the free cores at several times.
///
/// Levels that the machine does not have, such as L3, are left out.
#[must_use]
pub fn simulation_text(result: &SimulationResult, term: Terminal) -> String {
    let unit = if result.unit == "pu" { ("PU", "PUs") } else { ("core", "cores") };
    let heading = format!(
        "{} on {}, {}",
        count_with_noun(result.jobs, "job", "jobs"),
        count_with_noun(result.usable_processors, unit.0, unit.1),
        result.policy
    );
    let mut text = style::apply_style(&heading, style::HEADING, term) + "\n\n";
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let refused = f64::from(result.refused) / f64::from(result.jobs.max(1));
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<22}{value:>10}");
    };
    line("started", &result.started.to_string());
    line("refused", &result.refused.to_string());
    line("  of all", &percent(refused));
    if result.skipped > 0 {
        line("skipped as unknown", &result.skipped.to_string());
    }
    line("utilisation", &percent(result.utilisation));
    for (level, name, mean) in [
        (TopologyLevel::Package, "packages per job", result.mean_packages),
        (TopologyLevel::NumaNode, "NUMA nodes per job", result.mean_numa_nodes),
        (TopologyLevel::L3, "L3s per job", result.mean_l3),
    ] {
        if result.levels.contains(&level) {
            line(name, &format!("{mean:.3}"));
        }
    }
    line("split cores per job", &format!("{:.3}", result.mean_split_cores));
    line("decision, median", &microseconds(result.decision_ns.p50));
    line("decision, 99 of 100", &microseconds(result.decision_ns.p99));
    text + "\nfree cores, and the largest request that one part could serve\n"
        + &sample_table(&result.fragmentation, &result.levels)
}

/// Returns a table of the samples in `all`, with at most [`MAX_ROWS`] rows. If there are more samples, the table has
/// the first, the last, and samples at equal distances between the two. Each row has the time of the sample, the number
/// of free cores, and for each level in `levels` (L3 cache, NUMA node, package) the largest request that one part of
/// the machine on this level could serve.
fn sample_table(all: &[FragmentationSample], levels: &[TopologyLevel]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Disabled);
    let columns = [
        (TopologyLevel::L3, "L3"),
        (TopologyLevel::NumaNode, "NUMA node"),
        (TopologyLevel::Package, "package"),
    ];
    let columns = columns.into_iter().filter(|(level, _)| levels.contains(level));
    table.set_header(["at", "free"].into_iter().chain(columns.map(|(_, name)| name)));
    let rows = MAX_ROWS.min(all.len());
    for row in 0..rows {
        let Some(sample) = all.get(row * (all.len() - 1) / (rows - 1).max(1)) else { continue };
        let largest = [
            (TopologyLevel::L3, sample.largest_l3),
            (TopologyLevel::NumaNode, sample.largest_numa_node),
            (TopologyLevel::Package, sample.largest_package),
        ];
        let largest = largest.into_iter().filter(|(level, _)| levels.contains(level));
        let cells = [duration_text(sample.time_s), sample.free.to_string()]
            .into_iter()
            .chain(largest.map(|(_, number)| number.to_string()));
        table.add_row(cells.map(Cell::new));
    }
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if n > 0 { 2 } else { 0 }, 0)).set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Returns `seconds` as text with days, hours, minutes and seconds, such as `1d 02:03:04`.
pub(super) fn duration_text(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    format!("{days}d {:02}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60)
}

fn microseconds(nanoseconds: u64) -> String {
    format!("{}.{} µs", nanoseconds / 1_000, nanoseconds % 1_000 / 100)
}

/// Returns the CSV text that `pjwctl simulate --per-job` writes to a file. After a line with the names of the columns,
/// the text has one line for each job that got cores in the simulation. The line contains the number of the job in the
/// job log, the times of its submission and of its end (in seconds since the time 0 of the job log), the number of
/// processors in the job log, the CPUs, and the numbers of packages, NUMA nodes and L3 caches of these CPUs.
#[must_use]
pub fn per_job_csv(replay: &ReplayResult) -> String {
    let mut text = "job,submit_s,end_s,requested,cpus,packages,numa_nodes,l3\n".to_owned();
    for started in &replay.started_jobs {
        let (job, domains_used) = (started.job, started.domains_used);
        let cpus = quoted(&started.cpus.to_string());
        let _ = writeln!(
            text,
            "{},{},{},{},{cpus},{},{},{}",
            job.number,
            job.submit_s,
            started.end_s(),
            job.processors,
            domains_used.packages,
            domains_used.numa_nodes,
            domains_used.l3_caches
        );
    }
    text
}

/// Returns the CSV text that `pjwctl simulate --fragmentation` writes to a file. After a line with the names of the
/// columns, the text has one line for each [`FragmentationSample`] in `result`: the time of the sample, the number of
/// free cores, and the largest numbers of free cores in a single L3 cache, NUMA node and package.
#[must_use]
pub fn fragmentation_csv(result: &SimulationResult) -> String {
    let mut text = "time_s,free,largest_l3,largest_numa_node,largest_package\n".to_owned();
    for sample in &result.fragmentation {
        let _ = writeln!(
            text,
            "{},{},{},{},{}",
            sample.time_s, sample.free, sample.largest_l3, sample.largest_numa_node, sample.largest_package
        );
    }
    text
}

/// A CSV field: in quotes if it contains a comma.
fn quoted(field: &str) -> String {
    if field.contains(',') { format!("\"{field}\"") } else { field.to_owned() }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::testing::regular_topology;
    use pjw_sim::replay::replay;
    use pjw_sim::swf::LoggedJob;

    use super::*;

    fn done() -> (ReplayResult, SimulationResult) {
        let topology = regular_topology(1, 1, 2, 2, 2);
        let job = |number, submit_s, run_s, processors| LoggedJob { number, submit_s, run_s, processors };
        let jobs = vec![job(7, 100, 50, 1), job(8, 110, 90_000, 3), job(9, 120, 10, 1)];
        let log = JobLog { jobs, skipped_jobs: 2 };
        let options = ReplayOptions {
            unit: ProcessorUnit::Core,
            chooser: CoreChooser::Allocator(Placement::Pack),
            housekeeping_cpus: CpuSet::new(),
        };
        let done = replay(&topology, &log, &options, |_| {});
        let mut result = SimulationResult::new(&done, &topology, &log, &options);
        result.decision_ns = DecisionTimes { p50: 4_567, p99: 1_234_500 };
        (done, result)
    }

    #[test]
    fn the_text_for_people_is_a_table() {
        let (_, result) = done();
        insta::assert_snapshot!(simulation_text(&result, Terminal { width: 80, has_colours: false }), @r"
        3 jobs on 4 cores, pack

        started                        2
        refused                        1
          of all                  33.3 %
        skipped as unknown             2
        utilisation               75.0 %
        packages per job           1.000
        NUMA nodes per job         1.000
        L3s per job                1.500
        split cores per job        0.000
        decision, median          4.5 µs
        decision, 99 of 100    1234.5 µs

        free cores, and the largest request that one part could serve
                 at  free  L3  NUMA node  package
        0d 00:01:40     3   2          3        3
        0d 00:01:42     3   2          3        3
        0d 00:01:44     3   2          3        3
        0d 00:01:46     3   2          3        3
        0d 00:01:48     3   2          3        3
        0d 00:01:51     0   0          0        0
        0d 00:01:53     0   0          0        0
        0d 00:01:55     0   0          0        0
        0d 00:01:57     0   0          0        0
        0d 00:02:00     0   0          0        0
        ");
    }

    #[test]
    fn levels_that_the_machine_does_not_have_are_left_out_of_the_text() {
        let (_, mut result) = done();
        let text =
            |result: &SimulationResult| simulation_text(result, Terminal { width: 80, has_colours: false });
        let (l3s, columns) = ("L3s per job  ", "at  free  NUMA node  package\n");
        assert!(text(&result).contains(l3s) && !text(&result).contains(columns));
        result.levels.retain(|&level| level != TopologyLevel::L3);
        assert!(!text(&result).contains("L3") && text(&result).contains(columns), "{}", text(&result));
    }

    #[test]
    fn scripts_get_the_names_of_the_contract() {
        let json = serde_json::to_value(done().1).unwrap();
        for name in [
            "jobs",
            "started",
            "refused",
            "utilisation",
            "mean_packages",
            "mean_numa_nodes",
            "mean_l3",
            "split_cores",
        ] {
            assert!(json[name].is_number(), "{name}: {json}");
        }
        assert!(json["decision_ns"]["p50"].is_u64() && json["decision_ns"]["p99"].is_u64());
        let sample = &json["fragmentation"][0];
        for name in ["time_s", "free", "largest_l3", "largest_numa_node", "largest_package"] {
            assert!(sample[name].is_u64(), "{name}: {sample}");
        }
        assert_eq!((json["jobs"].as_u64(), json["skipped"].as_u64()), (Some(3), Some(2)));
    }

    #[test]
    fn each_started_job_is_a_line_of_csv() {
        let expected = "job,submit_s,end_s,requested,cpus,packages,numa_nodes,l3\n\
            7,100,150,1,\"0,4\",1,1,1\n\
            8,110,90110,3,\"1-3,5-7\",1,1,2\n";
        assert_eq!(per_job_csv(&done().0), expected);
    }

    #[test]
    fn each_sample_is_a_line_of_csv() {
        let text = fragmentation_csv(&done().1);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 22);
        assert_eq!(lines[..2], ["time_s,free,largest_l3,largest_numa_node,largest_package", "100,3,2,3,3"]);
        assert_eq!(lines[21], "120,0,0,0,0");
    }
}
