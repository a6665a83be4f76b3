//! The CPUs of a job, as pjwd publishes them to the programs in it, and the number of cores that they ask for.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_job::{Cores, CoresSource, Job};
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::permissions::programs_are_reachable;
use crate::processes::{Shell, has_two_cores, is_root};

const NOBODY: u32 = 65_534;
const OTHER: u32 = 65_533;
/// Longer than any test waits.
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

fn directory(daemon: &Daemon, job: &str) -> PathBuf {
    daemon.state_dir().join("jobs").join(daemon.job_id(job))
}

fn open(daemon: &Daemon, job: &str) -> Job {
    let job = Job::in_directory(&directory(daemon, job));
    assert_eq!(job.cores().source, CoresSource::CoreMap);
    job
}

fn read(daemon: &Daemon, job: &str, file: &str) -> String {
    fs::read_to_string(directory(daemon, job).join(file)).unwrap()
}

/// The warnings of the status with this code.
fn warnings(daemon: &Daemon, code: &str) -> Vec<String> {
    let warnings = daemon.status().warnings.into_iter().filter(|warning| warning.code == code);
    warnings.map(|warning| warning.text).collect()
}

fn wait_for_wants(daemon: &Daemon, job: &str, wants: Option<u32>) {
    wait_for("the wanted cores are in the status", || daemon.job(job).filter(|job| job.wants == wants));
}

#[test]
fn a_resize_changes_the_core_map_and_wakes_the_program_that_waits() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let shell = Shell::start();
    let granted = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let job = open(&daemon, "a");
    let first = job.cores();
    assert_eq!((&first.cpus, &first.own, first.core_count), (&granted, &granted, 1));
    assert_eq!(read(&daemon, "a", "cpus"), format!("{granted}\n"));
    let resize = |cores: &str, before: &Cores| -> (CpuSet, Cores) {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| job.wait_for_change(before.epoch, TIMEOUT).unwrap());
            let output = daemon.pjwctl(&["assign", &daemon.job_id("a"), "--cores", cores, "--json"]);
            let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
            (reply["cpus"].as_str().unwrap().parse().unwrap(), waiting.join().unwrap())
        })
    };
    let (cpus, wider) = resize("2", &first);
    assert_eq!((&wider.cpus, wider.core_count, wider.epoch), (&cpus, 2, first.epoch + 1));
    let (cpus, narrower) = resize("1", &wider);
    assert_eq!((&narrower.cpus, narrower.core_count), (&cpus, 1));
    let json: Value = serde_json::from_str(&read(&daemon, "a", "coremap.json")).unwrap();
    let expected = json!({ "schema": 1, "epoch": narrower.epoch, "cpus": cpus.to_string(), "own": cpus.to_string(),
        "borrowed": "", "leaving": "", "leaving_at_ns": null, "lent": "", "cores": 1 });
    assert_eq!(json, expected);
    daemon.assign("a", 1, &[]).unwrap();
    assert_eq!(
        job.wait_for_change(narrower.epoch, Some(Duration::from_millis(1))),
        None,
        "the same request changes nothing"
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| job.wait_for_change(narrower.epoch, TIMEOUT).unwrap());
        daemon.release("a").unwrap();
        assert_eq!(waiting.join().unwrap().source, CoresSource::AffinityMask);
    });
    assert!(!directory(&daemon, "a").exists());
}

#[test]
fn a_command_of_run_and_each_instance_of_spawn_find_the_core_map_of_their_job() {
    let daemon = Daemon::start("");
    let script = "cat \"$PJW_JOB_DIR/cpus\"; echo \"$PJW_CPUS\"";
    let job_id = daemon.job_id("a");
    for verb in [&["run", "--cores", "1"][..], &["spawn", "-n", "1"]] {
        let arguments = [verb, &["--job", &job_id, "--", "sh", "-c", script]].concat();
        let output = daemon.pjwctl(&arguments);
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() == 2 && lines[0] == lines[1] && !lines[0].is_empty(), "{verb:?}: {output:?}");
        wait_for("the job ends with its command", || daemon.job("a").is_none().then_some(()));
        assert!(!directory(&daemon, "a").exists());
    }
}

#[test]
fn the_number_of_cores_that_a_program_asks_for_is_shown_and_limited() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let job = open(&daemon, "a");
    assert_eq!(daemon.job("a").unwrap().wants, None);
    job.set_wanted_cores(0).unwrap();
    wait_for_wants(&daemon, "a", Some(0));
    job.set_wanted_cores(64).unwrap();
    wait_for_wants(&daemon, "a", Some(1));
    let explained = daemon.pjwctl(&["explain", &daemon.job_id("a")]);
    let explained = String::from_utf8(explained.stdout).unwrap().replace('\n', " ");
    assert!(explained.contains("it wants 1 of at most 1 core at present (64 were asked for)"), "{explained}");
    assert_eq!(daemon.log().matches("wants 64 cores in its file want and may have 1").count(), 1);
    job.reset_wanted_cores().unwrap();
    wait_for_wants(&daemon, "a", None);
    let told = daemon.pjwctl(&["want", &daemon.job_id("a"), "9"]);
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("wants 1 core (9 were asked for, and it may have 1)"), "{told}");
    assert_eq!(read(&daemon, "a", "want"), "9\n", "the file shows what is in force");
    let unknown = daemon.pjwctl(&["want", "nothing", "1"]);
    assert!(unknown.status.code() == Some(1) && String::from_utf8_lossy(&unknown.stderr).contains("no job"));
}

/// Writes a file without emptying it first. An empty file `want` counts after a while, and on a busy machine this
/// process may not run for that long before it writes.
fn write_without_emptying(file: &Path, bytes: &[u8]) {
    File::options().write(true).open(file).unwrap().write_all(bytes).unwrap();
}

#[test]
fn rubbish_in_the_file_of_wanted_cores_is_one_warning_and_a_flood_is_coalesced() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let want = directory(&daemon, "a").join("want");
    fs::write(&want, "1").unwrap();
    wait_for_wants(&daemon, "a", Some(1));
    let rubbish: [&[u8]; 4] = [b"lots", &[0xff, 0], b"-1", &[b'1'; 1_000_000]];
    for bytes in rubbish {
        write_without_emptying(&want, bytes);
        wait_for("the warning", || (warnings(&daemon, "want").len() == 1).then_some(()));
        assert_eq!(daemon.job("a").unwrap().wants, Some(1), "the last number stays");
        fs::write(&want, "1").unwrap();
        wait_for("the warning ends", || warnings(&daemon, "want").is_empty().then_some(()));
        // It also ends while the file is empty.
        wait_for_wants(&daemon, "a", Some(1));
    }
    assert_eq!(fs::metadata(&want).unwrap().len(), 1);
    let begun = Instant::now();
    for number in 0..2000 {
        fs::write(&want, (number % 2).to_string()).unwrap();
    }
    fs::write(&want, "0").unwrap();
    wait_for_wants(&daemon, "a", Some(0));
    let records = fs::read_to_string(daemon.state_dir().join("journal.jsonl")).unwrap();
    let recorded = records.lines().filter(|line| line.contains("wanted_cores")).count();
    // The daemon reads the file at most twice in 200 ms: the second time if it was empty. Each write empties the file,
    // and may wait for the disk until the number before is written back. So the writes may take many seconds.
    let readings = begun.elapsed().as_millis() / 100;
    assert!(u128::try_from(recorded).unwrap() < 100 + readings, "{recorded} of 2000 numbers were planned");
}

#[test]
fn a_killed_daemon_leaves_the_core_map_and_the_next_one_goes_on_with_it() {
    let mut daemon = Daemon::start("");
    let (stays, ends) = (Shell::start(), Shell::start());
    let cpus = daemon.assign("stays", 1, &[stays.pid()]).unwrap();
    if has_two_cores() {
        daemon.assign("ends", 1, &[ends.pid()]).unwrap();
    }
    let job = open(&daemon, "stays");
    job.set_wanted_cores(0).unwrap();
    wait_for_wants(&daemon, "stays", Some(0));
    let before = job.cores();
    daemon.kill();
    drop(ends);
    assert_eq!(job.cores(), before, "jobs keep their cores without a daemon");
    fs::write(directory(&daemon, "stays").join("cpus"), "rubbish").unwrap();
    job.set_wanted_cores(1).unwrap();
    daemon.spawn();
    assert_eq!(job.cores(), before, "and with the next one");
    wait_for_wants(&daemon, "stays", Some(1));
    assert_eq!(read(&daemon, "stays", "cpus"), format!("{cpus}\n"));
    wait_for("the files of the job that ended are removed", || {
        (!directory(&daemon, "ends").exists()).then_some(())
    });
    daemon.kill();
    daemon.spawn();
    assert_eq!(daemon.job("stays").unwrap().wants, Some(1), "the number is in the journal");
    daemon.kill();
    assert!(daemon.release_all_command().output().unwrap().status.success());
    assert!(!daemon.state_dir().join("jobs").exists());
    assert_eq!(job.cores().source, CoresSource::AffinityMask);
}

#[test]
fn removed_files_of_a_job_are_made_again() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let job = open(&daemon, "a");
    // A daemon that runs may make files again while others are removed.
    daemon.while_stopped(|| fs::remove_dir_all(daemon.state_dir().join("jobs")).unwrap());
    wait_for("the files are there again", || directory(&daemon, "a").join("want").exists().then_some(()));
    wait_for("the program has the new map", || (job.cores().source == CoresSource::CoreMap).then_some(()));
    assert_eq!(job.cores().cpus, cpus);
    let target = daemon.dir().join("precious");
    fs::write(&target, "precious").unwrap();
    let want = directory(&daemon, "a").join("want");
    daemon.while_stopped(|| {
        fs::remove_file(&want).unwrap();
        std::os::unix::fs::symlink(&target, &want).unwrap();
    });
    wait_for("the link is replaced", || (!want.is_symlink() && want.exists()).then_some(()));
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
}

#[test]
fn a_daemon_that_only_watches_publishes_no_core_map() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    assert!(directory(&daemon, "a").exists());
    daemon.configure("mode = \"observe\"\n");
    daemon.call::<Value>("Reload", &json!({})).unwrap();
    assert!(!directory(&daemon, "a").exists());
    daemon.configure("mode = \"enforce\"\n");
    daemon.call::<Value>("Reload", &json!({})).unwrap();
    assert!(directory(&daemon, "a").exists());
}

fn run_as(uid: u32, command: &mut Command) -> Output {
    command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).output().unwrap()
}

#[test]
fn only_the_owner_writes_the_wanted_cores_and_all_users_read_the_core_map() {
    if !is_root() || !programs_are_reachable() || !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("user_max_cores = 1\n");
    fs::set_permissions(daemon.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("sh");
    command.uid(NOBODY).gid(NOBODY);
    let shell = Shell::from_command(command);
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let directory = directory(&daemon, "a");
    let want = fs::metadata(directory.join("want")).unwrap();
    assert_eq!((want.uid(), want.mode() & 0o7777), (NOBODY, 0o600));
    let sh = |uid: u32, script: &str| {
        let output = run_as(uid, Command::new("sh").args(["-c", script]).env("D", &directory));
        output.status.success()
    };
    for uid in [NOBODY, OTHER] {
        for file in ["cpus", "coremap.json", "coremap"] {
            assert!(sh(uid, &format!("cat \"$D/{file}\"")), "{uid} reads {file}");
            assert!(!sh(uid, &format!("echo 0 >>\"$D/{file}\"")), "{uid} writes {file}");
        }
        for script in
            ["rm -f \"$D/cpus\"", "mv \"$D/want\" \"$D/other\"", "touch \"$D/new\"", "ln -sf / \"$D/want\""]
        {
            assert!(!sh(uid, script), "{uid}: {script}");
        }
    }
    assert!(!sh(OTHER, "echo 0 >\"$D/want\"") && !sh(OTHER, "cat \"$D/want\""));
    assert!(sh(NOBODY, "echo 0 >\"$D/want\""));
    wait_for_wants(&daemon, "a", Some(0));
    let (id, pjwctl) =
        (daemon.job_id("a"), |uid: u32, args: &[&str]| run_as(uid, &mut daemon.pjwctl_command(args)));
    let refused = pjwctl(OTHER, &["want", &id, "1"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("belongs to user"), "{refused:?}");
    assert!(pjwctl(NOBODY, &["want", &id, "1"]).status.success());
    wait_for_wants(&daemon, "a", Some(1));
}

/// A file system with a limit of files is full in the same way as one without space, and its size is exact.
#[test]
fn a_full_file_system_is_a_warning_and_the_page_is_still_written() {
    if !is_root() || !has_two_cores() {
        return;
    }
    let possible = Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        return skip("no mount namespace can be made here");
    }
    // The state directory, two files of the journal, the directories of the jobs, four files of one job, and one more.
    let script = "state=$(eval echo \\${$#}); mkdir -p \"$state\" && mount -t tmpfs -o nr_inodes=11 none \"$state\" && \
                  exec \"$0\" \"$@\"";
    let daemon = Daemon::start_by(&["unshare", "--mount", "sh", "-c", script]);
    let inside = |path: PathBuf| {
        let root = PathBuf::from(format!("/proc/{}/root", daemon.pid()));
        root.join(path.strip_prefix("/").unwrap())
    };
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let state = inside(daemon.state_dir());
    let job = Job::in_directory(&inside(directory(&daemon, "a")));
    let before = job.cores();
    assert_eq!((before.source, warnings(&daemon, "core-map")), (CoresSource::CoreMap, vec![]));
    let mut fill = 0;
    while fs::write(state.join(format!("fill{fill}")), "").is_ok() {
        fill += 1;
        assert!(fill < 100, "the file system has a limit");
    }
    daemon.assign("a", 2, &[]).unwrap();
    assert_eq!(job.cores().core_count, 2, "the page needs no new file");
    let told = warnings(&daemon, "core-map");
    assert!(told.len() == 1 && told[0].contains("No space left"), "{told:?}");
    assert!(told[0].ends_with("its page coremap has the present ones"), "{told:?}");
    for number in 0..fill {
        fs::remove_file(state.join(format!("fill{number}"))).unwrap();
    }
    wait_for("a rescan writes the other files", || warnings(&daemon, "core-map").is_empty().then_some(()));
    let cpus = fs::read_to_string(inside(directory(&daemon, "a")).join("cpus")).unwrap();
    assert_eq!(cpus.trim().parse::<CpuSet>().unwrap(), job.cores().cpus);
}

/// A program of one job fills the small file system of the files by its file `want`.
#[test]
fn a_file_want_that_fills_the_file_system_does_not_stop_the_core_maps_of_other_jobs() {
    if !is_root() || !has_two_cores() {
        return;
    }
    let possible = Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        return skip("no mount namespace can be made here");
    }
    let script = "state=$(eval echo \\${$#}); mkdir -p \"$state\" && mount -t tmpfs -o size=2m none \"$state\" && \
                  exec \"$0\" \"$@\"";
    let daemon = Daemon::start_by(&["unshare", "--mount", "sh", "-c", script]);
    let inside = |path: PathBuf| {
        let root = PathBuf::from(format!("/proc/{}/root", daemon.pid()));
        root.join(path.strip_prefix("/").unwrap())
    };
    let shells = [Shell::start(), Shell::start()];
    daemon.assign("greedy", 1, &[shells[0].pid()]).unwrap();
    let want = inside(directory(&daemon, "greedy")).join("want");
    // The daemon would empty the file before the file system is full.
    daemon.while_stopped(|| {
        assert!(fs::write(&want, vec![b'1'; 4 << 20]).is_err(), "the file system has a limit");
    });
    daemon.assign("late", 1, &[shells[1].pid()]).unwrap();
    let cpus = || fs::read_to_string(inside(directory(&daemon, "late")).join("cpus")).ok();
    let granted = daemon.job("late").unwrap().cpus;
    wait_until("the new job has its files", || cpus().is_some_and(|cpus| cpus.trim() == granted));
    wait_until("the file is empty", || fs::metadata(&want).unwrap().len() == 0);
    assert!(!daemon.log().contains("can't be published"), "{}", daemon.log());
}
