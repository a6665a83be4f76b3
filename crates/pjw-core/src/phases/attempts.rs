//! Affinity attempts: calls of sched_setaffinity(2) for PUs outside the caller's job, by processes in a job
//! cpuset. A call for PUs of the job only is no attempt.
//!
//! The kernel cuts the requested mask to the cpuset, so the mask of the thread does not show the attempt. In
//! a job without cpuset the mask changes; the phase `masks` then reports the change and restores the mask.

use core::time::Duration;

use crate::basics::{CpuSet, Pid, ProcessId, StartTime, Tid, cpus_text, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::state::{AffinityTargets, Member, ReportedAttemptCount, WardenState};
use crate::terms::{AffinityRequest, Event, EventKind, JobId};

/// The maximum number of attempts that are reported for one job in a minute. Without a limit, a loop of short
/// programs could crowd out all other events.
const MAX_PER_MINUTE: u32 = 32;

const MINUTE: Duration = Duration::from_secs(60);

/// The attempts of processes in this cycle to run outside of their job. An attempt is a call of sched_setaffinity(2) by
/// which a process requests PUs (logical CPUs) that its job does not hold. If an attempt changed an affinity mask, the
/// new mask is not reported again. Also the threads for which a process requested PUs of its job only.
///
/// The state has the threads whose masks no scan has read since the call. They may be thousands, so they are not copied
/// here: the sets here have only the threads that this cycle removed from those of the state.
#[derive(Debug, Default)]
pub(crate) struct ReportedAttempts {
    /// The processes with a reported attempt in this cycle.
    pub(crate) processes: BTreeSet<Pid>,
    /// The threads with an attempt in an earlier cycle whose masks this scan has read.
    read_threads: AffinityTargets,
    /// The threads whose masks this scan has read, and for which a process of their job requested PUs of the job only.
    /// The call was in an earlier cycle.
    read_threads_within_job: AffinityTargets,
}

impl ReportedAttempts {
    /// Whether the mask of `thread` may have changed because of a reported attempt. Removes the thread from those of
    /// `state`: its mask is known now.
    pub(crate) fn take_thread(&self, state: &mut WardenState, thread: &(ProcessId, Tid)) -> bool {
        state.reported_affinity_targets.remove(thread) || self.read_threads.contains(thread)
    }

    /// Whether the mask of `thread` may have changed because a process of its job requested PUs that the job holds, and
    /// no others. The thread may also have an attempt of an earlier cycle.
    pub(crate) fn is_within_job(&self, state: &WardenState, thread: &(ProcessId, Tid)) -> bool {
        state.affinity_targets_within_job.contains(thread) || self.read_threads_within_job.contains(thread)
    }
}

/// The attempts in a scan by the pid of the process that made them, and the threads for which a process of their job
/// requested PUs that the job holds, and no others.
type SortedRequests<'a> = (BTreeMap<Pid, Vec<AffinityAttempt<'a>>>, AffinityTargets);

/// A call of sched_setaffinity(2) by a process in a job, for PUs outside of the job.
struct AffinityAttempt<'a> {
    request: &'a AffinityRequest,
    job: JobId,
    grant: CpuSet,
    /// The online PUs that the call requested.
    requested: CpuSet,
    /// The member thread whose mask the call would change, if there is one.
    thread: Option<(ProcessId, Tid)>,
}

/// Reports attempts to leave a job: a process in the cpuset of its job called sched_setaffinity(2) for PUs (logical
/// CPUs) outside of the job. Adds one event for each such process, but at most 32 events for each job in a minute. Must
/// be called before this cycle removes ended processes from the state. The result has the processes with an attempt in
/// this cycle, also those without an event. With the state, it also has:
///
/// - The threads whose masks may have changed because of an attempt in this cycle. Also those of an earlier cycle, if
///   the process was not scanned between the two cycles.
/// - In the same way, the threads whose masks may have changed because of a call for PUs of the job only. Except those
///   with an attempt in this cycle.
pub(crate) fn report_affinity_violations(draft: &mut CycleDraft<'_>) -> ReportedAttempts {
    let requests = &draft.seen.affinity_requests;
    let state = &*draft.state;
    let has_targets =
        !state.reported_affinity_targets.is_empty() || !state.affinity_targets_within_job.is_empty();
    if requests.is_empty() && !has_targets {
        return ReportedAttempts::default();
    }
    let (attempts, new_within_job) = sort_requests(state, requests);
    for (&pid, attempts) in &attempts {
        let Some(first) = attempts.first() else { continue };
        let Some(suffix) = rate_limit_suffix(draft, &first.job) else { continue };
        let mut event = Event::new(EventKind::Violation, event_text(first, attempts.len() - 1) + suffix);
        event.tid = Some(first.request.caller);
        draft.out.events.push(event.with_job(&first.job).with_pid(pid).with_cpus(&first.requested));
    }
    let new_targets: AffinityTargets =
        attempts.values().flatten().filter_map(|attempt| attempt.thread).collect();
    let within_job = &mut draft.state.affinity_targets_within_job;
    for thread in &new_targets {
        within_job.remove(thread);
    }
    let read_threads_within_job = take_read_targets(draft, |state| &mut state.affinity_targets_within_job);
    let read_threads = take_read_targets(draft, |state| &mut state.reported_affinity_targets);
    let state = &mut *draft.state;
    state.affinity_targets_within_job.extend(new_within_job.difference(&new_targets));
    state.reported_affinity_targets.extend(new_targets);
    ReportedAttempts { processes: attempts.into_keys().collect(), read_threads, read_threads_within_job }
}

/// Removes from a set of the state the threads of calls of earlier cycles whose process this scan has read: it already
/// shows the mask that resulted from the call. Returns these threads. `targets` returns the set. If the scan is full,
/// the threads of processes that are no members any more are removed too.
fn take_read_targets(
    draft: &mut CycleDraft<'_>,
    targets: impl Fn(&mut WardenState) -> &mut AffinityTargets,
) -> AffinityTargets {
    let scanned = &draft.seen.processes;
    if !draft.full {
        return take_targets_of(targets(draft.state), scanned.keys().copied());
    }
    let all = core::mem::take(targets(draft.state));
    let members = &draft.state.members;
    let is_unread = |(process, _): &(ProcessId, Tid)| {
        let is_member = members.get(&process.pid).is_some_and(|member| member.id == *process);
        is_member && !scanned.contains_key(&process.pid)
    };
    let (unread, read) = all.into_iter().partition(is_unread);
    *targets(draft.state) = unread;
    read
}

/// Removes the threads of the processes with these pids from `targets`, and returns them. Visits no thread of another
/// process: a job can have thousands, and a cycle after a fork reads few processes.
fn take_targets_of(targets: &mut AffinityTargets, pids: impl Iterator<Item = Pid>) -> AffinityTargets {
    let mut taken = AffinityTargets::new();
    if targets.is_empty() {
        return taken;
    }
    for pid in pids {
        let [first, last] = [StartTime(0), StartTime(u64::MAX)].map(|start| ProcessId { pid, start });
        taken.extend(targets.range((first, Tid(0))..=(last, Tid(u32::MAX))));
    }
    for thread in &taken {
        targets.remove(thread);
    }
    taken
}

/// Divides the calls `requests` of processes in the cpusets of their jobs: into those for PUs outside of the job, and
/// those for PUs of the job only.
fn sort_requests<'a>(state: &WardenState, requests: &'a [AffinityRequest]) -> SortedRequests<'a> {
    let online = state.pool.online_cpus();
    let (mut attempts, mut within_job) = SortedRequests::default();
    for request in requests {
        let Some((member, grant)) = caller_in_cpuset(state, request, &online) else { continue };
        let requested = request.requested_mask.intersection(&online);
        if requested.is_subset(&grant) {
            within_job.extend(target_within_job(state, request, member).filter(|_| !request.refused));
        } else {
            let (job, thread) = (member.job.clone(), target_thread(state, request, member));
            let attempt = AffinityAttempt { request, job, grant, requested, thread };
            attempts.entry(request.caller_pid).or_default().push(attempt);
        }
    }
    (attempts, within_job)
}

/// Returns the text to append to the event about the next attempt of `job`, and counts this event. At most
/// [`MAX_PER_MINUTE`] events about a job are added in a minute, which begins with the first of them:
///
/// - For the last event of a minute, the text says that further attempts are not reported.
/// - For the events before it, the text is empty.
/// - `None` for an event after it: no event must be added.
///
/// Also forgets the counts of jobs that have ended.
fn rate_limit_suffix(draft: &mut CycleDraft<'_>, job: &JobId) -> Option<&'static str> {
    let now = draft.now.since_boot;
    let jobs = &draft.state.jobs;
    draft.state.reported_attempt_counts.retain(|job, _| jobs.contains_key(job));
    let reported = draft.state.reported_attempt_counts.entry(job.clone()).or_default();
    if reported.count == 0 || Duration::from_nanos(now.0.saturating_sub(reported.since.0)) >= MINUTE {
        *reported = ReportedAttemptCount { since: now, count: 0 };
    }
    reported.count += 1;
    match reported.count {
        1..MAX_PER_MINUTE => Some(""),
        MAX_PER_MINUTE => Some("; further attempts of its job in this minute are not reported"),
        _ => {
            reported.count = MAX_PER_MINUTE;
            None
        }
    }
}

/// Returns the process that made the call `request` of sched_setaffinity(2), and the PUs in `online` (the online PUs)
/// that its job holds. `None` in each of these cases:
///
/// - The caller belongs to no job, the job was released, or the job holds no online PU.
/// - The call came before the job got its cores.
/// - The caller is outside the cpuset of its job.
/// - The call was for a process outside of the job.
fn caller_in_cpuset<'a>(
    state: &'a WardenState,
    request: &AffinityRequest,
    online: &CpuSet,
) -> Option<(&'a Member, CpuSet)> {
    let member = calling_member(state, request)?;
    let job = state.jobs.get(&member.job).filter(|job| !job.was_released)?;
    let grant = job.online_granted_cpus(online)?;
    let is_after_grant = job.grant.as_ref().is_some_and(|grant| request.called_at >= grant.granted_at);
    let has_target_outside = request.target.is_some_and(|target| is_outside_job(state, target, &member.job));
    (is_after_grant && state.is_in_job_cpuset(member) && !has_target_outside).then_some((member, grant))
}

/// Returns the member (a process of a job) that made the call `request`. A process that started and exited between two
/// scans is unknown to pjw. For such a caller, the result is the ancestor that its fork event named, or its parent if
/// there was no fork event. `None` if this process is no member, or started after the call.
fn calling_member<'a>(state: &'a WardenState, request: &AffinityRequest) -> Option<&'a Member> {
    let member = |pid: Pid| {
        state.members.get(&pid).filter(|member| member.id.start.earliest_time() <= request.called_at)
    };
    if state.processes.contains_key(&request.caller_pid)
        || state.processes_to_restore.contains_key(&request.caller_pid)
    {
        return member(request.caller_pid);
    }
    let ancestor = state
        .lineage
        .descendant(request.caller_pid)
        .map_or(request.caller_parent, |descendant| descendant.ancestor);
    member(request.caller_pid).or_else(|| member(ancestor))
}

/// Whether the target thread is known to belong to a process outside of the job. A user may bind processes
/// outside of the job.
fn is_outside_job(state: &WardenState, target: Tid, job: &JobId) -> bool {
    let pid = Pid(target.0);
    state.processes.contains_key(&pid) && state.members.get(&pid).is_none_or(|member| member.job != *job)
}

/// Returns the thread whose mask the call `request` would change, with its process. `member` is the process that made
/// the call. `None` if no scan has found this thread in the job of `member`.
fn target_thread(
    state: &WardenState,
    request: &AffinityRequest,
    member: &Member,
) -> Option<(ProcessId, Tid)> {
    let tid = request.target.unwrap_or(request.caller);
    let has_thread = |member: &&Member| member.threads.contains_key(&tid);
    let mut others = state.members.members_of_job(&member.job);
    let owner = Some(member).filter(has_thread).or_else(|| others.find(has_thread))?;
    Some((owner.id, tid))
}

/// Like [`target_thread`], but the result is also `None` if the thread is neither of `member` nor the first thread of
/// its process. A program that starts often makes such a call, so the processes of the job are not searched.
fn target_within_job(
    state: &WardenState,
    request: &AffinityRequest,
    member: &Member,
) -> Option<(ProcessId, Tid)> {
    let tid = request.target.unwrap_or(request.caller);
    let other = state.members.get(&Pid(tid.0)).filter(|other| other.job == member.job);
    let owner = [Some(member), other].into_iter().flatten().find(|owner| owner.threads.contains_key(&tid))?;
    Some((owner.id, tid))
}

/// Returns the text of the event about `attempt`. `others` is the number of other attempts of the same process in this
/// cycle.
fn event_text(attempt: &AffinityAttempt<'_>, others: usize) -> String {
    let AffinityAttempt { request, job, grant, requested, .. } = attempt;
    let AffinityRequest { caller, caller_pid, comm, .. } = request;
    let target_text = request.target.map(|target| format!(" for {target}")).unwrap_or_default();
    let kept = requested.intersection(grant);
    let (held, requested) = (cpus_text(grant), cpus_text(requested));
    let effect = if request.refused {
        format!("the kernel refused, for none of them is in {held} of {job}")
    } else if kept.is_empty() {
        format!("the cpuset of {job} keeps it on {held}")
    } else {
        format!("the cpuset of {job} kept it on {}", cpus_text(&kept))
    };
    let repetitions = match others {
        0 => String::new(),
        1 => " (and once more)".to_owned(),
        others => format!(" (and {others} times more)"),
    };
    format!(
        "thread {caller} of process {caller_pid} ({comm}) asked for {requested}{target_text}: {effect}{repetitions}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_the_read_processes_are_taken_and_those_of_others_stay() {
        let thread = |pid, start, tid| (ProcessId { pid: Pid(pid), start: StartTime(start) }, Tid(tid));
        let of_others = [thread(19, u64::MAX, u32::MAX), thread(21, 0, 0), thread(40, 7, 41)];
        let of_read =
            [thread(20, 0, 0), thread(20, 5, 21), thread(20, u64::MAX, u32::MAX), thread(30, 1, 30)];
        let mut targets: AffinityTargets = of_others.into_iter().chain(of_read).collect();
        let taken = take_targets_of(&mut targets, [20, 30, 50].map(Pid).into_iter());
        assert_eq!(taken, AffinityTargets::from(of_read));
        assert_eq!(targets, AffinityTargets::from(of_others));
    }
}
