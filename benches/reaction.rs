//! Measures how long a new process runs outside its job's cores: from its fork until it has the right mask. The
//! processes are measured on an idle machine and beside 1,000 forks each second. The programs that set the mask are
//! pjwd, a pjwd that polls every second, `cgrulesengd` of libcgroup, and, as the lower limit, a listener that only
//! sets the mask.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::load::fork_load::ForkLoad;
use pjw_benches::load::forker::{self, Forker, ReactionTimes, WorkerStart};
use pjw_benches::measure::results::{Figure, print_line, publish, quantile};
use pjw_benches::peers::cgrulesengd::{Cgrulesengd, find_sleep};
use pjw_benches::peers::fork_listener::{self, ForkListener};
use pjw_benches::programs::daemon::{EventSource, PrivateWarden, Programs};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;
use pjw_core::cpuset::CpuSet;

const FORKS_PER_SECOND: u32 = 1000;
/// The longest pause between two workers: long enough that one worker does not affect the next.
const PAUSE: Duration = Duration::from_millis(40);
/// The longest pause between two workers of a pjwd that polls every second. The workers start at any time of its
/// interval.
const POLLING_PAUSE: Duration = Duration::from_secs(1);

/// The program that sets the mask of the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Method {
    /// No program: the worker inherits the right mask. The time is that of fork and exec.
    ForkAlone,
    /// pjwd with process events.
    Warden(Case),
    /// A listener that sets the mask by one system call.
    ForkListener(Case),
    /// pjwd without process events.
    Polling,
    /// The rule daemon of libcgroup.
    Cgrulesengd,
}

/// The mask of a worker at its fork, if the worker is in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    /// The worker inherits the right mask.
    RightMask,
    /// The worker starts outside its job's cores.
    Outside,
    /// The worker inherits the pin of a hot thread.
    OnPin,
}

const METHODS: [Method; 8] = [
    Method::ForkAlone,
    Method::Warden(Case::RightMask),
    Method::Warden(Case::Outside),
    Method::Warden(Case::OnPin),
    Method::ForkListener(Case::Outside),
    Method::ForkListener(Case::OnPin),
    Method::Polling,
    Method::Cgrulesengd,
];

impl Method {
    fn name(self) -> &'static str {
        match self {
            Method::ForkAlone => "fork and exec alone",
            Method::Warden(Case::RightMask) => "born right (trivial)",
            Method::Warden(Case::Outside) => "born outside its job",
            Method::Warden(Case::OnPin) => "born on a busy parent's pin",
            Method::ForkListener(Case::OnPin) => "the bare calls, on a busy parent's pin",
            Method::ForkListener(_) => "the bare calls: the event, sched_setaffinity",
            Method::Polling => "pjwd without events, polling every 1 s",
            Method::Cgrulesengd => "cgrulesengd (libcgroup)",
        }
    }
}

/// A method, and whether the load of other forks ran beside it.
type Key = (Method, bool);

fn main() -> anyhow::Result<()> {
    forker::run_as_forker()?;
    fork_listener::run_as_fork_listener()?;
    let Setup { effort, interrupt, programs, scale } = Setup::prepare()?;
    let cores = (scale.usable_cores[0].clone(), scale.usable_cores[0].union(&scale.usable_cores[1]));
    let bench = Bench { effort, interrupt, programs, scale, cores, sleep: find_sleep()? };
    let mut all_times: BTreeMap<Key, ReactionTimes> = BTreeMap::new();
    let mut skipped: Vec<Method> = Vec::new();
    for round in 0..effort.pick(1, 5) {
        // The methods take turns, so that other load on the machine affects them alike.
        for with_forks in [round % 2 == 1, round % 2 == 0] {
            let fork_load = with_forks.then(|| ForkLoad::start(FORKS_PER_SECOND)).transpose()?;
            for method in METHODS {
                bench.interrupt.check()?;
                if skipped.contains(&method) {
                    continue;
                }
                match bench.measure(method) {
                    Ok(times) => all_times.entry((method, with_forks)).or_default().extend(times),
                    Err(error) => {
                        bench.interrupt.check()?;
                        print_line(&format!("skipped: {}: {error:#}", method.name()))?;
                        skipped.push(method);
                    }
                }
            }
            if let Some(fork_load) = fork_load {
                print_line(&format!(
                    "the load: {:.0} forks a second on the whole machine",
                    fork_load.forks_per_second()?
                ))?;
            }
        }
    }
    print_times(&all_times)?;
    publish("reaction", &figures(&all_times)?)
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    programs: Programs,
    scale: Scale,
    /// The PUs of one core, and of two cores.
    cores: (CpuSet, CpuSet),
    /// The path of sleep(1), the program of the workers.
    sleep: PathBuf,
}

impl Bench {
    /// Measures the workers of one method, in one round.
    fn measure(&self, method: Method) -> anyhow::Result<ReactionTimes> {
        let workers = self.effort.pick(12, 60);
        let (one, two) = &self.cores;
        match method {
            Method::ForkAlone => {
                self.fork(None, WorkerStart::RightMask, (workers, PAUSE), &self.scale.usable_pus, &self.sleep)
            }
            Method::Warden(Case::RightMask) => self.fork_under_warden(WorkerStart::RightMask, workers, one),
            Method::Warden(Case::Outside) => self.fork_under_warden(WorkerStart::OutsideJob, workers, one),
            Method::Warden(Case::OnPin) => self.fork_under_warden(WorkerStart::OnPin, workers, two),
            Method::ForkListener(case) => {
                let (worker_start, mask) = if case == Case::OnPin {
                    (WorkerStart::OnPin, two)
                } else {
                    (WorkerStart::OutsideJob, one)
                };
                let forker =
                    Forker::start(worker_start, (workers, PAUSE), mask, &self.sleep, &self.interrupt)?;
                let listener = ForkListener::start(forker.pid(), one, mask, &self.interrupt)?;
                let times = forker.wait_for_times(&self.interrupt)?;
                let kernel_clock_ms = listener.reaction_times_ms(workers, &self.interrupt)?;
                Ok(ReactionTimes { kernel_clock_ms, ..times })
            }
            Method::Polling => {
                let warden = self.start_warden(EventSource::Polling)?;
                let discovery = warden.status()?["discovery"].as_str().unwrap_or_default().to_owned();
                if discovery != "polling" {
                    bail!(
                        "a pjwd in a network namespace of its own reports the discovery {discovery:?}, \
                         not \"polling\""
                    );
                }
                let workers = self.effort.pick(2, 12);
                self.fork(Some(&warden), WorkerStart::OutsideJob, (workers, POLLING_PAUSE), one, &self.sleep)
            }
            Method::Cgrulesengd => {
                let rules = Cgrulesengd::start(one, &self.interrupt)?;
                self.fork(None, WorkerStart::InNoJob, (workers, PAUSE), one, rules.worker())
            }
        }
    }

    fn start_warden(&self, source: EventSource) -> anyhow::Result<PrivateWarden> {
        let keys = format!("housekeeping = \"{}\"\nlog_level = \"debug\"\n", self.scale.unusable_pus);
        PrivateWarden::start_with_config(&self.programs, &keys, source, &self.interrupt)
    }

    /// Measures the reaction times of a daemon to `workers` workers that are forked in its job. `mask` has the PUs of
    /// the job.
    ///
    /// # Errors
    /// If the daemon gets no process events from the kernel.
    fn fork_under_warden(
        &self,
        worker_start: WorkerStart,
        workers: usize,
        mask: &CpuSet,
    ) -> anyhow::Result<ReactionTimes> {
        let warden = self.start_warden(EventSource::ProcEvents)?;
        let discovery = warden.status()?["discovery"].as_str().unwrap_or_default().to_owned();
        if discovery != "netlink" {
            bail!("the kernel sends pjwd no process events here: its discovery is {discovery:?}");
        }
        let times = self.fork(Some(&warden), worker_start, (workers, PAUSE), mask, &self.sleep)?;
        Ok(ReactionTimes { kernel_clock_ms: warden.reaction_times_ms(), ..times })
    }

    /// Starts a forker, and returns the reaction times to its workers. With `warden`, first assigns the forker to a job
    /// that has the PUs `mask`. `count_and_pause` has the number of workers and the pause between two workers.
    fn fork(
        &self,
        warden: Option<&PrivateWarden>,
        worker_start: WorkerStart,
        count_and_pause: (usize, Duration),
        mask: &CpuSet,
        worker: &Path,
    ) -> anyhow::Result<ReactionTimes> {
        let forker = Forker::start(worker_start, count_and_pause, mask, worker, &self.interrupt)?;
        if let Some(warden) = warden {
            match worker_start {
                // Without a rule for NUMA nodes, the only hot thread of a job is not pinned.
                WorkerStart::OnPin => warden.assign_within("reaction", mask, &[forker.pid()], "rr")?,
                _ => warden.assign("reaction", mask, &[forker.pid()])?,
            }
        }
        forker.wait_for_times(&self.interrupt)
    }
}

fn load_name(with_forks: bool) -> &'static str {
    if with_forks { "beside 1,000 forks/s" } else { "nothing else born" }
}

/// Prints two tables: the times that the forkers measured, and the times by the kernel's clock. Each row is one method,
/// with or without a load of other forks.
fn print_times(all_times: &BTreeMap<Key, ReactionTimes>) -> anyhow::Result<()> {
    print_header(
        "from before the fork to the right mask, measured by the parent, ms",
        &["missed", "at once"],
    )?;
    for ((method, with_forks), times) in all_times {
        let counts = format!("{:>8}{:>10}", times.missed, times.right_at_first_check);
        print_line(&(format_row(*method, *with_forks, &times.ms) + &counts))?;
    }
    print_header("from the fork to the mask, by the kernel's clock, ms", &[])?;
    let by_kernel_clock = all_times.iter().filter(|(_, times)| !times.kernel_clock_ms.is_empty());
    for ((method, with_forks), times) in by_kernel_clock {
        print_line(&format_row(*method, *with_forks, &times.kernel_clock_ms))?;
    }
    Ok(())
}

fn print_header(title: &str, more_columns: &[&str]) -> anyhow::Result<()> {
    let more_columns: String = more_columns.iter().map(|column| format!("{column:>9}")).collect();
    print_line(&format!("\n{title:<74}{:>8}{:>10}{:>10}{:>10}{more_columns}", "workers", "p50", "p99", "max"))
}

fn format_row(method: Method, with_forks: bool, ms: &[f64]) -> String {
    let quantile_ms = |share| quantile(ms, share).unwrap_or(f64::NAN);
    let name = format!("{}, {}", method.name(), load_name(with_forks));
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(quantile_ms);
    format!("{name:<74}{:>8}{p50:>10.3}{p99:>10.3}{max:>10.3}", ms.len())
}

/// Returns the figures: each case of pjwd compared with each peer, at each quantile.
fn figures(all_times: &BTreeMap<Key, ReactionTimes>) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for with_forks in [false, true] {
        for (case, peers) in [
            (Case::RightMask, &[Method::ForkAlone][..]),
            (Case::Outside, &[Method::ForkListener(Case::Outside), Method::Polling, Method::Cgrulesengd]),
            (Case::OnPin, &[Method::ForkListener(Case::OnPin), Method::Polling, Method::Cgrulesengd]),
        ] {
            for (name, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
                let parent_clock = |method| {
                    all_times
                        .get(&(method, with_forks))
                        .and_then(|times: &ReactionTimes| quantile(&times.ms, share))
                };
                let Some(own_value) = parent_clock(Method::Warden(case)) else { continue };
                let what = format!("{}, {}, {name}", Method::Warden(case).name(), load_name(with_forks));
                figures.extend(peers.iter().filter_map(|&peer| {
                    let peer_value = parent_clock(peer)?;
                    Some(Figure::new(&what, own_value, "ms", peer.name(), peer_value))
                }));
                let kernel_clock = |method| {
                    let times = all_times.get(&(method, with_forks))?;
                    quantile(&times.kernel_clock_ms, share)
                };
                let values = kernel_clock(Method::Warden(case)).zip(kernel_clock(Method::ForkListener(case)));
                figures.extend(values.map(|(own_value, peer_value)| {
                    Figure::new(
                        &format!("{what}, by the kernel's clock"),
                        own_value,
                        "ms",
                        Method::ForkListener(case).name(),
                        peer_value,
                    )
                }));
            }
        }
    }
    figures.first().context("no peer was measured")?;
    Ok(figures)
}
