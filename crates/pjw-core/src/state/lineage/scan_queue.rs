//! The processes that have to be scanned because of their process events.

use crate::basics::{Pid, prelude::*};

/// How soon the processes with new events must be scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanUrgency {
    /// At once, because a process of a job forked a process whose mask was not read yet, or is not the mask
    /// that the process should have.
    Immediate,
    /// Within a few milliseconds, together with further ones: processes of jobs with an event, of which none
    /// is expected to have a wrong mask.
    Batched,
    /// Soon, because a process that belongs to no job executed a program. This process may begin a job of a
    /// batch scheduler.
    Deferred,
}

/// The processes that had an event (fork, exec or exit) and were not scanned after this event.
#[derive(Debug, Clone, Default)]
pub struct ScanQueue {
    /// Forked processes of jobs that were not scanned and whose masks are not known to be right.
    pub(super) forked: BTreeSet<Pid>,
    /// Other processes of jobs that had an event since their last scan: they executed a program, exited, or were
    /// forked with the right mask.
    pub(super) of_jobs: BTreeSet<Pid>,
    /// Other processes that executed a program since their last scan.
    pub(super) executed: BTreeSet<Pid>,
    /// Other processes that were forked since the last rescan.
    pub(super) unassigned: BTreeMap<Pid, UnscannedProcess>,
}

/// What the events say about a process of no job that was not scanned yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnscannedProcess {
    /// The process that forked it.
    pub(super) parent: Pid,
    /// Whether the process has several threads. Such a process may continue after the exit of its first thread.
    pub(super) has_threads: bool,
}

impl ScanQueue {
    /// Records that the first thread of a process has exited. If the process has several threads, the others may continue.
    pub(super) fn exited(&mut self, pid: Pid) {
        self.defer(pid);
        if self.unassigned.get(&pid).is_some_and(|process| !process.has_threads) {
            self.unassigned.remove(&pid);
        }
    }

    /// Returns how soon the processes with new events must be scanned. `None` if no event requires a scan
    /// before the next periodic scan (the scan every `rescan_interval`, which also reads processes outside
    /// jobs).
    #[must_use]
    pub fn urgency(&self) -> Option<ScanUrgency> {
        if !self.forked.is_empty() {
            Some(ScanUrgency::Immediate)
        } else if !self.of_jobs.is_empty() {
            Some(ScanUrgency::Batched)
        } else {
            (!self.executed.is_empty()).then_some(ScanUrgency::Deferred)
        }
    }

    /// Returns the pids of the processes that make a scan immediate (see [`ScanUrgency::Immediate`]).
    #[must_use]
    pub fn immediate_pids(&self) -> &BTreeSet<Pid> {
        &self.forked
    }

    /// Records that the mask of a forked process is right, or that the process has exited: its scan may wait a few
    /// milliseconds.
    pub(crate) fn defer(&mut self, pid: Pid) {
        if self.forked.remove(&pid) {
            self.of_jobs.insert(pid);
        }
    }

    /// Returns the pids of the processes that make a scan urgent (see [`ScanQueue::urgency`]), and removes
    /// them from the queue. These are the processes of jobs that had any event, and the other processes that
    /// executed a program. Other forked processes stay in the queue: see [`ScanQueue::take_unassigned_pids`].
    pub fn take_urgent_pids(&mut self) -> BTreeSet<Pid> {
        let mut pids = core::mem::take(&mut self.of_jobs);
        pids.append(&mut self.forked);
        pids.append(&mut self.executed);
        pids
    }

    /// Returns the forked processes that belong to no job and descend from a process in `pids`. They are then removed from
    /// the list.
    pub(crate) fn take_descendants_of(&mut self, pids: &BTreeSet<Pid>) -> BTreeSet<Pid> {
        let mut found = BTreeSet::new();
        loop {
            let is_child = |process: &UnscannedProcess| {
                pids.contains(&process.parent) || found.contains(&process.parent)
            };
            let children = self.unassigned.iter().filter(|(_, process)| is_child(process));
            let children: BTreeSet<Pid> = children.map(|(&pid, _)| pid).collect();
            self.unassigned.retain(|pid, _| !children.contains(pid));
            if children.is_empty() {
                return found;
            }
            found.extend(children);
        }
    }

    /// Returns the pids of the processes that belong to no job and were forked since the last call of this
    /// method, and removes them from the queue. The caller must add these processes to the next periodic scan
    /// (the scan every `rescan_interval`, which also reads processes outside jobs).
    pub fn take_unassigned_pids(&mut self) -> impl Iterator<Item = Pid> + use<> {
        core::mem::take(&mut self.unassigned).into_keys()
    }
}
