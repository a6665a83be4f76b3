//! Facts: the state of processes, cgroups and PUs as a scan read it.
//!
//! A [`crate::terms::scan::ScanRequest`] names what to scan. A [`Snapshot`] is the result. A full snapshot lists
//! every process of the node. A partial snapshot lists the processes that were scanned; a process that is not listed
//! is unchanged since the last scan. No fact depends on a decision of pjw: `phases::membership` decides to
//! which job a process belongs.

mod address_space;
mod idle_time;
mod login;
mod processes_only;

use alloc::sync::Arc;

use crate::basics::{
    CgroupId, Comm, CpuSet, Moment, Nanos, Pid, ProcessCgroups, ProcessId, Pu, StartTime, Tid, Uid,
    is_cgroup_within, prelude::*,
};
use crate::terms::job::{CpuRequest, JobId, JobSource};
use crate::terms::scan::ScanScope;

pub use address_space::{AddressSpaceCheck, AddressSpaceList, AddressSpaceUser, SharedAddressSpace};

/// The result of one scan of the machine: its processes, its cgroups and its online PUs (logical CPUs). A partial
/// snapshot contains only some processes. The daemon then treats all other processes as unchanged since the last scan.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The scope of the scan: all processes of the machine, or only the processes whose pids the scan request
    /// listed. If a scan of all processes was incomplete, the scope is `Partial` with the pids of the
    /// processes that could be read.
    pub scope: ScanScope,
    /// The time at which the scan began, as the time since boot and as the UTC time.
    pub taken_at: Moment,
    /// The PUs that were online when the scan was made.
    pub online: CpuSet,
    /// The processes that the scan read, by pid. If the scope is full, a process that is missing here has
    /// ended. If the scope is partial, processes of
    /// [`ScanRequest::idle_watch`](crate::terms::scan::ScanRequest::idle_watch) that the scan read are
    /// included too.
    pub processes: BTreeMap<Pid, Observed<Process>>,
    /// The cgroups that the scan read, by path. A cgroup that is missing here was not read.
    pub cgroups: BTreeMap<String, Observed<Cgroup>>,
    /// The affinity requests (calls of sched_setaffinity(2)) by programs since the last scan. The list has
    /// every call whose effect is visible in this snapshot, and perhaps later calls. Empty if affinity
    /// requests are not monitored.
    pub affinity_requests: Vec<AffinityRequest>,
    /// The reason why the scan is incomplete, such as that no file descriptor was free. `None` if the scan
    /// read everything that was requested. A process that is missing in an incomplete snapshot may still
    /// exist. An incomplete snapshot never has the scope `Full`.
    pub incomplete_reason: Option<String>,
    /// The processes that have ended, by pid, each with the time of the last check that found the process idle, in ns
    /// since boot. A process that was never found idle
    /// ([`ScanRequest::idle_watch`](crate::terms::scan::ScanRequest::idle_watch)) is missing here. The scan stores only
    /// the processes whose end it found itself. The processes in `reaped` are added when the CPU times are read.
    pub ended_idle_until: BTreeMap<Pid, Nanos>,
    /// The CPU times of processes, by pid. Empty after the scan. [`crate::usage_times::read_cpu_times`] reads the CPU
    /// times and stores them here.
    pub cpu_times: BTreeMap<Pid, ProcessCpuTimes>,
    /// The time at which all `cpu_times` had been read, in ns since boot. `None` if they were not read for this scan,
    /// or if the scan did not cover all processes of jobs
    /// ([`ScanRequest::covers_all_job_processes`](crate::terms::scan::ScanRequest::covers_all_job_processes)).
    pub cpu_times_read_until: Option<Nanos>,
    /// The processes of jobs that no longer existed when their CPU times were to be read for this snapshot. Their CPU
    /// times had been read before. Usually, their parents have waited for them (wait4(2)).
    pub reaped: BTreeSet<Pid>,
    /// The address spaces that several processes share. `None` if the scan did not read this list. The list of the
    /// earlier scan then stays valid.
    pub address_spaces: Option<Arc<AddressSpaceList>>,
}

/// The CPU time that a process has used since its start, and the CPU time of its ended children, in ns. The
/// kernel adds the CPU time of a child to the second value when the process waits for the child (wait4(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessCpuTimes {
    /// The start time of the process, which differs from that of an earlier process with the same pid.
    pub start: StartTime,
    /// The CPU time that all threads of the process used since its start, including ended threads, in ns.
    pub own_ns: u64,
    /// The CPU time of the ended children for which the process waited (wait4(2)), in ns. It includes the ended
    /// children of these children, if the children had waited for them. The kernel reports it in clock ticks of 10 ms
    /// (`cutime` plus `cstime`, proc_pid_stat(5)).
    pub children_ns: u64,
}

/// A call of sched_setaffinity(2) by a program, as a BPF program in the kernel reported it. The kernel carried out the
/// call, or refused it because the mask and the thread's cpuset have no PU (logical CPU) in common. pjw uses these
/// calls to report which program changed a mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AffinityRequest {
    /// The thread that called sched_setaffinity(2).
    pub caller: Tid,
    /// The pid of the process that made the call. The process may have ended since the call.
    pub caller_pid: Pid,
    /// The pid of the parent of the calling process, at the time of the call.
    pub caller_parent: Pid,
    /// The name (comm) of the calling thread at the time of the call.
    pub comm: Comm,
    /// The time of the call, in ns since boot.
    pub called_at: Nanos,
    /// The tid of the thread whose mask is set, as the caller passed it. If the caller runs in a container,
    /// this tid is valid only in the pid namespace of the container. `None` if the caller set its own mask.
    pub target: Option<Tid>,
    /// The mask that was passed to sched_setaffinity(2). It may contain offline PUs and PUs that do not
    /// exist.
    pub requested_mask: CpuSet,
    /// Whether the kernel refused the call.
    pub refused: bool,
}

/// What a scan found about a process or a cgroup: either the facts that the scan read, or that the process or
/// cgroup does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    /// The process or cgroup exists, and these facts were read.
    Present(T),
    /// The process or cgroup does not exist, or it ended while the scan was reading it.
    Gone,
}

/// A process, as a scan read it. The fields `attributes` and `batch_identity` rarely change, and are `None` if
/// they are unchanged since the last scan. `threads` is `None` if the scan did not read the threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The pid of the parent process. If the parent has ended, the pid of the process that adopted this
    /// process: process 1 or a subreaper (prctl(2), `PR_SET_CHILD_SUBREAPER`).
    pub parent: Pid,
    /// The id of the process group (setpgid(2)).
    pub process_group: Pid,
    /// The id of the session (setsid(2)).
    pub session: Pid,
    /// The real user id of the process.
    pub uid: Uid,
    /// The name of the first thread (`/proc/PID/comm`).
    pub comm: Comm,
    /// Whether the process is a kernel thread (`PF_KTHREAD`). A kernel thread never belongs to a job.
    pub is_kernel_thread: bool,
    /// The effective affinity mask of the first thread (sched_getaffinity(2)). `None` if it could not be
    /// read.
    pub first_thread_mask: Option<CpuSet>,
    /// The path of the cgroup of the process in the hierarchy that has the cpuset controller. This is the v1
    /// cpuset hierarchy if it is mounted, otherwise the v2 hierarchy. `None` if the process has no cgroup in
    /// this hierarchy.
    pub cgroup: Option<Arc<str>>,
    /// The path of the cgroup of the process in the v1 hierarchy `name=systemd`, in which systemd has its units. `None`
    /// if the process has no cgroup there: pjw then takes the systemd unit from the path in `cgroup`.
    pub unit_cgroup: Option<Arc<str>>,
    /// The attributes of the process by which a batch system may be recognised. `None` if they are unchanged
    /// since the last scan.
    pub attributes: Option<BatchAttributes>,
    /// Whether the environment and the command line could not be read, because the memory of the process was locked or
    /// too many readings waited for locked memory. `attributes` then has their last known values.
    pub has_unread_environment: bool,
    /// What `attributes` says about batch systems: the role of the process in a batch system, and the jobs that
    /// the attributes name. `None` if the attributes are unchanged since the last scan.
    pub batch_identity: Option<BatchIdentity>,
    /// All threads of the process, or only its active threads (`has_all_threads`). `None` if the scan did not read the
    /// threads.
    pub threads: Option<Vec<Thread>>,
    /// Whether `threads` has all threads of the process. If false, it has only the active threads that the scan
    /// request named, and nothing is known of the others.
    pub has_all_threads: bool,
    /// The time of the last check before this scan, if this check found that the process was idle, in ns
    /// since boot. The process is known to have used no CPU time until this time. (A check compares the CPU
    /// time of the process with its CPU time at the previous check.) The field is set only if this scan found
    /// that the process was no longer idle, and read the threads of the process. `None` in all other cases.
    pub idle_until: Option<Nanos>,
}

/// A thread, as a scan read it: its effective affinity mask, its state, and the CPU time that it has used so
/// far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// The thread id (tid), as seen in the pid namespace in which pjw runs.
    pub tid: Tid,
    /// The time at which the thread started, in clock ticks of 10 ms since boot.
    pub start: StartTime,
    /// The name (comm) of the thread, at most 15 bytes.
    pub comm: Comm,
    /// The kernel's letter for the state of the thread: R (running), S (sleeping), Z (zombie) and so on
    /// (proc(5)).
    pub state: char,
    /// The PU on which the thread last ran before the scan.
    pub last_cpu: Pu,
    /// The time for which the thread has run since its start, in ns. The source is `schedstat`. If the kernel
    /// does not provide `schedstat`, it is the sum of user time and system time.
    pub run_ns: u64,
    /// The time for which the thread has waited on a run queue since its start, in ns. The source is
    /// `schedstat`. If the kernel does not provide `schedstat`, the value is 0.
    pub wait_ns: u64,
    /// The effective affinity mask (sched_getaffinity(2)).
    pub effective_mask: CpuSet,
}

/// The attributes of a process by which its batch system and its job can be recognised: its cgroups,
/// environment, supplementary groups and command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchAttributes {
    /// The cgroups of the process in all hierarchies.
    pub cgroups: ProcessCgroups,
    /// The environment variables by which jobs are recognised, with their values. Empty if the environment
    /// can't be read.
    pub environ: BTreeMap<String, String>,
    /// The supplementary group ids of the process. Grid Engine gives each job a supplementary group of its
    /// own.
    pub supplementary_groups: Vec<u32>,
    /// The first 256 bytes of the command line, with spaces between the arguments.
    pub command_line: String,
}

/// What the attributes of a process (such as its cgroups and its environment) say about batch systems: the
/// role of the process in a batch system, and the jobs whose ids the attributes contain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchIdentity {
    /// The role of the process in a batch system: an ordinary process, a launcher of jobs, or a helper.
    pub role: BatchRole,
    /// The jobs that attributes of the process name, such as a cgroup path or an environment variable. For each
    /// batch system there is at most one reference of each [`JobIdAttribute`].
    pub job_references: Vec<JobReference>,
    /// The PUs (logical CPUs) on which `pjwctl spawn` started the process, or an ancestor of the process. They are in
    /// the environment variable `PJW_CPUS`, beside `PJW_RANK`. `None` if the process does not have both variables, or
    /// if the text of `PJW_CPUS` is no list of CPUs.
    pub start_cpus: Option<CpuSet>,
}

impl BatchIdentity {
    /// Returns the job in whose cgroup the process is. Only cgroups that batch systems made for jobs count. `None` if
    /// the process is in no such cgroup.
    pub(crate) fn job_of_cgroup(&self) -> Option<&JobId> {
        let reference = self
            .job_references
            .iter()
            .find(|reference| matches!(reference.kind, JobIdAttribute::Cgroup(_)))?;
        Some(&reference.job)
    }

    /// Iterates over the jobs that environment variables of the process name, and whose batch system starts
    /// each job in a process group or in a session of its own. Each item says whether this is a process group
    /// or a session.
    pub(crate) fn jobs_with_own_grouping(&self) -> impl Iterator<Item = (&JobId, JobProcessGrouping)> {
        self.job_references.iter().filter_map(|reference| match reference.kind {
            JobIdAttribute::Environment { process_scope: own } if own != JobProcessGrouping::Neither => {
                Some((&reference.job, own))
            }
            _ => None,
        })
    }
}

/// The role of a process in a batch system: an ordinary process of a user, a launcher of jobs, or a helper of
/// the batch system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchRole {
    /// An ordinary process of a user, which is not part of a batch system.
    #[default]
    Ordinary,
    /// A daemon of this batch system whose children are processes of jobs (slurmstepd, res, pbs_mom and
    /// others). pjw derives the role from the name of the process. Because any user can give this name to a
    /// process, pjw trusts the role only if the process runs as root or as another user than the process of
    /// the job.
    Launcher(JobSource),
    /// A helper of this batch system that runs in the cgroup of a job. The process never belongs to the job.
    Helper(JobSource),
}

/// A reference to a job in an attribute of a process, such as a cgroup or an environment variable. A reference may
/// be wrong or forged. So a reference without further evidence does not make the process a member of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobReference {
    /// The job whose id the attribute contains.
    pub job: JobId,
    /// The attribute that contains the id of the job.
    pub kind: JobIdAttribute,
    /// The number of cores or PUs of the job on this machine. `None` if the attribute does not contain the
    /// number.
    pub cpu_request: Option<CpuRequest>,
    /// The number of tasks (processes that the scheduler starts) of the job on this machine. `None` if the attribute
    /// does not contain the number.
    pub tasks: Option<u32>,
}

/// The attribute of a process that contains the id of a job: a cgroup or an environment variable. pjw trusts the cgroup
/// more than the environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobIdAttribute {
    /// The cgroup that the batch system made for the job, with the path of this cgroup. The process is
    /// in this cgroup or in a cgroup below it, such as the cgroup of a job step.
    Cgroup(String),
    /// An environment variable of the process. pjw trusts an environment variable less than a cgroup, because any user
    /// can set environment variables.
    Environment {
        /// Whether the batch system that sets the variable starts each job in a process group of its own, in a session
        /// of its own, or in neither. All processes in such a process group or session belong to the job.
        process_scope: JobProcessGrouping,
    },
}

/// Whether a batch system starts each job in a process group of its own (setpgid(2)), in a session of its own
/// (setsid(2)), or in neither. Every process in such a process group or session belongs to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobProcessGrouping {
    /// Each job has a process group of its own, but no session of its own. (LSF: all jobs are in the session
    /// of sbatchd.)
    ProcessGroup,
    /// Each job has a session of its own. (PBS, Grid Engine.)
    Session,
    /// A job has neither a process group nor a session of its own.
    Neither,
}

/// A cgroup, as a scan read it: its path, its cpuset, its CPU and memory use, and whether it contains processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// The inode and the path of the cgroup.
    pub id: CgroupId,
    /// The PUs to which the cpuset restricts the cgroup. `None` if the cpuset does not restrict the PUs.
    ///
    /// - cgroup v2: `cpuset.cpus.effective`. `None` if `cpuset.cpus` is not set.
    /// - cgroup v1: `cpuset.cpus`. `None` if the root cgroup has the same PUs.
    pub restricted_cpus: Option<CpuSet>,
    /// Whether the cgroup or a cgroup below it contains a process.
    pub populated: bool,
    /// The settings of the cgroup's cpuset. `None` if the hierarchy has no cpuset controller, or if the
    /// controller is not enabled in this cgroup.
    pub cpuset: Option<Cpuset>,
    /// The CPU time and the memory that the processes in the cgroup used since the cgroup was created.
    pub usage: CgroupUsage,
}

/// The total CPU time and the peak memory use of all processes in a cgroup since the cgroup was created, and the memory
/// limit of the cgroup. Processes that have ended are included.
#[derive(Debug, Clone, Copy, Default)]
pub struct CgroupUsage {
    /// The CPU time, in ns: `usage_usec` in `cpu.stat` (cgroup v2). `None` if the kernel does not count it for this
    /// cgroup.
    pub cpu_ns: Option<u64>,
    /// The largest memory use, in bytes: `memory.peak` (cgroup v2, Linux 5.19) or `memory.max_usage_in_bytes` (cgroup
    /// v1). `None` if the kernel does not measure it for this cgroup.
    pub memory_peak: Option<u64>,
    /// The limit of the memory use, in bytes: `memory.max` (cgroup v2) or `memory.limit_in_bytes` (cgroup v1). `None`
    /// if this cgroup has no limit of its own.
    pub memory_limit: Option<u64>,
}

/// All values are equal: a cgroup in which only more CPU time was used has not changed.
impl PartialEq for CgroupUsage {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for CgroupUsage {}

impl Cgroup {
    /// Returns whether the cgroup certainly has no cpuset. False if the cgroup has a cpuset, or if the scan
    /// could not read the cgroup.
    #[must_use]
    pub fn has_no_cpuset(&self) -> bool {
        self.cpuset.is_none() && self.id.inode != 0
    }
}

/// The cpuset of a cgroup, as a scan read it from the files of the cgroup: the requested PUs (logical CPUs) and NUMA
/// nodes, and the effective PUs. The effective PUs are the PUs that the kernel allows to the processes in the cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpuset {
    /// `cpuset.cpus`: the PUs that were requested for the cpuset. Empty in cgroup v2 if no PUs were
    /// requested.
    pub cpus: CpuSet,
    /// The PUs that the kernel allows in the cpuset. v2: `cpuset.cpus.effective`; v1:
    /// `cpuset.effective_cpus`.
    pub effective_cpus: CpuSet,
    /// `cpuset.mems`: the kernel's ids of the NUMA nodes that were requested for the cpuset. Empty in cgroup
    /// v2 if no NUMA nodes were requested.
    pub mems: CpuSet,
    /// Whether the cpuset is a valid isolated partition (`cpuset.cpus.partition` reads `isolated`).
    pub isolated: bool,
}

impl Process {
    /// Returns whether the process is in the cgroup at the path `cgroup`, or in a cgroup below it.
    #[must_use]
    pub fn is_in_cgroup(&self, cgroup: &str) -> bool {
        self.cgroup.as_deref().is_some_and(|own| is_cgroup_within(own, cgroup))
    }
}

impl<T> Observed<T> {
    /// Returns the facts about the process or cgroup, as the scan read them. Returns `None` if the process or
    /// cgroup does not exist.
    pub fn present(&self) -> Option<&T> {
        match self {
            Observed::Present(facts) => Some(facts),
            Observed::Gone => None,
        }
    }
}

/// The result of [`MachineInterface::probe_masks`](crate::ports::MachineInterface::probe_masks): the processes that
/// were just forked and have a wrong affinity mask. The function reads only the masks. So pjw can correct a wrong mask
/// earlier than by a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskProbeResult {
    /// The time at which the masks were read, as the time since boot and as the UTC time.
    pub taken_at: Moment,
    /// The PUs (logical CPUs) that were online at the latest scan. The check itself does not read which PUs
    /// are online.
    pub online: CpuSet,
    /// The processes whose effective affinity mask differs from the mask that they should have
    /// ([`ExpectedMask`]).
    pub mismatches: Vec<ForkMaskMismatch>,
}

/// A process that was just forked by a process of a job and that has a wrong affinity mask: its mask is not the set of
/// online PUs (logical CPUs) that the job holds. Found by
/// [`MachineInterface::probe_masks`](crate::ports::MachineInterface::probe_masks).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkMaskMismatch {
    /// The pid and the start time of the process. The start time is computed from the time of the fork event,
    /// and may differ by one clock tick (10 ms) from the start time in `/proc/PID/stat`.
    pub id: ProcessId,
    /// The effective affinity mask that the first thread of the process really has.
    pub effective_mask: CpuSet,
}

/// The affinity mask that a process should have after its fork, and the time of the fork. A process that is forked in a
/// job should have the online PUs (logical CPUs) that the job holds. The daemon compares this mask with the mask that
/// the process really has ([`MachineInterface::probe_masks`](crate::ports::MachineInterface::probe_masks)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedMask {
    /// The affinity mask that the process should have: the online PUs that the job of the process holds.
    pub mask: CpuSet,
    /// The time of the fork event, in ns since boot.
    pub forked_at: Nanos,
}

/// A process event of the kernel: a process or thread was forked or exited, or a process executed a program
/// or started a session (process connector, include/uapi/linux/cn_proc.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEvent {
    /// A process was forked.
    Fork {
        /// The pid of the parent process.
        parent: Pid,
        /// The tid of the thread of the parent that called fork(2).
        creator: Tid,
        /// The pid of the new process.
        child: Pid,
        /// The time of the event, in ns since boot.
        at: Nanos,
    },
    /// A process created a further thread.
    ThreadFork {
        /// The pid of the process.
        pid: Pid,
        /// The tid of the new thread.
        tid: Tid,
    },
    /// A process executed another program (execve(2)).
    Exec {
        /// The pid of the process.
        pid: Pid,
    },
    /// A process started a session of its own (setsid(2)).
    Session {
        /// The pid of the process.
        pid: Pid,
    },
    /// The first thread of a process exited. Other threads of the process may still run.
    Exit {
        /// The pid of the process.
        pid: Pid,
    },
    /// A thread exited that is not the first thread of its process.
    ThreadExit {
        /// The pid of the process.
        pid: Pid,
        /// The tid of the thread that exited.
        tid: Tid,
    },
}

/// The process events that one call of
/// [`MachineInterface::read_process_events`](crate::ports::MachineInterface::read_process_events) read from
/// the kernel, and whether events were lost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessEventBatch {
    /// The process events, in the order in which the kernel reported them.
    pub events: Vec<ProcessEvent>,
    /// Whether at least one event is missing from `events`, because the kernel dropped the event or because
    /// events could not be read. Can be true even if `events` is empty.
    pub events_lost: bool,
    /// Whether the kernel may drop further events after these. When its buffer for events overflows, the
    /// kernel drops all new events until the daemon has read the whole buffer.
    pub still_dropping: bool,
}
