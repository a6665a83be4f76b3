//! The simulated machine as a node of the warden. Processes may end during a scan, and masks may be refused.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{
    CgroupOwner, CpusetAction, CpusetChange, CpusetHierarchy, CpusetOutcome, OWN_DIRECTORY,
};
use pjw_core::ids::{CgroupId, Pid, ProcessId, StartTime};
use pjw_core::plan::{Action, Outcome};
use pjw_core::ports::Node;
use pjw_core::scan::IdleWatch;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{BatchAttributes, Cgroup, Cpuset, Observed, Process, Snapshot, Thread};
use pjw_core::snapshot::{EventBatch, ExpectedMask, MaskProbe, MismatchedProcess};
use pjw_core::time::Nanos;

use crate::faults::Faults;
use crate::workload::Workload;
use crate::world::{SimProcess, World};

/// A partial scan checks the masks of one in this number of idle processes.
const TURNS: u32 = 4;

/// The node of a simulated machine on which a workload runs.
#[derive(Debug, Clone)]
pub struct SimNode {
    world: Rc<RefCell<World>>,
    workload: Rc<RefCell<Workload>>,
    faults: Faults,
    /// For each process that may be idle, its CPU time at the last scan, and the last time at which it was seen idle.
    slept: BTreeMap<Pid, (u64, Option<Nanos>)>,
    /// The number of scans so far. It selects the idle processes whose masks are checked.
    turn: u32,
    /// The online PUs at the last scan.
    online: CpuSet,
    /// The processes of the last mask probe, if no scan followed.
    just_born: BTreeSet<ProcessId>,
}

impl SimNode {
    /// A node on a simulated machine. The workload continues while the warden works.
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

    /// The watched processes that ran since the last scan, each with the last time at which it was seen idle; and the
    /// processes that are still idle.
    fn wake(
        &mut self,
        watch: &IdleWatch,
        at: Nanos,
        full: bool,
    ) -> (BTreeMap<Pid, Option<Nanos>>, BTreeSet<Pid>) {
        let (mut woken, mut idle) = (BTreeMap::new(), BTreeSet::new());
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
                        idle.insert(pid);
                    }
                }
                (ran, known) => {
                    woken.insert(pid, known.and_then(|(_, quiet)| quiet));
                    ran.map(|ran| self.slept.insert(pid, (ran, None)));
                }
            }
        }
        (woken, idle)
    }

    /// The watched processes outside of jobs that ran or ended since the last scan.
    fn stirred_strangers(&mut self, watch: &IdleWatch) -> BTreeSet<Pid> {
        let world = self.world.borrow();
        let mut slept = |pid: Pid| {
            let ran = world.processes.get(&pid)?.run_ns();
            let (before, _) = self.slept.insert(pid, (ran, None))?;
            (before == ran).then_some(())
        };
        watch.unassigned.iter().copied().filter(|&pid| slept(pid).is_none()).collect()
    }

    /// Lets time pass between two steps of the warden. Something may happen in it, and no two scans have the same
    /// time.
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
        process.fresh_attributes = false;
    }
    let attributes = process.fresh_attributes.then(|| BatchAttributes {
        cgroups: vec![(String::new(), process.cgroup.clone())],
        environ: process.environ.clone(),
        groups: Vec::new(),
        command_line: process.comm.to_string(),
    });
    let first = process.threads.values().next();
    let mask = first.map(|thread| world.effective(pid, &thread.asked));
    let thread = |(&tid, thread): (&pjw_core::ids::Tid, &crate::world::SimThread)| {
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
        attributes,
        job_marks: None,
        threads: with_threads.then(|| process.threads.iter().map(thread).collect()),
        idle_until: None,
    })
}

fn cpuset(world: &World, path: &str) -> Option<Cpuset> {
    let is_there = !matches!(world.cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. });
    (is_there && !world.switched_off.contains(path)).then(|| Cpuset {
        cpus: world.cpusets.get(path).cloned().unwrap_or_default(),
        effective: world.allowance(path),
        mems: CpuSet::new(),
        isolated: world.partitions.contains(path),
    })
}

fn build(world: &mut World, change: &CpusetChange) -> CpusetOutcome {
    let is_there = |world: &World, process: &ProcessId, at: &str| {
        world.processes.get(&process.pid).is_some_and(|found| found.id == *process && found.cgroup == at)
    };
    match change {
        CpusetChange::Create { job_cpuset, .. }
            if job_cpuset.cgroup_owner == CgroupOwner::Scheduler && !world.inhabited(&job_cpuset.path) =>
        {
            return CpusetOutcome::Gone;
        }
        CpusetChange::Create { job_cpuset, .. } if world.switched_off.contains(&job_cpuset.path) => {
            return CpusetOutcome::Refused { hint: "its controller is switched off".to_owned() };
        }
        CpusetChange::Create { job_cpuset, initial_processes } => {
            if job_cpuset.cgroup_owner == CgroupOwner::Systemd && !world.inhabited(&job_cpuset.path) {
                let here: Vec<Pid> = initial_processes
                    .iter()
                    .filter(|id| world.processes.get(&id.pid).is_some_and(|process| process.id == **id))
                    .map(|id| id.pid)
                    .collect();
                if here.is_empty() {
                    return CpusetOutcome::Gone;
                }
                here.into_iter().for_each(|pid| world.carry(pid, &job_cpuset.path));
            }
            world.write_cpuset(&job_cpuset.path, Some(&job_cpuset.spec.cpus));
            if job_cpuset.spec.isolated {
                world.partitions.insert(job_cpuset.path.clone());
            } else {
                world.partitions.remove(&job_cpuset.path);
            }
            return CpusetOutcome::Done { effective: Some(world.allowance(&job_cpuset.path)) };
        }
        CpusetChange::MoveIn { process, from, to } | CpusetChange::MoveBack { process, from, to } => {
            if !is_there(world, process, from) {
                return CpusetOutcome::Gone;
            }
            if world.removed.contains(to) {
                return CpusetOutcome::Refused { hint: "it is gone".to_owned() };
            }
            world.carry(process.pid, to);
        }
        CpusetChange::Widen { job_cpuset } if job_cpuset.cgroup_owner == CgroupOwner::Scheduler => {
            world.write_cpuset(&job_cpuset.path, None);
        }
        CpusetChange::Widen { job_cpuset } => {
            let all = world.cpus.clone();
            world.partitions.remove(&job_cpuset.path);
            world.write_cpuset(&job_cpuset.path, Some(&all));
        }
        CpusetChange::Remove { job_cpuset } if job_cpuset.cgroup_owner == CgroupOwner::Scheduler => {}
        CpusetChange::Remove { job_cpuset } if world.inhabited(&job_cpuset.path) => {
            return CpusetOutcome::Refused { hint: "processes are still in it".to_owned() };
        }
        CpusetChange::Remove { job_cpuset } => world.write_cpuset(&job_cpuset.path, None),
    }
    CpusetOutcome::Done { effective: None }
}

impl Node for SimNode {
    fn observe(&mut self, look: &ScanRequest) -> Snapshot {
        self.meanwhile();
        self.just_born.clear();
        let taken_at = self.world.borrow().moment();
        let unassigned = self.stirred_strangers(&look.idle_watch);
        let (woken, idle) = self.wake(&look.idle_watch, taken_at.since_boot, look.scope == ScanScope::Full);
        let pids: BTreeSet<Pid> = match &look.scope {
            ScanScope::Full => self.world.borrow().processes.keys().copied().collect(),
            ScanScope::Partial(pids) => pids.iter().chain(woken.keys()).chain(&unassigned).copied().collect(),
        };
        let mut processes = BTreeMap::new();
        let mut scope = look.scope.clone();
        let mut incomplete = None;
        for pid in pids {
            if self.faults.strikes(self.faults.unseen) {
                incomplete = Some("Too many open files (simulated)".to_owned());
                continue;
            }
            // A process may end between the listing and the reading.
            if self.faults.strikes(5) {
                self.meanwhile();
            }
            let wanted = look.threads_of.contains(&pid) && !idle.contains(&pid);
            let with_threads = wanted || (look.scope != ScanScope::Full && !unassigned.contains(&pid));
            let mut seen = show(&mut self.world.borrow_mut(), pid, with_threads);
            if let Some(process) = &mut seen {
                process.idle_until = woken.get(&pid).copied().flatten();
            }
            processes.insert(pid, seen.map_or(Observed::Gone, Observed::Present));
        }
        if incomplete.is_some() {
            scope = ScanScope::Partial(processes.keys().copied().collect());
        }
        // The affinity requests are read last.
        let asked = std::mem::take(&mut self.world.borrow_mut().asked);
        let asked = asked.into_iter().filter(|_| !self.faults.strikes(self.faults.lost_events)).collect();
        let world = self.world.borrow();
        let cgroup = |path: &String| {
            let populated = world.inhabited(path);
            // A scheduler and systemd remove their empty cgroups, and the warden removes its own.
            let unified = world.cpuset_support.hierarchy == CpusetHierarchy::Unified;
            let stays = unified && path.starts_with(OWN_DIRECTORY) && world.cpusets.contains_key(path);
            if !populated && !stays {
                return Observed::Gone;
            }
            let id = CgroupId { inode: 1, path: path.clone() };
            Observed::Present(Cgroup {
                id,
                cpus: world.cpusets.get(path).cloned(),
                populated,
                cpuset: cpuset(&world, path),
            })
        };
        let cgroups = look.cgroups.iter().map(|path| (path.clone(), cgroup(path))).collect();
        Snapshot {
            scope,
            taken_at,
            online: world.online.clone(),
            processes,
            cgroups,
            affinity_requests: asked,
            incomplete,
        }
    }

    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbe {
        self.meanwhile();
        let world = self.world.borrow();
        let newborn = |(&pid, expected): (&Pid, &ExpectedMask)| {
            let process = world.processes.get(&pid)?;
            let (_, first) = process.threads.iter().next()?;
            let mask = world.effective(pid, &first.asked);
            // The time of the fork event, which differs from the kernel's start time.
            let start = StartTime((process.id.start.0 + u64::from(pid.0 % 3)).saturating_sub(1));
            (mask != expected.mask).then_some(MismatchedProcess { id: ProcessId { pid, start }, mask })
        };
        let mismatches: Vec<MismatchedProcess> = expected.iter().filter_map(newborn).collect();
        self.just_born = mismatches.iter().map(|newborn| newborn.id).collect();
        MaskProbe { taken_at: world.moment(), online: self.online.clone(), mismatches }
    }

    fn read_process_events(&mut self) -> EventBatch {
        let events = std::mem::take(&mut self.world.borrow_mut().events);
        let events = events.into_iter().filter(|_| !self.faults.strikes(self.faults.lost_events)).collect();
        EventBatch { events, lost: false, congested: false }
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
        let to = action.requested.clone();
        if !world.set(pid, tid, &to) {
            return Outcome::Refused { errno: 22, hint: "its cpuset allows none of these PUs".to_owned() };
        }
        let effective = world.effective(pid, &to);
        drop(world);
        self.faults.maybe_die();
        Outcome::Done { effective }
    }

    fn change_cpuset(&mut self, action: &CpusetAction) -> CpusetOutcome {
        self.faults.maybe_die();
        self.meanwhile();
        if self.faults.strikes(self.faults.refused) {
            return CpusetOutcome::Refused { hint: "refused by chance".to_owned() };
        }
        let outcome = build(&mut self.world.borrow_mut(), &action.change);
        self.faults.maybe_die();
        outcome
    }
}
