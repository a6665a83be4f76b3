//! The kernel's process events: fork, exec and exit, told over netlink (connector, `CN_IDX_PROC`;
//! `include/uapi/linux/cn_proc.h`).
//!
//! Events are a hint, never the truth: the socket's buffer overruns under a fork storm, and the kernel may lack memory for
//! one. Either is reported, and the caller looks at everything.
//!
//! A subscription that the kernel took proves nothing: in a pid or user namespace of its own a process gets no
//! events, or, if somebody else listens, events with pids of another namespace. So opening ends with a proof: a
//! thread is born, and the kernel must tell of it by its own number.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pjw_core::process::{Pid, Tid};
use pjw_core::snapshot::Nanos;
use thiserror::Error;

mod datagram;

use datagram::{CN_IDX_PROC, CN_VAL_PROC, CONNECTOR_HEADER, NETLINK_HEADER, Numbers};

const PROC_CN_MCAST_LISTEN: u32 = 1;
/// Room for some 50,000 events: with the default buffer a burst of 300 forks is too much.
static BUFFER_BYTES: libc::c_int = 8 << 20;
/// What one call takes from the buffer at most, some milliseconds' worth: a fork storm that writes as fast as it is
/// read must not keep the caller from its other work.
const MOST_AT_ONCE: usize = 8192;
/// How long the proof may take. The event is there before its thread runs; only a storm makes it late.
const PROOF_TIME: Duration = Duration::from_millis(200);

/// Something that happened to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcEvent {
    /// A process was born.
    Fork {
        /// Its parent.
        parent: Pid,
        /// Itself.
        child: Pid,
        /// When, by the clock of [`crate::clock::monotonic`].
        at: Nanos,
    },
    /// A thread was born.
    ThreadBorn {
        /// Its process.
        pid: Pid,
        /// Itself.
        tid: Tid,
    },
    /// A process runs another program.
    Exec {
        /// Which.
        pid: Pid,
    },
    /// A process made a session of its own.
    Session {
        /// Which.
        pid: Pid,
    },
    /// A process ended.
    Exit {
        /// Which.
        pid: Pid,
    },
    /// A thread ended that was not its process's first.
    ThreadExit {
        /// Its process.
        pid: Pid,
        /// Itself.
        tid: Tid,
    },
}

/// What draining the socket found beside events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Whether events were lost: the buffer overran, or their numbers have a gap.
    pub overrun: bool,
    /// Whether the kernel still drops what comes: the buffer overran and was not empty since.
    pub congested: bool,
}

/// Why there are no events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProcEventsFault {
    /// Not for this user.
    #[error("process events need CAP_NET_ADMIN before Linux 6.6")]
    Denied,
    /// Not in this kernel.
    #[error("this kernel has no process events")]
    Unsupported,
    /// The kernel tells nothing of what happens here.
    #[error("the kernel tells no process events in a pid, user or network namespace of its own")]
    Silent,
    /// Something else.
    #[error("process events can't be opened: {0}")]
    Other(Errno),
}

/// A socket on which the kernel tells of every process.
#[derive(Debug)]
pub struct ProcEvents {
    socket: OwnedFd,
    buffer: Vec<u8>,
    numbers: Numbers,
    /// Whether the buffer overran and was not empty since: until then the kernel drops what comes, and says so only once
    /// (`netlink_overrun`).
    congested: bool,
}

impl ProcEvents {
    /// Subscribes, and makes sure that events arrive. What happened until then is not told: look at everything.
    ///
    /// # Errors
    /// If the kernel refuses, has no process events, or tells this process none.
    pub fn open() -> Result<Self, ProcEventsFault> {
        let fault = |errno| match errno {
            Errno::EPERM | Errno::EACCES => ProcEventsFault::Denied,
            Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT | Errno::ENOENT => ProcEventsFault::Unsupported,
            // The kernel's end of the connector is in the first network namespace only.
            Errno::ECONNREFUSED => ProcEventsFault::Silent,
            other => ProcEventsFault::Other(other),
        };
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers; a descriptor that is returned is ours alone.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_CONNECTOR) };
        let fd = Errno::result(fd).map_err(fault)?;
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        bind(&socket).map_err(fault)?;
        enlarge(&socket);
        subscribe(&socket).map_err(fault)?;
        let mut kernel =
            Self { socket, buffer: vec![0; 64 * 1024], numbers: Numbers::default(), congested: false };
        kernel.prove()?;
        Ok(kernel)
    }

    /// Takes the events that are there, without waiting, but not more than a call may: what is left keeps the
    /// descriptor readable.
    pub fn drain(&mut self, events: &mut Vec<ProcEvent>) -> Drained {
        self.take(MOST_AT_ONCE, events)
    }

    fn take(&mut self, at_most: usize, events: &mut Vec<ProcEvent>) -> Drained {
        let mut drained = Drained::default();
        for _ in 0..at_most {
            match receive(&self.socket, &mut self.buffer) {
                Ok((length, true)) => {
                    drained.overrun |= datagram::read(&self.buffer[..length], &mut self.numbers, events);
                }
                // Any process may send to a netlink socket; only the kernel (port 0) is believed.
                Ok((_, false)) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    // Now it ends, and what was lost until now leaves gaps that are no news.
                    if std::mem::take(&mut self.congested) {
                        self.numbers = Numbers::default();
                        drained.overrun = true;
                    }
                    break;
                }
                Err(Errno::ENOBUFS) => {
                    self.congested = true;
                    drained.overrun = true;
                }
                Err(_) => {
                    drained.overrun = true;
                    break;
                }
            }
        }
        Drained { congested: self.congested, ..drained }
    }

    /// Has threads born until the kernel tells of one.
    fn prove(&mut self) -> Result<(), ProcEventsFault> {
        let deadline = Instant::now() + PROOF_TIME;
        let mut born = Vec::new();
        loop {
            let tid = thread_of_ours().map_err(|error| ProcEventsFault::Other(errno_of(&error)))?;
            born.push(ProcEvent::ThreadBorn { pid: Pid(std::process::id()), tid });
            let mut events = Vec::new();
            self.drain(&mut events);
            if events.iter().any(|event| born.contains(event)) {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ProcEventsFault::Silent);
            }
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            // An interrupted wait is a short one.
            let _ = poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout);
        }
    }
}

impl AsFd for ProcEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The number of a thread that has come and gone.
fn thread_of_ours() -> io::Result<Tid> {
    let thread = std::thread::Builder::new().spawn(nix::unistd::gettid)?;
    let tid = thread.join().map_err(|_| io::Error::other("a thread without work panicked"))?;
    Ok(Tid(tid.as_raw().cast_unsigned()))
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

fn bind(socket: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: sockaddr_nl is plain numbers, for which zero is valid.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = u16::try_from(libc::AF_NETLINK).unwrap_or_default();
    address.nl_groups = CN_IDX_PROC;
    let length = u32::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or_default();
    // SAFETY: the address is a live sockaddr_nl of the length that is given.
    let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    Errno::result(done).map(drop)
}

/// Asks for a larger buffer; a smaller one only overruns sooner.
fn enlarge(socket: &OwnedFd) {
    let length = u32::try_from(size_of::<libc::c_int>()).unwrap_or_default();
    for option in [libc::SO_RCVBUF, libc::SO_RCVBUFFORCE] {
        let value = (&raw const BUFFER_BYTES).cast();
        // SAFETY: the value is a live c_int of the length that is given.
        let _ = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, length) };
    }
}

fn subscribe(socket: &OwnedFd) -> Result<(), Errno> {
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
    // SAFETY: the message is a live buffer of the length that is given.
    let sent = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
    Errno::result(sent).map(drop)
}

/// One datagram: its length, and whether the kernel sent it.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<(usize, bool), Errno> {
    // SAFETY: sockaddr_nl is plain numbers, for which zero is valid.
    let mut sender: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = u32::try_from(size_of::<libc::sockaddr_nl>()).unwrap_or_default();
    // SAFETY: buffer and sender are live and as long as the call is told; it writes no more than that.
    let read = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
            (&raw mut sender).cast(),
            &raw mut length,
        )
    };
    let read = usize::try_from(Errno::result(read)?).unwrap_or(0);
    Ok((read, sender.nl_pid == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `None`, with the reason told, where the kernel lets nobody listen.
    fn listener() -> Option<ProcEvents> {
        ProcEvents::open().inspect_err(|fault| skip(&format!("{fault}"))).ok()
    }

    #[test]
    fn a_child_is_heard_of_from_birth_to_death() {
        let Some(mut kernel) = listener() else { return };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid(child.id());
        child.wait().unwrap();
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !events.contains(&ProcEvent::Exit { pid }) {
            assert!(Instant::now() < deadline, "the kernel told nothing of {pid}");
            kernel.drain(&mut events);
            std::thread::yield_now();
        }
        let of_child = |event: &&ProcEvent| match event {
            ProcEvent::Fork { child, .. } => *child == pid,
            ProcEvent::Exec { pid: who } | ProcEvent::Exit { pid: who } => *who == pid,
            _ => false,
        };
        let told: Vec<_> = events.iter().filter(of_child).collect();
        assert!(
            matches!(told[..], [ProcEvent::Fork { .. }, ProcEvent::Exec { .. }, ProcEvent::Exit { .. }]),
            "{told:?}"
        );
    }

    #[test]
    fn others_who_begin_to_listen_are_no_loss() {
        let Some(mut kernel) = listener() else { return };
        let mut events = Vec::new();
        kernel.drain(&mut events);
        let is_lost = |_: &u32| {
            let another = ProcEvents::open();
            // So that a next number is told.
            let _ = thread_of_ours();
            drop(another);
            kernel.drain(&mut events).overrun
        };
        let lost = (0..10).filter(is_lost).count();
        assert!(lost < 5, "{lost} of 10; a storm of another test may be too much once");
    }

    #[test]
    fn a_storm_does_not_keep_the_caller() {
        let Some(mut kernel) = listener() else { return };
        let mut births = 0;
        // Each thread is two events, its birth and its end; the other tests' come on top.
        for _ in 0..MOST_AT_ONCE {
            births += usize::from(thread_of_ours().is_ok());
        }
        let mut events = Vec::new();
        let drained = kernel.drain(&mut events);
        assert_eq!(births, MOST_AT_ONCE);
        assert!(events.len() <= MOST_AT_ONCE, "{}", events.len());
        let readable = poll(&mut [PollFd::new(kernel.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        // A plain user's buffer is smaller than this storm; what was lost is told then.
        assert!(drained.overrun || readable == Ok(1), "what is left is not forgotten");
    }

    #[test]
    fn a_buffer_that_overran_loses_events_until_it_is_empty() {
        let Some(mut kernel) = listener() else { return };
        let few: libc::c_int = 64 << 10;
        let length = u32::try_from(size_of::<libc::c_int>()).unwrap();
        // SAFETY: the value is a live c_int of the length that is given.
        let shrunk = unsafe {
            let value = (&raw const few).cast();
            libc::setsockopt(kernel.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, value, length)
        };
        assert_eq!(shrunk, 0);
        for _ in 0..2000 {
            let _ = thread_of_ours();
        }
        let mut events = Vec::new();
        assert_eq!(kernel.take(4, &mut events), Drained { overrun: true, congested: true });
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut last = Drained { overrun: false, congested: true };
        while last.congested {
            assert!(Instant::now() < deadline, "{} events", events.len());
            last = kernel.take(4, &mut events);
        }
        assert!(last.overrun, "what came until now was lost, and nobody else will say so");
    }

    /// On stderr itself: a test's own output is shown only if it fails.
    fn skip(why: &str) {
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("skipped: {why}\n"));
    }
}
