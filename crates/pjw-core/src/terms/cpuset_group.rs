//! Job cpusets: cgroups whose cpuset keeps a job on its cores, whatever masks its threads request.
//!
//! This file defines what a node supports ([`CpusetSupport`]), a job's cpuset ([`JobCpuset`]), and the
//! changes that a plan can make ([`CpusetAction`]). The phase `cpusets` decides which job gets which cpuset.
//! Jobs without a cpuset are kept by affinity masks (phase `masks`).

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, ProcessId, Uid, prelude::*};
use crate::terms::job::JobId;

/// The config key `enforcement`: whether pjw keeps jobs on their cores by cpusets or by affinity masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enforcement {
    /// By a cpuset if the job can have one, else by affinity masks.
    #[default]
    Auto,
    /// Like `Auto`, with a warning for each job that can't have a cpuset.
    Cpuset,
    /// By affinity masks only.
    Affinity,
}

/// What the node supports: whether pjw can make cpusets, and in which cgroup hierarchy. Found out once, when the
/// daemon starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetSupport {
    /// The cgroup hierarchy in which pjw can make cpusets, or the reason why it can't.
    pub hierarchy: CpusetHierarchy,
    /// Whether a mask set by sched_setaffinity(2) survives a change of the cpuset (Linux 6.2 and later).
    /// Older kernels give every thread the whole cpuset when the cpuset is written or the thread enters
    /// another one.
    pub affinity_persists: bool,
}

/// The cgroup hierarchy in which pjw makes cpusets, and whether systemd or pjw itself creates the cgroups there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetHierarchy {
    /// pjw can't write any cpuset.
    Unavailable {
        /// The reason and the remedy, in one sentence.
        why: String,
    },
    /// The v2 hierarchy, managed by systemd. Job cpusets are transient scopes that systemd creates.
    Systemd,
    /// The v2 hierarchy without a manager. Job cpusets are directories that pjw creates.
    Unified,
    /// A v1 cpuset hierarchy, which systemd does not manage. Job cpusets are directories that pjw
    /// creates.
    Legacy,
}

impl Default for CpusetSupport {
    /// No cpuset support: the value before the probe.
    fn default() -> Self {
        Self {
            hierarchy: CpusetHierarchy::Unavailable {
                why: "the cpusets of this node were not probed".to_owned(),
            },
            affinity_persists: true,
        }
    }
}

/// The owner of a job's cgroup, which created it: the scheduler, systemd or pjw. pjw changes and removes the cgroup
/// by the interface that the owner used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupOwner {
    /// The scheduler of the job. pjw writes only the cpuset of this cgroup.
    Scheduler,
    /// systemd, which created a scope at pjw's request.
    Systemd,
    /// pjw.
    Warden,
}

/// The settings that a cpuset should have: its PUs, its NUMA nodes, and whether it is an isolated partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusetSpec {
    /// `cpuset.cpus`: the PUs on which the processes in the cpuset may run.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the numbers of the NUMA nodes from which memory may be allocated; `None` for all nodes.
    pub mems: Option<CpuSet>,
    /// Whether the cpuset is an isolated partition: no other cgroup uses its PUs, and the kernel does not
    /// balance load on them (Documentation/admin-guide/cgroup-v2.rst, `cpuset.cpus.partition`).
    pub isolated: bool,
}

impl CpusetSpec {
    /// Makes the settings of a cpuset with these PUs, the memory of all NUMA nodes, and without an isolated
    /// partition.
    #[must_use]
    pub fn from_cpus(cpus: CpuSet) -> Self {
        Self { cpus, mems: None, isolated: false }
    }
}

/// The cpuset of a job: the cgroup to which it belongs, the owner that created this cgroup, and the settings of the
/// cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCpuset {
    /// The job whose processes the cpuset limits.
    pub job: JobId,
    /// Who created the cgroup: the scheduler, systemd or pjw.
    #[serde(rename = "mason")]
    pub cgroup_owner: CgroupOwner,
    /// The path of the cgroup below the mount point of the cpuset hierarchy, as in `/proc/PID/cgroup`.
    pub path: String,
    /// The settings of the cpuset that pjw wrote last, or is about to write.
    #[serde(rename = "bounds")]
    pub spec: CpusetSpec,
}

/// A cgroup with the name of a job's cpuset, found on the node when the daemon starts, and what pjw wrote to its
/// attributes when it made the cgroup. The journal may not know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundCpuset {
    /// The path of the cgroup below the mount point of the cpuset hierarchy.
    pub path: String,
    /// The owner of the job. `None` if the attribute is missing: cgroups have no attributes here, or the cpuset was
    /// about to be removed.
    pub owner: Option<Uid>,
    /// The cgroup from which every process was moved in. `None` if that is unknown, or if the processes came from several
    /// cgroups.
    pub origin: Option<String>,
}

/// One planned change of a job's cpuset: the cpuset is created, widened or removed, or a process is moved into it or
/// out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetAction {
    /// The job whose cpuset changes.
    pub job: JobId,
    /// What is done: create, widen or remove the cpuset, or move a process.
    pub change: CpusetChange,
    /// Whether the change repeats an earlier one that another program undid.
    pub is_repair: bool,
    /// The reason for the change, in one sentence.
    pub why: String,
}

impl CpusetAction {
    /// Returns the name of the change in `pjwctl plan --json` and in logs, such as `raise`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.change {
            CpusetChange::Create { .. } => "raise",
            CpusetChange::MoveIn { .. } => "admit",
            CpusetChange::MoveBack { .. } => "return",
            CpusetChange::Widen { .. } => "open",
            CpusetChange::Remove { .. } => "raze",
        }
    }

    /// Returns the path of the cgroup whose cpuset is changed, or into or out of which a process is moved.
    #[must_use]
    pub fn path(&self) -> &str {
        match &self.change {
            CpusetChange::Create { job_cpuset, .. }
            | CpusetChange::Widen { job_cpuset }
            | CpusetChange::Remove { job_cpuset } => &job_cpuset.path,
            CpusetChange::MoveIn { to: path, .. } | CpusetChange::MoveBack { from: path, .. } => path,
        }
    }

    /// Returns the process that the change moves into or out of a cpuset, or `None` if it moves no process.
    #[must_use]
    pub fn process(&self) -> Option<ProcessId> {
        match &self.change {
            CpusetChange::MoveIn { process, .. } | CpusetChange::MoveBack { process, .. } => Some(*process),
            CpusetChange::Create { .. } | CpusetChange::Widen { .. } | CpusetChange::Remove { .. } => None,
        }
    }
}

/// What a planned change does to a job's cpuset: create it, move a process into it, move a process back, widen it to
/// all PUs, or remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetChange {
    /// Creates the cgroup if it does not exist, and writes the settings. Repeating the change has no effect.
    Create {
        /// The cpuset.
        job_cpuset: JobCpuset,
        /// The owner of the job. It is written to an attribute of the cgroup, for a daemon that has lost its journal.
        owner: Uid,
        /// Processes that are moved in at creation. Only [`CgroupOwner::Systemd`] uses them, because systemd
        /// creates no scope without a process.
        initial_processes: Vec<ProcessId>,
    },
    /// Moves a process into the cpuset.
    MoveIn {
        /// The process.
        process: ProcessId,
        /// The cgroup in which the process was seen.
        from: String,
        /// The cgroup of the cpuset.
        to: String,
    },
    /// Moves a process back to the cgroup that it came from.
    MoveBack {
        /// The process.
        process: ProcessId,
        /// The cgroup of the cpuset.
        from: String,
        /// The cgroup that the process came from.
        to: String,
    },
    /// Allows all PUs and all memory again. A scheduler's cgroup is then as pjw found it.
    Widen {
        /// The cpuset.
        job_cpuset: JobCpuset,
    },
    /// Removes the cgroup. If processes are still in it, the cgroup stays and allows all PUs.
    Remove {
        /// The cpuset.
        job_cpuset: JobCpuset,
    },
}

/// The result of carrying out a [`CpusetAction`] (a change of a job's cpuset): done, refused with the reason, or gone
/// because the process or cgroup no longer exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetOutcome {
    /// The change was made.
    Done {
        /// The PUs that the kernel allows in the cgroup now (`cpuset.cpus.effective`), after
        /// [`CpusetChange::Create`] and [`CpusetChange::Widen`].
        effective: Option<CpuSet>,
    },
    /// The process or the scheduler's cgroup no longer exists.
    Gone,
    /// The kernel or systemd refused the change.
    Refused {
        /// The error and what to do, one sentence.
        reason: String,
    },
}
