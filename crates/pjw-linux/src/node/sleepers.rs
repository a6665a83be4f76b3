//! Who of the sleepers ran since the last look: one system call for each process, one or two reads for a whole job.
//!
//! A job's cgroup says how much CPU it has used in all (`cpu.stat`, v2); if that is as before, none of its processes ran.
//! Else each process's own CPU clock tells; the longer somebody behind a cpuset sleeps the more rarely it is asked. Of those
//! whom only their masks keep inside, some are asked for these too, in turn, and in a full look all: somebody else may
//! have changed them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::Path;

use pjw_core::cpuset::CpuSet;
use pjw_core::process::Pid;
use pjw_core::snapshot::{Nanos, Watch};

use crate::clock::cpu_time;

/// So many masks of sleepers are asked for in a regular look, and those of one process at least.
const SAMPLES: usize = 256;
/// Who slept so often when it was asked is asked more rarely from then on.
const LONG: u32 = 8;
/// Of so many looks that name it, one asks who slept longest: with an interval of 1 s it is noticed after 16 s at the latest.
const MOST_TURNS: u32 = 16;

/// What is remembered of sleepers.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    processes: BTreeMap<Pid, Slept>,
    jobs: BTreeMap<String, Slept>,
    /// How many looks there were that named sleepers.
    looks: u32,
    /// Whose masks were asked for last.
    turn: Option<Pid>,
}

/// What was used up to the last look, and when it was last seen to be still that.
#[derive(Debug, Clone, Copy)]
struct Slept {
    used: (u64, u64),
    quiet_until: Option<Nanos>,
    /// How often it was asked and had slept.
    times: u32,
}

/// What a job's cgroup tells of all of its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    /// Some ran since the last look, or nobody can tell.
    Runs,
    /// None did: now those are asked whose turn it was not while some ran.
    FellAsleep,
    /// None did since.
    Sleeps,
}

/// What became of the sleepers.
#[derive(Debug, Default)]
pub(super) struct Woken {
    /// Who is to be looked at: they ran, or it is their turn.
    pub(super) awake: BTreeSet<Pid>,
    /// When these were last seen to have slept, as long as nobody looked closer.
    pub(super) quiet_until: BTreeMap<Pid, Nanos>,
    /// Who slept on.
    pub(super) asleep: BTreeSet<Pid>,
    /// Those of them whom only their masks keep inside, and the place of their group in the watch.
    pub(super) masked: BTreeMap<Pid, usize>,
    /// Who of nobody's job ran, or is gone. They may be named to be looked at, too.
    pub(super) strangers: BTreeSet<Pid>,
}

impl Woken {
    /// Where the threads of a sleeper are to be, if only their masks keep them there.
    pub(super) fn within<'a>(&self, pid: Pid, watch: &'a Watch) -> Option<&'a CpuSet> {
        watch.groups.get(*self.masked.get(&pid)?)?.within.as_ref()
    }

    /// It has to be looked at though it slept.
    pub(super) fn wake(&mut self, pid: Pid) {
        self.asleep.remove(&pid);
        self.awake.insert(pid);
    }
}

impl Sleep {
    /// Who ran since the last look. `unified` is where cgroup v2 is mounted.
    pub(super) fn ask(&mut self, watch: &Watch, unified: Option<&Path>, at: Nanos, full: bool) -> Woken {
        let mut woken = Woken::default();
        let mut jobs: BTreeMap<&str, Job> = BTreeMap::new();
        if !watch.groups.is_empty() {
            self.looks = self.looks.wrapping_add(1);
        }
        for (number, group) in watch.groups.iter().enumerate() {
            let path = group.cgroup.as_deref();
            let since = path.and_then(|path| self.jobs.get(path)).and_then(|job| job.quiet_until);
            let job = path
                .zip(unified)
                .map(|(path, root)| *jobs.entry(path).or_insert_with(|| self.ask_job(root, path, at)));
            if job == Some(Job::Sleeps) && !full {
                continue;
            }
            for &pid in &group.pids {
                // Whom only its masks keep inside may have left them when it runs.
                if group.within.is_none() && self.may_be_skipped(pid, job) {
                    if full {
                        woken.asleep.insert(pid);
                    }
                    continue;
                }
                let slept = self.ask_one(pid, at, since, &mut woken);
                if slept && group.within.is_some() {
                    woken.masked.insert(pid, number);
                }
            }
        }
        woken.strangers = watch.strangers.iter().copied().filter(|&pid| !self.has_slept(pid, at)).collect();
        woken
    }

    fn ask_job(&mut self, root: &Path, path: &str, at: Nanos) -> Job {
        let Some(used) = usage(root, path) else { return Job::Runs };
        let times =
            self.jobs.get(path).filter(|job| job.used == used).map_or(0, |job| job.times.saturating_add(1));
        let job = match times {
            0 => Job::Runs,
            1 => Job::FellAsleep,
            _ => Job::Sleeps,
        };
        let quiet_until = (job == Job::Sleeps).then_some(at);
        self.jobs.insert(path.to_owned(), Slept { used, quiet_until, times });
        job
    }

    fn ask_one(&mut self, pid: Pid, at: Nanos, job_quiet: Option<Nanos>, woken: &mut Woken) -> bool {
        let quiet_until = self.processes.get(&pid).and_then(|known| known.quiet_until).max(job_quiet);
        let slept = self.has_slept(pid, at);
        if slept {
            woken.asleep.insert(pid);
        } else {
            woken.awake.insert(pid);
        }
        woken.quiet_until.extend(quiet_until.map(|until| (pid, until)));
        slept
    }

    /// Whether a process slept since it was asked last.
    fn has_slept(&mut self, pid: Pid, at: Nanos) -> bool {
        let Ok(used) = cpu_time(pid).map(|used| (used, 0)) else {
            self.processes.remove(&pid);
            return false;
        };
        let times = self
            .processes
            .get(&pid)
            .filter(|known| known.used == used)
            .map(|known| known.times.saturating_add(1));
        let quiet_until = times.map(|_| at);
        self.processes.insert(pid, Slept { used, quiet_until, times: times.unwrap_or(0) });
        times.is_some()
    }

    /// Whether it sleeps on, as its job's cgroup tells, or has slept for long and it is not its turn: to ask it costs the
    /// kernel time for each of its threads.
    fn may_be_skipped(&self, pid: Pid, job: Option<Job>) -> bool {
        let Some(slept) = self.processes.get(&pid) else { return false };
        match job {
            Some(Job::Sleeps) => true,
            Some(Job::FellAsleep) => false,
            Some(Job::Runs) | None => !pid.0.wrapping_add(self.looks).is_multiple_of(turns(slept.times)),
        }
    }

    /// Takes in that it was looked at: it has not slept for long any more.
    pub(super) fn interrupt(&mut self, pid: Pid) {
        if let Some(slept) = self.processes.get_mut(&pid) {
            slept.times = 0;
        }
    }

    /// Wakes those of the next few sleepers who are outside. `masks` tells how many masks it asked for, and whether one
    /// was not within the set.
    pub(super) fn sample(
        &mut self,
        woken: &mut Woken,
        watch: &Watch,
        mut masks: impl FnMut(Pid, &CpuSet) -> (usize, bool),
    ) {
        let turn = self.turn.unwrap_or(Pid(0));
        let after = (Bound::Excluded(turn), Bound::Unbounded);
        let turns = woken.masked.range(after).chain(woken.masked.range(..=turn));
        let turns: Vec<Pid> = turns.map(|(&pid, _)| pid).take(SAMPLES).collect();
        let mut asked = 0;
        for pid in turns {
            let Some(within) = woken.within(pid, watch) else { continue };
            let (count, outside) = masks(pid, within);
            if outside {
                woken.wake(pid);
            }
            self.turn = Some(pid);
            asked += count;
            if asked >= SAMPLES {
                break;
            }
        }
    }

    /// Forgets who is not among these any more.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool, watch: &Watch) {
        self.processes.retain(|&pid, _| is_there(pid));
        let jobs: BTreeSet<&str> = watch.groups.iter().filter_map(|group| group.cgroup.as_deref()).collect();
        self.jobs.retain(|path, _| jobs.contains(path.as_str()));
    }
}

/// Of so many looks that name it, one asks who slept so often when it was asked: before it has slept half as long again.
fn turns(times: u32) -> u32 {
    match times / LONG {
        0 => 1,
        longer => (2 << longer.min(3)).min(MOST_TURNS),
    }
}

/// How much CPU a cgroup has used, in microseconds, and how many tasks it has where the kernel counts them: a process
/// that was moved out runs elsewhere.
fn usage(root: &Path, path: &str) -> Option<(u64, u64)> {
    let dir = root.join(path.trim_start_matches('/'));
    let stat = std::fs::read_to_string(dir.join("cpu.stat")).ok()?;
    let used = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()?;
    let tasks = std::fs::read_to_string(dir.join("pids.current")).ok();
    Some((used, tasks.and_then(|text| text.trim().parse().ok()).unwrap_or(0)))
}

#[cfg(test)]
mod tests;
