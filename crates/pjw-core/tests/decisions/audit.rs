//! The audit of invalid states and plans: one test for each violation.

use pjw_core::audit::{Violation, audit};
use pjw_core::ids::ThreadId;
use pjw_core::plan::{MaskAction, MaskActionKind, Plan};
use pjw_core::state::WardenState;
use pjw_core::time::Nanos;

use crate::machine::{Machine, cpu_set, job, machine};

/// A valid state: two jobs on PUs 0-1 and 2-3 of eight, each with a process of one thread.
fn machine_with_two_jobs() -> Machine {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("b", 2, &[20]).unwrap();
    m
}

fn thread(m: &Machine, pid: u32) -> ThreadId {
    m.journaled_threads().into_iter().find(|thread| thread.process.pid.0 == pid).unwrap()
}

/// A valid action that pins the thread of process 10 to PU 1.
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
        program_request: None,
        reason: String::new(),
    }
}

/// The violations of the state and of a plan with these actions.
fn violations(m: &Machine, mask_actions: Vec<MaskAction>) -> Vec<String> {
    audit(&m.state, &Plan { mask_actions, ..Plan::default() }, &m.policy)
        .iter()
        .map(Violation::to_string)
        .collect()
}

/// Asserts that a valid state has this violation after the change.
fn assert_violation_of_state(change: impl Fn(&mut WardenState), expected: &str) {
    let mut m = machine_with_two_jobs();
    change(&mut m.state);
    let violations = violations(&m, Vec::new());
    assert!(violations.iter().any(|text| text.contains(expected)), "{expected}: {violations:?}");
}

/// Asserts that a valid action has this violation after the change.
fn assert_violation_of_action(change: impl Fn(&mut Machine, &mut MaskAction), expected: &str) {
    let mut m = machine_with_two_jobs();
    let mut action = pin(&mut m);
    change(&mut m, &mut action);
    let violations = violations(&m, vec![action]);
    assert!(violations.iter().any(|text| text.contains(expected)), "{expected}: {violations:?}");
}

#[test]
fn a_valid_state_and_a_valid_plan_have_no_violation() {
    let mut m = machine_with_two_jobs();
    assert_eq!(violations(&m, Vec::new()), [""; 0]);
    let action = pin(&mut m);
    assert_eq!(violations(&m, vec![action]), [""; 0]);
}

#[test]
fn a_core_whose_holder_is_no_job_has_leaked() {
    assert_violation_of_state(|state| drop(state.jobs.remove(&job("a"))), "a core has leaked");
}

#[test]
fn a_pool_with_other_pus_than_the_machine_is_a_violation() {
    assert_violation_of_state(
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
fn a_grant_that_differs_from_the_pool_is_a_violation() {
    assert_violation_of_state(
        |state| drop(state.pool.release(&job("a"))),
        "manual:a was granted 0-1 and holds in the pool ",
    );
    assert_violation_of_state(
        |state| state.jobs.update(&job("a"), |job| job.grant = None),
        "manual:a was granted  and holds in the pool 0-1",
    );
}

#[test]
fn two_owners_of_one_pu_are_a_violation() {
    assert_violation_of_state(
        |state| state.jobs.update(&job("b"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("1-3")),
        "manual:b and manual:a were both granted 1",
    );
}

#[test]
fn a_grant_of_housekeeping_pus_is_a_violation() {
    assert_violation_of_state(
        |state| {
            state.pool.release(&job("a"));
            state.pool.set_housekeeping(&cpu_set("0"));
        },
        "manual:a was granted 0, which are housekeeping",
    );
}

#[test]
fn a_grant_without_pus_is_a_violation() {
    assert_violation_of_state(
        |state| state.jobs.update(&job("a"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("")),
        "no PU at all",
    );
}

#[test]
fn a_grant_of_half_a_core_is_a_violation_unless_the_policy_shares_siblings() {
    let mut m = machine_with_two_jobs();
    let cores = (0..4)
        .map(|n| pjw_core::topology::Core { pus: cpu_set(&format!("{n},{}", n + 4)), kind_index: 0 })
        .collect();
    m.state.topology = pjw_core::topology::Topology::new(cores, Vec::new()).unwrap();
    m.state.pool.grant_available(&job("b"), &cpu_set("2-4"));
    m.state.jobs.update(&job("b"), |job| job.grant.as_mut().unwrap().cpus = cpu_set("2-4"));
    assert!(violations(&m, Vec::new()).iter().any(|text| text.contains("and not the rest of it")));
    m.policy.share_smt = true;
    assert_eq!(violations(&m, Vec::new()), [""; 0]);
}

#[test]
fn each_invalid_change_of_a_mask_is_a_violation() {
    assert_violation_of_action(|m, action| action.thread = thread(m, 20), "it is not a thread of manual:a");
    assert_violation_of_action(|_, action| action.thread.start.0 += 1, "it is not a thread of manual:a");
    assert_violation_of_action(
        |_, action| action.target_mask = cpu_set("2"),
        "to 2, outside 0-1 of manual:a",
    );
    assert_violation_of_action(|_, action| action.target_mask = cpu_set(""), "is not a valid mask");
    assert_violation_of_action(|_, action| action.target_mask = cpu_set("0-1"), "is not a valid mask");
    assert_violation_of_action(|_, action| action.current_mask = cpu_set("1"), "to the mask it has");
    assert_violation_of_action(
        |m, action| m.change_thread(action.thread, |thread| thread.mask_entry = None),
        "without its old mask in the journal",
    );
}

#[test]
fn two_changes_of_one_thread_in_a_plan_are_a_violation() {
    let mut m = machine_with_two_jobs();
    let action = pin(&mut m);
    assert!(violations(&m, vec![action.clone(), action]).iter().any(|text| text.contains("changed twice")));
}

#[test]
fn a_restore_sets_the_saved_mask_for_released_processes_only() {
    let mut m = machine_with_two_jobs();
    let thread = thread(&m, 10);
    let restore_to = |to: &str| MaskAction {
        kind: MaskActionKind::Restore,
        job: job("a"),
        thread,
        current_mask: cpu_set("0-1"),
        target_mask: cpu_set(to),
        requested_mask: cpu_set(to),
        program_request: None,
        reason: String::new(),
    };
    assert_eq!(violations(&m, vec![restore_to("0-7")]).len(), 1, "it is still a member");
    let member = m.state.members.remove(thread.process.pid).unwrap();
    m.state.processes_to_restore.insert(thread.process.pid, member);
    assert_eq!(violations(&m, vec![restore_to("0-7")]), [""; 0]);
    assert_eq!(violations(&m, vec![restore_to("0-6")]).len(), 1);
}
