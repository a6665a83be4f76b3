//! How many cores each owner uses, and since when: the facts on which the phase `lending` decides.
//!
//! An owner is a job of the class guaranteed. The daemon samples the CPU time of its processes and records the number of
//! cores in use here. Nothing of this is journaled: after a restart, each owner counts as if it used all its cores until it
//! was sampled.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos, Pu, prelude::*};
use crate::terms::JobId;

mod core_use;

pub use core_use::{CoreUse, UseSample};

/// How often `lend_after` is doubled at most, however often cores came back.
const MAX_DOUBLINGS: u32 = 2;

/// What is known about the owners of cores that may be lent, and which borrowed PUs are to be taken back later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LendingState {
    owners: BTreeMap<JobId, OwnerLendingState>,
    /// The borrowed PUs that their borrowers still have for a grace period, with the end of this period.
    leaving: BTreeMap<Pu, Nanos>,
}

/// The use that an owner makes of its cores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnerLendingState {
    /// The number of cores in use, as of the last sample. `None` before the first sample.
    used: Option<u32>,
    /// For each number of cores, the time since which the owner has used at most this number. `None` if it uses more.
    at_most_since: Vec<Option<Nanos>>,
    /// The lent PUs on which the owner runs.
    runs_on: CpuSet,
    /// The time at which cores of the owner were last lent.
    lent_at: Option<Nanos>,
    /// The time at which lent cores were last taken back, and how often the pause before the next lending was doubled.
    returned: Option<(Nanos, u32)>,
}

impl LendingState {
    /// Records how many of its cores an owner uses at the time `at`, and on which lent PUs it runs. `core_count` is the
    /// number of cores of the owner.
    pub fn record_use(&mut self, owner: &JobId, used: u32, core_count: u32, runs_on: &CpuSet, at: Nanos) {
        let known = self.owners.entry(owner.clone()).or_default();
        known.used = Some(used);
        known.runs_on = runs_on.clone();
        known.at_most_since.resize(core_count as usize + 1, None);
        for (most, since) in (0u32..).zip(&mut known.at_most_since) {
            *since = if used <= most { since.or(Some(at)) } else { None };
        }
    }

    /// Returns the earliest time at which a borrowed PU is to be taken back, because its grace period ends, in ns since
    /// boot. `None` if no PU is leaving.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.leaving.values().min().copied()
    }

    /// Returns the end of the grace period of a borrowed PU that is to be taken back. `None` if the PU is not leaving.
    #[must_use]
    pub fn leaves_at(&self, pu: Pu) -> Option<Nanos> {
        self.leaving.get(&pu).copied()
    }

    /// Returns what is known about an owner. `None` if it was never sampled.
    #[must_use]
    pub fn use_of(&self, owner: &JobId) -> Option<&OwnerLendingState> {
        self.owners.get(owner)
    }

    /// Replaces the PUs that are leaving.
    pub(crate) fn set_leaving(&mut self, leaving: BTreeMap<Pu, Nanos>) {
        self.leaving = leaving;
    }

    /// Records that cores of an owner were lent, or taken back.
    pub(crate) fn record_move(&mut self, owner: &JobId, is_return: bool, lend_after: Duration, now: Nanos) {
        let known = self.owners.entry(owner.clone()).or_default();
        if is_return {
            known.returned = Some((now, (known.doublings(lend_after, now) + 1).min(MAX_DOUBLINGS)));
            known.runs_on = CpuSet::new();
        } else {
            known.lent_at = Some(now);
        }
    }

    /// Forgets what the owners use. Called while there are no samples: what an owner used before them says nothing about later.
    pub(crate) fn forget_use(&mut self) {
        for known in self.owners.values_mut() {
            (known.used, known.at_most_since, known.runs_on) = (None, Vec::new(), CpuSet::new());
        }
    }

    /// Forgets the owners for which `is_owner` is false.
    pub(crate) fn retain_owners(&mut self, is_owner: impl Fn(&JobId) -> bool) {
        self.owners.retain(|job, _| is_owner(job));
    }
}

impl OwnerLendingState {
    /// Returns the number of cores in use, as of the last sample. `None` before the first sample.
    #[must_use]
    pub fn used(&self) -> Option<u32> {
        self.used
    }

    /// The lent PUs on which the owner runs, as of the last sample.
    pub(crate) fn runs_on(&self) -> &CpuSet {
        &self.runs_on
    }

    /// The largest number of cores that the owner used in the last `period`. `None` if it was not sampled for so long.
    pub(crate) fn most_used_in(&self, period: Duration, now: Nanos) -> Option<u32> {
        let is_long = |since: &Option<Nanos>| since.is_some_and(|since| has_passed(since, period, now));
        (0u32..).zip(&self.at_most_since).find(|(_, since)| is_long(since)).map(|(most, _)| most)
    }

    /// The time for which a core must be idle now before it is lent.
    pub(crate) fn pause(&self, lend_after: Duration, now: Nanos) -> Duration {
        doubled(lend_after, self.doublings(lend_after, now))
    }

    /// Whether the last lending was long enough ago for another one.
    pub(crate) fn may_lend(&self, lend_after: Duration, now: Nanos) -> bool {
        self.lent_at.is_none_or(|at| has_passed(at, lend_after, now))
    }

    /// How often `lend_after` is doubled: once for each return, and once less for each two pauses without a return.
    fn doublings(&self, lend_after: Duration, now: Nanos) -> u32 {
        let Some((at, mut doublings)) = self.returned else { return 0 };
        let mut quiet = Duration::from_nanos(now.0.saturating_sub(at.0));
        while let Some(left) = quiet.checked_sub(doubled(lend_after, doublings) * 2).filter(|_| doublings > 0)
        {
            (quiet, doublings) = (left, doublings - 1);
        }
        doublings
    }
}

fn doubled(lend_after: Duration, times: u32) -> Duration {
    lend_after.saturating_mul(1 << times.min(MAX_DOUBLINGS))
}

fn has_passed(since: Nanos, period: Duration, now: Nanos) -> bool {
    u128::from(now.0.saturating_sub(since.0)) >= period.as_nanos()
}

#[cfg(test)]
mod tests;
