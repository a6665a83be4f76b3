//! The state of pjw between two cycles: the jobs, the pool of PUs, the members, and the masks of their
//! threads.

mod job_warnings;
mod mask_outcomes;
mod warning_list;

use alloc::sync::Arc;
use core::cell::OnceCell;

use crate::basics::{
    CpuSet, Nanos, Pid, ProcessId, Pu, StartTime, ThreadId, Tid, Uid, cgroup_and_ancestor_paths,
    history::History, is_cgroup_within, prelude::*,
};
use crate::machine::topology::Topology;
use crate::state::address_spaces::AddressSpaceGroups;
use crate::state::attempts::{AffinityTargets, ReportedAttemptCount};
use crate::state::jobs::waiting::{RefusedRequest, ServingConditions};
use crate::state::members::{Member, MemberThread, Members};
use crate::state::warden::warning_list::WarningList;
use crate::state::{
    cpusets::CpusetRegistry, dirty::DirtySet, jobs::Jobs, lending::LendingState, lineage::Lineage,
    masks::entry::MaskEntry, masks::request::MaskLimits, masks::target::target_mask, pool::PuPool,
    processes::Processes, unknown_masks::MasksOfUnknownOrigin, usage::UsageState,
};
use crate::terms::{
    Cgroup, Grant, GrantedBy, IdleProcessGroup, JobId, LeftoverCpuset, Observed, Process, ProcessEvent,
    ReleasedJobMasks, Warning, WatchedProcesses,
};

/// What pjwd knows about the machine, the jobs, the PUs (logical CPUs) granted to the jobs, and the processes. pjwd
/// repeats these steps: scan the machine, decide which changes keep each job on its cores, make the changes. The state
/// is kept from one repetition to the next. Facts about a process are removed when no later decision can need them.
#[derive(Debug, Clone)]
pub struct WardenState {
    /// The cores, caches, NUMA nodes and packages of the machine.
    pub topology: Topology,
    /// The holder of each PU: a job, the system, or nobody.
    pub pool: PuPool,
    /// All jobs on this machine, including the jobs to which no PUs are granted.
    pub jobs: Jobs,
    /// For each job whose idle cores may be lent: how many of its cores it uses. Also the borrowed PUs that pjw takes
    /// back soon.
    pub lending: LendingState,
    /// The resources that each running job has used so far, such as CPU time.
    pub usage: UsageState,
    /// All processes of the machine, each as the last scan that read it found it.
    pub processes: Processes,
    /// The processes that belong to jobs, with their threads.
    pub members: Members,
    /// The groups of processes that share an address space.
    pub address_spaces: AddressSpaceGroups,
    /// The processes for which pjw must restore the original affinity masks (the masks before pjw changed
    /// them), by pid. A process enters this map when its job ends, or when a command (`pjwctl release`)
    /// releases its job. The map also contains the processes in `pids_kept_off_job_cpus`, which belong to no job. A
    /// process is removed from the map when a full scan has shown that its original masks are in force.
    pub processes_to_restore: BTreeMap<Pid, Member>,
    /// The pids of the processes that belong to no job and that pjw keeps off the PUs of all jobs by affinity
    /// masks. These processes are also in `processes_to_restore`, because pjw restores their original masks
    /// later.
    pub pids_kept_off_job_cpus: BTreeSet<Pid>,
    /// The cgroups of jobs, by path, each as the last scan that read it found it. These are the cgroups that
    /// batch systems made for jobs, and the cgroups of pjw's cpusets.
    pub cgroups: BTreeMap<String, Observed<Cgroup>>,
    /// The cpusets that pjw created or changed for jobs.
    pub cpusets: CpusetRegistry,
    /// The affinity masks that the daemon read from the journal (the file with which a restarted daemon restores its
    /// state), by thread. The map contains only threads that no scan has read since the daemon started.
    pub masks_from_journal: BTreeMap<ThreadId, MaskEntry>,
    /// For each job that ended or was released: the affinity masks that pjw had given to the threads of the
    /// job until then. A process that was forked during the release may have inherited one of these masks,
    /// and may still have it. The entry of a job is removed when a full scan has shown that no process has
    /// such a mask. Jobs that an earlier run of the daemon released are included.
    pub released_masks: BTreeMap<JobId, ReleasedJobMasks>,
    /// The processes whose affinity masks an earlier run of the daemon may have set, where no journal record says
    /// whether it did. Also the search for such processes, which begins after journal records were lost.
    pub unknown_masks: MasksOfUnknownOrigin,
    /// The time of the first scan since the daemon started, in ns since boot. `None` before the first scan.
    pub(crate) first_scan_at: Option<Nanos>,
    /// The online PUs, now and in the past.
    pub(crate) online: History<CpuSet>,
    /// The warnings about each job, as of the last time that the job was planned or, while it waits for cores, visited.
    pub(crate) warnings: BTreeMap<JobId, Vec<Arc<Warning>>>,
    /// All warnings of the last decision.
    warning_list: WarningList,
    /// The jobs for which the last search for cores failed, each with its request and the reason.
    pub(crate) refused_requests: BTreeMap<JobId, RefusedRequest>,
    /// The conditions under which all waiting jobs were looked at last. `None` before the first decision.
    pub(crate) served_under: Option<ServingConditions>,
    /// The descent of processes, as reported by the fork events of the kernel. It shows which processes were
    /// forked by processes of jobs.
    pub lineage: Lineage,
    /// The jobs and processes about which pjw must decide again after the next scan, even if this scan finds them
    /// unchanged.
    pub dirty: DirtySet,
    /// The number of partial periodic scans that pjw makes before the next full periodic scan. A periodic
    /// scan (config key `rescan_interval`) also reads processes outside jobs. A partial periodic scan reads
    /// only processes that may have changed. A full periodic scan reads every process. If the number is 0,
    /// the next periodic scan is full, and pjw decides about all jobs again. The number is then set to 7.
    pub periodic_scans_until_full: u32,
    /// Whether the next periodic scan (the scan that also reads processes outside jobs) must read every
    /// process. True if process events may have been lost or a scan was incomplete, so that a process may be
    /// missing in this state.
    pub full_scan_due: bool,
    /// The pids of the processes that belong to no job, by user. Only users that own a job on this machine
    /// are included. A user without such processes has an empty set or no entry.
    pub unassigned_pids_by_user: BTreeMap<Uid, BTreeSet<Pid>>,
    /// Those pids in `unassigned_pids_by_user` that belong to a login itself, such as sshd or the login shell, by user.
    /// pjw does not warn about these processes, although they belong to no job.
    pub login_pids_by_user: BTreeMap<Uid, BTreeSet<Pid>>,
    /// The warnings about unassigned processes, by user, as of the last change of the processes of this user.
    pub(crate) stray_warnings: BTreeMap<Uid, Arc<Warning>>,
    /// The users with a process that belonged to no job, and that has ended or joined a job since the last decision.
    pub(crate) users_with_changed_strays: BTreeSet<Uid>,
    /// The threads for which pjw reported a sched_setaffinity(2) call for PUs outside the job, and whose masks no scan
    /// has read since the call.
    pub(crate) reported_affinity_targets: AffinityTargets,
    /// The threads for which a program made a sched_setaffinity(2) call for PUs of the job only, and whose masks no
    /// scan has read since the call.
    pub(crate) affinity_targets_within_job: AffinityTargets,
    /// The number of sched_setaffinity(2) calls for PUs outside the job that pjw has reported in the current minute,
    /// for each job.
    pub(crate) reported_attempt_counts: BTreeMap<JobId, ReportedAttemptCount>,
    /// The time since which pjwd has received every fork event of the kernel, in ns since boot. pjwd knows
    /// the parent of each process that was forked after this time. `None` if pjwd does not receive fork
    /// events, or if fork events are being lost.
    pub fork_events_complete_since: Option<Nanos>,
    /// The idle processes of each job, by group.
    pub(crate) idle_groups: BTreeMap<JobId, Vec<Arc<IdleProcessGroup>>>,
    /// The groups in `idle_groups` together. Empty if one changed since the last calculation.
    pub(crate) idle_watch: OnceCell<Arc<WatchedProcesses>>,
}

impl WardenState {
    /// Creates the initial state of the daemon, without jobs and processes. The PUs (logical CPUs) in `housekeeping`
    /// are reserved for the system.
    #[must_use]
    pub fn new(topology: Topology, housekeeping: &CpuSet) -> Self {
        let pool = PuPool::new(&topology, housekeeping);
        let online = History::new(pool.online_cpus());
        Self {
            topology,
            pool,
            jobs: Jobs::default(),
            lending: LendingState::default(),
            usage: UsageState::default(),
            processes: Processes::default(),
            members: Members::default(),
            address_spaces: AddressSpaceGroups::default(),
            processes_to_restore: BTreeMap::new(),
            pids_kept_off_job_cpus: BTreeSet::new(),
            cgroups: BTreeMap::new(),
            cpusets: CpusetRegistry::default(),
            masks_from_journal: BTreeMap::new(),
            released_masks: BTreeMap::new(),
            unknown_masks: MasksOfUnknownOrigin::default(),
            first_scan_at: None,
            online,
            warnings: BTreeMap::new(),
            warning_list: WarningList::default(),
            refused_requests: BTreeMap::new(),
            served_under: None,
            lineage: Lineage::default(),
            dirty: DirtySet::everything(),
            periodic_scans_until_full: 0,
            full_scan_due: true,
            unassigned_pids_by_user: BTreeMap::new(),
            login_pids_by_user: BTreeMap::new(),
            stray_warnings: BTreeMap::new(),
            users_with_changed_strays: BTreeSet::new(),
            reported_affinity_targets: AffinityTargets::new(),
            affinity_targets_within_job: AffinityTargets::new(),
            reported_attempt_counts: BTreeMap::new(),
            fork_events_complete_since: None,
            idle_groups: BTreeMap::new(),
            idle_watch: OnceCell::new(),
        }
    }

    /// Iterates over the members of a job: the processes that belong to the job.
    pub fn members_of<'a>(&'a self, job: &'a JobId) -> impl Iterator<Item = &'a Member> + 'a {
        self.members.members_of_job(job)
    }

    /// Returns the process with the pid `pid`. The facts about the process are from the last scan that read it. Returns
    /// `None` if no scan has found a process with this pid, or if pjw knows that the process has ended.
    #[must_use]
    pub fn process(&self, pid: Pid) -> Option<&Process> {
        self.processes.get(&pid).map(|known| &known.process)
    }

    /// Returns the grant of the job `job`: the PUs (logical CPUs) that the job holds, and whether pjw or the batch
    /// system chose them. `None` if the job holds no PUs or does not exist.
    #[must_use]
    pub fn grant_of(&self, job: &JobId) -> Option<&Grant> {
        self.jobs.get(job)?.grant.as_ref()
    }

    /// Iterates over the processes of the job `job`. Also iterates over the processes that have left the job and whose
    /// original masks (the masks before pjw changed them) pjw must still restore.
    pub(crate) fn tracked_processes_of(&self, job: &JobId) -> impl Iterator<Item = &Member> {
        self.members
            .members_of_job(job)
            .chain(self.processes_to_restore.values().filter(move |member| member.job == *job))
    }

    /// Iterates over the processes whose affinity masks may change when the cpuset of the job `job` at the cgroup path
    /// `path` changes: the processes of the job, and all other processes in this cgroup whose masks pjw sets or must
    /// restore.
    pub(crate) fn processes_affected_by_cpuset(
        &self,
        job: &JobId,
        path: &str,
    ) -> impl Iterator<Item = &Member> {
        let inside = self.processes.processes_in_cgroup(path).map(|known| known.process.id.pid);
        let inside = inside.filter_map(|pid| self.tracked_process(pid));
        self.tracked_processes_of(job).chain(inside.filter(move |member| member.job != *job))
    }

    /// Returns the PUs (logical CPUs) that limit the affinity masks of the process `pid` at present: the PUs that are
    /// online and in its cpuset.
    pub(crate) fn present_mask_limits(&self, pid: Pid) -> MaskLimits {
        self.mask_limits(pid, Nanos(u64::MAX), true)
    }

    /// Returns whether a cpuset of pjw may hide the original mask of the thread `thread` of the process `pid`. The
    /// original mask is the mask before pjw changed it. True in each of these cases:
    ///
    /// - pjw is moving the process into or out of a cpuset.
    /// - The process is in a cpuset of pjw that lacks PUs (logical CPUs) of the original mask, or that is to be
    ///   removed.
    /// - pjw wrote the cpuset of the process after a scan read the mask.
    ///
    /// False if the thread has no mask entry, or if the cgroup of the process is unknown.
    pub(crate) fn may_cpuset_hide_mask(&self, pid: Pid, thread: &MemberThread) -> bool {
        let cgroup = self.process(pid).and_then(|process| process.cgroup.as_deref());
        let (Some(entry), Some(cgroup)) = (&thread.mask_entry, cgroup) else { return false };
        let (seen, read_at) = (&thread.effective_mask, entry.last_read_at());
        if self.process(pid).is_some_and(|known| self.cpusets.delayed_changes.is_moving(known.id)) {
            return true;
        }
        let limits = self.present_mask_limits(pid);
        let is_cut =
            MaskEntry::from_first_reading(seen, &limits, read_at).original_mask() != entry.original_mask();
        self.cpusets.may_hide_mask(cgroup, is_cut, read_at)
    }

    /// Returns the PU (logical CPU) to which pjw pinned the thread `tid` of the process `member`: pjw chose this PU,
    /// and restricted the thread to it. Returns `None` in each of these cases:
    ///
    /// - No scan has read the thread or its mask, or the job holds no PUs.
    /// - The effective mask of the thread is not a single PU.
    /// - pjw did not request this mask.
    /// - The program had itself bound the thread to one PU. pjw then only keeps this binding, or moves it to a PU of
    ///   the job.
    #[must_use]
    pub fn pinned_pu_of(&self, member: &Member, tid: Tid) -> Option<Pu> {
        let thread = member.threads.get(&tid)?;
        let entry = thread.mask_entry.as_ref()?;
        let grant = &self.grant_of(&member.job)?.cpus;
        let own = self.program_bound_cpus(grant, member, entry);
        let is_bound_to = |pin| own.only_pu() == Some(pin) && !entry.is_binding_lifted(&own);
        entry.pinned_pu().filter(|&pin| !is_bound_to(pin) && thread.effective_mask.only_pu() == Some(pin))
    }

    /// Returns the PUs (logical CPUs) of `grant` to which the program bound a thread of the process `member`. `entry`
    /// is the mask entry of the thread. Returns `grant` if the program did not bind the thread.
    pub(crate) fn program_bound_cpus(&self, grant: &CpuSet, member: &Member, entry: &MaskEntry) -> CpuSet {
        target_mask(&self.topology, grant, entry.original_mask(), member.inherited_mask.as_ref())
    }

    /// Returns the binding of the thread `id` that pjw lifts by a change of the mask: the online PUs of the grant to
    /// which the program bound the thread.
    fn binding_to_lift(&self, id: &ThreadId) -> Option<CpuSet> {
        let member = self.members.get(&id.process.pid)?;
        let grant = self.jobs.get(&member.job)?.online_granted_cpus(&self.pool.online_cpus())?;
        Some(self.program_bound_cpus(&grant, member, self.mask_entry(id)?))
    }

    /// Returns what pjw knows about the affinity mask of a thread: the masks that pjw or the program requested
    /// by sched_setaffinity(2), and the original mask (the mask before pjw changed it), which pjw restores
    /// later. Returns `None` in each of these cases:
    ///
    /// - No scan has read the mask of the thread.
    /// - The process of the thread does not belong to a job, and pjw is not restoring its original masks.
    #[must_use]
    pub fn mask_entry(&self, id: &ThreadId) -> Option<&MaskEntry> {
        let member = self.tracked_process(id.process.pid).filter(|member| member.id == id.process)?;
        member.threads.get(&id.tid).filter(|thread| thread.start == id.start)?.mask_entry.as_ref()
    }

    /// Iterates over the threads whose original affinity mask (the mask before pjw changed it) is in the journal (the
    /// file with which a restarted daemon restores its state), each with its mask entry. pjw restores the original mask
    /// when the job of the thread ends or is released. Includes threads that no scan has read since the restart of the
    /// daemon.
    pub fn journaled_masks(&self) -> impl Iterator<Item = (ThreadId, &MaskEntry)> {
        let tracked = self.members.values().chain(self.processes_to_restore.values());
        let unread = self.masks_from_journal.iter().map(|(&thread, entry)| (thread, entry));
        tracked.flat_map(Member::journaled_masks).chain(unread)
    }

    /// Iterates over the threads of `process` that no scan has read since the restart of the daemon, each with its mask
    /// entry from the journal.
    pub(crate) fn recorded_masks_of(
        &self,
        process: ProcessId,
    ) -> impl Iterator<Item = (&ThreadId, &MaskEntry)> {
        let first = ThreadId { process, tid: Tid(0), start: StartTime(0) };
        let last = ThreadId { process, tid: Tid(u32::MAX), start: StartTime(u64::MAX) };
        self.masks_from_journal.range(first..=last)
    }

    /// Removes the mask entries from the journal of those threads of the process `process` that no scan has read: these
    /// threads have ended.
    pub(crate) fn forget_recorded_masks(&mut self, process: ProcessId) {
        let ended: Vec<ThreadId> = self.recorded_masks_of(process).map(|(&id, _)| id).collect();
        ended.iter().for_each(|id| drop(self.masks_from_journal.remove(id)));
    }

    /// Returns the thread `id`, so that the caller can change what is known about it. Returns `None` if there is no
    /// such thread, or if pjw neither sets nor restores the affinity masks of its process.
    pub(crate) fn thread_mut(&mut self, id: &ThreadId) -> Option<&mut MemberThread> {
        let pid = id.process.pid;
        let is_member = self.members.get(&pid).is_some_and(|member| member.id == id.process);
        let thread = if is_member {
            self.members.thread_mut(pid, id.tid)
        } else {
            let member = self.processes_to_restore.get_mut(&pid).filter(|member| member.id == id.process)?;
            member.threads.get_mut(&id.tid)
        };
        thread.filter(|thread| thread.start == id.start)
    }

    /// Returns the mask entry of the thread `id`, so that the caller can change the entry. `None` if the thread has no
    /// entry.
    pub(crate) fn mask_mut(&mut self, id: &ThreadId) -> Option<&mut MaskEntry> {
        self.thread_mut(id)?.mask_entry.as_mut()
    }

    /// Updates the records of forked processes (the field `lineage`) from the kernel's process events `events`, in the
    /// given order. Returns true if a fork event was dropped, because the number of records has reached
    /// [`MAX_FORK_RECORDS`](crate::state::lineage::MAX_FORK_RECORDS). The caller must then request a full scan.
    pub fn apply_process_events(&mut self, events: &[ProcessEvent]) -> bool {
        for event in events {
            if let ProcessEvent::Exec { pid } | ProcessEvent::Exit { pid } = *event {
                let changed = self.address_spaces.remove_process(pid);
                self.mark_jobs_dirty(&changed);
            }
        }
        self.unknown_masks.apply_events(events);
        let tracked = |pid| tracked_in(&self.members, &self.processes_to_restore, pid);
        self.lineage.apply_events(events, tracked, |pid| self.processes.contains_key(&pid))
    }

    /// Adds a leftover cpuset: a cpuset that a daemon of pjw wrote for a job and that existed when this daemon started.
    /// Has no effect if the journal (the file with which a restarted daemon restores its state) has a record of the
    /// cpuset.
    ///
    /// If there is no record, records were lost. So the next scan of all processes begins a search for masks of unknown
    /// origin (affinity masks that an earlier daemon may have set). After this scan, pjw keeps or removes the cpuset,
    /// as described at [`LeftoverCpuset`]. If another daemon wrote the cpuset ([`LeftoverCpuset::other_writer`]), no
    /// search begins, because this daemon never had a record of the cpuset.
    pub fn add_leftover_cpuset(&mut self, leftover: LeftoverCpuset) {
        if leftover.other_writer.is_none() && self.cpusets.cpuset_at(&leftover.path).is_none() {
            self.unknown_masks.request_search();
        }
        self.cpusets.add_leftover_cpuset(leftover);
    }

    /// Removes all records of forked processes. Must be called if process events were lost: a process in a record may
    /// have exited, and its pid may now be the pid of another process.
    pub fn forget_fork_records(&mut self) {
        self.lineage.forget_fork_records();
        self.unknown_masks.forget_fork_records();
    }

    /// Marks the jobs of the processes `pids`: the next decision of the daemon plans their masks and cpusets again.
    pub(crate) fn mark_jobs_dirty(&mut self, pids: &BTreeSet<Pid>) {
        let jobs: BTreeSet<&JobId> =
            pids.iter().filter_map(|pid| Some(&self.members.get(pid)?.job)).collect();
        jobs.into_iter().for_each(|job| self.dirty.add_job(job));
    }

    /// Whether pjw knows from fork events all ancestors of the process `pid`, which was born at the time `born` (in ns
    /// since boot).
    pub(crate) fn has_known_descent(&self, pid: Pid, born: Nanos) -> bool {
        let has_fork_event = self.fork_events_complete_since.is_some_and(|since| born >= since);
        has_fork_event && !self.lineage.forked_with_unknown_ancestor(pid)
    }

    /// Returns the process `pid` if it belongs to a job, or if pjw must restore its original masks (the masks before
    /// pjw changed them). Otherwise `None`.
    pub(crate) fn tracked_process(&self, pid: Pid) -> Option<&Member> {
        tracked_in(&self.members, &self.processes_to_restore, pid).map(|(process, _)| process)
    }

    /// Returns whether the process `member` is in the cpuset of its job. If the batch system chose the PUs (logical
    /// CPUs) of the job, this is the cpuset that the batch system made. Otherwise it is the cpuset that pjw made.
    #[must_use]
    pub fn is_in_job_cpuset(&self, member: &Member) -> bool {
        let cgroup = self.process(member.id.pid).and_then(|process| process.cgroup.as_deref());
        let Some(job) = self.jobs.get(&member.job) else { return false };
        if job.grant_chosen_by(GrantedBy::Scheduler).is_some() {
            let job_cgroup = job.cgroup.as_deref().unwrap_or_default();
            return cgroup.is_none_or(|cgroup| is_cgroup_within(cgroup, job_cgroup));
        }
        let job_cpuset = self.cpusets.cpuset_of(&member.job);
        cgroup
            .zip(job_cpuset)
            .is_some_and(|(cgroup, managed)| is_cgroup_within(cgroup, &managed.job_cpuset.path))
    }

    /// Returns whether `process` has left the provision `job` (a job whose cores are promised to a service). Also
    /// true for a child of a process that has left it. A process leaves a provision when the rule of the job no
    /// longer recognises the process. The process may still have the cpuset or a mask of the job, which does not make
    /// it a member again. False if `job` is not a provision.
    pub(crate) fn has_left_provision(&self, process: &Process, job: &JobId) -> bool {
        let is_provision = self.jobs.get(job).is_some_and(|job| job.provision.is_some());
        let is_released =
            |pid: Pid| self.processes_to_restore.get(&pid).is_some_and(|member| member.job == *job);
        let descendant = self.lineage.descendant(process.id.pid);
        let descends_from_released =
            descendant.is_some_and(|known| known.job == *job && !known.was_ancestor_member);
        let has_left = is_released(process.id.pid) || is_released(process.parent) || descends_from_released;
        is_provision && has_left
    }

    /// Returns the PUs (logical CPUs) of the nearest cpuset at or above the cgroup of the process `pid`, as the last
    /// scan read them. `None` if unknown.
    pub(crate) fn nearest_cpuset_cpus(&self, pid: Pid) -> Option<&CpuSet> {
        let cgroup = self.process(pid)?.cgroup.as_deref()?;
        cgroup_and_ancestor_paths(cgroup)
            .find_map(|path| Some(&self.cgroups.get(path)?.present()?.cpuset.as_ref()?.effective_cpus))
    }

    /// Removes all processes from the job `job`, and adds them to the processes whose original masks pjw must restore.
    pub(crate) fn move_to_restoring(&mut self, job: &JobId) {
        let removed = self.members.remove_all_of(job);
        self.processes_to_restore.extend(removed.into_iter().map(|member| (member.id.pid, member)));
    }

    /// Removes the process `pid` from the list of its user's processes that belong to no job.
    pub(crate) fn remove_unassigned(&mut self, pid: Pid) {
        let Some(user) = self.process(pid).map(|process| process.uid) else { return };
        for by_user in [&mut self.unassigned_pids_by_user, &mut self.login_pids_by_user] {
            if by_user.get_mut(&user).is_some_and(|pids| pids.remove(&pid)) {
                self.users_with_changed_strays.insert(user);
            }
        }
    }

    /// Removes the process `pid`, which has ended, from all lists of processes in this state. If it belonged to a job,
    /// the next decision plans the masks of the job's active processes again.
    pub(crate) fn remove_process(&mut self, pid: Pid) {
        self.remove_unassigned(pid);
        self.processes.remove(pid);
        if let Some(member) = self.members.get(&pid) {
            self.dirty.add_process(&member.job, pid);
        }
        for member in self.members.remove(pid).into_iter().chain(self.processes_to_restore.remove(&pid)) {
            self.cpusets.remove_process(member.id);
        }
    }

    /// Removes the process `pid`, which has ended according to a scan, from all lists of processes in this state. The
    /// fork events of its last children, and its exit event, may still be unread. So if pjw receives all process
    /// events, a record of the process is kept until its exit event: from this record, pjw knows what these children
    /// inherited.
    pub(crate) fn remove_ended_process(&mut self, pid: Pid) {
        self.lineage.scan_queue.forget_process(pid);
        if self.fork_events_complete_since.is_none() {
            self.lineage.remove_descendant(pid);
        } else if let Some((process, is_member)) = tracked_in(&self.members, &self.processes_to_restore, pid)
        {
            self.lineage.record_end(process, is_member);
        }
        self.remove_process(pid);
    }
}

/// Returns the process `pid` if it is a member of a job or if its mask is to be restored. Also returns whether it is a
/// member.
fn tracked_in<'a>(
    members: &'a Members,
    restoring: &'a BTreeMap<Pid, Member>,
    pid: Pid,
) -> Option<(&'a Member, bool)> {
    let member = members.get(&pid).map(|member| (member, true));
    member.or_else(|| Some((restoring.get(&pid)?, false)))
}
