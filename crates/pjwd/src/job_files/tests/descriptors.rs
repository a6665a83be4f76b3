//! The files of jobs while pjwd has no free file descriptor.
//!
//! The limit of open descriptors holds for a whole process. So each test runs again in a process of its own.

use std::os::fd::AsRawFd;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;

const OWN_PROCESS_VARIABLE: &str = "PJW_TEST_WITHOUT_DESCRIPTORS";

/// Runs the test `name` of this module again, in a process of its own. Returns whether this is that process.
fn is_own_process(name: &str) -> bool {
    if std::env::var_os(OWN_PROCESS_VARIABLE).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("job_files::tests::descriptors::{name}")])
        .env(OWN_PROCESS_VARIABLE, "1")
        .output()
        .unwrap();
    let [text, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
    false
}

/// Publishes the CPUs 0-1 of the job `a`. Returns the files, and a reader that has mapped the core map.
fn published_job() -> (Published, Job) {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let reader = Job::in_directory(&published.path("a"));
    assert_eq!(reader.cores().cpus.to_string(), "0-1");
    (published, reader)
}

/// Publishes the cores `own` of the job `a` while this process can open no file. With `None`, the job has ended.
fn publish_without_descriptors(published: &mut Published, own: Option<&str>) {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let lowest_free = fs::File::open("/dev/null").unwrap().as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, lowest_free.try_into().unwrap(), hard).unwrap();
    published.files.publish(&id("a"), own.map(content));
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
}

/// Asserts that the core map of the job `a` was not written, and then that the next cycle writes it. `warning_begin` is
/// the beginning of the warning. `reader` has mapped the core map before, when it had the CPUs 0-1.
fn assert_that_the_next_cycle_writes(published: &mut Published, reader: &Job, warning_begin: &str) {
    let cores = reader.cores();
    assert_eq!((cores.source, cores.cpus.to_string()), (CoresSource::CoreMap, "0-1".to_owned()));
    let warnings: Vec<_> = published.files.warnings().collect();
    assert!(warnings.len() == 1 && warnings[0].text.starts_with(warning_begin), "{warnings:?}");
    assert!(warnings[0].remedy.contains("more open files"), "{warnings:?}");
    assert_eq!(published.files.first_job_without_descriptor(), Some(&id("a")));
    published.publish("a", "0");
    assert_eq!(published.files.first_job_without_descriptor(), None);
    let cores = reader.cores();
    assert_eq!((cores.source, cores.cpus.to_string()), (CoresSource::CoreMap, "0".to_owned()));
}

#[test]
fn without_a_free_descriptor_the_core_map_keeps_the_former_cores_until_the_next_cycle() {
    if !is_own_process("without_a_free_descriptor_the_core_map_keeps_the_former_cores_until_the_next_cycle") {
        return;
    }
    let (mut published, reader) = published_job();
    publish_without_descriptors(&mut published, Some("0"));
    let begin = "the core map of manual:a has former cores: can't write /";
    assert_that_the_next_cycle_writes(&mut published, &reader, begin);
    publish_without_descriptors(&mut published, Some("0-1"));
    published.files.publish(&id("a"), None);
    assert_eq!(published.files.first_job_without_descriptor(), None, "the job has ended");
}

#[test]
fn a_new_daemon_without_a_free_descriptor_goes_on_with_the_page_in_the_next_cycle() {
    if !is_own_process("a_new_daemon_without_a_free_descriptor_goes_on_with_the_page_in_the_next_cycle") {
        return;
    }
    let (mut published, reader) = published_job();
    published.restart();
    publish_without_descriptors(&mut published, Some("0"));
    let begin = "the core map of manual:a has former cores: can't open /";
    assert_that_the_next_cycle_writes(&mut published, &reader, begin);
}

#[test]
fn the_directory_of_a_job_that_ends_while_no_descriptor_is_free_is_removed_at_once() {
    if !is_own_process("the_directory_of_a_job_that_ends_while_no_descriptor_is_free_is_removed_at_once") {
        return;
    }
    let (mut published, reader) = published_job();
    publish_without_descriptors(&mut published, None);
    assert!(!published.path("a").exists());
    assert_eq!(published.files.first_job_without_descriptor(), None);
    assert_ne!(reader.cores().source, CoresSource::CoreMap);
}

#[test]
fn a_directory_that_could_not_be_opened_is_removed_when_a_descriptor_is_free_after_its_job_has_ended() {
    let name =
        "a_directory_that_could_not_be_opened_is_removed_when_a_descriptor_is_free_after_its_job_has_ended";
    if !is_own_process(name) {
        return;
    }
    let (mut published, reader) = published_job();
    published.write("a", "1");
    for is_used_again in [false, true] {
        published.restart();
        publish_without_descriptors(&mut published, Some("0-1"));
        publish_without_descriptors(&mut published, None);
        // The programs that have mapped the page find out by the page, and pjwd can't map it.
        assert!(published.path("a").exists());
        assert_eq!(published.files.first_job_without_descriptor(), Some(&id("a")));
        if is_used_again {
            published.publish("a", "0");
            assert_eq!(published.written(), [], "the number was that of the ended job");
        } else {
            published.files.publish(&id("a"), None);
            assert!(!published.path("a").exists());
            assert_ne!(reader.cores().source, CoresSource::CoreMap);
            published.publish("a", "0-1");
            published.write("a", "1");
        }
        assert_eq!(published.files.first_job_without_descriptor(), None);
    }
}

#[test]
fn the_files_of_an_ended_job_are_not_those_of_a_new_one_that_begins_while_no_descriptor_is_free() {
    if !is_own_process(
        "the_files_of_an_ended_job_are_not_those_of_a_new_one_that_begins_while_no_descriptor_is_free",
    ) {
        return;
    }
    let (mut published, _reader) = published_job();
    published.write("a", "1");
    published.restart();
    for own in [Some("0-1"), None, Some("0")] {
        publish_without_descriptors(&mut published, own);
        assert_eq!(published.read("a", "want"), "1");
        assert_eq!(published.files.first_job_without_descriptor(), Some(&id("a")));
    }
    published.publish("a", "0");
    assert_eq!((published.written(), published.read("a", "want")), (vec![], String::new()));
    assert_eq!((published.read("a", "cpus"), &published.json("a")["epoch"]), ("0\n".to_owned(), &json!(1)));
    assert_eq!(published.files.first_job_without_descriptor(), None);
}
