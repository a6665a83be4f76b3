//! Lending in a run: what owners use of their cores changes, and the samples of the owners cause cycles as in the event
//! loop. How the daemon hears the owners depends on the machine of the run ([`Machine`]).

mod checks;
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
/// The time after which a core must have been taken back that its owner needs: docs/adr/0023-lending.md, "Measuring the
/// owner".
const INTERVAL: u64 = 10_000_000;
/// The number of samples in a second before the rest of it passes in one step.
const MOST_SAMPLES: u32 = 20;
/// The number of threads that an owner starts at most, so that it can use all its cores.
const MOST_THREADS: usize = 6;

/// The machine of a run with lending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// Cgroup v2, or no cpusets. The daemon samples each 10 ms, as it does until it has tried to load the monitor.
    WithoutMonitor,
    /// The same, with the monitor of lent PUs.
    WithMonitor,
    /// Cgroup v1. By the seed, the daemon has the monitor of lent PUs, or samples each 2 ms because it can't load it.
    CgroupV1,
}

/// What is known at the time of a sample.
struct Reading {
    at: Nanos,
    /// The CPU time of each owner's processes since their start, in ns.
    cpu_times: BTreeMap<ProcessId, (JobId, u64)>,
    /// The use of each lent PU since it was lent. Empty without a monitor.
    lent: BTreeMap<Pu, LentCpuUse>,
}

/// What each owner used between two samples.
#[derive(Debug)]
struct Span {
    /// The time between the samples, in ns.
    length: u64,
    used: BTreeMap<JobId, Use>,
}

/// What an owner used between two samples.
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
        let on_lent: Duration = cores.iter().filter_map(|core| self.lent.get(core)).map(time_on).sum();
        self.elsewhere + u64::try_from(on_lent.as_nanos()).unwrap()
    }
}

/// What a run with lending has in addition.
pub struct Lending {
    machine: Machine,
    random: RandomStream,
    samples: OwnerCpuSampler,
    /// What the daemon's monitor has seen of the lent PUs. `None` without a monitor.
    monitored: Option<Arc<Mutex<SimLentCpus>>>,
    /// The start of the world's clock, on the clock of the samples.
    begin: Instant,
    last: Option<Reading>,
    /// The last times between two samples, oldest first.
    spans: VecDeque<Span>,
    /// Whether the use of owners changes at random.
    is_flapping: bool,
    /// The PUs that are lent, each with its owner, after the last cycle.
    lent: BTreeMap<Pu, JobId>,
    /// When each PU was lent by each owner last.
    lent_at: BTreeMap<(Pu, JobId), u64>,
}

impl Lending {
    pub(super) fn new(seed: &RandomStream, machine: Machine) -> Self {
        let has_monitor = match machine {
            Machine::WithoutMonitor => false,
            Machine::WithMonitor => true,
            Machine::CgroupV1 => seed.substream("monitor").random_bool(500),
        };
        let mut lending = Self {
            machine,
            random: seed.substream("lending"),
            samples: OwnerCpuSampler::default(),
            monitored: has_monitor.then(Arc::default),
            begin: Instant::now(),
            last: None,
            spans: VecDeque::new(),
            is_flapping: true,
            lent: BTreeMap::new(),
            lent_at: BTreeMap::new(),
        };
        lending.restart();
        lending
    }

    /// Another daemon has no samples, and another monitor.
    pub(super) fn restart(&mut self) {
        self.last = None;
        self.spans.clear();
        self.samples = match (self.machine, &mut self.monitored) {
            (Machine::WithoutMonitor, _) => OwnerCpuSampler::default(),
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
        if self.machine == Machine::WithoutMonitor {
            // The daemon judges each sample by itself.
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
        let is_lasting = |core: &Pu| {
            let uses_of_core = uses_of(core);
            // A core that came back in between was lent anew.
            let lent_for: Duration = uses_of_core.iter().map(|used| used.lent_for).sum();
            uses_of_core.len() == uses.len() && lent_for >= period
        };
        let (lasting, moved): (Vec<Pu>, Vec<Pu>) = in_use.partition(is_lasting);
        let others =
            uses.iter().map(|(length, used)| (used.elsewhere_and_on(&moved) * 100 / length + 1) / 100);
        u32::try_from(others.min().unwrap_or(0)).unwrap() + u32::try_from(lasting.len()).unwrap()
    }

    /// The shortest time over which the use of an owner is checked. Where short samples are judged together, or follow
    /// a report, a time that is this long contains all of them.
    fn checked_period(&self) -> u64 {
        if self.machine == Machine::WithoutMonitor { INTERVAL } else { 2 * INTERVAL }
    }

    /// From now on, the owners use what they use now.
    pub(super) fn stop_flapping(&mut self) {
        self.is_flapping = false;
    }
}

/// Random settings of lending, on a node where borrowers have idle priority wherever there are cpusets.
pub(super) fn with_lending(policy: Policy, seed: &RandomStream) -> Policy {
    let mut random = seed.substream("lending policy");
    let lending = LendingPolicy {
        enabled: random.random_bool(950),
        buffer_cores: random.random_below(3),
        lend_after: Duration::from_millis([10, 100, 500][random.random_below(3) as usize]),
        cores_at_once: 1 + random.random_below(4),
        revocation_grace: Duration::from_millis([0, 0, 25, 700][random.random_below(4) as usize]),
        starved: if random.random_bool(500) { StarvedPolicy::Freeze } else { StarvedPolicy::Squeeze },
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
    pub(super) fn pass_a_second(&mut self) {
        let end = self.now() + SECOND;
        let samples = self.lending.as_mut().map_or(0, |lending| lending.random.random_below(MOST_SAMPLES));
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

    /// The monitor of lent PUs sees all time that passes on the machine from now on.
    pub(super) fn watch_time(&self) {
        let monitored = self.lending.as_ref().and_then(|lending| lending.monitored.clone());
        self.world.borrow_mut().observer =
            monitored.map(|monitored| monitored as Arc<Mutex<dyn TimeObserver>>);
    }

    /// Threads begin or cease to run: the monitor reports at once what runs on the lent PUs now.
    fn show_change_of_threads(&self) {
        if let Some(monitored) = self.lending.as_ref().and_then(|lending| lending.monitored.as_ref()) {
            monitored.lock().unwrap().see(&self.world.borrow(), Duration::ZERO);
        }
    }

    /// After a cycle, the monitor watches the PUs that are lent now, as in the event loop.
    pub(super) fn watch_lent_cpus(&mut self) {
        let now = Duration::from_nanos(self.now());
        let Some(lending) =
            self.lending.as_mut().filter(|lending| lending.machine != Machine::WithoutMonitor)
        else {
            return;
        };
        lending
            .samples
            .set_lent_pus(&self.warden.state().pool.lent_cpus_with_owner_pu_counts(), lending.begin + now);
    }

    /// The time of the next sample, or of the end of a grace period, but after now. A report of the monitor wakes up
    /// the daemon at once.
    fn next_sample(&self) -> u64 {
        let Some(lending) = &self.lending else { return u64::MAX };
        if lending.has_report() {
            return self.now() + 1;
        }
        let of_samples = lending.samples.next_measurement_at().map(|at| {
            u64::try_from(at.saturating_duration_since(lending.begin).as_nanos()).unwrap_or(u64::MAX)
        });
        let end_of_grace = self.warden.state().lending.next_grace_period_end().map(|end| end.0);
        let next = of_samples.into_iter().chain(end_of_grace).min();
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
        let used = if is_sample { self.lasting_use(now) } else { BTreeMap::new() };
        if must_change || has_grace_ended {
            let request = DueScans::default().take_scan_request(self.warden.state_mut(), &[]);
            if self.carry_out_cycle(request, &[]).is_none() {
                return;
            }
            self.check_safety();
        }
        self.check_owners_are_served(&used);
    }

    /// The number of cores that each owner has used all the time for [`Lending::checked_period`]: cores that are used
    /// for a part of it count only by the average of those that are not measured one by one. Called with each sample.
    /// Only processes count that were members of the owner in two samples.
    fn lasting_use(&mut self, now: Nanos) -> BTreeMap<JobId, u32> {
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
            // A PU that was lent anew counts from zero.
            let before = last.lent.get(&pu).filter(|before| before.lent_for <= present.lent_for);
            let before = before.copied().unwrap_or_default();
            let core = cores.entry(self.topology.core_cpus(pu).first().unwrap_or(pu)).or_default();
            core.lent_for = core.lent_for.max(present.lent_for - before.lent_for);
            core.ran_for += present.ran_for.saturating_sub(before.ran_for);
        }
        cores
    }

    /// No owner waits for a borrower: after a sample, at most those cores of an owner are lent that it left idle,
    /// without the buffer. Cores in a grace period do not count.
    fn check_owners_are_served(&self, used: &BTreeMap<JobId, u32>) {
        if self.warden.ongoing_failures().journal_error.is_some() {
            return;
        }
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
            let most = u32::try_from(own.len()).unwrap().saturating_sub(kept);
            let known = state.lending.owner_state(&owner.id);
            assert!(
                lent <= most,
                "{lent} cores of {} are lent, which needs {kept} of {own:?}: {known:?}",
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

    /// An owner begins to use all its cores, or becomes idle.
    fn change_demand(&mut self) {
        let Some(lending) = self.lending.as_mut().filter(|lending| lending.is_flapping) else { return };
        if !lending.random.random_bool(200) {
            return;
        }
        let state = self.warden.state();
        let owners: Vec<JobId> = state.jobs.guaranteed_jobs().map(|owner| owner.id.clone()).collect();
        let Some(owner) = lending.random.random_element(&owners).cloned() else { return };
        let is_busy = lending.random.random_bool(500);
        self.set_demand(&owner, is_busy);
    }

    /// All threads of the owner run, or none.
    fn set_demand(&self, owner: &JobId, is_busy: bool) {
        let mut world = self.world.borrow_mut();
        let pids: Vec<Pid> = self.warden.state().members_of(owner).map(|member| member.id.pid).collect();
        let count = |process: &SimProcess| process.threads.len();
        let threads: usize = pids.iter().filter_map(|pid| world.processes.get(pid)).map(count).sum();
        if let Some(&pid) = pids.first().filter(|_| is_busy) {
            (threads..MOST_THREADS).for_each(|_| world.clone_thread(pid, Tid(pid.0)));
        }
        for pid in pids {
            let threads =
                world.processes.get_mut(&pid).into_iter().flat_map(|process| process.threads.values_mut());
            threads.for_each(|thread| thread.is_busy = is_busy);
        }
        drop(world);
        self.show_change_of_threads();
    }

    /// A command of a run with lending: jobs have classes, and say how many cores they want.
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
                // A resize may find any class: borrowers are refused a rule for NUMA nodes. The runs without lending
                // have it.
                Command::Assign(AssignCommand { class, within_job: None, ..assign })
            }
            Command::Release { job, .. } if random.random_bool(400) => {
                let cores = random.random_bool(700).then(|| random.random_below(5));
                Command::Want { job, cores, caller: ROOT }
            }
            other => other,
        }
    }
}
