//! One daemon serves a machine or a user. Another one runs beside it only with `--beside`, with cgroups of its own.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::unistd::Uid;
use pjw_core::cpuset_group::CgroupCreator;
use pjw_core::own_cgroups::CgroupPlace;
use pjw_ipc::client::lock_dir;
use pjw_ipc::wire::Status;
use pjw_tests::cpusets::cgroup_of_process;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::private_daemon::PrivateDaemon;
use pjw_tests::programs::{program_dir, program_path};
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{KillOnDrop, Shell, has_cpusets, has_two_cores, masks};

fn status(daemon: &PrivateDaemon) -> Status {
    let mut reply: Value = daemon.call("GetStatus", &json!({})).unwrap();
    serde_json::from_value(reply["status"].take()).unwrap()
}

#[test]
fn two_daemons_beside_each_other_keep_jobs_of_one_name_in_cgroups_of_their_own() {
    if !has_two_cores() || !has_cpusets() {
        return;
    }
    let first = Daemon::start_with(Enforcement::Cpuset, "");
    let mut second = PrivateDaemon::new(program_dir(), "enforcement = \"cpuset\"\n").unwrap();
    second.start(&[], || Ok::<(), io::Error>(())).unwrap();
    let shells = [Shell::start(), Shell::start()];
    let before = masks(&shells.each_ref().map(Shell::pid));
    let job = first.job_id("a");
    let mut cgroups = Vec::new();
    for (daemon, shell) in [&*first, &second].into_iter().zip(&shells) {
        let request = json!({ "job": job, "cores": 1, "pids": [shell.pid()] });
        daemon.call::<Value>("Assign", &request).unwrap();
        let own = daemon.own_cgroups().unwrap();
        let cgroup = own.job_path(&job.parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Usual);
        daemon.check_after_reply(&job, &Some(cgroup.clone()), || cgroup_of_process(shell.pid()));
        let warnings = status(daemon).warnings;
        let warning = warnings.iter().find(|warning| warning.code == "beside").unwrap();
        assert!(warning.text.contains(&own.default_parent_path()), "{warning:?}");
        cgroups.push(cgroup);
    }
    assert_ne!(cgroups[0], cgroups[1]);
    // The end of one leaves the cpusets of the other, and each release restores what was there.
    let remaining = || pjw_tests::cpusets::remaining_cgroups(first.tag());
    second.call::<Value>("Release", &json!({ "job": job })).unwrap();
    second.check_after_reply(&job, &1, || remaining().len());
    second.kill();
    assert_eq!(cgroup_of_process(shells[0].pid()).as_ref(), Some(&cgroups[0]));
    first.release("a").unwrap();
    first.check_after_reply(&job, &before, || masks(&shells.each_ref().map(Shell::pid)));
    first.check_after_reply(&job, &Vec::<PathBuf>::new(), remaining);
}

/// Returns the path of the lock of this user, or of the machine for root.
fn lock_path() -> PathBuf {
    lock_dir(Uid::effective().as_raw()).join("warden.lock")
}

/// Returns the command that starts a daemon in the directory of a private one, but alone.
fn alone(private: &PrivateDaemon) -> Command {
    let mut command = Command::new(program_path("pjwd"));
    command.args(private.command().get_args().filter(|argument| *argument != "--beside"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A daemon that runs alone. It is killed when this value is dropped.
struct Lone(Child);

impl Drop for Lone {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Lone {
    /// Starts the daemon and waits until it answers. `None`, with a report, if another daemon serves this machine or
    /// user.
    fn start(private: &PrivateDaemon) -> Option<Self> {
        let mut lone = Self(alone(private).spawn().unwrap());
        let answers = wait_for("the daemon answers or ends", || {
            let has_ended = lone.0.try_wait().unwrap().is_some();
            let answers = private.call::<Value>("GetStatus", &json!({})).is_ok();
            (has_ended || answers).then_some(answers)
        });
        if answers {
            return Some(lone);
        }
        let mut stderr = String::new();
        io::Read::read_to_string(&mut lone.0.stderr.take().unwrap(), &mut stderr).unwrap();
        assert!(stderr.contains("another pjwd runs"), "{stderr}");
        skip(format_args!("{stderr}"));
        None
    }
}

/// Checks that a second daemon or `pjwd --release-all` is refused. The line names the first daemon and has `remedy`.
fn check_refused(refused: &Output, first: &Lone, private: &PrivateDaemon, remedy: &str) {
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!((refused.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    let named = format!(
        "process {}, socket {:?}, state directory {:?}",
        first.0.id(),
        private.socket(),
        private.state_dir()
    );
    assert!(stderr.contains(&named) && stderr.contains("stop it") && stderr.contains(remedy), "{stderr}");
}

fn release_all_alone(state_dir: &Path) -> Output {
    let mut command = Command::new(program_path("pjwd"));
    command.args(["--release-all", "--state-dir"]).arg(state_dir).output().unwrap()
}

#[test]
fn a_second_daemon_is_refused_and_the_first_is_named_until_the_first_is_killed() {
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut private = Daemon::start("");
    private.stop();
    let other = PrivateDaemon::new(program_dir(), "").unwrap();
    let Some(first) = Lone::start(&private) else { return };
    check_refused(&alone(&other).output().unwrap(), &first, &private, "--beside");
    assert!(!other.socket().exists() && !other.state_dir().join("journal.jsonl").exists());
    let release = format!("pjwctl release --all --socket {}", private.socket().display());
    check_refused(&release_all_alone(&other.state_dir()), &first, &private, &release);
    check_refused(&release_all_alone(&private.state_dir()), &first, &private, &release);
    assert!(!status(&private).warnings.iter().any(|warning| warning.code == "beside"));

    // The lock file is removed: the daemon makes it again.
    std::fs::remove_file(lock_path()).unwrap();
    wait_until("the lock is there again", || std::fs::read(lock_path()).is_ok_and(|text| !text.is_empty()));
    check_refused(&alone(&other).output().unwrap(), &first, &private, "--beside");
    if Uid::effective().is_root() {
        let mut flock = Command::new("flock");
        flock.arg("--nonblock").arg(lock_path()).arg("true").uid(65_534).gid(65_534);
        assert!(!flock.output().unwrap().status.success(), "another user can't take the lock");
    }
    drop(first);
    assert!(Lone::start(&other).is_some(), "the lock ends with the process");
}

/// Whether the status names the mask of a process as one that an earlier daemon may have set.
fn names_mask_of(private: &PrivateDaemon, pid: u32) -> bool {
    let warnings = status(private).warnings.into_iter().filter(|warning| warning.code == "unknown-masks");
    let pid = pid.to_string();
    warnings
        .flat_map(|warning| warning.text.split([' ', ',']).map(str::to_owned).collect::<Vec<_>>())
        .any(|word| word == pid)
}

#[test]
fn a_daemon_that_starts_without_the_journal_of_the_one_before_names_the_masks_that_it_can_not_know() {
    if !has_two_cores() {
        return;
    }
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut private = Daemon::start("");
    private.stop();
    private.configure("enforcement = \"affinity\"\ninterval = \"50ms\"\nrescan_interval = \"200ms\"\n");
    let mut shell = Shell::start();
    let pid = shell.pid();
    let Some(first) = Lone::start(&private) else { return };
    let names_mask = |private: &PrivateDaemon| names_mask_of(private, pid);
    private.assign("a", 1, &[pid]).unwrap();
    drop(first);
    let kept = Lone::start(&private).unwrap();
    assert!(private.job("a").is_some() && !names_mask(&private), "the journal is there");
    drop(kept);
    std::fs::remove_dir_all(private.state_dir()).unwrap();
    let next = Lone::start(&private).unwrap();
    assert!(private.job("a").is_none());
    wait_until("the mask is named", || names_mask(&private));
    let child = shell.background("sleep 1000");
    let orphan: u32 = shell.run("(sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!')").parse().unwrap();
    let (_ends, all) = ([KillOnDrop(child), KillOnDrop(orphan)], [pid, child, orphan]);
    wait_until("the children are named", || all.iter().all(|pid| names_mask_of(&private, *pid)));
    drop(next);
    let later = Lone::start(&private).unwrap();
    wait_until("a later daemon names them", || all.iter().all(|pid| names_mask_of(&private, *pid)));
    drop(later);
    let released = release_all_alone(&private.state_dir());
    let text = String::from_utf8_lossy(&released.stderr).into_owned();
    assert!(released.status.success(), "{released:?}");
    assert!(all.iter().all(|pid| text.contains(&format!(" {pid} widens it"))), "{text}");
}

#[test]
fn a_daemon_with_another_state_directory_says_where_the_records_of_the_one_before_are() {
    if !has_two_cores() {
        return;
    }
    // It also keeps the other tests of this program from starting a daemon meanwhile.
    let mut private = Daemon::start("");
    private.stop();
    private.configure("enforcement = \"affinity\"\n");
    let other = PrivateDaemon::new(program_dir(), "enforcement = \"affinity\"\n").unwrap();
    let shell = Shell::start();
    let Some(first) = Lone::start(&private) else { return };
    private.assign("a", 1, &[shell.pid()]).unwrap();
    drop(first);
    let next = Lone::start(&other).unwrap();
    wait_until("the mask is named", || names_mask_of(&other, shell.pid()));
    let warnings = status(&other).warnings;
    let warning = warnings.iter().find(|warning| warning.code == "other-state-directory").unwrap();
    let remedy = format!("start pjwd with --state-dir {}", private.state_dir().display());
    assert!(warning.remedy.contains(&remedy), "{warning:?}");
    drop(next);
    let elsewhere = tempfile::tempdir().unwrap();
    let command = format!("pjwd --release-all --state-dir {}", other.state_dir().display());
    for asked in [elsewhere.path().to_owned(), private.state_dir()] {
        let released = release_all_alone(&asked);
        let text = String::from_utf8_lossy(&released.stderr).into_owned();
        assert!(released.status.success() && text.contains(&command), "{text}");
    }
}
