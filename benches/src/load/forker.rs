//! A process that starts workers one after the other, and measures the time from the fork of a worker until the
//! worker has the right mask.
//!
//! A second thread of the process receives the fork event and then reads the mask of the worker every 20 µs. The
//! first thread can't do this, because it shares its PU with a worker that inherits its pin. The worker is sleep(1),
//! which takes no CPU time from the program that sets the mask. The time is measured by the monotonic clock, from
//! just before the fork. So it includes the fork and exec themselves; the case [`WorkerStart::RightMask`] measures
//! only these. A bench starts its own executable again for this process. The main function of the bench calls
//! [`run_as_forker`] first.

use std::env;
use std::hint::spin_loop;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use std::{process, thread};

use anyhow::{Context, bail};
use nix::sys::prctl::{set_pdeathsig, set_timerslack};
use nix::sys::signal::Signal;
use nix::unistd::gettid;
use pjw_core::ids::{Pid, Tid};
use pjw_core::{cpuset::CpuSet, snapshot::ProcessEvent};
use pjw_linux::{proc::events::ProcEventSocket, sys::affinity};

use crate::measure::results::print_line;
use crate::{programs::interrupt::StopSignal, programs::program::Program};

const ARGUMENT: &str = "--forker";
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// A worker that has no right mask after this time counts as missed.
const CORRECTION_TIMEOUT: Duration = Duration::from_secs(15);
/// The time between two checks. It is the precision of the measured times.
const CHECK_INTERVAL: Duration = Duration::from_micros(20);

/// In which state the forker (a process that forks workers for a measurement) is when it forks a worker. The measured
/// time ends when the worker has the right affinity mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerStart {
    /// The forker has the right mask, and the worker inherits it. The measured time is that of fork and exec.
    RightMask,
    /// The forker is in a job of pjwd, and has just set its own mask to all PUs (logical CPUs), as launchers of MPI do.
    /// So the worker starts outside the cores of the job, until pjwd sets its mask.
    OutsideJob,
    /// The forker is in a job of pjwd. Its thread is hot (it runs most of the time), so pjwd has bound it to one PU
    /// (logical CPU). The worker inherits this mask. Its right mask is all PUs of the job.
    OnPin,
    /// The forker is in no job of pjwd. The daemon `cgrulesengd` moves the worker to a cgroup with the right mask.
    InNoJob,
}

impl WorkerStart {
    const ALL: [Self; 4] = [Self::RightMask, Self::OutsideJob, Self::OnPin, Self::InNoJob];

    fn argument(self) -> &'static str {
        match self {
            Self::RightMask => "right",
            Self::OutsideJob => "outside",
            Self::OnPin => "pinned",
            Self::InNoJob => "elsewhere",
        }
    }
}

/// The measured times of the workers of a forker (a process that forks workers for a measurement). A time begins at the
/// fork of a worker, and ends when the worker has the right affinity mask.
#[derive(Debug, Clone, Default)]
pub struct ReactionTimes {
    /// The time from the fork of each worker until it has the right mask, in milliseconds. 15,000 ms for a worker that
    /// never gets the right mask.
    pub ms: Vec<f64>,
    /// The number of workers that did not have the right mask 15 s after their fork.
    pub missed: usize,
    /// The number of workers that already had the right mask when their mask was checked for the first time.
    pub right_at_first_check: usize,
    /// The times from the fork of a worker to the system call that set its mask, in milliseconds, by the kernel's
    /// clock. They come from the program that made the system call. Empty if this program reports no times.
    pub kernel_clock_ms: Vec<f64>,
}

impl ReactionTimes {
    /// Appends the times of `others` to the times in this value, and adds up the counts.
    pub fn extend(&mut self, others: ReactionTimes) {
        self.ms.extend(others.ms);
        self.missed += others.missed;
        self.right_at_first_check += others.right_at_first_check;
        self.kernel_clock_ms.extend(others.kernel_clock_ms);
    }

    /// Adds the result of one worker. `line` is the line that the forker printed, as [`ForkerProcess::run_worker`]
    /// returns it.
    fn add_line(&mut self, line: &str) -> anyhow::Result<()> {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("missed") => {
                self.missed += 1;
                self.ms.push(CORRECTION_TIMEOUT.as_secs_f64() * 1000.0);
            }
            Some(nanoseconds) => {
                let nanoseconds: f64 =
                    nanoseconds.parse().with_context(|| format!("a forker printed {line:?}"))?;
                self.ms.push(nanoseconds / 1e6);
                self.right_at_first_check += usize::from(words.next() == Some("1"));
            }
            None => bail!("a forker printed an empty line"),
        }
        Ok(())
    }
}

/// A process that forks workers one after the other. It measures the time from the fork of each worker until the worker
/// has the right affinity mask. A worker is a sleep(1) process.
#[derive(Debug)]
pub struct Forker {
    program: Program,
    workers: usize,
}

impl Forker {
    /// Starts a forker. It forks `workers` workers one after the other, each after a pause of a varying length of at
    /// most `pause`. `worker` is the path of the program of a worker. `right_mask` is the affinity mask that each
    /// worker should get.
    ///
    /// The forker forks the first worker when its own mask is a subset of `right_mask`. With [`WorkerStart::InNoJob`],
    /// it does not wait for this.
    ///
    /// # Errors
    /// If the process can't be started.
    pub fn start(
        worker_start: WorkerStart,
        (workers, pause): (usize, Duration),
        right_mask: &CpuSet,
        worker: &Path,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
        command.args([
            ARGUMENT,
            worker_start.argument(),
            &workers.to_string(),
            &pause.as_micros().to_string(),
        ]);
        command.arg(right_mask.to_string()).arg(worker);
        let program = Program::start_until_ready("the forker", &mut command, READY_TIMEOUT, interrupt)?;
        Ok(Self { program, workers })
    }

    /// Returns the process id of the forker.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Waits until the forker has forked all workers and measured their times. Returns the measured times.
    ///
    /// # Errors
    /// If the forker fails, or if `interrupt` was set.
    pub fn wait_for_times(mut self, interrupt: &StopSignal) -> anyhow::Result<ReactionTimes> {
        let mut times = ReactionTimes::default();
        for _ in 0..self.workers {
            times.add_line(&self.program.read_line(READY_TIMEOUT + CORRECTION_TIMEOUT, interrupt)?)?;
        }
        Ok(times)
    }
}

/// Runs this process as a forker (a process that forks workers for a measurement) and does not return, if the arguments
/// of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, the kernel sends no fork events, a worker can't be started, or the process does not get the
/// affinity mask that it needs.
pub fn run_as_forker() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    set_timerslack(1).context("can't set the timer slack")?;
    let mut next = |error: &'static str| arguments.next().context(error);
    let argument = next("the kind of start is missing")?;
    let worker_start = WorkerStart::ALL
        .into_iter()
        .find(|value| value.argument() == argument)
        .context("the kind of start is unknown")?;
    let workers: u32 = next("the number of workers is missing")?.parse()?;
    let pause = Duration::from_micros(next("the pause is missing")?.parse()?);
    let right_mask: CpuSet = next("the mask is missing")?.parse()?;
    let own_tid = current_tid()?;
    let (forks, reactions) = start_observer(right_mask.clone())?;
    let forker = ForkerProcess {
        worker_start,
        right_mask,
        worker: next("the program is missing")?,
        own_tid,
        forks,
        reactions,
    };
    print_line("ready")?;
    if worker_start != WorkerStart::InNoJob {
        forker.wait_for_mask("the forker is not in its job", CpuSet::is_subset)?;
    }
    for index in 0..workers {
        // Multiples of the golden ratio are spread evenly, and are the same in each run.
        let share = (f64::from(index + 1) * 0.618_033_988_75).fract();
        forker.pause(pause.mul_f64(share));
        print_line(&forker.run_worker()?)?;
    }
    process::exit(0);
}

/// The forker: the process that forks workers for a measurement. The observer is a thread of this process that looks
/// when a worker has the right mask.
struct ForkerProcess {
    worker_start: WorkerStart,
    /// The affinity mask that each worker is to get.
    right_mask: CpuSet,
    /// The path of the program of the workers.
    worker: String,
    own_tid: Tid,
    /// Sends the time just before a fork to the observer.
    forks: Sender<Instant>,
    /// Receives the result of the observer.
    reactions: Receiver<anyhow::Result<Reaction>>,
}

/// The time from the fork of a worker until it had the right mask, and whether the first check found this mask. `None`
/// if no check found the right mask.
type Reaction = Option<(Duration, bool)>;

/// Starts the thread that measures when the workers have the mask `right_mask`. For each worker, the caller must send
/// the time just before the fork to the returned sender. The thread then sends the result for this worker to the
/// returned receiver.
fn start_observer(
    right_mask: CpuSet,
) -> anyhow::Result<(Sender<Instant>, Receiver<anyhow::Result<Reaction>>)> {
    let mut proc_events = ProcEventSocket::open()?;
    let (forks, fork_times) = channel();
    let (send_reaction, reactions) = channel();
    thread::spawn(move || {
        // The thread ends when the other thread drops the sender of the fork times.
        fork_times
            .iter()
            .try_for_each(|begin| send_reaction.send(observe_worker(&mut proc_events, &right_mask, begin)))
    });
    Ok((forks, reactions))
}

/// Waits until the next worker that this process forks has the mask `right_mask`. Returns the time since `begin`, and
/// whether the first check of the mask found it. Checks the mask each [`CHECK_INTERVAL`], from the fork event of the
/// worker on. `None` if the worker does not have the mask within [`CORRECTION_TIMEOUT`].
///
/// # Errors
/// If the worker has ended.
fn observe_worker(
    proc_events: &mut ProcEventSocket,
    right_mask: &CpuSet,
    begin: Instant,
) -> anyhow::Result<Reaction> {
    let own_pid = Pid(process::id());
    let mut events = Vec::new();
    let mut worker = None;
    let mut checks = 0_u32;
    while begin.elapsed() < CORRECTION_TIMEOUT {
        if worker.is_none() {
            proc_events.drain_events(&mut events);
            worker = events.drain(..).find_map(|event| match event {
                ProcessEvent::Fork { parent, child, .. } if parent == own_pid => Some(Tid(child.0)),
                _ => None,
            });
        }
        if let Some(tid) = worker {
            let mask = affinity::get_mask(tid).context("the worker has ended")?;
            checks += 1;
            if mask == *right_mask {
                return Ok(Some((begin.elapsed(), checks == 1)));
            }
        }
        thread::sleep(CHECK_INTERVAL);
    }
    Ok(None)
}

impl ForkerProcess {
    /// Waits for `time`. With [`WorkerStart::OnPin`], spins meanwhile: pjwd binds a thread to one PU only if it runs
    /// most of the time.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.wait_step(end.saturating_duration_since(Instant::now()));
        }
    }

    fn wait_step(&self, timeout: Duration) {
        if self.worker_start == WorkerStart::OnPin { spin_loop() } else { thread::sleep(timeout) }
    }

    /// Waits until `holds` returns `true` for the affinity mask of this thread and the right mask. Fails with the
    /// message `what` after [`READY_TIMEOUT`].
    fn wait_for_mask(&self, what: &str, holds: impl Fn(&CpuSet, &CpuSet) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        while !holds(&affinity::get_mask(self.own_tid)?, &self.right_mask) {
            if Instant::now() > deadline {
                bail!("{what} after {} s", READY_TIMEOUT.as_secs());
            }
            self.wait_step(CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Brings this thread into the state in which it must be when it forks a worker ([`WorkerStart`]).
    ///
    /// - `RightMask`: waits until the thread has the right mask.
    /// - `OnPin`: waits until pjwd has bound the thread to a part of the right mask.
    /// - `OutsideJob`: sets the mask of the thread to all PUs.
    /// - `InNoJob`: changes nothing. In the last two states, fails if the thread has the right mask already.
    fn prepare_mask(&self) -> anyhow::Result<()> {
        match self.worker_start {
            WorkerStart::RightMask => {
                self.wait_for_mask("the forker has another mask than its job", PartialEq::eq)
            }
            WorkerStart::OnPin => self.wait_for_mask("the forker is not pinned", |mask, right_mask| {
                mask.is_subset(right_mask) && mask.len() < right_mask.len()
            }),
            WorkerStart::OutsideJob => {
                affinity::set_full_mask(self.own_tid)?;
                self.check_is_outside()
            }
            WorkerStart::InNoJob => self.check_is_outside(),
        }
    }

    /// Fails if this thread has the right mask, so that a worker would inherit it.
    fn check_is_outside(&self) -> anyhow::Result<()> {
        if affinity::get_mask(self.own_tid)? == self.right_mask {
            bail!("there is no PU outside {} for a worker", self.right_mask);
        }
        Ok(())
    }

    /// Starts a worker, ends it when its result is known, and returns the line with the result. The line has the time
    /// in nanoseconds, and 1 if the first check found the right mask or else 0. The line is `missed` if the worker did
    /// not get the right mask.
    fn run_worker(&self) -> anyhow::Result<String> {
        self.prepare_mask()?;
        let begin = Instant::now();
        self.forks.send(begin).context("the observer has ended")?;
        let mut command = Command::new(&self.worker);
        let child = command.arg("60").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let _worker = Worker(child.with_context(|| format!("can't start {}", self.worker))?);
        Ok(match self.receive_reaction()? {
            Some((time, at_first_check)) => format!("{} {}", time.as_nanos(), u8::from(at_first_check)),
            None => "missed".to_owned(),
        })
    }

    /// Waits for the result of the observer, the thread that measures when a worker has the right mask. With
    /// [`WorkerStart::OnPin`], spins meanwhile: pjwd binds a thread to one PU only if it runs most of the time.
    fn receive_reaction(&self) -> anyhow::Result<Reaction> {
        if self.worker_start != WorkerStart::OnPin {
            return self.reactions.recv().context("the observer has ended")?;
        }
        loop {
            match self.reactions.try_recv() {
                Ok(reaction) => return reaction,
                Err(TryRecvError::Empty) => spin_loop(),
                Err(TryRecvError::Disconnected) => bail!("the observer has ended"),
            }
        }
    }
}

/// A worker. It is killed and waited for when this value is dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn current_tid() -> anyhow::Result<Tid> {
    Ok(Tid(u32::try_from(gettid().as_raw())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_forker_are_counted() {
        let mut times = ReactionTimes::default();
        for line in ["1500000 0", "missed", "500000 1"] {
            times.add_line(line).unwrap();
        }
        assert_eq!(
            (times.ms.as_slice(), times.missed, times.right_at_first_check),
            (&[1.5, 15_000.0, 0.5][..], 1, 1)
        );
        assert!(times.add_line("nonsense").is_err());
        assert!(times.add_line("").is_err());
    }
}
