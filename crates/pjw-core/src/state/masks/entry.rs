//! The mask entries of tracked threads: which mask was requested, by which side, and which mask a release restores.
//!
//! The kernel keeps the mask that was requested last (`task_struct::user_cpus_ptr`, since Linux 6.2), but offers no way
//! to read it. What a program can read is the effective mask: the part of the request that the cpuset and the online
//! PUs allow, see [`effective_mask`](super::request::effective_mask). So pjw keeps a copy of the request, and predicts
//! the effective mask. If a scan reads the predicted mask, no program has requested another mask. If it reads another
//! mask, the program has.
//!
//! A request may be uncertain: after a restart, or for a child of a thread that is not known.
//! Then the entry keeps several candidates, and each reading removes the candidates that do not predict the mask.
//! `ARCHITECTURE.md` has the rules as a table.

mod lifted_binding;
mod start_mask;

use smallvec::SmallVec;

use crate::basics::{BirthTime, CpuSet, Nanos, Pu, prelude::*};
use crate::state::masks::lifted::LiftedBinding;
use crate::state::masks::request::{MaskLimits, MaskRequest, MaskWriter};

/// The maximum number of replaced requests that an entry stores. A child may have inherited one of them.
const EARLIER_REQUESTS: usize = 8;

/// The result of comparing the affinity mask of a thread, as a scan read it, with the masks that pjw predicted. It
/// shows whether the program of the thread has requested another mask. pjw predicts a mask from the last mask request:
/// the requested PUs (logical CPUs) that are online and in the thread's cpuset. If it is unknown which of several
/// requests was the last one, pjw makes a prediction for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskComparison {
    /// The mask is one of the predicted masks: no program has requested another mask.
    Predicted,
    /// The mask is none of the predicted masks: the program of the thread has requested another mask.
    ChangedByProgram,
}

/// What pjw knows about the affinity mask of one thread: its original mask (the mask before pjw changed it), and the
/// last request for a mask ([`MaskRequest`]). pjw restores the original mask when the job of the thread ends or is
/// released. After a crash of the daemon, it may be unknown which of several requests came last. The entry then keeps
/// all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskEntry {
    /// The requests that may be the last request for the thread, newest last. Never empty, and nearly always
    /// one.
    candidates: SmallVec<[MaskRequest; 1]>,
    /// The requests that a later request replaced, oldest first. Each has the time of the first scan that
    /// read the mask after the later request, or `None` if no scan has done so yet.
    earlier: Vec<(MaskRequest, Option<Nanos>)>,
    /// The time from which the journal has contained the original mask. `None` if the journal does not
    /// contain it.
    journaled_since: Option<Nanos>,
    /// Whether the journal has an earlier request for the thread but not the last one: the program has
    /// requested another mask since.
    is_unrecorded: bool,
    /// The time of the last scan that read the mask.
    read_at: Nanos,
    /// The time of the reading before the last one that was compared with the prediction: limits from this time on were
    /// taken into account.
    compared_from: Nanos,
    /// The effective mask right after a write, if it was not predicted, because a cpuset that pjw does not read
    /// limits the mask.
    narrowed: Option<CpuSet>,
    /// The set of online PUs in the cpuset when the kernel refused the original mask: the original mask
    /// contains none of them. `None` if the kernel did not refuse it, or if the mask, the cpuset or the
    /// online PUs have changed since.
    refused_within: Option<CpuSet>,
    /// Whether it is certain that the program requested the mask of the last reading. On kernels before Linux
    /// 6.2, the kernel may have set it: see `old_kernels`.
    is_writer_certain: bool,
    /// The binding of the program that pjw lifted. `None` if pjw lifted none, or if the program has requested another
    /// mask since. Not in the journal.
    lifted: Option<Box<LiftedBinding>>,
}

impl MaskEntry {
    /// Makes an entry for a thread. `candidates` has the requests that may be the last one for the thread, and must
    /// not be empty. All facts without a parameter are unknown.
    fn new(candidates: SmallVec<[MaskRequest; 1]>, journaled_since: Option<Nanos>, read_at: Nanos) -> Self {
        Self {
            candidates,
            earlier: Vec::new(),
            journaled_since,
            is_unrecorded: false,
            read_at,
            compared_from: Nanos(0),
            narrowed: None,
            refused_within: None,
            is_writer_certain: false,
            lifted: None,
        }
    }

    /// Makes the mask entry ([`MaskEntry`]) of a thread of which only the effective affinity mask (the mask that the
    /// kernel applies) is known. `seen_mask` is this mask, as a scan read it at the time `read_at`, in ns since boot.
    /// The entry assumes that the program of the thread requested `seen_mask`. If `seen_mask` contains every PU
    /// (logical CPU) that `limits` allows, the entry assumes a request for all PUs of the machine.
    #[must_use]
    pub fn from_first_reading(seen_mask: &CpuSet, limits: &MaskLimits, read_at: Nanos) -> Self {
        Self::new(SmallVec::from_iter([limits.assumed_request(seen_mask, Nanos(0))]), None, read_at)
    }

    /// Makes the mask entry ([`MaskEntry`]) of a thread that was created at the time `birth` and inherited the affinity
    /// mask of its creator. `requests` has the mask requests for the creator that may have been in force at this time.
    /// Returns `None` if `requests` is empty.
    ///
    /// [`MaskEntry::journaled_since`] of the result is the time of the earliest request in `requests` that pjw must
    /// undo later ([`MaskRequest::needs_restore`]). The time is `None` if there is no such request.
    #[must_use]
    pub fn from_inherited(requests: impl IntoIterator<Item = MaskRequest>, birth: BirthTime) -> Option<Self> {
        let mut candidates: SmallVec<[MaskRequest; 1]> = SmallVec::new();
        for request in requests {
            if !candidates.iter().any(|known| is_same(known, &request)) {
                candidates.push(request);
            }
        }
        let to_undo = candidates.iter().filter(|request| request.needs_restore());
        let journaled_since = to_undo.map(|request| request.requested_at).min();
        (!candidates.is_empty()).then(|| Self::new(candidates, journaled_since, birth.earliest))
    }

    /// Makes the mask entry ([`MaskEntry`]) of a thread from `request`, a request for an affinity mask that was read
    /// from the journal (the file from which a restarted daemon restores its state). The earlier daemon wrote the
    /// request to the journal before it called sched_setaffinity(2), and may have ended between these two steps. So it
    /// is unknown whether the kernel got the request.
    #[must_use]
    pub fn from_record(request: MaskRequest) -> Self {
        let since = request.requested_at;
        Self::new(SmallVec::from_iter([request]), Some(since), Nanos(0))
    }

    /// Returns the entry with the time since which the journal contains the original mask (the mask before pjw changed
    /// it) set to `since`, in ns since boot. `since` must be earlier than the last mask request.
    pub(crate) fn with_journaled_since(self, since: Nanos) -> Self {
        Self { journaled_since: Some(since), ..self }
    }

    /// Adds another mask request for the same thread from the journal (the file with which a restarted daemon restores
    /// its state). It is unknown which of the requests in the journal is the last one for the thread.
    ///
    /// If `request` and the request added before it have different original masks, the program itself changed the mask
    /// between them. The journal has no record of this change. So this function also adds a request of the program for
    /// the original mask in `request`.
    pub fn add_recorded_request(&mut self, request: MaskRequest) {
        let newest = self.newest();
        if request.original_mask != newest.original_mask {
            let (mask, requested_at) = (request.original_mask.clone(), newest.requested_at);
            let writer = MaskWriter::Program;
            self.add_newest(MaskRequest { original_mask: mask.clone(), mask, writer, requested_at });
        }
        self.add_newest(request);
        let excess = self.candidates.len().saturating_sub(EARLIER_REQUESTS);
        self.candidates.drain(..excess);
    }

    /// Returns the newest candidate. The candidates are requests of which one gave the thread its present mask.
    fn newest(&self) -> &MaskRequest {
        &self.candidates[self.candidates.len() - 1]
    }

    /// Returns the original mask of the thread: the mask before pjw changed it. pjw restores this mask when the
    /// job of the thread ends or a command releases the job.
    #[must_use]
    pub fn original_mask(&self) -> &CpuSet {
        &self.newest().original_mask
    }

    /// Returns the affinity mask that pjw or the program of the thread requested last by sched_setaffinity(2). If the
    /// kernel reset the mask by itself after that, returns all PUs (logical CPUs) of the machine. Returns `None` if pjw
    /// does not know which of several requests came last, and these requests have different masks.
    #[must_use]
    pub fn requested_mask(&self) -> Option<&CpuSet> {
        let newest = self.newest();
        self.candidates.iter().all(|request| request.mask == newest.mask).then_some(&newest.mask)
    }

    /// Iterates over the mask requests that may be the last request for the thread, oldest first. Nearly always, there
    /// is only one. After a crash of the daemon, it may be unknown which of several requests came last. The same is
    /// true if pjw set the mask during the fork of the thread ([`Self::record_possible_reset_by_fork`]).
    pub fn last_request_candidates(&self) -> impl DoubleEndedIterator<Item = &MaskRequest> {
        self.candidates.iter()
    }

    /// Iterates over all mask requests for the thread that are known, including earlier requests that were replaced.
    pub(crate) fn known_requests(&self) -> impl Iterator<Item = &MaskRequest> {
        self.earlier.iter().map(|(request, _)| request).chain(&self.candidates)
    }

    /// Whether the program of the thread requested the present mask of the thread. False if pjw requested the mask, or
    /// if the kernel set the mask by itself. If pjw does not know which of several requests came last
    /// ([`MaskEntry::last_request_candidates`]), the result is about the newest of them.
    #[must_use]
    pub fn is_mask_from_program(&self) -> bool {
        self.newest().writer == MaskWriter::Program
    }

    /// Whether pjw need not restore the original mask (the mask before pjw changed it). True if the kernel refuses the
    /// original mask, or if the present mask certainly is the original mask or a mask that the program requested.
    pub(crate) fn needs_no_restore(&self) -> bool {
        self.refused_within.is_some() || !self.needs_restore()
    }

    /// Whether pjw may have to restore the original mask (the mask before pjw changed it) when the job of the
    /// thread ends or is released. True if pjw or the kernel may have replaced the original mask.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.candidates.iter().any(MaskRequest::needs_restore)
    }

    /// Returns the time since which the journal must contain the original mask of the thread (the mask before pjw
    /// changed it), in ns since boot. The journal is the file with which a restarted daemon restores its state and the
    /// masks of threads. `None` if the journal need not contain this mask.
    #[must_use]
    pub fn journaled_since(&self) -> Option<Nanos> {
        self.journaled_since
    }

    /// Whether the program of the thread requested the present mask while pjw controlled the mask. pjw controls the
    /// mask from the time [`MaskEntry::journaled_since`] on: from then on, the original mask is in the journal (the
    /// file with which a restarted daemon restores masks). If true, the mask may contain PUs (logical CPUs) that the
    /// job of the thread does not hold.
    #[must_use]
    pub fn is_overridden_by_program(&self) -> bool {
        self.is_mask_from_program()
            && self.journaled_since.is_some_and(|kept| kept <= self.newest().requested_at)
    }

    /// Returns the time at which a scan last read the mask, in ns since boot. If no scan has read the mask yet, the
    /// result depends on the origin of the entry:
    ///
    /// - For an inherited mask, it is the earliest possible time at which the thread was created.
    /// - For an entry from the journal (the file with which a restarted daemon restores its state), it is 0.
    #[must_use]
    pub fn last_read_at(&self) -> Nanos {
        self.read_at
    }

    /// Returns the PU (logical CPU) to which pjw restricted the thread by the newest mask request. `None` if this
    /// request has several PUs, or if the program made the request. pjw requests a single PU in each of these cases:
    ///
    /// - pjw pins the thread to a PU that pjw chose.
    /// - The program had bound the thread to one PU. pjw keeps this binding, or moves it to a PU of the job.
    /// - The job holds only one PU.
    #[must_use]
    pub fn pinned_pu(&self) -> Option<Pu> {
        if self.is_mask_from_program() { None } else { self.newest().mask.only_pu() }
    }

    /// Records that pjw is about to request `mask` for the thread at the time `now`, in ns since boot. The caller must
    /// then write the request to the journal (the file with which a restarted daemon restores its state), and after
    /// that make the request. `original_mask` is the mask that pjw restores when the job of the thread ends or is
    /// released.
    pub fn add_intended_request(&mut self, mask: CpuSet, original_mask: CpuSet, now: Nanos) {
        self.journaled_since.get_or_insert(now);
        self.is_unrecorded = false;
        self.refused_within = None;
        self.add_newest(MaskRequest { mask, original_mask, writer: MaskWriter::Warden, requested_at: now });
    }

    /// Marks the thread as journaled: the journal must now contain the original mask of the thread (the mask before
    /// pjw changed it). The journal is the file with which a restarted daemon restores its state and the masks of
    /// threads. If the thread is not journaled yet, `now` becomes the time that [`MaskEntry::journaled_since`]
    /// returns.
    ///
    /// Does not write to the journal. Returns true if the last mask request for the thread is not in the
    /// journal. The caller must then write this request and the original mask to the journal.
    pub fn mark_journaled(&mut self, now: Nanos) -> bool {
        let is_new = self.journaled_since.is_none();
        self.journaled_since.get_or_insert(now);
        core::mem::take(&mut self.is_unrecorded) || is_new
    }

    /// Marks the thread as not journaled: the journal (the file with which a restarted daemon restores its state) need
    /// no longer contain the original mask of the thread (the mask before pjw changed it). Call this function in these
    /// cases: the thread has its original mask again, or its program requested the present mask. A restarted daemon
    /// then has no mask to restore.
    ///
    /// Does not write to the journal. If the journal contains a record of this thread, the caller must append the
    /// record [`MaskReleased`](crate::terms::record::Record::MaskReleased) to the journal.
    pub fn mark_not_journaled(&mut self) {
        self.journaled_since = None;
    }

    /// Adds `request` to the candidates (the requests that may be the last one for the thread), as the newest. Of
    /// equal candidates, only the last stays. If pjw made them, it gets the time of the first: a child may have
    /// inherited that one. A candidate that is equal to `request` stays, so that `cancel_intended_request` does not
    /// remove both.
    fn add_newest(&mut self, request: MaskRequest) {
        for mut candidate in core::mem::take(&mut self.candidates) {
            if let Some(index) = self.candidates.iter().position(|earlier| is_same(earlier, &candidate)) {
                let earlier = self.candidates.remove(index);
                if candidate.writer == MaskWriter::Warden {
                    candidate.requested_at = candidate.requested_at.min(earlier.requested_at);
                }
            }
            self.candidates.push(candidate);
        }
        self.candidates.push(request);
    }

    /// Records that the kernel refused the original mask (the mask before pjw changed it), because the thread's cpuset
    /// has none of its PUs (logical CPUs). The thread keeps the mask `effective`. `limits` has the PUs that are online
    /// and in the cpuset at present.
    pub(crate) fn record_original_refused(&mut self, effective: &CpuSet, limits: &MaskLimits) {
        self.narrowed = Some(effective.clone());
        self.refused_within = Some(limits.possible_cpus[0].clone());
    }

    /// Records that the kernel has set the mask `requested_mask` that pjw requested. Before the request,
    /// [`MaskEntry::add_intended_request`] must have been called. `effective_mask` is the effective mask of the thread
    /// right after the request. `limits` has the PUs (logical CPUs) that were then online and in the thread's cpuset.
    pub fn record_request_done(
        &mut self,
        requested_mask: &CpuSet,
        effective_mask: &CpuSet,
        limits: &MaskLimits,
    ) {
        let request =
            MaskRequest { mask: requested_mask.clone(), writer: MaskWriter::Warden, ..self.newest().clone() };
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced.into_iter().filter(|known| known.mask != *requested_mask), None);
        self.narrowed =
            (!limits.may_result_in(requested_mask, effective_mask)).then(|| effective_mask.clone());
        self.refused_within = None;
    }

    /// Records that the kernel may have given a new thread the affinity mask of its parent, instead of the mask that
    /// pjw set. Must be called if pjw set the mask while fork(2) was creating the thread. As its last step, fork(2) may
    /// copy the mask of the parent once more (kernel/cgroup/cpuset.c, `cpuset_fork`). Until the next scan, pjw does not
    /// know which of the two masks is in force, and [`MaskEntry::last_request_candidates`] returns both requests.
    pub fn record_possible_reset_by_fork(&mut self) {
        let inherited: Vec<_> = self.earlier.extract_if(.., |(_, until)| until.is_none()).collect();
        self.candidates.insert_many(0, inherited.into_iter().map(|(request, _)| request));
    }

    /// Records that the kernel refused the request for `mask`: the request that [`MaskEntry::add_intended_request`]
    /// recorded last. The journal (the file with which a restarted daemon restores masks) already contains this
    /// request. The thread still has its earlier mask, because a failed call of sched_setaffinity(2) changes nothing
    /// (kernel/sched/syscalls.c, `__sched_setaffinity`, Linux 6.18).
    pub fn record_request_refused(&mut self, mask: &CpuSet) {
        drop(self.withdraw_newest(mask));
    }

    /// Removes the newest candidate if it is a request for `mask` and others remain, and returns it.
    fn withdraw_newest(&mut self, mask: &CpuSet) -> Option<MaskRequest> {
        let is_intended = self.candidates.len() > 1 && self.newest().mask == *mask;
        if is_intended { self.candidates.pop() } else { None }
    }

    /// Withdraws the request for `mask` that [`MaskEntry::add_intended_request`] recorded. Must be called if
    /// pjw did not make the request after all.
    pub fn cancel_intended_request(&mut self, mask: &CpuSet) {
        if let Some(cancelled) = self.withdraw_newest(mask) {
            // The journal lacks this request, but keeps those that were journaled before it.
            self.journaled_since.take_if(|since| *since == cancelled.requested_at);
            self.is_unrecorded = self.journaled_since.is_some() && self.is_mask_from_program();
        }
    }

    /// Moves `requests`, which a later request has replaced, to the earlier requests. `read_at` is the time of the scan
    /// that read the later request, if one has. Keeps the newest [`EARLIER_REQUESTS`].
    fn replace(&mut self, requests: impl IntoIterator<Item = MaskRequest>, read_at: Option<Nanos>) {
        self.earlier.extend(requests.into_iter().map(|request| (request, read_at)));
        let excess = self.earlier.len().saturating_sub(EARLIER_REQUESTS);
        self.earlier.drain(..excess);
    }

    /// Whether the thread has no new request if the next reading finds the same effective affinity mask as the last
    /// one. The kernel reduces a requested mask to the online PUs (logical CPUs) of the thread's cpuset, so after a
    /// change of these PUs another request may give the same effective mask. `limits_changed_at` is the time of the
    /// last such change, in ns since boot, `None` if there was none. True if the last request is known, and if
    /// [`MaskEntry::record_reading`] was called after the change.
    pub(crate) fn same_mask_means_same_request(&self, limits_changed_at: Option<Nanos>) -> bool {
        self.requested_mask().is_some()
            && limits_changed_at.is_none_or(|changed_at| changed_at < self.compared_from)
    }

    /// Records that a scan at the time `now` (in ns since boot) read the same mask as the previous scan. Must be called
    /// only if the online PUs (logical CPUs) and the PUs of the thread's cpuset did not change between these two scans.
    pub fn record_unchanged_reading(&mut self, now: Nanos) {
        for (_, until) in &mut self.earlier {
            until.get_or_insert(now);
        }
        self.read_at = now;
    }

    /// Compares `seen_mask`, the effective mask that a scan read at the time `now` (in ns since boot), with the masks
    /// that pjw expects, and stores the result. pjw does not always know which request for the thread was the most
    /// recent one, so the entry can have several candidates. The expected mask of a candidate is its requested PUs
    /// (logical CPUs), restricted to `limits` (online and in the thread's cpuset).
    ///
    /// - [`MaskComparison::Predicted`]: `seen_mask` is the expected mask of at least one candidate. The other
    ///   candidates are removed.
    /// - [`MaskComparison::ChangedByProgram`]: `seen_mask` is the expected mask of no candidate, so the program has
    ///   requested another mask. A request of the program for `seen_mask` becomes the only candidate.
    pub fn record_reading(&mut self, seen_mask: &CpuSet, limits: &MaskLimits, now: Nanos) -> MaskComparison {
        let (machine, last_read_at) = (&limits.machine_cpus, self.read_at);
        self.record_unchanged_reading(now);
        self.compared_from = last_read_at;
        let knows_reset = self.candidates.iter().any(|known| known.mask == *machine);
        if limits.kernel_may_have_reset_mask && !knows_reset && limits.may_result_in(machine, seen_mask) {
            let original = self.original_mask().clone();
            let reset = MaskRequest {
                mask: machine.clone(),
                original_mask: original,
                writer: MaskWriter::Kernel,
                requested_at: now,
            };
            // If several candidates are left, the newest decides. The program's own request stays the newest.
            self.candidates.insert(0, reset);
        }
        let possible_part = |mask: &CpuSet| mask.intersection(&limits.possible_cpus[0]);
        let is_narrowed =
            self.narrowed.as_ref().is_some_and(|mask| possible_part(mask) == possible_part(seen_mask));
        let are_other_limits =
            |within: &CpuSet| limits.may_have_changed || *within != limits.possible_cpus[0];
        self.refused_within.take_if(|within| !is_narrowed || are_other_limits(within));
        let predicts = |request: &MaskRequest| {
            limits.may_result_in(&request.mask, seen_mask)
                || (is_narrowed && request.writer != MaskWriter::Kernel)
        };
        if self.candidates.iter().any(predicts) {
            let known = core::mem::take(&mut self.candidates);
            let (kept, excluded): (SmallVec<[MaskRequest; 1]>, SmallVec<[MaskRequest; 1]>) =
                known.into_iter().partition(predicts);
            self.candidates = kept;
            if last_read_at == Nanos(0) || limits.kernel_may_have_reset_mask {
                // The earlier daemon made some of these requests, or the kernel replaced one of them. Children may have
                // inherited them.
                self.replace(excluded, Some(now));
            }
            return MaskComparison::Predicted;
        }
        let request = limits.assumed_request(seen_mask, last_read_at);
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced, Some(now));
        self.narrowed = None;
        self.lifted = None;
        self.is_unrecorded = true;
        self.is_writer_certain = false;
        MaskComparison::ChangedByProgram
    }

    /// Records that the mask that a scan read last was certainly requested by the program, and not set by the kernel.
    pub(crate) fn confirm_mask_from_program(&mut self) {
        self.is_writer_certain = true;
    }

    /// Corrects mask requests that this entry attributes to the program although the kernel set the masks. When the
    /// job is released, pjw then restores the mask of the program's last own request. `is_kernels` returns whether
    /// the kernel may have set a given mask that a scan first read at a given time (in ns since boot). `machine` has
    /// every PU (logical CPU) of the machine. Does nothing if it is certain that the program requested the present
    /// mask.
    pub(crate) fn attribute_to_kernel(
        &mut self,
        machine: &CpuSet,
        is_kernels: impl Fn(&CpuSet, Nanos) -> bool,
    ) {
        if self.is_writer_certain {
            return;
        }
        let present = self.newest().clone();
        let mut last = present.clone();
        while last.writer == MaskWriter::Program
            && let Some((before, _)) =
                self.earlier.pop_if(|(_, read_at)| read_at.is_some_and(|at| is_kernels(&last.mask, at)))
        {
            last = before;
        }
        if last != present {
            let reset = MaskRequest {
                mask: machine.clone(),
                writer: MaskWriter::Kernel,
                original_mask: last.original_mask.clone(),
                ..present
            };
            self.earlier.push((last, Some(reset.requested_at)));
            self.candidates = SmallVec::from_iter([reset]);
        }
    }

    /// Iterates over the mask requests for this thread that may have been in force at the time `birth`. If this
    /// thread forked a child at that time, the child inherited the mask of one of these requests.
    pub fn requests_for_child_born_at(&self, birth: BirthTime) -> impl Iterator<Item = &MaskRequest> {
        let copied_after = Nanos(birth.earliest.0.saturating_sub(BirthTime::MAX_FORK_TIME.0));
        let earlier = self.earlier.iter().filter(move |(_, until)| until.is_none_or(|at| at >= copied_after));
        let all = earlier.map(|(request, _)| request).chain(&self.candidates);
        all.filter(move |request| !birth.is_before(request.requested_at))
    }
}

/// Whether two requests are equal, apart from their times.
fn is_same(one: &MaskRequest, other: &MaskRequest) -> bool {
    one.mask == other.mask && one.original_mask == other.original_mask && one.writer == other.writer
}

#[cfg(test)]
mod random_steps;
#[cfg(test)]
mod tests;
