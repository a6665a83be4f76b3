//! The task scan of a program that was built without it: there is none, and the compiler knows.

use std::collections::BTreeSet;

use pjw_core::process::Pid;

use super::{Mode, PassError, PassSummary, ScanUnavailable, TaskRecord, WatchError};

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
    pub fn watch(&mut self, _processes: &BTreeSet<Pid>) -> Result<(), WatchError> {
        match *self {}
    }

    /// As with the feature `bpf`.
    ///
    /// # Errors
    /// As with the feature `bpf`.
    pub fn pass(
        &mut self,
        _mode: Mode,
        _each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<PassSummary, PassError> {
        match *self {}
    }

    /// As with the feature `bpf`.
    pub fn vanished(&self) -> impl Iterator<Item = Pid> {
        match *self {}
        #[expect(unreachable_code, reason = "the iterator's type has to be told")]
        std::iter::empty()
    }
}
