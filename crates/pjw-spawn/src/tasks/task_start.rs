//! The start of a task: from clone3(2) to the first instruction of its program.
//!
//! Until then the task runs code of this crate on its own stack, with the thread pointer of the host: both have one
//! `errno`, as after vfork(2). The host sleeps meanwhile, and looks every 100 ms whether the task lives. Each look may
//! change `errno`. If a step of the task fails in that moment, the reported errno can be that of the look.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

use nix::errno::Errno;

use super::request::Request;
use crate::clone::{
    CLONE_CLEAR_SIGHAND, CLONE_INTO_CGROUP, CloneArguments, checked, clone_and_run, end_with_launcher,
    take_streams,
};
use crate::failure::SpawnStep;
use crate::signals::{self, KernelSignals};

/// [`TaskStart::step`] before the task has failed or begun, and after it has begun.
const UNDECIDED: u32 = u32::MAX;
const BEGUN: u32 = u32::MAX - 1;
/// How long the host sleeps before it looks whether the task was killed.
static LOOK_AFTER: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The variables that the host and a new task share until the task begins its program. They are on the stack of the
/// host.
pub(super) struct TaskStart<'a> {
    request: &'a Request,
    /// 1 until the task has begun its program, has failed or has ended. A futex.
    is_busy: AtomicU32,
    step: AtomicU32,
    errno: AtomicI32,
    /// The first instruction, and the stack pointer there.
    entry: u64,
    stack: u64,
    streams: [RawFd; 3],
    /// Descriptors from this one on belong to the host.
    first_own_descriptor: RawFd,
    /// Where the task writes its process id.
    pid: &'a AtomicU32,
}

/// The entry point of a task's program, and the stack pointer there.
pub(super) struct EntryPoint {
    pub(super) entry: u64,
    pub(super) stack: u64,
}

/// The descriptors for a new task.
pub(super) struct Descriptors {
    /// -1 for the stream of the host.
    pub(super) streams: [RawFd; 3],
    pub(super) cgroup: Option<RawFd>,
    pub(super) first_own: RawFd,
}

/// A process that was made for a task. If `failure` is set, the process ends by itself.
pub(super) struct StartedTask {
    pub(super) pid: u32,
    pub(super) pidfd: RawFd,
    pub(super) failure: Option<(SpawnStep, Errno)>,
}

/// Makes the process of a task. Returns when the process has begun its program or has failed.
///
/// # Errors
/// The failed step if there is no process.
///
/// # Safety
/// The calling process must be the host. `entry_point` must be the first instruction of a program that was mapped for
/// this task alone, and a stack as that program expects it.
pub(super) unsafe fn start_task(
    request: &Request,
    entry_point: &EntryPoint,
    descriptors: &Descriptors,
    pid: &AtomicU32,
) -> Result<StartedTask, (SpawnStep, Errno)> {
    let start = TaskStart {
        request,
        is_busy: AtomicU32::new(1),
        step: AtomicU32::new(UNDECIDED),
        errno: AtomicI32::new(0),
        entry: entry_point.entry,
        stack: entry_point.stack,
        streams: descriptors.streams,
        first_own_descriptor: descriptors.first_own,
        pid,
    };
    let mut pidfd: RawFd = -1;
    // The kernel aligns nothing: the stack for the code before the program begins is the unused part of the task's stack.
    let stack_end = (entry_point.stack - 256) & !63;
    let mut arguments = CloneArguments {
        // The task is a child of the host's parent, and has the exit signal of the host. At the end of the process the
        // kernel clears `is_busy` and wakes the host.
        flags: libc::CLONE_VM as u64
            | libc::CLONE_PARENT as u64
            | libc::CLONE_PIDFD as u64
            | libc::CLONE_CHILD_CLEARTID as u64
            | CLONE_CLEAR_SIGHAND,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        child_tid: start.is_busy.as_ptr().expose_provenance() as u64,
        stack: stack_end - 64 * 1024,
        stack_size: 64 * 1024,
        ..CloneArguments::default()
    };
    if let Some(cgroup) = descriptors.cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.cast_unsigned());
    }
    // SAFETY: the caller guarantees the stack. `start` outlives the use by the task, because the host waits.
    let result = unsafe { clone_and_run(&arguments, (&raw const start).cast(), run) };
    let Ok(pid) = u32::try_from(result) else {
        let errno = Errno::from_raw(i32::try_from(-result).unwrap_or(libc::EIO));
        let step = if descriptors.cgroup.is_some() && errno != Errno::EAGAIN {
            SpawnStep::Cgroup
        } else {
            SpawnStep::Clone
        };
        return Err((step, errno));
    };
    wait(&start, pidfd);
    let failure = match start.step.load(Acquire) {
        BEGUN => None,
        // Killed before it could begin.
        UNDECIDED => Some((SpawnStep::Exec, Errno::ESRCH)),
        step => Some((
            SpawnStep::of_number(step as usize).unwrap_or(SpawnStep::Exec),
            Errno::from_raw(start.errno.load(Relaxed)),
        )),
    };
    Ok(StartedTask { pid, pidfd, failure })
}

/// Waits until the task needs `start` no more.
fn wait(start: &TaskStart<'_>, pidfd: RawFd) {
    while start.is_busy.load(Acquire) != 0 {
        // SAFETY: the futex outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                start.is_busy.as_ptr(),
                libc::FUTEX_WAIT,
                1,
                &raw const LOOK_AFTER,
            );
        }
        let mut poll = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } == 1 {
            return;
        }
    }
}

/// The task until its program begins. It shares the memory of the host, so it must not allocate, lock or unwind.
extern "C" fn run(start: *const ()) -> ! {
    // SAFETY: the host passes a `TaskStart`, and waits while the task uses it.
    let start = unsafe { &*start.cast::<TaskStart<'_>>() };
    if let Err((step, errno)) = prepare(start) {
        start.errno.store(errno, Relaxed);
        start.step.store(u32::from(step.number()), Release);
        // SAFETY: ends the process without handlers of exit(3), which belong to the host. The kernel wakes the host.
        unsafe { libc::_exit(127) }
    }
    start.step.store(BEGUN, Release);
    // SAFETY: this is the beginning of the program that was mapped for this task.
    unsafe { enter(start.is_busy.as_ptr(), start.stack, start.entry) }
}

fn prepare(start: &TaskStart<'_>) -> Result<(), (SpawnStep, i32)> {
    let head = &start.request.head;
    if head.mask_words > 0 {
        let (bytes, mask) = start.request.mask();
        // SAFETY: the kernel reads so many bytes of the request.
        let set = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, bytes, mask) };
        checked(SpawnStep::Mask, set)?;
    }
    if let Some(policy) = &head.policy {
        policy.set().map_err(|errno| (SpawnStep::Mask, errno as i32))?;
    }
    take_streams(start.streams)?;
    close_from(start.first_own_descriptor)?;
    let directory = start.request.directory();
    if !directory.is_null() {
        // SAFETY: the path ends with a NUL byte.
        checked(SpawnStep::Directory, unsafe { libc::chdir(directory.cast()) }.into())?;
    }
    if head.launcher != 0 {
        end_with_launcher(head.launcher)?;
    }
    if let Some((soft, hard)) = head.descriptor_limit {
        let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
        // SAFETY: the limit outlives the call.
        let set = unsafe {
            libc::syscall(
                libc::SYS_prlimit64,
                0,
                libc::RLIMIT_NOFILE,
                &raw const limit,
                std::ptr::null_mut::<u8>(),
            )
        };
        checked(SpawnStep::Clone, set)?;
    }
    // SAFETY: the name has 16 bytes, of which the last is NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, head.name.as_ptr()) };
    signals::set_default(libc::SIGPIPE);
    // SAFETY: has no precondition.
    let pid = unsafe { libc::syscall(libc::SYS_getpid) };
    start.pid.store(u32::try_from(pid).unwrap_or(0), Release);
    let (set, no_old) = (&raw const head.blocked_signals, std::ptr::null_mut::<KernelSignals>());
    // SAFETY: the set has the size that is given.
    let unblocked = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, no_old, size_of::<KernelSignals>())
    };
    checked(SpawnStep::Clone, unblocked)?;
    // The kernel must not clear `is_busy` later: a program without a C library would leave that as it is.
    // SAFETY: null stands for no address.
    unsafe { libc::syscall(libc::SYS_set_tid_address, 0) };
    Ok(())
}

/// Closes all descriptors from the number `first` on, with close_range(2) (Linux 5.9 and later) or one by one.
pub(super) fn close_from(first: RawFd) -> Result<(), (SpawnStep, i32)> {
    // SAFETY: the table of descriptors is that of the calling process alone.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if closed == 0 || Errno::last() != Errno::ENOSYS {
        return checked(SpawnStep::Stdio, closed);
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one limit. The descriptors are those of the calling process alone.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        for descriptor in first..i32::try_from(limit.rlim_cur).unwrap_or(1 << 20) {
            libc::close(descriptor);
        }
    }
    Ok(())
}

/// Wakes the host and begins the program, with the registers that execve(2) leaves: no thread pointer, and in rdx no
/// function to call at the end.
///
/// # Safety
/// `entry` and `stack` must be those of a mapped program, and `is_busy` the futex that the host waits for.
#[cfg(target_arch = "x86_64")]
unsafe fn enter(is_busy: *mut u32, stack: u64, entry: u64) -> ! {
    /// `ARCH_SET_FS`, arch_prctl(2).
    const ARCH_SET_FS: u32 = 0x1002;
    // SAFETY: after the store the host may reuse its stack. From there on only registers are used.
    unsafe {
        std::arch::asm!(
            "xor esi, esi",
            "syscall",
            "mov rsp, r12",
            "mov dword ptr [r14], 0",
            "mov rdi, r14",
            "mov esi, {wake}",
            "mov edx, 1",
            "xor r10d, r10d",
            "mov eax, {futex}",
            "syscall",
            "mov rax, r13",
            "xor ebx, ebx",
            "xor ecx, ecx",
            "xor edx, edx",
            "xor esi, esi",
            "xor edi, edi",
            "xor ebp, ebp",
            "xor r8d, r8d",
            "xor r9d, r9d",
            "xor r10d, r10d",
            "xor r11d, r11d",
            "xor r12d, r12d",
            "xor r13d, r13d",
            "xor r14d, r14d",
            "xor r15d, r15d",
            "jmp rax",
            wake = const libc::FUTEX_WAKE,
            futex = const libc::SYS_futex,
            in("rax") libc::SYS_arch_prctl,
            in("rdi") ARCH_SET_FS,
            in("r12") stack,
            in("r13") entry,
            in("r14") is_busy,
            options(noreturn),
        )
    }
}

/// Other architectures are refused before ([`super::ImageError::OtherHost`]).
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn enter(_: *mut u32, _: u64, _: u64) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(127) }
}
