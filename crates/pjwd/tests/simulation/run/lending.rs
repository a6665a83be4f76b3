//! Lending in a run: the demand of owners changes, and the samples of the owners cause cycles as in the event loop. How
//! the daemon measures the owners depends on the machine of the run ([`Machine`]).

mod checks;
mod provisions;
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pjw_core::command::{AssignCommand, Command};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{CpusetHierarchy, IdlePrioritySupport};
use pjw_core::ids::{Pid, ProcessId, Tid};
use pjw_core::job::{JobId, PriorityClass};
use pjw_core::policy::{LendingPolicy, Policy, StarvedPolicy};
use pjw_core::time::Nanos;
use pjw_sim::seed::RandomStream;
use pjw_sim::world::{SimProcess, TimeObserver};
use pjwd::run::owner_samples::OwnerCpuSampler;
use pjwd::run::triggers::DueScans;

use super::lent_cpus::{LentCpuUse, SimLentCpus, SimMonitor};
use super::{ROOT, Run};

const SECOND: u64 = 1_000_000_000;
/// The time within which a lent core must come back to an owner that needs it: docs/adr/0023-lending.md, "Measuring the
/// owner".
const INTERVAL: u64 = 10_000_000;
/// The largest number of samples in a second. The rest of the second passes in one step.
const MAX_SAMPLES_PER_SECOND: u32 = 20;
/// The largest number of threads that an owner starts, so that it can use all its cores.
const MAX_THREADS_OF_OWNER: usize = 6;

/// The machine of a run with lending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// Cgroup v2, or no cpusets. The daemon samples each 10 ms, as it does until it has tried to load the monitor.
    WithoutMonitor,
    /// The same, with the monitor of lent PUs.
    WithMonitor,
    /// As [`Machine::WithoutMonitor`], and some jobs are provisions: they keep their cores without a process.
    WithProvisions,
    /// Cgroup v1. By the seed, the daemon has the monitor of lent PUs, or samples each 2 ms because it can't load it.
    CgroupV1,
}

impl Machine {
    /// Whether the daemon has not tried to load the monitor of lent PUs.
    fn is_without_monitor(self) -> bool {
        matches!(self, Self::WithoutMonitor | Self::WithProvisions)
    }
}

/// The figures at the time of a sample.
struct Reading {
    at: Nanos,
    /// The CPU time of each owner's processes since their start, in ns.
    cpu_times: BTreeMap<ProcessId, (JobId, u64)>,
    /// The use of each lent PU since it was lent. Empty without a monitor.
    lent: BTreeMap<Pu, LentCpuUse>,
}

/// The use of cores by each owner between two samples.
#[derive(Debug)]
struct Span {
    /// The time between the samples, in ns.
    length: u64,
    used: BTreeMap<JobId, Use>,
}

/// The use of cores by one owner between two samples.
#[derive(Debug, Clone, Default)]
struct Use {
    /// The CPU time on its cores that are not measured one by one, in ns.
    elsewhere: u64,
    /// Its lent cores that the monitor measures. The key is the first PU of the core.
    lent: BTreeMap<Pu, LentCpuUse>,
}

impl Use {
    /// The CPU time on the cores that are not measured one by one, and on these lent cores, in ns.
    fn elsewhere_and_on(&self, cores: &[Pu]) -> u64 {
        // A lent core counts as one, however many of its PUs are in use.
        let time_on = |core: &LentCpuUse| core.ran_for.min(core.lent_for);
        let time_on_lent_cores: Duration =
            cores.iter().filter_map(|core| self.lent.get(core)).map(time_on).sum();
        self.elsewhere + u64::try_from(time_on_lent_cores.as_nanos()).unwrap()
    }
}

/// The part of a run that only runs with lending have.
pub struct Lending {
    machine: Machine,
    random: RandomStream,
    /// Which commands are about provisions. `None` if no job is a provision.
    provisions: Option<RandomStream>,
    samples: OwnerCpuSampler,
    /// The lent PUs as the monitor of the daemon sees them. `None` without a monitor.
    monitored: Option<Arc<Mutex<SimLentCpus>>>,
    /// The start of the world's clock, on the clock of the samples.
    begin: Instant,
    last: Option<Reading>,
    /// The last times between two samples, oldest first.
    spans: VecDeque<Span>,
    /// Whether the demand of owners changes at random.
    is_demand_changing: bool,
    /// The PUs that are lent, each with its owner, after the last cycle.
    lent: BTreeMap<Pu, JobId>,
    /// When each PU was lent by each owner last.
    lent_at: BTreeMap<(Pu, JobId), u64>,
}

impl Lending {
    pub(super) fn new(seed: &RandomStream, machine: Machine) -> Self {
        let has_monitor = match machine {
            Machine::WithoutMonitor | Machine::WithProvisions => false,
            Machine::WithMonitor => true,
            Machine::CgroupV1 => seed.substream("monitor").random_bool(500),
        };
        let mut lending = Self {
            machine,
            random: seed.substream("lending"),
            provisions: (machine == Machine::WithProvisions).then(|| seed.substream("provisions")),
            samples: OwnerCpuSampler::default(),
            monitored: has_monitor.then(Arc::default),
            begin: Instant::now(),
            last: None,
            spans: VecDeque::new(),
            is_demand_changing: true,
            lent: BTreeMap::new(),
            lent_at: BTreeMap::new(),
        };
        lending.restart();
        lending
    }

    /// Replaces the samples and the monitor by those of a new daemon.
    pub(super) fn restart(&mut self) {
        self.last = None;
        self.spans.clear();
        self.samples = match (self.machine, &mut self.monitored) {
            (Machine::WithoutMonitor | Machine::WithProvisions, _) => OwnerCpuSampler::default(),
            (_, None) => OwnerCpuSampler::with_monitor(None),
            (_, Some(monitored)) => {
                *monitored = Arc::default();
                OwnerCpuSampler::with_monitor(Some(Box::new(SimMonitor::new(Arc::clone(monitored)))))
            }
        };
    }

    /// Whether the monitor has a report that the daemon has not read.
    fn has_report(&self) -> bool {
        self.monitored.as_ref().is_some_and(|monitored| monitored.lock().unwrap().has_report())
    }

    /// Adds the time since the last sample. Returns the number of cores that each owner used in all of the last samples
    /// that cover [`Lending::checked_period`], or nothing if there are not so many yet.
    fn add_span(&mut self, span: Span) -> BTreeMap<JobId, u32> {
        let (period, owners) = (self.checked_period(), span.used.keys().cloned().collect::<Vec<_>>());
        if self.machine.is_without_monitor() {
            // The daemon evaluates each sample by itself.
            self.spans.clear();
        }
        self.spans.push_back(span);
        let length = |spans: &VecDeque<Span>| spans.iter().map(|span| span.length).sum::<u64>();
        while length(&self.spans) - self.spans[0].length >= period {
            self.spans.pop_front();
        }
        if length(&self.spans) < period {
            return BTreeMap::new();
        }
        owners.into_iter().map(|owner| (owner.clone(), self.used_in_all_spans(&owner))).collect()
    }

    /// The number of cores that the owner used in all spans. A core counts by itself that is measured by the monitor,
    /// if it was lent for [`Lending::checked_period`] or longer, and the owner ran there all the time. The use of the
    /// other cores counts together: docs/lending.md, "When a core is lent, and when it comes back". So does the use of
    /// a core that was lent for a part of the time, if the owner ran there while it was lent: a core in use counts also
    /// while it is lent or comes back.
    fn used_in_all_spans(&self, owner: &JobId) -> u32 {
        let none = Use::default();
        let uses: Vec<(u64, &Use)> =
            self.spans.iter().map(|span| (span.length, span.used.get(owner).unwrap_or(&none))).collect();
        let lent_cores: BTreeSet<Pu> = uses.iter().flat_map(|(_, used)| used.lent.keys().copied()).collect();
        let uses_of = |core: &Pu| uses.iter().filter_map(|(_, used)| used.lent.get(core)).collect::<Vec<_>>();
        let in_use = lent_cores.into_iter().filter(|core| uses_of(core).iter().all(|used| used.is_in_use()));
        let period = Duration::from_nanos(self.checked_period());
        let is_in_use_all_the_time = |core: &Pu| {
            let uses_of_core = uses_of(core);
            // A core that came back between two samples was lent again.
            let lent_for: Duration = uses_of_core.iter().map(|used| used.lent_for).sum();
            uses_of_core.len() == uses.len() && lent_for >= period
        };
        let (in_use_all_the_time, moved): (Vec<Pu>, Vec<Pu>) = in_use.partition(is_in_use_all_the_time);
        let others =
            uses.iter().map(|(length, used)| (used.elsewhere_and_on(&moved) * 100 / length + 1) / 100);
        u32::try_from(others.min().unwrap_or(0)).unwrap() + u32::try_from(in_use_all_the_time.len()).unwrap()
    }

    /// The shortest time over which the use of an owner is checked. Where the daemon evaluates short samples together,
    /// or samples after a report, such a time contains all of them.
    fn checked_period(&self) -> u64 {
        if self.machine.is_without_monitor() { INTERVAL } else { 2 * INTERVAL }
    }

    /// Keeps the demand of the owners as it is from now on.
    pub(super) fn stop_demand_changes(&mut self) {
        self.is_demand_changing = false;
    }
}

/// Adds random settings of lending to a policy. Where the node has cpusets, borrowers can be at idle priority.
pub(super) fn with_lending(policy: Policy, seed: &RandomStream) -> Policy {
    let mut random = seed.substream("lending policy");
    let lending = LendingPolicy {
        enabled: random.random_bool(950),
        buffer_cores: random.random_below(3),
        lend_after: Duration::from_millis([10, 100, 500][random.random_below(3) as usize]),
        cores_at_once: 1 + random.random_below(4),
        revocation_grace: Duration::from_millis([0, 0, 25, 700][random.random_below(4) as usize]),
        starved: if random.random_bool(500) { StarvedPolicy::Freeze } else { StarvedPolicy::Squeeze },
        lends_to_empty_jobs: false,
    };
    let mut cpuset_support = policy.cpuset_support.clone();
    if !matches!(cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. }) {
        cpuset_support.idle_priority = IdlePrioritySupport::Available;
        cpuset_support.can_freeze = random.random_bool(700);
    }
    Policy { lending, cpuset_support, ..policy }
}

impl Run {
    /// Lets a second pass, with samples of the owners and the cycles for which they are the reason.
    pub(super) fn advance_one_second(&mut self) {
        let end = self.now() + SECOND;
        let samples =
            self.lending.as_mut().map_or(0, |lending| lending.random.random_below(MAX_SAMPLES_PER_SECOND));
        for _ in 0..samples {
            let next = self.next_sample().min(end);
            self.advance_to(next);
            self.sample_owners();
            self.change_demand();
        }
        self.advance_to(end);
        self.sample_owners();
    }

    fn now(&self) -> u64 {
        self.world.borrow().current_time().since_boot.0
    }

    fn advance_to(&mut self, at: u64) {
        let left = at.saturating_sub(self.now());
        self.world.borrow_mut().advance(left);
    }

    /// Lets the monitor of lent PUs see all time that passes on the machine from now on.
    pub(super) fn attach_monitor(&self) {
        let monitored = self.lending.as_ref().and_then(|lending| lending.monitored.clone());
        self.world.borrow_mut().observer =
            monitored.map(|monitored| monitored as Arc<Mutex<dyn TimeObserver>>);
    }

    /// Lets the monitor see the threads that run on the lent PUs now. Called when threads begin or cease to run.
    fn report_running_threads(&self) {
        if let Some(monitored) = self.lending.as_ref().and_then(|lending| lending.monitored.as_ref()) {
            monitored.lock().unwrap().record_period(&self.world.borrow(), Duration::ZERO);
        }
    }

    /// Gives the monitor the PUs that are lent after a cycle, as the event loop does.
    pub(super) fn watch_lent_cpus(&mut self) {
        let now = Duration::from_nanos(self.now());
        let Some(lending) = self.lending.as_mut().filter(|lending| !lending.machine.is_without_monitor())
        else {
            return;
        };
        lending
            .samples
            .set_lent_pus(&self.warden.state().pool.lent_cpus_with_owner_pu_counts(), lending.begin + now);
    }

    /// The time of the next sample or of the end of a grace period, and at the earliest 1 ns from now. A report of the
    /// monitor wakes up the daemon at once.
    fn next_sample(&self) -> u64 {
        let Some(lending) = &self.lending else { return u64::MAX };
        if lending.has_report() {
            return self.now() + 1;
        }
        let next_measurement = lending.samples.next_measurement_at().map(|at| {
            u64::try_from(at.saturating_duration_since(lending.begin).as_nanos()).unwrap_or(u64::MAX)
        });
        let end_of_grace = self.warden.state().lending.next_grace_period_end().map(|end| end.0);
        let next = next_measurement.into_iter().chain(end_of_grace).min();
        next.unwrap_or(self.now() + 10 * INTERVAL).max(self.now() + 1)
    }

    /// Samples the owners if a sample is due, and runs a cycle if lending has to change, as the event loop does.
    fn sample_owners(&mut self) {
        let now = Nanos(self.now());
        let Some(lending) = &mut self.lending else { return };
        self.warden.read_process_events();
        let at = lending.begin + Duration::from_nanos(now.0);
        let is_sample =
            lending.has_report() || lending.samples.next_measurement_at().is_none_or(|next| next <= at);
        let world = Rc::clone(&self.world);
        let cpu_time_of = |pid: Pid| {
            let world = world.borrow();
            world.processes.get(&pid).map(|process| Duration::from_nanos(process.run_ns()))
        };
        let (state, policy) = self.warden.state_and_policy();
        let must_change = lending.samples.measure_if_due(state, policy, (at, now), cpu_time_of);
        let has_grace_ended = state.lending.next_grace_period_end().is_some_and(|end| end <= now);
        let used = if is_sample { self.cores_in_use_since_last_samples(now) } else { BTreeMap::new() };
        if must_change || has_grace_ended {
            let request = DueScans::default().take_scan_request(self.warden.state_mut(), &[]);
            if self.run_cycle_with_request(request, &[]).is_none() {
                return;
            }
            self.check_safety();
        }
        self.check_no_owner_waits(&used);
    }

    /// The number of cores that each owner has used all the time for [`Lending::checked_period`]. A core that was used
    /// for a part of it counts only in the average of the cores that are not measured one by one. Only processes count
    /// that were members of the owner in two samples. Called with each sample.
    fn cores_in_use_since_last_samples(&mut self, now: Nanos) -> BTreeMap<JobId, u32> {
        let reading = self.reading(now);
        let Some(lending) = &mut self.lending else { return BTreeMap::new() };
        let last = lending.last.take().filter(|last| last.at < now);
        let span = last.map(|last| self.span(&last, &reading));
        let Some(lending) = &mut self.lending else { return BTreeMap::new() };
        lending.last = Some(reading);
        span.map(|span| lending.add_span(span)).unwrap_or_default()
    }

    fn reading(&self, at: Nanos) -> Reading {
        let (state, world) = (self.warden.state(), self.world.borrow());
        let members = state.jobs.guaranteed_jobs().flat_map(|owner| state.members_of(&owner.id));
        let cpu_times = members.filter_map(|member| {
            let process = world.processes.get(&member.id.pid)?;
            Some((member.id, (member.job.clone(), process.run_ns())))
        });
        let monitored = self.lending.as_ref().and_then(|lending| lending.monitored.as_ref());
        let lent = monitored.map(|monitored| monitored.lock().unwrap().uses().clone()).unwrap_or_default();
        Reading { at, cpu_times: cpu_times.collect(), lent }
    }

    /// What the owners used between two readings.
    fn span(&self, last: &Reading, now: &Reading) -> Span {
        let length = now.at.0 - last.at.0;
        let mut cpu_times: BTreeMap<JobId, u64> = BTreeMap::new();
        for (id, (job, run_ns)) in &now.cpu_times {
            if let Some((_, run_before)) = last.cpu_times.get(id).filter(|(owner, _)| owner == job) {
                *cpu_times.entry(job.clone()).or_default() += run_ns.saturating_sub(*run_before);
            }
        }
        let used = cpu_times.into_iter().map(|(job, cpu_time)| {
            let cores = self.lent_core_uses(&job, last, now);
            let ran_for: Duration = cores.values().map(|core| core.ran_for).sum();
            let elsewhere = cpu_time.saturating_sub(u64::try_from(ran_for.as_nanos()).unwrap());
            (job, Use { elsewhere, lent: cores })
        });
        Span { length, used: used.collect() }
    }

    /// The use of each lent core of the owner between two readings. The key is the first PU of the core.
    fn lent_core_uses(&self, owner: &JobId, last: &Reading, now: &Reading) -> BTreeMap<Pu, LentCpuUse> {
        let own = self.warden.state().pool.pus_of(owner);
        let mut cores: BTreeMap<Pu, LentCpuUse> = BTreeMap::new();
        for (&pu, present) in now.lent.iter().filter(|(pu, _)| own.contains(**pu)) {
            // The time of a PU that was lent again starts at zero.
            let before = last.lent.get(&pu).filter(|before| before.lent_for <= present.lent_for);
            let before = before.copied().unwrap_or_default();
            let core = cores.entry(self.topology.core_cpus(pu).first().unwrap_or(pu)).or_default();
            core.lent_for = core.lent_for.max(present.lent_for - before.lent_for);
            core.ran_for += present.ran_for.saturating_sub(before.ran_for);
        }
        cores
    }

    /// Checks after a sample that no owner waits for a borrower: at most the cores that an owner left idle are lent,
    /// minus the buffer. Cores in a grace period do not count. This holds also while the journal can't be written.
    fn check_no_owner_waits(&self, used: &BTreeMap<JobId, u32>) {
        let state = self.warden.state();
        for owner in state.jobs.guaranteed_jobs() {
            let Some(&used) = used.get(&owner.id) else { continue };
            let own = self.whole_cores(&state.pool.pus_of(&owner.id));
            let is_lent = |core: &&CpuSet| {
                let lent =
                    |pu| state.pool.borrower(pu).is_some() && state.lending.grace_period_end(pu).is_none();
                core.iter().any(lent)
            };
            let lent = u32::try_from(own.iter().filter(is_lent).count()).unwrap();
            let wanted = owner.wanted_core_count(&state.topology);
            let kept = wanted.unwrap_or(used + self.policy.lending.buffer_cores);
            let max_lent = u32::try_from(own.len()).unwrap().saturating_sub(kept);
            let known = state.lending.owner_state(&owner.id);
            assert!(
                lent <= max_lent,
                "{lent} cores of {} are lent, and it needs {kept} of {own:?}: {known:?}",
                owner.id
            );
        }
    }

    /// The cores that are online and in `cpus` as a whole.
    fn whole_cores(&self, cpus: &CpuSet) -> Vec<CpuSet> {
        let online = self.warden.state().pool.online_cpus();
        let cores = self.topology.cores().iter().map(|core| core.pus.intersection(&online));
        cores.filter(|core| !core.is_empty() && core.is_subset(cpus)).collect()
    }

    /// Makes a random owner use all its cores, or become idle, with a probability of 20 %.
    fn change_demand(&mut self) {
        let Some(lending) = self.lending.as_mut().filter(|lending| lending.is_demand_changing) else {
            return;
        };
        if !lending.random.random_bool(200) {
            return;
        }
        let state = self.warden.state();
        let owners: Vec<JobId> = state.jobs.guaranteed_jobs().map(|owner| owner.id.clone()).collect();
        let Some(owner) = lending.random.random_element(&owners).cloned() else { return };
        let is_busy = lending.random.random_bool(500);
        self.set_demand(&owner, is_busy);
    }

    /// Makes all threads of the owner run, or none.
    fn set_demand(&self, owner: &JobId, is_busy: bool) {
        let mut world = self.world.borrow_mut();
        let pids: Vec<Pid> = self.warden.state().members_of(owner).map(|member| member.id.pid).collect();
        let count = |process: &SimProcess| process.threads.len();
        let threads: usize = pids.iter().filter_map(|pid| world.processes.get(pid)).map(count).sum();
        if let Some(&pid) = pids.first().filter(|_| is_busy) {
            (threads..MAX_THREADS_OF_OWNER).for_each(|_| world.clone_thread(pid, Tid(pid.0)));
        }
        for pid in pids {
            let threads =
                world.processes.get_mut(&pid).into_iter().flat_map(|process| process.threads.values_mut());
            threads.for_each(|thread| thread.is_busy = is_busy);
        }
        drop(world);
        self.report_running_threads();
    }

    /// Changes a command to one of a run with lending: jobs get classes, and some releases become numbers of wanted
    /// cores.
    pub(super) fn with_class(&mut self, command: Command) -> Command {
        let Some(Lending { random, .. }) = &mut self.lending else { return command };
        match command {
            Command::Assign(assign) => {
                let class = match random.random_below(10) {
                    0..=3 => Some(PriorityClass::Guaranteed),
                    4..=6 => Some(PriorityClass::Besteffort),
                    7 => Some(PriorityClass::Normal),
                    _ => None,
                };
                // A resize may meet a borrower, for which a rule for NUMA nodes is refused. Only the runs without
                // lending have such rules.
                self.with_provision(AssignCommand { class, within_job: None, ..assign })
            }
            Command::Release { job, .. } if random.random_bool(400) => {
                let cores = random.random_bool(700).then(|| random.random_below(5));
                Command::Want { job, cores, caller: ROOT }
            }
            other => other,
        }
    }
}
