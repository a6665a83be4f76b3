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
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pjw_core::ids::{Comm, Pid, ProcessId, StartTime, Tid, Uid, is_cgroup_within};
use pjw_core::snapshot::{AffinityRequest, BatchIdentity, ProcessCpuTimes, ProcessEvent};
use pjw_core::time::Nanos;
use pjw_core::{cpuset::CpuSet, cpuset_group::CpusetSupport, cpuset_group::JobCpuset};

mod clock;
mod descent;
mod masks;
mod priority;
#[cfg(test)]
mod tests;

/// The largest process id by default.
const PID_MAX: u32 = 400;

/// Whether the daemon can know which affinity mask a program requested last for a thread (sched_setaffinity(2)). A new
/// thread or process inherits this value from the thread that created it. Except: a new thread gets
/// [`ProgramMaskRequest::Hidden`] instead of [`ProgramMaskRequest::Unread`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramMaskRequest {
    /// No program requested a mask for the thread.
    None,
    /// A program requested a mask, and the daemon has not read the thread's mask since then.
    Unread,
    /// A program requested a mask, and the daemon has read the thread's mask since then.
    Read,
    /// A program requested a mask, and the daemon can't learn which mask. There are three possible causes:
    ///
    /// - The mask was replaced before the daemon read it.
    /// - pjw or the kernel set the same mask.
    /// - A cpuset may have reduced the requested mask.
    Hidden,
}

/// A thread of a simulated process, with its start time, its affinity masks and its run time.
#[derive(Debug, Clone)]
pub struct SimThread {
    /// The start time of the thread, in clock ticks (10 ms each) since boot.
    pub start: StartTime,
    /// The affinity mask that was requested last for the thread, by its program, a user or pjw.
    pub requested_mask: CpuSet,
    /// The last affinity mask that a program or a user requested for the thread, or else the mask that the
    /// thread inherited. Requests by pjw do not count. pjw must restore this mask when the job of the thread
    /// is released.
    pub original_mask: CpuSet,
    /// The mask that is in force because hotplug switched off all PUs in the mask of the thread. The
    /// simulated kernel sets this mask in [`SimMachine::set_active_pus`]. `None` if no such mask is in force. The
    /// fallback mask stays in force until one of these events:
    ///
    /// - A new mask is requested for the thread.
    /// - The process moves to another cgroup, or its cpuset is changed.
    /// - [`SimMachine::rewrite_masks_after_hotplug`] completes a hotplug operation on PUs of the process's cpuset.
    pub fallback_mask: Option<CpuSet>,
    /// Whether a program requested an affinity mask for the thread, and whether the daemon can know this mask.
    pub program_mask_request: ProgramMaskRequest,
    /// The time of the last request for a mask by a program or a user, in ns since boot. 0 if there was no
    /// request. Requests by pjw do not count. A kernel before Linux 6.2 replaces the mask when the process
    /// moves to another cgroup, and when the cpuset changes. On such a simulated kernel, each move and each
    /// change of the cpuset counts as a request.
    pub mask_requested_at: u64,
    /// Whether the daemon can't know which mask this thread inherited. A thread inherits the mask of its
    /// creator, and the kernel does not report which thread of the process is the creator. If the threads of
    /// the process have different original masks when a thread is created, the new thread has the value true.
    /// A thread or process whose creator has the value true has the value true too.
    pub has_unknown_creator: bool,
    /// Whether the thread always runs when the simulated time advances.
    pub is_busy: bool,
    /// The kernel's letter for the state of the thread, such as `Z` (zombie). `None` for the states `R`
    /// (running, if [`SimThread::is_busy`] is true) and `S` (sleeping, if `is_busy` is false).
    pub state: Option<char>,
    /// The time for which the thread has run since its start, in ns.
    pub run_ns: u64,
    /// The time for which the thread has waited for a PU since its start, in ns. Only tests set it.
    pub wait_ns: u64,
}

/// A simulated process with its threads.
#[derive(Debug, Clone)]
pub struct SimProcess {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The pid of the parent process. If the parent has ended, this is 1.
    pub parent: Pid,
    /// The id of the process group.
    pub process_group: Pid,
    /// The id of the session.
    pub session: Pid,
    /// The real user id of the process.
    pub uid: Uid,
    /// The name (comm) of the process.
    pub comm: Comm,
    /// Whether the process is a kernel thread.
    pub is_kernel_thread: bool,
    /// The path of the process's cgroup, as in `/proc/PID/cgroup`.
    pub cgroup: String,
    /// The path of the cgroup in which the process would be if pjw had not moved it. pjw must return the
    /// process to this cgroup when its job is released.
    pub original_cgroup: String,
    /// Whether pjw can't know the original cgroup of the process: the cgroup to which pjw must return the
    /// process. Children of the process inherit this value.
    pub has_unknown_original_cgroup: bool,
    /// The environment variables of the process, with their values.
    pub environ: BTreeMap<String, String>,
    /// The role of the process in a batch system, and the jobs to which its attributes (such as its cgroup and its
    /// environment) assign it. If this is `Some`, a simulated scan reports this value. If it is `None`, the scan
    /// reports only the attributes, and the daemon searches them for the ids of jobs. Tests of the crate pjw-core set
    /// this field, because this search is not a part of pjw-core.
    pub batch_identity: Option<BatchIdentity>,
    /// The id of the job to which the process really belongs, as recorded by the workload that started the
    /// process. `None` if the process belongs to no job.
    pub expected_job: Option<String>,
    /// Whether the process was ever moved into a cgroup with a cpuset, or the cpuset of its cgroup was ever
    /// changed. Changes by pjw, by other programs and by hotplug count. A child inherits this value from its
    /// parent. If true, a mask that a program requests may be reduced by a cpuset. The daemon can read only
    /// the reduced mask, and can't learn the requested mask.
    pub was_in_cpuset: bool,
    /// Whether the cgroup, environment or name of the process changed since the last scan read these
    /// attributes.
    pub attributes_changed: bool,
    /// The threads of the process, by thread id.
    pub threads: BTreeMap<Tid, SimThread>,
}

impl SimThread {
    /// Records that the mask is replaced: if the daemon has not read the program's last request yet, it never will.
    fn record_replacement(&mut self) {
        if self.program_mask_request == ProgramMaskRequest::Unread {
            self.program_mask_request = ProgramMaskRequest::Hidden;
        }
    }

    /// Returns a new thread that this thread creates. The new thread inherits the mask.
    fn new_child(&self, start: StartTime) -> Self {
        Self { start, is_busy: false, state: None, run_ns: 0, wait_ns: 0, ..self.clone() }
    }
}

impl SimProcess {
    /// Returns the CPU time of the process since its start, in ns: the sum over its threads.
    #[must_use]
    pub fn run_ns(&self) -> u64 {
        self.threads.values().map(|thread| thread.run_ns).sum()
    }
}

/// An observer of a simulated machine that measures how long threads run. An example is a simulated BPF program.
/// Whenever the simulated time advances, the machine calls the observer in [`SimMachine::observer`].
pub trait TimeObserver: fmt::Debug + Send {
    /// Records what runs on `world` for the next `period` of the simulated time. Nothing changes on the machine during
    /// this period.
    fn record_period(&mut self, world: &SimMachine, period: Duration);
}

/// The simulated machine: its PUs (logical CPUs), processes, cgroups and cpusets, as the simulated kernel manages them.
/// A cgroup is identified by its path, as in `/proc/PID/cgroup`.
#[derive(Debug, Clone)]
pub struct SimMachine {
    /// All PUs of the machine, online or offline.
    pub cpus: CpuSet,
    /// The PUs that the simulated kernel reports as online.
    pub online: CpuSet,
    /// All processes of the machine, by pid.
    pub processes: BTreeMap<Pid, SimProcess>,
    /// For each process that was forked, the process that forked it. Processes that have ended keep their entries.
    births: BTreeMap<ProcessId, ProcessId>,
    /// For each process, the CPU time of its ended children, in ns. Every parent waits for its children at once.
    children_ns: BTreeMap<Pid, u64>,
    /// The PUs of each cpuset, by the path of its cgroup. A cgroup without a cpuset of its own has no entry.
    pub cpusets: BTreeMap<String, CpuSet>,
    /// The paths of the cgroups with a cpuset ([`SimMachine::cpusets`]) whose partition type (`cpuset.cpus.partition`)
    /// is `isolated`.
    pub isolated_partitions: BTreeSet<String>,
    /// The paths of the cgroups that pjw has frozen (`cgroup.freeze`). No thread in them runs, nor in the cgroups
    /// below them.
    pub frozen_cgroups: BTreeSet<String>,
    /// The paths of the cgroups whose processes run at idle priority (`cpu.idle`).
    pub idle_cgroups: BTreeSet<String>,
    /// The paths of the cgroups in which another program has disabled the cpuset controller.
    pub without_cpuset_controller: BTreeSet<String>,
    /// The paths of the cgroups that were removed. The simulated kernel refuses to move a process to one of
    /// them.
    pub removed_cgroups: BTreeSet<String>,
    /// The paths of the cgroups that exist even if they contain no process. Every other cgroup disappears
    /// with its last process, unless pjw created it.
    pub persistent_cgroups: BTreeSet<String>,
    /// For each cgroup that pjw created for a job, the user id of the job's owner. On the real machine, pjw
    /// stores the user id in an extended attribute of the cgroup.
    pub cgroup_owners: BTreeMap<String, Uid>,
    /// The cpusets that pjw wrote in cgroups of batch systems, by the path of the cgroup. On the real machine, pjw
    /// stores each cpuset in an extended attribute of its cgroup.
    pub scheduler_cpusets: BTreeMap<String, JobCpuset>,
    /// For each cgroup that pjw created, the path of the cgroup from which pjw moved processes into this
    /// cgroup. The path is empty if the processes came from several cgroups. On the real machine, pjw stores
    /// the path in an extended attribute of the cgroup that pjw created.
    pub cgroup_origins: BTreeMap<String, String>,
    /// Whether pjw can create cpusets on the simulated machine, and in which cgroup hierarchy (v1 or v2).
    /// Also says whether a requested mask stays in force when the cpuset changes, as on Linux 6.2 and later.
    pub cpuset_support: CpusetSupport,
    /// Whether the simulated kernel reports the sched_setaffinity(2) calls of programs to the daemon.
    pub reports_affinity_requests: bool,
    /// The process events (fork, exec and exit) that the kernel has sent and the daemon pjwd has not read yet.
    pub events: Vec<ProcessEvent>,
    /// The reports of sched_setaffinity(2) calls of programs that the simulated kernel has made and the daemon has not
    /// read yet.
    pub affinity_requests: Vec<AffinityRequest>,
    /// The log of changes of processes, masks and cpusets, one line of text for each change. `None` if no log
    /// is written.
    pub log: Option<Vec<String>>,
    /// The observer that receives which threads run, whenever the simulated time advances. `None` if there is no
    /// observer. A clone of this machine has the same observer.
    pub observer: Option<Arc<Mutex<dyn TimeObserver>>>,
    /// The PUs on which the kernel runs threads.
    active: CpuSet,
    /// The active PUs at the last rewrite of the masks in cpusets.
    active_at_rewrite: CpuSet,
    /// The masks that pjw requested, or was about to request.
    requested_by_pjw: BTreeSet<CpuSet>,
    /// The time since boot, in ns.
    now: u64,
    /// The largest id that a new process or thread can get. After this id, the ids begin at 1 again. The
    /// default is small (400), so that ids are reused often.
    pub pid_max: u32,
    /// The id that the next process or thread gets, unless it is in use.
    next_id: u32,
    /// The start time of the last process or thread with each id.
    starts: BTreeMap<u32, StartTime>,
}

impl SimMachine {
    /// Makes a simulated machine with the PUs (logical CPUs) `cpus`. All PUs are online, and only process 1
    /// exists.
    #[must_use]
    pub fn new(cpus: &CpuSet) -> Self {
        let now = 1_000_000_000;
        let id = ProcessId { pid: Pid(1), start: StartTime(now / StartTime::TICK.0) };
        let thread = SimThread {
            start: id.start,
            requested_mask: cpus.clone(),
            original_mask: cpus.clone(),
            fallback_mask: None,
            program_mask_request: ProgramMaskRequest::None,
            mask_requested_at: 0,
            has_unknown_creator: false,
            is_busy: false,
            state: None,
            run_ns: 0,
            wait_ns: 0,
        };
        let init = SimProcess {
            id,
            parent: Pid(0),
            process_group: Pid(1),
            session: Pid(1),
            uid: Uid::ROOT,
            comm: Comm::from("work"),
            is_kernel_thread: false,
            cgroup: "/".to_owned(),
            original_cgroup: "/".to_owned(),
            has_unknown_original_cgroup: false,
            environ: BTreeMap::new(),
            batch_identity: None,
            expected_job: None,
            was_in_cpuset: false,
            attributes_changed: true,
            threads: BTreeMap::from([(Tid(1), thread)]),
        };
        Self {
            cpus: cpus.clone(),
            online: cpus.clone(),
            processes: BTreeMap::from([(Pid(1), init)]),
            births: BTreeMap::new(),
            children_ns: BTreeMap::new(),
            reports_affinity_requests: true,
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
            next_id: 2,
            starts: BTreeMap::from([(1, id.start)]),
            cpusets: BTreeMap::new(),
            isolated_partitions: BTreeSet::new(),
            frozen_cgroups: BTreeSet::new(),
            idle_cgroups: BTreeSet::new(),
            without_cpuset_controller: BTreeSet::new(),
            removed_cgroups: BTreeSet::new(),
            persistent_cgroups: BTreeSet::new(),
            cgroup_owners: BTreeMap::new(),
            scheduler_cpusets: BTreeMap::new(),
            cgroup_origins: BTreeMap::new(),
            cpuset_support: CpusetSupport::default(),
            affinity_requests: Vec::new(),
            log: None,
            observer: None,
        }
    }

    /// Sets the id of the next new process or thread to `id`. If `id` is already in use, the next higher free
    /// id is used.
    pub fn set_next_id(&mut self, id: u32) {
        self.next_id = id;
    }

    /// Returns the id for a new process or thread: the next free id. After the largest id, the search begins at 1
    /// again. If no id is free, returns an id above the largest one.
    fn take_next_id(&mut self) -> u32 {
        let is_free = |number: &u32| {
            !self.processes.contains_key(&Pid(*number))
                && !self.processes.values().any(|process| process.threads.contains_key(&Tid(*number)))
        };
        let (first, pid_max) = (self.next_id, self.pid_max);
        let number =
            (0..pid_max).map(|step| (first - 1 + step) % pid_max + 1).find(is_free).unwrap_or(pid_max + 1);
        self.next_id = number % pid_max + 1;
        number
    }

    /// Returns the start time of a new process or thread with the id `number`: the present tick. Many can start in one
    /// tick, but no id is used twice in one tick.
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

    /// Starts a process of the user `uid` as a child of the process `parent`, and returns the pid of the child. Does
    /// the same as [`SimMachine::fork`] with the first thread of `parent` as the creator: the child inherits the
    /// affinity mask of this thread. If `parent` does not exist, process 1 is the parent.
    pub fn spawn(&mut self, parent: Pid, uid: Uid) -> Pid {
        self.fork(parent, Tid(parent.0), uid)
    }

    /// Starts a process of the user `uid` as a child of the process `parent`, and returns the pid of the child.
    /// `creator` is the thread of `parent` that calls fork(2). The child inherits the affinity mask of `creator`. It
    /// also inherits the session, the process group, the cgroup and the environment of `parent`. If `parent` does not
    /// exist or has no thread `creator`, the first thread of process 1 creates the child.
    pub fn fork(&mut self, parent: Pid, creator: Tid, uid: Uid) -> Pid {
        let exists = self.processes.get(&parent).is_some_and(|found| found.threads.contains_key(&creator));
        let (parent, creator) = if exists { (parent, creator) } else { (Pid(1), Tid(1)) };
        let pid = Pid(self.take_next_id());
        let start = self.start_time(pid.0);
        let parent_process = &self.processes[&parent];
        let thread = parent_process.threads[&creator].new_child(start);
        let requested = thread.requested_mask.clone();
        let child = SimProcess {
            id: ProcessId { pid, start },
            parent,
            uid,
            comm: Comm::from("work"),
            is_kernel_thread: false,
            batch_identity: None,
            attributes_changed: true,
            threads: BTreeMap::from([(Tid(pid.0), thread)]),
            ..parent_process.clone()
        };
        self.births.insert(child.id, parent_process.id);
        self.log(|| format!("  thread {creator} of {parent} forks {pid}@{start}, requested {requested}"));
        self.processes.insert(pid, child);
        self.events.push(ProcessEvent::Fork { parent, creator, child: pid, at: Nanos(self.now) });
        pid
    }

    /// Starts a thread in the process `pid`. `creator` is the thread of this process that creates the new thread. The
    /// new thread inherits the affinity mask of `creator`. No thread is started if the process does not exist or has
    /// no thread `creator`.
    pub fn clone_thread(&mut self, pid: Pid, creator: Tid) {
        let tid = Tid(self.take_next_id());
        let start = self.start_time(tid.0);
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(creator) = process.threads.get(&creator)
        {
            let has_other_masks =
                process.threads.values().any(|other| other.original_mask != creator.original_mask);
            let mut thread = creator.new_child(start);
            thread.has_unknown_creator |= has_other_masks;
            // The creator may have requested a mask before and after the creation.
            thread.record_replacement();
            thread.run_ns = 1;
            let requested = thread.requested_mask.clone();
            process.threads.insert(tid, thread);
            self.events.push(ProcessEvent::ThreadFork { pid, tid });
            self.log(|| format!("  process {pid} has a thread {tid}, requested {requested}"));
        }
    }

    /// Executes a program with the name `comm` in the process `pid`, as execve(2) does. All threads except
    /// the first thread end. The environment variables stay the same. Has no effect if the process does not
    /// exist.
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

    /// Records the origin of `created_cgroup`, a cgroup that pjw created: the path of the cgroup from which the
    /// processes in `created_cgroup` come. Called just before pjw moves a process from `previous_cgroup` into
    /// `created_cgroup`. A daemon that starts later reads the origin in [`SimMachine::cgroup_origins`], to return the
    /// processes to their former cgroup. The origin is:
    ///
    /// - The origin of `previous_cgroup`, if one is recorded, because pjw created `previous_cgroup` too.
    /// - Otherwise `previous_cgroup` itself.
    ///
    /// If a different origin of `created_cgroup` was recorded before, the processes come from several cgroups. The
    /// origin then becomes the empty path.
    pub fn record_origin_cgroup(&mut self, created_cgroup: &str, previous_cgroup: &str) {
        let origin = self.cgroup_origins.get(previous_cgroup);
        let origin = origin.cloned().unwrap_or_else(|| previous_cgroup.to_owned());
        let known = self.cgroup_origins.entry(created_cgroup.to_owned()).or_insert_with(|| origin.clone());
        if *known != origin {
            known.clear();
        }
    }

    /// Makes the process `pid` the leader of a new session and of a new process group, as setsid(2) does. Has
    /// no effect if there is no such process.
    pub fn setsid(&mut self, pid: Pid) {
        if let Some(process) = self.processes.get_mut(&pid) {
            (process.session, process.process_group) = (pid, pid);
        }
    }

    /// Returns the CPU times of the process `pid` and of its ended children, as the kernel reports them in
    /// `/proc/PID/stat`. `None` if there is no such process.
    pub(crate) fn cpu_times(&self, pid: Pid) -> Option<ProcessCpuTimes> {
        let process = self.processes.get(&pid)?;
        // The times of children are in clock ticks.
        let children_ns = self.children_ns.get(&pid).map_or(0, |ns| ns - ns % StartTime::TICK.0);
        Some(ProcessCpuTimes { start: process.id.start, own_ns: process.run_ns(), children_ns })
    }

    /// Ends the process `pid`. Its children become children of process 1. Has no effect for process 1, or if
    /// there is no such process.
    pub fn exit_process(&mut self, pid: Pid) {
        if pid != Pid(1)
            && let Some(ended) = self.processes.remove(&pid)
        {
            let ended_ns = ended.run_ns() + self.children_ns.remove(&pid).unwrap_or(0);
            *self.children_ns.entry(ended.parent).or_default() += ended_ns;
            for child in self.processes.values_mut().filter(|child| child.parent == pid) {
                child.parent = Pid(1);
            }
            self.events.push(ProcessEvent::Exit { pid });
            self.log(|| format!("  process {pid} ends"));
        }
    }
}

/// Returns whether a cgroup is one of `paths`, or is below one of them.
fn is_in_any(cgroup: &str, paths: &BTreeSet<String>) -> bool {
    paths.iter().any(|path| is_cgroup_within(cgroup, path))
}
