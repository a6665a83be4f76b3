//! The store in a temporary directory: what a later daemon reads, and what a damaged or removed file leaves.

use std::process::Command;

use super::*;
use pjw_ipc::report::{Thousandths, UseLevel};

/// A stored report with every field. A daemon reads what an earlier one wrote, so the names in it stay.
const STORED: &str = include_str!("tests/report.jsonl");

fn report(id: &str) -> Report {
    Report { id: format!("manual:{id}"), ended: format!("at {id}"), ..Report::default() }
}

fn open(dir: &Path, keep: u32) -> ReportStore {
    let (store, remarks) = ReportStore::open(dir, keep);
    assert_eq!(remarks, Vec::<String>::new());
    store
}

/// The ids of the stored reports, the newest first.
fn ids(store: &ReportStore) -> Vec<String> {
    store.reports(None, None).iter().map(|report| report.id.replace("manual:", "")).collect()
}

fn lines(dir: &Path) -> usize {
    std::fs::read_to_string(dir.join(REPORTS_FILE_NAME)).unwrap().lines().count()
}

/// The report that [`STORED`] has as text. A new field does not compile.
fn full_report() -> Report {
    let text = |text: &str| text.to_owned();
    Report {
        id: text("slurm:7"),
        owner: 1000,
        cpus: text("2-3"),
        cores: 1,
        started: text("2026-01-02T03:04:05Z"),
        ended: text("2026-01-02T03:05:05Z"),
        wall_s: Thousandths(60_000),
        cpu_s: Thousandths(2002),
        waited_s: Thousandths(3003),
        without_cores_s: Thousandths(20_020),
        without_cores_cpu_s: Thousandths(21_021),
        cores_held_mean: Thousandths(4004),
        cpus_held_mean: Thousandths(5005),
        cores_used_mean: Thousandths(6006),
        cores_used_p95: Thousandths(7007),
        use_levels: vec![UseLevel { cpus: 8, seconds: Thousandths(9009) }],
        threads_max: 10,
        threads_mean: Thousandths(11_011),
        serial_s: Thousandths(12_012),
        serial_phases: 13,
        serial_longest_s: Thousandths(14_014),
        repairs: 15,
        violations: 16,
        memory_peak: Some(17),
        memory_peak_source: Some(text("cgroup")),
        memory_limit: Some(18),
        shared_permille: Some(19),
        shared_source: Some(text("smaps")),
        verdict: Some(text("fine")),
        no_verdict: Some(text("it was too short")),
        advice: vec![text("use fewer cores")],
        incomplete: Some(text("the journal was lost")),
    }
}

#[test]
fn reports_jsonl_with_every_field_is_read_and_written_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(REPORTS_FILE_NAME);
    std::fs::write(&path, STORED).unwrap();
    assert_eq!(open(dir.path(), 10).reports(None, None), [Arc::new(full_report())]);
    std::fs::remove_file(&path).unwrap();
    open(dir.path(), 10).add(full_report());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), STORED);
}

#[test]
fn reports_are_read_again_newest_first_by_job_and_by_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 10);
    ["a", "b", "c"].iter().for_each(|id| store.add(report(id)));
    store.add(Report { ended: "later".to_owned(), ..report("a") });
    drop(store);
    let store = open(dir.path(), 10);
    assert_eq!(ids(&store), ["a", "c", "b", "a"]);
    let of_a = store.reports(Some("manual:a"), Some(1));
    assert_eq!((of_a.len(), of_a[0].ended.as_str()), (1, "later"));
    assert_eq!(store.reports(None, Some(2)).len(), 2);
    assert_eq!(store.reports(Some("manual:x"), None), []);
}

#[test]
fn the_oldest_reports_are_dropped_by_number_and_by_size() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 2);
    ["a", "b", "c"].iter().for_each(|id| store.add(report(id)));
    assert_eq!(ids(&store), ["c", "b"]);
    drop(store);
    let mut store = open(dir.path(), 2);
    assert_eq!(ids(&store), ["c", "b"], "also if the file has more");
    store.set_max_reports(1);
    assert_eq!((ids(&store), lines(dir.path())), (vec!["c".to_owned()], 1));
    store.set_max_reports(0);
    store.add(report("d"));
    assert_eq!((ids(&store), lines(dir.path())), (Vec::new(), 0));
    store.set_max_reports(10_000);
    let large = "x".repeat(2000);
    for number in 0..2000 {
        store.add(Report { advice: vec![large.clone()], ..report(&number.to_string()) });
    }
    let size = std::fs::metadata(dir.path().join(REPORTS_FILE_NAME)).unwrap().len();
    assert!((MAX_KEPT_BYTES / 2..=MAX_FILE_BYTES).contains(&size), "{size}");
    assert_eq!(ids(&store)[0], "1999");
    let kept = ids(&store);
    drop(store);
    assert_eq!(ids(&open(dir.path(), 10_000))[..kept.len()], kept[..]);
}

#[test]
fn as_many_full_reports_are_kept_as_the_default_of_report_keep_says() {
    let dir = tempfile::tempdir().unwrap();
    let keep = crate::config::Settings::default().report_keep;
    let mut store = open(dir.path(), keep);
    let level = UseLevel { cpus: 1000, seconds: Thousandths(100_000_000) };
    for number in 0..keep {
        let id = format!("slurm:{number:07}");
        let advice = vec!["of 16 cores 3.1 were used: ask for --cpus-per-task=4 in the job".to_owned(); 4];
        store.add(Report { id, use_levels: vec![level; 20], advice, ..full_report() });
    }
    drop(store);
    assert_eq!(open(dir.path(), keep).reports(None, None).len(), keep as usize);
}

#[test]
fn lines_that_are_no_reports_are_skipped_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 10);
    store.add(report("a"));
    drop(store);
    let path = dir.path().join(REPORTS_FILE_NAME);
    let good = std::fs::read_to_string(&path).unwrap();
    let other = good.replace("manual:a", "manual:b");
    std::fs::write(&path, format!("garbage\n{good}{{\"id\":7}}\n\u{0}\u{0}\n{other}{{\"id\":\"torn"))
        .unwrap();
    let (store, remarks) = ReportStore::open(dir.path(), 10);
    assert_eq!(ids(&store), ["b", "a"]);
    assert_eq!(remarks.len(), 1);
    assert!(
        remarks[0].starts_with("lines 1, 3, 4, 6 of ") && remarks[0].contains("were skipped"),
        "{remarks:?}"
    );
    drop(store);
    assert_eq!(ids(&open(dir.path(), 10)), ["b", "a"], "the file was written again without them");
}

#[test]
fn a_report_that_a_killed_daemon_has_left_twice_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 10);
    ["a", "b"].iter().for_each(|id| store.add(report(id)));
    drop(store);
    let path = dir.path().join(REPORTS_FILE_NAME);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.repeat(2)).unwrap();
    assert_eq!(ids(&open(dir.path(), 10)), ["b", "a"]);
}

#[test]
fn of_two_reports_on_one_run_of_a_job_the_complete_one_is_kept() {
    let incomplete = |ended: &str| Report {
        ended: ended.to_owned(),
        incomplete: Some("the job ended while pjwd was not running".to_owned()),
        ..report("a")
    };
    let complete = report("a");
    for (stored, kept) in [
        ([complete.clone(), incomplete("later")], &complete),
        ([incomplete("later"), complete.clone()], &complete),
        ([incomplete("first"), incomplete("later")], &incomplete("first")),
        ([complete.clone(), complete.clone()], &complete),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut store = open(dir.path(), 10);
        store.add(report("b"));
        stored.into_iter().for_each(|report| store.add(report));
        let of_a = |store: &ReportStore| store.reports(Some("manual:a"), None);
        assert_eq!(of_a(&store), [Arc::new(kept.clone())]);
        drop(store);
        let store = open(dir.path(), 10);
        assert_eq!((of_a(&store), ids(&store).len()), (vec![Arc::new(kept.clone())], 2));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 10);
    store.add(incomplete("first"));
    store.add(Report { started: "another time".to_owned(), ..incomplete("later") });
    assert_eq!(ids(&store), ["a", "a"], "another run of a job with the same id");
}

#[test]
fn a_removed_report_is_gone_from_the_file_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 10);
    ["a", "b"].iter().for_each(|id| store.add(report(id)));
    store.remove(|report| report.id == "manual:a");
    assert_eq!((ids(&store), lines(dir.path())), (vec!["b".to_owned()], 1));
    store.remove(|_| false);
    assert_eq!(ids(&open(dir.path(), 10)), ["b"]);
}

#[test]
fn a_removed_file_or_directory_is_made_again_with_all_reports() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("state");
    std::fs::create_dir(&dir).unwrap();
    let mut store = open(&dir, 10);
    store.add(report("a"));
    std::fs::remove_file(dir.join(REPORTS_FILE_NAME)).unwrap();
    store.add(report("b"));
    assert_eq!(ids(&open(&dir, 10)), ["b", "a"]);
    std::fs::rename(&dir, above.path().join("elsewhere")).unwrap();
    store.restore_removed_file();
    assert_eq!(ids(&open(&dir, 10)), ["b", "a"]);
}

#[test]
fn a_store_that_cannot_be_opened_keeps_reports_in_memory_and_a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    std::os::unix::fs::symlink(&precious, dir.path().join(REPORTS_FILE_NAME)).unwrap();
    let (store, remarks) = ReportStore::open(dir.path(), 10);
    assert!(remarks[0].contains("symbolic link; reports of jobs are kept in memory only"), "{remarks:?}");
    assert_eq!(ids(&store), Vec::<String>::new());
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
}

/// Writes over the oldest reports as the store does on a full disk.
#[test]
fn without_space_the_newest_reports_are_written_over_the_oldest() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 100);
    (10..20).for_each(|number| store.add(report(&number.to_string())));
    let before = store.length;
    let line = before / 10;
    assert!(store.keep_report(report("20"), line));
    store.shrink();
    assert!(store.length <= before, "{} {before}", store.length);
    let size = std::fs::metadata(dir.path().join(REPORTS_FILE_NAME)).unwrap().len();
    assert_eq!(size, before, "the file keeps its space");
    assert_eq!((ids(&store)[0].as_str(), ids(&store).len()), ("20", 10), "the oldest one gave its place");
    drop(store);
    let store = open(dir.path(), 100);
    assert_eq!((ids(&store)[0].as_str(), ids(&store).len()), ("20", 10));
}

/// Makes the file again as the store does on a full disk: the rewrite has no space.
#[test]
fn reports_stay_in_memory_if_their_file_was_removed_and_there_is_no_space_for_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 100);
    ["a", "b"].iter().for_each(|id| store.add(report(id)));
    std::fs::remove_file(dir.path().join(REPORTS_FILE_NAME)).unwrap();
    // The rewrite fails: it can't replace this directory by its file.
    std::fs::create_dir(dir.path().join("reports.jsonl.new")).unwrap();
    store.restore_removed_file();
    assert_eq!((ids(&store), store.length), (vec!["b".to_owned(), "a".to_owned()], 0));
    store.add(report("c"));
    assert_eq!(ids(&store), ["c", "b", "a"]);
    assert_eq!(ids(&open(dir.path(), 100)), ["c"]);
}

#[test]
fn empty_lines_after_the_reports_are_room_for_the_next_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path(), 100);
    ["a", "b", "c", "d"].iter().for_each(|id| store.add(report(id)));
    let size = store.length;
    store.drop_oldest(size / 2);
    store.shrink();
    drop(store);
    let mut store = open(dir.path(), 100);
    assert_eq!((ids(&store), store.length), (vec!["d".to_owned(), "c".to_owned()], size / 2));
    store.add(report("e"));
    drop(store);
    assert_eq!(std::fs::metadata(dir.path().join(REPORTS_FILE_NAME)).unwrap().len(), size);
    assert_eq!(ids(&open(dir.path(), 100)), ["e", "d", "c"]);
}

/// The directory with a small file system of its own, in the process that runs the test on a full disk.
const SMALL_FILE_SYSTEM: &str = "PJWTEST_SMALL_FILE_SYSTEM";
/// The exit code of the shell that can't mount the small file system.
const NOT_MOUNTED: i32 = 77;

/// A file system of 64 KiB is filled by another program as soon as there is space. It is mounted for a process of its
/// own, in which this test runs once more.
#[test]
fn on_a_full_disk_reports_are_dropped_only_when_the_space_of_the_file_is_used_up() {
    if let Some(dir) = std::env::var_os(SMALL_FILE_SYSTEM) {
        return add_reports_on_full_disk(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let can_mount = Command::new("unshare").args(["--mount", "--propagation", "private", "true"]).status();
    if !can_mount.is_ok_and(|status| status.success()) {
        println!("skipped: this user can't have a mount namespace of its own");
        return;
    }
    let script = format!("mount -t tmpfs -o size=64k none \"$0\" || exit {NOT_MOUNTED}; exec \"$@\"");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .arg("on_a_full_disk_reports_are_dropped_only_when_the_space_of_the_file_is_used_up")
        .env(SMALL_FILE_SYSTEM, dir.path())
        .output();
    match output {
        Err(error) => println!("skipped: unshare: {error}"),
        Ok(output) if output.status.code() == Some(NOT_MOUNTED) => {
            println!("skipped: no file system can be mounted: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output) => {
            let has_run = String::from_utf8_lossy(&output.stdout).contains("1 passed");
            assert!(output.status.success() && has_run, "{output:?}");
        }
    }
}

fn add_reports_on_full_disk(dir: &Path) {
    let filler = dir.join("filler");
    let fill = || {
        let mut filler = OpenOptions::new().create(true).append(true).open(&filler).unwrap();
        while filler.write_all(&[7; 512]).is_ok() {}
    };
    let mut store = open(dir, 10_000);
    (100..180).for_each(|number| store.add(report(&number.to_string())));
    assert!(!store.is_short_of_space);
    fill();
    let (mut drops, mut before) = (0, ids(&store).len());
    for number in 200..300 {
        store.add(report(&number.to_string()));
        fill();
        let now = ids(&store).len();
        assert!(now > 30 && ids(&store)[0] == number.to_string(), "{now} reports");
        drops += usize::from(now < before);
        before = now;
    }
    assert!((1..=4).contains(&drops), "the oldest reports were dropped {drops} times");
    assert!(store.is_short_of_space, "the message is not repeated");
    let kept = ids(&store);
    drop(store);
    let mut store = open(dir, 10_000);
    assert_eq!(ids(&store), kept);
    store.is_short_of_space = true;
    std::fs::remove_file(&filler).unwrap();
    store.set_max_reports(10);
    assert!(!store.is_short_of_space, "the whole file was written again");
}
