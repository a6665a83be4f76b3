//! Pinning inside a job: chooses a PU for each hot thread.
//!
//! A *floating* thread may run on all PUs of the grant. A *bound* thread was restricted to one PU by its
//! program; pjw only counts it. Hot threads are spread round-robin over the PUs of the grant, one per
//! core before a second on any core, near the PU on which they already run. Cold threads float.
//!
//! Tests check these properties: pins are inside the grant; the numbers of threads on two PUs differ by at
//! most one, as far as bound threads allow; a pin that is still balanced stays; the order of the input has no
//! effect.

use crate::basics::{CpuSet, Pu, ThreadId, prelude::*};
use crate::machine::{Level, Topology};
use crate::terms::{OversubscriptionPolicy, Policy};

/// A hot thread of a job (a thread that runs most of the time), as input for [`choose_pins`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotThread {
    /// The thread to pin.
    pub thread: ThreadId,
    /// The PU on which the thread ran last.
    pub last_cpu: Pu,
    /// Whether pjw may pin the thread.
    pub affinity: ThreadAffinity,
}

/// Whether a hot thread may be pinned: it may if it is floating (allowed on several PUs), and may not if its
/// program bound it to one PU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadAffinity {
    /// pjw may pin the thread.
    Floating {
        /// The PU to which pjw pinned the thread, if any.
        pinned: Option<Pu>,
    },
    /// The program bound the thread to this PU.
    Bound(Pu),
}

/// Chooses a PU for each hot thread of a job, evenly over the PUs of `grant` (the PUs that the job holds). A thread
/// that is not in the result may run on the whole grant. The result is empty if the policy does not allow pinning, or
/// if the grant has one PU.
#[must_use]
pub fn choose_pins(
    topology: &Topology,
    grant: &CpuSet,
    hot_threads: &[HotThread],
    policy: &Policy,
) -> BTreeMap<ThreadId, Pu> {
    let load = PuLoad::new(topology, grant);
    let oversubscribed = hot_threads.len() > load.order.len();
    // If the grant has one PU, a pin has no effect.
    if !policy.pin
        || load.order.len() < 2
        || (oversubscribed && policy.oversubscribed == OversubscriptionPolicy::Float)
    {
        return BTreeMap::new();
    }
    load.assign(hot_threads)
}

/// The PUs of a grant, with the number of hot threads on each PU.
struct PuLoad<'a> {
    topology: &'a Topology,
    /// The PUs, one of every core before the second of any core.
    order: Vec<Pu>,
    core: BTreeMap<Pu, usize>,
    threads_on_pu: BTreeMap<Pu, usize>,
    threads_on_core: BTreeMap<usize, usize>,
    /// Whether all cores have the same number of PUs in the grant. Only then are threads balanced by core
    /// too.
    equal_cores: bool,
}

impl<'a> PuLoad<'a> {
    fn new(topology: &'a Topology, grant: &CpuSet) -> Self {
        let order = topology.one_per_core_first(grant);
        let mut first_of_core: BTreeMap<CpuSet, usize> = BTreeMap::new();
        let mut core = BTreeMap::new();
        for &pu in &order {
            let next = first_of_core.len();
            core.insert(pu, *first_of_core.entry(topology.core_cpus(pu)).or_insert(next));
        }
        let mut sizes = vec![0usize; first_of_core.len()];
        core.values().for_each(|&index: &usize| sizes[index] += 1);
        let equal_cores = sizes.iter().all(|size| sizes.first() == Some(size));
        Self {
            topology,
            order,
            core,
            threads_on_pu: BTreeMap::new(),
            threads_on_core: BTreeMap::new(),
            equal_cores,
        }
    }

    fn assign(mut self, hot_threads: &[HotThread]) -> BTreeMap<ThreadId, Pu> {
        let mut sorted: Vec<&HotThread> = hot_threads.iter().collect();
        sorted.sort_by_key(|hot_thread| hot_thread.thread);
        for hot_thread in &sorted {
            if let ThreadAffinity::Bound(pu) = hot_thread.affinity {
                self.add_thread(pu);
            }
        }
        let mut pins = BTreeMap::new();
        let mut unplaced = Vec::new();
        for hot_thread in sorted {
            match hot_thread.affinity {
                ThreadAffinity::Bound(_) => {}
                ThreadAffinity::Floating { pinned: Some(pu) }
                    if self.keeps_balance(pu, hot_threads.len()) =>
                {
                    self.add_thread(pu);
                    pins.insert(hot_thread.thread, pu);
                }
                ThreadAffinity::Floating { .. } => unplaced.push(hot_thread),
            }
        }
        for hot_thread in unplaced {
            if let Some(pu) = self.best_pu_for(hot_thread) {
                self.add_thread(pu);
                pins.insert(hot_thread.thread, pu);
            }
        }
        pins
    }

    /// Whether `total` threads can still be spread evenly with one more thread on `pu`.
    fn keeps_balance(&self, pu: Pu, total: usize) -> bool {
        let Some(core) = self.core.get(&pu) else { return false };
        let cores = self.core.values().max().map_or(1, |last| last + 1);
        let has_room = |places: usize, threads: usize, at_ceiling: usize| {
            let (base, extra) = (total / places, total % places);
            threads < base || (threads == base && at_ceiling < extra)
        };
        let full_pus =
            self.threads_on_pu.values().filter(|&&threads| threads > total / self.order.len()).count();
        let full_cores = self.threads_on_core.values().filter(|&&threads| threads > total / cores).count();
        has_room(self.order.len(), self.threads_on(pu), full_pus)
            && (!self.equal_cores
                || has_room(cores, self.threads_on_core.get(core).copied().unwrap_or(0), full_cores))
    }

    fn best_pu_for(&self, hot_thread: &HotThread) -> Option<Pu> {
        let node_cpus = self.topology.domain_of(Level::NumaNode, hot_thread.last_cpu).map(|node| &node.cpus);
        let rank = |(index, pu): &(usize, Pu)| {
            let threads_on_core =
                self.core.get(pu).and_then(|core| self.threads_on_core.get(core)).copied().unwrap_or(0);
            let threads_on_core = if self.equal_cores { threads_on_core } else { 0 };
            let on_other_node = node_cpus.is_some_and(|node_cpus| !node_cpus.contains(*pu));
            (threads_on_core, self.threads_on(*pu), *pu != hot_thread.last_cpu, on_other_node, *index)
        };
        self.order.iter().copied().enumerate().min_by_key(rank).map(|(_, pu)| pu)
    }

    fn threads_on(&self, pu: Pu) -> usize {
        self.threads_on_pu.get(&pu).copied().unwrap_or(0)
    }

    fn add_thread(&mut self, pu: Pu) {
        *self.threads_on_pu.entry(pu).or_default() += 1;
        if let Some(&core) = self.core.get(&pu) {
            *self.threads_on_core.entry(core).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basics::ids::Pid;
    use crate::basics::ids::ProcessId;
    use crate::basics::ids::StartTime;
    use crate::basics::ids::Tid;
    use crate::testing::regular_topology;
    use proptest::prelude::*;
    use std::string::String;

    fn machine() -> Topology {
        // 2 packages of 2 cores of 2 PUs; core n holds PUs n and n + 4.
        regular_topology(2, 1, 1, 2, 2)
    }

    fn thread(n: u32) -> ThreadId {
        let start = StartTime(1);
        ThreadId { process: ProcessId { pid: Pid(100), start }, tid: Tid(100 + n), start }
    }

    fn floater(n: u32, last_cpu: u32, pinned: Option<u32>) -> HotThread {
        HotThread {
            thread: thread(n),
            last_cpu: Pu(last_cpu),
            affinity: ThreadAffinity::Floating { pinned: pinned.map(Pu) },
        }
    }

    fn spread() -> Policy {
        Policy { oversubscribed: OversubscriptionPolicy::Spread, ..Policy::default() }
    }

    fn show(pins: &BTreeMap<ThreadId, Pu>) -> String {
        let cells: Vec<String> =
            pins.iter().map(|(thread, pu)| format!("{}:{pu}", thread.tid.0 - 100)).collect();
        cells.join(" ")
    }

    fn check(grant: &str, hot_threads: &[HotThread], expected: &str) {
        let pins = choose_pins(&machine(), &grant.parse().unwrap(), hot_threads, &spread());
        assert_eq!(show(&pins), expected);
    }

    #[test]
    fn every_core_gets_one_thread_before_any_gets_two() {
        check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None)], "0:0 1:1");
        check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None), floater(2, 4, None)], "0:0 1:1 2:4");
    }

    #[test]
    fn a_thread_stays_on_its_numa_node() {
        check("1-2,5-6", &[floater(0, 6, None)], "0:6");
        check("0-7", &[floater(0, 3, None), floater(1, 7, None)], "0:3 1:2");
    }

    #[test]
    fn a_balanced_pin_stays() {
        check("0-1,4-5", &[floater(0, 0, Some(5)), floater(1, 0, None)], "0:5 1:0");
    }

    #[test]
    fn two_threads_on_one_core_are_separated_when_another_core_is_idle() {
        check("0-1,4-5", &[floater(0, 0, Some(0)), floater(1, 4, Some(4))], "0:0 1:1");
    }

    #[test]
    fn a_bound_thread_is_counted_and_not_moved() {
        let bound = HotThread { thread: thread(9), last_cpu: Pu(0), affinity: ThreadAffinity::Bound(Pu(0)) };
        check("0-1,4-5", &[bound, floater(0, 0, None)], "0:1");
    }

    #[test]
    fn more_threads_than_pus_float_unless_the_policy_spreads_them() {
        let grant: CpuSet = "0-1,4-5".parse().unwrap();
        let many: Vec<_> = (0..6).map(|n| floater(n, 0, None)).collect();
        let float = Policy { oversubscribed: OversubscriptionPolicy::Float, ..Policy::default() };
        assert!(choose_pins(&machine(), &grant, &many, &float).is_empty());
        assert_eq!(choose_pins(&machine(), &grant, &many, &spread()).len(), 6);
    }

    #[test]
    fn a_grant_of_one_pu_needs_no_pin() {
        check("3", &[floater(0, 0, None)], "");
    }

    fn any_runners() -> impl Strategy<Value = Vec<HotThread>> {
        proptest::collection::btree_map(0u32..40, (0u32..8, proptest::option::of(0u32..8)), 0..20).prop_map(
            |hot_threads| {
                hot_threads.into_iter().map(|(n, (last, pinned))| floater(n, last, pinned)).collect()
            },
        )
    }

    proptest! {
        #[test]
        fn pins_are_inside_the_grant_even_and_stable(hot_threads in any_runners(), mask in 1u64..256) {
            let grant = CpuSet::from_words(&[mask]);
            let pins = choose_pins(&machine(), &grant, &hot_threads, &spread());
            if grant.len() < 2 {
                prop_assert!(pins.is_empty());
                return Ok(());
            }
            prop_assert_eq!(pins.len(), hot_threads.len());
            let mut counts: BTreeMap<Pu, usize> = grant.iter().map(|pu| (pu, 0)).collect();
            for pu in pins.values() {
                *counts.get_mut(pu).expect("inside the grant") += 1;
            }
            let whole_cores = machine().cores().iter().filter(|core| core.pus.intersects(&grant)).all(|core| core.pus.is_subset(&grant));
            if whole_cores {
                prop_assert!(counts.values().max().unwrap() - counts.values().min().unwrap() <= 1, "{:?}", counts);
            }
            let again: Vec<HotThread> = hot_threads.iter().map(|hot_thread| HotThread {
                affinity: ThreadAffinity::Floating { pinned: pins.get(&hot_thread.thread).copied() },
                ..hot_thread.clone()
            }).collect();
            prop_assert_eq!(&choose_pins(&machine(), &grant, &again, &spread()), &pins, "a second call moves no thread");
            let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
            prop_assert_eq!(&choose_pins(&machine(), &grant, &backwards, &spread()), &pins);
        }
    }
}
