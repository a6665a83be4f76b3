//! Binding the daemon's socket. At most one daemon holds a socket, also after a predecessor was killed.
//!
//! A lock file beside the socket decides which daemon may remove a stale socket file. Two daemons that start at the
//! same time cannot both have the lock. The kernel releases the lock when the process ends.

mod error;
mod listener;
mod lock_file;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::fcntl::Flock;

use self::error::io_error;
use self::listener::{Listening, in_use_error, inode_of, probe_listener};
use self::lock_file::{is_lock_in_place, lock_socket};
use crate::dial::length_if_too_long;
use crate::socket_access::SocketAccess;

pub use self::error::BindError;

/// The Unix socket on which pjwd listens, with its socket file and a lock file. The lock file prevents another daemon
/// from listening at the same path. When the value is dropped, the socket file is removed and the lock is released.
#[derive(Debug)]
pub struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// The users who may connect.
    access: SocketAccess,
    /// The device and inode of the socket file.
    inode: (u64, u64),
    lock: Flock<File>,
}

impl BoundSocket {
    /// Returns the path of the socket file on which pjwd listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the socket file and the lock file still exist and are the files that this value created. The
    /// result is false if another program removed or replaced one of the files. Without the socket file, new clients
    /// can't connect. Without the lock file, a second daemon can start. The caller should then call
    /// [`BoundSocket::rebind_if_removed`], which creates the missing or replaced files again.
    #[must_use]
    pub fn are_files_in_place(&self) -> bool {
        inode_of(&self.path) == Some(self.inode) && is_lock_in_place(&self.path, &self.lock)
    }

    /// Repairs the files of the socket. If another program removed or replaced the lock file, creates the lock file
    /// again. If another program removed or replaced the socket file, listens on a new socket at the same path.
    /// Client connections that the server has already accepted stay open.
    ///
    /// Returns a duplicate of the listening socket's file descriptor, for the server. The duplicate refers to the new
    /// socket if the socket file was missing or replaced, and to the old socket otherwise.
    ///
    /// # Errors
    /// The errors of [`bind`]. Also if the process has no free file descriptor.
    pub fn rebind_if_removed(&mut self) -> Result<UnixListener, BindError> {
        prepare_socket_path(&self.path)?;
        if !is_lock_in_place(&self.path, &self.lock) {
            self.lock = lock_socket(&self.path)?;
        }
        if inode_of(&self.path) != Some(self.inode) {
            (self.listener, self.inode) = listen_at(&self.path, self.access)?;
        }
        self.dup_listener().map_err(io_error("listen on", &self.path))
    }

    /// Returns a duplicate of the listening socket's file descriptor, for the server. Dropping the duplicate
    /// does not remove the socket file.
    ///
    /// # Errors
    /// If the process has no free file descriptor.
    pub fn dup_listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // Another process may have put another socket at this path in the meantime.
        if inode_of(&self.path) == Some(self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates the Unix socket at `path` on which pjwd listens for its clients. Creates missing directories in `path`.
/// Replaces the socket file of a daemon that no longer runs. Every user can connect (mode 0666), because the server
/// checks the permissions for each call.
///
/// # Errors
/// If `path` is too long for a Unix socket, if another daemon listens on the socket or holds its lock, if `path`
/// exists and is not a socket, or if a file operation fails.
pub fn bind(path: &Path) -> Result<BoundSocket, BindError> {
    bind_with_access(path, SocketAccess::EVERY_USER)
}

/// Creates a Unix socket as [`bind`] does, but with the mode, the owner and the group in `access` for the socket file.
/// Each socket file that [`BoundSocket::rebind_if_removed`] creates later has the same mode, owner and group.
///
/// # Errors
/// The errors of [`bind`]. Also if this process has no permission to set the owner or the group.
pub fn bind_with_access(path: &Path, access: SocketAccess) -> Result<BoundSocket, BindError> {
    if let Some(length) = length_if_too_long(path) {
        return Err(BindError::PathTooLong { path: path.to_owned(), length });
    }
    prepare_socket_path(path)?;
    let lock = lock_socket(path)?;
    let (listener, inode) = listen_at(path, access)?;
    Ok(BoundSocket { listener, path: path.to_owned(), access, inode, lock })
}

/// Returns whether a process listens on the Unix socket at `path`. The function tries to connect. Only the errors
/// `ECONNREFUSED` and `ENOENT` prove that no process listens. So the result is also true if the listening process
/// accepts no further connections at the moment, or if the calling process has no permission to connect.
#[must_use]
pub fn is_listening(path: &Path) -> bool {
    matches!(probe_listener(path), Listening::Process(_))
}

/// Makes the directory of the socket at `path` if it is missing. Fails if something other than a socket is at `path`.
fn prepare_socket_path(path: &Path) -> Result<(), BindError> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(io_error("make", dir))?;
    }
    match std::fs::symlink_metadata(path).map(|meta| meta.file_type()) {
        Ok(kind) if kind.is_socket() => {}
        Ok(kind) => {
            let what = if kind.is_dir() { "a directory" } else { "a file" };
            return Err(BindError::NotASocket { path: path.to_owned(), what });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error("look at", path)(error)),
    }
    Ok(())
}

/// Listens on a new socket at `path` with the permissions `access`. Replaces a socket file at which no process listens,
/// and fails if a process listens there. Returns the listener, and the device and inode of the new file.
fn listen_at(path: &Path, access: SocketAccess) -> Result<(UnixListener, (u64, u64)), BindError> {
    if let Listening::Process(pid) = probe_listener(path) {
        // A process listens here that does not have the lock.
        return Err(in_use_error(path, pid));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(io_error("remove the stale", path)(error));
        }
        _ => {}
    }
    let listener = access.listen_at(path).map_err(io_error("listen on", path))?;
    let meta = std::fs::symlink_metadata(path).map_err(io_error("look at", path))?;
    Ok((listener, (meta.dev(), meta.ino())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use nix::errno::Errno;
    use nix::sys::socket::{Backlog, listen};

    use super::*;
    use crate::dial::{MAX_SOCKET_PATH_BYTES, dial, listener_pid};
    use crate::tests::close;

    fn refusal(path: &Path) -> String {
        bind(path).unwrap_err().to_string()
    }

    #[test]
    fn a_second_daemon_is_refused_with_the_pid_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/below/pjwd.sock");
        let first = bind(&path).unwrap();
        let text = refusal(&path);
        assert!(text.contains(&format!("as process {}", std::process::id())), "{text}");
        drop(first);
        assert!(!path.exists(), "a clean end removes the socket");
        bind(&path).unwrap();
    }

    #[test]
    fn a_removed_socket_is_made_again_and_a_second_daemon_is_still_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/pjwd.sock");
        let mut owned = bind(&path).unwrap();
        let connected = dial(&path, Duration::ZERO).unwrap();
        let removals: [fn(&Path) -> io::Result<()>; 2] =
            [|path| std::fs::remove_file(path), |path| std::fs::remove_dir_all(path.parent().unwrap())];
        for remove in removals {
            remove(&path).unwrap();
            assert!(!owned.are_files_in_place());
            owned.rebind_if_removed().unwrap();
            assert!(owned.are_files_in_place());
            assert_eq!(
                dial(&path, Duration::ZERO).map(|client| listener_pid(&client)),
                Ok(Some(std::process::id().cast_signed()))
            );
            assert!(refusal(&path).contains("running already"));
        }
        drop(connected);
    }

    #[test]
    fn a_file_in_place_of_a_removed_socket_is_kept_and_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let mut owned = bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        let fault = owned.rebind_if_removed().unwrap_err().to_string();
        assert!(fault.contains("is a file, not a socket"), "{fault}");
        drop(owned);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        close(UnixListener::bind(&path).unwrap(), &path);
        assert!(path.exists());
        let _owned = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
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
    fn the_error_for_a_path_that_is_too_long_has_the_limit_and_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let longest = dir.path().join("x".repeat(MAX_SOCKET_PATH_BYTES - dir.path().as_os_str().len() - 1));
        assert_eq!(longest.as_os_str().len(), MAX_SOCKET_PATH_BYTES);
        bind(&longest).unwrap();
        let below = dir.path().join("made-for-nothing");
        for (path, length) in [(longest.with_extension("y"), 109), (below.join("é".repeat(2000)), 0)] {
            let text = refusal(&path);
            let name = dir.path().to_str().unwrap();
            assert!(
                text.contains(name) && text.contains("at most 107") && text.contains("--socket"),
                "{text}"
            );
            assert!(length == 0 || text.contains(&format!("is {length} bytes long")), "{text}");
            assert!(text.len() < 500, "{} bytes", text.len());
        }
        assert!(!below.exists(), "nothing is created for an impossible path");
    }

    const SYSTEMD: &str = "PJW_TEST_SERVICE_MANAGER_LISTENS_AT";

    /// Not a test: the next test runs this function as the service manager. Without the variable the function returns
    /// at once.
    #[test]
    fn service_manager_with_a_socket_unit() {
        let Some(path) = std::env::var_os(SYSTEMD) else { return };
        let _listener = UnixListener::bind(path).unwrap();
        println!("\nlistening");
        io::stdin().read_line(&mut String::new()).unwrap();
    }

    #[test]
    fn a_service_manager_that_holds_the_socket_is_not_reported_as_pjwd() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let dir = tempfile::tempdir().unwrap();
        let (path, systemd) = (dir.path().join("pjwd.sock"), dir.path().join("systemd"));
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &systemd).unwrap();
        let mut manager = Command::new(&systemd)
            .args(["--exact", "bind::tests::service_manager_with_a_socket_unit", "--nocapture"])
            .env(SYSTEMD, &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(manager.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "listening"));
        let text = refusal(&path);
        assert!(text.contains("systemd holds") && text.contains("systemctl stop pjwd.socket"), "{text}");
        assert!(!text.contains("process"), "{text}");
        drop(manager.stdin.take());
        lines.for_each(drop);
        manager.wait().unwrap();
    }

    #[test]
    fn a_listener_without_our_lock_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let _other = UnixListener::bind(&path).unwrap();
        assert!(refusal(&path).contains("running already"));
    }

    #[test]
    fn a_daemon_that_hangs_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let hanging = UnixListener::bind(&path).unwrap();
        listen(&hanging, Backlog::new(0).unwrap()).unwrap();
        let _first_in_its_queue = dial(&path, Duration::ZERO).unwrap();
        assert_eq!(dial(&path, Duration::ZERO).unwrap_err(), Errno::EAGAIN, "the queue is full");
        assert!(refusal(&path).contains("pjwd is running already: it holds"));
    }

    #[test]
    fn a_link_in_the_place_of_the_lock_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, elsewhere) = (dir.path().join("pjwd.sock"), dir.path().join("elsewhere"));
        std::os::unix::fs::symlink(&elsewhere, dir.path().join("pjwd.sock.lock")).unwrap();
        assert!(refusal(&path).contains("it is a symbolic link"), "{}", refusal(&path));
        assert!(!elsewhere.exists());
    }

    #[test]
    fn a_socket_that_another_process_bound_in_the_meantime_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let owned = bind(&path).unwrap();
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(owned);
        assert!(path.exists());
    }
}
