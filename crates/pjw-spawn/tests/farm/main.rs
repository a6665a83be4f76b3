//! Farms of real processes: items, results, processes that die, CPUs.
#![allow(clippy::unwrap_used, clippy::panic)] // a test may fail

mod deaths;
mod input_output;
mod results;
mod starting;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pjw_spawn::farm::Farm;

/// The options of a farm in a test. The tests run in threads of one process.
fn farm<'a>(workers: u32) -> Farm<'a> {
    // SAFETY: the functions of the tests compute, read and write files, and end processes. They wait for no lock.
    unsafe { Farm::new(workers).allow_threads() }
}

/// The most workers of a farm that a test kills before they have begun an item. A new worker may get its first CPU time
/// late, and a farm gives up after ten deaths of a worker in a row without an item.
const MOST_EARLY_KILLS: usize = 8;

/// Which workers have begun an item. Each writes a byte into a memory file, at the place of its process id.
struct BegunWorkers(File);

impl BegunWorkers {
    fn new() -> Self {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        Self(rustix::fs::memfd_create("begun", flags).unwrap().into())
    }

    /// A worker calls this when it begins an item. Fails with the code of an item.
    fn add_own_process(&self) -> Result<(), i32> {
        self.0.write_all_at(&[1], std::process::id().into()).map_err(|_| 1)
    }

    fn contains(&self, pid: u32) -> bool {
        let mut byte = [0];
        self.0.read_at(&mut byte, pid.into()).unwrap() == 1 && byte == [1]
    }
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
