//! A program that the demo started: its lines, and its end.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::programs::interrupt::Interrupt;

/// How often somebody who waits looks whether the demo was asked to end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A child process. It is killed, by its own process id, when this value goes away.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    lines: Option<Receiver<String>>,
}

impl Program {
    /// Starts a program whose lines are wanted.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(name: &str, command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| {
            format!("can't start {} for {name}: make build", command.get_program().display())
        })?;
        let lines = child.stdout.take().map(|out| {
            let (send, lines) = channel();
            // Ends when the program closes its output, or nobody listens any more.
            thread::spawn(move || {
                BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
            });
            lines
        });
        Ok(Self { name: name.into(), child, lines })
    }

    /// Starts a program that prints `ready` first, and waits for that line.
    ///
    /// # Errors
    /// As [`Program::start`] and [`Program::line`], and if the first line is another one.
    pub fn start_until_ready(
        name: &str,
        command: &mut Command,
        timeout: Duration,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let mut program = Self::start(name, command)?;
        let line = program.read_line(timeout, interrupt)?;
        if line != "ready" {
            bail!("{name} printed {line:?} where it should be ready");
        }
        Ok(program)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that it prints.
    ///
    /// # Errors
    /// If it ends first, if it takes longer than that, or if the demo was asked to end.
    pub fn read_line(&mut self, timeout: Duration, interrupt: &Interrupt) -> anyhow::Result<String> {
        let name = &self.name;
        let deadline = Instant::now() + timeout;
        let lines = self.lines.as_ref().with_context(|| format!("{name} has no output"))?;
        loop {
            interrupt.check()?;
            match lines.recv_timeout(POLL_INTERVAL) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().with_context(|| format!("can't wait for {name}"))?;
                    // Ctrl-C ends the children too, maybe before this program took note of it.
                    thread::sleep(POLL_INTERVAL);
                    interrupt.check()?;
                    bail!("{name} ended too early: {status}");
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                    bail!("{name} said nothing for {} s", timeout.as_secs());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Forgets the lines that it has printed and nobody has read.
    pub fn discard_lines(&mut self) {
        self.lines.iter().for_each(|lines| lines.try_iter().for_each(drop));
    }

    /// How it ended, if it did.
    ///
    /// # Errors
    /// If the system can't tell.
    pub fn exit_status(&mut self) -> anyhow::Result<Option<std::process::ExitStatus>> {
        self.child.try_wait().with_context(|| format!("can't wait for {}", self.name))
    }

    /// Asks it to end (SIGTERM), and kills it if it doesn't in time.
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
        // A child that ended already keeps its number until it was waited for: no other process is hit.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Looks again and again until something is so.
///
/// # Errors
/// If looking fails, if it takes longer than that, or if the demo was asked to end.
pub fn wait_for<T>(
    what: &str,
    timeout: Duration,
    interrupt: &Interrupt,
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
        let _interrupt = Interrupt::install().unwrap();
        let mut program = Program::start("sleep", Command::new("sleep").arg("1000")).unwrap();
        program.terminate(Duration::from_secs(60));
        let status = program.exit_status().unwrap().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGTERM as i32), "{status}");
    }

    #[test]
    fn lines_are_returned_and_an_early_exit_is_an_error() {
        let interrupt = Interrupt::install().unwrap();
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
