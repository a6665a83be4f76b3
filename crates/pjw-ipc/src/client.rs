//! A blocking client: what `pjwctl` needs, without a runtime.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use crate::INTERFACE;

/// No honest reply is longer.
const LARGEST_REPLY: usize = 64 << 20;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectFault {
    /// Nobody is there.
    #[error("pjwd is not running: looked for {path}; start it with: systemctl start pjwd, or as yourself: pjwd", path = path.display())]
    NotRunning {
        /// Where was looked.
        path: PathBuf,
    },
    /// Something else.
    #[error("can't connect to {path}: {why}", path = path.display(), why = source.to_string())]
    Io {
        /// Where was looked.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
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
    Io(#[source] io::Error),
    /// The answer makes no sense to this version.
    #[error("pjwd's answer can't be understood ({0}): are pjwctl and pjwd of the same version?")]
    Nonsense(String),
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// If nobody listens there.
    pub fn connect(path: &Path) -> Result<Self, ConnectFault> {
        let stream = UnixStream::connect(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ConnectFault::NotRunning { path: path.to_owned() }
            }
            _ => ConnectFault::Io { path: path.to_owned(), source },
        })?;
        // A socket always takes a timeout that is not zero.
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.set_write_timeout(Some(PATIENCE));
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// The daemon's process, if the kernel tells.
    #[must_use]
    pub fn daemon_pid(&self) -> Option<i32> {
        getsockopt(&self.stream, PeerCredentials).ok().map(|peer| peer.pid())
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

    /// Calls a method that has several replies; `each` is given every one, and says whether to go on.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn stream<T: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &impl Serialize,
        mut each: impl FnMut(T) -> bool,
    ) -> Result<(), ClientFault> {
        // Nothing may happen for a long time.
        let _ = self.stream.set_read_timeout(None);
        self.send(method, parameters, true)?;
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
        self.stream.write_all(format!("{call}\0").as_bytes()).map_err(ClientFault::Io)
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
                Err(error) => return Err(ClientFault::Io(error)),
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
#[must_use]
pub fn socket_path(told: Option<&Path>, uid: u32, xdg_runtime_dir: Option<&Path>) -> PathBuf {
    if let Some(path) = told {
        return path.to_owned();
    }
    let own = runtime_dir(uid, xdg_runtime_dir).join("pjwd.sock");
    let system = PathBuf::from("/run/pjwd/pjwd.sock");
    if own.exists() || !system.exists() { own } else { system }
}
