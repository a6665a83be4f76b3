//! Warnings about jobs for which a cpuset was requested and is not possible.

use crate::basics::prelude::*;
use crate::phases::cpusets::moves::why_unmovable;
use crate::phases::draft::{Draft, warn};
use crate::terms::{Enforcement, JobId};

/// The origin of the demand for a cpuset.
enum CpusetDemand {
    /// No cpuset is demanded.
    None,
    /// The administrator demands cpusets in the configuration.
    Configured,
    /// The request of the job needs a cpuset.
    Requested,
}

fn cpuset_demand(draft: &Draft<'_>, id: &JobId) -> CpusetDemand {
    let request = draft.state.jobs.get(id).and_then(|job| job.request.as_ref());
    if request.is_some_and(|request| request.isolated || request.bind_memory) {
        CpusetDemand::Requested
    } else if draft.policy.enforcement == Enforcement::Cpuset {
        CpusetDemand::Configured
    } else {
        CpusetDemand::None
    }
}

pub(super) fn report_no_cpuset(draft: &mut Draft<'_>, id: &JobId, why: &str) {
    let what = match cpuset_demand(draft, id) {
        CpusetDemand::None => return,
        CpusetDemand::Configured => {
            format!("{id} is kept on its cores by masks, which its threads can undo: {why}")
        }
        CpusetDemand::Requested => format!(
            "{id} asked for --isolated or --bind-memory, which takes a cpuset, and is kept on its cores by masks: {why}"
        ),
    };
    let remedy =
        "the warden repairs masks within one interval; pjwctl doctor says what cpusets need".to_owned();
    warn(draft, id, "no-wall", what, remedy);
}

/// Warns about a job that has no cpuset for all of its processes, because some of them can't be moved.
pub(super) fn report_left_outside(draft: &mut Draft<'_>, id: &JobId) {
    let (state, policy) = (&*draft.state, draft.policy);
    if matches!(cpuset_demand(draft, id), CpusetDemand::None) {
        return;
    }
    let why = {
        let mut outside = state.members_of(id).filter(|member| !state.is_in_job_cpuset(member));
        outside.find_map(|member| why_unmovable(state, policy, member))
    };
    if let Some(why) = why {
        report_no_cpuset(draft, id, &why);
    }
}
