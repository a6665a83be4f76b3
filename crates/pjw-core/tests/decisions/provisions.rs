//! Provisions: cores that are reserved for a service, whether it runs or not.

mod children_left_behind;
mod waiting_leavers;

use pjw_core::command::{AssignCommand, Caller, Command, ProvisionCommand, Reply};
use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::event::EventKind;
use pjw_core::evidence::MembershipEvidence;
use pjw_core::ids::{Comm, Pid, Tid, Uid};
use pjw_core::job::{CpuRequest, Job, PriorityClass, Provision, ProvisionRule};
use pjw_core::provision_rules::{ambiguous_rule_warning, unmatched_rule_warning};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::snapshot::ProcessEvent;
use pjw_core::state::WardenState;
use pjw_core::time::Nanos;

use crate::machine::{
    ALICE, Machine, ROOT, SECOND, assign_of, job, machine, machine_with, machine_with_cpusets,
    policy_with_cpusets, regular_topology,
};
use crate::restore::restart;

fn rule(text: &str) -> Option<ProvisionRule> {
    Some(ProvisionRule::parse(text, |_| None).unwrap())
}

fn provision_as(
    m: &mut Machine,
    caller: Caller,
    name: &str,
    cores: u32,
    rule: Option<ProvisionRule>,
    from_config: bool,
) -> Result<Job, Refusal> {
    let provision = Provision { rule, from_config };
    match m.command(Command::Provision(ProvisionCommand { job: job(name), cores, provision, caller }))? {
        Reply::Assigned(job) => Ok(*job),
        other => panic!("{other:?}"),
    }
}

fn provision(m: &mut Machine, name: &str, cores: u32, rule: Option<ProvisionRule>) -> Result<Job, Refusal> {
    provision_as(m, ROOT, name, cores, rule, false)
}

#[test]
fn a_provision_keeps_its_cores_without_a_process() {
    let mut m = machine();
    provision(&mut m, "web", 4, rule("user=33")).unwrap();
    assert_eq!((m.grant("web").as_str(), m.state.jobs[&job("web")].owner), ("0-3", Uid(33)));
    m.advance(48 * 3600 * SECOND);
    m.settle();
    assert_eq!(m.grant("web"), "0-3", "it does not end like a reservation");
}

#[test]
fn a_command_without_a_rule_keeps_the_rule_and_the_configuration_can_remove_it() {
    let mut m = machine();
    let rule_of = |job: &Job| job.provision.as_ref().unwrap().rule.as_ref().map(ToString::to_string);
    provision(&mut m, "web", 2, rule("user=33,comm=nginx")).unwrap();
    let larger = provision(&mut m, "web", 4, None).unwrap();
    assert_eq!((m.grant("web").as_str(), rule_of(&larger).as_deref()), ("0-3", Some("user=33,comm=nginx")));
    assert_eq!(larger.owner, Uid(33), "the rule still names the owner");
    let other = provision(&mut m, "web", 4, rule("user=34")).unwrap();
    assert_eq!(rule_of(&other).as_deref(), Some("user=34"));
    let of_file = provision_as(&mut m, ROOT, "web", 4, None, true).unwrap();
    assert_eq!(rule_of(&of_file), None, "an entry of the configuration is complete");
    assert_eq!(rule_of(&provision(&mut m, "new", 1, None).unwrap()), None);
}

#[test]
fn a_command_without_a_rule_leaves_the_provision_to_its_owner() {
    let mut m = machine();
    let alice = Caller { is_admin: true, ..ALICE };
    provision(&mut m, "web", 2, rule("unit=nginx.service")).unwrap();
    let larger = provision_as(&mut m, alice, "web", 3, None, false).unwrap();
    assert_eq!((m.grant("web").as_str(), larger.owner), ("0-2", ROOT.uid));
    provision(&mut m, "plain", 1, None).unwrap();
    assert_eq!(provision_as(&mut m, alice, "plain", 2, None, false).unwrap().owner, ROOT.uid);
    let of_alice = provision_as(&mut m, alice, "web", 3, rule("comm=nginx"), false).unwrap();
    assert_eq!(of_alice.owner, alice.uid, "a new rule makes a new promise");
    let of_file = provision_as(&mut m, ROOT, "web", 3, None, true).unwrap();
    assert_eq!(of_file.owner, ROOT.uid, "a provision of the configuration belongs to root");
}

#[test]
fn processes_that_match_the_rule_join_and_the_cores_stay_when_they_end() {
    let mut m = machine();
    m.spawn(10, 1, 33);
    m.settle();
    provision(&mut m, "web", 2, rule("user=33")).unwrap();
    m.spawn(11, 1, 33);
    m.spawn(12, 1, 34);
    m.settle();
    let members: Vec<u32> = m.state.members_of(&job("web")).map(|member| member.id.pid.0).collect();
    assert_eq!(members, [10, 11], "a process that ran before, and a new one");
    assert_eq!(m.state.members.get(&Pid(10)).unwrap().evidence, MembershipEvidence::Provision);
    m.exit(10);
    m.exit(11);
    m.settle();
    assert_eq!(m.grant("web"), "0-1");
    m.spawn(13, 1, 33);
    m.settle();
    assert_eq!(m.state.members_of(&job("web")).count(), 1);
}

#[test]
fn a_process_that_matches_two_rules_belongs_to_the_first_provision_and_is_named_in_a_warning() {
    let mut m = machine();
    provision(&mut m, "b", 2, rule("comm=p10")).unwrap();
    provision(&mut m, "a", 2, rule("user=33")).unwrap();
    let text =
        |m: &Machine, name: &str| ambiguous_rule_warning(&m.state, &m.policy, &m.state.jobs[&job(name)]);
    assert_eq!((text(&m, "a"), text(&m, "b")), (None, None), "there is no such process");
    m.spawn(10, 1, 33).comm = Comm::from("nginx");
    provision(&mut m, "b", 2, rule("comm=nginx")).unwrap();
    m.settle();
    assert_eq!(m.state.members.get(&Pid(10)).unwrap().job, job("a"));
    let expected = "process 10 of manual:a also matches comm=nginx, the rule of manual:b";
    assert_eq!((text(&m, "a").as_deref(), text(&m, "b")), (Some(expected), None));
    m.release("b").unwrap();
    assert_eq!(text(&m, "a"), None);
}

#[test]
fn a_provision_whose_rule_matches_no_process_has_a_warning_and_keeps_its_cores() {
    let mut m = machine();
    provision(&mut m, "web", 2, rule("user=33")).unwrap();
    provision(&mut m, "later", 2, None).unwrap();
    let text = |m: &Machine, name: &str| unmatched_rule_warning(&m.state, &m.state.jobs[&job(name)]);
    let expected = "manual:web keeps CPUs 0-1 for user=33, and no process matches that";
    assert_eq!(text(&m, "web").as_deref(), Some(expected));
    assert_eq!(text(&m, "later"), None, "it has no rule");
    m.spawn(10, 1, 33);
    m.settle();
    assert_eq!((text(&m, "web"), m.grant("web").as_str()), (None, "0-1"));
}

#[test]
fn a_rule_with_only_a_program_name_matches_no_process_of_a_person() {
    let mut m = machine();
    provision(&mut m, "web", 2, rule("comm=nginx")).unwrap();
    m.spawn(10, 1, 1001).comm = Comm::from("nginx");
    m.settle();
    assert!(m.state.members.get(&Pid(10)).is_none(), "a user can give this name to any program");
    m.spawn(11, 1, 33).comm = Comm::from("nginx");
    m.settle();
    assert_eq!(m.state.members.get(&Pid(11)).unwrap().job, job("web"));
    provision(&mut m, "web", 2, rule("comm=nginx,user=1001")).unwrap();
    m.settle();
    assert_eq!(m.state.members.get(&Pid(10)).unwrap().job, job("web"), "the rule names the user");

    let mut m = machine();
    m.policy.only_managed_user = Some(Uid(1001));
    provision(&mut m, "web", 2, rule("comm=nginx")).unwrap();
    m.spawn(10, 1, 1001).comm = Comm::from("nginx");
    m.settle();
    assert_eq!(m.state.members.get(&Pid(10)).unwrap().job, job("web"), "the daemon serves this user only");
}

#[test]
fn all_conditions_of_a_rule_must_hold() {
    let mut m = machine();
    m.spawn(10, 1, 33).cgroup = "/system.slice/nginx.service".into();
    m.spawn(11, 1, 33).cgroup = "/system.slice/nginx.service-old".into();
    m.spawn(12, 1, 34).cgroup = "/system.slice/nginx.service/worker".into();
    m.spawn(13, 1, 33).cgroup = "/system.slice/nginx.service/worker".into();
    // The service manager of a person, and one in a container, may have a unit of any name.
    m.spawn(14, 1, 1000).cgroup =
        "/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service".into();
    m.spawn(15, 1, 0).cgroup = "/system.slice/docker-1.scope/system.slice/nginx.service".into();
    provision(&mut m, "web", 2, rule("user=33,cgroup=/system.slice/nginx.service")).unwrap();
    let members: Vec<u32> = m.state.members_of(&job("web")).map(|member| member.id.pid.0).collect();
    assert_eq!(members, [10, 13]);
    m.release("web").unwrap();
    provision(&mut m, "web", 2, rule("unit=nginx.service")).unwrap();
    let members: Vec<u32> = m.state.members_of(&job("web")).map(|member| member.id.pid.0).collect();
    assert_eq!(members, [10, 12, 13]);
}

#[test]
fn only_an_administrator_takes_away_a_provision_or_changes_what_it_gets() {
    let mut m = machine();
    m.policy.user_max_cores = 8;
    m.spawn(10, 1, ALICE.uid.0);
    let promised = provision(&mut m, "web", 2, rule(&format!("user={},comm=nginx", ALICE.uid))).unwrap();
    m.assign_as(ALICE, "own", 1, &[]).unwrap();
    let assign = |change: AssignCommand| Command::Assign(AssignCommand { caller: ALICE, ..change });
    let of_web = assign_of("web", None);
    for command in [
        Command::Release { job: job("web"), caller: ALICE },
        assign(assign_of("web", Some(CpuRequest::Cores(4)))),
        assign(AssignCommand { class: Some(PriorityClass::Normal), ..of_web.clone() }),
    ] {
        let refusal = m.command(command).unwrap_err();
        assert!(matches!(refusal, Refusal::ProvisionOfAdmin { .. }), "{refusal}");
    }
    let released = m.command(Command::ReleaseAll { caller: ALICE }).unwrap();
    assert!(matches!(released, Reply::Released(jobs) if jobs == [job("own")]));
    let kept = &m.state.jobs[&job("web")];
    assert_eq!((&kept.request, &kept.provision), (&promised.request, &promised.provision));
    m.command(Command::Want { job: job("web"), cores: Some(1), caller: ALICE }).unwrap();
    m.command(assign(AssignCommand { pids: vec![Pid(10)], ..of_web })).unwrap();
    assert_eq!((m.member(10).as_str(), m.grant("web").as_str()), ("manual:web by Registered", "0-1"));
    assert!(m.command(Command::Release { job: job("web"), caller: ROOT }).is_ok());
}

#[test]
fn a_second_provision_with_the_same_name_replaces_the_first() {
    let mut m = machine();
    provision(&mut m, "web", 2, None).unwrap();
    provision(&mut m, "web", 4, rule("user=33")).unwrap();
    assert_eq!(m.grant("web"), "0-3");
    let unchanged = provision(&mut m, "web", 4, rule("user=33")).unwrap();
    assert_eq!(m.state.jobs[&job("web")], unchanged);
    assert!(m.records.is_empty(), "{:?}", m.records);
}

#[test]
fn a_provision_survives_a_restart() {
    let mut m = machine();
    let before = provision(&mut m, "web", 2, rule("comm=nginx")).unwrap();
    let records: Vec<Record> = m.state.records();
    let mut restarted = WardenState::new(m.state.topology.clone(), &pjw_core::cpuset::CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    assert_eq!(restarted.jobs[&job("web")], before);
}

#[test]
fn a_provision_that_cannot_be_granted_is_refused_and_changes_no_job() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 6, &[10]).unwrap();
    provision(&mut m, "db", 1, rule("user=34")).unwrap();
    m.settle();
    let before = m.state.jobs.clone();
    let refusals = [
        provision(&mut m, "web", 0, None),
        provision(&mut m, "web", 9, None),
        provision(&mut m, "web", 2, None),
        provision(&mut m, "web", 1, rule("user=34")),
        provision(&mut m, "a", 1, None),
        provision(&mut m, "slurm:7", 1, None),
        provision_as(&mut m, ALICE, "web", 1, None, false),
    ];
    let texts = refusals.map(|refusal| refusal.unwrap_err().to_string());
    for (text, expected) in texts.iter().zip([
        "0 cores",
        "9 cores",
        "2 cores",
        "manual:db has the same rule",
        "choose another name for the provision, or: pjwctl release manual:a",
        "slurm:7",
        "administrator",
    ]) {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(m.state.jobs, before);
}

#[test]
fn a_provision_of_the_configuration_waits_for_cores_that_others_hold() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 6, &[10]).unwrap();
    provision_as(&mut m, ROOT, "web", 4, None, true).unwrap();
    assert_eq!(m.state.grant_of(&job("web")), None);
    m.release("a").unwrap();
    assert_eq!(m.state.grant_of(&job("web")).unwrap().cpus.len(), 4);
}

#[test]
fn a_provision_that_grows_keeps_its_cores_and_gets_the_others_once_they_are_free() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    provision_as(&mut m, ROOT, "web", 2, None, true).unwrap();
    m.assign("a", 5, &[10]).unwrap();
    provision_as(&mut m, ROOT, "web", 4, None, true).unwrap();
    m.settle();
    assert_eq!(m.grant("web"), "0-1");
    let decision = m.last.as_ref().unwrap();
    let warning = decision.warnings.iter().find(|warning| warning.code == "short").unwrap();
    assert!(
        warning.text.contains("has CPUs 0-1 and waits for more cores: 4 cores were asked for"),
        "{warning:?}"
    );
    let by_command = provision(&mut m, "web", 4, None).unwrap_err().to_string();
    assert!(by_command.contains("the job has 2"), "{by_command}");
    provision(&mut m, "web", 4, rule("comm=httpd")).unwrap();
    assert_eq!(m.grant("web"), "0-1", "another rule leaves it its cores");
    m.release("a").unwrap();
    m.settle();
    assert_eq!(m.state.grant_of(&job("web")).unwrap().cpus.len(), 4);
    assert!(!m.warnings().contains(&"short"), "{:?}", m.warnings());
}

#[test]
fn a_provision_that_lost_a_core_gets_another_one_once_it_is_free() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    provision(&mut m, "web", 2, None).unwrap();
    m.assign("a", 6, &[10]).unwrap();
    m.switch_off("1");
    m.settle();
    assert_eq!((m.grant("web").as_str(), m.warnings()), ("0", vec!["short"]));
    m.release("a").unwrap();
    m.settle();
    assert_eq!(m.state.grant_of(&job("web")).unwrap().cpus.len(), 2);
}

/// The processes of which the journal says since the last command that they left their jobs.
fn left_pids(m: &Machine) -> Vec<u32> {
    let left = m.records.iter().filter_map(|record| match record {
        Record::Left(membership) => Some(membership.process.pid.0),
        _ => None,
    });
    left.collect()
}

#[test]
fn processes_that_a_changed_rule_recognises_no_longer_leave_and_the_others_keep_their_cores() {
    for is_restarted in [false, true] {
        let mut m = machine();
        m.spawn(10, 1, 33).comm = Comm::from("nginx");
        m.spawn(11, 1, 33);
        m.bind(11, 11, "2-5");
        m.spawn(12, 11, 33);
        m.spawn(13, 1, 34);
        m.spawn(14, 13, 33);
        provision(&mut m, "web", 2, rule("user=33")).unwrap();
        let by_hand = AssignCommand { pids: vec![Pid(13)], ..assign_of("web", None) };
        m.command(Command::Assign(by_hand)).unwrap();
        assert_eq!(m.state.members_of(&job("web")).count(), 5);
        if is_restarted {
            restart(&mut m, 2);
        }
        provision(&mut m, "web", 2, rule("user=33,comm=nginx")).unwrap();
        for _ in 0..2 {
            assert_eq!(
                [10, 11, 12, 13, 14].map(|pid| m.member(pid)),
                ["manual:web by Provision", "-", "-", "manual:web by Registered", "manual:web by Provision"],
                "a child of a process that joined by a command stays with it"
            );
            assert_eq!([11, 12].map(|pid| m.effective_mask(pid, pid)), ["2-5", "2-5"]);
            assert_eq!([10, 13, 14].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-1", "0-1"]);
            m.advance(SECOND);
            m.settle();
        }
        assert_eq!(m.grant("web"), "0-1");
        assert!(m.reports.is_empty(), "the job goes on: {:?}", m.reports);
        provision(&mut m, "web", 2, rule("user=33")).unwrap();
        assert!(left_pids(&m).is_empty(), "all of them match the wider rule");
        assert_eq!([11, 12].map(|pid| m.member(pid)), ["manual:web by Provision", "manual:web by Parent"]);
    }
}

#[test]
fn a_process_that_leaves_by_a_changed_rule_returns_to_its_cgroup_and_the_rule_means_the_cgroup_before() {
    let [kept, other] = ["/user.slice/user-33.slice/session-1.scope", "/user.slice/session-2.scope"];
    for affinity_persists in [false, true] {
        let mut m = machine_with_cpusets(affinity_persists);
        m.spawn(10, 1, 33).cgroup = kept.to_owned();
        m.spawn(11, 1, 33).cgroup = other.to_owned();
        provision(&mut m, "web", 2, rule("user=33")).unwrap();
        m.spawn(12, 11, 33);
        m.settle();
        let inside = m.process(10).cgroup.clone();
        assert_ne!(inside, kept);
        assert_eq!([11, 12].map(|pid| m.process(pid).cgroup.clone()), [inside.as_str(), inside.as_str()]);
        provision(&mut m, "web", 2, rule("cgroup=/user.slice/user-33.slice")).unwrap();
        assert_eq!(left_pids(&m), [11, 12]);
        for _ in 0..2 {
            let members = [10, 11, 12].map(|pid| m.member(pid));
            assert_eq!(members, ["manual:web by Provision", "-", "-"]);
            let cgroups = [10, 11, 12].map(|pid| m.process(pid).cgroup.clone());
            assert_eq!(cgroups, [inside.as_str(), other, other]);
            assert_eq!([10, 11, 12].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7", "0-7"]);
            m.advance(SECOND);
            m.settle();
        }
        assert!(m.state.processes_to_restore.is_empty());
        // They join again, which is no repair.
        provision(&mut m, "web", 2, rule("user=33")).unwrap();
        let cgroups = [10, 11, 12].map(|pid| m.process(pid).cgroup.clone());
        assert_eq!(cgroups, [inside.as_str(), inside.as_str(), inside.as_str()]);
        let is_stray = |kind: EventKind| matches!(kind, EventKind::Stray | EventKind::Repaired);
        assert!(!m.cpuset_events.iter().any(|event| is_stray(event.kind)), "{:?}", m.cpuset_events);
        // Another program moves one of them away.
        m.process(11).cgroup = other.to_owned();
        m.settle();
        assert_eq!(m.process(11).cgroup.clone(), inside);
        assert!(m.cpuset_events.iter().any(|event| is_stray(event.kind)), "{:?}", m.cpuset_events);
    }
}

/// Makes a rescan, and the scans that it requests. Does not wait until a rescan finds nothing to do: a move that is
/// refused is tried again at each one.
fn rescan(m: &mut Machine, commands: &[Command]) {
    let scan = m.state.scan_request(true);
    let mut decision = m.cycle(&scan, commands);
    for _ in 0..20 {
        let Some(scan) = decision.next_scan.take() else {
            m.last = Some(decision);
            return;
        };
        decision = m.cycle(&scan, &[]);
    }
    panic!("20 scans were not enough: {decision:?}");
}

#[test]
fn a_process_that_leaves_by_a_changed_rule_and_whose_cgroup_is_gone_is_named_while_its_scope_limits_it() {
    let session = "/user.slice/user-33.slice/session-3.scope";
    let policy = policy_with_cpusets(CpusetHierarchy::Systemd, true);
    let mut m = machine_with(regular_topology(2, 1, 1, 4, 1), policy);
    for pid in [10, 11, 12] {
        m.spawn(pid, 1, 33).cgroup = session.to_owned();
    }
    m.process(10).comm = Comm::from("nginx");
    provision(&mut m, "web", 2, rule("user=33")).unwrap();
    let inside = m.process(10).cgroup.clone();
    assert_ne!(inside, session);
    // The session ends.
    m.world().removed_cgroups.insert(session.to_owned());
    let narrowed = Provision { rule: rule("user=33,comm=nginx"), from_config: false };
    let narrow = ProvisionCommand { job: job("web"), cores: 2, provision: narrowed, caller: ROOT };
    let mut commands = vec![Command::Provision(narrow)];
    for _ in 0..2 {
        rescan(&mut m, &std::mem::take(&mut commands));
        assert_eq!([10, 11, 12].map(|pid| m.member(pid)), ["manual:web by Provision", "-", "-"]);
        let warnings = &m.last.as_ref().unwrap().warnings;
        let stays: Vec<_> = warnings.iter().filter(|warning| warning.code == "not-moved-back").collect();
        assert_eq!(stays.len(), 1, "{warnings:?}");
        let expected = "process 11 and 1 more have left manual:web and are still limited to its CPUs 0-1: \
                        it is gone";
        assert_eq!((stays[0].text.as_str(), stays[0].job.as_ref()), (expected, Some(&job("web"))));
        assert!(stays[0].remedy.contains("--pid 11"), "{}", stays[0].remedy);
        m.advance(SECOND);
    }
    for pid in [11, 12] {
        m.exit(pid);
    }
    m.settle();
    assert!(!m.warnings().contains(&"not-moved-back"), "{:?}", m.warnings());
}

#[test]
fn an_unscanned_child_of_a_process_that_leaves_by_a_changed_rule_does_not_join_by_its_descent() {
    let mut m = machine();
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.spawn(10, 1, 33);
    m.spawn(20, 1, 33).comm = Comm::from("nginx");
    provision(&mut m, "web", 2, rule("user=33")).unwrap();
    m.advance(SECOND);
    for (parent, child) in [(10, 11), (20, 21)] {
        let at = Nanos(m.now());
        let (parent, child) = (Pid(parent), Pid(child));
        let fork = ProcessEvent::Fork { parent, creator: Tid(parent.0), child, at };
        m.state.apply_process_events(&[fork]);
        m.spawn(child.0, parent.0, 33);
    }
    let narrowed = Provision { rule: rule("user=33,comm=nginx"), from_config: false };
    let narrow = ProvisionCommand { job: job("web"), cores: 2, provision: narrowed, caller: ROOT };
    // The scan for the command finds neither child.
    let scan = m.state.scan_request(false);
    let _ = m.cycle(&scan, &[Command::Provision(narrow)]);
    for pid in [10, 20] {
        m.exit(pid);
    }
    m.settle();
    assert_eq!([11, 21].map(|pid| m.member(pid)), ["-", "manual:web by Parent"]);
    assert_eq!([11, 21].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-1"]);
}
