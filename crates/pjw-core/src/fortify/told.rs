//! What people are told who asked for walls, where there can be none.

use super::why_unmovable;
use crate::job::JobId;
use crate::jobs::abstain;
use crate::reconcile::Draft;
use crate::wall::Enforcement;

/// Who misses a wall.
enum Wish {
    /// Nobody.
    None,
    /// The administrator.
    Wall,
    /// Whoever started the job wanted what only a wall has.
    More,
}

fn wish(draft: &Draft<'_>, id: &JobId) -> Wish {
    let request = draft.state.jobs.get(id).and_then(|job| job.request.as_ref());
    if request.is_some_and(|request| request.isolated || request.bind_memory) {
        Wish::More
    } else if draft.policy.enforcement == Enforcement::Cpuset {
        Wish::Wall
    } else {
        Wish::None
    }
}

pub(super) fn tell_unwalled(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    let what = match wish(draft, id) {
        Wish::None => return,
        Wish::Wall => format!("{id} is kept on its cores by masks, which its threads can undo: {why}"),
        Wish::More => format!(
            "{id} asked for --isolated or --bind-memory, which takes a cpuset, and is kept on its cores by masks: {why}"
        ),
    };
    let remedy =
        "the warden repairs masks within one interval; pjwctl doctor says what cpusets need".to_owned();
    abstain(draft, id, "no-wall", what, remedy);
}

/// A job some of whose processes can't be moved behind its wall has none.
pub(super) fn tell_left_outside(draft: &mut Draft<'_>, id: &JobId) {
    let (state, policy) = (&*draft.state, draft.policy);
    if matches!(wish(draft, id), Wish::None) {
        return;
    }
    let why = {
        let mut outside = state.members_of(id).filter(|member| !state.is_walled(member));
        outside.find_map(|member| why_unmovable(state, policy, member))
    };
    if let Some(why) = why {
        tell_unwalled(draft, id, &why);
    }
}
