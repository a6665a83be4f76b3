//! One connection: requests in, replies out, in order. A request is a JSON object and a zero byte.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::call::{Call, CallError, Reply};
use crate::server::{Answer, Limits, Peer, Service};
use crate::{DESCRIPTION, INTERFACE};

/// So long a reply of a stream may wait to learn whether it is the last.
const LAST_WORD: Duration = Duration::from_millis(5);

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

#[derive(Serialize)]
struct Response<'a, P> {
    parameters: &'a P,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continues: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Tells a client that there is no room, as far as that works without waiting.
pub(crate) fn turn_away(stream: &UnixStream) {
    let (error, parameters) =
        CallError::Busy("too many connections: try again later".to_owned()).on_the_wire();
    let response = json!({ "error": error, "parameters": parameters });
    let _ = stream.try_write(format!("{response}\0").as_bytes());
}

/// Attends to a client until it hangs up, breaks a limit, or the server stops.
pub(crate) async fn attend<S: Service>(
    stream: UnixStream,
    peer: Peer,
    service: Rc<S>,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let (reader, writer) = stream.into_split();
    let mut reader = Reader { reader, buffer: Vec::new(), limits };
    let mut writer = Writer { writer, limits };
    loop {
        let request = tokio::select! {
            request = reader.request() => request?,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        let Some(bytes) = request else { return Ok(()) };
        let Ok(request) = serde_json::from_slice::<Request>(&bytes) else {
            // Nobody knows where the next request would start in garbage.
            let wrong = CallError::InvalidParameter("method".to_owned());
            writer.error(&wrong).await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a Varlink call"));
        };
        let oneway = request.oneway;
        let more = request.more && !oneway;
        match answer(&*service, peer, request).await {
            _ if oneway => {}
            Ok(Said::Plain(parameters)) => writer.reply(&parameters, false).await?,
            Ok(Said::Answer(Answer::Once(reply))) => writer.reply(&reply, false).await?,
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

async fn answer<S: Service>(service: &S, peer: Peer, request: Request) -> Result<Said, CallError> {
    match request.method.strip_prefix("org.varlink.service.") {
        Some("GetInfo") => Ok(Said::Plain(info())),
        Some("GetInterfaceDescription") => description(request.parameters.as_ref()).map(Said::Plain),
        Some(_) => Err(CallError::MethodNotFound(request.method)),
        None => {
            let call = Call::parse(&request.method, request.parameters)?;
            service.call(peer, call, request.more).await.map(Said::Answer)
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

fn description(parameters: Option<&Value>) -> Result<Map<String, Value>, CallError> {
    let wanted = parameters.and_then(|parameters| parameters.get("interface")).and_then(Value::as_str);
    let wanted = wanted.ok_or_else(|| CallError::InvalidParameter("interface".to_owned()))?;
    let text = match wanted {
        INTERFACE => DESCRIPTION,
        "org.varlink.service" => SERVICE_DESCRIPTION,
        other => return Err(CallError::InterfaceNotFound(other.to_owned())),
    };
    Ok(Map::from_iter([("description".to_owned(), Value::from(text))]))
}

/// Sends replies as they come. The client's hang-up ends it at once, also if it has sent further calls meanwhile:
/// those are read, and answered when the stream is over.
async fn stream_replies(
    mut replies: tokio::sync::mpsc::Receiver<Reply>,
    reader: &mut Reader,
    writer: &mut Writer,
    stop: &mut watch::Receiver<bool>,
) -> io::Result<()> {
    // The last one must say that it is the last: one reply is always held back.
    let mut held: Option<Reply> = None;
    loop {
        let next = tokio::select! {
            reply = replies.recv() => reply,
            more = reader.fill() => match more? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => continue,
            },
            _ = stop.wait_for(|stop| *stop) => None,
            // Nobody wants to wait for the next event to see this one; but one that is the last should say so.
            () = tokio::time::sleep(LAST_WORD), if held.is_some() && replies.is_empty() => {
                if let Some(reply) = held.take() {
                    writer.reply(&reply, true).await?;
                }
                continue;
            }
        };
        match (next, held.take()) {
            (Some(reply), before) => {
                if let Some(before) = before {
                    writer.reply(&before, true).await?;
                }
                held = Some(reply);
            }
            (None, Some(last)) => return writer.reply(&last, false).await,
            (None, None) => return writer.reply(&Map::new(), false).await,
        }
    }
}

/// The incoming side, with what was read beyond the last request.
struct Reader {
    reader: OwnedReadHalf,
    buffer: Vec<u8>,
    limits: Limits,
}

impl Reader {
    /// The next request without its zero byte; `None` when the client has hung up.
    async fn request(&mut self) -> io::Result<Option<Box<[u8]>>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&byte| byte == 0) {
                let end = searched + end;
                let request = self.buffer[..end].into();
                self.buffer.drain(..=end);
                return Ok(Some(request));
            }
            searched = self.buffer.len();
            let patience =
                if self.buffer.is_empty() { self.limits.idle_time } else { self.limits.request_time };
            let read =
                timeout(patience, self.fill()).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
            if read? == 0 {
                return Ok(None);
            }
        }
    }

    async fn fill(&mut self) -> io::Result<usize> {
        if self.buffer.len() > self.limits.request_bytes {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a request is too long"));
        }
        self.reader.read_buf(&mut self.buffer).await
    }
}

/// The outgoing side.
struct Writer {
    writer: OwnedWriteHalf,
    limits: Limits,
}

impl Writer {
    async fn reply<P: Serialize>(&mut self, parameters: &P, continues: bool) -> io::Result<()> {
        self.respond(&Response { parameters, continues, error: None }).await
    }

    async fn error(&mut self, error: &CallError) -> io::Result<()> {
        let (name, parameters) = error.on_the_wire();
        self.respond(&Response { parameters: &parameters, continues: false, error: Some(name) }).await
    }

    /// Made in one go: a reply that can't be serialised must not be half sent.
    async fn respond<P: Serialize>(&mut self, response: &Response<'_, P>) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(response)?;
        bytes.push(0);
        self.send(&bytes).await
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match timeout(self.limits.write_time, self.writer.write_all(bytes)).await {
            Ok(written) => written,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a reply was not read in time")),
        }
    }
}
