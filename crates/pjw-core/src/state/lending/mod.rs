//! How many cores each owner uses, and since when: the facts on which the phase `lending` decides.
//!
//! An owner is a job of the class guaranteed. The daemon samples the CPU time of its processes and records the number
//! of cores in use here. Nothing of this is journaled: after a restart, each owner counts as if it used all its cores
//! until it was sampled.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::terms::JobId;

mod core_use;

pub use core_use::{CoreUse, LentCoreSample, OwnerCpuSample, UsedCores, cores_wanted_by_waiting_threads};

/// The largest number of times that `lend_after` is doubled. This setting is the time for which a core must be idle
/// before pjw lends it.
const MAX_DOUBLINGS: u32 = 2;
/// A loan is short if pjw takes the core back before this many times `lend_after` have passed.
const SHORT_LOAN: u32 = 4;

/// The facts on which pjw decides which cores it lends. pjw lends the idle cores of jobs of the class guaranteed (the
/// owners) to jobs of the class besteffort (the borrowers). The facts include how many cores each owner uses, which
/// borrowed PUs (logical CPUs) pjw takes back soon, and which borrowers get no lent cores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LendingState {
    /// The use that each owner makes of its cores, by the id of the owner.
    owners: BTreeMap<JobId, OwnerLendingState>,
    /// The borrowed PUs that pjw takes back at the end of a grace period, each with this end, in ns since
    /// boot. Until then, the borrower still has the PU.
    grace_period_ends: BTreeMap<Pu, Nanos>,
    /// Those PUs in `grace_period_ends` that their owner does not need: their borrower has free PUs instead.
    exchanged: CpuSet,
    /// The lent PUs whose borrower was released or ended since the last decision, by their owner.
    left_by_borrowers: BTreeMap<JobId, CpuSet>,
    /// The borrowers of which a thread that runs has a real-time priority, as of the last scan of the processes of
    /// jobs.
    realtime_borrowers: BTreeSet<JobId>,
    /// The borrowers of which a process can't run at idle priority, as of the last decision.
    unfit_borrowers: BTreeSet<JobId>,
}

/// What pjw knows about one owner (a job of the class guaranteed, whose idle cores pjw may lend): how many cores
/// the owner uses, and when pjw last lent or took back cores of this owner. pjw computes the number of used cores
/// from measurements of the CPU time of the owner's processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnerLendingState {
    /// The cores that the owner uses, as of the last sample. `None` before the first sample.
    used: Option<UsedCores>,
    /// At index `n`: the time from which every sample found at most `n` cores too busy to be lent. `None` if the last
    /// sample found more.
    at_most_since: Vec<Option<Nanos>>,
    /// The time of the first sample since sampling began. `None` before the first sample.
    sampled_since: Option<Nanos>,
    /// The last time at which pjw lent cores of the owner. `None` if it never did.
    lent_at: Option<Nanos>,
    /// The last time at which pjw took lent cores back after a short loan, and how many times the setting
    /// `lend_after` was doubled at that time. Each such return doubles it, so that cores do not go back and forth.
    /// `None` if there was none.
    returned: Option<(Nanos, u32)>,
}

impl LendingState {
    /// Records the result `used` of a measurement: how many cores the job `owner` uses. pjw may lend the idle cores of
    /// this job. `core_count` is the number of all cores of the job. `measured_at` is the time of the measurement, in
    /// ns since boot.
    pub fn record_use(&mut self, owner: &JobId, used: UsedCores, core_count: u32, measured_at: Nanos) {
        let known = self.owners.entry(owner.clone()).or_default();
        known.sampled_since = known.sampled_since.or(Some(measured_at));
        known.at_most_since.resize(core_count as usize + 1, None);
        for (most, since) in (0u32..).zip(&mut known.at_most_since) {
            *since = if used.too_busy_to_lend <= most { since.or(Some(measured_at)) } else { None };
        }
        known.used = Some(used);
    }

    /// Returns when the next grace period ends, in ns since boot. A grace period concerns a PU (logical CPU) that a job
    /// borrows. When pjw decides to take such a PU back, the borrower may still use the PU until the grace period ends.
    /// Returns `None` if no grace period is running.
    #[must_use]
    pub fn next_grace_period_end(&self) -> Option<Nanos> {
        self.grace_period_ends.values().min().copied()
    }

    /// Returns when the grace period of the borrowed PU (logical CPU) `pu` ends, in ns since boot. When pjw decides to
    /// take a borrowed PU back, the borrower may still use the PU until the grace period ends. Returns `None` if no
    /// grace period is running for `pu`.
    #[must_use]
    pub fn grace_period_end(&self, pu: Pu) -> Option<Nanos> {
        self.grace_period_ends.get(&pu).copied()
    }

    /// Returns whether the return of the borrowed PU (logical CPU) `pu` is announced to its borrower: a grace period
    /// is running for the PU ([`LendingState::grace_period_end`]).
    pub(crate) fn is_return_announced(&self, pu: Pu) -> bool {
        self.grace_period_ends.contains_key(&pu)
    }

    /// Returns what pjw knows about the core use of `owner`, a job whose idle cores may be lent. `None` if pjw
    /// has never measured this use and has never lent a core of `owner`.
    #[must_use]
    pub fn owner_state(&self, owner: &JobId) -> Option<&OwnerLendingState> {
        self.owners.get(owner)
    }

    /// Sets which borrowers (jobs of the class besteffort, which borrow cores) have real-time load. pjw lends such a
    /// borrower no cores of other jobs. Otherwise, the kernel would run the real-time threads of the borrower before
    /// the threads of the owner of the cores. A borrower has real-time load if the threads with a real-time priority in
    /// one of its processes together use at least 1 % of a PU (logical CPU). A frozen borrower uses no CPU time, and
    /// keeps its real-time load while it has any real-time thread. The daemon calls this method after each scan of the
    /// processes of jobs.
    pub fn set_realtime_borrowers(&mut self, borrowers: BTreeSet<JobId>) {
        self.realtime_borrowers = borrowers;
    }

    /// Sets the list of borrowers that have a process which can't run at idle priority. Such a borrower gets no lent
    /// cores. A borrower is a job of the class besteffort, which runs on free cores and on cores that other jobs leave
    /// idle.
    pub(crate) fn set_unfit_borrowers(&mut self, borrowers: BTreeSet<JobId>) {
        self.unfit_borrowers = borrowers;
    }

    /// Returns whether the job `borrower` gets no lent cores because of threads with a real-time priority, as of the
    /// last scan of the processes of jobs.
    pub(crate) fn is_realtime_borrower(&self, borrower: &JobId) -> bool {
        self.realtime_borrowers.contains(borrower)
    }

    /// Returns whether the borrower `borrower` (a job that borrows cores) would slow down the owners of its borrowed
    /// cores. True if a thread of the borrower has a real-time priority, or if a process of the borrower can't run at
    /// idle priority.
    pub(crate) fn would_slow_owners(&self, borrower: &JobId) -> bool {
        self.realtime_borrowers.contains(borrower) || self.unfit_borrowers.contains(borrower)
    }

    /// Replaces the list of the lent PUs (logical CPUs) that pjw is about to take back. Each PU has the time, in ns
    /// since boot, at which pjw takes it back. Until then, the borrower may still use the PU. `exchanged` has the PUs
    /// that are taken back because their borrower has free PUs instead. Those of them that are not in `return_times`
    /// are left out.
    pub(crate) fn set_pus_to_return(&mut self, return_times: BTreeMap<Pu, Nanos>, exchanged: &CpuSet) {
        self.exchanged = exchanged.iter().filter(|pu| return_times.contains_key(pu)).collect();
        self.grace_period_ends = return_times;
    }

    /// Returns those lent PUs (logical CPUs) with a running grace period that their owner does not need. Their borrower
    /// has free PUs instead.
    pub(crate) fn exchanged_pus(&self) -> &CpuSet {
        &self.exchanged
    }

    /// Adds the PU (logical CPU) `pu` of the job `owner` to the PUs whose borrower was released or ended since the last
    /// decision about loans. The next decision gives them to another borrower if one wants them.
    pub(crate) fn add_pu_left_by_borrower(&mut self, owner: &JobId, pu: Pu) {
        self.left_by_borrowers.entry(owner.clone()).or_default().insert(pu);
    }

    /// Returns whether the job that borrowed the PU (logical CPU) `pu` of the job `owner` was released or ended since
    /// the last decision about loans.
    pub(crate) fn was_left_by_borrower(&self, owner: &JobId, pu: Pu) -> bool {
        self.left_by_borrowers.get(owner).is_some_and(|cpus| cpus.contains(pu))
    }

    /// Removes all PUs (logical CPUs) from those whose borrower was released or ended since the last decision about
    /// loans. Returns them, by their owner. Must be called after each such decision.
    pub(crate) fn take_pus_left_by_borrowers(&mut self) -> BTreeMap<JobId, CpuSet> {
        core::mem::take(&mut self.left_by_borrowers)
    }

    /// Records that pjw lent cores of the job `owner` at the time `now`, in ns since boot.
    pub(crate) fn record_loan(&mut self, owner: &JobId, now: Nanos) {
        self.owners.entry(owner.clone()).or_default().lent_at = Some(now);
    }

    /// Records that pjw took back lent cores of the job `owner` at the time `now`, in ns since boot. After a short
    /// loan, a core of the owner must be idle for twice as long as before until pjw lends it again, so that cores do
    /// not go back and forth. `lend_after` is the configured time for which a core must be idle. A loan is short if
    /// pjw last lent a core of the owner less than four times `lend_after` ago. A loan also counts as short if pjw
    /// does not know when it last lent a core of the owner, such as after a restart of the daemon.
    pub(crate) fn record_return(&mut self, owner: &JobId, lend_after: Duration, now: Nanos) {
        let known = self.owners.entry(owner.clone()).or_default();
        // After a long loan, the cores do not go back and forth.
        if known.lent_at.is_none_or(|at| !has_passed(at, lend_after.saturating_mul(SHORT_LOAN), now)) {
            known.returned = Some((now, (known.doublings(lend_after, now) + 1).min(MAX_DOUBLINGS)));
        }
        if let Some(used) = &mut known.used {
            used.lent_cpus = CpuSet::new();
        }
    }

    /// Records that all lent cores of the job `owner` are idle again because their borrower ended or has no process.
    /// The owner needs them no more than before, so they can be lent again at once.
    pub(crate) fn record_end_of_borrower(&mut self, owner: &JobId) {
        if let Some(known) = self.owners.get_mut(owner) {
            known.lent_at = None;
        }
    }

    /// Removes the recorded core use of all owners. Must be called when sampling stops: the earlier use does not
    /// predict the use after a gap.
    pub(crate) fn clear_core_use(&mut self) {
        for known in self.owners.values_mut() {
            known.used = None;
            known.at_most_since.clear();
            known.sampled_since = None;
        }
    }

    /// Removes the facts about each job for which `is_owner` is false. `is_owner` says whether pjw may lend the idle
    /// cores of the job.
    pub(crate) fn retain_owners(&mut self, is_owner: impl Fn(&JobId) -> bool) {
        self.owners.retain(|job, _| is_owner(job));
    }
}

impl OwnerLendingState {
    /// Returns the number of cores that the owner (a job whose idle cores may be lent) used at the last
    /// measurement. `None` before the first measurement.
    #[must_use]
    pub fn used_core_count(&self) -> Option<u32> {
        self.used.as_ref().map(|used| used.in_use)
    }

    /// Returns the lent PUs (logical CPUs) on which threads of the owner itself ran at the last measurement. The owner
    /// is a job whose idle cores may be lent.
    pub(crate) fn used_lent_cpus(&self) -> CpuSet {
        self.used.as_ref().map(|used| used.lent_cpus.clone()).unwrap_or_default()
    }

    /// Returns the largest number of cores of the owner (a job whose idle cores may be lent) that were too busy to be
    /// lent at the same time in the last `period`. `now` is the present time, in ns since boot. `None` if the
    /// measurements do not cover the whole period.
    pub(crate) fn max_busy_cores(&self, period: Duration, now: Nanos) -> Option<u32> {
        let is_long = |since: &Option<Nanos>| since.is_some_and(|since| has_passed(since, period, now));
        (0u32..).zip(&self.at_most_since).find(|(_, since)| is_long(since)).map(|(most, _)| most)
    }

    /// Returns the time for which a core of the owner must be idle before pjw lends the core. This is `lend_after`, or
    /// up to four times as much if pjw recently took back lent cores of the owner after a short loan. `now` is the
    /// present time, in ns since boot.
    pub(crate) fn required_idle_time(&self, lend_after: Duration, now: Nanos) -> Duration {
        doubled(lend_after, self.doublings(lend_after, now))
    }

    /// Returns whether pjw may lend cores of the owner at the time `now`, in ns since boot. True if pjw has measured
    /// the CPU use of the owner for at least `lend_after`, and has lent no core of the owner in the last `lend_after`.
    /// The first condition is for a restarted daemon, which does not know when cores were last lent.
    pub(crate) fn may_lend(&self, lend_after: Duration, now: Nanos) -> bool {
        self.sampled_since.is_some_and(|since| has_passed(since, lend_after, now))
            && self.lent_at.is_none_or(|at| has_passed(at, lend_after, now))
    }

    /// Returns how often `lend_after` is doubled: once for each return after a short loan. The number decreases by 1
    /// each time that twice the doubled time has passed without such a return.
    fn doublings(&self, lend_after: Duration, now: Nanos) -> u32 {
        let Some((returned_at, mut doublings)) = self.returned else { return 0 };
        let mut since_return = Duration::from_nanos(now.0.saturating_sub(returned_at.0));
        while doublings > 0 {
            let needed = doubled(lend_after, doublings) * 2;
            let Some(remaining) = since_return.checked_sub(needed) else { break };
            since_return = remaining;
            doublings -= 1;
        }
        doublings
    }
}

/// Returns `lend_after`, doubled `times` times, but at most [`MAX_DOUBLINGS`] times.
fn doubled(lend_after: Duration, times: u32) -> Duration {
    lend_after.saturating_mul(1 << times.min(MAX_DOUBLINGS))
}

fn has_passed(since: Nanos, period: Duration, now: Nanos) -> bool {
    u128::from(now.0.saturating_sub(since.0)) >= period.as_nanos()
}

#[cfg(test)]
mod tests;
