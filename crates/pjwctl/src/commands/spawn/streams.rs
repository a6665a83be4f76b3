//! Standard output and standard error of pjwctl while instances run.
//!
//! A reader that takes no more, such as less(1), must not hold up signals, results and ends of instances. So no write
//! waits: what a stream does not take at once is kept until poll(2) says that it takes more.

use std::io;
use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The largest number of bytes of one write: `PIPE_BUF`. If poll(2) shows a pipe as writable, a write of this size does
/// not wait.
const MAX_WRITE: usize = 4096;

/// Standard output or standard error, with the text that the stream has not taken yet.
pub(super) struct OutputStream {
    pub(super) descriptor: BorrowedFd<'static>,
    text: Vec<u8>,
    /// So many bytes at the begin of `text` are printed.
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
    /// Makes a stream that writes to `descriptor`.
    pub(super) fn new(descriptor: BorrowedFd<'static>) -> Self {
        Self { descriptor, text: Vec::new(), printed: 0, state: StreamState::Open }
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

    /// Prints the text as far as the stream takes it without waiting. Each write ends with a line, unless a line is too
    /// long: lines of several writers are not mixed then.
    ///
    /// # Errors
    /// The first error of write(2) or poll(2). The stream is closed or failed then, and its text is dropped.
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

    fn print_lines(&mut self) -> io::Result<()> {
        while self.is_stalled() && takes_text(self.descriptor, PollTimeout::ZERO)? {
            let rest = &self.text[self.printed..];
            let rest = &rest[..rest.len().min(MAX_WRITE)];
            let lines = rest.iter().rposition(|byte| *byte == b'\n').map_or(rest.len(), |end| end + 1);
            match nix::unistd::write(self.descriptor, &rest[..lines]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.printed += count,
                // Another program that has the same pipe was faster.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

/// Waits until a write to `descriptor` would not wait, at most for `timeout`. Returns whether this is so. An error of
/// the stream counts as such a write too.
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
