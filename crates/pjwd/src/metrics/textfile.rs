//! The metrics text file, replaced atomically.
//!
//! A temporary file is written and then renamed over the target. A reader finds the old text or the new one, even if
//! the daemon dies in between. node_exporter reads only `*.prom`, so never the temporary file.

use std::ffi::OsString;
use std::fs::{Permissions, remove_file, rename};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::host::directories::recreate_file;

/// Readable by all users: node_exporter runs as a user of its own.
const MODE: u32 = 0o644;

/// Replaces the metrics file at `path` atomically by a file with the content `text`. The file is not synced to disk,
/// so a crash of the machine can damage the file. Such damage is harmless, because the daemon writes a new file after
/// the next boot.
///
/// # Errors
/// If a temporary file can't be written in the same directory, or can't be renamed to `path`. The old file then
/// stays.
pub fn write_metrics_file(path: &Path, text: &str) -> io::Result<()> {
    let temporary_path = temporary_path(path);
    let written = write_temporary(&temporary_path, text).and_then(|()| rename(&temporary_path, path));
    if written.is_err() {
        let _ = remove_file(&temporary_path);
    }
    written
}

/// Creates the temporary file. The directory may be writable by others, so an existing file or link is removed, never
/// opened.
fn write_temporary(temporary_path: &Path, text: &str) -> io::Result<()> {
    let mut file = recreate_file(temporary_path)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.write_all(text.as_bytes())
}

/// `pjw.prom.tmp` for `pjw.prom`.
fn temporary_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".tmp");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::host::directories::remove_file_if_exists;

    fn metrics_path() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pjw.prom");
        (directory, path)
    }

    fn names(directory: &tempfile::TempDir) -> Vec<String> {
        let entries = fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_file_is_replaced_atomically() {
        let (directory, path) = metrics_path();
        write_metrics_file(&path, "one\n").unwrap();
        let mut reader = fs::File::open(&path).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.mode() & 0o7777, MODE);
        write_metrics_file(&path, "two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        assert_ne!(fs::metadata(&path).unwrap().ino(), first.ino());
        let old = io::read_to_string(&mut reader).unwrap();
        assert_eq!(old, "one\n", "who had opened the old text reads it to its end");
        assert_eq!(names(&directory), ["pjw.prom"], "nothing else is left");
    }

    #[test]
    fn a_leftover_temporary_file_is_replaced() {
        let (directory, path) = metrics_path();
        fs::write(directory.path().join("pjw.prom.tmp"), "# HELP pjw_cyc").unwrap();
        write_metrics_file(&path, "whole\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole\n");
        assert_eq!(names(&directory), ["pjw.prom"]);
    }

    #[test]
    fn links_are_not_followed() {
        let (directory, path) = metrics_path();
        let victim = directory.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &path).unwrap();
        symlink(&victim, directory.path().join("pjw.prom.tmp")).unwrap();
        write_metrics_file(&path, "text\n").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn a_failed_write_keeps_the_old_file() {
        let (directory, path) = metrics_path();
        write_metrics_file(&path, "old\n").unwrap();
        // The directory blocks the temporary file, for root too.
        fs::create_dir(directory.path().join("pjw.prom.tmp")).unwrap();
        write_metrics_file(&path, "new\n").unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old\n");
        let error = write_metrics_file(&directory.path().join("no/pjw.prom"), "x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn removing_a_missing_file_is_no_error() {
        let (directory, path) = metrics_path();
        write_metrics_file(&path, "x\n").unwrap();
        remove_file_if_exists(&path).unwrap();
        remove_file_if_exists(&path).unwrap();
        assert!(names(&directory).is_empty());
    }
}
