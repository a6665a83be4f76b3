//! Inside a job: which running thread goes to which PU.
//!
//! Terms: a *floater* may run on the whole grant as far as its program is concerned; a *bound* thread chose a
//! PU itself and is only counted. Threads that run are spread round-robin over the grant, one per core before
//! two on any, near where they already run; sleepers float.
//!
//! Properties, each with a test of that name: pins are inside the grant; the counts of two PUs differ by at
//! most one as far as bound threads allow; a pin that is still right stays; the order of the input doesn't matter.

use std::collections::BTreeMap;

use crate::cpuset::{CpuSet, Pu};
use crate::policy::{Oversubscribed, Policy};
use crate::process::ThreadId;
use crate::topology::{Level, Topology};

/// A hot thread of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runner {
    /// Who.
    pub thread: ThreadId,
    /// Where it runs now.
    pub last_cpu: Pu,
    /// Where it may choose to be.
    pub freedom: Freedom,
}

/// What the warden may do with a hot thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freedom {
    /// It may be pinned; `pinned` is where the warden pinned it last.
    Floater {
        /// The present pin.
        pinned: Option<Pu>,
    },
    /// It chose this PU itself.
    Bound(Pu),
}

/// Chooses a PU for every floater that should be pinned; whoever is not listed floats.
#[must_use]
pub fn balance(
    topology: &Topology,
    grant: &CpuSet,
    runners: &[Runner],
    policy: &Policy,
) -> BTreeMap<ThreadId, Pu> {
    let seats = Seats::new(topology, grant);
    let crowded = runners.len() > seats.order.len();
    // On one PU a pin says nothing that the grant doesn't.
    if !policy.pin || seats.order.len() < 2 || (crowded && policy.oversubscribed == Oversubscribed::Float) {
        return BTreeMap::new();
    }
    seats.fill(runners)
}

/// The PUs of a grant and how many hot threads sit on each.
struct Seats<'a> {
    topology: &'a Topology,
    /// One PU per core before a second of any.
    order: Vec<Pu>,
    core: BTreeMap<Pu, usize>,
    on_pu: BTreeMap<Pu, usize>,
    on_core: BTreeMap<usize, usize>,
    /// Whether every core has as many seats as the next; only then do cores say more than PUs.
    even: bool,
}

impl<'a> Seats<'a> {
    fn new(topology: &'a Topology, grant: &CpuSet) -> Self {
        let order = topology.cores_first(grant);
        let mut first_of_core: BTreeMap<CpuSet, usize> = BTreeMap::new();
        let mut core = BTreeMap::new();
        for &pu in &order {
            let next = first_of_core.len();
            core.insert(pu, *first_of_core.entry(topology.core_of(pu)).or_insert(next));
        }
        let mut sizes = vec![0usize; first_of_core.len()];
        core.values().for_each(|&index: &usize| sizes[index] += 1);
        let even = sizes.iter().all(|size| sizes.first() == Some(size));
        Self { topology, order, core, on_pu: BTreeMap::new(), on_core: BTreeMap::new(), even }
    }

    fn fill(mut self, runners: &[Runner]) -> BTreeMap<ThreadId, Pu> {
        let mut sorted: Vec<&Runner> = runners.iter().collect();
        sorted.sort_by_key(|runner| runner.thread);
        for runner in &sorted {
            if let Freedom::Bound(pu) = runner.freedom {
                self.sit(pu);
            }
        }
        let mut pins = BTreeMap::new();
        let mut standing = Vec::new();
        for runner in sorted {
            match runner.freedom {
                Freedom::Bound(_) => {}
                Freedom::Floater { pinned: Some(pu) } if self.still_right(pu, runners.len()) => {
                    self.sit(pu);
                    pins.insert(runner.thread, pu);
                }
                Freedom::Floater { .. } => standing.push(runner),
            }
        }
        for runner in standing {
            if let Some(pu) = self.best_for(runner) {
                self.sit(pu);
                pins.insert(runner.thread, pu);
            }
        }
        pins
    }

    /// Whether one more thread on `pu` still leaves room for an even spread of `total` threads.
    fn still_right(&self, pu: Pu, total: usize) -> bool {
        let Some(core) = self.core.get(&pu) else { return false };
        let cores = self.core.values().max().map_or(1, |last| last + 1);
        let room = |seats: usize, taken: usize, at_ceiling: usize| {
            let (base, extra) = (total / seats, total % seats);
            taken < base || (taken == base && at_ceiling < extra)
        };
        let full_pus = self.on_pu.values().filter(|&&taken| taken > total / self.order.len()).count();
        let full_cores = self.on_core.values().filter(|&&taken| taken > total / cores).count();
        room(self.order.len(), self.taken(pu), full_pus)
            && (!self.even || room(cores, self.on_core.get(core).copied().unwrap_or(0), full_cores))
    }

    fn best_for(&self, runner: &Runner) -> Option<Pu> {
        let home = self.topology.domain_of(Level::NumaNode, runner.last_cpu).map(|node| &node.cpus);
        let rank = |(index, pu): &(usize, Pu)| {
            let on_core = self.core.get(pu).and_then(|core| self.on_core.get(core)).copied().unwrap_or(0);
            let on_core = if self.even { on_core } else { 0 };
            let away = home.is_some_and(|home| !home.contains(*pu));
            (on_core, self.taken(*pu), *pu != runner.last_cpu, away, *index)
        };
        self.order.iter().copied().enumerate().min_by_key(rank).map(|(_, pu)| pu)
    }

    fn taken(&self, pu: Pu) -> usize {
        self.on_pu.get(&pu).copied().unwrap_or(0)
    }

    fn sit(&mut self, pu: Pu) {
        *self.on_pu.entry(pu).or_default() += 1;
        if let Some(&core) = self.core.get(&pu) {
            *self.on_core.entry(core).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Pid, ProcessId, StartTime, Tid};
    use crate::topology::Regular;
    use proptest::prelude::*;

    fn machine() -> Topology {
        // 2 packages of 2 cores of 2 PUs; core n holds PUs n and n + 4.
        Topology::regular(Regular {
            packages: 2,
            numa_per_package: 1,
            l3_per_numa: 1,
            cores_per_l3: 2,
            pus_per_core: 2,
        })
    }

    fn thread(n: u32) -> ThreadId {
        let start = StartTime(1);
        ThreadId { process: ProcessId { pid: Pid(100), start }, tid: Tid(100 + n), start }
    }

    fn floater(n: u32, last_cpu: u32, pinned: Option<u32>) -> Runner {
        Runner {
            thread: thread(n),
            last_cpu: Pu(last_cpu),
            freedom: Freedom::Floater { pinned: pinned.map(Pu) },
        }
    }

    fn spread() -> Policy {
        Policy { oversubscribed: Oversubscribed::Spread, ..Policy::default() }
    }

    fn show(pins: &BTreeMap<ThreadId, Pu>) -> String {
        let cells: Vec<String> =
            pins.iter().map(|(thread, pu)| format!("{}:{pu}", thread.tid.0 - 100)).collect();
        cells.join(" ")
    }

    fn check(grant: &str, runners: &[Runner], expected: &str) {
        let pins = balance(&machine(), &grant.parse().unwrap(), runners, &spread());
        assert_eq!(show(&pins), expected);
    }

    #[test]
    fn one_per_core_before_two_on_any() {
        check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None)], "0:0 1:1");
        check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None), floater(2, 4, None)], "0:0 1:1 2:4");
    }

    #[test]
    fn a_thread_stays_on_its_numa_node() {
        check("1-2,5-6", &[floater(0, 6, None)], "0:6");
        check("0-7", &[floater(0, 3, None), floater(1, 7, None)], "0:3 1:2");
    }

    #[test]
    fn a_pin_that_is_still_right_stays() {
        check("0-1,4-5", &[floater(0, 0, Some(5)), floater(1, 0, None)], "0:5 1:0");
    }

    #[test]
    fn two_on_one_core_are_parted_when_another_core_idles() {
        check("0-1,4-5", &[floater(0, 0, Some(0)), floater(1, 4, Some(4))], "0:0 1:1");
    }

    #[test]
    fn a_thread_that_bound_itself_is_counted_and_left_alone() {
        let bound = Runner { thread: thread(9), last_cpu: Pu(0), freedom: Freedom::Bound(Pu(0)) };
        check("0-1,4-5", &[bound, floater(0, 0, None)], "0:1");
    }

    #[test]
    fn more_threads_than_pus_float_unless_told_to_spread() {
        let grant: CpuSet = "0-1,4-5".parse().unwrap();
        let many: Vec<_> = (0..6).map(|n| floater(n, 0, None)).collect();
        let float = Policy { oversubscribed: Oversubscribed::Float, ..Policy::default() };
        assert!(balance(&machine(), &grant, &many, &float).is_empty());
        assert_eq!(balance(&machine(), &grant, &many, &spread()).len(), 6);
    }

    #[test]
    fn one_pu_needs_no_pin() {
        check("3", &[floater(0, 0, None)], "");
    }

    fn any_runners() -> impl Strategy<Value = Vec<Runner>> {
        proptest::collection::btree_map(0u32..40, (0u32..8, proptest::option::of(0u32..8)), 0..20).prop_map(
            |runners| runners.into_iter().map(|(n, (last, pinned))| floater(n, last, pinned)).collect(),
        )
    }

    proptest! {
        #[test]
        fn pins_are_inside_the_grant_even_and_stable(runners in any_runners(), mask in 1u64..256) {
            let grant = CpuSet::from_words(&[mask]);
            let pins = balance(&machine(), &grant, &runners, &spread());
            if grant.len() < 2 {
                prop_assert!(pins.is_empty());
                return Ok(());
            }
            prop_assert_eq!(pins.len(), runners.len());
            let mut counts: BTreeMap<Pu, usize> = grant.iter().map(|pu| (pu, 0)).collect();
            for pu in pins.values() {
                *counts.get_mut(pu).expect("inside the grant") += 1;
            }
            let whole_cores = machine().cores().iter().filter(|core| core.pus.intersects(&grant)).all(|core| core.pus.is_subset(&grant));
            if whole_cores {
                prop_assert!(counts.values().max().unwrap() - counts.values().min().unwrap() <= 1, "{:?}", counts);
            }
            let again: Vec<Runner> = runners.iter().map(|runner| Runner {
                freedom: Freedom::Floater { pinned: pins.get(&runner.thread).copied() },
                ..runner.clone()
            }).collect();
            prop_assert_eq!(&balance(&machine(), &grant, &again, &spread()), &pins, "a second look moves nobody");
            let backwards: Vec<Runner> = runners.iter().rev().cloned().collect();
            prop_assert_eq!(&balance(&machine(), &grant, &backwards, &spread()), &pins);
        }
    }
}
