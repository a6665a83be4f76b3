//! Waits for the stop of a traced process after its execve(2), ptrace(2).

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use crate::bare;

/// Waits until the traced process `pid` has executed its program (execve(2)) or has ended. The calling thread must be
/// its tracer.
///
/// - If a signal stops the process before, delivers the signal and lets the process continue.
/// - The stop after execve(2), or the end of the process, can still be waited for by waitid(2).
/// - `own_pid` is the process id of the process in its own PID namespace. The process writes this number before it
///   requests the trace.
///
/// Makes bare system calls, which do not change `errno`: the process shares the `errno` of the calling thread until
/// its execve(2).
pub(crate) fn continue_until_exec(pid: i64, own_pid: &AtomicI32) {
    while let Some(signal) = wait_for_stop(pid) {
        if signal == libc::SIGTRAP && is_exec_stop(pid, own_pid.load(Relaxed)) {
            return;
        }
        let arguments = [libc::PTRACE_CONT.into(), pid, 0, signal.into(), 0];
        // SAFETY: the process is stopped. The call fails only if the process was killed, which waitid(2) reports next.
        let _ = unsafe { bare::raw_syscall(libc::SYS_ptrace, arguments) };
    }
}

/// Waits until the traced process has stopped, and returns the signal of the stop. `None` if the process has ended, or
/// if waitid(2) fails. The stop remains, so that a later waitid(2) reports it again.
fn wait_for_stop(pid: i64) -> Option<i32> {
    loop {
        // SAFETY: zero is a valid value of each field of a siginfo_t.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // Without `WSTOPPED`, because waitid(2) reports the stops of a traced process in any case.
        let options = i64::from(libc::WEXITED | libc::WNOWAIT);
        let arguments = [libc::P_PID.into(), pid, bare::address(&raw mut info), options, 0];
        // SAFETY: the kernel writes one siginfo_t into `info`, which outlives the call.
        match unsafe { bare::raw_syscall(libc::SYS_waitid, arguments) } {
            Ok(_) => {}
            Err(libc::EINTR) => continue,
            Err(_) => return None,
        }
        // SAFETY: after waitid(2) this field of the union is in use.
        let signal = unsafe { info.si_status() };
        return (info.si_code == libc::CLD_TRAPPED).then_some(signal);
    }
}

/// Returns whether a process that has stopped for `SIGTRAP` has executed its program. The kernel then sends the signal
/// in the name of the process itself (`ptrace_event` in linux/ptrace.h). Another process can't send such a signal: for
/// kill(2), the kernel sets `si_pid` to the sender, and for sigqueue(3), `si_code` is not `SI_USER`.
///
/// `PTRACE_O_TRACEEXEC` would report the same. But this option can be set only while the process is stopped.
fn is_exec_stop(pid: i64, own_pid: i32) -> bool {
    // SAFETY: zero is a valid value of each field of a siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let arguments = [libc::PTRACE_GETSIGINFO.into(), pid, 0, bare::address(&raw mut info), 0];
    // SAFETY: the kernel writes one siginfo_t into `info`, which outlives the call.
    let has_info = unsafe { bare::raw_syscall(libc::SYS_ptrace, arguments) }.is_ok();
    // SAFETY: each value of the bytes of this field is a valid number. With `SI_USER`, the field is in use.
    let sender = unsafe { info.si_pid() };
    has_info && info.si_code == libc::SI_USER && sender == own_pid
}

#[cfg(test)]
mod tests {
    use std::ffi::{CString, OsStr};
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, RawFd};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixStream;

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::Pid;

    use super::*;
    use crate::checks::program::find_program;
    use crate::signals;

    /// Makes a traced process that ignores `SIGTRAP`. It writes a byte to `socket`, reads one, and then executes
    /// true(1). All signals are blocked until directly before the execve(2).
    fn traced_process(socket: RawFd) -> Pid {
        let program = find_program(OsStr::new("true")).unwrap();
        let program = CString::new(program.as_os_str().as_bytes()).unwrap();
        let (arguments, environment) = ([program.as_ptr(), std::ptr::null()], [std::ptr::null()]);
        let null = std::ptr::null_mut::<libc::c_void>();
        let mut byte = 0_u8;
        // SAFETY: the new process makes system calls only, and ends.
        let process = unsafe { libc::fork() };
        if process == 0 {
            // SAFETY: as above. All pointers are to memory of this function.
            unsafe {
                libc::signal(libc::SIGTRAP, libc::SIG_IGN);
                signals::block_all_signals();
                libc::ptrace(libc::PTRACE_TRACEME, 0, null, null);
                libc::write(socket, (&raw const byte).cast(), 1);
                libc::read(socket, (&raw mut byte).cast(), 1);
                signals::set_blocked_signals(0);
                libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
                libc::_exit(127);
            }
        }
        Pid::from_raw(process)
    }

    #[test]
    fn a_sigtrap_of_another_process_is_passed_on_and_is_not_taken_for_the_stop_after_exec() {
        let (mut own_end, other_end) = UnixStream::pair().unwrap();
        let pid = traced_process(other_end.as_raw_fd());
        drop(other_end);
        own_end.read_exact(&mut [0]).unwrap();
        kill(pid, Signal::SIGTRAP).unwrap();
        own_end.write_all(&[0]).unwrap();
        continue_until_exec(pid.as_raw().into(), &AtomicI32::new(pid.as_raw()));
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        let stop = waitpid(pid, None).unwrap();
        kill(pid, Signal::SIGKILL).unwrap();
        let end = waitpid(pid, None).unwrap();
        assert_eq!((name.as_str(), stop), ("true\n", WaitStatus::Stopped(pid, Signal::SIGTRAP)));
        assert_eq!(end, WaitStatus::Signaled(pid, Signal::SIGKILL, false));
    }
}
