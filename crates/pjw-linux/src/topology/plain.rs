//! Converts hwloc's topology to the topology of pjw-core.

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use pjw_core::cpuset::CpuSet;
use pjw_core::devices::{CoreKind, Die, MachineDetails};
use pjw_core::topology::{Core, Topology, TopologyDomain, TopologyError, TopologyLevel};

use super::convert::{pus_from_numbers, pus_of, trimmed_text};
use super::devices;

/// Converts the topology of a machine from hwloc's type to the type [`Topology`] of pjw.
///
/// # Errors
/// If pjw can't use the topology, for example because it has no core.
pub(super) fn convert_topology(hwloc: &Hwloc) -> Result<Topology, TopologyError> {
    let kinds = kinds(hwloc);
    let all = pus_from_numbers(hwloc.cpuset().iter_set().map(usize::from));
    let complete = pus_from_numbers(hwloc.complete_cpuset().iter_set().map(usize::from));
    let allowed = pus_from_numbers(hwloc.allowed_cpuset().iter_set().map(usize::from));
    let die = |object| Die { number: os_number(object), cpus: pus_of(object) };
    let dies = hwloc.objects_with_type(ObjectType::Die).map(die);
    let details = MachineDetails {
        dies: dies.filter(|die| !die.cpus.is_empty()).collect(),
        devices: devices::devices(hwloc),
        unavailable_pus: complete.difference(&all),
        disallowed_pus: all.difference(&allowed),
        core_kinds: kinds.clone(),
    };
    Ok(Topology::new(cores(hwloc, &kinds), read_domains(hwloc))?.with_details(details))
}

/// Returns the cores of the machine that have PUs. A PU without a core becomes a core of its own. The kind of each core
/// is an index in `kinds`.
fn cores(hwloc: &Hwloc, kinds: &[CoreKind]) -> Vec<Core> {
    let kind_of = |pus: &CpuSet| {
        let index = kinds.iter().position(|kind| pus.intersects(&kind.cpus)).unwrap_or(0);
        u32::try_from(index).unwrap_or(0)
    };
    let listed = hwloc.objects_with_type(ObjectType::Core);
    // Some virtual machines report PUs without cores. Each such PU becomes a core.
    let all_pus = hwloc.objects_with_type(ObjectType::PU);
    let lone_pus = all_pus.filter(|pu| pu.first_ancestor_with_type(ObjectType::Core).is_none());
    let cores = listed.chain(lone_pus).map(pus_of).filter(|pus| !pus.is_empty());
    cores.map(|pus| Core { kind_index: kind_of(&pus), pus }).collect()
}

/// Returns the packages, NUMA nodes and L3 caches of the machine.
fn read_domains(hwloc: &Hwloc) -> Vec<TopologyDomain> {
    let mut domains = Vec::new();
    for (kind, level) in [
        (ObjectType::L3Cache, TopologyLevel::L3),
        (ObjectType::NUMANode, TopologyLevel::NumaNode),
        (ObjectType::Package, TopologyLevel::Package),
    ] {
        for object in hwloc.objects_with_type(kind) {
            let number = if level == TopologyLevel::L3 { logical_number(object) } else { os_number(object) };
            let cpus = pus_of(object);
            // A memory node may have no PUs. A cache or package without PUs is offline.
            if level == TopologyLevel::NumaNode || !cpus.is_empty() {
                domains.push(TopologyDomain { level, number, cpus, memory_bytes: memory_of(object) });
            }
        }
    }
    domains
}

/// The kernel's number of an object, or hwloc's if the kernel has none.
fn os_number(object: &TopologyObject) -> u32 {
    object.os_index().and_then(|number| u32::try_from(number).ok()).unwrap_or_else(|| logical_number(object))
}

fn logical_number(object: &TopologyObject) -> u32 {
    u32::try_from(object.logical_index()).unwrap_or(u32::MAX)
}

fn memory_of(object: &TopologyObject) -> u64 {
    match object.attributes() {
        Some(ObjectAttributes::NUMANode(node)) => node.local_memory().map_or(0, u64::from),
        _ => 0,
    }
}

/// Returns the kinds of cores of the machine with their names and PUs, the most energy-efficient kind first. Empty if
/// hwloc knows no kinds. If all cores are alike, the list is empty or has a single kind.
fn kinds(hwloc: &Hwloc) -> Vec<CoreKind> {
    let found = hwloc.cpu_kinds().into_iter().flatten();
    let mut kinds: Vec<CoreKind> = found
        .map(|kind| {
            let core_type = kind.infos.iter().find(|info| info.name() == c"CoreType");
            let name = core_type.map_or_else(String::new, |info| trimmed_text(info.value()));
            CoreKind { name, cpus: pus_from_numbers(kind.cpuset.iter_set().map(usize::from)) }
        })
        .collect();
    let are_two = kinds.len() == 2;
    for (rank, kind) in kinds.iter_mut().enumerate() {
        kind.name = match kind.name.as_str() {
            "IntelAtom" => "efficiency".to_owned(),
            "IntelCore" if rank > 0 => "performance".to_owned(),
            "" if are_two => ["efficiency", "performance"][rank.min(1)].to_owned(),
            "" => format!("kind {rank}"),
            vendors => vendors.to_owned(),
        };
    }
    kinds
}
