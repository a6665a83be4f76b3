//! The requests for affinity masks, and the prediction of the mask that the kernel shows for a request: the part of the
//! request that the cpuset and the online PUs allow.

use smallvec::SmallVec;

use crate::basics::{CpuSet, Nanos};

/// Who set the affinity mask of a thread: the program or pjw (sched_setaffinity(2)), or the kernel by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskWriter {
    /// The program of the thread, or a user by a tool such as taskset(1). Also the process that started the
    /// job, if the thread inherited the mask of this process.
    Program,
    /// pjw. A thread that inherited its mask from a thread whose mask pjw set counts as set by pjw too.
    Warden,
    /// The kernel itself, without a call of sched_setaffinity(2). Only kernels before Linux 6.2 set masks in this
    /// way. Such a kernel sets the mask of a thread to all PUs of its cpuset when the cpuset or the online PUs change.
    Kernel,
}

/// A request for an affinity mask of a thread (sched_setaffinity(2)): the requested mask, who requested it, and the
/// time. A mask that the kernel set by itself ([`MaskWriter::Kernel`]) is recorded in the same form. Each request also
/// contains the original mask of the thread (the mask before pjw changed it). pjw restores the original mask when the
/// job ends, or when `pjwctl release` takes the cores of the job back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskRequest {
    /// The requested mask. It may contain PUs that are offline or outside the thread's cpuset.
    ///
    /// - If `writer` is pjw: the mask that pjw passed to sched_setaffinity(2).
    /// - If `writer` is the program: the mask that pjw assumes that the program requested. If the effective
    ///   mask that a scan read contained every online PU of the thread's cpuset, pjw assumes a request for
    ///   every PU of the machine. Otherwise, pjw assumes a request for the effective mask.
    /// - If `writer` is the kernel: every PU of the machine.
    pub mask: CpuSet,
    /// The mask that the thread gets back when its job ends or is released, if this is the newest known request for the
    /// thread.
    pub original_mask: CpuSet,
    /// Who made the request: the program, pjw, or the kernel.
    pub writer: MaskWriter,
    /// The time of the request, in ns since boot. 0 if the request was made before pjw read the mask of the
    /// thread for the first time.
    pub requested_at: Nanos,
}

impl MaskRequest {
    /// Whether pjw must restore the original mask of the thread (the field `original_mask`) when the job of the thread
    /// ends or is released, if no later request has replaced this request. True if pjw or the kernel set the mask of
    /// this request, and this mask differs from the original mask.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.writer != MaskWriter::Program && self.mask != self.original_mask
    }

    /// Attributes this request to pjw if its original mask is `start_cpus`, the PUs (logical CPUs) on which `pjwctl
    /// spawn` started the process: pjwd takes the mask of such a start for one that the program requested.
    /// `original_mask` becomes the original mask, and `started_at` (in ns since boot) the earliest time of a request of
    /// the program. Does nothing if the original mask is another one.
    pub(crate) fn attribute_start_mask_to_pjw(
        &mut self,
        start_cpus: &CpuSet,
        original_mask: &CpuSet,
        started_at: Nanos,
    ) {
        if self.original_mask != *start_cpus {
            return;
        }
        self.original_mask.clone_from(original_mask);
        if self.writer == MaskWriter::Program {
            self.writer = MaskWriter::Warden;
            self.requested_at = self.requested_at.max(started_at);
        }
    }

    /// Whether the program made this request before pjw read the mask of the thread for the first time, so that the
    /// time of the request is unknown.
    pub(crate) fn is_of_program_before_first_reading(&self) -> bool {
        self.writer == MaskWriter::Program && self.requested_at == Nanos(0)
    }
}

/// Returns the effective mask of a thread that last requested `requested_mask`, now that its cpuset has the online PUs
/// (logical CPUs) `possible_cpus`: the PUs in both sets. If the sets have no common PU because the cpuset or the online
/// PUs changed after the request, the kernel uses all of `possible_cpus` (`__set_cpus_allowed_ptr` in
/// kernel/sched/core.c). A new request without a common PU fails with `EINVAL` instead.
#[must_use]
pub fn effective_mask(requested_mask: &CpuSet, possible_cpus: &CpuSet) -> CpuSet {
    let common = requested_mask.intersection(possible_cpus);
    if common.is_empty() { possible_cpus.clone() } else { common }
}

/// The PUs (logical CPUs) to which the kernel limits the affinity mask of a thread: the PUs that are both online and in
/// the thread's cpuset. If this set of PUs has changed since a scan last read the mask, the earlier sets are included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskLimits {
    /// The sets of PUs that were both online and in the thread's cpuset at some time since the last reading
    /// of the mask. The first set is the present one. The further sets, if any, were in force before. If pjw
    /// is moving the process into another cpuset, the list also contains the set of that cpuset.
    pub possible_cpus: SmallVec<[CpuSet; 1]>,
    /// Every PU in the topology of the machine that pjw read. A PU that went offline after pjw read the
    /// topology is included. A PU that was already offline when pjw read the topology is not included.
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
    /// Returns whether a request for the mask `requested` may have resulted in the effective mask `seen` at some time
    /// since the last reading of the mask. The effective mask is the part of a requested mask that the cpuset and the
    /// online PUs (logical CPUs) allow.
    pub(crate) fn may_result_in(&self, requested: &CpuSet, seen: &CpuSet) -> bool {
        self.possible_cpus.iter().any(|possible| effective_mask(requested, possible) == *seen)
    }

    /// Returns whether `seen` has every PU (logical CPU) that the thread could use. True in each of these cases:
    ///
    /// - `seen` equals the set of possible PUs at some time since the last reading.
    /// - `seen` contains the sets of possible PUs at all these times. A scan can read such a mask while the cpuset or
    ///   the online PUs change. To contain only one of the sets is not enough: a mask for the earlier cpuset may
    ///   contain the whole present cpuset by chance.
    pub(crate) fn is_unrestricted(&self, seen: &CpuSet) -> bool {
        self.possible_cpus.contains(seen)
            || self.possible_cpus.iter().all(|possible| possible.is_subset(seen))
    }

    /// Returns the request that the program probably made, if a scan read the effective mask `seen`. If `seen` has
    /// every PU (logical CPU) that the thread can use, the program probably requested all PUs of the machine. Otherwise
    /// it requested `seen`. `requested_at` is the time of the request, in ns since boot.
    pub(crate) fn assumed_request(&self, seen: &CpuSet, requested_at: Nanos) -> MaskRequest {
        let mask = if self.is_unrestricted(seen) { self.machine_cpus.clone() } else { seen.clone() };
        MaskRequest { original_mask: mask.clone(), mask, writer: MaskWriter::Program, requested_at }
    }
}
