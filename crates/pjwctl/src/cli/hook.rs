//! `hook`: its part of the command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// `hook`.
#[derive(Debug, Clone, Args)]
pub struct Hook {
    /// Which hook of which scheduler
    #[arg(value_enum, value_name = "HOOK")]
    pub which: Which,
    /// Refuse, with exit code 1, what would else go on without pjw; a starter starts the job in any case
    #[arg(long)]
    pub strict: bool,
    /// How long all of it may take
    #[arg(long, value_name = "SECONDS", default_value = "1.2", value_parser = seconds)]
    pub timeout: Duration,
    /// How many cores the job has on this node, where the scheduler doesn't tell or counts something else
    #[arg(long, value_name = "N")]
    pub cores: Option<u32>,
    /// The hook's own arguments, or the job's command
    #[arg(last = true, value_name = "ARG")]
    pub words: Vec<OsString>,
}

/// The hooks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// Prolog: gives the job its cores before its first process
    SlurmProlog,
    /// Epilog: gives them back
    SlurmEpilog,
    /// TaskProlog: exports PJW_CPUS, PJW_NCORES, OMP_NUM_THREADS, OMP_PLACES
    SlurmTaskProlog,
    /// PRE_EXEC or HOST_PRE_EXEC: gives the job its cores, if it runs as root
    LsfPreExec,
    /// POST_EXEC or HOST_POST_EXEC: gives them back, if it runs as root
    LsfPostExec,
    /// JOB_STARTER: runs the job's command with PJW_CPUS, PJW_NCORES, OMP_NUM_THREADS
    LsfJobStarter,
    /// OpenPBS, execjob_begin: JOB USER EXEC_VNODE NODE
    PbsBegin,
    /// OpenPBS, execjob_end: JOB
    PbsEnd,
    /// OpenPBS, execjob_launch: prints the same variables, one a line
    PbsLaunch,
    /// Torque, prologue: its own arguments
    TorqueBegin,
    /// Torque, epilogue: its own arguments
    TorqueEnd,
    /// Grid Engine's prolog, as root: OWNER
    SgeProlog,
    /// Grid Engine's epilog, as root
    SgeEpilog,
    /// Grid Engine's starter_method: as lsf-job-starter
    SgeStarter,
    /// HTCondor's HOOK_PREPARE_JOB: gives the job its cores, if it runs as root
    CondorPrepare,
    /// HTCondor's USER_JOB_WRAPPER: as lsf-job-starter
    CondorJobWrapper,
    /// Flux's prolog: gives the job its cores; needs --cores
    FluxProlog,
    /// Flux's epilog: gives them back
    FluxEpilog,
}

impl Which {
    /// Whether it becomes the job's command.
    #[must_use]
    pub fn is_starter(self) -> bool {
        matches!(self, Self::LsfJobStarter | Self::SgeStarter | Self::CondorJobWrapper)
    }
}

/// A length of time from a number of seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let range = 0.01..=60.0;
    let number = text.parse::<f64>().ok().filter(|seconds| range.contains(seconds));
    number.map(Duration::from_secs_f64).ok_or_else(|| "expected a number of seconds, 0.01 to 60".to_owned())
}
