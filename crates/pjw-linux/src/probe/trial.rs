//! A wall of the warden's own, to see that one can be made and what a thread's mask is worth in it.
//!
//! A process that does nothing is told to keep to one CPU, walled in on another, and given both: where masks last, it is
//! back on its own one. The process dies with the warden, and what a killed warden left is removed by the next.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid as RawPid;
use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, ProcessId, Tid};
use pjw_core::wall::{Bounds, Mason, OWN_DIRECTORY, SLICE, Wall, WallChange, WallOutcome};

use crate::affinity;
use crate::procfs::Proc;
use crate::systemd::Manager;
use crate::walls::{Bystanders, Site, Tree};

/// The wall of a trial, with the warden's number behind it. No job's wall is named so: a `-` in a job's name is escaped.
const NAME: &str = "probe-";
const PATIENCE: Duration = Duration::from_secs(2);

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Whether a mask outlives a change of the cpuset.
    pub(super) masks_last: bool,
    /// Whether that was tried; otherwise the kernel's version tells.
    pub(super) tried: bool,
}

/// Makes a wall and takes it away again, or says why none can be made.
pub(super) fn run(tree: &Tree, mason: Mason) -> Result<Verdict, String> {
    let mut proc =
        Proc::open(Path::new("/proc")).map_err(|errno| format!("/proc can't be opened: {errno}"))?;
    let mut systemd = Manager::default();
    let mut bystanders = Bystanders::new(by_version());
    sweep(&mut Site { proc: &mut proc, tree, systemd: &mut systemd, bystanders: &mut bystanders }, mason);
    let idler =
        Idler::start().map_err(|errno| format!("no process can be made to try a cpuset with: {errno}"))?;
    let stat = proc.thread_stat(idler.pid(), Tid(idler.pid().0));
    let start = stat.map_err(|errno| format!("a process can't be looked at: {errno}"))?.start;
    let process = ProcessId { pid: idler.pid(), start };
    let all = tree
        .top()
        .effective_cpus()
        .map_err(|errno| format!("the cpuset at the top can't be read: {errno}"))?;
    let wall = wall(mason, std::process::id(), all.clone())?;
    let mut trial = Trial { proc, tree, systemd, bystanders, wall, idler, process };
    match (all.first(), all.last()) {
        (Some(first), Some(last)) if first != last => {
            trial.with_two(&CpuSet::from(first), &CpuSet::from(last))
        }
        (Some(_), _) => {
            trial.give(&all)?;
            Ok(Verdict { masks_last: by_version(), tried: false })
        }
        _ => Err("the cpuset at the top is empty".to_owned()),
    }
}

/// Only where nothing can be tried, or before it was.
pub(super) fn by_version() -> bool {
    crate::survey::masks_last_by_version()
}

fn wall(mason: Mason, warden: u32, cpus: CpuSet) -> Result<Wall, String> {
    let job = format!("{NAME}{warden}").parse().map_err(|_| "a probe has no name".to_owned())?;
    let path = match mason {
        Mason::Systemd => format!("/{SLICE}/pjw-{NAME}{warden}.scope"),
        Mason::Warden | Mason::Scheduler => format!("{OWN_DIRECTORY}/{NAME}{warden}"),
    };
    Ok(Wall { job, mason, path, bounds: Bounds::cpus(cpus) })
}

/// Removes what wardens left that were killed in the middle of a trial.
fn sweep(site: &mut Site<'_>, mason: Mason) {
    if mason == Mason::Systemd {
        // Their processes died with them, and an empty scope ends by itself.
        return;
    }
    let Some(base) = site.tree.group(OWN_DIRECTORY) else { return };
    for group in base.children() {
        let name = group.path.rsplit('/').next().unwrap_or_default();
        let warden = name.strip_prefix(NAME).and_then(|number| number.parse::<u32>().ok());
        let Some(warden) = warden.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()) else {
            continue;
        };
        if let Ok(wall) = wall(mason, warden, CpuSet::new()) {
            site.carry_out(&WallChange::Raze { wall });
        }
    }
}

struct Trial<'a> {
    proc: Proc,
    tree: &'a Tree,
    systemd: Manager,
    bystanders: Bystanders,
    wall: Wall,
    idler: Idler,
    process: ProcessId,
}

impl Trial<'_> {
    fn with_two(&mut self, first: &CpuSet, last: &CpuSet) -> Result<Verdict, String> {
        let idler = Tid(self.process.pid.0);
        affinity::set(idler, first).map_err(|errno| format!("a mask can't be set: {errno}"))?;
        let inside = self.give(last)?;
        if inside != *last {
            return Err(format!("a process in a cpuset of CPU {last} may run on {inside}"));
        }
        let both = first.union(last);
        let mask = self.give(&both)?;
        if mask != *first && mask != both {
            return Err(format!("a process in a cpuset of the CPUs {both} may run on {mask}"));
        }
        Ok(Verdict { masks_last: mask == *first, tried: true })
    }

    /// Gives the wall these CPUs and tells where the process inside may run.
    fn give(&mut self, cpus: &CpuSet) -> Result<CpuSet, String> {
        self.wall.bounds.cpus = cpus.clone();
        self.make(&WallChange::Raise { wall: self.wall.clone(), founders: vec![self.process] })?;
        let place = self.proc.cgroups(self.process.pid).unwrap_or_default();
        let marks = pjw_core::snapshot::Marks { cgroups: place, ..Default::default() };
        let from = marks.cpuset_path().unwrap_or_default().to_owned();
        self.make(&WallChange::Admit { process: self.process, from, to: self.wall.path.clone() })?;
        affinity::get(Tid(self.process.pid.0)).map_err(|errno| format!("a mask can't be read: {errno}"))
    }

    fn make(&mut self, change: &WallChange) -> Result<(), String> {
        let Self { proc, tree, systemd, bystanders, .. } = self;
        match (Site { proc, tree, systemd, bystanders }).carry_out(change) {
            WallOutcome::Done { .. } => Ok(()),
            WallOutcome::Gone => Err("a process that was to try a cpuset ended at once".to_owned()),
            WallOutcome::Refused { hint } => Err(hint),
        }
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        self.idler.end();
        let raze = WallChange::Raze { wall: self.wall.clone() };
        let deadline = Instant::now() + PATIENCE;
        while let Err(why) = self.make(&raze) {
            if Instant::now() >= deadline {
                tracing::warn!(cgroup = self.wall.path, why, "the trial of a cpuset left its cgroup behind");
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A process that does nothing, and dies with the one that made it.
struct Idler(Option<RawPid>, Pid);

impl Idler {
    fn start() -> Result<Self, Errno> {
        let warden = std::process::id();
        // SAFETY: the child calls nothing but prctl, getppid, pause and _exit, which are async-signal-safe: it is sound
        // whatever the other threads held when it was made.
        let child = Errno::result(unsafe { libc::fork() })?;
        if child == 0 {
            // SAFETY: as above; none of these touches memory of ours.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                while u32::try_from(libc::getppid()) == Ok(warden) {
                    libc::pause();
                }
                libc::_exit(0);
            }
        }
        let pid = u32::try_from(child).map_err(|_| Errno::ESRCH)?;
        Ok(Self(Some(RawPid::from_raw(child)), Pid(pid)))
    }

    fn pid(&self) -> Pid {
        self.1
    }

    fn end(&mut self) {
        if let Some(pid) = self.0.take() {
            // Nobody else reaps it, so the number is still its own.
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

impl Drop for Idler {
    fn drop(&mut self) {
        self.end();
    }
}
