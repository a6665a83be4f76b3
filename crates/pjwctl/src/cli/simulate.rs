//! The options of `pjwctl simulate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use jiff::SignedDuration;
use pjw_core::cpuset::Pu;
use pjw_core::housekeeping::HousekeepingRule;

use super::json::JsonArg;

/// The examples and remarks below the help of `pjwctl simulate`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl simulate --trace log.swf --input node.xml           a machine saved with: lstopo node.xml\n  \
    pjwctl simulate --trace log.swf --synthetic \"pack:2 l3:8 core:8 pu:2\" --housekeeping 1/l3\n  \
    pjwctl simulate --trace log.swf --input node.xml --reference kubelet   for comparison\n  \
    pjwctl simulate --demand day.csv --input node.xml          what the owners leave idle is lent\n\n\
    A job of the log starts at its submit time if enough cores are free, else it is refused. It holds its cores \
    for its run time. With --demand, each column is a job that owns cores, and a besteffort job wants every core. Needs no \
    running pjwd, only its program.";

/// The largest number of cores that an option takes. It is the limit of the configuration too.
const MAX_CORES: i64 = Pu::MAX.0 as i64 + 1;

/// The options for the replay of a job log (`--trace`), which have no meaning for `--demand`.
const OPTIONS_OF_LOGS: [&str; 5] = ["unit", "policy", "reference_policy", "per_job_csv", "fragmentation_csv"];

/// The command line options of `pjwctl simulate`, which replays a file on a simulated machine. With `--trace`, the
/// file is a log of jobs, and the command simulates which cores each of these jobs would get. With `--demand`, the
/// file says how many of its cores each job uses over time. The command then simulates how pjw would lend the unused
/// cores, and how much of the machine would be used.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("replayed").required(true).args(["job_log", "demand"]))]
#[command(group = ArgGroup::new("machine").required(true).args(["input", "synthetic"]))]
pub struct SimulateArgs {
    /// The log of jobs, in the Standard Workload Format; - is standard input
    #[arg(long = "trace", value_name = "FILE")]
    pub job_log: Option<PathBuf>,
    /// The number of cores that owners use over time: a CSV file with the time in seconds and a column for each owner;
    /// - is standard input
    #[arg(long, value_name = "FILE.csv", conflicts_with_all = OPTIONS_OF_LOGS)]
    pub demand: Option<PathBuf>,
    /// The number of idle cores of each owner that are not lent [default: 1]
    #[arg(long = "buffer", value_name = "N", conflicts_with = "job_log", value_parser = clap::value_parser!(u32).range(0..=MAX_CORES))]
    pub buffer_cores: Option<u32>,
    /// How long a core must be idle before it is lent, such as 500ms or 1m [default: 2s]
    #[arg(long, value_name = "TIME", conflicts_with = "job_log", value_parser = lend_after)]
    pub lend_after: Option<Duration>,
    /// The number of cores of one owner that are lent at once [default: 4]
    #[arg(long = "at-once", value_name = "N", conflicts_with = "job_log", value_parser = clap::value_parser!(u32).range(1..=MAX_CORES))]
    pub cores_at_once: Option<u32>,
    /// A machine in hwloc's XML format
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// A machine in hwloc's synthetic format
    #[arg(long, value_name = "DESCRIPTION")]
    pub synthetic: Option<String>,
    /// The unit of the log's processor counts
    #[arg(long, value_enum, default_value = "core")]
    pub unit: ProcessorUnitArg,
    /// The policy by which pjw's allocator chooses cores [default: pack]
    #[arg(long, value_enum, conflicts_with = "reference_policy")]
    pub policy: Option<SimulatePolicyArg>,
    /// CPUs that no job gets: a CPU list such as 0-1,8, or a number of cores per L3, NUMA node or package
    /// such as 1/l3
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub housekeeping: HousekeepingRule,
    /// Simulate this reference policy instead of pjw's allocator, for comparison
    #[arg(long = "reference", value_enum, value_name = "NAME")]
    pub reference_policy: Option<ReferencePolicyArg>,
    /// Write a CSV file with one line for each started job
    #[arg(long = "per-job", value_name = "FILE.csv")]
    pub per_job_csv: Option<PathBuf>,
    /// Write a CSV file with the free cores over time and the largest request that fits one L3, node or
    /// package
    #[arg(long = "fragmentation", value_name = "FILE.csv")]
    pub fragmentation_csv: Option<PathBuf>,
    /// Whether the result is printed as JSON instead of text.
    #[command(flatten)]
    pub json: JsonArg,
}

/// The value of `pjwctl simulate --unit`: whether the replayed job log counts cores or PUs (logical CPUs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProcessorUnitArg {
    /// Whole cores
    Core,
    /// Single logical CPUs, whose siblings may belong to another job
    Pu,
}

/// The value of `pjwctl simulate --policy`: whether the simulated jobs get cores close together or spread over the
/// machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulatePolicyArg {
    /// Close together
    Pack,
    /// Evenly over the machine
    Spread,
}

/// The value of `pjwctl simulate --reference`: a simple policy for choosing the cores of a job, such as the policy of
/// Kubernetes. The simulation uses this policy instead of pjw's own policy, so that the two can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReferencePolicyArg {
    /// The first free cores
    FirstFit,
    /// Kubernetes' static CPU manager, whole cores
    Kubelet,
    /// Kubernetes' static CPU manager, whole cores, with prefer-align-cpus-by-uncorecache
    KubeletL3,
}

/// Parses a time with its unit, in the range of the configuration key `lending.lend_after`.
fn lend_after(text: &str) -> Result<Duration, String> {
    let parsed: Option<SignedDuration> = text.parse().ok();
    let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
    let in_range =
        parsed.filter(|time| (Duration::from_millis(10)..=Duration::from_secs(3600)).contains(time));
    in_range.ok_or_else(|| "give a time from 10ms to 1h with its unit, such as 2s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit_and_the_range_of_the_configuration() {
        assert_eq!(lend_after("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(lend_after("1h"), Ok(Duration::from_secs(3600)));
        for text in ["", "2", "-2s", "9ms", "61m", "soon"] {
            assert!(lend_after(text).is_err(), "{text:?}");
        }
    }
}
