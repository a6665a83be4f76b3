//! The affinity masks of unknown origin: masks that an earlier daemon may have set, and that no record explains.
//!
//! If records are lost, one search after the next full scan finds the processes with such masks. Their descendants
//! inherit the masks: the fork events name the descendants. The journal has the found processes, and whether a search
//! is not complete. So the warning of this daemon, `pjwctl release --all`, `pjwd --release-all` and the next daemon all
//! name the same processes.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Nanos, Pid, ProcessId, prelude::*};
use crate::state::lineage::MAX_FORK_RECORDS;
use crate::terms::{JobId, ProcessEvent, UnknownMaskRecord, UnknownOriginMasks, Warning};

/// The number of full scans, after the one that chose the processes, in which a search tries to read them.
const MAX_SEARCH_SCANS: u32 = 4;

/// The search for masks of unknown origin after records were lost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Search {
    /// No record was lost, or the search is complete.
    #[default]
    Done,
    /// The next full scan begins the search.
    Due {
        /// As in `Running`, if an earlier search had begun and was not complete. `None` otherwise.
        recorded: Option<BTreeSet<ProcessId>>,
    },
    /// A full scan has begun the search.
    Running {
        /// The processes that belonged to jobs according to the journal when the search first began. The search leaves
        /// them out, because the journal has their masks too.
        recorded: BTreeSet<ProcessId>,
        /// The processes to read. `None` before they are chosen.
        choice: Option<Choice>,
    },
}

/// The processes that a search reads.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Choice {
    /// The time at which the scan began from which the processes were chosen.
    chosen_at: Nanos,
    /// The processes of which the threads and the cpusets are still to be read.
    unread: BTreeSet<Pid>,
    /// The number of full scans since the processes were chosen.
    full_scans: u32,
}

/// The result of a completed search for affinity masks of unknown origin: the processes that were forked during the
/// search and may have inherited such a mask.
pub(crate) struct MaskSearchResult {
    /// The processes that were forked by the processes with masks of unknown origin, parents first.
    pub(crate) children: Vec<Pid>,
    /// The time of the scan from which the processes of the search were chosen. The search did not read a process that
    /// was first seen later.
    pub(crate) chosen_at: Nanos,
}

/// The processes that have affinity masks of unknown origin. An earlier run of the daemon may have set such a mask, and
/// no record in the journal says whether it did. The journal is the file with which a restarted daemon restores its
/// state. pjw leaves these masks unchanged, and names the processes in a warning.
#[derive(Debug, Clone, Default)]
pub struct MasksOfUnknownOrigin {
    search: Search,
    /// The processes with masks of unknown origin, each with these masks.
    found: BTreeMap<ProcessId, UnknownOriginMasks>,
    /// Whether `found` has changed since the last call of `take_list_change`.
    is_list_changed: bool,
    /// The warning about the processes in `found`, as of the last change of `found`. It is kept because its text is
    /// long.
    pub(crate) warning: Option<Warning>,
    /// The jobs that were found by their cpusets, each with the PUs of the cpuset. A mask with exactly these PUs may be
    /// hidden until the job ends.
    found_cpusets: BTreeMap<JobId, CpuSet>,
    /// The released processes of the jobs in `found_cpusets`, each with the PUs of the cpuset.
    released: BTreeMap<ProcessId, CpuSet>,
    /// The descendants of the processes in `found`, as their fork events say. Each descendant has the masks of which it
    /// may have inherited one.
    inherited: BTreeMap<Pid, Arc<BTreeSet<CpuSet>>>,
    /// The forks since the search was requested: parent and child. The search may find the parent later.
    forks_during_search: Vec<(Pid, Pid)>,
}

impl MasksOfUnknownOrigin {
    /// Requests a search for affinity masks of unknown origin: masks that an earlier run of the daemon may have set,
    /// and about which no journal record says whether it did. Must be called if journal records of an earlier run were
    /// lost. The journal is the file with which a restarted daemon restores its state. The next scan of all processes
    /// begins the search.
    ///
    /// If an earlier search has begun and is not complete, the search starts over. Both searches skip the processes
    /// that belonged to jobs, according to the journal, when the earlier search first began. The masks of these
    /// processes are in the journal.
    pub fn request_search(&mut self) {
        let recorded = match core::mem::take(&mut self.search) {
            Search::Done => None,
            Search::Due { recorded } => recorded,
            Search::Running { recorded, .. } => Some(recorded),
        };
        self.search = Search::Due { recorded };
    }

    /// Returns whether a search for affinity masks of unknown origin was requested and is not complete. An earlier run
    /// of the daemon may have set such a mask, and no record in the journal (the file with which a restarted daemon
    /// restores its state) says whether it did.
    #[must_use]
    pub fn is_search_pending(&self) -> bool {
        self.search != Search::Done
    }

    /// Iterates over the processes that have affinity masks of unknown origin: an earlier run of the daemon may have
    /// set such a mask, and no record in the journal (the file with which a restarted daemon restores its state) says
    /// whether it did.
    pub fn processes(&self) -> impl Iterator<Item = ProcessId> {
        self.found.keys().copied()
    }

    /// Updates the records of forked processes from the process events `events` of the kernel. A child may have
    /// inherited a mask of unknown origin (a mask that an earlier run of the daemon may have set) from its parent.
    /// Does nothing if there are no such masks and no search for them.
    pub(crate) fn apply_events(&mut self, events: &[ProcessEvent]) {
        if self.has_nothing_to_find() {
            return;
        }
        for event in events {
            match *event {
                ProcessEvent::Fork { parent, child, .. } => {
                    if self.is_search_pending() && self.forks_during_search.len() < MAX_FORK_RECORDS {
                        self.forks_during_search.push((parent, child));
                    }
                    self.inherited.remove(&child);
                    self.record_inheritance(parent, child);
                }
                ProcessEvent::Exit { pid } => drop(self.inherited.remove(&pid)),
                _ => {}
            }
        }
    }

    /// Records the masks of unknown origin of which `child` may have inherited one from `parent`. Returns false if
    /// there are none, or if [`MAX_FORK_RECORDS`] children are already recorded.
    fn record_inheritance(&mut self, parent: Pid, child: Pid) -> bool {
        if self.inherited.len() >= MAX_FORK_RECORDS {
            return false;
        }
        let Some(masks) = self.masks_for_child(parent) else { return false };
        self.inherited.insert(child, masks);
        true
    }

    /// Returns the affinity masks of unknown origin that the process `parent` has or may have inherited. A child of the
    /// process may inherit one of them. `None` if there are none.
    pub(crate) fn masks_for_child(&self, parent: Pid) -> Option<Arc<BTreeSet<CpuSet>>> {
        let found = self.mask_of(parent).map(|(_, found)| Arc::new(found.masks().cloned().collect()));
        found.or_else(|| self.inherited.get(&parent).cloned())
    }

    /// Returns the affinity masks of unknown origin that the process `pid` may have inherited when it was forked. The
    /// process inherited at most one of them. `None` if there are none.
    pub(crate) fn masks_inherited_by(&self, pid: Pid) -> Option<Arc<BTreeSet<CpuSet>>> {
        self.inherited.get(&pid).cloned()
    }

    /// Removes the records of the forked processes that may have inherited an affinity mask of unknown origin: a mask
    /// that an earlier run of the daemon may have set. Must be called if process events of the kernel were lost. A
    /// process in a record may then have exited unnoticed, and its pid may now be the pid of another process.
    pub fn forget_fork_records(&mut self) {
        self.inherited.clear();
        self.forks_during_search.clear();
    }

    /// Begins the search for affinity masks of unknown origin, if a search was requested. An earlier run of the
    /// daemon may have set such masks. `members` returns the processes that belong to jobs according to the journal
    /// (the file from which a restarted daemon restores its state). Returns the journal record about the beginning of
    /// the search. Returns `None` if no search was requested, or if an earlier run of the daemon has already written
    /// this record.
    pub(crate) fn begin_search(
        &mut self,
        members: impl FnOnce() -> BTreeSet<ProcessId>,
    ) -> Option<UnknownMaskRecord> {
        let Search::Due { recorded: earlier } = &mut self.search else { return None };
        let earlier = earlier.take();
        let is_resumed = earlier.is_some();
        let recorded = earlier.unwrap_or_else(members);
        let record = (!is_resumed).then(|| UnknownMaskRecord::SearchBegun { recorded: recorded.clone() });
        self.search = Search::Running { recorded, choice: None };
        record
    }

    /// Returns whether the search for affinity masks of unknown origin has begun, but
    /// [`MasksOfUnknownOrigin::set_processes_to_read`] was not called yet.
    pub(crate) fn needs_processes_to_read(&self) -> bool {
        matches!(self.search, Search::Running { choice: None, .. })
    }

    /// Returns whether the process `process` belonged to a job according to the journal when the search for masks of
    /// unknown origin first began. False if no such search is in progress.
    pub(crate) fn is_recorded(&self, process: ProcessId) -> bool {
        matches!(&self.search, Search::Running { recorded, .. } if recorded.contains(&process))
    }

    /// Sets the processes whose threads and cpusets the search for affinity masks of unknown origin must read. The
    /// caller chose them from a scan that began at the time `chosen_at`, in ns since boot.
    pub(crate) fn set_processes_to_read(&mut self, unread: BTreeSet<Pid>, chosen_at: Nanos) {
        if let Search::Running { choice, .. } = &mut self.search {
            *choice = Some(Choice { chosen_at, unread, full_scans: 0 });
        }
    }

    /// Records that a scan has read the threads and the cpusets of the process `pid` for the search for affinity masks
    /// of unknown origin.
    pub(crate) fn record_masks_read(&mut self, pid: Pid) {
        if let Search::Running { choice: Some(choice), .. } = &mut self.search {
            choice.unread.remove(&pid);
        }
    }

    /// Counts a full scan during the search for affinity masks of unknown origin. After more than [`MAX_SEARCH_SCANS`]
    /// full scans, the search gives up the processes that no scan could read: removes and returns them. Otherwise
    /// returns the empty set. There is such a limit because each periodic scan must be a full scan until the search is
    /// complete.
    pub(crate) fn count_full_scan(&mut self) -> BTreeSet<Pid> {
        let Search::Running { choice: Some(choice), .. } = &mut self.search else { return BTreeSet::new() };
        choice.full_scans += 1;
        if choice.full_scans > MAX_SEARCH_SCANS {
            core::mem::take(&mut choice.unread)
        } else {
            BTreeSet::new()
        }
    }

    /// Iterates over the pids of the processes whose threads and cpusets the search for affinity masks of unknown
    /// origin must still read.
    pub(crate) fn unread_pids(&self) -> impl Iterator<Item = Pid> {
        let unread = match &self.search {
            Search::Running { choice: Some(choice), .. } => Some(&choice.unread),
            _ => None,
        };
        unread.into_iter().flatten().copied()
    }

    /// Ends the search for affinity masks of unknown origin if scans have read all processes that it must read. An
    /// earlier run of the daemon may have set such masks. Returns the result of the search. Returns `None` if the
    /// search does not end, or if no search is in progress.
    pub(crate) fn end_search_if_complete(&mut self) -> Option<MaskSearchResult> {
        let chosen_at = match &self.search {
            Search::Running { choice: Some(choice), .. } if choice.unread.is_empty() => choice.chosen_at,
            _ => return None,
        };
        self.search = Search::Done;
        let forks = core::mem::take(&mut self.forks_during_search);
        let inherited = forks.into_iter().filter(|&(parent, child)| self.record_inheritance(parent, child));
        Some(MaskSearchResult { children: inherited.map(|(_, child)| child).collect(), chosen_at })
    }

    /// Returns whether a process with affinity masks of unknown origin, or one of these masks, was added or removed
    /// since the last call of [`MasksOfUnknownOrigin::take_list_change`].
    pub(crate) fn is_list_changed(&self) -> bool {
        self.is_list_changed
    }

    /// Returns whether a process with affinity masks of unknown origin, or one of these masks, was added or removed
    /// since the last call of this function.
    pub(crate) fn take_list_change(&mut self) -> bool {
        core::mem::take(&mut self.is_list_changed)
    }

    /// Returns the processes that have affinity masks of unknown origin, each with these masks.
    pub(crate) fn masks_by_process(&self) -> &BTreeMap<ProcessId, UnknownOriginMasks> {
        &self.found
    }

    /// Returns the process with the pid `pid` and its affinity masks of unknown origin. `None` if the process has no
    /// such mask.
    pub(crate) fn mask_of(&self, pid: Pid) -> Option<(ProcessId, &UnknownOriginMasks)> {
        let first = ProcessId { pid, start: crate::basics::StartTime(0) };
        let (process, mask) = self.found.range(first..).next()?;
        (process.pid == pid).then_some((*process, mask))
    }

    /// Returns true if no process has an affinity mask of unknown origin or may have inherited one, and no search for
    /// such masks is requested or in progress.
    pub(crate) fn has_nothing_to_find(&self) -> bool {
        self.found.is_empty() && self.inherited.is_empty() && !self.is_search_pending()
    }

    /// Returns the jobs whose cpuset pjw found without a journal record, each with the PUs (logical CPUs) of the
    /// cpuset. The cpuset may hide an affinity mask of unknown origin until the job ends.
    pub(crate) fn found_cpusets(&self) -> &BTreeMap<JobId, CpuSet> {
        &self.found_cpusets
    }

    /// Returns the processes that were released from the jobs in [`MasksOfUnknownOrigin::found_cpusets`], each with the
    /// PUs (logical CPUs) of the cpuset of its job. The caller can add and remove processes.
    pub(crate) fn released_processes_mut(&mut self) -> &mut BTreeMap<ProcessId, CpuSet> {
        &mut self.released
    }

    /// Iterates over the pids of the processes of which a thread other than the first has an affinity mask of unknown
    /// origin. A full scan must read the threads of these processes.
    pub(crate) fn pids_with_other_threads(&self) -> impl Iterator<Item = Pid> {
        let with_others = self.found.iter().filter(|(_, mask)| !mask.other_threads.is_empty());
        with_others.map(|(process, _)| process.pid)
    }

    /// Changes what is known about masks of unknown origin, and the state of the search for such masks, as `record`
    /// says. The record is in the journal (the file from which a restarted daemon restores its state). Called when pjw
    /// writes the record, and when a restarted daemon reads it.
    pub(crate) fn apply_record(&mut self, record: UnknownMaskRecord) {
        self.is_list_changed |=
            matches!(record, UnknownMaskRecord::Found { .. } | UnknownMaskRecord::Settled { .. });
        match record {
            UnknownMaskRecord::RecordsLost => self.request_search(),
            UnknownMaskRecord::SearchBegun { recorded } => {
                self.search = Search::Due { recorded: Some(recorded) };
            }
            UnknownMaskRecord::Searched => self.search = Search::Done,
            UnknownMaskRecord::Found { process, mask } => drop(self.found.insert(process, mask)),
            UnknownMaskRecord::Settled { process } => drop(self.found.remove(&process)),
            UnknownMaskRecord::CpusetFound { job, cpus } => drop(self.found_cpusets.insert(job, cpus)),
            UnknownMaskRecord::CpusetLeft { job } => drop(self.found_cpusets.remove(&job)),
        }
    }

    /// Returns the journal records from which a restarted daemon restores the masks of unknown origin, and a search for
    /// them that is not complete. The forked processes that may have inherited such a mask are not in the journal,
    /// because a restarted daemon scans all processes.
    pub(crate) fn records(&self) -> impl Iterator<Item = UnknownMaskRecord> {
        let lost = match &self.search {
            Search::Done => None,
            Search::Due { recorded: None } => Some(UnknownMaskRecord::RecordsLost),
            Search::Due { recorded: Some(recorded) } | Search::Running { recorded, .. } => {
                Some(UnknownMaskRecord::SearchBegun { recorded: recorded.clone() })
            }
        };
        let found = self.found.iter();
        let found = found.map(|(&process, mask)| UnknownMaskRecord::Found { process, mask: mask.clone() });
        let cpusets = self.found_cpusets.iter();
        let cpusets = cpusets
            .map(|(job, cpus)| UnknownMaskRecord::CpusetFound { job: job.clone(), cpus: cpus.clone() });
        lost.into_iter().chain(cpusets).chain(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_ends_without_the_processes_that_can_not_be_read() {
        let mut masks = MasksOfUnknownOrigin::default();
        masks.request_search();
        let _ = masks.begin_search(BTreeSet::new);
        masks.set_processes_to_read(BTreeSet::from([Pid(7)]), Nanos(1));
        for scan in 0..=MAX_SEARCH_SCANS {
            assert!(masks.end_search_if_complete().is_none());
            assert_eq!(masks.count_full_scan().contains(&Pid(7)), scan == MAX_SEARCH_SCANS);
        }
        assert!(masks.end_search_if_complete().is_some() && !masks.is_search_pending());
    }
}
