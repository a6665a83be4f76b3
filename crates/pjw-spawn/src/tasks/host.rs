//! The host: the process that owns the address space of the tasks. It answers requests, and frees the slots of tasks
//! that have ended. It ends when no more requests can come and no task lives.
//!
//! The host is a fork of a process with several threads, and has given up its heap: nothing here allocates or locks.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use pjw_core::ids::TASK_HOST_NAME;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};

use super::directory::Directory;
use super::image::Shape;
use super::map;
use super::own_memory::{OwnRanges, free_heap, map_anonymous};
use super::request::{Answer, Request};
use super::slot::SlotShape;
use super::stack::{self, Auxiliary, Contents};
use super::task_start::{self, Descriptors, EntryPoint, StartedTask};
use crate::clone::end_with_launcher;
use crate::failure::SpawnStep;

/// The most descriptors that come with a request: three streams and a cgroup.
const MAX_DESCRIPTORS: usize = 4;
/// The number of the socket in the epoll set. Slots have the numbers from 0.
const SOCKET: u64 = u64::MAX;
/// No task has the slot.
const FREE: RawFd = -1;
/// The end of the task in the slot will not be seen, so the slot is not used again.
const LOST: RawFd = -2;

/// The parameters of the host. The host has no heap, so all of them are on the stack or in shared memory.
pub(super) struct Plan {
    pub(super) shape: Shape,
    pub(super) slot: SlotShape,
    /// The file of the program.
    pub(super) file: RawFd,
    pub(super) socket: RawFd,
    pub(super) buffer: *const u8,
    /// How many tasks may live at a time.
    pub(super) capacity: usize,
    /// The number of ranks.
    pub(super) size: u32,
    /// The process that the host ends with, or 0.
    pub(super) launcher: i32,
    pub(super) heap_begin: u64,
    /// The highest descriptor that may be open.
    pub(super) highest_descriptor: RawFd,
    pub(super) auxiliary: Auxiliary,
    /// Whether a core dump of one task would end all tasks: Linux before 5.16.
    pub(super) must_not_dump: bool,
    pub(super) nonce: u64,
}

/// A slot in the table of the host.
struct Slot {
    /// The pidfd of the task. [`FREE`] without a task.
    pidfd: RawFd,
    pid: u32,
}

struct Host<'a> {
    plan: &'a Plan,
    socket: BorrowedFd<'a>,
    file: OwnedFd,
    epoll: OwnedFd,
    /// Descriptors from this one on are the host's own.
    first_own: RawFd,
    /// The address of the first slot.
    slots_at: u64,
    slots: &'a mut [Slot],
    directory: &'a Directory,
    own_ranges: OwnRanges,
    living: usize,
}

type Failed = (SpawnStep, Errno);

/// Runs the host: starts tasks on request, and ends after the last task. Never returns.
pub(super) fn run(plan: &Plan) -> ! {
    let code = match leave_parent(plan) {
        Ok((first_own, socket)) => serve_requests(plan, first_own, socket.as_fd()),
        Err(failed) => {
            // SAFETY: the descriptor is open: it is closed only after it was copied to a higher number, which is the
            // last step.
            refuse(unsafe { BorrowedFd::borrow_raw(plan.socket) }, failed)
        }
    };
    // SAFETY: ends the process without the handlers of exit(3), which belong to the parent.
    unsafe { libc::_exit(code) }
}

/// Separates the host from its parent: its name, its core dumps, its descriptors. Returns the lowest number of a
/// descriptor that may be the host's own, and the socket, which has such a number then.
fn leave_parent(plan: &Plan) -> Result<(RawFd, OwnedFd), Failed> {
    if plan.launcher != 0 {
        end_with_launcher(plan.launcher).map_err(|(step, errno)| (step, Errno::from_raw(errno)))?;
    }
    // SAFETY: the name ends with a NUL byte.
    unsafe { libc::prctl(libc::PR_SET_NAME, TASK_HOST_NAME.as_ptr()) };
    if plan.must_not_dump {
        // SAFETY: changes the address space only.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    }
    let first_own = close_descriptors(plan)?;
    // SAFETY: makes a copy.
    let socket = unsafe { libc::fcntl(plan.socket, libc::F_DUPFD_CLOEXEC, first_own) };
    let socket = Errno::result(socket).map_err(|errno| (SpawnStep::Clone, errno))?;
    // SAFETY: the copy is new, and nothing uses the number of the original from here on.
    let socket = unsafe {
        libc::close(plan.socket);
        OwnedFd::from_raw_fd(socket)
    };
    Ok((first_own, socket))
}

/// Tells the parent that the host is ready, and serves its requests until their end. Returns the exit code.
fn serve_requests(plan: &Plan, first_own: RawFd, socket: BorrowedFd<'_>) -> i32 {
    match Host::prepare(plan, first_own, socket) {
        Ok(mut host) => {
            let directory = (&raw const *host.directory).expose_provenance() as u64;
            let answer = Answer { directory, ..Answer::default() };
            if send(socket, answer, None) { host.serve() } else { 1 }
        }
        Err(failed) => refuse(socket, failed),
    }
}

/// Tells the parent why there is no host. Returns the exit code.
fn refuse(socket: BorrowedFd<'_>, (step, errno): Failed) -> i32 {
    send(socket, Answer::failed(step, errno), None);
    1
}

impl<'a> Host<'a> {
    fn prepare(plan: &'a Plan, first_own: RawFd, socket: BorrowedFd<'a>) -> Result<Self, Failed> {
        let of_clone = |errno| (SpawnStep::Clone, errno);
        let file = move_above(plan.file, first_own).map_err(of_clone)?;
        // SAFETY: has no precondition.
        let epoll = Errno::result(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map_err(of_clone)?;
        let epoll = move_above(epoll, first_own).map_err(of_clone)?;
        // SAFETY: the host uses no heap from here on.
        unsafe { free_heap(plan.heap_begin).map_err(of_clone)? };
        let slots_at = reserve_slots(plan).map_err(of_clone)?;
        let table = map_anonymous(plan.capacity * size_of::<Slot>()).map_err(of_clone)?.cast::<Slot>();
        for index in 0..plan.capacity {
            // SAFETY: the memory has room for so many slots.
            unsafe { table.add(index).write(Slot { pidfd: FREE, pid: 0 }) };
        }
        // SAFETY: all of them were written, and nothing else uses the memory.
        let slots = unsafe { std::slice::from_raw_parts_mut(table, plan.capacity) };
        let memory = map_anonymous(Directory::bytes(plan.size)).map_err(of_clone)?;
        // SAFETY: the memory is new and has the size.
        let directory = unsafe { Directory::create(memory, plan.size, plan.nonce) };
        let memory = map_anonymous(OwnRanges::BYTES).map_err(of_clone)?;
        // SAFETY: the memory is new and has the size.
        let own_ranges = unsafe { OwnRanges::read(memory) };
        let host =
            Self { plan, socket, file, epoll, first_own, slots_at, slots, directory, own_ranges, living: 0 };
        host.watch(host.socket.as_raw_fd(), SOCKET).map_err(of_clone)?;
        Ok(host)
    }

    fn watch(&self, descriptor: RawFd, number: u64) -> Result<(), Errno> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number };
        // SAFETY: the event outlives the call.
        let added = unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event)
        };
        Errno::result(added).map(drop)
    }

    /// Answers requests until the last task has ended and no more requests can come. Returns the exit code.
    fn serve(&mut self) -> i32 {
        let mut may_get_more = true;
        while may_get_more || self.living > 0 {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: there is room for one event.
            let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &raw mut event, 1, -1) };
            match (count, event.u64) {
                (0, _) => {}
                (1, SOCKET) => {
                    may_get_more = self.take_request();
                    if !may_get_more {
                        self.close_unneeded();
                    }
                }
                (1, slot) => self.free(slot),
                _ if Errno::last() == Errno::EINTR => {}
                _ => return 1,
            }
        }
        0
    }

    /// Ends the connection with the parent, which would wait for an answer for ever. Closes the streams that tasks
    /// inherited from the host: a pipe has its end when no process holds it.
    fn close_unneeded(&self) {
        let _ = shutdown(self.socket, Shutdown::Both);
        // SAFETY: epoll(7) forgets the descriptor with this call, and the event is ignored.
        unsafe {
            let (epoll, socket) = (self.epoll.as_raw_fd(), self.socket.as_raw_fd());
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, socket, std::ptr::null_mut());
        }
        for descriptor in 0..self.first_own {
            // SAFETY: these descriptors are not the host's own.
            unsafe { libc::close(descriptor) };
        }
    }

    /// Reads a request and answers it. Returns false after the last one.
    fn take_request(&mut self) -> bool {
        let mut offset = [0_u8; size_of::<usize>()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(
                self.socket,
                &mut [IoSliceMut::new(&mut offset)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
                Ok(message) => break message.bytes,
            }
        };
        if received < offset.len() {
            return false;
        }
        let mut descriptors: [Option<OwnedFd>; MAX_DESCRIPTORS] = [const { None }; MAX_DESCRIPTORS];
        let mut places = descriptors.iter_mut();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                for descriptor in list {
                    if let Some(place) = places.next() {
                        *place = move_above(descriptor.into_raw_fd(), self.first_own).ok();
                    }
                }
            }
        }
        // SAFETY: the parent has written a request, and waits for the answer.
        let request = unsafe { Request::read(self.plan.buffer.wrapping_add(usize::from_ne_bytes(offset))) };
        self.answer(&request, &descriptors)
    }

    fn answer(&mut self, request: &Request, passed: &[Option<OwnedFd>]) -> bool {
        let expected = request.head.streams.iter().filter(|is_passed| **is_passed).count()
            + usize::from(request.head.has_cgroup);
        // The kernel leaves out descriptors above the limit of the host (`MSG_CTRUNC`, recvmsg(2)).
        if passed.iter().take(expected).any(Option::is_none) {
            return send(self.socket, Answer::failed(SpawnStep::Stdio, Errno::EMFILE), None);
        }
        let mut passed = passed.iter().map(|descriptor| descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        let mut next = |is_passed| if is_passed { passed.next().unwrap_or(-1) } else { -1 };
        let streams = request.head.streams.map(&mut next);
        let cgroup = request.head.has_cgroup.then(|| next(true));
        let descriptors = Descriptors { streams, cgroup, first_own: self.first_own };
        let started = match self.start(request, &descriptors) {
            Ok(started) => started,
            Err((step, errno)) => return send(self.socket, Answer::failed(step, errno), None),
        };
        let answer = match started.failure {
            None => Answer { pid: started.pid, ..Answer::default() },
            Some((step, errno)) => Answer { pid: started.pid, ..Answer::failed(step, errno) },
        };
        // SAFETY: the table of slots keeps the descriptor open, if it is one.
        let pidfd = (started.pidfd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(started.pidfd) });
        let is_sent = send(self.socket, answer, pidfd);
        if !is_sent {
            kill(started.pid);
        }
        is_sent
    }

    /// Maps the program into a free slot, and starts the task.
    fn start(&mut self, request: &Request, descriptors: &Descriptors) -> Result<StartedTask, Failed> {
        let plan = self.plan;
        let free = self.slots.iter().position(|slot| slot.pidfd == FREE);
        let index = free.ok_or((SpawnStep::Clone, Errno::EAGAIN))?;
        if request.head.rank >= plan.size {
            return Err((SpawnStep::Clone, Errno::EINVAL));
        }
        let address = self.slots_at + index as u64 * plan.slot.bytes;
        let started = self.fill_and_start(address, request, descriptors);
        let started = match started {
            Ok(started) => started,
            Err(failed) => {
                self.empty(address);
                return Err(failed);
            }
        };
        let moved = move_above(started.pidfd, self.first_own);
        let watched = moved.and_then(|pidfd| {
            self.watch(pidfd.as_raw_fd(), index as u64)?;
            Ok(pidfd.into_raw_fd())
        });
        match watched {
            Ok(pidfd) => {
                self.living += 1;
                if let Some(slot) = self.slots.get_mut(index) {
                    *slot = Slot { pidfd, pid: started.pid };
                }
                Ok(StartedTask { pidfd, ..started })
            }
            Err(errno) => {
                kill(started.pid);
                if let Some(slot) = self.slots.get_mut(index) {
                    *slot = Slot { pidfd: LOST, pid: started.pid };
                }
                Ok(StartedTask { pidfd: LOST, failure: Some((SpawnStep::Clone, errno)), ..started })
            }
        }
    }

    fn fill_and_start(
        &self,
        address: u64,
        request: &Request,
        descriptors: &Descriptors,
    ) -> Result<StartedTask, Failed> {
        let plan = self.plan;
        let of_exec = |errno| (SpawnStep::Exec, errno);
        // SAFETY: the slot is free.
        unsafe { map::fill_slot(address, &plan.slot, &plan.shape, self.file.as_raw_fd()).map_err(of_exec)? };
        let base = address + plan.slot.program;
        let contents = Contents {
            strings: request.strings(),
            argument_count: request.head.argument_count,
            variable_count: request.head.variable_count,
            program_headers: base + plan.shape.program_headers,
            program_header_count: plan.shape.program_header_count,
            entry: base + plan.shape.entry,
            auxiliary: &plan.auxiliary,
        };
        let stack_bytes = plan.slot.program - plan.slot.stack;
        // SAFETY: the stack was mapped just now.
        let stack = unsafe { stack::write(base, stack_bytes, &contents).map_err(of_exec)? };
        let entry_point = EntryPoint { entry: contents.entry, stack };
        let pid = self.directory.pid_of(request.head.rank);
        // SAFETY: the program and the stack were mapped for this task.
        unsafe { task_start::start_task(request, &entry_point, descriptors, pid) }
    }

    /// Unmaps what a slot has.
    fn empty(&self, address: u64) {
        // SAFETY: no task lives in the slot. If the call fails, the memory stays until the slot is used again.
        let _ = unsafe { map::reserve_again(address, self.plan.slot.bytes) };
    }

    /// Frees the slot of a task that has ended.
    fn free(&mut self, number: u64) {
        let Some(slot) = usize::try_from(number).ok().and_then(|index| self.slots.get_mut(index)) else {
            return;
        };
        let ended = std::mem::replace(slot, Slot { pidfd: FREE, pid: 0 });
        if ended.pidfd < 0 {
            return;
        }
        // SAFETY: closes the pidfd of this slot, which epoll(7) forgets with it. Copies of it are in no process that
        // lives: tasks have closed theirs. One that is just starting keeps it for a moment, so it is removed first.
        unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, ended.pidfd, std::ptr::null_mut());
            libc::close(ended.pidfd);
        }
        self.directory.forget(ended.pid);
        self.empty(self.slots_at + number * self.plan.slot.bytes);
        self.living -= 1;
        if self.living == 0 {
            // SAFETY: no task lives.
            unsafe { self.own_ranges.unmap_others() };
        }
    }
}

/// Closes the descriptors that execve(2) would close, except those that the host needs. Returns a number above all that
/// are left: the tasks get the descriptors below it.
fn close_descriptors(plan: &Plan) -> Result<RawFd, Failed> {
    // Another thread of the parent may have opened more descriptors since their numbers were read.
    let above = plan.highest_descriptor.max(plan.file).saturating_add(1);
    task_start::close_from(above).map_err(|(step, errno)| (step, Errno::from_raw(errno)))?;
    let mut first_own = 3;
    for descriptor in 3..=plan.highest_descriptor {
        // SAFETY: asks only.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
        if flags < 0 || descriptor == plan.socket || descriptor == plan.file {
            continue;
        }
        if flags & libc::FD_CLOEXEC == 0 {
            first_own = descriptor + 1;
        } else {
            // SAFETY: no code of this process uses the descriptor after the fork.
            unsafe { libc::close(descriptor) };
        }
    }
    Ok(first_own)
}

/// Kills a task that the parent does not know, so that the parent has not waited for it.
fn kill(pid: u32) {
    // SAFETY: has no precondition.
    unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
}

/// Moves a descriptor to a number that is at least `first_own`.
fn move_above(descriptor: RawFd, first_own: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the caller gives up the descriptor.
    let owned = unsafe { OwnedFd::from_raw_fd(descriptor) };
    if descriptor >= first_own {
        return Ok(owned);
    }
    // SAFETY: makes a copy.
    let copy = Errno::result(unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, first_own) })?;
    // SAFETY: the copy is new.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Reserves the addresses of all slots, so that no later start fails for lack of addresses. The reservation is writable
/// at first: the kernel then checks `RLIMIT_AS` and `RLIMIT_DATA`, and the commit limit if `vm.overcommit_memory` is 2.
/// A later start can still fail with `ENOMEM`, for what the tasks have mapped meanwhile. Returns the address of the
/// first slot.
fn reserve_slots(plan: &Plan) -> Result<u64, Errno> {
    let bytes = plan.slot.bytes_of(plan.capacity as u64).ok_or(Errno::ENOMEM)?;
    let at = map_anonymous(usize::try_from(bytes).map_err(|_| Errno::ENOMEM)?)?;
    // SAFETY: the range was mapped just now.
    Errno::result(unsafe { libc::syscall(libc::SYS_mprotect, at, bytes, libc::PROT_NONE) })?;
    let at = at.expose_provenance() as u64;
    Ok(at.next_multiple_of(plan.slot.alignment))
}

/// Returns whether the parent could be told.
fn send(socket: BorrowedFd<'_>, answer: Answer, pidfd: Option<BorrowedFd<'_>>) -> bool {
    let bytes = answer.to_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let pidfds = pidfd.map(|pidfd| [pidfd]);
    if let Some(pidfds) = &pidfds {
        control.push(SendAncillaryMessage::ScmRights(pidfds));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return sent.is_ok(),
        }
    }
}
