//! 200 jobs start and end while their processes fork and end all the time.

use std::collections::BTreeMap;

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;

use crate::processes::{Shell, core_count};

const JOBS: usize = 200;

#[test]
fn two_hundred_jobs_never_share_a_core_and_leak_none() {
    let daemon = Daemon::start("");
    let max_jobs = core_count().min(8) as usize;
    let mut running: Vec<(String, Shell, CpuSet)> = Vec::new();
    for n in 0..JOBS {
        if running.len() == max_jobs {
            // The oldest job ends. Half of the jobs are released, and the processes of the others are killed.
            let (name, shell, _) = running.remove(0);
            if n % 2 == 0 {
                daemon.release(&name).unwrap();
            }
            drop(shell);
            wait_until("its cores are free", || !daemon.status().pool.free.is_empty());
        }
        let mut shell = Shell::start();
        shell.send_line("while :; do sleep 0.01; (true); done &");
        let name = format!("manual:j{n}");
        let cpus = daemon.assign(&name, 1, &[shell.pid()]).unwrap();
        assert!(!cpus.is_empty());
        running.push((name, shell, cpus));
        check_disjoint(&daemon);
        for (name, shell, cpus) in &running {
            // Without process events, a new child is found at the next interval.
            wait_until(&format!("every process of {name} is confined to {cpus}"), || {
                are_all_confined(shell.pid(), cpus)
            });
        }
    }
    drop(running);
    wait_until("all jobs are over", || daemon.status().jobs.is_empty());
    let status = daemon.status();
    assert_eq!(status.pool.free, status.node.cpus, "a core is not free again");
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
    wait_until("the daemon sees no violation", || daemon.status().jobs.iter().all(|job| job.violations == 0));
    let free: CpuSet = status.pool.free.parse().unwrap();
    let all: CpuSet = status.node.cpus.parse().unwrap();
    assert_eq!(free.len() + owners.len(), all.len(), "every PU belongs to a job or is free: {status:?}");
}

/// Whether every thread of a process group is confined to these PUs. The masks are read from the kernel, because the
/// daemon may not know every process.
fn are_all_confined(group: u32, cpus: &CpuSet) -> bool {
    let masks = masks_of_group(group);
    assert!(!masks.is_empty(), "the shell of process group {group} has ended");
    masks.iter().all(|mask| mask.is_subset(cpus))
}

fn masks_of_group(group: u32) -> Vec<CpuSet> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| process_group(*pid) == Some(group)).flat_map(masks_of_process).collect()
}

/// Returns the process group: the fifth field of stat. The second field ends with the last parenthesis.
fn process_group(pid: u32) -> Option<u32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat).into_owned();
    stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

/// Returns the masks of the threads of a process. Ended threads are left out.
fn masks_of_process(pid: u32) -> Vec<CpuSet> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mask = |status: String| {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let is_running = !field("State:")?.starts_with(['Z', 'X']);
        is_running.then(|| field("Cpus_allowed_list:").unwrap().parse().unwrap())
    };
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok().and_then(mask))
        .collect()
}
