//! The lock file: the process that holds it, what the next process learns from it, and the files that are refused in
//! its place.

use std::os::unix::fs::{MetadataExt, symlink};

use nix::sys::stat::Mode;

use super::holder::JournalPlace;
use super::*;

fn holder(state_dir: &str) -> LockHolder {
    LockHolder::for_this_process(Some(Path::new("/tmp/a.sock")), Path::new(state_dir))
}

/// Acquires the lock in `dir`, where no lock file is at another place.
fn acquire(dir: &Path, holder: LockHolder) -> Result<DaemonLock, LockError> {
    DaemonLock::acquire(&LockDirectories { usual: dir.to_owned(), ..LockDirectories::default() }, holder)
}

/// The directories of a user while `/run/user/UID` is `runtime_dir`, or does not exist. `lasting` is that below /tmp.
fn directories_of_user(runtime_dir: Option<&Path>, lasting: &Path) -> LockDirectories {
    let usual = runtime_dir.map_or_else(|| lasting.to_owned(), |dir| dir.join("pjwd-lock"));
    LockDirectories { usual, lasting: Some(lasting.to_owned()), former: Vec::new() }
}

fn runtime_dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// A daemon reads the lock file of an earlier one, so the names in it stay.
#[test]
fn the_lock_file_with_every_field_is_read_and_written_the_same() {
    let dir = runtime_dir();
    let text = |text: &str| text.to_owned();
    let holder = LockHolder {
        pid: 1,
        socket: Some(text("/run/pjw/socket")),
        state_dir: text("/run/pjw"),
        journal_of_boot: Some(text("boot")),
        has_state_file: true,
        earlier_journal: Some(JournalPlace {
            state_dir: text("/run/earlier"),
            boot_id: text("boot"),
            has_state_file: true,
        }),
        is_stopping: true,
    };
    let stored = concat!(
        r#"{"pid":1,"socket":"/run/pjw/socket","state_dir":"/run/pjw","journal_of_boot":"boot","has_state_file":true,"#,
        r#""earlier_journal":{"state_dir":"/run/earlier","boot_id":"boot","has_state_file":true},"is_stopping":true}"#,
        "\n"
    );
    let path = dir.path().join("stored");
    std::fs::write(&path, stored).unwrap();
    assert_eq!(LockHolder::read(&File::open(&path).unwrap()), Some(holder.clone()));
    std::fs::remove_file(&path).unwrap();
    write(&File::create(&path).unwrap(), &holder).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), stored);
}

#[test]
fn a_second_lock_is_refused_and_names_the_first() {
    let dir = runtime_dir();
    let first = acquire(dir.path(), holder("/tmp/state of one")).unwrap();
    let refusal = acquire(dir.path(), holder("/tmp/two")).unwrap_err().to_string();
    let expected = format!(
        "(process {}, socket \"/tmp/a.sock\", state directory \"/tmp/state of one\"): stop it first",
        std::process::id()
    );
    assert!(refusal.contains(&expected) && refusal.contains("--beside"), "{refusal}");
    assert_eq!(refusal.lines().count(), 1);
    drop(first);
    acquire(dir.path(), holder("/tmp/two")).unwrap();
}

#[test]
fn a_daemon_waits_for_a_process_that_only_thaws_or_releases_jobs() {
    let dir = runtime_dir();
    let released = LockHolder::for_this_process(None, Path::new("/tmp/one"));
    let lock = acquire(dir.path(), released).unwrap();
    let holding = thread::spawn(move || {
        thread::sleep(TIMEOUT_IF_ALIVE * 2);
        drop(lock);
    });
    acquire(dir.path(), holder("/tmp/one")).unwrap();
    holding.join().unwrap();
}

#[test]
fn a_daemon_that_is_stopping_is_waited_for_like_one_that_ends() {
    let dir = runtime_dir();
    let mut lock = acquire(dir.path(), holder("/tmp/one")).unwrap();
    let written = || LockHolder::read(&File::open(dir.path().join(FILE_NAME)).unwrap()).unwrap();
    assert!(written().is_running_daemon() && !written().to_string().contains("stopping"));
    lock.record_stop().unwrap();
    assert!(!written().is_running_daemon() && written().is_alive());
    let named = format!("process {}, which is stopping, socket", std::process::id());
    assert!(written().to_string().starts_with(&named), "{}", written());
    lock.forget_journal().unwrap();
    assert!(!written().is_running_daemon(), "it is still stopping");
    drop(lock);
    let _next = acquire(dir.path(), holder("/tmp/one")).unwrap();
    assert!(written().is_running_daemon(), "the next one runs");
}

#[test]
fn a_lock_of_a_process_that_has_ended_is_not_held_by_a_running_one() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    for (pid, runs) in [(child.id(), false), (std::process::id(), true)] {
        let holder = Some(Box::new(LockHolder { pid, ..holder("/tmp/one") }));
        let error = LockError::Held { serves: String::new(), holder, remedy: String::new() };
        assert_eq!(error.is_held_by_running_process(), runs);
    }
}

#[test]
fn a_removed_lock_file_is_made_again_and_still_keeps_a_second_daemon_away() {
    let dir = runtime_dir();
    let mut lock = acquire(dir.path(), holder("/tmp/one")).unwrap();
    assert!(!lock.reacquire_if_removed().unwrap(), "nothing happened");
    std::fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    assert!(lock.reacquire_if_removed().unwrap());
    assert!(matches!(acquire(dir.path(), holder("/tmp/two")), Err(LockError::Held { .. })));
    std::fs::remove_dir_all(dir.path()).unwrap();
    assert!(lock.reacquire_if_removed().unwrap(), "also the directory");
    assert!(matches!(acquire(dir.path(), holder("/tmp/two")), Err(LockError::Held { .. })));
}

#[test]
fn a_daemon_that_came_in_while_the_lock_file_was_removed_is_named() {
    let dir = runtime_dir();
    let mut lock = acquire(dir.path(), holder("/tmp/one")).unwrap();
    std::fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    let second = acquire(dir.path(), holder("/tmp/two")).unwrap();
    let fault = lock.reacquire_if_removed().unwrap_err().to_string();
    assert!(fault.contains("state directory \"/tmp/two\""), "{fault}");
    drop(second);
    assert!(lock.reacquire_if_removed().unwrap(), "the lock is taken again after its end");
}

#[test]
fn the_next_daemon_knows_where_the_one_before_made_a_journal_in_this_boot() {
    let dir = runtime_dir();
    let take = |state_dir| acquire(dir.path(), holder(state_dir)).unwrap();
    assert_eq!(take("/tmp/one").earlier_state_dir("boot"), None, "the first start");
    assert_eq!(take("/tmp/one").earlier_state_dir("boot"), None, "the start before failed without a journal");
    take("/tmp/one").record_journal("boot", true).unwrap();
    let lock = take("/tmp/two");
    assert_eq!(lock.earlier_state_dir("boot"), Some(Path::new("/tmp/one")));
    assert_eq!(lock.earlier_state_dir("later"), None, "no process of that boot lives");
    drop(lock);
    let released = LockHolder::for_this_process(None, Path::new("/tmp/three"));
    drop(acquire(dir.path(), released).unwrap());
    let mut lock = take("/tmp/two");
    let earlier = lock.earlier_state_dir("boot");
    assert_eq!(earlier, Some(Path::new("/tmp/one")), "two processes made no journal since");
    lock.record_journal("boot", true).unwrap();
    assert_eq!(lock.earlier_state_dir("boot"), None);
    drop(lock);
    let mut lock = take("/tmp/one");
    assert_eq!(lock.earlier_state_dir("boot"), Some(Path::new("/tmp/two")));
    lock.forget_journal().unwrap();
    drop(lock);
    assert_eq!(take("/tmp/one").earlier_state_dir("boot"), None, "everything was undone");
}

#[test]
fn a_removed_lock_file_that_is_made_again_still_names_the_journal() {
    let dir = runtime_dir();
    let mut lock = acquire(dir.path(), holder("/tmp/one")).unwrap();
    lock.record_journal("boot", true).unwrap();
    std::fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    assert!(lock.reacquire_if_removed().unwrap());
    drop(lock);
    let next = acquire(dir.path(), holder("/tmp/two")).unwrap();
    assert_eq!(next.earlier_state_dir("boot"), Some(Path::new("/tmp/one")));
}

#[test]
fn a_daemon_of_an_earlier_version_is_refused_and_its_journal_is_known_after_its_end() {
    let (dir, older) = (runtime_dir(), runtime_dir());
    // An earlier version writes neither the field `earlier_journal` nor another directory.
    let path = older.path().join(FILE_NAME);
    let text = format!(
        r#"{{"pid":{},"socket":"/s","state_dir":"/tmp/one","journal_of_boot":"boot"}}"#,
        std::process::id()
    );
    std::fs::write(&path, text).unwrap();
    let of_earlier_version =
        Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusiveNonblock).unwrap();
    let (usual, former) = (dir.path().to_owned(), vec![older.path().to_owned()]);
    let dirs = LockDirectories { usual, lasting: None, former };
    let start = || DaemonLock::acquire(&dirs, holder("/tmp/two"));
    let refusal = start().unwrap_err().to_string();
    assert!(refusal.contains("state directory \"/tmp/one\""), "{refusal}");
    drop(of_earlier_version);
    let lock = start().unwrap();
    assert_eq!(lock.earlier_state_dir("boot"), Some(Path::new("/tmp/one")));
    let again = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusiveNonblock);
    assert!(again.is_err(), "an earlier version is refused while this one runs");
    drop(lock);
    std::fs::remove_dir_all(older.path()).unwrap();
    let earlier = start().unwrap();
    assert_eq!(earlier.earlier_state_dir("boot"), Some(Path::new("/tmp/one")), "also without the old file");
    assert!(!older.path().exists(), "no file is made for earlier versions");
}

#[test]
fn a_daemon_is_refused_while_one_runs_that_started_before_the_login_or_the_logout_of_the_user() {
    let (above, run) = (runtime_dir(), runtime_dir());
    let lasting = above.path().join("lasting");
    let logged_out = directories_of_user(None, &lasting);
    let logged_in = directories_of_user(Some(run.path()), &lasting);
    let start = |dirs: &LockDirectories, state_dir| DaemonLock::acquire(dirs, holder(state_dir));
    let check_refused = |dirs: &LockDirectories, running: &str| {
        let refusal = start(dirs, "/tmp/second").unwrap_err().to_string();
        assert!(refusal.contains(&format!("state directory \"{running}\"")), "{refusal}");
    };
    let of_cron = start(&logged_out, "/tmp/of cron").unwrap();
    check_refused(&logged_in, "/tmp/of cron");
    drop(of_cron);
    let of_session = start(&logged_in, "/tmp/of session").unwrap();
    check_refused(&logged_in, "/tmp/of session");
    std::fs::remove_dir_all(run.path()).unwrap();
    check_refused(&logged_out, "/tmp/of session");
    std::fs::create_dir(run.path()).unwrap();
    check_refused(&logged_in, "/tmp/of session");
    drop(of_session);
    start(&logged_out, "/tmp/second").unwrap();
}

#[test]
fn after_a_logout_the_next_daemon_knows_where_the_one_before_made_its_journal() {
    let (above, run) = (runtime_dir(), runtime_dir());
    let lasting = above.path().join("lasting");
    let logged_in = directories_of_user(Some(run.path()), &lasting);
    let mut lock = DaemonLock::acquire(&logged_in, holder("/tmp/one")).unwrap();
    lock.record_journal("boot", true).unwrap();
    drop(lock);
    std::fs::remove_dir_all(run.path()).unwrap();
    let next = DaemonLock::acquire(&directories_of_user(None, &lasting), holder("/tmp/two")).unwrap();
    assert_eq!(next.earlier_state_dir("boot"), Some(Path::new("/tmp/one")));
}

#[test]
fn after_a_logout_the_next_daemon_misses_no_journal_of_one_that_left_nothing_to_undo() {
    let (above, run) = (runtime_dir(), runtime_dir());
    let lasting = above.path().join("lasting");
    let logged_in = directories_of_user(Some(run.path()), &lasting);
    let mut lock = DaemonLock::acquire(&logged_in, holder("/tmp/one")).unwrap();
    lock.record_journal("boot", true).unwrap();
    lock.forget_journal().unwrap();
    drop(lock);
    std::fs::remove_dir_all(run.path()).unwrap();
    std::fs::create_dir(run.path()).unwrap();
    let next = DaemonLock::acquire(&logged_in, holder("/tmp/one")).unwrap();
    assert_eq!(next.earlier_state_dir("boot"), None);
}

#[test]
fn a_removed_file_in_the_lasting_directory_is_made_again_also_after_the_logout() {
    let (above, run) = (runtime_dir(), runtime_dir());
    let lasting = above.path().join("lasting");
    let logged_out = directories_of_user(None, &lasting);
    let logged_in = directories_of_user(Some(run.path()), &lasting);
    let mut lock = DaemonLock::acquire(&logged_in, holder("/tmp/one")).unwrap();
    let paths: Vec<PathBuf> = lock.paths().map(Path::to_owned).collect();
    assert_eq!(paths, [logged_in.usual.join(FILE_NAME), lasting.join(FILE_NAME)]);
    assert!(!lock.reacquire_if_removed().unwrap(), "nothing happened");
    std::fs::remove_dir_all(&lasting).unwrap();
    assert!(lock.reacquire_if_removed().unwrap());
    let start = || DaemonLock::acquire(&logged_out, holder("/tmp/two"));
    assert!(matches!(start(), Err(LockError::Held { .. })));
    std::fs::remove_dir_all(run.path()).unwrap();
    std::fs::remove_dir_all(&lasting).unwrap();
    assert!(lock.reacquire_if_removed().unwrap(), "the usual file is not missed");
    assert!(matches!(start(), Err(LockError::Held { .. })));
    std::fs::remove_dir_all(&lasting).unwrap();
    let second = start().unwrap();
    let fault = lock.reacquire_if_removed().unwrap_err().to_string();
    assert!(fault.contains("state directory \"/tmp/two\""), "the second daemon is named: {fault}");
    drop(second);
}

#[test]
fn what_another_user_puts_in_place_of_the_lasting_directory_keeps_no_logged_in_user_from_starting() {
    let (above, run) = (runtime_dir(), runtime_dir());
    let lasting = above.path().join("lasting");
    let target = above.path().join("target");
    let logged_out = directories_of_user(None, &lasting);
    let logged_in = directories_of_user(Some(run.path()), &lasting);
    let check_starts = |what: &str| {
        let mut lock = DaemonLock::acquire(&logged_in, holder("/tmp/one")).expect(what);
        assert!(!lock.reacquire_if_removed().expect(what), "{what}");
        assert_eq!(lock.paths().count(), 1, "{what} is not watched");
        let refused = DaemonLock::acquire(&logged_out, holder("/tmp/two"));
        assert!(matches!(refused, Err(LockError::Unusable { .. })), "{what}");
        lock
    };
    std::fs::create_dir(&target).unwrap();
    symlink(&target, &lasting).unwrap();
    check_starts("a link");
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0, "no file was made through the link");
    std::fs::remove_file(&lasting).unwrap();
    nix::unistd::mkfifo(&lasting, Mode::S_IRWXU).unwrap();
    let mut lock = check_starts("a pipe");
    if Uid::effective().is_root() {
        drop(lock);
        std::fs::remove_file(&lasting).unwrap();
        std::fs::create_dir(&lasting).unwrap();
        std::os::unix::fs::chown(&lasting, Some(65_534), None).unwrap();
        lock = check_starts("a directory of another user");
        std::fs::remove_dir(&lasting).unwrap();
    } else {
        std::fs::remove_file(&lasting).unwrap();
    }
    assert!(!lock.reacquire_if_removed().unwrap(), "no file of this daemon was removed");
    let refused = DaemonLock::acquire(&logged_out, holder("/tmp/two"));
    assert!(matches!(refused, Err(LockError::Held { .. })), "the daemon has locked it meanwhile");
}

#[test]
fn a_pipe_a_link_or_a_directory_in_place_of_the_lock_file_is_refused_at_once() {
    let dir = runtime_dir();
    let path = dir.path().join(FILE_NAME);
    let refusal = || acquire(dir.path(), holder("/tmp/one")).unwrap_err().to_string();
    nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
    assert!(refusal().contains("it is not a regular file; remove it"), "{}", refusal());
    std::fs::remove_file(&path).unwrap();
    let target = dir.path().join("target");
    symlink(&target, &path).unwrap();
    assert!(refusal().contains("it is a symbolic link; remove it"), "{}", refusal());
    assert!(!target.exists(), "no file was made through the link");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(refusal().contains(&format!("can't lock {}", path.display())), "{}", refusal());
}

#[test]
fn a_lock_directory_of_another_user_is_refused_with_its_owner_and_a_remedy_that_helps() {
    let dir = runtime_dir();
    let squatted = dir.path().join("lock");
    std::fs::create_dir(&squatted).unwrap();
    let squatted = if Uid::effective().is_root() {
        std::os::unix::fs::chown(&squatted, Some(65_534), None).unwrap();
        squatted
    } else {
        PathBuf::from("/proc")
    };
    let refusal = acquire(&squatted, holder("/tmp/one")).unwrap_err().to_string();
    let owner = std::fs::metadata(&squatted).unwrap().uid();
    assert!(refusal.contains(&format!("belongs to user {owner}, not to user")), "{refusal}");
    assert!(refusal.contains("administrator") && !refusal.contains("--"), "{refusal}");
    std::fs::write(dir.path().join("file"), "").unwrap();
    let refusal = acquire(&dir.path().join("file"), holder("/tmp/one")).unwrap_err().to_string();
    assert!(refusal.contains("is not a directory; remove it"), "{refusal}");
}

#[test]
fn the_remedy_for_an_unusable_lock_file_fits_the_error() {
    for (errno, remedy) in [
        (Errno::ENOSPC, "free space"),
        (Errno::EMFILE, "limit of open files"),
        (Errno::EACCES, "make its directory writable"),
    ] {
        assert!(remedy_of(&errno.into()).contains(remedy), "{errno}");
    }
}

#[test]
fn the_rest_of_an_earlier_text_behind_the_text_of_a_lock_file_is_ignored() {
    let dir = runtime_dir();
    let path = dir.path().join("stored");
    let holder = holder("/tmp/one");
    write(&File::create(&path).unwrap(), &holder).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}:\"boot\"}}}}\n")).unwrap();
    assert_eq!(LockHolder::read(&File::open(&path).unwrap()), Some(holder.clone()));
    write(&File::options().write(true).open(&path).unwrap(), &holder).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn a_lock_file_is_readable_by_its_owner_only_and_one_without_a_name_is_refused_too() {
    let dir = runtime_dir();
    let path = dir.path().join(FILE_NAME);
    std::fs::write(&path, "{torn").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    let lock = acquire(dir.path(), holder("/tmp/one")).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    lock.file.set_len(0).unwrap();
    let refusal = acquire(dir.path(), holder("/tmp/two")).unwrap_err().to_string();
    assert!(refusal.contains("another pjwd runs") && !refusal.contains("process"), "{refusal}");
}
