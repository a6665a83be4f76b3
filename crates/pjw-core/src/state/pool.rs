//! The pool: which job holds each PU, and which job borrows it. The pool has one entry per PU, so a PU can't have two
//! holders or two borrowers.

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::Topology;
use crate::terms::JobId;

/// The holder of a PU (logical CPU): a job, the system (for a housekeeping PU, which is reserved for the system), or
/// nobody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PuHolder {
    /// No job holds the PU, and it is not reserved. pjw can grant it to a job if it is online.
    Free,
    /// The PU is reserved for the system. It is not granted to jobs.
    Housekeeping,
    /// The PU is granted to the job with this id.
    Job(JobId),
}

impl PuHolder {
    /// Returns the job that holds the PU (logical CPU). `None` if the PU is free or reserved for the system.
    pub(crate) fn job(&self) -> Option<&JobId> {
        match self {
            Self::Job(job) => Some(job),
            Self::Free | Self::Housekeeping => None,
        }
    }
}

/// The index of [`PuHolder::Free`] in the list of holders.
const FREE: usize = 0;

/// The index of [`PuHolder::Housekeeping`] in the list of holders.
const HOUSEKEEPING: usize = 1;

/// The pool of PUs (logical CPUs): all PUs of the machine, each with its holder. The holder is a job, the system (for a
/// housekeeping PU), or nobody. A job of the class besteffort may borrow a PU that is free, or that its holder leaves
/// idle. A PU has at most one holder and one borrower.
#[derive(Debug, Clone)]
pub struct PuPool {
    /// For each PU number, the index of the holder of the PU in `holders`. `None` if the machine does not
    /// have the PU.
    entries: Vec<Option<usize>>,
    /// The holders: index 0 is [`PuHolder::Free`], index 1 is [`PuHolder::Housekeeping`], the others are jobs.
    /// The entry of a job that holds no PU any longer may be reused for another job.
    holders: Vec<PuHolder>,
    /// Every PU of the machine.
    cpus: CpuSet,
    /// The PUs of the machine that are offline. No job can get such a PU, but a job that holds it keeps it.
    offline: CpuSet,
    /// The number of changes of the pool so far. A [`PuOffer`] (PUs that the allocator chose for a job) is
    /// valid only until the next change.
    change_count: u64,
    /// The PUs that are reserved for the system, including those that a job still holds. Such a PU becomes a
    /// housekeeping PU when the job releases it.
    reserved: CpuSet,
    /// The job that borrows a PU, for each borrowed PU. A borrowed PU is free, or its holder is a job that
    /// leaves it idle.
    borrowers: BTreeMap<Pu, JobId>,
    /// The PUs on which processes run whose masks are of unknown origin. They are free, and are offered last.
    avoided: CpuSet,
}

/// Two pools are equal if all PUs have the same holders and an offer for one is valid for the other.
impl PartialEq for PuPool {
    fn eq(&self, other: &Self) -> bool {
        self.change_count == other.change_count
            && self.offline == other.offline
            && self.reserved == other.reserved
            && self.borrowers == other.borrowers
            && self.holders().eq(other.holders())
    }
}

impl Eq for PuPool {}

/// The error of [`PuPool::commit`]: the offer is no longer valid, because the pool changed after the offer was made. An
/// offer has the PUs (logical CPUs) that the allocator chose for a job. Another job may hold a PU of the offer now. The
/// caller must request a new offer from the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pool changed after this offer was made: ask for a new one")]
pub struct StaleOffer;

impl PuPool {
    /// Creates a pool of all PUs (logical CPUs) of the machine. All PUs are online. The PUs in `housekeeping` are
    /// reserved for the system, and all other PUs are free.
    #[must_use]
    pub fn new(topology: &Topology, housekeeping: &CpuSet) -> Self {
        let length = topology.cpus().last().map_or(0, |last| last.0 as usize + 1);
        let mut entries = vec![None; length];
        for pu in topology.cpus().iter() {
            let holder = if housekeeping.contains(pu) { HOUSEKEEPING } else { FREE };
            entries[pu.0 as usize] = Some(holder);
        }
        let holders = vec![PuHolder::Free, PuHolder::Housekeeping];
        let (cpus, reserved) = (topology.cpus().clone(), housekeeping.clone());
        let (offline, avoided, borrowers) = (CpuSet::new(), CpuSet::new(), BTreeMap::new());
        Self { entries, holders, cpus, offline, change_count: 0, reserved, borrowers, avoided }
    }

    /// Returns the holder of a PU (logical CPU). The holder of a free PU is [`PuHolder::Free`]. Returns `None` if the
    /// machine does not have the PU.
    #[must_use]
    pub fn holder(&self, pu: Pu) -> Option<&PuHolder> {
        let index = *self.entries.get(pu.0 as usize)?;
        self.holders.get(index?)
    }

    /// Iterates over all PUs (logical CPUs) of the machine with their holders, in ascending order of the kernel's PU
    /// numbers.
    pub fn holders(&self) -> impl Iterator<Item = (Pu, &PuHolder)> {
        self.holder_indices().filter_map(|(pu, index)| Some((pu, self.holders.get(index)?)))
    }

    /// Returns the online PUs (logical CPUs) that are neither granted to a job nor reserved for the system.
    #[must_use]
    pub fn free_cpus(&self) -> CpuSet {
        self.held_by_index(FREE).difference(&self.offline)
    }

    /// Returns the PUs (logical CPUs) of the machine that are online.
    #[must_use]
    pub fn online_cpus(&self) -> CpuSet {
        self.cpus.difference(&self.offline)
    }

    /// Returns the housekeeping PUs (logical CPUs): the PUs that are reserved for the system. A PU that was reserved
    /// while a job held it is not included. Such a PU becomes a housekeeping PU when the job releases it.
    #[must_use]
    pub fn housekeeping_cpus(&self) -> CpuSet {
        self.held_by_index(HOUSEKEEPING)
    }

    /// Returns the PUs (logical CPUs) that are allocated (granted) to jobs, including offline PUs.
    #[must_use]
    pub fn allocated_cpus(&self) -> CpuSet {
        self.holder_indices().filter(|&(_, index)| index > HOUSEKEEPING).map(|(pu, _)| pu).collect()
    }

    /// Returns the PUs (logical CPUs) that are granted to the job, including offline PUs. Empty if no PUs are granted
    /// to the job.
    #[must_use]
    pub fn pus_of(&self, job: &JobId) -> CpuSet {
        self.holder_index_of(job).map(|index| self.held_by_index(index)).unwrap_or_default()
    }

    /// Returns the job that borrows the PU (logical CPU). A borrowed PU is free, or another job holds it and leaves it
    /// idle. `None` if no job borrows the PU.
    #[must_use]
    pub fn borrower(&self, pu: Pu) -> Option<&JobId> {
        self.borrowers.get(&pu)
    }

    /// Iterates over the borrowed PUs (logical CPUs), each with the job that borrows it, in ascending order of the
    /// kernel's PU numbers. A job of the class besteffort borrows PUs that are free or that another job leaves idle.
    pub fn borrowed_pus(&self) -> impl Iterator<Item = (Pu, &JobId)> {
        self.borrowers.iter().map(|(&pu, borrower)| (pu, borrower))
    }

    /// Returns the PUs (logical CPUs) that the job borrows: free PUs, and PUs that other jobs hold and leave idle.
    /// Empty if the job borrows none.
    #[must_use]
    pub fn borrowed_by(&self, job: &JobId) -> CpuSet {
        self.borrowed_pus().filter(|(_, borrower)| *borrower == job).map(|(pu, _)| pu).collect()
    }

    /// Returns the lent PUs (logical CPUs). A PU is lent if one job holds it and leaves it idle, and another job
    /// borrows it.
    #[must_use]
    pub fn lent_cpus(&self) -> CpuSet {
        let has_owner = |pu: &Pu| self.holder(*pu).is_some_and(|holder| holder.job().is_some());
        self.borrowers.keys().copied().filter(has_owner).collect()
    }

    /// Returns the PUs (logical CPUs) that the job holds and that another job borrows.
    #[must_use]
    pub fn lent_by(&self, job: &JobId) -> CpuSet {
        if self.borrowers.is_empty() {
            return CpuSet::new();
        }
        self.pus_of(job).iter().filter(|pu| self.borrowers.contains_key(pu)).collect()
    }

    /// Returns each lent PU (logical CPU) with the number of PUs that its owner holds, including offline PUs. A PU is
    /// lent if one job (the owner) holds it and leaves it idle, and another job borrows it. A thread that may run on
    /// more PUs than the owner holds does not count as a thread of the owner, except if it is an io_uring worker.
    #[must_use]
    pub fn lent_cpus_with_owner_pu_counts(&self) -> BTreeMap<Pu, u32> {
        let lent = self.lent_cpus();
        let mut sizes: BTreeMap<&JobId, u32> = BTreeMap::new();
        if !lent.is_empty() {
            let owners = self.holders().filter_map(|(_, holder)| holder.job());
            owners.for_each(|owner| *sizes.entry(owner).or_default() += 1);
        }
        let size = |pu: Pu| Some((pu, *sizes.get(self.holder(pu)?.job()?)?));
        lent.iter().filter_map(size).collect()
    }

    /// Makes the PUs (logical CPUs) `cpus` the only PUs that the job borrows. A PU in `cpus` that another job already
    /// borrows stays with the other job. Returns the PUs of `cpus` that stay with other jobs.
    ///
    /// A job of the class besteffort borrows PUs that are free or that another job leaves idle. The holders of the PUs
    /// do not change, and offers of the allocator ([`PuOffer`]) stay valid.
    pub fn set_borrowed(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        self.borrowers.retain(|_, borrower| borrower != job);
        let mut taken = CpuSet::new();
        for pu in cpus.iter() {
            if self.borrowers.entry(pu).or_insert_with(|| job.clone()) != job {
                taken.insert(pu);
            }
        }
        taken
    }

    /// Returns a counter that grows each time grants, housekeeping PUs or online PUs change. A [`PuOffer`] is valid
    /// only if the counter is the same as when the offer was made.
    #[must_use]
    pub fn change_count(&self) -> u64 {
        self.change_count
    }

    /// Sets which PUs (logical CPUs) of the machine are online. The allocator offers no free PU that is offline. A job
    /// that holds a PU that goes offline keeps the PU. If the set of online PUs changes, all earlier offers of the
    /// allocator ([`PuOffer`]) become invalid.
    pub fn set_online(&mut self, online: &CpuSet) {
        let offline = self.cpus.difference(online);
        if offline != self.offline {
            self.offline = offline;
            self.change_count += 1;
        }
    }

    /// Grants the PUs (logical CPUs) of `offer` to `job`, and frees all other PUs of `job`. The allocator must have
    /// made the offer for `job`. If another job borrows a PU that `job` did not hold before, this borrowing ends. The
    /// next decision about lending then reports the loss of the PU by an event.
    ///
    /// # Errors
    /// If the pool changed since the offer was made, or if another job or the system holds a PU of the offer. The pool
    /// is then unchanged.
    pub fn commit(&mut self, job: &JobId, offer: &PuOffer) -> Result<(), StaleOffer> {
        if offer.pool_change_count != self.change_count || !offer.cpus.is_subset(&self.available_to(job)) {
            return Err(StaleOffer);
        }
        let new = offer.cpus.difference(&self.pus_of(job));
        self.borrowers.retain(|pu, _| !new.contains(*pu));
        self.set_held_pus(job, &offer.cpus);
        Ok(())
    }

    /// Grants to the job those PUs (logical CPUs) of `cpus` that are free or that the job already holds. Frees all
    /// other PUs of the job. Returns the PUs of `cpus` that were not granted. Such a PU is held by another job, is
    /// reserved for the system, or does not exist on the machine.
    ///
    /// Unlike [`PuPool::commit`], this function needs no [`PuOffer`] from the allocator. For example, it is used for
    /// PUs that a batch system chose.
    pub fn grant_available(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        let granted = cpus.intersection(&self.available_to(job));
        self.set_held_pus(job, &granted);
        cpus.difference(&granted)
    }

    /// Gives the PUs (logical CPUs) `cpus` back to a job that held these PUs before, such as before a restart of the
    /// daemon. Frees all other PUs of the job. Returns the PUs of `cpus` that were not granted. Such a PU is held by
    /// another job, or does not exist on the machine.
    ///
    /// Unlike [`PuPool::grant_available`], this function also grants housekeeping PUs (PUs reserved for the system).
    /// Such a PU becomes a housekeeping PU again when the job releases it.
    pub fn restore_grant(&mut self, job: &JobId, cpus: &CpuSet) -> CpuSet {
        for pu in self.housekeeping_cpus().intersection(cpus).iter() {
            self.entries[pu.0 as usize] = Some(FREE);
        }
        let not_granted = self.grant_available(job, cpus);
        self.set_housekeeping(&self.reserved.clone());
        not_granted
    }

    /// Sets the housekeeping PUs (logical CPUs), which are reserved for the system. A free PU in `housekeeping` becomes
    /// a housekeeping PU at once. A PU in `housekeeping` that a job holds becomes a housekeeping PU when the job
    /// releases it. A housekeeping PU that is not in `housekeeping` becomes free. All earlier offers of the allocator
    /// ([`PuOffer`]) become invalid.
    pub fn set_housekeeping(&mut self, housekeeping: &CpuSet) {
        self.reserved = housekeeping.clone();
        for (entry, pu) in self.entries.iter_mut().zip((0..).map(Pu)) {
            match (*entry, housekeeping.contains(pu)) {
                (Some(FREE), true) => *entry = Some(HOUSEKEEPING),
                (Some(HOUSEKEEPING), false) => *entry = Some(FREE),
                _ => {}
            }
        }
        self.change_count += 1;
    }

    /// Sets the avoided PUs (logical CPUs): the allocator offers them only if the other PUs do not suffice. These are
    /// the PUs of processes outside of jobs whose affinity masks an earlier run of the daemon may have set.
    pub(crate) fn set_avoided(&mut self, avoided: CpuSet) {
        self.avoided = avoided;
    }

    /// Returns the avoided PUs (logical CPUs): the allocator offers them only if the other PUs do not suffice.
    pub(crate) fn avoided_cpus(&self) -> &CpuSet {
        &self.avoided
    }

    /// Takes all PUs (logical CPUs) from the job, and returns the PUs that the job held. A PU that was reserved for the
    /// system while the job held it becomes a housekeeping PU. All other PUs become free. The job also loses all PUs
    /// that it borrowed. Returns the empty set if the job held no PUs.
    pub fn release(&mut self, job: &JobId) -> CpuSet {
        self.set_borrowed(job, &CpuSet::new());
        let held = self.pus_of(job);
        self.set_held_pus(job, &CpuSet::new());
        held
    }

    /// Makes `cpus` the PUs that the job `job` holds, also those that another job held before. PUs that are not in
    /// `cpus` and that the job held become free, or housekeeping PUs if they are reserved for the system.
    fn set_held_pus(&mut self, job: &JobId, cpus: &CpuSet) {
        let index = self.find_or_add_holder(job);
        for (entry, pu) in self.entries.iter_mut().zip((0..).map(Pu)) {
            if entry.is_some() && cpus.contains(pu) {
                *entry = Some(index);
            } else if *entry == Some(index) {
                *entry = Some(if self.reserved.contains(pu) { HOUSEKEEPING } else { FREE });
            }
        }
        self.change_count += 1;
    }

    /// Iterates over the PUs of the machine, each with the index of its holder in `holders`.
    fn holder_indices(&self) -> impl Iterator<Item = (Pu, usize)> {
        (0..).map(Pu).zip(&self.entries).filter_map(|(pu, entry)| Some((pu, (*entry)?)))
    }

    /// Returns the index of `job` in `holders`. `None` if the job is not in this list.
    fn holder_index_of(&self, job: &JobId) -> Option<usize> {
        self.holders.iter().position(|holder| matches!(holder, PuHolder::Job(held) if held == job))
    }

    /// Returns the index of `job` in `holders`, the list of the holders of PUs. If the job is not in the list, adds
    /// it first: in place of a job that holds no PUs, or at the end.
    fn find_or_add_holder(&mut self, job: &JobId) -> usize {
        if let Some(index) = self.holder_index_of(job) {
            return index;
        }
        let mut is_used = vec![false; self.holders.len()];
        is_used[FREE] = true;
        is_used[HOUSEKEEPING] = true;
        for (_, index) in self.holder_indices() {
            is_used[index] = true;
        }
        let unused = is_used.iter().position(|&is_used| !is_used);
        let index = unused.unwrap_or(self.holders.len());
        match self.holders.get_mut(index) {
            Some(holder) => *holder = PuHolder::Job(job.clone()),
            None => self.holders.push(PuHolder::Job(job.clone())),
        }
        index
    }

    /// Returns the PUs that are free, and those that the job holds.
    fn available_to(&self, job: &JobId) -> CpuSet {
        self.held_by_index(FREE).union(&self.pus_of(job))
    }

    /// Returns the PUs whose holder has the index `wanted` in `holders`.
    fn held_by_index(&self, wanted: usize) -> CpuSet {
        self.holder_indices().filter(|&(_, index)| index == wanted).map(|(pu, _)| pu).collect()
    }
}

/// The PUs (logical CPUs) that the allocator chose for a job, with the reasons. The PUs are not granted to the job
/// until [`PuPool::commit`] is called with the offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PuOffer {
    /// The PUs that the job is to get.
    pub cpus: CpuSet,
    /// The reasons why these PUs were chosen, one sentence each.
    pub reasons: Vec<String>,
    /// A description of the second-best set of PUs, in one sentence for users. Empty if the allocator found
    /// no second set.
    pub second_best: String,
    /// The value of [`PuPool::change_count`] when the offer was made. If the value is different now, the offer
    /// is invalid.
    pub pool_change_count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpu_set, job, regular_topology};

    fn pool(housekeeping: &str) -> PuPool {
        PuPool::new(&regular_topology(1, 1, 1, 8, 1), &cpu_set(housekeeping))
    }

    fn offer(pool: &PuPool, cpus: &str) -> PuOffer {
        PuOffer {
            cpus: cpu_set(cpus),
            reasons: Vec::new(),
            second_best: String::new(),
            pool_change_count: pool.change_count(),
        }
    }

    #[test]
    fn an_offer_made_before_a_change_is_refused_and_changes_nothing() {
        let mut pool = pool("");
        let old = offer(&pool, "0-1");
        let fresh = offer(&pool, "2-3");
        pool.commit(&job("a"), &fresh).unwrap();
        assert_eq!(pool.commit(&job("b"), &old), Err(StaleOffer));
        assert_eq!(pool.free_cpus(), cpu_set("0-1,4-7"));
    }

    #[test]
    fn an_offer_of_pus_of_another_job_is_refused() {
        let mut pool = pool("7");
        pool.grant_available(&job("a"), &cpu_set("0-3"));
        for cpus in ["3-4", "6-7"] {
            let wrong = offer(&pool, cpus);
            assert_eq!(pool.commit(&job("b"), &wrong), Err(StaleOffer), "{cpus}");
        }
    }

    #[test]
    fn a_job_gets_the_free_pus_of_its_list_and_not_those_of_others() {
        let mut pool = pool("7");
        pool.grant_available(&job("a"), &cpu_set("0-3"));
        assert_eq!(pool.grant_available(&job("b"), &cpu_set("2-7")), cpu_set("2-3,7"));
        assert_eq!(pool.pus_of(&job("b")), cpu_set("4-6"));
        assert_eq!(pool.release(&job("a")), cpu_set("0-3"));
        assert_eq!((pool.free_cpus(), pool.allocated_cpus()), (cpu_set("0-3"), cpu_set("4-6")));
    }

    #[test]
    fn an_offline_pu_is_not_free_and_stays_with_its_holder() {
        let mut pool = pool("");
        pool.grant_available(&job("a"), &cpu_set("0-1"));
        pool.set_online(&cpu_set("0,2-6"));
        assert_eq!((pool.free_cpus(), pool.pus_of(&job("a"))), (cpu_set("2-6"), cpu_set("0-1")));
        pool.set_online(&cpu_set("0-7"));
        assert_eq!(pool.free_cpus(), cpu_set("2-7"));
    }

    #[test]
    fn a_held_pu_becomes_housekeeping_after_its_release() {
        let mut pool = pool("");
        pool.grant_available(&job("a"), &cpu_set("0-1"));
        pool.set_housekeeping(&cpu_set("1-2"));
        assert_eq!((pool.pus_of(&job("a")), pool.housekeeping_cpus()), (cpu_set("0-1"), cpu_set("2")));
        pool.release(&job("a"));
        assert_eq!((pool.housekeeping_cpus(), pool.free_cpus()), (cpu_set("1-2"), cpu_set("0,3-7")));
        pool.restore_grant(&job("a"), &cpu_set("0-1"));
        assert_eq!((pool.pus_of(&job("a")), pool.housekeeping_cpus()), (cpu_set("0-1"), cpu_set("2")));
    }

    #[test]
    fn the_pool_does_not_grow_over_thousands_of_jobs() {
        let mut pool = pool("");
        for round in 0..5_000i32 {
            let (coming, going) = (job(&format!("j{round}")), job(&format!("j{}", round - 2)));
            let pu = Pu(round.rem_euclid(8).try_into().unwrap());
            pool.release(&going);
            assert_eq!(pool.grant_available(&coming, &pu.into()), CpuSet::new());
            assert_eq!(pool.holder(pu), Some(&PuHolder::Job(coming)));
        }
        assert!(pool.holders.len() <= 6, "{} holders", pool.holders.len());
        assert_eq!(pool.allocated_cpus(), cpu_set("6-7"));
    }

    #[test]
    fn pools_with_equal_holders_are_equal() {
        let (mut one, mut other) = (pool("7"), pool("7"));
        for (pool, first, second) in [(&mut one, "a", "b"), (&mut other, "b", "a")] {
            for name in [first, second] {
                pool.grant_available(&job(name), &cpu_set(if name == "a" { "0-1" } else { "2" }));
            }
        }
        assert_eq!(one, other);
        other.release(&job("a"));
        assert_ne!(one, other);
    }

    #[test]
    fn a_pool_of_8192_pus_grants_and_frees_all_of_them() {
        let mut pool = PuPool::new(&regular_topology(8, 4, 16, 8, 2), &cpu_set("0,4096"));
        assert_eq!(pool.grant_available(&job("a"), &cpu_set("0-5000,8191,9000")), cpu_set("0,4096,9000"));
        assert_eq!((pool.holder(Pu(8191)), pool.holder(Pu(8192))), (Some(&PuHolder::Job(job("a"))), None));
        assert_eq!(pool.free_cpus(), cpu_set("5001-8190"));
        assert_eq!(pool.release(&job("a")), cpu_set("1-4095,4097-5000,8191"));
        assert_eq!(pool.free_cpus(), cpu_set("1-4095,4097-8191"));
    }
}
