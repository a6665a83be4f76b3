//! The data that the phases of one cycle share.

use crate::basics::prelude::*;
use crate::basics::{CpuSet, Moment, Pid, ThreadId};
use crate::state::{DirtySet, WardenState, mask_records};
use crate::terms::{Event, Job, JobId, Observed, Policy, Record, ScanScope, Snapshot, Warning};

/// The unfinished decision of a cycle: the input, the state, and the output so far.
pub(crate) struct Draft<'a> {
    pub(crate) state: &'a mut WardenState,
    pub(crate) policy: &'a Policy,
    pub(crate) now: Moment,
    /// The snapshot of this cycle.
    pub(crate) seen: &'a Snapshot,
    /// Whether the snapshot lists every process of the node.
    pub(crate) full: bool,
    /// Whether a job was made or removed: a process may then belong to another job than before, even if the snapshot
    /// does not list the process.
    pub(crate) jobs_changed: bool,
    /// Processes that became members, or leave their job, in this cycle.
    pub(crate) new_members: BTreeSet<Pid>,
    /// The jobs and processes that the next round plans again.
    pub(crate) still_dirty: DirtySet,
    pub(crate) out: Output,
}

/// The output of the phases, without the plan.
#[derive(Default)]
pub(crate) struct Output {
    records: Vec<Record>,
    events: Vec<Event>,
    warnings: Vec<Warning>,
}

impl Output {
    /// Adds a record for the journal.
    pub(crate) fn record(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Adds an event.
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Adds an action that was not planned, with the reason.
    pub(crate) fn warn(&mut self, warnings: Warning) {
        self.warnings.push(warnings);
    }

    /// The records, the events and the skipped actions, each in the order in which they were added.
    pub(crate) fn into_parts(self) -> (Vec<Record>, Vec<Event>, Vec<Warning>) {
        (self.records, self.events, self.warnings)
    }
}

impl<'a> Draft<'a> {
    /// A draft without output. `jobs_changed` is true if the snapshot is full or everything is to be planned anew.
    pub(crate) fn new(state: &'a mut WardenState, seen: &'a Snapshot, policy: &'a Policy) -> Self {
        let full = seen.scope == ScanScope::Full;
        Self {
            jobs_changed: full || state.dirty.is_everything(),
            state,
            policy,
            now: seen.taken,
            seen,
            full,
            new_members: BTreeSet::new(),
            still_dirty: DirtySet::default(),
            out: Output::default(),
        }
    }

    /// The processes that the snapshot found alive, in ascending order.
    pub(crate) fn scanned_pids(&self) -> impl Iterator<Item = Pid> + use<'a> {
        self.seen.processes.values().filter_map(Observed::present).map(|process| process.id.pid)
    }
}

impl Draft<'_> {
    /// Remembers a job if it is new or changed.
    pub(crate) fn put_job(&mut self, job: Job) {
        if self.state.jobs.get(&job.id) != Some(&job) {
            self.state.dirty.add_job(&job.id);
            self.jobs_changed |= !self.state.jobs.contains_key(&job.id);
            self.out.record(Record::Job(job.clone()));
            self.state.jobs.insert(job.id.clone(), job);
        }
    }

    /// Journals that a mask is about to be requested for a thread, and which mask a release puts back.
    pub(crate) fn begin_write(&mut self, thread: ThreadId, mask: &CpuSet, original: &CpuSet) {
        let now = self.now.since_boot;
        let Some(entry) = self.state.mask_mut(&thread) else { return };
        entry.begin_write(mask.clone(), original.clone(), now);
        let since = entry.kept_since().unwrap_or(now);
        let (before, set) = (original.clone(), mask.clone());
        self.out.record(Record::Touched { thread, before, set, since });
    }

    /// Journals the mask of a thread, before its cpuset changes: a kernel before 6.2 then forgets the mask, and a restarted
    /// daemon can't read it.
    pub(crate) fn keep_mask(&mut self, thread: ThreadId) {
        let now = self.now.since_boot;
        let Some(entry) = self.state.mask_mut(&thread).filter(|entry| entry.kept_since().is_none()) else {
            return;
        };
        entry.keep(now);
        self.journal_mask(thread);
    }

    /// Journals the entry of a thread, if pjw keeps its mask.
    pub(crate) fn journal_mask(&mut self, thread: ThreadId) {
        let Some(entry) = self.state.mask(&thread).filter(|entry| entry.kept_since().is_some()) else {
            return;
        };
        mask_records(thread, entry).for_each(|record| self.out.record(record));
    }

    /// Journals that the mask of a thread is the program's own again.
    pub(crate) fn stop_keeping(&mut self, thread: ThreadId) {
        let Some(entry) = self.state.mask_mut(&thread).filter(|entry| entry.kept_since().is_some()) else {
            return;
        };
        entry.stop_keeping();
        self.out.record(Record::Untouched(thread));
    }
}

/// Warns that something is not done for a job, with the reason and the remedy.
pub(crate) fn warn(draft: &mut Draft<'_>, job: &JobId, code: &'static str, why: String, remedy: String) {
    draft.out.warn(Warning { job: Some(job.clone()), pid: None, tid: None, code, why, remedy });
}
