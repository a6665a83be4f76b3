//! The binding of a thread that pjw has lifted.

use super::MaskEntry;
use crate::basics::{CpuSet, prelude::*};
use crate::state::masks::lifted::LiftedBinding;

impl MaskEntry {
    /// Returns the record of the binding of this thread to exactly the PUs (logical CPUs) `mask`, if pjw lifted this
    /// binding. A binding is an affinity mask by which a program restricts a thread to some PUs of its job. pjw lifts a
    /// binding: pjw sets another mask that has all PUs of the job, or one PU that pjw chooses. A binding that pjw
    /// lifted and then restored ([`LiftedBinding::is_restored`]) is returned too.
    ///
    /// Returns `None` if pjw did not lift this binding, if the program has requested another mask since, or if pjw has
    /// restored the original mask of the thread (the mask before pjw changed it).
    #[must_use]
    pub fn lifted_binding(&self, mask: &CpuSet) -> Option<&LiftedBinding> {
        self.lifted.as_deref().filter(|lifted| lifted.mask == *mask)
    }

    /// Whether the binding of the thread to exactly the PUs (logical CPUs) `mask` is lifted at present. A binding is an
    /// affinity mask by which a program restricts a thread to some PUs of its job. pjw lifts a binding: pjw sets
    /// another mask that has all PUs of the job, or one PU that pjw chooses. False if pjw did not lift the binding, or
    /// has restored it.
    #[must_use]
    pub fn is_binding_lifted(&self, mask: &CpuSet) -> bool {
        self.lifted_binding(mask).is_some_and(|lifted| !lifted.is_restored)
    }

    /// Stores `lifted`, the binding that pjw has lifted. A binding is an affinity mask by which the program restricts
    /// the thread to some PUs of its job. pjw has replaced this mask by another one. With `None`, removes the stored
    /// binding. This is for the case that pjw has restored the original mask of the thread.
    pub(crate) fn set_lifted_binding(&mut self, lifted: Option<LiftedBinding>) {
        self.lifted = lifted.map(Box::new);
    }

    /// Records that pjw restored the binding (the affinity mask by which the program restricted the thread) that pjw
    /// had lifted.
    pub(crate) fn record_binding_restored(&mut self) {
        if let Some(lifted) = &mut self.lifted {
            lifted.is_restored = true;
        }
    }
}
