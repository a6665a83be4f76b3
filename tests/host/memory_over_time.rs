//! The memory of jobs over time: samples, warnings, what a report keeps, and many calls at the same time.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::Value;

use crate::memory::{FARM, Farm, MemoryCgroup, agree, memory, number};
use crate::permissions::{make_accessible, programs_are_reachable};
use crate::processes::{KillOnDrop, Shell, is_installed, is_root};

/// The thread of the daemon that reads pages.
struct Reader {
    /// How often the thread was given a CPU: the third number of /proc/PID/schedstat.
    runs: u64,
    is_asleep: bool,
}

/// Returns the thread of the daemon that reads pages. `None` if the daemon has no such thread: it begins with the first
/// reading.
fn reader(daemon: &Daemon) -> Option<Reader> {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.status().pid)).unwrap();
    threads.filter_map(Result::ok).find_map(|thread| {
        let text = |file| fs::read_to_string(thread.path().join(file)).ok();
        if text("comm")?.trim() != "memory-reader" {
            return None;
        }
        // The name of a thread may contain a parenthesis.
        let is_asleep = text("stat")?.rsplit_once(") ")?.1.starts_with('S');
        let runs = text("schedstat")?.split_whitespace().nth(2)?.parse().ok()?;
        Some(Reader { runs, is_asleep })
    })
}

fn reader_runs(daemon: &Daemon) -> Option<u64> {
    reader(daemon).map(|reader| reader.runs)
}

fn samples(daemon: &Daemon) -> usize {
    memory(daemon)["history"].as_array().unwrap().len()
}

#[test]
fn sampling_keeps_a_history_and_is_off_by_default() {
    let mut shell = Shell::start();
    let child = KillOnDrop(shell.background("sleep 1000"));
    // Only one daemon of a test runs at a time.
    let daemon = Daemon::start("");
    daemon.assign("farm", 1, &[shell.pid()]).unwrap();
    assert_eq!(
        reader_runs(&daemon),
        None,
        "without the setting, a job of a moment is not read without a request"
    );
    assert_eq!((samples(&daemon), samples(&daemon)), (1, 2));
    drop(daemon);
    let daemon = Daemon::start("[memory]\nsample = \"1s\"\nbudget_permille = 1000\n");
    daemon.assign("farm", 1, &[shell.pid(), child.0]).unwrap();
    // A request adds a reading itself, and the next sample is due half an interval later.
    let (mut requests, mut runs) = (0, 0);
    wait_until("three samples", || {
        wait_until("a reading without a request", || reader_runs(&daemon).is_some_and(|now| now > runs));
        requests += 1;
        let readings = samples(&daemon);
        runs = reader_runs(&daemon).unwrap();
        readings >= requests + 3
    });
    daemon.configure("[memory]\nsample = \"off\"\n");
    assert!(daemon.pjwctl(&["reload"]).status.success());
    daemon.release("farm").unwrap();
    wait_until("the job is over", || daemon.status().jobs.is_empty());
    daemon.assign("farm", 1, &[shell.pid()]).unwrap();
    assert_eq!(samples(&daemon), 1, "the history ends with the job");
}

#[test]
fn sampling_that_is_turned_on_begins_at_once_and_a_long_pause_ends_with_a_reload() {
    let shell = Shell::start();
    let daemon = Daemon::start("[memory]\nsample = \"1h\"\nbudget_permille = 1\n");
    daemon.assign("farm", 1, &[shell.pid()]).unwrap();
    daemon.configure("[memory]\nsample = \"1s\"\nbudget_permille = 1000\n");
    let before = reader_runs(&daemon).unwrap_or(0);
    assert!(daemon.pjwctl(&["reload"]).status.success());
    wait_until("a reading after the reload", || reader_runs(&daemon).is_some_and(|now| now > before));
}

#[test]
fn the_report_of_a_job_has_the_shared_part_of_its_memory_if_that_was_read() {
    if !is_installed("python3") {
        return;
    }
    let farm = Farm::start("late", 0);
    let daemon = Daemon::start("");
    farm.assign(&daemon);
    let reading = memory(&daemon);
    let shared = number(&reading["shared_permille"]);
    daemon.release("farm").unwrap();
    let report = |daemon: &Daemon| -> Value {
        let output = daemon.pjwctl(&["report", &daemon.job_id("farm"), "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let read = report(&daemon);
    assert!(agree(number(&read["shared_permille"]), shared, 20), "{read} {shared}");
    assert_eq!(read["shared_source"], "smaps");
    // A machine on which each session has a memory cgroup tells the peak by that.
    let source = read["memory_peak_source"].as_str().unwrap_or_default();
    assert!(["smaps", "cgroup"].contains(&source), "{read}");
    assert!(number(&read["memory_peak"]) >= number(&reading["pss"]) * 9 / 10, "{read} {reading}");
    farm.assign(&daemon);
    daemon.release("farm").unwrap();
    let unread = report(&daemon);
    assert!(unread["shared_permille"].is_null() && unread["shared_source"].is_null(), "{unread}");
    assert_ne!(unread["memory_peak_source"], "smaps", "{unread}");
}

#[test]
fn the_report_of_a_job_has_its_memory_although_nobody_asked() {
    let mut shell = Shell::start();
    let busy = KillOnDrop(shell.background("while :; do :; done"));
    let daemon = Daemon::start("");
    // The reading may not be complete when its thread sleeps for the first time. Then again.
    let report = wait_for("a report with the memory of the job", || {
        let before = reader_runs(&daemon).unwrap_or(0);
        daemon.assign("a", 1, &[shell.pid(), busy.0]).unwrap();
        wait_until("a reading without a request", || {
            reader(&daemon).is_some_and(|reader| reader.runs > before && reader.is_asleep)
        });
        daemon.release("a").unwrap();
        let output = daemon.pjwctl(&["report", &daemon.job_id("a"), "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        Some(report).filter(|report| !report["shared_permille"].is_null())
    });
    assert!(number(&report["shared_permille"]) <= 1000, "{report}");
    assert!(number(&report["memory_peak"]) > 0, "{report}");
    for source in ["shared_source", "memory_peak_source"] {
        assert!(["cgroup", "smaps"].contains(&report[source].as_str().unwrap_or_default()), "{report}");
    }
}

#[test]
fn the_calls_of_a_user_at_the_same_time_are_answered_or_refused_and_a_refused_one_causes_no_reading() {
    if !is_root() || !is_installed("python3") || !programs_are_reachable() {
        return;
    }
    let farm = Farm::start("late", 0);
    let daemon = Daemon::start("");
    make_accessible(&daemon);
    farm.assign(&daemon);
    let id = daemon.job_id("farm");
    let before = samples(&daemon);
    // Administrators always cause readings. These keep the thread busy, so that the calls of the user wait.
    let start = |uid: u32| {
        let mut command = daemon.pjwctl_command(&["show", &id, "--memory", "--json"]);
        command.uid(uid).gid(uid).current_dir("/").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let readers: Vec<_> = (0..8).map(|_| start(0)).collect();
    let calls: Vec<_> = (0..16).map(|_| start(65_534)).collect();
    let outputs: Vec<_> = calls.into_iter().map(|call| call.wait_with_output().unwrap()).collect();
    for reader in readers {
        assert!(reader.wait_with_output().unwrap().status.success());
    }
    let answered = outputs.iter().filter(|output| output.status.success()).count();
    assert!(answered >= 1, "{outputs:?}");
    for output in outputs.iter().filter(|output| !output.status.success()) {
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("of your calls wait for readings of memory already"), "{message}");
    }
    let caused = samples(&daemon) - before - 8 - 1;
    assert!(caused <= answered, "{caused} readings for {answered} answers");
}

#[test]
fn growing_workers_are_warned_of_before_their_memory_runs_out() {
    if !is_installed("python3") {
        return;
    }
    let Some(cgroup) = MemoryCgroup::make() else {
        skip("this user may make no memory cgroup here");
        return;
    };
    let limit = ["memory.max", "memory.limit_in_bytes"].map(|file| cgroup.0.join(file));
    let limit = limit.into_iter().find(|file| file.exists()).unwrap();
    fs::write(&limit, (1_u64 << 30).to_string()).unwrap();
    let daemon = Daemon::start("[memory]\nsample = \"1s\"\nbudget_permille = 1000\n");
    let mut shell = Shell::start();
    cgroup.add(shell.pid());
    let script = std::env::temp_dir().join(format!("pjw-farm-{}.py", shell.pid()));
    fs::write(&script, FARM).unwrap();
    let workers = shell.run(&format!("exec python3 {} late 4", script.display()));
    fs::remove_file(script).unwrap();
    let workers: Vec<u32> = workers.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    daemon.assign("farm", 1, &[&[shell.pid()], &workers[..]].concat()).unwrap();
    let warning = wait_for("a warning in the status", || {
        daemon.status().warnings.into_iter().find(|warning| warning.code == "memory")
    });
    assert!(warning.text.contains("of their own will not fit"), "{warning:?}");
    assert!(warning.text.starts_with("4 workers x "), "{warning:?}");
    assert_eq!(memory(&daemon)["warning"]["code"], "memory");
    daemon.configure("[memory]\nsample = \"1h\"\nbudget_permille = 1000\n");
    assert!(daemon.pjwctl(&["reload"]).status.success());
    drop(shell);
    workers.into_iter().map(KillOnDrop).for_each(drop);
    wait_until("the warning ends with the job, long before the next sample", || {
        daemon.status().warnings.iter().all(|one| one.code != "memory")
    });
    drop(daemon);
}
