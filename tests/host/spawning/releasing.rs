//! The release of a job whose instances `pjwctl spawn` started: they get every CPU back.

use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_until, wait_until_empty};

use super::killed::{MARK, marked_processes};
use crate::processes::{has_two_cores, kill_process, mask};

/// Starts two instances that go on without pjwctl, each on its own core. Returns their pids.
fn start_instances(daemon: &Daemon, mark: &str) -> Vec<u32> {
    let assignment = format!("{MARK}={mark}");
    let arguments = ["spawn", "-n", "2", "--job", "a", "--async", "--", "env", &assignment, "sleep", "1000"];
    let output = daemon.pjwctl(&arguments);
    assert!(output.status.success(), "{output:?}");
    wait_until("both instances run", || marked_processes(mark).len() == 2);
    let pids = marked_processes(mark);
    let all = mask(std::process::id());
    assert!(pids.iter().all(|pid| mask(*pid) != all), "each instance has a part of {all}");
    pids
}

#[test]
fn a_release_gives_the_instances_of_a_spawn_every_cpu_back_also_by_the_next_daemon() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        for is_killed in [false, true] {
            let mut daemon = Daemon::start_with(enforcement, "");
            let before = mask(std::process::id());
            let mark = format!("release-{}-{enforcement:?}-{is_killed}", std::process::id());
            let pids = start_instances(&daemon, &mark);
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
