//! Borrowers (jobs on lent cores): the notice before a core is taken back, and that they stay at idle priority.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::CpuSet;
use pjw_job::Job;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::lending::{SPIN, assign, kinds_of_events, lending_daemon, lent, second_of_day};
use crate::processes::{Shell, is_root, mask};

/// Whether the process has SIGWINCH pending.
fn has_pending_sigwinch(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    u64::from_str_radix(pending.trim(), 16).unwrap() >> (nix::sys::signal::Signal::SIGWINCH as i32 - 1) & 1
        == 1
}

#[test]
fn a_borrower_gets_a_signal_and_keeps_the_core_for_the_grace_time() {
    // An owner that competes with other programs may seem idle, but not for as long as lend_after.
    let config = "[lending]\nenabled = true\nbuffer = 0\nlend_after = \"5s\"\nrevocation_grace = \"3s\"\n\
                  revocation_signal = \"SIGWINCH\"\n";
    let Some(daemon) = lending_daemon(config) else { return };
    let (mut web, mut batch) = (Shell::start(), Shell::start());
    let told = daemon.dir().join("told");
    let borrower =
        batch.background(&format!("sh -c 'trap \"echo >{}\" WINCH; while :; do :; done'", told.display()));
    assign(&daemon, "web", "guaranteed", "1", &web);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let own: CpuSet = daemon.job("web").unwrap().cpus.parse().unwrap();
    wait_until("the idle core is lent", || mask(borrower).intersects(&own));
    web.background(SPIN);
    // On a busy machine, a process at idle priority may not run its handler for some time.
    wait_until("the borrower has got the signal", || told.exists() || has_pending_sigwinch(borrower));
    let job = Job::in_directory(&daemon.state_dir().join("jobs").join(daemon.job_id("batch")));
    let notice = wait_for("the core map says which core leaves", || {
        Some(job.cores()).filter(|cores| !cores.leaving.is_empty())
    });
    assert_eq!(notice.leaving, own);
    let leaving_at = notice.leaving_at_ns.expect("a time with each core that leaves");
    wait_until("the core is back", || lent(&daemon, "web").is_empty() && !mask(borrower).intersects(&own));
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
    assert!(u128::from(leaving_at) <= now.as_nanos(), "taken at {now:?}, and announced for {leaving_at} ns");
    let after = job.cores();
    assert!(after.leaving.is_empty() && after.leaving_at_ns.is_none(), "{after:?}");
    let kinds = kinds_of_events(&daemon);
    let first = |kind: &str| kinds.iter().position(|known| known == kind).unwrap();
    assert!(first("revoked") < first("returned"), "told first, then taken: {kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| *kind == "revoked").count(), 1, "told once: {kinds:?}");
    let (told_at, taken_at) = (second_of_day(&daemon, "revoked"), second_of_day(&daemon, "returned"));
    let kept = (taken_at - told_at).rem_euclid(86_400.0);
    // An event has the time of its publication, which follows the decision. On a busy machine that takes a while.
    assert!(kept >= 1.5, "the borrower kept the core for {kept} s of 3 s");
}

/// The mount point of cgroup v2, or of the v1 hierarchy of the cpu controller.
fn cpu_hierarchy(is_unified: bool) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter(|mount| {
        let has_cpu = || mount[3].split(',').any(|option| option == "cpu");
        if is_unified { mount[2] == "cgroup2" } else { mount[2] == "cgroup" && has_cpu() }
    });
    mounts.next().map(|mount| PathBuf::from(mount[1]))
}

/// The file `cpu.idle` of the cgroup directly below the root in which the process is.
fn idle_file(pid: u32) -> Option<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let mut files = cgroups.lines().filter_map(|line| {
        let fields: Vec<&str> = line.splitn(3, ':').collect();
        let is_unified = fields[1].is_empty();
        if !is_unified && !fields[1].split(',').any(|name| name == "cpu") {
            return None;
        }
        let top = fields[2].split('/').nth(1).filter(|top| !top.is_empty())?;
        Some(cpu_hierarchy(is_unified)?.join(top).join("cpu.idle"))
    });
    files.rfind(|file| file.exists())
}

#[test]
fn borrowers_get_their_idle_priority_back_that_another_program_has_ended() {
    let config = "interval = \"200ms\"\nrescan_interval = \"200ms\"\n[lending]\nenabled = true\n";
    let Some(daemon) = is_root().then(|| lending_daemon(config)).flatten() else { return };
    let mut batch = Shell::start();
    let spinner = batch.background(SPIN);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let is_idle = |file: &PathBuf| fs::read_to_string(file).unwrap().trim() == "1";
    let file = wait_for("the borrower is at idle priority", || idle_file(spinner).filter(is_idle));
    for _ in 0..2 {
        fs::write(&file, "0").unwrap();
        wait_until("it is at idle priority again", || is_idle(&file));
    }
    assert!(daemon.log().contains("another program has ended the idle priority"), "{}", daemon.log());
}
