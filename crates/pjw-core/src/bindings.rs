//! What threads chose for themselves, on a kernel that forgets it when a PU goes off or comes back.
//!
//! Before Linux 6.2 the kernel writes every mask behind a cpuset anew then, to all that is left of the cpuset
//! (kernel/cgroup/cpuset.c, `hotplug_update_tasks`). It does so in a work queue: some time after the PU went, and for the
//! list of PUs that schedule, which is ahead of the list of those online. A look may thus find masks that were written
//! for PUs of which it doesn't know yet that they are off. What a thread had before is kept until that is clear.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cpuset::CpuSet;
use crate::process::ThreadId;
use crate::reconcile::Draft;
use crate::snapshot::{Nanos, Seen};
use crate::state::{Hotplug, WardenState};

/// How long after a change of the online PUs was seen the kernel may still be writing masks: whoever was read before the end
/// of that is read once more.
pub const MASKS_WRITTEN_WITHIN: Duration = Duration::from_secs(3);

/// The kernel writes no more masks in a row: whoever has more changes them all the time.
const MOST_LATER: usize = 8;

/// The masks of a thread behind a wall of which some may be of the kernel's writing.
#[derive(Debug, Clone)]
struct Masks {
    /// What the thread had chosen before all of them; `None` if that was nothing.
    chosen: Option<CpuSet>,
    /// What it had since, latest last.
    later: Vec<Later>,
    /// When the latest of them was seen first, since boot.
    at: Nanos,
}

#[derive(Debug, Clone)]
struct Later {
    mask: CpuSet,
    /// The cpuset around it then.
    cpuset: CpuSet,
    /// Whether somebody behind the same wall might run elsewhere then: the kernel writes the masks of all.
    alone: bool,
}

impl Masks {
    fn are_up_to(&self, mask: &CpuSet) -> bool {
        self.later.last().is_some_and(|latest| latest.mask == *mask)
    }

    fn add(&mut self, latest: Later, now: Nanos) {
        if self.later.len() == MOST_LATER {
            self.chosen = Some(self.later.remove(0).mask);
        }
        self.later.push(latest);
        self.at = now;
    }

    /// What the thread had chosen last: the latest mask that lacks a PU of the cpuset which was on all the time, or that
    /// it had alone.
    fn into_chosen(self, on: &CpuSet) -> Option<CpuSet> {
        let own = |later: &Later| later.alone || !later.cpuset.intersection(on).is_subset(&later.mask);
        self.later.into_iter().rfind(own).map_or(self.chosen, |later| Some(later.mask))
    }
}

/// The threads of which it is not clear whether the kernel wrote their masks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unclear(BTreeMap<ThreadId, Masks>);

impl Unclear {
    /// Whether it is clear of every mask who wrote it.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Those of them whose mask is new in this look, by the cgroup of their wall.
pub(crate) type Fresh = BTreeMap<String, BTreeSet<ThreadId>>;

/// Whether it is not clear yet who wrote a thread's mask: it is no wish until then.
pub(crate) fn is_unclear(state: &WardenState, thread: ThreadId, now: Nanos) -> bool {
    written(state, now).is_some() && state.unclear.0.contains_key(&thread)
}

/// The PUs that were on all the time, if the kernel may be writing masks now because others went off or came back.
pub(crate) fn steady(state: &WardenState, now: Nanos) -> Option<CpuSet> {
    written(state, now).map(|hotplug| hotplug.steady.intersection(&state.pool.online()))
}

/// What the kernel may be writing masks for then.
fn written(state: &WardenState, then: Nanos) -> Option<&Hotplug> {
    state.hotplug.as_ref().filter(|hotplug| is_soon_after(hotplug.at, then))
}

/// Whether the kernel may not be done then with what it began at `at`.
pub(crate) fn is_soon_after(at: Nanos, then: Nanos) -> bool {
    Duration::from_nanos(then.0.saturating_sub(at.0)) < MASKS_WRITTEN_WITHIN
}

/// Whether the kernel may have made this of a mask that allows everything: all of a cpuset, but for PUs that come or go.
/// `on` are those that don't.
pub(crate) fn may_be_cut(mask: &CpuSet, cpuset: &CpuSet, on: &CpuSet) -> bool {
    mask.is_subset(cpuset) && cpuset.intersection(on).is_subset(mask)
}

/// Takes in that a thread's mask was `was` when it was read at `read`, and `is` another now; or that PUs went off or came
/// back under the same one.
pub(crate) fn note(draft: &mut Draft<'_>, thread: ThreadId, (was, read): (&CpuSet, Nanos), is: CpuSet) {
    if draft.policy.ground.masks_last || draft.state.touched.contains_key(&thread) {
        return;
    }
    let earlier = draft.state.unclear.0.remove(&thread).filter(|masks| masks.are_up_to(was));
    let state = &*draft.state;
    let Some(wall) = state.wall_around(thread.process.pid) else { return };
    let online = state.pool.online();
    let hotplug = written(state, read);
    let steady = hotplug.map_or(&online, |hotplug| &hotplug.steady);
    // In the look that finds PUs gone or back the mask of before was read when they were not.
    let then = if draft.replugged { steady.clone() } else { steady.intersection(&online) };
    let mut masks = earlier.unwrap_or_else(|| {
        let chosen = (!wall.may_have_made(was, &then)).then(|| was.clone());
        Masks { chosen, later: Vec::new(), at: draft.now.since_boot }
    });
    if hotplug.is_some() && wall.made(&is, &online) {
        if let Some(chosen) = masks.into_chosen(&steady.intersection(&online)) {
            draft.touch(thread, chosen, is);
        }
        return;
    }
    if *was != is && wall.contains(&is) {
        let (path, cpuset) = (wall.wall.path.clone(), wall.wall.bounds.cpus.clone());
        masks.add(Later { mask: is, cpuset, alone: false }, draft.now.since_boot);
        draft.fresh.entry(path).or_default().insert(thread);
    }
    if !masks.later.is_empty() {
        draft.state.unclear.0.insert(thread, masks);
    }
}

/// Everybody of this look was met: who has a new mask that not all others behind its wall are within has chosen it. What
/// turned out to be no work of the kernel's is forgotten.
pub(crate) fn sort_out(draft: &mut Draft<'_>) {
    for (path, threads) in std::mem::take(&mut draft.fresh) {
        let seen = draft.seen.processes.values().filter_map(Seen::here);
        let inside = seen.filter(|process| process.lives_in(&path));
        let masks = inside.flat_map(|process| process.threads.iter().flatten()).map(|thread| &thread.allowed);
        let all = masks.fold(CpuSet::new(), |all, mask| all.union(mask));
        for thread in threads {
            let masks = draft.state.unclear.0.get_mut(&thread);
            if let Some(latest) = masks.and_then(|masks| masks.later.last_mut()) {
                latest.alone = !all.is_subset(&latest.mask);
            }
        }
    }
    // Whoever is awake was looked at since.
    if draft.full {
        let now = draft.now.since_boot;
        draft.state.unclear.0.retain(|_, masks| is_soon_after(masks.at, now));
    }
}
