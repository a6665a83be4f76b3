//! The channel for the results of a batch, from the spawner threads to the caller: a socket that also carries pidfds.
//!
//! A spawner thread has its own table of descriptors, so a pidfd must be sent. Results are sent in packets of up to
//! [`MAX_RESULTS`], because the caller would be woken for each packet. The socket can be polled.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use pjw_core::ids::Pid;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::child::{Child, end_without_pidfd};
use crate::failure::{SpawnError, SpawnStep};

/// The largest number of results in one [`ResultPacket`], which is a message from a spawner thread. Each result can
/// contain a pidfd. The kernel passes at most 253 descriptors with one message (`SCM_MAX_FD`).
pub(crate) const MAX_RESULTS: usize = 64;
/// The sizes in bytes of one result and of the head of a packet.
const RESULT_BYTES: usize = 16;
const HEAD_BYTES: usize = 24;

/// The result for one instance (process): its index in the list of instances, and the started process or the error.
pub(crate) type InstanceResult = (usize, Result<Child, SpawnError>);

/// The results of a group of instances (processes), in the order of the list of instances. An instance without a stored
/// result has the error `ECANCELED`.
pub(crate) struct ResultsInOrder(Vec<Result<Child, SpawnError>>);

impl ResultsInOrder {
    /// Makes the results of `count` instances, of which none is stored yet.
    pub(crate) fn new(count: usize) -> Self {
        let missing = SpawnError { step: SpawnStep::Clone, errno: Errno::ECANCELED };
        Self((0..count).map(|_| Err(missing)).collect())
    }

    /// Stores the result of one instance.
    pub(crate) fn store(&mut self, (index, result): InstanceResult) {
        if let Some(entry) = self.0.get_mut(index) {
            *entry = result;
        }
    }

    pub(crate) fn into_vec(self) -> Vec<Result<Child, SpawnError>> {
        self.0
    }
}

/// A message from a spawner thread to the thread that reads the results of a batch. The message contains the results of
/// some instances (processes).
#[derive(Debug, Default)]
pub(crate) struct ResultPacket {
    pub(crate) results: Vec<InstanceResult>,
    /// Whether this is the last packet of its spawner.
    pub(crate) is_last: bool,
    /// The begin and the end of the period in which the spawner started instances, as times of `CLOCK_MONOTONIC`.
    pub(crate) start_period: (Duration, Duration),
}

/// Makes a pair of connected sockets. The spawner threads send results to the first socket. The owner of the batch
/// receives the results from the second socket.
pub(crate) fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends `packet` to `socket`. Then removes the results from `packet`, and closes the pidfds in the results. Waits
/// while the socket is full.
pub(crate) fn send_packet(socket: BorrowedFd<'_>, packet: &mut ResultPacket) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + packet.results.len() * RESULT_BYTES);
    bytes.extend_from_slice(&u64::from(packet.is_last).to_ne_bytes());
    bytes.extend_from_slice(&nanoseconds(packet.start_period.0).to_ne_bytes());
    bytes.extend_from_slice(&nanoseconds(packet.start_period.1).to_ne_bytes());
    let mut pidfds = Vec::with_capacity(packet.results.len());
    for (index, result) in &packet.results {
        let (pid, step, errno) = match result {
            Ok(child) => {
                pidfds.push(child.as_fd());
                (child.pid.0, 0, 0)
            }
            Err(SpawnError { step, errno }) => (0, u32::from(step.number()), *errno as i32),
        };
        let words = [u32::try_from(*index).unwrap_or(u32::MAX), pid, step, errno.cast_unsigned()];
        words.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RESULTS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !pidfds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&pidfds));
    }
    let sent = loop {
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            // Too many descriptors were sent and not received yet (unix(7)): the caller must receive some first.
            Err(rustix::io::Errno::TOOMANYREFS) => std::thread::yield_now(),
            other => break other,
        }
    };
    drop(pidfds);
    packet.results.clear();
    sent?;
    Ok(())
}

/// Receives one packet from `socket`. If `wait` is true, waits for the packet. Otherwise returns `None` if no packet
/// has arrived. Also returns `None` if the other socket of the pair is closed.
pub(crate) fn receive_packet(socket: BorrowedFd<'_>, wait: bool) -> io::Result<Option<ResultPacket>> {
    let mut bytes = [0_u8; HEAD_BYTES + MAX_RESULTS * RESULT_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RESULTS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = if wait { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            other => break other?.bytes,
        }
    };
    let mut pidfds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(pidfds) => pidfds.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    if received < HEAD_BYTES {
        return Ok(None);
    }
    let (head, results) = bytes[..received].split_at(HEAD_BYTES);
    let [is_last, begin, end] = [0, 8, 16].map(|at| parse_u64(&head[at..at + 8]));
    let results = results.chunks_exact(RESULT_BYTES).map(|bytes| {
        let [index, pid, step, errno] = [0, 4, 8, 12].map(|at| parse_u32(&bytes[at..at + 4]));
        let result = if pid == 0 {
            let step = SpawnStep::from_number(step as usize).unwrap_or(SpawnStep::Clone);
            Err(SpawnError { step, errno: Errno::from_raw(errno.cast_signed()) })
        } else {
            match pidfds.next() {
                Some(pidfd) => Ok(Child { pid: Pid(pid), pidfd }),
                None => Err(end_unreachable(Pid(pid))),
            }
        };
        (index as usize, result)
    });
    let results = results.collect();
    Ok(Some(ResultPacket {
        results,
        is_last: is_last != 0,
        start_period: (Duration::from_nanos(begin), Duration::from_nanos(end)),
    }))
}

/// Ends the process `pid`, whose pidfd was not received because the table of descriptors is full. Returns the error for
/// this process.
fn end_unreachable(pid: Pid) -> SpawnError {
    end_without_pidfd(pid);
    SpawnError { step: SpawnStep::Clone, errno: Errno::EMFILE }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn parse_u64(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

fn parse_u32(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_ne_bytes)
}
