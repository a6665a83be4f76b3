//! The fork and the exit of a process of the farm.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_core::ids::Pid;

use super::error::FarmError;
use super::functions::ForkFunction;
use crate::child::Child;
use crate::signals::child_status_is_discarded;

/// The exit status of a process of the farm whose function panicked: that of a Rust program that panics.
const PANICKED: i32 = 101;

/// Checks that the calling process can start a farm, and so become the master of the farm. The process must have only
/// one thread, unless `allows_threads` is true. The process must not ignore `SIGCHLD`, because the kernel would then
/// discard the exit status of its children.
pub(crate) fn check_master(allows_threads: bool) -> Result<(), FarmError> {
    let threads = fs::read_dir("/proc/self/task").map_or(1, |tasks| tasks.count() as u64);
    if threads > 1 && !allows_threads {
        return Err(FarmError::MultipleThreads(threads));
    }
    if child_status_is_discarded() {
        return Err(FarmError::ChildSignalIgnored);
    }
    Ok(())
}

/// The result of a fork, which both processes receive. The calling process receives the new process as a [`Child`].
pub(crate) enum ForkResult {
    /// The calling process, with the new one.
    Master(Child),
    /// The new process.
    NewProcess,
}

/// Forks the calling process by calling `function`, or fork(2) if `function` is `None`. The kernel kills the new
/// process when the calling thread ends.
///
/// # Errors
/// The error of the fork. `EINVAL` if `function` returned a negative number, or returned 0 in the calling process.
pub(crate) fn fork(function: &mut Option<ForkFunction<'_>>) -> Result<ForkResult, Errno> {
    // Held during the fork: if another thread held this lock at the fork, it would stay locked in the new process.
    let _stdout = std::io::stdout().lock();
    flush_streams();
    let master = nix::unistd::getpid();
    // Keeps a descriptor free for the pidfd, so that the lack of descriptors is an error before the fork, not after it.
    let reserved = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
    let pid = match function {
        Some(function) => function()?,
        // SAFETY: the process has one thread, or the caller of `Farm::allow_threads` is responsible for what the new
        // process does.
        None => Errno::result(unsafe { libc::fork() })?,
    };
    drop(reserved);
    // With a negative id, kill(2) would signal several processes.
    if pid < 0 || (pid == 0 && nix::unistd::getpid() == master) {
        return Err(Errno::EINVAL);
    }
    if pid == 0 {
        // SAFETY: the call changes only how the kernel treats this process.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64) };
        if nix::unistd::getppid() != master {
            // The master ended before the kernel knew that this process ends with it.
            end(1);
        }
        return Ok(ForkResult::NewProcess);
    }
    let pidfd = pidfd_of(pid).inspect_err(|_| {
        let pid = nix::unistd::Pid::from_raw(pid);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(pid, None);
    })?;
    Ok(ForkResult::Master(Child { pid: Pid(pid.cast_unsigned()), pidfd }))
}

/// Opens the pidfd of a child that was not waited for.
fn pidfd_of(pid: libc::pid_t) -> Result<OwnedFd, Errno> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(Errno::ESRCH)?;
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    pidfd.map_err(|error| Errno::from_raw(error.raw_os_error()))
}

/// Calls `function`, and ends the calling process with the returned exit status, or with 101 if `function` panics.
///
/// The process runs no handlers of atexit(3) and no destructors of the program. These would write to pages that the
/// process shares copy-on-write with the other processes of the farm, while all workers end at the same time.
pub(crate) fn run_and_exit(function: impl FnOnce() -> i32) -> ! {
    let status = catch_unwind(AssertUnwindSafe(function)).unwrap_or(PANICKED);
    flush_streams();
    end(status)
}

fn end(status: i32) -> ! {
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(status) }
}

/// Writes the buffered data of the streams of Rust and of C. Otherwise, a forked process could write this data again.
fn flush_streams() {
    let _ = std::io::stdout().flush();
    // SAFETY: a null pointer stands for all streams that are open for writing.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}
