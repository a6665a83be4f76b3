//! Why an instance was not started: the step that failed, and its errno.

use std::fmt;

use nix::errno::Errno;
use thiserror::Error;

/// A step of starting a process, such as executing the program. If a start fails, the error contains the step that
/// failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpawnStep {
    /// The kernel creates the process: clone3(2). Changes of the signal mask and of resource limits belong to
    /// this step too.
    Clone,
    /// The kernel creates the process in the cgroup that the [`Placement`](crate::Placement) of the process contains:
    /// clone3(2) with `CLONE_INTO_CGROUP`.
    Cgroup,
    /// The process gets its affinity mask and its memory policy. It sets them itself, or the thread that starts the
    /// process sets its own, which the process inherits.
    Mask,
    /// The process changes its supplementary groups, its group and its user to those that the
    /// [`SpawnContext`](crate::SpawnContext) sets.
    Credentials,
    /// The process changes to the working directory that the [`SpawnContext`](crate::SpawnContext) sets.
    Directory,
    /// The process replaces its standard input, output and error by those that the caller chose for it.
    Stdio,
    /// The process executes the program: execve(2).
    Exec,
}

impl SpawnStep {
    /// All steps. The index of a step is its number.
    const ALL: [Self; 7] =
        [Self::Clone, Self::Cgroup, Self::Mask, Self::Credentials, Self::Directory, Self::Stdio, Self::Exec];

    /// Returns the number of the step, counted from 0 in the order of the variants. Messages to the parent process
    /// contain the number.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }

    /// Returns the step with the number `number`, as [`SpawnStep::number`] returns it. `None` if no step has the
    /// number.
    pub(crate) fn from_number(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }

    /// Returns the name of this step of starting a process, such as `exec`. The JSON of `pjwctl spawn --json`
    /// contains the name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clone => "clone",
            Self::Cgroup => "cgroup",
            Self::Mask => "mask",
            Self::Credentials => "credentials",
            Self::Directory => "directory",
            Self::Stdio => "stdio",
            Self::Exec => "exec",
        }
    }
}

impl fmt::Display for SpawnStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error: a process could not be started. Contains the step that failed, and the error number of its system call.
///
/// Special case: tasks, which are processes that share one address space. A further process, the host of their
/// [`AddressSpace`](crate::tasks::AddressSpace), starts them. If the host has ended, the step is [`SpawnStep::Clone`].
/// The error number is then `EOWNERDEAD` if `SIGKILL` has ended the host, and `ENOTRECOVERABLE` if the host ended in
/// another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{}", self.text())]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// The error number of the failed system call.
    pub errno: Errno,
}

impl SpawnError {
    /// Returns the text of the error.
    fn text(&self) -> String {
        match (self.step, self.errno) {
            (SpawnStep::Clone, Errno::EOWNERDEAD) => {
                "the process that hosts the tasks was ended by signal 9".to_owned()
            }
            (SpawnStep::Clone, Errno::ENOTRECOVERABLE) => {
                "the process that hosts the tasks has ended".to_owned()
            }
            (step, errno) => format!("step {step} failed: {}{}", errno.desc(), self.remedy()),
        }
    }

    /// Returns a clause with the remedy if the error has a usual cause, and otherwise an empty text.
    fn remedy(&self) -> &'static str {
        match (self.step, self.errno) {
            (SpawnStep::Clone | SpawnStep::Cgroup, Errno::EAGAIN) => {
                "; a limit on processes is reached: raise pids.max of the cgroup, ulimit -u, kernel.pid_max or \
                 kernel.threads-max"
            }
            // The limit is that of the user to whom the process has changed: execve(2).
            (SpawnStep::Exec, Errno::EAGAIN) => "; its user has too many processes: raise ulimit -u",
            _ => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_its_number() {
        for (number, step) in SpawnStep::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(step.number()), number);
            assert_eq!(SpawnStep::from_number(number), Some(step));
        }
        assert_eq!(SpawnStep::from_number(SpawnStep::ALL.len()), None);
    }

    #[test]
    fn the_end_of_the_host_is_named_instead_of_its_error_number() {
        let text = |step, errno| SpawnError { step, errno }.to_string();
        let killed = "the process that hosts the tasks was ended by signal 9";
        assert_eq!(text(SpawnStep::Clone, Errno::EOWNERDEAD), killed);
        let ended = "the process that hosts the tasks has ended";
        assert_eq!(text(SpawnStep::Clone, Errno::ENOTRECOVERABLE), ended);
        assert_eq!(text(SpawnStep::Exec, Errno::ENOENT), "step exec failed: No such file or directory");
    }
}
