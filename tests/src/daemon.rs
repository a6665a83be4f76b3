//! A daemon of the test's own: its socket and state in a directory that goes with it, and jobs that no other daemon on
//! this machine has.

use std::io;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_ipc::client::ClientFault;
use pjw_ipc::wire;
use serde_json::{Value, json};

use crate::cpusets::{self, NoCpusets};
use crate::private_daemon::PrivateDaemon;
use crate::programs::{program_dir, program_path};
use crate::skipping::skip;

/// The longest time from SIGTERM to the end.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// One daemon at a time: two of them would see each other's jobs' processes.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What a test's jobs are to be kept by: walls or masks. A promise that holds for both is tested with both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// Masks, also where walls could be had.
    Affinity,
    /// Cpusets, which the daemon finds by itself where there are any.
    Cpuset,
}

impl Enforcement {
    /// Both, or masks alone where no walls are to be had; says so then.
    #[must_use]
    pub fn available() -> Vec<Self> {
        match cpusets::find_hierarchy() {
            Ok(_) => vec![Self::Affinity, Self::Cpuset],
            Err(NoCpusets(why)) => {
                skip(format_args!("its half with walls: {why}"));
                vec![Self::Affinity]
            }
        }
    }

    /// As a line of the configuration. A job that gets no wall although the test wants one is a warning in its status.
    fn config_line(self) -> &'static str {
        match self {
            Self::Affinity => "enforcement = \"affinity\"\n",
            Self::Cpuset => "enforcement = \"cpuset\"\n",
        }
    }
}

/// How many daemons this program has started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// A private daemon of a test. The methods of [`PrivateDaemon`] are available too.
#[derive(Debug)]
pub struct Daemon {
    daemon: PrivateDaemon,
    /// The end of the names of its jobs, and so of their cgroups, which all daemons have in common.
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
    /// Starts a daemon with this configuration, and waits until it answers. It keeps jobs by cpusets if it can have them,
    /// unless the configuration says otherwise.
    #[must_use]
    pub fn start(config: &str) -> Self {
        let lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let daemon = PrivateDaemon::new(program_dir(), config).expect("a temporary directory");
        let tag = format!("t{}.{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let mut daemon = Self { daemon, tag, _lock: lock };
        daemon.spawn();
        daemon
    }

    /// Starts one that keeps its jobs so.
    #[must_use]
    pub fn start_with(enforcement: Enforcement, config: &str) -> Self {
        Self::start(&format!("{}{config}", enforcement.config_line()))
    }

    /// Writes another configuration. It is in force after a reload or a start.
    pub fn configure(&self, config: &str) {
        self.daemon.configure(config).expect("a writable directory");
    }

    /// The id of a test's own job: its name and what makes it this daemon's. A batch system's job keeps its own.
    #[must_use]
    pub fn job_id(&self, job: &str) -> String {
        let name = job.strip_prefix("manual:").unwrap_or(job);
        if name.contains(':') { job.to_owned() } else { format!("manual:{name}.{}", self.tag) }
    }

    /// Starts it again after [`Daemon::kill`] or [`Daemon::stop`].
    pub fn spawn(&mut self) {
        if let Err(error) = self.daemon.start(&[], || Ok::<(), io::Error>(())) {
            panic!("{error}");
        }
    }

    /// The end of the names of its jobs and of their cgroups.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.daemon.kill();
    }

    /// Ends it by SIGTERM, and waits.
    pub fn stop(&mut self) {
        self.daemon.stop(STOP_TIMEOUT);
    }

    /// The daemon's status.
    #[must_use]
    pub fn status(&self) -> wire::Status {
        let mut reply: Value = self.call("GetStatus", &json!({})).expect("everybody may look");
        serde_json::from_value(reply["status"].take()).expect("the status has its form")
    }

    /// A job as `status` shows it.
    #[must_use]
    pub fn job(&self, id: &str) -> Option<wire::Job> {
        let id = self.job_id(id);
        self.status().jobs.into_iter().find(|job| job.id == id)
    }

    /// Assigns cores and processes; returns the PUs, or the refusal.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn assign(&self, job: &str, cores: u32, pids: &[u32]) -> Result<CpuSet, String> {
        let reply: Result<Value, ClientFault> =
            self.call("Assign", &json!({ "job": self.job_id(job), "cores": cores, "pids": pids }));
        let reply = reply.map_err(|fault| fault.to_string())?;
        let cpus = reply["job"]["cpus"].as_str().expect("a job has cpus");
        Ok(cpus.parse().expect("cpus are a list"))
    }

    /// Lets a job go.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn release(&self, job: &str) -> Result<(), String> {
        self.call::<Value>("Release", &json!({ "job": self.job_id(job) }))
            .map(drop)
            .map_err(|fault| fault.to_string())
    }

    /// Runs `pjwctl` against it.
    #[must_use]
    pub fn pjwctl(&self, args: &[&str]) -> Output {
        self.pjwctl_command(args).output().expect("pjwctl runs")
    }
}

impl Drop for Daemon {
    /// Nothing of the test is left on the machine, also where its daemon was killed.
    fn drop(&mut self) {
        if self.is_started() {
            // A process that has just ended holds its cgroup until it is reaped.
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                let _ = self.call::<Value>("ReleaseAll", &json!({}));
                if cpusets::remaining_cgroups(&self.tag).is_empty() || Instant::now() > deadline {
                    break;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            self.stop();
        } else if self.state_dir().exists() {
            let mut release = Command::new(program_path("pjwd"));
            let _ = release.arg("--release-all").arg("--state-dir").arg(self.state_dir()).output();
        }
        if std::thread::panicking() {
            println!("the daemon's log:\n{}", self.log());
        } else {
            assert!(!self.log().contains("panicked"), "{}", self.log());
            assert_eq!(
                cpusets::remaining_cgroups(&self.tag),
                Vec::<PathBuf>::new(),
                "a wall is left:\n{}",
                self.log()
            );
        }
    }
}
