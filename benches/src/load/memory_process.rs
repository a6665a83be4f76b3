//! A process with much memory. The bench starts its own executable again for it. The main function of the bench calls
//! [`run_as_memory_process`] first.

use std::env;
use std::hint::black_box;
use std::io::{Write, stdout};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::prctl::{set_pdeathsig, set_thp_disable};
use nix::sys::signal::Signal;

use crate::programs::interrupt::Interrupt;
use crate::programs::program::Program;

const ARGUMENT: &str = "--memory-process";
const PAGE: usize = 4096;
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// So much memory is left to other programs, in bytes.
const RESERVE_BYTES: u64 = 2 << 30;

/// Starts a process that has this number of bytes in pages of 4 KiB, and waits until it has them.
///
/// # Errors
/// If the machine has less memory available than that and 2 GiB, the process can't be started, or the bench was interrupted.
pub fn start_memory_process(bytes: u64, interrupt: &Interrupt) -> anyhow::Result<Program> {
    let available = available_bytes()?;
    if available < bytes + RESERVE_BYTES {
        bail!(
            "a process of {bytes} bytes does not fit: {available} bytes are available, and {RESERVE_BYTES} must be left to others"
        );
    }
    let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
    command.args([ARGUMENT, &bytes.to_string()]);
    Program::start_until_ready("a process with much memory", &mut command, READY_TIMEOUT, interrupt)
}

/// `MemAvailable` of proc_meminfo(5).
fn available_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("can't read /proc/meminfo")?;
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let kib: u64 = value.context("/proc/meminfo has no MemAvailable")?.trim().parse()?;
    Ok(kib * 1024)
}

/// Runs this program as a process with much memory and does not return, if the arguments say that it is one. Otherwise
/// returns at once.
///
/// # Errors
/// If an argument is wrong.
pub fn run_as_memory_process() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    // The kernel reads a huge page as fast as a small one.
    set_thp_disable(true).context("can't turn huge pages off")?;
    let bytes: usize = arguments.next().context("the number of bytes is missing")?.parse()?;
    let mut data = vec![0_u8; bytes];
    data.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    black_box(&data);
    writeln!(stdout(), "ready").context("can't write to stdout")?;
    loop {
        thread::park();
    }
}
