//! A machine made by hand: processes are rows, a look shows them, a plan is carried out by writing masks.

use std::collections::BTreeMap;

use pjw_core::command::{Assign, Caller, Command, Reply};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::event::Event;
use pjw_core::ids::{CgroupId, Comm, Pid, ProcessId, StartTime, ThreadId, Tid, Uid};
use pjw_core::job::{Amount, Job, JobId};
use pjw_core::plan::{Action, Plan};
use pjw_core::policy::Policy;
use pjw_core::reconcile::{Decision, reconcile};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::scan::ScanScope;
use pjw_core::snapshot::{
    AffinityRequest, Cgroup, Cpuset, JobMark, JobMarks, MarkKind, Observed, OwnUnit, Process, Role, Snapshot,
    Thread,
};
use pjw_core::state::WardenState;
use pjw_core::state::masks::entry::{Limits, MaskEntry, shown};
use pjw_core::state::members::MemberThread;
use pjw_core::time::{Moment, Nanos, UnixMillis};
use pjw_core::topology::{Regular, Topology};

pub const SECOND: u64 = 1_000_000_000;
pub const ROOT: Caller = Caller { uid: Uid(0), admin: true };
pub const ALICE: Caller = Caller { uid: Uid(1001), admin: false };

pub struct Machine {
    pub state: WardenState,
    pub policy: Policy,
    pub processes: BTreeMap<Pid, Process>,
    pub cgroups: BTreeMap<String, Observed<Cgroup>>,
    pub now: u64,
    /// PUs that are switched off.
    pub offline: CpuSet,
    /// The cpuset of every process, which pjw does not read.
    pub cut: Option<CpuSet>,
    /// Who asked for which PUs since the last look.
    pub asked: Vec<AffinityRequest>,
    pub last: Option<Decision>,
    /// What was told and written since the last command was given.
    pub told: Vec<Event>,
    pub written: Vec<Record>,
}

/// Two packages of four cores of one PU.
pub fn machine() -> Machine {
    let shape =
        Regular { packages: 2, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 4, pus_per_core: 1 };
    let topology = Topology::regular(shape);
    Machine {
        state: WardenState::new(topology, &CpuSet::new()),
        policy: Policy::default(),
        processes: BTreeMap::new(),
        cgroups: BTreeMap::new(),
        now: SECOND,
        offline: CpuSet::new(),
        cut: None,
        asked: Vec::new(),
        last: None,
        told: Vec::new(),
        written: Vec::new(),
    }
}

pub fn job(text: &str) -> JobId {
    text.parse().unwrap()
}

pub fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

impl Machine {
    /// Starts a process of one thread; a child has its parent's mask, session and group.
    pub fn spawn(&mut self, pid: u32, parent: u32, uid: u32) -> &mut Process {
        let born = self.processes.get(&Pid(parent));
        let mask =
            born.and_then(|parent| parent.mask.clone()).unwrap_or_else(|| self.state.topology.cpus().clone());
        let session = born.map_or(Pid(pid), |parent| parent.session);
        let id = ProcessId { pid: Pid(pid), start: StartTime(self.now / StartTime::TICK.0) };
        let process = Process {
            id,
            parent: Pid(parent),
            group: Pid(pid),
            session,
            uid: Uid(uid),
            comm: Comm::from("work"),
            kernel: false,
            mask: Some(mask.clone()),
            cgroup: None,
            attributes: None,
            job_marks: Some(JobMarks::default()),
            threads: Some(vec![thread(pid, id.start, mask)]),
            idle_until: None,
        };
        self.processes.insert(Pid(pid), process);
        self.processes.get_mut(&Pid(pid)).unwrap()
    }

    /// Starts another thread of a process, with its first thread's mask.
    pub fn clone_thread(&mut self, pid: u32, tid: u32) {
        let start = StartTime(self.now / StartTime::TICK.0);
        let process = self.processes.get_mut(&Pid(pid)).unwrap();
        let mask = process.mask.clone().unwrap();
        process.threads.as_mut().unwrap().push(thread(tid, start, mask));
    }

    pub fn exit(&mut self, pid: u32) {
        self.processes.remove(&Pid(pid));
        for child in self.processes.values_mut().filter(|child| child.parent == Pid(pid)) {
            child.parent = Pid(1);
        }
    }

    /// A thread sets its own mask.
    pub fn bind(&mut self, pid: u32, tid: u32, mask: &str) {
        self.write(Pid(pid), Tid(tid), set(mask));
    }

    /// A wall's cpuset is written, of which so much is online.
    pub fn give_cpuset(&mut self, path: &str, cpus: CpuSet, effective: CpuSet) {
        let id = CgroupId { inode: 1, path: path.to_owned() };
        let cpuset = Cpuset { effective, mems: CpuSet::new(), isolated: false, cpus };
        let cpus = Some(cpuset.effective.clone());
        let place = Cgroup { id, cpus, populated: true, cpuset: Some(cpuset) };
        self.cgroups.insert(path.to_owned(), Observed::Present(place));
    }

    /// A thread asks for PUs for itself, and the kernel is heard to carry it out; what comes of it is the test's to say.
    pub fn ask(&mut self, pid: u32, tid: u32, cpus: &str) -> &mut AffinityRequest {
        let parent = self.processes.get(&Pid(pid)).map_or(Pid(1), |process| process.parent);
        self.asked.push(AffinityRequest {
            caller: Tid(tid),
            process: Pid(pid),
            parent,
            comm: Comm::from("mpirun"),
            at: Nanos(self.now),
            target: None,
            cpus: set(cpus),
            refused: false,
        });
        self.asked.last_mut().unwrap()
    }

    pub fn mask(&self, pid: u32, tid: u32) -> String {
        let process = &self.processes[&Pid(pid)];
        let threads = process.threads.as_ref().unwrap();
        let requested = &threads.iter().find(|thread| thread.tid == Tid(tid)).unwrap().allowed;
        shown(requested, &self.possible(process)).to_string()
    }

    /// What the cpuset of a process and the online PUs allow.
    fn possible(&self, process: &Process) -> CpuSet {
        let online = self.state.topology.cpus().difference(&self.offline);
        let place = process.cgroup.as_ref().and_then(|path| self.cgroups.get(&**path)?.present());
        let cpuset = place.and_then(|place| place.cpuset.as_ref()).map(|cpuset| &cpuset.cpus);
        let possible =
            cpuset.into_iter().chain(&self.cut).fold(online.clone(), |left, cpus| left.intersection(cpus));
        if possible.is_empty() { online } else { possible }
    }

    /// The limits of a mask where every PU is online and no cpuset changed.
    pub fn limits(&self) -> Limits {
        let machine = self.state.topology.cpus().clone();
        Limits { possible: [machine].into_iter().collect(), may_be_reset: false }
    }

    /// The threads of which the journal keeps the masks.
    pub fn kept(&self) -> Vec<ThreadId> {
        self.state.kept_masks().map(|(thread, _)| thread).collect()
    }

    /// Changes what is known of a thread of a member.
    pub fn change_thread(&mut self, id: ThreadId, change: impl FnOnce(&mut MemberThread)) {
        let pid = id.process.pid;
        let mut threads = self.state.members[&pid].threads.clone();
        change(threads.get_mut(&id.tid).unwrap());
        self.state.members.put_threads(pid, threads);
    }

    /// Forgets that pjw wrote any mask.
    pub fn forget_writes(&mut self) {
        let machine = self.state.topology.cpus().clone();
        let limits = self.limits();
        let now = Nanos(self.now);
        for id in self.kept() {
            self.change_thread(id, |thread| {
                thread.mask = Some(MaskEntry::first_reading(&thread.allowed, &limits, &machine, now));
            });
        }
    }

    /// Stores a requested mask, as the kernel does.
    fn write(&mut self, pid: Pid, tid: Tid, mask: CpuSet) {
        let process = self.processes.get_mut(&pid).unwrap();
        let first = Tid(pid.0);
        if tid == first {
            process.mask = Some(mask.clone());
        }
        let threads = process.threads.as_mut().unwrap();
        threads.iter_mut().find(|thread| thread.tid == tid).unwrap().allowed = mask;
    }

    /// Lets a second pass in which these threads run all the time and all others sleep.
    pub fn run(&mut self, hot: &[u32]) {
        self.now += SECOND;
        for process in self.processes.values_mut() {
            for thread in process.threads.as_mut().unwrap() {
                if hot.contains(&thread.tid.0) {
                    thread.run_ns += SECOND;
                }
            }
        }
    }

    pub fn look(&self) -> Snapshot {
        let taken_at = Moment { since_boot: Nanos(self.now), wall_clock: UnixMillis(0) };
        let online = self.state.topology.cpus().difference(&self.offline);
        // As sched_getaffinity(2) returns it.
        let show = |process: &Process| {
            let mut process = process.clone();
            let possible = self.possible(&process);
            let effective = |mask: &mut CpuSet| *mask = shown(mask, &possible);
            process.mask.as_mut().map(effective);
            process.threads.iter_mut().flatten().for_each(|thread| effective(&mut thread.allowed));
            Observed::Present(process)
        };
        let processes = self.processes.iter().map(|(&pid, process)| (pid, show(process))).collect();
        let mut cgroups = self.cgroups.clone();
        for path in self.state.job_cgroups() {
            let id = CgroupId { inode: 1, path: path.clone() };
            cgroups.entry(path).or_insert(Observed::Present(Cgroup {
                id,
                cpus: None,
                populated: true,
                cpuset: None,
            }));
        }
        Snapshot {
            scope: ScanScope::Full,
            taken_at,
            online,
            processes,
            cgroups,
            affinity_requests: self.asked.clone(),
            incomplete: None,
        }
    }

    /// Full cycles until nothing is left to do; returns everything that was done.
    pub fn settle_with(&mut self, commands: &[Command]) -> (Vec<Result<Reply, Refusal>>, Vec<Action>) {
        (self.told, self.written) = (Vec::new(), Vec::new());
        let mut done = Vec::new();
        let mut replies = Vec::new();
        let mut commands = commands;
        for _ in 0..10 {
            let snapshot = self.look();
            self.now += 1;
            let decision = reconcile(&mut self.state, &snapshot, commands, &self.policy);
            self.asked.clear();
            commands = &[];
            replies.extend(decision.replies.iter().cloned());
            self.told.extend(decision.events.iter().cloned());
            self.written.extend(decision.records.iter().cloned());
            let Plan { actions, .. } = decision.plan.clone();
            let finished = actions.is_empty() && decision.next_scan.is_none();
            for action in &actions {
                self.carry_out(action);
            }
            done.extend(actions);
            self.last = Some(decision);
            if finished {
                return (replies, done);
            }
        }
        panic!("the cycles do not come to rest: {done:#?}");
    }

    /// The kernel carries out an action: it stores the requested mask and shows what the cpuset and the online PUs leave.
    pub fn carry_out(&mut self, action: &Action) {
        let (pid, tid) = (action.thread.process.pid, action.thread.tid);
        self.write(pid, tid, action.requested.clone());
        let effective = set(&self.mask(pid.0, tid.0));
        self.state.applied(action, &action.requested, &effective);
    }

    pub fn settle(&mut self) -> Vec<Action> {
        self.settle_with(&[]).1
    }

    pub fn command(&mut self, command: Command) -> Result<Reply, Refusal> {
        self.settle_with(&[command]).0.remove(0)
    }

    pub fn assign(&mut self, id: &str, cores: u32, pids: &[u32]) -> Result<Job, Refusal> {
        self.assign_as(ROOT, id, cores, pids)
    }

    pub fn assign_as(&mut self, caller: Caller, id: &str, cores: u32, pids: &[u32]) -> Result<Job, Refusal> {
        let pids = pids.iter().copied().map(Pid).collect();
        let wish = Assign { pids, caller, ..wish(id, Some(Amount::Cores(cores))) };
        match self.command(Command::Assign(wish))? {
            Reply::Assigned(job) => Ok(*job),
            Reply::Released(_) | Reply::Moved(_) => unreachable!(),
        }
    }

    pub fn release(&mut self, id: &str) -> Result<Reply, Refusal> {
        self.command(Command::Release { job: job(id), caller: ROOT })
    }

    /// The job and evidence of a process, or a dash.
    pub fn member(&self, pid: u32) -> String {
        match self.state.members.get(&Pid(pid)) {
            Some(member) => format!("{} by {:?}", member.job, member.evidence),
            None => "-".to_owned(),
        }
    }

    pub fn grant(&self, id: &str) -> String {
        let grant = self.state.jobs.get(&job(id)).and_then(|job| job.grant.as_ref());
        grant.map_or_else(|| "-".to_owned(), |grant| grant.cpus.to_string())
    }

    pub fn warnings(&self) -> Vec<&'static str> {
        self.last.as_ref().unwrap().warnings.iter().map(|warnings| warnings.code).collect()
    }
}

pub fn wish(id: &str, amount: Option<Amount>) -> Assign {
    Assign {
        job: job(id),
        amount,
        placement: None,
        class: None,
        near: None,
        bind_memory: None,
        isolated: None,
        pids: Vec::new(),
        session: None,
        must_be_new: false,
        owner: None,
        caller: ROOT,
    }
}

pub fn in_cgroup(process: &mut Process, id: &str, path: &str, amount: Option<Amount>) {
    let claim = JobMark { job: job(id), kind: MarkKind::Cgroup(path.to_owned()), amount };
    process.job_marks = Some(JobMarks { role: Role::Ordinary, marks: vec![claim] });
}

pub fn says(process: &mut Process, id: &str, own: OwnUnit, amount: Option<Amount>) {
    let claim = JobMark { job: job(id), kind: MarkKind::Environment { own }, amount };
    process.job_marks = Some(JobMarks { role: Role::Ordinary, marks: vec![claim] });
}

fn thread(tid: u32, start: StartTime, allowed: CpuSet) -> Thread {
    Thread {
        tid: Tid(tid),
        start,
        comm: Comm::from("work"),
        state: 'S',
        last_cpu: Pu(0),
        run_ns: 0,
        wait_ns: 0,
        allowed,
    }
}
