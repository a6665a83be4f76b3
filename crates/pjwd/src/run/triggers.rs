//! The reasons for the next cycle, and the scan that follows from them.
//!
//! A process event only makes the next cycle come sooner and says which processes to scan. Losing every event costs
//! time, never correctness: the timer scans anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pjw_core::command::Command;
use pjw_core::command_scan::command_scan_request;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::state::WardenState;

use crate::metrics::counters::CycleCause;

/// The scans that are due in the next cycle (scan, decision and changes) of the event loop. There are three kinds: a
/// scan of the processes of jobs (timer `interval`), a scan that also reads new and active processes of no job (timer
/// `rescan_interval`), and a scan of every process of the machine. Process events of the kernel and commands also
/// cause cycles, but are not stored here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DueScans {
    /// Whether the scan of the processes of jobs is due. This scan reads no other processes. The configuration key
    /// `interval` is the time between two such scans.
    pub job_processes_scan_due: bool,
    /// Whether the scan is due that also reads processes that belong to no job. Of these, it reads each process that
    /// is new, and each process that has used CPU time since the last such scan. It also reads the processes of jobs.
    /// One in eight of these scans reads every process of the machine. The configuration key `rescan_interval` is the
    /// time between two of these scans.
    pub unassigned_scan_due: bool,
    /// Whether the next scan must read every process, for example because process events were lost or are not
    /// available.
    pub full_scan_due: bool,
}

impl DueScans {
    /// Returns whether a cycle (scan, decision and changes) is due even without process events and commands. True if
    /// a timer has expired, or if every process must be scanned.
    #[must_use]
    pub fn is_cycle_due(self) -> bool {
        self.job_processes_scan_due || self.scans_unassigned_processes()
    }

    /// Returns whether the next scan of the event loop also reads processes that belong to no job.
    #[must_use]
    pub fn scans_unassigned_processes(self) -> bool {
        self.unassigned_scan_due || self.full_scan_due
    }

    /// Returns the cause of a cycle (scan, decision and changes) for the metrics. `scope` says which processes the
    /// scan of this cycle reads.
    #[must_use]
    pub fn cycle_cause(self, scope: &ScanScope) -> CycleCause {
        match (*scope == ScanScope::Full, self.is_cycle_due()) {
            (true, _) => CycleCause::Full,
            (false, true) => CycleCause::Timer,
            (false, false) => CycleCause::Event,
        }
    }

    /// Returns the request for the next scan: which processes the scan reads. Every scan reads the processes with
    /// urgent events, and the function removes these processes from the scan queue in `state`. A process of a job has
    /// an urgent event if it was forked, executed a program, or exited. Any other process has an urgent event if it
    /// executed a program.
    ///
    /// The first case that applies says which further processes the scan reads:
    ///
    /// 1. If `full_scan_due` is true: every process.
    /// 2. If there are `commands`: the processes that the commands concern ([`command_scan_request`]).
    /// 3. If `unassigned_scan_due` is true: each process that has possibly changed, whether it belongs to a job or
    ///    not.
    /// 4. If `job_processes_scan_due` is true: each process that belongs to a job and has possibly changed.
    /// 5. Otherwise: no further processes.
    pub fn take_scan_request(self, state: &mut WardenState, commands: &[Command]) -> ScanRequest {
        let urgent = state.lineage.scan_queue.take_urgent_pids();
        if !commands.is_empty() && !self.full_scan_due {
            let mut request = command_scan_request(state, commands);
            if let ScanScope::Partial(pids) = &mut request.scope {
                pids.extend(urgent);
            }
            return request;
        }
        if !self.is_cycle_due() {
            return ScanRequest {
                scope: ScanScope::Partial(urgent.clone()),
                pids_to_read_threads_of: urgent,
                active_threads: BTreeMap::new(),
                cgroups: BTreeSet::new(),
                idle_watch: Arc::default(),
            };
        }
        let mut request = match (self.full_scan_due, self.unassigned_scan_due) {
            (true, _) if !commands.is_empty() => state.scan_request(true),
            (true, _) => state.full_scan_request(),
            (false, true) => state.periodic_scan_request(),
            (false, false) => state.scan_request(false),
        };
        let unassigned =
            self.scans_unassigned_processes().then(|| state.lineage.scan_queue.take_unassigned_pids());
        if let ScanScope::Partial(pids) = &mut request.scope {
            // All threads of a process with an event are read.
            request.active_threads.retain(|pid, _| !urgent.contains(pid));
            pids.extend(urgent);
            pids.extend(unassigned.into_iter().flatten());
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::ids::{Pid, Tid};
    use pjw_core::snapshot::ProcessEvent;
    use pjw_core::testing::regular_topology;
    use pjw_core::time::Nanos;

    use super::*;

    fn state() -> WardenState {
        let mut state = WardenState::new(regular_topology(1, 1, 1, 4, 1), &CpuSet::new());
        state.fork_events_complete_since = Some(Nanos(0));
        state.periodic_scans_until_full = 7;
        state.full_scan_due = false;
        state
    }

    fn fork(child: u32) -> ProcessEvent {
        ProcessEvent::Fork { parent: Pid(1), creator: Tid(1), child: Pid(child), at: Nanos(1) }
    }

    #[test]
    fn a_rescan_scans_processes_outside_of_jobs_that_were_forked_since_the_last_one() {
        let mut state = state();
        let thread = ProcessEvent::ThreadFork { pid: Pid(22), tid: Tid(23) };
        let exits = [21, 22].map(|pid| ProcessEvent::Exit { pid: Pid(pid) });
        assert!(!state.apply_process_events(&[fork(20), fork(21), fork(22), thread]));
        assert!(!state.apply_process_events(&exits));
        assert_eq!(state.lineage.scan_queue.urgency(), None, "their scan can wait for the rescan");
        let timer = DueScans { job_processes_scan_due: true, ..DueScans::default() };
        assert_eq!(timer.take_scan_request(&mut state, &[]).scope, ScanScope::Partial(BTreeSet::new()));
        let rescan = DueScans { unassigned_scan_due: true, ..DueScans::default() };
        let forked = ScanScope::Partial(BTreeSet::from([Pid(20), Pid(22)]));
        assert_eq!(rescan.take_scan_request(&mut state, &[]).scope, forked, "other threads of 22 may go on");
        assert_eq!(
            rescan.take_scan_request(&mut state, &[]).scope,
            ScanScope::Partial(BTreeSet::new()),
            "both were scanned"
        );
    }

    #[test]
    fn a_full_scan_wins_over_a_rescan() {
        let triggers = DueScans { unassigned_scan_due: true, full_scan_due: true, ..DueScans::default() };
        assert_eq!(triggers.take_scan_request(&mut state(), &[]).scope, ScanScope::Full);
    }
}
