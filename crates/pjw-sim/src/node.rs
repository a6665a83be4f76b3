//! The simulated machine as a node of the warden. Processes may end during a scan, and masks may be refused.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome, LeftoverCpuset};
use pjw_core::ids::{Pid, ProcessId, StartTime, Tid};
use pjw_core::plan::{MaskAction, MaskOutcome};
use pjw_core::scan::{ScanRequest, ScanScope, WatchedProcesses};
use pjw_core::snapshot::{
    BatchAttributes, Cgroup, ExpectedMask, ForkMaskMismatch, MaskProbeResult, Observed, Process,
    ProcessCpuTimes, ProcessEventBatch, Snapshot, Thread,
};
use pjw_core::{own_cgroups::OwnCgroupNames, ports::MachineInterface, time::Nanos};

use crate::world::{SimMachine, SimThread};
use crate::{faults::Faults, workload::Workload};

mod cgroups;
mod cpusets;

use cgroups::{process_cgroups, read_cgroup};
use cpusets::{change_cpuset, mark_affected_processes};

/// A partial scan checks the masks of one in this number of idle processes.
const MASK_CHECK_INTERVAL: u32 = 4;

/// The probability, in permille per step of the daemon, that no delayed change of a cpuset is completed.
const HOLD_PERMILLE: u32 = 800;

/// The simulated machine as the daemon pjwd sees it: an implementation of the trait [`MachineInterface`], through which
/// pjwd reads and changes a machine. At random, the processes of the machine change just before a scan, a mask change
/// or a cpuset change of pjwd. Scans, mask changes and cpuset changes also fail at random.
#[derive(Debug, Clone)]
pub struct SimMachineInterface {
    world: Rc<RefCell<SimMachine>>,
    workload: Rc<RefCell<Workload>>,
    faults: Faults,
    /// For each process that may be idle, its CPU time at the last scan, and the last time at which it was seen idle.
    cpu_times: BTreeMap<Pid, (u64, Option<Nanos>)>,
    /// For each process of which the last scan read only the active threads, the CPU time of the other threads.
    other_threads_ns: BTreeMap<Pid, u64>,
    /// The number of scans so far. A scan checks the masks of only some idle processes, and this number selects them.
    scans: u32,
    /// The online PUs at the last scan.
    online: CpuSet,
    /// The new processes whose masks the last [`MachineInterface::probe_masks`] found to be wrong. Empty after a scan.
    probed: BTreeSet<ProcessId>,
    /// The cgroups that were scanned, each as the last scan of it read it.
    cgroups: BTreeMap<String, Observed<Cgroup>>,
    /// Whether each change of a cpuset is delayed until [`SimMachineInterface::finish_cpuset_changes`] is called.
    are_changes_held: bool,
    /// The delayed changes of cpusets, in the order of the calls.
    delayed: VecDeque<CpusetAction>,
    /// The delayed changes that are complete.
    finished: Vec<(CpusetAction, CpusetOutcome)>,
}

impl SimMachineInterface {
    /// Makes the interface of pjwd to the simulated machine `world`. `workload` changes processes of the
    /// machine, before some of the scans, mask changes and cpuset changes of pjwd. `faults` decides at random
    /// when `workload` does so, and which scans, mask changes and cpuset changes fail.
    #[must_use]
    pub fn new(world: Rc<RefCell<SimMachine>>, workload: Rc<RefCell<Workload>>, faults: Faults) -> Self {
        Self {
            world,
            workload,
            faults,
            cpu_times: BTreeMap::new(),
            other_threads_ns: BTreeMap::new(),
            scans: 0,
            online: CpuSet::new(),
            probed: BTreeSet::new(),
            cgroups: BTreeMap::new(),
            are_changes_held: false,
            delayed: VecDeque::new(),
            finished: Vec::new(),
        }
    }

    /// Makes [`MachineInterface::change_cpusets`] delay every change of a cpuset and return
    /// [`CpusetOutcome::Delayed`], until [`SimMachineInterface::finish_cpuset_changes`] is called.
    pub fn hold_cpuset_changes(&mut self) {
        self.are_changes_held = true;
    }

    /// Completes all delayed changes of cpusets. Also ends the effect of [`SimMachineInterface::hold_cpuset_changes`]:
    /// later changes are delayed only at random, with the probability [`Faults::delayed_change_permille`].
    pub fn finish_cpuset_changes(&mut self) {
        self.are_changes_held = false;
        while !self.delayed.is_empty() {
            self.finish_next_cpuset_change();
        }
    }

    /// Completes the oldest delayed change of a cpuset. Has no effect if no change is delayed.
    pub fn finish_next_cpuset_change(&mut self) {
        if let Some(action) = self.delayed.pop_front() {
            let outcome = change_cpuset(&mut self.world.borrow_mut(), &action.change);
            self.finished.push((action, outcome));
        }
    }

    /// Makes the change `action` of a cpuset, and returns its outcome. At random, the change is delayed or refused,
    /// or the daemon is killed before or after it. If earlier changes are still delayed, this change is delayed too.
    fn change_one_cpuset(&mut self, action: &CpusetAction) -> CpusetOutcome {
        self.faults.maybe_kill_daemon();
        self.pass_time();
        let is_slow = self.are_changes_held || !self.delayed.is_empty();
        let delayed_permille = self.faults.delayed_change_permille;
        if is_slow || (delayed_permille > 0 && self.faults.occurs(delayed_permille)) {
            self.delayed.push_back(action.clone());
            mark_affected_processes(&mut self.world.borrow_mut(), &action.change);
            return CpusetOutcome::Delayed;
        }
        if self.faults.occurs(self.faults.refused_change_permille) {
            return CpusetOutcome::Refused { reason: "refused by chance".to_owned() };
        }
        let outcome = change_cpuset(&mut self.world.borrow_mut(), &action.change);
        self.faults.maybe_kill_daemon();
        outcome
    }

    /// Checks which of the processes in `watch` are still idle. The second set of the result has these processes. The
    /// first list has all others, each with the last time at which a scan saw it idle (`None` if there is no such
    /// time). A process is no longer idle in each of these cases:
    ///
    /// - It ran or ended since the last scan, or was not checked before.
    /// - PUs went online or offline since the last scan.
    /// - A thread has a mask outside of the expected PUs. A full scan (`full`) checks all masks, other scans only
    ///   some.
    ///
    /// `at` is the time of the scan, in ns since boot.
    fn check_idle(
        &mut self,
        watch: &WatchedProcesses,
        at: Nanos,
        full: bool,
    ) -> (BTreeMap<Pid, Option<Nanos>>, BTreeSet<Pid>) {
        let (mut active, mut idle) = (BTreeMap::new(), BTreeSet::new());
        let world = self.world.borrow();
        self.scans += 1;
        let is_hotplug = self.online != world.online;
        self.online = world.online.clone();
        let watched = watch.groups.iter().flat_map(|group| group.pids.iter().map(move |pid| (*pid, group)));
        for (pid, group) in watched {
            let last_scan = self.cpu_times.get(&pid).copied();
            let idle_at = last_scan.and_then(|(_, idle_at)| idle_at);
            let Some(process) = world.processes.get(&pid) else {
                active.insert(pid, idle_at);
                continue;
            };
            let run_ns = process.run_ns();
            let is_idle = last_scan.is_some_and(|(before, _)| before == run_ns) && !is_hotplug;
            self.cpu_times.insert(pid, (run_ns, is_idle.then_some(at)));
            let is_checked = full || pid.0 % MASK_CHECK_INTERVAL == self.scans % MASK_CHECK_INTERVAL;
            let expected_cpus = group.expected_cpus.as_ref().filter(|_| is_checked);
            let has_expected_mask = |thread| {
                expected_cpus.is_none_or(|cpus| world.effective_mask(process, thread).is_subset(cpus))
            };
            if is_idle && process.threads.values().all(has_expected_mask) {
                idle.insert(pid);
            } else {
                active.insert(pid, idle_at);
            }
        }
        (active, idle)
    }

    /// Returns the watched processes outside of jobs that ran or ended since the last scan, or were not scanned before.
    fn active_unassigned(&mut self, watch: &WatchedProcesses) -> BTreeSet<Pid> {
        let world = self.world.borrow();
        let mut is_active = |pid: Pid| {
            let Some(process) = world.processes.get(&pid) else { return true };
            let run_ns = process.run_ns();
            let last_scan = self.cpu_times.insert(pid, (run_ns, None));
            last_scan.is_none_or(|(before, _)| before != run_ns)
        };
        watch.unassigned_pids.iter().copied().filter(|&pid| is_active(pid)).collect()
    }

    /// Lets time pass between two steps of the warden. No two scans have the same time. The workload may make a step.
    fn pass_time(&mut self) {
        self.world.borrow_mut().advance(1);
        if self.faults.occurs(self.faults.change_between_steps_permille) {
            self.workload.borrow_mut().step(&mut self.world.borrow_mut());
        }
        if !self.delayed.is_empty() && !self.are_changes_held && !self.faults.occurs(HOLD_PERMILLE) {
            self.finish_next_cpuset_change();
        }
    }
}

/// Returns the process `pid` as a scan reads it. The result has the threads if `with_threads` is true. It has the
/// attributes (cgroups, environment and command line) if they changed since the last reading. Returns `None` if the
/// process has ended.
fn read_process(world: &mut SimMachine, pid: Pid, with_threads: bool) -> Option<Process> {
    let attributes_changed = std::mem::take(&mut world.processes.get_mut(&pid)?.attributes_changed);
    let process = &world.processes[&pid];
    let attributes = attributes_changed.then(|| BatchAttributes {
        cgroups: process_cgroups(process, &world.cpuset_support.hierarchy),
        environ: process.environ.clone(),
        supplementary_groups: Vec::new(),
        command_line: process.comm.to_string(),
    });
    let read_thread = |(&tid, thread): (&Tid, &SimThread)| {
        let effective_mask = world.effective_mask(process, thread);
        Thread {
            tid,
            start: thread.start,
            comm: process.comm,
            state: thread.state.unwrap_or(if thread.is_busy { 'R' } else { 'S' }),
            last_cpu: effective_mask.first().unwrap_or(Pu(0)),
            run_ns: thread.run_ns,
            wait_ns: thread.wait_ns,
            effective_mask,
        }
    };
    Some(Process {
        id: process.id,
        parent: process.parent,
        process_group: process.process_group,
        session: process.session,
        uid: process.uid,
        comm: process.comm,
        is_kernel_thread: process.is_kernel_thread,
        first_thread_mask: process.threads.values().next().map(|first| world.effective_mask(process, first)),
        cgroup: Some(process.cgroup.as_str().into()),
        unit_cgroup: None,
        attributes,
        has_unread_environment: false,
        batch_identity: process.batch_identity.clone(),
        threads: with_threads.then(|| process.threads.iter().map(read_thread).collect()),
        has_all_threads: true,
        idle_until: None,
    })
}

/// Removes all threads from `process` except those in `active`, as a scan that reads only the active threads. Removes
/// none if an active thread has ended, or if another thread ran since the last such scan. `others_ns` has the CPU time
/// of these other threads at that scan, in ns, by process. The entry of the process gets their present CPU time, or is
/// deleted if no thread is removed.
fn keep_active_threads_only(
    process: &mut Process,
    active: &BTreeSet<Tid>,
    others_ns: &mut BTreeMap<Pid, u64>,
) {
    let ns_before = others_ns.remove(&process.id.pid);
    let Some(threads) = &mut process.threads else { return };
    let other_threads = threads.iter().filter(|thread| !active.contains(&thread.tid));
    let (count, run_ns) = other_threads.fold((0, 0), |(count, ns), thread| (count + 1, ns + thread.run_ns));
    if count + active.len() == threads.len() && ns_before.is_none_or(|before| before == run_ns) {
        others_ns.insert(process.id.pid, run_ns);
        threads.retain(|thread| active.contains(&thread.tid));
        process.has_all_threads = false;
    }
}

impl MachineInterface for SimMachineInterface {
    fn scan(&mut self, request: &ScanRequest) -> Snapshot {
        self.pass_time();
        self.probed.clear();
        let taken_at = self.world.borrow().current_time();
        let is_full = request.scope == ScanScope::Full;
        let unassigned = self.active_unassigned(&request.idle_watch);
        let (active, idle) = self.check_idle(&request.idle_watch, taken_at.since_boot, is_full);
        let pids: BTreeSet<Pid> = match &request.scope {
            ScanScope::Full => self.world.borrow().processes.keys().copied().collect(),
            ScanScope::Partial(pids) => {
                pids.iter().chain(active.keys()).chain(&unassigned).copied().collect()
            }
        };
        let mut processes = BTreeMap::new();
        let mut ended_idle_until = BTreeMap::new();
        let mut incomplete_reason = None;
        for pid in pids {
            if self.faults.occurs(self.faults.unreadable_process_permille) {
                incomplete_reason = Some("Too many open files (simulated)".to_owned());
                continue;
            }
            // A process may end between the listing and the reading.
            if self.faults.occurs(5) {
                self.pass_time();
            }
            let is_requested = request.pids_to_read_threads_of.contains(&pid) && !idle.contains(&pid);
            let with_threads = is_requested || (!is_full && !unassigned.contains(&pid));
            let idle_until = active.get(&pid).copied().flatten();
            let process = read_process(&mut self.world.borrow_mut(), pid, with_threads);
            let Some(mut process) = process else {
                ended_idle_until.extend(idle_until.map(|until| (pid, until)));
                processes.insert(pid, Observed::Gone);
                continue;
            };
            process.idle_until = idle_until;
            match request.active_threads.get(&pid).filter(|_| !is_full) {
                Some(tids) => keep_active_threads_only(&mut process, tids, &mut self.other_threads_ns),
                None => drop(self.other_threads_ns.remove(&pid)),
            }
            processes.insert(pid, Observed::Present(process));
        }
        let scope = match incomplete_reason {
            Some(_) => ScanScope::Partial(processes.keys().copied().collect()),
            None => request.scope.clone(),
        };
        // The affinity requests are read last.
        let mut affinity_requests = std::mem::take(&mut self.world.borrow_mut().affinity_requests);
        affinity_requests.retain(|_| !self.faults.occurs(self.faults.silent_event_loss_permille));
        let world = self.world.borrow();
        let changed = self.cgroups.iter().filter(|(path, last)| read_cgroup(&world, path) != **last);
        let paths: BTreeSet<&String> = changed.map(|(path, _)| path).chain(&request.cgroups).collect();
        let cgroups: BTreeMap<_, _> =
            paths.into_iter().map(|path| (path.clone(), read_cgroup(&world, path))).collect();
        self.cgroups.extend(cgroups.clone());
        Snapshot {
            scope,
            taken_at,
            online: world.online.clone(),
            processes,
            cgroups,
            affinity_requests,
            incomplete_reason,
            ended_idle_until,
            cpu_times: BTreeMap::new(),
            cpu_times_read_until: None,
            reaped: BTreeSet::new(),
            address_spaces: None,
        }
    }

    fn read_cpu_times(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, Observed<ProcessCpuTimes>> {
        let world = self.world.borrow();
        let read = |pid| world.cpu_times(pid).map_or(Observed::Gone, Observed::Present);
        pids.iter().map(|&pid| (pid, read(pid))).collect()
    }

    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbeResult {
        self.pass_time();
        let world = self.world.borrow();
        let mismatch = |(&pid, expected): (&Pid, &ExpectedMask)| {
            let process = world.processes.get(&pid)?;
            let mask = world.effective_mask(process, process.threads.values().next()?);
            // The time of the fork event, which differs from the kernel's start time.
            let start = StartTime((process.id.start.0 + u64::from(pid.0 % 3)).saturating_sub(1));
            (mask != expected.mask)
                .then_some(ForkMaskMismatch { id: ProcessId { pid, start }, effective_mask: mask })
        };
        let mismatches: Vec<ForkMaskMismatch> = expected.iter().filter_map(mismatch).collect();
        self.probed = mismatches.iter().map(|mismatch| mismatch.id).collect();
        MaskProbeResult { taken_at: world.current_time(), online: self.online.clone(), mismatches }
    }

    fn read_cpuset_paths(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, String> {
        let world = self.world.borrow();
        let path = |&pid: &Pid| Some((pid, world.processes.get(&pid)?.cgroup.clone()));
        pids.iter().filter_map(path).collect()
    }

    fn read_process_events(&mut self) -> ProcessEventBatch {
        let mut events = std::mem::take(&mut self.world.borrow_mut().events);
        events.retain(|_| !self.faults.occurs(self.faults.silent_event_loss_permille));
        ProcessEventBatch { events, events_lost: false, still_dropping: false }
    }

    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
        let world = self.world.borrow();
        let is_present =
            |path: &&String| own_cgroups.is_own_path(path) && read_cgroup(&world, path) != Observed::Gone;
        let leftover = |path: &String, scheduler_cpuset| LeftoverCpuset {
            path: path.clone(),
            owner: world.cgroup_owners.get(path).copied(),
            origin_cgroup: world.cgroup_origins.get(path).filter(|origin| !origin.is_empty()).cloned(),
            scheduler_cpuset,
            other_writer: None,
        };
        let in_scheduler_cgroups =
            world.scheduler_cpusets_in_effect().map(|cpuset| leftover(&cpuset.path, Some(cpuset.clone())));
        let own = world.cpusets.keys().filter(is_present).map(|path| leftover(path, None));
        own.chain(in_scheduler_cgroups).collect()
    }

    fn change_mask(&mut self, action: &MaskAction) -> MaskOutcome {
        self.faults.maybe_kill_daemon();
        self.pass_time();
        let (id, tid) = (action.thread.process, action.thread.tid);
        // The start time that a mask probe reports is that of the fork event, so it is not compared.
        let is_probed = self.probed.contains(&id);
        let mut world = self.world.borrow_mut();
        world.record_mask_requested_by_pjw(&action.requested_mask);
        let process = world.processes.get(&id.pid).filter(|process| is_probed || process.id == id);
        let thread = process.and_then(|process| process.threads.get(&tid));
        if thread.is_none_or(|thread| !is_probed && thread.start != action.thread.start) {
            return MaskOutcome::Gone;
        }
        if self.faults.occurs(self.faults.refused_change_permille) {
            return MaskOutcome::Refused { errno: 1, reason: "refused by chance".to_owned() };
        }
        // The mask in the plan is that of the last reading.
        let process = &world.processes[&id.pid];
        if world.effective_mask(process, &process.threads[&tid]) == action.current_mask {
            world.record_mask_read(id.pid, tid);
        }
        if !world.request_mask_as_pjw(id.pid, tid, &action.requested_mask) {
            return MaskOutcome::Refused { errno: 22, reason: "its cpuset allows none of these PUs".into() };
        }
        let process = &world.processes[&id.pid];
        let effective = world.effective_mask(process, &process.threads[&tid]);
        drop(world);
        self.faults.maybe_kill_daemon();
        MaskOutcome::Done { effective }
    }

    fn take_finished_cpuset_changes(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        std::mem::take(&mut self.finished)
    }

    fn change_cpusets(&mut self, actions: &[CpusetAction], _max_wait: Duration) -> Vec<CpusetOutcome> {
        actions.iter().map(|action| self.change_one_cpuset(action)).collect()
    }
}
