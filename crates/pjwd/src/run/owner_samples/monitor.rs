//! The interface to the monitor of lent PUs: the BPF program, or a simulation of it.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_linux::bpf::{LentCpuMonitor, LentCpuMonitorUnavailable, OwnerRunTime};

/// A monitor of the lent PUs: PUs (logical CPUs) that a job, the owner, lends to another job. The monitor reports a
/// lent PU when a thread of the owner runs on it. [`OwnerCpuSampler`](super::OwnerCpuSampler) uses the monitor to
/// decide when an owner needs its lent PUs back. The daemon uses [`LentCpuMonitor`] (a BPF program). Tests with a
/// simulated machine have an implementation of their own.
pub trait LentCpuMonitorInterface: std::fmt::Debug + Send {
    /// Sets the lent PUs: the PUs that a job (the owner) lends to another job. The value for each PU is the number of
    /// all PUs of the owner ([`LentCpuMonitor::set_lent_pus`]). A PU in `silent` that was not lent before is not
    /// reported until [`LentCpuMonitorInterface::report_again`] is called for it.
    ///
    /// # Errors
    /// If the PUs can't be monitored.
    fn set_lent_pus(
        &mut self,
        lent: &BTreeMap<Pu, u32>,
        silent: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable>;

    /// Returns the lent PUs that were passed to the last call of [`LentCpuMonitorInterface::set_lent_pus`]: PUs that a
    /// job (the owner) lends to another job. The value for each PU is the number of all PUs of the owner.
    fn lent_pus(&self) -> &BTreeMap<Pu, u32>;

    /// Returns the file descriptor that poll(2) shows as readable when the monitor has reported a PU. `None` if the
    /// monitor has no file descriptor, as on a simulated machine.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Returns the lent PUs on which threads of the owner (the lending job) ran, as reported since the last call of
    /// this function ([`LentCpuMonitor::take_reported_pus`]).
    fn take_reported_pus(&mut self) -> CpuSet;

    /// Lets the monitor report each PU in `cpus` once more ([`LentCpuMonitor::report_again`]).
    ///
    /// # Errors
    /// If the PUs can't be monitored.
    fn report_again(&mut self, cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable>;

    /// Returns how long the owner (the lending job) has run on each lent PU ([`LentCpuMonitor::owner_run_times`]).
    fn owner_run_times(&self) -> Vec<OwnerRunTime>;
}

impl LentCpuMonitorInterface for LentCpuMonitor {
    fn set_lent_pus(
        &mut self,
        lent: &BTreeMap<Pu, u32>,
        silent: &CpuSet,
    ) -> Result<(), LentCpuMonitorUnavailable> {
        LentCpuMonitor::set_lent_pus(self, lent, silent)
    }

    fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        LentCpuMonitor::lent_pus(self)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(LentCpuMonitor::fd(self))
    }

    fn take_reported_pus(&mut self) -> CpuSet {
        LentCpuMonitor::take_reported_pus(self)
    }

    fn report_again(&mut self, cpus: &CpuSet) -> Result<(), LentCpuMonitorUnavailable> {
        LentCpuMonitor::report_again(self, cpus)
    }

    fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        LentCpuMonitor::owner_run_times(self)
    }
}

/// Loads the BPF program that reports when a job runs on PUs (logical CPUs) that it lends to other jobs.
///
/// # Errors
/// If the program can't be used on this machine. The error contains the reason.
pub(in crate::run) fn load_lent_cpu_monitor()
-> Result<Box<dyn LentCpuMonitorInterface>, LentCpuMonitorUnavailable> {
    Ok(Box::new(LentCpuMonitor::new()?))
}
