//! PUs go off and come back on a kernel that writes every mask behind a cpuset anew then, early or late: whoever had
//! bound itself is bound again.

use pjw_core::command::{Assign, Command};
use pjw_core::cpuset::CpuSet;
use pjw_core::job::Amount;
use pjw_core::process::Pid;
use pjw_core::reconcile::reconcile;
use pjw_core::state::WardenState;
use pjw_core::topology::{Regular, Topology};
use pjw_core::wall::{Cpusets, WallChange};

use super::machine::{Machine, SECOND, machine, set, wish};

const WALL: &str = "/pjw/a";

/// Process 7 behind the wall of a job that has been given PUs 0-3; its thread 8 has bound itself to PU 1.
fn bound_behind_a_wall() -> Machine {
    let m = bound_on(machine(), 4);
    assert_eq!((m.grant("a"), masks(&m)), ("0-3".into(), ["0-3".into(), "1".into()]));
    m
}

/// The same on another machine, on so many cores.
fn bound_on(mut m: Machine, cores: u32) -> Machine {
    m.policy.ground.cpusets = Cpusets::Legacy;
    m.policy.ground.masks_last = false;
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

/// Some cycles, a quarter of a second apart.
fn rounds(m: &mut Machine, commands: &[Command]) {
    rounds_without(m, commands, "");
}

/// The same, while the kernel no longer schedules on PUs that are still listed as online.
fn rounds_without(m: &mut Machine, commands: &[Command], gone: &str) {
    for commands in [commands, &[], &[], &[]] {
        let snapshot = m.look();
        let decision = reconcile(&mut m.state, &snapshot, commands, &m.policy);
        for action in &decision.plan.actions {
            m.bind(action.thread.process.pid.0, action.thread.tid.0, &action.to.to_string());
            m.state.applied(action, &action.to);
        }
        for action in decision.plan.walls {
            if let WallChange::Raise { wall, .. } = action.change {
                raise(m, wall.bounds.cpus, &set(gone));
            }
        }
        m.now += SECOND / 4;
    }
}

fn raise(m: &mut Machine, cpus: CpuSet, gone: &CpuSet) {
    write_masks(m, &cpus.difference(gone).to_string());
    m.give_cpuset(WALL, cpus.clone(), cpus);
}

/// As the kernel writes them.
fn write_masks(m: &mut Machine, cpus: &str) {
    [7, 8].into_iter().for_each(|tid| m.bind(7, tid, cpus));
}

/// What both threads have in the end.
fn masks(m: &Machine) -> [String; 2] {
    [m.mask(7, 7), m.mask(7, 8)]
}

#[test]
fn masks_that_are_written_when_the_pu_is_seen_to_be_off() {
    let mut m = bound_behind_a_wall();
    m.offline = set("3");
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn masks_that_are_written_later() {
    let mut m = bound_behind_a_wall();
    m.assign("rest", 4, &[]).unwrap();
    m.offline = set("3");
    rounds(&mut m, &[]);
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2".into(), ["0-2".into(), "1".into()]));
}

#[test]
fn masks_that_are_written_before_the_pu_is_seen_to_be_off() {
    let mut m = bound_behind_a_wall();
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    m.offline = set("3");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn masks_that_are_ahead_by_one_pu_while_several_go_off() {
    let mut m = bound_behind_a_wall();
    m.offline = set("3");
    write_masks(&mut m, "0-1");
    rounds_without(&mut m, &[], "2");
    m.offline = set("2-3");
    rounds(&mut m, &[]);
    assert_eq!((m.grant("a"), masks(&m)), ("0-1,4-5".into(), ["0-1,4-5".into(), "1".into()]));
}

#[test]
fn masks_that_are_ahead_while_they_come_back() {
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
fn masks_that_are_behind_while_the_second_pu_of_a_core_comes_back() {
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
fn a_long_interval_hides_nothing() {
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
fn what_a_thread_chose_shortly_before_is_not_taken_for_the_kernels_doing() {
    let mut m = bound_behind_a_wall();
    m.bind(7, 8, "0,2");
    rounds(&mut m, &[]);
    m.offline = set("3");
    write_masks(&mut m, "0-2");
    rounds(&mut m, &[]);
    assert_eq!(masks(&m)[1], "0,2");
}
