//! Borrowers (jobs on free and lent cores): the events and signals about cores that they lose, their idle priority, and
//! how they leave a core on a busy machine.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::Uid;
use pjw_core::cpuset::CpuSet;
use pjw_job::Job;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::lending::{SPIN, assign, lending_daemon, lent, wait_for_kinds_of_events};
use crate::processes::{Shell, core_count, has_two_cores, is_ended, is_root, mask, masks};

/// Whether SIGWINCH is in a set of signals of the process: `ShdPnd:` for the pending ones, `SigCgt:` for the caught
/// ones (proc_pid_status(5)).
fn has_sigwinch(pid: u32, set: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let signals = status.lines().find_map(|line| line.strip_prefix(set)).unwrap();
    u64::from_str_radix(signals.trim(), 16).unwrap() >> (nix::sys::signal::Signal::SIGWINCH as i32 - 1) & 1
        == 1
}

/// Starts a process of the shell that always runs, and that makes the file `told` when it gets SIGWINCH. Returns its
/// process id once it catches this signal: one that came earlier would be ignored.
fn start_borrower(shell: &mut Shell, told: &Path) -> u32 {
    let trap = format!("sh -c 'trap \"echo >{}\" WINCH; while :; do :; done'", told.display());
    let borrower = shell.background(&trap);
    wait_until("the borrower catches the signal", || has_sigwinch(borrower, "SigCgt:"));
    borrower
}

/// Whether a process of [`start_borrower`] has got the signal. On a busy machine, a process at idle priority may not
/// run its handler for some time.
fn has_got_signal(borrower: u32, told: &Path) -> bool {
    told.exists() || has_sigwinch(borrower, "ShdPnd:")
}

fn monotonic_now() -> Duration {
    Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap())
}

#[test]
fn a_borrower_gets_a_signal_and_keeps_the_core_for_the_grace_time() {
    // An owner that competes with other programs may seem idle, but not for as long as lend_after.
    let config = "[lending]\nenabled = true\nbuffer = 0\nlend_after = \"5s\"\nrevocation_grace = \"3s\"\n\
                  revocation_signal = \"SIGWINCH\"\n";
    let Some(daemon) = lending_daemon(config) else { return };
    let (mut web, mut batch) = (Shell::start(), Shell::start());
    let told = daemon.dir().join("told");
    let borrower = start_borrower(&mut batch, &told);
    assign(&daemon, "web", "guaranteed", "1", &web);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let own: CpuSet = daemon.job("web").unwrap().cpus.parse().unwrap();
    wait_until("the idle core is lent", || mask(borrower).intersects(&own));
    let job = Job::in_directory(&daemon.state_dir().join("jobs").join(daemon.job_id("batch")));
    let works_since = monotonic_now();
    web.background(SPIN);
    // The core map has the notice during the grace time only. So the signal and the notice do not wait for each other.
    let (mut is_told, mut notice) = (false, None);
    wait_until("the borrower has got the signal, and the core map said which core leaves", || {
        is_told |= has_got_signal(borrower, &told);
        notice = notice.take().or_else(|| Some(job.cores()).filter(|cores| !cores.leaving.is_empty()));
        is_told && notice.is_some()
    });
    let notice = notice.unwrap();
    assert_eq!(notice.leaving, own);
    let leaving_at = notice.leaving_at_ns.expect("a time with each core that leaves");
    wait_until("the core is back", || lent(&daemon, "web").is_empty() && !mask(borrower).intersects(&own));
    let now = monotonic_now();
    assert!(u128::from(leaving_at) <= now.as_nanos(), "taken at {now:?}, and announced for {leaving_at} ns");
    let after = job.cores();
    assert!(after.leaving.is_empty() && after.leaving_at_ns.is_none(), "{after:?}");
    let kinds = wait_for_kinds_of_events(&daemon, &["revoked", "returned"]);
    let first = |kind: &str| kinds.iter().position(|known| known == kind).unwrap();
    assert!(first("revoked") < first("returned"), "told first, then taken: {kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| *kind == "revoked").count(), 1, "told once: {kinds:?}");
    // The events have the times of their publication. On a busy machine, it follows the decision after a while.
    let announced = Duration::from_nanos(leaving_at);
    assert!(
        announced.saturating_sub(works_since) >= Duration::from_secs(3),
        "the owner has worked since {works_since:?}, and the core was announced for {announced:?}"
    );
}

#[test]
fn a_borrower_gets_a_signal_when_another_job_gets_a_free_core_that_it_used() {
    // Free cores are borrowed without lending.
    let config = "[lending]\nenabled = false\nrevocation_grace = \"60s\"\nrevocation_signal = \"SIGWINCH\"\n";
    let Some(daemon) = has_two_cores().then(|| Daemon::start(config)) else { return };
    let (other, mut batch) = (Shell::start(), Shell::start());
    let told = daemon.dir().join("told");
    let borrower = start_borrower(&mut batch, &told);
    assign(&daemon, "batch", "besteffort", &core_count().to_string(), &batch);
    let borrowed: CpuSet = daemon.job("batch").unwrap().cpus.parse().unwrap();
    wait_until("the borrower is on the free cores", || mask(borrower) == borrowed);
    assert!(!has_got_signal(borrower, &told), "it has lost nothing yet");
    assign(&daemon, "other", "normal", "1", &other);
    let taken: CpuSet = daemon.job("other").unwrap().cpus.parse().unwrap();
    assert!(taken.is_subset(&borrowed), "{taken} of {borrowed}");
    wait_until("the borrower has got the signal", || has_got_signal(borrower, &told));
    // A notice is for lent cores: this core is taken at once.
    wait_until("the borrower has left the core", || mask(borrower) == borrowed.difference(&taken));
    let kinds = wait_for_kinds_of_events(&daemon, &["revoked"]);
    assert_eq!(kinds.iter().filter(|kind| *kind == "revoked").count(), 1, "told once: {kinds:?}");
    assert!(!kinds.iter().any(|kind| kind == "resized"), "one event: {kinds:?}");
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

/// Processes outside of jobs that fork without a pause. As root, they are processes of the user `nobody`. They end when
/// this value is dropped.
struct ForkingProcesses {
    _shell: Shell,
    pids: Vec<u32>,
}

impl ForkingProcesses {
    /// Starts 16 processes for each core, at most 64.
    fn start() -> Self {
        let mut command = Command::new("sh");
        if Uid::effective().is_root() {
            command.uid(65_534).gid(65_534);
        }
        let mut shell = Shell::from_command(command);
        let count = (16 * core_count()).min(64);
        let pids = (0..count).map(|_| shell.background("sh -c 'while :; do ( : ); done'")).collect();
        Self { _shell: shell, pids }
    }

    /// Whether all processes go on: none has ended because it could not fork.
    fn all_run(&self) -> bool {
        self.pids.iter().all(|pid| !is_ended(*pid))
    }
}

#[test]
fn a_lent_core_comes_back_to_its_owner_beside_many_processes_that_fork() {
    let config = "[lending]\nenabled = true\nbuffer = 0\nlend_after = \"200ms\"\n";
    let Some(daemon) = lending_daemon(config) else { return };
    let (mut web, mut batch) = (Shell::start(), Shell::start());
    let borrowers = [batch.background(SPIN), batch.background(SPIN), batch.pid()];
    assign(&daemon, "web", "guaranteed", "1", &web);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let own: CpuSet = daemon.job("web").unwrap().cpus.parse().unwrap();
    let is_on_own = |mask: &str| mask.parse::<CpuSet>().unwrap().intersects(&own);
    let is_lent = || {
        lent(&daemon, "web") == own.to_string() && masks(&borrowers).iter().all(|(_, mask)| is_on_own(mask))
    };
    // While the owner computes, its core may be lent again for a moment: the other programs leave it so little time
    // that it seems idle.
    let has_core_alone =
        || lent(&daemon, "web").is_empty() && !masks(&borrowers).iter().any(|(_, mask)| is_on_own(mask));
    wait_until("the idle core is lent", is_lent);
    let forking = ForkingProcesses::start();
    for round in 0..2 {
        wait_until("the idle core is lent beside processes that fork", is_lent);
        let worker = web.background(SPIN);
        wait_until("no thread of the borrower may use the core of the owner that computes", has_core_alone);
        assert_eq!(mask(web.pid()), own, "the owner may use it all the time, in round {round}");
        web.run(&format!("kill {worker}; wait; echo"));
    }
    wait_until("the core is lent again when the owner sleeps", is_lent);
    assert!(forking.all_run(), "a process could not fork");
    assert!(!borrowers.iter().any(|pid| is_ended(*pid)), "a process of the borrower has ended");
    wait_for_kinds_of_events(&daemon, &["lent", "revoked", "returned"]);
}
