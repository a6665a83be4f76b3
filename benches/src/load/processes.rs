//! Processes with many threads that sleep, spin or wake at an interval: the load that a bench measures.
//!
//! The bench program starts itself again for each of them, so nothing else has to be built. Its main function calls
//! [`attend`] first.

use std::env;
use std::hint::spin_loop;
use std::io::{Write, stdout};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

use crate::{programs::interrupt::Interrupt, programs::program::Program};

const ARGUMENT: &str = "--load-process";
/// Enough for a thread that does nothing; thousands of the usual size may be more than a small machine has.
const STACK_BYTES: usize = 64 * 1024;
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// What the threads of a load process do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Sleep for ever.
    Sleeping,
    /// Spin for ever, at the lowest priority: the bench itself needs a turn too.
    Spinning,
    /// Wake once in so many milliseconds and work for a moment, each thread at a time of its own.
    Waking(u32),
}

/// So long a thread works that woke: enough to be seen to have run.
const WORK_TIME: Duration = Duration::from_micros(20);

impl Activity {
    fn argument(self) -> String {
        match self {
            Activity::Sleeping => "sleeping".to_owned(),
            Activity::Spinning => "spinning".to_owned(),
            Activity::Waking(interval_ms) => interval_ms.to_string(),
        }
    }

    fn from_argument(argument: Option<&str>) -> anyhow::Result<Self> {
        match argument {
            Some("sleeping") => Ok(Activity::Sleeping),
            Some("spinning") => Ok(Activity::Spinning),
            Some(interval_ms) if interval_ms.parse::<u32>().is_ok_and(|interval_ms| interval_ms > 0) => {
                Ok(Activity::Waking(interval_ms.parse()?))
            }
            other => bail!("{ARGUMENT} takes sleeping, spinning or milliseconds, not {other:?}"),
        }
    }
}

/// Processes with threads. They end when this value goes away, or this program.
#[derive(Debug)]
pub struct LoadProcesses(Vec<Program>);

impl LoadProcesses {
    /// Starts so many processes with so many threads each, and waits until all of them are there.
    ///
    /// # Errors
    /// If there can't be so many, or the bench was asked to end.
    pub fn start(
        processes: usize,
        threads: usize,
        activity: Activity,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let executable = env::current_exe().context("where is this program?")?;
        let mut started = Vec::new();
        for _ in 0..processes {
            let mut command = Command::new(&executable);
            command.args([ARGUMENT, &activity.argument(), &threads.to_string()]);
            let program =
                Program::start_until_ready("a load process", &mut command, READY_TIMEOUT, interrupt);
            started.push(program.context("see ulimit -u and the pids cgroup's limit")?);
        }
        Ok(Self(started))
    }

    /// Its processes.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(Program::pid).collect()
    }
}

/// Runs this program as a load process and does not return, if its arguments say so.
///
/// # Errors
/// If the threads can't be started.
pub fn run_as_load_process() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    let activity = Activity::from_argument(arguments.next().as_deref())?;
    let threads: usize = arguments.next().context("how many threads?")?.parse()?;
    if activity == Activity::Spinning {
        rustix::process::nice(19).context("can't lower the priority")?;
    }
    for index in 1..threads {
        let phase = phase(index, threads);
        let run = move || run_activity(activity, phase);
        thread::Builder::new().stack_size(STACK_BYTES).spawn(run).context("no more threads")?;
    }
    writeln!(stdout(), "ready").context("nobody listens")?;
    run_activity(activity, phase(0, threads))
}

/// When in a round a thread has its turn, as a share of the round: evenly, and not at the same time in each process.
#[expect(clippy::cast_precision_loss, reason = "thousands of threads, and a process id")]
fn phase(index: usize, threads: usize) -> f64 {
    let apart = f64::from(std::process::id()) * 0.618_033_988_75;
    (index as f64 / threads as f64 + apart).fract()
}

fn run_activity(activity: Activity, phase: f64) -> ! {
    let begin = Instant::now();
    let mut round = 0;
    loop {
        match activity {
            Activity::Sleeping => thread::park(),
            Activity::Spinning => spin_loop(),
            Activity::Waking(interval_ms) => {
                let interval = Duration::from_millis(interval_ms.into());
                let next = begin + interval * round + interval.mul_f64(phase);
                thread::sleep(next.saturating_duration_since(Instant::now()));
                let work = Instant::now() + WORK_TIME;
                while Instant::now() < work {
                    spin_loop();
                }
                round += 1;
            }
        }
    }
}
