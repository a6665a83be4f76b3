//! Warnings about jobs for which a cpuset or an isolated partition was requested and is not possible, and about cpusets
//! that limit processes of other jobs, or processes which have left the job.

use crate::basics::{CpuSet, ProcessId, cpus_text, prelude::*};
use crate::phases::cpusets::moves::{members_in_scheduler_cgroups, why_unmovable};
use crate::phases::draft::{CycleDraft, warn};
use crate::state::{Member, WardenState};
use crate::terms::{EnforcementMethod, JobCpuset, JobId};

/// The code of the warning about processes that belong to no job with cores, or have left a job, and can't leave the
/// cpuset of a job.
pub(super) const NOT_MOVED_BACK: &str = "not-moved-back";

/// Returns the first half of the warning that the job `id` has no cpuset. `None` if neither the request of the job nor
/// the configuration demands a cpuset.
fn missing_cpuset_text(draft: &CycleDraft<'_>, id: &JobId) -> Option<String> {
    let request = draft.state.jobs.get(id).and_then(|job| job.request.as_ref());
    if request.is_some_and(|request| request.isolated || request.bind_memory) {
        return Some(format!(
            "{id} asked for --isolated or --bind-memory, which takes a cpuset, and is kept on its cores by masks"
        ));
    }
    (draft.policy.enforcement == EnforcementMethod::Cpuset)
        .then(|| format!("{id} is kept on its cores by masks, which its threads can undo"))
}

/// Adds a warning for users that the job `id` has no cpuset, for the reason `why`. Does nothing if neither the
/// configuration nor the request of the job demands a cpuset.
pub(super) fn report_no_cpuset(draft: &mut CycleDraft<'_>, id: &JobId, why: &str) {
    let Some(text) = missing_cpuset_text(draft, id) else { return };
    let remedy = "pjwd repairs masks within one interval; pjwctl doctor lists what cpusets need";
    warn(draft, id, "no-wall", format!("{text}: {why}"), remedy);
}

/// Adds a warning for users if some processes of the job `id` can't be moved into the cpuset of the job. Does nothing
/// if neither the configuration nor the request of the job demands a cpuset.
pub(super) fn report_unmovable_members(draft: &mut CycleDraft<'_>, id: &JobId) {
    if missing_cpuset_text(draft, id).is_none() {
        return;
    }
    let (state, policy) = (&*draft.state, draft.policy);
    let is_outside = |member: &&Member| !state.is_in_job_cpuset(member);
    let why = state.members_of(id).filter(is_outside).find_map(|member| why_unmovable(state, policy, member));
    if let Some(why) = why {
        report_no_cpuset(draft, id, &why);
    }
}

/// Adds a warning for users if the job `id` asked for an isolated partition, and its hierarchy of cgroups has none.
pub(super) fn report_missing_partition(draft: &mut CycleDraft<'_>, id: &JobId) {
    let request = draft.state.jobs.get(id).and_then(|job| job.request.as_ref());
    let is_requested = request.is_some_and(|request| request.isolated);
    if !is_requested || draft.policy.cpuset_support.hierarchy.has_partitions() {
        return;
    }
    let text = format!(
        "{id} asked for --isolated, and gets an ordinary cpuset: the cgroups of this node have no isolated partitions"
    );
    let remedy = "leave out --isolated; it needs cgroup v2 (cpuset.cpus.partition)";
    warn(draft, id, "no-partition", text, remedy);
}

/// Adds a warning for users if processes that have left the job of `job_cpuset` are still in this cpuset, and pjw can't
/// move them back to their original cgroups. `left` has the processes in the cpuset that have left the job, each with
/// the cgroup to which pjw can move the process back. The job is a provision (a job whose cores are promised to a
/// service). It continues without these processes, so the cpuset keeps its limits. A process that pjw is still moving
/// does not count.
pub(super) fn report_processes_not_moved_back(
    draft: &mut CycleDraft<'_>,
    job_cpuset: &JobCpuset,
    left: &[(ProcessId, Option<String>)],
) {
    let state = &*draft.state;
    let is_moving = |process: &ProcessId| state.cpusets.delayed_changes.is_moving(*process);
    let staying = left.iter().filter(|(process, origin)| origin.is_none() && !is_moving(process));
    let staying: Vec<ProcessId> = staying.map(|(process, _)| *process).collect();
    let Some(&first) = staying.first() else { return };
    let pid = first.pid;
    let text = not_moved_back_text(state, job_cpuset, first, staying.len() - 1);
    let remedy =
        format!("end or restart it, or give it cores of its own: pjwctl assign NAME --cores N --pid {pid}");
    warn(draft, &job_cpuset.job, NOT_MOVED_BACK, text, remedy);
}

/// Adds a warning for users for each cpuset of another job in which processes of the job `id` must stay. The processes
/// have left the other job, and can't be moved back to their original cgroups. The job `id` holds no cores, so it has
/// no cpuset into which they could be moved. `inside` has the processes of the job in cpusets of other jobs. Each item
/// is the process, this cpuset, and the original cgroup, which is `None` if the process can't be moved back. Cpusets of
/// borrowers (jobs that borrow cores) are not reported. A process that pjw is still moving does not count.
pub(super) fn report_members_not_moved_back(
    draft: &mut CycleDraft<'_>,
    id: &JobId,
    inside: &[(ProcessId, JobCpuset, Option<String>)],
) {
    let state = &*draft.state;
    let mut staying: BTreeMap<&str, (&JobCpuset, ProcessId, usize)> = BTreeMap::new();
    for (process, job_cpuset, origin) in inside {
        let is_moving = state.cpusets.delayed_changes.is_moving(*process);
        if origin.is_none() && !is_moving && !job_cpuset.spec.idle {
            let first = (job_cpuset, *process, 0);
            staying.entry(&job_cpuset.path).and_modify(|(_, _, others)| *others += 1).or_insert(first);
        }
    }
    let staying = staying.into_values();
    let texts = staying.map(|(cpuset, first, others)| not_moved_back_text(state, cpuset, first, others));
    for text in texts.collect::<Vec<String>>() {
        let remedy = format!("end or restart it, or free cores for {id}");
        warn(draft, id, NOT_MOVED_BACK, text, remedy);
    }
}

/// Adds warnings for users about processes of the job `id` that are in the cgroup that a batch system made for another
/// job. The cpuset of this cgroup limits these processes. pjw does not move them, because the batch system tracks them
/// by this cgroup. Each warning is about one such other job, and names a process and the number of the others.
///
/// Must be called only if the job `id` holds no cores. Even if the job got cores, these processes could not use cores
/// outside of the cpuset.
pub(super) fn report_members_in_scheduler_cgroups(draft: &mut CycleDraft<'_>, id: &JobId) {
    let mut limited: BTreeMap<&JobId, (&CpuSet, ProcessId, usize)> = BTreeMap::new();
    for (process, other, cpus) in members_in_scheduler_cgroups(draft.state, id) {
        let first = (cpus, process, 0);
        limited.entry(other).and_modify(|(_, _, others)| *others += 1).or_insert(first);
    }
    let texts = limited.into_iter().map(|(other, (cpus, first, others))| {
        let (pid, cpus, source) = (first.pid, cpus_text(cpus), other.source());
        let (who, they) = match others {
            0 => (format!("process {pid} of {id} is"), "it is"),
            others => (format!("process {pid} and {others} more of {id} are"), "they are"),
        };
        let text = format!(
            "{who} limited to {cpus} of {other}: {they} in the cgroup by which {source} tracks the processes of {other}"
        );
        (text, format!("end it, or start it again outside of {other}"))
    });
    for (text, remedy) in texts.collect::<Vec<(String, String)>>() {
        warn(draft, id, NOT_MOVED_BACK, text, remedy);
    }
}

/// Returns the text for users that the process `first` and `others` more processes have left the job of `job_cpuset`,
/// and can't be moved out of this cpuset.
fn not_moved_back_text(
    state: &WardenState,
    job_cpuset: &JobCpuset,
    first: ProcessId,
    others: usize,
) -> String {
    let (pid, job) = (first.pid, &job_cpuset.job);
    let who = match others {
        0 => format!("process {pid} has left {job} and is"),
        others => format!("process {pid} and {others} more have left {job} and are"),
    };
    let why = state.cpusets.move_error(first).unwrap_or("the cgroup from which it came is unknown");
    format!("{who} still limited to its {}: {why}", cpus_text(&job_cpuset.spec.cpus))
}
