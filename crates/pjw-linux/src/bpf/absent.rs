//! The programs in the kernel, of a program that was built without them: there are none, and the compiler knows.

use super::{AsksUnavailable, Heard, PassError, PassSummary, ScanUnavailable, TaskRecord, Whom};

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

/// Who asks for which PUs, which this build does not hear: no value of this type exists.
#[derive(Debug)]
pub enum Asks {}

impl Asks {
    /// As with the feature `bpf`.
    pub fn hear(&mut self) -> Heard {
        match *self {}
    }
}

/// Tells that neither was built in.
pub fn load() -> (Result<TaskScan, ScanUnavailable>, Result<Asks, AsksUnavailable>) {
    (TaskScan::load(), Err(ScanUnavailable::NotCompiled.into()))
}
