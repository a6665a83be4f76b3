//! Runs programs under Open MPI and MPICH, as Debian and Ubuntu install them, on this machine only.
//!
//! Each rank is the demo's job with one worker. No rank waits for another, so the time of a rank shows how much CPU
//! time the rank had. Both launchers read the cores of the machine, not the cores that are free, and bind the first
//! rank to the first core.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const DONE_TIMEOUT: Duration = Duration::from_secs(180);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A program that launches MPI programs, such as `mpirun` of Open MPI, with the options that the benches pass to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MpiLauncher {
    /// The name of this launcher in the table that a bench prints.
    pub name: &'static str,
    mpirun: &'static str,
    /// Arguments that make the launcher bind its ranks, if it does not bind them by default.
    bind_arguments: &'static [&'static str],
}

/// The MPI launchers that the benches use. Open MPI binds its ranks to cores by default. MPICH does so only with an
/// option.
pub const LAUNCHERS: [MpiLauncher; 3] = [
    MpiLauncher { name: "Open MPI", mpirun: "mpirun.openmpi", bind_arguments: &[] },
    MpiLauncher { name: "MPICH", mpirun: "mpirun.mpich", bind_arguments: &[] },
    MpiLauncher {
        name: "MPICH -bind-to core",
        mpirun: "mpirun.mpich",
        bind_arguments: &["-bind-to", "core"],
    },
];

impl MpiLauncher {
    /// Checks whether this MPI launcher is installed.
    ///
    /// # Errors
    /// If the launcher can't be run. The error is the reason why a bench skips this launcher.
    pub fn check_installed(&self) -> anyhow::Result<()> {
        let output = Command::new(self.mpirun).arg("--version").output();
        let output = output.with_context(|| format!("there is no {}: make mpi", self.mpirun))?;
        if !output.status.success() {
            bail!("{} --version fails", self.mpirun);
        }
        Ok(())
    }

    /// Starts an MPI program with `ranks` ranks (processes), and waits until all of them run. Each rank executes the
    /// program `job` with one worker, and ends after `steps` computing steps. `prefix` is a command that starts another
    /// command: it starts the launcher. Without `prefix`, the launcher is started directly. The launcher writes its own
    /// files to `temporary_dir`.
    ///
    /// # Errors
    /// If the launcher can't be started, or if a rank is not ready within 60 s.
    pub fn launch(
        &self,
        prefix: Option<Command>,
        (ranks, steps): (usize, u64),
        job: &Path,
        temporary_dir: &Path,
        interrupt: &StopSignal,
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
        // The launchers would use a batch system whose variables they see, so only two variables are kept.
        let kept = ["PATH", "HOME"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let kept: Vec<_> = kept.collect();
        command.env_clear().envs(kept);
        // Open MPI does not run as root without these variables.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        // The launchers start the ranks on this machine only, without a remote shell.
        command.envs([("OMPI_MCA_plm", "isolated"), ("HYDRA_LAUNCHER", "fork")]);
        command.env("TMPDIR", temporary_dir);
        let mut run =
            MpiRun { program: Program::start(self.name, &mut command)?, seconds: Vec::new(), ranks };
        let mut ready = 0;
        while ready < ranks {
            match run.program.read_line(READY_TIMEOUT, interrupt)?.as_str() {
                "ready" => ready += 1,
                // A rank may be done before the last rank begins.
                line => run.record_time(line)?,
            }
        }
        Ok(run)
    }
}

/// A running MPI program. Dropping this value ends the program and its ranks (processes).
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

    /// Waits until all ranks (processes) of the MPI program have printed their run times. Returns the run time of the
    /// slowest rank, in seconds.
    ///
    /// # Errors
    /// If a rank fails or takes longer than 180 s, or if `interrupt` was set.
    pub fn slowest_seconds(mut self, interrupt: &StopSignal) -> anyhow::Result<f64> {
        while self.seconds.len() < self.ranks {
            let line = self.program.read_line(DONE_TIMEOUT, interrupt)?;
            self.record_time(&line)?;
        }
        Ok(self.seconds.iter().copied().fold(0.0, f64::max))
    }
}

impl Drop for MpiRun {
    /// After SIGTERM, a launcher ends its ranks itself.
    fn drop(&mut self) {
        self.program.terminate(STOP_TIMEOUT);
    }
}
