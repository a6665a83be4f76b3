//! The server's side of one connection. It reads Varlink requests and sends the replies in the same order. A request is
//! a JSON object and a zero byte.

use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Duration, Instant, sleep, timeout, timeout_at};
use tracing::{debug, info};

use crate::call::{CallError, Reply};
use crate::request::{Content, DescriptionParameters, Request, RequestParser};
use crate::service::{Peer, Replies, ServerLimits, Service};
use crate::slots::{Awaited, Slot};
use crate::unsent::ReplyBudget;
use crate::{INTERFACE_DEFINITION, INTERFACE_NAME};

/// The interface that every Varlink service has.
const SERVICE_DESCRIPTION: &str = "\
# Describes the interfaces of this service.
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

/// The maximum delay of a reply in a stream, to find out whether it is the last one.
const LAST_REPLY_DELAY: Duration = Duration::from_millis(5);
/// The interval of the hang-up checks for a client that has closed its sending side. Such a client sends no data that
/// would show the hang-up.
const HANG_UP_INTERVAL: Duration = Duration::from_millis(250);

/// A Varlink reply or error, as it is sent.
#[derive(Serialize)]
struct Response<'a, P> {
    parameters: &'a P,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continues: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Sends the error `Busy` with the text `why` to a client, before the server closes the connection. Does not wait: if
/// the send buffer of the socket is full, the client gets no error.
pub(crate) fn send_busy_error(stream: &UnixStream, why: &str) {
    let (error, parameters) = CallError::Busy(why.to_owned()).to_varlink();
    let response = json!({ "error": error, "parameters": parameters });
    let _ = stream.try_write(format!("{response}\0").as_bytes());
}

/// The data that the server passes to each connection: the limits for clients, the parser of requests, the limit on the
/// memory for unsent replies, and a value that becomes true when the server stops.
pub(crate) struct ConnectionContext {
    pub(crate) limits: ServerLimits,
    pub(crate) parser: Rc<RequestParser>,
    pub(crate) unsent: Rc<ReplyBudget>,
    /// Becomes true when the server stops.
    pub(crate) stop: watch::Receiver<bool>,
}

/// Answers the calls that a client sends on `stream`. Returns when the client has closed the connection or was idle for
/// too long, or when the server stops. `peer` is the process of the client. `service` computes the replies. Marks the
/// `slot` of the connection as idle while it waits for a request, or for the next reply of a series.
///
/// # Errors
/// If the client exceeds a limit or sends invalid data, or if the connection breaks.
pub(crate) async fn serve_connection<S: Service>(
    stream: &mut UnixStream,
    peer: Peer,
    service: Rc<S>,
    context: ConnectionContext,
    slot: &Slot,
) -> io::Result<()> {
    let ConnectionContext { limits, parser, unsent, mut stop } = context;
    let (reader, writer) = stream.split();
    let mut reader = Reader { reader, buffer: Vec::new(), has_ended: false, limits };
    let mut writer = Writer { writer, uid: peer.uid, unsent, limits };
    loop {
        let idle = slot.mark_idle(Awaited::Request);
        let request = tokio::select! {
            request = reader.next_request() => request?,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        drop(idle);
        let Some(bytes) = request else { return Ok(()) };
        let request = match parser.parse(bytes, peer.is_of_root_or_own_user()).await? {
            Ok(request) => request,
            Err(error) => {
                writer.send_error(&CallError::InvalidParameter("method".to_owned())).await?;
                if error.is_data() {
                    continue;
                }
                // In invalid data the start of the next request cannot be found.
                return Err(io::Error::new(io::ErrorKind::InvalidData, "not a Varlink call"));
            }
        };
        let oneway = request.oneway;
        let more = request.more && !oneway;
        match answer_request(&*service, peer, request, &mut reader).await {
            Ok(Outgoing::Abandoned(end)) => return Err(end),
            _ if oneway => {}
            Ok(Outgoing::Plain(parameters)) => writer.send_reply(parameters, false).await?,
            Ok(Outgoing::Own(Replies::Single(reply))) => writer.send_reply(reply, false).await?,
            Ok(Outgoing::Own(Replies::Stream(_))) if !more => {
                writer.send_error(&CallError::ExpectedMore).await?;
            }
            Ok(Outgoing::Own(Replies::Stream(replies))) => {
                stream_replies(replies, &mut reader, &mut writer, &mut stop, slot).await?;
            }
            Err(error) => writer.send_error(&error).await?,
        }
    }
}

/// The result of a call.
enum Outgoing {
    /// The parameters of a reply of the interface `org.varlink.service`.
    Plain(Map<String, Value>),
    /// A reply, or a series of replies, of pjw's own interface.
    Own(Replies),
    /// No reply, because the client has hung up.
    Abandoned(io::Error),
}

/// Computes the reply to `request` of the client `peer`. `service` answers the calls of pjw's own interface.
///
/// If the client hangs up while `service` works, stops the work and returns [`Outgoing::Abandoned`]. Two kinds of
/// calls are completed nevertheless: oneway calls (calls for which the client expects no reply), and calls for which
/// `is_abandoned_on_disconnect` returns false.
///
/// # Errors
/// The error that is the reply to the client, for example for an unknown method.
async fn answer_request<S: Service>(
    service: &S,
    peer: Peer,
    request: Request,
    reader: &mut Reader<'_>,
) -> Result<Outgoing, CallError> {
    match request.content? {
        Content::Info => Ok(Outgoing::Plain(service_info())),
        Content::Description(parameters) => interface_description(parameters).map(Outgoing::Plain),
        Content::Own(call) => {
            let more = request.more && !request.oneway;
            // The caller of a oneway call may hang up at once.
            if request.oneway || !call.is_abandoned_on_disconnect() {
                return service.call(peer, call, more).await.map(Outgoing::Own);
            }
            if reader.is_closed() {
                log_dropped(peer, &request.method);
                return Ok(Outgoing::Abandoned(io::ErrorKind::UnexpectedEof.into()));
            }
            tokio::select! {
                biased;
                replies = service.call(peer, call, more) => replies.map(Outgoing::Own),
                end = reader.wait_for_hang_up() => Ok(Outgoing::Abandoned(end)),
            }
        }
    }
}

/// Logs that a call is dropped. Calls of users are only debug messages, because they could fill the log.
fn log_dropped(peer: Peer, method: &str) {
    let Peer { uid, pid, .. } = peer;
    if peer.is_of_root_or_own_user() {
        info!(uid, pid, "{method} is dropped: its caller has hung up");
    } else {
        debug!(uid, pid, "{method} is dropped: its caller has hung up");
    }
}

/// Returns the parameters of the reply to `GetInfo`.
fn service_info() -> Map<String, Value> {
    Map::from_iter([
        ("vendor".to_owned(), Value::from("pjw")),
        ("product".to_owned(), Value::from("pjwd, the process jail warden")),
        ("version".to_owned(), Value::from(env!("CARGO_PKG_VERSION"))),
        ("url".to_owned(), Value::from("")),
        ("interfaces".to_owned(), json!(["org.varlink.service", INTERFACE_NAME])),
    ])
}

/// Returns the parameters of the reply to `GetInterfaceDescription`.
fn interface_description(parameters: DescriptionParameters) -> Result<Map<String, Value>, CallError> {
    let text = match parameters.interface.as_str() {
        INTERFACE_NAME => INTERFACE_DEFINITION,
        "org.varlink.service" => SERVICE_DESCRIPTION,
        _ => return Err(CallError::InterfaceNotFound(parameters.interface)),
    };
    Ok(Map::from_iter([("description".to_owned(), Value::from(text))]))
}

/// Sends the replies of a stream (a series of replies to one call) as they arrive in `replies`. Returns after the
/// last reply, or when the server stops (`stop` becomes true). Further calls that the client sends meanwhile are read
/// now, and answered after the stream. Marks `slot` as idle while it waits for a reply.
///
/// # Errors
/// If the client hangs up, or if a reply can't be sent.
async fn stream_replies(
    mut replies: mpsc::Receiver<Reply>,
    reader: &mut Reader<'_>,
    writer: &mut Writer<'_>,
    stop: &mut watch::Receiver<bool>,
    slot: &Slot,
) -> io::Result<()> {
    // The last reply must say that it is the last. So one reply is always held back.
    let mut held: Option<Reply> = None;
    loop {
        // While a reply is held back, the connection is not idle: the reply must be sent.
        let idle = held.is_none().then(|| slot.mark_idle(Awaited::Reply));
        let next = tokio::select! {
            // Replies that are ready when the server stops are sent first.
            biased;
            end = reader.wait_for_hang_up() => return Err(end),
            reply = replies.recv() => reply,
            _ = stop.wait_for(|stop| *stop) => None,
            // The client gets the held reply before the next one is ready, but after a short delay: if the stream ends
            // within the delay, the held reply says so.
            () = sleep(LAST_REPLY_DELAY), if held.is_some() && replies.is_empty() => {
                if let Some(reply) = held.take() {
                    writer.send_reply(reply, true).await?;
                }
                continue;
            }
        };
        drop(idle);
        match (next, held.take()) {
            (Some(reply), earlier) => {
                if let Some(earlier) = earlier {
                    writer.send_reply(earlier, true).await?;
                }
                held = Some(reply);
            }
            (None, Some(last)) => return writer.send_reply(last, false).await,
            (None, None) => return writer.send_reply(Map::new(), false).await,
        }
    }
}

/// The receiving side of a connection, with the bytes that were read after the last request.
struct Reader<'a> {
    reader: ReadHalf<'a>,
    buffer: Vec<u8>,
    /// Whether the client has closed its sending side. The client may still read.
    has_ended: bool,
    limits: ServerLimits,
}

impl Reader<'_> {
    /// Returns the next request, without the zero byte that ends it. `None` if the client has closed its sending
    /// side, or if it sent nothing for the time `idle_timeout`. Fails if the request is too long or takes too long to
    /// arrive, or if the connection breaks.
    async fn next_request(&mut self) -> io::Result<Option<Box<[u8]>>> {
        let mut searched = 0;
        let mut deadline = None;
        loop {
            let end = self.buffer[searched..].iter().position(|&byte| byte == 0);
            searched = end.map_or(self.buffer.len(), |end| searched + end);
            if searched > self.limits.max_request_bytes {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a request is too long"));
            }
            if end.is_some() {
                let request = self.buffer[..searched].into();
                self.buffer.drain(..=searched);
                return Ok(Some(request));
            }
            if self.has_ended {
                return Ok(None);
            }
            if self.buffer.is_empty() {
                let filled = timeout(self.limits.idle_timeout, self.fill()).await;
                let Ok(filled) = filled else { return Ok(None) };
                filled?;
            } else {
                // The limit is for the whole request: single bytes now and then do not extend the time.
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.limits.request_timeout);
                let filled = timeout_at(deadline, self.fill()).await;
                filled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            }
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        self.has_ended = self.reader.read_buf(&mut self.buffer).await? == 0;
        Ok(())
    }

    /// Waits until the client has hung up or the connection breaks, and returns the reason. A client that closed only
    /// its sending side, as a pipe of a shell does, still reads, and has not hung up. Bytes that arrive in the
    /// meantime are kept for later. When more than one request of the maximum size is kept, no more bytes are read.
    async fn wait_for_hang_up(&mut self) -> io::Error {
        loop {
            if !self.has_ended && self.buffer.len() <= self.limits.max_request_bytes {
                if let Err(error) = self.fill().await {
                    return error;
                }
            } else if self.is_closed() {
                return io::ErrorKind::UnexpectedEof.into();
            } else {
                sleep(HANG_UP_INTERVAL).await;
            }
        }
    }

    /// Returns whether the client has closed both directions. Only then a Unix socket reports `POLLHUP`.
    fn is_closed(&self) -> bool {
        let mut poll_fd = [PollFd::new(self.reader.as_ref().as_fd(), PollFlags::empty())];
        let closed = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut poll_fd, PollTimeout::ZERO).is_ok()
            && poll_fd[0].revents().is_some_and(|events| events.intersects(closed))
    }
}

/// The sending side of a connection.
struct Writer<'a> {
    writer: WriteHalf<'a>,
    uid: u32,
    unsent: Rc<ReplyBudget>,
    limits: ServerLimits,
}

impl Writer<'_> {
    /// Sends a reply with `parameters`. `continues` says whether more replies to the same call follow.
    ///
    /// If too many bytes of unsent replies wait already, sends the error `Busy` instead of the reply. The function
    /// then fails if more replies were to follow, which ends the connection.
    ///
    /// # Errors
    /// If the reply is dropped while it waits, to make space for replies to other users. If the client does not read
    /// the reply in time, or if the connection breaks.
    async fn send_reply<P: Serialize>(&mut self, parameters: P, continues: bool) -> io::Result<()> {
        let bytes = message(&Response { parameters: &parameters, continues, error: None })?;
        // The message contains the parameters: free their memory while the message waits.
        drop(parameters);
        let Some(reservation) = self.unsent.reserve(self.uid, bytes.len()) else {
            let busy = "too many replies of pjwd wait to be read by your programs: end the programs that do not read, or try again later";
            self.send_error(&CallError::Busy(busy.to_owned())).await?;
            return if continues { Err(too_many_unsent_bytes()) } else { Ok(()) };
        };
        tokio::select! {
            sent = self.write_in_time(&bytes) => sent,
            () = reservation.wait_until_dropped() => Err(too_many_unsent_bytes()),
        }
    }

    async fn send_error(&mut self, error: &CallError) -> io::Result<()> {
        let (name, parameters) = error.to_varlink();
        let bytes = message(&Response { parameters: &parameters, continues: false, error: Some(name) })?;
        self.write_in_time(&bytes).await
    }

    async fn write_in_time(&mut self, bytes: &[u8]) -> io::Result<()> {
        match timeout(self.limits.write_timeout, self.writer.write_all(bytes)).await {
            Ok(written) => written,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a reply was not read in time")),
        }
    }
}

/// Serialises `response`, and appends the zero byte. The whole response is serialised before it is sent, so that a
/// response that can't be serialised is not sent in part.
fn message<P: Serialize>(response: &Response<'_, P>) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(response)?;
    bytes.push(0);
    Ok(bytes)
}

fn too_many_unsent_bytes() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "too many bytes wait to be read")
}
