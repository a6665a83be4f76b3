//! The live machine as a [`MachineInterface`].
//!
//! Attributes of a process that rarely change (cgroups, environment, groups) are read when the process is
//! first seen, and again when its program or its cgroups changed. All other facts are read in every scan. A
//! process or thread that ends while it is read is reported as gone.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome, LeftoverCpuset};
use pjw_core::ids::{Pid, ProcessId, StartTime, Tid};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::plan::{MaskAction, MaskActionKind, MaskOutcome};
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{
    AffinityRequest, Cgroup, ExpectedMask, ForkMaskMismatch, MaskProbeResult, Observed, Process,
    ProcessCpuTimes, ProcessEvent, ProcessEventBatch, Snapshot,
};
use pjw_core::{
    cpuset::CpuSet, ports::MachineInterface, state::masks::old_kernels::HOTPLUG_DELAY, time::Nanos,
};

use tracing::warn;

use crate::bpf::{AffinityMonitor, DrainedRequests, TaskScan, TaskScope};
use crate::cgroup::{CgroupMounts, CgroupWatch, CpusetMount, PopulatedCgroupCache, assumed_cgroup};
use crate::cpuset::list_job_cpusets;
pub use crate::cpuset::{has_lost_idle_priority, thaw_jobs, thaw_killed_processes};
use crate::proc::events::{EventLoss, ProcEventSocket};
use crate::proc::procfs::Stat;
use crate::sys::{affinity, clock};
use crate::{sys::errno::is_gone, sys::online::OnlinePuReader, sys::version::affinity_survives_by_version};

mod address_spaces;
mod cpu_times;
mod cpuset_changer;
mod cpuset_thread;
mod idle;
mod mask_write;
mod move_guard;
mod online_masks;
mod process_cache;
mod scan_plan;
mod task_scan_result;

use cpuset_changer::CpusetChanger;
pub use cpuset_changer::CpusetThreadProblem;
use idle::IdleTracker;
use mask_write::{refusal_reason, set_mask, set_mask_or_inherit};
use online_masks::cut_masks;
use process_cache::{ProcessCache, is_ended_or_unreadable};
use task_scan_result::TaskScanResult;

/// Lost affinity requests are logged again only after this long without a loss.
const LOSS_REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The Linux implementation of the trait [`MachineInterface`], through which the daemon pjwd observes and
/// changes the machine on which it runs. Reads processes, affinity masks and cgroups from the kernel, and sets
/// affinity masks and cpusets.
#[derive(Debug)]
pub struct LinuxMachine {
    /// The facts about each process that earlier scans read.
    cache: ProcessCache,
    mounts: CgroupMounts,
    populated_cache: PopulatedCgroupCache,
    /// Detects changes of the cgroups of jobs.
    cgroup_watch: CgroupWatch,
    /// The online PUs, as last read.
    online: CpuSet,
    /// Reader of the online PUs. `None` if sysfs is not mounted.
    online_list: Option<OnlinePuReader>,
    /// The time of the last change of the online PUs. `None` if the kernel has finished its changes of masks
    /// after this change.
    online_changed_at: Option<Instant>,
    /// Makes the changes of cpusets.
    cpuset_changer: CpusetChanger,
    idle: IdleTracker,
    /// The socket for the kernel's process events. `None` if process events are not available.
    process_events: Option<ProcEventSocket>,
    /// The BPF program that reads the state of threads. `None` if `/proc` is used.
    task_scan: Option<TaskScan>,
    /// The BPF program that reports calls of sched_setaffinity(2). `None` if it is not available.
    affinity_monitor: Option<AffinityMonitor>,
    /// The time at which reports of such calls were last lost.
    requests_lost_at: Option<Instant>,
    /// The number of tasks on the machine at the last run of `task_scan`.
    task_count: usize,
    /// The new processes whose masks the last call of [`MachineInterface::probe_masks`] found to be wrong.
    /// Empty after a scan.
    probed_mismatches: BTreeSet<ProcessId>,
}

impl LinuxMachine {
    /// Creates the value through which the daemon pjwd observes and changes this machine. Opens `/proc`.
    /// `wanted_variables` has the names of the environment variables that [`MachineInterface::scan`] reads from each
    /// process.
    ///
    /// # Errors
    /// If `/proc` can't be opened.
    pub fn new(wanted_variables: BTreeSet<&'static str>) -> Result<Self, Errno> {
        Ok(Self {
            cache: ProcessCache::new(wanted_variables)?,
            mounts: CgroupMounts::read(),
            populated_cache: PopulatedCgroupCache::default(),
            cgroup_watch: CgroupWatch::default(),
            online: CpuSet::new(),
            online_list: OnlinePuReader::open().ok(),
            online_changed_at: None,
            cpuset_changer: CpusetChanger::new(affinity_survives_by_version(), OwnCgroupNames::default())?,
            idle: IdleTracker::default(),
            process_events: None,
            task_scan: None,
            affinity_monitor: None,
            requests_lost_at: None,
            task_count: 0,
            probed_mismatches: BTreeSet::new(),
        })
    }

    /// Sets the netlink socket (proc connector) from which [`MachineInterface::read_process_events`] reads the fork,
    /// exec and exit events of processes. With `None`, [`MachineInterface::read_process_events`] returns no events,
    /// so that pjwd finds new processes only by scans.
    pub fn set_process_event_socket(&mut self, socket: Option<ProcEventSocket>) {
        self.process_events = socket;
    }

    /// Returns the file descriptor of the netlink socket (proc connector) for fork, exec and exit events. poll(2)
    /// shows it as readable while events are pending. `None` if [`LinuxMachine::set_process_event_socket`] has set no
    /// socket.
    #[must_use]
    pub fn process_events_fd(&self) -> Option<BorrowedFd<'_>> {
        self.process_events.as_ref().map(AsFd::as_fd)
    }

    /// Returns the inotify(7) file descriptor for the directories of the watched cgroups of jobs. poll(2) shows it as
    /// readable after a change of any file in these directories, even of a file that pjw ignores, such as
    /// `memory.events`. Then call [`LinuxMachine::has_cgroup_changes`]. `None` if no cgroup was watched yet, or if
    /// the kernel refuses inotify.
    #[must_use]
    pub fn cgroup_changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup_watch.fd()
    }

    /// Returns whether a watched cgroup of a job has changed since the last scan ([`MachineInterface::scan`]). A
    /// cgroup has changed if it was removed, or if inotify reported a change of a file `cgroup.*`, `cpuset.*` or
    /// `tasks` in its directory. The next scan reads the changed cgroups again. The first scan that reads a cgroup
    /// also starts to watch it.
    pub fn has_cgroup_changes(&mut self) -> bool {
        self.cgroup_watch.has_changes()
    }

    /// Sets the task scan: a BPF program that reports the state of threads. A scan of all processes of the machine
    /// ([`MachineInterface::scan`]) uses this program. A scan of only some processes uses the program only if these
    /// processes have so many threads that reading `/proc` would be slower. With `None`, each scan reads the threads in
    /// `/proc`.
    pub fn set_task_scan(&mut self, task_scan: Option<TaskScan>) {
        self.cache.address_spaces.set_source(task_scan.is_some());
        self.task_scan = task_scan;
    }

    /// Sets the BPF program that reports calls of sched_setaffinity(2). Each later scan puts the reported calls
    /// into its result, a [`Snapshot`]. With `None`, snapshots contain no such calls.
    pub fn set_affinity_monitor(&mut self, affinity_monitor: Option<AffinityMonitor>) {
        self.affinity_monitor = affinity_monitor;
    }

    /// Returns the affinity requests since the last scan: the calls of sched_setaffinity(2) by other programs. Logs a
    /// warning if requests were lost, but not if others were already lost in the last 60 s.
    fn drain_affinity_requests(&mut self) -> Vec<AffinityRequest> {
        let DrainedRequests { requests, lost_count } =
            self.affinity_monitor.as_mut().map(AffinityMonitor::drain_requests).unwrap_or_default();
        if lost_count > 0 {
            let now = Instant::now();
            let last = self.requests_lost_at.replace(now);
            if last.is_none_or(|last| now.saturating_duration_since(last) > LOSS_REPORT_INTERVAL) {
                warn!(
                    "{lost_count} calls of sched_setaffinity were lost because there were too many: requests beyond a cpuset may \
                     be missing from the events"
                );
            }
        }
        requests
    }

    /// Configures how pjw changes cpusets. `own_cgroups` has the names of the cgroups that pjwd creates for jobs.
    /// `affinity_persists` says whether the kernel keeps the affinity mask of a thread when a cpuset changes. If it is
    /// false, pjw assumes that a change of a cpuset can reset the masks of threads outside this cpuset, and restores
    /// these masks after the change. Without a call of this function, `affinity_persists` is true on Linux 6.2 and
    /// later, and false on older kernels.
    ///
    /// Call this function before [`LinuxMachine::start_cpuset_change_thread`]: it ends a thread that was started
    /// earlier.
    ///
    /// # Errors
    /// If `/proc` can't be opened. The configuration then stays the same.
    pub fn configure_cpuset_changes(
        &mut self,
        affinity_persists: bool,
        own_cgroups: &OwnCgroupNames,
    ) -> Result<(), Errno> {
        self.cpuset_changer = CpusetChanger::new(affinity_persists, own_cgroups.clone())?;
        Ok(())
    }

    /// Runs the task scan (a BPF program that reports the state of threads) for the processes in `scope`. `within` is
    /// explained at [`TaskScanResult::from_scan`]. Returns an empty result if the task scan is not available. If the
    /// task scan fails, logs a warning, switches it off, and returns an empty result.
    fn run_task_scan<'a>(
        &mut self,
        scope: TaskScope<'_>,
        within: impl Fn(Pid) -> Option<&'a CpuSet>,
    ) -> TaskScanResult {
        let Some(scan) = &mut self.task_scan else { return TaskScanResult::default() };
        match TaskScanResult::from_scan(scan, scope, within) {
            Ok(result) => {
                self.task_count = result.tasks;
                result
            }
            Err(error) => {
                warn!("{error}; the task scan stays off until pjwd is restarted");
                self.set_task_scan(None);
                TaskScanResult::default()
            }
        }
    }

    /// Reads the online PUs. For a while after they have changed, no process counts as idle, because the kernel may
    /// be changing affinity masks.
    fn update_online(&mut self) {
        let online = self.online_list.as_mut().and_then(|list| list.read().ok());
        if let Some(online) = online.filter(|online| !online.is_empty() && **online != self.online) {
            self.online_changed_at = (!self.online.is_empty()).then(Instant::now);
            self.online = online.clone();
        }
        if let Some(at) = self.online_changed_at {
            self.idle = IdleTracker::default();
            self.online_changed_at = Some(at).filter(|at| at.elapsed() < HOTPLUG_DELAY);
        }
    }

    /// Reads the online PUs again, after the masks in `processes` were read. If PUs went offline meanwhile, removes
    /// them from these masks. So the fallback masks that the kernel gives threads without an online PU are not
    /// reported.
    /// PUs that came online are used from the next scan on.
    fn narrow_masks_to_online(&mut self, processes: &mut BTreeMap<Pid, Observed<Process>>) {
        let before = std::mem::take(&mut self.online);
        let now = self.online_list.as_mut().and_then(|list| list.read().ok());
        let remaining = now.map(|now| before.intersection(now)).filter(|remaining| !remaining.is_empty());
        let Some(remaining) = remaining.filter(|remaining| *remaining != before) else {
            self.online = before;
            return;
        };
        self.online_changed_at = Some(Instant::now());
        cut_masks(processes, &remaining);
        self.online = remaining;
    }

    /// Reads the processes of which a partial scan needs only the active threads, and returns them. Leaves out a
    /// process if all its threads must be read. Empty for a full scan, and for some time after the online PUs have
    /// changed.
    fn observe_active_threads(&mut self, scan_request: &ScanRequest) -> BTreeMap<Pid, Observed<Process>> {
        let ScanScope::Partial(scope) = &scan_request.scope else { return BTreeMap::new() };
        // The kernel may be changing the masks of all threads.
        if self.online_changed_at.is_some() {
            return BTreeMap::new();
        }
        let in_scope = scan_request.active_threads.iter().filter(|(pid, _)| scope.contains(pid));
        let observed = in_scope.filter_map(|(&pid, active)| {
            self.idle.mark_active(pid);
            Some((pid, Observed::Present(self.cache.observe_active(pid, active)?)))
        });
        observed.collect()
    }

    /// Reads the mounted cgroup hierarchies.
    fn update_mounts(&mut self) {
        // Without the list, the known hierarchies are the best guess.
        let Ok(mounts) = CgroupMounts::try_read() else { return };
        self.cache.expire_fingerprints(mounts != self.mounts);
        self.mounts = mounts;
    }

    /// Reads the cgroups at the paths `requested`, and the watched cgroups that changed since they were read. Also
    /// restores affinity masks that the kernel has reset because one of the cgroups was removed.
    fn read_cgroups(&mut self, requested: &BTreeSet<String>) -> BTreeMap<String, Observed<Cgroup>> {
        let mut paths = self.cgroup_watch.take_changed();
        // The kernel changes cpusets when PUs go offline or online, and reports no change.
        if self.online_changed_at.is_some() {
            paths.extend(self.cgroup_watch.watched_paths().map(str::to_owned));
        }
        paths.extend(requested.iter().cloned());
        let cgroups: BTreeMap<String, Observed<Cgroup>> =
            paths.into_iter().map(|path| (path.clone(), self.read_cgroup(&path))).collect();
        // systemd removes the scope of a job that ended, and with it a partition.
        let removed = cgroups.iter().filter(|(_, cgroup)| **cgroup == Observed::Gone);
        let removed = removed.map(|(path, _)| path.clone()).collect();
        if let Some(hierarchy) = CpusetMount::from_mounts(&self.mounts) {
            self.cpuset_changer.restore_after_removal(removed, &hierarchy);
        }
        cgroups
    }

    fn read_cgroup(&mut self, path: &str) -> Observed<Cgroup> {
        // The watch comes first, so that no change after the reading is missed.
        self.cgroup_watch.add(path, || self.mounts.dirs_to_watch(path));
        let cgroup = self.mounts.read_cgroup(path, &mut self.populated_cache);
        if cgroup == Some(Observed::Gone) {
            self.cgroup_watch.remove(path);
        }
        cgroup.unwrap_or_else(|| assumed_cgroup(path))
    }
}

impl MachineInterface for LinuxMachine {
    fn scan(&mut self, scan_request: &ScanRequest) -> Snapshot {
        let taken_at = clock::now();
        self.probed_mismatches.clear();
        self.update_online();
        let (mut incomplete, full) = (None, scan_request.scope == ScanScope::Full);
        if full {
            self.update_mounts();
        }
        let mut processes = self.observe_active_threads(scan_request);
        let (unified, idle_watch) = (self.mounts.v2_mount_point.as_deref(), &scan_request.idle_watch);
        let mut idle_check = self.idle.find_idle(idle_watch, unified, taken_at.since_boot, full);
        let mut plan = self.plan_scan(scan_request, &processes, &mut idle_check);
        // Without the process list, a missing process proves nothing.
        let (pids, mut scope) = match plan.pids {
            Ok(pids) => (pids, scan_request.scope.clone()),
            Err(errno) => {
                incomplete = Some(errno);
                (BTreeSet::new(), ScanScope::Partial(BTreeSet::new()))
            }
        };
        for pid in pids {
            let with_threads = plan.wanted.contains(&pid);
            if with_threads {
                self.idle.mark_active(pid);
            }
            let scanned = plan.scan_result.processes.remove(&pid);
            if scanned.is_none() && idle_check.active_unassigned.contains(&pid) {
                self.cache.refresh_uid(pid);
            }
            match self.cache.observe_process(pid, with_threads, scanned) {
                Ok(mut process) => {
                    let idle_until = idle_check.idle_until.get(&pid).copied();
                    process.idle_until = idle_until.filter(|_| process.threads.is_some());
                    processes.insert(pid, Observed::Present(process));
                }
                Err(errno) if is_ended_or_unreadable(errno) => {
                    self.cache.remove_process(pid);
                    processes.insert(pid, Observed::Gone);
                }
                Err(errno) => incomplete = Some(errno),
            }
        }
        if scope == ScanScope::Full {
            self.populated_cache.forget_removed_cgroups();
            if incomplete.is_none() {
                self.cache.retain(|pid| processes.contains_key(&pid));
                self.idle.retain(|pid| processes.contains_key(&pid), idle_watch);
            } else {
                scope = ScanScope::Partial(processes.keys().copied().collect());
            }
        }
        self.narrow_masks_to_online(&mut processes);
        let cgroups = self.read_cgroups(&scan_request.cgroups);
        // Read after the masks: by now, the monitor has the request of each changed mask in the snapshot.
        let affinity_requests = self.drain_affinity_requests();
        Snapshot {
            scope,
            taken_at,
            online: self.online.clone(),
            ended_idle_until: self.idle.ended_idle_until(&idle_check, &processes),
            processes,
            cgroups,
            affinity_requests,
            incomplete_reason: incomplete.map(|errno| errno.desc().to_owned()),
            cpu_times: BTreeMap::new(),
            cpu_times_read_until: None,
            reaped: BTreeSet::new(),
            address_spaces: Some(self.read_address_spaces(taken_at.since_boot)),
        }
    }

    fn read_cpu_times(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, Observed<ProcessCpuTimes>> {
        self.cache.read_cpu_times(pids)
    }

    fn idle_until(&self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, Nanos> {
        pids.iter().filter_map(|&pid| Some((pid, self.idle.idle_until(pid)?))).collect()
    }

    fn time_since_boot(&self) -> Option<Nanos> {
        Some(clock::now().since_boot)
    }

    fn read_memory_peak(&mut self, path: &str) -> Option<u64> {
        self.mounts.read_memory_peak(path)
    }

    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbeResult {
        let taken_at = clock::now();
        let mismatch = |(&pid, expected): (&Pid, &ExpectedMask)| {
            let age = taken_at.since_boot.0.checked_sub(expected.forked_at.0)?;
            if age > ProcessId::MIN_PID_REUSE_TIME.0 {
                return None;
            }
            let mask = affinity::get_mask(Tid(pid.0)).ok().filter(|mask| *mask != expected.mask)?;
            let start = StartTime(expected.forked_at.0 / self.cache.ns_per_tick);
            Some(ForkMaskMismatch { id: ProcessId { pid, start }, effective_mask: mask })
        };
        let mismatches: Vec<ForkMaskMismatch> = expected.iter().filter_map(mismatch).collect();
        self.probed_mismatches = mismatches.iter().map(|mismatch| mismatch.id).collect();
        MaskProbeResult { taken_at, online: self.online.clone(), mismatches }
    }

    fn read_cpuset_paths(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, String> {
        let paths = pids.iter().filter_map(|&pid| Some((pid, self.cache.proc.cpuset_path(pid)?)));
        paths.collect()
    }

    fn read_process_events(&mut self) -> ProcessEventBatch {
        let mut events = Vec::new();
        let EventLoss { events_lost, still_dropping } =
            self.process_events.as_mut().map(|source| source.drain_events(&mut events)).unwrap_or_default();
        for event in &events {
            if let ProcessEvent::Exec { pid } | ProcessEvent::Exit { pid } = *event {
                self.cache.address_spaces.remove_process(pid);
            }
        }
        ProcessEventBatch { events, events_lost, still_dropping }
    }

    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
        let hierarchy = CpusetMount::from_mounts(&self.mounts);
        hierarchy.map(|hierarchy| list_job_cpusets(&hierarchy, own_cgroups)).unwrap_or_default()
    }

    fn change_mask(&mut self, action: &MaskAction) -> MaskOutcome {
        let thread = action.thread;
        // The thread id may belong to another thread by now, unless it was assigned a moment ago. The id may still be
        // reused between this check and the change of the mask. The next cycle then corrects the mask of the other
        // thread.
        let is_there = |stat: Stat| stat.start == thread.start && !matches!(stat.state, 'Z' | 'X');
        if !self.probed_mismatches.contains(&thread.process)
            && !self.cache.proc.thread_stat(thread.process.pid, thread.tid).is_ok_and(is_there)
        {
            return MaskOutcome::Gone;
        }
        let result = match action.kind {
            MaskActionKind::Restore => set_mask_or_inherit(thread.tid, &action.target_mask, &self.online),
            _ => set_mask(thread.tid, &action.requested_mask, &self.online),
        };
        match result {
            Ok(effective) => MaskOutcome::Done { effective },
            Err(errno) if is_gone(errno) => MaskOutcome::Gone,
            Err(errno) => MaskOutcome::Refused { errno: errno as i32, reason: refusal_reason(errno, action) },
        }
    }

    fn take_finished_cpuset_changes(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        self.cpuset_changer.take_finished()
    }

    fn change_cpusets(&mut self, actions: &[CpusetAction], max_wait: Duration) -> Vec<CpusetOutcome> {
        let Some(hierarchy) = CpusetMount::from_mounts(&self.mounts) else {
            let reason = "no cgroup hierarchy with cpusets is mounted".to_owned();
            return vec![CpusetOutcome::Refused { reason }; actions.len()];
        };
        self.cpuset_changer.change(actions, &hierarchy, max_wait)
    }
}

#[cfg(test)]
mod tests;
