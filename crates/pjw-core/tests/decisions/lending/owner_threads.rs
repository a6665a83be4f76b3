//! Which threads on lent PUs are the owner's: those that are confined to its PUs.

use std::time::Duration;

use pjw_core::cpuset::CpuSet;
use pjw_core::job::PriorityClass;
use pjw_core::lending::would_change_loans;
use pjw_core::state::lending::{CoreUse, LentCoreSample, OwnerCpuSample, UsedCores};
use pjw_core::time::Nanos;

use super::{assign_class, in_use, lent, sample, web_and_batch, web_uses};
use crate::machine::{Machine, cpu_set, job};

#[test]
fn each_lent_pu_has_the_number_of_pus_to_which_its_owner_is_confined() {
    let mut m = web_and_batch();
    assert!(m.state.pool.lent_cpus_with_owner_pu_counts().is_empty(), "nothing is lent");
    web_uses(&mut m, 0, 3);
    let sizes = |m: &Machine| {
        let sizes = m.state.pool.lent_cpus_with_owner_pu_counts();
        sizes.into_iter().map(|(pu, size)| (pu.0, size)).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&m), [(2, 6), (3, 6), (4, 6), (5, 6)], "free PUs that are borrowed are not among them");
    assign_class(&mut m, "web", PriorityClass::Guaranteed, 4, &[]).unwrap();
    web_uses(&mut m, 0, 3);
    assert!(!lent(&m).is_empty() && sizes(&m).iter().all(|&(_, size)| size == 4), "{:?}", sizes(&m));
    let web = job("web");
    let grant = m.state.grant_of(&web).unwrap().cpus.len();
    let mut threads = m.state.members_of(&web).flat_map(|member| member.threads.values());
    assert!(threads.all(|thread| thread.effective_mask.len() <= grant), "so all of them count");
}

/// The number of cores that are in use, and the lent ones of them. These cores come back.
fn returned(used: UsedCores) -> (u32, CpuSet) {
    (used.in_use, used.lent_cpus)
}

/// The daemon samples each 10 ms, and the monitor of lent PUs counts no thread of the owner.
#[test]
fn a_process_that_was_just_assigned_or_left_its_mask_gets_its_core_back_by_its_cpu_time() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    let mut core_use = CoreUse::default();
    let period = Duration::from_millis(10);
    let not_counted = |core: &str| LentCoreSample { core: cpu_set(core), period, cpu_time: Duration::ZERO };
    let lent_cores = ["2", "3", "4", "5"].map(not_counted);
    let sample = OwnerCpuSample { period, cpu_time: 3 * period, lent: &lent_cores, has_smt: false };
    let used = core_use.add(&sample);
    assert_eq!(used, in_use(3, cpu_set("")));
    let now = Nanos(m.now());
    m.state.lending.record_use(&job("web"), used, 6, now);
    assert!(would_change_loans(&m.state, &m.policy, now));
    m.settle();
    assert_eq!(lent(&m), "2-3", "three in use and one as a buffer");
}

/// The sample before the lending is older than the lending, so the monitor has measured the lent cores for a part of
/// the time.
#[test]
fn a_core_that_was_lent_since_the_last_sample_comes_back_if_the_owner_has_run_there_ever_since() {
    let ms = Duration::from_millis;
    let used_in = |lent_for: Duration, ran_for: Duration, before: &[(Duration, Duration)]| {
        let mut core_use = CoreUse::default();
        for &(period, cpu_time) in before {
            core_use.add(&OwnerCpuSample { period, cpu_time, lent: &[], has_smt: false });
        }
        let core = |core: &str| LentCoreSample { core: cpu_set(core), period: lent_for, cpu_time: ran_for };
        let (period, cpu_time) = (ms(100), 2 * ran_for);
        returned(core_use.add(&OwnerCpuSample {
            period,
            cpu_time,
            lent: &["2", "3"].map(core),
            has_smt: false,
        }))
    };
    assert_eq!(used_in(ms(10), ms(10), &[]), (2, cpu_set("2-3")), "an idle owner");
    assert_eq!(used_in(ms(10), ms(8), &[]), (0, cpu_set("")), "it leaves gaps");
    assert_eq!(used_in(ms(5), ms(4), &[]), (2, cpu_set("2-3")), "a short time");
    assert_eq!(
        used_in(ms(9), Duration::from_micros(1400), &[]),
        (0, cpu_set("")),
        "a small part of a short time"
    );
    assert_eq!(used_in(ms(5), Duration::from_micros(1200), &[]), (0, cpu_set("")), "work that is over");
    let busy = [(ms(100), ms(50)); 3];
    assert_eq!(used_in(ms(10), ms(10), &busy), (2, cpu_set("2-3")), "an owner that was not idle before");
    assert_eq!(used_in(ms(5), ms(5), &busy), (0, cpu_set("")), "too short to tell a demand that lasts");
}

#[test]
fn short_samples_are_joined_for_each_lent_core_from_the_time_at_which_it_was_lent() {
    let ms = Duration::from_millis;
    let mut core_use = CoreUse::default();
    for _ in 0..3 {
        core_use.add(&OwnerCpuSample { period: ms(100), cpu_time: ms(50), lent: &[], has_smt: false });
    }
    let mut add = |period: Duration, lent: &[(&str, Duration)]| {
        let core = |&(core, period): &(&str, Duration)| LentCoreSample {
            core: cpu_set(core),
            period,
            cpu_time: period,
        };
        let lent: Vec<LentCoreSample> = lent.iter().map(core).collect();
        let cpu_time = lent.iter().map(|core| core.cpu_time).sum();
        returned(core_use.add(&OwnerCpuSample { period, cpu_time, lent: &lent, has_smt: false }))
    };
    assert_eq!(add(ms(8), &[("2", ms(8))]), (0, cpu_set("")));
    assert_eq!(add(ms(2), &[("2", ms(2)), ("3", ms(1))]), (1, cpu_set("2")), "core 3 was measured for 1 ms");
    assert_eq!(add(ms(8), &[("2", ms(8)), ("3", ms(8))]), (1, cpu_set("2")));
    assert_eq!(add(ms(2), &[("2", ms(2)), ("3", ms(2))]), (2, cpu_set("2-3")));
}

#[test]
fn a_long_sample_is_judged_by_itself_whatever_the_short_ones_before_it_show() {
    let ms = Duration::from_millis;
    let mut core_use = CoreUse::default();
    let mut add = |period: Duration, cpu_time: Duration| {
        let lent_use = |core: &str| LentCoreSample { core: cpu_set(core), period, cpu_time: cpu_time / 2 };
        let lent = ["2", "3"].map(lent_use);
        returned(core_use.add(&OwnerCpuSample { period, cpu_time, lent: &lent, has_smt: false }))
    };
    (0..10).for_each(|_| drop(add(ms(10), ms(10))));
    assert_eq!(add(ms(10), ms(10)), (0, cpu_set("")), "half of the time on each core");
    // Another owner was reported, and the next sample comes after the usual time.
    (0..3).for_each(|_| assert_eq!(add(ms(2), ms(0)), (0, cpu_set(""))));
    assert_eq!(add(ms(10), ms(20)), (2, cpu_set("2-3")));
    (0..3).for_each(|_| assert_eq!(add(ms(2), ms(4)), (2, cpu_set("2-3"))));
    assert_eq!(add(ms(10), ms(0)), (0, cpu_set("")));
}

#[test]
fn a_core_is_taken_back_by_the_cpuset_and_the_mask_of_no_thread_is_changed() {
    let mut m = web_and_batch();
    (21..30).for_each(|tid| m.clone_thread(20, tid));
    web_uses(&mut m, 0, 3);
    assert_eq!((lent(&m).as_str(), m.effective_mask(20, 29).as_str()), ("2-5", "2-7"));
    sample(&mut m, 6, "2-5");
    assert_eq!(m.settle(), [], "the change of a mask for each thread takes long");
    assert_eq!((lent(&m).as_str(), m.effective_mask(20, 29).as_str()), ("", "6-7"));
}
