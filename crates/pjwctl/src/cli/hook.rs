//! The command line of `pjwctl hook`.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// The command line options of `pjwctl hook`. Batch systems run this command at the start and at the end of a job.
#[derive(Debug, Clone, Args)]
pub struct HookArgs {
    /// The name of the hook: the scheduler that runs it, and the step of the job
    #[arg(value_enum, value_name = "HOOK")]
    pub kind: HookKind,
    /// After a failure, exit with code 1 instead of 0. A hook that starts the job's command, such as
    /// lsf-job-starter, starts the command in any case
    #[arg(long)]
    pub strict: bool,
    /// The time limit for the whole hook
    #[arg(long, value_name = "SECONDS", default_value = "1.2", value_parser = seconds)]
    pub timeout: Duration,
    /// The number of cores of the job on this node; replaces the scheduler's number, which may be missing or
    /// may not count cores
    #[arg(long, value_name = "N")]
    pub cores: Option<u32>,
    /// The arguments that the scheduler gives to the hook; for a hook that starts the job's command: this
    /// command. Everything after the first one belongs to them, also without `--`
    #[arg(trailing_var_arg = true, value_name = "ARG")]
    pub arguments: Vec<OsString>,
}

/// The first argument of `pjwctl hook`, such as `slurm-prolog`. It says which batch system runs the command, and at
/// which step of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HookKind {
    /// Prolog: allocates the job's cores before its first process
    SlurmProlog,
    /// Epilog: releases the job's cores
    SlurmEpilog,
    /// TaskProlog: exports PJW_CPUS, PJW_NCORES, PJW_JOB_DIR, OMP_NUM_THREADS and others of run.variables, OMP_PLACES
    SlurmTaskProlog,
    /// PRE_EXEC or HOST_PRE_EXEC: allocates the job's cores, if it runs as root
    LsfPreExec,
    /// POST_EXEC or HOST_POST_EXEC: releases the job's cores, if it runs as root
    LsfPostExec,
    /// JOB_STARTER: runs the job's command with PJW_CPUS, PJW_NCORES, PJW_JOB_DIR, OMP_NUM_THREADS and others
    LsfJobStarter,
    /// OpenPBS's execjob_begin: allocates the job's cores; arguments: JOB USER EXEC_VNODE NODE
    PbsBegin,
    /// OpenPBS's execjob_end: releases the job's cores; argument: JOB
    PbsEnd,
    /// OpenPBS's execjob_launch: prints PJW_CPUS, PJW_NCORES, PJW_JOB_DIR, OMP_NUM_THREADS and others, one per line
    PbsLaunch,
    /// Torque's prologue: allocates the job's cores
    TorqueBegin,
    /// Torque's epilogue: releases the job's cores
    TorqueEnd,
    /// Grid Engine's prolog: allocates the job's cores, if it runs as root; argument: OWNER
    SgeProlog,
    /// Grid Engine's epilog: releases the job's cores, if it runs as root
    SgeEpilog,
    /// Grid Engine's starter_method: the same as lsf-job-starter
    SgeStarter,
    /// HTCondor's HOOK_PREPARE_JOB: allocates the job's cores, if it runs as root
    CondorPrepare,
    /// HTCondor's HOOK_JOB_EXIT: releases the job's cores, if it runs as root
    CondorExit,
    /// HTCondor's USER_JOB_WRAPPER: the same as lsf-job-starter
    CondorJobWrapper,
    /// Flux's prolog: allocates the job's cores; needs --cores
    FluxProlog,
    /// Flux's epilog: releases the job's cores
    FluxEpilog,
}

impl HookKind {
    /// Returns whether the hook is a job starter. The batch system runs a job starter instead of the command of the
    /// job. The job starter sets environment variables, and then executes the command.
    #[must_use]
    pub fn is_job_starter(self) -> bool {
        matches!(self, Self::LsfJobStarter | Self::SgeStarter | Self::CondorJobWrapper)
    }
}

/// Parses a number of seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let range = 0.01..=60.0;
    let number = text.parse::<f64>().ok().filter(|seconds| range.contains(seconds));
    number.map(Duration::from_secs_f64).ok_or_else(|| "expected a number of seconds, 0.01 to 60".to_owned())
}
