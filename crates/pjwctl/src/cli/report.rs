//! The options of `pjwctl report` and `pjwctl jobs`.

use clap::{ArgGroup, Args};

use super::json::JsonArg;
use super::number::at_least_one;

/// The examples and remarks below the help of `pjwctl report`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl report slurm:4711             how job 4711 used its cores\n  \
    pjwctl report --last 20              the last 20 jobs, one line each\n  \
    pjwctl report slurm:4711 --jobstats  a line for Slurm's AdminComment, as jobstats writes it\n\n\
    The verdict is serial (fewer threads ran than the job had cores), oversubscribed (more threads wanted to run), bound \
    (threads waited beside idle cores because their program or its launcher had bound them), waiting (for something other than a core, or \
    for other programs on the job's cores) or fine. A job of less than ten seconds gets none. The report_keep newest reports \
    are kept, at most 768 KiB of them, also when pjwd is restarted. After a reboot they are there only if the state directory of \
    pjwd (--state-dir) is on a disk: the default is in /run. Jobs that pjwd --release-all releases leave no report.";

/// The command line options of `pjwctl report`, which shows how jobs that have ended used their cores.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["job", "last"]))]
pub struct ReportArgs {
    /// The job, as in slurm:123 or mytest
    pub job: Option<String>,
    /// The last N jobs that ended, the newest first
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub last: Option<u32>,
    /// Print the line that jobstats stores in Slurm's AdminComment (JS1)
    #[arg(long, requires = "job", conflicts_with_all = ["json", "last"])]
    pub jobstats: bool,
    /// Whether JSON is printed: an object for one job, a list for --last.
    #[command(flatten)]
    pub json: JsonArg,
}

/// The command line options of `pjwctl jobs`, which lists the running jobs, or the jobs that have ended.
#[derive(Debug, Clone, Copy, Args)]
pub struct JobsArgs {
    /// List the jobs that have ended, the newest first, with the verdict on how they used their cores
    #[arg(long)]
    pub ended: bool,
    /// Whether JSON is printed.
    #[command(flatten)]
    pub json: JsonArg,
}
