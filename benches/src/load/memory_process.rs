//! Processes with much memory. The bench starts its own executable again for them. The main function of the bench calls
//! [`run_as_memory_process`] first.

use std::env;
use std::hint::black_box;
use std::io::{Write, stdout};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::prctl::{set_pdeathsig, set_thp_disable};
use nix::sys::signal::Signal;
use pjw_spawn::farm::Farm;

use crate::programs::interrupt::StopSignal;
use crate::programs::program::Program;

const ARGUMENT: &str = "--memory-process";
const PAGE_BYTES: usize = 4096;
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// The available memory that the processes must leave to other programs, in bytes.
const RESERVE_BYTES: u64 = 2 << 30;
/// The largest number of processes that share memory.
const MAX_PROCESSES: u64 = 64;

/// A group of processes with much resident memory. They are killed when this value is dropped or the bench ends.
#[derive(Debug)]
pub struct MemoryProcesses {
    _first: Program,
    pids: Vec<u32>,
}

impl MemoryProcesses {
    /// Starts processes whose resident set sizes (RSS) have the sum `bytes`, in pages of 4 KiB. Waits until all pages
    /// are resident.
    ///
    /// If `bytes` is at most the available memory minus 2 GiB, starts one process. Otherwise starts several: the others
    /// are forks of the first one, and all share its `bytes / processes` bytes. A program that reads the page tables of
    /// all processes visits a shared page once for each process.
    ///
    /// # Errors
    /// If more than 64 processes would be needed, if a process can't be started, or if the bench was interrupted.
    pub fn start(bytes: u64, interrupt: &StopSignal) -> anyhow::Result<Self> {
        let available = available_bytes()?;
        let usable = available.saturating_sub(RESERVE_BYTES);
        let processes = bytes.div_ceil(usable.max(1)).max(1);
        ensure!(
            processes <= MAX_PROCESSES,
            "{bytes} bytes do not fit, also if {MAX_PROCESSES} processes share them: {available} bytes are available, and \
             {RESERVE_BYTES} must be left to others"
        );
        let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
        command.args([ARGUMENT, &(bytes / processes).to_string(), &processes.to_string()]);
        let name = "a process with much memory";
        let mut first = Program::start_until_ready(name, &mut command, READY_TIMEOUT, interrupt)?;
        let line = first.read_line(READY_TIMEOUT, interrupt)?;
        let pids: Result<Vec<u32>, _> = line.split_whitespace().map(str::parse).collect();
        let pids = pids.with_context(|| format!("{name} printed {line:?} instead of process ids"))?;
        Ok(Self { _first: first, pids })
    }

    /// Returns the process ids of the processes of this group.
    #[must_use]
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }
}

/// Returns how many bytes of memory programs can still get without swapping: `MemAvailable` of proc_meminfo(5).
///
/// # Errors
/// If /proc/meminfo can't be read.
pub fn available_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("can't read /proc/meminfo")?;
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let kib: u64 = value.context("/proc/meminfo has no MemAvailable")?.trim().parse()?;
    Ok(kib * 1024)
}

/// Runs this process as a process with much resident memory and does not return, if the arguments of this program
/// request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or a process can't be forked.
pub fn run_as_memory_process() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    // The kernel counts a huge page as fast as a small one, so with huge pages the memory would be read too fast.
    set_thp_disable(true).context("can't turn huge pages off")?;
    let bytes: usize = arguments.next().context("the number of bytes is missing")?.parse()?;
    let processes: u32 = arguments.next().context("the number of processes is missing")?.parse()?;
    let mut data = vec![0_u8; bytes];
    data.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
    black_box(&data);
    let mut pids = vec![std::process::id()];
    // The other processes are the workers of a farm: the kernel ends them with this process.
    let others = processes.saturating_sub(1);
    let farm = (others > 0).then(|| Farm::new(others).start(others.into(), |_, _| sleep_for_ever()));
    let farm = farm.transpose().context("can't fork processes that share the memory")?;
    pids.extend(farm.iter().flat_map(|farm| farm.worker_pids()).map(|pid| pid.0));
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    writeln!(stdout(), "ready\n{}", pids.join(" ")).context("can't write to stdout")?;
    sleep_for_ever()
}

fn sleep_for_ever<T>() -> T {
    loop {
        thread::park();
    }
}
