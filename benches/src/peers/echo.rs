//! The limit of a question over a Unix socket: a server that answers each message with the same bytes and thinks of
//! nothing. The bench program starts itself again for it; its main function calls [`attend`] first.

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

use crate::{programs::interrupt::Interrupt, programs::program::Program};

const ARGUMENT: &str = "--echo";
const READY_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_CLIENTS: usize = 16;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A running server.
#[derive(Debug)]
pub struct EchoServer {
    _program: Program,
    dir: TempDir,
}

impl EchoServer {
    /// Starts one whose answers are so long, with the NUL byte at their end.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(reply_bytes: usize, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("pjw-bench-").tempdir().context("no temporary directory")?;
        let mut command = Command::new(env::current_exe().context("where is this program?")?);
        command.arg(ARGUMENT).arg(dir.path().join("sock")).arg(reply_bytes.to_string());
        let program = Program::start_until_ready("the echo", &mut command, READY_TIMEOUT, interrupt)?;
        Ok(Self { _program: program, dir })
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }
}

/// A connection that asks and reads answers to their NUL byte, without understanding them.
#[derive(Debug)]
pub struct RawClient {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl RawClient {
    /// Connects.
    ///
    /// # Errors
    /// If nobody listens there.
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("nobody at {}", socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self { stream, buffer: vec![0; 64 * 1024] })
    }

    /// Asks, and returns how long the answer is, with the NUL byte.
    ///
    /// # Errors
    /// If there is none.
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

/// If this program was started to be the server, is it, and doesn't come back.
///
/// # Errors
/// If it can't listen.
pub fn run_as_echo_server() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    let socket = arguments.next().context("which socket?")?;
    let reply_bytes: usize = arguments.next().context("how long?")?.parse()?;
    let listener = UnixListener::bind(socket).context("can't listen")?;
    writeln!(stdout(), "ready").context("nobody listens")?;
    // Nobody waits for a thread to be born.
    thread::scope(|scope| {
        for _ in 0..MAX_CLIENTS {
            scope.spawn(|| {
                loop {
                    // A connection that was taken back before it was let in, or that breaks, is its client's to tell.
                    let _ = listener.accept().and_then(|(stream, _)| serve(stream, reply_bytes));
                }
            });
        }
    });
    Ok(())
}

fn serve(mut stream: UnixStream, reply_bytes: usize) -> io::Result<()> {
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
