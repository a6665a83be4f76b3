//! `pjwctl spawn`: many instances, each on its own part of the cores from its first instruction.

mod defaults;
mod killed;
mod labels;
mod refused;
mod releasing;
mod signals;
mod tasks;
mod templates;

use std::collections::BTreeMap;
use std::fs::{DirEntry, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::processes::{KillOnDrop, has_two_cores, is_ended, mask};

/// Runs `pjwctl spawn --local` with the words of `line`, and then `command`.
fn local(line: &str, command: &[&str]) -> Output {
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local"]).args(line.split_whitespace()).args(command).stdin(Stdio::null());
    pjwctl.output().unwrap()
}

/// Runs a command that may not end by itself, and waits for its end with a limit. The output must fit into the pipes,
/// which have 64 KiB each: it is read after the end.
fn output_in_time(command: &mut Command, what: &str) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = KillOnDrop(child.id());
    wait_until(what, || is_ended(child.id()));
    // Before the process is waited for: after that, its process id may be that of another process.
    drop(end);
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Builds the program without libc whose first act is to read its mask. It writes records of 32 bytes.
fn program_without_libc(dir: &Path) -> PathBuf {
    let program = dir.join("first_act");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/pjw-spawn/tests/programs/first_act.c");
    let flags = ["-O1", "-nostdlib", "-static", "-ffreestanding", "-fno-stack-protector", "-o"];
    let built = Command::new("cc").args(flags).arg(&program).arg(source).status().unwrap();
    assert!(built.success());
    program
}

/// The number of processes with each mask, of those that were on a PU of their mask at their first instruction.
fn masks_at_first_instruction(records: &[u8]) -> BTreeMap<String, usize> {
    let mut masks = BTreeMap::new();
    for record in records.chunks_exact(32) {
        let word = |at: usize| u64::from_ne_bytes(record[at..at + 8].try_into().unwrap());
        let mask = CpuSet::from_words(&[word(16), word(24)]);
        let cpu = Pu(u32::from_ne_bytes(record[4..8].try_into().unwrap()));
        assert!(mask.contains(cpu), "a process with the mask {mask} runs on {cpu}");
        *masks.entry(mask.to_string()).or_default() += 1;
    }
    masks
}

#[test]
fn every_instance_of_a_job_begins_inside_its_own_part_of_the_grant() {
    if !has_two_cores() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = program_without_libc(dir.path());
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "");
        let cores: Vec<String> = daemon.status().cores[..2].iter().map(|core| core.cpus.clone()).collect();
        let expected: BTreeMap<String, usize> = cores.into_iter().map(|cpus| (cpus, 100)).collect();
        for proxy in ["never", "auto"] {
            let program = program.to_str().unwrap();
            let arguments = ["spawn", "-n", "200", "--cores", "2", "--proxy", proxy, "--", program];
            let output = daemon.pjwctl(&arguments);
            assert!(output.status.success(), "{output:?}");
            assert_eq!(masks_at_first_instruction(&output.stdout), expected, "{enforcement:?}, {proxy}");
            wait_until("the cores are free again", || daemon.status().jobs.is_empty());
        }
    }
}

#[test]
fn each_part_has_a_thread_that_starts_its_instances_also_under_a_narrow_mask() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let pu = mask(std::process::id()).iter().next().unwrap();
    let mut narrow = Command::new("taskset");
    narrow.args(["-c", &pu.to_string()]).arg(program_path("pjwctl")).arg("--socket").arg(daemon.socket());
    narrow.args(["spawn", "-n", "2", "--cores", "2", "--", "sleep", "1000"]).stdin(Stdio::null());
    let mut pjwctl = narrow.spawn().unwrap();
    let guard = KillOnDrop(pjwctl.id());
    // Such a thread lives as long as its instances.
    let tasks = format!("/proc/{}/task", pjwctl.id());
    wait_until("there are two threads", || {
        let threads = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
        let name = |thread: DirEntry| std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        threads.map(name).filter(|name| name == "spawner\n").count() == 2
    });
    drop(guard);
    pjwctl.wait().unwrap();
    wait_until("the job is over", || daemon.status().jobs.is_empty());
}

#[test]
fn the_warden_keeps_the_masks_of_the_parts() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "interval = \"100ms\"\n");
        let job = daemon.job_id("parts");
        let spin = [
            "spawn",
            "-n",
            "2",
            "--async",
            "--json",
            "--job",
            &job,
            "--",
            "sh",
            "-c",
            "exec >/dev/null 2>&1; while :; do :; done",
        ];
        let output = daemon.pjwctl(&spin);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let instances: Vec<(u32, CpuSet)> =
            report["instances"].as_array().unwrap().iter().map(of_instance).collect();
        let guards: Vec<_> = instances.iter().map(|(pid, _)| KillOnDrop(*pid)).collect();
        assert_eq!(report["job"], job.as_str());
        assert!(report["instances"].as_array().unwrap().iter().all(|instance| instance["exit"].is_null()));
        // Only a warden that has read both several times knows that they are hot.
        wait_until("both are hot", || daemon.job("parts").is_some_and(|job| job.hot == 2));
        for (pid, cpus) in &instances {
            assert_eq!(mask(*pid), *cpus, "{enforcement:?}");
        }
        let events = text(&daemon.pjwctl(&["events"]).stdout);
        assert!(!events.contains("repaired") && !events.contains("violation"), "{events}");
        drop(guards);
        wait_until("the job ends with its instances", || daemon.status().jobs.is_empty());
    }
}

fn of_instance(instance: &Value) -> (u32, CpuSet) {
    let pid = u32::try_from(instance["pid"].as_u64().unwrap()).unwrap();
    (pid, instance["cpus"].as_str().unwrap().parse().unwrap())
}

#[test]
fn instances_have_their_ranks_in_arguments_and_variables() {
    let script = "echo $1 $PJW_RANK $PJW_SIZE $PJW_CPUS";
    let output = local("-n 3 --map pu --", &["sh", "-c", script, "sh", "%r/%n%%"]);
    let lines = sorted_lines(&output.stdout);
    assert_eq!(lines.len(), 3, "{output:?}");
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{rank}/3% {rank} 3 ")), "{line}");
    }
    let daemon = Daemon::start("");
    let job = daemon.job_id("named");
    let output = daemon.pjwctl(&["spawn", "-n", "1", "--job", &job, "--", "sh", "-c", "echo $PJW_JOB"]);
    assert_eq!(text(&output.stdout).trim(), job);
    // --local makes no job.
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", "1", "--", "sh", "-c", "echo \"[$PJW_JOB]\""]);
    for (given, expected) in [(None, "[]"), (Some("manual:outer"), "[manual:outer]")] {
        pjwctl.env_remove("PJW_JOB").envs(given.map(|job| ("PJW_JOB", job)));
        assert_eq!(text(&pjwctl.output().unwrap().stdout).trim(), expected);
    }
}

#[test]
fn instances_get_the_parts_in_turn_in_the_order_of_their_ranks() {
    // Part 0 is the last CPU of this process, and part 1 the CPU before it. With one CPU, there is only part 0.
    let mut parts: Vec<String> = mask(std::process::id()).iter().map(|pu| pu.to_string()).collect();
    parts.reverse();
    parts.truncate(2);
    let script = "echo %r $PJW_CPUS $(grep Cpus_allowed_list /proc/self/status)";
    let of_rank = |rank: usize| format!("{rank} {0} Cpus_allowed_list: {0}", parts[rank % parts.len()]);
    for proxy in ["never", "auto"] {
        let line = format!("-n 5 --map {} --proxy {proxy} --", parts.join(";"));
        let output = local(&line, &["sh", "-c", script]);
        assert_eq!(sorted_lines(&output.stdout), [0, 1, 2, 3, 4].map(of_rank), "{proxy}: {output:?}");
    }
}

#[test]
fn the_exit_code_is_the_highest_of_the_instances() {
    let code = |script: &str| local("-n 3 --", &["sh", "-c", script, "sh", "%r"]).status.code();
    assert_eq!(code("exit 0"), Some(0));
    assert_eq!(code("exit $1"), Some(2));
    assert_eq!(code("[ $1 = 1 ] && kill -9 $$; exit 3"), Some(137));
    let output = local("-n 3 --", &["sh", "-c", "exit $1", "sh", "%r"]);
    let errors = sorted_lines(&output.stderr);
    assert_eq!(errors.len(), 2, "one line for each that failed: {errors:?}");
    assert!(errors[0].contains("instance 1") && errors[0].contains("exit code 1"), "{errors:?}");
}

#[test]
fn json_has_each_instance_with_its_end() {
    let output = local("-n 2 --json --", &["sh", "-c", "[ $1 = 1 ] && kill -9 $$; exit 0", "sh", "%r"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["mode"], &report["job"]), (&Value::from("exec"), &Value::Null));
    assert!(report["started_us"].as_u64().unwrap() > 0);
    let [first, second] = report["instances"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!(
        (&first["exit"], &first["signal"], &first["step"]),
        (&Value::from(0), &Value::Null, &Value::Null)
    );
    assert_eq!((&second["exit"], &second["signal"]), (&Value::Null, &Value::from(9)));
}

#[test]
fn a_result_that_cannot_be_printed_does_not_say_that_nothing_was_started() {
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", "1", "--json", "--", "sh", "-c", "echo ran >&2"]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = pjwctl.stdin(Stdio::null()).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("ran\n") && !error.contains("nothing was started"), "{error}");
    assert!(error.contains("the instances were started, and the result can't be printed: "), "{error}");
}

#[test]
fn a_pjwctl_that_was_started_with_sigchld_ignored_learns_how_its_instances_ended() {
    for proxy in ["never", "auto"] {
        let mut ignoring = Command::new("env");
        ignoring.arg("--ignore-signal=CHLD").arg(program_path("pjwctl"));
        ignoring.args(["spawn", "--local", "-n", "2", "--json", "--proxy", proxy]);
        ignoring.args(["--", "/bin/sh", "-c", "exit %r"]);
        let output = output_in_time(&mut ignoring, &format!("pjwctl ends: {proxy}"));
        assert_eq!(output.status.code(), Some(1), "{proxy}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let exits = report["instances"].as_array().unwrap().iter().map(|instance| instance["exit"].as_i64());
        assert_eq!(exits.collect::<Vec<_>>(), [Some(0), Some(1)], "{proxy}");
    }
}

/// Runs `pjwctl spawn --local --json` with a proxy. Returns the exit code, the mode, why, and the exit codes of the
/// instances.
fn proxied(proxy: &str, line: &str, command: &[&str]) -> (Option<i32>, Value, Value, Vec<Value>) {
    let output = local(&format!("--proxy {proxy} --json {line} --"), command);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let exits = json["instances"].as_array().into_iter().flatten().map(|instance| instance["exit"].clone());
    (output.status.code(), json["mode"].clone(), json["why"].clone(), exits.collect())
}

#[test]
fn json_says_whether_instances_are_forks_of_a_loaded_program_and_why_not() {
    let command = ["/bin/sh", "-c", "exit %r"];
    let (code, mode, _, exits) = proxied("never", "-n 3", &command);
    assert_eq!((code, mode, exits), (Some(2), "exec".into(), vec![0.into(), 1.into(), 2.into()]));
    let (code, mode, why, exits) = proxied("auto", "-n 3", &command);
    let expected = if cfg!(target_arch = "x86_64") { "proxy" } else { "exec" };
    assert_eq!((code, mode, exits), (Some(2), expected.into(), vec![0.into(), 1.into(), 2.into()]), "{why}");
    // A part with one instance has a template, too.
    let (_, mode, why, _) = proxied("auto", "-n 2", &command);
    assert_eq!(mode, expected, "{why}");
    let (_, mode, why, _) = proxied("auto", "-n 1", &command);
    assert_eq!(mode, "exec");
    assert!(why.as_str().unwrap().contains("a single instance"), "{why}");
}

#[test]
fn auto_says_which_way_it_took_when_all_have_begun() {
    let begun = "sleep 1000 & echo $! >&2; wait";
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", "2", "--proxy", "auto", "--", "/bin/sh", "-c", begun]);
    let mut pjwctl = pjwctl.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // The instances sleep until the line is there.
    let mut lines = BufReader::new(pjwctl.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut sleeps = Vec::new();
    let mut said = None;
    while sleeps.len() < 2 || said.is_none() {
        let line = lines.next().unwrap();
        match line.parse() {
            Ok(pid) => sleeps.push(KillOnDrop(pid)),
            Err(_) => said = Some(line),
        }
    }
    let said = said.unwrap();
    if cfg!(target_arch = "x86_64") {
        assert!(
            said.starts_with("pjwctl: the program was loaded once, and each instance is a fork"),
            "{said}"
        );
    } else {
        assert!(said.starts_with("pjwctl: each instance executed the program: "), "{said}");
    }
    drop(sleeps);
    pjwctl.wait().unwrap();
}

#[test]
fn a_program_without_a_template_does_not_change_how_another_is_started() {
    let dir = tempfile::tempdir().unwrap();
    let (program, file) = (dir.path().join("privileged"), dir.path().join("multi"));
    assert!(Command::new("cp").arg("/bin/true").arg(&program).status().unwrap().success());
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    std::fs::write(&file, format!("0-2 /bin/true\n3-4 {}\n", program.display())).unwrap();
    let (code, mode, why, _) = proxied("auto", &format!("--multi {}", file.display()), &[]);
    let why = why.as_str().unwrap();
    assert_eq!(code, Some(0), "{why}");
    if cfg!(target_arch = "x86_64") {
        assert_eq!(mode, "proxy", "{why}");
        assert!(why.starts_with("3 of 5 instances are forks of a loaded program"), "{why}");
    } else {
        assert_eq!(mode, "exec", "{why}");
    }
}

#[test]
fn a_program_that_cannot_have_a_template_is_executed_by_auto_and_refused_by_always() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("privileged");
    // Another process writes the file: one that a child of this process has open for writing can't be executed.
    assert!(Command::new("cp").arg("/bin/true").arg(&program).status().unwrap().success());
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let command = [program.to_str().unwrap()];
    let (code, mode, why, exits) = proxied("auto", "-n 2", &command);
    assert_eq!((code, mode, exits), (Some(0), "exec".into(), vec![0.into(), 0.into()]), "{why}");
    let output = local("--proxy always -n 2 --", &command);
    let line = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(line.starts_with("pjwctl: nothing was started: ") && line.contains("--proxy auto"), "{line}");
    let output = local("--proxy always -n 1 --", &["/bin/true"]);
    assert!(text(&output.stderr).contains("at least 2 instances"), "{output:?}");
}

const HEADER: &str = include_str!("../../crates/pjw-spawn-c/include/pjw_spawn.h");

/// Its start-up leaves a byte in a file. Its instances end with their argument.
const LATE: &str = r#"
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#include "pjw_spawn.h"
int main(int argc, char **argv) {
    int file = open(argv[2], O_WRONLY | O_APPEND);
    if (file < 0 || write(file, "x", 1) != 1 || pspawn_fork_here(&argc, &argv) < 0) return 100;
    return argc == 3 ? atoi(argv[1]) : 101;
}
"#;

#[test]
fn a_program_that_calls_fork_here_starts_up_once_for_all_instances() {
    let dir = tempfile::tempdir().unwrap();
    let (source, program, starts) =
        (dir.path().join("late.c"), dir.path().join("late"), dir.path().join("starts"));
    std::fs::write(&source, LATE).unwrap();
    std::fs::write(&starts, "").unwrap();
    let library = dir.path().join("libpjw_spawn.so.0");
    std::os::unix::fs::symlink(program_path("libpjw_spawn.so"), &library).unwrap();
    // The user of the test may not be able to read the source tree.
    std::fs::write(dir.path().join("pjw_spawn.h"), HEADER).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-Wl,-rpath,$ORIGIN", "-o"]).args([&program, &source, &library]);
    assert!(compiler.status().unwrap().success());
    let count_of_starts = || std::fs::read(&starts).unwrap().len();
    let command = [program.to_str().unwrap(), "%r", starts.to_str().unwrap()];
    let (code, mode, why, exits) = proxied("late", "-n 3", &command);
    assert_eq!((code, exits), (Some(2), vec![0.into(), 1.into(), 2.into()]), "{why}");
    let expected = if cfg!(target_arch = "x86_64") { ("proxy", 1) } else { ("exec", 3) };
    assert_eq!((mode.as_str().unwrap(), count_of_starts()), expected, "{why}");
    // Without --proxy late, the call returns at once.
    let (_, mode, _, exits) = proxied("never", "-n 3", &command);
    assert_eq!((mode, exits), ("exec".into(), vec![0.into(), 1.into(), 2.into()]));
    assert_eq!(count_of_starts(), expected.1 + 3);
    // A program without the call ends, and each instance executes it.
    let (code, mode, why, _) = proxied("late", "-n 2", &["/bin/true"]);
    assert_eq!((code, mode), (Some(0), "exec".into()));
    assert!(why.as_str().unwrap().contains("before it could be forked") || expected.0 == "exec", "{why}");
}

#[test]
fn labelled_lines_begin_with_the_rank_and_are_never_mixed() {
    let script = "for i in 1 2 3; do printf a$1; sleep 0.01; echo b; done; printf end >&2";
    let output = local("-n 4 --label --", &["sh", "-c", script, "sh", "%r"]);
    let lines = sorted_lines(&output.stdout);
    let expected: Vec<String> = (0..4).flat_map(|rank| vec![format!("{rank}: a{rank}b"); 3]).collect();
    assert_eq!(lines, expected);
    assert_eq!(sorted_lines(&output.stderr), ["0: end", "1: end", "2: end", "3: end"]);
}

#[test]
fn a_labelled_line_does_not_begin_behind_the_progress_line() {
    if !crate::processes::is_installed("script") {
        return;
    }
    // script(1) gives pjwctl a terminal.
    let line = format!(
        "{} spawn --local -n 101 --label -- sh -c 'sleep 0.%r; echo out'",
        program_path("pjwctl").display()
    );
    let mut script = Command::new("script");
    let output = script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).output().unwrap();
    let text = text(&output.stdout);
    assert!(text.contains(" of 101 instances begun, "), "{text}");
    let labelled: Vec<&str> = text.split("\r\n").filter(|line| line.ends_with(": out")).collect();
    assert_eq!(labelled.len(), 101, "{text}");
    for line in labelled {
        // What follows the last return to the begin of the line.
        let last = line.rsplit('\r').next().unwrap_or_default();
        assert!(!last.contains("instances begun"), "{line:?}");
    }
}

#[test]
fn a_file_gives_ranks_their_own_commands() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("multi");
    std::fs::write(&file, "0 echo master %r\n# all others\n* echo worker %r of %n\n").unwrap();
    let output = local(&format!("-n 3 --multi {}", file.display()), &[]);
    assert_eq!(sorted_lines(&output.stdout), ["master 0", "worker 1 of 3", "worker 2 of 3"], "{output:?}");
}

#[test]
fn a_signal_to_pjwctl_reaches_all_instances() {
    // WINCH, URG and IO.
    let script = "trap 'echo size for $1' 28; trap 'echo urgent for $1' 23; trap 'echo ready for $1' 29; \
                  trap 'echo got $1; exit 0' USR1; echo begun; while :; do sleep 0.01; done";
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", "3", "--", "sh", "-c", script, "sh", "%r"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    let mut child = pjwctl.stdout(std::fs::File::create(&path).unwrap()).spawn().unwrap();
    let output = || std::fs::read_to_string(&path).unwrap();
    wait_until("all have begun", || output().matches("begun").count() == 3);
    let pid = Pid::from_raw(child.id().cast_signed());
    for (signal, name) in [(Signal::SIGWINCH, "size"), (Signal::SIGURG, "urgent"), (Signal::SIGIO, "ready")] {
        kill(pid, signal).unwrap();
        wait_until("all got the signal", || output().matches(&format!("{name} for")).count() == 3);
    }
    kill(pid, Signal::SIGUSR1).unwrap();
    wait_until("pjwctl ends with its instances", || is_ended(child.id()));
    assert!(child.wait().unwrap().success());
    assert!((0..3).all(|rank| output().contains(&format!("got {rank}"))), "{}", output());
}

#[test]
fn a_signal_that_keeps_instances_from_starting_is_in_the_exit_code_and_in_one_line() {
    if !cfg!(target_arch = "x86_64") {
        skip("late forks are on x86-64 only");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (script, file) = (dir.path().join("script"), dir.path().join("multi"));
    std::fs::write(&script, "kill -TERM $PPID\n").unwrap();
    // sleep never calls pspawn_fork_here, so no instance of it begins.
    std::fs::write(&file, format!("0 sh {}\n* sleep 1000\n", script.display())).unwrap();
    // The first instance ignores SIGTERM, sends it to pjwctl and ends with 0.
    let mut ignoring = Command::new("env");
    ignoring.arg("--ignore-signal=TERM").arg(program_path("pjwctl"));
    ignoring.args(["spawn", "--local", "-n", "4", "--proxy", "late", "--json", "--multi"]).arg(&file);
    let output = output_in_time(&mut ignoring, "the signal ends pjwctl");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let has_begun = |instance: &Value| instance["pid"].is_u64();
    let begun: Vec<bool> = report["instances"].as_array().unwrap().iter().map(has_begun).collect();
    assert_eq!(begun, [true, false, false, false], "{report}");
    assert_eq!(report["instances"][0]["exit"], 0, "{report}");
    assert_eq!(output.status.code(), Some(128 + 15));
    let line = "pjwctl: 3 instances were not started after signal 15";
    assert_eq!(text(&output.stderr).lines().filter(|text| *text == line).count(), 1, "{output:?}");
}

#[test]
fn a_rule_for_numa_nodes_gives_each_part_out_once() {
    for rule in ["default", "rr", "ll", "fill", "packed"] {
        let line = format!("-n 2 --within-job {rule} --");
        let output = local(&line, &["sh", "-c", "echo $PJW_RANK"]);
        assert!(output.status.success(), "{rule}: {output:?}");
        assert_eq!(sorted_lines(&output.stdout), ["0", "1"], "{rule}");
    }
}
