//! The monitor of lent PUs on the simulated machine, in place of the BPF program of the daemon.
//!
//! The simulated kernel does not say on which PU a thread runs. Here, each busy thread runs on that PU of its mask that
//! has the fewest threads. A PU runs threads of its owner all the time, or not at all.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_linux::bpf::{LentCpuMonitorUnavailable, OwnerRunTime};
use pjw_sim::world::{SimMachine, TimeObserver};
use pjwd::run::owner_samples::LentCpuMonitorInterface;

/// The data of the simulated BPF program since the daemon started.
#[derive(Debug, Default)]
pub struct SimLentCpus {
    /// The lent PUs, each with the number of PUs of its owner.
    lent: BTreeMap<Pu, u32>,
    /// How long threads of the owner have run on each lent PU since it was armed.
    run_times: BTreeMap<Pu, Duration>,
    /// The lent PUs on which such a thread runs now.
    running: CpuSet,
    /// The PUs that were reported since they were armed.
    reported: CpuSet,
    /// The reports that the daemon has not read.
    unread: CpuSet,
    /// The use of each lent PU since it was lent. The daemon does not see it.
    uses: BTreeMap<Pu, LentCpuUse>,
}

/// How an owner uses a PU that it lends.
#[derive(Debug, Default, Clone, Copy)]
pub struct LentCpuUse {
    /// The time since the PU was lent.
    pub lent_for: Duration,
    /// The time for which threads of the owner have run on the PU since then.
    pub ran_for: Duration,
}

impl LentCpuUse {
    /// Whether threads of the owner have run on the PU or core practically all the time.
    pub fn is_in_use(&self) -> bool {
        self.ran_for * 100 >= self.lent_for * 99
    }
}

impl SimLentCpus {
    /// Whether the daemon has a report to read.
    pub fn has_report(&self) -> bool {
        !self.unread.is_empty()
    }

    /// The use of each lent PU since it was lent.
    pub fn uses(&self) -> &BTreeMap<Pu, LentCpuUse> {
        &self.uses
    }

    /// The lent PUs that run a thread which counts as their owner's: it is not at idle priority, and has no more PUs
    /// than the owner.
    fn pus_with_owner(&self, world: &SimMachine) -> CpuSet {
        let (mut threads_on, mut found) = (BTreeMap::<Pu, u32>::new(), CpuSet::new());
        if self.lent.is_empty() {
            return found;
        }
        let counts = |pu: Pu, mask: &CpuSet| {
            self.lent.get(&pu).is_some_and(|&owner_pus| mask.len() <= owner_pus as usize)
        };
        for process in world.processes.values().filter(|process| !process.is_kernel_thread) {
            if world.is_frozen(process) || world.has_idle_priority(process) {
                continue;
            }
            for thread in process.threads.values().filter(|thread| thread.is_busy) {
                let mask = world.effective_mask(process, thread);
                if !mask.iter().any(|pu| counts(pu, &mask)) {
                    continue;
                }
                let pu = mask.iter().min_by_key(|pu| threads_on.get(pu).copied().unwrap_or(0));
                let Some(pu) = pu else { continue };
                *threads_on.entry(pu).or_default() += 1;
                if counts(pu, &mask) {
                    found.insert(pu);
                }
            }
        }
        found
    }
}

impl TimeObserver for SimLentCpus {
    fn record_period(&mut self, world: &SimMachine, period: Duration) {
        self.running = self.pus_with_owner(world);
        for (&pu, lent) in &mut self.uses {
            lent.lent_for += period;
            lent.ran_for += if self.running.contains(pu) { period } else { Duration::ZERO };
        }
        for pu in self.running.iter() {
            *self.run_times.entry(pu).or_default() += period;
            if !self.reported.contains(pu) {
                self.reported.insert(pu);
                self.unread.insert(pu);
            }
        }
    }
}

/// The monitor as the daemon uses it.
#[derive(Debug)]
pub struct SimMonitor {
    seen: Arc<Mutex<SimLentCpus>>,
    lent: BTreeMap<Pu, u32>,
}

impl SimMonitor {
    pub fn new(seen: Arc<Mutex<SimLentCpus>>) -> Self {
        Self { seen, lent: BTreeMap::new() }
    }

    fn seen(&self) -> MutexGuard<'_, SimLentCpus> {
        self.seen.lock().unwrap()
    }
}

impl LentCpuMonitorInterface for SimMonitor {
    fn set_lent_pus(
        &mut self,
        lent: &BTreeMap<Pu, u32>,
        silent: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable> {
        let mut guard = self.seen();
        let seen = &mut *guard;
        let newly_silent: CpuSet = silent.iter().filter(|pu| !seen.lent.contains_key(pu)).collect();
        let stays = |pu: Pu| seen.lent.contains_key(&pu) && lent.contains_key(&pu);
        let run_time = |&pu: &Pu| {
            (pu, seen.run_times.get(&pu).copied().filter(|_| seen.lent.contains_key(&pu)).unwrap_or_default())
        };
        seen.reported = seen.reported.iter().filter(|&pu| stays(pu)).collect();
        seen.reported = seen.reported.union(&newly_silent);
        seen.unread = seen.unread.iter().filter(|&pu| stays(pu)).collect();
        seen.running = seen.running.iter().filter(|&pu| stays(pu)).collect();
        seen.run_times = lent.keys().map(run_time).collect();
        seen.uses = lent.keys().map(|pu| (*pu, seen.uses.get(pu).copied().unwrap_or_default())).collect();
        seen.lent.clone_from(lent);
        drop(guard);
        self.lent.clone_from(lent);
        Ok(())
    }

    fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        &self.lent
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_reported_pus(&mut self) -> CpuSet {
        std::mem::take(&mut self.seen().unread)
    }

    fn report_again(&mut self, cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        let mut seen = self.seen();
        let seen = &mut *seen;
        seen.reported = seen.reported.difference(cpus);
        seen.run_times.extend(cpus.iter().map(|pu| (pu, Duration::ZERO)));
        Ok(())
    }

    fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        let seen = self.seen();
        let time = |(&pu, &run_time)| OwnerRunTime { pu, run_time, is_running: seen.running.contains(pu) };
        seen.run_times.iter().map(time).collect()
    }
}
