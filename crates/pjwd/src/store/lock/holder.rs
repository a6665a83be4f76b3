//! The process that holds the lock against a second pjwd: what it writes about itself to the lock file, and the error
//! of a process that can't get the lock.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use pjw_ipc::daemon_process::MAX_LOCK_FILE_BYTES;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::host::flock_holder::is_running;

/// The description of the pjwd process that holds the lock against a second pjwd. The process writes its pid, its
/// socket and its state directory to the lock file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    pub(super) pid: u32,
    /// `None` for `pjwd --release-all` and `pjwd --thaw`, which have no socket.
    pub(super) socket: Option<String>,
    pub(super) state_dir: String,
    /// The id of the boot in which the process made its journal. `None` if the process has not made its journal yet,
    /// if it has stopped and left nothing to undo, and for `pjwd --release-all` and `pjwd --thaw`.
    #[serde(default)]
    pub(super) journal_of_boot: Option<String>,
    /// Whether the journal had both files from the start. False for earlier versions, and if `state.json` could not be
    /// written.
    #[serde(default)]
    pub(super) has_state_file: bool,
    /// The last journal that an earlier process made. `None` as soon as this process has made its own.
    #[serde(default)]
    pub(super) earlier_journal: Option<JournalPlace>,
    /// Whether the process is a daemon that ends soon, because it received a signal to stop. It still thaws the frozen
    /// jobs.
    #[serde(default)]
    pub(super) is_stopping: bool,
}

/// Where and when a process made its journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JournalPlace {
    pub(super) state_dir: String,
    pub(super) boot_id: String,
    /// As in [`LockHolder`].
    #[serde(default)]
    pub(super) has_state_file: bool,
}

impl LockHolder {
    /// Describes this process as the holder of the lock against a second pjwd. `socket` is the path of the control
    /// socket of this process. It is `None` for `pjwd --release-all` and `pjwd --thaw`, which have no socket.
    /// `state_dir` is the state directory of this process.
    #[must_use]
    pub fn for_this_process(socket: Option<&Path>, state_dir: &Path) -> Self {
        // The next process may have another working directory.
        let full = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let text = |path: &Path| full(path).to_string_lossy().into_owned();
        let (socket, state_dir) = (socket.map(text), text(state_dir));
        Self {
            pid: std::process::id(),
            socket,
            state_dir,
            journal_of_boot: None,
            has_state_file: false,
            earlier_journal: None,
            is_stopping: false,
        }
    }

    /// Returns the pid of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the path of the control socket of the process. `None` for `pjwd --release-all` and `pjwd --thaw`, which
    /// have no socket.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_deref().map(Path::new)
    }

    /// Returns the last journal of this process. If it has made none, returns the last one of an earlier process.
    pub(super) fn last_journal(&self) -> Option<JournalPlace> {
        let Some(boot_id) = self.journal_of_boot.clone() else { return self.earlier_journal.clone() };
        Some(JournalPlace { state_dir: self.state_dir.clone(), boot_id, has_state_file: self.has_state_file })
    }

    /// Reads the holder of the lock from the lock file. `None` if the file does not describe a holder.
    pub(super) fn read(mut file: &File) -> Option<Self> {
        let mut text = Vec::new();
        file.rewind().ok()?;
        file.take(MAX_LOCK_FILE_BYTES).read_to_end(&mut text).ok()?;
        // The text of an earlier process may have been longer. Its end then follows this text.
        serde_json::Deserializer::from_slice(&text).into_iter().next()?.ok()
    }

    /// Returns whether the process that holds the lock still exists.
    pub(super) fn is_alive(&self) -> bool {
        is_running(self.pid)
    }

    /// Whether the process runs and serves clients. Any other process ends soon by itself, so its end is worth waiting
    /// for.
    pub(super) fn is_running_daemon(&self) -> bool {
        self.socket.is_some() && !self.is_stopping && self.is_alive()
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stopping = if self.is_stopping { "which is stopping, " } else { "" };
        write!(f, "process {}, {stopping}", self.pid)?;
        match &self.socket {
            Some(socket) => write!(f, "socket {socket:?}, ")?,
            None => write!(f, "which releases or thaws all jobs, ")?,
        }
        write!(f, "state directory {:?}", self.state_dir)
    }
}

/// The reason why this process can't acquire the lock that prevents a second pjwd of the same user.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another pjwd holds the lock.
    #[error("another pjwd runs {serves}{}: {remedy}", in_parentheses(.holder))]
    Held {
        /// The machine or the user that the other pjwd serves, as text for the message: `on this machine` or
        /// `for user 1000`.
        serves: String,
        /// The process that holds the lock. `None` if the lock file does not describe it.
        holder: Option<Box<LockHolder>>,
        /// What the user can do, such as `stop it first`.
        remedy: String,
    },
    /// The lock file or its directory can't be used.
    #[error("can't lock {path} against a second pjwd: {why}; {remedy}", path = path.display())]
    Unusable {
        /// The path of the lock file.
        path: PathBuf,
        /// The reason why the lock file can't be used.
        why: String,
        /// What the user can do, such as `remove it`.
        remedy: &'static str,
    },
}

impl LockError {
    /// Returns whether a running pjwd holds the lock that prevents a second pjwd of the same user. False if the process
    /// that holds the lock is already exiting or is unknown, or if the lock file can't be used.
    #[must_use]
    pub fn is_held_by_running_process(&self) -> bool {
        let Self::Held { holder, .. } = self else { return false };
        holder.as_ref().is_some_and(|holder| holder.is_alive())
    }
}

/// Returns the description of the holder in parentheses, for an error message. Empty if the holder is unknown.
fn in_parentheses(holder: &Option<Box<LockHolder>>) -> String {
    holder.as_ref().map(|holder| format!(" ({holder})")).unwrap_or_default()
}
