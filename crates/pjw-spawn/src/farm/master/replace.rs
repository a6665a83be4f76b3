//! The end of a process of the farm, and the process that replaces it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::RunningFarm;
use crate::child::ExitStatus;
use crate::farm::error::{FarmError, IoProcess};
use crate::farm::io_failure::IoFailureReason;
use crate::farm::member::{FarmProcess, ProcessRole};
use crate::farm::memory::UNKNOWN_TOTAL;
use crate::farm::process::{ForkResult, fork, run_and_exit};
use crate::farm::reader::Reader;
use crate::farm::result::Outcome;
use crate::farm::window::ItemQueue;
use crate::farm::worker::Worker;
use crate::farm::writer;
use crate::own_policy::set_own_mask;

/// The number of deaths in succession of a worker and its replacements while they compute no item, after which the farm
/// ends with an error. Such deaths have another cause than an item.
const MOST_IDLE_DEATHS: u32 = 10;
/// For how long the master tries again to fork a process.
const FORK_TIMEOUT: Duration = Duration::from_secs(10);
/// The most results that are taken from a ring at once.
const RESULTS_AT_ONCE: usize = 256;

impl RunningFarm<'_> {
    /// Returns what the master knows of the process with the role `role`.
    fn member(&mut self, role: ProcessRole) -> &mut FarmProcess {
        match role {
            ProcessRole::Worker(index) => &mut self.workers[index],
            ProcessRole::Reader => &mut self.reader,
            ProcessRole::Writer => &mut self.writer,
        }
    }

    /// The number that stands for a process in an event of epoll(7).
    fn event_number(&self, role: ProcessRole) -> u64 {
        match role {
            ProcessRole::Worker(index) => index as u64,
            ProcessRole::Reader => self.workers.len() as u64,
            ProcessRole::Writer => self.workers.len() as u64 + 1,
        }
    }

    /// Returns the role of the process to which an event of epoll(7) belongs. `number` is the number in the event
    /// (`epoll_data`). `None` if the event belongs to the eventfd that wakes the master.
    pub(super) fn event_role(&self, number: u64) -> Option<ProcessRole> {
        match usize::try_from(number).unwrap_or(usize::MAX).checked_sub(self.workers.len()) {
            None => Some(ProcessRole::Worker(usize::try_from(number).unwrap_or(0))),
            Some(0) => Some(ProcessRole::Reader),
            Some(1) => Some(ProcessRole::Writer),
            Some(_) => None,
        }
    }

    /// Handles the end of the process of the farm that has the role `role`: reads its exit status, and decides whether
    /// a new process must replace it. Does nothing if no process has this role.
    ///
    /// # Errors
    /// If the farm can't continue, for example because the processes with this role die again and again.
    pub(super) fn handle_end(&mut self, role: ProcessRole) -> Result<(), FarmError> {
        let Some(child) = self.member(role).child.take() else { return Ok(()) };
        let what = "it can't be read how a process of the farm ended, which another part of the program may have done";
        let end = child.wait().map_err(|errno| FarmError::SystemCall { what, errno })?;
        // Closing the pidfd is not enough: another forked process has a copy of it, epoll(7).
        let _ = self.epoll.delete(&child);
        if self.is_ending {
            self.store_end_failure(role, end);
            self.member(role).is_wanted = false;
            return Ok(());
        }
        let is_needed = match role {
            ProcessRole::Worker(index) => self.handle_worker_end(index, end)?,
            ProcessRole::Reader => self.handle_reader_end(end)?,
            ProcessRole::Writer => self.handle_writer_end(end)?,
        };
        self.member(role).is_wanted = is_needed;
        self.replaced += u64::from(is_needed);
        Ok(())
    }

    /// Stores the error of a process that had no work left and has ended with `end`. An exit status of 0 is no error.
    /// Only the first error is kept, and the farm returns it after all results.
    fn store_end_failure(&mut self, role: ProcessRole, end: ExitStatus) {
        if end == ExitStatus::Code(0) {
            return;
        }
        let error = match role {
            ProcessRole::Worker(index) => {
                FarmError::EndFailed { worker: u32::try_from(index).unwrap_or(u32::MAX), end }
            }
            ProcessRole::Reader => FarmError::IoProcessEndFailed { process: IoProcess::Reader, end },
            ProcessRole::Writer => FarmError::IoProcessEndFailed { process: IoProcess::Writer, end },
        };
        self.end_failure.get_or_insert(error);
    }

    /// Handles the end of the worker with the index `index`. Receives the results that the worker had completed, and
    /// empties its ring buffer. If the worker has ended while it computed an item, counts an attempt for this item.
    /// After the last permitted attempt, records [`Outcome::Killed`] as the result of the item. Returns whether a new
    /// worker is needed.
    ///
    /// # Errors
    /// [`FarmError::WorkerDies`] if workers with this index have died 10 times in a row without computing an item.
    fn handle_worker_end(&mut self, index: usize, end: ExitStatus) -> Result<bool, FarmError> {
        let owner = u32::try_from(index).unwrap_or(u32::MAX);
        // The results that the worker had put into its ring before its death count.
        while self.take_results(index, RESULTS_AT_ONCE)? {}
        self.partials[index].clear();
        self.ring(index).reset();
        let control = &self.shared.worker_controls()[index];
        let was_finished = control.is_finished.swap(0, Ordering::SeqCst) == 1;
        // `running` is the number of the item plus 1, or 0 if the worker computed none.
        let interrupted = control.running.swap(0, Ordering::SeqCst).checked_sub(1);
        let mut unfinished = ItemQueue(&self.shared).claimed_items(owner);
        if was_finished && unfinished.is_empty() {
            self.store_end_failure(ProcessRole::Worker(index), end);
            return Ok(false);
        }
        match interrupted.filter(|number| unfinished.contains(number)) {
            Some(number) => {
                self.workers[index].deaths = 0;
                let attempts = self.attempts.entry(number).or_insert(0);
                *attempts += 1;
                if *attempts >= self.settings.attempts {
                    let outcome = Outcome::Killed { attempts: *attempts, end };
                    self.attempts.remove(&number);
                    unfinished.retain(|other| *other != number);
                    self.delivery.record_result(&self.shared, owner, number, outcome);
                }
            }
            None => {
                let deaths = &mut self.workers[index].deaths;
                *deaths += 1;
                if *deaths >= MOST_IDLE_DEATHS {
                    return Err(FarmError::WorkerDies { worker: owner, deaths: *deaths, end });
                }
            }
        }
        Ok(!unfinished.is_empty() || !ItemQueue(&self.shared).is_exhausted())
    }

    /// Handles the end of the reader. Returns whether a new reader is needed: `false` if all items have been read.
    ///
    /// # Errors
    /// - The reason that the reader has stored: [`FarmError::IoProcessFailed`] or [`FarmError::ItemTooLarge`].
    /// - [`FarmError::IoProcessDies`] if too many readers have died at the same item.
    fn handle_reader_end(&mut self, end: ExitStatus) -> Result<bool, FarmError> {
        self.check_io_failure(IoProcess::Reader)?;
        let control = self.shared.control();
        let number = control.filled.load(Ordering::SeqCst);
        if control.total.load(Ordering::SeqCst) != UNKNOWN_TOTAL {
            self.store_end_failure(ProcessRole::Reader, end);
            return Ok(false);
        }
        self.count_death(ProcessRole::Reader, number, number, end)
    }

    /// Handles the end of the writer. Queues again the results that the writer has not written, for the new writer.
    /// Returns `true`, because a new writer is needed.
    ///
    /// # Errors
    /// - The reason that the writer has stored: [`FarmError::IoProcessFailed`] or [`FarmError::ResultOverwritten`].
    /// - [`FarmError::IoProcessDies`] if too many writers have died at the same result.
    fn handle_writer_end(&mut self, end: ExitStatus) -> Result<bool, FarmError> {
        self.delivery.requeue_unwritten(&self.shared);
        self.check_io_failure(IoProcess::Writer)?;
        let number = self.delivery.first_unwritten_item();
        let written = self.shared.control().written.load(Ordering::SeqCst);
        self.count_death(ProcessRole::Writer, written, number, end)
    }

    /// Returns an error if the reader or the writer has stored the reason for its end in the shared memory. The
    /// process must have ended. For the writer, `ResultQueue::requeue_unwritten` must be called before, because the
    /// error may contain the number of the first item whose result was not written.
    fn check_io_failure(&self, process: IoProcess) -> Result<(), FarmError> {
        let control = self.shared.control();
        let failure = match process {
            IoProcess::Reader => &control.reader_failure,
            IoProcess::Writer => &control.writer_failure,
        };
        Err(match failure.load() {
            None => return Ok(()),
            Some(IoFailureReason::FunctionFailed { number, code }) => {
                FarmError::IoProcessFailed { process, number, code }
            }
            Some(IoFailureReason::ItemTooLarge { number, size }) => {
                FarmError::ItemTooLarge { number, size, limit: self.shared.sizes.input as u64 }
            }
            Some(IoFailureReason::InvalidMessage) => {
                FarmError::ResultOverwritten { number: self.delivery.first_unwritten_item() }
            }
        })
    }

    /// Counts a death of the reader or the writer, as `role` says. `completed` is the number of items that the
    /// processes with this role have read or written. If this number has changed since the last death, the count
    /// begins again at 1. Returns `true`, because a new process is needed. `end` says how the process ended.
    ///
    /// # Errors
    /// [`FarmError::IoProcessDies`] with the item `number` if the count has reached the permitted number of attempts.
    fn count_death(
        &mut self,
        role: ProcessRole,
        completed: u64,
        number: u64,
        end: ExitStatus,
    ) -> Result<bool, FarmError> {
        let attempts = self.settings.attempts;
        let member = self.member(role);
        if member.died_at != completed {
            member.deaths = 0;
        }
        member.deaths += 1;
        member.died_at = completed;
        if member.deaths < attempts {
            return Ok(true);
        }
        let process = if role == ProcessRole::Reader { IoProcess::Reader } else { IoProcess::Writer };
        Err(FarmError::IoProcessDies { process, number, deaths: attempts, end })
    }

    /// Forks a new process for each role of the farm that needs a process and has none. If fork(2) fails, the next call
    /// tries again. Does nothing after all results were delivered.
    ///
    /// # Errors
    /// [`FarmError::Fork`] if fork(2) has failed at each call for at least 10 seconds.
    pub(super) fn replace_missing_processes(&mut self) -> Result<(), FarmError> {
        if self.is_ending {
            return Ok(());
        }
        let Err(errno) = self.fork_missing_processes() else {
            self.fork_fails_since = None;
            return Ok(());
        };
        let since = *self.fork_fails_since.get_or_insert_with(Instant::now);
        if since.elapsed() < FORK_TIMEOUT { Ok(()) } else { Err(FarmError::Fork(errno)) }
    }

    /// Forks a new process for each role of the farm that needs a process and has none. Stops at the first error of
    /// fork(2), and returns this error.
    pub(super) fn fork_missing_processes(&mut self) -> Result<(), Errno> {
        if self.reader.is_missing() {
            self.fork_process(ProcessRole::Reader)?;
        }
        if self.writer.is_missing() {
            self.fork_process(ProcessRole::Writer)?;
        }
        for index in 0..self.workers.len() {
            if self.workers[index].is_missing() {
                self.fork_process(ProcessRole::Worker(index))?;
            }
        }
        Ok(())
    }

    /// Forks a process with the role `role`. The new process does the work of this role and exits, so it does not
    /// return. The master keeps the new process, and gets an event when it ends.
    fn fork_process(&mut self, role: ProcessRole) -> Result<(), Errno> {
        match fork(&mut self.functions.fork)? {
            ForkResult::Master(child) => {
                let event = EpollEvent::new(EpollFlags::EPOLLIN, self.event_number(role));
                self.epoll.add(&child, event).inspect_err(|_| child.kill_and_wait())?;
                self.member(role).child = Some(child);
                Ok(())
            }
            ForkResult::NewProcess => run_and_exit(|| self.run_role(role)),
        }
    }

    /// Does the work of a worker, the reader or the writer, as `role` says. Runs in the new process, and first closes
    /// the descriptors of the other processes. A worker also sets its affinity mask, if the farm has masks. Returns the
    /// exit status for the process.
    fn run_role(&mut self, role: ProcessRole) -> i32 {
        self.workers.clear();
        (self.reader.child, self.writer.child) = (None, None);
        let (shared, waker) = (&self.shared, &self.waker);
        match role {
            ProcessRole::Worker(index) => {
                if !self.masks.is_empty() {
                    // Fails if all PUs of the mask went offline. The worker then runs on the PUs of the master.
                    let _ = set_own_mask(&self.masks[index % self.masks.len()]);
                }
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                let (chunk, functions) = (self.settings.chunk, &mut self.functions);
                Worker { index, chunk, shared, waker, functions }.run()
            }
            ProcessRole::Reader => match &mut self.functions.read {
                Some(read) => Reader { shared, waker }.run(read),
                None => 1,
            },
            ProcessRole::Writer => match &mut self.functions.write {
                Some(write) => writer::run_writer(shared, waker, write, &mut self.functions.writer_end),
                None => 1,
            },
        }
    }
}
