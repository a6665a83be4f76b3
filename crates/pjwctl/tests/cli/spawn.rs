//! `spawn` with a daemon that is busy or refuses commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pjw_ipc::call::{Call, ExplainPidReply, Reply};
use pjw_ipc::wire::{Job, Status};

use super::daemon::{CallReplies, Daemon};
use super::run::own_cpus;
use super::{answer, assert_refused, pjwctl};

/// The reply to the call `ExplainPid` about the process `pid`, which belongs to the job `job`.
fn member_of(pid: u32, job: &str) -> Reply {
    let job = Some(job.to_owned());
    Reply::PidReasons(ExplainPidReply {
        pid,
        job,
        membership_reasons: vec![],
        threads: vec![],
        last_tid: None,
    })
}

#[test]
fn a_busy_daemon_has_not_refused_the_number_of_cores() {
    let reason = "too many replies of pjwd wait to be read by your programs";
    let daemon = Daemon::start(move |_| CallReplies::busy(reason));
    let answer = answer(&mut pjwctl(&daemon.socket(), &["spawn", "-n", "4", "--", "echo", "started"]));
    assert_refused(&answer, reason);
    assert_eq!(answer.stderr, format!("pjwctl: nothing was started: {reason}\n"));
    assert!(matches!(daemon.calls()[..], [Call::Assign(_)]), "{:?}", daemon.calls());
}

#[test]
fn instances_have_the_variables_that_the_daemon_names_also_if_it_was_busy_once() {
    let statuses = AtomicUsize::new(0);
    let daemon = Daemon::start(move |call| {
        CallReplies::reply(match call {
            Call::GetStatus if statuses.fetch_add(1, Ordering::Relaxed) == 0 => {
                return CallReplies::busy("pjwd closed this idle connection");
            }
            Call::GetStatus => {
                let variables = Some(vec!["N=cores".to_owned()]);
                Reply::Status { status: Arc::new(Status { variables, ..Status::default() }) }
            }
            Call::Assign(request) => {
                let (id, cpus) = (request.job.clone(), own_cpus());
                Reply::Job { job: Job { id, cpus, state: "running".into(), ..Job::default() } }
            }
            Call::Release(_) => Reply::Released { released: vec![] },
            other => panic!("{other:?}"),
        })
    });
    let script = "echo ${N:+set}";
    let mut command = pjwctl(&daemon.socket(), &["spawn", "-n", "1", "--", "sh", "-c", script]);
    let answer = answer(command.env_remove("N"));
    assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), "set\n"), "{answer:?}");
}

#[test]
fn instances_on_the_cores_of_the_own_job_do_not_wait_because_the_user_sends_commands_too_often() {
    for (own_job, options, assigns) in [
        ("manual:a", &["--job", "b"][..], 2),
        ("manual:a", &["--cores", "1"], 2),
        ("manual:a", &[], 1),
        ("slurm:7", &[], 1),
    ] {
        let refusals = AtomicUsize::new(0);
        let daemon = Daemon::start(move |call| {
            CallReplies::reply(match call {
                Call::Assign(_) if refusals.fetch_add(1, Ordering::Relaxed) == 0 => {
                    return CallReplies::busy("you send commands too often: wait a little and try again");
                }
                Call::Assign(request) => {
                    let (id, cpus) = (request.job.clone(), own_cpus());
                    Reply::Job { job: Job { id, cpus, state: "running".into(), ..Job::default() } }
                }
                Call::ExplainPid(request) => member_of(request.pid, own_job),
                Call::GetStatus => Reply::Status { status: Arc::default() },
                Call::Release(_) => Reply::Released { released: vec![] },
                other => panic!("{other:?}"),
            })
        });
        let arguments = [&["spawn", "-n", "1"][..], options, &["--", "echo", "started"]].concat();
        let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), "started\n"), "{answer:?}");
        let calls = daemon.calls();
        let sent = calls.iter().filter(|call| matches!(call, Call::Assign(_))).count();
        assert_eq!(sent, assigns, "{own_job} {options:?}: {calls:?}");
    }
}

#[test]
fn the_own_job_is_asked_for_again_if_the_connection_was_closed_for_another_user() {
    let closed =
        "pjwd closed this idle connection, because another user needed one and all were taken: try again";
    // If the new connection is closed too, spawn waits, and then sends its request again.
    for (closed_connections, assigns) in [(1, 1), (2, 2)] {
        let questions = AtomicUsize::new(0);
        let daemon = Daemon::start(move |call| {
            CallReplies::reply(match call {
                Call::Assign(_) => return CallReplies::refusal("this process is in manual:a already"),
                Call::ExplainPid(_) if questions.fetch_add(1, Ordering::Relaxed) < closed_connections => {
                    return CallReplies::busy(closed);
                }
                Call::ExplainPid(request) => member_of(request.pid, "manual:a"),
                Call::GetStatus => Reply::Status { status: Arc::default() },
                other => panic!("{other:?}"),
            })
        });
        let answer = answer(&mut pjwctl(&daemon.socket(), &["spawn", "-n", "1", "--", "echo", "started"]));
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), "started\n"), "{answer:?}");
        let calls = daemon.calls();
        let sent = calls.iter().filter(|call| matches!(call, Call::Assign(_))).count();
        assert_eq!(sent, assigns, "{closed_connections}: {calls:?}");
    }
}
