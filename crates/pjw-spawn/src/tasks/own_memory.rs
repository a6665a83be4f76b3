//! The memory of the host. The host gives up its heap, and unmaps what ended tasks have left.

use std::ptr;
use std::sync::OnceLock;

use nix::errno::Errno;

use super::page::{ADDRESS_LIMIT, PAGE};
use crate::bare;

/// The lowest address that is unmapped. Tasks map nothing below this address (`vm.mmap_min_addr`).
const FIRST_ADDRESS: u64 = 4096;
/// The most mappings of the host that are stored. pjwctl has about 80 mappings.
const MAX_RANGES: usize = 1024;

/// Returns the address at which the heap (brk(2)) of the calling process begins, from field 47 of /proc/self/stat. The
/// kernel does not change this address while a process executes one program, unless the process requests a change
/// (`PR_SET_MM_START_BRK`). `None` if the address can't be read.
pub(super) fn heap_begin() -> Option<u64> {
    static BEGIN: OnceLock<u64> = OnceLock::new();
    if let Some(begin) = BEGIN.get() {
        return Some(*begin);
    }
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Field 47 of proc(5). The text behind the name begins with field 3.
    let begin = text.rsplit_once(')')?.1.split_whitespace().nth(47 - 3)?.parse().ok()?;
    (begin != 0).then(|| *BEGIN.get_or_init(|| begin))
}

/// Returns whether the stack or the thread-local variables of the calling thread are in the heap (brk(2)). The first
/// thread of a static program has its thread-local variables there: the C library makes room for them by brk(2). A host
/// that is forked from such a thread would lose them when it frees its heap.
pub(super) fn is_thread_in_heap() -> bool {
    // SAFETY: the kernel refuses to set the break to 0, and returns the present one.
    let end = unsafe { bare::raw_syscall(libc::SYS_brk, [0; 5]) };
    let (Some(begin), Ok(end)) = (heap_begin(), end.map(i64::cast_unsigned)) else { return false };
    let on_stack = 0_u8;
    // SAFETY: has no precondition.
    let thread_local = unsafe { libc::__errno_location() };
    let addresses = [(&raw const on_stack).addr(), thread_local.addr()];
    addresses.into_iter().any(|address| (begin..end).contains(&(address as u64)))
}

/// Frees the heap of the calling process, which begins at the address `begin`. Also maps an inaccessible page there, so
/// that the heap can't grow. All tasks have the same program break (brk(2)) as this process: without the page, each
/// task would use the heap of the others. With the page, brk(2) fails, and malloc(3) uses mmap(2).
///
/// # Safety
/// The calling process must not use its heap any more.
pub(super) unsafe fn free_heap(begin: u64) -> Result<(), Errno> {
    // SAFETY: the caller does not use the heap. The bare call leaves the variables of the C library as they are.
    let end = unsafe { libc::syscall(libc::SYS_brk, begin) };
    let end = u64::try_from(end).map_err(|_| Errno::EINVAL)?;
    if end != begin {
        return Err(Errno::EBUSY);
    }
    let guard = end.next_multiple_of(PAGE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the page is free, or the call fails.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, guard, PAGE, libc::PROT_NONE, flags, -1, 0) };
    match Errno::result(mapped) {
        // A mapping that is there already keeps the heap from growing too.
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Maps `bytes` bytes of private anonymous memory.
pub(super) fn map_anonymous(bytes: usize) -> Result<*mut u8, Errno> {
    map_anonymous_with_protection(bytes, libc::PROT_READ | libc::PROT_WRITE)
}

/// Maps `bytes` bytes of private anonymous memory with the protections `protection`, mmap(2).
pub(super) fn map_anonymous_with_protection(bytes: usize, protection: i32) -> Result<*mut u8, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses a range that nothing else uses.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(at.cast()) }
}

/// Zeroed memory that the calling process maps for a fork of itself, at an address that both know. Dropping this value
/// unmaps the memory in the calling process. The fork keeps its own copy.
pub(super) struct MemoryForFork {
    at: *mut u8,
    bytes: usize,
}

impl MemoryForFork {
    /// Maps `bytes` bytes. The calling process must not write to them, because the fork expects zeros.
    ///
    /// # Errors
    /// The error of mmap(2).
    pub(super) fn map(bytes: usize) -> Result<Self, Errno> {
        map_anonymous(bytes).map(|at| Self { at, bytes })
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for MemoryForFork {
    fn drop(&mut self) {
        // SAFETY: the mapping is that of `map`, and nothing in this process uses it.
        let _ = unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// The memory mappings that the host (the process that starts tasks) had before the first task. For each mapping,
/// contains the start and the end address. The mappings are in ascending order.
pub(super) struct HostMappings {
    ranges: *mut (u64, u64),
    count: usize,
    /// Whether all mappings were read.
    is_complete: bool,
}

impl HostMappings {
    /// The size in bytes of the memory that [`HostMappings::read`] needs.
    pub(super) const BYTES: usize = MAX_RANGES * size_of::<(u64, u64)>();

    /// Reads the mappings of the calling process from /proc/self/maps. If they can't be read, or are too many,
    /// [`HostMappings::unmap_new_mappings`] of the returned value does nothing.
    ///
    /// # Safety
    /// `memory` must have [`HostMappings::BYTES`] bytes that are used by nothing else.
    pub(super) unsafe fn read(memory: *mut u8) -> Self {
        let mut own = Self { ranges: memory.cast(), count: 0, is_complete: false };
        // SAFETY: the path ends with a NUL byte.
        let file = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if file < 0 {
            return own;
        }
        let mut parser = RangeParser::default();
        let mut bytes = [0_u8; 4096];
        own.is_complete = 'read: loop {
            // SAFETY: the buffer has the length that is given.
            let count = unsafe { libc::read(file, bytes.as_mut_ptr().cast(), bytes.len()) };
            let Ok(count) = usize::try_from(count) else { break false };
            if count == 0 {
                break true;
            }
            for byte in bytes.iter().take(count) {
                if parser.push_byte(*byte).is_some_and(|range| !own.add(range)) {
                    break 'read false;
                }
            }
        };
        // SAFETY: the descriptor was opened above.
        unsafe { libc::close(file) };
        own
    }

    /// Adds `range` to the mappings. Returns false, and adds nothing, if there are [`MAX_RANGES`] already.
    fn add(&mut self, range: (u64, u64)) -> bool {
        if self.count == MAX_RANGES {
            return false;
        }
        // SAFETY: the memory has room for `MAX_RANGES` ranges.
        unsafe { self.ranges.add(self.count).write(range) };
        self.count += 1;
        true
    }

    /// Unmaps all memory that was mapped after [`HostMappings::read`]: memory that ended tasks have left. Does nothing
    /// if [`HostMappings::read`] could not read all mappings.
    ///
    /// # Safety
    /// No task may run.
    pub(super) unsafe fn unmap_new_mappings(&self) {
        if !self.is_complete {
            return;
        }
        let mut free_from = FIRST_ADDRESS;
        for index in 0..self.count {
            // SAFETY: `count` ranges were written.
            let (begin, end) = unsafe { self.ranges.add(index).read() };
            // SAFETY: the caller guarantees that nothing uses the memory between the own ranges.
            unsafe { unmap(free_from, begin) };
            free_from = free_from.max(end);
        }
        // SAFETY: the caller guarantees that nothing uses the memory above the own ranges.
        unsafe { unmap(free_from, ADDRESS_LIMIT) };
    }
}

/// Unmaps the memory from the address `begin` to the address `end`.
///
/// # Safety
/// Nothing may use the range.
pub(super) unsafe fn unmap(begin: u64, end: u64) {
    if begin < end.min(ADDRESS_LIMIT) {
        // SAFETY: the caller guarantees that nothing uses the range. Ranges without mappings are allowed, munmap(2).
        unsafe { libc::syscall(libc::SYS_munmap, begin, end.min(ADDRESS_LIMIT) - begin) };
    }
}

/// Parses the address ranges in /proc/PID/maps, byte by byte.
#[derive(Debug, Default)]
struct RangeParser {
    /// The begin of the range in the current line, after its `-` was read.
    begin: Option<u64>,
    /// The hexadecimal number that is being read.
    number: u64,
    /// Whether the range of the current line was read.
    is_done: bool,
}

impl RangeParser {
    /// Processes `byte`, the next byte of the text. If the address range of a line ended with the byte before, returns
    /// the begin and the end of this range. `None` for all other bytes.
    fn push_byte(&mut self, byte: u8) -> Option<(u64, u64)> {
        let digit = char::from(byte).to_digit(16);
        match (byte, digit) {
            (b'\n', _) => *self = Self::default(),
            _ if self.is_done => {}
            (b'-', _) => self.begin = Some(std::mem::take(&mut self.number)),
            (_, Some(digit)) => self.number = self.number << 4 | u64::from(digit),
            _ => {
                self.is_done = true;
                return Some((self.begin?, self.number));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_from_each_line() {
        let text = b"00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/a-b\n\
                     7ffd1c000000-7ffd1c021000 rw-p 00000000 00:00 0 [stack]\n";
        let mut parser = RangeParser::default();
        let ranges: Vec<_> = text.iter().filter_map(|byte| parser.push_byte(*byte)).collect();
        assert_eq!(ranges, [(0x40_0000, 0x45_2000), (0x7ffd_1c00_0000, 0x7ffd_1c02_1000)]);
    }

    #[test]
    fn the_heap_of_a_process_has_a_beginning() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let heap = maps.lines().find(|line| line.ends_with("[heap]")).unwrap();
        let begin = u64::from_str_radix(heap.split_once('-').unwrap().0, 16).unwrap();
        assert_eq!(heap_begin(), Some(begin));
    }
}
