//! Masks that an earlier daemon may have set and that no record explains. The warning `unknown-masks` names the
//! processes until their masks are widened. They stay in the journal.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::cpuset::CpuSet;
use pjw_core::devices::{Device, DeviceClass, MachineDetails};
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::{CpuRequest, JobSource};
use pjw_core::record::{Record, UnknownMaskRecord};
use pjw_core::scan::ScanScope;
use pjw_core::snapshot::ProcessEvent;
use pjw_core::state::WardenState;
use pjw_core::time::Nanos;

use crate::machine::{Machine, ROOT, assign_of, cpu_set, in_cgroup, job, machine, machine_with_cpusets};

/// The user of the processes.
const USER: u32 = 1001;

/// The pids in the warnings `unknown-masks`.
fn named_pids(machine: &Machine) -> Vec<u32> {
    let warnings = machine.last.as_ref().unwrap().warnings.iter();
    let texts = warnings.filter(|warning| warning.code == "unknown-masks");
    texts
        .flat_map(|warning| warning.text.rsplit(": ").next().unwrap().split(", "))
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// Process 7 has the mask 0-1 that a daemon without cpusets set, and all records are lost.
fn machine_with_lost_mask() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, USER);
    machine.assign("a", 2, &[7]).unwrap();
    assert_eq!(machine.effective_mask(7, 7), "0-1");
    machine.lose_state();
    machine.state.unknown_masks.request_search();
    machine
}

/// The same, after a scan: the daemon names process 7.
fn machine_with_named_process() -> Machine {
    let mut machine = machine_with_lost_mask();
    machine.settle();
    assert_eq!(named_pids(&machine), [7]);
    machine
}

/// Replaces the daemon by another one with its journal.
fn restart(machine: &mut Machine) {
    let records = machine.state.records();
    machine.lose_state();
    records.into_iter().for_each(|record| machine.state.apply_record(record));
}

/// Lets the daemon get all fork events from now on.
fn with_fork_events(machine: &mut Machine) {
    machine.state.fork_events_complete_since = Some(Nanos(machine.now()));
    machine.advance(1_000_000_000);
}

/// Forks a process, and lets the daemon read the event.
fn fork(machine: &mut Machine, parent: u32, child: u32) {
    machine.spawn(child, parent, USER);
    let at = Nanos(machine.now());
    let event = ProcessEvent::Fork { parent: Pid(parent), creator: Tid(parent), child: Pid(child), at };
    machine.state.apply_process_events(&[event]);
}

/// Ends a process, and lets the daemon read the event.
fn end(machine: &mut Machine, pid: u32) {
    machine.exit(pid);
    machine.state.apply_process_events(&[ProcessEvent::Exit { pid: Pid(pid) }]);
}

#[test]
fn every_later_daemon_names_the_same_processes_until_their_masks_are_widened() {
    let mut machine = machine_with_named_process();
    for _ in 0..2 {
        restart(&mut machine);
        machine.settle();
        assert_eq!(named_pids(&machine), [7]);
    }
    machine.settle_with(&[Command::ReleaseAll { caller: ROOT }]);
    assert_eq!(named_pids(&machine), [7], "a release of all jobs leaves the mask");
    machine.bind(7, 7, "0-7");
    machine.settle();
    assert_eq!(named_pids(&machine), [0; 0]);
    assert!(machine.state.records().iter().all(|record| !matches!(record, Record::UnknownMasks(_))));
    machine.bind(7, 7, "0-1");
    restart(&mut machine);
    machine.settle();
    assert_eq!(named_pids(&machine), [0; 0], "the program chose this mask");
}

#[test]
fn a_daemon_that_is_killed_before_its_first_scan_leaves_the_search_to_the_next_one() {
    let mut machine = machine_with_lost_mask();
    restart(&mut machine);
    machine.settle();
    assert_eq!(named_pids(&machine), [7]);
}

#[test]
fn a_program_that_binds_itself_after_the_search_is_not_named_also_after_a_restart() {
    let mut machine = machine_with_named_process();
    machine.spawn(9, 1, USER);
    machine.bind(9, 9, "3");
    machine.settle();
    restart(&mut machine);
    machine.settle();
    assert_eq!(named_pids(&machine), [7]);
}

#[test]
fn a_child_that_inherits_a_named_mask_is_named() {
    let mut machine = machine_with_named_process();
    machine.spawn(8, 7, USER);
    machine.spawn(9, 8, USER);
    machine.spawn(10, 7, USER);
    machine.bind(10, 10, "0");
    machine.settle();
    assert_eq!(named_pids(&machine), [7, 8, 9], "process 10 chose its mask");
    machine.exit(7);
    machine.settle();
    assert_eq!(named_pids(&machine), [8, 9]);
}

#[test]
fn an_orphan_of_a_named_process_is_named_by_its_fork_events() {
    let mut machine = machine_with_named_process();
    with_fork_events(&mut machine);
    machine.settle();
    fork(&mut machine, 7, 8);
    fork(&mut machine, 8, 9);
    fork(&mut machine, 8, 10);
    fork(&mut machine, 1, 11);
    end(&mut machine, 8);
    machine.bind(10, 10, "1");
    machine.bind(11, 11, "0-1");
    machine.settle();
    assert_eq!(
        named_pids(&machine),
        [7, 9],
        "process 10 chose another mask, and process 11 has another parent"
    );
    end(&mut machine, 7);
    fork(&mut machine, 9, 12);
    end(&mut machine, 9);
    machine.settle();
    assert_eq!(named_pids(&machine), [12]);
}

#[test]
fn an_orphan_without_fork_events_is_named_if_it_has_a_named_mask_of_its_user() {
    let mut machine = machine_with_named_process();
    for (pid, user, mask) in [(8, USER, "0-1"), (9, USER, "0-2"), (10, USER + 1, "0-1")] {
        machine.spawn(pid, 1, user);
        machine.bind(pid, pid, mask);
    }
    machine.settle();
    assert_eq!(named_pids(&machine), [7, 8]);
}

#[test]
fn a_process_that_is_born_during_the_search_is_named() {
    let mut machine = machine_with_lost_mask();
    with_fork_events(&mut machine);
    let first = machine.state.scan_request(true);
    let first = machine.cycle(&first, &[]);
    fork(&mut machine, 7, 8);
    fork(&mut machine, 8, 9);
    end(&mut machine, 8);
    let born = machine.scan_only(&[9]);
    let _ = machine.decide(&born, &[]);
    let born = machine.scan_only(&[9]);
    let _ = machine.decide(&born, &[]);
    let _ = machine.cycle(&first.next_scan.unwrap(), &[]);
    machine.settle();
    assert_eq!(named_pids(&machine), [7, 9]);
}

#[test]
fn a_search_whose_next_scan_is_not_made_is_completed_by_the_next_full_scan() {
    let mut machine = machine_with_lost_mask();
    machine.spawn(20, 1, USER).cgroup = "/containers/one".into();
    machine.world().write_cpuset("/containers/one", Some(&"4-5".parse::<CpuSet>().unwrap()));
    for _ in 0..2 {
        let scan = machine.state.periodic_scan_request();
        assert_eq!(scan.scope, ScanScope::Full);
        machine.last = Some(machine.cycle(&scan, &[]));
    }
    assert_eq!(
        named_pids(&machine),
        [7],
        "as in the mode observe, where a cycle with planned changes has one scan; the process of a container is not named"
    );
}

#[test]
fn a_process_that_gets_cores_again_is_named_after_the_release() {
    let mut machine = machine_with_named_process();
    machine.assign("b", 3, &[7]).unwrap();
    machine.settle();
    restart(&mut machine);
    machine.settle();
    machine.release("b").unwrap();
    machine.settle();
    assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0-1", vec![7]));
    machine.assign("b", 3, &[7]).unwrap();
    machine.bind(7, 7, "0-7");
    machine.settle();
    machine.release("b").unwrap();
    machine.settle();
    assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0-7", vec![]));
}

#[test]
fn the_masks_of_a_job_that_is_found_again_at_once_are_named_after_its_release() {
    let mut machine = machine();
    in_cgroup(machine.spawn(7, 1, USER), "slurm:5", "/slurm/job_5", Some(CpuRequest::Cores(2)));
    machine.settle();
    assert_eq!(machine.effective_mask(7, 7), "0-1");
    machine.lose_state();
    machine.state.unknown_masks.request_search();
    machine.settle();
    assert_eq!(machine.member(7), "slurm:5 by Cgroup");
    machine.settle_with(&[Command::ReleaseAll { caller: ROOT }]);
    machine.policy.sources.remove(&JobSource::Slurm);
    machine.settle();
    assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0-1", vec![7]));
}

#[test]
fn a_task_that_a_scheduler_binds_inside_its_cpuset_is_not_named() {
    let mut machine = machine();
    for pid in [7, 8] {
        in_cgroup(machine.spawn(pid, 1, USER), "slurm:5", "/slurm/job_5", None);
    }
    machine.world().write_cpuset("/slurm/job_5", Some(&"2-3".parse::<CpuSet>().unwrap()));
    machine.bind(8, 8, "2");
    machine.state.unknown_masks.request_search();
    machine.settle();
    assert_eq!(named_pids(&machine), [0; 0]);
}

#[test]
fn a_container_with_cpus_of_its_own_is_not_named() {
    let mut machine = machine();
    machine.spawn(7, 1, USER).cgroup = "/containers/one".into();
    machine.spawn(8, 1, USER).cgroup = "/containers/one".into();
    machine.world().write_cpuset("/containers/one", Some(&"4-5".parse::<CpuSet>().unwrap()));
    assert_eq!(machine.effective_mask(7, 7), "4-5");
    machine.bind(8, 8, "4");
    machine.state.unknown_masks.request_search();
    machine.settle();
    assert_eq!(
        named_pids(&machine),
        [8],
        "a mask that is narrower than the cpuset may be that of the earlier daemon"
    );
}

#[test]
fn a_mask_that_the_journal_explains_is_not_named() {
    let mut machine = machine();
    for pid in [7, 8] {
        machine.spawn(pid, 1, USER);
    }
    machine.bind(7, 7, "6");
    machine.bind(8, 8, "0");
    machine.assign("a", 2, &[7, 8]).unwrap();
    let records = machine.state.records();
    machine.lose_state();
    records.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.state.unknown_masks.request_search();
    // Born while no daemon ran.
    machine.spawn(9, 7, USER);
    machine.settle();
    assert_eq!(named_pids(&machine), [0; 0], "the programs had these masks before the job");
}

#[test]
fn a_worker_thread_that_is_bound_is_named_while_the_job_lives_and_until_it_is_widened() {
    let mut machine = machine_with_cpusets(true);
    machine.spawn(7, 1, USER);
    machine.assign("a", 2, &[7]).unwrap();
    machine.clone_thread(7, 70);
    machine.bind(7, 70, "1");
    machine.lose_state();
    machine.settle();
    assert_eq!((machine.member(7).as_str(), named_pids(&machine)), ("manual:a by JobCpuset", vec![7]));
    machine.release("a").unwrap();
    for _ in 0..2 {
        machine.settle();
        assert_eq!((machine.effective_mask(7, 70).as_str(), named_pids(&machine)), ("1", vec![7]));
        restart(&mut machine);
    }
    machine.settle();
    machine.bind(7, 70, "0-7");
    machine.settle();
    assert_eq!(named_pids(&machine), [0; 0]);
}

#[test]
fn a_mask_that_a_cpuset_had_hidden_is_named_after_the_release() {
    for restarts in [false, true] {
        let mut machine = machine_with_cpusets(true);
        for pid in [7, 8, 9] {
            machine.spawn(pid, 1, USER);
        }
        machine.assign("a", 2, &[7, 8]).unwrap();
        // While the daemon made the cpuset, a mask kept process 7 on the same cores.
        machine.bind(7, 7, "0-1");
        machine.lose_state();
        machine.settle();
        assert_eq!((machine.member(7).as_str(), named_pids(&machine)), ("manual:a by JobCpuset", vec![]));
        if restarts {
            restart(&mut machine);
            machine.settle();
        }
        machine.release("a").unwrap();
        machine.settle();
        assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0-1", vec![7]));
        assert_eq!(machine.effective_mask(8, 8), "0-7");
        machine.bind(7, 7, "0-7");
        machine.settle();
        assert_eq!(named_pids(&machine), [0; 0]);
        assert!(machine.state.records().iter().all(|record| !matches!(record, Record::UnknownMasks(_))));
    }
}

#[test]
fn a_mask_that_a_cpuset_had_hidden_is_named_also_if_a_cpu_of_it_is_offline() {
    let mut machine = machine_with_cpusets(true);
    machine.spawn(7, 1, USER);
    machine.assign("a", 2, &[7]).unwrap();
    machine.bind(7, 7, "0-1");
    machine.lose_state();
    machine.settle();
    machine.world().online = cpu_set("0,2-7");
    machine.release("a").unwrap();
    machine.settle();
    assert_eq!(named_pids(&machine), [7]);
}

#[test]
fn a_process_outside_of_all_jobs_that_bound_only_its_workers_is_not_named() {
    let mut machine = machine_with_lost_mask();
    machine.spawn(9, 1, USER);
    machine.clone_thread(9, 90);
    machine.bind(9, 90, "3");
    machine.settle();
    assert_eq!(named_pids(&machine), [7]);
}

#[test]
fn the_cores_of_named_processes_are_granted_last() {
    let mut machine = machine_with_named_process();
    machine.spawn(9, 1, USER);
    machine.assign("b", 2, &[9]).unwrap();
    assert_eq!(machine.grant("b"), "2-3", "process 7 may run on 0-1");
    let reasons = machine.state.jobs[&job("b")].grant.as_ref().unwrap().reasons.join("\n");
    assert!(reasons.contains("CPUs 0-1 would be last"), "{reasons}");
    machine.spawn(10, 1, USER);
    machine.assign("c", 6, &[10]).unwrap();
    assert_eq!(machine.grant("c"), "0-1,4-7", "no other cores are left");
    machine.release("c").unwrap();
    machine.bind(7, 7, "0-7");
    machine.settle();
    machine.assign("c", 2, &[10]).unwrap();
    assert_eq!(machine.grant("c"), "0-1");
}

#[test]
fn the_cores_of_named_processes_are_granted_last_also_in_the_first_cycle_of_a_daemon() {
    let mut machine = machine_with_named_process();
    machine.spawn(9, 1, USER);
    restart(&mut machine);
    machine.assign("b", 2, &[9]).unwrap();
    assert_eq!(machine.grant("b"), "2-3");
}

#[test]
fn the_cores_of_named_processes_are_granted_last_also_near_a_device() {
    let card = Device {
        class: DeviceClass::Gpu,
        names: vec!["card0".to_owned()],
        pci_address: String::new(),
        model: String::new(),
        local_cpus: cpu_set("0-1"),
        numa_nodes: vec![0],
    };
    let details = MachineDetails { devices: vec![card], ..MachineDetails::default() };
    let mut machine = machine_with_named_process();
    let records = machine.state.records();
    machine.state = WardenState::new(machine.state.topology.clone().with_details(details), &CpuSet::new());
    records.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.settle();
    for (id, cores, cpus) in [("a", 2, "2-3"), ("b", 5, "0,4-7")] {
        let request = assign_of(id, Some(CpuRequest::Cores(cores)));
        let near_device = Some("card0".to_owned());
        machine.command(Command::Assign(AssignCommand { near_device, ..request })).unwrap();
        assert_eq!(machine.grant(id), cpus, "process 7 may run on 0-1");
    }
}

#[test]
fn a_daemon_that_is_killed_within_the_search_leaves_the_search_to_the_next_one() {
    for is_rewritten in [false, true] {
        let mut machine = machine();
        in_cgroup(machine.spawn(7, 1, USER), "slurm:5", "/slurm/job_5", Some(CpuRequest::Cores(2)));
        machine.settle();
        machine.lose_state();
        let lost = Record::UnknownMasks(UnknownMaskRecord::RecordsLost);
        machine.state.apply_record(lost.clone());
        let first = machine.state.scan_request(true);
        let decision = machine.cycle(&first, &[]);
        assert!(machine.state.unknown_masks.is_search_pending());
        let appended = [vec![lost], decision.records].concat();
        let journal = if is_rewritten { machine.state.records() } else { appended };
        machine.lose_state();
        journal.into_iter().for_each(|record| machine.state.apply_record(record));
        machine.settle();
        machine.settle_with(&[Command::ReleaseAll { caller: ROOT }]);
        machine.policy.sources.remove(&JobSource::Slurm);
        machine.settle();
        assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0-1", vec![7]));
    }
}

#[test]
fn a_search_for_a_cpuset_without_a_record_is_in_the_journal() {
    let mut machine = machine_with_cpusets(true);
    machine.spawn(7, 1, USER);
    machine.assign("a", 2, &[7]).unwrap();
    machine.clone_thread(7, 70);
    machine.bind(7, 70, "1");
    machine.lose_state();
    let first = machine.state.scan_request(true);
    let journal = machine.cycle(&first, &[]).records;
    assert!(machine.state.unknown_masks.is_search_pending());
    machine.state = WardenState::new(machine.state.topology.clone(), &CpuSet::new());
    journal.into_iter().for_each(|record| machine.state.apply_record(record));
    machine.find_cpusets();
    machine.settle();
    assert_eq!((machine.member(7).as_str(), named_pids(&machine)), ("manual:a by JobCpuset", vec![7]));
}

#[test]
fn a_process_stays_named_while_a_cpu_of_its_mask_is_offline() {
    let mut machine = machine_with_named_process();
    machine.switch_off("1");
    machine.settle();
    assert_eq!((machine.effective_mask(7, 7).as_str(), named_pids(&machine)), ("0", vec![7]));
    machine.spawn(8, 7, USER);
    machine.settle();
    machine.switch_off("");
    machine.settle();
    assert_eq!(machine.effective_mask(8, 8), "0-1");
    assert_eq!(named_pids(&machine), [7, 8]);
    machine.bind(7, 7, "0");
    machine.settle();
    assert_eq!(named_pids(&machine), [8]);
}

#[test]
fn a_process_that_is_born_during_the_search_is_named_by_its_parent_after_lost_events() {
    let mut machine = machine_with_lost_mask();
    with_fork_events(&mut machine);
    let first = machine.state.scan_request(true);
    let first = machine.cycle(&first, &[]);
    machine.advance(1_000_000_000);
    fork(&mut machine, 7, 8);
    fork(&mut machine, 8, 9);
    machine.state.forget_fork_records();
    for _ in 0..2 {
        let born = machine.scan_only(&[8, 9]);
        let _ = machine.decide(&born, &[]);
    }
    let _ = machine.cycle(&first.next_scan.unwrap(), &[]);
    machine.settle();
    assert_eq!(named_pids(&machine), [7, 8, 9]);
}
