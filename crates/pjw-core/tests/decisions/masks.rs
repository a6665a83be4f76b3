//! The masks of threads: the conditions under which they are set, kept and restored.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::{CpuRequest, GrantedBy};
use pjw_core::plan::{MaskAction, MaskActionKind};
use pjw_core::snapshot::ProcessEvent;
use pjw_core::time::Nanos;
use pjw_sim::testing::assign_command;

use crate::machine::{Machine, ROOT, SECOND, assign_of, cpu_set, in_cgroup, job, machine};

#[test]
fn every_thread_of_a_member_is_confined_and_restored_on_release() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.spawn(12, 10, 0);
    m.assign("a", 2, &[10]).unwrap();
    for (pid, tid) in [(10, 10), (10, 11), (12, 12)] {
        assert_eq!(m.effective_mask(pid, tid), "0-1");
    }
    // The thread 13 and the process 14 inherited a mask of pjw, which is restored with the others.
    m.advance(SECOND);
    m.clone_thread(10, 13);
    m.spawn(14, 12, 0);
    assert!(m.settle().is_empty(), "a mask that is right is not written");
    m.release("a").unwrap();
    for (pid, tid) in [(10, 10), (10, 11), (12, 12), (10, 13), (14, 14)] {
        assert_eq!(m.effective_mask(pid, tid), "0-7", "thread {tid}");
    }
    assert!(m.journaled_threads().is_empty() && m.state.processes_to_restore.is_empty());
}

/// With another order, a daemon that is killed between two changes and loses its journal could leave a process of which
/// only other threads have masks of pjw. The next daemon would not name these masks, because most programs bind such
/// threads themselves.
#[test]
fn the_first_thread_of_a_process_is_confined_first_and_restored_last() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    // The kernel counts thread ids from the start again after the largest one.
    m.clone_thread(10, 7);
    m.clone_thread(10, 11);
    let tids =
        |actions: Vec<MaskAction>| actions.iter().map(|action| action.thread.tid.0).collect::<Vec<_>>();
    let (_, confined) = m.settle_with(&[Command::Assign(assign_command("a", 2, &[Pid(10)]))]);
    assert_eq!(tids(confined), [10, 7, 11]);
    let (_, restored) = m.settle_with(&[Command::Release { job: job("a"), caller: ROOT }]);
    assert_eq!(tids(restored), [7, 11, 10]);
}

#[test]
fn a_changed_mask_is_repaired_and_reported_once() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.bind(10, 10, "0-7");
    let done = m.settle();
    assert_eq!(done.iter().map(|action| action.kind).collect::<Vec<_>>(), [MaskActionKind::Repair]);
    assert_eq!(m.effective_mask(10, 10), "0-1");
}

#[test]
fn a_mask_that_a_program_requests_inside_the_grant_is_kept() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 4, &[10]).unwrap();
    m.bind(10, 10, "2");
    assert!(m.settle().is_empty());
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(10, 10), "2", "it is the program's own choice");
}

#[test]
fn a_reservation_of_a_prolog_yields_to_the_grant_of_the_scheduler() {
    let mut m = machine();
    m.assign("slurm:4", 2, &[]).unwrap();
    assert_eq!(m.grant("slurm:4"), "0-1", "the prolog has reserved cores before there is a process");
    let path = "/slurmstepd.scope/job_4";
    in_cgroup(m.spawn(10, 1, 1001), "slurm:4", path, Some(CpuRequest::Pus(2)));
    m.world().write_cpuset(path, Some(&cpu_set("4-5")));
    m.bind(10, 10, "4-5");
    m.settle();
    assert_eq!(m.grant("slurm:4"), "4-5");
    assert_eq!(m.state.jobs[&job("slurm:4")].grant.as_ref().unwrap().granted_by, GrantedBy::Scheduler);
    m.spawn(20, 1, 0);
    m.assign("other", 6, &[20]).unwrap();
    assert_eq!(m.grant("other"), "0-3,6-7", "the cores that the prolog reserved are free again");
    assert_eq!(m.effective_mask(10, 10), "4-5");
}

#[test]
fn four_ranks_bound_to_the_first_pus_get_one_pu_of_the_grant_each() {
    let mut m = machine();
    m.spawn(5, 1, 0);
    m.assign("other", 4, &[5]).unwrap();
    m.spawn(10, 1, 0);
    for rank in 0..4 {
        m.spawn(20 + rank, 10, 0);
        m.bind(20 + rank, 20 + rank, &rank.to_string());
    }
    m.assign("mpi", 4, &[10]).unwrap();
    let masks: Vec<String> = (20..24).map(|pid| m.effective_mask(pid, pid)).collect();
    assert_eq!(masks, ["4", "5", "6", "7"]);
    m.release("mpi").unwrap();
    let masks: Vec<String> = (20..24).map(|pid| m.effective_mask(pid, pid)).collect();
    assert_eq!(masks, ["0", "1", "2", "3"]);
}

/// The texts of the events about these changes of masks.
fn event_texts(m: &Machine, actions: Vec<MaskAction>) -> Vec<String> {
    m.mask_events(actions).into_iter().map(|event| event.text).collect()
}

#[test]
fn the_event_about_a_replaced_mask_names_the_cpus_that_the_program_asked_for_and_those_that_it_got() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(20, 10, 0);
    m.bind(20, 20, "7");
    let (_, confined) = m.settle_with(&[Command::Assign(assign_command("a", 2, &[Pid(10)]))]);
    let expected = "2 threads put on CPUs 0-1: for 1 of them, the program asked for CPU 7, which the job does not hold; \
                    CPU 1 instead";
    assert_eq!(event_texts(&m, confined), [expected]);
    for (requested, expected) in [
        ("5", "CPU 5, which the job does not hold; CPU 1 instead"),
        ("5", "CPU 5, which the job does not hold; CPU 1 instead"),
        ("0-3", "CPUs 0-3, of which the job does not hold CPUs 2-3"),
        ("0-7", "every CPU"),
    ] {
        m.advance(SECOND);
        m.bind(20, 20, requested);
        let repaired = m.settle();
        let expected = format!("1 thread put back on CPUs 0-1: the program asked for {expected}");
        assert_eq!(event_texts(&m, repaired), [expected]);
        assert!(m.settle().is_empty(), "nothing changes, and nothing is reported");
    }
    m.bind(20, 20, "0");
    assert!(m.settle().is_empty(), "a mask inside the grant is kept");
}

#[test]
fn the_event_about_a_mask_that_no_program_of_the_job_requested_names_only_the_cpus_of_the_job() {
    let mut m = machine();
    m.spawn(5, 1, 0);
    m.bind(5, 5, "7");
    m.spawn(10, 5, 0);
    m.spawn(11, 1, 0);
    assert_eq!([10, 11].map(|pid| m.effective_mask(pid, pid)), ["7", "0-7"], "inherited, and not restricted");
    let (_, confined) = m.settle_with(&[Command::Assign(assign_command("a", 2, &[Pid(10), Pid(11)]))]);
    assert_eq!(event_texts(&m, confined), ["2 threads put on CPUs 0-1"]);
}

#[test]
fn a_thousand_masks_that_are_replaced_in_one_cycle_are_one_event() {
    let mut m = machine();
    m.world().pid_max = 10_000;
    m.spawn(10, 1, 0);
    for tid in 1000..2000 {
        m.clone_thread(10, tid);
        m.bind(10, tid, &(4 + tid % 4).to_string());
    }
    let (_, confined) = m.settle_with(&[Command::Assign(assign_command("a", 4, &[Pid(10)]))]);
    assert_eq!(confined.len(), 1001, "each mask is changed once");
    let expected = "1001 threads put on CPUs 0-3: for 1000 of them, the program asked for CPUs 4-7, which the job does \
                    not hold";
    assert_eq!(event_texts(&m, confined), [expected]);
}

#[test]
fn the_mask_of_the_launcher_does_not_restrict_the_job() {
    let mut m = machine();
    m.spawn(5, 1, 0);
    m.bind(5, 5, "0");
    m.spawn(10, 5, 0);
    m.spawn(11, 10, 0);
    assert_eq!(m.effective_mask(11, 11), "0", "as a service with CPUAffinity= would start it");
    m.assign("a", 4, &[10]).unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(11, 11)], ["0-3", "0-3"]);
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(11, 11)], ["0", "0"]);
}

#[test]
fn hot_threads_are_pinned_and_cold_threads_float() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    for tid in 11..14 {
        m.clone_thread(10, tid);
    }
    m.assign("a", 4, &[10]).unwrap();
    for _ in 0..3 {
        m.run(&[11, 12]);
        m.settle();
    }
    assert_eq!(
        [
            m.effective_mask(10, 11),
            m.effective_mask(10, 12),
            m.effective_mask(10, 10),
            m.effective_mask(10, 13)
        ],
        ["0", "1", "0-3", "0-3"]
    );
    m.run(&[11, 12]);
    assert!(m.settle().is_empty(), "no pin moves without a gain");
    for _ in 0..4 {
        m.run(&[12]);
        m.settle();
    }
    assert_eq!([m.effective_mask(10, 11), m.effective_mask(10, 12)], ["0-3", "0-3"]);
}

#[test]
fn the_only_hot_thread_of_a_job_floats_so_that_its_program_counts_all_cpus_of_the_job() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 4, &[10]).unwrap();
    for _ in 0..8 {
        m.run(&[10]);
        assert!(m.settle().is_empty(), "a serial phase changes no mask");
    }
    m.clone_thread(10, 11);
    for _ in 0..3 {
        m.run(&[10, 11]);
        m.settle();
    }
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0", "1"]);
}

#[test]
fn the_child_of_a_pinned_thread_floats() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.assign("a", 4, &[10]).unwrap();
    for _ in 0..3 {
        m.run(&[10, 11]);
        m.settle();
    }
    assert_eq!(m.effective_mask(10, 10), "0");
    m.spawn(20, 10, 0);
    m.clone_thread(10, 21);
    m.settle();
    assert_eq!([m.effective_mask(20, 20), m.effective_mask(10, 21)], ["0-3", "0-3"]);
    m.release("a").unwrap();
    assert_eq!(
        [m.effective_mask(20, 20), m.effective_mask(10, 21), m.effective_mask(10, 10)],
        ["0-7", "0-7", "0-7"]
    );
}

#[test]
fn a_resize_moves_every_thread_with_the_grant() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.assign("a", 2, &[10]).unwrap();
    m.bind(10, 11, "1");
    m.settle();
    m.assign("a", 4, &[]).unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0-3", "1"]);
    m.assign("a", 1, &[]).unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0", "0"]);
}

#[test]
fn the_cpuset_of_a_scheduler_is_its_grant_and_a_job_of_pjw_gets_other_cores() {
    let mut m = machine();
    m.spawn(5, 1, 0);
    m.assign("mine", 2, &[5]).unwrap();
    assert_eq!(m.grant("mine"), "0-1");
    let path = "/slurm/uid_1001/job_7";
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", path, Some(CpuRequest::Cores(2)));
    m.bind(10, 10, "0-1");
    m.world().write_cpuset(path, Some(&cpu_set("0-1")));
    m.settle();
    assert_eq!([m.grant("slurm:7"), m.grant("mine")], ["0-1", "2-3"]);
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(5, 5)], ["0-1", "2-3"]);
}

#[test]
fn a_restart_keeps_pins_bindings_and_requested_masks() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.clone_thread(10, 12);
    m.assign("a", 4, &[10]).unwrap();
    m.bind(10, 12, "3");
    for _ in 0..3 {
        m.run(&[11, 12]);
        m.settle();
    }
    let masks = |m: &Machine| [10, 11, 12].map(|tid| m.effective_mask(10, tid));
    let before = masks(&m);
    assert_eq!(before[1].len(), 1, "it is pinned, because the bound thread is hot too: {before:?}");
    let records = m.state.records();
    let topology = m.state.topology.clone();
    m.state = pjw_core::state::WardenState::new(topology, &cpu_set(""));
    for record in records {
        m.state.apply_record(record);
    }
    m.run(&[11, 12]);
    assert!(m.settle().iter().all(|action| action.thread.tid.0 == 11), "only the pin may be changed");
    for _ in 0..3 {
        m.run(&[11, 12]);
        m.settle();
    }
    assert_eq!(masks(&m), before);
    m.release("a").unwrap();
    assert_eq!([10, 11, 12].map(|tid| m.effective_mask(10, tid)), ["0-7", "0-7", "3"]);
}

#[test]
fn a_mask_that_a_cpuset_narrows_is_set_only_once() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    // The cpuset of the process allows 0-3. The daemon does not know this cpuset.
    m.world().write_cpuset("/", Some(&cpu_set("0-3")));
    m.bind(10, 10, "0-3");
    m.assign("a", 8, &[10]).unwrap();
    assert_eq!(m.effective_mask(10, 10), "0-3");
    assert!(m.settle().is_empty());
    m.assign("a", 2, &[]).unwrap();
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(10, 10), "0-3");
    assert!(m.state.processes_to_restore.is_empty() && m.journaled_threads().is_empty());
}

#[test]
fn ranks_bound_to_one_pu_are_separated_while_other_pus_are_idle() {
    let mut m = machine();
    for pid in [10, 11, 12] {
        m.spawn(pid, 1, 0);
    }
    m.clone_thread(10, 20);
    m.assign("a", 3, &[10, 11, 12]).unwrap();
    for (pid, tid) in [(10, 10), (10, 20), (11, 11), (12, 12)] {
        m.bind(pid, tid, "0");
    }
    m.settle();
    let masks = |m: &Machine| [m.effective_mask(10, 10), m.effective_mask(11, 11), m.effective_mask(12, 12)];
    assert_eq!(masks(&m), ["0", "0", "0"], "idle threads disturb no thread");
    for _ in 0..4 {
        m.run(&[10, 11]);
        m.settle();
    }
    assert_eq!(masks(&m)[0], "0", "the process that was hot first stays");
    assert_ne!(masks(&m)[1], "0");
    assert_eq!(masks(&m)[2], "0", "an idle thread stays where it bound itself");
    m.run(&[10, 11]);
    assert!(m.settle().is_empty(), "no thread is moved again");
    m.release("a").unwrap();
    assert_eq!(masks(&m), ["0", "0", "0"], "a release restores their bindings");
}

#[test]
fn threads_that_their_program_bound_to_one_pu_are_not_moved() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.clone_thread(10, 12);
    m.assign("a", 3, &[10]).unwrap();
    m.bind(10, 10, "1");
    m.bind(10, 11, "1");
    // The masks of the threads differ, so the program binds its threads itself.
    m.bind(10, 12, "2");
    for _ in 0..4 {
        m.run(&[10, 11]);
        m.settle();
    }
    assert_eq!([10, 11, 12].map(|tid| m.effective_mask(10, tid)), ["1", "1", "2"]);
}

#[test]
fn the_mask_of_a_first_thread_that_is_a_zombie_is_not_changed() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.clone_thread(10, 11);
    m.process(10).threads.get_mut(&Tid(10)).unwrap().state = Some('Z');
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(10, 11)], ["0-7", "0-1"]);
    m.release("a").unwrap();
    assert!(m.state.processes_to_restore.is_empty());
}

#[test]
fn the_mask_of_a_process_that_was_scanned_before_it_joined_is_its_own() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    m.spawn(20, 1, 1001);
    m.settle();
    // The process requests exactly the mask of the job.
    m.bind(20, 20, "0-1");
    m.settle();
    m.policy.adopt_unassigned_processes = true;
    m.settle();
    assert_eq!(m.member(20), "manual:a by Adopted");
    m.release("a").unwrap();
    assert_eq!([10, 20].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-1"]);
}

#[test]
fn the_child_of_a_process_that_joins_with_its_own_mask_gets_the_mask_of_its_parent_by_a_release() {
    let mut m = machine();
    m.state.fork_events_complete_since = Some(Nanos(0));
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    // The process requests exactly the mask of the job.
    m.spawn(20, 1, 1001);
    m.bind(20, 20, "0-1");
    m.settle();
    let join = AssignCommand { pids: vec![Pid(20)], ..assign_of("a", Some(CpuRequest::Cores(2))) };
    let scan = m.state.scan_request(true);
    let next_scan = m.cycle(&scan, &[Command::Assign(join)]).next_scan.unwrap();
    // The fork event of the child is read before the masks of its parent.
    let at = Nanos(m.now());
    let fork = ProcessEvent::Fork { parent: Pid(20), creator: Tid(20), child: Pid(21), at };
    m.state.apply_process_events(&[fork]);
    m.advance(1);
    m.spawn(21, 20, 1001);
    let _ = m.cycle(&next_scan, &[]);
    m.settle();
    assert_eq!(m.member(21), "manual:a by Parent");
    m.release("a").unwrap();
    assert_eq!([10, 20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-1", "0-1"]);
}

#[test]
fn the_child_of_a_stray_that_is_kept_off_before_the_child_is_read_keeps_the_mask_of_its_parent() {
    let mut m = machine();
    m.state.fork_events_complete_since = Some(Nanos(0));
    for (pid, id) in [(10, "a"), (11, "b")] {
        m.spawn(pid, 1, 1001);
        m.assign(id, 2, &[pid]).unwrap();
    }
    m.policy.adopt_unassigned_processes = true;
    m.advance(SECOND);
    // The process requests exactly the mask of the first job.
    m.spawn(20, 1, 1001);
    m.bind(20, 20, "0-1");
    let scan = m.state.scan_request(true);
    let next_scan = m.cycle(&scan, &[]).next_scan.unwrap();
    // The fork event of the child is read before the masks of its parent. The parent gets its mask before the child is
    // read.
    let at = Nanos(m.now());
    let fork = ProcessEvent::Fork { parent: Pid(20), creator: Tid(20), child: Pid(21), at };
    m.state.apply_process_events(&[fork]);
    m.advance(1);
    m.spawn(21, 20, 1001);
    let _ = m.cycle(&next_scan, &[]);
    let outside_jobs = m.effective_mask(20, 20);
    assert_eq!((m.grant("a").as_str(), m.effective_mask(21, 21).as_str()), ("0-1", "0-1"));
    assert_ne!(outside_jobs, "0-1");
    m.settle();
    assert_eq!([20, 21].map(|pid| m.effective_mask(pid, pid)), [&*outside_jobs; 2]);
    m.policy.adopt_unassigned_processes = false;
    m.settle();
    assert_eq!([20, 21].map(|pid| m.effective_mask(pid, pid)), ["0-1", "0-1"]);
}
