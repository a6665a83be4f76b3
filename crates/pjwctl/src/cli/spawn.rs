//! The options of `pjwctl spawn`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pjw_core::parts::DivisionRule;

use super::core_count::{CoreCountArg, core_count};
use super::cores_unit::CoresUnitArg;
use super::json::JsonArg;
use super::numa_node_rule::NumaNodeRuleArg;
use super::number::at_least_one;
use super::priority_class::PriorityClassArg;

/// The examples below the help of `pjwctl spawn`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl spawn -n 8 -- ./solver --rank %r --of %n\n  \
    pjwctl spawn -n 4 --cores 16 --label -- ./worker      four cores for each of four\n  \
    pjwctl spawn -n 8 --share memory -- ./stencil         eight processes in one address space\n  \
    pjwctl spawn -n 2 --local --map '0-1;2-3' -- ./worker   without a daemon, on these CPUs\n\n\
    One job gets the cores. Its cores are divided into parts, and instance i runs on part i, in turns, from its first \
    instruction. In arguments, %r is the rank from 0, %n the number of instances, %% a percent sign. Each instance has \
    PJW_RANK, PJW_SIZE, PJW_CPUS, PJW_NCORES, PJW_GROUP and, without --local, PJW_JOB and PJW_JOB_DIR in its environment. \
    OMP_NUM_THREADS and the other variables of run.variables in pjwd's configuration have the size of its part, except those that \
    are set already. Everything is checked first: if something is wrong, nothing starts. Signals that pjwctl gets go to all \
    instances, except those of job control, SIGPIPE and SIGCHLD. If pjwctl is killed, the kernel kills the instances; with --async they \
    live on.\n\n\
    Exit codes: 0 if all instances ended with 0, else the highest of theirs, 128 + signal for one that a signal ended; \
    127 if the command, or the interpreter that it names, does not exist, 126 if it can't be executed; 125 if a fork of a \
    loaded program could not take its CPUs, NUMA node or streams; 1 if nothing was started for another reason, if the start \
    failed, or if the output could not be printed; 2 usage.";

/// The usage error for `--share memory` with a value of `--proxy` other than `never`.
pub(super) const SHARE_WITH_PROXY: &str =
    "--share memory loads the program for each instance: leave --proxy out";

#[derive(Debug, Args)]
#[command(
    override_usage = "pjwctl spawn [OPTIONS] -n <N> -- <CMD>...\n       pjwctl spawn [OPTIONS] [-n <N>] --multi <FILE>"
)]
/// The command line options of `pjwctl spawn`, which starts several instances (processes) of a command. Each instance
/// runs on some of the cores of a job.
pub struct SpawnArgs {
    /// The number of instances
    #[arg(
        short = 'n',
        long = "instances",
        value_name = "N",
        required_unless_present = "multi_file",
        value_parser = instance_count
    )]
    pub instances: Option<u32>,
    /// The number of cores of the job, or all: everything that is free [default: one for each instance; with
    /// --local, and in the job of a batch system: all cores of pjwctl's affinity mask]
    #[arg(long, value_name = "M|all", value_parser = core_count)]
    pub cores: Option<CoreCountArg>,
    /// The unit of --cores, and of its default [default: whole]
    #[arg(long = "smt", value_enum, value_name = "SMT", conflicts_with = "local")]
    pub cores_unit: Option<CoresUnitArg>,
    /// The job's name, which must be new [default: the command's name and its process id]
    #[arg(long, value_name = "NAME", conflicts_with = "local")]
    pub job: Option<String>,
    /// Whether the job has cores of its own, and whether its idle cores may be lent [default: normal]
    #[arg(long, value_enum, conflicts_with = "local")]
    pub class: Option<PriorityClassArg>,
    /// The parts into which the cores are divided for the instances: one for each core, pu, l3 or numa node,
    /// or CPU lists [default: one for each instance]
    #[arg(long, value_name = "core|pu|l3|numa|LIST;LIST...")]
    pub map: Option<DivisionRule>,
    /// The order in which the instances get the parts, if the cores are in several NUMA nodes; also where processes go
    /// that the instances start [default: the order of the machine]
    #[arg(long, value_enum, value_name = "RULE")]
    pub within_job: Option<NumaNodeRuleArg>,
    /// Whether the program is loaded once and instances are forks of it, which share its address layout
    #[arg(long, value_enum, default_value = "never")]
    pub proxy: ProxyArg,
    /// Start the instances in one address space: each has its own variables and process id, and a pointer of one is
    /// good in all. The program must be static and position-independent: linked with -static-pie
    #[arg(long = "share", value_enum, value_name = "WHAT", conflicts_with_all = ["replicate", "multi_file"])]
    pub share: Option<ShareArg>,
    /// Copy the program and its libraries to each NUMA node that instances run on; the copies are removed
    /// when the instances have ended
    #[arg(long)]
    pub replicate: bool,
    /// Return when all instances have begun; the instances continue to run as members of the job. --json prints the
    /// job's name and the process ids
    #[arg(long = "async", conflicts_with = "prefix_output_with_rank")]
    pub in_background: bool,
    /// Read commands from a file: on each line ranks (0-2,5 or * for the others), a program, and its arguments
    #[arg(long = "multi", value_name = "FILE", conflicts_with = "command")]
    pub multi_file: Option<PathBuf>,
    /// Put the rank before each line that an instance prints; a line of more than 1 MiB is cut
    #[arg(long = "label")]
    pub prefix_output_with_rank: bool,
    /// Use no daemon: instances run on the cores of pjwctl's affinity mask, in pjwctl's cgroup
    #[arg(long)]
    pub local: bool,
    /// Whether the result is printed as JSON.
    #[command(flatten)]
    pub json: JsonArg,
    /// The command and its arguments; everything after the command belongs to it, also without `--`
    #[arg(trailing_var_arg = true, required_unless_present = "multi_file", value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Parses the number of instances. Accepts 0, which `pjwctl spawn` then refuses with the message that nothing was
/// started.
fn instance_count(text: &str) -> Result<u32, String> {
    if text.parse::<u32>() == Ok(0) { Ok(0) } else { at_least_one(text) }
}

/// The value of `pjwctl spawn --share`: what the started instances (processes) share. The only value is `memory`: all
/// instances run in one address space, because they are created by clone3(2) with `CLONE_VM`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShareArg {
    /// One address space
    Memory,
}

/// The value of `pjwctl spawn --proxy`: whether each instance (process) executes the program itself, or is forked
/// from a process that has already loaded the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProxyArg {
    /// Each instance executes the program
    Never,
    /// Instances are forks of a loaded program where that is possible and there are at least two; else each executes it
    Auto,
    /// Instances are forks of a loaded program; nothing starts if a check before the start finds that this is not
    /// possible. An instance that can't be a fork later executes the program, and a line says so
    Always,
    /// Instances are forks of the program at its call of pspawn_fork_here, pjw_spawn(3); without that call each
    /// executes it
    Late,
}
