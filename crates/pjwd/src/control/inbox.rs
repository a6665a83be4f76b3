//! The channel from the control server and the signals to the event loop, with an eventfd that wakes the loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_core::command::{Command, Reply};
use pjw_core::plan::Warning;
use pjw_core::refusal::Refusal;
use tokio::sync::oneshot;

use super::query::{Answer, Query};

/// A message to the event loop, from another thread of pjwd: a command, a query, the request to reload or to
/// stop, or news about removed files of the daemon.
#[derive(Debug)]
pub enum Message {
    /// Execute a command.
    Command {
        /// The command.
        command: Command,
        /// Receives the result after the cycle that executed the command.
        reply: oneshot::Sender<Result<Reply, Refusal>>,
    },
    /// Answer a query from the state of the loop.
    Query {
        /// The query.
        query: Query,
        /// Receives the answer.
        answer: oneshot::Sender<Answer>,
    },
    /// Load the configuration again.
    Reload {
        /// Receives the list of changes, or why the old configuration stays in force.
        reply: oneshot::Sender<Result<Vec<String>, String>>,
    },
    /// Check whether the journal is still in place: files of the daemon were removed.
    CheckJournal,
    /// These warnings about files of the daemon are in force. They replace the earlier ones.
    FileWarnings(Vec<Warning>),
    /// Stop the loop. Every job stays as it is.
    Stop,
}

/// The receiving end of the message channel, in the event loop. While a message waits in it, the loop's
/// poll(2) returns at once.
#[derive(Debug)]
pub struct Inbox {
    messages: Receiver<Message>,
    wake_up: Arc<EventFd>,
}

/// The sending end of the message channel to the event loop. It can be cloned so that several threads send.
#[derive(Debug, Clone)]
pub struct Outbox {
    messages: Sender<Message>,
    wake_up: Arc<EventFd>,
}

/// Creates the channel through which other threads send messages to the event loop. Each message wakes the loop through
/// an eventfd.
///
/// # Errors
/// If the process has no file descriptor left for the eventfd.
pub fn message_channel() -> nix::Result<(Outbox, Inbox)> {
    let wake_up = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
    let (sender, receiver) = mpsc::channel();
    Ok((Outbox { messages: sender, wake_up: Arc::clone(&wake_up) }, Inbox { messages: receiver, wake_up }))
}

impl Outbox {
    /// Sends a message to the event loop and wakes it. Returns false if the event loop has ended; the message is then
    /// lost.
    #[must_use]
    pub fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        // Writing fails only if the counter is full. The loop is then woken anyway.
        let _ = self.wake_up.write(1);
        sent
    }
}

impl Inbox {
    /// Returns the file descriptor (an eventfd) that poll(2) reports as readable while messages wait in the inbox.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.as_fd()
    }

    /// Removes the waiting messages from the inbox and returns them, oldest first. Does not block.
    pub fn take_messages(&self) -> Vec<Message> {
        // Reset the eventfd first. A message that arrives after this line sets the eventfd again.
        let _ = self.wake_up.read();
        self.messages.try_iter().collect()
    }
}
