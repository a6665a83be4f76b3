//! The types of the BPF programs, for a build without them. The types have no values.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use pjw_core::cpuset::{CpuSet, Pu};

use super::fault::{
    AffinityMonitorUnavailable, LentCpuMonitorUnavailable, TaskScanError, TaskScanUnavailable,
};
use super::task::{DrainedRequests, OwnerRunTime, TaskRecord, TaskScanSummary, TaskScope};

/// Placeholder for the BPF program that reports the state of threads. In a build without the cargo feature
/// `bpf`, no value of this type exists.
#[derive(Debug)]
pub enum TaskScan {}

impl TaskScan {
    /// Always fails, because this build has no BPF programs (cargo feature `bpf`).
    ///
    /// # Errors
    /// Always [`TaskScanUnavailable::NotCompiled`].
    pub fn load() -> Result<Self, TaskScanUnavailable> {
        Err(TaskScanUnavailable::NotCompiled)
    }

    /// In a build with the cargo feature `bpf`, this function runs the task scan, which reports the state of
    /// threads. In this build the function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn for_each_task(
        &mut self,
        _scope: TaskScope<'_>,
        _handle_task: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<TaskScanSummary, TaskScanError> {
        match *self {}
    }
}

/// Placeholder for the BPF program that reports calls of sched_setaffinity(2). In a build without the cargo
/// feature `bpf`, no value of this type exists.
#[derive(Debug)]
pub enum AffinityMonitor {}

impl AffinityMonitor {
    /// In a build with the cargo feature `bpf`, this function returns the reported affinity requests (calls of
    /// sched_setaffinity(2)). In this build the function can't be called, because no value of this type exists.
    pub fn drain_requests(&mut self) -> DrainedRequests {
        match *self {}
    }
}

/// Placeholder for the BPF program that watches the PUs (logical CPUs) that a job lends to another job. In a
/// build without the cargo feature `bpf`, no value of this type exists.
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

    /// In a build with the cargo feature `bpf`, this function sets the lent PUs that the BPF program watches. A lent PU
    /// is a PU (logical CPU) that a job, the owner, lends to another job. The value for each PU in `_lent` is the
    /// number of PUs of the owner, including the PUs that the owner lends. The program does not report a PU in `_silent`
    /// that is newly lent. In this build the function can't be called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn set_lent_pus(
        &mut self,
        _lent: &BTreeMap<Pu, u32>,
        _silent: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns the PUs (logical CPUs) that jobs lend to other
    /// jobs, and that the BPF program watches. The value for each PU says how many PUs the lending job owns, including
    /// the PUs that it lends. In this build the function can't be called, because no value of this type exists.
    #[must_use]
    pub fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns a file descriptor. poll(2) shows the
    /// descriptor as readable when a thread of a lending job has run on a PU (logical CPU) that the job lends
    /// to another job. In this build the function can't be called, because no value of this type exists.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns the lent PUs that the BPF program has reported
    /// since the last call. A lent PU is a PU (logical CPU) that a job, the owner, lends to another job. The program
    /// reports a lent PU when a thread of the owner runs there. In this build the function can't be called, because no
    /// value of this type exists.
    pub fn take_reported_pus(&mut self) -> CpuSet {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function makes the BPF program report the lent PUs in `_cpus`
    /// again, when a thread of the owner next runs there. A lent PU is a PU (logical CPU) that a job, the owner, lends
    /// to another job. Without this call, the program reports a lent PU only once. In this build the function can't be
    /// called, because no value of this type exists.
    ///
    /// # Errors
    /// None.
    pub fn report_again(&mut self, _cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        match *self {}
    }

    /// In a build with the cargo feature `bpf`, this function returns for each lent PU how long threads of the owner
    /// have run there, or have waited there for a thread at idle priority that preempted them. A lent PU is a PU
    /// (logical CPU) that a job, the owner, lends to another job. The time counts since the PU was lent, or since the
    /// last call of [`LentCpuMonitor::report_again`] for the PU. In this build the function can't be called, because no
    /// value of this type exists.
    #[must_use]
    pub fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        match *self {}
    }
}

/// Returns two errors, because this build contains no BPF programs (cargo feature `bpf`): one for the task
/// scan, which reports the state of threads, and one for the affinity monitor, which reports calls of
/// sched_setaffinity(2).
pub fn load_programs()
-> (Result<TaskScan, TaskScanUnavailable>, Result<AffinityMonitor, AffinityMonitorUnavailable>) {
    (TaskScan::load(), Err(TaskScanUnavailable::NotCompiled.into()))
}
