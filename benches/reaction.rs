//! How long a new worker runs where it should not: from its fork to its right mask, on a machine where nothing else is
//! born and beside a thousand births a second; under pjwd, under a pjwd that hears no events and looks every second,
//! under libcgroup's rule daemon, and beside the limit: a listener that does nothing but set the mask.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use pjw_benches::load::fork_storm::ForkStorm;
use pjw_benches::load::forker::{self, Birth, Forker, Times};
use pjw_benches::measure::results::{Figure, publish, quantile, say};
use pjw_benches::peers::cgrulesengd::{Cgrulesengd, sleep};
use pjw_benches::peers::fork_listener::{self, ForkListener};
use pjw_benches::programs::daemon::{Hearing, Programs, Warden};
use pjw_benches::programs::interrupt::Interrupt;
use pjw_benches::setup::Setup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::scale::Scale;
use pjw_core::cpuset::CpuSet;

const STORM_PER_SECOND: u32 = 1000;
/// Long enough that two births have nothing to do with each other.
const PAUSE: Duration = Duration::from_millis(40);
/// Who looks every second is met at any time within it.
const POLLED_PAUSE: Duration = Duration::from_secs(1);

/// Who is to put the worker right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Keeper {
    Nobody,
    Warden(Case),
    ForkListener(Case),
    Polling,
    Cgrulesengd,
}

/// What is wrong with a worker of the warden's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Nothing,
    Outside,
    Pinned,
}

const KEEPERS: [Keeper; 8] = [
    Keeper::Nobody,
    Keeper::Warden(Case::Nothing),
    Keeper::Warden(Case::Outside),
    Keeper::Warden(Case::Pinned),
    Keeper::ForkListener(Case::Outside),
    Keeper::ForkListener(Case::Pinned),
    Keeper::Polling,
    Keeper::Cgrulesengd,
];

impl Keeper {
    fn name(self) -> &'static str {
        match self {
            Keeper::Nobody => "fork and exec alone",
            Keeper::Warden(Case::Nothing) => "born right (trivial)",
            Keeper::Warden(Case::Outside) => "born outside its job",
            Keeper::Warden(Case::Pinned) => "born on a busy parent's pin",
            Keeper::ForkListener(Case::Pinned) => "the bare calls, on a busy parent's pin",
            Keeper::ForkListener(_) => "the bare calls: the event, sched_setaffinity",
            Keeper::Polling => "pjwd without events, looking every 1 s",
            Keeper::Cgrulesengd => "cgrulesengd (libcgroup)",
        }
    }
}

type Key = (Keeper, bool);

fn main() -> anyhow::Result<()> {
    forker::attend()?;
    fork_listener::attend()?;
    let Setup { effort, interrupt, programs, scale } = Setup::find()?;
    let cores = (scale.whole_cores[0].clone(), scale.whole_cores[0].union(&scale.whole_cores[1]));
    let bench = Bench { effort, interrupt, programs, scale, cores, sleep: sleep()? };
    let mut all: BTreeMap<Key, Times> = BTreeMap::new();
    let mut skipped: Vec<Keeper> = Vec::new();
    for round in 0..effort.pick(1, 5) {
        // In turns, so that whatever else happens on the machine hits all alike.
        for stormy in [round % 2 == 1, round % 2 == 0] {
            let storm = stormy.then(|| ForkStorm::begin(STORM_PER_SECOND)).transpose()?;
            for keeper in KEEPERS {
                bench.interrupt.check()?;
                if skipped.contains(&keeper) {
                    continue;
                }
                match bench.times(keeper) {
                    Ok(times) => all.entry((keeper, stormy)).or_default().extend(times),
                    Err(error) => {
                        bench.interrupt.check()?;
                        say(&format!("skipped: {}: {error:#}", keeper.name()))?;
                        skipped.push(keeper);
                    }
                }
            }
            if let Some(storm) = storm {
                say(&format!(
                    "the storm: {:.0} births a second, on the whole machine",
                    storm.births_per_second()?
                ))?;
            }
        }
    }
    tell(&all)?;
    publish("reaction", &figures(&all)?)
}

struct Bench {
    effort: Effort,
    interrupt: Interrupt,
    programs: Programs,
    scale: Scale,
    /// One core, and two.
    cores: (CpuSet, CpuSet),
    sleep: PathBuf,
}

impl Bench {
    /// The times of one keeper's workers, of one round.
    fn times(&self, keeper: Keeper) -> anyhow::Result<Times> {
        let workers = self.effort.pick(12, 60);
        let (one, two) = &self.cores;
        match keeper {
            Keeper::Nobody => self.fork(None, Birth::Right, (workers, PAUSE), &self.scale.ours, &self.sleep),
            Keeper::Warden(Case::Nothing) => self.warded(Birth::Right, workers, one),
            Keeper::Warden(Case::Outside) => self.warded(Birth::Outside, workers, one),
            Keeper::Warden(Case::Pinned) => self.warded(Birth::Pinned, workers, two),
            Keeper::ForkListener(case) => {
                let (birth, right) =
                    if case == Case::Pinned { (Birth::Pinned, two) } else { (Birth::Outside, one) };
                let forker = Forker::start(birth, (workers, PAUSE), right, &self.sleep, &self.interrupt)?;
                let listener = ForkListener::start(forker.pid(), one, right, &self.interrupt)?;
                let times = forker.times(&self.interrupt)?;
                let by_kernel_ms = listener.reactions(workers, &self.interrupt)?;
                Ok(Times { by_kernel_ms, ..times })
            }
            Keeper::Polling => {
                let warden = self.warden(Hearing::Polling)?;
                let discovery = warden.status()?["discovery"].as_str().unwrap_or_default().to_owned();
                if discovery != "polling" {
                    bail!("a pjwd in a network namespace of its own says {discovery:?}, not \"polling\"");
                }
                let workers = self.effort.pick(2, 12);
                self.fork(Some(&warden), Birth::Outside, (workers, POLLED_PAUSE), one, &self.sleep)
            }
            Keeper::Cgrulesengd => {
                let rules = Cgrulesengd::start(one, &self.interrupt)?;
                self.fork(None, Birth::Elsewhere, (workers, PAUSE), one, rules.worker())
            }
        }
    }

    fn warden(&self, hearing: Hearing) -> anyhow::Result<Warden> {
        let keys = format!("housekeeping = \"{}\"\nlog_level = \"debug\"\n", self.scale.not_ours);
        Warden::configured(&self.programs, &keys, hearing, &self.interrupt)
    }

    fn warded(&self, birth: Birth, workers: usize, right: &CpuSet) -> anyhow::Result<Times> {
        let warden = self.warden(Hearing::Events)?;
        let discovery = warden.status()?["discovery"].as_str().unwrap_or_default().to_owned();
        if discovery != "netlink" {
            bail!("the kernel tells pjwd no events here (its discovery is {discovery:?})");
        }
        let times = self.fork(Some(&warden), birth, (workers, PAUSE), right, &self.sleep)?;
        Ok(Times { by_kernel_ms: warden.reactions(), ..times })
    }

    fn fork(
        &self,
        warden: Option<&Warden>,
        birth: Birth,
        how: (usize, Duration),
        right: &CpuSet,
        worker: &Path,
    ) -> anyhow::Result<Times> {
        let forker = Forker::start(birth, how, right, worker, &self.interrupt)?;
        if let Some(warden) = warden {
            warden.assign("reaction", right, &[forker.pid()])?;
        }
        forker.times(&self.interrupt)
    }
}

fn air(stormy: bool) -> &'static str {
    if stormy { "beside 1,000 forks/s" } else { "nothing else born" }
}

fn tell(all: &BTreeMap<Key, Times>) -> anyhow::Result<()> {
    head("from before the fork to the right mask, as another sees it, ms", &["missed", "at once"])?;
    for ((keeper, stormy), times) in all {
        let counts = format!("{:>8}{:>10}", times.missed, times.right_at_once);
        say(&(row(*keeper, *stormy, &times.ms) + &counts))?;
    }
    head("from the fork to the mask, by the kernel's clock, ms", &[])?;
    for ((keeper, stormy), times) in all.iter().filter(|(_, times)| !times.by_kernel_ms.is_empty()) {
        say(&row(*keeper, *stormy, &times.by_kernel_ms))?;
    }
    Ok(())
}

fn head(what: &str, more: &[&str]) -> anyhow::Result<()> {
    let more: String = more.iter().map(|word| format!("{word:>9}")).collect();
    say(&format!("\n{what:<74}{:>8}{:>10}{:>10}{:>10}{more}", "workers", "p50", "p99", "max"))
}

fn row(keeper: Keeper, stormy: bool, ms: &[f64]) -> String {
    let at = |share| quantile(ms, share).unwrap_or(f64::NAN);
    let name = format!("{}, {}", keeper.name(), air(stormy));
    format!("{name:<74}{:>8}{:>10.3}{:>10.3}{:>10.3}", ms.len(), at(0.5), at(0.99), at(1.0))
}

/// Every way to be born under the warden beside each peer, at each quantile.
fn figures(all: &BTreeMap<Key, Times>) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for stormy in [false, true] {
        for (case, peers) in [
            (Case::Nothing, &[Keeper::Nobody][..]),
            (Case::Outside, &[Keeper::ForkListener(Case::Outside), Keeper::Polling, Keeper::Cgrulesengd]),
            (Case::Pinned, &[Keeper::ForkListener(Case::Pinned), Keeper::Polling, Keeper::Cgrulesengd]),
        ] {
            for (name, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
                let of =
                    |keeper| all.get(&(keeper, stormy)).and_then(|times: &Times| quantile(&times.ms, share));
                let Some(ours) = of(Keeper::Warden(case)) else { continue };
                let what = format!("{}, {}, {name}", Keeper::Warden(case).name(), air(stormy));
                figures.extend(peers.iter().filter_map(|&peer| {
                    of(peer).map(|theirs| Figure::new(&what, ours, "ms", peer.name(), theirs))
                }));
                let by_kernel = |keeper| {
                    all.get(&(keeper, stormy)).and_then(|times| quantile(&times.by_kernel_ms, share))
                };
                let both = by_kernel(Keeper::Warden(case)).zip(by_kernel(Keeper::ForkListener(case)));
                figures.extend(both.map(|(ours, theirs)| {
                    Figure::new(
                        &format!("{what}, by the kernel's clock"),
                        ours,
                        "ms",
                        Keeper::ForkListener(case).name(),
                        theirs,
                    )
                }));
            }
        }
    }
    figures.first().context("nothing was measured beside a peer")?;
    Ok(figures)
}
