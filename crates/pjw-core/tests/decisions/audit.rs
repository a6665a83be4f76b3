//! The audit of broken states and plans: one test for each violation.

use pjw_core::audit::{Violation, audit};
use pjw_core::ids::ThreadId;
use pjw_core::plan::{MaskAction, MaskActionKind, Plan};
use pjw_core::state::WardenState;
use pjw_core::time::Nanos;

use crate::machine::{Machine, cpu_set, job, machine};

/// Two jobs on 0-1 and 2-3 of eight PUs, each with a process of one thread.
fn sound() -> Machine {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("b", 2, &[20]).unwrap();
    m
}

fn thread(m: &Machine, pid: u32) -> ThreadId {
    m.kept().into_iter().find(|thread| thread.process.pid.0 == pid).unwrap()
}

/// A valid change of the thread of process 10: pinned to PU 1.
fn pin(m: &mut Machine) -> MaskAction {
    let thread = thread(m, 10);
    let now = Nanos(m.now());
    m.change_thread(thread, |thread| {
        thread.mask_entry.as_mut().unwrap().add_intended_request(cpu_set("1"), cpu_set("0-7"), now);
    });
    MaskAction {
        kind: MaskActionKind::Pin,
        job: job("a"),
        thread,
        current_mask: cpu_set("0-1"),
        target_mask: cpu_set("1"),
        requested_mask: cpu_set("1"),
        reason: String::new(),
    }
}

fn found(m: &Machine, mask_actions: Vec<MaskAction>) -> Vec<String> {
    audit(&m.state, &Plan { mask_actions, ..Plan::default() }, &m.policy)
        .iter()
        .map(Violation::to_string)
        .collect()
}

fn breaks(change: impl Fn(&mut WardenState), expected: &str) {
    let mut m = sound();
    change(&mut m.state);
    let found = found(&m, Vec::new());
    assert!(found.iter().any(|text| text.contains(expected)), "{expected}: {found:?}");
}

fn wrongs(change: impl Fn(&mut Machine, &mut MaskAction), expected: &str) {
    let mut m = sound();
    let mut action = pin(&mut m);
    change(&mut m, &mut action);
    let found = found(&m, vec![action]);
    assert!(found.iter().any(|text| text.contains(expected)), "{expected}: {found:?}");
}

#[test]
fn a_sound_state_and_plan_pass() {
    let mut m = sound();
    assert_eq!(found(&m, Vec::new()), [""; 0]);
    let action = pin(&mut m);
    assert_eq!(found(&m, vec![action]), [""; 0]);
}

#[test]
fn a_holder_that_does_not_exist_is_a_leak() {
    breaks(|state| drop(state.jobs.remove(&job("a"))), "a core has leaked");
}

#[test]
fn a_pool_of_another_machine_is_noticed() {
    breaks(
        |state| {
            let shape = pjw_core::topology::RegularShape {
                packages: 1,
                numa_nodes_per_package: 1,
                l3s_per_numa_node: 1,
                cores_per_l3: 9,
                pus_per_core: 1,
            };
            state.topology = pjw_core::topology::Topology::from_shape(shape);
        },
        "the pool and the machine differ on PUs 8",
    );
}

#[test]
fn a_grant_that_differs_from_the_pool_is_noticed() {
    breaks(|state| drop(state.pool.release(&job("a"))), "manual:a was granted 0-1 and holds in the pool ");
    breaks(
        |state| state.jobs.update(&job("a"), |job| job.grant = None),
        "manual:a was granted  and holds in the pool 0-1",
    );
}

#[test]
fn two_owners_of_one_pu_are_noticed() {
    breaks(
        |state| state.jobs.update(&job("b"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("1-3")),
        "manual:b and manual:a were both granted 1",
    );
}

#[test]
fn a_job_on_housekeeping_is_noticed() {
    breaks(
        |state| {
            state.pool.release(&job("a"));
            state.pool.set_housekeeping(&cpu_set("0"));
        },
        "manual:a was granted 0, which are housekeeping",
    );
}

#[test]
fn a_grant_of_nothing_is_noticed() {
    breaks(
        |state| state.jobs.update(&job("a"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("")),
        "no PU at all",
    );
}

#[test]
fn half_a_core_is_noticed_unless_the_policy_shares_siblings() {
    let mut m = sound();
    let cores = (0..4)
        .map(|n| pjw_core::topology::Core { pus: cpu_set(&format!("{n},{}", n + 4)), kind_index: 0 })
        .collect();
    m.state.topology = pjw_core::topology::Topology::new(cores, Vec::new()).unwrap();
    m.state.pool.claim(&job("b"), &cpu_set("2-4"));
    m.state.jobs.update(&job("b"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("2-4"));
    assert!(found(&m, Vec::new()).iter().any(|text| text.contains("and not the rest of it")));
    m.policy.share_smt = true;
    assert_eq!(found(&m, Vec::new()), [""; 0]);
}

#[test]
fn wrong_actions_are_noticed() {
    wrongs(|m, action| action.thread = thread(m, 20), "it is not a thread of manual:a");
    wrongs(|_, action| action.thread.start.0 += 1, "it is not a thread of manual:a");
    wrongs(|_, action| action.target_mask = cpu_set("2"), "to 2, outside 0-1 of manual:a");
    wrongs(|_, action| action.target_mask = cpu_set(""), "is not a valid mask");
    wrongs(|_, action| action.target_mask = cpu_set("0-1"), "is not a valid mask");
    wrongs(|_, action| action.current_mask = cpu_set("1"), "to the mask it has");
    wrongs(
        |m, action| m.change_thread(action.thread, |thread| thread.mask_entry = None),
        "without its old mask in the journal",
    );
}

#[test]
fn a_thread_changed_twice_is_noticed() {
    let mut m = sound();
    let action = pin(&mut m);
    assert!(found(&m, vec![action.clone(), action]).iter().any(|text| text.contains("changed twice")));
}

#[test]
fn a_restore_sets_the_saved_mask_for_released_processes_only() {
    let mut m = sound();
    let thread = thread(&m, 10);
    let back = |to: &str| MaskAction {
        kind: MaskActionKind::Restore,
        job: job("a"),
        thread,
        current_mask: cpu_set("0-1"),
        target_mask: cpu_set(to),
        requested_mask: cpu_set(to),
        reason: String::new(),
    };
    assert_eq!(found(&m, vec![back("0-7")]).len(), 1, "it is still a member");
    let member = m.state.members.remove(thread.process.pid).unwrap();
    m.state.processes_to_restore.insert(thread.process.pid, member);
    assert_eq!(found(&m, vec![back("0-7")]), [""; 0]);
    assert_eq!(found(&m, vec![back("0-6")]).len(), 1);
}
