//! `pjwctl spawn`: many instances, each on its own part of the cores from its first instruction.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until, wait_until_empty};
use serde_json::Value;

use crate::processes::{has_two_cores, is_root, mask};

/// The variable in the environment of the instances of a killed pjwctl.
const MARK: &str = "PJW_TEST_SPAWN";
/// The points in time at which pjwctl is killed.
const KILLS: u64 = 50;
/// The signals that it gets, in turns. Not SIGSEGV and SIGBUS: a handler of Rust's runtime takes the first one that another
/// process sends before pjwctl has given them their default effect.
const SIGNALS: [Signal; 8] = [
    Signal::SIGKILL,
    Signal::SIGTERM,
    Signal::SIGKILL,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGABRT,
    Signal::SIGUSR1,
];

/// Runs `pjwctl spawn --local` with the words of `line`, and then `command`.
fn local(line: &str, command: &[&str]) -> Output {
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local"]).args(line.split_whitespace()).args(command).stdin(Stdio::null());
    // A directory of PATH that a plain user may not enter changes what is reported.
    pjwctl.env("PATH", "/usr/bin:/bin");
    pjwctl.output().unwrap()
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
        let guards: Vec<_> = instances.iter().map(|(pid, _)| crate::processes::KillOnDrop(*pid)).collect();
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

/// Runs `pjwctl spawn --local --json` with a proxy. Returns the exit code, the mode, why, and the exit codes of the instances.
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
    let (_, mode, why, _) = proxied("auto", "-n 1", &command);
    assert_eq!(mode, "exec");
    assert!(why.as_str().unwrap().contains("a single instance"), "{why}");
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
fn a_file_gives_ranks_their_own_commands() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("multi");
    std::fs::write(&file, "0 echo master %r\n# all others\n* echo worker %r of %n\n").unwrap();
    let output = local(&format!("-n 3 --multi {}", file.display()), &[]);
    assert_eq!(sorted_lines(&output.stdout), ["master 0", "worker 1 of 3", "worker 2 of 3"], "{output:?}");
}

#[test]
fn a_signal_to_pjwctl_reaches_all_instances() {
    let script = "trap 'echo got $1; exit 0' USR1; echo ready; while :; do sleep 0.01; done";
    let mut pjwctl = Command::new(program_path("pjwctl"));
    pjwctl.args(["spawn", "--local", "-n", "3", "--", "sh", "-c", script, "sh", "%r"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    let mut child = pjwctl.stdout(std::fs::File::create(&path).unwrap()).spawn().unwrap();
    let output = || std::fs::read_to_string(&path).unwrap();
    wait_until("all are ready", || output().matches("ready").count() == 3);
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGUSR1).unwrap();
    assert!(child.wait().unwrap().success());
    assert!((0..3).all(|rank| output().contains(&format!("got {rank}"))), "{}", output());
}

#[test]
fn nothing_starts_if_something_is_wrong_and_one_line_says_what() {
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("started");
    let marker = marker.to_str().unwrap();
    let touch = ["touch", marker];
    let unknown = ["touch", marker, "%x"];
    let plain_file = dir.path().join("plain");
    std::fs::write(&plain_file, "").unwrap();
    let plain_file = plain_file.to_str().unwrap();
    // Its only argument is longer than execve(2) allows.
    let long = dir.path().join("long");
    std::fs::write(&long, format!("* touch {marker} {}", "x".repeat(200_000))).unwrap();
    let long = format!("-n 2 --multi {}", long.display());
    let cases: [(&str, &[&str], i32, &str); 9] = [
        ("-n 0 --", &touch, 1, "the number of instances is 0: start at least 1"),
        ("-n 2 --", &["/no/such/program"], 127, "there is no program /no/such/program: check its name"),
        (
            "-n 2 --",
            &["no-such-program"],
            127,
            "there is no program no-such-program: check its name, and PATH",
        ),
        ("-n 2 --", &[dir.path().to_str().unwrap()], 126, "it is a directory; name the program in it"),
        ("-n 2 --", &[plain_file], 126, "it may not be executed; check its permissions"),
        ("-n 2 --", &unknown, 1, "unknown placeholder %x: use %r for the rank"),
        ("-n 2 --map 0;8000 --", &touch, 1, "the part 8000 of the map is not inside the CPUs"),
        ("-n 100000000 --", &touch, 1, "there is room for"),
        (&long, &[], 1, "too large: a string has 200001 bytes"),
    ];
    for (line, command, code, message) in cases {
        let output = local(line, command);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {error}");
        assert!(
            error.starts_with("pjwctl: nothing was started: ") && error.contains(message),
            "{line}: {error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert!(!Path::new(marker).exists());
}

#[test]
fn more_instances_than_pids_max_allows_are_refused_beforehand() {
    if !is_root() {
        return;
    }
    let Some(hierarchy) = pids_hierarchy() else {
        skip("the pids controller is not available in a hierarchy that can be written");
        return;
    };
    let cgroup = hierarchy.join(format!("pjw-test-{}", std::process::id()));
    std::fs::create_dir(&cgroup).unwrap();
    std::fs::write(cgroup.join("pids.max"), "20").unwrap();
    let program = program_path("pjwctl");
    let run = |instances: u32| {
        let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", cgroup.display());
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            &enter,
            "sh",
            program.to_str().unwrap(),
            "spawn",
            "--local",
            "-n",
            &instances.to_string(),
        ]);
        shell.args(["--", "true"]).output().unwrap()
    };
    let (few, many) = (run(4), run(40));
    wait_until("the cgroup can be removed", || std::fs::remove_dir(&cgroup).is_ok());
    assert!(few.status.success(), "{few:?}");
    let error = text(&many.stderr);
    assert_eq!(many.status.code(), Some(1), "{error}");
    assert!(error.contains("pids.max is 20") && error.contains("start fewer, or raise it"), "{error}");
}

/// A directory in which cgroups with a pids controller can be made.
fn pids_hierarchy() -> Option<PathBuf> {
    let v1 = Path::new("/sys/fs/cgroup/pids");
    if v1.join("cgroup.procs").exists() {
        return Some(v1.to_owned());
    }
    let v2 = Path::new("/sys/fs/cgroup");
    let controllers = std::fs::read_to_string(v2.join("cgroup.subtree_control")).unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "pids").then(|| v2.to_owned())
}

/// The processes with the mark of this test in their environment.
fn marked_processes(mark: &str) -> Vec<u32> {
    let line = format!("{MARK}={mark}");
    let has_mark = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == line.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has_mark).collect()
}

/// Starts `pjwctl spawn` without core dumps: some of the signals make one.
fn start_marked(daemon: Option<&Daemon>, proxy: &str, mark: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -c 0; exec \"$@\"", "sh"]).arg(program_path("pjwctl"));
    match daemon {
        Some(daemon) => command.arg("--socket").arg(daemon.socket()).args(["spawn", "--cores", "1"]),
        None => command.args(["spawn", "--local"]),
    };
    command.args(["-n", "40", "--proxy", proxy, "--", "sleep", "1000"]).env(MARK, mark).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn pjwctl_killed_at_any_moment_leaves_no_process_no_job_and_no_cgroup() {
    let daemon = Daemon::start("");
    let mark = format!("spawn-{}", std::process::id());
    for point in 0..KILLS {
        let daemon_of_job = (point % 5 != 0).then_some(&daemon);
        let proxy = if point % 3 == 0 { "auto" } else { "never" };
        let mut pjwctl = start_marked(daemon_of_job, proxy, &mark);
        let pid = Pid::from_raw(pjwctl.id().cast_signed());
        // A prime step spreads the points over the start and the time after it.
        std::thread::sleep(Duration::from_millis(point * 37 % 150));
        let signal = SIGNALS[usize::try_from(point).unwrap() % SIGNALS.len()];
        kill(pid, signal).unwrap();
        let status = wait_for("pjwctl ends", || pjwctl.try_wait().unwrap());
        assert!(!status.success() || status.signal().is_some(), "{signal}: {status}");
        wait_until_empty("no instance is left", || marked_processes(&mark));
        wait_until("the job is over", || daemon.status().jobs.is_empty());
    }
    // The daemon's end checks that no cgroup is left.
}
