//! Who lives where: who may be moved behind a wall, and where everybody behind one belongs.

use crate::membership::Evidence;
use crate::policy::Policy;
use crate::process::{Pid, ProcessId};
use crate::reconcile::Draft;
use crate::snapshot::{Mark, Process};
use crate::state::{Member, WardenState};
use crate::wall::{Cpusets, Mason, Wall, lies_in};

/// How the names of scopes begin that hold what people started: logins, systemd-run(1), terminals and desktops.
const SCOPES_OF_PEOPLE: [&str; 5] = ["session-", "run-", "app-", "tmux-spawn-", "vte-spawn-"];

/// Parents that were read one after the other may form a ring: numbers are given again.
const MOST_GENERATIONS: usize = 64;

/// Whether members live in the wall's cgroup, as they do where the journal that knew of it was lost.
pub(super) fn is_inhabited(state: &WardenState, wall: &Wall) -> bool {
    let mut members = state.members_of(&wall.job).filter_map(|member| state.processes.get(&member.id.pid));
    members.any(|known| known.process.lives_in(&wall.path))
}

/// The members that are not in the wall and can be moved there, with the cgroups they are in.
pub(super) fn outside(draft: &Draft<'_>, wall: &Wall, members: &[&Member]) -> Vec<(ProcessId, String)> {
    let state = &*draft.state;
    let place = |member: &&Member| {
        let at = state.processes.get(&member.id.pid)?.process.cgroup.as_deref()?;
        let to_move = !lies_in(at, &wall.path) && why_unmovable(state, draft.policy, member).is_none();
        to_move.then(|| (member.id, at.to_owned()))
    };
    members.iter().filter_map(place).collect()
}

/// Why a process stays in the cgroup it is in; `None` if it may be moved. Whoever made that cgroup for it may count
/// and kill its processes by it: a scheduler, a service manager, a container runtime.
pub(super) fn why_unmovable(state: &WardenState, policy: &Policy, member: &Member) -> Option<String> {
    if let Some(why) = state.walls.immobility(member.id) {
        return Some(why.to_owned());
    }
    let known = state.processes.get(&member.id.pid)?;
    let at = known.process.cgroup.as_deref()?;
    let job = state.jobs.get(&member.job)?;
    let in_care = known.claims.claims.iter().find_map(|claim| match &claim.mark {
        Mark::Cgroup(_) if claim.job != member.job || policy.ground.cpusets != Cpusets::Legacy => {
            Some(&claim.job)
        }
        _ => None,
    });
    if let Some(other) = in_care {
        return Some(format!("process {} is in the care of {}", member.id.pid, other.source()));
    }
    // Who was adopted never asked to be moved: a user's service manager may be among them.
    let asked = job.launched && member.evidence != Evidence::Adopted;
    let own_doing = asked || is_free_to_leave(at, &policy.ground.cpusets);
    (!own_doing)
        .then(|| format!("process {} stays in {at}, which a service or a container counts by", member.id.pid))
}

/// Whether nothing depends on processes staying in this cgroup: the root, the scopes of logins and of commands that
/// people started in one, and other walls.
fn is_free_to_leave(at: &str, cpusets: &Cpusets) -> bool {
    let walls = ["/pjw", "/pjw.slice"].iter().any(|own| lies_in(at, own)) || at.starts_with("/pjw-");
    let scope = at.rsplit('/').next().and_then(|name| name.strip_suffix(".scope"));
    let of_people = |name: &str| SCOPES_OF_PEOPLE.iter().any(|start| name.starts_with(start));
    let unmanaged = *cpusets == Cpusets::Unified && !at.contains(".service") && !at.contains(".scope");
    at == "/" || walls || scope.is_some_and(of_people) || unmanaged
}

/// Who was born behind a wall belongs where its parent came from.
pub(super) fn born_inside(draft: &Draft<'_>, wall: &Wall, members: &[&Member]) -> Vec<(ProcessId, String)> {
    if wall.mason == Mason::Scheduler {
        return Vec::new();
    }
    let state = &*draft.state;
    let born = |member: &&Member| {
        let process = &state.processes.get(&member.id.pid)?.process;
        if !process.lives_in(&wall.path) || state.walls.was_moved(member.id, &wall.path) {
            return None;
        }
        Some((member.id, home(state, member.id, &wall.path)?))
    };
    members.iter().filter_map(born).collect()
}

/// Where a process that lives in a wall belongs, whether it was moved there, was born there and recorded, or was born
/// since.
pub(super) fn home(state: &WardenState, process: ProcessId, wall: &str) -> Option<String> {
    let known = |pid: Pid| state.processes.get(&pid).map(|known| &known.process);
    let parent = |child: &&Process| known(child.parent).filter(|parent| parent.lives_in(wall));
    let line = std::iter::successors(known(process.pid), parent).take(MOST_GENERATIONS);
    state.walls.home_of(line.map(|process| process.id), wall).map(str::to_owned)
}

/// Who is in a wall, and where they belong; `None` where that place is gone.
pub(super) fn returns(state: &WardenState, path: &str) -> Vec<(ProcessId, Option<String>)> {
    let processes = state.processes.values().map(|known| &known.process);
    processes
        .filter(|process| process.lives_in(path) && process.id.pid != Pid(1))
        .map(|process| {
            let home = home(state, process.id, path);
            (process.id, home.filter(|_| state.walls.immobility(process.id).is_none()))
        })
        .collect()
}
