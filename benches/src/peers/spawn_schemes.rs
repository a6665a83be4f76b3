//! The other ways to start a group of processes, in a program of C that measures itself.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use pjw_core::cpuset::CpuSet;

use crate::load::compiled::{compile, library_flags};
use crate::measure::start_cost::StartCost;

const SOURCE: &str = include_str!("spawn_schemes.c");

/// The program.
#[derive(Debug)]
pub struct SpawnSchemes(PathBuf);

/// The process that starts the group.
#[derive(Debug, Clone, Copy)]
pub struct Parent<'a> {
    /// The memory that it has written before, in MB.
    pub ballast_mb: usize,
    /// Its environment, which the group inherits.
    pub environment: &'a [(String, String)],
    /// The PUs of the group: each process has one of them, in turns.
    pub pus: &'a CpuSet,
}

impl SpawnSchemes {
    /// Compiles the program into a directory.
    ///
    /// # Errors
    /// As [`compile`].
    pub fn compile(directory: &Path) -> anyhow::Result<Self> {
        compile(directory, "spawn_schemes", SOURCE, &["-pthread"]).map(Self)
    }

    /// Compiles the program with libpjw_spawn.so. Started with one argument, it calls `pspawn_fork_here`.
    ///
    /// # Errors
    /// As [`compile`], and if the library can't be linked.
    pub fn compile_late(directory: &Path) -> anyhow::Result<Self> {
        let library = library_flags(directory, "pjw_spawn", "pjw-spawn-c")?;
        let mut flags = vec!["-pthread", "-DWITH_FORK_HERE"];
        flags.extend(library.iter().map(String::as_str));
        compile(directory, "spawn_schemes_late", SOURCE, &flags).map(Self)
    }

    /// Returns the path of the program.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.0
    }

    /// Starts `count` processes of `program` by a scheme, and waits for all. `scheme` is a name that the program knows.
    ///
    /// # Errors
    /// If the program can't be started, or one process of the group has failed.
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
