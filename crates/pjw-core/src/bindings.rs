//! What threads chose for themselves, on a kernel that forgets it when a PU goes off or comes back.
//!
//! Before Linux 6.2 the kernel writes every mask behind a cpuset anew then, to all that is left of the cpuset
//! (kernel/cgroup/cpuset.c, `hotplug_update_tasks`). It does so in a work queue: some time after the PU went, and for the
//! list of PUs that schedule, which is ahead of the list of those online. A look may thus find masks that were written
//! for PUs of which it doesn't know yet that they are off. What a thread had before is kept until that is clear.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cpuset::CpuSet;
use crate::process::ThreadId;
use crate::reconcile::Draft;
use crate::snapshot::Nanos;
use crate::state::WardenState;
use crate::wall::Built;

/// How long before or after a change of the online PUs was seen the kernel may be writing masks.
pub const MASKS_WRITTEN_WITHIN: Duration = Duration::from_secs(3);

/// The masks of a thread behind a wall of which some may be of the kernel's writing.
#[derive(Debug, Clone)]
struct Masks {
    /// What the thread had chosen before all of them; `None` if that was nothing.
    chosen: Option<CpuSet>,
    /// What it had since, with the cpuset around it, latest last.
    later: Vec<(CpuSet, CpuSet)>,
    /// When the first of them was seen, since boot.
    since: Nanos,
}

impl Masks {
    fn are_up_to(&self, mask: &CpuSet) -> bool {
        self.later.last().is_some_and(|(latest, _)| latest == mask)
    }

    /// What the thread had chosen last: the latest mask that lacks a PU of the cpuset which was on all the time.
    fn into_chosen(self, on: &CpuSet) -> Option<CpuSet> {
        let own = |(mask, cpuset): &(CpuSet, CpuSet)| !cpuset.intersection(on).is_subset(mask);
        self.later.into_iter().rfind(own).map_or(self.chosen, |(mask, _)| Some(mask))
    }
}

/// The threads of which it is not clear whether the kernel wrote their masks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bindings(BTreeMap<ThreadId, Masks>);

/// Whether it is not clear yet who wrote a thread's mask: it is no wish until then.
pub(crate) fn is_unclear(state: &WardenState, thread: ThreadId, now: Nanos) -> bool {
    is_writing(state, now) && state.bindings.0.contains_key(&thread)
}

/// Whether the kernel may be writing masks now because PUs went off or came back.
fn is_writing(state: &WardenState, now: Nanos) -> bool {
    state.hotplug.as_ref().is_some_and(|hotplug| is_recent(hotplug.at, now))
}

fn is_recent(at: Nanos, now: Nanos) -> bool {
    Duration::from_nanos(now.0.saturating_sub(at.0)) < MASKS_WRITTEN_WITHIN
}

/// Forgets what turned out to be no work of the kernel's.
pub(crate) fn forget_old(draft: &mut Draft<'_>) {
    let now = draft.now.since_boot;
    draft.state.bindings.0.retain(|_, masks| is_recent(masks.since, now));
}

/// Takes in that a thread's mask was `was` and `is` another now, or that PUs went off or came back under the same one.
pub(crate) fn note(draft: &mut Draft<'_>, thread: ThreadId, was: &CpuSet, is: CpuSet) {
    if draft.policy.ground.masks_last || draft.state.touched.contains_key(&thread) {
        return;
    }
    let earlier = draft.state.bindings.0.remove(&thread).filter(|masks| masks.are_up_to(was));
    let state = &*draft.state;
    let Some(wall) = wall_around(state, thread) else { return };
    let now = draft.now.since_boot;
    let online = state.pool.online();
    // Only in the look that finds PUs gone or back the mask of before was read with the others on.
    let then = state.hotplug.as_ref().filter(|_| draft.replugged).map_or(&online, |hotplug| &hotplug.online);
    let mut masks = earlier.unwrap_or_else(|| {
        let chosen = (!wall.made(was, then)).then(|| was.clone());
        Masks { chosen, later: Vec::new(), since: now }
    });
    if is_writing(state, now) && wall.made(&is, &online) {
        if let Some(chosen) = masks.into_chosen(&online.intersection(then)) {
            draft.touch(thread, chosen, is);
        }
    } else if *was != is && wall.contains(&is) {
        masks.later.push((is, wall.wall.bounds.cpus.clone()));
        draft.state.bindings.0.insert(thread, masks);
    }
}

fn wall_around(state: &WardenState, thread: ThreadId) -> Option<&Built> {
    let place = state.processes.get(&thread.process.pid).and_then(|known| known.process.cgroup.as_deref());
    state.walls.around(place?)
}
