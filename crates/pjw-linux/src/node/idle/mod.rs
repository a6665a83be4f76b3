//! Finds the processes that ran since the last scan: one system call per process, or two file reads per job.
//!
//! A job's cgroup has a counter of CPU time (`cpu.stat`, v2). If the counter is unchanged, no process of the
//! job ran. Otherwise the CPU clock of each process is read. Processes in a cpuset are checked less often the
//! longer they are idle. Processes confined by masks only are checked each time. Another program may change
//! the mask of an idle process, so the masks of some of them are read in each regular scan, and of all of
//! them in a full scan.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pjw_core::{cpuset::CpuSet, ids::Pid, scan::IdleWatch, time::Nanos};

use crate::sys::clock::process_cpu_time;

/// Maximum number of masks of idle processes that a regular scan reads. At least the masks of one process are
/// read.
const MASKS_PER_SCAN: usize = 256;
/// After each this many checks without activity, the check period grows.
const CHECKS_PER_STEP: u32 = 8;
/// Maximum check period, in scans that list the process. With a scan interval of 1 s, activity is noticed
/// after 16 s at the latest.
const MAX_PERIOD: u32 = 16;

/// Earlier CPU times of idle processes and of jobs.
#[derive(Debug, Default)]
pub(super) struct IdleTracker {
    processes: BTreeMap<Pid, LastUsage>,
    jobs: BTreeMap<String, LastUsage>,
    /// The open files of the jobs' cgroups.
    counters: BTreeMap<String, CgroupCounters>,
    /// Number of scans that listed idle processes.
    scans: u32,
    /// The process whose masks were sampled last.
    last_sampled: Option<Pid>,
}

/// CPU time at the last check, and the time until which no activity was seen.
#[derive(Debug, Clone, Copy)]
struct LastUsage {
    usage: (u64, u64),
    idle_until: Option<Nanos>,
    /// Number of consecutive checks without activity.
    idle_checks: u32,
}

/// Activity of a job, by the CPU time of its cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupActivity {
    /// A process of the job ran since the last scan, or the activity is unknown.
    Active,
    /// No process ran since the last scan. Processes that were skipped before must be checked now.
    BecameIdle,
    /// No process ran since the job became idle.
    Idle,
}

/// Result of a check of the idle processes.
#[derive(Debug, Default)]
pub(super) struct IdleCheck {
    /// Processes to observe: they ran, are new, or have ended.
    pub(super) active: BTreeSet<Pid>,
    /// The time until which each process was seen idle, at the check before this one.
    pub(super) idle_until: BTreeMap<Pid, Nanos>,
    /// Processes that did not run.
    pub(super) idle: BTreeSet<Pid>,
    /// Idle processes confined by masks only, with the index of their group in [`IdleWatch::groups`].
    pub(super) mask_only: BTreeMap<Pid, usize>,
    /// Unassigned processes that ran or have ended. A process may also be in one of the other fields.
    pub(super) active_unassigned: BTreeSet<Pid>,
}

impl IdleCheck {
    /// The planned CPU set of an idle process, if the process is confined by masks only.
    pub(super) fn within<'a>(&self, pid: Pid, idle_watch: &'a IdleWatch) -> Option<&'a CpuSet> {
        idle_watch.groups.get(*self.mask_only.get(&pid)?)?.within.as_ref()
    }

    /// Marks a process to be observed although it did not run.
    pub(super) fn mark_active(&mut self, pid: Pid) {
        self.idle.remove(&pid);
        self.active.insert(pid);
    }
}

impl IdleTracker {
    /// Checks which of the listed processes ran since the last scan. `unified` is the mount point of cgroup
    /// v2.
    pub(super) fn check(
        &mut self,
        idle_watch: &IdleWatch,
        unified: Option<&Path>,
        at: Nanos,
        full: bool,
    ) -> IdleCheck {
        let mut idle_check = IdleCheck::default();
        let mut jobs: BTreeMap<&str, CgroupActivity> = BTreeMap::new();
        if !idle_watch.groups.is_empty() {
            self.scans = self.scans.wrapping_add(1);
        }
        for (number, group) in idle_watch.groups.iter().enumerate() {
            let path = group.cgroup.as_deref();
            let since = path.and_then(|path| self.jobs.get(path)).and_then(|job| job.idle_until);
            let job = path
                .zip(unified)
                .map(|(path, root)| *jobs.entry(path).or_insert_with(|| self.check_cgroup(root, path, at)));
            if job == Some(CgroupActivity::Idle) && !full {
                continue;
            }
            for &pid in &group.pids {
                // A process confined by masks only may have changed them when it ran.
                if group.within.is_none() && self.is_skippable(pid, job) {
                    if full {
                        idle_check.idle.insert(pid);
                    }
                    continue;
                }
                let was_idle = self.check_process(pid, at, since, &mut idle_check);
                if was_idle && group.within.is_some() {
                    idle_check.mask_only.insert(pid, number);
                }
            }
        }
        idle_check.active_unassigned =
            idle_watch.unassigned.iter().copied().filter(|&pid| !self.was_idle(pid, at)).collect();
        idle_check
    }

    fn check_cgroup(&mut self, root: &Path, path: &str, at: Nanos) -> CgroupActivity {
        let Some(usage) = self.read_counters(root, path) else { return CgroupActivity::Active };
        let idle_checks = idle_checks(self.jobs.get(path), usage).unwrap_or(0);
        let job = match idle_checks {
            0 => CgroupActivity::Active,
            1 => CgroupActivity::BecameIdle,
            _ => CgroupActivity::Idle,
        };
        let idle_until = (job == CgroupActivity::Idle).then_some(at);
        self.jobs.insert(path.to_owned(), LastUsage { usage, idle_until, idle_checks });
        job
    }

    /// Reads the counters of a cgroup. A cgroup that was removed and made again has new files.
    fn read_counters(&mut self, root: &Path, path: &str) -> Option<(u64, u64)> {
        if let Some(usage) = self.counters.get(path).and_then(CgroupCounters::read) {
            return Some(usage);
        }
        self.counters.remove(path);
        let counters = CgroupCounters::open(root, path).ok()?;
        let usage = counters.read();
        self.counters.insert(path.to_owned(), counters);
        usage
    }

    fn check_process(&mut self, pid: Pid, at: Nanos, since: Option<Nanos>, check: &mut IdleCheck) -> bool {
        let idle_until = self.processes.get(&pid).and_then(|known| known.idle_until).max(since);
        let was_idle = self.was_idle(pid, at);
        if was_idle {
            check.idle.insert(pid);
        } else {
            check.active.insert(pid);
        }
        check.idle_until.extend(idle_until.map(|until| (pid, until)));
        was_idle
    }

    /// Whether a process did not run since its last check.
    fn was_idle(&mut self, pid: Pid, at: Nanos) -> bool {
        let Ok(usage) = process_cpu_time(pid).map(|usage| (usage, 0)) else {
            self.processes.remove(&pid);
            return false;
        };
        let idle_checks = idle_checks(self.processes.get(&pid), usage);
        let idle_until = idle_checks.map(|_| at);
        self.processes.insert(pid, LastUsage { usage, idle_until, idle_checks: idle_checks.unwrap_or(0) });
        idle_checks.is_some()
    }

    /// Whether a process need not be checked: its job is idle, or the process has been idle for long and its
    /// next check is not due. A check costs the kernel time for each thread.
    fn is_skippable(&self, pid: Pid, job: Option<CgroupActivity>) -> bool {
        let Some(was_idle) = self.processes.get(&pid) else { return false };
        match job {
            Some(CgroupActivity::Idle) => true,
            Some(CgroupActivity::BecameIdle) => false,
            Some(CgroupActivity::Active) | None => {
                !pid.0.wrapping_add(self.scans).is_multiple_of(check_period(was_idle.idle_checks))
            }
        }
    }

    /// Resets the check period of a process that was observed.
    pub(super) fn mark_active(&mut self, pid: Pid) {
        if let Some(was_idle) = self.processes.get_mut(&pid) {
            was_idle.idle_checks = 0;
        }
    }

    /// Reads the masks of the next few idle processes that are confined by masks only, and marks a process as
    /// active if a mask is not as planned. `masks` returns the number of masks that it read, and whether one
    /// is not a subset of the set.
    pub(super) fn sample_masks(
        &mut self,
        idle_check: &mut IdleCheck,
        idle_watch: &IdleWatch,
        mut masks: impl FnMut(Pid, &CpuSet) -> (usize, bool),
    ) {
        let turn = self.last_sampled.unwrap_or(Pid(0));
        let after = (Bound::Excluded(turn), Bound::Unbounded);
        let turns = idle_check.mask_only.range(after).chain(idle_check.mask_only.range(..=turn));
        let turns: Vec<Pid> = turns.map(|(&pid, _)| pid).take(MASKS_PER_SCAN).collect();
        let mut masks_read = 0;
        for pid in turns {
            let Some(within) = idle_check.within(pid, idle_watch) else { continue };
            let (count, outside) = masks(pid, within);
            if outside {
                idle_check.mark_active(pid);
            }
            self.last_sampled = Some(pid);
            masks_read += count;
            if masks_read >= MASKS_PER_SCAN {
                break;
            }
        }
    }

    /// Drops the entries of ended processes and of jobs that are no longer listed.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool, idle_watch: &IdleWatch) {
        self.processes.retain(|&pid, _| is_there(pid));
        let jobs: BTreeSet<&str> =
            idle_watch.groups.iter().filter_map(|group| group.cgroup.as_deref()).collect();
        self.jobs.retain(|path, _| jobs.contains(path.as_str()));
        self.counters.retain(|path, _| jobs.contains(path.as_str()));
    }
}

/// The number of consecutive checks without activity, with this one. `None` if there was activity.
fn idle_checks(last: Option<&LastUsage>, usage: (u64, u64)) -> Option<u32> {
    last.filter(|last| last.usage == usage).map(|last| last.idle_checks.saturating_add(1))
}

/// The check period, in scans that list the process. The period stays below half of the idle time.
fn check_period(idle_checks: u32) -> u32 {
    match idle_checks / CHECKS_PER_STEP {
        0 => 1,
        longer => (2 << longer.min(3)).min(MAX_PERIOD),
    }
}

/// The open files of a cgroup that show whether its processes ran. They stay open, so that a check opens no file by its
/// path.
#[derive(Debug)]
struct CgroupCounters {
    /// `cpu.stat`.
    stat: File,
    /// `pids.current`. `None` if the kernel does not count the tasks of the cgroup.
    tasks: Option<File>,
}

impl CgroupCounters {
    fn open(root: &Path, path: &str) -> io::Result<Self> {
        let dir = root.join(path.trim_start_matches('/'));
        Ok(Self { stat: File::open(dir.join("cpu.stat"))?, tasks: File::open(dir.join("pids.current")).ok() })
    }

    /// The CPU time of the cgroup in microseconds, and its number of tasks, 0 if the kernel does not count them. The
    /// number shows that a process was moved out, whose CPU time counts elsewhere from then on. `None` if the cgroup was
    /// removed.
    fn read(&self) -> Option<(u64, u64)> {
        let mut buffer = [0; 1024];
        let stat = read_start(&self.stat, &mut buffer)?;
        let usage = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()?;
        let tasks = self.tasks.as_ref().and_then(|tasks| read_start(tasks, &mut buffer)?.trim().parse().ok());
        Some((usage, tasks.unwrap_or(0)))
    }
}

/// The first part of a file, as much as fits in the buffer.
fn read_start<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let length = file.read_at(buffer, 0).ok()?;
    std::str::from_utf8(&buffer[..length]).ok()
}

#[cfg(test)]
mod tests;
