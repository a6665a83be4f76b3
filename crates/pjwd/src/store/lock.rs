//! The lock by which one pjwd serves a machine, or a user.
//!
//! The lock file is at a path that depends on the user only: not on the configuration, the socket or the state
//! directory. The kernel drops the lock when the process ends (flock(2)). The file names the process that holds the
//! lock, for the error message of a second pjwd. The file also names the state directory of the last journal, for the
//! next pjwd. So the file has a directory of its own: the file stays when the state directory is deleted. Only the
//! owner may open the file, because another user could take the lock with any descriptor of the file.
//!
//! `/run/user/UID` exists only while the user is logged in. So a plain user has a second lock file below `/tmp`, which
//! a daemon finds that starts before a login or after a logout ([`LockDirectories`]).

mod directory;
mod holder;

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Uid;
use pjw_ipc::client::{lasting_lock_dir, lock_dir, runtime_dir};
use pjw_ipc::daemon_process::LOCK_FILE_NAME as FILE_NAME;
use tracing::{debug, warn};

use self::directory::{make_lock_directory, remedy_of};
pub use self::holder::{LockError, LockHolder};
use crate::host::{directories, inode::is_file_at_path};

/// The time to wait for a lock. The files of a killed daemon stay locked until the kernel has removed its BPF
/// programs, which takes until every task was off its PU once.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The time to wait for a lock of a daemon that is alive and not stopping. The daemon may have been killed and not yet
/// begun to end.
const TIMEOUT_IF_ALIVE: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The remedy if another pjwd holds the lock.
const STOP_FIRST: &str = "stop it first (for tests, --beside runs a second one beside it)";
/// The number of attempts to take the lock, if another process removes the file again and again.
const MAX_ATTEMPTS: usize = 10;

/// Locks `file` (flock(2)) and returns the locked file. If another process holds the lock, waits for the end of that
/// process for up to 5 s, but for only up to 0.5 s if `is_alive` returns true. The function `is_alive` gets the file
/// and returns whether the process that holds the lock will probably not end soon, such as a running daemon.
///
/// # Errors
/// `EWOULDBLOCK` if another process still holds the lock after the wait. Otherwise the error of flock(2).
pub(super) fn lock(mut file: File, is_alive: impl Fn(&File) -> bool) -> Result<Flock<File>, Errno> {
    let begun = Instant::now();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((unlocked, Errno::EWOULDBLOCK)) => {
                let timeout = if is_alive(&unlocked) { TIMEOUT_IF_ALIVE } else { TIMEOUT };
                if begun.elapsed() >= timeout {
                    return Err(Errno::EWOULDBLOCK);
                }
                file = unlocked;
            }
            Err((_, errno)) => return Err(errno),
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// The directories of the lock files of a user. pjwd locks these files, so that no second pjwd of the user can start.
#[derive(Debug, Clone, Default)]
pub struct LockDirectories {
    /// The directory of the lock file without which pjwd does not start. pjwd creates the directory if it is missing.
    pub usual: PathBuf,
    /// A directory whose path does not depend on whether the user is logged in. `None` for root: then `usual` is such a
    /// directory. pjwd creates the directory and a lock file in it. If this fails, pjwd starts nevertheless, because
    /// another user may have created the directory.
    pub lasting: Option<PathBuf>,
    /// The directories in which earlier versions of pjwd had their lock files. pjwd creates nothing in these
    /// directories.
    pub former: Vec<PathBuf>,
}

impl LockDirectories {
    /// Returns the directories of the lock files of the user `uid`. The result depends only on the user and on whether
    /// `/run/user/UID` exists. It does not depend on `$XDG_RUNTIME_DIR`, because all daemons of a user must lock the
    /// same file.
    #[must_use]
    pub fn of_user(uid: u32) -> Self {
        Self { usual: lock_dir(uid), lasting: lasting_lock_dir(uid), former: vec![runtime_dir(uid, None)] }
    }
}

/// The lock file in [`LockDirectories::lasting`].
#[derive(Debug)]
struct LastingFile {
    path: PathBuf,
    /// `None` if the file can't be used.
    file: Option<Flock<File>>,
}

impl LastingFile {
    /// Locks the lock file in `dir`, and writes `holder` into it. If the file can't be used, logs this, and returns a
    /// value without a file.
    ///
    /// # Errors
    /// If another pjwd holds the lock.
    fn lock(dir: &Path, holder: &mut LockHolder) -> Result<Self, LockError> {
        let path = dir.join(FILE_NAME);
        let file = match lock_file(&path, holder) {
            Ok(file) => Some(file),
            Err(error @ LockError::Held { .. }) => return Err(error),
            Err(error) => {
                warn!("{error}; until then, a second pjwd may start after a logout of the user");
                None
            }
        };
        Ok(Self { path, file })
    }

    /// Locks the file again if it was removed, or if it could not be used before. Returns true if it was removed.
    ///
    /// # Errors
    /// If another pjwd holds the lock. If the file was removed and can't be made again.
    fn relock_if_removed(&mut self, holder: &mut LockHolder) -> Result<bool, LockError> {
        if self.file.as_ref().is_some_and(|file| is_file_at_path(&self.path, file)) {
            return Ok(false);
        }
        match lock_file(&self.path, holder) {
            Ok(file) => Ok(self.file.replace(file).is_some()),
            // This failure was logged at the start.
            Err(LockError::Unusable { .. }) if self.file.is_none() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The lock that prevents a second pjwd of the same user. Each user, also root, has a separate lock. So the lock
/// permits a pjwd of root and a pjwd of another user at the same time. The lock is released when this value is
/// dropped or the process ends.
#[derive(Debug)]
pub struct DaemonLock {
    path: PathBuf,
    holder: LockHolder,
    file: Flock<File>,
    lasting: Option<LastingFile>,
    /// The lock files of earlier versions that existed at the start of pjwd.
    former_files: Vec<Flock<File>>,
}

impl DaemonLock {
    /// Acquires the lock that prevents a second pjwd of the same user: locks files in the directories `dirs`
    /// (flock(2)). `dirs` must be the directories of this user ([`LockDirectories::of_user`]). `holder` describes the
    /// calling process, and is written to the lock files.
    ///
    /// - The file in [`LockDirectories::usual`] must be locked.
    /// - The file in [`LockDirectories::lasting`] is locked, too. If it can't be used, a warning is logged.
    /// - The files in [`LockDirectories::former`] are those of earlier versions of pjwd. Each file that exists is
    ///   locked, so that no pjwd of such a version can run at the same time. A file that can't be used is ignored.
    ///
    /// If another process holds the lock, waits until that process ends. Waits up to 0.5 s for a running daemon. Waits
    /// up to 5 s for a daemon that is stopping, or for a command that needs the lock for a short time.
    ///
    /// # Errors
    /// If another pjwd still holds the lock after the wait. If the file in `usual` can't be used, for example because
    /// the file belongs to another user or is a symbolic link.
    pub fn acquire(dirs: &LockDirectories, mut holder: LockHolder) -> Result<Self, LockError> {
        let path = dirs.usual.join(FILE_NAME);
        let file = lock_file(&path, &mut holder)?;
        let lasting = dirs.lasting.as_deref().filter(|dir| *dir != dirs.usual);
        let lasting = lasting.map(|dir| LastingFile::lock(dir, &mut holder)).transpose()?;
        let mut former_files = Vec::new();
        for former in dirs.former.iter().filter(|former| **former != dirs.usual) {
            let former_path = former.join(FILE_NAME);
            if former_path.symlink_metadata().is_err() {
                continue;
            }
            match lock_file(&former_path, &mut holder) {
                Ok(file) => former_files.push(file),
                Err(error @ LockError::Held { .. }) => return Err(error),
                // No pjwd of this user starts with such a file.
                Err(LockError::Unusable { .. }) => {}
            }
        }
        let lock = Self { path, holder, file, lasting, former_files };
        // A file that was locked later may be the only one that names an earlier journal. So all files get this entry.
        lock.write_holder().map_err(|error| LockError::Unusable {
            path: lock.path.clone(),
            why: error.to_string(),
            remedy: remedy_of(&error),
        })?;
        Ok(lock)
    }

    /// Returns the state directory in which an earlier pjwd made its journal (the records of its changes) in the
    /// current boot. The lock file names this directory. `boot_id` is the id of the current boot. Returns `None` if the
    /// lock file names no earlier journal of this boot. Must be called before [`DaemonLock::record_journal`], which
    /// removes the name of the directory from the lock file.
    ///
    /// The caller should check whether the journal is still in the directory. If the journal is missing, the original
    /// affinity masks of the threads that the earlier pjwd changed are unknown.
    #[must_use]
    pub fn earlier_state_dir(&self, boot_id: &str) -> Option<&Path> {
        let journal = self.holder.earlier_journal.as_ref().filter(|journal| journal.boot_id == boot_id)?;
        Some(Path::new(&journal.state_dir))
    }

    /// Returns whether the earlier pjwd is known to have written the file `state.json` of the journal in
    /// [`DaemonLock::earlier_state_dir`]. If true and the file is missing, the file was removed. If false, a missing
    /// file proves nothing. False in three cases:
    ///
    /// - The lock file names no earlier journal.
    /// - The earlier pjwd failed to write its records.
    /// - The earlier pjwd was a version that wrote `state.json` only later.
    #[must_use]
    pub fn earlier_journal_had_state_file(&self) -> bool {
        self.holder.earlier_journal.as_ref().is_some_and(|journal| journal.has_state_file)
    }

    /// Removes the location of the last journal (the records of changes) from the lock file. This is the journal of
    /// this process or of an earlier pjwd. Must be called only if no recorded change is left to undo. If the journal is
    /// missing later, the next pjwd then knows that no records were lost.
    ///
    /// # Errors
    /// If the lock file can't be written.
    pub fn forget_journal(&mut self) -> io::Result<()> {
        self.holder.journal_of_boot = None;
        self.holder.earlier_journal = None;
        self.write_holder()
    }

    /// Records in the lock file that this process has made its journal (the records of its changes) in the current
    /// boot. `boot_id` is the id of this boot. `has_state_file` says whether the file `state.json` was written. The
    /// next pjwd needs this entry for [`DaemonLock::earlier_state_dir`] and
    /// [`DaemonLock::earlier_journal_had_state_file`].
    ///
    /// # Errors
    /// If the lock file can't be written.
    pub fn record_journal(&mut self, boot_id: &str, has_state_file: bool) -> io::Result<()> {
        self.holder.has_state_file = has_state_file;
        self.holder.journal_of_boot = Some(boot_id.to_owned());
        self.holder.earlier_journal = None;
        self.write_holder()
    }

    /// Records in the lock file that this process is a daemon that is stopping. The process keeps the lock until its
    /// event loop has ended. Because of the record, another daemon that is started in the meantime waits for the lock
    /// for up to 5 s instead of 0.5 s ([`DaemonLock::acquire`]).
    ///
    /// # Errors
    /// If the lock file can't be written.
    pub fn record_stop(&mut self) -> io::Result<()> {
        self.holder.is_stopping = true;
        self.write_holder()
    }

    /// Writes the facts about this process to all its lock files. Fails only if the lock file of
    /// [`LockDirectories::usual`] can't be written.
    fn write_holder(&self) -> io::Result<()> {
        let lasting = self.lasting.iter().filter_map(|lasting| lasting.file.as_ref());
        for file in lasting.chain(&self.former_files) {
            // These files only tell another pjwd of this user about this one.
            if let Err(error) = write(file, &self.holder) {
                debug!(%error, "a lock file can't be written");
            }
        }
        write(&self.file, &self.holder)
    }

    /// Returns the paths of the lock files that pjwd must make again if they are removed
    /// ([`DaemonLock::reacquire_if_removed`]). Locks on these files prevent a second pjwd of the same user.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        // In a directory of another user, this user could cause any number of events.
        let lasting = self.lasting.iter().filter(|lasting| lasting.file.is_some());
        [self.path.as_path()].into_iter().chain(lasting.map(|lasting| lasting.path.as_path()))
    }

    /// Locks the lock files again if one of them was removed or replaced. Without this, a second pjwd of the same user
    /// could create and lock a new file. Also locks the file in [`LockDirectories::lasting`] if it could not be used
    /// before. Returns whether a removed file was made again.
    ///
    /// A logout of the user can remove the directory [`LockDirectories::usual`], but not `lasting`. While the file in
    /// `lasting` is locked, the file in the removed directory is not made again.
    ///
    /// # Errors
    /// The errors of [`DaemonLock::acquire`], also if the file in [`LockDirectories::lasting`] was removed and can't be
    /// made again. [`LockError::Held`] means that a second pjwd has acquired the lock in the meantime. This pjwd and
    /// the second pjwd then run at the same time.
    pub fn reacquire_if_removed(&mut self) -> Result<bool, LockError> {
        let Self { lasting, holder, .. } = self;
        let is_lasting_new = lasting.as_mut().map_or(Ok(false), |lasting| lasting.relock_if_removed(holder));
        let is_usual_new = self.relock_usual_file_if_removed();
        // After a logout, the usual file can't be made again. That a second pjwd runs is the more important error.
        if matches!(is_lasting_new, Err(LockError::Held { .. })) {
            return is_lasting_new;
        }
        let is_usual_new = is_usual_new?;
        Ok(is_lasting_new? || is_usual_new)
    }

    /// Makes and locks the file in [`LockDirectories::usual`] again if it was removed, and returns true. Returns
    /// false if the file is in place, or if its directory is gone (after a logout) and the file in
    /// [`LockDirectories::lasting`] is locked.
    fn relock_usual_file_if_removed(&mut self) -> Result<bool, LockError> {
        // After the last logout there is no /run/user/UID, and the lasting file is enough.
        let has_lasting_file = self.lasting.as_ref().is_some_and(|lasting| lasting.file.is_some());
        let is_logged_out = || self.path.ancestors().nth(2).is_some_and(|dir| !dir.exists());
        if is_file_at_path(&self.path, &self.file) || (has_lasting_file && is_logged_out()) {
            return Ok(false);
        }
        self.file = lock_file(&self.path, &mut self.holder)?;
        Ok(true)
    }
}

/// Locks the lock file at `path`, and writes `holder` (the facts about this process) into it. If `holder` has no
/// journal yet, it keeps the entry of the file about an earlier journal: if this process ends before it makes a
/// journal, the next one still finds the earlier one. Fails if another process holds the lock, or if the file can't
/// be used.
fn lock_file(path: &Path, holder: &mut LockHolder) -> Result<Flock<File>, LockError> {
    let unusable = |why: String, remedy| LockError::Unusable { path: path.to_owned(), why, remedy };
    let uid = Uid::effective().as_raw();
    if let Some(dir) = path.parent() {
        make_lock_directory(dir, uid).map_err(|(why, remedy)| unusable(why, remedy))?;
    }
    let io_error = |error: io::Error| unusable(error.to_string(), remedy_of(&error));
    for _ in 0..MAX_ATTEMPTS {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = directories::open_own_file(path, &mut options).map_err(io_error)?;
        let is_alive = |file: &File| LockHolder::read(file).is_some_and(|holder| holder.is_running_daemon());
        // lock() takes the file, so the holder in the error is read through a second handle.
        let second_handle = file.try_clone().map_err(io_error)?;
        let locked = lock(file, is_alive).map_err(|errno| match errno {
            Errno::EWOULDBLOCK => {
                let serves = if uid == 0 { "on this machine".to_owned() } else { format!("for user {uid}") };
                let holder = LockHolder::read(&second_handle).map(Box::new);
                LockError::Held { serves, holder, remedy: STOP_FIRST.to_owned() }
            }
            other => io_error(other.into()),
        })?;
        // Another process may have removed the file before it was locked.
        if !is_file_at_path(path, &locked) {
            continue;
        }
        if holder.last_journal().is_none() {
            holder.earlier_journal = LockHolder::read(&locked).and_then(|before| before.last_journal());
        }
        write(&locked, holder).map_err(io_error)?;
        return Ok(locked);
    }
    Err(unusable("it is removed again and again".to_owned(), "find out which program removes it"))
}

/// Writes `holder` over the text in the file. The text is cut only afterwards: if the file system is full, the file
/// still names the last journal.
fn write(mut file: &File, holder: &LockHolder) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(0o600))?;
    let mut text = serde_json::to_vec(holder)?;
    text.push(b'\n');
    file.rewind()?;
    file.write_all(&text)?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests;
