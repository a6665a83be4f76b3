//! A child process whose lines of output are read, and which is ended with the bench or the demo.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::programs::interrupt::StopSignal;

/// The time between two checks while a function waits.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A child process of the bench or the demo, whose output is read line by line. Dropping this value kills the process.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    lines: Option<Receiver<String>>,
}

impl Program {
    /// Starts the program of `command`, and a thread that reads the lines of its output. `name` is the name of the
    /// program in error messages.
    ///
    /// # Errors
    /// If the program can't be started.
    pub fn start(name: &str, command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| {
            format!("can't start {} for {name}: make build", command.get_program().display())
        })?;
        let lines = child.stdout.take().map(|out| {
            let (send, lines) = channel();
            // The thread ends when the program closes its output, or when the receiver is dropped.
            thread::spawn(move || {
                BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
            });
            lines
        });
        Ok(Self { name: name.into(), child, lines })
    }

    /// Starts the program of `command`, and waits until it prints the line `ready`. This must be its first line. `name`
    /// is the name of the program in error messages.
    ///
    /// # Errors
    /// The errors of [`Program::start`] and [`Program::read_line`]. Also if the first line is not `ready`.
    pub fn start_until_ready(
        name: &str,
        command: &mut Command,
        timeout: Duration,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let mut program = Self::start(name, command)?;
        let line = program.read_line(timeout, interrupt)?;
        if line != "ready" {
            bail!("{name} printed {line:?} instead of \"ready\"");
        }
        Ok(program)
    }

    /// Returns the process id of the program.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next line of the program's output and returns it.
    ///
    /// # Errors
    /// If the program ends, if there is no line within `timeout`, or if the bench was interrupted.
    pub fn read_line(&mut self, timeout: Duration, interrupt: &StopSignal) -> anyhow::Result<String> {
        let name = &self.name;
        let deadline = Instant::now() + timeout;
        let lines = self.lines.as_ref().with_context(|| format!("{name} has no output"))?;
        loop {
            interrupt.check()?;
            match lines.recv_timeout(POLL_INTERVAL) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().with_context(|| format!("can't wait for {name}"))?;
                    // Ctrl-C also ends the children, perhaps before the thread of `StopSignal` runs.
                    thread::sleep(POLL_INTERVAL);
                    interrupt.check()?;
                    bail!("{name} ended too early: {status}");
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                    bail!("{name} printed no line for {} s", timeout.as_secs());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Waits for the next line of the program's output, and returns the line. Returns `None` if no line arrives within
    /// `timeout`, or if the output has ended.
    pub fn try_read_line(&mut self, timeout: Duration) -> Option<String> {
        self.lines.as_ref()?.recv_timeout(timeout).ok()
    }

    /// Discards all lines of the program's output that were printed so far and not read.
    pub fn discard_lines(&mut self) {
        self.lines.iter().for_each(|lines| lines.try_iter().for_each(drop));
    }

    /// Returns the exit status of the program. `None` if the program still runs.
    ///
    /// # Errors
    /// If waitpid(2) fails.
    pub fn exit_status(&mut self) -> anyhow::Result<Option<std::process::ExitStatus>> {
        self.child.try_wait().with_context(|| format!("can't wait for {}", self.name))
    }

    /// Sends SIGTERM to the program and waits for its end. If the program has not ended after `timeout`, kills it.
    pub fn terminate(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        if let (Ok(None), Ok(pid)) = (self.child.try_wait(), i32::try_from(self.child.id())) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL_INTERVAL);
        }
        self.kill();
    }

    fn kill(&mut self) {
        // A child that has ended keeps its process id until it is waited for. So no other process is killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls `poll` every 20 ms until `poll` returns a value, and returns this value. `what` says what is wrong if there is
/// no value in time, such as "pjwd does not answer". The error message begins with this text.
///
/// # Errors
/// The errors of `poll`. Also if `poll` returns no value within `timeout`, or if the bench was interrupted.
pub fn wait_for<T>(
    what: &str,
    timeout: Duration,
    interrupt: &StopSignal,
    mut poll: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        interrupt.check()?;
        if let Some(found) = poll()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what} after {} s", timeout.as_secs());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_dropped_program_is_killed() {
        let program = Program::start("sleep", Command::new("sleep").arg("1000")).unwrap();
        let pid = Pid::from_raw(i32::try_from(program.pid()).unwrap());
        assert_eq!(kill(pid, None), Ok(()));
        drop(program);
        assert!(kill(pid, None).is_err());
    }

    #[test]
    fn terminate_sends_sigterm_first() {
        let _interrupt = StopSignal::install().unwrap();
        let mut program = Program::start("sleep", Command::new("sleep").arg("1000")).unwrap();
        program.terminate(Duration::from_secs(60));
        let status = program.exit_status().unwrap().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGTERM as i32), "{status}");
    }

    #[test]
    fn lines_are_returned_and_an_early_exit_is_an_error() {
        let interrupt = StopSignal::install().unwrap();
        let mut program = Program::start("echo", Command::new("echo").arg("ready")).unwrap();
        assert_eq!(program.read_line(Duration::from_secs(60), &interrupt).unwrap(), "ready");
        let error = program.read_line(Duration::from_secs(60), &interrupt).unwrap_err();
        assert!(error.to_string().contains("echo ended too early"), "{error}");
    }

    #[test]
    fn the_error_names_a_program_that_cannot_be_started() {
        let error = Program::start("x", &mut Command::new("/nowhere/at-all")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at-all"), "{error}");
    }
}
