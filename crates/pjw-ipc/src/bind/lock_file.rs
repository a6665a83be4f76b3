//! The lock file beside the socket.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use super::error::{BindError, io_error};
use super::listener::{Listening, in_use_error, inode_of, probe_listener};

/// Returns whether `lock`, the opened lock file of the socket at `path`, is still at its path.
pub(super) fn is_lock_in_place(path: &Path, lock: &File) -> bool {
    let lock_inode = lock.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    lock_inode.is_some() && lock_inode == inode_of(&lock_path(path))
}

/// The path of the lock file beside the socket at `path`.
fn lock_path(path: &Path) -> PathBuf {
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    PathBuf::from(lock_path)
}

/// Returns the error for the lock file at `lock_path`, which is of another kind than a regular file.
fn not_a_file_error(lock_path: &Path, kind: FileType) -> BindError {
    let what = if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else {
        "a socket or a device"
    };
    BindError::LockNotAFile { path: lock_path.to_owned(), what }
}

/// Locks the lock file of the socket at `path`, so that only one daemon uses the socket. The lock file is
/// `PATH.lock`. Makes this file if it is missing.
///
/// # Errors
/// If another process holds the lock. The error has the pid of the process that listens at `path`, if this pid is
/// known. If the lock file can't be used, for example because it is not a regular file.
pub(super) fn lock_socket(path: &Path) -> Result<Flock<File>, BindError> {
    let lock_path = lock_path(path);
    let mut options = OpenOptions::new();
    // Through a symbolic link the lock file would be created at the target of the link. Opening a pipe without a reader
    // must not block the start.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags.bits());
    let kind_at_path = || std::fs::symlink_metadata(&lock_path).ok().map(|meta| meta.file_type());
    let file = options.open(&lock_path).map_err(|why| match probe_listener(path) {
        // The daemon of another user has a lock file that this user cannot open.
        Listening::Process(pid) if why.kind() == io::ErrorKind::PermissionDenied => in_use_error(path, pid),
        _ => match kind_at_path().filter(|kind| !kind.is_file()) {
            Some(kind) => not_a_file_error(&lock_path, kind),
            None => io_error("make", &lock_path)(why),
        },
    })?;
    let kind = file.metadata().map_err(io_error("lock", &lock_path))?.file_type();
    if !kind.is_file() {
        return Err(not_a_file_error(&lock_path, kind));
    }
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => in_use_error(path, probe_listener(path).pid()),
        errno => io_error("lock", &lock_path)(errno.into()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::bind::bind;

    fn refusal(path: &Path) -> String {
        bind(path).unwrap_err().to_string()
    }

    #[test]
    fn a_pipe_in_place_of_the_lock_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let lock = dir.path().join("pjwd.sock.lock");
        nix::unistd::mkfifo(&lock, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let why = "it is a pipe, not a regular file: remove it, or choose another --socket";
        assert!(refusal(&path).ends_with(why), "{}", refusal(&path));
        let _reader = File::options().read(true).write(true).open(&lock).unwrap();
        assert!(refusal(&path).ends_with(why), "a pipe with a reader");
    }

    #[test]
    fn the_error_for_a_lock_file_that_is_not_a_regular_file_says_to_remove_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, lock) = (dir.path().join("pjwd.sock"), dir.path().join("pjwd.sock.lock"));
        let assert_refused = |what: &str| {
            let why = format!("can't lock {}: it is {what}, not a regular file: remove it", lock.display());
            assert!(refusal(&path).starts_with(&why), "{}", refusal(&path));
            assert!(!path.exists());
        };
        std::fs::create_dir(&lock).unwrap();
        assert_refused("a directory");
        std::fs::remove_dir(&lock).unwrap();
        std::os::unix::fs::symlink(dir.path().join("target"), &lock).unwrap();
        assert_refused("a symbolic link");
        std::fs::remove_file(&lock).unwrap();
        let _socket = UnixListener::bind(&lock).unwrap();
        assert_refused("a socket or a device");
    }
}
