//! Defragmentation: finds moves of jobs after which the jobs lie in fewer domains and larger requests fit
//! into one domain.
//!
//! Moves are only shown, or carried out by an administrator's command. The search is greedy: it applies the
//! best single move, then the best move after that, until no move is an improvement. A state is better if
//! jobs use fewer packages, then fewer NUMA nodes, then fewer L3s. With equal numbers, larger holes are
//! better. The allocator chooses the new cores as for a new job.
//!
//! Some jobs are never moved: guaranteed jobs, jobs whose scheduler or user chose the cores, jobs that share
//! cores, and jobs with an offline core. A moved job gets the same number of PUs on cores of the same kinds.

use core::cmp::Reverse;

use crate::allocate::offer::{LargestRequests, allocate, largest_requests};
use crate::basics::{CpuSet, cpus_text, prelude::*};
use crate::machine::{AddressSpaceThreads, Topology, TopologyLevel, keeps_groups_together};
use crate::state::{PuOffer, PuPool, WardenState};
use crate::terms::{CpuRequest, GrantedBy, Job, JobId, JobRequest, Placement, Policy, PriorityClass};

/// The maximum number of jobs that a plan considers. The jobs in the most domains (packages, NUMA nodes and L3s) come
/// first. Among equal ones, the smallest jobs come first.
const MAX_JOBS: usize = 64;

/// The maximum number of moves. Each step tries every job, so this limits the time of the search.
const MAX_STEPS: usize = 32;

/// The levels of the score, largest first.
const LEVELS: [TopologyLevel; 3] = [TopologyLevel::Package, TopologyLevel::NumaNode, TopologyLevel::L3];

/// A planned move of one job to other cores, in order to reduce fragmentation. A machine is fragmented if
/// jobs lie on more packages, NUMA nodes or L3s than necessary. It is also fragmented if the free cores are
/// spread over many packages, NUMA nodes or L3s, so that a large request fits into none of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobMove {
    /// The job that moves.
    pub job: JobId,
    /// The PUs (logical CPUs) that the job holds before any move of the plan.
    pub from: CpuSet,
    /// The PUs that the job is to hold after all moves of the plan. The number of PUs and the kinds of
    /// their cores are the same as in `from`.
    pub to: CpuSet,
    /// The improvement that the move makes, in words for users, such as `it lies on 1 package instead of 2`,
    /// where `it` is the job.
    pub improvement: String,
}

/// The result of [`plan_defrag`]: the moves of jobs to other cores. Also gives the sizes, in whole cores, of the
/// largest requests that the free cores can serve before and after these moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefragPlan {
    /// The moves, at most one for each job. Each move gives the PUs of the job before and after the whole
    /// plan.
    pub moves: Vec<JobMove>,
    /// The sizes, in whole cores, of the largest requests that the free cores can serve before the moves:
    /// inside one L3, inside one NUMA node, inside one package, and on the whole machine.
    pub largest_requests_before: LargestRequests,
    /// The sizes of the largest requests that the free cores can serve after the moves, in the same form as
    /// `largest_requests_before`.
    pub largest_requests_after: LargestRequests,
    /// The changes of the pool, in order. The pool is valid after each step. A job may appear twice.
    pub(crate) steps: Vec<DefragStep>,
}

/// One step of the defragmentation: one job moves to other cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DefragStep {
    /// The job that moves.
    pub(crate) job: JobId,
    /// The offer, made for the pool after the job released its cores.
    pub(crate) offer: PuOffer,
    /// The improvement, as in [`JobMove::improvement`].
    improvement: String,
}

/// The score of the grants of all jobs. A smaller score is better. The first part is the number of domains (packages,
/// NUMA nodes and L3s) that jobs use. The second part is the size of the largest hole (the free cores of one domain)
/// at each of these levels.
type Score = ([u32; 3], Reverse<[u32; 3]>);

/// Plans a defragmentation: moves of jobs to other cores. After the moves, the jobs lie on fewer packages, NUMA nodes
/// and L3 caches, or a larger request fits into one package, NUMA node or L3 cache. Does not change `state`: the caller
/// carries out the moves.
///
/// The plan has at most 32 moves, and is empty if no move is an improvement. At most 64 jobs are considered, first the
/// jobs on the most packages, NUMA nodes and L3 caches. The plan never moves:
///
/// - jobs of the priority class [`PriorityClass::Guaranteed`],
/// - jobs whose PUs (logical CPUs) were chosen by a batch system or listed by a user,
/// - jobs whose placement is not [`Placement::Pack`] (close together),
/// - jobs that share PUs with other jobs,
/// - jobs with an offline PU.
///
/// Some processes of a job may share an address space. A move keeps the hot threads of these processes together: if the
/// threads fit into one L3 cache before the move, they also fit into one L3 cache after the move. The same holds for
/// NUMA nodes. A thread is hot if it runs or waits for a PU most of the time.
#[must_use]
pub fn plan_defrag(state: &WardenState, policy: &Policy) -> DefragPlan {
    let mut search = Search::new(state, policy);
    let mut steps = Vec::new();
    while steps.len() < MAX_STEPS
        && let Some((job, candidate)) = search.best_move()
    {
        steps.push(search.record_move(job, candidate));
    }
    DefragPlan {
        moves: search.moves(&steps),
        largest_requests_before: largest_requests(&state.pool, &state.topology),
        largest_requests_after: largest_requests(&search.pool, &state.topology),
        steps,
    }
}

/// A job that may be moved.
struct Movable<'a> {
    id: &'a JobId,
    request: &'a JobRequest,
    /// The PUs that the job holds before all steps.
    from: &'a CpuSet,
    /// The PUs that the job holds after the steps so far.
    current: CpuSet,
    /// The hot threads of each address space that several processes of the job share.
    groups: Vec<AddressSpaceThreads>,
}

impl<'a> Movable<'a> {
    /// Returns `job` as a job that may be moved, with the PUs (logical CPUs) that it holds. `None` if it must not be
    /// moved: [`plan_defrag`] lists these jobs.
    fn new(job: &'a Job, state: &WardenState) -> Option<Self> {
        let pool = &state.pool;
        let request = job.request.as_ref().filter(|_| !job.was_released)?;
        let grant = job.grant.as_ref()?;
        let is_the_wardens_choice = grant.granted_by == GrantedBy::Warden
            && request.placement == Placement::Pack
            && !matches!(request.cpu_request, CpuRequest::Exactly(_));
        let is_its_own = !grant.is_shared && pool.pus_of(&job.id) == grant.cpus;
        let may_move = is_the_wardens_choice && is_its_own && request.class != PriorityClass::Guaranteed;
        let (id, from) = (&job.id, &grant.cpus);
        (may_move && from.is_subset(&pool.online_cpus())).then(|| Self {
            id,
            request,
            from,
            current: from.clone(),
            groups: state.address_space_threads_of(&job.id),
        })
    }
}

/// A single move that improves the score.
struct CandidateMove {
    offer: PuOffer,
    /// The pool after the move.
    pool: PuPool,
    score: Score,
}

/// The state of the search for moves: the pool (the list of all PUs with their holders) after the steps so far, and
/// the jobs that may be moved.
struct Search<'a> {
    topology: &'a Topology,
    policy: &'a Policy,
    pool: PuPool,
    jobs: Vec<Movable<'a>>,
    score: Score,
}

impl<'a> Search<'a> {
    /// Makes the search, with the present pool (the list of all PUs with their holders) and its score. Includes at
    /// most [`MAX_JOBS`] of the jobs that may be moved. The jobs in the most domains (packages, NUMA nodes and L3s)
    /// come first. Among equal ones, the smallest jobs come first.
    fn new(state: &'a WardenState, policy: &'a Policy) -> Self {
        let topology = &state.topology;
        let mut jobs: Vec<Movable<'a>> =
            state.jobs.values().filter_map(|job| Movable::new(job, state)).collect();
        jobs.sort_by_cached_key(|job| (Reverse(domains_used(topology, job.from)), job.from.len(), job.id));
        jobs.truncate(MAX_JOBS);
        let mut domain_counts = [0; 3];
        for job in &jobs {
            add(&mut domain_counts, domains_used(topology, job.from));
        }
        let score = (domain_counts, Reverse(largest_holes(&state.pool, topology)));
        Self { topology, policy, pool: state.pool.clone(), jobs, score }
    }

    /// Returns the best single move and the index of its job. Among equally good moves the one with the
    /// fewest moved PUs wins, then the smallest job id.
    fn best_move(&self) -> Option<(usize, CandidateMove)> {
        let moves =
            self.jobs.iter().enumerate().filter_map(|(index, job)| Some((index, self.improving_move(job)?)));
        moves.min_by_key(|(index, candidate)| {
            let job = &self.jobs[*index];
            (candidate.score, candidate.offer.cpus.difference(&job.current).len(), job.id)
        })
    }

    /// Returns the move of `job` to the cores that it would get as a new job. Returns `None` in each of these cases:
    ///
    /// - The move does not improve the score.
    /// - The new cores are of other kinds (CPU core types), or have another number of PUs (logical CPUs).
    /// - The move would separate threads with a common address space.
    /// - The request of the job can't be served.
    fn improving_move(&self, job: &Movable<'_>) -> Option<CandidateMove> {
        let mut pool = self.pool.clone();
        pool.release(job.id);
        let offer = allocate(job.id, job.request, &pool, self.topology, self.policy).ok()?;
        if offer.cpus == job.current
            || core_composition(self.topology, &offer.cpus) != core_composition(self.topology, &job.current)
            || !keeps_groups_together(self.topology, &job.groups, &job.current, &offer.cpus)
        {
            return None;
        }
        pool.commit(job.id, &offer).ok()?;
        let mut domain_counts = self.score.0;
        subtract(&mut domain_counts, domains_used(self.topology, &job.current));
        add(&mut domain_counts, domains_used(self.topology, &offer.cpus));
        let score = (domain_counts, Reverse(largest_holes(&pool, self.topology)));
        (score < self.score).then_some(CandidateMove { offer, pool, score })
    }

    /// Records the move `candidate` in this search, for the job with the index `job` in `jobs`. Returns the move as a
    /// step of the plan.
    fn record_move(&mut self, job: usize, candidate: CandidateMove) -> DefragStep {
        let CandidateMove { mut offer, pool, score } = candidate;
        let improvement = self.improvement_text(&self.jobs[job].current, &offer.cpus, &score);
        let job = &mut self.jobs[job];
        let from = cpus_text(&job.current);
        offer.reasons.insert(0, format!("moved from {from} to reduce fragmentation: {improvement}"));
        job.current = offer.cpus.clone();
        (self.pool, self.score) = (pool, score);
        DefragStep { job: job.id.clone(), offer, improvement }
    }

    /// Returns a text for users that says what a move of a job improves. The job moves from the PUs `from` to the PUs
    /// `to`. `after` is the score after the move.
    fn improvement_text(&self, from: &CpuSet, to: &CpuSet, after: &Score) -> String {
        fewer_domains_text(self.topology, from, to).unwrap_or_else(|| {
            let (before, after) = (self.score.1.0, after.1.0);
            let grown = LEVELS.into_iter().zip(before.into_iter().zip(after));
            let larger = grown.into_iter().find(|(_, (before, after))| after > before);
            larger.map_or_else(String::new, |(level, (before, after))| {
                format!("one {} can then serve {after} cores instead of {before}", level.display_name())
            })
        })
    }

    /// Returns one move for each job in `steps`, from its first to its last cores. The moves are in the order of the
    /// last steps of the jobs. Leaves out a job that ends on the cores on which it began.
    fn moves(&self, steps: &[DefragStep]) -> Vec<JobMove> {
        let last_of_its_job =
            |index: usize| steps[index + 1..].iter().all(|later| later.job != steps[index].job);
        let last_steps = (0..steps.len()).filter(|&index| last_of_its_job(index)).map(|index| &steps[index]);
        last_steps
            .filter_map(|step| {
                let job = self
                    .jobs
                    .iter()
                    .find(|job| *job.id == step.job)
                    .filter(|job| *job.from != job.current)?;
                let improvement = fewer_domains_text(self.topology, job.from, &job.current)
                    .unwrap_or_else(|| step.improvement.clone());
                Some(JobMove {
                    job: step.job.clone(),
                    from: job.from.clone(),
                    to: job.current.clone(),
                    improvement,
                })
            })
            .collect()
    }
}

/// Returns a text that says on how many domains a job lies on the PUs `to` instead of `from`. Compares the largest
/// level at which these numbers differ. Returns `None` if the job does not lie on fewer domains of this level.
fn fewer_domains_text(topology: &Topology, from: &CpuSet, to: &CpuSet) -> Option<String> {
    let counts = domains_used(topology, from).into_iter().zip(domains_used(topology, to));
    let (level, (before, after)) =
        LEVELS.into_iter().zip(counts).find(|(_, (before, after))| before != after)?;
    (after < before).then(|| format!("it lies on {after} {} instead of {before}", level.display_name()))
}

/// Returns the numbers of packages, NUMA nodes and L3s that contain a PU of `cpus`.
fn domains_used(topology: &Topology, cpus: &CpuSet) -> [u32; 3] {
    LEVELS.map(|level| {
        let domains = topology.domains(level).filter(|domain| domain.cpus.intersects(cpus));
        domains.fold(0, |count, _| count + 1)
    })
}

/// Returns the sizes of the largest holes in a package, in a NUMA node and in an L3.
fn largest_holes(pool: &PuPool, topology: &Topology) -> [u32; 3] {
    let LargestRequests { package, numa_node, l3, .. } = largest_requests(pool, topology);
    [package, numa_node, l3]
}

/// Counts the cores of each sort that have PUs in `cpus`. The key is the kind of the core (CPU core type) and the
/// number of its PUs in `cpus`. Two sets of PUs with equal counts are equally good for a job.
fn core_composition(topology: &Topology, cpus: &CpuSet) -> BTreeMap<(u32, usize), u32> {
    let mut counts = BTreeMap::new();
    for (core, pus) in topology.cores().iter().zip(topology.pus_by_core()) {
        let inside = pus.iter().filter(|&&pu| cpus.contains(pu)).count();
        if inside > 0 {
            *counts.entry((core.kind_index, inside)).or_default() += 1;
        }
    }
    counts
}

fn add(domain_counts: &mut [u32; 3], counts: [u32; 3]) {
    domain_counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

fn subtract(domain_counts: &mut [u32; 3], counts: [u32; 3]) {
    domain_counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum -= count);
}

#[cfg(test)]
mod tests;
