//! First phase of a cycle: updates the state with the facts of the scan.
//!
//! The only decision of this phase is which processes have ended. A process has ended if a scan did not find it, if a
//! full snapshot does not list it, or if its process id now belongs to a process with another start time.

use crate::basics::{CpuSet, Nanos, Pid, ProcessId, ThreadId, Tid, prelude::*, text::cpus_text};
use crate::phases::draft::CycleDraft;
use crate::state::masks::entry::{MaskComparison, MaskEntry};
use crate::state::masks::old_kernels::{correct_mask_writer, hotplug_window_start};
use crate::state::{KnownProcess, WardenState, jobs::waits_for_cores};
use crate::state::{dirty::DirtySet, members::Member, members::MemberThread};
use crate::terms::{
    Cgroup, CpusetRecord, Event, EventKind, JobId, MembershipEvidence, Observed, Process, Record, ScanScope,
    Thread,
};

/// The longest wait of a new thread that counts although it began before the present sample of its job, in ns. A
/// process is found and its threads are read by several scans, between which a sample may end.
const MAX_LATE_WAIT_NS: u64 = 3_000_000_000;

/// Stores in the state the processes, the cgroups and the online PUs (logical CPUs) that the scan of this cycle read.
/// After a full scan, removes the cgroups that are not needed any more.
///
/// An affinity request (a call of sched_setaffinity(2)) may change a thread that this scan did not read. So for each
/// affinity request in the scan, asks for a scan of all threads of the caller's process, and of the process that the
/// call names.
pub(crate) fn update_state(draft: &mut CycleDraft<'_>) {
    let snapshot = draft.seen;
    draft.state.first_scan_at.get_or_insert(snapshot.taken_at.since_boot);
    draft.state.cpusets.set_delayed_write_times(draft.now.since_boot);
    update_online_pus(draft, &snapshot.online);
    update_cgroups(draft);
    if draft.full {
        let mut needed = draft.state.job_cgroup_paths();
        // The search for masks of unknown origin needs the cgroups of the processes that it has not read.
        needed.extend(draft.state.cgroups_with_ancestors(draft.state.unknown_masks.unread_pids()));
        draft.state.cgroups.retain(|path, _| needed.contains(path));
    }
    for process in snapshot.processes.values().filter_map(Observed::present) {
        update_process(draft, process);
        let queue = &mut draft.state.lineage.scan_queue;
        queue.record_running(process.id.pid);
        let is_unread = process.has_unread_environment;
        queue.record_environment(process.id.pid, is_unread, snapshot.taken_at.since_boot);
    }
    for request in &snapshot.affinity_requests {
        let target_pid = request.target.map_or(request.caller_pid, |target| Pid(target.0));
        let tid = request.target.unwrap_or(request.caller);
        for pid in BTreeSet::from([request.caller_pid, target_pid]) {
            draft.state.members.request_full_reading(pid, tid);
        }
    }
}

/// Stores in the state the cgroups that the scan read. A job is planned again in each of these cases:
///
/// - A cgroup that has the job's cpuset from pjw has changed.
/// - The cpuset of the cgroup that the batch system made for the job has changed, and the job waits for cores.
fn update_cgroups(draft: &mut CycleDraft<'_>) {
    let (state, seen) = (&mut *draft.state, draft.seen);
    let cpuset_of = |cgroup: &Observed<Cgroup>| cgroup.present().and_then(|cgroup| cgroup.cpuset.clone());
    for (path, cgroup) in &seen.cgroups {
        let before = state.cgroups.insert(path.clone(), cgroup.clone());
        let has_changed = before.as_ref() != Some(cgroup);
        if let Some(managed) = state.cpusets.cpuset_at(path).filter(|_| has_changed) {
            state.dirty.add_job(&managed.job_cpuset.job);
        }
        if before.as_ref().and_then(cpuset_of) != cpuset_of(cgroup) {
            // A cpuset that another daemon wrote keeps the job from cores.
            let waiting: Vec<JobId> = state
                .jobs
                .jobs_of_cgroup(path)
                .filter(|job| waits_for_cores(job))
                .map(|job| job.id.clone())
                .collect();
            waiting.iter().for_each(|id| state.dirty.add_job(id));
        }
        if let Some(cpuset) = cgroup.present().and_then(|cgroup| cgroup.cpuset.as_ref()) {
            state.cpusets.record_cpus_read(path, &cpuset.cpus, seen.taken_at.since_boot);
        }
    }
}

/// Removes the processes that have ended from the state. Must be called after the jobs of the other processes were
/// determined: the job of a child may follow from a parent that has just ended.
pub(crate) fn remove_ended_processes(draft: &mut CycleDraft<'_>) {
    let snapshot = draft.seen;
    let state = &mut draft.state;
    let gone: Vec<Pid> = match snapshot.scope {
        ScanScope::Full => {
            let known = state.processes.keys().copied().chain(state.tracked_pids());
            known.filter(|pid| snapshot.processes.get(pid).and_then(Observed::present).is_none()).collect()
        }
        ScanScope::Partial(_) => {
            let looked_at = snapshot.processes.iter();
            looked_at.filter(|(_, seen)| seen.present().is_none()).map(|(&pid, _)| pid).collect()
        }
    };
    gone.into_iter().for_each(|pid| state.remove_ended_process(pid));
    if draft.full {
        let is_running = |pid| draft.seen.processes.get(&pid).and_then(Observed::present).is_some();
        draft.state.lineage.scan_queue.retain_exiting(is_running);
        forget_unread_masks(draft);
    }
}

/// Removes the recorded masks of threads that pjw will not restore, because the process of the thread belongs to no job
/// and was not released from one. The masks are those that the journal (the file with which a restarted daemon restores
/// its state) had at the start. Writes the removal to the journal.
fn forget_unread_masks(draft: &mut CycleDraft<'_>) {
    let state = &*draft.state;
    let is_tracked =
        |process: ProcessId| state.tracked_process(process.pid).is_some_and(|member| member.id == process);
    let lost: Vec<ThreadId> =
        state.masks_from_journal.keys().filter(|id| !is_tracked(id.process)).copied().collect();
    for thread in lost {
        draft.state.masks_from_journal.remove(&thread);
        draft.out.records.push(Record::MaskReleased(thread));
    }
}

/// Stores the online PUs in the state. If they have changed, adds an event for the PUs that went offline or online, and
/// everything is planned again.
fn update_online_pus(draft: &mut CycleDraft<'_>, online: &CpuSet) {
    let machine = draft.state.topology.cpus().clone();
    let online = online.intersection(&machine);
    let before = draft.state.pool.online_cpus();
    if online == before {
        return;
    }
    draft.state.pool.set_online(&online);
    draft.state.dirty = DirtySet::everything();
    draft.state.online.replace_if_different(online.clone(), draft.now.since_boot);
    for (cpus, word) in [(before.difference(&online), "offline"), (online.difference(&before), "online")] {
        if !cpus.is_empty() {
            let text = format!("{} went {word}", cpus_text(&cpus));
            draft.out.events.push(Event::new(EventKind::Hotplug, text).with_cpus(&cpus));
        }
    }
}

/// Stores the facts that the scan read about a process and its threads. If another process had the pid before, first
/// removes the facts about that process. If the process is a member of a job, and the scan found something new about
/// it, the masks of the job's processes are planned again in this cycle.
fn update_process(draft: &mut CycleDraft<'_>, process: &Process) {
    let pid = process.id.pid;
    let state = &mut draft.state;
    if is_unchanged(state, process) {
        state.lineage.record_scanned(pid);
        return;
    }
    let has_other_start = state.processes.get(&pid).is_some_and(|known| known.process.id != process.id)
        || state.members.get(&pid).is_some_and(|member| member.id != process.id)
        || state.processes_to_restore.get(&pid).is_some_and(|member| member.id != process.id);
    if has_other_start && !correct_start_time(draft, process.id) {
        draft.state.remove_process(pid);
    }
    let state = &mut draft.state;
    state.remove_unassigned(pid);
    let before = state.processes.remove(pid);
    let is_new = before.is_none();
    state.lineage.record_scanned(pid);
    let has_moved = before.as_ref().is_some_and(|known| known.process.cgroup != process.cgroup);
    if has_moved {
        state.members.note_move(pid);
        state.cpusets.note_move(process.id, process.cgroup.as_deref());
    } else if is_new {
        state.cpusets.note_first_cgroup(process.id, process.cgroup.as_deref());
    }
    let now = draft.now.since_boot;
    let last_cgroup_change = before.as_ref().and_then(|known| {
        if has_moved { Some((known.process.cgroup.clone()?, now)) } else { known.last_cgroup_change.clone() }
    });
    // An idle process that a rescan found in the same cgroup has no news.
    let known_identity = before.as_ref().map(|known| &known.batch_identity);
    let has_new_identity =
        process.batch_identity.is_some() && process.batch_identity.as_ref() != known_identity;
    let has_threads = process.threads.is_some();
    let is_news = is_new || has_moved || has_new_identity || (has_threads && process.has_all_threads);
    let recorded = state.tracked_process(pid).and_then(|member| member.first_seen);
    let first_seen = before.as_ref().map(|known| known.first_seen).or(recorded).unwrap_or(now);
    let batch_identity =
        process.batch_identity.clone().or(before.map(|known| known.batch_identity)).unwrap_or_default();
    let parent = parent_at_birth(state, process);
    let facts = Process { parent, attributes: None, batch_identity: None, threads: None, ..process.clone() };
    state.processes.insert(KnownProcess {
        process: facts,
        batch_identity,
        first_seen,
        was_read_once: is_new,
        last_cgroup_change,
    });
    if let Some(member) = state.members.get(&pid) {
        if is_news {
            state.dirty.add_process(&member.job, pid);
        } else if has_threads {
            state.dirty.add_active(&member.job);
        }
    }
    if has_moved {
        correct_original_cgroup(draft, process);
    }
    update_threads(draft, process);
}

/// Records the present cgroup of `process` as its original cgroup: the cgroup to which pjw returns the process when its
/// job is released. This is necessary if another program moved the process while pjw's own move into a cpuset was not
/// complete. pjw's move still takes place, because systemd moves a process out of any cgroup. Does nothing if pjw is
/// not moving the process, or if the process is in a cpuset of pjw.
fn correct_original_cgroup(draft: &mut CycleDraft<'_>, process: &Process) {
    let cpusets = &draft.state.cpusets;
    let Some(cgroup) = process.cgroup.as_deref().filter(|_| cpusets.delayed_changes.is_moving(process.id))
    else {
        return;
    };
    if cpusets.enclosing_cpuset(cgroup).is_some() {
        return;
    }
    let Some(to) = cpusets.last_move_destination(process.id) else { return };
    let (from, to) = (cgroup.to_owned(), to.to_owned());
    draft.record_cpuset(CpusetRecord::Moved { process: process.id, from, to });
}

/// Returns whether the state already has all that the scan read about `process`. False in each of these cases:
///
/// - The scan read the threads of the process.
/// - Only one earlier scan has read the process, or none.
/// - A fact differs, such as the cgroup, the session or the mask of the first thread.
fn is_unchanged(state: &WardenState, process: &Process) -> bool {
    let Some(known) = state.processes.get(&process.id.pid).filter(|known| !known.was_read_once) else {
        return false;
    };
    let has_same_identity =
        process.batch_identity.as_ref().is_none_or(|identity| *identity == known.batch_identity);
    let Process {
        id,
        parent: _,
        process_group: group,
        session,
        uid,
        comm,
        is_kernel_thread,
        first_thread_mask,
        cgroup,
        ..
    } = process;
    let is_same = (*id, *group, *session, *uid, *comm, *is_kernel_thread)
        == (
            known.process.id,
            known.process.process_group,
            known.process.session,
            known.process.uid,
            known.process.comm,
            known.process.is_kernel_thread,
        );
    let has_same_place =
        *first_thread_mask == known.process.first_thread_mask && *cgroup == known.process.cgroup;
    let is_tracked_as = |member: &Member| member.id == *id;
    process.threads.is_none()
        && is_same
        && has_same_place
        && has_same_identity
        && state.tracked_process(id.pid).is_none_or(is_tracked_as)
        && parent_at_birth(state, process) == known.process.parent
}

/// The parent of a process. For an orphan, the ancestor that the fork event named: the kernel shows process 1 or a
/// subreaper.
fn parent_at_birth(state: &WardenState, process: &Process) -> Pid {
    let descendant =
        state.lineage.descendant(process.id.pid).filter(|_| !state.members.contains_key(&process.parent));
    descendant.map_or(process.parent, |descendant| descendant.ancestor)
}

/// Corrects the start time of a process that the state only knows from its fork event: the state then has an estimate.
/// `id` has the start time that the scan read. Also corrects the start times of its threads, and writes the corrected
/// membership and masks to the journal. Returns whether `id` is the process that the state knows by this pid. If not,
/// or if the state knows no process with this pid, changes nothing and returns false.
fn correct_start_time(draft: &mut CycleDraft<'_>, id: ProcessId) -> bool {
    let state = &mut draft.state;
    let known = state.processes.get(&id.pid).map(|known| known.process.id);
    let Some(estimated) = known.or_else(|| Some(state.tracked_process(id.pid)?.id)) else { return false };
    if !estimated.is_same_process(id) {
        return false;
    }
    let member = state.members.remove(id.pid);
    let is_member = member.is_some();
    let Some(mut member) = member.or_else(|| state.processes_to_restore.remove(&id.pid)) else { return true };
    let kept: Vec<ThreadId> = member.journaled_masks().map(|(thread, _)| thread).collect();
    kept.iter().for_each(|&thread| draft.out.records.push(Record::MaskReleased(thread)));
    member.id = id;
    member.threads.values_mut().for_each(|thread| thread.start = id.start);
    if is_member {
        draft.out.records.push(Record::Joined(member.membership()));
        state.members.insert(member);
    } else {
        draft.out.records.push(Record::Left(member.membership()));
        state.processes_to_restore.insert(id.pid, member);
    }
    for thread in kept {
        draft.journal_mask(ThreadId { process: id, start: id.start, ..thread });
    }
    true
}

/// Updates the threads of a process in the state, if the scan read its threads and the process belongs to a job or a
/// released job. Known threads are updated before new threads are added, because a new thread may have inherited its
/// affinity mask from a known thread. `seen` is the process as the scan found it.
pub(crate) fn update_threads(draft: &mut CycleDraft<'_>, seen: &Process) {
    let pid = seen.id.pid;
    let Some(list) = &seen.threads else { return };
    let Some(process) = draft.state.tracked_process(pid).map(|member| member.id) else { return };
    if !seen.has_all_threads {
        return update_active_threads(draft, process, list);
    }
    // The other threads had no demand until the active ones were last read alone.
    let idle_until = seen.idle_until.or(draft.state.members.active_threads_read_at(pid));
    let taken = draft.state.members.take_threads(pid);
    let is_member = taken.is_some();
    let left = draft.state.processes_to_restore.get_mut(&pid).filter(|_| !is_member);
    let taken = taken.or_else(|| left.map(|left| core::mem::take(&mut left.threads)));
    let mut before = taken.unwrap_or_default();
    let limits_changed_at = draft.state.limits_changed_at(pid);
    let updated = |thread: &Thread| {
        let known = before.remove(&thread.tid).filter(|known| known.start == thread.start);
        (thread.tid, updated_thread(draft, process, known, thread, (limits_changed_at, idle_until)))
    };
    // A map that is collected takes half of the memory of a map into which the threads are inserted in their order.
    let threads: BTreeMap<Tid, MemberThread> = list.iter().map(updated).collect();
    if is_member {
        draft.state.members.replace_threads(pid, threads);
    } else if let Some(left) = draft.state.processes_to_restore.get_mut(&pid) {
        left.threads = threads;
    }
    add_pending_wait_of(draft, pid);
    draft.state.forget_recorded_masks(process);
    let ended: Vec<MemberThread> = before.into_values().collect();
    make_missing_mask_entries(draft, pid, &ended);
}

/// Updates the threads in `list`, which belong to `process`, in the state. The scan read only these threads, because
/// the other threads were not active: they neither ran nor waited for a PU. Does nothing if the process belongs to no
/// job.
///
/// - If the state does not have one of the threads, the next scan reads all threads of the process.
/// - If one of the threads is no longer active, the masks of the process are planned once more. The thread may be
///   pinned (restricted to one PU), and gets all PUs of its job again.
fn update_active_threads(draft: &mut CycleDraft<'_>, process: ProcessId, list: &[Thread]) {
    let (pid, now) = (process.pid, draft.now.since_boot);
    let Some(mut threads) = draft.state.members.take_threads(pid) else { return };
    let limits_changed_at = draft.state.limits_changed_at(pid);
    let mut is_complete = true;
    for thread in list {
        // A thread with another start time has taken the number of one that has ended.
        let Some(known) = threads.get_mut(&thread.tid).filter(|known| known.start == thread.start) else {
            is_complete = false;
            continue;
        };
        *known = updated_thread(draft, process, Some(known.clone()), thread, (limits_changed_at, None));
    }
    let is_one_idle = draft.state.members.put_back_threads(pid, threads, is_complete, now);
    add_pending_wait_of(draft, pid);
    let state = &mut *draft.state;
    if let Some(member) = state.members.get(&pid).filter(|_| is_one_idle) {
        // The thread may be pinned. Its mask is planned a last time.
        state.dirty.add_process(&member.job, pid);
    }
}

/// Adds the time for which the threads of a process waited to the usage of its job.
fn add_pending_wait_of(draft: &mut CycleDraft<'_>, pid: Pid) {
    let WardenState { usage, members, .. } = &mut *draft.state;
    usage.add_pending_wait(members.get(&pid).map(|member| &member.job));
}

/// Returns the new record of a thread for the state, after a scan has read `thread`, a thread of the process `process`.
/// Also adds the time for which the thread has waited for a PU since the last scan to `pending_wait_ns`: the caller
/// adds this sum to the usage of the job.
///
/// - `known` is the old record. `None` if there is none.
/// - `limits_changed_at` is the time (in ns since boot) at which the online PUs or the cpuset of the thread last
///   changed. `None` if they never changed.
/// - `idle_until` is the time (in ns since boot) until which the thread is known to have been idle. `None` if unknown.
fn updated_thread(
    draft: &mut CycleDraft<'_>,
    process: ProcessId,
    mut known: Option<MemberThread>,
    thread: &Thread,
    (limits_changed_at, idle_until): (Option<Nanos>, Option<Nanos>),
) -> MemberThread {
    let now = draft.now.since_boot;
    let persists = draft.policy.cpuset_support.affinity_persists;
    let id = ThreadId { process, tid: thread.tid, start: thread.start };
    let mask = known.as_mut().and_then(|known| known.mask_entry.take());
    let mask = mask.or_else(|| draft.state.masks_from_journal.remove(&id));
    let is_same_mask = known.as_ref().is_some_and(|known| known.effective_mask == thread.effective_mask);
    let mask_entry = mask.map(|mut entry| {
        if persists && is_same_mask && entry.same_mask_means_same_request(limits_changed_at) {
            entry.record_unchanged_reading(now);
            return entry;
        }
        updated_mask_entry(draft, entry, &thread.effective_mask, process.pid)
    });
    let before = known.map(|known| known.demand).unwrap_or_default();
    let demand = before.with_reading(thread.run_ns, thread.wait_ns, now, idle_until, draft.policy);
    draft.state.usage.pending_wait_ns += match before.last_read_at() {
        Some(_) => demand.waited_ns().saturating_sub(before.waited_ns()),
        None => first_wait_ns(draft, process.pid, thread),
    };
    let Thread { start, comm, state, last_cpu, .. } = *thread;
    let effective_mask = thread.effective_mask.clone();
    MemberThread { start, comm, state, last_cpu, effective_mask, demand, mask_entry }
}

/// Returns the time for which a thread that is read for the first time has waited for a PU, in ns, as it counts for the
/// present usage sample (time interval) of its job. At most the time since the sample began counts, or
/// [`MAX_LATE_WAIT_NS`] if this is longer. The result is 0 if the process belongs to no job. It is also 0 if the thread
/// is older than its job, because the thread may have waited before the job began.
fn first_wait_ns(draft: &CycleDraft<'_>, pid: Pid, thread: &Thread) -> u64 {
    let state = &*draft.state;
    let job = state.members.get(&pid).map(|member| &member.job);
    let began_at = job.and_then(|job| state.usage.sample_start_for_new_thread(job, thread.start));
    let Some(began_at) = began_at else { return 0 };
    thread.wait_ns.min(draft.now.since_boot.0.saturating_sub(began_at.0).max(MAX_LATE_WAIT_NS))
}

/// Returns `entry` after a scan has read the effective mask `seen` of its thread. The entry has what pjw knows about
/// the affinity mask of a thread of the process `pid`. On kernels before Linux 6.2, also corrects who set the mask, if
/// the entry wrongly names the program instead of the kernel. Such a kernel widens masks itself.
fn updated_mask_entry(draft: &CycleDraft<'_>, mut entry: MaskEntry, seen: &CpuSet, pid: Pid) -> MaskEntry {
    let (state, now) = (&*draft.state, draft.now.since_boot);
    let persists = draft.policy.cpuset_support.affinity_persists;
    let limits = state.mask_limits(pid, entry.last_read_at(), persists);
    let window_start = hotplug_window_start(now);
    if !persists && entry.is_mask_from_program() && state.online.has_changed_since(window_start) {
        let in_window = state.mask_limits(pid, window_start, persists);
        correct_mask_writer(&mut entry, &in_window, now);
    }
    let reading = entry.record_reading(seen, &limits, now);
    if !persists && reading == MaskComparison::ChangedByProgram && is_exceeded_in_cpuset(draft, pid, seen) {
        entry.confirm_mask_from_program();
    }
    entry
}

/// Whether this scan found a thread with PUs outside of `mask` in the same cpuset of pjw as the process `pid`. The
/// cpuset then has more PUs than `mask`, so the kernel did not reset a mask to the whole cpuset: the program set
/// `mask`. False if the process is in no cpuset of pjw.
fn is_exceeded_in_cpuset(draft: &CycleDraft<'_>, pid: Pid, mask: &CpuSet) -> bool {
    let cgroup = draft.state.process(pid).and_then(|process| process.cgroup.as_deref());
    let Some(managed) = cgroup.and_then(|cgroup| draft.state.cpusets.enclosing_cpuset(cgroup)) else {
        return false;
    };
    let scanned = draft.seen.processes.values().filter_map(Observed::present);
    let inside = scanned.filter(|process| process.is_in_cgroup(&managed.job_cpuset.path));
    let mut threads = inside.flat_map(|process| process.threads.iter().flatten());
    threads.any(|thread| !thread.effective_mask.is_subset(mask))
}

/// Adds the mask entries (what pjw knows about the affinity mask of a thread) that threads of the job `id` lack. An
/// entry is missing if the cpuset of the job was unknown when the thread was scanned.
pub(crate) fn add_missing_mask_entries(draft: &mut CycleDraft<'_>, id: &JobId) {
    let (members, dirty) = (&draft.state.members, &draft.state.dirty);
    let lacks_mask = |member: &&Member| {
        let active = members.active_threads_to_plan(dirty, member);
        member.living_threads_in(active).any(|(_, thread)| thread.mask_entry.is_none())
    };
    let members = members.members_to_plan(dirty, id).unwrap_or_default();
    let pids: Vec<Pid> = members.into_iter().filter(lacks_mask).map(|member| member.id.pid).collect();
    pids.into_iter().for_each(|pid| make_missing_mask_entries(draft, pid, &[]));
}

/// Makes the mask entries (what pjw knows about the mask of a thread) that threads of the process `pid` lack. Makes no
/// entry yet if no scan has read the cpuset around the thread. Writes the entry of a thread that inherited a mask of
/// pjw to the journal. `ended` has the threads of the process that have ended since the last scan: one of them may have
/// created a thread.
fn make_missing_mask_entries(draft: &mut CycleDraft<'_>, pid: Pid, ended: &[MemberThread]) {
    let persists = draft.policy.cpuset_support.affinity_persists;
    let now: Nanos = draft.now.since_boot;
    let state = &*draft.state;
    let Some(member) = state.tracked_process(pid) else { return };
    let missing = member.living_threads().filter(|(_, thread)| thread.mask_entry.is_none());
    let entry = |(id, thread): (ThreadId, _)| {
        Some((id, state.first_mask_entry(member, (id.tid, thread), ended, persists, now)?))
    };
    let made: Vec<(ThreadId, MaskEntry)> = missing.filter_map(entry).collect();
    let new: BTreeSet<ThreadId> = made.iter().map(|(id, _)| *id).collect();
    for (id, entry) in made {
        if let Some(thread) = draft.state.thread_mut(&id) {
            thread.mask_entry = Some(entry);
        }
        draft.journal_mask(id);
    }
    // The threads of an instance of `pjwctl spawn` may be read only after the release. A stray has left no job.
    let left = draft.state.processes_to_restore.get(&pid);
    if left.is_some_and(|left| left.evidence != MembershipEvidence::Adopted) {
        draft.attribute_start_masks_to_pjw(pid, |thread| new.contains(thread));
    }
}
