//! PUs go offline and online at random times between two scans. The kernel rewrites the masks in cpusets
//! later, and keeps or forgets the requested masks. In the end every thread has its own mask.

use std::collections::BTreeMap;

use pjw_core::command::{Assign, Command};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{CpusetChange, CpusetHierarchy};
use pjw_core::ids::Pid;
use pjw_core::job::Amount;
use pjw_core::reconcile::reconcile;
use proptest::prelude::*;

use crate::machine::{Machine, ROOT, SECOND, machine, set, wish};

const WALL: &str = "/pjw/a";
/// The first and the third thread are hot and pinned, the second has bound itself to PU 1, the last is idle.
const THREADS: [u32; 4] = [7, 8, 9, 10];
const BOUND: u32 = 8;

/// A step of the random sequence.
#[derive(Debug, Clone, Copy)]
enum Happening {
    /// The kernel stops using a PU. If the warden has seen the PU offline, the kernel uses the PU again. One
    /// PU always stays online.
    Switch(u32),
    /// The kernel rewrites the masks in cpusets that lost or gained a PU.
    Work,
    /// The warden runs one cycle.
    ScanRequest,
    /// Time passes, in milliseconds.
    Wait(u64),
}

/// A machine whose kernel rewrites masks some time after a PU goes offline.
struct Kernel {
    machine: Machine,
    /// The PUs that the kernel uses.
    active: CpuSet,
    /// The requested mask of each thread, if the kernel keeps requested masks.
    asked: BTreeMap<u32, CpuSet>,
    remembers: bool,
    /// The PUs of the cpuset, and those of them that were in use when the masks were last rewritten.
    cpuset: Option<(CpuSet, CpuSet)>,
    /// PUs that the warden has seen offline.
    seen_off: CpuSet,
}

impl Kernel {
    fn new(remembers: bool, cpusets: CpusetHierarchy) -> Self {
        let mut machine = machine();
        machine.policy.cpuset_support.hierarchy = cpusets;
        machine.policy.cpuset_support.affinity_persists = remembers;
        machine.spawn(7, 1, 0).cgroup = Some(WALL.into());
        THREADS[1..].iter().for_each(|tid| machine.clone_thread(7, *tid));
        let all = machine.state.topology.cpus().clone();
        let mut kernel = Self {
            machine,
            active: all,
            asked: BTreeMap::new(),
            remembers,
            cpuset: None,
            seen_off: CpuSet::new(),
        };
        let pids = vec![Pid(7)];
        kernel.look(&[Command::Assign(Assign { pids, ..wish("a", Some(Amount::Cores(4))) })]);
        kernel.settle();
        kernel.machine.bind(7, BOUND, "1");
        kernel.asked.insert(BOUND, set("1"));
        kernel.settle();
        kernel
    }

    fn settle(&mut self) {
        for _ in 0..20 {
            self.happen(Happening::ScanRequest);
            self.happen(Happening::Wait(500));
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Switch(pu) => {
                let pu = CpuSet::from(Pu(pu));
                let on = self.active.intersects(&pu);
                let is_last = self.active.intersection(&set("0-3")) == pu;
                if is_last || (!on && !self.seen_off.intersects(&pu)) {
                    return;
                }
                self.active = if on { self.active.difference(&pu) } else { self.active.union(&pu) };
                self.drive_out();
            }
            Happening::Work => self.work(),
            Happening::ScanRequest => self.look(&[]),
            Happening::Wait(milliseconds) => self.wait(milliseconds),
        }
    }

    /// A thread without a usable PU may run on all PUs of its cpuset.
    fn drive_out(&mut self) {
        let all = self.machine.state.topology.cpus();
        let room = self.cpuset.as_ref().map_or(all, |(cpuset, _)| cpuset).to_string();
        for tid in THREADS {
            if !self.mask(tid).intersects(&self.active) {
                self.machine.bind(7, tid, &room);
            }
        }
    }

    fn work(&mut self) {
        let Some((cpuset, written)) = &mut self.cpuset else { return };
        let effective = cpuset.intersection(&self.active);
        if effective != *written {
            written.clone_from(&effective);
            self.write_masks(&effective);
        }
    }

    fn write_masks(&mut self, effective: &CpuSet) {
        for tid in THREADS {
            let asked =
                self.asked.get(&tid).filter(|_| self.remembers).map(|asked| asked.intersection(effective));
            let mask = asked.filter(|mask| !mask.is_empty()).unwrap_or_else(|| effective.clone());
            self.machine.bind(7, tid, &mask.to_string());
        }
    }

    fn wait(&mut self, milliseconds: u64) {
        let time = milliseconds * SECOND / 1000;
        self.machine.now += time;
        for process in self.machine.processes.values_mut() {
            let hot = process.threads.iter_mut().flatten().filter(|thread| [7, 9].contains(&thread.tid.0));
            hot.for_each(|thread| thread.run_ns += time);
        }
    }

    fn mask(&self, tid: u32) -> CpuSet {
        let threads = self.machine.processes[&Pid(7)].threads.iter().flatten();
        threads.filter(|thread| thread.tid.0 == tid).map(|thread| thread.allowed.clone()).next().unwrap()
    }

    fn look(&mut self, commands: &[Command]) {
        self.machine.offline = self.machine.state.topology.cpus().difference(&self.active);
        self.seen_off = self.machine.offline.clone();
        let snapshot = self.machine.look();
        let decision = reconcile(&mut self.machine.state, &snapshot, commands, &self.machine.policy);
        for action in decision.plan.cpusets {
            match action.change {
                CpusetChange::Create { job_cpuset, .. } => self.write_cpuset(job_cpuset.spec.cpus),
                CpusetChange::Widen { .. } => self.write_cpuset(self.machine.state.topology.cpus().clone()),
                _ => {}
            }
        }
        for action in &decision.plan.actions {
            let room = self.cpuset.as_ref().map_or(&self.active, |(cpuset, _)| cpuset);
            let effective = action.requested.intersection(room).intersection(&self.active);
            if effective.is_empty() {
                self.machine.state.not_tried(action);
                continue;
            }
            let written = action.requested.intersection(room);
            self.asked.insert(action.thread.tid.0, action.requested.clone());
            self.machine.bind(7, action.thread.tid.0, &written.to_string());
            self.machine.state.applied(action, &action.requested, &effective);
        }
    }

    fn write_cpuset(&mut self, cpus: CpuSet) {
        let effective = cpus.intersection(&self.active);
        self.write_masks(&effective);
        self.machine.give_cpuset(WALL, cpus.clone(), effective.clone());
        self.cpuset = Some((cpus, effective));
    }

    /// Runs the steps, then brings all PUs online, then ends the job.
    fn live_through(&mut self, happenings: Vec<Happening>) {
        happenings.into_iter().for_each(|happening| self.happen(happening));
        self.happen(Happening::ScanRequest);
        self.active = self.machine.state.topology.cpus().clone();
        self.happen(Happening::Work);
        self.settle();
        self.happen(Happening::Wait(9000));
        self.settle();
        self.look(&[Command::ReleaseAll { caller: ROOT }]);
        self.settle();
    }

    fn masks(&self) -> Vec<String> {
        THREADS.iter().map(|tid| self.mask(*tid).to_string()).collect()
    }
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    let one = prop_oneof![
        2 => (0_u32..4).prop_map(Happening::Switch),
        3 => Just(Happening::Work),
        6 => Just(Happening::ScanRequest),
        3 => (1_u64..900).prop_map(Happening::Wait),
        1 => (3000_u64..9000).prop_map(Happening::Wait),
    ];
    proptest::collection::vec(one, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    #[test]
    fn after_release_every_thread_has_its_own_mask(happenings in happenings(), remembers: bool) {
        let mut kernel = Kernel::new(remembers, CpusetHierarchy::Legacy);
        kernel.live_through(happenings);
        prop_assert_eq!(kernel.masks(), ["0-7", "1", "0-7", "0-7"]);
    }

    #[test]
    fn without_cpuset_every_thread_has_its_own_mask_unless_the_kernel_moved_it(happenings in happenings()) {
        let mut kernel = Kernel::new(true, CpusetHierarchy::Unavailable { why: "this node has none".to_owned() });
        let driven_out = happenings.iter().any(|happening| matches!(happening, Happening::Switch(1)));
        kernel.live_through(happenings);
        let bound = if driven_out { kernel.masks()[1].clone() } else { "1".to_owned() };
        prop_assert_eq!(kernel.masks(), ["0-7", &bound, "0-7", "0-7"]);
    }
}
