//! The mask entries of tracked threads: which mask was requested, by which side, and which mask a release restores.
//!
//! The kernel keeps the mask that was requested last (`task_struct::user_cpus_ptr`, since Linux 6.2), but offers no
//! way to read it. What a program can read is the effective mask: the part of the request that the cpuset and the
//! online PUs allow, see [`effective_mask`]. So pjw keeps a copy of the request, and predicts the effective mask. If a scan
//! reads the predicted mask, no program has requested another mask. If it reads another mask, the program has.
//!
//! A request may be uncertain: after a refused write, after a restart, or for a child of a thread that is not known.
//! Then the entry keeps several candidates, and each reading removes the candidates that do not predict the mask.
//! `ARCHITECTURE.md` has the rules as a table.

use smallvec::SmallVec;

use crate::basics::{BirthTime, CpuSet, Nanos, Pu, prelude::*};

/// The number of earlier requests that an entry keeps, for children that were born while these requests were in
/// force.
const EARLIER_REQUESTS: usize = 8;

/// Returns the effective mask: the mask that the kernel shows for a thread whose mask was set to `requested`. That
/// is the part of `requested` that lies in `possible` (the online PUs of the thread's cpuset), or all of `possible`
/// if that part is empty (kernel/sched/core.c, `__set_cpus_allowed_ptr`).
#[must_use]
pub fn effective_mask(requested: &CpuSet, possible: &CpuSet) -> CpuSet {
    let left = requested.intersection(possible);
    if left.is_empty() { possible.clone() } else { left }
}

/// Who requested an affinity mask: the thread's program, pjw, or the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskWriter {
    /// The program itself, its parent before the job began, or its user.
    Program,
    /// pjw. Also for the mask of a child that inherited the mask from a thread whose mask pjw set.
    Warden,
    /// A kernel before 6.2, which replaces requests when a cpuset changes.
    Kernel,
}

/// A request to the kernel for an affinity mask (sched_setaffinity(2)): the requested mask, who requested it, when,
/// and the original mask that the thread gets back when its job is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskRequest {
    /// The mask that was passed to sched_setaffinity(2). It may name PUs that are offline or outside of the
    /// thread's cpuset.
    pub mask: CpuSet,
    /// The mask that the thread gets back when its job is released, if this request is the last one for the thread.
    pub original: CpuSet,
    /// Who made the request: the program, pjw, or the kernel.
    pub by: MaskWriter,
    /// The time of the request, in ns since boot. 0 if the request was made before pjw first read the mask.
    pub since: Nanos,
}

impl MaskRequest {
    /// Whether a release of the job has to restore the original mask if this request is the last one: pjw or the
    /// kernel requested a mask other than the original.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.by != MaskWriter::Program && self.mask != self.original
    }
}

/// The limits of a thread's affinity mask: the PUs that its cpuset and the online PUs allowed since the mask was last
/// read. The kernel shows only the part of a requested mask that is within the limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskLimits {
    /// The sets of PUs on which the thread could have run since the last reading of the mask: the online PUs of its
    /// cpuset. The present set is first; earlier sets follow if the cpuset or the online PUs changed.
    pub possible: SmallVec<[CpuSet; 1]>,
    /// Every PU of the machine.
    pub machine: CpuSet,
    /// Whether the cpuset was written, or the process moved, or PUs went offline or online since the last reading.
    pub have_changed: bool,
    /// Whether a kernel before Linux 6.2 may have replaced the mask by the whole cpuset since the last reading: see
    /// `old_kernels`.
    pub may_be_reset: bool,
}

impl MaskLimits {
    /// Whether `seen` is the effective mask of this request at some moment since the last reading.
    fn show(&self, requested: &CpuSet, seen: &CpuSet) -> bool {
        self.possible.iter().any(|possible| effective_mask(requested, possible) == *seen)
    }

    /// Whether `seen` is the whole set of possible PUs of some moment. A larger mask is only read while the cpuset or
    /// the online PUs change. It is compared with the present set only, because a request may contain an earlier
    /// cpuset by chance.
    pub(crate) fn are_all_in(&self, seen: &CpuSet) -> bool {
        self.possible[0].is_subset(seen) || self.possible.contains(seen)
    }

    /// The program's request that is assumed for the effective mask `seen`: every PU of the machine if the thread has
    /// every possible PU, else `seen`.
    fn request_of(&self, seen: &CpuSet, since: Nanos) -> MaskRequest {
        let mask = if self.are_all_in(seen) { self.machine.clone() } else { seen.clone() };
        MaskRequest { original: mask.clone(), mask, by: MaskWriter::Program, since }
    }
}

/// The result of comparing a mask that a scan read with the mask that pjw predicted. A difference means that the
/// program requested another mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskReading {
    /// The mask was predicted: no program requested another mask.
    Predicted,
    /// The mask was not predicted: the program requested it.
    Written,
}

/// What pjw knows of the affinity mask of one thread: the requests that may be the last one for the thread, and the
/// original mask that the thread gets back when its job is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskEntry {
    /// The requests that may be in force, newest last. Never empty, and nearly always one.
    candidates: SmallVec<[MaskRequest; 1]>,
    /// Requests that were replaced, oldest first, with the time of the first reading after the replacement. `None`
    /// before that reading.
    earlier: Vec<(MaskRequest, Option<Nanos>)>,
    /// The time since when pjw changes the mask, or keeps the mask in the journal. `None` if pjw does neither.
    journaled_since: Option<Nanos>,
    /// Whether the journal lacks the present request, although it keeps an earlier one: the program has requested another
    /// mask since.
    is_unrecorded: bool,
    /// The time of the last reading of the mask.
    read_at: Nanos,
    /// The time of the reading before the last one that was compared with the prediction: limits from this time on were
    /// taken into account.
    compared_from: Nanos,
    /// The effective mask right after a write, if it was not predicted, because a cpuset that pjw does not read
    /// limits the mask.
    narrowed: Option<CpuSet>,
    /// The PUs that the cpuset and the online PUs allowed when the kernel refused the original mask, because it has none of
    /// them. `None` if another mask was read since, or the limits changed.
    refused_within: Option<CpuSet>,
    /// Whether it is certain that the program requested the mask that was not predicted: see `old_kernels`.
    is_writer_certain: bool,
    /// The mask inside the grant to which the program bound the thread, if pjw lifted that binding. Not in the journal.
    unbound_from: Option<Box<CpuSet>>,
}

impl MaskEntry {
    fn of(candidates: SmallVec<[MaskRequest; 1]>, journaled_since: Option<Nanos>, read_at: Nanos) -> Self {
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
            unbound_from: None,
        }
    }

    /// Makes the entry of a thread of which only the mask `seen` is known, read at the time `read_at`. pjw assumes
    /// that the program requested this mask, or all PUs of the machine if the mask has every PU within `limits`.
    #[must_use]
    pub fn from_first_reading(seen: &CpuSet, limits: &MaskLimits, read_at: Nanos) -> Self {
        Self::of(SmallVec::from_iter([limits.request_of(seen, Nanos(0))]), None, read_at)
    }

    /// Makes the entry of a thread that inherited one of the mask requests `requests` from the thread that created
    /// it. `None` if `requests` is empty.
    #[must_use]
    pub fn from_inherited(requests: impl IntoIterator<Item = MaskRequest>, birth: BirthTime) -> Option<Self> {
        let mut candidates: SmallVec<[MaskRequest; 1]> = SmallVec::new();
        for request in requests {
            if !candidates.iter().any(|known| is_same(known, &request)) {
                candidates.push(request);
            }
        }
        let to_undo = candidates.iter().filter(|request| request.needs_restore());
        let journaled_since = to_undo.map(|request| request.since).min();
        (!candidates.is_empty()).then(|| Self::of(candidates, journaled_since, birth.earliest))
    }

    /// Makes the entry of a thread from its journal record, after a restart of the daemon. `request` is the last
    /// request that pjw was about to make.
    #[must_use]
    pub fn from_record(request: MaskRequest) -> Self {
        let since = request.since;
        Self::of(SmallVec::from_iter([request]), Some(since), Nanos(0))
    }

    /// Sets the time since when the journal keeps the original mask: earlier than the last request.
    pub(crate) fn with_journaled_since(self, since: Nanos) -> Self {
        Self { journaled_since: Some(since), ..self }
    }

    /// Adds a request from another journal record of the same thread: either request may be in force.
    pub fn add_recorded_request(&mut self, request: MaskRequest) {
        self.add(request);
        let excess = self.candidates.len().saturating_sub(EARLIER_REQUESTS);
        self.candidates.drain(..excess);
    }

    fn newest(&self) -> &MaskRequest {
        &self.candidates[self.candidates.len() - 1]
    }

    /// Returns the original mask of the thread: the affinity mask that it gets back when its job is released.
    #[must_use]
    pub fn original(&self) -> &CpuSet {
        &self.newest().original
    }

    /// Returns the mask that was requested last for the thread. `None` if several requests may have been the last
    /// one.
    #[must_use]
    pub fn requested(&self) -> Option<&CpuSet> {
        let newest = self.newest();
        self.candidates.iter().all(|request| request.mask == newest.mask).then_some(&newest.mask)
    }

    /// Iterates over the mask requests that may have been the last one for the thread, newest last. Nearly always
    /// there is only one.
    pub fn possible_requests(&self) -> impl DoubleEndedIterator<Item = &MaskRequest> {
        self.candidates.iter()
    }

    /// Iterates over all requests of which the entry knows, also the replaced ones.
    pub(crate) fn known_requests(&self) -> impl Iterator<Item = &MaskRequest> {
        self.earlier.iter().map(|(request, _)| request).chain(&self.candidates)
    }

    /// Whether the thread's own program requested the present mask of the thread, not pjw or the kernel.
    #[must_use]
    pub fn is_from_program(&self) -> bool {
        self.newest().by == MaskWriter::Program
    }

    /// Whether the thread needs no restore: the program requested the present mask, pjw requested the original mask, or
    /// the kernel can't give the thread the original mask.
    pub(crate) fn is_restored(&self) -> bool {
        self.is_from_program() || self.refused_within.is_some() || self.requested() == Some(self.original())
    }

    /// Whether a release of the job may have to restore the original mask, because pjw or the kernel changed the mask.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.candidates.iter().any(MaskRequest::needs_restore)
    }

    /// Returns the time since which the journal keeps the original mask of the thread, in ns since boot. `None` if
    /// the journal does not keep it.
    #[must_use]
    pub fn journaled_since(&self) -> Option<Nanos> {
        self.journaled_since
    }

    /// Whether the program requested another mask after pjw had set the mask, or after the journal began to keep
    /// it. The thread may then run outside its job's cores.
    #[must_use]
    pub fn is_overridden_by_program(&self) -> bool {
        self.is_from_program() && self.journaled_since.is_some_and(|kept| kept <= self.newest().since)
    }

    /// Returns the time at which a scan last read the mask, in ns since boot.
    #[must_use]
    pub fn last_read_at(&self) -> Nanos {
        self.read_at
    }

    /// Returns the PU to which pjw pinned the thread. `None` if pjw did not pin it, or if the program requested
    /// another mask later.
    #[must_use]
    pub fn pinned_pu(&self) -> Option<Pu> {
        if self.is_from_program() { None } else { self.newest().mask.single() }
    }

    /// Whether pjw lifted the binding of the thread to `mask`, the part of the grant to which its program had bound the
    /// thread. False if the program requested another mask later.
    #[must_use]
    pub fn is_unbound_from(&self, mask: &CpuSet) -> bool {
        self.unbound_from.as_deref() == Some(mask)
    }

    /// Records that pjw lifted the binding of the thread to `mask`; `None` if the binding is in force again, because pjw
    /// restored the original mask.
    pub(crate) fn note_unbound(&mut self, mask: Option<CpuSet>) {
        self.unbound_from = mask.map(Box::new);
    }

    /// Records that pjw is about to request `mask` for the thread. `original` is the mask that a release of the job
    /// restores. The caller writes the request to the journal before making it.
    pub fn begin_write(&mut self, mask: CpuSet, original: CpuSet, now: Nanos) {
        self.journaled_since.get_or_insert(now);
        self.is_unrecorded = false;
        self.refused_within = None;
        self.add(MaskRequest { mask, original, by: MaskWriter::Warden, since: now });
    }

    /// Records that the journal keeps the original mask of the thread from `now` on, although pjw does not change the
    /// mask yet. Returns whether the journal does not have the present request yet: the caller then writes it.
    pub fn start_journaling(&mut self, now: Nanos) -> bool {
        let is_new = self.journaled_since.replace(self.journaled_since.unwrap_or(now)).is_none();
        core::mem::take(&mut self.is_unrecorded) || is_new
    }

    /// Records that the journal no longer keeps the original mask, because pjw has nothing to restore. The caller
    /// removes the mask from the journal.
    pub fn stop_journaling(&mut self) {
        self.journaled_since = None;
    }

    /// Adds the newest candidate. An equal candidate is kept too, so that `cancel_write` does not remove both.
    fn add(&mut self, request: MaskRequest) {
        let known = core::mem::take(&mut self.candidates);
        let is_last = |index: usize| known.iter().skip(index + 1).all(|later| !is_same(later, &known[index]));
        let last = (0..known.len()).filter(|&index| is_last(index)).map(|index| known[index].clone());
        self.candidates = last.chain([request]).collect();
    }

    /// Records that the kernel refused the original mask, because the cpuset has none of its PUs. The thread keeps its
    /// request and its effective mask, `effective`. `limits` are the present limits.
    pub(crate) fn note_original_unreachable(&mut self, effective: &CpuSet, limits: &MaskLimits) {
        self.narrowed = Some(effective.clone());
        self.refused_within = Some(limits.possible[0].clone());
    }

    /// Records that the kernel accepted a request of pjw for the mask `requested`, and showed the mask `effective`
    /// right after it. `limits` are the PUs that the thread's cpuset and the online PUs allowed at that moment.
    pub fn end_write(&mut self, requested: &CpuSet, effective: &CpuSet, limits: &MaskLimits) {
        let request =
            MaskRequest { mask: requested.clone(), by: MaskWriter::Warden, ..self.newest().clone() };
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced.into_iter().filter(|known| known.mask != *requested), None);
        self.narrowed = (!limits.show(requested, effective)).then(|| effective.clone());
        self.refused_within = None;
    }

    /// Makes the mask requests that the thread inherited possible again. Called if pjw set the mask while the thread
    /// was still being forked: at the end of fork(2) the kernel may copy the parent's mask once more
    /// (kernel/cgroup/cpuset.c, `cpuset_fork`).
    pub fn reopen_inherited_requests(&mut self) {
        let inherited: Vec<_> = self.earlier.extract_if(.., |(_, until)| until.is_none()).collect();
        self.candidates.insert_many(0, inherited.into_iter().map(|(request, _)| request));
    }

    /// Undoes [`MaskEntry::begin_write`] for a request that pjw did not make after all: `mask` is the mask of this
    /// request.
    pub fn cancel_write(&mut self, mask: &CpuSet) {
        if self.candidates.len() > 1 && self.newest().mask == *mask {
            self.candidates.pop();
        }
        let earlier = self.earlier.iter().map(|(request, _)| request);
        if self.candidates.iter().chain(earlier).all(|request| request.by != MaskWriter::Warden) {
            self.journaled_since = None;
        }
    }

    fn replace(&mut self, requests: impl IntoIterator<Item = MaskRequest>, read_at: Option<Nanos>) {
        self.earlier.extend(requests.into_iter().map(|request| (request, read_at)));
        let excess = self.earlier.len().saturating_sub(EARLIER_REQUESTS);
        self.earlier.drain(..excess);
    }

    /// Whether a reading of the same mask as before proves that nothing was requested since: the request is known, and
    /// the limits last changed at `limits_changed_at`, before they were taken into account.
    pub(crate) fn is_confirmed_by_same_mask(&self, limits_changed_at: Option<Nanos>) -> bool {
        self.requested().is_some()
            && limits_changed_at.is_none_or(|changed_at| changed_at < self.compared_from)
    }

    /// Records that a scan read the mask at the time `now`, and found it and its limits (the PUs that the cpuset and
    /// the online PUs allow) unchanged.
    pub fn note_same_reading(&mut self, now: Nanos) {
        for (_, until) in &mut self.earlier {
            until.get_or_insert(now);
        }
        self.read_at = now;
    }

    /// Records that a scan read the mask `seen` at the time `now`. The entry keeps each request, of pjw or of the program,
    /// for which the kernel shows `seen` within `limits`. If no request is left, the program has requested another mask. Returns
    /// whether the mask was expected.
    pub fn note_reading(&mut self, seen: &CpuSet, limits: &MaskLimits, now: Nanos) -> MaskReading {
        let (machine, last_read_at) = (&limits.machine, self.read_at);
        self.note_same_reading(now);
        self.compared_from = last_read_at;
        let knows_reset = self.candidates.iter().any(|known| known.mask == *machine);
        if limits.may_be_reset && !knows_reset && limits.show(machine, seen) {
            let original = self.original().clone();
            let reset = MaskRequest { mask: machine.clone(), original, by: MaskWriter::Kernel, since: now };
            // If several candidates are left, the newest decides. The program's own request stays the newest.
            self.candidates.insert(0, reset);
        }
        let possible_part = |mask: &CpuSet| mask.intersection(&limits.possible[0]);
        let is_narrowed =
            self.narrowed.as_ref().is_some_and(|mask| possible_part(mask) == possible_part(seen));
        let are_other_limits = |within: &CpuSet| limits.have_changed || *within != limits.possible[0];
        self.refused_within.take_if(|within| !is_narrowed || are_other_limits(within));
        let predicts = |request: &MaskRequest| {
            limits.show(&request.mask, seen) || (is_narrowed && request.by != MaskWriter::Kernel)
        };
        if self.candidates.iter().any(predicts) {
            let known = core::mem::take(&mut self.candidates);
            let (kept, excluded): (SmallVec<[MaskRequest; 1]>, SmallVec<[MaskRequest; 1]>) =
                known.into_iter().partition(predicts);
            self.candidates = kept;
            if last_read_at == Nanos(0) {
                // The earlier daemon made some of these requests, and children may have inherited them.
                self.replace(excluded, Some(now));
            }
            return MaskReading::Predicted;
        }
        let request = limits.request_of(seen, last_read_at);
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced, Some(now));
        self.narrowed = None;
        self.unbound_from = None;
        self.is_unrecorded = true;
        self.is_writer_certain = false;
        MaskReading::Written
    }

    /// Records that the program certainly requested the mask of the last reading.
    pub(crate) fn confirm_writer(&mut self) {
        self.is_writer_certain = true;
    }

    /// Corrects requests that were attributed to the program. `is_kernels` finds those that the kernel may have
    /// written, by the mask and by the time of the first reading of the mask. A release then restores the request
    /// before them.
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
        while last.by == MaskWriter::Program
            && let Some((before, _)) =
                self.earlier.pop_if(|(_, read_at)| read_at.is_some_and(|at| is_kernels(&last.mask, at)))
        {
            last = before;
        }
        if last != present {
            let reset = MaskRequest {
                mask: machine.clone(),
                by: MaskWriter::Kernel,
                original: last.original.clone(),
                ..present
            };
            self.earlier.push((last, Some(reset.since)));
            self.candidates = SmallVec::from_iter([reset]);
        }
    }

    /// Iterates over the mask requests of this thread that may have been the last one at the time `birth`. A child
    /// that was forked at that time inherited the mask of one of them.
    pub fn requests_inherited_at(&self, birth: BirthTime) -> impl Iterator<Item = &MaskRequest> {
        let copied_after = Nanos(birth.earliest.0.saturating_sub(BirthTime::FORK_TIME.0));
        let earlier = self.earlier.iter().filter(move |(_, end)| end.is_none_or(|end| end >= copied_after));
        let all = earlier.map(|(request, _)| request).chain(&self.candidates);
        all.filter(move |request| !birth.is_before(request.since))
    }
}

/// Whether two requests are equal, apart from their times.
fn is_same(one: &MaskRequest, other: &MaskRequest) -> bool {
    one.mask == other.mask && one.original == other.original && one.by == other.by
}

#[cfg(test)]
mod tests;
