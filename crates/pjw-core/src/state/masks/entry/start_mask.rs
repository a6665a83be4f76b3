//! The mask of a process that `pjwctl spawn` started on a part of the cores of its job.

use super::MaskEntry;
use crate::basics::CpuSet;
use crate::state::masks::request::MaskWriter;

impl MaskEntry {
    /// Attributes the last mask request to pjw, if it is a request of the program for exactly the PUs (logical CPUs)
    /// `start_cpus`: `pjwctl spawn` starts each process with the mask of its part of the cores, and for the daemon such
    /// a mask looks like one that the program requested. `original_mask` becomes the mask that a release restores.
    /// Returns whether the request was such a request.
    pub(crate) fn attribute_start_mask_to_pjw(
        &mut self,
        start_cpus: &CpuSet,
        original_mask: &CpuSet,
    ) -> bool {
        if !self.is_mask_from_program() || self.requested_mask() != Some(start_cpus) {
            return false;
        }
        for request in &mut self.candidates {
            request.writer = MaskWriter::Warden;
            request.original_mask = original_mask.clone();
        }
        true
    }
}
