//! What the tests of walls share: this machine's hierarchy, and real processes in it.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pjw_core::process::{Pid, Tid};
use pjw_core::wall::Bounds;

use super::super::*;
use crate::affinity;
use crate::cgroup::Mounts;

/// The tests share `/pjw`, which comes with the first wall and goes with the last.
static ALONE: Mutex<()> = Mutex::new(());

pub(super) struct Yard {
    pub(super) proc: Proc,
    pub(super) tree: Tree,
    pub(super) systemd: Manager,
    pub(super) bystanders: Bystanders,
    pub(super) all: CpuSet,
    _alone: MutexGuard<'static, ()>,
}

/// The machine's hierarchy for walls of the warden's own.
pub(super) fn yard() -> Option<Yard> {
    yard_of(Mason::Warden)
}

/// The machine's hierarchy, if that is where such a mason builds, this is root, and there are CPUs to choose from.
pub(super) fn yard_of(mason: Mason) -> Option<Yard> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = Tree::find(&Mounts::find()).ok_or("no hierarchy has the controller cpuset");
    let is_systemds = |tree: &Tree| tree.unified && Path::new("/run/systemd/system").exists();
    let found = found.and_then(|tree| match mason {
        _ if !nix::unistd::Uid::effective().is_root() => Err("only root may make cgroups"),
        Mason::Systemd if !is_systemds(&tree) => Err("systemd is not the master of this hierarchy"),
        Mason::Warden if is_systemds(&tree) => Err("systemd is the only writer of this hierarchy"),
        _ if tree.top().effective_cpus().is_ok_and(|cpus| cpus.len() >= 2) => Ok(tree),
        _ => Err("a wall needs two CPUs to choose from"),
    });
    match found {
        Ok(tree) => {
            let all = tree.top().effective_cpus().unwrap();
            let proc = Proc::open(Path::new("/proc")).unwrap();
            let bystanders = Bystanders::new(false);
            Some(Yard { proc, tree, systemd: Manager::default(), bystanders, all, _alone: alone })
        }
        Err(why) => {
            skip(why);
            None
        }
    }
}

/// Tells on stderr itself which test skips what: a test's own output is shown only if it fails.
pub(super) fn skip(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}

impl Yard {
    pub(super) fn first(&self) -> CpuSet {
        CpuSet::from(self.all.first().unwrap())
    }

    pub(super) fn last(&self) -> CpuSet {
        CpuSet::from(self.all.last().unwrap())
    }

    pub(super) fn make(&mut self, change: &WallChange) -> WallOutcome {
        self.site().carry_out(change)
    }

    pub(super) fn site(&mut self) -> Site<'_> {
        let Self { proc, tree, systemd, bystanders, .. } = self;
        Site { proc, tree, systemd, bystanders }
    }

    pub(super) fn raise(&mut self, wall: &Wall) -> WallOutcome {
        self.found(wall, &[])
    }

    pub(super) fn found(&mut self, wall: &Wall, founders: &[ProcessId]) -> WallOutcome {
        self.make(&WallChange::Raise { wall: wall.clone(), founders: founders.to_vec() })
    }

    pub(super) fn open(&mut self, wall: &Wall) -> WallOutcome {
        self.make(&WallChange::Open { wall: wall.clone() })
    }

    pub(super) fn raze(&mut self, wall: &Wall) -> WallOutcome {
        self.make(&WallChange::Raze { wall: wall.clone() })
    }

    pub(super) fn id(&mut self, pid: Pid) -> ProcessId {
        ProcessId { pid, start: self.proc.thread_stat(pid, Tid(pid.0)).unwrap().start }
    }

    pub(super) fn home(&mut self, process: ProcessId) -> String {
        moving::whereabouts(&mut self.proc, process).unwrap()
    }

    pub(super) fn admit(&mut self, process: ProcessId, wall: &Wall) -> WallOutcome {
        let from = self.home(process);
        self.make(&WallChange::Admit { process, from, to: wall.path.clone() })
    }

    pub(super) fn send_back(&mut self, process: ProcessId, wall: &Wall, home: &str) -> WallOutcome {
        self.make(&WallChange::Return { process, from: wall.path.clone(), to: home.to_owned() })
    }

    pub(super) fn group(&self, wall: &Wall) -> Group {
        self.tree.group(&wall.path).unwrap()
    }

    pub(super) fn masks(&mut self, process: ProcessId) -> BTreeSet<String> {
        let tids = self.proc.tids(process.pid).unwrap();
        tids.into_iter().map(|tid| affinity::get(tid).unwrap().to_string()).collect()
    }
}

/// No two tests, and no two runs of them, have a wall of the same name.
pub(super) fn wall_of(mason: Mason, name: &str, bounds: Bounds) -> Wall {
    let job = format!("test-{}-{name}", std::process::id()).parse().unwrap();
    let path = pjw_core::wall::own_path(&job, mason, bounds.isolated);
    Wall { job, mason, path, bounds }
}

pub(super) fn wall(name: &str, cpus: &CpuSet) -> Wall {
    wall_of(Mason::Warden, name, Bounds::cpus(cpus.clone()))
}

pub(super) fn isolated(cpus: &CpuSet) -> Bounds {
    Bounds { isolated: true, ..Bounds::cpus(cpus.clone()) }
}

/// A process with several threads.
pub(super) struct Crowd(pub(super) Child);

impl Crowd {
    const THREADS: usize = 4;

    pub(super) fn start(yard: &mut Yard) -> (Self, ProcessId) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "walls::tests::yard::a_process_of_several_threads"]);
        let child = Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        let pid = Pid(child.0.id());
        until("the process has its threads", || {
            let names = yard.proc.tids(pid).unwrap_or_default();
            let crowd = names.iter().filter(|&&tid| {
                yard.proc.thread_stat(pid, tid).is_ok_and(|stat| stat.comm.to_string() == "crowd")
            });
            crowd.count() == Self::THREADS
        });
        let id = yard.id(pid);
        (child, id)
    }

    pub(super) fn end(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "other tests start it as a process of its own"]
fn a_process_of_several_threads() {
    for _ in 0..Crowd::THREADS {
        std::thread::Builder::new()
            .name("crowd".to_owned())
            .spawn(|| {
                loop {
                    std::thread::park();
                }
            })
            .unwrap();
    }
    let _ = std::io::stdin().lines().count();
}

pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(super) fn shown(cpus: &CpuSet) -> BTreeSet<String> {
    BTreeSet::from([cpus.to_string()])
}

pub(super) fn hint(outcome: WallOutcome) -> String {
    match outcome {
        WallOutcome::Refused { hint } => hint,
        other => panic!("not refused: {other:?}"),
    }
}

pub(super) const DONE: WallOutcome = WallOutcome::Done { effective: None };
