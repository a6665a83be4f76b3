//! Children of members that were born with another mask than their job's: put right before anything else is read of them.
//!
//! A child begins as what its parent is, but for its number, its start and its mask. That is enough to decide where it may
//! run; the look that follows reads everything else and has the last word. Where a wall keeps a job, its children are
//! born inside, and nothing of this is needed.

use std::collections::BTreeMap;

use crate::confine::usable_grant;
use crate::cpuset::{CpuSet, Pu};
use crate::process::{Comm, Pid, ProcessId, Tid};
use crate::snapshot::{Moment, Process, Scope, Seen, Snapshot, Thread};
use crate::state::WardenState;

/// What a glance at newborns told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glance {
    /// When.
    pub taken: Moment,
    /// The PUs that were on at the last look.
    pub online: CpuSet,
    /// Those whose mask is not the one that was expected.
    pub newborns: Vec<Newborn>,
}

/// What is read of a newborn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newborn {
    /// Who it is.
    pub id: ProcessId,
    /// Its parent's number.
    pub parent: Pid,
    /// Its process group.
    pub group: Pid,
    /// Its session.
    pub session: Pid,
    /// Its name: its parent's, until it runs another program.
    pub comm: Comm,
    /// The kernel's letter for its state.
    pub state: char,
    /// The PU it last ran on.
    pub last_cpu: Pu,
    /// Where it may run.
    pub mask: CpuSet,
}

/// The mask that each child should have, of those that nobody has looked at yet and that only a mask keeps inside.
#[must_use]
pub fn expected_masks(state: &WardenState, births: &BTreeMap<Pid, Pid>) -> BTreeMap<Pid, CpuSet> {
    let unknown = births.iter().filter(|(child, _)| !state.processes.contains_key(child));
    unknown.filter_map(|(&child, &parent)| Some((child, expected_mask(state, parent)?))).collect()
}

fn expected_mask(state: &WardenState, parent: Pid) -> Option<CpuSet> {
    let member = state.members.get(&parent)?;
    let job = state.jobs.get(&member.job).filter(|job| !job.let_go)?;
    if state.walls.of(&job.id).is_some() || state.is_walled(member) {
        return None;
    }
    usable_grant(job, &state.pool.online())
}

/// The glance as a look at these newborns, who are taken for what their parents are.
#[must_use]
pub fn as_their_parents(state: &WardenState, births: &BTreeMap<Pid, Pid>, glance: Glance) -> Snapshot {
    let Glance { taken, online, newborns } = glance;
    let processes: BTreeMap<Pid, Seen<Process>> = newborns
        .into_iter()
        .filter_map(|newborn| {
            let parent = state.processes.get(births.get(&newborn.id.pid)?)?;
            Some((newborn.id.pid, Seen::Here(as_its_parent(&parent.process, newborn))))
        })
        .collect();
    let scope = Scope::Partial(processes.keys().copied().collect());
    Snapshot { scope, taken, online, processes, cgroups: BTreeMap::new(), asked: Vec::new(), blind: None }
}

fn as_its_parent(known: &Process, newborn: Newborn) -> Process {
    let Newborn { id, parent, group, session, comm, state, last_cpu, mask } = newborn;
    let first = Thread {
        tid: Tid(id.pid.0),
        start: id.start,
        comm,
        state,
        last_cpu,
        run_ns: 0,
        wait_ns: 0,
        allowed: mask.clone(),
    };
    let parent = if parent == Pid(1) { known.id.pid } else { parent };
    Process {
        id,
        parent,
        group,
        session,
        comm,
        mask: Some(mask),
        threads: Some(vec![first]),
        ..known.clone()
    }
}
