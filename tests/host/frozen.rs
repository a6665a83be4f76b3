//! A besteffort job that is frozen while no core is free for it. If pjwd is killed, a second process of pjwd thaws the
//! job.

use std::collections::BTreeSet;
use std::fs;

use nix::sys::signal::Signal;
use pjw_core::ids::Tid;
use pjw_linux::sys::realtime::{SchedulingPolicy, scheduling_policy};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::lending::{SPIN, assign, lends, runs};
use crate::processes::{Shell, core_count, has_two_cores, is_ended, is_frozen, kill_process};

const FREEZING: &str = "interval = \"50ms\"\n[lending]\nenabled = true\nbuffer = 0\nstarved = \"freeze\"\n";
/// Starts the daemon with an ignored signal, an open descriptor and the environment of a batch job.
const LAUNCHER: [&str; 3] =
    ["sh", "-c", "trap '' USR1; SLURM_JOB_ID=4; export SLURM_JOB_ID; exec \"$0\" \"$@\" 9</dev/null"];
/// What the second process writes to the log after it thawed the jobs.
const THAWED: &str = "those that it froze run again";

/// The processes of a besteffort job, one of which would always run, and of a job that gets all cores. The value must
/// be dropped after the daemon, because frozen processes do not end.
struct FrozenJob {
    batch: Shell,
    other: Shell,
    spinner: u32,
}

impl FrozenJob {
    fn start() -> Self {
        let (mut batch, other) = (Shell::start(), Shell::start());
        let spinner = batch.background(SPIN);
        Self { batch, other, spinner }
    }

    /// A frozen job, with the daemon that froze it. `None`, with a report, if this machine can't freeze it.
    fn with_daemon() -> Option<(Self, Daemon)> {
        let job = Self::start();
        let daemon = Daemon::start_with(Enforcement::Cpuset, FREEZING);
        // Without a result, the daemon is dropped first.
        if lends(&daemon) && job.is_frozen_by(&daemon) { Some((job, daemon)) } else { None }
    }

    /// Waits until the job is frozen. False, with a report, if this machine can't freeze it.
    fn is_frozen_by(&self, daemon: &Daemon) -> bool {
        assign(daemon, "batch", "besteffort", "64", &self.batch);
        assign(daemon, "all", "normal", &core_count().to_string(), &self.other);
        let frozen = wait_for("the job is frozen, or can't be frozen", || {
            let mut warnings = daemon.status().warnings.into_iter();
            let refusal = warnings.find(|warning| warning.code == "unserved");
            refusal.map(|warning| Err(warning.text)).or_else(|| self.is_frozen(daemon).then_some(Ok(())))
        });
        frozen.map_err(skip).is_ok()
    }

    /// Whether the kernel has frozen the job, and the status says that the job waits. That its process uses no CPU time
    /// tells nothing: on a busy machine a besteffort job may get none.
    fn is_frozen(&self, daemon: &Daemon) -> bool {
        is_frozen(self.spinner) && daemon.job("batch").is_some_and(|job| job.state == "waiting")
    }

    fn wait_until_it_runs(&self) {
        wait_until("the job runs again", || runs(self.spinner));
    }

    fn wait_until_it_is_frozen(&self, daemon: &Daemon) {
        wait_until("the job is frozen again", || self.is_frozen(daemon));
    }
}

/// The fields of `/proc/PID/stat` after the command name, and the command name.
fn stat(pid: u32) -> Option<(String, Vec<String>)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = text.rsplit_once(") ")?;
    let (_, name) = before.split_once('(')?;
    Some((name.to_owned(), after.split_whitespace().map(str::to_owned).collect()))
}

/// Waits for the second process of the daemon, and returns its process id.
fn wait_for_second_process(daemon: &Daemon) -> u32 {
    let daemon_pid = daemon.pid().to_string();
    wait_for("the daemon has a second process", || {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.find(|pid| {
            stat(*pid).is_some_and(|(name, fields)| name == "pjw-thaw" && fields[1] == daemon_pid)
        })
    })
}

#[test]
fn a_frozen_job_runs_again_after_kill_9_without_a_command_and_the_next_daemon_decides_anew() {
    if !has_two_cores() {
        return;
    }
    for is_beside in [true, false] {
        let job = FrozenJob::start();
        let daemon = if is_beside {
            Some(Daemon::start_with(Enforcement::Cpuset, FREEZING))
        } else {
            Daemon::start_alone(Enforcement::Cpuset, FREEZING)
        };
        let Some(mut daemon) = daemon.filter(|daemon| lends(daemon) && job.is_frozen_by(daemon)) else {
            return;
        };
        let second_process = wait_for_second_process(&daemon);
        daemon.kill();
        job.wait_until_it_runs();
        wait_until("the second process has ended", || is_ended(second_process));
        assert_eq!(daemon.log().matches(THAWED).count(), 1, "{}", daemon.log());

        daemon.spawn();
        job.wait_until_it_is_frozen(&daemon);
        let second_process = wait_for_second_process(&daemon);
        daemon.kill();
        daemon.spawn();
        wait_until("the second process of the killed daemon has ended", || is_ended(second_process));
        job.wait_until_it_is_frozen(&daemon);
        assert_eq!(daemon.job("batch").unwrap().state, "waiting");

        let second_process = wait_for_second_process(&daemon);
        let before = daemon.log().matches(THAWED).count();
        daemon.stop();
        job.wait_until_it_runs();
        wait_until("it has ended after an orderly stop", || is_ended(second_process));
        assert_eq!(daemon.log().matches(THAWED).count(), before, "the daemon itself thawed the job");
    }
}

/// A set of signals in `/proc/PID/status`, without the real-time signals: the C library uses two of these itself.
fn signals(pid: u32, which: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(which)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & 0x7fff_ffff
}

#[test]
fn the_process_that_thaws_after_kill_9_inherits_nothing_belongs_to_no_job_and_uses_no_cpu_time() {
    if !has_two_cores() {
        return;
    }
    let job = FrozenJob::start();
    let mut daemon = Daemon::prepare_with(Enforcement::Cpuset, FREEZING);
    daemon.spawn_by(&LAUNCHER);
    if !lends(&daemon) || !job.is_frozen_by(&daemon) {
        return;
    }
    let pid = wait_for_second_process(&daemon);
    let (_, fields) = stat(pid).unwrap();
    assert_eq!([&fields[2], &fields[3]], [&pid.to_string(); 2], "its process group and its session");
    assert_eq!(scheduling_policy(Tid(pid)), Ok(SchedulingPolicy::Normal));
    let descriptors = || -> BTreeSet<String> {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let standard = BTreeSet::from(["0", "1", "2"].map(str::to_owned));
    // When it takes its name, it has one more file open for a moment.
    wait_until("it has only the standard streams open", || descriptors() == standard);
    let [of_user, of_pipe] = [Signal::SIGUSR1, Signal::SIGPIPE].map(|signal| 1 << (signal as i32 - 1));
    // The daemon also ignores what the shell that started the tests ignores, such as SIGQUIT after `&`.
    assert_eq!(signals(daemon.pid(), "SigIgn:") & (of_user | of_pipe), of_user | of_pipe);
    assert_eq!(["SigIgn:", "SigBlk:", "SigCgt:"].map(|which| signals(pid, which)), [of_pipe, 0, 0]);
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("SLURM"));
    // It may not have come to its wait yet.
    wait_until("it only waits", || !runs(pid));
    let refused = daemon.pjwctl(&["assign", &daemon.job_id("all"), "--pid", &pid.to_string()]);
    let refused = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.contains("it is a process of pjwd"), "{refused}");
}

#[test]
fn a_killed_process_of_a_frozen_job_ends() {
    if !has_two_cores() {
        return;
    }
    let Some((job, daemon)) = FrozenJob::with_daemon() else { return };
    kill_process(job.spinner);
    wait_until("the killed process has ended", || is_ended(job.spinner));
    assert_eq!(daemon.job("batch").unwrap().state, "waiting", "its shell stays frozen");
}

#[test]
fn without_the_process_that_thaws_after_kill_9_the_daemon_goes_on_with_one_warning() {
    if !has_two_cores() {
        return;
    }
    let Some((job, daemon)) = FrozenJob::with_daemon() else { return };
    kill_process(wait_for_second_process(&daemon));
    let warnings = || -> Vec<_> {
        daemon.status().warnings.into_iter().filter(|warning| warning.code == "thaw-watcher").collect()
    };
    wait_until("the status has a warning", || !warnings().is_empty());
    let warning = warnings().remove(0);
    assert!(warning.text.contains("it has ended: signal: 9"), "{}", warning.text);
    assert!(warning.remedy.contains("pjwd --thaw"), "{}", warning.remedy);
    assert!(is_frozen(job.spinner), "the job is still frozen");
    assert_eq!(daemon.log().matches("stay frozen if pjwd is killed").count(), 1, "{}", daemon.log());
    daemon.release("all").unwrap();
    job.wait_until_it_runs();
    wait_until("no job is frozen any more, and the warning ends", || warnings().is_empty());
}

#[test]
fn status_and_assign_say_that_a_job_is_frozen_until_it_runs_again() {
    if !has_two_cores() {
        return;
    }
    let Some((job, daemon)) = FrozenJob::with_daemon() else { return };
    let batch = daemon.job_id("batch");
    let is_told =
        || daemon.status().warnings.iter().any(|warning| warning.code == "frozen" && warning.job == batch);
    wait_until("the status has a warning", is_told);
    let assigned = daemon.pjwctl(&["assign", &batch, "--cores", "1"]);
    let text = String::from_utf8(assigned.stderr).unwrap();
    assert!(text.contains("its processes are frozen until it can"), "{text}");
    daemon.release("all").unwrap();
    job.wait_until_it_runs();
    wait_until("the warning ends", || !is_told());
}

#[test]
fn jobs_without_a_process_freeze_no_job_and_delay_no_start() {
    if !has_two_cores() {
        return;
    }
    let mut shell = Shell::start();
    let spinner = shell.background(SPIN);
    let daemon = Daemon::start_with(Enforcement::Cpuset, FREEZING);
    if !lends(&daemon) {
        return;
    }
    assign(&daemon, "batch", "besteffort", "64", &shell);
    let cpus = daemon.job("batch").unwrap().cpus;
    for number in 0..=core_count() {
        let empty = daemon.job_id(&format!("empty{number}"));
        let made = daemon.pjwctl(&["assign", &empty, "--class", "besteffort", "--cores", "1"]);
        assert!(made.status.success(), "{made:?}");
        let text = String::from_utf8(made.stderr).unwrap();
        assert!(text.contains("has no process and borrows no core until it has one"), "{text}");
    }
    assert_eq!(daemon.job("batch").unwrap().cpus, cpus, "they took no core");
    wait_until("the job still runs", || runs(spinner));
    for start in [vec!["run"], vec!["spawn", "-n", "1"]] {
        let job = daemon.job_id(start[0]);
        let options =
            ["--job", &job, "--class", "besteffort", "--cores", "1", "--", "sh", "-c", "echo $PJW_CPUS"];
        let output = daemon.pjwctl(&[start, options.to_vec()].concat());
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && !printed.trim().is_empty(), "{printed:?} {:?}", output.stderr);
    }
    wait_until("both have given back their core", || {
        ["run", "spawn"].iter().all(|job| daemon.job(job).is_none())
    });
    let mut late = Shell::start();
    let spinner = late.background(SPIN);
    assign(&daemon, "empty0", "besteffort", "1", &late);
    assert!(!daemon.job("empty0").unwrap().cpus.is_empty(), "the first process has a core with the reply");
    wait_until("it runs", || runs(spinner));
}

#[test]
fn a_reload_to_observe_thaws_a_frozen_job_and_one_to_enforce_freezes_it_again() {
    if !has_two_cores() {
        return;
    }
    let Some((job, daemon)) = FrozenJob::with_daemon() else { return };
    let reload = |mode: &str| {
        daemon.configure(&format!("mode = \"{mode}\"\nenforcement = \"cpuset\"\n{FREEZING}"));
        let reloaded = daemon.pjwctl(&["reload"]);
        assert!(reloaded.status.success(), "{reloaded:?}");
    };
    for _ in 0..2 {
        reload("observe");
        job.wait_until_it_runs();
        let why = String::from_utf8(daemon.pjwctl(&["explain", &daemon.job_id("batch")]).stdout).unwrap();
        assert!(why.contains("its processes are not frozen now: pjwd only watches"), "{why}");
        assert!(daemon.status().warnings.iter().all(|warning| warning.code != "frozen"));
        reload("enforce");
        job.wait_until_it_is_frozen(&daemon);
    }
}
