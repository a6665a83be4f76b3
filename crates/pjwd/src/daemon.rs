//! From the command line to a running daemon, and its clean end.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, anyhow};
use clap::Parser;
use nix::unistd::{Uid, User};
use pjw_core::process::Pid;
use pjw_core::state::WardenState;
use pjw_core::topology::Topology;
use pjw_ipc::bind::bind;
use pjw_ipc::client::runtime_dir;
use pjw_ipc::server::{Limits, serve};
use pjw_linux::node::LinuxNode;
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{activation, clock, probe};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

use crate::attend::{Attendant, InForce};
use crate::config::Config;
use crate::control::Control;
use crate::cycle::Warden;
use crate::events::{Message, Outbox, letter_box};
use crate::journal::FileJournal;
use crate::logging::Logging;
use crate::publish::Publisher;
use crate::{notify, report, tree};

/// pjwd keeps the jobs on this machine out of each other's way.
///
/// Every job gets cores of its own; whatever a job starts stays on them. Runs as root for everybody's jobs, or as
/// a plain user for that user's own. Ask it with pjwctl.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Options {
    /// The configuration. Root's default is /etc/pjw/pjwd.toml, if it is there; a user's is
    /// ~/.config/pjw/pjwd.toml, if it is there.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The control socket. Root's default is /run/pjwd/pjwd.sock; a user's is in $XDG_RUNTIME_DIR/pjwd.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Where grants and undo records are kept over a restart. Default: the socket's default directory.
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Check the configuration, say what is wrong with it, and end.
    #[arg(long)]
    check_config: bool,
    /// Print a topology as JSON and end: this machine's, or that of --input or --synthetic.
    #[arg(long, hide = true)]
    topology_json: bool,
    /// Print it as pjw-core writes a machine down: with nothing left out, for simulations.
    #[arg(long, hide = true, requires = "topology_json")]
    plain: bool,
    /// A topology file that lstopo wrote.
    #[arg(long, hide = true, requires = "topology_json", value_name = "FILE")]
    input: Option<PathBuf>,
    /// A synthetic topology.
    #[arg(long, hide = true, requires = "topology_json", conflicts_with = "input", value_name = "TEXT")]
    synthetic: Option<String>,
}

/// Runs, and says how it ended: 0 done, 1 failed.
#[must_use]
pub fn main(options: &Options) -> ExitCode {
    let done = if options.topology_json {
        print_topology(options)
    } else if options.check_config {
        check_config(options)
    } else {
        run(options)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pjwd: {}", report::chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn print_topology(options: &Options) -> anyhow::Result<()> {
    let source = match (&options.input, &options.synthetic) {
        (Some(path), _) => TopologySource::Xml(path),
        (None, Some(text)) => TopologySource::Synthetic(text),
        (None, None) => TopologySource::Live,
    };
    let topology = load(source)?;
    let text = if options.plain {
        serde_json::to_string(&topology)
    } else {
        serde_json::to_string(&tree::topology_on_the_wire(&topology))
    };
    let text = text.context("can't print the topology")?;
    writeln!(std::io::stdout(), "{text}").context("can't print the topology")
}

fn check_config(options: &Options) -> anyhow::Result<()> {
    let topology = load(TopologySource::Live)?;
    let (config, _) = checked_config(options.config.as_deref(), &topology)?;
    let what =
        config.path().map_or_else(|| "no file, all defaults".to_owned(), |path| path.display().to_string());
    writeln!(std::io::stdout(), "{what}: ok").context("can't print")
}

fn checked_config(
    path: Option<&Path>,
    topology: &Topology,
) -> anyhow::Result<(Config, pjw_core::policy::Policy)> {
    let checked =
        Config::load(path).and_then(|config| config.policy(topology).map(|policy| (config, policy)));
    checked.map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        anyhow!("{}", problems.join("\n"))
    })
}

fn run(options: &Options) -> anyhow::Result<()> {
    let topology = load(TopologySource::Live)?;
    let (config, mut policy) = checked_config(options.config.as_deref(), &topology)?;
    let logging = Logging::start(config.settings())?;

    let uid = Uid::effective().as_raw();
    let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let own_dir = runtime_dir(uid, xdg.as_deref());
    let state_dir = options.state_dir.clone().unwrap_or_else(|| own_dir.clone());
    let socket_path = options.socket.clone().unwrap_or_else(|| own_dir.join("pjwd.sock"));
    if options.socket.is_none() || options.state_dir.is_none() {
        own_directory(&own_dir, uid)?;
    }
    let passed = notify::passed_socket().context("can't use the socket that systemd passed")?;
    let inherited =
        passed.map(activation::listener).transpose().context("can't use the socket that systemd passed")?;
    let owned = if inherited.is_none() { Some(bind(&socket_path)?) } else { None };
    let listener = match (&owned, inherited) {
        (_, Some(listener)) => listener,
        (Some(owned), None) => owned.listener().context("can't listen")?,
        (None, None) => return Err(anyhow!("there is no socket to listen on")),
    };
    let (journal, recovered) = FileJournal::open(&state_dir, &clock::boot_id())?;
    for remark in &recovered.remarks {
        warn!("{remark}");
    }

    policy.own_pid = Some(Pid(std::process::id()));
    for sentence in probe::probe().sentences {
        info!("{sentence}");
    }
    let kernel = probe::events_or_why_not().map_err(|why| info!("{why}")).ok();
    let node = LinuxNode::new(pjw_sources::wanted_variables()).context("can't open /proc")?;
    let state = WardenState::new(topology.clone(), &policy.housekeeping);
    let host = pjw_sources::Host { name: clock::hostname(), flux_user: flux_user() };
    let (groups_told, groups) = watch::channel(config.settings().admin_groups.clone());
    let warden = Warden::new(node, journal, state, recovered.records, policy, host);
    let (publisher, published) = Publisher::new(clock::hostname(), &topology);
    let (outbox, inbox) = letter_box().context("can't make an event descriptor")?;

    let config_path = options.config.clone();
    let settings = InForce { config, config_path, admin_groups: groups_told, logging };
    let attendant = Attendant::new(warden, inbox, kernel, publisher, settings);
    let (ready, started) = oneshot::channel();
    let looping = std::thread::Builder::new().name("warden".to_owned()).spawn(move || {
        let mut attendant = attendant;
        attendant.start();
        let _ = ready.send(());
        attendant.run();
    });
    let looping = looping.context("can't start the loop's thread")?;
    let (control, remember) =
        Control::new(outbox.clone(), published, tree::topology_on_the_wire(&topology), groups);
    serve_until_told(listener, control, remember, started, &outbox)?;
    drop(owned);
    looping.join().map_err(|_| anyhow!("the loop panicked; jobs keep their cores as they are"))
}

/// A plain user's directory may be below /tmp, where others could have made it first.
fn own_directory(dir: &Path, uid: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let mode = if uid == 0 { 0o755 } else { 0o700 };
    let made = std::fs::DirBuilder::new().mode(mode).create(dir);
    if let Err(error) = made
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(error).with_context(|| {
            format!("can't make {}: choose --socket and --state-dir somewhere writable", dir.display())
        });
    }
    let meta = std::fs::symlink_metadata(dir).with_context(|| format!("can't look at {}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != uid {
        return Err(anyhow!(
            "{} is not a directory of user {uid}: remove it, or choose --socket and --state-dir",
            dir.display()
        ));
    }
    Ok(())
}

/// The account of Flux's system instance, under whose service manager Flux's units may be believed.
fn flux_user() -> Option<pjw_core::process::Uid> {
    User::from_name("flux").ok().flatten().map(|user| pjw_core::process::Uid(user.uid.as_raw()))
}

/// The control server and the signals, on this thread, until SIGTERM or SIGINT.
fn serve_until_told(
    listener: std::os::unix::net::UnixListener,
    control: Rc<Control>,
    remember: impl Future<Output = ()> + 'static,
    started: oneshot::Receiver<()>,
    outbox: &Outbox,
) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start")?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let (stop, stopped) = watch::channel(false);
        tokio::task::spawn_local(remember);
        let mut terminate = signal(SignalKind::terminate()).context("can't catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("can't catch SIGINT")?;
        let mut hangup = signal(SignalKind::hangup()).context("can't catch SIGHUP")?;
        // Nobody is answered before the first look is done: an empty view would be a lie.
        started.await.context("the loop ended before its first look")?;
        let server = tokio::task::spawn_local(serve(listener, control, Limits::default(), stopped));
        notify::ready("watching");
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {
                    notify::reloading();
                    let (reply, answer) = oneshot::channel();
                    if outbox.send(Message::Reload { reply }) {
                        // What changed, or what is wrong, is in the log.
                        let _ = answer.await;
                    }
                    notify::ready("watching");
                }
            }
        }
        notify::stopping();
        // The loop first: whoever waits for an answer gets one.
        let _ = outbox.send(Message::Stop);
        let _ = stop.send(true);
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), server).await;
        Ok(())
    })
}
