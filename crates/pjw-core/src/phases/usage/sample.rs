//! The end of a usage sample: the resource use of a job in one interval.
//!
//! These functions are not in the module of the phase `usage`, because that module uses the draft of a cycle, and the
//! draft uses these functions.

use crate::basics::{Nanos, Pid};
use crate::phases::held::add_held_core_time;
use crate::phases::usage::hot_threads::HotThreads;
use crate::state::WardenState;
use crate::terms::{JobId, Observed, Ownership, ScanScope, Snapshot, UsageSample};

/// Ends the usage sample of a job (its resource use in one interval) if the job begins or ceases to hold cores. A job
/// holds cores if it has a grant and is not frozen (stopped). `next` is the ownership of the next grant, or `None` if
/// the job will have no grant. Must be called before the grant changes.
///
/// `seen` is the scan of this cycle. If it did not read each active process of the job, the CPU time until now is not
/// known, and the sample goes on. Later, [`JobUsage::add_sample`] divides the CPU time of this sample in proportion to
/// the time with cores and the time without them.
///
/// [`JobUsage::add_sample`]: crate::terms::JobUsage::add_sample
pub(crate) fn end_sample_if_held_changes(
    state: &mut WardenState,
    seen: &Snapshot,
    job: &JobId,
    next: Option<Ownership>,
) {
    let before = state.grant_of(job).map(|grant| grant.ownership);
    let [held, holds] = [before, next].map(|grant| grant.is_some_and(|it| it != Ownership::Frozen));
    if held != holds && has_read_active_processes(state, seen, job) {
        end_sample(state, job, seen.taken_at.since_boot, 1);
    }
}

/// Returns whether the scan `seen` of this cycle read each active process of `job` (a process that recently ran or
/// waited for a PU), or found that it has ended. A new process, whose threads no scan has read yet, need not be read:
/// it has used hardly any CPU time.
pub(super) fn has_read_active_processes(state: &WardenState, seen: &Snapshot, job: &JobId) -> bool {
    let members = &state.members;
    let is_read = |pid: &Pid| match seen.processes.get(pid) {
        Some(Observed::Present(process)) => process.threads.is_some(),
        Some(Observed::Gone) => true,
        None => seen.scope == ScanScope::Full,
    };
    let is_new = |pid: &Pid| members.get(pid).is_some_and(|member| member.threads.is_empty());
    members.active_pids_of(job).all(|pid| is_read(&pid) || is_new(&pid))
}

/// Ends the usage sample of `job` at the time `now` of this cycle, in ns since boot. Adds the sample to the usage of
/// the job, and begins the next sample. Does nothing if the sample is shorter than `min_ns` ns, or if no usage of the
/// job is recorded. After a restart of the daemon, only begins the first sample.
pub(super) fn end_sample(state: &mut WardenState, job: &JobId, now: Nanos, min_ns: u64) {
    let Some(open) = state.usage.usage_of_job(job) else { return };
    if open.sample_began_at == Nanos(0) {
        // An earlier daemon collected the samples before.
        if let Some(open) = state.usage.usage_of_job_mut(job) {
            (open.sample_began_at, open.sample_cpu_ns, open.sample_wait_ns) = (now, 0, 0);
        }
        return;
    }
    let length_ns = now.0.saturating_sub(open.sample_began_at.0);
    if length_ns < min_ns.max(1) {
        return;
    }
    let (cpu_ns, wait_ns) = (open.sample_cpu_ns, open.sample_wait_ns);
    add_held_core_time(state, job, now);
    let hot = HotThreads::of_job(state, job);
    let (hot_threads, has_bound_waiters) = (hot.count, hot.has_bound_waiters());
    let cpus = state.grant_of(job).map(|grant| grant.cpus.clone());
    if let Some(open) = state.usage.usage_of_job_mut(job) {
        let held = open.take_held_times(length_ns);
        let sample = UsageSample { length_ns, cpu_ns, wait_ns, hot_threads, has_bound_waiters, ..held };
        open.usage.add_sample(&sample);
        (open.sample_began_at, open.sample_cpu_ns, open.sample_wait_ns) = (now, 0, 0);
        open.slow_scans = 0;
        open.cpus = cpus.unwrap_or_else(|| core::mem::take(&mut open.cpus));
    }
}
