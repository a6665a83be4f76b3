//! A stack that is large enough, also under a small limit (`ulimit -s`).
//!
//! The limit `RLIMIT_STACK` holds for the first thread of a process only. If the limit is too small, another thread
//! does the work, and the first one only waits for it. `run`, `spawn` and the job starters of `hook` pass on what is a
//! property of a thread: its signal mask, and the signal that the process gets when its parent ends. A new thread has
//! the other properties, such as the affinity mask and the scheduling policy, from the thread that created it.

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread;

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigSet, SigmaskHow};

/// The size of the stack, in bytes. A build without optimisation needs between 256 and 512 KiB.
const STACK_BYTES: usize = 2 << 20;

/// Calls `work` on a stack of at least 2 MiB, and returns its result. If the stack of this thread is smaller, `work`
/// runs in a new thread. If no thread can be created, `work` runs on the smaller stack.
pub(crate) fn with_enough_stack(work: fn() -> ExitCode) -> ExitCode {
    let limit = getrlimit(Resource::RLIMIT_STACK).map_or(0, |(soft, _)| soft);
    if usize::try_from(limit).unwrap_or(usize::MAX) >= STACK_BYTES { work() } else { run_in_new_thread(work) }
}

/// Runs `work` in a new thread with a stack of [`STACK_BYTES`] bytes, and returns its result. The new thread gets the
/// signal mask and the parent death signal (prctl(2)) of this thread. While `work` runs, this thread blocks all
/// signals. If no thread can be created, runs `work` in this thread. A panic of `work` continues in this thread.
fn run_in_new_thread(work: fn() -> ExitCode) -> ExitCode {
    // A signal that the new thread blocks, to read it from a descriptor, must not come to this thread instead.
    let Ok(mask) = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK) else { return work() };
    let parent_end_signal = prctl::get_pdeathsig().ok().flatten();
    let started = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
        // The kernel keeps this signal for each thread, and a new thread has none.
        let _ = prctl::set_pdeathsig(parent_end_signal);
        let _ = mask.thread_set_mask();
        work()
    });
    match started.map(thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => {
            let _ = mask.thread_set_mask();
            work()
        }
    }
}
