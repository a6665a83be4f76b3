//! A blocking client for `pjwctl`. It needs no async runtime.

use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use crate::INTERFACE_NAME;
use crate::daemon_process::{DaemonProcess, LOCK_FILE_NAME};
use crate::dial::{MAX_SOCKET_PATH_BYTES, dial, length_if_too_long, listener_pid, truncate_path};
use crate::server::{DISPLACED_MESSAGE, TOO_MANY_CONNECTIONS};
use crate::service_commands;

/// The maximum length of a reply in bytes. A daemon that works correctly sends no longer one.
const MAX_REPLY: usize = 64 << 20;
/// The time for which the client still reads bytes that have arrived already, after it has found that the deadline of a
/// call has passed. It may find this late, because the process was stopped.
const LATE_READING_TIME: Duration = Duration::from_millis(100);
/// The start of the message of the error `Busy` for a user who is no administrator and sends commands too often.
pub const COMMANDS_TOO_OFTEN: &str = "you send commands too often";
/// The maximum time for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why a client can't connect to the daemon: the error of [`Client::connect`]. The error message says what
/// the user can do.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No process listens on the daemon's socket, or the socket does not exist.
    #[error("pjwd is not running: looked for {path}; start it with: {start}; if it listens elsewhere, give the path with --socket or PJW_SOCKET", path = path.display(), start = service_commands::pjwd_start_commands())]
    NotRunning {
        /// The path of the daemon's socket to which the client tried to connect.
        path: PathBuf,
    },
    /// The file at the path of the daemon's socket is not a socket.
    #[error("{path} is not a socket, and pjwd listens on a socket: give its path with --socket or PJW_SOCKET", path = path.display())]
    NotASocket {
        /// The path to which the client tried to connect.
        path: PathBuf,
    },
    /// This user has no permission to connect to the socket, or to search a directory in the path of the
    /// socket.
    #[error("this user has no permission to connect to {path}: pjwd opens its socket to every user, so check the permissions of the directories above it, or choose another --socket", path = path.display())]
    PermissionDenied {
        /// The path of the daemon's socket to which the client tried to connect.
        path: PathBuf,
    },
    /// The path of the socket is longer than the kernel allows for a Unix socket (unix(7)).
    #[error("{}: this path is {length} bytes long and the path of a socket has at most {max}: choose a shorter one with --socket or PJW_SOCKET", truncate_path(.path), max = MAX_SOCKET_PATH_BYTES)]
    PathTooLong {
        /// The path of the daemon's socket to which the client tried to connect.
        path: PathBuf,
        /// The length of the path in bytes.
        length: usize,
    },
    /// The daemon did not accept the connection within the timeout.
    #[error("{daemon} hangs: it accepts no connection at {path}; see its log, or restart it with: {restart}; jobs keep their cores meanwhile", path = path.display(), restart = daemon.restart_commands())]
    Timeout {
        /// The path of the daemon's socket to which the client tried to connect.
        path: PathBuf,
        /// The process of the daemon. Its pid is known if this user may read the lock file of the daemon.
        daemon: DaemonProcess,
    },
    /// A system call failed with an error that no other variant describes.
    #[error("can't connect to {path}: {why}; choose another --socket", path = path.display())]
    Io {
        /// The path of the daemon's socket to which the client tried to connect.
        path: PathBuf,
        /// The error of the system call. This field is not the `source` of the error, because the message of
        /// this variant already contains its text.
        why: io::Error,
    },
}

/// The reason why a call failed: the daemon refused the call, or the client received no valid reply.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The daemon replied with an error.
    #[error("{message}")]
    Refused {
        /// The Varlink name of the error, such as `org.pjw.Warden.Refused`.
        error: String,
        /// The reason and the remedy, as text for the user.
        message: String,
    },
    /// The daemon closed the connection, or a read or write on the connection failed.
    #[error("the connection to pjwd broke: {0}; is it still running? ({check})", check = service_commands::pjwd_check_command())]
    Io(io::Error),
    /// The call could not be sent, or its whole reply did not arrive, before the timeout of the [`Client`].
    #[error("{daemon} has not answered within {timeout:?}: see its log, or restart it with: {restart}; jobs keep their cores meanwhile", restart = daemon.restart_commands())]
    Timeout {
        /// The timeout of the client, in whole milliseconds.
        timeout: Duration,
        /// The process of the daemon.
        daemon: DaemonProcess,
    },
    /// The reply is too long, is not valid JSON, or does not have the expected fields. The text says why.
    #[error("the reply of pjwd cannot be parsed ({0}): check that pjwctl and pjwd have the same version")]
    Malformed(String),
}

impl ClientError {
    /// Returns whether the daemon replied with the error `Busy`, for example because too many connections are open. The
    /// call can succeed later, on a new connection.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { error, .. } if error.ends_with(".Busy"))
    }

    /// Returns whether the daemon refused the call because this user sends commands too often. The same call can
    /// succeed a moment later on the same connection.
    #[must_use]
    pub fn is_commands_too_often(&self) -> bool {
        let Self::Refused { message, .. } = self else { return false };
        self.is_busy() && message.starts_with(COMMANDS_TOO_OFTEN)
    }

    /// Returns whether the daemon refused to create a job that can borrow no core now, so that its processes would be
    /// frozen at once. Only the call `Assign` with the parameter `refuse_frozen` is refused for this reason.
    #[must_use]
    pub fn is_would_freeze(&self) -> bool {
        matches!(self, Self::Refused { error, .. } if error.ends_with(".WouldFreeze"))
    }

    /// Returns whether the daemon refused the call because it does not know the parameter `parameter`. The daemon is
    /// then possibly of an earlier version than the client. The daemon executed nothing of the call.
    #[must_use]
    pub fn is_unknown_parameter(&self, parameter: &str) -> bool {
        let Self::Refused { error, message } = self else { return false };
        error.ends_with(".InvalidParameter") && *message == unknown_parameter_message(parameter)
    }

    /// Returns whether the daemon was busy and certainly executed nothing of the call. The call can be repeated later,
    /// on a new connection.
    #[must_use]
    pub fn is_busy_before_execution(&self) -> bool {
        let Self::Refused { message, .. } = self else { return false };
        let has_no_connection = [DISPLACED_MESSAGE, TOO_MANY_CONNECTIONS].contains(&message.as_str());
        self.is_busy() && (has_no_connection || self.is_commands_too_often())
    }
}

/// A connection of a client to the daemon. [`Client::call`] sends a call to the daemon, and blocks until the reply has
/// arrived or the timeout has passed.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// The bytes that were received and not parsed yet.
    buffer: Vec<u8>,
    /// The maximum time for a call.
    timeout: Duration,
    /// The time at which the present call fails if its reply has not arrived completely. `None` during a series of
    /// replies.
    deadline: Option<Instant>,
}

impl Client {
    /// Connects to the daemon's socket at `path`. The timeout is 30 s, both for the connection attempt and
    /// for each call on the connection.
    ///
    /// # Errors
    /// If no daemon listens at `path`, the daemon does not accept the connection in time, `path` is too long
    /// for a Unix socket, or the user has no permission.
    pub fn connect(path: &Path) -> Result<Self, ConnectError> {
        Self::connect_with_timeout(path, REPLY_TIMEOUT)
    }

    /// Connects to the daemon's socket at `path`. `timeout` applies to the connection attempt and to each call on the
    /// connection.
    ///
    /// - If `timeout` is above zero: The connection attempt waits for `timeout`, rounded down to whole seconds, but at
    ///   least 1 s. The time for each call is `timeout`, but at least 1 ms.
    /// - If `timeout` is zero: The connection attempt fails at once if the daemon's queue of connections is full. The
    ///   time for each call is 1 ms.
    ///
    /// # Errors
    /// If no daemon listens at `path`, the daemon does not accept the connection in time, `path` is too long for a Unix
    /// socket, or the user has no permission.
    pub fn connect_with_timeout(path: &Path, timeout: Duration) -> Result<Self, ConnectError> {
        let owned_path = path.to_owned();
        if let Some(length) = length_if_too_long(path) {
            return Err(ConnectError::PathTooLong { path: owned_path, length });
        }
        // connect(2) fails with the same error for a file of another kind and for a socket without a listener.
        let is_other_file =
            || std::fs::metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket());
        let stream = dial(path, timeout).map_err(|errno| match errno {
            Errno::ECONNREFUSED if is_other_file() => ConnectError::NotASocket { path: owned_path },
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => {
                ConnectError::NotRunning { path: owned_path }
            }
            Errno::EACCES | Errno::EPERM => ConnectError::PermissionDenied { path: owned_path },
            Errno::EAGAIN => ConnectError::Timeout {
                daemon: DaemonProcess::behind_socket(None, Some(path), &own_lock_file()),
                path: owned_path,
            },
            errno => ConnectError::Io { path: owned_path, why: errno.into() },
        })?;
        Ok(Self { stream, buffer: Vec::new(), timeout, deadline: None })
    }

    /// Limits the time of the next read or write on the socket to the time until the deadline of the call. Must be
    /// called before each read and write, so that a daemon that sends a byte now and then does not extend the time.
    /// Without a deadline, the next read or write waits without a limit. Fails if the deadline has passed.
    fn limit_wait(&self) -> Result<(), ClientError> {
        let remaining = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if remaining.is_some_and(|remaining| remaining.is_zero()) {
            return Err(self.timeout_error());
        }
        // A socket accepts any timeout that is not zero, and rounds it to microseconds.
        let timeout = remaining.map(|remaining| remaining.max(Duration::from_millis(1)));
        let _ = self.stream.set_read_timeout(timeout);
        let _ = self.stream.set_write_timeout(timeout);
        Ok(())
    }

    fn start_deadline(&mut self) {
        // A time that the clock can't count is no limit.
        self.deadline = Instant::now().checked_add(self.timeout.max(Duration::from_millis(1)));
    }

    /// Calls the method `method` of the daemon, such as `GetStatus`. `parameters` become the JSON parameters
    /// of the call. Blocks until the single reply has arrived, and returns the reply, parsed as a `T`.
    ///
    /// # Errors
    /// If the daemon refuses the call, the whole reply does not arrive before the timeout, the connection
    /// breaks, or the reply can't be parsed.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.start_deadline();
        self.send_call(method, parameters, false)?;
        self.read_reply().map(|(reply, _)| reply)
    }

    /// Calls the method `method` of the daemon. The method must be one with a series of replies, such as `Events`.
    /// Passes each reply to `on_reply`. Blocks until the last reply has arrived, or until `on_reply` returns false. If
    /// `on_reply` returned false, the connection can't be used for another call. The timeout of the connection applies
    /// to sending the call, but not to waiting for replies.
    ///
    /// # Errors
    /// If the daemon refuses the call, sending the call takes longer than the timeout, the connection breaks, or a
    /// reply can't be parsed.
    pub fn stream_replies<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
        mut on_reply: impl FnMut(T) -> bool,
    ) -> Result<(), ClientError> {
        self.start_deadline();
        self.send_call(method, parameters, true)?;
        // Events may be far apart: no timeout.
        self.deadline = None;
        self.receive_all(&mut on_reply)
    }

    /// Receives the replies of a stream (a series of replies to one call), and calls `on_reply` with each reply.
    /// Leaves out an empty reply, which only ends the stream. Returns after the last reply, or when `on_reply`
    /// returns false. Fails if the connection breaks, if the daemon refuses the call, or if a reply can't be parsed.
    fn receive_all<T: DeserializeOwned>(
        &mut self,
        on_reply: &mut impl FnMut(T) -> bool,
    ) -> Result<(), ClientError> {
        loop {
            let (reply, continues): (Value, bool) = self.read_reply()?;
            // A stream without a last event ends with an empty reply.
            if reply.as_object().is_some_and(|object| !object.is_empty()) {
                let reply = serde_json::from_value(reply)
                    .map_err(|error| ClientError::Malformed(error.to_string()))?;
                if !on_reply(reply) {
                    return Ok(());
                }
            }
            if !continues {
                return Ok(());
            }
        }
    }

    /// Sends a call of the method `method` of the interface `org.pjw.Warden`. `more` says whether the client expects a
    /// series of replies. Fails if the call is not sent before the deadline, or if the server has rejected the
    /// connection.
    fn send_call(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
        more: bool,
    ) -> Result<(), ClientError> {
        let mut call = json!({ "method": format!("{INTERFACE_NAME}.{method}"), "parameters": parameters });
        if more {
            call["more"] = Value::from(true);
        }
        let message = format!("{call}\0");
        let mut unsent = message.as_bytes();
        while !unsent.is_empty() {
            self.limit_wait()?;
            match self.stream.write(unsent) {
                Ok(written) => unsent = &unsent[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.send_error(error)),
            }
        }
        Ok(())
    }

    /// Returns the error for a call that could not be sent because of `error`. If the server has rejected the
    /// connection and sent the reason, the result is this reason.
    fn send_error(&mut self, error: io::Error) -> ClientError {
        match error.kind() {
            // A server that rejects a connection sends the reason before it closes the connection.
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => match self.read_reply::<Value>() {
                Err(refused @ ClientError::Refused { .. }) => refused,
                _ => ClientError::Io(error),
            },
            _ => self.connection_error(error),
        }
    }

    /// Returns the error of the call for `error`, which a read or write on the socket returned.
    fn connection_error(&self, error: io::Error) -> ClientError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.timeout_error(),
            _ => ClientError::Io(error),
        }
    }

    /// Returns the error of a call whose reply has not arrived before the timeout. The error names the process of the
    /// daemon.
    fn timeout_error(&self) -> ClientError {
        let listener = listener_pid(&self.stream).and_then(|pid| u32::try_from(pid).ok());
        let address = self.stream.peer_addr().ok();
        let socket = address.as_ref().and_then(|address| address.as_pathname());
        let daemon = DaemonProcess::behind_socket(listener, socket, &own_lock_file());
        let milliseconds = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        ClientError::Timeout { timeout: Duration::from_millis(milliseconds), daemon }
    }

    /// Reads the next reply from the connection. Returns its parameters, and whether more replies follow.
    ///
    /// # Errors
    /// If the server refuses the call. If the reply does not arrive before the deadline, can't be parsed or is too
    /// long. If the connection breaks.
    fn read_reply<T: DeserializeOwned>(&mut self) -> Result<(T, bool), ClientError> {
        let (mut searched, mut late_since) = (0, None);
        let end = loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&byte| byte == 0) {
                break searched + end;
            }
            searched = self.buffer.len();
            if searched > MAX_REPLY {
                return Err(ClientError::Malformed("it does not end".to_owned()));
            }
            // This process may have been stopped or frozen until after the deadline. So it still reads what arrived in
            // the meantime. A daemon that goes on sending does not extend the reading time.
            let timeout_error = self.limit_wait().err();
            if timeout_error.is_some() {
                if late_since.get_or_insert_with(Instant::now).elapsed() > LATE_READING_TIME {
                    return Err(self.timeout_error());
                }
                let _ = self.stream.set_read_timeout(Some(Duration::from_millis(1)));
            }
            let mut chunk = [0; 64 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ClientError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted && timeout_error.is_none() => {}
                Err(error) => return Err(timeout_error.unwrap_or_else(|| self.connection_error(error))),
            }
        };
        let message: Vec<u8> = self.buffer.drain(..=end).collect();
        let malformed = |error: serde_json::Error| ClientError::Malformed(error.to_string());
        let reply: Value = serde_json::from_slice(&message[..end]).map_err(malformed)?;
        let parameters = reply.get("parameters").cloned().unwrap_or_else(|| json!({}));
        if let Some(error) = reply.get("error").and_then(Value::as_str) {
            return Err(refusal_error(error, &parameters));
        }
        let continues = reply.get("continues").and_then(Value::as_bool).unwrap_or(false);
        serde_json::from_value(parameters).map(|reply| (reply, continues)).map_err(malformed)
    }
}

/// Returns the error for a call that the server answered with the Varlink error `error` and its `parameters`.
fn refusal_error(error: &str, parameters: &Value) -> ClientError {
    let text = |key: &str| parameters.get(key).and_then(Value::as_str);
    let message = match (text("message"), text("parameter")) {
        (Some(message), _) => message.to_owned(),
        (None, Some(parameter)) => unknown_parameter_message(parameter),
        (None, None) => format!("pjwd answered {error}: check that pjwctl and pjwd have the same version"),
    };
    ClientError::Refused { error: error.to_owned(), message }
}

fn unknown_parameter_message(parameter: &str) -> String {
    format!(
        "pjwd does not understand the parameter {parameter}: check that pjwctl and pjwd have the same version"
    )
}

/// Returns the default directory for the socket and the state files of a daemon that runs as the user `uid`.
/// `xdg_runtime_dir` is the value of `$XDG_RUNTIME_DIR`. The first case that applies determines the directory:
///
/// 1. `/run/pjwd` if `uid` is 0 (root).
/// 2. `pjwd` in `xdg_runtime_dir`, if this is an absolute path.
/// 3. `/run/user/UID/pjwd` if `/run/user/UID` exists.
/// 4. `/tmp/pjwd-UID`.
#[must_use]
pub fn runtime_dir(uid: u32, xdg_runtime_dir: Option<&Path>) -> PathBuf {
    match xdg_runtime_dir.filter(|dir| dir.is_absolute()) {
        _ if uid == 0 => PathBuf::from("/run/pjwd"),
        Some(dir) => dir.join("pjwd"),
        None if Path::new(&format!("/run/user/{uid}")).is_dir() => {
            PathBuf::from(format!("/run/user/{uid}/pjwd"))
        }
        None => PathBuf::from(format!("/tmp/pjwd-{uid}")),
    }
}

/// Returns the directory of the lock file of the daemon of the user `uid`. For root, the directory is `/run/pjwd-lock`.
/// For other users, it is `/run/user/UID/pjwd-lock`, or `/tmp/pjwd-UID-lock` if `/run/user/UID` does not exist.
///
/// The running daemon holds a lock on the file (flock(2)). A second daemon of the same user then refuses to start,
/// except with the option `--beside`. Unlike [`runtime_dir`], the directory does not depend on `$XDG_RUNTIME_DIR`,
/// because all daemons of the user must use the same lock.
///
/// `/run/user/UID` can appear and vanish while a daemon runs. So there is a second lock file: see [`lasting_lock_dir`].
#[must_use]
pub fn lock_dir(uid: u32) -> PathBuf {
    let mut dir = runtime_dir(uid, None).into_os_string();
    dir.push("-lock");
    PathBuf::from(dir)
}

/// Returns the path of the lock file of the daemon of this user.
fn own_lock_file() -> PathBuf {
    lock_dir(geteuid().as_raw()).join(LOCK_FILE_NAME)
}

/// Returns the directory of a second lock file of the daemon of the user `uid`: `/tmp/pjwd-UID-lock`. Returns `None`
/// for root, because the directory that [`lock_dir`] returns for root never changes.
///
/// The directory that [`lock_dir`] returns depends on whether `/run/user/UID` exists. `/run/user/UID` appears with the
/// first login of the user and vanishes with the last logout. So [`lock_dir`] returns different directories to a daemon
/// that starts before the login and to a daemon that starts after the login. Both daemons also use the lock file in
/// `/tmp/pjwd-UID-lock`, so that the second daemon finds the lock of the first. If `/run/user/UID` does not exist, both
/// functions return the same directory.
#[must_use]
pub fn lasting_lock_dir(uid: u32) -> Option<PathBuf> {
    (uid != 0).then(|| PathBuf::from(format!("/tmp/pjwd-{uid}-lock")))
}

/// Returns the path of the daemon's socket to which a client of the user `uid` connects. `chosen_path` is the path
/// that the user chose, for example by an option. `xdg_runtime_dir` is the value of `$XDG_RUNTIME_DIR`. The first
/// case that applies determines the path:
///
/// 1. `chosen_path`, if it is not `None`.
/// 2. Root's socket (`/run/pjwd/pjwd.sock`) if the user's [`runtime_dir`] exists but is not a directory of this user.
/// 3. The socket `pjwd.sock` in the user's [`runtime_dir`] if a daemon listens on this socket.
/// 4. Root's socket if this socket exists.
/// 5. The socket `pjwd.sock` in the user's [`runtime_dir`].
#[must_use]
pub fn socket_path(chosen_path: Option<&Path>, uid: u32, xdg_runtime_dir: Option<&Path>) -> PathBuf {
    if let Some(path) = chosen_path {
        return path.to_owned();
    }
    let dir = runtime_dir(uid, xdg_runtime_dir);
    let is_forged = std::fs::symlink_metadata(&dir).is_ok_and(|meta| !meta.is_dir() || meta.uid() != uid);
    let (own, system) = (dir.join("pjwd.sock"), PathBuf::from("/run/pjwd/pjwd.sock"));
    if is_forged { system } else { choose_socket(own, system) }
}

/// Returns the user's own socket if a process listens there, or if the system's socket does not exist. Otherwise
/// returns the system's socket. So a socket file that a killed daemon left behind does not hide the system's daemon.
fn choose_socket(own: PathBuf, system: PathBuf) -> PathBuf {
    let is_alive = match dial(&own, Duration::ZERO) {
        Ok(_) => true,
        Err(errno) => {
            !matches!(errno, Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR | Errno::ENAMETOOLONG)
        }
    };
    if is_alive || !system.exists() { own } else { system }
}

#[cfg(test)]
mod tests;
