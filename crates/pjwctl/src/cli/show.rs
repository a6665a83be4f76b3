//! The options of `pjwctl show`.

use clap::Args;

use super::json::JsonArg;

/// The examples and remarks below the help of `pjwctl show`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl show 123 --memory           what the processes of the job share, and what each has for itself\n  \
    pjwctl show 123 --memory --nodes   also the memory on each NUMA node\n\n\
    --memory looks at all pages of the job, at 20 to 35 us of CPU time per MiB. Without it the memory is estimated from \
    counters, if the job has a memory cgroup of its own. docs/memory.md explains the figures.";

/// The command line options of `pjwctl show`, which shows the cores, processes, events and memory of one job.
#[derive(Debug, Clone, Args)]
pub struct ShowArgs {
    /// The job, as in slurm:123 or mytest
    pub job: String,
    /// Show the memory of the job and of each of its processes, with what they share
    #[arg(long)]
    pub memory: bool,
    /// Show also the memory on each NUMA node
    #[arg(long, requires = "memory")]
    pub nodes: bool,
    /// Whether JSON is printed.
    #[command(flatten)]
    pub json: JsonArg,
}
