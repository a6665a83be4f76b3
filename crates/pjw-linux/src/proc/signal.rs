//! Signals to processes that another program started: pidfd_open(2), pidfd_send_signal(2).

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid as NixPid;
use pjw_core::ids::{Pid, ProcessId};
use rustix::process::{Pid as RustixPid, PidfdFlags, pidfd_open, pidfd_send_signal};

use super::procfs::parse_stat;
use crate::sys::errno::{from_io, from_rustix};

/// Sends the signal `signal` to the process `process`, which is identified by its pid and its start time. If the
/// process has ended, a new process with the same pid does not receive the signal. On a kernel before Linux 5.3, which
/// has no pidfds, this is not certain: the signal goes to the new process if the pid passes to it after this function
/// has checked the start time.
///
/// # Errors
/// `ESRCH` if the process has ended. `EPERM` if the process belongs to another user, and the calling process lacks
/// `CAP_KILL`.
pub fn send_signal(process: ProcessId, signal: Signal) -> Result<(), Errno> {
    let number = i32::try_from(process.pid.0).map_err(|_| Errno::ESRCH)?;
    let pidfd = RustixPid::from_raw(number)
        .ok_or(Errno::ESRCH)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(from_rustix));
    let text = std::fs::read(format!("/proc/{number}/task/{number}/stat")).map_err(from_io);
    let stat = text.map_err(|_| Errno::ESRCH).and_then(|text| parse_stat(&text).ok_or(Errno::EIO))?;
    if stat.start != process.start {
        return Err(Errno::ESRCH);
    }
    let named = rustix::process::Signal::from_named_raw(signal as i32).ok_or(Errno::EINVAL)?;
    match pidfd {
        Ok(pidfd) => pidfd_send_signal(pidfd, named).map_err(from_rustix),
        Err(Errno::ENOSYS) => kill(NixPid::from_raw(number), signal),
        Err(errno) => Err(errno),
    }
}

/// Returns whether the process `pid` is killed but has not ended yet: whether SIGKILL is pending for the process
/// (`SigPnd` and `ShdPnd` in `/proc/PID/status`). The kernel also makes SIGKILL pending when another signal ends the
/// process without a core dump (kernel/signal.c, `complete_signal`). False if there is no such process.
#[must_use]
pub fn is_killed(pid: Pid) -> bool {
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let sets =
        status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    let sets = sets.filter_map(|set| u64::from_str_radix(set.trim(), 16).ok());
    sets.fold(0, |all, set| all | set) & (1 << (Signal::SIGKILL as u32 - 1)) != 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use pjw_core::ids::StartTime;

    use super::*;

    #[test]
    fn a_process_gets_a_signal_and_another_one_with_its_number_does_not() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid(child.id());
        let text = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let start = parse_stat(&text).unwrap().start;
        let earlier = ProcessId { pid, start: StartTime(start.0 - 1) };
        assert_eq!(send_signal(earlier, Signal::SIGKILL), Err(Errno::ESRCH));
        let process = ProcessId { pid, start };
        assert_eq!(send_signal(process, Signal::SIGUSR1), Ok(()));
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGUSR1 as i32));
        assert_eq!(send_signal(process, Signal::SIGKILL), Err(Errno::ESRCH), "it has ended");
    }
}
