//! The simulated kernel: processes and threads, inheritance, and effective affinity masks.
//!
//! Rules: A child has the mask, session, group and cgroup of its parent (fork(2), sched(7)). The parent of an orphan
//! is process 1. Process ids are used again; pairs of process id and start time are not. The effective mask is the
//! requested mask, cut to the cpuset and to the online PUs. If nothing is left, it is all online PUs of the cpuset.
//! (cpuset(7); Linux 6.2 and later remember the requested mask.)
//!
//! Beside the mask that was requested last, each thread has the mask that would have been requested without pjw. A
//! release must restore that mask.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::CpusetSupport;
use pjw_core::ids::is_within;
use pjw_core::ids::{Comm, ProcessId};
use pjw_core::ids::{Pid, StartTime, Tid, Uid};
use pjw_core::snapshot::{AffinityRequest, ProcessEvent};
use pjw_core::time::{Moment, Nanos, UnixMillis};

/// The largest process id. It is small, so that process ids are used again often.
const PID_MAX: u32 = 400;

/// A thread.
#[derive(Debug, Clone)]
pub struct SimThread {
    /// The start time of the thread.
    pub start: StartTime,
    /// The mask that was requested last, by the program, a user or pjw.
    pub asked: CpuSet,
    /// The mask that would have been requested last without pjw.
    pub wish: CpuSet,
    /// Whether the thread itself, or the thread from which it inherited its mask, requested a mask.
    pub chose: bool,
    /// The time of the last request by the program or a user, since boot, in ns.
    pub changed_at: u64,
    /// Whether the mask without pjw can't be known, because the creator of the thread or of an ancestor is unknown:
    /// the kernel does not report which thread of a process creates another thread, and the threads of this process
    /// would have different masks without pjw.
    pub has_unknown_creator: bool,
    /// Whether the thread runs all the time.
    pub hot: bool,
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
    /// The cgroup.
    pub cgroup: String,
    /// The cgroup in which the process would be without pjw.
    pub own_cgroup: String,
    /// The environment.
    pub environ: BTreeMap<String, String>,
    /// The job to which the process belongs, as the workload that made the process knows. `None` if it belongs to no
    /// job.
    pub truth: Option<String>,
    /// Whether the attributes of the process changed since they were last read.
    pub fresh_attributes: bool,
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
    /// The online PUs.
    pub online: CpuSet,
    /// All processes.
    pub processes: BTreeMap<Pid, SimProcess>,
    /// The cpuset of each cgroup that has one.
    pub cpusets: BTreeMap<String, CpuSet>,
    /// The cgroups in `cpusets` that are partitions of the type `isolated`.
    pub partitions: BTreeSet<String>,
    /// The cgroups in which another program switched the cpuset controller off.
    pub switched_off: BTreeSet<String>,
    /// The cgroups that were removed: no process is moved back there.
    pub removed: BTreeSet<String>,
    /// The cpuset features of the machine.
    pub cpuset_support: CpusetSupport,
    /// The process events that were not read yet.
    pub events: Vec<ProcessEvent>,
    /// The affinity requests that were not read yet.
    pub asked: Vec<AffinityRequest>,
    /// The changes of processes and masks as lines of text, for printing. `None` if they are not printed.
    pub story: Option<Vec<String>>,
    now: u64,
    next: u32,
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
            switched_off: BTreeSet::new(),
            removed: BTreeSet::new(),
            cpuset_support: CpusetSupport::default(),
            events: Vec::new(),
            asked: Vec::new(),
            story: None,
            now: 1_000_000_000,
            next: 1,
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

    /// Advances the time by `ns`. Hot threads run for that time.
    pub fn advance(&mut self, ns: u64) {
        self.now += ns;
        for thread in self.processes.values_mut().flat_map(|process| process.threads.values_mut()) {
            if thread.hot {
                thread.run_ns += ns;
            }
        }
    }

    fn number(&mut self) -> u32 {
        let taken: BTreeSet<u32> = self
            .processes
            .iter()
            .flat_map(|(pid, process)| process.threads.keys().map(|tid| tid.0).chain([pid.0]))
            .collect();
        let free =
            (0..PID_MAX).map(|step| (self.next - 1 + step) % PID_MAX + 1).find(|pid| !taken.contains(pid));
        let number = free.unwrap_or(PID_MAX + 1);
        self.next = number % PID_MAX + 1;
        number
    }

    /// The start time of a new process or thread: the present tick. Many may start in one tick, but no number is used twice in
    /// one.
    fn start(&mut self, number: u32) -> StartTime {
        let tick = self.now / StartTime::TICK.0;
        let after_last = self.starts.get(&number).map_or(0, |last| last.0 + 1);
        let start = StartTime(tick.max(after_last));
        self.starts.insert(number, start);
        start
    }

    /// Adds a line to `story`.
    fn tell(&mut self, line: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            story.push(line());
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
        let pid = Pid(self.number());
        let start = self.start(pid.0);
        let born_of = self.processes.get(&parent).cloned();
        let template = born_of.as_ref().and_then(|parent| parent.threads.get(&creator).cloned());
        let thread = SimThread {
            start,
            asked: template.as_ref().map_or_else(|| self.cpus.clone(), |thread| thread.asked.clone()),
            wish: template.as_ref().map_or_else(|| self.cpus.clone(), |thread| thread.wish.clone()),
            chose: template.as_ref().is_some_and(|thread| thread.chose),
            changed_at: template.as_ref().map_or(0, |thread| thread.changed_at),
            has_unknown_creator: template.is_some_and(|thread| thread.has_unknown_creator),
            hot: false,
            run_ns: 0,
        };
        let process = SimProcess {
            id: ProcessId { pid, start },
            parent,
            group: born_of.as_ref().map_or(pid, |parent| parent.group),
            session: born_of.as_ref().map_or(pid, |parent| parent.session),
            uid,
            comm: Comm::from("work"),
            cgroup: born_of.as_ref().map_or_else(|| "/".to_owned(), |parent| parent.cgroup.clone()),
            own_cgroup: born_of.as_ref().map_or_else(|| "/".to_owned(), |parent| parent.own_cgroup.clone()),
            environ: born_of.as_ref().map(|parent| parent.environ.clone()).unwrap_or_default(),
            truth: born_of.and_then(|parent| parent.truth),
            fresh_attributes: true,
            threads: BTreeMap::from([(Tid(pid.0), thread)]),
        };
        self.tell(|| {
            format!(
                "  thread {creator} of {parent} forks {pid}@{start}, requested {}",
                process.threads[&Tid(pid.0)].asked
            )
        });
        self.processes.insert(pid, process);
        self.events.push(ProcessEvent::Fork { parent, creator, child: pid, at: Nanos(self.now) });
        pid
    }

    /// Starts a thread with the mask of the thread `creator`.
    pub fn clone_thread(&mut self, pid: Pid, creator: Tid) {
        let tid = Tid(self.number());
        let start = self.start(tid.0);
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(creator) = process.threads.get(&creator).cloned()
        {
            let asked = creator.asked.clone();
            let differs = process.threads.values().any(|other| other.wish != creator.wish);
            let has_unknown_creator = creator.has_unknown_creator || differs;
            let thread = SimThread { start, hot: false, run_ns: 1, has_unknown_creator, ..creator };
            process.threads.insert(tid, thread);
            self.events.push(ProcessEvent::ThreadFork { pid, tid });
            self.tell(|| format!("  process {pid} has a thread {tid}, requested {asked}"));
        }
    }

    /// Executes another program in a process.
    pub fn exec(&mut self, pid: Pid, comm: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.comm = Comm::from(comm);
            process.fresh_attributes = true;
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

    /// Moves a process to another cgroup. A kernel before Linux 6.2 forgets the requested masks.
    pub fn enter(&mut self, pid: Pid, cgroup: &str) {
        let forgets = !self.cpuset_support.affinity_persists;
        if let Some(process) = self.processes.get_mut(&pid) {
            process.own_cgroup = cgroup.to_owned();
            if forgets {
                let now = self.now;
                process
                    .threads
                    .values_mut()
                    .for_each(|thread| (thread.chose, thread.changed_at) = (true, now));
            }
        }
        self.carry(pid, cgroup);
    }

    /// Moves a process to another cgroup, for pjw.
    pub fn carry(&mut self, pid: Pid, cgroup: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.cgroup = cgroup.to_owned();
            process.fresh_attributes = true;
        }
        self.tell(|| format!("  process {pid} enters {cgroup}"));
        self.forget_masks(cgroup, Some(pid));
    }

    /// Sets the cpuset of a cgroup. `None` removes the cpuset.
    pub fn write_cpuset(&mut self, path: &str, cpus: Option<&CpuSet>) {
        let was = self.cpusets.get(path).cloned();
        match cpus {
            Some(cpus) => self.cpusets.insert(path.to_owned(), cpus.clone()),
            None => self.cpusets.remove(path),
        };
        self.tell(|| format!("  cpuset {path} is {cpus:?}"));
        if was.as_ref() != cpus {
            self.forget_masks(path, None);
        }
    }

    fn forget_masks(&mut self, path: &str, only: Option<Pid>) {
        if self.cpuset_support.affinity_persists {
            return;
        }
        let everything = self.cpus.clone();
        let concerned = self.processes.values_mut().filter(|process| {
            is_within(&process.cgroup, path) && only.is_none_or(|pid| pid == process.id.pid)
        });
        for thread in concerned.flat_map(|process| process.threads.values_mut()) {
            thread.asked = everything.clone();
        }
    }

    /// The effective PUs of a cgroup.
    #[must_use]
    pub fn allowance(&self, cgroup: &str) -> CpuSet {
        let narrowed = self.cpusets.iter().filter(|(path, _)| is_within(cgroup, path));
        let narrowed = narrowed.filter(|(path, _)| !self.switched_off.contains(*path));
        let cpuset = narrowed.max_by_key(|(path, _)| path.len()).map_or(&self.cpus, |(_, cpus)| cpus);
        let on = cpuset.intersection(&self.online);
        if on.is_empty() { self.online.clone() } else { on }
    }

    /// Ends a process. Process 1 becomes the parent of its children.
    pub fn exit(&mut self, pid: Pid) {
        if pid != Pid(1) && self.processes.remove(&pid).is_some() {
            for child in self.processes.values_mut().filter(|child| child.parent == pid) {
                child.parent = Pid(1);
            }
            self.events.push(ProcessEvent::Exit { pid });
            self.tell(|| format!("  process {pid} ends"));
        }
    }

    /// A program requests a mask. Returns whether the kernel accepted the request.
    pub fn choose(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let refused = !mask.intersects(&self.possible(pid));
        let at = self.moment().since_boot;
        let Some(process) = self.processes.get_mut(&pid) else { return false };
        let Some(thread) = process.threads.get_mut(&tid) else { return false };
        self.asked.push(AffinityRequest {
            caller: tid,
            process: pid,
            parent: process.parent,
            comm: process.comm,
            at,
            target: None,
            cpus: mask.clone(),
            refused,
        });
        if refused {
            return false;
        }
        (thread.asked, thread.wish, thread.chose) = (mask.clone(), mask.clone(), true);
        thread.changed_at = self.now;
        thread.run_ns += 1;
        self.tell(|| format!("  thread {tid} of {pid} requests {mask}"));
        true
    }

    /// A program requests every PU, and then its previous mask. The mask is unchanged afterwards.
    pub fn ask_in_vain(&mut self, pid: Pid, tid: Tid) {
        let thread = |world: &Self| Some(world.processes.get(&pid)?.threads.get(&tid)?.clone());
        let everything = self.cpus.clone();
        let before = thread(self);
        self.choose(pid, tid, &everything);
        if let (Some(before), Some(process)) = (before, self.processes.get_mut(&pid)) {
            process.threads.insert(tid, before);
        }
    }

    /// Sets a mask for pjw. Returns `false` if the kernel refuses the mask, because it has no PU that the thread may
    /// use.
    pub fn set(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let possible = self.possible(pid);
        let thread = self.processes.get_mut(&pid).and_then(|process| process.threads.get_mut(&tid));
        match thread {
            Some(thread) if mask.intersects(&possible) => {
                thread.asked = mask.clone();
                true
            }
            _ => false,
        }
    }

    /// The PUs that the cpuset of a process and the online PUs allow.
    fn possible(&self, pid: Pid) -> CpuSet {
        self.allowance(self.processes.get(&pid).map(|process| process.cgroup.as_str()).unwrap_or_default())
    }

    /// The effective mask of a process for the requested mask `asked`.
    #[must_use]
    pub fn effective(&self, pid: Pid, asked: &CpuSet) -> CpuSet {
        let possible = self.possible(pid);
        let cut = asked.intersection(&possible);
        if cut.is_empty() { possible } else { cut }
    }

    /// Switches a PU off or on. The last online PU stays online. A kernel before Linux 6.2 then resets the masks in
    /// each cpuset that has the PU.
    pub fn flip(&mut self, pu: Pu) {
        let was_on = self.online.remove(pu);
        if !was_on || self.online.is_empty() {
            self.online.insert(pu);
        }
        let concerned = self.cpusets.iter().filter(|(_, cpus)| cpus.contains(pu));
        let concerned: Vec<String> = concerned.map(|(path, _)| path.clone()).collect();
        for path in concerned {
            self.forget_masks(&path, None);
        }
    }

    /// Whether a cgroup or one of its descendants contains a process.
    #[must_use]
    pub fn inhabited(&self, path: &str) -> bool {
        self.processes.values().any(|process| is_within(&process.cgroup, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn a_child_inherits_mask_session_cgroup_and_an_orphan_is_process_ones() {
        let mut world = World::new(&set("0-7"));
        let father = world.spawn(Pid(1), Uid(1001));
        world.enter(father, "/a/b");
        world.set(father, Tid(father.0), &set("2-3"));
        let child = world.spawn(father, Uid(1001));
        world.exit(father);
        let child = &world.processes[&child];
        assert_eq!((child.parent, child.session, child.cgroup.as_str()), (Pid(1), Pid(1), "/a/b"));
        let thread = child.threads.values().next().unwrap();
        assert_eq!((thread.asked.to_string(), thread.wish.to_string()), ("2-3".into(), "0-7".into()));
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
        world.enter(pid, "/job/step");
        assert_eq!(world.effective(pid, &set("4-7")).to_string(), "4-5");
        assert!(!world.set(pid, Tid(pid.0), &set("6-7")), "EINVAL");
        world.flip(Pu(4));
        assert_eq!(world.effective(pid, &set("4-7")).to_string(), "5");
        world.flip(Pu(5));
        assert_eq!(world.effective(pid, &set("4-7")).to_string(), "2-3");
        world.flip(Pu(4));
        assert_eq!(world.effective(pid, &set("4-7")).to_string(), "4");
    }
}
