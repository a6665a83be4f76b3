//! A server without a free file descriptor for accept(2) (EMFILE) waits until there is one.
//!
//! The limit of descriptors is that of a process. So the server runs in another process, which is this test program
//! again.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pjw_ipc::client::Client;
use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{TestServer, wait_until};

const SERVER_VARIABLE: &str = "PJW_TEST_FEW_DESCRIPTORS";
const MAX_DESCRIPTORS: u64 = 24;

fn answers(path: &Path) -> bool {
    let client = Client::connect(path);
    client.is_ok_and(|mut client| client.call::<Value>("GetStatus", &json!({})).is_ok())
}

/// The server process of the next test. Without the variable `SERVER_VARIABLE` the function returns at once, and tests
/// nothing.
#[test]
fn server_with_few_descriptors() {
    if std::env::var_os(SERVER_VARIABLE).is_none() {
        return;
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let server = TestServer::start(ServerLimits::default());
    setrlimit(Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS, hard).unwrap();
    println!("\nlistening at {}", server.path().display());
    // Until the test closes the pipe.
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

#[test]
fn a_server_without_free_descriptors_recovers_when_some_are_free() {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "descriptors::server_with_few_descriptors", "--nocapture"])
        .env(SERVER_VARIABLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = lines.find_map(|line| line.unwrap().strip_prefix("listening at ").map(str::to_owned));
    let path = line.expect("the server process prints the path of its socket");
    let path = Path::new(&path);
    assert!(answers(path));

    // More connections than the server has descriptors for: the kernel keeps the rest in its queue.
    let connections: Vec<UnixStream> =
        (0..MAX_DESCRIPTORS * 2).map(|_| UnixStream::connect(path).unwrap()).collect();
    let fds = format!("/proc/{}/fd", process.id());
    let open = || std::fs::read_dir(&fds).unwrap().count();
    wait_until("no descriptor is left", || open() as u64 >= MAX_DESCRIPTORS);
    drop(connections);
    assert!(answers(path), "the server accepts connections again, those in the queue first");

    drop(process.stdin.take());
    // Reads the rest of the output, so that the server is not ended by SIGPIPE.
    lines.for_each(drop);
    assert!(process.wait().unwrap().success());
}
