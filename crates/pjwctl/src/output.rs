//! Standard output and standard error: width, colours, and closed pipes.
//!
//! A reader that closes the pipe early (`pjwctl events | head -1`) is not an error: the failed write ends the command
//! silently. [`exit_when_stdout_reader_closes`] ends a command that has nothing to write at that moment.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use thiserror::Error;

use crate::{cli::JsonArg, render::Terminal, render::text::escape_control_characters};

/// The path of the Unix socket of the system log (syslog).
pub const SYSTEM_LOG: &str = "/dev/log";
/// The number of columns if the width is unknown.
const DEFAULT_WIDTH: usize = 80;

/// Returns the properties of standard output: the width of its terminal in columns, and whether text that is printed
/// there can have colours. If standard output is no terminal, or if the width is unknown, the width is 80 columns.
#[must_use]
pub fn stdout_properties() -> Terminal {
    let stdout = io::stdout();
    let has_colours = anstream::AutoStream::choice(&stdout) != anstream::ColorChoice::Never;
    let columns = rustix::termios::tcgetwinsize(&stdout).map(|size| usize::from(size.ws_col)).unwrap_or(0);
    Terminal { width: if columns == 0 { DEFAULT_WIDTH } else { columns }, has_colours }
}

/// Prints `text` to standard output unchanged, and adds no line break.
///
/// # Errors
/// If standard output cannot be written. If the reason is that the reader closed the pipe, [`is_closed_pipe`] is true
/// for the error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.flush().and_then(|()| write_all_waiting(stdout.as_fd(), text.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ClosedPipe.into(),
        _ => anyhow!("can't write the output: {error}; check the target of standard output"),
    })
}

/// Writes all of `bytes` to `descriptor`, without a buffer. If the pipe or terminal behind the descriptor is full,
/// waits until it accepts more bytes. Waits also if the flag `O_NONBLOCK` is set. Another program that uses the same
/// pipe or terminal may have set this flag.
///
/// # Errors
/// The first error of write(2) or poll(2) other than `EAGAIN` and `EINTR`. `WriteZero` if write(2) writes 0 bytes. A
/// part of the bytes may be written then.
pub fn write_all_waiting(descriptor: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match nix::unistd::write(descriptor, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::EAGAIN) => {
                let mut room = [PollFd::new(descriptor, PollFlags::POLLOUT)];
                match poll(&mut room, PollTimeout::NONE) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Prints `value` to standard output as indented JSON on several lines.
///
/// # Errors
/// If `value` cannot be converted to JSON, or if standard output cannot be written.
pub fn print_json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value).context("can't write the reply as JSON")? + "\n"))
}

/// Prints a reply of the daemon to standard output. With the command line option `--json`, prints `reply` as indented
/// JSON. Otherwise calls `format_text` with the reply and the properties of the terminal, and prints the returned
/// text. Returns the exit code for success.
///
/// # Errors
/// If `reply` cannot be converted to JSON, or if standard output cannot be written.
pub fn print_reply<T: Serialize>(
    json: JsonArg,
    reply: &T,
    format_text: impl FnOnce(&T, Terminal) -> String,
) -> anyhow::Result<ExitCode> {
    if json.json {
        print_json(reply)?;
    } else {
        print(&format_text(reply, stdout_properties()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints `value` to standard output as JSON on a single line. Commands that print a series of values use this
/// function.
///
/// # Errors
/// If `value` cannot be converted to JSON, or if standard output cannot be written.
pub fn print_json_line<T: Serialize>(value: &T) -> anyhow::Result<()> {
    print(&(serde_json::to_string(value).context("can't write the reply as JSON")? + "\n"))
}

/// Prints the error message `message` to standard error, as one line that begins with `pjwctl: `. Control characters
/// in the message are escaped. A failure to print is ignored.
pub fn print_error(message: &str) {
    let _ = write_all_waiting(io::stderr().as_fd(), error_line(message).as_bytes());
}

/// Returns the line that [`print_error`] prints for `message`: with `pjwctl: ` at its start and a line break at its
/// end.
#[must_use]
pub fn error_line(message: &str) -> String {
    format!("pjwctl: {}\n", one_line(message))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().map(escape_control_characters).collect::<Vec<String>>().join(" ")
}

/// Sends `warning` to the system log with the severity warning (`LOG_WARNING`, syslog(3)). `log_socket` is the path of
/// the Unix socket of the system log, such as /dev/log. If the socket does not exist or is full, the warning is lost.
pub fn log_warning(log_socket: &Path, warning: &str) {
    // RFC 3164: facility daemon (3), severity warning (4).
    log_line(log_socket, 28, warning);
}

/// Sends `text` to the system log with the severity informational (`LOG_INFO`, syslog(3)). `log_socket` is the path of
/// the Unix socket of the system log, such as /dev/log. If the socket does not exist or is full, the text is lost.
pub fn log_info(log_socket: &Path, text: &str) {
    // RFC 3164: facility daemon (3), severity informational (6).
    log_line(log_socket, 30, text);
}

fn log_line(log_socket: &Path, priority: u32, text: &str) {
    let message = format!("<{priority}>pjwctl[{}]: {}", std::process::id(), one_line(text));
    let _ = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(message.as_bytes(), log_socket)
    });
}

/// Prints `text`, which can have several lines, to standard error without changes. Control characters in the text
/// must already be escaped. A failure to print is ignored.
pub fn print_escaped_error(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Returns whether `error` comes from [`print()`] and means that the reader of standard output has closed the pipe.
/// Users do not need to see this error.
#[must_use]
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.is::<ClosedPipe>()
}

/// Starts a thread that ends this process with exit code 0 as soon as the reader of standard output closes the pipe.
/// Does nothing if standard output is a terminal. Commands such as `pjwctl events --follow` need this thread, because
/// they can wait for a long time between two outputs. Without the thread, such a command would notice the closed pipe
/// only at its next output.
pub fn exit_when_stdout_reader_closes() {
    if io::stdout().is_terminal() {
        return;
    }
    std::thread::spawn(|| {
        let stdout = io::stdout();
        loop {
            // No events are requested. The kernel reports a closed pipe in any case, and reports nothing for a file.
            let mut ends = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
            match poll(&mut ends, PollTimeout::NONE) {
                Ok(_) => std::process::exit(0),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    });
}

/// The reader of standard output has closed the pipe.
#[derive(Debug, Error)]
#[error("the reader of the output has closed the pipe")]
struct ClosedPipe;

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
        log_info(&path, "one line\n");
        let length = log.recv(&mut buffer).unwrap();
        let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
        assert_eq!(message, format!("<30>pjwctl[{}]: one line", std::process::id()));
    }

    #[test]
    fn a_log_that_is_not_there_is_not_waited_for() {
        log_warning(Path::new("/nonexistent/log"), "nobody reads this");
    }
}
