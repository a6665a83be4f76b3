//! The book of walls: what was built, who was moved, and what could not be done. The first two are journaled.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::bindings::may_be_cut;
use crate::cpuset::CpuSet;
use crate::job::JobId;
use crate::plan::Abstained;
use crate::process::ProcessId;
use crate::snapshot::Cpuset;
use crate::wall::{Mason, Wall, WallAction, WallChange, lies_in};

/// A cpuset that is written over so often between two full looks is not the warden's to write.
const MOST_TRIES: u32 = 4;

/// What the journal remembers of walls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WallRecord {
    /// A wall is about to be made, or changed.
    Raised(Wall),
    /// A wall is not wanted any more: it is about to be opened and removed.
    Unwanted {
        /// Its cgroup.
        path: String,
    },
    /// A wall is gone, or as it was before the warden came.
    Razed {
        /// Its cgroup.
        path: String,
    },
    /// A process is about to be moved into a wall.
    Moved {
        /// The process.
        process: ProcessId,
        /// From where.
        from: String,
        /// The wall's cgroup.
        to: String,
    },
    /// Where the first process that was moved into a wall came from, when that process is gone, or the wall that it was
    /// moved into is.
    Origin {
        /// The wall's cgroup.
        path: String,
        /// From where.
        from: String,
    },
}

/// A wall that was made, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// The wall.
    pub wall: Wall,
    /// What its cpuset may still be, until it was seen to be what it should: what it was made to be before.
    pub previous: Vec<CpuSet>,
    /// Whether it is to go.
    pub unwanted: bool,
    /// Where the first process that was moved in came from: those born inside belong there too.
    pub origin: Option<String>,
    tries: u32,
}

impl Built {
    /// Whether a mask is what the wall makes of one that allows everything: nobody asked for it. It may have been read
    /// before some of its PUs went off.
    #[must_use]
    pub fn made(&self, mask: &CpuSet, online: &CpuSet) -> bool {
        let mask = mask.intersection(online);
        !mask.is_empty() && self.cpusets().any(|cpus| cpus.intersection(online) == mask)
    }

    /// Whether a mask may be what the wall made of one that allows everything, at a moment at which these PUs were on, and
    /// others perhaps.
    pub(crate) fn may_have_made(&self, mask: &CpuSet, on: &CpuSet) -> bool {
        self.cpusets().any(|cpus| may_be_cut(mask, cpus, on))
    }

    /// Whether a mask is one that lies within.
    pub(crate) fn contains(&self, mask: &CpuSet) -> bool {
        self.cpusets().any(|cpus| mask.is_subset(cpus))
    }

    /// Whether a cpuset is of the warden's writing.
    #[must_use]
    pub fn wrote(&self, cpuset: &Cpuset) -> bool {
        self.cpusets().any(|cpus| *cpus == cpuset.cpus)
    }

    /// What its cpuset may be.
    fn cpusets(&self) -> impl Iterator<Item = &CpuSet> {
        self.previous.iter().chain([&self.wall.bounds.cpus])
    }
}

/// A process that was moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The cgroup it came from.
    pub from: String,
    /// The wall's cgroup.
    pub to: String,
}

/// All walls.
#[derive(Debug, Clone, Default)]
pub struct Walls {
    built: BTreeMap<String, Built>,
    /// The cgroup of the wall that each job is to have.
    wanted: BTreeMap<JobId, String>,
    moved: BTreeMap<ProcessId, Moved>,
    refused: BTreeMap<JobId, String>,
    unmovable: BTreeMap<ProcessId, String>,
    lingering: BTreeMap<String, String>,
}

impl Walls {
    /// The wall of this cgroup.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Built> {
        self.built.get(path)
    }

    /// The cgroups of all walls.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.built.keys().map(String::as_str)
    }

    /// The wall that a job is to have.
    #[must_use]
    pub fn of(&self, job: &JobId) -> Option<&Built> {
        self.built.get(self.wanted.get(job)?)
    }

    /// Whether a job has walls that are still to go.
    #[must_use]
    pub fn is_leaving(&self, job: &JobId) -> bool {
        self.built.values().any(|built| built.wall.job == *job && built.unwanted)
    }

    /// Whether a process was moved into this wall before.
    #[must_use]
    pub fn was_moved(&self, process: ProcessId, path: &str) -> bool {
        self.moved.get(&process).is_some_and(|moved| moved.to == path)
    }

    /// The wall that a cgroup lies in.
    #[must_use]
    pub fn around(&self, cgroup: &str) -> Option<&Built> {
        let mut ends = cgroup.match_indices('/').map(|(at, _)| at).chain([cgroup.len()]);
        ends.find_map(|end| self.built.get(cgroup.get(..end)?))
    }

    /// Where a process that lives in a wall came from: the first of its line, itself and those it descends from, that was
    /// moved there; else whoever came first.
    #[must_use]
    pub fn home_of(&self, line: impl IntoIterator<Item = ProcessId>, path: &str) -> Option<&str> {
        let moved = |process| self.moved.get(&process).filter(|moved| lies_in(&moved.to, path));
        let kin = line.into_iter().find_map(moved);
        let home = kin.map(|moved| &moved.from).or_else(|| self.built.get(path)?.origin.as_ref());
        home.map(String::as_str)
    }

    /// Why a job can have no wall now, if it was tried.
    #[must_use]
    pub fn refusal(&self, job: &JobId) -> Option<&str> {
        self.refused.get(job).map(String::as_str)
    }

    /// Why a process can't be moved, if it was tried.
    #[must_use]
    pub fn immobility(&self, process: ProcessId) -> Option<&str> {
        self.unmovable.get(&process).map(String::as_str)
    }

    /// Whether removing a wall was tried since the last full look, in vain.
    #[must_use]
    pub fn lingers(&self, path: &str) -> bool {
        self.lingering.contains_key(path)
    }

    /// What was refused may be tried again: it is time for a full look.
    pub(crate) fn forgive(&mut self) {
        self.refused.clear();
        self.unmovable.clear();
        self.lingering.clear();
        self.built.values_mut().for_each(|built| built.tries = 0);
    }

    /// Whether nothing was refused, is tried again or is to go.
    pub(crate) fn are_at_rest(&self) -> bool {
        let is_done = |built: &Built| !built.unwanted && built.tries == 0;
        self.refused.is_empty()
            && self.unmovable.is_empty()
            && self.lingering.is_empty()
            && self.built.values().all(is_done)
    }

    /// Takes in a record, when it is made and after a restart.
    pub(crate) fn take_in(&mut self, record: &WallRecord) {
        match record {
            WallRecord::Raised(wall) => self.raised(wall),
            WallRecord::Unwanted { path } => {
                if let Some(built) = self.built.get_mut(path) {
                    built.unwanted = true;
                }
                self.wanted.retain(|_, wanted| wanted != path);
            }
            WallRecord::Razed { path } => {
                self.built.remove(path);
                self.wanted.retain(|_, wanted| wanted != path);
                self.moved.retain(|_, moved| moved.to != *path);
            }
            WallRecord::Moved { process, from, to } => {
                self.began(to, from);
                self.moved.insert(*process, Moved { from: from.clone(), to: to.clone() });
            }
            WallRecord::Origin { path, from } => {
                if let Some(built) = self.built.get_mut(path) {
                    built.origin = Some(from.clone());
                }
            }
        }
    }

    fn began(&mut self, path: &str, from: &str) {
        if let Some(built) = self.built.get_mut(path) {
            built.origin.get_or_insert_with(|| from.to_owned());
        }
    }

    fn raised(&mut self, wall: &Wall) {
        let known = self.built.remove(&wall.path);
        let (mut previous, origin, tries) = known.as_ref().map_or((Vec::new(), None, 0), |known| {
            (known.previous.clone(), known.origin.clone(), known.tries)
        });
        if let Some(known) = known {
            previous.push(known.wall.bounds.cpus);
        }
        let built = Built { wall: wall.clone(), previous, unwanted: false, origin, tries: tries + 1 };
        self.built.insert(wall.path.clone(), built);
        self.wanted.insert(wall.job.clone(), wall.path.clone());
        if tries + 1 > MOST_TRIES {
            let why = format!("somebody writes over the cpuset of {}", wall.path);
            self.refused.insert(wall.job.clone(), why);
        }
    }

    /// Takes in that a wall was seen to be what it should.
    pub(crate) fn settled(&mut self, path: &str) {
        if let Some(built) = self.built.get_mut(path) {
            built.previous.clear();
            built.tries = 0;
        }
    }

    /// Takes in that a process is gone.
    pub(crate) fn forget(&mut self, process: ProcessId) {
        self.moved.remove(&process);
        self.unmovable.remove(&process);
    }

    /// Takes in that a change was refused.
    pub fn not_done(&mut self, action: &WallAction, hint: &str) {
        match &action.change {
            WallChange::Raise { wall, .. } => {
                self.refused.insert(wall.job.clone(), hint.to_owned());
            }
            WallChange::Admit { process, .. } => {
                self.unmovable.insert(*process, hint.to_owned());
            }
            WallChange::Return { process, from, to } => self.not_returned(*process, from, to, hint),
            WallChange::Open { wall } | WallChange::Raze { wall } => {
                self.lingering.insert(wall.path.clone(), hint.to_owned());
            }
        }
    }

    /// The cgroup a process came from may be gone. Where the warden is the master the root is as good; from a scope
    /// of systemd's there is no other place to go to, and it is open.
    fn not_returned(&mut self, process: ProcessId, from: &str, to: &str, hint: &str) {
        let masters_own = self.built.get(from).is_some_and(|built| built.wall.mason == Mason::Warden);
        if masters_own && to != "/" {
            self.moved.insert(process, Moved { from: "/".to_owned(), to: from.to_owned() });
        } else {
            self.unmovable.insert(process, hint.to_owned());
        }
    }

    /// The records from which this book can be made again.
    pub(crate) fn records(&self) -> Vec<WallRecord> {
        let built = self.built.iter().flat_map(|(path, built)| {
            let as_it_was = |cpus: &CpuSet| {
                let mut wall = built.wall.clone();
                wall.bounds.cpus = cpus.clone();
                WallRecord::Raised(wall)
            };
            let earlier = built.previous.iter().map(as_it_was);
            let unwanted = built.unwanted.then(|| WallRecord::Unwanted { path: path.clone() });
            let origin = |from: &String| WallRecord::Origin { path: path.clone(), from: from.clone() };
            let first = built.origin.iter().map(origin);
            let last = [WallRecord::Raised(built.wall.clone())];
            earlier.chain(last).chain(first).chain(unwanted).collect::<Vec<_>>()
        });
        let moved = self.moved.iter().map(|(&process, moved)| WallRecord::Moved {
            process,
            from: moved.from.clone(),
            to: moved.to.clone(),
        });
        built.chain(moved).collect()
    }

    /// What a person should know: jobs that should have walls and can't, as far as it was tried.
    pub(crate) fn troubles(&self) -> impl Iterator<Item = Abstained> + '_ {
        self.lingering.iter().filter_map(|(path, hint)| {
            let built = self.built.get(path)?;
            Some(Abstained {
                job: Some(built.wall.job.clone()),
                pid: None,
                tid: None,
                code: "wall-stays",
                why: format!("{path} is open and could not be removed: {hint}"),
                remedy: "it is removed once its last process has ended".to_owned(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Pid, StartTime};
    use crate::wall::{Bounds, Mason};

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn wall() -> Wall {
        let bounds = Bounds::cpus(set("0-1"));
        Wall { job: "manual:a".parse().unwrap(), mason: Mason::Warden, path: "/pjw/a".to_owned(), bounds }
    }

    #[test]
    fn walls_are_at_rest_once_nothing_is_tried_or_refused() {
        let mut walls = Walls::default();
        assert!(walls.are_at_rest());
        walls.take_in(&WallRecord::Raised(wall()));
        assert!(!walls.are_at_rest(), "nobody has seen it yet");
        walls.settled("/pjw/a");
        assert!(walls.are_at_rest());
        let change = WallChange::Raise { wall: wall(), founders: Vec::new() };
        let action = WallAction { job: wall().job, change, again: false, why: String::new() };
        walls.not_done(&action, "no memory");
        assert!(!walls.are_at_rest(), "it is refused");
        walls.forgive();
        walls.take_in(&WallRecord::Unwanted { path: "/pjw/a".to_owned() });
        assert!(!walls.are_at_rest(), "it is to go");
    }

    #[test]
    fn who_is_born_behind_a_wall_that_was_made_anew_belongs_where_its_new_founders_came_from() {
        let mut walls = Walls::default();
        let process = |pid| ProcessId { pid: Pid(pid), start: StartTime(u64::from(pid)) };
        let moved = |pid, from: &str| WallRecord::Moved {
            process: process(pid),
            from: from.to_owned(),
            to: "/pjw/a".to_owned(),
        };
        walls.take_in(&WallRecord::Raised(wall()));
        walls.take_in(&moved(7, "/session-1"));
        walls.take_in(&moved(8, "/session-2"));
        assert_eq!(walls.home_of([process(9)], "/pjw/a"), Some("/session-1"), "who came first");
        let home = walls.home_of([process(9), process(8)], "/pjw/a");
        assert_eq!(home, Some("/session-2"), "its parent");
        walls.take_in(&WallRecord::Raised(wall()));
        walls.take_in(&WallRecord::Origin { path: "/pjw/a".to_owned(), from: "/session-3".to_owned() });
        walls.take_in(&moved(10, "/session-3"));
        assert_eq!(walls.home_of([process(9)], "/pjw/a"), Some("/session-3"));
        let mut again = Walls::default();
        walls.records().iter().for_each(|record| again.take_in(record));
        assert_eq!(again.home_of([process(9)], "/pjw/a"), Some("/session-3"), "also after a restart");
    }

    #[test]
    fn a_mask_that_was_read_before_a_core_went_off_is_still_the_walls() {
        let wall = Wall { bounds: Bounds::cpus(set("0-1,4-5")), ..wall() };
        let built = Built { wall, previous: vec![set("0-3")], unwanted: false, origin: None, tries: 1 };
        let online = set("0-1,4-7");
        assert!(built.made(&set("0-3"), &online), "what it was, read while CPUs 2-3 were on");
        assert!(built.made(&set("0-1"), &online), "what the kernel made of it then");
        assert!(built.made(&set("0-1,4-5"), &online), "what it is");
        assert!(!built.made(&set("0"), &online), "somebody's own");
        assert!(!built.made(&set("2-3"), &online), "nothing is left of it");
    }
}
