//! Cpusets: a job can't leave its cpuset, a change by another program is repaired and reported, and no cgroup remains
//! after a release.

mod lost_state;
mod staying;
pub(crate) mod undone;

use std::path::PathBuf;

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::CgroupCreator;
use pjw_core::own_cgroups::CgroupPlace;
use pjw_tests::cpusets::find_hierarchy;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::skipping::skip;
use serde_json::{Value, json};

use crate::processes::{Shell, has_cpusets, has_two_cores, is_installed};

/// Starts a daemon that keeps its jobs by cpusets. `None`, with a report, if this machine has no cpusets or only one
/// core.
fn start_daemon(config: &str) -> Option<Daemon> {
    let mut daemon = prepare_daemon(config)?;
    daemon.spawn();
    Some(daemon)
}

/// The same, without the start. No daemon of another test exists any more when this function returns.
fn prepare_daemon(config: &str) -> Option<Daemon> {
    (has_two_cores() && has_cpusets()).then(|| Daemon::prepare_with(Enforcement::Cpuset, config))
}

/// Returns the cgroup of a job, as in `/proc/PID/cgroup`.
fn cgroup_of_job(daemon: &Daemon, job: &str) -> String {
    daemon.own_cgroups().unwrap().job_path(
        &daemon.job_id(job).parse().unwrap(),
        CgroupCreator::Warden,
        CgroupPlace::Usual,
    )
}

/// Returns the directory of a cgroup.
fn cgroup_dir(cgroup: &str) -> PathBuf {
    find_hierarchy().unwrap().cgroup(cgroup).unwrap().dir
}

/// Reads a file of a cgroup.
fn read_file(cgroup: &str, file: &str) -> String {
    std::fs::read_to_string(cgroup_dir(cgroup).join(file)).unwrap().trim().to_owned()
}

/// Writes a file of a cgroup, as another program might.
fn write_file(cgroup: &str, file: &str, text: &impl ToString) {
    std::fs::write(cgroup_dir(cgroup).join(file), text.to_string()).unwrap();
}

/// Moves a process to a cgroup, as another program might.
fn move_process(pid: u32, cgroup: &str) {
    write_file(cgroup, "cgroup.procs", &pid);
}

/// Returns the events of a job, oldest first: the kind and the text of each.
fn history(daemon: &Daemon, job: &str) -> Vec<(String, String)> {
    let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id(job) })).unwrap();
    let field = |event: &Value, name: &str| event[name].as_str().unwrap().to_owned();
    let events = reply["history"].as_array().unwrap();
    events.iter().map(|event| (field(event, "event"), field(event, "text"))).collect()
}

/// Returns the enforcement of a job, as in its status.
fn enforcement(daemon: &Daemon, job: &str) -> String {
    daemon.job(job).unwrap().enforcement
}

/// Checks that a cpuset keeps the job that the daemon has just made or changed.
#[track_caller]
fn check_kept_by_cpuset(daemon: &Daemon, job: &str) {
    daemon.check_after_reply(&daemon.job_id(job), &"cpuset".to_owned(), || enforcement(daemon, job));
}

/// Returns the texts of the warnings about a job with the code `code`.
fn warning_texts(daemon: &Daemon, code: &str, job: &str) -> Vec<String> {
    let id = daemon.job_id(job);
    let warnings = daemon.status().warnings.into_iter();
    warnings.filter(|warning| warning.code == code && warning.job == id).map(|warning| warning.text).collect()
}

/// Returns every CPU of the machine.
fn all_cpus(daemon: &Daemon) -> CpuSet {
    daemon.status().node.cpus.parse().unwrap()
}

#[test]
fn a_mount_point_whose_name_is_not_utf8_hides_no_cgroups() {
    if !has_two_cores() || !has_cpusets() {
        return;
    }
    if !is_installed("unshare") {
        return skip("unshare is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "m={}/$(printf '\\344') && mkdir $m && mount -t tmpfs none $m && exec \"$0\" \"$@\"",
        dir.path().display()
    );
    let daemon = Daemon::start_by(&["unshare", "--mount", "sh", "-c", &script]);
    let mounts = std::fs::read(format!("/proc/{}/mounts", daemon.pid())).unwrap();
    assert!(mounts.contains(&0xe4), "the mount point is not in the list");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    drop(shell);
}
