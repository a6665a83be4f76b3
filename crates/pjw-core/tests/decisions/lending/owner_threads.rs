//! Which threads on lent PUs are the owner's: those that are confined to its PUs.

use std::time::Duration;

use pjw_core::job::PriorityClass;
use pjw_core::lending::would_change_loans;
use pjw_core::state::lending::{CoreUse, LentCoreSample, OwnerCpuSample};
use pjw_core::time::Nanos;

use super::{assign_class, lent, web_and_batch, web_uses};
use crate::machine::{Machine, job, set};

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

/// The daemon samples each 10 ms, and the monitor of lent PUs counts no thread of the owner.
#[test]
fn a_process_that_was_just_assigned_or_left_its_mask_gets_its_core_back_by_its_cpu_time() {
    let mut m = web_and_batch();
    web_uses(&mut m, 0, 3);
    assert_eq!(lent(&m), "2-5");
    let mut core_use = CoreUse::default();
    let not_counted = |core: &str| LentCoreSample { core: set(core), cpu_time: Duration::ZERO };
    let lent_cores = ["2", "3", "4", "5"].map(not_counted);
    let period = Duration::from_millis(10);
    let sample = OwnerCpuSample { period, cpu_time: 3 * period, lent: &lent_cores, has_smt: false };
    let (used, runs_on) = core_use.add(&sample);
    assert_eq!((used, runs_on), (3, set("")));
    let now = Nanos(m.now());
    m.state.lending.record_use(&job("web"), used, 6, &set(""), now);
    assert!(would_change_loans(&m.state, &m.policy, now));
    m.settle();
    assert_eq!(lent(&m), "2-3", "three in use and one as a buffer");
}
