//! The affinity masks of the workers of a farm.

use std::fs;

use pjw_core::cpuset::{CpuSet, Pu};

use super::error::FarmError;
use crate::own_policy::own_mask;

/// The CPUs on which the worker processes of a farm run. A farm is a group of worker processes that compute numbered
/// work items. The other processes of the farm keep the affinity mask of the process that started the farm.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WorkerCpus {
    /// Each worker has the affinity mask of the process that started the farm. The kernel chooses the CPUs within this
    /// mask.
    #[default]
    Inherit,
    /// Each worker has one PU (logical CPU) of the affinity mask of the process that started the farm. The first
    /// workers get the first PU of each core, the next workers get the second PU of each core, and so on. If there are
    /// more workers than PUs, several workers share a PU.
    OnePuEach,
    /// The CPUs of each worker. Worker `i` gets the entry with the index `i % n`, where `n` is the length of the list.
    PerWorker(Vec<CpuSet>),
}

impl WorkerCpus {
    /// Returns a list of affinity masks for the worker processes of a farm. Worker `i` gets the mask with the index
    /// `i % n`, where `n` is the length of the list. The list is empty if each worker keeps the affinity mask of the
    /// master, which is the process that started the farm.
    ///
    /// # Errors
    /// [`FarmError::InvalidCpus`] if [`WorkerCpus::PerWorker`] has no entry, or has an entry that is empty or not
    /// inside the affinity mask of the calling thread. [`FarmError::SystemCall`] if the mask of the calling thread
    /// can't be read.
    pub(crate) fn masks(&self) -> Result<Vec<CpuSet>, FarmError> {
        if *self == Self::Inherit {
            return Ok(Vec::new());
        }
        let what = "the affinity mask of this process can't be read";
        let allowed = own_mask().map_err(|errno| FarmError::SystemCall { what, errno })?;
        let Self::PerWorker(list) = self else { return Ok(one_pu_each(&allowed, core_of)) };
        let invalid = |cpus: &CpuSet, why| {
            Err(FarmError::InvalidCpus { cpus: cpus.clone(), allowed: allowed.clone(), why })
        };
        if list.is_empty() {
            return invalid(&CpuSet::new(), "the list has no entry");
        }
        for cpus in list {
            if cpus.is_empty() {
                return invalid(cpus, "a worker needs at least one CPU");
            }
            if !cpus.is_subset(&allowed) {
                return invalid(cpus, "give only CPUs on which this process may run");
            }
        }
        Ok(list.clone())
    }
}

/// Returns one set for each PU of `allowed`: the first PU of each core, then the second PU of each core, and so on.
fn one_pu_each(allowed: &CpuSet, core_of: impl Fn(Pu) -> CpuSet) -> Vec<CpuSet> {
    let rank = |pu: Pu| core_of(pu).intersection(allowed).iter().filter(|other| *other < pu).count();
    let mut pus: Vec<(usize, Pu)> = allowed.iter().map(|pu| (rank(pu), pu)).collect();
    pus.sort_unstable();
    pus.into_iter().map(|(_, pu)| CpuSet::from(pu)).collect()
}

/// Returns the PUs of the core to which `pu` belongs, from sysfs. Only `pu` itself if sysfs has no list.
fn core_of(pu: Pu) -> CpuSet {
    let path = format!("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", pu.0);
    let list = fs::read_to_string(path).ok().and_then(|list| list.trim().parse().ok());
    list.unwrap_or_else(|| CpuSet::from(pu))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn the_first_pus_of_all_cores_come_before_their_siblings() {
        // PU k and PU k + 4 are one core.
        let core_of = |pu: Pu| CpuSet::from_iter([Pu(pu.0 % 4), Pu(pu.0 % 4 + 4)]);
        let masks = one_pu_each(&set("1-2,4-7"), core_of);
        let text: Vec<String> = masks.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["1", "2", "4", "7", "5", "6"]);
    }

    #[test]
    fn cpus_outside_of_the_mask_and_empty_lists_are_refused() {
        let allowed = own_mask().unwrap();
        for (list, why) in [
            (Vec::new(), "the list has no entry"),
            (vec![CpuSet::new()], "a worker needs at least one CPU"),
            (vec![allowed.clone(), set("8191")], "give only CPUs on which this process may run"),
        ] {
            let error = WorkerCpus::PerWorker(list).masks().unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        assert_eq!(WorkerCpus::PerWorker(vec![allowed.clone()]).masks(), Ok(vec![allowed.clone()]));
        assert_eq!(WorkerCpus::OnePuEach.masks().unwrap().len(), allowed.len());
    }
}
