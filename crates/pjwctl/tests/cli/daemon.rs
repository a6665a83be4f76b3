//! A daemon of a test: it sends given replies by the protocol, and records the calls.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pjw_ipc::call::{Call, CallError, Reply};
use serde_json::{Value, json};

/// The replies to a call in their order, and whether the stream stays open after them.
pub(crate) struct CallReplies {
    replies: Vec<Result<Reply, CallError>>,
    stays_open: bool,
}

impl CallReplies {
    pub(crate) fn reply(reply: Reply) -> Self {
        Self { replies: vec![Ok(reply)], stays_open: false }
    }

    pub(crate) fn refusal(message: &str) -> Self {
        Self { replies: vec![Err(CallError::Refused(message.to_owned()))], stays_open: false }
    }

    pub(crate) fn busy(message: &str) -> Self {
        Self { replies: vec![Err(CallError::Busy(message.to_owned()))], stays_open: false }
    }

    pub(crate) fn would_freeze(message: &str) -> Self {
        Self { replies: vec![Err(CallError::WouldFreeze(message.to_owned()))], stays_open: false }
    }

    /// The reply to a call with a parameter that the daemon does not know.
    pub(crate) fn unknown_parameter(name: &str) -> Self {
        Self { replies: vec![Err(CallError::InvalidParameter(name.to_owned()))], stays_open: false }
    }

    pub(crate) fn stream(replies: Vec<Reply>, stays_open: bool) -> Self {
        Self { replies: replies.into_iter().map(Ok).collect(), stays_open }
    }
}

pub(crate) struct Daemon {
    dir: tempfile::TempDir,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Daemon {
    /// Starts a daemon that listens until the test program ends. `answer` gives the replies to a call.
    pub(crate) fn start(answer: impl Fn(&Call) -> CallReplies + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let listener = UnixListener::bind(dir.path().join("pjwd.sock")).unwrap();
        let (answer, recorded_calls) = (Arc::new(answer), calls.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, recorded_calls) = (answer.clone(), recorded_calls.clone());
                std::thread::spawn(move || serve(&stream.unwrap(), &*answer, &recorded_calls));
            }
        });
        Self { dir, calls }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("pjwd.sock")
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

fn serve(stream: &UnixStream, answer: &dyn Fn(&Call) -> CallReplies, recorded_calls: &Mutex<Vec<Call>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut message = Vec::new();
        if reader.read_until(0, &mut message).unwrap_or(0) == 0 {
            return;
        }
        message.pop();
        let mut message: Value = serde_json::from_slice(&message).unwrap();
        let method = message["method"].as_str().unwrap().to_owned();
        let call = Call::parse(&method, Some(message["parameters"].take())).unwrap();
        recorded_calls.lock().unwrap().push(call.clone());
        let CallReplies { replies, stays_open } = answer(&call);
        let count = replies.len();
        for (n, reply) in replies.into_iter().enumerate() {
            let reply = match reply {
                Ok(reply) => json!({ "parameters": reply, "continues": stays_open || n + 1 < count }),
                Err(error) => {
                    let (error, parameters) = error.to_varlink();
                    json!({ "error": error, "parameters": parameters })
                }
            };
            // In some tests the client closes the connection before the last reply.
            if (&*stream).write_all(format!("{reply}\0").as_bytes()).is_err() {
                return;
            }
        }
    }
}
