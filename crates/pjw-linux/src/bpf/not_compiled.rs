//! The types of the BPF programs, for a build without them. The types have no values.

use std::os::fd::BorrowedFd;

use pjw_core::cpuset::CpuSet;

use super::fault::{
    AffinityMonitorUnavailable, LentCpuMonitorUnavailable, TaskScanError, TaskScanUnavailable,
};
use super::task::{DrainedRequests, OwnerRunTime, TaskRecord, TaskScanSummary, TaskScope};

/// Placeholder for the BPF program that reports the state of threads. In a build without the cargo feature `bpf`, no
/// value of this type exists.
#[derive(Debug)]
pub enum TaskScan {}

impl TaskScan {
    /// Always fails with [`TaskScanUnavailable::NotCompiled`], because this build has no BPF programs (cargo feature
    /// `bpf`).
    ///
    /// # Errors
    /// Always [`TaskScanUnavailable::NotCompiled`].
    pub fn load() -> Result<Self, TaskScanUnavailable> {
        Err(TaskScanUnavailable::NotCompiled)
    }

    /// In a build with the cargo feature `bpf`, this function runs the task scan. In this build it can't be
    /// called, because no value of this type exists.
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
/// `bpf`, no value of this type exists.
#[derive(Debug)]
pub enum AffinityMonitor {}

impl AffinityMonitor {
    /// In a build with the cargo feature `bpf`, this function returns the reported calls of
    /// sched_setaffinity(2). In this build it can't be called, because no value of this type exists.
    pub fn drain_requests(&mut self) -> DrainedRequests {
        match *self {}
    }
}

/// Placeholder for the BPF program that reports the lent PUs on which a thread of their owner (the job that lends the
/// PU) ran. In a build without the cargo feature `bpf`, no value of this type exists.
#[derive(Debug)]
pub enum LentCpuMonitor {}

impl LentCpuMonitor {
    /// Always fails, because this build has no BPF programs (cargo feature `bpf`).
    ///
    /// # Errors
    /// Always [`LentCpuMonitorUnavailable::RequirementMissing`].
    pub fn new() -> Result<Self, LentCpuMonitorUnavailable> {
        Err(TaskScanUnavailable::NotCompiled.into())
    }

    /// In a build with the cargo feature `bpf`, this function sets the lent PUs: the PUs that a job lends to another
    /// job. In this build it can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn set_lent(&mut self, _lent: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns the lent PUs: the PUs that a job lends to another
    /// job. In this build it can't be called, because no value of this type exists.
    #[must_use]
    pub fn lent(&self) -> &CpuSet {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns the file descriptor that is readable when the
    /// program has reported a PU. In this build it can't be called, because no value of this type exists.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns the lent PUs on which a thread of their owner
    /// (the job that lends the PU) ran. In this build it can't be called, because no value of this type exists.
    pub fn take(&mut self) -> CpuSet {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function makes the program report the PUs in `_cpus` once more. In
    /// this build it can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn rearm(&mut self, _cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns for each lent PU what threads of its owner
    /// (the job that lends the PU) have run there. In this build it can't be called, because no value of this type
    /// exists.
    #[must_use]
    pub fn run_times(&self) -> Vec<OwnerRunTime> {
        match *self {}
    }
}

/// Returns one error for the task scan and one for the affinity monitor, because this build contains no BPF programs
/// (cargo feature `bpf`).
pub fn load_programs()
-> (Result<TaskScan, TaskScanUnavailable>, Result<AffinityMonitor, AffinityMonitorUnavailable>) {
    (TaskScan::load(), Err(TaskScanUnavailable::NotCompiled.into()))
}
