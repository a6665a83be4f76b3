//! `pjwd --release-all`: what a dead daemon changed is put back without another one.

use std::process::{Command, Output};

use pjw_tests::daemon::{Daemon, Keeping};
use pjw_tests::programs::program;

use crate::processes::{EndOf, Shell, mask, masks, two_cores};

fn release_all(daemon: &Daemon) -> Output {
    let mut command = Command::new(program("pjwd"));
    command.arg("--release-all").arg("--state-dir").arg(daemon.state_dir()).output().unwrap()
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn release_all_restores_the_masks_after_a_kill_and_finds_nothing_the_second_time() {
    if !two_cores() {
        return;
    }
    for by in Keeping::all() {
        let mut daemon = Daemon::keeping(by, "interval = \"50ms\"\n");
        let mut shells = [Shell::start(), Shell::start()];
        let busy = shells[0].background("while :; do :; done");
        let own = shells[1].background("sleep 1000");
        let _ends = (EndOf(busy), EndOf(own));
        let last = mask(own).last().unwrap();
        pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(own), &last.into()).unwrap();
        let all = [shells[0].pid(), shells[1].pid(), busy, own];
        let before = masks(&all);
        daemon.assign("a", 1, &[shells[0].pid()]).unwrap();
        daemon.assign("b", 1, &[shells[1].pid()]).unwrap();
        assert_ne!(masks(&all), before);
        daemon.kill();

        let done = release_all(&daemon);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(
            words(&done.stdout),
            format!("{} released\n{} released\n", daemon.id("a"), daemon.id("b"))
        );
        assert_eq!(masks(&all), before);
        let again = release_all(&daemon);
        assert!(again.status.success() && again.stdout.is_empty() && again.stderr.is_empty(), "{again:?}");
        daemon.spawn();
        assert!(daemon.status().jobs.is_empty(), "what was released stays released");
        assert_eq!(masks(&all), before);
    }
}

#[test]
fn masks_that_processes_set_after_the_kill_are_kept() {
    if !two_cores() {
        return;
    }
    let mut daemon = Daemon::keeping(Keeping::Masks, "interval = \"50ms\"\n");
    let (tighter, wider) = (Shell::start(), Shell::start());
    let everything = mask(wider.pid());
    daemon.assign("a", 1, &[wider.pid(), tighter.pid()]).unwrap();
    daemon.kill();
    let own = everything.last().unwrap().into();
    pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(tighter.pid()), &own).unwrap();
    pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(wider.pid())).unwrap();
    let done = release_all(&daemon);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(mask(wider.pid()), everything);
    assert_eq!(mask(tighter.pid()), own, "what it chose since is its own");
    assert_eq!(words(&release_all(&daemon).stdout), "");
}

#[test]
fn release_all_is_refused_while_the_daemon_runs() {
    if !two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let refused = release_all(&daemon);
    assert_eq!(refused.status.code(), Some(1));
    let told = words(&refused.stderr);
    assert!(
        told.contains("another pjwd keeps its state there: stop it") && told.lines().count() == 1,
        "{told}"
    );
    assert_eq!(mask(shell.pid()), cpus);
}

#[test]
fn an_unused_state_directory_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    for state_dir in [dir.path().to_owned(), dir.path().join("missing")] {
        let mut command = Command::new(program("pjwd"));
        let done = command.arg("--release-all").arg("--state-dir").arg(&state_dir).output().unwrap();
        assert!(done.status.success() && done.stdout.is_empty(), "{done:?}");
        let told = words(&done.stderr);
        assert!(told.contains(&format!("nothing is recorded in {}", state_dir.display())), "{told}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
