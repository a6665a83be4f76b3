//! The registry of cpusets: what is pending, and where processes return to.

use super::*;
use crate::basics::ids::Pid;
use crate::basics::ids::StartTime;
use crate::basics::ids::Uid;
use crate::state::warden::WardenState;
use crate::terms::CpusetRecord;
use crate::terms::cpuset_group::CgroupCreator;
use crate::terms::cpuset_group::CpusetSpec;
use crate::terms::{CpusetAction, CpusetChange};
use crate::testing::{cpu_set, regular_topology};

fn machine() -> CpuSet {
    cpu_set("0-7")
}

fn job_cpuset() -> JobCpuset {
    let spec = CpusetSpec::from_cpus(cpu_set("0-1"));
    JobCpuset {
        job: "manual:a".parse().unwrap(),
        creator: CgroupCreator::Warden,
        path: "/pjw/a".to_owned(),
        spec,
    }
}

#[test]
fn nothing_is_pending_once_no_change_is_tried_or_refused() {
    let mut cpusets = CpusetRegistry::default();
    assert!(cpusets.are_all_changes_complete());
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
    assert!(!cpusets.are_all_changes_complete(), "no scan has read it yet");
    cpusets.confirm_written_settings("/pjw/a");
    assert!(cpusets.are_all_changes_complete());
    let change =
        CpusetChange::Create { job_cpuset: job_cpuset(), owner: Uid(7), initial_processes: Vec::new() };
    let action = CpusetAction { job: job_cpuset().job, change, is_repair: false, reason: String::new() };
    cpusets.record_refusal(&action, "no memory");
    assert!(!cpusets.are_all_changes_complete(), "it is refused");
    cpusets.reset_failures();
    cpusets.apply_record(&CpusetRecord::Unwanted { path: "/pjw/a".to_owned() }, &machine(), Nanos(0));
    assert!(!cpusets.are_all_changes_complete(), "it is to go");
}

#[test]
fn a_refused_cpuset_is_written_again_even_if_it_has_its_pus() {
    let mut cpusets = CpusetRegistry::default();
    let is_written = |cpusets: &CpusetRegistry| {
        cpusets.cpuset_at("/pjw/a").is_some_and(|managed| managed.was_last_written_with(&job_cpuset()))
    };
    let change =
        CpusetChange::Create { job_cpuset: job_cpuset(), owner: Uid(7), initial_processes: Vec::new() };
    let action = CpusetAction { job: job_cpuset().job, change, is_repair: false, reason: String::new() };
    for _ in 0..3 {
        cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
        assert!(is_written(&cpusets));
        cpusets.record_refusal(&action, "systemd does not respond");
        cpusets.record_cpus_read("/pjw/a", &cpu_set("0-1"), Nanos(5));
        assert!(!is_written(&cpusets), "systemd may not know it");
        cpusets.reset_failures();
    }
    let known = cpusets.cpuset_at("/pjw/a").unwrap();
    assert_eq!(known.previous_cpus, [cpu_set("0-1")], "the attempts are not counted");
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(6));
    cpusets.record_outcome(&action, &CpusetOutcome::Done { effective: None });
    assert!(is_written(&cpusets));
}

#[test]
fn a_locked_process_keeps_its_original_cgroup_and_is_moved_back_later() {
    let mut cpusets = CpusetRegistry::default();
    let process = ProcessId { pid: Pid(7), start: StartTime(7) };
    let (from, to) = ("/pjw/a".to_owned(), "/session-1".to_owned());
    let moved = CpusetRecord::Moved { process, from: to.clone(), to: from.clone() };
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
    cpusets.apply_record(&moved, &machine(), Nanos(0));
    let change = CpusetChange::MoveBack { process, from, to };
    let action = CpusetAction { job: job_cpuset().job, change, is_repair: false, reason: String::new() };
    cpusets.record_outcome(&action, &CpusetOutcome::NotMoved { reason: "locked".to_owned() });
    assert_eq!(cpusets.move_error(process), Some("locked"));
    assert_eq!(cpusets.original_cgroup([process], "/pjw/a"), Some("/session-1"));
    cpusets.reset_failures();
    assert_eq!(cpusets.move_error(process), None, "it is tried again");
}

#[test]
fn a_process_that_was_locked_at_its_first_move_has_not_left_the_cpuset() {
    let mut cpusets = CpusetRegistry::default();
    let process = |pid| ProcessId { pid: Pid(pid), start: StartTime(u64::from(pid)) };
    let (from, to) = ("/session-1".to_owned(), "/pjw/a".to_owned());
    let action =
        |change| CpusetAction { job: job_cpuset().job, change, is_repair: false, reason: String::new() };
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
    for pid in [7, 8] {
        let moved = CpusetRecord::Moved { process: process(pid), from: from.clone(), to: to.clone() };
        cpusets.apply_record(&moved, &machine(), Nanos(0));
    }
    let move_in = action(CpusetChange::MoveIn { process: process(7), from, to });
    cpusets.record_outcome(&move_in, &CpusetOutcome::NotMoved { reason: "locked".to_owned() });
    assert!(!cpusets.has_been_inside(process(7), "/pjw/a"));
    cpusets.reset_failures();
    cpusets.record_outcome(&move_in, &CpusetOutcome::Done { effective: None });
    assert!(cpusets.has_been_inside(process(7), "/pjw/a"));
    // A locked process is left out of the initial processes of a scope.
    let initial_processes = vec![process(8)];
    let create =
        action(CpusetChange::Create { job_cpuset: job_cpuset(), owner: Uid::ROOT, initial_processes });
    cpusets.record_outcome(&create, &CpusetOutcome::Done { effective: None });
    assert!(!cpusets.has_been_inside(process(8), "/pjw/a"));
    cpusets.note_move(process(8), Some("/session-2"));
    assert!(!cpusets.has_been_inside(process(8), "/pjw/a"));
    cpusets.note_move(process(8), Some("/pjw/a/below"));
    assert!(cpusets.has_been_inside(process(8), "/pjw/a"));
}

#[test]
fn after_a_restart_a_process_that_is_where_it_was_before_its_move_has_not_been_inside() {
    let process = ProcessId { pid: Pid(7), start: StartTime(7) };
    let moved = CpusetRecord::Moved { process, from: "/session-1".to_owned(), to: "/pjw/a".to_owned() };
    let other = JobCpuset { job: "manual:b".parse().unwrap(), path: "/pjw/b".to_owned(), ..job_cpuset() };
    let records = [CpusetRecord::Created(job_cpuset()), CpusetRecord::Created(other), moved];
    for (cgroup, has_been_inside) in [
        (Some("/session-1"), false),
        (Some("/pjw/b"), false),
        (Some("/pjw/a"), true),
        (Some("/pjw/a/below"), true),
        (Some("/session-2"), true),
        (None, true),
    ] {
        let mut cpusets = CpusetRegistry::default();
        records.iter().for_each(|record| cpusets.apply_record(record, &machine(), Nanos(0)));
        cpusets.note_first_cgroup(process, cgroup);
        assert_eq!(cpusets.has_been_inside(process, "/pjw/a"), has_been_inside, "{cgroup:?}");
    }
}

#[test]
fn a_process_that_a_scan_finds_in_a_new_scope_stays_counted_as_moved_when_the_delayed_change_ends() {
    let mut state = WardenState::new(regular_topology(2, 1, 1, 4, 1), &CpuSet::new());
    let process = ProcessId { pid: Pid(7), start: StartTime(7) };
    let moved = CpusetRecord::Moved { process, from: "/session-1".to_owned(), to: "/pjw/a".to_owned() };
    for record in [CpusetRecord::Created(job_cpuset()), moved] {
        state.cpusets.apply_record(&record, &machine(), Nanos(0));
    }
    let initial_processes = vec![process];
    let change = CpusetChange::Create { job_cpuset: job_cpuset(), owner: Uid::ROOT, initial_processes };
    let action = CpusetAction { job: job_cpuset().job, change, is_repair: false, reason: String::new() };
    state.cpusets.record_outcome(&action, &CpusetOutcome::Delayed);
    assert!(!state.cpusets.has_been_inside(process, "/pjw/a"));
    state.cpusets.note_move(process, Some("/pjw/a"));
    let mut request = state.scan_request(true);
    state.note_finished_cpuset_changes(&[(action, CpusetOutcome::Done { effective: None })], &mut request);
    assert!(state.cpusets.has_been_inside(process, "/pjw/a"));
    assert!(state.cpusets.delayed_changes.is_empty());
}

#[test]
fn a_process_born_in_a_recreated_cpuset_returns_to_the_cgroup_of_its_first_processes() {
    let mut cpusets = CpusetRegistry::default();
    let process = |pid| ProcessId { pid: Pid(pid), start: StartTime(u64::from(pid)) };
    let moved = |pid, from: &str| CpusetRecord::Moved {
        process: process(pid),
        from: from.to_owned(),
        to: "/pjw/a".to_owned(),
    };
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
    cpusets.apply_record(&moved(7, "/session-1"), &machine(), Nanos(0));
    cpusets.apply_record(&moved(8, "/session-2"), &machine(), Nanos(0));
    assert_eq!(cpusets.original_cgroup([process(9)], "/pjw/a"), Some("/session-1"), "who came first");
    let original = cpusets.original_cgroup([process(9), process(8)], "/pjw/a");
    assert_eq!(original, Some("/session-2"), "its parent");
    cpusets.apply_record(&CpusetRecord::Created(job_cpuset()), &machine(), Nanos(0));
    cpusets.apply_record(
        &CpusetRecord::Origin { path: "/pjw/a".to_owned(), from: "/session-3".to_owned() },
        &machine(),
        Nanos(0),
    );
    cpusets.apply_record(&moved(10, "/session-3"), &machine(), Nanos(0));
    assert_eq!(cpusets.original_cgroup([process(9)], "/pjw/a"), Some("/session-3"));
    let mut again = CpusetRegistry::default();
    cpusets.records().iter().for_each(|record| again.apply_record(record, &machine(), Nanos(0)));
    assert_eq!(again.original_cgroup([process(9)], "/pjw/a"), Some("/session-3"), "also after a restart");
}

#[test]
fn pus_that_a_scan_read_are_an_earlier_value_of_a_cpuset_that_the_earlier_daemon_did_not_write() {
    let with_cpus = |cpus| {
        let spec = CpusetSpec::from_cpus(cpu_set(cpus));
        CpusetRecord::Created(JobCpuset { spec, ..job_cpuset() })
    };
    let mut cpusets = CpusetRegistry::default();
    cpusets.apply_record(&with_cpus("0-3"), &machine(), Nanos(0));
    cpusets.apply_record(&with_cpus("2-3"), &machine(), Nanos(0));
    // The earlier daemon ended between this record and the write.
    cpusets.record_cpus_read("/pjw/a", &cpu_set("0-3"), Nanos(5));
    cpusets.apply_record(&with_cpus("2-3"), &machine(), Nanos(6));
    let since: Vec<_> = cpusets.cpu_history("/pjw/a").unwrap().values_since(Nanos(6)).cloned().collect();
    assert_eq!(since, [cpu_set("2-3"), cpu_set("0-3")]);
}
