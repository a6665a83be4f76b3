//! `run`: the command replaces pjwctl, confined to its cores, or does not start.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::{Core, Job, Status};

use super::daemon::{Answer, Daemon};
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

/// A daemon that grants these CPUs, which are one core of its machine.
pub(super) fn granting(cpus: String) -> Daemon {
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
fn a_command_whose_interpreter_is_missing_has_the_exit_code_of_shells() {
    let daemon = granting(own_cpus());
    let script = daemon.dir().join("script");
    // Another process writes the file: one that a child of this process has open for writing can't be executed.
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

/// Returns what env(1) prints of these variables when `pjwctl run` starts it with `own` in its environment.
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
fn the_command_finds_the_size_of_its_job_in_the_environment() {
    let daemon = granting(own_cpus());
    let pus = own_cpus().parse::<pjw_core::cpuset::CpuSet>().unwrap().len().to_string();
    let set = size_variables(&daemon, &[]);
    assert_eq!(set.len(), SIZE_VARIABLES.len(), "{set:?}");
    for (name, value) in &set {
        let counts_pus = ["GOMAXPROCS", "RAYON_NUM_THREADS", "PYTHON_CPU_COUNT"].contains(&name.as_str());
        assert_eq!(value, if counts_pus { &pus } else { "1" }, "{name}");
    }
    let Call::Assign(request) = &daemon.calls()[1] else { panic!("{:?}", daemon.calls()) };
    assert_eq!((request.cores, request.all_cores), (None, Some(true)), "--cores all is no number");
}

#[test]
fn a_value_of_the_users_own_is_kept_for_each_variable() {
    let daemon = granting(own_cpus());
    for name in SIZE_VARIABLES {
        for value in ["77", ""] {
            let set = size_variables(&daemon, &[(name, value)]);
            assert_eq!(set.len(), SIZE_VARIABLES.len(), "the others are set: {set:?}");
            assert!(set.contains(&(name.to_owned(), value.to_owned())), "{name}={value}: {set:?}");
        }
    }
}

#[test]
fn a_command_in_a_job_in_a_job_has_the_size_of_the_inner_one() {
    let daemon = granting(own_cpus());
    let outer =
        [("OMP_NUM_THREADS", "64"), ("MKL_NUM_THREADS", "64"), ("PJW_VARIABLES", "OMP_NUM_THREADS=64")];
    let set = size_variables(&daemon, &outer);
    assert!(set.contains(&("OMP_NUM_THREADS".to_owned(), "1".to_owned())), "{set:?}");
    assert!(set.contains(&("MKL_NUM_THREADS".to_owned(), "64".to_owned())), "only the user set it: {set:?}");
}

#[test]
fn the_daemon_says_which_variables_are_set() {
    let daemon = Daemon::start(|call| {
        Answer::reply(match call {
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
