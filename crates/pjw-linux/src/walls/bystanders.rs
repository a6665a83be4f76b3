//! Masks of those who have no part in a change. A kernel before 6.2 gives every thread its whole cpuset when that is
//! switched on or off for its cgroup, or shrinks and grows because a partition comes or goes: a bound daemon would run
//! anywhere from then on.
//!
//! Later kernels remember what everybody asked for, and nothing is put back there. Nor is the mask of a thread that was
//! given another one meanwhile: somebody chose it.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, StartTime, Tid};
use pjw_core::snapshot::Marks;
use pjw_core::wall::{Mason, WallChange, lies_in};

use super::tree::Tree;
use super::{Site, own, wall_changed};
use crate::procfs::Proc;
use crate::{affinity, online};

/// What is known of them.
#[derive(Debug)]
pub(crate) struct Bystanders {
    masks_last: bool,
    /// Whose mask names PUs that a partition has now: they get it back when it ends, if this warden sees that.
    waiting: Vec<Bound>,
}

/// A thread that somebody had bound before a change.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    pub(super) pid: Pid,
    pub(super) tid: Tid,
    pub(super) start: StartTime,
    /// What it had.
    pub(super) mask: CpuSet,
    /// What it has now of that.
    pub(super) left: CpuSet,
}

/// Whether a change reaches cgroups that are none of the warden's.
fn are_reached(site: &Site<'_>, change: &WallChange) -> bool {
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
    /// `masks_last`: whether a mask outlives a change of the cpuset, [`pjw_core::wall::Ground::masks_last`].
    pub(crate) fn new(masks_last: bool) -> Self {
        Self { masks_last, waiting: Vec::new() }
    }

    /// Who is bound now, if the change makes a difference to them.
    pub(super) fn before(site: &mut Site<'_>, change: &WallChange) -> Vec<Bound> {
        let reached = !site.bystanders.masks_last && are_reached(site, change);
        if reached { look(site) } else { Vec::new() }
    }

    /// Gives them back what they had, but for those who are in the wall now: their masks are planned.
    pub(super) fn put_back(site: &mut Site<'_>, bound: Vec<Bound>, wall: &str) {
        if bound.is_empty() {
            return;
        }
        site.bystanders.waiting.clear();
        let mut granted = BTreeMap::new();
        for Bound { pid, tid, start, mask, .. } in bound {
            let Some((path, now)) = still_there(site.proc, pid, tid, start) else { continue };
            if now == mask || lies_in(&path, wall) {
                continue;
            }
            // Nobody but the kernel gives a thread just what its cgroup has.
            if now != *given(site.tree, &mut granted, path) {
                continue;
            }
            if let Err(errno) = affinity::set(tid, &mask) {
                tracing::debug!(pid = pid.0, tid = tid.0, %mask, %errno, "a mask waits for its CPUs");
            }
            let left = affinity::get(tid).unwrap_or_default();
            if left != mask {
                site.bystanders.waiting.push(Bound { pid, tid, start, mask, left });
            }
        }
    }
}

/// Who is bound now: whose mask is not simply what the own cgroup has. Who can't be seen can't be put back.
fn look(site: &mut Site<'_>) -> Vec<Bound> {
    let online = machine_mask();
    let mut granted = BTreeMap::new();
    let mut bound = still_waiting(site, &mut granted);
    let waiting: BTreeSet<Tid> = bound.iter().map(|bound| bound.tid).collect();
    for pid in site.proc.pids().unwrap_or_default() {
        for tid in site.proc.tids(pid).unwrap_or_default() {
            let Ok(mask) = affinity::get(tid) else { continue };
            if online.is_subset(&mask) || waiting.contains(&tid) {
                continue;
            }
            let Ok(stat) = site.proc.thread_stat(pid, tid) else { continue };
            let Some(path) = place(site.proc, pid).filter(|_| !stat.kernel) else { continue };
            if mask != *given(site.tree, &mut granted, path) {
                bound.push(Bound { pid, tid, start: stat.start, left: mask.clone(), mask });
            }
        }
    }
    bound
}

/// Of those who wait, whoever has still what was left of their masks, or what the kernel made of that.
fn still_waiting(site: &mut Site<'_>, granted: &mut BTreeMap<String, CpuSet>) -> Vec<Bound> {
    let mut waiting = std::mem::take(&mut site.bystanders.waiting);
    waiting.retain(|bound| {
        let found = still_there(site.proc, bound.pid, bound.tid, bound.start);
        found.is_some_and(|(path, now)| now == bound.left || now == *given(site.tree, granted, path))
    });
    waiting
}

/// A thread's cgroup and its mask; `None` if it is gone.
fn still_there(proc: &mut Proc, pid: Pid, tid: Tid, start: StartTime) -> Option<(String, CpuSet)> {
    proc.thread_stat(pid, tid).ok().filter(|stat| stat.start == start)?;
    Some((place(proc, pid)?, affinity::get(tid).ok()?))
}

/// What a cgroup has, asked once.
fn given<'a>(tree: &Tree, granted: &'a mut BTreeMap<String, CpuSet>, path: String) -> &'a CpuSet {
    granted.entry(path).or_insert_with_key(|path| effective(tree, path))
}

/// In which cgroup a process is.
fn place(proc: &mut Proc, pid: Pid) -> Option<String> {
    let marks = Marks { cgroups: proc.cgroups(pid).ok()?, ..Marks::default() };
    marks.cpuset_path().map(str::to_owned)
}

/// What a cgroup has; where cpusets are not switched on for it, what the one above has.
pub(super) fn effective(tree: &Tree, path: &str) -> CpuSet {
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
    online::now().unwrap_or_default()
}
