//! Walls: a job behind one can't leave it, somebody who changes it is undone and told of, and nothing of it remains.

mod staying;
mod undone;

use std::path::PathBuf;

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::CgroupOwner;
use pjw_core::cpuset_group::job_cgroup_path;
use pjw_tests::daemon::{Daemon, Keeping};
use pjw_tests::walls::place;
use serde_json::{Value, json};

use crate::processes::{two_cores, walls};

/// A daemon that keeps its jobs by walls; none where that can't be shown, which it says.
fn daemon(config: &str) -> Option<Daemon> {
    (two_cores() && walls()).then(|| Daemon::keeping(Keeping::Walls, config))
}

/// The cgroup of a job's wall, as in `/proc/PID/cgroup`.
fn cgroup(daemon: &Daemon, job: &str) -> String {
    job_cgroup_path(&daemon.id(job).parse().unwrap(), CgroupOwner::Warden, false)
}

/// The directory of a cgroup.
fn directory(cgroup: &str) -> PathBuf {
    place().unwrap().cgroup(cgroup).unwrap().dir
}

/// What a file of a cgroup says.
fn read(cgroup: &str, file: &str) -> String {
    std::fs::read_to_string(directory(cgroup).join(file)).unwrap().trim().to_owned()
}

/// Writes a file of a cgroup, as somebody else might.
fn write(cgroup: &str, file: &str, text: &impl ToString) {
    std::fs::write(directory(cgroup).join(file), text.to_string()).unwrap();
}

/// Moves a process, as somebody else might.
fn put(pid: u32, cgroup: &str) {
    write(cgroup, "cgroup.procs", &pid);
}

/// What happened to a job, in order: the kinds of event, and their sentences.
fn history(daemon: &Daemon, job: &str) -> Vec<(String, String)> {
    let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.id(job) })).unwrap();
    let word = |event: &Value, name: &str| event[name].as_str().unwrap().to_owned();
    let events = reply["history"].as_array().unwrap();
    events.iter().map(|event| (word(event, "event"), word(event, "text"))).collect()
}

/// What keeps a job, as `status` says.
fn enforcement(daemon: &Daemon, job: &str) -> String {
    daemon.job(job).unwrap().enforcement
}

/// The sentences of the warnings with this code about a job.
fn warnings(daemon: &Daemon, code: &str, job: &str) -> Vec<String> {
    let id = daemon.id(job);
    let warnings = daemon.status().warnings.into_iter();
    warnings.filter(|warning| warning.code == code && warning.job == id).map(|warning| warning.text).collect()
}

/// Every CPU of the machine.
fn everything(daemon: &Daemon) -> CpuSet {
    daemon.status().node.cpus.parse().unwrap()
}
