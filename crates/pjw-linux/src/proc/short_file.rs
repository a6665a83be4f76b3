//! Reads files of `/proc` and of cgroups whose text is usually short, with few system calls.

use std::fs::File;
use std::path::Path;

use nix::errno::Errno;
use rustix::io::{read, retry_on_intr};

use crate::sys::errno::{from_io, from_rustix};

/// The size of the buffer for one read(2), in bytes.
const READ_BYTES: usize = 4096;
/// The number of bytes that tells whether one read(2) has returned a whole file. If a read with a buffer of
/// [`READ_BYTES`] returns fewer bytes, and whole lines, it has reached the end of the file:
///
/// - Of a list, such as `cgroup.procs`, the kernel returns as many lines as fit into a page (`seq_read_iter`,
///   fs/seq_file.c, Linux 6.18). A line of a list is much shorter than half a page.
/// - The text of every other file is one entry, which the kernel returns as a whole.
const WHOLE_BYTES: usize = READ_BYTES / 2;

/// Reads the file at `path`, of `/proc` or of a cgroup, to its end. For a short text, calls read(2) only once. This
/// saves a second read(2), which would return 0, and the calls that ask for the length of the file.
///
/// # Errors
/// The error of open(2) or read(2).
pub(crate) fn read_short_file(path: &Path) -> Result<Vec<u8>, Errno> {
    let file = File::open(path).map_err(from_io)?;
    let (mut buffer, mut text) = ([0u8; READ_BYTES], Vec::new());
    loop {
        let length = retry_on_intr(|| read(&file, &mut buffer[..])).map_err(from_rustix)?;
        text.extend_from_slice(&buffer[..length]);
        if length == 0 || (length < WHOLE_BYTES && text.ends_with(b"\n")) {
            return Ok(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_read_to_its_end_whatever_its_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cgroup.procs");
        for lines in [0, 1, 255, 256, 257, 511, 512, 513, 5000] {
            let text = "1234567\n".repeat(lines);
            for text in [text.as_str(), text.trim_end()] {
                fs::write(&path, text).unwrap();
                assert_eq!(read_short_file(&path), Ok(text.as_bytes().to_vec()), "{lines} lines");
            }
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(read_short_file(&path), Err(Errno::ENOENT));
        assert_eq!(read_short_file(dir.path()), Err(Errno::EISDIR));
    }

    #[test]
    fn files_of_proc_are_read_to_their_end() {
        // The list of ciphers is usually longer than a page, and the kernel returns it page by page.
        for path in ["/proc/self/cgroup", "/proc/crypto", "/proc/version"].map(Path::new) {
            let Ok(text) = fs::read(path) else { continue };
            assert_eq!(read_short_file(path), Ok(text), "{}", path.display());
        }
    }
}
