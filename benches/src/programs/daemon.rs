//! A warden of the demo's own, or of a bench's: a private `pjwd` with its socket, state and configuration in a temporary
//! directory. It knows no batch system, so it touches only what it is told of, beside whatever else runs here.

use std::fmt::Write;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_core::cpuset::CpuSet;
use pjw_core::job::Source;
use pjw_ipc::client::Client;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::programs::interrupt::Interrupt;
use crate::programs::program::{Program, until};

const START_AT_MOST: Duration = Duration::from_secs(30);
const STOP_AT_MOST: Duration = Duration::from_secs(10);

/// The programs of the demo, all in one directory.
#[derive(Debug, Clone)]
pub struct Programs(PathBuf);

impl Programs {
    /// Those that were built beside this one.
    ///
    /// # Errors
    /// If this program doesn't know where it is.
    pub fn beside_this_one() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("where is this program?")?;
        Ok(Self(this.parent().context("this program has no directory")?.to_owned()))
    }

    /// Those that were built for this bench, which is one directory further down: `make bench` builds them first.
    ///
    /// # Errors
    /// If they were not built.
    pub fn of_benches() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("where is this program?")?;
        let programs = Self(this.ancestors().nth(2).context("this program is not below target")?.to_owned());
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

    /// The path of one.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// How a warden learns of new processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hearing {
    /// By the kernel's events, where it may have them.
    Events,
    /// By looking: it is put in a network namespace of its own, where the kernel tells no events. Needs root and
    /// unshare(1).
    Polling,
}

impl Hearing {
    /// The start of the command that runs this program so. It keeps its process id.
    fn command(self, program: &Path) -> Command {
        match self {
            Self::Events => Command::new(program),
            Self::Polling => {
                let mut command = Command::new("unshare");
                command.arg("--net").arg("--").arg(program);
                command
            }
        }
    }
}

/// The private warden. It is ended when this value goes away, and its directory with it.
#[derive(Debug)]
pub struct Warden {
    programs: Programs,
    daemon: Program,
    dir: TempDir,
}

impl Warden {
    /// Starts it, and waits until it answers. It hands out every core but these.
    ///
    /// # Errors
    /// If it can't be started or doesn't answer in time; the end of its log is told.
    pub fn start(programs: &Programs, not_ours: &CpuSet, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let keys = format!("interval = \"1s\"\nhousekeeping = \"{not_ours}\"\n");
        Self::configured(programs, &keys, Hearing::Events, interrupt)
    }

    /// The same with these keys of the configuration. Jobs are kept by masks if they don't say otherwise, and no batch system
    /// is looked for.
    ///
    /// # Errors
    /// As [`Warden::start`].
    pub fn configured(
        programs: &Programs,
        keys: &str,
        hearing: Hearing,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("pjw-demo-").tempdir().context("no temporary directory")?;
        let config = dir.path().join("pjwd.toml");
        fs::write(&config, configuration(keys)).context("can't write in the temporary directory")?;
        let log = File::create(log_of(dir.path())).context("can't write in the temporary directory")?;
        let mut command = hearing.command(&programs.path("pjwd"));
        command.arg("--config").arg(&config).arg("--socket").arg(socket_of(dir.path()));
        command.arg("--state-dir").arg(dir.path().join("state")).stderr(Stdio::from(log));
        let daemon = Program::start("pjwd", &mut command)?;
        let mut warden = Self { programs: programs.clone(), daemon, dir };
        warden.wait_until_it_answers(interrupt)?;
        Ok(warden)
    }

    /// Goes on with these keys.
    ///
    /// # Errors
    /// If it doesn't answer, or refuses.
    pub fn reconfigure(&self, keys: &str) -> anyhow::Result<()> {
        fs::write(self.dir.path().join("pjwd.toml"), configuration(keys))
            .context("can't write its configuration")?;
        let _: Value = Client::connect(&self.socket())?.call("Reload", &json!({}))?;
        Ok(())
    }

    /// Lets go of all jobs, and puts back what was done for them.
    ///
    /// # Errors
    /// If it doesn't answer, or refuses.
    pub fn release_all(&self) -> anyhow::Result<()> {
        let _: Value = Client::connect(&self.socket())?.call("ReleaseAll", &json!({}))?;
        Ok(())
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket_of(self.dir.path())
    }

    /// Gives a job these PUs and processes, and waits until they are on them.
    ///
    /// # Errors
    /// If the warden refuses.
    pub fn assign(&self, job: &str, cpus: &CpuSet, pids: &[u32]) -> anyhow::Result<()> {
        let wish = json!({ "job": job, "cpus": cpus.to_string(), "pids": pids });
        let _: Value = Client::connect(&self.socket())?.call("Assign", &wish)?;
        Ok(())
    }

    /// Its status.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub fn status(&self) -> anyhow::Result<Value> {
        let mut reply: Value = Client::connect(&self.socket())?.call("GetStatus", &json!({}))?;
        Ok(reply["status"].take())
    }

    /// How long after their birth, by the kernel's clock, newborns had their masks, in milliseconds: as its log tells, with
    /// `log_level = "debug"`.
    ///
    /// # Errors
    /// If there is no log.
    pub fn reactions(&self) -> anyhow::Result<Vec<f64>> {
        let log = fs::read_to_string(log_of(self.dir.path())).context("the warden has no log")?;
        let told = log.lines().filter(|line| line.contains("born outside is right"));
        let us =
            told.filter_map(|line| line.split(" us=").nth(1)?.split_whitespace().next()?.parse::<f64>().ok());
        Ok(us.map(|us| us / 1000.0).collect())
    }

    fn wait_until_it_answers(&mut self, interrupt: &Interrupt) -> anyhow::Result<()> {
        let answered = until("pjwd does not answer", START_AT_MOST, interrupt, || {
            if let Some(status) = self.daemon.ended()? {
                bail!("pjwd ended: {status}");
            }
            let output = self.ask(&["status", "--json"]).stderr(Stdio::null()).output();
            Ok(output.context("can't start pjwctl: make build")?.status.success().then_some(()))
        });
        answered.with_context(|| {
            let log = fs::read_to_string(log_of(self.dir.path())).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            format!(
                "the demo's warden did not start; its log ends with\n{}",
                lines[lines.len().saturating_sub(10)..].join("\n")
            )
        })
    }

    /// A question to it: `pjwctl` with these arguments.
    #[must_use]
    pub fn ask(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.path("pjwctl"));
        command.arg("--socket").arg(socket_of(self.dir.path())).args(arguments);
        command
    }

    /// The start of a command that runs in a jail: the program and its arguments follow.
    #[must_use]
    pub fn run(&self, job: &str, cores: usize) -> Command {
        self.ask(&["run", "--cores", &cores.to_string(), "--job", job, "--"])
    }

    /// A job's entry in `status --json`, if it is there.
    ///
    /// # Errors
    /// If the warden doesn't answer.
    pub fn job(&self, id: &str) -> anyhow::Result<Option<Value>> {
        let output = self.ask(&["status", "--json"]).output().context("can't start pjwctl")?;
        let status: Value = serde_json::from_slice(&output.stdout).context("status --json is no JSON")?;
        let jobs = status["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(jobs.iter().find(|job| job["id"] == id).cloned())
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.daemon.end(STOP_AT_MOST);
    }
}

fn socket_of(dir: &Path) -> PathBuf {
    dir.join("pjwd.sock")
}

fn log_of(dir: &Path) -> PathBuf {
    dir.join("pjwd.log")
}

fn configuration(keys: &str) -> String {
    let by = if keys.contains("enforcement") { "" } else { "enforcement = \"affinity\"\n" };
    let mut text = format!("mode = \"enforce\"\n{by}{keys}");
    for source in Source::ALL.iter().filter(|source| source.is_scheduler()) {
        let _ = write!(text, "\n[sources.{source}]\nenabled = false\n");
    }
    text
}
