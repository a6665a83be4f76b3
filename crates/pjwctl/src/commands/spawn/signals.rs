//! The signals that go to the instances.
//!
//! They are blocked, and read from a descriptor. Those that the kernel sends for a key of the terminal, such as Ctrl-C,
//! go to the whole foreground process group, so the instances have got them already. Signals of job control keep their
//! effect on this process.

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// `SI_KERNEL`, sigaction(2).
const FROM_THE_KERNEL: i32 = 0x80;
/// Signals that are not for the instances.
const OWN: [Signal; 6] =
    [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU, Signal::SIGCONT, Signal::SIGCHLD, Signal::SIGPIPE];
/// Signals after which no more instances are started.
const ENDING: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// A file descriptor from which pjwctl reads the signals that are sent to it (signalfd(2)).
pub(super) struct SignalReader {
    pub(super) descriptor: SignalFd,
}

/// A signal that was sent to pjwctl, and whether pjwctl must pass it to the instances.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReceivedSignal {
    pub(super) number: i32,
    /// Whether the instances have got it too.
    pub(super) is_from_terminal: bool,
    /// Whether no more instances are to be started.
    pub(super) is_ending: bool,
}

impl SignalReader {
    /// Blocks the signals in this thread, so that pjwctl can read them from a file descriptor. Threads that this thread
    /// starts later also block them. The signals of job control, `SIGCHLD` and `SIGPIPE` are not blocked.
    pub(super) fn block_signals() -> anyhow::Result<Self> {
        let mut signals = SigSet::all();
        OWN.iter().for_each(|signal| signals.remove(*signal));
        signals.thread_block().context("signals can't be blocked")?;
        let descriptor = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
        Ok(Self { descriptor: descriptor.context("no descriptor for signals can be made")? })
    }

    /// Returns the next signal that was sent to pjwctl. Does not wait: returns `None` if there is no further signal.
    pub(super) fn next_signal(&self) -> Option<ReceivedSignal> {
        let info = self.descriptor.read_signal().ok().flatten()?;
        let number = i32::try_from(info.ssi_signo).ok()?;
        Some(ReceivedSignal {
            number,
            is_from_terminal: info.ssi_code == FROM_THE_KERNEL,
            is_ending: ENDING.iter().any(|signal| *signal as i32 == number),
        })
    }
}
