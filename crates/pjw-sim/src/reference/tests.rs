//! The rules of each policy, by examples of a machine and its free cores.

use pjw_core::{testing::regular_topology, topology::Topology};

use super::*;

fn machine(
    packages: u32,
    numa_per_package: u32,
    l3_per_numa: u32,
    cores_per_l3: u32,
    pus: u32,
) -> PuLocations {
    PuLocations::from_topology(&regular_topology(packages, numa_per_package, l3_per_numa, cores_per_l3, pus))
}

#[track_caller]
fn gives(
    policy: ReferencePolicy,
    n: u32,
    unit: ProcessorUnit,
    free: &str,
    locality: &PuLocations,
    expected: &str,
) {
    let cpus = policy.choose_pus(n, unit, &free.parse().unwrap(), locality).map(|cpus| cpus.to_string());
    assert_eq!(cpus.as_deref(), Some(expected), "{} of {free}", policy.name());
}

#[test]
fn no_policy_gives_more_than_is_free() {
    let locality = machine(1, 1, 1, 4, 2);
    for policy in ReferencePolicy::ALL {
        assert_eq!(policy.choose_pus(3, ProcessorUnit::Core, &"0-2,4-5".parse().unwrap(), &locality), None);
        assert_eq!(policy.choose_pus(6, ProcessorUnit::Pu, &"0-2,4-5".parse().unwrap(), &locality), None);
        assert_eq!(policy.choose_pus(0, ProcessorUnit::Pu, &"0".parse().unwrap(), &locality), None);
    }
}

#[test]
fn first_fit_takes_the_first_whole_cores() {
    let locality = machine(1, 1, 2, 4, 2);
    gives(ReferencePolicy::FirstFit, 2, ProcessorUnit::Core, "1-7,8,10-15", &locality, "2-3,10-11");
    gives(ReferencePolicy::FirstFit, 3, ProcessorUnit::Pu, "1-7,8,10-15", &locality, "1-2,8");
}

#[test]
fn a_whole_free_domain_comes_first_if_the_request_is_as_large() {
    let locality = machine(2, 2, 1, 4, 1);
    // Fewer packages than nodes: packages are the outer ones.
    gives(ReferencePolicy::Kubelet, 8, ProcessorUnit::Core, "2-15", &locality, "8-15");
    gives(ReferencePolicy::Kubelet, 4, ProcessorUnit::Core, "2-15", &locality, "4-7");
    gives(ReferencePolicy::Kubelet, 5, ProcessorUnit::Core, "2-15", &locality, "2,4-7");
}

#[test]
fn cores_come_from_the_domain_with_the_fewest_free_even_if_that_divides_the_job() {
    let locality = machine(2, 1, 2, 4, 1);
    gives(ReferencePolicy::Kubelet, 3, ProcessorUnit::Core, "0,4,8-15", &locality, "0,4,8");
    gives(ReferencePolicy::Kubelet, 3, ProcessorUnit::Core, "0-2,5-15", &locality, "0-2");
}

#[test]
fn with_the_l3_option_the_first_l3_that_holds_the_rest_gets_it() {
    let locality = machine(1, 1, 3, 4, 1);
    gives(ReferencePolicy::Kubelet, 2, ProcessorUnit::Core, "0,4-5,8-11", &locality, "0,4");
    gives(ReferencePolicy::KubeletL3, 2, ProcessorUnit::Core, "0,4-5,8-11", &locality, "4-5");
    gives(ReferencePolicy::KubeletL3, 5, ProcessorUnit::Core, "0,4-5,8-11", &locality, "0,8-11");
    // No L3 has enough: cores by number, in any L3.
    gives(ReferencePolicy::KubeletL3, 3, ProcessorUnit::Core, "0,4-5,8-9", &locality, "0,4-5");
}

#[test]
fn reserved_cpus_keep_a_domain_from_ever_being_free() {
    let locality = machine(2, 1, 1, 4, 1);
    gives(ReferencePolicy::Kubelet, 4, ProcessorUnit::Core, "1-7", &locality, "4-7");
    gives(ReferencePolicy::Kubelet, 4, ProcessorUnit::Core, "1-3,5-7", &locality, "1-3,5");
}

#[test]
fn single_pus_come_last_and_of_cores_in_use_first() {
    let locality = machine(1, 1, 1, 4, 2);
    gives(ReferencePolicy::Kubelet, 3, ProcessorUnit::Pu, "0-3,5-7", &locality, "0-1,5");
    gives(ReferencePolicy::Kubelet, 1, ProcessorUnit::Pu, "0-3,5-7", &locality, "0");
    gives(ReferencePolicy::KubeletL3, 3, ProcessorUnit::Pu, "0-3,5-7", &locality, "1-2,5");
}

#[test]
fn where_nodes_hold_packages_nodes_are_the_outer_domains() {
    use pjw_core::cpuset::Pu;
    use pjw_core::topology::{Core, TopologyDomain, TopologyLevel};
    let cores = (0..8).map(|n| Core { pus: Pu(n).into(), kind_index: 0 }).collect();
    let domain = |level, number, cpus: &str| TopologyDomain {
        level,
        number,
        cpus: cpus.parse().unwrap(),
        memory_bytes: 0,
    };
    let domains = vec![
        domain(TopologyLevel::NumaNode, 0, "0-3"),
        domain(TopologyLevel::NumaNode, 1, "4-7"),
        domain(TopologyLevel::Package, 0, "0-1"),
        domain(TopologyLevel::Package, 1, "2-3"),
        domain(TopologyLevel::Package, 2, "4-5"),
        domain(TopologyLevel::Package, 3, "6-7"),
    ];
    let locality = PuLocations::from_topology(&Topology::new(cores, domains).unwrap());
    gives(ReferencePolicy::Kubelet, 2, ProcessorUnit::Core, "1-3,4-7", &locality, "2-3");
    gives(ReferencePolicy::Kubelet, 4, ProcessorUnit::Core, "0,2-7", &locality, "4-7");
}
