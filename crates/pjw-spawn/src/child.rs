//! A started process, and how to wait for its end through its pidfd.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use pjw_core::ids::Pid;

/// A process that this crate has started, with its process id and its pidfd. Dropping this value closes the pidfd and
/// does not kill the process.
#[derive(Debug)]
pub struct Child {
    /// The process id. It refers to this process until the caller has waited for the end of the process, for
    /// example by [`Child::wait`].
    pub pid: Pid,
    /// The pidfd of the process: pidfd_open(2). It becomes readable when the process ends.
    pub pidfd: OwnedFd,
}

/// How a process ended: its exit status, or the number of the signal that killed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// The process exited with this exit status, 0 to 255.
    Code(i32),
    /// The signal with this number killed the process.
    Signal(i32),
}

impl Child {
    /// Waits until the process ends, and removes it from the process table. Returns how the process ended.
    ///
    /// # Errors
    /// `ECHILD` if the process is no child of the calling process, or if the caller has already waited for its end.
    /// Also `ECHILD`, after the end of the process, if the caller ignores `SIGCHLD`: the kernel then discards the exit
    /// status.
    pub fn wait(&self) -> Result<ExitStatus, Errno> {
        wait_until_ended(|| self.wait_once(libc::WEXITED))
    }

    /// Checks whether the process has ended, without waiting. If so, removes the process from the process table and
    /// returns how it ended. `None` if the process still runs.
    ///
    /// # Errors
    /// The errors of [`Child::wait`].
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, Errno> {
        self.wait_once(libc::WEXITED | libc::WNOHANG)
    }

    /// Returns whether the process is a child of the calling process, or has ended. Another thread, or the kernel if
    /// `SIGCHLD` is ignored, may have taken the exit status of a child already.
    pub(crate) fn is_own_or_ended(&self) -> bool {
        is_own(Id::PIDFd(self.pidfd.as_fd())) || self.send_signal(0) == Err(Errno::ESRCH)
    }

    /// Kills the process by `SIGKILL`, and waits until it has ended.
    pub(crate) fn kill_and_wait(&self) {
        let _ = self.send_signal(libc::SIGKILL);
        let _ = self.wait();
    }

    /// Calls [`wait_once`] for this process.
    fn wait_once(&self, flags: i32) -> Result<Option<ExitStatus>, Errno> {
        let pidfd = libc::id_t::try_from(self.pidfd.as_raw_fd()).map_err(|_| Errno::EBADF)?;
        wait_once(libc::P_PIDFD, pidfd, flags)
    }

    /// Sends the signal with the number `signal` to the process by pidfd_send_signal(2). The signal never reaches
    /// another process, even if this process has ended and its process id was given to another one.
    ///
    /// # Errors
    /// `ESRCH` if the process has ended and the caller has waited for its end. `EPERM` if the caller is not allowed
    /// to send signals to the process. `EINVAL` if there is no signal with this number.
    pub fn send_signal(&self, signal: i32) -> Result<(), Errno> {
        let (pidfd, no_info, no_flags) = (self.pidfd.as_raw_fd(), std::ptr::null::<libc::siginfo_t>(), 0);
        // SAFETY: the descriptor is open, and a null pointer stands for the usual information.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, signal, no_info, no_flags) };
        Errno::result(sent).map(drop)
    }
}

/// Calls waitid(2) once with the options `flags`, for the child process that `kind` and `id` name. Returns how the
/// process ended. `None` if `flags` contain `WNOHANG` and the process still runs. Fails with `EINTR` if a signal has
/// interrupted the call. The function `waitid` of nix can't be used, because it fails for a process that was ended by a
/// real-time signal.
fn wait_once(kind: libc::idtype_t, id: libc::id_t, flags: i32) -> Result<Option<ExitStatus>, Errno> {
    // SAFETY: zero is a valid value of each field of a siginfo_t. A pid of 0 stands for "no child has ended".
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one siginfo_t into `info`, which outlives the call.
    Errno::result(unsafe { libc::waitid(kind, id, &raw mut info, flags) })?;
    // SAFETY: after waitid(2) these fields of the union are in use, or all bytes are zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok(match (pid, info.si_code) {
        (0, _) => None,
        (_, libc::CLD_EXITED) => Some(ExitStatus::Code(status)),
        _ => Some(ExitStatus::Signal(status)),
    })
}

/// Calls `wait` again while it was interrupted by a signal, and returns how the process ended. `wait` waits for the end
/// of a process.
fn wait_until_ended(wait: impl Fn() -> Result<Option<ExitStatus>, Errno>) -> Result<ExitStatus, Errno> {
    loop {
        match wait() {
            Ok(Some(exit)) => return Ok(exit),
            Ok(None) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Waits until the child process `pid` ends, and returns how it ended. The process stays in the process table, so it
/// keeps its process id and can be waited for again.
///
/// # Errors
/// `ECHILD` if the process is no child of the calling process, or if its exit status was discarded.
pub(crate) fn wait_without_reaping(pid: Pid) -> Result<ExitStatus, Errno> {
    wait_until_ended(|| wait_once(libc::P_PID, pid.0, libc::WEXITED | libc::WNOWAIT))
}

/// Kills a child process that has no pidfd here, and waits for its end. Does nothing if `pid` is no child of the
/// calling process. A child that was not waited for keeps its process id.
pub(crate) fn end_without_pidfd(pid: Pid) {
    let process = nix::unistd::Pid::from_raw(pid.0.cast_signed());
    if is_own(Id::Pid(process)) {
        let _ = kill(process, Signal::SIGKILL);
        // A signal handler of the caller may interrupt the wait, which is then repeated.
        let _ = wait_until_ended(|| wait_once(libc::P_PID, pid.0, libc::WEXITED));
    }
}

/// Returns whether `process` is a child of the calling process that was not waited for.
fn is_own(process: Id<'_>) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    // Other errors mean only that nix can't represent how the child has ended.
    waitid(process, flags) != Err(Errno::ECHILD)
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, sigaction};

    use super::*;

    extern "C" fn do_nothing(_: i32) {}

    #[test]
    fn a_killed_child_is_waited_for_also_if_signals_interrupt_the_caller() {
        // Without `SA_RESTART`, a handled signal interrupts system calls: signal(7).
        let action = SigAction::new(SigHandler::Handler(do_nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, and no other test uses this signal.
        unsafe { sigaction(Signal::SIGURG, &action) }.unwrap();
        // SAFETY: has no precondition.
        let caller = unsafe { libc::pthread_self() };
        let is_done = AtomicBool::new(false);
        let kill_children = || {
            let is_gone = |_: &i32| {
                // SAFETY: the new process only waits for its end.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    loop {
                        // SAFETY: has no precondition.
                        unsafe { libc::pause() };
                    }
                }
                end_without_pidfd(Pid(pid.cast_unsigned()));
                !is_own(Id::Pid(nix::unistd::Pid::from_raw(pid)))
            };
            (0..100).filter(is_gone).count()
        };
        let gone = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    // SAFETY: the thread lives until this one has ended.
                    unsafe { libc::pthread_kill(caller, libc::SIGURG) };
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
            let gone = kill_children();
            is_done.store(true, Ordering::Relaxed);
            gone
        });
        assert_eq!(gone, 100);
    }
}
