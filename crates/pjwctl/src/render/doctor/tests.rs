//! The report for an administrator.

use std::collections::BTreeMap;

use insta::assert_snapshot;

use super::super::samples;
use super::*;

fn line(severity: &'static str, text: &str, remedy: &str) -> DoctorFinding {
    DoctorFinding {
        code: "x".to_owned(),
        severity,
        text: text.to_owned(),
        remedy: remedy.to_owned(),
        jobs: Vec::new(),
        pids: Vec::new(),
        cpus: String::new(),
    }
}

fn job(id: &str, requested_cores: Option<u32>, cpus: &str, expected_cpus: &str) -> DoctorJob {
    DoctorJob {
        id: id.to_owned(),
        owner: 1001,
        requested_cores,
        cpus: cpus.to_owned(),
        granted_by: "",
        allowed_cpus: "0-15".to_owned(),
        expected_cpus: expected_cpus.to_owned(),
        processes: 3,
        threads: 40,
        hot_threads: 8,
    }
}

fn sample() -> DoctorReport {
    let fact = |code, text: &str, is_detail| DoctorFact { code, text: text.to_owned(), is_detail };
    DoctorReport {
        hostname: "node1".to_owned(),
        findings: vec![
            line(
                "problem",
                "CPUs 0-3 are given to slurm:17 and slurm:18 at once, and this sentence is long enough to need two",
                "start pjwd: it gives each job cores of its own (systemctl start pjwd)",
            ),
            line("advice", "pjwd is not running: nobody looks after 2 jobs", "systemctl start pjwd"),
            line("note", "this kernel reports no pressure (/proc/pressure)", "psi=1"),
        ],
        jobs: vec![job("slurm:17", Some(4), "", "0-3"), job("slurm:18", None, "0,2,4,6,8,10,12,14", "")],
        facts: vec![
            fact("machine", "2 packages, 2 NUMA nodes, 16 cores, CPUs 0-15", false),
            fact("scheduler", "Slurm: it binds nothing here: pjwd grants cores", false),
            fact("numa_balancing", "off", true),
        ],
    }
}

fn names() -> UserNames {
    BTreeMap::from([(1001, "alice".to_owned())])
}

#[test]
fn the_most_urgent_finding_comes_first_and_notes_are_left_out() {
    assert_snapshot!(report_text(&sample(), &names(), false, samples::PLAIN_TERMINAL), @r"
    node1: 1 problem, 1 piece of advice, 1 note (--all shows them)

    problem  CPUs 0-3 are given to slurm:17 and slurm:18 at once, and this sentence
             is long enough to need two
             → start pjwd: it gives each job cores of its own (systemctl start pjwd)
    advice   pjwd is not running: nobody looks after 2 jobs
             → systemctl start pjwd

    job       owner  cores  holds           may use  procs  threads  hot  would get
    slurm:17  alice      4  -               0-15         3       40    8  0-3
    slurm:18  alice      -  0,2,4,6,8,…(8)  0-15         3       40    8  -

    machine        2 packages, 2 NUMA nodes, 16 cores, CPUs 0-15
    scheduler      Slurm: it binds nothing here: pjwd grants cores
    ");
}

#[test]
fn with_all_everything_is_shown() {
    assert_snapshot!(report_text(&sample(), &names(), true, samples::PLAIN_TERMINAL), @r"
    node1: 1 problem, 1 piece of advice, 1 note

    problem  CPUs 0-3 are given to slurm:17 and slurm:18 at once, and this sentence
             is long enough to need two
             → start pjwd: it gives each job cores of its own (systemctl start pjwd)
    advice   pjwd is not running: nobody looks after 2 jobs
             → systemctl start pjwd
    note     this kernel reports no pressure (/proc/pressure)
             → psi=1

    job       owner  cores  holds           may use  procs  threads  hot  would get
    slurm:17  alice      4  -               0-15         3       40    8  0-3
    slurm:18  alice      -  0,2,4,6,8,…(8)  0-15         3       40    8  -

    machine        2 packages, 2 NUMA nodes, 16 cores, CPUs 0-15
    scheduler      Slurm: it binds nothing here: pjwd grants cores
    numa_balancing off
    ");
}

#[test]
fn the_report_of_a_healthy_node_is_one_line() {
    let healthy = DoctorReport { findings: Vec::new(), jobs: Vec::new(), ..sample() };
    assert!(
        report_text(&healthy, &names(), false, samples::PLAIN_TERMINAL)
            .starts_with("node1: nothing to do\n\nmachine")
    );
}

#[test]
fn colours_are_for_pages_that_take_them_and_names_can_not_draw() {
    let mut hostile = sample();
    hostile.hostname = "n\x1b[2J".to_owned();
    hostile.findings[0].text = "solver\x1b]0;x\x07 (7) \u{202e}is\nbusy".to_owned();
    hostile.jobs[0].id = "slurm:\x1b[1m".to_owned();
    let plain = report_text(&hostile, &names(), true, samples::PLAIN_TERMINAL);
    assert!(!plain.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{plain:?}");
    let coloured =
        report_text(&sample(), &names(), true, Terminal { has_colours: true, ..samples::PLAIN_TERMINAL });
    assert!(coloured.contains("\x1b[") && coloured.contains("problem"));
}

#[test]
fn a_narrow_page_is_no_reason_to_fail() {
    for width in [0, 1, 20, 40, 400] {
        let term = Terminal { width, has_colours: false };
        assert!(report_text(&sample(), &names(), true, term).contains("slurm:17"));
    }
}

#[test]
fn many_jobs_are_counted() {
    let mut many = sample();
    many.jobs = (0..50).map(|n| job(&format!("slurm:{n}"), Some(1), "", "")).collect();
    let text = report_text(&many, &names(), false, samples::PLAIN_TERMINAL);
    assert!(text.contains("and 30 more (--all shows them)"), "{text}");
    assert!(report_text(&many, &names(), true, samples::PLAIN_TERMINAL).contains("slurm:49"));
}
