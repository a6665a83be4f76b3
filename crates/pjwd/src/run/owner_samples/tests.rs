//! When the monitor of lent PUs is loaded, and what is known if it can't be.

use std::cell::Cell;

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
    assert_eq!(sampler.demand_source(), DemandSource::Unknown);
}

#[test]
fn the_reason_why_owners_are_sampled_is_kept_until_the_monitor_is_loaded() {
    let begin = Instant::now();
    let mut sampler = sampler(begin);
    sampler.load_monitor_if_due(begin, false, || Err(refused()));
    let DemandSource::Sampled(why) = sampler.demand_source() else { panic!("{sampler:?}") };
    assert!(why.contains("no BTF type information (no such file)"), "{why}");
    sampler.load_monitor_if_due(begin + RETRY_INTERVAL, false, || Ok(Box::new(Broken::default())));
    assert_eq!(sampler.demand_source(), DemandSource::Reported);
    // It stops working when a PU is lent.
    sampler.set_lent_pus(&[(Pu(1), 2)].into(), begin + RETRY_INTERVAL);
    assert!(matches!(sampler.demand_source(), DemandSource::Sampled(why) if why.contains("BTF")));
}

/// A monitor that can be loaded, and refuses everything else.
#[derive(Debug, Default)]
struct Broken(BTreeMap<Pu, u32>);

impl LentCpuWatch for Broken {
    fn set_lent_pus(&mut self, _lent: &BTreeMap<Pu, u32>) -> Result<(), LentCpuMonitorUnavailable> {
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
