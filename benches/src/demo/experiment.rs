//! The experiment: the time of job B alone, beside job A, and beside job A with pjwd. The three settings take turns.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::measure::other_programs::{self, CpuUseMeter};
use crate::measure::results::{ceil_count, median};
use crate::programs::daemon::{PrivateWarden, Programs};
use crate::programs::interrupt::StopSignal;
use crate::programs::program::Program;
use crate::setup::effort::Effort;
use crate::setup::scale::Scale;

/// The time that job B takes alone, in seconds. The number of steps is chosen for it.
const ALONE_SECONDS: f64 = 2.0;
/// The most time that job B takes beside job A, in seconds. On a large machine the workers of A delay B more, so B
/// gets fewer steps.
const MAX_BESIDE_SECONDS: f64 = 15.0;
/// The number of steps of job B in a trial run, from whose time the number of steps is chosen.
const TRIAL_STEPS: u64 = 40;
/// The most repetitions of a measurement.
const MAX_REPETITIONS: usize = 5;
/// The fewest repetitions without [`Effort::Quick`], also if they take longer than [`MAX_DURATION`].
const MIN_REPETITIONS: usize = 3;
/// No further repetition is started that would end after this time, counted from the start of the experiment.
const MAX_DURATION: Duration = Duration::from_secs(75);
/// The longest run time of job B. A longer run is an error.
const B_TIMEOUT: Duration = Duration::from_secs(60);

/// The setting of one measurement of the demo. The demo runs two jobs, A and B, and measures the run time of job B. In
/// the setting, job B runs alone, beside job A, or beside job A with pjwd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Job B runs alone.
    Alone,
    /// Job B runs beside job A, without pjwd.
    Beside,
    /// Job B runs beside job A, and pjwd keeps both jobs on their cores.
    UnderWarden,
}

impl Setting {
    /// All settings, in the order of the measurements.
    const ALL: [Self; 3] = [Self::Alone, Self::Beside, Self::UnderWarden];
}

/// The measured run times of job B of the demo in one setting, such as "beside job A". Each repetition of the
/// measurement has one time.
#[derive(Debug, Clone, Default)]
pub struct SettingTimes {
    /// The run time of job B in each repetition, in seconds.
    pub seconds: Vec<f64>,
    /// How many CPUs other programs (neither the demo nor its jobs) used during each repetition, on average. For
    /// example 1.7.
    pub others_cpus: Vec<f64>,
}

impl SettingTimes {
    /// Returns the largest number of CPUs that other programs (neither the demo nor its jobs) used during one
    /// repetition, on average. 0 if there was no repetition.
    #[must_use]
    pub fn max_others_cpus(&self) -> f64 {
        self.others_cpus.iter().copied().fold(0.0, f64::max)
    }

    /// Returns whether the measured times are unreliable, because other programs kept the machine busy in at least half
    /// of the repetitions. In a busy repetition, other programs used at least [`BUSY_CPUS`](other_programs::BUSY_CPUS)
    /// CPUs. False if there was no repetition.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let busy = self.others_cpus.iter().filter(|&&others| others >= other_programs::BUSY_CPUS).count();
        busy > 0 && 2 * busy >= self.others_cpus.len()
    }
}

/// The measured run times of job B of the demo in the three settings: alone, beside job A, and beside job A with pjwd.
#[derive(Debug, Clone, Default)]
pub struct ExperimentTimes {
    /// The run times of job B alone.
    pub alone: SettingTimes,
    /// The run times of job B beside job A, without pjwd.
    pub beside: SettingTimes,
    /// The run times of job B beside job A, with pjwd.
    pub under_warden: SettingTimes,
}

/// The median run times of job B of the demo in the three settings: alone, beside job A, and beside job A with pjwd.
/// The demo writes them to `target/demo/result.json`, so the names of the fields must not change.
#[derive(Debug, Clone, Serialize)]
pub struct Medians {
    /// The number of repetitions of each measurement.
    pub repetitions: usize,
    /// The median run time of job B alone, in seconds.
    pub alone_s: f64,
    /// The median run time of job B beside job A without pjwd, in seconds.
    pub beside_s: f64,
    /// The median run time of job B beside job A with pjwd, in seconds.
    pub under_warden_s: f64,
    /// The largest number of CPUs that other programs (neither the demo nor its jobs) used during one measurement, on
    /// average.
    pub others_cpus: f64,
}

impl ExperimentTimes {
    /// Returns the median of the measured run times of job B in each of the three settings: alone, beside job A, and
    /// beside job A with pjwd. `None` before the first repetition.
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

    /// Returns the measured run times of job B in the three settings, in this order: alone, beside job A, beside job A
    /// with pjwd.
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

/// The experiment of the demo: measures the run time of a job B alone, beside a job A, and beside job A with pjwd.
/// Contains the programs to start, the sizes of the jobs, and a flag that interrupts the experiment.
#[derive(Debug)]
pub struct Experiment<'a> {
    /// The directories of the programs that the experiment starts.
    pub programs: &'a Programs,
    /// The numbers of cores and workers of the two jobs.
    pub scale: &'a Scale,
    /// The flag that is set when the user interrupts the demo. The experiment then ends with an error.
    pub interrupt: &'a StopSignal,
}

impl Experiment<'_> {
    /// Measures the run time of job B in each of three settings: alone, beside job A, and beside job A with pjwd.
    /// Measures each setting three to five times, or once with [`Effort::Quick`]. The settings take turns, so that
    /// other load on the machine affects them alike. Also measures how many CPUs other programs use. After each
    /// repetition, calls `report` with its number, from 1, and with all times measured so far.
    ///
    /// # Errors
    /// If a program fails or takes too long, or if the demo was interrupted.
    pub fn measure(
        &self,
        effort: Effort,
        mut report: impl FnMut(usize, &ExperimentTimes),
    ) -> anyhow::Result<ExperimentTimes> {
        let started_at = Instant::now();
        let steps = self.choose_steps()?;
        let mut times = ExperimentTimes::default();
        for repetition in 1..=effort.pick(1, MAX_REPETITIONS) {
            let repetition_began = Instant::now();
            for setting in Setting::ALL {
                let meter = CpuUseMeter::start(&self.scale.usable_pus)?;
                let setting_times = times.times_of(setting);
                setting_times.seconds.push(self.measure_b(setting, steps)?);
                setting_times.others_cpus.push(meter.used_by_others()?);
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

    /// Measures how many CPUs of this machine other programs use on average during the next 500 ms.
    ///
    /// # Errors
    /// If the CPU use can't be read, or if the demo was interrupted.
    pub fn used_by_others(&self) -> anyhow::Result<f64> {
        other_programs::measure_cpu_use(&self.scale.usable_pus, self.interrupt)
    }

    /// Chooses the number of steps of B, by two short trial runs.
    fn choose_steps(&self) -> anyhow::Result<u64> {
        let alone = self.measure_b(Setting::Alone, TRIAL_STEPS)?;
        let slowdown = (self.measure_b(Setting::Beside, TRIAL_STEPS)? / alone).max(1.0);
        let wanted = ALONE_SECONDS.min(MAX_BESIDE_SECONDS / slowdown);
        Ok(ceil_count(wanted / alone, 10_000) * TRIAL_STEPS)
    }

    /// Runs job B with `steps` steps in the setting `setting`, and returns its run time in seconds. Starts what the
    /// setting needs besides: job A, and a private pjwd. Every process that was started has ended when this function
    /// returns.
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
        seconds.parse().with_context(|| format!("job B printed {seconds:?} instead of its time"))
    }

    /// Starts job A of the demo, and waits until all its workers run. Job A runs until the returned value is dropped.
    /// If `warden` is not `None`, job A is a job of this private pjwd.
    ///
    /// # Errors
    /// If the job can't be started.
    pub fn start_a(&self, warden: Option<&PrivateWarden>) -> anyhow::Result<Program> {
        self.start_job("demo-a", warden, self.scale.a_cores, self.scale.a_workers, 0)
    }

    /// Starts job B of the demo, and waits until all its workers run. The job ends after `steps` computing steps. If
    /// `steps` is 0, the job runs until the returned value is dropped. If `warden` is not `None`, job B is a job of
    /// this private pjwd.
    ///
    /// # Errors
    /// If the job can't be started.
    pub fn start_b(&self, warden: Option<&PrivateWarden>, steps: u64) -> anyhow::Result<Program> {
        self.start_job("demo-b", warden, self.scale.b_cores, self.scale.b_cores, steps)
    }

    /// Starts a demo job with the name `name`. The job has `workers` worker threads and ends after `steps` steps, or
    /// never if `steps` is 0. If `warden` is given, the job gets `cores` cores from this private pjwd. Otherwise no
    /// pjwd knows the job.
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
