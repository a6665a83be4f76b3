//! The release of a job whose instances `pjwctl spawn` started: they get the mask back that pjwctl had.

use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_until, wait_until_empty};

use super::killed::{MARK, marked_processes};
use crate::processes::{has_two_cores, kill_process, mask};

/// Starts as many instances as `count` says, which go on without pjwctl, each on its own core. Returns their pids.
fn start_instances(daemon: &Daemon, count: usize, mark: &str) -> Vec<u32> {
    let (assignment, number) = (format!("{MARK}={mark}"), count.to_string());
    let arguments =
        ["spawn", "-n", &number, "--job", "a", "--async", "--", "env", &assignment, "sleep", "1000"];
    let output = daemon.pjwctl(&arguments);
    assert!(output.status.success(), "{output:?}");
    wait_until("the instances run", || marked_processes(mark).len() == count);
    let pids = marked_processes(mark);
    let all = mask(std::process::id());
    assert!(pids.iter().all(|pid| mask(*pid) != all), "each instance has a part of {all}");
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
            if is_killed {
                daemon.kill();
                daemon.spawn();
            }
            daemon.release("a").unwrap();
            for pid in &pids {
                wait_until("an instance has the mask from before", || mask(*pid) == before);
            }
            pids.into_iter().for_each(kill_process);
            wait_until_empty("the instances have ended", || marked_processes(&mark));
        }
    }
}
