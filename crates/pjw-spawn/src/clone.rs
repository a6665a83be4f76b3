//! Makes a process that executes a program at once: clone3(2) with the semantics of vfork(2).
//!
//! The process shares the memory of the caller until it executes its program, so no page table is copied and no memory
//! is committed. The calling thread sleeps until then. A calling thread that traces the process does not sleep: it
//! passes on the signals that stop the process. The process has a stack of its own. Before execve(2), the process makes
//! system calls only: it takes no lock and allocates nothing.
//!
//! The caller must have blocked all signals, except those of the C library. The process begins with the same blocked
//! signals, and without the handlers of the caller (`CLONE_CLEAR_SIGHAND`, Linux 5.5), so that no handler runs in the
//! shared memory.

use std::ffi::{c_char, c_int, c_long};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use crate::bare;
use crate::child::Child;
use crate::credentials::Credentials;
use crate::exec_stop::continue_until_exec;
use crate::failure::{SpawnError, SpawnStep};
use crate::own_policy::{MemoryPolicy, set_own_mask};
use crate::signals::{self, KernelSignals};

/// Flag of clone3(2): each signal for which the calling process has a handler gets its default action in the new
/// process. Ignored signals stay ignored. The value is that of linux/sched.h, because libc has no flags above 32 bits.
pub(crate) const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// Flag of clone3(2): the kernel creates the new process in the cgroup whose descriptor is in
/// [`CloneArguments::cgroup`]. The value is that of linux/sched.h.
pub(crate) const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// The size of the stack of the process until it executes its program. Debug builds need the most of it, some KiB.
const STACK_BYTES: usize = 64 * 1024;

/// The arguments of clone3(2), version 2 of `struct clone_args` (Linux 5.7).
#[repr(C, align(8))]
#[derive(Default)]
pub(crate) struct CloneArguments {
    pub(crate) flags: u64,
    pub(crate) pidfd: u64,
    pub(crate) child_tid: u64,
    pub(crate) parent_tid: u64,
    pub(crate) exit_signal: u64,
    pub(crate) stack: u64,
    pub(crate) stack_size: u64,
    pub(crate) tls: u64,
    pub(crate) set_tid: u64,
    pub(crate) set_tid_size: u64,
    pub(crate) cgroup: u64,
}

/// The parameters of a new process: its program, and everything that the process sets before it executes the program,
/// such as its standard streams and its affinity mask.
pub(crate) struct StartParameters<'a> {
    pub(crate) program: *const c_char,
    /// The argument list of the program, which ends with a null pointer.
    pub(crate) arguments: *const *const c_char,
    /// The environment of the program, as a list that ends with a null pointer.
    pub(crate) environment: *const *const c_char,
    pub(crate) settings: &'a ProcessSettings<'a>,
    /// The descriptors that become standard input, output and error. -1 for the stream of the caller.
    pub(crate) streams: [RawFd; 3],
    /// The directory of the cgroup in which the kernel creates the process. `None` for the cgroup of the caller.
    pub(crate) cgroup: Option<RawFd>,
    /// The affinity mask that the process sets for itself. `None` to keep the mask of the calling thread.
    pub(crate) mask: Option<&'a CpuSet>,
    /// The memory policy that the process sets for itself. `None` to keep the policy of the calling thread.
    pub(crate) memory_policy: Option<&'a MemoryPolicy>,
    /// The additional parameters of a template: a process that loads its program, stops, and is then forked.
    /// `None` if the process is no template.
    pub(crate) template: Option<TemplateStart<'a>>,
}

/// The additional parameters of a new process that becomes a template. A template loads the program, stops, and is then
/// forked to make further processes. If the calling thread ends while the template loads the program, the kernel kills
/// the template.
#[derive(Clone, Copy)]
pub(crate) struct TemplateStart<'a> {
    /// The descriptor of the socket by which the template receives messages. The template keeps it open.
    pub(crate) channel: RawFd,
    /// The place where the process stores the error number if ptrace(2) fails: if the calling thread can't trace the
    /// process. `None` if the calling thread is not to trace the process. A traced process stops after execve(2).
    pub(crate) trace_failure: Option<&'a AtomicI32>,
}

impl StartParameters<'_> {
    /// Returns whether the thread that starts the process is to trace it by ptrace(2).
    fn is_traced(&self) -> bool {
        self.template.is_some_and(|template| template.trace_failure.is_some())
    }
}

/// The parameters that are the same for all processes which one spawner thread starts, such as the working directory
/// and the credentials.
pub(crate) struct ProcessSettings<'a> {
    /// The path of the working directory. Null for the working directory of the caller.
    pub(crate) directory: *const c_char,
    pub(crate) credentials: Option<&'a Credentials>,
    /// The process id of the calling process, if the kernel is to kill the new process when the calling thread ends.
    /// Otherwise 0.
    pub(crate) launcher: c_int,
    /// The signals that are blocked when the program begins.
    pub(crate) blocked_signals: KernelSignals,
    /// The limit of open descriptors (`RLIMIT_NOFILE`) that the process sets for itself. `None` if the calling process
    /// has not raised its own limit, so that the process inherits the right one.
    pub(crate) descriptor_limit: Option<libc::rlimit64>,
}

/// The step that failed in the new process, and the errno of this step. The value lies in memory that the process
/// shares with the caller.
#[derive(Default)]
struct Failure {
    /// The number of the step plus 1. 0 for none.
    step: AtomicUsize,
    errno: AtomicI32,
}

/// The type of a function that a new process runs while it shares the memory of its parent (`CLONE_VM`). The argument
/// points to data in this memory. The function ends the process.
pub(crate) type ChildFunction = extern "C" fn(*const ()) -> !;

/// The data that the caller and the new process share until the process executes its program.
struct Shared<'a> {
    start: &'a StartParameters<'a>,
    failure: Failure,
    /// The process id that the new process has in its own PID namespace. Only a traced process writes it.
    own_pid: AtomicI32,
    /// Whether the new process has inherited the signal handlers of the caller, and so must remove them.
    has_handlers: bool,
}

/// The stack that a new process uses until it executes its program. Several processes use the same stack, one after the
/// other.
pub(crate) struct ChildStack(Box<[MaybeUninit<u128>]>);

impl ChildStack {
    /// Allocates a stack of 64 KiB.
    pub(crate) fn new() -> Self {
        Self(Box::new_uninit_slice(STACK_BYTES / size_of::<u128>()))
    }
}

/// Creates the process that `start` describes, by clone3(2), and waits until the process has executed its program or
/// has failed. Until then, the process uses `stack`.
///
/// # Errors
/// The step that failed, with its errno. No process remains then.
pub(crate) fn clone_and_exec(
    start: &StartParameters<'_>,
    stack: &mut ChildStack,
) -> Result<Child, SpawnError> {
    let (failure, own_pid) = (Failure::default(), AtomicI32::new(0));
    let mut shared = Shared { start, failure, own_pid, has_handlers: false };
    let mut pidfd: c_int = -1;
    // A signal stops a traced process, also before execve(2). A sleeping tracer could not let the process continue.
    let is_traced = start.is_traced();
    let sleep = if is_traced { 0 } else { libc::CLONE_VFORK as u64 };
    let mut arguments = CloneArguments {
        flags: libc::CLONE_VM as u64 | sleep | libc::CLONE_PIDFD as u64 | CLONE_CLEAR_SIGHAND,
        pidfd: (&raw mut pidfd).addr() as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.0.as_mut_ptr().addr() as u64,
        stack_size: STACK_BYTES as u64,
        ..CloneArguments::default()
    };
    if let Some(cgroup) = start.cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.cast_unsigned());
    }
    // SAFETY: this function returns only after the process has executed its program or has ended. So no other process
    // uses the stack, and `shared` and all that it points to exist long enough. The process makes system calls only.
    let mut pid = unsafe { clone_and_run(&arguments, (&raw const shared).cast(), run_child) };
    if pid == -i64::from(libc::ENOSYS) && start.cgroup.is_none() {
        // The seccomp filters of Docker and containerd refuse clone3(2), because a filter can't see its flags.
        shared.has_handlers = true;
        // SAFETY: as for clone3(2).
        pid = unsafe { old_clone_and_run(&arguments, (&raw const shared).cast(), run_child) };
    }
    if pid < 0 {
        return Err(clone_error(Errno::from_raw(i32::try_from(-pid).unwrap_or(libc::EIO)), start.cgroup));
    }
    if is_traced {
        continue_until_exec(pid, &shared.own_pid);
    }
    // SAFETY: the kernel has opened the descriptor for this call, and nothing else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let child = Child { pid: Pid(u32::try_from(pid).unwrap_or(0)), pidfd };
    let failed_step = shared.failure.step.load(Relaxed).checked_sub(1).and_then(SpawnStep::from_number);
    match failed_step {
        None => Ok(child),
        Some(step) => {
            let _ = child.wait();
            Err(SpawnError { step, errno: Errno::from_raw(shared.failure.errno.load(Relaxed)) })
        }
    }
}

/// Returns the error for a call of clone3(2) that failed with `errno`. `cgroup` is the cgroup in which the process was
/// to start. The failed step is [`SpawnStep::Cgroup`] if `cgroup` is given and the cgroup can be the reason for
/// `errno`, such as `EACCES` or `EBUSY`. Otherwise the failed step is [`SpawnStep::Clone`]. `EAGAIN` always gives
/// [`SpawnStep::Clone`], because a limit of the user or of the system can also be the reason.
pub(crate) fn clone_error(errno: Errno, cgroup: Option<RawFd>) -> SpawnError {
    let cgroup_errnos = [
        Errno::EACCES,
        Errno::EPERM,
        Errno::EBADF,
        Errno::EBUSY,
        Errno::EOPNOTSUPP,
        Errno::ENODEV,
        Errno::ENOENT,
    ];
    let is_of_cgroup = cgroup.is_some() && cgroup_errnos.contains(&errno);
    SpawnError { step: if is_of_cgroup { SpawnStep::Cgroup } else { SpawnStep::Clone }, errno }
}

/// Calls clone3(2) with `arguments`. The new process calls `run(shared)` on the stack in `arguments`, and `run` never
/// returns. The calling process gets the process id of the new process, or a negative errno.
///
/// # Safety
/// The stack in `arguments` must have the given size, and nothing else may use the stack. `run` must be sound when it
/// is called with `shared`.
pub(crate) unsafe fn clone_and_run(arguments: &CloneArguments, shared: *const (), run: ChildFunction) -> i64 {
    let first = [bare::address(arguments), size_of::<CloneArguments>() as i64, 0];
    // SAFETY: the caller guarantees the same.
    unsafe { call_and_run(libc::SYS_clone3, first, shared, run) }
}

/// As [`clone_and_run`], by clone(2). Only the flags, the pidfd, the exit signal and the stack of `arguments` are used.
/// The flags above 32 bits are not passed, so the process inherits the signal handlers of the caller.
///
/// # Safety
/// As [`clone_and_run`].
unsafe fn old_clone_and_run(arguments: &CloneArguments, shared: *const (), run: ChildFunction) -> i64 {
    let flags = arguments.flags & u64::from(u32::MAX) | arguments.exit_signal;
    let first = [flags, arguments.stack + arguments.stack_size, arguments.pidfd].map(u64::cast_signed);
    // SAFETY: the caller guarantees the same.
    unsafe { call_and_run(libc::SYS_clone, first, shared, run) }
}

/// Makes the system call `number`, which is clone3(2) or clone(2), with the arguments `first`. Returns the result of
/// the system call in the calling process: the id of the new process, or a negative errno. The new process calls
/// `run(shared)`, which never returns. This is the function for x86-64.
///
/// # Safety
/// As [`clone_and_run`].
#[cfg(target_arch = "x86_64")]
unsafe fn call_and_run(number: c_long, first: [i64; 3], shared: *const (), run: ChildFunction) -> i64 {
    let result: i64;
    // SAFETY: the caller guarantees the stack. The kernel keeps all registers except rax, rcx and r11. The code of the
    // process is only the call of `run`, which has its arguments in registers and does not return.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") number => result,
            in("rdi") first[0],
            in("rsi") first[1],
            in("rdx") first[2],
            // r8 is the fifth argument of clone(2), which the kernel does not read without the flag for it.
            in("r8") shared,
            in("r9") run,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Makes the system call `number`, which is clone3(2) or clone(2), with the arguments `first`. Returns the result of
/// the system call in the calling process: the id of the new process, or a negative errno. The new process calls
/// `run(shared)`, which never returns. This is the function for aarch64.
///
/// # Safety
/// As [`clone_and_run`].
#[cfg(target_arch = "aarch64")]
unsafe fn call_and_run(number: c_long, first: [i64; 3], shared: *const (), run: ChildFunction) -> i64 {
    let result: i64;
    // SAFETY: the caller guarantees the stack. The kernel keeps all registers except x0. The code of the process is
    // only the call of `run`, which has its argument in a register and does not return.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x0, x9",
            "blr x10",
            "brk 1",
            "2:",
            in("x8") number,
            inlateout("x0") first[0] => result,
            in("x1") first[1],
            in("x2") first[2],
            in("x9") shared,
            in("x10") run,
            lateout("x30") _,
        );
    }
    result
}

/// Creates no process and returns `-ENOSYS`. This is the function for architectures other than x86-64 and aarch64, on
/// which starting processes is not supported.
///
/// # Safety
/// The function has no safety requirements.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn call_and_run(_: c_long, _: [i64; 3], _: *const (), _: ChildFunction) -> i64 {
    -i64::from(libc::ENOSYS)
}

/// Prepares the new process, and executes its program. Runs in the new process. `shared` points to a [`Shared`].
///
/// - If a step fails, stores the step and its errno in `shared`, and ends the process.
/// - The process shares the memory of the caller, so this function must not allocate, lock or unwind.
extern "C" fn run_child(shared: *const ()) -> ! {
    // SAFETY: `clone_and_exec` passes a `Shared`, which exists until this process has executed its program or ended.
    let shared = unsafe { &*shared.cast::<Shared<'_>>() };
    let start = shared.start;
    if shared.has_handlers {
        signals::clear_handlers();
    }
    if start.is_traced() {
        // SAFETY: has no precondition. The process is not traced yet.
        shared.own_pid.store(unsafe { libc::getpid() }, Relaxed);
    }
    let (step, errno) = match prepare_child(start) {
        Err(failure) => failure,
        Ok(()) => {
            // SAFETY: the path ends with a NUL byte, and both lists with a null pointer. All exist during the call.
            unsafe { libc::execve(start.program, start.arguments, start.environment) };
            (SpawnStep::Exec, Errno::last_raw())
        }
    };
    shared.failure.errno.store(errno, Relaxed);
    shared.failure.step.store(usize::from(step.number()) + 1, Relaxed);
    // SAFETY: ends the process without the handlers of exit(3), which belong to the caller.
    unsafe { libc::_exit(127) }
}

/// The step of starting a process that failed in the new process, and the errno of the failed system call.
pub(crate) type FailedStep = (SpawnStep, i32);

/// Gives the calling process the properties in `start`, such as its affinity mask, its streams and its user. Returns
/// the failed step on error.
fn prepare_child(start: &StartParameters<'_>) -> Result<(), FailedStep> {
    let settings = start.settings;
    if let Some(mask) = start.mask {
        // The first step, so that a process that has to move to another CPU makes all further steps there.
        set_own_mask(mask).map_err(|errno| (SpawnStep::Mask, errno as i32))?;
    }
    if let Some(policy) = start.memory_policy {
        policy.set_for_calling_thread().map_err(|errno| (SpawnStep::Mask, errno as i32))?;
    }
    set_standard_streams(start.streams)?;
    if !settings.directory.is_null() {
        // SAFETY: the path ends with a NUL byte.
        checked(SpawnStep::Directory, unsafe { libc::chdir(settings.directory) }.into())?;
    }
    if let Some(credentials) = settings.credentials {
        set_own_credentials(credentials)?;
    }
    if settings.launcher != 0 {
        request_parent_death_signal(settings.launcher)?;
    }
    if let Some(limit) = &settings.descriptor_limit {
        // SAFETY: the limit outlives the call. The C library may lock here only if its types differ from the kernel's.
        let set = unsafe {
            libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, limit, std::ptr::null_mut::<u8>())
        };
        checked(SpawnStep::Clone, set)?;
    }
    if let Some(template) = start.template {
        become_template(template)?;
    }
    // The runtime of Rust ignores `SIGPIPE`, and the program would inherit this action.
    signals::set_default_action(libc::SIGPIPE);
    // A traced process stops after execve(2) only if `SIGTRAP` is not blocked. Its later breakpoints would unblock the
    // signal anyway.
    let not_blocked: KernelSignals = if start.is_traced() { 1 << (libc::SIGTRAP - 1) } else { 0 };
    let blocked_signals: KernelSignals = settings.blocked_signals & !not_blocked;
    let (set, no_old) = (&raw const blocked_signals, std::ptr::null_mut::<KernelSignals>());
    // By the system call, because sigprocmask(3) does not change the two signals that the C library uses itself.
    // SAFETY: the set has the size that is given.
    let unblocked = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, no_old, size_of::<KernelSignals>())
    };
    checked(SpawnStep::Clone, unblocked)
}

/// Converts the result of a system call: -1 becomes the failed step `step` with the present `errno`.
fn checked(step: SpawnStep, result: i64) -> Result<(), FailedStep> {
    if result < 0 { Err((step, Errno::last_raw())) } else { Ok(()) }
}

/// Makes the descriptors in `streams` the standard input, output and error of the calling process. -1 leaves the stream
/// unchanged. A descriptor below 3 is first copied to a number above 2, so that two streams can be exchanged.
pub(crate) fn set_standard_streams(mut streams: [RawFd; 3]) -> Result<(), FailedStep> {
    let at_stdio = |errno| (SpawnStep::Stdio, errno);
    for stream in streams.iter_mut().filter(|stream| (0..3).contains(*stream)) {
        let arguments = [(*stream).into(), libc::F_DUPFD_CLOEXEC.into(), 3, 0, 0];
        // SAFETY: changes descriptors of the process only, whose table is its own.
        let copy = unsafe { bare::raw_syscall(libc::SYS_fcntl, arguments) }.map_err(at_stdio)?;
        *stream = RawFd::try_from(copy).map_err(|_| at_stdio(libc::EMFILE))?;
    }
    for (target, &stream) in (0..).zip(&streams).filter(|(_, stream)| **stream >= 0) {
        // Both numbers differ, so dup3(2) makes a copy, which execve(2) does not close.
        // SAFETY: changes descriptors of the process only, whose table is its own.
        unsafe { bare::raw_syscall(libc::SYS_dup3, [stream.into(), target, 0, 0, 0]) }.map_err(at_stdio)?;
    }
    Ok(())
}

/// Removes the ambient capabilities of the calling process, and then gives it the groups and the user in
/// `credentials`. The order is: supplementary groups, group, user. After the change of the user, the process may not
/// change its groups. Uses bare system calls, because the functions of the C library would change all threads that it
/// knows.
fn set_own_credentials(credentials: &Credentials) -> Result<(), FailedStep> {
    let (uid, gid, groups) = (credentials.uid, credentials.gid, &credentials.groups);
    // A change of the user alone removes the ambient capabilities only if the caller was root: capabilities(7). The
    // kernel reads all 64 bits of each argument, and refuses the call if one of the last three is not 0.
    let arguments = [libc::PR_CAP_AMBIENT.into(), libc::PR_CAP_AMBIENT_CLEAR_ALL.into(), 0, 0, 0];
    // SAFETY: changes the process only.
    unsafe { bare::raw_syscall(libc::SYS_prctl, arguments) }
        .map_err(|errno| (SpawnStep::Credentials, errno))?;
    // SAFETY: the list has the length that is given.
    checked(SpawnStep::Credentials, unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr())
    })?;
    // SAFETY: changes the process only.
    checked(SpawnStep::Credentials, unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: changes the process only.
    checked(SpawnStep::Credentials, unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })
}

/// Requests that the kernel kills the calling process when the thread that created the process ends
/// (`PR_SET_PDEATHSIG`, prctl(2)). If the parent of the calling process is no longer the process with the id
/// `launcher`, the calling process exits at once.
pub(crate) fn request_parent_death_signal(launcher: c_int) -> Result<(), FailedStep> {
    let arguments = [libc::PR_SET_PDEATHSIG.into(), libc::SIGKILL.into(), 0, 0, 0];
    // SAFETY: changes the process only.
    unsafe { bare::raw_syscall(libc::SYS_prctl, arguments) }.map_err(|errno| (SpawnStep::Clone, errno))?;
    // After the end of its parent, a process has another parent.
    // SAFETY: has no precondition.
    if unsafe { libc::getppid() } != launcher {
        // SAFETY: ends the process without the handlers of exit(3), which belong to the caller.
        unsafe { libc::_exit(127) }
    }
    Ok(())
}

/// Prepares the calling process to become a template (a process from which further processes are forked). Keeps the
/// descriptor for messages, `template.channel`, open over execve(2). If `template.trace_failure` is given, requests
/// that the thread which created this process traces it, and stores the error number there if this fails.
fn become_template(template: TemplateStart<'_>) -> Result<(), FailedStep> {
    // SAFETY: changes descriptors of the process only, whose table is its own.
    checked(SpawnStep::Stdio, unsafe { libc::fcntl(template.channel, libc::F_SETFD, 0) }.into())?;
    let Some(trace_failure) = template.trace_failure else { return Ok(()) };
    let null = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: changes the process only. The call uses neither the address nor the data.
    checked(SpawnStep::Clone, unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, null, null) })
        .inspect_err(|(_, errno)| trace_failure.store(*errno, Relaxed))
}
