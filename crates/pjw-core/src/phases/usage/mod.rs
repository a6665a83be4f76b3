//! Adds up what the jobs use, and makes the report of a job that ends.
//!
//! The phase visits the jobs whose processes the scan read, and no others: an idle job costs nothing. A sample ends
//! with the first cycle that comes at least half a second after its beginning.

mod hot_threads;
pub(crate) mod sample;

use self::sample::{end_sample, has_read_active_processes};
use crate::basics::{Moment, Nanos, Pid, ProcessId, UnixMillis, prelude::*};
use crate::phases::draft::CycleDraft;
use crate::phases::held::add_held_core_time;
use crate::state::usage::{RunningJobUsage, is_same_start};
use crate::state::{Member, WardenState};
use crate::terms::{
    DaemonMode, EventKind, Job, JobId, JobReport, JobUsage, Observed, Process, ProcessCpuTimes, Record,
    ScanScope, Snapshot, UsageSample, is_short_scan,
};

/// With the default scan interval of 1 s, a scan notices within this time, in ns, that an idle process runs again. Idle
/// processes are not checked in each scan.
const MAX_UNNOTICED_NS: u64 = 32_000_000_000;
/// The least length of a sample, in ns.
const MIN_SAMPLE_NS: u64 = 500_000_000;
/// In a sample that is longer than this, in ns, the time in which the job is known to have been idle is a sample of its
/// own.
const LONG_SAMPLE_NS: u64 = 3_000_000_000;
/// The number of scans in one sample that take too long and so do not end the sample. The next scan ends the sample in
/// any case, because on some machines each scan takes long. With the default scan interval of 1 s, the sample then is
/// about as long as [`LONG_SAMPLE_NS`].
const MAX_SLOW_SCANS: u32 = 2;
/// The time between two records of a job's usage in the journal, in ns.
const RECORD_INTERVAL_NS: u64 = 60_000_000_000;

/// Reads the CPU times of the processes that the next decision needs, and stores them in `snapshot`
/// ([`Snapshot::cpu_times`]). Also stores the pids of those processes of jobs that have ended ([`Snapshot::reaped`]).
/// The caller passes [`MachineInterface::read_cpu_times`] as `read`.
///
/// When a parent waits for an ended child (wait4(2)), the kernel adds the CPU time of the child to the parent. So the
/// function must also find out which children have ended. It calls `read` several times, for these processes:
///
/// 1. Each process of a job, if the scan read the threads of the process or found that the process has ended. Also the
///    parents of these processes. Also each parent outside of jobs to which the kernel added, or may soon add, the CPU
///    time of an ended child, if pjw has not counted this time yet.
/// 2. Each parent outside of jobs with a child that call 1 found to have ended. This parent is read again, because it
///    may have waited for the child after call 1 read the parent.
/// 3. The children of the ended processes, and the children for which a living parent may have waited since its last
///    reading. This call only finds out whether these children have ended: their CPU times are not stored. A child that
///    call 1 found alive is left out, unless call 2 read its parent again.
/// 4. The children of the processes that call 3 found to have ended, and so on.
///
/// [`MachineInterface::read_cpu_times`]: crate::terms::ports::MachineInterface::read_cpu_times
pub fn read_cpu_times(
    state: &WardenState,
    snapshot: &mut Snapshot,
    mut read: impl FnMut(&BTreeSet<Pid>) -> BTreeMap<Pid, Observed<ProcessCpuTimes>>,
) {
    let usage = &state.usage;
    let requested = pids_for_cpu_times(state, snapshot);
    let mut readings = read(&requested);
    let is_gone = |readings: &BTreeMap<Pid, Observed<ProcessCpuTimes>>, pid| match readings.get(&pid) {
        Some(Observed::Gone) => true,
        Some(Observed::Present(times)) => usage.is_other_process(pid, times),
        None => false,
    };
    let gone: Vec<Pid> = requested.iter().copied().filter(|&pid| is_gone(&readings, pid)).collect();
    // A parent in a job is not read once more. Another child could have ended since, and the time of this child would
    // then count twice: in its own times of the first call, and in the later ones of the parent.
    let parents = gone.iter().filter_map(|&pid| usage.outside_parent_of(pid));
    let read_again: BTreeSet<Pid> = parents.filter(|&pid| !is_gone(&readings, pid)).collect();
    if !read_again.is_empty() {
        readings.extend(read(&read_again).into_iter().filter(|(_, again)| again.present().is_some()));
    }
    let mut reaped: BTreeSet<Pid> =
        gone.iter().copied().filter(|&pid| usage.process_usage_at(pid).is_some()).collect();
    let mut to_look_for: BTreeSet<Pid> = gone.iter().flat_map(|&pid| usage.children_of(pid)).collect();
    for (&pid, times) in readings.iter().filter_map(|(pid, reading)| Some((pid, reading.present()?))) {
        to_look_for.extend(usage.children_possibly_waited_for(pid, times));
    }
    // A child that the first call read existed after its parent was read, except if the parent was read once more.
    let existed_after_parent = |pid: &Pid| {
        let parent = usage.process_usage_at(*pid).map(|known| known.parent);
        matches!(readings.get(pid), Some(Observed::Present(_)))
            && parent.is_none_or(|parent| !read_again.contains(&parent))
    };
    to_look_for.retain(|pid| !reaped.contains(pid) && !existed_after_parent(pid));
    while !to_look_for.is_empty() {
        let child_readings = read(&to_look_for);
        to_look_for.retain(|&pid| is_gone(&child_readings, pid) && reaped.insert(pid));
        to_look_for = to_look_for.iter().flat_map(|&pid| usage.children_of(pid)).collect();
        to_look_for.retain(|pid| !reaped.contains(pid));
    }
    let times = readings.into_iter().filter_map(|(pid, reading)| Some((pid, *reading.present()?)));
    snapshot.cpu_times = times.filter(|(pid, _)| !reaped.contains(pid)).collect();
    snapshot.reaped = reaped;
}

/// Returns the pids of the processes whose CPU times the decision on this scan needs:
///
/// - Each process of a job, if the scan read the threads of the process.
/// - Each process of a job, if the scan found that the process has ended.
/// - The parents of all these processes. When a parent waits for an ended child (wait4(2)), the kernel adds the CPU
///   time of the child to the parent (`cutime` and `cstime`, proc_pid_stat(5)).
/// - Each parent outside of jobs that has probably not yet waited for an ended child of a job.
/// - Each parent outside of jobs that was read after the exit of a child of a job.
///
/// Process 1 is never included: it is the parent of all orphans.
fn pids_for_cpu_times(state: &WardenState, snapshot: &Snapshot) -> BTreeSet<Pid> {
    let mut pids = BTreeSet::new();
    for (&pid, seen) in &snapshot.processes {
        let Some(member) = state.members.get(&pid) else { continue };
        match seen {
            Observed::Present(process) if process.id == member.id && process.threads.is_some() => {
                pids.extend([pid, process.parent]);
            }
            Observed::Present(process) if process.id == member.id => {}
            _ => pids.extend(with_parent(state, member)),
        }
    }
    if snapshot.scope == ScanScope::Full {
        let gone = state.members.values().filter(|member| !snapshot.processes.contains_key(&member.id.pid));
        pids.extend(gone.flat_map(|member| with_parent(state, member)));
    }
    pids.extend(state.usage.expected_parents());
    pids.extend(state.usage.parents_read_at_exit());
    // Process 1 waits for all orphans of the machine.
    pids.retain(|pid| pid.0 > 1);
    pids
}

/// Returns the pid of `member`, and the pid of its parent if it is known.
fn with_parent(state: &WardenState, member: &Member) -> impl Iterator<Item = Pid> + use<> {
    let parent = state.usage.process_usage(member.id).map(|known| known.parent);
    core::iter::once(member.id.pid).chain(parent)
}

/// Returns the cgroups whose peak memory use the caller must read now. Each item is a job and the path of one cgroup of
/// the job. `snapshot` is the newest scan. The result has the cgroups of these jobs:
///
/// - Each job whose last process has ended, as the scan found. The next decision may end the job, and then reports the
///   peak.
/// - Each job of which any process has ended, if the peak was not read within the last second. Forked workers often all
///   end at about the same time and write to shared memory just before, which raises the peak. When the last process
///   has ended, systemd may remove the cgroup, and the peak can't be read any more.
#[must_use]
pub fn cgroups_with_peaks_to_read(state: &WardenState, snapshot: &Snapshot) -> Vec<(JobId, String)> {
    let is_gone = |member: &Member| match snapshot.processes.get(&member.id.pid) {
        Some(Observed::Present(process)) => process.id != member.id,
        Some(_) => true,
        None => snapshot.scope == ScanScope::Full,
    };
    let listed = snapshot.processes.keys().filter_map(|pid| state.members.get(pid));
    let all = (snapshot.scope == ScanScope::Full).then(|| state.members.values());
    let gone = listed.chain(all.into_iter().flatten()).filter(|member| is_gone(member));
    let jobs: BTreeSet<&JobId> = gone.map(|member| &member.job).collect();
    let now = snapshot.taken_at.since_boot;
    let to_read = jobs
        .into_iter()
        .filter(|job| state.usage.is_memory_peak_due(job, now) || state.members_of(job).all(is_gone));
    to_read.flat_map(|job| state.cgroups_of(job).map(move |path| (job.clone(), path))).collect()
}

/// Adds the CPU times that this cycle read to the usage of the jobs, and ends the usage samples that are long enough. A
/// sample is the resource use of a job during a time interval. `may_record` says whether the usage may be written to
/// the journal (the file with which a restarted daemon restores its state). This must be false in a cycle with
/// commands: the journal then has reserved space only for the records of the commands.
pub(crate) fn update_usage(draft: &mut CycleDraft<'_>, may_record: bool) {
    let mut jobs_read = record_process_cpu_times(draft);
    record_cgroup_usage(draft, &mut jobs_read);
    for job in jobs_read {
        if may_end_sample(draft, &job) {
            end_sample(draft.state, &job, draft.now.since_boot, MIN_SAMPLE_NS);
        }
        if may_record {
            journal_usage(draft, &job);
        }
    }
    draft.has_added_cpu_times = true;
}

/// Returns whether the present usage sample of `job` (its resource use since a time) may end with the scan of this
/// cycle. All of its CPU time must have been read at about the time of the scan. Otherwise, the sample would have too
/// little or too much CPU time, and the next sample the opposite. So the sample goes on in each of these cases:
///
/// - The scan did not cover all processes of jobs, for example a scan of one process that was just forked. Other
///   processes may have run since they were last read.
/// - The scan could not read all processes of the job that ran lately.
/// - The scan took too long ([`is_short_scan`]), and fewer than [`MAX_SLOW_SCANS`] earlier scans of this sample did.
///   The function counts these scans in the sample.
/// - pjw records no usage of the job.
///
/// If the sample is shorter than [`MIN_SAMPLE_NS`], the length of the scan is neither checked nor counted: the caller
/// does not end such a sample, even if this function returns true.
fn may_end_sample(draft: &mut CycleDraft<'_>, job: &JobId) -> bool {
    let Some(read_until) = draft.seen.cpu_times_read_until else { return false };
    if !has_read_active_processes(draft.state, draft.seen, job) {
        return false;
    }
    let now = draft.now.since_boot;
    let Some(open) = draft.state.usage.usage_of_job_mut(job) else { return false };
    let sample_ns = now.0.saturating_sub(open.sample_began_at.0);
    let is_short = is_short_scan(read_until.0.saturating_sub(now.0), sample_ns);
    if sample_ns < MIN_SAMPLE_NS || is_short || open.slow_scans >= MAX_SLOW_SCANS {
        return true;
    }
    open.slow_scans += 1;
    false
}

/// Records the CPU times that this cycle read for the processes of jobs and for their parents, and the processes that
/// have ended. Returns the jobs of which a process was read or has ended.
fn record_process_cpu_times(draft: &mut CycleDraft<'_>) -> BTreeSet<JobId> {
    let (snapshot, full, now) = (draft.seen, draft.full, draft.now.since_boot);
    let state = &mut *draft.state;
    let mut jobs_read = BTreeSet::new();
    let mut gone: Vec<ProcessId> = Vec::new();
    let mut living: Vec<(&Process, JobId)> = Vec::new();
    for (&pid, seen) in &snapshot.processes {
        let Some(member) = state.members.get(&pid) else { continue };
        match seen {
            Observed::Present(process) if process.id == member.id => {
                if process.threads.is_some() {
                    living.push((process, member.job.clone()));
                }
            }
            _ => gone.push(member.id),
        }
    }
    if full {
        let missing =
            state.members.values().filter(|member| !snapshot.processes.contains_key(&member.id.pid));
        gone.extend(missing.map(|member| member.id));
    }
    // Also the processes that have ended since the scan, and those that the scan did not cover.
    gone.extend(snapshot.reaped.iter().filter_map(|&pid| state.usage.process_id_at(pid)));
    // Children come before their parents, which then pass on what they got of the children.
    gone.sort_by_key(|id| core::cmp::Reverse((id.start, id.pid)));
    for id in gone {
        jobs_read.extend(state.members.get(&id.pid).map(|member| member.job.clone()));
        let noticed_from =
            state.members.is_idle(id.pid).then(|| Nanos(now.0.saturating_sub(MAX_UNNOTICED_NS)));
        let idle_until = snapshot.idle_until(id.pid).max(noticed_from);
        state.usage.record_process_end(id.pid, snapshot.cpu_times.get(&id.pid), idle_until, now);
    }
    let mut jobs_of_living: BTreeSet<JobId> = BTreeSet::new();
    let mut pids_read = Vec::new();
    for (process, job) in living {
        begin_usage_after_restart(state, &job, draft.now);
        let times = snapshot.cpu_times.get(&process.id.pid);
        if let Some(times) = times.filter(|times| is_same_start(times.start, process.id.start)) {
            state.usage.record_process_times(&job, process.id, process.parent, times, now);
            pids_read.push(process.id.pid);
        }
        end_sample_when_idle(state, &job, process.idle_until);
        record_task_count(state, &job, process.id.pid);
        jobs_of_living.insert(job);
    }
    for job in &jobs_of_living {
        if let Some(open) = state.usage.usage_of_job_mut(job) {
            open.is_unread = false;
        }
    }
    record_cpu_times_of_parents_outside_jobs(draft);
    for pid in pids_read {
        draft.state.usage.store_other_child_time_of_parent(pid);
    }
    // A full scan lists every process, so a parent that is missing has ended, and no time is expected from it any more.
    if full {
        let has_ended = |parent: &Pid| !matches!(snapshot.processes.get(parent), Some(Observed::Present(_)));
        let ended: Vec<Pid> = draft.state.usage.expected_parents().filter(has_ended).collect();
        draft.state.usage.record_unread_parents_ended(ended.into_iter());
    }
    jobs_read.extend(jobs_of_living);
    jobs_read
}

/// Begins to record the usage of the job `id` if nothing is recorded of it. This is so if the job was found after a
/// restart, and no earlier daemon recorded its usage. The usage counts from the beginning of the job, as far as its
/// processes still show it. Does nothing for a released job, which is reported already.
fn begin_usage_after_restart(state: &mut WardenState, id: &JobId, now: Moment) {
    let Some(job) = state.jobs.get(id).filter(|job| !job.was_released) else { return };
    if state.usage.usage_of_job(id).is_none() {
        let age_ns = millis_between(job.detected_at, now.wall_clock).saturating_mul(1_000_000);
        // A job that began with the machine began after boot.
        let began_at = Nanos(now.since_boot.0.saturating_sub(age_ns).max(1));
        state.usage.resume_recording(id.clone(), JobUsage::new(began_at));
    }
}

/// Records the CPU times of those processes that belong to no job and are parents of processes of jobs. The times were
/// read in this cycle, or right after the exit of a child. If a child has ended and its last CPU times are unknown, the
/// CPU times of the parent show the missing CPU time of the child. This time is added to the job of the child, unless
/// the PUs of the job could not run that much.
fn record_cpu_times_of_parents_outside_jobs(draft: &mut CycleDraft<'_>) {
    let (snapshot, now) = (draft.seen, draft.now.since_boot);
    let WardenState { usage, members, pool, jobs, cpusets, .. } = &mut *draft.state;
    let online_pus = pool.online_cpus().len();
    let is_observing = draft.policy.mode == DaemonMode::Observe;
    let usable_pus = |job: &JobId| {
        let grant = jobs.get(job).and_then(|job| job.grant.as_ref());
        let grant = grant.filter(|_| !is_observing && !cpusets.is_partition_delayed(job));
        grant.map_or(online_pus, |grant| grant.cpus.len())
    };
    let at_exit = usage.take_exit_times_of_parents();
    let at_exit = at_exit.iter().filter(|(pid, _)| !snapshot.cpu_times.contains_key(pid));
    let parents = snapshot.cpu_times.iter().filter(|(pid, _)| !members.contains_key(pid));
    for (&pid, times) in parents.chain(at_exit.map(|(pid, times)| (pid, times))) {
        usage.record_outside_parent_times(pid, times, now, usable_pus);
    }
}

/// Records the CPU time and the memory use of the cgroups that the scan read, for the jobs of these cgroups: the
/// cgroups that pjw or a batch system made for a job. Adds these jobs to `jobs_read`. Leaves out jobs without recorded
/// usage.
fn record_cgroup_usage(draft: &mut CycleDraft<'_>, jobs_read: &mut BTreeSet<JobId>) {
    let seen = draft.seen;
    let state = &mut *draft.state;
    for (path, cgroup) in &seen.cgroups {
        let Some(cgroup) = cgroup.present() else { continue };
        let of_pjw = state.cpusets.cpuset_at(path).map(|managed| managed.job_cpuset.job.clone());
        let jobs: Vec<JobId> =
            of_pjw.into_iter().chain(state.jobs.jobs_of_cgroup(path).map(|job| job.id.clone())).collect();
        for job in jobs {
            let Some(open) = state.usage.usage_of_job_mut(&job) else { continue };
            if let Some(ns) = cgroup.usage.cpu_ns {
                let first = open.cgroup_cpu_ns.map_or(ns, |(first, _)| first.min(ns));
                open.cgroup_cpu_ns = Some((first, ns));
            }
            open.usage.memory_peak = open.usage.memory_peak.max(cgroup.usage.memory_peak);
            open.usage.memory_limit = cgroup.usage.memory_limit.or(open.usage.memory_limit);
            jobs_read.insert(job);
        }
    }
}

/// Records how many tasks (processes that the batch system starts) the job `id` has on this machine. An attribute of
/// its process `pid` has the number, such as an environment variable. Does nothing if the number is already recorded,
/// if the process does not have it, or if the job is of no batch system.
fn record_task_count(state: &mut WardenState, id: &JobId, pid: Pid) {
    let WardenState { usage, processes, .. } = state;
    let open =
        usage.usage_of_job_mut(id).filter(|open| open.usage.tasks.is_none() && id.source().is_batch_system());
    let Some(open) = open else { return };
    let references = processes.get(&pid).into_iter().flat_map(|known| &known.batch_identity.job_references);
    open.usage.tasks =
        references.filter(|reference| reference.job == *id).find_map(|reference| reference.tasks);
}

/// Ends the usage sample of `job` (its resource use since a time) at the time `idle_until`, in ns since boot. A process
/// of the job was idle until this time, and runs again now. The ended sample has no CPU time: what was read since its
/// beginning counts in the next sample. Does nothing in each of these cases:
///
/// - `idle_until` is `None`.
/// - The ended sample would be shorter than [`LONG_SAMPLE_NS`].
/// - A scan in this sample took too long to end it. The sample may then be long although another process of the job
///   runs all the time. One of the next scans ends it.
fn end_sample_when_idle(state: &mut WardenState, job: &JobId, idle_until: Option<Nanos>) {
    let (Some(until), Some(open)) = (idle_until, state.usage.usage_of_job(job)) else { return };
    let length_ns = until.0.saturating_sub(open.sample_began_at.0);
    if length_ns < LONG_SAMPLE_NS || open.slow_scans > 0 {
        return;
    }
    add_held_core_time(state, job, until);
    if let Some(open) = state.usage.usage_of_job_mut(job) {
        let sample = UsageSample { length_ns, ..open.take_held_times(length_ns) };
        open.usage.add_sample(&sample);
        open.sample_began_at = until;
    }
}

/// Writes the usage of a job to the journal (the file with which a restarted daemon restores its state), if the last
/// record is at least [`RECORD_INTERVAL_NS`] old. On a machine with 100 jobs or more, the interval is longer. Does
/// nothing if no usage of the job is recorded.
fn journal_usage(draft: &mut CycleDraft<'_>, job: &JobId) {
    let now = draft.now.since_boot;
    // The records of very many jobs would make the journal grow fast.
    let interval_ns = RECORD_INTERVAL_NS * (1 + draft.state.jobs.len() as u64 / 100);
    let Some(open) = draft.state.usage.usage_of_job_mut(job) else { return };
    if now.0.saturating_sub(open.recorded_at.0) < interval_ns {
        return;
    }
    open.recorded_at = now;
    if let Some(usage) = draft.state.usage.journal_usage_of(job) {
        draft.out.records.push(Record::Usage { job: job.clone(), usage: Box::new(usage) });
    }
}

/// Makes the report about the resource use of `job`, which has ended or was released, and removes the usage of the job
/// from the state.
pub(crate) fn report_ended_job(draft: &mut CycleDraft<'_>, job: &Job) {
    // The last CPU time is read after the end of the job: a short sample would show more than the job used at once.
    let open = draft.state.usage.usage_of_job(&job.id);
    let has_samples = open.is_some_and(|open| open.usage.sampled_with_pus_ns() > 0);
    let now = draft.now;
    end_sample(draft.state, &job.id, now.since_boot, if has_samples { MIN_SAMPLE_NS } else { 1 });
    let open = draft.state.usage.take_job_usage(&job.id);
    let was_begun = open.is_some();
    let open = open.unwrap_or_default();
    let RunningJobUsage { is_unread, recovered_cpu_ns, .. } = open;
    let cpu_ns = open.cpu_ns();
    let mut usage = open.usage;
    usage.cpu_ns = cpu_ns;
    usage.end_serial_phase();
    let of_job = draft.out.events.iter().filter(|event| event.job.as_ref() == Some(&job.id));
    let violations = of_job.filter(|event| event.kind == EventKind::Violation).count();
    usage.violations += u32::try_from(violations).unwrap_or(u32::MAX);
    let wall_ns = match usage.began_at {
        // The time at which the job ended is unknown. Its usage is known until the last reading.
        began_at if is_unread => match usage.read_until.0.saturating_sub(began_at.0) {
            0 => usage.sampled_ns,
            wall_ns => wall_ns,
        },
        Nanos(0) => millis_between(job.detected_at, now.wall_clock).saturating_mul(1_000_000),
        began_at => now.since_boot.0.saturating_sub(began_at.0),
    };
    let incomplete = match (was_begun, is_unread, recovered_cpu_ns) {
        (false, ..) => Some("pjwd was restarted before it recorded what the job used"),
        (true, true, _) => Some("the job ended while pjwd was not running"),
        (true, false, Some(_)) => {
            Some("pjwd was restarted while the job ran: what it did meanwhile is known in part")
        }
        (true, false, None) => None,
    };
    draft.out.reports.push(JobReport {
        id: job.id.clone(),
        owner: job.owner,
        cpus: job.grant.as_ref().map_or(open.cpus, |grant| grant.cpus.clone()),
        is_provision: job.provision.is_some(),
        is_borrower: job.is_borrower(),
        started: job.detected_at,
        ended: now.wall_clock,
        wall_ns,
        usage,
        incomplete_reason: incomplete.map(ToOwned::to_owned),
    });
}

/// Returns the time from `from` to `to` in ms. 0 if `to` is earlier, because the clock was set back.
fn millis_between(from: UnixMillis, to: UnixMillis) -> u64 {
    u64::try_from(to.0.saturating_sub(from.0)).unwrap_or(0)
}
