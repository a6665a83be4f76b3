//! The findings for invented nodes. The nodes are plain data: no kernel is simulated.

use super::*;
use crate::basics::cpuset::CpuSet;
use crate::basics::cpuset::Pu;
use crate::basics::ids::Comm;
use crate::basics::ids::Pid;
use crate::basics::ids::Uid;
use crate::terms::cpuset_group::CpusetHierarchy;
use crate::terms::cpuset_group::CpusetSupport;
use crate::terms::job::CpuRequest;
use crate::terms::job::GrantedBy;
use crate::terms::job::JobId;
use crate::terms::job::JobSource;
use crate::testing::{cpu_set, regular_topology};
use std::borrow::ToOwned;
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::string::String;
use std::string::ToString;
use std::vec::Vec;

mod surroundings;
mod with_daemon;

/// Two packages with a NUMA node of eight cores each: CPUs 0-7 and 8-15.
fn node() -> DiagnosisInput {
    with_cores(8, 1)
}

fn with_cores(cores_per_l3: u32, pus_per_core: u32) -> DiagnosisInput {
    let topology = regular_topology(2, 1, 1, cores_per_l3, pus_per_core);
    DiagnosisInput {
        online: topology.cpus().clone(),
        topology,
        housekeeping_cpus: CpuSet::new(),
        scan_interval_ms: 1000,
        jobs: Vec::new(),
        orphaned_jobs: Vec::new(),
        unassigned_processes: Vec::new(),
        interrupts: Vec::new(),
        host: HostFacts {
            kernel_release: "6.12.0".to_owned(),
            cgroup_layout: "v2".to_owned(),
            cpuset_hierarchy: "cpusets in v2".to_owned(),
            has_psi: true,
            has_schedstat: true,
            no_fork_events_reason: None,
            has_btf: true,
            isolated_cpus: CpuSet::new(),
            nohz_full_cpus: CpuSet::new(),
            numa_balancing_enabled: Some(false),
            autogroup_enabled: None,
            preemption_model: Some("full".to_owned()),
            smt_state: "on".to_owned(),
            cpufreq_governors: BTreeMap::new(),
            has_systemd: true,
            in_container: false,
            hides_processes: false,
            incomplete_scan_reason: None,
        },
        conflicting_programs: Vec::new(),
        schedulers: Vec::new(),
        cpuset_support: CpusetSupport {
            hierarchy: CpusetHierarchy::Unified,
            affinity_persists: true,
            ..CpusetSupport::default()
        },
        daemon: answering(false),
        configuration_problems: Vec::new(),
        caller_uid: Uid::ROOT,
        first_person_uid: 1000,
    }
}

fn answering(observes: bool) -> DaemonStatus {
    let version = "1".to_owned();
    let (own_version, lending) = (version.clone(), LendingStatus::Unknown);
    DaemonStatus::Responsive { pid: Pid(2), own_version, version, observes, warnings: Vec::new(), lending }
}

fn absent() -> DaemonStatus {
    DaemonStatus::Absent("pjwd is not running".to_owned())
}

fn thread(pid: u32, allowed: &str, cpu: u32, permille: u32) -> ObservedThread {
    ObservedThread {
        pid: Pid(pid),
        effective_mask: cpu_set(allowed),
        last_cpu: Pu(cpu),
        demand_permille: permille,
        run_permille: permille,
    }
}

/// A job of user 1001, whose threads may run on `allowed`, the first `hot` of them hot.
fn job(name: &str, allowed: &str, threads: u32, hot: u32) -> ObservedJob {
    let first = cpu_set(allowed).first().unwrap_or(Pu(0)).0;
    let threads =
        (0..threads).map(|n| thread(100 + n, allowed, first, if n < hot { 990 } else { 0 })).collect();
    ObservedJob {
        id: name.parse().unwrap(),
        owner: Uid(1001),
        requested: Some(CpuRequest::Cores(2)),
        grant: None,
        expected_cpus: None,
        process_count: 1,
        threads,
        pids_outside_cgroup: Vec::new(),
        cgroup: None,
        has_cpuset_controller: None,
        enforcement: String::new(),
    }
}

fn held(name: &str, cpus: &str, granted_by: GrantedBy) -> ObservedJob {
    ObservedJob { grant: Some((cpu_set(cpus), granted_by)), ..job(name, cpus, 1, 1) }
}

fn other(pid: u32, uid: u32, name: &str, threads: Vec<ObservedThread>) -> UnassignedProcess {
    UnassignedProcess {
        pid: Pid(pid),
        uid: Uid(uid),
        comm: Comm::from(name),
        belongs_to_scheduler: false,
        is_expected_outside_jobs: false,
        threads,
    }
}

/// The only finding with this code.
#[track_caller]
fn only(input: &DiagnosisInput, code: &str) -> Finding {
    let mut found = of(input, code);
    assert_eq!(found.len(), 1, "{code}: {:#?}", diagnose(input));
    let finding = found.remove(0);
    assert!(!finding.remedy.is_empty(), "{finding:?}");
    finding
}

fn of(input: &DiagnosisInput, code: &str) -> Vec<Finding> {
    diagnose(input).into_iter().filter(|finding| finding.code == code).collect()
}

#[test]
fn a_healthy_node_has_no_findings() {
    let mut input = node();
    assert_eq!(diagnose(&input), []);
    input.jobs = vec![held("slurm:1", "0-3", GrantedBy::Scheduler), held("a", "8-11", GrantedBy::Warden)];
    assert_eq!(diagnose(&input), []);
    input.daemon = absent();
    input.jobs.clear();
    assert_eq!(diagnose(&input), [], "without jobs no daemon is needed");
}

#[test]
fn overlapping_jobs_are_reported_with_the_cpus() {
    let mut input = node();
    input.daemon = absent();
    input.jobs = vec![job("slurm:1", "0-3", 1, 1), job("slurm:2", "2-5", 1, 1), job("slurm:3", "8-9", 1, 1)];
    let finding = only(&input, "overlap");
    assert_eq!(finding.severity, Severity::Problem);
    assert_eq!(finding.cpus, cpu_set("2-3"));
    assert_eq!(finding.text, "CPUs 2-3 are given to slurm:1 and slurm:2 at once");
    assert!(finding.remedy.contains("systemctl start pjwd"));
    input.jobs =
        vec![held("slurm:1", "0-3", GrantedBy::Scheduler), held("slurm:2", "3", GrantedBy::Scheduler)];
    let finding = only(&input, "overlap");
    assert_eq!(finding.text, "CPU 3 is given to slurm:1 and slurm:2 at once");
    assert!(finding.remedy.contains("their scheduler"));
}

#[test]
fn many_jobs_on_the_same_cpus_are_one_finding() {
    let mut input = node();
    input.jobs = (0..500).map(|n| job(&format!("slurm:{n}"), "0-3", 1, 0)).collect();
    let finding = only(&input, "overlap");
    assert_eq!(finding.jobs.len(), 500);
    assert!(finding.text.len() < 200, "{}", finding.text);
    assert!(finding.text.contains("and 496 more"), "{}", finding.text);
}

#[test]
fn findings_of_a_kind_are_limited_and_the_rest_is_counted() {
    let mut input = node();
    input.jobs = (0..12)
        .map(|n| ObservedJob {
            requested: Some(CpuRequest::Pus(1)),
            ..job(&format!("slurm:{n}"), &n.to_string(), 4, 4)
        })
        .collect();
    let found = of(&input, "oversubscribed");
    assert_eq!(found.len(), MAX_FINDINGS_PER_CODE + 1);
    assert!(found.last().unwrap().text.starts_with("4 more"), "{found:#?}");
}

#[test]
fn unbound_jobs_are_a_problem_once_their_demand_exceeds_the_node() {
    let mut input = node();
    input.daemon = absent();
    input.jobs = vec![job("slurm:1", "0-15", 4, 4)];
    assert_eq!(of(&input, "unbound"), [], "alone, it disturbs no job");
    input.jobs.push(job("slurm:2", "0-15", 4, 4));
    let finding = only(&input, "unbound");
    assert_eq!(finding.severity, Severity::Advice);
    assert!(
        finding.text.starts_with("2 jobs (slurm:1 and slurm:2) may run on every CPU"),
        "{}",
        finding.text
    );
    input.jobs[1] = job("slurm:2", "0-15", 14, 14);
    let finding = only(&input, "unbound");
    assert_eq!(finding.severity, Severity::Problem);
    assert!(finding.text.ends_with("now 18 threads want 16 CPUs"), "{}", finding.text);
    input.daemon = answering(true);
    assert!(only(&input, "unbound").remedy.contains("mode = \"enforce\""));
}

#[test]
fn a_job_with_more_hot_threads_than_cpus_is_reported() {
    let mut input = node();
    input.jobs =
        vec![ObservedJob { threads: job("a", "0-1", 40, 3).threads, ..held("a", "0-1", GrantedBy::Warden) }];
    let finding = only(&input, "oversubscribed");
    assert_eq!(
        (finding.severity, finding.text.as_str()),
        (Severity::Advice, "3 threads of manual:a want a CPU most of the time, and it has 2 CPUs")
    );
    assert_eq!(finding.pids.len(), 3);
    input.jobs = vec![ObservedJob { requested: Some(CpuRequest::Pus(2)), ..job("slurm:1", "0-15", 6, 6) }];
    let finding = only(&input, "oversubscribed");
    assert_eq!(finding.severity, Severity::Problem, "it takes CPUs from others");
    assert_eq!(finding.text, "6 threads of slurm:1 want a CPU most of the time, and it asked for 2 CPUs");
    for (daemon, remedy) in [
        (answering(false), "pjwctl status shows why it holds no cores"),
        (answering(true), "pjwd changes nothing: set mode = \"enforce\""),
        (DaemonStatus::Unresponsive("it hangs".to_owned()), "pjwd does not answer"),
        (absent(), "start pjwd: it gives each job cores"),
    ] {
        let is_absent = matches!(daemon, DaemonStatus::Absent(_));
        input.daemon = daemon;
        let told = only(&input, "oversubscribed").remedy;
        assert!(told.contains(remedy) && told.contains("start fewer threads"), "{told}");
        assert_eq!(told.contains("start pjwd: "), is_absent, "{told}");
    }
    input.jobs = vec![job("slurm:1", "0-15", 60, 2)];
    assert_eq!(of(&input, "oversubscribed"), [], "idle threads need no CPU");
}

#[test]
fn two_mpirun_on_the_same_first_cpus_are_found_also_without_jobs() {
    let mut input = node();
    input.jobs = vec![job("slurm:1", "0", 4, 4), job("slurm:2", "0", 4, 4)];
    let finding = only(&input, "stacked");
    assert_eq!(
        finding.text,
        "8 hot threads are bound to CPU 0 (4 of slurm:1 and 4 of slurm:2), while CPUs 1-15 idle"
    );
    assert!(finding.remedy.contains("--bind-to none"));
    assert_eq!(of(&input, "overlap"), [], "it is the same thing");

    input.jobs.clear();
    let ranks = |pid| other(pid, 1001, "solver", vec![thread(pid, "0", 0, 990)]);
    input.unassigned_processes = vec![ranks(7), ranks(8)];
    assert!(only(&input, "stacked").text.contains("2 of no job"));
}

#[test]
fn only_a_stack_that_pjwd_spreads_is_promised_to_be_spread() {
    let mut input = node();
    input.daemon = answering(false);
    let threads = |pids: [u32; 2]| pids.map(|pid| thread(pid, "0", 0, 990)).to_vec();
    let spread = "pjwd spreads them";
    let job = |cpus, pids| ObservedJob { threads: threads(pids), ..held("a", cpus, GrantedBy::Warden) };
    input.jobs = vec![job("0-1", [7, 8])];
    assert!(only(&input, "stacked").remedy.starts_with(spread), "PU 1 of the job idles");
    input.jobs = vec![job("0-1", [7, 7])];
    let remedy = only(&input, "stacked").remedy;
    assert!(remedy.starts_with("one process: pjwd moves its threads in its next cycles if all"), "{remedy}");
    let mut full = job("0-1", [7, 8]);
    full.threads.push(thread(9, "1", 1, 990));
    input.jobs = vec![full];
    assert!(!only(&input, "stacked").remedy.starts_with(spread), "no PU of the job idles");
    input.jobs = vec![job("0-1", [7, 8])];
    input.daemon = answering(true);
    assert!(!only(&input, "stacked").remedy.starts_with(spread), "pjwd only observes");
    input.jobs = vec![job("0-1", [7, 7])];
    let remedy = only(&input, "stacked").remedy;
    assert!(remedy.starts_with("one process") && !remedy.contains("pjwd"), "{remedy}");
}

#[test]
fn a_stack_is_reported_only_if_other_cpus_are_idle() {
    let mut input = node();
    input.jobs =
        vec![ObservedJob { threads: job("a", "0-1", 3, 3).threads, ..held("a", "0-1", GrantedBy::Warden) }];
    assert_eq!(of(&input, "stacked"), [], "it is oversubscribed, which is its own doing");
    input.online = cpu_set("0-1");
    input.jobs = vec![
        job("slurm:1", "0", 2, 2),
        ObservedJob { threads: vec![thread(9, "1", 1, 990)], ..job("b", "1", 1, 1) },
    ];
    assert_eq!(of(&input, "stacked"), [], "nothing idles");
}

#[test]
fn two_processes_that_are_bound_to_one_whole_core_are_found_while_a_core_is_idle() {
    let mut input = with_cores(4, 2);
    let ranks = |masks: [&str; 2]| {
        [(7, masks[0], 0), (8, masks[1], 8)].map(|(pid, mask, cpu)| thread(pid, mask, cpu, 990))
    };
    let job =
        |masks| ObservedJob { threads: ranks(masks).to_vec(), ..held("a", "0-1,8-9", GrantedBy::Warden) };
    input.jobs = vec![job(["0,8", "0,8"])];
    let finding = only(&input, "stacked");
    assert!(
        finding.text.starts_with(
            "2 hot threads are bound to one core, CPUs 0,8 (2 of manual:a), while CPUs 1-7,9-15 idle"
        ),
        "{}",
        finding.text
    );
    assert!(finding.remedy.starts_with("pjwd spreads them"), "core 1 of the job idles");
    input.jobs = vec![job(["0", "0,8"])];
    only(&input, "stacked");
    input.jobs = vec![job(["0", "8"])];
    assert_eq!(of(&input, "stacked"), [], "they named single hardware threads");
    input.jobs =
        vec![ObservedJob { grant: Some((cpu_set("0,8"), GrantedBy::Warden)), ..job(["0,8", "0,8"]) }];
    assert_eq!(of(&input, "stacked"), [], "the core is all that the job holds");
    let team = [thread(7, "0,8", 0, 990), thread(7, "0,8", 8, 990)];
    input.jobs = vec![ObservedJob { threads: team.to_vec(), ..job(["0,8", "0,8"]) }];
    assert_eq!(of(&input, "stacked"), [], "the threads of one process share its core");
    input.online = cpu_set("0-1,8-9");
    let mut full = job(["0,8", "0,8"]);
    full.threads.push(thread(9, "1", 1, 990));
    input.jobs = vec![full];
    assert_eq!(of(&input, "stacked"), [], "no core idles");
}

#[test]
fn threads_outside_what_their_job_holds_are_found() {
    let mut input = node();
    let mut job = held("slurm:1", "0-3", GrantedBy::Scheduler);
    job.threads.push(thread(77, "2-9", 2, 0));
    input.jobs = vec![job, held("slurm:2", "8-9", GrantedBy::Scheduler)];
    let finding = only(&input, "outside");
    assert_eq!(finding.text, "1 thread of slurm:1 may run outside its CPUs 0-3: on CPUs 4-9");
    assert_eq!(finding.pids, BTreeSet::from([Pid(77)]));
    assert_eq!(of(&input, "overlap"), [], "the thread outside is reported once");
}

#[test]
fn members_outside_their_schedulers_cgroup_are_found() {
    let mut input = node();
    input.jobs = vec![ObservedJob {
        pids_outside_cgroup: vec![Pid(5), Pid(6)],
        ..held("slurm:1", "0-3", GrantedBy::Scheduler)
    }];
    let finding = only(&input, "outside-cgroup");
    assert!(finding.text.starts_with("2 processes of slurm:1 are outside"), "{}", finding.text);
    assert!(finding.remedy.starts_with("pjwctl explain 5;"));
}

#[test]
fn a_process_outside_cgroup_and_cpus_is_reported_once() {
    let mut input = node();
    let mut job = held("slurm:1", "0-3", GrantedBy::Scheduler);
    job.threads.push(thread(77, "0-15", 2, 0));
    job.pids_outside_cgroup = vec![Pid(77)];
    input.jobs = vec![job];
    let _ = only(&input, "outside");
    assert_eq!(of(&input, "outside-cgroup"), []);
    input.jobs[0].pids_outside_cgroup.push(Pid(78));
    let _ = only(&input, "outside-cgroup");
}

#[test]
fn jobs_of_a_stopped_scheduler_are_reported() {
    let mut input = node();
    let scheduler = |input: &DiagnosisInput| {
        machine_facts(input).into_iter().find(|fact| fact.code == "scheduler").unwrap().text
    };
    assert!(scheduler(&input).starts_with("none: "));
    input.jobs = vec![held("slurm:1", "0-3", GrantedBy::Scheduler)];
    assert_eq!(scheduler(&input), "none of its daemons runs here, but jobs of slurm do");
}

#[test]
fn an_unknown_core_count_is_reported_with_the_config_key() {
    let mut input = node();
    input.jobs = vec![ObservedJob { requested: None, ..job("lsf:1", "0-15", 1, 1) }];
    let finding = only(&input, "unknown-count");
    assert!(finding.remedy.contains("[sources.lsf]"), "{}", finding.remedy);
    input.caller_uid = Uid(1000);
    assert!(only(&input, "unknown-count").remedy.starts_with("look as root first"));
}

#[test]
fn split_cores_are_reported_once_per_pair_of_jobs() {
    // CPUs n and n + 8 are threads of one core.
    let mut input = with_cores(4, 2);
    input.jobs = vec![
        held("slurm:1", "0-2,8-9", GrantedBy::Scheduler),
        held("slurm:2", "3,10-11", GrantedBy::Scheduler),
    ];
    let finding = only(&input, "half-core");
    assert_eq!(finding.severity, Severity::Advice);
    assert_eq!(finding.text, "slurm:1 shares cores with slurm:2: CPU 10 next to its own");
    input.jobs.truncate(1);
    let finding = only(&input, "half-core");
    assert_eq!((finding.severity, finding.cpus), (Severity::Note, cpu_set("10")));
}

#[test]
fn a_job_on_two_nodes_that_would_fit_in_one_is_reported() {
    let mut input = node();
    input.jobs = vec![held("a", "6-9", GrantedBy::Warden)];
    let finding = only(&input, "spread");
    assert_eq!(finding.text, "manual:a lies on NUMA nodes 0 and 1 and would fit in one; node 0 has room");
    assert!(finding.remedy.contains("defrag"));
    input.jobs.push(held("b", "0-5", GrantedBy::Warden));
    input.jobs.push(held("c", "10-15", GrantedBy::Warden));
    assert_eq!(only(&input, "spread").severity, Severity::Note, "no node has room for it");
    input.jobs = vec![held("a", "0-9", GrantedBy::Warden)];
    assert_eq!(of(&input, "spread"), [], "it fits in none");
}

#[test]
fn a_scheduler_configured_for_cpusets_without_cpusets_is_a_problem() {
    let mut input = node();
    input.jobs = vec![ObservedJob { has_cpuset_controller: Some(false), ..job("slurm:1", "0-15", 1, 1) }];
    assert_eq!(only(&input, "no-cpuset-controller").severity, Severity::Note);
    let slurm = DetectedBatchSystem {
        name: "Slurm".to_owned(),
        binding: JobBinding::Cpusets,
        effect_on_pjw: String::new(),
    };
    input.schedulers = vec![slurm.clone()];
    let finding = only(&input, "no-cpuset-controller");
    assert_eq!(finding.severity, Severity::Problem);
    assert!(finding.remedy.contains("Delegate=yes"));
    input.schedulers.push(DetectedBatchSystem { name: "Kubernetes".to_owned(), ..slurm });
    assert!(only(&input, "several-schedulers").text.starts_with("Slurm and Kubernetes are all here"));
}

#[test]
fn warden_version_is_compared_and_its_warnings_are_reported_once() {
    let mut input = node();
    let id = JobId::new(JobSource::Manual, "a").unwrap();
    input.jobs = vec![ObservedJob {
        threads: job("a", "0-1", 3, 3).threads,
        enforcement: "affinity".to_owned(),
        ..held("a", "0-1", GrantedBy::Warden)
    }];
    let warning =
        |code: &str| Finding::new(Severity::Problem, code, "it says so".to_owned(), "do it").with_jobs([&id]);
    input.daemon = DaemonStatus::Responsive {
        pid: Pid(2),
        version: "1".to_owned(),
        own_version: "2".to_owned(),
        observes: false,
        warnings: vec![warning("oversubscribed"), warning("unserved")],
        lending: LendingStatus::Unknown,
    };
    assert!(only(&input, "version").text.contains("pjwd is version 1, pjwctl 2"));
    assert_eq!(only(&input, "unserved").text, "it says so");
    assert_ne!(only(&input, "oversubscribed").text, "it says so");
    assert!(only(&input, "no-wall").remedy.contains("pjwctl explain manual:a"));
    input.jobs[0].process_count = 0;
    assert_eq!(of(&input, "no-wall"), [], "its first process gets a cpuset");
    input.daemon = DaemonStatus::Unresponsive("it hangs".to_owned());
    assert_eq!(only(&input, "mute-warden").severity, Severity::Problem);
    input.daemon = absent();
    let _ = only(&input, "no-warden");
}

#[test]
fn the_most_urgent_findings_come_first() {
    let mut input = node();
    input.daemon = absent();
    input.host.has_psi = false;
    input.jobs = vec![job("slurm:1", "0-3", 1, 1), job("slurm:2", "2-5", 1, 1)];
    let severities: Vec<Severity> = diagnose(&input).into_iter().map(|finding| finding.severity).collect();
    assert!(severities.is_sorted() && severities.len() > 2, "{severities:?}");
}

#[test]
fn a_machine_of_8192_cpus_is_diagnosed() {
    let mut input = node();
    input.topology = regular_topology(16, 2, 8, 32, 1);
    input.online = input.topology.cpus().clone();
    input.jobs = (0..2048)
        .map(|n| held(&format!("slurm:{n}"), &format!("{}-{}", n * 4, n * 4 + 3), GrantedBy::Scheduler))
        .collect();
    assert_eq!(diagnose(&input), []);
    let facts = machine_facts(&input);
    assert!(facts.iter().any(|fact| fact.text.contains("8192 cores, CPUs 0-8191")), "{facts:?}");
}
