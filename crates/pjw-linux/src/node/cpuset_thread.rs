//! The thread that makes the changes of cpusets, as the event loop of pjwd uses it.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use pjw_core::ids::Tid;

use super::{CpusetThreadProblem, LinuxMachine};

impl LinuxMachine {
    /// Starts a thread that makes all later changes of cpusets. Returns the id of the thread. With the thread,
    /// [`change_cpusets`] waits at most for the time in its parameter `max_wait`. A change that is not complete after
    /// this time has the outcome [`Delayed`], and the thread goes on with the change. Without the thread,
    /// [`change_cpusets`] always waits until all changes are complete.
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
    /// is delayed if it was not complete when [`change_cpusets`] returned, so that its outcome was [`Delayed`]. `None`
    /// if no change was delayed, or if [`take_finished_cpuset_changes`] has already returned the outcome of each
    /// delayed change.
    ///
    /// [`change_cpusets`]: pjw_core::ports::MachineInterface::change_cpusets
    /// [`take_finished_cpuset_changes`]: pjw_core::ports::MachineInterface::take_finished_cpuset_changes
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    #[must_use]
    pub fn cpuset_changes_fd(&self) -> Option<BorrowedFd<'_>> {
        self.cpuset_changer.fd()
    }

    /// Returns whether a delayed change of a cpuset is complete, so that [`take_finished_cpuset_changes`] would now
    /// return its outcome. A change is delayed if it was not complete when [`change_cpusets`] returned, so that its
    /// outcome was [`Delayed`].
    ///
    /// [`change_cpusets`]: pjw_core::ports::MachineInterface::change_cpusets
    /// [`take_finished_cpuset_changes`]: pjw_core::ports::MachineInterface::take_finished_cpuset_changes
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    pub fn has_finished_cpuset_changes(&mut self) -> bool {
        self.cpuset_changer.has_finished()
    }

    /// Waits at most `max_wait` until all delayed changes of cpusets are complete, and returns whether all are
    /// complete. A change is delayed if it was not complete when [`change_cpusets`] returned, so that its outcome was
    /// [`Delayed`]. Does not wait if a system call blocks the thread that makes the changes: if work is pending, and
    /// the thread has completed nothing for `max_wait`.
    ///
    /// [`change_cpusets`]: pjw_core::ports::MachineInterface::change_cpusets
    /// [`Delayed`]: pjw_core::cpuset_group::CpusetOutcome::Delayed
    pub fn wait_for_cpuset_changes(&mut self, max_wait: Duration) -> bool {
        self.cpuset_changer.wait_until_complete(max_wait)
    }

    /// Returns the problem of the thread that makes the changes of cpusets: a system call blocks the thread, or the
    /// thread has ended. The thread counts as blocked when it has completed nothing for 20 s although work is pending.
    /// `None` if there is no problem, or if [`LinuxMachine::start_cpuset_change_thread`] was not called.
    pub fn cpuset_thread_problem(&mut self) -> Option<CpusetThreadProblem> {
        self.cpuset_changer.thread_problem()
    }
}
