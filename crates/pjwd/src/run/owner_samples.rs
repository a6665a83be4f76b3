//! Samples of the owners of cores that may be lent: how many cores each owner uses, and on which lent PUs it runs.
//!
//! There are no samples while there is no job of the class besteffort. Without a lent core, the samples measure when cores
//! may be lent. While a core is lent, they measure when it must come back. Where BPF may be loaded, the monitor of lent PUs
//! reports the first time that an owner's thread runs on one of them. The next sample then follows after a settling time:
//! a wake-up that is over by then costs the borrower nothing.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;
use pjw_core::job::JobId;
use pjw_core::lending::{is_lending_due, why_not_lent};
use pjw_core::policy::Policy;
use pjw_core::state::WardenState;
use pjw_core::state::lending::cores_in_use;
use pjw_core::time::Nanos;
use pjw_linux::bpf::LentCpuMonitor;
use pjw_linux::sys::cpu_time::CpuTimeSampler;
use tracing::{debug, info};

/// The time between two samples while a core is lent.
const INTERVAL_WHILE_LENT: Duration = Duration::from_millis(10);
/// The time between two samples while no core is lent.
const INTERVAL_BEFORE_LENDING: Duration = Duration::from_millis(100);
/// The time for which an owner's thread must run on a lent PU before the PU is taken back.
const SETTLING_TIME: Duration = Duration::from_millis(2);
/// The time over which the use of cores is averaged.
const AVERAGING_TIME: Duration = Duration::from_millis(100);
/// A shorter period than this says too little about the use of cores.
const MIN_PERIOD: Duration = Duration::from_micros(500);

/// An owner that uses fewer cores than this, on average, is idle.
const IDLE_CORES: f64 = 0.1;

/// The samples of all owners of lendable cores: how much CPU time each owner uses, and on which of its lent PUs it
/// runs.
#[derive(Debug, Default)]
pub struct OwnerSamples {
    owners: BTreeMap<JobId, Owner>,
    /// The time of the next sample. `None` while there is no borrower.
    next: Option<Instant>,
    monitor: Monitor,
    /// The PUs on which the monitor has seen an owner's thread, with the time at which the first was seen.
    reported: Option<(CpuSet, Instant)>,
}

#[derive(Debug, Default)]
struct Owner {
    sampler: CpuTimeSampler,
    sampled_at: Option<Instant>,
    /// The number of cores in use, averaged over [`AVERAGING_TIME`].
    average: f64,
}

impl Owner {
    /// The number of cores in use after a period in which the owner used this CPU time: that of the average use, or that of
    /// the period, if this is greater. A period that is too short to tell a demand from its fluctuations counts only for an
    /// owner that was idle before.
    fn cores_in_use(&mut self, cpu_time: Duration, period: Duration) -> u32 {
        let was_idle = self.average < IDLE_CORES;
        let used = cpu_time.as_secs_f64() / period.as_secs_f64();
        let weight = 1.0 - (-period.as_secs_f64() / AVERAGING_TIME.as_secs_f64()).exp();
        self.average += (used - self.average) * weight;
        let average = cores_in_use(AVERAGING_TIME.mul_f64(self.average), AVERAGING_TIME);
        let counts_by_itself = was_idle || period >= INTERVAL_WHILE_LENT;
        if counts_by_itself { average.max(cores_in_use(cpu_time, period)) } else { average }
    }
}

#[derive(Debug, Default)]
enum Monitor {
    /// It was not needed yet.
    #[default]
    Unloaded,
    /// It can't be loaded on this machine.
    Unavailable,
    Loaded(Box<LentCpuMonitor>),
}

impl OwnerSamples {
    /// Returns the time at which [`OwnerSamples::update`] is to be called next. `None` if no sample is needed.
    #[must_use]
    pub fn next_at(&self) -> Option<Instant> {
        self.next
    }

    /// Returns the descriptor that is readable when an owner's thread runs on a lent PU for the first time. `None` if
    /// no PU is monitored.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.monitor {
            Monitor::Loaded(monitor) if !monitor.lent().is_empty() => Some(monitor.fd()),
            _ => None,
        }
    }

    /// Samples the owners if a sample is due, and records their use in `state`. `now` and `since_boot` are the same time.
    /// `cpu_time_of` returns the CPU time of a process since its start, or `None` if the process has ended. Returns whether the
    /// lending then has to change, so that a cycle is due.
    pub fn update(
        &mut self,
        state: &mut WardenState,
        policy: &Policy,
        (now, since_boot): (Instant, Nanos),
        cpu_time_of: impl Fn(Pid) -> Option<Duration>,
    ) -> bool {
        if !state.jobs.has_borrowers() || why_not_lent(policy).is_some() {
            (self.next, self.reported) = (None, None);
            self.owners.clear();
            // Leaving cores, and cores that may no longer be lent, are taken back also without samples.
            return !state.pool.lent_cpus().is_empty() && is_lending_due(state, policy, since_boot);
        }
        self.read_monitor(now);
        if self.next.is_some_and(|next| now < next) {
            return false;
        }
        let lent = state.pool.lent_cpus();
        let runs_on = self.lasting_demand(now);
        self.sample(state, (now, since_boot), &runs_on, cpu_time_of);
        let interval = if lent.is_empty() { INTERVAL_BEFORE_LENDING } else { INTERVAL_WHILE_LENT };
        self.next = Some(now + interval);
        is_lending_due(state, policy, since_boot)
    }

    /// Lets the monitor watch the PUs that are lent, after a cycle.
    pub(super) fn watch(&mut self, lent: &CpuSet) {
        if let (Monitor::Unloaded, false) = (&self.monitor, lent.is_empty()) {
            self.monitor = match LentCpuMonitor::new(lent) {
                Ok(monitor) => {
                    debug!("wake-ups of owners on lent PUs are reported by BPF");
                    Monitor::Loaded(Box::new(monitor))
                }
                Err(error) => {
                    info!(
                        "owners of lent cores are sampled each 10 ms, because BPF can't report them: {error}"
                    );
                    Monitor::Unavailable
                }
            };
            return;
        }
        let Monitor::Loaded(monitor) = &mut self.monitor else { return };
        if monitor.lent() == lent {
            return;
        }
        let watched = monitor.set_lent(lent);
        if let Err(error) = watched.and_then(|()| monitor.rearm(lent)) {
            info!("owners of lent cores are sampled each 10 ms, because BPF can't report them: {error}");
            self.monitor = Monitor::Unavailable;
        }
    }

    /// Notes on which lent PUs an owner's thread has begun to run, and brings the next sample forward.
    fn read_monitor(&mut self, now: Instant) {
        let Monitor::Loaded(monitor) = &mut self.monitor else { return };
        let reported = monitor.take();
        if reported.is_empty() {
            return;
        }
        let (all, since) = self.reported.take().unwrap_or((CpuSet::new(), now));
        self.reported = Some((all.union(&reported), since));
        let settled = since + SETTLING_TIME;
        self.next = Some(self.next.map_or(settled, |next| next.min(settled)));
    }

    /// Returns the lent PUs on which owners' threads have run for most of the time since the monitor saw them, and lets the
    /// monitor report these PUs again.
    fn lasting_demand(&mut self, now: Instant) -> CpuSet {
        let Monitor::Loaded(monitor) = &mut self.monitor else { return CpuSet::new() };
        let Some((reported, since)) = self.reported.take() else { return CpuSet::new() };
        let period = now.saturating_duration_since(since).max(SETTLING_TIME);
        let most = period * 9 / 10;
        let run_times = monitor.run_times();
        let lasting = run_times.into_iter().filter(|(pu, ran)| reported.contains(*pu) && *ran >= most);
        let lasting = lasting.map(|(pu, _)| pu).collect();
        if let Err(error) = monitor.rearm(&reported) {
            info!("owners of lent cores are sampled each 10 ms, because BPF can't report them: {error}");
            self.monitor = Monitor::Unavailable;
        }
        lasting
    }

    fn sample(
        &mut self,
        state: &mut WardenState,
        (now, since_boot): (Instant, Nanos),
        runs_on: &CpuSet,
        cpu_time_of: impl Fn(Pid) -> Option<Duration>,
    ) {
        let ids: Vec<JobId> = state.jobs.owners_that_lend().map(|job| job.id.clone()).collect();
        self.owners.retain(|id, _| ids.binary_search(id).is_ok());
        for id in ids {
            let Some(grant) = state.grant_of(&id) else { continue };
            let core_count = state.topology.overlapping_core_count(&grant.cpus);
            let runs_on = runs_on.intersection(&grant.cpus);
            let owner = self.owners.entry(id.clone()).or_default();
            let period = owner.sampled_at.map(|at| now.saturating_duration_since(at));
            if period.is_some_and(|period| period < MIN_PERIOD) && runs_on.is_empty() {
                continue;
            }
            let cpu_time =
                owner.sampler.sample_with(state.members_of(&id).map(|member| member.id), &cpu_time_of);
            owner.sampled_at = Some(now);
            let Some(period) = period else { continue };
            let used = owner.cores_in_use(cpu_time, period);
            // The monitor also counts threads of other jobs and of the system.
            let runs_on = if cpu_time >= SETTLING_TIME * 4 / 5 { runs_on } else { CpuSet::new() };
            state.lending.record_use(&id, used, core_count, &runs_on, since_boot);
        }
    }
}
