//! The simulated kernel: processes and threads, inheritance, cpusets, and effective affinity masks.
//!
//! Rules: A child has the mask, session, group and cgroup of its parent (fork(2), sched(7)). The parent of an orphan
//! is process 1. Process ids are used again; pairs of process id and start time are not. The mask that the kernel
//! shows is the requested mask, cut to the cpuset and to the active PUs. If nothing is left, it is all that the cpuset
//! and the active PUs allow. (cpuset(7); Linux 6.2 and later keep the requested mask, older kernels forget it.)
//!
//! Beside the mask that was requested last, each thread has its original mask: the mask that would have been requested
//! last without pjw. A release must restore that mask.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::ids::{Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::snapshot::{AffinityRequest, JobMarks, ProcessEvent};
use pjw_core::time::{Moment, Nanos, UnixMillis};
use pjw_core::{cpuset::CpuSet, cpuset_group::CpusetSupport};

mod masks;
#[cfg(test)]
mod tests;

/// The largest process id by default.
const PID_MAX: u32 = 400;

/// The last request of a program for the mask of a thread, or of the thread from which it inherited the mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnRequest {
    /// No program made a request.
    None,
    /// The daemon has not read the mask since the request.
    Unread,
    /// The daemon has read the mask since the request.
    Read,
    /// No reading shows what was requested: the mask was replaced before it was read, is a mask that pjw requested too or
    /// that the kernel had just set, or was requested where cpusets may have cut it.
    Hidden,
}

/// A thread of a simulated process, with its masks and its run time.
#[derive(Debug, Clone)]
pub struct SimThread {
    /// The start time of the thread.
    pub start: StartTime,
    /// The mask that was requested last, by the program, a user or pjw.
    pub requested: CpuSet,
    /// The mask that would have been requested last without pjw. A release must restore it.
    pub original: CpuSet,
    /// The mask that the kernel set because no PU of the thread was active. It holds until the next request or rewrite.
    pub fallback: Option<CpuSet>,
    /// Whether a program requested the original mask, and whether the daemon can know it.
    pub own_request: OwnRequest,
    /// The time of the last request by the program or a user, since boot, in ns.
    pub requested_at: u64,
    /// Whether the original mask can't be known, because the creator of the thread or of an ancestor is unknown: the
    /// kernel does not report which thread of a process creates another thread, and the threads of this process have
    /// different original masks.
    pub has_unknown_creator: bool,
    /// Whether the thread runs all the time.
    pub busy: bool,
    /// The state of the thread as in `/proc/PID/stat`, if it is not the state of a running or sleeping thread.
    pub state: Option<char>,
    /// The time for which the thread has run, in ns.
    pub run_ns: u64,
}

/// A simulated process with its threads.
#[derive(Debug, Clone)]
pub struct SimProcess {
    /// The identity of the process.
    pub id: ProcessId,
    /// The present parent.
    pub parent: Pid,
    /// The process group.
    pub group: Pid,
    /// The session.
    pub session: Pid,
    /// The user id.
    pub uid: Uid,
    /// The name.
    pub comm: Comm,
    /// Whether the process is a kernel thread.
    pub is_kernel_thread: bool,
    /// The cgroup.
    pub cgroup: String,
    /// The cgroup in which the process would be without pjw.
    pub original_cgroup: String,
    /// Whether pjw can't know the original cgroup. Children inherit this.
    pub has_unknown_origin: bool,
    /// The environment.
    pub environ: BTreeMap<String, String>,
    /// The job marks that the node reports for the process. Tests without recognition of batch systems set them.
    pub job_marks: Option<JobMarks>,
    /// The job to which the process belongs, as the workload that made the process knows. `None` if it belongs to no
    /// job.
    pub expected_job: Option<String>,
    /// Whether a cpuset around the process, or around the process from which it descends, was ever written.
    pub was_in_cpuset: bool,
    /// Whether the attributes of the process changed since they were last read.
    pub attributes_changed: bool,
    /// The threads.
    pub threads: BTreeMap<Tid, SimThread>,
}

impl SimThread {
    /// Records that no reading will show the last request of the program, if none did yet.
    fn note_replacement(&mut self) {
        if self.own_request == OwnRequest::Unread {
            self.own_request = OwnRequest::Hidden;
        }
    }

    /// A thread that this thread starts: it inherits the mask.
    fn started(&self, start: StartTime) -> Self {
        Self { start, busy: false, state: None, run_ns: 0, ..self.clone() }
    }
}

impl SimProcess {
    /// The CPU time of all threads of the process, in ns.
    #[must_use]
    pub fn run_ns(&self) -> u64 {
        self.threads.values().map(|thread| thread.run_ns).sum()
    }
}

/// The simulated machine with its processes.
#[derive(Debug, Clone)]
pub struct World {
    /// All PUs.
    pub cpus: CpuSet,
    /// The PUs that the kernel lists as online.
    pub online: CpuSet,
    /// All processes.
    pub processes: BTreeMap<Pid, SimProcess>,
    /// The cpuset of each cgroup that has one.
    pub cpusets: BTreeMap<String, CpuSet>,
    /// The cgroups in `cpusets` that are partitions of the type `isolated`.
    pub partitions: BTreeSet<String>,
    /// The cgroups in which another program switched the cpuset controller off.
    pub without_controller: BTreeSet<String>,
    /// The cgroups that were removed: no process is moved back there.
    pub removed_cgroups: BTreeSet<String>,
    /// The cgroups that exist without a process too.
    pub kept_cgroups: BTreeSet<String>,
    /// The attribute of pjw's cgroups with the owner of the job.
    pub cgroup_owners: BTreeMap<String, Uid>,
    /// The attribute of pjw's cgroups with the cgroup from which the processes came. Empty if they came from several.
    pub cgroup_origins: BTreeMap<String, String>,
    /// The cpuset features of the machine.
    pub cpuset_support: CpusetSupport,
    /// Whether the affinity requests of programs are reported.
    pub reports_requests: bool,
    /// The process events that were not read yet.
    pub events: Vec<ProcessEvent>,
    /// The affinity requests that were not read yet.
    pub affinity_requests: Vec<AffinityRequest>,
    /// The changes of processes and masks as lines of text, for printing. `None` if they are not printed.
    pub log: Option<Vec<String>>,
    /// The PUs on which the kernel runs threads.
    active: CpuSet,
    /// The active PUs at the last rewrite of the masks in cpusets.
    active_at_rewrite: CpuSet,
    /// The masks that pjw requested, or was about to request.
    requested_by_pjw: BTreeSet<CpuSet>,
    now: u64,
    /// The largest process id. By default it is small, so that process ids are used again often.
    pub pid_max: u32,
    next_number: u32,
    /// The start time of the last process or thread with each number.
    starts: BTreeMap<u32, StartTime>,
}

impl World {
    /// A machine with the PUs `cpus`, on which only process 1 runs.
    #[must_use]
    pub fn new(cpus: &CpuSet) -> Self {
        let now = 1_000_000_000;
        let id = ProcessId { pid: Pid(1), start: StartTime(now / StartTime::TICK.0) };
        let thread = SimThread {
            start: id.start,
            requested: cpus.clone(),
            original: cpus.clone(),
            fallback: None,
            own_request: OwnRequest::None,
            requested_at: 0,
            has_unknown_creator: false,
            busy: false,
            state: None,
            run_ns: 0,
        };
        let init = SimProcess {
            id,
            parent: Pid(0),
            group: Pid(1),
            session: Pid(1),
            uid: Uid::ROOT,
            comm: Comm::from("work"),
            is_kernel_thread: false,
            cgroup: "/".to_owned(),
            original_cgroup: "/".to_owned(),
            has_unknown_origin: false,
            environ: BTreeMap::new(),
            job_marks: None,
            expected_job: None,
            was_in_cpuset: false,
            attributes_changed: true,
            threads: BTreeMap::from([(Tid(1), thread)]),
        };
        Self {
            cpus: cpus.clone(),
            online: cpus.clone(),
            processes: BTreeMap::from([(Pid(1), init)]),
            reports_requests: true,
            events: vec![ProcessEvent::Fork {
                parent: Pid(0),
                creator: Tid(0),
                child: Pid(1),
                at: Nanos(now),
            }],
            active: cpus.clone(),
            active_at_rewrite: cpus.clone(),
            requested_by_pjw: BTreeSet::new(),
            now,
            pid_max: PID_MAX,
            next_number: 2,
            starts: BTreeMap::from([(1, id.start)]),
            cpusets: BTreeMap::new(),
            partitions: BTreeSet::new(),
            without_controller: BTreeSet::new(),
            removed_cgroups: BTreeSet::new(),
            kept_cgroups: BTreeSet::new(),
            cgroup_owners: BTreeMap::new(),
            cgroup_origins: BTreeMap::new(),
            cpuset_support: CpusetSupport::default(),
            affinity_requests: Vec::new(),
            log: None,
        }
    }

    /// The current simulated time.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let wall_clock = UnixMillis(i64::try_from(self.now / 1_000_000).unwrap_or(0));
        Moment { since_boot: Nanos(self.now), wall_clock }
    }

    /// Advances the simulated time by `ns`. Threads that are marked as busy run for that time.
    pub fn advance(&mut self, ns: u64) {
        self.now += ns;
        let threads = self.processes.values_mut().flat_map(|process| process.threads.values_mut());
        threads.filter(|thread| thread.busy).for_each(|thread| thread.run_ns += ns);
    }

    /// Gives the next new process or thread the id `number`, if no other has it.
    pub fn set_next_number(&mut self, number: u32) {
        self.next_number = number;
    }

    fn take_number(&mut self) -> u32 {
        let is_free = |number: &u32| {
            !self.processes.contains_key(&Pid(*number))
                && !self.processes.values().any(|process| process.threads.contains_key(&Tid(*number)))
        };
        let (first, pid_max) = (self.next_number, self.pid_max);
        let number =
            (0..pid_max).map(|step| (first - 1 + step) % pid_max + 1).find(is_free).unwrap_or(pid_max + 1);
        self.next_number = number % pid_max + 1;
        number
    }

    /// The start time of a new process or thread: the present tick. Many may start in one tick, but no number is used
    /// twice in one.
    fn start_time(&mut self, number: u32) -> StartTime {
        let tick = self.now / StartTime::TICK.0;
        let after_last = self.starts.get(&number).map_or(0, |last| last.0 + 1);
        let start = StartTime(tick.max(after_last));
        self.starts.insert(number, start);
        start
    }

    /// Adds a line to the log.
    fn log(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(line());
        }
    }

    /// Starts a process of the user `uid` as a child of the first thread of `parent`, and returns its id.
    pub fn spawn(&mut self, parent: Pid, uid: Uid) -> Pid {
        self.fork(parent, Tid(parent.0), uid)
    }

    /// Starts a process: a child of the thread `creator` of `parent`. The child inherits the mask of `creator`, and the
    /// session, group, cgroup and environment of `parent`. Process 1 stands in for a parent or creator that does not
    /// exist.
    pub fn fork(&mut self, parent: Pid, creator: Tid, uid: Uid) -> Pid {
        let exists = self.processes.get(&parent).is_some_and(|found| found.threads.contains_key(&creator));
        let (parent, creator) = if exists { (parent, creator) } else { (Pid(1), Tid(1)) };
        let pid = Pid(self.take_number());
        let start = self.start_time(pid.0);
        let template = &self.processes[&parent];
        let thread = template.threads[&creator].started(start);
        let requested = thread.requested.clone();
        let child = SimProcess {
            id: ProcessId { pid, start },
            parent,
            uid,
            comm: Comm::from("work"),
            is_kernel_thread: false,
            job_marks: None,
            attributes_changed: true,
            threads: BTreeMap::from([(Tid(pid.0), thread)]),
            ..template.clone()
        };
        self.log(|| format!("  thread {creator} of {parent} forks {pid}@{start}, requested {requested}"));
        self.processes.insert(pid, child);
        self.events.push(ProcessEvent::Fork { parent, creator, child: pid, at: Nanos(self.now) });
        pid
    }

    /// Starts a thread in the process `pid` with the mask of its thread `creator`.
    pub fn clone_thread(&mut self, pid: Pid, creator: Tid) {
        let tid = Tid(self.take_number());
        let start = self.start_time(tid.0);
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(creator) = process.threads.get(&creator)
        {
            let differs = process.threads.values().any(|other| other.original != creator.original);
            let mut thread = creator.started(start);
            thread.has_unknown_creator |= differs;
            // The creator may have requested a mask before and after.
            thread.note_replacement();
            thread.run_ns = 1;
            let requested = thread.requested.clone();
            process.threads.insert(tid, thread);
            self.events.push(ProcessEvent::ThreadFork { pid, tid });
            self.log(|| format!("  process {pid} has a thread {tid}, requested {requested}"));
        }
    }

    /// Executes a program with the name `comm` in a process, which ends all threads but the first.
    pub fn exec(&mut self, pid: Pid, comm: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.comm = Comm::from(comm);
            process.attributes_changed = true;
            // The CPU time of the process keeps the time of threads that have ended. Executing a program takes time.
            let ran = process.run_ns();
            process.threads.retain(|tid, _| tid.0 == pid.0);
            process.threads.values_mut().for_each(|thread| thread.run_ns = ran + 1);
            self.events.push(ProcessEvent::Exec { pid });
        }
    }

    /// Records in the attribute of the cgroup `to` that a process is moved in from the cgroup `from`.
    pub fn note_origin(&mut self, to: &str, from: &str) {
        let from = self.cgroup_origins.get(from).cloned().unwrap_or_else(|| from.to_owned());
        let known = self.cgroup_origins.entry(to.to_owned()).or_insert_with(|| from.clone());
        if *known != from {
            known.clear();
        }
    }

    /// Makes a process the leader of a new session, as setsid(2) does.
    pub fn setsid(&mut self, pid: Pid) {
        if let Some(process) = self.processes.get_mut(&pid) {
            (process.session, process.group) = (pid, pid);
        }
    }

    /// Ends a process. Process 1 becomes the parent of its children.
    pub fn exit(&mut self, pid: Pid) {
        if pid != Pid(1) && self.processes.remove(&pid).is_some() {
            for child in self.processes.values_mut().filter(|child| child.parent == pid) {
                child.parent = Pid(1);
            }
            self.events.push(ProcessEvent::Exit { pid });
            self.log(|| format!("  process {pid} ends"));
        }
    }
}
