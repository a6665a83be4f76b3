//! The private `pjwd` of a bench or of the demo. It does not look for jobs of batch systems, so it changes only
//! processes that a command names.

use std::fmt::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_core::{cpuset::CpuSet, job::JobSource};
use pjw_tests::private_daemon::PrivateDaemon;
use serde_json::{Value, json};

use crate::{programs::interrupt::StopSignal, programs::program::Program};

/// How long a job of the demo may take until all its workers run.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// A script that runs its arguments as a command. The command can load no BPF program, because the type information
/// of the kernel (BTF) is hidden from it.
const HIDE_BTF: &str = "mount --bind /dev/null /sys/kernel/btf/vmlinux && exec \"$0\" \"$@\"";

/// The environment variable that names the directory of the `pjwd` and `pjwctl` that a bench measures.
const PROGRAMS_VARIABLE: &str = "PJW_PROGRAMS";

/// The programs in the directory that [`PROGRAMS_VARIABLE`] names.
const MEASURED: [&str; 2] = ["pjwd", "pjwctl"];

/// The directories of the programs that a bench or the demo starts: one directory with `pjwd` and `pjwctl`, and one
/// with all other programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The directory of `pjwd` and `pjwctl`.
    measured: PathBuf,
    /// The directory of all other programs.
    built: PathBuf,
}

impl Programs {
    /// Returns the directories of the programs for a program whose directory contains all other programs, such as the
    /// demo. Both directories are the directory of the running program.
    ///
    /// # Errors
    /// If the path of the running program can't be read.
    pub fn from_current_exe() -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("can't read the path of this program")?;
        let built = executable.parent().context("this program has no directory")?.to_owned();
        Ok(Self { measured: built.clone(), built })
    }

    /// Returns the directories of the programs for a bench. The programs that were built with the bench are in the
    /// parent of the directory of the bench itself. `make bench` builds them before it runs the benches.
    ///
    /// If the environment variable `PJW_PROGRAMS` is set, it contains the directory of `pjwd` and `pjwctl`. So a bench
    /// can measure other versions of these two programs.
    ///
    /// # Errors
    /// If `pjwd` or `pjwctl` is missing, or if the path of the running program can't be read.
    pub fn for_benches() -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("can't read the path of this program")?;
        let built = executable.ancestors().nth(2).context("this program is not below target")?.to_owned();
        let measured = std::env::var_os(PROGRAMS_VARIABLE).map_or_else(|| built.clone(), PathBuf::from);
        let programs = Self { measured, built };
        for name in MEASURED {
            if !programs.path(name).exists() {
                bail!(
                    "there is no {}: cargo build --release -p pjwd -p pjwctl",
                    programs.path(name).display()
                );
            }
        }
        Ok(programs)
    }

    /// Returns the path of the directory that contains `pjwd` and `pjwctl`.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.measured
    }

    /// Starts the program `pjw-demo-job`, and waits until all its workers run. The program has `workers` workers, and
    /// ends after `steps` computing steps. If `steps` is 0, it does not end. `name` is its name in error messages.
    ///
    /// `launcher` is a command that starts another command, such as [`PrivateWarden::run_command`], and starts the
    /// program. Without `launcher`, the program is started directly.
    ///
    /// # Errors
    /// If the program can't be started, or if its workers do not run within 60 s.
    pub fn start_demo_job(
        &self,
        launcher: Option<Command>,
        name: &str,
        (workers, steps): (usize, u64),
        interrupt: &StopSignal,
    ) -> anyhow::Result<Program> {
        let mut command = launcher.unwrap_or_else(|| Command::new("env"));
        command.arg(self.path("pjw-demo-job"));
        command.args(["--workers", &workers.to_string(), "--steps", &steps.to_string()]);
        Program::start_until_ready(name, &mut command, READY_TIMEOUT, interrupt)
    }

    /// Returns the path of the program with the name `name`, such as `pjwctl`.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        if MEASURED.contains(&name) { self.measured.join(name) } else { self.built.join(name) }
    }
}

/// Returns the directory in which a private daemon has its files. As /run, where an installed daemon has them, it is
/// in memory if the machine has such a directory.
fn directory_in_memory() -> &'static Path {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory } else { Path::new("/tmp") }
}

/// How a private pjwd (a daemon that only a bench or the demo uses) finds new processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSource {
    /// By process events of the kernel. If the kernel sends none, by polling.
    ProcEvents,
    /// By polling. The daemon runs in a network namespace of its own, to which the kernel sends no process events.
    /// Needs root and unshare(1).
    Polling,
    /// By process events, but without BPF programs. The daemon runs in a mount namespace of its own, where the kernel's
    /// type information (BTF) is hidden. Needs root and unshare(1).
    WithoutBpf,
}

/// A private pjwd: a daemon that only this bench or the demo uses. Its jobs are those that this program adds, so it
/// changes no other processes. Dropping this value releases all jobs, so that none of their cgroups is left, and then
/// stops the daemon. This type also has the methods of [`PrivateDaemon`].
#[derive(Debug)]
pub struct PrivateWarden(PrivateDaemon);

impl Deref for PrivateWarden {
    type Target = PrivateDaemon;

    fn deref(&self) -> &PrivateDaemon {
        &self.0
    }
}

impl PrivateWarden {
    /// Starts a private pjwd, and waits until it answers. It keeps jobs on their cores by affinity masks. Jobs can get
    /// all cores, except those with a PU (logical CPU) in `unusable_pus`.
    ///
    /// # Errors
    /// If the daemon can't be started, or does not answer in time. The error contains the end of its log. Also if
    /// `interrupt` was set.
    pub fn start(programs: &Programs, unusable_pus: &CpuSet, interrupt: &StopSignal) -> anyhow::Result<Self> {
        Self::start_with_config(programs, &default_keys(unusable_pus), EventSource::ProcEvents, interrupt)
    }

    /// Starts a private pjwd as [`PrivateWarden::start`] does. Unlike there, the daemon keeps jobs on their cores by
    /// cpusets, if cpusets are available.
    ///
    /// # Errors
    /// The errors of [`PrivateWarden::start`].
    pub fn start_with_cpusets(
        programs: &Programs,
        unusable_pus: &CpuSet,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let keys = format!("enforcement = \"auto\"\nhousekeeping = \"{unusable_pus}\"\n");
        Self::start_with_config(programs, &keys, EventSource::ProcEvents, interrupt)
    }

    /// Starts a private pjwd as [`PrivateWarden::start`] does. If no other pjwd of this user runs, starts it without
    /// the option `--beside`. The status of the daemon then contains no warning about another daemon.
    ///
    /// # Errors
    /// The errors of [`PrivateWarden::start`].
    pub fn start_alone_if_possible(
        programs: &Programs,
        unusable_pus: &CpuSet,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let mut daemon = PrivateDaemon::new_in(
            directory_in_memory(),
            programs.directory(),
            &config_text(&default_keys(unusable_pus)),
        )?;
        daemon.refuse_to_run_beside();
        match daemon.start(&[], || interrupt.check()) {
            Ok(()) => Ok(Self(daemon)),
            Err(_) => Self::start(programs, unusable_pus, interrupt),
        }
    }

    /// Starts a private pjwd, and waits until it answers. `keys` contains lines for its configuration file. If `keys`
    /// has no line for the key `enforcement`, the daemon keeps jobs on their cores by affinity masks. `source` says how
    /// the daemon finds new processes.
    ///
    /// # Errors
    /// The errors of [`PrivateWarden::start`].
    pub fn start_with_config(
        programs: &Programs,
        keys: &str,
        source: EventSource,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let mut daemon =
            PrivateDaemon::new_in(directory_in_memory(), programs.directory(), &config_text(keys))?;
        let launcher: &[&str] = match source {
            EventSource::ProcEvents => &[],
            EventSource::Polling => &["unshare", "--net", "--"],
            EventSource::WithoutBpf => &["unshare", "--mount", "sh", "-c", HIDE_BTF],
        };
        daemon.start(launcher, || interrupt.check()).context("the private pjwd did not start")?;
        Ok(Self(daemon))
    }

    /// Replaces the configuration of the private pjwd, and makes the daemon reload it. `keys` contains lines for the
    /// configuration file.
    ///
    /// # Errors
    /// If the file can't be written, or if the daemon does not answer or refuses the configuration.
    pub fn reconfigure(&self, keys: &str) -> anyhow::Result<()> {
        self.configure(&config_text(keys)).context("can't write the configuration of the private pjwd")?;
        Ok(self.call::<Value>("Reload", &json!({})).map(drop)?)
    }

    /// Makes the private pjwd release all its jobs. The affinity masks of their processes are restored.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the request.
    pub fn release_all(&self) -> anyhow::Result<()> {
        Ok(self.call::<Value>("ReleaseAll", &json!({})).map(drop)?)
    }

    /// Makes the private pjwd grant the PUs (logical CPUs) `cpus` to the job `job`, and add the processes `pids` to the
    /// job. Returns when the processes are confined to these PUs.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the request.
    pub fn assign(&self, job: &str, cpus: &CpuSet, pids: &[u32]) -> anyhow::Result<()> {
        let request = json!({ "job": job, "cpus": cpus.to_string(), "pids": pids });
        Ok(self.call::<Value>("Assign", &request).map(drop)?)
    }

    /// As [`PrivateWarden::assign`], and gives the job the rule `rule` for the NUMA nodes of its processes
    /// (`--within-job`), such as `rr`. In a job with such a rule, pjwd also pins the only hot thread (a thread that runs
    /// most of the time).
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the request.
    pub fn assign_within(&self, job: &str, cpus: &CpuSet, pids: &[u32], rule: &str) -> anyhow::Result<()> {
        let request = json!({ "job": job, "cpus": cpus.to_string(), "pids": pids, "within_job": rule });
        Ok(self.call::<Value>("Assign", &request).map(drop)?)
    }

    /// Makes the private pjwd grant `cores` cores to the job `job`, and add the processes `pids` to the job. Returns
    /// when the processes are confined to these cores.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the request.
    pub fn assign_cores(&self, job: &str, cores: usize, pids: &[u32]) -> anyhow::Result<()> {
        let request = json!({ "job": job, "cores": cores, "pids": pids });
        Ok(self.call::<Value>("Assign", &request).map(drop)?)
    }

    /// Makes the private pjwd release the job `job`. Returns when the affinity masks of its processes are restored.
    /// `job` is the id of the job without `manual:`.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the request.
    pub fn release(&self, job: &str) -> anyhow::Result<()> {
        Ok(self.call::<Value>("Release", &json!({ "job": format!("manual:{job}") })).map(drop)?)
    }

    /// Returns the status of the private pjwd, as JSON.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn status(&self) -> anyhow::Result<Value> {
        Ok(self.call::<Value>("GetStatus", &json!({}))?["status"].take())
    }

    /// Returns the part of the status of the private pjwd that describes the job with the id `id`, as JSON. `None` if
    /// there is no such job.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn job(&self, id: &str) -> anyhow::Result<Option<Value>> {
        let status = self.status()?;
        let jobs = status["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(jobs.iter().find(|job| job["id"] == id).cloned())
    }

    /// Returns the reaction times in the log of the private pjwd, in milliseconds. Each one belongs to a process that
    /// was forked outside the cores of its job. The time begins at the fork, by the kernel's clock, and ends when pjwd
    /// has set the mask of the process. The log contains these times only with `log_level = "debug"`.
    #[must_use]
    pub fn reaction_times_ms(&self) -> Vec<f64> {
        let log = self.log();
        let lines = log.lines().filter(|line| line.contains("outside its job's cores was confined"));
        let us = lines.filter_map(|line| line.split(" us=").nth(1)?.split_whitespace().next()?.parse().ok());
        us.map(|us: f64| us / 1000.0).collect()
    }

    /// Returns a command that runs a program in the job `job` of the private pjwd, with `cores` cores (`pjwctl run`).
    /// The caller appends the program and its arguments to the command.
    #[must_use]
    pub fn run_command(&self, job: &str, cores: usize) -> Command {
        self.pjwctl_command(&["run", "--cores", &cores.to_string(), "--job", job, "--"])
    }
}

impl Drop for PrivateWarden {
    fn drop(&mut self) {
        // The programs of the bench have ended. A daemon that does not answer can't release their jobs and is stopped
        // anyway.
        let _ = self.release_all();
        self.0.stop(STOP_TIMEOUT);
    }
}

fn default_keys(unusable_pus: &CpuSet) -> String {
    format!("interval = \"1s\"\nhousekeeping = \"{unusable_pus}\"\n")
}

fn config_text(keys: &str) -> String {
    let enforcement = if keys.contains("enforcement") { "" } else { "enforcement = \"affinity\"\n" };
    let mut text = format!("mode = \"enforce\"\n{enforcement}{keys}");
    for source in JobSource::ALL.iter().filter(|source| source.is_batch_system()) {
        let _ = write!(text, "\n[sources.{source}]\nenabled = false\n");
    }
    text
}
