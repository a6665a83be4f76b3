//! Every job leaves a report, which survives the daemon.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use nix::sys::signal::Signal;
use pjw_ipc::report::Report;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::permissions::programs_are_reachable;
use crate::processes::{Shell, has_two_cores, is_installed, is_root};

const NOBODY: u32 = 65_534;
/// The number of jobs that end while the daemon is killed.
const ENDING_JOBS: usize = 20;
/// Starts children that end at once, and waits for each of them. Most live for about a millisecond.
const TEN_THOUSAND_CHILDREN: &str = "i=0; while [ $i -lt 10000 ]; do ( : ); i=$((i+1)); done";
/// Runs each command that it reads, a JSON list in one line, and prints the CPU time of the command in ms, as wait4(2)
/// tells it. The kernel divides this time into user time and system time, and their sum is exact. Goes on afterwards,
/// as an interactive shell does.
const RUN_AND_WAIT4: &str = "
import json, os, subprocess, sys
for line in sys.stdin:
    child = subprocess.Popen(json.loads(line), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    used = os.wait4(child.pid, 0)[2]
    print(round((used.ru_utime + used.ru_stime) * 1000), flush=True)
";
/// The report may differ from wait4(2) by one part in this number: by 1 %.
const CPU_TIME_SHARE: u64 = 100;
/// The difference that remains however short the job is, in ms. /proc/PID/stat tells the user time and the system time
/// of ended children in clock ticks of 10 ms, so that up to two ticks are missing. The rest is the time of `pjwctl run`
/// before its process belonged to the job. It is less than 1 % of a job that used 4 s.
const SMALLEST_DIFFERENCE: u64 = 40;

/// The reports of the daemon, the newest first. With an id, those of this job.
fn reports(daemon: &Daemon, job: Option<&str>) -> Vec<Report> {
    let job = job.map(|job| daemon.job_id(job));
    let mut reply: Value = daemon.call("GetReports", &json!({ "job": job })).unwrap_or_default();
    serde_json::from_value(reply["reports"].take()).unwrap_or_default()
}

fn report(daemon: &Daemon, job: &str) -> Report {
    wait_for("the job has a report", || reports(daemon, Some(job)).into_iter().next())
}

fn ids(daemon: &Daemon) -> Vec<String> {
    reports(daemon, None).into_iter().map(|report| report.id).collect()
}

/// The words of the command that runs a command of a shell in a job by `pjwctl run`.
fn run_words(daemon: &Daemon, job: &str, command: &str) -> Vec<String> {
    let mut pjwctl = daemon.pjwctl_command(&["run", "--cores", "1", "--job", &daemon.job_id(job), "--"]);
    pjwctl.args(["sh", "-c", command]);
    let words = std::iter::once(pjwctl.get_program()).chain(pjwctl.get_args());
    words.map(|word| word.to_str().unwrap().to_owned()).collect()
}

/// Runs `true` in a job, below a shell that goes on afterwards, as an interactive shell does. Waits for the report.
fn run_job(daemon: &Daemon, job: &str) {
    let words = run_words(daemon, job, "true").join(" ");
    let mut shell = Shell::start();
    assert_eq!(shell.run(&format!("{words} </dev/null >/dev/null; echo ended")), "ended");
    report(daemon, job);
}

/// Runs ten thousand short children in a job. The CPU time in the report is that of wait4(2).
fn compare_with_wait4(daemon: &Daemon, job: &str) {
    let mut python = Command::new("python3");
    python.args(["-c", RUN_AND_WAIT4]);
    let mut parent = Shell::from_command(python);
    let words = run_words(daemon, job, TEN_THOUSAND_CHILDREN);
    let by_kernel: u64 = parent.run(&serde_json::to_string(&words).unwrap()).parse().unwrap();
    let report = report(daemon, job);
    let allowed = (by_kernel / CPU_TIME_SHARE).max(SMALLEST_DIFFERENCE);
    assert!(report.cpu_s.0.abs_diff(by_kernel) <= allowed, "{by_kernel} ms, {report:?}");
    assert_eq!((report.cores, report.incomplete), (1, None));
}

#[test]
fn the_cpu_time_of_ten_thousand_short_children_is_that_of_wait4() {
    if !is_installed("python3") {
        return;
    }
    for enforcement in Enforcement::available() {
        compare_with_wait4(&Daemon::start_with(enforcement, ""), "a");
    }
}

#[test]
fn a_daemon_that_polls_tells_the_same_cpu_time() {
    if !is_root() || !is_installed("unshare") || !is_installed("python3") {
        return;
    }
    // In a network namespace of its own the daemon gets no process events.
    let daemon = Daemon::start_by(&["unshare", "--net", "--"]);
    assert_eq!(daemon.status().discovery, "polling");
    compare_with_wait4(&daemon, "a");
}

#[test]
fn the_reports_are_listed_and_the_end_of_a_job_is_an_event_with_its_figures() {
    let daemon = Daemon::start("");
    for job in ["a", "b", "c"] {
        run_job(&daemon, job);
    }
    let (a, b, c) = (daemon.job_id("a"), daemon.job_id("b"), daemon.job_id("c"));
    assert_eq!(ids(&daemon), [c.clone(), b.clone(), a.clone()]);
    let json = |args: &[&str]| -> Value { serde_json::from_slice(&daemon.pjwctl(args).stdout).unwrap() };
    let last: Vec<Report> = serde_json::from_value(json(&["report", "--last", "2", "--json"])).unwrap();
    assert_eq!(last.iter().map(|report| &report.id).collect::<Vec<_>>(), [&c, &b]);
    assert_eq!(json(&["jobs", "--ended", "--json"]).as_array().unwrap().len(), 3);
    let one = json(&["report", &a, "--json"]);
    assert_eq!((one["id"].as_str(), one["verdict"].is_null()), (Some(a.as_str()), true), "{one}");
    let text = String::from_utf8(daemon.pjwctl(&["report", &a]).stdout).unwrap();
    assert!(text.starts_with(&a) && text.contains("none: it ran for less than 10 s"), "{text}");
    let table = String::from_utf8(daemon.pjwctl(&["jobs", "--ended"]).stdout).unwrap();
    assert_eq!(table.lines().count(), 4, "{table}");
    let jobstats = daemon.pjwctl(&["report", &a, "--jobstats"]).stdout;
    assert_eq!(jobstats, b"JS1:Short\n");
    let events = String::from_utf8(daemon.pjwctl(&["events", "--json"]).stdout).unwrap();
    let ended = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ended: Vec<Value> = ended.filter(|event| event["event"] == "ended").collect();
    assert_eq!(ended.len(), 3, "{events}");
    assert!(ended[0]["text"].as_str().unwrap().contains("of CPU time"), "{}", ended[0]);
}

#[test]
fn a_job_that_wastes_a_core_gets_a_verdict_with_the_option_to_change() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let mut shell = Shell::start();
    daemon.assign("a", 2, &[shell.pid()]).unwrap();
    shell.send_line("while :; do :; done");
    // A job is not judged by less than ten seconds between the first and the last reading of its CPU time. On a busy
    // machine, these may be some seconds after its begin and before its end.
    let begun = std::time::Instant::now();
    wait_until("it has run for fifteen seconds", || begun.elapsed() > std::time::Duration::from_secs(15));
    drop(shell);
    let report = report(&daemon, "a");
    let advice = report.advice.first().map_or("", String::as_str);
    match report.verdict.as_deref() {
        // If other tests take the CPU for a moment, the advice also says how long one thread ran alone.
        Some("serial") => {
            assert!(advice.contains("were used: ") && advice.contains("ask for `--cores 1`"), "{report:?}");
        }
        // On a machine that other tests keep busy, the job waits for them. For this verdict it waits in a fifth of the
        // ten seconds that are judged at least, and for a fifth of each second then: for 400 ms.
        Some("waiting") if report.waited_s.0 >= 400 => {
            assert!(advice.contains("that other programs used"), "{report:?}");
        }
        other => panic!("{other:?}: {report:?}"),
    }
}

#[test]
fn reports_survive_a_killed_daemon_and_garbage_in_their_file() {
    let mut daemon = Daemon::start("");
    run_job(&daemon, "a");
    daemon.kill();
    let file = daemon.state_dir().join("reports.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("garbage\n{text}{{\"id\":\"torn")).unwrap();
    daemon.spawn();
    assert_eq!(ids(&daemon), [daemon.job_id("a")]);
    assert!(daemon.log().contains("lines 1, 3 of"), "{}", daemon.log());
    run_job(&daemon, "b");
    // A daemon that runs may make files again while others are removed.
    daemon.while_stopped(|| std::fs::remove_dir_all(daemon.state_dir()).unwrap());
    run_job(&daemon, "c");
    daemon.kill();
    daemon.spawn();
    assert_eq!(ids(&daemon), ["c", "b", "a"].map(|job| daemon.job_id(job)));
}

#[test]
fn each_job_has_one_report_if_the_daemon_is_killed_while_jobs_end() {
    for enforcement in Enforcement::available() {
        for reported_before_kill in [1, 2, 4, 8] {
            let mut daemon = Daemon::start_with(enforcement, "on_exhausted = \"share\"\n");
            let names: Vec<String> = (0..ENDING_JOBS).map(|n| format!("j{n}")).collect();
            let shells: Vec<Shell> = names.iter().map(|_| Shell::start()).collect();
            for (name, shell) in names.iter().zip(&shells) {
                daemon.assign(name, 1, &[shell.pid()]).unwrap();
            }
            let running = &daemon;
            std::thread::scope(|scope| {
                // The answers of the daemon are the pauses between the ends, until the daemon is killed.
                scope.spawn(move || {
                    for shell in shells {
                        drop(shell);
                        let _ = running.call::<Value>("GetStatus", &json!({}));
                    }
                });
                wait_until("some jobs have a report", || ids(running).len() >= reported_before_kill);
                running.signal(Signal::SIGKILL);
            });
            daemon.kill();
            daemon.spawn();
            wait_until("all jobs are over", || daemon.status().jobs.is_empty());
            let mut reported = ids(&daemon);
            reported.sort();
            let mut expected: Vec<String> = names.iter().map(|name| daemon.job_id(name)).collect();
            expected.sort();
            assert_eq!(reported, expected, "killed after {reported_before_kill} reports");
        }
    }
}

#[test]
fn a_job_that_ended_while_the_daemon_was_dead_is_reported_at_the_next_start() {
    let mut daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.kill();
    drop(shell);
    daemon.spawn();
    let report = report(&daemon, "a");
    let why = report.incomplete.clone().unwrap_or_default();
    assert!(why.contains("before it recorded") || why.contains("while pjwd was not running"), "{why}");
    assert!(!report.cpus.is_empty(), "{report:?}");
}

#[test]
fn on_a_full_disk_the_oldest_reports_are_dropped_and_this_is_logged_once() {
    if !is_installed("prlimit") {
        return;
    }
    let mut daemon = Daemon::start("");
    run_job(&daemon, "model");
    let model = report(&daemon, "model");
    daemon.stop();
    // The limit of the file size has the effect of a full disk: a write fails in the middle of a line.
    let line = serde_json::to_string(&model).unwrap();
    let count = 65_536 / (line.len() + 1);
    let numbered = |n: usize| line.replacen("model", &format!("{n:05}"), 1) + "\n";
    let file = daemon.state_dir().join("reports.jsonl");
    std::fs::write(&file, (0..count).map(numbered).collect::<String>()).unwrap();
    let limited = "trap '' XFSZ; exec prlimit --fsize=65536 \"$@\"";
    daemon.spawn_by(&["sh", "-c", limited, "sh"]);
    assert_eq!(ids(&daemon).len(), count);
    for job in ["x", "y", "z"] {
        run_job(&daemon, job);
    }
    let left = ids(&daemon);
    assert_eq!(left[..3], ["z", "y", "x"].map(|job| daemon.job_id(job)));
    assert!((count / 3..count).contains(&left.len()), "{} of {count}", left.len());
    assert!(left.contains(&numbered_id(&daemon, count - 1)) && !left.contains(&numbered_id(&daemon, 0)));
    let logged = daemon.log().matches("the oldest are dropped").count();
    assert_eq!(logged, 1, "{}", daemon.log());
    daemon.kill();
    daemon.spawn();
    assert_eq!(ids(&daemon), left);
}

/// The id of a report that was made from that of the job `model`.
fn numbered_id(daemon: &Daemon, number: usize) -> String {
    daemon.job_id("model").replacen("model", &format!("{number:05}"), 1)
}

#[test]
fn what_cannot_be_reported_gets_one_clear_line() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let a = daemon.job_id("a");
    let line = |output: &Output| {
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        let text = String::from_utf8(output.stderr.clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    assert!(line(&daemon.pjwctl(&["report", &a])).contains("has not ended"));
    assert!(line(&daemon.pjwctl(&["report", "never"])).contains("pjwctl jobs --ended lists"));
    assert!(line(&daemon.pjwctl(&["report", "a b"])).contains("job id"));
    let zero = daemon.call::<Value>("GetReports", &json!({ "last": 0 })).unwrap_err().to_string();
    assert!(zero.contains("ask for at least 1"), "{zero}");
    let nothing = daemon.pjwctl(&["report", "--last", "3"]);
    assert_eq!(nothing.stdout, b"no job has ended\n");
    assert_eq!(daemon.pjwctl(&["report", "--last", "0"]).status.code(), Some(2));
}

#[test]
fn a_plain_user_reads_the_report_of_another_users_job_as_show_allows() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let daemon = Daemon::start("");
    crate::hooks::make_accessible(&daemon);
    run_job(&daemon, "a");
    let a = daemon.job_id("a");
    let mut command = daemon.pjwctl_command(&["report", &a, "--json"]);
    let output = command.env_remove("PJW_SOCKET").uid(NOBODY).gid(NOBODY).current_dir("/").output().unwrap();
    let report: Report = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((report.id, report.owner), (a, 0));
}
