//! Descent: the job of a new process, and the mask that it inherited, from the kernel's process events.
//!
//! A [`Descendant`] is a process that was born to a process of a job. The record is made when the fork event is read,
//! with a copy of the facts about the creator at that moment. So neither the end of the creator nor a missed scan can
//! lose these facts. The record is removed when the exit event is read. A scan that finds the process gone does not
//! remove the record: the fork events of its last children may still be unread. Every process scan is followed by a
//! reading of the events, so a fork event is known before anything is decided about the child.

pub mod scan_queue;

use self::scan_queue::{ScanQueue, UnscannedProcess};
use crate::basics::{BirthTime, Nanos, Pid, Tid, prelude::*};
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::MaskRequest;
use crate::state::members::Member;
use crate::terms::{JobId, MembershipEvidence, ProcessEvent};

/// The maximum number of records of forked processes in each of two lists. One list has the forked processes
/// that descend from processes of jobs. The other list has all other forked processes that no scan has read. If
/// a list is full, pjw ignores the next fork event for this list and then scans all processes.
pub const MAX_FORK_RECORDS: usize = 65_536;

/// The record of a forked process that descends from a process of a job. The record says to which job the
/// process belongs, and which affinity mask the process may have inherited. pjw usually makes the record when
/// it reads the fork event, before a scan has read the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descendant {
    /// The pid of the nearest ancestor that belonged to a job at the time of the fork, or for which pjw was
    /// then restoring the original masks (the masks before pjw changed them).
    pub ancestor: Pid,
    /// The job to which the process `ancestor` belongs or belonged.
    pub job: JobId,
    /// Whether the process `ancestor` belonged to the job at the time of the fork. If false, `ancestor` no
    /// longer belonged to the job, and pjw was restoring the original masks of `ancestor`. Also false if
    /// `ancestor` or this process has left the job since the fork: then the process does not belong to the job
    /// by its descent.
    pub was_ancestor_member: bool,
    /// The evidence that the process belongs to the job. It is the result of [`MembershipEvidence::of_child`] for the
    /// evidence of the ancestor.
    pub evidence: MembershipEvidence,
    /// The time of the fork event, in ns since boot. `None` if pjw made this entry without a fork event. pjw
    /// does so when a scan finds that a process of a job has ended although its exit event was not read yet,
    /// and when pjw restores the original masks of a process that had no entry.
    pub forked_at: Option<Nanos>,
    /// The mask requests (sched_setaffinity(2)) that may have set the affinity mask that the process had right after
    /// its fork. The process inherited this mask from the thread that forked it. Nearly always, the list has one
    /// request. If the list has several, one of them set the mask, and it is unknown which one. The requests were made
    /// for threads of the parent or of an earlier ancestor. The list is empty if the requests are unknown.
    ///
    /// After pjw has restored the original masks of the process (the masks before pjw changed them), the list has the
    /// requests for its own threads: its later children inherit one of these.
    ///
    /// There is one exception. If a scan finds that a process of a job has ended before its exit event was read, pjw
    /// makes a `Descendant` for the ended process itself. The list then has the requests for the threads of the ended
    /// process. Children whose fork events are not read yet may have inherited the masks of these threads.
    pub inherited_mask_requests: Vec<MaskRequest>,
    /// The time at which pjw last read the affinity masks of the process `ancestor` before the fork, in ns since boot.
    /// If `inherited_mask_requests` were made for an earlier ancestor, the time for that ancestor. If the masks of the
    /// ancestor's threads were read at different times, the earliest of these times. 0 if the masks were never read.
    pub ancestor_masks_read_at: Nanos,
}

impl Descendant {
    /// Makes the record of a child of `ancestor`.
    ///
    /// - `is_ancestor_member` is true if `ancestor` belongs to its job. It is false if `ancestor` has left the job,
    ///   and pjw is restoring its original masks (the masks before pjw changed them).
    /// - `forked_at` is the time of the fork event, in ns since boot. `None` if there was no event.
    /// - `requests` are the mask requests (sched_setaffinity(2)) from one of which the child inherited its affinity
    ///   mask.
    fn from_ancestor(
        ancestor: &Member,
        is_ancestor_member: bool,
        forked_at: Option<Nanos>,
        requests: Vec<MaskRequest>,
    ) -> Self {
        let (pid, job, evidence) = (ancestor.id.pid, ancestor.job.clone(), ancestor.evidence.of_child());
        let masks = ancestor.threads.values().filter_map(|thread| thread.mask_entry.as_ref());
        let masks_read_at = masks.map(MaskEntry::last_read_at).min().unwrap_or_default();
        Self {
            ancestor: pid,
            job,
            was_ancestor_member: is_ancestor_member,
            evidence,
            forked_at,
            inherited_mask_requests: requests,
            ancestor_masks_read_at: masks_read_at,
        }
    }
}

/// What pjw knows about forked processes from the kernel's process events, before a scan reads these processes.
/// For each forked process, pjw records whether it descends from a process of a job. A queue has the processes
/// that the daemon must scan after a fork, exec or exit event.
#[derive(Debug, Clone, Default)]
pub struct Lineage {
    /// The processes that descend from a process of a job, by pid.
    descendants: BTreeMap<Pid, Descendant>,
    /// The pids in `descendants` of processes that no scan has read yet.
    unscanned: BTreeSet<Pid>,
    /// The processes whose exit event was read and that no scan has found gone yet. Only processes that
    /// belong to a job, or for which pjw is restoring the masks that they had before pjw changed them.
    exited: BTreeSet<Pid>,
    /// The forked processes that do not descend from a process of a job. A process leaves this set when its
    /// exit event is read.
    outside: BTreeSet<Pid>,
    /// The forked processes that may descend from a process of a job without being in `descendants`: for one
    /// of their ancestors, no scan had read the ancestor, and no fork event had reported its birth.
    of_unknown_descent: BTreeSet<Pid>,
    /// Whether events were lost since the last call of [`Lineage::take_event_loss`].
    has_lost_events: bool,
    /// The processes that had an event (fork, exec or exit) and were not scanned after this event, and those whose
    /// environment no scan could read.
    pub scan_queue: ScanQueue,
}

impl Lineage {
    /// Updates the records of forked processes from the process events `events` of the kernel, in the order of the
    /// list. Returns true if a fork event was dropped, because a list of [`Lineage`] already has
    /// [`MAX_FORK_RECORDS`] entries. The caller must then request a scan of all processes.
    ///
    /// - `find_tracked` returns the process with a pid, if pjw sets or restores the affinity masks of this process.
    ///   The bool is true if the process belongs to a job. It is false if the process has left its job, and pjw is
    ///   restoring its original masks (the masks before pjw changed them). `None` for any other process.
    /// - `is_scanned` returns whether a scan has found the process with a pid.
    pub fn apply_events<'a>(
        &mut self,
        events: &[ProcessEvent],
        find_tracked: impl Fn(Pid) -> Option<(&'a Member, bool)>,
        is_scanned: impl Fn(Pid) -> bool,
    ) -> bool {
        let mut is_full = false;
        for event in events {
            match *event {
                ProcessEvent::Fork { parent, creator, child, at } => {
                    is_full |= !self.record_fork(find_tracked(parent), (parent, creator), child, at);
                    self.record_descent(parent, child, &is_scanned);
                }
                ProcessEvent::Exec { pid }
                    if find_tracked(pid).is_some() || self.descendants.contains_key(&pid) =>
                {
                    self.scan_queue.of_jobs.insert(pid);
                }
                ProcessEvent::Exec { pid } => drop(self.scan_queue.executed.insert(pid)),
                ProcessEvent::Exit { pid } => self.record_exit(pid, find_tracked(pid).is_some()),
                ProcessEvent::ThreadFork { pid, .. } => {
                    self.scan_queue.unassigned.entry(pid).and_modify(|process| process.has_threads = true);
                }
                ProcessEvent::Session { .. } | ProcessEvent::ThreadExit { .. } => {}
            }
        }
        is_full
    }

    /// Records that a process forked `child` at the time `at`, in ns since boot. `parent` is the process, and
    /// `creator` is its thread that called fork(2). `tracked` is `Some` if pjw sets or restores the affinity masks of
    /// the parent. It then has the parent, and whether the parent belongs to a job. Returns `false` if the child was
    /// not recorded, because the list of records is full.
    fn record_fork(
        &mut self,
        tracked: Option<(&Member, bool)>,
        (parent, creator): (Pid, Tid),
        child: Pid,
        at: Nanos,
    ) -> bool {
        // The kernel has reused the pid: the facts about the earlier process are removed.
        self.descendants.remove(&child);
        self.exited.remove(&child);
        let from_tracked = tracked.map(|(tracked, is_member)| {
            let requests = tracked.requests_for_child(creator, BirthTime { earliest: at, latest: at });
            let mut descendant = Descendant::from_ancestor(tracked, is_member, Some(at), requests);
            // The masks of a new parent may be unread. The child then has the mask that the parent itself inherited.
            if descendant.inherited_mask_requests.is_empty()
                && let Some(parent) = self.descendants.get(&parent)
            {
                descendant.inherited_mask_requests.clone_from(&parent.inherited_mask_requests);
                descendant.ancestor_masks_read_at = parent.ancestor_masks_read_at;
            }
            descendant
        });
        let from_parent =
            || Some(Descendant { forked_at: Some(at), ..self.descendants.get(&parent)?.clone() });
        match from_tracked.or_else(from_parent) {
            Some(descendant) if self.descendants.len() < MAX_FORK_RECORDS => {
                self.descendants.insert(child, descendant);
                self.unscanned.insert(child);
                self.scan_queue.forked.insert(child);
            }
            None if self.scan_queue.unassigned.len() < MAX_FORK_RECORDS => {
                self.scan_queue.unassigned.insert(child, UnscannedProcess { parent, has_threads: false });
            }
            _ => return false,
        }
        true
    }

    /// Records whether all ancestors of the new process `child` are known. Does nothing if `child` is recorded as a
    /// descendant of a job's process. The ancestors of `child` are known in each of these cases:
    ///
    /// - `parent` is process 1, which has no ancestor.
    /// - A scan has read `parent` (`is_scanned`), and its ancestors are not recorded as unknown.
    /// - A fork event reported the birth of `parent`, and its ancestors are known.
    ///
    /// In all other cases, pjw may have missed the birth of `parent` or of an earlier ancestor.
    fn record_descent(&mut self, parent: Pid, child: Pid, is_scanned: impl Fn(Pid) -> bool) {
        self.outside.remove(&child);
        self.of_unknown_descent.remove(&child);
        self.scan_queue.forget_process(child);
        if self.descendants.contains_key(&child) {
            return;
        }
        let is_known = |pid| pid == Pid(1) || (is_scanned(pid) && !self.of_unknown_descent.contains(&pid));
        if self.outside.contains(&parent) || is_known(parent) {
            self.outside.insert(child);
        } else {
            self.of_unknown_descent.insert(child);
        }
    }

    /// Records the mask requests `requests` for the process `released`: one of these requests set the affinity mask
    /// that the process inherited. pjw is restoring the original masks of the process. `requests` replaces the
    /// requests that are known from the fork event of the process.
    pub(crate) fn set_inherited_requests(&mut self, released: &Member, requests: Vec<MaskRequest>) {
        let pid = released.id.pid;
        self.of_unknown_descent.remove(&pid);
        let new = || Descendant::from_ancestor(released, false, None, Vec::new());
        self.descendants.entry(pid).or_insert_with(new).inherited_mask_requests = requests;
    }

    /// Whether `pid` had an ancestor unknown to pjw when pjw received the fork event of `pid`. An ancestor is unknown
    /// if no scan had read it, and pjw had received no fork event for it. If the result is true, `pid` may descend
    /// from a process of a job although pjw has no record of this descent.
    ///
    /// Returns false if pjw received no fork event for `pid`; false then does not mean that the ancestors are known.
    #[must_use]
    pub fn forked_with_unknown_ancestor(&self, pid: Pid) -> bool {
        self.of_unknown_descent.contains(&pid)
    }

    /// Iterates over the pids of the running processes with an unknown ancestor
    /// ([`Lineage::forked_with_unknown_ancestor`]). Such a process may descend from a process of a job.
    pub(crate) fn pids_of_unknown_descent(&self) -> impl Iterator<Item = Pid> {
        self.of_unknown_descent.iter().copied()
    }

    /// Updates the records after the exit event of the process `pid`. `is_tracked` is true if pjw sets or restores
    /// the affinity masks of the process. Such a process is recorded as exited until a scan finds that it has ended.
    fn record_exit(&mut self, pid: Pid, is_tracked: bool) {
        self.outside.remove(&pid);
        self.of_unknown_descent.remove(&pid);
        if is_tracked {
            self.exited.insert(pid);
        }
        if self.descendants.remove(&pid).is_some() || is_tracked {
            self.scan_queue.record_job_process_exit(pid);
        }
        self.unscanned.remove(&pid);
        self.scan_queue.record_exit(pid);
    }

    /// Returns the record of the process `pid`, if pjw has recorded that the process descends from a process of
    /// a job. `None` if the process does not descend from a process of a job, or if pjw has no record of this
    /// descent.
    #[must_use]
    pub fn descendant(&self, pid: Pid) -> Option<&Descendant> {
        self.descendants.get(&pid)
    }

    /// Iterates over the recorded processes that descend from processes of jobs. Each item is the pid of a process and
    /// its record.
    pub(crate) fn descendants(&self) -> impl Iterator<Item = (Pid, &Descendant)> {
        self.descendants.iter().map(|(&pid, descendant)| (pid, descendant))
    }

    /// Iterates over the forked processes that descend from processes of jobs and that no scan has read yet.
    /// Each item is the pid of a process and its record.
    pub fn unscanned_descendants(&self) -> impl Iterator<Item = (Pid, &Descendant)> {
        self.unscanned.iter().filter_map(|&pid| Some((pid, self.descendants.get(&pid)?)))
    }

    /// Records that a scan has read the process `pid`.
    pub(crate) fn record_scanned(&mut self, pid: Pid) {
        self.unscanned.remove(&pid);
    }

    /// Records that the threads of the process `released` have their original masks (the masks before pjw changed
    /// them) again. Children that the process forks from now on inherit the original masks. A child that was forked
    /// before may have a mask that pjw set for the job. `is_settled` is true if no process has a mask that pjw set
    /// for the job. If `is_settled` is false, pjw also records later children of the process as descendants.
    pub(crate) fn record_masks_restored(&mut self, released: &Member, is_settled: bool) {
        let pid = released.id.pid;
        if !is_settled && self.descendants.len() < MAX_FORK_RECORDS {
            let new = || Descendant::from_ancestor(released, false, None, Vec::new());
            self.descendants.entry(pid).or_insert_with(new);
        }
        if let Some(descendant) = self.descendants.get_mut(&pid) {
            descendant.inherited_mask_requests = released.last_mask_request_candidates().cloned().collect();
        }
    }

    /// Records that the processes `left` have left the job `job`, which goes on. From now on, no such process and no
    /// child of such a process belongs to the job by its descent.
    pub(crate) fn record_left_processes(&mut self, job: &JobId, left: &BTreeSet<Pid>) {
        for (pid, descendant) in &mut self.descendants {
            if descendant.job == *job && (left.contains(pid) || left.contains(&descendant.ancestor)) {
                descendant.was_ancestor_member = false;
            }
        }
    }

    /// Removes the records of the processes that descend from released processes of the job `job`, because no process
    /// has a mask of the job any more. Processes that no scan has read keep their records.
    pub(crate) fn forget_released_descendants(&mut self, job: &JobId) {
        let Self { descendants, unscanned, .. } = self;
        descendants.retain(|pid, descendant| {
            descendant.was_ancestor_member || descendant.job != *job || unscanned.contains(pid)
        });
    }

    /// Records that a scan has found the end of the process `member`. If pjw has not read the exit event of the process
    /// yet, keeps a record of the process, because the fork events of its last children may still follow. `is_member`
    /// is true if the process belonged to a job. `is_member` is false if the process belonged to no job, and pjw still
    /// had to restore the original masks of the process.
    pub(crate) fn record_end(&mut self, member: &Member, is_member: bool) {
        let pid = member.id.pid;
        self.unscanned.remove(&pid);
        if self.exited.remove(&pid) || self.descendants.len() >= MAX_FORK_RECORDS {
            return;
        }
        let requests = member.last_mask_request_candidates().cloned().collect();
        let new = || Descendant::from_ancestor(member, is_member, None, requests);
        self.descendants.entry(pid).or_insert_with(new);
    }

    /// Removes the descendant record of the process `pid`, which has ended. Called only while pjwd does not receive all
    /// process events, because the exit event that would remove the record may then be missing.
    pub(crate) fn remove_descendant(&mut self, pid: Pid) {
        self.descendants.remove(&pid);
    }

    /// Removes all records of forked processes. The caller must call this method if process events were lost:
    /// a process in a record may have exited, and its pid may now be the pid of another process.
    pub fn forget_fork_records(&mut self) {
        self.descendants.clear();
        self.unscanned.clear();
        self.exited.clear();
        self.outside.clear();
        self.of_unknown_descent.clear();
        self.has_lost_events = true;
    }

    /// Returns whether process events were lost since the last call of this method.
    pub(crate) fn take_event_loss(&mut self) -> bool {
        core::mem::take(&mut self.has_lost_events)
    }
}

#[cfg(test)]
mod tests;
