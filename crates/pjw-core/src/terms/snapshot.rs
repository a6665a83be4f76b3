//! Facts: the state of processes, cgroups and PUs as a scan read it.
//!
//! A [`crate::terms::scan::ScanRequest`] names what to scan. A [`Snapshot`] is the result. A full snapshot lists
//! every process of the node. A partial snapshot lists the processes that were scanned; a process that is not listed
//! is unchanged since the last scan. No fact depends on a decision of pjw: `phases::membership` decides to
//! which job a process belongs.

use alloc::sync::Arc;

use crate::basics::{
    CgroupId, Comm, CpuSet, Moment, Nanos, Pid, ProcessId, Pu, StartTime, Tid, Uid, is_within, prelude::*,
};
use crate::terms::job::{Amount, JobId, Source};
use crate::terms::scan::ScanScope;

/// The result of one scan of the node: its processes, its cgroups and its online PUs. A partial snapshot lists only
/// some processes; all others count as unchanged.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Whether the scan read all processes of the node, or only some.
    pub scope: ScanScope,
    /// The time at which the scan began, on two clocks.
    pub taken_at: Moment,
    /// The PUs that were online at the scan.
    pub online: CpuSet,
    /// The processes that the scan read, by pid. In a full snapshot, a process that is not listed has ended.
    pub processes: BTreeMap<Pid, Observed<Process>>,
    /// The cgroups that the scan read, by path. A cgroup that is not listed was not read.
    pub cgroups: BTreeMap<String, Observed<Cgroup>>,
    /// The affinity requests of the scanned processes since the last scan: every call of sched_setaffinity(2) whose
    /// result the scan shows, and maybe later calls. Empty if affinity requests are not monitored.
    pub affinity_requests: Vec<AffinityRequest>,
    /// The reason why some things could not be scanned although they exist, such as no free file descriptor. `None`
    /// if everything was scanned. Nothing may be concluded from what an incomplete snapshot does not list, and it
    /// never counts as full.
    pub incomplete: Option<String>,
}

/// A call of sched_setaffinity(2) by a program. The kernel carried the call out, or refused it because the mask and
/// the thread's cpuset have no PU in common. It tells which program changed a mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AffinityRequest {
    /// The thread that called sched_setaffinity(2).
    pub caller: Tid,
    /// The process of the thread that called. It may have ended since then.
    pub process: Pid,
    /// The parent of the calling process at the time of the call.
    pub parent: Pid,
    /// The name (comm) of the calling thread at the time of the call.
    pub comm: Comm,
    /// The time of the call, in ns since boot.
    pub at: Nanos,
    /// The thread whose mask the caller set. The number is from the caller's pid namespace: in a container, the same
    /// number may be another thread on the node. `None` if the caller set its own mask.
    pub target: Option<Tid>,
    /// The mask that was passed to sched_setaffinity(2). It may contain offline PUs and PUs that do not exist.
    pub cpus: CpuSet,
    /// Whether the kernel refused the call.
    pub refused: bool,
}

/// The result of looking for a process or cgroup in a scan: its properties, or that it does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    /// The thing exists, with these properties.
    Present(T),
    /// The thing does not exist, or ended while it was being read.
    Gone,
}

/// A process, as a scan read it from /proc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The process id of the parent. If the parent has ended, 1 or a subreaper.
    pub parent: Pid,
    /// The id of the process group, see setpgid(2).
    pub group: Pid,
    /// The id of the session, see setsid(2).
    pub session: Pid,
    /// The real user id of the process.
    pub uid: Uid,
    /// The name of the first thread (`/proc/PID/comm`).
    pub comm: Comm,
    /// Whether the process is a kernel thread (`PF_KTHREAD`). A kernel thread never belongs to a job.
    pub is_kernel_thread: bool,
    /// The affinity mask of the first thread. `None` if the mask could not be read.
    pub mask: Option<CpuSet>,
    /// The cgroup of the process in the hierarchy that has the cpuset controller: v1 if mounted there, else v2.
    /// `None` if the process has no cgroup there.
    pub cgroup: Option<Arc<str>>,
    /// The attributes that a batch system may have set on the process. `None` if unchanged since the last scan.
    pub attributes: Option<BatchAttributes>,
    /// The jobs that the attributes name, as pjw-sources recognised them. `None` if unchanged since the last scan.
    pub job_marks: Option<JobMarks>,
    /// The threads of the process, the first thread included. `None` if the scan did not read the threads.
    pub threads: Option<Vec<Thread>>,
    /// Until when the process is known to have been idle: the time of the last check, in ns since boot, if that
    /// check found no CPU time used since the check before. `None` if it found some, or if the process was never
    /// checked.
    pub idle_until: Option<Nanos>,
}

/// A thread, as a scan read it: its affinity mask, its state, and its CPU time so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// The thread id (tid), by the numbers of pjw's pid namespace.
    pub tid: Tid,
    /// The time at which the thread started, to 10 ms.
    pub start: StartTime,
    /// The name (comm) of the thread, at most 15 bytes.
    pub comm: Comm,
    /// The kernel's letter for the state of the thread: R, S, D, T, Z, …
    pub state: char,
    /// The PU on which the thread ran last before the scan.
    pub last_cpu: Pu,
    /// The time for which the thread has run since its start, in ns: from `schedstat`, or user and system time if
    /// there is no `schedstat`.
    pub run_ns: u64,
    /// The time for which the thread has waited on a run queue since its start, in ns. 0 if there is no
    /// `schedstat`.
    pub wait_ns: u64,
    /// The effective affinity mask (sched_getaffinity(2)).
    pub effective_mask: CpuSet,
}

/// The attributes of a process by which its batch system and its job are recognised: cgroups, environment,
/// supplementary groups and command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchAttributes {
    /// The lines of `/proc/PID/cgroup`, as (controllers, path). The controllers of v2 are empty.
    pub cgroups: Vec<(String, String)>,
    /// The environment variables that a source of jobs needs. Empty if the environment can't be read.
    pub environ: BTreeMap<String, String>,
    /// The supplementary group ids of the process. Grid Engine gives each job a supplementary group of its own.
    pub groups: Vec<u32>,
    /// The beginning of the command line: at most 256 bytes, with spaces between the arguments.
    pub command_line: String,
}

impl BatchAttributes {
    /// Returns the cgroup path of the process in the hierarchy that has the cpuset controller: cgroup v1 if the
    /// controller is mounted there, else cgroup v2. `None` if the path is unknown.
    #[must_use]
    pub fn cpuset_path(&self) -> Option<&str> {
        let has = |controllers: &str| controllers.split(',').any(|controller| controller == "cpuset");
        let legacy = self.cgroups.iter().find(|(controllers, _)| has(controllers));
        let line = legacy.or_else(|| self.cgroups.iter().find(|(controllers, _)| controllers.is_empty()));
        line.map(|(_, path)| path.as_str())
    }
}

/// What the attributes of a process (such as cgroups and environment) say about its batch system: the role of the
/// process there, and the marks that name jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobMarks {
    /// Whether the process is an ordinary process, a launcher of jobs, or a helper of a batch system.
    pub role: BatchRole,
    /// The jobs that the attributes name: at most one for each source and each kind of attribute.
    pub marks: Vec<JobMark>,
}

impl JobMarks {
    /// Iterates over the jobs that the environment names, each with the unit of processes that belongs to the job as a
    /// whole.
    pub(crate) fn own_units(&self) -> impl Iterator<Item = (&JobId, JobUnit)> {
        self.marks.iter().filter_map(|mark| match mark.kind {
            MarkKind::Environment { own } if own != JobUnit::Nothing => Some((&mark.job, own)),
            _ => None,
        })
    }
}

/// The role of a process in a batch system: an ordinary process of a user, a launcher of jobs, or a helper of the
/// batch system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchRole {
    /// A user's process: the batch system did not start it for itself.
    #[default]
    Ordinary,
    /// The scheduler's own process whose children are job processes (slurmstepd, res, pbs_mom, …). Only the name was
    /// compared. `phases::membership` decides by the user of the process whether the name is trusted.
    Launcher(Source),
    /// A helper of the scheduler inside a job's cgroup. Never a member.
    Helper(Source),
}

/// A mark of a process that names a job, such as a cgroup or an environment variable. The mark may be wrong or
/// forged, so it alone does not make the process a member of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobMark {
    /// The job that the mark names.
    pub job: JobId,
    /// Where the mark was found: in the cgroup, a supplementary group or an environment variable.
    pub kind: MarkKind,
    /// The number of the job's cores on this node. `None` if the attribute does not say.
    pub amount: Option<Amount>,
}

/// The kind of a mark that names a job: a cgroup, a supplementary group or an environment variable. Ordered from most
/// to least trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MarkKind {
    /// The cgroup that the scheduler made for the job. The path is that of the job's cgroup; steps and tasks may have
    /// cgroups below.
    Cgroup(String),
    /// The supplementary group that Grid Engine gave to the job.
    SupplementaryGroup(u32),
    /// An environment variable. Any user can set it.
    Environment {
        /// Whether the source makes a process group or a session for each job.
        own: JobUnit,
    },
}

/// The unit of processes that a batch system creates for each job: a process group, a session, or neither. All
/// processes in the unit belong to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobUnit {
    /// The process group. (LSF: all jobs share the session of sbatchd.)
    Group,
    /// The session. (PBS, Grid Engine.)
    Session,
    /// Neither the process group nor the session belongs to one job.
    Nothing,
}

/// A cgroup, as a scan read it: its identity, its cpuset, and whether it contains processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// The inode and the path of the cgroup.
    pub id: CgroupId,
    /// The effective PUs of the cpuset (`cpuset.cpus.effective`). `None` if `cpuset.cpus` of the cgroup is not set.
    pub cpus: Option<CpuSet>,
    /// Whether the cgroup or one of its descendants contains a process.
    pub populated: bool,
    /// The cpuset of the cgroup. `None` if the hierarchy has no cpuset controller, or the controller is off in this
    /// cgroup.
    pub cpuset: Option<Cpuset>,
}

impl Cgroup {
    /// Whether it is certain that this cgroup has no cpuset, so that it limits no process. False for a cgroup that
    /// the scan could not read (its inode is 0).
    #[must_use]
    pub fn has_no_cpuset(&self) -> bool {
        self.cpuset.is_none() && self.id.inode != 0
    }
}

/// The settings of a cpuset, as a scan read them from the files of its cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpuset {
    /// `cpuset.cpus`: the requested PUs. Empty in cgroup v2 if no PUs were requested.
    pub cpus: CpuSet,
    /// The PUs that the kernel allows: v2 `cpuset.cpus.effective`, v1 `cpuset.effective_cpus`.
    pub effective: CpuSet,
    /// `cpuset.mems`: the requested NUMA nodes. Empty in cgroup v2 if no NUMA nodes were requested.
    pub mems: CpuSet,
    /// Whether the cpuset is an isolated partition, and the kernel accepts it as valid.
    pub isolated: bool,
}

impl Process {
    /// Whether the process is in the cgroup at this path, or in one of the cgroups below.
    #[must_use]
    pub fn is_within(&self, cgroup: &str) -> bool {
        self.cgroup.as_deref().is_some_and(|at| is_within(at, cgroup))
    }
}

impl<T> Observed<T> {
    /// Returns the properties of the process or cgroup that was looked for; `None` if it does not exist.
    pub fn present(&self) -> Option<&T> {
        match self {
            Observed::Present(thing) => Some(thing),
            Observed::Gone => None,
        }
    }
}

/// The result of a mask probe: a quick reading, without a scan, of the affinity masks of processes that were just
/// forked. Wrong masks can so be corrected at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskProbe {
    /// The time at which the masks were read, on two clocks.
    pub taken_at: Moment,
    /// The PUs that were online at the last scan.
    pub online: CpuSet,
    /// The forked processes whose mask is not the expected mask. Processes with the expected mask are left out.
    pub mismatches: Vec<MismatchedProcess>,
}

/// A forked process that has another affinity mask than expected, and the mask that it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MismatchedProcess {
    /// The pid of the process, and its start time as the fork event gives it.
    pub id: ProcessId,
    /// The effective affinity mask of the first thread of the process.
    pub mask: CpuSet,
}

/// The affinity mask that a forked process should have, and the time of the fork. It is compared with the real mask
/// in a mask probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedMask {
    /// The affinity mask that the process should have: the PUs that its job holds.
    pub mask: CpuSet,
    /// The time of the fork event, in ns since boot.
    pub born: Nanos,
}

/// A process event of the kernel: a process or thread was forked, executed a program, or exited (process connector,
/// include/uapi/linux/cn_proc.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEvent {
    /// A process was born.
    Fork {
        /// The parent process.
        parent: Pid,
        /// The thread of the parent that called fork(2).
        creator: Tid,
        /// The new process.
        child: Pid,
        /// The time of the event, since boot.
        at: Nanos,
    },
    /// A thread was born that is not the first one of its process.
    ThreadFork {
        /// The process.
        pid: Pid,
        /// The new thread.
        tid: Tid,
    },
    /// A process executes another program.
    Exec {
        /// The process.
        pid: Pid,
    },
    /// A process started a session of its own.
    Session {
        /// The process.
        pid: Pid,
    },
    /// The first thread of a process ended.
    Exit {
        /// The process.
        pid: Pid,
    },
    /// A thread ended that was not the first one of its process.
    ThreadExit {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Tid,
    },
}

/// The process events that one call read from the kernel, in their order, and whether the kernel lost events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The process events, in the order in which the kernel reported them.
    pub events: Vec<ProcessEvent>,
    /// Whether the kernel lost an event before the last event in `events`.
    pub lost: bool,
    /// Whether the kernel still drops events. It does so from the moment its buffer overflows until the buffer has
    /// been read empty.
    pub congested: bool,
}
