//! A private `pjwd`: its configuration, socket, state and log are in a temporary directory. It runs beside the
//! machine's own daemon. The host tests and the benches use it.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_ipc::client::{Client, ClientError};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::waiting::wait_until;

/// The longest time from the start of a daemon to its first answer. While many processes are forked, the kernel can
/// take half a minute to write to a cgroup or to end the daemon before (`synchronize_rcu` waits for a grace period of
/// RCU).
const START_TIMEOUT: Duration = Duration::from_secs(150);
/// The time between two checks while a function waits.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// What the daemon logs if it replies before a change of a cpuset is made, because the change takes too long.
const DELAYED_CPUSET_CHANGE: &str = "a change of its cpuset was not complete at the end of the cycle";
/// What the daemon logs when no change of the cpuset of a job is delayed any more.
const ENDED_CPUSET_CHANGES: &str = "the delayed changes of its cpuset were made or refused";
/// The number of the last lines of the log that the message of an error contains.
const LOG_LINES: usize = 10;

/// A pjwd with a temporary directory of its own, which contains its configuration, socket, state and log. It can run
/// beside other daemons. When this value is dropped, the daemon is killed, and the directory is removed.
#[derive(Debug)]
pub struct PrivateDaemon {
    programs: PathBuf,
    child: Option<Child>,
    dir: TempDir,
    /// Whether the daemon may run beside another one: the argument `--beside`.
    beside: bool,
    /// The length of the log when the daemon was last started.
    log_length_at_start: usize,
    /// The length of the log when a command was last sent to the daemon.
    log_length_at_command: AtomicUsize,
}

impl PrivateDaemon {
    /// Makes a daemon with the configuration `config`. The daemon is not started. `programs` is the directory of
    /// `pjwd` and `pjwctl`.
    ///
    /// # Errors
    /// If the temporary directory or the configuration file can't be written.
    pub fn new(programs: &Path, config: &str) -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir(), programs, config)
    }

    /// Makes a daemon as [`PrivateDaemon::new`] does, with its temporary directory in `parent`.
    ///
    /// # Errors
    /// The errors of [`PrivateDaemon::new`].
    pub fn new_in(parent: &Path, programs: &Path, config: &str) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("pjw-private-").tempdir_in(parent)?;
        let daemon = Self {
            programs: programs.to_owned(),
            child: None,
            dir,
            beside: true,
            log_length_at_start: 0,
            log_length_at_command: AtomicUsize::new(0),
        };
        daemon.configure(config)?;
        Ok(daemon)
    }

    /// Replaces the configuration file of the daemon by `config`. The daemon uses the new configuration after a reload
    /// or its next start.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn configure(&self, config: &str) -> io::Result<()> {
        fs::write(self.dir().join("pjwd.toml"), config)
    }

    /// Makes all later starts of the daemon run without the option `--beside`. Such a start fails if another daemon of
    /// the user runs.
    pub fn refuse_to_run_beside(&mut self) {
        self.beside = false;
    }

    /// Starts the daemon and waits until it answers. `launcher` is a program with its arguments that starts the daemon,
    /// such as `unshare --net --`. The launcher must execute the daemon in its own process (execve(2)). `launcher` is
    /// empty if the daemon is started directly. While the function waits, it calls `check` every 5 ms. An error of
    /// `check` ends the wait.
    ///
    /// # Errors
    /// If the daemon can't be started, ends, or does not answer within 150 s. The error then contains the last 10 lines
    /// of the log. If `check` returns an error: this error.
    pub fn start<E: From<io::Error>>(
        &mut self,
        launcher: &[&str],
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.log_length_at_start = self.log_length();
        let log = File::options().create(true).append(true).open(self.dir().join("log"))?;
        let mut command = self.command();
        if let [program, arguments @ ..] = launcher {
            let mut launched = Command::new(program);
            launched.args(arguments).arg(command.get_program()).args(command.get_args());
            command = launched;
        }
        let child = command.stderr(log).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let program = command.get_program().display().to_string();
        self.child =
            Some(child.map_err(|error| io::Error::other(format!("can't start {program}: {error}")))?);
        let deadline = Instant::now() + START_TIMEOUT;
        while self.call::<Value>("GetStatus", &json!({})).is_err() {
            check()?;
            if let Some(status) = self.exit_status()? {
                return Err(self.error_with_log(&format!("pjwd ended: {status}")).into());
            }
            if Instant::now() > deadline {
                return Err(self
                    .error_with_log(&format!("pjwd does not answer after {} s", START_TIMEOUT.as_secs()))
                    .into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn error_with_log(&self, what: &str) -> io::Error {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let end = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
        io::Error::other(format!("{what}; its log ends with\n{end}"))
    }

    fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.as_mut().map_or(Ok(None), Child::try_wait)
    }

    /// Returns the command that starts the daemon.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.programs.join("pjwd"));
        command.args(self.beside.then_some("--beside"));
        command.arg("--config").arg(self.dir().join("pjwd.toml"));
        command.arg("--socket").arg(self.socket()).arg("--state-dir").arg(self.state_dir());
        command
    }

    /// Returns the command that undoes the changes of the daemon (`pjwd --release-all`). The command must run after the
    /// end of the daemon.
    #[must_use]
    pub fn release_all_command(&self) -> Command {
        self.command_after_end("--release-all")
    }

    /// Returns the command that thaws the jobs that the daemon froze (`pjwd --thaw`). The command must run after the
    /// end of the daemon.
    #[must_use]
    pub fn thaw_command(&self) -> Command {
        self.command_after_end("--thaw")
    }

    fn command_after_end(&self, option: &str) -> Command {
        let mut command = Command::new(self.programs.join("pjwd"));
        command.args(self.beside.then_some("--beside"));
        command.args([option, "--state-dir"]).arg(self.state_dir());
        command
    }

    /// Returns the names of the cgroups of the daemon's jobs. The daemon must have made its state directory.
    ///
    /// # Errors
    /// If the state directory can't be read.
    pub fn own_cgroups(&self) -> io::Result<OwnCgroupNames> {
        Ok(OwnCgroupNames::for_additional_daemon(self.state_dir().canonicalize()?.as_os_str().as_bytes()))
    }

    /// Returns the command that runs `pjwctl` with `arguments` and with the socket of this daemon. The command must be
    /// run before another one is sent to the daemon.
    #[must_use]
    pub fn pjwctl_command(&self, arguments: &[&str]) -> Command {
        self.note_command();
        let mut command = Command::new(self.programs.join("pjwctl"));
        command.arg("--socket").arg(self.socket()).args(arguments).stdin(Stdio::null());
        command
    }

    /// Returns the temporary directory of the daemon.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the control socket of the daemon.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir().join("pjwd.sock")
    }

    /// Returns the state directory of the daemon, which contains the journal (the records of its changes).
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.dir().join("state")
    }

    /// Returns the log of the daemon. Empty if the log can't be read.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir().join("log")).unwrap_or_default()
    }

    /// Returns whether the daemon was started, and was neither stopped nor killed since then.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.child.is_some()
    }

    /// Returns the process id of the daemon.
    ///
    /// # Panics
    /// If the daemon was not started, or was stopped or killed.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the daemon runs").id()
    }

    /// Calls a method of the daemon and returns the parameters of the reply.
    ///
    /// # Errors
    /// If the daemon can't be reached, or replies with an error.
    pub fn call<T: DeserializeOwned>(&self, method: &str, parameters: &Value) -> Result<T, ClientError> {
        if !method.starts_with("Get") {
            self.note_command();
        }
        let client = Client::connect(&self.socket());
        client.map_err(|fault| ClientError::Io(io::Error::other(fault)))?.call(method, parameters)
    }

    /// Notes that a command is sent to the daemon now. See [`PrivateDaemon::check_after_reply`].
    fn note_command(&self) {
        self.log_length_at_command.store(self.log_length(), Ordering::Relaxed);
    }

    fn log_length(&self) -> usize {
        let length = fs::metadata(self.dir().join("log")).map_or(0, |log| log.len());
        usize::try_from(length).unwrap_or(usize::MAX)
    }

    /// Checks that `read` returns `expected` now, after the reply of the daemon to a command about the job with the id
    /// `job`. The function waits until `read` returns `expected` only in these cases:
    ///
    /// - The daemon has logged that a change of the cpuset of this job is delayed, and not yet that it is complete.
    /// - The daemon has logged the delay since the last command was sent.
    ///
    /// The daemon makes a delayed change after its reply. Before the kernel moves a process to another cgroup, it lets
    /// all forks in progress on the machine end. On a busy machine with two cores, that took more than the daemon waits
    /// (100 ms) for 2 of 6000 changes.
    ///
    /// # Panics
    /// If `read` returns another value.
    #[track_caller]
    pub fn check_after_reply<T: PartialEq + Debug>(
        &self,
        job: &str,
        expected: &T,
        mut read: impl FnMut() -> T,
    ) {
        // The change may be made between the two calls of `log`.
        let log_before = self.log();
        let found = read();
        if found == *expected {
            return;
        }
        let log = self.log();
        let of_command = log.get(self.log_length_at_command.load(Ordering::Relaxed)..).unwrap_or_default();
        let has_open_change =
            |log: &str| has_delayed_change(log.get(self.log_length_at_start..).unwrap_or_default(), job);
        let is_delayed = has_open_change(&log_before)
            || has_open_change(&log)
            || count_lines(of_command, DELAYED_CPUSET_CHANGE, job) > 0;
        assert!(is_delayed, "{found:?} instead of {expected:?}; the log:\n{log}");
        let what =
            format!("the delayed change of the cpuset of {job} is made, and the state is {expected:?}");
        wait_until(&what, || read() == *expected);
    }

    /// Returns how many times the daemon has logged that a change of the cpuset of the job with the id `job` is delayed
    /// ([`PrivateDaemon::check_after_reply`]).
    #[must_use]
    pub fn delayed_cpuset_changes(&self, job: &str) -> usize {
        count_lines(&self.log(), DELAYED_CPUSET_CHANGE, job)
    }

    /// Sends the daemon a signal.
    ///
    /// # Panics
    /// If the daemon was not started, or was stopped or killed.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid().cast_signed()), signal);
    }

    /// Sends the daemon SIGTERM and waits for its end. Kills the daemon if it has not ended after `timeout`.
    pub fn stop(&mut self, timeout: Duration) {
        if self.child.is_some() {
            self.signal(Signal::SIGTERM);
            let deadline = Instant::now() + timeout;
            while matches!(self.exit_status(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(POLL_INTERVAL);
            }
            self.kill();
        }
    }

    /// Kills the daemon and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A child that has ended keeps its process id until it is waited for. So no other process is killed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns whether a change of the cpuset of the job with the id `job` is delayed at the end of `log`.
fn has_delayed_change(log: &str, job: &str) -> bool {
    count_lines(log, DELAYED_CPUSET_CHANGE, job) > count_lines(log, ENDED_CPUSET_CHANGES, job)
}

/// Returns the number of lines of `log` with `text` about the job with the id `job`.
fn count_lines(log: &str, text: &str, job: &str) -> usize {
    let field = format!("job={job}");
    log.lines().filter(|line| line.contains(text) && line.split(' ').any(|word| word == field)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_delayed_change_of_the_same_job_that_is_not_complete_is_found_in_the_log() {
        let line =
            |text: &str, job: &str| format!("2026-01-01T00:00:00.000Z  INFO {text} job=manual:{job}\n");
        let mut log = line(&format!("{DELAYED_CPUSET_CHANGE}: its processes leave the cpuset later"), "a");
        assert!(has_delayed_change(&log, "manual:a"));
        assert!(!has_delayed_change(&log, "manual:ab") && !has_delayed_change(&log, "manual:b"));
        log += &line(ENDED_CPUSET_CHANGES, "b");
        assert!(has_delayed_change(&log, "manual:a"));
        log += &line(ENDED_CPUSET_CHANGES, "a");
        assert!(!has_delayed_change(&log, "manual:a"));
        log += &line(DELAYED_CPUSET_CHANGE, "a");
        assert!(has_delayed_change(&log, "manual:a"));
    }
}
