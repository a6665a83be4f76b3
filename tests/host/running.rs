//! `pjwctl run`: a command runs on its own cores from its first instruction.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;

use crate::processes::{Shell, has_two_cores, is_installed, mask};

/// How long pjwd lets the request for a report wait for the end of its job: `END_WAIT` in the control server.
const END_WAIT: Duration = Duration::from_millis(200);

fn parse_allowed_cpus(output: &[u8]) -> CpuSet {
    let text = String::from_utf8_lossy(output).into_owned();
    let list = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_else(|| panic!("no mask in {text}")).trim().parse().unwrap()
}

#[test]
fn the_command_starts_inside_with_its_cores_in_the_environment() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    for _ in 0..20 {
        // cat reads its own mask first of all.
        let output = daemon.pjwctl(&["run", "--cores", "1", "--", "cat", "/proc/self/status"]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(parse_allowed_cpus(&output.stdout).len(), cpus_per_core(&daemon));
        wait_until("its core is free again", || daemon.status().jobs.is_empty());
    }
    let output = daemon.pjwctl(&[
        "run",
        "--cores",
        "1",
        "--job",
        &daemon.job_id("x"),
        "--",
        "sh",
        "-c",
        "echo $PJW_JOB $PJW_NCORES $PJW_CPUS",
    ]);
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output_text.starts_with(&format!("{} 1 ", daemon.job_id("x"))), "{output_text}");
}

fn cpus_per_core(daemon: &Daemon) -> usize {
    daemon.status().cores[0].cpus.parse::<CpuSet>().unwrap().len()
}

#[test]
fn run_passes_on_the_exit_status_and_signals_of_the_command() {
    let daemon = Daemon::start("");
    let run = |command: &[&str]| {
        let args = [&["run", "--cores", "1", "--"], command].concat();
        let status = daemon.pjwctl(&args).status;
        wait_until("the job is over", || daemon.status().jobs.is_empty());
        (status.code(), status.signal())
    };
    assert_eq!(run(&["true"]), (Some(0), None));
    assert_eq!(run(&["sh", "-c", "exit 42"]), (Some(42), None));
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]), (None, Some(9)));
    assert_eq!(run(&["/no/such/program"]), (Some(127), None));
    assert_eq!(run(&["/etc/passwd"]), (Some(126), None));
}

#[test]
fn without_cores_the_command_does_not_run() {
    let daemon = Daemon::start("");
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("ran");
    let touch = ["touch", marker.to_str().unwrap()];
    for cores in ["0", "100000"] {
        let output = daemon.pjwctl(&[&["run", "--cores", cores, "--"], &touch[..]].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let output_text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output_text.contains("cores were asked for") && output_text.lines().count() == 1,
            "{output_text}"
        );
    }
    assert!(!marker.exists());
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn the_command_does_not_inherit_the_mask_of_the_caller() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let mut shell = Shell::start();
    let everything = mask(shell.pid());
    let one = CpuSet::from(everything.first().unwrap());
    pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(shell.pid()), &one).unwrap();
    let ctl = daemon.pjwctl_command(&[]);
    let program = ctl.get_program().to_str().unwrap();
    let socket = daemon.socket();
    let output_text = shell.run(&format!(
        "{program} --socket {} run --cores 2 -- grep Cpus_allowed_list /proc/self/status",
        socket.display()
    ));
    let cpus = parse_allowed_cpus(output_text.as_bytes());
    assert!(cpus.len() >= 2, "two cores were requested, and the command has {cpus}");
}

#[test]
fn instances_of_a_new_job_do_not_inherit_the_mask_of_the_caller() {
    if !has_two_cores() || !is_installed("taskset") {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "");
        let mut shell = Shell::start();
        let last = mask(shell.pid()).iter().last().unwrap();
        let (pjwctl, socket) = (program_path("pjwctl"), daemon.socket());
        let spawn = |options: &str| {
            let (pjwctl, socket) = (pjwctl.display(), socket.display());
            // taskset sets the mask of the very process that becomes pjwctl.
            format!(
                "taskset -c {last} {pjwctl} --socket {socket} spawn -n 2 {options} -- sh -c 'echo $PJW_CPUS' 2>&1 | xargs"
            )
        };
        let output_text = shell.run(&spawn(""));
        let parts: Vec<CpuSet> =
            output_text.split(' ').map(|part| part.parse().expect(&output_text)).collect();
        assert!(parts.len() == 2 && !parts[0].intersects(&parts[1]), "{enforcement:?}: {output_text}");
        // Without a job, the mask of the caller is the limit.
        assert_eq!(shell.run(&spawn("--local")), format!("{last} {last}"), "{enforcement:?}");
    }
}

/// The lines that instances print: the job of each, and its CPUs.
fn jobs_and_cpus(output: &std::process::Output) -> Vec<(String, CpuSet)> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.map(|(job, cpus)| (job.to_owned(), cpus.parse().unwrap())).collect()
}

#[test]
fn instances_that_a_job_spawns_run_on_the_cores_of_that_job() {
    let daemon = Daemon::start("");
    let (pjwctl, socket) = (program_path("pjwctl"), daemon.socket());
    let inner = [pjwctl.to_str().unwrap(), "--socket", socket.to_str().unwrap(), "spawn", "-n", "2", "--"];
    let print = ["sh", "-c", "echo $PJW_JOB $PJW_CPUS"];
    let spawn: Vec<&str> = inner.into_iter().chain(print).collect();
    let in_shell = [
        "sh".to_owned(),
        "-c".to_owned(),
        format!("{} 'echo $PJW_JOB $PJW_CPUS'; true", spawn[..9].join(" ")),
    ];
    let in_shell = in_shell.each_ref().map(String::as_str);
    // By the process of the job itself, and by a child of it.
    for command in [&spawn[..], &in_shell] {
        let id = daemon.job_id("outer");
        let output = daemon.pjwctl(&[&["run", "--cores", "1", "--job", &id, "--"], command].concat());
        let cores = daemon.status().cores;
        let cores: Vec<CpuSet> = cores.into_iter().map(|core| core.cpus.parse().unwrap()).collect();
        let is_inside = |cpus: &CpuSet| cores.iter().any(|core| cpus.is_subset(core));
        let instances = jobs_and_cpus(&output);
        assert!(
            instances.len() == 2 && instances.iter().all(|(job, cpus)| *job == id && is_inside(cpus)),
            "{instances:?}"
        );
        wait_until("the job is over", || daemon.status().jobs.is_empty());
    }
    let events = String::from_utf8(daemon.pjwctl(&["events", "--json"]).stdout).unwrap();
    assert!(!events.contains("refused"), "{events}");
}

#[test]
fn the_report_of_a_job_is_there_as_soon_as_its_command_has_ended() {
    let daemon = Daemon::start("");
    if daemon.status().discovery != "netlink" {
        return skip("without process events, the end of a job is seen by the next scan");
    }
    let mut runs = 0;
    let mut has_report_at_once = || {
        wait_until("the job before is over", || daemon.status().jobs.is_empty());
        runs += 1;
        let id = daemon.job_id(&format!("run{runs}"));
        assert!(daemon.pjwctl(&["run", "--cores", "1", "--job", &id, "--", "true"]).status.success());
        let asked_at = Instant::now();
        let output = daemon.pjwctl(&["report", &id]);
        // On a busy machine pjwd may see the end of the process later than the request waits.
        let is_late = asked_at.elapsed() >= END_WAIT
            && String::from_utf8_lossy(&output.stderr).contains("has not ended, and has no report yet");
        assert!(output.status.success() || is_late, "{output:?}");
        output.status.success()
    };
    for _ in 0..3 {
        wait_until("a report is there at once", &mut has_report_at_once);
    }
}

#[test]
fn a_command_that_is_run_inside_a_job_is_told_to_start_without_run() {
    let daemon = Daemon::start("");
    let (pjwctl, socket) = (program_path("pjwctl"), daemon.socket());
    let inner = [pjwctl.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    let id = daemon.job_id("outer");
    let inside = |arguments: &[&str]| {
        let output =
            daemon.pjwctl(&[&["run", "--cores", "1", "--job", &id, "--"], &inner[..], arguments].concat());
        wait_until("the job is over", || daemon.status().jobs.is_empty());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let remedy = format!(
        "is in {id} already: inside it, a command has the cores of {id} without pjwctl run, and pjwctl spawn"
    );
    let (code, told) = inside(&["run", "--cores", "1", "--", "true"]);
    assert!(code == Some(1) && told.contains(&remedy) && told.lines().count() == 1, "{told}");
    let (code, told) = inside(&["spawn", "-n", "1", "--cores", "1", "--", "true"]);
    assert!(code == Some(1) && told.contains(&remedy), "{told}");
    let (code, told) = inside(&["spawn", "-n", "2", "--job", &daemon.job_id("inner"), "--", "true"]);
    assert!(code == Some(1) && told.contains(&remedy), "{told}");
    assert!(!told.contains("one for each instance"), "the number of cores is not the cause: {told}");
}

#[test]
fn a_shell_in_a_job_starts_instances_in_a_job_of_their_own() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let (pjwctl, socket) = (program_path("pjwctl"), daemon.socket());
    let (pjwctl, socket) = (pjwctl.to_str().unwrap(), socket.to_str().unwrap());
    let run = ["run", "--cores", "1", "--", "sh", "-c", "\"$@\"; exit $?", "sh"];
    let spawn = [pjwctl, "--socket", socket, "spawn", "-n", "1", "--cores", "1", "--json", "--", "true"];
    let output = daemon.pjwctl(&[&run[..], &spawn[..]].concat());
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("\"manual:true-"), "{output:?}");
}

#[test]
fn a_thread_is_no_process_that_can_be_assigned() {
    let daemon = Daemon::start("");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let tid = nix::unistd::gettid().to_string();
            let output = daemon.pjwctl(&["assign", &daemon.job_id("a"), "--cores", "1", "--pid", &tid]);
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            let expected = format!("{tid} is a thread of process {}", std::process::id());
            assert!(output.status.code() == Some(1) && told.contains(&expected), "{told}");
        });
    });
    assert!(daemon.status().jobs.is_empty());
}
