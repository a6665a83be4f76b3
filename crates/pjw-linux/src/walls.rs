//! Carrying out changes to walls: cgroups with cpusets, in the warden's own directories, in scopes of systemd's, or in
//! a scheduler's.
//!
//! Every change may be repeated and is read back. One that fails leaves things as they were. Nothing is written but
//! the wall's own cgroup and what must be switched on above it, and no process is ever ended.

pub(crate) mod bounds;
mod bystanders;
mod moving;
mod own;
mod scope;
mod tree;

use pjw_core::cpuset::CpuSet;
use pjw_core::process::ProcessId;
use pjw_core::wall::{Mason, Wall, WallChange, WallOutcome};

pub(crate) use bystanders::Bystanders;
pub use tree::{Files, Group, Tree};

use crate::procfs::Proc;
use crate::systemd::Manager;

/// What a change needs.
pub(crate) struct Site<'a> {
    pub(crate) proc: &'a mut Proc,
    pub(crate) tree: &'a Tree,
    pub(crate) systemd: &'a mut Manager,
    pub(crate) bystanders: &'a mut Bystanders,
}

const MOST_TRIES: usize = 3;

/// A refusal.
fn refused(hint: String) -> WallOutcome {
    WallOutcome::Refused { hint }
}

fn done(effective: CpuSet) -> WallOutcome {
    WallOutcome::Done { effective: Some(effective) }
}

/// The wall that a change is to; of a process's move, none.
fn wall_changed(change: &WallChange) -> Option<&Wall> {
    match change {
        WallChange::Raise { wall, .. } | WallChange::Open { wall } | WallChange::Raze { wall } => Some(wall),
        WallChange::Admit { .. } | WallChange::Return { .. } => None,
    }
}

impl Site<'_> {
    /// Carries out one change.
    pub(crate) fn carry_out(&mut self, change: &WallChange) -> WallOutcome {
        let bound = Bystanders::before(self, change);
        let outcome = self.change(change);
        if let Some(wall) = wall_changed(change) {
            Bystanders::put_back(self, bound, &wall.path);
        }
        outcome
    }

    fn change(&mut self, change: &WallChange) -> WallOutcome {
        let result = match change {
            WallChange::Raise { wall, founders } => self.raise(wall, founders).map(done),
            WallChange::Admit { process, from, to } | WallChange::Return { process, from, to } => {
                self.relocate(*process, from, to)
            }
            WallChange::Open { wall } => self.open(wall).map(done),
            WallChange::Raze { wall } => self.raze(wall).map(|()| WallOutcome::Done { effective: None }),
        };
        result.unwrap_or_else(|outcome| outcome)
    }

    fn group(&self, path: &str) -> Result<Group, WallOutcome> {
        self.tree
            .group(path)
            .ok_or_else(|| refused(format!("the cgroup {path} is of another cgroup namespace")))
    }

    fn wall(&self, wall: &Wall) -> Result<Group, WallOutcome> {
        let group = self.group(&wall.path)?;
        if group.path == "/" { Err(refused(format!("{}: the top is no wall", wall.job))) } else { Ok(group) }
    }

    fn raise(&mut self, wall: &Wall, founders: &[ProcessId]) -> Result<CpuSet, WallOutcome> {
        let group = self.wall(wall)?;
        let before = group.exists().then(|| group.files());
        let raised = match wall.mason {
            Mason::Scheduler if before.is_none() => return Err(WallOutcome::Gone),
            Mason::Scheduler => bounds::give(&group, &wall.bounds, true),
            Mason::Warden => self.raise_own(&group, wall),
            Mason::Systemd => return scope::raise(self, wall, &group, founders),
        };
        if raised.is_err() {
            match before {
                Some(Ok(files)) => bounds::put_back(&group, &files),
                // Nothing could be read, so nothing was written.
                Some(Err(_)) => {}
                None => {
                    let _ = group.remove();
                    own::tidy_up(self.tree);
                }
            }
        }
        raised
    }

    /// The last wall of another warden, in a test say, takes the directory above with it: then it is made once more.
    fn raise_own(&self, group: &Group, wall: &Wall) -> Result<CpuSet, WallOutcome> {
        let once = || own::make(self.tree, group).and_then(|()| bounds::give(group, &wall.bounds, false));
        match (0..MOST_TRIES).map(|_| once()).find(|result| *result != Err(WallOutcome::Gone)) {
            Some(result) => result,
            None => {
                Err(refused(format!("the cgroup {} can't be made: what is above it vanishes", group.path)))
            }
        }
    }

    fn relocate(&mut self, process: ProcessId, from: &str, to: &str) -> Result<WallOutcome, WallOutcome> {
        let (from, to) = (self.group(from)?, self.group(to)?);
        Ok(moving::go(self.proc, self.tree, process, &from, &to))
    }

    fn open(&mut self, wall: &Wall) -> Result<CpuSet, WallOutcome> {
        let group = self.wall(wall)?;
        if !group.exists() {
            return Err(WallOutcome::Gone);
        }
        if wall.mason == Mason::Systemd {
            return scope::open(self, &group);
        }
        own::repair_above(self.tree, &group);
        bounds::open(&group, wall.mason == Mason::Scheduler && wall.bounds.mems.is_none())
    }

    fn raze(&mut self, wall: &Wall) -> Result<(), WallOutcome> {
        let group = self.wall(wall)?;
        match wall.mason {
            Mason::Scheduler => Ok(()),
            Mason::Systemd => scope::raze(self, &group),
            Mason::Warden if !own::is_own(&group) => {
                Err(refused(format!("{} is not the warden's own: it is not removed", group.path)))
            }
            Mason::Warden => {
                let removed = group.remove();
                own::tidy_up(self.tree);
                removed.map_err(|errno| match errno {
                    nix::errno::Errno::EBUSY => {
                        refused(format!("the cgroup {} stays: processes are still in it", group.path))
                    }
                    other => bounds::cant(&group, "be removed", other),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests;
