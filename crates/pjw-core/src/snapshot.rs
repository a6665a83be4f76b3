//! Facts: what was looked at, and what was seen there.
//!
//! A [`Look`] says where to look, a [`Snapshot`] what was found. A full snapshot lists every process of the
//! node; a partial one lists what it looked at, and whatever it doesn't list is unchanged since the last look.
//! Nothing here is an opinion: to which job a process belongs is decided in [`crate::membership`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cpuset::{CpuSet, Pu};
use crate::job::{Amount, JobId, Source};
use crate::process::{CgroupId, Comm, Pid, ProcessId, StartTime, Tid, Uid};
use crate::wall::lies_in;

/// Nanoseconds since boot, suspended time included (`CLOCK_BOOTTIME`): it never goes back and survives a
/// restart of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// Milliseconds since 1970, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

/// One moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// For differences.
    pub since_boot: Nanos,
    /// For people.
    pub wall: UnixMillis,
}

/// Where to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every process of the node.
    Full,
    /// These processes only.
    Partial(BTreeSet<Pid>),
}

/// An order to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Which processes.
    pub scope: Scope,
    /// Of which processes every thread is wanted. In a partial look, those named in the scope always are.
    pub threads_of: BTreeSet<Pid>,
    /// Which cgroup directories are wanted, by their path below the mount point.
    pub cgroups: BTreeSet<String>,
    /// Who is to be looked at with all threads if it ran since the last look, or if a thread of it may run elsewhere than it
    /// should, and else left alone. A full look checks the masks of all of them, a partial one those of some in turn. Nothing
    /// may be concluded from who is not in the snapshot of these.
    pub watch: Arc<Watch>,
}

/// Sleepers: processes that need a look only once they run again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watch {
    /// By the cgroup they live in, below which nobody else's processes are; each listed once.
    pub groups: Vec<Sleepers>,
    /// Processes in nobody's job: who of them ran since they were last asked, or is gone, is looked at, without its threads.
    pub strangers: Vec<Pid>,
}

/// Processes that need a look only once they run again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sleepers {
    /// Their job's cgroup: if that used no CPU, none of them did. `None` if they have none of their own.
    pub cgroup: Option<String>,
    /// Where all their threads may run, as far as anybody knows, if nothing but their masks keeps them there: somebody else
    /// may change these. `None` if a cpuset keeps them, or nothing.
    pub within: Option<CpuSet>,
    /// Their numbers.
    pub pids: Vec<Pid>,
}

/// What was seen.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Where was looked.
    pub scope: Scope,
    /// When.
    pub taken: Moment,
    /// The PUs that are online.
    pub online: CpuSet,
    /// The processes that were looked at. In a full snapshot, who is not listed is gone.
    pub processes: BTreeMap<Pid, Seen<Process>>,
    /// The cgroups that were looked at.
    pub cgroups: BTreeMap<String, Seen<Cgroup>>,
    /// Who asked for which PUs since the last look, wherever this one looked: every call whose result is seen in it, and
    /// maybe later ones. Empty where nobody tells.
    pub asked: Vec<Asked>,
    /// Why something was not looked at though it is there (no descriptor left, no memory); such a look is never
    /// full, and nothing may be concluded from what it doesn't list.
    pub blind: Option<String>,
}

/// A call of sched_setaffinity(2) that the kernel carried out, or refused because nothing of what was asked for is in the
/// cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The thread that called.
    pub caller: Tid,
    /// Its process, which may be gone by now.
    pub process: Pid,
    /// The parent that its process had then.
    pub parent: Pid,
    /// The name that the thread had then.
    pub comm: Comm,
    /// When, since boot.
    pub at: Nanos,
    /// For which thread, as the caller knows its number, which in a container may be another's here; `None` for itself.
    pub target: Option<Tid>,
    /// What it asked for; PUs that don't exist, or are off, may be among it.
    pub cpus: CpuSet,
    /// Whether the kernel refused.
    pub refused: bool,
}

/// Whether a thing that was looked for is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen<T> {
    /// It is, and looks like this.
    Here(T),
    /// It is not, or vanished while it was read, which is the same.
    Gone,
}

/// A process, as one look found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Who it is.
    pub id: ProcessId,
    /// Its parent's number. 1 (or a subreaper) once the parent died.
    pub parent: Pid,
    /// Its process group.
    pub group: Pid,
    /// Its session.
    pub session: Pid,
    /// Its real user.
    pub uid: Uid,
    /// Its name.
    pub comm: Comm,
    /// Whether it is a kernel thread (`PF_KTHREAD`), which no job ever owns.
    pub kernel: bool,
    /// The mask of its first thread; `None` if it could not be read.
    pub mask: Option<CpuSet>,
    /// Its cgroup in the hierarchy that has the cpusets (v1's, or else v2's); `None` where there is none.
    pub cgroup: Option<Arc<str>>,
    /// What batch systems may have left on it; `None` if unchanged since the last look.
    pub marks: Option<Marks>,
    /// What [`Marks`] mean, filled in by pjw-sources; `None` if unchanged since the last look.
    pub claims: Option<Claims>,
    /// Its threads, the first one included; `None` if they were not looked at.
    pub threads: Option<Vec<Thread>>,
    /// When it was last seen not to have run since the look before; `None` if it was looked at each time.
    pub quiet_until: Option<Nanos>,
}

/// A thread, as one look found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// Its number.
    pub tid: Tid,
    /// When it started.
    pub start: StartTime,
    /// Its name.
    pub comm: Comm,
    /// The kernel's letter for its state: R, S, D, T, Z, …
    pub state: char,
    /// The PU it last ran on.
    pub last_cpu: Pu,
    /// How long it has run, in ns (`schedstat`, or user and system time where that is missing).
    pub run_ns: u64,
    /// How long it has waited on a run queue, in ns; 0 where `schedstat` is missing.
    pub wait_ns: u64,
    /// Where it may run (`sched_getaffinity`).
    pub allowed: CpuSet,
}

/// What a batch system may leave on a process: raw, as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// The lines of `/proc/PID/cgroup`, as (controllers, path); the controllers of v2 are empty.
    pub cgroups: Vec<(String, String)>,
    /// Those variables of its environment that a source asked for. Empty if the environment can't be read.
    pub environ: BTreeMap<String, String>,
    /// Its supplementary groups (Grid Engine marks each job with one of its own).
    pub groups: Vec<u32>,
    /// The first bytes of its command line, blanks between the words.
    pub command_line: String,
}

impl Marks {
    /// The path in the hierarchy that has the cpusets: the v1 one where it is mounted, else v2's.
    #[must_use]
    pub fn cpuset_path(&self) -> Option<&str> {
        let has = |controllers: &str| controllers.split(',').any(|controller| controller == "cpuset");
        let legacy = self.cgroups.iter().find(|(controllers, _)| has(controllers));
        let line = legacy.or_else(|| self.cgroups.iter().find(|(controllers, _)| controllers.is_empty()));
        line.map(|(_, path)| path.as_str())
    }
}

/// What the marks on a process mean.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claims {
    /// What the process is to a batch system.
    pub role: Role,
    /// The jobs it says it belongs to, at most one for each kind of mark and source.
    pub claims: Vec<Claim>,
}

/// What a process is to a batch system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Nothing special: a user's process.
    #[default]
    Ordinary,
    /// The scheduler's own process whose children are job processes (slurmstepd, res, pbs_mom, …). By name
    /// only: whether it may be believed depends on its user, see [`crate::membership`].
    Launcher(Source),
    /// A helper of the scheduler inside a job's cgroup. Never a member.
    Helper(Source),
}

/// One mark that names a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The job it names.
    pub job: JobId,
    /// Which mark.
    pub mark: Mark,
    /// How many cores that job has on this node, if the mark says so.
    pub amount: Option<Amount>,
}

/// The kinds of mark, strongest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// A directory that the scheduler made for the job; the path is the job's own directory, below which
    /// steps and tasks may have theirs.
    Cgroup(String),
    /// Grid Engine's extra supplementary group.
    ExtraGroup(u32),
    /// The environment. Anyone can set it. `scope` says what else this source gives each job of its own.
    Environment {
        /// Whether the process group or session is the job's own for this source.
        own: OwnUnit,
    },
}

/// What a source gives each job of its own, beside parentage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnUnit {
    /// A process group (LSF: all jobs share sbatchd's session).
    Group,
    /// A session (PBS, Grid Engine).
    Session,
    /// Neither can be relied on.
    Nothing,
}

/// A cgroup directory, as one look found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Who it is.
    pub id: CgroupId,
    /// The PUs it allows (`cpuset.cpus.effective`), if its own `cpuset.cpus` is set: otherwise nobody narrowed it.
    pub cpus: Option<CpuSet>,
    /// Whether any process is in it or below it.
    pub populated: bool,
    /// Its cpuset, where the hierarchy has the controller and the directory is not left out of it.
    pub cpuset: Option<Cpuset>,
}

impl Cgroup {
    /// Whether it was seen to have no cpuset, so that nothing holds its processes. One that could not be looked at
    /// has no inode, and may have anything.
    #[must_use]
    pub fn is_open_ground(&self) -> bool {
        self.cpuset.is_none() && self.id.inode != 0
    }
}

/// The files of a cgroup's cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpuset {
    /// `cpuset.cpus`: what was asked for; empty in v2 where nobody asked.
    pub cpus: CpuSet,
    /// What that comes to (`cpuset.cpus.effective`, v1 `cpuset.effective_cpus`).
    pub effective: CpuSet,
    /// `cpuset.mems`: numbers of NUMA nodes; empty in v2 where nobody asked.
    pub mems: CpuSet,
    /// Whether it is a valid partition of the kind `isolated`.
    pub isolated: bool,
}

impl Process {
    /// Whether it is in this cgroup, or below it.
    #[must_use]
    pub fn lives_in(&self, cgroup: &str) -> bool {
        self.cgroup.as_deref().is_some_and(|at| lies_in(at, cgroup))
    }
}

impl<T> Seen<T> {
    /// The thing, if it is there.
    pub fn here(&self) -> Option<&T> {
        match self {
            Seen::Here(thing) => Some(thing),
            Seen::Gone => None,
        }
    }
}
