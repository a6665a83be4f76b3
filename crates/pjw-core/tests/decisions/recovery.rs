//! Recovery after the state directory was lost: the daemon finds the cpusets of the earlier daemon by their names. It
//! makes jobs of those with processes again, and removes the others.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::cpuset_group::{CpusetHierarchy, LeftoverCpuset};
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, Uid};
use pjw_core::job::{CpuRequest, EndCondition, GrantedBy, PriorityClass};
use pjw_core::plan::Warning;
use pjw_core::policy::{DaemonMode, Policy};
use pjw_core::ports::MachineInterface;
use pjw_core::state::WardenState;
use pjw_core::testing::regular_topology;

use super::machine::{Machine, assign_of, cpu_set, in_cgroup, job, machine_with, policy_with_cpusets};

const LOGIN: &str = "/session-1.scope";

fn machine(hierarchy: CpusetHierarchy) -> Machine {
    machine_with(regular_topology(2, 1, 1, 4, 1), policy_with_cpusets(hierarchy, true))
}

/// A machine with v1 cpusets. Process 7 of user 1001 was moved from the cgroup of a login into the cpuset of job a, and
/// has a child 8 there.
fn with_job_a() -> Machine {
    let mut machine = machine(CpusetHierarchy::Legacy);
    machine.spawn(7, 1, 1001).cgroup = LOGIN.into();
    machine.assign("a", 2, &[7]).unwrap();
    machine.spawn(8, 7, 1001);
    machine.settle();
    machine
}

fn cgroup(machine: &Machine, pid: u32) -> String {
    machine.process(pid).cgroup.clone()
}

/// The warnings about recovered jobs and unknown masks.
fn recovery_warnings(machine: &Machine) -> Vec<Warning> {
    let warnings = machine.last.as_ref().unwrap().warnings.iter();
    let of_recovery = warnings.filter(|warning| ["recovered", "unknown-masks"].contains(&warning.code));
    of_recovery.map(|warning| Warning::clone(warning)).collect()
}

#[test]
fn a_job_whose_record_was_lost_keeps_its_cores_and_its_processes() {
    for hierarchy in [CpusetHierarchy::Legacy, CpusetHierarchy::Unified, CpusetHierarchy::Systemd] {
        let mut machine = machine(hierarchy);
        machine.spawn(7, 1, 1001).cgroup = LOGIN.into();
        machine.assign("a", 2, &[7]).unwrap();
        machine.spawn(8, 7, 1001);
        machine.settle();
        let before = (machine.grant("a"), cgroup(&machine, 7), machine.effective_mask(8, 8));
        machine.lose_state();
        machine.exit(7);
        let before = (before.0, before.1, before.2);
        machine.settle();
        assert_eq!((machine.grant("a"), cgroup(&machine, 8), machine.effective_mask(8, 8)), before);
        assert_eq!(machine.member(8), "manual:a by JobCpuset");
        let adopted = machine.state.jobs[&job("a")].clone();
        assert_eq!((adopted.owner, adopted.end_condition), (Uid(1001), EndCondition::LastProcessExit));
        let request = adopted.request.unwrap();
        assert_eq!((request.cpu_request, request.class), (CpuRequest::Cores(2), PriorityClass::Normal));
        let events: Vec<EventKind> = machine.events.iter().map(|event| event.kind).collect();
        assert_eq!(events, [EventKind::Recovered]);
        assert_eq!(machine.events[0].job, Some(job("a")));

        machine.spawn(9, 1, 1001);
        machine.assign("b", 6, &[9]).unwrap();
        assert_eq!(machine.grant("b"), "2-7", "no core has two holders");
        machine.release("a").unwrap();
        assert_eq!((cgroup(&machine, 8).as_str(), machine.effective_mask(8, 8).as_str()), (LOGIN, "0-7"));
        assert!(!machine.world().cpusets.contains_key(&before.1));
    }
}

const SLURM_JOB: &str = "/slurmstepd.scope/job_4";

/// A machine on which pjw wrote the cpuset of a Slurm job, and the state was lost. The job has process 10 and two
/// cores. Process 20 is in no job.
fn with_lost_slurm_job() -> Machine {
    let mut machine = machine(CpusetHierarchy::Systemd);
    machine.spawn(20, 1, 1001);
    machine.assign("first", 2, &[20]).unwrap();
    in_cgroup(machine.spawn(10, 1, 1001), "slurm:4", SLURM_JOB, Some(CpuRequest::Pus(2)));
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB], cpu_set("2-3"));
    machine.release("first").unwrap();
    machine.lose_state();
    machine
}

#[test]
fn a_cpuset_that_pjw_wrote_for_a_batch_system_is_no_grant_of_the_batch_system_after_a_loss() {
    let mut machine = with_lost_slurm_job();
    machine.settle();
    assert_eq!(machine.grant("slurm:4"), "2-3", "the job keeps its cores");
    let grant = machine.state.jobs[&job("slurm:4")].grant.clone().unwrap();
    assert_eq!(grant.granted_by, GrantedBy::Warden);
    machine.command(Command::Assign(assign_of("slurm:4", Some(CpuRequest::Cores(4))))).unwrap();
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB].len(), 4, "it can be resized");
    machine.release("slurm:4").unwrap();
    machine.settle();
    assert!(!machine.world().cpusets.contains_key(SLURM_JOB));
    assert_eq!(machine.effective_mask(10, 10), "0-7");
}

#[test]
fn a_lost_cpuset_for_a_batch_system_whose_jobs_are_not_looked_for_is_undone() {
    let mut machine = with_lost_slurm_job();
    machine.process(10).batch_identity = None;
    machine.settle();
    assert!(!machine.world().cpusets.contains_key(SLURM_JOB));
    assert_eq!(machine.effective_mask(10, 10), "0-7");
}

#[test]
fn a_cpuset_that_the_batch_system_wrote_after_pjw_is_its_grant_after_a_loss() {
    let mut machine = with_lost_slurm_job();
    machine.world().write_cpuset(SLURM_JOB, Some(&cpu_set("4-5")));
    machine.settle();
    let grant = machine.state.jobs[&job("slurm:4")].grant.clone().unwrap();
    assert_eq!((grant.cpus, grant.granted_by), (cpu_set("4-5"), GrantedBy::Scheduler));
}

#[test]
fn a_daemon_that_only_observes_takes_no_cpuset_of_pjw_for_a_grant_of_the_batch_system() {
    let mut machine = with_lost_slurm_job();
    for mode in [DaemonMode::Observe, DaemonMode::Enforce] {
        machine.policy.mode = mode;
        machine.settle();
        let grant = machine.state.jobs[&job("slurm:4")].grant.clone().unwrap();
        assert_eq!((grant.cpus, grant.granted_by), (cpu_set("2-3"), GrantedBy::Warden));
    }
    machine.release("slurm:4").unwrap();
    machine.settle();
    assert!(!machine.world().cpusets.contains_key(SLURM_JOB));
}

#[test]
fn a_job_of_a_batch_system_that_is_found_again_gets_the_number_of_cores_that_it_requests_now() {
    for (requested, count, is_part) in [(1, 1, true), (2, 2, true), (3, 3, false)] {
        let mut machine = with_lost_slurm_job();
        in_cgroup(machine.process(10), "slurm:4", SLURM_JOB, Some(CpuRequest::Pus(requested)));
        machine.settle();
        let cpus = machine.world().cpusets[SLURM_JOB].clone();
        assert_eq!((cpus.len(), cpus.is_subset(&cpu_set("2-3"))), (count, is_part));
    }
}

#[test]
fn a_job_of_a_batch_system_that_is_found_again_shares_no_core_if_that_is_switched_off() {
    let policy = Policy { share_smt: true, ..policy_with_cpusets(CpusetHierarchy::Systemd, true) };
    let mut machine = machine_with(regular_topology(1, 1, 1, 4, 2), policy);
    in_cgroup(machine.spawn(10, 1, 1001), "slurm:4", SLURM_JOB, Some(CpuRequest::Pus(1)));
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB].len(), 1);
    machine.policy.share_smt = false;
    machine.lose_state();
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB].len(), 2, "a whole core");
}

/// Like [`with_lost_slurm_job`], but another daemon wrote the cpuset of the job.
fn with_slurm_job_of_other_daemon() -> Machine {
    let mut machine = with_lost_slurm_job();
    machine.state = WardenState::new(machine.state.topology.clone(), &cpu_set(""));
    for leftover in machine.node.list_job_cpusets(&machine.policy.own_cgroups) {
        let other_writer = Some("pjw_8cf11471b8d8b200".to_owned());
        machine.state.add_leftover_cpuset(LeftoverCpuset { other_writer, ..leftover });
    }
    machine
}

#[test]
fn a_cpuset_that_another_daemon_wrote_for_a_batch_system_is_left_as_it_is_until_an_assignment() {
    let mut machine = with_slurm_job_of_other_daemon();
    for _ in 0..2 {
        machine.settle();
        assert_eq!(machine.grant("slurm:4"), "-");
        assert_eq!(machine.world().cpusets[SLURM_JOB], cpu_set("2-3"));
        let warnings = &machine.last.as_ref().unwrap().warnings;
        let unserved = warnings.iter().find(|warning| warning.code == "unserved").unwrap();
        assert!(unserved.text.contains("another pjwd, pjw_8cf11471b8d8b200, wrote"), "{unserved:?}");
    }
    assert!(!machine.state.unknown_masks.is_search_pending(), "no record of this daemon was lost");
    machine.command(Command::Assign(assign_of("slurm:4", Some(CpuRequest::Cores(4))))).unwrap();
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB].len(), 4);
    assert_eq!(machine.state.jobs[&job("slurm:4")].grant.clone().unwrap().granted_by, GrantedBy::Warden);
}

#[test]
fn a_job_gets_cores_as_soon_as_the_other_daemon_has_widened_its_cpuset() {
    let mut machine = with_slurm_job_of_other_daemon();
    machine.settle();
    machine.world().write_cpuset(SLURM_JOB, None);
    machine.settle();
    assert_eq!(machine.world().cpusets[SLURM_JOB].len(), 2);
    assert_eq!(machine.state.jobs[&job("slurm:4")].grant.clone().unwrap().granted_by, GrantedBy::Warden);
}

#[test]
fn a_daemon_that_only_observes_forgets_a_cpuset_that_another_daemon_has_widened() {
    let mut machine = with_slurm_job_of_other_daemon();
    machine.policy.mode = DaemonMode::Observe;
    machine.settle();
    assert_eq!(machine.grant("slurm:4"), "-");
    machine.world().write_cpuset(SLURM_JOB, None);
    machine.settle();
    machine.world().write_cpuset(SLURM_JOB, Some(&cpu_set("2-3")));
    machine.settle();
    let grant = machine.state.jobs[&job("slurm:4")].grant.clone().unwrap();
    assert_eq!((grant.cpus, grant.granted_by), (cpu_set("2-3"), GrantedBy::Scheduler));
}

#[test]
fn a_recovered_job_is_shown_until_it_is_assigned_again() {
    let mut machine = with_job_a();
    machine.lose_state();
    machine.settle();
    let warnings = recovery_warnings(&machine);
    assert!(warnings[0].text.contains("manual:a was found in /pjw/a"), "{warnings:?}");
    assert_eq!((warnings.len(), warnings[0].job.clone()), (1, Some(job("a"))));
    machine.settle();
    assert_eq!(recovery_warnings(&machine), warnings);
    machine.assign("a", 3, &[]).unwrap();
    assert_eq!(recovery_warnings(&machine), []);
}

#[test]
fn a_process_whose_original_cgroup_is_unknown_returns_to_the_root_cgroup() {
    let mut machine = with_job_a();
    machine.world().cgroup_origins.clear();
    machine.world().cgroup_owners.clear();
    machine.lose_state();
    machine.settle();
    assert_eq!(machine.state.jobs[&job("a")].owner, Uid(1001), "the user of its first process");
    machine.release("a").unwrap();
    assert_eq!((cgroup(&machine, 7).as_str(), cgroup(&machine, 8).as_str()), ("/", "/"));
}

#[test]
fn a_cpuset_without_processes_is_removed() {
    let mut machine = machine(CpusetHierarchy::Unified);
    machine.spawn(7, 1, 1001);
    machine.assign("a", 2, &[7]).unwrap();
    machine.lose_state();
    machine.exit(7);
    assert!(machine.world().cpusets.contains_key("/pjw/a"));
    machine.settle();
    assert!(machine.world().cpusets.is_empty() && machine.state.jobs.keys().next().is_none());
    assert_eq!(recovery_warnings(&machine), []);
}

#[test]
fn of_two_cpusets_with_the_same_cores_the_later_one_is_removed_with_a_warning() {
    let mut machine = with_job_a();
    machine.spawn(9, 1, 1002);
    machine.assign("b", 2, &[9]).unwrap();
    machine.world().write_cpuset("/pjw/b", Some(&cpu_set("1-2")));
    machine.lose_state();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), machine.grant("b").as_str()), ("0-1", "-"));
    assert_eq!((cgroup(&machine, 9).as_str(), machine.effective_mask(9, 9).as_str()), ("/", "0-7"));
    assert!(!machine.world().cpusets.contains_key("/pjw/b"));
    let warnings = recovery_warnings(&machine);
    let about_b = warnings.iter().find(|warning| warning.job == Some(job("b"))).unwrap();
    assert!(about_b.text.contains("/pjw/b has CPUs 1-2, and manual:a holds some of them"), "{about_b:?}");
    assert!(about_b.text.ends_with("Its processes: 9") && about_b.remedy.contains("pjwctl assign manual:b"));
    machine.exit(9);
    machine.settle();
    assert_eq!(recovery_warnings(&machine).len(), 1, "the warning ends with the processes");
}

#[test]
fn a_cpuset_with_a_core_of_a_recorded_job_is_removed() {
    let mut machine = with_job_a();
    let records = machine.state.records();
    machine.lose_state();
    machine.spawn(9, 1, 1002).cgroup = "/pjw/b".into();
    machine.world().write_cpuset("/pjw/b", Some(&cpu_set("0")));
    records.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.find_cpusets();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), machine.grant("b").as_str()), ("0-1", "-"));
    assert_eq!((cgroup(&machine, 7).as_str(), cgroup(&machine, 9).as_str()), ("/pjw/a", "/"));
}

#[test]
fn a_cpuset_with_cores_that_do_not_exist_is_removed() {
    let mut machine = with_job_a();
    machine.lose_state();
    machine.state = WardenState::new(regular_topology(1, 1, 1, 1, 1), &cpu_set(""));
    machine.find_cpusets();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), cgroup(&machine, 7).as_str()), ("-", LOGIN));
    assert!(recovery_warnings(&machine)[0].text.contains("CPU 1, which this machine does not have"));
}

#[test]
fn a_cpuset_that_the_earlier_daemon_had_widened_is_removed() {
    let mut machine = with_job_a();
    machine.world().write_cpuset("/pjw/a", Some(&cpu_set("0-7")));
    machine.world().cgroup_owners.clear();
    machine.lose_state();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), cgroup(&machine, 8).as_str()), ("-", LOGIN));
}

#[test]
fn a_job_with_every_core_is_recovered() {
    let mut machine = machine(CpusetHierarchy::Legacy);
    machine.spawn(7, 1, 1001);
    machine.assign("a", 8, &[7]).unwrap();
    machine.lose_state();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), machine.member(7).as_str()), ("0-7", "manual:a by JobCpuset"));
}

#[test]
fn a_cgroup_that_is_not_that_of_a_job_is_not_changed() {
    let mut machine = machine(CpusetHierarchy::Legacy);
    machine.spawn(7, 1, 0).cgroup = "/pjw/probe-12".into();
    machine.world().write_cpuset("/pjw/probe-12", Some(&cpu_set("0")));
    machine.lose_state();
    machine.settle();
    assert_eq!((cgroup(&machine, 7).as_str(), machine.effective_mask(7, 7).as_str()), ("/pjw/probe-12", "0"));
    assert!(machine.events.is_empty());
}

#[test]
fn a_cpuset_with_a_record_is_not_recovered() {
    let mut machine = with_job_a();
    let records = machine.state.records();
    let before = machine.state.jobs[&job("a")].clone();
    machine.lose_state();
    records.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.settle();
    assert!(machine.events.is_empty() && recovery_warnings(&machine).is_empty());
    assert_eq!(machine.state.jobs[&job("a")], before);
}

#[test]
fn masks_that_the_earlier_daemon_may_have_set_are_named_with_the_command_that_widens_them() {
    let mut machine = with_job_a();
    machine.bind(8, 8, "1");
    machine.lose_state();
    machine.settle();
    let warnings = recovery_warnings(&machine);
    let masks = warnings.iter().find(|warning| warning.code == "unknown-masks").unwrap();
    assert!(masks.text.ends_with(": 8") && masks.remedy.starts_with("taskset -pac 0-7 8 "), "{masks:?}");
    assert_eq!(machine.effective_mask(8, 8), "1");
    machine.exit(8);
    machine.settle();
    assert!(recovery_warnings(&machine).iter().all(|warning| warning.code != "unknown-masks"));
}

#[test]
fn masks_of_a_recovered_job_are_named_after_its_release_until_they_are_widened() {
    let mut machine = with_job_a();
    machine.bind(8, 8, "1");
    machine.lose_state();
    machine.settle();
    machine.release("a").unwrap();
    machine.settle();
    assert_eq!((cgroup(&machine, 8).as_str(), machine.effective_mask(8, 8)), (LOGIN, "1".into()));
    let warnings = recovery_warnings(&machine);
    assert!(warnings.len() == 1 && warnings[0].text.ends_with(": 8"), "{warnings:?}");
    machine.bind(8, 8, "0-7");
    machine.settle();
    assert_eq!(recovery_warnings(&machine), []);
}

#[test]
fn every_mask_of_unknown_origin_is_named_with_one_command_for_all() {
    let mut machine = machine_with(regular_topology(2, 1, 1, 4, 1), Policy::default());
    let pids = 101..=120;
    pids.clone().for_each(|pid| drop(machine.spawn(pid, 1, 1001)));
    machine.assign("a", 2, &pids.clone().collect::<Vec<u32>>()).unwrap();
    machine.lose_state();
    machine.state.unknown_masks.request_search();
    machine.settle();
    let warnings = recovery_warnings(&machine);
    let listed: Vec<String> = pids.map(|pid| pid.to_string()).collect();
    assert!(warnings[0].text.ends_with(&listed.join(", ")), "{warnings:?}");
    let command = format!("for pid in {}; do taskset -pac 0-7 $pid; done ", listed.join(" "));
    assert!(warnings[0].remedy.starts_with(&command), "{warnings:?}");
}

#[test]
fn a_daemon_that_only_observes_leaves_the_cpusets_until_it_enforces() {
    let mut machine = with_job_a();
    machine.policy.mode = DaemonMode::Observe;
    machine.lose_state();
    machine.settle();
    assert_eq!((machine.grant("a").as_str(), cgroup(&machine, 7).as_str()), ("-", "/pjw/a"));
    machine.policy.mode = DaemonMode::Enforce;
    machine.settle();
    assert_eq!(machine.grant("a"), "0-1");
}

#[test]
fn a_job_with_half_a_core_is_recovered_with_half_a_core() {
    let policy = policy_with_cpusets(CpusetHierarchy::Legacy, true);
    let mut machine = machine_with(regular_topology(1, 1, 1, 4, 2), policy);
    machine.spawn(7, 1, 1001);
    machine.policy.share_smt = true;
    machine
        .command(Command::Assign(AssignCommand {
            pids: vec![Pid(7)],
            ..assign_of("a", Some(CpuRequest::Pus(1)))
        }))
        .unwrap();
    let half = machine.grant("a");
    machine.policy.share_smt = false;
    machine.lose_state();
    machine.settle();
    assert_eq!(machine.grant("a"), half);
}

#[test]
fn masks_of_processes_in_no_cpuset_are_named_after_a_lost_record() {
    let mut machine = machine_with(regular_topology(2, 1, 1, 4, 1), Policy::default());
    machine.spawn(7, 1, 1001);
    machine.spawn(8, 1, 1001);
    machine.assign("a", 2, &[7]).unwrap();
    assert_eq!(machine.effective_mask(7, 7), "0-1");
    machine.lose_state();
    machine.settle();
    assert_eq!(
        recovery_warnings(&machine),
        [],
        "without a cpuset, the daemon does not know that a record was lost"
    );
    machine.state.unknown_masks.request_search();
    machine.settle();
    let warnings = recovery_warnings(&machine);
    assert!(warnings[0].text.ends_with(": 7") && warnings[0].remedy.starts_with("taskset -pac 0-7 7 "));
    assert_eq!(warnings.len(), 1);
    machine.bind(7, 7, "0-7");
    machine.settle();
    assert_eq!(recovery_warnings(&machine), [], "the mask was widened");
}

#[test]
fn an_orphan_of_root_with_a_mask_of_its_job_is_named_in_a_warning() {
    let mut machine = machine_with(regular_topology(2, 1, 1, 4, 1), Policy::default());
    machine.spawn(7, 1, 0);
    machine.assign("a", 2, &[7]).unwrap();
    machine.advance(1_000_000_000);
    for (pid, mask) in [(8, "0-1"), (9, "0"), (10, "0-2"), (11, "0-7")] {
        machine.spawn(pid, 1, 0);
        machine.bind(pid, pid, mask);
    }
    machine.settle();
    assert!(recovery_warnings(&machine)[0].text.ends_with(": 8"), "{:?}", recovery_warnings(&machine));
    machine.release("a").unwrap();
    assert!(recovery_warnings(&machine)[0].text.ends_with(": 8"), "it is named after the release too");
}
