//! A daemon of the test's own: its socket and state in a directory that goes with it, and jobs that no other daemon on
//! this machine has.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_ipc::client::{Client, ClientFault};
use pjw_ipc::wire;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::patience::until;
use crate::programs::program;
use crate::skipping::skip;
use crate::walls::{self, NoWalls};

/// One daemon at a time: two of them would see each other's jobs' processes.
static TURN: Mutex<()> = Mutex::new(());

/// What a test's jobs are to be kept by: walls or masks. A promise that holds for both is tested with both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// Masks, also where walls could be had.
    Masks,
    /// Cpusets, which the daemon finds by itself where there are any.
    Walls,
}

impl Keeping {
    /// Both, or masks alone where no walls are to be had; says so then.
    #[must_use]
    pub fn all() -> Vec<Self> {
        match walls::place() {
            Ok(_) => vec![Self::Masks, Self::Walls],
            Err(NoWalls(why)) => {
                skip(format_args!("its half with walls: {why}"));
                vec![Self::Masks]
            }
        }
    }

    /// As a line of the configuration. A job that gets no wall although the test wants one is a warning in its status.
    fn line(self) -> &'static str {
        match self {
            Self::Masks => "enforcement = \"affinity\"\n",
            Self::Walls => "enforcement = \"cpuset\"\n",
        }
    }
}

/// How many daemons this program has started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Option<Child>,
    /// What its jobs' names end in, which are the names of directories that all daemons share.
    tag: String,
    /// Its directory.
    pub dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Daemon {
    /// Starts one with this configuration, and waits until it answers. Unless that says otherwise, it keeps jobs as it
    /// does on any machine like this: by walls if it can have them.
    #[must_use]
    pub fn start(config: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("pjwd.toml"), config).expect("a writable directory");
        let tag = format!("t{}.{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let mut daemon = Self { child: None, tag, dir, _turn: turn };
        daemon.spawn();
        daemon
    }

    /// Starts one that keeps its jobs so.
    #[must_use]
    pub fn keeping(by: Keeping, config: &str) -> Self {
        Self::start(&format!("{}{config}", by.line()))
    }

    /// Writes another configuration, in force once the daemon is told so or started again.
    pub fn configure(&self, config: &str) {
        std::fs::write(self.dir.path().join("pjwd.toml"), config).expect("a writable directory");
    }

    /// The id of a test's own job: its name and what makes it this daemon's. A batch system's job keeps its own.
    #[must_use]
    pub fn id(&self, job: &str) -> String {
        let name = job.strip_prefix("manual:").unwrap_or(job);
        if name.contains(':') { job.to_owned() } else { format!("manual:{name}.{}", self.tag) }
    }

    /// Starts it again after [`Daemon::kill`] or [`Daemon::stop`].
    pub fn spawn(&mut self) {
        let log = File::options().create(true).append(true).open(self.dir.path().join("log")).expect("a log");
        let mut child = self.command().stderr(log).stdin(Stdio::null()).spawn().expect("pjwd starts");
        until("pjwd answers", || {
            if let Some(status) = child.try_wait().expect("its parent may wait") {
                panic!("pjwd ended with {status}:\n{}", self.log());
            }
            let mut client = Client::connect(&self.socket()).ok()?;
            client.call::<Value>("GetStatus", &json!({})).ok()
        });
        self.child = Some(child);
    }

    /// The command that starts it.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(program("pjwd"));
        command.arg("--config").arg(self.dir.path().join("pjwd.toml"));
        command.arg("--socket").arg(self.socket()).arg("--state-dir").arg(self.dir.path().join("state"));
        command
    }

    /// What the names of its jobs, and of their walls, end in.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("pjwd.sock")
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// What it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Ends it without a warning.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Asks it to end, and waits.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            self.signal_to(&child, Signal::SIGTERM);
            let _ = child.wait();
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.signal_to(self.child.as_ref().expect("it runs"), signal);
    }

    fn signal_to(&self, child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id().cast_signed()), signal).expect("its parent may signal it");
    }

    /// Calls a method.
    ///
    /// # Errors
    /// What the daemon answers.
    pub fn call<T: DeserializeOwned>(&self, method: &str, parameters: &Value) -> Result<T, ClientFault> {
        Client::connect(&self.socket()).expect("pjwd listens").call(method, parameters)
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
        let id = self.id(id);
        self.status().jobs.into_iter().find(|job| job.id == id)
    }

    /// Assigns cores and processes; returns the PUs, or the refusal.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn assign(&self, job: &str, cores: u32, pids: &[u32]) -> Result<CpuSet, String> {
        let reply: Result<Value, ClientFault> =
            self.call("Assign", &json!({ "job": self.id(job), "cores": cores, "pids": pids }));
        let reply = reply.map_err(|fault| fault.to_string())?;
        let cpus = reply["job"]["cpus"].as_str().expect("a job has cpus");
        Ok(cpus.parse().expect("cpus are a list"))
    }

    /// Lets a job go.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn release(&self, job: &str) -> Result<(), String> {
        self.call::<Value>("Release", &json!({ "job": self.id(job) }))
            .map(drop)
            .map_err(|fault| fault.to_string())
    }

    /// Runs `pjwctl` against it.
    #[must_use]
    pub fn pjwctl(&self, args: &[&str]) -> Output {
        self.pjwctl_command(args).output().expect("pjwctl runs")
    }

    /// The command of `pjwctl` against it.
    #[must_use]
    pub fn pjwctl_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program("pjwctl"));
        command.arg("--socket").arg(self.socket()).args(args).stdin(Stdio::null());
        command
    }

    /// The directory of its journal.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        Path::new(self.dir.path()).join("state")
    }
}

impl Drop for Daemon {
    /// Nothing of the test is left on the machine, also where its daemon was killed.
    fn drop(&mut self) {
        if self.child.is_some() {
            // A process that has just ended holds its cgroup until it is reaped.
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                let _ = self.call::<Value>("ReleaseAll", &json!({}));
                if walls::left(&self.tag).is_empty() || Instant::now() > deadline {
                    break;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            self.stop();
        } else if self.state_dir().exists() {
            let mut undo = Command::new(program("pjwd"));
            let _ = undo.arg("--release-all").arg("--state-dir").arg(self.state_dir()).output();
        }
        if std::thread::panicking() {
            println!("the daemon's log:\n{}", self.log());
        } else {
            assert!(!self.log().contains("panicked"), "{}", self.log());
            assert_eq!(walls::left(&self.tag), Vec::<PathBuf>::new(), "a wall is left:\n{}", self.log());
        }
    }
}
