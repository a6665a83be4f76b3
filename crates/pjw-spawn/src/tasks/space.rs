//! The address space of tasks, for the process that starts them: this process forks the host, and sends the host a
//! request for each task.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, waitpid};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    sendmsg, shutdown, socketpair,
};

use super::directory::{TASKS_VARIABLE, TaskDirectory};
use super::host::{self, HostParameters};
use super::own_memory::{MemoryForFork, heap_begin};
use super::request::{Answer, RequestBuffer, RequestHeader, receive_answers};
use super::room::{AddressSpaceError, check_room};
use super::slot::{SlotShape, stack_bytes};
use super::stack::AuxiliaryVector;
use crate::child::{Child, ExitStatus, end_without_pidfd, wait_without_reaping};
use crate::clone::{CLONE_CLEAR_SIGHAND, CloneArguments};
use crate::context::SpawnContext;
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::layout::ExecArrays;
use crate::own_policy::MemoryPolicy;
use crate::setup::Setup;
use crate::signals;

/// The first Linux in which a core dump of one process leaves others with the same memory running: 5.16.
const SEPARATE_CORE_DUMPS: (u32, u32) = (5, 16);
/// The first Linux that gives no huge pages to stacks: 6.7.
const STACKS_WITHOUT_HUGE_PAGES: (u32, u32) = (6, 7);
/// The bytes of the name of a process in /proc/PID/comm, with its NUL byte.
const COMM_BYTES: usize = 16;

/// An address space in which tasks are started. Tasks are processes of one program that share their memory; the
/// [module](super) describes them. A small additional process, the host, owns the address space and starts the tasks.
///
/// Dropping this value never ends running tasks. By default, the host ends after the last task.
///
/// If the context was configured with [`SpawnContext::kill_when_launcher_ends`], two things differ:
///
/// - The kernel kills the tasks when the thread that made this value ends.
/// - Dropping this value kills the host at once. The running tasks continue until they end or that thread ends.
#[derive(Debug)]
pub struct AddressSpace {
    setup: Arc<Setup>,
    /// The connection with the host.
    pub(super) socket: OwnedFd,
    buffer: RequestBuffer,
    host: Pid,
    /// The address of the directory of the space, in the memory of the host.
    directory: u64,
    nonce: u64,
    /// The offsets of the requests that are on their way, the oldest first.
    posted: VecDeque<usize>,
    /// The answers that have arrived and were not returned yet, each with the pidfd of its task.
    arrived: VecDeque<(Answer, Option<OwnedFd>)>,
    /// Whether the caller of [`AddressSpace::leave_host`] must end the host, and not this value.
    is_left: bool,
}

/// The parameters of a new address space for tasks (processes that share their memory), such as the maximum number of
/// tasks that run at the same time, and the number of ranks.
pub(crate) struct SpaceParameters {
    /// The maximum number of tasks that exist at the same time.
    pub(crate) capacity: usize,
    /// The number of ranks.
    pub(crate) size: u32,
    /// Whether further tasks may be started as long as the address space exists. If true, memory that ended tasks have
    /// left is unmapped whenever no task exists.
    pub(crate) is_lasting: bool,
}

impl AddressSpace {
    /// Makes an address space for tasks (processes that share their memory) of the program of `context`. The caller
    /// must have called [`SpawnContext::share_memory`]. `capacity` is the maximum number of tasks that run at the same
    /// time. The rank of each task must be less than `rank_count`.
    ///
    /// The tasks become children of the calling process. With [`SpawnContext::kill_when_launcher_ends`], the kernel
    /// kills the tasks when the calling thread ends.
    ///
    /// # Errors
    /// - [`AddressSpaceError::Unsupported`] if the caller has not called [`SpawnContext::share_memory`] for `context`,
    ///   or has called [`SpawnContext::set_credentials`].
    /// - [`AddressSpaceError::Room`] if a limit does not allow `capacity` tasks.
    /// - [`AddressSpaceError::Host`] if the process that owns the address space can't be started.
    pub fn create(
        context: &SpawnContext,
        capacity: usize,
        rank_count: u32,
    ) -> Result<Self, AddressSpaceError> {
        if let Some(task_program) = &context.setup.task_program {
            check_room(task_program, capacity)?;
        }
        let parameters = SpaceParameters { capacity, size: rank_count, is_lasting: true };
        let mut space = Self::from_setup(Arc::clone(&context.setup), &parameters)?;
        space.wait_until_ready()?;
        Ok(space)
    }

    /// Begins to make an address space for tasks: processes of the program in `setup` that share their memory. Does not
    /// wait until the host, the process that owns the address space, is ready: [`AddressSpace::wait_until_ready`] must
    /// be called before the first result is waited for. `parameters` contains the parameters of the address space. The
    /// caller must have called [`check_room`], which checks that there is room for the tasks.
    pub(crate) fn from_setup(
        setup: Arc<Setup>,
        parameters: &SpaceParameters,
    ) -> Result<Self, AddressSpaceError> {
        reap_hosts();
        let Some(task_program) = setup.task_program.clone() else {
            return Err(AddressSpaceError::Unsupported("a context without SpawnContext::share_memory"));
        };
        if setup.credentials.is_some() {
            return Err(AddressSpaceError::Unsupported("another user or group"));
        }
        let failed = |errno| AddressSpaceError::Host(SpawnError { step: SpawnStep::Clone, errno });
        let io_failed = |error: rustix::io::Errno| failed(Errno::from_raw(error.raw_os_error()));
        let slot =
            SlotShape::new(&task_program.layout, stack_bytes()).ok_or_else(|| failed(Errno::ENOMEM))?;
        let (socket, host_socket) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(io_failed)?;
        let buffer = RequestBuffer::new().map_err(failed)?;
        let directory = MemoryForFork::map(TaskDirectory::size_in_bytes(parameters.size)).map_err(failed)?;
        let mut nonce = [0; 8];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()).map_err(io_failed)?;
        let nonce = u64::from_ne_bytes(nonce);
        let plan = HostParameters {
            layout: task_program.layout,
            slot,
            file: task_program.file.as_raw_fd(),
            socket: host_socket.as_raw_fd(),
            buffer: buffer.address(),
            directory: directory.address(),
            capacity: parameters.capacity,
            size: parameters.size,
            launcher: launcher(&setup),
            heap_begin: heap_begin().ok_or_else(|| failed(Errno::ENOSYS))?,
            auxiliary: AuxiliaryVector::of_this_process(),
            must_not_dump: kernel_version() < SEPARATE_CORE_DUMPS,
            stacks_need_advice: kernel_version() < STACKS_WITHOUT_HUGE_PAGES,
            frees_leftovers: parameters.is_lasting,
            nonce,
        };
        let host = fork_host(&plan).map_err(failed)?;
        drop(host_socket);
        Ok(Self {
            setup,
            socket,
            buffer,
            host,
            directory: directory.address().expose_provenance() as u64,
            nonce,
            posted: VecDeque::new(),
            arrived: VecDeque::new(),
            is_left: false,
        })
    }

    /// Waits until the host, the process that owns the address space, is ready to start tasks. The host answers
    /// requests that were sent before only then.
    ///
    /// # Errors
    /// [`AddressSpaceError::Host`] with the failed step. Then no task was started, and none will be.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), AddressSpaceError> {
        let error = match self.receive_answer() {
            Ok((Answer { errno: 0, .. }, _)) => return Ok(()),
            Ok((answer, _)) => error_of(answer),
            Err(errno) => SpawnError { step: SpawnStep::Clone, errno },
        };
        Err(AddressSpaceError::Host(error))
    }

    /// Returns the process id of the host: the process that owns the address space of the tasks. The memory files of
    /// the host, such as `/proc/PID/smaps`, show the memory of all tasks.
    #[must_use]
    pub fn host_pid(&self) -> Pid {
        self.host
    }

    /// Starts one task: a process that shares its memory with the other tasks of this address space. `instance`
    /// contains its rank, arguments, placement and standard streams. Waits until the task has begun its program or
    /// has failed to start.
    ///
    /// # Errors
    /// The step that failed, with its error number. In the step [`SpawnStep::Clone`], `EAGAIN` can mean that the
    /// maximum number of tasks runs already, and `EINVAL` that the rank is too large. `EOWNERDEAD` and
    /// `ENOTRECOVERABLE` mean that the host (the process that starts the tasks) has ended, as [`SpawnError`] says.
    /// After an error, the task does not run: it was killed if it had begun.
    pub fn start(&mut self, instance: &Instance) -> Result<Child, SpawnError> {
        let setup = Arc::clone(&self.setup);
        let mut layout = ExecArrays::new(&setup.environment, setup.has_rank_variables);
        self.send_request(instance, &mut layout)?;
        self.wait_for_oldest_request()
    }

    /// Sends a request to start the task `instance`. Each request needs a call of
    /// [`AddressSpace::wait_for_oldest_request`], which returns the result. At most
    /// [`MAX_PENDING_REQUESTS`](super::request::MAX_PENDING_REQUESTS) requests may be without a result. `layout` makes
    /// the argument array and the environment array of the task. `layout` must have been made for the environment of
    /// this address space.
    ///
    /// # Errors
    /// `E2BIG` in the step [`SpawnStep::Exec`] if the arguments and the environment do not fit into the memory for
    /// requests. The request is then not sent.
    pub(crate) fn send_request(
        &mut self,
        instance: &Instance,
        layout: &mut ExecArrays,
    ) -> Result<(), SpawnError> {
        if self.posted.is_empty() {
            self.buffer.clear();
        }
        let offset = self.write_request(instance, layout)?;
        let sent = self.send_offset(instance, offset);
        sent.map_err(|errno| SpawnError { step: SpawnStep::Clone, errno })?;
        self.posted.push_back(offset);
        Ok(())
    }

    /// Waits until the host (the process that owns the address space) has answered the oldest request of
    /// [`AddressSpace::send_request`] whose result was not returned yet. Returns the started task.
    ///
    /// # Errors
    /// The errors of [`AddressSpace::start`].
    pub(crate) fn wait_for_oldest_request(&mut self) -> Result<Child, SpawnError> {
        let at_clone = |errno| SpawnError { step: SpawnStep::Clone, errno };
        let received = self.receive_answer();
        self.posted.pop_front();
        let (answer, pidfd) = received.map_err(at_clone)?;
        let child = pidfd.map(|pidfd| Child { pid: Pid(answer.pid), pidfd });
        match (answer.errno, child) {
            (0, Some(child)) => return Ok(child),
            (_, Some(child)) => {
                let _ = child.wait();
            }
            // A task without a pidfd is killed, because no caller could wait for it.
            (_, None) if answer.pid != 0 => end_without_pidfd(Pid(answer.pid)),
            (_, None) => {}
        }
        Err(if answer.errno == 0 { at_clone(Errno::EMFILE) } else { error_of(answer) })
    }

    /// Writes the request for the task `instance` into the memory for requests. The host (the process that owns the
    /// address space) reads this memory. Returns the offset of the request in this memory. `layout` makes the argument
    /// array and the environment array of the task.
    fn write_request(&mut self, instance: &Instance, layout: &mut ExecArrays) -> Result<usize, SpawnError> {
        let setup = &self.setup;
        let policy = instance.placement.preferred_numa_node.map(MemoryPolicy::prefer_node).transpose();
        let policy = policy.map_err(|errno| SpawnError { step: SpawnStep::Mask, errno })?;
        let mask = instance.placement.cpus.as_ref().map_or(&[][..], CpuSet::words);
        let directory = setup.directory.as_ref().map_or(&[][..], |path| path.as_bytes_with_nul());
        let mut strings = Vec::new();
        let (arguments, variables) = layout.fill(instance);
        // SAFETY: the layout ends both lists with a null pointer, and each string with a NUL byte.
        let (argument_count, variable_count) =
            unsafe { (append_strings(arguments, &mut strings), append_strings(variables, &mut strings)) };
        let variable = format!("{TASKS_VARIABLE}={:x}:{:x}\0", self.directory, self.nonce);
        strings.extend_from_slice(variable.as_bytes());
        strings.extend_from_slice(setup.program.as_bytes_with_nul());
        let stdio = &instance.stdio;
        let header = RequestHeader {
            rank: instance.rank,
            task: 0,
            argument_count,
            variable_count: variable_count + 1,
            mask_words: mask.len(),
            policy,
            streams: [stdio.input.is_some(), stdio.output.is_some(), stdio.error.is_some()],
            has_cgroup: instance.placement.cgroup.is_some(),
            launcher: launcher(setup),
            blocked_signals: setup.blocked_signals,
            descriptor_limit: setup
                .descriptor_limit_to_restore()
                .map(|limit| (limit.rlim_cur, limit.rlim_max)),
            directory_bytes: directory.len(),
            string_bytes: strings.len(),
            name: comm(&setup.program),
        };
        let written = self.buffer.write(header, mask, directory, &strings);
        written.map_err(|errno| SpawnError { step: SpawnStep::Exec, errno })
    }

    /// Sends the offset of a written request to the host (the process that owns the address space). The message also
    /// passes the descriptors of the streams and of the cgroup that `instance` has. If the host has ended, fails with
    /// the error number of [`AddressSpace::errno_of_ended_host`].
    fn send_offset(&self, instance: &Instance, offset: usize) -> Result<(), Errno> {
        let stdio = &instance.stdio;
        let passed = [&stdio.input, &stdio.output, &stdio.error, &instance.placement.cgroup];
        let passed: Vec<BorrowedFd<'_>> =
            passed.into_iter().flatten().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !passed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&passed));
        }
        loop {
            match sendmsg(
                &self.socket,
                &[IoSlice::new(&offset.to_ne_bytes())],
                &mut control,
                SendFlags::NOSIGNAL,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                // The kernel reports CONNRESET if the host has ended with requests unread.
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(self.errno_of_ended_host());
                }
                Err(error) => return Err(Errno::from_raw(error.raw_os_error())),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Returns the next answer of the host (the process that owns the address space), with the pidfd of the started
    /// task (a process in this address space). If all received answers have been returned, waits for the next message
    /// of the host. The pidfd is `None` if the answer contains no pidfd, or if this process can't have another open
    /// descriptor.
    ///
    /// If the host has ended, kills the tasks that it had begun and not answered for, waits for their ends, and fails
    /// with the error number of [`AddressSpace::errno_of_ended_host`].
    fn receive_answer(&mut self) -> Result<(Answer, Option<OwnedFd>), Errno> {
        if self.arrived.is_empty() {
            self.arrived.extend(receive_answers(self.socket.as_fd())?);
        }
        self.arrived.pop_front().ok_or_else(|| {
            // These tasks are killed, because no caller gets them.
            let unanswered = std::mem::take(&mut self.posted);
            unanswered.iter().filter_map(|offset| self.buffer.task(*offset)).for_each(end_without_pidfd);
            self.errno_of_ended_host()
        })
    }

    /// Waits for the end of the host, which has closed its end of the connection. Returns the error number that stands
    /// for the way in which it ended: `EOWNERDEAD` if `SIGKILL` has ended it, and otherwise `ENOTRECOVERABLE`. The host
    /// remains a child that can be waited for.
    fn errno_of_ended_host(&self) -> Errno {
        match wait_without_reaping(self.host) {
            Ok(ExitStatus::Signal(libc::SIGKILL)) => Errno::EOWNERDEAD,
            _ => Errno::ENOTRECOVERABLE,
        }
    }
}

impl AddressSpace {
    /// Ends the use of this address space, but does not kill the host, the process that owns the address space. With
    /// [`SpawnContext::kill_when_launcher_ends`], returns the process id of the host, and the caller must later end the
    /// host by [`end_without_pidfd`]. The tasks then continue, because the address space exists until the last task has
    /// ended. Otherwise returns `None`: the host then ends after the last task.
    pub(crate) fn leave_host(mut self) -> Option<Pid> {
        self.is_left = self.setup.ends_with_launcher;
        self.is_left.then_some(self.host)
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // A process that another thread has forked meanwhile may have a copy of the socket. Without a shutdown, the
        // host would wait for further requests as long as that process lives.
        let _ = shutdown(&self.socket, Shutdown::Both);
        if self.is_left {
            return;
        }
        if self.setup.ends_with_launcher {
            // The tasks continue: the address space exists until the last task has ended.
            end_without_pidfd(self.host);
        } else {
            HOSTS.lock().unwrap_or_else(PoisonError::into_inner).push(self.host);
        }
    }
}

/// Hosts that end with their last task, and were not waited for.
static HOSTS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Reaps the hosts that have ended.
fn reap_hosts() {
    let lives = |host: &Pid| {
        let waited = waitpid(nix::unistd::Pid::from_raw(host.0.cast_signed()), Some(WaitPidFlag::WNOHANG));
        matches!(waited, Ok(nix::sys::wait::WaitStatus::StillAlive))
    };
    HOSTS.lock().unwrap_or_else(PoisonError::into_inner).retain(lives);
}

/// Returns the process id of the process whose end also ends the host and the tasks. 0 if there is no such process.
fn launcher(setup: &Setup) -> i32 {
    if setup.ends_with_launcher { std::process::id().cast_signed() } else { 0 }
}

fn error_of(answer: Answer) -> SpawnError {
    let step = SpawnStep::from_number(answer.step as usize).unwrap_or(SpawnStep::Clone);
    SpawnError { step, errno: Errno::from_raw(answer.errno) }
}

/// Forks the calling process, and returns the process id of the new process. The new process becomes the host (the
/// process that owns the address space of the tasks and starts the tasks) with the parameters `plan`. It never returns
/// from this function. In the host, all signals are blocked, except the real-time signals that the C library uses
/// itself.
///
/// # Errors
/// The error of clone3(2).
fn fork_host(plan: &HostParameters) -> Result<Pid, Errno> {
    let arguments = CloneArguments {
        flags: CLONE_CLEAR_SIGHAND,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArguments::default()
    };
    let blocked = signals::block_all_signals();
    // SAFETY: as after fork(2) in a process with threads, the new process calls nothing that takes locks or allocates.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>()) };
    if pid == 0 {
        host::run(plan);
    }
    let pid = Errno::result(pid);
    signals::set_blocked_signals(blocked);
    pid.map(|pid| Pid(u32::try_from(pid).unwrap_or(0)))
}

/// Appends the strings of `list` to `strings`, each with its NUL byte. Returns the number of strings in `list`.
///
/// # Safety
/// `list` must end with a null pointer, and each string with a NUL byte.
unsafe fn append_strings(mut list: *const *const libc::c_char, strings: &mut Vec<u8>) -> usize {
    let mut count = 0;
    // SAFETY: the caller guarantees the ends of the list and of the strings.
    unsafe {
        while !(*list).is_null() {
            strings.extend_from_slice(CStr::from_ptr(*list).to_bytes_with_nul());
            list = list.add(1);
            count += 1;
        }
    }
    count
}

/// Returns the name of a process that executes `program`, as execve(2) sets it.
fn comm(program: &CStr) -> [u8; COMM_BYTES] {
    let name = program.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let mut comm = [0; COMM_BYTES];
    let length = name.len().min(COMM_BYTES - 1);
    comm[..length].copy_from_slice(&name[..length]);
    comm
}

/// Returns the version of the running kernel. 0.0 if the version can't be read.
fn kernel_version() -> (u32, u32) {
    static VERSION: OnceLock<(u32, u32)> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let name = nix::sys::utsname::uname();
        let release = name.map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    })
}
