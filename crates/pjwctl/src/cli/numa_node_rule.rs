//! The option `--within-job`.

use clap::ValueEnum;
use pjw_core::within_job::NumaNodeRule;

/// The value of `--within-job` of `pjwctl assign`, `pjwctl run` and `pjwctl spawn`: the rule that chooses a NUMA node
/// for each new process of a job. The rule matters only if the cores of the job are in several NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumaNodeRuleArg {
    /// No NUMA node is chosen: a hot thread (one that runs or waits for a CPU most of the time) stays in the NUMA node
    /// in which it runs, if a core is idle there
    Default,
    /// The NUMA nodes in turns (round robin)
    Rr,
    /// The NUMA node with the fewest hot threads per core of the job (least loaded)
    Ll,
    /// The cores of one NUMA node, then those of the next
    Fill,
    /// The NUMA node of the parent process
    Packed,
}

impl From<NumaNodeRuleArg> for NumaNodeRule {
    fn from(arg: NumaNodeRuleArg) -> Self {
        match arg {
            NumaNodeRuleArg::Default => Self::Default,
            NumaNodeRuleArg::Rr => Self::RoundRobin,
            NumaNodeRuleArg::Ll => Self::LeastLoaded,
            NumaNodeRuleArg::Fill => Self::Fill,
            NumaNodeRuleArg::Packed => Self::Packed,
        }
    }
}
