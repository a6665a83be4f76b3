//! What is known of one instance, and what its end says.

use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use pjw_core::cpuset::CpuSet;
use pjw_spawn::{Child, ExitStatus, SpawnError};

use crate::commands::interpreter::missing_interpreter_text;
use crate::commands::run::{NOT_EXECUTABLE, NOT_FOUND};

/// The time in which a task that can't do without brk(2) ends: its C library fails before `main`.
const START_OF_A_TASK: Duration = Duration::from_secs(1);
/// The hint that is appended to the message about a task (an instance with `--share memory`) that failed soon after its
/// start. The hint says that the program possibly called brk(2), which a task can't use.
pub(super) const BRK_HINT: &str = "; a task has no brk(2): a program that calls it, or is linked with a static glibc before 2.36, can end \
                        like this (docs/tasks.md)";

/// The state of an instance (process) of `pjwctl spawn`: its CPUs, its process id, its exit status, and the error if it
/// failed to start.
#[derive(Debug, Default)]
pub(super) struct InstanceState {
    pub(super) cpus: CpuSet,
    pub(super) pid: Option<u32>,
    pub(super) exit: Option<ExitStatus>,
    pub(super) error: Option<SpawnError>,
    /// Whether the instance has ended and waitid(2) did not tell how.
    pub(super) has_unknown_end: bool,
    pub(super) child: Option<Child>,
    pub(super) began: Option<Instant>,
}

impl InstanceState {
    /// Returns whether pjwctl did not try to start this instance, for example because a signal ended the start.
    pub(super) fn was_not_started(&self) -> bool {
        self.pid.is_none() && self.error.is_none()
    }

    /// Returns whether a failed brk(2) is a possible reason for the end of this instance: within 1 s after its start,
    /// the instance ended with the exit code 127, or by `SIGABRT` or `SIGSEGV`.
    pub(super) fn may_have_missed_brk(&self) -> bool {
        let is_such_an_end = match self.exit {
            Some(ExitStatus::Code(code)) => code == i32::from(NOT_FOUND),
            Some(ExitStatus::Signal(signal)) => {
                [Signal::SIGABRT as i32, Signal::SIGSEGV as i32].contains(&signal)
            }
            None => false,
        };
        is_such_an_end && self.began.is_some_and(|began| began.elapsed() < START_OF_A_TASK)
    }

    /// Returns the exit code of this instance, in the form that shells use:
    ///
    /// - If the instance was killed by a signal: 128 plus the number of the signal.
    /// - If the instance failed to start: 127 if the program, or its interpreter, does not exist, 126 otherwise.
    /// - If the start was cancelled because of the signal `ending`: 128 plus `ending`.
    /// - If the exit status is unknown: 1. If the instance has not ended: 0.
    pub(super) fn exit_code(&self, ending: Option<i32>) -> u8 {
        let of_signal = |signal| u8::try_from(signal).unwrap_or(0).saturating_add(128);
        match (self.exit, self.error) {
            (Some(ExitStatus::Code(code)), _) => u8::try_from(code).unwrap_or(u8::MAX),
            (Some(ExitStatus::Signal(signal)), _) => of_signal(signal),
            (None, Some(error)) if error.errno == Errno::ENOENT => NOT_FOUND,
            (None, Some(_)) => NOT_EXECUTABLE,
            (None, None) if self.was_not_started() => ending.map_or(0, of_signal),
            (None, None) => u8::from(self.has_unknown_end),
        }
    }
}

/// Returns what the user can do if an instance of the program in the file `program` failed to start with the error
/// number `errno`, as text.
pub(super) fn start_failure_remedy(errno: Errno, program: &Path) -> Cow<'static, str> {
    if let Some(text) = Some(program).filter(|_| errno == Errno::ENOENT).and_then(missing_interpreter_text) {
        return text.into();
    }
    let remedy = match errno {
        Errno::ENOENT => "the program, or the interpreter that it names, is gone",
        Errno::E2BIG => "make its arguments and its environment smaller",
        Errno::ENOEXEC => "it needs a format that the kernel knows, or a first line with #!",
        Errno::EAGAIN => "a limit of processes was reached: see pids.max of the cgroup, and ulimit -u",
        Errno::ENOMEM => "the memory is exhausted: start fewer",
        Errno::EMFILE => "too many descriptors are open: see ulimit -n",
        Errno::ENOSYS => "Linux 5.5 or later on x86_64 or aarch64 is needed",
        Errno::EACCES | Errno::EPERM => "check the permissions of the program and its directories",
        _ => "the man pages of clone3(2) and execve(2) have the causes",
    };
    remedy.into()
}
