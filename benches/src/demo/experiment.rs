//! The experiment: job B's time alone, beside job A, and beside job A under the warden, interleaved.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::measure::other_programs::{self, Watch};
use crate::measure::results::median;
use crate::programs::daemon::{Programs, Warden};
use crate::programs::interrupt::Interrupt;
use crate::programs::program::Program;
use crate::setup::scale::Scale;

/// How long B should take alone, in seconds.
const ALONE_S: f64 = 2.0;
/// How long B may take beside A, in seconds: on a large machine, where A's workers hold up B's more, B gets less to do.
const BESIDE_S: f64 = 15.0;
const TRIAL_STEPS: u64 = 40;
const MOST_REPETITIONS: usize = 5;
const FEWEST_REPETITIONS: usize = 3;
/// No further repetition is begun if it would end after this.
const ALL_AT_MOST: Duration = Duration::from_secs(75);
const DONE_AT_MOST: Duration = Duration::from_secs(60);

/// Beside whom B runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Nobody.
    Alone,
    /// A, without a warden.
    Beside,
    /// A, with a warden.
    UnderWarden,
}

impl Setting {
    /// In the order in which they are measured.
    const ALL: [Self; 3] = [Self::Alone, Self::Beside, Self::UnderWarden];
}

/// B's times in one setting, one for each repetition.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// In seconds.
    pub seconds: Vec<f64>,
    /// How many CPUs other programs used meanwhile.
    pub others: Vec<f64>,
}

impl Row {
    /// The most that other programs used.
    #[must_use]
    pub fn most_others(&self) -> f64 {
        self.others.iter().copied().fold(0.0, f64::max)
    }

    /// Whether other programs are in the median: in half of the times or more.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let busy = self.others.iter().filter(|&&others| others >= other_programs::BUSY).count();
        busy > 0 && 2 * busy >= self.others.len()
    }
}

/// B's times in every setting.
#[derive(Debug, Clone, Default)]
pub struct Times {
    /// Alone.
    pub alone: Row,
    /// Beside A.
    pub beside: Row,
    /// Beside A under the warden.
    pub under_warden: Row,
}

/// `target/demo/result.json`: medians of B's time. The names are public interface.
#[derive(Debug, Clone, Serialize)]
pub struct Medians {
    /// Of how many.
    pub repetitions: usize,
    /// Alone, in seconds.
    pub alone_s: f64,
    /// Beside A.
    pub beside_s: f64,
    /// Beside A under the warden.
    pub under_warden_s: f64,
    /// The most CPUs that other programs used meanwhile.
    pub others_cpus: f64,
}

impl Times {
    /// The medians, once there are times.
    #[must_use]
    pub fn medians(&self) -> Option<Medians> {
        Some(Medians {
            repetitions: self.alone.seconds.len(),
            alone_s: median(&self.alone.seconds)?,
            beside_s: median(&self.beside.seconds)?,
            under_warden_s: median(&self.under_warden.seconds)?,
            others_cpus: self.rows().into_iter().map(Row::most_others).fold(0.0, f64::max),
        })
    }

    /// All three.
    #[must_use]
    pub fn rows(&self) -> [&Row; 3] {
        [&self.alone, &self.beside, &self.under_warden]
    }

    fn row(&mut self, setting: Setting) -> &mut Row {
        match setting {
            Setting::Alone => &mut self.alone,
            Setting::Beside => &mut self.beside,
            Setting::UnderWarden => &mut self.under_warden,
        }
    }
}

/// The experiment.
#[derive(Debug)]
pub struct Experiment<'a> {
    /// The programs that take part.
    pub programs: &'a Programs,
    /// Its size.
    pub scale: &'a Scale,
    /// When to stop early.
    pub interrupt: &'a Interrupt,
}

impl Experiment<'_> {
    /// Measures every setting several times, in turns, so that what else happens on the machine hits all alike, and
    /// watches what that is.
    /// `tell` hears of each repetition.
    ///
    /// # Errors
    /// If a program fails or takes too long, or the demo was asked to end.
    pub fn measure(&self, mut tell: impl FnMut(usize, &Times)) -> anyhow::Result<Times> {
        let start = Instant::now();
        let steps = self.steps()?;
        let mut times = Times::default();
        for repetition in 1..=MOST_REPETITIONS {
            let began = Instant::now();
            for setting in Setting::ALL {
                let watch = Watch::begin(&self.scale.ours)?;
                let row = times.row(setting);
                row.seconds.push(self.time(setting, steps)?);
                row.others.push(watch.others()?);
            }
            tell(repetition, &times);
            if repetition >= FEWEST_REPETITIONS && start.elapsed() + began.elapsed() > ALL_AT_MOST {
                break;
            }
        }
        Ok(times)
    }

    /// How many CPUs other programs use now.
    ///
    /// # Errors
    /// If that can't be read, or the demo was asked to end.
    pub fn others(&self) -> anyhow::Result<f64> {
        other_programs::look(&self.scale.ours, self.interrupt)
    }

    /// How many steps B gets, from a short trial.
    fn steps(&self) -> anyhow::Result<u64> {
        let alone = self.time(Setting::Alone, TRIAL_STEPS)?;
        let slower = (self.time(Setting::Beside, TRIAL_STEPS)? / alone).max(1.0);
        let wanted = ALONE_S.min(BESIDE_S / slower);
        // A count of steps: small, whole and positive.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let trials = (wanted / alone).ceil().clamp(1.0, 10_000.0) as u64;
        Ok(trials * TRIAL_STEPS)
    }

    /// B's time in a setting, in seconds. All that was started for it has ended then.
    fn time(&self, setting: Setting, steps: u64) -> anyhow::Result<f64> {
        let warden = match setting {
            Setting::UnderWarden => Some(Warden::start(self.programs, &self.scale.not_ours, self.interrupt)?),
            Setting::Alone | Setting::Beside => None,
        };
        let _a = match setting {
            Setting::Alone => None,
            Setting::Beside | Setting::UnderWarden => Some(self.start_a(warden.as_ref())?),
        };
        let mut b = self.start_b(warden.as_ref(), steps)?;
        let seconds = b.line(DONE_AT_MOST, self.interrupt)?;
        seconds.parse().with_context(|| format!("job B printed {seconds:?} where its time should be"))
    }

    /// Starts A, which runs until it goes away, and waits until all its workers run.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_a(&self, warden: Option<&Warden>) -> anyhow::Result<Program> {
        self.start("demo-a", warden, self.scale.a_cores, self.scale.a_workers, 0)
    }

    /// Starts B for so many steps (0: until it goes away), and waits until all its workers run.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_b(&self, warden: Option<&Warden>, steps: u64) -> anyhow::Result<Program> {
        self.start("demo-b", warden, self.scale.b_cores, self.scale.b_cores, steps)
    }

    fn start(
        &self,
        name: &str,
        warden: Option<&Warden>,
        cores: usize,
        workers: usize,
        steps: u64,
    ) -> anyhow::Result<Program> {
        let launcher = warden.map(|warden| warden.run(name, cores));
        self.programs.demo_job(launcher, name, (workers, steps), self.interrupt)
    }
}
