//! Which processes a scan reads, and by which interface: the task scan or `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;
use pjw_core::scan::{ScanRequest, ScanScope, WatchedProcesses};
use pjw_core::snapshot::{AddressSpaceList, Observed, Process};
use pjw_core::time::Nanos;

use super::LinuxMachine;
use super::idle::{IdleCheck, check_thread_masks};
use super::process_cache::ProcessCache;
use super::task_scan_result::{TaskScanResult, is_task_scan_faster};
use crate::bpf::TaskScope;

/// The processes that one scan reads, and what the task scan (a BPF program that reports the state of threads) has
/// already reported about them.
pub(super) struct ScanPlan {
    /// The processes whose threads the scan reads.
    pub(super) wanted: BTreeSet<Pid>,
    /// All processes that the scan reads, including `wanted`. An error if the list of processes in `/proc` can't be
    /// read.
    pub(super) pids: Result<BTreeSet<Pid>, Errno>,
    /// What the task scan reported.
    pub(super) scan_result: TaskScanResult,
}

impl LinuxMachine {
    /// Marks idle processes as active in `idle_check` if one of their affinity masks has other PUs than planned.
    /// `planned` has the idle processes that only affinity masks keep on their PUs, each with the mask that pjw has
    /// planned for it. A process is marked if the mask of one of its threads has PUs outside the planned mask. Marked
    /// processes are removed from `scan_result`, the result of the task scan (a BPF program), so that their threads are
    /// read in `/proc`.
    fn mark_active_if_mask_differs(
        &mut self,
        idle_check: &mut IdleCheck,
        planned: &BTreeMap<Pid, &CpuSet>,
        scan_result: &mut TaskScanResult,
    ) {
        for (&pid, within) in planned {
            let is_scanned_outside = scan_result.processes.get(&pid).map(|process| process.is_outside);
            let is_outside = || {
                let proc = &mut self.cache.proc;
                let tid_cache = self.idle.cached_tids(pid);
                tid_cache.is_some_and(|tid_cache| check_thread_masks(proc, pid, within, tid_cache).1)
            };
            if is_scanned_outside.unwrap_or_else(is_outside) {
                idle_check.active.insert(pid);
                // The task scan did not report the threads. They are read in `/proc`.
                scan_result.processes.remove(&pid);
            }
        }
    }

    /// Determines which processes the scan for `scan_request` reads. Runs the task scan (a BPF program) if it is
    /// faster than `/proc`. A partial scan leaves out the processes in `observed`, which were already read.
    ///
    /// `idle_check` has the idle processes, which did not run since the last scan. Their threads are not read. But if
    /// a checked affinity mask of an idle process is not as planned, this function marks the process as active in
    /// `idle_check`, and the scan reads it.
    pub(super) fn plan_scan(
        &mut self,
        scan_request: &ScanRequest,
        observed: &BTreeMap<Pid, Observed<Process>>,
        idle_check: &mut IdleCheck,
    ) -> ScanPlan {
        match &scan_request.scope {
            ScanScope::Partial(pids) => {
                let pids = pids.iter().copied().filter(|pid| !observed.contains_key(pid)).collect();
                self.plan_partial(&pids, &scan_request.idle_watch, idle_check)
            }
            ScanScope::Full => self.plan_full(scan_request, idle_check),
        }
    }

    /// Plans a partial scan. First checks the masks of some idle processes against the planned masks in `idle_watch`,
    /// and marks those with a wrong mask as active in `idle_check`. The scan reads these processes:
    ///
    /// - The processes `pids`, with their threads.
    /// - The processes of jobs that `idle_check` names as active, with their threads.
    /// - The processes outside jobs that `idle_check` names as active, without their threads.
    ///
    /// Runs the task scan (a BPF program) over these processes if it is faster than `/proc`.
    fn plan_partial(
        &mut self,
        pids: &BTreeSet<Pid>,
        idle_watch: &WatchedProcesses,
        idle_check: &mut IdleCheck,
    ) -> ScanPlan {
        let Self { idle, cache, .. } = self;
        idle.sample_masks(idle_check, idle_watch, |pid, planned, tid_cache| {
            check_thread_masks(&mut cache.proc, pid, planned, tid_cache)
        });
        let pids: BTreeSet<Pid> = pids.union(&idle_check.active).copied().collect();
        let thread_count = |pid| self.cache.processes.get(pid).map_or(1, |cached| cached.thread_count);
        let unassigned = idle_check.active_unassigned.difference(&pids).count();
        let to_read = pids.iter().map(thread_count).sum::<usize>() + unassigned;
        let scan_result = if !is_task_scan_faster(to_read, self.task_count) {
            TaskScanResult::default()
        } else if unassigned == 0 {
            self.run_task_scan(TaskScope::ThreadsOf(&pids), |_| None)
        } else {
            // For unassigned processes the first thread suffices.
            self.run_task_scan(TaskScope::AllProcessesAndThreadsOf(&pids), |_| None)
        };
        let all = pids.union(&idle_check.active_unassigned).copied().collect();
        ScanPlan { wanted: pids, pids: Ok(all), scan_result }
    }

    /// Plans a full scan, which reads all processes. Of the processes in [`ScanRequest::pids_to_read_threads_of`], it
    /// also reads the threads, except those of idle processes. Runs the task scan (a BPF program) if it is available.
    /// Also checks the masks of the idle processes that are in no cpuset of pjw, and marks those with a wrong mask as
    /// active in `idle_check`.
    fn plan_full(&mut self, scan_request: &ScanRequest, idle_check: &mut IdleCheck) -> ScanPlan {
        let planned = idle_check.planned_masks(&scan_request.idle_watch);
        let idle = idle_check.idle_pids();
        let with_threads: BTreeSet<Pid> =
            scan_request.pids_to_read_threads_of.difference(&idle).chain(planned.keys()).copied().collect();
        let scope = TaskScope::AllProcessesAndThreadsOf(&with_threads);
        let mut scan_result = self.run_task_scan(scope, |pid| planned.get(&pid).copied());
        self.mark_active_if_mask_differs(idle_check, &planned, &mut scan_result);
        let wanted =
            scan_request.pids_to_read_threads_of.difference(&idle_check.idle_pids()).copied().collect();
        ScanPlan { wanted, pids: self.all_pids(&scan_result), scan_result }
    }

    /// Returns the ids of all processes of the machine. If `scan_result`, the result of the task scan (a BPF program),
    /// is empty, they are listed in `/proc`. If not, they are the processes in `scan_result` and those known from
    /// earlier scans. A security module may hide processes from BPF programs. The first scan also lists `/proc` and
    /// finds these processes, and later scans know them.
    fn all_pids(&mut self, scan_result: &TaskScanResult) -> Result<BTreeSet<Pid>, Errno> {
        if scan_result.processes.is_empty() {
            return self.cache.proc.pids().map(|pids| pids.into_iter().collect());
        }
        let mut pids: BTreeSet<Pid> = scan_result.processes.keys().copied().collect();
        if self.cache.processes.is_empty() {
            pids.extend(self.cache.proc.pids()?);
        }
        pids.extend(self.cache.processes.keys());
        Ok(pids)
    }

    /// Returns the address spaces that several processes share (clone(2), `CLONE_VM`). Must be called after all
    /// processes of a scan were read. `at` is the time at which the scan began.
    pub(super) fn read_address_spaces(&mut self, at: Nanos) -> Arc<AddressSpaceList> {
        let pids = self.cache.address_spaces.pids_to_scan(at);
        if !pids.is_empty() {
            let scan_result = self.run_task_scan(TaskScope::ThreadsOf(&pids), |_| None);
            self.cache.address_spaces.record_task_scan(&scan_result, at);
        }
        let ProcessCache { address_spaces, proc, .. } = &mut self.cache;
        address_spaces.compare_candidates(at, |parent| proc.vfork_wait(parent));
        address_spaces.shared_address_spaces(at)
    }
}
