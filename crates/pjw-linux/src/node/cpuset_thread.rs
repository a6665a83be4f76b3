//! The thread that makes the changes of cpusets, as the event loop of pjwd uses it.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use pjw_core::ids::Tid;

use super::{CpusetThreadProblem, LinuxMachine};

impl LinuxMachine {
    /// Starts a thread that makes all later changes of cpusets. Returns the id of the thread. With the thread,
    /// [`change_cpusets`] waits for the changes no longer than its parameter `max_wait` says. If a change is not
    /// complete then, its outcome is [`Delayed`]. Without the thread, [`change_cpusets`] always waits until all changes
    /// are complete.
    ///
    /// [`change_cpusets`]: pjw_core::ports::MachineInterface::change_cpusets
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    ///
    /// # Errors
    /// If the thread can't be started, `/proc` can't be opened, or no file descriptor is left.
    pub fn start_cpuset_change_thread(&mut self) -> io::Result<Tid> {
        self.cpuset_changer.start_thread()
    }

    /// Returns a file descriptor that poll(2) shows as readable when a delayed change of a cpuset is complete. A change
    /// is delayed if its outcome was [`Delayed`]. `None` if no change was delayed, or if
    /// [`take_finished_cpuset_changes`] has already returned the outcome of each delayed change.
    ///
    /// [`take_finished_cpuset_changes`]: pjw_core::ports::MachineInterface::take_finished_cpuset_changes
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    #[must_use]
    pub fn cpuset_changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.cpuset_changer.fd()
    }

    /// Returns whether [`take_finished_cpuset_changes`] would now return the outcome of a delayed change of a cpuset. A
    /// change is delayed if its outcome was [`Delayed`].
    ///
    /// [`take_finished_cpuset_changes`]: pjw_core::ports::MachineInterface::take_finished_cpuset_changes
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    pub fn has_finished_cpuset_changes(&mut self) -> bool {
        self.cpuset_changer.has_finished()
    }

    /// Waits at most `max_wait` until all delayed changes of cpusets are complete, and returns whether they are
    /// complete. Does not wait if the thread has completed nothing for as long as that. A change is delayed if its
    /// outcome was [`Delayed`](pjw_core::cpuset_group::CpusetOutcome::Delayed).
    pub fn wait_for_cpuset_changes(&mut self, max_wait: Duration) -> bool {
        self.cpuset_changer.wait_until_complete(max_wait)
    }

    /// Returns what keeps the thread that makes the changes of cpusets from its work: a system call of the thread has
    /// not returned for 20 s, or the thread has ended. `None` if there is no such problem, or no such thread.
    pub fn cpuset_thread_problem(&mut self) -> Option<CpusetThreadProblem> {
        self.cpuset_changer.thread_problem()
    }
}
