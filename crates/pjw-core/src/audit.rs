//! A second opinion on every plan, in release too.
//!
//! Shares no code with what it checks: it reads the plain data and draws its own conclusions. A violation is a
//! bug of the warden, never of a job; the cycle then drops that job's actions, keeps all masks as they are,
//! and says so in `status` and the log. See docs/adr/0004-audit-in-release.md.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::cpuset::{CpuSet, Pu};
use crate::job::{GrantedBy, JobId};
use crate::plan::{Action, ActionKind, Plan};
use crate::policy::Policy;
use crate::pool::Holder;
use crate::process::{Pid, ProcessId, ThreadId};
use crate::state::WardenState;

mod walls;

/// An invariant that doesn't hold.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// The ledger and the machine differ.
    #[error("the ledger and the machine differ on PUs {cpus}")]
    LedgerIsNotTheMachine {
        /// The difference.
        cpus: CpuSet,
    },
    /// A holder that doesn't exist.
    #[error("PU {pu} is held by {job}, which does not exist: a core has leaked")]
    Leaked {
        /// The PU.
        pu: Pu,
        /// The holder.
        job: JobId,
    },
    /// A grant that the ledger doesn't confirm.
    #[error("{job} was granted {granted} and the ledger says {held}")]
    GrantIsNotInTheLedger {
        /// The job.
        job: JobId,
        /// What the grant says.
        granted: CpuSet,
        /// What the ledger says.
        held: CpuSet,
    },
    /// Two owners of one PU.
    #[error("{job} and {other} were both granted {cpus}")]
    TwoOwners {
        /// One.
        job: JobId,
        /// The other.
        other: JobId,
        /// What both have.
        cpus: CpuSet,
    },
    /// A job on housekeeping PUs.
    #[error("{job} was granted {cpus}, which are housekeeping")]
    OnHousekeeping {
        /// The job.
        job: JobId,
        /// Those PUs.
        cpus: CpuSet,
    },
    /// A grant of nothing.
    #[error("{job} was granted no PU at all")]
    EmptyGrant {
        /// The job.
        job: JobId,
    },
    /// A grant of what isn't there.
    #[error("{job} was granted {cpus}, none of which is on this machine")]
    OffTheMachine {
        /// The job.
        job: JobId,
        /// Those PUs.
        cpus: CpuSet,
    },
    /// A grant that takes half a core.
    #[error("{job} was granted {cpus} of a core and not the rest of it")]
    SplitCore {
        /// The job.
        job: JobId,
        /// The half.
        cpus: CpuSet,
    },
    /// An action on a thread that is not the job's.
    #[error("{kind} of thread {thread}: it is not a thread of {job}", thread = .thread.tid)]
    NotTheJobsThread {
        /// The job of the action.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// An action on a process that no job ever owns: a kernel thread, process 1, the warden itself.
    #[error("{kind} of thread {thread} for {job}: it belongs to the system", thread = .thread.tid)]
    OnTheSystem {
        /// The job of the action.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// A mask outside the grant.
    #[error("{kind} of thread {thread} to {to}, outside {grant} of {job}", thread = .thread.tid)]
    OutsideTheGrant {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
        /// What the job holds.
        grant: CpuSet,
    },
    /// An empty mask, or a pin to several PUs.
    #[error("{kind} of thread {thread} of {job} to \"{to}\" is no such thing", thread = .thread.tid)]
    WrongMask {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
    },
    /// A thread changed twice.
    #[error("thread {thread} of {job} is changed twice in one plan", thread = .thread.tid)]
    Twice {
        /// The job of the second action.
        job: JobId,
        /// The thread.
        thread: ThreadId,
    },
    /// A change that changes nothing.
    #[error("{kind} of thread {thread} of {job} to the mask it has", thread = .thread.tid)]
    Idle {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
    /// A mask put back that was never taken.
    #[error("thread {thread} is put back to {to}, which is not what it had before {job}", thread = .thread.tid)]
    WrongRestore {
        /// The job.
        job: JobId,
        /// The thread.
        thread: ThreadId,
        /// The mask.
        to: CpuSet,
    },
    /// A wall that holds something else than the grant.
    #[error("the cpuset of {path} would be {cpus}, and {job} was granted {granted}")]
    WallIsNotTheGrant {
        /// The job.
        job: JobId,
        /// The wall's cgroup.
        path: String,
        /// What it would be.
        cpus: CpuSet,
        /// What the job holds by the warden's choice.
        granted: CpuSet,
    },
    /// A change to a cgroup that is not the job's wall, or is no wall in the book.
    #[error("{path} is not a wall of {job}")]
    NotTheJobsWall {
        /// The job.
        job: JobId,
        /// The cgroup.
        path: String,
    },
    /// A process that is not to be moved for this job.
    #[error("process {process} is not one that {job} may move")]
    NotToBeMoved {
        /// The job.
        job: JobId,
        /// The process.
        process: ProcessId,
    },
    /// A change whose undo is not known.
    #[error("{kind} of thread {thread} of {job} without its old mask in the journal", thread = .thread.tid)]
    NoUndo {
        /// The job.
        job: JobId,
        /// The kind of action.
        kind: &'static str,
        /// The thread.
        thread: ThreadId,
    },
}

impl Violation {
    /// The job whose actions must be dropped; `None` if nothing can be trusted.
    #[must_use]
    pub fn job(&self) -> Option<&JobId> {
        match self {
            Violation::LedgerIsNotTheMachine { .. } | Violation::Leaked { .. } => None,
            Violation::GrantIsNotInTheLedger { job, .. }
            | Violation::TwoOwners { job, .. }
            | Violation::OnHousekeeping { job, .. }
            | Violation::EmptyGrant { job }
            | Violation::OffTheMachine { job, .. }
            | Violation::SplitCore { job, .. }
            | Violation::NotTheJobsThread { job, .. }
            | Violation::OnTheSystem { job, .. }
            | Violation::OutsideTheGrant { job, .. }
            | Violation::WrongMask { job, .. }
            | Violation::Twice { job, .. }
            | Violation::Idle { job, .. }
            | Violation::WrongRestore { job, .. }
            | Violation::WallIsNotTheGrant { job, .. }
            | Violation::NotTheJobsWall { job, .. }
            | Violation::NotToBeMoved { job, .. }
            | Violation::NoUndo { job, .. } => Some(job),
        }
    }
}

/// Checks the state and the plan that was made from it.
#[must_use]
pub fn audit(state: &WardenState, plan: &Plan, policy: &Policy) -> Vec<Violation> {
    let mut found = ledger(state);
    found.extend(grants(state, policy));
    found.extend(owners(state));
    found.extend(walls::walls(state, plan, policy));
    let mut seen = BTreeSet::new();
    for action in &plan.actions {
        if !seen.insert(action.thread) {
            found.push(Violation::Twice { job: action.job.clone(), thread: action.thread });
        }
        found.extend(on_the_system(state, policy, action));
        found.extend(match action.kind {
            ActionKind::Restore => restore(state, action),
            ActionKind::KeepOff => keeping_off(state, action),
            ActionKind::Confine | ActionKind::Repair | ActionKind::Pin | ActionKind::Float => {
                confining(state, action)
            }
        });
    }
    found
}

fn ledger(state: &WardenState) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut entries = CpuSet::new();
    for (pu, holder) in state.pool.holders() {
        entries.insert(pu);
        if let Holder::Job(job) = holder
            && !state.jobs.contains_key(job)
        {
            found.push(Violation::Leaked { pu, job: job.clone() });
        }
    }
    let machine = machine(state);
    let cpus = entries.difference(&machine).union(&machine.difference(&entries));
    if !cpus.is_empty() {
        found.push(Violation::LedgerIsNotTheMachine { cpus });
    }
    found
}

fn machine(state: &WardenState) -> CpuSet {
    state.topology.cores().iter().flat_map(|core| core.pus.iter()).collect()
}

/// What the ledger says of each job, and which PUs are housekeeping.
fn by_holder(state: &WardenState) -> (BTreeMap<&JobId, CpuSet>, CpuSet) {
    let mut held: BTreeMap<&JobId, CpuSet> = BTreeMap::new();
    let mut housekeeping = CpuSet::new();
    for (pu, holder) in state.pool.holders() {
        match holder {
            Holder::Job(job) => {
                held.entry(job).or_default().insert(pu);
            }
            Holder::Housekeeping => {
                housekeeping.insert(pu);
            }
            Holder::Free => {}
        }
    }
    (held, housekeeping)
}

fn grants(state: &WardenState, policy: &Policy) -> Vec<Violation> {
    let (held, housekeeping) = by_holder(state);
    let machine = machine(state);
    let mut found = Vec::new();
    for (id, job) in &state.jobs {
        let held = held.get(id).cloned().unwrap_or_default();
        let Some(grant) = &job.grant else {
            if !held.is_empty() {
                found.push(Violation::GrantIsNotInTheLedger {
                    job: id.clone(),
                    granted: CpuSet::new(),
                    held,
                });
            }
            continue;
        };
        if grant.cpus.is_empty() {
            found.push(Violation::EmptyGrant { job: id.clone() });
        }
        // PUs that were off when the daemon was restarted are not known to it, and still the job's.
        let granted = grant.cpus.intersection(&machine);
        if granted.is_empty() {
            found.push(Violation::OffTheMachine { job: id.clone(), cpus: grant.cpus.clone() });
        }
        if granted != held && !grant.shared {
            found.push(Violation::GrantIsNotInTheLedger { job: id.clone(), granted, held });
        }
        if grant.granted_by == GrantedBy::Scheduler {
            continue;
        }
        let kept = grant.cpus.intersection(&housekeeping);
        if !kept.is_empty() {
            found.push(Violation::OnHousekeeping { job: id.clone(), cpus: kept });
        }
        if !grant.by_pus && !policy.share_smt && !grant.shared {
            found.extend(split_core(state, id, &grant.cpus));
        }
    }
    found
}

/// Half a core whose other half the warden gave to another job. A scheduler may split cores, and a half that was
/// switched off when the grant was made stays nobody's.
fn split_core(state: &WardenState, job: &JobId, cpus: &CpuSet) -> Option<Violation> {
    state.topology.cores().iter().find_map(|core| {
        let mine = core.pus.intersection(cpus);
        let others = core.pus.difference(cpus);
        let by_warden = |holder: &JobId| {
            let grant = state.jobs.get(holder).and_then(|job| job.grant.as_ref());
            grant.is_some_and(|grant| grant.granted_by == GrantedBy::Warden && !grant.shared && !grant.by_pus)
        };
        let of_another =
            |pu: Pu| matches!(state.pool.holder(pu), Some(Holder::Job(holder)) if holder != job && by_warden(holder));
        let split = !mine.is_empty() && others.iter().any(of_another);
        split.then(|| Violation::SplitCore { job: job.clone(), cpus: mine })
    })
}

fn owners(state: &WardenState) -> Vec<Violation> {
    let mut owner: BTreeMap<Pu, &JobId> = BTreeMap::new();
    let mut both: BTreeMap<(&JobId, &JobId), CpuSet> = BTreeMap::new();
    for (id, job) in &state.jobs {
        for pu in job.grant.iter().filter(|grant| !grant.shared).flat_map(|grant| grant.cpus.iter()) {
            if let Some(other) = owner.insert(pu, id) {
                both.entry((id, other)).or_default().insert(pu);
            }
        }
    }
    let two = |((job, other), cpus): ((&JobId, &JobId), CpuSet)| Violation::TwoOwners {
        job: job.clone(),
        other: other.clone(),
        cpus,
    };
    both.into_iter().map(two).collect()
}

fn confining(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { kind, job, thread, from, to, .. } = action;
    let (kind, job, thread, to) = (kind.name(), job.clone(), *thread, to.clone());
    let mut found = Vec::new();
    let member = state.members.get(&thread.process.pid).filter(|member| member.id == thread.process);
    let ours = member.is_some_and(|member| {
        member.job == job && member.threads.get(&thread.tid).is_some_and(|known| known.start == thread.start)
    });
    if !ours {
        found.push(Violation::NotTheJobsThread { job: job.clone(), kind, thread });
    }
    let grant = state.jobs.get(&job).and_then(|job| job.grant.as_ref());
    let grant = grant.map(|grant| grant.cpus.clone()).unwrap_or_default();
    if !to.is_subset(&grant) {
        found.push(Violation::OutsideTheGrant { job: job.clone(), kind, thread, to: to.clone(), grant });
    }
    if to.is_empty() || (action.kind == ActionKind::Pin && to.len() != 1) {
        found.push(Violation::WrongMask { job: job.clone(), kind, thread, to: to.clone() });
    }
    // Behind a wall a mask that can't be seen may be lifted.
    if *from == to && !action.walled {
        found.push(Violation::Idle { job: job.clone(), kind, thread });
    }
    if state.touched.get(&thread).is_none_or(|touch| touch.set != to) {
        found.push(Violation::NoUndo { job, kind, thread });
    }
    found
}

fn on_the_system(state: &WardenState, policy: &Policy, action: &Action) -> Option<Violation> {
    let Action { kind, job, thread, .. } = action;
    let pid = thread.process.pid;
    let kernel = state.processes.get(&pid).is_some_and(|known| known.process.kernel);
    (kernel || pid == Pid(1) || policy.own_pid == Some(pid)).then(|| Violation::OnTheSystem {
        job: job.clone(),
        kind: kind.name(),
        thread: *thread,
    })
}

/// A stray's mask lies outside every grant, its process is nobody's member, and its old mask is known.
fn keeping_off(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { kind, job, thread, from, to, .. } = action;
    let (kind, job, thread, to) = (kind.name(), job.clone(), *thread, to.clone());
    let pid = thread.process.pid;
    let mut found = Vec::new();
    if state.members.contains_key(&pid)
        || state.leaving.get(&pid).is_none_or(|left| left.id != thread.process)
    {
        found.push(Violation::NotTheJobsThread { job: job.clone(), kind, thread });
    }
    for grant in state.jobs.values().filter_map(|job| job.grant.as_ref()) {
        if grant.cpus.intersects(&to) {
            let grant = grant.cpus.clone();
            found.push(Violation::OutsideTheGrant { job: job.clone(), kind, thread, to: to.clone(), grant });
        }
    }
    if to.is_empty() {
        found.push(Violation::WrongMask { job: job.clone(), kind, thread, to: to.clone() });
    }
    if *from == to {
        found.push(Violation::Idle { job: job.clone(), kind, thread });
    }
    if state.touched.get(&thread).is_none_or(|touch| touch.set != to) {
        found.push(Violation::NoUndo { job, kind, thread });
    }
    found
}

/// A mask goes back to what it was, and only where a job let go. It may look like the mask the thread has: while
/// PUs are off, two masks that differ in them look the same.
fn restore(state: &WardenState, action: &Action) -> Vec<Violation> {
    let Action { job, thread, to, .. } = action;
    let before = state.touched.get(thread).map(|touch| &touch.before);
    let pid = thread.process.pid;
    let left = state.leaving.get(&pid).filter(|left| left.id == thread.process && left.job == *job);
    let member = state.members.get(&pid).filter(|member| member.id == thread.process && member.job == *job);
    let unserved = |job: &crate::job::Job| job.grant.is_none() || job.let_go;
    let let_go = match member {
        Some(_) => state.jobs.get(job).is_some_and(unserved),
        None => left.is_some() && !state.members.contains_key(&pid),
    };
    if before == Some(to) && let_go && !to.is_empty() {
        return Vec::new();
    }
    vec![Violation::WrongRestore { job: job.clone(), thread: *thread, to: to.clone() }]
}

#[cfg(test)]
mod tests;
