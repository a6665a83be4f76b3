//! `pjwctl assign --isolated`: it waits until the kernel has made the partition of the job.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::{Job, Status, Warning};

use super::daemon::{CallReplies, Daemon};
use super::{CommandOutput, answer, assert_refused, pjwctl};

fn job(enforcement: &str) -> Job {
    let (id, state, cpus) = ("manual:a".to_owned(), "running".to_owned(), "0-1".to_owned());
    Job { id, state, cpus, enforcement: enforcement.to_owned(), ..Job::default() }
}

fn status(mode: &str, job: Option<Job>) -> Result<Status, &'static str> {
    Ok(Status { mode: mode.to_owned(), jobs: job.into_iter().collect(), ..Status::default() })
}

/// Runs `pjwctl assign a --isolated` with a daemon that replies at once that nothing keeps the job yet. The daemon
/// sends the `statuses` in their order. Returns the output, and the number of calls.
fn assign(statuses: Vec<Result<Status, &'static str>>) -> (CommandOutput, usize) {
    let statuses = Mutex::new(VecDeque::from(statuses));
    let daemon = Daemon::start(move |call| match call {
        Call::Assign(_) => CallReplies::reply(Reply::Job { job: job("none") }),
        _ => match statuses.lock().unwrap().pop_front().unwrap_or(Err("the test has no further status")) {
            Ok(status) => CallReplies::reply(Reply::Status { status: Arc::new(status) }),
            Err(refusal) => CallReplies::refusal(refusal),
        },
    });
    let arguments = ["assign", "a", "--cores", "2", "--isolated", "--pid", "1"];
    (answer(&mut pjwctl(&daemon.socket(), &arguments)), daemon.calls().len())
}

fn succeeded() -> CommandOutput {
    CommandOutput { code: Some(0), stdout: "manual:a 0-1\n".to_owned(), stderr: String::new() }
}

#[test]
fn it_returns_when_the_partition_keeps_the_job() {
    let statuses = vec![status("enforce", Some(job("none"))), status("enforce", Some(job("cpuset")))];
    assert_eq!(assign(statuses), (succeeded(), 4));
}

#[test]
fn it_does_not_wait_for_a_daemon_that_only_watches() {
    let statuses = vec![status("observe", Some(job("none")))];
    assert_eq!(assign(statuses), (succeeded(), 3));
}

#[test]
fn a_job_that_was_released_meanwhile_is_an_error() {
    for released in [None, Some(Job { state: "released".to_owned(), ..job("none") })] {
        let (output, _) = assign(vec![status("enforce", released)]);
        assert_refused(&output, "manual:a was released before its partition was complete");
    }
}

#[test]
fn if_the_daemon_does_not_answer_the_cores_are_printed_with_a_message() {
    let (output, _) = assign(vec![Err("too busy")]);
    assert!(output.stderr.contains("completed its isolated partition is unknown: too busy"), "{output:?}");
    assert_eq!(CommandOutput { stderr: String::new(), ..output }, succeeded());
}

#[test]
fn a_job_without_the_partition_that_it_asked_for_is_reported_on_standard_error() {
    let warning = |code: &str, job: &str| {
        let (text, remedy) = (format!("{job} has no partition"), "leave out --isolated".to_owned());
        Warning { code: code.to_owned(), job: job.to_owned(), text, remedy }
    };
    let warnings = vec![
        warning("no-partition", "manual:a"),
        warning("overlap", "manual:a"),
        warning("no-wall", "manual:b"),
    ];
    let with_warnings = Ok(Status { warnings, ..status("enforce", Some(job("cpuset"))).unwrap() });
    let (output, _) = assign(vec![status("enforce", Some(job("cpuset"))), with_warnings]);
    let said = "pjwctl: manual:a has no partition; leave out --isolated\n".to_owned();
    assert_eq!(output, CommandOutput { stderr: said, ..succeeded() });
}
