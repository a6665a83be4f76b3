//! The directory of the lock file, and the remedies in the errors about this directory and the lock file.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;

use crate::host::directories;

/// Creates the directory `dir` of the lock file for the user `uid`. The error is the reason and the remedy. Other users
/// can create directories below /tmp too, and no option moves the lock to another place.
pub(super) fn make_lock_directory(dir: &Path, uid: u32) -> Result<(), (String, &'static str)> {
    let Err(error) = directories::make_default_directory(dir, uid) else { return Ok(()) };
    let shown = dir.display();
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return Err((format!("can't make {shown}: {error}"), remedy_of(error)));
    }
    Err(match std::fs::symlink_metadata(dir) {
        Ok(meta) if meta.uid() != uid => (
            format!("{shown} belongs to user {}, not to user {uid}", meta.uid()),
            "have it removed by this user or by an administrator",
        ),
        Ok(meta) if !meta.is_dir() => (format!("{shown} is not a directory"), "remove it"),
        _ => (error.to_string(), "no option moves the lock"),
    })
}

/// What the user can do about an error of a file operation on the lock file or its directory.
pub(super) fn remedy_of(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOSPC | Errno::EDQUOT) => "free space there",
        Some(Errno::EMFILE | Errno::ENFILE) => {
            "raise the limit of open files (ulimit -n, or LimitNOFILE= of its unit)"
        }
        Some(Errno::EACCES | Errno::EPERM | Errno::EROFS) => "make its directory writable",
        Some(Errno::EISDIR) | None => "remove it",
        Some(_) => "check its directory",
    }
}
