//! Audits the pool (the list of all PUs with their holders) and the grants of all jobs. The audit stores what it
//! checked. After a change, it checks only the changed jobs and the holders of the cores that these jobs have or had.

use crate::audit::violation::Violation;
use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::Topology;
use crate::state::{PuHolder, WardenState};
use crate::terms::{Grant, GrantedBy, Job, JobId, Ownership, Policy, PriorityClass};

/// An audit of the PUs (logical CPUs) that jobs hold: the result of checking them against the invariants of pjw. For
/// example, two jobs must not own the same PU, unless one of them may share its PUs
/// ([`Grant::is_shared`](crate::terms::Grant::is_shared)). [`Violation`] has one variant for each invariant.
///
/// [`GrantAudit::new`] checks all jobs and PUs. [`GrantAudit::update`] then checks only the jobs and PUs that changed.
/// For this purpose, the audit stores the PUs of each job as of the last check.
#[derive(Debug)]
pub struct GrantAudit {
    /// All PUs of the machine.
    machine: CpuSet,
    /// The PUs of the core to which a PU belongs. The index is the number of the PU.
    cores: Vec<CpuSet>,
    /// The holder of each PU, as the pool had it at the last check.
    holders: Vec<(Pu, PuHolder)>,
    /// The PUs that are reserved for the system.
    housekeeping: CpuSet,
    /// The PUs that each job holds in the pool.
    held: BTreeMap<JobId, CpuSet>,
    /// The grant of each job, as it was at the last check.
    grants: BTreeMap<JobId, AuditedGrant>,
    /// For each PU, the jobs that own it by a grant that must not overlap with others. More than one job is a
    /// violation.
    owners: BTreeMap<Pu, BTreeSet<JobId>>,
    /// The violation that concerns the whole machine.
    machine_violation: Option<Violation>,
    /// For each PU whose holder does not exist, the violation.
    pu_violations: BTreeMap<Pu, Violation>,
    /// For each PU whose borrower does not exist, the violation.
    borrower_violations: Vec<Violation>,
    /// The violations that concern a job. Jobs without a violation have no entry.
    job_violations: BTreeMap<JobId, Vec<Violation>>,
}

/// What was last read of a job's grant. A job without a grant has no PUs.
#[derive(Debug, Default)]
struct AuditedGrant {
    cpus: CpuSet,
    /// Whether the job need not be the only owner: other jobs may share the PUs, or the job borrows them.
    shared: bool,
}

impl GrantAudit {
    /// Makes an audit: checks all jobs and all PUs (logical CPUs) in `state` against the invariants of pjw. For
    /// example, two jobs must not own the same PU, unless one of them may share its PUs
    /// ([`Grant::is_shared`](crate::terms::Grant::is_shared)). [`GrantAudit::violations`] returns the violations that
    /// were found. `policy` says whether the PUs of one core may belong to two jobs (`share_smt`).
    ///
    /// After a change of jobs or of the PUs that they hold, the caller must call [`GrantAudit::update`] with the
    /// changed jobs. After a change of `policy` or of the topology in `state`, the caller must make a new audit,
    /// because `update` checks only the changed jobs.
    #[must_use]
    pub fn new(state: &WardenState, policy: &Policy) -> Self {
        let mut audit = Self {
            machine: state.topology.cores().iter().flat_map(|core| core.pus.iter()).collect(),
            cores: core_by_pu(&state.topology),
            holders: Vec::new(),
            housekeeping: CpuSet::new(),
            held: BTreeMap::new(),
            grants: BTreeMap::new(),
            owners: BTreeMap::new(),
            machine_violation: None,
            pu_violations: BTreeMap::new(),
            borrower_violations: Vec::new(),
            job_violations: BTreeMap::new(),
        };
        audit.update(state, &state.jobs.keys().cloned().collect(), policy);
        audit
    }

    /// Checks the jobs and PUs (logical CPUs) that changed since the last check against the invariants of pjw. Replaces
    /// the stored violations that concern these jobs and PUs, and keeps all other violations.
    ///
    /// `changed` must contain every job that was added, changed or removed since the last check. The function
    /// itself finds the PUs whose holder changed.
    pub fn update(&mut self, state: &WardenState, changed: &BTreeSet<JobId>, policy: &Policy) {
        let mut concerned = changed.clone();
        let mut changed_pus = self.read_pool(state, &mut concerned);
        for id in changed {
            changed_pus = changed_pus.union(&self.read_grant(state, id));
        }
        let cores = changed_pus.iter().filter_map(|pu| self.cores.get(pu.0 as usize));
        changed_pus = cores.fold(changed_pus.clone(), |changed_pus, core| changed_pus.union(core));
        for pu in changed_pus.iter() {
            concerned.extend(self.owners.get(&pu).into_iter().flatten().cloned());
            concerned.extend(state.pool.holder(pu).and_then(PuHolder::job).cloned());
            concerned.extend(state.pool.borrower(pu).cloned());
        }
        self.check_pus(state, &changed_pus);
        for id in &concerned {
            self.job_violations.remove(id);
            let violations = state.jobs.get(id).map(|job| self.check_job(state, job, policy));
            if let Some(violations) = violations.filter(|violations| !violations.is_empty()) {
                self.job_violations.insert(id.clone(), violations);
            }
        }
    }

    /// Iterates over all violations that existed at the last check, including violations that an earlier check
    /// had already found.
    pub fn violations(&self) -> impl Iterator<Item = &Violation> {
        self.machine_violation
            .iter()
            .chain(self.pu_violations.values())
            .chain(&self.borrower_violations)
            .chain(self.job_violations.values().flatten())
    }

    /// Stores the present holder of each PU. The pool (the list of all PUs with their holders) has the present
    /// holders. `concerned` has the jobs to check. Returns the PUs that these jobs hold, and the PUs that have
    /// another holder than before. Adds to `concerned` the jobs that lost a PU.
    fn read_pool(&mut self, state: &WardenState, concerned: &mut BTreeSet<JobId>) -> CpuSet {
        let mut changed_pus = CpuSet::new();
        let mut changed: Vec<(usize, Pu, &PuHolder)> = Vec::new();
        for (index, (pu, holder)) in state.pool.holders().enumerate() {
            if holder.job().is_some_and(|job| concerned.contains(job)) {
                changed_pus.insert(pu);
            }
            if self.stored_holder(index, pu) != Some(holder) {
                changed.push((index, pu, holder));
            }
        }
        for (index, pu, holder) in changed {
            changed_pus.insert(pu);
            let former_job = self.stored_holder(index, pu).and_then(PuHolder::job).cloned();
            if let Some(job) = former_job {
                if let Some(mut held) = self.held.remove(&job).filter(|held| held.len() > 1) {
                    held.remove(pu);
                    self.held.insert(job.clone(), held);
                }
                concerned.insert(job);
            }
            self.housekeeping.remove(pu);
            let cpus_of_holder = match holder {
                PuHolder::Job(job) => Some(self.held.entry(job.clone()).or_default()),
                PuHolder::Housekeeping => Some(&mut self.housekeeping),
                PuHolder::Free => None,
            };
            if let Some(cpus) = cpus_of_holder {
                cpus.insert(pu);
            }
            match self.holders.get_mut(index) {
                Some(entry) => *entry = (pu, holder.clone()),
                None => self.holders.push((pu, holder.clone())),
            }
        }
        changed_pus
    }

    /// Returns the stored holder of `pu`, if the entry with the index `index` is the entry of this PU.
    fn stored_holder(&self, index: usize, pu: Pu) -> Option<&PuHolder> {
        self.holders.get(index).filter(|(stored, _)| *stored == pu).map(|(_, holder)| holder)
    }

    /// Stores the present grant of the job `id` (the PUs that the job holds), and the owners of its PUs. Returns the
    /// PUs of the former and of the present grant. A job that was removed has no present grant.
    fn read_grant(&mut self, state: &WardenState, id: &JobId) -> CpuSet {
        let before = self.grants.remove(id).unwrap_or_default();
        if !before.shared {
            for pu in before.cpus.iter() {
                if let Some(owners) = self.owners.get_mut(&pu) {
                    owners.remove(id);
                    if owners.is_empty() {
                        self.owners.remove(&pu);
                    }
                }
            }
        }
        let Some(job) = state.jobs.get(id) else { return before.cpus };
        let grant = job.grant.as_ref();
        let cpus = grant.map(|grant| grant.cpus.clone()).unwrap_or_default();
        let shared = grant.is_some_and(|grant| grant.is_shared || grant.ownership != Ownership::Owned);
        if !shared {
            for pu in cpus.iter() {
                self.owners.entry(pu).or_default().insert(id.clone());
            }
        }
        let changed_pus = before.cpus.union(&cpus);
        self.grants.insert(id.clone(), AuditedGrant { cpus, shared });
        changed_pus
    }

    /// Checks the pool (the list of all PUs with their holders), and replaces the stored violations.
    ///
    /// - The pool must have an entry for each PU of the machine and no other entry.
    /// - Each job that holds a PU must exist. This is checked only for the PUs in `changed_pus`.
    /// - Each borrower (a job that uses a core that another job leaves idle) must exist.
    fn check_pus(&mut self, state: &WardenState, changed_pus: &CpuSet) {
        let entries: CpuSet = self.holders.iter().map(|&(pu, _)| pu).collect();
        let cpus = entries.difference(&self.machine).union(&self.machine.difference(&entries));
        self.machine_violation = (!cpus.is_empty()).then_some(Violation::PoolDiffersFromMachine { cpus });
        for pu in changed_pus.iter() {
            self.pu_violations.remove(&pu);
            let holder = state.pool.holder(pu).and_then(PuHolder::job);
            if let Some(job) = holder.filter(|job| !self.grants.contains_key(*job)) {
                self.pu_violations.insert(pu, Violation::UnknownHolder { pu, job: job.clone() });
            }
        }
        let unknown = state.pool.borrowed_pus().filter(|(_, job)| !self.grants.contains_key(*job));
        let violation = |(pu, job): (Pu, &JobId)| Violation::UnknownBorrower { pu, job: job.clone() };
        self.borrower_violations = unknown.map(violation).collect();
    }

    /// Returns the violations of the grant of `job` (the PUs that the job holds). The rules are:
    ///
    /// - A job without a grant holds no PUs in the pool (the list of all PUs with their holders).
    /// - A grant is not empty.
    /// - The pool has the same PUs for the job, and no other job owns one of them, unless several jobs may share the
    ///   grant.
    /// - If pjw chose the PUs, none of them is a housekeeping PU (reserved for the system).
    /// - If pjw chose the PUs, no core is split between jobs, unless `policy` or the grant allows this.
    /// - The grant of a borrower (a job that uses free cores and cores that other jobs leave idle) has the rules of
    ///   [`check_borrowed_grant`].
    fn check_job(&self, state: &WardenState, job: &Job, policy: &Policy) -> Vec<Violation> {
        let id = &job.id;
        let held = self.held.get(id).cloned().unwrap_or_default();
        let mut found = Vec::new();
        let Some(grant) = &job.grant else {
            let held = held.union(&state.pool.borrowed_by(id));
            if !held.is_empty() {
                found.push(Violation::GrantDiffersFromPool { job: id.clone(), granted: CpuSet::new(), held });
            }
            return found;
        };
        if grant.cpus.is_empty() {
            found.push(Violation::EmptyGrant { job: id.clone() });
        }
        if grant.ownership != Ownership::Owned {
            found.extend(check_borrowed_grant(state, job, grant, held));
            return found;
        }
        // PUs that were offline when the daemon was restarted are not in the topology, and still belong to the job.
        let granted = grant.cpus.intersection(&self.machine);
        if granted.is_empty() {
            found.push(Violation::GrantOutsideMachine { job: id.clone(), cpus: grant.cpus.clone() });
        }
        if granted != held && !grant.is_shared {
            found.push(Violation::GrantDiffersFromPool { job: id.clone(), granted, held });
        }
        if grant.granted_by != GrantedBy::Scheduler {
            let granted_housekeeping = grant.cpus.intersection(&self.housekeeping);
            if !granted_housekeeping.is_empty() {
                let cpus = granted_housekeeping;
                found.push(Violation::HousekeepingGranted { job: id.clone(), cpus });
            }
            if !grant.may_split_cores && !policy.share_smt && !grant.is_shared {
                found.extend(self.split_core_violation(state, id, &grant.cpus));
            }
        }
        if !grant.is_shared {
            found.extend(self.two_owners_violations(id, &grant.cpus));
        }
        found
    }

    /// Returns a violation for the first core that has PUs of `job` and PUs of another job. `cpus` has the PUs of
    /// `job`. Returns `None` if there is no such core. The other job counts only if pjw chose its PUs, and if it may
    /// neither share PUs nor have a part of a core.
    fn split_core_violation(&self, state: &WardenState, job: &JobId, cpus: &CpuSet) -> Option<Violation> {
        cpus.iter().find_map(|pu| {
            let core = self.cores.get(pu.0 as usize)?;
            let others = core.difference(cpus);
            let by_warden = |holder: &JobId| {
                let grant = state.jobs.get(holder).and_then(|job| job.grant_chosen_by(GrantedBy::Warden));
                grant.is_some_and(|grant| !grant.is_shared && !grant.may_split_cores)
            };
            let of_another = |pu: Pu| {
                let holder = state.pool.holder(pu).and_then(PuHolder::job);
                holder.is_some_and(|holder| holder != job && by_warden(holder))
            };
            let is_split = others.iter().any(of_another);
            is_split.then(|| Violation::SplitCore { job: job.clone(), cpus: core.intersection(cpus) })
        })
    }

    /// Returns a violation for each other job that owns some of the PUs `cpus` of `job`. Grants that several jobs may
    /// share do not count. For each PU, only the owner with the next smaller id is considered, so each pair of jobs is
    /// reported once.
    fn two_owners_violations(&self, job: &JobId, cpus: &CpuSet) -> Vec<Violation> {
        let mut shared_pus: BTreeMap<&JobId, CpuSet> = BTreeMap::new();
        for pu in cpus.iter() {
            let other = self.owners.get(&pu).and_then(|owners| owners.range(..job).next_back());
            if let Some(other) = other {
                shared_pus.entry(other).or_default().insert(pu);
            }
        }
        let violation = |(other, cpus): (&JobId, CpuSet)| Violation::TwoOwners {
            job: job.clone(),
            other: other.clone(),
            cpus,
        };
        shared_pus.into_iter().map(violation).collect()
    }
}

/// Returns the violations of `grant`, the grant of a job that owns no PUs and may borrow some. The rules are:
///
/// - In the pool (the list of all PUs with their holders), the job is the borrower of exactly the borrowed PUs.
/// - The borrowed PUs are free, or belong to a job that lends them ([`is_lender`]).
/// - The borrowed PUs are whole cores. This is not checked while a borrowed PU is offline.
/// - `held`, the PUs that the job owns in the pool, is empty.
fn check_borrowed_grant(state: &WardenState, job: &Job, grant: &Grant, held: CpuSet) -> Vec<Violation> {
    let mut found = Vec::new();
    if !held.is_empty() {
        found.push(Violation::GrantDiffersFromPool { job: job.id.clone(), granted: CpuSet::new(), held });
    }
    let borrowed = state.pool.borrowed_by(&job.id);
    let expected = if grant.ownership == Ownership::Borrowed { grant.cpus.clone() } else { CpuSet::new() };
    if borrowed != expected {
        let (job, granted) = (job.id.clone(), expected);
        found.push(Violation::GrantDiffersFromPool { job, granted, held: borrowed.clone() });
    }
    let may_not_lend = |pu: &Pu| match state.pool.holder(*pu) {
        Some(PuHolder::Free) => false,
        Some(PuHolder::Job(owner)) => !state.jobs.get(owner).is_some_and(is_lender),
        Some(PuHolder::Housekeeping) | None => true,
    };
    let cpus: CpuSet = borrowed.iter().filter(may_not_lend).collect();
    if !cpus.is_empty() {
        found.push(Violation::BorrowedFromNonLender { job: job.id.clone(), cpus });
    }
    // A thread of the owner on the other PU of a core would run slower.
    let online = state.pool.online_cpus();
    let cores = state.topology.split_by_core(&online);
    let is_split = |core: &CpuSet| core.intersects(&borrowed) && !core.is_subset(&borrowed);
    if borrowed.is_subset(&online) {
        found.extend(
            cores
                .filter(is_split)
                .map(|core| Violation::SplitCore { job: job.id.clone(), cpus: core.intersection(&borrowed) }),
        );
    }
    found
}

/// Whether cores of the job may be lent: pjw chose them for this job alone, and they are no isolated partition.
fn is_lender(owner: &Job) -> bool {
    let class_may_lend = owner
        .request
        .as_ref()
        .is_some_and(|request| request.class == PriorityClass::Guaranteed && !request.isolated);
    let is_own = |grant: &Grant| {
        grant.granted_by == GrantedBy::Warden && !grant.is_shared && grant.ownership == Ownership::Owned
    };
    class_may_lend && owner.grant.as_ref().is_some_and(is_own)
}

/// The PUs of the core of each PU, by the number of the PU. Empty for a number that no core has.
fn core_by_pu(topology: &Topology) -> Vec<CpuSet> {
    let mut core_of = Vec::new();
    for core in topology.cores() {
        for pu in core.pus.iter() {
            let number = pu.0 as usize;
            core_of.resize(core_of.len().max(number + 1), CpuSet::new());
            core_of[number] = core.pus.clone();
        }
    }
    core_of
}
