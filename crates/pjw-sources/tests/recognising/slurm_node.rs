//! The processes of a recorded node with real Slurm jobs, from the files in `fixtures`.

use crate::test_process::TestProcess;

const BY_CGROUP: &str = include_str!("../fixtures/slurm-v2-contain-task-none.processes.txt");
const WITHOUT_CGROUPS: &str = include_str!("../fixtures/slurm-linuxproc-task-none.processes.txt");
const STEP: &str = include_str!("../fixtures/slurm-step.environ.txt");
const BATCH: &str = include_str!("../fixtures/slurm-batch.environ.txt");
const PROLOG: &str = include_str!("../fixtures/slurm-prolog.environ.txt");

const SCOPE: &str = "/system.slice/n1_slurmstepd.scope";

/// A process of a recorded node.
struct Row {
    user: &'static str,
    comm: &'static str,
    cgroup: &'static str,
    job_variable: &'static str,
    command: &'static str,
}

fn rows(text: &'static str) -> Vec<Row> {
    text.lines().skip(1).map(row).collect()
}

fn row(line: &'static str) -> Row {
    let fields: Vec<&str> = line.split(" | ").map(str::trim).collect();
    let identity: Vec<&str> = fields[0].split(' ').collect();
    Row {
        user: identity[4],
        comm: identity[5],
        cgroup: fields[3].trim_start_matches("0::"),
        job_variable: fields[4].split(' ').next().unwrap_or_default(),
        command: fields[5],
    }
}

fn test_process(row: &Row) -> TestProcess {
    let test_process = TestProcess::of(row.comm).in_cgroup(row.cgroup).run_as(row.command);
    if row.job_variable == "-" { test_process } else { test_process.with("SLURM_JOB_ID", row.job_variable) }
}

#[test]
fn with_cgroups_every_process_is_recognised_by_its_cgroup() {
    let rows = rows(BY_CGROUP);
    assert_eq!(rows.len(), 33);
    for row in &rows {
        let claims_text = test_process(row).claims_text();
        let job = match row.user {
            "alice" => "4",
            "bob" => "5",
            _ => "",
        };
        let expected = match (row.comm, row.user) {
            ("slurmstepd", _) => "launcher of slurm".to_owned(),
            ("sleep", "root") => {
                let directory = row.cgroup.split("/step_").next().unwrap();
                let job = directory.rsplit('_').next().unwrap();
                format!("helper of slurm; slurm:{job} by cgroup {directory}")
            }
            // The command of salloc runs in the session of salloc's user.
            ("sleep", _) if row.cgroup.ends_with("serial@0.service") => "slurm:6 by environment".into(),
            (_, "alice" | "bob") => {
                format!("slurm:{job} by cgroup {SCOPE}/job_{job}; slurm:{job} by environment")
            }
            _ => "nothing".to_owned(),
        };
        assert_eq!(claims_text, expected, "{} {} {}", row.user, row.comm, row.cgroup);
    }
}

#[test]
fn without_cgroups_processes_are_recognised_by_environment_and_as_launchers() {
    let rows = rows(WITHOUT_CGROUPS);
    for row in &rows {
        let expected = match (row.comm, row.job_variable) {
            ("slurmstepd", _) => "launcher of slurm".to_owned(),
            (_, "-") => "nothing".to_owned(),
            (_, job) => format!("slurm:{job} by environment"),
        };
        assert_eq!(test_process(row).claims_text(), expected, "{} {}", row.user, row.comm);
    }
}

#[test]
fn the_environments_of_a_step_and_a_batch_script_give_the_cpus_of_the_job() {
    for (step_kind, text) in [("step", STEP), ("batch", BATCH)] {
        assert_eq!(
            TestProcess::of("sleep").with_all(text).claims_text(),
            "slurm:4 by environment, 2 PUs, 1 tasks",
            "{step_kind}"
        );
    }
}

#[test]
fn the_prolog_of_the_node_is_not_in_the_job() {
    let prolog = TestProcess::of("prolog.sh").in_cgroup("/system.slice/slurmd.service").with_all(PROLOG);
    assert_eq!(prolog.claims_text(), "nothing");
}
