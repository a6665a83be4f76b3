//! The master: it takes the results, delivers them, and replaces processes that die.

mod replace;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use super::delivery::ResultQueue;
use super::error::FarmError;
use super::functions::FarmFunctions;
use super::member::FarmProcess;
use super::memory::{MemorySizes, SharedMemory, UNKNOWN_TOTAL};
use super::result::{FarmProgress, ItemResult};
use super::ring::{PartialResult, ResultRing, RingReadOutcome};
use super::settings::FarmSettings;
use super::wake::{LONGEST_WAIT, MasterWaker};
use super::window::{ItemQueue, ItemState, ItemStatus};
use super::writer;
use crate::child::Child;

/// How long the master waits between two attempts to fork a process.
const FORK_PAUSE: Duration = Duration::from_millis(50);
/// The longest time between two checks for processes that have died, while results come without a pause.
const LONGEST_UNCHECKED: Duration = Duration::from_millis(10);
/// The most results that are taken from one worker before the others have their turn.
const RESULTS_IN_TURN: usize = 256;
/// The number in an event of epoll(7) that stands for the eventfd of the [`MasterWaker`], not for a process.
const WAKER_EVENT: u64 = u64::MAX;

/// What a call of [`RunningFarm::next_within`] returns: the result of one more item, no result within the time limit,
/// or the end after all results. A farm is a group of worker processes that compute numbered work items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextResult {
    /// The result of one more item.
    Result(ItemResult),
    /// No result has arrived within the time limit.
    TimedOut,
    /// All results were delivered, and all processes of the farm have ended.
    End,
}

/// A started farm: a group of worker processes that compute numbered work items. As an iterator, this value waits for
/// the next result and returns the result. After the last result, the iterator waits until all processes of the farm
/// have ended, and ends. If the farm can't continue, or if a process of the farm fails after it has done all its work,
/// the iterator returns one error and then ends.
///
/// A worker that dies is replaced only while the caller waits for a result, so the caller should keep waiting for
/// results. Dropping the value kills all processes of the farm.
pub struct RunningFarm<'a> {
    settings: FarmSettings,
    /// The affinity masks of the workers: worker `i` gets the mask with the index `i % masks.len()`. Empty if all
    /// workers keep the mask of the calling process.
    masks: Vec<CpuSet>,
    functions: FarmFunctions<'a>,
    shared: SharedMemory,
    /// The eventfd with which the other processes wake the master (the calling process).
    waker: MasterWaker,
    /// The descriptors for which the master waits: the eventfd, and the pidfds of all processes of the farm.
    epoll: Epoll,
    workers: Vec<FarmProcess>,
    /// For each worker, the pieces of a result that has arrived in part.
    partials: Vec<PartialResult>,
    reader: FarmProcess,
    writer: FarmProcess,
    /// How many workers have died at each item, by the item number. Has no entry for an item with a result.
    attempts: HashMap<u64, u32>,
    /// The results that have arrived from the workers.
    delivery: ResultQueue,
    /// How many processes of the farm died and were replaced.
    replaced: u64,
    /// The time since which each attempt to fork the missing processes has failed. `None` if the last attempt did not
    /// fail.
    fork_fails_since: Option<Instant>,
    /// The last time at which the master checked whether processes have ended.
    last_check: Instant,
    /// Whether all results were delivered. The processes then end, and are not replaced.
    is_ending: bool,
    /// Whether all processes of the farm have ended, or were killed after an error.
    has_ended: bool,
    /// The error of the first process that failed after it had no work left. `None` if no process has failed so.
    end_failure: Option<FarmError>,
    /// The error that the farm returns after the results that have already arrived. `None` if there is no error, or if
    /// the farm has already returned it.
    failure: Option<FarmError>,
}

impl std::fmt::Debug for RunningFarm<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningFarm").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

impl<'a> RunningFarm<'a> {
    /// Maps the shared memory of a farm, and forks the processes of the farm. Worker `i` gets the affinity mask with
    /// the index `i % masks.len()` in `masks`. If `masks` is empty, all workers keep the affinity mask of the calling
    /// process. `items` is the number of items. `None` if a reader process reads the items.
    pub(crate) fn start(
        settings: FarmSettings,
        masks: Vec<CpuSet>,
        functions: FarmFunctions<'a>,
        items: Option<u64>,
    ) -> Result<Self, FarmError> {
        let failed = |what| move |errno| FarmError::SystemCall { what, errno };
        let to_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let has_writer = functions.write.is_some();
        // Each further worker would have no item.
        let worker_count = items.unwrap_or(u64::MAX).min(settings.workers.into());
        let sizes = MemorySizes {
            workers: to_usize(worker_count),
            window: to_usize(settings.window_size(items)),
            ring: to_usize(settings.ring_bytes.next_power_of_two()),
            input: if items.is_some() { 0 } else { to_usize(settings.input_bytes).next_multiple_of(4096) },
            has_writer,
        };
        let shared =
            SharedMemory::map(sizes).map_err(failed("the shared memory of the farm can't be mapped"))?;
        if let Some(items) = items {
            shared.control().total.store(items, Ordering::SeqCst);
        }
        let status = if items.is_some() { ItemStatus::Ready } else { ItemStatus::Free };
        for position in 0..sizes.window as u64 {
            ItemQueue(&shared).store_item_state(ItemState::new(position, status));
        }
        let not_watched = failed("the processes of the farm can't be watched");
        let waker = MasterWaker::new().map_err(not_watched)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(not_watched)?;
        let waker_event = EpollEvent::new(EpollFlags::EPOLLIN, WAKER_EVENT);
        epoll.add(waker.descriptor(), waker_event).map_err(not_watched)?;
        let mut farm = Self {
            workers: (0..sizes.workers).map(|_| FarmProcess::new(true)).collect(),
            partials: (0..sizes.workers).map(|_| PartialResult::default()).collect(),
            reader: FarmProcess::new(items.is_none()),
            writer: FarmProcess::new(has_writer && worker_count > 0),
            attempts: HashMap::new(),
            delivery: ResultQueue::new(settings.is_in_order, items.is_none(), has_writer),
            replaced: 0,
            fork_fails_since: None,
            last_check: Instant::now(),
            is_ending: false,
            has_ended: false,
            end_failure: None,
            failure: None,
            settings,
            masks,
            functions,
            shared,
            waker,
            epoll,
        };
        farm.fork_missing_processes().map_err(FarmError::Fork)?;
        Ok(farm)
    }

    /// Returns the next result of the farm (a group of worker processes that compute numbered work items). Waits for at
    /// most `timeout`, or without a limit if `timeout` is `None`. Returns [`NextResult::TimedOut`] if no result has
    /// arrived within `timeout`. After the last result, waits in the same way until all processes of the farm have
    /// ended, and returns [`NextResult::End`].
    ///
    /// # Errors
    /// - If the farm can't continue: a process can't be forked, a process has died too often, or the reader process or
    ///   the writer process failed. All processes of the farm are killed. Results that have already arrived are
    ///   returned first, then the error.
    /// - [`FarmError::EndFailed`] or [`FarmError::IoProcessEndFailed`] after the last result: a process of the farm had
    ///   done all its work, but then failed before its end.
    ///
    /// After an error, each call returns [`NextResult::End`].
    pub fn next_within(&mut self, timeout: Option<Duration>) -> Result<NextResult, FarmError> {
        match self.next_until(timeout.and_then(|timeout| Instant::now().checked_add(timeout))) {
            Err(error) => {
                self.kill_all();
                self.has_ended = true;
                // Results that arrived before the error are returned before the error.
                let Some(result) = self.delivery.pop() else { return Err(error) };
                self.failure = Some(error);
                Ok(NextResult::Result(result))
            }
            next => next,
        }
    }

    /// Returns the progress of the farm (a group of worker processes that compute numbered work items): how many items
    /// are done, how many failed, and how many workers run.
    #[must_use]
    pub fn progress(&self) -> FarmProgress {
        let total = self.shared.control().total.load(Ordering::SeqCst);
        FarmProgress {
            total: (total != UNKNOWN_TOTAL).then_some(total),
            workers: u32::try_from(self.worker_pids().len()).unwrap_or(u32::MAX),
            replaced: self.replaced,
            ..self.delivery.progress
        }
    }

    /// Returns the process ids of the workers of the farm. A worker that has died is included until a later call of
    /// [`RunningFarm::next_within`] notices its death.
    #[must_use]
    pub fn worker_pids(&self) -> Vec<Pid> {
        self.workers.iter().filter_map(|worker| Some(worker.child.as_ref()?.pid)).collect()
    }

    /// Returns the process id of the reader, which reads the items of the farm. If the reader has died, returns its old
    /// process id until a later call of [`RunningFarm::next_within`] notices the death. `None` if the farm has no
    /// reader, if the reader has read all items and ended, or if a reader that died is not replaced yet.
    #[must_use]
    pub fn reader_pid(&self) -> Option<Pid> {
        Some(self.reader.child.as_ref()?.pid)
    }

    /// Returns the process id of the writer, which writes the results of the farm. If the writer has died, returns its
    /// old process id until a later call of [`RunningFarm::next_within`] notices the death. `None` if the farm has no
    /// writer, if the writer has written all results and ended, or if a writer that died is not replaced yet.
    #[must_use]
    pub fn writer_pid(&self) -> Option<Pid> {
        Some(self.writer.child.as_ref()?.pid)
    }

    /// Returns the next result of the farm. Waits for a result until `deadline`, or without a limit if `deadline` is
    /// `None`. During the wait, passes results on to the writer and replaces processes that have died.
    ///
    /// - Returns [`NextResult::TimedOut`] if there is no result until `deadline`.
    /// - After the last result, lets the processes of the farm end. When all have ended, returns [`NextResult::End`].
    /// - If a process ended with an error after the last result, one call returns this error before
    ///   [`NextResult::End`].
    fn next_until(&mut self, deadline: Option<Instant>) -> Result<NextResult, FarmError> {
        let mut has_polled = false;
        loop {
            if let Some(result) = self.delivery.pop() {
                return Ok(NextResult::Result(result));
            }
            if self.has_ended {
                return self.failure.take().map_or(Ok(NextResult::End), Err);
            }
            if self.collect_results()? {
                // A master that finds results each time never gets to the wait below, and must still replace processes.
                if self.last_check.elapsed() >= LONGEST_UNCHECKED {
                    self.wait_for_event(Duration::ZERO)?;
                    self.replace_missing_processes()?;
                }
                continue;
            }
            // A writer that died is replaced first, because the new writer must call the function for its end.
            if Some(self.delivery.progress.delivered) == self.progress().total && !self.writer.is_missing() {
                self.let_processes_end();
                if self.children().next().is_none() {
                    self.has_ended = true;
                    self.failure = self.end_failure.take();
                    continue;
                }
            }
            self.replace_missing_processes()?;
            let timeout = self.max_wait(deadline);
            if timeout == Duration::ZERO {
                if has_polled {
                    return Ok(NextResult::TimedOut);
                }
                // One check without a wait, so that dead processes are also found if the caller never waits.
                has_polled = true;
                self.wait_for_event(timeout)?;
                continue;
            }
            // From here on, the other processes wake the master. Results that came before are collected once more.
            self.shared.control().is_master_sleeping.0.store(1, Ordering::SeqCst);
            if !self.collect_results()? {
                self.wait_for_event(timeout)?;
            }
            self.shared.control().is_master_sleeping.0.store(0, Ordering::SeqCst);
        }
    }

    /// Returns the longest time for which the master may sleep now. 0 if `deadline` has passed.
    fn max_wait(&self, deadline: Option<Instant>) -> Duration {
        let mut wait = LONGEST_WAIT;
        if let Some(deadline) = deadline {
            wait = wait.min(deadline.saturating_duration_since(Instant::now()));
        }
        if self.fork_fails_since.is_some() {
            wait = wait.min(FORK_PAUSE);
        }
        wait
    }

    /// Receives results from the ring buffers of the workers, and sends them to the writer if the farm has one. Makes
    /// the results ready for the caller: after the writer has written them, or at once if there is no writer. Takes no
    /// results from the workers while results wait for free space in the ring buffer of the writer. Returns whether any
    /// result was moved, or is ready for the caller.
    fn collect_results(&mut self) -> Result<bool, FarmError> {
        let mut is_any_moved = self.delivery.has_writer && self.delivery.deliver_written(&self.shared);
        is_any_moved |= self.delivery.send_to_writer(&self.shared);
        // While the writer is behind, the workers wait as soon as their rings are full.
        for index in 0..self.workers.len() {
            if !self.delivery.has_unsent_results() {
                is_any_moved |= self.take_results(index, RESULTS_IN_TURN)?;
                self.delivery.send_to_writer(&self.shared);
            }
        }
        Ok(is_any_moved || self.delivery.has_results())
    }

    /// Returns the ring buffer through which the worker with the index `index` sends results.
    fn ring(&self, index: usize) -> ResultRing<'_> {
        ResultRing {
            control: &self.shared.worker_controls()[index].results,
            bytes: self.shared.result_ring(index),
        }
    }

    /// Receives up to `max_results` results or pieces of results from the ring buffer of the worker with the index
    /// `index`, and then wakes the worker, which may wait for free space. Returns whether the ring buffer contained
    /// any.
    ///
    /// # Errors
    /// [`FarmError::Overwritten`] if the content of the ring buffer is invalid, or if a result is that of an item which
    /// this worker has not taken.
    fn take_results(&mut self, index: usize, max_results: usize) -> Result<bool, FarmError> {
        let owner = u32::try_from(index).unwrap_or(u32::MAX);
        let mut is_any_read = false;
        for _ in 0..max_results {
            // As in `ring`, which would borrow all of `self` while `partials` is changed.
            let ring = ResultRing {
                control: &self.shared.worker_controls()[index].results,
                bytes: self.shared.result_ring(index),
            };
            match ring.read_piece(&mut self.partials[index]) {
                RingReadOutcome::Nothing => break,
                RingReadOutcome::Piece => {}
                RingReadOutcome::Result(number, outcome) => {
                    if !self.delivery.record_result(&self.shared, owner, number, outcome) {
                        return Err(FarmError::Overwritten(owner));
                    }
                    self.workers[index].deaths = 0;
                    self.attempts.remove(&number);
                }
                RingReadOutcome::Invalid => return Err(FarmError::Overwritten(owner)),
            }
            is_any_read = true;
        }
        if is_any_read {
            self.ring(index).control.room.notify();
        }
        Ok(is_any_read)
    }

    /// Waits for an event, but not longer than `timeout`, rounded up to milliseconds. An event is one of these: a
    /// process of the farm wakes the master, a process of the farm ends, or a signal is handled. Handles the end of
    /// each process that has ended.
    fn wait_for_event(&mut self, timeout: Duration) -> Result<(), FarmError> {
        // Rounded up: a shorter sleep would end before the time limit of the caller, and be repeated.
        let milliseconds = u16::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        let timeout = EpollTimeout::from(milliseconds);
        let mut events = [EpollEvent::empty(); 16];
        let found = match self.epoll.wait(&mut events, timeout) {
            Ok(found) => found,
            // A signal was handled. The call returns, as if an event had come.
            Err(Errno::EINTR) => 0,
            Err(errno) => {
                return Err(FarmError::SystemCall { what: "the master can't wait", errno });
            }
        };
        self.last_check = Instant::now();
        for event in &events[..found] {
            match self.event_role(event.data()) {
                Some(role) => self.handle_end(role)?,
                None => self.waker.reset_eventfd(),
            }
        }
        Ok(())
    }

    /// Lets the processes of the farm end, after all results were delivered. Tells the writer that there are no more
    /// results, and wakes the workers that wait for an item. Does not wait for the processes. Does nothing after the
    /// first call.
    fn let_processes_end(&mut self) {
        if self.is_ending {
            return;
        }
        self.is_ending = true;
        if self.writer.child.is_some() {
            writer::send_end_of_results(&self.shared);
        }
        self.shared.control().items.0.notify_always();
    }

    fn children(&self) -> impl Iterator<Item = &Child> {
        let members = self.workers.iter().chain([&self.reader, &self.writer]);
        members.filter_map(|member| member.child.as_ref())
    }

    fn forget_children(&mut self) {
        let members = self.workers.iter_mut().chain([&mut self.reader, &mut self.writer]);
        members.for_each(|member| member.child = None);
    }

    fn kill_all(&mut self) {
        self.children().for_each(Child::kill_and_wait);
        self.forget_children();
    }
}

impl Iterator for RunningFarm<'_> {
    type Item = Result<ItemResult, FarmError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(None) {
                Ok(NextResult::Result(result)) => return Some(Ok(result)),
                Ok(NextResult::TimedOut) => {}
                Ok(NextResult::End) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for RunningFarm<'_> {
    fn drop(&mut self) {
        self.kill_all();
    }
}
