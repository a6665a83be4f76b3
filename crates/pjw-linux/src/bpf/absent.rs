//! The task scan of a program that was built without it: there is none, and the compiler knows.

use super::{PassError, PassSummary, ScanUnavailable, TaskRecord, Whom};

/// The task scan, which this build does not have: no value of this type exists.
#[derive(Debug)]
pub enum TaskScan {}

impl TaskScan {
    /// Tells that it was not built in.
    ///
    /// # Errors
    /// [`ScanUnavailable::NotCompiled`].
    pub fn load() -> Result<Self, ScanUnavailable> {
        Err(ScanUnavailable::NotCompiled)
    }

    /// As with the feature `bpf`.
    ///
    /// # Errors
    /// As with the feature `bpf`.
    pub fn pass(
        &mut self,
        _whom: Whom<'_>,
        _each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<PassSummary, PassError> {
        match *self {}
    }
}
