//! From the command line to a running daemon, and its clean end.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Uid, User, gettid};
use pjw_core::cpuset::CpuSet;
use pjw_core::process::{self, Pid, Tid};
use pjw_core::state::WardenState;
use pjw_core::topology::Topology;
use pjw_core::wall::Ground;
use pjw_ipc::bind::bind;
use pjw_ipc::client::runtime_dir;
use pjw_ipc::server::{Limits, serve};
use pjw_linux::node::LinuxNode;
use pjw_linux::own_cost::keep_no_memory;
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{activation, affinity, clock, probe};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tracing::{error, info, warn};

use crate::admission::Rules;
use crate::attend::{Attendant, InForce};
use crate::config::{Config, Settings};
use crate::control::Control;
use crate::cycle::Warden;
use crate::events::{Message, Outbox, letter_box};
use crate::journal::FileJournal;
use crate::logging::Logging;
use crate::metrics;
use crate::metrics::pulse::{Meter, Told};
use crate::publish::Publisher;
use crate::{notify, places, report, task_scan, tree, undo};

/// So long the loop may take to put its affairs in order when it is told to stop.
const LAST_WORDS: Duration = Duration::from_secs(1);

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
    /// Put back every mask that a daemon changed, and end: for when it is dead, or goes for good. Needs no
    /// configuration; refused while a daemon keeps its state there.
    #[arg(long, conflicts_with = "check_config")]
    release_all: bool,
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
    } else if options.release_all {
        release_all(options)
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

fn release_all(options: &Options) -> anyhow::Result<()> {
    let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = || runtime_dir(Uid::effective().as_raw(), xdg.as_deref());
    let undone = undo::release_all(&options.state_dir.clone().unwrap_or_else(usual))?;
    for remark in &undone.remarks {
        writeln!(std::io::stderr(), "pjwd: {remark}").context("can't print")?;
    }
    for job in &undone.jobs {
        writeln!(std::io::stdout(), "{job} released").context("can't print")?;
    }
    Ok(())
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

    keep_no_memory();
    settle_in(&policy.housekeeping);
    let uid = Uid::effective().as_raw();
    let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let own_dir = runtime_dir(uid, xdg.as_deref());
    let state_dir = options.state_dir.clone().unwrap_or_else(|| own_dir.clone());
    let socket_path = options.socket.clone().unwrap_or_else(|| own_dir.join("pjwd.sock"));
    if options.socket.is_none() || options.state_dir.is_none() {
        places::own_directory(&own_dir, uid)?;
    }
    places::state_directory(&state_dir, uid)?;
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
    let capabilities = probe::probe();
    policy.only_user = (!capabilities.every_user).then(|| process::Uid(Uid::effective().as_raw()));
    policy.ground = capabilities.ground;
    for sentence in capabilities.sentences {
        info!("{sentence}");
    }
    let kernel = probe::events_or_why_not().map_err(|why| info!("{why}")).ok();
    let node = node(config.settings(), &policy.ground)?;
    let state = WardenState::new(topology.clone(), &policy.housekeeping);
    let host = pjw_sources::Host { name: clock::hostname(), flux_user: flux_user() };
    let (rules_told, rules) = watch::channel(Rules::from(config.settings()));
    let warden = Warden::new(node, journal, state, recovered.records, policy, host);
    let (publisher, published) = Publisher::new(clock::hostname(), &topology);
    let (outbox, inbox) = letter_box().context("can't make an event descriptor")?;

    let (meter, told) = Meter::new(config.settings());
    let settings = InForce { config, config_path: options.config.clone(), rules: rules_told, logging, meter };
    let attendant = Attendant::new(warden, inbox, kernel, publisher, settings);
    let (ready, started) = oneshot::channel();
    let (lives, ended) = oneshot::channel();
    let looping = std::thread::Builder::new().name("warden".to_owned()).spawn(move || {
        // Dropped with the thread, whatever its end.
        let _lives: oneshot::Sender<()> = lives;
        let mut attendant = attendant;
        attendant.start();
        let _ = ready.send(());
        attendant.run();
    });
    let looping = looping.context("can't start the loop's thread")?;
    let (control, remember) = Control::new(outbox.clone(), published, rules);
    let the_loop = TheLoop { started, ended, outbox: &outbox, told };
    let served = serve_until_told(listener, control, remember, the_loop);
    drop(owned);
    if let Err(failure) = &served {
        error!("{}", report::chain(failure.as_ref()));
    }
    served?;
    looping.join().map_err(|_| anyhow!("the loop panicked; jobs keep their cores as they are"))
}

fn node(settings: &Settings, ground: &Ground) -> anyhow::Result<LinuxNode> {
    let mut node = LinuxNode::new(pjw_sources::wanted_variables()).context("can't open /proc")?;
    node.stand_on(ground);
    task_scan::choose(settings.scan, &mut node);
    Ok(node)
}

/// Takes the descriptors that a busy node may need, and leaves the jobs' cores to the jobs: every thread that is
/// started from here on lives on the housekeeping PUs, if there are any. Neither is worth not starting for.
fn settle_in(housekeeping: &CpuSet) {
    let more = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(errno) = more {
        warn!("the limit of open files stays as it is: {errno}");
    }
    if !housekeeping.is_empty()
        && let Err(errno) = affinity::set(Tid(gettid().as_raw().cast_unsigned()), housekeeping)
    {
        warn!("pjwd can't keep to the housekeeping PUs {housekeeping}: {errno}");
    }
}

/// The account of Flux's system instance, under whose service manager Flux's units may be believed.
fn flux_user() -> Option<process::Uid> {
    User::from_name("flux").ok().flatten().map(|user| process::Uid(user.uid.as_raw()))
}

/// The loop, as the thread that serves sees it.
struct TheLoop<'a> {
    /// Hears of the end of its first look.
    started: oneshot::Receiver<()>,
    /// Closed when its thread has ended, also by a panic.
    ended: oneshot::Receiver<()>,
    outbox: &'a Outbox,
    /// What it tells for metrics.
    told: Told,
}

/// The control server and the signals, on this thread, until SIGTERM or SIGINT, or until the loop ends by itself:
/// then there is nobody left who keeps the jobs, and a view that nobody renews must not pass for the truth.
fn serve_until_told(
    listener: UnixListener,
    control: Rc<Control>,
    remember: impl Future<Output = ()> + 'static,
    the_loop: TheLoop<'_>,
) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start")?;
    let local = tokio::task::LocalSet::new();
    let TheLoop { started, mut ended, outbox, told } = the_loop;
    let served = local.block_on(&runtime, async {
        let (stop, stopped) = watch::channel(false);
        let remembered = tokio::task::spawn_local(remember);
        let mut terminate = signal(SignalKind::terminate()).context("can't catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("can't catch SIGINT")?;
        let mut hangup = signal(SignalKind::hangup()).context("can't catch SIGHUP")?;
        // Nobody is answered before the first look is done: an empty view would be a lie.
        started.await.context("the loop ended before its first look")?;
        let metrics = tokio::task::spawn_local(metrics::service::run(told, stopped.clone()));
        let server = tokio::task::spawn_local(serve(listener, control, Limits::default(), stopped));
        notify::ready("watching");
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = &mut ended => bail!(
                    "the loop ended by itself; jobs keep their cores as they are, and pjwd ends to be started again"
                ),
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
        // The loop first: whoever waits for an answer gets one, and whoever follows hears the last event too.
        let _ = outbox.send(Message::Stop);
        let _ = tokio::time::timeout(LAST_WORDS, remembered).await;
        let _ = stop.send(true);
        let both = async { tokio::join!(metrics, server) };
        let _ = tokio::time::timeout(Duration::from_secs(2), both).await;
        Ok(())
    });
    // A name service that hangs must not keep the daemon from ending.
    drop(local);
    runtime.shutdown_background();
    served
}

#[cfg(test)]
mod tests {
    use pjw_core::topology::Regular;
    use pjw_ipc::client::Client;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_loop_that_panics_ends_the_daemon_instead_of_leaving_a_stale_view() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let owned = bind(&path).unwrap();
        let topology = Topology::regular(Regular {
            packages: 1,
            numa_per_package: 1,
            l3_per_numa: 1,
            cores_per_l3: 2,
            pus_per_core: 1,
        });
        let (_publisher, published) = Publisher::new("here".to_owned(), &topology);
        let (outbox, inbox) = letter_box().unwrap();
        let (_rules_told, rules) = watch::channel(Rules::default());
        let (control, remember) = Control::new(outbox.clone(), published, rules);
        let (ready, started) = oneshot::channel();
        let (lives, ended) = oneshot::channel::<()>();
        let looping = std::thread::spawn(move || {
            let _lives = lives;
            ready.send(()).unwrap();
            let mut client = Client::connect(&path).unwrap();
            client.call::<Value>("GetStatus", &json!({})).unwrap();
            drop(inbox);
            std::panic::resume_unwind(Box::new("a bug"));
        });
        let (_meter, told) = Meter::new(&Settings::default());
        let the_loop = TheLoop { started, ended, outbox: &outbox, told };
        let failure = serve_until_told(owned.listener().unwrap(), control, remember, the_loop).unwrap_err();
        assert!(failure.to_string().contains("the loop ended by itself"), "{failure}");
        assert!(looping.join().is_err());
    }
}
