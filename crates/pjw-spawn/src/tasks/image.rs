//! The program of a task, as elf(5) describes it: a static executable that runs at any address (`-static-pie`).

use std::ffi::CStr;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use thiserror::Error;

use super::page::PAGE;

/// The maximum number of segments (`PT_LOAD`) that a program may have to run as a task. Usual programs have four or
/// five segments.
pub(super) const MAX_SEGMENTS: usize = 16;
/// The longest dynamic section that is read. Usual programs have less than 1 KiB.
const MAX_DYNAMIC: u64 = 1 << 20;
/// The largest span of addresses of a program.
const MAX_SPAN: u64 = 1 << 40;
const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;

const ET_EXEC: u64 = 2;
const ET_DYN: u64 = 3;
const EM_X86_64: u64 = 62;
const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const PT_INTERP: u64 = 3;
const PT_GNU_STACK: u64 = 0x6474_e551;
const PF_X: u64 = 1;
const PF_W: u64 = 2;
const PF_R: u64 = 4;
const DT_NEEDED: u64 = 1;
const DT_SONAME: u64 = 14;

/// How a program has to be linked to run as a task.
const HOW_TO_LINK: &str =
    "link it with -static-pie (cc -static-pie; Rust: RUSTFLAGS='-C target-feature=+crt-static')";

/// Error: a program can't run as a task. A task is a process that shares its address space with other processes of
/// the same program. The program must be a static executable for x86-64 that runs at any address (`-static-pie`).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ImageError {
    /// The file could not be read.
    #[error("it can't be read: {0}; check its permissions")]
    Unreadable(String),
    /// The file begins with `#!`.
    #[error("it is a script; name a program that was linked with -static-pie")]
    Script,
    /// The file is not in the format ELF, or is cut off.
    #[error("it is no complete ELF program; name a program that was linked with -static-pie")]
    NoElf,
    /// The program was compiled for another architecture than x86-64. The text is the name of this architecture.
    #[error("it is for {0}, and tasks run on x86-64 only; compile it for x86-64")]
    UnsupportedArchitecture(String),
    /// This library was compiled for another architecture than x86-64. Tasks exist on x86-64 only.
    #[error("tasks with shared memory run on x86-64 only; start without --share memory")]
    OtherHost,
    /// The program needs the dynamic linker.
    #[error("it is linked dynamically; {HOW_TO_LINK}")]
    Dynamic,
    /// The program runs at one fixed address.
    #[error("it is static, and not position-independent; {HOW_TO_LINK}")]
    FixedAddress,
    /// The file is a shared library.
    #[error("it is a shared library; name a program that was linked with -static-pie")]
    Library,
    /// The program is set-user-ID, is set-group-ID or has file capabilities. A task would not get these rights.
    #[error(
        "it is set-user-ID, set-group-ID, or has file capabilities, which tasks do not get; start without --share memory"
    )]
    Privileged,
}

/// A segment (`PT_LOAD`) of the ELF file of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Segment {
    /// Its address, relative to the address where the program is mapped.
    pub(super) address: u64,
    pub(super) memory_bytes: u64,
    pub(super) file_offset: u64,
    pub(super) file_bytes: u64,
    /// `PROT_READ` and others, mmap(2).
    pub(super) protection: i32,
}

impl Segment {
    /// Returns whether the segment has variables.
    pub(super) fn is_writable(&self) -> bool {
        self.protection & libc::PROT_WRITE != 0
    }

    /// Returns the pages of the segment: their begin and their end, relative to the address where the program is
    /// mapped.
    fn pages(&self) -> (u64, u64) {
        (self.address - self.address % PAGE, (self.address + self.memory_bytes).next_multiple_of(PAGE))
    }

    /// Returns this segment and `next` as one segment, with the protections of both. `None` if one of them has
    /// variables, or if `next` does not directly follow this segment in the file and in memory.
    fn joined_with(&self, next: &Self) -> Option<Self> {
        let is_constant =
            |segment: &Self| !segment.is_writable() && segment.file_bytes == segment.memory_bytes;
        let end = (self.address + self.file_bytes).next_multiple_of(PAGE);
        let follows = self.address < next.address
            && next.address - next.address % PAGE == end
            && next.file_offset.checked_sub(self.file_offset) == Some(next.address - self.address);
        (is_constant(self) && is_constant(next) && follows).then(|| {
            let bytes = next.address + next.file_bytes - self.address;
            let protection = self.protection | next.protection;
            Self { file_bytes: bytes, memory_bytes: bytes, protection, ..*self }
        })
    }
}

/// The properties of a program that are needed to map its file into memory. This type does not use the heap, because
/// the host (the process that maps the program) has no heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProgramLayout {
    segments: [Segment; MAX_SEGMENTS],
    count: usize,
    /// The bytes from the address where the program is mapped to its end. A multiple of the page size.
    pub(super) span: u64,
    /// The alignment of the address where the program is mapped.
    pub(super) alignment: u64,
    /// The first instruction, and the table of program headers, both relative to the address where the program is
    /// mapped.
    pub(super) entry: u64,
    pub(super) program_headers: u64,
    pub(super) program_header_count: u64,
    pub(super) has_executable_stack: bool,
}

impl ProgramLayout {
    /// A program without segments.
    pub(super) const EMPTY: Self = Self {
        segments: [Segment { address: 0, memory_bytes: 0, file_offset: 0, file_bytes: 0, protection: 0 };
            MAX_SEGMENTS],
        count: 0,
        span: 0,
        alignment: PAGE,
        entry: 0,
        program_headers: 0,
        program_header_count: 0,
        has_executable_stack: false,
    };

    /// Iterates over the segments of the program.
    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().take(self.count)
    }

    /// Returns whether one mapping with the protections of the stack can hold the stack and all variables: no variables
    /// can be executed, and none are in a page with code or constants.
    pub(super) fn can_map_variables_with_stack(&self) -> bool {
        let fits = |variables: &Segment| {
            let (begin, end) = variables.pages();
            let shares_page = |other: &Segment| {
                let (other_begin, other_end) = other.pages();
                begin < other_end && other_begin < end
            };
            variables.protection == libc::PROT_READ | libc::PROT_WRITE
                && !self.segments().any(|other| !other.is_writable() && shares_page(other))
        };
        !self.has_executable_stack && self.segments().filter(|segment| segment.is_writable()).all(fits)
    }
}

/// A program that can run as a task (a process that shares its address space with others). Contains the open file of
/// the program, and how the file is mapped into memory.
#[derive(Debug)]
pub(crate) struct TaskProgram {
    pub(super) file: OwnedFd,
    pub(super) layout: ProgramLayout,
}

impl TaskProgram {
    /// Opens the program at `path`, and reads its ELF headers.
    ///
    /// # Errors
    /// If the program can't run as a task.
    pub(crate) fn read(path: &CStr) -> Result<Self, ImageError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(ImageError::OtherHost);
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        let unreadable = |error: std::io::Error| ImageError::Unreadable(error.to_string());
        let file = File::open(path).map_err(unreadable)?;
        let layout = read_layout(&file)?;
        let mode = file.metadata().map_err(unreadable)?.mode();
        if mode & (libc::S_ISUID | libc::S_ISGID) != 0 || has_file_capabilities(&file) {
            return Err(ImageError::Privileged);
        }
        Ok(Self { file: file.into(), layout })
    }
}

fn has_file_capabilities(file: &File) -> bool {
    let mut value = [0_u8; 64];
    rustix::fs::fgetxattr(file, c"security.capability", &mut value).is_ok_and(|length| length > 0)
}

/// How many bytes of the file one call reads. The headers of usual programs need two calls, one of them for the dynamic
/// section.
const BYTES_PER_READ: usize = 4096;

/// Reads headers of a file, which lie near each other.
struct HeaderReader<'a> {
    file: &'a File,
    /// The bytes that were read last, and their offset.
    bytes: Vec<u8>,
    offset: u64,
}

impl HeaderReader<'_> {
    /// Returns `N` bytes of the file from `offset` on. Fails if the file ends before.
    fn read<const N: usize>(&mut self, offset: u64) -> Result<[u8; N], ImageError> {
        if self.buffered::<N>(offset).is_none() {
            self.read_block(offset)?;
        }
        self.buffered(offset).ok_or(ImageError::NoElf)
    }

    fn buffered<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let at = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.bytes.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    /// Reads up to [`BYTES_PER_READ`] bytes of the file from `offset` on, in place of the bytes that were read before.
    /// Reads fewer bytes if the file ends before.
    fn read_block(&mut self, offset: u64) -> Result<(), ImageError> {
        (self.bytes, self.offset) = (vec![0; BYTES_PER_READ], offset);
        let mut count = 0;
        while let Some(unfilled) = self.bytes.get_mut(count..).filter(|unfilled| !unfilled.is_empty()) {
            match self.file.read_at(unfilled, offset + count as u64) {
                Ok(0) => break,
                Ok(read) => count += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ImageError::Unreadable(error.to_string())),
            }
        }
        self.bytes.truncate(count);
        Ok(())
    }
}

/// Returns the little-endian number of `length` bytes at the offset `at`. All offsets are inside of the headers.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes.iter().skip(at).take(length).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Reads the properties that are needed to map a program into memory from the ELF headers in `file`, the file of the
/// program.
///
/// # Errors
/// If the program can't run as a task (a process that shares its address space with others), or if `file` can't be
/// read.
fn read_layout(file: &File) -> Result<ProgramLayout, ImageError> {
    let mut headers = HeaderReader { file, bytes: Vec::new(), offset: 0 };
    let magic: [u8; 4] = headers.read(0)?;
    if magic.starts_with(b"#!") {
        return Err(ImageError::Script);
    }
    if magic != *b"\x7fELF" {
        return Err(ImageError::NoElf);
    }
    let header: [u8; HEADER_BYTES] = headers.read(0)?;
    check_processor(&header)?;
    let file_size = file.metadata().map_err(|error| ImageError::Unreadable(error.to_string()))?.len();
    // The fields e_type, e_phoff, e_phnum and e_phentsize, elf(5).
    let kind = number(&header, 16, 2);
    let (offset, count) = (number(&header, 32, 8), number(&header, 56, 2));
    if ![ET_EXEC, ET_DYN].contains(&kind) || number(&header, 54, 2) != PROGRAM_HEADER_BYTES as u64 {
        return Err(ImageError::NoElf);
    }
    // A program without PT_GNU_STACK gets no executable stack on x86-64, binfmt_elf.c.
    let mut layout =
        ProgramLayout { entry: number(&header, 24, 8), program_header_count: count, ..ProgramLayout::EMPTY };
    let mut dynamic = None;
    let mut has_interpreter = false;
    for index in 0..count {
        let at = offset.checked_add(index * PROGRAM_HEADER_BYTES as u64).ok_or(ImageError::NoElf)?;
        let header: [u8; PROGRAM_HEADER_BYTES] = headers.read(at)?;
        match number(&header, 0, 4) {
            PT_LOAD => layout.add_segment(&header, file_size)?,
            PT_DYNAMIC => dynamic = Some((number(&header, 8, 8), number(&header, 32, 8))),
            PT_INTERP => has_interpreter = true,
            PT_GNU_STACK => layout.has_executable_stack = number(&header, 4, 4) & PF_X != 0,
            _ => {}
        }
    }
    if has_interpreter {
        return Err(ImageError::Dynamic);
    }
    if kind == ET_EXEC {
        return Err(ImageError::FixedAddress);
    }
    check_dynamic_section(&mut headers, dynamic)?;
    if layout.entry == 0 {
        return Err(ImageError::Library);
    }
    layout.find_program_headers(offset)?;
    if layout.entry >= layout.span {
        return Err(ImageError::NoElf);
    }
    layout.merge_read_only_segments();
    Ok(layout)
}

/// Checks in the ELF header that the program is for x86-64 with pointers of 64 bits.
fn check_processor(header: &[u8]) -> Result<(), ImageError> {
    // The class is 1 for 32 bits and 2 for 64 bits. The byte order is 1 for little-endian.
    let (class, order, machine) = (number(header, 4, 1), number(header, 5, 1), number(header, 18, 2));
    match (class, order, machine) {
        (2, 1, EM_X86_64) => Ok(()),
        (1, 1, EM_X86_64) => {
            Err(ImageError::UnsupportedArchitecture("x86-64 with pointers of 32 bits (x32)".into()))
        }
        (1, 1, 3) => Err(ImageError::UnsupportedArchitecture("x86 with 32 bits".into())),
        (2, 1, 183) => Err(ImageError::UnsupportedArchitecture("aarch64".into())),
        (2, _, 21) => Err(ImageError::UnsupportedArchitecture("ppc64".into())),
        (2, 1, 243) => Err(ImageError::UnsupportedArchitecture("riscv64".into())),
        (1 | 2, 1 | 2, _) => {
            Err(ImageError::UnsupportedArchitecture(format!("another processor (e_machine {machine})")))
        }
        _ => Err(ImageError::NoElf),
    }
}

/// Checks that the program is static and runs at any address. Such a program has a dynamic section for its own
/// relocations. The section contains neither the name of a needed library (`DT_NEEDED`) nor a name of the program as a
/// library (`DT_SONAME`). `section` is the offset and the length of the section in the file, if there is one.
fn check_dynamic_section(
    headers: &mut HeaderReader<'_>,
    section: Option<(u64, u64)>,
) -> Result<(), ImageError> {
    // A program without its own relocations runs only at the address for which it was linked.
    let Some((offset, bytes)) = section else { return Err(ImageError::FixedAddress) };
    let mut is_library = false;
    for at in (0..bytes.min(MAX_DYNAMIC)).step_by(16) {
        let entry: [u8; 16] = headers.read(offset.checked_add(at).ok_or(ImageError::NoElf)?)?;
        match number(&entry, 0, 8) {
            0 => break,
            DT_NEEDED => return Err(ImageError::Dynamic),
            DT_SONAME => is_library = true,
            _ => {}
        }
    }
    if is_library { Err(ImageError::Library) } else { Ok(()) }
}

impl ProgramLayout {
    /// Adds the segment that the program header `header` describes. Does nothing if the segment has no bytes in memory.
    /// Fails if the segment can't be mapped. Also fails if it ends after the file, whose size is `size_of_file`: the
    /// kernel answers an access behind the end of a mapped file with SIGBUS.
    fn add_segment(&mut self, header: &[u8], size_of_file: u64) -> Result<(), ImageError> {
        let flags = number(header, 4, 4);
        let protection = |flag, value| if flags & flag != 0 { value } else { 0 };
        let segment = Segment {
            file_offset: number(header, 8, 8),
            address: number(header, 16, 8),
            file_bytes: number(header, 32, 8),
            memory_bytes: number(header, 40, 8),
            protection: protection(PF_R, libc::PROT_READ)
                | protection(PF_W, libc::PROT_WRITE)
                | protection(PF_X, libc::PROT_EXEC),
        };
        if segment.memory_bytes == 0 {
            return Ok(());
        }
        let end = segment.address.checked_add(segment.memory_bytes).filter(|end| *end <= MAX_SPAN);
        let end = end.ok_or(ImageError::NoElf)?;
        let alignment = number(header, 48, 8).max(1);
        let is_mappable = segment.file_bytes <= segment.memory_bytes
            && segment.address % PAGE == segment.file_offset % PAGE
            && segment.file_offset.checked_add(segment.file_bytes).is_some_and(|end| end <= size_of_file)
            && alignment.is_power_of_two()
            && alignment <= MAX_SPAN;
        if !is_mappable {
            return Err(ImageError::NoElf);
        }
        *self.segments.get_mut(self.count).ok_or(ImageError::NoElf)? = segment;
        self.count += 1;
        self.span = self.span.max(end.next_multiple_of(PAGE));
        self.alignment = self.alignment.max(alignment);
        Ok(())
    }

    /// Merges adjacent segments that are not writable (code and constants) into one mapping, as linkers without
    /// `-z separate-code` do. Fewer mappings make the start of a task faster, and also the end of every task in the
    /// same address space (acct_collect() in the kernel visits all mappings).
    fn merge_read_only_segments(&mut self) {
        let mut merged = [Segment::default(); MAX_SEGMENTS];
        let mut count = 0_usize;
        for segment in self.segments() {
            let joined = count.checked_sub(1).and_then(|last| merged[last].joined_with(segment));
            match joined {
                Some(joined) => merged[count - 1] = joined,
                None => {
                    merged[count] = *segment;
                    count += 1;
                }
            }
        }
        (self.segments, self.count) = (merged, count);
    }

    /// Finds where the table of program headers, which begins at `offset` in the file, is in memory.
    fn find_program_headers(&mut self, offset: u64) -> Result<(), ImageError> {
        let has_table = |segment: &&Segment| {
            offset >= segment.file_offset && offset - segment.file_offset < segment.file_bytes
        };
        let segment = self.segments().find(has_table).ok_or(ImageError::NoElf)?;
        self.program_headers = segment.address + (offset - segment.file_offset);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSTANT: i32 = libc::PROT_READ;
    const CODE: i32 = libc::PROT_READ | libc::PROT_EXEC;
    const VARIABLES: i32 = libc::PROT_READ | libc::PROT_WRITE;

    fn segment(address: u64, file_offset: u64, bytes: u64, protection: i32) -> Segment {
        Segment { address, memory_bytes: bytes, file_offset, file_bytes: bytes, protection }
    }

    fn program(segments: &[Segment]) -> ProgramLayout {
        let mut layout = ProgramLayout { count: segments.len(), span: 0x10_0000, ..ProgramLayout::EMPTY };
        layout.segments[..segments.len()].copy_from_slice(segments);
        layout
    }

    fn joined(segments: &[Segment]) -> Vec<Segment> {
        let mut layout = program(segments);
        layout.merge_read_only_segments();
        layout.segments().copied().collect()
    }

    #[test]
    fn variables_that_can_be_executed_or_share_a_page_with_constants_need_mappings_of_their_own() {
        let constants = segment(0x1000, 0x1000, 0x1800, CONSTANT);
        let fit = |variables| program(&[constants, variables]).can_map_variables_with_stack();
        assert!(fit(segment(0x3000, 0x3000, 0x800, VARIABLES)));
        assert!(!fit(segment(0x3000, 0x3000, 0x800, VARIABLES | libc::PROT_EXEC)));
        assert!(
            !fit(segment(0x2800, 0x2800, 0x800, VARIABLES)),
            "they begin in the last page of the constants"
        );
        assert!(!fit(segment(0x800, 0x800, 0x900, VARIABLES)), "they end in the first page of the constants");
        let mut with_code_on_stack = program(&[segment(0x3000, 0x3000, 0x800, VARIABLES)]);
        with_code_on_stack.has_executable_stack = true;
        assert!(!with_code_on_stack.can_map_variables_with_stack());
    }

    #[test]
    fn code_and_the_constants_beside_it_are_one_mapping() {
        let variables = segment(0xac_d10, 0xab_d10, 0x6270, VARIABLES);
        let all = [
            segment(0, 0, 0x8020, CONSTANT),
            segment(0x9000, 0x9000, 0x78b41, CODE),
            segment(0x82000, 0x82000, 0x291c6, CONSTANT),
            variables,
        ];
        assert_eq!(joined(&all), [segment(0, 0, 0xab1c6, CODE), variables]);
    }

    #[test]
    fn segments_with_variables_or_a_gap_stay_as_they_are() {
        let first = segment(0, 0, 0x8020, CONSTANT);
        for second in [
            segment(0xa000, 0xa000, 0x1000, CODE),
            segment(0x9000, 0xa000, 0x1000, CODE),
            segment(0x9000, 0x9000, 0x1000, VARIABLES),
            Segment { memory_bytes: 0x2000, ..segment(0x9000, 0x9000, 0x1000, CODE) },
        ] {
            assert_eq!(joined(&[first, second]), [first, second]);
        }
    }
}
