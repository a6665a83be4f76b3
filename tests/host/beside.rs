//! One daemon serves a machine or a user. Another one runs beside it only with `--beside`, with cgroups of its own.

use std::io;

use pjw_core::cpuset_group::CgroupOwner;
use pjw_ipc::wire::Status;
use pjw_tests::cpusets::cgroup_of_process;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::private_daemon::PrivateDaemon;
use pjw_tests::programs::program_dir;
use serde_json::{Value, json};

use crate::processes::{Shell, has_cpusets, has_two_cores, masks};

fn status(daemon: &PrivateDaemon) -> Status {
    let mut reply: Value = daemon.call("GetStatus", &json!({})).unwrap();
    serde_json::from_value(reply["status"].take()).unwrap()
}

#[test]
fn two_daemons_beside_each_other_keep_jobs_of_one_name_in_cgroups_of_their_own() {
    if !has_two_cores() || !has_cpusets() {
        return;
    }
    let first = Daemon::start_with(Enforcement::Cpuset, "");
    let mut second = PrivateDaemon::new(program_dir(), "enforcement = \"cpuset\"\n").unwrap();
    second.start(&[], || Ok::<(), io::Error>(())).unwrap();
    let shells = [Shell::start(), Shell::start()];
    let before = masks(&shells.each_ref().map(Shell::pid));
    let job = first.job_id("a");
    let mut cgroups = Vec::new();
    for (daemon, shell) in [&*first, &second].into_iter().zip(&shells) {
        let request = json!({ "job": job, "cores": 1, "pids": [shell.pid()] });
        daemon.call::<Value>("Assign", &request).unwrap();
        let own = daemon.own_cgroups().unwrap();
        let cgroup = own.job_path(&job.parse().unwrap(), CgroupOwner::Warden, false);
        assert_eq!(cgroup_of_process(shell.pid()), Some(cgroup.clone()));
        let warnings = status(daemon).warnings;
        let warning = warnings.iter().find(|warning| warning.code == "beside").unwrap();
        assert!(warning.text.contains(&own.directory()), "{warning:?}");
        cgroups.push(cgroup);
    }
    assert_ne!(cgroups[0], cgroups[1]);
    // The end of one leaves the cpusets of the other, and each release restores what was there.
    second.call::<Value>("Release", &json!({ "job": job })).unwrap();
    second.kill();
    assert_eq!(cgroup_of_process(shells[0].pid()).as_ref(), Some(&cgroups[0]));
    first.release("a").unwrap();
    assert_eq!(masks(&shells.each_ref().map(Shell::pid)), before);
    assert_eq!(pjw_tests::cpusets::remaining_cgroups(first.tag()), Vec::<std::path::PathBuf>::new());
}
