//! A process leaves a provision or another job, and joins a job that waits for cores. It does not stay in the cpuset of
//! the former job.

use std::time::Duration;

use pjw_core::policy::ExhaustionPolicy;
use pjw_core::ports::MachineInterface;

use super::*;

const SESSION: &str = "/user.slice/session-2.scope";

fn spawn_in_session(m: &Machine, pid: u32, comm: &str) {
    let mut process = m.spawn(pid, 1, 33);
    process.cgroup = SESSION.to_owned();
    process.comm = Comm::from(comm);
}

fn cgroup_of(m: &Machine, pid: u32) -> String {
    m.process(pid).cgroup.clone()
}

/// Makes the provision web of 2 cores for the processes of user 33, and the provision db, which waits for 8 cores. The
/// programs with the name "batch" of this user match the rule of db too.
fn make_provisions(m: &mut Machine) {
    provision(m, "web", 2, rule("user=33")).unwrap();
    provision_as(m, ROOT, "db", 8, rule("user=33,comm=batch"), true).unwrap();
    assert_eq!([m.grant("web"), m.grant("db")], ["0-1", "-"]);
}

/// The command after which only the programs with the name "nginx" belong to web.
fn narrow_web() -> Command {
    let narrowed = Provision { rule: rule("user=33,comm=nginx"), from_config: false };
    Command::Provision(ProvisionCommand { job: job("web"), cores: 2, provision: narrowed, caller: ROOT })
}

#[test]
fn a_process_that_leaves_by_a_changed_rule_for_a_provision_that_waits_returns_to_its_cgroup() {
    for affinity_persists in [false, true] {
        let mut m = machine_with_cpusets(affinity_persists);
        spawn_in_session(&m, 10, "nginx");
        spawn_in_session(&m, 11, "batch");
        m.bind(11, 11, "2-5");
        make_provisions(&mut m);
        let inside = cgroup_of(&m, 10);
        assert_ne!(inside, SESSION);
        assert_eq!([cgroup_of(&m, 11), m.member(11)], [inside.as_str(), "manual:web by Provision"]);
        m.command(narrow_web()).unwrap();
        assert_eq!(left_pids(&m), [11]);
        for _ in 0..2 {
            assert_eq!([m.member(11), m.grant("db")], ["manual:db by Provision", "-"]);
            assert_eq!([10, 11].map(|pid| cgroup_of(&m, pid)), [inside.as_str(), SESSION]);
            assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "2-5"]);
            m.advance(SECOND);
            m.settle();
        }
        m.release("web").unwrap();
        assert_eq!([m.grant("db"), m.effective_mask(11, 11)], ["0-7", "2-5"]);
        assert!(cgroup_of(&m, 11).starts_with("/pjw/"), "{}", cgroup_of(&m, 11));
        let is_stray = |kind: EventKind| matches!(kind, EventKind::Stray | EventKind::Repaired);
        assert!(!m.cpuset_events.iter().any(|event| is_stray(event.kind)), "{:?}", m.cpuset_events);
        m.release("db").unwrap();
        assert_eq!([10, 11].map(|pid| cgroup_of(&m, pid)), [SESSION, SESSION]);
        assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-7", "2-5"]);
    }
}

#[test]
fn a_process_that_a_command_moves_from_a_provision_to_a_job_that_waits_returns_to_its_cgroup() {
    for affinity_persists in [false, true] {
        let mut m = machine_with_cpusets(affinity_persists);
        m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
        spawn_in_session(&m, 10, "nginx");
        spawn_in_session(&m, 11, "batch");
        provision(&mut m, "web", 2, rule("user=33")).unwrap();
        let inside = cgroup_of(&m, 11);
        assert_ne!(inside, SESSION);
        m.assign("b", 8, &[11]).unwrap();
        for _ in 0..2 {
            assert_eq!([m.member(11), m.grant("b")], ["manual:b by Registered", "-"]);
            assert_eq!([10, 11].map(|pid| cgroup_of(&m, pid)), [inside.as_str(), SESSION]);
            assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7"]);
            restart(&mut m, 2);
            m.settle();
        }
    }
}

#[test]
fn a_process_that_a_command_moves_from_a_job_to_one_that_waits_returns_to_its_cgroup() {
    for affinity_persists in [false, true] {
        let mut m = machine_with_cpusets(affinity_persists);
        m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
        spawn_in_session(&m, 10, "shell");
        m.spawn(11, 10, 33);
        m.bind(11, 11, "2-5");
        m.assign("a", 2, &[10]).unwrap();
        m.settle();
        let inside = cgroup_of(&m, 11);
        assert_ne!(inside, SESSION);
        m.assign("b", 8, &[11]).unwrap();
        for _ in 0..2 {
            assert_eq!([m.member(11), m.grant("b")], ["manual:b by Registered", "-"]);
            assert_eq!([10, 11].map(|pid| cgroup_of(&m, pid)), [inside.as_str(), SESSION]);
            assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "2-5"]);
            assert!(!m.warnings().contains(&"not-moved-back"), "{:?}", m.warnings());
            m.advance(SECOND);
            m.settle();
        }
        m.release("a").unwrap();
        assert_eq!([m.grant("b"), m.effective_mask(11, 11)], ["0-7", "2-5"]);
        assert!(cgroup_of(&m, 11).starts_with("/pjw/"), "{}", cgroup_of(&m, 11));
    }
}

#[test]
fn a_child_that_is_born_before_its_parent_returns_to_its_cgroup_follows_the_parent() {
    for affinity_persists in [false, true] {
        let mut m = machine_with_cpusets(affinity_persists);
        spawn_in_session(&m, 10, "nginx");
        spawn_in_session(&m, 11, "batch");
        make_provisions(&mut m);
        let snapshot = m.scan();
        m.spawn(12, 11, 33);
        assert_ne!(cgroup_of(&m, 12), SESSION);
        let decision = m.decide(&snapshot, &[narrow_web()]);
        let actions = &decision.plan.cpuset_actions;
        let outcomes = m.node.change_cpusets(actions, Duration::MAX);
        for (action, outcome) in actions.iter().zip(&outcomes) {
            m.state.cpusets.record_outcome(action, outcome);
        }
        decision.plan.mask_actions.iter().for_each(|action| m.carry_out(action));
        assert_eq!(cgroup_of(&m, 11), SESSION);
        m.settle();
        let members = [11, 12].map(|pid| m.member(pid));
        assert_eq!(members, ["manual:db by Provision", "manual:db by Parent"]);
        assert_eq!([11, 12].map(|pid| cgroup_of(&m, pid)), [SESSION, SESSION]);
    }
}

#[test]
fn a_process_that_leaves_for_a_provision_that_waits_and_whose_cgroup_is_gone_is_named() {
    let policy = policy_with_cpusets(CpusetHierarchy::Systemd, true);
    let mut m = machine_with(regular_topology(2, 1, 1, 4, 1), policy);
    spawn_in_session(&m, 10, "nginx");
    spawn_in_session(&m, 11, "batch");
    make_provisions(&mut m);
    assert_ne!(cgroup_of(&m, 11), SESSION);
    // The session ends.
    m.world().removed_cgroups.insert(SESSION.to_owned());
    let mut commands = vec![narrow_web()];
    for _ in 0..2 {
        rescan(&mut m, &std::mem::take(&mut commands));
        assert_eq!(m.member(11), "manual:db by Provision");
        let warnings = &m.last.as_ref().unwrap().warnings;
        let stays: Vec<_> = warnings.iter().filter(|warning| warning.code == "not-moved-back").collect();
        assert_eq!(stays.len(), 1, "{warnings:?}");
        let expected = "process 11 has left manual:web and is still limited to its CPUs 0-1: it is gone";
        assert_eq!((stays[0].text.as_str(), stays[0].job.as_ref()), (expected, Some(&job("db"))));
        assert!(stays[0].remedy.contains("free cores for manual:db"), "{}", stays[0].remedy);
        m.advance(SECOND);
    }
    m.exit(11);
    m.settle();
    assert!(!m.warnings().contains(&"not-moved-back"), "{:?}", m.warnings());
}
