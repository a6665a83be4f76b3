//! The signals that go to the instances.
//!
//! pjwctl blocks them, and reads them from a descriptor. Signals that the kernel sends for a key of the terminal, such
//! as Ctrl-C, go to the whole foreground process group, so the instances in this group have got them already. Signals
//! of job control keep their effect on this process.

use anyhow::Context;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// `SI_KERNEL`, sigaction(2).
const FROM_THE_KERNEL: i32 = 0x80;
/// Signals that a terminal sends to its whole foreground process group. Not SIGHUP: if the terminal is closed, the
/// kernel sends it to the leader of the session only, which pjwctl may be (`ssh -t host pjwctl spawn`).
const OF_THE_TERMINAL: [Signal; 3] = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGWINCH];
/// Signals that are not for the instances.
const NOT_FORWARDED: [Signal; 6] =
    [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU, Signal::SIGCONT, Signal::SIGCHLD, Signal::SIGPIPE];
/// Signals that nohup(1), or a shell that starts a command in the background, makes the command ignore. A blocked
/// signal is received also if it is ignored, so an ignored one of these is not blocked.
const IGNORED_BY_NOHUP: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT];
/// Signals after which no more instances are started.
const ENDING: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// A file descriptor from which pjwctl reads the signals that are sent to it (signalfd(2)).
pub(super) struct SignalReader {
    pub(super) descriptor: SignalFd,
    /// The signals that this thread had blocked before.
    blocked_before: SigSet,
}

/// A signal that was sent to pjwctl, and whether pjwctl must pass it to the instances.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReceivedSignal {
    pub(super) number: i32,
    /// Whether the instances in the process group of pjwctl have got it too.
    pub(super) is_from_terminal: bool,
    /// Whether no more instances are to be started.
    pub(super) is_ending: bool,
}

impl SignalReader {
    /// Blocks the signals in this thread, so that pjwctl can read them from a file descriptor. Threads that this
    /// thread starts later also block them. These signals are not blocked:
    ///
    /// - the signals of job control, such as `SIGTSTP`, and `SIGCHLD` and `SIGPIPE`,
    /// - those of `SIGHUP`, `SIGINT` and `SIGQUIT` that are ignored.
    pub(super) fn block_signals() -> anyhow::Result<Self> {
        let mut signals = SigSet::all();
        NOT_FORWARDED.iter().for_each(|signal| signals.remove(*signal));
        let ignored = ignored_signals();
        let is_ignored = |signal: &&Signal| ignored & (1 << (**signal as i32 - 1)) != 0;
        IGNORED_BY_NOHUP.iter().filter(is_ignored).for_each(|signal| signals.remove(*signal));
        let blocked_before =
            signals.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("signals can't be blocked")?;
        let descriptor = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
        let descriptor = descriptor.context("no descriptor for signals can be made")?;
        Ok(Self { descriptor, blocked_before })
    }

    /// Gives the signals the effect on this thread that they had before [`SignalReader::block_signals`].
    pub(super) fn unblock(&self) {
        let _ = self.blocked_before.thread_set_mask();
    }

    /// Returns the next signal that was sent to pjwctl. Does not wait: returns `None` if there is no further signal.
    pub(super) fn next_signal(&self) -> Option<ReceivedSignal> {
        let info = self.descriptor.read_signal().ok().flatten()?;
        let number = i32::try_from(info.ssi_signo).ok()?;
        Some(ReceivedSignal {
            number,
            is_from_terminal: info.ssi_code == FROM_THE_KERNEL && is_one_of(&OF_THE_TERMINAL, number),
            is_ending: is_one_of(&ENDING, number),
        })
    }
}

fn is_one_of(signals: &[Signal], number: i32) -> bool {
    signals.iter().any(|signal| *signal as i32 == number)
}

/// The signals that this process ignores, one bit for each: proc_pid_status(5), `SigIgn`. None if /proc can't be read.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
