//! `run`: the command replaces pjwctl and is confined to the cores of its job, or is not started.

use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::Signal;
use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::{Core, Job, Status};

use super::daemon::{CallReplies, Daemon};
use super::{answer, assert_refused, pjwctl};

/// The affinity mask of this test. A grant of these CPUs holds without a change of the mask.
pub(super) fn own_cpus() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().to_owned()
}

fn job(id: &str, cpus: &str) -> Job {
    let state = if cpus.is_empty() { "waiting" } else { "running" };
    Job { id: id.into(), cpus: cpus.into(), state: state.into(), ..Job::default() }
}

/// A daemon that grants these CPUs to each job, and whose machine has them as one core.
pub(super) fn granting_daemon(cpus: String) -> Daemon {
    granting_daemon_except(cpus, |_| None)
}

/// The same, except for the calls to which `answer_otherwise` has another answer.
pub(super) fn granting_daemon_except(
    cpus: String,
    answer_otherwise: impl Fn(&Call) -> Option<CallReplies> + Send + Sync + 'static,
) -> Daemon {
    Daemon::start(move |call| {
        if let Some(replies) = answer_otherwise(call) {
            return replies;
        }
        CallReplies::reply(match call {
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
fn the_command_runs_in_the_process_that_pjwctl_registered() {
    let daemon = granting_daemon(own_cpus());
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
    assert!(!was_released(&daemon), "run does not release the job: it ends with the command");
}

#[test]
fn the_exit_code_or_signal_of_run_is_that_of_the_command() {
    let daemon = granting_daemon(own_cpus());
    let run = |script: &str| {
        pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "sh", "-c", script]).status().unwrap()
    };
    assert_eq!(run("exit 0").code(), Some(0));
    assert_eq!(run("exit 42").code(), Some(42));
    assert_eq!(run("kill -TERM $$").signal(), Some(15));
}

#[test]
fn sigsegv_and_sigbus_have_no_handler_in_run_and_spawn() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pjwd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    for verb in [&["run", "--cores", "1"][..], &["spawn", "-n", "1"]] {
        let mut child = pjwctl(&socket, &[verb, &["--", "true"]].concat())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        // pjwctl waits for the reply to its request.
        stream.read_exact(&mut [0]).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
        for signal in [Signal::SIGSEGV, Signal::SIGBUS] {
            assert_eq!(caught & (1 << (signal as i32 - 1)), 0, "{verb:?} catches {signal}");
        }
        // Another connection, if there is one, gets no reply either.
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn the_command_has_the_variables_of_its_job_and_no_open_socket() {
    let daemon = granting_daemon(own_cpus());
    let script = "echo $PJW_JOB $PJW_CPUS $PJW_NCORES; ls -l /proc/$$/fd";
    let arguments = ["run", "--cpus", "0", "--job", "slurm:7", "--", "sh", "-c", script];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert!(answer.stdout.starts_with(&format!("slurm:7 {} 1\n", own_cpus())), "{answer:?}");
    assert!(!answer.stdout.contains("socket:"), "{answer:?}");
}

#[test]
fn the_command_is_ended_by_sigpipe_when_its_pipe_is_closed() {
    let daemon = granting_daemon(own_cpus());
    let mut child = pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().signal(), Some(13));
}

#[test]
fn a_command_that_cannot_be_executed_has_the_exit_code_that_shells_use() {
    let daemon = granting_daemon(own_cpus());
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
fn a_command_whose_interpreter_is_missing_has_the_exit_code_that_shells_use() {
    let daemon = granting_daemon(own_cpus());
    let script = daemon.dir().join("script");
    // Another process writes the file, because a file that a child of this process has open for writing cannot be
    // executed.
    let write = "printf '#!/no/such/interpreter\n' >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(&script).status().unwrap().success());
    let run = |program: &Path| {
        let program = program.to_str().unwrap();
        answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", program]))
    };
    let without = run(&script);
    assert_eq!((without.code, without.stderr.lines().count()), (Some(127), 1), "{without:?}");
    assert!(
        without.stderr.contains("the interpreter /no/such/interpreter in the first line of "),
        "{without:?}"
    );
    assert!(was_released(&daemon));
}

#[test]
fn a_missing_command_has_exit_code_127_also_if_a_directory_of_path_may_not_be_searched() {
    let daemon = granting_daemon(own_cpus());
    let unreadable_directory = daemon.dir().join("closed");
    std::fs::DirBuilder::new().mode(0o000).create(&unreadable_directory).unwrap();
    let mut command = pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "no-such-command"]);
    let answer = answer(command.env("PATH", format!("{}:/usr/bin:/bin", unreadable_directory.display())));
    assert_eq!(answer.code, Some(127), "{answer:?}");
}

#[test]
fn the_command_is_not_started_if_it_cannot_be_confined_to_its_cores() {
    let daemon = granting_daemon("60000".to_owned());
    let answer = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "echo", "started"]));
    assert_refused(&answer, "the command was not started");
    assert!(was_released(&daemon));
}

#[test]
fn a_limit_of_open_files_that_leaves_none_for_the_check_of_the_mask_is_named() {
    let daemon = granting_daemon(own_cpus());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 4; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_pjwctl")]);
    command.args(["run", "--cores", "1", "--", "echo", "started"]).env("PJW_SOCKET", daemon.socket());
    let answer = answer(&mut command);
    assert_refused(&answer, "Too many open files (os error 24); raise the limit of open files (ulimit -n)");
    assert!(was_released(&daemon));
}

#[test]
fn the_command_is_not_started_if_its_job_has_no_cores() {
    let daemon = granting_daemon(String::new());
    let answer = answer(&mut pjwctl(&daemon.socket(), &["run", "--cores", "1", "--", "echo", "started"]));
    assert_refused(&answer, "was granted no CPU");
    assert!(was_released(&daemon));
}

#[test]
fn the_command_of_a_refused_job_is_not_started_and_only_the_reason_of_the_daemon_is_printed() {
    let core = |n: u32| Core { cpus: n.to_string(), ..Core::default() };
    let mut status = Status { cores: vec![core(0), core(1)], ..Status::default() };
    status.node.cpus = "0-1".into();
    let status = Arc::new(status);
    let daemon = Daemon::start(move |call| match call {
        Call::GetStatus => CallReplies::reply(Reply::Status { status: status.clone() }),
        _ => CallReplies::refusal("there is a job manual:x already"),
    });
    let arguments = ["run", "--cores", "1", "--job", "x", "--", "echo", "started"];
    let answer = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert_refused(&answer, "there is a job manual:x already");
    assert_eq!(answer.stderr, "pjwctl: there is a job manual:x already\n", "no other cause is added");
}

/// The variables that `pjwctl run` sets if the daemon does not name others.
const SIZE_VARIABLES: [&str; 10] = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "GOMAXPROCS",
    "RAYON_NUM_THREADS",
    "JULIA_NUM_THREADS",
    "PYTHON_CPU_COUNT",
    "ATHENA_PROC_NUMBER",
    "ATHENA_CORE_NUMBER",
];

/// Runs env(1) by `pjwctl run` with the variables `own` in its environment. Returns the variables that it prints and
/// that are in `SIZE_VARIABLES`, or are `N`.
fn size_variables(daemon: &Daemon, own: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut command = pjwctl(&daemon.socket(), &["run", "--cores", "all", "--", "env"]);
    SIZE_VARIABLES.iter().chain(&["PJW_VARIABLES"]).for_each(|name| {
        command.env_remove(name);
    });
    command.envs(own.iter().copied());
    let answer = answer(&mut command);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    let variables = answer.stdout.lines().filter_map(|line| line.split_once('='));
    let variables = variables.filter(|(name, _)| SIZE_VARIABLES.contains(name) || *name == "N");
    variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn the_command_has_the_variables_with_the_size_of_its_job() {
    let daemon = granting_daemon(own_cpus());
    let pus = own_cpus().parse::<pjw_core::cpuset::CpuSet>().unwrap().len().to_string();
    let variables_of_command = size_variables(&daemon, &[]);
    assert_eq!(variables_of_command.len(), SIZE_VARIABLES.len(), "{variables_of_command:?}");
    for (name, value) in &variables_of_command {
        let counts_pus = ["GOMAXPROCS", "RAYON_NUM_THREADS", "PYTHON_CPU_COUNT"].contains(&name.as_str());
        assert_eq!(value, if counts_pus { &pus } else { "1" }, "{name}");
    }
    let Call::Assign(request) = &daemon.calls()[1] else { panic!("{:?}", daemon.calls()) };
    assert_eq!((request.cores, request.all_cores), (None, Some(true)), "--cores all sets no number of cores");
}

#[test]
fn a_variable_that_the_user_has_set_is_kept() {
    let daemon = granting_daemon(own_cpus());
    for name in SIZE_VARIABLES {
        for value in ["77", ""] {
            let variables_of_command = size_variables(&daemon, &[(name, value)]);
            assert_eq!(
                variables_of_command.len(),
                SIZE_VARIABLES.len(),
                "the other variables are set: {variables_of_command:?}"
            );
            assert!(
                variables_of_command.contains(&(name.to_owned(), value.to_owned())),
                "{name}={value}: {variables_of_command:?}"
            );
        }
    }
}

#[test]
fn run_inside_a_job_sets_the_variables_to_the_size_of_the_inner_job() {
    let daemon = granting_daemon(own_cpus());
    let outer =
        [("OMP_NUM_THREADS", "64"), ("MKL_NUM_THREADS", "64"), ("PJW_VARIABLES", "OMP_NUM_THREADS=64")];
    let variables_of_command = size_variables(&daemon, &outer);
    assert!(
        variables_of_command.contains(&("OMP_NUM_THREADS".to_owned(), "1".to_owned())),
        "{variables_of_command:?}"
    );
    assert!(
        variables_of_command.contains(&("MKL_NUM_THREADS".to_owned(), "64".to_owned())),
        "the outer job did not set it: {variables_of_command:?}"
    );
}

#[test]
fn run_sets_the_variables_that_the_daemon_names() {
    let daemon = Daemon::start(|call| {
        CallReplies::reply(match call {
            Call::GetStatus => {
                let cores = vec![Core { cpus: own_cpus(), ..Core::default() }];
                let variables = Some(vec!["N=cores".to_owned(), "of a newer daemon".to_owned()]);
                Reply::Status { status: Arc::new(Status { cores, variables, ..Status::default() }) }
            }
            Call::Assign(request) => Reply::Job { job: job(&request.job, &own_cpus()) },
            other => panic!("{other:?}"),
        })
    });
    assert_eq!(size_variables(&daemon, &[]), [("N".to_owned(), "1".to_owned())]);
}

#[test]
fn run_and_spawn_wait_while_their_user_sends_commands_too_often_and_say_so_after_a_second() {
    let refusal = "you send commands too often: a user may send 30 at once; wait a little and try again";
    // The pauses before four refusals and one more attempt take more than a second, whatever the pid of pjwctl is.
    for (verb, refusals) in [(&["run", "--cores", "1"][..], 1), (&["spawn", "-n", "1"], 4)] {
        let assigns = AtomicUsize::new(0);
        let daemon = Daemon::start(move |call| {
            CallReplies::reply(match call {
                Call::Assign(_) if assigns.fetch_add(1, Ordering::Relaxed) < refusals => {
                    return CallReplies::busy(refusal);
                }
                Call::Assign(request) => Reply::Job { job: job(&request.job, &own_cpus()) },
                Call::GetStatus => {
                    let cores = vec![Core { cpus: own_cpus(), ..Core::default() }];
                    Reply::Status { status: Arc::new(Status { cores, ..Status::default() }) }
                }
                Call::Release(_) => Reply::Released { released: vec![] },
                other => panic!("{other:?}"),
            })
        });
        let answer = answer(&mut pjwctl(&daemon.socket(), &[verb, &["--", "echo", "started"]].concat()));
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), "started\n"), "{answer:?}");
        // After one refusal, the line is printed only if the machine is so loaded that a second passes.
        if refusals > 1 {
            assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
            let line = "pjwctl: you send commands too often: a user may send 30 at once; pjwctl tries again";
            assert!(answer.stderr.starts_with(line), "{answer:?}");
        }
    }
}
