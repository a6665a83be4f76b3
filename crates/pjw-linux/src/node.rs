//! The live machine as the warden's [`Node`].
//!
//! What never changes of a process is read once (its marks: cgroups, environment, groups) and again when its
//! program or its cgroups changed; what changes is read at every look. Things that vanish while they are read are
//! gone, which is normal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use pjw_core::bindings::MASKS_WRITTEN_WITHIN;
use pjw_core::cpuset::CpuSet;
use pjw_core::newborn::{Expected, Glance, Newborn};
use pjw_core::node::Node;
use pjw_core::plan::{Action, ActionKind, Outcome};
use pjw_core::process::{CgroupId, Pid, ProcessId, StartTime, Tid};
use pjw_core::snapshot::{Asked, Cgroup, Look, Process, Scope, Seen, Snapshot, Watch};
use pjw_core::wall::{Ground, WallAction, WallOutcome};

use tracing::warn;

use crate::affinity;
use crate::bpf::{Asks, Heard, TaskScan, Whom};
use crate::cgroup::{Mounts, Residents};
use crate::clock;
use crate::errno::{Meaning, meaning};
use crate::online::Online;
use crate::procfs::{Proc, Stat};
use crate::systemd::Manager;
use crate::walls::{Bystanders, Site, Tree};

mod acquaintance;
mod sleepers;
mod told;

use acquaintance::Acquaintance;
use sleepers::{Sleep, Woken};
use told::{Told, is_worth_a_pass};

/// So long without a call that was lost ends an episode of losing them.
const LOSS_EPISODE: Duration = Duration::from_secs(60);

/// The machine this program runs on.
#[derive(Debug)]
pub struct LinuxNode {
    proc: Proc,
    mounts: Mounts,
    residents: Residents,
    wanted: BTreeSet<&'static str>,
    known: BTreeMap<Pid, Acquaintance>,
    ns_per_tick: u64,
    schedstat: bool,
    online: CpuSet,
    /// Where the kernel lists them; `None` where sysfs is not mounted.
    online_list: Option<Online>,
    /// When that changed, if the kernel may still be writing masks for it.
    replugged: Option<Instant>,
    systemd: Manager,
    bystanders: Bystanders,
    sleep: Sleep,
    /// The kernel's own telling of its tasks, where it may be had.
    scan: Option<TaskScan>,
    /// Who asks for which PUs, where that may be had.
    asks: Option<Asks>,
    /// When some of that was lost last.
    asks_lost: Option<Instant>,
    /// How many tasks the machine had in the last pass.
    tasks: usize,
    /// Whom the last glance told of, if no look was taken since.
    just_born: BTreeSet<ProcessId>,
    /// How many full looks there were.
    full_looks: u32,
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
            residents: Residents::default(),
            wanted,
            known: BTreeMap::new(),
            ns_per_tick: 1_000_000_000 / ticks,
            schedstat: Path::new("/proc/self/schedstat").exists(),
            online: CpuSet::new(),
            online_list: Online::open().ok(),
            replugged: None,
            systemd: Manager::default(),
            bystanders: Bystanders::new(crate::survey::masks_last_by_version()),
            sleep: Sleep::default(),
            scan: None,
            asks: None,
            asks_lost: None,
            tasks: 0,
            just_born: BTreeSet::new(),
            full_looks: 0,
        })
    }

    /// Looks by the kernel's task scan from now on where that is quicker, and by /proc elsewhere, or by /proc only.
    pub fn use_task_scan(&mut self, scan: Option<TaskScan>) {
        self.scan = scan;
    }

    /// Tells from now on who asked for which PUs, or not.
    pub fn use_asks(&mut self, asks: Option<Asks>) {
        self.asks = asks;
    }

    /// Who asked for which PUs. That calls are lost is told in the log when it begins.
    fn hear_asks(&mut self) -> Vec<Asked> {
        let Heard { asked, lost } = self.asks.as_mut().map(Asks::hear).unwrap_or_default();
        if lost > 0 {
            let now = Instant::now();
            let last = self.asks_lost.replace(now);
            if last.is_none_or(|last| now.saturating_duration_since(last) > LOSS_EPISODE) {
                warn!(
                    "{lost} calls of sched_setaffinity were too many to be heard: who asked for more than its cpuset \
                     may go untold"
                );
            }
        }
        asked
    }

    /// Goes by what a probe has found, where the kernel's version was all that was known of its cpusets.
    pub fn stand_on(&mut self, ground: &Ground) {
        self.bystanders = Bystanders::new(ground.masks_last);
    }

    /// What the kernel's task scan tells of them; nothing where there is none.
    fn ask_kernel<'a>(&mut self, whom: Whom<'_>, within: impl Fn(Pid) -> Option<&'a CpuSet>) -> Told {
        let Some(scan) = &mut self.scan else { return Told::default() };
        match Told::by(scan, whom, within) {
            Ok(told) => {
                self.tasks = told.tasks;
                told
            }
            Err(error) => {
                warn!("{error}; it is not tried again before pjwd is started anew");
                self.scan = None;
                Told::default()
            }
        }
    }

    /// Which PUs are online. When that changed, the kernel may be writing masks anew for a while, and nobody counts as
    /// asleep.
    fn look_at_pus(&mut self) {
        let online = self.online_list.as_mut().and_then(|list| list.read().ok());
        if let Some(online) = online.filter(|online| !online.is_empty() && **online != self.online) {
            self.replugged = (!self.online.is_empty()).then(Instant::now);
            self.online = online.clone();
        }
        if let Some(at) = self.replugged {
            self.sleep = Sleep::default();
            self.replugged = Some(at).filter(|at| at.elapsed() < MASKS_WRITTEN_WITHIN);
        }
    }

    /// After the masks: what the kernel made of them for PUs that went is not told without those, and what was read before
    /// is cut to those that are left. PUs that came are for the next look, which reads every mask with them.
    fn look_at_pus_again(&mut self, seen: &mut BTreeMap<Pid, Seen<Process>>) {
        let before = std::mem::take(&mut self.online);
        let now = self.online_list.as_mut().and_then(|list| list.read().ok());
        let left = now.map(|now| before.intersection(now)).filter(|left| !left.is_empty());
        let Some(left) = left.filter(|left| *left != before) else {
            self.online = before;
            return;
        };
        self.replugged = Some(Instant::now());
        cut_masks(seen, &left);
        self.online = left;
    }

    fn cgroup(&mut self, path: &str) -> Seen<Cgroup> {
        self.mounts.look(path, &mut self.residents).unwrap_or_else(|| unknown_cgroup(path))
    }

    /// Wakes all sleepers who are outside of where only their masks keep them.
    fn check_masks(&mut self, woken: &mut Woken, watch: &Watch, told: &mut Told) {
        let masked: Vec<Pid> = woken.masked.keys().copied().collect();
        for pid in masked {
            let Some(within) = woken.within(pid, watch) else { continue };
            if told.is_outside(pid).unwrap_or_else(|| masks(&mut self.proc, pid, within).1) {
                woken.wake(pid);
                // Its threads were not told: that is for /proc.
                told.take(pid);
            }
        }
    }

    /// Who is to be looked at, and what the kernel tells of them.
    fn ask(&mut self, look: &Look, woken: &mut Woken) -> Asking {
        match &look.scope {
            Scope::Partial(pids) => {
                let (wanted, told) = self.ask_for_some(pids, &look.watch, woken);
                let pids = wanted.union(&woken.strangers).copied().collect();
                Asking { wanted, pids: Ok(pids), told }
            }
            Scope::Full => {
                let (pids, told) = self.ask_for_all(look, woken);
                Asking { wanted: look.threads_of.difference(&woken.asleep).copied().collect(), pids, told }
            }
        }
    }

    /// Whom a partial look looks at with all threads, and what the kernel tells of them and of the strangers; nothing where
    /// /proc is quicker.
    fn ask_for_some(
        &mut self,
        pids: &BTreeSet<Pid>,
        watch: &Watch,
        woken: &mut Woken,
    ) -> (BTreeSet<Pid>, Told) {
        let Self { sleep, proc, .. } = self;
        sleep.sample(woken, watch, |pid, within| masks(proc, pid, within));
        let pids: BTreeSet<Pid> = pids.union(&woken.awake).copied().collect();
        let threads = |pid| self.known.get(pid).map_or(1, |known| known.thread_count);
        let strangers = woken.strangers.difference(&pids).count();
        let told = if !is_worth_a_pass(pids.iter().map(threads).sum::<usize>() + strangers, self.tasks) {
            Told::default()
        } else if strangers == 0 {
            self.ask_kernel(Whom::These(&pids), |_| None)
        } else {
            // Of strangers the first thread is enough.
            self.ask_kernel(Whom::Everybody(&pids), |_| None)
        };
        (pids, told)
    }

    /// The same of a full look: the error is that of the list of all processes.
    fn ask_for_all(&mut self, look: &Look, woken: &mut Woken) -> (Result<BTreeSet<Pid>, Errno>, Told) {
        let asked = look.threads_of.difference(&woken.asleep).chain(woken.masked.keys());
        let asked: BTreeSet<Pid> = asked.copied().collect();
        let mut told = self.ask_kernel(Whom::Everybody(&asked), |pid| woken.within(pid, &look.watch));
        self.check_masks(woken, &look.watch, &mut told);
        (self.everybody(&told), told)
    }

    /// Everybody there is: whom a pass told of and whom only /proc may tell of, or the list of /proc. A security module may
    /// hide processes from BPF: the first look finds them by that list, too, and after it they are known.
    fn everybody(&mut self, told: &Told) -> Result<BTreeSet<Pid>, Errno> {
        let mut pids = told.pids();
        if pids.is_empty() {
            return self.proc.pids().map(|pids| pids.into_iter().collect());
        }
        if self.known.is_empty() {
            pids.extend(self.proc.pids()?);
        }
        pids.extend(self.known.keys());
        Ok(pids)
    }
}

/// Whom a look is to meet.
struct Asking {
    /// Those whose threads are to be read.
    wanted: BTreeSet<Pid>,
    /// These and the others; the error is that of the list of all processes.
    pids: Result<BTreeSet<Pid>, Errno>,
    /// What the kernel told already.
    told: Told,
}

/// Leaves of all masks what lies within; who has nothing there is about to be driven out, and keeps what was read.
fn cut_masks(seen: &mut BTreeMap<Pid, Seen<Process>>, within: &CpuSet) {
    let cut = |mask: &mut CpuSet| {
        let left = mask.intersection(within);
        if !left.is_empty() {
            *mask = left;
        }
    };
    for process in seen.values_mut() {
        let Seen::Here(process) = process else { continue };
        process.mask.iter_mut().for_each(cut);
        process.threads.iter_mut().flatten().for_each(|thread| cut(&mut thread.allowed));
    }
}

/// How many masks a process has, and whether one of them is not within a set. Threads that are gone have none.
fn masks(proc: &mut Proc, pid: Pid, within: &CpuSet) -> (usize, bool) {
    let tids = proc.tids(pid).unwrap_or_default();
    let outside = |tid: &Tid| affinity::get(*tid).is_ok_and(|mask| !mask.is_subset(within));
    (tids.len(), tids.iter().any(outside))
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

impl Node for LinuxNode {
    fn observe(&mut self, look: &Look) -> Snapshot {
        let taken = clock::now();
        self.just_born.clear();
        self.look_at_pus();
        let mut processes = BTreeMap::new();
        let mut blind = None;
        let full = look.scope == Scope::Full;
        if full {
            let mounts = Mounts::find();
            self.forget_places(mounts != self.mounts);
            self.mounts = mounts;
        }
        let unified = self.mounts.unified.as_deref();
        let mut woken = self.sleep.ask(&look.watch, unified, taken.since_boot, full);
        let Asking { wanted, pids, mut told } = self.ask(look, &mut woken);
        // Without the list nothing may be concluded from who is not on it.
        let (pids, mut scope) = match pids {
            Ok(pids) => (pids, look.scope.clone()),
            Err(errno) => {
                blind = Some(errno);
                (BTreeSet::new(), Scope::Partial(BTreeSet::new()))
            }
        };
        for pid in pids {
            let with_threads = wanted.contains(&pid);
            if with_threads {
                self.sleep.interrupt(pid);
            }
            let told = told.take(pid);
            if told.is_none() && woken.strangers.contains(&pid) {
                self.ask_whose(pid);
            }
            match self.look_at(pid, with_threads, told) {
                Ok(mut process) => {
                    let quiet_until = woken.quiet_until.get(&pid).copied();
                    process.quiet_until = quiet_until.filter(|_| process.threads.is_some());
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
            self.residents.retain_existing();
            match blind {
                None => {
                    self.known.retain(|pid, _| processes.contains_key(pid));
                    self.sleep.retain(|pid| processes.contains_key(&pid), &look.watch);
                }
                Some(_) => scope = Scope::Partial(processes.keys().copied().collect()),
            }
        }
        self.look_at_pus_again(&mut processes);
        let cgroups = look.cgroups.iter().map(|path| (path.clone(), self.cgroup(path))).collect();
        let blind = blind.map(|errno| errno.desc().to_owned());
        // After the masks: whose mask was seen to be another has been heard.
        let asked = self.hear_asks();
        Snapshot { scope, taken, online: self.online.clone(), processes, cgroups, asked, blind }
    }

    fn glance(&mut self, expected: &BTreeMap<Pid, Expected>) -> Glance {
        let now = clock::monotonic();
        let taken = clock::now();
        let newborn = |(&pid, expected): (&Pid, &Expected)| {
            let age = now.0.checked_sub(expected.born.0).filter(|&age| age <= ProcessId::NUMBER_RESTS.0)?;
            let mask = affinity::get(Tid(pid.0)).ok().filter(|mask| *mask != expected.mask)?;
            let start = StartTime(taken.since_boot.0.saturating_sub(age) / self.ns_per_tick);
            Some(Newborn { id: ProcessId { pid, start }, mask })
        };
        let newborns: Vec<Newborn> = expected.iter().filter_map(newborn).collect();
        self.just_born = newborns.iter().map(|newborn| newborn.id).collect();
        Glance { taken, online: self.online.clone(), newborns }
    }

    fn apply(&mut self, action: &Action) -> Outcome {
        let thread = action.thread;
        // Its number may belong to another by now, unless it was given out a moment ago. Between this look and the next
        // line it may still change hands; that other thread's own job, or none, puts its mask right in the next cycle.
        let is_there = |stat: Stat| stat.start == thread.start && !matches!(stat.state, 'Z' | 'X');
        if !self.just_born.contains(&thread.process)
            && !self.proc.thread_stat(thread.process.pid, thread.tid).is_ok_and(is_there)
        {
            return Outcome::Gone;
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
        let Self { proc, systemd, bystanders, .. } = self;
        Site { proc, tree: &tree, systemd, bystanders }.carry_out(&action.change)
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
