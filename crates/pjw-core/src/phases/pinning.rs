//! Pinning inside a job: chooses a PU for each hot thread.
//!
//! A *floating* thread may run on all PUs of the grant. A *bound* thread has a mask of its program inside the grant. pjw does
//! not pin it. It counts on one PU of its mask, so that as many bound threads as possible count on PUs of their own
//! (`Matching`). Hot floating threads are spread over the PUs of the grant: on the PU with the fewest threads, of
//! these on the core with the fewest, near the PU on which the thread already runs. Cold threads float.
//!
//! Tests check these properties: pins are inside the grant; the numbers of threads on two PUs differ by at
//! most one, as far as bound threads allow; a pin that is still balanced stays; the order of the input has no
//! effect.

pub(crate) mod within_job;

use crate::basics::{CpuSet, Pu, ThreadId, prelude::*};
use crate::machine::{Level, Topology};
use crate::phases::overload::matching::Matching;
use crate::phases::pinning::within_job::node_of;
use crate::terms::{OversubscriptionPolicy, Policy};

/// A hot (busy) thread of a job, as input for [`choose_pins`]. A thread is hot if it runs or waits for a PU
/// most of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotThread {
    /// The process, the tid and the start time of the thread.
    pub thread: ThreadId,
    /// The PU on which the thread ran last.
    pub last_cpu: Pu,
    /// The PUs on which the thread may run. Never empty. Usually, these are all PUs that the job holds (the
    /// grant). If the program has bound the thread to some of them, these are only the PUs of this binding.
    pub mask: CpuSet,
    /// The PU to which pjw has pinned the thread. `None` if pjw has not pinned the thread.
    pub pinned_pu: Option<Pu>,
    /// The NUMA node that was chosen for the process of the thread, by the kernel's number. The thread is pinned in this
    /// NUMA node, unless that would make it share a core or a PU while others are idle. `None` if no NUMA node was chosen.
    pub numa_node: Option<u32>,
}

/// Chooses a PU for each hot thread of a job. A thread is hot if it runs or waits for a PU most of the time.
/// `grant` is the set of PUs that the job holds. The hot threads are spread over these PUs as evenly as
/// possible.
///
/// Returns the chosen PUs by thread. A thread that is missing in the result must not be pinned. For example, a
/// thread that its program has bound to some PUs of the grant is not pinned, but counts as the load of one of
/// these PUs. The result is empty in each of these cases:
///
/// - The policy forbids pinning.
/// - The grant has only one PU.
/// - There are more hot threads than PUs, and the policy does not pin threads in this case.
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
    if !policy.pin_hot_threads
        || load.order.len() < 2
        || (oversubscribed && policy.oversubscription == OversubscriptionPolicy::Float)
    {
        return BTreeMap::new();
    }
    load.assign(grant, hot_threads)
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
        let order = topology.sort_one_per_core_first(grant);
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
            threads_on_pu: order.iter().map(|&pu| (pu, 0)).collect(),
            threads_on_core: core.values().map(|&index| (index, 0)).collect(),
            order,
            core,
            equal_cores,
        }
    }

    fn assign(mut self, grant: &CpuSet, hot_threads: &[HotThread]) -> BTreeMap<ThreadId, Pu> {
        let is_bound = |hot_thread: &&HotThread| hot_thread.mask != *grant;
        let (mut bound, mut floating): (Vec<&HotThread>, Vec<_>) = hot_threads.iter().partition(is_bound);
        floating.sort_by_key(|hot_thread| hot_thread.thread);
        // The smallest masks first: they leave the fewest choices.
        bound.sort_by_key(|hot_thread| (hot_thread.mask.len(), hot_thread.thread));
        let free_pus = self.count_bound(grant, &bound);
        let balances_cores = self.equal_cores && (bound.is_empty() || floating.len() <= free_pus);

        let mut room = Room::new(&self.threads_on_pu, floating.len());
        let mut core_room = Room::new(&self.threads_on_core, floating.len());
        let mut pins = BTreeMap::new();
        let mut unplaced = Vec::new();
        for hot_thread in floating {
            let pinned = hot_thread.pinned_pu.and_then(|pu| Some((pu, *self.core.get(&pu)?)));
            let balanced = pinned.filter(|(pu, core)| {
                room.has_place(self.threads_on(*pu))
                    && (!balances_cores || core_room.has_place(self.threads_on_core(*core)))
            });
            let Some((pu, core)) = balanced else {
                unplaced.push(hot_thread);
                continue;
            };
            room.take_place(self.threads_on(pu));
            core_room.take_place(self.threads_on_core(core));
            self.add_thread(pu);
            pins.insert(hot_thread.thread, pu);
        }
        for hot_thread in unplaced {
            if let Some(pu) = self.best_pu_for(hot_thread) {
                self.add_thread(pu);
                pins.insert(hot_thread.thread, pu);
            }
        }
        pins
    }

    /// Counts each bound thread on a PU of its mask: on a PU of its own if there is one. The pins have no influence on that,
    /// so they stay when nothing else changes. Returns the number of PUs without a bound thread.
    fn count_bound(&mut self, grant: &CpuSet, bound: &[&HotThread]) -> usize {
        let mut matching = Matching::new(self.topology, grant);
        let without_pu: Vec<&HotThread> =
            bound.iter().copied().filter(|hot_thread| !matching.add(&hot_thread.mask)).collect();
        matching.places().iter().for_each(|&pu| self.add_thread(pu));
        // These threads share PUs that are counted for their cores already.
        for hot_thread in without_pu {
            if let Some(pu) = hot_thread.mask.iter().min_by_key(|&pu| self.threads_on(pu)) {
                *self.threads_on_pu.entry(pu).or_default() += 1;
            }
        }
        matching.free_pus().len()
    }

    fn best_pu_for(&self, hot_thread: &HotThread) -> Option<Pu> {
        let node_cpus = self.topology.domain_of(Level::NumaNode, hot_thread.last_cpu).map(|node| &node.cpus);
        let chosen_node = hot_thread.numa_node;
        let rank = |(index, pu): &(usize, Pu)| {
            let outside_chosen = chosen_node.is_some_and(|node| node_of(self.topology, *pu) != Some(node));
            let threads_on_core = self.core.get(pu).map_or(0, |core| self.threads_on_core(*core));
            let on_other_node = node_cpus.is_some_and(|node_cpus| !node_cpus.contains(*pu));
            let (pinned, last) = (hot_thread.pinned_pu == Some(*pu), hot_thread.last_cpu == *pu);
            (self.threads_on(*pu), threads_on_core, outside_chosen, !pinned, !last, on_other_node, *index)
        };
        self.order.iter().copied().enumerate().min_by_key(rank).map(|(_, pu)| pu)
    }

    fn threads_on(&self, pu: Pu) -> usize {
        self.threads_on_pu.get(&pu).copied().unwrap_or(0)
    }

    fn threads_on_core(&self, core: usize) -> usize {
        self.threads_on_core.get(&core).copied().unwrap_or(0)
    }

    fn add_thread(&mut self, pu: Pu) {
        *self.threads_on_pu.entry(pu).or_default() += 1;
        if let Some(&core) = self.core.get(&pu) {
            *self.threads_on_core.entry(core).or_default() += 1;
        }
    }
}

/// How many threads each PU, or each core, may have if threads are added where there are the fewest.
struct Room {
    /// The number of threads up to which each PU is filled.
    level: usize,
    /// The number of PUs that may get one thread more than `level`.
    above: usize,
}

impl Room {
    /// The room for `added` threads beside those that are counted in `threads_on`.
    fn new<T>(threads_on: &BTreeMap<T, usize>, added: usize) -> Self {
        let mut counts: Vec<usize> = threads_on.values().copied().collect();
        counts.sort_unstable();
        let (mut level, mut left) = (counts.first().copied().unwrap_or(0), added);
        for (filled, next) in (1..).zip(counts.iter().copied().skip(1).map(Some).chain([None])) {
            let steps = next.map_or(left / filled, |next| (left / filled).min(next - level));
            (level, left) = (level + steps, left - steps * filled);
            if next.is_none_or(|next| level < next) {
                break;
            }
        }
        Self { level, above: left }
    }

    /// Whether a PU that has so many threads may get another one.
    fn has_place(&self, threads: usize) -> bool {
        threads < self.level || (threads == self.level && self.above > 0)
    }

    /// Records that a PU that had so many threads gets another one.
    fn take_place(&mut self, threads: usize) {
        self.above = self.above.saturating_sub(usize::from(threads == self.level));
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
        bound_to(n, last_cpu, "", pinned)
    }

    /// A thread that may run on these PUs; on the whole grant if there is none.
    fn bound_to(n: u32, last_cpu: u32, mask: &str, pinned: Option<u32>) -> HotThread {
        let mask = mask.parse().unwrap();
        HotThread {
            thread: thread(n),
            last_cpu: Pu(last_cpu),
            mask,
            pinned_pu: pinned.map(Pu),
            numa_node: None,
        }
    }

    /// The pins of hot threads. A thread without a mask may run on the whole grant.
    fn pins_of(grant: &CpuSet, hot_threads: &[HotThread], policy: &Policy) -> BTreeMap<ThreadId, Pu> {
        let mut hot_threads = hot_threads.to_vec();
        for hot_thread in hot_threads.iter_mut().filter(|hot_thread| hot_thread.mask.is_empty()) {
            hot_thread.mask = grant.clone();
        }
        choose_pins(&machine(), grant, &hot_threads, policy)
    }

    fn spread() -> Policy {
        Policy { oversubscription: OversubscriptionPolicy::Spread, ..Policy::default() }
    }

    fn show(pins: &BTreeMap<ThreadId, Pu>) -> String {
        let cells: Vec<String> =
            pins.iter().map(|(thread, pu)| format!("{}:{pu}", thread.tid.0 - 100)).collect();
        cells.join(" ")
    }

    fn check(grant: &str, hot_threads: &[HotThread], expected: &str) {
        let pins = pins_of(&grant.parse().unwrap(), hot_threads, &spread());
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
    fn a_thread_goes_to_the_chosen_numa_node_while_a_core_is_idle_there() {
        let to_node_1 = |n, last_cpu| HotThread { numa_node: Some(1), ..floater(n, last_cpu, None) };
        check("0-7", &[to_node_1(0, 0), to_node_1(1, 0)], "0:2 1:3");
        check("0-7", &[to_node_1(0, 0), to_node_1(1, 0), to_node_1(2, 4)], "0:2 1:3 2:4");
        let pinned = HotThread { numa_node: Some(1), ..floater(0, 0, Some(0)) };
        check("0-7", &[pinned], "0:0");
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
        check("0-1,4-5", &[bound_to(9, 0, "0", None), floater(0, 0, None)], "0:1");
        check("0-1,4-5", &[bound_to(9, 0, "0,4", None), floater(0, 0, None)], "0:1");
    }

    #[test]
    fn a_bound_thread_is_counted_where_it_leaves_room_for_the_others() {
        let bound = [bound_to(7, 0, "0-1,4-5", None), bound_to(8, 0, "0,4", None)];
        let floaters = [floater(0, 5, None), floater(1, 4, None)];
        check("0-7", &[bound.as_slice(), &floaters].concat(), "0:2 1:3");
    }

    #[test]
    fn many_threads_bound_to_one_core_do_not_make_others_share_another() {
        let bound: Vec<HotThread> = (10..18).map(|n| bound_to(n, 0, "0,4", None)).collect();
        let floaters = [floater(0, 1, Some(1)), floater(1, 5, Some(5))];
        check("0-7", &[bound.as_slice(), &floaters].concat(), "0:1 1:2");
    }

    #[test]
    fn more_threads_than_pus_float_unless_the_policy_spreads_them() {
        let grant: CpuSet = "0-1,4-5".parse().unwrap();
        let many: Vec<_> = (0..6).map(|n| floater(n, 0, None)).collect();
        let float = Policy { oversubscription: OversubscriptionPolicy::Float, ..Policy::default() };
        assert!(pins_of(&grant, &many, &float).is_empty());
        assert_eq!(pins_of(&grant, &many, &spread()).len(), 6);
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
            let pins = pins_of(&grant, &hot_threads, &spread());
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
                pinned_pu: pins.get(&hot_thread.thread).copied(),
                ..hot_thread.clone()
            }).collect();
            prop_assert_eq!(&pins_of(&grant, &again, &spread()), &pins, "a second call moves no thread");
            let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
            prop_assert_eq!(&pins_of(&grant, &backwards, &spread()), &pins);
        }

        #[test]
        fn pins_beside_bound_threads_are_even_and_stable(
            hot_threads in any_runners(),
            bound in proptest::collection::vec(1u64..256, 0..12),
        ) {
            let grant = CpuSet::from_words(&[255]);
            let bound_threads = bound.iter().zip(100..).map(|(&word, n)| HotThread {
                mask: CpuSet::from_words(&[word]),
                ..floater(n, 0, None)
            });
            let hot_threads: Vec<HotThread> = hot_threads.into_iter().chain(bound_threads).collect();
            let pins = pins_of(&grant, &hot_threads, &spread());
            let is_floating = |known: &&HotThread| known.mask.is_empty() || known.mask == grant;
            prop_assert!(hot_threads.iter().filter(is_floating).map(|known| &known.thread).eq(pins.keys()));
            // A pinned thread shares a PU only if no PU is without a thread.
            let topology = machine();
            let mut matching = Matching::new(&topology, &grant);
            let pinned: Vec<CpuSet> = pins.values().copied().map(CpuSet::from).collect();
            let mut masks: Vec<&CpuSet> =
                hot_threads.iter().filter(|known| !is_floating(known)).map(|known| &known.mask).collect();
            masks.sort_by_key(|mask| mask.len());
            for mask in masks {
                matching.add(mask);
            }
            let shared = pinned.iter().filter(|pin| !matching.add(pin)).count();
            prop_assert!(shared == 0 || matching.free_pus().is_empty(), "{pins:?}");
            let again: Vec<HotThread> = hot_threads
                .iter()
                .map(|known| HotThread { pinned_pu: pins.get(&known.thread).copied(), ..known.clone() })
                .collect();
            prop_assert_eq!(&pins_of(&grant, &again, &spread()), &pins, "a second call moves no thread");
            let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
            prop_assert_eq!(&pins_of(&grant, &backwards, &spread()), &pins);
        }
    }
}
