//! Bindings inside the grant. A binding is kept, except if more running threads are bound to some PUs than there are
//! such PUs, while other PUs of the grant are idle. Bindings of one process to different PUs are always kept.

use pjw_core::event::EventKind;
use pjw_core::explain;
use pjw_core::ids::{Pid, Tid};
use pjw_core::plan::MaskActionKind;
use pjw_core::policy::{BindingPolicy, Policy};

use super::machine::{Machine, machine_with, regular_topology};

/// Two packages of two cores of two PUs. Core n has the PUs n and n + 4, package 0 the cores 0 and 1.
fn smt_machine() -> Machine {
    smt_machine_with(BindingPolicy::default())
}

fn smt_machine_with(bindings: BindingPolicy) -> Machine {
    machine_with(regular_topology(2, 1, 1, 2, 2), Policy { bindings, ..Policy::default() })
}

/// Makes a job of this number of cores with one process of one thread for each mask. The processes are 20, 21, and so
/// on.
fn job_of_ranks(machine: &mut Machine, cores: u32, masks: &[&str]) -> Vec<u32> {
    machine.spawn(10, 1, 0);
    let pids: Vec<u32> = (20..).take(masks.len()).collect();
    for &pid in &pids {
        machine.spawn(pid, 10, 0);
    }
    machine.assign("mpi", cores, &[10]).unwrap();
    for (&pid, mask) in pids.iter().zip(masks) {
        machine.bind(pid, pid, mask);
    }
    machine.settle();
    pids
}

/// Lets some seconds pass in which these threads run, with a cycle after each. Returns the kinds of all actions and the
/// texts of the events that report repairs.
fn run_for_seconds(machine: &mut Machine, seconds: u32, busy: &[u32]) -> (Vec<MaskActionKind>, Vec<String>) {
    let (mut kinds, mut repairs) = (Vec::new(), Vec::new());
    for _ in 0..seconds {
        machine.run(busy);
        let (more, texts) = settle_with_events(machine);
        kinds.extend(more);
        repairs.extend(texts);
    }
    (kinds, repairs)
}

/// Settles the machine. Returns the kinds of all actions and the texts of the events that report repairs.
fn settle_with_events(machine: &mut Machine) -> (Vec<MaskActionKind>, Vec<String>) {
    let actions = machine.settle();
    let kinds = actions.iter().map(|action| action.kind).collect();
    let events = machine.mask_events(actions).into_iter().chain(machine.events.clone());
    let repairs = events.filter(|event| event.kind == EventKind::Repaired).map(|event| event.text);
    (kinds, repairs.collect())
}

fn masks(machine: &Machine, pids: &[u32]) -> Vec<String> {
    pids.iter().map(|&pid| machine.effective_mask(pid, pid)).collect()
}

fn reason(machine: &Machine, pid: u32) -> String {
    let member = &machine.state.members[&Pid(pid)];
    explain::explain_mask(&machine.state, member, Tid(pid), &member.threads[&Tid(pid)])
}

/// Runs a job of ranks with the masks `own` until nothing changes. Asserts that the masks are `expected` then, and that
/// a release restores them.
#[track_caller]
fn check_ranks(cores: u32, own: &[&str], expected: &[&str]) {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, cores, own);
    run_for_seconds(&mut machine, 5, &pids);
    assert_eq!(masks(&machine, &pids), expected);
    let (kinds, repairs) = run_for_seconds(&mut machine, 3, &pids);
    assert_eq!((kinds, repairs), (vec![], vec![]), "nothing is left to change");
    machine.release("mpi").unwrap();
    assert_eq!(masks(&machine, &pids), own, "a release restores every mask");
}

#[test]
fn with_the_policy_respect_no_binding_inside_the_grant_is_lifted() {
    let mut machine = smt_machine_with(BindingPolicy::Respect);
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    assert_eq!(run_for_seconds(&mut machine, 5, &pids), (vec![], vec![]));
    assert_eq!(masks(&machine, &pids), ["0,4"; 4]);
}

#[test]
fn a_lifted_binding_is_in_force_again_after_a_reload_with_the_policy_respect() {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    run_for_seconds(&mut machine, 5, &pids);
    assert_ne!(masks(&machine, &pids), ["0,4"; 4]);
    machine.policy.bindings = BindingPolicy::Respect;
    machine.settle();
    assert_eq!(masks(&machine, &pids), ["0,4"; 4]);
}

#[test]
fn with_the_policy_override_every_binding_is_lifted_and_a_release_restores_it() {
    let mut machine = smt_machine_with(BindingPolicy::Override);
    let pids = job_of_ranks(&mut machine, 2, &["0", "1,5"]);
    assert_eq!(masks(&machine, &pids), ["0-1,4-5"; 2], "also of threads that sleep");
    run_for_seconds(&mut machine, 5, &pids);
    assert_eq!(masks(&machine, &pids), ["0", "1"], "running threads are pinned");
    let text = reason(&machine, pids[1]);
    assert!(text.contains("affinity = \"override\""), "{text}");
    assert_eq!(run_for_seconds(&mut machine, 3, &pids), (vec![], vec![]), "nothing is left to change");
    machine.release("mpi").unwrap();
    assert_eq!(masks(&machine, &pids), ["0", "1,5"]);
}

#[test]
fn the_event_about_a_binding_that_the_policy_lifts_names_the_binding_and_the_setting() {
    let mut machine = smt_machine_with(BindingPolicy::Override);
    machine.spawn(10, 1, 0);
    machine.assign("mpi", 2, &[10]).unwrap();
    machine.bind(10, 10, "1");
    let lifted = machine.settle();
    let texts: Vec<String> = machine.mask_events(lifted).into_iter().map(|event| event.text).collect();
    let expected = "1 thread bound to CPU 1 moved inside CPUs 0-1,4-5: the configuration lifts every binding (affinity = \
                    \"override\")";
    assert_eq!(texts, [expected]);
    assert!(machine.settle().is_empty(), "nothing changes, and nothing is reported");
}

#[test]
fn a_binding_is_in_force_again_if_the_thread_waits_as_long_on_other_pus() {
    let mut machine = machine_with(regular_topology(1, 1, 1, 2, 1), Policy::default());
    let pids = job_of_ranks(&mut machine, 2, &["0", "0"]);
    let wait = |machine: &mut Machine, seconds: u32, waiting: &[u32]| {
        let (mut kinds, mut repairs) = (Vec::new(), Vec::new());
        for _ in 0..seconds {
            machine.run_waiting(&pids, waiting);
            let (more, texts) = settle_with_events(machine);
            kinds.extend(more);
            repairs.extend(texts);
        }
        (kinds, repairs)
    };
    let (kinds, _) = wait(&mut machine, 5, &pids);
    assert!(kinds.contains(&MaskActionKind::Unbind), "{kinds:?}");
    assert_eq!(masks(&machine, &pids), ["0", "1"]);
    let (kinds, repairs) = wait(&mut machine, 12, &pids);
    assert_eq!(kinds, [MaskActionKind::Rebind]);
    assert_eq!(
        repairs,
        ["1 thread bound to CPU 0 again: moving them did not help, they waited for a CPU as long as before"]
    );
    assert_eq!(masks(&machine, &pids), ["0", "0"]);
    assert_eq!(wait(&mut machine, 30, &pids), (vec![], vec![]), "it is not tried again");
    let text = reason(&machine, pids[1]);
    assert!(text.contains("did not help"), "{text}");
    // The program requests another mask: this is a new binding.
    machine.bind(pids[1], pids[1], "0-1");
    wait(&mut machine, 2, &pids);
    machine.bind(pids[1], pids[1], "0");
    let (kinds, _) = wait(&mut machine, 5, &pids);
    assert!(kinds.contains(&MaskActionKind::Unbind), "{kinds:?}");
}

#[test]
fn a_lifted_binding_stays_lifted_if_only_the_moved_thread_waits_for_another_program() {
    let mut machine = machine_with(regular_topology(1, 1, 1, 2, 1), Policy::default());
    let pids = job_of_ranks(&mut machine, 2, &["0", "0"]);
    let mut rebound = Vec::new();
    for second in 0..40 {
        machine.run_waiting(&pids, if second < 3 { &pids } else { &pids[1..] });
        rebound.extend(
            settle_with_events(&mut machine).0.into_iter().filter(|&kind| kind == MaskActionKind::Rebind),
        );
    }
    assert_eq!((masks(&machine, &pids), rebound), (["0", "1"].map(String::from).to_vec(), vec![]));
}

#[test]
fn a_lifted_binding_stays_lifted_if_the_thread_waits_less() {
    let mut machine = machine_with(regular_topology(1, 1, 1, 2, 1), Policy::default());
    let pids = job_of_ranks(&mut machine, 2, &["0", "0"]);
    for second in 0..40 {
        machine.run_waiting(&pids, if second < 3 { &pids } else { &[] });
        machine.settle();
    }
    assert_eq!(masks(&machine, &pids), ["0", "1"]);
}

#[test]
fn four_ranks_bound_to_one_core_of_two_pus_use_both_cores_of_the_job() {
    check_ranks(2, &["0,4"; 4], &["0,4", "0,4", "1", "5"]);
}

#[test]
fn ranks_bound_to_one_core_get_a_core_each_before_two_share_one() {
    check_ranks(4, &["0,4"; 4], &["0,4", "1", "2", "3"]);
    check_ranks(3, &["0,4"; 4], &["0,4", "0,4", "1", "2"]);
}

#[test]
fn ranks_of_two_launchers_that_both_bind_to_the_first_cores_do_not_share_a_core() {
    check_ranks(4, &["0,4", "1,5", "0,4", "1,5"], &["0,4", "1,5", "2", "3"]);
    check_ranks(4, &["0", "1", "0", "1"], &["0", "1", "2", "3"]);
}

#[test]
fn if_more_threads_are_bound_to_a_numa_node_than_it_has_pus_only_the_excess_moves() {
    check_ranks(4, &["0-1,4-5"; 5], &["0-1,4-5", "0-1,4-5", "0-1,4-5", "0-1,4-5", "2"]);
}

#[test]
fn the_thread_with_the_widest_mask_moves() {
    check_ranks(4, &["0-1,4-5", "0", "4", "1,5", "1,5"], &["2", "0", "4", "1,5", "3"]);
}

#[test]
fn bindings_are_kept_if_each_thread_has_a_pu_of_its_own() {
    for own in [
        // One rank on each core, with both PUs.
        &["0,4", "1,5", "2,6", "3,7"][..],
        // One rank on each PU of half of the cores.
        &["0", "4", "1", "5"],
        // A NUMA node that is full, and one that is not.
        &["0-1,4-5"; 4],
        &["0-1,4-5"; 3],
        // One rank, on fewer PUs than the job has.
        &["0,4"],
        // Masks that overlap, although each rank has a PU.
        &["0-1", "1-2", "0,2"],
        &["0,4", "0-1,4-5", "0-1,4-5"],
    ] {
        check_ranks(4, own, own);
    }
}

#[test]
fn bound_ranks_are_not_moved_if_no_pu_is_idle() {
    check_ranks(2, &["0,4", "0,4", "0,4", "1", "5"], &["0,4", "0,4", "0,4", "1", "5"]);
    check_ranks(1, &["0", "0", "4"], &["0", "0", "4"]);
}

/// The threads of a process that a launcher bound, and that started three more threads.
const TEAM: [u32; 4] = [20, 30, 31, 32];

/// Makes a job of this number of cores with one process that is bound to the first core. Its threads inherited the
/// mask.
fn job_of_bound_team(machine: &mut Machine, cores: u32) {
    job_of_ranks(machine, cores, &["0,4"]);
    for &tid in &TEAM[1..] {
        machine.clone_thread(20, tid);
    }
    machine.settle();
}

fn team_masks(machine: &Machine) -> Vec<String> {
    TEAM.iter().map(|&tid| machine.effective_mask(20, tid)).collect()
}

#[test]
fn threads_of_one_process_that_inherited_one_narrow_mask_use_the_other_cores_of_the_job() {
    for (cores, expected) in
        [(4, ["0,4", "1", "2", "3"]), (3, ["0,4", "0,4", "1", "2"]), (2, ["0,4", "0,4", "1", "5"])]
    {
        let mut machine = smt_machine();
        job_of_bound_team(&mut machine, cores);
        let (_, repairs) = run_for_seconds(&mut machine, 5, &TEAM);
        assert_eq!(team_masks(&machine), expected, "{cores} cores");
        assert!(repairs.len() == 1 && repairs[0].contains("bound to CPUs 0,4 moved inside"), "{repairs:?}");
        assert_eq!(run_for_seconds(&mut machine, 8, &TEAM), (vec![], vec![]), "nothing is left to change");
        machine.release("mpi").unwrap();
        assert_eq!(team_masks(&machine), ["0,4"; 4], "a release restores every mask");
    }
}

#[test]
fn a_process_with_no_more_running_threads_than_pus_keeps_its_mask() {
    let mut machine = smt_machine();
    job_of_bound_team(&mut machine, 4);
    assert_eq!(run_for_seconds(&mut machine, 5, &TEAM[..2]), (vec![], vec![]));
    assert_eq!(team_masks(&machine), ["0,4"; 4]);
}

#[test]
fn threads_that_their_program_bound_to_different_pus_share_them_as_it_chose() {
    for other in ["0", "1"] {
        let mut machine = smt_machine();
        job_of_bound_team(&mut machine, 4);
        // One thread with another mask is sufficient, also if it sleeps.
        machine.bind(20, 32, other);
        machine.settle();
        for busy in [&TEAM[..], &TEAM[..3]] {
            assert_eq!(run_for_seconds(&mut machine, 5, busy), (vec![], vec![]), "{other}");
        }
        assert_eq!(team_masks(&machine), ["0,4", "0,4", "0,4", other]);
    }
}

#[test]
fn with_the_policy_respect_an_inherited_mask_is_kept() {
    let mut machine = smt_machine_with(BindingPolicy::Respect);
    job_of_bound_team(&mut machine, 4);
    assert_eq!(run_for_seconds(&mut machine, 5, &TEAM), (vec![], vec![]));
}

#[test]
fn an_inherited_mask_is_in_force_again_if_the_threads_wait_as_long_on_other_pus() {
    let mut machine = machine_with(regular_topology(1, 1, 1, 2, 1), Policy::default());
    job_of_ranks(&mut machine, 2, &["0"]);
    machine.clone_thread(20, 30);
    machine.settle();
    let mut wait = |seconds: u32| {
        let (mut kinds, team) = (Vec::new(), &TEAM[..2]);
        for _ in 0..seconds {
            machine.run_waiting(team, team);
            kinds.extend(settle_with_events(&mut machine).0);
        }
        (kinds, machine.effective_mask(20, 30))
    };
    let (kinds, mask) = wait(5);
    assert!(kinds.contains(&MaskActionKind::Unbind) && mask == "1", "{kinds:?} {mask}");
    assert_eq!(wait(12), (vec![MaskActionKind::Rebind], "0".to_owned()));
    assert_eq!(wait(30), (vec![], "0".to_owned()), "it is not tried again");
}

#[test]
fn a_repair_of_a_binding_is_reported_once_and_explained() {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    let (_, repairs) = run_for_seconds(&mut machine, 8, &pids);
    let repair_texts: Vec<&str> = repairs.iter().map(String::as_str).collect();
    assert_eq!(
        repair_texts,
        [
            "2 threads bound to CPUs 0,4 moved inside CPUs 0-1,4-5: too many running threads were bound there, \
             while other CPUs of the job idled"
        ]
    );
    let expected = "it wants a CPU 99 % of the time (running or waiting) and is pinned to CPU 1: too many running threads were bound to its own \
                    CPUs 0,4, while other CPUs of the job idled";
    assert_eq!(reason(&machine, 22), expected);
    assert!(reason(&machine, 20).starts_with("it chose CPUs 0,4 itself"), "{}", reason(&machine, 20));
}

#[test]
fn a_repaired_thread_that_sleeps_and_runs_again_does_not_return_to_the_others() {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    run_for_seconds(&mut machine, 5, &pids);
    for _ in 0..3 {
        run_for_seconds(&mut machine, 8, &[]);
        assert_eq!(masks(&machine, &pids), ["0,4", "0,4", "0-1,4-5", "0-1,4-5"]);
        let idle = reason(&machine, 22);
        assert!(idle.contains("floats over CPUs 0-1,4-5: too many running threads"), "{idle}");
        let (kinds, repairs) = run_for_seconds(&mut machine, 5, &pids);
        assert_eq!((kinds, repairs), (vec![MaskActionKind::Pin; 2], vec![]));
        assert_eq!(masks(&machine, &pids), ["0,4", "0,4", "1", "5"]);
    }
}

#[test]
fn a_thread_that_was_left_on_a_full_core_moves_when_another_core_becomes_idle() {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    run_for_seconds(&mut machine, 5, &pids);
    let (_, repairs) = run_for_seconds(&mut machine, 8, &pids[..2]);
    assert_eq!(masks(&machine, &pids), ["0,4", "1", "0-1,4-5", "0-1,4-5"]);
    assert_eq!(repairs.len(), 1);
    let (_, repairs) = run_for_seconds(&mut machine, 5, &pids);
    assert_eq!(
        (masks(&machine, &pids), repairs),
        (["0,4", "1", "4", "5"].map(String::from).to_vec(), vec![])
    );
}

#[test]
fn a_repaired_thread_that_binds_itself_again_keeps_its_new_binding() {
    let mut machine = smt_machine();
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    run_for_seconds(&mut machine, 5, &pids);
    machine.bind(22, 22, "1,5");
    assert_eq!(run_for_seconds(&mut machine, 3, &pids), (vec![], vec![]));
    assert_eq!(masks(&machine, &pids), ["0,4", "0,4", "1,5", "5"]);
    assert!(reason(&machine, 22).starts_with("it chose CPUs 1,5 itself"), "{}", reason(&machine, 22));
}

#[test]
fn without_pinning_a_repaired_thread_may_use_the_whole_grant() {
    let mut machine =
        machine_with(regular_topology(2, 1, 1, 2, 2), Policy { pin_hot_threads: false, ..Policy::default() });
    let pids = job_of_ranks(&mut machine, 2, &["0,4"; 4]);
    run_for_seconds(&mut machine, 5, &pids);
    assert_eq!(masks(&machine, &pids), ["0,4", "0,4", "0-1,4-5", "0-1,4-5"]);
    assert_eq!(run_for_seconds(&mut machine, 3, &pids), (vec![], vec![]));
}

#[test]
fn a_binding_outside_of_the_grant_is_translated_and_then_counted_with_the_others() {
    let mut machine = smt_machine();
    machine.spawn(5, 1, 0);
    machine.assign("other", 2, &[5]).unwrap();
    machine.spawn(10, 1, 0);
    let pids = [20, 21, 22, 23];
    for pid in pids {
        machine.spawn(pid, 10, 0);
        machine.bind(pid, pid, "0,4");
    }
    machine.assign("mpi", 2, &[10]).unwrap();
    assert_eq!(
        (machine.grant("mpi"), masks(&machine, &pids)),
        ("2-3,6-7".to_owned(), vec!["2,6".to_owned(); 4])
    );
    run_for_seconds(&mut machine, 5, &pids);
    assert_eq!(masks(&machine, &pids), ["2,6", "2,6", "3", "7"]);
    machine.release("mpi").unwrap();
    assert_eq!(masks(&machine, &pids), ["0,4"; 4]);
}
