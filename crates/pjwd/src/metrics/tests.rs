//! The metrics text for snapshots that the tests make.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_core::event::{Event, EventKind};
use pjw_core::state::WardenState;
use pjw_core::testing::regular_topology;
use pjw_core::time::UnixMillis;
use pjw_ipc::wire;
use pjw_linux::sys::own_usage::ResourceUsage;

use super::counters::CycleCause;
use super::facts::MetricValues;
use super::family::MetricKind;
use super::meter::{MetricsRecorder, MetricsSnapshot};
use super::table::METRIC_FAMILIES;
use super::text::{MetricsFormat, metrics_text};
use crate::config::Settings;
use crate::view::counts::CpuDemand;
use crate::view::status::StatusSnapshot;
use crate::warden::{CycleReport, OngoingFailures};

/// A job that holds `cpus`, with a start time of `since` seconds.
fn job(id: &str, cpus: &str, since: u32) -> wire::Job {
    wire::Job {
        id: id.to_owned(),
        state: "running".to_owned(),
        enforcement: "affinity".to_owned(),
        cpus: cpus.to_owned(),
        requested_cores: 1,
        threads: 4,
        hot: 3,
        since: format!("2026-01-01T00:00:{since:02}.000Z"),
        ..wire::Job::default()
    }
}

/// Four cores of two PUs each: 0 and 4, 1 and 5, …. PU 7 is offline.
fn snapshot(jobs: Vec<wire::Job>) -> MetricsSnapshot {
    let core = |number: u32| wire::Core { cpus: format!("{number},{}", number + 4), ..wire::Core::default() };
    let job_demands =
        jobs.iter().map(|_| CpuDemand { total_permille: 2750, waiting_permille: 500 }).collect();
    let pool = wire::Pool {
        housekeeping: "0,4".into(),
        free: "3".into(),
        allocated: "1-2,5-7".into(),
        ..Default::default()
    };
    let status = wire::Status {
        version: "1.2.3".into(),
        mode: "enforce".into(),
        discovery: "netlink".into(),
        pool,
        jobs,
        cores: (0..4).map(core).collect(),
        ..wire::Status::default()
    };
    let published = StatusSnapshot { status: Arc::new(status.into()), job_demands, unassigned_processes: 3 };
    let (started_at, published_at) = (UnixMillis(1_700_000_000_005), UnixMillis(1_700_000_060_120));
    MetricsSnapshot {
        published,
        offline_pus: "7".parse().unwrap(),
        started_at,
        published_at,
        ..MetricsSnapshot::default()
    }
}

fn text(snapshot: &MetricsSnapshot, max_jobs: usize, format: MetricsFormat) -> String {
    let own = ResourceUsage { cpu_time: Duration::from_millis(1500), resident_bytes: 4096 };
    metrics_text(&MetricValues::new(snapshot, own, max_jobs), format)
}

fn classic(snapshot: &MetricsSnapshot, max_jobs: usize) -> Vec<String> {
    text(snapshot, max_jobs, MetricsFormat::Classic).lines().map(ToOwned::to_owned).collect()
}

fn has(lines: &[String], line: &str) {
    assert!(lines.iter().any(|known| known == line), "{line} is not in\n{}", lines.join("\n"));
}

#[test]
fn the_table_follows_the_naming_rules() {
    let names: BTreeSet<&str> = METRIC_FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), METRIC_FAMILIES.len(), "a name stands twice");
    for family in METRIC_FAMILIES {
        let name = family.name;
        let plain = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        };
        assert!(name.starts_with("pjw_") && plain(name), "{name}");
        assert!(
            family.label_names.iter().all(|label| plain(label) && !["le", "job", "instance"].contains(label)),
            "{name}"
        );
        assert_eq!(name.ends_with("_total"), family.kind == MetricKind::Counter, "{name}");
        assert!(!["_count", "_sum", "_bucket"].iter().any(|end| name.ends_with(end)), "{name}");
        let help = family.help;
        assert!(help.ends_with('.') && !help.contains(['"', '\\', '\n', '|']), "{name}: {help}");
    }
}

#[test]
fn every_metric_has_help_and_type_before_its_samples() {
    let lines = classic(&snapshot(vec![job("manual:a", "1,5", 0)]), 9);
    let mut family = "";
    let mut described = Vec::new();
    for line in &lines {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split(' ').next().unwrap();
            described.push(family);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            assert!(kind.starts_with(&format!("{family} ")), "{line}");
        } else {
            assert!(line.starts_with(family), "{line} does not belong to {family}");
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
        }
    }
    assert_eq!(described, METRIC_FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>());
}

#[test]
fn samples_have_the_right_names_and_labels() {
    let lines = classic(&snapshot(vec![job("manual:a", "1,5", 0), job("slurm:7", "2,6-7", 1)]), 9);
    for line in [
        "# TYPE pjw_cycles_total counter",
        "pjw_build_info{version=\"1.2.3\"} 1",
        "pjw_daemon_info{mode=\"enforce\",discovery=\"netlink\"} 1",
        "pjw_process_start_time_seconds 1700000000.005",
        "pjw_last_cycle_timestamp_seconds 1700000060.120",
        "pjw_process_cpu_seconds_total 1.5",
        "pjw_process_resident_memory_bytes 4096",
        "pjw_cycles_total{cause=\"event\"} 0",
        "pjw_actions_total{kind=\"keep-off\",outcome=\"refused\"} 0",
        "pjw_wall_actions_total{kind=\"raze\",outcome=\"gone\"} 0",
        "pjw_stray_processes 3",
        "pjw_jobs{state=\"running\"} 2",
        "pjw_jobs{state=\"waiting\"} 0",
        "pjw_jobs_kept{by=\"affinity\"} 2",
        "pjw_jobs_folded 0",
        "pjw_job_cores{jobid=\"manual:a\"} 1",
        "pjw_job_pus{jobid=\"manual:a\"} 2",
        "pjw_job_cores{jobid=\"slurm:7\"} 2",
        "pjw_job_hot_threads{jobid=\"slurm:7\"} 3",
        "pjw_job_running_pus{jobid=\"slurm:7\"} 2.250",
        "pjw_job_waiting_pus{jobid=\"slurm:7\"} 0.500",
    ] {
        has(&lines, line);
    }
}

#[test]
fn every_pu_is_counted_once() {
    let lines = classic(&snapshot(Vec::new()), 9);
    for (by, end_cycle) in [("free", 1), ("allocated", 4), ("housekeeping", 2), ("offline", 1)] {
        has(&lines, &format!("pjw_pool_pus{{use=\"{by}\"}} {end_cycle}"));
    }
}

#[test]
fn histogram_buckets_are_cumulative() {
    let mut snapshot = snapshot(Vec::new());
    for micros in [100, 300, 400, 2_000, 9_000_000] {
        snapshot.counters.cycle_times.add(Duration::from_micros(micros));
    }
    let lines = classic(&snapshot, 9);
    for (bound, end_cycle) in
        [("0.00025", 1), ("0.0005", 3), ("0.001", 3), ("0.0025", 4), ("5.0", 4), ("+Inf", 5)]
    {
        has(&lines, &format!("pjw_cycle_duration_seconds_bucket{{le=\"{bound}\"}} {end_cycle}"));
    }
    has(&lines, "pjw_cycle_duration_seconds_count 5");
    has(&lines, "pjw_cycle_duration_seconds_sum 9.0028");
}

#[test]
fn jobs_beyond_the_limit_are_summed() {
    let jobs = vec![job("manual:a", "1", 9), job("manual:b", "2", 1), job("manual:c", "5", 5)];
    let named = |max_jobs| -> Vec<String> {
        let lines = classic(&snapshot(jobs.clone()), max_jobs);
        let of_jobs = lines.iter().filter_map(|line| line.strip_prefix("pjw_job_threads{jobid="));
        let mut all: Vec<String> = of_jobs.map(ToOwned::to_owned).collect();
        let folded = lines.iter().find(|line| line.starts_with("pjw_jobs_folded")).unwrap();
        all.push(folded.clone());
        all
    };
    assert_eq!(named(3), ["\"manual:a\"} 4", "\"manual:b\"} 4", "\"manual:c\"} 4", "pjw_jobs_folded 0"]);
    assert_eq!(
        named(1),
        ["\"manual:b\"} 4", "\"other\"} 8", "pjw_jobs_folded 2"],
        "the one that is known longest keeps its name"
    );
    assert_eq!(named(0), ["\"other\"} 12", "pjw_jobs_folded 3"]);
    let lines = classic(&snapshot(jobs.clone()), 1);
    has(&lines, "pjw_job_running_pus{jobid=\"other\"} 4.500");
    has(&lines, "pjw_jobs{state=\"running\"} 3");
}

#[test]
fn names_are_escaped() {
    let lines = classic(&snapshot(vec![job("manual:a\"} 1\npjw_evil 1\\", "1", 0)]), 9);
    has(&lines, "pjw_job_pus{jobid=\"manual:a\\\"} 1\\npjw_evil 1\\\\\"} 1");
    assert!(!lines.iter().any(|line| line.starts_with("pjw_evil")));
}

#[test]
fn warnings_are_counted_by_code() {
    let mut snapshot = snapshot(Vec::new());
    let warning = |code: &str| wire::Warning { code: code.to_owned(), ..wire::Warning::default() };
    let warnings = vec![warning("stray"), warning("overlap"), warning("stray")];
    let status = wire::Status { warnings, ..(*snapshot.published.status.to_wire()).clone() };
    snapshot.published.status = Arc::new(status.into());
    let lines = classic(&snapshot, 9);
    has(&lines, "pjw_warnings{code=\"stray\"} 2");
    has(&lines, "pjw_warnings{code=\"overlap\"} 1");
}

#[test]
fn openmetrics_has_the_same_samples_and_an_end_marker() {
    let snapshot = snapshot(vec![job("manual:a", "1", 0)]);
    let open = text(&snapshot, 9, MetricsFormat::OpenMetrics);
    let samples = |text: &str| -> Vec<String> {
        text.lines().filter(|line| !line.starts_with('#')).map(ToOwned::to_owned).collect()
    };
    assert_eq!(samples(&open), samples(&text(&snapshot, 9, MetricsFormat::Classic)));
    assert!(open.contains("# TYPE pjw_cycles counter\npjw_cycles_total{"), "{open}");
    assert!(open.ends_with("\n# EOF\n"));
    assert!(!text(&snapshot, 9, MetricsFormat::Classic).contains("# EOF"));
}

fn machine() -> WardenState {
    WardenState::new(regular_topology(1, 1, 1, 2, 1), &CpuSet::new())
}

fn listening() -> Settings {
    let mut settings = Settings::default();
    settings.metrics.listen_addresses = vec!["127.0.0.1:1".parse().unwrap()];
    settings
}

fn cycle(meter: &mut MetricsRecorder, cause: CycleCause, scheduled: Option<Instant>) {
    let running = meter.begin_cycle(cause, scheduled);
    let events = vec![Event::new(EventKind::Violation, "x")];
    meter.end_cycle(running, &CycleReport { events, ..CycleReport::default() }, &OngoingFailures::default());
    meter.publish(StatusSnapshot::default(), &machine());
}

#[test]
fn switched_off_metrics_count_and_publish_nothing() {
    let (mut meter, receiver) = MetricsRecorder::new(&Settings::default());
    meter.count_process_events(5, true);
    cycle(&mut meter, CycleCause::Event, None);
    assert!(receiver.snapshot.borrow().is_none());
    meter.apply_settings(&listening());
    assert!(receiver.snapshot.borrow().is_none(), "until a cycle has run");
    cycle(&mut meter, CycleCause::Event, None);
    let counters = receiver.snapshot.borrow().as_ref().unwrap().counters.clone();
    assert_eq!((counters.cycles, counters.process_events, counters.mask_violations), ([1, 0, 0], 0, 1));
    meter.apply_settings(&Settings::default());
    assert!(receiver.snapshot.borrow().is_none(), "what grows no newer is not told");
}

#[test]
fn a_cycle_counts_for_the_cause_with_the_largest_scan() {
    let (mut meter, receiver) = MetricsRecorder::new(&listening());
    let now = Instant::now();
    meter.count_process_events(3, true);
    cycle(&mut meter, CycleCause::Event, None);
    cycle(&mut meter, CycleCause::Full, Some(now));
    cycle(&mut meter, CycleCause::Timer, now.checked_sub(Duration::from_secs(2)));
    cycle(&mut meter, CycleCause::Event, None);
    meter.count_journal_rewrite_failure();
    meter.publish(StatusSnapshot::default(), &machine());
    let counters = receiver.snapshot.borrow().as_ref().unwrap().counters.clone();
    assert_eq!((counters.cycles, counters.process_events, counters.event_overruns), ([2, 1, 1], 3, 1));
    assert_eq!(counters.journal_failures, 1);
    assert!(
        counters.scan_lateness >= Duration::from_secs(2),
        "the last timed look was late, whatever came after it"
    );
}

#[test]
fn a_reload_without_changes_sends_no_settings() {
    let (mut meter, mut receiver) = MetricsRecorder::new(&listening());
    receiver.settings.borrow_and_update();
    meter.apply_settings(&Settings { share_smt: true, ..listening() });
    assert!(!receiver.settings.has_changed().unwrap());
    meter.apply_settings(&Settings::default());
    assert!(receiver.settings.has_changed().unwrap());
}
