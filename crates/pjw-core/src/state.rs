//! What the warden knows between two cycles: the jobs, the pool, the members and what was done to their threads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use crate::asks::{Askers, Lately};
use crate::bindings::Unclear;
use crate::confine::home;
use crate::cpuset::{CpuSet, Pu};
use crate::demand::Demand;
use crate::job::{GrantedBy, Job, JobId};
use crate::membership::Evidence;
use crate::plan::Action;
use crate::pool::Pool;
use crate::process::{Comm, Pid, ProcessId, StartTime, ThreadId, Tid, Uid};
use crate::record::Record;
use crate::roster::Roster;
use crate::snapshot::{Cgroup, Claims, Nanos, Process, Seen, Watch};
use crate::stirred::Stirred;
use crate::topology::Topology;
use crate::touch::Touch;
use crate::wall::{Built, Walls, lies_in};

/// All of it. Facts about processes are kept only as far as the next decision needs them.
#[derive(Debug, Clone)]
pub struct WardenState {
    /// The machine.
    pub topology: Topology,
    /// Who holds each PU.
    pub pool: Pool,
    /// The jobs.
    pub jobs: BTreeMap<JobId, Job>,
    /// Every process of the node, as last seen.
    pub processes: BTreeMap<Pid, Known>,
    /// Which of them belong to a job.
    pub members: Roster,
    /// Processes of jobs that were let go, until their masks are seen to be put back.
    pub leaving: BTreeMap<Pid, Member>,
    /// Those of the leaving that are strays, and kept off every grant instead of being put back.
    pub aside: BTreeSet<Pid>,
    /// The jobs' directories and walls as last seen: before that, nobody knows what the scheduler granted.
    pub places: BTreeMap<String, Seen<Cgroup>>,
    /// What was built to keep jobs in.
    pub walls: Walls,
    /// What was done to threads.
    pub touched: BTreeMap<ThreadId, Touch>,
    /// The last time that PUs went off or came back.
    pub hotplug: Option<Hotplug>,
    /// Masks that the kernel may have written for that.
    pub(crate) unclear: Unclear,
    /// What the next cycle has to plan anew whatever it sees.
    pub stirred: Stirred,
    /// So many rescans plan only what stirred, and need not be full, before one looks at everything and plans everything.
    pub rescans_left: u32,
    /// Whether somebody may be there whom no event tells of any more: the next rescan looks at everything.
    pub full_look_due: bool,
    /// The processes in no job of people who have jobs here, by user; nobody where a user has none.
    pub strays: BTreeMap<Uid, BTreeSet<Pid>>,
    /// Who asked for more than its job holds, was told of, and whose mask was not looked at since.
    pub(crate) askers: Askers,
    /// How many attempts of each job were told lately.
    pub(crate) attempts: BTreeMap<JobId, Lately>,
    /// Since when every birth was heard of, since boot: who was born later to nobody's member is nobody's. `None` where
    /// births are not heard of.
    pub births_heard_since: Option<Nanos>,
    /// Who sleeps, as long as that is known.
    pub(crate) sleepers: OnceLock<Arc<Watch>>,
}

/// PUs went off or came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hotplug {
    /// When that was seen, since boot.
    pub at: Nanos,
    /// Which were on all the time before, as far as the kernel may still be writing masks for an earlier change.
    pub steady: CpuSet,
}

/// A process as last seen, without its threads and raw marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The facts; `marks`, `claims` and `threads` are `None`.
    pub process: Process,
    /// What its marks mean.
    pub claims: Claims,
    /// When the first look that saw it was taken: it was born before that look was over.
    pub met: Nanos,
    /// Whether the last look was the first to see it.
    pub fresh: bool,
}

impl Known {
    /// Whether a thread of it that started then was there before what a look decided, by when the process was met, where the
    /// start alone doesn't tell: that is known to ten milliseconds only.
    pub(crate) fn was_there(&self, start: StartTime, look: Nanos) -> bool {
        self.met <= look && start.at_the_earliest() <= look
    }
}

/// A process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Who it is.
    pub id: ProcessId,
    /// Its job.
    pub job: JobId,
    /// How that is known.
    pub evidence: Evidence,
    /// The mask that the job's first process was given by whoever started it. A thread with exactly this mask
    /// did not ask for it.
    pub inherited: Option<CpuSet>,
    /// See [`Known::met`]; `None` if it was told of by somebody who didn't know.
    pub met: Option<Nanos>,
    /// Its threads as last seen.
    pub threads: BTreeMap<Tid, MemberThread>,
}

impl Member {
    /// The record that makes it a member.
    pub(crate) fn joined(&self) -> Record {
        let Self { id, job, evidence, inherited, met, .. } = self.clone();
        Record::Joined { process: id, job, evidence, inherited, met }
    }

    /// The record that makes it one of the leaving.
    pub(crate) fn left(&self) -> Record {
        let Self { id, job, evidence, inherited, met, .. } = self.clone();
        Record::Left { process: id, job, evidence, inherited, met }
    }
}

/// A thread of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberThread {
    /// When it started.
    pub start: StartTime,
    /// Its name.
    pub comm: Comm,
    /// The kernel's letter for its state.
    pub state: char,
    /// The PU it last ran on.
    pub last_cpu: Pu,
    /// Where it may run.
    pub allowed: CpuSet,
    /// How much it wants a CPU.
    pub demand: Demand,
}

impl MemberThread {
    /// Whether it can still run. The first thread of a process that has ended stays as a zombie until the others
    /// have ended too, and nobody's mask can be set then.
    #[must_use]
    pub fn lives(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }
}

impl WardenState {
    /// A warden that knows nothing yet.
    #[must_use]
    pub fn new(topology: Topology, housekeeping: &CpuSet) -> Self {
        let pool = Pool::new(&topology, housekeeping);
        Self {
            topology,
            pool,
            jobs: BTreeMap::new(),
            processes: BTreeMap::new(),
            members: Roster::default(),
            leaving: BTreeMap::new(),
            aside: BTreeSet::new(),
            places: BTreeMap::new(),
            walls: Walls::default(),
            touched: BTreeMap::new(),
            hotplug: None,
            unclear: Unclear::default(),
            stirred: Stirred::everything(),
            rescans_left: 0,
            full_look_due: true,
            strays: BTreeMap::new(),
            askers: Askers::default(),
            attempts: BTreeMap::new(),
            births_heard_since: None,
            sleepers: OnceLock::new(),
        }
    }

    /// The members of a job.
    pub fn members_of<'a>(&'a self, job: &'a JobId) -> impl Iterator<Item = &'a Member> + 'a {
        self.members.of(job)
    }

    /// The PU that a thread of a member was pinned to, if it was; one that a program chose itself is no pin.
    #[must_use]
    pub fn pin_of(&self, member: &Member, tid: Tid) -> Option<Pu> {
        let thread = member.threads.get(&tid)?;
        let touch = self.touched.get(&ThreadId { process: member.id, tid, start: thread.start })?;
        let grant = &self.jobs.get(&member.job)?.grant.as_ref()?.cpus;
        let home = home(&self.topology, grant, &touch.before, member.inherited.as_ref());
        touch.set.single().filter(|_| touch.set != home && touch.set == thread.allowed)
    }

    /// What was done to the threads of one process.
    pub(crate) fn touched_in(&self, process: ProcessId) -> impl Iterator<Item = (&ThreadId, &Touch)> {
        let first = ThreadId { process, tid: Tid(0), start: StartTime(0) };
        let last = ThreadId { process, tid: Tid(u32::MAX), start: StartTime(u64::MAX) };
        self.touched.range(first..=last)
    }

    /// A process that is watched: a member, or one still to be put back.
    pub(crate) fn watched(&self, pid: Pid) -> Option<&Member> {
        self.members.get(&pid).or_else(|| self.leaving.get(&pid))
    }

    /// The wall that a process is in, be it another job's.
    pub(crate) fn wall_around(&self, pid: Pid) -> Option<&Built> {
        self.walls.around(self.processes.get(&pid)?.process.cgroup.as_deref()?)
    }

    /// Whether a cpuset holds a process on its job's cores: the scheduler's own, or a wall.
    #[must_use]
    pub fn is_walled(&self, member: &Member) -> bool {
        let place = self.processes.get(&member.id.pid).and_then(|known| known.process.cgroup.as_deref());
        let Some(job) = self.jobs.get(&member.job) else { return false };
        if job.grant.as_ref().is_some_and(|grant| grant.granted_by == GrantedBy::Scheduler) {
            let schedulers = job.cgroup.as_deref().unwrap_or_default();
            return place.is_none_or(|place| lies_in(place, schedulers));
        }
        let wall = self.walls.of(&member.job);
        place.zip(wall).is_some_and(|(place, built)| lies_in(place, &built.wall.path))
    }

    /// The records from which [`WardenState::replay`] makes this state again: a journal written anew.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let jobs = self.jobs_unshared_first().cloned().map(Record::Job);
        let members = self.members.values().map(Member::joined);
        let leaving = self.leaving.values().map(Member::left);
        let touched = self.touched.iter().flat_map(|(&thread, touch)| {
            let earlier = touch.previous.iter().filter(|_| !touch.settled);
            let masks = earlier.chain(&touch.cut_from).chain([&touch.set]).cloned();
            masks.map(move |set| Record::Touched {
                thread,
                before: touch.before.clone(),
                set,
                since: touch.since,
            })
        });
        let walls = self.walls.records().into_iter().map(Record::Wall);
        jobs.chain(walls).chain(members).chain(leaving).chain(touched).collect()
    }

    /// Takes in one record, as after a restart. Records are hints: a grant that the machine or the ledger can't
    /// hold any more is kept only as far as it can, processes that are gone fall out at the first full look.
    pub fn replay(&mut self, record: Record) {
        match record {
            Record::Job(mut job) => {
                if !self.reclaim(&job) {
                    self.pool.release(&job.id);
                    job.grant = None;
                }
                self.jobs.insert(job.id.clone(), job);
            }
            Record::Ended(job) => {
                self.jobs.remove(&job);
                self.pool.release(&job);
                self.let_go(&job);
            }
            Record::Joined { process: id, job, evidence, inherited, met } if self.jobs.contains_key(&job) => {
                let member = Member { id, job, evidence, inherited, met, threads: BTreeMap::new() };
                self.leaving.remove(&id.pid);
                self.members.insert(member);
            }
            // Of a job that no record tells of nothing is left but masks to put back.
            Record::Joined { process: id, job, evidence, inherited, met }
            | Record::Left { process: id, job, evidence, inherited, met } => {
                let member = Member { id, job, evidence, inherited, met, threads: BTreeMap::new() };
                self.members.remove(id.pid);
                self.leaving.insert(id.pid, member);
            }
            Record::Touched { thread, before, set, since } => {
                let touch = Touch::after(self.touched.get(&thread), before, set, since);
                self.touched.insert(thread, touch);
            }
            Record::Untouched(thread) => {
                self.touched.remove(&thread);
            }
            Record::Wall(record) => self.walls.take_in(&record),
        }
    }

    /// Takes a job's grant back into the ledger; says whether the grant still holds. PUs that are not on the
    /// machine now may come back; a PU that someone else holds ends a grant, unless it was shared.
    fn reclaim(&mut self, job: &Job) -> bool {
        let Some(grant) = &job.grant else {
            self.pool.release(&job.id);
            return true;
        };
        let here = grant.cpus.intersection(self.topology.cpus());
        if grant.shared {
            self.pool.claim(&job.id, &here);
            return !here.is_empty();
        }
        self.pool.reclaim(&job.id, &here).is_empty() && !here.is_empty()
    }

    /// Puts another machine in place of the known one: PUs were found that it didn't have when it was first
    /// looked at. Every job keeps what it holds.
    pub fn set_topology(&mut self, topology: Topology, housekeeping: &CpuSet) {
        let online = self.pool.online();
        self.pool = Pool::new(&topology, housekeeping);
        self.topology = topology;
        let jobs: Vec<Job> = self.jobs_unshared_first().cloned().collect();
        for job in jobs {
            self.reclaim(&job);
        }
        self.pool.set_online(&online);
    }

    fn jobs_unshared_first(&self) -> impl Iterator<Item = &Job> {
        let is_shared = |job: &&Job| job.grant.as_ref().is_some_and(|grant| grant.shared);
        let unshared = self.jobs.values().filter(move |job| !is_shared(job));
        unshared.chain(self.jobs.values().filter(is_shared))
    }

    /// Takes in what the kernel made of an action: where a cpuset cuts the mask, less than was asked for. A mask
    /// that is not even part of it is somebody else's, set in the same moment: the next look deals with it.
    pub fn applied(&mut self, action: &Action, effective: &CpuSet) {
        let ThreadId { process, tid, start } = action.thread;
        let member = self.members.get(&process.pid).is_some_and(|member| member.id == process);
        let member = if member { self.members.thread_mut(process.pid, tid) } else { None };
        let leaving = self.leaving.get_mut(&process.pid).filter(|leaving| leaving.id == process);
        let leaving = leaving.and_then(|leaving| leaving.threads.get_mut(&tid));
        for thread in member.into_iter().chain(leaving).filter(|thread| thread.start == start) {
            thread.allowed = effective.clone();
        }
        let Some(touch) = self.touched.get_mut(&action.thread) else { return };
        if touch.set != action.to {
            touch.previous = vec![std::mem::replace(&mut touch.set, action.to.clone())];
        }
        let cut = *effective != action.to && effective.is_subset(&action.to);
        touch.cut_from = cut.then(|| action.to.clone());
        if cut {
            touch.set = effective.clone();
        }
        touch.settled = true;
    }

    /// Takes in that the mask of a newborn was set while its birth may not have been over: at the end of fork(2) the kernel
    /// gives it its parent's once more, if its cpuset is not the topmost one (kernel/cgroup/cpuset.c, `cpuset_fork`).
    pub fn set_at_birth(&mut self, action: &Action) {
        if let Some(touch) = self.touched.get_mut(&action.thread) {
            touch.previous = vec![action.from.clone()];
            touch.settled = false;
        }
    }

    /// Takes in that a newborn was looked at since: what mask it has now is its own doing.
    pub fn is_born(&mut self, mut thread: ThreadId) {
        let known = self.processes.get(&thread.process.pid).map(|known| known.process.id);
        if let Some(id) = known.filter(|id| id.is_born_with(thread.process)) {
            (thread.process, thread.start) = (id, id.start);
        }
        if let Some(touch) = self.touched.get_mut(&thread) {
            touch.settled = true;
        }
    }

    /// Takes in that a mask can't be put back, because it and the thread's cpuset don't meet: what the thread has is
    /// all it will get.
    pub fn out_of_reach(&mut self, action: &Action) {
        if let Some(touch) = self.touched.get_mut(&action.thread) {
            touch.cut_from = Some(action.to.clone());
        }
    }

    /// Takes in that the kernel refused an action: its thread is still as it was seen, and the touch that was
    /// recorded for it covers nothing.
    pub fn not_applied(&mut self, action: &Action) {
        if let Some(touch) = self.touched.get_mut(&action.thread) {
            if touch.before == action.from {
                self.touched.remove(&action.thread);
            } else {
                let whole = touch.seen_cut(&action.from, &action.to);
                (touch.set, touch.cut_from) = (action.from.clone(), whole);
                touch.settled = true;
            }
        }
    }

    /// Moves a job's members among the leaving.
    pub(crate) fn let_go(&mut self, job: &JobId) {
        let gone = self.members.remove_all_of(job);
        self.leaving.extend(gone.into_iter().map(|member| (member.id.pid, member)));
    }

    /// Strikes a process off the strays.
    pub(crate) fn no_stray(&mut self, pid: Pid) {
        for pids in self.strays.values_mut() {
            pids.remove(&pid);
        }
    }

    /// Forgets a process that is gone.
    pub(crate) fn forget(&mut self, pid: Pid) {
        self.processes.remove(&pid);
        self.no_stray(pid);
        if let Some(member) = self.members.get(&pid) {
            self.stirred.add(&member.job, pid);
        }
        for member in self.members.remove(pid).into_iter().chain(self.leaving.remove(&pid)) {
            self.walls.forget(member.id);
            let gone: Vec<ThreadId> = self.touched_in(member.id).map(|(&thread, _)| thread).collect();
            for thread in gone {
                self.touched.remove(&thread);
            }
        }
    }
}
