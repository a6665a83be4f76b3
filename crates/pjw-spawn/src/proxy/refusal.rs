//! Errors: why a program can't have a template, and why a template can't fork an instance.

use nix::errno::Errno;
use thiserror::Error;

use crate::failure::SpawnError;

/// Error: the program can't have a [template](super::Template). A template is a process that has loaded the program,
/// and from which further processes of the program (instances) are forked. The text of each error is one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TemplateError {
    /// The machine is not x86_64. Templates exist for x86_64 only.
    #[error("templates exist for x86_64 only")]
    Unsupported,
    /// The process of the template could not be started. The variant contains the reason.
    #[error("the program does not start: {0}")]
    StartFailed(#[from] SpawnError),
    /// The kernel forbids to trace the program with ptrace(2). The reason is Yama, a seccomp filter or a
    /// program that is not readable. The variant contains the error number.
    #[error(
        "ptrace is forbidden here ({}): kernel.yama.ptrace_scope, a seccomp filter or an unreadable program",
        .0.desc()
    )]
    Forbidden(Errno),
    /// The kernel forbids pidfd_open(2), by which the launcher gets a descriptor of each process that the template
    /// forks. The reason is a seccomp filter. The variant contains the error number.
    #[error("pidfd_open(2) is forbidden here ({}): a seccomp filter refuses the call", .0.desc())]
    PidfdForbidden(Errno),
    /// The program is set-user-ID, is set-group-ID or has file capabilities. Tracing would remove these
    /// privileges.
    #[error("the program is set-user-ID, set-group-ID or has file capabilities")]
    Privileged,
    /// The program is built for another instruction set, or is a 32-bit program.
    #[error("the program is not built for {}", std::env::consts::ARCH)]
    WrongArchitecture,
    /// The memory of the program does not contain its entry point, so the program can't run in any way: its file is
    /// damaged or incomplete.
    #[error("the file of the program is damaged: its entry point is not in the memory that it loads")]
    Damaged,
    /// Libraries of the program have started threads before `main`. The variant contains the number of
    /// threads. A fork would have only one of them.
    #[error("{0} threads run before main: a fork would have only one of them")]
    MultipleThreads(u64),
    /// The program ended before it could become a template: before its dynamic linker had loaded its
    /// libraries, or before it called `fork_here`. The variant contains the exit status.
    #[error("the program ended with exit status {0} before it could be forked")]
    Exited(i32),
    /// A signal killed the program before it could become a template: before its dynamic linker had loaded
    /// its libraries, or before it called `fork_here`. The variant contains the number of the signal.
    #[error("the program was killed by signal {0} before it could be forked")]
    Killed(i32),
    /// The C library of the program stores the thread id at an address that could not be found. A forked
    /// process would keep the thread id of the template, because the stored id could not be updated.
    #[error("the C library of the program keeps its thread id at an unknown place")]
    UnknownThreadIdAddress,
    /// A system call has failed.
    #[error("the template is not made: {step}: {}", errno.desc())]
    Failed {
        /// The operation that failed, such as `socketpair` or `linking`.
        step: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
}

impl TemplateError {
    /// Returns whether this error means that the program can't run at all. Then the start of the program by exec,
    /// without a template, would fail too.
    #[must_use]
    pub fn is_program_failure(&self) -> bool {
        matches!(self, Self::Damaged | Self::StartFailed(_) | Self::Exited(_) | Self::Killed(_))
    }
}

/// Error: a [template](super::Template) could not fork an instance (a process of its program), or a spare could not
/// become an instance. A spare is a stopped process that the template forked in advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ForkError {
    /// The instance differs from the template in a property that can't be changed after the template was
    /// loaded. The text names the property, such as `number of arguments`. The instance needs a template of
    /// its own, or exec.
    #[error("an instance has another {0} than the template")]
    Mismatch(&'static str),
    /// The arguments and variables of the instance are so long that they are written into the memory of the template
    /// by process_vm_writev(2), and the kernel forbids this call. The variant contains the error number. The instance
    /// needs exec.
    #[error(
        "process_vm_writev, for long arguments, is forbidden here ({}): kernel.yama.ptrace_scope or a seccomp filter",
        .0.desc()
    )]
    WriteForbidden(Errno),
    /// The process of the template or of the spare has ended. Further instances need a new template, or exec.
    #[error("the template has ended")]
    Ended,
    /// The process of the template has ended, and the program can't be loaded again. The variant contains the reason.
    #[error("the template has ended, and can't be loaded again: {0}")]
    NotReloaded(TemplateError),
    /// The template still works, and the start of this instance failed. The variant contains the failed step.
    #[error(transparent)]
    Failed(#[from] SpawnError),
}

/// Error: the calling process can't become a template in [`fork_here`](super::fork_here). A template is a process
/// from which further processes of the same program are forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ForkHereError {
    /// The program has more than one thread. The variant contains the number of threads. A forked process
    /// would have only the thread that called [`fork_here`](super::fork_here).
    #[error("fork_here is called with {0} threads: call it before the first thread is started")]
    MultipleThreads(u64),
    /// A system call has failed.
    #[error("fork_here: {step}: {}", errno.desc())]
    Failed {
        /// The name of the system call.
        step: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
}
