//! `pjwd --release-all`: restores the masks after a killed daemon, without another daemon.

use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::Signal;
use pjw_ipc::client::Client;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::program_path;
use serde_json::{Value, json};

use crate::processes::{KillOnDrop, Shell, has_two_cores, mask, masks};

fn release_all(daemon: &Daemon) -> Output {
    daemon.release_all_command().output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn release_all_restores_the_masks_after_a_kill_and_finds_nothing_the_second_time() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let mut daemon = Daemon::start_with(enforcement, "interval = \"50ms\"\n");
        let mut shells = [Shell::start(), Shell::start()];
        let busy = shells[0].background("while :; do :; done");
        let own_mask = shells[1].background("sleep 1000");
        let _ends = (KillOnDrop(busy), KillOnDrop(own_mask));
        let last = mask(own_mask).last().unwrap();
        pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(own_mask), &last.into()).unwrap();
        let all = [shells[0].pid(), shells[1].pid(), busy, own_mask];
        let before = masks(&all);
        daemon.assign("a", 1, &[shells[0].pid()]).unwrap();
        daemon.assign("b", 1, &[shells[1].pid()]).unwrap();
        assert_ne!(masks(&all), before);
        daemon.kill();

        let done = release_all(&daemon);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(
            text(&done.stdout),
            format!("{} released\n{} released\n", daemon.job_id("a"), daemon.job_id("b"))
        );
        assert_eq!(masks(&all), before);
        let again = release_all(&daemon);
        assert!(again.status.success() && again.stdout.is_empty() && again.stderr.is_empty(), "{again:?}");
        daemon.spawn();
        assert!(daemon.status().jobs.is_empty(), "the released jobs are not found again");
        assert_eq!(masks(&all), before);
    }
}

#[test]
fn masks_that_processes_set_after_the_kill_are_kept() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start_with(Enforcement::Affinity, "interval = \"50ms\"\n");
    let (tighter, wider) = (Shell::start(), Shell::start());
    let everything = mask(wider.pid());
    daemon.assign("a", 1, &[wider.pid(), tighter.pid()]).unwrap();
    daemon.kill();
    let own_mask = everything.last().unwrap().into();
    pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(tighter.pid()), &own_mask).unwrap();
    pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(wider.pid())).unwrap();
    let done = release_all(&daemon);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(mask(wider.pid()), everything);
    assert_eq!(mask(tighter.pid()), own_mask, "a mask that the process has set is kept");
    assert_eq!(text(&release_all(&daemon).stdout), "");
}

#[test]
fn release_all_is_refused_while_the_daemon_runs() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let refused = release_all(&daemon);
    assert_eq!(refused.status.code(), Some(1));
    let stderr = text(&refused.stderr);
    let user = format!("in use by process {};", daemon.pid());
    let remedy = format!("pjwctl release --all --socket {}", daemon.socket().display());
    assert!(stderr.contains(&user) && stderr.contains(&remedy), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert_eq!(mask(shell.pid()), cpus);
}

#[test]
fn beside_a_daemon_that_is_stopped_by_a_signal_each_error_names_its_process_and_the_command_that_ends_it() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let mut daemon = Daemon::start_with(enforcement, "");
        let shell = Shell::start();
        let before = mask(shell.pid());
        let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let kill = format!("kill -9 {}", daemon.pid());
        daemon.while_stopped(|| {
            let refused = release_all(&daemon);
            assert_eq!(refused.status.code(), Some(1));
            let stderr = text(&refused.stderr);
            let user = format!("in use by process {}; that process is stopped by a signal", daemon.pid());
            assert!(stderr.contains(&user) && stderr.contains(&kill), "{stderr}");
            assert!(stderr.contains("jobs keep their cores meanwhile"), "{stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
            let client = Client::connect_with_timeout(&daemon.socket(), Duration::from_secs(1));
            let error = client.unwrap().call::<Value>("GetStatus", &json!({})).unwrap_err().to_string();
            let named = format!("(process {}, which is stopped by a signal) has not answered", daemon.pid());
            assert!(error.contains(&named) && error.contains(&kill), "{error}");
        });
        // As the named command does.
        daemon.signal(Signal::SIGSTOP);
        daemon.kill();
        assert_eq!(mask(shell.pid()), cpus);
        let done = release_all(&daemon);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(mask(shell.pid()), before);
    }
}

#[test]
fn release_all_refuses_a_journal_that_is_a_link_without_a_target_as_a_start_does() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/no/such/file", dir.path().join("journal.jsonl")).unwrap();
    let mut command = Command::new(program_path("pjwd"));
    let refused =
        command.args(["--beside", "--release-all", "--state-dir"]).arg(dir.path()).output().unwrap();
    let stderr = text(&refused.stderr);
    assert_eq!((refused.status.code(), stderr.lines().count()), (Some(1), 1), "{refused:?}");
    assert!(stderr.contains("journal.jsonl: it is a symbolic link; remove it"), "{stderr}");
}

#[test]
fn an_unused_state_directory_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    for state_dir in [dir.path().to_owned(), dir.path().join("missing")] {
        let mut command = Command::new(program_path("pjwd"));
        command.args(["--beside", "--release-all", "--state-dir"]);
        let done = command.arg(&state_dir).output().unwrap();
        assert!(done.status.success() && done.stdout.is_empty(), "{done:?}");
        let stderr = text(&done.stderr);
        assert!(stderr.contains(&format!("nothing is recorded in {}", state_dir.display())), "{stderr}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
