//! Removes PUs (logical CPUs) that went offline from masks that a scan read.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;
use pjw_core::snapshot::{Observed, Process};

/// Removes the PUs outside `within` from all affinity masks in `processes`. A mask without a PU in `within` stays the
/// same, because the kernel will change it.
pub(super) fn cut_masks(processes: &mut BTreeMap<Pid, Observed<Process>>, within: &CpuSet) {
    let cut = |mask: &mut CpuSet| {
        let remaining = mask.intersection(within);
        if !remaining.is_empty() {
            *mask = remaining;
        }
    };
    for process in processes.values_mut() {
        let Observed::Present(process) = process else { continue };
        process.first_thread_mask.iter_mut().for_each(cut);
        process.threads.iter_mut().flatten().for_each(|thread| cut(&mut thread.effective_mask));
    }
}
