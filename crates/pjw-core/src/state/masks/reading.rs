//! The limits of a thread's mask, and the entry of a thread that is read for the first time.

use smallvec::{SmallVec, smallvec};

use crate::basics::{
    BirthTime, CpuSet, Nanos, Pid, Tid, cgroup_and_ancestor_paths, is_cgroup_within, prelude::*,
};
use crate::state::lineage::Descendant;
use crate::state::masks::entry::{MaskComparison, MaskEntry};
use crate::state::masks::request::{MaskLimits, effective_mask};
use crate::state::masks::request::{MaskRequest, MaskWriter};
use crate::state::members::{Member, MemberThread};
use crate::state::{masks::old_kernels::hotplug_window_start, warden::WardenState};
use crate::terms::{MembershipEvidence, Observed};

/// Sets of PUs, nearly always one.
type CpusetList<'a> = SmallVec<[&'a CpuSet; 2]>;

impl WardenState {
    /// Returns the PUs (logical CPUs) to which the kernel has limited the affinity masks of the process `pid`. These
    /// are the PUs that are online and in the cpuset of the process. The result has all such sets since the time
    /// `read_at` (in ns since boot). `persists` is false for kernels before Linux 6.2, which do not keep the
    /// requested mask when these PUs change.
    pub(crate) fn mask_limits(&self, pid: Pid, read_at: Nanos, persists: bool) -> MaskLimits {
        let known = self.processes.get(&pid);
        let moved =
            known.and_then(|known| known.last_cgroup_change.as_ref()).filter(|(_, at)| *at >= read_at);
        let present_cgroup = known.and_then(|known| known.process.cgroup.as_deref()).unwrap_or_default();
        // An earlier daemon may have moved the process back out of this cpuset.
        let unread = known.filter(|_| read_at == Nanos(0));
        let left_cgroup = unread.and_then(|known| self.cpusets.last_move_destination(known.process.id));
        // A delayed change may have moved the process there by now.
        let delayed = &self.cpusets.delayed_changes;
        let move_destinations =
            known.into_iter().flat_map(|known| delayed.move_destinations_of(known.process.id));
        let is_moving = known.is_some_and(|known| delayed.is_moving(known.process.id));
        let cgroups = core::iter::once(present_cgroup)
            .chain(moved.map(|(from, _)| &**from))
            .chain(left_cgroup)
            .chain(move_destinations);
        let mut cpusets = CpusetList::new();
        let mut may_have_changed = moved.is_some() || is_moving;
        for cgroup in cgroups {
            let (nearest_cpusets, has_changed) = self.cpusets_around(cgroup, read_at);
            cpusets.extend(nearest_cpusets);
            may_have_changed |= has_changed;
        }
        let mut possible_cpus: SmallVec<[CpuSet; 1]> = SmallVec::new();
        let online_parts = |online| cpusets.iter().map(move |cpuset| effective_mask(cpuset, online));
        for possible in self.online.values_since(read_at).flat_map(online_parts) {
            if !possible_cpus.contains(&possible) {
                possible_cpus.push(possible);
            }
        }
        may_have_changed |= self.online.has_changed_since(hotplug_window_start(read_at));
        let kernel_may_have_reset_mask = !persists && may_have_changed;
        let machine_cpus = self.topology.cpus().clone();
        MaskLimits { possible_cpus, machine_cpus, may_have_changed, kernel_may_have_reset_mask }
    }

    /// Returns the PUs (logical CPUs) to which the kernel has limited the affinity masks of the new process `pid`.
    /// These are the PUs that are online and in its cpuset. The result has all such sets since the birth of the
    /// process.
    ///
    /// - `descendant` is the record of the fork, if the process descends from a process of a job.
    /// - `at` is the time of the birth, in ns since boot.
    /// - `persists` is false for kernels before Linux 6.2. Such a kernel may have replaced the mask of the ancestor
    ///   before the fork. The result then says so ([`MaskLimits::kernel_may_have_reset_mask`]).
    pub(crate) fn birth_limits(
        &self,
        pid: Pid,
        descendant: Option<&Descendant>,
        at: Nanos,
        persists: bool,
    ) -> MaskLimits {
        let mut limits = self.mask_limits(pid, at, persists);
        if let Some(Descendant { ancestor, ancestor_masks_read_at, .. }) = descendant {
            let ancestor_limits = self.mask_limits(*ancestor, *ancestor_masks_read_at, persists);
            limits.kernel_may_have_reset_mask |= ancestor_limits.kernel_may_have_reset_mask;
        }
        limits
    }

    /// Returns the last time, in ns since boot, at which the PUs (logical CPUs) that limit the affinity masks of the
    /// process `pid` changed: PUs went online or offline, pjw wrote the cpuset of the process, or the process was moved
    /// to another cgroup. `None` if there was no such change.
    pub(crate) fn limits_changed_at(&self, pid: Pid) -> Option<Nanos> {
        let known = self.processes.get(&pid)?;
        let moved_at = known.last_cgroup_change.as_ref().map(|&(_, at)| at);
        let cgroup = known.process.cgroup.as_deref().unwrap_or_default();
        let written =
            cgroup_and_ancestor_paths(cgroup).filter_map(|path| self.cpusets.cpu_history(path)?.changed_at());
        written.chain(moved_at).chain(self.online.changed_at()).max()
    }

    /// Returns the PUs that the nearest cpuset at or above the cgroup `cgroup` allowed. The result has all such sets
    /// since the time `read_at` (in ns since boot). Also returns whether pjw changed the cpuset since then. If no
    /// cpuset is known, returns all PUs of the machine.
    fn cpusets_around(&self, cgroup: &str, read_at: Nanos) -> (CpusetList<'_>, bool) {
        for path in cgroup_and_ancestor_paths(cgroup) {
            let written = self.cpusets.cpu_history(path);
            let read = self.cgroups.get(path).and_then(Observed::present);
            let read_files = read.and_then(|cgroup| cgroup.cpuset.as_ref());
            let read_cpus = read_files.into_iter().flat_map(|files| [&files.effective_cpus, &files.cpus]);
            let read_cpus = read_cpus.chain(read.and_then(|cgroup| cgroup.restricted_cpus.as_ref()));
            let read_cpus = read_cpus.filter(|cpus| !cpus.is_empty());
            let known = written.into_iter().flat_map(|written| written.values_since(read_at));
            let cpusets: CpusetList<'_> = known.chain(read_cpus).collect();
            if !cpusets.is_empty() {
                return (cpusets, written.is_some_and(|written| written.has_changed_since(read_at)));
            }
        }
        (smallvec![self.topology.cpus()], false)
    }

    /// Whether the process may be in the cgroup that the batch system made for the job, and no scan has read this
    /// cgroup. The masks of the process can then not be interpreted.
    fn is_cpuset_unread(&self, member: &Member) -> bool {
        let job_cgroup = self.jobs.get(&member.job).and_then(|job| job.cgroup.as_deref());
        let own_cgroup = self.process(member.id.pid).and_then(|process| process.cgroup.as_deref());
        job_cgroup.is_some_and(|path| {
            !self.cgroups.contains_key(path) && own_cgroup.is_none_or(|own| is_cgroup_within(own, path))
        })
    }

    /// Makes the first mask entry of the thread `tid` of the process `member`. The entry has the requests
    /// (sched_setaffinity(2)) that may have set the present mask, and the mask that pjw restores later.
    ///
    /// - `ended` has the threads of the process that have ended since the last scan. One of them may have created the
    ///   thread.
    /// - `persists` is false for kernels before Linux 6.2, which do not keep requested masks.
    /// - `now` is the time of the scan, in ns since boot.
    ///
    /// Returns `None` if no scan has read the cpuset of the thread yet.
    pub(crate) fn first_mask_entry(
        &self,
        member: &Member,
        (tid, thread): (Tid, &MemberThread),
        ended: &[MemberThread],
        persists: bool,
        now: Nanos,
    ) -> Option<MaskEntry> {
        if self.is_cpuset_unread(member) {
            return None;
        }
        let (seen, pid) = (&thread.effective_mask, member.id.pid);
        let is_first = tid.0 == pid.0;
        let first_seen = member.first_seen.or_else(|| Some(self.processes.get(&pid)?.first_seen));
        let birth = BirthTime::from_start_time(thread.start, first_seen);
        let descendant = self.lineage.descendant(pid).filter(|_| is_first);
        let birth_limits = || self.birth_limits(pid, descendant, birth.earliest.min(now), persists);
        let inherit = |requests: Vec<MaskRequest>| {
            let mut entry = MaskEntry::from_inherited(requests, birth)?;
            let reading = entry.record_reading(seen, &birth_limits(), now);
            // The journal does not contain the mask of a program.
            if !entry.needs_restore() {
                entry.mark_not_journaled();
            }
            Some((entry, reading))
        };
        if let Some((entry, _)) =
            descendant.and_then(|descendant| inherit(descendant.inherited_mask_requests.clone()))
        {
            return Some(entry);
        }
        let predicted = |requests| {
            let (entry, reading) = inherit(requests)?;
            (reading == MaskComparison::Predicted).then_some(entry)
        };
        // A thread may be younger than the scan that first found its process.
        let thread_birth = BirthTime::from_start_time(thread.start, Some(now));
        let ended_entries = ended.iter().filter_map(|thread| thread.mask_entry.as_ref());
        let own = ended_entries
            .flat_map(|entry| entry.requests_for_child_born_at(thread_birth))
            .chain(member.requests_at_birth(thread_birth));
        // The limits before this reading are irrelevant for a request that was not inherited.
        let limits = || self.mask_limits(pid, now, persists);
        // The journal has the request of a program, without its time, if a cpuset hides the request. A thread of the
        // same process without such a record had every PU when an earlier daemon read the thread. This does not apply
        // to a thread that was born after the end of that daemon.
        let is_old = self.first_scan_at.is_none_or(|first| thread_birth.earliest <= first);
        let had_every_pu = is_old && !member.was_new_at_join && limits().is_unrestricted(seen);
        let own = own.filter(|request| !(had_every_pu && request.is_of_program_before_first_reading()));
        let own = if is_first { Vec::new() } else { own.cloned().collect() };
        // A later thread has its mask from a thread of its process. The process inherited masks from its parent only
        // when the process itself was born.
        let process_birth = BirthTime::from_start_time(member.id.start, first_seen);
        let from_parent = || predicted(self.parents_requests(member, process_birth));
        if let Some(entry) = predicted(own).or_else(from_parent) {
            return Some(entry);
        }
        let limits = limits();
        let of_job = (!limits.is_unrestricted(seen)).then(|| {
            let birth_limits = birth_limits();
            let shows_mask = |request: &MaskRequest| birth_limits.may_result_in(&request.mask, seen);
            self.requests_of_job(member, is_first, birth, shows_mask)
        });
        let inherited = of_job.and_then(predicted);
        Some(inherited.unwrap_or_else(|| MaskEntry::from_first_reading(seen, &limits, now)))
    }

    /// Returns the mask requests from one of which the process `member` inherited its mask. If a fork event has told
    /// these requests, returns them. Otherwise, returns the requests for the threads of the parent that were in force
    /// in the interval `birth`, in which the process began. Leaves out requests of the program that are older than
    /// the first reading of the parent, because the child may be even older. Empty if pjw neither sets nor restores
    /// the masks of the parent.
    fn parents_requests(&self, member: &Member, birth: BirthTime) -> Vec<MaskRequest> {
        let known =
            self.lineage.descendant(member.id.pid).filter(|known| !known.inherited_mask_requests.is_empty());
        if let Some(known) = known {
            return known.inherited_mask_requests.clone();
        }
        let parent = self.process(member.id.pid).and_then(|process| self.tracked_process(process.parent));
        let parent = parent.filter(|parent| parent.id.start <= member.id.start);
        let requests = parent.into_iter().flat_map(|parent| parent.requests_at_birth(birth));
        requests.filter(|request| !request.is_of_program_before_first_reading()).cloned().collect()
    }

    /// Returns the mask requests that a thread of `member` may have inherited from another process of the same job.
    /// Used if no fork event named the creator of the thread. `birth` is the interval in which the thread began.
    /// `shows_mask` is whether a request may have resulted in the mask of the thread. The result has:
    ///
    /// - the grant of the job (the PUs that the job holds), if the job had it then,
    /// - for the first thread of the process (`is_first`): a request of a released job that explains the mask,
    /// - the requests of pjw and of the kernel that were in force for threads of the other processes.
    ///
    /// The result is empty in each of these cases:
    ///
    /// - The process was not new when it joined the job: a release of another job may have given it such a mask.
    /// - `is_first` is true and the process was registered by a command: it may have had such a mask before.
    /// - `is_first` is true and fork events have told from which process it descends. Except if this process was unread
    ///   at the fork, and is still unread or had a request of pjw or the kernel that shows the mask.
    fn requests_of_job(
        &self,
        member: &Member,
        is_first: bool,
        birth: BirthTime,
        shows_mask: impl Fn(&MaskRequest) -> bool,
    ) -> Vec<MaskRequest> {
        // A child of a process whose masks were unread at the fork has a known descent, but no known requests. It has
        // no mask of pjw nevertheless if no mask of pjw of that process shows the mask. pjw may have written other
        // masks for that process meanwhile: a process that it confines is read before its child.
        let has_known_requests = |descendant: &Descendant| {
            !descendant.inherited_mask_requests.is_empty()
                || self.shows_only_own_requests(descendant.ancestor, &shows_mask)
        };
        let has_known_descent = self.has_known_descent(member.id.pid, birth.earliest)
            && self.lineage.descendant(member.id.pid).is_none_or(has_known_requests);
        let is_known = is_first && (has_known_descent || member.evidence == MembershipEvidence::Registered);
        if is_known || !member.was_new_at_join {
            return Vec::new();
        }
        let others = self.tracked_processes_of(&member.job).filter(|other| other.id != member.id);
        let of_others = others.flat_map(|other| other.requests_at_birth(birth)).cloned();
        let of_others = of_others.filter(|request| request.writer != MaskWriter::Program);
        // An earlier job may have had the same id or the same process. But no other job had a process that is in the
        // cgroup of a scheduler's job.
        let job = (member.evidence == MembershipEvidence::Cgroup).then_some(&member.job);
        let process = self.process(member.id.pid).filter(|_| is_first);
        let of_released = process.and_then(|process| Some(self.inherited_from_released_job(process, job)?.1));
        let mut requests: Vec<MaskRequest> = of_released.into_iter().chain(of_others).collect();
        if let Some(grant) = self.grant_of(&member.job).filter(|grant| !birth.is_before(grant.granted_at)) {
            let request = MaskRequest {
                mask: grant.cpus.clone(),
                original_mask: self.topology.cpus().clone(),
                writer: MaskWriter::Warden,
                requested_at: grant.granted_at,
            };
            requests.insert(0, request);
        }
        requests
    }

    /// Whether all masks of the tracked process `pid` were read, and only requests of its program show the mask of a
    /// child. `shows_mask` is whether a request may have resulted in the mask of the child.
    fn shows_only_own_requests(&self, pid: Pid, shows_mask: impl Fn(&MaskRequest) -> bool) -> bool {
        let is_own = |request: &MaskRequest| request.writer == MaskWriter::Program || !shows_mask(request);
        let has_only_own = |thread: &MemberThread| {
            let mut requests = thread.mask_entry.iter().flat_map(MaskEntry::known_requests).peekable();
            requests.peek().is_some() && requests.all(is_own)
        };
        let threads = self.tracked_process(pid).map(|member| &member.threads);
        threads.is_some_and(|threads| !threads.is_empty() && threads.values().all(has_only_own))
    }
}
