//! Conversions from types of hwloc to types of pjw-core.

use std::ffi::CStr;

use hwlocality::object::TopologyObject;
use pjw_core::cpuset::{CpuSet, Pu};

/// The PUs of an object. Empty for an I/O object, which has no cpuset.
pub(super) fn pus_of(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(|cpus| numbers(cpus.iter_set().map(usize::from))).unwrap_or_default()
}

/// A set of PUs from their numbers.
pub(super) fn numbers(pus: impl Iterator<Item = usize>) -> CpuSet {
    // hwloc represents "all PUs" as an infinite set.
    pus.map_while(|pu| u32::try_from(pu).ok().map(Pu).filter(|&pu| pu <= Pu::MAX)).collect()
}

/// A string of hwloc, trimmed.
pub(super) fn trimmed(text: &CStr) -> String {
    text.to_string_lossy().trim().to_owned()
}
