//! The tasks that were started a moment ago. Whenever the host is awake, it checks whether one of them has ended.
//!
//! The pidfds of older tasks are in the epoll set of the host, so the end of each such task wakes the host. For a task
//! that ends soon, the check costs less: the pidfd is neither added to the epoll set nor removed, and tasks that end in
//! the same milliseconds do not wake the host one by one.

use std::os::fd::RawFd;
use std::time::Instant;

use super::request::MAX_PENDING_REQUESTS;

/// The tasks that were started a moment ago, and whose pidfds are not in the epoll set of the host.
pub(super) struct NewTasks {
    pidfds: [libc::pollfd; MAX_PENDING_REQUESTS],
    /// The index of the slot of each task, in the order of `pidfds`.
    slots: [usize; MAX_PENDING_REQUESTS],
    count: usize,
    /// When the host has to check the tasks at the latest. `None` if there is no task.
    check_at: Option<Instant>,
}

impl NewTasks {
    /// No task.
    pub(super) const NONE: Self = Self {
        pidfds: [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; MAX_PENDING_REQUESTS],
        slots: [0; MAX_PENDING_REQUESTS],
        count: 0,
        check_at: None,
    };

    /// Adds the task with the pidfd `pidfd`, which is in the slot with the index `slot`. The host has to check the task
    /// at the time `check_at`, at the latest. Returns false, and adds nothing, if there are
    /// [`MAX_PENDING_REQUESTS`] tasks already.
    pub(super) fn add(&mut self, slot: usize, pidfd: RawFd, check_at: Instant) -> bool {
        let (Some(poll), Some(entry)) = (self.pidfds.get_mut(self.count), self.slots.get_mut(self.count))
        else {
            return false;
        };
        (poll.fd, poll.revents, *entry) = (pidfd, 0, slot);
        self.count += 1;
        self.check_at = Some(self.check_at.map_or(check_at, |earlier| earlier.min(check_at)));
        true
    }

    /// Returns when the host has to check the tasks at the latest. `None` if there is no task.
    pub(super) fn check_at(&self) -> Option<Instant> {
        self.check_at
    }

    /// Checks which tasks have ended. Returns for each task the index of its slot, its pidfd, and whether the task has
    /// ended.
    pub(super) fn check(&mut self) -> impl Iterator<Item = (usize, RawFd, bool)> {
        // SAFETY: there are at least so many entries. If the call fails, no task counts as ended.
        let _ = unsafe { libc::poll(self.pidfds.as_mut_ptr(), self.count as libc::nfds_t, 0) };
        let tasks = self.slots.iter().zip(&self.pidfds).take(self.count);
        tasks.map(|(slot, poll)| (*slot, poll.fd, poll.revents != 0))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;

    #[test]
    fn tasks_that_have_ended_are_seen_and_there_is_room_for_one_round() {
        // A pidfd is readable after the end of its process, as a pipe with data is.
        let (living, _open) = std::io::pipe().unwrap();
        let (ended, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"x").unwrap();
        let (living, ended) = (living.as_raw_fd(), ended.as_raw_fd());
        let now = Instant::now();
        let mut tasks = NewTasks::NONE;
        assert_eq!((tasks.check_at(), tasks.check().count()), (None, 0));
        assert!(tasks.add(7, living, now + Duration::from_secs(2)));
        assert!(tasks.add(3, ended, now + Duration::from_secs(1)));
        assert_eq!(tasks.check_at(), Some(now + Duration::from_secs(1)));
        assert_eq!(tasks.check().collect::<Vec<_>>(), [(7, living, false), (3, ended, true)]);
        for slot in 2..MAX_PENDING_REQUESTS {
            assert!(tasks.add(slot, living, now));
        }
        assert!(!tasks.add(0, living, now));
        assert_eq!(tasks.check().count(), MAX_PENDING_REQUESTS);
    }
}
