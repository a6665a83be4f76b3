//! Why a program can't have a template.

use nix::errno::Errno;
use thiserror::Error;

use crate::failure::SpawnError;

/// Why a program can't have a template. Each message is one line, and ends with the remedy if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TemplateRefusal {
    /// Templates exist for x86_64 only.
    #[error("templates exist for x86_64 only: the program is started by exec")]
    Unsupported,
    /// The process was not started.
    #[error("the program does not start: {0}")]
    Start(#[from] SpawnError),
    /// ptrace(2) is forbidden, by Yama, by a seccomp filter or because the program is not readable.
    #[error(
        "ptrace is forbidden here ({}): kernel.yama.ptrace_scope, a seccomp filter or an unreadable program",
        .0.desc()
    )]
    Forbidden(Errno),
    /// A trace takes the privileges of such a program away.
    #[error("the program is set-user-ID, set-group-ID or has file capabilities: it is started by exec only")]
    Privileged,
    /// A program for another instruction set, or a 32-bit program.
    #[error("the program is not built for {}: it is started by exec only", std::env::consts::ARCH)]
    Architecture,
    /// A library has started threads before `main`. A fork has only one of them.
    #[error("{0} threads run before main: a fork would have only one of them")]
    Threads(u64),
    /// The program ended before it was linked.
    #[error("the program ended before main with exit status {0}")]
    Exited(i32),
    /// The program was killed before it was linked.
    #[error("the program was killed before main by signal {0}")]
    Killed(i32),
    /// The C library keeps the thread id at an unknown place.
    #[error(
        "the C library of the program keeps its thread id at an unknown place: it is started by exec only"
    )]
    ThreadId,
    /// A system call has failed.
    #[error("the template is not made: {step}: {}", errno.desc())]
    Failed {
        /// What was tried.
        step: &'static str,
        /// The error.
        errno: Errno,
    },
}

/// Why a template has made no instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ForkError {
    /// The instance differs from the template in something that the dynamic linker has read. It needs a template of its
    /// own, or exec.
    #[error("the instance has another {0} than the template: it needs a template of its own")]
    Unfit(&'static str),
    /// The template has ended. Instances need a new one, or exec.
    #[error("the template has ended")]
    Ended,
    /// A step has failed for this instance.
    #[error(transparent)]
    Failed(#[from] SpawnError),
}
