//! The start of a task: from clone3(2) to the first instruction of its program.
//!
//! Before the first instruction of its program, the task runs code of this crate on its own stack, with the thread
//! pointer of the host. So the task calls nothing that writes a thread-local variable, such as `errno`. Meanwhile the
//! host may make other tasks. The host waits for the task before it answers the request.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

use nix::errno::Errno;

use super::descriptors::close_descriptor_range;
use super::image::ProgramLayout;
use super::initial_values::InitialValues;
use super::map;
use super::request::Request;
use crate::bare;
use crate::clone::{
    CLONE_CLEAR_SIGHAND, CLONE_INTO_CGROUP, CloneArguments, FailedStep, clone_and_run, clone_error,
    request_parent_death_signal, set_standard_streams,
};
use crate::failure::SpawnStep;
use crate::signals::KernelSignals;

/// The value of [`TaskStart::step`] before the start of the task has failed, or its program has begun.
const UNDECIDED: u32 = u32::MAX;
/// The value of [`TaskStart::step`] after the program has begun. Other values are the number of the failed step.
const BEGUN: u32 = u32::MAX - 1;
/// The value of [`TaskStart::busy_state`] if the task no longer uses the [`TaskStart`].
const UNUSED: u32 = 0;
/// The value of [`TaskStart::busy_state`] while the task uses the [`TaskStart`], and the host does not sleep.
const BUSY: u32 = 1;
/// The value of [`TaskStart::busy_state`] while the task uses the [`TaskStart`], and the host sleeps until it does not.
const AWAITED: u32 = 2;
/// How long the host sleeps before it checks whether the task was killed.
static CHECK_AFTER: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The data that the host (the process that starts tasks) and a new task share until the program of the task begins.
/// The host must not move or free this value before [`wait_until_unused`] has returned.
pub(super) struct TaskStart<'a> {
    request: Request,
    /// [`BUSY`] or [`AWAITED`] until the task has begun its program, has failed or has ended. A futex.
    busy_state: AtomicU32,
    /// The number of the failed step ([`SpawnStep::number`]), [`UNDECIDED`] or [`BEGUN`].
    step: AtomicU32,
    /// The error number of the failed step.
    errno: AtomicI32,
    entry_point: EntryPoint<'a>,
    streams: [RawFd; 3],
    /// The directory of the cgroup in which the task is born.
    cgroup: Option<RawFd>,
    /// Descriptors from this one on belong to the host.
    first_own_descriptor: RawFd,
    /// Where the task writes its process id.
    pid: &'a AtomicU32,
}

/// The program of a task in memory, and the stack pointer with which the program begins.
pub(super) struct EntryPoint<'a> {
    pub(super) layout: &'a ProgramLayout,
    /// The address where the program is mapped.
    pub(super) base: u64,
    /// The stack pointer at the first instruction.
    pub(super) stack: u64,
    /// The initial values of the variables. `None` if they are mapped from the file.
    pub(super) initial_values: Option<InitialValues>,
}

/// The file descriptors with which a task is started: its standard streams, and the directory of its cgroup.
pub(super) struct Descriptors {
    /// -1 for the stream of the host.
    pub(super) streams: [RawFd; 3],
    pub(super) cgroup: Option<RawFd>,
    pub(super) first_own: RawFd,
}

impl<'a> TaskStart<'a> {
    /// Makes the value for a task that is not started yet. `request` is the request to start the task. The task begins
    /// at `entry_point` with `descriptors`, and writes its process id to `pid`.
    pub(super) fn new(
        request: Request,
        entry_point: EntryPoint<'a>,
        descriptors: &Descriptors,
        pid: &'a AtomicU32,
    ) -> Self {
        Self {
            request,
            busy_state: AtomicU32::new(BUSY),
            step: AtomicU32::new(UNDECIDED),
            errno: AtomicI32::new(0),
            entry_point,
            streams: descriptors.streams,
            cgroup: descriptors.cgroup,
            first_own_descriptor: descriptors.first_own,
            pid,
        }
    }

    /// Returns the step in the start of the task that failed, and the error number. `None` if the program has begun, or
    /// if the task was killed before.
    /// Must be called after [`wait_until_unused`]. After a failure, the task ends by itself.
    pub(super) fn failure(&self) -> Option<(SpawnStep, Errno)> {
        match self.step.load(Acquire) {
            // `UNDECIDED`: the task was killed before its program could begin. Its exit status names the signal, as that
            // of a process that is killed before execve(2).
            BEGUN | UNDECIDED => None,
            step => Some((
                SpawnStep::from_number(step as usize).unwrap_or(SpawnStep::Exec),
                Errno::from_raw(self.errno.load(Relaxed)),
            )),
        }
    }
}

/// Starts a task: makes a process in the address space of the host. Returns the process id and the pidfd of the task.
/// Does not wait until the program of the task begins.
///
/// # Errors
/// The step that failed, with the error number. No process was made in this case.
///
/// # Safety
/// The calling process must be the host. `start` must not be moved or freed before [`wait_until_unused`] has returned.
/// Its entry point must belong to a program that was mapped for this task alone, and must have a stack with the
/// contents that the program expects.
pub(super) unsafe fn start_task(start: &TaskStart<'_>) -> Result<(u32, RawFd), (SpawnStep, Errno)> {
    let mut pidfd: RawFd = -1;
    // The code before the program begins uses the free part of the task's stack. The kernel does not align its end.
    let stack_end = (start.entry_point.stack - 256) & !63;
    let mut arguments = CloneArguments {
        // The task is a child of the host's parent, and has the exit signal of the host. At the end of the process the
        // kernel clears `busy_state` and wakes the host.
        flags: libc::CLONE_VM as u64
            | libc::CLONE_PARENT as u64
            | libc::CLONE_PIDFD as u64
            | libc::CLONE_CHILD_CLEARTID as u64
            | CLONE_CLEAR_SIGHAND,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        child_tid: start.busy_state.as_ptr().expose_provenance() as u64,
        stack: stack_end - 64 * 1024,
        stack_size: 64 * 1024,
        ..CloneArguments::default()
    };
    if let Some(cgroup) = start.cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.cast_unsigned());
    }
    // SAFETY: the caller guarantees the stack, and that the start outlives its use by the task.
    let result = unsafe { clone_and_run(&arguments, (&raw const *start).cast(), run_task) };
    u32::try_from(result).map(|pid| (pid, pidfd)).map_err(|_| {
        let errno = Errno::from_raw(i32::try_from(-result).unwrap_or(libc::EIO));
        let failure = clone_error(errno, start.cgroup);
        (failure.step, failure.errno)
    })
}

/// Waits until the task no longer uses `start`: its program has begun, its start has failed, or the task has ended.
/// `pidfd` is the pidfd of the task.
pub(super) fn wait_until_unused(start: &TaskStart<'_>, pidfd: RawFd) {
    // The task wakes the host only if the state is `AWAITED`. At the end of the task, the kernel wakes the host anyway.
    while start.busy_state.compare_exchange(BUSY, AWAITED, AcqRel, Acquire) != Err(UNUSED) {
        // SAFETY: the futex outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                start.busy_state.as_ptr(),
                libc::FUTEX_WAIT,
                AWAITED,
                &raw const CHECK_AFTER,
            );
        }
        if start.busy_state.load(Acquire) == UNUSED {
            return;
        }
        let mut poll = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } == 1 {
            return;
        }
    }
}

/// Prepares the new task, and begins its program. `start` points to the [`TaskStart`] of the task. If a step fails,
/// stores the step and its error number there, and ends the process. The process shares the memory of the host, so this
/// function must not allocate, lock or unwind.
extern "C" fn run_task(start: *const ()) -> ! {
    // SAFETY: the host passes a `TaskStart`, and leaves it there while the task uses it.
    let start = unsafe { &*start.cast::<TaskStart<'_>>() };
    if let Err((step, errno)) = set_up_task(start) {
        start.errno.store(errno, Relaxed);
        start.step.store(u32::from(step.number()), Release);
        // SAFETY: ends the process without handlers of exit(3), which belong to the host. The kernel wakes the host.
        unsafe { libc::_exit(127) }
    }
    start.step.store(BEGUN, Release);
    let EntryPoint { layout, base, stack, .. } = start.entry_point;
    // SAFETY: this is the beginning of the program that was mapped for this task.
    unsafe { begin_program(start.busy_state.as_ptr(), stack, base + layout.entry) }
}

/// Gives the calling process the properties in `start`, such as its affinity mask, its streams and its directory, and
/// fills the memory of the program. The program can begin afterwards. Returns the failed step on error.
fn set_up_task(start: &TaskStart<'_>) -> Result<(), FailedStep> {
    let header = &start.request.header;
    let at_clone = |errno| (SpawnStep::Clone, errno);
    // SAFETY: has no precondition.
    let pid = unsafe { bare::raw_syscall(libc::SYS_getpid, [0; 5]) }.map_err(at_clone)?;
    let pid = u32::try_from(pid).unwrap_or(0);
    // The task has a copy of the host's socket until it closes the descriptors of the host. So if the host is killed,
    // the parent sees the end of the connection only when each task has written its process id, or has ended.
    start.request.task().store(pid, Release);
    if header.mask_words > 0 {
        let (bytes, mask) = start.request.mask();
        let arguments = [0, bytes as i64, bare::address(mask), 0, 0];
        // SAFETY: the kernel reads the bytes of the mask in the request.
        let set = unsafe { bare::raw_syscall(libc::SYS_sched_setaffinity, arguments) };
        set.map_err(|errno| (SpawnStep::Mask, errno))?;
    }
    if let Some(policy) = &header.policy {
        policy.set_for_calling_thread().map_err(|errno| (SpawnStep::Mask, errno as i32))?;
    }
    populate(&start.entry_point);
    let EntryPoint { layout, base, initial_values, .. } = start.entry_point;
    match initial_values {
        // SAFETY: the program was mapped for this task, and has not begun.
        Some(values) => unsafe { values.copy_to(base, layout) },
        // SAFETY: the program was mapped for this task, and has not begun.
        None => unsafe { map::zero_rest_of_file_pages(base, layout) },
    }
    set_standard_streams(start.streams)?;
    close_descriptor_range(start.first_own_descriptor, RawFd::MAX)
        .map_err(|errno| (SpawnStep::Stdio, errno))?;
    let directory = start.request.directory();
    if !directory.is_null() {
        // SAFETY: the path ends with a NUL byte.
        let changed = unsafe { bare::raw_syscall(libc::SYS_chdir, [bare::address(directory), 0, 0, 0, 0]) };
        changed.map_err(|errno| (SpawnStep::Directory, errno))?;
    }
    if header.launcher != 0 {
        request_parent_death_signal(header.launcher)?;
    }
    if let Some((soft, hard)) = header.descriptor_limit {
        let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
        let arguments = [0, libc::RLIMIT_NOFILE.into(), bare::address(&raw const limit), 0, 0];
        // SAFETY: the limit outlives the call.
        unsafe { bare::raw_syscall(libc::SYS_prlimit64, arguments) }.map_err(at_clone)?;
    }
    let arguments = [libc::PR_SET_NAME.into(), bare::address(header.name.as_ptr()), 0, 0, 0];
    // SAFETY: the name has 16 bytes, of which the last is NUL. The call can't fail.
    let _ = unsafe { bare::raw_syscall(libc::SYS_prctl, arguments) };
    start.pid.store(pid, Release);
    let set = bare::address(&raw const header.blocked_signals);
    let arguments = [libc::SIG_SETMASK.into(), set, 0, size_of::<KernelSignals>() as i64, 0];
    // SAFETY: the set has the size that is given.
    unsafe { bare::raw_syscall(libc::SYS_rt_sigprocmask, arguments) }.map_err(at_clone)?;
    // The kernel must not clear `busy_state` at the end of the task. A program without a C library would not set
    // another address.
    // SAFETY: null stands for no address.
    unsafe { bare::raw_syscall(libc::SYS_set_tid_address, [0; 5]) }.map(drop).map_err(at_clone)
}

/// Populates the pages that the program writes first, on the memory node of the task. Otherwise, the first write to a
/// page that was read before would interrupt all CPUs on which tasks run. If the call fails, as on Linux before 5.14,
/// each page costs a page fault later.
fn populate(entry_point: &EntryPoint<'_>) {
    let (begin, end) = map::first_written_range(entry_point.layout);
    let address = (entry_point.base + begin) as i64;
    let arguments = [address, (end - begin) as i64, libc::MADV_POPULATE_WRITE.into(), 0, 0];
    // SAFETY: changes no contents. The kernel refuses a range that is not mapped.
    let _ = unsafe { bare::raw_syscall(libc::SYS_madvise, arguments) };
}

/// Begins the program of the task at the address `entry`, with the stack pointer `stack`. First sets `busy_state` to
/// [`UNUSED`], and wakes the host if it was [`AWAITED`]. The registers are as execve(2) leaves them: there is no thread
/// pointer, and rdx names no function to call at the end.
///
/// # Safety
/// `entry` and `stack` must be those of a mapped program, and `busy_state` the futex that the host waits for.
#[cfg(target_arch = "x86_64")]
unsafe fn begin_program(busy_state: *mut u32, stack: u64, entry: u64) -> ! {
    /// `ARCH_SET_FS`, arch_prctl(2).
    const ARCH_SET_FS: u32 = 0x1002;
    // SAFETY: after the store the host may reuse the memory of the start. From there on only registers are used.
    unsafe {
        std::arch::asm!(
            // arch_prctl(ARCH_SET_FS, 0)
            "xor esi, esi",
            "syscall",
            "mov rsp, r12",
            // Sets the state to `UNUSED`. If it was `AWAITED`: futex(FUTEX_WAKE, 1).
            "mov eax, {unused}",
            "xchg dword ptr [r14], eax",
            "cmp eax, {awaited}",
            "jne 2f",
            "mov rdi, r14",
            "mov esi, {wake}",
            "mov edx, 1",
            "xor r10d, r10d",
            "mov eax, {futex}",
            "syscall",
            "2:",
            // Clears the registers, and jumps to the program.
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
            unused = const UNUSED,
            awaited = const AWAITED,
            wake = const libc::FUTEX_WAKE,
            futex = const libc::SYS_futex,
            in("rax") libc::SYS_arch_prctl,
            in("rdi") ARCH_SET_FS,
            in("r12") stack,
            in("r13") entry,
            in("r14") busy_state,
            options(noreturn),
        )
    }
}

/// Ends the process. Never called: other architectures are refused before ([`super::ImageError::OtherHost`]).
///
/// # Safety
/// Has no precondition.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn begin_program(_: *mut u32, _: u64, _: u64) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(127) }
}
