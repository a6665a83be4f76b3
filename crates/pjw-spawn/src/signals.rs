//! The blocked signals of the calling thread, and the actions of signals. The blocked signals are read and set without
//! the C library's functions for them, because these leave out two signals that the library uses.

use nix::errno::Errno;

use crate::bare;

/// A set of signals in the form that system calls such as rt_sigprocmask(2) use: one bit for each signal. The set has
/// 64 bits on every architecture of Linux except MIPS.
pub(crate) type KernelSignals = u64;

/// The first real-time signal of the kernel: linux/signal.h. That of the C library, `SIGRTMIN`, is a later one.
const FIRST_REAL_TIME_SIGNAL: i32 = 32;

/// Blocks every signal for the calling thread, except those that the C library uses itself. Returns the signals that
/// were blocked before.
pub(crate) fn block_all_signals() -> KernelSignals {
    change_blocked_signals(libc::SIG_BLOCK, Some(!library_signals()))
}

/// Returns the real-time signals that the C library keeps for itself, nptl(7). setuid(3) and similar functions send one
/// to each thread, and wait until all threads have handled it.
fn library_signals() -> KernelSignals {
    (FIRST_REAL_TIME_SIGNAL..libc::SIGRTMIN()).fold(0, |signals, signal| signals | 1 << (signal - 1))
}

/// Sets the blocked signals of the calling thread to exactly `signals`.
pub(crate) fn set_blocked_signals(signals: KernelSignals) {
    change_blocked_signals(libc::SIG_SETMASK, Some(signals));
}

/// Returns the signals that the calling thread has blocked.
pub(crate) fn blocked_signals() -> KernelSignals {
    change_blocked_signals(libc::SIG_BLOCK, None)
}

/// Changes the set of signals that the calling thread has blocked, by rt_sigprocmask(2). Returns the set before the
/// change. `how` says what happens with `signals`, for example `SIG_BLOCK`. If `signals` is `None`, changes nothing.
/// Can't fail: the system call fails only for an invalid pointer or size.
fn change_blocked_signals(how: i32, signals: Option<KernelSignals>) -> KernelSignals {
    let new = signals.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut old: KernelSignals = 0;
    // SAFETY: `new` is null or points to a set of the given size, `old` to room for one. Both outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, how, new, &raw mut old, size_of::<KernelSignals>())
    };
    debug_assert_eq!(Errno::result(result), Ok(0));
    old
}

/// Restores the default action of `SIGSEGV`, `SIGBUS` and `SIGCHLD`. A program that starts processes should call this
/// function before it starts the first one. There are two reasons. Rust's runtime has set handlers for `SIGSEGV` and
/// `SIGBUS`, which ignore the first such signal that another process sends. And a process can inherit from its parent
/// that `SIGCHLD` is ignored. The kernel then discards the exit statuses of its children, and
/// [`Child::wait`](crate::Child::wait) fails with `ECHILD`.
pub fn reset_launcher_signals() {
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGCHLD] {
        set_default_action(signal);
    }
}

/// Restores the default action of `SIGSEGV` and `SIGBUS` if they have a handler. Ignored signals stay ignored. Rust's
/// runtime sets these handlers before `main`, to report an overflow of the stack. They ignore the first such signal
/// that another process sends. A program that only starts another program should call this function first, so that each
/// such signal ends it.
pub fn clear_fault_handlers() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        clear_handler(signal.into());
    }
}

/// Returns whether the kernel discards the exit status of each child of the calling process. This is so if the process
/// ignores `SIGCHLD` or has set `SA_NOCLDWAIT`: wait(2).
pub(crate) fn child_status_is_discarded() -> bool {
    // SAFETY: zero is a valid value of each field.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null pointer changes nothing, and `action` is room for the present action.
    unsafe { libc::sigaction(libc::SIGCHLD, std::ptr::null(), &raw mut action) };
    action.sa_sigaction == libc::SIG_IGN || action.sa_flags & libc::SA_NOCLDWAIT != 0
}

/// Sets the action of each signal that has a handler to the default action, for the calling process only, as clone3(2)
/// does with `CLONE_CLEAR_SIGHAND`. Ignored signals stay ignored. Does not change the variable `errno` of the C
/// library, and takes none of its locks.
pub(crate) fn clear_handlers() {
    (1..=i64::from(KernelSignals::BITS)).for_each(clear_handler);
}

/// Sets the action of the signal with the number `signal` to the default action if it has a handler, as
/// [`clear_handlers`] does for all signals.
fn clear_handler(signal: i64) {
    let size = size_of::<KernelSignals>() as i64;
    // The kernel's struct sigaction begins with the handler, and has 32 bytes. The default action has only zeros.
    let (mut action, default) = ([0_u64; 4], [0_u64; 4]);
    let read = [signal, 0, bare::address(&raw mut action), size, 0];
    let write = [signal, bare::address(&raw const default), 0, size, 0];
    // SAFETY: the kernel writes one action to `action`.
    let is_known = unsafe { bare::raw_syscall(libc::SYS_rt_sigaction, read) }.is_ok();
    if is_known && ![libc::SIG_DFL, libc::SIG_IGN].map(|action| action as u64).contains(&action[0]) {
        // SAFETY: the kernel reads one action.
        let _ = unsafe { bare::raw_syscall(libc::SYS_rt_sigaction, write) };
    }
}

/// Sets the action of the signal with the number `signal` to the default action, for the calling process only. A parent
/// that shares memory with the process (`CLONE_VM`) has its own table of signal actions, and so is not changed.
pub(crate) fn set_default_action(signal: i32) {
    // SAFETY: a null action is SIG_DFL with an empty set of signals.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_are_cleared_and_ignored_signals_stay_ignored() {
        // The actions are the whole process's, so a process of its own changes them.
        // SAFETY: the new process makes system calls only, and ends.
        let process = unsafe { libc::fork() };
        if process == 0 {
            let handler = libc::_exit as *const () as libc::sighandler_t;
            // SAFETY: as above. The signals that have the handler do not arrive.
            unsafe {
                libc::signal(libc::SIGUSR1, handler);
                libc::signal(libc::SIGRTMAX(), handler);
                libc::signal(libc::SIGUSR2, libc::SIG_IGN);
                clear_handlers();
                let actions = [libc::SIGUSR1, libc::SIGRTMAX(), libc::SIGUSR2]
                    .map(|signal| libc::signal(signal, libc::SIG_DFL));
                libc::_exit(i32::from(actions != [libc::SIG_DFL, libc::SIG_DFL, libc::SIG_IGN]));
            }
        }
        let end = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(process), None).unwrap();
        assert_eq!(end, nix::sys::wait::WaitStatus::Exited(nix::unistd::Pid::from_raw(process), 0));
    }
}
