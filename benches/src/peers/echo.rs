//! The lower limit of the time of a call over a Unix socket: a server that answers each message with the same bytes
//! and computes nothing. A bench starts its own executable again for the server. The main function of the bench calls
//! [`run_as_echo_server`] first.

use std::env;
use std::io::{self, Read, Write, stdout};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const ARGUMENT: &str = "--echo";
const READY_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_CLIENTS: usize = 16;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A running echo server: a process that answers each message on a Unix socket with the same bytes, and computes
/// nothing. Dropping this value kills the process.
#[derive(Debug)]
pub struct EchoServer {
    _program: Program,
    dir: TempDir,
}

impl EchoServer {
    /// Starts an echo server. Each of its replies has `reply_bytes` bytes, including the NUL byte at the end.
    ///
    /// # Errors
    /// If the server can't be started, or if the bench was interrupted.
    pub fn start(reply_bytes: usize, interrupt: &StopSignal) -> anyhow::Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
        command.arg(ARGUMENT).arg(dir.path().join("sock")).arg(reply_bytes.to_string());
        let program = Program::start_until_ready("the echo server", &mut command, READY_TIMEOUT, interrupt)?;
        Ok(Self { _program: program, dir })
    }

    /// Returns the path of the Unix socket on which the echo server listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }
}

/// A connection to a server on a Unix socket. It sends requests and reads replies without parsing them. A reply ends
/// with a NUL byte.
#[derive(Debug)]
pub struct RawClient {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl RawClient {
    /// Connects to the server that listens on the Unix socket at the path `socket`.
    ///
    /// # Errors
    /// If no server listens on this socket.
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("no server listens at {}", socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self { stream, buffer: vec![0; 64 * 1024] })
    }

    /// Sends the bytes `request` to the server and waits for the reply. Returns the length of the reply in bytes,
    /// including the NUL byte at its end.
    ///
    /// # Errors
    /// If the connection fails or is closed, or if no reply arrives within 30 s.
    pub fn call(&mut self, request: &[u8]) -> anyhow::Result<usize> {
        self.stream.write_all(request)?;
        let mut length = 0;
        loop {
            match self.stream.read(&mut self.buffer)? {
                0 => bail!("the connection was closed"),
                read => {
                    length += read;
                    if self.buffer[read - 1] == 0 {
                        return Ok(length);
                    }
                }
            }
        }
    }
}

/// Runs this process as an echo server (a server that answers each message with the same bytes) and does not return, if
/// the arguments of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or if the socket can't be opened.
pub fn run_as_echo_server() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    let socket = arguments.next().context("the socket is missing")?;
    let reply_bytes: usize = arguments.next().context("the length of a reply is missing")?.parse()?;
    let listener = UnixListener::bind(socket).context("can't listen")?;
    writeln!(stdout(), "ready").context("can't write to stdout")?;
    // All threads are started in advance, so no call waits for the start of a thread.
    thread::scope(|scope| {
        for _ in 0..MAX_CLIENTS {
            scope.spawn(|| {
                loop {
                    // The client reports a connection that fails. The server ignores it.
                    let _ = listener.accept().and_then(|(stream, _)| answer_calls(stream, reply_bytes));
                }
            });
        }
    });
    Ok(())
}

/// Answers each call on `stream`, which ends with a zero byte, with a reply of `reply_bytes` bytes. Returns when the
/// client closes the connection.
fn answer_calls(mut stream: UnixStream, reply_bytes: usize) -> io::Result<()> {
    let mut reply = vec![b'x'; reply_bytes.max(1)];
    if let Some(last) = reply.last_mut() {
        *last = 0;
    }
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        for _ in buffer[..read].iter().filter(|&&byte| byte == 0) {
            stream.write_all(&reply)?;
        }
    }
}
