//! Carries out the changes of cpusets: on the calling thread, or on a thread of its own.
//!
//! Before the kernel moves a process to another cgroup, it lets all forks in progress on the machine end
//! (`cgroup_threadgroup_rwsem`, kernel/cgroup/cgroup.c). A process that was preempted in the middle of a fork must get
//! a CPU first. Beside very many processes that fork, that takes hundreds of milliseconds, and the priority of the
//! caller does not matter. With a thread, the caller waits for a limited time, and learns the outcome of a longer
//! change later. The thread gets all changes of a plan in one request, and wakes the caller once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
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
    Thread(ChangeThread),
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
    requests: Sender<Request>,
    /// The outcomes of changes, in the order of the requests. The calling thread does not sleep on this channel, so
    /// that the outcome of a single change does not wake it.
    outcomes: Receiver<(CpusetAction, CpusetOutcome)>,
    /// A message after the last outcome of each [`Request::Change`]. This message wakes the calling thread.
    completed_requests: Receiver<()>,
    /// The number of changes whose outcomes were not received.
    open_changes: usize,
    /// The number of requests for whose end no message was received.
    open_requests: usize,
    /// The outcomes of delayed changes: changes that were not complete when the calling thread stopped waiting.
    finished: VecDeque<(CpusetAction, CpusetOutcome)>,
    completion: Arc<CompletionEvent>,
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

    /// Carries out the requests in `requests` one after another. Runs on the separate thread that makes the changes.
    /// Another thread, the sender, sends the requests and receives the outcomes.
    ///
    /// - Sends the outcome of each change to `outcomes`. Then writes the event of `completion`, which wakes the sender.
    ///   Does not write the event while the sender waits for outcomes (`is_awaited` in `completion`).
    /// - Sends a message to `completed` after the last change of a request. A request to restore masks has no outcome
    ///   and no message.
    /// - Returns when the sender has dropped its ends of the channels.
    fn serve_requests(
        &mut self,
        requests: &Receiver<Request>,
        outcomes: &Sender<(CpusetAction, CpusetOutcome)>,
        completed: &Sender<()>,
        completion: &CompletionEvent,
    ) {
        for request in requests {
            match request {
                Request::Restore(removed, hierarchy) => {
                    self.restore_masks(&removed, &hierarchy);
                    self.publish_partition_end(completion);
                }
                Request::Change(actions, hierarchy) => {
                    for action in actions {
                        let outcome = self.change(&action, &hierarchy);
                        self.publish_partition_end(completion);
                        if outcomes.send((action, outcome)).is_err() {
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
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let completion = Arc::new(CompletionEvent {
            event,
            is_awaited: AtomicBool::new(false),
            is_partition_ending: AtomicBool::new(false),
        });
        let (requests, incoming) = channel();
        let (outgoing, outcomes) = channel();
        let (completed, completed_requests) = channel();
        let (sender, tid) = channel();
        let of_thread = Arc::clone(&completion);
        std::thread::Builder::new().name("cpusets".to_owned()).spawn(move || {
            // Can't fail: the calling thread keeps the receiver until it has the thread id.
            let _ = sender.send(own_thread());
            context.serve_requests(&incoming, &outgoing, &completed, &of_thread);
        })?;
        let tid = tid.recv().map_err(io::Error::other)?;
        self.worker = Worker::Thread(ChangeThread {
            requests,
            outcomes,
            completed_requests,
            open_changes: 0,
            open_requests: 0,
            finished: VecDeque::new(),
            completion,
        });
        Ok(tid)
    }

    /// Makes the cpuset changes `actions` in `hierarchy` one after another, and returns the outcome of each. If a
    /// separate thread makes the changes, waits at most `max_wait` for all of them. The outcome of a change that is not
    /// complete then is [`CpusetOutcome::Delayed`].
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
        if self.affinity_persists || (removed.is_empty() && !self.is_partition_ending()) {
            return;
        }
        match &mut self.worker {
            Worker::Caller(context) => context.restore_masks(&removed, hierarchy),
            // If the thread has ended, the next change reports it.
            Worker::Thread(thread) => {
                let _ = thread.requests.send(Request::Restore(removed, hierarchy.clone()));
            }
        }
    }

    fn is_partition_ending(&self) -> bool {
        match &self.worker {
            Worker::Caller(context) => context.unrelated_threads.is_partition_ending(),
            Worker::Thread(thread) => thread.completion.is_partition_ending.load(Ordering::SeqCst),
        }
    }

    /// Returns a file descriptor that poll(2) shows as readable when a delayed change is complete. A change is
    /// delayed if [`CpusetChanger::change`] returned [`CpusetOutcome::Delayed`]. `None` if no change is delayed, or
    /// if [`CpusetChanger::take_finished`] has returned all delayed changes.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.worker {
            Worker::Thread(thread) if thread.open_changes > 0 || !thread.finished.is_empty() => {
                Some(thread.completion.event.as_fd())
            }
            _ => None,
        }
    }

    /// Returns whether [`CpusetChanger::take_finished`] would now return a change.
    pub(super) fn has_finished(&mut self) -> bool {
        let Worker::Thread(thread) = &mut self.worker else { return false };
        thread.receive_finished();
        !thread.finished.is_empty()
    }

    /// Waits at most `max_wait` until all delayed changes are complete, and returns whether they are complete. A change
    /// is delayed if [`CpusetChanger::change`] returned [`CpusetOutcome::Delayed`]. [`CpusetChanger::take_finished`]
    /// returns the outcomes afterwards.
    pub(super) fn wait_until_complete(&mut self, max_wait: Duration) -> bool {
        let Worker::Thread(thread) = &mut self.worker else { return true };
        thread.wait_until_complete(Instant::now().checked_add(max_wait))
    }

    /// Removes and returns the delayed changes that are complete, with their outcomes, in the order of the requests.
    /// A change is delayed if [`CpusetChanger::change`] returned [`CpusetOutcome::Delayed`].
    pub(super) fn take_finished(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        let Worker::Thread(thread) = &mut self.worker else { return Vec::new() };
        thread.receive_finished();
        std::mem::take(&mut thread.finished).into()
    }
}

impl ChangeThread {
    /// Lets the thread make the changes `actions`, and waits for their outcomes, at most for `max_wait`. The thread
    /// first makes the changes that were sent before. Returns the outcome of each change:
    ///
    /// - [`CpusetOutcome::Delayed`] if the change is not complete when the time has passed.
    /// - [`CpusetOutcome::Refused`] if the thread ended before it made the change.
    fn change(
        &mut self,
        actions: &[CpusetAction],
        hierarchy: &CpusetMount,
        max_wait: Duration,
    ) -> Vec<CpusetOutcome> {
        let deadline = Instant::now().checked_add(max_wait);
        let ended = CpusetOutcome::Refused {
            reason: "the thread that changes cpusets has ended: restart pjwd".to_owned(),
        };
        // Before the request: the thread may make the changes at once.
        self.completion.is_awaited.store(true, Ordering::SeqCst);
        if self.requests.send(Request::Change(actions.to_vec(), hierarchy.clone())).is_err() {
            return vec![ended; actions.len()];
        }
        self.open_changes += actions.len();
        self.open_requests += 1;
        let waited = self.wait_for_requests(deadline);
        self.completion.is_awaited.store(false, Ordering::SeqCst);
        // The wait can end just before the thread sends an outcome. The thread then sees `is_awaited`, and writes no
        // event. So the outcomes are received after `is_awaited` was reset.
        self.receive_outcomes();
        // The thread makes the changes in order, so the last outcomes are those of this request.
        let own_count = actions.len().saturating_sub(self.open_changes);
        let own = self.finished.split_off(self.finished.len() - own_count);
        let mut outcomes: Vec<CpusetOutcome> = own.into_iter().map(|(_, outcome)| outcome).collect();
        if !self.finished.is_empty() {
            // The outcomes of earlier changes came during the wait, for which the thread wrote no event. Writing fails
            // only if the counter is full. Then the descriptor is readable anyway.
            let _ = self.completion.event.write(1);
        }
        outcomes.resize(actions.len(), if waited.is_ok() { CpusetOutcome::Delayed } else { ended });
        outcomes
    }

    /// Waits until the thread has made all changes that were sent, or until `deadline`. Without a deadline, waits for
    /// as long as the changes take.
    ///
    /// # Errors
    /// If the thread has ended before it has made all changes.
    fn wait_for_requests(&mut self, deadline: Option<Instant>) -> Result<(), ThreadEnded> {
        while self.open_requests > 0 {
            match self.completed_requests.recv_timeout(time_left(deadline)) {
                Ok(()) => self.open_requests -= 1,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Err(ThreadEnded),
            }
        }
        Ok(())
    }

    fn wait_until_complete(&mut self, deadline: Option<Instant>) -> bool {
        // If the thread has ended, some changes stay open.
        let _ = self.wait_for_requests(deadline);
        self.receive_outcomes();
        self.open_changes == 0
    }

    fn receive_finished(&mut self) {
        if self.open_changes == 0 && self.finished.is_empty() {
            return;
        }
        // The completion is reset first. An outcome after this line sets it again.
        let _ = self.completion.event.read();
        self.receive_outcomes();
    }

    /// Adds the outcomes that the thread has sent to `finished`.
    fn receive_outcomes(&mut self) {
        for outcome in self.outcomes.try_iter() {
            self.open_changes -= 1;
            self.finished.push_back(outcome);
        }
    }
}

/// The time until the deadline. Without a deadline, as long as it takes.
fn time_left(deadline: Option<Instant>) -> Duration {
    deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
}

/// The thread has ended, by a panic.
struct ThreadEnded;

#[cfg(test)]
mod tests;
