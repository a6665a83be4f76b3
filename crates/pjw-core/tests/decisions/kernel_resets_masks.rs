//! PUs go offline and online on a kernel that resets the masks of all threads in a cpuset then (before Linux
//! 6.2). Afterwards every thread that had bound itself is bound again.

use pjw_core::command::{Assign, Command};
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetChange, CpusetHierarchy};
use pjw_core::ids::Pid;
use pjw_core::job::Amount;
use pjw_core::reconcile::reconcile;
use pjw_core::state::WardenState;
use pjw_core::topology::{Regular, Topology};

use super::machine::{Machine, SECOND, machine, set, wish};

const WALL: &str = "/pjw/a";

/// Process 7 is in the cpuset of a job that holds PUs 0-3. Its thread 8 has bound itself to PU 1.
fn bound_behind_a_wall() -> Machine {
    let m = bound_on(machine(), 4);
    assert_eq!((m.grant("a"), masks(&m)), ("0-3".into(), ["0-3".into(), "1".into()]));
    m
}

/// The same on another machine, with the given number of cores.
fn bound_on(mut m: Machine, cores: u32) -> Machine {
    m.policy.cpuset_support.hierarchy = CpusetHierarchy::Legacy;
    m.policy.cpuset_support.affinity_persists = false;
    m.spawn(7, 1, 0).cgroup = Some(WALL.into());
    m.clone_thread(7, 8);
    rounds(
        &mut m,
        &[Command::Assign(Assign { pids: vec![Pid(7)], ..wish("a", Some(Amount::Cores(cores))) })],
    );
    m.bind(7, 8, "1");
    rounds(&mut m, &[]);
    m.now += 60 * SECOND;
    m
}

/// Runs some cycles, a quarter of a second apart.
fn rounds(m: &mut Machine, commands: &[Command]) {
    rounds_without(m, commands, "");
}

/// The same, while the kernel no longer uses some PUs that are still listed as online.
fn rounds_without(m: &mut Machine, commands: &[Command], gone: &str) {
    for commands in [commands, &[], &[], &[]] {
        let snapshot = m.look();
        let decision = reconcile(&mut m.state, &snapshot, commands, &m.policy);
        for action in &decision.plan.actions {
            m.carry_out(action);
        }
        for action in decision.plan.cpusets {
            if let CpusetChange::Create { job_cpuset, .. } = action.change {
                raise(m, job_cpuset.spec.cpus, &set(gone));
            }
        }
        m.now += SECOND / 4;
    }
}

fn raise(m: &mut Machine, cpus: CpuSet, gone: &CpuSet) {
    write_masks(m, &cpus.difference(gone).to_string());
    m.give_cpuset(WALL, cpus.clone(), cpus);
}

/// Sets the masks of both threads, as the kernel does.
fn write_masks(m: &mut Machine, cpus: &str) {
    [7, 8].into_iter().for_each(|tid| m.bind(7, tid, cpus));
}

/// The masks of both threads.
fn masks(m: &Machine) -> [String; 2] {
    [m.mask(7, 7), m.mask(7, 8)]
}

#[test]
fn masks_written_when_the_pu_is_seen_offline() {
    let mut m = bound_behind_a_wall();
    m.offline = set("3");
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn masks_written_after_the_pu_is_seen_offline() {
    let mut m = bound_behind_a_wall();
    m.assign("rest", 4, &[]).unwrap();
    m.offline = set("3");
    rounds(&mut m, &[]);
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2".into(), ["0-2".into(), "1".into()]));
}

#[test]
fn masks_written_before_the_pu_is_seen_offline() {
    let mut m = bound_behind_a_wall();
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    m.offline = set("3");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn masks_written_early_while_several_pus_go_offline() {
    let mut m = bound_behind_a_wall();
    m.offline = set("3");
    write_masks(&mut m, "0-1");
    rounds_without(&mut m, &[], "2");
    m.offline = set("2-3");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-1,4-5".into(), ["0-1,4-5".into(), "1".into()]));
}

#[test]
fn masks_written_early_while_pus_come_online() {
    let mut m = bound_behind_a_wall();
    m.assign("rest", 4, &[]).unwrap();
    m.offline = set("2-3");
    write_masks(&mut m, "0-1");
    rounds(&mut m, &[]);
    m.offline = set("3");
    m.now += 60 * SECOND;
    write_masks(&mut m, "0-1");
    rounds(&mut m, &[]);
    m.offline = set("");
    rounds(&mut m, &[]);
    assert_eq!(masks(&m), ["0-1", "1"]);
}

#[test]
fn masks_written_late_while_the_second_pu_of_a_core_comes_online() {
    let mut smt = machine();
    let shape =
        Regular { packages: 1, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 4, pus_per_core: 2 };
    smt.state = WardenState::new(Topology::regular(shape), &set(""));
    let mut m = bound_on(smt, 2);
    assert_eq!(m.grant("a"), "0-1,4-5");
    m.offline = set("4");
    write_masks(&mut m, "0-1,5");
    rounds(&mut m, &[]);
    m.now += 60 * SECOND;
    m.offline = set("");
    rounds_without(&mut m, &[], "4");
    write_masks(&mut m, "0-1,4-5");
    rounds(&mut m, &[]);
    assert_eq!(masks(&m), ["0-1,4-5", "1"]);
}

#[test]
fn a_long_scan_interval_changes_nothing() {
    let mut m = bound_behind_a_wall();
    m.assign("rest", 4, &[]).unwrap();
    m.offline = set("3");
    rounds(&mut m, &[]);
    m.now += 60 * SECOND;
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!(masks(&m), ["0-2", "1"]);
}

#[test]
fn a_mask_that_a_thread_set_shortly_before_hotplug_stays_its_own() {
    let mut m = bound_behind_a_wall();
    m.bind(7, 8, "0,2");
    rounds(&mut m, &[]);
    m.offline = set("3");
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!(masks(&m)[1], "0,2");
}
