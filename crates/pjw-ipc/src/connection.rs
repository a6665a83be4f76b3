//! One connection: requests in, replies out, in order. A request is a JSON object and a zero byte.

use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Duration, Instant, sleep, timeout, timeout_at};

use crate::call::{self, Call, CallError, Reply};
use crate::server::{Answer, Limits, Peer, Service};
use crate::unsent::Unsent;
use crate::{DESCRIPTION, INTERFACE};

/// The interface that every Varlink service has.
const SERVICE_DESCRIPTION: &str = "\
# The interface that tells about the others.
interface org.varlink.service

method GetInfo() -> (vendor: string, product: string, version: string, url: string, interfaces: []string)
method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)
error MethodNotFound (method: string)
error MethodNotImplemented (method: string)
error InvalidParameter (parameter: string)
error PermissionDenied ()
error ExpectedMore ()
";

/// So long a reply of a stream may wait to learn whether it is the last.
const LAST_WORD: Duration = Duration::from_millis(5);
/// How often a client that sends nothing more is looked at: of its hang-up no data tells.
const GLANCE: Duration = Duration::from_millis(250);

#[derive(Deserialize)]
struct Request {
    method: String,
    #[serde(default)]
    parameters: Option<Value>,
    #[serde(default)]
    more: bool,
    #[serde(default)]
    oneway: bool,
}

impl Request {
    /// # Errors
    /// If it isn't JSON (a syntax error), or not a call (a data error).
    fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let request: Value = serde_json::from_slice(bytes)?;
        // Serde would take a list for an object whose names were left out.
        if !request.is_object() {
            return Err(serde::de::Error::custom("a call is an object"));
        }
        serde_json::from_value(request)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    interface: String,
}

#[derive(Serialize)]
struct Response<'a, P> {
    parameters: &'a P,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continues: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Tells a client why it can't stay, as far as that works without waiting.
pub(crate) fn turn_away(stream: &UnixStream, why: &str) {
    let (error, parameters) = CallError::Busy(why.to_owned()).on_the_wire();
    let response = json!({ "error": error, "parameters": parameters });
    let _ = stream.try_write(format!("{response}\0").as_bytes());
}

/// On which terms a client is attended to.
pub(crate) struct Terms {
    pub(crate) limits: Limits,
    pub(crate) unsent: Rc<Unsent>,
    /// Becomes true when the server ends.
    pub(crate) stop: watch::Receiver<bool>,
}

/// Attends to a client until it hangs up, breaks a limit, or the server stops.
pub(crate) async fn attend<S: Service>(
    stream: UnixStream,
    peer: Peer,
    service: Rc<S>,
    terms: Terms,
) -> io::Result<()> {
    let Terms { limits, unsent, mut stop } = terms;
    let (reader, writer) = stream.into_split();
    let mut reader = Reader { reader, buffer: Vec::new(), ended: false, limits };
    let mut writer = Writer { writer, uid: peer.uid, unsent, limits };
    loop {
        let request = tokio::select! {
            request = reader.request() => request?,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        let Some(bytes) = request else { return Ok(()) };
        let request = match Request::parse(&bytes) {
            Ok(request) => request,
            Err(error) => {
                writer.error(&CallError::InvalidParameter("method".to_owned())).await?;
                if error.is_data() {
                    continue;
                }
                // Nobody knows where the next request would start in garbage.
                return Err(io::Error::new(io::ErrorKind::InvalidData, "not a Varlink call"));
            }
        };
        let oneway = request.oneway;
        let more = request.more && !oneway;
        match answer(&*service, peer, request, more).await {
            _ if oneway => {}
            Ok(Said::Plain(parameters)) => writer.reply(parameters, false).await?,
            Ok(Said::Answer(Answer::Once(reply))) => writer.reply(reply, false).await?,
            Ok(Said::Answer(Answer::Many(_))) if !more => writer.error(&CallError::ExpectedMore).await?,
            Ok(Said::Answer(Answer::Many(replies))) => {
                stream_replies(replies, &mut reader, &mut writer, &mut stop).await?;
            }
            Err(error) => writer.error(&error).await?,
        }
    }
}

/// What there is to say: one of our own replies, or the service interface's.
enum Said {
    Plain(Map<String, Value>),
    Answer(Answer),
}

async fn answer<S: Service>(
    service: &S,
    peer: Peer,
    request: Request,
    more: bool,
) -> Result<Said, CallError> {
    let parameters = request.parameters.unwrap_or_else(|| json!({}));
    match request.method.strip_prefix("org.varlink.service.") {
        Some("GetInfo") => call::none(&parameters).map(|()| Said::Plain(info())),
        Some("GetInterfaceDescription") => call::read(&parameters).and_then(description).map(Said::Plain),
        Some(_) => Err(CallError::MethodNotFound(request.method)),
        None => {
            let call = Call::parse(&request.method, Some(parameters))?;
            service.call(peer, call, more).await.map(Said::Answer)
        }
    }
}

fn info() -> Map<String, Value> {
    Map::from_iter([
        ("vendor".to_owned(), Value::from("pjw")),
        ("product".to_owned(), Value::from("pjwd, the process jail warden")),
        ("version".to_owned(), Value::from(env!("CARGO_PKG_VERSION"))),
        ("url".to_owned(), Value::from("")),
        ("interfaces".to_owned(), json!(["org.varlink.service", INTERFACE])),
    ])
}

fn description(Described { interface }: Described) -> Result<Map<String, Value>, CallError> {
    let text = match interface.as_str() {
        INTERFACE => DESCRIPTION,
        "org.varlink.service" => SERVICE_DESCRIPTION,
        _ => return Err(CallError::InterfaceNotFound(interface)),
    };
    Ok(Map::from_iter([("description".to_owned(), Value::from(text))]))
}

/// Sends replies as they come. The client's hang-up ends it at once, also if it has sent further calls meanwhile:
/// those are read, and answered when the stream is over.
async fn stream_replies(
    mut replies: mpsc::Receiver<Reply>,
    reader: &mut Reader,
    writer: &mut Writer,
    stop: &mut watch::Receiver<bool>,
) -> io::Result<()> {
    // The last one must say that it is the last: one reply is always held back.
    let mut held: Option<Reply> = None;
    loop {
        let next = tokio::select! {
            // What is there to be told when the server stops is told first.
            biased;
            end = reader.hang_up() => return Err(end),
            reply = replies.recv() => reply,
            _ = stop.wait_for(|stop| *stop) => None,
            // Nobody wants to wait for the next event to see this one; but one that is the last should say so.
            () = sleep(LAST_WORD), if held.is_some() && replies.is_empty() => {
                if let Some(reply) = held.take() {
                    writer.reply(reply, true).await?;
                }
                continue;
            }
        };
        match (next, held.take()) {
            (Some(reply), before) => {
                if let Some(before) = before {
                    writer.reply(before, true).await?;
                }
                held = Some(reply);
            }
            (None, Some(last)) => return writer.reply(last, false).await,
            (None, None) => return writer.reply(Map::new(), false).await,
        }
    }
}

/// The incoming side, with what was read beyond the last request.
struct Reader {
    reader: OwnedReadHalf,
    buffer: Vec<u8>,
    /// The client sends nothing more; it may still read.
    ended: bool,
    limits: Limits,
}

impl Reader {
    /// The next request without its zero byte; `None` when there is none, or none has come for long.
    async fn request(&mut self) -> io::Result<Option<Box<[u8]>>> {
        let mut searched = 0;
        let mut complete_by = None;
        loop {
            let found = self.buffer[searched..].iter().position(|&byte| byte == 0);
            searched = found.map_or(self.buffer.len(), |end| searched + end);
            if searched > self.limits.request_bytes {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a request is too long"));
            }
            if found.is_some() {
                let request = self.buffer[..searched].into();
                self.buffer.drain(..=searched);
                return Ok(Some(request));
            }
            if self.ended {
                return Ok(None);
            }
            if self.buffer.is_empty() {
                let idle = timeout(self.limits.idle_time, self.fill()).await;
                let Ok(filled) = idle else { return Ok(None) };
                filled?;
            } else {
                // For the whole of it: a byte now and then doesn't buy more time.
                let by = *complete_by.get_or_insert_with(|| Instant::now() + self.limits.request_time);
                timeout_at(by, self.fill()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            }
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        self.ended = self.reader.read_buf(&mut self.buffer).await? == 0;
        Ok(())
    }

    /// Comes back when the client is gone. One that only ended its own sending, as a shell's pipe does, still
    /// reads; what is sent meanwhile is kept for later, up to the size of one request.
    async fn hang_up(&mut self) -> io::Error {
        loop {
            if !self.ended && self.buffer.len() <= self.limits.request_bytes {
                if let Err(error) = self.fill().await {
                    return error;
                }
            } else if self.is_closed() {
                return io::ErrorKind::UnexpectedEof.into();
            } else {
                sleep(GLANCE).await;
            }
        }
    }

    /// Whether the client has closed both directions: then, and only then, unix(7) sockets say POLLHUP.
    fn is_closed(&self) -> bool {
        let mut poll_fd = [PollFd::new(self.reader.as_ref().as_fd(), PollFlags::empty())];
        let closed = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut poll_fd, PollTimeout::ZERO).is_ok()
            && poll_fd[0].revents().is_some_and(|events| events.intersects(closed))
    }
}

/// The outgoing side.
struct Writer {
    writer: OwnedWriteHalf,
    uid: u32,
    unsent: Rc<Unsent>,
    limits: Limits,
}

impl Writer {
    /// Sends a reply, or an error in its place if too many wait already; a stream can't go on after that.
    async fn reply<P: Serialize>(&mut self, parameters: P, continues: bool) -> io::Result<()> {
        let bytes = message(&Response { parameters: &parameters, continues, error: None })?;
        // What is in the message needn't wait for its reader as well.
        drop(parameters);
        let Some(held) = self.unsent.hold(self.uid, bytes.len()) else {
            let busy = "too many replies of pjwd wait to be read by your programs: end those that don't read, or try again later";
            self.error(&CallError::Busy(busy.to_owned())).await?;
            return if continues { Err(too_much()) } else { Ok(()) };
        };
        tokio::select! {
            sent = self.send(&bytes) => sent,
            () = held.given_up() => Err(too_much()),
        }
    }

    async fn error(&mut self, error: &CallError) -> io::Result<()> {
        let (name, parameters) = error.on_the_wire();
        let bytes = message(&Response { parameters: &parameters, continues: false, error: Some(name) })?;
        self.send(&bytes).await
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match timeout(self.limits.write_time, self.writer.write_all(bytes)).await {
            Ok(written) => written,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a reply was not read in time")),
        }
    }
}

/// Made in one go: a reply that can't be serialised must not be half sent.
fn message<P: Serialize>(response: &Response<'_, P>) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(response)?;
    bytes.push(0);
    Ok(bytes)
}

fn too_much() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "too much waits to be read")
}
