//! What the tests of cpusets share: the machine's cpuset hierarchy, and real processes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::MutexGuard;

use pjw_core::cpuset_group::CpusetSpec;
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::job::JobId;
use pjw_core::own_cgroups::{CgroupPlace, OwnCgroupNames};

use crate::cgroup::{CgroupMounts, CpusetMount};
use crate::cpuset::*;
use crate::proc::procfs::ProcDir;
use crate::sys::affinity;
use crate::systemd::SystemdClient;
pub(super) use crate::tests::skip;
use crate::tests::{alone_with_cpusets, print_line, until_true};

/// The owner of the jobs.
pub(super) const OWNER: Uid = Uid(1007);

pub(super) struct Fixture {
    pub(super) proc: ProcDir,
    pub(super) hierarchy: CpusetMount,
    pub(super) systemd: SystemdClient,
    pub(super) unrelated_threads: UnrelatedThreads,
    /// The names of the cgroups of the daemon whose changes are tested.
    pub(super) own_cgroups: OwnCgroupNames,
    pub(super) all: CpuSet,
    _alone: MutexGuard<'static, ()>,
}

/// A fixture for cpusets in the warden's own cgroups.
pub(super) fn fixture() -> Option<Fixture> {
    fixture_of(CgroupCreator::Warden)
}

/// A fixture for cpusets of this owner. `None`, with a printed reason, if the owner does not manage this
/// hierarchy, this user is not root, or there are fewer than two CPUs.
pub(super) fn fixture_of(creator: CgroupCreator) -> Option<Fixture> {
    let alone = alone_with_cpusets();
    let found =
        CpusetMount::from_mounts(&CgroupMounts::read()).ok_or("no hierarchy has the controller cpuset");
    let is_systemds =
        |hierarchy: &CpusetMount| hierarchy.is_unified && Path::new("/run/systemd/system").exists();
    let found = found.and_then(|hierarchy| match creator {
        _ if !nix::unistd::Uid::effective().is_root() => Err("only root may create cgroups"),
        CgroupCreator::Systemd if !is_systemds(&hierarchy) => Err("systemd does not manage this hierarchy"),
        CgroupCreator::Warden if is_systemds(&hierarchy) => {
            Err("systemd is the only writer of this hierarchy")
        }
        _ if hierarchy.root().effective_cpus().is_ok_and(|cpus| cpus.len() >= 2) => Ok(hierarchy),
        _ => Err("the test needs two CPUs"),
    });
    match found {
        Ok(hierarchy) => {
            let all = hierarchy.root().effective_cpus().unwrap();
            let proc = ProcDir::open(Path::new("/proc")).unwrap();
            let unrelated_threads = UnrelatedThreads::new(false);
            let mut fixture = Fixture {
                proc,
                hierarchy,
                systemd: SystemdClient::default(),
                unrelated_threads,
                own_cgroups: OwnCgroupNames::default(),
                all,
                _alone: alone,
            };
            fixture.remove_cpusets_of_ended_runs();
            Some(fixture)
        }
        Err(why) => {
            skip(why);
            None
        }
    }
}

impl Fixture {
    pub(super) fn first(&self) -> CpuSet {
        CpuSet::from(self.all.first().unwrap())
    }

    pub(super) fn last(&self) -> CpuSet {
        CpuSet::from(self.all.last().unwrap())
    }

    pub(super) fn make(&mut self, change: &CpusetChange) -> CpusetOutcome {
        let (mut context, unrelated_threads) = self.context();
        apply_change(&mut context, unrelated_threads, change)
    }

    pub(super) fn context(&mut self) -> (CpusetContext<'_>, &mut UnrelatedThreads) {
        let Self { proc, hierarchy, systemd, unrelated_threads, own_cgroups, .. } = self;
        (CpusetContext { proc, hierarchy, systemd, own_cgroups }, unrelated_threads)
    }

    pub(super) fn create(&mut self, job_cpuset: &JobCpuset) -> CpusetOutcome {
        self.create_with(job_cpuset, &[])
    }

    pub(super) fn create_with(
        &mut self,
        job_cpuset: &JobCpuset,
        initial_processes: &[ProcessId],
    ) -> CpusetOutcome {
        self.make(&CpusetChange::Create {
            job_cpuset: job_cpuset.clone(),
            owner: OWNER,
            initial_processes: initial_processes.to_vec(),
        })
    }

    pub(super) fn widen(&mut self, job_cpuset: &JobCpuset) -> CpusetOutcome {
        self.make(&CpusetChange::RemoveLimits { job_cpuset: job_cpuset.clone() })
    }

    pub(super) fn remove(&mut self, job_cpuset: &JobCpuset) -> CpusetOutcome {
        self.make(&CpusetChange::Remove { job_cpuset: job_cpuset.clone() })
    }

    /// Removes the cpusets that an earlier run of these tests left behind because it was killed. The tests share their
    /// parents with this run.
    fn remove_cpusets_of_ended_runs(&mut self) {
        for leftover in list_job_cpusets(&self.hierarchy, &self.own_cgroups) {
            let Some((job, place)) = self.own_cgroups.job_at_path(&leftover.path, CgroupCreator::Warden)
            else {
                continue;
            };
            if !is_of_ended_run(&job) {
                continue;
            }
            for group in below(self.hierarchy.cgroup(&leftover.path).unwrap()) {
                for pid in group.processes() {
                    let _ = self.hierarchy.root().write_file("cgroup.procs", &pid.to_string());
                }
            }
            let spec = CpusetSpec {
                idle: place == CgroupPlace::Besteffort,
                isolated: place == CgroupPlace::Partition,
                ..CpusetSpec::from_cpus(CpuSet::new())
            };
            let job_cpuset = JobCpuset { job, creator: CgroupCreator::Warden, path: leftover.path, spec };
            if let CpusetOutcome::Refused { reason } = self.remove(&job_cpuset) {
                print_line(&format!(
                    "a cpuset that an earlier run left behind stays: {}: {reason}",
                    job_cpuset.path
                ));
            }
        }
        remove_orphaned_twins(&mut self.context().0);
    }

    pub(super) fn id(&mut self, pid: Pid) -> ProcessId {
        ProcessId { pid, start: self.proc.thread_stat(pid, Tid(pid.0)).unwrap().start }
    }

    pub(super) fn cgroup_of(&mut self, process: ProcessId) -> String {
        moving::process_cpuset_path(&mut self.proc, process).unwrap()
    }

    pub(super) fn move_in(&mut self, process: ProcessId, job_cpuset: &JobCpuset) -> CpusetOutcome {
        let from = self.cgroup_of(process);
        self.make(&CpusetChange::MoveIn { process, from, to: job_cpuset.path.clone() })
    }

    pub(super) fn move_back(
        &mut self,
        process: ProcessId,
        job_cpuset: &JobCpuset,
        original_cgroup: &str,
    ) -> CpusetOutcome {
        self.make(&CpusetChange::MoveBack {
            process,
            from: job_cpuset.path.clone(),
            to: original_cgroup.to_owned(),
        })
    }

    pub(super) fn group(&self, job_cpuset: &JobCpuset) -> CgroupDir {
        self.hierarchy.cgroup(&job_cpuset.path).unwrap()
    }

    pub(super) fn masks(&mut self, process: ProcessId) -> BTreeSet<String> {
        let tids = self.proc.tids(process.pid).unwrap();
        tids.into_iter().map(|tid| affinity::get_mask(tid).unwrap().to_string()).collect()
    }
}

/// A cgroup and all cgroups below it.
fn below(group: CgroupDir) -> Vec<CgroupDir> {
    let mut found: Vec<CgroupDir> = group.children().into_iter().flat_map(below).collect();
    found.push(group);
    found
}

/// The beginning of the name of each job of these tests. The process id of the run follows. The cgroups are those of a
/// pjwd without `--beside`, so no user may have a job with such a name.
const NAME_PREFIX: &str = "pjw-linux-test-";

/// Whether the name of a job is one of [`job_cpuset_of`], in a run whose process no longer exists.
fn is_of_ended_run(job: &JobId) -> bool {
    let run = job.name().strip_prefix(NAME_PREFIX).and_then(|rest| rest.split('-').next());
    let pid = run.and_then(|run| run.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

/// A cpuset with a name that no other test and no other run uses.
pub(super) fn job_cpuset_of(creator: CgroupCreator, name: &str, spec: CpusetSpec) -> JobCpuset {
    let job = format!("{NAME_PREFIX}{}-{name}", std::process::id()).parse().unwrap();
    let place = if spec.idle {
        CgroupPlace::Besteffort
    } else if spec.isolated {
        CgroupPlace::Partition
    } else {
        CgroupPlace::Usual
    };
    let path = OwnCgroupNames::default().job_path(&job, creator, place);
    JobCpuset { job, creator, path, spec }
}

pub(super) fn job_cpuset(name: &str, cpus: &CpuSet) -> JobCpuset {
    job_cpuset_of(CgroupCreator::Warden, name, CpusetSpec::from_cpus(cpus.clone()))
}

pub(super) fn isolated(cpus: &CpuSet) -> CpusetSpec {
    CpusetSpec { isolated: true, ..CpusetSpec::from_cpus(cpus.clone()) }
}

/// A process with several threads.
pub(super) struct ThreadedProcess(pub(super) Child);

impl ThreadedProcess {
    const THREADS: usize = 4;

    pub(super) fn start(fixture: &mut Fixture) -> (Self, ProcessId) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "cpuset::tests::fixture::a_process_of_several_threads"]);
        let child = Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        let pid = Pid(child.0.id());
        until_true("the process has its threads", || {
            let names = fixture.proc.tids(pid).unwrap_or_default();
            let threaded = names.iter().filter(|&&tid| {
                fixture.proc.thread_stat(pid, tid).is_ok_and(|stat| stat.comm.to_string() == "threaded")
            });
            threaded.count() == Self::THREADS
        });
        let id = fixture.id(pid);
        (child, id)
    }

    pub(super) fn end(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ThreadedProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "other tests start it as a process of its own"]
fn a_process_of_several_threads() {
    for _ in 0..ThreadedProcess::THREADS {
        std::thread::Builder::new()
            .name("threaded".to_owned())
            .spawn(|| {
                loop {
                    std::thread::park();
                }
            })
            .unwrap();
    }
    let _ = std::io::stdin().lines().count();
}

pub(super) fn shown(cpus: &CpuSet) -> BTreeSet<String> {
    BTreeSet::from([cpus.to_string()])
}

pub(super) fn reason(outcome: CpusetOutcome) -> String {
    match outcome {
        CpusetOutcome::Refused { reason } => reason,
        other => panic!("not refused: {other:?}"),
    }
}

pub(super) const DONE: CpusetOutcome = CpusetOutcome::Done { effective: None };

/// The outcome of a change after which the kernel grants these CPUs.
pub(super) fn done_outcome(effective: CpuSet) -> CpusetOutcome {
    CpusetOutcome::Done { effective: Some(effective) }
}
