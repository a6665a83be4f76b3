//! The command line: the one definition from which help, shell completions and man pages come.

pub mod doctor;
mod hook;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use pjw_core::cpuset::CpuSet;
use pjw_core::housekeeping::HousekeepingRule;

pub use hook::{Hook, Which};

/// Asks the warden of this machine, and tells it what jobs need.
#[derive(Debug, Parser)]
#[command(
    name = "pjwctl",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    about = "Give jobs on this machine cores of their own, and see who holds what",
    long_about = "Give jobs on this machine cores of their own, and see who holds what.\n\n\
        pjwctl talks to pjwd, the warden, over a Unix socket. CPU sets are lists as the kernel writes them \
        (0-3,8). Job ids are source:name; without a source, manual: is meant.",
    after_help = "Examples:\n  \
        pjwctl status                         the machine, its jobs, and what is wrong\n  \
        pjwctl run --cores 2 -- make -j2      a command on two cores of its own\n  \
        pjwctl assign sim --cores 4 --pid 71  four cores for process 71 and what it starts\n  \
        pjwctl explain 71                     why process 71 is where it is\n\n\
        Socket:\n  \
        pjwd is looked for at --socket, else at PJW_SOCKET, else at your own daemon's socket, else at root's, \
        /run/pjwd/pjwd.sock. Your own is $XDG_RUNTIME_DIR/pjwd/pjwd.sock; without that variable it is \
        /run/user/UID/pjwd/pjwd.sock, or /tmp/pjwd-UID/pjwd.sock where /run/user/UID is no directory.\n\n\
        Exit codes: 0 done; 1 refused or failed, with the reason on stderr; 2 usage; run passes on the \
        command's own."
)]
pub struct Cli {
    /// Where pjwd listens, for every command that asks it [default: your own daemon's socket if there is one, else
    /// /run/pjwd/pjwd.sock]
    #[arg(
        long,
        global = true,
        display_order = 900,
        value_name = "PATH",
        env = "PJW_SOCKET",
        hide_env_values = true,
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    pub socket: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show the machine: the core map, the jobs, and what is wrong
    Status(Json),
    /// List the jobs
    Jobs(Json),
    /// Show one job: its processes, threads, pins and history
    Show {
        /// The job, as in slurm:123 or mytest
        job: String,
        /// How it is told.
        #[command(flatten)]
        json: Json,
    },
    /// Give a job cores, and processes; doing it again changes nothing
    #[command(after_help = "Examples:\n  \
        pjwctl assign mytest --cores 4 --pid 4711      four cores for process 4711 and what it starts\n  \
        pjwctl assign mytest --cores 6                 the same job, resized\n  \
        pjwctl assign io --cpus 0-1 --session 4200     these very CPUs for a whole session\n\n\
        Prints the job and its CPUs. Where nothing is free, the job is refused, waits or shares, as on_exhausted \
        in pjwd's configuration says; one that waits prints no CPUs. \
        A job made without processes keeps its cores until it is released, or has had no process for \
        reservation_timeout (24h unless configured). A job made with processes ends with the last of them.")]
    Assign(Assign),
    /// Give a job's cores back, and its processes the masks they had before
    #[command(group = ArgGroup::new("which").required(true).args(["job", "all"]))]
    Release {
        /// The job, as in slurm:123 or mytest
        job: Option<String>,
        /// Every job that you may change
        #[arg(long)]
        all: bool,
    },
    /// Run a command on cores of its own, from its first instruction on
    #[command(after_help = "Examples:\n  \
        pjwctl run --cores 2 -- make -j2\n  \
        pjwctl run --cpus 4-7 --job solver -- ./solver input.dat\n\n\
        The command takes pjwctl's place: process id, signals, terminal and exit status are its own. It \
        finds its job in PJW_JOB, its CPUs in PJW_CPUS and their number of cores in PJW_NCORES. It never waits \
        for cores: where not enough are free it is refused, also with on_exhausted = \"wait\".\n\n\
        Exit codes: the command's own; 127 if it can't be found, 126 if it can't be executed; 1 if the cores \
        were refused, 2 usage.")]
    Run(Run),
    /// Tell why a process (all digits) or a job is where it is
    Explain {
        /// A process id, or a job as in slurm:123 or mytest
        #[arg(value_name = "PID|JOB")]
        subject: String,
        /// How it is told.
        #[command(flatten)]
        json: Json,
    },
    /// Show what the warden would change next; changes nothing
    Plan {
        /// Show instead which jobs would have to move so that larger requests fit again
        #[arg(long)]
        defrag: bool,
        /// How it is told.
        #[command(flatten)]
        json: Json,
    },
    /// Move jobs together so that larger requests fit again; for administrators
    #[command(after_help = "Examples:\n  \
        pjwctl plan --defrag     which jobs would move, and what would fit then\n  \
        pjwctl defrag            moves them\n\n\
        A job keeps its number and kind of cores; its threads follow at once, its memory stays where it is. Jobs that \
        are guaranteed, spread, or on CPUs that were asked for by number stay, and those whose scheduler chose theirs.")]
    Defrag(Json),
    /// Show what happened: assigned, confined, violation, released, …
    Events {
        /// Go on as things happen
        #[arg(long, short)]
        follow: bool,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Show the machine as a tree, and who holds what
    #[command(after_help = "Examples:\n  \
        pjwctl topology                                  this machine, as pjwd sees it\n  \
        pjwctl topology --input node.xml                 a machine saved with: lstopo node.xml\n  \
        pjwctl topology --synthetic \"pack:2 core:8 pu:2\"  a machine made up\n  \
        pjwctl topology --svg node.svg                   a drawing, coloured by job\n\n\
        With --input and --synthetic no running pjwd is needed, only its program.")]
    Topology(Topology),
    /// Replay a log of jobs on any machine and measure what the allocator does; nothing runs
    #[command(
        group = ArgGroup::new("machine").required(true).args(["input", "synthetic"]),
        after_help = "Examples:\n  \
        pjwctl simulate --trace log.swf --input node.xml           a machine saved with: lstopo node.xml\n  \
        pjwctl simulate --trace log.swf --synthetic \"pack:2 l3:8 core:8 pu:2\" --housekeeping 1/l3\n  \
        pjwctl simulate --trace log.swf --input node.xml --reference kubelet   for comparison\n\n\
        A job of the log starts at its submit time if enough is free, else it is refused; it holds its cores for \
        its run time. Needs no running pjwd, only its program."
    )]
    Simulate(Simulate),
    /// Look for what is wrong on this machine; changes nothing, needs neither pjwd nor root
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::Doctor),
    /// What schedulers call: registers a job, lets it go, or tells it its cores
    #[command(after_help = "Examples:\n  \
        pjwctl hook slurm-prolog                  in the script that slurm.conf's Prolog names\n  \
        pjwctl hook lsf-job-starter -- ./solver   becomes ./solver, with PJW_CPUS and others set\n\n\
        Ready files with notes are in share/pjw/hooks. What goes wrong is told in one line on stderr, and the hook \
        exits with 0 in time, so that no job and no node suffers. It asks the system's pjwd, unless --socket or \
        PJW_SOCKET says otherwise.\n\n\
        Exit codes: 0 done, or not done and told; with --strict 1 for the latter; 2 usage; of a starter the \
        command's own, 127 if there is none, 126 if it can't be executed.")]
    Hook(Hook),
    /// Have pjwd read its configuration again; a bad one leaves the old one in force
    Reload,
    /// Check a configuration file as pjwd would read it; pjwd needn't run
    CheckConfig {
        /// The file
        file: PathBuf,
    },
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  pjwctl completions bash > /etc/bash_completion.d/pjwctl")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages: of pjwctl, its commands, pjwd and pjwd.toml
    #[command(after_help = "Examples:\n  \
        pjwctl man | man -l -                            pjwctl(1), read at once\n  \
        pjwctl man --dir /usr/local/share/man/man1       all pages, where man finds them")]
    Man {
        /// Where to; a man1 gets the pages of section 1, and man5 and man8 beside it the others. Without it, pjwctl(1)
        /// goes to standard output
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

/// For a command that tells something.
#[derive(Debug, Clone, Copy, Args)]
pub struct Json {
    /// Print JSON, whose names scripts may rely on
    #[arg(long)]
    pub json: bool,
}

/// How much a job gets.
#[derive(Debug, Clone, Args)]
pub struct Amount {
    /// How many cores
    #[arg(long, value_name = "N", conflicts_with = "cpus")]
    pub cores: Option<u32>,
    /// Exactly these CPUs, as in 0-3,8
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    /// Near this device, as pjwctl topology names it, if there are enough cores [default: what the job has]
    #[arg(long, value_name = "DEVICE", conflicts_with = "cpus")]
    pub near: Option<String>,
    /// Memory from the NUMA nodes of its cores only; needs a cpuset
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false")]
    pub bind_memory: Option<bool>,
    /// Cores in a partition of their own, where the kernel balances nothing; needs a cpuset
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false")]
    pub isolated: Option<bool>,
}

/// `assign`.
#[derive(Debug, Args)]
pub struct Assign {
    /// The job, as in slurm:123 or mytest; it is made if need be
    pub job: String,
    /// How much it gets.
    #[command(flatten)]
    pub amount: Amount,
    /// A process that joins, with all it starts; may be given several times
    #[arg(long = "pid", value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Vec<u32>,
    /// A session whose processes join, with all they start
    #[arg(long, value_name = "SID", value_parser = clap::value_parser!(u32).range(1..))]
    pub session: Option<u32>,
    /// How the cores are chosen [default: what the job has, else pack]
    #[arg(long, value_enum)]
    pub policy: Option<Policy>,
    /// How much the job matters when cores are short [default: what the job has, else normal]
    #[arg(long, value_enum)]
    pub class: Option<Class>,
    /// What --cores counts [default: whole]
    #[arg(long, value_enum, requires = "cores")]
    pub smt: Option<Smt>,
    /// How it is told.
    #[command(flatten)]
    pub json: Json,
}

/// `run`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("amount").required(true).args(["cores", "cpus"]))]
pub struct Run {
    /// How much it gets.
    #[command(flatten)]
    pub amount: Amount,
    /// The job's name; it must be new [default: the command's name and its process id]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// The command and its arguments; what follows the command is its own, also without `--`
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// `topology`.
#[derive(Debug, Args)]
pub struct Topology {
    /// A machine described in hwloc's XML
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub input: Option<PathBuf>,
    /// A machine made up, in hwloc's words
    #[arg(long, value_name = "DESCRIPTION")]
    pub synthetic: Option<String>,
    /// Write a drawing in SVG instead of printing the tree; - is standard output
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub svg: Option<PathBuf>,
    /// How it is told.
    #[command(flatten)]
    pub json: Json,
}

/// `simulate`.
#[derive(Debug, Args)]
pub struct Simulate {
    /// The log, in the Standard Workload Format; - is standard input
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// A machine described in hwloc's XML
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// A machine made up, in hwloc's words
    #[arg(long, value_name = "DESCRIPTION")]
    pub synthetic: Option<String>,
    /// What the log's processors count
    #[arg(long, value_enum, default_value = "core")]
    pub unit: SimulatedUnit,
    /// How the allocator chooses [default: pack]
    #[arg(long, value_enum, conflicts_with = "reference")]
    pub policy: Option<SimulatedPolicy>,
    /// What no job gets, as in the configuration: 0-1,8 or 1/l3
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub housekeeping: HousekeepingRule,
    /// Another's way of choosing instead of the allocator's, to compare with
    #[arg(long, value_enum, value_name = "NAME")]
    pub reference: Option<SimulatedReference>,
    /// Write a line for each started job
    #[arg(long, value_name = "FILE.csv")]
    pub per_job: Option<PathBuf>,
    /// Write what is left free over time, and the largest request that one part of the machine could serve
    #[arg(long, value_name = "FILE.csv")]
    pub fragmentation: Option<PathBuf>,
    /// How it is told.
    #[command(flatten)]
    pub json: Json,
}

/// What a log's processors count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulatedUnit {
    /// Whole cores
    Core,
    /// Logical CPUs one by one, whose siblings may serve two jobs
    Pu,
}

/// How cores are chosen in a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulatedPolicy {
    /// Close together
    Pack,
    /// Evenly over the machine
    Spread,
}

/// The policies of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulatedReference {
    /// The first free cores
    FirstFit,
    /// Kubernetes' static CPU manager, whole cores
    Kubelet,
    /// The same with prefer-align-cpus-by-uncorecache
    KubeletL3,
}

/// How cores are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Close together
    Pack,
    /// Far apart
    Spread,
    /// As --cpus says
    Explicit,
}

/// How much a job matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Class {
    /// Its cores are never lent out nor taken back
    Guaranteed,
    /// The usual
    Normal,
    /// Its cores may be taken back
    Besteffort,
}

/// What a count of cores counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Smt {
    /// Whole cores, all their hardware threads with them
    Whole,
    /// Hardware threads (also: share); siblings may serve another job where the configuration says share_smt
    #[value(alias = "share")]
    Pus,
}

impl Cli {
    /// Reads a command line.
    ///
    /// # Errors
    /// Clap's own, which say what is wrong or hold the help that was asked for.
    pub fn read(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let cli = Self::try_parse_from(words)?;
        match &cli.verb {
            // Clap forgets what a value requires as soon as that conflicts with something given.
            Verb::Assign(wish) if wish.policy == Some(Policy::Explicit) && wish.amount.cpus.is_none() => {
                let needed = "--policy explicit needs --cpus LIST";
                let whole = definition();
                let mut assign = whole.find_subcommand("assign").cloned().unwrap_or_else(|| whole.clone());
                Err(assign.error(ErrorKind::MissingRequiredArgument, needed))
            }
            _ => Ok(cli),
        }
    }
}

/// The definition, with everything clap adds to it: what completions and man pages are made from.
#[must_use]
pub fn definition() -> clap::Command {
    let mut command = Cli::command();
    command.build();
    command
}

/// A value's name on the command line, which is its name on the wire too.
#[must_use]
pub fn name_of<V: ValueEnum>(value: &V) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::read(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for line in [
            "pjwctl",
            "pjwctl nonsense",
            "pjwctl show",
            "pjwctl release",
            "pjwctl release a --all",
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
            "pjwctl topology --input a --synthetic b",
            "pjwctl topology --svg a --json",
            "pjwctl completions cmd.exe",
            "pjwctl simulate --synthetic core:2",
            "pjwctl simulate --trace a.swf",
            "pjwctl simulate --trace a.swf --synthetic core:2 --input a.xml",
            "pjwctl simulate --trace a.swf --synthetic core:2 --unit thread",
            "pjwctl simulate --trace a.swf --synthetic core:2 --policy explicit",
            "pjwctl simulate --trace a.swf --synthetic core:2 --policy pack --reference kubelet",
            "pjwctl simulate --trace a.swf --synthetic core:2 --reference nobody",
            "pjwctl simulate --trace a.swf --synthetic core:2 --housekeeping 1/l4",
            "pjwctl simulate --trace a.swf --synthetic core:2 --housekeeping 3-1",
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
    fn everything_from_the_command_on_is_the_commands() {
        for line in ["pjwctl run --cores 1 -- ls --cores -- -l", "pjwctl run --cores 1 ls --cores -- -l"] {
            let Verb::Run(run) = parse(line).unwrap().verb else { panic!("not run") };
            assert_eq!(run.command, ["ls", "--cores", "--", "-l"], "{line}");
            assert_eq!(run.amount.cores, Some(1));
        }
    }

    #[test]
    fn zero_cores_are_left_to_the_daemon_to_refuse() {
        assert!(parse("pjwctl assign a --cores 0").is_ok());
    }

    #[test]
    fn every_visible_verb_says_what_it_does() {
        for verb in definition().get_subcommands().filter(|verb| !verb.is_hide_set()) {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
        }
    }
}
