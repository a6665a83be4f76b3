//! Tests of the count of cores in use by which a run checks that no owner waits. Each sample here covers 10 ms, and the
//! check covers 20 ms.

use super::*;

/// The use of cores by an owner in a sample: the CPU time in ms on its cores that are not lent, and for each lent core
/// its first PU, the ms for which it was lent, and the CPU time in ms on it.
type Sample<'a> = (u64, &'a [(u32, u64, u64)]);

fn cores_in_use(samples: &[Sample<'_>]) -> u32 {
    let owner: JobId = "manual:owner".parse().unwrap();
    let mut lending = Lending::new(&RandomStream::from_seed(0), Machine::WithMonitor);
    let mut counts = BTreeMap::new();
    for (elsewhere, lent) in samples {
        let lent = lent.iter().map(|&(pu, lent_for, ran_for)| {
            let (lent_for, ran_for) = (Duration::from_millis(lent_for), Duration::from_millis(ran_for));
            (Pu(pu), LentCpuUse { lent_for, ran_for })
        });
        let used = Use { elsewhere: elsewhere * 1_000_000, lent: lent.collect() };
        counts = lending.add_span(Span { length: INTERVAL, used: BTreeMap::from([(owner.clone(), used)]) });
    }
    counts[&owner]
}

#[test]
fn a_core_in_use_counts_while_it_is_lent_and_while_it_comes_back() {
    assert_eq!(cores_in_use(&[(10, &[]), (10, &[])]), 1);
    assert_eq!(cores_in_use(&[(0, &[(0, 10, 10)]), (0, &[(0, 10, 10)])]), 1);
    assert_eq!(cores_in_use(&[(10, &[]), (0, &[(0, 10, 10)])]), 1);
    assert_eq!(cores_in_use(&[(0, &[(0, 10, 10)]), (10, &[])]), 1);
    assert_eq!(cores_in_use(&[(10, &[]), (4, &[(0, 6, 6)])]), 1, "lent between two samples");
    assert_eq!(cores_in_use(&[(10, &[(1, 10, 10)]), (0, &[(0, 10, 10), (1, 10, 10)])]), 2);
    assert_eq!(cores_in_use(&[(10, &[]), (0, &[(0, 10, 20)])]), 1, "both PUs of the core are in use");
}

#[test]
fn a_core_that_its_owner_left_idle_for_a_part_of_the_time_does_not_count() {
    assert_eq!(cores_in_use(&[(0, &[]), (0, &[(0, 10, 10)])]), 0);
    assert_eq!(cores_in_use(&[(0, &[(0, 10, 10)]), (0, &[])]), 0);
    assert_eq!(cores_in_use(&[(10, &[]), (0, &[(0, 10, 9)])]), 0);
    assert_eq!(cores_in_use(&[(0, &[(0, 10, 10)]), (5, &[(0, 5, 4)])]), 0);
}
