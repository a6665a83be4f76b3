//! Masks and cgroups are restored after a release, after a grant of a scheduler, and after a restart. Processes that
//! pjw did not change are not changed.

use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::job::{CpuRequest, GrantedBy};
use pjw_core::plan::{MaskAction, MaskActionKind};
use pjw_core::policy::{DaemonMode, ExhaustionPolicy};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::state::WardenState;

use crate::machine::{
    Machine, ROOT, SECOND, assign_of, cpu_set, in_cgroup, job, machine, machine_with_cpusets,
    regular_topology,
};

const SLURM_CGROUP: &str = "/system.slice/slurmstepd.scope/job_7";

/// Starts process 10 in the Slurm job 7, with the cpuset `cpus` if that is given.
fn slurm_job(m: &mut Machine, cpus: Option<&str>) {
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_CGROUP, Some(CpuRequest::Cores(2)));
    if let Some(cpus) = cpus {
        write_slurm_cpuset(m, cpus);
    }
}

fn write_slurm_cpuset(m: &mut Machine, cpus: &str) {
    m.world().write_cpuset(SLURM_CGROUP, Some(&cpu_set(cpus)));
}

/// Replaces the daemon by one that reads the journal, on a machine with this number of packages of four cores.
pub(crate) fn restart(m: &mut Machine, packages: u32) {
    let mut state = WardenState::new(regular_topology(packages, 1, 1, 4, 1), &m.policy.housekeeping_cpus);
    m.state.records().into_iter().for_each(|record| state.apply_record(record));
    m.state = state;
}

#[test]
fn a_released_job_of_a_scheduler_stays_known_and_gets_no_cores_until_it_is_assigned() {
    let mut m = machine();
    slurm_job(&mut m, None);
    m.settle();
    assert_eq!((m.grant("slurm:7"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()));
    m.release("slurm:7").unwrap();
    assert_eq!((m.grant("slurm:7"), m.effective_mask(10, 10)), ("-".into(), "0-7".into()));
    assert!(m.state.jobs[&job("slurm:7")].was_released && m.journaled_threads().is_empty());
    m.spawn(11, 10, 1001);
    assert!(m.settle().is_empty(), "a new process of the job gets no mask");
    restart(&mut m, 2);
    assert!(m.settle().is_empty(), "the next daemon changes no mask either");
    m.assign("slurm:7", 2, &[]).unwrap();
    assert_eq!(
        [m.effective_mask(10, 10), m.effective_mask(11, 11)],
        ["0-1", "0-1"],
        "until a user assigns it cores again"
    );
}

#[test]
fn a_job_that_a_prolog_reserved_ends_when_an_epilog_releases_it() {
    let mut m = machine();
    m.assign("lsf:7", 2, &[]).unwrap();
    m.spawn(10, 1, 1001);
    m.assign("lsf:7", 2, &[10]).unwrap();
    assert_eq!(m.effective_mask(10, 10), "0-1");
    m.release("lsf:7").unwrap();
    assert_eq!((m.grant("lsf:7"), m.effective_mask(10, 10)), ("-".into(), "0-7".into()));
    m.settle();
    assert!(m.state.jobs[&job("lsf:7")].was_released, "the job stays known while a process of it runs");
    m.exit(10);
    m.settle();
    assert!(m.state.jobs.is_empty());
    m.assign("lsf:7", 2, &[]).unwrap();
    m.settle();
    assert_eq!(m.grant("lsf:7"), "0-1", "a requeued job can be reserved again");
}

#[test]
fn a_grant_of_a_scheduler_stays_after_a_release() {
    let mut m = machine();
    slurm_job(&mut m, Some("2-3"));
    m.bind(10, 10, "2-3");
    m.settle();
    m.release("slurm:7").unwrap();
    assert_eq!(m.state.jobs[&job("slurm:7")].grant.as_ref().unwrap().granted_by, GrantedBy::Scheduler);
    assert_eq!(m.assign("a", 6, &[]).unwrap().grant.unwrap().cpus, cpu_set("0-1,4-7"), "2-3 stay granted");
}

#[test]
fn release_all_also_releases_jobs_found_meanwhile() {
    let mut m = machine();
    m.spawn(5, 1, 1001);
    slurm_job(&mut m, None);
    m.settle();
    m.assign("a", 2, &[5]).unwrap();
    m.command(Command::ReleaseAll { caller: ROOT }).unwrap();
    assert_eq!([m.effective_mask(5, 5), m.effective_mask(10, 10)], ["0-7", "0-7"]);
    assert!(m.settle().is_empty());
}

#[test]
fn a_job_leaves_cores_that_a_scheduler_grants_to_another_job() {
    let mut m = machine();
    m.spawn(20, 1, 1002);
    m.assign("a", 4, &[20]).unwrap();
    m.assign("rest", 4, &[]).unwrap();
    assert_eq!(m.effective_mask(20, 20), "0-3");
    slurm_job(&mut m, Some("0-3"));
    m.bind(10, 10, "0-3");
    m.settle();
    assert_eq!((m.grant("slurm:7"), m.grant("manual:a")), ("0-3".into(), "-".into()));
    assert_eq!(m.effective_mask(20, 20), "0-7", "it is not confined to the cores of another job");
    m.release("rest").unwrap();
    m.settle();
    assert_eq!((m.grant("manual:a"), m.effective_mask(20, 20)), ("4-7".into(), "4-7".into()));
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(20, 20), "0-7");
}

#[test]
fn a_mask_from_before_the_grant_is_restored_by_a_release_after_a_restart() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.clone_thread(10, 12);
    m.bind(11, 11, "0");
    m.bind(10, 12, "0");
    m.advance(1_000_000_000);
    m.assign("a", 1, &[10]).unwrap();
    assert_eq!(m.effective_mask(10, 10), "0");
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    assert_eq!(
        [m.effective_mask(10, 10), m.effective_mask(11, 11), m.effective_mask(10, 12)],
        ["0-7", "0", "0"]
    );
}

#[test]
fn after_a_restart_a_child_does_not_get_a_mask_that_its_parent_requested_after_its_birth() {
    let mut m = machine_with_cpusets(true);
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.advance(SECOND);
    m.bind(10, 10, "3,5");
    m.assign("a", 1, &[10]).unwrap();
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(11, 11)], ["3,5", "0-7"]);
}

#[test]
fn a_mask_that_equals_the_cpuset_is_put_back_after_a_restart() {
    for persists in [true, false] {
        let mut m = machine_with_cpusets(persists);
        m.spawn(10, 1, 0);
        m.bind(10, 10, "0-1");
        m.assign("a", 2, &[10]).unwrap();
        assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()));
        restart(&mut m, 2);
        m.settle();
        m.assign("a", 1, &[]).unwrap();
        m.release("a").unwrap();
        assert_eq!(m.effective_mask(10, 10), "0-1", "{persists}");
    }
}

#[test]
fn a_mask_that_the_cpuset_of_another_job_forbids_is_put_back_once_the_process_leaves_it() {
    let mut m = machine_with_cpusets(true);
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.bind(11, 11, "7");
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!(m.effective_mask(11, 11), "1");
    m.assign("b", 8, &[11]).unwrap();
    m.settle();
    m.release("b").unwrap();
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(11, 11)], ["0-7", "7"]);
}

#[test]
fn a_mask_that_was_restored_in_the_cpuset_is_restored_after_a_crash_that_follows_the_move_back() {
    let mut m = machine_with_cpusets(false);
    m.spawn(10, 1, 0);
    m.bind(10, 10, "1");
    m.assign("a", 2, &[10]).unwrap();
    let release = [Command::Release { job: job("a"), caller: ROOT }];
    let scan = m.state.scan_request(true);
    let _ = m.cycle(&scan, &release);
    assert_eq!(m.process(10).cgroup, "/");
    assert_eq!(m.effective_mask(10, 10), "0-7", "the kernel forgot the requested mask");
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "1");
}

#[test]
fn a_journaled_restore_after_the_kernel_forgot_the_mask_is_carried_out_by_the_next_daemon() {
    let mut m = machine_with_cpusets(false);
    m.spawn(10, 1, 0);
    m.bind(10, 10, "1");
    m.assign("a", 2, &[10]).unwrap();
    let mut next = WardenState::new(regular_topology(2, 1, 1, 4, 1), &m.policy.housekeeping_cpus);
    m.state.records().into_iter().for_each(|record| next.apply_record(record));
    let scan = m.state.scan_request(true);
    let release = m.cycle(&scan, &[Command::Release { job: job("a"), caller: ROOT }]);
    let after = m.scan();
    let restore = m.decide(&after, &[]);
    assert_eq!(restore.plan.mask_actions.len(), 1);
    release.records.into_iter().chain(restore.records).for_each(|record| next.apply_record(record));
    m.state = next;
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "1");
}

#[test]
fn the_masks_of_a_process_from_before_the_grant_are_its_own() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.settle();
    m.spawn(11, 10, 0);
    m.clone_thread(11, 12);
    m.bind(11, 11, "0");
    m.bind(11, 12, "0");
    m.assign("a", 1, &[10]).unwrap();
    m.spawn(13, 10, 0);
    m.settle();
    assert_eq!([m.effective_mask(10, 10), m.effective_mask(13, 13)], ["0", "0"]);
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    assert_eq!(
        [
            m.effective_mask(10, 10),
            m.effective_mask(11, 11),
            m.effective_mask(11, 12),
            m.effective_mask(13, 13)
        ],
        ["0-7", "0", "0", "0-7"]
    );
}

#[test]
fn a_thread_that_is_younger_than_the_grant_and_has_its_mask_gets_the_original_mask() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.clone_thread(11, 12);
    m.assign("a", 2, &[10]).unwrap();
    m.bind(11, 11, "0");
    m.settle();
    m.advance(1_000_000_000);
    m.clone_thread(11, 13);
    // The creator of the thread has ended. The mask of the first thread was set by that thread itself.
    m.bind(11, 13, "0-1");
    m.process(11).threads.remove(&Tid(12));
    m.settle();
    m.release("a").unwrap();
    assert_eq!([m.effective_mask(11, 11), m.effective_mask(11, 13)], ["0", "0-7"]);
}

#[test]
fn a_crash_between_record_and_action_loses_no_mask() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    let thread = m.journaled_threads()[0];
    let since = m.state.mask_entry(&thread).unwrap().journaled_since().unwrap();
    // Two recorded actions, neither of them carried out.
    for set in [cpu_set("0-2"), cpu_set("0-3")] {
        m.state.apply_record(Record::MaskSet { thread, before: cpu_set("0-7"), set, since, at: None });
    }
    restart(&mut m, 2);
    assert_eq!(m.effective_mask(10, 10), "0-1");
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(10, 10), "0-7");
}

#[test]
fn processes_to_restore_are_in_the_journal() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.state.apply_record(Record::Ended(job("a")));
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "0-7");
    assert!(m.state.processes_to_restore.is_empty() && m.journaled_threads().is_empty());
}

#[test]
fn members_of_a_job_without_record_are_restored() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    let records = m.state.records().into_iter().filter(|record| !matches!(record, Record::Job(_)));
    let mut state = WardenState::new(m.state.topology.clone(), &cpu_set(""));
    records.for_each(|record| state.apply_record(record));
    m.state = state;
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "0-7");
    m.assign("b", 2, &[10]).unwrap();
}

#[test]
fn a_grant_with_offline_cores_persists_over_a_restart() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("first", 2, &[]).unwrap();
    m.assign("a", 4, &[10]).unwrap();
    m.assign("b", 2, &[]).unwrap();
    assert_eq!((m.grant("a"), m.grant("b")), ("4-7".into(), "2-3".into()));
    m.release("first").unwrap();
    m.assign("a", 6, &[]).unwrap();
    assert_eq!(m.grant("a"), "0-1,4-7");
    let whole = m.state.topology.clone();
    restart(&mut m, 1);
    m.settle();
    assert_eq!((m.grant("a"), m.effective_mask(10, 10)), ("0-1".into(), "0-1".into()), "its online cores");
    m.state.set_topology(whole, &cpu_set(""));
    m.settle();
    assert_eq!((m.state.pool.pus_of(&job("a")), m.state.pool.free_cpus()), (cpu_set("0-1"), cpu_set("4-7")));
}

#[test]
fn the_timeout_of_a_reservation_restarts_when_its_job_is_empty() {
    let day = 24 * 3600 * 1_000_000_000;
    let mut m = machine();
    m.assign("a", 2, &[]).unwrap();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(3 * day);
    m.settle();
    m.exit(10);
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.grant("a"), "0-1");
    m.advance(day / 2);
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.grant("a"), "0-1");
    m.advance(day);
    m.settle();
    assert_eq!(m.grant("a"), "-");
}

#[test]
fn in_observe_mode_nothing_is_released() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.policy.mode = DaemonMode::Observe;
    assert_eq!(m.release("a"), Err(Refusal::ObserveOnly));
    assert_eq!(m.command(Command::ReleaseAll { caller: ROOT }), Err(Refusal::ObserveOnly));
    assert_eq!(m.grant("a"), "0-1");
}

#[test]
fn an_unprivileged_daemon_refuses_processes_of_other_users() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.policy.only_managed_user = Some(Uid(1001));
    let user_of_daemon = Caller { uid: Uid(1001), is_admin: true };
    let refused = Err(Refusal::NotDaemonsUser { pid: Pid(10), owner: Uid(0), user: Uid(1001) });
    assert_eq!(m.assign_as(user_of_daemon, "a", 1, &[10]), refused);
    assert!(m.state.jobs.is_empty());
}

#[test]
fn a_mask_of_pjw_that_a_cpuset_narrowed_still_counts_as_one_of_pjw_when_the_cpuset_grows() {
    let mut m = machine();
    m.spawn(7, 1, 0);
    let assign = AssignCommand { pids: vec![Pid(7)], ..assign_of("a", Some(CpuRequest::Cores(4))) };
    let snapshot = m.scan();
    let decision = m.decide(&snapshot, &[Command::Assign(assign)]);
    m.world().write_cpuset("/", Some(&cpu_set("2-3")));
    decision.plan.mask_actions.iter().for_each(|action| m.carry_out(action));
    m.settle();
    assert_eq!((m.grant("a"), m.effective_mask(7, 7)), ("0-3".into(), "2-3".into()));
    restart(&mut m, 2);
    m.world().write_cpuset("/", None);
    assert_eq!(m.effective_mask(7, 7), "0-3");
    assert!(m.settle().is_empty());
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(7, 7), "0-7");
}

#[test]
fn a_restore_that_was_not_attempted_is_made_by_the_release() {
    let mut m = machine();
    m.spawn(7, 1, 0);
    m.assign("a", 3, &[7]).unwrap();
    let thread = m.journaled_threads()[0];
    let (kind, why) = (MaskActionKind::Restore, String::new());
    let (current_mask, target_mask) = (cpu_set("0-1"), cpu_set("0-7"));
    let requested_mask = target_mask.clone();
    m.state.record_mask_not_attempted(&MaskAction {
        kind,
        job: job("manual:a"),
        thread,
        current_mask,
        target_mask,
        requested_mask,
        program_request: None,
        reason: why,
    });
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(7, 7), "0-7");
}

#[test]
fn a_mask_requested_after_pjw_had_set_another_one_is_journaled_before_a_cpuset_hides_it() {
    let mut m = machine_with_cpusets(true);
    m.policy.adopt_unassigned_processes = true;
    m.spawn(10, 1, 1001);
    m.spawn(11, 1, 1001);
    let mut records = Vec::new();
    for (id, pid) in [("a", 10), ("b", 11)] {
        m.assign(id, 2, &[pid]).unwrap();
        records.append(&mut m.records);
    }
    m.spawn(20, 1, 1001);
    m.settle();
    records.append(&mut m.records);
    assert_eq!(m.effective_mask(20, 20), "4-7", "it is kept off the cores of the two jobs of its user");
    m.bind(20, 20, "6-7");
    m.settle();
    records.append(&mut m.records);
    m.release("b").unwrap();
    records.append(&mut m.records);
    assert_eq!((m.member(20).as_str(), m.effective_mask(20, 20).as_str()), ("manual:a by Adopted", "0-1"));
    m.lose_state();
    records.into_iter().for_each(|record| m.state.apply_record(record));
    m.release("a").unwrap();
    assert_eq!(m.effective_mask(20, 20), "6-7");
}

#[test]
fn a_restore_that_a_cpuset_prevented_is_tried_again_after_the_second_attempt_to_widen_the_cpuset() {
    let mut m = machine_with_cpusets(true);
    slurm_job(&mut m, None);
    m.bind(10, 10, "7");
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "1");
    let mut commands = vec![Command::Release { job: job("slurm:7"), caller: ROOT }];
    for _ in 0..2 {
        m.advance(SECOND);
        let snapshot = m.scan();
        let decision = m.decide(&snapshot, &std::mem::take(&mut commands));
        assert!(!decision.plan.cpuset_actions.is_empty() && !decision.plan.mask_actions.is_empty());
        decision
            .plan
            .cpuset_actions
            .iter()
            .for_each(|action| m.state.cpusets.record_refusal(action, "no memory"));
        decision.plan.mask_actions.iter().for_each(|action| m.carry_out(action));
    }
    m.advance(SECOND);
    m.settle();
    assert_eq!(m.effective_mask(10, 10), "7");
}

/// The daemon is killed after it has moved the process into the cpuset. The cpuset hides that one thread is bound to a
/// core outside of it, and that the others are not bound. Only the mask of the bound thread is in the journal.
#[test]
fn after_a_restart_the_threads_of_a_process_do_not_get_the_mask_of_one_thread_that_is_bound() {
    let mut m = machine_with_cpusets(true);
    m.spawn(10, 1, 0);
    (11..14).for_each(|tid| m.clone_thread(10, tid));
    m.bind(10, 13, "6");
    m.settle();
    let scan = m.state.scan_request(true);
    let assign = AssignCommand { pids: [Pid(10)].into(), ..assign_of("a", Some(CpuRequest::Cores(2))) };
    let created = m.cycle(&scan, &[Command::Assign(assign)]);
    let moved = m.cycle(&created.next_scan.unwrap(), &[]);
    assert_eq!((moved.plan.mask_actions.len(), m.effective_mask(10, 13).as_str()), (0, "0-1"));
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    let masks = [10, 11, 12, 13].map(|tid| m.effective_mask(10, tid));
    assert_eq!(masks, ["0-7", "0-7", "0-7", "6"]);
}
