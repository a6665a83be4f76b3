//! Standard output and standard error: how wide, in colour or not, and what to do when nobody reads any more.
//!
//! A reader that has seen enough (`pjwctl events | head -1`) is not an error: the failed write ends the
//! command silently, and [`end_with_reader`] ends one that has nothing to write just then.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use crate::render::Page;
use crate::render::text::printable;

/// Columns where nobody says how wide the page is.
const USUAL_WIDTH: usize = 80;

/// The page that standard output is: the terminal's width and colours, or 80 plain columns.
#[must_use]
pub fn page() -> Page {
    let stdout = io::stdout();
    let colour = anstream::AutoStream::choice(&stdout) != anstream::ColorChoice::Never;
    let columns = rustix::termios::tcgetwinsize(&stdout).map(|size| usize::from(size.ws_col)).unwrap_or(0);
    Page { width: if columns == 0 { USUAL_WIDTH } else { columns }, colour }
}

/// Prints a text.
///
/// # Errors
/// If standard output takes no more; [`is_closed`] tells a reader that left from a full disk.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| if gone(&error) { Closed.into() } else { unwritable(&error) })
}

/// Prints a value as JSON for scripts, indented.
///
/// # Errors
/// As [`print()`].
pub fn print_json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value).context("can't write the answer as JSON")? + "\n"))
}

/// Prints a value as JSON on one line, for a stream of them.
///
/// # Errors
/// As [`print()`].
pub fn print_json_line<T: Serialize>(value: &T) -> anyhow::Result<()> {
    print(&(serde_json::to_string(value).context("can't write the answer as JSON")? + "\n"))
}

/// One line on standard error, whatever the text holds.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "pjwctl: {}", one_line(text));
}

fn one_line(text: &str) -> String {
    text.split_whitespace().map(printable).collect::<Vec<String>>().join(" ")
}

/// The same as a warning in the system's log, which listens at this socket; nothing where it doesn't, or is full.
pub fn log_warning(log: &Path, text: &str) {
    // RFC 3164: facility daemon (3), severity warning (4).
    let message = format!("<28>pjwctl[{}]: {}", std::process::id(), one_line(text));
    let _ = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(message.as_bytes(), log)
    });
}

/// A text of several lines on standard error, made by a program that keeps control characters out of it.
pub fn tell(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Whether the error only says that nobody reads standard output any more.
#[must_use]
pub fn is_closed(error: &anyhow::Error) -> bool {
    error.is::<Closed>()
}

/// Ends this process as soon as the other end of standard output's pipe is closed, for a command that may
/// wait for a long time before it has something to write.
pub fn end_with_reader() {
    if io::stdout().is_terminal() {
        return;
    }
    std::thread::spawn(|| {
        let stdout = io::stdout();
        loop {
            // Nothing is asked for: the kernel reports a closed pipe unasked, and a file never.
            let mut ends = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
            match poll(&mut ends, PollTimeout::NONE) {
                Ok(_) => std::process::exit(0),
                Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    });
}

/// Nobody reads standard output any more.
#[derive(Debug)]
struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl std::error::Error for Closed {}

fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

fn unwritable(error: &io::Error) -> anyhow::Error {
    anyhow::anyhow!("can't write the output: {error}; check where standard output goes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_one_line_in_the_systems_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = UnixDatagram::bind(&path).unwrap();
        log_warning(&path, "first\nsecond");
        let mut buffer = [0u8; 200];
        let length = log.recv(&mut buffer).unwrap();
        let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
        assert_eq!(message, format!("<28>pjwctl[{}]: first second", std::process::id()));
    }

    #[test]
    fn a_log_that_is_not_there_is_not_waited_for() {
        log_warning(Path::new("/nonexistent/log"), "nobody reads this");
    }
}
