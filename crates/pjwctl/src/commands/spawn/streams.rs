//! Standard output and standard error of pjwctl while instances run.
//!
//! A reader that takes no more, such as less(1), must not hold up signals, results and ends of instances. So no write
//! waits: what a stream does not take at once is kept until poll(2) says that it takes more.
//!
//! For a pipe that is enough. A terminal takes more if there is room for one byte, and a write then waits until there
//! is room for all: if the terminal was stopped by Ctrl-S or its program reads nothing. So pjwctl opens a terminal
//! again with `O_NONBLOCK`. It can't set this flag of the stream itself, because other programs, such as the shell, use
//! the same stream.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::{Mode, OFlags};

/// The largest number of bytes of one write: `PIPE_BUF`. If poll(2) shows a pipe as writable, a write of this size does
/// not wait.
const MAX_WRITE: usize = 4096;

/// The major number of `/dev/tty`, `/dev/console` and `/dev/ptmx` (`TTYAUX_MAJOR` in linux/major.h). If one of these is
/// opened again, that may be another terminal.
const CHANGING_TERMINALS: u32 = 5;

/// Standard output or standard error, with the text that the stream has not taken yet.
pub(super) struct OutputStream {
    inherited: BorrowedFd<'static>,
    /// The same terminal, opened again so that a write does not wait. `None` for another stream, or if that failed.
    nonblocking: Option<OwnedFd>,
    text: Vec<u8>,
    /// The number of bytes at the beginning of `text` that are printed.
    printed: usize,
    pub(super) state: StreamState,
}

/// Whether a stream takes text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamState {
    /// It takes text, now or later.
    Open,
    /// Its reader has closed its pipe. Text is dropped.
    Closed,
    /// A write has failed for another reason. Text is dropped.
    Failed,
}

impl OutputStream {
    /// Makes a stream that writes to `inherited`, or to the terminal that `inherited` is.
    pub(super) fn new(inherited: BorrowedFd<'static>) -> Self {
        let nonblocking = open_terminal_again(inherited);
        Self { inherited, nonblocking, text: Vec::new(), printed: 0, state: StreamState::Open }
    }

    /// Returns the descriptor to which the stream writes. poll(2) on it reports when the stream takes more.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.nonblocking.as_ref().map_or(self.inherited, AsFd::as_fd)
    }

    /// Adds `text`, which [`OutputStream::print`] prints. Drops `text` if the stream takes no text any more.
    pub(super) fn add(&mut self, text: &[u8]) {
        if self.state == StreamState::Open {
            self.text.extend_from_slice(text);
        }
    }

    /// Returns whether there is text that the stream has not taken yet.
    pub(super) fn is_stalled(&self) -> bool {
        self.printed < self.text.len()
    }

    /// Writes as much of the text as the stream accepts without waiting. Each write ends with a complete line, so
    /// that lines of several writers are not mixed. Only a line of more than [`MAX_WRITE`] bytes is written in
    /// pieces.
    ///
    /// # Errors
    /// The first error of write(2) or poll(2). All text of the stream is then dropped, also text that is added later.
    pub(super) fn print(&mut self) -> io::Result<()> {
        let result = self.print_lines();
        if let Err(error) = &result {
            let is_closed = error.kind() == io::ErrorKind::BrokenPipe;
            self.drop_text(if is_closed { StreamState::Closed } else { StreamState::Failed });
        }
        if !self.is_stalled() {
            self.text.clear();
            self.printed = 0;
        }
        result
    }

    /// Drops the text that the stream has not taken, and everything that is added later.
    pub(super) fn drop_text(&mut self, state: StreamState) {
        self.text.clear();
        self.printed = 0;
        self.state = state;
    }

    /// Writes the text in pieces of at most [`MAX_WRITE`] bytes, and counts the written bytes in `printed`. Returns
    /// when everything is written, or when the stream accepts no more text without waiting.
    fn print_lines(&mut self) -> io::Result<()> {
        while self.is_stalled() && takes_text(self.descriptor(), PollTimeout::ZERO)? {
            let pending = &self.text[self.printed..];
            let piece = &pending[..pending.len().min(MAX_WRITE)];
            let length = piece.iter().rposition(|byte| *byte == b'\n').map_or(piece.len(), |end| end + 1);
            match nix::unistd::write(self.descriptor(), &piece[..length]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.printed += count,
                Err(Errno::EINTR) => {}
                // Another program that has the same pipe or terminal was faster, or a terminal has room for less than
                // the next character needs.
                Err(Errno::EAGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

/// Opens the terminal that `stream` is once more, so that writes to it do not wait. `None` if `stream` is no terminal,
/// or if the terminal can't be opened, as after su(1).
fn open_terminal_again(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let device = rustix::fs::fstat(stream).ok()?.st_rdev;
    if !rustix::termios::isatty(stream) || rustix::fs::major(device) == CHANGING_TERMINALS {
        return None;
    }
    let path = format!("/proc/self/fd/{}", stream.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Waits until `descriptor` accepts text, at most for the time `timeout`. Returns false if this time has passed. Also
/// returns true if the next write would fail at once, for example because the reader has closed the pipe.
pub(super) fn takes_text(descriptor: BorrowedFd<'_>, timeout: PollTimeout) -> io::Result<bool> {
    let mut room = [PollFd::new(descriptor, PollFlags::POLLOUT)];
    loop {
        match poll(&mut room, timeout) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
