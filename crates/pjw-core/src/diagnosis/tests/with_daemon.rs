//! Findings that depend on what pjwd does and reports, for invented nodes.

use super::*;
use crate::basics::ids::{ProcessId, StartTime};
use crate::terms::own_cgroups::OwnCgroupNames;

#[test]
fn a_frozen_job_has_no_findings() {
    let mut input = node();
    // The masks of its threads have CPUs that other jobs hold.
    let frozen = ObservedJob {
        grant: Some((CpuSet::new(), GrantedBy::Warden)),
        enforcement: "cpuset".to_owned(),
        ..job("be", "0-1", 2, 0)
    };
    input.jobs = vec![frozen, held("own", "0-1", GrantedBy::Warden)];
    assert_eq!(diagnose(&input), []);
}

#[test]
fn housekeeping_is_advised_only_if_it_is_not_set() {
    let mut input = node();
    input.unassigned_processes = vec![other(30, 0, "systemd-journal", vec![thread(30, "0-15", 3, 23)])];
    input.interrupts = vec![Interrupt {
        number: 41,
        name: "eth0".to_owned(),
        target_cpus: cpu_set("3"),
        counts: BTreeMap::from([(Pu(3), 9)]),
    }];
    let remedies = |input: &DiagnosisInput| ["daemons", "interrupts"].map(|code| only(input, code).remedy);
    let [own, squeezed] = ["1-15", "0"].map(|cpus| held(&format!("j{cpus}"), cpus, GrantedBy::Warden));
    input.jobs = vec![own.clone(), squeezed.clone()];
    for remedy in remedies(&input) {
        assert!(remedy.contains("keep a core for the system"), "no CPU is kept: {remedy}");
    }
    input.housekeeping_cpus = cpu_set("0");
    let [daemons, interrupts] = remedies(&input);
    assert!(daemons.starts_with("keep the system on the housekeeping CPU 0: CPUAffinity=0 in"), "{daemons}");
    assert!(!daemons.contains("pjwd.toml"), "{daemons}");
    assert!(interrupts.starts_with("echo 0 > /proc/irq/41/smp_affinity_list"), "{interrupts}");
    let finding = only(&input, "daemons");
    assert_eq!((finding.cpus, finding.jobs), (cpu_set("1-15"), BTreeSet::from([own.id.clone()])));

    let by_scheduler = held("slurm:1", "0", GrantedBy::Scheduler);
    input.jobs = vec![own, by_scheduler];
    for remedy in remedies(&input) {
        assert!(remedy.starts_with("every CPU is a job's, also the housekeeping CPU 0"), "{remedy}");
        assert!(!remedy.contains("pjwd.toml"), "{remedy}");
    }
    input.jobs = vec![squeezed];
    for code in ["daemons", "interrupts"] {
        assert_eq!(of(&input, code), [], "no job has a CPU of its own");
    }
}

#[test]
fn a_failure_of_the_whole_daemon_comes_before_other_problems() {
    let mut input = node();
    input.jobs = vec![job("slurm:1", "0-3", 1, 1), job("slurm:2", "2-5", 1, 1)];
    let warning = |code: &str| Finding::problem(code, "it says so".to_owned(), "do it");
    if let DaemonStatus::Responsive { warnings, .. } = &mut input.daemon {
        *warnings = vec![warning("unserved"), warning("journal")];
    }
    let codes: Vec<String> = diagnose(&input).into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["journal", "overlap", "unserved"]);
    input.daemon = DaemonStatus::Unresponsive("it hangs".to_owned());
    assert_eq!(diagnose(&input)[0].code, "mute-warden");
}

fn orphaned(name: &str, daemon: &OwnCgroupNames) -> OrphanedJob {
    OrphanedJob {
        id: name.parse().unwrap(),
        owner: Uid(1001),
        daemon: daemon.clone(),
        cgroup: format!("{}/{name}", daemon.default_parent_path()),
        cpus: cpu_set("0-1"),
        processes: vec![ProcessId { pid: Pid(100), start: StartTime(5) }],
    }
}

#[test]
fn the_jobs_of_an_ended_daemon_are_a_problem_with_their_cgroups_and_the_remedy() {
    let mut input = node();
    input.daemon = absent();
    let (alone, beside) = (OwnCgroupNames::default(), OwnCgroupNames::for_additional_daemon(b"/tmp/state"));
    input.jobs = vec![held("n1", "0-1", GrantedBy::Warden)];
    input.orphaned_jobs = vec![orphaned("n1", &alone)];
    let finding = only(&input, "no-warden");
    assert_eq!(finding.severity, Severity::Problem);
    assert_eq!(
        finding.text,
        "the pjwd of 1 job has ended, and its cpuset still limits the job: manual:n1 (cgroup /pjw/n1)"
    );
    assert!(finding.remedy.starts_with("systemctl start pjwd: it takes it up again"), "{}", finding.remedy);
    assert!(finding.remedy.contains("pjwd --release-all as root"), "{}", finding.remedy);
    assert_eq!((finding.cpus, finding.pids), (cpu_set("0-1"), BTreeSet::from([Pid(100)])));
    input.host.has_systemd = false;
    let remedy = only(&input, "no-warden").remedy;
    assert!(remedy.starts_with("start pjwd again, as root: it takes it up again"), "{remedy}");

    input.orphaned_jobs = vec![orphaned("n1", &beside), orphaned("n2", &beside)];
    let Finding { text, remedy, .. } = only(&input, "no-warden");
    let path = beside.default_parent_path();
    assert!(text.contains("2 jobs") && text.ends_with(&format!("manual:n2 (cgroup {path}/n2)")), "{text}");
    assert!(
        remedy.starts_with("start pjwd again with --beside and its --state-dir: it takes them"),
        "{remedy}"
    );
    assert!(remedy.contains("pjwd --release-all --beside --state-dir DIR"), "{remedy}");

    // Two daemons that have ended, and a job of a batch system.
    input.orphaned_jobs.push(orphaned("n3", &alone));
    input.jobs.push(job("slurm:1", "4-7", 1, 1));
    let found = of(&input, "no-warden");
    let severities = found.iter().map(|finding| finding.severity);
    assert_eq!(severities.collect::<Vec<_>>(), [Severity::Problem, Severity::Problem, Severity::Advice]);
    assert!(found[2].text.contains("the processes of 1 job are not kept"), "{:?}", found[2]);
    input.daemon = answering(false);
    assert_eq!(of(&input, "no-warden").len(), 2, "another pjwd does not know the jobs");
}

#[test]
fn without_a_daemon_no_remedy_says_that_pjwd_puts_threads_back() {
    let mut input = node();
    let mut outside = held("a", "0-3", GrantedBy::Warden);
    outside.threads.push(thread(77, "2-9", 2, 0));
    input.jobs = vec![outside];
    assert!(only(&input, "outside").remedy.starts_with("pjwd puts them back"));
    input.daemon = absent();
    assert!(only(&input, "outside").remedy.starts_with("start pjwd: "));
}
