//! The command line of the daemon.

use std::path::PathBuf;

use clap::Parser;

/// The options of the command line of pjwd. With `--check-config`, `--release-all`, `--thaw` or `--topology-json`, pjwd
/// does this one task and exits. Without them, pjwd runs as a daemon.
#[derive(Debug, Parser)]
#[command(
    version,
    about = "pjwd gives each job on this machine cores of its own",
    long_about = "pjwd gives each job on this machine cores of its own.\n\n\
        A job's processes and all their descendants stay on the job's cores. As root, pjwd serves the jobs of all \
        users; as another user, it serves the jobs of that user. Use pjwctl to talk to pjwd."
)]
pub struct DaemonOptions {
    /// The configuration file. Default for root: /etc/pjw/pjwd.toml; for other users: $XDG_CONFIG_HOME/pjw/pjwd.toml,
    /// or ~/.config/pjw/pjwd.toml without the variable. The default file may be missing.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The control socket. Default for root: /run/pjwd/pjwd.sock; for other users: in $XDG_RUNTIME_DIR/pjwd.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// The directory for grants and saved affinity masks, which outlive a restart. Default: the default directory of
    /// the socket.
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Run beside another pjwd of this user, for tests. Each of the two may give the same cores to a job of its own.
    /// The cgroups of the jobs are named after the state directory, below /pjw_HASH instead of /pjw, and status has a
    /// warning.
    #[arg(long)]
    pub(crate) beside: bool,
    /// Check the configuration, print the mistakes, and exit.
    #[arg(long)]
    pub(crate) check_config: bool,
    /// Restore every affinity mask that a daemon changed, move processes back to their former cgroups, remove the
    /// cpusets of jobs, and exit. For use when the daemon is dead or is removed. Needs no configuration. Refused while
    /// a daemon runs: the error names its process and the command that ends it, also if it hangs.
    #[arg(long, conflicts_with = "check_config")]
    pub(crate) release_all: bool,
    /// Thaw the jobs that a daemon froze because no core was free for them, and exit. For use after a daemon was
    /// killed, if no other daemon follows. The unit of systemd does this by itself. Changes nothing else.
    #[arg(long, conflicts_with_all = ["check_config", "release_all"])]
    pub(crate) thaw: bool,
    /// Wait for the end of the standard input, which is the end of the daemon that started this process. Then do what
    /// --thaw does, unless another daemon runs.
    #[arg(long, hide = true, conflicts_with_all = ["check_config", "release_all", "thaw"])]
    pub(crate) thaw_after_end: bool,
    /// Print a topology as JSON and exit: of this machine, or from --input or --synthetic.
    #[arg(long, hide = true)]
    pub(crate) topology_json: bool,
    /// Print the topology in the format of pjw-core, with all details, for simulations.
    #[arg(long, hide = true, requires = "topology_json")]
    pub(crate) plain: bool,
    /// A topology file written by lstopo.
    #[arg(long, hide = true, requires = "topology_json", value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
    /// A synthetic topology.
    #[arg(long, hide = true, requires = "topology_json", conflicts_with = "input", value_name = "TEXT")]
    pub(crate) synthetic: Option<String>,
}
