//! Walls: a job behind one can't leave it, somebody who changes it is undone and told of, and nothing of it remains.

mod staying;
mod undone;

use std::path::PathBuf;

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::CgroupOwner;
use pjw_core::cpuset_group::job_cgroup_path;
use pjw_tests::cpusets::find_hierarchy;
use pjw_tests::daemon::{Daemon, Enforcement};
use serde_json::{Value, json};

use crate::processes::{has_cpusets, has_two_cores};

/// A daemon that keeps its jobs by walls; none where that can't be shown, which it says.
fn start_daemon(config: &str) -> Option<Daemon> {
    (has_two_cores() && has_cpusets()).then(|| Daemon::start_with(Enforcement::Cpuset, config))
}

/// The cgroup of a job's wall, as in `/proc/PID/cgroup`.
fn cgroup_of_job(daemon: &Daemon, job: &str) -> String {
    job_cgroup_path(&daemon.job_id(job).parse().unwrap(), CgroupOwner::Warden, false)
}

/// The directory of a cgroup.
fn cgroup_dir(cgroup: &str) -> PathBuf {
    find_hierarchy().unwrap().cgroup(cgroup).unwrap().dir
}

/// What a file of a cgroup says.
fn read_file(cgroup: &str, file: &str) -> String {
    std::fs::read_to_string(cgroup_dir(cgroup).join(file)).unwrap().trim().to_owned()
}

/// Writes a file of a cgroup, as somebody else might.
fn write_file(cgroup: &str, file: &str, text: &impl ToString) {
    std::fs::write(cgroup_dir(cgroup).join(file), text.to_string()).unwrap();
}

/// Moves a process, as somebody else might.
fn move_process(pid: u32, cgroup: &str) {
    write_file(cgroup, "cgroup.procs", &pid);
}

/// What happened to a job, in order: the kinds of event, and their sentences.
fn history(daemon: &Daemon, job: &str) -> Vec<(String, String)> {
    let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id(job) })).unwrap();
    let field = |event: &Value, name: &str| event[name].as_str().unwrap().to_owned();
    let events = reply["history"].as_array().unwrap();
    events.iter().map(|event| (field(event, "event"), field(event, "text"))).collect()
}

/// What keeps a job, as `status` says.
fn enforcement(daemon: &Daemon, job: &str) -> String {
    daemon.job(job).unwrap().enforcement
}

/// The sentences of the warnings with this code about a job.
fn warning_texts(daemon: &Daemon, code: &str, job: &str) -> Vec<String> {
    let id = daemon.job_id(job);
    let warnings = daemon.status().warnings.into_iter();
    warnings.filter(|warning| warning.code == code && warning.job == id).map(|warning| warning.text).collect()
}

/// Every CPU of the machine.
fn all_cpus(daemon: &Daemon) -> CpuSet {
    daemon.status().node.cpus.parse().unwrap()
}
