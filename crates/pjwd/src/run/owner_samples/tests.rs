//! When the monitor of lent PUs is loaded, and what is known if it can't be.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use pjw_core::cpuset_group::{CpusetHierarchy, CpusetSupport, IdlePrioritySupport};
use pjw_core::evidence::MembershipEvidence;
use pjw_core::ids::{ProcessId, StartTime, Tid, Uid};
use pjw_core::job::{EndCondition, Job, JobRequest, PriorityClass};
use pjw_core::policy::LendingPolicy;
use pjw_core::state::demand::ThreadDemand;
use pjw_core::state::{Member, MemberThread};
use pjw_core::testing::{cpu_set, job, pjw_grant, regular_topology};
use pjw_core::time::UnixMillis;
use pjw_linux::bpf::TaskScanUnavailable;

use super::*;

/// A sampler of which a sample is due, as while a job may borrow cores.
fn sampler(now: Instant) -> OwnerCpuSampler {
    OwnerCpuSampler { next: Some(now), ..OwnerCpuSampler::default() }
}

fn refused() -> LentCpuMonitorUnavailable {
    TaskScanUnavailable::NoBtf("no such file".to_owned()).into()
}

#[test]
fn a_monitor_that_could_not_be_loaded_is_tried_again_after_a_minute_while_nothing_is_lent() {
    let begin = Instant::now();
    let mut sampler = sampler(begin);
    let tries = Cell::new(0);
    let mut try_at = |seconds: u64, is_any_lent: bool| {
        let refuse = || {
            tries.set(tries.get() + 1);
            Err(refused())
        };
        sampler.load_monitor_if_due(begin + Duration::from_secs(seconds), is_any_lent, refuse);
        tries.get()
    };
    assert_eq!([try_at(0, false), try_at(1, false), try_at(59, false)], [1, 1, 1]);
    assert_eq!(try_at(61, true), 1, "loading takes time, in which no owner is heard");
    assert_eq!([try_at(62, false), try_at(63, false), try_at(121, false)], [2, 2, 2]);
    assert_eq!(try_at(122, false), 3);
}

#[test]
fn nothing_is_loaded_while_no_job_can_borrow_cores() {
    let mut sampler = OwnerCpuSampler::default();
    sampler.load_monitor_if_due(Instant::now(), false, || panic!("it is not needed"));
    assert_eq!(sampler.demand_detection(), OwnerDemandDetection::NotLoaded);
}

#[test]
fn the_reason_why_owners_are_sampled_is_kept_until_the_monitor_is_loaded() {
    let begin = Instant::now();
    let mut sampler = sampler(begin);
    sampler.load_monitor_if_due(begin, false, || Err(refused()));
    let OwnerDemandDetection::Sampled(why) = sampler.demand_detection() else { panic!("{sampler:?}") };
    assert!(why.contains("no BTF type information (no such file)"), "{why}");
    sampler.load_monitor_if_due(begin + RETRY_INTERVAL, false, || Ok(Box::new(Broken::default())));
    assert_eq!(sampler.demand_detection(), OwnerDemandDetection::Reported);
    // It stops working when a PU is lent.
    sampler.set_lent_pus(&[(Pu(1), 2)].into(), begin + RETRY_INTERVAL);
    assert!(matches!(sampler.demand_detection(), OwnerDemandDetection::Sampled(why) if why.contains("BTF")));
}

/// A monitor that can be loaded, and refuses everything else.
#[derive(Debug, Default)]
struct Broken(BTreeMap<Pu, u32>);

impl LentCpuMonitorInterface for Broken {
    fn set_lent_pus(&mut self, _: &BTreeMap<Pu, u32>, _: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        Err(refused())
    }

    fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        &self.0
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_reported_pus(&mut self) -> CpuSet {
        CpuSet::new()
    }

    fn report_again(&mut self, _cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        Err(refused())
    }

    fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        Vec::new()
    }
}

const MS: Duration = Duration::from_millis(1);

/// A policy that lends, on a node where idle priority works.
fn lending_policy() -> Policy {
    Policy {
        cpuset_support: CpusetSupport {
            hierarchy: CpusetHierarchy::Unified,
            idle_priority: IdlePrioritySupport::Available,
            ..CpusetSupport::default()
        },
        lending: LendingPolicy { enabled: true, ..LendingPolicy::default() },
        ..Policy::default()
    }
}

/// A job of this class.
fn of_class(id: &str, class: PriorityClass) -> Job {
    let request = JobRequest { class, ..JobRequest::with_core_count(2) };
    let new = Job::new(job(id), Uid(0), EndCondition::Timeout, UnixMillis(0));
    Job { request: Some(request), ..new }
}

/// An owner `web` of two cores with one thread that has this demand, and a borrower without processes.
fn state_with_owner(permille: u32, waiting_permille: u32) -> WardenState {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 4, 1), &CpuSet::new());
    let grant = pjw_grant(cpu_set("0-1"));
    state.jobs.insert(Job { grant: Some(grant), ..of_class("web", PriorityClass::Guaranteed) });
    state.jobs.insert(of_class("batch", PriorityClass::Besteffort));
    let mut demand = ThreadDemand::default();
    (demand.permille, demand.waiting_permille, demand.is_hot) = (permille, waiting_permille, permille >= 600);
    let thread = MemberThread {
        start: StartTime(1),
        comm: "x".into(),
        state: 'R',
        last_cpu: Pu(0),
        effective_mask: cpu_set("0-1"),
        demand,
        mask_entry: None,
    };
    state.members.insert(Member {
        id: ProcessId { pid: Pid(10), start: StartTime(1) },
        job: job("web"),
        evidence: MembershipEvidence::Registered,
        inherited_mask: None,
        was_new_at_join: true,
        numa_node: None,
        first_seen: None,
        threads: [(Tid(10), thread)].into(),
    });
    state
}

/// The number of cores that the owner is found to use after a second in which it gets this share of a core.
fn used_after_a_second(state: &mut WardenState, cpu_percent: u32) -> Option<u32> {
    let begin = Instant::now();
    let mut sampler = OwnerCpuSampler::with_monitor(None);
    for sample in 0..=100 {
        let passed = 10 * MS * sample;
        let now = (begin + passed, Nanos(u64::try_from(passed.as_nanos()).unwrap()));
        let cpu_time = passed * cpu_percent / 100;
        sampler.next = Some(now.0);
        sampler.measure_if_due(state, &lending_policy(), now, |_| Some(cpu_time));
    }
    state.lending.owner_state(&job("web"))?.used_core_count()
}

#[test]
fn an_owner_that_shares_its_core_with_another_program_uses_the_core_although_it_gets_half_of_the_time() {
    assert_eq!(used_after_a_second(&mut state_with_owner(1000, 500), 50), Some(1));
    assert_eq!(
        used_after_a_second(&mut state_with_owner(500, 0), 50),
        Some(0),
        "it sleeps for the other half"
    );
    assert_eq!(
        used_after_a_second(&mut state_with_owner(1000, 500), 0),
        Some(0),
        "it sleeps since the last scan"
    );
}

/// A monitor that has seen the owner run on each lent PU for 10 ms, up to now.
#[derive(Debug, Default)]
struct TenMilliseconds(BTreeMap<Pu, u32>);

impl LentCpuMonitorInterface for TenMilliseconds {
    fn set_lent_pus(
        &mut self,
        lent: &BTreeMap<Pu, u32>,
        _: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable> {
        self.0.clone_from(lent);
        Ok(())
    }

    fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        &self.0
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_reported_pus(&mut self) -> CpuSet {
        CpuSet::new()
    }

    fn report_again(&mut self, _cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        Ok(())
    }

    fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        let seen = |&pu: &Pu| OwnerRunTime { pu, run_time: 10 * MS, is_running: true };
        self.0.keys().map(seen).collect()
    }
}

/// The number of cores that an owner is found to use in a sample 100 ms after the one before. The owner has run for the
/// last 10 ms, on a core that was lent for this time.
fn used_of_a_core_that_was_lent_for(lent_for: Duration) -> Option<u32> {
    let begin = Instant::now();
    let mut state = state_with_owner(0, 0);
    let mut sampler = OwnerCpuSampler::with_monitor(Some(Box::new(TenMilliseconds::default())));
    for (sample, cpu_time) in (0..).zip([Duration::ZERO, Duration::ZERO, 10 * MS]) {
        let passed = 100 * MS * sample;
        let now = (begin + passed, Nanos(u64::try_from(passed.as_nanos()).unwrap()));
        sampler.next = Some(now.0);
        sampler.measure_if_due(&mut state, &lending_policy(), now, |_| Some(cpu_time));
        sampler.set_lent_pus(&BTreeMap::new(), now.0);
        if sample == 1 {
            sampler.set_lent_pus(&[(Pu(1), 2)].into(), now.0 + 100 * MS - lent_for);
        }
    }
    state.lending.owner_state(&job("web"))?.used_core_count()
}

#[test]
fn the_use_of_a_lent_core_counts_by_the_time_since_the_core_was_lent() {
    assert_eq!(used_of_a_core_that_was_lent_for(10 * MS), Some(1));
    assert_eq!(used_of_a_core_that_was_lent_for(50 * MS), Some(0), "the core was idle for 40 ms of these");
}

/// A monitor that reports what a test says.
#[derive(Debug, Default)]
struct Scripted {
    lent: BTreeMap<Pu, u32>,
    script: Arc<Mutex<Script>>,
}

#[derive(Debug, Default)]
struct Script {
    reports: CpuSet,
    /// How long the owner has run on each lent PU, and whether it runs there.
    runs: (Duration, bool),
    armed_again: CpuSet,
    /// The PUs that the monitor was told not to report, when PUs were last lent.
    silent: CpuSet,
}

impl LentCpuMonitorInterface for Scripted {
    fn set_lent_pus(
        &mut self,
        lent: &BTreeMap<Pu, u32>,
        silent: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable> {
        self.lent.clone_from(lent);
        self.script.lock().unwrap().silent.clone_from(silent);
        Ok(())
    }

    fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        &self.lent
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_reported_pus(&mut self) -> CpuSet {
        std::mem::take(&mut self.script.lock().unwrap().reports)
    }

    fn report_again(&mut self, cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        let mut script = self.script.lock().unwrap();
        script.armed_again = script.armed_again.union(cpus);
        Ok(())
    }

    fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        let (run_time, is_running) = self.script.lock().unwrap().runs;
        self.lent.keys().map(|&pu| OwnerRunTime { pu, run_time, is_running }).collect()
    }
}

/// A sampler of an owner that lends PU 1. The times are since the first sample.
struct Sampled {
    state: WardenState,
    sampler: OwnerCpuSampler,
    script: Arc<Mutex<Script>>,
    begin: Instant,
}

impl Sampled {
    /// The owner has so many threads. `has_monitor` says whether a monitor reports it.
    fn start(threads: u32, has_monitor: bool) -> Self {
        let mut state = state_with_owner(0, 0);
        let mut member = state.members.get(&Pid(10)).unwrap().clone();
        let thread = member.threads[&Tid(10)].clone();
        member.threads = (10..10 + threads).map(|tid| (Tid(tid), thread.clone())).collect();
        state.members.insert(member);
        state.pool.grant_available(&job("web"), &cpu_set("0-1"));
        let script = Arc::<Mutex<Script>>::default();
        let monitor = Scripted { script: Arc::clone(&script), ..Scripted::default() };
        let monitor: Option<Box<dyn LentCpuMonitorInterface>> =
            if has_monitor { Some(Box::new(monitor)) } else { None };
        let sampler = OwnerCpuSampler::with_monitor(monitor);
        let mut sampled = Self { state, sampler, script, begin: Instant::now() };
        sampled.sampler.next = Some(sampled.begin);
        sampled.measure(0, 0);
        sampled
    }

    fn lend(mut self) -> Self {
        self.state.pool.set_borrowed(&job("batch"), &cpu_set("1"));
        self.sampler.set_lent_pus(&[(Pu(1), 2)].into(), self.begin);
        self
    }

    /// Measures at `at`, when the owner has used so much CPU time, both in ms.
    fn measure(&mut self, at: u32, cpu_time: u32) {
        let at = MS * at;
        let now = (self.begin + at, Nanos(u64::try_from(at.as_nanos()).unwrap()));
        self.sampler.measure_if_due(&mut self.state, &lending_policy(), now, |_| Some(MS * cpu_time));
    }

    /// The time of the next sample, in ms.
    fn next(&self) -> u128 {
        (self.sampler.next_measurement_at().unwrap() - self.begin).as_millis()
    }

    fn set_script(&self, reports: &str, runs: (Duration, bool)) {
        let mut script = self.script.lock().unwrap();
        (script.reports, script.runs) = (cpu_set(reports), runs);
    }

    fn armed_again(&self) -> String {
        std::mem::take(&mut self.script.lock().unwrap().armed_again).to_string()
    }
}

#[test]
fn an_owner_of_many_threads_gets_its_core_back_with_the_sample_2_ms_after_the_report() {
    for threads in [1, 1000, 100_000] {
        let mut sampled = Sampled::start(threads, true).lend();
        sampled.set_script("1", (MS / 10, true));
        sampled.measure(5, 0);
        assert_eq!(sampled.next(), 7, "{threads} threads");
        sampled.set_script("", (MS * 2, true));
        sampled.measure(7, 2);
        let used = sampled.state.lending.owner_state(&job("web")).unwrap().used_core_count();
        assert_eq!(used, Some(1), "{threads} threads");
    }
}

#[test]
fn a_pu_of_an_owner_of_many_threads_is_reported_at_most_once_in_the_time_between_two_samples() {
    for (threads, next) in [(1, 9), (200, 9), (1000, 17)] {
        let mut sampled = Sampled::start(threads, true).lend();
        sampled.set_script("1", (MS / 10, true));
        sampled.measure(5, 0);
        sampled.set_script("", (MS / 10, false));
        sampled.measure(7, 0);
        assert_eq!((sampled.next(), sampled.armed_again().as_str()), (next, ""), "{threads} threads");
        sampled.measure(17, 0);
        assert_eq!(sampled.armed_again(), "1", "{threads} threads");
    }
}

#[test]
fn an_owner_that_wakes_up_often_is_sampled_each_2_ms_and_reported_again_after_6_quiet_ms() {
    let mut sampled = Sampled::start(1, true).lend();
    sampled.set_script("1", (MS / 10, true));
    sampled.measure(5, 0);
    for at in [7, 9, 11, 13, 15, 17, 19, 21] {
        sampled.set_script("", (MS / 50 * at, false));
        sampled.measure(at, 0);
        assert_eq!((sampled.next(), sampled.armed_again().as_str()), (u128::from(at) + 2, ""), "at {at} ms");
    }
    for at in [23, 25] {
        sampled.measure(at, 0);
        assert_eq!((sampled.next(), sampled.armed_again().as_str()), (u128::from(at) + 2, ""), "at {at} ms");
    }
    sampled.measure(27, 0);
    assert_eq!((sampled.next(), sampled.armed_again().as_str()), (37, "1"));
}

#[test]
fn the_samples_are_as_far_apart_as_documented() {
    for has_monitor in [true, false] {
        assert_eq!(Sampled::start(1000, has_monitor).next(), 100, "nothing is lent");
    }
    let while_lent = |threads, has_monitor| Sampled::start(threads, has_monitor).lend().next();
    assert_eq!([1, 1000, 2000, 100_000].map(|threads| while_lent(threads, true)), [10, 10, 20, 100]);
    assert_eq!([1, 200, 1000, 100_000].map(|threads| while_lent(threads, false)), [2, 2, 10, 100]);
    let mut sampled = Sampled::start(1, false).lend();
    sampled.measure(2, 1);
    assert_eq!(sampled.next(), 3, "the owner was idle and has used CPU time");
    sampled.state.jobs.remove(&job("batch"));
    sampled.measure(3, 1);
    assert_eq!(sampled.sampler.next_measurement_at(), None, "no job can borrow cores");
}

#[test]
fn a_run_time_that_is_less_than_the_last_one_counts_no_time_twice() {
    let mut sampled = Sampled::start(1, true).lend();
    let begin = sampled.begin;
    let mut read = |runs| {
        sampled.set_script("", (MS * runs, true));
        sampled.sampler.run_times_since_last(begin)[&Pu(1)].run_time
    };
    assert_eq!([10, 8, 12].map(&mut read), [MS * 10, Duration::ZERO, MS * 2]);
    sampled.sampler.set_lent_pus(&BTreeMap::new(), sampled.begin);
    sampled.sampler.set_lent_pus(&[(Pu(1), 2)].into(), sampled.begin);
    sampled.set_script("", (MS * 3, true));
    assert_eq!(sampled.sampler.run_times_since_last(begin)[&Pu(1)].run_time, MS * 3, "it was lent again");
}

#[test]
fn an_owner_that_wakes_up_often_and_then_works_on_is_found_by_the_next_look() {
    let mut sampled = Sampled::start(1, true).lend();
    sampled.set_script("1", (MS / 10, true));
    sampled.measure(5, 0);
    sampled.set_script("", (MS / 10, false));
    sampled.measure(7, 0);
    sampled.set_script("", (MS / 5, true));
    sampled.measure(9, 0);
    assert_eq!(sampled.next(), 11, "the settling time");
    sampled.set_script("", (MS * 2, true));
    sampled.measure(11, 2);
    let used = sampled.state.lending.owner_state(&job("web")).unwrap().used_core_count();
    assert_eq!(used, Some(1));
}

#[test]
fn a_pu_that_is_lent_while_its_owner_is_busy_is_reported_only_after_the_owner_was_idle() {
    let mut sampled = Sampled::start(1, true);
    sampled.measure(100, 100);
    let mut sampled = sampled.lend();
    assert_eq!(sampled.script.lock().unwrap().silent, cpu_set("1"), "the owner works on its other core");
    for at in (110..300).step_by(10) {
        sampled.measure(at, 100);
    }
    assert_eq!(sampled.script.lock().unwrap().armed_again, cpu_set("1"), "the owner has become idle");
}

#[test]
fn a_pu_that_is_lent_while_its_owner_is_idle_is_reported() {
    let sampled = Sampled::start(1, true).lend();
    assert_eq!(sampled.script.lock().unwrap().silent, CpuSet::new());
}
