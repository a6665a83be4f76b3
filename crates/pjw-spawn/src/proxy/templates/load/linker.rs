//! Runs a program to the point where it is loaded and linked, and nothing of its own has run.
//!
//! For a dynamic program this is the second call of the function that the dynamic linker has for debuggers (`r_brk` of
//! `_r_debug`, the interface of `<link.h>`): all libraries are mapped and relocated, and no constructor has run. So
//! constructors see the arguments, the environment, the mask and the process id of their own instance. Static programs
//! and dynamic linkers without that interface stop at the entry point of the program: musl runs constructors after it.

use nix::errno::Errno;

use super::arch;
use super::entry_stack::EntryStack;
use super::tracee::{StopReason, TraceError, Tracee};

/// The value of `r_state` in `_r_debug` if the dynamic linker is not loading a library: before the first library, and
/// after the last one.
const RT_CONSISTENT: u64 = 0;
/// The offset of `r_brk` in `struct r_debug` of 64 bits (`<link.h>`). `r_brk` is the address of the function that the
/// dynamic linker calls when it changes `r_state`.
const R_BRK: u64 = 16;
/// The offset of `r_state` in `struct r_debug` of 64 bits (`<link.h>`).
const R_STATE: u64 = 24;
/// Numbers of the ELF specification (section 2, and its supplement for 64 bits): the type of the dynamic section, two
/// tags in this section, and the size in bytes of an entry of the symbol table.
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const SYMBOL_SIZE: u64 = 24;
/// The most symbols that are read from the dynamic linker, which has fewer.
const MAX_SYMBOLS: u64 = 1 << 14;

/// A breakpoint, and the bytes that it replaced.
struct Breakpoint {
    address: u64,
    replaced: [u8; arch::BREAKPOINT.len()],
}

impl Breakpoint {
    fn set(tracee: &Tracee, address: u64) -> Result<Self, Errno> {
        let mut replaced = [0; arch::BREAKPOINT.len()];
        tracee.read(address, &mut replaced)?;
        tracee.write(address, &arch::BREAKPOINT)?;
        Ok(Self { address, replaced })
    }

    /// Returns whether the process has just executed this breakpoint.
    fn is_hit(&self, tracee: &Tracee) -> Result<bool, Errno> {
        Ok(arch::breakpoint_before(&tracee.registers()?) == self.address)
    }

    /// Restores the instruction. A process that has just executed the breakpoint will continue with this instruction.
    fn remove(self, tracee: &Tracee) -> Result<(), Errno> {
        tracee.write(self.address, &self.replaced)?;
        let registers = tracee.registers()?;
        if arch::breakpoint_before(&registers) == self.address {
            tracee.set_registers(arch::with_instruction_pointer(registers, self.address))?;
        }
        Ok(())
    }
}

/// Runs the process `tracee`, which must be stopped directly after execve(2), until the dynamic linker has loaded and
/// relocated all libraries. Stops earlier if the process reaches the entry point of the program. The process has then
/// not executed any code of the program. `stack` is its initial stack.
pub(in crate::proxy::templates) fn run_until_linked(
    tracee: &mut Tracee,
    stack: &EntryStack,
) -> Result<(), TraceError> {
    let entry = Breakpoint::set(tracee, stack.auxiliary_value(libc::AT_ENTRY).ok_or(Errno::ENOEXEC)?)?;
    let linker = stack.auxiliary_value(libc::AT_BASE).filter(|base| *base != 0);
    let debug = linker.and_then(|base| symbol_address(tracee, base, b"_r_debug").ok().flatten());
    match debug {
        Some(debug) => run_linker(tracee, debug, &entry)?,
        None => run_to(tracee, &entry)?,
    }
    Ok(entry.remove(tracee)?)
}

/// Lets the process run until it has executed `breakpoint`.
fn run_to(tracee: &mut Tracee, breakpoint: &Breakpoint) -> Result<(), TraceError> {
    while tracee.run()? != StopReason::Trap || !breakpoint.is_hit(tracee)? {}
    Ok(())
}

/// Lets the process run until the dynamic linker has loaded and relocated all libraries, or until the process reaches
/// `entry`, the breakpoint at the entry point of the program. `debug` is the address of `_r_debug`, the structure of
/// the dynamic linker for debuggers (`<link.h>`).
fn run_linker(tracee: &mut Tracee, debug: u64, entry: &Breakpoint) -> Result<(), TraceError> {
    // The linker sets r_brk when it begins, before the system calls that open the first library.
    let function = loop {
        if tracee.run_to_system_call()? == StopReason::Trap && entry.is_hit(tracee)? {
            return Ok(());
        }
        let function = tracee.read_u64(debug + R_BRK)?;
        if function != 0 {
            break function;
        }
    };
    // An auditor (`LD_AUDIT`) and its libraries are linked before the program, with further calls of the function.
    // These calls come before the first change of `r_state`.
    let mut has_begun = false;
    loop {
        let call = Breakpoint::set(tracee, function)?;
        while tracee.run()? != StopReason::Trap || !call.is_hit(tracee)? {
            if entry.is_hit(tracee)? {
                return Ok(call.remove(tracee)?);
            }
        }
        call.remove(tracee)?;
        // r_state has 32 bits; the rest is padding.
        let is_consistent = tracee.read_u64(debug + R_STATE)? & u64::from(u32::MAX) == RT_CONSISTENT;
        if has_begun && is_consistent {
            return Ok(());
        }
        has_begun |= !is_consistent;
        tracee.step()?;
    }
}

/// Returns the address of the symbol `name` in the ELF object that is mapped at `base`. `None` if the object has no
/// such symbol. The object must not be relocated yet.
fn symbol_address(tracee: &Tracee, base: u64, name: &[u8]) -> Result<Option<u64>, Errno> {
    let Some(dynamic) = dynamic_section(tracee, base)? else { return Ok(None) };
    let (mut strings, mut symbols) = (None, None);
    for entry in (dynamic..).step_by(16) {
        let value = tracee.read_u64(entry + 8)?;
        match tracee.read_u64(entry)? {
            0 => break,
            DT_STRTAB => strings = Some(base + value),
            DT_SYMTAB => symbols = Some(base + value),
            _ => {}
        }
    }
    let (Some(strings), Some(symbols)) = (strings, symbols) else { return Ok(None) };
    // Linkers place the names directly behind the symbols.
    let count = strings.saturating_sub(symbols) / SYMBOL_SIZE;
    for symbol in (0..count.min(MAX_SYMBOLS)).map(|index| symbols + index * SYMBOL_SIZE) {
        let mut text = vec![0; name.len() + 1];
        let offset = tracee.read_u64(symbol)? & u64::from(u32::MAX);
        if tracee.read(strings + offset, &mut text).is_ok() && text.split_last() == Some((&0, name)) {
            return Ok(Some(base + tracee.read_u64(symbol + 8)?));
        }
    }
    Ok(None)
}

/// Returns the address of the dynamic section of the ELF object that is mapped at `base`. `None` if the object has no
/// dynamic section.
fn dynamic_section(tracee: &Tracee, base: u64) -> Result<Option<u64>, Errno> {
    let mut header = [0; 64];
    tracee.read(base, &mut header)?;
    // The fields e_phoff, e_phentsize and e_phnum.
    let program_headers = base + parse_little_endian(&header[32..40]);
    let size = parse_little_endian(&header[54..56]);
    let count = parse_little_endian(&header[56..58]);
    for program_header in (0..count).map(|index| program_headers + index * size) {
        let kind = tracee.read_u64(program_header)? & u64::from(u32::MAX);
        if kind == u64::from(PT_DYNAMIC) {
            return Ok(Some(base + tracee.read_u64(program_header + 16)?));
        }
    }
    Ok(None)
}

/// Returns the number that `bytes`, at most 8 bytes, contain in little-endian order.
fn parse_little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
