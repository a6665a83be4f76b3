//! Findings that depend on what pjwd does and reports, for invented nodes.

use super::*;

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
