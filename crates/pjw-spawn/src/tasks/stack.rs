//! What a program finds on its stack when it begins: its arguments, its environment and the auxiliary vector, as
//! create_elf_tables() of the kernel lays them out.

use std::sync::OnceLock;

use nix::errno::Errno;

/// The most entries of the auxiliary vector that are passed on. Linux 6.18 has 24 on x86-64.
const MAX_ENTRIES: usize = 48;
/// The bytes of the null word that the kernel keeps at the end of a stack.
pub(super) const NULL_WORD_BYTES: u64 = 8;
/// The bytes of the stack that must be left below its initial contents.
const ROOM_BELOW: u64 = 128 << 10;
/// The bytes of `AT_RANDOM`.
const RANDOM_BYTES: usize = 16;
/// The longest name of `AT_PLATFORM` and `AT_BASE_PLATFORM` that is passed on, with its NUL byte.
const NAME_BYTES: usize = 32;

/// The auxiliary vector of the calling process, getauxval(3). A task gets a copy in which the entries about the program
/// are replaced.
#[derive(Debug, Clone, Copy)]
pub(super) struct AuxiliaryVector {
    entries: [(u64, u64); MAX_ENTRIES],
    count: usize,
    platform: [u8; NAME_BYTES],
}

impl AuxiliaryVector {
    /// Returns the auxiliary vector of the calling process. The vector is read only once, because it stays the same
    /// while the process executes one program.
    pub(super) fn of_this_process() -> Self {
        static OWN: OnceLock<AuxiliaryVector> = OnceLock::new();
        *OWN.get_or_init(Self::read)
    }

    /// Reads the auxiliary vector of the calling process from /proc/self/auxv, and the name to which `AT_PLATFORM`
    /// points. Reads at most [`MAX_ENTRIES`] entries. The vector is empty if the file can't be read.
    fn read() -> Self {
        let bytes = std::fs::read("/proc/self/auxv").unwrap_or_default();
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
        let read = bytes.chunks_exact(16).map(|pair| (word(&pair[..8]), word(&pair[8..])));
        let mut auxiliary = Self { entries: [(0, 0); MAX_ENTRIES], count: 0, platform: [0; NAME_BYTES] };
        for (pair, entry) in read.take_while(|(key, _)| *key != libc::AT_NULL).zip(&mut auxiliary.entries) {
            *entry = pair;
            auxiliary.count += 1;
        }
        // SAFETY: has no precondition.
        let platform = unsafe { libc::getauxval(libc::AT_PLATFORM) };
        if platform != 0 {
            // SAFETY: the kernel ends the name with a NUL byte, and the name stays on the first stack of the process.
            let name = unsafe { std::ffi::CStr::from_ptr(pointer(platform).cast_const().cast()) }.to_bytes();
            let length = name.len().min(NAME_BYTES - 1);
            auxiliary.platform[..length].copy_from_slice(&name[..length]);
        }
        auxiliary
    }
}

/// The contents of the initial stack of a task: the arguments, the environment variables and the auxiliary vector.
pub(super) struct StackContents<'a> {
    /// The arguments, the variables and the path of the program, each ended by a NUL byte.
    pub(super) strings: &'a [u8],
    pub(super) argument_count: usize,
    pub(super) variable_count: usize,
    /// The program headers that `AT_PHDR` names, as bytes. Empty if `AT_PHDR` is `program_headers`.
    pub(super) header_copy: &'a [u8],
    /// `AT_PHDR`, `AT_PHNUM` and `AT_ENTRY`.
    pub(super) program_headers: u64,
    pub(super) program_header_count: u64,
    pub(super) entry: u64,
    pub(super) auxiliary: &'a AuxiliaryVector,
}

/// Writes words one after the other, towards higher addresses. Contains the address of the next word.
struct WordWriter(*mut u64);

impl WordWriter {
    /// Writes the next word.
    ///
    /// # Safety
    /// The address of the next word must be writable.
    unsafe fn push(&mut self, word: u64) {
        // SAFETY: the caller guarantees that the address is writable.
        unsafe {
            self.0.write(word);
            self.0 = self.0.add(1);
        }
    }
}

/// Writes `contents`, the initial stack of a task, into the stack that ends at the address `top` and has `bytes` bytes.
/// Returns the stack pointer for the first instruction of the program.
///
/// # Errors
/// `E2BIG` if the contents do not fit into the stack.
///
/// # Safety
/// The `bytes` bytes below `top` must be writable and unused.
pub(super) unsafe fn write_initial_stack(
    top: u64,
    bytes: u64,
    contents: &StackContents<'_>,
) -> Result<u64, Errno> {
    let strings = contents.strings.len() as u64;
    let words = 3 + contents.argument_count + contents.variable_count + 2 * (MAX_ENTRIES + 2);
    let headers = contents.header_copy.len() as u64;
    // 256 bytes have room for the null word, the name of the platform, the random bytes and the alignment.
    let needed = strings + headers + (words * size_of::<u64>()) as u64 + 256;
    if needed.saturating_add(ROOM_BELOW) > bytes {
        return Err(Errno::E2BIG);
    }
    let headers_at = top - NULL_WORD_BYTES - headers;
    let strings_at = headers_at - strings;
    let platform_at = strings_at - NAME_BYTES as u64;
    let random_at = (platform_at - RANDOM_BYTES as u64) & !15;
    // SAFETY: all ranges lie within the `bytes` bytes below `top`.
    unsafe {
        let copy = contents.header_copy;
        pointer(headers_at).copy_from_nonoverlapping(copy.as_ptr(), copy.len());
        pointer(strings_at).copy_from_nonoverlapping(contents.strings.as_ptr(), contents.strings.len());
        pointer(platform_at).copy_from_nonoverlapping(contents.auxiliary.platform.as_ptr(), NAME_BYTES);
        libc::syscall(libc::SYS_getrandom, random_at, RANDOM_BYTES, 0);
    }
    let begin = (random_at - (words * size_of::<u64>()) as u64) & !15;
    let mut out = WordWriter(pointer(begin).cast());
    let mut starts = StringStarts { strings: contents.strings, at: 0 };
    // SAFETY: `words` words fit between `begin` and `random_at`.
    unsafe {
        out.push(contents.argument_count as u64);
        for _ in 0..contents.argument_count {
            out.push(strings_at + starts.next_start());
        }
        out.push(0);
        for _ in 0..contents.variable_count {
            out.push(strings_at + starts.next_start());
        }
        out.push(0);
    }
    let program_name = strings_at + starts.next_start();
    let entries = &contents.auxiliary.entries;
    for &(key, value) in entries.iter().take(contents.auxiliary.count) {
        let value = match key {
            libc::AT_PHDR if headers > 0 => headers_at,
            libc::AT_PHDR => contents.program_headers,
            libc::AT_PHNUM => contents.program_header_count,
            libc::AT_ENTRY => contents.entry,
            libc::AT_BASE | libc::AT_SECURE | libc::AT_FLAGS => 0,
            libc::AT_RANDOM => random_at,
            libc::AT_EXECFN => program_name,
            libc::AT_PLATFORM => platform_at,
            _ => value,
        };
        // SAFETY: `words` contains two words for each entry.
        unsafe {
            out.push(key);
            out.push(value);
        }
    }
    // SAFETY: `words` contains two words for the end of the vector.
    unsafe {
        out.push(libc::AT_NULL);
        out.push(0);
    }
    Ok(begin)
}

/// Returns `address` as a pointer. Tasks run only where addresses have 64 bits.
fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Finds the offset of each string in a sequence of strings, of which each ends with a NUL byte.
struct StringStarts<'a> {
    strings: &'a [u8],
    /// The offset of the next string.
    at: usize,
}

impl StringStarts<'_> {
    /// Returns the offset of the next string.
    fn next_start(&mut self) -> u64 {
        let start = self.at;
        let remaining = self.strings.get(start..).unwrap_or_default();
        // By strnlen(3), because a loop over the bytes is slow in debug builds.
        // SAFETY: reads at most the bytes of `remaining`.
        self.at = start + unsafe { libc::strnlen(remaining.as_ptr().cast(), remaining.len()) } + 1;
        start as u64
    }
}
