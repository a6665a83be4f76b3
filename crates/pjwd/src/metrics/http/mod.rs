//! The HTTP endpoint: one request per connection, `GET` or `HEAD` of `/metrics`. Other requests are refused as RFC
//! 9110 and RFC 9112 demand.
//!
//! [`HttpLimits`] bounds what a client can use. Each connection is a task, so a slow client delays no other client and
//! is disconnected at the deadline.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::warn;

use super::text::MetricsFormat;

/// The delay after a failed accept. Without a free file descriptor, every accept fails at once.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The largest number of header fields.
const MAX_HEADER_FIELDS: usize = 64;
/// How many bytes after the request are read and dropped before the connection is closed. Closing at once would reset
/// the connection, and the client might not receive the response.
const MAX_DRAINED_BYTES: usize = 64 * 1024;

/// The limits that protect the HTTP server for metrics from its clients: the number and the duration of connections,
/// and the size of requests.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// The maximum number of open connections, summed over all addresses at which the server listens.
    pub max_connections: usize,
    /// The maximum size of a request line together with its headers, in bytes.
    pub max_request_bytes: usize,
    /// The maximum time from the start of a connection until its request has arrived completely. A slower
    /// client gets an error response.
    pub request_timeout: Duration,
    /// The maximum duration of a connection. After this time, the server closes the connection, even if the
    /// response is not sent completely.
    pub connection_timeout: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_connections: 16,
            max_request_bytes: 8 * 1024,
            request_timeout: Duration::from_secs(5),
            connection_timeout: Duration::from_secs(10),
        }
    }
}

/// The source of the metrics text that the HTTP server for metrics sends. The server calls the source for each
/// request.
pub trait MetricsSource: 'static {
    /// Returns the current metrics text in the given format. Returns `None` if no metrics are available, for example
    /// shortly after the start of the daemon.
    fn text(&self, format: MetricsFormat) -> Option<Rc<str>>;
}

/// The number of open connections of the HTTP server for metrics, summed over all addresses at which the server
/// listens. All clones of a value share one number.
#[derive(Debug, Clone, Default)]
pub struct ConnectionCount(Rc<Cell<usize>>);

/// One open connection. Dropping the value frees the slot.
#[derive(Debug)]
struct ConnectionSlot(ConnectionCount);

impl ConnectionCount {
    /// Takes a slot for one more connection. `None` if `max_connections` connections are open.
    fn admit(&self, max_connections: usize) -> Option<ConnectionSlot> {
        (self.0.get() < max_connections).then(|| {
            self.0.set(self.0.get() + 1);
            ConnectionSlot(self.clone())
        })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let ConnectionCount(count) = &self.0;
        count.set(count.get().saturating_sub(1));
    }
}

/// Serves the metrics text of `source` over HTTP to the clients that connect to `listener`, at the path /metrics.
/// Runs until the future is dropped, which closes the connections that `listener` accepted. Must run inside a
/// [`tokio::task::LocalSet`].
///
/// `connections` counts the open connections over all addresses: all calls of this function must get clones of the
/// same value. `limits` contains the maximum number of open connections. A connection above the maximum gets the
/// response 503.
pub async fn serve_http<T: MetricsSource>(
    listener: TcpListener,
    source: Rc<T>,
    limits: HttpLimits,
    connections: ConnectionCount,
) {
    let mut clients = JoinSet::new();
    let mut is_failing = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                is_failing = false;
                while clients.try_join_next().is_some() {}
                let Some(slot) = connections.admit(limits.max_connections) else {
                    reject(&stream);
                    continue;
                };
                let source = Rc::clone(&source);
                clients.spawn_local(async move {
                    let _slot = slot;
                    // A slow or closed connection is not an error.
                    let _ =
                        timeout(limits.connection_timeout, handle_connection(stream, &*source, limits)).await;
                });
            }
            Err(error) => {
                if !is_failing {
                    warn!(%error, "can't accept connections for metrics; retrying until it works");
                }
                is_failing = true;
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Answers a connection above the maximum number with 503, if that does not block.
fn reject(stream: &TcpStream) {
    let _ = stream.try_write(&Response::refusal(Refusal::TooManyConnections).head_and_body(true));
    // Unread bytes would reset the connection on close.
    let _ = stream.try_read(&mut [0; 4096]);
}

/// Answers one HTTP request on `stream` with the metrics text of `source`, or with an error status. Then closes the
/// sending side, and drops up to [`MAX_DRAINED_BYTES`] bytes that the client still sends, because unread bytes would
/// reset the connection. Does nothing if the client sends no request. Fails if the connection breaks.
async fn handle_connection<T: MetricsSource>(
    mut stream: TcpStream,
    source: &T,
    limits: HttpLimits,
) -> std::io::Result<()> {
    let mut head = Vec::with_capacity(1024);
    let deadline = Instant::now() + limits.request_timeout;
    let request = loop {
        match parse_head(&head) {
            Parsed::Request(request) => break Ok(request),
            Parsed::Refused(status) => break Err(status),
            Parsed::Partial if head.len() >= limits.max_request_bytes => break Err(Refusal::HeadTooLarge),
            Parsed::Partial => {}
        }
        let room = limits.max_request_bytes - head.len();
        match timeout_at(deadline, (&mut stream).take(room as u64).read_buf(&mut head)).await {
            Err(_) => break Err(Refusal::RequestTimeout),
            // The client closed the connection without a request.
            Ok(Ok(0)) if head.is_empty() => return Ok(()),
            Ok(Ok(0)) => break Err(Refusal::BadRequest),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
        }
    };
    let (response, with_body) = match request {
        Err(status) => (Response::refusal(status), true),
        Ok(Request { format, with_body }) => {
            let text = source.text(format);
            let response = text.map_or_else(
                || Response::refusal(Refusal::NoMetricsYet),
                |text| Response::text(text, format),
            );
            (response, with_body)
        }
    };
    stream.write_all(&response.head_and_body(with_body)).await?;
    stream.shutdown().await?;
    let mut ignored = [0; 1024];
    let mut remaining = MAX_DRAINED_BYTES;
    while remaining > 0 {
        match stream.read(&mut ignored).await? {
            0 => break,
            read => remaining = remaining.saturating_sub(read),
        }
    }
    Ok(())
}

/// A valid request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    format: MetricsFormat,
    /// False for `HEAD`.
    with_body: bool,
}

/// The result of parsing the request head that has arrived so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parsed {
    /// The request head is incomplete.
    Partial,
    Request(Request),
    Refused(Refusal),
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    BadRequest,
    InvalidHost,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    HeadTooLarge,
    TooManyConnections,
    NoMetricsYet,
    VersionNotSupported,
}

impl Refusal {
    /// Returns the status code with its reason phrase, and the response body.
    fn status_line_and_body(self) -> (&'static str, &'static str) {
        match self {
            Refusal::BadRequest => ("400 Bad Request", "this is not an HTTP request"),
            Refusal::InvalidHost => ("400 Bad Request", "the request must have exactly one Host field"),
            Refusal::NotFound => ("404 Not Found", "only /metrics exists"),
            Refusal::MethodNotAllowed => ("405 Method Not Allowed", "/metrics allows only GET and HEAD"),
            Refusal::RequestTimeout => ("408 Request Timeout", "the request took too long to arrive"),
            Refusal::HeadTooLarge => ("431 Request Header Fields Too Large", "the request is too large"),
            Refusal::TooManyConnections => {
                ("503 Service Unavailable", "too many connections: try again later")
            }
            Refusal::NoMetricsYet => {
                ("503 Service Unavailable", "no cycle has run yet: try again in a moment")
            }
            Refusal::VersionNotSupported => {
                ("505 HTTP Version Not Supported", "only HTTP/1.1 and HTTP/1.0 are supported")
            }
        }
    }
}

/// Parses `head`, the bytes of the request head that have arrived so far. Returns [`Parsed::Partial`] if the head is
/// not complete. Refuses a head that is not a valid request for `/metrics`.
fn parse_head(head: &[u8]) -> Parsed {
    let mut fields = [httparse::EMPTY_HEADER; MAX_HEADER_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Parsed::Partial,
        Err(httparse::Error::Version) => return Parsed::Refused(Refusal::VersionNotSupported),
        Err(httparse::Error::TooManyHeaders) => return Parsed::Refused(Refusal::HeadTooLarge),
        Err(_) => return Parsed::Refused(Refusal::BadRequest),
    }
    let fields_named = |name: &'static str| {
        request.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    let hosts = fields_named("host").count();
    if hosts > 1 || (hosts == 0 && request.version == Some(1)) {
        return Parsed::Refused(Refusal::InvalidHost);
    }
    if request.path.map(path_of) != Some("/metrics") {
        return Parsed::Refused(Refusal::NotFound);
    }
    let with_body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return Parsed::Refused(Refusal::MethodNotAllowed),
    };
    let mut accept_values = fields_named("accept").filter_map(|field| std::str::from_utf8(field.value).ok());
    let takes_openmetrics = accept_values.any(accepts_openmetrics);
    let format = if takes_openmetrics { MetricsFormat::OpenMetrics } else { MetricsFormat::Classic };
    Parsed::Request(Request { format, with_body })
}

/// The path of a request target, without the query and without scheme and host.
fn path_of(target: &str) -> &str {
    let path_and_query = match target.strip_prefix("http://") {
        Some(host_and_path) => host_and_path.find('/').map_or("/", |at| &host_and_path[at..]),
        None => target,
    };
    path_and_query.split('?').next().unwrap_or(path_and_query)
}

/// Returns whether the client accepts the OpenMetrics format, in version 1.0.0 or in any version. `field` is the
/// value of an Accept field. An offer with the weight 0 (`q=0`) does not count.
fn accepts_openmetrics(field: &str) -> bool {
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

/// An HTTP response.
struct Response {
    status: &'static str,
    content_type: &'static str,
    /// One more header field with its line end, or empty.
    extra_field: &'static str,
    body: Rc<str>,
}

impl Response {
    fn text(body: Rc<str>, format: MetricsFormat) -> Self {
        Self { status: "200 OK", content_type: format.content_type(), extra_field: "", body }
    }

    fn refusal(refusal: Refusal) -> Self {
        let extra_field = match refusal {
            Refusal::MethodNotAllowed => "Allow: GET, HEAD\r\n",
            Refusal::TooManyConnections | Refusal::NoMetricsYet => "Retry-After: 1\r\n",
            _ => "",
        };
        let (status, body) = refusal.status_line_and_body();
        let content_type = "text/plain; charset=utf-8";
        Self { status, content_type, extra_field, body: format!("{body}\n").into() }
    }

    /// Returns the whole response as bytes. Leaves out the body if `with_body` is false, as for the method `HEAD`.
    fn head_and_body(&self, with_body: bool) -> Vec<u8> {
        let Self { status, content_type, extra_field, body } = self;
        let length = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{extra_field}\
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
mod tests;
