//! The members of all jobs: the processes that belong to a job, by process id and by job.
//!
//! Reading goes to the map from process id to member. Writing goes through the methods of [`Members`]: they update
//! the index from each job to its members and its active members. So a cycle in which few processes changed need not
//! visit all members.

use core::ops::Deref;

mod active_threads;

pub use active_threads::{MAX_SCANS_PER_FULL_READING, MIN_THREADS_FOR_PARTIAL_READING};

use crate::basics::{
    BirthTime, Comm, CpuSet, Nanos, Pid, ProcessId, Pu, StartTime, ThreadId, Tid, ids::TASK_HOST_NAME,
    prelude::*,
};
use crate::state::demand::ThreadDemand;
use crate::state::dirty::{DirtyScope, DirtySet};
use crate::state::masks::entry::MaskEntry;
use crate::state::masks::request::MaskRequest;
use crate::state::members::active_threads::ActiveThreads;
use crate::terms::{JobId, JobMembership, MembershipEvidence};

/// A member of a job: a process that belongs to the job, with its threads and the evidence for the
/// membership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The job to which the process belongs.
    pub job: JobId,
    /// The evidence that the process belongs to the job, such as the cgroup that the batch system made for
    /// the job.
    pub evidence: MembershipEvidence,
    /// The affinity mask with which the processes of the job began: the mask of the nearest ancestor process that
    /// belongs to no job. If the threads of this ancestor have different masks, it is the mask of the first thread. pjw
    /// takes the mask from the last scan before the child of this ancestor joined the job. `None` if unknown.
    ///
    /// pjw compares this mask with the original mask of each thread of the process (the mask before pjw changed it). If
    /// both are equal, the thread inherited its original mask, and no program has bound the thread to these PUs.
    pub inherited_mask: Option<CpuSet>,
    /// The time of the first scan that read the process, in ns since boot. `None` if the process comes from a record in
    /// the journal (the file with which a restarted daemon restores its state) that does not contain this time.
    pub first_seen: Option<Nanos>,
    /// Whether the process was new when it joined the job: no earlier scan had read it. A new process may have
    /// inherited an affinity mask from a thread that pjw does not know. False for a process in the journal (the file
    /// with which a restarted daemon restores its state): an earlier daemon had read its masks, and the journal has a
    /// record of each mask that pjw set.
    pub was_new_at_join: bool,
    /// The kernel's number of the NUMA node that pjw chose for the process. pjw pins hot threads of the process to PUs
    /// of this NUMA node while it has room. A thread is hot if it runs or waits for a PU most of the time. `None` if
    /// pjw chose no NUMA node. Not stored in the journal.
    pub numa_node: Option<u32>,
    /// The threads of the process, as of the last scan that read them, by thread id.
    pub threads: BTreeMap<Tid, MemberThread>,
}

impl Member {
    /// Makes a member (a process of a job) without threads from its record in the journal. The journal is the file
    /// with which a restarted daemon restores its state.
    pub(crate) fn from_record(membership: JobMembership) -> Self {
        let JobMembership { process: id, job, evidence, inherited_mask, first_seen } = membership;
        Self {
            id,
            job,
            evidence,
            inherited_mask,
            first_seen,
            was_new_at_join: false,
            numa_node: None,
            threads: BTreeMap::new(),
        }
    }

    /// Returns the facts about the member that the journal contains: the process, its job, and the evidence for the
    /// membership.
    pub(crate) fn membership(&self) -> JobMembership {
        let Self { id: process, job, evidence, inherited_mask, first_seen, .. } = self;
        let (job, inherited_mask) = (job.clone(), inherited_mask.clone());
        JobMembership { process: *process, job, evidence: *evidence, inherited_mask, first_seen: *first_seen }
    }

    /// Returns what the journal contains about `child`, a process that this member has forked. `first_seen` is the time
    /// at which pjw found the child, in ns since boot.
    pub(crate) fn membership_of_child(&self, child: ProcessId, first_seen: Nanos) -> JobMembership {
        let evidence = self.evidence.of_child();
        JobMembership { process: child, evidence, first_seen: Some(first_seen), ..self.membership() }
    }

    /// Returns the mask requests that may have set the affinity mask which a child inherited. The thread `creator` of
    /// this process forked the child at the time `birth`. If no such request of `creator` is known, returns the
    /// requests of all threads.
    pub(crate) fn requests_for_child(&self, creator: Tid, birth: BirthTime) -> Vec<MaskRequest> {
        let entry = self.threads.get(&creator).and_then(|thread| thread.mask_entry.as_ref());
        let requests: Vec<MaskRequest> =
            entry.into_iter().flat_map(|entry| entry.requests_for_child_born_at(birth)).cloned().collect();
        if requests.is_empty() { self.requests_at_birth(birth).cloned().collect() } else { requests }
    }

    /// Iterates over the mask requests that may have set the affinity mask which a child inherited. Must be called if
    /// it is unknown which thread of this process forked the child. `birth` is the time of the fork. The requests of
    /// the first thread come last, because the last request counts if several are possible.
    pub(crate) fn requests_at_birth(&self, birth: BirthTime) -> impl Iterator<Item = &MaskRequest> {
        let first = Tid(self.id.pid.0);
        let others = self.threads.iter().filter(move |(tid, _)| **tid != first).map(|(_, thread)| thread);
        let entries = others.chain(self.threads.get(&first)).filter_map(|thread| thread.mask_entry.as_ref());
        entries.flat_map(move |entry| entry.requests_for_child_born_at(birth))
    }

    /// Iterates over the mask requests that may be the last request for a thread of this process
    /// ([`MaskEntry::last_request_candidates`]). There is nearly always one per thread.
    pub(crate) fn last_mask_request_candidates(&self) -> impl Iterator<Item = &MaskRequest> {
        self.threads
            .values()
            .filter_map(|thread| thread.mask_entry.as_ref())
            .flat_map(MaskEntry::last_request_candidates)
    }

    /// Iterates over all threads. Each item is the id of a thread and the facts about it.
    fn identified_threads(&self) -> impl Iterator<Item = (ThreadId, &MemberThread)> {
        let id = |tid, start| ThreadId { process: self.id, tid, start };
        self.threads.iter().map(move |(&tid, thread)| (id(tid, thread.start), thread))
    }

    /// Iterates over the threads that have not exited. Each item is the id of a thread and the facts about it.
    pub(crate) fn living_threads(&self) -> impl Iterator<Item = (ThreadId, &MemberThread)> {
        self.identified_threads().filter(|(_, thread)| thread.is_alive())
    }

    /// Iterates over those threads in `tids` that have not exited. If `tids` is `None`, iterates over all threads
    /// that have not exited. Each item is the id of a thread and the facts about it.
    pub(crate) fn living_threads_in(
        &self,
        tids: Option<&BTreeSet<Tid>>,
    ) -> impl Iterator<Item = (ThreadId, &MemberThread)> {
        let listed = tids.into_iter().flatten().filter_map(|tid| self.threads.get_key_value(tid));
        let listed =
            listed.map(|(&tid, thread)| (ThreadId { process: self.id, tid, start: thread.start }, thread));
        let all = tids.is_none().then(|| self.identified_threads()).into_iter().flatten();
        all.chain(listed).filter(|(_, thread)| thread.is_alive())
    }

    /// Returns whether this process exists only to own the address space that the tasks of `pjwctl spawn --share
    /// memory` share. pjw recognises such a process by its name ([`TASK_HOST_NAME`]).
    #[must_use]
    pub fn is_task_host(&self) -> bool {
        let first = self.threads.get(&Tid(self.id.pid.0));
        first.is_some_and(|thread| thread.comm.as_bytes() == TASK_HOST_NAME.to_bytes())
    }

    /// Iterates over the threads of the process whose original affinity mask (the mask before pjw changed it) is in the
    /// journal (the file with which a restarted daemon restores its state). Each item is the id of a thread and the
    /// facts about its mask. pjw restores the original masks when the job ends or a command releases it.
    pub fn journaled_masks(&self) -> impl Iterator<Item = (ThreadId, &MaskEntry)> {
        let entries =
            self.identified_threads().filter_map(|(id, thread)| Some((id, thread.mask_entry.as_ref()?)));
        entries.filter(|(_, entry)| entry.journaled_since().is_some())
    }
}

/// A thread of a member (a process of a job), as of the last scan that read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberThread {
    /// The time at which the thread started, in clock ticks of 10 ms since boot.
    pub start: StartTime,
    /// The name (comm) of the thread, at most 15 bytes.
    pub comm: Comm,
    /// The kernel's letter for the state of the thread at the last scan, such as R (running), S (sleeping) or
    /// Z (zombie). See proc(5).
    pub state: char,
    /// The PU on which the thread last ran before the last scan.
    pub last_cpu: Pu,
    /// The effective affinity mask (sched_getaffinity(2)), as of the last scan.
    pub effective_mask: CpuSet,
    /// The demand of the thread for CPU time: the share of time in which the thread ran or waited for a PU,
    /// smoothed over the last scans.
    pub demand: ThreadDemand,
    /// The affinity masks that were requested for the thread, and the original mask (the mask before pjw
    /// changed it), which pjw restores when the job ends. `None` until a scan has read the cgroup with the
    /// cpuset that limits the thread.
    pub mask_entry: Option<MaskEntry>,
}

impl MemberThread {
    /// Returns whether the thread can still run. False if the thread has exited (`state` is Z or X):
    /// sched_setaffinity(2) can then no longer set its mask. The first thread of a process may exit before
    /// the other threads of the process. In that case, the first thread stays in state Z until the other
    /// threads have exited.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }

    /// Whether the thread is active: it recently ran or waited for a PU (logical CPU), so that its smoothed demand is
    /// not 0.
    pub(crate) fn is_active(&self) -> bool {
        self.demand.is_hot || self.demand.permille > 0
    }
}

/// All processes that belong to jobs, indexed by pid and by job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    /// The processes, by pid.
    members: BTreeMap<Pid, Member>,
    by_job: BTreeMap<JobId, JobMembers>,
    /// The pids of the active processes of all jobs: the demand of at least one thread is not 0, or no scan
    /// has read the threads.
    active: BTreeSet<Pid>,
    /// The active threads of the active processes with many threads of which few are active, by pid.
    active_threads: BTreeMap<Pid, ActiveThreads>,
    /// The pids of the processes of which this cycle must still read all threads: a thread that is not active
    /// changed its mask, and the last scan read only the active threads of its process.
    pids_to_reread: BTreeSet<Pid>,
    /// The jobs whose processes changed since the last call of [`Members::take_changed_jobs`]: a process was
    /// added or removed, moved to another cgroup, or became active or idle.
    changed: BTreeSet<JobId>,
}

/// The members of one job, by process id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct JobMembers {
    all: BTreeSet<Pid>,
    /// The active members: those with a thread that ran lately, and those whose threads were not scanned yet.
    active: BTreeSet<Pid>,
    /// The NUMA node that was chosen last for a process of the job.
    last_node: Option<u32>,
}

impl Deref for Members {
    type Target = BTreeMap<Pid, Member>;

    fn deref(&self) -> &Self::Target {
        &self.members
    }
}

impl Members {
    /// Iterates over the processes that belong to the job.
    pub fn members_of_job<'a>(&'a self, job: &JobId) -> impl Iterator<Item = &'a Member> + use<'a> {
        let job_members = self.by_job.get(job).into_iter().flat_map(|job_members| &job_members.all);
        job_members.filter_map(|pid| self.members.get(pid))
    }

    /// Iterates over the pids of the active processes of a job. A process is active if at least one of its threads has
    /// a [`ThreadDemand`] greater than 0: the thread recently ran or waited for a PU (logical CPU). A process whose
    /// threads no scan has read is active too.
    pub fn active_pids_of<'a>(&'a self, job: &JobId) -> impl Iterator<Item = Pid> + use<'a> {
        self.by_job.get(job).into_iter().flat_map(|job_members| &job_members.active).copied()
    }

    /// Iterates over the pids of the active processes of all jobs. A process is active if at least one of its threads
    /// has a [`ThreadDemand`] greater than 0: the thread recently ran or waited for a PU (logical CPU). A process whose
    /// threads no scan has read is active too.
    pub fn active_pids(&self) -> impl Iterator<Item = Pid> {
        self.active.iter().copied()
    }

    /// Iterates over the idle processes of a job. A process is idle if all its threads have a [`ThreadDemand`] of 0: no
    /// thread recently ran or waited for a PU (logical CPU). A process whose threads no scan has read is not idle.
    pub fn idle_members_of<'a>(&'a self, job: &JobId) -> impl Iterator<Item = &'a Member> + use<'a> {
        let job_members = self.by_job.get(job);
        let idle =
            job_members.into_iter().flat_map(|job_members| job_members.all.difference(&job_members.active));
        idle.filter_map(|pid| self.members.get(pid))
    }

    /// Returns whether the process with the pid `pid` belongs to a job and is idle ([`Members::idle_members_of`]).
    pub(crate) fn is_idle(&self, pid: Pid) -> bool {
        self.members.contains_key(&pid) && !self.active.contains(&pid)
    }

    /// Returns the processes of the job `job` whose affinity masks must be planned again according to `dirty`. If
    /// `dirty` contains only some processes of the job, the active processes of the job are included. `None` if `dirty`
    /// contains nothing of the job.
    pub(crate) fn members_to_plan(&self, dirty: &DirtySet, job: &JobId) -> Option<Vec<&Member>> {
        let DirtyScope::Processes(pids) = dirty.dirty_scope_of(job)? else {
            return Some(self.members_of_job(job).collect());
        };
        let concerned: BTreeSet<Pid> = pids.iter().copied().chain(self.active_pids_of(job)).collect();
        let members = concerned.iter().filter_map(|pid| self.members.get(pid));
        Some(members.filter(|member| member.job == *job).collect())
    }

    /// Adds the process `member` to the job `member.job`. If another process with the same pid belongs to a
    /// job, removes and returns this other process. Otherwise returns `None`.
    pub fn insert(&mut self, member: Member) -> Option<Member> {
        let pid = member.id.pid;
        let before = self.remove(pid);
        self.changed.insert(member.job.clone());
        let job_members = self.by_job.entry(member.job.clone()).or_default();
        job_members.all.insert(pid);
        if has_active_thread(&member.threads) {
            job_members.active.insert(pid);
            self.active.insert(pid);
        }
        self.members.insert(pid, member);
        before
    }

    /// Removes the process with the pid `pid` from its job, and returns the process. Returns `None` if no
    /// process with this pid belongs to a job.
    pub fn remove(&mut self, pid: Pid) -> Option<Member> {
        let member = self.members.remove(&pid)?;
        self.changed.insert(member.job.clone());
        self.active.remove(&pid);
        self.active_threads.remove(&pid);
        if let Some(job_members) = self.by_job.get_mut(&member.job) {
            job_members.all.remove(&pid);
            job_members.active.remove(&pid);
            if job_members.all.is_empty() {
                self.by_job.remove(&member.job);
            }
        }
        Some(member)
    }

    /// Removes all processes that belong to the job, and returns these processes.
    pub fn remove_all_of(&mut self, job: &JobId) -> Vec<Member> {
        self.changed.insert(job.clone());
        let job_members = self.by_job.remove(job).unwrap_or_default();
        self.active.retain(|pid| !job_members.active.contains(pid));
        job_members.active.iter().for_each(|pid| drop(self.active_threads.remove(pid)));
        job_members.all.iter().filter_map(|pid| self.members.remove(pid)).collect()
    }

    /// Removes the threads from the record of the process `pid`, and returns them, so that the caller can change them.
    /// The caller must put them back by [`Members::replace_threads`] or [`Members::put_back_threads`]. `None` if the
    /// process belongs to no job.
    pub(crate) fn take_threads(&mut self, pid: Pid) -> Option<BTreeMap<Tid, MemberThread>> {
        self.members.get_mut(&pid).map(|member| core::mem::take(&mut member.threads))
    }

    /// Replaces the recorded threads of the process `pid` by `threads`, as a scan read them. Has no effect if
    /// the process belongs to no job.
    pub fn replace_threads(&mut self, pid: Pid, threads: BTreeMap<Tid, MemberThread>) {
        let before = self.active_threads.remove(&pid);
        if !self.members.contains_key(&pid) {
            return;
        }
        let active = threads.iter().filter(|(_, thread)| thread.is_active()).map(|(&tid, _)| tid);
        let active = ActiveThreads::new(threads.len(), active, before);
        let is_active = active.is_some() || has_active_thread(&threads);
        self.active_threads.extend(active.map(|active| (pid, active)));
        self.set_threads(pid, threads, is_active);
    }

    /// Puts the threads of the process `pid` back into its record, after a scan read only the active threads. A
    /// thread is active if it recently ran or waited for a PU (logical CPU).
    ///
    /// - `threads` has all threads of the process.
    /// - `is_complete` says whether the scan found all active threads. If not, the next scan reads all threads.
    /// - `at` is the time of the scan, in ns since boot.
    ///
    /// Returns whether a thread is no longer active.
    pub(crate) fn put_back_threads(
        &mut self,
        pid: Pid,
        threads: BTreeMap<Tid, MemberThread>,
        is_complete: bool,
        at: Nanos,
    ) -> bool {
        let Some(mut active) = self.active_threads.remove(&pid) else {
            let is_active = has_active_thread(&threads);
            self.set_threads(pid, threads, is_active);
            return false;
        };
        let is_active = |tid: &Tid| threads.get(tid).is_some_and(MemberThread::is_active);
        let has_one_become_idle = active.record_partial_reading(is_active, at);
        if !is_complete {
            active.force_full_reading();
        }
        let is_active = !active.tids.is_empty();
        self.active_threads.extend(is_active.then_some((pid, active)));
        self.set_threads(pid, threads, is_active);
        has_one_become_idle
    }

    /// Returns the processes of which the next scan may read only the active threads, each with the ids of these
    /// threads. A thread is active if it recently ran or waited for a PU (logical CPU). Processes that `dirty` contains
    /// with all threads are left out.
    pub(crate) fn active_threads_to_read(&self, dirty: &DirtySet) -> BTreeMap<Pid, BTreeSet<Tid>> {
        let is_dirty = |pid: &Pid| {
            let scope = self.members.get(pid).and_then(|member| dirty.dirty_scope_of(&member.job));
            scope.is_some_and(|scope| scope.contains_whole_process(*pid))
        };
        let partly_readable = self.active_threads.iter().filter(|(_, active)| active.can_be_read_alone());
        let partly_readable = partly_readable.filter(|(pid, _)| !is_dirty(pid));
        partly_readable.map(|(&pid, active)| (pid, active.tids.clone())).collect()
    }

    /// Returns the ids of the active threads of `member`, if only their affinity masks must be planned again according
    /// to `dirty`. `None` if the masks of all threads of `member` must be planned again.
    pub(crate) fn active_threads_to_plan(&self, dirty: &DirtySet, member: &Member) -> Option<&BTreeSet<Tid>> {
        let scope = dirty.dirty_scope_of(&member.job)?;
        if scope.contains_whole_process(member.id.pid) {
            return None;
        }
        self.active_threads_of(member.id.pid)
    }

    /// Returns the ids of the active threads of the process `pid`. A thread is active if its [`ThreadDemand`] is not 0:
    /// it recently ran or waited for a PU (logical CPU). To save time, some scans read only these threads of the
    /// process. Returns `None` if every scan must read all threads, in each of these cases:
    ///
    /// - The process belongs to no job, or has fewer than [`MIN_THREADS_FOR_PARTIAL_READING`] threads.
    /// - The last scan found no active thread.
    /// - The last scan of all threads found too many active threads: more than one thread in 16.
    #[must_use]
    pub fn active_threads_of(&self, pid: Pid) -> Option<&BTreeSet<Tid>> {
        self.active_threads.get(&pid).map(|active| &active.tids)
    }

    /// Returns the time, in ns since boot, of the last scan that read only the active threads of the process `pid`.
    /// `None` if a later scan read all threads of the process.
    pub(crate) fn active_threads_read_at(&self, pid: Pid) -> Option<Nanos> {
        self.active_threads.get(&pid)?.read_alone_at()
    }

    /// Requests another scan in this cycle of the daemon that reads all threads of the process `pid`. Has no effect if
    /// the last scan already read all threads, or if the thread `tid` is active.
    pub(crate) fn request_full_reading(&mut self, pid: Pid, tid: Tid) {
        if let Some(active) = self.active_threads.get_mut(&pid).filter(|active| !active.tids.contains(&tid)) {
            active.force_full_reading();
            self.pids_to_reread.extend(active.read_alone_at().map(|_| pid));
        }
    }

    /// Returns the pids of the processes of which another scan in this cycle must read all threads, and clears the list
    /// of these pids.
    pub(crate) fn take_pids_to_reread(&mut self) -> BTreeSet<Pid> {
        core::mem::take(&mut self.pids_to_reread)
    }

    /// Replaces the threads of the process `pid`. `is_active` says whether the process is active: one of its threads
    /// recently ran or waited for a PU, or no scan has read its threads. If the process was not active before and is
    /// now, or the reverse, its job counts as changed. Has no effect if the process belongs to no job.
    fn set_threads(&mut self, pid: Pid, threads: BTreeMap<Tid, MemberThread>, is_active: bool) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.threads = threads;
        if let Some(job_members) = self.by_job.get_mut(&member.job) {
            let has_changed = if is_active {
                self.active.insert(pid);
                job_members.active.insert(pid)
            } else {
                self.active.remove(&pid);
                job_members.active.remove(&pid)
            };
            if has_changed {
                self.changed.insert(member.job.clone());
            }
        }
    }

    /// Records that the process `pid` of a job was moved to another cgroup. [`Members::take_changed_jobs`] then returns
    /// the job.
    pub(crate) fn note_move(&mut self, pid: Pid) {
        self.changed.extend(self.members.get(&pid).map(|member| member.job.clone()));
    }

    /// Returns the jobs whose processes have changed since the last call: a process joined or left the job, was moved
    /// to another cgroup, or became active or idle.
    pub(crate) fn take_changed_jobs(&mut self) -> BTreeSet<JobId> {
        core::mem::take(&mut self.changed)
    }

    /// Returns the number of the NUMA node that pjw chose last for a process of the job `job`. `None` if pjw has chosen
    /// none.
    pub(crate) fn last_node_of(&self, job: &JobId) -> Option<u32> {
        self.by_job.get(job)?.last_node
    }

    /// Records that pjw chose the NUMA node `node` for the hot threads of the process `pid`.
    pub(crate) fn set_numa_node(&mut self, pid: Pid, node: u32) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.numa_node = Some(node);
        if let Some(job_members) = self.by_job.get_mut(&member.job) {
            job_members.last_node = Some(node);
        }
    }

    /// Returns the thread `tid` of the process `pid`, so that the caller can change its mask entry. `None` if no
    /// process of a job has this thread.
    pub(crate) fn thread_mut(&mut self, pid: Pid, tid: Tid) -> Option<&mut MemberThread> {
        self.members.get_mut(&pid)?.threads.get_mut(&tid)
    }
}

/// Returns whether one of the threads is active. True if no thread is known.
fn has_active_thread(threads: &BTreeMap<Tid, MemberThread>) -> bool {
    threads.is_empty() || threads.values().any(MemberThread::is_active)
}
