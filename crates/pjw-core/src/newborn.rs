//! Children of members that were born with another mask than their job's: put right before anything else is read of them.
//!
//! A child begins as what its parent is, but for its number, its start and its mask. That is enough to decide where it may
//! run; the look that follows reads everything else and has the last word. Where a wall keeps a job, its children are
//! born inside, and nothing of this is needed.
//!
//! No file of a newborn is read: it is about to run another program, and until that is done whoever reads its `stat`
//! waits (Linux 6.18: some milliseconds on a busy PU). Its start is the time of its event, which may be some ticks late; the
//! look that follows corrects that. Whoever has ended meanwhile and was not waited for can't be told from the others.

use std::collections::BTreeMap;

use crate::confine::usable_grant;
use crate::cpuset::{CpuSet, Pu};
use crate::process::{Pid, ProcessId, Tid};
use crate::snapshot::{Moment, Nanos, Process, Scope, Seen, Snapshot, Thread};
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

/// What is known of a newborn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newborn {
    /// Who it is.
    pub id: ProcessId,
    /// Where it may run.
    pub mask: CpuSet,
}

/// What an event told of a birth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Birth {
    /// The member it descends from: its parent, or whoever is known of those before.
    pub ancestor: Pid,
    /// When it was, by the clock of the kernel's events.
    pub at: Nanos,
}

/// What is expected of a newborn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Its mask.
    pub mask: CpuSet,
    /// When it was born, by that clock.
    pub born: Nanos,
}

/// What to expect of each child that nobody has looked at yet, where nothing but a mask keeps it inside.
#[must_use]
pub fn expectations(state: &WardenState, births: &BTreeMap<Pid, Birth>) -> BTreeMap<Pid, Expected> {
    let unknown = births.iter().filter(|(child, _)| !state.processes.contains_key(child));
    let expected =
        |birth: &Birth| Some(Expected { mask: expected_mask(state, birth.ancestor)?, born: birth.at });
    unknown.filter_map(|(&child, birth)| Some((child, expected(birth)?))).collect()
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
pub fn as_their_parents(state: &WardenState, births: &BTreeMap<Pid, Birth>, glance: Glance) -> Snapshot {
    let Glance { taken, online, newborns } = glance;
    let processes: BTreeMap<Pid, Seen<Process>> = newborns
        .into_iter()
        .filter_map(|newborn| {
            let parent = state.processes.get(&births.get(&newborn.id.pid)?.ancestor)?;
            Some((newborn.id.pid, Seen::Here(as_its_parent(&parent.process, newborn))))
        })
        .collect();
    let scope = Scope::Partial(processes.keys().copied().collect());
    Snapshot { scope, taken, online, processes, cgroups: BTreeMap::new(), asked: Vec::new(), blind: None }
}

fn as_its_parent(known: &Process, Newborn { id, mask }: Newborn) -> Process {
    let first = Thread {
        tid: Tid(id.pid.0),
        start: id.start,
        comm: known.comm,
        state: 'R',
        last_cpu: mask.first().unwrap_or(Pu(0)),
        run_ns: 0,
        wait_ns: 0,
        allowed: mask.clone(),
    };
    Process { id, parent: known.id.pid, mask: Some(mask), threads: Some(vec![first]), ..known.clone() }
}
