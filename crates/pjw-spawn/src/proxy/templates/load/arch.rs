//! What the proxy knows of the processor: x86_64. Except for [`crate::proxy::templates::message::stub`], everything
//! else is the same on all.

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

/// Returns a value of [`StubData`] that contains the registers `of`. With these registers, the code in a template later
/// continues the program. The other fields of the value are 0.
pub(in crate::proxy::templates) fn stub_data(of: &Registers) -> StubData {
    StubData {
        rip: of.rip,
        rsp: of.rsp,
        rax: of.rax,
        rbx: of.rbx,
        rcx: of.rcx,
        rdx: of.rdx,
        rsi: of.rsi,
        rdi: of.rdi,
        rbp: of.rbp,
        r8_to_r15: [of.r8, of.r9, of.r10, of.r11, of.r12, of.r13, of.r14, of.r15],
        ..StubData::default()
    }
}
