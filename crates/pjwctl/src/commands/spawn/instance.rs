//! The state of one instance, its exit code, and the remedy if it failed to start.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use pjw_core::cpuset::CpuSet;
use pjw_spawn::{Child, ExitStatus, SpawnError, SpawnStep};

use crate::commands::interpreter::missing_interpreter_text;
use crate::commands::run::{NOT_EXECUTABLE, NOT_FOUND};

/// The time in which a task that can't do without brk(2) ends: its C library fails before `main`.
const START_OF_A_TASK: Duration = Duration::from_secs(1);
/// The hint that is appended to the message about a task (an instance with `--share memory`) that failed soon after its
/// start. The hint says that the program possibly called brk(2), which a task can't use.
pub(super) const BRK_HINT: &str = "; a task has no brk(2): a program that calls it, or is linked with a static glibc before 2.36, can end \
                        like this (docs/tasks.md)";

/// The remedy if the program, or its interpreter, existed at the check and not when it was executed.
const PROGRAM_IS_GONE: &str = "the program, or the interpreter that it names, is gone: install it again";

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

    /// Returns whether a signal has ended this instance.
    pub(super) fn has_ended_by_signal(&self) -> bool {
        matches!(self.exit, Some(ExitStatus::Signal(_)))
    }

    /// Returns whether this instance may have ended because brk(2) failed. A task (an instance with `--share memory`)
    /// can't use brk(2). True if the instance ended within 1 s after its start, with the exit code 127 or by `SIGSEGV`.
    pub(super) fn may_have_missed_brk(&self) -> bool {
        self.exit.is_some_and(is_end_without_brk)
            && self.began.is_some_and(|began| began.elapsed() < START_OF_A_TASK)
    }

    /// Returns the exit code of this instance, in the form that shells use. `start_cancelled_by` is the ending signal
    /// (such as SIGTERM) that cancelled the start of the remaining instances. `ending_signal` is the last ending signal
    /// that pjwctl received. pjwctl has sent it to the instances that had begun.
    ///
    /// - If the instance was killed by a signal: 128 plus the number of the signal.
    /// - If the start failed: the exit code of [`start_failure_code`].
    /// - If the instance has ended and its exit status is unknown: 1.
    /// - If the instance was not started: 128 plus `start_cancelled_by`, and 0 without such a signal.
    /// - If the instance has begun and was not waited for: 128 plus `ending_signal`, and 0 without such a signal.
    pub(super) fn exit_code(&self, start_cancelled_by: Option<i32>, ending_signal: Option<i32>) -> u8 {
        let of_signal = |signal| u8::try_from(signal).unwrap_or(0).saturating_add(128);
        match (self.exit, self.error) {
            (Some(ExitStatus::Code(code)), _) => u8::try_from(code).unwrap_or(u8::MAX),
            (Some(ExitStatus::Signal(signal)), _) => of_signal(signal),
            (None, Some(error)) => start_failure_code(error),
            (None, None) if self.has_unknown_end => 1,
            (None, None) if self.was_not_started() => start_cancelled_by.map_or(0, of_signal),
            (None, None) => ending_signal.map_or(0, of_signal),
        }
    }
}

/// Returns whether `exit` is an end that a failure of brk(2) explains:
///
/// - `SIGSEGV`: a static glibc before 2.36 does not check the result of sbrk(3), and copies the thread-local storage to
///   an address near 0 (`__libc_setup_tls`, csu/libc-tls.c).
/// - The exit code 127, with which abort(3) of glibc ends if the signals that it sends do not end the process.
///
/// `SIGABRT` is no such end: most programs that end by it have failed a check of their own.
fn is_end_without_brk(exit: ExitStatus) -> bool {
    match exit {
        ExitStatus::Code(code) => code == i32::from(NOT_FOUND),
        ExitStatus::Signal(signal) => signal == Signal::SIGSEGV as i32,
    }
}

/// Returns the exit code for an instance that failed to start with `error`: 127 if the program, or its interpreter,
/// does not exist, and 126 if the program can't be executed for another reason. 1 if an earlier step failed, such as
/// the creation of the process.
pub(super) fn start_failure_code(error: SpawnError) -> u8 {
    match (error.step, error.errno) {
        (SpawnStep::Exec, Errno::ENOENT) => NOT_FOUND,
        (SpawnStep::Exec, _) => NOT_EXECUTABLE,
        _ => 1,
    }
}

/// Returns what the user can do after an instance of the program in the file `program` failed to start with `error`.
/// The text is a clause that begins with `; `. Empty if the text of `error` already names a remedy.
pub(super) fn start_failure_remedy(error: SpawnError, program: &Path) -> String {
    let remedy = match (error.step, error.errno) {
        // The text of the error names the remedy.
        (SpawnStep::Clone | SpawnStep::Cgroup | SpawnStep::Exec, Errno::EAGAIN) => return String::new(),
        (_, Errno::ENOMEM) => "the memory is exhausted: start fewer",
        (_, Errno::EMFILE | Errno::ENFILE) => "too many descriptors are open: see ulimit -n, and fs.file-max",
        (SpawnStep::Clone, Errno::EPERM | Errno::ENOSYS) => {
            "the seccomp profile of the container, or a kernel before Linux 5.5, refuses the system call: allow clone3(2) in \
             the profile"
        }
        (SpawnStep::Clone, Errno::EINVAL) => "Linux 5.5 or later is needed",
        (SpawnStep::Clone, Errno::EOWNERDEAD) => "dmesg says whether the kernel did so for lack of memory",
        (SpawnStep::Clone, Errno::ENOTRECOVERABLE) => {
            "a task may have written to its memory, which all tasks share, or too many descriptors are on their \
             way: see ulimit -n"
        }
        (SpawnStep::Mask, _) => {
            "the CPUs of its part are offline, or pjwctl may not use them or their NUMA node any more: compare lscpu and \
             Cpus_allowed_list in /proc/self/status, and start again"
        }
        (SpawnStep::Exec, Errno::ENOENT) => {
            let text = missing_interpreter_text(program);
            return format!("; {}", text.as_deref().unwrap_or(PROGRAM_IS_GONE));
        }
        (SpawnStep::Exec, Errno::E2BIG) => "make its arguments and its environment smaller",
        (SpawnStep::Exec, Errno::ENOEXEC) => {
            "it needs a format that the kernel knows, or a first line with #!"
        }
        (SpawnStep::Exec, Errno::EACCES | Errno::EPERM) => {
            "check the permissions of the program and its directories"
        }
        (SpawnStep::Exec, _) => "the man page of execve(2) has the causes",
        (SpawnStep::Clone | SpawnStep::Cgroup, _) => "the man page of clone(2) has the causes",
        (SpawnStep::Credentials | SpawnStep::Directory | SpawnStep::Stdio, _) => {
            "check the user, the working directory and the descriptors that it is to get"
        }
    };
    format!("; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remedy(step: SpawnStep, errno: Errno) -> String {
        start_failure_remedy(SpawnError { step, errno }, Path::new("/no/such/program"))
    }

    #[test]
    fn a_failed_start_has_one_remedy_that_fits_the_step() {
        assert_eq!(
            remedy(SpawnStep::Exec, Errno::ENOENT),
            "; the program, or the interpreter that it names, is gone: install it again"
        );
        for (step, errno, words) in [
            (SpawnStep::Clone, Errno::EPERM, "seccomp profile"),
            (SpawnStep::Clone, Errno::ENOSYS, "seccomp profile"),
            (SpawnStep::Exec, Errno::EPERM, "permissions of the program"),
            (SpawnStep::Mask, Errno::EINVAL, "offline"),
            (SpawnStep::Clone, Errno::EOWNERDEAD, "lack of memory"),
            (SpawnStep::Clone, Errno::ENOTRECOVERABLE, "all tasks share"),
            (SpawnStep::Cgroup, Errno::ENOENT, "clone(2)"),
        ] {
            assert!(remedy(step, errno).contains(words), "{step} {errno}: {}", remedy(step, errno));
        }
        let limit = SpawnError { step: SpawnStep::Clone, errno: Errno::EAGAIN };
        let text = format!("{limit}{}", remedy(limit.step, limit.errno));
        assert_eq!(text.matches("ulimit -u").count(), 1, "{text}");
    }

    #[test]
    fn an_abort_of_the_program_is_no_end_by_a_lack_of_brk() {
        for (exit, expected) in [
            (ExitStatus::Signal(Signal::SIGSEGV as i32), true),
            (ExitStatus::Code(127), true),
            (ExitStatus::Signal(Signal::SIGABRT as i32), false),
            (ExitStatus::Signal(Signal::SIGKILL as i32), false),
            (ExitStatus::Code(126), false),
            (ExitStatus::Code(1), false),
        ] {
            assert_eq!(is_end_without_brk(exit), expected, "{exit:?}");
        }
    }

    #[test]
    fn an_instance_without_an_end_has_the_exit_code_of_the_signal_that_it_got_or_that_cancelled_its_start() {
        let not_started = InstanceState::default();
        let begun = InstanceState { pid: Some(1), ..InstanceState::default() };
        let lost = InstanceState { pid: Some(1), has_unknown_end: true, ..InstanceState::default() };
        for (state, start_cancelled_by, ending_signal, expected) in [
            (&begun, None, None, 0),
            (&begun, None, Some(15), 143),
            (&begun, Some(2), Some(15), 143),
            (&not_started, None, Some(15), 0),
            (&not_started, Some(3), Some(3), 131),
            (&not_started, Some(2), Some(15), 130),
            (&lost, Some(2), Some(15), 1),
        ] {
            let code = state.exit_code(start_cancelled_by, ending_signal);
            assert_eq!(code, expected, "{state:?} {start_cancelled_by:?} {ending_signal:?}");
        }
    }

    #[test]
    fn only_a_failed_execution_has_the_exit_codes_of_a_shell() {
        let code = |step, errno| {
            let error = Some(SpawnError { step, errno });
            InstanceState { error, ..InstanceState::default() }.exit_code(None, None)
        };
        assert_eq!(code(SpawnStep::Exec, Errno::ENOENT), 127);
        assert_eq!(code(SpawnStep::Exec, Errno::EACCES), 126);
        assert_eq!(code(SpawnStep::Clone, Errno::EAGAIN), 1);
        assert_eq!(code(SpawnStep::Directory, Errno::ENOENT), 1);
    }
}
