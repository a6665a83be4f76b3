//! Bare vfork(2) and exec, one process at a time, in a program of C that measures the time to the process's first act.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::Context;
use pjw_core::cpuset::CpuSet;

use crate::load::compiled::compile;

const SOURCE: &str = include_str!("vfork_delay.c");

/// A running C program that starts processes by vfork(2) and exec, one at a time, and measures how long the start
/// takes. Dropping this value ends the program.
#[derive(Debug)]
pub struct VforkDelay {
    requests: ChildStdin,
    delays: ChildStdout,
    // Dropped after the pipes, so that the program ends before it is waited for.
    _program: WaitOnDrop,
}

/// The process of the C program. The drop waits for its end, so its standard input must be closed before.
#[derive(Debug)]
struct WaitOnDrop(Child);

impl VforkDelay {
    /// Compiles the C program in `directory` and starts it. `started` is the path of the program that it will start.
    /// This program must print a record that contains the time of its first instruction. `pus` contains the PUs
    /// (logical CPUs) to which the started processes can be bound.
    ///
    /// # Errors
    /// The errors of [`compile`]. Also if the C program can't be started.
    pub fn start(directory: &Path, pus: &CpuSet, started: &Path) -> anyhow::Result<Self> {
        let program = compile(directory, "vfork_delay", SOURCE, &[])?;
        let pus: Vec<String> = pus.iter().map(|pu| pu.0.to_string()).collect();
        let mut command = Command::new(program);
        command.arg(pus.join(",")).arg(started).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("can't start the program of vfork")?;
        let requests = child.stdin.take().context("the program of vfork has no input")?;
        let delays = child.stdout.take().context("the program of vfork has no output")?;
        Ok(Self { requests, delays, _program: WaitOnDrop(child) })
    }

    /// Starts one process by vfork(2) and exec. Returns the time from just before vfork until the program of the
    /// process runs, in µs. If `with_mask` is true, the process binds itself to one PU (logical CPU) before exec, in
    /// each call to the next PU. If `with_mask` is false, the process keeps its affinity mask.
    ///
    /// # Errors
    /// If the process can't be started, or fails.
    #[expect(clippy::cast_precision_loss, reason = "a time of some seconds")]
    pub fn measure(&mut self, with_mask: bool) -> anyhow::Result<f64> {
        self.requests
            .write_all(if with_mask { b"m" } else { b"-" })
            .context("the program of vfork has ended")?;
        let mut nanoseconds = [0; 8];
        self.delays.read_exact(&mut nanoseconds).context("a start by vfork has failed")?;
        Ok(u64::from_ne_bytes(nanoseconds) as f64 / 1000.0)
    }
}

impl Drop for WaitOnDrop {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}
