//! The code for the architecture x86_64: registers, machine instructions and system calls of a traced process. Other
//! code for this architecture is in [`crate::proxy::templates::message::stub`] and [`crate::proxy::fork_here`].

use crate::proxy::templates::message::stub::StubData;

/// The registers of a stopped thread.
pub(in crate::proxy::templates) type Registers = libc::user_regs_struct;

/// The value of the field `e_machine` in the ELF header of a program for this architecture: `EM_X86_64`.
pub(in crate::proxy::templates) const ELF_MACHINE: u16 = 62;
/// The instruction `int3`, which stops a traced process with SIGTRAP.
pub(in crate::proxy::templates) const BREAKPOINT: [u8; 1] = [0xcc];
/// The instruction `syscall`, which makes a system call.
pub(in crate::proxy::templates) const SYSTEM_CALL: [u8; 2] = [0x0f, 0x05];

/// Returns the stack pointer (`rsp`) in `registers`.
pub(in crate::proxy::templates) fn stack_pointer(registers: &Registers) -> u64 {
    registers.rsp
}

/// Returns the instruction pointer (`rip`) in `registers`.
pub(in crate::proxy::templates) fn instruction_pointer(registers: &Registers) -> u64 {
    registers.rip
}

/// Returns a copy of `registers` in which the instruction pointer is `address`. A process with these registers
/// continues at `address`, and does not restart a system call that a signal interrupted.
pub(in crate::proxy::templates) fn with_instruction_pointer(registers: Registers, address: u64) -> Registers {
    // Without a number of a system call, the kernel does not restart the one that a signal has interrupted.
    Registers { rip: address, orig_rax: u64::MAX, ..registers }
}

/// Returns the address of the breakpoint instruction that a stopped process has just executed. `registers` are the
/// registers of the process.
pub(in crate::proxy::templates) fn breakpoint_before(registers: &Registers) -> u64 {
    registers.rip.wrapping_sub(BREAKPOINT.len() as u64)
}

/// Returns a copy of `registers` that makes a stopped process execute the system call `number` with `arguments`. The
/// next instruction of the process must be [`SYSTEM_CALL`].
pub(in crate::proxy::templates) fn for_system_call(
    registers: Registers,
    number: i64,
    arguments: [u64; 6],
) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    let rax = u64::from_ne_bytes(number.to_ne_bytes());
    Registers { rax, orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..registers }
}

/// Returns the result of the system call that a stopped process has just executed: the returned value, or the negative
/// error number. `registers` are the registers of the process.
pub(in crate::proxy::templates) fn system_call_result(registers: &Registers) -> u64 {
    registers.rax
}

/// Returns the data for the machine code that a template runs while it waits for messages. A template is a process that
/// has loaded a program, and from which further processes of the program are forked. The data contain the registers
/// `saved`, with which a forked process later continues the program. All other fields are 0.
pub(in crate::proxy::templates) fn registers_to_stub_data(saved: &Registers) -> StubData {
    StubData {
        rip: saved.rip,
        rsp: saved.rsp,
        rax: saved.rax,
        rbx: saved.rbx,
        rcx: saved.rcx,
        rdx: saved.rdx,
        rsi: saved.rsi,
        rdi: saved.rdi,
        rbp: saved.rbp,
        r8_to_r15: [saved.r8, saved.r9, saved.r10, saved.r11, saved.r12, saved.r13, saved.r14, saved.r15],
        ..StubData::default()
    }
}
