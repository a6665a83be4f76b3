//! `simulate`: the figures and CSV files for logs of jobs and curves of demand, and the errors of the input.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pjw_core::testing::regular_topology;
use serde_json::Value;

use super::usage::pjwctl_beside_pjwd;
use super::{CommandOutput, answer, assert_refused};

const LOG: &str = "; a log of four jobs on at most 8 cores\n\
    1  0 -1 10 2 -1 -1 2 -1 -1 1 1 1 -1 -1 -1 -1 -1\n\
    2  5 -1 10 7 -1 -1 7 -1 -1 1 1 1 -1 -1 -1 -1 -1\n\
    3 10 -1 10 7 -1 -1 7 -1 -1 1 1 1 -1 -1 -1 -1 -1\n\
    4 10 -1 -1 1 -1 -1 1 -1 -1 1 1 1 -1 -1 -1 -1 -1\n";

/// `pjwctl` beside a `pjwd` that has one machine: two L3s with four cores each, of two PUs each.
struct Fixture {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let json = serde_json::to_string(&regular_topology(1, 1, 2, 4, 2)).unwrap();
        let script = format!("test \"$*\" = '--topology-json --plain --synthetic=made up' && echo '{json}'");
        let (dir, command) = pjwctl_beside_pjwd(&script);
        fs::write(dir.path().join("log.swf"), LOG).unwrap();
        Self { program: command.get_program().into(), dir }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(self.dir.path()).args(["simulate", "--synthetic", "made up"]).args(arguments);
        command
    }

    fn simulate(&self, arguments: &[&str]) -> CommandOutput {
        answer(&mut self.command(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let answer = self.simulate(&[&["--trace", "log.swf", "--json"], arguments].concat());
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
        serde_json::from_str(&answer.stdout).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn the_json_of_a_replayed_log_has_the_figures_of_the_contract() {
    let output_json = Fixture::new().json(&[]);
    for (name, expected) in
        [("jobs", 3), ("started", 2), ("refused", 1), ("skipped", 1), ("usable", 8), ("split_cores", 0)]
    {
        assert_eq!(output_json[name], expected, "{name}: {output_json}");
    }
    // The jobs use 90 of 160 core seconds. One job has 2 cores on one L3, and one has 7 cores on two.
    assert_eq!(
        (output_json["utilisation"].as_f64(), output_json["mean_l3"].as_f64()),
        (Some(0.5625), Some(1.5))
    );
    assert!(output_json["decision_ns"]["p50"].as_u64() <= output_json["decision_ns"]["p99"].as_u64());
    assert_eq!(output_json["fragmentation"][0]["largest_l3"], 4);
}

#[test]
fn simulate_prints_a_table_and_writes_csv_files() {
    let fixture = Fixture::new();
    let arguments =
        ["--trace", "log.swf", "--per-job", "jobs.csv", "--fragmentation", "free.csv", "--housekeeping", ""];
    let output_json = fixture.simulate(&arguments);
    assert!(output_json.stdout.starts_with("3 jobs on 8 cores, pack\n"), "{output_json:?}");
    let jobs = fs::read_to_string(fixture.path("jobs.csv")).unwrap();
    let expected = "job,submit_s,end_s,requested,cpus,packages,numa_nodes,l3\n\
        1,0,10,2,\"0-1,8-9\",1,1,1\n\
        3,10,20,7,\"0-6,8-14\",1,1,2\n";
    assert_eq!(jobs, expected);
    assert!(fs::read_to_string(fixture.path("free.csv")).unwrap().contains("\n0,6,4,6,6\n"));
}

#[test]
fn the_options_for_unit_policy_housekeeping_and_reference_take_effect() {
    let fixture = Fixture::new();
    let output_json = fixture.json(&["--unit", "pu"]);
    assert_eq!((&output_json["usable"], &output_json["started"]), (&16.into(), &3.into()));
    assert!(output_json["split_cores"].as_u64() > Some(0));
    assert_eq!(fixture.json(&["--policy", "spread"])["mean_l3"], 2.0);
    assert_eq!(fixture.json(&["--housekeeping", "1/l3"])["usable"], 6);
    assert_eq!(fixture.json(&["--housekeeping", "0,8"])["refused"], 1);
    for name in ["first-fit", "kubelet", "kubelet-l3"] {
        assert_eq!(fixture.json(&["--reference", name])["policy"], name);
    }
}

#[test]
fn a_log_can_be_read_from_a_pipe() {
    let fixture = Fixture::new();
    let mut command = fixture.command(&["--trace", "-", "--json"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(LOG.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let output_json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output_json["jobs"], 3);
}

#[test]
fn a_log_that_cannot_be_replayed_is_refused_on_one_line() {
    let fixture = Fixture::new();
    let job = |fields: &str| format!("{fields} -1 -1 1 -1 -1 1 1 1 -1 -1 -1 -1 -1\n");
    for (text, reason) in [
        (String::new(), "bad.swf: there is no job in it"),
        ("; remarks only\n".to_owned(), "there is no job in it"),
        ("hello\n".to_owned(), "line 1 has 1 field and a job in the Standard Workload Format has 18"),
        (job("1 x -1 1 1"), "line 1, field 2 (submit time): \"x\""),
        (job("1 -5 -1 1 1"), "line 1, field 2 (submit time): -5 is negative"),
        (job("1 0 -1 -3 1"), "line 1, field 4 (run time): -3 is negative"),
        (job("1 0 -1 1 -2"), "line 1, field 5 (processors): -2 is negative"),
        (job("1 0 -1 -1 1"), "none of its 1 jobs has a known size and run time"),
        ("\0\u{1}\u{2}".to_owned(), "line 1 has 1 field "),
    ] {
        fs::write(fixture.path("bad.swf"), text).unwrap();
        assert_refused(&fixture.simulate(&["--trace", "bad.swf"]), reason);
    }
    assert_refused(
        &fixture.simulate(&["--trace", "missing.swf"]),
        "can't read the log missing.swf: No such file or directory (os error 2); give the path of a text file, or -",
    );
    assert_refused(&fixture.simulate(&["--trace", "."]), "can't read the log .: Is a directory");
    let into_missing_directory = ["--trace", "log.swf", "--per-job", "/nonexistent/jobs.csv"];
    assert_refused(
        &fixture.simulate(&into_missing_directory),
        "can't write /nonexistent/jobs.csv: No such file or directory (os error 2); name a file in a directory",
    );
}

#[test]
fn invalid_rules_are_refused_and_invalid_arguments_are_usage_errors() {
    let fixture = Fixture::new();
    for (rule, reason) in [
        ("0", "housekeeping PU 0 shares its core with 8"),
        ("0,8,99", "housekeeping PUs 99 are not on this machine"),
        ("4/l3", "takes every core"),
    ] {
        assert_refused(&fixture.simulate(&["--trace", "log.swf", "--housekeeping", rule]), reason);
    }
    for arguments in [["--housekeeping", "1/l4"], ["--housekeeping", "x"], ["--reference", "nobody"]] {
        let answer = fixture.simulate(&[&["--trace", "log.swf"][..], &arguments].concat());
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(2), ""), "{answer:?}");
        assert!(answer.stderr.contains(arguments[0]), "{answer:?}");
    }
}

#[test]
fn a_job_of_the_log_that_is_larger_than_the_machine_is_refused() {
    let fixture = Fixture::new();
    let job = |n: &str| format!("1 0 -1 5 {n} -1 -1 1 -1 -1 1 1 1 -1 -1 -1 -1 -1\n");
    fs::write(fixture.path("log.swf"), job("9") + &job("99999999999") + &job("8")).unwrap();
    let output_json = fixture.json(&[]);
    assert_eq!((&output_json["started"], &output_json["refused"]), (&1.into(), &2.into()));
    fs::write(fixture.path("log.swf"), job("9")).unwrap();
    let output_json = fixture.json(&[]);
    assert_eq!((&output_json["started"], &output_json["utilisation"]), (&0.into(), &0.0.into()));
    assert!(fixture.simulate(&["--trace", "log.swf"]).stdout.contains("refused"));
}

#[test]
fn a_topology_that_pjwd_cannot_load_is_refused_with_the_message_of_pjwd() {
    let (dir, command) = pjwctl_beside_pjwd("echo 'pjwd: no such file' >&2; exit 1");
    fs::write(dir.path().join("log.swf"), LOG).unwrap();
    let mut command = Command::new(Path::new(command.get_program()));
    command.current_dir(dir.path()).args(["simulate", "--trace", "log.swf", "--input", "missing.xml"]);
    let expected =
        CommandOutput { code: Some(1), stdout: String::new(), stderr: "pjwctl: no such file\n".into() };
    assert_eq!(answer(&mut command), expected);
}

#[test]
fn a_log_without_an_end_is_refused_before_it_fills_the_memory() {
    let fixture = Fixture::new();
    assert_refused(&fixture.simulate(&["--trace", "/dev/zero"]), "a line is longer than 1 MiB");
}

#[test]
fn a_curve_of_demand_is_replayed_without_and_with_lending() {
    let fixture = Fixture::new();
    fs::write(fixture.path("day.csv"), "time_s,web:6\n0,3\n3600,6\n7200,0\n").unwrap();
    let answer = fixture.simulate(&["--demand", "day.csv", "--json"]);
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{answer:?}");
    let json: Value = serde_json::from_str(&answer.stdout).unwrap();
    // The owner uses 9 of 16 core hours. The besteffort job has the two free cores, and two lent cores for an hour.
    assert_eq!((&json["usable"], &json["without_lending"]["utilisation"]), (&8.into(), &0.8125.into()));
    assert_eq!((&json["loans"], &json["revocations"]), (&2.into(), &2.into()));
    let lent = json["lent_core_hours"].as_f64().unwrap();
    assert!((lent - 2.0 * 3598.0 / 3600.0).abs() < 1e-9, "{lent}");
    let text = fixture.simulate(&["--demand", "day.csv"]).stdout;
    assert!(text.starts_with("1 owner with 6 cores of 8, for 0d 02:00:00\n"), "{text}");
}

#[test]
fn a_curve_may_be_two_columns_of_numbers_and_the_options_of_lending_take_effect() {
    let fixture = Fixture::new();
    fs::write(fixture.path("day.csv"), "0,0\n100,6\n200,6\n").unwrap();
    let loans = |options: &[&str]| {
        let answer = fixture.simulate(&[&["--demand", "day.csv", "--json"], options].concat());
        let json: Value = serde_json::from_str(&answer.stdout).unwrap();
        json["loans"].as_u64()
    };
    assert_eq!(loans(&[]), Some(5), "six idle cores, minus one core of the buffer");
    assert_eq!(loans(&["--buffer", "0"]), Some(6));
    assert_eq!(
        loans(&["--lend-after", "99s"]),
        Some(4),
        "four cores are lent at once, and then the demand rises"
    );
    assert_eq!(loans(&["--lend-after", "2m"]), Some(0));
    assert_eq!(loans(&["--lend-after", "60s", "--at-once", "2"]), Some(2));
}

#[test]
fn a_curve_that_cannot_be_replayed_is_refused_on_one_line() {
    let fixture = Fixture::new();
    for (text, reason) in [
        ("", "bad.csv: there is no demand in it"),
        ("time_s,web\n0,1\n", "bad.csv: line 2: this is the only demand"),
        ("time_s,web\n0,1\n1,many\n", "bad.csv: line 3: web: \"many\" is not a number of cores"),
        ("0,1\nx,1\n", "bad.csv: line 2: the time \"x\" is not a number of seconds"),
        ("0,1\n9,1\n8,1\n", "bad.csv: line 3: the time 8 is not after 9 s"),
        ("time_s,web:4\n0,1\n9,5\n", "bad.csv: line 3: web uses 5 cores and owns 4"),
        ("0,9\n9,9\n", "bad.csv: owner can't have 9 cores: the curve asks for 9 cores"),
    ] {
        fs::write(fixture.path("bad.csv"), text).unwrap();
        assert_refused(&fixture.simulate(&["--demand", "bad.csv"]), reason);
    }
    assert_refused(
        &fixture.simulate(&["--demand", "missing.csv"]),
        "can't read the curve missing.csv: No such file",
    );
    assert_refused(&fixture.simulate(&["--demand", "/dev/zero"]), "a line is longer than 1 MiB");
}
