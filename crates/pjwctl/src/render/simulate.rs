//! `simulate`: what became of a log of jobs, as JSON for scripts, as a table for people, as CSV.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableStyle};
use pjw_core::job::Placement;
use pjw_sim::replay::{Chooser, Replay, Rules, Sample, Unit};
use pjw_sim::swf::Trace;
use serde::Serialize;

use super::text::count;
use super::{Page, style};

/// The samples that the table shows; JSON and CSV have all.
const ROWS: usize = 10;

/// The answer to `simulate`; its names are public interface.
#[derive(Debug, Clone, Serialize)]
pub struct Simulation {
    /// Those that were replayed.
    pub jobs: u32,
    /// Those that got what they asked for.
    pub started: usize,
    /// The others.
    pub refused: u32,
    /// Those of the log whose size or run time is unknown: not among `jobs`.
    pub skipped: u32,
    /// What chose: `pack`, `spread`, or the name of a reference policy.
    pub policy: &'static str,
    /// What processors count: `core` or `pu`.
    pub unit: &'static str,
    /// How many of them the machine has for jobs.
    pub usable: u32,
    /// The part of them that jobs held, from the first submission to the last end: 0 to 1.
    pub utilisation: f64,
    /// Packages a started job touches, on average.
    pub mean_packages: f64,
    /// NUMA nodes.
    pub mean_numa_nodes: f64,
    /// L3s.
    pub mean_l3: f64,
    /// Cores of which a job got some PUs and not all, over all jobs.
    pub split_cores: u64,
    /// The same on average.
    pub mean_split_cores: f64,
    /// How long the choices took.
    pub decision_ns: Percentiles,
    /// What was left free over time.
    pub fragmentation: Vec<Fragmentation>,
}

/// Times in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Percentiles {
    /// Half of them took at most this.
    pub p50: u64,
    /// All but one in a hundred took at most this.
    pub p99: u64,
}

/// What was left free at a moment, in whole cores.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Fragmentation {
    /// In the log's seconds.
    pub time_s: u64,
    /// In all.
    pub free: u32,
    /// The most on one L3.
    pub largest_l3: u32,
    /// The most on one NUMA node.
    pub largest_numa_node: u32,
    /// The most on one package.
    pub largest_package: u32,
}

impl Simulation {
    /// The figures of a replay.
    #[must_use]
    pub fn new(replay: &Replay, trace: &Trace, rules: &Rules) -> Self {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            jobs: replay.jobs(),
            started: replay.started.len(),
            refused: replay.refused,
            skipped: trace.skipped,
            policy: match rules.chooser {
                Chooser::Allocator(Placement::Spread) => "spread",
                Chooser::Allocator(_) => "pack",
                Chooser::Reference(reference) => reference.name(),
            },
            unit: match rules.unit {
                Unit::Core => "core",
                Unit::Pu => "pu",
            },
            usable: replay.usable,
            utilisation: replay.utilisation(),
            mean_packages: replay.mean(|touched| touched.packages),
            mean_numa_nodes: replay.mean(|touched| touched.numa_nodes),
            mean_l3: replay.mean(|touched| touched.l3),
            split_cores: replay.split_cores(),
            mean_split_cores: replay.mean(|touched| touched.split_cores),
            decision_ns: Percentiles {
                p50: nanoseconds(replay.decision(50)),
                p99: nanoseconds(replay.decision(99)),
            },
            fragmentation: replay.samples.iter().map(Fragmentation::from).collect(),
        }
    }
}

impl From<&Sample> for Fragmentation {
    fn from(sample: &Sample) -> Self {
        Self {
            time_s: sample.time_s,
            free: sample.fits.machine,
            largest_l3: sample.fits.l3,
            largest_numa_node: sample.fits.numa_node,
            largest_package: sample.fits.package,
        }
    }
}

/// The answer for people.
#[must_use]
pub fn simulation(told: &Simulation, page: Page) -> String {
    let unit = if told.unit == "pu" { ("PU", "PUs") } else { ("core", "cores") };
    let heading = format!(
        "{} on {}, {}",
        count(told.jobs, "job", "jobs"),
        count(told.usable, unit.0, unit.1),
        told.policy
    );
    let mut text = style::paint(&heading, style::HEADING, page) + "\n\n";
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let refused = f64::from(told.refused) / f64::from(told.jobs.max(1));
    let mut row = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<22}{value:>10}");
    };
    row("started", &told.started.to_string());
    row("refused", &told.refused.to_string());
    row("  of all", &percent(refused));
    if told.skipped > 0 {
        row("skipped as unknown", &told.skipped.to_string());
    }
    row("utilisation", &percent(told.utilisation));
    row("packages per job", &format!("{:.3}", told.mean_packages));
    row("NUMA nodes per job", &format!("{:.3}", told.mean_numa_nodes));
    row("L3s per job", &format!("{:.3}", told.mean_l3));
    row("split cores per job", &format!("{:.3}", told.mean_split_cores));
    row("decision, median", &microseconds(told.decision_ns.p50));
    row("decision, 99 of 100", &microseconds(told.decision_ns.p99));
    text + "\nfree cores, and the largest request that one part could serve\n" + &samples(&told.fragmentation)
}

/// Some of the samples, evenly chosen, the first and the last among them.
fn samples(all: &[Fragmentation]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["at", "free", "L3", "NUMA node", "package"]);
    let rows = ROWS.min(all.len());
    for row in 0..rows {
        let Some(sample) = all.get(row * (all.len() - 1) / (rows - 1).max(1)) else { continue };
        let numbers = [sample.free, sample.largest_l3, sample.largest_numa_node, sample.largest_package];
        let cells = std::iter::once(time(sample.time_s)).chain(numbers.map(|number| number.to_string()));
        table.add_row(cells.map(Cell::new));
    }
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if n > 0 { 2 } else { 0 }, 0)).set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// The log's seconds as days and hours.
fn time(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    format!("{days}d {:02}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60)
}

fn microseconds(nanoseconds: u64) -> String {
    format!("{}.{} µs", nanoseconds / 1_000, nanoseconds % 1_000 / 100)
}

/// A line for each started job, for `--per-job`.
#[must_use]
pub fn per_job(replay: &Replay) -> String {
    let mut text = "job,submit_s,end_s,requested,cpus,packages,numa_nodes,l3\n".to_owned();
    for one in &replay.started {
        let (job, touched) = (one.job, one.touched);
        let cpus = quoted(&one.cpus.to_string());
        let _ = writeln!(
            text,
            "{},{},{},{},{cpus},{},{},{}",
            job.number,
            job.submit_s,
            one.end_s(),
            job.processors,
            touched.packages,
            touched.numa_nodes,
            touched.l3
        );
    }
    text
}

/// A line for each sample, for `--fragmentation`.
#[must_use]
pub fn fragmentation(told: &Simulation) -> String {
    let mut text = "time_s,free,largest_l3,largest_numa_node,largest_package\n".to_owned();
    for sample in &told.fragmentation {
        let _ = writeln!(
            text,
            "{},{},{},{},{}",
            sample.time_s, sample.free, sample.largest_l3, sample.largest_numa_node, sample.largest_package
        );
    }
    text
}

/// A field of CSV: in quotes if it holds a comma.
fn quoted(field: &str) -> String {
    if field.contains(',') { format!("\"{field}\"") } else { field.to_owned() }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::topology::{Regular, Topology};
    use pjw_sim::replay::replay;
    use pjw_sim::swf::TraceJob;

    use super::*;

    fn done() -> (Replay, Simulation) {
        let shape =
            Regular { packages: 1, numa_per_package: 1, l3_per_numa: 2, cores_per_l3: 2, pus_per_core: 2 };
        let topology = Topology::regular(shape);
        let job = |number, submit_s, run_s, processors| TraceJob { number, submit_s, run_s, processors };
        let jobs = vec![job(7, 100, 50, 1), job(8, 110, 90_000, 3), job(9, 120, 10, 1)];
        let trace = Trace { jobs, skipped: 2 };
        let rules = Rules {
            unit: Unit::Core,
            chooser: Chooser::Allocator(Placement::Pack),
            housekeeping: CpuSet::new(),
        };
        let done = replay(&topology, &trace, &rules, |_| {});
        let mut told = Simulation::new(&done, &trace, &rules);
        told.decision_ns = Percentiles { p50: 4_567, p99: 1_234_500 };
        (done, told)
    }

    #[test]
    fn people_get_a_page() {
        let (_, told) = done();
        insta::assert_snapshot!(simulation(&told, Page { width: 80, colour: false }), @r"
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
        assert_eq!(per_job(&done().0), expected);
    }

    #[test]
    fn each_sample_is_a_line_of_csv() {
        let text = fragmentation(&done().1);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 22);
        assert_eq!(lines[..2], ["time_s,free,largest_l3,largest_numa_node,largest_package", "100,3,2,3,3"]);
        assert_eq!(lines[21], "120,0,0,0,0");
    }
}
