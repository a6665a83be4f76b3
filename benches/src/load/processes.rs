//! Processes with many threads that sleep, spin, or wake at an interval: the load of a bench.
//!
//! A bench starts its own executable again for each load process, so no other program has to be built. The main
//! function of the bench calls [`run_as_load_process`] first.

use std::env;
use std::fs::File;
use std::hint::spin_loop;
use std::io::{Write, stdout};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::dup2_stdout;

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const ARGUMENT: &str = "--load-process";
/// The stack size of a thread. With the default size, thousands of stacks may need more memory than a small machine
/// has.
const STACK_BYTES: usize = 64 * 1024;
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// What the threads of a load process do. A load process is a process that gives a measured program something to
/// handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Each thread sleeps for ever.
    Sleeping,
    /// Each thread spins for ever, at the lowest priority, so that the bench gets CPU time too.
    Spinning,
    /// Two threads of each process spin for ever, at the lowest priority. The others sleep.
    TwoSpinning,
    /// Each thread wakes up at a constant interval and works for 20 µs. The variant contains the interval in
    /// milliseconds. The threads wake up at different times.
    Waking(u32),
}

/// How long a thread works after it woke: long enough to show in its run time.
const WORK_TIME: Duration = Duration::from_micros(20);

impl Activity {
    fn argument(self) -> String {
        match self {
            Activity::Sleeping => "sleeping".to_owned(),
            Activity::Spinning => "spinning".to_owned(),
            Activity::TwoSpinning => "two-spinning".to_owned(),
            Activity::Waking(interval_ms) => interval_ms.to_string(),
        }
    }

    /// Returns what the thread with the index `index` of a process does.
    fn of_thread(self, index: usize) -> Self {
        match (self, index) {
            (Activity::TwoSpinning, 0..2) => Activity::Spinning,
            (Activity::TwoSpinning, _) => Activity::Sleeping,
            _ => self,
        }
    }

    /// Parses an activity from the argument of a load process. The argument is the name of the activity, or the
    /// interval in ms for [`Activity::Waking`]. Fails for any other argument, and if there is none.
    fn from_argument(argument: Option<&str>) -> anyhow::Result<Self> {
        match argument {
            Some("sleeping") => Ok(Activity::Sleeping),
            Some("spinning") => Ok(Activity::Spinning),
            Some("two-spinning") => Ok(Activity::TwoSpinning),
            Some(interval_ms) if interval_ms.parse::<u32>().is_ok_and(|interval_ms| interval_ms > 0) => {
                Ok(Activity::Waking(interval_ms.parse()?))
            }
            other => {
                bail!("{ARGUMENT} takes sleeping, spinning, two-spinning or milliseconds, not {other:?}")
            }
        }
    }
}

/// A group of load processes, which give a measured program something to handle. They are killed when this value is
/// dropped or the bench ends.
#[derive(Debug)]
pub struct LoadProcesses(Vec<Program>);

impl LoadProcesses {
    /// Starts `processes` load processes with `threads` threads each, and waits until all threads run. `activity` says
    /// what the threads do.
    ///
    /// # Errors
    /// If a process or thread can't be started, or if the bench was interrupted.
    pub fn start(
        processes: usize,
        threads: usize,
        activity: Activity,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let executable = env::current_exe().context("can't read the path of this program")?;
        let mut started = Vec::new();
        for _ in 0..processes {
            let mut command = Command::new(&executable);
            command.args([ARGUMENT, &activity.argument(), &threads.to_string()]);
            let program =
                Program::start_until_ready("a load process", &mut command, READY_TIMEOUT, interrupt);
            started.push(program.context(
                "a load process did not start: ulimit -u or the limit of the pids cgroup may be too low",
            )?);
        }
        Ok(Self(started))
    }

    /// Returns the process ids of the load processes.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(Program::pid).collect()
    }
}

/// Runs this process as a load process, whose threads sleep, spin or wake up at an interval, and does not return, if
/// the arguments of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or if a thread can't be started.
pub fn run_as_load_process() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    let activity = Activity::from_argument(arguments.next().as_deref())?;
    let threads: usize = arguments.next().context("the number of threads is missing")?.parse()?;
    if matches!(activity, Activity::Spinning | Activity::TwoSpinning) {
        rustix::process::nice(19).context("can't lower the priority")?;
    }
    for index in 1..threads {
        let phase = phase(index, threads);
        let activity = activity.of_thread(index);
        let run = move || run_activity(activity, phase);
        thread::Builder::new().stack_size(STACK_BYTES).spawn(run).context("can't start a thread")?;
    }
    writeln!(stdout(), "ready").context("can't write to stdout")?;
    // This ends the thread of the bench that reads the output. With a thread for each of thousands of processes, each
    // reading of the CPU time of their parent would take milliseconds.
    dup2_stdout(File::open("/dev/null").context("can't open /dev/null")?).context("can't close stdout")?;
    run_activity(activity.of_thread(0), phase(0, threads))
}

/// Returns when a thread wakes, as a share of the interval. The threads of a process are spread evenly, and the
/// processes wake at different times.
#[expect(clippy::cast_precision_loss, reason = "thousands of threads, and a process id")]
fn phase(index: usize, threads: usize) -> f64 {
    let process_offset = f64::from(std::process::id()) * 0.618_033_988_75;
    (index as f64 / threads as f64 + process_offset).fract()
}

/// Runs `activity` in this thread until the process is killed. For [`Activity::Waking`], `phase` says when the thread
/// wakes up in each interval, as a share of the interval from 0 to 1. Other activities do not use it.
fn run_activity(activity: Activity, phase: f64) -> ! {
    let begin = Instant::now();
    let mut round = 0;
    loop {
        match activity {
            Activity::Sleeping | Activity::TwoSpinning => thread::park(),
            Activity::Spinning => spin_loop(),
            Activity::Waking(interval_ms) => {
                let interval = Duration::from_millis(interval_ms.into());
                let next = begin + interval * round + interval.mul_f64(phase);
                thread::sleep(next.saturating_duration_since(Instant::now()));
                let work_end = Instant::now() + WORK_TIME;
                while Instant::now() < work_end {
                    spin_loop();
                }
                round += 1;
            }
        }
    }
}
