//! The PUs (logical CPUs) on which pjwd itself runs.
//!
//! The first case that applies decides:
//! - The configuration has housekeeping PUs: pjwd runs there.
//! - Threads of pjwd have a real-time priority: pjwd runs on the PUs that no job holds, while there are any. On a held
//!   PU, a thread of the job would have to wait. A thread that lost the real-time priority for a moment runs where pjwd
//!   was started, because it may itself have to wait for a PU.
//! - Otherwise pjwd runs where it was started.
//!
//! In the last two cases, pjwd does not leave the mask with which it was started, as by `taskset` or `isolcpus=`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_core::state::pool::PuPool;
use pjw_linux::sys::affinity;
use tracing::{debug, warn};

/// The shortest time between two checks whether the event loop still has its mask.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The affinity masks of the threads of this daemon. [`DaemonMask::update_masks`] sets them.
#[derive(Debug)]
pub struct DaemonMask {
    binding: Binding,
    /// The mask of the event loop that the kernel showed after the last change. It has no PUs outside the daemon's
    /// cpuset. `None` if the mask could not be read.
    effective: Option<CpuSet>,
    /// The affinity mask that the daemon was started with. `None` if it was all PUs that it may have.
    start_mask: Option<CpuSet>,
    /// The time of the last check whether the event loop still has its mask.
    checked_at: Option<Instant>,
}

/// Where the threads of the daemon run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Binding {
    /// The PUs to which the threads are bound. `None` if they run where the daemon was started.
    cpus: Option<CpuSet>,
    /// The threads that run where the daemon was started in any case.
    exempt: BTreeSet<Tid>,
}

impl DaemonMask {
    /// Records the affinity mask with which pjwd was started. Then binds this thread to the PUs in `housekeeping`
    /// (logical CPUs that are reserved for the system). If `housekeeping` is empty, the mask stays. Must be called
    /// before the daemon starts other threads, because these inherit the mask. If the thread can't be bound, logs the
    /// error.
    #[must_use]
    pub fn bind_at_start(housekeeping: &CpuSet) -> Self {
        let start_mask = narrow_start_mask();
        if !housekeeping.is_empty()
            && let Err(errno) = affinity::set_mask(affinity::own_thread(), housekeeping)
        {
            warn!("pjwd can't bind itself to the housekeeping PUs {housekeeping}: {errno}");
        }
        Self {
            start_mask,
            binding: Binding {
                cpus: Some(housekeeping.clone()).filter(|cpus| !cpus.is_empty()),
                exempt: BTreeSet::new(),
            },
            effective: affinity::get_mask(affinity::own_thread()).ok(),
            checked_at: None,
        }
    }

    /// Sets the affinity masks of the daemon's threads, if the PUs (logical CPUs) on which the threads should run have
    /// changed. The first case that applies determines these PUs:
    ///
    /// 1. The online housekeeping PUs (reserved for the system), if there are any.
    /// 2. The free PUs in the start mask, if a thread of the daemon has the real-time priority and such a PU is free.
    ///    The start mask is the affinity mask with which pjwd was started.
    /// 3. The start mask.
    ///
    /// `pool` has the housekeeping PUs and the PUs that jobs hold. `threads_without_priority` contains the threads that
    /// have lost the real-time priority because they used too much CPU time
    /// ([`RealtimePriority::lowered_threads`](super::realtime::RealtimePriority::lowered_threads)). In case 2, these
    /// threads get the start mask. `threads_without_priority` is `None` if no thread has the real-time priority.
    ///
    /// Must be called before each sleep of the event loop. `now` is the current time. In the cases 1 and 2, this
    /// function also checks the mask of the event loop, at most once per second. If the mask is no longer as set, sets
    /// all masks again.
    pub fn update_masks(
        &mut self,
        pool: &PuPool,
        threads_without_priority: Option<BTreeSet<Tid>>,
        now: Instant,
    ) {
        let binding = self.wanted_binding(pool, threads_without_priority);
        if binding == self.binding && !self.is_mask_lost(now) {
            return;
        }
        self.checked_at = Some(now);
        let threads = match affinity::own_threads() {
            Ok(threads) => threads,
            Err(error) => return debug!("pjwd stays on its PUs: {error}"),
        };
        for tid in threads {
            let cpus = binding.cpus.as_ref().filter(|_| !binding.exempt.contains(&tid));
            let bound = match self.set_mask(tid, cpus) {
                // None of the PUs is in the daemon's cpuset. With its earlier mask, the thread could stay on a job's
                // PU.
                Err(Errno::EINVAL) => self.set_mask(tid, None),
                bound => bound,
            };
            if let Err(errno) = bound {
                debug!("the thread {tid} of pjwd stays on its PUs: {errno}");
            }
        }
        self.binding = binding;
        self.effective = affinity::get_mask(affinity::own_thread()).ok();
    }

    /// Binds a thread to `cpus`, or lets it run where the daemon was started.
    fn set_mask(&self, tid: Tid, cpus: Option<&CpuSet>) -> Result<(), Errno> {
        match cpus.or(self.start_mask.as_ref()) {
            Some(cpus) => affinity::set_mask(tid, cpus),
            None => affinity::set_full_mask(tid),
        }
    }

    /// Returns the PUs to which the daemon's threads are to be bound, and the threads that are exempt from it. The
    /// start mask is the affinity mask with which the daemon was started. The first of these cases that applies
    /// decides:
    ///
    /// 1. There are online housekeeping PUs (reserved for the system): all threads are bound to these.
    /// 2. No thread has the real-time priority (`threads_without_priority` is `None`): no thread is bound.
    /// 3. Otherwise, the threads are bound to the free PUs in the start mask, because a real-time thread would take
    ///    time from a job. The threads in `threads_without_priority` are exempt. No thread is bound if no such PU is
    ///    free, or if all online PUs are.
    fn wanted_binding(&self, pool: &PuPool, threads_without_priority: Option<BTreeSet<Tid>>) -> Binding {
        let online = pool.online_cpus();
        let housekeeping = pool.housekeeping_cpus().intersection(&online);
        if !housekeeping.is_empty() {
            return Binding { cpus: Some(housekeeping), exempt: BTreeSet::new() };
        }
        let Some(exempt) = threads_without_priority else { return Binding::default() };
        let free = pool.free_cpus().intersection(&online);
        let usable = self.start_mask.as_ref().map_or(free.clone(), |mask| free.intersection(mask));
        if usable.is_empty() || usable == online {
            return Binding::default();
        }
        Binding { cpus: Some(usable), exempt }
    }

    /// Returns whether the event loop is no longer bound: before Linux 6.2, a change of the daemon's cpuset resets
    /// masks. Reads the mask at most once a second, and returns false in between. `now` is the current time.
    fn is_mask_lost(&mut self, now: Instant) -> bool {
        if self.binding.cpus.is_none() {
            return false;
        }
        if self.checked_at.is_some_and(|at| now.saturating_duration_since(at) < CHECK_INTERVAL) {
            return false;
        }
        self.checked_at = Some(now);
        affinity::get_mask(affinity::own_thread()).ok() != self.effective
    }
}

/// Returns the affinity mask of this thread if it is narrower than the cpuset of the daemon allows. `None` if it is
/// not, or if this can't be found out. To find it out, starts a thread that requests all PUs: its mask then has all
/// PUs that the cpuset allows.
fn narrow_start_mask() -> Option<CpuSet> {
    let spawned = std::thread::Builder::new().spawn(|| {
        affinity::set_full_mask(affinity::own_thread())?;
        affinity::get_mask(affinity::own_thread())
    });
    let thread = spawned
        .inspect_err(|error| warn!("pjwd can't find out its own PUs: no thread can be started: {error}"))
        .ok()?;
    let mask = affinity::get_mask(affinity::own_thread()).ok()?;
    let widest_mask = thread.join().ok()?.ok()?;
    (mask != widest_mask).then_some(mask)
}

#[cfg(test)]
mod tests {
    use pjw_core::job::{JobId, JobSource};
    use pjw_core::testing::regular_topology;

    use super::*;

    #[test]
    fn only_a_thread_that_lost_its_priority_may_run_on_the_pus_of_jobs() {
        let cpus = |list: &str| list.parse::<CpuSet>().unwrap();
        let job = JobId::new(JobSource::Manual, "a").unwrap();
        let mut pool = PuPool::new(&regular_topology(1, 1, 1, 4, 1), &CpuSet::new());
        let start_mask = Some(cpus("1-3"));
        let mask = DaemonMask { binding: Binding::default(), effective: None, start_mask, checked_at: None };
        let lowered = BTreeSet::from([Tid(7)]);
        let wanted = |pool: &PuPool, lowered: Option<&BTreeSet<Tid>>| {
            let Binding { cpus, exempt } = mask.wanted_binding(pool, lowered.cloned());
            (cpus.map(|cpus| cpus.to_string()), exempt)
        };
        assert_eq!(pool.grant_available(&job, &cpus("0-1")), CpuSet::new());
        assert_eq!(wanted(&pool, None), (None, BTreeSet::new()), "no thread has a real-time priority");
        assert_eq!(wanted(&pool, Some(&BTreeSet::new())), (Some("2-3".into()), BTreeSet::new()));
        assert_eq!(wanted(&pool, Some(&lowered)), (Some("2-3".into()), lowered.clone()));
        assert_eq!(pool.grant_available(&job, &cpus("0-3")), CpuSet::new());
        assert_eq!(wanted(&pool, Some(&lowered)), (None, BTreeSet::new()), "no PU is free");
        pool.release(&job);
        pool.set_housekeeping(&cpus("0"));
        assert_eq!(wanted(&pool, Some(&lowered)), (Some("0".into()), BTreeSet::new()));
    }
}
