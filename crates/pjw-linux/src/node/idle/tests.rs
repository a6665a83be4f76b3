//! Idle checks of real processes that sleep, run and end.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pjw_core::cpuset::Pu;

use super::*;
use crate::tests::{is_asleep, until_true};

/// A shell that echoes each line and otherwise sleeps.
struct Shell(Child);

impl Shell {
    fn start() -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "while read -r line; do echo $line; done"]);
        let mut shell = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        shell.wake();
        shell
    }

    fn pid(&self) -> Pid {
        Pid(self.0.id())
    }

    /// Lets the shell run for a moment, and waits until it sleeps again.
    fn wake(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"x\n").unwrap();
        self.0.stdout.as_mut().unwrap().read_exact(&mut [0; 2]).unwrap();
        let pid = self.pid();
        until_true("the shell sleeps", || is_asleep(pid, Tid(pid.0)));
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn idle_watch(cgroup: Option<&str>, pids: &[Pid]) -> Arc<WatchedProcesses> {
    let within = Some(CpuSet::from(Pu(0)));
    let group =
        IdleProcessGroup { cgroup: cgroup.map(str::to_owned), expected_cpus: within, pids: pids.to_vec() };
    Arc::new(WatchedProcesses { groups: vec![Arc::new(group)], ..WatchedProcesses::default() })
}

fn behind_a_cpuset(pid: Pid) -> WatchedProcesses {
    let group = IdleProcessGroup { cgroup: None, expected_cpus: None, pids: vec![pid] };
    WatchedProcesses { groups: vec![Arc::new(group)], ..WatchedProcesses::default() }
}

/// Checks twice: a process that does not run in between is idle.
fn settled(tracker: &mut IdleTracker, idle_watch: &WatchedProcesses) -> IdleCheck {
    tracker.find_idle(idle_watch, None, Nanos(1), true);
    tracker.find_idle(idle_watch, None, Nanos(2), true)
}

#[test]
fn a_process_is_active_only_if_it_ran() {
    let mut shell = Shell::start();
    let idle_watch = idle_watch(None, &[shell.pid()]);
    let mut tracker = IdleTracker::default();
    assert!(
        tracker.find_idle(&idle_watch, None, Nanos(1), true).active.contains(&shell.pid()),
        "there was no earlier check"
    );
    assert!(settled(&mut tracker, &idle_watch).idle.contains(&shell.pid()));
    shell.wake();
    let idle_check = tracker.find_idle(&idle_watch, None, Nanos(3), true);
    assert!(idle_check.active.contains(&shell.pid()) && idle_check.idle.is_empty(), "{idle_check:?}");
    assert_eq!(idle_check.idle_until.get(&shell.pid()), Some(&Nanos(2)), "the time of the last check");
}

#[test]
fn a_process_is_checked_less_often_the_longer_it_is_idle() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let idle_watch = behind_a_cpuset(pid);
    let mut tracker = IdleTracker::default();
    for at in 0..=CHECKS_PER_STEP.into() {
        assert_eq!(tracker.find_idle(&idle_watch, None, Nanos(at), false).idle.contains(&pid), at > 0);
    }
    let mut check = |full| {
        let idle_check = tracker.find_idle(&idle_watch, None, Nanos(100), full);
        (idle_check.idle.contains(&pid), idle_check.active.contains(&pid))
    };
    for (scans, expected) in [(32, 8), (64, 8), (64, 4), (64, 4)] {
        assert_eq!((0..scans).filter(|_| check(false).0).count(), expected, "of {scans}");
    }
    assert!((0..MAX_PERIOD).all(|_| check(true).0), "a full scan treats the process as idle");
    shell.wake();
    assert!((0..MAX_PERIOD).any(|_| check(false).1), "activity is found when the check is due");
    assert_eq!(check(false), (true, false), "then the process is checked each time");
}

#[test]
fn an_ended_process_was_idle_until_its_last_check_although_later_scans_did_not_check_it() {
    let shell = Shell::start();
    let pid = shell.pid();
    let idle_watch = behind_a_cpuset(pid);
    let mut tracker = IdleTracker::default();
    let (mut last_check, mut idle_check) = (0, IdleCheck::default());
    for at in 1.. {
        idle_check = tracker.find_idle(&idle_watch, None, Nanos(at), false);
        last_check = if idle_check.idle.contains(&pid) { at } else { last_check };
        if at > 200 && last_check < at {
            break;
        }
    }
    assert!(last_check > 180, "{last_check}");
    let seen = BTreeMap::from([(pid, Observed::Gone), (Pid(u32::MAX), Observed::Gone)]);
    let ended = tracker.ended_idle_until(&idle_check, &seen);
    assert_eq!(ended, BTreeMap::from([(pid, Nanos(last_check))]));
    assert_eq!(tracker.idle_until(pid), Some(Nanos(last_check)), "also if the scan did not find the end");
    assert_eq!(tracker.idle_until(Pid(u32::MAX)), None);
}

#[test]
fn scans_without_idle_processes_do_not_count_for_the_period() {
    let shell = Shell::start();
    let idle_watch = behind_a_cpuset(shell.pid());
    let mut tracker = IdleTracker::default();
    let mut checks = 0;
    for at in 0..41 {
        checks += tracker.find_idle(&idle_watch, None, Nanos(at), false).idle.len();
        tracker.find_idle(&WatchedProcesses::default(), None, Nanos(at), false);
    }
    assert_eq!(checks, 8 + 8, "8 of the first 9 scans, then one of four");
}

#[test]
fn an_observed_process_is_checked_each_time_again() {
    let shell = Shell::start();
    let pid = shell.pid();
    let idle_watch = behind_a_cpuset(pid);
    let mut tracker = IdleTracker::default();
    (0..200).for_each(|at| drop(tracker.find_idle(&idle_watch, None, Nanos(at), false)));
    tracker.mark_active(pid);
    let found_idle = (0..CHECKS_PER_STEP)
        .filter(|_| tracker.find_idle(&idle_watch, None, Nanos(200), false).idle.contains(&pid));
    assert_eq!(found_idle.count(), 8);
}

#[test]
fn a_run_between_two_checks_is_found_when_the_job_becomes_idle() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("job")).unwrap();
    let group = IdleProcessGroup { cgroup: Some("/job".into()), expected_cpus: None, pids: vec![pid] };
    let idle_watch = WatchedProcesses {
        groups: vec![Arc::new(group.clone()), Arc::new(IdleProcessGroup { pids: Vec::new(), ..group })],
        ..WatchedProcesses::default()
    };
    let mut tracker = IdleTracker::default();
    let mut check = |usage: u64| {
        std::fs::write(root.path().join("job/cpu.stat"), format!("usage_usec {usage}\n")).unwrap();
        let idle_check = tracker.find_idle(&idle_watch, Some(root.path()), Nanos(usage), false);
        (idle_check.idle.contains(&pid), idle_check.active.contains(&pid))
    };
    // Other processes of the job run all the time.
    let turns = (0..200).filter(|&usage| check(usage).0).count();
    assert!(turns < 50, "idle for long: {turns}");
    let its_turn = (200..300).find(|&usage| check(usage).0).unwrap();
    shell.wake();
    assert_eq!(check(its_turn + 1), (false, false), "no check is due");
    assert_eq!(check(its_turn + 1), (false, true));
    assert_eq!(
        [0; 2].map(|_| check(its_turn + 1)),
        [(false, false); 2],
        "no process is checked while the job is idle"
    );
}

#[test]
fn a_process_confined_by_masks_only_is_checked_in_each_fourth_scan_however_long_it_is_idle() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let idle_watch = idle_watch(None, &[pid]);
    let mut tracker = IdleTracker::default();
    let mut check = || tracker.find_idle(&idle_watch, None, Nanos(1), false);
    check();
    for at in 1..=CHECKS_PER_STEP {
        assert!(check().idle.contains(&pid), "at first each time: {at}");
    }
    for _ in 0..20 {
        let checks: Vec<IdleCheck> = (0..MAX_PERIOD_OF_MASKS).map(|_| check()).collect();
        assert_eq!(checks.iter().filter(|check| check.idle.contains(&pid)).count(), 1);
        assert!(
            checks.iter().all(|check| check.mask_only == [(pid, 0)]),
            "its mask may be read in each scan: {checks:?}"
        );
    }
    shell.wake();
    let found = (1..=MAX_PERIOD).find(|_| check().active.contains(&pid)).unwrap();
    assert!(found <= MAX_PERIOD_OF_MASKS, "found after {found} scans");
}

#[test]
fn an_ended_process_is_active() {
    let shell = Shell::start();
    let idle_watch = idle_watch(None, &[shell.pid()]);
    let mut tracker = IdleTracker::default();
    settled(&mut tracker, &idle_watch);
    let pid = shell.pid();
    drop(shell);
    assert!(tracker.find_idle(&idle_watch, None, Nanos(3), true).active.contains(&pid));
}

#[test]
fn masks_are_sampled_in_turn_and_a_changed_mask_makes_a_process_active() {
    let shells: Vec<Shell> = (0..3).map(|_| Shell::start()).collect();
    let pids: Vec<Pid> = shells.iter().map(Shell::pid).collect();
    let idle_watch = idle_watch(None, &pids);
    let mut tracker = IdleTracker::default();
    let mut idle_check = settled(&mut tracker, &idle_watch);
    let mut sampled = Vec::new();
    for _ in 0..4 {
        // Each process has so many threads that one fills the sample.
        tracker.sample_masks(&mut idle_check, &idle_watch, |pid, within, _| {
            assert_eq!(*within, CpuSet::from(Pu(0)));
            sampled.push(pid);
            (MASKS_PER_SCAN, pid == pids[1])
        });
    }
    assert_eq!(sampled[..3].iter().collect::<BTreeSet<_>>().len(), 3, "{sampled:?}");
    assert_eq!(sampled[3], sampled[0]);
    assert_eq!(idle_check.active, BTreeSet::from([pids[1]]));
    tracker.sample_masks(&mut idle_check, &idle_watch, |pid, _, _| {
        sampled.push(pid);
        (1, false)
    });
    assert_eq!(sampled.len(), 4 + 3, "small processes share a sample, each once");
    let rescan = WatchedProcesses { check_all_masks: true, ..WatchedProcesses::clone(&idle_watch) };
    tracker.sample_masks(&mut idle_check, &rescan, |pid, _, _| {
        sampled.push(pid);
        (MASKS_PER_SCAN, false)
    });
    assert_eq!(sampled.len(), 4 + 3 + 3, "a rescan reads all masks");
}

#[test]
fn the_threads_of_a_process_are_listed_again_after_it_ran() {
    let mut shell = Shell::start();
    let idle_watch = idle_watch(None, &[shell.pid()]);
    let mut tracker = IdleTracker::default();
    let known = |tracker: &mut IdleTracker| {
        let mut idle_check = settled(tracker, &idle_watch);
        let mut was_known = None;
        tracker.sample_masks(&mut idle_check, &idle_watch, |pid, _, tids| {
            was_known = Some(tids.is_some());
            *tids = Some([Tid(pid.0)].into());
            (1, false)
        });
        was_known
    };
    assert_eq!(known(&mut tracker), Some(false));
    assert_eq!(known(&mut tracker), Some(true));
    shell.wake();
    assert_eq!(known(&mut tracker), Some(false), "it may have other threads now");
}

#[test]
fn an_idle_cgroup_is_read_less_often_the_longer_it_is_idle_except_where_masks_keep_the_job() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("job")).unwrap();
    let stat = root.path().join("job/cpu.stat");
    std::fs::write(&stat, "usage_usec 0\n").unwrap();
    let group = |within| IdleProcessGroup {
        cgroup: Some("/job".into()),
        expected_cpus: within,
        pids: vec![Pid(u32::MAX >> 1)],
    };
    for (within, latest) in [(None, MAX_PERIOD), (Some(CpuSet::from(Pu(0))), MAX_PERIOD_OF_MASKS)] {
        let groups = vec![Arc::new(group(None)), Arc::new(group(within))];
        let idle_watch = WatchedProcesses { groups, ..WatchedProcesses::default() };
        let mut tracker = IdleTracker::default();
        for usage in 1..4 {
            let mut check =
                || tracker.find_idle(&idle_watch, Some(root.path()), Nanos(1), false).active.len();
            (0..200).for_each(|_| _ = check());
            assert_eq!(check(), 0);
            std::fs::write(&stat, format!("usage_usec {usage}\n")).unwrap();
            let found = (1..=MAX_PERIOD).find(|_| check() > 0).unwrap();
            assert!(found <= latest, "found after {found} scans, not after {latest}");
        }
    }
}

#[test]
fn the_files_of_a_cgroup_stay_open_only_if_enough_descriptors_are_left_and_are_read_in_both_cases() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("job")).unwrap();
    let write = |usage: u32| {
        std::fs::write(root.path().join("job/cpu.stat"), format!("usage_usec {usage}\n")).unwrap();
    };
    let pids = vec![Pid(u32::MAX >> 1)];
    let group = IdleProcessGroup { cgroup: Some("/job".into()), expected_cpus: None, pids };
    let idle_watch = WatchedProcesses { groups: vec![Arc::new(group)], ..WatchedProcesses::default() };
    for (limit, stay_open) in [(counters::DESCRIPTORS_OF_OTHERS, false), (u64::MAX, true)] {
        write(1);
        let mut tracker = IdleTracker { descriptor_limit: limit.into(), ..IdleTracker::default() };
        let mut check = || tracker.find_idle(&idle_watch, Some(root.path()), Nanos(1), false).active.len();
        assert_eq!([0; 3].map(|_| check()), [1, 1, 0], "no process is checked while the job is idle");
        write(2);
        assert_eq!(check(), 1, "a process of the job ran");
        assert_eq!(tracker.jobs["/job"].counters.is_some(), stay_open);
    }
}

#[test]
fn an_idle_cgroup_makes_all_its_processes_idle() {
    let shell = Shell::start();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("job");
    std::fs::create_dir(&dir).unwrap();
    let write = |usage: u32, tasks: u32| {
        std::fs::write(dir.join("cpu.stat"), format!("usage_usec {usage}\nuser_usec 1\n")).unwrap();
        std::fs::write(dir.join("pids.current"), format!("{tasks}\n")).unwrap();
    };
    write(10, 1);
    let idle_watch = idle_watch(Some("/job"), &[shell.pid()]);
    let mut tracker = IdleTracker::default();
    let mut check = |at: u64| tracker.find_idle(&idle_watch, Some(root.path()), Nanos(at), false);
    assert!(check(1).active.contains(&shell.pid()));
    assert!(check(2).idle.contains(&shell.pid()), "the process may have run in a scan without a check");
    let idle = check(3);
    assert!(idle.active.is_empty() && idle.idle.is_empty(), "no process is checked: {idle:?}");
    write(10, 0);
    let moved = check(4);
    assert!(moved.active.len() + moved.idle.len() == 1, "a process was moved out: {moved:?}");
    write(11, 0);
    let ran = check(5);
    assert!(ran.active.len() + ran.idle.len() == 1, "a process ran: {ran:?}");
}

#[test]
fn an_unassigned_process_is_observed_if_it_ran_or_ended() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let idle_watch =
        WatchedProcesses { unassigned_pids: vec![pid, Pid(u32::MAX >> 1)], ..WatchedProcesses::default() };
    let mut tracker = IdleTracker::default();
    let mut check = || {
        let idle_check = tracker.find_idle(&idle_watch, None, Nanos(1), false);
        assert!(
            idle_check.active.is_empty() && idle_check.idle.is_empty() && idle_check.idle_until.is_empty(),
            "{idle_check:?}"
        );
        idle_check.active_unassigned
    };
    let gone = Pid(u32::MAX >> 1);
    assert_eq!(check(), BTreeSet::from([pid, gone]), "there was no earlier check");
    let deadline = Instant::now() + Duration::from_secs(60);
    while check() != BTreeSet::from([gone]) {
        assert!(Instant::now() < deadline, "the shell never sleeps");
    }
    shell.wake();
    assert!(check().contains(&pid));
}
