//! Finds the processes that ran since the last scan: one system call per process, or two file reads per job.
//!
//! A job's cgroup has a counter of CPU time (`cpu.stat`, v2). If the counter is unchanged, no process of the
//! job ran. Otherwise the CPU clock of each process is read. Jobs and processes are checked less often the longer
//! they are idle, processes confined by masks only at least in each fourth scan. Another program may change
//! the mask of an idle process, so the masks of some of them are read in each regular scan, and of all of
//! them in a rescan.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use pjw_core::scan::{IdleProcessGroup, WatchedProcesses};
use pjw_core::snapshot::{Observed, Process};
use pjw_core::{cpuset::CpuSet, ids::Pid, ids::Tid, time::Nanos};

use crate::proc::procfs::ProcDir;
use crate::sys::{affinity, clock::process_cpu_time_ns};

mod counters;

use counters::{CgroupCounters, descriptor_limit};

/// Maximum number of masks of idle processes that a regular scan reads. At least the masks of one process are
/// read.
const MASKS_PER_SCAN: usize = 256;
/// The number of consecutive checks without activity after which the check period grows. The check period of a
/// process or job is the number of scans from one check to the next.
const CHECKS_PER_STEP: u32 = 8;
/// The maximum check period, in scans. With a scan interval of 1 s, activity of a process is noticed after 16 s at
/// the latest. It is noticed after 32 s at the latest if the cgroup of its job is checked first.
const MAX_PERIOD: u32 = 16;
/// The maximum check period, in scans, of processes that only affinity masks keep on their PUs. Such a process may
/// leave its PUs when it runs. With a scan interval of 1 s, its activity is noticed after 4 s at the latest.
const MAX_PERIOD_OF_MASKS: u32 = 4;

/// Finds out which processes have not run since the last scan, so that a scan need not read them. Contains the CPU
/// times of processes and of job cgroups at earlier scans.
#[derive(Debug, Default)]
pub(super) struct IdleTracker {
    processes: BTreeMap<Pid, LastUsage>,
    /// The CPU time of each job with a cgroup, by the path of the cgroup.
    jobs: BTreeMap<String, JobUsage>,
    /// The groups of processes in which every process has the maximum check period, because it has been idle for so
    /// long. The key is the address of the group.
    settled: BTreeMap<usize, Arc<IdleProcessGroup>>,
    /// Number of scans that listed idle processes.
    scans: u32,
    /// The process whose masks were sampled last, with its index in the list of the processes to sample.
    last_sampled: Option<(usize, Pid)>,
    /// The limit of open descriptors of this process. Empty until it is needed.
    descriptor_limit: OnceLock<u64>,
}

/// CPU time of a process at the last check, and the time until which no activity was seen.
#[derive(Debug, Default)]
struct LastUsage {
    cpu_time: u64,
    /// The time of the last check, if that check found the process idle.
    idle_until: Option<Nanos>,
    /// Number of consecutive checks without activity.
    idle_checks: u32,
    /// The threads of the process, if they were listed since it last ran. A process that does not run starts and ends
    /// no thread.
    tids: Option<Box<[Tid]>>,
}

/// CPU time and number of tasks of a job's cgroup at the last check.
#[derive(Debug, Default)]
struct JobUsage {
    /// The open files of the cgroup. `None` if it has no such files, or if too few descriptors are left to keep them
    /// open: then each check opens them.
    counters: Option<CgroupCounters>,
    /// The CPU time in microseconds, and the number of tasks. `None` if they could not be read.
    usage: Option<(u64, u64)>,
    activity: CgroupActivity,
    /// The time of the last check, if that check found the job idle.
    idle_until: Option<Nanos>,
    idle_checks: u32,
    /// The number of scans after which the next check is due.
    next_check: u32,
}

/// Activity of a job, by the CPU time of its cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum CgroupActivity {
    /// A process of the job ran since the last scan, or the activity is unknown.
    #[default]
    Active,
    /// No process ran since the last scan. Processes that were skipped before must be checked now.
    BecameIdle,
    /// No process ran since the job became idle.
    Idle,
}

/// The result of the check of a job by the CPU time of its cgroup.
#[derive(Debug, Clone, Copy, Default)]
struct JobCheck {
    /// `None` if the job has no cgroup in cgroup v2.
    activity: Option<CgroupActivity>,
    /// The time of the last check before this one, if that check found the job idle.
    idle_until: Option<Nanos>,
}

/// The result of [`IdleTracker::find_idle`]: which of the checked processes ran since the last scan, and which did not.
#[derive(Debug, Default)]
pub(super) struct IdleCheck {
    /// The processes that a scan must read: they ran since the last scan, are new, or have ended.
    pub(super) active: BTreeSet<Pid>,
    /// For each process in `active` that was idle at its check before this one: the time of that check, or of a later
    /// check that found its whole job idle.
    pub(super) idle_until: BTreeMap<Pid, Nanos>,
    /// The processes that did not run since the last scan. In a full scan, also the idle processes whose check was not
    /// due.
    pub(super) idle: Vec<Pid>,
    /// The idle processes that are not in a cpuset of pjw: affinity masks alone keep them on their PUs. Also contains
    /// the processes whose check was not due. The number is the index of the process's group in
    /// [`WatchedProcesses::groups`].
    pub(super) mask_only: Vec<(Pid, usize)>,
    /// The unassigned processes (processes of job owners that belong to no job) that ran or have ended. A process may
    /// also be in one of the other fields.
    pub(super) active_unassigned: BTreeSet<Pid>,
}

impl IdleCheck {
    /// Returns the processes that did not run since the last scan, without those that must be read for another
    /// reason.
    pub(super) fn idle_pids(&self) -> BTreeSet<Pid> {
        self.idle.iter().filter(|pid| !self.active.contains(pid)).copied().collect()
    }

    /// Returns the planned affinity mask of each idle process that is not in a cpuset of pjw, by pid. Affinity masks
    /// alone keep such a process on its PUs (logical CPUs). `idle_watch` must be the value that was passed to
    /// [`IdleTracker::find_idle`].
    pub(super) fn planned_masks<'a>(&self, idle_watch: &'a WatchedProcesses) -> BTreeMap<Pid, &'a CpuSet> {
        let planned = |&(pid, group): &(Pid, usize)| Some((pid, planned_mask(idle_watch, group)?));
        self.mask_only.iter().filter_map(planned).collect()
    }
}

fn planned_mask(idle_watch: &WatchedProcesses, group: usize) -> Option<&CpuSet> {
    idle_watch.groups.get(group)?.expected_cpus.as_ref()
}

impl IdleTracker {
    /// Finds out by CPU times which processes in `idle_watch` ran since the last scan. `unified` is the mount point
    /// of cgroup v2, and `at` is the time at which this scan began. Not every process is checked in each scan:
    ///
    /// - A process that has been idle for long is checked less often.
    /// - The processes of a job are not checked one by one while the CPU time of the job's cgroup stays the same.
    ///   They are all checked once when the CPU time stops growing.
    ///
    /// `full` says whether this is a full scan. In a full scan, the result also lists the processes that were not
    /// checked: they count as idle.
    pub(super) fn find_idle(
        &mut self,
        idle_watch: &WatchedProcesses,
        unified: Option<&Path>,
        at: Nanos,
        full: bool,
    ) -> IdleCheck {
        let mut idle_check = IdleCheck::default();
        if !idle_watch.groups.is_empty() {
            self.scans = self.scans.wrapping_add(1);
        }
        let mut last_job: Option<(&str, JobCheck)> = None;
        for (number, group) in idle_watch.groups.iter().enumerate() {
            let job = match (group.cgroup.as_deref().zip(unified), last_job) {
                (None, _) => JobCheck::default(),
                // The groups of a job follow each other.
                (Some((path, _)), Some((checked_path, job))) if path == checked_path => job,
                (Some((path, root)), _) => {
                    let job = self.check_job(root, path, &idle_watch.groups[number..], at);
                    last_job = Some((path, job));
                    job
                }
            };
            if job.activity == Some(CgroupActivity::Idle) && !full {
                continue;
            }
            let is_mask_only = group.expected_cpus.is_some();
            let max_period = if is_mask_only { MAX_PERIOD_OF_MASKS } else { MAX_PERIOD };
            let may_skip = job.activity != Some(CgroupActivity::BecameIdle);
            let address = Arc::as_ptr(group).addr();
            let is_settled = may_skip && self.settled.contains_key(&address);
            let mut settles = may_skip && !is_settled;
            for &pid in &group.pids {
                let is_skipped = (is_settled && !self.is_turn_of(pid, max_period))
                    || (may_skip && self.is_skippable(pid, job.activity, max_period));
                let is_idle = if is_skipped {
                    idle_check.idle.extend(full.then_some(pid));
                    true
                } else {
                    self.check_process(pid, at, job.idle_until, &mut idle_check)
                };
                if is_idle && is_mask_only {
                    idle_check.mask_only.push((pid, number));
                }
                settles = settles && self.has_max_period(pid, max_period);
            }
            if settles {
                self.settled.insert(address, Arc::clone(group));
            }
        }
        idle_check.active_unassigned =
            idle_watch.unassigned_pids.iter().copied().filter(|&pid| !self.check_idle(pid, at).0).collect();
        idle_check
    }

    /// Returns the activity of the job with the cgroup at `path`, by the CPU time of this cgroup. A new job counts as
    /// active.
    ///
    /// - The CPU time is read if a check is due. The longer the job is idle, the less often a check is due.
    /// - The CPU time is read at each scan if affinity masks alone keep a process of the job on its PUs.
    ///
    /// `root` is the mount point of cgroup v2, and `at` is the time of this scan. `groups` begins with the groups of
    /// idle processes of the job.
    fn check_job(
        &mut self,
        root: &Path,
        path: &str,
        groups: &[Arc<IdleProcessGroup>],
        at: Nanos,
    ) -> JobCheck {
        let mut job_groups = groups.iter().take_while(|group| group.cgroup.as_deref() == Some(path));
        let has_mask_only = job_groups.any(|group| group.expected_cpus.is_some());
        let (scans, limit) = (self.scans, *self.descriptor_limit.get_or_init(descriptor_limit));
        if let Some(job) = self.jobs.get_mut(path) {
            let idle_until = job.idle_until;
            if has_reached(scans, job.next_check) || (has_mask_only && job.usage.is_some()) {
                job.update_activity(root, path, at, scans, limit);
            }
            return JobCheck { activity: Some(job.activity), idle_until };
        }
        let mut job = JobUsage::default();
        job.update_activity(root, path, at, scans, limit);
        self.jobs.insert(path.to_owned(), job);
        JobCheck { activity: Some(CgroupActivity::Active), idle_until: None }
    }

    /// Checks whether the process `pid` ran since its last check, and records the result in `check`. Returns whether
    /// the process is idle: it did not run. `at` is the time of this scan. `job_idle_until` is the time of the last
    /// check that found the job of the process idle, or `None`.
    fn check_process(
        &mut self,
        pid: Pid,
        at: Nanos,
        job_idle_until: Option<Nanos>,
        check: &mut IdleCheck,
    ) -> bool {
        let (was_idle, idle_until) = self.check_idle(pid, at);
        if was_idle {
            check.idle.push(pid);
        } else {
            check.active.insert(pid);
            check.idle_until.extend(idle_until.max(job_idle_until).map(|until| (pid, until)));
        }
        was_idle
    }

    /// Reads the CPU time of the process `pid`, and returns whether it is the same as at the last check: the process
    /// did not run. Also returns the time of the last check if that check found the process idle. A process that is new
    /// or can't be read counts as not idle. `at` is the time of this scan.
    fn check_idle(&mut self, pid: Pid, at: Nanos) -> (bool, Option<Nanos>) {
        let Ok(cpu_time) = process_cpu_time_ns(pid) else {
            let last_usage = self.processes.remove(&pid);
            return (false, last_usage.and_then(|last_usage| last_usage.idle_until));
        };
        let Some(last_usage) = self.processes.get_mut(&pid) else {
            self.processes.insert(pid, LastUsage { cpu_time, ..LastUsage::default() });
            return (false, None);
        };
        let was_idle = last_usage.cpu_time == cpu_time;
        let idle_until = last_usage.idle_until;
        if was_idle {
            last_usage.idle_until = Some(at);
            last_usage.idle_checks = last_usage.idle_checks.saturating_add(1);
        } else {
            *last_usage = LastUsage { cpu_time, ..LastUsage::default() };
            self.settled.clear();
        }
        (was_idle, idle_until)
    }

    /// Whether a process need not be checked: its job is idle, or the process has been idle for long and its
    /// next check is not due. A check costs the kernel time for each thread.
    fn is_skippable(&self, pid: Pid, job: Option<CgroupActivity>, max_period: u32) -> bool {
        let Some(last_usage) = self.processes.get(&pid) else { return false };
        let period = check_period(last_usage.idle_checks).min(max_period);
        job == Some(CgroupActivity::Idle) || !self.is_turn_of(pid, period)
    }

    /// Whether the process `pid` is checked in this scan, if it is checked once in `period` scans.
    fn is_turn_of(&self, pid: Pid, period: u32) -> bool {
        pid.0.wrapping_add(self.scans).is_multiple_of(period)
    }

    fn has_max_period(&self, pid: Pid, max_period: u32) -> bool {
        self.processes.get(&pid).is_some_and(|last| check_period(last.idle_checks) >= max_period)
    }

    /// Records that a scan has read the process `pid`. The process is checked at each scan again, as if it had just
    /// run.
    pub(super) fn mark_active(&mut self, pid: Pid) {
        if let Some(last_usage) = self.processes.get_mut(&pid).filter(|last| last.idle_checks > 0) {
            last_usage.idle_checks = 0;
            self.settled.clear();
        }
    }

    /// Returns for each ended process in `processes` the time of the last check that found the process idle. Processes
    /// that no check found idle are left out. `idle_check` is the result of the check in this scan.
    pub(super) fn ended_idle_until(
        &self,
        idle_check: &IdleCheck,
        processes: &BTreeMap<Pid, Observed<Process>>,
    ) -> BTreeMap<Pid, Nanos> {
        let idle_until = |pid: Pid| idle_check.idle_until.get(&pid).copied().or_else(|| self.idle_until(pid));
        let ended = processes.iter().filter(|(_, observed)| matches!(observed, Observed::Gone));
        ended.filter_map(|(&pid, _)| Some((pid, idle_until(pid)?))).collect()
    }

    /// Returns the time of the last check of the process `pid`, if that check found the process idle.
    pub(super) fn idle_until(&self, pid: Pid) -> Option<Nanos> {
        self.processes.get(&pid)?.idle_until
    }

    /// Returns the cache entry with the thread ids of the process `pid`. The entry is empty (inner `None`) if the
    /// process has run since its threads were listed. The outer `None` means that the process was never checked.
    pub(super) fn cached_tids(&mut self, pid: Pid) -> Option<&mut Option<Box<[Tid]>>> {
        self.processes.get_mut(&pid).map(|last_usage| &mut last_usage.tids)
    }

    /// Checks the affinity masks of idle processes that are not in a cpuset of pjw. If a mask has PUs (logical CPUs)
    /// outside the planned mask of its process, marks the process as active in `idle_check`.
    ///
    /// - Checks all these processes if [`WatchedProcesses::check_all_masks`] is true.
    /// - If not, continues after the last checked process, and stops when about 256 masks were read.
    ///
    /// `read_masks` is called with a process, its planned mask and its cached thread ids. It must return the number of
    /// read masks, and whether one of them has PUs outside the planned mask.
    pub(super) fn sample_masks(
        &mut self,
        idle_check: &mut IdleCheck,
        idle_watch: &WatchedProcesses,
        mut read_masks: impl FnMut(Pid, &CpuSet, &mut Option<Box<[Tid]>>) -> (usize, bool),
    ) {
        let listed = &idle_check.mask_only;
        let begin = self.last_sampled.map_or(0, |(index, last)| {
            let is_last = |&(pid, _): &(Pid, usize)| pid == last;
            match listed.get(index).filter(|entry| is_last(entry)) {
                Some(_) => index + 1,
                // The list has changed.
                None => listed.iter().position(is_last).map_or(index, |index| index + 1).min(listed.len()),
            }
        });
        let mut masks_read = 0;
        for index in (begin..listed.len()).chain(0..begin) {
            let (pid, group) = listed[index];
            let Some(planned) = planned_mask(idle_watch, group) else { continue };
            let Some(last_usage) = self.processes.get_mut(&pid) else { continue };
            let (count, is_outside) = read_masks(pid, planned, &mut last_usage.tids);
            if is_outside {
                idle_check.active.insert(pid);
            }
            self.last_sampled = Some((index, pid));
            masks_read += count;
            if masks_read >= MASKS_PER_SCAN && !idle_watch.check_all_masks {
                break;
            }
        }
    }

    /// Removes the processes for which `is_there` returns false, and the jobs that are not in `idle_watch`.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool, idle_watch: &WatchedProcesses) {
        self.processes.retain(|&pid, _| is_there(pid));
        let jobs: BTreeSet<&str> =
            idle_watch.groups.iter().filter_map(|group| group.cgroup.as_deref()).collect();
        self.jobs.retain(|path, _| jobs.contains(path.as_str()));
        let listed: BTreeSet<usize> =
            idle_watch.groups.iter().map(|group| Arc::as_ptr(group).addr()).collect();
        self.settled.retain(|group, _| listed.contains(group));
    }
}

impl JobUsage {
    /// Updates the activity of this job by comparison with the last check, and plans the next check. Reads the
    /// counters of the job's cgroup at `path`. `root` is the mount point of cgroup v2, `at` is the time of this scan,
    /// `scans` is the number of scans until now, and `limit` is the limit of open descriptors of this process.
    fn update_activity(&mut self, root: &Path, path: &str, at: Nanos, scans: u32, limit: u64) {
        let usage = self.read_counters(root, path, limit);
        let was_idle = usage.is_some() && usage == self.usage;
        self.idle_checks = if was_idle { self.idle_checks.saturating_add(1) } else { 0 };
        self.activity = match self.idle_checks {
            0 => CgroupActivity::Active,
            1 => CgroupActivity::BecameIdle,
            _ => CgroupActivity::Idle,
        };
        self.idle_until = (self.activity == CgroupActivity::Idle).then_some(at);
        self.usage = usage;
        let period = if usage.is_some() { check_period(self.idle_checks) } else { MAX_PERIOD };
        self.next_check = scans.wrapping_add(period);
    }

    /// Reads the counters from the open files. Opens the files if this fails, because a cgroup that was removed and
    /// made again has new files. The files stay open if `limit`, the limit of open descriptors, leaves enough of them
    /// to the rest of the process.
    fn read_counters(&mut self, root: &Path, path: &str, limit: u64) -> Option<(u64, u64)> {
        if let Some(usage) = self.counters.as_ref().and_then(CgroupCounters::read) {
            return Some(usage);
        }
        let opened = CgroupCounters::open(root, path).ok();
        let usage = opened.as_ref().and_then(CgroupCounters::read);
        self.counters = opened.filter(|opened| opened.may_stay_open(limit));
        usage
    }
}

/// Whether the number of scans `scans` has reached `other`. Both numbers may have wrapped around.
fn has_reached(scans: u32, other: u32) -> bool {
    scans.wrapping_sub(other) < u32::MAX / 2
}

/// Reads the affinity masks of all threads of the process `pid`. Returns the number of threads, and whether a mask is
/// not a subset of `within`. `tid_cache` is a cache of the thread ids. If the cache is empty, lists the threads and
/// stores their ids in the cache. Ended threads are skipped.
pub(super) fn check_thread_masks(
    proc: &mut ProcDir,
    pid: Pid,
    within: &CpuSet,
    tid_cache: &mut Option<Box<[Tid]>>,
) -> (usize, bool) {
    if tid_cache.is_none() {
        *tid_cache = proc.tids(pid).ok().map(Vec::into_boxed_slice);
    }
    let tids = tid_cache.as_deref().unwrap_or_default();
    let outside = |tid: &Tid| affinity::get_mask(*tid).is_ok_and(|mask| !mask.is_subset(within));
    (tids.len(), tids.iter().any(outside))
}

/// The check period after `idle_checks` consecutive checks without activity, in scans that list the process. The period
/// stays below half of the idle time.
fn check_period(idle_checks: u32) -> u32 {
    match idle_checks / CHECKS_PER_STEP {
        0 => 1,
        longer => (2 << longer.min(3)).min(MAX_PERIOD),
    }
}

#[cfg(test)]
mod tests;
