//! What the kernel knows of its tasks, all of it in a few reads: a BPF task iterator. And who asks it for which PUs.
//!
//! /proc makes text of every fact and wants three files opened per thread. Here a program in the kernel
//! (`bpf/tasks.bpf.c`) writes one binary record per task, and passes over the processes that nobody asked for.
//!
//! It needs the cargo feature `bpf`, a little-endian machine, Linux 5.8 or later with BTF, `CAP_BPF`, `CAP_PERFMON`,
//! the first pid namespace, and a kernel that is not locked down. [`TaskScan::load`] tells which of these is missing,
//! and believes nothing before its own task's record is what /proc says. Whoever uses it must be able to do without.
//!
//! Behind a cpuset the mask of a thread that asks for more than it may have is as before. So another program
//! ([`Asks`]) runs where sched_setaffinity(2) ends. It is loaded, checked and done without by itself.
//!
//! Numbers are those of the first pid, user and time namespace.

use std::collections::BTreeSet;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::{Comm, Pid, StartTime, Tid, Uid};
use pjw_core::snapshot::Asked;
use thiserror::Error;

#[cfg(not(feature = "bpf"))]
mod absent;
#[cfg(feature = "bpf")]
mod asks;
#[cfg(feature = "bpf")]
mod object;
#[cfg(feature = "bpf")]
mod record;
#[cfg(feature = "bpf")]
mod scan;
#[cfg(feature = "bpf")]
mod self_check;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(feature = "bpf")]
mod watched;

#[cfg(not(feature = "bpf"))]
pub use absent::{Asks, TaskScan, load};
#[cfg(feature = "bpf")]
pub use asks::Asks;
#[cfg(feature = "bpf")]
pub use scan::TaskScan;

/// Whether this build has the programs.
pub const BUILT_IN: bool = cfg!(feature = "bpf");

/// The most processes that can be asked for in one pass.
pub const MOST_WATCHED: u32 = 131_072;

/// Whom a pass reports.
#[derive(Debug, Clone, Copy)]
pub enum Whom<'a> {
    /// The first thread of every process, kernel threads too, and all threads of these processes.
    Everybody(&'a BTreeSet<Pid>),
    /// The tasks of these processes, [`MOST_WATCHED`] at most. Who is not there is not told.
    These(&'a BTreeSet<Pid>),
}

/// A task, as the kernel has it at this moment. Fields are named and valued as in [`crate::procfs::Stat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRecord<'a> {
    /// The thread.
    pub tid: Tid,
    /// Its process.
    pub process: Pid,
    /// When the thread started.
    pub start: StartTime,
    /// The process's parent; 0 if it has none.
    pub parent: Pid,
    /// The session; 0 if it has none.
    pub session: Pid,
    /// The process group; 0 if it has none.
    pub group: Pid,
    /// The kernel's letter for the state, as /proc shows it.
    pub state: char,
    /// Whether it is a kernel thread. Its name is the plain one: /proc adds to some what they work for.
    pub kernel: bool,
    /// Time on a PU, in ns: the first number of `schedstat`.
    pub run_ns: u64,
    /// Time on a run queue, in ns: the second number of `schedstat`. `None` on a kernel that does not keep it
    /// (`CONFIG_SCHED_INFO`).
    pub wait_ns: Option<u64>,
    /// The PU it last ran on.
    pub last_cpu: Pu,
    /// Its name.
    pub comm: Comm,
    /// The real user id.
    pub uid: Uid,
    /// The effective user id.
    pub effective_uid: Uid,
    /// Where its process's stack starts: another address after nearly every exec. 0 if it has no memory (any more).
    pub stack: u64,
    /// Its cgroup in the v2 hierarchy, by inode, whether that is mounted or not; 0 on a kernel without cgroups.
    pub cgroup: u64,
    /// Of a process's first thread, another number when it is in another cgroup: for sure of v2 and of v1 hierarchies with
    /// controllers, nearly always of one that has only a name. 0 of other threads, and on a kernel without cgroups.
    pub place: u64,
    /// Where it may run now, as [`crate::affinity::get`] would tell: least significant word first, without trailing
    /// zero words.
    pub allowed_words: &'a [u64],
}

impl TaskRecord<'_> {
    /// Where it may run now.
    #[must_use]
    pub fn allowed(&self) -> CpuSet {
        CpuSet::from_words(self.allowed_words)
    }

    /// Whether it may run on these PUs only: costs no memory, unlike [`TaskRecord::allowed`] on machines of more than 128
    /// PUs.
    #[must_use]
    pub fn is_within(&self, pus: &CpuSet) -> bool {
        let others = pus.words().iter().copied().chain(std::iter::repeat(0));
        self.allowed_words.iter().zip(others).all(|(word, pus)| word & !pus == 0)
    }
}

/// How a pass went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassSummary {
    /// Tasks that were reported.
    pub reported: u64,
    /// Tasks that were passed over because nobody asked for them.
    pub passed_over: u64,
}

/// What [`Asks`] heard since the last time.
#[derive(Debug, Default)]
pub struct Heard {
    /// The calls, in order. Those that the kernel refused for another reason than the caller's cpuset are left out.
    pub asked: Vec<Asked>,
    /// How many did not fit into the ring.
    pub lost: u64,
}

/// Both, of which each may be missing by itself. The kernel's description of its types is read once.
#[cfg(feature = "bpf")]
pub fn load() -> (Result<TaskScan, ScanUnavailable>, Result<Asks, AsksUnavailable>) {
    match object::Ground::find() {
        Ok(ground) => {
            let scan = TaskScan::load_on(&ground);
            let asks = Asks::load_on(&ground).map_err(|why| match why {
                // Whoever may load one lacks no capability: this kernel has no such programs.
                AsksUnavailable::Ground(ScanUnavailable::NotPermitted { step, why }) if scan.is_ok() => {
                    AsksUnavailable::Refused { step, why }
                }
                why => why,
            });
            (scan, asks)
        }
        Err(why) => (Err(why.clone()), Err(why.into())),
    }
}

/// Why tasks can't be scanned by the kernel here.
#[derive(Debug, Clone, Error)]
pub enum ScanUnavailable {
    /// The program was built without it.
    #[error("the task scan was not built in: build with --features bpf, or go on with /proc")]
    NotCompiled,
    /// The checked-in object is little-endian.
    #[error("the task scan's BPF object is for little-endian machines: go on with /proc")]
    BigEndian,
    /// Process numbers would be others than those of /proc.
    #[error(
        "the task scan tells the first pid namespace's numbers, and this is another: start outside of the container, \
         or with the host's pid namespace"
    )]
    PidNamespace,
    /// `CAP_BPF` or `CAP_PERFMON` is missing, or bpf(2) is forbidden.
    #[error(
        "the kernel refuses the task scan ({step}: {why}): grant CAP_BPF and CAP_PERFMON, and allow the system call bpf \
         (systemd: CapabilityBoundingSet=, SystemCallFilter=)"
    )]
    NotPermitted {
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        why: String,
    },
    /// Secure boot's strictest mode.
    #[error(
        "the kernel is locked down (/sys/kernel/security/lockdown says confidentiality), so no BPF program may read its \
         memory: boot with lockdown=integrity, or go on with /proc"
    )]
    LockedDown,
    /// `CONFIG_DEBUG_INFO_BTF` is off.
    #[error(
        "the kernel does not describe its types ({why}): the task scan needs one with CONFIG_DEBUG_INFO_BTF and \
         /sys/kernel/btf/vmlinux"
    )]
    NoBtf {
        /// What was found instead.
        why: String,
    },
    /// There are no task iterators before Linux 5.8.
    #[error("Linux {release} has no BPF task iterator: the task scan needs 5.8 or later")]
    KernelTooOld {
        /// The running kernel.
        release: String,
    },
    /// More PUs than a record has room for.
    #[error(
        "this machine may have {possible} PUs, and the task scan's records end at 8192: go on with /proc"
    )]
    TooManyPus {
        /// How many there may be.
        possible: u32,
    },
    /// Something else did not work; a kernel that differs from all that are known.
    #[error(
        "the task scan can't be loaded ({step}: {why}): go on with /proc, and report this with the kernel's release"
    )]
    Refused {
        /// What was tried.
        step: &'static str,
        /// What was said.
        why: String,
    },
    /// It was loaded, but what it told of our own task is not what /proc says.
    #[error(
        "the task scan says {field} {scan} of our own task where /proc says {proc}: nothing it says is believed; go on \
         with /proc, and report this with the kernel's release"
    )]
    SelfCheck {
        /// Which fact.
        field: &'static str,
        /// What the scan said.
        scan: String,
        /// What /proc said.
        proc: String,
    },
}

/// Why nobody tells here who asks for which PUs.
#[derive(Debug, Clone, Error)]
pub enum AsksUnavailable {
    /// What the task scan lacks too.
    #[error(transparent)]
    Ground(ScanUnavailable),
    /// This kernel lets no program be attached to the function.
    #[error(
        "no program can be attached to the kernel's sched_setaffinity ({step}: {why}): that needs a kernel with BTF, \
         CONFIG_FUNCTION_TRACER and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"
    )]
    Refused {
        /// What was tried.
        step: &'static str,
        /// What was said.
        why: String,
    },
    /// It was attached, but of our own call it did not tell what was asked.
    #[error(
        "the program at sched_setaffinity told of our own call {told}: nothing it says is believed; report this with \
         the kernel's release"
    )]
    Deaf {
        /// What it told.
        told: String,
    },
}

impl From<ScanUnavailable> for AsksUnavailable {
    fn from(why: ScanUnavailable) -> Self {
        match why {
            ScanUnavailable::Refused { step, why } => Self::Refused { step, why },
            other => Self::Ground(other),
        }
    }
}

/// Why a pass ended early. What was reported until then is true.
#[derive(Debug, Error)]
pub enum PassError {
    /// The kernel refused.
    #[error("the task scan stopped ({step}: {why}): look at /proc in this cycle")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        why: String,
    },
    /// Too many processes were asked for.
    #[error("{asked} processes were asked for, and the task scan has room for {MOST_WATCHED}: look at /proc")]
    TooMany {
        /// How many.
        asked: usize,
    },
    /// A record makes no sense.
    #[error("the task scan wrote a record that makes no sense: look at /proc, and scan no more")]
    Malformed,
}
