//! Tests what cpusets can do on this machine, with a temporary cpuset.
//!
//! A new process gets a mask with one CPU, is moved into a cpuset with another CPU, and then the cpuset gets
//! both CPUs. If affinity survives cpuset writes, the process is back on the first CPU. Then a cpuset in the place
//! of best-effort jobs gets idle priority, and a cpuset is frozen. The process ends with pjwd. The next test
//! removes the leftovers of a killed pjwd.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid as RawPid;
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetOutcome, CpusetSpec, JobCpuset};
use pjw_core::ids::{Pid, ProcessId, Tid, Uid};
use pjw_core::own_cgroups::{CgroupPlace, OwnCgroupNames};

use crate::cpuset::{CpusetContext, UnrelatedThreads, apply_change, remove_orphaned_twins};
use crate::sys::{affinity, version};
use crate::{cgroup::CpusetMount, proc::procfs::ProcDir, systemd::SystemdClient};

/// Prefix of the test cpuset's name, before the process id of pjwd. No cpuset of a job has such a name: a
/// `-` in a job's name is escaped.
const NAME_PREFIX: &str = "probe-";
/// The maximum time for which the removal of a test cpuset is tried.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// What the test with a temporary cpuset has found out: whether affinity masks survive a change of the cpuset, and
/// whether a job can have idle priority and can be frozen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CpusetTestResult {
    /// Whether threads keep their affinity masks when their cpuset changes.
    pub(super) affinity_persists: bool,
    /// Whether `affinity_persists` was measured. If false, `affinity_persists` follows from the kernel's version.
    pub(super) measured: bool,
    /// Whether a job can have idle priority. The error is the reason why not, as text for users.
    pub(super) idle: Result<(), String>,
    /// Whether a job can be frozen.
    pub(super) can_freeze: bool,
}

/// Tests what cpusets can do on this machine: creates a temporary cpuset in `hierarchy`, changes the settings of the
/// cpuset, and removes the cpuset. `own_cgroups` has the names of the cgroups in which the cpuset is created.
/// `creator` says whether systemd or pjwd creates the cpuset.
///
/// # Errors
/// The reason why no cpuset can be created, as text for users.
pub(super) fn test_cpusets(
    hierarchy: &CpusetMount,
    own_cgroups: &OwnCgroupNames,
    creator: CgroupCreator,
) -> Result<CpusetTestResult, String> {
    let mut proc = ProcDir::open(Path::new("/proc")).map_err(failed("/proc can't be opened"))?;
    let mut systemd = SystemdClient::default();
    let mut unrelated_threads = UnrelatedThreads::new(version::affinity_survives_by_version());
    remove_leftover_test_cpusets(
        &mut CpusetContext { proc: &mut proc, hierarchy, systemd: &mut systemd, own_cgroups },
        &mut unrelated_threads,
        creator,
    );
    let sleeping_process =
        SleepingProcess::start().map_err(failed("no process can be created for the cpuset test"))?;
    let stat = proc.thread_stat(sleeping_process.pid, Tid(sleeping_process.pid.0));
    let start = stat.map_err(failed("the process of the cpuset test can't be read"))?.start;
    let process = ProcessId { pid: sleeping_process.pid, start };
    let all = hierarchy.root().effective_cpus().map_err(failed("the root cpuset can't be read"))?;
    let cpuset_at = |place| job_cpuset(own_cgroups, creator, std::process::id(), place, all.clone());
    let (job_cpuset, mut besteffort) = (cpuset_at(CgroupPlace::Usual)?, cpuset_at(CgroupPlace::Besteffort)?);
    let mut cpuset_test = CpusetTest {
        proc,
        hierarchy,
        systemd,
        own_cgroups,
        unrelated_threads,
        job_cpuset,
        sleeping_process,
        process,
    };
    let (affinity_persists, measured) = match (all.first(), all.last()) {
        (Some(first), Some(last)) if first != last => {
            (cpuset_test.test_affinity_persists(&CpuSet::from(first), &CpuSet::from(last))?, true)
        }
        (Some(_), _) => {
            cpuset_test.set_cpus(&all)?;
            (version::affinity_survives_by_version(), false)
        }
        _ => return Err("the root cpuset is empty".to_owned()),
    };
    // systemd creates no scope without a process, and the last test moves the process into another scope. Elsewhere a
    // cgroup needs no process.
    let can_freeze = if creator == CgroupCreator::Systemd {
        let usual = cpuset_test.job_cpuset.clone();
        cpuset_test.freeze_and_thaw(usual)
    } else {
        let can_freeze = cpuset_test.freeze_and_thaw(besteffort.clone());
        cpuset_test.remove(&besteffort);
        can_freeze
    };
    besteffort.spec.idle = true;
    let idle = cpuset_test.create(besteffort.clone());
    if idle.is_ok() && creator == CgroupCreator::Systemd {
        cpuset_test.remove(&cpuset_test.job_cpuset.clone());
        cpuset_test.job_cpuset = besteffort;
    } else {
        cpuset_test.remove(&besteffort);
    }
    Ok(CpusetTestResult { affinity_persists, measured, idle, can_freeze })
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> String {
    move |errno| format!("{what}: {errno}")
}

/// Returns the description of the test cpuset of the pjwd with the pid `pjwd_pid`, with the PUs `cpus`. `creator` says
/// whether systemd or pjwd creates the cpuset. `place` says whether it is among the cpusets of besteffort jobs.
///
/// # Errors
/// If the name of the test cpuset is no valid job id.
fn job_cpuset(
    own_cgroups: &OwnCgroupNames,
    creator: CgroupCreator,
    pjwd_pid: u32,
    place: CgroupPlace,
    cpus: CpuSet,
) -> Result<JobCpuset, String> {
    let name = format!("{NAME_PREFIX}{pjwd_pid}");
    let job = name.parse().map_err(|_| "the test cpuset has an invalid name".to_owned())?;
    let path = own_cgroups.path_for_unescaped_name(&name, creator, place);
    Ok(JobCpuset { job, creator, path, spec: CpusetSpec::from_cpus(cpus) })
}

/// Removes the test cpusets that other pjwd processes left behind because they were killed during their tests. In
/// cgroup v1, also removes twins whose cpuset no longer exists: a twin is a cgroup at the same path as a cpuset, in the
/// hierarchy of another controller. Does nothing if systemd creates the cpusets, because an empty scope ends by itself.
fn remove_leftover_test_cpusets(
    context: &mut CpusetContext<'_>,
    unrelated_threads: &mut UnrelatedThreads,
    creator: CgroupCreator,
) {
    if creator == CgroupCreator::Systemd {
        return;
    }
    remove_orphaned_twins(context);
    let own_cgroups = context.own_cgroups;
    let bases = [
        (CgroupPlace::Usual, own_cgroups.default_parent_path()),
        (CgroupPlace::Besteffort, own_cgroups.besteffort_parent_path()),
    ];
    for (place, base) in bases {
        let Some(base) = context.hierarchy.cgroup(&base) else { continue };
        for group in base.children() {
            let name = group.path.rsplit('/').next().unwrap_or_default();
            let pjwd_pid = name.strip_prefix(NAME_PREFIX).and_then(|number| number.parse::<u32>().ok());
            let Some(pjwd_pid) = pjwd_pid.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()) else {
                continue;
            };
            if let Ok(job_cpuset) = job_cpuset(own_cgroups, creator, pjwd_pid, place, CpuSet::new()) {
                apply_change(context, unrelated_threads, &CpusetChange::Remove { job_cpuset });
            }
        }
    }
}

/// A running test with its test cpuset. Dropping this value ends the process, and removes the cpuset.
struct CpusetTest<'a> {
    proc: ProcDir,
    hierarchy: &'a CpusetMount,
    systemd: SystemdClient,
    own_cgroups: &'a OwnCgroupNames,
    unrelated_threads: UnrelatedThreads,
    job_cpuset: JobCpuset,
    sleeping_process: SleepingProcess,
    process: ProcessId,
}

impl CpusetTest<'_> {
    /// Returns whether the kernel keeps the affinity mask of a thread when its cpuset changes. `first` and `last` have
    /// one PU each. Sets the mask of the test process to `first`, and the PUs of the test cpuset to `last`, and then to
    /// both PUs. The kernel has kept the mask if the process then has the mask `first` again.
    ///
    /// # Errors
    /// If a step fails, or if the process has an unexpected mask, as text for users.
    fn test_affinity_persists(&mut self, first: &CpuSet, last: &CpuSet) -> Result<bool, String> {
        let thread = Tid(self.process.pid.0);
        affinity::set_mask(thread, first).map_err(failed("the cpuset test can't set a mask"))?;
        let inside = self.set_cpus(last)?;
        if inside != *last {
            return Err(format!("a process in a cpuset with CPU {last} has the mask {inside}"));
        }
        let both = first.union(last);
        let mask = self.set_cpus(&both)?;
        if mask != *first && mask != both {
            return Err(format!("a process in a cpuset with the CPUs {both} has the mask {mask}"));
        }
        Ok(mask == *first)
    }

    /// Sets the CPUs of the test cpuset, and returns the mask of the process in it.
    fn set_cpus(&mut self, cpus: &CpuSet) -> Result<CpuSet, String> {
        self.job_cpuset.spec.cpus = cpus.clone();
        self.create(self.job_cpuset.clone())?;
        let from = self.proc.cpuset_path(self.process.pid).unwrap_or_default();
        self.make(&CpusetChange::MoveIn { process: self.process, from, to: self.job_cpuset.path.clone() })?;
        affinity::get_mask(Tid(self.process.pid.0)).map_err(failed("the cpuset test can't read a mask"))
    }

    fn create(&mut self, job_cpuset: JobCpuset) -> Result<(), String> {
        self.make(&CpusetChange::Create {
            job_cpuset,
            owner: Uid::ROOT,
            initial_processes: vec![self.process],
        })
    }

    fn freeze_and_thaw(&mut self, mut job_cpuset: JobCpuset) -> bool {
        let mut set_frozen = |frozen| {
            job_cpuset.spec.frozen = frozen;
            self.create(job_cpuset.clone()).is_ok()
        };
        set_frozen(true) && set_frozen(false)
    }

    /// Removes the cgroup of the test cpuset `job_cpuset`. If that fails, tries again for up to 2 s, and then logs a
    /// warning.
    fn remove(&mut self, job_cpuset: &JobCpuset) {
        let remove = CpusetChange::Remove { job_cpuset: job_cpuset.clone() };
        let deadline = Instant::now() + REMOVAL_TIMEOUT;
        while let Err(why) = self.make(&remove) {
            if Instant::now() >= deadline {
                tracing::warn!(
                    cgroup = job_cpuset.path,
                    why,
                    "the cgroup of the cpuset test could not be removed"
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn make(&mut self, change: &CpusetChange) -> Result<(), String> {
        let Self { proc, hierarchy, systemd, own_cgroups, unrelated_threads, .. } = self;
        let context = &mut CpusetContext { proc, hierarchy, systemd, own_cgroups };
        match apply_change(context, unrelated_threads, change) {
            CpusetOutcome::Done { .. } => Ok(()),
            CpusetOutcome::Gone => Err("the process of the cpuset test ended early".to_owned()),
            CpusetOutcome::Refused { reason } | CpusetOutcome::NotMoved { reason } => Err(reason),
            CpusetOutcome::Delayed => Err("the change of the cpuset takes too long".to_owned()),
        }
    }
}

impl Drop for CpusetTest<'_> {
    fn drop(&mut self) {
        self.sleeping_process.end();
        self.remove(&self.job_cpuset.clone());
    }
}

/// A process that only sleeps, and ends with its parent.
struct SleepingProcess {
    pid: Pid,
    /// `None` after the process was reaped.
    child: Option<RawPid>,
}

impl SleepingProcess {
    /// Forks a child process that sleeps until it is killed. The kernel kills the process when the calling thread ends.
    fn start() -> Result<Self, Errno> {
        let pjwd_pid = std::process::id();
        // SAFETY: the child calls only prctl, getppid, pause and _exit, which are async-signal-safe. Locks
        // that other threads held during the fork do not matter.
        let child = Errno::result(unsafe { libc::fork() })?;
        if child == 0 {
            // SAFETY: as above; none of these calls touches memory of this process.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64);
                while u32::try_from(libc::getppid()) == Ok(pjwd_pid) {
                    libc::pause();
                }
                libc::_exit(0);
            }
        }
        let pid = u32::try_from(child).map_err(|_| Errno::ESRCH)?;
        Ok(Self { pid: Pid(pid), child: Some(RawPid::from_raw(child)) })
    }

    fn end(&mut self) {
        if let Some(pid) = self.child.take() {
            // No other code reaps this process, so the id is not reused.
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

impl Drop for SleepingProcess {
    fn drop(&mut self) {
        self.end();
    }
}
