//! What tests of several modules share: shells that end with their test, waiting, and lines about skipped tests.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use pjw_core::ids::{Pid, Tid};

/// Serialises the tests that create cpusets of the warden: these share `/pjw`, which exists only while there is a
/// cpuset. A test that first narrows and then widens a mask takes the lock too: the tests of cpusets restore the mask
/// of each thread of the machine that looks as if the kernel had reset it.
pub(crate) fn alone_with_cpusets() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A shell that will run a script. It is killed when the thread that starts it ends, so a run of the tests that is
/// killed leaves no process that computes without an end.
pub(crate) fn shell_that_ends_with_its_thread(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    // SAFETY: the closure runs between fork and exec, and makes only one system call.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    command
}

/// Reports which test is skipped, and why.
pub(crate) fn skip(why: &str) {
    let thread = std::thread::current();
    print_line(&format!("skipped: {}: {why}", thread.name().unwrap_or("a test")));
}

/// Writes a line to stderr directly: a test's own output is shown only if it fails.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Whether a thread sleeps, and the kernel has added all its run time to its CPU time.
///
/// A thread has the state `S` some time before it leaves its CPU, and runs in between. An interrupt or a stop of the
/// machine may make this time long. To read `syscall`, the kernel waits until the thread has left its CPU
/// (`task_current_syscall`, lib/syscall.c). Without the right to read this file, only the state counts.
pub(crate) fn is_asleep(pid: Pid, tid: Tid) -> bool {
    let dir = format!("/proc/{pid}/task/{tid}");
    let stat = fs::read_to_string(format!("{dir}/stat")).unwrap_or_default();
    let has_state = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'));
    has_state && !fs::read_to_string(format!("{dir}/syscall")).is_ok_and(|text| text.starts_with("running"))
}

/// Repeats an attempt until it returns a value.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until_true(what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || holds().then_some(()));
}
