//! The release of a job whose instances `pjwctl spawn` started: they get the mask back that pjwctl had.

use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_until, wait_until_empty};

use super::killed::{MARK, marked_processes};
use crate::processes::{KillOnDrop, has_two_cores, mask};

/// The command of an instance. It does not keep the output of pjwctl open.
const COMMAND: [&str; 3] = ["sh", "-c", "exec sleep 1000 > /dev/null 2>&1"];

/// Starts as many instances as `count` says, which go on without pjwctl, each on its own core. Returns their pids.
fn start_instances(daemon: &Daemon, count: usize, mark: &str) -> Vec<u32> {
    let (job, number) = (daemon.job_id("a"), count.to_string());
    let arguments = ["spawn", "-n", &number, "--job", &job, "--async", "--"];
    let mut pjwctl = daemon.pjwctl_command(&arguments);
    let status = pjwctl.args(COMMAND).env(MARK, mark).status().unwrap();
    assert!(status.success(), "{status}");
    wait_until("the instances run", || marked_processes(mark).len() == count);
    let pids = marked_processes(mark);
    // With masks, the next daemon knows the children of pjwctl, which has ended, only from the journal of this one.
    let is_member = |pid: &u32| {
        let explanation = daemon.pjwctl(&["explain", &pid.to_string()]);
        String::from_utf8_lossy(&explanation.stdout).contains(&job)
    };
    wait_until("the instances are members of the job", || pids.iter().all(is_member));
    pids
}

#[test]
fn a_release_gives_the_instances_of_a_spawn_the_mask_from_before_also_by_the_next_daemon() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        // A single instance has the whole grant.
        for (count, is_killed) in [(1, false), (2, false), (2, true)] {
            let mut daemon = Daemon::start_with(enforcement, "");
            let before = mask(std::process::id());
            let mark = format!("release-{}-{enforcement:?}-{count}-{is_killed}", std::process::id());
            let pids = start_instances(&daemon, count, &mark);
            let guards: Vec<KillOnDrop> = pids.iter().map(|pid| KillOnDrop(*pid)).collect();
            assert!(pids.iter().all(|pid| mask(*pid) != before), "each instance has a part of {before}");
            if is_killed {
                daemon.kill();
                daemon.spawn();
            }
            daemon.release("a").unwrap();
            for pid in pids {
                wait_until("an instance has the mask from before", || mask(pid) == before);
            }
            drop(guards);
            wait_until_empty("the instances have ended", || marked_processes(&mark));
        }
    }
}
