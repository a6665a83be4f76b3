//! Other ways to start a group of processes than pjw-spawn, in a C program that measures itself.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use pjw_core::cpuset::CpuSet;

use crate::load::compiled::{compile, library_flags};
use crate::measure::start_cost::StartCost;

const SOURCE: &str = include_str!("spawn_schemes.c");

/// A compiled C program that starts a group of processes by one of several schemes, such as fork or posix_spawn(3), and
/// measures the cost. Benches compare the crate pjw-spawn with these schemes.
#[derive(Debug)]
pub struct SpawnSchemes(PathBuf);

/// The properties of the process that starts a group of processes in a measurement.
#[derive(Debug, Clone, Copy)]
pub struct Parent<'a> {
    /// The memory that this process has written before it starts the group, in MB.
    pub ballast_mb: usize,
    /// The environment variables of this process, with their values. The processes of the group inherit them.
    pub environment: &'a [(String, String)],
    /// The PUs (logical CPUs) on which the processes of the group run. Each process is bound to one PU, in turn.
    pub pus: &'a CpuSet,
}

impl SpawnSchemes {
    /// Compiles in `directory` the C program that starts groups of processes by several schemes.
    ///
    /// # Errors
    /// The errors of [`compile`].
    pub fn compile(directory: &Path) -> anyhow::Result<Self> {
        compile(directory, "spawn_schemes", SOURCE, &["-pthread"]).map(Self)
    }

    /// Compiles the same C program as [`SpawnSchemes::compile`] in `directory`, linked with libpjw_spawn.so. If this
    /// program is started with one argument, it calls `pspawn_fork_here`: it becomes a process from which further
    /// processes are forked.
    ///
    /// # Errors
    /// The errors of [`compile`]. Also if the library can't be linked.
    pub fn compile_late(directory: &Path) -> anyhow::Result<Self> {
        let library = library_flags(directory, "pjw_spawn", "pjw-spawn-c")?;
        let mut flags = vec!["-pthread", "-DWITH_FORK_HERE"];
        flags.extend(library.iter().map(String::as_str));
        compile(directory, "spawn_schemes_late", SOURCE, &flags).map(Self)
    }

    /// Returns the path of the compiled program.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.0
    }

    /// Starts `count` processes of `program` by the scheme `scheme`, and waits for their end. `scheme` is one of the
    /// names that the C program knows, such as `vfork`. Returns the cost of each process.
    ///
    /// # Errors
    /// If the C program can't be started, or if a process of the group fails.
    pub fn run(
        &self,
        scheme: &str,
        count: u32,
        parent: Parent<'_>,
        program: &Path,
    ) -> anyhow::Result<StartCost> {
        let pus: Vec<String> = parent.pus.iter().map(|pu| pu.0.to_string()).collect();
        let mut command = Command::new(&self.0);
        command.args([scheme, &count.to_string(), &parent.ballast_mb.to_string(), &pus.join(",")]);
        command.arg(program).env_clear().envs(parent.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().context("can't start the program of the peers")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<f64>);
        let (Some(Ok(cpu_us)), Some(Ok(wall_us)), true) =
            (numbers.next(), numbers.next(), output.status.success())
        else {
            bail!("{scheme} did not start {count} processes: {}", output.status);
        };
        Ok(StartCost::of_group(count, cpu_us, wall_us))
    }
}
