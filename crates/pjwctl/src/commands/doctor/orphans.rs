//! Finds the jobs of a pjwd that has ended, for example because it was killed. Their processes are still in the cgroups
//! that this pjwd made.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetHierarchy, LeftoverCpuset};
use pjw_core::diagnosis::OrphanedJob;
use pjw_core::ids::{Pid, ProcessId, Uid};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::scan::ScanScope;
use pjw_core::snapshot::{Observed, Process, Snapshot};
use pjw_ipc::client::lock_dir;
use pjw_linux::cgroup::{CgroupDir, CgroupMounts, CpusetMount};

use super::scan::{JobScanner, sees_kernel_threads};

/// Finds the jobs whose pjwd has ended. A process of such a job is in the cgroup that this pjwd made for the job, or in
/// a cgroup of a batch system whose cpuset this pjwd wrote. Only a pjwd of root makes cgroups. `snapshot` is a scan of
/// all processes, `mounts` has the mounted cgroup hierarchies, and `kind` says who makes the cgroups of jobs on this
/// machine.
///
/// The result is empty if it is unknown which cgroups the running pjwd use: [`names_of_running_daemons`].
pub(super) fn find_orphaned_jobs(
    scanner: &mut JobScanner,
    snapshot: &Snapshot,
    mounts: &CgroupMounts,
    kind: &CpusetHierarchy,
) -> Vec<OrphanedJob> {
    let Some(hierarchy) = CpusetMount::from_mounts(mounts) else { return Vec::new() };
    let Some(running) = names_of_running_daemons(snapshot, |process| scanner.is_daemon(process)) else {
        return Vec::new();
    };
    let processes: Vec<&Process> = snapshot.processes.values().filter_map(Observed::present).collect();
    let creator = match kind {
        CpusetHierarchy::Systemd => CgroupCreator::Systemd,
        CpusetHierarchy::Unified | CpusetHierarchy::Legacy | CpusetHierarchy::Unavailable { .. } => {
            CgroupCreator::Warden
        }
    };
    let mut orphaned = Vec::new();
    for daemon in daemons_with_cgroups(&hierarchy.root()).into_iter().filter(|name| !running.contains(name)) {
        for found in scanner.list_job_cpusets(&daemon) {
            let inside = processes.iter().filter(|process| process.is_in_cgroup(&found.path));
            let inside: Vec<(ProcessId, Uid)> = inside.map(|process| (process.id, process.uid)).collect();
            let cgroup = hierarchy.cgroup(&found.path);
            let cpus = cgroup.and_then(|cgroup| cgroup.effective_cpus().ok()).unwrap_or_default();
            orphaned.extend(orphaned_job(&daemon, creator, found, &inside, cpus));
        }
    }
    orphaned
}

/// Returns the names of the cgroups of each pjwd that may have left cgroups: those that exist below `root`, the root of
/// the hierarchy. The usual names are always in the result, because a pjwd may only have written cpusets of a batch
/// system.
fn daemons_with_cgroups(root: &CgroupDir) -> Vec<OwnCgroupNames> {
    let mut daemons = vec![OwnCgroupNames::default()];
    for name in root.children().iter().filter_map(|group| OwnCgroupNames::from_cgroup_path(&group.path)) {
        if !daemons.contains(&name) {
            daemons.push(name);
        }
    }
    daemons
}

/// Returns the job of the cpuset `found`. `daemon` has the names of the cgroups of the pjwd that left the cpuset,
/// `creator` says who makes its cgroups, `inside` are the processes in the cgroup with their users, and `cpus` are the
/// effective PUs (logical CPUs) of the cpuset. `None` if the cgroup has no process, if it is not the cgroup of a job,
/// or if another pjwd wrote the cpuset.
fn orphaned_job(
    daemon: &OwnCgroupNames,
    creator: CgroupCreator,
    found: LeftoverCpuset,
    inside: &[(ProcessId, Uid)],
    cpus: CpuSet,
) -> Option<OrphanedJob> {
    let &(_, first_user) = inside.first()?;
    if found.other_writer.is_some() {
        return None;
    }
    let id = match found.scheduler_cpuset {
        Some(cpuset) => cpuset.job,
        None => daemon.job_at_path(&found.path, creator)?.0,
    };
    Some(OrphanedJob {
        id,
        owner: found.owner.unwrap_or(first_user),
        daemon: daemon.clone(),
        cgroup: found.path,
        cpus,
        processes: inside.iter().map(|(process, _)| *process).collect(),
    })
}

/// Returns the names of the cgroups of all running pjwd of root. `snapshot` is a scan of all processes, and `is_daemon`
/// returns whether a process is a pjwd that serves jobs. `None` in each of these cases:
///
/// - The open files of a pjwd can't be read. Only root can read them.
/// - The scan found no kernel thread. It then misses processes of root: `/proc` hides them (mount option `hidepid=`),
///   or the caller is in a PID namespace of its own, as in a container.
/// - The scan is incomplete.
fn names_of_running_daemons(
    snapshot: &Snapshot,
    is_daemon: impl Fn(&Process) -> bool,
) -> Option<Vec<OwnCgroupNames>> {
    if snapshot.scope != ScanScope::Full || !sees_kernel_threads(snapshot) {
        return None;
    }
    let lock_directory = lock_dir(Uid::ROOT.0);
    let lock_directory = lock_directory.canonicalize().unwrap_or(lock_directory);
    let processes = snapshot.processes.values().filter_map(Observed::present);
    let daemons = processes.filter(|process| process.uid == Uid::ROOT && is_daemon(process));
    let mut names = Vec::new();
    for daemon in daemons {
        let directories = directories_of_open_files(daemon.id.pid).ok()?;
        names.extend(directories.iter().map(|directory| names_by_directory(directory, &lock_directory)));
    }
    Some(names)
}

/// Returns the names of the cgroups of a pjwd that has a file open in `directory`. A pjwd without `--beside` holds its
/// lock file open, in `lock_directory`. Any pjwd holds its journal open, in its state directory. With `--beside`, the
/// names contain a hash of the path of this directory. For another directory, these are names that no pjwd uses.
fn names_by_directory(directory: &Path, lock_directory: &Path) -> OwnCgroupNames {
    if directory == lock_directory {
        return OwnCgroupNames::default();
    }
    OwnCgroupNames::for_additional_daemon(directory.as_os_str().as_bytes())
}

/// Returns the directories of all files that the process has open. Empty if the process has ended.
///
/// # Errors
/// If the open files can't be read, for example because the process belongs to another user.
fn directories_of_open_files(pid: Pid) -> io::Result<BTreeSet<PathBuf>> {
    let entries = match std::fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let mut directories = BTreeSet::new();
    for entry in entries.flatten() {
        match std::fs::read_link(entry.path()) {
            // The path of a deleted file has " (deleted)" at its end.
            Ok(file) if file.is_absolute() => directories.extend(file.parent().map(Path::to_owned)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // A socket or a pipe has no path, nor has a file that was closed meanwhile.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(directories)
}

#[cfg(test)]
mod tests {

    use pjw_core::cpuset_group::{CpusetSpec, JobCpuset};
    use pjw_core::ids::{Comm, StartTime};
    use pjw_core::testing::cpu_set;
    use pjw_core::time::{Moment, Nanos, UnixMillis};

    use super::*;

    fn leftover(path: &str) -> LeftoverCpuset {
        LeftoverCpuset {
            path: path.to_owned(),
            owner: None,
            origin_cgroup: None,
            scheduler_cpuset: None,
            other_writer: None,
        }
    }

    fn process(pid: u32, uid: u32) -> (ProcessId, Uid) {
        (ProcessId { pid: Pid(pid), start: StartTime(1) }, Uid(uid))
    }

    #[test]
    fn the_job_of_a_leftover_cpuset_is_named_by_its_path_or_by_its_mark() {
        let beside = OwnCgroupNames::for_additional_daemon(b"/tmp/state");
        let inside = [process(7, 1001), process(8, 0)];
        let job_of = |daemon: &OwnCgroupNames, creator, found, inside: &[_]| {
            orphaned_job(daemon, creator, found, inside, cpu_set("1"))
        };
        let path = format!("{}/n1", beside.default_parent_path());
        let job = job_of(&beside, CgroupCreator::Warden, leftover(&path), &inside).unwrap();
        assert_eq!((job.id.to_string(), job.owner), ("manual:n1".to_owned(), Uid(1001)));
        assert_eq!((&job.cgroup, &job.daemon, &job.cpus), (&path, &beside, &cpu_set("1")));
        assert_eq!(job.processes, inside.map(|(process, _)| process));
        assert_eq!(job_of(&beside, CgroupCreator::Warden, leftover(&path), &[]), None, "no process is in it");

        let (alone, scope) = (OwnCgroupNames::default(), leftover("/pjw.slice/pjw-n1.scope"));
        let owned = LeftoverCpuset { owner: Some(Uid(1002)), ..scope };
        let job = job_of(&alone, CgroupCreator::Systemd, owned, &inside).unwrap();
        assert_eq!((job.id.to_string(), job.owner), ("manual:n1".to_owned(), Uid(1002)));

        let path = "/slurmstepd.scope/job_7";
        let spec = CpusetSpec::from_cpus(cpu_set("1"));
        let (id, creator) = ("slurm:7".parse().unwrap(), CgroupCreator::Scheduler);
        let written = JobCpuset { job: id, creator, path: path.to_owned(), spec };
        let marked = LeftoverCpuset { scheduler_cpuset: Some(written), ..leftover(path) };
        let job = job_of(&alone, CgroupCreator::Warden, marked.clone(), &inside).unwrap();
        assert_eq!(job.id.to_string(), "slurm:7");
        let other = LeftoverCpuset { other_writer: Some("pjw_0123456789abcdef".to_owned()), ..marked };
        assert_eq!(job_of(&alone, CgroupCreator::Warden, other, &inside), None, "another pjwd wrote it");
    }

    /// A process of root with the name `comm`, as a scan finds it.
    fn process_of_root(pid: u32, comm: &str, is_kernel_thread: bool) -> Process {
        Process { comm: Comm::from(comm), is_kernel_thread, ..pjw_core::testing::process(pid, 0) }
    }

    fn full_scan(processes: Vec<Process>) -> Snapshot {
        let taken_at = Moment { since_boot: Nanos(1), wall_clock: UnixMillis(0) };
        let processes = processes.into_iter().map(|read| (read.id.pid, Observed::Present(read)));
        Snapshot::of_processes(ScanScope::Full, taken_at, cpu_set("0-1"), processes.collect())
    }

    #[test]
    fn it_is_unknown_which_daemons_run_if_processes_of_root_are_hidden_or_were_not_read() {
        let running_names = |snapshot: &Snapshot| {
            names_of_running_daemons(snapshot, |found| found.comm == Comm::from("pjwd"))
        };
        // The open files of the test itself can be read by any user.
        let daemon = || process_of_root(std::process::id(), "pjwd", false);
        let kernel_thread = || process_of_root(2, "kthreadd", true);
        assert_eq!(running_names(&full_scan(vec![])), None, "hidepid=2 hides all of root");
        assert_eq!(running_names(&full_scan(vec![daemon()])), None, "as in a container");
        assert_eq!(running_names(&full_scan(vec![kernel_thread()])), Some(vec![]), "none runs");
        let names = running_names(&full_scan(vec![kernel_thread(), daemon()]));
        assert!(names.is_some(), "the open files of the daemon can be read");

        let mut incomplete = full_scan(vec![kernel_thread()]);
        incomplete.scope = ScanScope::Partial(BTreeSet::from([Pid(2)]));
        assert_eq!(running_names(&incomplete), None, "pjwd may be among the others");
    }

    #[test]
    fn a_running_daemon_is_recognised_by_the_directories_of_its_open_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let _journal = std::fs::File::create(path.join("journal.jsonl")).unwrap();
        std::fs::remove_file(path.join("journal.jsonl")).unwrap();
        let directories = directories_of_open_files(Pid(std::process::id())).unwrap();
        assert!(directories.contains(&path), "{directories:?}");

        let (lock, other) =
            (Path::new("/run/pjwd-lock"), OwnCgroupNames::for_additional_daemon(b"/tmp/state"));
        assert_eq!(names_by_directory(lock, lock), OwnCgroupNames::default());
        assert_eq!(names_by_directory(Path::new("/tmp/state"), lock), other);
        // No process has the largest possible pid plus one.
        assert_eq!(directories_of_open_files(Pid(4_194_305)).unwrap(), BTreeSet::new());
    }
}
