//! The journal in a temporary directory: what a later daemon recovers.

mod stored_format;

use std::io::Read;

use super::*;
use pjw_core::ids::Uid;
use pjw_core::job::{EndCondition, Job, JobId, JobRequest};
use pjw_core::time::UnixMillis;
use pjw_core::within_job::NumaNodeRule;

fn ended(name: &str) -> Record {
    Record::Ended(name.parse::<JobId>().unwrap())
}

fn reopen(dir: &Path) -> (FileJournal, RecoveredJournal) {
    FileJournal::open(dir, "boot").unwrap()
}

#[test]
fn complete_lines_of_another_format_are_saved_and_an_incomplete_line_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = reopen(dir.path());
    journal.append(&[ended("a")]).unwrap();
    drop(journal);
    let aside = dir.path().join("journal.jsonl.unreadable");
    for (rest, kept) in [
        ("{\"boo", false),
        ("{\"boot_id\":\"boot\",\"num", false),
        ("{\"form\":\"of another version\"}\n{\"torn", true),
        ("garbage without an end of line", true),
        ("\0\0\0\0", true),
    ] {
        let mut lines = OpenOptions::new().append(true).open(dir.path().join("journal.jsonl")).unwrap();
        lines.write_all(rest.as_bytes()).unwrap();
        drop(lines);
        let (_, recovered) = reopen(dir.path());
        assert_eq!((recovered.records, recovered.has_lost_records), (vec![ended("a")], kept));
        assert_eq!(std::fs::read_to_string(&aside).is_ok_and(|text| text == rest), kept);
    }
}

#[test]
fn appended_records_are_recovered_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, found) = reopen(dir.path());
    assert!(found.records.is_empty() && found.remarks.is_empty());
    journal.append(&[ended("a"), ended("b")]).unwrap();
    journal.append(&[ended("c")]).unwrap();
    drop(journal);
    assert_eq!(reopen(dir.path()).1.records, [ended("a"), ended("b"), ended("c")]);
}

#[test]
fn the_reason_of_a_fault_is_printed_once() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("journal.jsonl")).unwrap();
    let fault = FileJournal::open(dir.path(), "boot").unwrap_err();
    let text = crate::error_text::error_chain_text(&fault);
    assert_eq!(text.matches("directory (os error").count(), 1, "{text}");
}

#[test]
fn a_journal_that_a_daemon_uses_can_not_be_locked_and_one_that_is_missing_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    assert!(lock_existing_journal(dir.path()).unwrap().is_none());
    assert!(!dir.path().join(LINES).exists());
    let (mut journal, _) = reopen(dir.path());
    journal.replace_jsonl().unwrap();
    assert!(lock_existing_journal(dir.path()).unwrap_err().is_in_use());
    drop(journal);
    assert!(lock_existing_journal(dir.path()).unwrap().is_some());
}

#[test]
fn a_state_directory_that_vanished_before_the_journal_is_opened_is_made_again() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("deep/state");
    let (mut journal, found) = reopen(&dir);
    assert!(!found.is_found && !found.has_lost_records && found.remarks.is_empty());
    journal.append(&[ended("a")]).unwrap();
    drop(journal);
    assert_eq!(reopen(&dir).1.records, [ended("a")]);
}

#[test]
fn reserved_space_holds_no_records() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = reopen(dir.path());
    if !journal.reserve(10_000) {
        return println!("skipped: this file system can't reserve space");
    }
    journal.append(&[ended("a")]).unwrap();
    journal.rewrite(&[ended("a")]).unwrap();
    assert!(journal.reserve(10_000), "a rewrite gives the space back");
    journal.append(&[ended("b")]).unwrap();
    drop(journal);
    let (_, recovered) = reopen(dir.path());
    assert_eq!((recovered.records, recovered.remarks.len()), (vec![ended("a"), ended("b")], 0));
}

#[test]
fn a_rewrite_replaces_only_earlier_records() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = reopen(dir.path());
    journal.append(&[ended("old")]).unwrap();
    journal.rewrite(&[ended("kept")]).unwrap();
    journal.append(&[ended("new")]).unwrap();
    drop(journal);
    assert_eq!(reopen(dir.path()).1.records, [ended("kept"), ended("new")]);
}

#[test]
fn a_daemon_that_ends_within_a_rewrite_leaves_a_complete_journal() {
    let dir = tempfile::tempdir().unwrap();
    let lines = dir.path().join("journal.jsonl");
    let (mut journal, mut found) = reopen(dir.path());
    journal.write_recovered_records(&mut found).unwrap();
    journal.append(&[ended("old")]).unwrap();
    let mut before = File::open(&lines).unwrap();
    journal.rewrite(&[ended("kept")]).unwrap();
    assert!(!is_file_at_path(&lines, &before), "the file is replaced, and never empty");
    drop(journal);
    // Killed between the two renames: the old batches are still there and must not count again.
    let mut text = Vec::new();
    before.read_to_end(&mut text).unwrap();
    std::fs::write(&lines, text).unwrap();
    let (mut journal, found) = reopen(dir.path());
    assert_eq!((found.records, found.has_lost_records), (vec![ended("kept")], false));
    // The second file can't be written.
    let blocked = dir.path().join("journal.jsonl.new");
    std::fs::create_dir(&blocked).unwrap();
    assert!(journal.rewrite(&[ended("later")]).unwrap_err().to_string().contains("can't shorten"));
    journal.append(&[ended("new")]).unwrap();
    drop(journal);
    let (mut journal, found) = reopen(dir.path());
    assert_eq!((found.records, found.has_lost_records), (vec![ended("later"), ended("new")], false));
    std::fs::remove_dir(blocked).unwrap();
    journal.rewrite(&[ended("last")]).unwrap();
    drop(journal);
    let (_, found) = reopen(dir.path());
    assert_eq!((found.records, found.has_lost_records), (vec![ended("last")], false));
}

/// The journal of a daemon with records in both files, which was killed.
fn with_records_in_both_files(dir: &Path) {
    let (mut journal, mut found) = reopen(dir);
    journal.write_recovered_records(&mut found).unwrap();
    journal.append(&[ended("a")]).unwrap();
    journal.rewrite(&[ended("a")]).unwrap();
    journal.append(&[ended("b")]).unwrap();
}

#[test]
fn a_removed_or_emptied_file_is_a_loss_of_records_that_stays_in_the_journal() {
    for (name, is_removed) in
        [("state.json", true), ("state.json", false), ("journal.jsonl", true), ("journal.jsonl", false)]
    {
        let dir = tempfile::tempdir().unwrap();
        with_records_in_both_files(dir.path());
        assert!(!reopen(dir.path()).1.has_lost_records);
        let path = dir.path().join(name);
        if is_removed {
            std::fs::remove_file(path).unwrap();
        } else {
            std::fs::write(path, "").unwrap();
        }
        let (mut journal, mut found) = reopen(dir.path());
        assert!(found.has_lost_records && found.is_found, "{name}: {found:?}");
        journal.write_recovered_records(&mut found).unwrap();
        drop(journal);
        let (_, found) = reopen(dir.path());
        let lost = Record::UnknownMasks(UnknownMaskRecord::RecordsLost);
        assert!(!found.has_lost_records && found.records.contains(&lost), "{name}: {found:?}");
    }
}

#[test]
fn a_loss_stays_in_the_journal_if_the_daemon_ends_before_it_has_written_the_state() {
    let dir = tempfile::tempdir().unwrap();
    with_records_in_both_files(dir.path());
    let mut lines = OpenOptions::new().append(true).open(dir.path().join("journal.jsonl")).unwrap();
    lines.write_all(b"garbage\n").unwrap();
    drop(lines);
    // In place of the file that `begin` writes first.
    std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
    let (mut journal, mut found) = reopen(dir.path());
    assert!(journal.write_recovered_records(&mut found).is_err());
    drop(journal);
    let lost = Record::UnknownMasks(UnknownMaskRecord::RecordsLost);
    let (_, found) = reopen(dir.path());
    assert!(!found.has_lost_records && found.records.contains(&lost), "{found:?}");
}

#[test]
fn an_emptied_journal_of_a_daemon_that_never_rewrote_it_is_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, mut found) = reopen(dir.path());
    assert!(!found.is_found);
    journal.write_recovered_records(&mut found).unwrap();
    journal.append(&[ended("a")]).unwrap();
    drop(journal);
    std::fs::write(dir.path().join("journal.jsonl"), "").unwrap();
    assert!(reopen(dir.path()).1.has_lost_records);
}

#[test]
fn records_are_told_without_a_lock_and_without_a_change() {
    let dir = tempfile::tempdir().unwrap();
    assert!(!has_records(dir.path(), "boot"), "there is no file");
    let (mut journal, mut found) = reopen(dir.path());
    journal.write_recovered_records(&mut found).unwrap();
    assert!(!has_records(dir.path(), "boot"), "the daemon holds no job");
    journal.append(&[ended("a")]).unwrap();
    assert!(has_records(dir.path(), "boot") && !has_records(dir.path(), "next boot"));
    journal.rewrite(&[ended("a")]).unwrap();
    assert!(has_records(dir.path(), "boot"));
    journal.rewrite(&[]).unwrap();
    assert!(!has_records(dir.path(), "boot"));
    for name in JOURNAL_FILE_NAMES {
        let path = dir.path().join(name);
        let text = std::fs::read(&path).unwrap();
        for damaged in ["", "garbage\n"] {
            std::fs::write(&path, damaged).unwrap();
            assert!(has_records(dir.path(), "boot"), "{name}: {damaged:?}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
        }
        std::fs::write(&path, text).unwrap();
    }
}

#[test]
fn the_files_of_an_earlier_version_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let state = "{\"schema\":1,\"boot_id\":\"boot\",\"last\":3,\"records\":[{\"ended\":\"manual:a\"}]}";
    std::fs::write(dir.path().join("state.json"), state).unwrap();
    for lines in ["", "{\"boot_id\":\"boot\",\"number\":4,\"records\":[{\"ended\":\"manual:b\"}]}\n"] {
        std::fs::write(dir.path().join("journal.jsonl"), lines).unwrap();
        let (_, found) = reopen(dir.path());
        assert!(!found.has_lost_records && found.remarks.is_empty(), "{found:?}");
        assert_eq!(found.records.len(), 1 + lines.lines().count());
    }
}

#[test]
fn an_incomplete_last_line_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = reopen(dir.path());
    journal.append(&[ended("a")]).unwrap();
    drop(journal);
    let path = dir.path().join("journal.jsonl");
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"{\"boot_id\":\"boot\",\"numb").unwrap();
    let (mut journal, found) = reopen(dir.path());
    assert_eq!((found.records.len(), found.remarks.len()), (1, 1));
    journal.append(&[ended("b")]).unwrap();
    drop(journal);
    assert_eq!(reopen(dir.path()).1.records, [ended("a"), ended("b")]);
}

#[test]
fn records_of_another_boot_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = reopen(dir.path());
    journal.append(&[ended("a")]).unwrap();
    journal.rewrite(&[ended("a")]).unwrap();
    journal.append(&[ended("b")]).unwrap();
    drop(journal);
    let (_, found) = FileJournal::open(dir.path(), "next boot").unwrap();
    assert!(found.records.is_empty() && found.remarks.is_empty());
}

#[test]
fn an_unreadable_state_file_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    for (text, word) in [
        ("not json", "understood"),
        ("{\"schema\":99,\"boot_id\":\"boot\",\"last\":0,\"records\":[]}", "schema 99"),
    ] {
        std::fs::write(dir.path().join("state.json"), text).unwrap();
        let (_, found) = reopen(dir.path());
        assert!(found.remarks[0].contains(word), "{:?}", found.remarks);
        assert!(dir.path().join("state.json.unreadable").exists());
    }
}

#[test]
fn a_second_daemon_on_the_same_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _first = reopen(dir.path());
    let error = FileJournal::open(dir.path(), "boot").unwrap_err().to_string();
    let expected = format!("in use by process {}; another pjwd keeps its state there", std::process::id());
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_pipe_in_place_of_the_state_directory_does_not_block_a_daemon_that_is_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("state");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (sender, result) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send((mark_as_stopping(&pipe).is_ok(), is_stopping(&pipe, 1))));
    assert_eq!(result.recv_timeout(std::time::Duration::from_secs(10)), Ok((false, false)));
}

#[test]
fn a_daemon_that_is_stopping_does_not_count_as_one_that_runs_on() {
    let dir = tempfile::tempdir().unwrap();
    let (_journal, own) = (reopen(dir.path()), std::process::id());
    assert!(!is_stopping(dir.path(), own));
    mark_as_stopping(dir.path()).unwrap();
    assert!(is_stopping(dir.path(), own) && !is_stopping(dir.path(), own + 1));
    assert_eq!(pid_of_running_pjwd(dir.path()), Some(own), "it still uses the journal");
}

#[test]
fn a_failed_rewrite_keeps_the_old_records() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
    let (mut journal, _) = reopen(dir.path());
    journal.append(&[ended("a")]).unwrap();
    let error = journal.rewrite(&[ended("b")]).unwrap_err().to_string();
    assert!(error.contains("state.json") && error.contains("check the directory"), "{error}");
    drop(journal);
    assert_eq!(reopen(dir.path()).1.records, [ended("a")]);
}

#[test]
fn removed_files_are_made_again_by_a_rewrite() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    std::fs::create_dir(&state_dir).unwrap();
    let (mut journal, _) = reopen(&state_dir);
    journal.append(&[ended("a")]).unwrap();
    journal.rewrite(&[ended("a")]).unwrap();
    let remove = |name: &str| std::fs::remove_file(state_dir.join(name)).unwrap();
    let removals: [&dyn Fn(); 3] = [&|| remove("journal.jsonl"), &|| remove("state.json"), &|| {
        std::fs::rename(&state_dir, dir.path().join("elsewhere")).unwrap();
    }];
    for remove in removals {
        assert!(journal.is_in_place());
        remove();
        assert!(!journal.is_in_place());
        journal.rewrite(&[ended("a")]).unwrap();
        journal.append(&[ended("b")]).unwrap();
        let copy = tempfile::tempdir().unwrap();
        for name in JOURNAL_FILE_NAMES {
            std::fs::copy(state_dir.join(name), copy.path().join(name)).unwrap();
        }
        assert_eq!(reopen(copy.path()).1.records, [ended("a"), ended("b")]);
        journal.rewrite(&[ended("a")]).unwrap();
    }
}

#[test]
fn a_directory_that_cannot_be_made_again_is_a_fault_until_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    std::fs::create_dir(&state_dir).unwrap();
    let (mut journal, _) = reopen(&state_dir);
    std::fs::remove_dir_all(&state_dir).unwrap();
    std::fs::write(&state_dir, "").unwrap();
    let fault = journal.rewrite(&[ended("a")]).unwrap_err().to_string();
    assert!(fault.contains(&format!("can't make {}", state_dir.display())), "{fault}");
    std::fs::remove_file(&state_dir).unwrap();
    journal.rewrite(&[ended("a")]).unwrap();
    assert!(journal.is_in_place());
}

#[test]
fn planted_links_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("precious"), "precious").unwrap();
    for name in ["state.json", "state.json.new"] {
        std::os::unix::fs::symlink(path("precious"), path(name)).unwrap();
    }
    let (mut journal, found) = reopen(dir.path());
    assert!(found.remarks[0].contains("symbolic link"), "{:?}", found.remarks);
    journal.rewrite(&[ended("a")]).unwrap();
    drop(journal);
    assert_eq!(reopen(dir.path()).1.records, [ended("a")]);
    std::fs::remove_file(path("journal.jsonl")).unwrap();
    std::os::unix::fs::symlink(path("precious"), path("journal.jsonl")).unwrap();
    let refusal = FileJournal::open(dir.path(), "boot").unwrap_err().to_string();
    assert!(refusal.contains("symbolic link; remove it"), "{refusal}");
    assert_eq!(std::fs::read_to_string(path("precious")).unwrap(), "precious");
}

#[test]
fn a_link_without_a_target_counts_as_a_file_of_the_journal() {
    for (name, has_state_file) in [("journal.jsonl", false), ("state.json", false), ("state.json", true)] {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_journal_files(dir.path(), has_state_file));
        std::os::unix::fs::symlink("/no/such/file", dir.path().join(name)).unwrap();
        assert!(has_journal_files(dir.path(), has_state_file), "{name}");
    }
}

#[test]
fn a_hard_link_in_place_of_the_file_for_unreadable_lines_is_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("precious"), "precious").unwrap();
    std::fs::hard_link(path("precious"), path("journal.jsonl.unreadable")).unwrap();
    std::fs::write(path("journal.jsonl"), "garbage\n").unwrap();
    reopen(dir.path());
    assert_eq!(std::fs::read_to_string(path("precious")).unwrap(), "precious");
    assert_eq!(std::fs::read_to_string(path("journal.jsonl.unreadable")).unwrap(), "garbage\n");
}

#[test]
fn a_job_keeps_the_rule_for_its_processes_and_a_record_without_one_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let job = |name: &str, within_job| {
        let id: JobId = name.parse().unwrap();
        let request = JobRequest { within_job, ..JobRequest::with_core_count(1) };
        let job = Job::new(id, Uid::ROOT, EndCondition::LastProcessExit, UnixMillis(0));
        Record::Job(Job { request: Some(request), ..job })
    };
    let records = [job("a", NumaNodeRule::LeastLoaded), job("b", NumaNodeRule::Default)];
    let (mut journal, _) = reopen(dir.path());
    journal.append(&records).unwrap();
    drop(journal);
    let text = std::fs::read_to_string(dir.path().join("journal.jsonl")).unwrap();
    assert_eq!(
        text.matches("within_job").count(),
        1,
        "the default is not written, as in older journals: {text}"
    );
    assert_eq!(reopen(dir.path()).1.records, records);
}
