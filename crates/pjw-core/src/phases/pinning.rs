//! Pinning inside a job: chooses a PU for each hot thread.
//!
//! A *floating* thread may run on all PUs of the grant. A *bound* thread has a mask of its program inside the grant.
//! pjw does not pin it. It counts on one PU of its mask, so that as many bound threads as possible count on PUs of
//! their own (`ThreadPuMatching`). Hot floating threads are spread over the PUs of the grant: on the PU with the fewest
//! threads, of these on the core with the fewest, near the PU on which the thread already runs. Threads of processes
//! that share an address space are placed in one L3 cache or one NUMA node, if each of them gets a free core there, and
//! the job has a core for each hot thread. Cold threads float.
//!
//! Tests check these properties: pins are inside the grant; the numbers of threads on two PUs differ by at
//! most one, as far as bound threads allow; a pin that is still balanced stays; the order of the input has no
//! effect.

pub(crate) mod within_job;

use crate::basics::{CpuSet, Pu, ThreadId, prelude::*};
use crate::machine::{
    AddressSpaceThreads, GroupCores, ThreadPlace, Topology, TopologyLevel, choose_group_cores,
};
use crate::phases::overload::matching::ThreadPuMatching;
use crate::phases::pinning::within_job::numa_node_of_pu;
use crate::terms::{OversubscriptionPolicy, Policy};

/// A hot thread of a job, as input for [`choose_pins`]. A thread is hot if it runs or waits for a PU (logical
/// CPU) most of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotThread {
    /// The process, the tid and the start time of the thread.
    pub thread: ThreadId,
    /// The PU on which the thread ran last.
    pub last_cpu: Pu,
    /// The PUs on which the thread may run. Never empty. Usually, these are all PUs that the job holds (the
    /// grant). If the program has bound the thread to some of them, these are only the PUs of this binding.
    pub mask: CpuSet,
    /// The PU to which pjw has pinned the thread: pjw chose this PU, and restricted the thread to it. `None` if pjw has
    /// not pinned the thread.
    pub pinned_pu: Option<Pu>,
    /// The kernel's number of the NUMA node that pjw chose for the process of the thread. The thread is pinned in this
    /// NUMA node. But if the thread would have to share a core or a PU there while others are idle, it is pinned
    /// elsewhere. `None` if pjw chose no NUMA node.
    pub numa_node: Option<u32>,
    /// The number of the address space, if the process of the thread shares its address space with another process. The
    /// threads with the same number are pinned in one L3 cache or in one NUMA node, if each of them gets a core of its
    /// own there. `None` if the process shares its address space with no other process, or if pjw chose a NUMA node for
    /// the process.
    pub address_space: Option<u32>,
}

/// Chooses a PU (logical CPU) for each hot thread of a job, to which pjw pins (restricts) the thread. A thread is hot
/// if it runs or waits for a PU most of the time. `grant` is the set of PUs that the job holds. The hot threads are
/// spread over these PUs as evenly as possible.
///
/// Returns the chosen PU of each thread that pjw should pin. A thread that its program has bound to some PUs of the
/// grant is not in the result, but counts as the load of one of these PUs. The result is empty in each of these cases:
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
    load.pin_floating_threads(grant, hot_threads)
}

impl HotThread {
    /// The cores that are chosen for the threads of the address space.
    fn group_cpus<'c>(&self, cores: &'c BTreeMap<u32, GroupCores>) -> Option<&'c CpuSet> {
        cores.get(&self.address_space?).map(|cores| &cores.cpus)
    }
}

/// The pins that are chosen so far, and how many more threads each PU and each core may get. A pin is the PU to which
/// pjw restricts a thread.
struct Placing {
    room: Room,
    /// The room on cores. `None` if threads are balanced by PU only.
    core_room: Option<Room>,
    pins: BTreeMap<ThreadId, Pu>,
    /// The cores that have the pin of a thread of a group (the threads that share an address space). Only cores that
    /// were chosen for groups are listed. Each of them is for one thread.
    used_by_groups: BTreeSet<usize>,
}

/// The PUs of a grant (the PUs of a job), with the number of hot threads on each PU and on each core. A thread is hot
/// if it runs or waits for a PU most of the time.
struct PuLoad<'a> {
    topology: &'a Topology,
    /// The PUs, one of every core before the second of any core.
    order: Vec<Pu>,
    /// The number of the core of each PU. The cores are numbered from 0 in the order of their first PUs in `order`.
    core: BTreeMap<Pu, usize>,
    threads_on_pu: BTreeMap<Pu, usize>,
    threads_on_core: BTreeMap<usize, usize>,
    /// Whether all cores have the same number of PUs in the grant. Only then are threads balanced by core
    /// too.
    equal_cores: bool,
}

impl<'a> PuLoad<'a> {
    /// Makes the record of the PUs in `grant`, with no thread on any PU.
    fn new(topology: &'a Topology, grant: &CpuSet) -> Self {
        let order = topology.sort_one_per_core_first(grant);
        let mut core_numbers: BTreeMap<CpuSet, usize> = BTreeMap::new();
        let mut core = BTreeMap::new();
        for &pu in &order {
            let next = core_numbers.len();
            core.insert(pu, *core_numbers.entry(topology.core_cpus(pu)).or_insert(next));
        }
        let mut sizes = vec![0usize; core_numbers.len()];
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

    /// Chooses the PU to which each floating thread is pinned. A thread is floating if its mask is `grant`, and bound
    /// otherwise: its program restricted it to a part of `grant`. Returns the PUs by thread, without the bound threads.
    ///
    /// - Each bound thread is first counted on a PU of its mask.
    /// - A pin that is still balanced stays.
    /// - Groups (the threads that share an address space) are placed near each other, before the threads without a pin
    ///   that can stay. If the job has more hot threads than cores, groups are ignored.
    fn pin_floating_threads(mut self, grant: &CpuSet, hot_threads: &[HotThread]) -> BTreeMap<ThreadId, Pu> {
        let is_bound = |hot_thread: &&HotThread| hot_thread.mask != *grant;
        let (mut bound, mut floating): (Vec<&HotThread>, Vec<_>) = hot_threads.iter().partition(is_bound);
        floating.sort_by_key(|hot_thread| hot_thread.thread);
        // The smallest masks first: they leave the fewest choices.
        bound.sort_by_key(|hot_thread| (hot_thread.mask.len(), hot_thread.thread));
        let free_pus = self.count_bound_threads(grant, &bound);
        let balances_cores = self.equal_cores && (bound.is_empty() || floating.len() <= free_pus);

        let mut placing = Placing {
            room: Room::new(&self.threads_on_pu, floating.len()),
            core_room: balances_cores.then(|| Room::new(&self.threads_on_core, floating.len())),
            pins: BTreeMap::new(),
            used_by_groups: BTreeSet::new(),
        };
        // With more threads than cores, an even distribution matters more, and a group would move often.
        let has_core_for_each = hot_threads.len() <= self.threads_on_core.len();
        let is_grouped = |hot_thread: &&HotThread| has_core_for_each && hot_thread.address_space.is_some();
        let (grouped, others): (Vec<&HotThread>, Vec<_>) = floating.into_iter().partition(is_grouped);
        // The pins of all others stay: a group goes where they leave free cores.
        let mut unplaced = self.keep_pins(&mut placing, others, &BTreeMap::new());
        let cores = self.group_cores(&grouped);
        let has_cores = |hot_thread: &&HotThread| hot_thread.group_cpus(&cores).is_some();
        let (inside, others): (Vec<&HotThread>, Vec<_>) = grouped.into_iter().partition(has_cores);
        let outside = self.keep_pins(&mut placing, inside, &cores);
        self.place_threads(&mut placing, outside, &cores);
        unplaced.extend(self.keep_pins(&mut placing, others, &cores));
        unplaced.sort_by_key(|hot_thread| hot_thread.thread);
        self.place_threads(&mut placing, unplaced, &cores);
        placing.pins
    }

    /// Adds to `placing` the present pins of `hot_threads` that can stay. Returns the threads without a pin that can
    /// stay. A pin can stay if its PU and its core may have one more thread. If `cores` has cores for the address space
    /// of a thread, two more conditions must hold:
    ///
    /// - The pin is on one of these cores.
    /// - No other thread of an address space in `cores` is pinned on this core.
    fn keep_pins<'t>(
        &mut self,
        placing: &mut Placing,
        hot_threads: Vec<&'t HotThread>,
        cores: &BTreeMap<u32, GroupCores>,
    ) -> Vec<&'t HotThread> {
        let mut unplaced = Vec::new();
        for hot_thread in hot_threads {
            let cpus = hot_thread.group_cpus(cores);
            let pinned = hot_thread.pinned_pu.filter(|pu| cpus.is_none_or(|cpus| cpus.contains(*pu)));
            let pinned = pinned.and_then(|pu| Some((pu, *self.core.get(&pu)?)));
            let has_place = |&(pu, core): &(Pu, usize)| {
                (cpus.is_none() || !placing.used_by_groups.contains(&core))
                    && placing.room.has_place(self.threads_on(pu))
                    && placing
                        .core_room
                        .as_ref()
                        .is_none_or(|room| room.has_place(self.threads_on_core(core)))
            };
            match pinned.filter(has_place) {
                Some((pu, core)) => {
                    placing.used_by_groups.extend(cpus.map(|_| core));
                    self.pin(placing, hot_thread, pu);
                }
                None => unplaced.push(hot_thread),
            }
        }
        unplaced
    }

    /// Pins each of `hot_threads` to the best PU for it, in this order, and adds the pins to `placing`. If `cores` has
    /// cores for the address space of a thread, they are preferred among equally loaded PUs.
    fn place_threads(
        &mut self,
        placing: &mut Placing,
        hot_threads: Vec<&HotThread>,
        cores: &BTreeMap<u32, GroupCores>,
    ) {
        for hot_thread in hot_threads {
            if let Some(pu) = self.best_pu_for(hot_thread, hot_thread.group_cpus(cores)) {
                self.pin(placing, hot_thread, pu);
            }
        }
    }

    fn pin(&mut self, placing: &mut Placing, hot_thread: &HotThread, pu: Pu) {
        placing.room.take_place(self.threads_on(pu));
        if let Some((room, &core)) = placing.core_room.as_mut().zip(self.core.get(&pu)) {
            room.take_place(self.threads_on_core(core));
        }
        self.add_thread(pu);
        placing.pins.insert(hot_thread.thread, pu);
    }

    /// Chooses cores for each group: the threads in `grouped` that share an address space. A group gets one core for
    /// each of its threads, all in one L3 cache or one NUMA node. These are cores without a counted thread. The pins of
    /// the groups are not counted yet. Returns the cores by the number of the address space. A group is left out if no
    /// cache and no node has enough such cores, or if another group got one of its present cores.
    fn group_cores(&self, grouped: &[&HotThread]) -> BTreeMap<u32, GroupCores> {
        let mut groups: BTreeMap<u32, AddressSpaceThreads> = BTreeMap::new();
        for hot_thread in grouped {
            let Some(number) = hot_thread.address_space else { continue };
            let group =
                groups.entry(number).or_insert_with(|| AddressSpaceThreads { number, threads: Vec::new() });
            // A pin on a core with another thread does not stay, so it does not keep the group there.
            let is_on_free_core =
                |pu: &Pu| self.core.get(pu).is_some_and(|core| self.threads_on_core(*core) == 0);
            let pinned_pu = hot_thread.pinned_pu.filter(is_on_free_core);
            group.threads.push(ThreadPlace { last_cpu: hot_thread.last_cpu, pinned_pu });
        }
        if groups.is_empty() {
            return BTreeMap::new();
        }
        let mut free: BTreeMap<usize, CpuSet> = BTreeMap::new();
        let is_free = |core: &usize| self.threads_on_core(*core) == 0;
        for (&pu, &core) in self.core.iter().filter(|(_, core)| is_free(core)) {
            free.entry(core).or_default().insert(pu);
        }
        let (free, groups): (Vec<CpuSet>, Vec<AddressSpaceThreads>) =
            (free.into_values().collect(), groups.into_values().collect());
        choose_group_cores(self.topology, &free, &groups)
    }

    /// Counts each thread of `bound` on one PU of its mask. These are the threads that their program bound to a part of
    /// `grant`: they are not pinned, but use PUs.
    ///
    /// - As many of them as possible get a PU for themselves.
    /// - Each other one is counted on the PU of its mask with the fewest threads.
    ///
    /// The present pins have no influence, so they stay when nothing else changes. Returns the number of PUs without a
    /// bound thread.
    fn count_bound_threads(&mut self, grant: &CpuSet, bound: &[&HotThread]) -> usize {
        let mut matching = ThreadPuMatching::new(self.topology, grant);
        let without_pu: Vec<&HotThread> =
            bound.iter().copied().filter(|hot_thread| !matching.add_thread(&hot_thread.mask)).collect();
        matching.assigned_pus().iter().for_each(|&pu| self.add_thread(pu));
        // These threads share PUs that are counted for their cores already.
        for hot_thread in without_pu {
            if let Some(pu) = hot_thread.mask.iter().min_by_key(|&pu| self.threads_on(pu)) {
                *self.threads_on_pu.entry(pu).or_default() += 1;
            }
        }
        matching.free_pus().len()
    }

    /// Returns the PU of the grant to which `hot_thread` should be pinned: the PU with the fewest threads. If several
    /// PUs have the fewest threads, the first of these rules that distinguishes them decides:
    ///
    /// 1. A PU on the core with the fewest threads.
    /// 2. A PU in the NUMA node that was chosen for the process, and in `group_cpus`: the PUs of the cores that were
    ///    chosen for all threads in the address space of the process. A missing choice excludes no PU.
    /// 3. The PU to which the thread is pinned now.
    /// 4. The PU on which the thread ran last.
    /// 5. A PU in the NUMA node of that last PU.
    /// 6. The first PU in `self.order`.
    ///
    /// `None` if the grant has no PU.
    fn best_pu_for(&self, hot_thread: &HotThread, group_cpus: Option<&CpuSet>) -> Option<Pu> {
        let node_cpus =
            self.topology.domain_of(TopologyLevel::NumaNode, hot_thread.last_cpu).map(|node| &node.cpus);
        let chosen_node = hot_thread.numa_node;
        let rank = |(index, pu): &(usize, Pu)| {
            let outside_chosen = chosen_node
                .is_some_and(|node| numa_node_of_pu(self.topology, *pu) != Some(node))
                || group_cpus.is_some_and(|cpus| !cpus.contains(*pu));
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
    /// Computes how many threads each PU (or core) may have if `added` threads are added as evenly as possible.
    /// `threads_on` has the present number of threads on each of them.
    fn new<T>(threads_on: &BTreeMap<T, usize>, added: usize) -> Self {
        let mut counts: Vec<usize> = threads_on.values().copied().collect();
        counts.sort_unstable();
        let (mut level, mut left) = (counts.first().copied().unwrap_or(0), added);
        // The first `filled` PUs are filled up to `next`, the present number of threads on the PU after them, as long
        // as threads are left. There is no PU after the last one.
        for (filled, next) in (1..).zip(counts.iter().copied().skip(1).map(Some).chain([None])) {
            let steps = next.map_or(left / filled, |next| (left / filled).min(next - level));
            (level, left) = (level + steps, left - steps * filled);
            if next.is_none_or(|next| level < next) {
                break;
            }
        }
        Self { level, above: left }
    }

    /// Whether a PU to which `threads` threads are assigned may get another one.
    fn has_place(&self, threads: usize) -> bool {
        threads < self.level || (threads == self.level && self.above > 0)
    }

    /// Records that a PU to which `threads` threads are assigned gets another one.
    fn take_place(&mut self, threads: usize) {
        self.above = self.above.saturating_sub(usize::from(threads == self.level));
    }
}

#[cfg(test)]
mod tests;
