//! Workers that die: no item is lost, and none is delivered twice.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_spawn::ExitStatus;
use pjw_spawn::farm::{FarmError, ItemResult, NextResult, Outcome};

use super::{BegunWorkers, MOST_EARLY_KILLS, bytes_of, compute, end_by, farm, is_first};

/// Runs a farm of which a worker is killed fifty times. Returns the numbers of the items in the order of their results.
fn run_and_kill(is_in_order: bool, signals: &[Signal]) -> Vec<u64> {
    // The ring is small, so a result passes in pieces. The number of attempts is large, so no item is given up. The
    // window is small, so the workers are not far ahead.
    let mut options = farm(3).ring_bytes(4096).chunk(4).window(64).attempts(1000);
    if is_in_order {
        options = options.in_order();
    }
    let begun = BegunWorkers::new();
    let mut early_kills = 0;
    let running = options.start(3000, |item, result| {
        begun.add_own_process()?;
        compute(Duration::from_micros(200));
        result.extend_from_slice(&bytes_of(item.number));
        Ok(())
    });
    let (mut running, mut numbers, mut killed) = (running.unwrap(), Vec::new(), Vec::new());
    loop {
        let pids = running.worker_pids();
        let may_be_killed =
            |pid: &u32| !killed.contains(pid) && (early_kills < MOST_EARLY_KILLS || begun.contains(*pid));
        let alive: Vec<u32> = pids.iter().map(|pid| pid.0).filter(may_be_killed).collect();
        let is_time_to_kill = killed.len() < 50 && numbers.len() >= 50 * killed.len();
        if let Some(pid) = alive.get(killed.len() % alive.len().max(1)).filter(|_| is_time_to_kill) {
            // Each kill is at another moment of the work on an item.
            compute(Duration::from_micros(37 * killed.len() as u64));
            early_kills += usize::from(!begun.contains(*pid));
            kill(Pid::from_raw(pid.cast_signed()), signals[killed.len() % signals.len()]).unwrap();
            killed.push(*pid);
        }
        match running.next_within(Some(Duration::from_millis(1))).unwrap() {
            NextResult::Result(ItemResult { number, outcome }) => {
                assert_eq!(outcome, Outcome::Done(bytes_of(number)));
                numbers.push(number);
            }
            NextResult::TimedOut => {}
            NextResult::End => break,
        }
    }
    assert_eq!((killed.len(), running.progress().replaced), (50, 50));
    numbers
}

#[test]
fn workers_that_are_killed_at_fifty_moments_lose_no_item_and_none_is_delivered_twice() {
    let mut numbers = run_and_kill(false, &[Signal::SIGKILL]);
    numbers.sort_unstable();
    assert_eq!(numbers, Vec::from_iter(0..3000));
}

#[test]
fn results_stay_in_order_whatever_signal_kills_a_worker() {
    // Rust's runtime handles SIGSEGV and SIGBUS. Sent by another process, they end a worker at the second time only.
    // SIGINT and SIGHUP are ignored in the background of a shell and under nohup.
    let signals = [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGABRT];
    assert_eq!(run_and_kill(true, &signals), Vec::from_iter(0..3000));
}

#[test]
fn an_item_is_computed_again_if_its_worker_dies() {
    let directory = tempfile::tempdir().unwrap();
    let running = farm(2).chunk(5).start(40, |item, result| {
        result.push(1);
        if item.number % 10 == 3 && is_first(&directory.path().join(item.number.to_string())) {
            end_by(libc::SIGSEGV);
        }
        Ok(())
    });
    let mut running = running.unwrap();
    let mut numbers = BTreeSet::new();
    for result in running.by_ref().map(Result::unwrap) {
        assert_eq!(result.outcome, Outcome::Done(vec![1]));
        assert!(numbers.insert(result.number));
    }
    assert_eq!(numbers, (0..40).collect());
    assert_eq!(running.progress().replaced, 4);
}

#[test]
fn a_dead_worker_is_replaced_also_if_the_caller_never_waits() {
    let directory = tempfile::tempdir().unwrap();
    let killed = directory.path().join("killed");
    let running = farm(1).start(10, |item, _| {
        if item.number == 4 && is_first(&killed) {
            end_by(libc::SIGKILL);
        }
        Ok(())
    });
    let (mut running, mut count) = (running.unwrap(), 0);
    loop {
        match running.next_within(Some(Duration::ZERO)).unwrap() {
            NextResult::Result(_) => count += 1,
            NextResult::TimedOut => std::thread::yield_now(),
            NextResult::End => break,
        }
    }
    assert_eq!((count, running.progress().replaced), (10, 1));
}

#[test]
fn an_item_that_kills_each_worker_is_reported_after_three_attempts_with_the_signal() {
    let directory = tempfile::tempdir().unwrap();
    let attempts_file = directory.path().join("tried");
    for (workers, chunk) in [(1, 1), (2, 8)] {
        std::fs::write(&attempts_file, "").unwrap();
        let running = farm(workers).chunk(chunk).in_order().start(20, |item, _| {
            if item.number == 7 {
                let mut file =
                    std::fs::OpenOptions::new().append(true).open(&attempts_file).map_err(|_| 1)?;
                std::io::Write::write_all(&mut file, b"x").map_err(|_| 2)?;
                end_by(libc::SIGABRT);
            }
            Ok(())
        });
        let results: Vec<ItemResult> = running.unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(results.len(), 20);
        for result in results {
            let end = ExitStatus::Signal(libc::SIGABRT);
            let expected = match result.number {
                7 => Outcome::Killed { attempts: 3, end },
                _ => Outcome::Done(Vec::new()),
            };
            assert_eq!(result.outcome, expected, "item {}", result.number);
        }
        assert_eq!(std::fs::read_to_string(&attempts_file).unwrap(), "xxx");
    }
}

#[test]
fn an_item_that_ends_the_process_is_reported_with_the_exit_status() {
    let running = farm(2).attempts(2).start(4, |item, _| {
        if item.number == 3 {
            // SAFETY: the call ends the process.
            unsafe { libc::_exit(i32::from(item.worker == 9)) };
        }
        Ok(())
    });
    let killed = Outcome::Killed { attempts: 2, end: ExitStatus::Code(0) };
    let results = running.unwrap().map(Result::unwrap);
    let outcomes_of_item: Vec<Outcome> =
        results.filter(|result| result.number == 3).map(|result| result.outcome).collect();
    assert_eq!(outcomes_of_item, [killed]);
}

#[test]
fn a_worker_that_dies_at_each_start_ends_the_farm_with_an_error_and_leaves_no_process() {
    let mut running = farm(2).on_worker_start(|_| end_by(libc::SIGTERM)).start(5, |_, _| Ok(())).unwrap();
    let error = running.next_within(None).unwrap_err();
    let end = ExitStatus::Signal(libc::SIGTERM);
    assert!(matches!(error, FarmError::WorkerDies { deaths: 10, end: last, .. } if last == end), "{error}");
    assert!(running.worker_pids().is_empty());
    assert_eq!(running.next_within(None).unwrap(), NextResult::End);
}

#[test]
fn a_worker_that_fails_at_its_end_is_an_error_after_the_last_result() {
    let running = farm(2).on_worker_end(|worker| {
        if worker == 1 {
            end_by(libc::SIGKILL);
        }
    });
    let mut running = running.start(20, |_, _| Ok(())).unwrap();
    for _ in 0..20 {
        assert!(matches!(running.next_within(None), Ok(NextResult::Result(_))));
    }
    let end = ExitStatus::Signal(libc::SIGKILL);
    assert_eq!(running.next_within(None), Err(FarmError::EndFailed { worker: 1, end }));
    assert_eq!(running.next_within(None), Ok(NextResult::End));
}

#[test]
fn the_wait_for_a_worker_that_takes_long_at_its_end_has_the_time_limit_of_the_caller() {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let running = farm(1).on_worker_end(|_| {
        let _ = nix::unistd::read(&reader, &mut [0]);
    });
    let mut running = running.start(1, |_, _| Ok(())).unwrap();
    assert!(matches!(running.next_within(None), Ok(NextResult::Result(_))));
    assert_eq!(running.next_within(Some(Duration::from_millis(1))), Ok(NextResult::TimedOut));
    nix::unistd::write(&writer, &[1]).unwrap();
    assert_eq!(running.next_within(Some(Duration::MAX)), Ok(NextResult::End));
}

#[test]
fn a_farm_that_is_dropped_and_a_master_that_is_killed_leave_no_process() {
    let start_endless_farm = || {
        farm(2).start(2, |_, _| {
            loop {
                std::thread::park();
            }
        })
    };
    let running = start_endless_farm().unwrap();
    let pids = running.worker_pids();
    assert_eq!(pids.len(), 2);
    drop(running);
    for pid in pids {
        assert_eq!(kill(Pid::from_raw(pid.0.cast_signed()), None), Err(nix::errno::Errno::ESRCH));
    }

    let (reader, writer) = nix::unistd::pipe().unwrap();
    // A thread that prints the result of another test would hold the lock of the output for ever in the new process.
    let stdout = std::io::stdout().lock();
    // SAFETY: the new process starts a farm, writes the ids of its workers, and waits.
    let master = unsafe { libc::fork() };
    if master == 0 {
        if let Ok(running) = start_endless_farm() {
            for pid in running.worker_pids() {
                let _ = nix::unistd::write(&writer, &pid.0.to_ne_bytes());
            }
        }
        loop {
            std::thread::park();
        }
    }
    drop(stdout);
    let mut bytes = [0; 8];
    let mut read = 0;
    while read < 8 {
        read += nix::unistd::read(&reader, &mut bytes[read..]).unwrap();
    }
    kill(Pid::from_raw(master), Signal::SIGKILL).unwrap();
    nix::sys::wait::waitpid(Pid::from_raw(master), None).unwrap();
    // The workers have the other end of the pipe, until they end.
    drop(writer);
    assert_eq!(nix::unistd::read(&reader, &mut bytes), Ok(0));
}
