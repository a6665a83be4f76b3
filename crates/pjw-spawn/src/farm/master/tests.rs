//! Farms whose shared memory is overwritten.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{NextResult, RunningFarm};
use crate::farm::{Farm, FarmError, ItemResult, Outcome, writer};

/// Returns the place of the next message for the writer, if the writer has taken a message before and has not taken
/// this one.
fn waiting_message(farm: &RunningFarm<'_>) -> Option<u64> {
    let control = &farm.shared.control().to_writer;
    let (head, tail) = (control.head.load(Ordering::SeqCst), control.tail.0.load(Ordering::SeqCst));
    (tail > 0 && head > tail).then_some(tail)
}

#[test]
fn a_result_that_is_overwritten_on_its_way_to_the_writer_ends_the_farm_with_the_number_of_the_item() {
    // Programs that other tests start meanwhile must not inherit the pipe: a test counts the descriptors of a program.
    let (held, released) = std::io::pipe().unwrap();
    // SAFETY: the functions wait for no lock.
    let options = unsafe { Farm::new(1).allow_threads() }.in_order().writer(|result| {
        if result.number == 0 {
            nix::unistd::read(&held, &mut [0]).map_err(|_| 1)?;
        }
        Ok(())
    });
    let mut farm = options.start(3, |_, _| Ok(())).unwrap();
    let place = loop {
        assert_eq!(farm.next_within(Some(Duration::from_millis(1))), Ok(NextResult::TimedOut));
        if let Some(place) = waiting_message(&farm) {
            break place;
        }
    };
    // No message has this kind. The kind comes after the 8 bytes of the number.
    // SAFETY: the writer reads no message as long as it holds the first result.
    unsafe { writer::ring(&farm.shared).bytes.write(place + 8, &99_u32.to_ne_bytes()) };
    nix::unistd::write(&released, &[0]).unwrap();
    let written = ItemResult { number: 0, outcome: Outcome::Done(Vec::new()) };
    assert_eq!(farm.next_within(None), Ok(NextResult::Result(written)));
    assert_eq!(farm.next_within(None), Err(FarmError::ResultOverwritten { number: 1 }));
    assert_eq!(farm.next_within(None), Ok(NextResult::End));
    assert!(farm.worker_pids().is_empty() && farm.writer_pid().is_none());
}
