//! Runs a program, or reads a file, for a limited time: a file system may not respond.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The largest part of the output of a program that is read, in bytes.
const MAX_OUTPUT: u64 = 1 << 20;
/// The time between two checks whether a program that has closed its output has exited.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How a program ended that had a time limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProgramEnd {
    /// The program has exited with this exit code, or `None` if a signal ended it. `output` is what it wrote to the
    /// standard output and to the standard error.
    Exited { code: Option<i32>, output: String },
    /// The program ran longer than the time limit, and was killed.
    TimedOut,
}

/// Runs `program` without an input, and kills it if it runs longer than `limit`. `None` if it can't be run.
pub(super) fn run_with_time_limit(mut program: Command, limit: Duration) -> Option<ProgramEnd> {
    let (reader, writer) = std::io::pipe().ok()?;
    program.stdin(Stdio::null()).stdout(writer.try_clone().ok()?).stderr(writer);
    let deadline = Instant::now() + limit;
    let mut child = program.spawn().ok()?;
    // The output ends when no process has the other end of the pipe open. This value has it open too.
    drop(program);
    let read_output = move || {
        let mut bytes = Vec::new();
        // What was read before an error may be enough.
        let _ = reader.take(MAX_OUTPUT).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let ended = within(limit, read_output)
        .and_then(|output| wait_for_exit(&mut child, deadline).map(|status| (status, output)));
    match ended {
        Ok((status, output)) => Some(ProgramEnd::Exited { code: status.code(), output }),
        Err(error) => {
            // A program that waits for a file system may not end at once, also after SIGKILL. So it is not waited for.
            let _ = child.kill();
            let _ = child.try_wait();
            (error == RecvTimeoutError::Timeout).then_some(ProgramEnd::TimedOut)
        }
    }
}

/// Returns the status with which `child` exits.
///
/// # Errors
/// `Timeout` if it has not exited at the time `deadline`. `Disconnected` if it can't be waited for.
fn wait_for_exit(child: &mut Child, deadline: Instant) -> Result<ExitStatus, RecvTimeoutError> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(EXIT_POLL_INTERVAL),
            Ok(None) => return Err(RecvTimeoutError::Timeout),
            Err(_) => return Err(RecvTimeoutError::Disconnected),
        }
    }
}

/// Returns the result of `work`, which another thread does.
///
/// # Errors
/// `Timeout` if the work takes longer than `limit`. The thread then goes on. `Disconnected` if it can't be started.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RecvTimeoutError> {
    let (sender, result) = mpsc::channel();
    let thread = std::thread::Builder::new().spawn(move || sender.send(work()));
    // The thread is not joined.
    drop(thread);
    result.recv_timeout(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_that_runs_too_long_is_killed_and_another_has_its_output_and_exit_code() {
        let long = Duration::from_secs(60);
        let end = run_with_time_limit(shell("echo a; echo b >&2; cat; exit 3"), long);
        assert_eq!(end, Some(ProgramEnd::Exited { code: Some(3), output: "a\nb\n".to_owned() }));
        let begun = Instant::now();
        // The second program closes its output at once.
        for script in ["exec sleep 60", "exec sleep 60 >/dev/null 2>&1"] {
            let end = run_with_time_limit(shell(script), Duration::from_millis(500));
            assert_eq!(end, Some(ProgramEnd::TimedOut), "{script}");
        }
        assert!(begun.elapsed() < long);
        assert_eq!(run_with_time_limit(Command::new("/nonexistent/program"), long), None);
    }

    #[test]
    fn work_that_takes_too_long_is_not_waited_for() {
        assert_eq!(within(Duration::from_secs(60), || 7), Ok(7));
        let (_open, never) = mpsc::channel::<u8>();
        assert_eq!(within(Duration::from_millis(10), move || never.recv()), Err(RecvTimeoutError::Timeout));
    }
}
