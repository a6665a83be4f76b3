//! Who belongs to which job: the members of all jobs, found by their number and by their job.
//!
//! Reading is that of the map inside. Writing goes through here, so that the way from a job to its members, and to those
//! that run, always fits: a cycle in which little happened must not look at each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use crate::job::JobId;
use crate::process::{Pid, Tid};
use crate::state::{Member, MemberThread};

/// The members of all jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roster {
    members: BTreeMap<Pid, Member>,
    by_job: BTreeMap<JobId, Listed>,
    /// Whether somebody came, went, woke or fell asleep since that was asked.
    changed: bool,
}

/// A job's members by their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Listed {
    all: BTreeSet<Pid>,
    /// Those with a thread that ran lately, and those whose threads nobody has seen yet.
    awake: BTreeSet<Pid>,
}

impl Deref for Roster {
    type Target = BTreeMap<Pid, Member>;

    fn deref(&self) -> &Self::Target {
        &self.members
    }
}

impl Roster {
    /// The members of one job.
    pub fn of<'a>(&'a self, job: &JobId) -> impl Iterator<Item = &'a Member> + use<'a> {
        let listed = self.by_job.get(job).into_iter().flat_map(|listed| &listed.all);
        listed.filter_map(|pid| self.members.get(pid))
    }

    /// Those of a job that have a thread that ran lately, or whose threads nobody has seen yet.
    pub fn awake_of<'a>(&'a self, job: &JobId) -> impl Iterator<Item = Pid> + use<'a> {
        self.by_job.get(job).into_iter().flat_map(|listed| &listed.awake).copied()
    }

    /// The same of all jobs.
    pub fn awake(&self) -> impl Iterator<Item = Pid> {
        self.by_job.values().flat_map(|listed| &listed.awake).copied()
    }

    /// The others of a job.
    pub fn asleep_of<'a>(&'a self, job: &JobId) -> impl Iterator<Item = &'a Member> + use<'a> {
        let listed = self.by_job.get(job);
        let asleep = listed.into_iter().flat_map(|listed| listed.all.difference(&listed.awake));
        asleep.filter_map(|pid| self.members.get(pid))
    }

    /// Enters a member; returns who had its number before.
    pub fn insert(&mut self, member: Member) -> Option<Member> {
        let pid = member.id.pid;
        let before = self.remove(pid);
        self.changed = true;
        let listed = self.by_job.entry(member.job.clone()).or_default();
        listed.all.insert(pid);
        if is_awake(&member.threads) {
            listed.awake.insert(pid);
        }
        self.members.insert(pid, member);
        before
    }

    /// Strikes a member off.
    pub fn remove(&mut self, pid: Pid) -> Option<Member> {
        let member = self.members.remove(&pid)?;
        self.changed = true;
        if let Some(listed) = self.by_job.get_mut(&member.job) {
            listed.all.remove(&pid);
            listed.awake.remove(&pid);
            if listed.all.is_empty() {
                self.by_job.remove(&member.job);
            }
        }
        Some(member)
    }

    /// Strikes all members of a job off.
    pub fn remove_all_of(&mut self, job: &JobId) -> Vec<Member> {
        self.changed = true;
        let listed = self.by_job.remove(job).unwrap_or_default();
        listed.all.iter().filter_map(|pid| self.members.remove(pid)).collect()
    }

    /// Takes a member's threads out, to be put back as they are now.
    pub(crate) fn take_threads(&mut self, pid: Pid) -> Option<BTreeMap<Tid, MemberThread>> {
        self.members.get_mut(&pid).map(|member| std::mem::take(&mut member.threads))
    }

    /// What is now known of a member's threads.
    pub fn put_threads(&mut self, pid: Pid, threads: BTreeMap<Tid, MemberThread>) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let awake = is_awake(&threads);
        member.threads = threads;
        if let Some(listed) = self.by_job.get_mut(&member.job) {
            self.changed |= if awake { listed.awake.insert(pid) } else { listed.awake.remove(&pid) };
        }
    }

    /// Notes that a member lives elsewhere than before.
    pub(crate) fn note_move(&mut self) {
        self.changed = true;
    }

    /// Whether somebody came, went, moved, woke or fell asleep since this was asked last.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// One thread of a member, to note another mask.
    pub(crate) fn thread_mut(&mut self, pid: Pid, tid: Tid) -> Option<&mut MemberThread> {
        self.members.get_mut(&pid)?.threads.get_mut(&tid)
    }
}

fn is_awake(threads: &BTreeMap<Tid, MemberThread>) -> bool {
    threads.is_empty() || threads.values().any(|thread| thread.demand.hot || thread.demand.permille > 0)
}
