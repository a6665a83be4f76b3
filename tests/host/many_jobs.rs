//! 200 jobs come and go while their processes fork and die all the time.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;
use pjw_tests::patience::until_true;

use crate::processes::{Shell, cores};

const JOBS: usize = 200;

#[test]
fn two_hundred_jobs_never_share_a_core_and_leak_none() {
    let daemon = Daemon::start("");
    let room = cores().min(8) as usize;
    let mut alive: Vec<(String, Shell)> = Vec::new();
    for n in 0..JOBS {
        if alive.len() == room {
            // The oldest ends: half of them are released, half just die.
            let (name, shell) = alive.remove(0);
            if n % 2 == 0 {
                daemon.release(&name).unwrap();
            }
            drop(shell);
            until_true("its cores are free", || !daemon.status().pool.free.is_empty());
        }
        let mut shell = Shell::start();
        shell.tell("while :; do sleep 0.01; (true); done &");
        let name = format!("manual:j{n}");
        let cpus = daemon.assign(&name, 1, &[shell.pid()]).unwrap();
        assert!(!cpus.is_empty());
        alive.push((name, shell));
        check_disjoint(&daemon);
    }
    drop(alive);
    until_true("all jobs are over", || daemon.status().jobs.is_empty());
    let status = daemon.status();
    assert_eq!(status.pool.free, status.node.cpus, "a core has leaked");
    assert!(!status.warnings.iter().any(|warning| warning.code == "audit"), "{:?}", status.warnings);
}

fn check_disjoint(daemon: &Daemon) {
    let status = daemon.status();
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    for job in &status.jobs {
        let cpus: CpuSet = job.cpus.parse().unwrap();
        for pu in cpus.iter() {
            if let Some(other) = owners.insert(pu.0, job.id.clone()) {
                panic!("PU {pu} belongs to {other} and {}", job.id);
            }
        }
    }
    // Without events a child that was born meanwhile is found at the next interval.
    until_true("everyone is inside", || daemon.status().jobs.iter().all(|job| job.violations == 0));
    let free: CpuSet = status.pool.free.parse().unwrap();
    let all: CpuSet = status.node.cpus.parse().unwrap();
    assert_eq!(free.len() + owners.len(), all.len(), "every PU is somebody's or free: {status:?}");
}
