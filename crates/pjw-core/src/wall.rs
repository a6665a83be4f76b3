//! Walls: cgroups whose cpuset keeps a job on its cores, whatever its threads ask for.
//!
//! What a node offers for them ([`Ground`]), what a wall is, and the changes that a plan may make to one. Where a
//! job can have no wall, masks on its threads keep it: `confine.rs`. Which job gets which wall is decided in
//! `fortify.rs`.

mod book;

use serde::{Deserialize, Serialize};

pub use book::{Built, Moved, WallRecord, Walls};

use crate::cpuset::CpuSet;
use crate::job::{JobId, Source};
use crate::process::ProcessId;

/// How jobs are to be kept on their cores: the key `enforcement`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enforcement {
    /// By a cpuset where a job can have one, by masks elsewhere.
    #[default]
    Auto,
    /// The same, and a job that can have no cpuset is a warning.
    Cpuset,
    /// By masks.
    Affinity,
}

/// What a node offers for walls, found by a probe when the daemon starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ground {
    /// Where cpusets are.
    pub cpusets: Cpusets,
    /// Whether a mask that somebody asked for outlives a change of the cpuset (Linux 6.2 and later). Older kernels
    /// give every thread the whole cpuset whenever that is written, or the thread enters another.
    pub masks_last: bool,
}

/// Where a node keeps its cpusets, and who writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cpusets {
    /// Nowhere that the warden could write: why, in a sentence, with the remedy.
    Nowhere {
        /// That sentence.
        why: String,
    },
    /// In the v2 hierarchy, whose single writer is systemd: walls are transient scopes of its making.
    Systemd,
    /// In the v2 hierarchy, of which nobody is the master: walls are directories of the warden's own.
    Unified,
    /// In a v1 hierarchy of their own, which systemd leaves alone: walls are directories of the warden's own.
    Legacy,
}

impl Default for Ground {
    /// No ground at all: what a warden assumes that has not probed.
    fn default() -> Self {
        Self {
            cpusets: Cpusets::Nowhere { why: "nobody looked for cpusets on this node".to_owned() },
            masks_last: true,
        }
    }
}

/// Who made the cgroup of a wall, and so who must be asked to change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mason {
    /// The job's scheduler; the warden writes the cpuset and nothing else.
    Scheduler,
    /// systemd, which was asked for a scope.
    Systemd,
    /// The warden.
    Warden,
}

/// What a cpuset is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// `cpuset.cpus`.
    pub cpus: CpuSet,
    /// `cpuset.mems`: numbers of NUMA nodes; `None` where memory may come from anywhere.
    pub mems: Option<CpuSet>,
    /// Whether it is to be a partition of its own, `isolated`: no other cgroup runs there and the kernel balances
    /// nothing (Documentation/admin-guide/cgroup-v2.rst, `cpuset.cpus.partition`).
    pub isolated: bool,
}

impl Bounds {
    /// These PUs, memory from anywhere, no partition.
    #[must_use]
    pub fn cpus(cpus: CpuSet) -> Self {
        Self { cpus, mems: None, isolated: false }
    }
}

/// A wall.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wall {
    /// For which job.
    pub job: JobId,
    /// Who made its cgroup.
    pub mason: Mason,
    /// The cgroup's path below the mount point of the hierarchy that has the cpusets, as in `/proc/PID/cgroup`.
    pub path: String,
    /// What it was last made to be, or was about to be made.
    pub bounds: Bounds,
}

/// Whether a cgroup is this directory or below it.
#[must_use]
pub fn lies_in(cgroup: &str, directory: &str) -> bool {
    cgroup.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Below this directory of the hierarchy the warden makes walls where nobody else does, and below the slice of the
/// same name systemd makes its scopes.
pub const OWN_DIRECTORY: &str = "/pjw";
/// The slice of systemd's scopes.
pub const SLICE: &str = "pjw.slice";

/// The cgroup of a job's own wall. An isolated one lies at the top: a partition's parent must be one too, and the root
/// is. A scheduler's job gets one in a v1 hierarchy only.
#[must_use]
pub fn own_path(job: &JobId, mason: Mason, isolated: bool) -> String {
    let name = directory_name(job);
    match (mason, isolated) {
        (Mason::Systemd, false) => format!("/{SLICE}/pjw-{name}.scope"),
        (Mason::Systemd, true) => format!("/pjw-{name}.scope"),
        (Mason::Warden | Mason::Scheduler, false) => format!("{OWN_DIRECTORY}/{name}"),
        (Mason::Warden | Mason::Scheduler, true) => format!("{OWN_DIRECTORY}-{name}"),
    }
}

/// A job's name as part of a unit's and of a directory's name: a manual job by its id alone. Whatever systemd would not
/// take in the name of a unit is escaped as systemd-escape(1) does.
fn directory_name(job: &JobId) -> String {
    let by_hand = job.source() == Source::Manual;
    let text = if by_hand { job.name().to_owned() } else { job.to_string() };
    let mut name = String::with_capacity(text.len());
    for (at, byte) in text.bytes().enumerate() {
        // Between a source and an id only: a person may call a job `slurm:1` too, as `manual:slurm:1`.
        let separates = byte == b':' && !by_hand;
        let plain = byte.is_ascii_alphanumeric() || byte == b'_' || separates || (byte == b'.' && at > 0);
        if plain {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("\\x{byte:02x}"));
        }
    }
    name
}

/// One change to the walls of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WallAction {
    /// For which job.
    pub job: JobId,
    /// What is to be done.
    pub change: WallChange,
    /// Whether it puts right what somebody undid.
    pub again: bool,
    /// Why, in one sentence.
    pub why: String,
}

impl WallAction {
    /// Its name in `plan --json` and in logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.change {
            WallChange::Raise { .. } => "raise",
            WallChange::Admit { .. } => "admit",
            WallChange::Return { .. } => "return",
            WallChange::Open { .. } => "open",
            WallChange::Raze { .. } => "raze",
        }
    }

    /// The cgroup of the wall.
    #[must_use]
    pub fn path(&self) -> &str {
        match &self.change {
            WallChange::Raise { wall, .. } | WallChange::Open { wall } | WallChange::Raze { wall } => {
                &wall.path
            }
            WallChange::Admit { to: path, .. } | WallChange::Return { from: path, .. } => path,
        }
    }

    /// The process that moves, if one does.
    #[must_use]
    pub fn process(&self) -> Option<ProcessId> {
        match &self.change {
            WallChange::Admit { process, .. } | WallChange::Return { process, .. } => Some(*process),
            WallChange::Raise { .. } | WallChange::Open { .. } | WallChange::Raze { .. } => None,
        }
    }
}

/// The kinds of change to a wall.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WallChange {
    /// Makes the wall if it is not there, and gives it its bounds. Repeating it changes nothing.
    Raise {
        /// The wall.
        wall: Wall,
        /// Processes that are moved in at once; systemd makes no scope without one. Only [`Mason::Systemd`] uses them.
        founders: Vec<ProcessId>,
    },
    /// Moves a process inside.
    Admit {
        /// The process.
        process: ProcessId,
        /// The cgroup it was seen in.
        from: String,
        /// The wall's cgroup.
        to: String,
    },
    /// Moves a process back to the cgroup it came from.
    Return {
        /// The process.
        process: ProcessId,
        /// The wall's cgroup.
        from: String,
        /// Where it came from.
        to: String,
    },
    /// Lets every PU and all memory in again; a scheduler's cgroup is as it was found then.
    Open {
        /// The wall.
        wall: Wall,
    },
    /// Removes the wall's cgroup; processes that are still in it keep it there, opened.
    Raze {
        /// The wall.
        wall: Wall,
    },
}

/// What became of a change to a wall.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WallOutcome {
    /// Done; what the kernel lets the cgroup use now (`cpuset.cpus.effective`), where that was changed.
    Done {
        /// That set, after [`WallChange::Raise`] and [`WallChange::Open`].
        effective: Option<CpuSet>,
    },
    /// The process, or the scheduler's cgroup, is gone: the world moved on.
    Gone,
    /// The kernel or systemd said no.
    Refused {
        /// The reason and what to do, in a sentence.
        hint: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wall_is_found_by_its_jobs_name_again() {
        let path = |job: &str, mason| own_path(&job.parse().unwrap(), mason, false);
        assert_eq!(path("a", Mason::Systemd), "/pjw.slice/pjw-a.scope");
        assert_eq!(path("slurm:12", Mason::Warden), "/pjw/slurm:12");
        assert_eq!(path("pbs:124[3].srv", Mason::Warden), "/pjw/pbs:124\\x5b3\\x5d.srv");
        assert_eq!(path("a-b@c+d", Mason::Systemd), "/pjw.slice/pjw-a\\x2db\\x40c\\x2bd.scope");
        assert_eq!(path("manual:slurm:12", Mason::Warden), "/pjw/slurm\\x3a12", "not the path of slurm:12");
        assert_eq!(own_path(&"a".parse().unwrap(), Mason::Systemd, true), "/pjw-a.scope");
        assert_eq!(own_path(&"a".parse().unwrap(), Mason::Warden, true), "/pjw-a");
    }

    #[test]
    fn no_name_climbs_out_or_hides() {
        assert_eq!(own_path(&"..".parse().unwrap(), Mason::Warden, false), "/pjw/\\x2e.");
        assert_eq!(own_path(&".a".parse().unwrap(), Mason::Warden, false), "/pjw/\\x2ea");
    }
}
