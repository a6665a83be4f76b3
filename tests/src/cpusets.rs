//! The cpuset hierarchy in which the tests may make cgroups.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::unistd::Uid;
use pjw_core::cpuset_group::CgroupCreator;
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_linux::cgroup::{CgroupDir, CgroupMounts, CpusetMount};

/// The reason why the tests can't use cpusets on this machine, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoCpusets(pub String);

/// The number of cgroups that this program has made to find out whether it may make cgroups. The number makes their
/// names different, because tests run at the same time.
static PROBES: AtomicU32 = AtomicU32::new(0);

/// Returns the cpuset hierarchy: the mounted cgroup hierarchy with the controller cpuset, in which a daemon makes the
/// cgroups of its jobs. Checks that this process may make cgroups in the hierarchy.
///
/// # Errors
/// If there is no such hierarchy, or if this process may not use it. The error has the reason, as a sentence for the
/// report of a skipped test.
pub fn find_hierarchy() -> Result<CpusetMount, NoCpusets> {
    let unavailable = |why: &str| Err(NoCpusets(why.to_owned()));
    if !Uid::effective().is_root() {
        return unavailable("only root may make cpusets");
    }
    let Some(hierarchy) = CpusetMount::from_mounts(&CgroupMounts::read()) else {
        return unavailable("no cpuset hierarchy is mounted here");
    };
    if hierarchy.is_unified && Path::new("/run/systemd/system").exists() {
        return unavailable("systemd manages the cgroups here: the tests on the virtual machine cover that");
    }
    if hierarchy.root().read_cpuset().is_err() {
        return unavailable("this kernel has no cpusets");
    }
    // In many containers the hierarchy is mounted read-only, or changes are forbidden.
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let probe = hierarchy.mount_point.join(format!("pjw_test_{}_{number}", std::process::id()));
    match std::fs::create_dir(&probe).and_then(|()| std::fs::remove_dir(&probe)) {
        Ok(()) => Ok(hierarchy),
        Err(error) => unavailable(&format!("can't make {}: {error}", probe.display())),
    }
}

/// Returns the path of the cgroup of the process `pid` in the cpuset hierarchy, as in `/proc/PID/cgroup`. `None` if the
/// process has ended.
#[must_use]
pub fn cgroup_of_process(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let fields = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        Some((controllers.to_owned(), path.to_owned()))
    };
    let lines: Vec<(String, String)> = text.lines().filter_map(fields).collect();
    let legacy = lines.iter().find(|(names, _)| names.split(',').any(|name| name == "cpuset"));
    let unified = || lines.iter().find(|(names, _)| names.is_empty());
    legacy.or_else(unified).map(|(_, path)| path.clone())
}

/// Returns the directories of the cgroups that daemons made for jobs, that still exist, and whose names end with `tag`.
/// [`Daemon::tag`](crate::daemon::Daemon::tag) is the end of the names for one daemon.
#[must_use]
pub fn remaining_cgroups(tag: &str) -> Vec<PathBuf> {
    let groups = cgroups_of_daemons().into_iter();
    groups.filter(|group| group.path.ends_with(tag)).map(|group| group.dir).collect()
}

/// Returns the directories of the cgroups that the daemon with the cgroup names `own` made for jobs, and that still
/// exist. The names of the jobs do not matter. The list is empty if no cpuset hierarchy is mounted here.
#[must_use]
pub fn remaining_cgroups_of_daemon(own: &OwnCgroupNames) -> Vec<PathBuf> {
    let creators = [CgroupCreator::Systemd, CgroupCreator::Warden];
    let is_of_job =
        |group: &CgroupDir| creators.iter().any(|creator| own.job_at_path(&group.path, *creator).is_some());
    cgroups_of_daemons().into_iter().filter(is_of_job).map(|group| group.dir).collect()
}

/// Returns the cgroups that daemons made in the cpuset hierarchy: those of jobs, and the parents of these.
fn cgroups_of_daemons() -> Vec<CgroupDir> {
    let Some(hierarchy) = CpusetMount::from_mounts(&CgroupMounts::read()) else { return Vec::new() };
    let mut groups = hierarchy.root().children();
    groups.retain(|group| OwnCgroupNames::from_cgroup_path(&group.path).is_some());
    let below: Vec<_> = groups.iter().flat_map(CgroupDir::children).collect();
    groups.extend(below);
    groups
}
