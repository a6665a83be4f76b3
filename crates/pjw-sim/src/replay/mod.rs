//! A log of jobs replayed on a machine: each job starts at its submit time if enough is free, else it is refused;
//! it holds its cores for its run time. Ends at a moment free their cores before starts at it.
//!
//! The choice is the allocator's, through the ledger as in the daemon, or a [`Reference`] policy's on the same
//! ledger. What happens depends on the log, the machine and the rules alone; only the times that decisions took
//! differ from run to run.

mod sums;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use pjw_core::allocate::{Fits, Offer, allocate, fits};
use pjw_core::cpuset::CpuSet;
use pjw_core::job::{Amount, JobId, Placement, Request, Source};
use pjw_core::policy::Policy;
use pjw_core::pool::Pool;
use pjw_core::topology::Topology;

use crate::places::{Places, Touched};
use crate::reference::Reference;
use crate::swf::{Trace, TraceJob};

/// The most looks at what is left free: as many as a curve on a screen needs.
pub const SAMPLES: u32 = 100;

/// What the processors of a log count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Whole cores.
    Core,
    /// PUs, given out one by one: siblings may serve two jobs.
    Pu,
}

/// Who chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chooser {
    /// The allocator.
    Allocator(Placement),
    /// Somebody else.
    Reference(Reference),
}

/// How a log is replayed.
#[derive(Debug, Clone)]
pub struct Rules {
    /// What its processors count.
    pub unit: Unit,
    /// Who chooses.
    pub chooser: Chooser,
    /// PUs that no job gets.
    pub housekeeping: CpuSet,
}

/// A job that got what it asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The job.
    pub job: TraceJob,
    /// What it held.
    pub cpus: CpuSet,
    /// How many parts of the machine that touches.
    pub touched: Touched,
    /// How long the choice took.
    pub decision: Duration,
}

impl Started {
    /// When it ended.
    #[must_use]
    pub fn end_s(&self) -> u64 {
        self.job.submit_s.saturating_add(self.job.run_s)
    }
}

/// What was left free at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// In the log's seconds.
    pub time_s: u64,
    /// In whole cores: in all, and the largest request that one domain of each level could serve.
    pub fits: Fits,
}

/// What became of a log.
#[derive(Debug, Clone)]
pub struct Replay {
    /// In the order of their start.
    pub started: Vec<Started>,
    /// How many jobs were refused.
    pub refused: u32,
    /// At most [`SAMPLES`], evenly over the time in which jobs were submitted.
    pub samples: Vec<Sample>,
    /// How many cores, or PUs, the machine has for jobs.
    pub usable: u32,
    /// When the first job was submitted.
    begin_s: u64,
    unit: Unit,
}

/// One job's turn, told before it changes anything.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'r> {
    /// The job.
    pub job: TraceJob,
    /// Who holds what.
    pub pool: &'r Pool,
    /// What the job gets; `None` if it is refused.
    pub cpus: Option<&'r CpuSet>,
}

/// Replays a log, and shows every turn to `watch`.
pub fn replay(topology: &Topology, trace: &Trace, rules: &Rules, mut watch: impl FnMut(Turn<'_>)) -> Replay {
    let mut machine = Machine::new(topology, rules);
    let usable = machine.free_units();
    let mut instants = instants(trace).peekable();
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut started, mut samples) = (Vec::<Started>::new(), Vec::new());
    let mut refused = 0;
    let mut look = |machine: &mut Machine<'_>, ends: &mut BinaryHeap<_>, time_s| {
        machine.end_until(time_s, ends);
        samples.push(Sample { time_s, fits: fits(&machine.pool, topology) });
    };
    for (number, &job) in trace.jobs.iter().enumerate() {
        while let Some(time_s) = instants.next_if(|&time_s| time_s < job.submit_s) {
            look(&mut machine, &mut ends, time_s);
        }
        machine.end_until(job.submit_s, &mut ends);
        let begin = Instant::now();
        let choice = machine.choose(number, job.processors);
        let decision = begin.elapsed();
        watch(Turn { job, pool: &machine.pool, cpus: choice.as_ref().map(|choice| &choice.cpus) });
        let Some(choice) = choice.filter(|choice| machine.give(number, choice)) else {
            refused += 1;
            continue;
        };
        let touched = machine.places.touched(&choice.cpus);
        let one = Started { job, cpus: choice.cpus, touched, decision };
        ends.push(Reverse((one.end_s(), number)));
        started.push(one);
    }
    instants.for_each(|time_s| look(&mut machine, &mut ends, time_s));
    let begin_s = trace.jobs.first().map_or(0, |job| job.submit_s);
    Replay { started, refused, samples, usable, begin_s, unit: rules.unit }
}

/// When to look at what is left free: evenly from the first submission to the last.
fn instants(trace: &Trace) -> impl Iterator<Item = u64> + use<> {
    let first = trace.jobs.first().map_or(0, |job| job.submit_s);
    let span = trace.jobs.last().map_or(0, |job| job.submit_s) - first;
    let steps = u64::from(SAMPLES - 1).min(span);
    let at = move |step: u64| {
        let offset = u128::from(span) * u128::from(step) / u128::from(steps.max(1));
        first.saturating_add(u64::try_from(offset).unwrap_or(u64::MAX))
    };
    (0..=steps).map(at)
}

/// What was chosen: the allocator's offer, or a policy's cores with no offer behind them.
struct Choice {
    cpus: CpuSet,
    offer: Option<Offer>,
}

struct Machine<'r> {
    topology: &'r Topology,
    places: Places,
    pool: Pool,
    policy: Policy,
    rules: &'r Rules,
}

impl<'r> Machine<'r> {
    fn new(topology: &'r Topology, rules: &'r Rules) -> Self {
        let policy = Policy {
            housekeeping: rules.housekeeping.clone(),
            share_smt: rules.unit == Unit::Pu,
            ..Policy::default()
        };
        let pool = Pool::new(topology, &rules.housekeeping);
        Self { topology, places: Places::of(topology), pool, policy, rules }
    }

    fn free_units(&self) -> u32 {
        let free = self.pool.free();
        match self.rules.unit {
            Unit::Core => self.topology.whole_cores_in(&free),
            Unit::Pu => u32::try_from(free.len()).unwrap_or(u32::MAX),
        }
    }

    fn choose(&self, number: usize, n: u32) -> Option<Choice> {
        match self.rules.chooser {
            Chooser::Allocator(placement) => {
                let amount = match self.rules.unit {
                    Unit::Core => Amount::Cores(n),
                    Unit::Pu => Amount::Pus(n),
                };
                let request = Request { amount, placement, ..Request::cores(n) };
                let offer = allocate(&id(number)?, &request, &self.pool, self.topology, &self.policy).ok()?;
                Some(Choice { cpus: offer.cpus.clone(), offer: Some(offer) })
            }
            Chooser::Reference(reference) => {
                let cpus = reference.choose(n, self.rules.unit, &self.pool.free(), &self.places)?;
                Some(Choice { cpus, offer: None })
            }
        }
    }

    /// Writes a choice into the ledger; whether all of it was there to be given.
    fn give(&mut self, number: usize, choice: &Choice) -> bool {
        let Some(job) = id(number) else { return false };
        match &choice.offer {
            Some(offer) => self.pool.commit(&job, offer).is_ok(),
            None => self.pool.claim(&job, &choice.cpus).is_empty(),
        }
    }

    fn end_until(&mut self, time_s: u64, ends: &mut BinaryHeap<Reverse<(u64, usize)>>) {
        while let Some(&Reverse((_, number))) = ends.peek().filter(|Reverse((end_s, _))| *end_s <= time_s) {
            ends.pop();
            if let Some(job) = id(number) {
                self.pool.release(&job);
            }
        }
    }
}

/// A job's id in the ledger: its place in the log, because numbers in logs need not be unique.
fn id(number: usize) -> Option<JobId> {
    JobId::new(Source::Manual, &number.to_string()).ok()
}

#[cfg(test)]
mod tests;
