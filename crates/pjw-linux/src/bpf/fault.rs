//! Errors of the BPF programs: why a program can't be used, and why a task scan stopped.

use thiserror::Error;

use super::task::MAX_SCANNED_PROCESSES;

/// Error: a step failed while a BPF program was loaded, attached or run. Contains the name of the step, and the
/// error of the step as text.
#[derive(Debug, Clone, Error)]
#[error("{step}: {cause}")]
pub struct BpfStepError {
    /// The name of the step that failed, for display, such as `attaching`.
    pub step: &'static str,
    /// The error of the step, followed by the errors that caused it, as text.
    pub cause: String,
}

/// The reason why the BPF program [`TaskScan`](super::TaskScan), which reports the state of threads, can't be
/// used.
#[derive(Debug, Clone, Error)]
pub enum TaskScanUnavailable {
    /// This build does not contain the BPF programs (cargo feature `bpf`).
    #[error("the task scan is not compiled in: build with --features bpf; until then /proc is used")]
    NotCompiled,
    /// This machine is big-endian, and the BPF object file is for little-endian machines only.
    #[error("the task scan's BPF object is for little-endian machines only: /proc is used")]
    BigEndian,
    /// This process is not in the initial pid namespace. The process ids that the program reports would differ from
    /// those in `/proc`.
    #[error(
        "the task scan reports process ids of the initial pid namespace, and this process is in another one: start pjwd \
         outside the container, or with the host's pid namespace"
    )]
    PidNamespace,
    /// This process lacks `CAP_BPF` or `CAP_PERFMON`, or has no permission to use bpf(2). The field has the failed step
    /// and its error.
    #[error(
        "the kernel refuses the task scan ({0}): grant CAP_BPF and CAP_PERFMON, and allow the system call bpf \
         (systemd: CapabilityBoundingSet=, SystemCallFilter=)"
    )]
    NotPermitted(BpfStepError),
    /// The kernel is in the lockdown mode `confidentiality`, in which BPF programs may not read kernel
    /// memory.
    #[error(
        "the kernel is locked down (/sys/kernel/security/lockdown contains [confidentiality]), so BPF programs may not \
         read its memory: boot with lockdown=integrity; until then /proc is used"
    )]
    LockedDown,
    /// The kernel has no BTF type information (`CONFIG_DEBUG_INFO_BTF`), or the BTF file can't be read. The
    /// field is the error of reading the file.
    #[error(
        "the kernel has no BTF type information ({0}): the task scan needs a kernel with CONFIG_DEBUG_INFO_BTF and \
         /sys/kernel/btf/vmlinux"
    )]
    NoBtf(String),
    /// The kernel is older than Linux 5.8 and has no task iterators. The field is the kernel release.
    #[error("Linux {0} has no BPF task iterator: the task scan needs 5.8 or later")]
    KernelTooOld(String),
    /// The machine has more than 8192 possible PUs (logical CPUs), which the task scan does not support. Possible PUs
    /// include those that can be added while the machine runs. The field is their number.
    #[error("this machine may have {0} PUs, and the task scan supports 8192: /proc is used")]
    TooManyPus(u32),
    /// Any other error while the program was loaded. The field has the failed step and its error.
    #[error(
        "the task scan can't be loaded ({0}): /proc is used; please report this with the kernel's release"
    )]
    Refused(BpfStepError),
    /// The program was loaded, but the state that it reports for the calling thread differs from `/proc`.
    #[error(
        "the task scan reports {scan} as the {field} of a thread of pjwd, and /proc reports {proc}: the task scan is not \
         used; please report this with the kernel's release"
    )]
    SelfCheckFailed {
        /// The name of the field whose values differ, such as `pid`.
        field: &'static str,
        /// The value that the BPF program reports.
        scan: String,
        /// The value in `/proc`.
        proc: String,
    },
}

/// The reason why the BPF program [`AffinityMonitor`](super::AffinityMonitor), which reports calls of
/// sched_setaffinity(2), can't be used.
#[derive(Debug, Clone, Error)]
pub enum AffinityMonitorUnavailable {
    /// A requirement of all BPF programs of pjw is missing, such as BTF (the type information of the kernel) or a
    /// capability. The field names the missing requirement. It has the error type of [`TaskScan`](super::TaskScan),
    /// another BPF program of pjw.
    #[error(transparent)]
    RequirementMissing(TaskScanUnavailable),
    /// The kernel refuses to load the program, or to attach it to the kernel function of
    /// sched_setaffinity(2). The field has the failed step and its error.
    #[error(
        "no program can be attached to the kernel's sched_setaffinity ({0}): this needs a kernel with BTF, \
         CONFIG_FUNCTION_TRACER and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"
    )]
    Refused(BpfStepError),
    /// The program was attached, but did not report a test call of this process correctly. The field has the reports of
    /// the program as text.
    #[error(
        "the program at sched_setaffinity reported a call of pjwd as {0}: the program is not used; please report \
         this with the kernel's release"
    )]
    SelfCheckFailed(String),
}

impl From<TaskScanUnavailable> for AffinityMonitorUnavailable {
    fn from(why: TaskScanUnavailable) -> Self {
        match why {
            TaskScanUnavailable::Refused(step) => Self::Refused(step),
            other => Self::RequirementMissing(other),
        }
    }
}

/// The reason why the BPF program [`LentCpuMonitor`](super::LentCpuMonitor) can't be used. This program watches
/// the PUs (logical CPUs) that a job lends to another job, and reports when a thread of the lending job runs
/// there.
#[derive(Debug, Clone, Error)]
pub enum LentCpuMonitorUnavailable {
    /// A requirement of all BPF programs of pjw is missing, such as BTF (the type information of the kernel) or a
    /// capability. The field names the missing requirement. It has the error type of [`TaskScan`](super::TaskScan),
    /// another BPF program of pjw.
    #[error(transparent)]
    RequirementMissing(TaskScanUnavailable),
    /// The kernel refuses to load the program, or to attach it to the tracepoint sched_switch. The field has
    /// the failed step and its error.
    #[error(
        "no program can be attached to the kernel's tracepoint sched_switch ({0}): the demand of owners is sampled; \
         please report this with the kernel's release"
    )]
    Refused(BpfStepError),
    /// The kernel has no idle priority of cgroups. A job that borrows a PU (logical CPU) runs at idle priority. Without
    /// this priority, the program can't distinguish the threads of the borrowing job from the threads of the owner (the
    /// job that lends the PU).
    #[error(
        "the kernel has no idle priority of cgroups (cpu.idle, Linux 5.15): the demand of owners is sampled"
    )]
    NoIdlePriority,
    /// The program was attached, but did not report a test thread of this process correctly. The field has the reports
    /// of the program as text.
    #[error(
        "the program at sched_switch reported {0} for a thread of pjwd: the demand of owners is sampled; please \
         report this with the kernel's release"
    )]
    SelfCheckFailed(String),
}

impl From<TaskScanUnavailable> for LentCpuMonitorUnavailable {
    fn from(why: TaskScanUnavailable) -> Self {
        match why {
            TaskScanUnavailable::Refused(step) => Self::Refused(step),
            other => Self::RequirementMissing(other),
        }
    }
}

/// The reason why a task scan stopped before its end. In a task scan, a BPF program iterates over the kernel's
/// threads, and reports a record for each thread. The records that were reported before the error are valid.
#[derive(Debug, Error)]
pub enum TaskScanError {
    /// A system call or an access to a BPF map failed. The field has the failed step and its error.
    #[error("the task scan stopped ({0}): this scan uses /proc")]
    Kernel(BpfStepError),
    /// The set of processes in the scope of the scan ([`TaskScope`](super::TaskScope)) has more than
    /// [`MAX_SCANNED_PROCESSES`] elements.
    #[error(
        "a pass over {processes} processes exceeds the task scan's maximum of {MAX_SCANNED_PROCESSES}: this scan uses /proc"
    )]
    TooManyProcesses {
        /// The number of processes in the set.
        processes: usize,
    },
    /// The kernel returned a record that can't be parsed.
    #[error("the task scan wrote a malformed record: /proc is used from now on")]
    Malformed,
}
