//! The conditions of a run: after every cycle, after the faults have stopped, and after a release.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::audit::{Violation, audit};
use pjw_core::command::Command;
use pjw_core::cpuset::CpuSet;
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, ProcessId, ThreadId, Tid, Uid, is_cgroup_within};
use pjw_core::job::{Grant, GrantedBy, Job, JobId, Ownership};
use pjw_core::plan::{MaskOutcome, Plan};
use pjw_core::state::masks::request::{MaskRequest, MaskWriter};
use pjw_sim::world::{ProgramRequest, SimProcess, SimThread, World};

use super::{ROOT, Run};

/// The number of cycles without faults after which the state must be correct.
const MAX_CYCLES_TO_REST: usize = 12;

/// The number of affinity attempts of one job that are reported in a minute.
const MOST_REPORTED_PER_MINUTE: usize = 32;

impl Run {
    /// The conditions after every cycle, with any faults.
    pub(super) fn check_safety(&self) {
        let state = self.warden.state();
        let mut found = audit(state, &Plan::default(), self.warden.policy());
        // The first cycle after a restart decides about the PUs that the journal says are borrowed.
        let is_old_loan = |violation: &Violation| match violation {
            Violation::BorrowedFromNonLender { .. } => true,
            // A PU of a borrowed core may have come online while no daemon ran.
            Violation::SplitCore { job, .. } => state.jobs.get(job).is_some_and(Job::is_borrower),
            _ => false,
        };
        found.retain(|violation| self.has_run_cycle_since_start || !is_old_loan(violation));
        assert!(found.is_empty(), "{found:?}");
        let mut owners: BTreeMap<u32, &JobId> = BTreeMap::new();
        for job in state.jobs.values() {
            let is_owned = |grant: &&Grant| !grant.is_shared && grant.ownership == Ownership::Owned;
            let Some(grant) = job.grant.as_ref().filter(is_owned) else { continue };
            if grant.granted_by == GrantedBy::Warden {
                assert!(
                    !grant.cpus.intersects(&self.policy.housekeeping_cpus),
                    "{} is on housekeeping",
                    job.id
                );
            }
            for pu in grant.cpus.iter() {
                if let Some(other) = owners.insert(pu.0, &job.id) {
                    panic!("PU {pu} belongs to {other} and {}", job.id);
                }
            }
        }
        let pool = &state.pool;
        let held = pool.free_cpus().len() + pool.allocated_cpus().len() + pool.housekeeping_cpus().len();
        let off = self.topology.cpus().difference(&pool.online_cpus()).len();
        assert!(
            held <= self.topology.cpus().len() && held + off >= self.topology.cpus().len(),
            "a PU has no holder"
        );
        self.check_borrowers();
    }

    /// After each rescan the state has exactly the processes that run, although few rescans are full.
    pub(super) fn check_rescans(&mut self) {
        self.run_cycle(true, &[]);
        for _ in 0..9 {
            for _ in 0..4 {
                self.workload.borrow_mut().step(&mut self.world.borrow_mut());
            }
            self.triggers.unassigned_scan_due = true;
            self.run_cycle(false, &[]);
            let world = self.world.borrow();
            let living: BTreeSet<ProcessId> = world.processes.values().map(|process| process.id).collect();
            let known: BTreeSet<ProcessId> =
                self.warden.state().processes.values().map(|known| known.process.id).collect();
            assert_eq!(known, living, "a rescan missed a process");
        }
    }

    /// The conditions some cycles after the faults have stopped.
    pub(super) fn check_liveness(&mut self) {
        // The cycles are those of the daemon: the kernel has completed what it delayed.
        self.warden.machine_interface_mut().finish_cpuset_changes();
        // Processes that are being restored, and busy threads, need a few readings. An idle process with a wrong mask
        // harms no job. Its mask is read when it runs, so every process runs.
        for _ in 0..MAX_CYCLES_TO_REST {
            let mut world = self.world.borrow_mut();
            let threads = world.processes.values_mut().flat_map(|process| process.threads.values_mut());
            threads.for_each(|thread| thread.run_ns += 1);
            drop(world);
            self.run_cycle(true, &[]);
            self.check_safety();
        }
        let report = self.run_cycle(true, &[]).expect("no kills any more");
        // A mask that a cpuset forbids is tried again in each cycle: the cpuset may be widened.
        let built: Vec<_> = report.cpuset_outcomes.iter().map(|(action, _)| action).collect();
        assert!(built.is_empty(), "the cpusets do not come to rest: {built:?}");
        let moved =
            report.mask_outcomes.iter().find(|(_, outcome)| !matches!(outcome, MaskOutcome::Refused { .. }));
        assert_eq!(moved, None, "the cycles do not come to rest");
        let state = self.warden.state();
        let owed: Vec<_> = state
            .processes_to_restore
            .keys()
            .filter(|pid| !state.pids_kept_off_job_cpus.contains(pid))
            .collect();
        assert!(owed.is_empty(), "{owed:?}");
        let world = self.world.borrow();
        self.check_strays(&world);
        for member in state.members.values() {
            let process = world.processes.get(&member.id.pid).expect("a process that ended is no member");
            assert_eq!(process.id, member.id);
            let job = &state.jobs[&member.job];
            let Some(grant) = job.grant.as_ref().filter(|_| !job.was_released) else {
                self.check_originals(process);
                continue;
            };
            for (tid, thread) in &process.threads {
                let effective = world.effective_mask(process, thread);
                let possible = world.effective_mask_in(&process.cgroup, &grant.cpus).is_subset(&grant.cpus);
                assert!(
                    effective.is_subset(&grant.cpus) || !possible,
                    "thread {tid} of {} is on {effective}, outside {}",
                    member.job,
                    grant.cpus
                );
            }
        }
        if self.has_missed_information() {
            return;
        }
        for process in world.processes.values() {
            let Some(expected) = process.expected_job.as_ref().map(|job| job.parse::<JobId>().unwrap())
            else {
                continue;
            };
            // A process that left its cgroup before a scan is known by its environment only. That counts only if the
            // job is its user's.
            let is_knowable = |job: &&Job| {
                let is_inside =
                    job.cgroup.as_deref().is_some_and(|path| is_cgroup_within(&process.cgroup, path));
                process.uid != Uid(0) && (job.owner == process.uid || is_inside)
            };
            let is_missed = state.jobs.get(&expected).filter(is_knowable).is_some()
                && !state.members.contains_key(&process.id.pid);
            assert!(!is_missed, "{} belongs to {expected} and is no member", process.id);
        }
    }

    /// A thread in a job cpuset that requests every PU is reported once, whether a scan reads it or not. No other
    /// thread is reported.
    pub(super) fn check_affinity_attempts(&mut self) {
        for full in [false, true] {
            // Not all attempts of one minute are reported.
            self.world.borrow_mut().advance(60_000_000_000);
            let requesters = self.threads_bound_by_cpusets();
            for &(pid, tid) in &requesters {
                self.world.borrow_mut().request_and_restore_mask(pid, tid);
                self.world.borrow_mut().request_and_restore_mask(pid, tid);
            }
            self.run_cycle(full, &[]).expect("no kills any more");
            let violations = self.events.iter().filter(|event| event.kind == EventKind::Violation);
            let mut reported: Vec<_> = violations.filter_map(|event| event.pid.zip(event.tid)).collect();
            reported.sort_unstable();
            assert_eq!(reported, requesters);
            self.run_cycle(full, &[]).expect("no kills any more");
            assert!(self.events.iter().all(|event| event.kind != EventKind::Violation), "{:?}", self.events);
            self.totals.attempts += requesters.len();
        }
    }

    /// A thread of each process that the cpuset of its job keeps on a part of the online PUs now. Of each job, at most
    /// as many as are reported in a minute. A borrower that can borrow no core, and can be neither squeezed nor frozen,
    /// has no cpuset until it borrows a core again.
    fn threads_bound_by_cpusets(&self) -> Vec<(Pid, Tid)> {
        let state = self.warden.state();
        let bounded = |job: &JobId| {
            let job = state.jobs.get(job).filter(|job| !job.was_released);
            let grant = job.and_then(|job| job.grant.as_ref());
            let pus =
                grant.map(|grant| grant.cpus.intersection(&state.pool.online_cpus())).unwrap_or_default();
            !pus.is_empty() && pus != state.pool.online_cpus()
        };
        let in_cpuset =
            state.members.values().filter(|member| state.is_in_job_cpuset(member) && bounded(&member.job));
        let mut of_job: BTreeMap<&JobId, usize> = BTreeMap::new();
        let requesters = in_cpuset.filter(|member| {
            let number = of_job.entry(&member.job).or_default();
            *number += 1;
            *number <= MOST_REPORTED_PER_MINUTE
        });
        requesters.map(|member| (member.id.pid, *member.threads.keys().last().expect("a thread"))).collect()
    }

    /// Unassigned processes of users with several jobs may not run on the cores that jobs own, if there are other
    /// cores.
    pub(super) fn check_strays(&self, world: &World) {
        let state = self.warden.state();
        let grants = state.jobs.values().filter_map(|job| job.grant.as_ref());
        let grants = grants.filter(|grant| grant.ownership == Ownership::Owned);
        let granted = grants.fold(CpuSet::new(), |all, grant| all.union(&grant.cpus));
        let outside = world.online.difference(&granted);
        for pid in &state.pids_kept_off_job_cpus {
            let process = &world.processes[pid];
            for thread in process
                .threads
                .values()
                .filter(|_| world.effective_cpus(&process.cgroup).intersects(&outside))
            {
                let effective = world.effective_mask(process, thread);
                assert!(
                    effective.is_subset(&outside),
                    "stray {} is on {effective}, not {outside}",
                    process.id
                );
            }
        }
    }

    /// Every thread has its original mask, unless the original could not be known, or the cpuset has none of its PUs.
    pub(super) fn check_originals(&self, process: &SimProcess) {
        // The request of a thread can't be read while some of its PUs are offline. Then the mask that was seen is
        // restored.
        if self.faults.has_hotplug {
            return;
        }
        let world = self.world.borrow();
        for (tid, thread) in process.threads.iter().filter(|(_, thread)| {
            thread.program_request != ProgramRequest::Hidden && !thread.has_unknown_creator
        }) {
            let id = ThreadId { process: process.id, tid: *tid, start: thread.start };
            if self.has_missed_information() && !self.originals_known.contains(&id) {
                continue;
            }
            if !thread.original_mask.intersects(&world.effective_cpus(&process.cgroup)) {
                continue;
            }
            let original = world.effective_mask_in(&process.cgroup, &thread.original_mask);
            assert_eq!(
                world.effective_mask(process, thread),
                original,
                "thread {tid} of process {}",
                process.id
            );
        }
    }

    pub(super) fn note_known_originals(&mut self) {
        let world = self.world.borrow();
        let kept = self.warden.state().journaled_masks();
        for (id, entry) in kept.filter(|(id, _)| !self.originals_known.contains(id)).collect::<Vec<_>>() {
            let thread =
                world.processes.get(&id.process.pid).and_then(|process| process.threads.get(&id.tid));
            // A thread of an unknown creator may have several possible originals. Then the right one is a guess.
            let is_certain = entry
                .last_request_candidates()
                .all(|request| request.original_mask == *entry.original_mask());
            // After a lost fork event, the entry may have the right original and another request than the thread. The
            // next change of the cpuset then shows a mask that looks like a request of the program.
            let is_in_force = |thread: &SimThread| {
                entry.last_request_candidates().any(|request| request.mask == thread.requested_mask)
            };
            let is_right = |thread: &SimThread| {
                thread.start == id.start
                    && thread.original_mask == *entry.original_mask()
                    && is_in_force(thread)
            };
            if is_certain && thread.is_some_and(is_right) {
                self.originals_known.insert(id);
            }
        }
    }

    /// Records which requests of programs the warden has read.
    pub(super) fn note_readings(&self) {
        let state = self.warden.state();
        let mut world = self.world.borrow_mut();
        let is_read = |process: &SimProcess, tid: Tid, thread: &SimThread| {
            let id = ThreadId { process: process.id, tid, start: thread.start };
            state.mask_entry(&id).is_some_and(|entry| entry.last_read_at().0 > thread.mask_requested_at)
        };
        let threads = world.processes.values().flat_map(|process| {
            process
                .threads
                .iter()
                .filter(|(tid, thread)| is_read(process, **tid, thread))
                .map(|(tid, _)| (process.id.pid, *tid))
        });
        let read: Vec<(Pid, Tid)> = threads.collect();
        read.into_iter().for_each(|(pid, tid)| world.record_mask_read(pid, tid));
    }

    /// Each mask entry is correct, unless the program or the kernel changed the mask since the last reading.
    pub(super) fn check_masks(&self) {
        if self.has_missed_information() || self.faults.has_hotplug {
            return;
        }
        let world = self.world.borrow();
        for (id, entry) in self.warden.state().journaled_masks() {
            let process = world.processes.get(&id.process.pid).filter(|process| process.id == id.process);
            let thread = process.and_then(|process| process.threads.get(&id.tid));
            let Some(thread) = thread.filter(|thread| thread.mask_requested_at < entry.last_read_at().0)
            else {
                continue;
            };
            // A kernel before 6.2 replaces a mask when a process moves.
            if entry.is_mask_from_program() && !world.cpuset_support.affinity_persists {
                continue;
            }
            if entry.is_mask_from_program() {
                // A new thread may have inherited any of the requests that its entry has.
                let is_right = |request: &MaskRequest| {
                    request.writer != MaskWriter::Program
                        && request.mask == thread.requested_mask
                        && request.original_mask == thread.original_mask
                };
                assert!(
                    thread.requested_mask == thread.original_mask
                        || entry.last_request_candidates().any(is_right),
                    "pjw requested {} for thread {} of {}, and the entry says that the program did",
                    thread.requested_mask,
                    id.tid,
                    id.process
                );
                continue;
            }
            // A program's request for exactly the mask that pjw had requested looks like pjw's request.
            if thread.program_request != ProgramRequest::None && thread.requested_mask == thread.original_mask
            {
                continue;
            }
            let candidates: Vec<String> =
                entry.last_request_candidates().map(|request| request.mask.to_string()).collect();
            assert!(
                entry.last_request_candidates().any(|request| request.mask == thread.requested_mask),
                "thread {} of {} requested {}, and the entry says {candidates:?}",
                id.tid,
                id.process,
                thread.requested_mask
            );
            assert!(
                thread.program_request == ProgramRequest::Hidden
                    || thread.has_unknown_creator
                    || thread.original_mask == *entry.original_mask(),
                "thread {} of {} is to get back {}, and the entry says {}",
                id.tid,
                id.process,
                thread.original_mask,
                entry.original_mask()
            );
        }
    }

    /// Whether the daemon missed scans, events or records. Then it can't know the descent of a process whose parent
    /// started and ended in the meantime.
    pub(super) fn has_missed_information(&self) -> bool {
        self.faults.silent_event_loss_permille > 0
            || self.faults.unreadable_process_permille > 0
            || self.totals.kills > 0
            || self.faults.failed_journal_write_permille > 0
    }

    /// A release restores every mask that no program requested in the meantime, and frees every core. Jobs that their
    /// scheduler still runs stay known.
    pub(super) fn check_release(&mut self) {
        self.run_cycle(true, &[Command::ReleaseAll { caller: ROOT }]);
        for _ in 0..MAX_CYCLES_TO_REST {
            self.run_cycle(true, &[]);
        }
        let state = self.warden.state();
        let mut of_schedulers = CpuSet::new();
        for job in state.jobs.values() {
            assert!(job.was_released && job.id.source().is_batch_system(), "{job:?}");
            assert!(
                job.grant.as_ref().is_none_or(|grant| grant.granted_by == GrantedBy::Scheduler),
                "{job:?}"
            );
            of_schedulers = of_schedulers.union(&state.pool.pus_of(&job.id));
        }
        let kept: Vec<_> = state.journaled_masks().collect();
        assert!(kept.is_empty() && state.processes_to_restore.is_empty(), "{kept:?}");
        let all = state.pool.free_cpus().union(&state.pool.housekeeping_cpus()).union(&of_schedulers);
        assert_eq!(all, *self.topology.cpus());
        let left: Vec<&str> = state.cpusets.paths().collect();
        assert_eq!(left, [""; 0], "cpusets that stay");
        self.check_nothing_is_lent();
        let world = self.world.borrow();
        for process in world.processes.values() {
            self.check_originals(process);
            assert!(
                self.has_missed_information() || is_in_original_cgroup(&world, process),
                "process {} is in {} and belongs to {}",
                process.id,
                process.cgroup,
                process.original_cgroup
            );
        }
    }
}

/// Whether a process is in a cgroup to which it may belong. A process that was born in a cpuset belongs where its
/// parent belongs, which another program may have moved. A process that was born after its parent was moved back is
/// where its parent is. Of an orphan, the parent is not known any more.
fn is_in_original_cgroup(world: &World, process: &SimProcess) -> bool {
    let is_of_parent = |parent: &SimProcess| {
        process.cgroup == parent.original_cgroup
            || (process.cgroup == parent.cgroup && is_in_original_cgroup(world, parent))
    };
    process.parent == Pid(1)
        || process.has_unknown_original_cgroup
        || process.cgroup == process.original_cgroup
        || world.processes.get(&process.parent).is_some_and(is_of_parent)
}
