//! The types of the BPF programs, for a build without them. The types have no values.

use super::fault::{MonitorUnavailable, ScanUnavailable, TaskScanError};
use super::task::{DrainedRequests, TaskRecord, TaskScanSummary, TaskScope};

/// Placeholder for the BPF program that reports the state of threads. In a build without the cargo feature `bpf` no
/// value of this type exists.
#[derive(Debug)]
pub enum TaskScan {}

impl TaskScan {
    /// Always fails, because this build has no BPF programs (cargo feature `bpf`).
    ///
    /// # Errors
    /// [`ScanUnavailable::NotCompiled`].
    pub fn load() -> Result<Self, ScanUnavailable> {
        Err(ScanUnavailable::NotCompiled)
    }

    /// The same signature as in a build with BPF programs. Never called, because no value of the type exists.
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

/// Placeholder for the BPF program that reports calls of sched_setaffinity(2). In a build without the cargo feature
/// `bpf` no value of this type exists.
#[derive(Debug)]
pub enum AffinityMonitor {}

impl AffinityMonitor {
    /// The same signature as in a build with BPF programs. Never called, because no value of the type exists.
    pub fn drain(&mut self) -> DrainedRequests {
        match *self {}
    }
}

/// Fails for both programs, because this build has no BPF programs (cargo feature `bpf`).
pub fn load() -> (Result<TaskScan, ScanUnavailable>, Result<AffinityMonitor, MonitorUnavailable>) {
    (TaskScan::load(), Err(ScanUnavailable::NotCompiled.into()))
}
