//! `run`: the command replaces pjwctl, confined to its cores, or does not start.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::Arc;

use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::{Core, Job, Status};

use super::daemon::{Answer, Daemon};
use super::{answer, assert_refused, pjwctl};

/// The affinity mask of this test. A grant of these CPUs holds without a change of the mask.
fn own_cpus() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().to_owned()
}

fn job(id: &str, cpus: &str) -> Job {
    let state = if cpus.is_empty() { "waiting" } else { "running" };
    Job { id: id.into(), cpus: cpus.into(), state: state.into(), ..Job::default() }
}

/// A daemon that grants these CPUs, which are one core of its machine.
fn granting(cpus: String) -> Daemon {
    Daemon::start(move |call| {
        Answer::reply(match call {
            Call::GetStatus => {
                let cores = vec![Core { cpus: cpus.clone(), ..Core::default() }];
                Reply::Status { status: Arc::new(Status { cores, ..Status::default() }) }
            }
            Call::Assign(request) => Reply::Job { job: job(&request.job, &cpus) },
            Call::Release(_) => Reply::Released { released: vec![] },
            other => panic!("{other:?}"),
        })
    })
}

fn was_released(daemon: &Daemon) -> bool {
    daemon.calls().iter().any(|call| matches!(call, Call::Release(_)))
}

#[test]
fn the_command_is_the_registered_process_itself() {
    let daemon = granting(own_cpus());
    let child = pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "sh", "-c", "echo $$"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{pid}\n"));
    let Call::Assign(request) = &daemon.calls()[1] else { panic!("{:?}", daemon.calls()) };
    assert_eq!(
        (request.pids.as_deref(), request.fresh, request.cores),
        (Some(&[pid][..]), Some(true), Some(1))
    );
    assert_eq!(request.job, format!("manual:sh-{pid}"));
    assert!(!was_released(&daemon), "the job lives as long as the command");
}

#[test]
fn exit_codes_and_signals_are_the_commands_own() {
    let daemon = granting(own_cpus());
    let run = |script: &str| {
        pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "sh", "-c", script]).status().unwrap()
    };
    assert_eq!(run("exit 0").code(), Some(0));
    assert_eq!(run("exit 42").code(), Some(42));
    assert_eq!(run("kill -TERM $$").signal(), Some(15));
}

#[test]
fn the_command_finds_its_job_in_the_environment_and_no_socket() {
    let daemon = granting(own_cpus());
    let script = "echo $PJW_JOB $PJW_CPUS $PJW_NCORES; ls -l /proc/$$/fd";
    let arguments = ["run", "--cpus", "0", "--job", "slurm:7", "--", "sh", "-c", script];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert!(answer.stdout.starts_with(&format!("slurm:7 {} 1\n", own_cpus())), "{answer:?}");
    assert!(!answer.stdout.contains("socket:"), "{answer:?}");
}

#[test]
fn a_pipe_breaks_for_the_command_as_for_any_other() {
    let daemon = granting(own_cpus());
    let mut child = pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().signal(), Some(13));
}

#[test]
fn a_command_that_cannot_be_executed_has_the_exit_codes_of_shells() {
    let daemon = granting(own_cpus());
    let empty = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", ""]));
    assert_refused(&empty, "the name of the command is empty");
    let missing = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "no-such-command"]));
    assert_eq!(missing.code, Some(127), "{missing:?}");
    assert!(missing.stderr.contains("no-such-command") && missing.stderr.lines().count() == 1, "{missing:?}");
    assert!(was_released(&daemon));
    let dir = daemon.dir().to_str().unwrap();
    let directory = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", dir]));
    assert_eq!(directory.code, Some(126), "{directory:?}");
}

#[test]
fn a_directory_of_path_that_may_not_be_searched_hides_no_missing_command() {
    let daemon = granting(own_cpus());
    let closed = daemon.dir().join("closed");
    std::fs::DirBuilder::new().mode(0o000).create(&closed).unwrap();
    let mut command = pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "no-such-command"]);
    let answer = answer(command.env("PATH", format!("{}:/usr/bin:/bin", closed.display())));
    assert_eq!(answer.code, Some(127), "{answer:?}");
}

#[test]
fn outside_its_cores_the_command_is_not_started() {
    let daemon = granting("60000".to_owned());
    let answer = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "echo", "started"]));
    assert_refused(&answer, "the command was not started");
    assert!(was_released(&daemon));
}

#[test]
fn a_job_without_cores_runs_nothing() {
    let daemon = granting(String::new());
    let answer = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "echo", "started"]));
    assert_refused(&answer, "was granted no CPU");
    assert!(was_released(&daemon));
}

#[test]
fn a_refused_job_runs_nothing_and_gives_the_reason_of_the_daemon_alone() {
    let core = |n: u32| Core { cpus: n.to_string(), ..Core::default() };
    let mut status = Status { cores: vec![core(0), core(1)], ..Status::default() };
    status.node.cpus = "0-1".into();
    let status = Arc::new(status);
    let daemon = Daemon::start(move |call| match call {
        Call::GetStatus => Answer::reply(Reply::Status { status: status.clone() }),
        _ => Answer::refusal("there is a job manual:x already"),
    });
    let arguments = ["run", "--cores", "1", "--job", "x", "--", "echo", "started"];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert_refused(&answer, "there is a job manual:x already");
    assert_eq!(answer.stderr, "pjwctl: there is a job manual:x already\n", "no free core is another cause");
}
