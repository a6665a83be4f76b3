//! The fake kernel: processes and threads, who inherits what, which mask counts.
//!
//! Rules: a child has its parent's mask, session, group and cgroup (fork(2), sched(7)); an orphan's parent is 1;
//! numbers are reused, start times are not; the mask that counts is what was asked for, cut to the cpuset and to
//! the PUs that are online, and if nothing is left of it, all of those (cpuset(7), Linux 6.2 and later remember
//! what was asked for).
//!
//! Beside the mask that was asked for last, each thread has its *wish*: the mask it would have if there were no
//! warden. That is what a release must bring back.

use std::collections::{BTreeMap, BTreeSet};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::{Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::snapshot::{Asked, Moment, Nanos, UnixMillis};
use pjw_core::wall::{Ground, lies_in};

/// Numbers start over here: reuse is the rule, not the exception.
const PID_MAX: u32 = 400;

/// Something that the kernel would tell over netlink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimEvent {
    /// A process was born.
    Fork {
        /// Its parent.
        parent: Pid,
        /// Itself.
        child: Pid,
    },
    /// A process runs another program.
    Exec(Pid),
    /// A process ended.
    Exit(Pid),
}

/// A thread.
#[derive(Debug, Clone)]
pub struct SimThread {
    /// When it started.
    pub start: StartTime,
    /// What was asked for last, by whomever.
    pub asked: CpuSet,
    /// What would have been asked for without the warden.
    pub wish: CpuSet,
    /// Whether it, or whoever made it, chose a mask itself.
    pub chose: bool,
    /// Whether it runs all the time.
    pub hot: bool,
    /// How long it ran.
    pub run_ns: u64,
}

/// A process.
#[derive(Debug, Clone)]
pub struct SimProcess {
    /// Who it is.
    pub id: ProcessId,
    /// Its parent now.
    pub parent: Pid,
    /// Its process group.
    pub group: Pid,
    /// Its session.
    pub session: Pid,
    /// Its user.
    pub uid: Uid,
    /// Its name.
    pub comm: Comm,
    /// Its cgroup.
    pub cgroup: String,
    /// The cgroup it would be in without the warden.
    pub own_cgroup: String,
    /// Its environment.
    pub environ: BTreeMap<String, String>,
    /// The job to which it belongs in truth, as those who made it know.
    pub truth: Option<String>,
    /// Whether its marks changed since they were last read.
    pub fresh_marks: bool,
    /// Its threads.
    pub threads: BTreeMap<Tid, SimThread>,
}

impl SimProcess {
    /// How long all of its threads ran, in nanoseconds: what its CPU clock says.
    #[must_use]
    pub fn run_ns(&self) -> u64 {
        self.threads.values().map(|thread| thread.run_ns).sum()
    }
}

/// The machine.
#[derive(Debug, Clone)]
pub struct World {
    /// All PUs.
    pub cpus: CpuSet,
    /// Those that are switched on.
    pub online: CpuSet,
    /// Everyone.
    pub processes: BTreeMap<Pid, SimProcess>,
    /// The cpuset of each cgroup that has one.
    pub cpusets: BTreeMap<String, CpuSet>,
    /// Which of them are partitions, `isolated`.
    pub partitions: BTreeSet<String>,
    /// Cgroups for which somebody switched the controller of cpusets off.
    pub switched_off: BTreeSet<String>,
    /// Cgroups that are gone: nobody returns there.
    pub removed: BTreeSet<String>,
    /// What it offers for walls.
    pub ground: Ground,
    /// What the kernel would tell.
    pub events: Vec<SimEvent>,
    /// Who asked for a mask since that was last told.
    pub asked: Vec<Asked>,
    now: u64,
    next: u32,
    latest: StartTime,
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
            ground: Ground::default(),
            events: Vec::new(),
            asked: Vec::new(),
            now: 1_000_000_000,
            next: 1,
            latest: StartTime(0),
        };
        world.spawn(Pid(0), Uid::ROOT);
        world
    }

    /// The time.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let wall = UnixMillis(i64::try_from(self.now / 1_000_000).unwrap_or(0));
        Moment { since_boot: Nanos(self.now), wall }
    }

    /// Lets time pass; hot threads run.
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

    /// The present tick, or the next one in which nobody started yet.
    fn birth(&mut self) -> StartTime {
        self.latest = StartTime((self.now / StartTime::TICK.0).max(self.latest.0 + 1));
        self.latest
    }

    /// Starts a process: a child of `parent` if that lives, with what a child has of its parent.
    pub fn spawn(&mut self, parent: Pid, uid: Uid) -> Pid {
        let pid = Pid(self.number());
        let start = self.birth();
        let born_of = self.processes.get(&parent).cloned();
        let template = born_of.as_ref().and_then(|parent| parent.threads.values().next().cloned());
        let thread = SimThread {
            start,
            asked: template.as_ref().map_or_else(|| self.cpus.clone(), |thread| thread.asked.clone()),
            wish: template.as_ref().map_or_else(|| self.cpus.clone(), |thread| thread.wish.clone()),
            chose: template.is_some_and(|thread| thread.chose),
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
            fresh_marks: true,
            threads: BTreeMap::from([(Tid(pid.0), thread)]),
        };
        self.processes.insert(pid, process);
        self.events.push(SimEvent::Fork { parent, child: pid });
        pid
    }

    /// Starts a thread with its process's first thread's mask.
    pub fn clone_thread(&mut self, pid: Pid) {
        let tid = Tid(self.number());
        let start = self.birth();
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(creator) = process.threads.values().next().cloned()
        {
            process.threads.insert(tid, SimThread { start, hot: false, run_ns: 1, ..creator });
        }
    }

    /// Another program in the same process.
    pub fn exec(&mut self, pid: Pid, comm: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.comm = Comm::from(comm);
            process.fresh_marks = true;
            // A process's clock goes on with what its threads took that are gone, and whatever a program does takes time.
            let ran = process.run_ns();
            process.threads.retain(|tid, _| tid.0 == pid.0);
            process.threads.values_mut().for_each(|thread| thread.run_ns = ran + 1);
            self.events.push(SimEvent::Exec(pid));
        }
    }

    /// A session of its own.
    pub fn setsid(&mut self, pid: Pid) {
        if let Some(process) = self.processes.get_mut(&pid) {
            (process.session, process.group) = (pid, pid);
        }
    }

    /// Another cgroup. Before Linux 6.2 the kernel forgets what masks were asked for.
    pub fn enter(&mut self, pid: Pid, cgroup: &str) {
        let forgets = !self.ground.masks_last;
        if let Some(process) = self.processes.get_mut(&pid) {
            process.own_cgroup = cgroup.to_owned();
            if forgets {
                process.threads.values_mut().for_each(|thread| thread.chose = true);
            }
        }
        self.carry(pid, cgroup);
    }

    /// The same by the warden's hand.
    pub fn carry(&mut self, pid: Pid, cgroup: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.cgroup = cgroup.to_owned();
            process.fresh_marks = true;
        }
        self.forget_masks(cgroup, Some(pid));
    }

    /// Another cpuset; `None` for none of its own.
    pub fn write_cpuset(&mut self, path: &str, cpus: Option<&CpuSet>) {
        let was = self.cpusets.get(path).cloned();
        match cpus {
            Some(cpus) => self.cpusets.insert(path.to_owned(), cpus.clone()),
            None => self.cpusets.remove(path),
        };
        if was.as_ref() != cpus {
            self.forget_masks(path, None);
        }
    }

    fn forget_masks(&mut self, path: &str, only: Option<Pid>) {
        if self.ground.masks_last {
            return;
        }
        let everything = self.cpus.clone();
        let concerned = self
            .processes
            .values_mut()
            .filter(|process| lies_in(&process.cgroup, path) && only.is_none_or(|pid| pid == process.id.pid));
        for thread in concerned.flat_map(|process| process.threads.values_mut()) {
            thread.asked = everything.clone();
        }
    }

    /// What the cpuset of a cgroup comes to.
    #[must_use]
    pub fn allowance(&self, cgroup: &str) -> CpuSet {
        let narrowed = self.cpusets.iter().filter(|(path, _)| lies_in(cgroup, path));
        let narrowed = narrowed.filter(|(path, _)| !self.switched_off.contains(*path));
        let cpuset = narrowed.max_by_key(|(path, _)| path.len()).map_or(&self.cpus, |(_, cpus)| cpus);
        let on = cpuset.intersection(&self.online);
        if on.is_empty() { self.online.clone() } else { on }
    }

    /// The end of a process; its children are process 1's.
    pub fn exit(&mut self, pid: Pid) {
        if pid != Pid(1) && self.processes.remove(&pid).is_some() {
            for child in self.processes.values_mut().filter(|child| child.parent == pid) {
                child.parent = Pid(1);
            }
            self.events.push(SimEvent::Exit(pid));
        }
    }

    /// A program asks for a mask of its own; says whether the kernel agreed.
    pub fn choose(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let refused = !mask.intersects(&self.possible(pid));
        let at = self.moment().since_boot;
        let Some(process) = self.processes.get_mut(&pid) else { return false };
        let Some(thread) = process.threads.get_mut(&tid) else { return false };
        self.asked.push(Asked {
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
        thread.run_ns += 1;
        true
    }

    /// A program asks for every PU, and at once for what it had before. That leaves no trace in its masks.
    pub fn ask_in_vain(&mut self, pid: Pid, tid: Tid) {
        let thread = |world: &Self| Some(world.processes.get(&pid)?.threads.get(&tid)?.clone());
        let everything = self.cpus.clone();
        let before = thread(self);
        self.choose(pid, tid, &everything);
        if let (Some(before), Some(process)) = (before, self.processes.get_mut(&pid)) {
            process.threads.insert(tid, before);
        }
    }

    /// The warden asks for a mask; the kernel refuses one that allows nothing.
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

    /// What a process's cpuset and the PUs that are on allow.
    fn possible(&self, pid: Pid) -> CpuSet {
        self.allowance(self.processes.get(&pid).map(|process| process.cgroup.as_str()).unwrap_or_default())
    }

    /// What the kernel makes of a mask that was asked for.
    #[must_use]
    pub fn effective(&self, pid: Pid, asked: &CpuSet) -> CpuSet {
        let possible = self.possible(pid);
        let cut = asked.intersection(&possible);
        if cut.is_empty() { possible } else { cut }
    }

    /// Switches a PU off or on; the last one stays on. Before Linux 6.2 the kernel writes the masks behind each cpuset
    /// that has the PU anew.
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

    /// Whether anyone lives in a cgroup or below it.
    #[must_use]
    pub fn inhabited(&self, path: &str) -> bool {
        self.processes.values().any(|process| lies_in(&process.cgroup, path))
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
