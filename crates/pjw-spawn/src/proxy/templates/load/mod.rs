//! Starts a program and makes the process a template, from which further processes of the program are forked. Either
//! this module stops the process when the program is linked ([`load`]), or the program stops itself
//! ([`load_until_fork_here`]). The process then runs the code of [`super::message::stub`].

mod arch;
pub(super) mod entry_stack;
mod linker;
pub(super) mod tracee;

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nix::errno::Errno;
use nix::unistd::Pid;

use self::entry_stack::EntryStack;
use self::linker::run_until_linked;
use self::tracee::{TraceError, Tracee, bytes_of, errno_of};
use super::channel::{Channel, wait_readable};
use super::message::addresses::{CHANNEL_VARIABLE, PR_GET_TID_ADDRESS, TemplateAddresses};
use super::message::block::{BLOCK_SIZE, CODE_SIZE, MemoryMap, REPLY_SIZE, TemplateBlock};
use super::message::stub::{self, StubData};
use super::processes::check_pidfd_open;
use crate::child::{Child, ExitStatus};
use crate::clone::{self, ChildStack, ProcessSettings, StartParameters, TemplateStart};
use crate::proxy::refusal::TemplateError;
use crate::setup::Setup;
use crate::signals;
use crate::spawner::settings;

/// The bits of a mode that give a program another user or group.
const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// A template that was just started: a process that has loaded a program, and from which further processes of the
/// program are forked. The process waits for messages from the launcher, the process that started the template.
#[derive(Debug)]
pub(super) struct LoadedTemplate {
    pub(super) child: Child,
    pub(super) channel: Channel,
    /// The number of the descriptor by which the template receives messages, as the template uses it.
    pub(super) descriptor: u64,
    pub(super) block: TemplateBlock,
    pub(super) stack: EntryStack,
    /// For a script that begins with `#!`, the arguments that the kernel has inserted before the given arguments. Empty
    /// for other programs.
    pub(super) interpreter: Vec<Vec<u8>>,
    /// The addresses that `/proc` shows for the template. `None` if the kernel does not report them.
    pub(super) memory_map: Option<MemoryMap>,
    /// The address at which the C library keeps the thread id. `None` if the C library has not told the kernel an
    /// address yet, as in a static program.
    pub(super) thread_id_address: Option<u64>,
    /// The address and the length of the list of robust futexes, get_robust_list(2).
    pub(super) robust_list: (u64, u64),
}

/// Starts a program by exec, and stops the process before any code of the program runs. The process then waits for
/// messages as a template: further processes of the program are forked from it. `cgroup` is a descriptor of the
/// directory of the cgroup in which the process is started.
pub(super) fn load(
    setup: &Setup,
    cgroup: Option<RawFd>,
    arguments: &[&CStr],
    environment: &[&CStr],
) -> Result<LoadedTemplate, TemplateError> {
    let (channel, template_end) = Channel::pair().map_err(failed("socketpair"))?;
    let trace_failure = AtomicI32::new(0);
    let template = TemplateStart { channel: template_end.as_raw_fd(), trace_failure: Some(&trace_failure) };
    let started = start_program(setup, cgroup, arguments, environment, template)?;
    let mut tracee = Tracee::after_exec(started).map_err(|error| match error {
        TraceError::Failed(errno) => TemplateError::Forbidden(errno),
        error => refusal("execve")(error),
    })?;
    let pid = tracee.pid();
    check_program(pid)?;
    let registers = tracee.registers().map_err(failed("registers"))?;
    let stack = EntryStack::read(&tracee, arch::stack_pointer(&registers)).map_err(failed("stack"))?;
    if stack.auxiliary_value(libc::AT_SECURE).is_some_and(|secure| secure != 0) {
        return Err(TemplateError::Privileged);
    }
    check_entry_point(&tracee, &stack)?;
    run_until_linked(&mut tracee, &stack).map_err(refusal("linking"))?;
    check_threads(pid)?;
    let added = stack.argument_count.saturating_sub(arguments.len());
    let interpreter = interpreter_arguments(&tracee, &stack, added).map_err(failed("arguments"))?;
    let thread_id_address = thread_id_address(&mut tracee, &stack).map_err(refusal("thread id"))?;
    if thread_id_address.is_some_and(|address| !holds_pid(&tracee, address)) {
        return Err(TemplateError::UnknownThreadIdAddress);
    }
    let robust_list = robust_list(&mut tracee, &stack).map_err(refusal("robust list"))?;
    let memory_map = memory_map(&mut tracee).map_err(refusal("memory map"))?;
    let descriptor = u64::try_from(template_end.as_raw_fd()).unwrap_or(u64::MAX);
    let block = install_template_code(&mut tracee, descriptor).map_err(refusal("memory"))?;
    let child = tracee.detach().map_err(failed("detach"))?;
    Ok(LoadedTemplate {
        child,
        channel,
        descriptor,
        block,
        stack,
        interpreter,
        memory_map,
        thread_id_address,
        robust_list,
    })
}

/// Starts the program in `setup` as a process that is to become a template: a process from which further processes of
/// the program are forked. Returns the process when it has executed the program (execve(2)). The kernel kills the
/// process if the calling thread ends. `cgroup` is a descriptor of the directory of the cgroup in which the process is
/// started. `template` contains the channel for messages, and whether the calling thread traces the process.
///
/// # Errors
/// If the program can't be started or traced. Also if pidfd_open(2) is forbidden: the launcher would fail to open the
/// pidfd of a fork of the template only when the fork has begun to run.
fn start_program(
    setup: &Setup,
    cgroup: Option<RawFd>,
    arguments: &[&CStr],
    environment: &[&CStr],
    template: TemplateStart<'_>,
) -> Result<Child, TemplateError> {
    check_pidfd_open()?;
    let pointers =
        |texts: &[&CStr]| texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>();
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    let settings = ProcessSettings { launcher: std::process::id().cast_signed(), ..settings(setup) };
    let start = StartParameters {
        program: setup.program.as_ptr(),
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        settings: &settings,
        streams: [-1; 3],
        cgroup,
        mask: None,
        memory_policy: None,
        template: Some(template),
    };
    let blocked = signals::block_all_signals();
    let child = clone::clone_and_exec(&start, &mut ChildStack::new());
    signals::set_blocked_signals(blocked);
    let trace_errno = template.trace_failure.map_or(0, |errno| errno.load(Ordering::Relaxed));
    child.map_err(|error| match trace_errno {
        0 => TemplateError::StartFailed(error),
        errno => TemplateError::Forbidden(Errno::from_raw(errno)),
    })
}

/// Starts a program, and waits until it calls [`super::fork_here`]. In this call the process waits for messages as a
/// template: further processes of the program are forked from it. `cgroup` is a descriptor of the directory of the
/// cgroup in which the process is started. Fails with `ECANCELED` when `is_cancelled` becomes true.
pub(super) fn load_until_fork_here(
    setup: &Setup,
    cgroup: Option<RawFd>,
    arguments: &[&CStr],
    environment: &[&CStr],
    is_cancelled: &AtomicBool,
) -> Result<LoadedTemplate, TemplateError> {
    let (channel, template_end) = Channel::pair().map_err(failed("socketpair"))?;
    let variable = format!("{}={}", CHANNEL_VARIABLE, template_end.as_raw_fd());
    let variable = CString::new(variable).unwrap_or_default();
    let environment = [environment, &[&variable]].concat();
    let template = TemplateStart { channel: template_end.as_raw_fd(), trace_failure: None };
    let child = start_program(setup, cgroup, arguments, &environment, template)?;
    let descriptor = u64::try_from(template_end.as_raw_fd()).unwrap_or(u64::MAX);
    // The program's end of the channel is then the only one.
    drop(template_end);
    let addresses =
        wait_until_fork_here(&child, &channel, is_cancelled).inspect_err(|_| child.kill_and_wait())?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.pid.0)).unwrap_or_default();
    Ok(LoadedTemplate {
        child,
        channel,
        descriptor,
        block: TemplateBlock(addresses.block),
        stack: EntryStack::without_content(addresses.pointers),
        interpreter: Vec::new(),
        memory_map: MemoryMap::from_stat(&stat, addresses.brk),
        thread_id_address: Some(addresses.thread_id_address).filter(|address| *address != 0),
        robust_list: (addresses.robust_list, addresses.robust_list_length),
    })
}

/// Waits until the program in the process `child` calls [`super::fork_here`]. Returns the addresses that the program
/// then sends over `channel`.
///
/// # Errors
/// - [`TemplateError::Exited`] or [`TemplateError::Killed`] if the process ends before.
/// - [`TemplateError::Failed`] with `ECANCELED` when `is_cancelled` becomes true. The program decides how long the
///   wait takes, so the caller must be able to end the wait.
fn wait_until_fork_here(
    child: &Child,
    channel: &Channel,
    is_cancelled: &AtomicBool,
) -> Result<TemplateAddresses, TemplateError> {
    if let Some(addresses) = channel.receive(child, Some(is_cancelled)).map_err(failed("start"))? {
        return Ok(addresses);
    }
    // A program may close the channel long before its end.
    wait_readable(&[child.as_fd()], Some(is_cancelled)).map_err(failed("start"))?;
    Err(match child.wait().map_err(failed("waitid"))? {
        ExitStatus::Code(status) => TemplateError::Exited(status),
        ExitStatus::Signal(signal) => TemplateError::Killed(signal),
    })
}

fn failed(step: &'static str) -> impl Fn(Errno) -> TemplateError {
    move |errno| TemplateError::Failed { step, errno }
}

fn refusal(step: &'static str) -> impl Fn(TraceError) -> TemplateError {
    move |error| match error {
        TraceError::Exited(status) => TemplateError::Exited(status),
        TraceError::Killed(signal) => TemplateError::Killed(signal),
        TraceError::Failed(errno) => TemplateError::Failed { step, errno },
    }
}

/// Checks that the executed file can become a template: it must be a program for this processor, without set-id bits
/// and file capabilities. For a script, checks its interpreter.
fn check_program(pid: Pid) -> Result<(), TemplateError> {
    let forbidden = |error: std::io::Error| TemplateError::Forbidden(errno_of(&error));
    let file = File::open(format!("/proc/{pid}/exe")).map_err(forbidden)?;
    let mode = file.metadata().map_err(forbidden)?.mode();
    if mode & SET_ID != 0 || has_capabilities(&file) {
        return Err(TemplateError::Privileged);
    }
    let mut header = [0; 20];
    file.read_exact_at(&mut header, 0).map_err(forbidden)?;
    let is_64_bit = header[4] == 2;
    let machine = u16::from_le_bytes([header[18], header[19]]);
    if is_64_bit && machine == arch::ELF_MACHINE { Ok(()) } else { Err(TemplateError::WrongArchitecture) }
}

/// Checks that the entry point of the program is in memory. The kernel checks this only for a program without a
/// dynamic linker.
fn check_entry_point(tracee: &Tracee, stack: &EntryStack) -> Result<(), TemplateError> {
    let Some(entry) = stack.auxiliary_value(libc::AT_ENTRY) else { return Ok(()) };
    tracee.read(entry, &mut [0]).map_err(|_| TemplateError::Damaged)
}

/// Returns whether the file has file capabilities (capabilities(7)).
fn has_capabilities(file: &File) -> bool {
    let name = c"security.capability".as_ptr();
    // SAFETY: with the length 0, the kernel writes nothing and returns the length of the attribute.
    unsafe { libc::fgetxattr(file.as_raw_fd(), name, ptr::null_mut(), 0) > 0 }
}

/// Checks that the process has only one thread, because a fork copies only the calling thread.
fn check_threads(pid: Pid) -> Result<(), TemplateError> {
    // The name of the program may be no valid UTF-8.
    let status = fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")?.trim().parse().ok());
    match threads {
        Some(1) => Ok(()),
        Some(threads) => Err(TemplateError::MultipleThreads(threads)),
        None => Err(TemplateError::Failed { step: "threads", errno: Errno::ESRCH }),
    }
}

/// Reads the `added` arguments that the kernel has put before the given ones, for a script with `#!`: the interpreter,
/// its argument, and the path of the script in place of argument 0.
fn interpreter_arguments(tracee: &Tracee, stack: &EntryStack, added: usize) -> Result<Vec<Vec<u8>>, Errno> {
    let count = if added == 0 { 0 } else { added + 1 };
    stack.pointers[..count].iter().map(|address| tracee.read_string(*address)).collect()
}

/// Returns the address that the program has given to set_tid_address(2). `None` if there is none yet.
fn thread_id_address(tracee: &mut Tracee, stack: &EntryStack) -> Result<Option<u64>, TraceError> {
    let address = with_scratch_memory(tracee, stack, |tracee, scratch| {
        tracee.call(libc::SYS_prctl, [PR_GET_TID_ADDRESS, scratch, 0, 0, 0, 0])?;
        Ok(tracee.read_u64(scratch)?)
    })?;
    Ok(Some(address).filter(|address| *address != 0))
}

/// Returns whether the 32 bits at `address` are the thread id. Glibc keeps the thread id where the kernel clears it
/// when the thread ends, musl elsewhere.
fn holds_pid(tracee: &Tracee, address: u64) -> bool {
    let mut bytes = [0; 4];
    tracee.read(address, &mut bytes).is_ok() && i32::from_ne_bytes(bytes) == tracee.pid().as_raw()
}

/// Returns the address and the length of the head of the robust futex list, get_robust_list(2).
fn robust_list(tracee: &mut Tracee, stack: &EntryStack) -> Result<(u64, u64), TraceError> {
    with_scratch_memory(tracee, stack, |tracee, scratch| {
        tracee.call(libc::SYS_get_robust_list, [0, scratch, scratch + 8, 0, 0, 0])?;
        Ok((tracee.read_u64(scratch)?, tracee.read_u64(scratch + 8)?))
    })
}

/// Lends 16 bytes in the memory of the process to `work`, which gets their address. System calls of the process can
/// write there. Afterwards restores the previous content of these bytes, also if `work` fails.
fn with_scratch_memory<T>(
    tracee: &mut Tracee,
    stack: &EntryStack,
    work: impl FnOnce(&mut Tracee, u64) -> Result<T, TraceError>,
) -> Result<T, TraceError> {
    let mut before = [0; 16];
    tracee.read(stack.address, &mut before)?;
    let result = work(tracee, stack.address);
    tracee.write(stack.address, &before)?;
    result
}

/// Reads the addresses of the memory areas of the process, such as code and stack. `None` if the kernel does not report
/// them.
fn memory_map(tracee: &mut Tracee) -> Result<Option<MemoryMap>, TraceError> {
    let brk = tracee.call(libc::SYS_brk, [0; 6])?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", tracee.pid())).unwrap_or_default();
    Ok(MemoryMap::from_stat(&stat, brk))
}

/// Makes the traced process a template, which waits for messages when it continues. For this, writes the code of
/// [`super::message::stub`] and a block of memory for messages into the process. The code reads messages from the
/// descriptor `descriptor`. Returns the address of the block.
///
/// Also removes the parent death signal (prctl(2), `PR_SET_PDEATHSIG`), because the process exits when the channel is
/// closed.
fn install_template_code(tracee: &mut Tracee, descriptor: u64) -> Result<TemplateBlock, TraceError> {
    let private = flag_argument(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let (read, write, execute) =
        (flag_argument(libc::PROT_READ), flag_argument(libc::PROT_WRITE), flag_argument(libc::PROT_EXEC));
    let mut map = |size, protection| tracee.call(libc::SYS_mmap, [0, size, protection, private, u64::MAX, 0]);
    let code = map(CODE_SIZE, read | execute)?;
    let block = TemplateBlock(map(BLOCK_SIZE, read | write)?);
    tracee.call(
        libc::SYS_madvise,
        [block.reply_address(), REPLY_SIZE as u64, flag_argument(libc::MADV_DONTFORK), 0, 0, 0],
    )?;
    let registers = tracee.registers()?;
    let stub_data = StubData {
        channel: descriptor,
        header: block.header_address(),
        calls: block.message_address(),
        reply: block.reply_address(),
        ..arch::registers_to_stub_data(&registers)
    };
    tracee.write(code, &[bytes_of(&stub_data), stub::code()].concat())?;
    tracee.write(block.header_address(), &block.initial_bytes())?;
    tracee.call(libc::SYS_prctl, [flag_argument(libc::PR_SET_PDEATHSIG), 0, 0, 0, 0, 0])?;
    tracee.set_registers(arch::with_instruction_pointer(registers, code + size_of::<StubData>() as u64))?;
    Ok(block)
}

/// Converts flags of a system call, such as `MAP_PRIVATE`, to the 64-bit type that the arguments of system calls have.
pub(super) fn flag_argument(flags: i32) -> u64 {
    u64::try_from(flags).unwrap_or(0)
}
