//! The endpoint: one request a connection, `GET` or `HEAD` of `/metrics`, everything else refused by the book (RFC 9110,
//! RFC 9112).
//!
//! Whatever a client can use up is bounded by [`Limits`], and each connection is a task of its own: whoever is slow is
//! slow alone, and loses the connection at the deadline.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::warn;

use super::text::Dialect;

/// How long after a failure to accept it is tried again: without a descriptor left every attempt fails at once.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// The most header fields that are read.
const MOST_FIELDS: usize = 64;
/// How much more than its request a client may send before the connection is cut under it. Closing at once would
/// reset the connection, and the refusal might be lost with it.
const MOST_IGNORED: usize = 64 * 1024;

/// What clients may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at a time, over all addresses.
    pub connections: usize,
    /// Bytes of a request's head.
    pub request_bytes: usize,
    /// How long a request may take to arrive.
    pub request_time: Duration,
    /// How long a connection may last.
    pub connection_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            request_bytes: 8 * 1024,
            request_time: Duration::from_secs(5),
            connection_time: Duration::from_secs(10),
        }
    }
}

/// Who knows the text; `None` before there is any.
pub trait Teller: 'static {
    /// The text as of now.
    fn tell(&self, dialect: Dialect) -> Option<Rc<str>>;
}

/// The connections there are, over all addresses.
#[derive(Debug, Clone, Default)]
pub struct Crowd(Rc<Cell<usize>>);

/// A connection's place, free again when this is dropped.
#[derive(Debug)]
struct Admitted(Crowd);

impl Crowd {
    fn admit(&self, most: usize) -> Option<Admitted> {
        (self.0.get() < most).then(|| {
            self.0.set(self.0.get() + 1);
            Admitted(self.clone())
        })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let Crowd(count) = &self.0;
        count.set(count.get().saturating_sub(1));
    }
}

/// Serves for as long as it is polled; dropped, it takes its connections with it. Must run inside a
/// [`tokio::task::LocalSet`].
pub async fn serve<T: Teller>(listener: TcpListener, teller: Rc<T>, limits: Limits, crowd: Crowd) {
    let mut clients = JoinSet::new();
    let mut failing = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                failing = false;
                while clients.try_join_next().is_some() {}
                let Some(admitted) = crowd.admit(limits.connections) else {
                    turn_away(&stream);
                    continue;
                };
                let teller = Rc::clone(&teller);
                clients.spawn_local(async move {
                    let _admitted = admitted;
                    // A client that is late or gone is no news.
                    let _ = timeout(limits.connection_time, attend(stream, &*teller, limits)).await;
                });
            }
            Err(error) => {
                if !failing {
                    warn!(%error, "can't accept connections for metrics; trying again until it works");
                }
                failing = true;
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

/// One connection too many is told so, if that can be done without waiting.
fn turn_away(stream: &TcpStream) {
    let _ = stream.try_write(&Response::refusal(Status::Busy).head_and_body(true));
    // What lies unread when a connection is closed resets it.
    let _ = stream.try_read(&mut [0; 4096]);
}

async fn attend<T: Teller>(mut stream: TcpStream, teller: &T, limits: Limits) -> std::io::Result<()> {
    let mut head = Vec::with_capacity(1024);
    let deadline = Instant::now() + limits.request_time;
    let asked = loop {
        match understand(&head) {
            Understood::Request(request) => break Ok(request),
            Understood::Refused(status) => break Err(status),
            Understood::Unfinished if head.len() >= limits.request_bytes => break Err(Status::TooLarge),
            Understood::Unfinished => {}
        }
        let room = limits.request_bytes - head.len();
        match timeout_at(deadline, (&mut stream).take(room as u64).read_buf(&mut head)).await {
            Err(_) => break Err(Status::TooSlow),
            // Nobody is left to be answered, or never meant to ask.
            Ok(Ok(0)) if head.is_empty() => return Ok(()),
            Ok(Ok(0)) => break Err(Status::Bad),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
        }
    };
    let (response, with_body) = match asked {
        Err(status) => (Response::refusal(status), true),
        Ok(Request { dialect, with_body }) => {
            let text = teller.tell(dialect);
            let response =
                text.map_or_else(|| Response::refusal(Status::NotYet), |text| Response::text(text, dialect));
            (response, with_body)
        }
    };
    stream.write_all(&response.head_and_body(with_body)).await?;
    stream.shutdown().await?;
    let mut ignored = [0; 1024];
    let mut left = MOST_IGNORED;
    while left > 0 {
        match stream.read(&mut ignored).await? {
            0 => break,
            read => left = left.saturating_sub(read),
        }
    }
    Ok(())
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    dialect: Dialect,
    /// Not for `HEAD`.
    with_body: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Understood {
    /// More is to come.
    Unfinished,
    Request(Request),
    Refused(Status),
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Bad,
    NotFound,
    Method,
    TooSlow,
    TooLarge,
    Busy,
    NotYet,
    Version,
}

impl Status {
    /// The status line's end, and what to do.
    fn told(self) -> (&'static str, &'static str) {
        match self {
            Status::Bad => ("400 Bad Request", "this is no HTTP request"),
            Status::NotFound => ("404 Not Found", "there is nothing here but /metrics"),
            Status::Method => {
                ("405 Method Not Allowed", "/metrics can be read with GET and HEAD, and nothing else")
            }
            Status::TooSlow => ("408 Request Timeout", "the request took too long to arrive"),
            Status::TooLarge => ("431 Request Header Fields Too Large", "the request is too large"),
            Status::Busy => ("503 Service Unavailable", "too many connections: try again later"),
            Status::NotYet => ("503 Service Unavailable", "no cycle has run yet: try again in a moment"),
            Status::Version => ("505 HTTP Version Not Supported", "HTTP/1.1 and HTTP/1.0 are spoken here"),
        }
    }
}

/// Reads the head of a request as far as it has arrived.
fn understand(head: &[u8]) -> Understood {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Understood::Unfinished,
        Err(httparse::Error::Version) => return Understood::Refused(Status::Version),
        Err(httparse::Error::TooManyHeaders) => return Understood::Refused(Status::TooLarge),
        Err(_) => return Understood::Refused(Status::Bad),
    }
    let named = |name: &'static str| {
        request.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    let hosts = named("host").count();
    if hosts > 1 || (hosts == 0 && request.version == Some(1)) {
        return Understood::Refused(Status::Bad);
    }
    if request.path.map(path_of) != Some("/metrics") {
        return Understood::Refused(Status::NotFound);
    }
    let with_body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return Understood::Refused(Status::Method),
    };
    let takes_openmetrics =
        named("accept").filter_map(|field| std::str::from_utf8(field.value).ok()).any(accepts);
    let dialect = if takes_openmetrics { Dialect::OpenMetrics } else { Dialect::Classic };
    Understood::Request(Request { dialect, with_body })
}

/// The path of a target: without its question, and without the host that a proxy's client puts before it.
fn path_of(target: &str) -> &str {
    let whole = target.strip_prefix("http://").map(|rest| rest.find('/').map_or("/", |at| &rest[at..]));
    let path = whole.unwrap_or(target);
    path.split('?').next().unwrap_or(path)
}

/// Whether a client takes OpenMetrics, in the version that is written here or in any.
fn accepts(field: &str) -> bool {
    field.split(',').any(|offer| {
        let mut parts = offer.split(';').map(str::trim);
        let is_named =
            parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("application/openmetrics-text"));
        is_named
            && parts.all(|part| match part.split_once('=') {
                Some(("version", version)) => version == "1.0.0",
                Some(("q", weight)) => weight.parse().is_ok_and(|weight: f32| weight > 0.0),
                _ => true,
            })
    })
}

struct Response {
    status: &'static str,
    content_type: &'static str,
    /// Another field of the head, with the end of its line.
    field: &'static str,
    body: Rc<str>,
}

impl Response {
    fn text(body: Rc<str>, dialect: Dialect) -> Self {
        Self { status: "200 OK", content_type: dialect.content_type(), field: "", body }
    }

    fn refusal(status: Status) -> Self {
        let field = match status {
            Status::Method => "Allow: GET, HEAD\r\n",
            Status::Busy | Status::NotYet => "Retry-After: 1\r\n",
            _ => "",
        };
        let (status, told) = status.told();
        Self { status, content_type: "text/plain; charset=utf-8", field, body: format!("{told}\n").into() }
    }

    fn head_and_body(&self, with_body: bool) -> Vec<u8> {
        let Self { status, content_type, field, body } = self;
        let length = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{field}\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        .into_bytes();
        if with_body {
            bytes.extend_from_slice(body.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
#[path = "http/tests.rs"]
mod tests;
