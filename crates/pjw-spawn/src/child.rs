//! A started process, and how to wait for its end through its pidfd.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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
        self.is_own()
            || match self.send_signal(0) {
                Err(Errno::ESRCH) => true,
                // A seccomp filter may forbid the call.
                Err(Errno::EPERM | Errno::EACCES | Errno::ENOSYS) => self.has_ended(),
                _ => false,
            }
    }

    /// Returns whether the process is a child of the calling process that was not waited for.
    fn is_own(&self) -> bool {
        self.wait_once(libc::WEXITED | libc::WNOHANG | libc::WNOWAIT).is_ok()
    }

    /// Returns whether the process has ended, also if its exit status was taken already.
    fn has_ended(&self) -> bool {
        let mut ready = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut ready, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// Kills the process by `SIGKILL`, and waits until it has ended. If the signal can't be sent, takes only the exit
    /// status of a process that has ended, because the process may never end.
    pub(crate) fn kill_and_wait(&self) {
        let _ = match self.send_signal(libc::SIGKILL) {
            Ok(()) => self.wait().map(Some),
            Err(_) => self.try_wait(),
        };
    }

    /// Calls [`wait_once`] for this process.
    fn wait_once(&self, flags: i32) -> Result<Option<ExitStatus>, Errno> {
        let pidfd = libc::id_t::try_from(self.pidfd.as_raw_fd()).map_err(|_| Errno::EBADF)?;
        wait_once(libc::P_PIDFD, pidfd, flags)
    }

    /// Sends the signal with the number `signal` to the process by pidfd_send_signal(2). The signal never reaches
    /// another process, even if this process has ended and its process id was given to another one.
    ///
    /// Where a seccomp filter forbids pidfd_send_signal(2), a child of the calling process gets the signal by kill(2).
    /// A child keeps its process id until it is waited for. Except: if another thread waits for it during this call, or
    /// if the caller ignores `SIGCHLD`, the signal can reach a later process with the same process id.
    ///
    /// # Errors
    /// - `ESRCH` if the process has ended and the caller has waited for its end.
    /// - `EPERM` if the caller is not allowed to send signals to the process.
    /// - `EINVAL` if there is no signal with this number.
    /// - The error number of the seccomp filter, if the filter forbids the call, and the process is no child or was
    ///   already waited for.
    pub fn send_signal(&self, signal: i32) -> Result<(), Errno> {
        let (pidfd, no_info, no_flags) = (self.pidfd.as_raw_fd(), std::ptr::null::<libc::siginfo_t>(), 0);
        // SAFETY: the descriptor is open, and a null pointer stands for the usual information.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, signal, no_info, no_flags) };
        match Errno::result(sent) {
            // Also if the process belongs to another user: kill(2) then fails with the same error.
            Err(Errno::EPERM | Errno::EACCES | Errno::ENOSYS) if self.is_own() => kill(self.pid, signal),
            sent => sent.map(drop),
        }
    }
}

/// Sends the signal with the number `signal` to the process `pid` by kill(2). The process must be a child of the
/// calling process that was not waited for, so that no other process has its process id.
fn kill(pid: Pid, signal: i32) -> Result<(), Errno> {
    // SAFETY: the call takes numbers.
    Errno::result(unsafe { libc::kill(pid.0.cast_signed(), signal) }).map(drop)
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
    if is_own_child(pid) && kill(pid, libc::SIGKILL).is_ok() {
        // A signal handler of the caller may interrupt the wait, which is then repeated.
        let _ = wait_until_ended(|| wait_once(libc::P_PID, pid.0, libc::WEXITED));
    }
}

/// Returns whether the process `pid` is a child of the calling process that was not waited for.
fn is_own_child(pid: Pid) -> bool {
    wait_once(libc::P_PID, pid.0, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT).is_ok()
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    use super::*;
    use crate::syscall_filter::refuse_call;
    use crate::{Arguments, Instance, Placement, SpawnContext, Stdio};

    /// Starts a process that sleeps longer than the test takes.
    fn sleeping_child() -> Child {
        let instance = Instance {
            rank: 0,
            size: 1,
            arguments: Arc::new(Arguments::literal(&["sleep", "60"]).unwrap()),
            variables: Vec::new(),
            placement: Arc::new(Placement::default()),
            stdio: Stdio::default(),
        };
        SpawnContext::new("sleep").unwrap().spawn(instance).unwrap().unwrap()
    }

    #[test]
    fn a_child_gets_signals_also_where_pidfd_send_signal_is_forbidden() {
        for errno in [Errno::EPERM, Errno::ENOSYS] {
            // The filter holds for this thread and those that it starts.
            let thread = std::thread::spawn(move || {
                refuse_call(libc::SYS_pidfd_send_signal, errno);
                let child = sleeping_child();
                child.send_signal(libc::SIGTERM).unwrap();
                assert_eq!(child.wait(), Ok(ExitStatus::Signal(libc::SIGTERM)));
                // Another process may have its process id now.
                assert_eq!(child.send_signal(libc::SIGTERM), Err(errno));
                assert!(child.is_own_or_ended());
                let child = sleeping_child();
                child.kill_and_wait();
                assert_eq!(child.try_wait(), Err(Errno::ECHILD), "it was waited for");
            });
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_child_that_can_not_be_killed_is_not_waited_for() {
        let thread = std::thread::spawn(|| {
            let child = sleeping_child();
            refuse_call(libc::SYS_pidfd_send_signal, Errno::EPERM);
            refuse_call(libc::SYS_kill, Errno::EPERM);
            child.kill_and_wait();
            end_without_pidfd(child.pid);
            child
        });
        let child = thread.join().unwrap();
        assert_eq!(child.try_wait(), Ok(None));
        child.kill_and_wait();
    }

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
                !is_own_child(Pid(pid.cast_unsigned()))
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
