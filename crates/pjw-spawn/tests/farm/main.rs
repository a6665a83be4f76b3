//! Farms of real processes: items, results, processes that die, CPUs.
#![allow(clippy::unwrap_used, clippy::panic)] // a test may fail

mod deaths;
mod input_output;
mod results;
mod starting;

use std::fs::OpenOptions;
use std::path::Path;
use std::time::{Duration, Instant};

use pjw_spawn::farm::Farm;

/// The options of a farm in a test. The tests run in threads of one process.
fn farm<'a>(workers: u32) -> Farm<'a> {
    // SAFETY: the functions of the tests compute, read and write files, and end processes. They wait for no lock.
    unsafe { Farm::new(workers).allow_threads() }
}

/// Uses the CPU for this time.
fn compute(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Whether this is the first call with this file in all processes.
fn is_first(file: &Path) -> bool {
    OpenOptions::new().write(true).create_new(true).open(file).is_ok()
}

/// Ends the calling process by a signal.
fn end_by(signal: i32) -> ! {
    // SAFETY: the signal gets its default action and is sent to this process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        libc::_exit(99)
    }
}

/// The bytes of the result of an item: from none to more than fit into a small ring.
fn bytes_of(number: u64) -> Vec<u8> {
    let length = number * 37 % 9000;
    (0..length).map(|at| u8::try_from((number + at) % 251).unwrap()).collect()
}
