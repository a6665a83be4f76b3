//! The groups of processes that share an address space.
//!
//! Such a process has a pid, signals and an exit status of its own, but can follow the pointers of the other processes
//! of its group (clone(2) with `CLONE_VM` and without `CLONE_THREAD`). A child of vfork(2) or posix_spawn(3) uses the
//! address space of its parent too, until it executes a program. So a process counts only after two checks in which it
//! shared its address space and was no child of vfork. The time between the two checks is at least the scan interval. A
//! child of vfork that is not recognised as one would have to stay in vfork for that long.

mod threads;

use alloc::sync::Arc;
use core::time::Duration;

use crate::basics::{Nanos, Pid, ProcessId, prelude::*};
use crate::terms::{AddressSpaceCheck, AddressSpaceList, AddressSpaceUser, SharedAddressSpace};

/// Groups of processes that share an address space (clone(2) with `CLONE_VM`). A process joins a group when two
/// scans have found that it shares the address space. The second of these scans must be at least 7/8 of a scan
/// interval later than the first. So a child of vfork(2) does not count: it shares the address space only for a
/// short time.
#[derive(Debug, Clone, Default)]
pub struct AddressSpaceGroups {
    /// The list of the last scan. `None` before the first scan.
    last_list: Option<Arc<AddressSpaceList>>,
    /// Whether another scan with the same list changes nothing: the sharing of all processes in the list is confirmed.
    is_list_settled: bool,
    /// The processes that scans found to share an address space.
    sharing: BTreeMap<Pid, SharingProcess>,
    /// The groups by number. Each has at least two processes.
    groups: BTreeMap<u32, BTreeSet<Pid>>,
    /// The number of the newest group.
    last_group: u32,
}

/// A process that shares its address space with other processes, according to scans.
#[derive(Debug, Clone, Copy)]
struct SharingProcess {
    id: ProcessId,
    /// The number of the address space.
    space: u64,
    /// The time of the first check.
    since: Nanos,
    /// Whether a second check followed, late enough.
    is_confirmed: bool,
    group: Option<u32>,
}

impl AddressSpaceGroups {
    /// Returns the number of the group to which the process `id` belongs. All processes of a group share one
    /// address space. Returns `None` if pjw has not confirmed that the process shares its address space with
    /// another process.
    #[must_use]
    pub fn group_of(&self, id: ProcessId) -> Option<u32> {
        self.sharing.get(&id.pid).filter(|process| process.id.is_same_process(id))?.group
    }

    /// Iterates over the groups of processes that share an address space. Each item is the number of a group
    /// and the pids of its processes. Each group has at least two processes.
    pub fn groups(&self) -> impl Iterator<Item = (u32, &BTreeSet<Pid>)> {
        self.groups.iter().map(|(&number, pids)| (number, pids))
    }

    /// Iterates over the pids of the processes in the group with the number `group_number`. All processes of a
    /// group share one address space. Processes that belong to no job are included. Yields nothing if there is
    /// no group with this number.
    pub fn pids_in_group(&self, group_number: u32) -> impl Iterator<Item = Pid> + '_ {
        self.groups.get(&group_number).into_iter().flatten().copied()
    }

    /// Returns the reason, in one sentence for users, why pjw can't find out whether some processes share an
    /// address space: the kernel refuses kcmp(2), and the BPF program that reads tasks is not available. Returns
    /// `None` if pjw can find this out for all processes, or if no scan has tried yet.
    #[must_use]
    pub fn unknown_sharing_reason(&self) -> Option<&str> {
        self.last_list.as_ref()?.unread_reason.as_deref()
    }

    /// Updates the groups of processes that share an address space. `list` has the processes that a scan found to
    /// share one. The scan began at the time `at`, in ns since boot. A process joins a group when two scans have
    /// found the process in their lists, and the second scan began at least 7/8 of `interval` after the first.
    /// `interval` is the configured time between two scans. Returns the pids of the processes whose group changed,
    /// including those that are in no group now.
    pub(crate) fn update(
        &mut self,
        list: &Arc<AddressSpaceList>,
        at: Nanos,
        interval: Duration,
    ) -> BTreeSet<Pid> {
        let is_same_list = self.last_list.as_ref().is_some_and(|last| Arc::ptr_eq(last, list));
        if is_same_list && self.is_list_settled {
            return BTreeSet::new();
        }
        let before = core::mem::take(&mut self.sharing);
        self.groups.clear();
        self.is_list_settled = true;
        for space in &list.shared {
            self.add_space(space, &before, at, interval);
        }
        self.last_list = Some(Arc::clone(list));
        let pids = before.keys().chain(self.sharing.keys()).copied();
        let group_in =
            |sharing: &BTreeMap<Pid, SharingProcess>, pid: &Pid| sharing.get(pid).and_then(|user| user.group);
        pids.filter(|pid| group_in(&before, pid) != group_in(&self.sharing, pid)).collect()
    }

    /// Adds the records of the processes that use the address space `space`, and their group if there is one. `before`
    /// has the records from earlier scans. `at` and `interval` are as in [`AddressSpaceGroups::update`].
    fn add_space(
        &mut self,
        space: &SharedAddressSpace,
        before: &BTreeMap<Pid, SharingProcess>,
        at: Nanos,
        interval: Duration,
    ) {
        let mut processes: Vec<SharingProcess> = Vec::new();
        for user in &space.users {
            let known = before.get(&user.id.pid);
            let known = known.filter(|known| known.id == user.id && known.space == space.number);
            self.is_list_settled &= user.check == AddressSpaceCheck::Sharing;
            processes.extend(updated_sharing_record(user, space.number, known, at, interval));
        }
        self.is_list_settled &= processes.iter().all(|process| process.is_confirmed);
        let confirmed = processes.iter().filter(|process| process.is_confirmed);
        let confirmed: BTreeSet<Pid> = confirmed.map(|process| process.id.pid).collect();
        let group = (confirmed.len() > 1).then(|| {
            let earlier = processes.iter().filter_map(|process| process.group).min();
            earlier.unwrap_or_else(|| {
                self.last_group += 1;
                self.last_group
            })
        });
        processes.iter_mut().for_each(|process| process.group = group.filter(|_| process.is_confirmed));
        self.groups.extend(group.map(|group| (group, confirmed)));
        self.sharing.extend(processes.into_iter().map(|process| (process.id.pid, process)));
    }

    /// Removes the process `pid`, which has executed a program or exited, from its group. A group with one remaining
    /// process is removed. Returns the pids of the processes that are no longer in a group. Returns the empty set if
    /// `pid` was in no group.
    pub(crate) fn remove_process(&mut self, pid: Pid) -> BTreeSet<Pid> {
        let Some(removed) = self.sharing.remove(&pid) else { return BTreeSet::new() };
        self.is_list_settled = false;
        let Some(group) = removed.group else { return BTreeSet::new() };
        let mut changed = BTreeSet::from([pid]);
        let remaining = self.groups.entry(group).or_default();
        remaining.remove(&pid);
        if remaining.len() < 2 {
            for pid in self.groups.remove(&group).into_iter().flatten() {
                if let Some(last) = self.sharing.get_mut(&pid) {
                    last.group = None;
                }
                changed.insert(pid);
            }
        }
        changed
    }
}

/// Returns the new record of a process that may share its address space with other processes. The sharing is
/// confirmed if two scans have found it, and the second scan began at least 7/8 of `interval` after the first.
///
/// - `user` is the process, with the result of the check that this scan made.
/// - `space` is the number of the address space.
/// - `known` is the record from earlier scans, `None` if there is none.
/// - `at` is the time at which this scan began, in ns since boot.
/// - `interval` is the configured time between two scans.
///
/// Returns `None` if the process may be a child of vfork(2), or if no scan has found the sharing yet.
fn updated_sharing_record(
    user: &AddressSpaceUser,
    space: u64,
    known: Option<&SharingProcess>,
    at: Nanos,
    interval: Duration,
) -> Option<SharingProcess> {
    match (user.check, known) {
        (AddressSpaceCheck::InVfork, _) | (AddressSpaceCheck::NotChecked, None) => None,
        (AddressSpaceCheck::NotChecked, Some(known)) => Some(*known),
        (AddressSpaceCheck::Sharing, None) => {
            Some(SharingProcess { id: user.id, space, since: at, is_confirmed: false, group: None })
        }
        (AddressSpaceCheck::Sharing, Some(known)) => {
            let since_first_check = Duration::from_nanos(at.0.saturating_sub(known.since.0));
            let is_late_enough = since_first_check >= min_time_between_checks(interval);
            Some(SharingProcess { is_confirmed: known.is_confirmed || is_late_enough, ..*known })
        }
    }
}

/// The minimum time between the two checks that confirm the sharing. The time is less than `interval`, because a timer
/// may wake the daemon a little early or late.
fn min_time_between_checks(interval: Duration) -> Duration {
    interval - interval / 8
}

#[cfg(test)]
mod tests;
