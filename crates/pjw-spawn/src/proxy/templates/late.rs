//! Late fork: a program that has done its start-up calls [`fork_here`], and becomes a template in this call. Further
//! processes of the program (instances) are forked from the template, and continue after the call.

use std::os::fd::RawFd;
use std::{env, fs, process, ptr};

use nix::errno::Errno;

use super::environment::Environment;
use super::load::tracee::bytes_of;
use super::message::addresses::{CHANNEL_VARIABLE, POINTERS_SIZE, PR_GET_TID_ADDRESS, TemplateAddresses};
use super::message::block::{BLOCK_SIZE, CODE_SIZE, REPLY_SIZE, TemplateBlock};
use super::message::stub::{self, StubData};
use crate::proxy::parameters::InstanceParameters;
use crate::proxy::refusal::ForkHereError;

/// Makes the calling process a template: a process that stops in this call, and from which instances (further
/// processes of the program) are forked. The call never returns in the template. It returns in each instance, with
/// `Some` and the arguments and environment variables of the instance. If the program was not started by
/// [`super::Template::load_until_fork_here`], the call returns `Ok(None)` at once.
///
/// An instance inherits the memory, the open files and the working directory that the template has in this call. Its
/// parent is the process that called [`super::Template::load_until_fork_here`] (`CLONE_PARENT`). Handlers of
/// pthread_atfork(3) are not called. The template ends when the process that loaded it ends.
///
/// # Errors
/// If the program has more than one thread, or if a system call fails. The program does not become a template then.
pub fn fork_here() -> Result<Option<InstanceParameters>, ForkHereError> {
    let Some(channel) = env::var(CHANNEL_VARIABLE).ok().and_then(|text| text.parse::<RawFd>().ok()) else {
        return Ok(None);
    };
    let threads = fs::read_dir("/proc/self/task").map_or(1, |tasks| tasks.count() as u64);
    if threads != 1 {
        return Err(ForkHereError::MultipleThreads(threads));
    }
    let code = map_memory(CODE_SIZE)?;
    let block = TemplateBlock(map_memory(BLOCK_SIZE)?);
    let pointers = map_memory(POINTERS_SIZE as u64)?;
    let stub_data = StubData {
        channel: channel.cast_unsigned().into(),
        header: block.header_address(),
        calls: block.message_address(),
        reply: block.reply_address(),
        ..StubData::default()
    };
    write(code, &[bytes_of(&stub_data), stub::code()].concat());
    write(block.header_address(), &block.initial_bytes());
    exclude_reply_from_forks(block)?;
    // SAFETY: the process has one thread.
    let environment_address = map_memory(unsafe { Environment::size() })?;
    let addresses = template_addresses(block, pointers);
    let length = size_of::<TemplateAddresses>();
    // SAFETY: send(2) reads `addresses`, which has `length` bytes. The page at `code` has the code and its data, and
    // can be written. The launcher writes the pointers before an instance begins. The process has one thread.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, 0_u64);
        if libc::send(channel, ptr::from_ref(&addresses).cast(), length, libc::MSG_NOSIGNAL) < 0 {
            // The launcher has ended.
            process::exit(125);
        }
        env::remove_var(CHANNEL_VARIABLE);
        let mut environment = Environment::copy_environ_to(environment_address);
        serve_as_template(code);
        let parameters = InstanceParameters::from_address(usize::try_from(pointers).unwrap_or_default());
        parameters.variable_pointers().for_each(|variable| environment.set(variable));
        Ok(Some(parameters))
    }
}

/// Maps `size` bytes of memory that can be read and written. Returns the address.
fn map_memory(size: u64) -> Result<u64, ForkHereError> {
    let size = usize::try_from(size).unwrap_or(0);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses an address where nothing is mapped.
    let address = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(ForkHereError::Failed { step: "mmap", errno: Errno::last() });
    }
    Ok(address.addr() as u64)
}

/// Excludes the memory for the reply from the memory that instances inherit. For the reason, see
/// [`TemplateBlock::reply_address`].
fn exclude_reply_from_forks(block: TemplateBlock) -> Result<(), ForkHereError> {
    let reply = ptr::with_exposed_provenance_mut(usize::try_from(block.reply_address()).unwrap_or(0));
    // SAFETY: the block is mapped, and no instance uses the reply.
    let result = unsafe { libc::madvise(reply, REPLY_SIZE, libc::MADV_DONTFORK) };
    let failed = |errno| ForkHereError::Failed { step: "madvise", errno };
    Errno::result(result).map(drop).map_err(failed)
}

/// Writes `bytes` to `address` in memory from [`map_memory`].
fn write(address: u64, bytes: &[u8]) {
    let target = ptr::with_exposed_provenance_mut::<u8>(usize::try_from(address).unwrap_or(0));
    // SAFETY: the callers have mapped more bytes there, and nothing else refers to them.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
}

/// Returns the addresses in the memory of this process that its launcher (the process that started it) needs.
/// `pointers` is the address of the memory for pointers to arguments and variables.
fn template_addresses(block: TemplateBlock, pointers: u64) -> TemplateAddresses {
    let mut addresses = TemplateAddresses { block: block.0, pointers, ..TemplateAddresses::default() };
    let (head, length) = (&raw mut addresses.robust_list, &raw mut addresses.robust_list_length);
    // SAFETY: each call writes one number of 64 bits into a field. sbrk(0) changes nothing.
    unsafe {
        addresses.brk = libc::sbrk(0).addr() as u64;
        let operation = i32::try_from(PR_GET_TID_ADDRESS).unwrap_or(0);
        libc::prctl(operation, &raw mut addresses.thread_id_address);
        libc::syscall(libc::SYS_get_robust_list, 0, head, length);
    }
    addresses
}

/// Makes the calling process a template, which waits for messages and forks instances. Returns in each instance, and
/// never in the template. Runs the code of [`stub`] in the page at the address `code`.
///
/// First stores the registers with which an instance continues in this page. Then makes the page executable and no
/// longer writable.
///
/// # Safety
/// The page must contain the `StubData` and the code behind it, and must be writable.
unsafe fn serve_as_template(code: u64) {
    let start = code + size_of::<StubData>() as u64;
    // SAFETY: the code changes no memory of the program. It comes back to label 2 with the stack pointer, the frame
    // pointer and rbx as they were, and all others are named as changed.
    unsafe {
        std::arch::asm!(
            "lea rax, [rip + 2f]",
            "mov [rdi], rax",
            "mov [rdi + 8], rsp",
            "mov [rdi + 24], rbx",
            "mov [rdi + 64], rbp",
            // mprotect(code, 4096, PROT_READ | PROT_EXEC): the page can now be executed, and not written.
            "mov esi, 4096",
            "mov edx, 5",
            "mov eax, 10",
            "syscall",
            "jmp r13",
            "2:",
            inout("rdi") code => _,
            inout("r13") start => _,
            out("rax") _, out("rcx") _, out("rdx") _, out("rsi") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r14") _, out("r15") _,
        );
    }
}
