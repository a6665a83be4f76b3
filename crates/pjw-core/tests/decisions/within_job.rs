//! The NUMA nodes of new processes of a job on several nodes: `--within-job`.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::explain;
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::CpuRequest;
use pjw_core::policy::{OversubscriptionPolicy, Policy};
use pjw_core::within_job::NumaNodeRule;

use super::machine::{Machine, assign_of, cpu_set, job, machine, machine_with, regular_topology};

/// Assigns cores to the job `a`, with a launcher, process 10, that sleeps.
fn job_with_rule(machine: &mut Machine, cores: u32, rule: NumaNodeRule) {
    machine.spawn(10, 1, 0);
    change_rule(machine, cores, Some(rule));
}

fn change_rule(machine: &mut Machine, cores: u32, within_job: Option<NumaNodeRule>) {
    let assign =
        AssignCommand { within_job, pids: vec![Pid(10)], ..assign_of("a", Some(CpuRequest::Cores(cores))) };
    machine.command(Command::Assign(assign)).unwrap();
}

/// Starts processes as children of process 10, one after the other. Each runs all the time from its start. Returns the
/// mask of each.
fn start_one_by_one(machine: &mut Machine, pids: &[u32]) -> Vec<String> {
    for index in 0..pids.len() {
        machine.spawn(pids[index], 10, 0);
        run_for_seconds(machine, 4, &pids[..=index]);
    }
    masks(machine, pids)
}

fn run_for_seconds(machine: &mut Machine, seconds: u32, busy: &[u32]) -> usize {
    let second = |_| {
        machine.run(busy);
        machine.settle().len()
    };
    (0..seconds).map(second).sum()
}

fn masks(machine: &Machine, pids: &[u32]) -> Vec<String> {
    pids.iter().map(|&pid| machine.effective_mask(pid, pid)).collect()
}

/// Asserts the masks of processes that start one by one under a rule. Node 0 has the PUs 0-3, node 1 the PUs 4-7.
fn check_rule(rule: NumaNodeRule, pids: &[u32], expected: &[&str]) {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, rule);
    assert_eq!(start_one_by_one(&mut machine, pids), expected, "{rule}");
    assert_eq!(run_for_seconds(&mut machine, 10, pids), 0, "{rule}: nothing is left to change");
}

#[test]
fn each_rule_chooses_the_nodes_of_new_processes() {
    let four = [20, 21, 22, 23];
    check_rule(NumaNodeRule::RoundRobin, &four, &["0", "4", "1", "5"]);
    check_rule(NumaNodeRule::LeastLoaded, &four, &["0", "4", "1", "5"]);
    check_rule(NumaNodeRule::Fill, &four, &["0", "1", "2", "3"]);
    check_rule(NumaNodeRule::Packed, &four, &["0", "1", "2", "3"]);
    check_rule(NumaNodeRule::Default, &four, &["0", "1", "2", "3"]);
    check_rule(NumaNodeRule::Fill, &[20, 21, 22, 23, 24], &["0", "1", "2", "3", "4"]);
}

#[test]
fn a_full_node_passes_threads_on_to_idle_cores_of_another_one() {
    check_rule(NumaNodeRule::Packed, &[20, 21, 22, 23, 24, 25], &["0", "1", "2", "3", "4", "5"]);
}

#[test]
fn processes_that_become_hot_at_the_same_time_are_placed_in_the_order_of_their_start() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
    let pids = [20, 21, 22, 23];
    for pid in pids {
        machine.spawn(pid, 10, 0);
        machine.settle();
    }
    run_for_seconds(&mut machine, 4, &pids);
    assert_eq!(masks(&machine, &pids), ["0", "4", "1", "5"]);
}

#[test]
fn packed_and_fill_begin_in_the_node_of_the_parent() {
    for rule in [NumaNodeRule::Packed, NumaNodeRule::Fill] {
        let mut machine = machine();
        machine.spawn(10, 1, 0);
        machine.bind(10, 10, "5");
        change_rule(&mut machine, 8, Some(rule));
        run_for_seconds(&mut machine, 4, &[10]);
        machine.spawn(20, 10, 0);
        machine.bind(20, 20, "0-7");
        run_for_seconds(&mut machine, 4, &[10, 20]);
        assert_eq!(masks(&machine, &[10, 20]), ["5", "4"], "{rule}");
    }
}

#[test]
fn least_loaded_counts_the_bound_threads_of_the_job() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::LeastLoaded);
    for (pid, mask) in [(20, "0"), (21, "1")] {
        machine.spawn(pid, 10, 0);
        machine.bind(pid, pid, mask);
    }
    run_for_seconds(&mut machine, 4, &[20, 21]);
    machine.spawn(22, 10, 0);
    machine.spawn(23, 10, 0);
    run_for_seconds(&mut machine, 4, &[20, 21, 22, 23]);
    assert_eq!(masks(&machine, &[20, 21, 22, 23]), ["0", "1", "4", "5"]);
}

#[test]
fn a_process_that_sleeps_and_runs_again_returns_to_its_node() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
    let pids = [20, 21];
    start_one_by_one(&mut machine, &pids);
    run_for_seconds(&mut machine, 10, &[]);
    assert_eq!(masks(&machine, &pids), ["0-7", "0-7"]);
    run_for_seconds(&mut machine, 4, &[21]);
    assert_eq!(masks(&machine, &pids), ["0-7", "4"]);
}

#[test]
fn another_rule_for_a_job_moves_neither_its_cores_nor_its_threads() {
    let mut machine = machine();
    machine.spawn(9, 1, 0);
    machine.assign("before", 1, &[9]).unwrap();
    job_with_rule(&mut machine, 6, NumaNodeRule::Default);
    let (grant, masks_before) = (machine.grant("a"), start_one_by_one(&mut machine, &[20, 21]));
    machine.release("before").unwrap();
    change_rule(&mut machine, 6, Some(NumaNodeRule::RoundRobin));
    assert_eq!(machine.grant("a"), grant);
    assert_eq!(run_for_seconds(&mut machine, 5, &[20, 21]), 0);
    assert_eq!(masks(&machine, &[20, 21]), masks_before);
    // A later command without the option keeps the rule.
    change_rule(&mut machine, 6, None);
    let request = machine.state.jobs[&job("a")].request.clone().unwrap();
    assert_eq!(request.within_job, NumaNodeRule::RoundRobin);
}

#[test]
fn a_process_whose_node_the_job_lost_gets_another_one() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
    let pids = [20, 21];
    start_one_by_one(&mut machine, &pids);
    change_rule(&mut machine, 4, None);
    run_for_seconds(&mut machine, 4, &pids);
    let mut expected = masks(&machine, &pids);
    expected.sort();
    expected.dedup();
    assert_eq!(expected.len(), 2, "each thread has a PU of its own");
    let grant = cpu_set(&machine.grant("a"));
    assert!(masks(&machine, &pids).iter().all(|mask| cpu_set(mask).is_subset(&grant)));
}

#[test]
fn two_threads_get_a_core_each_before_a_rule_puts_two_on_one_core() {
    // Two nodes of two cores of two PUs: core n has the PUs n and n + 4, node 0 the cores 0 and 1.
    let mut machine = machine_with(regular_topology(2, 1, 1, 2, 2), Policy::default());
    job_with_rule(&mut machine, 4, NumaNodeRule::Packed);
    assert_eq!(start_one_by_one(&mut machine, &[20, 21, 22, 23]), ["0", "1", "2", "3"]);
}

/// The NUMA node that is recorded for each of these processes.
fn recorded_nodes(machine: &Machine, pids: &[u32]) -> Vec<Option<u32>> {
    pids.iter().map(|&pid| machine.state.members[&Pid(pid)].numa_node).collect()
}

#[test]
fn the_default_rule_ends_the_choices_of_an_earlier_rule() {
    for (later, expected) in [(Some(NumaNodeRule::Default), "1"), (None, "4")] {
        let mut machine = machine();
        job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
        let pids = [20, 21];
        assert_eq!(start_one_by_one(&mut machine, &pids), ["0", "4"]);
        run_for_seconds(&mut machine, 10, &[20]);
        change_rule(&mut machine, 8, later);
        // The scheduler of the kernel has moved the process to PU 1.
        let id = machine.state.members[&Pid(21)].threads.keys().next().copied().unwrap();
        assert_eq!(id, Tid(21));
        machine.bind(21, 21, "1");
        machine.settle();
        machine.bind(21, 21, "0-7");
        run_for_seconds(&mut machine, 4, &pids);
        assert_eq!(masks(&machine, &[21]), [expected], "{later:?}");
        let member = &machine.state.members[&Pid(21)];
        let text = explain::explain_mask(&machine.state, member, Tid(21), &member.threads[&Tid(21)]);
        assert_eq!(text.contains("was chosen for its process"), later.is_none(), "{text}");
    }
}

#[test]
fn the_node_in_which_a_process_runs_is_recorded_and_not_a_full_one() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::Packed);
    let pids = [20, 21, 22, 23, 24];
    start_one_by_one(&mut machine, &pids);
    assert_eq!(recorded_nodes(&machine, &pids), [Some(0), Some(0), Some(0), Some(0), Some(1)]);
}

#[test]
fn a_process_that_is_not_pinned_gets_no_node() {
    let float = Policy { oversubscription: OversubscriptionPolicy::Float, ..Policy::default() };
    let off = Policy { pin_hot_threads: false, ..Policy::default() };
    for (policy, pids) in [(float, 20..29), (off, 20..22)] {
        let mut machine = machine_with(regular_topology(2, 1, 1, 4, 1), policy);
        job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
        let pids: Vec<u32> = pids.collect();
        pids.iter().for_each(|&pid| drop(machine.spawn(pid, 10, 0)));
        run_for_seconds(&mut machine, 4, &pids);
        assert!(masks(&machine, &pids).iter().all(|mask| mask == "0-7"), "{:?}", masks(&machine, &pids));
        assert!(recorded_nodes(&machine, &pids).iter().all(Option::is_none));
        let job = &machine.state.jobs[&job("a")];
        let text = explain::explain_job(&machine.state, &machine.policy, job).join("\n");
        let is_off = !machine.policy.pin_hot_threads;
        assert_eq!(text.contains("--within-job rr has no effect: no thread is pinned"), is_off, "{text}");
    }
}

#[test]
fn explain_names_the_rule_and_the_chosen_node() {
    let mut machine = machine();
    job_with_rule(&mut machine, 8, NumaNodeRule::RoundRobin);
    start_one_by_one(&mut machine, &[20, 21]);
    let reasons = |machine: &Machine| {
        explain::explain_job(&machine.state, &machine.policy, &machine.state.jobs[&job("a")]).join("\n")
    };
    let text = reasons(&machine);
    assert!(text.contains("to the NUMA nodes in turns (--within-job rr)"), "{text}");
    let member = &machine.state.members[&Pid(21)];
    let text = explain::explain_mask(&machine.state, member, Tid(21), &member.threads[&Tid(21)]);
    assert!(text.ends_with("is pinned to CPU 4 (NUMA node 1 was chosen for its process)"), "{text}");
    change_rule(&mut machine, 4, None);
    let text = reasons(&machine);
    assert!(text.contains("--within-job rr has no effect: its CPUs are on one NUMA node"), "{text}");
}
