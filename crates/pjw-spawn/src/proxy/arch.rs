//! What the proxy knows of the processor: x86_64. Except for [`super::stub`], everything else is the same on all.

use super::stub::Slots;

/// The registers of a stopped thread.
pub(super) type Registers = libc::user_regs_struct;

/// The machine in the header of an ELF file: `EM_X86_64`.
pub(super) const ELF_MACHINE: u16 = 62;
/// An instruction that stops a traced process: int3.
pub(super) const BREAKPOINT: [u8; 1] = [0xcc];
/// An instruction that makes a system call: syscall.
pub(super) const SYSTEM_CALL: [u8; 2] = [0x0f, 0x05];

pub(super) fn stack_pointer(registers: &Registers) -> u64 {
    registers.rsp
}

pub(super) fn instruction_pointer(registers: &Registers) -> u64 {
    registers.rip
}

/// Returns the registers that continue at an address.
pub(super) fn at(registers: Registers, address: u64) -> Registers {
    // Without a number of a system call, the kernel does not restart the one that a signal has interrupted.
    Registers { rip: address, orig_rax: u64::MAX, ..registers }
}

/// Returns the address of the breakpoint that a process has run into.
pub(super) fn breakpoint_before(registers: &Registers) -> u64 {
    registers.rip.wrapping_sub(BREAKPOINT.len() as u64)
}

/// Returns the registers for a system call, whose instruction lies at the instruction pointer.
pub(super) fn for_system_call(registers: Registers, number: i64, arguments: [u64; 6]) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    let rax = u64::from_ne_bytes(number.to_ne_bytes());
    Registers { rax, orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..registers }
}

/// Returns the result of a system call.
pub(super) fn result(registers: &Registers) -> u64 {
    registers.rax
}

/// Returns the slots that continue with these registers.
pub(super) fn slots(of: &Registers) -> Slots {
    Slots {
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
        ..Slots::default()
    }
}
