//! The jobs and processes that result from two invented scans. The scans are plain data: no kernel is simulated.

use std::borrow::ToOwned;
use std::sync::Arc;
use std::vec::Vec;

use super::*;
use crate::basics::ids::CgroupId;
use crate::basics::ids::Comm;
use crate::basics::time::Moment;
use crate::basics::time::Nanos;
use crate::basics::time::UnixMillis;
use crate::reconcile::reconcile;
use crate::terms::job::CpuRequest;
use crate::terms::job::JobSource;
use crate::terms::policy::DaemonMode;
use crate::terms::scan::ScanScope;
use crate::terms::snapshot::BatchIdentity;
use crate::terms::snapshot::Cgroup;
use crate::terms::snapshot::CgroupUsage;
use crate::testing::{self, regular_topology};

const SECOND: u64 = 1_000_000_000;
const JOB: &str = "/slurmstepd.scope/job_1";

fn thread(tid: u32, start: u64, run_ns: u64, wait_ns: u64) -> Thread {
    let (comm, allowed) = (Comm::from("x"), "0-7".parse().unwrap());
    Thread {
        tid: Tid(tid),
        start: StartTime(start),
        comm,
        state: 'S',
        last_cpu: Pu(3),
        run_ns,
        wait_ns,
        effective_mask: allowed,
    }
}

fn process(
    pid: u32,
    uid: u32,
    batch_identity: BatchIdentity,
    threads: Vec<Thread>,
) -> (Pid, Observed<Process>) {
    let process = Process {
        id: ProcessId { pid: Pid(pid), start: StartTime(50) },
        first_thread_mask: Some("0-7".parse().unwrap()),
        cgroup: Some(Arc::from("/")),
        batch_identity: Some(batch_identity),
        threads: Some(threads),
        ..testing::process(pid, uid)
    };
    (Pid(pid), Observed::Present(process))
}

fn of_job(cgroup: bool) -> BatchIdentity {
    let job = JobId::new(JobSource::Slurm, "1").unwrap();
    let cpu_request = Some(CpuRequest::Cores(2));
    let kind = JobIdAttribute::Cgroup(JOB.to_owned());
    let job_references =
        if cgroup { vec![JobReference { job, kind, cpu_request, tasks: None }] } else { Vec::new() };
    BatchIdentity { job_references, ..BatchIdentity::default() }
}

fn snapshot(at: u64, cpuset: Option<&str>, processes: Vec<(Pid, Observed<Process>)>) -> Snapshot {
    let cgroup = Cgroup {
        id: CgroupId { inode: 7, path: JOB.to_owned() },
        restricted_cpus: cpuset.map(|cpus| cpus.parse().unwrap()),
        populated: true,
        cpuset: None,
        usage: CgroupUsage::default(),
    };
    let taken_at = Moment { since_boot: Nanos(at), wall_clock: UnixMillis(0) };
    let processes = processes.into_iter().collect();
    let read = Snapshot::of_processes(ScanScope::Full, taken_at, "0-7".parse().unwrap(), processes);
    Snapshot { cgroups: BTreeMap::from([(JOB.to_owned(), Observed::Present(cgroup))]), ..read }
}

/// The jobs and the unassigned processes from both scans.
fn watched(first_scan: &Snapshot, second_scan: &Snapshot) -> (Vec<ObservedJob>, Vec<UnassignedProcess>) {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 8, 1), &CpuSet::new());
    let policy = Policy {
        mode: DaemonMode::Observe,
        pin_hot_threads: false,
        own_pid: Some(Pid(99)),
        ..Policy::default()
    };
    for snapshot in [first_scan, first_scan, second_scan] {
        let decision = reconcile(&mut state, snapshot, &[], &policy);
        decision.plan.mask_actions.iter().for_each(|action| state.record_mask_not_attempted(action));
    }
    let watch = ScanPair { state: &state, policy: &policy, first_scan, second_scan };
    assert_eq!(watch.scan_interval_ms(), 1000);
    (watch.observed_jobs(&BTreeMap::new()), watch.unassigned_processes())
}

#[test]
fn a_thread_that_ran_or_waited_between_the_scans_is_hot() {
    let before =
        vec![process(10, 1001, of_job(true), vec![thread(10, 50, 5 * SECOND, 0), thread(11, 51, 7, 0)])];
    let after = vec![process(
        10,
        1001,
        of_job(true),
        vec![
            thread(10, 50, 5 * SECOND + SECOND / 5, SECOND / 2),
            thread(11, 51, 7, 0),
            // A thread that started between the scans: all its run time counts. An old thread that was not
            // scanned before: no usage is known.
            thread(12, 1050, SECOND / 2, 0),
            thread(13, 52, 900 * SECOND, 0),
            Thread { state: 'Z', ..thread(14, 53, 900 * SECOND, 0) },
        ],
    )];
    let (jobs, others) = watched(&snapshot(10 * SECOND, None, before), &snapshot(11 * SECOND, None, after));
    let demand_permille: Vec<u32> = jobs[0].threads.iter().map(|thread| thread.demand_permille).collect();
    assert_eq!(demand_permille, [700, 0, 500, 0]);
    assert_eq!(
        (jobs[0].threads[0].run_permille, jobs[0].hot_thread_count(), jobs[0].process_count),
        (200, 2, 1)
    );
    assert_eq!(others, []);
}

#[test]
fn a_scheduler_grant_is_held_and_a_possible_grant_is_not() {
    let processes = || vec![process(10, 1001, of_job(true), vec![thread(10, 50, 0, 0)])];
    let see = |cpuset| {
        watched(&snapshot(10 * SECOND, cpuset, processes()), &snapshot(11 * SECOND, cpuset, processes()))
            .0
            .remove(0)
    };
    let granted = see(Some("4-5"));
    assert_eq!(granted.grant, Some(("4-5".parse().unwrap(), GrantedBy::Scheduler)));
    assert_eq!(granted.expected_cpus, None);
    let free = see(None);
    assert_eq!(free.grant, None);
    assert_eq!(free.expected_cpus.map(|cpus| cpus.len()), Some(2));
    assert_eq!(free.requested, Some(CpuRequest::Cores(2)));
}

#[test]
fn a_member_outside_its_cgroup_is_found_and_helpers_belong_to_the_scheduler() {
    let swept = vec![process(10, 1001, of_job(false), vec![]), process(11, 1001, of_job(true), vec![])];
    let inside = vec![process(10, 1001, of_job(true), vec![]), process(11, 1001, of_job(true), vec![])];
    let helper = BatchIdentity { role: BatchRole::Helper(JobSource::Slurm), ..BatchIdentity::default() };
    let of_scheduler = [
        process(20, 0, helper.clone(), vec![]),
        process(21, 1001, helper, vec![]),
        process(99, 0, BatchIdentity::default(), vec![]),
    ];
    let after = swept.into_iter().chain(of_scheduler).collect();
    let (jobs, others) = watched(&snapshot(10 * SECOND, None, inside), &snapshot(11 * SECOND, None, after));
    assert_eq!(jobs[0].pids_outside_cgroup, [Pid(10)], "it is still a member");
    let pids: Vec<(u32, bool)> =
        others.iter().map(|other| (other.pid.0, other.belongs_to_scheduler)).collect();
    assert_eq!(
        pids,
        [(20, true), (21, false)],
        "a user's own program is no helper, and the diagnosing process is left out"
    );
    assert_eq!(others[0].threads.len(), 1, "without threads the mask of the first thread is used");
}

#[test]
fn login_shells_and_programs_of_pjw_are_no_strays() {
    let named = |pid: u32, leader: u32, name: &str| {
        let (pid, mut observed) = process(pid, 1001, BatchIdentity::default(), vec![]);
        if let Observed::Present(process) = &mut observed {
            (process.comm, process.session) = (Comm::from(name), Pid(leader));
        }
        (pid, observed)
    };
    let processes = || {
        let shells = [named(30, 30, "bash"), named(31, 30, "bash"), named(32, 32, "sshd")];
        shells.into_iter().chain([named(33, 30, "pjwctl"), named(34, 34, "solver")]).collect()
    };
    let (_, others) =
        watched(&snapshot(10 * SECOND, None, processes()), &snapshot(11 * SECOND, None, processes()));
    let strays: Vec<u32> =
        others.iter().filter(|other| !other.is_expected_outside_jobs).map(|other| other.pid.0).collect();
    assert_eq!(strays, [31, 34], "a shell that leads no session is a script");
}
