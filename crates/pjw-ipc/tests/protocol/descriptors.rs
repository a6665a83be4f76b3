//! No file descriptor is left for accept(2) (EMFILE): the server waits and goes on.
//!
//! The limit holds for a whole process, so the server runs in a process of its own: this test program, started again.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pjw_ipc::client::Client;
use pjw_ipc::server::ServerLimits;
use serde_json::{Value, json};

use super::fixture::{Running, until};

const MARK: &str = "PJW_TEST_FEW_DESCRIPTORS";
const FEW: u64 = 24;

fn answers(path: &Path) -> bool {
    let client = Client::connect(path);
    client.is_ok_and(|mut client| client.call::<Value>("GetStatus", &json!({})).is_ok())
}

/// Not a test: the server process of the next test. Without the variable the function returns at once.
#[test]
fn server_with_few_descriptors() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let server = Running::start(ServerLimits::default());
    setrlimit(Resource::RLIMIT_NOFILE, FEW, hard).unwrap();
    println!("\nlistening at {}", server.path().display());
    // Until the test closes the pipe.
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

#[test]
fn a_server_without_free_descriptors_recovers_when_some_are_free() {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "descriptors::server_with_few_descriptors", "--nocapture"])
        .env(MARK, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = lines.find_map(|line| line.unwrap().strip_prefix("listening at ").map(str::to_owned));
    let path = line.expect("the server's process says where it listens");
    let path = Path::new(&path);
    assert!(answers(path));

    // More connections than the server has descriptors for: the kernel keeps the rest in its queue.
    let held: Vec<UnixStream> = (0..FEW * 2).map(|_| UnixStream::connect(path).unwrap()).collect();
    let fds = format!("/proc/{}/fd", process.id());
    let open = || std::fs::read_dir(&fds).unwrap().count();
    until("no descriptor is left", || open() as u64 >= FEW);
    drop(held);
    assert!(answers(path), "it accepts again, and those in the queue before");

    drop(process.stdin.take());
    // Reads the rest of the output, so that the server is not ended by SIGPIPE.
    lines.for_each(drop);
    assert!(process.wait().unwrap().success());
}
