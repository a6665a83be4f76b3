//! The conditions that a run checks: after every cycle, after the faults have stopped, and after a release.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::audit::{Violation, audit};
use pjw_core::command::Command;
use pjw_core::cpuset::CpuSet;
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, ProcessId, ThreadId, Tid, Uid, is_cgroup_within};
use pjw_core::job::{Grant, GrantedBy, Job, JobId, Ownership};
use pjw_core::plan::{MaskOutcome, Plan};
use pjw_core::state::masks::request::{MaskRequest, MaskWriter};
use pjw_sim::world::{ProgramMaskRequest, SimMachine, SimProcess, SimThread};

use super::{ROOT, Run};

/// The number of cycles without faults after which the state must be correct.
const MAX_CYCLES_TO_REST: usize = 12;

/// The number of affinity attempts of one job that are reported in a minute.
const MAX_REPORTED_PER_MINUTE: usize = 32;

impl Run {
    /// Checks the conditions that hold after every cycle, whatever the faults: the audit finds nothing, and each PU has
    /// exactly one holder.
    pub(super) fn check_safety(&self) {
        let state = self.warden.state();
        let mut found = audit(state, &Plan::default(), self.warden.policy());
        // After a restart, the first cycle decides about the PUs that are borrowed according to the journal.
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
                    "{} owns a housekeeping PU",
                    job.id
                );
            }
            for pu in grant.cpus.iter() {
                if let Some(other) = owners.insert(pu.0, &job.id) {
                    panic!("PU {pu} has the owners {other} and {}", job.id);
                }
            }
        }
        let pool = &state.pool;
        let holder_count =
            pool.free_cpus().len() + pool.allocated_cpus().len() + pool.housekeeping_cpus().len();
        let offline_count = self.topology.cpus().difference(&pool.online_cpus()).len();
        assert!(
            holder_count <= self.topology.cpus().len()
                && holder_count + offline_count >= self.topology.cpus().len(),
            "a PU has no holder"
        );
        self.check_borrowers();
    }

    /// Checks that the state has exactly the running processes after each rescan, although few rescans are full.
    pub(super) fn check_rescans(&mut self) {
        self.run_cycle(true, &[]);
        for _ in 0..9 {
            for _ in 0..4 {
                self.workload.borrow_mut().step(&mut self.world.borrow_mut());
            }
            self.triggers.unassigned_scan_due = true;
            self.run_cycle(false, &[]);
            let world = self.world.borrow();
            let running: BTreeSet<ProcessId> = world.processes.values().map(|process| process.id).collect();
            let known: BTreeSet<ProcessId> =
                self.warden.state().processes.values().map(|known| known.process.id).collect();
            assert_eq!(known, running, "a rescan missed a process");
        }
    }

    /// Checks the conditions that hold some cycles after the faults have stopped.
    pub(super) fn check_liveness(&mut self) {
        // The kernel completes what it delayed, so that only the daemon needs cycles.
        self.warden.machine_interface_mut().finish_cpuset_changes();
        // Processes that are being restored, and busy threads, need a few readings. The mask of an idle process is read
        // only when the process runs, so every process runs.
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
        let cpuset_actions: Vec<_> = report.cpuset_outcomes.iter().map(|(action, _)| action).collect();
        assert!(cpuset_actions.is_empty(), "cpusets are still changed: {cpuset_actions:?}");
        let moved =
            report.mask_outcomes.iter().find(|(_, outcome)| !matches!(outcome, MaskOutcome::Refused { .. }));
        assert_eq!(moved, None, "masks are still changed");
        let state = self.warden.state();
        let unrestored: Vec<_> = state
            .processes_to_restore
            .keys()
            .filter(|pid| !state.pids_kept_off_job_cpus.contains(pid))
            .collect();
        assert!(unrestored.is_empty(), "not restored: {unrestored:?}");
        let world = self.world.borrow();
        self.check_unassigned_processes(&world);
        for member in state.members.values() {
            let process = world.processes.get(&member.id.pid).expect("a member is a running process");
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
            // Of a process that left its cgroup before a scan, only the environment is evidence. It counts only if the
            // process has the user of the job.
            let is_knowable = |job: &&Job| {
                let is_inside =
                    job.cgroup.as_deref().is_some_and(|path| is_cgroup_within(&process.cgroup, path));
                process.uid != Uid(0) && (job.owner == process.uid || is_inside)
            };
            let is_missing = state.jobs.get(&expected).filter(is_knowable).is_some()
                && !state.members.contains_key(&process.id.pid);
            assert!(!is_missing, "{} belongs to {expected}, and is not a member of it", process.id);
        }
    }

    /// Checks that a thread in a job cpuset that requests every PU is reported once, whether a scan reads it or not,
    /// and that no other thread is reported.
    pub(super) fn check_affinity_attempts(&mut self) {
        for full in [false, true] {
            // The number of reports in a minute is limited.
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

    /// One thread of each process whose job cpuset limits it to a part of the online PUs now. Of each job, at most as
    /// many threads as are reported in a minute. A borrower without a core that can be neither squeezed nor frozen has
    /// no cpuset.
    fn threads_bound_by_cpusets(&self) -> Vec<(Pid, Tid)> {
        let state = self.warden.state();
        let is_limited = |job: &JobId| {
            let job = state.jobs.get(job).filter(|job| !job.was_released);
            let grant = job.and_then(|job| job.grant.as_ref());
            let pus =
                grant.map(|grant| grant.cpus.intersection(&state.pool.online_cpus())).unwrap_or_default();
            !pus.is_empty() && pus != state.pool.online_cpus()
        };
        let in_cpuset =
            state.members.values().filter(|member| state.is_in_job_cpuset(member) && is_limited(&member.job));
        let mut of_job: BTreeMap<&JobId, usize> = BTreeMap::new();
        let requesters = in_cpuset.filter(|member| {
            let number = of_job.entry(&member.job).or_default();
            *number += 1;
            *number <= MAX_REPORTED_PER_MINUTE
        });
        requesters.map(|member| (member.id.pid, *member.threads.keys().last().expect("a thread"))).collect()
    }

    /// Checks that unassigned processes of users with several jobs run on no core that a job owns, if there are other
    /// cores.
    pub(super) fn check_unassigned_processes(&self, world: &SimMachine) {
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
                    "the unassigned process {} is on {effective}, not on {outside}",
                    process.id
                );
            }
        }
    }

    /// Checks that each thread of the process has its original mask, unless the daemon cannot know the original, or the
    /// cpuset has no PU of it.
    pub(super) fn check_originals(&self, process: &SimProcess) {
        // The request of a thread can't be read while some of its PUs are offline. Then the mask that was seen is
        // restored.
        if self.faults.has_hotplug {
            return;
        }
        let world = self.world.borrow();
        for (tid, thread) in process.threads.iter().filter(|(_, thread)| {
            thread.program_mask_request != ProgramMaskRequest::Hidden && !thread.has_unknown_creator
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

    /// Records the threads whose mask entry has the right original mask and nothing else.
    pub(super) fn record_known_originals(&mut self) {
        let world = self.world.borrow();
        let kept = self.warden.state().journaled_masks();
        for (id, entry) in kept.filter(|(id, _)| !self.originals_known.contains(id)).collect::<Vec<_>>() {
            let thread =
                world.processes.get(&id.process.pid).and_then(|process| process.threads.get(&id.tid));
            // A thread of an unknown creator may have several possible originals. Then the entry is not certain.
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

    /// Records which requests of programs the daemon has read.
    pub(super) fn record_readings(&self) {
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

    /// Checks each mask entry, unless the program or the kernel changed the mask since the last reading.
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
                    "pjw requested {} for thread {} of {}, and the entry names the program as the writer",
                    thread.requested_mask,
                    id.tid,
                    id.process
                );
                continue;
            }
            // A program's request for exactly the mask that pjw had requested looks like pjw's request.
            if thread.program_mask_request != ProgramMaskRequest::None
                && thread.requested_mask == thread.original_mask
            {
                continue;
            }
            let candidates: Vec<String> =
                entry.last_request_candidates().map(|request| request.mask.to_string()).collect();
            assert!(
                entry.last_request_candidates().any(|request| request.mask == thread.requested_mask),
                "the last request for thread {} of {} is {}, and the entry has {candidates:?}",
                id.tid,
                id.process,
                thread.requested_mask
            );
            assert!(
                thread.program_mask_request == ProgramMaskRequest::Hidden
                    || thread.has_unknown_creator
                    || thread.original_mask == *entry.original_mask(),
                "the original mask of thread {} of {} is {}, and the entry has {}",
                id.tid,
                id.process,
                thread.original_mask,
                entry.original_mask()
            );
        }
    }

    /// Whether the daemon missed processes in scans, events or records. Then it cannot know the descent of a process
    /// whose parent started and ended meanwhile.
    pub(super) fn has_missed_information(&self) -> bool {
        self.faults.silent_event_loss_permille > 0
            || self.faults.unreadable_process_permille > 0
            || self.totals.kills > 0
            || self.faults.failed_journal_write_permille > 0
    }

    /// Checks that a release of all jobs restores every mask that no program requested meanwhile, and frees every core.
    /// Jobs that their scheduler still runs stay known.
    pub(super) fn check_release(&mut self) {
        self.run_cycle(true, &[Command::ReleaseAll { caller: ROOT }]);
        for _ in 0..MAX_CYCLES_TO_REST {
            self.run_cycle(true, &[]);
        }
        let state = self.warden.state();
        let mut scheduler_cpus = CpuSet::new();
        for job in state.jobs.values() {
            assert!(job.was_released && job.id.source().is_batch_system(), "{job:?}");
            assert!(
                job.grant.as_ref().is_none_or(|grant| grant.granted_by == GrantedBy::Scheduler),
                "{job:?}"
            );
            scheduler_cpus = scheduler_cpus.union(&state.pool.pus_of(&job.id));
        }
        let kept: Vec<_> = state.journaled_masks().collect();
        assert!(kept.is_empty() && state.processes_to_restore.is_empty(), "{kept:?}");
        let all = state.pool.free_cpus().union(&state.pool.housekeeping_cpus()).union(&scheduler_cpus);
        assert_eq!(all, *self.topology.cpus());
        let left: Vec<&str> = state.cpusets.paths().collect();
        assert_eq!(left, [""; 0], "cpusets that were not removed");
        self.check_nothing_is_lent();
        let world = self.world.borrow();
        for process in world.processes.values() {
            self.check_originals(process);
            assert!(
                self.has_missed_information() || is_in_original_cgroup(&world, process),
                "process {} is in {}, and its original cgroup is {}",
                process.id,
                process.cgroup,
                process.original_cgroup
            );
        }
    }
}

/// Whether a process is in a cgroup that can be its original one. For a process that was born in a cpuset, this is the
/// original cgroup of its parent, which another program may have moved. A process that was born after its parent was
/// moved back is in the cgroup of the parent. The parent of an orphan is not known, so any cgroup is accepted.
fn is_in_original_cgroup(world: &SimMachine, process: &SimProcess) -> bool {
    let is_of_parent = |parent: &SimProcess| {
        process.cgroup == parent.original_cgroup
            || (process.cgroup == parent.cgroup && is_in_original_cgroup(world, parent))
    };
    process.parent == Pid(1)
        || process.has_unknown_original_cgroup
        || process.cgroup == process.original_cgroup
        || world.processes.get(&process.parent).is_some_and(is_of_parent)
}
