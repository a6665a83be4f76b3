//! PUs go offline and online at random times between two scans. The kernel rewrites the masks in cpusets later, and
//! keeps or forgets the requested masks. A release restores the mask of every thread.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::ids::Pid;
use pjw_core::job::CpuRequest;
use pjw_core::state::masks::old_kernels::HOTPLUG_DELAY;
use proptest::prelude::*;

use crate::machine::{
    Machine, ROOT, SECOND, assign_of, cpu_set, machine_with, policy_with_cpusets, regular_topology,
};

const JOB_CPUSET: &str = "/pjw/a";
/// The first and the third thread are hot and pinned, the second has bound itself to PU 1, the last is idle.
const THREADS: [u32; 4] = [7, 8, 9, 10];
const BOUND: u32 = 8;

/// A step of the random sequence.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The kernel stops using a PU. If the daemon has seen the PU offline, the kernel uses the PU again. At least one
    /// PU stays online.
    Switch(u32),
    /// The kernel rewrites the masks in cpusets that lost or gained a PU. It does so within `HOTPLUG_DELAY` anyway.
    RewriteMasks,
    /// The daemon runs one cycle.
    Cycle,
    /// Time passes, in milliseconds.
    Wait(u64),
}

/// A daemon on a machine whose kernel rewrites masks some time after a PU goes offline.
struct Sequence {
    machine: Machine,
    /// The PUs that the kernel uses.
    active: CpuSet,
    /// The time of the last change of `active`, in ns since boot.
    switched_at: u64,
    /// PUs that the daemon has seen offline.
    seen_offline: CpuSet,
}

impl Sequence {
    fn new(affinity_persists: bool, hierarchy: CpusetHierarchy) -> Self {
        let policy = policy_with_cpusets(hierarchy, affinity_persists);
        let machine = machine_with(regular_topology(2, 1, 1, 4, 1), policy);
        machine.spawn(7, 1, 0).cgroup = JOB_CPUSET.into();
        THREADS[1..].iter().for_each(|tid| machine.clone_thread(7, *tid));
        let active = machine.state.topology.cpus().clone();
        let mut sequence = Self { machine, active, switched_at: 0, seen_offline: CpuSet::new() };
        let pids = vec![Pid(7)];
        sequence
            .cycle(&[Command::Assign(AssignCommand { pids, ..assign_of("a", Some(CpuRequest::Cores(4))) })]);
        sequence.settle();
        sequence.machine.bind(7, BOUND, "1");
        sequence.settle();
        sequence
    }

    fn settle(&mut self) {
        for _ in 0..20 {
            self.step(Step::Cycle);
            self.step(Step::Wait(500));
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Switch(pu) => {
                let pu = CpuSet::from(Pu(pu));
                let on = self.active.intersects(&pu);
                let is_last = self.active.intersection(&cpu_set("0-3")) == pu;
                if is_last || (!on && !self.seen_offline.intersects(&pu)) {
                    return;
                }
                self.active = if on { self.active.difference(&pu) } else { self.active.union(&pu) };
                self.machine.world().set_active_pus(&self.active);
                self.switched_at = self.machine.now();
            }
            Step::RewriteMasks => self.machine.world().rewrite_masks_after_hotplug(),
            Step::Cycle => self.cycle(&[]),
            Step::Wait(milliseconds) => {
                let ns = milliseconds * SECOND / 1000;
                // The kernel rewrites masks within `HOTPLUG_DELAY`.
                if u128::from(self.machine.now() + ns - self.switched_at) >= HOTPLUG_DELAY.as_nanos() {
                    self.machine.world().rewrite_masks_after_hotplug();
                }
                self.machine.run_for(&[7, 9], ns);
            }
        }
    }

    fn cycle(&mut self, commands: &[Command]) {
        self.machine.world().online = self.active.clone();
        self.seen_offline = self.machine.state.topology.cpus().difference(&self.active);
        let scan = self.machine.state.scan_request(true);
        let _ = self.machine.cycle(&scan, commands);
    }

    /// Runs the steps. Then all PUs come online, and the job is released.
    fn run(&mut self, steps: Vec<Step>) {
        steps.into_iter().for_each(|step| self.step(step));
        self.step(Step::Cycle);
        self.active = self.machine.state.topology.cpus().clone();
        self.machine.world().set_active_pus(&self.active);
        self.step(Step::RewriteMasks);
        self.settle();
        self.step(Step::Wait(9000));
        self.settle();
        self.cycle(&[Command::ReleaseAll { caller: ROOT }]);
        self.settle();
    }

    fn masks(&self) -> Vec<String> {
        THREADS.iter().map(|tid| self.machine.effective_mask(7, *tid)).collect()
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        2 => (0_u32..4).prop_map(Step::Switch),
        3 => Just(Step::RewriteMasks),
        6 => Just(Step::Cycle),
        3 => (1_u64..900).prop_map(Step::Wait),
        1 => (3000_u64..9000).prop_map(Step::Wait),
    ];
    proptest::collection::vec(one, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    #[test]
    fn after_random_hotplug_a_release_restores_the_mask_of_every_thread(steps in steps(), affinity_persists: bool) {
        let mut sequence = Sequence::new(affinity_persists, CpusetHierarchy::Legacy);
        sequence.run(steps);
        prop_assert_eq!(sequence.masks(), ["0-7", "1", "0-7", "0-7"]);
    }

    #[test]
    fn after_random_hotplug_without_cpusets_a_release_restores_each_mask_that_the_kernel_did_not_replace(steps in steps()) {
        let mut sequence = Sequence::new(true, CpusetHierarchy::Unavailable { why: "this node has none".to_owned() });
        let was_offline = steps.iter().any(|step| matches!(step, Step::Switch(1)));
        sequence.run(steps);
        let bound = if was_offline { sequence.masks()[1].clone() } else { "1".to_owned() };
        prop_assert_eq!(sequence.masks(), ["0-7", &bound, "0-7", "0-7"]);
    }
}
