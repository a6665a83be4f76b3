//! Reads from a program or a library of 64 bits which libraries it needs and where they are searched: elf(5).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// `ELFMAG`, `ELFCLASS64` and `ELFDATA2LSB`.
const MAGIC: &[u8] = b"\x7fELF\x02\x01";
/// The size of the ELF header.
const HEADER_SIZE: usize = 64;
/// The longest table that is read. The strings of a program with long C++ names have some MB.
const MAX_TABLE: usize = 256 << 20;
/// The kinds of program headers and of entries of the dynamic section.
const PT_LOAD: usize = 1;
const PT_DYNAMIC: usize = 2;
const PT_INTERP: usize = 3;
const DT_NEEDED: usize = 1;
const DT_STRTAB: usize = 5;
const DT_STRSZ: usize = 10;
const DT_RPATH: usize = 15;
const DT_RUNPATH: usize = 29;

/// The parts of an ELF file that the dynamic linker needs: the names of the required libraries, and the directories
/// in which the libraries are searched. Also contains the path of the dynamic linker itself.
#[derive(Debug, Default)]
pub(super) struct DynamicSection {
    /// The path of the dynamic linker. Programs name one, libraries don't.
    pub(super) linker: Option<PathBuf>,
    /// The names of the libraries.
    pub(super) needed: Vec<OsString>,
    /// The directories that are searched before those of `LD_LIBRARY_PATH` (`DT_RPATH`), and those after
    /// (`DT_RUNPATH`).
    pub(super) search_before: Vec<PathBuf>,
    pub(super) search_after: Vec<PathBuf>,
}

/// The description of a part of the program (a program header): its kind, its offset and size in the file, and its
/// address in memory.
#[derive(Debug, Clone, Copy)]
struct ProgramHeader {
    kind: usize,
    offset: usize,
    address: usize,
    size: usize,
}

impl DynamicSection {
    /// Reads the dynamic section of the file at `path`. `None` if the file is no 64-bit ELF file in the byte order of
    /// this machine, or is truncated.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let file = File::open(path).ok()?;
        let headers = read_program_headers(&file)?;
        let linker = headers.iter().find_map(|header| linker_path(&file, header));
        let mut section = Self { linker, ..Self::default() };
        let Some(dynamic) = headers.iter().find(|header| header.kind == PT_DYNAMIC) else {
            return Some(section);
        };
        let entries = read_at(&file, dynamic.offset, dynamic.size)?;
        let entries: Vec<(usize, usize)> = entries
            .chunks_exact(16)
            .map_while(|entry| Some((read_number(entry, 0, 8)?, read_number(entry, 8, 8)?)))
            .collect();
        let values = |kind: usize| entries.iter().filter(move |entry| entry.0 == kind).map(|entry| entry.1);
        let offset_of = |address: usize| {
            let mut loaded = headers.iter().filter(|header| header.kind == PT_LOAD);
            let part = loaded.find(|part| address >= part.address && address - part.address < part.size)?;
            (address - part.address).checked_add(part.offset)
        };
        let Some(offset) = values(DT_STRTAB).next().and_then(offset_of) else { return Some(section) };
        let Some(size) = values(DT_STRSZ).next() else { return Some(section) };
        let strings = read_at(&file, offset, size)?;
        let text = |offset: usize| {
            let text = strings.get(offset..)?.split(|byte| *byte == 0).next()?;
            Some(OsString::from_vec(text.to_vec()))
        };
        section.needed = values(DT_NEEDED).filter_map(text).collect();
        let lists = |kind| {
            values(kind).filter_map(text).flat_map(|list| directories(&list, path)).collect::<Vec<_>>()
        };
        section.search_after = lists(DT_RUNPATH);
        // With DT_RUNPATH, the linker leaves DT_RPATH out.
        if section.search_after.is_empty() {
            section.search_before = lists(DT_RPATH);
        }
        Some(section)
    }
}

/// Returns the path of the dynamic linker, if `header` describes the part of the file that contains this path.
fn linker_path(file: &File, header: &ProgramHeader) -> Option<PathBuf> {
    if header.kind != PT_INTERP {
        return None;
    }
    let mut text = read_at(file, header.offset, header.size)?;
    text.retain(|byte| *byte != 0);
    Some(OsString::from_vec(text).into())
}

/// Reads the program headers of an ELF file. `None` if `file` is no little-endian 64-bit ELF file, or if the file ends
/// before the end of the headers.
fn read_program_headers(file: &File) -> Option<Vec<ProgramHeader>> {
    let elf_header = read_at(file, 0, HEADER_SIZE)?;
    if !elf_header.starts_with(MAGIC) {
        return None;
    }
    // e_phoff, e_phentsize and e_phnum.
    let offset = read_number(&elf_header, 32, 8)?;
    let (size, count) = (read_number(&elf_header, 54, 2)?, read_number(&elf_header, 56, 2)?);
    let headers = read_at(file, offset, size * count)?;
    let program_header = |header: &[u8]| {
        let field = |at| read_number(header, at, 8);
        Some(ProgramHeader {
            kind: read_number(header, 0, 4)?,
            offset: field(8)?,
            address: field(16)?,
            size: field(32)?,
        })
    };
    Some(headers.chunks_exact(size.max(1)).map_while(program_header).collect())
}

/// Reads `length` bytes of a file from `offset` on. `None` if the file ends before, or if `length` is above
/// [`MAX_TABLE`].
fn read_at(file: &File, offset: usize, length: usize) -> Option<Vec<u8>> {
    if length > MAX_TABLE {
        return None;
    }
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset as u64).ok()?;
    Some(bytes)
}

/// Returns the directories of `list`, a list in the ELF file `file`. Replaces `$ORIGIN` by the directory of this file.
fn directories(list: &OsStr, file: &Path) -> Vec<PathBuf> {
    let origin = file.parent().unwrap_or(Path::new(".")).as_os_str().as_bytes();
    let expanded = |directory: &[u8]| {
        let rest = directory.strip_prefix(b"$ORIGIN").or_else(|| directory.strip_prefix(b"${ORIGIN}"));
        let bytes = rest.map_or_else(|| directory.to_vec(), |rest| [origin, rest].concat());
        PathBuf::from(OsString::from_vec(bytes))
    };
    list.as_bytes().split(|byte| *byte == b':').map(expanded).collect()
}

/// Returns the little-endian number that begins in `bytes` at the offset `at` and is `length` bytes long. `length` must
/// be at most 8. `None` if `bytes` ends before the end of the number.
pub(super) fn read_number(bytes: &[u8], at: usize, length: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    usize::try_from(bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))).ok()
}
