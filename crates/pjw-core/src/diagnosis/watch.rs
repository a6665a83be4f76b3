//! What two looks, some time apart, tell of jobs and of everybody else.

use std::collections::{BTreeMap, BTreeSet};

use super::{Bystander, JobSeen, ThreadSeen};
use crate::cpuset::{CpuSet, Pu};
use crate::job::{GrantedBy, Job, JobId};
use crate::policy::Policy;
use crate::process::{Pid, ProcessId, StartTime, Tid, Uid};
use crate::snapshot::{Claim, Mark, Process, Role, Seen, Snapshot, Thread};
use crate::state::{Member, WardenState};

/// So many processes of no job are looked at thread by thread; of the others, the first thread's mask tells.
const MOST_BYSTANDERS: usize = 4096;

/// The processes that are to be looked at thread by thread: every job's, and others as far as there are not too many.
#[must_use]
pub fn worth_a_closer_look(state: &WardenState) -> BTreeSet<Pid> {
    let members = state.members.keys().copied();
    let others = state.processes.values().map(|known| &known.process);
    let others = others.filter(|process| !process.kernel && !state.members.contains_key(&process.id.pid));
    members.chain(others.map(|process| process.id.pid).take(MOST_BYSTANDERS)).collect()
}

/// Two looks at the same node.
#[derive(Debug, Clone, Copy)]
pub struct Watch<'a> {
    /// The state after both.
    pub state: &'a WardenState,
    /// The rules by which it was made.
    pub policy: &'a Policy,
    /// The first look at threads.
    pub before: &'a Snapshot,
    /// The second.
    pub after: &'a Snapshot,
}

/// How a thread is found in both looks.
type Key = (ProcessId, Tid, StartTime);

impl Watch<'_> {
    /// How long was watched, in ms.
    #[must_use]
    pub fn span_ms(&self) -> u64 {
        self.span_ns() / 1_000_000
    }

    fn span_ns(&self) -> u64 {
        self.after.taken.since_boot.0.saturating_sub(self.before.taken.since_boot.0)
    }

    /// The jobs. `held` says what a warden that runs gave to each; a grant of its scheduler's counts anyway.
    #[must_use]
    pub fn jobs(&self, held: &BTreeMap<JobId, CpuSet>) -> Vec<JobSeen> {
        let readings = self.readings();
        let mut members: BTreeMap<&JobId, Vec<&Member>> = BTreeMap::new();
        for member in self.state.members.values() {
            members.entry(&member.job).or_default().push(member);
        }
        let job = |job: &Job| {
            let members = members.get(&job.id).map_or(&[][..], Vec::as_slice);
            let threads = members.iter().flat_map(|member| self.threads_of(member.id.pid, &readings));
            let outside = members.iter().filter(|member| self.is_outside(job, member));
            let granted = job.grant.as_ref();
            let law = granted.filter(|grant| grant.granted_by == GrantedBy::Scheduler);
            let holds = match (law, held.get(&job.id)) {
                (Some(grant), _) => Some((grant.cpus.clone(), GrantedBy::Scheduler)),
                (None, Some(cpus)) => Some((cpus.clone(), GrantedBy::Warden)),
                (None, None) => None,
            };
            JobSeen {
                id: job.id.clone(),
                owner: job.owner,
                amount: job.request.as_ref().map(|request| request.amount.clone()),
                would_get: granted.filter(|_| holds.is_none()).map(|grant| grant.cpus.clone()),
                holds,
                processes: members.len(),
                threads: threads.collect(),
                outside: outside.map(|member| member.id.pid).collect(),
                cgroup: job.cgroup.clone(),
                has_cpuset: None,
                kept_by: String::new(),
            }
        };
        self.state.jobs.values().map(job).collect()
    }

    /// Everybody else, without the kernel's threads and the doctor.
    #[must_use]
    pub fn bystanders(&self) -> Vec<Bystander> {
        let readings = self.readings();
        let others = self.state.processes.values().filter(|known| {
            let process = &known.process;
            !process.kernel
                && self.policy.own_pid != Some(process.id.pid)
                && !self.state.members.contains_key(&process.id.pid)
        });
        let bystander = |process: &Process, role: Role| {
            let threads: Vec<ThreadSeen> = self.threads_of(process.id.pid, &readings).collect();
            let threads = if threads.is_empty() { first_thread(process) } else { threads };
            let by_system = process.uid == Uid::ROOT || process.uid.0 < self.policy.first_person_uid;
            Bystander {
                pid: process.id.pid,
                uid: process.uid,
                comm: process.comm,
                staff: role != Role::Ordinary && by_system,
                threads,
            }
        };
        others.map(|known| bystander(&known.process, known.claims.role)).collect()
    }

    /// Whether a member was seen outside the directory that its scheduler made for the job.
    fn is_outside(&self, job: &Job, member: &Member) -> bool {
        let known = self.state.processes.get(&member.id.pid).filter(|_| job.cgroup.is_some());
        let is_inside = |claim: &Claim| claim.job == job.id && matches!(claim.mark, Mark::Cgroup(_));
        known.is_some_and(|known| !known.claims.claims.iter().any(is_inside))
    }

    fn readings(&self) -> BTreeMap<Key, (u64, u64)> {
        let mut readings = BTreeMap::new();
        for process in self.before.processes.values().filter_map(Seen::here) {
            for thread in process.threads.iter().flatten() {
                readings.insert((process.id, thread.tid, thread.start), (thread.run_ns, thread.wait_ns));
            }
        }
        readings
    }

    fn threads_of<'a>(
        &'a self,
        pid: Pid,
        readings: &'a BTreeMap<Key, (u64, u64)>,
    ) -> impl Iterator<Item = ThreadSeen> + 'a {
        let process = self.after.processes.get(&pid).and_then(Seen::here);
        let threads = process
            .into_iter()
            .flat_map(|process| process.threads.iter().flatten().map(move |thread| (process.id, thread)));
        threads.filter(|(_, thread)| !matches!(thread.state, 'Z' | 'X')).map(move |(process, thread)| {
            let before = readings.get(&(process, thread.tid, thread.start)).copied();
            // Who is new has run for as long as it lives; who was there and not looked at was not measured.
            let is_new = thread.start.at_the_latest() >= self.before.taken.since_boot;
            let unmeasured = (thread.run_ns, thread.wait_ns);
            self.thread_seen(pid, thread, before.unwrap_or(if is_new { (0, 0) } else { unmeasured }))
        })
    }

    fn thread_seen(&self, pid: Pid, thread: &Thread, (run_ns, wait_ns): (u64, u64)) -> ThreadSeen {
        let ran = thread.run_ns.saturating_sub(run_ns);
        let waited = thread.wait_ns.saturating_sub(wait_ns);
        let permille = |ns: u64| {
            let share = u128::from(ns) * 1000 / u128::from(self.span_ns().max(1));
            u32::try_from(share).unwrap_or(1000).min(1000)
        };
        ThreadSeen {
            pid,
            allowed: thread.allowed.clone(),
            last_cpu: thread.last_cpu,
            wanted: permille(ran.saturating_add(waited)),
            ran: permille(ran),
        }
    }
}

fn first_thread(process: &Process) -> Vec<ThreadSeen> {
    let thread = process.mask.as_ref().map(|mask| ThreadSeen {
        pid: process.id.pid,
        allowed: mask.clone(),
        last_cpu: mask.first().unwrap_or(Pu(0)),
        wanted: 0,
        ran: 0,
    });
    thread.into_iter().collect()
}

#[cfg(test)]
#[path = "watch/tests.rs"]
mod tests;
