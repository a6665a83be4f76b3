//! Writing a file completely or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::anyhow;

/// Replaces the content of the file at `path` with `content`. A program that reads the file at the same time gets
/// either the whole old content or the whole new content. If `path` is a pipe or a device, `content` is written into
/// this pipe or device directly.
///
/// # Errors
/// If the file cannot be written. No temporary file remains then.
pub fn write_atomically(path: &Path, content: &str) -> anyhow::Result<()> {
    // A symbolic link stays a link: its target is replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let written = match fs::metadata(&target) {
        Ok(metadata) if !metadata.is_file() => write_directly(&target, content),
        _ => replace_file(&target, content),
    };
    written.map_err(|error| {
        anyhow!("can't write {}: {error}; name a file in a directory that you may write to", path.display())
    })
}

fn write_directly(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Writes `text` to a temporary file beside `path`, and renames this file to `path` after its data are on the disk.
/// After an error, removes the temporary file.
fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let draft = draft_path(path)?;
    let mut file = OpenOptions::new().write(true).create_new(true).open(&draft)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let replaced = written.and_then(|()| fs::rename(&draft, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&draft);
    }
    replaced
}

fn draft_path(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let mut draft = std::ffi::OsString::from(".");
    draft.push(name);
    draft.push(format!(".{}", std::process::id()));
    Ok(path.with_file_name(draft))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_a_link_still_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("a.svg"), dir.path().join("link.svg"));
        write_atomically(&file, "old and longer").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_atomically(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left behind");
    }

    #[test]
    fn a_pipe_is_not_replaced_by_a_file() {
        write_atomically(Path::new("/dev/null"), "text").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn the_error_for_a_file_that_cannot_be_written_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join("missing/a.svg"), PathBuf::from("")] {
            let error = write_atomically(&path, "text").unwrap_err().to_string();
            assert!(error.contains(&format!("can't write {}: ", path.display())), "{error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
