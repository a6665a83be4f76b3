//! Reads files of the kernel: those of `/proc`, and short ones such as `pids.max` of a cgroup. A short file is read by
//! one read(2).

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The size of the buffer for the text of a short file, in bytes.
const SHORT_BYTES: usize = 128;

/// The first size of the buffer for the text of a file of `/proc`, in bytes. With a smaller buffer, the text would take
/// more calls of read(2).
const USUAL_BYTES: usize = 16 << 10;

/// Returns the number in a short file of the kernel. `None` if the file has another content, such as `max`, or can't be
/// read.
pub(crate) fn number_in(file: &Path) -> Option<u64> {
    short_text_of(file)?.trim().parse().ok()
}

/// Returns the text of a file with at most 128 bytes, or the first 128 bytes of a longer file. `None` if the file can't
/// be read.
pub(crate) fn short_text_of(file: &Path) -> Option<String> {
    let mut bytes = [0; SHORT_BYTES];
    let count = File::open(file).ok()?.read(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(bytes.get(..count)?).into_owned())
}

/// Returns the text of a file of `/proc`. Some of these files can contain names that are not valid UTF-8.
pub(crate) fn read_text(path: &Path) -> Option<String> {
    let mut text = Vec::with_capacity(USUAL_BYTES);
    File::open(path).ok()?.read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}
