//! The requests for affinity masks, and the prediction of the mask that the kernel shows for a request: the part of the
//! request that the cpuset and the online PUs allow.

use smallvec::SmallVec;

use crate::basics::{CpuSet, Nanos};

/// Who set an affinity mask by a request to the kernel: the thread's program, pjw, or the kernel itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskWriter {
    /// The program of the thread, the parent process before the job began, or the user.
    Program,
    /// pjw. A thread that inherited its mask from a thread whose mask pjw set counts as set by pjw too.
    Warden,
    /// A kernel before Linux 6.2. Such a kernel gives a thread the whole cpuset when the cpuset or the online
    /// PUs change, without a call of sched_setaffinity(2).
    Kernel,
}

/// A request to the kernel for the affinity mask of a thread (sched_setaffinity(2)): the mask, who requested
/// it, and when. Also contains the original mask of the thread, which pjw restores when the job is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskRequest {
    /// The requested mask. It may contain PUs that are offline or outside the thread's cpuset.
    ///
    /// - If `writer` is pjw, the mask that pjw passed to sched_setaffinity(2).
    /// - If `writer` is the program, the mask that pjw derived from the effective mask that a scan read.
    ///   Every PU of the machine if the effective mask had every PU that was possible.
    /// - If `writer` is the kernel, every PU of the machine.
    pub mask: CpuSet,
    /// The mask that pjw restores when the job is released, provided that this request is then still the
    /// last one for the thread.
    pub original_mask: CpuSet,
    /// Who made the request: the program, pjw, or the kernel.
    pub writer: MaskWriter,
    /// The time of the request, in ns since boot. 0 if the request is older than pjw's first reading of the
    /// mask.
    pub requested_at: Nanos,
}

impl MaskRequest {
    /// Whether the original mask must be restored if this request is the last one for the thread. True if pjw
    /// or the kernel made the request, and its mask is not the original mask.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.writer != MaskWriter::Program && self.mask != self.original_mask
    }
}

/// Returns the effective mask: the mask that the kernel shows for a thread whose mask was set to
/// `requested`. `possible` is the set of online PUs in the thread's cpuset. The effective mask is the
/// intersection of `requested` and `possible`, or all of `possible` if the intersection is empty
/// (kernel/sched/core.c, `__set_cpus_allowed_ptr`).
#[must_use]
pub fn effective_mask(requested: &CpuSet, possible: &CpuSet) -> CpuSet {
    let left = requested.intersection(possible);
    if left.is_empty() { possible.clone() } else { left }
}

/// The limits of a thread's affinity mask: the PUs that are both online and in the thread's cpuset. If
/// these PUs have changed since the last reading of the mask, there are several such sets. The kernel shows
/// only the PUs of a requested mask that are within the limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskLimits {
    /// The sets of PUs that were both online and in the thread's cpuset at some time since the last reading
    /// of the mask. The present set comes first. Earlier sets follow if the cpuset or the online PUs have
    /// changed.
    pub possible_cpus: SmallVec<[CpuSet; 1]>,
    /// Every PU in the topology of the machine. PUs that went offline after pjw read the topology are
    /// included. PUs that were offline at that time are not.
    pub machine_cpus: CpuSet,
    /// Whether the limits may have changed since the last reading of the mask: the cpuset was written, the
    /// process was moved, or PUs went offline or online. Also true if PUs went offline or online at most
    /// [`HOTPLUG_DELAY`](crate::state::masks::old_kernels::HOTPLUG_DELAY) before the last reading.
    pub may_have_changed: bool,
    /// Whether the kernel may already have replaced the mask by the whole cpuset, at some time since the last
    /// reading of the mask. Only kernels before Linux 6.2 do this.
    pub kernel_may_have_reset_mask: bool,
}

impl MaskLimits {
    /// Whether `seen` is the effective mask of this request at some moment since the last reading.
    pub(crate) fn show(&self, requested: &CpuSet, seen: &CpuSet) -> bool {
        self.possible_cpus.iter().any(|possible| effective_mask(requested, possible) == *seen)
    }

    /// Whether `seen` is the whole set of possible PUs of some moment. A larger mask is only read while the cpuset or
    /// the online PUs change. It is compared with the present set only, because a request may contain an earlier
    /// cpuset by chance.
    pub(crate) fn are_all_in(&self, seen: &CpuSet) -> bool {
        self.possible_cpus[0].is_subset(seen) || self.possible_cpus.contains(seen)
    }

    /// The program's request that is assumed for the effective mask `seen`: every PU of the machine if the thread has
    /// every possible PU, else `seen`.
    pub(crate) fn request_of(&self, seen: &CpuSet, requested_at: Nanos) -> MaskRequest {
        let mask = if self.are_all_in(seen) { self.machine_cpus.clone() } else { seen.clone() };
        MaskRequest { original_mask: mask.clone(), mask, writer: MaskWriter::Program, requested_at }
    }
}
