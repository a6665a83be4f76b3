//! Samples of the owners of cores that may be lent: how many cores each owner uses, and on which lent PUs it runs.
//!
//! There are no samples while there is no job of the class besteffort. Without a lent core, the samples measure when
//! cores may be lent. While a core is lent, they measure when it must come back. Where BPF may be loaded, the monitor
//! of lent PUs measures the use of each lent core. It also reports the first time that a thread of an idle owner runs
//! on a lent PU. Two samples follow: one at once, and one after a settling time. A wake-up that is over by then costs
//! the borrower nothing.
//!
//! A report costs the owner some 20 us at its wake-up, because the kernel wakes up pjwd before the owner runs on. So
//! an owner that wakes up often is not reported each time: pjwd looks at the settling time whether it runs, which is
//! one system call, until the owner has not run on the PU for a while. An owner that is busy on its other cores, or was
//! busy just before the PU was lent, is not reported at all, because it is sampled anyway.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::Pid;
use pjw_core::job::JobId;
use pjw_core::lending::{reason_not_to_lend, would_change_loans};
use pjw_core::policy::Policy;
use pjw_core::state::WardenState;
use pjw_core::state::lending::{CoreUse, LentCoreSample, OwnerCpuSample, cores_wanted_by_waiting_threads};
use pjw_core::time::Nanos;
use pjw_linux::bpf::{LentCpuMonitorUnavailable, OwnerRunTime};
use pjw_linux::sys::cpu_time::CpuTimeSampler;
use tracing::{debug, info, trace};

mod monitor;
mod owner_runs;

pub use monitor::LentCpuMonitorInterface;
pub(super) use monitor::load_lent_cpu_monitor;

use self::owner_runs::OwnerRuns;
use crate::view::status::OwnerDemandDetection;

/// The time between two samples while a core is lent and the monitor reports the first thread of an idle owner.
const INTERVAL_WHILE_LENT: Duration = Duration::from_millis(10);
/// The same without the monitor. The CPU time of a running thread may be behind by a tick of the kernel, so that a
/// demand shows after up to 6 ms.
const INTERVAL_WITHOUT_MONITOR: Duration = Duration::from_millis(2);
/// The least time between two samples is this time for each thread of the sampled processes, because the kernel adds up
/// the times of all threads of a process. So the samples of very many threads take some percent of a PU.
const INTERVAL_PER_THREAD: Duration = Duration::from_micros(10);
/// The longest time between two samples while a core is lent, whatever the number of threads is.
const MAX_INTERVAL_WHILE_LENT: Duration = Duration::from_millis(100);
/// The time between two samples while no core is lent.
const INTERVAL_BEFORE_LENDING: Duration = Duration::from_millis(100);
/// The time between the report of an owner's thread on a lent PU and the sample that shows whether it still runs.
const SETTLING_TIME: Duration = Duration::from_millis(2);
/// The same without the monitor, after the first sample in which an idle owner has used CPU time.
const SETTLING_TIME_WITHOUT_MONITOR: Duration = Duration::from_millis(1);
/// The number of samples at this short distance after a report while the owner runs. Other programs may run on lent
/// PUs for long.
const MAX_SETTLING_SAMPLES: u32 = 5;
/// The time after which a monitor that could not be used is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// A shorter period than this says too little about the use of cores.
const MIN_PERIOD: Duration = Duration::from_micros(500);

/// Measures how many of its cores each job uses, so that pjwd can lend idle cores to other jobs. A job whose idle
/// cores can be lent is an owner. Only jobs of the class besteffort borrow cores, and they have no cores of their
/// own. pjwd uses the measured values to decide when to lend cores, and when to take lent cores back. Nothing is
/// measured while no job can borrow cores.
#[derive(Debug, Default)]
pub struct OwnerCpuSampler {
    /// The measured jobs.
    owners: BTreeMap<JobId, Owner>,
    /// The number of threads of the processes in the last sample.
    thread_count: u32,
    /// The time of the last sample.
    sampled_at: Option<Instant>,
    /// The time of the next sample. `None` while no job can borrow cores.
    next: Option<Instant>,
    /// Whether the next sample comes earlier than usual, because an idle owner has begun to use its cores. The next
    /// sample shows whether the owner still uses them.
    is_settling: bool,
    /// The time of the first sample after the last report of the monitor. `None` before the first report.
    reported_at: Option<Instant>,
    /// The number of samples since the monitor, or a sample, last showed that an idle owner began to use its cores.
    settling_samples: u32,
    /// Whether an idle owner used CPU time, by the last sample that did not come early (`is_settling`).
    has_shown_demand: bool,
    /// The BPF program that reports the lent PUs on which threads of their owner run, if it can be loaded.
    monitor: Monitor,
    /// The lent PUs that the monitor has reported, or that were lent while their owner was busy. The monitor does not
    /// report them before [`LentCpuMonitorInterface::report_again`].
    reported: CpuSet,
    /// The PUs of the owners that were busy (not idle) at the last sample.
    pus_of_busy_owners: CpuSet,
    /// For each lent PU, what the monitor returned at the last sample ([`LentCpuMonitorInterface::owner_run_times`]).
    run_times: BTreeMap<Pu, OwnerRunTime>,
    /// What is known of the threads of owners on lent PUs since the last look at the monitor.
    runs: OwnerRuns,
    /// Whether an idle owner has run a short time ago on a PU that was reported, and does not run now.
    is_watching: bool,
    /// The time at which the next sample is due in any case, while `is_watching`.
    sample_due: Option<Instant>,
    /// The time at which the monitor began to measure each lent PU.
    measured_since: BTreeMap<Pu, Instant>,
}

/// The measurements of one owner.
#[derive(Debug, Default)]
struct Owner {
    sampler: CpuTimeSampler,
    core_use: CoreUse,
}

/// The state of the BPF monitor of lent PUs.
#[derive(Debug, Default)]
enum Monitor {
    /// The monitor was not needed yet.
    #[default]
    Unloaded,
    /// The monitor can't be used.
    Unavailable {
        /// The reason, as text for users.
        why: String,
        /// The time at which the reason was found.
        since: Instant,
    },
    Loaded(Box<dyn LentCpuMonitorInterface>),
}

impl OwnerCpuSampler {
    /// Makes a sampler for tests with a simulated machine. `monitor` simulates the BPF program that reports when a job
    /// runs on CPUs that it lends to other jobs. `None` simulates a machine on which no BPF program can be loaded.
    #[must_use]
    pub fn with_monitor(monitor: Option<Box<dyn LentCpuMonitorInterface>>) -> Self {
        let unavailable =
            || Monitor::Unavailable { why: "this machine is simulated".to_owned(), since: Instant::now() };
        Self { monitor: monitor.map_or_else(unavailable, Monitor::Loaded), ..Self::default() }
    }

    /// Returns the time at which [`OwnerCpuSampler::measure_if_due`] must be called next. `None` if nothing is to be
    /// measured, because no job can borrow cores.
    #[must_use]
    pub fn next_measurement_at(&self) -> Option<Instant> {
        self.next
    }

    /// Returns the file descriptor that is readable when a thread of an owner begins to run on a PU (logical CPU) that
    /// the owner lends. An owner is a job that lends cores to other jobs. `None` if the BPF monitor is not loaded, or
    /// if no PU is lent.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.monitor {
            Monitor::Loaded(monitor) if !monitor.lent_pus().is_empty() => monitor.fd(),
            _ => None,
        }
    }

    /// Measures how many cores each owner (a job whose idle cores can be lent to other jobs) uses, if a measurement
    /// is due. Records the result in `state`. Returns whether a cycle (scan, decision and changes) must run now,
    /// because cores must be lent or taken back.
    ///
    /// `now` and `since_boot` are the current time on two clocks: CLOCK_MONOTONIC, and CLOCK_BOOTTIME in ns since
    /// boot. `cpu_time_of` returns the CPU time of a process since its start, or `None` if the process has ended.
    pub fn measure_if_due(
        &mut self,
        state: &mut WardenState,
        policy: &Policy,
        (now, since_boot): (Instant, Nanos),
        cpu_time_of: impl Fn(Pid) -> Option<Duration>,
    ) -> bool {
        if !state.jobs.has_borrowers() || reason_not_to_lend(policy).is_some() {
            (self.next, self.sampled_at) = (None, None);
            (self.is_settling, self.settling_samples, self.has_shown_demand) = (false, 0, false);
            self.owners.clear();
            self.pus_of_busy_owners = CpuSet::new();
            // Leaving cores, and cores that may no longer be lent, are taken back also without samples.
            return !state.pool.lent_cpus().is_empty() && would_change_loans(state, policy, since_boot);
        }
        let is_reported = self.read_monitor() && !self.is_settling;
        if !is_reported && self.next.is_some_and(|next| now < next) {
            return false;
        }
        let is_found_running = !is_reported && self.is_watching && self.is_owner_running(now);
        if self.is_watching
            && !is_reported
            && !is_found_running
            && self.sample_due.is_some_and(|due| now < due)
        {
            (_, self.is_watching) = self.rearm_idle_pus(now);
            self.next =
                self.sample_due.map(|due| if self.is_watching { due.min(now + SETTLING_TIME) } else { due });
            return false;
        }
        if is_reported {
            self.reported_at = Some(now);
        }
        let shows_demand = self.sample(state, (now, since_boot), cpu_time_of);
        let begins = is_reported || is_found_running || (shows_demand && !self.has_shown_demand);
        let (still_runs, has_run) = match self.monitor {
            Monitor::Loaded(_) if is_reported => (false, false),
            Monitor::Loaded(_) => self.rearm_idle_pus(now),
            // While a thread runs, its CPU time may change at the kernel's ticks only.
            Monitor::Unloaded | Monitor::Unavailable { .. } => (self.is_settling, false),
        };
        if !self.is_settling {
            self.has_shown_demand = shows_demand;
        }
        self.settling_samples = if begins { 1 } else { self.settling_samples.saturating_add(1) };
        self.is_settling = begins || (still_runs && self.settling_samples <= MAX_SETTLING_SAMPLES);
        self.is_watching = !self.is_settling && has_run;
        let interval = match (self.is_settling, state.pool.lent_cpus().is_empty()) {
            // This sample comes in time, however many threads there are.
            (true, _) if is_reported => SETTLING_TIME,
            (true, _) => self.settling_time().max(self.least_interval()),
            (false, false) => self.interval_while_lent(),
            (false, true) => INTERVAL_BEFORE_LENDING,
        };
        self.sample_due = Some(now + interval);
        let interval = if self.is_watching { interval.min(SETTLING_TIME) } else { interval };
        self.next = Some(now + interval);
        would_change_loans(state, policy, since_boot)
    }

    /// Sets the PUs (logical CPUs) that jobs lend to other jobs at the time `now`. Must be called after each cycle
    /// (scan, decision and changes). While PUs are lent, the measurements are more frequent: normally every 10 ms or
    /// less.
    ///
    /// The keys of `lent` are the lent PUs. Each value is the number of all PUs that the lending job (the owner) holds
    /// ([`PuPool::lent_cpus_with_owner_pu_counts`](pjw_core::state::pool::PuPool::lent_cpus_with_owner_pu_counts)). A
    /// thread that may run on more PUs does not count as a thread of the owner.
    pub fn set_lent_pus(&mut self, lent: &BTreeMap<Pu, u32>, now: Instant) {
        if !lent.is_empty() {
            let latest = now + self.interval_while_lent();
            self.next = self.next.map(|next| next.min(latest));
        }
        self.reported = self.reported.iter().filter(|pu| lent.contains_key(pu)).collect();
        let Monitor::Loaded(monitor) = &mut self.monitor else { return };
        if monitor.lent_pus() == lent {
            return;
        }
        let newly_lent: CpuSet =
            lent.keys().filter(|pu| !monitor.lent_pus().contains_key(pu)).copied().collect();
        let silent = newly_lent.intersection(&self.pus_of_busy_owners);
        if let Err(error) = monitor.set_lent_pus(lent, &silent) {
            return self.set_unavailable(&error, now);
        }
        self.reported = self.reported.union(&silent);
        self.measured_since.retain(|pu, _| lent.contains_key(pu));
        self.run_times.retain(|pu, _| lent.contains_key(pu));
        self.runs.retain(|pu| lent.contains_key(&pu));
        for &pu in lent.keys() {
            self.measured_since.entry(pu).or_insert(now);
        }
    }

    /// Loads the BPF monitor, which reports when a job runs on PUs (logical CPUs) that it lends to other jobs. `load`
    /// loads the monitor. Does nothing if the monitor is loaded already, or if no job can borrow cores. `now` is the
    /// current time.
    ///
    /// After a failure, the next attempt is made when [`RETRY_INTERVAL`] has passed and no core is lent (`is_any_lent`
    /// is false). Loading takes about 50 ms. In this time pjwd would not notice that a job needs its lent cores back.
    pub(super) fn load_monitor_if_due(
        &mut self,
        now: Instant,
        is_any_lent: bool,
        load: impl FnOnce() -> Result<Box<dyn LentCpuMonitorInterface>, LentCpuMonitorUnavailable>,
    ) {
        let is_due = match &self.monitor {
            Monitor::Unloaded => true,
            Monitor::Unavailable { since, .. } => {
                !is_any_lent && now.saturating_duration_since(*since) >= RETRY_INTERVAL
            }
            Monitor::Loaded(_) => false,
        };
        if !is_due || self.next.is_none() {
            return;
        }
        match load() {
            Ok(monitor) => {
                debug!("wake-ups of owners on lent PUs are reported by BPF");
                self.monitor = Monitor::Loaded(monitor);
            }
            Err(error) => self.set_unavailable(&error, now),
        }
    }

    /// Returns how pjwd detects that an owner (a job that lends cores) needs its lent cores back: by the BPF monitor,
    /// or by samples of the owner's CPU time.
    pub(super) fn demand_detection(&self) -> OwnerDemandDetection {
        match &self.monitor {
            Monitor::Unloaded => OwnerDemandDetection::NotLoaded,
            Monitor::Unavailable { why, .. } => OwnerDemandDetection::Sampled(why.clone()),
            Monitor::Loaded(_) => OwnerDemandDetection::Reported,
        }
    }

    /// Returns the shortest interval between two samples: the cost of a sample grows with the number of threads.
    fn least_interval(&self) -> Duration {
        (INTERVAL_PER_THREAD * self.thread_count).min(MAX_INTERVAL_WHILE_LENT)
    }

    /// Returns the time after the first sign that an owner runs, until the sample that shows whether it still runs.
    fn settling_time(&self) -> Duration {
        match self.monitor {
            Monitor::Unavailable { .. } => SETTLING_TIME_WITHOUT_MONITOR,
            Monitor::Unloaded | Monitor::Loaded(_) => SETTLING_TIME,
        }
    }

    /// Returns the time between two samples while a core is lent. Longer if the monitor reports owners that run.
    fn interval_while_lent(&self) -> Duration {
        let least = match self.monitor {
            Monitor::Unavailable { .. } => INTERVAL_WITHOUT_MONITOR,
            Monitor::Unloaded | Monitor::Loaded(_) => INTERVAL_WHILE_LENT,
        };
        least.max(self.least_interval())
    }

    /// Reads on which lent PUs an owner's thread has begun to run. Returns whether there are any.
    fn read_monitor(&mut self) -> bool {
        let Monitor::Loaded(monitor) = &mut self.monitor else { return false };
        let reported = monitor.take_reported_pus();
        self.reported = self.reported.union(&reported);
        !reported.is_empty()
    }

    /// Lets the monitor report again the lent PUs of idle owners (jobs that lend them) on which the owner has not run
    /// recently ([`OwnerRuns::has_run_recently`]). The PUs of other owners are not reported again: they are sampled
    /// anyway, and each report would cost the owner CPU time.
    ///
    /// If the owners have so many threads that the samples must be farther apart, reports each PU again on which no
    /// thread of the owner runs, but only when the least time between two samples has passed since the last report.
    ///
    /// Returns whether a thread of an idle owner runs on a PU that was reported, and whether an idle owner has run on
    /// such a PU a short time ago.
    fn rearm_idle_pus(&mut self, now: Instant) -> (bool, bool) {
        let has_many_threads = self.least_interval() > SETTLING_TIME;
        let is_due = self.reported_at.is_none_or(|at| now >= at + self.least_interval());
        let Monitor::Loaded(monitor) = &mut self.monitor else { return (false, false) };
        let reported = self.reported.difference(&self.pus_of_busy_owners);
        let running = reported.intersection(&self.runs.running);
        let stopped = reported.difference(&running);
        let is_recent = |pu: &Pu| !has_many_threads && self.runs.has_run_recently(*pu, now);
        let quiet: CpuSet = stopped.iter().filter(|pu| !is_recent(pu)).collect();
        if is_due && !quiet.is_empty() {
            self.reported = self.reported.difference(&quiet);
            self.run_times.retain(|pu, _| !quiet.contains(*pu));
            self.runs.retain(|pu| !quiet.contains(pu));
            if let Err(error) = monitor.report_again(&quiet) {
                self.set_unavailable(&error, now);
            }
        }
        (!running.is_empty(), quiet != stopped)
    }

    /// Looks at the monitor, and returns whether a thread of an owner runs on a lent PU that was reported.
    fn is_owner_running(&mut self, now: Instant) -> bool {
        let Monitor::Loaded(monitor) = &self.monitor else { return false };
        self.runs.update(&monitor.owner_run_times(), now);
        self.runs.running.intersects(&self.reported)
    }

    /// Samples the owners from now on. The log has the reason once, however often it is found again.
    fn set_unavailable(&mut self, error: &LentCpuMonitorUnavailable, now: Instant) {
        let why = error.to_string();
        if !matches!(&self.monitor, Monitor::Unavailable { why: before, .. } if *before == why) {
            info!("owners of lent cores are sampled each 2 ms, because BPF can't report them: {why}");
        }
        self.monitor = Monitor::Unavailable { why, since: now };
        self.measured_since.clear();
    }

    /// Returns for each lent PU how long threads of its owner (the job that lends it) have run there since the last
    /// call. Empty if the monitor is not loaded. Stores the present run times for the next call. `now` is the present
    /// time.
    fn run_times_since_last(&mut self, now: Instant) -> BTreeMap<Pu, OwnerRunTime> {
        let Monitor::Loaded(monitor) = &self.monitor else { return BTreeMap::new() };
        if monitor.lent_pus().is_empty() {
            self.run_times.clear();
            return BTreeMap::new();
        }
        let times: Vec<OwnerRunTime> = monitor.owner_run_times();
        self.runs.update(&times, now);
        let times = times.into_iter().filter(|time| monitor.lent_pus().contains_key(&time.pu));
        let mut since_last = BTreeMap::new();
        for time in times {
            // No time is known of a PU that was armed again: its time counts from zero.
            let last = self.run_times.get(&time.pu).map(|last| last.run_time).unwrap_or_default();
            // The program may be in the middle of a change, so that a part of the time is missing in this reading.
            let run_time = time.run_time.max(last);
            since_last.insert(time.pu, OwnerRunTime { run_time: run_time - last, ..time });
            self.run_times.insert(time.pu, OwnerRunTime { run_time, ..time });
        }
        since_last
    }

    /// Measures the CPU time of all owners (jobs whose idle cores can be lent), and records in `state` how many cores
    /// each owner uses. Does nothing if the last measurement was less than [`MIN_PERIOD`] ago. `cpu_time_of` returns
    /// the CPU time of a process since its start.
    ///
    /// Returns true if an idle owner that lends a core has used CPU time since the last measurement, and the monitor
    /// can't be used to report this.
    fn sample(
        &mut self,
        state: &mut WardenState,
        (now, since_boot): (Instant, Nanos),
        cpu_time_of: impl Fn(Pid) -> Option<Duration>,
    ) -> bool {
        let period = self.sampled_at.map(|at| now.saturating_duration_since(at));
        if period.is_some_and(|period| period < MIN_PERIOD) {
            return false;
        }
        self.sampled_at = Some(now);
        let run_times = self.run_times_since_last(now);
        let ids: Vec<JobId> = state.jobs.guaranteed_jobs().map(|job| job.id.clone()).collect();
        self.owners.retain(|id, _| ids.binary_search(id).is_ok());
        self.thread_count = 0;
        self.pus_of_busy_owners = CpuSet::new();
        let lent_cpus = state.pool.lent_cpus();
        let has_no_monitor = matches!(self.monitor, Monitor::Unavailable { .. });
        let mut shows_demand = false;
        for id in ids {
            let Some(grant) = state.grant_of(&id) else { continue };
            let core_count = state.topology.overlapping_core_count(&grant.cpus);
            let lent =
                self.lent_core_samples(state, &grant.cpus, &run_times, (now, period.unwrap_or_default()));
            let has_smt = grant.cpus.len() > core_count as usize;
            let is_new = !self.owners.contains_key(&id);
            let owner = self.owners.entry(id.clone()).or_default();
            let count = |threads: usize| u32::try_from(threads).unwrap_or(u32::MAX);
            let processes = state.members_of(&id).map(|member| {
                self.thread_count = self.thread_count.saturating_add(count(member.threads.len()).max(1));
                member.id
            });
            let cpu_time = owner.sampler.sample(processes, &cpu_time_of);
            let Some(period) = period.filter(|_| !is_new) else { continue };
            let sample = OwnerCpuSample { period, cpu_time, lent: &lent, has_smt };
            shows_demand |= has_no_monitor
                && owner.core_use.is_idle()
                && !cpu_time.is_zero()
                && grant.cpus.intersects(&lent_cpus);
            let mut used = owner.core_use.add(&sample);
            // The last scan may be a second old, so what it shows of an owner that is idle now is over.
            if !owner.core_use.is_idle() {
                self.pus_of_busy_owners = self.pus_of_busy_owners.union(&grant.cpus);
                let wanted = wanted_by_waiting_threads(state, &id, &grant.cpus, has_smt);
                used.in_use = used.in_use.max(wanted);
                used.too_busy_to_lend = used.too_busy_to_lend.max(wanted);
            }
            trace!(owner = %id, ?period, ?cpu_time, lent = ?lent, ?used, "sample of an owner");
            state.lending.record_use(&id, used, core_count, since_boot);
        }
        shows_demand
    }

    /// Returns one sample for each core that an owner (a job) lends and that the BPF monitor measures. `grant` has
    /// the PUs of the owner. `run_times` has the CPU time that the owner used on each lent PU since the last sample.
    /// The samples end at `now` and cover `period`. For a core that the monitor began to measure later, they cover
    /// only the time since then.
    fn lent_core_samples(
        &self,
        state: &WardenState,
        grant: &CpuSet,
        run_times: &BTreeMap<Pu, OwnerRunTime>,
        (now, period): (Instant, Duration),
    ) -> Vec<LentCoreSample> {
        let mut cores: BTreeMap<Pu, LentCoreSample> = BTreeMap::new();
        for time in run_times.values().filter(|time| grant.contains(time.pu)) {
            let first = state.topology.core_cpus(time.pu).first().unwrap_or(time.pu);
            let since = self.measured_since.get(&time.pu);
            let measured = since.map_or(period, |&since| now.saturating_duration_since(since));
            let period = measured.min(period);
            let empty = || LentCoreSample { core: CpuSet::new(), period, cpu_time: Duration::ZERO };
            let sample = cores.entry(first).or_insert_with(empty);
            sample.core.insert(time.pu);
            sample.cpu_time += time.run_time;
        }
        cores.into_values().collect()
    }
}

/// The number of cores that those threads of an owner want that wait for other programs, as of the last scan. The owner
/// has the PUs `own_cpus`.
fn wanted_by_waiting_threads(state: &WardenState, owner: &JobId, own_cpus: &CpuSet, has_smt: bool) -> u32 {
    let threads = state.members_of(owner).flat_map(|member| member.threads.values());
    let threads = threads.map(|thread| (thread.demand, &thread.effective_mask));
    let count_cores = |cpus: &CpuSet| state.topology.overlapping_core_count(&cpus.intersection(own_cpus));
    cores_wanted_by_waiting_threads(threads, count_cores, has_smt)
}

#[cfg(test)]
mod tests;
