//! Task facts and affinity requests from BPF programs in the kernel.
//!
//! The task scan is a BPF task iterator (`bpf/tasks.bpf.c`). It writes one binary record per task and skips
//! processes that are not requested. Reading `/proc` instead takes three files per thread, with each fact as text.
//!
//! Requirements: the cargo feature `bpf`, a little-endian machine, Linux 5.8 or later with BTF, `CAP_BPF`,
//! `CAP_PERFMON`, the initial pid namespace, and a kernel that is not locked down. [`TaskScan::load`] reports
//! a missing requirement. It also compares the record of its own task with /proc, and fails if they differ.
//! Callers must be able to work without the task scan.
//!
//! The effective mask of a thread in a cpuset does not change when the thread requests more PUs than the
//! cpuset has. So a second program ([`AffinityMonitor`]) runs at the end of sched_setaffinity(2). The two
//! programs are loaded independently.
//!
//! A third program ([`LentCpuMonitor`], `lent/lent.bpf.c`) runs at each change of the running thread, while PUs of
//! owners are lent, and reports the first time that an owner's thread runs on one of them.
//!
//! All ids are those of the initial pid, user and time namespaces.

#[cfg(feature = "bpf")]
mod affinity_monitor;
mod fault;
#[cfg(feature = "bpf")]
mod lent;
#[cfg(not(feature = "bpf"))]
mod not_compiled;
#[cfg(feature = "bpf")]
mod object;
#[cfg(feature = "bpf")]
mod record;
#[cfg(feature = "bpf")]
mod scan;
#[cfg(feature = "bpf")]
mod self_check;
mod task;
#[cfg(test)]
pub(crate) mod tests;

#[cfg(feature = "bpf")]
pub use affinity_monitor::AffinityMonitor;
pub use fault::{
    AffinityMonitorUnavailable, BpfStepError, LentCpuMonitorUnavailable, TaskScanError, TaskScanUnavailable,
};
#[cfg(feature = "bpf")]
pub use lent::LentCpuMonitor;
#[cfg(not(feature = "bpf"))]
pub use not_compiled::{AffinityMonitor, LentCpuMonitor, TaskScan, load_programs};
#[cfg(feature = "bpf")]
pub use scan::TaskScan;
pub use task::{
    DrainedRequests, MAX_SCANNED_PROCESSES, OwnerRunTime, TaskRecord, TaskScanSummary, TaskScope,
};

/// Whether this build of pjw contains its BPF programs (cargo feature `bpf`).
pub const HAS_BPF_PROGRAMS: bool = cfg!(feature = "bpf");

/// Loads two BPF programs into the kernel: the task scan, which reports the state of threads, and the affinity
/// monitor, which reports calls of sched_setaffinity(2). Returns one result for each program, because one
/// program can fail without the other.
#[cfg(feature = "bpf")]
pub fn load_programs()
-> (Result<TaskScan, TaskScanUnavailable>, Result<AffinityMonitor, AffinityMonitorUnavailable>) {
    match object::BpfPlatform::detect() {
        Ok(mut platform) => {
            let scan = TaskScan::load_with_platform(&mut platform);
            let monitor =
                AffinityMonitor::load_with_platform(&mut platform).map_err(|why| match why {
                    // If the task scan could be loaded, the capabilities suffice. Then the kernel lacks this kind
                    // of program.
                    AffinityMonitorUnavailable::RequirementMissing(TaskScanUnavailable::NotPermitted(
                        step,
                    )) if scan.is_ok() => AffinityMonitorUnavailable::Refused(step),
                    why => why,
                });
            (scan, monitor)
        }
        Err(why) => (Err(why.clone()), Err(why.into())),
    }
}
