//! Reports as text.

use super::*;
use pjw_ipc::report::UseLevel;

const TERMINAL: Terminal = Terminal { width: 80, has_colours: false };

fn names() -> UserNames {
    UserNames::from([(1000, "alice".to_owned())])
}

fn report() -> Report {
    Report {
        id: "slurm:7".into(),
        owner: 1000,
        cpus: "0-15".into(),
        cores: 16,
        started: "2026-05-04T12:00:00.000Z".into(),
        ended: "2026-05-04T12:02:00.000Z".into(),
        wall_s: Thousandths(120_000),
        cpu_s: Thousandths(372_040),
        waited_s: Thousandths(1_250),
        cores_used_mean: Thousandths(3_100),
        cores_used_p95: Thousandths(4_000),
        threads_max: 4,
        verdict: Some("serial".into()),
        advice: vec!["Of 16 cores 3.1 were used: ask for `--cpus-per-task=4`.".into()],
        ..Report::default()
    }
}

#[test]
fn a_report_is_a_page_with_the_verdict_first() {
    assert_eq!(
        report_text(&report(), &names(), TERMINAL),
        "slurm:7 of alice: 120 s on 16 cores (0-15)
  verdict     serial
              Of 16 cores 3.1 were used: ask for `--cpus-per-task=4`.
  started     2026-05-04T12:00:00.000Z
  ended       2026-05-04T12:02:00.000Z
  cpu time    372 s, 19 % of 120 s on 16 cores
  cores used  3.1 on average, at most 4.0 for 95 % of the time
  threads     4 wanted a core at the same time
  waiting     1.3 s of its threads' time while it did not use all its cores
"
    );
    let resized = Report {
        cpus: "0-3".into(),
        cores_held_mean: Thousandths(6_200),
        cpus_held_mean: Thousandths(6_200),
        ..report()
    };
    let text = report_text(&resized, &names(), TERMINAL);
    assert!(text.contains("  cpu time    372 s, 50 % of 120 s on 6.2 cores on average\n"), "{text}");
    let more = Report {
        verdict: None,
        no_verdict: Some("it ran for less than 10 s".into()),
        advice: Vec::new(),
        serial_s: Thousandths(20_000),
        violations: 1,
        repairs: 2,
        memory_peak: Some(3 << 20),
        shared_permille: Some(911),
        shared_source: Some("smaps".into()),
        incomplete: Some("pjwd was restarted".into()),
        ..report()
    };
    let text = report_text(&more, &names(), TERMINAL);
    for line in [
        "  verdict     none: it ran for less than 10 s\n",
        "  serial      20.0 s with one thread alone\n",
        "  leaving     1 attempt to leave its cores, 2 repairs\n",
        "  memory      3 MiB at most\n",
        "  shared      91.1% of its memory, as last read\n",
        "  incomplete  pjwd was restarted\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let read = Report { memory_peak_source: Some("smaps".into()), ..more.clone() };
    let text = report_text(&read, &names(), TERMINAL);
    assert!(text.contains("  memory      3 MiB in the largest reading of its pages (PSS)\n"), "{text}");
    let estimated = Report { shared_source: Some("cgroup".into()), ..more };
    let text = report_text(&estimated, &names(), TERMINAL);
    assert!(
        text.contains("  shared      about 91.1% of its anonymous memory, as last estimated\n"),
        "{text}"
    );
}

#[test]
fn a_report_tells_the_use_over_time_the_serial_phases_and_how_memory_was_measured() {
    let more = Report { serial_s: Thousandths(20_000), memory_peak: Some(3 << 20), ..report() };
    let level = |cpus, seconds: u64| UseLevel { cpus, seconds: Thousandths(seconds * 1000) };
    let over_time = Report {
        use_levels: vec![level(0, 20), level(1, 60), level(2, 1), level(4, 120)],
        threads_mean: Thousandths(3240),
        serial_phases: 2,
        serial_longest_s: Thousandths(12_000),
        ..more.clone()
    };
    let text = report_text(&over_time, &names(), TERMINAL);
    for line in [
        "  over time   0 CPUs for 20.0 s, 1 CPU for 60.0 s, 4 CPUs for 120 s\n",
        "  threads     3.2 wanted a core on average, 4 at most\n",
        "  serial      20.0 s with one thread alone, in 2 phases, the longest 12.0 s\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let limited = Report { memory_limit: Some(4 << 20), ..more.clone() };
    let text = report_text(&limited, &names(), TERMINAL);
    assert!(text.contains("  memory      3 MiB at most, of 4 MiB that its cgroup allows\n"), "{text}");
    let counted = Report { memory_peak_source: Some("rss".into()), ..more };
    let text = report_text(&counted, &names(), TERMINAL);
    assert!(text.contains("at most 3 MiB, with shared pages counted for each process (RSS)\n"), "{text}");
}

#[test]
fn reports_are_a_table_the_newest_first() {
    let now: Timestamp = "2026-05-04T12:03:00Z".parse().unwrap();
    let long = Report { id: "manual:a".into(), wall_s: Thousandths(7_260_000), verdict: None, ..report() };
    assert_eq!(
        reports_text(&[report(), long], &names(), now, TERMINAL),
        "job      owner cores used p95 cpu time  wall time ended verdict
slurm:7  alice    16  3.1 4.0    372 s      120 s   60s serial
manual:a alice    16  3.1 4.0    372 s 2 h 01 min   60s -
"
    );
    assert_eq!(reports_text(&[], &names(), now, TERMINAL), "no job has ended\n");
    let named = Report { id: format!("manual:{}", "n".repeat(128)), ..report() };
    let text = reports_text(&[named], &names(), now, TERMINAL);
    assert!(text.lines().all(|line| line.chars().count() <= TERMINAL.width), "{text}");
    assert_eq!(text.matches('n').count() - HEADINGS.concat().matches('n').count(), 128 + 1, "{text}");
}

#[test]
fn a_hook_prints_one_line() {
    assert_eq!(
        report_line(&report()),
        "pjw: slurm:7 serial, 372 s of CPU time in 120 s, 3.1 of 16 cores used. Of 16 cores 3.1 were used: ask for \
         `--cpus-per-task=4`.\n"
    );
    let fine = Report { verdict: None, advice: Vec::new(), cores: 1, ..report() };
    assert_eq!(report_line(&fine), "pjw: slurm:7 372 s of CPU time in 120 s, 3.1 of 1 core used\n");
}

/// A job that ran for 35 s, waited for a core for 15 s of them, and used 7.5 s of CPU time meanwhile.
fn report_after_wait() -> Report {
    Report {
        cpus: "0".into(),
        cores: 1,
        wall_s: Thousandths(35_000),
        cpu_s: Thousandths(22_500),
        without_cores_s: Thousandths(15_000),
        without_cores_cpu_s: Thousandths(7_500),
        cores_held_mean: Thousandths(1_000),
        cpus_held_mean: Thousandths(1_000),
        cores_used_mean: Thousandths(750),
        cores_used_p95: Thousandths(1_000),
        verdict: Some("fine".into()),
        advice: Vec::new(),
        ..report()
    }
}

#[test]
fn a_report_tells_the_time_without_a_core_apart() {
    let text = report_text(&report_after_wait(), &names(), TERMINAL);
    for line in [
        "slurm:7 of alice: 35.0 s, 20.0 s of it on 1 core (0)\n",
        "  no core     for 15.0 s\n",
        "  cpu time    15.0 s, 75 % of 20.0 s on 1 core, and 7.5 s without a core\n",
        "  cores used  0.8 on average, at most 1.0 for 95 % of the time\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(
        report_line(&report_after_wait()),
        "pjw: slurm:7 fine, 22.5 s of CPU time in 35.0 s, 15.0 s of it without a core, 0.8 of 1 core used\n"
    );
}

#[test]
fn a_report_of_a_job_that_never_held_a_core_has_no_use_of_cores() {
    let zero = Thousandths(0);
    let never = Report {
        cpus: String::new(),
        cores: 0,
        without_cores_s: Thousandths(35_000),
        without_cores_cpu_s: Thousandths(22_500),
        cores_held_mean: zero,
        cpus_held_mean: zero,
        cores_used_mean: zero,
        cores_used_p95: zero,
        verdict: None,
        ..report_after_wait()
    };
    let text = report_text(&never, &names(), TERMINAL);
    assert!(text.starts_with("slurm:7 of alice: 35.0 s without a core\n"), "{text}");
    assert!(text.contains("  cpu time    22.5 s without a core\n"), "{text}");
    assert!(!["cores used", "  no core", "waiting"].iter().any(|line| text.contains(line)), "{text}");
    assert_eq!(report_line(&never), "pjw: slurm:7 22.5 s of CPU time in 35.0 s without a core\n");
}
