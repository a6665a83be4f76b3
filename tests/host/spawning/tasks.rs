//! `pjwctl spawn --share memory`: instances in one address space, with all that instances of a group have.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;
use tempfile::TempDir;

use super::{local, of_instance, sorted_lines, text};
use crate::processes::{has_two_cores, mask};

/// A program that a shell script can't be: it prints a line, and then ends, or waits for a signal.
const PROGRAM: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
static volatile sig_atomic_t is_told;
static void told(int signal) { (void)signal; is_told = 1; }
int main(int argc, char **argv) {
    signal(SIGUSR1, told);
    printf("%s %s %s %s %s %s\n", argc > 1 ? argv[1] : "-", getenv("PJW_RANK"), getenv("PJW_SIZE"), getenv("PJW_CPUS"),
           getenv("PJW_GROUP") ? getenv("PJW_GROUP") : "-", getenv("PJW_TASKS") ? "shared" : "alone");
    fflush(stdout);
    if (argc > 1 && strcmp(argv[1], "quiet") == 0) { close(1); close(2); }
    if (argc > 1 && (strcmp(argv[1], "brk") == 0 || strcmp(argv[1], "abort") == 0)) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        if (argv[1][0] == 'a') abort();
        /* As a static glibc before 2.36: the result is not checked. */
        volatile char *heap = sbrk(4096);
        heap[0] = 1;
    }
    if (argc > 2 && strcmp(argv[2], "wait") == 0) while (!is_told) usleep(1000);
    return argc > 2 ? atoi(argv[2]) : 0;
}
"#;

/// Compiles the program. `None` where tasks can't run.
fn program(flags: &[&str]) -> Option<(PathBuf, TempDir)> {
    compile(PROGRAM, flags)
}

fn compile(text: &str, flags: &[&str]) -> Option<(PathBuf, TempDir)> {
    if !cfg!(target_arch = "x86_64") {
        skip("tasks run on x86-64 only");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("task.c"), dir.path().join("task"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc").args(flags).arg("-o").arg(&program).arg(&source).output().unwrap();
    if !built.status.success() {
        skip("cc can't link static programs here");
        return None;
    }
    Some((program, dir))
}

fn shared(line: &str, program: &Path, arguments: &[&str]) -> Output {
    let command: Vec<&str> =
        std::iter::once(program.to_str().unwrap()).chain(arguments.iter().copied()).collect();
    local(&format!("--share memory {line} --"), &command)
}

/// The JSON of pjwctl. Tasks may print their lines before and after it.
fn report(output: &Output) -> Value {
    let printed = text(&output.stdout);
    let json: Vec<&str> = printed.lines().filter(|line| line.starts_with(['{', '}', ' '])).collect();
    serde_json::from_str(&json.join("\n")).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn tasks_have_ranks_labels_and_exit_codes_as_other_instances_have_them() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    let output = shared("-n 3 --map pu --label", &program, &["%r/%n", "%r"]);
    let lines = sorted_lines(&output.stdout);
    assert_eq!(lines.len(), 3, "{output:?}");
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{rank}: {rank}/3 {rank} 3 ")), "{line}");
        assert!(line.ends_with(" shared"), "{line}");
    }
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn json_says_that_the_instances_share_their_memory() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    let output = shared("-n 2 --json", &program, &["%r", "%r"]);
    let report = report(&output);
    assert_eq!((&report["mode"], &report["job"]), (&Value::from("shared"), &Value::Null));
    assert!(report["started_us"].as_u64().unwrap() > 0);
    let exits: Vec<&Value> = report["instances"].as_array().unwrap().iter().map(|one| &one["exit"]).collect();
    assert_eq!(exits, [0, 1]);
}

#[test]
fn each_command_gives_its_instances_a_group_name_of_their_own() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    let mut names = Vec::new();
    for share in ["--share memory", "", ""] {
        let output = local(&format!("{share} -n 3 --"), &[program.to_str().unwrap()]);
        let lines = sorted_lines(&output.stdout);
        let of_ranks: BTreeSet<&str> = lines.iter().filter_map(|line| line.split(' ').nth(4)).collect();
        assert_eq!((lines.len(), of_ranks.len()), (3, 1), "{output:?}");
        names.extend(of_ranks.into_iter().map(str::to_owned));
    }
    assert!(names.iter().all(|name| name.len() > 1), "{names:?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 3, "{names:?}");
}

#[test]
fn the_stencil_runs_unchanged_with_and_without_shared_memory_and_its_sum_does_not_depend_on_the_ranks() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/pjw-spawn-c");
    let source = std::fs::read_to_string(crates.join("examples/stencil.c")).unwrap();
    let include = format!("-I{}", crates.join("include").display());
    let Some((stencil, _dir)) = compile(&source, &["-O2", "-static-pie", &include]) else { return };
    let sum = |share: &str, ranks: u32, steps: &str| {
        let output = local(&format!("{share} -n {ranks} --"), &[stencil.to_str().unwrap(), "64", steps]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        text(&output.stdout)
    };
    let expected = sum("", 1, "100");
    assert!(expected.starts_with("sum ") && expected.lines().count() == 1, "{expected}");
    assert_ne!(expected, sum("", 1, "10"), "the steps change the sum");
    for (share, ranks) in
        [("--share memory", 1), ("", 4), ("--share memory", 4), ("", 7), ("--share memory", 7)]
    {
        assert_eq!(sum(share, ranks, "100"), expected, "{share} -n {ranks}");
    }
}

#[test]
fn a_static_program_of_rust_runs_as_tasks() {
    if !cfg!(target_arch = "x86_64") {
        skip("tasks run on x86-64 only");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("task.rs"), dir.path().join("task"));
    // Threads, the heap, and a lock of the standard library.
    let code = r#"fn main() {
        let words = std::thread::spawn(|| (0..1000).map(|n| n.to_string()).collect::<Vec<_>>()).join().unwrap();
        println!("{} {}", std::env::var("PJW_RANK").unwrap(), words.concat().len());
    }"#;
    std::fs::write(&source, code).unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition", "2021", "-C", "target-feature=+crt-static", "-o"]).args([&program, &source]);
    if !rustc.output().is_ok_and(|output| output.status.success()) {
        skip("rustc can't link static programs here");
        return;
    }
    let output = shared("-n 3", &program, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(sorted_lines(&output.stdout), ["0 2890", "1 2890", "2 2890"]);
}

#[test]
fn tasks_of_a_job_keep_to_their_parts_and_end_with_a_signal_to_each() {
    if !has_two_cores() {
        return;
    }
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    for enforcement in Enforcement::available() {
        let config = "interval = \"100ms\"\nrescan_interval = \"200ms\"\n";
        let daemon = Daemon::start_with(enforcement, config);
        let job = daemon.job_id("tasks");
        let program = program.to_str().unwrap();
        let arguments = [
            "spawn", "-n", "2", "--async", "--json", "--share", "memory", "--job", &job, "--", program,
            "quiet", "wait",
        ];
        let output = daemon.pjwctl(&arguments);
        let report = report(&output);
        let instances: Vec<(u32, CpuSet)> =
            report["instances"].as_array().unwrap().iter().map(of_instance).collect();
        assert_eq!(instances.len(), 2);
        let guards: Vec<_> = instances.iter().map(|(pid, _)| crate::processes::KillOnDrop(*pid)).collect();
        assert_eq!(report["job"], job.as_str());
        wait_until("the job has both, and the scan has found that they share their memory", || {
            let shown = daemon.pjwctl(&["show", &job, "--json"]);
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
            let member = |pid: u32| shown["members"].as_array().unwrap().iter().find(|one| one["pid"] == pid);
            let space = |(pid, _): &(u32, CpuSet)| member(*pid).and_then(|one| one["address_space"].as_u64());
            let spaces: Option<Vec<u64>> = instances.iter().map(space).collect();
            spaces.is_some_and(|spaces| spaces.iter().all(|space| *space == spaces[0]))
        });
        wait_until("their host is known too", || {
            let shown = text(&daemon.pjwctl(&["show", &job]).stdout);
            shown.contains("2 tasks share the address space of process")
        });
        for (pid, cpus) in &instances {
            assert_eq!(mask(*pid), *cpus, "{enforcement:?}");
        }
        for (pid, _) in &instances {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGUSR1).unwrap();
        }
        wait_until("the job ends with its tasks and their host", || daemon.status().jobs.is_empty());
        drop(guards);
    }
}

#[test]
fn a_signal_to_pjwctl_reaches_all_tasks_and_its_end_ends_them() {
    let Some((program, dir)) = program(&["-static-pie"]) else { return };
    for (signal, code) in [(Signal::SIGUSR1, Some(0)), (Signal::SIGKILL, None)] {
        let output = dir.path().join(signal.as_str());
        let mut pjwctl = Command::new(program_path("pjwctl"))
            .args(["spawn", "--local", "-n", "3", "--share", "memory", "--"])
            .arg(&program)
            .args([output.to_str().unwrap(), "wait"])
            .stdout(std::fs::File::create(&output).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("all have begun", || std::fs::read_to_string(&output).unwrap().lines().count() == 3);
        kill(Pid::from_raw(pjwctl.id().cast_signed()), signal).unwrap();
        assert_eq!(pjwctl.wait().unwrap().code(), code);
        let holds = |pid: &str| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|path| path == output)
        };
        wait_until("neither a task nor the host is left", || {
            let processes = std::fs::read_dir("/proc").unwrap().flatten();
            !processes.filter_map(|entry| entry.file_name().into_string().ok()).any(|pid| holds(&pid))
        });
    }
}

#[test]
fn the_output_of_an_asynchronous_group_ends_with_its_last_task() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    // pjwctl starts with the descriptors 0 to 2 only, as from a terminal.
    let line = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; \
                exec \"$0\" spawn --local --async --share memory -n 2 -- \"$1\" %r 0";
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).arg(program_path("pjwctl")).arg(&program);
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut pjwctl = shell.spawn().unwrap();
    let mut output = pjwctl.stdout.take().unwrap();
    assert_eq!(pjwctl.wait().unwrap().code(), Some(0));
    let reader = std::thread::spawn(move || std::io::read_to_string(&mut output).unwrap());
    wait_until("no process holds the pipe", || reader.is_finished());
    let printed = reader.join().unwrap();
    assert_eq!(printed.lines().filter(|line| line.ends_with(" shared")).count(), 2, "{printed}");
}

#[test]
fn a_program_inherits_no_address_of_other_tasks() {
    let output = Command::new(program_path("pjwctl"))
        .args(["spawn", "--local", "-n", "1", "--", "/bin/sh", "-c", "echo ${PJW_TASKS-none}"])
        .env("PJW_TASKS", "1000:1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(text(&output.stdout), "none\n", "{output:?}");
}

#[test]
fn what_cannot_share_memory_starts_nothing_and_one_line_says_why() {
    let Some((dynamic, _dynamic_dir)) = program(&["-pie", "-fPIE"]) else { return };
    let Some((fixed, _fixed_dir)) = program(&["-static", "-no-pie"]) else { return };
    let Some((foreign, _foreign_dir)) = program(&["-static-pie"]) else { return };
    let file = std::fs::File::options().write(true).open(&foreign).unwrap();
    // The field e_machine of the ELF header, elf(5): 183 is EM_AARCH64.
    file.write_at(&[183, 0], 18).unwrap();
    drop(file);
    for (program, why) in [
        (&dynamic, "it is linked dynamically; link it with -static-pie"),
        (&PathBuf::from("/bin/true"), "it is linked dynamically"),
        (&fixed, "it is static, and not position-independent; link it with -static-pie"),
        (&foreign, "it is for aarch64, and tasks run on x86-64 only; compile it for x86-64"),
    ] {
        let output = shared("-n 2", program, &[]);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(error.starts_with("pjwctl: nothing was started: ") && error.contains(why), "{error}");
        assert!(output.stdout.is_empty());
    }
    let output = shared("-n 2 --proxy auto", &dynamic, &[]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "the program does not matter: {error}");
    assert!(error.contains("leave --proxy out") && output.stdout.is_empty(), "{error}");
}

/// Rank 0 lives until all others have ended, each in a way of its own. It computes, allocates and starts a thread then.
const ENDS: &str = r#"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
static char *made;
static void *thread(void *size) { made = malloc((size_t)size); memset(made, 1, (size_t)size); return made; }
int main(int argc, char **argv) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    switch (atoi(getenv("PJW_RANK"))) {
    case 1: return 3;
    case 2: execl("/bin/sh", "sh", "-c", "exit 4", NULL); abort();
    case 3: *(volatile int *)(argc - 1) = 0; abort();
    case 4: kill(getpid(), SIGKILL);
    }
    char line[8];
    alarm(120);
    if (fgets(line, sizeof line, stdin) == NULL) return 1;
    pthread_t other;
    if (pthread_create(&other, NULL, thread, (void *)(size_t)(4 << 20)) != 0) return 2;
    pthread_join(other, NULL);
    printf("alive %d\n", made[(4 << 20) - 1]);
    return argv[1] == NULL ? 0 : 5;
}
"#;

#[test]
fn exit_exec_a_fault_and_a_kill_of_one_task_leave_the_others_running() {
    let Some((program, _dir)) = compile(ENDS, &["-static-pie", "-pthread"]) else { return };
    let mut command = Command::new(program_path("pjwctl"));
    command.args(["spawn", "--local", "-n", "5", "--share", "memory", "--json", "--"]).arg(&program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut launcher = command.spawn().unwrap();
    // pjwctl prints a line at the end of each of the others.
    let mut errors = BufReader::new(launcher.stderr.take().unwrap()).lines();
    let ended: Vec<String> = errors.by_ref().take(4).map(Result::unwrap).collect();
    assert!(
        (1..5).all(|rank| ended.iter().any(|line| line.contains(&format!("instance {rank} ")))),
        "{ended:?}"
    );
    launcher.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let output = launcher.wait_with_output().unwrap();
    assert!(text(&output.stdout).contains("alive 1"), "{output:?}");
    let report = report(&output);
    let ends = report["instances"].as_array().unwrap().iter();
    let ends: Vec<(Option<u64>, Option<u64>)> =
        ends.map(|one| (one["exit"].as_u64(), one["signal"].as_u64())).collect();
    assert_eq!(ends, [(Some(0), None), (Some(3), None), (Some(4), None), (None, Some(11)), (None, Some(9))]);
}

/// The children of a process, in the order of their start: first the host, which one of the threads starts, and then the
/// tasks.
fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts =
        threads.map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let pids =
        |text: String| text.split_ascii_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>();
    texts.flat_map(pids).collect()
}

#[test]
fn a_task_that_is_killed_at_its_start_has_the_signal_in_its_result() {
    if !Path::new("/proc/thread-self/children").exists() {
        return skip("this kernel does not list the children of a thread (CONFIG_PROC_CHILDREN)");
    }
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    for _ in 0..8 {
        let mut command = Command::new(program_path("pjwctl"));
        command.args(["spawn", "--local", "--share", "memory", "-n", "20", "--json", "--"]).arg(&program);
        let child =
            command.args(["%r", "wait"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        // The kernel lists children in the order of their start.
        let mut tasks = Vec::new();
        wait_until("a task is there", || {
            tasks = children(pid).into_iter().skip(1).collect();
            !tasks.is_empty()
        });
        let killed = *tasks.last().unwrap();
        kill(Pid::from_raw(killed.cast_signed()), Signal::SIGKILL).unwrap();
        wait_until("each task has begun or was killed", || children(pid).len() >= 20);
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).unwrap();
        let output = child.wait_with_output().unwrap();
        let report = report(&output);
        let instances = report["instances"].as_array().unwrap();
        let of_killed = instances.iter().find(|instance| instance["pid"] == killed);
        let of_killed = of_killed.unwrap_or_else(|| panic!("no instance is process {killed}: {output:?}"));
        assert_eq!((&of_killed["signal"], &of_killed["step"]), (&9.into(), &Value::Null), "{output:?}");
    }
}

#[test]
fn a_task_that_ends_at_its_start_as_without_brk_gets_a_hint() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    let hint = "a task has no brk(2)";
    // On a busy machine a task may live for longer than its start.
    wait_until("a hint is printed once", || {
        let output = shared("-n 2", &program, &["brk"]);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(139), 2), "{error}");
        assert!(error.lines().all(|line| line.contains("was ended by signal 11")), "{error}");
        assert!(error.matches(hint).count() <= 1, "{error}");
        error.contains(hint)
    });
    // Another end of a task, and of an instance that has a heap of its own, gets none.
    for (share, arguments, code) in [
        ("--share memory", ["-", "3"], 3),
        ("--share memory", ["abort", "0"], 134),
        ("", ["-", "127"], 127),
        ("", ["brk", "0"], 0),
    ] {
        let command: Vec<&str> = std::iter::once(program.to_str().unwrap()).chain(arguments).collect();
        let output = local(&format!("{share} -n 1 --"), &command);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(!text(&output.stderr).contains(hint), "{output:?}");
    }
}

#[test]
fn too_few_addresses_start_nothing() {
    let Some((program, _dir)) = program(&["-static-pie"]) else { return };
    // The kernel refuses the second one only when the host maps the memory: 4 stacks of 8 MiB are more than 20 MB.
    for (limits, tasks, why) in [
        ("ulimit -v 1000000", "200", &["(RLIMIT_AS)", "ulimit -v"][..]),
        ("ulimit -s 8192; ulimit -d 20000", "4", &["Out of memory", "ulimit -d"]),
    ] {
        let mut shell = Command::new("sh");
        let line = format!("{limits}; exec \"$0\" spawn --local -n {tasks} --share memory -- \"$1\"");
        shell.args(["-c", &line]).arg(program_path("pjwctl")).arg(&program).stdin(Stdio::null());
        let output = shell.process_group(0).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(error.starts_with("pjwctl: nothing was started: "), "{error}");
        assert!(why.iter().all(|part| error.contains(part)), "{error}");
        assert!(output.stdout.is_empty());
    }
}
