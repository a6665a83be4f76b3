//! The owner of a core, and the program that borrows it, for the bench `wakeup`.
//!
//! The owner sleeps, and measures itself what follows its wake-up: how late it ran, or how long the borrower kept the
//! core. The borrower has threads that spin. A bench starts its own executable again for both. The main function of the
//! bench calls [`run_as_owner_or_borrower`] first.

use std::env;
use std::fs;
use std::hint::spin_loop;
use std::io::{Write, stdout};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sys::prctl::{set_pdeathsig, set_timerslack};
use nix::sys::signal::Signal;
use nix::unistd::gettid;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const OWNER: &str = "--owner";
const BORROWER: &str = "--borrower";
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an owner may need for all its measurements.
const RESULT_TIMEOUT: Duration = Duration::from_secs(120);
/// An owner begins no further measurement after this time. On a busy machine its core is lent for short times only, so
/// the measurements could take very long.
const MAX_TIME: Duration = Duration::from_secs(40);
/// The time between two checks whether the core is lent.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How long the owner works after a wake-up: so short that its core stays lent.
const WORK_TIME: Duration = Duration::from_micros(20);
/// The shortest and the longest sleep of an owner that measures how late it runs, in µs.
const SHORT_SLEEP_US: (u64, u64) = (1_000, 5_000);
/// How long an owner works after a wake-up that uses most of its core: less than the daemon needs to take the core
/// back.
const LONG_WORK_TIME: Duration = Duration::from_micros(1_200);
/// The shortest and the longest sleep of an owner that works for [`LONG_WORK_TIME`], in µs. Such an owner runs for
/// two thirds of the time. The kernel favours a thread that uses less than its share of a core. So a wake-up beside
/// another program is late only if the owner runs for more than half of the time.
const BUSY_SLEEP_US: (u64, u64) = (400, 800);
/// The shortest and the longest sleep of an owner that measures how long the borrower keeps the core, in µs: longer
/// than the daemon needs to see that the owner is idle.
const LONG_SLEEP_US: (u64, u64) = (30_000, 60_000);

/// What the owner of a lent core measures. The owner is a process that sleeps again and again, so pjwd lends its core
/// to another process, the borrower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measurement {
    /// The time from the end of a sleep of the owner until the owner runs. If there is a borrower, only sleeps that end
    /// while the core is lent count.
    Lateness,
    /// The time from the end of a sleep of the owner until the owner runs, while the owner uses most of its core. If
    /// there is a borrower, only sleeps that end while the core is lent count.
    BusyLateness,
    /// The time from the end of a sleep of the owner until the core is returned: no thread of the borrower is on the
    /// core, and none may run there.
    Return,
}

impl Measurement {
    const ALL: [Self; 3] = [Self::Lateness, Self::BusyLateness, Self::Return];

    fn argument(self) -> &'static str {
        match self {
            Self::Lateness => "lateness",
            Self::BusyLateness => "busy-lateness",
            Self::Return => "return",
        }
    }
}

/// Starts an owner: a process that sleeps again and again, and measures what happens when it wakes up. Returns the
/// measured times, in µs: at most `count`. `launcher` is a command that starts another command, such as `pjwctl run`,
/// and starts the owner. `borrower` is the process id of the process that borrows the core of the owner. `None` if
/// there is no such process.
///
/// # Errors
/// If the owner can't be started. If its core is not lent to the borrower within 60 s, or not returned within 60 s.
/// Also if `interrupt` was set.
pub fn measure_owner(
    mut launcher: Command,
    measurement: Measurement,
    count: usize,
    borrower: Option<u32>,
    interrupt: &StopSignal,
) -> anyhow::Result<Vec<f64>> {
    launcher.arg(env::current_exe().context("can't read the path of this program")?);
    launcher.args([OWNER, measurement.argument(), &count.to_string()]);
    launcher.args(borrower.map(|pid| pid.to_string()));
    let mut owner = Program::start_until_ready("the owner", &mut launcher, READY_TIMEOUT, interrupt)?;
    let line = owner.read_line(RESULT_TIMEOUT, interrupt)?;
    Ok(serde_json::from_str(&line)?)
}

/// Starts a borrower: a process that borrows cores of other jobs. Its `threads` threads spin. Waits until all threads
/// run. `launcher` is a command that starts another command, such as `pjwctl run`, and starts the borrower.
///
/// # Errors
/// If the borrower can't be started, or if `interrupt` was set.
pub fn start_borrower(
    mut launcher: Command,
    threads: usize,
    interrupt: &StopSignal,
) -> anyhow::Result<Program> {
    launcher.arg(env::current_exe().context("can't read the path of this program")?);
    launcher.args([BORROWER, &threads.to_string()]);
    Program::start_until_ready("the borrower", &mut launcher, READY_TIMEOUT, interrupt)
}

/// Runs this process as the owner of a lent core, or as the process that borrows the core, and does not return, if the
/// arguments of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or if the measurement fails.
pub fn run_as_owner_or_borrower() -> anyhow::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [BORROWER, threads] => {
            set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
            run_borrower(threads.parse()?)
        }
        [OWNER, measurement, count, ref borrower @ ..] => {
            set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
            // The kernel delays the end of a sleep by up to 50 µs unless a thread asks for less.
            set_timerslack(1).context("can't set the timer slack")?;
            let borrower_threads =
                borrower.first().map(|pid| threads_of(pid)).transpose()?.unwrap_or_default();
            print_line("ready")?;
            let measurement =
                Measurement::ALL.into_iter().find(|known| known.argument() == measurement).with_context(
                    || format!("{OWNER} takes lateness, busy-lateness or return, not {measurement:?}"),
                )?;
            let mut owner = Owner { borrower_threads, random: Random(0x9E37_79B9_7F4A_7C15) };
            let times = owner.measure(measurement, count.parse()?)?;
            print_line(&serde_json::to_string(&times)?)?;
            std::process::exit(0)
        }
        _ => Ok(()),
    }
}

fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("can't write to standard output")
}

/// Runs as the borrower: `threads` threads that spin until the process is killed. Prints `ready` when they run.
fn run_borrower(threads: usize) -> ! {
    let spin = || {
        loop {
            spin_loop();
        }
    };
    for _ in 1..threads {
        thread::spawn(spin);
    }
    let _ = print_line("ready");
    spin()
}

/// Returns the threads of the process `pid`, which is the borrower.
fn threads_of(pid: &str) -> anyhow::Result<Vec<BorrowerThread>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).context("the borrower has ended")?;
    let tids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let thread = |tid: u32| BorrowerThread { tid: Tid(tid), stat: format!("/proc/{pid}/task/{tid}/stat") };
    Ok(tids.map(thread).collect())
}

/// A thread of the borrower, the program that uses the core of the owner while the owner sleeps.
#[derive(Debug)]
struct BorrowerThread {
    tid: Tid,
    /// The path of the file `/proc/PID/task/TID/stat` of the thread.
    stat: String,
}

impl BorrowerThread {
    fn may_run_on(&self, cpus: &CpuSet) -> anyhow::Result<bool> {
        let mask = affinity::get_mask(self.tid).context("the borrower has ended")?;
        Ok(mask.intersects(cpus))
    }

    /// Whether the thread runs on a PU in `cpus`, or waits in the queue of this PU (fields 3 and 39 of
    /// `/proc/PID/stat`). A thread that sleeps is on no PU: the kernel shows the one on which it ran last, and wakes it
    /// up on a PU of its new mask.
    fn is_on(&self, cpus: &CpuSet) -> anyhow::Result<bool> {
        let stat = fs::read_to_string(&self.stat).context("the borrower has ended")?;
        let after_name = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let mut fields = after_name.split_ascii_whitespace();
        let is_runnable = fields.next() == Some("R");
        let pu = fields.nth(35).and_then(|field| field.parse().ok());
        Ok(is_runnable && cpus.contains(Pu(pu.context("the kernel shows no PU of a thread")?)))
    }
}

/// The owner: a process whose core is lent to the borrower while it sleeps.
#[derive(Debug)]
struct Owner {
    /// The threads of the borrower. Empty if there is no borrower.
    borrower_threads: Vec<BorrowerThread>,
    random: Random,
}

impl Owner {
    /// Repeats the measurement `measurement`, and returns the times in µs: at most `count`. Returns fewer times if
    /// [`MAX_TIME`] has passed. A measurement in which the core was not lent gives no time.
    fn measure(&mut self, measurement: Measurement, count: usize) -> anyhow::Result<Vec<f64>> {
        let (mut times, begin) = (Vec::new(), Instant::now());
        while times.len() < count && begin.elapsed() < MAX_TIME {
            let time = match measurement {
                Measurement::Lateness => self.lateness(SHORT_SLEEP_US, WORK_TIME)?,
                Measurement::BusyLateness => self.lateness(BUSY_SLEEP_US, LONG_WORK_TIME)?,
                Measurement::Return => self.time_until_return()?,
            };
            times.extend(time.map(|time| time.as_secs_f64() * 1e6));
        }
        Ok(times)
    }

    /// Sleeps for a random time in the range `sleep_us` (in µs), and then works for `work_time`. Returns how late
    /// this thread ran after the end of the sleep. `None` if there is a borrower, but the core was not lent to it at
    /// the end of the sleep.
    fn lateness(&mut self, sleep_us: (u64, u64), work_time: Duration) -> anyhow::Result<Option<Duration>> {
        self.wait_until_lent()?;
        let end = self.sleep(sleep_us);
        let late = end.elapsed();
        let is_lent = self.is_lent()?;
        while end.elapsed() < late + work_time {
            spin_loop();
        }
        Ok((self.borrower_threads.is_empty() || is_lent).then_some(late))
    }

    /// Returns the time from the end of a sleep of the owner until no thread of the borrower is on the core. `None` if
    /// the core was not lent at the end of the sleep.
    ///
    /// # Errors
    /// If the borrower still has the core after [`READY_TIMEOUT`].
    fn time_until_return(&mut self) -> anyhow::Result<Option<Duration>> {
        self.wait_until_lent()?;
        let core = own_cpus()?;
        let end = self.sleep(LONG_SLEEP_US);
        if !self.is_lent()? {
            return Ok(None);
        }
        // The checks are also the owner's work, which makes pjwd take the core back.
        for thread in &self.borrower_threads {
            while thread.may_run_on(&core)? {
                ensure!(end.elapsed() < READY_TIMEOUT, "the borrower kept the core");
            }
        }
        let mut time = end.elapsed();
        for thread in &self.borrower_threads {
            // To read where a thread is takes longer than to read its mask. So the time ends before the reading that
            // finds the thread elsewhere.
            while thread.is_on(&core)? {
                ensure!(end.elapsed() < READY_TIMEOUT, "the borrower kept the core");
                time = end.elapsed();
            }
        }
        Ok(Some(time))
    }

    /// Sleeps for a random time, and returns the end of the sleep.
    fn sleep(&mut self, (least, most): (u64, u64)) -> Instant {
        let time = Duration::from_micros(self.random.between(least, most));
        let end = Instant::now() + time;
        thread::sleep(time);
        end
    }

    /// Returns whether the borrower may run on a PU of this thread.
    fn is_lent(&self) -> anyhow::Result<bool> {
        self.borrower_threads.first().map_or(Ok(false), |thread| thread.may_run_on(&own_cpus()?))
    }

    /// Waits until the core is lent to the borrower. Returns at once if there is no borrower. Fails after
    /// [`READY_TIMEOUT`].
    fn wait_until_lent(&self) -> anyhow::Result<()> {
        let begin = Instant::now();
        while !self.borrower_threads.is_empty() && !self.is_lent()? {
            ensure!(begin.elapsed() < READY_TIMEOUT, "the core is not lent");
            thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }
}

fn own_cpus() -> anyhow::Result<CpuSet> {
    affinity::get_mask(Tid(gettid().as_raw().unsigned_abs())).context("can't read the own mask")
}

/// Random numbers, the same in every run (xorshift).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn between(&mut self, least: u64, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        least + (self.0 >> 11) % (most - least + 1)
    }
}
