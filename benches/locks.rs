//! Measures locks while cores of the job are taken: a plain spin lock, an MCS lock, the mutex of the C library, and the
//! example of pjw-job, whose waiters stop spinning when the holder's core has left. The job has one thread for each PU
//! that it had at the start. Each thread takes the lock, computes, releases it, and computes as long again.
//!
//! A private pjwd keeps the job on its cores. The cores change by requests to it, as `pjwctl assign --cpus` sends them.
#![forbid(unsafe_code)]

use std::iter;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::measure::results::{Figure, median, publish};
use pjw_benches::programs::daemon::PrivateWarden;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::scale::pus_of;
use pjw_core::cpuset::CpuSet;

const PROGRAM: &str = "pjw-bench-locks";
const JOB: &str = "locks";
/// The time between two changes of the cores.
const CHANGE_INTERVAL: Duration = Duration::from_millis(50);
const QUICK_TIME: Duration = Duration::from_millis(500);
const FULL_TIME: Duration = Duration::from_secs(2);
/// The first part of a run, which is not measured.
const SETTLE_TIME: Duration = Duration::from_millis(300);
const LINE_TIMEOUT: Duration = Duration::from_secs(60);

/// The locks, as the program names them.
const LOCKS: [&str; 4] = ["test-and-set", "mcs", "pthread", "example"];
/// The index of the MCS lock in `LOCKS`.
const MCS: usize = 1;

/// Which cores the job loses while its locks are measured.
#[derive(Debug, Clone, Copy)]
enum Revocation {
    /// The job keeps all cores.
    Never,
    /// The job has all cores and the first half of them in turns.
    HalfComesBack,
    /// The job has the first half of the cores and the second half in turns.
    HalfMoves,
}

const REVOCATIONS: [Revocation; 3] = [Revocation::Never, Revocation::HalfComesBack, Revocation::HalfMoves];

impl Revocation {
    fn name(self) -> &'static str {
        match self {
            Revocation::Never => "all cores",
            Revocation::HalfComesBack => "half is taken, and back after 50 ms",
            Revocation::HalfMoves => "half is taken each 50 ms, and the other half comes",
        }
    }
}

struct Bench {
    setup: Setup,
    cpus: CpuSet,
    halves: (CpuSet, CpuSet),
}

fn main() -> anyhow::Result<()> {
    let setup = Setup::prepare()?;
    let cores = &setup.scale.usable_cores;
    let halves = cores.split_at(cores.len() / 2);
    let bench = Bench { cpus: pus_of(cores), halves: (pus_of(halves.0), pus_of(halves.1)), setup };
    let mut figures = Vec::new();
    for revocation in REVOCATIONS {
        figures.extend(bench.compare(revocation)?);
    }
    publish("locks", &figures)
}

impl Bench {
    /// Measures all locks in turns, and compares each with the MCS lock.
    fn compare(&self, revocation: Revocation) -> anyhow::Result<Vec<Figure>> {
        let mut rates = LOCKS.map(|_| Vec::new());
        for round in 0..self.setup.effort.pick(1, 5) {
            for turn in 0..LOCKS.len() {
                let at = (turn + round) % LOCKS.len();
                rates[at].extend(self.measure(LOCKS[at], revocation)?);
            }
        }
        let medians = rates.each_ref().map(|rates| median(rates).unwrap_or(f64::NAN));
        let figure = |at: usize| {
            let name = format!("{}, {}", LOCKS[at], revocation.name());
            Figure::new(&name, medians[at] / 1000.0, "1000/s", "mcs", medians[MCS] / 1000.0)
        };
        Ok((0..LOCKS.len()).filter(|at| *at != MCS).map(figure).collect())
    }

    /// Returns how often each second the threads together took the lock. The result has one rate for each 100 ms.
    fn measure(&self, lock: &str, revocation: Revocation) -> anyhow::Result<Vec<f64>> {
        let interrupt = &self.setup.interrupt;
        let Setup { programs, scale, .. } = &self.setup;
        let warden = PrivateWarden::start_with_cpusets(programs, &scale.unusable_pus, interrupt)?;
        let mut command = warden.run_command(JOB, self.setup.scale.core_count);
        command.arg(self.setup.programs.path(PROGRAM)).args([&self.cpus.len().to_string(), lock]);
        let mut program = Program::start(lock, &mut command)?;
        // The threads run when the first line is printed.
        program.read_line(LINE_TIMEOUT, interrupt)?;
        self.change_cores(&warden, revocation, SETTLE_TIME)?;
        program.discard_lines();
        self.change_cores(&warden, revocation, self.setup.effort.pick(QUICK_TIME, FULL_TIME))?;
        let lines = iter::from_fn(|| program.try_read_line(Duration::ZERO));
        let samples = lines.map(|line| parse_line(&line)).collect::<anyhow::Result<Vec<_>>>()?;
        let rate = |((begin_s, count_before), (end_s, count)): (&(f64, f64), &(f64, f64))| {
            (count - count_before) / (end_s - begin_s)
        };
        Ok(samples.iter().zip(samples.iter().skip(1)).map(rate).collect())
    }

    /// Changes the cores of the job each 50 ms, as `revocation` says, for the time `time`.
    fn change_cores(
        &self,
        warden: &PrivateWarden,
        revocation: Revocation,
        time: Duration,
    ) -> anyhow::Result<()> {
        let begin = Instant::now();
        for turn in 0.. {
            let next = begin + CHANGE_INTERVAL * turn;
            if next >= begin + time {
                break;
            }
            self.setup.interrupt.sleep_until(next)?;
            let cpus = match (revocation, turn % 2) {
                (Revocation::Never, _) | (Revocation::HalfComesBack, 1) => &self.cpus,
                (Revocation::HalfComesBack, _) | (Revocation::HalfMoves, 0) => &self.halves.0,
                (Revocation::HalfMoves, _) => &self.halves.1,
            };
            warden.assign(JOB, cpus, &[])?;
        }
        Ok(())
    }
}

/// Parses a line of the program: the time in seconds, and how often the lock was taken until then.
fn parse_line(line: &str) -> anyhow::Result<(f64, f64)> {
    let Some((seconds, count)) = line.split_once(' ') else { bail!("the program printed {line:?}") };
    let number = |text: &str| text.parse().with_context(|| format!("the program printed {line:?}"));
    Ok((number(seconds)?, number(count)?))
}
