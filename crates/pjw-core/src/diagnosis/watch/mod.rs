//! Makes the list of jobs and other processes for the diagnosis from two scans of the node.

use crate::basics::{CpuSet, Pid, ProcessId, Pu, StartTime, Tid, Uid, prelude::*};
use crate::diagnosis::examination::{ObservedJob, ObservedThread, UnassignedProcess};
use crate::state::{Member, WardenState};
use crate::terms::{
    BatchRole, GrantedBy, Job, JobId, JobIdAttribute, JobReference, Observed, Policy, Process, Snapshot,
    Thread,
};

/// The maximum number of processes in no job whose threads are all read. For further ones only the mask of
/// the first thread is known.
const MAX_UNASSIGNED: usize = 4096;

/// Returns the pids of the processes of which the diagnosis (`pjwctl doctor`) reads all threads. `state` has all
/// processes of the machine, as earlier scans found them. The result has:
///
/// - All processes that belong to a job.
/// - The 4,096 other processes that have the lowest pids. Kernel threads are left out.
///
/// The diagnosis reads only the first thread of any process that is not in the result.
#[must_use]
pub fn pids_to_scan_fully(state: &WardenState) -> BTreeSet<Pid> {
    let members = state.members.keys().copied();
    let others = state.processes.values().map(|known| &known.process);
    let others =
        others.filter(|process| !process.is_kernel_thread && !state.members.contains_key(&process.id.pid));
    members.chain(others.map(|process| process.id.pid).take(MAX_UNASSIGNED)).collect()
}

/// Two scans of the same machine, some seconds apart. The diagnosis computes the CPU use of each thread
/// from the difference between the two scans.
#[derive(Debug, Clone, Copy)]
pub struct ScanPair<'a> {
    /// The jobs and processes of the machine, as of the second scan.
    pub state: &'a WardenState,
    /// The settings with which `state` was computed from the scans.
    pub policy: &'a Policy,
    /// The first scan. It contains the total CPU time of each thread up to this scan.
    pub first_scan: &'a Snapshot,
    /// The second scan. It contains the total CPU time of each thread up to this scan.
    pub second_scan: &'a Snapshot,
}

/// The identity of a thread, which is the same in both scans.
type ThreadKey = (ProcessId, Tid, StartTime);

impl ScanPair<'_> {
    /// Returns the time from the beginning of the first scan to the beginning of the second, in ms.
    #[must_use]
    pub fn scan_interval_ms(&self) -> u64 {
        self.span_ns() / 1_000_000
    }

    fn span_ns(&self) -> u64 {
        self.second_scan.taken_at.since_boot.0.saturating_sub(self.first_scan.taken_at.since_boot.0)
    }

    /// Returns all jobs, each with the CPU use of its threads between the two scans, and with the PUs (logical CPUs)
    /// that the job holds ([`ObservedJob::grant`]). If a batch scheduler chose these PUs, they are taken from the
    /// scans. Otherwise, they are taken from `held_cpus`: the PUs that a running `pjwd` granted to each job.
    /// `held_cpus` is empty if `pjwd` does not run.
    ///
    /// The field `has_cpuset_controller` of each job is `None`, and the field `enforcement` is empty. The
    /// caller sets both.
    #[must_use]
    pub fn observed_jobs(&self, held_cpus: &BTreeMap<JobId, CpuSet>) -> Vec<ObservedJob> {
        let readings = self.readings();
        let mut members: BTreeMap<&JobId, Vec<&Member>> = BTreeMap::new();
        for member in self.state.members.values() {
            members.entry(&member.job).or_default().push(member);
        }
        let job = |job: &Job| {
            let members = members.get(&job.id).map_or(&[][..], Vec::as_slice);
            let threads = members.iter().flat_map(|member| self.threads_of(member.id.pid, &readings));
            let outside = members.iter().filter(|member| self.is_outside(job, member));
            let granted = job.grant.as_ref();
            let scheduler_grant = granted.filter(|grant| grant.granted_by == GrantedBy::Scheduler);
            let grant = match (scheduler_grant, held_cpus.get(&job.id)) {
                (Some(grant), _) => Some((grant.cpus.clone(), GrantedBy::Scheduler)),
                (None, Some(cpus)) => Some((cpus.clone(), GrantedBy::Warden)),
                (None, None) => None,
            };
            ObservedJob {
                id: job.id.clone(),
                owner: job.owner,
                requested: job.request.as_ref().map(|request| request.cpu_request.clone()),
                expected_cpus: granted.filter(|_| grant.is_none()).map(|grant| grant.cpus.clone()),
                grant,
                process_count: members.len(),
                threads: threads.collect(),
                pids_outside_cgroup: outside.map(|member| member.id.pid).collect(),
                cgroup: job.cgroup.clone(),
                has_cpuset_controller: None,
                enforcement: String::new(),
            }
        };
        self.state.jobs.values().map(job).collect()
    }

    /// Returns the processes that belong to no job, each with the CPU use of its threads between the two
    /// scans. Kernel threads and the process that makes the diagnosis are not included.
    #[must_use]
    pub fn unassigned_processes(&self) -> Vec<UnassignedProcess> {
        let readings = self.readings();
        let others = self.state.processes.values().filter(|known| {
            let process = &known.process;
            !process.is_kernel_thread
                && !self.policy.is_daemon_process(process.id.pid)
                && !self.state.members.contains_key(&process.id.pid)
        });
        let unassigned_process = |process: &Process, role: BatchRole| {
            let threads: Vec<ObservedThread> = self.threads_of(process.id.pid, &readings).collect();
            let threads = if threads.is_empty() { first_thread(process) } else { threads };
            let by_system = process.uid == Uid::ROOT || !self.policy.is_person(process.uid);
            UnassignedProcess {
                pid: process.id.pid,
                uid: process.uid,
                comm: process.comm,
                belongs_to_scheduler: role != BatchRole::Ordinary && by_system,
                is_expected_outside_jobs: process.belongs_to_login(self.state.process(process.parent))
                    || process.has_pjw_program_name(),
                threads,
            }
        };
        others.map(|known| unassigned_process(&known.process, known.batch_identity.role)).collect()
    }

    /// Whether the member is not in the scheduler's cgroup for the job.
    fn is_outside(&self, job: &Job, member: &Member) -> bool {
        let known = self.state.processes.get(&member.id.pid).filter(|_| job.cgroup.is_some());
        let is_inside = |reference: &JobReference| {
            reference.job == job.id && matches!(reference.kind, JobIdAttribute::Cgroup(_))
        };
        known.is_some_and(|known| !known.batch_identity.job_references.iter().any(is_inside))
    }

    /// Returns the run time and the wait time of each thread in the first scan, in ns.
    fn readings(&self) -> BTreeMap<ThreadKey, (u64, u64)> {
        let mut readings = BTreeMap::new();
        for process in self.first_scan.processes.values().filter_map(Observed::present) {
            for thread in process.threads.iter().flatten() {
                readings.insert((process.id, thread.tid, thread.start), (thread.run_ns, thread.wait_ns));
            }
        }
        readings
    }

    /// Iterates over the threads of the process `pid` in the second scan, each with its CPU use between the two scans.
    /// Ended threads are left out. `readings` has the run time and the wait time of each thread in the first scan, in
    /// ns.
    fn threads_of<'a>(
        &'a self,
        pid: Pid,
        readings: &'a BTreeMap<ThreadKey, (u64, u64)>,
    ) -> impl Iterator<Item = ObservedThread> + 'a {
        let process = self.second_scan.processes.get(&pid).and_then(Observed::present);
        let threads = process
            .into_iter()
            .flat_map(|process| process.threads.iter().flatten().map(move |thread| (process.id, thread)));
        threads.filter(|(_, thread)| !matches!(thread.state, 'Z' | 'X')).map(move |(process, thread)| {
            let before = readings.get(&(process, thread.tid, thread.start)).copied();
            // A new thread used all its CPU time since its start. A thread that the first scan did not read
            // has no measured usage.
            let is_new = thread.start.latest_time() >= self.first_scan.taken_at.since_boot;
            let unmeasured = (thread.run_ns, thread.wait_ns);
            self.observed_thread(pid, thread, before.unwrap_or(if is_new { (0, 0) } else { unmeasured }))
        })
    }

    /// Returns the thread `thread` of the second scan with its CPU use since the first scan. `run_ns` and `wait_ns` are
    /// its run time and wait time in the first scan.
    fn observed_thread(&self, pid: Pid, thread: &Thread, (run_ns, wait_ns): (u64, u64)) -> ObservedThread {
        let ran_ns = thread.run_ns.saturating_sub(run_ns);
        let waited_ns = thread.wait_ns.saturating_sub(wait_ns);
        let permille = |ns: u64| {
            let share = u128::from(ns) * 1000 / u128::from(self.span_ns().max(1));
            u32::try_from(share).unwrap_or(1000).min(1000)
        };
        ObservedThread {
            pid,
            effective_mask: thread.effective_mask.clone(),
            last_cpu: thread.last_cpu,
            demand_permille: permille(ran_ns.saturating_add(waited_ns)),
            run_permille: permille(ran_ns),
        }
    }
}

/// Returns the first thread of `process` with its affinity mask, for a process whose threads no scan read. The thread
/// counts as idle, because its CPU use is unknown. The result is empty if the mask is unknown too.
fn first_thread(process: &Process) -> Vec<ObservedThread> {
    let thread = process.first_thread_mask.as_ref().map(|mask| ObservedThread {
        pid: process.id.pid,
        effective_mask: mask.clone(),
        last_cpu: mask.first().unwrap_or(Pu(0)),
        demand_permille: 0,
        run_permille: 0,
    });
    thread.into_iter().collect()
}

#[cfg(test)]
mod tests;
