//! Taking the socket: one daemon each, whatever a predecessor left behind.
//!
//! A lock beside the socket, held for the daemon's life, decides who may remove a stale socket file: two daemons
//! that start at once can't both. The kernel drops the lock with the process, whatever its end.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use thiserror::Error;

/// Why the socket can't be had.
#[derive(Debug, Error)]
pub enum BindFault {
    /// Another daemon has it.
    #[error("pjwd is running already{}: it holds {path}; stop it, or choose another --socket", holder(.pid), path = path.display())]
    Held {
        /// The socket.
        path: PathBuf,
        /// The other daemon, if it answers.
        pid: Option<i32>,
    },
    /// Something else is there.
    #[error("{path} is {what}, not a socket: remove it, or choose another --socket", path = path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The directory or the socket can't be made.
    #[error("can't {operation} {path}: {why}; choose another --socket, or make its directory writable", path = path.display(), why = source.to_string())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
}

fn holder(pid: &Option<i32>) -> String {
    pid.map(|pid| format!(" as process {pid}")).unwrap_or_default()
}

/// A socket that is ours until we drop it.
#[derive(Debug)]
pub struct OwnedSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
    _lock: Flock<File>,
}

impl OwnedSocket {
    /// A listener for the server.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for OwnedSocket {
    fn drop(&mut self) {
        // Somebody may have put another one there since.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Takes the socket at `path` for everybody to connect to (0666; who may do what is decided by `SO_PEERCRED`),
/// and makes its directory if need be.
///
/// # Errors
/// If another daemon has it, something else is there, or the file system says no.
pub fn bind(path: &Path) -> Result<OwnedSocket, BindFault> {
    let fault = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| BindFault::Io { operation, path, source }
    };
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(fault("make", dir))?;
    }
    match std::fs::symlink_metadata(path).map(|meta| meta.file_type()) {
        Ok(kind) if kind.is_socket() => {}
        Ok(kind) => {
            let what = if kind.is_dir() { "a directory" } else { "a file" };
            return Err(BindFault::NotASocket { path: path.to_owned(), what });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(fault("look at", path)(error)),
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let beside = PathBuf::from(beside);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&beside);
    let file = file.map_err(fault("make", &beside))?;
    let held = || BindFault::Held { path: path.to_owned(), pid: peer(path) };
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| held())?;
    if UnixStream::connect(path).is_ok() {
        // A daemon that was started by other means, without the lock.
        return Err(held());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(fault("remove the stale", path)(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(fault("listen on", path))?;
    std::fs::set_permissions(path, Permissions::from_mode(0o666))
        .map_err(fault("open to everybody", path))?;
    let inode = std::fs::symlink_metadata(path).map_err(fault("look at", path))?.ino();
    Ok(OwnedSocket { listener, path: path.to_owned(), inode, _lock: lock })
}

/// The process that listens there.
fn peer(path: &Path) -> Option<i32> {
    let stream = UnixStream::connect(path).ok()?;
    getsockopt(&stream, PeerCredentials).ok().map(|peer| peer.pid())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &Path) -> String {
        bind(path).unwrap_err().to_string()
    }

    #[test]
    fn a_second_daemon_is_refused_and_told_who_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/below/pjwd.sock");
        let first = bind(&path).unwrap();
        let text = refusal(&path);
        assert!(text.contains(&format!("as process {}", std::process::id())), "{text}");
        drop(first);
        assert!(!path.exists(), "a clean end leaves no socket behind");
        bind(&path).unwrap();
    }

    #[test]
    fn a_stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let _owned = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refusal(dir.path()).contains("is a directory, not a socket"));
        let file = dir.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(refusal(&file).contains("is a file, not a socket"));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_an_error_with_a_remedy() {
        let text = refusal(Path::new("/proc/pjwd/pjwd.sock"));
        assert!(text.contains("can't make /proc/pjwd") && text.contains("--socket"), "{text}");
    }

    #[test]
    fn a_listener_without_our_lock_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let _other = UnixListener::bind(&path).unwrap();
        assert!(refusal(&path).contains("running already"));
    }
}
