//! What was done to a thread's mask, and which masks come from that: what the kernel, a cpuset or a birth made of the one
//! that was set.

use crate::cpuset::CpuSet;
use crate::process::StartTime;
use crate::snapshot::Nanos;

/// What was done to a thread's mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Touch {
    /// The mask to put back.
    pub before: CpuSet,
    /// When the warden first changed it, or the mask it was born with. Who started earlier has nothing from here.
    pub since: Nanos,
    /// The mask the warden set last, or was about to set.
    pub set: CpuSet,
    /// Those before that, newest last: the one before, and, after deaths of the daemon between saying and doing,
    /// more. While the last one is not `settled` the thread may still have one of them, and who was born just
    /// before the change has one for good.
    pub previous: Vec<CpuSet>,
    /// Whether the kernel was seen to have taken `set`.
    pub settled: bool,
    /// What was asked for, where a cpuset made less of it: asking again would bring no more. A kernel that remembers
    /// masks gives more of it when the cpuset grows (kernel/cgroup/cpuset.c, `update_tasks_cpumask`, since 6.2).
    pub cut_from: Option<CpuSet>,
}

impl Touch {
    /// Whether this is a mask of the warden's making, as far as its PUs are on: some may have gone off or come
    /// back since, or while the mask was read.
    #[must_use]
    pub fn made(&self, mask: &CpuSet, online: &CpuSet) -> bool {
        self.asked().any(|set| same(set, mask, online)) || (!self.settled && self.made_before(mask, online))
    }

    /// Whether somebody who started then with this mask may have it from the thread: its creator's mask, as it is or
    /// as it was just before the warden changed it.
    #[must_use]
    pub fn bequeathed(&self, mask: &CpuSet, start: StartTime, online: &CpuSet) -> bool {
        start.at_the_latest() >= self.since
            && (self.asked().any(|set| same(set, mask, online)) || self.made_before(mask, online))
    }

    /// Whether this mask is what a job's cpuset made of the one that was set: cut to it; all of it, where nothing
    /// was left; and all of it on a kernel that forgets masks when a cpuset is written.
    #[must_use]
    pub fn cut_to(&self, mask: &CpuSet, cpuset: &CpuSet, masks_last: bool) -> bool {
        let earlier = self.previous.iter().filter(|_| !self.settled);
        self.asked().chain(earlier).map(|set| set.intersection(cpuset)).any(|inside| {
            (mask == cpuset && (inside.is_empty() || !masks_last)) || (!inside.is_empty() && *mask == inside)
        })
    }

    /// The mask that was set last as the kernel took it, and as it was asked for.
    fn asked(&self) -> impl Iterator<Item = &CpuSet> {
        std::iter::once(&self.set).chain(&self.cut_from)
    }

    /// What was set, if a cpuset let only `mask` be seen of it when `refused` was not set: it comes out again when the
    /// cpuset grows.
    pub(crate) fn seen_cut(&self, mask: &CpuSet, refused: &CpuSet) -> Option<CpuSet> {
        let before = self.previous.iter().chain(self.asked());
        before.filter(|set| ![mask, refused].contains(set) && mask.is_subset(set)).last().cloned()
    }

    fn made_before(&self, mask: &CpuSet, online: &CpuSet) -> bool {
        self.previous.iter().any(|previous| same(previous, mask, online))
    }

    /// The touch that follows on another: a mask is about to be set, and what was set so far may be there still.
    #[must_use]
    pub fn after(known: Option<&Self>, before: CpuSet, set: CpuSet, now: Nanos) -> Self {
        let since = known.map_or(now, |known| known.since);
        let mut previous = Vec::new();
        if let Some(known) = known {
            let earlier = known.previous.iter().filter(|mask| !known.settled && **mask != known.set);
            previous = earlier.chain(&known.cut_from).chain([&known.set]).cloned().collect();
            previous.drain(..previous.len().saturating_sub(MOST_PREVIOUS));
        }
        Self { before, since, set, previous, settled: false, cut_from: None }
    }

    /// Whether every PU of the mask that was set is off: the kernel lets the thread run elsewhere until one comes
    /// back, and remembers.
    #[must_use]
    pub fn is_dark(&self, online: &CpuSet) -> bool {
        !self.set.intersects(online)
    }
}

/// So many deaths in a row, each between saying and doing, are remembered.
const MOST_PREVIOUS: usize = 8;

/// Whether both are the same as far as their PUs are on.
pub(crate) fn same(made: &CpuSet, mask: &CpuSet, online: &CpuSet) -> bool {
    made.intersection(online) == mask.intersection(online)
}
