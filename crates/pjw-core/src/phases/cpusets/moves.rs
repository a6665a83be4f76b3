//! The cgroups of processes: which process may be moved into a job's cpuset, and to which cgroup it returns.

use crate::basics::prelude::*;
use crate::basics::{Pid, ProcessId, is_within};
use crate::phases::draft::Draft;
use crate::state::{Member, WardenState};
use crate::terms::{CgroupOwner, ClaimBasis, CpusetHierarchy, Evidence, JobCpuset, Policy, Process};

/// The prefixes of the names of scopes that contain processes which users started: logins, systemd-run(1), terminals
/// and desktops.
const SCOPES_OF_PEOPLE: [&str; 5] = ["session-", "run-", "app-", "tmux-spawn-", "vte-spawn-"];

/// The largest number of generations that are followed. Parents that were read at different times may form a cycle,
/// because process ids are used again.
const MOST_GENERATIONS: usize = 64;

/// Whether members are in the cgroup of the cpuset, as after the loss of the journal that recorded the cpuset.
pub(super) fn is_inhabited(state: &WardenState, job_cpuset: &JobCpuset) -> bool {
    let mut members =
        state.members_of(&job_cpuset.job).filter_map(|member| state.processes.get(&member.id.pid));
    members.any(|known| known.process.is_within(&job_cpuset.path))
}

/// The members that are not in the cgroup of the cpuset and can be moved there, with their present cgroups.
pub(super) fn outside(
    draft: &Draft<'_>,
    job_cpuset: &JobCpuset,
    members: &[&Member],
) -> Vec<(ProcessId, String)> {
    let state = &*draft.state;
    let place = |member: &&Member| {
        let at = state.processes.get(&member.id.pid)?.process.cgroup.as_deref()?;
        let to_move =
            !is_within(at, &job_cpuset.path) && why_unmovable(state, draft.policy, member).is_none();
        to_move.then(|| (member.id, at.to_owned()))
    };
    members.iter().filter_map(place).collect()
}

/// Why a process can't be moved out of its cgroup. `None` if the process can be moved. The creator of the cgroup (a
/// scheduler, a service manager, a container runtime) may account and kill its processes by the cgroup.
pub(super) fn why_unmovable(state: &WardenState, policy: &Policy, member: &Member) -> Option<String> {
    if let Some(why) = state.cpusets.move_error(member.id) {
        return Some(why.to_owned());
    }
    let known = state.processes.get(&member.id.pid)?;
    let at = known.process.cgroup.as_deref()?;
    let job = state.jobs.get(&member.job)?;
    let in_care = known.claims.claims.iter().find_map(|claim| match &claim.basis {
        ClaimBasis::Cgroup(_)
            if claim.job != member.job || policy.cpuset_support.hierarchy != CpusetHierarchy::Legacy =>
        {
            Some(&claim.job)
        }
        _ => None,
    });
    if let Some(other) = in_care {
        return Some(format!("process {} is in the care of {}", member.id.pid, other.source()));
    }
    // An adopted process was not started for the job: it may be a user's service manager.
    let asked = job.launched && member.evidence != Evidence::Adopted;
    let own_doing = asked || is_free_to_leave(at, &policy.cpuset_support.hierarchy);
    (!own_doing)
        .then(|| format!("process {} stays in {at}, which a service or a container counts by", member.id.pid))
}

/// Whether processes may be moved out of this cgroup without an effect on another program. True for the root, the
/// scopes of logins and of commands that users started there, and pjw's own cpusets.
fn is_free_to_leave(at: &str, hierarchy: &CpusetHierarchy) -> bool {
    let cpusets = ["/pjw", "/pjw.slice"].iter().any(|own| is_within(at, own)) || at.starts_with("/pjw-");
    let scope = at.rsplit('/').next().and_then(|name| name.strip_suffix(".scope"));
    let of_people = |name: &str| SCOPES_OF_PEOPLE.iter().any(|start| name.starts_with(start));
    let unmanaged =
        *hierarchy == CpusetHierarchy::Unified && !at.contains(".service") && !at.contains(".scope");
    at == "/" || cpusets || scope.is_some_and(of_people) || unmanaged
}

/// The processes that were born in a job's cpuset, with the original cgroups of their parents.
pub(super) fn born_inside(
    draft: &Draft<'_>,
    job_cpuset: &JobCpuset,
    members: &[&Member],
) -> Vec<(ProcessId, String)> {
    if job_cpuset.cgroup_owner == CgroupOwner::Scheduler {
        return Vec::new();
    }
    let state = &*draft.state;
    let born = |member: &&Member| {
        let process = &state.processes.get(&member.id.pid)?.process;
        if !process.is_within(&job_cpuset.path) || state.cpusets.was_moved(member.id, &job_cpuset.path) {
            return None;
        }
        Some((member.id, original_cgroup(state, member.id, &job_cpuset.path)?))
    };
    members.iter().filter_map(born).collect()
}

/// The original cgroup of a process in a job's cpuset: of a process that was moved there, of a process that was born
/// there and recorded, or of one that was born there since.
pub(super) fn original_cgroup(state: &WardenState, process: ProcessId, job_cpuset: &str) -> Option<String> {
    let known = |pid: Pid| state.processes.get(&pid).map(|known| &known.process);
    let parent = |child: &&Process| known(child.parent).filter(|parent| parent.is_within(job_cpuset));
    let line = core::iter::successors(known(process.pid), parent).take(MOST_GENERATIONS);
    state.cpusets.original_cgroup(line.map(|process| process.id), job_cpuset).map(str::to_owned)
}

/// The processes in a job's cpuset, each with its original cgroup. `None` if that cgroup was removed.
pub(super) fn returns(state: &WardenState, path: &str) -> Vec<(ProcessId, Option<String>)> {
    let processes = state.processes.values().map(|known| &known.process);
    processes
        .filter(|process| process.is_within(path) && process.id.pid != Pid(1))
        .map(|process| {
            let home = original_cgroup(state, process.id, path);
            (process.id, home.filter(|_| state.cpusets.move_error(process.id).is_none()))
        })
        .collect()
}
