//! hwloc's picture as plain data.

use std::ffi::CStr;

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::topology::fittings::{CoreKind, Die, Fittings};
use pjw_core::topology::{Core, Domain, Level, Topology, TopologyError};

use super::devices;

/// The machine.
pub(super) fn machine(hwloc: &Hwloc) -> Result<Topology, TopologyError> {
    let kinds = kinds(hwloc);
    let all = numbers(hwloc.cpuset().iter_set().map(usize::from));
    let complete = numbers(hwloc.complete_cpuset().iter_set().map(usize::from));
    let allowed = numbers(hwloc.allowed_cpuset().iter_set().map(usize::from));
    let die = |object| Die { number: os_number(object), cpus: pus_of(object) };
    let dies = hwloc.objects_with_type(ObjectType::Die).map(die);
    let fittings = Fittings {
        dies: dies.filter(|die| !die.cpus.is_empty()).collect(),
        devices: devices::devices(hwloc),
        offline: complete.difference(&all),
        disallowed: all.difference(&allowed),
        kinds: kinds.clone(),
    };
    Ok(Topology::new(cores(hwloc, &kinds), domains(hwloc))?.with(fittings))
}

fn cores(hwloc: &Hwloc, kinds: &[CoreKind]) -> Vec<Core> {
    let kind_of = |pus: &CpuSet| {
        let rank = kinds.iter().position(|kind| pus.intersects(&kind.cpus)).unwrap_or(0);
        u32::try_from(rank).unwrap_or(0)
    };
    let told = hwloc.objects_with_type(ObjectType::Core);
    // Some virtual machines tell of PUs and not of cores: each is one.
    let alone = hwloc.objects_with_type(ObjectType::PU);
    let alone = alone.filter(|pu| pu.first_ancestor_with_type(ObjectType::Core).is_none());
    let cores = told.chain(alone).map(pus_of).filter(|pus| !pus.is_empty());
    cores.map(|pus| Core { kind: kind_of(&pus), pus }).collect()
}

fn domains(hwloc: &Hwloc) -> Vec<Domain> {
    let mut domains = Vec::new();
    for (kind, level) in [
        (ObjectType::L3Cache, Level::L3),
        (ObjectType::NUMANode, Level::NumaNode),
        (ObjectType::Package, Level::Package),
    ] {
        for object in hwloc.objects_with_type(kind) {
            let number = if level == Level::L3 { logical_number(object) } else { os_number(object) };
            let cpus = pus_of(object);
            // Memory may have no PUs; a cache or package whose PUs are all offline is not there.
            if level == Level::NumaNode || !cpus.is_empty() {
                domains.push(Domain { level, number, cpus, memory_bytes: memory_of(object) });
            }
        }
    }
    domains
}

/// The kernel's number, or hwloc's where the kernel has none.
fn os_number(object: &TopologyObject) -> u32 {
    object.os_index().and_then(|number| u32::try_from(number).ok()).unwrap_or_else(|| logical_number(object))
}

fn logical_number(object: &TopologyObject) -> u32 {
    u32::try_from(object.logical_index()).unwrap_or(u32::MAX)
}

/// The PUs of an object; none of an I/O object, which has no set of its own.
pub(super) fn pus_of(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(|cpus| numbers(cpus.iter_set().map(usize::from))).unwrap_or_default()
}

fn numbers(pus: impl Iterator<Item = usize>) -> CpuSet {
    // An infinite set, which hwloc has for "all", must not be walked to its end.
    pus.map_while(|pu| u32::try_from(pu).ok().map(Pu).filter(|&pu| pu <= Pu::MAX)).collect()
}

fn memory_of(object: &TopologyObject) -> u64 {
    match object.attributes() {
        Some(ObjectAttributes::NUMANode(node)) => node.local_memory().map_or(0, u64::from),
        _ => 0,
    }
}

/// The kinds of core, the most efficient first; none where hwloc knows of no difference.
fn kinds(hwloc: &Hwloc) -> Vec<CoreKind> {
    let found = hwloc.cpu_kinds().into_iter().flatten();
    let mut kinds: Vec<CoreKind> = found
        .map(|kind| {
            let own = kind.infos.iter().find(|info| info.name() == c"CoreType");
            let name = own.map_or_else(String::new, |info| words(info.value()));
            CoreKind { name, cpus: numbers(kind.cpuset.iter_set().map(usize::from)) }
        })
        .collect();
    let two = kinds.len() == 2;
    for (rank, kind) in kinds.iter_mut().enumerate() {
        kind.name = match kind.name.as_str() {
            "IntelAtom" => "efficiency".to_owned(),
            "IntelCore" if rank > 0 => "performance".to_owned(),
            "" if two => ["efficiency", "performance"][rank.min(1)].to_owned(),
            "" => format!("kind {rank}"),
            vendors => vendors.to_owned(),
        };
    }
    kinds
}

/// A text of hwloc's.
pub(super) fn words(text: &CStr) -> String {
    text.to_string_lossy().trim().to_owned()
}
