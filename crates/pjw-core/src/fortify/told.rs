//! What people are told who asked for walls, where there can be none.

use super::why_unmovable;
use crate::job::JobId;
use crate::jobs::abstain;
use crate::reconcile::Draft;
use crate::wall::Enforcement;

pub(super) fn tell_unwalled(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    if draft.policy.enforcement != Enforcement::Cpuset {
        return;
    }
    let what = format!("{id} is kept on its cores by masks, which its threads can undo: {why}");
    let remedy =
        "the warden repairs masks within one interval; pjwctl doctor says what cpusets need".to_owned();
    abstain(draft, id, "no-wall", what, remedy);
}

/// A job some of whose processes can't be moved behind its wall has none.
pub(super) fn tell_left_outside(draft: &mut Draft<'_>, id: &JobId) {
    let (state, policy) = (&*draft.state, draft.policy);
    if policy.enforcement != Enforcement::Cpuset {
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
