//! A process that has workers, one after the other, and times how long each takes from its fork until its mask is the
//! right one.
//!
//! A second thread of it hears of the birth and watches, by sched_getaffinity of the worker, for the first one shares its
//! PU with a worker that is born on its pin. The worker is sleep(1), which takes no core from the program that corrects it.
//! The time begins before the fork, on this process's own monotonic clock, so it has the cost of the fork in it (the
//! setting [`WorkerStart::RightMask`] shows that alone). The bench program starts itself again for it; its main function calls
//! [`attend`] first.

use std::env;
use std::hint::spin_loop;
use std::io::{Write, stdout};
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
use pjw_linux::{proc::events::ProcEvents, sys::affinity};

use crate::{programs::interrupt::Interrupt, programs::program::Program};

const ARGUMENT: &str = "--forker";
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// A worker that is not corrected by then counts as missed.
const CORRECTION_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two looks for a worker and at it: the precision of the figure.
const CHECK_INTERVAL: Duration = Duration::from_micros(20);

/// How a worker is born.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerStart {
    /// With the right mask: nothing is to be done, and the time is that of fork and exec.
    RightMask,
    /// To a thread that has just allowed itself every PU, as MPI's launchers do: outside its job.
    OutsideJob,
    /// To a busy thread that the warden pinned: on one PU, where it may have all of its job's.
    OnPin,
    /// To somebody in no job: a rule is to put it where it belongs.
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

/// How the workers of one forker came to their right mask.
#[derive(Debug, Clone, Default)]
pub struct ReactionTimes {
    /// From fork to the right mask, in milliseconds; who was missed counts with the time that was waited.
    pub ms: Vec<f64>,
    /// Workers that had not got it after fifteen seconds.
    pub missed: usize,
    /// Workers that were right at the first look.
    pub right_at_first_check: usize,
    /// From the kernel's time of the fork to the system call that set the mask, in milliseconds, as told by who made that
    /// call.
    pub kernel_clock_ms: Vec<f64>,
}

impl ReactionTimes {
    /// Takes in others.
    pub fn extend(&mut self, others: ReactionTimes) {
        self.ms.extend(others.ms);
        self.missed += others.missed;
        self.right_at_first_check += others.right_at_first_check;
        self.kernel_clock_ms.extend(others.kernel_clock_ms);
    }

    fn add_line(&mut self, line: &str) -> anyhow::Result<()> {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("missed") => {
                self.missed += 1;
                self.ms.push(CORRECTION_TIMEOUT.as_secs_f64() * 1000.0);
            }
            Some(nanoseconds) => {
                let nanoseconds: f64 =
                    nanoseconds.parse().with_context(|| format!("a forker said {line:?}"))?;
                self.ms.push(nanoseconds / 1e6);
                self.right_at_first_check += usize::from(words.next() == Some("1"));
            }
            None => bail!("a forker said nothing"),
        }
        Ok(())
    }
}

/// A process that is about to have workers.
#[derive(Debug)]
pub struct Forker {
    program: Program,
    workers: usize,
}

impl Forker {
    /// Starts it. It has its first worker once its own mask is `right_mask` (not so [`WorkerStart::InNoJob`]), pauses for a
    /// random time up to `pause` before each, and what is `right_mask` for a worker is the same.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(
        worker_start: WorkerStart,
        (workers, pause): (usize, Duration),
        right_mask: &CpuSet,
        worker: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("where is this program?")?);
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

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Waits until it has had all its workers.
    ///
    /// # Errors
    /// If it fails.
    pub fn wait_for_times(mut self, interrupt: &Interrupt) -> anyhow::Result<ReactionTimes> {
        let mut times = ReactionTimes::default();
        for _ in 0..self.workers {
            times.add_line(&self.program.read_line(READY_TIMEOUT + CORRECTION_TIMEOUT, interrupt)?)?;
        }
        Ok(times)
    }
}

/// If this program was started to be a forker, is one, and ends.
///
/// # Errors
/// If it can't have workers, or is never where it should be itself.
pub fn run_as_forker() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    set_timerslack(1).context("can't ask for exact sleep")?;
    let mut next = |what: &'static str| arguments.next().context(what);
    let argument = next("how are they born?")?;
    let worker_start =
        WorkerStart::ALL.into_iter().find(|value| value.argument() == argument).context("born how?")?;
    let workers: u32 = next("how many workers?")?.parse()?;
    let pause = Duration::from_micros(next("how long a pause?")?.parse()?);
    let right_mask: CpuSet = next("which mask?")?.parse()?;
    let own_tid = current_tid()?;
    let (forks, reactions) = start_observer(right_mask.clone())?;
    let parent =
        Parent { worker_start, right_mask, worker: next("which program?")?, own_tid, forks, reactions };
    print_line("ready")?;
    if worker_start != WorkerStart::InNoJob {
        parent.wait_for_mask("it is in its job", CpuSet::is_subset)?;
    }
    for index in 0..workers {
        // Multiples of the golden section: as even as random, and the same in each run.
        let share = (f64::from(index + 1) * 0.618_033_988_75).fract();
        parent.pause(pause.mul_f64(share));
        print_line(&parent.run_worker()?)?;
    }
    process::exit(0);
}

struct Parent {
    worker_start: WorkerStart,
    right_mask: CpuSet,
    worker: String,
    own_tid: Tid,
    /// Tells the observer of a birth that is about to be.
    forks: Sender<Instant>,
    /// What it saw.
    reactions: Receiver<anyhow::Result<Reaction>>,
}

/// How long a worker took to be right, and whether it was at the first look; `None` if that was never seen.
type Reaction = Option<(Duration, bool)>;

/// A thread that hears of each child, and then looks at its mask.
fn start_observer(
    right_mask: CpuSet,
) -> anyhow::Result<(Sender<Instant>, Receiver<anyhow::Result<Reaction>>)> {
    let mut proc_events = ProcEvents::open()?;
    let (forks, fork_times) = channel();
    let (send_reaction, reactions) = channel();
    thread::spawn(move || {
        // Ends with the parent.
        fork_times
            .iter()
            .try_for_each(|begin| send_reaction.send(observe_worker(&mut proc_events, &right_mask, begin)))
    });
    Ok((forks, reactions))
}

fn observe_worker(
    proc_events: &mut ProcEvents,
    right_mask: &CpuSet,
    begin: Instant,
) -> anyhow::Result<Reaction> {
    let parent = Pid(process::id());
    let mut events = Vec::new();
    let mut worker = None;
    let mut checks = 0_u32;
    while begin.elapsed() < CORRECTION_TIMEOUT {
        if worker.is_none() {
            proc_events.drain_events(&mut events);
            worker = events.drain(..).find_map(|event| match event {
                ProcessEvent::Fork { parent: of, child, .. } if of == parent => Some(Tid(child.0)),
                _ => None,
            });
        }
        if let Some(tid) = worker {
            let mask = affinity::get_mask(tid).context("the worker is gone")?;
            checks += 1;
            if mask == *right_mask {
                return Ok(Some((begin.elapsed(), checks == 1)));
            }
        }
        thread::sleep(CHECK_INTERVAL);
    }
    Ok(None)
}

impl Parent {
    /// Waits; a parent that is to be pinned must not be seen to rest.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.wait_step(end.saturating_duration_since(Instant::now()));
        }
    }

    fn wait_step(&self, timeout: Duration) {
        if self.worker_start == WorkerStart::OnPin { spin_loop() } else { thread::sleep(timeout) }
    }

    fn wait_for_mask(&self, what: &str, holds: impl Fn(&CpuSet, &CpuSet) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        while !holds(&affinity::get_mask(self.own_tid)?, &self.right_mask) {
            if Instant::now() > deadline {
                bail!("{what}: that was waited for in vain");
            }
            self.wait_step(CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Puts this thread where its worker is to be born.
    fn prepare_mask(&self) -> anyhow::Result<()> {
        match self.worker_start {
            WorkerStart::RightMask => self.wait_for_mask("its mask is right", PartialEq::eq),
            WorkerStart::OnPin => self.wait_for_mask("it is pinned", |mask, right_mask| {
                mask.is_subset(right_mask) && mask.len() < right_mask.len()
            }),
            WorkerStart::OutsideJob => {
                affinity::set_full_mask(self.own_tid)?;
                self.check_is_outside()
            }
            WorkerStart::InNoJob => self.check_is_outside(),
        }
    }

    fn check_is_outside(&self) -> anyhow::Result<()> {
        if affinity::get_mask(self.own_tid)? == self.right_mask {
            bail!("there is no PU outside {} for a worker to be born on", self.right_mask);
        }
        Ok(())
    }

    /// Has a worker, and returns how long it took to be right, and whether it was at the first look.
    fn run_worker(&self) -> anyhow::Result<String> {
        self.prepare_mask()?;
        let begin = Instant::now();
        self.forks.send(begin).context("nobody watches")?;
        let mut command = Command::new(&self.worker);
        let child = command.arg("60").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let _worker = Worker(child.with_context(|| format!("can't start {}", self.worker))?);
        Ok(match self.receive_reaction()? {
            Some((time, at_first_check)) => format!("{} {}", time.as_nanos(), u8::from(at_first_check)),
            None => "missed".to_owned(),
        })
    }

    /// What the observer saw; a parent that is to be pinned must not be seen to rest.
    fn receive_reaction(&self) -> anyhow::Result<Reaction> {
        if self.worker_start != WorkerStart::OnPin {
            return self.reactions.recv().context("nobody watches")?;
        }
        loop {
            match self.reactions.try_recv() {
                Ok(reaction) => return reaction,
                Err(TryRecvError::Empty) => spin_loop(),
                Err(TryRecvError::Disconnected) => bail!("nobody watches"),
            }
        }
    }
}

/// A worker. It ends with this value.
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

fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("nobody listens")
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
