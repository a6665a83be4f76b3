//! Whether pins inside a job are worth it: one program alone on the whole machine, in a job whose busy threads the
//! warden pins, in a job that it leaves to float, and without a warden. A program bound by memory, one bound by barriers
//! and one that works in bursts. Paired: each round runs all three, each time in another order.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::demo::ending::Ending;
use pjw_benches::demo::experiment::Scale;
use pjw_benches::demo::program::Program;
use pjw_benches::demo::warden::{Hearing, Programs, Warden};
use pjw_benches::effort::Effort;
use pjw_benches::ground::Ground;
use pjw_benches::results::{Figure, median, publish, say};

const READY_AT_MOST: Duration = Duration::from_secs(60);
const DONE_AT_MOST: Duration = Duration::from_secs(300);
const KINDS: [&str; 3] = ["memory", "barrier", "bursts"];
const TRIAL_STEPS: u64 = 100;

/// Who places the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placer {
    Kernel,
    Floats,
    Pins,
}

const PLACERS: [Placer; 3] = [Placer::Kernel, Placer::Floats, Placer::Pins];

impl Placer {
    fn name(self) -> &'static str {
        match self {
            Placer::Kernel => "the kernel alone",
            Placer::Floats => "the warden without pins",
            Placer::Pins => "the warden with pins",
        }
    }
}

fn main() -> anyhow::Result<()> {
    let Ground { effort, ending, programs, scale } = Ground::find()?;
    let bench = Bench { effort, ending, scale, programs };
    let mut figures = Vec::new();
    for kind in KINDS {
        figures.extend(bench.measure(kind)?);
    }
    publish("pinning", &figures)
}

struct Bench {
    effort: Effort,
    ending: Ending,
    scale: Scale,
    programs: Programs,
}

impl Bench {
    fn measure(&self, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let steps = self.steps(kind)?;
        let mut times: [Vec<f64>; 3] = Default::default();
        let mut most_pinned = 0;
        for round in 0..self.effort.pick(1, 6) {
            // Six orders: forwards from each, and backwards from each.
            for turn in 0..PLACERS.len() {
                let at =
                    if round % 2 == 0 { turn + round / 2 } else { 2 + round / 2 + 2 * turn } % PLACERS.len();
                let (seconds, pinned) = self.time(kind, PLACERS[at], steps)?;
                times[at].push(seconds);
                most_pinned = most_pinned.max(pinned);
            }
        }
        if most_pinned == 0 {
            say(&format!("{kind}: the warden found nobody to pin"))?;
        }
        let mut figures = Vec::new();
        let [kernel, floats, pins] = times;
        for (placer, ours) in [(Placer::Pins, &pins), (Placer::Floats, &floats)] {
            let peer = Placer::Kernel.name();
            let (Some(value), Some(theirs)) = (median(ours), median(&kernel)) else {
                bail!("nothing was measured")
            };
            figures.push(Figure::new(&format!("{kind}: {}", placer.name()), value, "s", peer, theirs));
            // Of the same round, both were beside the same others.
            let pairs: Vec<f64> = ours.iter().zip(&kernel).map(|(ours, theirs)| ours / theirs).collect();
            let paired = median(&pairs).context("nothing was measured")?;
            say(&format!("{kind}: {}: {value:.3} s; paired with {peer}: x{paired:.3}", placer.name()))?;
            figures.push(Figure::new(
                &format!("{kind}: {}, of pairs", placer.name()),
                paired,
                "ratio",
                peer,
                1.0,
            ));
        }
        Ok(figures)
    }

    /// How many steps take as long as a run is to take, from a short trial.
    fn steps(&self, kind: &str) -> anyhow::Result<u64> {
        let (trial, _) = self.time(kind, Placer::Kernel, TRIAL_STEPS)?;
        let wanted = self.effort.pick(1.2, 8.0);
        // A count of steps: small, whole and positive.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let trials = (wanted / trial).ceil().clamp(1.0, 100_000.0) as u64;
        Ok(trials * TRIAL_STEPS)
    }

    /// The time of a run in seconds, and how many threads the warden had pinned in the middle of it.
    fn time(&self, kind: &str, placer: Placer, steps: u64) -> anyhow::Result<(f64, u64)> {
        let warden = match placer {
            Placer::Kernel => None,
            Placer::Floats => Some(self.warden("[balance]\npin = false\n")?),
            Placer::Pins => Some(self.warden("")?),
        };
        let work = self.programs.path("pjw-bench-work");
        let mut command = match &warden {
            Some(warden) => {
                let mut command = warden.run("pinning", self.scale.cores);
                command.arg(work);
                command
            }
            None => Command::new(work),
        };
        let workers = self.scale.ours.len().to_string();
        command.args(["--kind", kind, "--workers", &workers, "--steps", &steps.to_string()]);
        let mut program = Program::start(kind, &mut command)?;
        let ready = program.line(READY_AT_MOST, &self.ending)?;
        if ready != "ready" {
            bail!("{kind} printed {ready:?} where it should be ready");
        }
        let pinned = warden.as_ref().map_or(Ok(0), |warden| self.pinned(warden))?;
        let line = program.line(DONE_AT_MOST, &self.ending)?;
        let seconds = line.parse().with_context(|| format!("{kind} printed {line:?}, not its time"))?;
        Ok((seconds, pinned))
    }

    fn pinned(&self, warden: &Warden) -> anyhow::Result<u64> {
        std::thread::sleep(Duration::from_millis(self.effort.pick(700, 5000)));
        Ok(warden.status()?["jobs"][0]["pinned"].as_u64().unwrap_or(0))
    }

    fn warden(&self, balance: &str) -> anyhow::Result<Warden> {
        let interval = self.effort.pick("100ms", "1s");
        let keys =
            format!("interval = \"{interval}\"\nhousekeeping = \"{}\"\n{balance}", self.scale.not_ours);
        Warden::configured(&self.programs, &keys, Hearing::Events, &self.ending)
    }
}
