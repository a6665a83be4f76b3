//! Commands: the cores that they grant, and their refusals.

use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::cpuset::CpuSet;
use pjw_core::devices::{Device, DeviceClass, MachineDetails};
use pjw_core::ids::{Pid, Uid};
use pjw_core::job::{CpuRequest, EndCondition, PriorityClass};
use pjw_core::plan::Plan;
use pjw_core::policy::{DaemonMode, ExhaustionPolicy};
use pjw_core::refusal::{CpuUnit, Refusal};
use pjw_core::state::WardenState;
use pjw_core::topology::{RegularShape, Topology};

use crate::machine::{ALICE, ROOT, SECOND, assign_of, cpu_set, job, machine, regular_topology};

#[test]
fn a_repeated_request_changes_nothing() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    let first = m.assign("a", 3, &[10]).unwrap();
    let (_, done) = m.settle_with(&[Command::Assign(assign_of("a", Some(CpuRequest::Cores(3))))]);
    assert!(done.is_empty());
    assert_eq!(m.state.jobs[&job("a")], first);
}

#[test]
fn a_refused_request_makes_no_job_and_takes_no_core() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 6, &[10]).unwrap();
    let refusal = m.assign("b", 4, &[]).unwrap_err();
    assert!(matches!(refusal, Refusal::NotEnoughCores { requested: 4, free: 2, .. }), "{refusal:?}");
    assert!(matches!(m.assign("c", 0, &[]).unwrap_err(), Refusal::ZeroCores));
    assert!(matches!(
        m.assign("c", 9, &[]).unwrap_err(),
        Refusal::MoreThanMachine { unit: CpuUnit::Core, requested: 9, usable: 8 }
    ));
    assert!(matches!(m.assign("c", 1, &[10, 99]).unwrap_err(), Refusal::InOtherJob { .. }));
    assert!(matches!(m.assign("c", 1, &[99]).unwrap_err(), Refusal::NoSuchProcess { pid: Pid(99) }));
    assert_eq!(m.state.jobs.len(), 1);
    assert_eq!(m.state.pool.free_cpus().to_string(), "6-7");
}

#[test]
fn a_resize_that_does_not_fit_keeps_the_grant() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    m.assign("a", 4, &[10]).unwrap();
    m.assign("b", 4, &[20]).unwrap();
    assert!(m.assign("a", 5, &[]).is_err());
    assert_eq!((m.grant("a").as_str(), m.effective_mask(10, 10).as_str()), ("0-3", "0-3"));
}

#[test]
fn a_list_of_cpus_is_granted_exactly_or_refused() {
    let mut m = machine();
    m.command(Command::Assign(assign_of("a", Some(CpuRequest::Exactly(cpu_set("1,3,6")))))).unwrap();
    assert_eq!(m.grant("a"), "1,3,6");
    let held =
        m.command(Command::Assign(assign_of("b", Some(CpuRequest::Exactly(cpu_set("3-4")))))).unwrap_err();
    assert_eq!(held, Refusal::HeldByOtherJob { pu: pjw_core::cpuset::Pu(3), holder: job("a") });
    let not_on_machine =
        m.command(Command::Assign(assign_of("b", Some(CpuRequest::Exactly(cpu_set("7-9")))))).unwrap_err();
    assert!(not_on_machine.to_string().contains("8-9"), "{not_on_machine}");
}

#[test]
fn an_unprivileged_user_gets_cores_only_if_allowed_and_for_own_processes() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(20, 1, 1002);
    assert!(matches!(m.assign_as(ALICE, "a", 1, &[20]).unwrap_err(), Refusal::ProcessNotOwned { .. }));
    assert!(matches!(m.assign_as(ALICE, "a", 1, &[10]).unwrap_err(), Refusal::AssignNeedsAdmin));
    m.policy.user_max_cores = 3;
    m.assign_as(ALICE, "a", 2, &[10]).unwrap();
    let refusal = m.assign_as(ALICE, "b", 2, &[]).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 2, total: 4, limit: 3 });
    m.assign_as(ALICE, "b", 1, &[]).unwrap();
    let bob = Caller { uid: Uid(1002), is_admin: false };
    let refusal = m.command(Command::Release { job: job("a"), caller: bob }).unwrap_err();
    assert!(matches!(refusal, Refusal::JobNotOwned { .. }));
    m.command(Command::ReleaseAll { caller: bob }).unwrap();
    assert_eq!(m.state.jobs.len(), 2, "it releases only jobs of the caller");
    m.command(Command::ReleaseAll { caller: ROOT }).unwrap();
    assert!(m.state.jobs.is_empty());
}

#[test]
fn only_an_administrator_creates_a_job_for_another_user() {
    let mut m = machine();
    let for_alice = |caller, id: &str| {
        Command::Assign(AssignCommand {
            owner: Some(ALICE.uid),
            caller,
            ..assign_of(id, Some(CpuRequest::Pus(2)))
        })
    };
    m.command(for_alice(ROOT, "slurm:7")).unwrap();
    assert_eq!(m.state.jobs[&job("slurm:7")].owner, ALICE.uid);
    m.command(for_alice(ROOT, "slurm:7")).unwrap();
    m.assign("found", 1, &[]).unwrap();
    m.command(for_alice(ROOT, "found")).unwrap();
    assert_eq!(m.state.jobs[&job("found")].owner, ALICE.uid, "the command corrects the owner");
    m.assign("found", 1, &[]).unwrap();
    assert_eq!(m.state.jobs[&job("found")].owner, ALICE.uid, "a command without an owner changes no owner");
    m.policy.user_max_cores = 8;
    let bob = Caller { uid: Uid(1002), is_admin: false };
    let refusal = m.command(for_alice(bob, "gift")).unwrap_err();
    assert_eq!(refusal, Refusal::JobForOtherUser { job: job("gift"), owner: ALICE.uid });
    m.command(for_alice(ALICE, "own")).unwrap();
}

#[test]
fn run_requires_a_new_job() {
    let mut m = machine();
    m.assign("a", 1, &[]).unwrap();
    let again = AssignCommand { must_be_new: true, ..assign_of("a", Some(CpuRequest::Cores(1))) };
    assert!(matches!(m.command(Command::Assign(again)).unwrap_err(), Refusal::JobExists { .. }));
}

#[test]
fn kernel_threads_process_1_and_the_daemon_join_no_job() {
    let mut m = machine();
    (m.policy.own_pid, m.policy.thaw_watcher_pid) = (Some(Pid(50)), Some(Pid(51)));
    m.spawn(2, 0, 0).is_kernel_thread = true;
    m.spawn(50, 1, 0);
    m.spawn(51, 50, 0);
    for pid in [1, 2, 50, 51] {
        assert!(matches!(m.assign("a", 1, &[pid]).unwrap_err(), Refusal::CantBeMember { .. }), "{pid}");
    }
}

#[test]
fn a_session_in_which_pjwd_was_started_joins_a_job_without_pjwd() {
    let mut m = machine();
    m.policy.own_pid = Some(Pid(50));
    for pid in [40, 50] {
        m.spawn(pid, 1, 0).session = Pid(40);
    }
    m.spawn(60, 1, 0).session = Pid(60);
    let session = |sid| {
        let session = Some(Pid(sid));
        Command::Assign(AssignCommand { session, ..assign_of("a", Some(CpuRequest::Cores(1))) })
    };
    m.command(session(40)).unwrap();
    assert_eq!([m.member(40), m.member(50)], ["manual:a by Registered", "-"]);
    m.policy.own_pid = Some(Pid(60));
    assert!(
        matches!(m.command(session(60)).unwrap_err(), Refusal::CantBeMember { .. }),
        "nothing else is in it"
    );
    assert_eq!(m.command(session(61)).unwrap_err(), Refusal::NoSuchSession { session: Pid(61) });
}

#[test]
fn a_reservation_keeps_its_cores_until_it_times_out() {
    let mut m = machine();
    assert_eq!(m.assign("a", 2, &[]).unwrap().end_condition, EndCondition::Timeout);
    m.advance(3600 * SECOND);
    m.settle();
    assert_eq!(m.grant("a"), "0-1");
    m.advance(24 * 3600 * SECOND);
    m.settle();
    assert_eq!(m.grant("a"), "-");
}

#[test]
fn with_on_exhausted_wait_a_job_is_served_when_cores_become_free() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    m.assign("a", 6, &[10]).unwrap();
    m.assign("b", 4, &[20]).unwrap();
    assert_eq!((m.grant("b").as_str(), m.effective_mask(20, 20).as_str()), ("-", "0-7"));
    assert_eq!(m.warnings(), ["unserved"]);
    m.exit(10);
    m.settle();
    assert_eq!((m.grant("b").as_str(), m.effective_mask(20, 20).as_str()), ("0-3", "0-3"));
}

#[test]
fn with_on_exhausted_share_a_grant_overlaps_others_and_is_marked_as_shared() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.assign("a", 6, &[]).unwrap();
    m.spawn(20, 1, 0);
    let grant = m.assign("b", 4, &[20]).unwrap().grant.unwrap();
    assert!(grant.is_shared && grant.cpus.len() == 4, "{grant:?}");
    assert_eq!(m.effective_mask(20, 20), grant.cpus.to_string());
    m.release("a").unwrap();
    m.release("b").unwrap();
    assert_eq!(m.state.pool.free_cpus().to_string(), "0-7");
}

#[test]
fn a_daemon_in_observe_mode_refuses_to_assign() {
    let mut m = machine();
    m.policy.mode = DaemonMode::Observe;
    assert_eq!(m.assign("a", 1, &[]).unwrap_err(), Refusal::ObserveOnly);
}

#[test]
fn the_user_limit_counts_waiting_requests_and_partly_used_cores() {
    let mut m = machine();
    m.policy.user_max_cores = 2;
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.assign("all", 8, &[]).unwrap();
    assert!(matches!(m.assign_as(ALICE, "a", 3, &[]), Err(Refusal::UserLimitExceeded { total: 3, .. })));
    m.assign_as(ALICE, "a", 2, &[]).unwrap();
    assert!(matches!(m.assign_as(ALICE, "b", 1, &[]), Err(Refusal::UserLimitExceeded { total: 3, .. })));
    m.state = WardenState::new(regular_topology(1, 1, 1, 4, 2), &cpu_set(""));
    m.policy.share_smt = true;
    for (name, expected) in [("a", true), ("b", true), ("c", false)] {
        let pu = AssignCommand { caller: ALICE, ..assign_of(name, Some(CpuRequest::Pus(1))) };
        let half = m.command(Command::Assign(pu));
        assert_eq!(half.is_ok(), expected, "{half:?}");
    }
}

#[test]
fn an_unprivileged_user_creates_no_job_of_a_scheduler() {
    let mut m = machine();
    m.policy.user_max_cores = 8;
    assert_eq!(
        m.assign_as(ALICE, "slurm:4711", 1, &[]),
        Err(Refusal::SchedulerJobByUser { job: job("slurm:4711") })
    );
}

#[test]
fn two_jobs_on_one_core_are_valid_after_share_smt_was_switched_off() {
    let mut m = machine();
    let smt = RegularShape {
        packages: 1,
        numa_nodes_per_package: 1,
        l3s_per_numa_node: 1,
        cores_per_l3: 1,
        pus_per_core: 2,
    };
    m.state = WardenState::new(Topology::from_shape(smt), &cpu_set(""));
    m.policy.share_smt = true;
    for name in ["a", "b"] {
        m.command(Command::Assign(assign_of(name, Some(CpuRequest::Pus(1))))).unwrap();
    }
    m.policy.share_smt = false;
    assert_eq!(pjw_core::audit::audit(&m.state, &Plan::default(), &m.policy), []);
}

#[test]
fn a_shared_grant_is_shared_after_a_restart_too() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.assign("z", 6, &[]).unwrap();
    m.assign("a", 4, &[]).unwrap();
    let mut state = WardenState::new(m.state.topology.clone(), &cpu_set(""));
    m.state.records().into_iter().for_each(|record| state.apply_record(record));
    assert_eq!(state.pool.free_cpus(), m.state.pool.free_cpus());
}

/// A machine of two packages of four cores, with a GPU near the second package.
fn machine_with_gpu() -> crate::machine::Machine {
    let mut m = machine();
    let card = Device {
        class: DeviceClass::Gpu,
        names: vec!["card0".to_owned(), "cuda0".to_owned()],
        pci_address: "0000:03:00.0".to_owned(),
        model: String::new(),
        local_cpus: cpu_set("4-7"),
        numa_nodes: vec![1],
    };
    let devices = MachineDetails { devices: vec![card], ..MachineDetails::default() };
    m.state = WardenState::new(m.state.topology.clone().with_details(devices), &cpu_set(""));
    m
}

#[test]
fn granted_cores_are_near_the_device_or_the_reasons_say_that_too_few_are_free_there() {
    let mut m = machine_with_gpu();
    let near = |id: &str, cores, name: &str| {
        Command::Assign(AssignCommand {
            near_device: Some(name.to_owned()),
            ..assign_of(id, Some(CpuRequest::Cores(cores)))
        })
    };
    m.command(near("a", 3, "cuda0")).unwrap();
    assert_eq!(m.grant("a"), "4-6");
    m.command(near("b", 2, "0000:03:00.0")).unwrap();
    assert_eq!(m.grant("b"), "0-1");
    let reasons_of = |m: &crate::machine::Machine, id: &str| {
        m.state.jobs[&job(id)].grant.as_ref().unwrap().reasons.join("; ")
    };
    assert!(reasons_of(&m, "a").contains("card0 was asked to be near, and is near CPUs 4-7"));
    assert!(reasons_of(&m, "b").contains("but CPUs 4-7 have not enough free cores"));
    assert_eq!(m.state.jobs[&job("a")].request.as_ref().unwrap().near_device.as_deref(), Some("cuda0"));
    m.assign("a", 4, &[]).unwrap();
    assert_eq!(m.grant("a"), "4-7", "a resize keeps the request for the device");
}

#[test]
fn an_unknown_device_is_refused_with_the_known_ones() {
    let mut m = machine_with_gpu();
    let assign =
        AssignCommand { near_device: Some("eth9".to_owned()), ..assign_of("a", Some(CpuRequest::Cores(1))) };
    let refused = m.command(Command::Assign(assign)).unwrap_err().to_string();
    assert_eq!(refused, "this machine has no device \"eth9\": it has card0");
}

/// `assign ID --cores all`, or `--smt pus --cores all`.
fn everything(id: &str, unit: CpuUnit) -> Command {
    Command::Assign(AssignCommand { everything: Some(unit), ..assign_of(id, None) })
}

#[test]
fn a_request_for_all_cores_gets_those_that_are_free_when_it_is_carried_out() {
    let mut m = machine();
    m.assign("other", 3, &[]).unwrap();
    m.command(everything("a", CpuUnit::Core)).unwrap();
    assert_eq!(m.state.jobs[&job("a")].request.as_ref().unwrap().cpu_request, CpuRequest::Cores(5));
    let first = m.grant("a");
    m.command(everything("a", CpuUnit::Core)).unwrap();
    assert_eq!(m.grant("a"), first, "the same command changes nothing while no core becomes free");
    m.release("other").unwrap();
    assert_eq!(m.grant("a"), first, "the number does not grow by itself");
    m.command(everything("a", CpuUnit::Core)).unwrap();
    assert_eq!(m.grant("a").parse::<CpuSet>().unwrap(), *m.state.topology.cpus());
}

#[test]
fn a_request_for_all_cores_excludes_housekeeping_and_is_refused_if_no_core_is_free() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.state.pool.set_housekeeping(&"0".parse().unwrap());
    m.command(everything("a", CpuUnit::Core)).unwrap();
    assert_eq!(m.grant("a"), "1-7");
    for unit in [CpuUnit::Core, CpuUnit::Pu] {
        for policy in [ExhaustionPolicy::Refuse, ExhaustionPolicy::Share, ExhaustionPolicy::Wait] {
            m.policy.exhaustion_policy = policy;
            assert_eq!(m.command(everything("b", unit)).unwrap_err(), Refusal::NothingFree { unit });
        }
    }
    assert!(!m.state.jobs.contains_key(&job("b")));
}

#[test]
fn a_request_for_all_cores_is_refused_above_the_limit_of_the_user() {
    let mut m = machine();
    m.policy.user_max_cores = 4;
    let request_of_alice =
        AssignCommand { everything: Some(CpuUnit::Core), caller: ALICE, ..assign_of("a", None) };
    let refusal = m.command(Command::Assign(request_of_alice)).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 8, total: 8, limit: 4 });
}

#[test]
fn the_limit_of_a_user_counts_the_cores_that_besteffort_jobs_may_borrow() {
    let mut m = machine();
    m.policy.user_max_cores = 4;
    let class = Some(PriorityClass::Besteffort);
    let borrower =
        |id, cores| AssignCommand { class, caller: ALICE, ..assign_of(id, Some(CpuRequest::Cores(cores))) };
    let refusal = m.command(Command::Assign(borrower("a", 50))).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 50, total: 50, limit: 4 });
    m.assign_as(ALICE, "own", 1, &[]).unwrap();
    m.command(Command::Assign(borrower("a", 3))).unwrap();
    let refusal = m.command(Command::Assign(borrower("b", 1))).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 1, total: 5, limit: 4 });
    let refusal = m.assign_as(ALICE, "own", 2, &[]).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 2, total: 5, limit: 4 });
    let everything = AssignCommand { everything: Some(CpuUnit::Core), ..borrower("a", 3) };
    let refusal = m.command(Command::Assign(everything)).unwrap_err();
    assert_eq!(refusal, Refusal::UserLimitExceeded { requested: 8, total: 9, limit: 4 });
    m.policy.user_max_cores = 1;
    m.spawn(10, 1, ALICE.uid.0);
    m.command(Command::Assign(AssignCommand { pids: [Pid(10)].into(), ..borrower("a", 3) })).unwrap();
    assert_eq!(m.grant("a").len(), 3, "the same request, with a process, is within no new limit");
}

#[test]
fn a_borrower_of_all_cores_wants_each_core_that_jobs_can_have() {
    let mut m = machine();
    m.assign("owner", 8, &[]).unwrap();
    let class = Some(PriorityClass::Besteffort);
    let borrower = AssignCommand { everything: Some(CpuUnit::Core), class, ..assign_of("b", None) };
    m.command(Command::Assign(borrower)).unwrap();
    assert_eq!(m.state.jobs[&job("b")].request.as_ref().unwrap().cpu_request, CpuRequest::Cores(8));
}
