//! Who of the sleepers ran since the last look: one system call for each process, one or two reads for a whole job.
//!
//! A job's cgroup says how much CPU it has used in all (`cpu.stat`, v2); if that is as before, none of its processes ran.
//! Else each process's own CPU clock tells. A few are looked at though they slept, in turn: somebody else may have
//! changed their masks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pjw_core::process::Pid;
use pjw_core::snapshot::{Nanos, Watch};

use crate::clock::cpu_time;

/// So many processes that slept are looked at in each regular look.
const SAMPLES: usize = 8;
/// A full look reads the threads of so many processes that slept for each one whose turn isn't.
const FULL_TURNS: usize = 8;

/// What is remembered of sleepers.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    processes: BTreeMap<Pid, Slept>,
    jobs: BTreeMap<String, Slept>,
    /// Whose turn it is to be looked at all the same.
    turn: usize,
}

/// What was used up to the last look, and when it was last seen to be still that.
#[derive(Debug, Clone, Copy)]
struct Slept {
    used: (u64, u64),
    quiet_until: Option<Nanos>,
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
}

impl Sleep {
    /// Who ran since the last look. `unified` is where cgroup v2 is mounted.
    pub(super) fn ask(&mut self, watch: &Watch, unified: Option<&Path>, at: Nanos, full: bool) -> Woken {
        let mut woken = Woken::default();
        self.turn = self.turn.wrapping_add(1);
        let mut number = 0;
        let count: usize = watch.groups.iter().map(|group| group.pids.len()).sum();
        let turns = if full { FULL_TURNS } else { count.div_ceil(SAMPLES) };
        for group in &watch.groups {
            let used = group.cgroup.as_deref().zip(unified).and_then(|(path, root)| usage(root, path));
            let since =
                group.cgroup.as_ref().and_then(|path| self.jobs.get(path)).and_then(|job| job.quiet_until);
            if let Some((path, used)) = group.cgroup.as_ref().zip(used) {
                let known = self.jobs.get(path).is_some_and(|job| job.used == used);
                let quiet_until = if known { Some(at) } else { None };
                self.jobs.insert(path.clone(), Slept { used, quiet_until });
                if known && !full {
                    continue;
                }
            }
            for &pid in &group.pids {
                number += 1;
                let turn = turns > 0 && number % turns == self.turn % turns;
                self.ask_one(pid, at, since, turn, &mut woken);
            }
        }
        woken
    }

    fn ask_one(&mut self, pid: Pid, at: Nanos, job_quiet: Option<Nanos>, turn: bool, woken: &mut Woken) {
        let used = cpu_time(pid).map(|used| (used, 0));
        let known = self.processes.get(&pid).copied();
        let slept = known.is_some_and(|known| used == Ok(known.used));
        let quiet_until = known.and_then(|known| known.quiet_until).max(job_quiet);
        match used {
            Ok(used) => {
                let quiet_until = if slept { Some(at) } else { None };
                self.processes.insert(pid, Slept { used, quiet_until });
            }
            Err(_) => drop(self.processes.remove(&pid)),
        }
        if slept && !turn {
            woken.asleep.insert(pid);
        } else {
            woken.awake.insert(pid);
            woken.quiet_until.extend(quiet_until.map(|until| (pid, until)));
        }
    }

    /// Forgets who is not among these any more.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool, watch: &Watch) {
        self.processes.retain(|&pid, _| is_there(pid));
        let jobs: BTreeSet<&str> = watch.groups.iter().filter_map(|group| group.cgroup.as_deref()).collect();
        self.jobs.retain(|path, _| jobs.contains(path.as_str()));
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
