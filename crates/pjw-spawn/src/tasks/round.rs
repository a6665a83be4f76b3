//! A round: the host takes all requests that have come, makes their tasks, and answers all requests together when all
//! tasks have begun.
//!
//! A task whose program was mapped ahead is made at once. For the other tasks, the host first maps all programs: if
//! tasks began meanwhile, these tasks and the host would wait for the same lock of the kernel. A task needs some time
//! until it begins. Meanwhile the host makes the next task. All answers are one message, so that the parent wakes only
//! once.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::descriptors::{copy_above, move_above};
use super::headers::HeaderCopy;
use super::host::{Host, SLOT_FREE, SLOT_LOST, SLOT_MAPPED, SLOT_READY, Slot, TaskStartFailure, kill_task};
use super::map;
use super::request::{Answer, MAX_PENDING_REQUESTS, Request, send_answers};
use super::slot::TaskSlot;
use super::stack::{self, StackContents};
use super::task_start::{self, Descriptors, EntryPoint, TaskStart};
use crate::failure::SpawnStep;

/// The most descriptors that come with a request: three streams and a cgroup.
const MAX_DESCRIPTORS: usize = 4;

/// The descriptors that have come with a request.
type PassedDescriptors = [Option<OwnedFd>; MAX_DESCRIPTORS];

/// What the parent has sent for one task.
struct RequestMessage {
    /// The offset of the request in the buffer that the parent and the host share.
    offset: usize,
    passed: PassedDescriptors,
}

/// Error: no more requests can be received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoMoreRequests {
    /// The parent has closed its end of the connection, so it waits for no answer.
    Closed,
    /// The next message of the parent can't be received. The parent may wait for an answer to it.
    Failed,
}

/// Error: a request gets no answer, although the parent may wait for one. Either the request could not be received, or
/// the answers of its round could not be sent. In the second case, the tasks of the round were killed.
pub(super) struct NotAnswered;

/// What the round has done for one request: the mapped slot, then the task or the failure.
struct Outcome {
    /// The descriptors that have come with the request. The task inherits them.
    passed: PassedDescriptors,
    /// The slot in which the program is mapped, until the task is made.
    prepared: Option<usize>,
    /// The process id of the task. 0 if no task was made.
    pid: u32,
    /// The pidfd of the task. -1 if no task was made, or if the host could not detect its end.
    pidfd: RawFd,
    /// The slot of the task.
    slot: usize,
    failure: Option<TaskStartFailure>,
}

impl Outcome {
    const NONE: Self = Self {
        passed: [const { None }; MAX_DESCRIPTORS],
        prepared: None,
        pid: 0,
        pidfd: -1,
        slot: 0,
        failure: None,
    };
}

impl<'a> Host<'a> {
    /// Starts one task (a process in the address space of the host) for each request that has arrived, at most
    /// [`MAX_PENDING_REQUESTS`], and answers the requests. A failed start is answered with the error. Returns whether
    /// further requests can arrive. Fails if a parent that may wait gets no answer: a request could not be received, or
    /// the answers could not be sent. The requests that were received before the first one that could not are answered.
    pub(super) fn start_requested_tasks(&mut self) -> Result<bool, NotAnswered> {
        let mut outcomes = [const { Outcome::NONE }; MAX_PENDING_REQUESTS];
        let mut count = 0;
        let mut end = None;
        while let Some(outcome) = outcomes.get_mut(count) {
            match self.receive_request() {
                Ok(Some((request, passed))) => {
                    outcome.passed = passed;
                    let is_mapped_ahead = self.slots.iter().any(|slot| slot.pidfd == SLOT_READY);
                    match self.prepare_task(count, request, &outcome.passed) {
                        Ok(slot) => outcome.prepared = Some(slot),
                        Err(failed) => outcome.failure = Some(failed),
                    }
                    if is_mapped_ahead {
                        self.make_task(count, outcome);
                    }
                }
                Ok(None) => break,
                Err(reason) => {
                    end = Some(reason);
                    break;
                }
            }
            count += 1;
        }
        let outcomes = outcomes.get_mut(..count).unwrap_or_default();
        for (index, outcome) in outcomes.iter_mut().enumerate() {
            self.make_task(index, outcome);
        }
        match (self.answer_requests(outcomes), end) {
            (Ok(()), None) => Ok(true),
            // The host continues for the tasks that live.
            (Ok(()), Some(NoMoreRequests::Closed)) => Ok(false),
            (Err(errno), _) if is_closed_connection(errno) => Ok(false),
            (Ok(()), Some(NoMoreRequests::Failed)) | (Err(_), _) => Err(NotAnswered),
        }
    }

    /// Receives the next request to start a task, and the file descriptors that were passed with the request, as
    /// [`receive_message`] does.
    fn receive_request(&self) -> Result<Option<(Request, PassedDescriptors)>, NoMoreRequests> {
        let Some(message) = receive_message(self.socket, self.first_own)? else { return Ok(None) };
        // SAFETY: the parent has written a request, and waits for the answer.
        let request = unsafe { Request::read(self.plan.buffer.wrapping_add(message.offset)) };
        Ok(Some((request, message.passed)))
    }

    /// Maps the program and the stack for the task of `request`. `index` is the index of the request in the round, and
    /// `passed` contains the descriptors that were passed with the request. Returns the index of the slot, which is the
    /// memory for one task.
    fn prepare_task(
        &mut self,
        index: usize,
        request: Request,
        passed: &PassedDescriptors,
    ) -> Result<usize, TaskStartFailure> {
        let header = &request.header;
        let expected =
            header.streams.iter().filter(|is_passed| **is_passed).count() + usize::from(header.has_cgroup);
        // The kernel leaves out descriptors above the limit of the host (`MSG_CTRUNC`, recvmsg(2)).
        if passed.iter().take(expected).any(Option::is_none) {
            return Err((SpawnStep::Stdio, Errno::EMFILE));
        }
        if header.rank >= self.plan.size {
            return Err((SpawnStep::Clone, Errno::EINVAL));
        }
        let mut passed = passed.iter().map(|descriptor| descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        let mut next = |is_passed| if is_passed { passed.next().unwrap_or(-1) } else { -1 };
        let streams = header.streams.map(&mut next);
        let cgroup = header.has_cgroup.then(|| next(true));
        let descriptors = Descriptors { streams, cgroup, first_own: self.first_own };
        let slot = self.mapped_slot()?;
        let start = self
            .write_stack(&self.addresses_of(slot), request, &descriptors)
            .inspect_err(|_| self.unmap_slot(slot))?;
        // SAFETY: `starts` has room for each request of a round, and no task of another round uses this start.
        unsafe { self.starts.wrapping_add(index).write(start) };
        self.set_unused(slot, SLOT_MAPPED);
        Ok(slot)
    }

    /// Starts the task of the request with the index `index` in the round, if [`Host::prepare_task`] has mapped its
    /// program. Stores the result in `outcome`.
    fn make_task(&mut self, index: usize, outcome: &mut Outcome) {
        let Some(slot) = outcome.prepared.take() else { return };
        // SAFETY: the start was written when the program was mapped for this task.
        match unsafe { task_start::start_task(&*self.starts.wrapping_add(index)) } {
            Ok((pid, pidfd)) => {
                (outcome.pid, outcome.slot) = (pid, slot);
                match self.store_pidfd(index, slot, pid, pidfd) {
                    Ok(pidfd) => outcome.pidfd = pidfd,
                    Err(errno) => outcome.failure = Some((SpawnStep::Clone, errno)),
                }
            }
            Err(failed) => {
                self.unmap_slot(slot);
                outcome.failure = Some(failed);
            }
        }
        // The task has its own copies of these descriptors.
        outcome.passed = [const { None }; MAX_DESCRIPTORS];
    }

    /// Returns the addresses of the slot with the index `slot`. The first slots have the highest addresses, because the
    /// kernel places heaps in the highest slots first.
    fn addresses_of(&self, slot: usize) -> TaskSlot {
        self.plan.slot.slot(self.slots_at, self.slots.len().saturating_sub(slot + 1))
    }

    /// Sets the state of a slot in which no task lives.
    fn set_unused(&mut self, slot: usize, state: RawFd) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.pidfd = state;
        }
    }

    /// Unmaps what is mapped in the slot with the number `slot`, in which no task lives: its task has ended, or could
    /// not be started.
    pub(super) fn unmap_slot(&mut self, slot: usize) {
        let addresses = self.addresses_of(slot);
        // SAFETY: no task lives in the slot. If the call fails, the memory stays until the slot is used again.
        let _ = unsafe { map::unmap_and_reserve(addresses.begin, addresses.reserved_bytes()) };
        self.set_unused(slot, SLOT_FREE);
    }

    /// Maps the program and the stack into the slots for the first requests of a group, at most
    /// [`MAX_PENDING_REQUESTS`]. Stops at the first error: a request tries again to map a slot, and is answered with
    /// the error.
    pub(super) fn map_slots_ahead(&mut self) {
        for slot in 0..self.slots.len().min(MAX_PENDING_REQUESTS) {
            if self.map_slot(slot).is_err() {
                return;
            }
        }
    }

    /// Returns the index of a slot without a task, in which the program and the stack are mapped. Maps them into a free
    /// slot if this was not done ahead. Unmaps the memory of ended tasks only if there is no other slot. Fails if no
    /// slot is free then.
    fn mapped_slot(&mut self) -> Result<usize, TaskStartFailure> {
        let find = |slots: &[Slot], state| slots.iter().position(|slot| slot.pidfd == state);
        if let Some(slot) = find(self.slots, SLOT_READY) {
            return Ok(slot);
        }
        let free = find(self.slots, SLOT_FREE).or_else(|| {
            self.unmap_ended_tasks();
            find(self.slots, SLOT_FREE)
        });
        let slot = free.ok_or((SpawnStep::Clone, Errno::EAGAIN))?;
        self.map_slot(slot).map(|()| slot).map_err(|errno| (SpawnStep::Exec, errno))
    }

    /// Maps the program and the stack into the free slot with the index `slot`, which then has the state
    /// [`SLOT_READY`]. If this fails, the slot stays free.
    fn map_slot(&mut self, slot: usize) -> Result<(), Errno> {
        let (addresses, plan) = (self.addresses_of(slot), self.plan);
        let (file, advise) = (self.file.as_raw_fd(), plan.stacks_need_advice);
        // SAFETY: the slot is free.
        let mapped = unsafe {
            map::map_task_slot(&addresses, &plan.layout, file, advise, self.initial_values.is_some())
        };
        match mapped {
            Ok(()) => self.set_unused(slot, SLOT_READY),
            Err(_) => self.unmap_slot(slot),
        }
        mapped
    }

    /// Writes the initial stack of the task of `request` into `slot`, in which the program and the stack are already
    /// mapped. Returns the data for the start of the task. `descriptors` are the descriptors with which the task is
    /// started.
    fn write_stack(
        &self,
        slot: &TaskSlot,
        request: Request,
        descriptors: &Descriptors,
    ) -> Result<TaskStart<'a>, TaskStartFailure> {
        let plan = self.plan;
        let base = slot.program;
        let contents = StackContents {
            strings: request.strings(),
            argument_count: request.header.argument_count,
            variable_count: request.header.variable_count,
            program_headers: base + plan.layout.program_headers,
            header_copy: self.headers.as_ref().map_or(&[][..], HeaderCopy::bytes),
            program_header_count: plan.layout.program_header_count,
            entry: base + plan.layout.entry,
            auxiliary: &plan.auxiliary,
        };
        // SAFETY: the stack is mapped, and no task uses it yet.
        let stack = unsafe { stack::write_initial_stack(base, plan.slot.stack_bytes, &contents) }
            .map_err(|errno| (SpawnStep::Exec, errno))?;
        let initial_values = self.initial_values;
        let entry_point = EntryPoint { layout: &plan.layout, base, stack, initial_values };
        let pid = self.directory.pid_of(request.header.rank);
        Ok(TaskStart::new(request, entry_point, descriptors, pid))
    }

    /// Stores the pidfd of the new task `pid` in the slot `slot`, and returns its number. If the number is below
    /// `first_own`, the pidfd first gets a higher number, because tasks use the lower ones. If this fails, the host
    /// could not see the end of the task. Then kills the task, and marks the slot as lost. `index` is the index of the
    /// task in the round.
    fn store_pidfd(&mut self, index: usize, slot: usize, pid: u32, pidfd: RawFd) -> Result<RawFd, Errno> {
        // SAFETY: the kernel has opened the descriptor for the host.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        let kept = if pidfd.as_raw_fd() >= self.first_own {
            Ok(pidfd)
        } else {
            copy_above(&pidfd, self.first_own).inspect_err(|_| {
                kill_task(pid);
                self.wait_for_start(index, pidfd.as_raw_fd());
            })
        };
        let kept = kept.map(IntoRawFd::into_raw_fd);
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Slot { pidfd: kept.unwrap_or(SLOT_LOST), pid };
        }
        self.living += usize::from(kept.is_ok());
        kept
    }

    /// Waits until the task with the index `index` in the round no longer uses its [`TaskStart`]. Returns the failure
    /// if its start has failed. `pidfd` is the pidfd of the task.
    fn wait_for_start(&self, index: usize, pidfd: RawFd) -> Option<TaskStartFailure> {
        // SAFETY: the start was written before the task was made.
        let start = unsafe { &*self.starts.wrapping_add(index) };
        task_start::wait_until_unused(start, pidfd);
        start.failure()
    }

    /// Waits until all tasks of the round have begun or failed, and sends the answers to the requests. Kills a task
    /// whose end the host could not detect. If the answers can't be sent, kills all tasks of the round.
    ///
    /// # Errors
    /// The error of [`send_answers`].
    fn answer_requests(&mut self, outcomes: &mut [Outcome]) -> Result<(), Errno> {
        if outcomes.is_empty() {
            return Ok(());
        }
        // The last task comes first: when it has begun, most others have begun too, so the host sleeps only once.
        let made = outcomes.iter_mut().enumerate().rev().filter(|(_, outcome)| outcome.pidfd >= 0);
        for (index, outcome) in made {
            outcome.failure = self.wait_for_start(index, outcome.pidfd);
            if let Err(errno) = self.watch_task(outcome.slot, outcome.pidfd) {
                kill_task(outcome.pid);
                // SAFETY: closes the pidfd of the task, which nothing else uses.
                unsafe { libc::close(outcome.pidfd) };
                if let Some(slot) = self.slots.get_mut(outcome.slot) {
                    slot.pidfd = SLOT_LOST;
                }
                self.living -= 1;
                (outcome.pidfd, outcome.failure) = (-1, Some((SpawnStep::Clone, errno)));
            }
        }
        let mut answers = [Answer::default(); MAX_PENDING_REQUESTS];
        let mut pidfds = [self.socket; MAX_PENDING_REQUESTS];
        let mut count = 0;
        for (answer, outcome) in answers.iter_mut().zip(&*outcomes) {
            *answer =
                outcome.failure.map_or_else(Answer::default, |(step, errno)| Answer::failed(step, errno));
            (answer.pid, answer.has_pidfd) = (outcome.pid, outcome.pidfd >= 0);
            if answer.has_pidfd
                && let Some(pidfd) = pidfds.get_mut(count)
            {
                // SAFETY: the table of slots keeps the descriptor open.
                *pidfd = unsafe { BorrowedFd::borrow_raw(outcome.pidfd) };
                count += 1;
            }
        }
        let (answers, pidfds) = (answers.get(..outcomes.len()), pidfds.get(..count));
        let sent = send_answers(self.socket, answers.unwrap_or_default(), pidfds.unwrap_or_default());
        if sent.is_err() {
            outcomes.iter().filter(|outcome| outcome.pid != 0).for_each(|outcome| kill_task(outcome.pid));
        }
        sent
    }
}

/// Receives the next message of the parent from `socket`. Does not wait: `None` if no message has arrived. Gives each
/// descriptor of the message a number of at least `first_own`, because tasks use the lower numbers. A descriptor for
/// which no such number is free is `None` in the result.
fn receive_message(
    socket: BorrowedFd<'_>,
    first_own: RawFd,
) -> Result<Option<RequestMessage>, NoMoreRequests> {
    let mut offset = [0_u8; size_of::<usize>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut offset)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(error) if is_closed_connection(Errno::from_raw(error.raw_os_error())) => {
                return Err(NoMoreRequests::Closed);
            }
            Err(_) => return Err(NoMoreRequests::Failed),
            Ok(message) => break message.bytes,
        }
    };
    if received == 0 {
        return Err(NoMoreRequests::Closed);
    }
    if received < offset.len() {
        return Err(NoMoreRequests::Failed);
    }
    let mut passed: PassedDescriptors = [const { None }; MAX_DESCRIPTORS];
    let mut free_entries = passed.iter_mut();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = message {
            for descriptor in list {
                if let Some(entry) = free_entries.next() {
                    *entry = move_above(descriptor, first_own).ok();
                }
            }
        }
    }
    Ok(Some(RequestMessage { offset: usize::from_ne_bytes(offset), passed }))
}

/// Returns whether `errno`, the error of a call for the socket of the host, means that the parent has closed its end of
/// the connection. The kernel reports `ECONNRESET` if the parent has left answers unread.
fn is_closed_connection(errno: Errno) -> bool {
    matches!(errno, Errno::EPIPE | Errno::ECONNRESET)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

    use super::*;

    fn receive_offset(socket: BorrowedFd<'_>) -> Result<Option<usize>, NoMoreRequests> {
        receive_message(socket, 0).map(|message| message.map(|message| message.offset))
    }

    #[test]
    fn a_message_that_cannot_be_received_is_no_end_of_the_connection() {
        let (socket, host_socket) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        assert_eq!(receive_offset(host_socket.as_fd()), Ok(None));
        rustix::io::write(&socket, &7_usize.to_ne_bytes()).unwrap();
        assert_eq!(receive_offset(host_socket.as_fd()), Ok(Some(7)));
        rustix::io::write(&socket, b"x").unwrap();
        assert_eq!(receive_offset(host_socket.as_fd()), Err(NoMoreRequests::Failed));
        // recvmsg(2) fails with ENOTSOCK, as it could with ENOMEM.
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert_eq!(receive_offset(pipe.as_fd()), Err(NoMoreRequests::Failed));
        // Not by a drop of the socket: a process that another test has just forked may have a copy of it.
        shutdown(&socket, Shutdown::Both).unwrap();
        assert_eq!(receive_offset(host_socket.as_fd()), Err(NoMoreRequests::Closed));
        let errors = [Errno::EPIPE, Errno::ECONNRESET, Errno::ENOMEM, Errno::ENOTCONN];
        assert_eq!(errors.map(is_closed_connection), [true, true, false, false]);
    }
}
