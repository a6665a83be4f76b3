//! The state as a list of journal records, and the state that is restored from them.

use crate::basics::{CpuSet, Nanos, ThreadId, Tid, prelude::*};
use crate::machine::topology::Topology;
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::{MaskRequest, MaskWriter};
use crate::state::{members::Member, pool::PuPool, warden::WardenState};
use crate::terms::{Job, JobId, Ownership, Record};

impl WardenState {
    /// Returns the journal records from which [`WardenState::apply_record`] can restore this state. The journal is the
    /// file with which a restarted daemon restores its state. To shorten the journal, the daemon replaces the content
    /// of the journal by these records.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let jobs = self.jobs_unshared_first().cloned().map(Record::Job);
        let members = self.members.values().map(Member::membership).map(Record::Joined);
        let restoring = self
            .processes_to_restore
            .values()
            .map(Member::membership)
            .chain(self.restored_potential_parents());
        let restoring = restoring.map(Record::Left);
        let masks = self.journaled_masks();
        let masks =
            masks.flat_map(|(thread, entry)| mask_records(thread, entry, |_| true).collect::<Vec<_>>());
        let cpusets = self.cpusets.records().into_iter().map(Record::Cpuset);
        let released = self.released_masks.values().cloned().map(Record::ReleasedMasks);
        let usage = self.usage.records();
        let usage = usage.map(|(job, usage)| Record::Usage { job: job.clone(), usage: Box::new(usage) });
        let unknown = self.unknown_masks.records().map(Record::UnknownMasks);
        jobs.chain(usage)
            .chain(unknown)
            .chain(released)
            .chain(cpusets)
            .chain(members)
            .chain(restoring)
            .chain(masks)
            .collect()
    }

    /// Applies one record of the journal to the state. The journal is the file with which a restarted daemon restores
    /// its state. When the daemon starts, it calls this function for each record, in the order of the journal.
    ///
    /// A record of a job restores the grant of the job: the PUs (logical CPUs) that the job holds. The job loses this
    /// grant in each of these cases:
    ///
    /// - The machine has none of the PUs.
    /// - Another job holds one of the PUs. This does not apply to borrowed PUs, nor to a grant that may overlap with
    ///   other grants ([`Grant::is_shared`](crate::terms::Grant::is_shared)).
    ///
    /// The records may name processes that have ended since the records were written. Such a process stays in the state
    /// until the first scan of all processes.
    pub fn apply_record(&mut self, record: Record) {
        match record {
            Record::Job(mut job) => {
                if !self.enter_grant_in_pool(&job) {
                    self.pool.release(&job.id);
                    job.grant = None;
                }
                self.jobs.insert(job);
            }
            Record::Ended(job) => {
                self.jobs.remove(&job);
                self.pool.release(&job);
                self.move_to_restoring(&job);
                self.usage.take_job_usage(&job);
            }
            Record::Usage { job, usage } => {
                if self.jobs.contains_key(&job) {
                    self.usage.resume_recording(job, *usage);
                }
            }
            Record::Joined(membership) if self.jobs.contains_key(&membership.job) => {
                self.processes_to_restore.remove(&membership.process.pid);
                self.members.insert(Member::from_record(membership));
            }
            // If no record describes the job, only the masks of its processes are left to restore.
            Record::Joined(membership) | Record::Left(membership) => {
                let pid = membership.process.pid;
                self.members.remove(pid);
                self.processes_to_restore.insert(pid, Member::from_record(membership));
            }
            Record::MaskSet { thread, before, set, since: journaled_since, at } => {
                let requested_at = at.unwrap_or(journaled_since);
                // A mask is journaled before the first request of pjw: an older request is the program's.
                let is_from_program = requested_at < journaled_since && set == before;
                let writer = if is_from_program { MaskWriter::Program } else { MaskWriter::Warden };
                let request = MaskRequest { mask: set, original_mask: before, writer, requested_at };
                match self.masks_from_journal.get_mut(&thread) {
                    Some(entry) => entry.add_recorded_request(request),
                    None => {
                        let entry = MaskEntry::from_record(request).with_journaled_since(journaled_since);
                        self.masks_from_journal.insert(thread, entry);
                    }
                }
            }
            Record::ForkMaskSet { process, ancestor, before, set, since, at } => {
                if let Some(ancestor) = self.members.get(&ancestor) {
                    let membership = ancestor.membership_of_child(process, at);
                    self.apply_record(Record::Joined(membership));
                }
                let thread = ThreadId { process, tid: Tid(process.pid.0), start: process.start };
                self.apply_record(Record::MaskSet { thread, before, set, since, at: Some(at) });
            }
            Record::MaskReleased(thread) => {
                self.masks_from_journal.remove(&thread);
            }
            Record::ReleasedMasks(released) => {
                self.released_masks.insert(released.job.clone(), released);
            }
            Record::ReleaseSettled(job) => {
                self.released_masks.remove(&job);
            }
            Record::UnknownMasks(record) => self.unknown_masks.apply_record(record),
            Record::Cpuset(record) => self.cpusets.apply_record(&record, self.topology.cpus(), Nanos(0)),
        }
    }

    /// Enters the grant of `job` in the pool (the list of all PUs with their holders). Frees the PUs of a job without
    /// a grant. PUs that the machine lacks at present are left out, and remain in the grant. Returns `false` if the
    /// grant is no longer valid. This is the case if the machine has none of its PUs. It is also the case if another
    /// job holds one of its PUs, except if the grant is shared or borrowed.
    fn enter_grant_in_pool(&mut self, job: &Job) -> bool {
        let Some(grant) = &job.grant else {
            self.pool.release(&job.id);
            return true;
        };
        let here = grant.cpus.intersection(self.topology.cpus());
        if grant.ownership != Ownership::Owned {
            let borrowed = if grant.ownership == Ownership::Borrowed { here.clone() } else { CpuSet::new() };
            self.restore_borrowed(&job.id, &borrowed);
            return !here.is_empty();
        }
        if grant.is_shared {
            self.pool.grant_available(&job.id, &here);
            return !here.is_empty();
        }
        self.pool.restore_grant(&job.id, &here).is_empty() && !here.is_empty()
    }

    /// Gives PUs to a borrower. The last record counts: a PU may have passed from one borrower to another, and the
    /// record of the one that lost it may follow.
    fn restore_borrowed(&mut self, job: &JobId, cpus: &CpuSet) {
        let losers = self.pool.borrowed_pus().filter(|(pu, borrower)| *borrower != job && cpus.contains(*pu));
        let losers: BTreeSet<JobId> = losers.map(|(_, borrower)| borrower.clone()).collect();
        for loser in losers {
            let kept = self.pool.borrowed_by(&loser).difference(cpus);
            self.pool.set_borrowed(&loser, &kept);
        }
        self.pool.set_borrowed(job, cpus);
    }

    /// Replaces the topology, after the machine got new PUs (logical CPUs). `housekeeping` is the set of the PUs that
    /// are reserved for the system from now on. Every job keeps its PUs. The new PUs count as offline until the next
    /// scan.
    pub fn set_topology(&mut self, topology: Topology, housekeeping: &CpuSet) {
        let online = self.pool.online_cpus();
        self.pool = PuPool::new(&topology, housekeeping);
        self.topology = topology;
        let jobs: Vec<Job> = self.jobs_unshared_first().cloned().collect();
        for job in jobs {
            self.enter_grant_in_pool(&job);
        }
        self.pool.set_online(&online);
    }

    /// Iterates over the jobs: first those whose grant may not overlap with others. A shared grant gets only the PUs
    /// that are then free in the pool.
    fn jobs_unshared_first(&self) -> impl Iterator<Item = &Job> {
        let is_shared = |job: &&Job| job.grant.as_ref().is_some_and(|grant| grant.is_shared);
        let unshared = self.jobs.values().filter(move |job| !is_shared(job));
        unshared.chain(self.jobs.values().filter(is_shared))
    }
}

/// Returns the journal records from which a restarted daemon restores `entry`, the mask entry of the thread `thread`.
/// The entry may have several requests of which one is the last ([`MaskEntry::last_request_candidates`]). There is
/// one record for each of these requests for which `is_wanted` is true.
pub(crate) fn mask_records(
    thread: ThreadId,
    entry: &MaskEntry,
    is_wanted: impl Fn(&MaskRequest) -> bool,
) -> impl Iterator<Item = Record> {
    let since = entry.journaled_since().unwrap_or_default();
    entry.last_request_candidates().filter(move |request| is_wanted(request)).map(move |request| {
        Record::MaskSet {
            thread,
            before: request.original_mask.clone(),
            set: request.mask.clone(),
            since,
            at: Some(request.requested_at),
        }
    })
}
