//! Why an instance was not started: the step that failed, and its errno.

use std::fmt;

use nix::errno::Errno;
use thiserror::Error;

/// A step in the start of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The kernel makes the process: clone3(2).
    Clone,
    /// The process is born in the cgroup of its placement: clone3(2) with `CLONE_INTO_CGROUP`.
    Cgroup,
    /// The spawner thread takes the affinity mask and the memory policy of the placement, which the process inherits.
    Mask,
    /// The process takes the groups, the group and the user of the context.
    Credentials,
    /// The process enters the working directory of the context.
    Directory,
    /// The process takes the streams of its instance.
    Stdio,
    /// The process executes the program: execve(2).
    Exec,
}

impl Step {
    /// All steps, each at the place of its number.
    const ALL: [Self; 7] =
        [Self::Clone, Self::Cgroup, Self::Mask, Self::Credentials, Self::Directory, Self::Stdio, Self::Exec];

    /// The number of the step, from 0.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }

    /// The step with a number.
    pub(crate) fn of_number(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }

    /// Returns the name of the step, as in `pjwctl spawn --json`.
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

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An instance that was not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("step {step} failed: {}", errno.desc())]
pub struct SpawnError {
    /// The step that failed.
    pub step: Step,
    /// The error of the step's system call.
    pub errno: Errno,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_its_number() {
        for (number, step) in Step::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(step.number()), number);
            assert_eq!(Step::of_number(number), Some(step));
        }
        assert_eq!(Step::of_number(Step::ALL.len()), None);
    }
}
