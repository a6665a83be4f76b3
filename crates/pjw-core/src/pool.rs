//! The ledger: who holds each PU. It has one entry for each PU, so two holders of one PU can't be written
//! down.

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

/// The place of [`Holder::Free`] in the list of holders.
const FREE: usize = 0;
/// The place of [`Holder::Housekeeping`] in the list of holders.
const HOUSEKEEPING: usize = 1;

/// The ledger of a machine's PUs.
#[derive(Debug, Clone)]
pub struct Pool {
    /// By PU number: the place of its holder in `holders`; `None` where the machine has no such PU.
    entries: Vec<Option<usize>>,
    /// Free, housekeeping, then jobs. The place of a job that holds nothing may be taken by another one.
    holders: Vec<Holder>,
    /// Every PU of the machine.
    cpus: CpuSet,
    /// PUs of the machine that are switched off now: nobody gets them, whoever holds them keeps them.
    offline: CpuSet,
    /// Counts changes, so that an offer made before one can be told from a fresh one.
    version: u64,
    /// PUs that are housekeeping, or will be once the job that holds them lets go.
    reserved: CpuSet,
}

/// Ledgers are equal if they say the same of every PU and an offer for one is good for the other.
impl PartialEq for Pool {
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version
            && self.offline == other.offline
            && self.reserved == other.reserved
            && self.holders().eq(other.holders())
    }
}

impl Eq for Pool {}

/// The pool changed after the offer was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pool changed after this offer was made: ask for a new one")]
pub struct StaleOffer;

impl Pool {
    /// All PUs of the machine, the housekeeping ones set aside, the others free.
    #[must_use]
    pub fn new(topology: &Topology, housekeeping: &CpuSet) -> Self {
        let length = topology.cpus().last().map_or(0, |last| last.0 as usize + 1);
        let mut entries = vec![None; length];
        for pu in topology.cpus().iter() {
            let holder = if housekeeping.contains(pu) { HOUSEKEEPING } else { FREE };
            entries[pu.0 as usize] = Some(holder);
        }
        let holders = vec![Holder::Free, Holder::Housekeeping];
        let (cpus, reserved) = (topology.cpus().clone(), housekeeping.clone());
        Self { entries, holders, cpus, offline: CpuSet::new(), version: 0, reserved }
    }

    /// The holder of one PU; `None` if it is not on this machine.
    #[must_use]
    pub fn holder(&self, pu: Pu) -> Option<&Holder> {
        let place = *self.entries.get(pu.0 as usize)?;
        self.holders.get(place?)
    }

    /// Every PU and its holder, in ascending order.
    pub fn holders(&self) -> impl Iterator<Item = (Pu, &Holder)> {
        self.places().filter_map(|(pu, place)| Some((pu, self.holders.get(place)?)))
    }

    /// The PUs that nobody holds and that are online.
    #[must_use]
    pub fn free(&self) -> CpuSet {
        self.held_at(FREE).difference(&self.offline)
    }

    /// The PUs of the machine that are online.
    #[must_use]
    pub fn online(&self) -> CpuSet {
        self.cpus.difference(&self.offline)
    }

    /// The PUs set aside for the system.
    #[must_use]
    pub fn housekeeping(&self) -> CpuSet {
        self.held_at(HOUSEKEEPING)
    }

    /// The PUs that jobs hold.
    #[must_use]
    pub fn allocated(&self) -> CpuSet {
        self.places().filter(|&(_, place)| place > HOUSEKEEPING).map(|(pu, _)| pu).collect()
    }

    /// The PUs that one job holds.
    #[must_use]
    pub fn of(&self, job: &JobId) -> CpuSet {
        self.place_of(job).map(|place| self.held_at(place)).unwrap_or_default()
    }

    /// The count of changes so far.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Notes which PUs are online.
    pub fn set_online(&mut self, online: &CpuSet) {
        let offline = self.cpus.difference(online);
        if offline != self.offline {
            self.offline = offline;
            self.version += 1;
        }
    }

    /// Gives the offered PUs to a job, in place of whatever it held.
    ///
    /// # Errors
    /// If the pool changed since the offer was made, or something offered is neither free nor the job's; then
    /// nothing changes.
    pub fn commit(&mut self, job: &JobId, offer: &Offer) -> Result<(), StaleOffer> {
        if offer.version != self.version || !offer.cpus.is_subset(&self.available_to(job)) {
            return Err(StaleOffer);
        }
        self.give(job, &offer.cpus);
        Ok(())
    }

    /// Gives a job those of `cpus` that are free or its own, in place of whatever it held; returns what
    /// someone else holds. For grants that were made elsewhere: by a scheduler, or before a restart.
    pub fn claim(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        let granted = cpus.intersection(&self.available_to(job));
        self.give(job, &granted);
        cpus.difference(&granted)
    }

    /// Like [`Pool::claim`] for a grant from before a restart: housekeeping that was chosen since then waits
    /// until the job lets go, because grants don't move.
    pub fn reclaim(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        for pu in self.housekeeping().intersection(cpus).iter() {
            self.entries[pu.0 as usize] = Some(FREE);
        }
        let elsewhere = self.claim(job, cpus);
        self.set_housekeeping(&self.reserved.clone());
        elsewhere
    }

    /// Sets other PUs aside. What a job holds stays its own until it lets go.
    pub fn set_housekeeping(&mut self, housekeeping: &CpuSet) {
        self.reserved = housekeeping.clone();
        for (entry, pu) in self.entries.iter_mut().zip((0..).map(Pu)) {
            match (*entry, housekeeping.contains(pu)) {
                (Some(FREE), true) => *entry = Some(HOUSEKEEPING),
                (Some(HOUSEKEEPING), false) => *entry = Some(FREE),
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
        let place = self.place_for(job);
        for (entry, pu) in self.entries.iter_mut().zip((0..).map(Pu)) {
            if entry.is_some() && cpus.contains(pu) {
                *entry = Some(place);
            } else if *entry == Some(place) {
                *entry = Some(if self.reserved.contains(pu) { HOUSEKEEPING } else { FREE });
            }
        }
        self.version += 1;
    }

    fn places(&self) -> impl Iterator<Item = (Pu, usize)> {
        (0..).map(Pu).zip(&self.entries).filter_map(|(pu, entry)| Some((pu, (*entry)?)))
    }

    fn place_of(&self, job: &JobId) -> Option<usize> {
        self.holders.iter().position(|holder| matches!(holder, Holder::Job(held) if held == job))
    }

    /// The place of a job: the one it has, else one that is out of use, else a new one.
    fn place_for(&mut self, job: &JobId) -> usize {
        if let Some(place) = self.place_of(job) {
            return place;
        }
        let mut used = vec![false; self.holders.len()];
        for (_, place) in self.places() {
            used[place] = true;
        }
        let unused = used.iter().skip(HOUSEKEEPING + 1).position(|&used| !used);
        let place = unused.map_or(self.holders.len(), |after| after + HOUSEKEEPING + 1);
        match self.holders.get_mut(place) {
            Some(holder) => *holder = Holder::Job(job.clone()),
            None => self.holders.push(Holder::Job(job.clone())),
        }
        place
    }

    fn available_to(&self, job: &JobId) -> CpuSet {
        self.held_at(FREE).union(&self.of(job))
    }

    fn held_at(&self, wanted: usize) -> CpuSet {
        self.places().filter(|&(_, place)| place == wanted).map(|(pu, _)| pu).collect()
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

    #[test]
    fn thousands_of_jobs_come_and_go_and_the_ledger_does_not_grow() {
        let mut pool = pool("");
        for round in 0..5_000i32 {
            let (coming, going) = (job(&format!("j{round}")), job(&format!("j{}", round - 2)));
            let pu = Pu(round.rem_euclid(8).try_into().unwrap());
            pool.release(&going);
            assert_eq!(pool.claim(&coming, &pu.into()), CpuSet::new());
            assert_eq!(pool.holder(pu), Some(&Holder::Job(coming)));
        }
        assert!(pool.holders.len() <= 6, "{} places", pool.holders.len());
        assert_eq!(pool.allocated(), set("6-7"));
    }

    #[test]
    fn ledgers_that_say_the_same_are_equal_whatever_their_history() {
        let (mut one, mut other) = (pool("7"), pool("7"));
        for (pool, first, second) in [(&mut one, "a", "b"), (&mut other, "b", "a")] {
            for name in [first, second] {
                pool.claim(&job(name), &set(if name == "a" { "0-1" } else { "2" }));
            }
        }
        assert_eq!(one, other);
        other.release(&job("a"));
        assert_ne!(one, other);
    }

    #[test]
    fn a_ledger_of_8192_pus_gives_and_takes_all_of_them() {
        let shape =
            Regular { packages: 8, numa_per_package: 4, l3_per_numa: 16, cores_per_l3: 8, pus_per_core: 2 };
        let mut pool = Pool::new(&Topology::regular(shape), &set("0,4096"));
        assert_eq!(pool.claim(&job("a"), &set("0-5000,8191,9000")), set("0,4096,9000"));
        assert_eq!((pool.holder(Pu(8191)), pool.holder(Pu(8192))), (Some(&Holder::Job(job("a"))), None));
        assert_eq!(pool.free(), set("5001-8190"));
        assert_eq!(pool.release(&job("a")), set("1-4095,4097-5000,8191"));
        assert_eq!(pool.free(), set("1-4095,4097-8191"));
    }
}
