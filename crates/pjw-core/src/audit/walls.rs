//! The second opinion on changes to walls: a job's wall is its own, holds nothing but its grant, and takes in its
//! members only; nobody is taken from a scheduler or from the system.

use std::collections::BTreeSet;

use super::Violation;
use crate::cpuset::CpuSet;
use crate::job::{GrantedBy, JobId};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::process::{Pid, ProcessId};
use crate::state::WardenState;
use crate::wall::{Mason, Wall, WallAction, WallChange};

pub(super) fn walls(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut raised: BTreeSet<&str> = BTreeSet::new();
    for action in &plan.walls {
        let job = &action.job;
        match &action.change {
            WallChange::Raise { wall, founders } => {
                found.extend(raising(state, job, wall));
                if !raised.insert(&wall.path) {
                    found.push(not_its_place(job, &wall.path));
                }
                let founders = founders.iter().filter_map(|&process| moving(state, policy, action, process));
                found.extend(founders);
                found.extend(founders_are_members(state, job, action));
            }
            WallChange::Admit { process, to, .. } => {
                found.extend(moving(state, policy, action, *process));
                found.extend(founders_are_members(state, job, action));
                if !is_walls_place(state, job, to) {
                    found.push(not_its_place(job, to));
                }
            }
            WallChange::Return { process, from, .. } => {
                found.extend(moving(state, policy, action, *process));
                if !is_walls_place(state, job, from) {
                    found.push(not_its_place(job, from));
                }
            }
            WallChange::Open { wall } | WallChange::Raze { wall } => {
                let wanted = state.walls.at(&wall.path).is_none_or(|built| !built.unwanted);
                if wanted || wall.job != *job {
                    found.push(not_its_place(job, &wall.path));
                }
            }
        }
    }
    found
}

fn raising(state: &WardenState, job: &JobId, wall: &Wall) -> Vec<Violation> {
    let mut found = Vec::new();
    let known = state.jobs.get(job);
    let grant = known.and_then(|job| job.grant.as_ref());
    let granted = grant.filter(|grant| grant.granted_by == GrantedBy::Warden);
    let granted = granted.map(|grant| grant.cpus.clone()).unwrap_or_default();
    let cpus: &CpuSet = &wall.bounds.cpus;
    if cpus.is_empty() || !cpus.is_subset(&granted) {
        let (job, path, cpus) = (job.clone(), wall.path.clone(), cpus.clone());
        found.push(Violation::WallIsNotTheGrant { job, path, cpus, granted });
    }
    let of_scheduler = known.and_then(|job| job.cgroup.as_deref()) == Some(wall.path.as_str());
    let own = ["/pjw/", "/pjw-", "/pjw.slice/"].iter().any(|start| wall.path.starts_with(start));
    let climbs = wall.path.split('/').any(|part| part == "..");
    let right = if wall.mason == Mason::Scheduler { of_scheduler } else { own };
    if !right || climbs || wall.job != *job || !is_walls_place(state, job, &wall.path) {
        found.push(not_its_place(job, &wall.path));
    }
    found
}

/// Whether the book says that this is the job's wall: what is not in it can't be undone.
fn is_walls_place(state: &WardenState, job: &JobId, path: &str) -> bool {
    state.walls.at(path).is_some_and(|built| built.wall.job == *job)
}

fn not_its_place(job: &JobId, path: &str) -> Violation {
    Violation::NotTheJobsWall { job: job.clone(), path: path.to_owned() }
}

fn moving(
    state: &WardenState,
    policy: &Policy,
    action: &WallAction,
    process: ProcessId,
) -> Option<Violation> {
    let kernel = state.processes.get(&process.pid).is_some_and(|known| known.process.kernel);
    let systems = kernel || process.pid == Pid(1) || policy.own_pid == Some(process.pid);
    systems.then(|| Violation::NotToBeMoved { job: action.job.clone(), process })
}

fn founders_are_members(state: &WardenState, job: &JobId, action: &WallAction) -> Vec<Violation> {
    let processes = match &action.change {
        WallChange::Raise { founders, .. } => founders.clone(),
        WallChange::Admit { process, .. } => vec![*process],
        _ => Vec::new(),
    };
    let strange = |process: &ProcessId| {
        !state.members.get(&process.pid).is_some_and(|member| member.id == *process && member.job == *job)
    };
    let strangers = processes.into_iter().filter(strange);
    strangers.map(|process| Violation::NotToBeMoved { job: job.clone(), process }).collect()
}
