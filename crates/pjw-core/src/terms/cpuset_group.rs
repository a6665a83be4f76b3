//! Job cpusets: cgroups whose cpuset keeps a job on its cores, whatever masks its threads request.
//!
//! This file defines what a node supports ([`CpusetSupport`]), a job's cpuset ([`JobCpuset`]), and the
//! changes that a plan can make ([`CpusetAction`]). The phase `cpusets` decides which job gets which cpuset.
//! Jobs without a cpuset are kept by affinity masks (phase `masks`).

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, ProcessId, Uid, prelude::*};
use crate::terms::job::JobId;

/// The config key `enforcement`: whether pjw restricts jobs to their cores by cpusets or by affinity masks.
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

/// The support for cpusets on this node: whether pjw can create cpusets, and in which cgroup hierarchy.
/// Determined once, when the daemon starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetSupport {
    /// The cgroup hierarchy in which pjw can create cpusets, or the reason why it can't.
    pub hierarchy: CpusetHierarchy,
    /// Whether a mask set by sched_setaffinity(2) stays in force when the cpuset changes. True on Linux 6.2
    /// and later. An older kernel gives every thread the whole cpuset when the cpuset is written or the
    /// thread enters another cpuset.
    pub affinity_persists: bool,
}

/// The cgroup hierarchy in which pjw creates cpusets, and whether systemd or pjw itself creates the cgroups
/// there.
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

/// The creator of a job's cgroup: the scheduler, systemd or pjw. pjw changes and removes the cgroup by the
/// interface that the creator used: the files of the cgroup, or D-Bus calls to systemd.
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

/// The settings that pjw writes to a cpuset: its PUs, its NUMA nodes, and whether it is an isolated
/// partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusetSpec {
    /// `cpuset.cpus`: the PUs on which the processes in the cpuset may run.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the numbers of the NUMA nodes from which the processes may allocate memory. `None` for
    /// all nodes.
    pub mems: Option<CpuSet>,
    /// Whether the cpuset is an isolated partition. No other cgroup may then use its PUs, and the kernel does
    /// not balance load on them (Documentation/admin-guide/cgroup-v2.rst, `cpuset.cpus.partition`).
    pub isolated: bool,
}

impl CpusetSpec {
    /// Makes the settings of a cpuset with the PUs `cpus` and the memory of all NUMA nodes. The cpuset is no
    /// isolated partition.
    #[must_use]
    pub fn from_cpus(cpus: CpuSet) -> Self {
        Self { cpus, mems: None, isolated: false }
    }
}

/// The cpuset of a job: the path of its cgroup, the creator of this cgroup, and the settings of the cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCpuset {
    /// The job whose processes the cpuset limits.
    pub job: JobId,
    /// The creator of the cgroup: the scheduler, systemd or pjw.
    #[serde(rename = "mason")]
    pub cgroup_owner: CgroupOwner,
    /// The path of the cgroup below the mount point of the cpuset hierarchy, as in `/proc/PID/cgroup`.
    pub path: String,
    /// The settings that pjw last wrote to the cpuset, or is about to write.
    #[serde(rename = "bounds")]
    pub spec: CpusetSpec,
}

/// A cgroup that has the name of a job's cpuset and that existed when the daemon started. It also has the
/// facts that pjw stored in extended attributes when it created the cgroup. The journal may have no record of
/// this cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundCpuset {
    /// The path of the cgroup below the mount point of the cpuset hierarchy.
    pub path: String,
    /// The owner of the job. `None` if the extended attribute is missing: this kernel does not support such
    /// attributes on cgroups, or pjw was about to remove the cpuset.
    pub owner: Option<Uid>,
    /// The path of the cgroup from which all processes were moved into this one. `None` if it is unknown, or
    /// if the processes came from several cgroups.
    pub origin_cgroup: Option<String>,
}

/// One planned change of a job's cpuset. Either the cpuset is created, widened or removed, or a process is
/// moved into or out of the cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetAction {
    /// The job whose cpuset changes.
    pub job: JobId,
    /// The change: to create, widen or remove the cpuset, or to move a process.
    pub change: CpusetChange,
    /// Whether pjw had made this change before, and another program undid it.
    pub is_repair: bool,
    /// The reason for the change, in one sentence for users.
    pub why: String,
}

impl CpusetAction {
    /// Returns the name of the kind of change, as in `pjwctl plan --json` and in logs, such as `raise` (the
    /// cpuset is created).
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

    /// Returns the path of the job's cpuset cgroup that the change concerns.
    #[must_use]
    pub fn path(&self) -> &str {
        match &self.change {
            CpusetChange::Create { job_cpuset, .. }
            | CpusetChange::Widen { job_cpuset }
            | CpusetChange::Remove { job_cpuset } => &job_cpuset.path,
            CpusetChange::MoveIn { to: path, .. } | CpusetChange::MoveBack { from: path, .. } => path,
        }
    }

    /// Returns the process that the change moves into or out of a cpuset. `None` if the change moves no
    /// process.
    #[must_use]
    pub fn process(&self) -> Option<ProcessId> {
        match &self.change {
            CpusetChange::MoveIn { process, .. } | CpusetChange::MoveBack { process, .. } => Some(*process),
            CpusetChange::Create { .. } | CpusetChange::Widen { .. } | CpusetChange::Remove { .. } => None,
        }
    }
}

/// The kind of a planned change of a job's cpuset: create the cpuset, move a process into it, move a process
/// back, widen the cpuset to all PUs, or remove it.
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

/// The result of carrying out a [`CpusetAction`] (a change of a job's cpuset). The change was made, the
/// kernel or systemd refused it, or the process or cgroup no longer exists.
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
