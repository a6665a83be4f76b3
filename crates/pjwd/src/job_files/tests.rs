//! The files of jobs in a real directory: what is published, what is made again, and what a program writes.

mod descriptors;
mod failed_writes;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use pjw_job::layout::SEQUENCE_OFFSET;
use pjw_job::{CoresSource, Job};
use serde_json::{Value, json};

use super::*;

/// The files below a temporary state directory.
struct Published {
    files: JobFiles,
    state_dir: tempfile::TempDir,
}

fn id(text: &str) -> JobId {
    text.parse().unwrap()
}

fn content(own: &str) -> JobFilesContent {
    let own: pjw_core::cpuset::CpuSet = own.parse().unwrap();
    let core_count = u32::try_from(own.len()).unwrap();
    JobFilesContent {
        owner: Uid(geteuid().as_raw()),
        core_map: CoreMap { own, core_count, ..CoreMap::default() },
        wanted: None,
    }
}

impl Published {
    fn new() -> Self {
        let state_dir = tempfile::tempdir().unwrap();
        Self { files: JobFiles::new(state_dir.path()), state_dir }
    }

    /// The daemon is killed, and another one begins.
    fn restart(&mut self) {
        self.files = JobFiles::new(self.state_dir.path());
    }

    fn publish(&mut self, job: &str, own: &str) {
        self.files.publish(&id(job), Some(content(own)));
        assert_eq!(self.files.warnings().count(), 0);
    }

    fn path(&self, job: &str) -> PathBuf {
        self.state_dir.path().join("jobs").join(id(job).to_string())
    }

    fn read(&self, job: &str, file: &str) -> String {
        fs::read_to_string(self.path(job).join(file)).unwrap()
    }

    fn json(&self, job: &str) -> Value {
        serde_json::from_str(&self.read(job, "coremap.json")).unwrap()
    }

    fn write(&self, job: &str, text: &str) {
        fs::write(self.path(job).join("want"), text).unwrap();
    }

    /// What was written and is due some time later.
    fn written(&mut self) -> Vec<Option<u32>> {
        let mut now = Instant::now();
        self.files.schedule_reading_of_changed_files(now);
        let mut written = Vec::new();
        while let Some(due) = self.files.next_read_at() {
            now = now.max(due);
            written.extend(self.files.take_wanted_cores_updates(now).into_iter().map(|want| want.cores));
        }
        written
    }
}

#[test]
fn the_files_show_the_cores_of_the_job_in_the_form_that_the_contract_names() {
    let mut published = Published::new();
    let mut content = content("0-1");
    content.core_map = CoreMap {
        borrowed: "2-3".parse().unwrap(),
        leaving: "3".parse().unwrap(),
        leaving_at: Some(clock_now()),
        core_count: 4,
        ..content.core_map
    };
    published.files.publish(&id("a"), Some(content));
    assert_eq!(published.read("a", "cpus"), "0-3\n");
    let mut json = published.json("a");
    let leaving_at = json["leaving_at_ns"].take().as_u64().unwrap();
    assert!(leaving_at <= pjw_linux::sys::clock::monotonic_now().0, "it is a time of CLOCK_MONOTONIC");
    let expected = json!({ "schema": 1, "epoch": 1, "cpus": "0-3", "own": "0-1", "borrowed": "2-3", "leaving": "3",
        "leaving_at_ns": null, "lent": "", "cores": 4 });
    assert_eq!(json, expected);
    let cores = Job::in_directory(&published.path("a")).cores();
    assert_eq!((cores.source, cores.epoch), (CoresSource::CoreMap, 1));
    assert_eq!((cores.cpus.to_string(), cores.leaving_at_ns), ("0-3".to_owned(), Some(leaving_at)));
    assert_eq!(published.read("a", "want"), "");
    let mode = |name: &str| fs::metadata(published.path("a").join(name)).unwrap().mode() & 0o7777;
    assert_eq!(
        ["", "cpus", "coremap.json", "coremap", "want"].map(mode),
        [0o755, 0o644, 0o644, 0o644, 0o600]
    );
}

fn clock_now() -> pjw_core::time::Nanos {
    pjw_linux::sys::clock::now().since_boot
}

#[test]
fn a_want_file_that_is_replaced_because_of_a_second_name_is_watched_too() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    fs::hard_link(published.path("a").join("want"), published.state_dir.path().join("second")).unwrap();
    published.publish("a", "0-2");
    assert_eq!(published.written(), []);
    published.write("a", "2");
    assert_eq!(published.written(), [Some(2)]);
}

#[test]
fn only_a_change_of_the_map_writes_the_files() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let inode =
        |published: &Published, name: &str| fs::metadata(published.path("a").join(name)).unwrap().ino();
    let (json, page) = (inode(&published, "coremap.json"), inode(&published, "coremap"));
    published.publish("a", "0-1");
    assert_eq!((inode(&published, "coremap.json"), &published.json("a")["epoch"]), (json, &json!(1)));
    published.publish("a", "0-2");
    assert_ne!(inode(&published, "coremap.json"), json, "a new file takes the place of the old one");
    assert_eq!(inode(&published, "coremap"), page, "the page is written in place");
    assert_eq!((&published.json("a")["epoch"], published.read("a", "cpus")), (&json!(2), "0-2\n".to_owned()));
}

#[test]
fn the_end_of_a_job_removes_its_directory_and_wakes_its_programs() {
    let mut published = Published::new();
    published.publish("a", "0");
    published.publish("b", "1");
    let job = Job::in_directory(&published.path("a"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| job.wait_for_change(1, None).unwrap());
        published.files.publish(&id("a"), None);
        assert_eq!(waiting.join().unwrap().source, CoresSource::AffinityMask);
    });
    assert!(!published.path("a").exists() && published.path("b").exists());
}

#[test]
fn a_new_daemon_goes_on_with_the_page_and_the_epoch_of_a_killed_one_and_removes_what_is_left() {
    let mut published = Published::new();
    published.publish("a", "0");
    published.publish("a", "0-1");
    published.publish("gone", "2");
    let reader = Job::in_directory(&published.path("a"));
    fs::write(published.state_dir.path().join("jobs/.new"), "half of a file").unwrap();
    published.restart();
    published.publish("a", "0-1");
    published.files.remove_leftovers();
    assert!(!published.path("gone").exists() && !published.state_dir.path().join("jobs/.new").exists());
    assert_eq!((reader.cores().epoch, &published.json("a")["epoch"]), (2, &json!(2)), "nothing changed");
    published.publish("a", "0");
    assert_eq!((reader.cores().epoch, reader.cores().cpus.to_string()), (3, "0".to_owned()));
}

#[test]
fn files_that_a_killed_daemon_left_half_done_are_put_right() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let reader = Job::in_directory(&published.path("a"));
    fs::write(published.path("a").join("cpus"), "0-7\n").unwrap();
    fs::write(published.path("a").join("coremap.json"), "{").unwrap();
    published.restart();
    published.publish("a", "0-1");
    assert_eq!(
        (published.read("a", "cpus"), published.json("a")["cpus"].clone()),
        ("0-1\n".to_owned(), json!("0-1"))
    );
    fs::write(published.path("a").join("coremap"), "rubbish").unwrap();
    published.restart();
    published.publish("a", "0-1");
    drop(reader);
    assert_eq!(Job::in_directory(&published.path("a")).cores().cpus.to_string(), "0-1");
}

#[test]
fn a_core_map_that_a_killed_daemon_left_unfinished_is_written_again_also_with_the_same_cores() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    // The daemon is killed after it wrote the content, and before it marks the write as complete.
    let page = fs::File::options().write(true).open(published.path("a").join("coremap")).unwrap();
    page.write_all_at(&1_u32.to_ne_bytes(), SEQUENCE_OFFSET as u64).unwrap();
    published.restart();
    published.publish("a", "0-1");
    let cores = Job::in_directory(&published.path("a")).cores();
    assert_eq!((cores.source, cores.cpus.to_string()), (CoresSource::CoreMap, "0-1".to_owned()));
}

#[test]
fn jobs_take_no_descriptors_so_that_many_jobs_leave_the_daemon_enough() {
    let mut published = Published::new();
    for job in 0..30 {
        published.publish(&format!("job-{job}"), "0-1");
        published.publish(&format!("job-{job}"), "0");
    }
    let state_dir = published.state_dir.path().canonicalize().unwrap();
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    let open: Vec<PathBuf> = targets.filter(|target| target.starts_with(&state_dir)).collect();
    assert_eq!(open, Vec::<PathBuf>::new());
}

#[test]
fn a_core_map_that_another_program_replaced_is_made_again_with_the_next_change() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let reader = Job::in_directory(&published.path("a"));
    let other = published.state_dir.path().join("other");
    fs::write(&other, "rubbish").unwrap();
    fs::rename(&other, published.path("a").join("coremap")).unwrap();
    published.publish("a", "0");
    let cores = [reader, Job::in_directory(&published.path("a"))].map(|job| job.cores());
    assert!(cores.iter().all(|cores| cores.source == CoresSource::CoreMap), "{cores:?}");
    assert_eq!(cores.map(|cores| cores.cpus.to_string()), ["0", "0"]);
}

#[test]
fn removed_files_are_made_again() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let reader = Job::in_directory(&published.path("a"));
    for name in ["cpus", "coremap.json", "coremap", "want"] {
        fs::remove_file(published.path("a").join(name)).unwrap();
        assert_eq!(published.written(), [], "{name}");
        assert!(published.path("a").join(name).is_file(), "{name}");
        assert_eq!(reader.cores().source, CoresSource::CoreMap, "{name}");
    }
    fs::remove_dir_all(published.state_dir.path().join("jobs")).unwrap();
    assert_eq!(published.written(), []);
    assert_eq!(
        (published.read("a", "cpus"), reader.cores().cpus.to_string()),
        ("0-1\n".to_owned(), "0-1".to_owned())
    );
    published.write("a", "1");
    assert_eq!(published.written(), [Some(1)], "the new files are watched");
    fs::rename(published.state_dir.path().join("jobs"), published.state_dir.path().join("elsewhere"))
        .unwrap();
    published.files.schedule_reading_of_unwatched_files(Instant::now());
    assert_eq!(published.written(), []);
    assert!(published.path("a").join("want").exists(), "a rescan finds what no event reports");
}

#[test]
fn a_link_in_place_of_a_file_or_a_directory_is_replaced_and_its_target_stays() {
    let mut published = Published::new();
    let target = published.state_dir.path().join("target");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("precious"), "precious").unwrap();
    symlink(&target, published.state_dir.path().join("jobs")).unwrap();
    published.publish("a", "0");
    fs::remove_dir_all(published.path("a")).unwrap();
    symlink(&target, published.path("a")).unwrap();
    published.restart();
    published.publish("a", "0");
    for name in ["cpus", "coremap.json", "coremap", "want"] {
        fs::remove_file(published.path("a").join(name)).unwrap();
        symlink(target.join("precious"), published.path("a").join(name)).unwrap();
        assert_eq!(published.written(), [], "{name}");
        assert!(!published.path("a").join(name).is_symlink(), "{name}");
    }
    assert_eq!(fs::read_to_string(target.join("precious")).unwrap(), "precious");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 1);
}

/// Puts a pipe, or a link to one, in the place of the file `name` of a job. Then asserts that the file is made again,
/// by the same daemon or by the next one.
fn assert_that_a_pipe_is_replaced(name: &str, is_link: bool, is_restarted: bool) {
    let mut published = Published::new();
    published.publish("a", "0-1");
    let (path, elsewhere) = (published.path("a").join(name), published.state_dir.path().join("pipe"));
    fs::remove_file(&path).unwrap();
    mkfifo(if is_link { &elsewhere } else { &path }, Mode::S_IRWXU).unwrap();
    if is_link {
        symlink(&elsewhere, &path).unwrap();
    }
    if is_restarted {
        published.restart();
        published.publish("a", "0-1");
    }
    assert_eq!(published.written(), [], "{name}");
    assert!(fs::symlink_metadata(&path).unwrap().is_file(), "{name}");
}

#[test]
fn a_pipe_in_place_of_a_file_is_replaced_and_blocks_no_daemon() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        for name in ["cpus", "coremap.json", "coremap", "want"] {
            for (is_link, is_restarted) in [(false, false), (false, true), (true, false), (true, true)] {
                assert_that_a_pipe_is_replaced(name, is_link, is_restarted);
            }
        }
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(30)).unwrap();
}

#[test]
fn the_epoch_of_a_file_that_is_too_long_counts_as_none() {
    let mut published = Published::new();
    published.publish("a", "0");
    let json = published.read("a", "coremap.json").replace("\"epoch\":1,", "\"epoch\":1000,");
    for (blanks, epoch) in [(0, 1001), (2 << 20, 1)] {
        fs::remove_file(published.path("a").join("coremap")).unwrap();
        fs::write(published.path("a").join("coremap.json"), " ".repeat(blanks) + &json).unwrap();
        published.restart();
        published.publish("a", "0");
        assert_eq!(published.json("a")["epoch"], json!(epoch));
    }
}

#[test]
fn a_number_that_a_program_writes_is_reported_once() {
    let mut published = Published::new();
    published.publish("a", "0-3");
    assert_eq!(published.written(), []);
    published.write("a", "2\n");
    assert_eq!(published.written(), [Some(2)]);
    assert_eq!(published.written(), []);
    published.write("a", "2");
    assert_eq!(published.written(), [], "the same number is no news");
    for number in 0..1000 {
        published.write("a", &number.to_string());
    }
    assert_eq!(published.written(), [Some(999)], "of many numbers the last one counts");
    published.write("a", "");
    assert_eq!(published.written(), [None]);
}

#[test]
fn many_numbers_are_read_five_times_a_second_at_most() {
    let mut published = Published::new();
    published.publish("a", "0-3");
    published.write("a", "1");
    let now = Instant::now();
    published.files.schedule_reading_of_changed_files(now);
    published.write("a", "1");
    assert!(published.files.changes_fd().is_none(), "while the reading is due, more changes wake nothing");
    assert!(published.files.take_wanted_cores_updates(now).is_empty(), "the program may not have finished");
    let first = published.files.next_read_at().unwrap();
    assert_eq!(published.files.take_wanted_cores_updates(first).len(), 1);
    published.files.schedule_reading_of_changed_files(first);
    assert_eq!(published.files.next_read_at(), None, "all events of the first number were read with it");
    published.write("a", "2");
    published.files.schedule_reading_of_changed_files(first);
    assert_eq!(published.files.next_read_at(), Some(first + READ_INTERVAL));
}

#[test]
fn rubbish_is_one_warning_until_the_file_has_a_number_again() {
    let mut published = Published::new();
    published.publish("a", "0-3");
    published.write("a", "as many as possible");
    assert_eq!(published.written(), []);
    let warnings: Vec<_> = published.files.warnings().collect();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].code == "want" && warnings[0].text.contains("no number of cores"), "{warnings:?}");
    published.write("a", "2");
    assert_eq!((published.written(), published.files.warnings().count()), (vec![Some(2)], 0));
}

#[test]
fn a_number_of_a_command_is_shown_in_the_file_and_survives_a_restart() {
    let mut published = Published::new();
    published.publish("a", "0-3");
    let with = |wanted| Some(JobFilesContent { wanted, ..content("0-3") });
    published.files.publish(&id("a"), with(Some(3)));
    assert_eq!((published.read("a", "want"), published.written()), ("3\n".to_owned(), vec![]));
    published.restart();
    published.files.publish(&id("a"), with(Some(3)));
    assert_eq!(published.written(), []);
    published.restart();
    published.write("a", "1");
    published.files.publish(&id("a"), with(Some(3)));
    assert_eq!(published.written(), [Some(1)], "what was written while no daemon ran counts");
    published.files.publish(&id("a"), with(None));
    assert_eq!(published.read("a", "want"), "");
}

#[test]
fn a_directory_that_cannot_be_made_is_a_warning_and_is_tried_again() {
    let mut published = Published::new();
    let state_dir = published.state_dir.path().to_owned();
    fs::remove_dir(&state_dir).unwrap();
    published.files.publish(&id("a"), Some(content("0")));
    let warnings: Vec<_> = published.files.warnings().collect();
    assert!(warnings.len() == 1 && warnings[0].code == "core-map", "{warnings:?}");
    assert!(warnings[0].text.contains("can't make"), "{warnings:?}");
    fs::create_dir(&state_dir).unwrap();
    published.files.schedule_reading_of_unwatched_files(Instant::now());
    assert_eq!((published.written(), published.files.warnings().count()), (vec![], 0));
    assert_eq!(published.read("a", "cpus"), "0\n");
}

#[test]
fn a_warning_names_the_file_that_cannot_be_written_and_what_programs_still_find() {
    for (names, begin, end) in [
        (
            &["cpus"][..],
            "the files cpus and coremap.json of manual:a may have former cores: can't write /",
            "ones",
        ),
        (&["coremap"], "programs in manual:a get no page coremap: can't write /", "have the present cores"),
        (
            &["coremap.json", "coremap"],
            "programs in manual:a get no core map: can't write /",
            "/coremap: Is a directory (os error 21)",
        ),
    ] {
        let mut published = Published::new();
        published.publish("a", "0");
        // A file can't take the place of a directory.
        for name in names {
            fs::remove_file(published.path("a").join(name)).unwrap();
            fs::create_dir(published.path("a").join(name)).unwrap();
        }
        assert_eq!(published.written(), []);
        let texts: Vec<&str> = published.files.warnings().map(|warning| warning.text.as_str()).collect();
        assert!(texts.len() == 1 && texts[0].starts_with(begin) && texts[0].ends_with(end), "{texts:?}");
        let job = Job::in_directory(&published.path("a"));
        assert_eq!(job.cores().source == CoresSource::CoreMap, names == ["cpus"], "{names:?}");
    }
}

/// Starts a shell whose program file is at `path`, in the place of the file there. The kernel refuses to open the file
/// for writing while the shell runs, except for some versions of Linux.
fn run_program_at(path: &Path) -> Child {
    // Another process writes the file, because a file that a child of this process has open for writing can't be
    // executed.
    assert!(Command::new("cp").arg("/bin/sh").arg(path).status().unwrap().success());
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
    Command::new(path).args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_refused_write_of_the_wanted_cores_alone_is_another_warning_and_is_tried_again() {
    let mut published = Published::new();
    published.publish("a", "0-3");
    let want = published.path("a").join("want");
    let mut program = run_program_at(&want);
    let is_refused = fs::File::options().write(true).open(&want).is_err();
    published.files.publish(&id("a"), Some(JobFilesContent { wanted: Some(3), ..content("0-3") }));
    let texts: Vec<String> = published.files.warnings().map(|warning| warning.text.clone()).collect();
    drop(program.stdin.take());
    program.wait().unwrap();
    if !is_refused {
        eprintln!("skipped: this kernel lets the file of a running program be written");
        return;
    }
    assert_eq!(texts.len(), 1, "{texts:?}");
    let begin = "the file want of manual:a is missing or has a former number: can't write /";
    assert!(texts[0].starts_with(begin), "{texts:?}");
    assert!(texts[0].ends_with("; its core map has the present cores"), "{texts:?}");
    published.files.schedule_reading_of_unwatched_files(Instant::now());
    assert_eq!((published.written(), published.files.warnings().count()), (vec![], 0));
    assert_eq!(published.read("a", "want").trim_end(), "3");
}

#[test]
fn a_job_with_the_longest_id_has_its_directory() {
    let mut published = Published::new();
    let name = format!("condor:{}", "[".repeat(JobId::MAX_NAME_LENGTH));
    published.publish(&name, "0");
    assert_eq!(published.read(&name, "cpus"), "0\n");
}

#[test]
fn a_restored_mode_of_the_directories_lets_all_users_in() {
    let mut published = Published::new();
    let jobs = published.state_dir.path().join("jobs");
    fs::create_dir(&jobs).unwrap();
    fs::set_permissions(&jobs, fs::Permissions::from_mode(0o700)).unwrap();
    published.publish("a", "0");
    assert_eq!(fs::metadata(&jobs).unwrap().mode() & 0o7777, 0o755);
}
