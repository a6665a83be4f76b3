//! The thaw watcher: a second process of the daemon, which thaws the frozen jobs after the daemon was killed.
//!
//! A daemon that is killed thaws nothing. Where its unit of systemd does not do so (`ExecStopPost=`), the daemon starts
//! the thaw watcher before it freezes a job. The watcher reads from a pipe of which only the daemon has the other end.
//! The kernel closes that end whatever ends the daemon, so the read returns. Then the watcher does what `pjwd --thaw`
//! does. At an orderly stop the daemon itself thaws its jobs, and ends the watcher.
//!
//! The watcher has a session of its own, so that what is sent to the process group or the terminal of the daemon does
//! not reach the watcher. But a SIGKILL to the whole cgroup ends the watcher too.

use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::setsid;
use pjw_core::ids::Pid;
use pjw_core::plan::Warning;
use pjw_linux::sys::affinity;
use pjw_linux::sys::inherited::{close_descriptors_on_exec, reset_signal_dispositions};

/// The program of this process, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The command name of the watcher: not that of the daemon, so that `killall -9 pjwd` does not end both.
const COMMAND_NAME: &str = "pjw-thaw";
/// The variable by which the dynamic linker may find the libraries of the program (ld.so(8)).
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// The name of the unit, which runs `pjwd --thaw` after each end of the daemon.
const UNIT: &str = "pjwd.service";
/// How long the start of the watcher may delay the event loop. On a busy machine a new process may wait for a PU for
/// longer.
const START_TIMEOUT: Duration = Duration::from_millis(100);
/// The time from a failure to the next attempt to start the watcher.
const RETRY_DELAY: Duration = Duration::from_secs(60);

/// Starts and ends the thaw watcher: a process that thaws the frozen jobs if pjwd is killed. pjwd can freeze a job that
/// has no cores of its own and can borrow none.
#[derive(Debug)]
pub struct ThawWatcher {
    state_dir: PathBuf,
    is_second_pjwd: bool,
    process: WatcherProcess,
    /// Why there is no watcher. `None` if there is one, or if it was not needed yet.
    failure: Option<String>,
    retry_at: Option<Instant>,
}

/// The state of the process of the thaw watcher.
#[derive(Debug)]
enum WatcherProcess {
    None,
    /// A thread starts the process.
    Starting(Receiver<io::Result<Child>>),
    /// The process was started. If the event loop panics, the pipe must stay open until this process has ended.
    Running(ManuallyDrop<Child>),
}

impl ThawWatcher {
    /// Makes a [`ThawWatcher`] for the daemon with the state directory `state_dir`. `is_second_pjwd` says whether the
    /// daemon was started with `--beside`, as a second pjwd of the same user. Starts no process. Returns `None` if
    /// systemd started this daemon as the unit `pjwd.service`: the setting `ExecStopPost=` of this unit thaws the jobs.
    #[must_use]
    pub fn new_if_needed(state_dir: &Path, is_second_pjwd: bool) -> Option<Self> {
        let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let is_in_unit = std::env::var_os("INVOCATION_ID").is_some() && is_in_unit(&cgroups);
        let state_dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned());
        (!is_in_unit).then_some(Self {
            state_dir,
            is_second_pjwd,
            process: WatcherProcess::None,
            failure: None,
            retry_at: None,
        })
    }

    /// Starts the thaw watcher (the process that thaws frozen jobs if pjwd is killed), unless the watcher already runs
    /// or is being started. Waits for the start for up to 100 ms. If the start fails, or if this call finds that the
    /// watcher has ended, this call records the failure ([`ThawWatcher::warning`]). Calls in the minute after that do
    /// not start the watcher. `now` is the current time.
    pub fn ensure_running(&mut self, now: Instant) {
        match mem::replace(&mut self.process, WatcherProcess::None) {
            WatcherProcess::None if self.retry_at.is_some_and(|at| now < at) => {}
            WatcherProcess::None => match self.start() {
                Ok(started) => self.note_start(started, START_TIMEOUT, now),
                Err(error) => self.note_failure(error.to_string(), now),
            },
            WatcherProcess::Starting(started) => self.note_start(started, Duration::ZERO, now),
            WatcherProcess::Running(mut child) => match child.try_wait() {
                Ok(None) => {
                    self.failure = None;
                    self.process = WatcherProcess::Running(child);
                }
                ended => {
                    drop(ManuallyDrop::into_inner(child));
                    let status = ended.map(|status| status.map(|status| format!(": {status}")));
                    let status = status.ok().flatten().unwrap_or_default();
                    self.note_failure(format!("it has ended{status}"), now);
                }
            },
        }
    }

    /// Starts the thaw watcher: a process that thaws the frozen jobs if pjwd is killed. Returns a receiver, which gets
    /// the process, or the error if the start fails. A new thread starts the process, because the starting thread must
    /// wait until the new process has got a PU (logical CPU). Fails if this thread can't be started.
    fn start(&self) -> io::Result<Receiver<io::Result<Child>>> {
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("pjwd").arg("--thaw-after-end").args(self.is_second_pjwd.then_some("--beside"));
        command.arg("--state-dir").arg(&self.state_dir).current_dir("/");
        // If the environment named a batch job, the next daemon would take the watcher for a process of this job.
        command.env_clear().envs(std::env::var_os(LIBRARY_PATH).map(|path| (LIBRARY_PATH, path)));
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let (sender, started) = channel();
        std::thread::Builder::new().name("thaw-watcher".to_owned()).spawn(move || {
            // The event loop may be bound to some PUs, and the watcher inherits the mask of this thread.
            let _ = affinity::set_full_mask(affinity::own_thread());
            let child = close_descriptors_on_exec().and_then(|()| command.spawn());
            // Without a receiver, the daemon ends.
            let _ = sender.send(child);
        })?;
        Ok(started)
    }

    /// Waits for at most `timeout` for the result of the start of the watcher, which arrives through `started`.
    /// Stores the process if the start was successful, and the failure if it was not. If there is no result yet, a
    /// later call waits again. `now` is the current time.
    fn note_start(&mut self, started: Receiver<io::Result<Child>>, timeout: Duration, now: Instant) {
        match started.recv_timeout(timeout) {
            Ok(Ok(child)) => self.process = WatcherProcess::Running(ManuallyDrop::new(child)),
            Ok(Err(error)) => self.note_failure(error.to_string(), now),
            Err(RecvTimeoutError::Timeout) => self.process = WatcherProcess::Starting(started),
            Err(RecvTimeoutError::Disconnected) => {
                self.note_failure("the thread that starts it has ended".to_owned(), now);
            }
        }
    }

    fn note_failure(&mut self, why: String, now: Instant) {
        self.failure = Some(why);
        self.retry_at = Some(now + RETRY_DELAY);
    }

    /// Returns the pid of the thaw watcher (the process that thaws frozen jobs if pjwd is killed). `None` if the
    /// watcher does not run, or is still being started.
    #[must_use]
    pub fn pid(&self) -> Option<Pid> {
        match &self.process {
            WatcherProcess::Running(child) => Some(Pid(child.id())),
            WatcherProcess::None | WatcherProcess::Starting(_) => None,
        }
    }

    /// Returns the warning that the thaw watcher (the process that thaws frozen jobs if pjwd is killed) can't be
    /// started or has ended. `None` if the watcher runs, or was not needed yet. The caller should publish the warning
    /// only while a job is frozen.
    #[must_use]
    pub fn warning(&self) -> Option<Warning> {
        let why = self.failure.as_ref()?;
        let text = format!(
            "frozen jobs stay frozen if pjwd is killed, because the process that thaws them does not run ({why})"
        );
        let remedy =
            "pjwd tries to start it again each minute; after kill -9, start pjwd again or run pjwd --thaw";
        Some(Warning::new("thaw-watcher", text, remedy))
    }

    /// Kills the thaw watcher (the process that thaws frozen jobs if pjwd is killed). The caller must have thawed all
    /// jobs before. Does nothing if the watcher does not run.
    pub fn end(&mut self) {
        if let WatcherProcess::Running(child) = &mut self.process {
            // The watcher may have ended already. Nobody waits for its end: after SIGKILL it does nothing more.
            let _ = child.kill();
        }
    }
}

/// Whether a process with this text in `/proc/PID/cgroup` belongs to the system's unit of the daemon. A unit of a user
/// may have the same name.
fn is_in_unit(cgroups: &str) -> bool {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths
        .filter(|path| !path.starts_with("/user.slice/"))
        .any(|path| path.split('/').any(|part| part == UNIT))
}

/// Makes this process the thaw watcher: the process that thaws the frozen jobs if pjwd is killed. Then waits until the
/// daemon has ended. The daemon holds the other end of the pipe that is the standard input of this process. So the end
/// of the input means that the daemon has ended. The caller must then thaw the jobs.
///
/// Must be called at the start of the process, before the process has other threads.
pub fn wait_for_end_of_daemon() {
    reset_signal_dispositions();
    // Refused if this process leads a session already, because a user started it.
    let _ = setsid();
    let _ = std::fs::write("/proc/self/comm", COMMAND_NAME);
    let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
    // If the daemon ran in another unit than `pjwd.service`, systemd may now send SIGTERM to its whole cgroup.
    let _ = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM].into_iter().collect::<SigSet>().thread_block();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unit_of_the_system_thaws_by_itself() {
        for (cgroups, expected) in [
            ("0::/system.slice/pjwd.service\n", true),
            ("4:cpuset:/\n1:name=systemd:/system.slice/pjwd.service\n0::/\n", true),
            ("0::/system.slice/other-pjwd.service\n", false),
            ("0::/user.slice/user-0.slice/user@0.service/app.slice/pjwd.service\n", false),
            ("0::/user.slice/user-0.slice/session-1.scope\n", false),
            ("", false),
        ] {
            assert_eq!(is_in_unit(cgroups), expected, "{cgroups}");
        }
    }

    #[test]
    fn a_watcher_that_ends_is_one_warning_and_is_started_again_after_a_minute() {
        let dir = tempfile::tempdir().unwrap();
        // The program of this test is no daemon: it refuses the options and ends.
        let mut watcher = ThawWatcher::new_if_needed(dir.path(), true).unwrap();
        let start = Instant::now();
        while watcher.failure.is_none() {
            watcher.ensure_running(start);
            std::thread::sleep(Duration::from_millis(1));
        }
        let warning = watcher.warning().unwrap();
        assert!(warning.text.contains("it has ended: exit status"), "{warning:?}");
        assert!(warning.remedy.contains("pjwd --thaw"), "{warning:?}");
        watcher.ensure_running(start + RETRY_DELAY - Duration::from_millis(1));
        assert!(matches!(watcher.process, WatcherProcess::None));
        watcher.ensure_running(start + RETRY_DELAY);
        assert!(!matches!(watcher.process, WatcherProcess::None));
        watcher.end();
    }
}
