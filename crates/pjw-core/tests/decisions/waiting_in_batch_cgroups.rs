//! A process that a batch system tracks by its cgroup belongs to a job that waits for cores. It does not stay on the
//! cores of another job, or a warning names it.

use std::sync::Arc;

use pjw_core::cpuset_group::CpusetHierarchy;
use pjw_core::explain;
use pjw_core::ids::Pid;
use pjw_core::job::CpuRequest;
use pjw_core::plan::Warning;
use pjw_core::policy::{ExhaustionPolicy, Policy};

use crate::machine::{
    Machine, SECOND, cpu_set, in_cgroup, job, machine_with, policy_with_cpusets, regular_topology,
};

const SESSION: &str = "/user.slice/session-2.scope";
const SLURM_JOB: &str = "/system.slice/slurmstepd.scope/job_7";

/// A machine of eight cores with cpusets in this hierarchy, on which jobs wait if too few cores are free.
fn machine_where_jobs_wait(hierarchy: CpusetHierarchy) -> Machine {
    let policy = Policy { exhaustion_policy: ExhaustionPolicy::Wait, ..policy_with_cpusets(hierarchy, true) };
    machine_with(regular_topology(2, 1, 1, 4, 1), policy)
}

fn spawn_in_session(m: &Machine, pid: u32) {
    m.spawn(pid, 1, 1001).cgroup = SESSION.to_owned();
}

fn cgroup_of(m: &Machine, pid: u32) -> String {
    m.process(pid).cgroup.clone()
}

/// Lets Slurm move a process into the cgroup of job 7, as its module pam_slurm_adopt does for logins.
fn move_into_slurm_job(m: &Machine, pid: u32) {
    in_cgroup(m.process(pid), "slurm:7", SLURM_JOB, None);
    m.world().move_process(Pid(pid), SLURM_JOB);
}

/// The warnings about processes in the cpusets of other jobs.
fn not_moved_back(m: &Machine) -> Vec<Arc<Warning>> {
    let warnings = m.last.as_ref().unwrap().warnings.iter();
    warnings.filter(|warning| warning.code == "not-moved-back").cloned().collect()
}

/// Panics unless there is one warning about job b, with this text. Also panics unless the explanations of process 11
/// and of job b have this sentence.
#[track_caller]
fn check_named(m: &Machine, text: &str, sentence: &str) {
    let warnings = not_moved_back(m);
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert_eq!((warning.text.as_str(), warning.job.as_ref()), (text, Some(&job("b"))));
    assert_eq!(warning.remedy, "end it, or start it again outside of slurm:7");
    let of_job = explain::explain_job(&m.state, &m.policy, &m.state.jobs[&job("b")]);
    let of_process = explain::explain_process(&m.state, &m.policy, Pid(11));
    for reasons in [of_job, of_process] {
        assert!(reasons.iter().any(|reason| reason.contains(sentence)), "{reasons:?}");
        assert!(!reasons.iter().any(|reason| reason.contains("run unconfined")), "{reasons:?}");
    }
}

#[test]
fn a_process_of_a_waiting_job_in_the_narrowed_cgroup_of_a_batch_job_is_named_until_the_limit_ends() {
    let mut m = machine_where_jobs_wait(CpusetHierarchy::Systemd);
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.settle();
    assert_eq!(m.world().cpusets[SLURM_JOB], cpu_set("0-1"));
    [11, 12].into_iter().for_each(|pid| spawn_in_session(&m, pid));
    m.assign("b", 8, &[11, 12]).unwrap();
    assert_eq!([m.member(11), m.grant("b")], ["manual:b by Registered", "-"]);
    assert!(not_moved_back(&m).is_empty(), "nothing limits its processes");
    move_into_slurm_job(&m, 11);
    let sentence = "the cpuset of slurm:7 limits process 11 to CPUs 0-1";
    for _ in 0..2 {
        m.settle();
        assert_eq!([m.member(11), m.grant("b")], ["manual:b by Registered", "-"]);
        assert_eq!([cgroup_of(&m, 11), m.effective_mask(11, 11)], [SLURM_JOB, "0-1"]);
        let text = "process 11 of manual:b is limited to CPUs 0-1 of slurm:7: \
                    it is in the cgroup by which slurm tracks the processes of slurm:7";
        check_named(&m, text, sentence);
        m.advance(SECOND);
    }
    let of_other = explain::explain_process(&m.state, &m.policy, Pid(12));
    assert!(of_other.iter().any(|reason| reason.contains("its processes run unconfined")), "{of_other:?}");
    move_into_slurm_job(&m, 12);
    m.settle();
    let text = "process 11 and 1 more of manual:b are limited to CPUs 0-1 of slurm:7: \
                they are in the cgroup by which slurm tracks the processes of slurm:7";
    check_named(&m, text, sentence);
    m.release("slurm:7").unwrap();
    m.settle();
    assert!(!m.world().cpusets.contains_key(SLURM_JOB));
    assert!(not_moved_back(&m).is_empty(), "{:?}", not_moved_back(&m));
    assert_eq!([11, 12].map(|pid| cgroup_of(&m, pid)), [SLURM_JOB, SLURM_JOB]);
}

#[test]
fn a_process_of_a_waiting_job_in_a_cpuset_that_a_batch_system_wrote_is_named() {
    let mut m = machine_where_jobs_wait(CpusetHierarchy::Unified);
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.world().write_cpuset(SLURM_JOB, Some(&cpu_set("4-5")));
    m.settle();
    assert_eq!(m.grant("slurm:7"), "4-5");
    spawn_in_session(&m, 11);
    m.assign("b", 8, &[11]).unwrap();
    move_into_slurm_job(&m, 11);
    m.settle();
    assert_eq!([m.member(11), m.grant("b")], ["manual:b by Registered", "-"]);
    let text = "process 11 of manual:b is limited to CPUs 4-5 of slurm:7: \
                it is in the cgroup by which slurm tracks the processes of slurm:7";
    check_named(&m, text, "the cpuset of slurm:7 limits process 11 to CPUs 4-5");
    m.exit(11);
    m.settle();
    assert!(not_moved_back(&m).is_empty(), "{:?}", not_moved_back(&m));
}

/// Slurm tracks a process in a hierarchy of cgroup v1 without cpusets. Its job waits for cores.
#[test]
fn a_process_that_a_batch_system_tracks_in_another_hierarchy_leaves_the_cpuset_of_its_former_job() {
    const OTHER_HIERARCHY: &str = "/slurm/uid_1001/job_9";
    for hierarchy in [CpusetHierarchy::Legacy, CpusetHierarchy::Unified, CpusetHierarchy::Systemd] {
        let mut m = machine_where_jobs_wait(hierarchy);
        m.world().persistent_cgroups.insert(OTHER_HIERARCHY.to_owned());
        spawn_in_session(&m, 10);
        m.spawn(11, 10, 1001);
        m.assign("a", 2, &[10]).unwrap();
        m.settle();
        let inside = cgroup_of(&m, 10);
        assert_ne!(inside, SESSION);
        assert_eq!([m.member(11), cgroup_of(&m, 11)], ["manual:a by Parent", inside.as_str()]);
        in_cgroup(m.process(11), "slurm:9", OTHER_HIERARCHY, Some(CpuRequest::Cores(8)));
        m.process(11).cgroup = inside.clone();
        for _ in 0..2 {
            m.settle();
            assert_eq!([m.member(11), m.grant("slurm:9")], ["slurm:9 by Cgroup", "-"]);
            assert_eq!([10, 11].map(|pid| cgroup_of(&m, pid)), [inside.as_str(), SESSION]);
            assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7"]);
            assert!(not_moved_back(&m).is_empty(), "{:?}", not_moved_back(&m));
            m.advance(SECOND);
        }
    }
}

#[test]
fn a_process_that_masks_kept_on_the_cores_of_its_former_job_gets_its_mask_back_in_a_batch_job_that_waits() {
    let mut m = machine_where_jobs_wait(CpusetHierarchy::Unified);
    m.spawn(10, 1, 1001).cgroup = "/system.slice/x.service".to_owned();
    m.spawn(11, 10, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.settle();
    assert_eq!([m.member(11), m.effective_mask(11, 11)], ["manual:a by Parent", "0-1"]);
    in_cgroup(m.process(11), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(8)));
    m.settle();
    assert_eq!([m.member(11), m.grant("slurm:7")], ["slurm:7 by Cgroup", "-"]);
    assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-7"]);
    assert!(not_moved_back(&m).is_empty(), "{:?}", not_moved_back(&m));
}
