//! The types of the BPF programs, for a build without them. The types have no values.

use super::fault::{MonitorUnavailable, ScanUnavailable, TaskScanError};
use super::task::{DrainedRequests, TaskRecord, TaskScanSummary, TaskScope};

/// The task scan. In this build no value of this type exists.
#[derive(Debug)]
pub enum TaskScan {}

impl TaskScan {
    /// Always fails: the task scan is not compiled in.
    ///
    /// # Errors
    /// [`ScanUnavailable::NotCompiled`].
    pub fn load() -> Result<Self, ScanUnavailable> {
        Err(ScanUnavailable::NotCompiled)
    }

    /// Never called, because no value exists.
    ///
    /// # Errors
    /// None.
    pub fn for_each_task(
        &mut self,
        _scope: TaskScope<'_>,
        _each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<TaskScanSummary, TaskScanError> {
        match *self {}
    }
}

/// The monitor of affinity requests. In this build no value of this type exists.
#[derive(Debug)]
pub enum AffinityMonitor {}

impl AffinityMonitor {
    /// Never called, because no value exists.
    pub fn drain(&mut self) -> DrainedRequests {
        match *self {}
    }
}

/// Always fails: neither program is compiled in.
pub fn load() -> (Result<TaskScan, ScanUnavailable>, Result<AffinityMonitor, MonitorUnavailable>) {
    (TaskScan::load(), Err(ScanUnavailable::NotCompiled.into()))
}
