//! From the command line to a running daemon, and the orderly stop.

mod refusal;

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Uid, User};
use pjw_core::ids::Pid;
use pjw_core::plan::Warning;
use pjw_core::{ids, policy::Policy, state::WardenState, topology::Topology};
use pjw_ipc::bind::bind;
use pjw_ipc::client::runtime_dir;
use pjw_ipc::server::{ServerLimits, serve_with_new_listeners};
use pjw_linux::sys::clock;
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_linux::{
    node::LinuxMachine, node::thaw_jobs, probe, sys::own_usage::limit_allocator_cache, systemd::activation,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::config::{Config, Settings};
use crate::control::inbox::{EventLoopMessage, MessageSender, message_channel};
use crate::host::{descriptors, directories, directories::NewDirectories, notify, task_scan};
use crate::host::{thaw_watcher, thaw_watcher::ThawWatcher};
use crate::job_files::JobFiles;
use crate::metrics::meter::{MetricsReceiver, MetricsRecorder};
use crate::run::daemon_records::JournalAndReports;
use crate::run::event_loop::{EventLoop, ReloadContext};
use crate::run::own_files::{PassedSocketFile, SocketFile, WatchedFiles};
use crate::run::own_mask::DaemonMask;
use crate::store::{
    journal, journal::FileJournal, journal::JournalError, journal::RecoveredJournal, lock::DaemonLock,
    lock::LockDirectories, lock::LockError, lock::LockHolder, reports::ReportStore,
};
use crate::{
    control::server::ControlService, control::settings::ControlSettings, error_text, host::logging::Logging,
    metrics, options::DaemonOptions, undo, view::status::StatusPublisher, view::topology_tree,
    warden::Warden,
};

/// How long `pjwd --thaw-after-end` waits until a killed daemon has released its lock. The exit of a process takes long
/// on a machine where many processes fork all the time.
const MAX_EXIT_TIME: Duration = Duration::from_secs(60);
/// How long the loop may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the control server and the metrics may take to stop after the loop.
const SERVER_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs pjwd with its command-line `options`, and returns the exit code of the process. Without a special option,
/// pjwd serves jobs until SIGTERM or SIGINT arrives. With an option such as `--check-config` or `--release-all`, pjwd
/// does only this task. The exit code is 0 on success. After an error, prints the error to stderr and returns exit
/// code 1.
#[must_use]
pub fn main(options: &DaemonOptions) -> ExitCode {
    // All users connect to the socket of root's daemon and read the core maps, whatever the umask of the caller is.
    // Files that only the daemon may read are created with mode 0600.
    umask(Mode::from_bits_truncate(0o022));
    let result = if options.topology_json {
        print_topology(options)
    } else if options.check_config {
        check_config(options)
    } else if options.release_all {
        release_all(options)
    } else if options.thaw {
        thaw(options)
    } else if options.thaw_after_end {
        thaw_after_end(options)
    } else {
        run(options)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = refusal::name_remedy(options, error);
            let _ = writeln!(std::io::stderr(), "pjwd: {}", error_text::error_chain_text(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Prints a topology as JSON to the standard output: that of the XML file or of the synthetic description in `options`.
/// Without both, prints the topology of this machine. The option `plain` selects the format of pjw-core instead of the
/// format for clients.
fn print_topology(options: &DaemonOptions) -> anyhow::Result<()> {
    let source = match (&options.input, &options.synthetic) {
        (Some(path), _) => TopologySource::Xml(path),
        (None, Some(text)) => TopologySource::Synthetic(text),
        (None, None) => TopologySource::Live,
    };
    let topology = load_topology(source)?;
    let text = if options.plain {
        serde_json::to_string(&topology)
    } else {
        serde_json::to_string(&topology_tree::topology_to_wire(&topology))
    };
    let text = text.context("can't print the topology")?;
    writeln!(std::io::stdout(), "{text}").context("can't print the topology")
}

/// Checks the configuration file against this machine, and prints that it is valid. The error lists all problems.
fn check_config(options: &DaemonOptions) -> anyhow::Result<()> {
    let topology = load_topology(TopologySource::Live)?;
    let (config, _) = checked_config(options.config.as_deref(), &topology)?;
    let what =
        config.path().map_or_else(|| "no file, all defaults".to_owned(), |path| path.display().to_string());
    writeln!(std::io::stdout(), "{what}: ok").context("can't print")
}

/// The default directory of the socket and of the state.
fn default_dir() -> PathBuf {
    let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    runtime_dir(Uid::effective().as_raw(), xdg.as_deref())
}

/// Returns the state directory: that in the options, or the default.
fn state_dir_of(options: &DaemonOptions) -> PathBuf {
    options.state_dir.clone().unwrap_or_else(default_dir)
}

/// Thaws the jobs that an ended pjwd froze. Fails if a pjwd runs: a running pjwd thaws its jobs itself when a core is
/// free.
fn thaw(options: &DaemonOptions) -> anyhow::Result<()> {
    let state_dir = state_dir_of(options);
    let _lock = take_lock(options, LockHolder::for_this_process(None, &state_dir))?;
    // A daemon that runs beside another holds the lock of its journal only.
    let lock_journal = || journal::lock_existing_journal_until_exit(&state_dir);
    let _journal = if options.beside { lock_journal()? } else { None };
    let refusals = thaw_jobs(&directories::own_cgroup_names(&state_dir, options.beside));
    if refusals.is_empty() { Ok(()) } else { Err(anyhow!("{}", refusals.join("\n"))) }
}

/// Waits for the end of the daemon that started this process. Then thaws the jobs that this daemon froze, and prints a
/// message to the standard error. If another daemon runs by then, thaws and prints nothing: the other daemon thaws the
/// jobs.
fn thaw_after_end(options: &DaemonOptions) -> anyhow::Result<()> {
    thaw_watcher::wait_for_end_of_daemon();
    let begun = Instant::now();
    while let Err(error) = thaw(options) {
        match (error.downcast_ref::<LockError>(), error.downcast_ref::<JournalError>()) {
            (Some(lock), _) if lock.is_held_by_running_process() => return Ok(()),
            (Some(LockError::Held { .. }), _) if begun.elapsed() < MAX_EXIT_TIME => {}
            (_, Some(journal)) if journal.is_in_use() => return Ok(()),
            _ => return Err(error),
        }
    }
    let state_dir = state_dir_of(options);
    let text = "pjwd has ended without thawing its jobs; those that it froze run again";
    writeln!(std::io::stderr(), "pjwd: {text} (state directory {})", state_dir.display())
        .context("can't print")
}

/// Undoes the recorded changes of an ended pjwd. Prints the released jobs to the standard output, and the remarks for
/// the user to the standard error. Fails if a pjwd runs.
fn release_all(options: &DaemonOptions) -> anyhow::Result<()> {
    let state_dir = state_dir_of(options);
    let mut lock = take_lock(options, LockHolder::for_this_process(None, &state_dir))?;
    let mut undone = undo::release_all(&state_dir, options.beside)?;
    let boot_id = clock::boot_id()?;
    let earlier = lock.as_ref().and_then(|lock| lock.earlier_state_dir(&boot_id)).map(Path::to_owned);
    let is_here =
        earlier.as_deref().is_some_and(|earlier| directories::is_same_directory(earlier, &state_dir));
    if let Some(lock) = lock.as_mut().filter(|_| is_here && undone.is_complete) {
        lock.forget_journal().context("can't write the lock file")?;
    }
    if let Some(earlier) = earlier.filter(|earlier| !is_here && journal::has_records(earlier, &boot_id)) {
        let command = format!("pjwd --release-all --state-dir {}", earlier.display());
        undone.remarks.push(format!("the last pjwd kept its records elsewhere: {command} undoes them"));
    }
    for remark in &undone.remarks {
        writeln!(std::io::stderr(), "pjwd: {remark}").context("can't print")?;
    }
    for job in &undone.released_jobs {
        writeln!(std::io::stdout(), "{job} released").context("can't print")?;
    }
    Ok(())
}

/// Takes the lock by which one daemon serves this machine, or this user. `None` if the daemon is to run beside another.
/// Then waits for the end of a daemon in the same state directory, which may be stopping and still has its socket.
fn take_lock(options: &DaemonOptions, holder: LockHolder) -> anyhow::Result<Option<DaemonLock>> {
    if options.beside {
        // The journal is opened later. An error is reported then.
        let _ = journal::lock_existing_journal(&state_dir_of(options));
        return Ok(None);
    }
    let dirs = LockDirectories::of_user(Uid::effective().as_raw());
    Ok(Some(DaemonLock::acquire(&dirs, holder)?))
}

/// Reads the configuration file at `path`, and makes the policy for this machine from it. The error lists all problems.
fn checked_config(path: Option<&Path>, topology: &Topology) -> anyhow::Result<(Config, Policy)> {
    Config::load(path, topology).map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        anyhow!("{}", problems.join("\n"))
    })
}

/// Runs the daemon until SIGTERM or SIGINT. Fails if the daemon can't start, or if the event loop ends by itself.
fn run(options: &DaemonOptions) -> anyhow::Result<()> {
    let topology = load_topology(TopologySource::Live)?;
    let (config, mut policy) = checked_config(options.config.as_deref(), &topology)?;
    let logging = Logging::start(config.settings())?;

    limit_allocator_cache();
    let limits = descriptors::raise_descriptor_limit()?;
    let own_mask = DaemonMask::bind_at_start(&policy.housekeeping_cpus);
    let uid = Uid::effective().as_raw();
    let (own_dir, state_dir) = (default_dir(), state_dir_of(options));
    let passed = passed_listener()?;
    let passed_path = passed.as_ref().and_then(path_of_listener);
    let default_path = || options.socket.clone().unwrap_or_else(|| own_dir.join("pjwd.sock"));
    let socket_path = passed_path.unwrap_or_else(default_path);
    let mut lock = take_lock(options, LockHolder::for_this_process(Some(&socket_path), &state_dir))?;
    let needs_own_dir = options.socket.is_none() || options.state_dir.is_none();
    let new_directories = NewDirectories::make(needs_own_dir.then_some(own_dir.as_path()), &state_dir, uid)?;
    let boot_id = clock::boot_id()?;
    let (listener, socket_file) = listen(passed, &socket_path)?;
    let (journal, recovered, start_warnings) = open_journal(&state_dir, &boot_id, lock.as_mut())?;
    new_directories.keep();
    let own_files = WatchedFiles::new(lock, socket_file, state_dir.clone());
    let (reports, remarks) = ReportStore::open(&state_dir, config.settings().report_keep);
    for remark in recovered.remarks.iter().chain(&remarks) {
        warn!("{remark}");
    }

    policy.own_pid = Some(Pid(std::process::id()));
    policy.own_cgroups = directories::own_cgroup_names(&state_dir, options.beside);
    let capabilities = probe::probe_kernel_support(&policy.own_cgroups);
    policy.only_managed_user = (!capabilities.can_set_all_masks).then_some(ids::Uid(uid));
    policy.cpuset_support = capabilities.cpuset_support;
    for sentence in capabilities.descriptions {
        info!("{sentence}");
    }
    let process_events = probe::open_process_events().map_err(|why| info!("{why}")).ok();
    let mut machine = open_machine_interface(config.settings(), &policy)?;
    machine.set_process_event_socket(process_events);
    let state = WardenState::new(topology.clone(), &policy.housekeeping_cpus);
    let host = pjw_sources::LocalHost { name: clock::hostname(), flux_user: flux_user() };
    let (settings_sender, control_settings) = watch::channel(ControlSettings::from(config.settings()));
    let records = JournalAndReports { journal, reports };
    let mut warden = Warden::new(machine, records, state, recovered.records, policy, host);
    warden.set_thaw_watcher(ThawWatcher::new_if_needed(&state_dir, options.beside));
    let (mut publisher, published) = StatusPublisher::new(clock::hostname(), &topology);
    let (outbox, inbox) = message_channel().context("can't make an eventfd")?;

    let (meter, metrics_receiver) = MetricsRecorder::new(config.settings());
    publisher.set_cpu_count_variables(&config.settings().cpu_count_variables);
    let settings = ReloadContext {
        config,
        config_path: options.config.clone(),
        control_settings: settings_sender,
        logging,
        metrics_recorder: meter,
    };
    let job_files = JobFiles::new(&state_dir);
    publisher.set_job_files_directory(job_files.root_path());
    let event_loop = EventLoop::new(warden, inbox, publisher, settings, job_files, own_mask);
    let (loop_handle, started, ended) = spawn_event_loop(event_loop, start_warnings)?;
    let (control, record_events) = ControlService::new(outbox.clone(), published, control_settings);
    let loop_thread = LoopThread { started, ended, outbox: &outbox, metrics_receiver };
    let served = serve_until_stopped((listener, limits), own_files, control, record_events, loop_thread);
    if let Err(failure) = &served {
        error!("{}", error_text::error_chain_text(failure.as_ref()));
    }
    wait_for_loop(loop_handle, served?)
}

/// Opens the journal in `state_dir`. Returns the journal, its records of the boot `boot_id`, and warnings for the
/// status. `lock` names the directory with the journal of an earlier daemon. If the files of that journal were removed,
/// marks the records as incomplete. If that directory is not `state_dir` and has records, returns a warning, and marks
/// the records as incomplete unless a running pjwd uses that directory. Then names `state_dir` in `lock` instead. There
/// is one exception: if records were lost and the new journal can't record the loss, `lock` still names that directory.
fn open_journal(
    state_dir: &Path,
    boot_id: &str,
    mut lock: Option<&mut DaemonLock>,
) -> anyhow::Result<(FileJournal, RecoveredJournal, Vec<Warning>)> {
    let earlier = lock.as_ref().and_then(|lock| lock.earlier_state_dir(boot_id)).map(Path::to_owned);
    let has_state_file = lock.as_ref().is_some_and(|lock| lock.earlier_journal_had_state_file());
    let has_journal = earlier.as_deref().is_some_and(|dir| journal::has_journal_files(dir, has_state_file));
    let (mut journal, mut recovered) = FileJournal::open(state_dir, boot_id)?;
    let mut warnings = Vec::new();
    match earlier {
        Some(directory) if !has_journal => {
            recovered.has_lost_records = true;
            recovered.remarks.push(format!(
                "the records of the pjwd before are gone from {}: the masks that it may have set are named in the status",
                directory.display()
            ));
        }
        Some(directory)
            if !directories::is_same_directory(&directory, state_dir)
                && journal::has_records(&directory, boot_id) =>
        {
            let user = journal::pid_of_running_pjwd(&directory);
            // A daemon that uses the directory knows the records.
            recovered.has_lost_records |= user.is_none();
            warnings.push(other_state_directory_warning(&directory, user));
        }
        _ => {}
    }
    let written = journal.write_recovered_records(&mut recovered);
    // `record_journal` removes the entry about the earlier journal from the lock file. If records were lost and the
    // journal can't record the loss, this entry must stay: the next pjwd then finds the loss again.
    if written.is_ok() || !recovered.has_lost_records {
        let recorded = lock.as_mut().map_or(Ok(()), |lock| lock.record_journal(boot_id, written.is_ok()));
        recorded.context("can't write the lock file")?;
    }
    recovered.remarks.extend(written.err().map(|fault| fault.to_string()));
    Ok((journal, recovered, warnings))
}

/// Returns the warning that the earlier daemon has its records in `directory`, which is not the state directory of this
/// daemon. `user` is the pid of a running pjwd that uses `directory`. `None` if there is none.
fn other_state_directory_warning(directory: &Path, user: Option<u32>) -> Warning {
    let directory = directory.display();
    let text = format!(
        "the pjwd before kept its records in {directory}: this pjwd does not know the jobs and masks that are recorded there, and may give the same cores to other jobs"
    );
    let remedy = match user {
        Some(pid) => {
            format!("process {pid}, a pjwd with --beside, uses {directory} now: stop one of the two")
        }
        None => format!("its records are in {directory}: start pjwd with --state-dir {directory}"),
    };
    Warning::new("other-state-directory", text, remedy)
}

/// Starts the thread that runs `event_loop`. The status contains the warnings `start_warnings`. Returns the handle of
/// the thread and two receivers. The thread returns whether records are left ([`EventLoop::run`]). The first receiver
/// resolves after the first cycle. The second receiver is closed when the thread ends, also after a panic.
fn spawn_event_loop(
    mut event_loop: EventLoop,
    start_warnings: Vec<Warning>,
) -> anyhow::Result<(JoinHandle<bool>, oneshot::Receiver<()>, oneshot::Receiver<()>)> {
    let (ready, started) = oneshot::channel();
    let (alive, ended) = oneshot::channel::<()>();
    let spawned = std::thread::Builder::new().name("warden".to_owned()).spawn(move || {
        let _alive = alive;
        event_loop.run_first_cycle(start_warnings);
        let _ = ready.send(());
        event_loop.run()
    });
    Ok((spawned.context("can't start the thread of the event loop")?, started, ended))
}

/// Waits for the end of the event loop, and releases the lock then. If the loop leaves no records, the lock file names
/// no journal any more. So the next daemon misses nothing if the state directory is gone by then, as `/run/user/UID` is
/// after the last logout.
///
/// # Errors
/// If the loop has panicked. The lock file still names the journal then.
fn wait_for_loop(loop_handle: JoinHandle<bool>, lock: Option<DaemonLock>) -> anyhow::Result<()> {
    let joined = loop_handle.join();
    let has_records = joined.map_err(|_| anyhow!("the event loop panicked; jobs keep their cores"))?;
    if let Some(mut lock) = lock.filter(|_| !has_records)
        && let Err(error) = lock.forget_journal()
    {
        warn!(%error, "the lock file can't be written");
    }
    Ok(())
}

/// The socket that systemd passed to the daemon, if it passed one.
fn passed_listener() -> anyhow::Result<Option<UnixListener>> {
    let passed = notify::socket_from_service_manager().context("can't use the socket that systemd passed")?;
    passed.map(activation::dup_listener).transpose().context("can't use the socket that systemd passed")
}

fn path_of_listener(listener: &UnixListener) -> Option<PathBuf> {
    listener.local_addr().ok()?.as_pathname().map(Path::to_owned)
}

/// The listener: the socket that systemd passed, or a new one at `path`. A new socket is removed when the second value
/// is dropped.
fn listen(passed: Option<UnixListener>, path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    if let Some(listener) = passed {
        let socket = PassedSocketFile::new(path_of_listener(&listener), &listener);
        return Ok((listener, SocketFile::Passed(socket)));
    }
    let new_directory = path.parent().filter(|dir| directories::is_missing(dir));
    let owned = bind(path)?;
    new_directory.into_iter().for_each(directories::log_new_directory);
    let listener = owned.dup_listener().context("can't listen")?;
    Ok((listener, SocketFile::CreatedByDaemon(owned)))
}

/// Opens the interface to the kernel, and loads the BPF programs if the settings allow them.
fn open_machine_interface(settings: &Settings, policy: &Policy) -> anyhow::Result<LinuxMachine> {
    let mut machine = LinuxMachine::new(pjw_sources::job_variable_names()).context("can't open /proc")?;
    let affinity_persists = policy.cpuset_support.affinity_persists;
    machine.configure_cpuset_changes(affinity_persists, &policy.own_cgroups).context("can't open /proc")?;
    task_scan::load_bpf_programs(settings.scan_interface, &mut machine);
    Ok(machine)
}

/// The user of Flux's system instance. Cgroups of that user's service manager are trusted as Flux jobs.
fn flux_user() -> Option<ids::Uid> {
    User::from_name("flux").ok().flatten().map(|user| ids::Uid(user.uid.as_raw()))
}

/// The event loop, as the serving thread sees it.
struct LoopThread<'a> {
    /// Resolves after the first cycle.
    started: oneshot::Receiver<()>,
    /// Closed when the thread of the loop has ended, also after a panic.
    ended: oneshot::Receiver<()>,
    outbox: &'a MessageSender,
    /// The metrics of the loop.
    metrics_receiver: MetricsReceiver,
}

/// Runs the control server and handles signals on this thread until SIGTERM or SIGINT. Clients connect to `listener`,
/// within the bounds of `client_limits`. Then removes the socket, and returns the lock of `own_files`: the caller must
/// hold it until the loop has ended.
///
/// # Errors
/// If the loop ends by itself: then no thread keeps the jobs on their cores, and the published status would become
/// outdated. If the runtime or a signal handler can't be made.
fn serve_until_stopped(
    (listener, client_limits): (UnixListener, ServerLimits),
    own_files: WatchedFiles,
    control: Rc<ControlService>,
    record_events: impl Future<Output = ()> + 'static,
    loop_thread: LoopThread<'_>,
) -> anyhow::Result<Option<DaemonLock>> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start")?;
    let local = tokio::task::LocalSet::new();
    let LoopThread { started, mut ended, outbox, metrics_receiver } = loop_thread;
    let served = local.block_on(&runtime, async {
        let (stop, stopped) = watch::channel(false);
        let (stop_files, files_stopped) = watch::channel(false);
        let recorder = tokio::task::spawn_local(record_events);
        let mut terminate = signal(SignalKind::terminate()).context("can't catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("can't catch SIGINT")?;
        let mut hangup = signal(SignalKind::hangup()).context("can't catch SIGHUP")?;
        // No call is answered before the first cycle, because the status is still empty.
        started.await.context("the event loop ended before its first scan")?;
        tokio::task::spawn_local(Rc::clone(&control).sample_memory());
        tokio::task::spawn_local(Rc::clone(&control).estimate_memory());
        tokio::task::spawn_local(Rc::clone(&control).watch_admin_groups());
        let metrics = tokio::task::spawn_local(metrics::service::serve_metrics(metrics_receiver, stopped.clone()));
        let (sender, new_listeners) = mpsc::unbounded_channel();
        let restoring = own_files.restore_removed_files(sender, outbox.clone(), files_stopped);
        let restoring = tokio::task::spawn_local(restoring);
        let serving = serve_with_new_listeners(listener, new_listeners, control, client_limits, stopped);
        let server = tokio::task::spawn_local(serving);
        notify::notify_ready("watching");
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = &mut ended => bail!(
                    "the event loop ended by itself; jobs keep their cores, and pjwd exits so that the service manager restarts it"
                ),
                _ = hangup.recv() => {
                    notify::notify_reloading();
                    let (reply, answer) = oneshot::channel();
                    if outbox.send(EventLoopMessage::Reload { reply }) {
                        // The log has the changes or the mistakes.
                        let _ = answer.await;
                    }
                    notify::notify_ready("watching");
                }
            }
        }
        notify::notify_stopping();
        // Stop the loop first: pending commands get an answer, and subscribers get the last event.
        let _ = outbox.send(EventLoopMessage::Stop);
        // A daemon that starts now reads in the lock file that this one is stopping, and waits for its end.
        let _ = stop_files.send(true);
        let own_files = restoring.await.ok();
        let _ = tokio::time::timeout(STOP_TIMEOUT, recorder).await;
        let _ = stop.send(true);
        let both = async { tokio::join!(metrics, server) };
        let _ = tokio::time::timeout(SERVER_STOP_TIMEOUT, both).await;
        Ok(own_files.and_then(WatchedFiles::into_lock))
    });
    // A name service that hangs must not block the stop.
    drop(local);
    runtime.shutdown_background();
    served
}

#[cfg(test)]
mod tests;
