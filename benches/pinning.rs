//! Whether pins inside a job are worth it: one program alone on the whole machine, in a job whose busy threads the
//! warden pins, in a job that it leaves to float, and in none. A program bound by memory, one bound by barriers, and two
//! that work in bursts: short ones of more threads than cores, of which the warden pins who runs most of the time, and long
//! ones.
//!
//! Memory is faster or slower for seconds, however the threads are placed, and consecutive turns differ by several per
//! cent, however short the turns are. So a round starts the program anew and takes many pairs of short turns, with pins and
//! without, each hand first in every other pair; the median of its pairs is what the round says. Where threads drift
//! to when they float for seconds is not in that: the kernel's turn, before the pairs, is when they have. For each of
//! its own turns the warden reads its configuration anew; that is in its figures beside the kernel's.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::measure::results::{Figure, at_least, median, publish, quantile, say};
use pjw_benches::programs::daemon::{Hearing, Programs, Warden};
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;

const LAP_AT_MOST: Duration = Duration::from_secs(60);
const KINDS: [&str; 4] = ["memory", "barrier", "bursts", "waves"];
const TRIAL_STEPS: u32 = 50;
/// The warden's: so short that nobody waits for its pins for long.
const INTERVAL: Duration = Duration::from_millis(100);
/// So many intervals after a program was started, or became a job, its threads are where they will be.
const UNTIL_SETTLED: u32 = 8;
/// A turn; the lap in which it begins is not counted.
const LAPS: u32 = 2;
const LAP_SECONDS: f64 = 0.05;
/// Pairs of turns of the warden's in a round.
const PAIRS: usize = 24;

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::find()?;
    let bench = Bench { effort, interrupt, scale, programs };
    let mut figures = Vec::new();
    for kind in KINDS {
        figures.extend(bench.measure(kind)?);
    }
    publish("pinning", &figures)
}

struct Bench {
    effort: Effort,
    interrupt: Interrupt,
    scale: Scale,
    programs: Programs,
}

impl Bench {
    fn measure(&self, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let steps = self.steps(kind)?;
        let warden = Warden::configured(&self.programs, &self.keys(true), Hearing::Events, &self.interrupt)?;
        let mut rounds = Rounds::default();
        for _ in 0..self.effort.pick(1, 30) {
            let mut program = self.start(kind, steps)?;
            self.settle()?;
            let kernel = self.turn(&mut program)?;
            warden.assign("pinning", &self.scale.ours, &[program.pid()])?;
            self.settle()?;
            let pairs = self.pairs(&warden, &mut program)?;
            rounds.add(kernel, &pairs)?;
            warden.release_all()?;
        }
        rounds.figures(kind)
    }

    fn settle(&self) -> anyhow::Result<()> {
        self.interrupt.sleep_until(Instant::now() + INTERVAL * UNTIL_SETTLED)
    }

    /// Turns of the warden's, and in how many threads were pinned.
    fn pairs(&self, warden: &Warden, program: &mut Program) -> anyhow::Result<Pairs> {
        let mut pinned = 0;
        let mut turn = |pin: bool| {
            warden.reconfigure(&self.keys(pin))?;
            let is_pinned = warden.status()?["jobs"][0]["pinned"].as_u64().unwrap_or(0) > 0;
            if is_pinned && !pin {
                bail!("the warden pins though it was told not to");
            }
            pinned += usize::from(is_pinned);
            self.turn(program)
        };
        let mut times = Vec::new();
        for pair in 0..PAIRS {
            let pins_first = pair % 2 == 0;
            let [first, second] = [turn(pins_first)?, turn(!pins_first)?];
            times.push(if pins_first { [first, second] } else { [second, first] });
        }
        Ok(Pairs { times, pinned })
    }

    /// How many steps take as long as a lap is to take, from a short trial.
    fn steps(&self, kind: &str) -> anyhow::Result<u64> {
        let trial = self.turn(&mut self.start(kind, TRIAL_STEPS.into())?)?;
        Ok(at_least(LAP_SECONDS / trial * f64::from(TRIAL_STEPS), 100_000))
    }

    fn start(&self, kind: &str, steps: u64) -> anyhow::Result<Program> {
        let mut command = Command::new(self.programs.path("pjw-bench-work"));
        let workers = self.scale.ours.len().to_string();
        command.args(["--kind", kind, "--workers", &workers, "--steps", &steps.to_string()]);
        Program::start_ready(kind, &mut command, LAP_AT_MOST, &self.interrupt)
    }

    /// Seconds for a lap, from the next that begins.
    fn turn(&self, program: &mut Program) -> anyhow::Result<f64> {
        program.skip_lines();
        program.line(LAP_AT_MOST, &self.interrupt)?;
        let mut seconds = 0.0;
        for _ in 0..LAPS {
            let line = program.line(LAP_AT_MOST, &self.interrupt)?;
            seconds += line.parse::<f64>().with_context(|| format!("{line:?} is no lap's time"))?;
        }
        Ok(seconds / f64::from(LAPS))
    }

    fn keys(&self, pin: bool) -> String {
        let (interval, not_ours) = (INTERVAL.as_millis(), &self.scale.not_ours);
        format!("interval = \"{interval}ms\"\nhousekeeping = \"{not_ours}\"\n[balance]\npin = {pin}\n")
    }
}

/// How long laps took with pins and without, one right after the other.
#[derive(Debug)]
struct Pairs {
    times: Vec<[f64; 2]>,
    /// In how many somebody was pinned.
    pinned: usize,
}

/// What the rounds say of a program: for each its times, and how they compare.
#[derive(Debug, Default)]
struct Rounds {
    kernel: Vec<f64>,
    pins: Vec<f64>,
    floats: Vec<f64>,
    /// The medians of the pairs' own ratios, pins to floating.
    pins_to_floats: Vec<f64>,
    pinned: usize,
}

impl Rounds {
    fn add(&mut self, kernel: f64, pairs: &Pairs) -> anyhow::Result<()> {
        let middle = |of: fn(&[f64; 2]) -> f64| {
            median(&pairs.times.iter().map(of).collect::<Vec<f64>>()).context("nothing was measured")
        };
        self.kernel.push(kernel);
        self.pins.push(middle(|[pins, _]| *pins)?);
        self.floats.push(middle(|[_, floats]| *floats)?);
        self.pins_to_floats.push(middle(|[pins, floats]| pins / floats)?);
        self.pinned += pairs.pinned;
        Ok(())
    }

    fn figures(&self, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let Self { kernel, pins, floats, pins_to_floats, pinned } = self;
        let to_kernel = |times: &[f64]| -> Vec<f64> {
            times.iter().zip(kernel).map(|(ours, theirs)| ours / theirs).collect()
        };
        let without = "the warden without pins";
        let name = format!("{kind}: {without}");
        let mut figures = compared(&name, floats, "the kernel alone", kernel, &to_kernel(floats))?;
        say(&format!("{kind}: threads were pinned in {pinned} of {} turns", pins.len() * PAIRS))?;
        // If none was, there is nothing to compare.
        if *pinned > 0 {
            let name = format!("{kind}: the warden with pins");
            figures.extend(compared(&name, pins, without, floats, pins_to_floats)?);
            figures.extend(compared(&name, pins, "the kernel alone", kernel, &to_kernel(pins))?);
        }
        Ok(figures)
    }
}

/// The medians, and that of the rounds' ratios with where it lies, 19 times of 20.
fn compared(
    name: &str,
    ours: &[f64],
    peer: &str,
    theirs: &[f64],
    ratios: &[f64],
) -> anyhow::Result<Vec<Figure>> {
    // Ranks of a sample's median: a binomial distribution, by its normal approximation.
    #[expect(clippy::cast_precision_loss)]
    let off = (0.98 / (ratios.len() as f64).sqrt()).min(0.5);
    let middle = [median(ratios), quantile(ratios, 0.5 - off), quantile(ratios, 0.5 + off)];
    let ([Some(value), Some(peer_value)], [Some(ratio), Some(low), Some(high)]) =
        ([median(ours), median(theirs)], middle)
    else {
        bail!("nothing was measured")
    };
    let count = ratios.len();
    say(&format!(
        "{name}: beside {peer}: x{ratio:.4}, and within x{low:.4} and x{high:.4}, of {count} rounds"
    ))?;
    Ok(vec![
        Figure::new(name, value, "s", peer, peer_value),
        Figure::new(&format!("{name}, of rounds"), ratio, "ratio", peer, 1.0),
    ])
}
