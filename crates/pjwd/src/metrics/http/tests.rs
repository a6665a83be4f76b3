//! The endpoint from the side of clients: valid, slow and hostile ones.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream as Client};
use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use super::*;

const PATIENT: Duration = Duration::from_secs(60);
/// Long limits: a test that depends on a deadline would hang, which would be noticed.
const LIMITS: HttpLimits = HttpLimits {
    max_connections: 3,
    max_request_bytes: 1024,
    request_timeout: PATIENT,
    connection_timeout: PATIENT,
};

struct Text(Option<String>);

impl MetricsSource for Text {
    fn text(&self, format: MetricsFormat) -> Option<Rc<str>> {
        self.0.as_ref().map(|text| format!("{format:?} {text}\n").into())
    }
}

/// A server on a thread of its own, on a port of the loopback address.
struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(text: Option<&str>, limits: HttpLimits) -> Self {
        let text = text.map(ToOwned::to_owned);
        let (address_sender, address) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                address_sender.send(listener.local_addr().unwrap()).unwrap();
                tokio::select! {
                    () = serve_http(listener, Rc::new(Text(text)), limits, ConnectionCount::default()) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { address: address.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }

    fn connect(&self) -> Client {
        let client = Client::connect(self.address).unwrap();
        client.set_read_timeout(Some(PATIENT)).unwrap();
        client
    }

    /// Whether the request gets a response with this status within a minute. A place is free only when the server has
    /// seen the end of the connection before. A program that another test starts has a copy of the client's end until
    /// it is executed.
    fn responds_in_time(&self, request: &[u8], expected: &str) -> bool {
        (0..12_000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            status(&self.ask(request)) == expected
        })
    }

    /// The whole response, until the connection is closed.
    fn ask(&self, request: &[u8]) -> String {
        let mut client = self.connect();
        // A rejected client may be disconnected before it has sent everything.
        let _ = client.write_all(request);
        rest(client)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn rest(mut client: Client) -> String {
    let mut bytes = Vec::new();
    // The connection may end in a reset. The bytes before the reset count.
    let _ = client.read_to_end(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

fn get(target: &str, fields: &str) -> Vec<u8> {
    format!("GET {target} HTTP/1.1\r\nHost: here\r\n{fields}\r\n").into_bytes()
}

fn status(response: &str) -> &str {
    response.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.split(' ').next()).unwrap_or(response)
}

#[test]
fn a_response_has_content_type_and_length() {
    let server = Server::start(Some("text"), LIMITS);
    for target in ["/metrics", "/metrics?x=1", "http://there:1/metrics"] {
        let response = server.ask(&get(target, ""));
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{target}: {head}");
        assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
        assert!(
            head.contains("\r\nContent-Length: 13\r\n") && head.contains("\r\nConnection: close"),
            "{head}"
        );
        assert_eq!(body, "Classic text\n");
    }
    let old = server.ask(b"GET /metrics HTTP/1.0\r\n\r\n");
    assert!(old.ends_with("Classic text\n"), "HTTP/1.0 needs no Host: {old}");
}

#[test]
fn head_responds_without_a_body() {
    let server = Server::start(Some("text"), LIMITS);
    let response = server.ask(b"HEAD /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    assert!(response.contains("\r\nContent-Length: 13\r\n") && response.ends_with("\r\n\r\n"), "{response}");
}

#[test]
fn a_request_may_come_in_pieces() {
    let server = Server::start(Some("text"), LIMITS);
    let mut client = server.connect();
    for byte in get("/metrics", "Accept: */*\r\n") {
        client.write_all(&[byte]).unwrap();
    }
    assert_eq!(status(&rest(client)), "200");
}

#[test]
fn a_client_that_accepts_openmetrics_gets_openmetrics() {
    let server = Server::start(Some("text"), LIMITS);
    let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    for (accept, expected) in [
        (prometheus, "OpenMetrics"),
        ("application/openmetrics-text", "OpenMetrics"),
        ("text/plain, Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", "OpenMetrics"),
        ("application/openmetrics-text;version=0.0.1", "Classic"),
        ("application/openmetrics-text;q=0", "Classic"),
        ("application/openmetrics-text;q=x", "Classic"),
        ("*/*", "Classic"),
        ("text/html", "Classic"),
    ] {
        let response = server.ask(&get("/metrics", &format!("Accept: {accept}\r\n")));
        assert!(response.ends_with(&format!("\r\n\r\n{expected} text\n")), "{accept}: {response}");
    }
    let response = server.ask(&get("/metrics", "Accept: application/openmetrics-text\r\n"));
    assert!(response.contains("Content-Type: application/openmetrics-text; version=1.0.0;"), "{response}");
}

#[test]
fn other_requests_are_refused_with_the_right_status() {
    let server = Server::start(Some("text"), LIMITS);
    let long = format!("GET /{} HTTP/1.1\r\nHost: here\r\n\r\n", "x".repeat(5000));
    let fields = format!("GET /metrics HTTP/1.1\r\nHost: here\r\n{}\r\n", "A: b\r\n".repeat(70));
    for (request, expected) in [
        ("GET / HTTP/1.1\r\nHost: here\r\n\r\n", "404"),
        ("GET /metrics/ HTTP/1.1\r\nHost: here\r\n\r\n", "404"),
        ("GET /../etc/passwd HTTP/1.1\r\nHost: here\r\n\r\n", "404"),
        ("GET http://here HTTP/1.1\r\nHost: here\r\n\r\n", "404"),
        ("POST / HTTP/1.1\r\nHost: here\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\nabc", "405"),
        ("OPTIONS /metrics HTTP/1.1\r\nHost: here\r\n\r\n", "405"),
        ("get /metrics HTTP/1.1\r\nHost: here\r\n\r\n", "405"),
        ("GET /metrics HTTP/1.1\r\n\r\n", "400"),
        ("GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400"),
        ("GET /metrics HTTP/1.1\r\nHost : here\r\n\r\n", "400"),
        ("GET /metrics\r\n\r\n", "400"),
        ("\u{16}\u{3}\u{1}\u{0}\u{1}\r\n\r\n", "400"),
        ("GET /metrics HTTP/2.0\r\n\r\n", "505"),
        (&long, "431"),
        (&fields, "431"),
    ] {
        let response = server.ask(request.as_bytes());
        assert_eq!(status(&response), expected, "{request:?}: {response}");
        assert!(!response.contains("text\n\n") && response.contains("Connection: close"), "{response}");
    }
    let refused = server.ask(b"DELETE /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    assert!(refused.contains("\r\nAllow: GET, HEAD\r\n"), "{refused}");
    assert_eq!(status(&server.ask(&get("/metrics", ""))), "200", "it serves on");
}

#[test]
fn before_the_first_cycle_the_response_is_503_with_retry_after() {
    let server = Server::start(None, LIMITS);
    let response = server.ask(&get("/metrics", ""));
    assert!(status(&response) == "503" && response.contains("\r\nRetry-After: 1\r\n"), "{response}");
}

#[test]
fn an_incomplete_request_gets_400_and_an_empty_one_no_response() {
    let server = Server::start(Some("text"), LIMITS);
    for (sent, expected) in [("GET /metr", "400"), ("", "")] {
        let mut client = server.connect();
        client.write_all(sent.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(status(&rest(client)), expected);
    }
}

#[test]
fn a_slow_client_delays_no_other_and_is_disconnected() {
    let short = HttpLimits { request_timeout: Duration::from_secs(2), ..LIMITS };
    let server = Server::start(Some("text"), short);
    let mut slow = server.connect();
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    assert_eq!(status(&server.ask(&get("/metrics", ""))), "200", "others don't wait");
    assert_eq!(status(&rest(slow)), "408");
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let short = HttpLimits { max_connections: 1, connection_timeout: Duration::from_millis(200), ..LIMITS };
    // More than the socket buffers of both sides hold.
    let server = Server::start(Some(&"x".repeat(64 << 20)), short);
    let mut deaf = server.connect();
    deaf.write_all(&get("/metrics", "")).unwrap();
    // The slot is free again only after the deadline has closed the connection.
    assert!(server.responds_in_time(b"GET / HTTP/1.0\r\n\r\n", "404"), "its place is another's");
}

#[test]
fn one_connection_too_many_gets_503() {
    let server = Server::start(Some("text"), LIMITS);
    let mut held: Vec<Client> = (0..3).map(|_| server.connect()).collect();
    assert_eq!(status(&rest(server.connect())), "503");
    let mut freed = held.pop().unwrap();
    freed.write_all(&get("/metrics", "")).unwrap();
    assert_eq!(status(&rest(freed)), "200", "those who came first are served");
    drop(held);
    assert!(server.responds_in_time(&get("/metrics", ""), "200"), "places come free");
}
