//! The usage of a job is added up while the job runs. When the job ends, it leaves a report.

use pjw_core::diagnosis::verdict::judge_ended_job;
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::CpuRequest;
use pjw_core::policy::{BindingPolicy, ExhaustionPolicy};
use pjw_core::ports::MachineInterface;
use pjw_core::record::Record;
use pjw_core::snapshot::{Observed, ProcessEvent};
use pjw_core::state::WardenState;
use pjw_core::time::Nanos;
use pjw_core::usage::JobReport;
use pjw_core::usage_times::{cgroups_with_peaks_to_read, read_cpu_times};

use crate::machine::{Machine, SECOND, in_cgroup, job, machine};

mod slow_scans;
mod sums_of_parents;

/// Seconds in which these threads run, each followed by the regular scan of the processes of jobs.
fn run(machine: &mut Machine, seconds: u32, busy: &[u32]) {
    for _ in 0..seconds {
        machine.run(busy);
        let scan = machine.state.scan_request(false);
        let decision = machine.cycle(&scan, &[]);
        machine.records.extend(decision.records);
    }
}

/// A machine with a job `a` of this number of cores and the process 20, which has four threads.
fn with_job(cores: u32) -> Machine {
    let mut machine = machine();
    machine.advance(5 * SECOND);
    machine.spawn(20, 1, 1001);
    (21..24).for_each(|tid| machine.clone_thread(20, tid));
    machine.assign("a", cores, &[20]).unwrap();
    machine
}

/// Ends process 20, and returns the only report.
fn end(machine: &mut Machine) -> JobReport {
    machine.exit(20);
    machine.settle();
    assert_eq!(machine.reports.len(), 1, "{:?}", machine.reports);
    machine.reports.remove(0)
}

fn seconds(ns: u64) -> u64 {
    (ns + SECOND / 2) / SECOND
}

#[test]
fn a_job_that_uses_its_cores_is_reported_as_fine() {
    let mut machine = with_job(4);
    run(&mut machine, 20, &[20, 21, 22, 23]);
    let report = end(&mut machine);
    assert_eq!(
        (report.id.clone(), report.owner.0, report.cpus.to_string()),
        (job("a"), 1001, "0-3".to_owned())
    );
    assert_eq!((seconds(report.wall_ns), seconds(report.usage.cpu_ns)), (20, 80));
    assert_eq!((report.usage.cores_max, report.usage.threads_max), (4, 4));
    assert_eq!((report.mean_held_cores_permille(), report.mean_held_pus_permille()), (4000, 4000));
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!((verdict.kind.name(), verdict.advice.len()), ("fine", 0));
    assert_eq!(report.incomplete_reason, None);
}

#[test]
fn cores_that_come_and_go_within_a_sample_count_for_as_long_as_they_were_held() {
    let mut machine = with_job(4);
    for _ in 0..40 {
        for cores in [2, 4] {
            machine.run_for(&[20, 21], 3 * SECOND / 10);
            machine.assign("a", cores, &[]).unwrap();
        }
    }
    let held = end(&mut machine).mean_held_cores_permille();
    assert!((2_950..=3_050).contains(&held), "{held}");
}

#[test]
fn the_averages_of_a_job_that_waited_are_of_its_time_on_cores() {
    let mut machine = machine();
    machine.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    machine.advance(5 * SECOND);
    machine.spawn(10, 1, 0);
    machine.spawn(20, 1, 1001);
    machine.assign("all", 8, &[10]).unwrap();
    machine.assign("a", 1, &[20]).unwrap();
    run(&mut machine, 15, &[20]);
    // The job gets its core within a sample.
    machine.run_for(&[20], 3 * SECOND / 10);
    machine.release("all").unwrap();
    machine.reports.clear();
    run(&mut machine, 20, &[20]);
    let report = end(&mut machine);
    let usage = &report.usage;
    assert_eq!((seconds(report.wall_ns), seconds(usage.cpu_ns)), (35, 35));
    assert_eq!((seconds(usage.without_pus_ns), seconds(usage.without_pus_cpu_ns)), (15, 15), "{report:?}");
    assert_eq!(report.mean_held_cores_permille(), 1000);
    assert!((980..=1020).contains(&report.mean_used_pus_permille()), "{report:?}");
    assert!((19..=20).contains(&seconds(usage.levels.total_ns())), "{report:?}");
    assert_eq!(judge_ended_job(&report).unwrap().kind.name(), "fine");
}

/// A machine with the job `a` without processes, which gets its core just after it has waited for 20 s.
fn with_job_that_waited() -> Machine {
    let mut machine = machine();
    machine.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    machine.advance(5 * SECOND);
    machine.assign("all", 8, &[]).unwrap();
    machine.assign("a", 1, &[]).unwrap();
    machine.advance(20 * SECOND);
    machine.release("all").unwrap();
    machine
}

#[test]
fn the_cpu_time_of_a_job_that_got_its_cores_before_it_ran_counts_as_time_on_cores() {
    let mut machine = with_job_that_waited();
    machine.spawn(20, 1, 1001);
    machine.assign("a", 1, &[20]).unwrap();
    run(&mut machine, 2, &[20]);
    machine.reports.clear();
    machine.release("a").unwrap();
    let usage = &machine.reports[0].usage;
    assert_eq!((seconds(usage.without_pus_ns), usage.without_pus_cpu_ns), (20, 0), "{usage:?}");
    assert_eq!((seconds(usage.cpu_ns), seconds(usage.held_ns)), (2, 2), "{usage:?}");
}

#[test]
fn a_short_time_on_cores_at_the_end_of_a_wait_is_in_the_report() {
    let mut machine = with_job_that_waited();
    machine.advance(4 * SECOND / 10);
    machine.reports.clear();
    machine.release("a").unwrap();
    let usage = &machine.reports[0].usage;
    assert!(usage.held_ns >= 4 * SECOND / 10 && usage.cores_max == 1, "{usage:?}");
}

#[test]
fn one_thread_on_four_cores_is_a_serial_phase() {
    let mut machine = with_job(4);
    run(&mut machine, 30, &[20]);
    let report = end(&mut machine);
    assert_eq!((report.usage.serial_phases, report.usage.serial_longest_ns), (1, report.usage.serial_ns));
    assert!((900..=1000).contains(&report.mean_hot_threads_permille()), "{report:?}");
    let longest = report.time_by_used_pus().into_iter().max_by_key(|&(_, ns)| ns).unwrap();
    assert!(longest.0 == 1 && seconds(longest.1) >= 25, "{report:?}");
    assert!((25..=30).contains(&seconds(report.usage.serial_ns)), "{report:?}");
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!(verdict.advice, ["Of 4 cores 1.0 were used: ask for `--cores 1`."]);
}

#[test]
fn a_job_that_sleeps_is_judged_as_waiting_and_its_sleep_counts_although_it_was_not_read() {
    let mut machine = with_job(4);
    run(&mut machine, 2, &[20, 21, 22, 23]);
    run(&mut machine, 58, &[]);
    run(&mut machine, 2, &[20, 21, 22, 23]);
    let report = end(&mut machine);
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!(verdict.kind.name(), "waiting", "{report:?}");
    assert!(seconds(report.usage.asleep_ns) >= 40, "{report:?}");
    assert_eq!(seconds(report.usage.cpu_ns), 16);
}

#[test]
fn a_release_reports_the_job_and_a_job_that_never_ran_has_no_verdict() {
    let mut machine = with_job(2);
    machine.assign("reserved", 1, &[]).unwrap();
    run(&mut machine, 12, &[20, 21]);
    machine.release("a").unwrap();
    machine.release("reserved").unwrap();
    let ids: Vec<String> = machine.reports.iter().map(|report| report.id.to_string()).collect();
    assert_eq!(ids, ["manual:a", "manual:reserved"]);
    assert_eq!(judge_ended_job(&machine.reports[0]).unwrap().kind.name(), "fine");
    assert_eq!(judge_ended_job(&machine.reports[1]), None);
    assert_eq!(machine.reports[1].usage.cores_max, 1);
}

#[test]
fn attempts_to_leave_the_cores_are_counted() {
    let mut machine = with_job(2);
    run(&mut machine, 1, &[20]);
    machine.bind(20, 20, "4-5");
    machine.settle();
    run(&mut machine, 1, &[20]);
    assert!(end(&mut machine).usage.violations >= 1);
}

#[test]
fn the_journal_has_the_usage_of_a_running_job_and_a_restarted_daemon_goes_on_with_it() {
    let mut machine = with_job(2);
    run(&mut machine, 70, &[20]);
    let recorded = |record: &Record| matches!(record, Record::Usage { .. });
    assert_eq!(machine.records.iter().filter(|record| recorded(record)).count(), 1, "one in a minute");
    restart(&mut machine);
    run(&mut machine, 10, &[20]);
    let report = end(&mut machine);
    assert_eq!((seconds(report.wall_ns), seconds(report.usage.cpu_ns)), (80, 80));
    assert!(report.incomplete_reason.unwrap().contains("restarted while the job ran"));
}

#[test]
fn a_job_that_ended_while_no_daemon_ran_is_reported_with_what_the_journal_knows() {
    let mut machine = with_job(2);
    run(&mut machine, 70, &[20]);
    machine.exit(20);
    restart(&mut machine);
    machine.settle();
    let report = machine.reports.remove(0);
    assert_eq!(seconds(report.usage.cpu_ns), 70);
    assert!(report.incomplete_reason.unwrap().contains("while pjwd was not running"));
}

#[test]
fn a_job_that_ended_while_no_daemon_ran_is_judged_by_the_time_that_is_known() {
    let mut machine = with_job(4);
    run(&mut machine, 70, &[20, 21, 22, 23]);
    machine.exit(20);
    restart(&mut machine);
    machine.advance(10 * 3600 * SECOND);
    machine.settle();
    let report = machine.reports.remove(0);
    assert_eq!((seconds(report.wall_ns), seconds(report.usage.cpu_ns)), (70, 280), "{report:?}");
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!((verdict.kind.name(), verdict.advice.len()), ("fine", 0), "{verdict:?}");
}

/// Seconds in which the threads `waiting` wait for half of the time.
fn run_waiting(machine: &mut Machine, busy: &[u32], waiting: &[u32]) {
    for _ in 0..12 {
        machine.run_waiting(busy, waiting);
        let scan = machine.state.scan_request(false);
        let _ = machine.cycle(&scan, &[]);
    }
}

#[test]
fn threads_that_their_program_bound_to_one_core_of_four_are_judged_as_bound() {
    let mut machine = with_job(4);
    machine.policy.bindings = BindingPolicy::Respect;
    let threads = [20, 21, 22, 23];
    threads.iter().for_each(|&tid| machine.bind(20, tid, "0"));
    run_waiting(&mut machine, &threads, &threads);
    let report = end(&mut machine);
    assert_eq!(judge_ended_job(&report).unwrap().kind.name(), "bound", "{report:?}");
}

#[test]
fn threads_that_their_program_bound_to_a_core_each_and_that_wait_for_other_programs_are_judged_as_waiting() {
    for policy in [BindingPolicy::Respect, BindingPolicy::Repair] {
        let mut machine = with_job(4);
        machine.policy.bindings = policy;
        let threads = [20, 21, 22, 23];
        threads.iter().zip(["0", "1", "2-3", "2-3"]).for_each(|(&tid, own)| machine.bind(20, tid, own));
        run_waiting(&mut machine, &threads, &threads);
        let report = end(&mut machine);
        let verdict = judge_ended_job(&report).unwrap();
        assert_eq!(verdict.kind.name(), "waiting", "{report:?}");
        assert!(verdict.advice[0].contains("that other programs used"), "{verdict:?}");
    }
}

#[test]
fn threads_bound_to_parts_of_a_mask_of_two_cores_are_judged_as_bound_with_those_that_have_the_whole_mask() {
    let mut machine = with_job(4);
    machine.policy.bindings = BindingPolicy::Respect;
    [(20, "0-1"), (21, "0"), (22, "1")].into_iter().for_each(|(tid, own)| machine.bind(20, tid, own));
    run_waiting(&mut machine, &[20, 21, 22], &[20, 21, 22]);
    let report = end(&mut machine);
    assert_eq!(judge_ended_job(&report).unwrap().kind.name(), "bound", "{report:?}");
}

#[test]
fn eight_threads_on_two_cores_are_judged_as_oversubscribed() {
    let mut machine = with_job(2);
    (24..28).for_each(|tid| machine.clone_thread(20, tid));
    let threads: Vec<u32> = (20..28).collect();
    run_waiting(&mut machine, &threads, &threads);
    let report = end(&mut machine);
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!(verdict.kind.name(), "oversubscribed", "{report:?}");
    assert!(verdict.advice[0].starts_with("8 threads want to run on 2 cores"), "{verdict:?}");
}

#[test]
fn a_job_with_a_helper_thread_that_makes_the_others_wait_is_judged_as_fine() {
    let mut machine = with_job(2);
    for _ in 0..12 {
        machine.run(&[20, 21]);
        let tenth = SECOND / 10;
        for thread in machine.process(20).threads.iter_mut().filter(|(tid, _)| (20..23).contains(&tid.0)) {
            match thread {
                (Tid(20), thread) => {
                    (thread.run_ns, thread.wait_ns) = (thread.run_ns - 4 * tenth, thread.wait_ns + 4 * tenth);
                }
                (Tid(22), thread) => {
                    (thread.run_ns, thread.wait_ns) = (thread.run_ns + 4 * tenth, thread.wait_ns + tenth);
                }
                _ => {}
            }
        }
        let scan = machine.state.scan_request(false);
        let _ = machine.cycle(&scan, &[]);
    }
    let report = end(&mut machine);
    assert_eq!(judge_ended_job(&report).unwrap().kind.name(), "fine", "{report:?}");
}

#[test]
fn the_wait_of_a_process_that_started_in_the_job_counts_from_its_start() {
    let mut machine = with_job(2);
    run(&mut machine, 1, &[20]);
    for pid in [100, 200].repeat(20) {
        (pid..pid + 8).for_each(|child| drop(machine.spawn(child, 20, 1001)));
        machine.advance(SECOND / 2);
        let children: Vec<u32> = (pid..pid + 8).collect();
        for &child in &children {
            let mut process = machine.process(child);
            let thread = process.threads.values_mut().next().unwrap();
            (thread.run_ns, thread.wait_ns) = (SECOND / 8, SECOND * 3 / 8);
        }
        machine.settle();
        children.iter().for_each(|&child| machine.exit(child));
    }
    let report = end(&mut machine);
    let verdict = judge_ended_job(&report).unwrap();
    assert_eq!(verdict.kind.name(), "oversubscribed", "{report:?}");
    assert!(verdict.advice[0].contains("short processes want to run on 2 cores"), "{verdict:?}");
}

/// Replaces the state by the one that a new daemon makes from the records of a rewritten journal.
fn restart(machine: &mut Machine) {
    let records = machine.state.records();
    restart_with(machine, records);
}

fn restart_with(machine: &mut Machine, records: Vec<Record>) {
    let mut state = WardenState::new(machine.state.topology.clone(), &pjw_core::cpuset::CpuSet::new());
    records.into_iter().for_each(|record| state.apply_record(record));
    assert!(state.members.contains_key(&Pid(20)));
    machine.state = state;
}

#[test]
fn an_idle_job_costs_no_record_and_no_sample() {
    let mut machine = with_job(2);
    run(&mut machine, 3, &[20]);
    machine.records.clear();
    run(&mut machine, 200, &[]);
    let records = machine.records.iter().filter(|record| matches!(record, Record::Usage { .. })).count();
    assert!(records <= 1, "{records}");
}

#[test]
fn a_schedulers_job_is_reported_once_when_it_is_released_although_its_processes_go_on() {
    let mut machine = machine();
    machine.advance(5 * SECOND);
    in_cgroup(machine.spawn(20, 1, 1001), "slurm:7", "/slurm/job_7", Some(CpuRequest::Cores(2)));
    let mut identity = machine.process(20).batch_identity.clone().unwrap();
    identity.job_references[0].tasks = Some(1);
    machine.process(20).batch_identity = Some(identity);
    machine.settle();
    run(&mut machine, 12, &[20]);
    machine.release("slurm:7").unwrap();
    let report = machine.reports.remove(0);
    assert_eq!((report.usage.cores_max, seconds(report.usage.cpu_ns)), (2, 12), "{report:?}");
    assert_eq!(report.usage.tasks, Some(1), "as the environment of the process says");
    assert_eq!(
        judge_ended_job(&report).unwrap().advice,
        ["Of 2 cores 1.0 were used: ask for `--cpus-per-task=1`."]
    );
    run(&mut machine, 3, &[20]);
    machine.exit(20);
    machine.settle();
    assert_eq!(machine.reports, []);
}

#[test]
fn a_daemon_that_is_restarted_before_the_first_record_learns_the_time_from_the_processes() {
    let mut machine = with_job(2);
    machine.spawn(30, 20, 1001);
    run(&mut machine, 10, &[30]);
    let mut records = machine.state.records();
    records.retain(|record| !matches!(record, Record::Usage { .. }));
    restart_with(&mut machine, records);
    machine.exit(30);
    run(&mut machine, 5, &[20]);
    let report = end(&mut machine);
    assert_eq!((seconds(report.wall_ns), seconds(report.usage.cpu_ns)), (15, 15), "{report:?}");
    assert!(report.incomplete_reason.is_some());
}

/// A machine with a job of a batch system that has a cgroup and the processes 20 and 21.
fn with_job_in_cgroup() -> Machine {
    let mut machine = machine();
    machine.advance(5 * SECOND);
    for pid in [20, 21] {
        in_cgroup(machine.spawn(pid, 1, 1001), "slurm:7", "/slurm/job_7", Some(CpuRequest::Cores(2)));
    }
    machine.settle();
    machine
}

#[test]
fn the_cgroups_of_a_job_are_read_once_more_when_its_last_process_is_gone() {
    let mut machine = with_job_in_cgroup();
    let now = Nanos(machine.now());
    machine.state.usage.note_memory_peak(&job("slurm:7"), None, now);
    machine.exit(20);
    let snapshot = machine.scan_only(&[20]);
    assert_eq!(cgroups_with_peaks_to_read(&machine.state, &snapshot), [], "process 21 lives");
    machine.exit(21);
    let expected = (job("slurm:7"), "/slurm/job_7".to_owned());
    for snapshot in [machine.scan(), machine.scan_only(&[20, 21])] {
        assert!(cgroups_with_peaks_to_read(&machine.state, &snapshot).contains(&expected));
    }
    let snapshot = machine.scan_only(&[21]);
    let to_read = cgroups_with_peaks_to_read(&machine.state, &snapshot);
    assert_eq!(to_read, [], "of process 20 nothing is known");
    machine.state.usage.note_memory_peak(&job("slurm:7"), Some(5), now);
    machine.state.usage.note_memory_peak(&job("slurm:7"), None, now);
    machine.settle();
    machine.release("slurm:7").ok();
    assert_eq!(machine.reports.remove(0).usage.memory_peak, Some(5));
}

#[test]
fn the_peak_of_memory_is_read_when_a_process_ends_and_the_job_goes_on_but_once_a_second() {
    let mut machine = with_job_in_cgroup();
    let of_job = (job("slurm:7"), "/slurm/job_7".to_owned());
    machine.exit(20);
    let snapshot = machine.scan_only(&[20]);
    assert!(cgroups_with_peaks_to_read(&machine.state, &snapshot).contains(&of_job));
    machine.state.usage.note_memory_peak(&of_job.0, Some(5), snapshot.taken_at.since_boot);
    machine.advance(SECOND / 2);
    let snapshot = machine.scan_only(&[20]);
    assert_eq!(cgroups_with_peaks_to_read(&machine.state, &snapshot), [], "half a second later");
    machine.advance(SECOND / 2);
    let snapshot = machine.scan_only(&[20]);
    assert!(cgroups_with_peaks_to_read(&machine.state, &snapshot).contains(&of_job), "a second later");
    let snapshot = machine.scan_only(&[21]);
    assert_eq!(cgroups_with_peaks_to_read(&machine.state, &snapshot), [], "process 21 lives");
}
