//! Why pjwd can't listen on its socket.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::dial::{MAX_SOCKET_PATH_BYTES, truncate_path};

/// The reason why pjwd can't listen on its Unix socket: the error of [`bind`](super::bind). The error message says
/// what the user can do.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another process already listens on the socket, or holds the lock file of the socket.
    #[error("pjwd is running already{}: it holds {path}; stop it, or choose another --socket", as_process(.pid), path = path.display())]
    InUse {
        /// The path of the socket on which the daemon was to listen.
        path: PathBuf,
        /// The pid of the other process. `None` if the process accepts no connection, so that its pid is
        /// unknown.
        pid: Option<i32>,
    },
    /// systemd listens on the socket and starts pjwd at the first connection (socket activation).
    #[error("systemd holds {path} for pjwd, and starts pjwd at the first connection: stop both with systemctl stop pjwd.socket pjwd.service, or choose another --socket", path = path.display())]
    HeldBySystemd {
        /// The path of the socket on which the daemon was to listen.
        path: PathBuf,
    },
    /// The path of the socket is longer than the kernel allows for a Unix socket (unix(7)).
    #[error("{}: this path is {length} bytes long and the path of a socket has at most {max}: choose a shorter one with --socket", truncate_path(.path), max = MAX_SOCKET_PATH_BYTES)]
    PathTooLong {
        /// The path of the socket on which the daemon was to listen.
        path: PathBuf,
        /// The length of the path in bytes.
        length: usize,
    },
    /// The path of the socket exists, and the file is not a socket.
    #[error("{path} is {what}, not a socket: remove it, or choose another --socket", path = path.display())]
    NotASocket {
        /// The path of the socket on which the daemon was to listen.
        path: PathBuf,
        /// The kind of the existing file, as part of a sentence: `a directory` or `a file`.
        what: &'static str,
    },
    /// The lock file of the socket exists, and is not a regular file.
    #[error("can't lock {path}: it is {what}, not a regular file: remove it, or choose another --socket", path = path.display())]
    LockNotAFile {
        /// The path of the lock file.
        path: PathBuf,
        /// The kind of the existing file, as part of a sentence, such as `a symbolic link`.
        what: &'static str,
    },
    /// A file operation failed that is needed to create the socket, its directory or its lock file.
    #[error("can't {operation} {path}: {why}; choose another --socket, or make its directory writable", path = path.display())]
    Io {
        /// The operation that failed, as part of a sentence, such as `make`.
        operation: &'static str,
        /// The path of the file on which the operation failed.
        path: PathBuf,
        /// The error of the system call. This field is not the `source` of the error, because the message of
        /// this variant already contains its text.
        why: io::Error,
    },
}

fn as_process(pid: &Option<i32>) -> String {
    pid.map(|pid| format!(" as process {pid}")).unwrap_or_default()
}

/// Returns a function that makes the error for a failed `operation` on the file at `path`.
pub(super) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BindError {
    let path = path.to_owned();
    move |why| BindError::Io { operation, path, why }
}
