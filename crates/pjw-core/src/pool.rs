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
        Self { holders, offline: CpuSet::new(), version: 0 }
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
                *holder = Holder::Free;
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
