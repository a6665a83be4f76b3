//! The host: the process that owns the address space of the tasks. It answers requests, and frees the slots of tasks
//! that have ended. It ends when no more requests can come and no task lives. It also ends, while tasks live, if it can't
//! receive a request or send an answer: its parent then learns of this by the end of the host.
//!
//! The host is a fork of a process with several threads, and has given up its heap: nothing here allocates or locks.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use pjw_core::ids::TASK_HOST_NAME;

use super::descriptors::{close_cloexec_descriptors, close_descriptor_range, copy_above, move_above};
use super::directory::TaskDirectory;
use super::headers::HeaderCopy;
use super::image::ProgramLayout;
use super::initial_values::InitialValues;
use super::new_tasks::NewTasks;
use super::own_memory::{HostMappings, free_heap, map_anonymous, map_anonymous_with_protection, unmap};
use super::request::{Answer, MAX_PENDING_REQUESTS, send_answers};
use super::slot::SlotShape;
use super::stack::AuxiliaryVector;
use super::task_start::TaskStart;
use crate::clone::request_parent_death_signal;
use crate::failure::SpawnStep;
use crate::signals;

/// The number of the socket in the epoll set. Slots have the numbers from 0.
const SOCKET: u64 = u64::MAX;
/// The value of [`Slot::pidfd`] while no task uses the slot, and nothing is mapped in it for one.
pub(super) const SLOT_FREE: RawFd = -1;
/// The value of [`Slot::pidfd`] if the host can't detect the end of the task in the slot. The slot is never used again.
pub(super) const SLOT_LOST: RawFd = -2;
/// The value of [`Slot::pidfd`] while the program is mapped in the slot for a request, but the task is not started yet.
pub(super) const SLOT_MAPPED: RawFd = -4;
/// The value of [`Slot::pidfd`] while the program is mapped in the slot, and no task was requested for it yet.
pub(super) const SLOT_READY: RawFd = -5;
/// The value of [`Slot::pidfd`] if the task in the slot has ended, and its memory is still mapped.
const ENDED: RawFd = -3;
/// How long the memory of an ended task may stay mapped. Each unmapping interrupts the CPUs on which tasks run. The
/// tasks of one group often end together. The host then ends before this time, and unmaps nothing.
const UNMAP_AFTER: Duration = Duration::from_millis(20);
/// The time for which a started task is among the [`NewTasks`], at most, before its pidfd is added to the epoll set. It
/// stays there longer if the kernel refuses its pidfd. The host may learn of the end of such a task later by this time.
const WATCH_AFTER: Duration = Duration::from_millis(10);
/// The size in bytes of the largest mapping that fills a gap above the slots. glibc leaves gaps of up to 64 MiB between
/// the arenas of threads.
const LARGEST_FILLING: usize = 64 << 20;
/// The size in bytes of the smallest mapping that fills a gap above the slots. A heap of a task needs 1 MiB.
const SMALLEST_FILLING: usize = 1 << 20;
/// The most mappings that fill gaps above the slots.
const MOST_FILLINGS: usize = 64;
/// The most events of epoll(7) that are read at once.
const MAX_EVENTS: i32 = 16;

/// The parameters of the host: the process that owns the address space of the tasks and starts the tasks. The host has
/// no heap, so this value does not use the heap.
pub(super) struct HostParameters {
    pub(super) layout: ProgramLayout,
    pub(super) slot: SlotShape,
    /// The file of the program.
    pub(super) file: RawFd,
    pub(super) socket: RawFd,
    pub(super) buffer: *const u8,
    /// Zeroed memory for the [`TaskDirectory`].
    pub(super) directory: *mut u8,
    /// The maximum number of tasks that exist at the same time.
    pub(super) capacity: usize,
    /// The number of ranks.
    pub(super) size: u32,
    /// The process id of the process whose end also ends the host. 0 if there is no such process.
    pub(super) launcher: i32,
    pub(super) heap_begin: u64,
    pub(super) auxiliary: AuxiliaryVector,
    /// Whether the core dump of one task would end all tasks. True on Linux before 5.16.
    pub(super) must_not_dump: bool,
    /// Whether the kernel gives huge pages to stacks (`MAP_STACK`) unless madvise(2) forbids it: Linux before 6.7. A
    /// huge page at the end of the stack would take 2 MiB for each task.
    pub(super) stacks_need_advice: bool,
    /// Whether the host unmaps the memory that ended tasks have mapped themselves, whenever no task exists. If false,
    /// this memory is freed at the end of the host.
    pub(super) frees_leftovers: bool,
    pub(super) nonce: u64,
}

/// The state of a slot. A slot is an address range with the stack and the program of one task (a process in the shared
/// address space).
pub(super) struct Slot {
    /// The pidfd of the task, or [`SLOT_FREE`], [`SLOT_READY`], [`SLOT_MAPPED`], [`SLOT_LOST`] or [`ENDED`].
    pub(super) pidfd: RawFd,
    pub(super) pid: u32,
}

/// The host: the process that owns the address space of the tasks. It starts tasks on request, and frees the memory of
/// tasks that have ended.
pub(super) struct Host<'a> {
    pub(super) plan: &'a HostParameters,
    pub(super) socket: BorrowedFd<'a>,
    pub(super) file: OwnedFd,
    /// The initial values of the variables. `None` if they are mapped from the file.
    pub(super) initial_values: Option<InitialValues>,
    /// The program headers that tasks find. `None` if they use those of the program.
    pub(super) headers: Option<HeaderCopy>,
    epoll: OwnedFd,
    /// Descriptors from this one on are the host's own.
    pub(super) first_own: RawFd,
    /// The address of the lowest slot.
    pub(super) slots_at: u64,
    pub(super) slots: &'a mut [Slot],
    pub(super) directory: &'a TaskDirectory,
    /// Room for the starts of [`MAX_PENDING_REQUESTS`] tasks.
    pub(super) starts: *mut TaskStart<'a>,
    own_ranges: Option<HostMappings>,
    pub(super) living: usize,
    /// When the memory of ended tasks is to be unmapped. `None` if there is none.
    unmap_at: Option<Instant>,
    /// The tasks whose ends do not wake the host yet.
    new_tasks: NewTasks,
}

/// The step in the start of a task that failed, with the error number.
pub(super) type TaskStartFailure = (SpawnStep, Errno);

/// Runs the calling process as the host: the process that owns the address space of the tasks. The host starts tasks on
/// request, and exits when the last task has ended and no more requests can come, or after a failure ([`Host::serve`]).
pub(super) fn run(plan: &HostParameters) -> ! {
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

/// Separates the host from its parent: sets its name, the action of `SIGPIPE` and whether it dumps core, and closes
/// the descriptors of the parent. Returns the lowest number of the host's own descriptors, and the socket, which gets
/// such a number.
fn leave_parent(plan: &HostParameters) -> Result<(RawFd, OwnedFd), TaskStartFailure> {
    if plan.launcher != 0 {
        request_parent_death_signal(plan.launcher).map_err(|(step, errno)| (step, Errno::from_raw(errno)))?;
    }
    // SAFETY: the name ends with a NUL byte.
    unsafe { libc::prctl(libc::PR_SET_NAME, TASK_HOST_NAME.as_ptr()) };
    // For the tasks, which inherit the action: the runtime of Rust ignores `SIGPIPE`. The host itself blocks it.
    signals::set_default_action(libc::SIGPIPE);
    if plan.must_not_dump {
        // SAFETY: only sets whether the address space can be dumped.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0_u64) };
    }
    let first_own =
        close_cloexec_descriptors([plan.socket, plan.file]).map_err(|errno| (SpawnStep::Stdio, errno))?;
    let socket = copy_above(&plan.socket, first_own).map_err(|errno| (SpawnStep::Clone, errno))?;
    // SAFETY: nothing uses the number of the original from here on.
    unsafe { libc::close(plan.socket) };
    Ok((first_own, socket))
}

/// Makes the host ready, reports this to the parent over `socket`, and serves requests until [`Host::serve`] returns. If
/// the host can't be made, reports the failed step instead. Returns the exit code for the process. Descriptors from
/// `first_own` on are the host's own.
fn serve_requests(plan: &HostParameters, first_own: RawFd, socket: BorrowedFd<'_>) -> i32 {
    match Host::prepare(plan, first_own, socket) {
        Ok(mut host) => {
            if send_answers(socket, &[Answer::default()], &[]).is_err() {
                return 1;
            }
            if !plan.frees_leftovers {
                // The requests for a group of tasks come together, and find their slots mapped.
                host.map_slots_ahead();
            }
            host.serve()
        }
        Err(failed) => refuse(socket, failed),
    }
}

/// Tells the parent why there is no host. Returns the exit code.
fn refuse(socket: BorrowedFd<'_>, (step, errno): TaskStartFailure) -> i32 {
    let _ = send_answers(socket, &[Answer::failed(step, errno)], &[]);
    1
}

impl<'a> Host<'a> {
    /// Makes the host from the parameters `plan`: reserves the memory for its tasks, and creates its epoll set and its
    /// directory. Frees the heap of the parent, which the host inherited. Called once, in the new process of the host.
    /// Descriptors from `first_own` on are the host's own. `socket` brings the requests of the parent.
    ///
    /// # Errors
    /// The failed step and the error number.
    fn prepare(
        plan: &'a HostParameters,
        first_own: RawFd,
        socket: BorrowedFd<'a>,
    ) -> Result<Self, TaskStartFailure> {
        let at_clone = |errno| (SpawnStep::Clone, errno);
        // SAFETY: the host has a table of descriptors of its own, in which nothing else uses this one.
        let file = move_above(unsafe { OwnedFd::from_raw_fd(plan.file) }, first_own).map_err(at_clone)?;
        // SAFETY: has no precondition.
        let epoll = Errno::result(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map_err(at_clone)?;
        // SAFETY: the descriptor is new.
        let epoll = move_above(unsafe { OwnedFd::from_raw_fd(epoll) }, first_own).map_err(at_clone)?;
        // SAFETY: the host uses no heap from here on.
        unsafe { free_heap(plan.heap_begin).map_err(at_clone)? };
        let initial_values = InitialValues::read(&plan.layout, file.as_raw_fd());
        let initial_values = initial_values.map_err(|errno| (SpawnStep::Exec, errno))?;
        let headers = HeaderCopy::read(&plan.layout, file.as_raw_fd());
        let slots_at = reserve_slots(plan).map_err(at_clone)?;
        fill_gaps_above(slots_at);
        let table = map_anonymous(plan.capacity * size_of::<Slot>()).map_err(at_clone)?.cast::<Slot>();
        for index in 0..plan.capacity {
            // SAFETY: the memory has room for so many slots.
            unsafe { table.add(index).write(Slot { pidfd: SLOT_FREE, pid: 0 }) };
        }
        // SAFETY: all of them were written, and nothing else uses the memory.
        let slots = unsafe { std::slice::from_raw_parts_mut(table, plan.capacity) };
        // SAFETY: the parent has mapped memory of this size for the directory, and has written nothing there.
        let directory = unsafe { TaskDirectory::create(plan.directory, plan.size, plan.nonce) };
        let starts =
            map_anonymous(MAX_PENDING_REQUESTS * size_of::<TaskStart<'_>>()).map_err(at_clone)?.cast();
        let own_ranges = if plan.frees_leftovers {
            let memory = map_anonymous(HostMappings::BYTES).map_err(at_clone)?;
            // SAFETY: the memory is new and has the size.
            Some(unsafe { HostMappings::read(memory) })
        } else {
            None
        };
        // Only now, so that `own_ranges` contains the slots with their rooms for heaps.
        // SAFETY: no task lives.
        unsafe { unmap_heap_rooms(plan, slots_at) };
        let host = Self {
            plan,
            socket,
            file,
            initial_values,
            headers,
            epoll,
            first_own,
            slots_at,
            slots,
            directory,
            starts,
            own_ranges,
            living: 0,
            unmap_at: None,
            new_tasks: NewTasks::NONE,
        };
        host.add_to_epoll(host.socket.as_raw_fd(), SOCKET).map_err(at_clone)?;
        Ok(host)
    }

    /// Adds `descriptor` to the epoll set of the host (epoll(7)). `number` identifies the descriptor in the events: the
    /// index of a slot, or a number for the socket.
    fn add_to_epoll(&self, descriptor: RawFd, number: u64) -> Result<(), Errno> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number };
        // SAFETY: the event outlives the call.
        let added = unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event)
        };
        Errno::result(added).map(drop)
    }

    /// Starts a task (a process in the shared address space) for each request of the parent, and handles the ends of
    /// tasks. Returns the exit code of the host:
    ///
    /// - 0 when the last task has ended and no more requests can come.
    /// - 1 if epoll_wait(2) failed, or if a parent that may wait for an answer gets none. Tasks may still live.
    fn serve(&mut self) -> i32 {
        let mut may_get_more = true;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MAX_EVENTS as usize];
        while may_get_more || self.living > 0 {
            let timeout = self.longest_wait();
            // SAFETY: there is room for so many events.
            let count =
                unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), MAX_EVENTS, timeout) };
            let Ok(count) = usize::try_from(count) else {
                if Errno::last() == Errno::EINTR {
                    continue;
                }
                return 1;
            };
            // The slots of ended tasks come first: requests may need them.
            self.check_new_tasks();
            let mut has_requests = false;
            for event in events.iter().take(count) {
                match event.u64 {
                    SOCKET => has_requests = true,
                    slot => self.handle_task_end(slot, true),
                }
            }
            if has_requests && may_get_more {
                // The parent waits for the end of a host that does not answer. So the host ends, also if tasks live.
                let Ok(more_can_come) = self.start_requested_tasks() else { return 1 };
                may_get_more = more_can_come;
                if !may_get_more {
                    self.close_unneeded();
                }
            }
        }
        0
    }

    /// Removes the socket from the epoll set: the parent has closed its end of the connection, which would wake the
    /// host again and again. Closes the streams that the tasks inherited from the host, because the reader of a pipe
    /// finds its end only when no process has the writing end open.
    fn close_unneeded(&self) {
        // SAFETY: epoll(7) forgets the descriptor with this call, and the event is ignored.
        unsafe {
            let (epoll, socket) = (self.epoll.as_raw_fd(), self.socket.as_raw_fd());
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, socket, std::ptr::null_mut());
        }
        // These descriptors are not the host's own.
        let _ = close_descriptor_range(0, self.first_own - 1);
    }

    /// Lets the host learn of the end of the new task with the pidfd `pidfd`, which is in the slot with the index
    /// `slot`.
    ///
    /// # Errors
    /// If the pidfd can't be added to the epoll set. The host then can't detect the end of the task.
    pub(super) fn watch_task(&mut self, slot: usize, pidfd: RawFd) -> Result<(), Errno> {
        if self.new_tasks.add(slot, pidfd, Instant::now() + WATCH_AFTER) {
            return Ok(());
        }
        self.add_to_epoll(pidfd, slot as u64)
    }

    /// Handles the ends of those new tasks that have ended. If the time of the new tasks is over, adds the pidfds of
    /// the others to the epoll set, so that their ends wake the host.
    fn check_new_tasks(&mut self) {
        let Some(check_at) = self.new_tasks.check_at() else { return };
        let mut tasks = std::mem::replace(&mut self.new_tasks, NewTasks::NONE);
        let now = Instant::now();
        let is_due = check_at <= now;
        let next_check = if is_due { now + WATCH_AFTER } else { check_at };
        for (slot, pidfd, has_ended) in tasks.check() {
            if has_ended {
                self.handle_task_end(slot as u64, false);
            } else if !is_due || self.add_to_epoll(pidfd, slot as u64).is_err() {
                // A task also stays new if the kernel refuses its pidfd. `new_tasks` has had room for it before.
                self.new_tasks.add(slot, pidfd, next_check);
            }
        }
    }

    /// Handles the end of the task in the slot with the index `number`: closes the pidfd of the task, removes the
    /// addresses that the task has published for other tasks ([`TaskDirectory`]), and marks the slot as that of an
    /// ended task. The memory of the task is unmapped later. Does nothing if the slot has no task. `is_in_epoll` says
    /// whether the pidfd was added to the epoll set.
    fn handle_task_end(&mut self, number: u64, is_in_epoll: bool) {
        let Some(slot) = usize::try_from(number).ok().and_then(|index| self.slots.get_mut(index)) else {
            return;
        };
        if slot.pidfd < 0 {
            return;
        }
        let ended = std::mem::replace(slot, Slot { pidfd: ENDED, pid: 0 });
        // epoll(7) forgets a pidfd only when all its copies are closed, and the parent has one. So it is removed first.
        // SAFETY: closes the pidfd of this slot, which nothing uses any more.
        unsafe {
            if is_in_epoll {
                let epoll = self.epoll.as_raw_fd();
                libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, ended.pidfd, std::ptr::null_mut());
            }
            libc::close(ended.pidfd);
        }
        self.directory.remove_task(ended.pid);
        self.living -= 1;
        self.unmap_at.get_or_insert_with(|| Instant::now() + UNMAP_AFTER);
    }

    /// Unmaps the memory of ended tasks if the time has come. Returns how long the host may wait for events, in
    /// milliseconds: until the memory of ended tasks is to be unmapped, or until it has to look at new tasks. -1 for no
    /// end.
    fn longest_wait(&mut self) -> i32 {
        let now = Instant::now();
        if self.unmap_at.is_some_and(|at| at <= now) {
            self.unmap_ended_tasks();
        }
        let next = [self.unmap_at, self.new_tasks.check_at()].into_iter().flatten().min();
        let Some(next) = next else { return -1 };
        let milliseconds = next.saturating_duration_since(now).as_millis();
        // Rounded up.
        i32::try_from(milliseconds).unwrap_or(i32::MAX).saturating_add(1)
    }

    /// Unmaps the memory of all tasks that have ended. If no task lives and the address space is a lasting one
    /// ([`HostParameters::frees_leftovers`]), also unmaps everything else that tasks have left.
    pub(super) fn unmap_ended_tasks(&mut self) {
        self.unmap_at = None;
        for slot in 0..self.slots.len() {
            if self.slots.get(slot).is_some_and(|slot| slot.pidfd == ENDED) {
                self.unmap_slot(slot);
            }
        }
        if self.living == 0
            && let Some(own_ranges) = &self.own_ranges
        {
            // SAFETY: no task lives.
            unsafe {
                own_ranges.unmap_new_mappings();
                unmap_heap_rooms(self.plan, self.slots_at);
            }
        }
    }
}

/// Kills a task that the host has started. Must only be used if the parent of the task does not know the process id:
/// the parent could otherwise have waited for the task, and another process could have the id.
pub(super) fn kill_task(pid: u32) {
    // SAFETY: has no precondition.
    unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
}

/// Maps inaccessible memory into the gaps above `slots_at`, the address of the lowest slot. The kernel would place the
/// heaps of tasks in these gaps, where each pair of heaps needs a page of the page table, before it uses the rooms for
/// heaps. Does nothing if addresses are limited (`RLIMIT_AS`): the tasks may need them.
fn fill_gaps_above(slots_at: u64) {
    if !matches!(getrlimit(Resource::RLIMIT_AS), Ok((RLIM_INFINITY, _))) {
        return;
    }
    let mut bytes = LARGEST_FILLING;
    let mut count = 0;
    while bytes >= SMALLEST_FILLING && count < MOST_FILLINGS {
        match map_anonymous_with_protection(bytes, libc::PROT_NONE).map(|at| at.expose_provenance() as u64) {
            Ok(at) if at >= slots_at => count += 1,
            mapped => {
                // No gap of this size is left above the slots.
                if let Ok(at) = mapped {
                    // SAFETY: the range was mapped just now.
                    unsafe { unmap(at, at + bytes as u64) };
                }
                bytes /= 2;
            }
        }
    }
}

/// Unmaps everything in the rooms for heaps, of which each slot has one.
///
/// # Safety
/// No task may live.
unsafe fn unmap_heap_rooms(plan: &HostParameters, slots_at: u64) {
    for index in 0..plan.capacity {
        let (at, bytes) = plan.slot.heap_room(slots_at, index);
        // SAFETY: only mappings of tasks are there.
        unsafe { unmap(at, at + bytes) };
    }
}

/// Reserves the addresses of all slots, so that no later start fails for lack of addresses. The reservation is writable
/// at first: the kernel then checks `RLIMIT_AS` and `RLIMIT_DATA`, and the commit limit if `vm.overcommit_memory` is 2.
/// A later start can still fail with `ENOMEM`, for what the tasks have mapped meanwhile. Returns the address of the
/// lowest slot.
fn reserve_slots(plan: &HostParameters) -> Result<u64, Errno> {
    let bytes = plan.slot.bytes_of(plan.capacity as u64).ok_or(Errno::ENOMEM)?;
    let at = map_anonymous(usize::try_from(bytes).map_err(|_| Errno::ENOMEM)?)?;
    // SAFETY: the range was mapped just now.
    Errno::result(unsafe { libc::syscall(libc::SYS_mprotect, at, bytes, libc::PROT_NONE) })?;
    let at = at.expose_provenance() as u64;
    Ok(at.next_multiple_of(plan.slot.alignment))
}
