//! A daemon of the test's own: its socket and state in a directory that goes with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_ipc::client::{Client, ClientFault};
use pjw_ipc::wire;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::patience::until;
use crate::programs::program;

/// One daemon at a time: two of them would see each other's jobs' processes.
static TURN: Mutex<()> = Mutex::new(());

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Option<Child>,
    /// Its directory.
    pub dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Daemon {
    /// Starts one with this configuration, and waits until it answers.
    #[must_use]
    pub fn start(config: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("pjwd.toml"), config).expect("a writable directory");
        let mut daemon = Self { child: None, dir, _turn: turn };
        daemon.spawn();
        daemon
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
        self.status().jobs.into_iter().find(|job| job.id == id)
    }

    /// Assigns cores and processes; returns the PUs, or the refusal.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn assign(&self, job: &str, cores: u32, pids: &[u32]) -> Result<CpuSet, String> {
        let reply: Result<Value, ClientFault> =
            self.call("Assign", &json!({ "job": job, "cores": cores, "pids": pids }));
        let reply = reply.map_err(|fault| fault.to_string())?;
        let cpus = reply["job"]["cpus"].as_str().expect("a job has cpus");
        Ok(cpus.parse().expect("cpus are a list"))
    }

    /// Lets a job go.
    ///
    /// # Errors
    /// The refusal's words.
    pub fn release(&self, job: &str) -> Result<(), String> {
        self.call::<Value>("Release", &json!({ "job": job })).map(drop).map_err(|fault| fault.to_string())
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
    fn drop(&mut self) {
        if self.child.is_some() {
            let _ = self.call::<Value>("ReleaseAll", &json!({}));
        }
        self.stop();
        if std::thread::panicking() {
            println!("the daemon's log:\n{}", self.log());
        } else {
            assert!(!self.log().contains("panicked"), "{}", self.log());
        }
    }
}
