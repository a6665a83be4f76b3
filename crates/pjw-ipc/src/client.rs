//! A blocking client: what `pjwctl` needs, without a runtime.

use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use crate::INTERFACE;
use crate::dial::{LONGEST_PATH, beginning, dial, excess, listener_pid};

/// No honest reply is longer.
const LARGEST_REPLY: usize = 64 << 20;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectFault {
    /// Nobody is there.
    #[error("pjwd is not running: looked for {path}; start it with: systemctl start pjwd, or as yourself: pjwd; where it listens elsewhere, say so with --socket or PJW_SOCKET", path = path.display())]
    NotRunning {
        /// Where was looked.
        path: PathBuf,
    },
    /// The socket or a directory above it is closed to this user.
    #[error("{path} lets this user not in: pjwd opens its socket to everybody, so look at the directories above it, or choose another --socket", path = path.display())]
    Denied {
        /// Where was looked.
        path: PathBuf,
    },
    /// No socket can have such a path.
    #[error("{}: this path is {length} bytes long and a socket's may have {max}: choose a shorter one with --socket or PJW_SOCKET", beginning(.path), max = LONGEST_PATH)]
    TooLong {
        /// Where was to be looked.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Nobody is let in.
    #[error("pjwd hangs: it accepts no connection at {path}; see its log, or restart it with: systemctl restart pjwd", path = path.display())]
    Hangs {
        /// Where was looked.
        path: PathBuf,
    },
    /// Something else.
    #[error("can't connect to {path}: {why}; choose another --socket", path = path.display())]
    Io {
        /// Where was looked.
        path: PathBuf,
        /// The system's words; no source, since they are part of the sentence.
        why: io::Error,
    },
}

/// Why a call has no answer.
#[derive(Debug, Error)]
pub enum ClientFault {
    /// The daemon said no; the text is for people.
    #[error("{message}")]
    Refused {
        /// The error's name on the wire.
        error: String,
        /// What, why, and what to do.
        message: String,
    },
    /// The connection broke.
    #[error("the connection to pjwd broke: {0}; is it still running? (systemctl status pjwd)")]
    Io(io::Error),
    /// It takes too long.
    #[error("pjwd has not answered within {0:?}: see its log, or restart it with: systemctl restart pjwd")]
    Slow(Duration),
    /// The answer makes no sense to this version.
    #[error("pjwd's answer can't be understood ({0}): are pjwctl and pjwd of the same version?")]
    Nonsense(String),
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    patience: Duration,
}

impl Client {
    /// Connects. Neither this nor a call takes longer than half a minute.
    ///
    /// # Errors
    /// If nobody listens there, or nobody is let in.
    pub fn connect(path: &Path) -> Result<Self, ConnectFault> {
        Self::connect_within(path, PATIENCE)
    }

    /// Connects, and waits no longer than `patience`, counted in whole seconds here and from call to reply later.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_within(path: &Path, patience: Duration) -> Result<Self, ConnectFault> {
        let path_there = path.to_owned();
        if let Some(length) = excess(path) {
            return Err(ConnectFault::TooLong { path: path_there, length });
        }
        let stream = dial(path, patience).map_err(|errno| match errno {
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => {
                ConnectFault::NotRunning { path: path_there }
            }
            Errno::EACCES | Errno::EPERM => ConnectFault::Denied { path: path_there },
            Errno::EAGAIN => ConnectFault::Hangs { path: path_there },
            errno => ConnectFault::Io { path: path_there, why: errno.into() },
        })?;
        let client = Self { stream, buffer: Vec::new(), patience };
        client.be_patient(Some(patience));
        Ok(client)
    }

    /// A socket takes any timeout that is not zero.
    fn be_patient(&self, patience: Option<Duration>) {
        let patience = patience.map(|patience| patience.max(Duration::from_millis(1)));
        let _ = self.stream.set_read_timeout(patience);
        let _ = self.stream.set_write_timeout(patience);
    }

    /// The daemon's process, if the kernel tells.
    #[must_use]
    pub fn daemon_pid(&self) -> Option<i32> {
        listener_pid(&self.stream)
    }

    /// Calls a method and waits for its reply.
    ///
    /// # Errors
    /// If the daemon says no, or the connection breaks.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
    ) -> Result<T, ClientFault> {
        self.send(method, parameters, false)?;
        self.receive().map(|(reply, _)| reply)
    }

    /// Calls a method that has several replies; `each` is given every one, and says whether to go on. The daemon
    /// goes on in any case: after an early end the connection is of no more use.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn stream<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
        mut each: impl FnMut(T) -> bool,
    ) -> Result<(), ClientFault> {
        self.send(method, parameters, true)?;
        // Nothing may happen for a long time.
        self.be_patient(None);
        let told = self.hear_all(&mut each);
        self.be_patient(Some(self.patience));
        told
    }

    fn hear_all<T: DeserializeOwned>(&mut self, each: &mut impl FnMut(T) -> bool) -> Result<(), ClientFault> {
        loop {
            let (reply, continues): (Value, bool) = self.receive()?;
            // A stream that ends with nothing to say ends with an empty reply.
            if reply.as_object().is_some_and(|object| !object.is_empty()) {
                let reply = serde_json::from_value(reply)
                    .map_err(|error| ClientFault::Nonsense(error.to_string()))?;
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
        let mut call = json!({ "method": format!("{INTERFACE}.{method}"), "parameters": parameters });
        if more {
            call["more"] = Value::from(true);
        }
        let written = self.stream.write_all(format!("{call}\0").as_bytes());
        written.map_err(|error| match error.kind() {
            // Whoever is turned away is told why before the door is closed.
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => match self.receive::<Value>() {
                Err(refused @ ClientFault::Refused { .. }) => refused,
                _ => ClientFault::Io(error),
            },
            _ => self.broke(error),
        })
    }

    fn broke(&self, error: io::Error) -> ClientFault {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientFault::Slow(self.patience),
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
            if searched > LARGEST_REPLY {
                return Err(ClientFault::Nonsense("it does not end".to_owned()));
            }
            let mut chunk = [0; 64 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ClientFault::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broke(error)),
            }
        };
        let message: Vec<u8> = self.buffer.drain(..=end).collect();
        let nonsense = |error: serde_json::Error| ClientFault::Nonsense(error.to_string());
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
            "pjwd does not understand the parameter {parameter}: are pjwctl and pjwd of the same version?"
        ),
        (None, None) => format!("pjwd answered {error}: are pjwctl and pjwd of the same version?"),
    };
    ClientFault::Refused { error: error.to_owned(), message }
}

/// The directory in which a user's own daemon lives.
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

/// Where a client looks: where it is told, else at the user's own daemon if there is one, else at the system's.
/// A directory of the user's name that is another's is no place to look: below /tmp anybody can make one.
#[must_use]
pub fn socket_path(told: Option<&Path>, uid: u32, xdg_runtime_dir: Option<&Path>) -> PathBuf {
    if let Some(path) = told {
        return path.to_owned();
    }
    let dir = runtime_dir(uid, xdg_runtime_dir);
    let is_forged = std::fs::symlink_metadata(&dir).is_ok_and(|meta| !meta.is_dir() || meta.uid() != uid);
    let (own, system) = (dir.join("pjwd.sock"), PathBuf::from("/run/pjwd/pjwd.sock"));
    if is_forged { system } else { rather(own, system) }
}

/// The user's own socket if somebody is behind it, or if there is no other; one that a killed daemon left behind hides
/// nobody.
fn rather(own: PathBuf, system: PathBuf) -> PathBuf {
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
        let choice = || rather(own.clone(), system.clone());
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
