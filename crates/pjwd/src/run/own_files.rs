//! Keeps the files of the daemon in place. A program that cleans up old files, or a person, may remove the lock file,
//! the socket or the state directory while the daemon runs. Then a second daemon could start, clients would find no
//! daemon, or the records for an undo would be written into a file without a name.
//!
//! The directories are watched by inotify(7), so nothing is done while nothing happens. A directory can also vanish
//! with a directory above it, which inotify does not report: so the files are checked now and then too.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use pjw_core::plan::Warning;
use pjw_ipc::bind::{BindError, BoundSocket, bind_with_access, is_listening};
use pjw_ipc::socket_access::SocketAccess;
use pjw_linux::systemd::activation::{SocketManager, metadata_of_socket_file};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::control::inbox::{EventLoopMessage, MessageSender, WarningOrigin};
use crate::host::inode::inode_of;
use crate::store::{journal, lock::DaemonLock};

/// The time between two checks without an event.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The time from a removal to the check. A program that removes a directory removes the files in it first.
const SETTLE_TIME: Duration = Duration::from_millis(20);
/// The command after which systemd has a new socket. systemd restarts no socket unit while its service is active.
const RENEW_SOCKET_OF_SYSTEMD: &str =
    "systemctl stop pjwd.service pjwd.socket && systemctl start pjwd.service";
/// The warning after a stop of the socket unit alone.
const UNIT_STOPPED: &str =
    "the socket unit was stopped, so pjwd does not make its socket again: no client can connect";

/// The socket file of the daemon's control socket: the file at the path to which clients connect. The variant says who
/// created the socket: the daemon, or the service manager (systemd socket activation).
#[derive(Debug)]
pub enum SocketFile {
    /// The daemon created the socket, and can create it again.
    CreatedByDaemon(BoundSocket),
    /// The service manager created the socket and passed it to the daemon.
    Passed(PassedSocketFile),
    /// Another program removed the socket that the service manager had passed, and the daemon created a new socket at
    /// the same path. The service manager does not know the new socket. The second value is the service manager, which
    /// shows whether the old socket is still open. It is `None` if this can't be known.
    Replaced(BoundSocket, Option<SocketManager>),
}

impl SocketFile {
    /// Returns the path of the socket file. `None` if the socket has no file.
    fn path(&self) -> Option<&Path> {
        match self {
            Self::CreatedByDaemon(socket) | Self::Replaced(socket, _) => Some(socket.path()),
            Self::Passed(socket) => socket.path.as_deref(),
        }
    }

    /// Whether clients can't connect at the path of the socket any more, or the lock beside the socket was removed.
    fn is_removed(&self) -> bool {
        match self {
            Self::CreatedByDaemon(socket) | Self::Replaced(socket, _) => !socket.are_files_in_place(),
            Self::Passed(socket) => socket.path_if_removed().is_some(),
        }
    }

    /// Whether the socket unit was stopped. The service manager then closes the socket. After that, it removes the
    /// socket file if the unit says `RemoveOnStop=yes`. If another program removed the socket file, the service manager
    /// still has the socket open.
    fn is_unit_stopped(&self) -> bool {
        let manager = match self {
            Self::CreatedByDaemon(_) => None,
            Self::Passed(socket) => socket.manager.as_ref(),
            Self::Replaced(_, manager) => manager.as_ref(),
        };
        manager.is_some_and(SocketManager::has_closed_socket)
    }
}

/// The socket file of a listening Unix socket: the file at the path to which clients connect. The service manager
/// created the socket, and passed its descriptor to the daemon.
#[derive(Debug)]
pub struct PassedSocketFile {
    /// The path of the socket file. `None` if the socket has no file.
    path: Option<PathBuf>,
    /// The device and inode of the socket file. `None` if clients can't connect at `path`.
    inode: Option<(u64, u64)>,
    /// The users who may connect, as the socket unit says (`SocketMode=`, `SocketUser=`, `SocketGroup=`).
    access: SocketAccess,
    /// The service manager. `None` if it is unknown whether the service manager has the socket open.
    manager: Option<SocketManager>,
}

impl PassedSocketFile {
    /// Makes the record of the socket file of `listener`, a socket that the service manager created and passed to the
    /// daemon. `path` is the path of the socket file, or `None` if the socket has no file. Reads which users may
    /// connect to the socket. Also reads which file is at `path`, so that the daemon can notice later that the socket
    /// file was removed or replaced.
    #[must_use]
    pub fn new(path: Option<PathBuf>, listener: &UnixListener) -> Self {
        // A killed daemon leaves the socket file of the socket by which it replaced this one: then no process listens
        // there.
        let inode = path.as_deref().filter(|path| is_listening(path)).and_then(inode_of);
        let file_at_path = || {
            let file = std::fs::symlink_metadata(path.as_deref()?).ok()?;
            file.file_type().is_socket().then_some(file)
        };
        let file = metadata_of_socket_file(listener).or_else(file_at_path);
        // If the file is gone and can't be read, no other user gets a permission that the socket unit may not give.
        let access = file.map_or(SocketAccess::OWN_USER, |file| SocketAccess::of_file(&file));
        let manager = SocketManager::new(parent_id(), listener);
        Self { path, inode, access, manager }
    }

    /// Returns the path of the socket file if clients can't connect there any more. Otherwise returns `None`.
    fn path_if_removed(&self) -> Option<&Path> {
        let path = self.path.as_deref()?;
        (self.inode.is_none() || inode_of(path) != self.inode).then_some(path)
    }
}

/// The files that a running daemon watches, because other programs can remove them: the lock file, the control
/// socket, and the files in the state directory.
#[derive(Debug)]
pub struct WatchedFiles {
    /// The lock against a second daemon of the same user. `None` if the daemon was started with `--beside`, without a
    /// lock.
    lock: Option<DaemonLock>,
    socket: SocketFile,
    /// Whether pjwd does not make the socket again, because the socket unit was stopped. The log says so once.
    is_unit_stopped: bool,
    state_dir: PathBuf,
}

impl WatchedFiles {
    /// Makes the list of the files that this daemon watches.
    ///
    /// - `lock` prevents a second daemon of the same user. `None` if the daemon was started with `--beside`, as a
    ///   second daemon: it takes no lock.
    /// - `socket` is the control socket.
    /// - `state_dir` is the path of the state directory.
    #[must_use]
    pub fn new(lock: Option<DaemonLock>, socket: SocketFile, state_dir: PathBuf) -> Self {
        Self { lock, socket, is_unit_stopped: false, state_dir }
    }

    /// Watches the files of the daemon until the value in `stop` becomes true. If one of the files is removed, this
    /// function recreates the file, or asks the event loop to recreate it:
    ///
    /// - The lock file and the socket: this function recreates them, and sends each new socket to `listeners`. If
    ///   this fails, this function sends a warning ([`EventLoopMessage::Warnings`]) to the event loop through `outbox`.
    /// - A socket that systemd created (socket activation): this function recreates it too. The users who could connect
    ///   to the old socket can also connect to the new one. A warning says that systemd does not know the new socket.
    ///   If the socket unit was stopped, the socket is not recreated.
    /// - The journal (the files with the records of pjwd's changes): the event loop recreates its files. After any of
    ///   the watched files was removed, this function sends [`EventLoopMessage::CheckJournal`] to the event loop
    ///   through `outbox`.
    ///
    /// After `stop` becomes true, records in the lock file and in the state directory that the daemon is stopping.
    /// Returns `self`, from which the caller gets the lock ([`WatchedFiles::into_lock`]). Must run inside a tokio
    /// runtime.
    pub async fn restore_removed_files(
        mut self,
        listeners: mpsc::UnboundedSender<UnixListener>,
        outbox: MessageSender,
        mut stop: watch::Receiver<bool>,
    ) -> Self {
        let mut reported = Vec::new();
        loop {
            // The watch comes first: a file that is removed after its check is reported.
            let watch = DirectoryWatch::new(&self.paths());
            let warnings = self.check_files(&listeners);
            if warnings != reported {
                reported.clone_from(&warnings);
                let _ =
                    outbox.send(EventLoopMessage::Warnings { origin: WarningOrigin::DaemonFiles, warnings });
            }
            let removal = spawn_blocking(move || watch.wait_for_removal(CHECK_INTERVAL));
            let is_removed = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => {
                    self.record_stop();
                    return self;
                }
                // A wait that could not be made has seen no removal.
                removed = removal => removed.unwrap_or(false),
            };
            if is_removed {
                sleep(SETTLE_TIME).await;
                let _ = outbox.send(EventLoopMessage::CheckJournal);
            }
        }
    }

    /// Tells a daemon that starts now that this one is stopping. With `--beside` there is no lock file, and the other
    /// daemon looks at the state directory.
    fn record_stop(&mut self) {
        if let Some(Err(error)) = self.lock.as_mut().map(DaemonLock::record_stop) {
            warn!(%error, "the lock file can't be written");
        }
        if let Err(error) = journal::mark_as_stopping(&self.state_dir) {
            debug!(%error, "the state directory can't be locked");
        }
    }

    /// Returns the lock that prevents a second daemon of the same user. `None` if the daemon took no lock. Removes the
    /// socket, unless the service manager created it.
    #[must_use]
    pub fn into_lock(self) -> Option<DaemonLock> {
        self.lock
    }

    /// Returns the paths of the files to watch: the journal, the lock files and the socket.
    fn paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            journal::JOURNAL_FILE_NAMES.iter().map(|name| self.state_dir.join(name)).collect();
        paths.extend(self.lock.iter().flat_map(DaemonLock::paths).map(Path::to_owned));
        paths.extend(self.socket.path().map(Path::to_owned));
        paths
    }

    /// Makes the lock file and the socket again if they were removed. Sends the listener of a new socket to
    /// `listeners`. Returns a warning for each file that can't be made, and one if systemd does not know the new
    /// socket.
    fn check_files(&mut self, listeners: &mpsc::UnboundedSender<UnixListener>) -> Vec<Warning> {
        let mut warnings = Vec::new();
        match self.lock.as_mut().map(DaemonLock::reacquire_if_removed) {
            None | Some(Ok(false)) => {}
            Some(Ok(true)) => warn!("the lock file was removed; it was made again"),
            Some(Err(fault)) => {
                let remedy = "pjwd tries again every 10 s; find out which program removes its files";
                let why = format!("the lock file was removed, and is not there again: {fault}");
                warnings.push(Warning::new("lock-removed", why, remedy));
            }
        }
        warnings.extend(self.check_socket(listeners));
        warnings
    }

    /// Makes the socket again if it was removed, and sends the new listener to `listeners`. If a stop of the socket
    /// unit of systemd removed the socket, does not make it again. Returns a warning if clients can't connect, or if
    /// systemd does not know the new socket.
    fn check_socket(&mut self, listeners: &mpsc::UnboundedSender<UnixListener>) -> Option<Warning> {
        let remedy = match &self.socket {
            SocketFile::CreatedByDaemon(_) => {
                "pjwd tries again every 10 s; find out which program removes its files"
            }
            SocketFile::Passed(_) | SocketFile::Replaced(..) => RENEW_SOCKET_OF_SYSTEMD,
        };
        let is_removed = self.socket.is_removed();
        if is_removed && (self.is_unit_stopped || self.socket.is_unit_stopped()) {
            if !std::mem::replace(&mut self.is_unit_stopped, true) {
                warn!("{UNIT_STOPPED}");
            }
            return Some(Warning::new("socket-removed", UNIT_STOPPED.to_owned(), remedy));
        }
        let restored = if is_removed { self.restore_socket() } else { Ok(None) };
        match restored {
            Ok(Some(listener)) => {
                warn!("the socket was removed; it was made again");
                // The control server ends before this task.
                let _ = listeners.send(listener);
            }
            Ok(None) => {}
            Err(fault) => {
                let why = format!("the socket was removed, and is not there again: {fault}");
                return Some(Warning::new("socket-removed", why, remedy));
            }
        }
        let SocketFile::Replaced(socket, _) = &self.socket else { return None };
        let why = format!(
            "the socket {} was removed, and pjwd made it again: systemd does not know it, so no connection starts pjwd after it has stopped",
            socket.path().display()
        );
        Some(Warning::new("socket-removed", why, remedy))
    }

    /// Makes the socket again with the same permissions if it was removed, and returns the new listener. Returns
    /// `None` if a socket that systemd passed was not removed.
    fn restore_socket(&mut self) -> Result<Option<UnixListener>, BindError> {
        match &mut self.socket {
            SocketFile::CreatedByDaemon(socket) | SocketFile::Replaced(socket, _) => {
                socket.rebind_if_removed().map(Some)
            }
            SocketFile::Passed(passed) => {
                let Some(path) = passed.path_if_removed() else { return Ok(None) };
                let mut socket = bind_with_access(path, passed.access)?;
                let listener = socket.rebind_if_removed()?;
                let manager = passed.manager.take();
                self.socket = SocketFile::Replaced(socket, manager);
                Ok(Some(listener))
            }
        }
    }
}

/// Reports when one of the watched files, or the directory of one, is removed or renamed.
struct DirectoryWatch {
    /// `None` if the kernel refuses inotify: then the files are only checked now and then.
    inotify: Option<Inotify>,
    /// The names of the watched files.
    names: BTreeSet<OsString>,
}

impl DirectoryWatch {
    /// Watches the directories of the files at `paths` for removed and renamed files (inotify(7)). A directory that
    /// can't be watched is left out.
    fn new(paths: &[PathBuf]) -> Self {
        let flags = AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let mut names = BTreeSet::new();
        for path in paths {
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // A directory that is not there now is found by a check.
            let _ = inotify.as_ref().map(|inotify| inotify.add_watch(dir, flags));
            names.extend(path.file_name().map(ToOwned::to_owned));
        }
        Self { inotify, names }
    }

    /// Blocks the thread until one of the watched files or directories is removed or renamed, and returns true. Returns
    /// false if `timeout` has passed before. If events were lost, also returns true, because one of them may have been
    /// such a removal.
    fn wait_for_removal(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut fds: Vec<PollFd<'_>> = Vec::new();
            fds.extend(self.inotify.iter().map(|inotify| PollFd::new(inotify.as_fd(), PollFlags::POLLIN)));
            // An interrupted wait ends early and is repeated.
            let _ = poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
            let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok());
            // Events of a directory itself, and the loss of events, have no name.
            let is_watched =
                |name: &Option<OsString>| name.as_ref().is_none_or(|name| self.names.contains(name));
            if events.unwrap_or_default().iter().any(|event| is_watched(&event.name)) {
                return true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use super::*;

    fn connects_to(path: &Path, listener: &UnixListener) -> bool {
        listener.set_nonblocking(true).unwrap();
        UnixStream::connect(path).is_ok() && listener.accept().is_ok()
    }

    #[test]
    fn a_removed_socket_of_systemd_is_made_again_also_by_the_next_daemon_and_the_warning_has_the_command() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("below/pjwd.sock");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let of_systemd = UnixListener::bind(&path).unwrap();
        let start = || {
            let socket = SocketFile::Passed(PassedSocketFile::new(Some(path.clone()), &of_systemd));
            WatchedFiles::new(None, socket, above.path().to_owned())
        };
        let (listeners, mut made) = mpsc::unbounded_channel();
        let mut files = start();
        assert!(files.check_files(&listeners).is_empty() && made.try_recv().is_err());
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        let check = |files: &mut WatchedFiles| {
            let warnings = files.check_files(&listeners);
            assert!(warnings[0].remedy.contains("systemctl start pjwd.service"), "{warnings:?}");
        };
        check(&mut files);
        assert!(connects_to(&path, &made.try_recv().unwrap()));
        check(&mut files);
        assert!(made.try_recv().is_err(), "the socket is made once");
        // A killed daemon leaves the file of its socket, and the next one gets the socket without a path again.
        drop(made);
        let SocketFile::Replaced(socket, _) = files.socket else { panic!("the daemon made a socket") };
        let killed = path.with_extension("killed");
        std::fs::hard_link(&path, &killed).unwrap();
        drop(socket);
        std::fs::rename(&killed, &path).unwrap();
        // A program that another test starts has a copy of the listener until it is executed.
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_listening(&path) {
            assert!(Instant::now() < deadline, "a process still listens at the socket of the killed daemon");
            std::thread::sleep(Duration::from_millis(2));
        }
        let (listeners, mut made) = mpsc::unbounded_channel();
        let mut next = start();
        assert_eq!(next.check_files(&listeners).len(), 1);
        assert!(connects_to(&path, &made.try_recv().unwrap()));
        drop(of_systemd);
    }

    #[test]
    fn a_removed_socket_of_systemd_that_can_not_be_made_again_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let of_systemd = UnixListener::bind(&path).unwrap();
        let socket = SocketFile::Passed(PassedSocketFile::new(Some(path.clone()), &of_systemd));
        let mut files = WatchedFiles::new(None, socket, dir.path().to_owned());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        let (listeners, _made) = mpsc::unbounded_channel();
        let warnings = files.check_files(&listeners);
        assert!(warnings[0].text.contains("is not there again"), "{warnings:?}");
        assert!(warnings[0].remedy.contains("systemctl start pjwd.service"), "{warnings:?}");
    }

    #[test]
    fn a_socket_of_systemd_that_is_made_again_has_the_mode_of_the_socket_unit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let of_systemd = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o620)).unwrap();
        let socket = SocketFile::Passed(PassedSocketFile::new(Some(path.clone()), &of_systemd));
        let mut files = WatchedFiles::new(None, socket, dir.path().to_owned());
        let (listeners, mut made) = mpsc::unbounded_channel();
        for removal in ["of the socket of systemd", "of the socket of pjwd"] {
            std::fs::remove_file(&path).unwrap();
            files.check_files(&listeners);
            assert!(connects_to(&path, &made.try_recv().unwrap()));
            let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o620, "after the removal {removal}");
        }
    }

    #[test]
    fn a_socket_whose_unit_was_stopped_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pjwd.sock");
        let of_systemd = UnixListener::bind(&path).unwrap();
        // The standard output of the shell is the socket, until the shell reads a line.
        let mut systemd = Command::new("sh")
            .args(["-c", "read -r line; exec >/dev/null; echo closed >&2; read -r line"])
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(of_systemd.try_clone().unwrap()))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let manager = SocketManager::new(systemd.id(), &of_systemd);
        assert!(manager.is_some());
        let passed = PassedSocketFile { manager, ..PassedSocketFile::new(Some(path.clone()), &of_systemd) };
        let mut files = WatchedFiles::new(None, SocketFile::Passed(passed), dir.path().to_owned());
        let (listeners, mut made) = mpsc::unbounded_channel();
        std::fs::remove_file(&path).unwrap();
        files.check_files(&listeners);
        assert!(connects_to(&path, &made.try_recv().unwrap()), "the unit is active");

        systemd.stdin.as_mut().unwrap().write_all(b"stop\n").unwrap();
        BufReader::new(systemd.stderr.take().unwrap()).read_line(&mut String::new()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let warnings = files.check_files(&listeners);
        assert!(warnings[0].text.contains("the socket unit was stopped"), "{warnings:?}");
        assert!(made.try_recv().is_err() && !path.exists());
        drop(systemd.stdin.take());
        systemd.wait().unwrap();
    }

    #[test]
    fn only_the_removal_of_a_file_of_the_daemon_or_of_its_directory_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (below, timeout) = (dir.path().join("below"), Duration::from_secs(60));
        std::fs::create_dir(&below).unwrap();
        let (own, other) = (below.join("own"), below.join("other"));
        for path in [&own, &other] {
            std::fs::write(path, "").unwrap();
        }
        let watch = DirectoryWatch::new(std::slice::from_ref(&own));
        std::fs::write(&own, "more").unwrap();
        std::fs::remove_file(&other).unwrap();
        assert!(!watch.wait_for_removal(Duration::from_millis(1)));
        std::fs::remove_file(&own).unwrap();
        assert!(watch.wait_for_removal(timeout));
        std::fs::rename(&below, dir.path().join("elsewhere")).unwrap();
        assert!(watch.wait_for_removal(timeout));
    }
}
