//! The tasks that were started a moment ago. The host looks whether they have ended, whenever it is awake.
//!
//! The pidfds of other tasks are in the epoll set of the host: the end of each wakes the host. If a task ends soon, it
//! costs less to look: the pidfd is neither added to the epoll set nor removed, and tasks that end in the same
//! milliseconds do not wake the host one by one.

use std::os::fd::RawFd;
use std::time::Instant;

use super::request::MAX_PENDING_REQUESTS;

/// The tasks that were started a moment ago, and whose pidfds are not in the epoll set of the host.
pub(super) struct NewTasks {
    pidfds: [libc::pollfd; MAX_PENDING_REQUESTS],
    /// The index of the slot of each task, in the order of `pidfds`.
    slots: [usize; MAX_PENDING_REQUESTS],
    count: usize,
    /// When the host has to look at the tasks at the latest. `None` if there is no task.
    look_at: Option<Instant>,
}

impl NewTasks {
    /// No task.
    pub(super) const NONE: Self = Self {
        pidfds: [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; MAX_PENDING_REQUESTS],
        slots: [0; MAX_PENDING_REQUESTS],
        count: 0,
        look_at: None,
    };

    /// Adds the task with the pidfd `pidfd`, which is in the slot with the index `slot`. The host has to look at the
    /// task at the time `look_at`, at the latest. Returns false, and adds nothing, if there are
    /// [`MAX_PENDING_REQUESTS`] tasks already.
    pub(super) fn add(&mut self, slot: usize, pidfd: RawFd, look_at: Instant) -> bool {
        let (Some(poll), Some(place)) = (self.pidfds.get_mut(self.count), self.slots.get_mut(self.count))
        else {
            return false;
        };
        (poll.fd, poll.revents, *place) = (pidfd, 0, slot);
        self.count += 1;
        self.look_at = Some(self.look_at.map_or(look_at, |earlier| earlier.min(look_at)));
        true
    }

    /// Returns when the host has to look at the tasks at the latest. `None` if there is no task.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Looks which tasks have ended. Returns for each task the index of its slot, its pidfd, and whether the task has
    /// ended.
    pub(super) fn look(&mut self) -> impl Iterator<Item = (usize, RawFd, bool)> {
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
        assert_eq!((tasks.look_at(), tasks.look().count()), (None, 0));
        assert!(tasks.add(7, living, now + Duration::from_secs(2)));
        assert!(tasks.add(3, ended, now + Duration::from_secs(1)));
        assert_eq!(tasks.look_at(), Some(now + Duration::from_secs(1)));
        assert_eq!(tasks.look().collect::<Vec<_>>(), [(7, living, false), (3, ended, true)]);
        for slot in 2..MAX_PENDING_REQUESTS {
            assert!(tasks.add(slot, living, now));
        }
        assert!(!tasks.add(0, living, now));
        assert_eq!(tasks.look().count(), MAX_PENDING_REQUESTS);
    }
}
