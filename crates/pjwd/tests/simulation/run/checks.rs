//! What must hold in a run: after every cycle, when nothing goes wrong any more, and after a release.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::audit::audit;
use pjw_core::command::Command;
use pjw_core::cpuset::CpuSet;
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, ProcessId, ThreadId, Tid, Uid};
use pjw_core::job::{GrantedBy, JobId};
use pjw_core::plan::{Outcome, Plan};
use pjw_sim::world::{SimProcess, World};

use super::{ROOT, Run};

/// Everything must be right after so many cycles without faults.
const MAX_CYCLES_TO_REST: usize = 12;

impl Run {
    /// What must hold after every cycle, whatever went wrong.
    pub(super) fn check_safety(&self) {
        let state = self.warden.state();
        let found = audit(state, &Plan::default(), self.warden.policy());
        assert!(found.is_empty(), "{found:?}");
        let mut owners: BTreeMap<u32, &JobId> = BTreeMap::new();
        for job in state.jobs.values() {
            let Some(grant) = job.grant.as_ref().filter(|grant| !grant.shared) else { continue };
            if grant.granted_by == GrantedBy::Warden {
                assert!(!grant.cpus.intersects(&self.policy.housekeeping), "{} is on housekeeping", job.id);
            }
            for pu in grant.cpus.iter() {
                if let Some(other) = owners.insert(pu.0, &job.id) {
                    panic!("PU {pu} belongs to {other} and {}", job.id);
                }
            }
        }
        let pool = &state.pool;
        let held = pool.free().len() + pool.allocated().len() + pool.housekeeping().len();
        let off = self.topology.cpus().difference(&pool.online()).len();
        assert!(
            held <= self.topology.cpus().len() && held + off >= self.topology.cpus().len(),
            "a PU is nobody's"
        );
    }

    /// Whoever is there is known after each rescan, and who is not is forgotten, though few of them look at everything.
    pub(super) fn check_rescans(&mut self) {
        self.handle_connection(true, &[]);
        for _ in 0..9 {
            for _ in 0..4 {
                self.workload.borrow_mut().step(&mut self.world.borrow_mut());
            }
            self.triggers.rescan = true;
            self.handle_connection(false, &[]);
            let world = self.world.borrow();
            let living: BTreeSet<ProcessId> = world.processes.values().map(|process| process.id).collect();
            let known: BTreeSet<ProcessId> =
                self.warden.state().processes.values().map(|known| known.process.id).collect();
            assert_eq!(known, living, "a rescan overlooked somebody");
        }
    }

    /// What must come right when nothing goes wrong any more.
    pub(super) fn check_liveness(&mut self) {
        // Whoever had started to leave, and whoever runs hot, needs a few readings to be settled.
        for _ in 0..MAX_CYCLES_TO_REST {
            self.handle_connection(true, &[]);
            self.check_safety();
        }
        let report = self.handle_connection(true, &[]).expect("nobody kills it now");
        // What a cpuset forbids is tried again for ever: it may be widened any time.
        let built: Vec<_> = report.cpuset_outcomes.iter().map(|(action, _)| action).collect();
        assert!(built.is_empty(), "the walls do not come to rest: {built:?}");
        let moved = report.outcomes.iter().find(|(_, outcome)| !matches!(outcome, Outcome::Refused { .. }));
        assert_eq!(moved, None, "the cycles do not come to rest");
        let state = self.warden.state();
        let owed: Vec<_> = state.restoring.keys().filter(|pid| !state.excluded.contains(pid)).collect();
        assert!(owed.is_empty(), "{owed:?}");
        let world = self.world.borrow();
        self.check_strays(&world);
        for member in state.members.values() {
            let process = world.processes.get(&member.id.pid).expect("a member that is gone is no member");
            assert_eq!(process.id, member.id);
            let job = &state.jobs[&member.job];
            let Some(grant) = job.grant.as_ref().filter(|_| !job.released) else {
                self.check_wishes(process);
                continue;
            };
            for (tid, thread) in &process.threads {
                let effective = world.effective(member.id.pid, &thread.asked);
                let possible = world.effective(member.id.pid, &grant.cpus).is_subset(&grant.cpus);
                assert!(
                    effective.is_subset(&grant.cpus) || !possible,
                    "thread {tid} of {} is on {effective}, outside {}",
                    member.job,
                    grant.cpus
                );
            }
        }
        if self.was_blind() {
            return;
        }
        for process in world.processes.values() {
            let Some(truth) = process.truth.as_ref().map(|truth| truth.parse::<JobId>().unwrap()) else {
                continue;
            };
            let known = state.jobs.get(&truth).is_none_or(|_| state.members.contains_key(&process.id.pid));
            assert!(known || process.uid == Uid(0), "{} is {truth}'s and nobody knows", process.id);
        }
    }

    /// Whoever asks for every PU behind a wall is told of once, whether anybody looks at it or not, and nobody else is.
    pub(super) fn check_asks(&mut self) {
        let state = self.warden.state();
        let bounded = |job: &JobId| {
            let job = state.jobs.get(job).filter(|job| !job.released);
            let grant = job.and_then(|job| job.grant.as_ref());
            let pus = grant.map(|grant| grant.cpus.intersection(&state.pool.online())).unwrap_or_default();
            !pus.is_empty() && pus != state.pool.online()
        };
        let in_cpuset =
            state.members.values().filter(|member| state.is_in_job_cpuset(member) && bounded(&member.job));
        let affinity_requesters: Vec<(Pid, Tid)> = in_cpuset
            .map(|member| (member.id.pid, *member.threads.keys().last().expect("a thread")))
            .collect();
        for full in [false, true] {
            // Not all attempts of one minute are told.
            self.world.borrow_mut().advance(60_000_000_000);
            for &(pid, tid) in &affinity_requesters {
                self.world.borrow_mut().ask_in_vain(pid, tid);
                self.world.borrow_mut().ask_in_vain(pid, tid);
            }
            let report = self.handle_connection(full, &[]).expect("nobody kills it now");
            let violations = report.events.iter().filter(|event| event.kind == EventKind::Violation);
            let mut told: Vec<_> = violations.filter_map(|event| event.pid.zip(event.tid)).collect();
            told.sort_unstable();
            assert_eq!(told, affinity_requesters);
            let report = self.handle_connection(full, &[]).expect("nobody kills it now");
            assert!(
                report.events.iter().all(|event| event.kind != EventKind::Violation),
                "{:?}",
                report.events
            );
        }
        self.totals.asks += affinity_requesters.len();
    }

    /// Strays of users with several jobs are off every core that a job holds, if there is any other.
    pub(super) fn check_strays(&self, world: &World) {
        let state = self.warden.state();
        let grants = state.jobs.values().filter_map(|job| job.grant.as_ref());
        let granted = grants.fold(CpuSet::new(), |all, grant| all.union(&grant.cpus));
        let outside = world.online.difference(&granted);
        for pid in &state.excluded {
            let process = &world.processes[pid];
            for thread in
                process.threads.values().filter(|_| world.allowance(&process.cgroup).intersects(&outside))
            {
                let effective = world.effective(*pid, &thread.asked);
                assert!(
                    effective.is_subset(&outside),
                    "stray {} is on {effective}, not {outside}",
                    process.id
                );
            }
        }
    }

    /// Every thread that chose nothing meanwhile runs where it would run without a warden, as far as anybody could
    /// know.
    pub(super) fn check_wishes(&self, process: &SimProcess) {
        // What a thread asked for can't be read while PUs of it are off: such masks come back as they were seen.
        if self.faults.hotplug {
            return;
        }
        let world = self.world.borrow();
        for (tid, thread) in
            process.threads.iter().filter(|(_, thread)| !thread.chose && !thread.has_unknown_creator)
        {
            let id = ThreadId { process: process.id, tid: *tid, start: thread.start };
            if self.was_blind() && !self.understood.contains(&id) {
                continue;
            }
            let pid = process.id.pid;
            let (is, was) = (world.effective(pid, &thread.asked), world.effective(pid, &thread.wish));
            assert_eq!(is, was, "thread {tid} of process {}", process.id);
        }
    }

    pub(super) fn note_understood(&mut self) {
        let world = self.world.borrow();
        for (id, entry) in self.warden.state().kept_masks() {
            let thread =
                world.processes.get(&id.process.pid).and_then(|process| process.threads.get(&id.tid));
            if thread.is_some_and(|thread| thread.start == id.start && thread.wish == *entry.original()) {
                self.understood.insert(id);
            }
        }
    }

    /// What is known of each mask that pjw set is true, unless the program changed the mask since it was read.
    pub(super) fn check_masks(&self) {
        if self.was_blind() || self.faults.hotplug {
            return;
        }
        let world = self.world.borrow();
        for (id, entry) in self.warden.state().kept_masks().filter(|(_, entry)| !entry.is_programs()) {
            let process = world.processes.get(&id.process.pid).filter(|process| process.id == id.process);
            let thread = process.and_then(|process| process.threads.get(&id.tid));
            let Some(thread) = thread.filter(|thread| thread.changed_at < entry.read_at().0) else {
                continue;
            };
            // A program's request that shows exactly what pjw had requested can't be told from that.
            if thread.chose && thread.asked == thread.wish {
                continue;
            }
            let candidates: Vec<String> =
                entry.candidates().map(|request| request.mask.to_string()).collect();
            assert!(
                entry.candidates().any(|request| request.mask == thread.asked),
                "thread {} of {} requested {}, and the entry says {candidates:?}",
                id.tid,
                id.process,
                thread.asked
            );
            assert!(
                thread.chose || thread.has_unknown_creator || thread.wish == *entry.original(),
                "thread {} of {} is to get back {}, and the entry says {}",
                id.tid,
                id.process,
                thread.wish,
                entry.original()
            );
        }
    }

    /// Whether there were moments in which nobody watched: a father who came and went in one may have taken his
    /// children's descent with him, and nobody can know.
    pub(super) fn was_blind(&self) -> bool {
        self.faults.lost_events > 0
            || self.faults.unseen > 0
            || self.totals.deaths > 0
            || self.faults.unwritten > 0
    }

    /// A release brings back every mask that nobody chose meanwhile, and every core. Jobs that their scheduler
    /// still runs stay known, and are left alone.
    pub(super) fn check_release(&mut self) {
        self.handle_connection(true, &[Command::ReleaseAll { caller: ROOT }]);
        for _ in 0..MAX_CYCLES_TO_REST {
            self.handle_connection(true, &[]);
        }
        let state = self.warden.state();
        let mut law = CpuSet::new();
        for job in state.jobs.values() {
            assert!(job.released && job.id.source().is_scheduler(), "{job:?}");
            assert!(
                job.grant.as_ref().is_none_or(|grant| grant.granted_by == GrantedBy::Scheduler),
                "{job:?}"
            );
            law = law.union(&state.pool.of(&job.id));
        }
        let kept: Vec<_> = state.kept_masks().collect();
        assert!(kept.is_empty() && state.restoring.is_empty(), "{kept:?}");
        let all = state.pool.free().union(&state.pool.housekeeping()).union(&law);
        assert_eq!(all, *self.topology.cpus());
        let left: Vec<&str> = state.cpusets.paths().collect();
        assert_eq!(left, [""; 0], "walls that stay");
        let world = self.world.borrow();
        for process in world.processes.values() {
            self.check_wishes(process);
            // Who was born behind a wall, and lost its parent before anybody looked, tells nobody where that came from.
            let orphan = process.parent == Pid(1);
            // Whoever was refused there once counts as one whose home is gone, and so do those born to it.
            let parent = |process: &&SimProcess| world.processes.get(&process.parent);
            let mut line = std::iter::successors(Some(process), parent);
            let homeless = process.cgroup == "/" && line.any(|process| self.homeless.contains(&process.id));
            assert!(
                orphan || homeless || self.was_blind() || process.cgroup == process.own_cgroup,
                "process {} is in {} and belongs to {}",
                process.id,
                process.cgroup,
                process.own_cgroup
            );
        }
    }
}
