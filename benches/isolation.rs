//! How well a job is kept from another: the demo's job B alone, and beside its job A with nothing between them, with a
//! cgroup of fair weight for each, with both bound by hand, and under the warden. Then two MPI runs, started apart, each
//! of which binds its ranks to the machine's first cores, with nothing and under the warden.
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::load::mpi::{self, Mpi};
use pjw_benches::measure::results::{Figure, at_least, median, publish, say};
use pjw_benches::peers::cgroups::Cgroup;
use pjw_benches::programs::daemon::{Programs, Warden};
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::programs::program::Program;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;
use pjw_core::cpuset::CpuSet;

const DONE_AT_MOST: Duration = Duration::from_secs(300);
const TRIAL_STEPS: u64 = 40;

/// What is between the two jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Between {
    /// There is no other job.
    Alone,
    Nothing,
    Weights,
    Hand,
    Warden,
}

const ALL: [Between; 5] =
    [Between::Alone, Between::Nothing, Between::Weights, Between::Hand, Between::Warden];

impl Between {
    fn name(self) -> &'static str {
        match self {
            Between::Alone => "alone",
            Between::Nothing => "nothing between them",
            Between::Weights => "a cgroup of fair weight for each",
            Between::Hand => "taskset by hand",
            Between::Warden => "the warden",
        }
    }
}

/// What runs a job's program, and what must stay until it has ended.
struct Place<'a> {
    warden: Option<&'a Warden>,
    group: Option<&'a Cgroup>,
    cpus: Option<&'a CpuSet>,
}

impl Place<'_> {
    fn command(&self, name: &str, cores: usize) -> Option<Command> {
        match self {
            Place { warden: Some(warden), .. } => Some(warden.run(name, cores)),
            Place { group: Some(group), .. } => Some(group.run()),
            Place { cpus: Some(cpus), .. } => {
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
    interrupt: Interrupt,
    scale: Scale,
    programs: Programs,
    /// By hand: A's PUs and B's.
    halves: (CpuSet, CpuSet),
}

fn main() -> anyhow::Result<()> {
    let Setup { effort, interrupt, programs, scale } = Setup::find()?;
    let halves = halves(&scale);
    let bench = Bench { effort, interrupt, scale, programs, halves };
    let mut figures = bench.two_jobs()?;
    for mpi in mpi::ALL {
        match mpi.find() {
            Ok(()) => figures.extend(bench.two_mpis(mpi)?),
            Err(why) => say(&format!("skipped: {}: {why:#}", mpi.name))?,
        }
    }
    publish("isolation", &figures)
}

/// The first cores for A, the others for B.
fn halves(scale: &Scale) -> (CpuSet, CpuSet) {
    let join = |cores: &[CpuSet]| cores.iter().fold(CpuSet::new(), |all, core| all.union(core));
    let (a, b) = scale.whole_cores.split_at(scale.a_cores);
    (join(a), join(b))
}

impl Bench {
    fn two_jobs(&self) -> anyhow::Result<Vec<Figure>> {
        let steps = self.steps()?;
        let mut times: [Vec<f64>; ALL.len()] = Default::default();
        let mut skipped = Vec::new();
        for round in 0..self.effort.pick(1, 5) {
            for turn in 0..ALL.len() {
                let at = (turn + round) % ALL.len();
                if skipped.contains(&at) {
                    continue;
                }
                match self.time(ALL[at], steps) {
                    Ok(seconds) => times[at].push(seconds),
                    Err(why) => {
                        self.interrupt.check()?;
                        say(&format!("skipped: {}: {why:#}", ALL[at].name()))?;
                        skipped.push(at);
                    }
                }
            }
        }
        let medians: Vec<Option<f64>> = times.iter().map(|times| median(times)).collect();
        let mut figures = Vec::new();
        for (between, time) in ALL.iter().zip(&medians) {
            let Some(time) = time else { continue };
            say(&format!("job B, {}: {time:.3} s", between.name()))?;
            let warded = medians.last().copied().flatten();
            if let Some(warded) = warded.filter(|_| *between != Between::Warden) {
                figures.push(Figure::new("job B under the warden", warded, "s", between.name(), *time));
            }
        }
        Ok(figures)
    }

    /// How many steps B gets: as many as take so long alone, and not too long where it is slowest.
    fn steps(&self) -> anyhow::Result<u64> {
        let alone = self.time(Between::Alone, TRIAL_STEPS)?;
        let slower = (self.time(Between::Nothing, TRIAL_STEPS)? / alone).max(1.0);
        let (wanted, most) = self.effort.pick((0.3, 2.0), (2.0, 15.0));
        Ok(at_least(f64::min(wanted, most / slower) / alone, 10_000) * TRIAL_STEPS)
    }

    /// B's time in seconds. All that was started for it has ended then.
    fn time(&self, between: Between, steps: u64) -> anyhow::Result<f64> {
        let warden = (between == Between::Warden).then(|| self.warden()).transpose()?;
        let groups = (between == Between::Weights).then(|| self.groups()).transpose()?;
        let by_hand = (between == Between::Hand).then_some(&self.halves);
        let place = |of_a: bool| Place {
            warden: warden.as_ref(),
            group: groups.as_ref().map(|(a, b)| if of_a { a } else { b }),
            cpus: by_hand.map(|(a, b)| if of_a { a } else { b }),
        };
        let Scale { a_cores, b_cores, a_workers, .. } = self.scale;
        let _a = match between {
            Between::Alone => None,
            _ => Some(self.start(place(true).command("isolation-a", a_cores), "job A", (a_workers, 0))?),
        };
        let mut b = self.start(place(false).command("isolation-b", b_cores), "job B", (b_cores, steps))?;
        let seconds = b.line(DONE_AT_MOST, &self.interrupt)?;
        seconds.parse().with_context(|| format!("job B printed {seconds:?} where its time should be"))
    }

    fn start(&self, launcher: Option<Command>, name: &str, size: (usize, u64)) -> anyhow::Result<Program> {
        self.programs.demo_job(launcher, name, size, &self.interrupt)
    }

    fn warden(&self) -> anyhow::Result<Warden> {
        Warden::start(&self.programs, &self.scale.not_ours, &self.interrupt)
    }

    fn groups(&self) -> anyhow::Result<(Cgroup, Cgroup)> {
        let (a, b) = (Cgroup::new("cpu", "a")?, Cgroup::new("cpu", "b")?);
        a.weigh(self.scale.a_cores)?;
        b.weigh(self.scale.b_cores)?;
        Ok((a, b))
    }

    /// Two runs of half the machine's ranks each, and the time of the slower one.
    fn two_mpis(&self, mpi: Mpi) -> anyhow::Result<Vec<Figure>> {
        let scratch =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        let ranks = self.scale.b_cores;
        let job = self.programs.path("pjw-demo-job");
        let launch =
            |before, steps| mpi.launch(before, (ranks, steps), &job, scratch.path(), &self.interrupt);
        let one = |steps| launch(None, steps)?.seconds(&self.interrupt);
        let trial = one(TRIAL_STEPS)?;
        let steps = at_least(self.effort.pick(0.5, 4.0) / trial, 10_000) * TRIAL_STEPS;
        let two = |warden: Option<&Warden>| {
            let run = |name| warden.map(|warden| warden.run(name, ranks));
            let (first, second) = (launch(run("mpi-a"), steps)?, launch(run("mpi-b"), steps)?);
            anyhow::Ok(first.seconds(&self.interrupt)?.max(second.seconds(&self.interrupt)?))
        };
        let (mut alone, mut free, mut warded) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..self.effort.pick(1, 5) {
            for turn in 0..3 {
                match (turn + round) % 3 {
                    0 => alone.push(one(steps)?),
                    1 => free.push(two(None)?),
                    _ => warded.push(two(Some(&self.warden()?))?),
                }
            }
        }
        let medians = [&alone, &free, &warded].map(|times| median(times));
        let [Some(alone), Some(free), Some(warded)] = medians else { bail!("nothing was measured") };
        let name = mpi.name;
        say(&format!(
            "{name}: one run alone {alone:.3} s, two {free:.3} s, two under the warden {warded:.3} s"
        ))?;
        let what = format!("two {name} runs under the warden");
        Ok(vec![
            Figure::new(&what, warded, "s", "the same with nothing between them", free),
            Figure::new(&what, warded, "s", "one run alone", alone),
        ])
    }
}
