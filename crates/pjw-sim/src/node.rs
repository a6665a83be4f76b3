//! The world as the warden sees it: whole processes that may vanish, masks that may be refused.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::newborn::{Expected, Glance, Newborn};
use pjw_core::node::Node;
use pjw_core::plan::{Action, ActionKind, Outcome};
use pjw_core::process::{CgroupId, Pid, ProcessId, StartTime};
use pjw_core::snapshot::{Cgroup, Cpuset, Look, Marks, Nanos, Process, Scope, Seen, Snapshot, Thread, Watch};
use pjw_core::wall::{Cpusets, Mason, OWN_DIRECTORY, WallAction, WallChange, WallOutcome};

use crate::faults::Faults;
use crate::workload::Workload;
use crate::world::{SimProcess, World};

/// Of so many sleepers one is asked for its masks in a look that is not full.
const TURNS: u32 = 4;

/// A view on a world that others change too.
#[derive(Debug, Clone)]
pub struct SimNode {
    world: Rc<RefCell<World>>,
    workload: Rc<RefCell<Workload>>,
    faults: Faults,
    /// How long each sleeper had run when it was looked at last, and since when it sleeps.
    slept: BTreeMap<Pid, (u64, Option<Nanos>)>,
    /// Whose turn it is to be asked for its masks though it slept.
    turn: u32,
    /// The PUs that were on at the last look.
    online: CpuSet,
    /// Whom the last glance told of, if no look was taken since.
    just_born: BTreeSet<ProcessId>,
}

impl SimNode {
    /// A view on a world in which this workload goes on while the warden works.
    #[must_use]
    pub fn new(world: Rc<RefCell<World>>, workload: Rc<RefCell<Workload>>, faults: Faults) -> Self {
        Self {
            world,
            workload,
            faults,
            slept: BTreeMap::new(),
            turn: 0,
            online: CpuSet::new(),
            just_born: BTreeSet::new(),
        }
    }

    /// Who of the sleepers ran, with when they were last seen asleep; and who slept on.
    fn wake(
        &mut self,
        watch: &Watch,
        at: Nanos,
        full: bool,
    ) -> (BTreeMap<Pid, Option<Nanos>>, BTreeSet<Pid>) {
        let (mut woken, mut asleep) = (BTreeMap::new(), BTreeSet::new());
        let world = self.world.borrow();
        self.turn += 1;
        let replugged = self.online != world.online;
        self.online = world.online.clone();
        let sleepers = watch.groups.iter().flat_map(|group| group.pids.iter().map(move |pid| (*pid, group)));
        for (pid, group) in sleepers {
            let ran = world.processes.get(&pid);
            let outside = |within: &CpuSet| {
                let mut threads = ran.iter().flat_map(|process| process.threads.values());
                threads.any(|thread| !world.effective(pid, &thread.asked).is_subset(within))
            };
            let checked = full || pid.0 % TURNS == self.turn % TURNS;
            let outside = checked && group.within.as_ref().is_some_and(outside);
            let ran = ran.map(SimProcess::run_ns);
            match (ran, self.slept.get(&pid).copied()) {
                (Some(ran), Some((before, quiet))) if ran == before && !replugged => {
                    self.slept.insert(pid, (ran, Some(at)));
                    if outside {
                        woken.insert(pid, quiet);
                    } else {
                        asleep.insert(pid);
                    }
                }
                (ran, known) => {
                    woken.insert(pid, known.and_then(|(_, quiet)| quiet));
                    ran.map(|ran| self.slept.insert(pid, (ran, None)));
                }
            }
        }
        (woken, asleep)
    }

    /// Who of nobody's job ran since it was asked last, or is gone.
    fn stirred_strangers(&mut self, watch: &Watch) -> BTreeSet<Pid> {
        let world = self.world.borrow();
        let mut slept = |pid: Pid| {
            let ran = world.processes.get(&pid)?.run_ns();
            let (before, _) = self.slept.insert(pid, (ran, None))?;
            (before == ran).then_some(())
        };
        watch.strangers.iter().copied().filter(|&pid| slept(pid).is_none()).collect()
    }

    /// The world goes on while the warden thinks, and no two looks are taken at the same time.
    fn meanwhile(&self) {
        self.world.borrow_mut().advance(1);
        if self.faults.strikes(self.faults.meanwhile) {
            self.workload.borrow_mut().step(&mut self.world.borrow_mut());
        }
    }
}

fn show(world: &mut World, pid: Pid, with_threads: bool) -> Option<Process> {
    let process = world.processes.get(&pid)?.clone();
    if let Some(process) = world.processes.get_mut(&pid) {
        process.fresh_marks = false;
    }
    let marks = process.fresh_marks.then(|| Marks {
        cgroups: vec![(String::new(), process.cgroup.clone())],
        environ: process.environ.clone(),
        groups: Vec::new(),
        command_line: process.comm.to_string(),
    });
    let first = process.threads.values().next();
    let mask = first.map(|thread| world.effective(pid, &thread.asked));
    let thread = |(&tid, thread): (&pjw_core::process::Tid, &crate::world::SimThread)| {
        let allowed = world.effective(pid, &thread.asked);
        Thread {
            tid,
            start: thread.start,
            comm: process.comm,
            state: if thread.hot { 'R' } else { 'S' },
            last_cpu: allowed.first().unwrap_or(Pu(0)),
            run_ns: thread.run_ns,
            wait_ns: 0,
            allowed,
        }
    };
    Some(Process {
        id: process.id,
        parent: process.parent,
        group: process.group,
        session: process.session,
        uid: process.uid,
        comm: process.comm,
        kernel: false,
        mask,
        cgroup: Some(process.cgroup.as_str().into()),
        marks,
        claims: None,
        threads: with_threads.then(|| process.threads.iter().map(thread).collect()),
        quiet_until: None,
    })
}

fn cpuset(world: &World, path: &str) -> Option<Cpuset> {
    let is_there = !matches!(world.ground.cpusets, Cpusets::Nowhere { .. });
    (is_there && !world.switched_off.contains(path)).then(|| Cpuset {
        cpus: world.cpusets.get(path).cloned().unwrap_or_default(),
        effective: world.allowance(path),
        mems: CpuSet::new(),
        isolated: world.partitions.contains(path),
    })
}

fn build(world: &mut World, change: &WallChange) -> WallOutcome {
    let is_there = |world: &World, process: &ProcessId, at: &str| {
        world.processes.get(&process.pid).is_some_and(|found| found.id == *process && found.cgroup == at)
    };
    match change {
        WallChange::Raise { wall, .. } if wall.mason == Mason::Scheduler && !world.inhabited(&wall.path) => {
            return WallOutcome::Gone;
        }
        WallChange::Raise { wall, .. } if world.switched_off.contains(&wall.path) => {
            return WallOutcome::Refused { hint: "its controller is switched off".to_owned() };
        }
        WallChange::Raise { wall, founders } => {
            if wall.mason == Mason::Systemd && !world.inhabited(&wall.path) {
                let here: Vec<Pid> = founders
                    .iter()
                    .filter(|id| world.processes.get(&id.pid).is_some_and(|process| process.id == **id))
                    .map(|id| id.pid)
                    .collect();
                if here.is_empty() {
                    return WallOutcome::Gone;
                }
                here.into_iter().for_each(|pid| world.carry(pid, &wall.path));
            }
            world.write_cpuset(&wall.path, Some(&wall.bounds.cpus));
            if wall.bounds.isolated {
                world.partitions.insert(wall.path.clone());
            } else {
                world.partitions.remove(&wall.path);
            }
            return WallOutcome::Done { effective: Some(world.allowance(&wall.path)) };
        }
        WallChange::Admit { process, from, to } | WallChange::Return { process, from, to } => {
            if !is_there(world, process, from) {
                return WallOutcome::Gone;
            }
            if world.removed.contains(to) {
                return WallOutcome::Refused { hint: "it is gone".to_owned() };
            }
            world.carry(process.pid, to);
        }
        WallChange::Open { wall } if wall.mason == Mason::Scheduler => world.write_cpuset(&wall.path, None),
        WallChange::Open { wall } => {
            let all = world.cpus.clone();
            world.partitions.remove(&wall.path);
            world.write_cpuset(&wall.path, Some(&all));
        }
        WallChange::Raze { wall } if wall.mason == Mason::Scheduler => {}
        WallChange::Raze { wall } if world.inhabited(&wall.path) => {
            return WallOutcome::Refused { hint: "processes are still in it".to_owned() };
        }
        WallChange::Raze { wall } => world.write_cpuset(&wall.path, None),
    }
    WallOutcome::Done { effective: None }
}

impl Node for SimNode {
    fn observe(&mut self, look: &Look) -> Snapshot {
        self.meanwhile();
        self.just_born.clear();
        let taken = self.world.borrow().moment();
        let strangers = self.stirred_strangers(&look.watch);
        let (woken, asleep) = self.wake(&look.watch, taken.since_boot, look.scope == Scope::Full);
        let pids: BTreeSet<Pid> = match &look.scope {
            Scope::Full => self.world.borrow().processes.keys().copied().collect(),
            Scope::Partial(pids) => pids.iter().chain(woken.keys()).chain(&strangers).copied().collect(),
        };
        let mut processes = BTreeMap::new();
        let mut scope = look.scope.clone();
        let mut blind = None;
        for pid in pids {
            if self.faults.strikes(self.faults.unseen) {
                blind = Some("Too many open files (simulated)".to_owned());
                continue;
            }
            // Who was listed may be gone before it is read.
            if self.faults.strikes(5) {
                self.meanwhile();
            }
            let wanted = look.threads_of.contains(&pid) && !asleep.contains(&pid);
            let with_threads = wanted || (look.scope != Scope::Full && !strangers.contains(&pid));
            let mut seen = show(&mut self.world.borrow_mut(), pid, with_threads);
            if let Some(process) = &mut seen {
                process.quiet_until = woken.get(&pid).copied().flatten();
            }
            processes.insert(pid, seen.map_or(Seen::Gone, Seen::Here));
        }
        if blind.is_some() {
            scope = Scope::Partial(processes.keys().copied().collect());
        }
        // The last thing that is looked at.
        let asked = std::mem::take(&mut self.world.borrow_mut().asked);
        let asked = asked.into_iter().filter(|_| !self.faults.strikes(self.faults.lost_events)).collect();
        let world = self.world.borrow();
        let cgroup = |path: &String| {
            let populated = world.inhabited(path);
            // A scheduler and systemd remove what nobody lives in, the warden what it made.
            let unified = world.ground.cpusets == Cpusets::Unified;
            let stays = unified && path.starts_with(OWN_DIRECTORY) && world.cpusets.contains_key(path);
            if !populated && !stays {
                return Seen::Gone;
            }
            let id = CgroupId { inode: 1, path: path.clone() };
            Seen::Here(Cgroup {
                id,
                cpus: world.cpusets.get(path).cloned(),
                populated,
                cpuset: cpuset(&world, path),
            })
        };
        let cgroups = look.cgroups.iter().map(|path| (path.clone(), cgroup(path))).collect();
        Snapshot { scope, taken, online: world.online.clone(), processes, cgroups, asked, blind }
    }

    fn glance(&mut self, expected: &BTreeMap<Pid, Expected>) -> Glance {
        self.meanwhile();
        let world = self.world.borrow();
        let newborn = |(&pid, expected): (&Pid, &Expected)| {
            let process = world.processes.get(&pid)?;
            let (_, first) = process.threads.iter().next()?;
            let mask = world.effective(pid, &first.asked);
            // As its event dates it, not as the kernel does.
            let start = StartTime((process.id.start.0 + u64::from(pid.0 % 3)).saturating_sub(1));
            (mask != expected.mask).then_some(Newborn { id: ProcessId { pid, start }, mask })
        };
        let newborns: Vec<Newborn> = expected.iter().filter_map(newborn).collect();
        self.just_born = newborns.iter().map(|newborn| newborn.id).collect();
        Glance { taken: world.moment(), online: self.online.clone(), newborns }
    }

    fn apply(&mut self, action: &Action) -> Outcome {
        self.faults.maybe_die();
        self.meanwhile();
        let (pid, tid) = (action.thread.process.pid, action.thread.tid);
        let just_born = self.just_born.contains(&action.thread.process);
        let mut world = self.world.borrow_mut();
        let thread =
            world.processes.get(&pid).filter(|process| just_born || process.id == action.thread.process);
        let there = thread
            .and_then(|process| process.threads.get(&tid))
            .is_some_and(|thread| just_born || thread.start == action.thread.start);
        if !there {
            return Outcome::Gone;
        }
        if self.faults.strikes(self.faults.refused) {
            return Outcome::Refused { errno: 1, hint: "refused by chance".to_owned() };
        }
        // As the real node does: whoever may run anywhere may run anywhere for good.
        let back = action.kind == ActionKind::Restore;
        let asked_for_nothing =
            back && world.effective(pid, &world.cpus) == action.to.intersection(&world.online);
        let everything = asked_for_nothing || world.online.is_subset(&action.to);
        let follows = action.walled && !back && world.effective(pid, &world.cpus) == action.to;
        let to = if everything || follows { world.cpus.clone() } else { action.to.clone() };
        if !world.set(pid, tid, &to) {
            return Outcome::Refused { errno: 22, hint: "its cpuset allows none of these PUs".to_owned() };
        }
        let effective = world.effective(pid, &to);
        drop(world);
        self.faults.maybe_die();
        Outcome::Done { effective }
    }

    fn build(&mut self, action: &WallAction) -> WallOutcome {
        self.faults.maybe_die();
        self.meanwhile();
        if self.faults.strikes(self.faults.refused) {
            return WallOutcome::Refused { hint: "refused by chance".to_owned() };
        }
        let outcome = build(&mut self.world.borrow_mut(), &action.change);
        self.faults.maybe_die();
        outcome
    }
}
