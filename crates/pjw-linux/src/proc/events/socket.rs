//! The netlink socket that receives process events.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pjw_core::ids::{Pid, Tid};
use pjw_core::snapshot::ProcessEvent;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::datagram::{self, CN_IDX_PROC, CN_VAL_PROC, CONNECTOR_HEADER, NETLINK_HEADER, SequenceNumbers};
use super::event::{EventLoss, ProcEventsError};
use crate::sys::{
    clock,
    errno::{from_io, from_rustix},
};

const PROC_CN_MCAST_LISTEN: u32 = 1;
/// Room for about 50,000 events. The default buffer overruns at 300 forks in a row.
const BUFFER_BYTES: usize = 8 << 20;
/// The maximum number of messages per call, some milliseconds of work. Events that arrive as fast as they are
/// read must not block the caller.
const MAX_MESSAGES_PER_DRAIN: usize = 8192;
/// Maximum duration of the delivery check. The kernel sends the event before the thread runs; only many other
/// events delay it.
const VERIFY_TIMEOUT: Duration = Duration::from_millis(200);

/// A netlink socket on which the kernel reports each fork, exec and exit of a process (the proc connector).
#[derive(Debug)]
pub struct ProcEventSocket {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// The sequence numbers of the last events. A gap means that events were lost.
    numbers: SequenceNumbers,
    /// Whether the receive buffer of the socket has overflowed and has not been empty since the overflow. From the
    /// overflow until the buffer is empty, the kernel drops all new events. The kernel reports an overflow only once
    /// (`netlink_overrun` in net/netlink/af_netlink.c).
    congested: bool,
}

impl ProcEventSocket {
    /// Opens a socket that receives process events (fork, exec and exit) from the kernel. As a test, starts
    /// threads, and waits at most 200 ms until the kernel reports the start of one of them. The kernel does not
    /// report processes that were started before this call. To find these processes, the caller must scan all
    /// processes after this call.
    ///
    /// # Errors
    /// If the kernel refuses the subscription to process events, has no process events, or delivers none to
    /// this process.
    pub fn open() -> Result<Self, ProcEventsError> {
        let refusal = |error| match from_rustix(error) {
            Errno::EPERM | Errno::EACCES => ProcEventsError::PermissionDenied,
            Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT | Errno::ENOENT => ProcEventsError::Unsupported,
            // The kernel's end of the connector exists only in the initial network namespace.
            Errno::ECONNREFUSED => ProcEventsError::NoEvents,
            other => ProcEventsError::Other(other),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connector = Some(net::netlink::CONNECTOR);
        let socket =
            net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, connector).map_err(refusal)?;
        net::bind(&socket, &SocketAddrNetlink::new(0, CN_IDX_PROC)).map_err(refusal)?;
        enlarge(&socket);
        net::send(&socket, &subscription_message(), SendFlags::empty()).map_err(refusal)?;
        let mut event_socket = Self {
            socket,
            buffer: vec![0; 64 * 1024],
            numbers: SequenceNumbers::default(),
            congested: false,
        };
        event_socket.verify_delivery()?;
        Ok(event_socket)
    }

    /// Reads the pending process events (fork, exec and exit) from this socket, and appends the events to
    /// `events`. Returns whether events were lost. Does not wait. Reads at most 8192 messages in one call.
    /// Further messages stay in the socket for the next call, and poll(2) still shows the socket as readable.
    pub fn drain_events(&mut self, events: &mut Vec<ProcessEvent>) -> EventLoss {
        let first_new = events.len();
        let loss = self.receive_messages(MAX_MESSAGES_PER_DRAIN, events);
        // The kernel dates events by a clock that stops while the machine is suspended.
        let suspended = clock::now().since_boot.0.saturating_sub(clock::monotonic_now().0);
        for event in &mut events[first_new..] {
            if let ProcessEvent::Fork { at, .. } = event {
                at.0 += suspended;
            }
        }
        loss
    }

    /// Receives up to `max_messages` messages, and appends their events to `events`. Does not wait. Returns whether
    /// events were lost, and whether the kernel still drops events. Unlike [`ProcEventSocket::drain_events`], leaves
    /// the times of forks as the kernel reported them.
    fn receive_messages(&mut self, max_messages: usize, events: &mut Vec<ProcessEvent>) -> EventLoss {
        let mut loss = EventLoss::default();
        for _ in 0..max_messages {
            match receive(&self.socket, &mut self.buffer) {
                Ok((length, true)) => {
                    loss.events_lost |=
                        datagram::parse_datagram(&self.buffer[..length], &mut self.numbers, events);
                }
                // Any process may send to a netlink socket. Only messages of the kernel are used.
                Ok((_, false)) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    // The buffer is empty now. The gaps that the overrun left in the numbers are already
                    // reported.
                    if std::mem::take(&mut self.congested) {
                        self.numbers = SequenceNumbers::default();
                        loss.events_lost = true;
                    }
                    break;
                }
                Err(Errno::ENOBUFS) => {
                    self.congested = true;
                    loss.events_lost = true;
                }
                Err(_) => {
                    loss.events_lost = true;
                    break;
                }
            }
        }
        EventLoss { still_dropping: self.congested, ..loss }
    }

    /// Checks that process events arrive: starts threads until the event of one of them arrives, for up to 200 ms.
    /// Drops all events that arrive meanwhile.
    ///
    /// # Errors
    /// [`ProcEventsError::NoEvents`] if no such event arrives in this time. [`ProcEventsError::Other`] if a thread
    /// can't be started.
    fn verify_delivery(&mut self) -> Result<(), ProcEventsError> {
        let deadline = Instant::now() + VERIFY_TIMEOUT;
        let mut forks = Vec::new();
        loop {
            let tid = spawn_thread().map_err(|error| ProcEventsError::Other(from_io(error)))?;
            forks.push(ProcessEvent::ThreadFork { pid: Pid(std::process::id()), tid });
            let mut events = Vec::new();
            self.drain_events(&mut events);
            if events.iter().any(|event| forks.contains(event)) {
                return Ok(());
            }
            let time_left = deadline.saturating_duration_since(Instant::now());
            if time_left.is_zero() {
                return Err(ProcEventsError::NoEvents);
            }
            let timeout = PollTimeout::try_from(time_left).unwrap_or(PollTimeout::ZERO);
            // An interrupted wait only ends earlier.
            let _ = poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout);
        }
    }
}

impl AsFd for ProcEventSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Starts a thread, waits for its end, and returns its id.
fn spawn_thread() -> io::Result<Tid> {
    let thread = std::thread::Builder::new().spawn(nix::unistd::gettid)?;
    let tid = thread.join().map_err(|_| io::Error::other("a thread without work panicked"))?;
    Ok(Tid(tid.as_raw().cast_unsigned()))
}

/// Requests a larger receive buffer. A smaller buffer only overruns sooner.
fn enlarge(socket: &OwnedFd) {
    let _ = sockopt::set_socket_recv_buffer_size(socket, BUFFER_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size_force(socket, BUFFER_BYTES);
}

/// Returns the netlink message that requests process events from the kernel.
fn subscription_message() -> Vec<u8> {
    let mut message = Vec::with_capacity(NETLINK_HEADER + CONNECTOR_HEADER + 4);
    let total = u32::try_from(NETLINK_HEADER + CONNECTOR_HEADER + 4).unwrap_or_default();
    message.extend(total.to_ne_bytes());
    message.extend(u16::try_from(libc::NLMSG_DONE).unwrap_or_default().to_ne_bytes());
    message.extend([0; 10]); // flags, sequence, port
    message.extend(CN_IDX_PROC.to_ne_bytes());
    message.extend(CN_VAL_PROC.to_ne_bytes());
    message.extend([0; 8]); // sequence, acknowledgement
    message.extend(4u16.to_ne_bytes());
    message.extend([0; 2]); // flags
    message.extend(PROC_CN_MCAST_LISTEN.to_ne_bytes());
    message
}

/// Receives one datagram: its length, and whether the kernel (port 0) sent it.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<(usize, bool), Errno> {
    let (length, _, sender) = net::recvfrom(socket, buffer, RecvFlags::empty()).map_err(from_rustix)?;
    let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
    Ok((length, sender.is_some_and(|sender| sender.pid() == 0)))
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    /// Serialises the tests: the thousands of events of one test would fill the socket of another one. The socket of a
    /// plain user has room for some hundreds.
    static ALONE: Mutex<()> = Mutex::new(());

    /// `None` if this kernel or user has no process events. Prints the reason.
    fn listener() -> Option<(MutexGuard<'static, ()>, ProcEventSocket)> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let event_socket = ProcEventSocket::open().inspect_err(|fault| skip(&format!("{fault}"))).ok()?;
        Some((alone, event_socket))
    }

    /// Starts a child, and returns its events. `None` if events were lost: other tests cause thousands at a time.
    fn events_of_child(event_socket: &mut ProcEventSocket) -> Option<Vec<ProcessEvent>> {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid(child.id());
        let (mut events, mut is_lost) = (Vec::new(), false);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_lost && !events.contains(&ProcessEvent::Exit { pid }) {
            assert!(Instant::now() < deadline, "no exit event of {pid}");
            is_lost = event_socket.drain_events(&mut events).events_lost;
            std::thread::yield_now();
        }
        child.wait().unwrap();
        let is_of_child = |event: &ProcessEvent| match event {
            ProcessEvent::Fork { child, .. } => *child == pid,
            ProcessEvent::Exec { pid: of } | ProcessEvent::Exit { pid: of } => *of == pid,
            _ => false,
        };
        (!is_lost).then(|| events.into_iter().filter(is_of_child).collect())
    }

    #[test]
    fn a_child_is_reported_from_fork_to_exit() {
        let Some((_alone, mut event_socket)) = listener() else { return };
        let of_child = crate::tests::until("no event is lost", || events_of_child(&mut event_socket));
        assert!(
            matches!(
                of_child[..],
                [ProcessEvent::Fork { .. }, ProcessEvent::Exec { .. }, ProcessEvent::Exit { .. }]
            ),
            "{of_child:?}"
        );
    }

    #[test]
    fn another_subscriber_causes_no_loss() {
        let Some((_alone, mut event_socket)) = listener() else { return };
        let mut events = Vec::new();
        event_socket.drain_events(&mut events);
        let is_lost = |_: &u32| {
            let another = ProcEventSocket::open();
            // The new thread causes a message with the next number.
            let _ = spawn_thread();
            drop(another);
            event_socket.drain_events(&mut events).events_lost
        };
        let lost = (0..10).filter(is_lost).count();
        assert!(lost < 5, "{lost} of 10; a storm of another test may be too much once");
    }

    #[test]
    fn many_events_do_not_block_the_caller() {
        let Some((_alone, mut event_socket)) = listener() else { return };
        let mut started = 0;
        // Each thread causes two events, fork and exit. Other tests cause more.
        for _ in 0..MAX_MESSAGES_PER_DRAIN {
            started += usize::from(spawn_thread().is_ok());
        }
        let mut events = Vec::new();
        let drained = event_socket.drain_events(&mut events);
        assert_eq!(started, MAX_MESSAGES_PER_DRAIN);
        assert!(events.len() <= MAX_MESSAGES_PER_DRAIN, "{}", events.len());
        let readable = poll(&mut [PollFd::new(event_socket.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        // The buffer of a plain user is smaller than these events; then the loss is reported.
        assert!(
            drained.events_lost || readable == Ok(1),
            "the remaining messages stay readable or the loss is reported"
        );
    }

    #[test]
    fn an_overrun_buffer_loses_events_until_it_is_empty() {
        let Some((_alone, mut event_socket)) = listener() else { return };
        sockopt::set_socket_recv_buffer_size(&event_socket.socket, 64 << 10).unwrap();
        for _ in 0..2000 {
            let _ = spawn_thread();
        }
        let mut events = Vec::new();
        let loss = event_socket.receive_messages(4, &mut events);
        assert_eq!(loss, EventLoss { events_lost: true, still_dropping: true });
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut last = EventLoss { events_lost: false, still_dropping: true };
        while last.still_dropping {
            assert!(Instant::now() < deadline, "{} events", events.len());
            last = event_socket.receive_messages(4, &mut events);
        }
        assert!(last.events_lost, "the loss until now is reported");
    }

    /// Writes to stderr directly: a test's own output is shown only if it fails.
    fn skip(why: &str) {
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("skipped: {why}\n"));
    }
}
