//! A sample ends only with a scan that read all CPU time of the job at about one time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pjw_core::scan::{ScanRequest, ScanScope};

use super::*;

/// The regular scan of the processes of jobs. The threads `busy` run for `scan_ns` between the beginning of the scan
/// and the reading of the CPU times, as far as the kernel counts: the machine may have stood still.
fn scan_slowly(machine: &mut Machine, busy: &[u32], scan_ns: u64) {
    let request = machine.state.scan_request(false);
    let mut snapshot = machine.node.scan(&request);
    machine.run_for(busy, scan_ns);
    read_cpu_times(&machine.state, &mut snapshot, |pids| machine.node.read_cpu_times(pids));
    snapshot.cpu_times_read_until = Some(Nanos(machine.now()));
    let decision = machine.decide(&snapshot, &[]);
    decision.plan.mask_actions.iter().for_each(|action| machine.carry_out(action));
}

#[test]
fn a_machine_that_stands_still_during_a_scan_gives_no_sample_a_wrong_use() {
    let mut machine = with_job(4);
    for second in 0..20 {
        machine.run(&[20, 21]);
        scan_slowly(&mut machine, &[20, 21], if second % 5 == 2 { SECOND } else { 0 });
    }
    let report = end(&mut machine);
    assert_eq!(seconds(report.usage.sampled_ns), 24, "{report:?}");
    let levels = report.time_by_used_pus();
    assert!(levels.iter().all(|&(pus, _)| pus == 2), "{levels:?}");
}

#[test]
fn a_job_has_samples_although_each_scan_takes_long() {
    let mut machine = with_job(4);
    for _ in 0..30 {
        machine.run(&[20, 21]);
        scan_slowly(&mut machine, &[20, 21], SECOND / 4);
    }
    let report = end(&mut machine);
    assert!(seconds(report.usage.sampled_ns) >= 35, "{report:?}");
    let levels = report.time_by_used_pus();
    assert!(levels.iter().all(|&(pus, _)| pus == 2), "{levels:?}");
}

#[test]
fn a_process_that_wakes_up_after_slow_scans_makes_no_idle_time_of_a_busy_job() {
    let mut machine = with_job(4);
    machine.spawn(30, 20, 1001);
    machine.settle();
    for _ in 0..5 {
        run(&mut machine, 1, &[20, 21]);
        for _ in 0..2 {
            machine.run(&[20, 21]);
            scan_slowly(&mut machine, &[20, 21], 2 * SECOND);
        }
        // Process 30 was idle at the last scan, which was more than three seconds after the beginning of the sample.
        machine.run_for(&[20, 30], SECOND / 100);
        machine.run_for(&[20, 21], SECOND * 99 / 100);
        scan_slowly(&mut machine, &[20, 21], 0);
    }
    machine.exit(30);
    let report = end(&mut machine);
    assert_eq!(seconds(report.usage.sampled_ns), 40, "{report:?}");
    let levels = report.time_by_used_pus();
    assert!(levels.iter().all(|&(pus, _)| pus == 2), "{levels:?}");
}

/// The scan after the fork event of the process `pid`, which reads nothing else.
fn scan_forked(machine: &mut Machine, pid: u32) {
    let pids = BTreeSet::from([Pid(pid)]);
    let forked = ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        pids_to_read_threads_of: pids,
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    let _ = machine.cycle(&forked, &[]);
}

#[test]
fn a_scan_of_a_forked_process_alone_ends_no_sample_of_its_job() {
    let mut machine = with_job(4);
    machine.spawn(30, 20, 1001);
    machine.settle();
    for second in 0..20 {
        machine.run_for(&[30], SECOND * 7 / 10);
        let child = 100 + second;
        if second % 4 == 3 {
            machine.spawn(child, 20, 1001);
            scan_forked(&mut machine, child);
            machine.exit(child);
        }
        machine.run_for(&[30], SECOND * 3 / 10);
        let regular = machine.state.scan_request(false);
        let _ = machine.cycle(&regular, &[]);
    }
    machine.exit(30);
    let report = end(&mut machine);
    assert_eq!(seconds(report.usage.sampled_ns), 20, "{report:?}");
    let levels = report.time_by_used_pus();
    assert!(levels.iter().all(|&(pus, _)| pus == 1), "{levels:?}");
}

#[test]
fn a_scan_of_a_forked_process_ends_no_sample_while_a_process_runs_that_was_read_once() {
    let mut machine = with_job(4);
    for second in 0..20 {
        let (worker, other) = (100 + 2 * second, 101 + 2 * second);
        machine.spawn(worker, 20, 1001);
        scan_forked(&mut machine, worker);
        machine.run_for(&[worker], SECOND * 7 / 10);
        machine.spawn(other, 20, 1001);
        scan_forked(&mut machine, other);
        machine.exit(other);
        machine.run_for(&[worker], SECOND * 3 / 10);
        let regular = machine.state.scan_request(false);
        let _ = machine.cycle(&regular, &[]);
        machine.exit(worker);
    }
    let report = end(&mut machine);
    assert_eq!((seconds(report.usage.sampled_ns), seconds(report.usage.cpu_ns)), (20, 20), "{report:?}");
    let levels = report.time_by_used_pus();
    assert!(levels.iter().all(|&(pus, _)| pus == 1), "{levels:?}");
}
