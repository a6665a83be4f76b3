//! Job cpusets: cgroups whose cpuset keeps a job on its cores, whatever masks its threads request.
//!
//! This file defines what a node supports ([`CpusetSupport`]), a job's cpuset ([`JobCpuset`]), and the
//! changes that a plan can make ([`CpusetAction`]). The phase `cpusets` decides which job gets which cpuset.
//! Jobs without a cpuset are kept by affinity masks (phase `masks`).

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, ProcessId, Uid, prelude::*};
use crate::terms::job::JobId;

/// The value of the config key `enforcement`: whether pjw restricts jobs to their cores by cpusets or by
/// affinity masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EnforcementMethod {
    /// By a cpuset if the job can have a cpuset, else by affinity masks.
    #[default]
    Auto,
    /// By a cpuset if the job can have a cpuset, else by affinity masks. pjw also gives a warning for each job that
    /// can't have a cpuset.
    Cpuset,
    /// By affinity masks only.
    Affinity,
}

/// The support for cpusets on this machine: whether pjw can create cpusets, and in which cgroup hierarchy. Also says
/// whether affinity masks outlast a change of the cpuset, and whether pjw can run jobs at idle priority and freeze
/// processes. Determined once, when the daemon starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetSupport {
    /// The cgroup hierarchy in which pjw can create cpusets, or the reason why pjw can't create cpusets.
    pub hierarchy: CpusetHierarchy,
    /// Whether a mask set by sched_setaffinity(2) stays in force when the cpuset changes. True on Linux 6.2
    /// and later. An older kernel gives every thread the whole cpuset when the cpuset is written or the
    /// thread enters another cpuset.
    pub affinity_persists: bool,
    /// Whether jobs of the class besteffort can run at idle priority (`cpu.idle`). Such a job runs on cores
    /// that another job, the owner, leaves idle. At idle priority, the kernel gives the PU back to the owner
    /// as soon as a thread of the owner becomes runnable.
    pub idle_priority: IdlePrioritySupport,
    /// Whether pjw can freeze the processes of a job cpuset.
    pub can_freeze: bool,
}

// The scheduling policy `SCHED_IDLE` is no alternative: it lowers the priority of a thread only against other threads
// in the same cgroup. The cgroup of the thread still competes with all other cgroups at its normal priority.
/// Whether pjw can run a job at idle priority (the file `cpu.idle` of a cgroup). The job then gets only CPU time that
/// no process at normal priority uses. The kernel compares the priority of a cgroup only with cgroups that have the
/// same parent. So a cgroup at idle priority must lie directly below the root of the hierarchy that has the cpu
/// controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdlePrioritySupport {
    /// A job can run at idle priority.
    Available,
    /// No job can run at idle priority.
    Unavailable {
        /// The reason and the remedy, in one sentence for users.
        why: String,
    },
}

/// The cgroup hierarchy in which pjw creates cpusets, and whether systemd or pjw itself creates the cgroups
/// in this hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetHierarchy {
    /// pjw can't create or change any cpuset on this machine.
    Unavailable {
        /// The reason and the remedy, in one sentence for users.
        why: String,
    },
    /// The cgroup v2 hierarchy, managed by systemd. Job cpusets are transient scopes that systemd creates.
    Systemd,
    /// The cgroup v2 hierarchy on a machine without systemd. Job cpusets are cgroup directories that pjw
    /// creates.
    Unified,
    /// A cgroup v1 hierarchy with the cpuset controller, which systemd does not manage. Job cpusets are
    /// cgroup directories that pjw creates.
    Legacy,
}

impl CpusetHierarchy {
    /// Returns whether a cpuset of this hierarchy can become an isolated partition (`cpuset.cpus.partition`). The
    /// cgroup v1 hierarchy has no partitions.
    #[must_use]
    pub fn has_partitions(&self) -> bool {
        matches!(self, Self::Systemd | Self::Unified)
    }
}

impl Default for CpusetSupport {
    /// No cpuset support: the value before the probe.
    fn default() -> Self {
        Self {
            hierarchy: CpusetHierarchy::Unavailable {
                why: "the cpusets of this node were not probed".to_owned(),
            },
            affinity_persists: true,
            idle_priority: IdlePrioritySupport::Unavailable {
                why: "the idle priority of this node was not probed".to_owned(),
            },
            can_freeze: false,
        }
    }
}

/// The creator of a job's cgroup: a batch system, systemd or pjw. If systemd created the cgroup, pjw changes
/// and removes the cgroup by D-Bus calls to systemd. Otherwise, pjw writes to the files of the cgroup. pjw
/// never removes a cgroup that a batch system created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupCreator {
    /// The batch system that runs the job. pjw changes only the cpuset of this cgroup.
    Scheduler,
    /// systemd, which created a transient scope at pjw's request.
    Systemd,
    /// pjw itself.
    Warden,
}

/// The settings that pjw writes to a cpuset and to its cgroup: the PUs, which are logical CPUs (`cpuset.cpus`), the
/// NUMA nodes (`cpuset.mems`) and three options. The options are an isolated partition (`cpuset.cpus.partition`), idle
/// priority (`cpu.idle`) and frozen processes (`cgroup.freeze`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusetSpec {
    /// `cpuset.cpus`: the PUs on which the processes in the cpuset may run.
    pub cpus: CpuSet,
    /// `cpuset.mems`: the kernel's ids of the NUMA nodes from which the processes may allocate memory. `None`
    /// for all NUMA nodes.
    pub mems: Option<CpuSet>,
    /// Whether the cpuset is an isolated partition. No other cgroup may then use its PUs, and the kernel does
    /// not balance load on them (Documentation/admin-guide/cgroup-v2.rst, `cpuset.cpus.partition`).
    pub isolated: bool,
    /// Whether the processes in the cpuset run at idle priority (`cpu.idle`). A process of normal priority
    /// that becomes runnable on the same PU then preempts them at once. True for jobs of the class
    /// besteffort, which run on cores that other jobs leave idle.
    #[serde(default, skip_serializing_if = "is_false")]
    pub idle: bool,
    /// Whether the processes in the cpuset are frozen (`cgroup.freeze`), so that none of them runs.
    #[serde(default, skip_serializing_if = "is_false")]
    pub frozen: bool,
}

// serde passes a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl CpusetSpec {
    /// Makes the settings of a cpuset with the PUs (logical CPUs) in `cpus` and the memory of all NUMA nodes. The
    /// options `isolated`, `idle` and `frozen` are off.
    #[must_use]
    pub fn from_cpus(cpus: CpuSet) -> Self {
        Self { cpus, mems: None, isolated: false, idle: false, frozen: false }
    }
}

/// The cpuset of a job: the path of its cgroup, the creator of this cgroup, and the settings of the cpuset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCpuset {
    /// The job whose processes the cpuset limits.
    pub job: JobId,
    /// The creator of the cgroup: the batch system, systemd or pjw.
    #[serde(rename = "mason")]
    pub creator: CgroupCreator,
    /// The path of the cgroup relative to the mount point of the cpuset hierarchy, as in `/proc/PID/cgroup`.
    pub path: String,
    /// The settings that pjw last wrote to the cpuset, or is about to write.
    #[serde(rename = "bounds")]
    pub spec: CpusetSpec,
}

/// A leftover cpuset: a job's cpuset that an earlier run of the daemon wrote and that still exists when the daemon
/// starts. If pjw or systemd created the cgroup of the cpuset, the daemon recognises the cgroup by its path. If a batch
/// system created the cgroup, the daemon recognises it by an extended attribute, in which the earlier run stored the
/// cpuset.
///
/// If the journal (the file from which a restarted daemon restores its state) has a record of the cpuset, the daemon
/// keeps or removes the cpuset as this record says. Otherwise, the daemon decides after the next scan of all processes:
///
/// - A cpuset in a cgroup that pjw or systemd created is kept if the cgroup contains processes and the PUs (logical
///   CPUs) of the cpuset can be granted to the job. The job then holds these PUs again. If not, the daemon removes the
///   limits of the cpuset, and then the cgroup.
/// - A cpuset in a cgroup of a batch system is kept if the daemon finds the job again and the PUs of the cpuset are
///   free. The job then holds these PUs again. If not, the daemon writes other PUs into the cpuset, or removes its
///   limits. The daemon never removes the cgroup.
///
/// A cpuset that another daemon of pjw wrote ([`LeftoverCpuset::other_writer`]) is left as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftoverCpuset {
    /// The path of the cgroup relative to the mount point of the cpuset hierarchy.
    pub path: String,
    /// The user id of the job's owner, which the earlier run stored in an extended attribute of the cgroup.
    /// `None` if the cgroup has no such attribute: the kernel does not support extended attributes on
    /// cgroups, or the earlier run had begun to remove the cpuset.
    pub owner: Option<Uid>,
    /// The path of the cgroup from which the earlier run moved the processes into this cgroup. The earlier
    /// run stored it in an extended attribute. `None` if the path is unknown, or if the processes came from
    /// several cgroups.
    pub origin_cgroup: Option<String>,
    /// The cpuset that the earlier run wrote in the cgroup of a batch system, as it stored it in an extended
    /// attribute of the cgroup. `None` if pjw or systemd created the cgroup.
    pub scheduler_cpuset: Option<JobCpuset>,
    /// The name of the daemon that wrote [`LeftoverCpuset::scheduler_cpuset`], if this was another daemon of pjw.
    /// `None` if an earlier run of this daemon wrote the cpuset. The name was read from the extended attribute. It is
    /// the text with which the names of all cgroups of that daemon begin, such as `pjw`. This daemon does not change
    /// the cpuset of another daemon. It gives the waiting job of the cpuset no cores while the cpuset has the PUs that
    /// the other daemon wrote.
    pub other_writer: Option<String>,
}

/// One planned change of a job's cpuset, such as its creation, with the reason for the change.
/// [`CpusetChange`] lists the kinds of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpusetAction {
    /// The job whose cpuset changes.
    pub job: JobId,
    /// The kind of the change, with the cpuset or the process that it changes.
    pub change: CpusetChange,
    /// Whether pjw had made this change before, and another program undid it.
    pub is_repair: bool,
    /// The reason for the change, in one sentence for users.
    pub reason: String,
}

impl CpusetAction {
    /// Returns the name of the kind of change in `pjwctl plan --json`, logs and metrics. Scripts rely on these names,
    /// which are older than those of [`CpusetChange`]: `raise` (create), `admit` (move a process in), `return` (move a
    /// process back), `open` (remove the limits) and `raze` (remove).
    #[must_use]
    pub fn kind_name(&self) -> &'static str {
        match self.change {
            CpusetChange::Create { .. } => "raise",
            CpusetChange::MoveIn { .. } => "admit",
            CpusetChange::MoveBack { .. } => "return",
            CpusetChange::RemoveLimits { .. } => "open",
            CpusetChange::Remove { .. } => "raze",
        }
    }

    /// Returns the path of the cgroup of the job's cpuset, relative to the mount point of the cpuset
    /// hierarchy.
    #[must_use]
    pub fn cgroup_path(&self) -> &str {
        match &self.change {
            CpusetChange::Create { job_cpuset, .. }
            | CpusetChange::RemoveLimits { job_cpuset }
            | CpusetChange::Remove { job_cpuset } => &job_cpuset.path,
            CpusetChange::MoveIn { to: path, .. } | CpusetChange::MoveBack { from: path, .. } => path,
        }
    }

    /// Returns the process that this action moves into or out of a cpuset. `None` if the action is another
    /// change, such as the creation of a cpuset.
    #[must_use]
    pub fn moved_process(&self) -> Option<ProcessId> {
        match &self.change {
            CpusetChange::MoveIn { process, .. } | CpusetChange::MoveBack { process, .. } => Some(*process),
            CpusetChange::Create { .. } | CpusetChange::RemoveLimits { .. } | CpusetChange::Remove { .. } => {
                None
            }
        }
    }
}

/// A planned change of a job's cpuset, or a move of one process into or out of the cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetChange {
    /// Creates the cgroup if it does not exist, and writes the settings of the cpuset. Repeating the change
    /// has no effect. Also used to change the settings of an existing cpuset.
    Create {
        /// The cpuset to create, with the path of its cgroup and its settings.
        job_cpuset: JobCpuset,
        /// The user id of the job's owner. It is stored in an extended attribute of the cgroup, for a later
        /// daemon whose journal is lost.
        owner: Uid,
        /// The processes that are moved into the cgroup when it is created. Only systemd
        /// ([`CgroupCreator::Systemd`]) uses this list, because systemd creates no scope without a process.
        initial_processes: Vec<ProcessId>,
    },
    /// Moves a process into the cpuset.
    MoveIn {
        /// The process to move.
        process: ProcessId,
        /// The path of the cgroup that contained the process at the last scan.
        from: String,
        /// The path of the cgroup of the job's cpuset.
        to: String,
    },
    /// Moves a process from the cpuset back to the cgroup in which it was before pjw moved it.
    MoveBack {
        /// The process to move.
        process: ProcessId,
        /// The path of the cgroup of the job's cpuset.
        from: String,
        /// The path of the cgroup in which the process was before pjw moved it.
        to: String,
    },
    /// Removes the limits of the cpuset, so that its processes may use all PUs and all memory again.
    RemoveLimits {
        /// The cpuset whose limits are removed.
        job_cpuset: JobCpuset,
    },
    /// Removes the cgroup of the cpuset. If the cgroup still contains processes, the kernel refuses the
    /// removal. The cgroup then stays, without limits on its PUs and memory.
    Remove {
        /// The cpuset to remove.
        job_cpuset: JobCpuset,
    },
}

/// The outcome of a [`CpusetAction`] (a change of a job's cpuset, or a move of a process into or out of the cpuset).
/// The change was made, was refused, or continues in the background. Or it was impossible: the process or the cgroup no
/// longer exists, or the process can't be moved at present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetOutcome {
    /// The change was made.
    Done {
        /// The PUs that the kernel allows in the cgroup now (`cpuset.cpus.effective`). `None` except after
        /// [`CpusetChange::Create`] and [`CpusetChange::RemoveLimits`].
        effective: Option<CpuSet>,
    },
    /// The process to move, or the cgroup to change, no longer exists.
    Gone,
    /// The kernel or systemd refused the change.
    Refused {
        /// The error and the remedy, in one sentence for users.
        reason: String,
    },
    /// The process was not moved, for a reason that is not the cgroup to which it should move. The move would wait for
    /// the lock of its memory (`mmap_lock`) and stop all forks of the machine meanwhile, or the thread that changes
    /// cpusets has ended. pjw tries the same move again after the next scan of all processes.
    NotMoved {
        /// The reason and the remedy, in one sentence for users.
        reason: String,
    },
    /// The change was not complete after the time that the caller wanted to wait. The change continues in the
    /// background. [`crate::ports::MachineInterface::take_finished_cpuset_changes`] returns its outcome when it is
    /// complete.
    Delayed,
}
