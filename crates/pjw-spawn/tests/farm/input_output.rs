//! Farms with a reader and a writer, which do all input and output.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_spawn::ExitStatus;
use pjw_spawn::farm::{Farm, FarmError, IoProcess, NextResult, Outcome, WorkItem};

use super::{BegunWorkers, MOST_EARLY_KILLS, compute, end_by, farm, is_first};

const ITEMS: u64 = 2000;
/// The number of bytes of an item in the files.
const SIZE: u64 = 600;

/// The bytes of an item in the input. In the output, each byte is larger by 1.
fn input(number: u64) -> Vec<u8> {
    (0..SIZE).map(|at| u8::try_from((number * 3 + at) % 200).unwrap()).collect()
}

/// Runs a farm with files. `on_each_round` is called after each result or millisecond, with the processes of the farm,
/// and with those of its workers that have not begun an item.
fn run_with_files(options: Farm<'_>, mut on_each_round: impl FnMut(&[u32], &[u32])) {
    let begun = BegunWorkers::new();
    let directory = tempfile::tempdir().unwrap();
    let [input_path, output_path] = ["input", "output"].map(|name| directory.path().join(name));
    std::fs::write(&input_path, (0..ITEMS).flat_map(input).collect::<Vec<u8>>()).unwrap();
    let (source, sink) = (File::open(&input_path).unwrap(), File::create(&output_path).unwrap());
    let io = |error: std::io::Error| error.raw_os_error().unwrap_or(1);
    let options = options.writer(|result| match &result.outcome {
        Outcome::Done(bytes) => sink.write_all_at(bytes, result.number * SIZE).map_err(io),
        _ => Err(1),
    });
    let running = options.start_with_reader(
        |number, bytes| {
            bytes.resize(usize::try_from(SIZE).unwrap(), 0);
            let length = source.read_at(bytes, number * SIZE).map_err(io)?;
            Ok(length > 0)
        },
        |item, result| {
            begun.add_own_process()?;
            compute(Duration::from_micros(50));
            result.extend(item.bytes.iter().map(|byte| byte + 1));
            Ok(())
        },
    );
    let mut running = running.unwrap();
    let mut numbers = Vec::new();
    loop {
        let mut pids: Vec<u32> = running.worker_pids().iter().map(|pid| pid.0).collect();
        let new_workers: Vec<u32> = pids.iter().copied().filter(|pid| !begun.contains(*pid)).collect();
        pids.extend([running.reader_pid(), running.writer_pid()].into_iter().flatten().map(|pid| pid.0));
        on_each_round(&pids, &new_workers);
        match running.next_within(Some(Duration::from_millis(1))).unwrap() {
            NextResult::Result(result) => {
                assert_eq!(
                    result.outcome,
                    Outcome::Done(Vec::new()),
                    "the writer gets the bytes, not the caller"
                );
                numbers.push(result.number);
            }
            NextResult::TimedOut => {}
            NextResult::End => break,
        }
    }
    assert_eq!(running.progress().total, Some(ITEMS));
    numbers.sort_unstable();
    assert_eq!(numbers, Vec::from_iter(0..ITEMS));
    let expected: Vec<u8> = (0..ITEMS).flat_map(input).map(|byte| byte + 1).collect();
    assert!(std::fs::read(&output_path).unwrap() == expected, "the output is wrong");
}

#[test]
fn a_reader_and_a_writer_pass_all_items_through_small_shared_memories() {
    run_with_files(farm(2).ring_bytes(4096).input_bytes(4096), |_, _| {});
    run_with_files(farm(3).window(8).chunk(2).in_order(), |_, _| {});
}

#[test]
fn any_process_of_the_farm_may_be_killed_at_any_moment() {
    let (mut calls, mut kills, mut early_kills) = (0, 0, 0);
    run_with_files(farm(2).ring_bytes(4096).input_bytes(16_384).attempts(1000), |pids, new_workers| {
        calls += 1;
        let is_allowed = |pid: &&u32| early_kills < MOST_EARLY_KILLS || !new_workers.contains(*pid);
        let allowed: Vec<u32> = pids.iter().filter(is_allowed).copied().collect();
        if calls % 23 == 0 && kills < 50 && !allowed.is_empty() {
            let pid = allowed[kills % allowed.len()];
            early_kills += usize::from(new_workers.contains(&pid));
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
            kills += 1;
        }
    });
    assert_eq!(kills, 50);
}

#[test]
fn a_writer_in_order_gets_the_results_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("order");
    let file = File::create(&path).unwrap();
    let running = farm(3)
        .in_order()
        .writer(|result| {
            let mut file = &file;
            std::io::Write::write_all(&mut file, &result.number.to_ne_bytes()).map_err(|_| 1)
        })
        .start(500, |item, _| {
            compute(Duration::from_micros(item.number % 7 * 10));
            Ok(())
        });
    assert_eq!(running.unwrap().count(), 500);
    let written = std::fs::read(&path).unwrap();
    assert_eq!(written, (0..500_u64).flat_map(u64::to_ne_bytes).collect::<Vec<u8>>());
}

#[test]
fn a_writer_that_is_killed_while_it_writes_gets_this_result_again() {
    let directory = tempfile::tempdir().unwrap();
    let (log, killed) = (directory.path().join("log"), directory.path().join("killed"));
    let file = File::create(&log).unwrap();
    let running = farm(2)
        .in_order()
        .writer(|result| {
            let mut file = &file;
            std::io::Write::write_all(&mut file, format!("{} ", result.number).as_bytes()).map_err(|_| 1)?;
            if result.number == 3 && is_first(&killed) {
                end_by(libc::SIGKILL);
            }
            Ok(())
        })
        .start(6, |_, _| Ok(()));
    assert_eq!(running.unwrap().count(), 6);
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "0 1 2 3 3 4 5 ");
}

#[test]
fn a_writer_that_is_killed_between_two_results_is_replaced_each_time() {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let options = farm(1).attempts(2).writer(|_| Ok(()));
    let work =
        |_: WorkItem<'_>, _: &mut Vec<u8>| nix::unistd::read(&reader, &mut [0]).map(drop).map_err(|_| 1);
    let mut running = options.start(6, work).unwrap();
    for number in 0..6 {
        nix::unistd::write(&writer, &[1]).unwrap();
        assert!(matches!(running.next_within(None), Ok(NextResult::Result(_))));
        let idle = running.writer_pid().filter(|_| number < 5);
        if let Some(pid) = idle {
            kill(Pid::from_raw(pid.0.cast_signed()), Signal::SIGKILL).unwrap();
        }
        while idle.is_some() && running.writer_pid() == idle {
            assert_eq!(running.next_within(Some(Duration::from_millis(1))), Ok(NextResult::TimedOut));
        }
    }
    assert_eq!(running.next_within(None), Ok(NextResult::End));
    assert_eq!(running.progress().replaced, 5);
}

#[test]
fn a_writer_writes_at_its_end_what_it_held_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("output");
    let held_back = std::cell::RefCell::new(Vec::new());
    let options = farm(2).in_order().writer(|result| {
        held_back.borrow_mut().push(result.number);
        Ok(())
    });
    let options =
        options.on_writer_end(|| std::fs::write(&path, format!("{:?}", held_back.borrow())).map_err(|_| 1));
    assert_eq!(options.start(5, |_, _| Ok(())).unwrap().map(Result::unwrap).count(), 5);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "[0, 1, 2, 3, 4]");
}

#[test]
fn a_writer_that_fails_at_its_end_is_an_error_after_the_last_result() {
    for (code, status) in [(7, 7), (-3, 1), (256, 1)] {
        let options = farm(2).writer(|_| Ok(())).on_writer_end(|| Err(code));
        let mut running = options.start(5, |_, _| Ok(())).unwrap();
        assert_eq!(running.by_ref().take(5).filter(Result::is_ok).count(), 5);
        let (process, end) = (IoProcess::Writer, ExitStatus::Code(status));
        assert_eq!(running.next(), Some(Err(FarmError::IoProcessEndFailed { process, end })));
        assert_eq!(running.next(), None);
    }
}

/// Runs a farm to its error.
fn error_of(running: Result<pjw_spawn::farm::RunningFarm<'_>, FarmError>) -> FarmError {
    let mut running = running.unwrap();
    let error = running.find_map(Result::err).unwrap();
    assert!(running.worker_pids().is_empty() && running.reader_pid().is_none());
    assert!(running.next().is_none());
    error
}

#[test]
fn errors_of_the_reader_and_the_writer_end_the_farm_and_name_the_item() {
    let read = |number: u64, bytes: &mut Vec<u8>| {
        bytes.push(1);
        if number == 5 { Err(42) } else { Ok(true) }
    };
    let error = error_of(farm(2).start_with_reader(read, |_, _| Ok(())));
    let (process, number) = (IoProcess::Reader, 5);
    assert_eq!(error, FarmError::IoProcessFailed { process, number, code: 42 });
    let write = |result: &pjw_spawn::farm::ItemResult| if result.number == 4 { Err(13) } else { Ok(()) };
    let error = error_of(farm(2).in_order().writer(write).start(9, |_, _| Ok(())));
    let (process, number) = (IoProcess::Writer, 4);
    assert_eq!(error, FarmError::IoProcessFailed { process, number, code: 13 });
}

#[test]
fn a_reader_or_writer_that_dies_three_times_at_an_item_ends_the_farm() {
    let read = |number: u64, _: &mut Vec<u8>| if number == 5 { end_by(libc::SIGBUS) } else { Ok(true) };
    let error = error_of(farm(2).start_with_reader(read, |_, _| Ok(())));
    let (process, end) = (IoProcess::Reader, ExitStatus::Signal(libc::SIGBUS));
    assert_eq!(error, FarmError::IoProcessDies { process, number: 5, deaths: 3, end });
    let write = |result: &pjw_spawn::farm::ItemResult| match result.number {
        6 => end_by(libc::SIGTERM),
        _ => Ok(()),
    };
    let error = error_of(farm(2).in_order().writer(write).start(9, |_, _| Ok(())));
    let (process, end) = (IoProcess::Writer, ExitStatus::Signal(libc::SIGTERM));
    assert_eq!(error, FarmError::IoProcessDies { process, number: 6, deaths: 3, end });
}

#[test]
fn an_item_that_is_larger_than_the_memory_for_items_is_refused_with_both_sizes() {
    let read = |number: u64, bytes: &mut Vec<u8>| {
        bytes.resize(if number == 2 { 4097 } else { 4096 }, 0);
        Ok(true)
    };
    let error = error_of(farm(1).input_bytes(4096).start_with_reader(read, |_, _| Ok(())));
    assert_eq!(error, FarmError::ItemTooLarge { number: 2, size: 4097, limit: 4096 });
}

#[test]
fn an_input_without_items_ends_at_once() {
    let running = farm(2).start_with_reader(|_, _| Ok(false), |_, _| Ok(()));
    assert_eq!(running.unwrap().count(), 0);
}
