//! A private daemon of a test, with jobs whose names no other daemon on this machine uses.

use std::io;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pjw_core::cpuset::CpuSet;
use pjw_ipc::client::ClientError;
use pjw_ipc::wire;
use serde_json::{Value, json};

use crate::cpusets::{self, NoCpusets};
use crate::private_daemon::PrivateDaemon;
use crate::programs::program_dir;
use crate::skipping::skip;
use crate::waiting::wait_until;

/// The longest time from SIGTERM to the end of a daemon.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest time for the removal of the cgroups of all jobs.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(90);

/// Held while a daemon runs, so that only one runs at a time. A second daemon would find the processes of the jobs of
/// the first one.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// How the daemon of a test keeps its jobs on their cores: the value of the configuration key `enforcement`. A test for
/// both ways runs once with each value of [`Enforcement::available`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// By affinity masks only, also if cpusets are available.
    Affinity,
    /// By cpusets.
    Cpuset,
}

impl Enforcement {
    /// Returns the ways that this machine supports. If cpusets can't be used here, returns only
    /// [`Enforcement::Affinity`], and reports that the part with cpusets is skipped.
    #[must_use]
    pub fn available() -> Vec<Self> {
        match cpusets::find_hierarchy() {
            Ok(_) => vec![Self::Affinity, Self::Cpuset],
            Err(NoCpusets(why)) => {
                skip(format_args!("the part with cpusets: {why}"));
                vec![Self::Affinity]
            }
        }
    }

    /// Returns the line of the configuration. With "cpuset", the status has a warning if a job gets no cpuset.
    fn config_line(self) -> &'static str {
        match self {
            Self::Affinity => "enforcement = \"affinity\"\n",
            Self::Cpuset => "enforcement = \"cpuset\"\n",
        }
    }
}

/// The number of daemons that this program has started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// The daemon of a test: a pjwd with a socket and a state directory of its own. Only one such daemon exists in a test
/// program at a time. The methods of [`PrivateDaemon`] are available too.
#[derive(Debug)]
pub struct Daemon {
    daemon: PrivateDaemon,
    /// The end of the names of the daemon's jobs and of their cgroups. All daemons of the machine use the same cpuset
    /// hierarchy.
    tag: String,
    _lock: MutexGuard<'static, ()>,
}

impl Deref for Daemon {
    type Target = PrivateDaemon;

    fn deref(&self) -> &PrivateDaemon {
        &self.daemon
    }
}

impl Daemon {
    /// Starts a daemon with the configuration `config` and waits until it answers. The daemon uses cpusets if they
    /// are available, unless the configuration says otherwise.
    #[must_use]
    pub fn start(config: &str) -> Self {
        let mut daemon = Self::new(config);
        daemon.spawn();
        daemon
    }

    /// Starts a daemon through `launcher`: a program with its arguments, which must execute the daemon in its own
    /// process (execve(2)). Waits until the daemon answers.
    #[must_use]
    pub fn start_by(launcher: &[&str]) -> Self {
        let mut daemon = Self::new("");
        daemon.spawn_by(launcher);
        daemon
    }

    /// Makes a daemon with the configuration `config`, which keeps jobs on their cores by `enforcement`. The daemon is
    /// not started: [`Daemon::spawn`] starts it. So a test can first read the state that the daemon must later restore.
    /// Waits until no other [`Daemon`] of this test program exists.
    #[must_use]
    pub fn prepare_with(enforcement: Enforcement, config: &str) -> Self {
        Self::new(&format!("{}{config}", enforcement.config_line()))
    }

    fn new(config: &str) -> Self {
        let lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let daemon = PrivateDaemon::new(program_dir(), config).expect("a temporary directory");
        let tag = format!("t{}.{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        Self { daemon, tag, _lock: lock }
    }

    /// Starts a daemon with the configuration `config`, which keeps jobs on their cores by `enforcement`.
    #[must_use]
    pub fn start_with(enforcement: Enforcement, config: &str) -> Self {
        let mut daemon = Self::prepare_with(enforcement, config);
        daemon.spawn();
        daemon
    }

    /// Starts a daemon without the option `--beside`. So the daemon takes the lock that prevents a second daemon of
    /// this user. If another daemon holds the lock, reports that this part of the test is skipped, and returns `None`.
    #[must_use]
    pub fn start_alone(enforcement: Enforcement, config: &str) -> Option<Self> {
        let mut daemon = Self::prepare_with(enforcement, config);
        daemon.daemon.refuse_to_run_beside();
        match daemon.daemon.start(&[], || Ok::<(), io::Error>(())) {
            Ok(()) => Some(daemon),
            Err(error) if daemon.log().contains("another pjwd runs") => {
                skip(format_args!("the part with a daemon that holds the lock: {error}"));
                daemon.kill();
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Replaces the configuration file of the daemon by `config`. The daemon uses the new configuration after a reload
    /// or its next start.
    pub fn configure(&self, config: &str) {
        self.daemon.configure(config).expect("a writable directory");
    }

    /// Returns the id of a job of this daemon. If `job` is a name, such as `a`, returns this name with the tag of the
    /// daemon at its end ([`Daemon::tag`]). If `job` is the id of a batch system's job, such as `slurm:4`, returns
    /// `job` unchanged.
    #[must_use]
    pub fn job_id(&self, job: &str) -> String {
        let name = job.strip_prefix("manual:").unwrap_or(job);
        if name.contains(':') { job.to_owned() } else { format!("manual:{name}.{}", self.tag) }
    }

    /// Starts the daemon, for the first time or again after [`Daemon::kill`] or [`Daemon::stop`]. Waits until the
    /// daemon answers.
    pub fn spawn(&mut self) {
        self.spawn_by(&[]);
    }

    /// Starts the daemon again through `launcher`: a program with its arguments, which must execute the daemon in its
    /// own process (execve(2)). Empty for no launcher. Must be called after [`Daemon::kill`] or [`Daemon::stop`], or
    /// for a daemon that was not started yet.
    pub fn spawn_by(&mut self, launcher: &[&str]) {
        if let Err(error) = self.daemon.start(launcher, || Ok::<(), io::Error>(())) {
            panic!("{error}");
        }
    }

    /// Returns the tag of this daemon: the text with which the names of its jobs and of their cgroups end. No other
    /// daemon has the same tag.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill();
    }

    /// Kills the daemon, and removes its state directory.
    pub fn lose_state(&mut self) {
        self.daemon.kill();
        std::fs::remove_dir_all(self.state_dir()).expect("the state directory can be removed");
    }

    /// Kills the daemon, and writes garbage into its state files.
    pub fn damage_state(&mut self) {
        self.daemon.kill();
        for file in ["journal.jsonl", "state.json"] {
            std::fs::write(self.state_dir().join(file), "garbage\n").expect("a state file can be written");
        }
    }

    /// Sends the daemon SIGTERM and waits for its end.
    pub fn stop(&mut self) {
        self.daemon.stop(STOP_TIMEOUT);
    }

    /// Stops the daemon (SIGSTOP), calls `act`, and then lets the daemon continue (SIGCONT). So the daemon sees all
    /// changes that `act` made at once.
    pub fn while_stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        self.signal(Signal::SIGSTOP);
        let _stopped = Stopped(self);
        wait_until("the daemon has stopped", || are_all_threads_stopped(self.pid()));
        act()
    }

    /// Returns the status of the daemon.
    #[must_use]
    pub fn status(&self) -> wire::Status {
        let mut reply: Value = self.call("GetStatus", &json!({})).expect("every user may read the status");
        serde_json::from_value(reply["status"].take()).expect("the status can be parsed")
    }

    /// Returns the job with the name `id` from the status of the daemon. [`Daemon::job_id`] adds the tag of the daemon
    /// to the name. `None` if the status has no such job.
    #[must_use]
    pub fn job(&self, id: &str) -> Option<wire::Job> {
        let id = self.job_id(id);
        self.status().jobs.into_iter().find(|job| job.id == id)
    }

    /// Assigns `cores` cores and the processes `pids` to a job. Returns the PUs (logical CPUs) of the job.
    ///
    /// # Errors
    /// The text of the refusal.
    pub fn assign(&self, job: &str, cores: u32, pids: &[u32]) -> Result<CpuSet, String> {
        let reply: Result<Value, ClientError> =
            self.call("Assign", &json!({ "job": self.job_id(job), "cores": cores, "pids": pids }));
        let reply = reply.map_err(|fault| fault.to_string())?;
        let cpus = reply["job"]["cpus"].as_str().expect("a job has cpus");
        Ok(cpus.parse().expect("cpus are a list"))
    }

    /// Releases a job.
    ///
    /// # Errors
    /// The text of the refusal.
    pub fn release(&self, job: &str) -> Result<(), String> {
        self.call::<Value>("Release", &json!({ "job": self.job_id(job) }))
            .map(drop)
            .map_err(|fault| fault.to_string())
    }

    /// Runs `pjwctl` with the socket of this daemon, and returns its output.
    #[must_use]
    pub fn pjwctl(&self, args: &[&str]) -> Output {
        self.pjwctl_command(args).output().expect("pjwctl runs")
    }
}

/// A daemon that was stopped by SIGSTOP. It continues when this value is dropped.
struct Stopped<'a>(&'a Daemon);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGCONT);
    }
}

/// Whether all threads of a process are in the state T of proc_pid_stat(5): a thread in a system call stops at its end.
fn are_all_threads_stopped(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let is_stopped = |stat: &str| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'));
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok())
        .all(|stat| is_stopped(&stat))
}

impl Drop for Daemon {
    /// Releases all jobs, also if the daemon was killed, and checks that no cgroup is left.
    fn drop(&mut self) {
        // A process that has just ended holds its cgroup until it is waited for.
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        while self.is_started() || self.state_dir().exists() {
            if self.is_started() {
                let _ = self.call::<Value>("ReleaseAll", &json!({}));
            } else {
                let _ = self.release_all_command().output();
            }
            if cpusets::remaining_cgroups(&self.tag).is_empty() || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.stop();
        if std::thread::panicking() {
            println!("the daemon's log:\n{}", self.log());
        } else {
            assert!(!self.log().contains("panicked"), "{}", self.log());
            assert_eq!(
                cpusets::remaining_cgroups(&self.tag),
                Vec::<PathBuf>::new(),
                "a cgroup is left:\n{}",
                self.log()
            );
        }
    }
}
