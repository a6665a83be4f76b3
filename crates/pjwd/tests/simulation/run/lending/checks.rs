//! The conditions on lending that a run checks: after every cycle, at rest, and after a release.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{CpusetHierarchy, CpusetOutcome, CpusetSupport, EnforcementMethod};
use pjw_core::ids::is_cgroup_within;
use pjw_core::job::{GrantedBy, Job, JobId, Ownership};
use pjw_core::plan::MaskOutcome;
use pjw_core::state::Member;
use pjw_sim::world::SimProcess;
use pjwd::warden::CycleReport;

use super::super::Run;
use super::INTERVAL;

impl Run {
    /// Checks the borrowed PUs after each cycle: a borrowed PU is free, or its owner lends it. No PU has two borrowers.
    /// No borrower is frozen while a core is free and not borrowed, also while the journal can't be written. None
    /// without a process borrows one.
    pub(in super::super) fn check_borrowers(&self) {
        let state = self.warden.state();
        let is_leaving = state.lending.next_grace_period_end().is_some();
        assert!(!is_leaving || state.jobs.has_borrowers(), "a grace period without a borrower never ends");
        let mut borrowed = CpuSet::new();
        let is_unused = |core: &&CpuSet| core.iter().all(|pu| state.pool.borrower(pu).is_none());
        let free = self.whole_cores(&state.pool.free_cpus());
        let has_spare = free.iter().any(|core| is_unused(&core));
        // After a restart, the first cycle decides about the PUs that are borrowed according to the journal.
        let is_decided = self.has_run_cycle_since_start;
        let can_settle = is_decided && self.warden.ongoing_failures().journal_error.is_none();
        for borrower in state.jobs.borrowers().filter(|borrower| !borrower.was_released) {
            let has_process = state.members_of(&borrower.id).next().is_some();
            let Some(grant) = borrower.active_grant() else {
                assert!(!can_settle || !has_process || !self.can_squeeze(), "{borrower:?} has no grant");
                continue;
            };
            assert!(has_process || !can_settle, "{borrower:?} has no process, and borrows cores");
            assert!(
                grant.ownership != Ownership::Frozen || !has_spare || !self.has_decided_loans,
                "{} is frozen, and {free:?} are free",
                borrower.id
            );
            if grant.ownership != Ownership::Borrowed {
                continue;
            }
            assert!(!grant.cpus.intersects(&borrowed), "two borrowers of a PU of {}", grant.cpus);
            borrowed = borrowed.union(&grant.cpus);
            for pu in grant.cpus.iter() {
                let owner = state.jobs.values().find(|job| state.pool.pus_of(&job.id).contains(pu));
                let lends = |owner: &Job| state.jobs.guaranteed_jobs().any(|lender| lender.id == owner.id);
                assert!(
                    !is_decided || owner.is_none_or(lends),
                    "{} borrows PU {pu} of {owner:?}",
                    borrower.id
                );
            }
        }
    }

    /// Checks after a cycle that no owner lent a core twice within `lend_after`, however its demand changed.
    pub(in super::super) fn check_lending_pauses(&mut self) {
        let (now, lent) = (self.now(), self.lent_pus());
        let Some(lending) = &mut self.lending else { return };
        for (pu, owner) in lent.iter().filter(|(pu, owner)| lending.lent.get(*pu) != Some(*owner)) {
            let before = lending.lent_at.insert((*pu, owner.clone()), now);
            let pause = before.map(|before| Duration::from_nanos(now - before));
            assert!(
                pause.is_none_or(|pause| pause >= self.policy.lending.lend_after),
                "PU {pu} of {owner} is lent again after {pause:?}"
            );
        }
        lending.lent = lent;
    }

    /// The PUs that are lent according to the daemon, each with its owner.
    fn lent_pus(&self) -> BTreeMap<Pu, JobId> {
        let state = self.warden.state();
        let all = state.pool.lent_cpus();
        let owners = state.jobs.guaranteed_jobs().map(|owner| (&owner.id, state.pool.pus_of(&owner.id)));
        owners
            .flat_map(|(id, own)| {
                own.intersection(&all).iter().map(|pu| (pu, id.clone())).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Notes the PUs that are lent according to the journal of a new daemon. The daemon before it may have taken them
    /// back while the journal could not be written.
    pub(in super::super) fn note_lent_pus(&mut self) {
        let lent = self.lent_pus();
        if let Some(lending) = &mut self.lending {
            lending.lent = lent;
        }
    }

    /// Checks in the simulated kernel, after the cycle with this report, that no job slows down an owner. Of the other
    /// jobs, only the borrower of a PU may run on this PU of a guaranteed job, and only at idle priority. The check is
    /// about the processes that a cpuset keeps on the PUs of their job. Any other process may have another mask or
    /// cgroup than the scan has read.
    ///
    /// There is no check after a cycle that could not make a change, and none in runs with hotplug, where a PU may go
    /// offline between two steps of the cycle.
    pub(in super::super) fn check_owners_in_kernel(&mut self, report: &CycleReport) {
        let Some(lending) = &self.lending else { return };
        let has_journal = self.warden.ongoing_failures().journal_error.is_none();
        if self.faults.has_hotplug || !has_journal || !are_all_changes_made(report) {
            return;
        }
        let is_with_faults = lending.is_demand_changing;
        let state = self.warden.state();
        let owners = self.sole_owners();
        let world = self.world.borrow();
        let mut lent_threads = 0;
        for member in state.members.values() {
            let process = world.processes.get(&member.id.pid).filter(|process| process.id == member.id);
            let Some(process) = process.filter(|process| self.is_kept_by_cpuset(member, process)) else {
                continue;
            };
            if world.is_frozen(process) {
                continue;
            }
            let has_idle_priority = world.has_idle_priority(process);
            for (tid, thread) in &process.threads {
                for pu in world.effective_mask(process, thread).iter() {
                    let Some(owner) = owners.get(&pu).filter(|owner| **owner != member.job) else { continue };
                    let borrower = state.pool.borrower(pu);
                    assert_eq!(
                        (borrower, has_idle_priority),
                        (Some(&member.job), true),
                        "thread {tid} may run on PU {pu} of {owner}: the borrower, and whether it has idle priority"
                    );
                    lent_threads += usize::from(is_with_faults);
                }
            }
        }
        drop(world);
        self.totals.lent_threads += lent_threads;
    }

    /// The PUs of the guaranteed jobs that share no PU, each with its owner.
    fn sole_owners(&self) -> BTreeMap<Pu, JobId> {
        let state = self.warden.state();
        let is_sole_owner = |owner: &&Job| {
            owner.active_grant().is_some_and(|grant| {
                !grant.is_shared
                    && grant.ownership == Ownership::Owned
                    && grant.granted_by == GrantedBy::Warden
            })
        };
        let shared = state.jobs.shared_cpus();
        let owners = state.jobs.guaranteed_jobs().filter(is_sole_owner);
        let pus = owners.flat_map(|owner| {
            let own = state.pool.pus_of(&owner.id).difference(&shared);
            own.iter().map(|pu| (pu, owner.id.clone())).collect::<Vec<_>>()
        });
        pus.collect()
    }

    /// Whether a cpuset keeps the process on the PUs of its job: the process is in it, and the daemon can write it.
    fn is_kept_by_cpuset(&self, member: &Member, process: &SimProcess) -> bool {
        let (state, job) = (self.warden.state(), &member.job);
        let Some(managed) = state.cpusets.cpuset_of(job) else { return false };
        let grant = state.jobs.get(job).and_then(Job::active_grant);
        let is_granted_by_pjw = grant.is_some_and(|grant| grant.granted_by == GrantedBy::Warden);
        // The journal must have the masks of all threads before the cpuset is written.
        let are_threads_known = state.members_of(job).all(|member| !member.threads.is_empty());
        is_granted_by_pjw
            && are_threads_known
            && state.is_in_job_cpuset(member)
            && is_cgroup_within(&process.cgroup, &managed.job_cpuset.path)
            && state.cpusets.cpuset_error(job).is_none()
            && !state.cpusets.delayed_changes.has_change_for(job)
    }

    /// Whether a borrower that can borrow no core can be squeezed.
    fn can_squeeze(&self) -> bool {
        let pool = &self.warden.state().pool;
        pool.housekeeping_cpus().intersects(&pool.online_cpus())
    }

    /// Whether this borrower can be frozen.
    fn can_freeze(&self, borrower: &JobId) -> bool {
        let CpusetSupport { hierarchy, can_freeze, .. } = &self.policy.cpuset_support;
        *can_freeze
            && self.policy.enforcement != EnforcementMethod::Affinity
            && !matches!(hierarchy, CpusetHierarchy::Unavailable { .. })
            && self.warden.state().cpusets.cpuset_error(borrower).is_none()
    }

    /// Checks without faults that cores are lent, and that they come back within an interval and the grace period after
    /// their owners need them. Afterwards the processes of borrowers are frozen only if they have no core.
    pub(in super::super) fn check_revocation(&mut self) {
        if self.lending.is_none() {
            return;
        }
        let owners: Vec<JobId> =
            self.warden.state().jobs.guaranteed_jobs().map(|owner| owner.id.clone()).collect();
        for is_busy in [false, true, false] {
            owners.iter().for_each(|owner| self.set_demand(owner, is_busy));
            if is_busy {
                self.totals.lent_at_rest += self.warden.state().pool.lent_cpus().len();
                self.check_cores_come_back_in_time();
            }
            for _ in 0..4 {
                self.run_cycle(true, &[]).expect("no kills any more");
                self.check_safety();
            }
            self.check_frozen_processes();
            self.check_starved_borrowers();
        }
    }

    /// Checks at rest that a process of a borrower that is not at idle priority is on no lent PU, because the owner of
    /// the PU would wait for it. Only a borrower without a process, or one that can be neither squeezed nor frozen, has
    /// no grant.
    fn check_starved_borrowers(&self) {
        let state = self.warden.state();
        let world = self.world.borrow();
        let lent = state.pool.lent_cpus();
        let (with_grant, without): (Vec<&Job>, Vec<&Job>) =
            state.jobs.borrowers().partition(|borrower| borrower.active_grant().is_some());
        for borrower in without.into_iter().filter(|borrower| !borrower.was_released) {
            let has_process = state.members_of(&borrower.id).next().is_some();
            assert!(
                !has_process || (!self.can_squeeze() && !self.can_freeze(&borrower.id)),
                "{borrower:?} has no grant"
            );
        }
        for member in with_grant.into_iter().flat_map(|borrower| state.members_of(&borrower.id)) {
            let process = &world.processes[&member.id.pid];
            if world.has_idle_priority(process) || world.is_frozen(process) {
                continue;
            }
            for (tid, thread) in &process.threads {
                let mask = world.effective_mask(process, thread);
                assert!(!mask.intersects(&lent), "thread {tid} of {} is on {mask} of {lent}", member.job);
            }
        }
    }

    /// Checks that the cores come back in time. The owners use all their cores from now on.
    fn check_cores_come_back_in_time(&mut self) {
        let grace = u64::try_from(self.policy.lending.revocation_grace.as_nanos()).unwrap();
        // The last sample may have been just before the demand began. So the first sample that covers only the time of
        // the demand is an interval later.
        let end = self.now() + 2 * INTERVAL + grace;
        while self.now() < end {
            self.advance_to(self.next_sample().min(end));
            self.sample_owners();
        }
        let state = self.warden.state();
        let world = self.world.borrow();
        let lent: BTreeSet<_> = state.pool.lent_cpus().iter().collect();
        for member in state.jobs.borrowers().flat_map(|borrower| state.members_of(&borrower.id)) {
            let process = &world.processes[&member.id.pid];
            // A frozen process keeps its last PUs, and does not run there. A borrower without a grant is not confined.
            let has_grant = state.jobs[&member.job].active_grant().is_some();
            if world.is_frozen(process) || !has_grant {
                continue;
            }
            let has_idle_priority = world.has_idle_priority(process);
            for (tid, thread) in &process.threads {
                for pu in world.effective_mask(process, thread).iter() {
                    let owner =
                        state.jobs.guaranteed_jobs().find(|job| state.pool.pus_of(&job.id).contains(pu));
                    assert!(
                        owner.is_none() || (lent.contains(&pu) && has_idle_priority),
                        "thread {tid} of {} is still on PU {pu} of {owner:?}, at idle priority: {has_idle_priority}",
                        member.job
                    );
                }
            }
        }
    }

    /// Checks at rest that only processes of frozen jobs are frozen.
    fn check_frozen_processes(&mut self) {
        let state = self.warden.state();
        let world = self.world.borrow();
        let mut frozen = 0;
        // A process whose original cgroup the daemon cannot know stays in the cpuset in which it was born.
        let is_known = |process: &&SimProcess| !process.has_unknown_original_cgroup;
        let processes = world.processes.values().filter(is_known);
        for process in processes.filter(|process| world.is_frozen(process)) {
            let job = state.members.get(&process.id.pid).and_then(|member| state.jobs.get(&member.job));
            let ownership = job.and_then(Job::active_grant).map(|grant| grant.ownership);
            assert_eq!(ownership, Some(Ownership::Frozen), "{} of {job:?} is frozen", process.id);
            frozen += 1;
        }
        drop(world);
        self.totals.frozen += frozen;
    }

    /// Checks after a release that nothing is lent, frozen or at idle priority.
    pub(in super::super) fn check_nothing_is_lent(&self) {
        assert_eq!(self.warden.state().pool.borrowed_pus().count(), 0);
        let world = self.world.borrow();
        for process in world.processes.values() {
            assert!(!world.is_frozen(process), "{} is frozen", process.id);
            assert!(!world.has_idle_priority(process), "{} is at idle priority", process.id);
        }
    }
}

/// Whether the cycle has made all changes that it decided. A change of a process or cgroup that is gone counts as made.
fn are_all_changes_made(report: &CycleReport) -> bool {
    let is_made =
        |outcome: &CpusetOutcome| matches!(outcome, CpusetOutcome::Done { .. } | CpusetOutcome::Gone);
    !report.has_unfinished_work
        && report.cpuset_outcomes.iter().all(|(_, outcome)| is_made(outcome))
        && !report.mask_outcomes.iter().any(|(_, outcome)| matches!(outcome, MaskOutcome::Refused { .. }))
}
