//! The private `pjwd` of a bench or of the demo. It looks for no batch system, so it changes only the processes that
//! commands name.

use std::fmt::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_core::{cpuset::CpuSet, job::Source};
use pjw_tests::private_daemon::PrivateDaemon;
use serde_json::{Value, json};

use crate::{programs::interrupt::Interrupt, programs::program::Program};

/// The longest time until all workers of the demo's job run.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The programs of the demo, all in one directory.
#[derive(Debug, Clone)]
pub struct Programs(PathBuf);

impl Programs {
    /// Those that were built beside this one.
    ///
    /// # Errors
    /// If this program doesn't know where it is.
    pub fn in_own_directory() -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("where is this program?")?;
        Ok(Self(executable.parent().context("this program has no directory")?.to_owned()))
    }

    /// Those that were built for this bench, which is one directory further down: `make bench` builds them first.
    ///
    /// # Errors
    /// If they were not built.
    pub fn for_benches() -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("where is this program?")?;
        let programs =
            Self(executable.ancestors().nth(2).context("this program is not below target")?.to_owned());
        for name in ["pjwd", "pjwctl"] {
            if !programs.path(name).exists() {
                bail!(
                    "there is no {}: cargo build --release -p pjwd -p pjwctl",
                    programs.path(name).display()
                );
            }
        }
        Ok(programs)
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// Starts the demo's job and waits until all its workers run. `launcher` is the start of the command, such as
    /// [`PrivateWarden::run`]. The job ends after so many steps, or never for 0.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_demo_job(
        &self,
        launcher: Option<Command>,
        name: &str,
        (workers, steps): (usize, u64),
        interrupt: &Interrupt,
    ) -> anyhow::Result<Program> {
        let mut command = launcher.unwrap_or_else(|| Command::new("env"));
        command.arg(self.path("pjw-demo-job"));
        command.args(["--workers", &workers.to_string(), "--steps", &steps.to_string()]);
        Program::start_until_ready(name, &mut command, READY_TIMEOUT, interrupt)
    }

    /// The path of one.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// How a warden learns of new processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSource {
    /// By process events, if the kernel offers them.
    ProcEvents,
    /// By polling: the warden is in a network namespace of its own, in which the kernel sends no process events. Needs
    /// root and unshare(1).
    Polling,
}

/// A private warden. It is ended when this value is dropped. The methods of [`PrivateDaemon`] are available too.
#[derive(Debug)]
pub struct PrivateWarden(PrivateDaemon);

impl Deref for PrivateWarden {
    type Target = PrivateDaemon;

    fn deref(&self) -> &PrivateDaemon {
        &self.0
    }
}

impl PrivateWarden {
    /// Starts a warden and waits until it answers. It hands out every core but `unusable_pus`.
    ///
    /// # Errors
    /// If it can't be started or does not answer in time, with the end of its log.
    pub fn start(programs: &Programs, unusable_pus: &CpuSet, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let keys = format!("interval = \"1s\"\nhousekeeping = \"{unusable_pus}\"\n");
        Self::start_with_config(programs, &keys, EventSource::ProcEvents, interrupt)
    }

    /// The same with these keys of the configuration. Without the key `enforcement`, jobs are kept by masks.
    ///
    /// # Errors
    /// As [`PrivateWarden::start`].
    pub fn start_with_config(
        programs: &Programs,
        keys: &str,
        source: EventSource,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let mut daemon = PrivateDaemon::new(programs.directory(), &config_text(keys))?;
        let launcher: &[&str] = match source {
            EventSource::ProcEvents => &[],
            EventSource::Polling => &["unshare", "--net", "--"],
        };
        daemon.start(launcher, || interrupt.check()).context("the private pjwd did not start")?;
        Ok(Self(daemon))
    }

    /// Puts other keys of the configuration in force.
    ///
    /// # Errors
    /// If the warden does not answer, or refuses.
    pub fn reconfigure(&self, keys: &str) -> anyhow::Result<()> {
        self.configure(&config_text(keys)).context("can't write its configuration")?;
        Ok(self.call::<Value>("Reload", &json!({})).map(drop)?)
    }

    /// Releases all jobs and restores the masks of their processes.
    ///
    /// # Errors
    /// If the warden does not answer, or refuses.
    pub fn release_all(&self) -> anyhow::Result<()> {
        Ok(self.call::<Value>("ReleaseAll", &json!({})).map(drop)?)
    }

    /// Assigns PUs and processes to a job, and waits until the processes are on the PUs.
    ///
    /// # Errors
    /// If the warden refuses.
    pub fn assign(&self, job: &str, cpus: &CpuSet, pids: &[u32]) -> anyhow::Result<()> {
        let request = json!({ "job": job, "cpus": cpus.to_string(), "pids": pids });
        Ok(self.call::<Value>("Assign", &request).map(drop)?)
    }

    /// Assigns a number of cores and processes to a job, and waits until the processes are on the cores.
    ///
    /// # Errors
    /// If the warden refuses.
    pub fn assign_cores(&self, job: &str, cores: usize, pids: &[u32]) -> anyhow::Result<()> {
        let request = json!({ "job": job, "cores": cores, "pids": pids });
        Ok(self.call::<Value>("Assign", &request).map(drop)?)
    }

    /// Releases a job, and waits until the masks of its processes are restored.
    ///
    /// # Errors
    /// If the warden refuses.
    pub fn release(&self, job: &str) -> anyhow::Result<()> {
        Ok(self.call::<Value>("Release", &json!({ "job": format!("manual:{job}") })).map(drop)?)
    }

    /// The warden's status.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn status(&self) -> anyhow::Result<Value> {
        Ok(self.call::<Value>("GetStatus", &json!({}))?["status"].take())
    }

    /// A job in the status. `None` if there is no such job.
    ///
    /// # Errors
    /// If the warden does not answer.
    pub fn job(&self, id: &str) -> anyhow::Result<Option<Value>> {
        let status = self.status()?;
        let jobs = status["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(jobs.iter().find(|job| job["id"] == id).cloned())
    }

    /// The times from the birth of new processes, by the kernel's clock, until they had their masks, in milliseconds. They
    /// are in the log with `log_level = "debug"`.
    #[must_use]
    pub fn reaction_times_ms(&self) -> Vec<f64> {
        let log = self.log();
        let lines = log.lines().filter(|line| line.contains("outside its job's cores was confined"));
        let us = lines.filter_map(|line| line.split(" us=").nth(1)?.split_whitespace().next()?.parse().ok());
        us.map(|us: f64| us / 1000.0).collect()
    }

    /// The start of a command that runs in a job: the program and its arguments follow.
    #[must_use]
    pub fn run_command(&self, job: &str, cores: usize) -> Command {
        self.pjwctl_command(&["run", "--cores", &cores.to_string(), "--job", job, "--"])
    }
}

impl Drop for PrivateWarden {
    fn drop(&mut self) {
        self.0.stop(STOP_TIMEOUT);
    }
}

fn config_text(keys: &str) -> String {
    let enforcement = if keys.contains("enforcement") { "" } else { "enforcement = \"affinity\"\n" };
    let mut text = format!("mode = \"enforce\"\n{enforcement}{keys}");
    for source in Source::ALL.iter().filter(|source| source.is_scheduler()) {
        let _ = write!(text, "\n[sources.{source}]\nenabled = false\n");
    }
    text
}
