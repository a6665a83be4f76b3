//! The code that a template runs while it waits, and that its instances run before their program. For x86_64.
//!
//! A template is stopped where its program is loaded and linked. This code is then written into a page of its memory,
//! and the template continues here. The code uses no stack and no memory of the program, so that both stay as they
//! were at the stop.
//!
//! The code reads a message from the channel: a list of system calls ([`TemplateCall`]). It makes them in order, and
//! writes a [`TemplateReply`] to the channel after the last one, or after the first that failed. One of them, clone(2),
//! makes the instance. The instance goes on with a list of its own, loads the registers of the stop and continues with
//! its program. When the channel ends, the template ends: with exit status 125, as an instance does whose calls fail.

/// The data of the machine code that a template runs while it waits for messages: the registers with which the program
/// later continues, and the addresses of buffers. The data lie directly before the code in memory. The code contains
/// the offsets of the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::proxy::templates) struct StubData {
    pub(in crate::proxy::templates) rip: u64,
    pub(in crate::proxy::templates) rsp: u64,
    pub(in crate::proxy::templates) rax: u64,
    pub(in crate::proxy::templates) rbx: u64,
    pub(in crate::proxy::templates) rcx: u64,
    pub(in crate::proxy::templates) rdx: u64,
    pub(in crate::proxy::templates) rsi: u64,
    pub(in crate::proxy::templates) rdi: u64,
    pub(in crate::proxy::templates) rbp: u64,
    pub(in crate::proxy::templates) r8_to_r15: [u64; 8],
    /// The descriptor of the channel.
    pub(in crate::proxy::templates) channel: u64,
    /// The address of the `msghdr` for recvmsg(2).
    pub(in crate::proxy::templates) header: u64,
    /// The address of the received calls.
    pub(in crate::proxy::templates) calls: u64,
    /// The address of the [`TemplateReply`].
    pub(in crate::proxy::templates) reply: u64,
}

/// One operation in a message to a template: usually a system call with its number and arguments. `flags` is a
/// combination of flags such as [`EXPECT_RESULT`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::proxy::templates) struct TemplateCall {
    pub(in crate::proxy::templates) number: i64,
    pub(in crate::proxy::templates) arguments: [u64; 6],
    pub(in crate::proxy::templates) flags: u64,
}

/// Flag of a [`TemplateCall`]: argument 0 is the address of a number in memory. The number, a file descriptor, is
/// passed to the system call as argument 0.
pub(in crate::proxy::templates) const INDIRECT_DESCRIPTOR: u64 = 1;
/// Flag of a [`TemplateCall`]: the system call forks a process. The new process continues with the calls at the address
/// in argument 5. The template writes the lower 32 bits of the result (a process id or a negative error number) to the
/// address in argument 4, and continues with its next call.
pub(in crate::proxy::templates) const FORK_PROCESS: u64 = 2;
/// Flag of a [`TemplateCall`]: this is the last call in the list. After this call, the template sends its reply.
pub(in crate::proxy::templates) const LAST_CALL: u64 = 4;
/// Flag of a [`TemplateCall`] without a system call: the process ends the list of calls, and begins its program.
pub(in crate::proxy::templates) const BEGIN_PROGRAM: u64 = 8;
/// Flag of a [`TemplateCall`] without a system call: the process ends the list of calls, and waits for the next
/// message.
pub(in crate::proxy::templates) const WAIT_FOR_MESSAGE: u64 = 16;
/// Flag of a [`TemplateCall`]: the process exits with status 125 if the result of the system call is not equal to
/// argument 5.
pub(in crate::proxy::templates) const EXPECT_RESULT: u64 = 32;
/// Flag of a [`TemplateCall`]: the process ignores an error of the system call, and continues with the next call.
pub(in crate::proxy::templates) const IGNORE_ERROR: u64 = 64;
/// Flag of a [`TemplateCall`] without a system call: copies bytes from the address in argument 1 to the address in
/// argument 0. Argument 2 is the number of bytes.
pub(in crate::proxy::templates) const COPY_BYTES: u64 = 128;

/// The reply that a template (the process from which further processes are forked) sends after each message.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy::templates) struct TemplateReply {
    /// The result of the last call, or the negative errno of the call that failed.
    pub(in crate::proxy::templates) result: i64,
    /// For each instance of the message its process id, or the negative errno of its clone(2).
    pub(in crate::proxy::templates) pids: [i32; MAX_INSTANCES],
}

/// The maximum number of processes that a template forks for one message.
pub(in crate::proxy::templates) const MAX_INSTANCES: usize = 16;

std::arch::global_asm!(
    ".pushsection .rodata.pjw_spawn_stub, \"a\"",
    ".balign 16",
    ".globl pjw_spawn_stub, pjw_spawn_stub_end",
    ".hidden pjw_spawn_stub, pjw_spawn_stub_end",
    ".set stub_data, pjw_spawn_stub - 168",
    "pjw_spawn_stub:",
    // Wait for a message: recvmsg(channel, header, 0).
    "2: mov edi, [rip + stub_data + 136]",
    "mov rsi, [rip + stub_data + 144]",
    "mov qword ptr [rsi + 40], 64", // msg_controllen, which the kernel has changed
    "xor edx, edx",
    "mov eax, 47",
    "syscall",
    "cmp rax, -4", // EINTR
    "je 2b",
    "test rax, rax",
    "jle 9f",
    "mov rbx, [rip + stub_data + 152]",
    // One call. A system call changes only rax, rcx and r11.
    "3: mov rax, [rbx]",
    "mov rdi, [rbx + 8]",
    "mov rsi, [rbx + 16]",
    "mov rdx, [rbx + 24]",
    "mov r10, [rbx + 32]",
    "mov r8, [rbx + 40]",
    "mov r9, [rbx + 48]",
    "mov r12, [rbx + 56]",
    "test r12d, {begin_program}",
    "jnz 8f",
    "test r12d, {wait}",
    "jnz 2b",
    "test r12d, {copy}",
    "jnz 21f",
    "test r12d, {indirect}",
    "jz 4f",
    "mov edi, [rdi]",
    "4: syscall",
    "test r12d, {expect_result}",
    "jz 5f",
    "cmp rax, r9",
    "jne 9f",
    "5: test r12d, {ignore_error}",
    "jnz 6f",
    "test r12d, {fork}",
    "jnz 20f",
    "cmp rax, -4095",
    "jae 7f",
    "6: test r12d, {last}",
    "jnz 7f",
    "add rbx, 64",
    "jmp 3b",
    // After clone(2): the new instance goes on with its own calls, the template with its next call.
    "20: test rax, rax",
    "jz 22f",
    "mov [r8], eax",
    "jmp 6b",
    "22: mov rbx, r9",
    "jmp 3b",
    // COPY_BYTES.
    "21: mov rcx, rdx",
    "rep movsb",
    "jmp 6b",
    // The reply: write(channel, reply, 72).
    "7: mov rsi, [rip + stub_data + 160]",
    "mov [rsi], rax",
    "mov edi, [rip + stub_data + 136]",
    "mov edx, 72",
    "mov eax, 1",
    "syscall",
    "jmp 2b",
    // The program begins.
    "8: mov rsp, [rip + stub_data + 8]",
    "mov rax, [rip + stub_data + 16]",
    "mov rbx, [rip + stub_data + 24]",
    "mov rcx, [rip + stub_data + 32]",
    "mov rdx, [rip + stub_data + 40]",
    "mov rsi, [rip + stub_data + 48]",
    "mov rdi, [rip + stub_data + 56]",
    "mov rbp, [rip + stub_data + 64]",
    "mov r8, [rip + stub_data + 72]",
    "mov r9, [rip + stub_data + 80]",
    "mov r10, [rip + stub_data + 88]",
    "mov r11, [rip + stub_data + 96]",
    "mov r12, [rip + stub_data + 104]",
    "mov r13, [rip + stub_data + 112]",
    "mov r14, [rip + stub_data + 120]",
    "mov r15, [rip + stub_data + 128]",
    "jmp [rip + stub_data]",
    // The channel has ended, or a result was not as expected: exit_group(125).
    "9: mov edi, 125",
    "mov eax, 231",
    "syscall",
    "pjw_spawn_stub_end:",
    ".popsection",
    indirect = const INDIRECT_DESCRIPTOR,
    fork = const FORK_PROCESS,
    last = const LAST_CALL,
    begin_program = const BEGIN_PROGRAM,
    wait = const WAIT_FOR_MESSAGE,
    expect_result = const EXPECT_RESULT,
    ignore_error = const IGNORE_ERROR,
    copy = const COPY_BYTES,
);

unsafe extern "C" {
    static pjw_spawn_stub: u8;
    static pjw_spawn_stub_end: u8;
}

/// Returns the machine code that a template runs while it waits for messages. In the memory of the template, the code
/// must directly follow a value of [`StubData`].
pub(in crate::proxy::templates) fn code() -> &'static [u8] {
    let (start, end) = (&raw const pjw_spawn_stub, &raw const pjw_spawn_stub_end);
    // SAFETY: the symbols are the bounds of one block of constant bytes in this program's read-only data.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn the_fields_lie_where_the_assembly_reads_them() {
        assert_eq!(size_of::<StubData>(), 168);
        assert_eq!(offset_of!(StubData, rbp), 64);
        assert_eq!(offset_of!(StubData, r8_to_r15), 72);
        assert_eq!(offset_of!(StubData, channel), 136);
        assert_eq!(offset_of!(StubData, header), 144);
        assert_eq!(offset_of!(StubData, calls), 152);
        assert_eq!(offset_of!(StubData, reply), 160);
        assert_eq!(size_of::<TemplateCall>(), 64);
        assert_eq!(offset_of!(TemplateCall, flags), 56);
        assert_eq!(size_of::<TemplateReply>(), 72);
        assert!(size_of::<StubData>() + code().len() <= 4096);
    }
}
