//! The start of the daemon: what the journal and the lock file of an earlier one tell, and the end with the event loop.

use clap::Parser;
use pjw_core::ports::Journal;
use pjw_core::record::{Record, UnknownMaskRecord};
use pjw_core::testing::regular_topology;
use pjw_ipc::client::Client;
use serde_json::{Value, json};

use super::*;

/// The directories of a lock file and of the state of several daemons.
struct Places(tempfile::TempDir);

impl Places {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Starts and kills a daemon that writes the records. Returns whether it found that records were lost, and the
    /// remedies of its warnings.
    fn start(&self, name: &str, records: &[Record]) -> (bool, String) {
        self.start_with_lock(name, records).1
    }

    /// The same for a daemon that still holds its lock.
    fn start_with_lock(&self, name: &str, records: &[Record]) -> (DaemonLock, (bool, String)) {
        let (locks, state_dir) = (self.path("lock"), self.path(name));
        let holder = LockHolder::for_this_process(None, &state_dir);
        let mut lock = DaemonLock::acquire(&lock_directory(locks), holder).unwrap();
        directories::make_state_directory(&state_dir, Uid::effective().as_raw()).unwrap();
        let (mut journal, recovered, warnings) = open_journal(&state_dir, "boot", Some(&mut lock)).unwrap();
        journal.append(records).unwrap();
        let remedies: Vec<String> = warnings.into_iter().map(|warning| warning.remedy).collect();
        let lost = Record::UnknownMasks(UnknownMaskRecord::RecordsLost);
        (lock, (recovered.records.contains(&lost), remedies.concat()))
    }
}

fn lock_directory(usual: PathBuf) -> LockDirectories {
    LockDirectories { usual, ..LockDirectories::default() }
}

fn ended(name: &str) -> Record {
    Record::Ended(name.parse().unwrap())
}

#[test]
fn records_in_another_directory_and_lost_records_are_told_and_those_in_the_same_directory_are_read() {
    let places = Places(tempfile::tempdir().unwrap());
    let start = |name: &str| places.start(name, &[ended("a")]);
    assert_eq!(start("one"), (false, String::new()), "the first start");
    std::os::unix::fs::symlink(places.path("one"), places.path("link")).unwrap();
    assert_eq!(start("link"), (false, String::new()), "another path of the same directory");
    let (is_lost, remedy) = start("two");
    let expected = format!("start pjwd with --state-dir {}", places.path("link").display());
    assert!(is_lost && remedy.ends_with(&expected), "{remedy}");
    std::fs::remove_dir_all(places.path("two")).unwrap();
    assert_eq!(start("two"), (true, String::new()));
    assert_eq!(start("two"), (true, String::new()), "the journal has the loss until a daemon has searched");
    std::fs::remove_file(places.path("two/state.json")).unwrap();
    std::fs::write(places.path("two/journal.jsonl"), "").unwrap();
    assert_eq!(start("two"), (true, String::new()), "both files are as of a daemon that never ran");
}

#[test]
fn a_journal_that_is_gone_after_a_stop_is_missed_only_if_the_stop_left_something_to_undo() {
    let places = Places(tempfile::tempdir().unwrap());
    for has_records in [false, true] {
        let (lock, _) = places.start_with_lock("one", &[]);
        wait_for_loop(std::thread::spawn(move || has_records), Some(lock)).unwrap();
        std::fs::remove_dir_all(places.path("one")).unwrap();
        let (is_lost, _) = places.start("one", &[]);
        assert_eq!(is_lost, has_records);
    }
}

#[test]
fn a_daemon_that_stops_says_so_in_its_lock_file_and_state_directory_before_it_releases_the_lock() {
    let places = Places(tempfile::tempdir().unwrap());
    std::fs::create_dir(places.path("one")).unwrap();
    let holder = LockHolder::for_this_process(Some(&places.path("s")), &places.path("one"));
    let lock = DaemonLock::acquire(&lock_directory(places.path("lock")), holder).unwrap();
    let written = || std::fs::read_to_string(places.path("lock/warden.lock")).unwrap();
    assert!(written().contains("\"is_stopping\":false"), "{}", written());
    let socket_file = SocketFile::CreatedByDaemon(bind(&places.path("s")).unwrap());
    let own_files = WatchedFiles::new(Some(lock), socket_file, places.path("one"));
    let (outbox, _inbox) = message_channel().unwrap();
    let (listeners, _made) = mpsc::unbounded_channel();
    let (_stop, stopped) = watch::channel(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let own_files = runtime.block_on(own_files.restore_removed_files(listeners, outbox, stopped));
    // The watch of the files goes on for some seconds.
    runtime.shutdown_background();
    assert!(written().contains("\"is_stopping\":true"), "{}", written());
    let state_dir = std::fs::File::open(places.path("one")).unwrap();
    let relocked = nix::fcntl::Flock::lock(state_dir, nix::fcntl::FlockArg::LockExclusiveNonblock);
    assert!(relocked.is_err(), "the directory is locked, also by a daemon that runs beside another");
    assert!(own_files.into_lock().is_some());
}

/// The thaw watcher of a killed daemon does the same.
#[test]
fn a_daemon_that_runs_beside_another_waits_for_a_process_that_thaws_its_jobs() {
    let dir = tempfile::tempdir().unwrap();
    drop(FileJournal::open(dir.path(), "boot").unwrap());
    let words = ["pjwd", "--thaw", "--beside", "--state-dir", dir.path().to_str().unwrap()];
    thaw(&DaemonOptions::try_parse_from(words).unwrap()).unwrap();
    // The test goes on instead of the end of the process: the mark stays, and the lock of the journal does not.
    let state_dir = std::fs::File::open(dir.path()).unwrap();
    let relocked = nix::fcntl::Flock::lock(state_dir, nix::fcntl::FlockArg::LockExclusiveNonblock);
    assert!(relocked.is_err(), "the directory has the mark of a process that ends soon");
    FileJournal::open(dir.path(), "boot").unwrap();
}

#[test]
fn after_a_panic_of_the_loop_the_lock_file_still_names_the_journal() {
    let places = Places(tempfile::tempdir().unwrap());
    let (lock, _) = places.start_with_lock("one", &[]);
    let panicked = std::thread::spawn(|| -> bool { std::panic::resume_unwind(Box::new("a bug")) });
    assert!(wait_for_loop(panicked, Some(lock)).is_err());
    std::fs::remove_dir_all(places.path("one")).unwrap();
    assert!(places.start("one", &[]).0);
}

#[test]
fn another_directory_without_records_is_no_loss_and_one_that_a_daemon_uses_is_left_to_it() {
    let places = Places(tempfile::tempdir().unwrap());
    places.start("one", &[]);
    assert_eq!(places.start("two", &[]), (false, String::new()), "the first daemon held no job");
    assert_eq!(places.start("one", &[ended("a")]), (false, String::new()));
    let (_beside, _) = FileJournal::open(&places.path("one"), "boot").unwrap();
    let (is_lost, remedy) = places.start("three", &[]);
    let user = format!("process {}, a pjwd with --beside, uses", std::process::id());
    assert!(!is_lost && remedy.contains(&user) && !remedy.contains("--state-dir"), "{remedy}");
    places.start("four", &[]);
    std::fs::write(places.path("four/state.json"), "garbage").unwrap();
    assert!(places.start("five", &[]).0, "a file that can't be read may have had records");
}

#[test]
fn a_journal_whose_state_file_could_not_be_written_is_complete() {
    let above = tempfile::tempdir().unwrap();
    let state_dir = above.path().join("state");
    std::fs::create_dir_all(state_dir.join("state.json.new")).unwrap();
    for name in ["a", "b"] {
        let holder = LockHolder::for_this_process(None, &state_dir);
        let mut lock = DaemonLock::acquire(&lock_directory(above.path().join("lock")), holder).unwrap();
        let (mut journal, recovered, _) = open_journal(&state_dir, "boot", Some(&mut lock)).unwrap();
        assert!(!recovered.has_lost_records, "before {name}: {:?}", recovered.remarks);
        assert!(recovered.remarks.last().unwrap().contains("can't write"), "{:?}", recovered.remarks);
        journal.append(&[ended(name)]).unwrap();
    }
}

#[test]
fn a_panic_of_the_loop_ends_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let owned = bind(&path).unwrap();
    let topology = regular_topology(1, 1, 1, 2, 1);
    let (_publisher, published) = StatusPublisher::new("here".to_owned(), &topology);
    let (outbox, inbox) = message_channel().unwrap();
    let (_sender, settings) = watch::channel(ControlSettings::default());
    let (control, record_events) = ControlService::new(outbox.clone(), published, settings);
    let (ready, started) = oneshot::channel();
    let (alive, ended) = oneshot::channel::<()>();
    let loop_handle = std::thread::spawn(move || {
        let _lives = alive;
        ready.send(()).unwrap();
        let mut client = Client::connect(&path).unwrap();
        client.call::<Value>("GetStatus", &json!({})).unwrap();
        drop(inbox);
        std::panic::resume_unwind(Box::new("a bug"));
    });
    let (_meter, metrics_receiver) = MetricsRecorder::new(&Settings::default());
    let loop_thread = LoopThread { started, ended, outbox: &outbox, metrics_receiver };
    let listening = (owned.dup_listener().unwrap(), ServerLimits::default());
    let own_files = WatchedFiles::new(None, SocketFile::CreatedByDaemon(owned), dir.path().to_owned());
    let failure = serve_until_stopped(listening, own_files, control, record_events, loop_thread).unwrap_err();
    assert!(failure.to_string().contains("the event loop ended by itself"), "{failure}");
    assert!(loop_handle.join().is_err());
}
