//! The command line of pjwctl, defined for the library clap. Help, shell completions and man pages are generated from
//! this definition.

mod advise;
mod after_help;
mod core_count;
mod cores_unit;
pub mod doctor;
mod events;
mod hook;
mod json;
mod numa_node_rule;
mod number;
mod priority_class;
mod provision;
mod report;
mod show;
mod simulate;
mod spawn;
mod topology;
mod want;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use pjw_core::cpuset::CpuSet;

use core_count::core_count;
use number::at_least_one;

pub use advise::AdviseArgs;
pub use core_count::CoreCountArg;
pub use cores_unit::CoresUnitArg;
pub use hook::{HookArgs, HookKind};
pub use json::JsonArg;
pub use numa_node_rule::NumaNodeRuleArg;
pub use priority_class::PriorityClassArg;
pub use provision::ProvisionArgs;
pub use report::{JobsArgs, ReportArgs};
pub use show::ShowArgs;
pub use simulate::{ProcessorUnitArg, ReferencePolicyArg, SimulateArgs, SimulatePolicyArg};
pub use spawn::{ProxyArg, ShareArg, SpawnArgs};
pub use topology::TopologyArgs;
pub use want::{WantArgs, WantedCoresArg};

#[derive(Debug, Parser)]
#[command(
    name = "pjwctl",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    about = "Give jobs on this machine cores of their own, and show which job holds which cores",
    long_about = "Give jobs on this machine cores of their own, and show which job holds which cores.\n\n\
        pjwctl sends requests to the daemon pjwd over a Unix socket. CPU sets are lists as the kernel writes them \
        (0-3,8). Job ids are source:name; the default source is manual.",
    after_help = "Examples:\n  \
        pjwctl status                         the machine, its jobs, and warnings\n  \
        pjwctl run --cores 2 -- make -j2      a command on two cores of its own\n  \
        pjwctl assign sim --cores 4 --pid 71  four cores for process 71 and its descendants\n  \
        pjwctl explain 71                     the reasons for the CPUs of process 71\n\n\
        Socket:\n  \
        The socket is that of --socket, else of PJW_SOCKET, else of your own daemon, else of the system's daemon, \
        /run/pjwd/pjwd.sock. That of your own daemon is $XDG_RUNTIME_DIR/pjwd/pjwd.sock; without that variable it is \
        /run/user/UID/pjwd/pjwd.sock, or /tmp/pjwd-UID/pjwd.sock where /run/user/UID is no directory.\n\n\
        Exit codes: 0 done; 1 refused or failed, with the reason on stderr; 2 usage; run and \
        spawn have the exit codes of their commands."
)]
/// The parsed command line of pjwctl: the path of the daemon's socket, and the subcommand with its options.
pub struct Cli {
    #[arg(
        long,
        global = true,
        display_order = 900,
        value_name = "PATH",
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    /// The socket of pjwd [env: PJW_SOCKET] [default: your own daemon's socket if there is one, else
    /// /run/pjwd/pjwd.sock]
    pub socket: Option<PathBuf>,

    /// The subcommand, such as `status`, with its own options.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// A subcommand of pjwctl, such as `status` or `run`, with its options from the command line.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Show the machine: core map, jobs, warnings
    Status(JsonArg),
    /// List the jobs
    Jobs(JobsArgs),
    /// Show one job: its processes, threads, pins and history
    #[command(after_help = show::EXAMPLES)]
    Show(ShowArgs),
    /// Show how a job that has ended used its cores, and what to ask for the next time
    #[command(after_help = report::EXAMPLES)]
    Report(ReportArgs),
    /// Give cores to a job, and add processes to it; a second call changes nothing
    #[command(after_help = after_help::ASSIGN)]
    Assign(AssignArgs),
    /// Release a job: free its cores and restore the masks of its processes
    #[command(group = ArgGroup::new("which").required(true).args(["job", "all"]), after_help = after_help::RELEASE)]
    Release {
        /// The job, as in slurm:123 or mytest
        job: Option<String>,
        /// All jobs that you may change
        #[arg(long)]
        all: bool,
    },
    /// Say how many cores a job can use at present
    #[command(after_help = want::EXAMPLES)]
    Want(WantArgs),
    /// Promise cores to a service, whether it runs or not
    #[command(after_help = provision::EXAMPLES)]
    Provision(ProvisionArgs),
    /// Take a promise of cores back
    Unprovision {
        /// The name of the service
        name: String,
    },
    /// Run a command that is confined to cores of its own from its first instruction
    #[command(after_help = "Examples:\n  \
        pjwctl run --cores 2 -- make -j2\n  \
        pjwctl run --cores all -- ./farm         everything that is free\n  \
        pjwctl run --cpus 4-7 --job solver -- ./solver input.dat\n\n\
        The command replaces pjwctl: process id, signals, terminal and exit status are those of the command. \
        PJW_JOB has its job, PJW_CPUS its CPUs, PJW_NCORES its number of cores, PJW_JOB_DIR the directory of its core map. \
        OMP_NUM_THREADS and the other variables of run.variables in pjwd's configuration have the number of its cores or \
        PUs, except those that are set already. It never waits for cores: if not enough are free it is refused, also with on_exhausted = \"wait\".\n\n\
        Exit codes: the command's own; 127 if it does not exist, 126 if it can't be executed; 1 if the cores \
        were refused, 2 usage.")]
    Run(RunArgs),
    /// Start many instances of a command, each on its own cores from its first instruction
    #[command(after_help = spawn::EXAMPLES)]
    Spawn(SpawnArgs),
    /// Explain why a process (all digits) or a job has its CPUs
    Explain {
        /// A process id, or a job as in slurm:123 or mytest
        #[arg(value_name = "PID|JOB")]
        subject: String,
        /// Whether JSON is printed.
        #[command(flatten)]
        json: JsonArg,
    },
    /// Show the changes that the next cycle would make; changes nothing
    Plan {
        /// Show the jobs that would have to move so that larger requests fit again
        #[arg(long)]
        defrag: bool,
        /// Whether JSON is printed.
        #[command(flatten)]
        json: JsonArg,
    },
    /// Move jobs together so that larger requests fit again; for administrators
    #[command(after_help = "Examples:\n  \
        pjwctl plan --defrag     the jobs that would move, and the requests that would fit then\n  \
        pjwctl defrag            moves them\n\n\
        A job keeps its number and kind of cores; its threads move at once, its memory does not move. Jobs do not move \
        if they are guaranteed or spread, if their CPUs were requested by number, or if a scheduler chose them.")]
    Defrag(JsonArg),
    /// Show events: assigned, confined, violation, released, …
    #[command(after_help = events::EXAMPLES)]
    Events {
        /// Continue with new events
        #[arg(long, short)]
        follow: bool,
        /// Print JSON, one object per line
        #[arg(long)]
        json: bool,
    },
    /// Show the machine as a tree, with the holders of its CPUs
    #[command(after_help = "Examples:\n  \
        pjwctl topology                                  this machine, from pjwd\n  \
        pjwctl topology --input node.xml                 a machine saved with: lstopo node.xml\n  \
        pjwctl topology --synthetic \"pack:2 core:8 pu:2\"  a synthetic machine\n  \
        pjwctl topology --svg node.svg                   a drawing, coloured by job\n\n\
        With --input and --synthetic no running pjwd is needed, only its program.")]
    Topology(TopologyArgs),
    /// Replay a job log on any machine and measure the allocator; nothing is run
    #[command(after_help = simulate::EXAMPLES)]
    Simulate(SimulateArgs),
    /// Compute how many items a farm of workers needs so that its cores are used
    #[command(after_help = advise::EXAMPLES)]
    Advise(AdviseArgs),
    /// Diagnose this machine; changes nothing, needs neither pjwd nor root
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// For schedulers: register a job, release it, or print its cores
    #[command(after_help = "Examples:\n  \
        pjwctl hook slurm-prolog                  in the script of Prolog in slurm.conf\n  \
        pjwctl hook lsf-job-starter -- ./solver   executes ./solver, with PJW_CPUS and others set\n\n\
        Ready files with notes are in share/pjw/hooks. An error is one line on stderr, and the hook exits \
        with 0 in time, so that it disturbs no job and no node. It connects to the system's pjwd, unless --socket \
        or PJW_SOCKET names another.\n\n\
        Exit codes: 0 done, or failed with a message (1 with --strict); 2 usage; of a starter the \
        command's own, 127 if the command does not exist, 126 if it can't be executed.")]
    Hook(HookArgs),
    /// Make pjwd read its configuration again; an invalid one leaves the old one in force
    Reload,
    /// Check a configuration file as pjwd does; needs no running pjwd
    CheckConfig {
        /// The configuration file
        file: PathBuf,
    },
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  pjwctl completions bash > /etc/bash_completion.d/pjwctl")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of pjwctl, its commands, pjwd and pjwd.toml
    #[command(after_help = "Examples:\n  \
        pjwctl man | man -l -                            shows pjwctl(1)\n  \
        pjwctl man --dir /usr/local/share/man/man1       all pages, in the directories of man")]
    Man {
        /// The directory, which must exist. A man1 gets the pages of section 1; the man5 and man8 beside it get the others. Without it,
        /// pjwctl(1) goes to standard output
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

/// The command line options that `pjwctl assign` and `pjwctl run` have in common: which cores a job gets, its
/// priority class, whether its cores form an isolated cpuset partition, and on which NUMA nodes its memory and its
/// new processes are placed.
#[derive(Debug, Clone, Args)]
pub struct CoreArgs {
    /// The number of cores, or all: everything that is free, and what the job holds already
    #[arg(long, value_name = "N|all", conflicts_with = "cpus", value_parser = core_count)]
    pub cores: Option<CoreCountArg>,
    /// Exactly these CPUs, as in 0-3,8
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    /// Cores near this device (a name that pjwctl topology shows); any cores if too few near ones are free
    /// [default: unchanged]
    #[arg(long = "near", value_name = "DEVICE", conflicts_with = "cpus")]
    pub near_device: Option<String>,
    /// Allocate memory only from the NUMA nodes of the job's cores; works only if pjwd gives the job a cpuset
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false")]
    pub bind_memory: Option<bool>,
    /// Put the cores into an isolated cpuset partition, where the kernel balances no load; needs cgroup v2, and
    /// works only if pjwd gives the job a cpuset
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false")]
    pub isolated: Option<bool>,
    /// Whether the job has cores of its own, and whether its idle cores may be lent [default: unchanged; of a
    /// new job: normal]
    #[arg(long, value_enum)]
    pub class: Option<PriorityClassArg>,
    /// Where new processes go if the cores are in several NUMA nodes [default: unchanged; of a new job: default]
    #[arg(long, value_enum, value_name = "RULE")]
    pub within_job: Option<NumaNodeRuleArg>,
}

fn parse_pid(text: &str) -> Result<u32, &'static str> {
    let pid = text.parse().ok().filter(|&pid| pid > 0);
    pid.ok_or("give the number of one process, such as 4711, and --pid again for each other one")
}

/// The command line options of `pjwctl assign`, which gives cores to a job and adds processes to it.
#[derive(Debug, Args)]
pub struct AssignArgs {
    /// The job, as in slurm:123 or mytest; it is created if it does not exist
    pub job: String,
    /// The options that say what cores the job gets.
    #[command(flatten)]
    pub core_args: CoreArgs,
    /// A process that joins the job, with its descendants; may be given several times
    #[arg(long = "pid", value_name = "PID", value_parser = parse_pid)]
    pub pids: Vec<u32>,
    /// A session whose processes join the job, with their descendants
    #[arg(long, value_name = "SID", value_parser = at_least_one)]
    pub session: Option<u32>,
    /// The policy that chooses the cores [default: unchanged; of a new job: pack]
    #[arg(long, value_enum)]
    pub policy: Option<PlacementArg>,
    /// The unit of --cores [default: whole]
    #[arg(long = "smt", value_enum, value_name = "SMT", requires = "cores")]
    pub cores_unit: Option<CoresUnitArg>,
    /// Whether the reply is printed as JSON instead of text.
    #[command(flatten)]
    pub json: JsonArg,
}

/// The command line options of `pjwctl run`, which creates a job and starts a command on the job's cores.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("amount").required(true).args(["cores", "cpus"]))]
pub struct RunArgs {
    /// The options that say what cores the job gets.
    #[command(flatten)]
    pub core_args: CoreArgs,
    /// The unit of --cores [default: whole]
    #[arg(long = "smt", value_enum, value_name = "SMT", requires = "cores")]
    pub cores_unit: Option<CoresUnitArg>,
    /// The job's name, which must be new [default: the command's name and its process id]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// The command and its arguments; everything after the command belongs to it, also without `--`
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// The value of `pjwctl assign --policy`: whether the job gets cores that are close together, cores that are spread
/// over the machine, or exactly the CPUs in `--cpus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlacementArg {
    /// Close together
    Pack,
    /// Evenly over the machine
    Spread,
    /// The CPUs given by --cpus
    Explicit,
}

impl Cli {
    /// Parses the command line. The first element of `arguments` is the name of the program.
    ///
    /// # Errors
    /// A usage error, with its message. For `--help` and `--version`, an error that contains the text to print.
    pub fn parse_args(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let words: Vec<OsString> = arguments.into_iter().collect();
        let mut cli = Self::try_parse_from(words.iter().cloned())
            .map_err(|error| explain_negative_number(error, &words))?;
        // If clap read the variable itself, each usage line in an error would show --socket as required.
        cli.socket = cli.socket.or_else(|| std::env::var_os("PJW_SOCKET").map(PathBuf::from));
        let (name, kind, why) = match &cli.command {
            // clap drops the requirements of a value as soon as the value conflicts with another argument.
            CliCommand::Assign(request)
                if request.policy == Some(PlacementArg::Explicit) && request.core_args.cpus.is_none() =>
            {
                ("assign", ErrorKind::MissingRequiredArgument, "--policy explicit needs --cpus LIST")
            }
            // For clap, `--proxy never` would be a conflict too.
            CliCommand::Spawn(request) if request.share.is_some() && request.proxy != ProxyArg::Never => {
                ("spawn", ErrorKind::ArgumentConflict, spawn::SHARE_WITH_PROXY)
            }
            _ => return Ok(cli),
        };
        let pjwctl = clap_command();
        let mut command = pjwctl.find_subcommand(name).cloned().unwrap_or_else(|| pjwctl.clone());
        Err(command.error(kind, why))
    }
}

/// Replaces clap's error for a negative number, such as `--cores -1`. clap takes the number for an option, and
/// proposes `-- -1`, which is wrong here. Returns every other error as it is. `words` is the command line.
fn explain_negative_number(error: clap::Error, words: &[OsString]) -> clap::Error {
    let is_negative_number = |text: &str| {
        text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument || !is_negative_number(option) {
        return error;
    }
    let mut texts = words.iter().filter_map(|word| word.to_str());
    let number = texts.find(|text| is_negative_number(text) && text.starts_with(option)).unwrap_or(option);
    clap::Error::raw(
        ErrorKind::InvalidValue,
        format!("{number} looks like an option: give a value without -\n"),
    )
}

/// Returns the definition of the whole command line as a value of the library clap. Shell completions and man pages
/// are generated from this definition.
#[must_use]
pub fn clap_command() -> clap::Command {
    let mut command = Cli::command();
    command.build();
    command
}

/// Returns the name of `value`, which is a value of a command line option. This is the text that users write on the
/// command line, such as `besteffort`. Requests to the daemon contain the same text.
#[must_use]
pub fn value_name<V: ValueEnum>(value: &V) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::parse_args(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn contradicting_arguments_are_a_usage_error() {
        for line in [
            "pjwctl",
            "pjwctl nonsense",
            "pjwctl show",
            "pjwctl release",
            "pjwctl release a --all",
            "pjwctl report",
            "pjwctl report a --last 1",
            "pjwctl report --last 0",
            "pjwctl report --last many",
            "pjwctl report --last 2 --jobstats",
            "pjwctl report a --json --jobstats",
            "pjwctl run -- true",
            "pjwctl run --cores 1",
            "pjwctl run true --cores 1",
            "pjwctl run --cores 1 --true",
            "pjwctl run --cores 1 --cpus 0 -- true",
            "pjwctl assign a --cores -1",
            "pjwctl assign a --cores many",
            "pjwctl assign a --cpus 3-1",
            "pjwctl assign a --cpus 0,,1",
            "pjwctl assign a --cpus 0,0",
            "pjwctl assign a --cpus nonsense",
            "pjwctl assign a --cores 1 --cpus 0",
            "pjwctl assign a --cores 1 --pid 0",
            "pjwctl assign a --policy explicit --cores 1",
            "pjwctl assign a --policy explicit --pid 1",
            "pjwctl assign a --cores 1 --class precious",
            "pjwctl spawn -n 2 --share memory --proxy auto -- a",
            "pjwctl topology --input a --synthetic b",
            "pjwctl topology --svg a --json",
            "pjwctl completions cmd.exe",
            "pjwctl advise --serial 1s",
            "pjwctl advise --serial 1 --item 1s",
            "pjwctl advise --serial 1s --item 0s",
            "pjwctl advise --serial 1s --item 1s --workers 0",
            "pjwctl advise --serial 1s --item 1s --items 0",
            "pjwctl simulate --synthetic core:2",
            "pjwctl simulate --trace a.swf",
            "pjwctl simulate --trace a.swf --synthetic core:2 --input a.xml",
            "pjwctl simulate --trace a.swf --synthetic core:2 --unit thread",
            "pjwctl simulate --trace a.swf --synthetic core:2 --policy explicit",
            "pjwctl simulate --trace a.swf --synthetic core:2 --policy pack --reference kubelet",
            "pjwctl simulate --trace a.swf --synthetic core:2 --reference nobody",
            "pjwctl simulate --trace a.swf --synthetic core:2 --housekeeping 1/l4",
            "pjwctl simulate --trace a.swf --synthetic core:2 --housekeeping 3-1",
            "pjwctl simulate --trace a.swf --demand a.csv --synthetic core:2",
            "pjwctl simulate --demand a.csv --synthetic core:2 --reference kubelet",
            "pjwctl simulate --demand a.csv --synthetic core:2 --unit pu",
            "pjwctl simulate --demand a.csv --synthetic core:2 --lend-after 2",
            "pjwctl simulate --trace a.swf --synthetic core:2 --buffer 2",
        ] {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn a_usage_error_shows_the_usage_of_its_own_command() {
        let text = parse("pjwctl assign a --policy explicit --pid 1").unwrap_err().to_string();
        assert!(text.contains("Usage: pjwctl assign [OPTIONS] <JOB>"), "{text}");
    }

    #[test]
    fn a_bad_cpu_list_is_explained() {
        let text = parse("pjwctl assign a --cpus 3-1").unwrap_err().to_string();
        assert!(text.contains("runs backwards: write 1-3"), "{text}");
    }

    #[test]
    fn everything_after_the_command_belongs_to_the_command() {
        for line in ["pjwctl run --cores 1 -- ls --cores -- -l", "pjwctl run --cores 1 ls --cores -- -l"] {
            let CliCommand::Run(run) = parse(line).unwrap().command else { panic!("not run") };
            assert_eq!(run.command, ["ls", "--cores", "--", "-l"], "{line}");
            assert_eq!(run.core_args.cores, Some(CoreCountArg::Count(1)));
        }
    }

    #[test]
    fn a_hook_ends_after_1200_ms_by_default() {
        let CliCommand::Hook(hook) = parse("pjwctl hook slurm-prolog").unwrap().command else {
            panic!("not hook")
        };
        assert_eq!(hook.timeout, std::time::Duration::from_millis(1200));
    }

    #[test]
    fn zero_cores_are_left_to_the_daemon_to_refuse() {
        assert!(parse("pjwctl assign a --cores 0").is_ok());
    }

    #[test]
    fn every_visible_verb_has_a_description() {
        for verb in clap_command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
        }
    }
}
