//! Masks that an earlier daemon may have set, and that no record explains. They are kept, and named in a warning with
//! the command that widens them: the program itself may have chosen such a mask.

mod warning;

use alloc::sync::Arc;

pub(super) use self::warning::pids_text;
use self::warning::unknown_masks_warning;
use crate::basics::{CpuSet, Pid, ProcessId, Uid, cgroup_and_ancestor_paths, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::membership::is_orphan_of_unknown_descent;
use crate::state::{KnownProcess, MaskEntry, MaskWriter, Member, WardenState};
use crate::terms::{
    GrantedBy, JobId, Observed, Policy, Process, Record, UnknownMaskRecord, UnknownOriginMasks,
};

/// Begins a search for affinity masks of unknown origin: masks that an earlier daemon may have set, and that no journal
/// record explains. Does nothing unless a search was requested and the scan is full. Must be called before the jobs of
/// processes are determined, because until then the state contains only the members that the journal names. After a
/// restart, must also be called before cores are granted.
pub(crate) fn begin_unknown_mask_search(draft: &mut CycleDraft<'_>) {
    if draft.state.unknown_masks.is_list_changed() {
        avoid_cpus_of_unknown_masks(draft.state);
    }
    if draft.full {
        let WardenState { unknown_masks, members, processes_to_restore, .. } = &mut *draft.state;
        let begun = unknown_masks.begin_search(|| {
            members.values().chain(processes_to_restore.values()).map(|member| member.id).collect()
        });
        draft.out.records.extend(begun.map(Record::UnknownMasks));
    }
}

/// Finds processes whose affinity masks may have been set by an earlier daemon, and adds a warning about these
/// processes as long as they have these masks.
pub(crate) fn report_unknown_masks(draft: &mut CycleDraft<'_>) {
    continue_search(draft);
    record_masks_of_descendants(draft);
    record_masks_of_root_orphans(draft);
    record_hidden_masks(draft);
    update_recorded_masks(draft);
    let is_changed = draft.state.unknown_masks.take_list_change();
    // A process that joins or leaves a job has a record.
    if is_changed || draft.full || !draft.out.records.is_empty() {
        avoid_cpus_of_unknown_masks(draft.state);
    }
    if is_changed {
        let pids: Vec<Pid> = draft.state.unknown_masks.processes().map(|process| process.pid).collect();
        draft.state.unknown_masks.warning = unknown_masks_warning(draft.state, &pids);
    }
    draft.out.warnings.extend(draft.state.unknown_masks.warning.clone().map(Arc::new));
}

/// Applies `record` to the list of affinity masks of unknown origin in the state, and adds `record` to the records for
/// the journal (pjwd's files).
pub(super) fn apply_and_journal(draft: &mut CycleDraft<'_>, record: UnknownMaskRecord) {
    draft.state.unknown_masks.apply_record(record.clone());
    draft.out.records.push(Record::UnknownMasks(record));
}

/// Adds `masks` to the recorded masks of the process `pid`: the affinity masks of unknown origin, which an earlier run
/// of pjwd may have set and which no journal record explains. A new mask of the first thread replaces the recorded one.
/// Does nothing if the record would stay the same, or if the state has no process with this pid.
fn record_unknown_origin_masks(draft: &mut CycleDraft<'_>, pid: Pid, mut masks: UnknownOriginMasks) {
    let Some(process) = draft.state.process(pid).map(|known| known.id) else { return };
    if let Some((known, noted)) = draft.state.unknown_masks.mask_of(pid)
        && known == process
    {
        masks.first_thread = masks.first_thread.or_else(|| noted.first_thread.clone());
        masks.other_threads.extend(noted.other_threads.iter().cloned());
        if masks == *noted {
            return;
        }
    }
    if !masks.is_empty() {
        apply_and_journal(draft, UnknownMaskRecord::Found { process, mask: masks });
    }
}

/// Continues the search for masks of unknown origin: masks that an earlier run of pjwd may have set, and that no
/// journal record explains. The search takes several scans:
///
/// - After the full scan that begins the search, chooses the processes whose masks must be read.
/// - The next scans read the threads of these processes and the cpusets around them. After each scan, records the masks
///   that no cpuset and no journal record explains.
/// - When all these processes are read, checks the processes that were born meanwhile, and ends the search.
///
/// Processes that several full scans could not read are no longer waited for: only the masks of their first threads are
/// recorded. Does nothing if no search is in progress.
fn continue_search(draft: &mut CycleDraft<'_>) {
    if draft.full && draft.state.unknown_masks.needs_processes_to_read() {
        let known = draft.state.processes.values();
        let chosen = known.filter(|known| must_be_read(draft.state, draft.policy, known));
        let chosen = chosen.map(|known| known.process.id.pid).collect();
        draft.state.unknown_masks.set_processes_to_read(chosen, draft.now.since_boot);
    }
    let unread = draft.state.unknown_masks.unread_pids();
    let read: Vec<(Pid, UnknownOriginMasks)> =
        unread.filter_map(|pid| Some((pid, find_unknown_origin_masks(draft, pid)?))).collect();
    for (pid, masks) in read {
        draft.state.unknown_masks.record_masks_read(pid);
        record_unknown_origin_masks(draft, pid, masks);
    }
    if draft.full {
        let unreadable = draft.state.unknown_masks.count_full_scan();
        unreadable.into_iter().for_each(|pid| record_first_thread_mask(draft, pid));
    }
    let Some(ended) = draft.state.unknown_masks.end_search_if_complete() else { return };
    ended.children.into_iter().for_each(|pid| record_inherited_masks(draft, pid, true));
    // Fork events may have been lost. Parents first, because a process is found by its parent.
    let known = draft.state.processes.values();
    let born_later = known.filter(|known| known.first_seen > ended.chosen_at).map(|known| known.process.id);
    let mut born_later: Vec<ProcessId> = born_later.collect();
    born_later.sort_by_key(|process| (process.start, process.pid));
    born_later.into_iter().for_each(|process| record_inherited_masks(draft, process.pid, true));
    apply_and_journal(draft, UnknownMaskRecord::Searched);
    // The search may have read cgroups of other processes than those of jobs.
    let of_jobs = draft.state.job_cgroup_paths();
    draft.state.cgroups.retain(|path, _| of_jobs.contains(path));
}

/// Records the mask of the first thread of the process `pid` as a mask of unknown origin: an earlier run of pjwd may
/// have set it. The other threads of the process can't be read. Does nothing in each of these cases:
///
/// - The mask has all online PUs.
/// - The process belongs to a job or to a released job.
fn record_first_thread_mask(draft: &mut CycleDraft<'_>, pid: Pid) {
    let online = draft.state.pool.online_cpus();
    let process = draft.state.process(pid).filter(|_| draft.state.tracked_process(pid).is_none());
    let mask = process.and_then(|process| process.first_thread_mask.clone());
    let first_thread = mask.filter(|mask| !online.is_subset(mask));
    let masks = UnknownOriginMasks { first_thread, other_threads: BTreeSet::new() };
    record_unknown_origin_masks(draft, pid, masks);
}

/// Returns whether the search for masks that an earlier run of pjwd may have set must read the threads of the process
/// `known`.
///
/// - True for a process of a job or of a released job, if the journal had no record of this membership.
/// - True for any other process if the mask of its first thread lacks an online PU. Its other threads do not count,
///   because programs bind their threads themselves.
/// - False for process 1, and for processes of the kernel, of pjwd, and of users that this pjwd does not manage.
fn must_be_read(state: &WardenState, policy: &Policy, known: &KnownProcess) -> bool {
    let process = &known.process;
    let pid = process.id.pid;
    let is_served = policy.only_managed_user.is_none_or(|user| user == process.uid);
    let is_system = process.is_kernel_thread || pid == Pid(1) || policy.is_daemon_process(pid);
    if is_system || !is_served {
        return false;
    }
    if let Some(member) = state.tracked_process(pid) {
        return !state.unknown_masks.is_recorded(member.id);
    }
    let online = state.pool.online_cpus();
    process.first_thread_mask.as_ref().is_some_and(|mask| !online.is_subset(mask))
}

/// Returns the masks of the process `pid` that no journal record explains: an earlier run of pjwd may have set them.
/// Empty if there are none, if the process is unknown, or if a cpuset of its batch system restricts it. `None` if its
/// threads have not been read yet.
fn find_unknown_origin_masks(draft: &CycleDraft<'_>, pid: Pid) -> Option<UnknownOriginMasks> {
    let state = &*draft.state;
    let Some(known) = state.processes.get(&pid) else { return Some(UnknownOriginMasks::default()) };
    let online = state.pool.online_cpus();
    let possible = cpus_around(state, known).map_or(online.clone(), |cpus| cpus.intersection(&online));
    // The scheduler binds its tasks inside the cpusets that it makes. pjw changes no mask there.
    let is_bound_by_scheduler = known.batch_identity.job_of_cgroup().is_some() && possible != online;
    if let Some(member) = state.tracked_process(pid) {
        if has_unread_threads(member) {
            return None;
        }
        let unknown_original = |entry: &MaskEntry| {
            let original = entry.original_mask();
            let is_unknown =
                has_unknown_original(&online, entry) && !is_recorded_original(state, member, original);
            is_unknown.then(|| original.clone())
        };
        return Some(if is_bound_by_scheduler {
            UnknownOriginMasks::default()
        } else {
            collect_masks(member, unknown_original)
        });
    }
    let process = draft.seen.processes.get(&pid)?.present()?;
    let threads = process.threads.as_ref()?;
    let is_bound = |mask: &&CpuSet| !is_bound_by_scheduler && !possible.is_subset(mask);
    let first_thread = process.first_thread_mask.as_ref().filter(is_bound).cloned();
    let others = threads.iter().filter(|thread| thread.tid.0 != pid.0).map(|thread| &thread.effective_mask);
    let other_threads = others.filter(is_bound).filter(|_| first_thread.is_some()).cloned().collect();
    Some(UnknownOriginMasks { first_thread, other_threads })
}

/// Returns the PUs that the nearest cpuset at or above the cgroup of a process allows. `None` if no cpuset was read.
fn cpus_around<'a>(state: &'a WardenState, known: &KnownProcess) -> Option<&'a CpuSet> {
    cgroup_and_ancestor_paths(known.process.cgroup.as_deref()?).find_map(|path| {
        let cgroup = state.cgroups.get(path)?.present()?;
        let cpuset = cgroup.cpuset.as_ref().map(|cpuset| &cpuset.effective_cpus);
        cpuset.or(cgroup.restricted_cpus.as_ref()).filter(|cpus| !cpus.is_empty())
    })
}

/// Whether no record explains the original mask of a thread: the mask that a release of its job puts back. The mask
/// must lack an online PU. One of these conditions must hold too:
///
/// - The first reading of the thread found the mask: the program requested it before.
/// - `entry` has no request of the program, for example after a restart.
fn has_unknown_original(online: &CpuSet, entry: &MaskEntry) -> bool {
    let original = entry.original_mask();
    let has_program_request = entry.known_requests().any(|request| request.writer == MaskWriter::Program);
    let mut unread = entry.known_requests().filter(|request| request.is_of_program_before_first_reading());
    !online.is_subset(original) && (!has_program_request || unread.any(|request| request.mask == *original))
}

/// Whether the mask `original` is explained by the journal: another process of the same job, which the journal names,
/// has the same original mask (the mask before pjw changed it). `member` may be a child of that process, and has
/// inherited the mask.
fn is_recorded_original(state: &WardenState, member: &Member, original: &CpuSet) -> bool {
    let recorded = state.members_of(&member.job).filter(|other| state.unknown_masks.is_recorded(other.id));
    recorded
        .flat_map(|other| other.threads.values())
        .filter_map(|thread| thread.mask_entry.as_ref())
        .any(|entry| entry.original_mask() == original)
}

/// Whether two masks are the same as far as a scan can tell: sched_getaffinity(2) leaves out offline PUs.
fn are_same(online: &CpuSet, one: &CpuSet, other: &CpuSet) -> bool {
    let common = one.intersection(online);
    one == other || (!common.is_empty() && common == other.intersection(online))
}

/// Returns whether the masks of some threads of the process are unknown, because no scan has read these threads.
fn has_unread_threads(member: &Member) -> bool {
    member.threads.is_empty() || member.living_threads().any(|(_, thread)| thread.mask_entry.is_none())
}

/// Returns the masks that `mask_of` returns for the threads of `member`: that of the first thread, and those of the
/// others. Leaves out the threads for which `mask_of` returns `None`, and the threads without a mask entry.
fn collect_masks(member: &Member, mask_of: impl Fn(&MaskEntry) -> Option<CpuSet>) -> UnknownOriginMasks {
    let mut masks = UnknownOriginMasks::default();
    for (thread, known) in member.living_threads() {
        let Some(mask) = known.mask_entry.as_ref().and_then(&mask_of) else { continue };
        if thread.is_first_thread() {
            masks.first_thread = Some(mask);
        } else {
            masks.other_threads.insert(mask);
        }
    }
    masks
}

/// Records the masks that the scanned processes may have inherited from processes with masks of unknown origin (masks
/// that an earlier run of pjwd may have set).
fn record_masks_of_descendants(draft: &mut CycleDraft<'_>) {
    if draft.state.unknown_masks.has_nothing_to_find() {
        return;
    }
    let scanned: Vec<Pid> = draft.scanned_pids().collect();
    scanned.into_iter().for_each(|pid| record_inherited_masks(draft, pid, false));
}

/// Records the masks of unknown origin (masks that an earlier run of pjwd may have set) that the process `pid` may have
/// inherited: its masks that equal such a mask of its ancestor. Does nothing in each of these cases:
///
/// - Such masks of the process are recorded already.
/// - The process belongs to no job and was not released from one, and an earlier scan has read it: it may have
///   requested the mask itself. But if `was_searched` is true, its mask is recorded: a completed search has found its
///   parent only now.
fn record_inherited_masks(draft: &mut CycleDraft<'_>, pid: Pid, was_searched: bool) {
    let state = &*draft.state;
    let Some(known) = state.processes.get(&pid) else { return };
    let process = &known.process;
    if state.unknown_masks.mask_of(pid).is_some_and(|(found, _)| found == process.id) {
        return;
    }
    let is_older = |parent: &Process| parent.id.start <= process.id.start;
    let by_parent = || {
        let parent = state.process(process.parent).filter(|parent| is_older(parent))?;
        state.unknown_masks.masks_for_child(parent.id.pid)
    };
    let ancestor_masks = state.unknown_masks.masks_inherited_by(pid).or_else(by_parent);
    let online = state.pool.online_cpus();
    // The mask of the ancestor is kept: a scan leaves out the offline PUs of the mask of the child.
    let of_ancestor = |mask: &CpuSet| {
        let mut ancestor_masks = ancestor_masks.as_deref().into_iter().flatten();
        ancestor_masks.find(|other| are_same(&online, other, mask)).cloned()
    };
    let masks = if let Some(member) = state.tracked_process(pid) {
        collect_masks(member, |entry| of_ancestor(entry.original_mask()))
    } else if known.was_read_once || was_searched {
        let mask = process.first_thread_mask.as_ref();
        let first_thread = if ancestor_masks.is_some() {
            mask.and_then(of_ancestor)
        } else {
            mask.and_then(|mask| mask_of_orphan(state, known, mask))
        };
        UnknownOriginMasks { first_thread, other_threads: BTreeSet::new() }
    } else {
        return;
    };
    record_unknown_origin_masks(draft, pid, masks);
}

/// Returns the recorded mask of unknown origin (a mask that an earlier run of pjwd may have set) that the process
/// `known` may have inherited as its mask `mask`. It is an equal mask of an older process of the same user. `None` if
/// there is no such mask, or if `known` is no orphan whose true parent is unknown ([`is_orphan_of_unknown_descent`]).
fn mask_of_orphan(state: &WardenState, known: &KnownProcess, mask: &CpuSet) -> Option<CpuSet> {
    if !is_orphan_of_unknown_descent(state, known) {
        return None;
    }
    let (online, orphan) = (state.pool.online_cpus(), &known.process);
    let may_be_ancestor = |other: &ProcessId| {
        let other = state.process(other.pid);
        other.is_some_and(|other| other.uid == orphan.uid && other.id.start <= orphan.id.start)
    };
    let found = state.unknown_masks.masks_by_process().iter().filter(|(process, _)| may_be_ancestor(process));
    found.flat_map(|(_, found)| found.masks()).find(|found| are_same(&online, found, mask)).cloned()
}

/// Records the masks of new orphans of root that an earlier run of pjwd, or this one, may have set: the orphans may
/// have inherited them from a job of root ([`may_have_mask_of_root_job`]).
fn record_masks_of_root_orphans(draft: &mut CycleDraft<'_>) {
    let scanned = draft.scanned_pids().filter_map(|pid| draft.state.processes.get(&pid));
    let orphans = scanned.filter(|known| may_have_mask_of_root_job(draft.state, known));
    let orphans: Vec<(Pid, Option<CpuSet>)> =
        orphans.map(|known| (known.process.id.pid, known.process.first_thread_mask.clone())).collect();
    for (pid, first_thread) in orphans {
        let masks = UnknownOriginMasks { first_thread, other_threads: BTreeSet::new() };
        record_unknown_origin_masks(draft, pid, masks);
    }
}

/// Records masks of unknown origin that were hidden by a cpuset. pjw found this cpuset without a journal record. The
/// earlier run of pjwd that made the cpuset may also have set affinity masks with exactly the PUs of the cpuset. Inside
/// the cpuset, a thread with such a mask looks like a thread without a mask of its own. pjw can see the mask after the
/// process has left the cpuset and pjw has restored its masks. If a thread of the process then has exactly the PUs of
/// the cpuset as its mask, apart from offline PUs, the function records this mask.
///
/// Also writes [`UnknownMaskRecord::CpusetLeft`] to the journal if the cpuset can hide no more masks: its job has
/// ended, and pjw is not restoring masks of a process of the job.
fn record_hidden_masks(draft: &mut CycleDraft<'_>) {
    let state = &mut *draft.state;
    if state.unknown_masks.found_cpusets().is_empty()
        && state.unknown_masks.released_processes_mut().is_empty()
    {
        return;
    }
    let cpusets = state.unknown_masks.found_cpusets().clone();
    let WardenState { unknown_masks, processes_to_restore, .. } = state;
    let restoring =
        processes_to_restore.values().filter_map(|member| Some((member, cpusets.get(&member.job)?)));
    unknown_masks.released_processes_mut().extend(restoring.map(|(member, cpus)| (member.id, cpus.clone())));
    let released = core::mem::take(unknown_masks.released_processes_mut());
    for (process, cpus) in released {
        if draft.state.tracked_process(process.pid).is_some_and(|member| member.id == process) {
            draft.state.unknown_masks.released_processes_mut().insert(process, cpus);
            continue;
        }
        let Some(known) = draft.state.process(process.pid).filter(|known| known.id == process) else {
            continue;
        };
        let online = draft.state.pool.online_cpus();
        let is_hidden = |mask: &&CpuSet| are_same(&online, mask, &cpus);
        // The PUs of the cpuset: a scan leaves out the offline PUs of the mask.
        let first_thread = known.first_thread_mask.as_ref().filter(is_hidden).map(|_| cpus.clone());
        let read = draft.seen.processes.get(&process.pid).and_then(Observed::present);
        let threads = read.and_then(|read| read.threads.as_ref()).into_iter().flatten();
        let mut others = threads.filter(|thread| thread.tid.0 != process.pid.0);
        let is_one_hidden = others.any(|thread| is_hidden(&&thread.effective_mask));
        let other_threads = is_one_hidden.then(|| cpus.clone()).into_iter().collect();
        record_unknown_origin_masks(draft, process.pid, UnknownOriginMasks { first_thread, other_threads });
    }
    let state = &*draft.state;
    let is_left = |job: &&JobId| {
        let mut restoring = state.processes_to_restore.values();
        !state.jobs.contains_key(job) && !restoring.any(|member| member.job == **job)
    };
    let left: Vec<JobId> = cpusets.keys().filter(is_left).cloned().collect();
    left.into_iter().for_each(|job| apply_and_journal(draft, UnknownMaskRecord::CpusetLeft { job }));
}

/// Removes recorded masks of unknown origin (masks that an earlier run of pjwd may have set) that are not valid any
/// more: the mask was changed, or the process has ended. Visits only the processes that the scan covers. Writes the
/// changes to the journal.
fn update_recorded_masks(draft: &mut CycleDraft<'_>) {
    let found = draft.state.unknown_masks.masks_by_process().iter();
    let found = found.filter(|(process, _)| draft.full || draft.seen.processes.contains_key(&process.pid));
    let changed: Vec<(ProcessId, UnknownOriginMasks)> = found
        .filter_map(|(&process, recorded)| {
            let kept = kept_masks(draft, process, recorded);
            (kept != *recorded).then_some((process, kept))
        })
        .collect();
    for (process, mask) in changed {
        let record = if mask.is_empty() {
            UnknownMaskRecord::Settled { process }
        } else {
            UnknownMaskRecord::Found { process, mask }
        };
        apply_and_journal(draft, record);
    }
}

/// Makes the allocator choose the PUs of recorded masks of unknown origin last, if the process with the mask belongs to
/// no job. Nothing keeps such a process off the cores of a job.
fn avoid_cpus_of_unknown_masks(state: &mut WardenState) {
    let found = state.unknown_masks.masks_by_process().iter();
    let untracked = found.filter(|(process, _)| state.tracked_process(process.pid).is_none());
    let masks = untracked.flat_map(|(_, recorded)| recorded.masks());
    let cpus = masks.fold(CpuSet::new(), |all, mask| all.union(mask));
    state.pool.set_avoided(cpus);
}

/// Returns the masks in `recorded` that are still valid. `recorded` has the masks of unknown origin of the process
/// `process`: masks that an earlier run of pjwd may have set.
///
/// - If the process belongs to a job, a mask is valid if pjw would restore it for a thread when it releases the job.
/// - Otherwise, a mask is valid if a thread of the process still has it.
/// - If the scan did not read the threads that may have the mask, it counts as valid.
/// - If the process has ended, no mask is valid.
fn kept_masks(
    draft: &CycleDraft<'_>,
    process: ProcessId,
    recorded: &UnknownOriginMasks,
) -> UnknownOriginMasks {
    let state = &*draft.state;
    let Some(known) = state.process(process.pid) else {
        return if draft.full { UnknownOriginMasks::default() } else { recorded.clone() };
    };
    if known.id != process {
        return UnknownOriginMasks::default();
    }
    let online = state.pool.online_cpus();
    let is_in =
        |present: Option<&CpuSet>, mask: &CpuSet| present.is_some_and(|other| are_same(&online, other, mask));
    let mut kept = recorded.clone();
    if let Some(member) = state.tracked_process(process.pid) {
        if has_unread_threads(member) {
            return kept;
        }
        let originals = collect_masks(member, |entry| Some(entry.original_mask().clone()));
        kept.first_thread = kept.first_thread.filter(|mask| is_in(originals.first_thread.as_ref(), mask));
        kept.other_threads
            .retain(|mask| originals.other_threads.iter().any(|other| are_same(&online, other, mask)));
        return kept;
    }
    kept.first_thread = kept.first_thread.filter(|mask| is_in(known.first_thread_mask.as_ref(), mask));
    let read = draft.seen.processes.get(&process.pid).and_then(Observed::present);
    if let Some(threads) = read.and_then(|read| read.threads.as_ref()) {
        let others = threads.iter().filter(|thread| thread.tid.0 != process.pid.0);
        let masks: BTreeSet<&CpuSet> = others.map(|thread| &thread.effective_mask).collect();
        kept.other_threads.retain(|mask| masks.iter().any(|other| are_same(&online, other, mask)));
    }
    kept
}

/// Whether the process `known` may have inherited its affinity mask from a process of a job of root. All of these
/// conditions must hold:
///
/// - The process is a process of root, no kernel thread, and tracked for no job. Only one scan has read it.
/// - pjw does not know which process forked it ([`is_orphan_of_unknown_descent`]).
/// - Its mask does not contain all online PUs. pjw granted or requested the mask for a job of root, or set the mask in
///   a released job that had processes of root.
///
/// Such a process of another user becomes a member of the job. But daemons of root also set masks themselves, so a
/// process of root only appears in a warning.
fn may_have_mask_of_root_job(state: &WardenState, known: &KnownProcess) -> bool {
    let process = &known.process;
    if process.uid != Uid::ROOT
        || process.is_kernel_thread
        || !known.was_read_once
        || state.tracked_process(process.id.pid).is_some()
    {
        return false;
    }
    let Some(mask) =
        process.first_thread_mask.as_ref().filter(|mask| !state.pool.online_cpus().is_subset(mask))
    else {
        return false;
    };
    let has_mask_of_job = || {
        state.jobs.jobs_of_owner(Uid::ROOT).any(|job| {
            let members = || state.members_of(&job.id).filter(|member| member.id.start <= process.id.start);
            let entries = members()
                .flat_map(|member| member.threads.values())
                .filter_map(|thread| thread.mask_entry.as_ref());
            let mut requests = entries.flat_map(MaskEntry::last_request_candidates);
            let is_granted = job.grant_chosen_by(GrantedBy::Warden).is_some_and(|grant| grant.cpus == *mask);
            members().next().is_some()
                && (is_granted
                    || requests.any(|request| request.writer == MaskWriter::Warden && request.mask == *mask))
        })
    };
    is_orphan_of_unknown_descent(state, known) && (has_mask_of_job() || state.has_released_mask(process))
}
