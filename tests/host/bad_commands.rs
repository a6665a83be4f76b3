//! Bad input for each command of pjwctl: the exit code is not 0, standard error has a message that names the thing, and
//! the jobs, their CPUs and the masks are as before.

use std::process::Output;

use pjw_tests::daemon::Daemon;
use serde_json::{Value, json};

use crate::processes::{Shell, mask};

/// The daemon of a test with a job `a`, and what must stay as it is.
struct World {
    daemon: Daemon,
    shell: Shell,
    before: String,
}

impl World {
    fn new() -> Self {
        let daemon = Daemon::start("");
        let shell = Shell::start();
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let mut world = Self { daemon, shell, before: String::new() };
        world.before = world.state();
        world
    }

    /// The jobs with their CPUs, and the mask of the process of the job.
    fn state(&self) -> String {
        let status = self.daemon.status();
        let jobs: Vec<_> =
            status.jobs.iter().map(|job| (&job.id, &job.cpus, &job.state, job.wants)).collect();
        format!("{jobs:?} {}", mask(self.shell.pid()))
    }

    /// Asserts that pjwctl refuses each of these inputs by one message, and that nothing changes. An input is the
    /// arguments, with `JOB` for the id of the job, and a text that the message must contain.
    #[track_caller]
    fn check_refused(&self, inputs: &[(&[&str], &str)]) {
        let job = self.daemon.job_id("a");
        let mut faults = Vec::new();
        for (arguments, named) in inputs {
            let words: Vec<String> = arguments.iter().map(|word| word.replace("JOB", &job)).collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let output = self.daemon.pjwctl(&words);
            faults
                .extend(fault_of(&output, named).map(|fault| format!("{arguments:?}: {fault}: {output:?}")));
            if self.state() != self.before {
                faults.push(format!("{arguments:?} changed something: {}", self.state()));
            }
        }
        assert!(faults.is_empty(), "{faults:#?}");
    }
}

/// What is wrong with the output of a command that must be refused.
fn fault_of(output: &Output, named: &str) -> Option<&'static str> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let message = stderr.lines().next().unwrap_or_default();
    let is_of_pjwctl = message.starts_with("pjwctl: ");
    if !matches!(output.status.code(), Some(1 | 2)) {
        Some("the exit code is not 1 or 2")
    } else if !output.stdout.is_empty() {
        Some("something is printed on standard output")
    } else if !is_of_pjwctl && !message.starts_with("error: ") {
        Some("this is no message of pjwctl")
    } else if !stderr.contains(named) || stderr.contains("panicked") {
        Some("the message does not name the thing")
    } else if is_of_pjwctl && stderr.lines().count() != 1 {
        // A usage error has the usage of the command below its message.
        Some("the message has several lines")
    } else {
        None
    }
}

#[test]
fn a_name_that_is_no_job_is_refused_by_each_command_that_takes_one() {
    let world = World::new();
    world.check_refused(&[
        (&["show", "nobody"], "nobody"),
        (&["show", "nobody", "--memory"], "nobody"),
        (&["release", "nobody"], "nobody"),
        (&["explain", "nobody"], "nobody"),
        (&["report", "nobody"], "nobody"),
        (&["want", "nobody", "1"], "nobody"),
        (&["unprovision", "nobody"], "nobody"),
    ]);
    for (name, named) in [
        ("", "is empty"),
        ("manual:", "is empty"),
        ("a b", "holds ' '"),
        ("../x", "holds '/'"),
        ("slrm:1", "slrm"),
    ] {
        world.check_refused(&[
            (&["show", name], named),
            (&["release", name], named),
            (&["explain", name], named),
            (&["report", name], named),
            (&["want", name, "1"], named),
            (&["assign", name, "--cores", "1"], named),
            (&["run", "--cores", "1", "--job", name, "--", "true"], named),
            // The name of a provision has no source.
            (&["unprovision", name], ""),
            (&["provision", name, "--cores", "1"], ""),
        ]);
    }
}

#[test]
fn wrong_numbers_are_refused_by_each_command_that_takes_one() {
    let world = World::new();
    world.check_refused(&[
        (&["assign", "b", "--cores", "0"], "0 cores"),
        (&["assign", "b", "--cores", "-1"], "-1 looks like an option: give a value without -"),
        (&["assign", "b", "--cores", "1.5"], "1.5"),
        (&["assign", "b", "--cores", "4294967296"], "4294967296"),
        (&["assign", "b", "--cores", "70000"], "70000"),
        (&["assign", "b", "--cores", "1", "--pid", "0"], "--pid"),
        (&["assign", "b", "--cores", "1", "--pid", "4194304"], "4194304"),
        (&["assign", "b", "--cores", "1", "--pid", "1,2"], "1,2"),
        (&["assign", "b", "--cores", "1", "--session", "0"], "--session"),
        (&["assign", "b", "--cores", "1", "--session", "4194304"], "4194304"),
        (&["assign", "b", "--cpus", "60000"], "60000"),
        (&["assign", "b", "--cpus", "3-1"], "3-1"),
        (&["assign", "b", "--cpus", ""], "the CPU list is empty"),
        (&["run", "--cores", "0", "--", "true"], "0 cores"),
        (&["run", "--cores", "70000", "--", "true"], "70000"),
        (&["run", "--cpus", "60000", "--", "true"], "60000"),
        (&["spawn", "-n", "0", "--cores", "1", "--", "true"], "number of instances is 0"),
        (&["spawn", "-n", "many", "--cores", "1", "--", "true"], "many"),
        (&["spawn", "-n", "2", "--cores", "0", "--", "true"], "0 cores"),
        (&["want", "JOB", "many"], "many"),
        (&["want", "JOB", "-1"], "-1"),
        (&["provision", "web", "--cores", "0"], "0"),
        (&["report", "--last", "0"], "--last"),
        (&["report", "--last", "-2"], "-2"),
        (&["explain", "4194304"], "4194304"),
        (&["advise", "--serial", "1", "--item", "1s"], "--serial"),
        (&["advise", "--serial", "1s", "--item", "1s", "--workers", "0"], "--workers"),
        (&["simulate", "--trace", "x", "--synthetic", "core:0"], "x"),
    ]);
}

#[test]
fn unknown_values_options_and_commands_are_refused() {
    let world = World::new();
    world.check_refused(&[
        (&["asign", "b", "--cores", "1"], "asign"),
        (&["status", "--jason"], "--jason"),
        (&["plan", "now"], "now"),
        (&["jobs", "--endet"], "--endet"),
        (&["defrag", "now"], "now"),
        (&["doctor", "--al"], "--al"),
        (&["show", "JOB", "--nodes"], "--memory"),
        (&["report", "JOB", "--last", "2"], "--last"),
        (&["report", "JOB", "--jobstats", "--json"], "--json"),
        (&["events", "--folow"], "--folow"),
        (&["reload", "now"], "now"),
        (&["assign", "b"], "cores"),
        (&["assign", "b", "--cores", "1", "--class", "precious"], "precious"),
        (&["assign", "b", "--cores", "1", "--policy", "near"], "near"),
        (&["assign", "b", "--cores", "1", "--within-job", "nodes"], "nodes"),
        (&["assign", "b", "--cores", "1", "--near", "no-such-device"], "no-such-device"),
        (&["assign", "b", "--cores", "1", "--isolated=maybe"], "maybe"),
        (&["run", "--cores", "1"], "CMD"),
        (&["run", "--cores", "1", "--job", "JOB", "--", "true"], "already: choose another name"),
        (&["spawn", "-n", "1", "--local", "--map", "60000", "--", "true"], "60000"),
        (&["spawn", "-n", "1", "--local", "--proxy", "perhaps", "--", "true"], "perhaps"),
        (&["release"], "--all"),
        (&["completions", "cmd.exe"], "cmd.exe"),
        (&["topology", "--synthetic", "nonsense"], "nonsense"),
        (&["hook"], "HOOK"),
        (&["hook", "no-such-hook"], "no-such-hook"),
        (&["provision", "web", "--cores", "1", "--match", "colour=red"], "colour"),
    ]);
}

#[test]
fn wrong_files_and_paths_are_refused() {
    let world = World::new();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("not-a-log");
    std::fs::write(&file, "\u{1b}[2J nonsense\n").unwrap();
    let file = file.to_str().unwrap();
    world.check_refused(&[
        (&["check-config", "/nonexistent"], "/nonexistent"),
        (&["check-config", "/"], "/"),
        (&["simulate", "--trace", "/nonexistent", "--synthetic", "core:2"], "/nonexistent"),
        (&["simulate", "--trace", file, "--synthetic", "core:2"], "not-a-log"),
        (&["simulate", "--demand", file, "--synthetic", "core:2"], "not-a-log"),
        (&["topology", "--input", "/nonexistent"], "/nonexistent"),
        (&["topology", "--input", file], "not-a-log"),
        (&["topology", "--svg", "/nonexistent/x.svg"], "/nonexistent/x.svg"),
        (&["man", "--dir", "/nonexistent"], "/nonexistent"),
        (&["spawn", "--multi", "/nonexistent", "--local"], "/nonexistent"),
    ]);
}

#[test]
fn a_program_that_does_not_exist_is_127_and_leaves_no_job() {
    let world = World::new();
    let output = world.daemon.pjwctl(&["run", "--cores", "1", "--", "/nonexistent"]);
    // On a machine of one core, no core is free.
    assert!(matches!(output.status.code(), Some(1 | 127)), "{output:?}");
    assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{output:?}");
    pjw_tests::waiting::wait_until("only the first job is left", || world.state() == world.before);
}

#[test]
fn a_reload_of_a_removed_configuration_says_what_to_do_and_changes_nothing() {
    let world = World::new();
    world.daemon.configure("");
    let reply: Value = world.daemon.call("Reload", &json!({})).unwrap_or_default();
    assert!(reply.is_object(), "{reply}");
    std::fs::remove_file(world.daemon.dir().join("pjwd.toml")).unwrap();
    world.check_refused(&[(&["reload"], "restore the file")]);
}
