//! What the host gets for each task: a request in a buffer that both processes see, and a message with descriptors.
//!
//! A request begins with a [`RequestHeader`]. The words of the mask, the working directory, and the strings of the task
//! follow. Several requests may be on their way, one after the other in the buffer. The message contains the offset of
//! its request. When the tasks of all requests that have come have begun, the host answers these requests by one
//! message. At its start, each task writes its process id into its request. So the parent can find the task if the host
//! is killed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use pjw_core::ids::Pid;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::failure::SpawnStep;
use crate::own_policy::MemoryPolicy;
use crate::signals::KernelSignals;

/// The maximum number of requests to start a task that can be sent without an answer. The host answers at most this
/// number of requests by one message. The kernel counts the sent file descriptors (at most four for each request) as
/// open descriptors of the user, unix(7).
pub(crate) const MAX_PENDING_REQUESTS: usize = 32;
/// The size of the buffer. All strings of a program have at most 6 MiB, execve(2).
const BUFFER_BYTES: usize = 8 << 20;
/// The time for which a refused answer is sent again. After that, the host ends the tasks that the answer is about.
const MAX_SEND_TIME: Duration = Duration::from_secs(10);

/// The part of fixed size in a request to start a task. The host (the process that reads the request) is a fork of the
/// process that writes the request, so this type has the same layout in both.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestHeader {
    pub(super) rank: u32,
    /// The process id of the task. The task writes it before it does anything else. 0 until then.
    pub(super) task: u32,
    pub(super) argument_count: usize,
    pub(super) variable_count: usize,
    /// The size of the affinity mask in 64-bit words. 0 if the task has the mask of the host.
    pub(super) mask_words: usize,
    pub(super) policy: Option<MemoryPolicy>,
    /// Which of the standard streams (input, output, error) are sent with the message as descriptors.
    pub(super) streams: [bool; 3],
    pub(super) has_cgroup: bool,
    /// The process id of the process whose end also ends the task. 0 if there is no such process.
    pub(super) launcher: i32,
    pub(super) blocked_signals: KernelSignals,
    pub(super) descriptor_limit: Option<(u64, u64)>,
    /// The size of the path of the working directory in bytes, with its NUL byte. 0 if the task has the working
    /// directory of the host.
    pub(super) directory_bytes: usize,
    /// The size of the arguments, the variables and the path of the program in bytes.
    pub(super) string_bytes: usize,
    /// The name of the task in /proc/PID/comm, with NUL bytes at the end.
    pub(super) name: [u8; 16],
}

/// A buffer in shared memory, in which the calling process writes requests to start tasks. The host (a fork of this
/// process) reads the requests. Dropping this value unmaps the memory.
#[derive(Debug)]
pub(super) struct RequestBuffer {
    at: *mut u8,
    /// The bytes of the requests that are on their way.
    used: usize,
}

// SAFETY: the buffer is memory like that of a Box, and only one thread has the value.
unsafe impl Send for RequestBuffer {}

impl RequestBuffer {
    /// Maps the memory of a new buffer.
    ///
    /// # Errors
    /// The error of mmap(2).
    pub(super) fn new() -> Result<Self, Errno> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses a range that nothing else uses.
        let at = unsafe { libc::mmap(ptr::null_mut(), BUFFER_BYTES, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(Self { at: at.cast(), used: 0 }) }
    }

    /// Returns the address of the buffer.
    pub(super) fn address(&self) -> *mut u8 {
        self.at
    }

    /// Removes all requests from the buffer, so the next request is written at offset 0. All requests that were sent
    /// must have been answered.
    pub(super) fn clear(&mut self) {
        self.used = 0;
    }

    /// Writes a request behind the earlier requests in the buffer. `header` is the part of fixed size, `mask` the
    /// affinity mask, and `directory` the working directory. `strings` contains the arguments, the variables and the
    /// path of the program. Returns the offset of the request in the buffer.
    ///
    /// # Errors
    /// `E2BIG` if the rest of the buffer is too small for the request.
    pub(super) fn write(
        &mut self,
        header: RequestHeader,
        mask: &[u64],
        directory: &[u8],
        strings: &[u8],
    ) -> Result<usize, Errno> {
        let offset = self.used.next_multiple_of(align_of::<RequestHeader>());
        let needed = size_of::<RequestHeader>() + size_of_val(mask) + directory.len() + strings.len();
        if offset + needed > BUFFER_BYTES {
            return Err(Errno::E2BIG);
        }
        // SAFETY: all parts fit into the rest of the buffer, which no reference points to. The mapping and the offset
        // are aligned.
        unsafe {
            let request = self.at.add(offset);
            request.cast::<RequestHeader>().write(header);
            let words = request.add(size_of::<RequestHeader>());
            words.copy_from_nonoverlapping(mask.as_ptr().cast(), size_of_val(mask));
            let text = words.add(size_of_val(mask));
            text.copy_from_nonoverlapping(directory.as_ptr(), directory.len());
            text.add(directory.len()).copy_from_nonoverlapping(strings.as_ptr(), strings.len());
        }
        self.used = offset + needed;
        Ok(offset)
    }

    /// Returns the process id of the task that was made for the request at `offset`. `None` if no task was made, or if
    /// the task has done nothing yet. `offset` must be one that [`RequestBuffer::write`] has returned.
    pub(super) fn task(&self, offset: usize) -> Option<Pid> {
        let field = self.at.wrapping_add(offset + offset_of!(RequestHeader, task)).cast();
        // SAFETY: the request at the offset is mapped and aligned. After the request was sent, only its task writes the
        // field, atomically.
        let pid = unsafe { AtomicU32::from_ptr(field) }.load(Acquire);
        (pid != 0).then_some(Pid(pid))
    }
}

impl Drop for RequestBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is that of `new`, and no reference to it is left.
        let _ = unsafe { libc::munmap(self.at.cast(), BUFFER_BYTES) };
    }
}

/// A request to start a task, as the host (the process that starts tasks) reads it from the shared memory.
#[derive(Clone, Copy)]
pub(super) struct Request {
    request: *const u8,
    pub(super) header: RequestHeader,
}

impl Request {
    /// Reads the request at the address `request`.
    ///
    /// # Safety
    /// There must be a complete request at the address. It must not be changed until it is answered.
    pub(super) unsafe fn read(request: *const u8) -> Self {
        // SAFETY: the caller guarantees it.
        Self { request, header: unsafe { request.cast::<RequestHeader>().read() } }
    }

    /// Returns the field of the request in which the task writes its process id.
    pub(super) fn task(&self) -> &AtomicU32 {
        let field = self.request.wrapping_add(offset_of!(RequestHeader, task)).cast_mut().cast();
        // SAFETY: the request is complete and aligned, and its memory is writable. While the task starts, all accesses
        // to the field are atomic.
        unsafe { AtomicU32::from_ptr(field) }
    }

    /// Returns the address of the byte at `offset` behind the header.
    fn behind_header(&self, offset: usize) -> *const u8 {
        self.request.wrapping_add(size_of::<RequestHeader>() + offset)
    }

    fn mask_bytes(&self) -> usize {
        self.header.mask_words * size_of::<u64>()
    }

    /// Returns the size and the address of the affinity mask, for sched_setaffinity(2).
    pub(super) fn mask(&self) -> (usize, *const u8) {
        (self.mask_bytes(), self.behind_header(0))
    }

    /// Returns the path of the working directory for the task, as a C string. Null if the task has the working
    /// directory of the host.
    pub(super) fn directory(&self) -> *const u8 {
        if self.header.directory_bytes == 0 { ptr::null() } else { self.behind_header(self.mask_bytes()) }
    }

    /// Returns the arguments, the environment variables and the path of the program, each with its NUL byte.
    pub(super) fn strings(&self) -> &[u8] {
        let strings = self.behind_header(self.mask_bytes() + self.header.directory_bytes);
        // SAFETY: a complete request has `string_bytes` bytes there.
        unsafe { std::slice::from_raw_parts(strings, self.header.string_bytes) }
    }
}

/// The answer of the host (the process that starts tasks) to a request. If `has_pidfd` is true, the pidfd of the task
/// is sent with the answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// The process id of the task. 0 if no process was made. If `errno` is not 0, the process ends by itself.
    pub(super) pid: u32,
    pub(super) step: u32,
    /// 0 if the task has begun its program.
    pub(super) errno: i32,
    /// Whether the pidfd of the task is sent with the message. The pidfds in a message are in the order of the answers.
    pub(super) has_pidfd: bool,
}

/// The size in bytes of an [`Answer`] in a message.
const ANSWER_BYTES: usize = 16;

impl Answer {
    /// Returns the answer to a request whose task could not be started: `step` is the step that failed, and `errno` is
    /// the error number.
    pub(super) fn failed(step: SpawnStep, errno: Errno) -> Self {
        Self { step: u32::from(step.number()), errno: errno as i32, ..Self::default() }
    }

    /// Returns the bytes of the answer for the socket.
    fn to_bytes(self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.step.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.errno.to_ne_bytes());
        bytes[12] = self.has_pidfd.into();
        bytes
    }

    /// Parses an answer from its bytes.
    fn from_bytes(bytes: &[u8; ANSWER_BYTES]) -> Self {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        Self {
            pid: u32::from_ne_bytes(word(0)),
            step: u32::from_ne_bytes(word(4)),
            errno: i32::from_ne_bytes(word(8)),
            has_pidfd: bytes[12] != 0,
        }
    }
}

/// Sends `answers` in one message from the host to the process that sent the requests. `pidfds` contains a pidfd for
/// each answer with `has_pidfd`, in the same order. If too many descriptors of the user are in transit, tries again for
/// 10 s.
///
/// # Errors
/// The error of sendmsg(2): `EPIPE` or `ECONNRESET` if that process has closed its end of the connection.
pub(super) fn send_answers(
    socket: BorrowedFd<'_>,
    answers: &[Answer],
    pidfds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut bytes = [0; ANSWER_BYTES * MAX_PENDING_REQUESTS];
    for (chunk, answer) in bytes.chunks_exact_mut(ANSWER_BYTES).zip(answers) {
        chunk.copy_from_slice(&answer.to_bytes());
    }
    let bytes = bytes.get(..answers.len() * ANSWER_BYTES).unwrap_or_default();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PENDING_REQUESTS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !pidfds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(pidfds));
    }
    let deadline = Instant::now() + MAX_SEND_TIME;
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            // Too many descriptors of this user are in transit, unix(7). Receivers must take some of them first.
            Err(rustix::io::Errno::TOOMANYREFS) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(Errno::from_raw(error.raw_os_error())),
            Ok(_) => return Ok(()),
        }
    }
}

/// Waits for the next message of the host at `socket`, and returns its answers. Each answer is returned with the pidfd
/// of its task. The pidfd is `None` if the answer contains no pidfd, or if this process can't have another open
/// descriptor. Returns no answer if the host has ended.
///
/// # Errors
/// The error of recvmsg(2).
pub(super) fn receive_answers(socket: BorrowedFd<'_>) -> Result<Vec<(Answer, Option<OwnedFd>)>, Errno> {
    let mut bytes = [0; ANSWER_BYTES * MAX_PENDING_REQUESTS];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PENDING_REQUESTS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let count = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            // If the host has ended with requests unread, the kernel returns CONNRESET once, before it returns the
            // messages that the host has sent: unix_release_sock() in net/unix/af_unix.c.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => {}
            Err(error) => return Err(Errno::from_raw(error.raw_os_error())),
            Ok(message) => break message.bytes,
        }
    };
    // Pidfds for which this process has no room are missing at the end.
    let mut pidfds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(pidfds) => pidfds.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let answers = bytes.get(..count).unwrap_or_default().chunks_exact(ANSWER_BYTES);
    let answers = answers.filter_map(|bytes| {
        let answer = Answer::from_bytes(bytes.try_into().ok()?);
        let pidfd = if answer.has_pidfd { pidfds.next() } else { None };
        Some((answer, pidfd))
    });
    Ok(answers.collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

    use super::*;

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let begun = Answer { pid: 4711, has_pidfd: true, ..Answer::default() };
        let failed = Answer { pid: 4711, ..Answer::failed(SpawnStep::Stdio, Errno::EMFILE) };
        for answer in [begun, failed, Answer::default()] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes()), answer);
        }
    }

    #[test]
    fn the_answer_of_a_host_that_ended_with_requests_unread_is_received() {
        let (socket, host_socket) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let refused = Answer::failed(SpawnStep::Clone, Errno::ENOMEM);
        assert_eq!(send_answers(host_socket.as_fd(), &[refused], &[]), Ok(()));
        rustix::io::write(&socket, &0_usize.to_ne_bytes()).unwrap();
        drop(host_socket);
        let received = receive_answers(socket.as_fd()).unwrap();
        assert_eq!(received.iter().map(|(answer, _)| *answer).collect::<Vec<_>>(), [refused]);
        assert_eq!(receive_answers(socket.as_fd()).unwrap().len(), 0);
    }

    #[test]
    fn the_error_of_answers_says_that_the_process_that_sent_the_requests_has_closed_the_connection() {
        let (socket, host_socket) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        // Not by a drop of the socket: a process that another test has just forked may have a copy of it.
        shutdown(&socket, Shutdown::Both).unwrap();
        assert_eq!(send_answers(host_socket.as_fd(), &[Answer::default()], &[]), Err(Errno::EPIPE));
    }
}
