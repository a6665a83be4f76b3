//! Why the BPF programs can't be used, and why a pass stopped.

use thiserror::Error;

use super::task::MAX_WATCHED;

/// Why the kernel can't run the task scan.
#[derive(Debug, Clone, Error)]
pub enum ScanUnavailable {
    /// The task scan is not compiled in.
    #[error("the task scan is not compiled in: build with --features bpf; until then /proc is used")]
    NotCompiled,
    /// The object file is for little-endian machines.
    #[error("the task scan's BPF object is for little-endian machines only: /proc is used")]
    BigEndian,
    /// This process is not in the initial pid namespace, so process ids would differ from those in /proc.
    #[error(
        "the task scan reports process ids of the initial pid namespace, and this process is in another one: start pjwd \
         outside the container, or with the host's pid namespace"
    )]
    PidNamespace,
    /// `CAP_BPF` or `CAP_PERFMON` is missing, or bpf(2) is forbidden.
    #[error(
        "the kernel refuses the task scan ({step}: {why}): grant CAP_BPF and CAP_PERFMON, and allow the system call bpf \
         (systemd: CapabilityBoundingSet=, SystemCallFilter=)"
    )]
    NotPermitted {
        /// The failed step.
        step: &'static str,
        /// The error of the kernel.
        why: String,
    },
    /// Kernel lockdown is in the mode `confidentiality`.
    #[error(
        "the kernel is locked down (/sys/kernel/security/lockdown contains [confidentiality]), so BPF programs may not \
         read its memory: boot with lockdown=integrity; until then /proc is used"
    )]
    LockedDown,
    /// The kernel has no BTF type information (`CONFIG_DEBUG_INFO_BTF`).
    #[error(
        "the kernel has no BTF type information ({why}): the task scan needs a kernel with CONFIG_DEBUG_INFO_BTF and \
         /sys/kernel/btf/vmlinux"
    )]
    NoBtf {
        /// The error when BTF was read.
        why: String,
    },
    /// The kernel is older than 5.8 and has no task iterators.
    #[error("Linux {release} has no BPF task iterator: the task scan needs 5.8 or later")]
    KernelTooOld {
        /// Release of the running kernel.
        release: String,
    },
    /// A record has too little room for a mask of this machine.
    #[error("this machine may have {possible} PUs, and the task scan supports 8192: /proc is used")]
    TooManyPus {
        /// Number of possible PUs.
        possible: u32,
    },
    /// Any other error, as from a kernel with unknown properties.
    #[error(
        "the task scan can't be loaded ({step}: {why}): /proc is used; please report this with the kernel's release"
    )]
    Refused {
        /// The failed step.
        step: &'static str,
        /// The error.
        why: String,
    },
    /// The program was loaded, but its record of this process differs from /proc.
    #[error(
        "the task scan reports {scan} as the {field} of our own task, and /proc reports {proc}: the task scan is not \
         used; please report this with the kernel's release"
    )]
    SelfCheck {
        /// The field that differs.
        field: &'static str,
        /// The value in the scan.
        scan: String,
        /// The value in /proc.
        proc: String,
    },
}

/// Why affinity requests can't be reported.
#[derive(Debug, Clone, Error)]
pub enum MonitorUnavailable {
    /// A requirement that the monitor shares with the task scan is missing.
    #[error(transparent)]
    Platform(ScanUnavailable),
    /// The kernel can't attach a program to the function.
    #[error(
        "no program can be attached to the kernel's sched_setaffinity ({step}: {why}): this needs a kernel with BTF, \
         CONFIG_FUNCTION_TRACER and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"
    )]
    Refused {
        /// The failed step.
        step: &'static str,
        /// The error.
        why: String,
    },
    /// The program was attached, but did not report a test call of this process correctly.
    #[error(
        "the program at sched_setaffinity reported our own call as {reported}: the program is not used; please report \
         this with the kernel's release"
    )]
    SelfCheck {
        /// The reported requests.
        reported: String,
    },
}

impl From<ScanUnavailable> for MonitorUnavailable {
    fn from(why: ScanUnavailable) -> Self {
        match why {
            ScanUnavailable::Refused { step, why } => Self::Refused { step, why },
            other => Self::Platform(other),
        }
    }
}

/// Why a pass stopped early. The records until then are valid.
#[derive(Debug, Error)]
pub enum PassError {
    /// An error of the kernel.
    #[error("the task scan stopped ({step}: {why}): this scan uses /proc")]
    Kernel {
        /// The failed step.
        step: &'static str,
        /// The error of the kernel.
        why: String,
    },
    /// The pass names too many processes.
    #[error(
        "a pass over {processes} processes exceeds the task scan's maximum of {MAX_WATCHED}: this scan uses /proc"
    )]
    TooMany {
        /// Number of processes.
        processes: usize,
    },
    /// A record is malformed.
    #[error("the task scan wrote a malformed record: /proc is used from now on")]
    Malformed,
}
