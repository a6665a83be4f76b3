//! Two made-up looks, and what they tell.

use std::sync::Arc;

use super::*;
use crate::job::{Amount, Source};
use crate::policy::Mode;
use crate::process::{CgroupId, Comm};
use crate::reconcile::reconcile;
use crate::snapshot::{Cgroup, Claims, Moment, Nanos, Scope, UnixMillis};
use crate::topology::{Regular, Topology};

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
        allowed,
    }
}

fn process(pid: u32, uid: u32, claims: Claims, threads: Vec<Thread>) -> (Pid, Seen<Process>) {
    let process = Process {
        id: ProcessId { pid: Pid(pid), start: StartTime(50) },
        parent: Pid(1),
        group: Pid(pid),
        session: Pid(pid),
        uid: Uid(uid),
        comm: Comm::from("x"),
        kernel: false,
        mask: Some("0-7".parse().unwrap()),
        cgroup: Some(Arc::from("/")),
        marks: None,
        claims: Some(claims),
        threads: Some(threads),
        quiet_until: None,
    };
    (Pid(pid), Seen::Here(process))
}

fn of_job(cgroup: bool) -> Claims {
    let job = JobId::new(Source::Slurm, "1").unwrap();
    let amount = Some(Amount::Cores(2));
    let mark = Mark::Cgroup(JOB.to_owned());
    let claims = if cgroup { vec![Claim { job, mark, amount }] } else { Vec::new() };
    Claims { role: Role::Ordinary, claims }
}

fn look(at: u64, cpuset: Option<&str>, processes: Vec<(Pid, Seen<Process>)>) -> Snapshot {
    let cgroup = Cgroup {
        id: CgroupId { inode: 7, path: JOB.to_owned() },
        cpus: cpuset.map(|cpus| cpus.parse().unwrap()),
        populated: true,
        cpuset: None,
    };
    Snapshot {
        scope: Scope::Full,
        taken: Moment { since_boot: Nanos(at), wall: UnixMillis(0) },
        online: "0-7".parse().unwrap(),
        processes: processes.into_iter().collect(),
        cgroups: BTreeMap::from([(JOB.to_owned(), Seen::Here(cgroup))]),
        asked: Vec::new(),
        blind: None,
    }
}

/// What both looks tell of the jobs and of the others.
fn watched(before: &Snapshot, after: &Snapshot) -> (Vec<JobSeen>, Vec<Bystander>) {
    let shape =
        Regular { packages: 1, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 8, pus_per_core: 1 };
    let mut state = WardenState::new(Topology::regular(shape), &CpuSet::new());
    let policy = Policy { mode: Mode::Observe, pin: false, own_pid: Some(Pid(99)), ..Policy::default() };
    for snapshot in [before, before, after] {
        let decision = reconcile(&mut state, snapshot, &[], &policy);
        decision.plan.actions.iter().for_each(|action| state.not_applied(action));
    }
    let watch = Watch { state: &state, policy: &policy, before, after };
    assert_eq!(watch.span_ms(), 1000);
    (watch.jobs(&BTreeMap::new()), watch.bystanders())
}

#[test]
fn busy_is_who_ran_or_waited_while_it_was_watched() {
    let before =
        vec![process(10, 1001, of_job(true), vec![thread(10, 50, 5 * SECOND, 0), thread(11, 51, 7, 0)])];
    let after = vec![process(
        10,
        1001,
        of_job(true),
        vec![
            thread(10, 50, 5 * SECOND + SECOND / 5, SECOND / 2),
            thread(11, 51, 7, 0),
            // Born meanwhile: all it ran counts. Old and not looked at before: nothing is known.
            thread(12, 1050, SECOND / 2, 0),
            thread(13, 52, 900 * SECOND, 0),
            Thread { state: 'Z', ..thread(14, 53, 900 * SECOND, 0) },
        ],
    )];
    let (jobs, others) = watched(&look(10 * SECOND, None, before), &look(11 * SECOND, None, after));
    let wanted: Vec<u32> = jobs[0].threads.iter().map(|thread| thread.wanted).collect();
    assert_eq!(wanted, [700, 0, 500, 0]);
    assert_eq!((jobs[0].threads[0].ran, jobs[0].busy(), jobs[0].processes), (200, 2, 1));
    assert_eq!(others, []);
}

#[test]
fn what_a_scheduler_granted_is_held_and_what_a_warden_would_give_is_not() {
    let processes = || vec![process(10, 1001, of_job(true), vec![thread(10, 50, 0, 0)])];
    let see = |cpuset| {
        watched(&look(10 * SECOND, cpuset, processes()), &look(11 * SECOND, cpuset, processes())).0.remove(0)
    };
    let granted = see(Some("4-5"));
    assert_eq!(granted.holds, Some(("4-5".parse().unwrap(), GrantedBy::Scheduler)));
    assert_eq!(granted.would_get, None);
    let free = see(None);
    assert_eq!(free.holds, None);
    assert_eq!(free.would_get.map(|cpus| cpus.len()), Some(2));
    assert_eq!(free.amount, Some(Amount::Cores(2)));
}

#[test]
fn a_member_that_left_the_cgroup_is_outside_and_helpers_are_staff() {
    let swept = vec![process(10, 1001, of_job(false), vec![]), process(11, 1001, of_job(true), vec![])];
    let inside = vec![process(10, 1001, of_job(true), vec![]), process(11, 1001, of_job(true), vec![])];
    let helper = Claims { role: Role::Helper(Source::Slurm), claims: Vec::new() };
    let staff = [
        process(20, 0, helper.clone(), vec![]),
        process(21, 1001, helper, vec![]),
        process(99, 0, Claims::default(), vec![]),
    ];
    let after = swept.into_iter().chain(staff).collect();
    let (jobs, others) = watched(&look(10 * SECOND, None, inside), &look(11 * SECOND, None, after));
    assert_eq!(jobs[0].outside, [Pid(10)], "it is still a member");
    let told: Vec<(u32, bool)> = others.iter().map(|other| (other.pid.0, other.staff)).collect();
    assert_eq!(
        told,
        [(20, true), (21, false)],
        "a user's own program is no helper, and the doctor is nobody"
    );
    assert_eq!(others[0].threads.len(), 1, "without threads the first one's mask tells");
}
