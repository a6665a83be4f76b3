//! How many files that are not there the dynamic linker opens at each start of a program, because `LD_LIBRARY_PATH`
//! names directories without the libraries. Nothing is executed: the files are read as ld.so(8) of glibc reads them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::commands::elf::{DynamicSection, read_number};

/// The directories that are searched after all others. The linker has them built in; distributions differ.
const DEFAULT_DIRECTORIES: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
const LIBRARY_CACHE: &str = "/etc/ld.so.cache";
const CACHE_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// The sizes in bytes of the header and of an entry of the cache: `struct cache_file_new` and `struct file_entry_new`
/// of glibc.
const CACHE_HEADER_SIZE: usize = 48;
const CACHE_ENTRY_SIZE: usize = 24;

/// Returns how many files that do not exist the dynamic linker tries to open when `program` starts. Many such files
/// make the start slow. Counts only files in the directories of `library_path`, which is the value of
/// `LD_LIBRARY_PATH`. A directory that does not exist counts as one file. Returns 0 for a static program, and for a
/// program that can't be read.
pub(super) fn missing_file_opens(program: &Path, library_path: &OsStr) -> usize {
    let Some(first) = DynamicSection::read(program) else { return 0 };
    let Some(linker) = &first.linker else { return 0 };
    let directories = directories(library_path);
    let existing: Vec<&PathBuf> = directories.iter().filter(|directory| directory.is_dir()).collect();
    let cache = parse_library_cache(&fs::read(LIBRARY_CACHE).unwrap_or_default());
    let mut missed = directories.len() - existing.len();
    // The C library needs the linker, which is loaded already.
    let mut searched: BTreeSet<OsString> = linker.file_name().map(OsStr::to_owned).into_iter().collect();
    let mut queue = VecDeque::from([first]);
    while let Some(section) = queue.pop_front() {
        for name in &section.needed {
            if !searched.insert(name.clone()) || name.as_bytes().contains(&b'/') {
                continue;
            }
            let find_in = |list: &[PathBuf]| list.iter().map(|at| at.join(name)).find(|path| path.is_file());
            let found = find_in(&section.search_before).or_else(|| {
                let (passed, found) = first_file(existing.iter().map(|at| at.join(name)));
                missed += passed;
                found
            });
            let found = found
                .or_else(|| find_in(&section.search_after))
                .or_else(|| cache.get(name).cloned())
                .or_else(|| find_in(&DEFAULT_DIRECTORIES.map(PathBuf::from)));
            queue.extend(found.and_then(|path| DynamicSection::read(&path)));
        }
    }
    missed
}

/// Returns the directories in the value of `LD_LIBRARY_PATH`, each once. An empty entry means the working directory.
fn directories(library_path: &OsStr) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for directory in library_path.as_bytes().split(|byte| matches!(byte, b':' | b';')) {
        let directory = if directory.is_empty() { b"." } else { directory };
        let directory = PathBuf::from(OsStr::from_bytes(directory));
        if !directories.contains(&directory) {
            directories.push(directory);
        }
    }
    directories
}

/// Returns the first path in `paths` at which there is a file, `None` if there is none. Also returns the number of
/// paths before it.
fn first_file(paths: impl Iterator<Item = PathBuf>) -> (usize, Option<PathBuf>) {
    let mut missed = 0;
    for path in paths {
        if path.is_file() {
            return (missed, Some(path));
        }
        missed += 1;
    }
    (missed, None)
}

/// Parses the content of `/etc/ld.so.cache`, the cache of the dynamic linker. Returns the path of each library by its
/// file name, such as `libc.so.6`. Empty if the cache has another format.
fn parse_library_cache(bytes: &[u8]) -> BTreeMap<OsString, PathBuf> {
    if !bytes.starts_with(CACHE_MAGIC) {
        return BTreeMap::new();
    }
    let count = read_number(bytes, CACHE_MAGIC.len(), 4).unwrap_or(0);
    let text = |at: Option<usize>| {
        let text = bytes.get(at?..)?.split(|byte| *byte == 0).next()?;
        Some(OsString::from_vec(text.to_vec()))
    };
    let entry = |index: usize| {
        let at = CACHE_HEADER_SIZE + index * CACHE_ENTRY_SIZE;
        let name = text(read_number(bytes, at + 4, 4))?;
        let path = text(read_number(bytes, at + 8, 4))?;
        Some((name, PathBuf::from(path)))
    };
    // The first entry of a name is that of the best processor variant. The map keeps the last entry that it gets.
    (0..count.min(bytes.len() / CACHE_ENTRY_SIZE)).rev().filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let (file, program) = (directory.join(format!("{name}.c")), directory.join(name));
        fs::write(&file, source).unwrap();
        let output = Command::new("cc").arg(&file).arg("-o").arg(&program).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// What the dynamic linker says that it tries in the directories, and does not find.
    fn missed_by_linker(program: &Path, library_path: &str) -> usize {
        let mut command = Command::new(program);
        let output = command.env("LD_LIBRARY_PATH", library_path).env("LD_DEBUG", "libs").output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let tried = text.lines().filter_map(|line| line.split_once("trying file=").map(|(_, path)| path));
        // Not the variants for processors, which are tried once in a directory.
        let is_in = |path: &&str| {
            let parent = Path::new(path).parent().unwrap();
            library_path.split(':').any(|directory| parent == Path::new(directory))
        };
        tried.filter(is_in).filter(|path| !Path::new(path).exists()).count()
    }

    #[test]
    fn each_library_is_missed_in_each_directory_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        for name in ["empty", "libraries", "last"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        // liba needs libb, which no other file names.
        let libraries = dir.path().join("libraries");
        let shared = ["-shared", "-fPIC"];
        compile(&libraries, "libb.so", "int b(void) { return 0; }", &shared);
        let flags = [&shared[..], &["-L", libraries.to_str().unwrap(), "-lb"]].concat();
        compile(&libraries, "liba.so", "int b(void); int a(void) { return b(); }", &flags);
        let (directory, link) =
            (libraries.to_str().unwrap(), format!("-Wl,-rpath-link,{}", libraries.display()));
        let source = "int a(void); int main(void) { return a(); }";
        let program = compile(dir.path(), "program", source, &["-L", directory, "-la", &link]);
        let library_path = [path("empty"), path("gone"), path("libraries"), path("last")].join(":");
        // liba and libb are missed in one directory, libc in three; one directory does not exist.
        assert_eq!(missing_file_opens(&program, library_path.as_ref()), 1 + 1 + 3 + 1);
        assert_eq!(
            missing_file_opens(&program, library_path.as_ref()),
            missed_by_linker(&program, &library_path)
        );
    }

    #[test]
    fn a_library_of_the_programs_own_directory_is_found_there() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        fs::create_dir(&empty).unwrap();
        compile(dir.path(), "libown.so", "int own(void) { return 0; }", &["-shared", "-fPIC"]);
        let directory = dir.path().to_str().unwrap();
        for (name, tag, missed) in
            [("new", "-Wl,--enable-new-dtags", 2), ("old", "-Wl,--disable-new-dtags", 1)]
        {
            let source = "int own(void); int main(void) { return own(); }";
            let flags = ["-L", directory, "-lown", "-Wl,-rpath,$ORIGIN", tag];
            let program = compile(dir.path(), name, source, &flags);
            // DT_RPATH is searched before the variable, DT_RUNPATH after it.
            assert_eq!(missing_file_opens(&program, empty.as_os_str()), missed, "{name}");
            assert_eq!(missed_by_linker(&program, empty.to_str().unwrap()), missed, "{name}");
        }
    }

    #[test]
    fn programs_that_are_not_linked_miss_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let fixed = compile(dir.path(), "fixed", "int main(void) { return 0; }", &["-static"]);
        let text = dir.path().join("text");
        fs::write(&text, "#!/bin/sh\n").unwrap();
        for program in [fixed, text, dir.path().join("missing")] {
            assert_eq!(missing_file_opens(&program, OsStr::new("/tmp:/gone")), 0, "{}", program.display());
        }
    }

    #[test]
    fn a_cache_that_is_cut_off_has_no_more_than_its_entries() {
        let cache = fs::read(LIBRARY_CACHE).unwrap_or_default();
        for length in [0, 20, 30, 48, 60, cache.len() / 2] {
            let _ = parse_library_cache(&cache[..length.min(cache.len())]);
        }
    }
}
