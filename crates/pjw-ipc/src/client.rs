//! A blocking client for `pjwctl`. It needs no async runtime.

use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use crate::INTERFACE_NAME;
use crate::dial::{MAX_PATH, dial, length_if_too_long, shortened};

/// The maximum length of a reply in bytes. A daemon that works correctly sends no longer one.
const MAX_REPLY: usize = 64 << 20;
/// The maximum time for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why a client cannot connect to the daemon: the error of [`Client::connect`]. The message names the
/// remedy.
#[derive(Debug, Error)]
pub enum ConnectFault {
    /// No daemon listens at the path.
    #[error("pjwd is not running: looked for {path}; start it with: systemctl start pjwd, or as yourself: pjwd; if it listens elsewhere, give the path with --socket or PJW_SOCKET", path = path.display())]
    NotRunning {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The permissions of the socket, or of a directory above it, exclude this user.
    #[error("this user has no permission to connect to {path}: pjwd opens its socket to every user, so check the permissions of the directories above it, or choose another --socket", path = path.display())]
    Denied {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The path is longer than the path of a Unix socket can be.
    #[error("{}: this path is {length} bytes long and the path of a socket has at most {max}: choose a shorter one with --socket or PJW_SOCKET", shortened(.path), max = MAX_PATH)]
    TooLong {
        /// The path of the socket.
        path: PathBuf,
        /// The length of the path in bytes.
        length: usize,
    },
    /// The daemon accepts no connection within the timeout.
    #[error("pjwd hangs: it accepts no connection at {path}; see its log, or restart it with: systemctl restart pjwd", path = path.display())]
    Hangs {
        /// The path of the socket.
        path: PathBuf,
    },
    /// Another error of the system.
    #[error("can't connect to {path}: {why}; choose another --socket", path = path.display())]
    Io {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the system. It is no `source`, because the sentence contains it.
        why: io::Error,
    },
}

/// The reason why a call failed: the daemon refused it, or the client got no valid reply.
#[derive(Debug, Error)]
pub enum ClientFault {
    /// The daemon refused the call.
    #[error("{message}")]
    Refused {
        /// The name of the error in the protocol.
        error: String,
        /// The reason and the remedy, for people.
        message: String,
    },
    /// The connection broke.
    #[error("the connection to pjwd broke: {0}; is it still running? (systemctl status pjwd)")]
    Io(io::Error),
    /// The reply did not arrive within this time.
    #[error("pjwd has not answered within {0:?}: see its log, or restart it with: systemctl restart pjwd")]
    Timeout(Duration),
    /// The reply cannot be parsed by this version.
    #[error("the reply of pjwd cannot be parsed ({0}): check that pjwctl and pjwd have the same version")]
    Malformed(String),
}

/// A connection of a client to the daemon. It makes one call at a time and waits for the reply.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    timeout: Duration,
    /// The end of the time for the present call and its whole reply. `None` for a series of replies.
    deadline: Option<Instant>,
}

impl Client {
    /// Connects to the daemon's socket at `path`. Connecting fails if it takes more than 30 s, and so does
    /// each call on the connection.
    ///
    /// # Errors
    /// If no daemon listens at `path`, the daemon hangs, or the user has no permission.
    pub fn connect(path: &Path) -> Result<Self, ConnectFault> {
        Self::connect_within(path, REPLY_TIMEOUT)
    }

    /// Connects to the daemon's socket at `path`. Connecting fails if it takes more than the time `timeout`,
    /// rounded up to whole seconds, and so does each call on the connection.
    ///
    /// # Errors
    /// If no daemon listens at `path`, the daemon hangs, or the user has no permission.
    pub fn connect_within(path: &Path, timeout: Duration) -> Result<Self, ConnectFault> {
        let path_there = path.to_owned();
        if let Some(length) = length_if_too_long(path) {
            return Err(ConnectFault::TooLong { path: path_there, length });
        }
        let stream = dial(path, timeout).map_err(|errno| match errno {
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => {
                ConnectFault::NotRunning { path: path_there }
            }
            Errno::EACCES | Errno::EPERM => ConnectFault::Denied { path: path_there },
            Errno::EAGAIN => ConnectFault::Hangs { path: path_there },
            errno => ConnectFault::Io { path: path_there, why: errno.into() },
        })?;
        Ok(Self { stream, buffer: Vec::new(), timeout, deadline: None })
    }

    /// Lets the next read or write wait until the deadline of the call at most. A daemon that sends a byte now and then
    /// does not extend the time.
    fn limit_wait(&self) -> Result<(), ClientFault> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(ClientFault::Timeout(self.timeout));
        }
        // A socket accepts any timeout that is not zero, and rounds it to microseconds.
        let left = left.map(|left| left.max(Duration::from_millis(1)));
        let _ = self.stream.set_read_timeout(left);
        let _ = self.stream.set_write_timeout(left);
        Ok(())
    }

    fn start_deadline(&mut self) {
        // A time that the clock can't count is no limit.
        self.deadline = Instant::now().checked_add(self.timeout.max(Duration::from_millis(1)));
    }

    /// Calls a method of the daemon, such as `GetStatus`, and waits for the single reply, which it parses as a `T`.
    ///
    /// # Errors
    /// If the daemon refuses the call, the timeout passes before the whole reply is there, the connection breaks, or the
    /// reply cannot be parsed.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
    ) -> Result<T, ClientFault> {
        self.start_deadline();
        self.send(method, parameters, false)?;
        self.receive().map(|(reply, _)| reply)
    }

    /// Calls a method that sends a series of replies, such as `Events`. Passes each reply to `each` until
    /// `each` returns false. No timeout applies to the replies. If `each` returned false, the connection can't
    /// be used for another call.
    ///
    /// # Errors
    /// If the daemon refuses the call, the connection breaks, or a reply cannot be parsed.
    pub fn stream_replies<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
        mut each: impl FnMut(T) -> bool,
    ) -> Result<(), ClientFault> {
        self.start_deadline();
        self.send(method, parameters, true)?;
        // Events may be far apart: no timeout.
        self.deadline = None;
        self.receive_all(&mut each)
    }

    fn receive_all<T: DeserializeOwned>(
        &mut self,
        each: &mut impl FnMut(T) -> bool,
    ) -> Result<(), ClientFault> {
        loop {
            let (reply, continues): (Value, bool) = self.receive()?;
            // A stream without a last event ends with an empty reply.
            if reply.as_object().is_some_and(|object| !object.is_empty()) {
                let reply = serde_json::from_value(reply)
                    .map_err(|error| ClientFault::Malformed(error.to_string()))?;
                if !each(reply) {
                    return Ok(());
                }
            }
            if !continues {
                return Ok(());
            }
        }
    }

    fn send(&mut self, method: &str, parameters: &impl Serialize, more: bool) -> Result<(), ClientFault> {
        let mut call = json!({ "method": format!("{INTERFACE_NAME}.{method}"), "parameters": parameters });
        if more {
            call["more"] = Value::from(true);
        }
        let message = format!("{call}\0");
        let mut left = message.as_bytes();
        while !left.is_empty() {
            self.limit_wait()?;
            match self.stream.write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.not_sent(error)),
            }
        }
        Ok(())
    }

    fn not_sent(&mut self, error: io::Error) -> ClientFault {
        match error.kind() {
            // A server that rejects a connection sends the reason before it closes the connection.
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => match self.receive::<Value>() {
                Err(refused @ ClientFault::Refused { .. }) => refused,
                _ => ClientFault::Io(error),
            },
            _ => self.broke(error),
        }
    }

    fn broke(&self, error: io::Error) -> ClientFault {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientFault::Timeout(self.timeout),
            _ => ClientFault::Io(error),
        }
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<(T, bool), ClientFault> {
        let mut searched = 0;
        let end = loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&byte| byte == 0) {
                break searched + end;
            }
            searched = self.buffer.len();
            if searched > MAX_REPLY {
                return Err(ClientFault::Malformed("it does not end".to_owned()));
            }
            self.limit_wait()?;
            let mut chunk = [0; 64 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ClientFault::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broke(error)),
            }
        };
        let message: Vec<u8> = self.buffer.drain(..=end).collect();
        let nonsense = |error: serde_json::Error| ClientFault::Malformed(error.to_string());
        let reply: Value = serde_json::from_slice(&message[..end]).map_err(nonsense)?;
        let parameters = reply.get("parameters").cloned().unwrap_or_else(|| json!({}));
        if let Some(error) = reply.get("error").and_then(Value::as_str) {
            return Err(refused(error, &parameters));
        }
        let continues = reply.get("continues").and_then(Value::as_bool).unwrap_or(false);
        serde_json::from_value(parameters).map(|reply| (reply, continues)).map_err(nonsense)
    }
}

fn refused(error: &str, parameters: &Value) -> ClientFault {
    let text = |key: &str| parameters.get(key).and_then(Value::as_str);
    let message = match (text("message"), text("parameter")) {
        (Some(message), _) => message.to_owned(),
        (None, Some(parameter)) => format!(
            "pjwd does not understand the parameter {parameter}: check that pjwctl and pjwd have the same version"
        ),
        (None, None) => format!("pjwd answered {error}: check that pjwctl and pjwd have the same version"),
    };
    ClientFault::Refused { error: error.to_owned(), message }
}

/// Returns the default directory for the socket and the state files of the daemon that user `uid` runs: /run/pjwd for
/// root, else a directory in `xdg_runtime_dir`, in /run/user, or below /tmp.
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

/// Returns the path of the daemon's socket to which a client connects. That is `explicit`, if given. Otherwise
/// it is the socket of user `uid`'s own daemon if that daemon runs, else the socket of root's daemon if it
/// exists, else the path of the user's own socket.
#[must_use]
pub fn socket_path(explicit: Option<&Path>, uid: u32, xdg_runtime_dir: Option<&Path>) -> PathBuf {
    if let Some(path) = explicit {
        return path.to_owned();
    }
    let dir = runtime_dir(uid, xdg_runtime_dir);
    let is_forged = std::fs::symlink_metadata(&dir).is_ok_and(|meta| !meta.is_dir() || meta.uid() != uid);
    let (own, system) = (dir.join("pjwd.sock"), PathBuf::from("/run/pjwd/pjwd.sock"));
    if is_forged { system } else { choose_socket(own, system) }
}

/// The user's own socket if a process listens there, or if the system's socket does not exist. A socket file that a
/// killed daemon left behind does not hide the system's daemon.
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
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_a_killed_daemon_left_behind_does_not_hide_the_systems() {
        let dir = tempfile::tempdir().unwrap();
        let (own, system) = (dir.path().join("own"), dir.path().join("system"));
        let choice = || choose_socket(own.clone(), system.clone());
        assert_eq!(choice(), own, "where a user would start one");
        let killed = UnixListener::bind(&own).unwrap();
        let _system = UnixListener::bind(&system).unwrap();
        assert_eq!(choice(), own);
        drop(killed);
        assert!(own.exists());
        assert_eq!(choice(), system);
        std::fs::remove_file(&system).unwrap();
        assert_eq!(choice(), own, "with no other, the error names this one");
    }
}
