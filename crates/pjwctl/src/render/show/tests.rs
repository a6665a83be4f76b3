//! One job as text.

use insta::assert_snapshot;

use super::super::samples::{self, PLAIN_TERMINAL, job, names};
use super::*;

fn sample() -> JobDetails {
    let member = Member {
        pid: 100,
        start_time: 12_345,
        comm: "solver".into(),
        uid: 1000,
        evidence: "registered".into(),
        threads: samples::threads(),
        address_space: None,
    };
    let time = "2026-05-04T12:00:00Z".into();
    let assigned = Event { time, event: "assigned".into(), text: "2 cores: 2-3".into(), ..Event::default() };
    JobDetails {
        job: job("manual:a", "2-3"),
        members: vec![member],
        history: vec![assigned.into()],
        memory: None,
        no_memory_reason: None,
    }
}

#[test]
fn the_reason_why_the_memory_of_a_job_is_not_estimated_is_shown() {
    let why = "no estimate, because the job has no memory cgroup of its own; pjwctl show manual:a --memory reads its pages";
    let no_memory_reason = Some(why.to_owned());
    let text = job_details_text(&JobDetails { no_memory_reason, ..sample() }, &names(), PLAIN_TERMINAL);
    let expected = "\nmemory: no estimate, because the job has no memory cgroup of its own; pjwctl\n  show manual:a --memory reads its pages\n\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_job_is_shown_with_its_processes_threads_and_history() {
    assert_snapshot!(job_details_text(&sample(), &names(), PLAIN_TERMINAL), @r"
    manual:a: running, class normal, of alice, since 2026-05-04T12:00:00Z
      requested 2 cores, holds CPUs 2-3 (granted by pjwd, kept by affinity)
      1 process, 12 threads (2 hot, 2 pinned), 0 violations, 0 strays

    100 solver of alice, known by registration
           tid st  demand   cpu  allowed CPUs      name
           100 R    99.8%     3  3 (pinned)        solver
           101 S     0.3%     2  2-3               io
           102 S     0.3%     2  2-3               evil\u{1b}[2J\nname

    history
    2026-05-04T12:00:00Z  assigned 2 cores: 2-3
    ");
}

#[test]
fn a_job_without_cores_or_processes_says_so() {
    let mut job = job("slurm:7", "");
    job.state = "observed".into();
    job.processes = 0;
    job.threads = 0;
    let details = job_details_text(&JobDetails { job, ..JobDetails::default() }, &names(), PLAIN_TERMINAL);
    assert_snapshot!(details, @r"
    slurm:7: observed, class normal, of alice, since 2026-05-04T12:00:00Z
      number of cores unknown, holds no CPU
      0 processes, 0 threads (2 hot, 2 pinned), 0 violations, 0 strays
    ");
}

#[test]
fn the_class_says_what_is_borrowed_or_lent() {
    for (class, borrowed, lent, expected) in [
        ("besteffort", "2-3", "", "running, class besteffort (borrows CPUs 2-3), of alice"),
        ("guaranteed", "", "3", "running, class guaranteed (lends CPU 3), of alice"),
    ] {
        let mut job = job("manual:a", "2-3");
        (job.class, job.borrowed, job.lent) = (class.into(), borrowed.into(), lent.into());
        let details =
            job_details_text(&JobDetails { job, ..JobDetails::default() }, &names(), PLAIN_TERMINAL);
        assert!(details.contains(expected), "{details}");
    }
}

#[test]
fn the_json_is_the_job_with_members_and_history() {
    let sample = sample();
    let json = serde_json::to_value(&sample).unwrap();
    let mut expected = serde_json::to_value(&sample.job).unwrap();
    expected["members"] = serde_json::to_value(&sample.members).unwrap();
    expected["history"] = serde_json::to_value(&sample.history).unwrap();
    assert_eq!(json, expected);
    assert_eq!(json["members"][0]["threads"][1]["pinned"], serde_json::Value::Null);
}

#[test]
fn the_owner_of_an_address_space_is_named_beside_the_tasks() {
    let member = |pid, comm: &str, space| Member {
        pid,
        comm: comm.into(),
        address_space: Some(space),
        ..sample().members.remove(0)
    };
    for (members, expected) in [
        (
            vec![member(10, "pjw-tasks", 1), member(11, "a", 1), member(12, "a", 1)],
            "  2 tasks share the address space of process 10 (pjw-tasks): 11, 12\n",
        ),
        (
            vec![member(10, "pjw-tasks", 1), member(11, "a", 1)],
            "  1 task shares the address space of process 10 (pjw-tasks): 11\n",
        ),
        (vec![member(11, "a", 1), member(12, "a", 1)], "  2 tasks share an address space: 11, 12\n"),
        (
            vec![member(11, "a", 1)],
            "  1 task shares an address space with a process outside of this job: 11\n",
        ),
    ] {
        let text = job_details_text(&JobDetails { members, ..sample() }, &names(), PLAIN_TERMINAL);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("address space")).collect();
        assert_eq!(lines, [expected.trim_end()], "{text}");
    }
}
