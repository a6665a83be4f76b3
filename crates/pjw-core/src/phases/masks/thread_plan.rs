//! A thread of a job as input for the choice of its mask.

use crate::basics::{CpuSet, Pu, ThreadId};
use crate::machine::Topology;
use crate::state::masks::{lifted::LiftReason, target::is_unbound};
use crate::state::{MaskEntry, Member, MemberThread};
use crate::terms::MaskActionKind;

/// A thread of a job, with the facts from which pjw decides the affinity mask of the thread.
pub(super) struct ThreadPlan<'a> {
    pub(super) id: ThreadId,
    /// The process of the thread.
    pub(super) member: &'a Member,
    pub(super) thread: &'a MemberThread,
    pub(super) entry: &'a MaskEntry,
    /// The PUs of the job to which the program bound the thread. All PUs of the job if the program did not bind the
    /// thread.
    pub(super) own: CpuSet,
    /// Whether pjw lifted the binding of the thread in an earlier cycle (replaced the mask by which the program bound
    /// the thread), and has not restored the binding.
    pub(super) was_lifted: bool,
    /// Whether this cycle restores a binding that pjw had lifted, because the lift did not help.
    pub(super) is_rebound: bool,
    /// Whether pjw lifted the binding of the thread earlier, and that did not help. pjw does not lift it again.
    pub(super) has_lift_failed: bool,
    /// The reason why this cycle lifts the binding of the thread. `None` if this cycle does not lift it.
    pub(super) lifted: Option<LiftReason>,
    /// Whether the thread is in the cpuset of its job.
    pub(super) in_cpuset: bool,
    /// Whether the thread is in the cpuset of its job, and this cpuset has exactly the PUs that the job holds. A thread
    /// that requests every PU then gets all PUs of the job.
    pub(super) follows_cpuset: bool,
    /// Whether a program that gave the thread all PUs of the job may have requested others too, which the cpuset of the
    /// job hides. False in each of these cases:
    ///
    /// - The job holds all online PUs.
    /// - A process of the job is known to have requested PUs of the job only.
    pub(super) may_have_requested_others: bool,
}

impl ThreadPlan<'_> {
    /// Returns the affinity mask that the thread should have if pjw does not pin it. This is `grant` (all logical CPUs
    /// of the job), or the part of `grant` to which the program bound the thread. A binding that pjw has lifted does
    /// not count.
    pub(super) fn mask_without_pin<'t>(&'t self, grant: &'t CpuSet) -> &'t CpuSet {
        if self.has_lifted_binding() { grant } else { &self.own }
    }

    /// Returns whether pjw has lifted the binding of the thread: the program bound the thread to a part of the job's
    /// PUs (logical CPUs), and pjw lets the thread run on all of them. False if the program did not bind the thread.
    pub(super) fn has_lifted_binding(&self) -> bool {
        self.lifted.is_some() || (self.was_lifted && !self.is_rebound)
    }

    /// Returns the PU (logical CPU) to which pjw has pinned the thread. `None` if pjw has not pinned the thread. Also
    /// `None` if the thread would have only this PU without the pin too, for example because its program bound the
    /// thread to it. `grant` is the set of PUs that the job holds.
    pub(super) fn pinned_pu(&self, grant: &CpuSet) -> Option<Pu> {
        self.entry.pinned_pu().filter(|&pin| self.mask_without_pin(grant).only_pu() != Some(pin))
    }

    /// Returns whether the program replaced the affinity mask that pjw had set for the thread by a mask with PUs
    /// (logical CPUs) outside of `grant` (the PUs of the job). In a cpuset, such a mask shows only the PUs of the job.
    /// So a mask that shows all of them counts too, if others may have been requested
    /// ([`Self::may_have_requested_others`]).
    pub(super) fn has_left_grant(&self, grant: &CpuSet) -> bool {
        let requested_all = self.in_cpuset && self.own == *grant && self.may_have_requested_others;
        self.entry.is_overridden_by_program()
            && (requested_all || !self.thread.effective_mask.is_subset(grant))
    }

    /// Returns the mask that the program requested for the thread, if a change of the kind `kind` replaces it because
    /// it has PUs (logical CPUs) outside of `grant` (the PUs of the job). `None` in each of these cases:
    ///
    /// - Another kind of change.
    /// - The thread is restricted for the first time, and the program did not bind it: see [`is_unbound`].
    pub(super) fn replaced_request(
        &self,
        kind: MaskActionKind,
        grant: &CpuSet,
        topology: &Topology,
    ) -> Option<CpuSet> {
        let requested = self.entry.original_mask();
        let is_request = match kind {
            MaskActionKind::Repair => true,
            MaskActionKind::Confine => {
                !is_unbound(topology, grant, requested, self.member.inherited_mask.as_ref())
            }
            _ => false,
        };
        (is_request && !requested.is_subset(grant)).then(|| requested.clone())
    }

    /// Returns the mask to pass to sched_setaffinity(2) so that the thread gets the effective mask `mask`. This is
    /// `machine` (all logical CPUs of the machine) if `mask` contains all `online` PUs (logical CPUs), or if the cpuset
    /// restricts the thread to `grant` and `mask` is `grant`. Otherwise, this is `mask`.
    pub(super) fn mask_to_request(
        &self,
        mask: &CpuSet,
        grant: &CpuSet,
        machine: &CpuSet,
        online: &CpuSet,
    ) -> CpuSet {
        let is_everything = online.is_subset(mask) || (self.follows_cpuset && mask == grant);
        if is_everything { machine.clone() } else { mask.clone() }
    }

    /// Returns whether pjw requested a mask without some PUs of `grant` (the PUs of the job), and the cpuset of the
    /// thread has exactly the PUs of `grant`. If the thread may run on all of `grant` nevertheless, this mask has no
    /// effect at present. But the kernel stores the mask: it would have an effect in another cgroup, and children of
    /// the process inherit it. False if the program requested the last mask, or if the last mask is not known.
    pub(super) fn may_hide_requested_mask(&self, grant: &CpuSet) -> bool {
        let requested = self.entry.requested_mask().filter(|_| !self.entry.is_mask_from_program());
        self.follows_cpuset && requested.is_some_and(|requested| !grant.is_subset(requested))
    }
}
