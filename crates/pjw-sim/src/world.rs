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

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::CpusetSupport;
use pjw_core::ids::{Comm, Pid, ProcessId, StartTime, Tid, Uid, is_within};
use pjw_core::snapshot::{AffinityRequest, Claims, ProcessEvent};
use pjw_core::time::{Moment, Nanos, UnixMillis};

/// The largest process id. It is small, so that process ids are used again often.
const PID_MAX: u32 = 400;

/// A thread.
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
    /// Whether a program requested the original mask, for this thread or for the thread from which it inherited the mask.
    pub has_own_request: bool,
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

/// A process.
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
    pub kernel: bool,
    /// The cgroup.
    pub cgroup: String,
    /// The cgroup in which the process would be without pjw.
    pub original_cgroup: String,
    /// The environment.
    pub environ: BTreeMap<String, String>,
    /// The claims that the node reports for the process. Tests without recognition of batch systems set them.
    pub claims: Option<Claims>,
    /// The job to which the process belongs, as the workload that made the process knows. `None` if it belongs to no
    /// job.
    pub expected_job: Option<String>,
    /// Whether the attributes of the process changed since they were last read.
    pub attributes_changed: bool,
    /// The threads.
    pub threads: BTreeMap<Tid, SimThread>,
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
    now: u64,
    next_number: u32,
    /// The start time of the last process or thread with each number.
    starts: BTreeMap<u32, StartTime>,
}

impl World {
    /// A machine on which only process 1 runs.
    #[must_use]
    pub fn new(cpus: &CpuSet) -> Self {
        let mut world = Self {
            cpus: cpus.clone(),
            online: cpus.clone(),
            processes: BTreeMap::new(),
            cpusets: BTreeMap::new(),
            partitions: BTreeSet::new(),
            without_controller: BTreeSet::new(),
            removed_cgroups: BTreeSet::new(),
            kept_cgroups: BTreeSet::new(),
            cpuset_support: CpusetSupport::default(),
            reports_requests: true,
            events: Vec::new(),
            affinity_requests: Vec::new(),
            log: None,
            active: cpus.clone(),
            active_at_rewrite: cpus.clone(),
            now: 1_000_000_000,
            next_number: 1,
            starts: BTreeMap::new(),
        };
        world.spawn(Pid(0), Uid::ROOT);
        world
    }

    /// The present time.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let wall_clock = UnixMillis(i64::try_from(self.now / 1_000_000).unwrap_or(0));
        Moment { since_boot: Nanos(self.now), wall_clock }
    }

    /// Advances the time by `ns`. Busy threads run for that time.
    pub fn advance(&mut self, ns: u64) {
        self.now += ns;
        for thread in self.processes.values_mut().flat_map(|process| process.threads.values_mut()) {
            if thread.busy {
                thread.run_ns += ns;
            }
        }
    }

    /// Gives the next new process or thread this number, if the number is free.
    pub fn set_next_number(&mut self, number: u32) {
        self.next_number = number;
    }

    fn take_number(&mut self) -> u32 {
        let is_free = |number: &u32| {
            !self.processes.contains_key(&Pid(*number))
                && !self.processes.values().any(|process| process.threads.contains_key(&Tid(*number)))
        };
        let first = self.next_number;
        let number =
            (0..PID_MAX).map(|step| (first - 1 + step) % PID_MAX + 1).find(is_free).unwrap_or(PID_MAX + 1);
        self.next_number = number % PID_MAX + 1;
        number
    }

    /// The start time of a new process or thread: the present tick. Many may start in one tick, but no number is used twice in
    /// one.
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

    /// Starts a process: a child of the first thread of `parent` if `parent` exists. The child inherits the mask,
    /// session, group and cgroup.
    pub fn spawn(&mut self, parent: Pid, uid: Uid) -> Pid {
        self.fork(parent, Tid(parent.0), uid)
    }

    /// Starts a process: a child of the thread `creator` of `parent`. The child inherits the mask of `creator`, and
    /// the session, group and cgroup of `parent`.
    pub fn fork(&mut self, parent: Pid, creator: Tid, uid: Uid) -> Pid {
        let pid = Pid(self.take_number());
        let start = self.start_time(pid.0);
        let id = ProcessId { pid, start };
        let parent_process = self.processes.get(&parent);
        let thread = parent_process.and_then(|parent| parent.threads.get(&creator)).cloned();
        let thread = thread.unwrap_or_else(|| SimThread {
            start,
            requested: self.cpus.clone(),
            original: self.cpus.clone(),
            fallback: None,
            has_own_request: false,
            requested_at: 0,
            has_unknown_creator: false,
            busy: false,
            state: None,
            run_ns: 0,
        });
        let thread = SimThread { start, busy: false, state: None, run_ns: 0, ..thread };
        let requested = thread.requested.clone();
        let process = parent_process.cloned().unwrap_or_else(|| SimProcess {
            id,
            parent,
            group: pid,
            session: pid,
            uid,
            comm: Comm::from("work"),
            kernel: false,
            cgroup: "/".to_owned(),
            original_cgroup: "/".to_owned(),
            environ: BTreeMap::new(),
            claims: None,
            expected_job: None,
            attributes_changed: true,
            threads: BTreeMap::new(),
        });
        let process = SimProcess {
            id,
            parent,
            uid,
            comm: Comm::from("work"),
            kernel: false,
            claims: None,
            attributes_changed: true,
            threads: BTreeMap::from([(Tid(pid.0), thread)]),
            ..process
        };
        self.log(|| format!("  thread {creator} of {parent} forks {pid}@{start}, requested {requested}"));
        self.processes.insert(pid, process);
        self.events.push(ProcessEvent::Fork { parent, creator, child: pid, at: Nanos(self.now) });
        pid
    }

    /// Starts a thread with the mask of the thread `creator`.
    pub fn clone_thread(&mut self, pid: Pid, creator: Tid) {
        let tid = Tid(self.take_number());
        let start = self.start_time(tid.0);
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(creator) = process.threads.get(&creator).cloned()
        {
            let requested = creator.requested.clone();
            let differs = process.threads.values().any(|other| other.original != creator.original);
            let has_unknown_creator = creator.has_unknown_creator || differs;
            let thread =
                SimThread { start, busy: false, state: None, run_ns: 1, has_unknown_creator, ..creator };
            process.threads.insert(tid, thread);
            self.events.push(ProcessEvent::ThreadFork { pid, tid });
            self.log(|| format!("  process {pid} has a thread {tid}, requested {requested}"));
        }
    }

    /// Executes another program in a process.
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

    /// Makes a process the leader of a new session.
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

    /// A program other than pjw moves a process to another cgroup. A kernel before Linux 6.2 forgets the requested
    /// masks.
    pub fn enter_cgroup(&mut self, pid: Pid, cgroup: &str) {
        let (forgets, now) = (!self.cpuset_support.affinity_persists, self.now);
        if let Some(process) = self.processes.get_mut(&pid) {
            process.original_cgroup = cgroup.to_owned();
            for thread in process.threads.values_mut().filter(|_| forgets) {
                (thread.has_own_request, thread.requested_at) = (true, now);
            }
        }
        self.move_for_pjw(pid, cgroup);
    }

    /// pjw moves a process to another cgroup.
    pub fn move_for_pjw(&mut self, pid: Pid, cgroup: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.cgroup = cgroup.to_owned();
            process.attributes_changed = true;
        }
        self.log(|| format!("  process {pid} enters {cgroup}"));
        self.rewrite_masks_in(cgroup, Some(pid));
    }

    /// Sets the cpuset of a cgroup. `None` removes the cpuset.
    pub fn write_cpuset(&mut self, path: &str, cpus: Option<&CpuSet>) {
        let before = match cpus {
            Some(cpus) => self.cpusets.insert(path.to_owned(), cpus.clone()),
            None => self.cpusets.remove(path),
        };
        self.log(|| format!("  cpuset {path} is {cpus:?}"));
        if before.as_ref() != cpus {
            self.rewrite_masks_in(path, None);
        }
    }

    /// The kernel rewrites the masks of the processes in a cgroup, or of one of them: from the requested masks, or on a
    /// kernel before Linux 6.2 from the cpuset.
    pub fn rewrite_masks_in(&mut self, path: &str, only: Option<Pid>) {
        let forgets = !self.cpuset_support.affinity_persists;
        let is_concerned = |process: &&mut SimProcess| {
            only.is_none_or(|pid| pid == process.id.pid) && is_within(&process.cgroup, path)
        };
        let processes = self.processes.values_mut().filter(is_concerned);
        for thread in processes.flat_map(|process| process.threads.values_mut()) {
            thread.fallback = None;
            if forgets {
                thread.requested = self.cpus.clone();
            }
        }
    }

    /// The cpuset that restricts the processes of a cgroup. `None` if there is none.
    fn cpuset_of(&self, cgroup: &str) -> Option<&CpuSet> {
        let around = self.cpusets.iter().filter(|(path, _)| is_within(cgroup, path));
        let around = around.filter(|(path, _)| !self.without_controller.contains(*path));
        around.max_by_key(|(path, _)| path.len()).map(|(_, cpus)| cpus)
    }

    /// The effective PUs of a cgroup: the PUs of its cpuset that were active at the last rewrite.
    #[must_use]
    pub fn effective_cpus(&self, cgroup: &str) -> CpuSet {
        let Some(cpuset) = self.cpuset_of(cgroup) else { return self.active.clone() };
        let effective = cpuset.intersection(&self.active_at_rewrite);
        if effective.is_empty() { self.active_at_rewrite.clone() } else { effective }
    }

    /// The mask that the kernel shows for a thread of a process.
    #[must_use]
    pub fn mask(&self, process: &SimProcess, thread: &SimThread) -> CpuSet {
        match &thread.fallback {
            Some(mask) => mask.intersection(&self.active),
            None => self.mask_in(&process.cgroup, &thread.requested),
        }
    }

    /// The mask that the kernel shows in a cgroup after a request for `requested`.
    #[must_use]
    pub fn mask_in(&self, cgroup: &str, requested: &CpuSet) -> CpuSet {
        let mask = self.stored_mask(cgroup, requested).intersection(&self.active);
        if mask.is_empty() { self.effective_cpus(cgroup).intersection(&self.active) } else { mask }
    }

    /// The mask that the kernel stores in a cgroup for a request, without regard to PUs that became inactive since the
    /// last rewrite.
    fn stored_mask(&self, cgroup: &str, requested: &CpuSet) -> CpuSet {
        if self.cpuset_of(cgroup).is_none() {
            return requested.clone();
        }
        let effective = self.effective_cpus(cgroup);
        let mask = requested.intersection(&effective);
        if mask.is_empty() { effective } else { mask }
    }

    /// Sets the requested mask of a thread. Returns whether the kernel accepts it: it refuses a mask without any PU that
    /// the thread may use.
    fn set_requested(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> Option<&mut SimThread> {
        let possible = self.effective_cpus(&self.processes.get(&pid)?.cgroup);
        let possible = possible.intersection(&self.active);
        let thread = self.processes.get_mut(&pid)?.threads.get_mut(&tid)?;
        if !mask.intersects(&possible) {
            return None;
        }
        (thread.requested, thread.fallback) = (mask.clone(), None);
        Some(thread)
    }

    /// pjw requests a mask. Returns whether the kernel accepted the request.
    pub fn request_for_pjw(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        self.set_requested(pid, tid, mask).is_some()
    }

    /// A program requests a mask. Returns whether the kernel accepted the request.
    pub fn request(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let now = self.now;
        let thread = self.set_requested(pid, tid, mask);
        let is_accepted = thread.is_some();
        if let Some(thread) = thread {
            (thread.original, thread.has_own_request) = (mask.clone(), true);
            thread.requested_at = now;
            thread.run_ns += 1;
        }
        if let Some(process) = self.processes.get(&pid).filter(|_| self.reports_requests) {
            self.affinity_requests.push(AffinityRequest {
                caller: tid,
                process: pid,
                parent: process.parent,
                comm: process.comm,
                at: Nanos(now),
                target: None,
                cpus: mask.clone(),
                refused: !is_accepted,
            });
        }
        self.log(|| format!("  thread {tid} of {pid} requests {mask}: accepted: {is_accepted}"));
        is_accepted
    }

    /// A program requests every PU, and then its previous mask. The mask is unchanged afterwards.
    pub fn request_and_restore(&mut self, pid: Pid, tid: Tid) {
        let before = self.processes.get(&pid).and_then(|process| process.threads.get(&tid)).cloned();
        self.request(pid, tid, &self.cpus.clone());
        if let (Some(before), Some(process)) = (before, self.processes.get_mut(&pid)) {
            process.threads.insert(tid, before);
        }
    }

    /// Switches a PU off or on. The last online PU stays online. The masks in cpusets are rewritten at once.
    pub fn toggle_pu(&mut self, pu: Pu) {
        let mut online = self.online.clone();
        if !online.remove(pu) || online.is_empty() {
            online.insert(pu);
        }
        self.set_online(&online);
    }

    /// Switches PUs off and on, until these are online. The masks in cpusets are rewritten at once.
    pub fn set_online(&mut self, online: &CpuSet) {
        self.online = online.clone();
        self.active = online.clone();
        self.rewrite_masks();
    }

    /// The kernel stops using PUs or uses them again, until these are active. The masks in cpusets are not rewritten yet.
    /// A thread without an active PU may run on all PUs of its cpuset.
    pub fn set_active(&mut self, active: &CpuSet) {
        self.active = active.clone();
        let mut processes = std::mem::take(&mut self.processes);
        for process in processes.values_mut() {
            let cpuset = self.cpuset_of(&process.cgroup).filter(|cpus| cpus.intersects(active));
            for thread in process.threads.values_mut() {
                let stored = self.stored_mask(&process.cgroup, &thread.requested);
                if !thread.fallback.as_ref().unwrap_or(&stored).intersects(active) {
                    thread.fallback = Some(cpuset.unwrap_or(&self.cpus).clone());
                }
            }
        }
        self.processes = processes;
    }

    /// The kernel rewrites the masks in each cpuset of which a PU became active or inactive since the last rewrite.
    pub fn rewrite_masks(&mut self) {
        let before = std::mem::replace(&mut self.active_at_rewrite, self.active.clone());
        let changed = before.difference(&self.active).union(&self.active.difference(&before));
        let concerned = self.cpusets.iter().filter(|(_, cpus)| cpus.intersects(&changed));
        let concerned: Vec<String> = concerned.map(|(path, _)| path.clone()).collect();
        concerned.iter().for_each(|path| self.rewrite_masks_in(path, None));
    }

    /// Whether a cgroup or one of its descendants contains a process.
    #[must_use]
    pub fn is_populated(&self, path: &str) -> bool {
        self.processes.values().any(|process| is_within(&process.cgroup, path))
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::testing::set;

    use super::*;

    #[test]
    fn a_child_inherits_mask_session_cgroup_and_an_orphan_is_process_ones() {
        let mut world = World::new(&set("0-7"));
        let father = world.spawn(Pid(1), Uid(1001));
        world.enter_cgroup(father, "/a/b");
        world.request_for_pjw(father, Tid(father.0), &set("2-3"));
        let child = world.spawn(father, Uid(1001));
        world.exit(father);
        let child = &world.processes[&child];
        assert_eq!((child.parent, child.session, child.cgroup.as_str()), (Pid(1), Pid(1), "/a/b"));
        let thread = child.threads.values().next().unwrap();
        assert_eq!((thread.requested.to_string(), thread.original.to_string()), ("2-3".into(), "0-7".into()));
    }

    #[test]
    fn numbers_are_reused_and_start_times_are_not() {
        let mut world = World::new(&set("0"));
        let mut seen = BTreeMap::new();
        let mut reused = 0;
        for _ in 0..1000 {
            let pid = world.spawn(Pid(1), Uid(1));
            let start = world.processes[&pid].id.start;
            reused += usize::from(seen.insert(pid, start).is_some_and(|before| before != start));
            world.exit(pid);
        }
        assert!(reused > 500, "{reused}");
    }

    #[test]
    fn a_mask_is_cut_to_the_cpuset_and_to_what_is_on_and_comes_back() {
        let mut world = World::new(&set("0-7"));
        let pid = world.spawn(Pid(1), Uid(1));
        world.cpusets.insert("/job".to_owned(), set("2-5"));
        world.enter_cgroup(pid, "/job/step");
        assert_eq!(world.mask_in("/job/step", &set("4-7")).to_string(), "4-5");
        assert!(!world.request_for_pjw(pid, Tid(pid.0), &set("6-7")), "EINVAL");
        world.toggle_pu(Pu(4));
        assert_eq!(world.mask_in("/job/step", &set("4-7")).to_string(), "5");
        world.toggle_pu(Pu(5));
        assert_eq!(world.mask_in("/job/step", &set("4-7")).to_string(), "2-3");
        world.toggle_pu(Pu(4));
        assert_eq!(world.mask_in("/job/step", &set("4-7")).to_string(), "4");
    }
}
