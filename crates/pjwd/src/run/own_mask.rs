//! The PUs (logical CPUs) on which pjwd itself runs.
//!
//! The first case that applies decides:
//! - The configuration has housekeeping PUs: pjwd runs there.
//! - The threads of pjwd have a real-time priority: pjwd runs on the PUs that no job holds, while there are any. On a
//!   held PU, a thread of the job would have to wait.
//! - Otherwise pjwd runs where it was started: a thread with the normal priority may itself have to wait for a PU.
//!
//! In the last two cases, pjwd does not leave the mask with which it was started, as by `taskset` or `isolcpus=`.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_core::state::pool::PuPool;
use pjw_linux::sys::affinity;
use tracing::{debug, warn};

/// The shortest time between two checks whether the event loop still has its mask.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The affinity mask of all threads of this daemon.
#[derive(Debug)]
pub struct DaemonMask {
    /// The PUs to which the threads are bound. `None` if they run where the daemon was started.
    bound_to: Option<CpuSet>,
    /// What the kernel has made of these PUs for the event loop: it leaves out those outside the daemon's cpuset.
    effective: Option<CpuSet>,
    /// The affinity mask that the daemon was started with. `None` if it was all PUs that it may have.
    start_mask: Option<CpuSet>,
    /// The time of the last check whether the event loop still has its mask.
    checked_at: Option<Instant>,
}

impl DaemonMask {
    /// Records the mask with which pjwd was started, and binds this thread to the PUs in `housekeeping`, if there are
    /// any. Must be called before the daemon starts other threads: they inherit the mask. A failure is logged.
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
            bound_to: Some(housekeeping.clone()).filter(|cpus| !cpus.is_empty()),
            effective: affinity::get_mask(affinity::own_thread()).ok(),
            checked_at: None,
        }
    }

    /// Binds all threads of the daemon to the PUs on which they are to run now. `pool` has the PUs that jobs hold.
    /// `is_realtime` says whether each thread that can have a real-time priority has it now. Must be called before each
    /// sleep of the event loop; `now` is the current time. Makes no system call if nothing has changed, except one each
    /// second.
    pub fn follow(&mut self, pool: &PuPool, is_realtime: bool, now: Instant) {
        let bound_to = self.wanted_mask(pool, is_realtime);
        if bound_to == self.bound_to && !self.is_lost(now) {
            return;
        }
        self.checked_at = Some(now);
        let threads = match affinity::own_threads() {
            Ok(threads) => threads,
            Err(error) => return debug!("pjwd stays on its PUs: {error}"),
        };
        for tid in threads {
            let bound = match self.set_mask(tid, bound_to.as_ref()) {
                // None of the PUs is in the daemon's cpuset. With its earlier mask, the thread could stay on a job's
                // PU.
                Err(Errno::EINVAL) => self.set_mask(tid, None),
                bound => bound,
            };
            if let Err(errno) = bound {
                debug!("the thread {tid} of pjwd stays on its PUs: {errno}");
            }
        }
        self.bound_to = bound_to;
        self.effective = affinity::get_mask(affinity::own_thread()).ok();
    }

    /// Binds a thread to `cpus`, or lets it run where the daemon was started.
    fn set_mask(&self, tid: Tid, cpus: Option<&CpuSet>) -> Result<(), Errno> {
        match cpus.or(self.start_mask.as_ref()) {
            Some(cpus) => affinity::set_mask(tid, cpus),
            None => affinity::set_full_mask(tid),
        }
    }

    /// The PUs to which the threads are to be bound. `None` if they are to run where the daemon was started.
    fn wanted_mask(&self, pool: &PuPool, is_realtime: bool) -> Option<CpuSet> {
        let online = pool.online_cpus();
        let housekeeping = pool.housekeeping_cpus().intersection(&online);
        if !housekeeping.is_empty() {
            return Some(housekeeping);
        }
        let free = pool.free_cpus().intersection(&online);
        let usable = self.start_mask.as_ref().map_or(free.clone(), |mask| free.intersection(mask));
        (is_realtime && !usable.is_empty() && usable != online).then_some(usable)
    }

    /// Whether the event loop is no longer bound: before Linux 6.2, a change of the daemon's cpuset resets masks. Looks
    /// once a second.
    fn is_lost(&mut self, now: Instant) -> bool {
        if self.bound_to.is_none() {
            return false;
        }
        if self.checked_at.is_some_and(|at| now.saturating_duration_since(at) < CHECK_INTERVAL) {
            return false;
        }
        self.checked_at = Some(now);
        affinity::get_mask(affinity::own_thread()).ok() != self.effective
    }
}

/// The affinity mask of this thread. `None` if it has all PUs that its cpuset allows: another thread that asks for all
/// gets the same.
fn narrow_start_mask() -> Option<CpuSet> {
    let widest = std::thread::spawn(|| {
        affinity::set_full_mask(affinity::own_thread())?;
        affinity::get_mask(affinity::own_thread())
    });
    let (mask, widest) = (affinity::get_mask(affinity::own_thread()).ok()?, widest.join().ok()?.ok()?);
    (mask != widest).then_some(mask)
}
