//! Short constructors for tests.
#![allow(clippy::expect_used, reason = "a test may fail")]

use alloc::sync::Arc;
use core::time::Duration;

use crate::basics::{Comm, CpuSet, Nanos, Pid, ProcessId, StartTime, Uid, prelude::*};
use crate::machine::topology::{RegularShape, Topology};
use crate::state::WardenState;
use crate::terms::{
    AddressSpaceCheck, AddressSpaceList, AddressSpaceUser, Grant, GrantedBy, JobId, Ownership, Process,
    SharedAddressSpace,
};

/// Parses a set of PUs from a CPU list, such as `0-3,8`. For tests.
///
/// # Panics
/// If `list` is not a valid CPU list.
#[must_use]
#[track_caller]
pub fn cpu_set(list: &str) -> CpuSet {
    list.parse().expect("a CPU list")
}

/// Parses a job id, such as `slurm:7`. A text without a source, such as `a`, is the id `manual:a`. For tests.
///
/// # Panics
/// If `text` is not a valid job id.
#[must_use]
#[track_caller]
pub fn job(text: &str) -> JobId {
    text.parse().expect("a job id")
}

/// Makes the id of a manual job (a job that a user created) from a number. For tests.
#[must_use]
pub fn numbered_job(number: usize) -> JobId {
    job(&format!("manual:{number}"))
}

/// Makes a grant of the PUs `cpus`, chosen by pjw at the time of boot (0 ns). For tests.
#[must_use]
pub fn pjw_grant(cpus: CpuSet) -> Grant {
    Grant {
        cpus,
        granted_by: GrantedBy::Warden,
        is_shared: false,
        may_split_cores: false,
        granted_at: Nanos(0),
        reasons: Vec::new(),
        second_best: String::new(),
        ownership: Ownership::Owned,
    }
}

/// Makes the process `pid` of the user `uid`: a child of process 1 that leads a session of its own, as a scan without
/// its threads finds it. For tests.
#[must_use]
pub fn process(pid: u32, uid: u32) -> Process {
    Process {
        id: ProcessId { pid: Pid(pid), start: StartTime(1) },
        parent: Pid(1),
        process_group: Pid(pid),
        session: Pid(pid),
        uid: Uid(uid),
        comm: Comm::from("x"),
        is_kernel_thread: false,
        first_thread_mask: None,
        cgroup: None,
        unit_cgroup: None,
        attributes: None,
        has_unread_environment: false,
        batch_identity: None,
        threads: None,
        has_all_threads: true,
        idle_until: None,
    }
}

/// Makes `state` know that `processes` share an address space, as two scans of the daemon would. For tests.
pub fn share_address_space(state: &mut WardenState, processes: &[ProcessId]) {
    let user = |&id: &ProcessId| AddressSpaceUser { id, check: AddressSpaceCheck::Sharing };
    let users = processes.iter().map(user).collect();
    let shared = vec![SharedAddressSpace { number: 1, users }];
    let list = Arc::new(AddressSpaceList { shared, unread_reason: None });
    for second in [1, 2] {
        let at = Nanos(second * 1_000_000_000);
        state.address_spaces.update(&list, at, Duration::from_secs(1));
    }
}

/// Builds the topology of a regular machine, for tests. Each parameter is the same for the whole machine: for example,
/// all NUMA nodes have `l3s_per_numa_node` L3 caches, and all cores have `pus_per_core` PUs (logical CPUs).
#[must_use]
pub fn regular_topology(
    packages: u32,
    numa_nodes_per_package: u32,
    l3s_per_numa_node: u32,
    cores_per_l3: u32,
    pus_per_core: u32,
) -> Topology {
    Topology::from_shape(RegularShape {
        packages,
        numa_nodes_per_package,
        l3s_per_numa_node,
        cores_per_l3,
        pus_per_core,
    })
}
