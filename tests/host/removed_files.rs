//! Files of the daemon that another program removes while the daemon runs, as a program that cleans up /tmp does.

use std::fs::{create_dir, remove_dir, remove_dir_all, remove_file, rename, write};

use pjw_ipc::client::Client;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{Shell, has_two_cores, mask, masks};

/// The line of the log after both files of the state directory were written again.
const MADE_AGAIN: &str = "files were removed from the state directory";

/// Waits until the daemon has both files in its state directory again, with all records. The log says so last.
fn wait_for_state(daemon: &Daemon) {
    wait_until("the files are there again", || {
        let names = ["journal.jsonl", "state.json"];
        names.iter().all(|name| daemon.state_dir().join(name).exists()) && line_count(daemon, MADE_AGAIN) > 0
    });
}

fn line_count(daemon: &Daemon, text: &str) -> usize {
    daemon.log().lines().filter(|line| line.contains(text)).count()
}

#[test]
fn a_removed_state_directory_is_made_again_and_every_mask_can_be_restored_after_a_kill() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start_with(Enforcement::Affinity, "rescan_interval = \"1h\"\n");
    let shells = [Shell::start(), Shell::start()];
    let pids = shells.each_ref().map(Shell::pid);
    let before = masks(&pids);
    daemon.assign("a", 1, &[pids[0]]).unwrap();
    // A daemon that runs may make files again while others are removed.
    daemon.while_stopped(|| remove_dir_all(daemon.state_dir()).unwrap());
    wait_for_state(&daemon);
    assert_eq!(line_count(&daemon, MADE_AGAIN), 1, "{}", daemon.log());
    // Without a wait: the directory is checked before each record is written.
    rename(daemon.state_dir(), daemon.dir().join("elsewhere")).unwrap();
    daemon.assign("b", 1, &[pids[1]]).unwrap();
    daemon.kill();
    assert_ne!(masks(&pids), before);
    let done = daemon.release_all_command().output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(masks(&pids), before, "{done:?}");
}

#[test]
fn one_removed_file_of_the_state_is_made_again() {
    if !has_two_cores() {
        return;
    }
    for name in ["journal.jsonl", "state.json"] {
        let mut daemon = Daemon::start_with(Enforcement::Affinity, "");
        let shell = Shell::start();
        let before = mask(shell.pid());
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        // A restart leaves the grant in state.json.
        daemon.stop();
        daemon.spawn();
        remove_file(daemon.state_dir().join(name)).unwrap();
        wait_for_state(&daemon);
        daemon.kill();
        assert!(daemon.release_all_command().output().unwrap().status.success());
        assert_eq!(mask(shell.pid()), before, "{name}");
    }
}

#[test]
fn a_mask_is_named_after_one_file_of_the_state_is_lost_while_no_daemon_runs() {
    if !has_two_cores() {
        return;
    }
    let damages: [(&str, &str); 3] = [
        ("journal.jsonl", ""),
        ("journal.jsonl", "garbage without an end of line"),
        ("state.json", "garbage"),
    ];
    for (name, content) in damages {
        let mut daemon = Daemon::start_with(Enforcement::Affinity, "");
        let shell = Shell::start();
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        if name == "state.json" {
            // A stop leaves the job in this file.
            daemon.stop();
        } else {
            daemon.kill();
        }
        write(daemon.state_dir().join(name), content).unwrap();
        daemon.spawn();
        wait_until("the mask is named", || {
            let mut warnings = daemon.status().warnings.into_iter();
            warnings.any(|warning| {
                let mut words = warning.text.split([' ', ',']);
                warning.code == "unknown-masks" && words.any(|word| word == shell.pid().to_string())
            })
        });
    }
}

#[test]
fn a_state_directory_that_cannot_be_made_again_is_a_warning_until_it_can() {
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let warning = || daemon.status().warnings.into_iter().find(|warning| warning.code == "journal");
    rename(daemon.state_dir(), daemon.dir().join("elsewhere")).unwrap();
    // The daemon may have been faster.
    wait_until("a file is in place of the directory", || {
        let _ = remove_dir_all(daemon.state_dir());
        write(daemon.state_dir(), "").is_ok()
    });
    let text = wait_for("the warning appears", warning).text;
    assert!(text.contains(&daemon.state_dir().display().to_string()), "{text}");
    remove_file(daemon.state_dir()).unwrap();
    wait_for_state(&daemon);
    wait_until("the warning is gone", || warning().is_none());
}

#[test]
fn a_removed_socket_is_made_again_and_connections_stay() {
    let daemon = Daemon::start("");
    let mut connected = Client::connect(&daemon.socket()).unwrap();
    let mut status = || connected.call::<Value>("GetStatus", &json!({})).unwrap();
    status();
    for round in 1..=2 {
        remove_file(daemon.socket()).unwrap();
        wait_until("a new client is answered", || daemon.call::<Value>("GetStatus", &json!({})).is_ok());
        status();
        wait_until("the log says it", || line_count(&daemon, "the socket was removed") == round);
    }
    assert_eq!(daemon.status().warnings.iter().find(|warning| warning.code == "socket-removed"), None);
}

#[test]
fn a_socket_that_cannot_be_made_again_is_a_warning_until_it_can() {
    let daemon = Daemon::start("");
    let mut connected = Client::connect(&daemon.socket()).unwrap();
    let mut has_warning = || {
        let reply: Value = connected.call("GetStatus", &json!({})).unwrap();
        let warnings = reply["status"]["warnings"].as_array().unwrap().clone();
        warnings.iter().any(|warning| warning["code"] == "socket-removed")
    };
    wait_until("a directory is in place of the socket", || {
        let _ = remove_file(daemon.socket());
        create_dir(daemon.socket()).is_ok()
    });
    wait_until("the warning appears", &mut has_warning);
    remove_dir(daemon.socket()).unwrap();
    wait_until("a new client is answered", || daemon.call::<Value>("GetStatus", &json!({})).is_ok());
    wait_until("the warning is gone", || !has_warning());
}
