//! Lending: jobs of the class besteffort borrow free cores, and cores that jobs of the class guaranteed leave idle.

mod explained;
mod free_cores;
mod frozen;
mod grace_periods;
mod idle_priority;
mod owner_threads;
mod random_steps;
mod restarts;
mod shared_cores;
mod unrecorded;
mod without_process;

use std::time::Duration;

use pjw_core::audit::audit_grants;
use pjw_core::command::{AssignCommand, Command, Reply};
use pjw_core::core_map::core_map;
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetHierarchy, CpusetSupport, EnforcementMethod, IdlePrioritySupport};
use pjw_core::event::EventKind;
use pjw_core::explain::explain_job;
use pjw_core::ids::Pid;
use pjw_core::job::{CpuRequest, Ownership, PriorityClass};
use pjw_core::lending::would_change_loans;
use pjw_core::policy::{DaemonMode, LendingPolicy, Policy, StarvedPolicy};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::state::WardenState;
use pjw_core::state::lending::UsedCores;
use pjw_core::time::Nanos;
use pjw_core::topology::Topology;
use pjw_core::within_job::NumaNodeRule;

use crate::machine::{ALICE, Machine, ROOT, SECOND, assign_of, cpu_set, job, machine_with, regular_topology};

/// A policy that lends, on a node where idle priority and freezing work.
fn lending_policy() -> Policy {
    let cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Unified,
        affinity_persists: true,
        idle_priority: IdlePrioritySupport::Available,
        can_freeze: true,
    };
    Policy {
        cpuset_support,
        lending: LendingPolicy { enabled: true, ..LendingPolicy::default() },
        ..Policy::default()
    }
}

fn lending_machine() -> Machine {
    machine_with(regular_topology(2, 1, 1, 4, 1), lending_policy())
}

fn assign_class(
    m: &mut Machine,
    id: &str,
    class: PriorityClass,
    cores: u32,
    pids: &[u32],
) -> Result<Reply, Refusal> {
    let pids = pids.iter().copied().map(Pid).collect();
    let class = Some(class);
    m.command(Command::Assign(AssignCommand { class, pids, ..assign_of(id, Some(CpuRequest::Cores(cores))) }))
}

/// A guaranteed job `web` of six cores, with process 10, and a besteffort job `batch` for at most eight cores, with
/// process 20.
fn web_and_batch() -> Machine {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    m
}

/// The owner uses so many cores for so many seconds, with a sample and a cycle each second.
fn web_uses(m: &mut Machine, used: u32, seconds: u64) {
    for _ in 0..seconds {
        sample(m, used, "");
        m.settle();
        m.advance(SECOND);
    }
    sample(m, used, "");
    m.settle();
}

/// The owner uses so many cores fully and leaves the others idle. `lent_cpus` are the lent PUs on which it runs.
fn in_use(cores: u32, lent_cpus: CpuSet) -> UsedCores {
    UsedCores { in_use: cores, too_busy_to_lend: cores, lent_cpus }
}

fn sample(m: &mut Machine, used: u32, runs_on: &str) {
    let now = Nanos(m.now());
    m.state.lending.record_use(&job("web"), in_use(used, cpu_set(runs_on)), 6, now);
}

fn lent(m: &Machine) -> String {
    m.state.pool.lent_cpus().to_string()
}

fn ownership(m: &Machine, id: &str) -> Option<Ownership> {
    Some(m.state.grant_of(&job(id))?.ownership)
}

#[track_caller]
fn assert_sound(m: &Machine) {
    assert_eq!(audit_grants(&m.state, &m.policy), []);
}

#[test]
fn a_besteffort_job_runs_on_free_cores_and_leaves_them_to_others() {
    let mut m = web_and_batch();
    assert_eq!((m.grant("web").as_str(), m.grant("batch").as_str()), ("0-5", "6-7"));
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed));
    assert_eq!(
        m.state.pool.free_cpus(),
        cpu_set("6-7"),
        "the cores stay free for jobs with cores of their own"
    );
    m.spawn(30, 1, 0);
    m.assign("normal", 1, &[30]).unwrap();
    assert_eq!((m.grant("normal").as_str(), m.grant("batch").as_str()), ("6", "7"));
    m.release("normal").unwrap();
    assert_eq!(m.grant("batch"), "6-7");
    assert_sound(&m);
}

#[test]
fn idle_cores_of_an_owner_beyond_the_buffer_are_lent_after_lend_after() {
    let mut m = web_and_batch();
    web_uses(&mut m, 1, 1);
    assert_eq!(lent(&m), "", "one second is less than lend_after");
    web_uses(&mut m, 1, 1);
    // Six cores, one in use, one as a buffer: four.
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("2-5", "2-7"));
    assert!(m.events.iter().any(|event| event.kind == EventKind::Lent), "{:?}", m.events);
    assert_eq!(m.state.pool.pus_of(&job("web")), cpu_set("0-5"), "the owner stays the owner");
    assert_sound(&m);
}

#[test]
fn a_borrower_that_wants_no_core_is_not_frozen_while_one_is_free() {
    let mut m = web_and_batch();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    m.command(Command::Want { job: job("batch"), cores: Some(0), caller: ROOT }).unwrap();
    assert_eq!((ownership(&m, "batch"), m.grant("batch").len()), (Some(Ownership::Borrowed), 1));
    assert_sound(&m);
}

#[test]
fn threads_that_run_leave_a_core_before_threads_that_sleep() {
    let mut m = lending_machine();
    m.policy.enforcement = EnforcementMethod::Affinity;
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    (21..26).for_each(|tid| m.clone_thread(20, tid));
    for _ in 0..3 {
        m.run(&[23, 25]);
        m.settle();
    }
    m.spawn(30, 1, 0);
    let job = AssignCommand { pids: [Pid(30)].into(), ..assign_of("normal", Some(CpuRequest::Cores(1))) };
    let (_, actions) = m.settle_with(&[Command::Assign(job)]);
    let of_batch = actions.iter().filter(|action| action.thread.process.pid == Pid(20));
    let order: Vec<u32> = of_batch.map(|action| action.thread.tid.0).collect();
    // The first thread of a process leaves all PUs of the machine before the others in any case.
    assert_eq!(order, [20, 23, 25, 21, 22, 24]);
}

#[test]
fn at_most_at_once_cores_are_lent_in_each_lend_after() {
    let mut m = lending_machine();
    m.policy.lending.cores_at_once = 2;
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 0, 2);
    assert_eq!(lent(&m), "4-5");
    web_uses(&mut m, 0, 1);
    assert_eq!(lent(&m), "4-5");
    web_uses(&mut m, 0, 1);
    assert_eq!(lent(&m), "2-5");
}

#[test]
fn cores_come_back_at_once_when_the_owner_uses_more() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    sample(&mut m, 3, "");
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!(lent(&m), "2-3", "three in use and one as a buffer: two of six may be lent");
    let kinds: Vec<EventKind> = m.events.iter().map(|event| event.kind).collect();
    assert!(kinds.contains(&EventKind::Revoked) && kinds.contains(&EventKind::Returned), "{kinds:?}");
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    assert_sound(&m);
}

#[test]
fn the_lent_cores_on_which_the_owner_runs_come_back_first() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    sample(&mut m, 3, "2-3");
    m.settle();
    assert_eq!(lent(&m), "4-5");
}

#[test]
fn a_core_on_which_the_owner_runs_is_exchanged_for_an_idle_one() {
    let mut m = web_and_batch();
    m.policy.lending.buffer_cores = 3;
    web_uses(&mut m, 0, 5);
    assert_eq!(lent(&m), "3-5");
    sample(&mut m, 0, "4");
    m.settle();
    assert_eq!(lent(&m), "2-3,5", "core 4 for core 2");
    sample(&mut m, 0, "2");
    m.settle();
    assert_eq!(lent(&m), "2-3,5", "at most one exchange in lend_after");
}

#[test]
fn a_demand_that_changes_all_the_time_moves_few_cores() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    let mut moves = 0;
    for step in 0..600u32 {
        let before = lent(&m);
        sample(&mut m, if step % 2 == 0 { 6 } else { 0 }, "");
        m.settle();
        moves += u32::from(lent(&m) != before);
        m.advance(SECOND / 10);
    }
    assert_eq!(moves, 1, "a core that is in use every 200 ms is not lent again in this minute");
}

#[test]
fn each_return_makes_the_next_lending_slower() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    web_uses(&mut m, 6, 1);
    assert_eq!(lent(&m), "");
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "", "lend_after is 4 s now");
    web_uses(&mut m, 0, 1);
    assert_eq!(lent(&m), "2-5");
}

#[test]
fn a_number_that_the_owner_wants_replaces_the_estimate() {
    let mut m = web_and_batch();
    let want = |m: &mut Machine, cores| {
        m.command(Command::Want { job: job("web"), cores, caller: ROOT }).unwrap();
    };
    want(&mut m, Some(4));
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "4-5", "four of six are wanted, so two are lent");
    want(&mut m, Some(6));
    assert_eq!(lent(&m), "", "back at once");
}

#[test]
fn only_whole_cores_are_lent() {
    let mut m = machine_with(regular_topology(1, 1, 1, 4, 2), lending_policy());
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 3, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 4, &[20]).unwrap();
    let now = |m: &Machine| Nanos(m.now());
    m.state.lending.record_use(&job("web"), in_use(0, CpuSet::new()), 3, now(&m));
    m.advance(3 * SECOND);
    m.state.lending.record_use(&job("web"), in_use(0, CpuSet::new()), 3, now(&m));
    m.settle();
    assert_eq!((m.grant("web").as_str(), lent(&m).as_str()), ("0-2,4-6", "1-2,5-6"));
    m.state.lending.record_use(&job("web"), in_use(1, cpu_set("5")), 3, now(&m));
    m.settle();
    assert_eq!(lent(&m), "2,6", "PU 5 is a sibling of PU 1, so core 2 stays lent");
}

#[test]
fn two_borrowers_share_evenly_and_a_third_gets_its_part() {
    let mut m = lending_machine();
    for (pid, id) in [(20, "a"), (21, "b"), (22, "c")] {
        m.spawn(pid, 1, 0);
        assign_class(&mut m, id, PriorityClass::Besteffort, 8, &[pid]).unwrap();
    }
    let sizes: Vec<u64> =
        ["a", "b", "c"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len() as u64).into();
    assert_eq!((sizes.iter().sum::<u64>(), *sizes.iter().min().unwrap()), (8, 2), "{sizes:?}");
    m.release("a").unwrap();
    let sizes = ["b", "c"].map(|id| m.state.grant_of(&job(id)).unwrap().cpus.len());
    assert_eq!(sizes, [4, 4]);
    assert_sound(&m);
}

#[test]
fn cores_are_borrowed_evenly_from_all_owners() {
    let mut m = lending_machine();
    m.policy.lending.buffer_cores = 0;
    m.policy.lending.cores_at_once = 1;
    for (pid, id) in [(10, "x"), (11, "y")] {
        m.spawn(pid, 1, 0);
        assign_class(&mut m, id, PriorityClass::Guaranteed, 4, &[pid]).unwrap();
    }
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 2, &[20]).unwrap();
    for _ in 0..4 {
        for id in ["x", "y"] {
            let now = Nanos(m.now());
            m.state.lending.record_use(&job(id), in_use(0, CpuSet::new()), 4, now);
        }
        m.settle();
        m.advance(SECOND);
    }
    assert_eq!(lent(&m), "3,7", "one of each");
}

#[test]
fn cores_of_owners_are_not_lent_without_idle_priority() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    m.policy.cpuset_support.idle_priority =
        IdlePrioritySupport::Unavailable { why: "no cpu controller".to_owned() };
    m.settle();
    assert_eq!(
        (lent(&m).as_str(), m.grant("batch").as_str()),
        ("", "6-7"),
        "free cores need no idle priority"
    );
}

#[test]
fn cores_of_a_normal_job_are_never_lent() {
    let mut m = lending_machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Normal, 6, &[10]).unwrap();
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    web_uses(&mut m, 0, 5);
    assert_eq!(m.grant("batch"), "6-7");
}

#[test]
fn hot_threads_of_an_owner_are_pinned_to_cores_that_are_not_lent() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    for _ in 0..4 {
        m.run(&[10]);
        sample(&mut m, 1, "");
        m.settle();
    }
    let member = m.state.members.get(&Pid(10)).unwrap();
    let pin = m.state.pinned_pu_of(member, pjw_core::ids::Tid(10)).unwrap();
    assert!(cpu_set("0-1").contains(pin), "{pin}");
}

#[test]
fn threads_of_a_borrower_are_not_pinned() {
    let mut m = web_and_batch();
    // The only hot thread of a job is never pinned.
    m.clone_thread(20, 21);
    for _ in 0..4 {
        m.run(&[20, 21]);
        m.settle();
    }
    let member = m.state.members.get(&Pid(20)).unwrap();
    assert_eq!(m.state.pinned_pu_of(member, pjw_core::ids::Tid(20)), None);
    assert_eq!(member.threads.values().next().unwrap().effective_mask, cpu_set("6-7"));
}

#[test]
fn a_job_that_changes_its_class_exchanges_its_cores() {
    let mut m = lending_machine();
    m.spawn(20, 1, 0);
    assign_class(&mut m, "a", PriorityClass::Normal, 2, &[20]).unwrap();
    assign_class(&mut m, "a", PriorityClass::Besteffort, 2, &[]).unwrap();
    assert_eq!((ownership(&m, "a"), m.state.pool.allocated_cpus()), (Some(Ownership::Borrowed), cpu_set("")));
    assert_sound(&m);
    assign_class(&mut m, "a", PriorityClass::Guaranteed, 2, &[]).unwrap();
    assert_eq!((ownership(&m, "a"), m.state.pool.allocated_cpus().len()), (Some(Ownership::Owned), 2));
    assert_eq!(m.state.pool.borrowed_pus().count(), 0);
    assert_sound(&m);
}

#[test]
fn a_job_that_gets_borrowed_free_cores_does_not_lend_them_before_it_was_sampled() {
    let mut m = lending_machine();
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    assert_eq!(m.grant("batch"), "0-7");
    m.spawn(10, 1, 0);
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 6, &[10]).unwrap();
    assert_eq!((lent(&m).as_str(), m.grant("batch").as_str()), ("", "6-7"));
    assert_sound(&m);
}

#[test]
fn what_an_owner_used_before_there_was_a_borrower_does_not_count() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 1);
    m.release("batch").unwrap();
    m.advance(60 * SECOND);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    assert_eq!(lent(&m), "", "the use of the owner in this minute is not known");
    web_uses(&mut m, 0, 2);
    assert_eq!(lent(&m), "2-5");
}

#[test]
fn requests_that_a_borrower_can_not_have_are_refused() {
    let mut m = lending_machine();
    let class = Some(PriorityClass::Besteffort);
    let besteffort = |id: &str, request| AssignCommand { class, ..assign_of(id, Some(request)) };
    let two = || CpuRequest::Cores(2);
    let refusal = |m: &mut Machine, command| m.command(Command::Assign(command)).unwrap_err().to_string();
    let cases = [
        (besteffort("a", CpuRequest::Exactly(cpu_set("0-1"))), "a CPU list"),
        (AssignCommand { isolated: Some(true), ..besteffort("a", two()) }, "an isolated partition"),
        (AssignCommand { bind_memory: Some(true), ..besteffort("a", two()) }, "bound memory"),
        (AssignCommand { within_job: Some(NumaNodeRule::Packed), ..besteffort("a", two()) }, "--within-job"),
        (besteffort("a", CpuRequest::Cores(0)), "0 cores"),
        (besteffort("slurm:7", two()), "belongs to a batch system"),
        (AssignCommand { caller: ALICE, ..besteffort("a", two()) }, "users may not take cores"),
    ];
    for (command, expected) in cases {
        let text = refusal(&mut m, command);
        assert!(text.contains(expected), "{text}");
    }
    assert!(m.state.jobs.is_empty());
}
