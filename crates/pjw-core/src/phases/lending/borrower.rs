//! One borrower while the decision about loans is made: which of its cores it keeps.

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::machine::Topology;
use crate::phases::lending::cores::{
    Core, end_of_grace_period, is_announced, is_lent_by_owner, was_lent_before_restart, whole_cores,
};
use crate::phases::lending::permission::may_borrow;
use crate::state::WardenState;
use crate::terms::{Job, JobId, Policy};

/// A borrower (a job of the class besteffort, which runs on free cores and on lent cores) while the decision is made.
pub(super) struct Borrower<'a> {
    pub(super) id: &'a JobId,
    /// The largest number of cores that it can use. Zero while it has no process.
    pub(super) max_count: usize,
    /// The time at which it reported how many cores it can use, in ns since boot. `None` if it did not.
    wanted_at: Option<Nanos>,
    /// The cores that it is to have. At the beginning, those that it has now.
    pub(super) cores: Vec<Core>,
    /// The cores that it has only until the end of a grace period. They are not in `cores`.
    pub(super) leaving: Vec<Core>,
    /// Whether it would slow down the owners of lent cores. It then gets no lent cores.
    pub(super) would_slow_owners: bool,
}

impl<'a> Borrower<'a> {
    /// Returns the borrower `job` with the cores that it has now. These are more than it can use if it wants fewer than
    /// before, or if it has some only until the end of a grace period.
    pub(super) fn new(state: &'a WardenState, policy: &Policy, job: &'a Job) -> Self {
        let topology = &state.topology;
        // A job without a process would keep from others what it can't use.
        let max_count = if may_borrow(state, policy, &job.id) { usable_core_count(topology, job) } else { 0 };
        let borrowed = if max_count == 0 { CpuSet::new() } else { state.pool.borrowed_by(&job.id) };
        Self {
            id: &job.id,
            max_count,
            wanted_at: job.wanted_cores.map(|wanted| wanted.given_at),
            cores: whole_cores(topology, &borrowed, &state.pool.online_cpus()),
            leaving: Vec::new(),
            would_slow_owners: state.lending.would_slow_owners(&job.id),
        }
    }

    /// Returns a borrower for the new job `job`, which is not in the state yet and has no cores. The job counts as one
    /// with a process.
    pub(super) fn of_new_job(topology: &Topology, job: &'a Job) -> Self {
        Self {
            id: &job.id,
            max_count: usable_core_count(topology, job),
            wanted_at: None,
            cores: Vec::new(),
            leaving: Vec::new(),
            would_slow_owners: false,
        }
    }

    /// Returns whether the borrower can use more cores than it is to have.
    pub(super) fn can_use_more(&self) -> bool {
        self.cores.len() < self.max_count
    }

    /// Returns the index in `cores` of the last core that is free. `free` has the free PUs. `None` if no core is free.
    pub(super) fn free_core_index(&self, free: &CpuSet) -> Option<usize> {
        self.cores.iter().rposition(|core| core.is_subset(free))
    }

    /// Decides which of its cores the borrower keeps. It keeps those in `keepable`, up to the number that it can use:
    /// first free cores, then lent cores, and last lent cores whose return is announced. Returns the PUs that it has
    /// only until the end of a grace period, each with this end, in ns since boot. `now` is the present time, in ns
    /// since boot.
    pub(super) fn keep_cores(
        &mut self,
        state: &WardenState,
        policy: &Policy,
        keepable: &BTreeSet<&Core>,
        now: Nanos,
    ) -> BTreeMap<Pu, Nanos> {
        let (mut kept, mut lost): (Vec<Core>, Vec<Core>) =
            core::mem::take(&mut self.cores).into_iter().partition(|core| keepable.contains(core));
        let free = state.pool.free_cpus();
        kept.sort_by_key(|core| (!core.is_subset(&free), is_announced(state, core)));
        // The borrower can't use the cores after the first `max_count`. But it keeps a core until the end of an
        // announced grace period. The announcements of an earlier run of the daemon are not known, so the return of
        // each core that was lent before a restart is announced again.
        let is_promised = |core: &Core| is_announced(state, core) || was_lent_before_restart(state, core);
        let surplus = kept.split_off(kept.len().min(self.max_count));
        lost.extend(surplus.into_iter().filter(is_promised));
        let mut wanted_count = kept.iter().filter(|core| !is_announced(state, core)).count();
        let mut ends = BTreeMap::new();
        // Cores that now belong to another job, which does not lend them, are taken at once.
        for core in lost.into_iter().filter(|core| is_lent_by_owner(state, core)) {
            let announced_end = core.iter().find_map(|pu| state.lending.grace_period_end(pu));
            let end = announced_end.unwrap_or_else(|| end_of_grace_period(policy, now));
            let is_wanted = if is_promised(&core) {
                // A borrower that has said since the announcement that it wants fewer cores gives them back earlier.
                kept.len() + self.leaving.len() < self.max_count
                    || self.wanted_at.is_none_or(|at| end_of_grace_period(policy, at) <= end)
            } else {
                // No notice is needed if the borrower wants fewer cores since this cycle.
                wanted_count += 1;
                wanted_count <= self.max_count
            };
            if end > now && is_wanted {
                ends.extend(core.iter().map(|pu| (pu, end)));
                self.leaving.push(core);
            }
        }
        self.cores = kept;
        ends
    }
}

/// Returns the largest number of cores that the borrower `job` can use while it has a process. This is the number that
/// the job wants, or the requested number if it has not said what it wants. The result is at least 1: a job that wants
/// no core would be frozen, and could not ask for a core again.
fn usable_core_count(topology: &Topology, job: &Job) -> usize {
    let requested = job.request.as_ref().map_or(0, |request| request.cpu_request.core_count(topology));
    job.wanted_core_count(topology).unwrap_or(requested).max(1) as usize
}

/// Returns the index of the borrower with the fewest cores among those that can use more cores and for which `may_get`
/// is true.
pub(super) fn borrower_with_fewest_cores(
    borrowers: &[Borrower<'_>],
    may_get: impl Fn(&Borrower<'_>) -> bool,
) -> Option<usize> {
    let is_candidate = |index: &usize| borrowers[*index].can_use_more() && may_get(&borrowers[*index]);
    (0..borrowers.len()).filter(is_candidate).min_by_key(|&index| borrowers[index].cores.len())
}
