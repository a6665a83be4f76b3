//! The job table as text.

use insta::assert_snapshot;

use super::super::samples::{COLOURED_TERMINAL, PLAIN_TERMINAL, job, names, now, without_colour};
use super::*;

fn several() -> Vec<Job> {
    let mut several = vec![job("manual:a", "0-3"), job("slurm:123456", "8-11,24-27"), job("manual:late", "")];
    several[1].owner = 4321;
    several[1].violations = 3;
    several[2].requested_cores = 0;
    several
}

#[test]
fn an_empty_list_of_jobs_has_a_message() {
    assert_eq!(jobs_text(&[], &names(), now(), PLAIN_TERMINAL), "no jobs\n");
}

#[test]
fn a_job_is_a_row() {
    assert_snapshot!(jobs_text(&several(), &names(), now(), PLAIN_TERMINAL), @r"
      job          owner cores cpus       procs threads hot pinned viol since
    a manual:a     alice     4 0-3            1      12   2      2    0    5m
    b slurm:123456 4321      8 8-11,24-27     1      12   2      2    3    5m
    c manual:late  alice     - (waiting)      1      12   2      2    0    5m
    ");
}

#[test]
fn a_job_that_is_not_of_the_class_normal_has_a_line_below_the_table() {
    let mut jobs = several();
    jobs[0].class = "guaranteed".into();
    jobs[0].lent = "2-3".into();
    jobs[2].class = "besteffort".into();
    jobs[2].borrowed = "2-3".into();
    let text = jobs_text(&jobs, &names(), now(), PLAIN_TERMINAL);
    let below = text.strip_prefix(&jobs_text(&several(), &names(), now(), PLAIN_TERMINAL)).unwrap();
    assert_eq!(below, "a is guaranteed, lends CPUs 2-3\nc is besteffort, borrows CPUs 2-3\n");
}

#[test]
fn long_lists_and_ids_go_on_below() {
    let odd: Vec<String> = (0..64).map(|n| (2 * n + 1).to_string()).collect();
    let long = job(&format!("pbs:{}.server.example", "7".repeat(40)), &odd.join(","));
    let table = jobs_text(&[job("manual:a", "0"), long], &names(), now(), PLAIN_TERMINAL);
    for line in table.lines() {
        assert!(text::char_count(line) <= 80, "{} columns: {line}", text::char_count(line));
    }
    assert_snapshot!(table, @r"
      job            owner cores cpus            procs threads hot pinned viol since
    a manual:a       alice     1 0                   1      12   2      2    0    5m
    b pbs:7777777777 alice    64 1,3,5,7,9,11,       1      12   2      2    0    5m
      77777777777777             13,15,17,19,21,
      77777777777777             23,25,27,29,
      77.server.exam             …(64)
      ple
    ");
}

#[test]
fn colours_change_nothing_but_the_colour() {
    let coloured = jobs_text(&several(), &names(), now(), COLOURED_TERMINAL);
    assert!(coloured.contains("\x1b[36mb\x1b[0m slurm:123456"), "{coloured:?}");
    assert_eq!(without_colour(&coloured), jobs_text(&several(), &names(), now(), PLAIN_TERMINAL));
}

#[test]
fn a_hostile_name_stays_in_its_cell() {
    let mut hostile = job("manual:a", "0");
    hostile.id = "manual:\x1b[2Jx\ny".into();
    let table = jobs_text(&[hostile], &names(), now(), Terminal { width: 200, has_colours: false });
    assert!(table.contains("manual:\\u{1b}[2Jx\\ny") && table.lines().count() == 2, "{table}");
}

#[test]
fn assign_prints_the_job_and_its_cpus() {
    assert_eq!(assigned_job_line(&job("manual:a", "2-3")), "manual:a 2-3\n");
    assert_eq!(assigned_job_line(&job("manual:a", "")), "manual:a\n", "and no blank where there are none");
}

#[test]
fn the_message_for_a_waiting_job_has_the_request_and_the_state_of_its_processes() {
    let mut late = Job { requested_cores: 1, ..job("manual:late", "") };
    assert_eq!(
        no_cores_message(&late),
        "manual:late waits for 1 core and gets its cores as soon as enough are free; until then its processes run \
         with their present masks; pjwctl release manual:late cancels the request"
    );
    late.processes = 0;
    assert!(!no_cores_message(&late).contains("processes"), "{}", no_cores_message(&late));
    late.state = "observed".into();
    assert_eq!(no_cores_message(&late), "manual:late has no CPU: it is observed");
}

#[test]
fn the_message_for_a_besteffort_job_without_a_core_says_whether_it_is_frozen() {
    let frozen = Job { class: "besteffort".into(), enforcement: "cpuset".into(), ..job("manual:late", "") };
    assert_eq!(
        no_cores_message(&frozen),
        "manual:late can borrow no core at present: its processes are frozen until it can; pjwctl release manual:late lets \
         them run without pjwd"
    );
    let unconfined = no_cores_message(&Job { enforcement: "none".into(), ..frozen.clone() });
    assert!(unconfined.contains("its processes run with their present masks until it can"), "{unconfined}");
    assert_eq!(
        no_cores_message(&Job {
            processes: 0,
            state: "reserved".into(),
            enforcement: "none".into(),
            ..frozen
        }),
        "manual:late has no process and borrows no core until it has one: pjwctl assign manual:late --pid PID adds one, \
         pjwctl release manual:late removes the job"
    );
}

#[test]
fn release_prints_what_was_released() {
    assert_eq!(
        released_jobs_text(&["manual:a".into(), "slurm:1".into()]),
        "released manual:a\nreleased slurm:1\n"
    );
    assert_eq!(released_jobs_text(&[]), "there was nothing to release\n");
}
