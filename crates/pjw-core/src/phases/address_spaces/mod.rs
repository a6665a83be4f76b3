//! Phase of a cycle: updates the groups of processes that share an address space, and warns where a group is in two
//! jobs.

use alloc::sync::Arc;

use crate::basics::{Pid, prelude::*};
use crate::phases::draft::{CycleDraft, warn};
use crate::state::Member;
use crate::terms::{JobId, Warning};

/// Updates the groups of processes that share an address space, from the scan of this cycle. If the group of a process
/// changed, the affinity masks of its job are planned again.
pub(crate) fn update_address_spaces(draft: &mut CycleDraft<'_>) {
    let Some(scanned) = &draft.seen.address_spaces else { return };
    let (now, interval) = (draft.now.since_boot, draft.policy.scan_interval);
    let changed = draft.state.address_spaces.update(scanned, now, interval);
    draft.state.mark_jobs_dirty(&changed);
}

/// Adds a warning for each job of which a process shares its address space with a process of another job. Checks only
/// the jobs that this cycle plans: the warnings of the other jobs stay as they are. Also adds a warning if pjw can't
/// find out which processes share an address space.
pub(crate) fn warn_shared_address_spaces(draft: &mut CycleDraft<'_>) {
    if let Some(reason) = draft.state.address_spaces.unknown_sharing_reason() {
        let remedy = "allow pjwd to call kcmp(2): run it as root or with CAP_SYS_PTRACE, on a kernel with CONFIG_KCMP, \
                      without a seccomp filter that forbids the call";
        let warning = Warning::new("address-spaces-unread", reason.to_owned(), remedy);
        draft.out.warnings.push(Arc::new(warning));
    }
    if draft.state.address_spaces.groups().next().is_none() {
        return;
    }
    let planned = draft.jobs_to_plan();
    let state = &*draft.state;
    let group_of = |member: &Member| state.address_spaces.group_of(member.id);
    let groups: BTreeSet<u32> =
        planned.iter().flat_map(|job| state.members_of(job)).filter_map(group_of).collect();
    let first_pid_by_job = |group: u32| {
        let mut first_pids: BTreeMap<JobId, Pid> = BTreeMap::new();
        let members = state.address_spaces.pids_in_group(group).filter_map(|pid| state.members.get(&pid));
        for member in members {
            first_pids.entry(member.job.clone()).or_insert(member.id.pid);
        }
        first_pids
    };
    let mut warnings: Vec<(JobId, String)> = Vec::new();
    for group in groups {
        let jobs = first_pid_by_job(group);
        for (job, pid) in jobs.iter().filter(|(job, _)| planned.contains(*job)) {
            let Some((other_job, other_pid)) = jobs.iter().find(|(other, _)| *other != job) else { continue };
            let text = format!(
                "process {pid} of {job} shares its address space with process {other_pid} of {other_job}: the kernel \
                 charges their memory to one of the jobs, and each page fault and mmap of one job delays the other"
            );
            warnings.push((job.clone(), text));
        }
    }
    for (job, text) in warnings {
        let remedy = "release one of the jobs, and assign its processes to the other one (pjwctl release, pjwctl assign)";
        warn(draft, &job, "shared-memory-between-jobs", text, remedy);
    }
}
