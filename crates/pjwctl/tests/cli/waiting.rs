//! Commands that wait: because their user sends commands too often, or because no core is free to borrow.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use pjw_ipc::call::{Assign, Call, Reply};
use pjw_ipc::wire::{Job, Status};

use super::daemon::{CallReplies, Daemon};
use super::run::{granting_daemon, granting_daemon_except, own_cpus};
use super::{CommandOutput, answer, pjwctl};

#[test]
fn assign_want_and_release_wait_while_their_user_sends_commands_too_often() {
    for arguments in
        [&["assign", "a", "--cores", "1"][..], &["want", "a", "1"], &["release", "a"], &["release", "--all"]]
    {
        let commands = AtomicUsize::new(0);
        let daemon = Daemon::start(move |call| {
            if commands.fetch_add(1, Ordering::Relaxed) == 0 {
                return CallReplies::busy("you send commands too often: wait a little and try again");
            }
            let (id, cpus, enforcement) = ("manual:a".to_owned(), "0".to_owned(), "cpuset".to_owned());
            CallReplies::reply(match call {
                Call::Assign(_) | Call::Want(_) => {
                    Reply::Job { job: Job { id, cpus, enforcement, wants: Some(1), ..Job::default() } }
                }
                Call::Release(_) | Call::ReleaseAll => Reply::Released { released: vec![id] },
                other => panic!("{other:?}"),
            })
        });
        let answer = answer(&mut pjwctl(&daemon.socket(), arguments));
        assert!(answer.code == Some(0) && answer.stdout.contains("manual:a"), "{arguments:?}: {answer:?}");
        let calls = daemon.calls();
        assert!(matches!(&calls[..], [refused, repeated] if refused == repeated), "{calls:?}");
    }
}

#[test]
fn run_and_spawn_say_that_no_core_is_free_to_borrow_before_they_are_frozen() {
    for verb in [&["run", "--cores", "1"][..], &["spawn", "-n", "1"]] {
        let (thaw, thawed) = mpsc::channel::<()>();
        let thawed = Mutex::new(thawed);
        let daemon = granting_daemon_except(own_cpus(), move |call| match call {
            Call::Assign(request) if request.refuse_frozen == Some(true) => {
                Some(CallReplies::would_freeze("it could borrow no core now"))
            }
            Call::Assign(_) => {
                // A frozen pjwctl reads no reply. So the reply comes only after the test has read the message.
                thawed.lock().unwrap().recv().unwrap();
                None
            }
            _ => None,
        });
        let options = ["--class", "besteffort", "--job", "a", "--", "echo", "started"];
        let mut child = pjwctl(&daemon.socket(), &[verb, &options].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut line, mut stderr) = (String::new(), BufReader::new(child.stderr.take().unwrap()));
        stderr.read_line(&mut line).unwrap();
        thaw.send(()).unwrap();
        let said =
            "pjwctl: no core is free to borrow: echo waits frozen until one is free (pjwctl show manual:a)\n";
        assert_eq!(line, said);
        stderr.read_to_string(&mut line).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"started\n"[..]), "{line}");
        assert_eq!(line, said, "nothing else is printed");
    }
}

#[test]
fn a_pjwd_that_does_not_know_refuse_frozen_gets_the_request_again_without_it() {
    for verb in [&["run", "--cores", "1"][..], &["spawn", "-n", "1"]] {
        let daemon = granting_daemon_except(own_cpus(), |call| match call {
            Call::Assign(request) if request.refuse_frozen.is_some() => {
                Some(CallReplies::unknown_parameter("refuse_frozen"))
            }
            _ => None,
        });
        let options = ["--class", "besteffort", "--job", "a", "--", "echo", "started"];
        let answer = answer(&mut pjwctl(&daemon.socket(), &[verb, &options].concat()));
        assert_eq!((answer.code, answer.stdout.as_str(), answer.stderr.as_str()), (Some(0), "started\n", ""));
        let requests: Vec<Assign> = daemon
            .calls()
            .into_iter()
            .filter_map(|call| if let Call::Assign(request) = call { Some(request) } else { None })
            .collect();
        let again = Assign { refuse_frozen: None, ..requests[0].clone() };
        assert_eq!(requests[1..], [again], "the other parameters are the same");
    }
}

#[test]
fn a_job_that_can_borrow_a_core_is_made_with_one_command_and_without_a_message() {
    let daemon = granting_daemon(own_cpus());
    let arguments = ["run", "--cores", "1", "--class", "besteffort", "--", "echo", "started"];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert_eq!((answer.code, answer.stdout.as_str(), answer.stderr.as_str()), (Some(0), "started\n", ""));
    let calls = daemon.calls();
    assert_eq!(calls.iter().filter(|call| matches!(call, Call::Assign(_))).count(), 1, "{calls:?}");
}

/// Runs `echo started` as the besteffort job `manual:a`, and asserts that it runs. Returns the output of pjwctl and the
/// number of calls. The job has the CPUs `first_cpus` when it is made. `cpus_in_status` gets the number of a call for
/// the status, and returns the CPUs of the job then, or why the daemon is busy. The call 0 comes before the job is
/// made.
fn run_borrower(
    first_cpus: &'static str,
    cpus_in_status: impl Fn(usize) -> Result<String, &'static str> + Send + Sync + 'static,
) -> (CommandOutput, usize) {
    let statuses = AtomicUsize::new(0);
    let borrower = |cpus: String| {
        let (id, class, enforcement) = ("manual:a".to_owned(), "besteffort".to_owned(), "cpuset".to_owned());
        Job { id, class, enforcement, cpus, ..Job::default() }
    };
    let daemon = Daemon::start(move |call| {
        CallReplies::reply(match call {
            Call::GetStatus => match cpus_in_status(statuses.fetch_add(1, Ordering::Relaxed)) {
                Ok(cpus) => {
                    let jobs = vec![borrower(cpus)];
                    Reply::Status { status: Arc::new(Status { jobs, ..Status::default() }) }
                }
                Err(busy) => return CallReplies::busy(busy),
            },
            Call::Assign(_) => Reply::Job { job: borrower(first_cpus.to_owned()) },
            other => panic!("{other:?}"),
        })
    });
    let arguments = ["run", "--cores", "1", "--class", "besteffort", "--job", "a", "--", "echo", "started"];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), "started\n"), "{answer:?}");
    (answer, daemon.calls().len())
}

#[test]
fn a_process_that_is_not_frozen_says_that_its_job_waits_for_a_core() {
    let (answer, _) = run_borrower("", |status| Ok(if status > 3 { own_cpus() } else { String::new() }));
    let said = "pjwctl: no core is free to borrow: echo waits until one is free (pjwctl show manual:a)\n";
    assert_eq!(answer.stderr, said);
}

#[test]
fn a_job_that_waits_for_a_core_connects_again_if_its_connection_was_closed_for_another_user() {
    let closed = "pjwd closed this idle connection";
    let (_, calls) = run_borrower("", move |status| if status == 1 { Err(closed) } else { Ok(own_cpus()) });
    assert_eq!(calls, 4);
}

#[test]
fn a_job_that_waits_for_a_core_waits_for_a_busy_pjwd_and_says_so_once() {
    // The cores of the job are exchanged after it is made. Only the next status has the present ones.
    let (answer, _) = run_borrower("60000", |status| match status {
        1..=10 => Err("too many connections"),
        _ => Ok(own_cpus()),
    });
    assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
    assert!(answer.stderr.contains("at most ten minutes: too many connections"), "{answer:?}");
}
