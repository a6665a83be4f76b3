//! The hot threads of the address spaces that processes of a job share: where they run.

use crate::basics::{CpuSet, prelude::*};
use crate::machine::{AddressSpaceThreads, ThreadPlace, TopologyLevel};
use crate::state::WardenState;
use crate::terms::JobId;

impl WardenState {
    /// Returns groups of threads of the job `id` that use the same memory. pjw tries to keep the threads of a group in
    /// one L3 cache or NUMA node.
    ///
    /// There is one group for each address space that a process of the job shares with another process (clone(2) with
    /// `CLONE_VM`). The group has the hot threads of the job in this address space. A thread is hot if it runs or waits
    /// for a PU (logical CPU) most of the time.
    ///
    /// If no thread in the address space is hot, the group instead has one thread of each process: the thread with the
    /// lowest tid that has not exited. This thread may become hot soon. The group then has no thread of a process that
    /// exists only to own the address space of other processes
    /// ([`Member::is_task_host`](crate::state::Member::is_task_host)).
    #[must_use]
    pub fn address_space_threads_of(&self, id: &JobId) -> Vec<AddressSpaceThreads> {
        if self.address_spaces.groups().next().is_none() {
            return Vec::new();
        }
        let mut hot: BTreeMap<u32, Vec<ThreadPlace>> = BTreeMap::new();
        let mut first_threads: BTreeMap<u32, Vec<ThreadPlace>> = BTreeMap::new();
        for member in self.members_of(id) {
            let Some(group) = self.address_spaces.group_of(member.id) else { continue };
            for (index, (thread_id, thread)) in member.living_threads().enumerate() {
                let pinned_pu = self.pinned_pu_of(member, thread_id.tid);
                let place = ThreadPlace { last_cpu: thread.last_cpu, pinned_pu };
                if thread.demand.is_hot {
                    hot.entry(group).or_default().push(place);
                } else if index == 0 && !member.is_task_host() {
                    first_threads.entry(group).or_default().push(place);
                }
            }
        }
        first_threads.retain(|group, _| !hot.contains_key(group));
        let groups = hot.into_iter().chain(first_threads);
        groups.map(|(number, threads)| AddressSpaceThreads { number, threads }).collect()
    }

    /// Returns the PUs (logical CPUs) of those groups of threads of the job `id` that run within one L3 cache or one
    /// NUMA node: one set of PUs for each group. The threads of a group share an address space
    /// ([`Self::address_space_threads_of`]). Each thread counts with the PU to which pjw pinned it, or else with the
    /// PU on which it ran last.
    ///
    /// If the job must give up PUs, it keeps the PUs of these sets as long as possible
    /// ([`allocate_for_groups`](crate::allocate::allocate_for_groups)).
    #[must_use]
    pub fn cpus_of_undivided_groups(&self, id: &JobId) -> Vec<CpuSet> {
        let groups = self.address_space_threads_of(id).into_iter().map(|group| group.cpus());
        groups.filter(|cpus| self.lies_in_one_domain(cpus)).collect()
    }

    fn lies_in_one_domain(&self, cpus: &CpuSet) -> bool {
        [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter().any(|level| {
            let mut domains = cpus.iter().map(|pu| self.topology.domain_index(level, pu));
            let first = domains.next().flatten();
            first.is_some() && domains.all(|domain| domain == first)
        })
    }
}
