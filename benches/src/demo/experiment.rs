//! The experiment: job B's time alone, beside job A, and beside job A under the warden, interleaved.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::measure::other_programs::{self, CpuUseMeter};
use crate::measure::results::median;
use crate::programs::daemon::{PrivateWarden, Programs};
use crate::programs::interrupt::Interrupt;
use crate::programs::program::Program;
use crate::setup::scale::Scale;

/// How long B should take alone, in seconds.
const ALONE_SECONDS: f64 = 2.0;
/// How long B may take beside A, in seconds: on a large machine, where A's workers hold up B's more, B gets less to do.
const MAX_BESIDE_SECONDS: f64 = 15.0;
const TRIAL_STEPS: u64 = 40;
const MAX_REPETITIONS: usize = 5;
const MIN_REPETITIONS: usize = 3;
/// No further repetition is begun if it would end after this.
const MAX_DURATION: Duration = Duration::from_secs(75);
const B_TIMEOUT: Duration = Duration::from_secs(60);

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
pub struct SettingTimes {
    /// In seconds.
    pub seconds: Vec<f64>,
    /// How many CPUs other programs used meanwhile.
    pub others_cpus: Vec<f64>,
}

impl SettingTimes {
    /// The most that other programs used.
    #[must_use]
    pub fn max_others_cpus(&self) -> f64 {
        self.others_cpus.iter().copied().fold(0.0, f64::max)
    }

    /// Whether other programs are in the median: in half of the times or more.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let busy = self.others_cpus.iter().filter(|&&others| others >= other_programs::BUSY_CPUS).count();
        busy > 0 && 2 * busy >= self.others_cpus.len()
    }
}

/// B's times in every setting.
#[derive(Debug, Clone, Default)]
pub struct AllTimes {
    /// Alone.
    pub alone: SettingTimes,
    /// Beside A.
    pub beside: SettingTimes,
    /// Beside A under the warden.
    pub under_warden: SettingTimes,
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

impl AllTimes {
    /// The medians, once there are times.
    #[must_use]
    pub fn medians(&self) -> Option<Medians> {
        Some(Medians {
            repetitions: self.alone.seconds.len(),
            alone_s: median(&self.alone.seconds)?,
            beside_s: median(&self.beside.seconds)?,
            under_warden_s: median(&self.under_warden.seconds)?,
            others_cpus: self.settings().into_iter().map(SettingTimes::max_others_cpus).fold(0.0, f64::max),
        })
    }

    /// All three.
    #[must_use]
    pub fn settings(&self) -> [&SettingTimes; 3] {
        [&self.alone, &self.beside, &self.under_warden]
    }

    fn times_of(&mut self, setting: Setting) -> &mut SettingTimes {
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
    /// `report` hears of each repetition.
    ///
    /// # Errors
    /// If a program fails or takes too long, or the demo was asked to end.
    pub fn measure(&self, mut report: impl FnMut(usize, &AllTimes)) -> anyhow::Result<AllTimes> {
        let started_at = Instant::now();
        let steps = self.choose_steps()?;
        let mut times = AllTimes::default();
        for repetition in 1..=MAX_REPETITIONS {
            let repetition_began = Instant::now();
            for setting in Setting::ALL {
                let meter = CpuUseMeter::start(&self.scale.usable_pus)?;
                let own = times.times_of(setting);
                own.seconds.push(self.measure_b(setting, steps)?);
                own.others_cpus.push(meter.used_by_others()?);
            }
            report(repetition, &times);
            if repetition >= MIN_REPETITIONS
                && started_at.elapsed() + repetition_began.elapsed() > MAX_DURATION
            {
                break;
            }
        }
        Ok(times)
    }

    /// How many CPUs other programs use now.
    ///
    /// # Errors
    /// If that can't be read, or the demo was asked to end.
    pub fn used_by_others(&self) -> anyhow::Result<f64> {
        other_programs::measure_cpu_use(&self.scale.usable_pus, self.interrupt)
    }

    /// How many steps B gets, from a short trial.
    fn choose_steps(&self) -> anyhow::Result<u64> {
        let alone = self.measure_b(Setting::Alone, TRIAL_STEPS)?;
        let slower = (self.measure_b(Setting::Beside, TRIAL_STEPS)? / alone).max(1.0);
        let wanted = ALONE_SECONDS.min(MAX_BESIDE_SECONDS / slower);
        // A count of steps: small, whole and positive.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let trials = (wanted / alone).ceil().clamp(1.0, 10_000.0) as u64;
        Ok(trials * TRIAL_STEPS)
    }

    /// B's time in a setting, in seconds. All that was started for it has ended then.
    fn measure_b(&self, setting: Setting, steps: u64) -> anyhow::Result<f64> {
        let warden = match setting {
            Setting::UnderWarden => {
                Some(PrivateWarden::start(self.programs, &self.scale.unusable_pus, self.interrupt)?)
            }
            Setting::Alone | Setting::Beside => None,
        };
        let _a = match setting {
            Setting::Alone => None,
            Setting::Beside | Setting::UnderWarden => Some(self.start_a(warden.as_ref())?),
        };
        let mut b = self.start_b(warden.as_ref(), steps)?;
        let seconds = b.read_line(B_TIMEOUT, self.interrupt)?;
        seconds.parse().with_context(|| format!("job B printed {seconds:?} where its time should be"))
    }

    /// Starts A, which runs until it goes away, and waits until all its workers run.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_a(&self, warden: Option<&PrivateWarden>) -> anyhow::Result<Program> {
        self.start_job("demo-a", warden, self.scale.a_cores, self.scale.a_workers, 0)
    }

    /// Starts B for so many steps (0: until it goes away), and waits until all its workers run.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_b(&self, warden: Option<&PrivateWarden>, steps: u64) -> anyhow::Result<Program> {
        self.start_job("demo-b", warden, self.scale.b_cores, self.scale.b_cores, steps)
    }

    fn start_job(
        &self,
        name: &str,
        warden: Option<&PrivateWarden>,
        cores: usize,
        workers: usize,
        steps: u64,
    ) -> anyhow::Result<Program> {
        let launcher = warden.map(|warden| warden.run_command(name, cores));
        self.programs.start_demo_job(launcher, name, (workers, steps), self.interrupt)
    }
}
