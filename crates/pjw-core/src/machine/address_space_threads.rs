//! Where the hot threads of one address space go: into one L3 cache, or else into one NUMA node.
//!
//! Processes that share an address space (clone(2) with `CLONE_VM`) read the same memory, and mmap(2) and munmap(2) of
//! one interrupt all cores on which the others run. Both cost least where the cores have a cache or a NUMA node in
//! common.

use core::cmp::Reverse;

use crate::basics::{CpuSet, Pu, prelude::*};
use crate::machine::topology::{Topology, TopologyLevel};

/// A group of threads of one job that use the same memory. If possible, pjw places these threads on cores of one L3
/// cache or of one NUMA node.
///
/// The group belongs to an address space that several processes share (clone(2) with `CLONE_VM`). The group has the hot
/// threads of the job in this address space. A thread is hot if it runs or waits for a PU (logical CPU) most of the
/// time. If no thread is hot, the group has one thread of each process instead: the living thread with the lowest tid,
/// which is usually the main thread. This thread may become hot later.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddressSpaceThreads {
    /// The number of the address space.
    pub number: u32,
    /// The threads of the group, each with the PU on which it ran last and the PU to which it is pinned.
    pub threads: Vec<ThreadPlace>,
}

/// The place of one thread: the PU (logical CPU) on which the thread ran last, and the PU to which pjw has pinned the
/// thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPlace {
    /// The PU on which the thread ran last.
    pub last_cpu: Pu,
    /// The PU to which pjw has pinned the thread. `None` if pjw has not pinned the thread.
    pub pinned_pu: Option<Pu>,
}

impl AddressSpaceThreads {
    /// Returns the PUs (logical CPUs) of the threads of this group. The PU of a pinned thread is the PU to which pjw
    /// has pinned the thread. The PU of any other thread is the PU on which the thread ran last.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.threads.iter().map(|thread| thread.pinned_pu.unwrap_or(thread.last_cpu)).collect()
    }

    /// Returns the cores to which the threads are pinned. `None` if a thread is not pinned, if two threads are pinned
    /// to the same core, or if the cores are neither in one L3 cache nor in one NUMA node.
    fn cores_in_one_domain(&self, topology: &Topology) -> Option<CpuSet> {
        let mut cores = CpuSet::new();
        for thread in &self.threads {
            let core = topology.core_cpus(thread.pinned_pu?);
            if core.intersects(&cores) {
                return None;
            }
            cores.extend(core.iter());
        }
        let is_in = |level| topology.domains(level).any(|domain| cores.is_subset(&domain.cpus));
        [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter().any(is_in).then_some(cores)
    }

    /// The number of threads in `cpus`: of those that are pinned, and of those that ran there last.
    fn counts_in(&self, cpus: &CpuSet) -> (usize, usize) {
        let pinned = self.threads.iter().filter_map(|thread| thread.pinned_pu);
        let last = self.threads.iter().map(|thread| thread.last_cpu);
        (pinned.filter(|&pu| cpus.contains(pu)).count(), last.filter(|&pu| cpus.contains(pu)).count())
    }
}

/// The cores that [`choose_group_cores`] has chosen for one group of threads ([`AddressSpaceThreads`]): one core for
/// each thread. All of these cores are in one L3 cache, or all are in one NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupCores {
    /// Whether the cores are in one L3 cache ([`TopologyLevel::L3`]) or in one NUMA node ([`TopologyLevel::NumaNode`]).
    pub level: TopologyLevel,
    /// The PUs of the cores.
    pub cpus: CpuSet,
}

/// Chooses one core for each thread of each group, so that the cores of a group are close together: in one L3 cache, or
/// else in one NUMA node. No core is chosen for two groups. Returns the chosen cores by
/// [`AddressSpaceThreads::number`].
///
/// - `groups` lists the groups. The threads of a group share an address space.
/// - `free_cores` lists the cores that can be chosen. Each item is the set of the PUs (logical CPUs) of one core.
///
/// Below, a group is called placed if its threads are already pinned to different cores of one L3 cache or of one NUMA
/// node. The function chooses by these rules:
///
/// - Placed groups come before all other groups. Otherwise, a group with more threads comes first.
/// - A group that is placed in one L3 cache keeps its cores, even if `free_cores` does not contain them. Any other
///   group gets free cores of an L3 cache that has enough free cores.
/// - Of several such L3 caches, the function prefers the L3 cache to which the most threads of the group are pinned. If
///   these numbers are equal, it prefers the L3 cache on which the most threads ran last, and then the L3 cache with
///   the lowest PU number.
/// - If no L3 cache has enough free cores, a NUMA node is chosen by the same rules.
///
/// The result has no entry for a group if no L3 cache and no NUMA node has enough free cores. It also has no entry for
/// a placed group if an earlier group got one of its cores.
#[must_use]
pub fn choose_group_cores(
    topology: &Topology,
    free_cores: &[CpuSet],
    groups: &[AddressSpaceThreads],
) -> BTreeMap<u32, GroupCores> {
    let mut in_order: Vec<(Option<CpuSet>, &AddressSpaceThreads)> =
        groups.iter().map(|group| (group.cores_in_one_domain(topology), group)).collect();
    in_order
        .sort_by_key(|(placed_on, group)| (placed_on.is_none(), Reverse(group.threads.len()), group.number));
    let mut free: Vec<&CpuSet> = free_cores.iter().collect();
    let mut taken = CpuSet::new();
    let mut chosen = BTreeMap::new();
    for (index, (placed_on, group)) in in_order.iter().enumerate() {
        // Two groups that are in one domain already can share a core. The later group gets no entry: its threads are
        // pinned one by one.
        if placed_on.as_ref().is_some_and(|cores| cores.intersects(&taken)) {
            continue;
        }
        // The cores of groups that come later and are in one domain already are reserved for these groups.
        let later = in_order[index + 1..].iter().filter_map(|(placed_on, _)| placed_on.as_ref());
        let reserved: CpuSet = later.flat_map(CpuSet::iter).collect();
        let usable: Vec<&CpuSet> = free.iter().copied().filter(|core| !core.intersects(&reserved)).collect();
        let Some(cores) = choose_cores(topology, &usable, placed_on.as_ref(), group) else { continue };
        free.retain(|core| !core.intersects(&cores.cpus));
        taken.extend(cores.cpus.iter());
        chosen.insert(group.number, cores);
    }
    chosen
}

/// Chooses cores in one L3 cache for `group`, a group of threads that share an address space. If no L3 cache has
/// enough free cores, chooses cores in one NUMA node.
///
/// - `free` has the cores that the group may get, each with all its PUs (logical CPUs).
/// - `placed_on` has the present cores of the group, if they are in one L3 cache or NUMA node already. The group
///   keeps these cores if an L3 cache contains them, or if no L3 cache has enough free cores.
///
/// A group that keeps no cores gets `None` if no L3 cache and no NUMA node has enough free cores.
fn choose_cores(
    topology: &Topology,
    free: &[&CpuSet],
    placed_on: Option<&CpuSet>,
    group: &AddressSpaceThreads,
) -> Option<GroupCores> {
    [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter().find_map(|level| {
        let contains_placed_cores = |cpus: &CpuSet| placed_on.is_some_and(|cores| cores.is_subset(cpus));
        let free_in = |cpus: &CpuSet| free.iter().filter(|core| core.is_subset(cpus)).count();
        let fits = |cpus: &&CpuSet| contains_placed_cores(cpus) || free_in(cpus) >= group.threads.len();
        let rank = |cpus: &&CpuSet| (group.counts_in(cpus), Reverse(cpus.first()));
        let domain = topology.domains(level).map(|domain| &domain.cpus).filter(fits).max_by_key(rank)?;
        if let Some(cores) = placed_on.filter(|cores| cores.is_subset(domain)) {
            return Some(GroupCores { level, cpus: cores.clone() });
        }
        // The cores to which its threads are pinned already are taken first.
        let present = group.cpus();
        let mut cores: Vec<&CpuSet> = free.iter().copied().filter(|core| core.is_subset(domain)).collect();
        cores.sort_by_key(|core| !core.intersects(&present));
        let cpus = cores.into_iter().take(group.threads.len());
        Some(GroupCores { level, cpus: cpus.flat_map(CpuSet::iter).collect() })
    })
}

/// Returns whether the threads of each group can be as close together after a move of a job as before. `from` and `to`
/// are the PUs (logical CPUs) of the job before and after the move. `groups` are the groups of threads that share an
/// address space. The result is true if both conditions hold:
///
/// - Each group for which [`choose_group_cores`] finds cores in one L3 cache of `from` also gets cores in one L3 cache
///   of `to`.
/// - Each group for which [`choose_group_cores`] finds cores only in one NUMA node of `from` gets cores in one L3 cache
///   or one NUMA node of `to`.
///
/// The function ignores to which PUs the threads are pinned now, because the move changes these PUs.
#[must_use]
pub fn keeps_groups_together(
    topology: &Topology,
    groups: &[AddressSpaceThreads],
    from: &CpuSet,
    to: &CpuSet,
) -> bool {
    // Where the threads are pinned now does not matter: all of them move.
    let unpinned = |group: &AddressSpaceThreads| AddressSpaceThreads {
        number: group.number,
        threads: group.threads.iter().map(|thread| ThreadPlace { pinned_pu: None, ..*thread }).collect(),
    };
    let groups: Vec<AddressSpaceThreads> = groups.iter().map(unpinned).collect();
    let cores_of = |cpus: &CpuSet| {
        let cores: Vec<CpuSet> = topology.split_by_core(cpus).collect();
        choose_group_cores(topology, &cores, &groups)
    };
    let (before, after) = (cores_of(from), cores_of(to));
    before.iter().all(|(number, cores)| after.get(number).is_some_and(|now| now.level <= cores.level))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::machine::topology::RegularShape;

    /// Two NUMA nodes of two L3 caches of two cores of one PU: node 0 has the PUs 0-3, the first L3 cache the PUs 0-1.
    fn machine() -> Topology {
        Topology::from_shape(RegularShape {
            packages: 2,
            numa_nodes_per_package: 1,
            l3s_per_numa_node: 2,
            cores_per_l3: 2,
            pus_per_core: 1,
        })
    }

    /// A group of threads that ran last on these PUs. None is pinned.
    fn group(number: u32, last_cpus: &[u32]) -> AddressSpaceThreads {
        let thread = |&pu: &u32| ThreadPlace { last_cpu: Pu(pu), pinned_pu: None };
        AddressSpaceThreads { number, threads: last_cpus.iter().map(thread).collect() }
    }

    fn cores(cpus: &str, groups: &[AddressSpaceThreads]) -> Vec<(u32, TopologyLevel, String)> {
        let machine = machine();
        let free: Vec<CpuSet> = machine.split_by_core(&cpus.parse().unwrap()).collect();
        let chosen = choose_group_cores(&machine, &free, groups).into_iter();
        chosen.map(|(number, cores)| (number, cores.level, cores.cpus.to_string())).collect()
    }

    #[test]
    fn a_group_gets_the_smallest_domain_in_which_each_thread_has_a_core() {
        assert_eq!(cores("0-7", &[group(1, &[0, 7])]), [(1, TopologyLevel::L3, "0-1".into())]);
        assert_eq!(cores("0-7", &[group(1, &[6, 7])]), [(1, TopologyLevel::L3, "6-7".into())]);
        assert_eq!(cores("0-7", &[group(1, &[0, 4, 5])]), [(1, TopologyLevel::NumaNode, "4-6".into())]);
        assert_eq!(cores("0-7", &[group(1, &[0, 1, 2, 3, 4])]), []);
        assert_eq!(cores("0,2,4,6", &[group(1, &[4, 0])]), [(1, TopologyLevel::NumaNode, "0,2".into())]);
    }

    #[test]
    fn pins_count_more_than_the_last_pu() {
        let mut pinned = group(1, &[0, 1]);
        pinned.threads[0].pinned_pu = Some(Pu(5));
        assert_eq!(cores("0-7", std::slice::from_ref(&pinned)), [(1, TopologyLevel::L3, "4-5".into())]);
        // Both cores are shared with other threads.
        pinned.threads[1].pinned_pu = Some(Pu(4));
        assert_eq!(cores("0-3", std::slice::from_ref(&pinned)), [(1, TopologyLevel::L3, "4-5".into())]);
        pinned.threads[1].pinned_pu = Some(Pu(5));
        assert_eq!(cores("0-3", &[pinned]), [(1, TopologyLevel::L3, "0-1".into())]);
    }

    #[test]
    fn two_groups_do_not_share_a_core() {
        let groups = [group(1, &[0, 1]), group(2, &[0, 1])];
        assert_eq!(
            cores("0-7", &groups),
            [(1, TopologyLevel::L3, "0-1".into()), (2, TopologyLevel::L3, "2-3".into())]
        );
        // The larger one is placed first.
        let groups = [group(1, &[0, 1]), group(2, &[0, 1, 2, 3])];
        assert_eq!(
            cores("0-7", &groups),
            [(1, TopologyLevel::L3, "4-5".into()), (2, TopologyLevel::NumaNode, "0-3".into())]
        );
        assert_eq!(cores("0-3", &groups), [(2, TopologyLevel::NumaNode, "0-3".into())]);
        assert_eq!(cores("", &groups), []);
    }

    /// Two NUMA nodes of two L3 caches of three cores of two PUs.
    fn larger_machine() -> Topology {
        Topology::from_shape(RegularShape {
            packages: 2,
            numa_nodes_per_package: 1,
            l3s_per_numa_node: 2,
            cores_per_l3: 3,
            pus_per_core: 2,
        })
    }

    /// Up to seven threads: each ran last on a PU, and is pinned to it or not.
    fn any_group() -> impl Strategy<Value = Vec<(u32, bool)>> {
        proptest::collection::vec((0u32..24, proptest::bool::weighted(0.3)), 1..8)
    }

    proptest! {
        #[test]
        fn each_group_gets_a_core_for_each_thread_in_the_smallest_domain_that_has_them(
            free in 0u16..1 << 12,
            groups in proptest::collection::vec(any_group(), 1..4),
        ) {
            let machine = larger_machine();
            let is_free = |index: &usize| free >> index & 1 == 1;
            let cores = machine.cores().iter().map(|core| core.pus.clone()).enumerate();
            let free: Vec<CpuSet> = cores.filter(|(index, _)| is_free(index)).map(|(_, pus)| pus).collect();
            let thread = |&(pu, is_pinned): &(u32, bool)| {
                ThreadPlace { last_cpu: Pu(pu), pinned_pu: is_pinned.then_some(Pu(pu)) }
            };
            let groups: Vec<AddressSpaceThreads> = (0..)
                .zip(&groups)
                .map(|(number, threads)| AddressSpaceThreads { number, threads: threads.iter().map(thread).collect() })
                .collect();
            let chosen = choose_group_cores(&machine, &free, &groups);
            let mut taken = CpuSet::new();
            for (number, GroupCores { level, cpus }) in &chosen {
                let group = &groups[usize::try_from(*number).unwrap()];
                prop_assert_eq!(machine.split_by_core(cpus).count(), group.threads.len());
                prop_assert_eq!(machine.whole_core_count(cpus) as usize, group.threads.len(), "whole cores");
                prop_assert!(machine.domains(*level).any(|domain| cpus.is_subset(&domain.cpus)));
                prop_assert!(!taken.intersects(cpus), "no core is chosen twice");
                taken.extend(cpus.iter());
                let is_own = group.cores_in_one_domain(&machine).as_ref() == Some(cpus);
                let are_free = machine.split_by_core(cpus).all(|core| free.contains(&core));
                prop_assert!(is_own || are_free, "{} of {:?}", cpus, group);
            }
            // A group alone gets the smallest domain that has a free core for each thread.
            let (alone, size) = (&groups[0], groups[0].threads.len());
            if alone.threads.iter().all(|thread| thread.pinned_pu.is_none()) {
                let has_cores = |level: &TopologyLevel| {
                    machine.domains(*level).any(|domain| {
                        free.iter().filter(|core| core.is_subset(&domain.cpus)).count() >= size
                    })
                };
                let smallest = [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter().find(has_cores);
                let chosen = choose_group_cores(&machine, &free, std::slice::from_ref(alone));
                prop_assert_eq!(chosen.get(&0).map(|cores| cores.level), smallest);
            }
        }
    }

    #[test]
    fn a_move_keeps_a_group_together_if_it_finds_a_domain_of_the_same_level() {
        let keeps = |group: AddressSpaceThreads, from: &str, to: &str| {
            keeps_groups_together(&machine(), &[group], &from.parse().unwrap(), &to.parse().unwrap())
        };
        assert!(keeps(group(1, &[0, 1]), "0-1,4", "5-7"));
        assert!(!keeps(group(1, &[0, 1]), "0-1,4", "1,3,5"), "two L3 caches instead of one");
        assert!(keeps(group(1, &[0, 4]), "0,4", "1,5"), "it was divided before");
        assert!(!keeps(group(1, &[0, 1, 2]), "0-2", "1,4,6"));
        assert!(keeps(group(1, &[0, 2, 3]), "0,2-3", "4,6-7"));
    }
}
