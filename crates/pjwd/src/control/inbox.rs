//! The channel from the control server and the signals to the event loop, with an eventfd that wakes the loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_core::command::{Command, Reply};
use pjw_core::job::JobId;
use pjw_core::plan::Warning;
use pjw_core::refusal::Refusal;
use pjw_core::usage::MemoryReading;
use tokio::sync::oneshot;

use super::query::{Query, QueryAnswer};

/// A message from another thread of pjwd to the event loop of pjwd, for example a command of a client or the order to
/// stop.
#[derive(Debug)]
pub enum EventLoopMessage {
    /// Execute a command that changes jobs.
    Command {
        /// The command, with the user who sent it.
        command: Command,
        /// Receives the reply or the refusal. It is sent after the cycle (scan, decision and changes) that
        /// executed the command.
        reply: oneshot::Sender<Result<Reply, Refusal>>,
    },
    /// Answer a query about details that only the event loop has.
    Query {
        /// The query: which details the client requests.
        query: Query,
        /// Receives the answer to the query.
        answer: oneshot::Sender<QueryAnswer>,
    },
    /// Read the configuration file again and apply it.
    Reload {
        /// Receives the list of changed settings. If the new configuration is invalid, receives the error
        /// message instead, and the old configuration stays in force.
        reply: oneshot::Sender<Result<Vec<String>, String>>,
    },
    /// At least one file of the daemon was removed. If a file of the journal is missing, write the journal
    /// again. (The journal has the records of the changes that pjwd makes.)
    CheckJournal,
    /// The memory use of a job was measured.
    MemoryWasRead {
        /// The id of the job.
        job: JobId,
        /// The start time of the job, as the text in the status. It distinguishes the job from a later job with the
        /// same id.
        since: String,
        /// The result of the measurement.
        figures: MemoryReading,
    },
    /// The present warnings of another part of the daemon. They replace all earlier warnings of the same part.
    Warnings {
        /// The part that sends the warnings.
        origin: WarningOrigin,
        /// All of its present warnings.
        warnings: Vec<Warning>,
    },
    /// End the loop. Every job keeps its cores and affinity masks.
    Stop,
}

/// The part of the daemon that sends warnings to the event loop. New warnings of a part replace all earlier warnings
/// of the same part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WarningOrigin {
    /// The startup of the daemon. It warns about problems that the daemon found while it started.
    Start,
    /// The check of the files that the daemon needs, such as its socket. It warns if a file was removed and can't be
    /// created again.
    DaemonFiles,
    /// The memory readings. They warn about predicted memory shortages of jobs.
    Memory,
    /// The check of the config key `admin_groups`. It warns about groups that do not exist.
    AdminGroups,
    /// The reload of the configuration. It warns if the last reload was refused, because the file has mistakes.
    Reload,
}

/// The receiving end of the channel for messages to the event loop of pjwd. Only the event loop has this end. While
/// the channel contains a message, poll(2) on [`MessageReceiver::wake_fd`] returns at once.
#[derive(Debug)]
pub struct MessageReceiver {
    messages: Receiver<EventLoopMessage>,
    wake_up: Arc<EventFd>,
}

/// The sending end of the channel for messages to the event loop of pjwd. Each thread that sends messages can have a
/// clone of its own.
#[derive(Debug, Clone)]
pub struct MessageSender {
    messages: Sender<EventLoopMessage>,
    wake_up: Arc<EventFd>,
}

/// Creates the channel through which other threads send messages to the event loop. Each message wakes the
/// loop through an eventfd.
///
/// # Errors
/// If the eventfd can't be created, for example because the process has no free file descriptor.
pub fn message_channel() -> nix::Result<(MessageSender, MessageReceiver)> {
    let wake_up = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
    let (sender, receiver) = mpsc::channel();
    Ok((
        MessageSender { messages: sender, wake_up: Arc::clone(&wake_up) },
        MessageReceiver { messages: receiver, wake_up },
    ))
}

impl MessageSender {
    /// Sends `message` to the event loop and wakes the loop. Does not block. Returns true if the message was sent.
    /// Returns false if the event loop has ended: the message is then lost.
    #[must_use]
    pub fn send(&self, message: EventLoopMessage) -> bool {
        let sent = self.messages.send(message).is_ok();
        // Writing fails only if the counter is full. The loop is then woken anyway.
        let _ = self.wake_up.write(1);
        sent
    }
}

impl MessageReceiver {
    /// Returns the file descriptor (an eventfd) that poll(2) reports as readable while the channel contains messages.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.as_fd()
    }

    /// Removes all messages from the channel and returns them, oldest first. Does not block.
    pub fn take_messages(&self) -> Vec<EventLoopMessage> {
        // Reset the eventfd first. A message that arrives after this line sets the eventfd again.
        let _ = self.wake_up.read();
        self.messages.try_iter().collect()
    }
}
