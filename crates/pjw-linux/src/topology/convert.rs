//! Conversions from types of hwloc to types of pjw-core.

use std::ffi::CStr;

use hwlocality::object::TopologyObject;
use pjw_core::cpuset::{CpuSet, Pu};

/// Returns the PUs (logical CPUs) of `object`, an object in hwloc's topology. Empty for an I/O object, because hwloc
/// gives such an object no cpuset.
pub(super) fn pus_of(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(|cpus| pus_from_numbers(cpus.iter_set().map(usize::from))).unwrap_or_default()
}

/// Returns the set of the PUs (logical CPUs) with the numbers `pus`, in ascending order. Stops at the first number
/// above [`Pu::MAX`], because hwloc's set of all PUs is infinite.
pub(super) fn pus_from_numbers(pus: impl Iterator<Item = usize>) -> CpuSet {
    pus.map_while(|pu| u32::try_from(pu).ok().map(Pu).filter(|&pu| pu <= Pu::MAX)).collect()
}

/// Returns `text`, a string of hwloc, without white space at its begin and end.
pub(super) fn trimmed_text(text: &CStr) -> String {
    text.to_string_lossy().trim().to_owned()
}
