//! Carries out the changes of cpusets: on the calling thread, or on a thread of its own.
//!
//! Before the kernel moves a process to another cgroup, it lets all forks in progress on the machine end
//! (`cgroup_threadgroup_rwsem`, kernel/cgroup/cgroup.c). A process that was preempted in the middle of a fork must get
//! a CPU first. Beside very many processes that fork, that takes hundreds of milliseconds, and the priority of the
//! caller does not matter. With a thread, the caller waits for a limited time, and learns the outcome of a longer
//! change later. The thread gets all changes of a plan in one request, and wakes the caller once.
//!
//! A process that can't end its fork blocks the thread for as long. [`requests`] knows which requests the thread has
//! not answered: the caller does not wait again for the same answer, and sends nothing twice.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::ids::Tid;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::move_guard::MoveGuard;
use crate::cpuset::{CpusetContext, UnrelatedThreads, apply_change};
use crate::sys::affinity::own_thread;
use crate::{cgroup::CpusetMount, proc::procfs::ProcDir, systemd::SystemdClient};

mod problem;
mod requests;

pub use problem::CpusetThreadProblem;
use requests::{Answer, ThreadRequests, outcome_without_thread};

/// Makes changes of cpusets one after another, on the calling thread or on a separate thread
/// ([`CpusetChanger::start_thread`]).
#[derive(Debug)]
pub(super) struct CpusetChanger {
    worker: Worker,
    affinity_persists: bool,
    own_cgroups: OwnCgroupNames,
}

#[derive(Debug)]
enum Worker {
    /// The calling thread.
    Caller(Box<ChangeContext>),
    /// A thread of its own.
    Thread(Box<ChangeThread>),
}

/// What is needed to make changes of cpusets. Used by the thread that makes the changes.
#[derive(Debug)]
struct ChangeContext {
    proc: ProcDir,
    systemd: SystemdClient,
    unrelated_threads: UnrelatedThreads,
    move_guard: MoveGuard,
    own_cgroups: OwnCgroupNames,
}

/// A message to the thread that makes the changes.
enum Request {
    /// Make these changes in this hierarchy, one after another.
    Change(Vec<CpusetAction>, CpusetMount),
    /// Restore the affinity masks that the kernel has reset because the cgroups at these paths were removed.
    Restore(Vec<String>, CpusetMount),
}

/// The thread that makes the changes, as the calling thread sees it.
#[derive(Debug)]
struct ChangeThread {
    id: Tid,
    /// `None` once the thread was found to have ended.
    handle: Option<JoinHandle<()>>,
    sender: Sender<Request>,
    /// One answer for each change and each restore of masks, in the order of the requests. The calling thread does not
    /// sleep on this channel, so that the outcome of a single change does not wake it.
    answers: Receiver<Answer>,
    /// A message after the last outcome of each [`Request::Change`]. This message wakes the calling thread.
    completed_requests: Receiver<()>,
    /// The number of messages that `completed_requests` still has to bring.
    uncompleted_requests: usize,
    /// The requests without an answer, and the outcomes of delayed changes: changes that were not complete when the
    /// calling thread stopped waiting.
    requests: ThreadRequests,
    completion: Arc<CompletionEvent>,
}

/// What the thread that makes the changes has of its channels and of the event.
struct ThreadEnds {
    requests: Receiver<Request>,
    answers: Sender<Answer>,
    completed: Sender<()>,
    completion: Arc<CompletionEvent>,
}

/// Wakes the calling thread when the thread that makes the changes ends, also by a panic.
struct EndNotice(Arc<CompletionEvent>);

impl Drop for EndNotice {
    fn drop(&mut self) {
        // Writing fails only if the counter is full. Then the fd is readable anyway.
        let _ = self.0.event.write(1);
    }
}

/// The event by which the thread reports to the calling thread that a delayed change is complete.
#[derive(Debug)]
struct CompletionEvent {
    event: EventFd,
    /// Whether the calling thread waits for the outcome, so that the thread must not write the event.
    is_awaited: AtomicBool,
    /// Whether masks are still to be restored because a partition has ended. The thread updates this field after each
    /// request.
    is_partition_ending: AtomicBool,
}

impl ChangeContext {
    fn new(affinity_persists: bool, own_cgroups: OwnCgroupNames) -> Result<Self, Errno> {
        Ok(Self {
            proc: ProcDir::open(Path::new("/proc"))?,
            systemd: SystemdClient::default(),
            unrelated_threads: UnrelatedThreads::new(affinity_persists),
            move_guard: MoveGuard::new(affinity_persists),
            own_cgroups,
        })
    }

    /// Makes one change of a cpuset, and returns its outcome. Leaves out processes whose memory is locked, because
    /// their move would stop all forks of the machine.
    fn change(&mut self, action: &CpusetAction, hierarchy: &CpusetMount) -> CpusetOutcome {
        let Self { proc, systemd, unrelated_threads, move_guard, own_cgroups } = self;
        match move_guard.without_locked_processes(proc, hierarchy, action) {
            Ok(change) => {
                let context = &mut CpusetContext { proc, hierarchy, systemd, own_cgroups };
                apply_change(context, unrelated_threads, &change)
            }
            Err(outcome) => outcome,
        }
    }

    fn restore_masks(&mut self, removed: &[String], hierarchy: &CpusetMount) {
        let Self { proc, systemd, unrelated_threads, own_cgroups, .. } = self;
        let context = &mut CpusetContext { proc, hierarchy, systemd, own_cgroups };
        removed.iter().for_each(|path| unrelated_threads.record_partition_end(path));
        unrelated_threads.restore_after_end(context, Instant::now());
    }

    fn publish_partition_end(&self, completion: &CompletionEvent) {
        completion.is_partition_ending.store(self.unrelated_threads.is_partition_ending(), Ordering::SeqCst);
    }

    /// Carries out the requests one after another. Runs on the separate thread that makes the changes. Another thread,
    /// the sender, sends the requests and receives the answers. `ends` has this thread's ends of the channels.
    ///
    /// - Sends an answer after each change and after each restore of masks. After the answer to a change, writes the
    ///   event, which wakes the sender. Does not write the event while the sender waits for outcomes
    ///   ([`CompletionEvent::is_awaited`]).
    /// - Sends a message to `completed` after the last change of a request.
    /// - Returns when the sender has dropped its ends of the channels.
    fn serve_requests(&mut self, ends: &ThreadEnds) {
        let ThreadEnds { requests, answers, completed, completion } = ends;
        for request in requests {
            match request {
                Request::Restore(removed, hierarchy) => {
                    self.restore_masks(&removed, &hierarchy);
                    self.publish_partition_end(completion);
                    if answers.send(Answer::Restored).is_err() {
                        return;
                    }
                }
                Request::Change(actions, hierarchy) => {
                    for action in actions {
                        let outcome = self.change(&action, &hierarchy);
                        self.publish_partition_end(completion);
                        if answers.send(Answer::Changed(outcome)).is_err() {
                            return;
                        }
                        if !completion.is_awaited.load(Ordering::SeqCst) {
                            // Writing fails only if the counter is full. Then the fd is readable anyway.
                            let _ = completion.event.write(1);
                        }
                    }
                    if completed.send(()).is_err() {
                        return;
                    }
                }
            }
        }
    }
}

impl CpusetChanger {
    /// Makes a value that makes each change on the calling thread. `affinity_persists` says whether the kernel keeps
    /// the affinity mask of a thread when a cpuset changes
    /// ([`pjw_core::cpuset_group::CpusetSupport::affinity_persists`]). `own_cgroups` has the names of the cgroups of
    /// this pjwd.
    ///
    /// # Errors
    /// If `/proc` can't be opened.
    pub(super) fn new(affinity_persists: bool, own_cgroups: OwnCgroupNames) -> Result<Self, Errno> {
        let context = ChangeContext::new(affinity_persists, own_cgroups.clone())?;
        Ok(Self { worker: Worker::Caller(Box::new(context)), affinity_persists, own_cgroups })
    }

    /// Starts a thread that makes all later changes of cpusets. Returns the id of the thread. The thread ends when this
    /// value is dropped. A change that the thread makes at that moment is still completed.
    ///
    /// # Errors
    /// If the thread can't be started, `/proc` can't be opened, or no file descriptor is left.
    pub(super) fn start_thread(&mut self) -> io::Result<Tid> {
        let mut context = ChangeContext::new(self.affinity_persists, self.own_cgroups.clone())?;
        let thread = ChangeThread::start(move |ends| context.serve_requests(ends))?;
        let id = thread.id;
        self.worker = Worker::Thread(Box::new(thread));
        Ok(id)
    }

    /// Makes the cpuset changes `actions` in `hierarchy` one after another, and returns the outcome of each. If a
    /// separate thread makes the changes, waits at most `max_wait` for all of them, and not at all if the thread has
    /// completed nothing for as long as that. The outcome of a change that is not complete then is
    /// [`CpusetOutcome::Delayed`].
    pub(super) fn change(
        &mut self,
        actions: &[CpusetAction],
        hierarchy: &CpusetMount,
        max_wait: Duration,
    ) -> Vec<CpusetOutcome> {
        match &mut self.worker {
            Worker::Caller(context) => {
                actions.iter().map(|action| context.change(action, hierarchy)).collect()
            }
            Worker::Thread(thread) => thread.change(actions, hierarchy, max_wait),
        }
    }

    /// Restores the affinity masks that the kernel has reset because cpuset partitions were removed. `removed` are
    /// the paths of the cgroups that were removed since the last call. The kernel can reset masks for some time
    /// after a removal. So this function must be called regularly, even if `removed` is empty.
    pub(super) fn restore_after_removal(&mut self, removed: Vec<String>, hierarchy: &CpusetMount) {
        if self.affinity_persists {
            return;
        }
        match &mut self.worker {
            Worker::Caller(context) => {
                if !removed.is_empty() || context.unrelated_threads.is_partition_ending() {
                    context.restore_masks(&removed, hierarchy);
                }
            }
            Worker::Thread(thread) => thread.restore_masks(removed, hierarchy),
        }
    }

    /// Returns what keeps the thread that makes the changes from its work. `None` if there is no such problem, or no
    /// such thread.
    pub(super) fn thread_problem(&mut self) -> Option<CpusetThreadProblem> {
        let Worker::Thread(thread) = &mut self.worker else { return None };
        thread.problem(Instant::now())
    }

    /// Returns a file descriptor that poll(2) shows as readable when a delayed change is complete. A change is
    /// delayed if [`CpusetChanger::change`] returned [`CpusetOutcome::Delayed`]. `None` if no change is delayed, or
    /// if [`CpusetChanger::take_finished`] has returned all delayed changes.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.worker {
            Worker::Thread(thread) if thread.has_delayed_changes() => Some(thread.completion.event.as_fd()),
            _ => None,
        }
    }

    /// Returns whether [`CpusetChanger::take_finished`] would now return a change.
    pub(super) fn has_finished(&mut self) -> bool {
        let Worker::Thread(thread) = &mut self.worker else { return false };
        thread.receive_finished();
        thread.requests.has_finished()
    }

    /// Waits at most `max_wait` until all delayed changes are complete, and returns whether they are complete. Does not
    /// wait if the thread has completed nothing for as long as that. A change is delayed if [`CpusetChanger::change`]
    /// returned [`CpusetOutcome::Delayed`]. [`CpusetChanger::take_finished`] returns the outcomes afterwards.
    pub(super) fn wait_until_complete(&mut self, max_wait: Duration) -> bool {
        let Worker::Thread(thread) = &mut self.worker else { return true };
        thread.wait_until_complete(max_wait)
    }

    /// Removes and returns the delayed changes that are complete, with their outcomes, in the order of the requests.
    /// A change is delayed if [`CpusetChanger::change`] returned [`CpusetOutcome::Delayed`].
    pub(super) fn take_finished(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        let Worker::Thread(thread) = &mut self.worker else { return Vec::new() };
        thread.receive_finished();
        thread.requests.take_finished()
    }
}

impl ChangeThread {
    /// Starts the thread. It runs `serve` with its ends of the channels, and ends when `serve` returns.
    ///
    /// # Errors
    /// If the thread can't be started, or no file descriptor is left.
    fn start(serve: impl FnOnce(&ThreadEnds) + Send + 'static) -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let completion = Arc::new(CompletionEvent {
            event,
            is_awaited: AtomicBool::new(false),
            is_partition_ending: AtomicBool::new(false),
        });
        let (sender, incoming) = channel();
        let (outgoing, answers) = channel();
        let (completed, completed_requests) = channel();
        let (id_sender, id) = channel();
        let thread_completion = Arc::clone(&completion);
        let handle = std::thread::Builder::new().name("cpusets".to_owned()).spawn(move || {
            // Is dropped last: the channels are closed when the calling thread wakes.
            let _end_notice = EndNotice(Arc::clone(&thread_completion));
            let ends = ThreadEnds {
                requests: incoming,
                answers: outgoing,
                completed,
                completion: thread_completion,
            };
            // Can't fail: the calling thread keeps the receiver until it has the thread id.
            let _ = id_sender.send(own_thread());
            serve(&ends);
        })?;
        Ok(Self {
            id: id.recv().map_err(io::Error::other)?,
            handle: Some(handle),
            sender,
            answers,
            completed_requests,
            uncompleted_requests: 0,
            requests: ThreadRequests::default(),
            completion,
        })
    }

    /// Lets the thread make the changes `actions`, and waits for their outcomes, at most for `max_wait`. The thread
    /// first makes the changes that were sent before. Does not wait if the thread has answered nothing for `max_wait`.
    /// Returns the outcome of each change:
    ///
    /// - [`CpusetOutcome::Delayed`] if the change is not complete when the time has passed.
    /// - The outcome of [`outcome_without_thread`] if the thread ended before it made the change.
    fn change(
        &mut self,
        actions: &[CpusetAction],
        hierarchy: &CpusetMount,
        max_wait: Duration,
    ) -> Vec<CpusetOutcome> {
        // The answers since the last call show whether the thread goes on.
        self.receive_answers();
        if self.requests.has_ended() {
            return actions.iter().map(outcome_without_thread).collect();
        }
        let now = Instant::now();
        if let Some(removed) = self.requests.add_waiting_restore(now) {
            self.send(Request::Restore(removed, hierarchy.clone()));
        }
        self.requests.add_changes(actions, now);
        self.uncompleted_requests += 1;
        // Before the request: the thread may make the changes at once.
        self.completion.is_awaited.store(true, Ordering::SeqCst);
        self.send(Request::Change(actions.to_vec(), hierarchy.clone()));
        self.wait_for_requests(self.requests.wait_deadline(max_wait, now));
        self.completion.is_awaited.store(false, Ordering::SeqCst);
        // The wait can end just before the thread sends an outcome. The thread then sees `is_awaited`, and writes no
        // event. So the outcomes are received after `is_awaited` was reset.
        self.receive_answers();
        let mut outcomes = self.requests.take_last_outcomes(actions.len());
        if self.requests.has_finished() {
            // The outcomes of earlier changes came during the wait, for which the thread wrote no event. Writing fails
            // only if the counter is full. Then the descriptor is readable anyway.
            let _ = self.completion.event.write(1);
        }
        outcomes.resize(actions.len(), CpusetOutcome::Delayed);
        outcomes
    }

    /// Lets the thread restore the affinity masks that the kernel has reset because partitions were removed. `removed`
    /// are the paths of the cgroups that were removed since the last call. Does not wait. Sends nothing while an
    /// earlier request to restore masks is open, so that a blocked thread gets only one.
    fn restore_masks(&mut self, removed: Vec<String>, hierarchy: &CpusetMount) {
        self.receive_answers();
        let is_partition_ending = self.completion.is_partition_ending.load(Ordering::SeqCst);
        if let Some(paths) = self.requests.add_restore(removed, is_partition_ending, Instant::now()) {
            self.send(Request::Restore(paths, hierarchy.clone()));
        }
    }

    fn send(&self, request: Request) {
        // Fails only if the thread has ended. The next reading of the answers finds that.
        let _ = self.sender.send(request);
    }

    /// Returns whether a delayed change is not complete, or its outcome was not taken yet.
    fn has_delayed_changes(&self) -> bool {
        self.requests.open_changes() > 0 || self.requests.has_finished()
    }

    /// Waits until the thread has made all changes that were sent, until it has ended, or until `deadline`. Without a
    /// deadline, waits for as long as the changes take.
    fn wait_for_requests(&mut self, deadline: Option<Instant>) {
        while self.uncompleted_requests > 0 {
            match self.completed_requests.recv_timeout(time_left(deadline)) {
                Ok(()) => self.uncompleted_requests -= 1,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => self.note_end(),
            }
        }
    }

    fn wait_until_complete(&mut self, max_wait: Duration) -> bool {
        self.receive_answers();
        self.wait_for_requests(self.requests.wait_deadline(max_wait, Instant::now()));
        self.receive_answers();
        self.requests.open_changes() == 0
    }

    /// Receives the answers to delayed changes, if there may be any.
    fn receive_finished(&mut self) {
        if !self.requests.has_open_requests() && !self.requests.has_finished() {
            return;
        }
        // The event is reset first. An outcome that arrives after this line sets the event again.
        let _ = self.completion.event.read();
        self.receive_answers();
    }

    /// Records the answers that the thread has sent, or that it has ended.
    fn receive_answers(&mut self) {
        while self.handle.is_some() {
            match self.answers.try_recv() {
                Ok(answer) => self.requests.note_answer(answer, Instant::now()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => self.note_end(),
            }
        }
    }

    /// Records that the thread has ended, by a panic.
    fn note_end(&mut self) {
        self.uncompleted_requests = 0;
        let Some(handle) = self.handle.take() else { return };
        // The thread has closed its channels, so this wait is short. Then all its answers are in the channel.
        let cause = match handle.join() {
            Ok(()) => "without a message".to_owned(),
            Err(panic) => panic_message(&*panic),
        };
        while let Ok(answer) = self.answers.try_recv() {
            self.requests.note_answer(answer, Instant::now());
        }
        self.requests.note_end(cause);
    }

    /// Returns what keeps the thread from its work at the time `now`.
    fn problem(&mut self, now: Instant) -> Option<CpusetThreadProblem> {
        self.receive_answers();
        self.requests.problem(self.id, now)
    }
}

/// Returns the message of a panic, in one line.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").replace('\n', " ")
}

/// The time until the deadline. Without a deadline, as long as it takes.
fn time_left(deadline: Option<Instant>) -> Duration {
    deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
}

#[cfg(test)]
mod tests;
