//! Programs under Open MPI and MPICH, as Debian and Ubuntu install them, on this machine alone.
//!
//! The ranks are the demo's job with one worker: no rank waits for another, so a rank's time says how much of a core it
//! had. Both launchers ask for the machine's cores, not for those that are free, and bind the first rank to the first.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::{programs::interrupt::Interrupt, programs::program::Program};

/// A launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MpiLauncher {
    /// What it is called in the table.
    pub name: &'static str,
    mpirun: &'static str,
    /// What makes it bind its ranks, beside its default.
    bind_arguments: &'static [&'static str],
}

/// Those that are known.
pub const LAUNCHERS: [MpiLauncher; 2] = [
    MpiLauncher { name: "Open MPI", mpirun: "mpirun.openmpi", bind_arguments: &[] },
    MpiLauncher {
        name: "MPICH -bind-to core",
        mpirun: "mpirun.mpich",
        bind_arguments: &["-bind-to", "core"],
    },
];

impl MpiLauncher {
    /// Whether it is here.
    ///
    /// # Errors
    /// If the launcher is not found: the reason, for the line that says what is skipped.
    pub fn check_installed(&self) -> anyhow::Result<()> {
        let output = Command::new(self.mpirun).arg("--version").output();
        let output = output.with_context(|| format!("there is no {}: make mpi", self.mpirun))?;
        if !output.status.success() {
            bail!("{} --version fails", self.mpirun);
        }
        Ok(())
    }

    /// Starts so many ranks of so many steps; `prefix` is the start of a command that runs the launcher, if anything is
    /// to. Waits until all of them run. The launcher's own files go to `temporary_dir`.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn launch(
        &self,
        prefix: Option<Command>,
        (ranks, steps): (usize, u64),
        job: &Path,
        temporary_dir: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<MpiRun> {
        let mut command = match prefix {
            Some(mut command) => {
                command.arg(self.mpirun);
                command
            }
            None => Command::new(self.mpirun),
        };
        command.args(self.bind_arguments).args(["-np", &ranks.to_string()]).arg(job);
        command.args(["--workers", "1", "--steps", &steps.to_string()]);
        // Nothing of a batch system that the bench may run in, which it would ask. Open MPI refuses root unless it is
        // told, and looks for a remote shell unless there is one machine only.
        let kept = ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let kept: Vec<_> = kept.collect();
        command.env_clear().envs(kept);
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.envs([("OMPI_MCA_plm", "isolated"), ("HYDRA_LAUNCHER", "fork")]);
        command.env("TMPDIR", temporary_dir);
        let mut run =
            MpiRun { program: Program::start(self.name, &mut command)?, seconds: Vec::new(), ranks };
        let mut ready = 0;
        while ready < ranks {
            match run.program.read_line(READY_TIMEOUT, interrupt)?.as_str() {
                "ready" => ready += 1,
                // A quick rank may be done before the last one began.
                line => run.record_time(line)?,
            }
        }
        Ok(run)
    }
}

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const DONE_TIMEOUT: Duration = Duration::from_secs(180);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Running ranks.
#[derive(Debug)]
pub struct MpiRun {
    program: Program,
    seconds: Vec<f64>,
    ranks: usize,
}

impl MpiRun {
    fn record_time(&mut self, line: &str) -> anyhow::Result<()> {
        self.seconds.push(line.parse().with_context(|| format!("a rank printed {line:?}, not its time"))?);
        Ok(())
    }

    /// The time of the slowest, in seconds.
    ///
    /// # Errors
    /// If one fails.
    pub fn slowest_seconds(mut self, interrupt: &Interrupt) -> anyhow::Result<f64> {
        while self.seconds.len() < self.ranks {
            let line = self.program.read_line(DONE_TIMEOUT, interrupt)?;
            self.record_time(&line)?;
        }
        Ok(self.seconds.iter().copied().fold(0.0, f64::max))
    }
}

impl Drop for MpiRun {
    /// A launcher that is asked ends its ranks itself.
    fn drop(&mut self) {
        self.program.terminate(STOP_TIMEOUT);
    }
}
