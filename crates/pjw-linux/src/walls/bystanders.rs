//! Masks of those who have no part in a change. A kernel before 6.2 gives every thread its whole cpuset when that is
//! switched on or off for its cgroup, or shrinks and grows because a partition comes or goes: a bound daemon would run
//! anywhere from then on.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, StartTime, Tid};
use pjw_core::snapshot::Marks;
use pjw_core::wall::{Mason, WallChange, lies_in};

use super::tree::Tree;
use super::{Site, own, wall_changed};
use crate::affinity;
use crate::procfs::Proc;

/// Threads that somebody had bound before a change.
pub(super) struct Bystanders {
    bound: Vec<Bound>,
}

struct Bound {
    pid: Pid,
    tid: Tid,
    start: StartTime,
    mask: CpuSet,
}

/// Whether a change reaches cgroups that are none of the warden's.
pub(super) fn are_reached(site: &Site<'_>, change: &WallChange) -> bool {
    let Some(wall) = wall_changed(change) else { return false };
    let Some(group) = site.tree.group(&wall.path).filter(|_| wall.mason != Mason::Scheduler) else {
        return false;
    };
    let is_isolated =
        || wall.bounds.isolated || group.read("cpuset.cpus.partition").is_ok_and(|state| state != "member");
    let switches = match change {
        WallChange::Raise { .. } => !own::switches(&site.tree.top(), "cpuset"),
        WallChange::Raze { .. } => group.parent().children().len() <= 1,
        _ => false,
    };
    site.tree.unified && (switches || is_isolated())
}

impl Bystanders {
    /// Who is bound now: whose mask is not simply what the own cgroup has. Who can't be seen can't be put back.
    pub(super) fn look(site: &mut Site<'_>) -> Self {
        let online = machine_mask();
        let mut granted: BTreeMap<String, CpuSet> = BTreeMap::new();
        let mut bound = Vec::new();
        for pid in site.proc.pids().unwrap_or_default() {
            for tid in site.proc.tids(pid).unwrap_or_default() {
                let Ok(mask) = affinity::get(tid) else { continue };
                if online.is_subset(&mask) {
                    continue;
                }
                let Ok(stat) = site.proc.thread_stat(pid, tid) else { continue };
                let Some(path) = place(site.proc, pid).filter(|_| !stat.kernel) else { continue };
                let given = granted.entry(path).or_insert_with_key(|path| effective(site.tree, path));
                if mask != *given {
                    bound.push(Bound { pid, tid, start: stat.start, mask });
                }
            }
        }
        Self { bound }
    }

    /// Gives them back what they had, but for those who are in the wall now: their masks are planned.
    pub(super) fn put_back(self, proc: &mut Proc, wall: &str) {
        for Bound { pid, tid, start, mask } in self.bound {
            let is_the_same = proc.thread_stat(pid, tid).is_ok_and(|stat| stat.start == start);
            if !is_the_same || affinity::get(tid).is_ok_and(|now| now == mask) {
                continue;
            }
            if place(proc, pid).is_some_and(|path| lies_in(&path, wall)) {
                continue;
            }
            if let Err(errno) = affinity::set(tid, &mask) {
                tracing::debug!(pid = pid.0, tid = tid.0, %mask, %errno, "a mask was lost beside a change of walls");
            }
        }
    }
}

/// In which cgroup a process is.
fn place(proc: &mut Proc, pid: Pid) -> Option<String> {
    let marks = Marks { cgroups: proc.cgroups(pid).ok()?, ..Marks::default() };
    marks.cpuset_path().map(str::to_owned)
}

/// What a cgroup has; where cpusets are not switched on for it, what the one above has.
fn effective(tree: &Tree, path: &str) -> CpuSet {
    let mut group = tree.group(path);
    while let Some(at) = group {
        match at.effective_cpus() {
            Ok(cpus) => return cpus,
            Err(_) if at.path == "/" => break,
            Err(_) => group = Some(at.parent()),
        }
    }
    machine_mask()
}

/// What a thread has that nobody bound: the PUs that are on.
fn machine_mask() -> CpuSet {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    text.parse().unwrap_or_default()
}
