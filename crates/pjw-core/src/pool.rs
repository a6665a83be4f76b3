//! The ledger: who holds each PU. It has one entry for each PU, so two holders of one PU can't be written down.

use std::collections::BTreeMap;

use crate::allocate::Offer;
use crate::cpuset::{CpuSet, Pu};
use crate::job::JobId;
use crate::topology::Topology;

/// Who holds a PU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Nobody: any job may get it.
    Free,
    /// The system; no job ever gets it.
    Housekeeping,
    /// A job.
    Job(JobId),
}

/// The ledger of a machine's PUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    holders: BTreeMap<Pu, Holder>,
    /// PUs of the machine that are switched off now: nobody gets them, whoever holds them keeps them.
    offline: CpuSet,
    /// Counts changes, so that an offer made before one can be told from a fresh one.
    version: u64,
    /// PUs that are housekeeping, or will be once the job that holds them lets go.
    reserved: CpuSet,
}

/// The pool changed after the offer was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pool changed after this offer was made: ask for a new one")]
pub struct StaleOffer;

impl Pool {
    /// All PUs of the machine, the housekeeping ones set aside, the others free.
    #[must_use]
    pub fn new(topology: &Topology, housekeeping: &CpuSet) -> Self {
        let holder = |pu| if housekeeping.contains(pu) { Holder::Housekeeping } else { Holder::Free };
        let holders = topology.cpus().iter().map(|pu| (pu, holder(pu))).collect();
        Self { holders, offline: CpuSet::new(), version: 0, reserved: housekeeping.clone() }
    }

    /// The holder of one PU; `None` if it is not on this machine.
    #[must_use]
    pub fn holder(&self, pu: Pu) -> Option<&Holder> {
        self.holders.get(&pu)
    }

    /// Every PU and its holder, in ascending order.
    pub fn holders(&self) -> impl Iterator<Item = (Pu, &Holder)> {
        self.holders.iter().map(|(&pu, holder)| (pu, holder))
    }

    /// The PUs that nobody holds and that are online.
    #[must_use]
    pub fn free(&self) -> CpuSet {
        self.held_by(&Holder::Free).difference(&self.offline)
    }

    /// The PUs of the machine that are online.
    #[must_use]
    pub fn online(&self) -> CpuSet {
        self.holders().map(|(pu, _)| pu).filter(|&pu| !self.offline.contains(pu)).collect()
    }

    /// The PUs set aside for the system.
    #[must_use]
    pub fn housekeeping(&self) -> CpuSet {
        self.held_by(&Holder::Housekeeping)
    }

    /// The PUs that jobs hold.
    #[must_use]
    pub fn allocated(&self) -> CpuSet {
        self.holders().filter(|(_, holder)| matches!(holder, Holder::Job(_))).map(|(pu, _)| pu).collect()
    }

    /// The PUs that one job holds.
    #[must_use]
    pub fn of(&self, job: &JobId) -> CpuSet {
        self.holders()
            .filter(|(_, holder)| matches!(holder, Holder::Job(held) if held == job))
            .map(|(pu, _)| pu)
            .collect()
    }

    /// The count of changes so far.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Notes which PUs are online.
    pub fn set_online(&mut self, online: &CpuSet) {
        let offline: CpuSet = self.holders.keys().copied().filter(|&pu| !online.contains(pu)).collect();
        if offline != self.offline {
            self.offline = offline;
            self.version += 1;
        }
    }

    /// Gives the offered PUs to a job, in place of whatever it held.
    ///
    /// # Errors
    /// If the pool changed since the offer was made; then nothing changes.
    pub fn commit(&mut self, job: &JobId, offer: &Offer) -> Result<(), StaleOffer> {
        if offer.version != self.version || !self.available_to(job).is_superset_of(&offer.cpus) {
            return Err(StaleOffer);
        }
        self.give(job, &offer.cpus);
        Ok(())
    }

    /// Gives a job those of `cpus` that are free or its own, in place of whatever it held; returns what
    /// someone else holds. For grants that were made elsewhere: by a scheduler, or before a restart.
    pub fn claim(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        let granted = cpus.intersection(&self.available_to(job).0);
        self.give(job, &granted);
        cpus.difference(&granted)
    }

    /// Like [`Pool::claim`] for a grant from before a restart: housekeeping that was chosen since then waits
    /// until the job lets go, because grants don't move.
    pub fn reclaim(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        let kept = self.housekeeping().intersection(cpus);
        for pu in kept.iter() {
            self.holders.insert(pu, Holder::Free);
        }
        let elsewhere = self.claim(job, cpus);
        self.set_housekeeping(&self.reserved.clone());
        elsewhere
    }

    /// Sets other PUs aside. What a job holds stays its own until it lets go.
    pub fn set_housekeeping(&mut self, housekeeping: &CpuSet) {
        self.reserved = housekeeping.clone();
        for (pu, holder) in &mut self.holders {
            match (&holder, housekeeping.contains(*pu)) {
                (Holder::Free, true) => *holder = Holder::Housekeeping,
                (Holder::Housekeeping, false) => *holder = Holder::Free,
                _ => {}
            }
        }
        self.version += 1;
    }

    /// Takes everything back from a job; returns what it held.
    pub fn release(&mut self, job: &JobId) -> CpuSet {
        let held = self.of(job);
        self.give(job, &CpuSet::new());
        held
    }

    fn give(&mut self, job: &JobId, cpus: &CpuSet) {
        for (pu, holder) in &mut self.holders {
            if cpus.contains(*pu) {
                *holder = Holder::Job(job.clone());
            } else if matches!(holder, Holder::Job(held) if held == job) {
                *holder = if self.reserved.contains(*pu) { Holder::Housekeeping } else { Holder::Free };
            }
        }
        self.version += 1;
    }

    fn available_to(&self, job: &JobId) -> Available {
        Available(self.held_by(&Holder::Free).union(&self.of(job)))
    }

    fn held_by(&self, wanted: &Holder) -> CpuSet {
        self.holders().filter(|(_, holder)| *holder == wanted).map(|(pu, _)| pu).collect()
    }
}

/// What a job may be given: what is free and what it holds already.
struct Available(CpuSet);

impl Available {
    fn is_superset_of(&self, cpus: &CpuSet) -> bool {
        cpus.is_subset(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Regular;

    fn pool(housekeeping: &str) -> Pool {
        let shape =
            Regular { packages: 1, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 8, pus_per_core: 1 };
        Pool::new(&Topology::regular(shape), &set(housekeeping))
    }

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn job(name: &str) -> JobId {
        name.parse().unwrap()
    }

    fn offer(pool: &Pool, cpus: &str) -> Offer {
        Offer { cpus: set(cpus), because: Vec::new(), runner_up: String::new(), version: pool.version() }
    }

    #[test]
    fn an_offer_made_before_a_change_is_refused_and_changes_nothing() {
        let mut pool = pool("");
        let old = offer(&pool, "0-1");
        let fresh = offer(&pool, "2-3");
        pool.commit(&job("a"), &fresh).unwrap();
        assert_eq!(pool.commit(&job("b"), &old), Err(StaleOffer));
        assert_eq!(pool.free(), set("0-1,4-7"));
    }

    #[test]
    fn an_offer_of_what_others_hold_is_refused() {
        let mut pool = pool("7");
        pool.claim(&job("a"), &set("0-3"));
        for cpus in ["3-4", "6-7"] {
            let wrong = offer(&pool, cpus);
            assert_eq!(pool.commit(&job("b"), &wrong), Err(StaleOffer), "{cpus}");
        }
    }

    #[test]
    fn a_claim_gets_what_nobody_else_has_and_says_what_others_have() {
        let mut pool = pool("7");
        pool.claim(&job("a"), &set("0-3"));
        assert_eq!(pool.claim(&job("b"), &set("2-7")), set("2-3,7"));
        assert_eq!(pool.of(&job("b")), set("4-6"));
        assert_eq!(pool.release(&job("a")), set("0-3"));
        assert_eq!((pool.free(), pool.allocated()), (set("0-3"), set("4-6")));
    }

    #[test]
    fn what_is_offline_is_not_free_but_stays_with_its_holder() {
        let mut pool = pool("");
        pool.claim(&job("a"), &set("0-1"));
        pool.set_online(&set("0,2-6"));
        assert_eq!((pool.free(), pool.of(&job("a"))), (set("2-6"), set("0-1")));
        pool.set_online(&set("0-7"));
        assert_eq!(pool.free(), set("2-7"));
    }

    #[test]
    fn new_housekeeping_waits_for_the_job_that_holds_it() {
        let mut pool = pool("");
        pool.claim(&job("a"), &set("0-1"));
        pool.set_housekeeping(&set("1-2"));
        assert_eq!((pool.of(&job("a")), pool.housekeeping()), (set("0-1"), set("2")));
        pool.release(&job("a"));
        assert_eq!((pool.housekeeping(), pool.free()), (set("1-2"), set("0,3-7")));
        pool.reclaim(&job("a"), &set("0-1"));
        assert_eq!((pool.of(&job("a")), pool.housekeeping()), (set("0-1"), set("2")));
    }
}
