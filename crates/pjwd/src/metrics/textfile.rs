//! The text file: whole or not there, at every instant.
//!
//! A temporary file beside it is written and then renamed over it, so a reader finds the old text or the new one, also
//! if the daemon dies midway. node_exporter reads `*.prom` only, and so never the temporary one.

use std::ffi::OsString;
use std::fs::{OpenOptions, Permissions, remove_file, rename};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Everybody may read it: node_exporter runs as a user of its own.
const MODE: u32 = 0o644;

/// Puts a text where the file is. Nothing is synced: after a crash of the machine the next daemon writes it anew.
///
/// # Errors
/// If the directory is not there or can't be written to; what was there before is there still.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let beside = beside(path);
    let written = write_beside(&beside, text).and_then(|()| rename(&beside, path));
    if written.is_err() {
        let _ = remove_file(&beside);
    }
    written
}

/// A file of our own making, also in a directory that others may write to: neither a file nor a link that stands there
/// is opened. What a daemon that died left behind is in the way, and goes.
fn write_beside(beside: &Path, text: &str) -> io::Result<()> {
    match remove_file(beside) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(beside)?;
    // Whatever the umask.
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.write_all(text.as_bytes())
}

/// Takes the file away: what nobody renews must not pass for the truth.
///
/// # Errors
/// If it is there and can't be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `pjw.prom.tmp` beside `pjw.prom`.
fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".tmp");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pjw.prom");
        (directory, path)
    }

    fn names(directory: &tempfile::TempDir) -> Vec<String> {
        let entries = fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_file_is_replaced_and_never_written_over() {
        let (directory, path) = place();
        write(&path, "one\n").unwrap();
        let mut reader = fs::File::open(&path).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.mode() & 0o7777, MODE);
        write(&path, "two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        assert_ne!(fs::metadata(&path).unwrap().ino(), first.ino());
        let old = io::read_to_string(&mut reader).unwrap();
        assert_eq!(old, "one\n", "who had opened the old text reads it to its end");
        assert_eq!(names(&directory), ["pjw.prom"], "nothing else is left");
    }

    #[test]
    fn what_a_dead_daemon_left_is_in_nobodys_way() {
        let (directory, path) = place();
        fs::write(directory.path().join("pjw.prom.tmp"), "# HELP pjw_cyc").unwrap();
        write(&path, "whole\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole\n");
        assert_eq!(names(&directory), ["pjw.prom"]);
    }

    #[test]
    fn links_lead_nowhere() {
        let (directory, path) = place();
        let victim = directory.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &path).unwrap();
        symlink(&victim, directory.path().join("pjw.prom.tmp")).unwrap();
        write(&path, "text\n").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn where_it_cannot_be_written_the_old_text_stays() {
        let (directory, path) = place();
        write(&path, "old\n").unwrap();
        // In the way of the temporary file, for root too.
        fs::create_dir(directory.path().join("pjw.prom.tmp")).unwrap();
        write(&path, "new\n").unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old\n");
        let error = write(&directory.path().join("no/pjw.prom"), "x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn removing_it_twice_is_removing_it() {
        let (directory, path) = place();
        write(&path, "x\n").unwrap();
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(names(&directory).is_empty());
    }
}
