//! Broken states and plans, made by hand: what tests/decisions/auditing.rs can't reach from outside, because the
//! warden's own decisions never lead there.

use super::*;
use crate::job::{Grant, Job, Lifetime};
use crate::membership::Evidence;
use crate::process::{Comm, ProcessId, StartTime, Tid, Uid};
use crate::snapshot::{Claims, Nanos, Process, UnixMillis};
use crate::state::{Known, Member};
use crate::topology::{Regular, Topology};
use crate::touch::Touch;

fn set(list: &str) -> CpuSet {
    list.parse().unwrap()
}

fn job() -> JobId {
    "a".parse().unwrap()
}

/// Eight PUs, and a job on 0-1.
fn state() -> WardenState {
    let shape =
        Regular { packages: 1, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 8, pus_per_core: 1 };
    let mut state = WardenState::new(Topology::regular(shape), &CpuSet::new());
    state.pool.claim(&job(), &set("0-1"));
    let grant = Grant {
        cpus: set("0-1"),
        granted_by: GrantedBy::Warden,
        shared: false,
        by_pus: false,
        since: Nanos(0),
        because: Vec::new(),
        runner_up: String::new(),
    };
    let job = Job { grant: Some(grant), ..Job::new(job(), Uid(1001), Lifetime::Reservation, UnixMillis(0)) };
    state.jobs.insert(job.id.clone(), job);
    state
}

fn thread(pid: u32) -> ThreadId {
    let process = ProcessId { pid: Pid(pid), start: StartTime(7) };
    ThreadId { process, tid: Tid(pid), start: StartTime(7) }
}

/// The state after the job let go of a process that it had put on 0-1, and what puts that back.
fn leaving(pid: u32) -> (WardenState, Action) {
    let mut state = state();
    let thread = thread(pid);
    let (before, set) = (set("0-7"), set("0-1"));
    state.touched.insert(thread, Touch::after(None, before.clone(), set.clone(), Nanos(0)));
    let member = Member {
        id: thread.process,
        job: job(),
        evidence: Evidence::Registered,
        inherited: None,
        met: None,
        threads: BTreeMap::new(),
    };
    state.leaving.insert(Pid(pid), member);
    let action = Action {
        kind: ActionKind::Restore,
        job: job(),
        thread,
        from: set,
        to: before,
        walled: false,
        why: String::new(),
    };
    (state, action)
}

fn found(state: &WardenState, policy: &Policy, action: Action) -> Vec<Violation> {
    audit(state, &Plan { actions: vec![action], ..Plan::default() }, policy)
}

fn system(action: &Action) -> Violation {
    Violation::OnTheSystem { job: job(), kind: "restore", thread: action.thread }
}

#[test]
fn a_grant_off_the_machine_is_noticed_even_if_it_is_shared() {
    let mut state = state();
    if let Some(grant) = state.jobs.get_mut(&job()).and_then(|job| job.grant.as_mut()) {
        (grant.cpus, grant.shared) = (set("8-9"), true);
    }
    let found = audit(&state, &Plan::default(), &Policy::default());
    assert_eq!(found, [Violation::OffTheMachine { job: job(), cpus: set("8-9") }]);
}

#[test]
fn what_puts_back_a_mask_is_sound() {
    let (state, action) = leaving(10);
    assert_eq!(found(&state, &Policy::default(), action), []);
}

#[test]
fn a_mask_is_put_back_only_where_this_job_let_go_of_this_very_process() {
    let wrong: [fn(&mut WardenState, &mut Action); 4] = [
        |state, _| state.leaving.clear(),
        |state, _| state.leaving.values_mut().for_each(|left| left.id.start.0 += 1),
        |_, action| action.job = "b".parse().unwrap(),
        |state, action| drop(state.touched.remove(&action.thread)),
    ];
    for (case, spoil) in wrong.into_iter().enumerate() {
        let (mut state, mut action) = leaving(10);
        spoil(&mut state, &mut action);
        let found = found(&state, &Policy::default(), action);
        assert!(matches!(found[..], [Violation::WrongRestore { .. }]), "case {case}: {found:?}");
    }
}

#[test]
fn process_one_and_the_warden_itself_are_never_touched() {
    let (state, action) = leaving(1);
    assert_eq!(found(&state, &Policy::default(), action.clone()), [system(&action)]);
    let (state, action) = leaving(10);
    let policy = Policy { own_pid: Some(Pid(10)), ..Policy::default() };
    assert_eq!(found(&state, &policy, action.clone()), [system(&action)]);
}

#[test]
fn a_kernel_thread_is_never_touched() {
    let (mut state, action) = leaving(10);
    let process = Process {
        id: action.thread.process,
        parent: Pid(2),
        group: Pid(0),
        session: Pid(0),
        uid: Uid::ROOT,
        comm: Comm::from("kworker/0:1"),
        kernel: true,
        mask: None,
        cgroup: None,
        marks: None,
        claims: None,
        threads: None,
        quiet_until: None,
    };
    state
        .processes
        .insert(Pid(10), Known { process, claims: Claims::default(), met: Nanos(0), fresh: false });
    assert_eq!(found(&state, &Policy::default(), action.clone()), [system(&action)]);
}

#[test]
fn a_violation_names_the_job_whose_actions_are_dropped_or_none_if_nothing_can_be_trusted() {
    let (state, mut action) = leaving(1);
    action.to = set("3");
    let jobs: Vec<_> =
        found(&state, &Policy::default(), action).iter().map(|wrong| wrong.job().cloned()).collect();
    assert_eq!(jobs, [Some(job()), Some(job())]);
    let mut state = state;
    state.jobs.clear();
    let found = audit(&state, &Plan::default(), &Policy::default());
    assert!(found.iter().all(|wrong| wrong.job().is_none()) && found.len() == 2, "{found:?}");
}
