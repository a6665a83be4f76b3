//! Findings about other programs and about missing kernel features, for invented nodes.

use super::*;
use crate::basics::cpuset::Pu;
use crate::basics::ids::Comm;
use crate::basics::ids::Pid;
use crate::basics::ids::Uid;
use crate::terms::cpuset_group::{CpusetSupport, IdlePrioritySupport};
use crate::terms::job::GrantedBy;
use std::borrow::ToOwned;
use std::collections::BTreeMap;
use std::string::String;
use std::vec::Vec;

#[test]
fn unassigned_processes_are_a_problem_when_hot() {
    let mut input = node();
    input.jobs = vec![held("slurm:1", "0-3", GrantedBy::Scheduler)];
    input.unassigned_processes = vec![other(50, 1001, "bash", vec![thread(50, "0-15", 0, 0)])];
    assert_eq!(only(&input, "stray").severity, Severity::Note);
    input.unassigned_processes.push(other(51, 1001, "solver", vec![thread(51, "0-15", 3, 900)]));
    let finding = only(&input, "stray");
    assert_eq!(finding.severity, Severity::Problem);
    assert!(finding.text.contains("user 1001 (2 processes); 1 has hot threads"), "{}", finding.text);
    assert!(finding.remedy.contains("--pid 51"), "{}", finding.remedy);
}

#[test]
fn a_login_is_no_stray() {
    let mut input = node();
    input.jobs = vec![held("slurm:1", "0-3", GrantedBy::Scheduler)];
    let shell = other(50, 1001, "bash", vec![thread(50, "0-15", 0, 900)]);
    input.unassigned_processes = vec![UnassignedProcess { is_expected_outside_jobs: true, ..shell }];
    assert_eq!(of(&input, "stray"), []);
    input.unassigned_processes.push(other(51, 1001, "solver", vec![thread(51, "0-15", 3, 0)]));
    let finding = only(&input, "stray");
    assert!(finding.text.contains("user 1001 (1 process); none has a hot thread"), "{}", finding.text);
}

#[test]
fn hot_processes_of_users_without_jobs_are_reported() {
    let mut input = node();
    input.unassigned_processes = vec![other(50, 1002, "a\x1b[2J", vec![thread(50, "0-15", 0, 900)])];
    let finding = only(&input, "unmanaged");
    assert_eq!(finding.text, "1 thread of no job keeps CPUs busy: a\\u{1b}[2J (50)");
    input.unassigned_processes = vec![other(50, 0, "kworker", vec![thread(50, "0-15", 0, 900)])];
    assert_eq!(of(&input, "unmanaged"), []);
}

#[test]
fn system_daemons_on_job_cpus_are_reported_with_a_remedy() {
    let mut input = node();
    input.jobs = vec![held("slurm:1", "0-7", GrantedBy::Scheduler)];
    input.unassigned_processes = vec![
        other(30, 0, "systemd-journal", vec![thread(30, "0-15", 3, 23)]),
        other(31, 101, "dbus-daemon", vec![thread(31, "0-15", 9, 50)]),
        other(32, 0, "quiet", vec![thread(32, "8-15", 9, 50)]),
        UnassignedProcess {
            belongs_to_scheduler: true,
            ..other(33, 0, "slurmstepd", vec![thread(33, "0-15", 1, 50)])
        },
    ];
    let finding = only(&input, "daemons");
    assert_eq!(finding.severity, Severity::Advice);
    assert_eq!(
        finding.text,
        "2 system processes may run on the jobs' CPUs 0-7; 1 did, for 2.3 % of one CPU: systemd-journal (30)"
    );
    assert!(finding.remedy.contains("CPUAffinity=8-15"), "{}", finding.remedy);
    input.unassigned_processes[0].threads[0].run_permille = 9;
    assert_eq!(only(&input, "daemons").severity, Severity::Note, "every system has as much");
    input.jobs[0] = held("slurm:1", "0-15", GrantedBy::Scheduler);
    assert!(only(&input, "daemons").remedy.contains("housekeeping = \"1\""));
}

#[test]
fn without_systemd_system_daemons_are_bound_by_taskset() {
    let mut input = node();
    input.host.has_systemd = false;
    input.unassigned_processes = vec![other(30, 0, "syslogd", vec![thread(30, "0-15", 3, 23)])];
    for (cpus, housekeeping, expected) in [
        ("0-7", "", "taskset -pac 8-15 PID"),
        ("0-7", "15", "taskset -pac 15 PID"),
        ("0-15", "", "taskset -pac CPU PID, with the same CPU"),
    ] {
        input.jobs = vec![held("slurm:1", cpus, GrantedBy::Scheduler)];
        input.housekeeping_cpus = cpu_set(housekeeping);
        let remedy = only(&input, "daemons").remedy;
        assert!(remedy.contains(expected), "{remedy}");
        assert!(!remedy.contains("systemd") && !remedy.contains("CPUAffinity"), "{remedy}");
    }
}

fn interrupt(number: u32, sent_to: &str, came: &[(u32, u64)]) -> Interrupt {
    let counts = came.iter().map(|&(pu, n)| (Pu(pu), n)).collect();
    Interrupt { number, name: "eth0-rx".to_owned(), target_cpus: cpu_set(sent_to), counts }
}

#[test]
fn interrupts_on_job_cpus_are_reported_with_a_remedy_for_irqbalance() {
    let mut input = node();
    input.jobs = vec![held("slurm:1", "0-3", GrantedBy::Scheduler)];
    input.interrupts = vec![interrupt(41, "2", &[(2, 1200), (9, 5)]), interrupt(42, "9", &[(9, 7000)])];
    let finding = only(&input, "interrupts");
    assert_eq!(finding.severity, Severity::Advice);
    assert_eq!(
        finding.text,
        "1 interrupt may come to the jobs' CPUs 0-3; 1200/s did: eth0-rx (IRQ 41, 1200/s)"
    );
    assert!(finding.remedy.contains("/proc/irq/41/smp_affinity_list"), "{}", finding.remedy);
    input.conflicting_programs = conflicting_programs([(Pid(9), Uid::ROOT, Comm::from("irqbalance"))], 1000);
    assert!(only(&input, "interrupts").remedy.contains("IRQBALANCE_BANNED_CPULIST=0-3"));
    input.interrupts[0].counts = BTreeMap::from([(Pu(2), 3)]);
    assert_eq!(only(&input, "interrupts").severity, Severity::Note);
    input.interrupts[0].counts = BTreeMap::from([(Pu(2), u64::MAX), (Pu(3), u64::MAX)]);
    input.scan_interval_ms = 0;
    let _ = only(&input, "interrupts");
}

#[test]
fn conflicting_programs_are_reported_if_a_system_user_runs_them() {
    let mut input = node();
    let programs = [
        (5, 0, "numad"),
        (6, 0, "tuned"),
        (7, 1001, "cgrulesengd"),
        (8, 0, "pjwd"),
        (9, 0, "pjwd"),
        (10, 0, "scx_rusty"),
        (11, 1001, "pjwd"),
        (12, 1002, "pjwd"),
        (13, 1002, "pjwd"),
    ];
    input.conflicting_programs =
        conflicting_programs(programs.map(|(pid, uid, name)| (Pid(pid), Uid(uid), Comm::from(name))), 1000);
    let texts: Vec<(Severity, String)> =
        of(&input, "master").into_iter().map(|finding| (finding.severity, finding.text)).collect();
    let clashing = texts.iter().filter(|(severity, _)| *severity == Severity::Advice).count();
    assert_eq!((texts.len(), clashing), (5, 3), "{texts:#?}");
    let begin = [
        "numad is here too",
        "2 pjwd of root run here (processes 8 and 9): each may give the same CPUs to its jobs",
        "2 pjwd of user 1002 run here (processes 12 and 13): each",
    ];
    assert!(texts.iter().zip(begin).all(|((_, text), begin)| text.starts_with(begin)), "{texts:#?}");

    if let DaemonStatus::Responsive { pid, .. } = &mut input.daemon {
        *pid = Pid(9);
    }
    let of_root = of(&input, "master").into_iter().find(|finding| finding.text.contains("of root")).unwrap();
    assert_eq!(of_root.pids, BTreeSet::from([Pid(8), Pid(9)]));
    assert_eq!(of_root.remedy, "end all but one; pjwctl talks to process 9");
}

#[test]
fn a_configuration_with_which_pjwd_cannot_start_is_the_first_problem() {
    let mut input = node();
    input.daemon = absent();
    input.jobs = vec![job("slurm:1", "0-3", 1, 1), job("slurm:2", "2-5", 1, 1)];
    let check_command = "pjwctl check-config /etc/pjw/pjwd.toml";
    let wrong = |has_further_mistakes| ConfigurationProblem::Wrong {
        first_mistake: "/etc/pjw/pjwd.toml:3:1: modus: there is no such key".to_owned(),
        has_further_mistakes,
        check_command: check_command.to_owned(),
    };
    input.configuration_problems = vec![wrong(false)];
    let found = diagnose(&input);
    assert!(found.iter().any(|finding| finding.code == "overlap"), "{found:#?}");
    let expected =
        "pjwd can't start with its configuration: /etc/pjw/pjwd.toml:3:1: modus: there is no such key";
    assert_eq!((found[0].severity, found[0].text.as_str()), (Severity::Problem, expected));
    assert!(found[0].remedy.contains(check_command), "{}", found[0].remedy);
    input.configuration_problems = vec![wrong(true)];
    let finding = only(&input, "wrong-configuration");
    assert_eq!(finding.text, format!("{expected} (and further mistakes)"));

    let check_command = check_command.to_owned();
    input.configuration_problems =
        vec![ConfigurationProblem::CheckTimedOut { time_limit_s: 10, check_command: check_command.clone() }];
    let first = diagnose(&input).remove(0);
    assert_eq!((first.severity, first.code.as_str()), (Severity::Problem, "unchecked-configuration"));
    assert!(first.text.contains("within 10 s") && first.remedy.contains(&check_command), "{first:?}");
}

#[test]
fn without_systemd_no_remedy_names_its_commands() {
    let mut input = node();
    let programs =
        [(5, "numad"), (8, "pjwd"), (9, "pjwd")].map(|(pid, name)| (Pid(pid), Uid(0), Comm::from(name)));
    input.conflicting_programs = conflicting_programs(programs, 1000);
    let mut bare = job("slurm:1", "0-3", 8, 8);
    bare.has_cpuset_controller = Some(false);
    input.jobs = vec![bare, job("slurm:2", "2-5", 1, 1), job("slurm:3", "0-15", 20, 20)];
    let version = DaemonStatus::Responsive {
        pid: Pid(2),
        version: "2".to_owned(),
        own_version: "1".to_owned(),
        observes: false,
        warnings: Vec::new(),
        lending: LendingStatus::Unknown,
    };
    for (daemon, code) in [
        (absent(), "no-warden"),
        (DaemonStatus::Unresponsive("it hangs".to_owned()), "mute-warden"),
        (version, "version"),
    ] {
        input.daemon = daemon;
        for has_systemd in [true, false] {
            input.host.has_systemd = has_systemd;
            for code in ["no-cpuset-controller", "overlap", "unbound", "oversubscribed", code] {
                assert_ne!(of(&input, code), [], "{code}");
            }
            let found = diagnose(&input);
            let named: Vec<&Finding> = found
                .iter()
                .filter(|finding| {
                    finding.remedy.contains("systemctl") || finding.remedy.contains("journalctl")
                })
                .collect();
            assert_eq!(named.is_empty(), !has_systemd, "{named:#?}");
        }
    }
}

#[test]
fn missing_kernel_features_and_hidden_processes_are_reported() {
    let mut input = node();
    input.host = HostFacts {
        has_psi: false,
        has_schedstat: false,
        no_fork_events_reason: Some("no events".to_owned()),
        isolated_cpus: cpu_set("4-7"),
        numa_balancing_enabled: Some(true),
        cpufreq_governors: BTreeMap::from([
            ("powersave".to_owned(), cpu_set("0-7")),
            ("performance".to_owned(), cpu_set("8-15")),
        ]),
        hides_processes: true,
        in_container: true,
        incomplete_scan_reason: Some("too many open files".to_owned()),
        ..input.host
    };
    input.jobs = vec![held("a", "0-1", GrantedBy::Warden)];
    input.caller_uid = Uid(1000);
    input.cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Unavailable { why: "nothing is mounted".to_owned() },
        affinity_persists: true,
        ..CpusetSupport::default()
    };
    for code in [
        "no-schedstat",
        "no-psi",
        "no-events",
        "isolated",
        "numa-balancing",
        "governors",
        "hidden",
        "container",
        "blind",
        "not-root",
        "no-cpusets",
    ] {
        let _ = only(&input, code);
    }
    input.cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Legacy,
        affinity_persists: false,
        ..CpusetSupport::default()
    };
    assert!(only(&input, "masks-forgotten").text.contains("before 6.2"));
}

#[test]
fn what_makes_lending_impossible_or_slow_is_a_fact() {
    let mut input = node();
    let fact = |input: &DiagnosisInput| {
        machine_facts(input).into_iter().find(|fact| fact.code == "lending").unwrap().text
    };
    input.cpuset_support.idle_priority =
        IdlePrioritySupport::Unavailable { why: "no cpu controller".to_owned() };
    assert!(fact(&input).contains("free cores only") && fact(&input).contains("no cpu controller"));
    input.cpuset_support.idle_priority = IdlePrioritySupport::Available;
    assert!(fact(&input).contains("the owner's again when it wakes up") && !fact(&input).contains("lazy"));
    input.host.preemption_model = None;
    assert!(
        fact(&input).contains("if debugfs is not mounted, mount") && !fact(&input).contains("root sees it")
    );
    input.caller_uid = Uid(1000);
    assert!(fact(&input).contains("unless the preemption model of the kernel is lazy (it is unknown: root"));
    input.host.preemption_model = Some("lazy".to_owned());
    input.host.has_btf = false;
    assert!(fact(&input).contains("half a tick") && fact(&input).contains("each 2 ms"), "{}", fact(&input));
}

#[test]
fn what_the_daemon_reports_of_lending_comes_before_what_the_machine_has() {
    let mut input = node();
    input.cpuset_support.idle_priority = IdlePrioritySupport::Available;
    let mut fact = |reported: LendingStatus| {
        if let DaemonStatus::Responsive { lending, .. } = &mut input.daemon {
            *lending = reported;
        }
        machine_facts(&input).into_iter().find(|fact| fact.code == "lending").unwrap().text
    };
    let off = fact(LendingStatus::Off("the configuration says lending.enabled = false".to_owned()));
    assert!(off.contains("free cores only") && off.ends_with("lending.enabled = false"), "{off}");
    let sampled = fact(LendingStatus::WithCpuTimeSamples("this process lacks CAP_BPF".to_owned()));
    assert!(sampled.contains("each 2 ms") && sampled.ends_with("lacks CAP_BPF"), "{sampled}");
    let reported = fact(LendingStatus::WithWakeupReports);
    assert!(reported.contains("when it wakes up: borrowers"), "{reported}");
    let unknown = fact(LendingStatus::Unknown);
    assert!(unknown.contains("as far as pjwd may load its BPF program"), "{unknown}");
}
