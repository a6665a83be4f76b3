//! The mask of a process that `pjwctl spawn` started on a part of the cores of its job.

use super::MaskEntry;
use crate::basics::{CpuSet, Nanos};
use crate::state::masks::request::{MaskRequest, MaskWriter};

impl MaskEntry {
    /// Changes the original mask of the thread to `original_mask`, if it is `start_cpus`: the PUs (logical CPUs) on
    /// which `pjwctl spawn` started the process at the time `started_at`, in ns since boot. pjwd takes the mask of such
    /// a start for one that the program requested, and would restore it. Returns whether the original mask was changed.
    ///
    /// If `seen_mask`, the effective mask, is `start_cpus` and these are all PUs of the cpuset, the entry assumes that
    /// the program requested every PU of the machine (`machine`). The request for `start_cpus` then takes its place.
    ///
    /// The caller must write the changed requests to the journal, see [`MaskEntry::mark_journaled`].
    pub(crate) fn attribute_start_mask_to_pjw(
        &mut self,
        (start_cpus, started_at): (&CpuSet, Nanos),
        seen_mask: &CpuSet,
        (machine, original_mask): (&CpuSet, &CpuSet),
    ) -> bool {
        let assumes_every_pu = self.is_mask_from_program() && self.requested_mask() == Some(machine);
        if assumes_every_pu && seen_mask == start_cpus {
            for request in &mut self.candidates {
                let (mask, original_mask) = (start_cpus.clone(), start_cpus.clone());
                *request = MaskRequest { mask, original_mask, writer: MaskWriter::Program, ..*request };
            }
        }
        if self.original_mask() != start_cpus {
            return false;
        }
        let earlier = self.earlier.iter_mut().map(|(request, _)| request);
        for request in self.candidates.iter_mut().chain(earlier) {
            request.attribute_start_mask_to_pjw(start_cpus, original_mask, started_at);
        }
        self.is_unrecorded = true;
        true
    }
}
