//! The live machine as the warden's [`Node`].
//!
//! What never changes of a process is read once (its marks: cgroups, environment, groups) and again when its
//! program or its cgroups changed; what changes is read at every look. Things that vanish while they are read are
//! gone, which is normal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::node::Node;
use pjw_core::plan::{Action, ActionKind, Outcome};
use pjw_core::process::{CgroupId, Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::snapshot::{Cgroup, Look, Marks, Process, Scope, Seen, Snapshot, Thread};
use pjw_core::wall::{WallAction, WallOutcome};

use crate::affinity;
use crate::cgroup::Mounts;
use crate::clock;
use crate::errno::{Meaning, meaning};
use crate::procfs::{Proc, SchedStat, Stat};
use crate::systemd::Manager;
use crate::walls::{Site, Tree};

mod sleepers;

use sleepers::Sleep;

/// A process's threads are listed again until two lists agree, so often at most: a process that makes threads
/// as fast as it can is looked at again in the next round.
const MOST_LISTS: usize = 4;

/// The machine this program runs on.
#[derive(Debug)]
pub struct LinuxNode {
    proc: Proc,
    mounts: Mounts,
    wanted: BTreeSet<&'static str>,
    known: BTreeMap<Pid, Acquaintance>,
    ns_per_tick: u64,
    schedstat: bool,
    online: CpuSet,
    systemd: Manager,
    sleep: Sleep,
}

/// What is remembered of a process between two looks.
#[derive(Debug)]
struct Acquaintance {
    id: ProcessId,
    uid: Uid,
    marks: Marks,
    /// Where the marks say it is in the hierarchy of the cpusets.
    cgroup: Option<Arc<str>>,
    /// The program whose marks these are; `None` before they are read.
    program: Option<Program>,
    threads: BTreeMap<Tid, ThreadFacts>,
}

/// What tells one exec of a process from the next, without an event that says so: a new name, or another address
/// of the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    comm: Comm,
    stack: u64,
}

/// What is remembered of a thread: read again only when it ran.
#[derive(Debug, Clone, Copy)]
struct ThreadFacts {
    start: StartTime,
    comm: Comm,
    state: char,
    last_cpu: Pu,
    ran: SchedStat,
}

impl LinuxNode {
    /// The machine, of whose environments only these variables are read.
    ///
    /// # Errors
    /// If /proc can't be opened.
    pub fn new(wanted: BTreeSet<&'static str>) -> Result<Self, Errno> {
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
        let ticks =
            ticks.and_then(|ticks| u64::try_from(ticks).ok()).filter(|&ticks| ticks > 0).unwrap_or(100);
        Ok(Self {
            proc: Proc::open(Path::new("/proc"))?,
            mounts: Mounts::find(),
            wanted,
            known: BTreeMap::new(),
            ns_per_tick: 1_000_000_000 / ticks,
            schedstat: Path::new("/proc/self/schedstat").exists(),
            online: online(),
            systemd: Manager::default(),
            sleep: Sleep::default(),
        })
    }

    fn look_at(&mut self, pid: Pid, with_threads: bool) -> Result<Process, Errno> {
        // The first thread's own stat: the process's would sum over all threads, which costs time for each.
        let stat = self.proc.thread_stat(pid, Tid(pid.0))?;
        let id = ProcessId { pid, start: stat.start };
        let is_known = self.known.get(&pid).is_some_and(|known| known.id == id);
        if !is_known {
            self.meet(id, &stat)?;
        }
        let dead = matches!(stat.state, 'Z' | 'X');
        if dead && !self.outlived(pid)? {
            return Err(Errno::ESRCH);
        }
        let marks = self.fresh_marks(pid, &stat, !is_known)?;
        let threads = if with_threads && !stat.kernel { Some(self.threads_of(pid)?) } else { None };
        let known = self.known.get(&pid).ok_or(Errno::ESRCH)?;
        let (uid, cgroup) = (known.uid, known.cgroup.clone());
        Ok(Process {
            id,
            parent: stat.parent,
            group: stat.group,
            session: stat.session,
            uid,
            comm: stat.comm,
            kernel: stat.kernel,
            mask: affinity::get(Tid(pid.0)).ok(),
            cgroup,
            marks,
            claims: None,
            threads,
            quiet_until: None,
        })
    }

    fn meet(&mut self, id: ProcessId, stat: &Stat) -> Result<(), Errno> {
        let uid = if stat.kernel { Uid::ROOT } else { Uid(self.proc.status(id.pid)?.uid) };
        let known = Acquaintance {
            id,
            uid,
            marks: Marks::default(),
            cgroup: None,
            program: None,
            threads: BTreeMap::new(),
        };
        self.known.insert(id.pid, known);
        Ok(())
    }

    /// Whether other threads of a process live on after its first one has ended.
    fn outlived(&mut self, pid: Pid) -> Result<bool, Errno> {
        Ok(self.proc.tids(pid)?.len() > 1)
    }

    /// The marks, if they changed since the last look. What may not be read leaves no mark.
    fn fresh_marks(&mut self, pid: Pid, stat: &Stat, first: bool) -> Result<Option<Marks>, Errno> {
        if stat.kernel {
            return Ok(first.then(Marks::default));
        }
        let program = Some(Program { comm: stat.comm, stack: stat.stack });
        let cgroups = self.proc.cgroups(pid)?;
        let known = self.known.get(&pid).ok_or(Errno::ESRCH)?;
        if known.program == program && known.marks.cgroups == cgroups {
            return Ok(None);
        }
        let environ = match self.proc.environ(pid, &self.wanted) {
            Err(errno) if meaning(errno) == Meaning::Gone => return Err(errno),
            environ => environ.unwrap_or_default(),
        };
        let status = self.proc.status(pid)?;
        let marks =
            Marks { cgroups, environ, groups: status.groups, command_line: self.proc.command_line(pid)? };
        if let Some(known) = self.known.get_mut(&pid) {
            known.uid = Uid(status.uid);
            known.program = program;
            known.cgroup = marks.cpuset_path().map(Arc::from);
            known.marks = marks.clone();
        }
        Ok(Some(marks))
    }

    fn threads_of(&mut self, pid: Pid) -> Result<Vec<Thread>, Errno> {
        let mut remembered =
            self.known.get_mut(&pid).map(|known| std::mem::take(&mut known.threads)).unwrap_or_default();
        let mut facts: BTreeMap<Tid, ThreadFacts> = BTreeMap::new();
        let mut threads: BTreeMap<Tid, Thread> = BTreeMap::new();
        for _ in 0..MOST_LISTS {
            let mut grown = false;
            for tid in self.proc.tids(pid)? {
                if threads.contains_key(&tid) {
                    continue;
                }
                grown = true;
                match self.thread(pid, tid, remembered.remove(&tid)) {
                    Ok((thread, fact)) => {
                        threads.insert(tid, thread);
                        facts.insert(tid, fact);
                    }
                    // A thread that ends while it is read is not there.
                    Err(errno) if is_absent(errno) => {}
                    Err(errno) => return Err(errno),
                }
            }
            if !grown {
                break;
            }
        }
        if let Some(known) = self.known.get_mut(&pid) {
            known.threads = facts;
        }
        Ok(threads.into_values().collect())
    }

    fn thread(
        &mut self,
        pid: Pid,
        tid: Tid,
        before: Option<ThreadFacts>,
    ) -> Result<(Thread, ThreadFacts), Errno> {
        let ran = if self.schedstat { Some(self.proc.schedstat(pid, tid)?) } else { None };
        let facts = match before {
            Some(facts) if Some(facts.ran) == ran => facts,
            _ => {
                let stat = self.proc.thread_stat(pid, tid)?;
                let by_ticks = SchedStat { run_ns: stat.run_ticks * self.ns_per_tick, wait_ns: 0 };
                ThreadFacts {
                    start: stat.start,
                    comm: stat.comm,
                    state: stat.state,
                    last_cpu: stat.last_cpu,
                    ran: ran.unwrap_or(by_ticks),
                }
            }
        };
        let ThreadFacts { start, comm, state, last_cpu, ran: SchedStat { run_ns, wait_ns } } = facts;
        let allowed = affinity::get(tid)?;
        Ok((Thread { tid, start, comm, state, last_cpu, run_ns, wait_ns, allowed }, facts))
    }
}

/// Whether an error says that a process is not there, or not for us to see; any other says nothing about it.
fn is_absent(errno: Errno) -> bool {
    matches!(meaning(errno), Meaning::Gone | Meaning::Denied)
}

/// What is assumed of a job's directory that nobody can look at: the job goes on, and nobody narrowed it.
fn unknown_cgroup(path: &str) -> Seen<Cgroup> {
    let id = CgroupId { inode: 0, path: path.to_owned() };
    Seen::Here(Cgroup { id, cpus: None, populated: true, cpuset: None })
}

fn online() -> CpuSet {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    text.parse().unwrap_or_default()
}

impl Node for LinuxNode {
    fn observe(&mut self, look: &Look) -> Snapshot {
        let taken = clock::now();
        let online = online();
        // The kernel may have written masks anew.
        let replugged = !online.is_empty() && online != self.online;
        if replugged {
            self.sleep = Sleep::default();
            self.online = online;
        }
        let mut processes = BTreeMap::new();
        let mut blind = None;
        let full = look.scope == Scope::Full;
        let unified = self.mounts.unified.as_deref();
        let woken = self.sleep.ask(&look.watch, unified, taken.since_boot, full);
        let (pids, mut scope) = match &look.scope {
            Scope::Partial(pids) => {
                let pids: Vec<Pid> = pids.union(&woken.awake).copied().collect();
                (pids, look.scope.clone())
            }
            Scope::Full => match self.proc.pids() {
                Ok(pids) => (pids, Scope::Full),
                // Without the list nothing may be concluded from who is not on it.
                Err(errno) => {
                    blind = Some(errno);
                    (Vec::new(), Scope::Partial(BTreeSet::new()))
                }
            },
        };
        for pid in pids {
            let with_threads =
                scope != Scope::Full || (look.threads_of.contains(&pid) && !woken.asleep.contains(&pid));
            match self.look_at(pid, with_threads) {
                Ok(mut process) => {
                    process.quiet_until = woken.quiet_until.get(&pid).copied();
                    processes.insert(pid, Seen::Here(process));
                }
                Err(errno) if is_absent(errno) => {
                    self.known.remove(&pid);
                    processes.insert(pid, Seen::Gone);
                }
                Err(errno) => blind = Some(errno),
            }
        }
        if scope == Scope::Full {
            self.mounts = Mounts::find();
            match blind {
                None => {
                    self.known.retain(|pid, _| processes.contains_key(pid));
                    self.sleep.retain(|pid| processes.contains_key(&pid), &look.watch);
                }
                Some(_) => scope = Scope::Partial(processes.keys().copied().collect()),
            }
        }
        let cgroup = |path: &String| self.mounts.look(path).unwrap_or_else(|| unknown_cgroup(path));
        let cgroups = look.cgroups.iter().map(|path| (path.clone(), cgroup(path))).collect();
        let blind = blind.map(|errno| errno.desc().to_owned());
        Snapshot { scope, taken, online: self.online.clone(), processes, cgroups, blind }
    }

    fn apply(&mut self, action: &Action) -> Outcome {
        let thread = action.thread;
        // Its number may belong to another by now. Between this look and the next line it may still change
        // hands; that other thread's own job, or none, puts its mask right in the next cycle.
        match self.proc.thread_stat(thread.process.pid, thread.tid) {
            Ok(stat) if stat.start == thread.start && !matches!(stat.state, 'Z' | 'X') => {}
            _ => return Outcome::Gone,
        }
        let set = match action.kind {
            ActionKind::Restore => put_back,
            // Its cgroup holds it: then only what is narrower than that need be asked for.
            _ if action.walled => put_back,
            _ => put,
        };
        match set(thread.tid, &action.to, &self.online) {
            Ok(effective) => Outcome::Done { effective },
            Err(errno) if meaning(errno) == Meaning::Gone => Outcome::Gone,
            Err(errno) => Outcome::Refused { errno: errno as i32, hint: hint(errno, action) },
        }
    }

    fn build(&mut self, action: &WallAction) -> WallOutcome {
        let Some(tree) = Tree::find(&self.mounts) else {
            return WallOutcome::Refused { hint: "no hierarchy with cpusets is mounted".to_owned() };
        };
        Site { proc: &mut self.proc, tree: &tree, systemd: &mut self.systemd }.carry_out(&action.change)
    }
}

/// Sets a mask and reads back what came of it. Who may run wherever a PU is on may run everywhere for good.
fn put(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    if online.is_subset(to) {
        affinity::set_all(tid)?;
    } else {
        affinity::set(tid, to)?;
    }
    affinity::get(tid)
}

/// Gives a thread its own mask back, or the mask that its wall is. If a cpuset, and nothing else, makes the mask what
/// it is to be, then the thread asks for nothing, and must follow its cpuset when that is changed.
fn put_back(tid: Tid, to: &CpuSet, online: &CpuSet) -> Result<CpuSet, Errno> {
    affinity::set_all(tid)?;
    let allowed = affinity::get(tid)?;
    if allowed == to.intersection(online) { Ok(allowed) } else { put(tid, to, online) }
}

fn hint(errno: Errno, action: &Action) -> String {
    let (tid, to) = (action.thread.tid, &action.to);
    match errno {
        Errno::EINVAL => {
            format!("thread {tid} can't go to {to}: its cgroup's cpuset allows none of these PUs")
        }
        Errno::EPERM => format!("thread {tid} is another user's: run pjwd as root, or with CAP_SYS_NICE"),
        other => format!("thread {tid} can't go to {to}: {other}"),
    }
}

#[cfg(test)]
mod tests;
