//! Whether a path still names the file that it named before: by the device and inode numbers.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the device and inode numbers of the file at `path`. `None` if there is no file.
pub(crate) fn inode_of(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Returns whether the file at `path` is the open file `file`. False if the file was removed or replaced.
pub(crate) fn is_file_at_path(path: &Path, file: &File) -> bool {
    let open = file.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    open.is_some() && open == inode_of(path)
}
