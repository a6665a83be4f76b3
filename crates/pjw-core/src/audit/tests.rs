//! Audits of broken states and plans that the warden itself never makes. tests/decisions/audit.rs has the
//! others.

use super::*;
use crate::basics::Pu;
use crate::basics::ids::Comm;
use crate::basics::ids::ProcessId;
use crate::basics::ids::StartTime;
use crate::basics::ids::ThreadId;
use crate::basics::ids::Tid;
use crate::basics::ids::Uid;
use crate::basics::time::Nanos;
use crate::basics::time::UnixMillis;
use crate::state::demand::ThreadDemand;
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::{MaskRequest, MaskWriter};
use crate::state::members::Member;
use crate::state::members::MemberThread;
use crate::state::{KnownProcess, jobs::Jobs};
use crate::terms::evidence::MembershipEvidence;
use crate::terms::job::EndCondition;
use crate::terms::job::Job;
use crate::terms::snapshot::BatchIdentity;
use crate::terms::snapshot::Process;
use crate::terms::{Grant, GrantedBy, JobRequest, Ownership, PriorityClass};
use crate::testing::{cpu_set, job, pjw_grant, process, regular_topology};
use std::string::String;
use std::vec::Vec;

/// Eight PUs, and a job on 0-1.
fn state() -> WardenState {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 8, 1), &CpuSet::new());
    state.pool.grant_available(&job("a"), &cpu_set("0-1"));
    let grant = pjw_grant(cpu_set("0-1"));
    let job =
        Job { grant: Some(grant), ..Job::new(job("a"), Uid(1001), EndCondition::Timeout, UnixMillis(0)) };
    state.jobs.insert(job);
    state
}

fn thread(pid: u32) -> ThreadId {
    let process = ProcessId { pid: Pid(pid), start: StartTime(7) };
    ThreadId { process, tid: Tid(pid), start: StartTime(7) }
}

/// The state after the job released a process with the mask 0-1, and the action that restores the mask.
fn restoring(pid: u32) -> (WardenState, MaskAction) {
    let mut state = state();
    let thread = thread(pid);
    let (before, set) = (cpu_set("0-7"), cpu_set("0-1"));
    let known = MemberThread {
        start: thread.start,
        comm: Comm::from("work"),
        state: 'S',
        last_cpu: Pu(0),
        effective_mask: set.clone(),
        demand: ThreadDemand::default(),
        mask_entry: Some(MaskEntry::from_record(MaskRequest {
            mask: set.clone(),
            original_mask: before.clone(),
            writer: MaskWriter::Warden,
            requested_at: Nanos(0),
        })),
    };
    let member = Member {
        id: thread.process,
        job: job("a"),
        evidence: MembershipEvidence::Registered,
        inherited_mask: None,
        was_new_at_join: true,
        numa_node: None,
        first_seen: None,
        threads: BTreeMap::from([(thread.tid, known)]),
    };
    state.processes_to_restore.insert(Pid(pid), member);
    let action = MaskAction {
        kind: MaskActionKind::Restore,
        job: job("a"),
        thread,
        current_mask: set,
        requested_mask: before.clone(),
        target_mask: before,
        program_request: None,
        reason: String::new(),
    };
    (state, action)
}

fn found(state: &WardenState, policy: &Policy, action: MaskAction) -> Vec<Violation> {
    audit(state, &Plan { mask_actions: vec![action], ..Plan::default() }, policy)
}

fn system(action: &MaskAction) -> Violation {
    let problem = MaskActionProblem::SystemProcess;
    Violation::InvalidMaskAction { job: job("a"), kind: "restore", thread: action.thread, problem }
}

#[test]
fn a_grant_off_the_machine_is_noticed_even_if_it_is_shared() {
    let mut state = state();
    state.jobs.update(&job("a"), |job| {
        let grant = job.grant.as_mut().unwrap();
        (grant.cpus, grant.is_shared) = (cpu_set("8-9"), true);
    });
    let found = audit(&state, &Plan::default(), &Policy::default());
    assert_eq!(found, [Violation::GrantOutsideMachine { job: job("a"), cpus: cpu_set("8-9") }]);
}

/// Eight PUs in four cores, 0 and 4 in the first one. The job `a` has two cores and may lend, and `b` borrows `cpus` of
/// the class besteffort.
fn lending(cpus: &str) -> WardenState {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 4, 2), &CpuSet::new());
    state.pool.grant_available(&job("a"), &cpu_set("0-1,4-5"));
    state.pool.set_borrowed(&job("b"), &cpu_set(cpus));
    let made = |id: &str, class, cores, grant| {
        let request = Some(JobRequest { class, ..JobRequest::with_core_count(cores) });
        let made = Job::new(job(id), Uid(1001), EndCondition::Timeout, UnixMillis(0));
        Job { grant: Some(grant), request, ..made }
    };
    state.jobs.insert(made("a", PriorityClass::Guaranteed, 2, pjw_grant(cpu_set("0-1,4-5"))));
    let borrowed = Grant { ownership: Ownership::Borrowed, ..pjw_grant(cpu_set(cpus)) };
    state.jobs.insert(made("b", PriorityClass::Besteffort, 4, borrowed));
    state
}

fn grants_of(state: &WardenState) -> Vec<Violation> {
    audit(state, &Plan::default(), &Policy::default())
}

#[test]
fn whole_cores_of_a_lender_and_free_cores_may_be_borrowed() {
    assert_eq!(grants_of(&lending("1-2,5-6")), []);
}

#[test]
fn a_core_of_a_job_that_does_not_lend_is_borrowed_wrongly() {
    let violation = [Violation::BorrowedFromNonLender { job: job("b"), cpus: cpu_set("1,5") }];
    type Change = fn(&mut Job);
    let changes: [Change; 4] = [
        |owner| owner.request.as_mut().unwrap().class = PriorityClass::Normal,
        |owner| owner.request.as_mut().unwrap().isolated = true,
        |owner| owner.grant.as_mut().unwrap().granted_by = GrantedBy::Scheduler,
        |owner| owner.grant.as_mut().unwrap().is_shared = true,
    ];
    for change in changes {
        let mut state = lending("1-2,5-6");
        state.jobs.update(&job("a"), change);
        assert!(grants_of(&state).contains(&violation[0]), "{:?}", grants_of(&state));
    }
}

#[test]
fn half_a_core_is_borrowed_wrongly() {
    let split = Violation::SplitCore { job: job("b"), cpus: cpu_set("2") };
    assert_eq!(grants_of(&lending("1-2,5")), [split]);
}

#[test]
fn a_borrower_whose_grant_is_not_what_the_ledger_says_is_noticed() {
    let mut state = lending("1-2,5-6");
    state.jobs.update(&job("b"), |borrower| borrower.grant.as_mut().unwrap().cpus = cpu_set("1-3,5-7"));
    let (granted, held) = (cpu_set("1-3,5-7"), cpu_set("1-2,5-6"));
    assert_eq!(grants_of(&state), [Violation::GrantDiffersFromPool { job: job("b"), granted, held }]);
}

#[test]
fn a_borrower_without_a_grant_or_without_a_job_borrows_nothing() {
    let mut state = lending("1-2,5-6");
    state.jobs.update(&job("b"), |borrower| borrower.grant = None);
    let (granted, held) = (CpuSet::new(), cpu_set("1-2,5-6"));
    assert_eq!(grants_of(&state), [Violation::GrantDiffersFromPool { job: job("b"), granted, held }]);

    let policy = Policy::default();
    let mut audit = GrantAudit::new(&state, &policy);
    state.jobs.remove(&job("b"));
    audit.update(&state, &[job("b")].into(), &policy);
    let unknown = |pu: u32| Violation::UnknownBorrower { pu: Pu(pu), job: job("b") };
    let expected = [1, 2, 5, 6].map(unknown);
    assert_eq!(audit.violations().cloned().collect::<Vec<_>>(), expected);
    state.pool.set_borrowed(&job("b"), &CpuSet::new());
    audit.update(&state, &BTreeSet::new(), &policy);
    assert_eq!(audit.violations().count(), 0);
}

#[test]
fn a_restore_of_a_saved_mask_passes() {
    let (state, action) = restoring(10);
    assert_eq!(found(&state, &Policy::default(), action), []);
}

#[test]
fn a_mask_is_restored_only_for_a_process_that_this_job_released() {
    let wrong: [fn(&mut WardenState, &mut MaskAction); 4] = [
        |state, _| state.processes_to_restore.clear(),
        |state, _| state.processes_to_restore.values_mut().for_each(|left| left.id.start.0 += 1),
        |_, action| action.job = "b".parse().unwrap(),
        |state, action| state.thread_mut(&action.thread).unwrap().mask_entry = None,
    ];
    for (case, spoil) in wrong.into_iter().enumerate() {
        let (mut state, mut action) = restoring(10);
        spoil(&mut state, &mut action);
        let found = found(&state, &Policy::default(), action);
        let is_wrong_restore = |violation: &Violation| {
            matches!(
                violation,
                Violation::InvalidMaskAction { problem: MaskActionProblem::WrongRestore(_), .. }
            )
        };
        assert!(found.len() == 1 && found.iter().all(is_wrong_restore), "case {case}: {found:?}");
    }
}

#[test]
fn process_one_and_the_warden_are_never_changed() {
    let (state, action) = restoring(1);
    assert_eq!(found(&state, &Policy::default(), action.clone()), [system(&action)]);
    let (state, action) = restoring(10);
    let policy = Policy { own_pid: Some(Pid(10)), ..Policy::default() };
    assert_eq!(found(&state, &policy, action.clone()), [system(&action)]);
    let policy = Policy { thaw_watcher_pid: Some(Pid(10)), ..Policy::default() };
    assert_eq!(found(&state, &policy, action.clone()), [system(&action)], "nor its second process");
}

#[test]
fn a_kernel_thread_is_never_changed() {
    let (mut state, action) = restoring(10);
    let process = Process {
        id: action.thread.process,
        parent: Pid(2),
        process_group: Pid(0),
        session: Pid(0),
        comm: Comm::from("kworker/0:1"),
        is_kernel_thread: true,
        ..process(action.thread.process.pid.0, 0)
    };
    let (batch_identity, first_seen) = (BatchIdentity::default(), Nanos(0));
    state.processes.insert(KnownProcess {
        process,
        batch_identity,
        first_seen,
        was_read_once: false,
        last_cgroup_change: None,
    });
    assert_eq!(found(&state, &Policy::default(), action.clone()), [system(&action)]);
}

#[test]
fn a_violation_names_the_job_to_drop_or_none_for_the_whole_plan() {
    let (state, mut action) = restoring(1);
    action.target_mask = cpu_set("3");
    let jobs: Vec<_> = found(&state, &Policy::default(), action)
        .iter()
        .map(|wrong| wrong.concerned_job().cloned())
        .collect();
    assert_eq!(jobs, [Some(job("a")), Some(job("a"))]);
    let mut state = state;
    state.jobs = Jobs::default();
    let found = audit(&state, &Plan::default(), &Policy::default());
    assert!(found.iter().all(|wrong| wrong.concerned_job().is_none()) && found.len() == 2, "{found:?}");
}

#[test]
fn a_check_of_what_changed_finds_what_a_check_of_everything_finds() {
    let policy = Policy::default();
    let mut state = WardenState::new(regular_topology(1, 1, 1, 4, 2), &cpu_set("0,4"));
    let mut audit = GrantAudit::new(&state, &policy);
    let holding = |name: &str, cpus: &str, shared| {
        let grant = Grant { is_shared: shared, ..pjw_grant(cpu_set(cpus)) };
        Job { grant: Some(grant), ..Job::new(job(name), Uid(1001), EndCondition::Timeout, UnixMillis(0)) }
    };
    type Change<'a> = &'a dyn Fn(&mut WardenState);
    let changes: [(Change<'_>, usize); 9] = [
        (&|state| drop(state.pool.grant_available(&job("a"), &cpu_set("1,5"))), 2),
        (&|state| state.jobs.insert(holding("a", "1,5", false)), 0),
        (&|state| state.jobs.insert(holding("b", "5-6", false)), 3),
        (&|state| state.jobs.insert(holding("b", "2,5", true)), 0),
        (&|state| drop(state.pool.grant_available(&job("b"), &cpu_set("2,6"))), 0),
        (&|state| state.jobs.insert(holding("b", "2", false)), 1),
        (&|state| state.jobs.insert(holding("b", "0,2,6", false)), 2),
        (&|state| drop(state.jobs.remove(&job("b"))), 2),
        (&|state| drop(state.pool.release(&job("b"))), 0),
    ];
    for (number, (change, expected)) in changes.into_iter().enumerate() {
        change(&mut state);
        let changed = state.jobs.take_changed_ids();
        audit.update(&state, &changed, &policy);
        let text = |violation: &Violation| format!("{violation:?}");
        let mut kept: Vec<String> = audit.violations().map(text).collect();
        let mut again: Vec<String> = audit_grants(&state, &policy).iter().map(text).collect();
        kept.sort();
        again.sort();
        assert_eq!(kept, again, "after change {number}");
        assert_eq!(kept.len(), expected, "after change {number}: {kept:?}");
    }
}
