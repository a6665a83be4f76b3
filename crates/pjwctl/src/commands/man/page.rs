//! One manual page and the file it is written to.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

/// A manual page in the format roff, with its name and the number of its section.
pub(super) struct Page {
    /// For example `pjwctl-run`.
    pub(super) name: String,
    pub(super) section: u8,
    pub(super) text: String,
}

impl Page {
    /// Returns the path of the file for this page, such as `man1/pjwctl-run.1`. Normally the file is in the directory
    /// `dir`. If `dir` is named `man1` and the page belongs to another section, the file is in a directory such as
    /// `man5` beside `dir`.
    pub(super) fn path(&self, dir: &Path) -> PathBuf {
        let file = format!("{}.{}", self.name, self.section);
        match dir.parent() {
            Some(root) if self.section != 1 && dir.ends_with("man1") => {
                root.join(format!("man{}", self.section)).join(file)
            }
            _ => dir.join(file),
        }
    }

    /// Writes this page to the file [`Page::path`]. `dir` must exist. The directory of another section is created.
    pub(super) fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let path = self.path(dir);
        let made = match path.parent() {
            Some(other) if other != dir && dir.is_dir() => std::fs::create_dir_all(other),
            _ => Ok(()),
        };
        made.and_then(|()| std::fs::write(&path, &self.text)).map_err(|error| {
            anyhow!("can't write {}: {error}; check that the directory exists", path.display())
        })
    }
}
