//! A process that has workers, one after the other, and times how long each takes from its fork until its mask is the
//! right one.
//!
//! A second thread of it hears of the birth and watches, by sched_getaffinity of the worker, for the first one shares its
//! PU with a worker that is born on its pin. The worker is sleep(1), which takes no core from the program that corrects it.
//! The time begins before the fork, on this process's own monotonic clock, so it has the cost of the fork in it (the
//! setting [`Birth::Right`] shows that alone). The bench program starts itself again for it; its main function calls
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

const WORD: &str = "--forker";
const READY_AT_MOST: Duration = Duration::from_secs(30);
/// A worker that is not corrected by then counts as missed.
const RIGHT_AT_MOST: Duration = Duration::from_secs(15);
/// Between two looks for a worker and at it: the precision of the figure.
const GLANCE: Duration = Duration::from_micros(20);

/// How a worker is born.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Birth {
    /// With the right mask: nothing is to be done, and the time is that of fork and exec.
    Right,
    /// To a thread that has just allowed itself every PU, as MPI's launchers do: outside its job.
    Outside,
    /// To a busy thread that the warden pinned: on one PU, where it may have all of its job's.
    Pinned,
    /// To somebody in no job: a rule is to put it where it belongs.
    Elsewhere,
}

impl Birth {
    const ALL: [Self; 4] = [Self::Right, Self::Outside, Self::Pinned, Self::Elsewhere];

    fn word(self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::Outside => "outside",
            Self::Pinned => "pinned",
            Self::Elsewhere => "elsewhere",
        }
    }
}

/// How the workers of one forker came to their right mask.
#[derive(Debug, Clone, Default)]
pub struct Times {
    /// From fork to the right mask, in milliseconds; who was missed counts with the time that was waited.
    pub ms: Vec<f64>,
    /// Workers that had not got it after fifteen seconds.
    pub missed: usize,
    /// Workers that were right at the first look.
    pub right_at_once: usize,
    /// From the kernel's time of the fork to the system call that set the mask, in milliseconds, as told by who made that
    /// call.
    pub by_kernel_ms: Vec<f64>,
}

impl Times {
    /// Takes in others.
    pub fn extend(&mut self, others: Times) {
        self.ms.extend(others.ms);
        self.missed += others.missed;
        self.right_at_once += others.right_at_once;
        self.by_kernel_ms.extend(others.by_kernel_ms);
    }

    fn take(&mut self, line: &str) -> anyhow::Result<()> {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("missed") => {
                self.missed += 1;
                self.ms.push(RIGHT_AT_MOST.as_secs_f64() * 1000.0);
            }
            Some(nanoseconds) => {
                let nanoseconds: f64 =
                    nanoseconds.parse().with_context(|| format!("a forker said {line:?}"))?;
                self.ms.push(nanoseconds / 1e6);
                self.right_at_once += usize::from(words.next() == Some("1"));
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
    /// Starts it. It has its first worker once its own mask is `right` (not so [`Birth::Elsewhere`]), pauses for a
    /// random time up to `pause` before each, and what is `right` for a worker is the same.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(
        birth: Birth,
        (workers, pause): (usize, Duration),
        right: &CpuSet,
        worker: &Path,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("where is this program?")?);
        command.args([WORD, birth.word(), &workers.to_string(), &pause.as_micros().to_string()]);
        command.arg(right.to_string()).arg(worker);
        let program = Program::start_ready("the forker", &mut command, READY_AT_MOST, interrupt)?;
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
    pub fn times(mut self, interrupt: &Interrupt) -> anyhow::Result<Times> {
        let mut times = Times::default();
        for _ in 0..self.workers {
            times.take(&self.program.line(READY_AT_MOST + RIGHT_AT_MOST, interrupt)?)?;
        }
        Ok(times)
    }
}

/// If this program was started to be a forker, is one, and ends.
///
/// # Errors
/// If it can't have workers, or is never where it should be itself.
pub fn attend() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(WORD) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    set_timerslack(1).context("can't ask for exact sleep")?;
    let mut next = |what: &'static str| arguments.next().context(what);
    let word = next("how are they born?")?;
    let birth = Birth::ALL.into_iter().find(|birth| birth.word() == word).context("born how?")?;
    let workers: u32 = next("how many workers?")?.parse()?;
    let pause = Duration::from_micros(next("how long a pause?")?.parse()?);
    let right: CpuSet = next("which mask?")?.parse()?;
    let own = own_tid()?;
    let (watch, watched) = observer(right.clone())?;
    let parent = Parent { birth, right, worker: next("which program?")?, own, watch, watched };
    say("ready")?;
    if birth != Birth::Elsewhere {
        parent.wait_until("it is in its job", CpuSet::is_subset)?;
    }
    for number in 0..workers {
        // Multiples of the golden section: as even as random, and the same in each run.
        let share = (f64::from(number + 1) * 0.618_033_988_75).fract();
        parent.pause(pause.mul_f64(share));
        say(&parent.have_one()?)?;
    }
    process::exit(0);
}

struct Parent {
    birth: Birth,
    right: CpuSet,
    worker: String,
    own: Tid,
    /// Tells the observer of a birth that is about to be.
    watch: Sender<Instant>,
    /// What it saw.
    watched: Receiver<anyhow::Result<Watched>>,
}

/// How long a worker took to be right, and whether it was at the first look; `None` if that was never seen.
type Watched = Option<(Duration, bool)>;

/// A thread that hears of each child, and then looks at its mask.
fn observer(right: CpuSet) -> anyhow::Result<(Sender<Instant>, Receiver<anyhow::Result<Watched>>)> {
    let mut kernel = ProcEvents::open()?;
    let (watch, births) = channel();
    let (tell, watched) = channel();
    thread::spawn(move || {
        // Ends with the parent.
        births.iter().try_for_each(|begin| tell.send(watch_one(&mut kernel, &right, begin)))
    });
    Ok((watch, watched))
}

fn watch_one(kernel: &mut ProcEvents, right: &CpuSet, begin: Instant) -> anyhow::Result<Watched> {
    let parent = Pid(process::id());
    let mut events = Vec::new();
    let mut worker = None;
    let mut looks = 0_u32;
    while begin.elapsed() < RIGHT_AT_MOST {
        if worker.is_none() {
            kernel.drain_events(&mut events);
            worker = events.drain(..).find_map(|event| match event {
                ProcessEvent::Fork { parent: of, child, .. } if of == parent => Some(Tid(child.0)),
                _ => None,
            });
        }
        if let Some(tid) = worker {
            let mask = affinity::get_mask(tid).context("the worker is gone")?;
            looks += 1;
            if mask == *right {
                return Ok(Some((begin.elapsed(), looks == 1)));
            }
        }
        thread::sleep(GLANCE);
    }
    Ok(None)
}

impl Parent {
    /// Waits; a parent that is to be pinned must not be seen to rest.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.breathe(end.saturating_duration_since(Instant::now()));
        }
    }

    fn breathe(&self, at_most: Duration) {
        if self.birth == Birth::Pinned { spin_loop() } else { thread::sleep(at_most) }
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&CpuSet, &CpuSet) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_AT_MOST;
        while !is_so(&affinity::get_mask(self.own)?, &self.right) {
            if Instant::now() > deadline {
                bail!("{what}: that was waited for in vain");
            }
            self.breathe(GLANCE);
        }
        Ok(())
    }

    /// Puts this thread where its worker is to be born.
    fn prepare(&self) -> anyhow::Result<()> {
        match self.birth {
            Birth::Right => self.wait_until("its mask is right", PartialEq::eq),
            Birth::Pinned => self
                .wait_until("it is pinned", |mask, right| mask.is_subset(right) && mask.len() < right.len()),
            Birth::Outside => {
                affinity::set_full_mask(self.own)?;
                self.is_elsewhere()
            }
            Birth::Elsewhere => self.is_elsewhere(),
        }
    }

    fn is_elsewhere(&self) -> anyhow::Result<()> {
        if affinity::get_mask(self.own)? == self.right {
            bail!("there is no PU outside {} for a worker to be born on", self.right);
        }
        Ok(())
    }

    /// Has a worker, and returns how long it took to be right, and whether it was at the first look.
    fn have_one(&self) -> anyhow::Result<String> {
        self.prepare()?;
        let begin = Instant::now();
        self.watch.send(begin).context("nobody watches")?;
        let mut command = Command::new(&self.worker);
        let child = command.arg("60").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let _worker = Worker(child.with_context(|| format!("can't start {}", self.worker))?);
        Ok(match self.answer()? {
            Some((time, at_once)) => format!("{} {}", time.as_nanos(), u8::from(at_once)),
            None => "missed".to_owned(),
        })
    }

    /// What the observer saw; a parent that is to be pinned must not be seen to rest.
    fn answer(&self) -> anyhow::Result<Watched> {
        if self.birth != Birth::Pinned {
            return self.watched.recv().context("nobody watches")?;
        }
        loop {
            match self.watched.try_recv() {
                Ok(watched) => return watched,
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

fn own_tid() -> anyhow::Result<Tid> {
    Ok(Tid(u32::try_from(gettid().as_raw())?))
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("nobody listens")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_forker_says_is_counted() {
        let mut times = Times::default();
        for line in ["1500000 0", "missed", "500000 1"] {
            times.take(line).unwrap();
        }
        assert_eq!(
            (times.ms.as_slice(), times.missed, times.right_at_once),
            (&[1.5, 15_000.0, 0.5][..], 1, 1)
        );
        assert!(times.take("nonsense").is_err());
        assert!(times.take("").is_err());
    }
}
