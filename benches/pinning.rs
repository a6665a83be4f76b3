//! Measures whether pins inside a job make a program faster. One program runs alone on the whole machine: in a job
//! whose hot threads pjwd pins, in a job whose threads float, and in no job. There are four programs: one is bound
//! by memory, one by barriers, one runs short bursts on more threads than cores, and one runs long bursts. Of the
//! short bursts, pjwd pins the threads that run most of the time.
//!
//! The speed of memory changes for seconds, however the threads are placed. Two turns in a row differ by several per
//! cent, however short they are. So each round starts the program again and measures many pairs of short turns, one
//! with pins and one without. The first turn of a pair is with pins in every second pair. The result of a round is
//! the median of its pairs. The pairs do not show to which cores threads move when they float for seconds. The turn
//! of the kernel alone, before the pairs, shows that. For each turn, pjwd reloads its configuration. The comparison
//! with the kernel alone includes the cost of that.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_benches::measure::results::{Figure, ceil_count, median, print_line, publish, quantile};
use pjw_benches::programs::daemon::{EventSource, PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;

const LAP_TIMEOUT: Duration = Duration::from_secs(60);
const KINDS: [&str; 4] = ["memory", "barrier", "bursts", "waves"];
const TRIAL_STEPS: u32 = 50;
/// The interval of pjwd: short, so that pjwd pins the threads soon.
const INTERVAL: Duration = Duration::from_millis(100);
/// The number of intervals until the threads of a started program, or of a new job, are pinned or float.
const SETTLE_INTERVALS: u32 = 8;
/// The number of laps in a turn. The lap in which the turn begins is not measured.
const LAPS_PER_TURN: u32 = 2;
const LAP_SECONDS: f64 = 0.05;
/// The number of pairs in a round.
const PAIRS_PER_ROUND: usize = 24;

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let bench = Bench { effort, interrupt, scale, programs };
    let mut figures = Vec::new();
    for kind in KINDS {
        figures.extend(bench.measure(kind)?);
    }
    publish("pinning", &figures)
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    scale: Scale,
    programs: Programs,
}

impl Bench {
    /// Measures the laps of the program `kind` under the kernel alone and under pjwd with and without pins, and returns
    /// the figures.
    fn measure(&self, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let steps = self.choose_steps(kind)?;
        let warden = PrivateWarden::start_with_config(
            &self.programs,
            &self.config_keys(true),
            EventSource::ProcEvents,
            &self.interrupt,
        )?;
        let mut rounds = Rounds::default();
        for _ in 0..self.effort.pick(1, 30) {
            let mut program = self.start_program(kind, steps)?;
            self.settle()?;
            let kernel = self.measure_turn(&mut program)?;
            warden.assign("pinning", &self.scale.usable_pus, &[program.pid()])?;
            self.settle()?;
            let pairs = self.measure_pairs(&warden, &mut program)?;
            rounds.add(kernel, &pairs)?;
            warden.release_all()?;
        }
        rounds.figures(kind)
    }

    fn settle(&self) -> anyhow::Result<()> {
        self.interrupt.sleep_until(Instant::now() + INTERVAL * SETTLE_INTERVALS)
    }

    /// Measures pairs of turns with and without pins, and counts the turns in which threads were pinned.
    fn measure_pairs(&self, warden: &PrivateWarden, program: &mut Program) -> anyhow::Result<Pairs> {
        let mut pinned_turns = 0;
        let mut turn = |pin: bool| {
            warden.reconfigure(&self.config_keys(pin))?;
            let is_pinned = warden.status()?["jobs"][0]["pinned"].as_u64().unwrap_or(0) > 0;
            if is_pinned && !pin {
                bail!("pjwd pins threads although the configuration has pin = false");
            }
            pinned_turns += usize::from(is_pinned);
            self.measure_turn(program)
        };
        let mut times = Vec::new();
        for pair in 0..PAIRS_PER_ROUND {
            let pins_first = pair % 2 == 0;
            let [first, second] = [turn(pins_first)?, turn(!pins_first)?];
            times.push(if pins_first { [first, second] } else { [second, first] });
        }
        Ok(Pairs { times, pinned_turns })
    }

    /// Chooses the number of steps of a lap, by a short trial run.
    fn choose_steps(&self, kind: &str) -> anyhow::Result<u64> {
        let trial = self.measure_turn(&mut self.start_program(kind, TRIAL_STEPS.into())?)?;
        Ok(ceil_count(LAP_SECONDS / trial * f64::from(TRIAL_STEPS), 100_000))
    }

    fn start_program(&self, kind: &str, steps: u64) -> anyhow::Result<Program> {
        let mut command = Command::new(self.programs.path("pjw-bench-work"));
        let workers = self.scale.usable_pus.len().to_string();
        command.args(["--kind", kind, "--workers", &workers, "--steps", &steps.to_string()]);
        Program::start_until_ready(kind, &mut command, LAP_TIMEOUT, &self.interrupt)
    }

    /// Returns the time of a lap in seconds. The measurement begins with the next lap.
    fn measure_turn(&self, program: &mut Program) -> anyhow::Result<f64> {
        program.discard_lines();
        program.read_line(LAP_TIMEOUT, &self.interrupt)?;
        let mut seconds = 0.0;
        for _ in 0..LAPS_PER_TURN {
            let line = program.read_line(LAP_TIMEOUT, &self.interrupt)?;
            seconds += line
                .parse::<f64>()
                .with_context(|| format!("the program printed {line:?} instead of the time of a lap"))?;
        }
        Ok(seconds / f64::from(LAPS_PER_TURN))
    }

    fn config_keys(&self, pin: bool) -> String {
        let (interval, unusable_pus) = (INTERVAL.as_millis(), &self.scale.unusable_pus);
        format!("interval = \"{interval}ms\"\nhousekeeping = \"{unusable_pus}\"\n[balance]\npin = {pin}\n")
    }
}

/// The times of the pairs of one round.
#[derive(Debug)]
struct Pairs {
    /// The time of a lap in seconds: with pins, and floating.
    times: Vec<[f64; 2]>,
    /// The number of turns in which threads were pinned.
    pinned_turns: usize,
}

/// The results of all rounds of a program.
#[derive(Debug, Default)]
struct Rounds {
    /// The time of a lap in each round, in seconds: under the kernel alone, with pins, and floating.
    kernel: Vec<f64>,
    pins: Vec<f64>,
    floating: Vec<f64>,
    /// For each round, the median of the ratios of its pairs: with pins to floating.
    pins_to_floating: Vec<f64>,
    pinned_turns: usize,
}

impl Rounds {
    fn add(&mut self, kernel: f64, pairs: &Pairs) -> anyhow::Result<()> {
        let median_of = |value: fn(&[f64; 2]) -> f64| {
            median(&pairs.times.iter().map(value).collect::<Vec<f64>>()).context("nothing was measured")
        };
        self.kernel.push(kernel);
        self.pins.push(median_of(|[pins, _]| *pins)?);
        self.floating.push(median_of(|[_, floating]| *floating)?);
        self.pins_to_floating.push(median_of(|[pins, floating]| pins / floating)?);
        self.pinned_turns += pairs.pinned_turns;
        Ok(())
    }

    /// Prints how often threads were pinned, and returns the figures: pjwd without pins compared with the kernel alone,
    /// and pjwd with pins compared with both. Without the last two if no thread was pinned.
    fn figures(&self, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let Self { kernel, pins, floating, pins_to_floating, pinned_turns } = self;
        let to_kernel = |times: &[f64]| -> Vec<f64> {
            times.iter().zip(kernel).map(|(own, kernel)| own / kernel).collect()
        };
        let without = "pjwd without pins";
        let name = format!("{kind}: {without}");
        let mut figures = compare(&name, floating, "the kernel alone", kernel, &to_kernel(floating))?;
        print_line(&format!(
            "{kind}: threads were pinned in {pinned_turns} of {} turns",
            pins.len() * PAIRS_PER_ROUND
        ))?;
        if *pinned_turns > 0 {
            let name = format!("{kind}: pjwd with pins");
            figures.extend(compare(&name, pins, without, floating, pins_to_floating)?);
            figures.extend(compare(&name, pins, "the kernel alone", kernel, &to_kernel(pins))?);
        }
        Ok(figures)
    }
}

/// Returns two figures: the medians of the times, and the median of the ratios of the rounds. Prints the median with
/// its confidence interval of 95 %.
fn compare(
    name: &str,
    own_times: &[f64],
    peer: &str,
    peer_times: &[f64],
    ratios: &[f64],
) -> anyhow::Result<Vec<Figure>> {
    // The ranks of the confidence interval of a median: a binomial distribution, by its normal approximation.
    #[expect(clippy::cast_precision_loss)]
    let rank_offset = (0.98 / (ratios.len() as f64).sqrt()).min(0.5);
    let ratio_and_interval =
        [median(ratios), quantile(ratios, 0.5 - rank_offset), quantile(ratios, 0.5 + rank_offset)];
    let ([Some(value), Some(peer_value)], [Some(ratio), Some(low), Some(high)]) =
        ([median(own_times), median(peer_times)], ratio_and_interval)
    else {
        bail!("nothing was measured")
    };
    let count = ratios.len();
    print_line(&format!(
        "{name}: compared with {peer}: x{ratio:.4}, 95 % interval x{low:.4} to x{high:.4}, {count} rounds"
    ))?;
    Ok(vec![
        Figure::new(name, value, "s", peer, peer_value),
        Figure::new(&format!("{name}, of rounds"), ratio, "ratio", peer, 1.0),
    ])
}
