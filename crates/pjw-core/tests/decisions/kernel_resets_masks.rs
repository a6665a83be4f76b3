//! Kernels before 6.2 reset the masks of all threads in a cpuset when a PU goes offline or online. The daemon restores
//! the bindings of the threads.

use std::time::Duration;

use pjw_core::command::{AssignCommand, Command};
use pjw_core::command_scan::command_scan_request;
use pjw_core::cpuset_group::{CpusetHierarchy, EnforcementMethod};
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::CpuRequest;
use pjw_core::policy::ExhaustionPolicy;
use pjw_core::ports::MachineInterface;
use pjw_core::reconcile::Decision;
use pjw_core::topology::Topology;

use super::machine::{
    Machine, SECOND, assign_of, cpu_set, machine_with, machine_with_cpusets, policy_with_cpusets,
    regular_topology,
};
use super::restore::restart;

const JOB_CPUSET: &str = "/pjw/a";

/// Process 7 is in the cpuset of a job that holds PUs 0-3. Its thread 8 has bound itself to PU 1.
fn bound_in_job_cpuset() -> Machine {
    let m = bound_in_job_cpuset_on(regular_topology(2, 1, 1, 4, 1), 4);
    assert_eq!((m.grant("a"), masks(&m)), ("0-3".into(), ["0-3".into(), "1".into()]));
    m
}

/// Process 7 is in the cpuset of a job of this number of cores on this machine. Its thread 8 has bound itself to PU 1.
fn bound_in_job_cpuset_on(topology: Topology, cores: u32) -> Machine {
    let mut m = machine_with(topology, policy_with_cpusets(CpusetHierarchy::Legacy, false));
    m.spawn(7, 1, 0).cgroup = JOB_CPUSET.into();
    m.clone_thread(7, 8);
    let pids = vec![Pid(7)];
    let assign = AssignCommand { pids, ..assign_of("a", Some(CpuRequest::Cores(cores))) };
    run_cycles_with(&mut m, &[Command::Assign(assign)]);
    m.bind(7, 8, "1");
    run_cycles(&mut m);
    m.advance(60 * SECOND);
    m
}

/// Runs four cycles, a quarter of a second apart.
fn run_cycles(m: &mut Machine) {
    run_cycles_with(m, &[]);
}

/// Runs four cycles, of which the first one has these commands.
fn run_cycles_with(m: &mut Machine, commands: &[Command]) {
    for commands in [commands, &[], &[], &[]] {
        let scan = m.state.scan_request(true);
        let _ = m.cycle(&scan, commands);
        m.advance(SECOND / 4);
    }
}

/// Makes the kernel list these PUs as offline.
fn list_offline(m: &Machine, offline: &str) {
    m.world().online = m.state.topology.cpus().difference(&cpu_set(offline));
}

/// Makes the kernel use all PUs except these. It rewrites no mask yet.
fn stop_using(m: &Machine, pus: &str) {
    let active = m.state.topology.cpus().difference(&cpu_set(pus));
    m.world().set_active_pus(&active);
}

/// Makes the kernel rewrite the masks of both threads.
fn rewrite_masks_after_hotplug(m: &Machine) {
    m.world().rewrite_masks_after_hotplug();
    m.world().rewrite_cgroup_masks(JOB_CPUSET, None);
}

/// The masks of both threads.
fn masks(m: &Machine) -> [String; 2] {
    [m.effective_mask(7, 7), m.effective_mask(7, 8)]
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_when_the_pu_is_listed_offline() {
    let mut m = bound_in_job_cpuset();
    list_offline(&m, "3");
    stop_using(&m, "3");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_after_the_pu_is_listed_offline() {
    let mut m = bound_in_job_cpuset();
    m.assign("rest", 4, &[]).unwrap();
    list_offline(&m, "3");
    stop_using(&m, "3");
    run_cycles(&mut m);
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2".into(), ["0-2".into(), "1".into()]));
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_before_the_pu_is_listed_offline() {
    let mut m = bound_in_job_cpuset();
    stop_using(&m, "3");
    // `cpuset.effective_cpus` is not updated yet.
    m.world().rewrite_cgroup_masks(JOB_CPUSET, None);
    run_cycles(&mut m);
    list_offline(&m, "3");
    run_cycles(&mut m);
    assert_eq!((m.grant("a"), masks(&m)), ("0-2,4".into(), ["0-2,4".into(), "1".into()]));
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_before_the_last_of_several_pus_is_listed_offline() {
    let mut m = bound_in_job_cpuset();
    list_offline(&m, "3");
    stop_using(&m, "2-3");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    list_offline(&m, "2-3");
    run_cycles(&mut m);
    assert_eq!((m.grant("a"), masks(&m)), ("0-1,4-5".into(), ["0-1,4-5".into(), "1".into()]));
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_before_the_last_of_several_pus_is_listed_online() {
    let mut m = bound_in_job_cpuset();
    m.assign("rest", 4, &[]).unwrap();
    list_offline(&m, "2-3");
    stop_using(&m, "2-3");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    list_offline(&m, "3");
    m.advance(60 * SECOND);
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    list_offline(&m, "");
    stop_using(&m, "");
    run_cycles(&mut m);
    assert_eq!(masks(&m), ["0-1", "1"]);
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_after_the_second_pu_of_a_core_is_listed_online() {
    let mut m = bound_in_job_cpuset_on(regular_topology(1, 1, 1, 4, 2), 2);
    assert_eq!(m.grant("a"), "0-1,4-5");
    list_offline(&m, "4");
    stop_using(&m, "4");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    m.advance(60 * SECOND);
    list_offline(&m, "");
    run_cycles(&mut m);
    stop_using(&m, "");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    assert_eq!(masks(&m), ["0-1,4-5", "1"]);
}

#[test]
fn a_binding_is_restored_if_the_kernel_resets_masks_a_minute_after_the_pu_is_listed_offline() {
    let mut m = bound_in_job_cpuset();
    m.assign("rest", 4, &[]).unwrap();
    list_offline(&m, "3");
    stop_using(&m, "3");
    run_cycles(&mut m);
    m.advance(60 * SECOND);
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    assert_eq!(masks(&m), ["0-2", "1"]);
}

#[test]
fn a_binding_that_a_thread_requested_shortly_before_hotplug_is_restored() {
    let mut m = bound_in_job_cpuset();
    m.bind(7, 8, "0,2");
    run_cycles(&mut m);
    list_offline(&m, "3");
    stop_using(&m, "3");
    rewrite_masks_after_hotplug(&m);
    run_cycles(&mut m);
    assert_eq!(masks(&m)[1], "0,2");
}

/// A machine with cpusets, on which a job waits if there are not enough free cores.
fn machine_where_jobs_wait() -> Machine {
    let mut m = machine_with_cpusets(false);
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m
}

/// Process 9 has bound itself to PU 1 and is in the cpuset of job a. It was assigned to job b, which waits for cores.
/// It stays in the cpuset, because the cgroup from which it came is unknown. Its mask is restored, and not in the
/// journal.
fn waiting_in_the_cpuset_of_another_job() -> Machine {
    let mut m = machine_where_jobs_wait();
    m.spawn(7, 1, 0).cgroup = JOB_CPUSET.into();
    m.spawn(9, 7, 0);
    m.assign("a", 4, &[7]).unwrap();
    m.bind(9, 9, "1");
    m.settle();
    // Job b waits also after the end of job a.
    m.assign("rest", 1, &[]).unwrap();
    m.assign("b", 8, &[9]).unwrap();
    m.settle();
    assert_eq!((m.member(9), m.effective_mask(9, 9)), ("manual:b by Registered".into(), "1".into()));
    assert_eq!(m.process(9).cgroup, JOB_CPUSET);
    assert!(m.warnings().contains(&"not-moved-back"), "{:?}", m.warnings());
    assert!(m.journaled_threads().iter().all(|thread| thread.tid != Tid(9)));
    m
}

/// Runs one cycle in which job a gets one core instead of four.
fn shrink(m: &mut Machine) -> Decision {
    let commands = [Command::Assign(assign_of("a", Some(CpuRequest::Cores(1))))];
    let scan = command_scan_request(&mut m.state, &commands);
    m.cycle(&scan, &commands)
}

#[test]
fn after_a_change_of_a_cpuset_the_processes_of_other_jobs_inside_are_scanned() {
    let mut m = waiting_in_the_cpuset_of_another_job();
    let scan = shrink(&mut m).next_scan.unwrap();
    assert!(scan.pids_to_read_threads_of.contains(&Pid(9)), "{scan:?}");
}

#[test]
fn a_process_of_another_job_in_a_changed_cpuset_gets_its_mask_back_after_a_restart() {
    let mut m = waiting_in_the_cpuset_of_another_job();
    let _ = shrink(&mut m);
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    m.release("b").unwrap();
    assert_eq!([m.effective_mask(7, 7), m.effective_mask(9, 9)], ["0-7", "1"]);
}

#[test]
fn a_mask_that_was_requested_shortly_before_the_move_into_a_cpuset_is_restored_by_a_release() {
    let mut m = machine_where_jobs_wait();
    m.spawn(7, 1, 0);
    m.spawn(9, 7, 0);
    m.bind(9, 9, "1");
    m.assign("a", 4, &[7]).unwrap();
    m.assign("b", 8, &[9]).unwrap();
    m.release("a").unwrap();
    m.release("b").unwrap();
    m.policy.enforcement = EnforcementMethod::Affinity;
    m.assign("a", 8, &[]).unwrap();
    m.assign("b", 4, &[9]).unwrap();
    assert_eq!((m.grant("b"), m.effective_mask(9, 9)), ("-".into(), "1".into()));
    m.advance(60 * SECOND);
    m.bind(9, 9, "0-7");
    m.settle();
    m.advance(SECOND);
    m.policy.enforcement = EnforcementMethod::Auto;
    m.release("a").unwrap();
    m.settle();
    assert!(m.process(9).cgroup.starts_with("/pjw/"));
    m.release("b").unwrap();
    assert_eq!(m.effective_mask(9, 9), "0-7", "the program requested this mask before the move");
}

#[test]
fn a_thread_that_was_created_before_the_kernel_reset_the_mask_of_its_creator_gets_that_mask_by_a_release() {
    let mut m = bound_in_job_cpuset();
    m.bind(7, 7, "1");
    run_cycles(&mut m);
    let snapshot = m.scan();
    m.clone_thread(7, 9);
    m.advance(SECOND);
    let resize = Command::Assign(assign_of("a", Some(CpuRequest::Cores(3))));
    let decision = m.decide(&snapshot, &[resize]);
    let actions = &decision.plan.cpuset_actions;
    let outcomes = m.node.change_cpusets(actions, Duration::MAX);
    for (action, outcome) in actions.iter().zip(&outcomes) {
        m.state.cpusets.record_outcome(action, outcome);
    }
    m.settle();
    m.release("a").unwrap();
    assert_eq!([7, 8, 9].map(|tid| m.effective_mask(7, tid)), ["1", "1", "1"]);
}
