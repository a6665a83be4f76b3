//! Measures how well a job is isolated from another job. The time of job B of the demo is measured alone, and beside
//! job A: without separation, with a cgroup of fair CPU weight for each job, with both jobs bound by taskset, and with
//! pjwd. Then two MPI programs run at the same time. Each of them binds its ranks to the first cores of the machine.
//! The time of each is measured without separation and with pjwd, and compared with its time alone. `--only mpi`
//! measures the MPI programs only.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::load::mpi::{self, MpiLauncher};
use pjw_benches::measure::results::{Figure, ceil_count, median, print_line, publish};
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::programs::daemon::{PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::{Scale, pus_of};
use pjw_core::cpuset::CpuSet;

const JOB_TIMEOUT: Duration = Duration::from_secs(300);
const TRIAL_STEPS: u64 = 40;

/// How the two jobs are separated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Separation {
    /// There is only job B.
    Alone,
    /// The jobs run without separation.
    Nothing,
    /// Each job has a cgroup with a CPU weight in proportion to its cores.
    Weights,
    /// Each job is bound to its PUs by taskset(1).
    Taskset,
    /// pjwd keeps each job on its cores.
    Warden,
}

/// All separations. pjwd is the last one, with which the others are compared.
const SEPARATIONS: [Separation; 5] =
    [Separation::Alone, Separation::Nothing, Separation::Weights, Separation::Taskset, Separation::Warden];

impl Separation {
    fn name(self) -> &'static str {
        match self {
            Separation::Alone => "alone",
            Separation::Nothing => "nothing between them",
            Separation::Weights => "a cgroup of fair weight for each",
            Separation::Taskset => "taskset by hand",
            Separation::Warden => "pjwd",
        }
    }
}

/// How a job is started. At most one field is set. The referenced values must live until the job has ended.
struct JobLauncher<'a> {
    warden: Option<&'a PrivateWarden>,
    cgroup: Option<&'a Cgroup>,
    cpus: Option<&'a CpuSet>,
}

impl JobLauncher<'_> {
    /// Returns the beginning of a command that starts a job: with pjwd as the job `name` with `cores` cores, in the
    /// cgroup, or with taskset(1). `None` if the job is not separated.
    fn command(&self, name: &str, cores: usize) -> Option<Command> {
        match self {
            JobLauncher { warden: Some(warden), .. } => Some(warden.run_command(name, cores)),
            JobLauncher { cgroup: Some(cgroup), .. } => Some(cgroup.run_command()),
            JobLauncher { cpus: Some(cpus), .. } => {
                let mut command = Command::new("taskset");
                command.arg("-c").arg(cpus.to_string());
                Some(command)
            }
            _ => None,
        }
    }
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    scale: Scale,
    programs: Programs,
    /// The PUs of job A and of job B for taskset.
    halves: (CpuSet, CpuSet),
}

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let halves = halves(&scale);
    let bench = Bench { effort, interrupt, scale, programs, halves };
    let only_mpi = std::env::args().any(|argument| argument == "mpi");
    let mut figures = if only_mpi { Vec::new() } else { bench.compare_two_jobs()? };
    for mpi in mpi::LAUNCHERS {
        match mpi.check_installed() {
            Ok(()) => figures.extend(bench.compare_two_mpi_runs(mpi)?),
            Err(why) => print_line(&format!("skipped: {}: {why:#}", mpi.name))?,
        }
    }
    publish(if only_mpi { "isolation-mpi" } else { "isolation" }, &figures)
}

/// Returns the PUs of the first cores for job A, and of the other cores for job B.
fn halves(scale: &Scale) -> (CpuSet, CpuSet) {
    let (a, b) = scale.usable_cores.split_at(scale.a_cores);
    (pus_of(a), pus_of(b))
}

impl Bench {
    /// Measures the run time of job B alone and beside job A, for each way to separate the jobs, in turns. Skips a way
    /// that is not possible on this machine. Prints the medians, and returns the figures.
    fn compare_two_jobs(&self) -> anyhow::Result<Vec<Figure>> {
        let steps = self.choose_steps()?;
        let mut times: [Vec<f64>; SEPARATIONS.len()] = Default::default();
        let mut skipped = Vec::new();
        for round in 0..self.effort.pick(1, 5) {
            for turn in 0..SEPARATIONS.len() {
                let at = (turn + round) % SEPARATIONS.len();
                if skipped.contains(&at) {
                    continue;
                }
                match self.measure_b(SEPARATIONS[at], steps) {
                    Ok(seconds) => times[at].push(seconds),
                    Err(why) => {
                        self.interrupt.check()?;
                        print_line(&format!("skipped: {}: {why:#}", SEPARATIONS[at].name()))?;
                        skipped.push(at);
                    }
                }
            }
        }
        let medians = times.each_ref().map(|times| median(times));
        let [.., under_warden] = medians;
        let mut figures = Vec::new();
        for (separation, time) in SEPARATIONS.iter().zip(&medians) {
            let Some(time) = time else { continue };
            print_line(&format!("job B, {}: {time:.3} s", separation.name()))?;
            if let Some(under_warden) = under_warden.filter(|_| *separation != Separation::Warden) {
                figures.push(Figure::new("job B with pjwd", under_warden, "s", separation.name(), *time));
            }
        }
        Ok(figures)
    }

    /// Chooses the number of steps of B, by two short trial runs. B alone takes 2 s (0.3 s with `--quick`), or less
    /// if it would take more than 15 s (2 s) without separation.
    fn choose_steps(&self) -> anyhow::Result<u64> {
        let alone = self.measure_b(Separation::Alone, TRIAL_STEPS)?;
        let slowdown = (self.measure_b(Separation::Nothing, TRIAL_STEPS)? / alone).max(1.0);
        let (wanted, most) = self.effort.pick((0.3, 2.0), (2.0, 15.0));
        Ok(ceil_count(f64::min(wanted, most / slowdown) / alone, 10_000) * TRIAL_STEPS)
    }

    /// Runs job B, beside job A unless `separation` is [`Separation::Alone`]. Returns the time of B in seconds. Every
    /// process that was started has ended when this function returns.
    fn measure_b(&self, separation: Separation, steps: u64) -> anyhow::Result<f64> {
        let warden = (separation == Separation::Warden).then(|| self.start_warden()).transpose()?;
        let cgroups = (separation == Separation::Weights).then(|| self.make_cgroups()).transpose()?;
        let halves = (separation == Separation::Taskset).then_some(&self.halves);
        let launcher = |is_a: bool| JobLauncher {
            warden: warden.as_ref(),
            cgroup: cgroups.as_ref().map(|(a, b)| if is_a { a } else { b }),
            cpus: halves.map(|(a, b)| if is_a { a } else { b }),
        };
        let Scale { a_cores, b_cores, a_workers, .. } = self.scale;
        let _a = match separation {
            Separation::Alone => None,
            _ => {
                let command = launcher(true).command("isolation-a", a_cores);
                Some(self.start_job(command, "job A", (a_workers, 0))?)
            }
        };
        let command = launcher(false).command("isolation-b", b_cores);
        let mut b = self.start_job(command, "job B", (b_cores, steps))?;
        let seconds = b.read_line(JOB_TIMEOUT, &self.interrupt)?;
        seconds.parse().with_context(|| format!("job B printed {seconds:?} instead of its time"))
    }

    fn start_job(
        &self,
        launcher: Option<Command>,
        name: &str,
        size: (usize, u64),
    ) -> anyhow::Result<Program> {
        self.programs.start_demo_job(launcher, name, size, &self.interrupt)
    }

    fn start_warden(&self) -> anyhow::Result<PrivateWarden> {
        PrivateWarden::start(&self.programs, &self.scale.unusable_pus, &self.interrupt)
    }

    fn make_cgroups(&self) -> anyhow::Result<(Cgroup, Cgroup)> {
        let (a, b) = (Cgroup::new("cpu", "a")?, Cgroup::new("cpu", "b")?);
        a.set_weight(self.scale.a_cores)?;
        b.set_weight(self.scale.b_cores)?;
        Ok((a, b))
    }

    /// Runs two MPI programs at the same time, each with as many ranks as half the cores. Prints a table with the time
    /// of each of them against its time alone.
    fn compare_two_mpi_runs(&self, mpi: MpiLauncher) -> anyhow::Result<Vec<Figure>> {
        let temporary_dir =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        let ranks = self.scale.b_cores;
        let job = self.programs.path("pjw-demo-job");
        let launch = |launcher, steps| {
            mpi.launch(launcher, (ranks, steps), &job, temporary_dir.path(), &self.interrupt)
        };
        let run_one = |steps| launch(None, steps)?.slowest_seconds(&self.interrupt);
        let trial = run_one(TRIAL_STEPS)?;
        let steps = ceil_count(self.effort.pick(0.5, 4.0) / trial, 10_000) * TRIAL_STEPS;
        let run_two = |warden: Option<&PrivateWarden>| {
            let launcher = |name| warden.map(|warden| warden.run_command(name, ranks));
            let (first, second) = (launch(launcher("mpi-a"), steps)?, launch(launcher("mpi-b"), steps)?);
            anyhow::Ok([first.slowest_seconds(&self.interrupt)?, second.slowest_seconds(&self.interrupt)?])
        };
        let mut times = MpiTimes::default();
        for round in 0..self.effort.pick(1, 5) {
            for turn in 0..3 {
                match (turn + round) % 3 {
                    0 => times.alone.push(run_one(steps)?),
                    1 => times.unseparated.push(run_two(None)?),
                    _ => times.under_warden.push(run_two(Some(&self.start_warden()?))?),
                }
            }
        }
        times.figures(mpi.name)
    }
}

/// The times of two MPI runs that are started together, one entry for each round. The unit is seconds.
#[derive(Debug, Default)]
struct MpiTimes {
    /// One run alone.
    alone: Vec<f64>,
    /// Both runs, without pjwd.
    unseparated: Vec<[f64; 2]>,
    /// Both runs, each in a job of pjwd.
    under_warden: Vec<[f64; 2]>,
}

impl MpiTimes {
    /// Prints the table of the run times, and returns the figures of the slower one of the two runs. `name` is the name
    /// of the MPI program.
    fn figures(&self, name: &str) -> anyhow::Result<Vec<Figure>> {
        let median_of_run = |rounds: &[[f64; 2]], run: usize| {
            median(&rounds.iter().filter_map(|times| times.get(run).copied()).collect::<Vec<_>>())
        };
        let median_of_slower = |rounds: &[[f64; 2]]| {
            median(&rounds.iter().map(|[first, second]| first.max(*second)).collect::<Vec<_>>())
        };
        let medians =
            (median(&self.alone), median_of_slower(&self.unseparated), median_of_slower(&self.under_warden));
        let (Some(alone), Some(unseparated), Some(under_warden)) = medians else {
            bail!("nothing was measured")
        };
        print_line(&format!("two runs of {name}, started together; one run alone takes {alone:.3} s"))?;
        print_line("run      without pjwd   of alone   with pjwd   of alone")?;
        for (number, label) in ["first", "second"].into_iter().enumerate() {
            let times = (median_of_run(&self.unseparated, number), median_of_run(&self.under_warden, number));
            let (Some(without), Some(with)) = times else { bail!("nothing was measured") };
            print_line(&format!(
                "{label:6} {without:12.3} s {:10.3} {with:9.3} s {:10.3}",
                without / alone,
                with / alone
            ))?;
        }
        let what = format!("two {name} runs with pjwd");
        Ok(vec![
            Figure::new(&what, under_warden, "s", "the same with nothing between them", unseparated),
            Figure::new(&what, under_warden, "s", "one run alone", alone),
        ])
    }
}
