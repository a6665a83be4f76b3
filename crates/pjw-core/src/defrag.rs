//! Healing fragmentation: which jobs would have to move so that jobs lie on fewer parts of the machine, and larger
//! requests fit into one part again.
//!
//! Only told, or done when an administrator asks: grants don't move by themselves. Greedy: of all single moves the
//! best is made, then the best of what is left, until none makes anything better. Better means that jobs touch fewer
//! packages, then NUMA nodes, then L3s; and with equal numbers that the largest hole in a package, then in a NUMA
//! node, then in an L3 is larger. Where a job would go is the allocator's choice, as if it had just come.
//!
//! Jobs stay that were promised to stay: guaranteed ones, those whose scheduler or owner chose the cores, those that
//! share them, those with a core that is off. What a job has is the same afterwards: so many PUs, of such cores.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::allocate::{Fits, Offer, allocate, fits};
use crate::cpuset::CpuSet;
use crate::explain::named;
use crate::job::{Amount, Class, GrantedBy, Job, JobId, Placement, Request};
use crate::policy::Policy;
use crate::pool::Pool;
use crate::state::WardenState;
use crate::topology::{Level, Topology};

/// So many jobs are thought of at most: those on the most parts of the machine, then the smallest.
const MOST_JOBS: usize = 64;
/// So many moves are made at most. Each tries every job, so this bounds what an answer costs.
const MOST_STEPS: usize = 32;

/// From the largest part of a machine to the smallest.
const LEVELS: [Level; 3] = [Level::Package, Level::NumaNode, Level::L3];

/// A job that would lie better elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Which job.
    pub job: JobId,
    /// What it holds.
    pub from: CpuSet,
    /// What it would hold: as many PUs, of cores of the same kinds.
    pub to: CpuSet,
    /// What that is good for, as half a sentence.
    pub why: String,
}

/// The moves that heal, and what they bring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defrag {
    /// Each job that moves, once.
    pub moves: Vec<Move>,
    /// What fits where before them.
    pub fits_before: Fits,
    /// What fits where after them.
    pub fits_after: Fits,
    /// The way there: each of them leads from a ledger that holds to one that holds. A job may be on it twice.
    pub(crate) steps: Vec<Step>,
}

/// One change of the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) job: JobId,
    /// Made for the ledger in which the job has just let go of what it held.
    pub(crate) offer: Offer,
    why: String,
}

/// How good a state is, the smaller the better: how many parts of each level jobs touch, and the largest holes.
type Score = ([u32; 3], Reverse<[u32; 3]>);

/// Finds the moves. The same state gives the same moves; after them it gives none, unless there were more than are
/// looked for at once.
#[must_use]
pub fn defrag(state: &WardenState, policy: &Policy) -> Defrag {
    let mut ground = Ground::new(state, policy);
    let mut steps = Vec::new();
    while steps.len() < MOST_STEPS
        && let Some((job, trial)) = ground.best_trial()
    {
        steps.push(ground.go(job, trial));
    }
    Defrag {
        moves: ground.moves(&steps),
        fits_before: fits(&state.pool, &state.topology),
        fits_after: fits(&ground.pool, &state.topology),
        steps,
    }
}

/// A job that may move.
struct Movable<'a> {
    id: &'a JobId,
    request: &'a Request,
    /// What it really holds.
    from: &'a CpuSet,
    /// What it holds after the steps so far.
    at: CpuSet,
}

impl<'a> Movable<'a> {
    fn new(job: &'a Job, pool: &Pool) -> Option<Self> {
        let request = job.request.as_ref().filter(|_| !job.let_go)?;
        let grant = job.grant.as_ref()?;
        let is_the_wardens_choice = grant.granted_by == GrantedBy::Warden
            && request.placement == Placement::Pack
            && !matches!(request.amount, Amount::Exactly(_));
        let is_its_own = !grant.shared && pool.of(&job.id) == grant.cpus;
        let may = is_the_wardens_choice && is_its_own && request.class != Class::Guaranteed;
        let (id, from) = (&job.id, &grant.cpus);
        (may && from.is_subset(&pool.online())).then(|| Self { id, request, from, at: from.clone() })
    }
}

/// A single move that makes something better.
struct Trial {
    offer: Offer,
    /// The ledger after it.
    pool: Pool,
    score: Score,
}

/// The ledger after the steps so far, and who may still move on it.
struct Ground<'a> {
    topology: &'a Topology,
    policy: &'a Policy,
    pool: Pool,
    jobs: Vec<Movable<'a>>,
    score: Score,
}

impl<'a> Ground<'a> {
    fn new(state: &'a WardenState, policy: &'a Policy) -> Self {
        let topology = &state.topology;
        let mut jobs: Vec<Movable<'a>> =
            state.jobs.values().filter_map(|job| Movable::new(job, &state.pool)).collect();
        jobs.sort_by_cached_key(|job| (Reverse(touched(topology, job.from)), job.from.len(), job.id));
        jobs.truncate(MOST_JOBS);
        let mut sums = [0; 3];
        for job in &jobs {
            add(&mut sums, touched(topology, job.from));
        }
        let score = (sums, Reverse(holes(&state.pool, topology)));
        Self { topology, policy, pool: state.pool.clone(), jobs, score }
    }

    /// The best of all single moves, and whose it is. Of equally good ones the one that moves the fewest PUs, then
    /// the first by the job's id.
    fn best_trial(&self) -> Option<(usize, Trial)> {
        let trials = self.jobs.iter().enumerate().filter_map(|(at, job)| Some((at, self.trial(job)?)));
        trials.min_by_key(|(at, trial)| {
            let job = &self.jobs[*at];
            (trial.score, trial.offer.cpus.difference(&job.at).len(), job.id)
        })
    }

    /// Where a job would go if it came now, if that is better than where it is.
    fn trial(&self, job: &Movable<'_>) -> Option<Trial> {
        let mut pool = self.pool.clone();
        pool.release(job.id);
        let offer = allocate(job.id, job.request, &pool, self.topology, self.policy).ok()?;
        if offer.cpus == job.at || make_up(self.topology, &offer.cpus) != make_up(self.topology, &job.at) {
            return None;
        }
        pool.commit(job.id, &offer).ok()?;
        let mut sums = self.score.0;
        subtract(&mut sums, touched(self.topology, &job.at));
        add(&mut sums, touched(self.topology, &offer.cpus));
        let score = (sums, Reverse(holes(&pool, self.topology)));
        (score < self.score).then_some(Trial { offer, pool, score })
    }

    fn go(&mut self, job: usize, trial: Trial) -> Step {
        let Trial { mut offer, pool, score } = trial;
        let why = self.why(&self.jobs[job].at, &offer.cpus, &score);
        let job = &mut self.jobs[job];
        offer.because.insert(0, format!("moved from {} to heal fragmentation: {why}", named(&job.at)));
        job.at = offer.cpus.clone();
        (self.pool, self.score) = (pool, score);
        Step { job: job.id.clone(), offer, why }
    }

    fn why(&self, from: &CpuSet, to: &CpuSet, after: &Score) -> String {
        closer(self.topology, from, to).unwrap_or_else(|| {
            let (before, after) = (self.score.1.0, after.1.0);
            let grown = LEVELS.into_iter().zip(before.into_iter().zip(after));
            let larger = grown.into_iter().find(|(_, (before, after))| after > before);
            larger.map_or_else(String::new, |(level, (before, after))| {
                format!("one {} can then serve {after} cores instead of {before}", level.noun())
            })
        })
    }

    /// The steps, each job's as one move, in the order in which they end.
    fn moves(&self, steps: &[Step]) -> Vec<Move> {
        let last_of_its_job = |at: usize| steps[at + 1..].iter().all(|later| later.job != steps[at].job);
        let ends = (0..steps.len()).filter(|&at| last_of_its_job(at)).map(|at| &steps[at]);
        ends.filter_map(|step| {
            let job = self.jobs.iter().find(|job| *job.id == step.job).filter(|job| *job.from != job.at)?;
            let why = closer(self.topology, job.from, &job.at).unwrap_or_else(|| step.why.clone());
            Some(Move { job: step.job.clone(), from: job.from.clone(), to: job.at.clone(), why })
        })
        .collect()
    }
}

/// How a job lies on fewer parts of the machine than before, if it does.
fn closer(topology: &Topology, from: &CpuSet, to: &CpuSet) -> Option<String> {
    let counts = touched(topology, from).into_iter().zip(touched(topology, to));
    let (level, (before, after)) =
        LEVELS.into_iter().zip(counts).find(|(_, (before, after))| before != after)?;
    (after < before).then(|| format!("it lies on {after} {} instead of {before}", level.noun()))
}

/// How many packages, NUMA nodes and L3s have a PU of these.
fn touched(topology: &Topology, cpus: &CpuSet) -> [u32; 3] {
    LEVELS.map(|level| {
        let domains = topology.domains(level).filter(|domain| domain.cpus.intersects(cpus));
        domains.fold(0, |count, _| count + 1)
    })
}

/// The largest holes: in a package, in a NUMA node, in an L3.
fn holes(pool: &Pool, topology: &Topology) -> [u32; 3] {
    let Fits { package, numa_node, l3, .. } = fits(pool, topology);
    [package, numa_node, l3]
}

/// How many cores of each kind these are, and how many PUs of them: two sets of the same make-up are worth the same.
fn make_up(topology: &Topology, cpus: &CpuSet) -> BTreeMap<(u32, usize), u32> {
    let mut counts = BTreeMap::new();
    for (core, pus) in topology.cores().iter().zip(topology.pus_by_core()) {
        let inside = pus.iter().filter(|&&pu| cpus.contains(pu)).count();
        if inside > 0 {
            *counts.entry((core.kind, inside)).or_default() += 1;
        }
    }
    counts
}

fn add(sums: &mut [u32; 3], counts: [u32; 3]) {
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

fn subtract(sums: &mut [u32; 3], counts: [u32; 3]) {
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum -= count);
}

#[cfg(test)]
#[path = "defrag/tests.rs"]
mod tests;
