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

use crate::basics::{CpuSet, Nanos, Pu, StartTime, prelude::*};

/// The number of earlier requests that an entry keeps, for children that were born while these requests were in
/// force.
const EARLIER_REQUESTS: usize = 8;

/// The effective mask of a thread: the part of its requested mask that its cpuset allows and that is online. If
/// there is no such PU, the effective mask is all of `possible` (kernel/sched/core.c, `__set_cpus_allowed_ptr`;
/// kernel/cgroup/cpuset.c, `cpuset_update_tasks_cpumask`). `possible` is the online part of the cpuset.
#[must_use]
pub fn effective_mask(requested: &CpuSet, possible: &CpuSet) -> CpuSet {
    let left = requested.intersection(possible);
    if left.is_empty() { possible.clone() } else { left }
}

/// The side that requested a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The program itself, its parent before the job began, or its user.
    Program,
    /// pjw. Also for the mask of a child that inherited the mask from a thread whose mask pjw set.
    Warden,
    /// A kernel before 6.2, which replaces requests when a cpuset changes.
    Kernel,
}

/// A request for an affinity mask, as the kernel keeps it for a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The requested mask. It may name PUs that are offline or outside of the cpuset.
    pub mask: CpuSet,
    /// The mask that a release restores while this request is in force.
    pub original: CpuSet,
    /// The side that requested the mask.
    pub by: Writer,
    /// The time of the request, since boot. 0 if the request is older than the first reading.
    pub since: Nanos,
}

impl Request {
    /// Whether the present mask has to be replaced by the original mask when the job is released.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.by != Writer::Program && self.mask != self.original
    }
}

/// The PUs that a thread's cpuset and the online PUs allowed since the mask of the thread was last read. They limit
/// the effective mask of every request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Each set of PUs that the cpuset and the online PUs allowed at some moment since the last reading. The present
    /// set is first.
    pub possible: SmallVec<[CpuSet; 1]>,
    /// Whether a kernel before Linux 6.2 may have replaced the request since the last reading: see `old_kernels`.
    pub may_be_reset: bool,
}

impl Limits {
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
    fn request_of(&self, seen: &CpuSet, machine: &CpuSet, since: Nanos) -> Request {
        let mask = if self.are_all_in(seen) { machine.clone() } else { seen.clone() };
        Request { original: mask.clone(), mask, by: Writer::Program, since }
    }
}

/// The interval in which a thread was born.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BirthTime {
    /// The earliest possible time of birth.
    pub earliest: Nanos,
    /// The latest possible time of birth.
    pub latest: Nanos,
}

impl BirthTime {
    /// The birth time of a thread by its start time, which has a resolution of 10 ms. A thread that a scan first found
    /// at `first_seen` was born before that time.
    #[must_use]
    pub fn of(start: StartTime, first_seen: Option<Nanos>) -> Self {
        let earliest = start.earliest();
        let bound = first_seen.filter(|first_seen| earliest <= *first_seen);
        let latest = bound.map_or(start.latest(), |bound| bound.min(start.latest()));
        Self { earliest, latest }
    }

    /// Whether a thread was born before `moment`. A thread that a scan at `moment` found was born before the decision
    /// that followed the scan. Except a thread that can't have been born earlier.
    #[must_use]
    pub fn is_before(self, moment: Nanos) -> bool {
        self.latest < moment || (self.latest == moment && self.earliest < moment)
    }
}

/// The result of comparing a mask that was read with the predicted mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// The mask was predicted: no program requested another mask.
    Predicted,
    /// The mask was not predicted: the program requested it.
    Written,
}

/// The knowledge about the mask of one thread: the possible requests, and the mask that a release restores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskEntry {
    /// The requests that may be in force, newest last. Never empty, and nearly always one.
    candidates: SmallVec<[Request; 1]>,
    /// Requests that were replaced, oldest first, with the time of the first reading after the replacement. `None`
    /// before that reading.
    earlier: Vec<(Request, Option<Nanos>)>,
    /// The time since when pjw changes the mask, or keeps the mask in the journal. `None` if pjw does neither.
    journaled_since: Option<Nanos>,
    /// The time of the last reading of the mask.
    read_at: Nanos,
    /// The time of the reading before the last one that was compared with the prediction: limits from this time on were
    /// taken into account.
    compared_from: Nanos,
    /// The effective mask right after a write, if it was not predicted, because a cpuset that pjw does not read
    /// limits the mask.
    narrowed: Option<CpuSet>,
    /// Whether the kernel refused the original mask, because the cpuset has none of its PUs, and no other mask was read
    /// since.
    is_original_unreachable: bool,
    /// Whether it is certain that the program requested the mask that was not predicted: see `old_kernels`.
    is_writer_certain: bool,
}

impl MaskEntry {
    fn of(candidates: SmallVec<[Request; 1]>, journaled_since: Option<Nanos>, read_at: Nanos) -> Self {
        Self {
            candidates,
            earlier: Vec::new(),
            journaled_since,
            read_at,
            compared_from: Nanos(0),
            narrowed: None,
            is_original_unreachable: false,
            is_writer_certain: false,
        }
    }

    /// The entry of a thread without earlier knowledge. `seen` is the mask that was read. `machine` is every PU of
    /// the machine.
    #[must_use]
    pub fn first_reading(seen: &CpuSet, limits: &Limits, machine: &CpuSet, read_at: Nanos) -> Self {
        Self::of(SmallVec::from_iter([limits.request_of(seen, machine, Nanos(0))]), None, read_at)
    }

    /// The entry of a thread that inherited one of these requests from its creator. `None` if there are no requests.
    #[must_use]
    pub fn born_with(requests: impl IntoIterator<Item = Request>, birth: BirthTime) -> Option<Self> {
        let mut candidates: SmallVec<[Request; 1]> = SmallVec::new();
        for request in requests {
            if !candidates.iter().any(|known| is_same(known, &request)) {
                candidates.push(request);
            }
        }
        let to_undo = candidates.iter().filter(|request| request.needs_restore());
        let journaled_since = to_undo.map(|request| request.since).min();
        (!candidates.is_empty()).then(|| Self::of(candidates, journaled_since, birth.earliest))
    }

    /// The entry of a journal record: pjw was about to make the request.
    #[must_use]
    pub fn recorded(request: Request) -> Self {
        let since = request.since;
        Self::of(SmallVec::from_iter([request]), Some(since), Nanos(0))
    }

    /// Adds another journal record of the same thread.
    pub fn add_recorded(&mut self, request: Request) {
        self.add(request);
        let excess = self.candidates.len().saturating_sub(EARLIER_REQUESTS);
        self.candidates.drain(..excess);
    }

    fn newest(&self) -> &Request {
        &self.candidates[self.candidates.len() - 1]
    }

    /// The original mask: the affinity mask that the thread gets back when its job is released.
    #[must_use]
    pub fn original(&self) -> &CpuSet {
        &self.newest().original
    }

    /// The requested mask. `None` if the candidates have different masks.
    #[must_use]
    pub fn requested(&self) -> Option<&CpuSet> {
        let newest = self.newest();
        self.candidates.iter().all(|request| request.mask == newest.mask).then_some(&newest.mask)
    }

    /// The requests that may be in force, newest last.
    pub fn candidates(&self) -> impl DoubleEndedIterator<Item = &Request> {
        self.candidates.iter()
    }

    /// Whether the program requested the present mask.
    #[must_use]
    pub fn is_from_program(&self) -> bool {
        self.newest().by == Writer::Program
    }

    /// Whether the thread needs no restore: the program requested the present mask, pjw requested the original mask, or
    /// the kernel can't give the thread the original mask.
    pub(crate) fn is_restored(&self) -> bool {
        self.is_from_program() || self.is_original_unreachable || self.requested() == Some(self.original())
    }

    /// Whether a release may have to replace the present mask by the original mask.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        self.candidates.iter().any(Request::needs_restore)
    }

    /// The time at which pjw first changed the mask or first wrote it to the journal. `None` if pjw did neither.
    #[must_use]
    pub fn journaled_since(&self) -> Option<Nanos> {
        self.journaled_since
    }

    /// Whether the program requested another mask after pjw had begun to keep the present mask.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.is_from_program() && self.journaled_since.is_some_and(|kept| kept <= self.newest().since)
    }

    /// The time of the last reading of the mask.
    #[must_use]
    pub fn read_at(&self) -> Nanos {
        self.read_at
    }

    /// The PU to which pjw pinned the thread. `None` if pjw did not pin the thread.
    #[must_use]
    pub fn pin(&self) -> Option<Pu> {
        if self.is_from_program() { None } else { self.newest().mask.single() }
    }

    /// Records that pjw begins to keep the mask, or is about to request `mask`. The caller writes this to the journal
    /// before the request.
    pub fn begin_write(&mut self, mask: CpuSet, original: CpuSet, now: Nanos) {
        self.journaled_since.get_or_insert(now);
        self.is_original_unreachable = false;
        self.add(Request { mask, original, by: Writer::Warden, since: now });
    }

    /// Records that pjw keeps the mask in the journal, and does not change the mask now.
    pub fn keep(&mut self, now: Nanos) {
        self.journaled_since.get_or_insert(now);
    }

    /// Records that the mask is the program's own again. The caller removes the mask from the journal.
    pub fn stop_keeping(&mut self) {
        self.journaled_since = None;
    }

    /// Adds the newest candidate. An equal candidate is kept too, so that `cancel_write` does not remove both.
    fn add(&mut self, request: Request) {
        let known = core::mem::take(&mut self.candidates);
        let is_last = |index: usize| known.iter().skip(index + 1).all(|later| !is_same(later, &known[index]));
        let last = (0..known.len()).filter(|&index| is_last(index)).map(|index| known[index].clone());
        self.candidates = last.chain([request]).collect();
    }

    /// Records that the kernel refused the original mask, because the cpuset has none of its PUs. The thread keeps its
    /// request and its effective mask, `effective`.
    pub(crate) fn note_original_unreachable(&mut self, effective: &CpuSet) {
        self.narrowed = Some(effective.clone());
        self.is_original_unreachable = true;
    }

    /// Records that the kernel carried out a request, and that the effective mask right after the request was
    /// `effective`. `limits` are the limits at that moment.
    pub fn end_write(&mut self, requested: &CpuSet, effective: &CpuSet, limits: &Limits) {
        let request = Request { mask: requested.clone(), by: Writer::Warden, ..self.newest().clone() };
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced.into_iter().filter(|known| known.mask != *requested), None);
        self.narrowed = (!limits.show(requested, effective)).then(|| effective.clone());
        self.is_original_unreachable = false;
    }

    /// Records that the birth of the thread may not have been complete when the last request was carried out. At the
    /// end of fork(2) the kernel may copy the parent's mask once more (kernel/cgroup/cpuset.c, `cpuset_fork`). So the
    /// inherited requests become candidates again.
    pub fn reopen_at_birth(&mut self) {
        let inherited: Vec<_> = self.earlier.extract_if(.., |(_, until)| until.is_none()).collect();
        self.candidates.insert_many(0, inherited.into_iter().map(|(request, _)| request));
    }

    /// Records that the planned request for `mask` was not tried.
    pub fn cancel_write(&mut self, mask: &CpuSet) {
        if self.candidates.len() > 1 && self.newest().mask == *mask {
            self.candidates.pop();
        }
        let earlier = self.earlier.iter().map(|(request, _)| request);
        if self.candidates.iter().chain(earlier).all(|request| request.by != Writer::Warden) {
            self.journaled_since = None;
        }
    }

    fn replace(&mut self, requests: impl IntoIterator<Item = Request>, read_at: Option<Nanos>) {
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

    /// Records a reading of the same mask as before, with unchanged limits.
    pub fn note_same_reading(&mut self, now: Nanos) {
        for (_, until) in &mut self.earlier {
            until.get_or_insert(now);
        }
        self.read_at = now;
    }

    /// Compares the effective mask `seen`, which was read at the time `now`, with the candidates. The candidates
    /// that do not predict the mask are removed. If none is left, the program's request takes their place.
    /// `machine` is every PU of the machine.
    pub fn note_reading(&mut self, seen: &CpuSet, limits: &Limits, machine: &CpuSet, now: Nanos) -> Reading {
        let last_read_at = self.read_at;
        self.note_same_reading(now);
        self.compared_from = last_read_at;
        let knows_reset = self.candidates.iter().any(|known| known.mask == *machine);
        if limits.may_be_reset && !knows_reset && limits.show(machine, seen) {
            let original = self.original().clone();
            let reset = Request { mask: machine.clone(), original, by: Writer::Kernel, since: now };
            // If several candidates are left, the newest decides. The program's own request stays the newest.
            self.candidates.insert(0, reset);
        }
        let possible_part = |mask: &CpuSet| mask.intersection(&limits.possible[0]);
        let narrowed = self.narrowed.as_ref();
        let is_narrowed = narrowed.is_some_and(|narrowed| possible_part(narrowed) == possible_part(seen));
        self.is_original_unreachable &= is_narrowed;
        let predicts = |request: &Request| {
            limits.show(&request.mask, seen) || (is_narrowed && request.by != Writer::Kernel)
        };
        if self.candidates.iter().any(predicts) {
            self.candidates.retain(|request| predicts(request));
            return Reading::Predicted;
        }
        let request = limits.request_of(seen, machine, last_read_at);
        let replaced = core::mem::replace(&mut self.candidates, SmallVec::from_iter([request]));
        self.replace(replaced, Some(now));
        self.narrowed = None;
        self.is_writer_certain = false;
        Reading::Written
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
        is_kernels: impl Fn(&CpuSet, Nanos) -> bool,
        machine: &CpuSet,
    ) {
        if self.is_writer_certain {
            return;
        }
        let present = self.newest().clone();
        let mut last = present.clone();
        while last.by == Writer::Program
            && let Some((before, _)) =
                self.earlier.pop_if(|(_, read_at)| read_at.is_some_and(|at| is_kernels(&last.mask, at)))
        {
            last = before;
        }
        if last != present {
            let reset = Request {
                mask: machine.clone(),
                by: Writer::Kernel,
                original: last.original.clone(),
                ..present
            };
            self.earlier.push((last, Some(reset.since)));
            self.candidates = SmallVec::from_iter([reset]);
        }
    }

    /// The affinity requests of this thread one of which a child inherited that was forked in the interval `birth`.
    pub fn requests_inherited_at(&self, birth: BirthTime) -> impl Iterator<Item = &Request> {
        let earlier = self.earlier.iter().filter(move |(_, end)| end.is_none_or(|end| end >= birth.earliest));
        let all = earlier.map(|(request, _)| request).chain(&self.candidates);
        all.filter(move |request| !birth.is_before(request.since))
    }
}

/// Whether two requests are equal, apart from their times.
fn is_same(one: &Request, other: &Request) -> bool {
    one.mask == other.mask && one.original == other.original && one.by == other.by
}

#[cfg(test)]
mod tests;
