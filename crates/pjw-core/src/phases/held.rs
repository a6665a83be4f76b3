//! The cores that a job holds over time, for the report on the job.
//!
//! The cores of a borrower change many times between two samples. So each change of a grant adds the time before it.

use crate::basics::Nanos;
use crate::state::WardenState;
use crate::terms::{JobId, Ownership};

/// Returns two numbers for a job: the number of cores that the job holds, and the number of online PUs (logical CPUs)
/// that it holds. Both are 0 for a frozen job, although its grant still names the PUs that it had last. A job is frozen
/// while it can borrow no cores.
fn held_core_counts(state: &WardenState, job: &JobId) -> (u32, u32) {
    let is_frozen = state.grant_of(job).is_some_and(|grant| grant.ownership == Ownership::Frozen);
    let cpus = state.jobs.get(job).and_then(|job| job.online_granted_cpus(&state.pool.online_cpus()));
    let Some(cpus) = cpus.filter(|_| !is_frozen) else { return (0, 0) };
    (state.topology.overlapping_core_count(&cpus), u32::try_from(cpus.len()).unwrap_or(u32::MAX))
}

/// Adds the core time (number of held cores times duration) of a job to its present usage sample (its resource use
/// during a time interval), or the duration itself if the job holds no PU. Otherwise also stores how many cores and PUs
/// the job holds. The duration ends at `now`, in ns since boot. Must be called before each change of the grant, and
/// before the sample ends.
pub(crate) fn add_held_core_time(state: &mut WardenState, job: &JobId, now: Nanos) {
    let (cores, pus) = held_core_counts(state, job);
    if let Some(open) = state.usage.usage_of_job_mut(job).filter(|open| open.sample_began_at != Nanos(0)) {
        let since = open.held_until.max(open.sample_began_at);
        let length_ns = now.0.saturating_sub(since.0);
        open.sample_held_ns = open.sample_held_ns.saturating_add(u64::from(cores).saturating_mul(length_ns));
        if pus == 0 {
            open.sample_without_pus_ns = open.sample_without_pus_ns.saturating_add(length_ns);
        } else {
            open.last_held_counts = (cores, pus);
        }
        open.held_until = open.held_until.max(now);
    }
}
