//! The state directory is lost: the next daemon finds the cpusets of the earlier one, and they can be undone.

use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use pjw_tests::cpusets::{cgroup_of_process, remaining_cgroups};
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;

use super::undone::MachineState;
use super::{cgroup_of_job, check_kept_by_cpuset, history, prepare_daemon, start_daemon, warning_texts};
use crate::processes::{KillOnDrop, Shell, core_count, mask};

/// A shell with a child that is in a job's cpuset, and the daemon that made the cpuset.
struct Lost {
    daemon: Daemon,
    shell: Shell,
    child: u32,
    before: MachineState,
    cpus: String,
    cgroup: String,
    _end: KillOnDrop,
}

/// A job, whose daemon was killed and whose record is lost.
fn lost_job() -> Option<Lost> {
    let mut daemon = prepare_daemon("interval = \"50ms\"\n")?;
    let mut shell = Shell::start();
    let before = MachineState::read_before();
    daemon.spawn();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap().to_string();
    let cgroup = cgroup_of_job(&daemon, "a");
    check_kept_by_cpuset(&daemon, "a");
    let child = shell.background("sleep 1000");
    daemon.lose_state();
    Some(Lost { daemon, child, shell, before, cpus, cgroup, _end: KillOnDrop(child) })
}

impl Lost {
    fn check_undone(&self) {
        assert_eq!(remaining_cgroups(self.daemon.tag()), Vec::<std::path::PathBuf>::new());
        self.before.wait_until_restored(&self.daemon);
        let of = |pid| (mask(pid), cgroup_of_process(pid));
        assert_eq!(of(self.child), of(self.shell.pid()), "the child was born in the cpuset");
    }
}

#[test]
fn the_next_daemon_gives_the_cores_of_a_lost_record_to_no_other_job() {
    let Some(mut lost) = lost_job() else { return };
    lost.daemon.spawn();
    let job = lost.daemon.job("a").unwrap();
    assert_eq!((&job.cpus, job.enforcement.as_str()), (&lost.cpus, "cpuset"));
    assert_eq!(job.processes, 2);
    for pid in [lost.shell.pid(), lost.child] {
        assert_eq!(cgroup_of_process(pid).as_ref(), Some(&lost.cgroup));
    }
    assert_eq!(history(&lost.daemon, "a")[0].0, "recovered");
    assert_eq!(warning_texts(&lost.daemon, "recovered", "a").len(), 1);
    assert!(lost.daemon.log().contains(&format!("found in {}", lost.cgroup)), "{}", lost.daemon.log());
    let other = Shell::start();
    let cores = core_count();
    assert!(lost.daemon.assign("b", cores, &[other.pid()]).is_err(), "all cores include those of job a");
    let others = lost.daemon.assign("b", cores - 1, &[other.pid()]).unwrap();
    assert!(!others.intersects(&lost.cpus.parse().unwrap()), "{others} and {}", lost.cpus);
    let done = lost.daemon.pjwctl(&["release", "--all"]);
    assert!(done.status.success(), "{done:?}");
    lost.check_undone();
}

#[test]
fn release_all_without_a_daemon_and_a_record_undoes_the_cpusets() {
    let Some(lost) = lost_job() else { return };
    let done = lost.daemon.release_all_command().output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let stdout = String::from_utf8_lossy(&done.stdout).into_owned();
    assert_eq!(stdout, format!("{} released\n", lost.daemon.job_id("a")));
    lost.check_undone();
}

#[test]
fn a_mask_that_no_record_explains_is_named_with_the_command_that_widens_it() {
    if core_count() < 3 {
        // A cpuset of two cores is needed, so that a mask can be narrower, and a machine of three, so that it is a
        // cpuset.
        pjw_tests::skipping::skip("this machine has fewer than three cores");
        return;
    }
    let Some(mut daemon) = start_daemon("") else { return };
    let shell = Shell::start();
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    affinity::set_mask(Tid(shell.pid()), &cpus.first().unwrap().into()).unwrap();
    daemon.lose_state();
    let done = daemon.release_all_command().output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && stderr.contains(&format!(" {} widens it", shell.pid())), "{done:?}");
}

#[test]
fn an_empty_cpuset_of_a_lost_record_is_removed_at_the_next_start() {
    let Some(Lost { mut daemon, shell, cgroup, _end, .. }) = lost_job() else { return };
    drop((shell, _end));
    wait_until("the cgroup is empty", || super::read_file(&cgroup, "cgroup.procs").is_empty());
    assert_eq!(remaining_cgroups(daemon.tag()).len(), 1);
    daemon.spawn();
    wait_until("the cgroup is removed", || remaining_cgroups(daemon.tag()).is_empty());
    assert!(daemon.job("a").is_none() && warning_texts(&daemon, "recovered", "a").is_empty());
}
