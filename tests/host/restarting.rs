//! No job changes its cores because the daemon is restarted, reloaded or killed.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::copy_program;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::processes::{KillOnDrop, Shell, has_two_cores, is_ended, mask, masks};

#[test]
fn a_daemon_killed_under_load_has_the_same_grants_afterwards_and_moves_no_process() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start("interval = \"50ms\"\n");
    let mut shells = [Shell::start(), Shell::start()];
    let before_all = mask(shells[0].pid());
    for (name, shell) in ["a", "b"].iter().zip(&mut shells) {
        daemon.assign(name, 1, &[shell.pid()]).unwrap();
        shell.send_line("while :; do (true); done &");
    }
    for _ in 0..5 {
        let grants: Vec<String> = daemon.status().jobs.into_iter().map(|job| job.cpus).collect();
        let pids = [shells[0].pid(), shells[1].pid()];
        let before = masks(&pids);
        daemon.kill();
        daemon.spawn();
        let after: Vec<String> = daemon.status().jobs.into_iter().map(|job| job.cpus).collect();
        assert_eq!((after, masks(&pids)), (grants, before));
        assert!(daemon.status().pool.free.len() < daemon.status().node.cpus.len());
    }
    daemon.release("a").unwrap();
    // The original mask is restored.
    daemon.check_after_reply(&daemon.job_id("a"), &before_all, || mask(shells[0].pid()));
}

#[test]
fn changes_while_no_daemon_runs_are_found_at_the_next_start() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start("");
    let mut dying = Shell::start();
    let living = Shell::start();
    daemon.assign("dying", 1, &[dying.pid()]).unwrap();
    let cpus = daemon.assign("living", 1, &[living.pid()]).unwrap();
    let child = dying.background("sleep 0");
    daemon.kill();
    drop(dying);
    // It was killed with its parent, and nothing has waited for its end.
    wait_until("the child has ended", || is_ended(child));
    pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(living.pid())).unwrap();
    daemon.spawn();
    let jobs: Vec<String> = daemon.status().jobs.into_iter().map(|job| job.id).collect();
    assert_eq!(
        jobs,
        [daemon.job_id("living")],
        "the job of the ended processes {child} and its parent is over"
    );
    wait_until("the mask is repaired", || mask(living.pid()) == cpus);
}

#[test]
fn a_clean_stop_leaves_jobs_on_their_cores() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start("");
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.stop();
    assert_eq!(mask(shell.pid()), cpus);
    assert!(!daemon.socket().exists());
    daemon.spawn();
    assert_eq!(daemon.job("a").unwrap().cpus, cpus.to_string());
}

#[test]
fn sighup_applies_a_good_configuration_and_ignores_a_bad_one() {
    let daemon = Daemon::start("mode = \"enforce\"\n");
    let file = daemon.dir().join("pjwd.toml");
    fs::write(&file, "mode = \"observe\"\n").unwrap();
    daemon.signal(Signal::SIGHUP);
    wait_until("the new mode is in force", || daemon.status().mode == "observe");
    fs::write(&file, "mode = \"nonsense\"\n").unwrap();
    daemon.signal(Signal::SIGHUP);
    wait_for("the log names the line and column", || daemon.log().contains("pjwd.toml:1:8").then_some(()));
    let refused = || daemon.status().warnings.into_iter().find(|warning| warning.code == "configuration");
    let warning = wait_for("the status says that the reload was refused", refused);
    assert!(
        warning.text.contains("pjwd.toml:1:8: mode; ") && warning.remedy.contains("pjwctl reload"),
        "{warning:?}"
    );
    assert_eq!(daemon.status().mode, "observe");
    let refusal = daemon.call::<serde_json::Value>("Reload", &serde_json::json!({})).unwrap_err().to_string();
    assert!(refusal.contains("the old configuration stays in force: "), "{refusal}");
    assert!(refusal.contains("pjwd.toml:1:8: mode: \"nonsense\" is not allowed here"), "{refusal}");
    fs::write(&file, "").unwrap();
    daemon.call::<serde_json::Value>("Reload", &serde_json::json!({})).unwrap();
    assert_eq!(daemon.status().mode, "enforce");
    assert!(refused().is_none(), "the reload succeeded");
}

#[test]
fn in_observe_mode_nothing_is_changed() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::start_with(Enforcement::Affinity, "interval = \"50ms\"\n");
    let mut shell = Shell::start();
    let everything = mask(shell.pid());
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.stop();
    daemon.configure("mode = \"observe\"\nenforcement = \"affinity\"\ninterval = \"50ms\"\n");
    daemon.spawn();
    let child = shell.background("sleep 1000");
    let _end = KillOnDrop(child);
    pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(child)).unwrap();
    wait_until("the violation is counted", || daemon.job("a").is_some_and(|job| job.violations == 1));
    assert_eq!((mask(child), mask(shell.pid())), (everything, cpus));
    assert!(daemon.assign("b", 1, &[]).unwrap_err().contains("observe"));
}

#[test]
fn the_provisions_of_the_configuration_have_their_cores_before_the_first_client_is_served() {
    if !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::prepare_with(Enforcement::Affinity, "");
    daemon.configure(&format!(
        "interval = \"1h\"\nrescan_interval = \"1h\"\n[[provision]]\nname = \"web.{}\"\ncores = 1\n",
        daemon.tag()
    ));
    daemon.spawn();
    let first = daemon.job("web");
    assert!(first.as_ref().is_some_and(|job| !job.cpus.is_empty()), "{first:?}");
}

#[test]
fn a_reload_says_that_a_provision_waits_for_cores() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    daemon.assign("a", crate::processes::core_count(), &[]).unwrap();
    daemon.configure(&format!("[[provision]]\nname = \"web.{}\"\ncores = 1\n", daemon.tag()));
    let told = || String::from_utf8(daemon.pjwctl(&["reload"]).stdout).unwrap();
    let first = told();
    assert!(first.contains("waits for cores that other jobs hold, and has 0 now"), "{first}");
    assert_eq!(told(), "the configuration was read: nothing changed\n");
    daemon.release("a").unwrap();
    wait_until("it has its core", || daemon.job("web").is_some_and(|job| !job.cpus.is_empty()));
}

#[test]
fn in_observe_mode_no_provision_is_called_wrong() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("mode = \"observe\"\n");
    let table = format!("[[provision]]\nname = \"web.{}\"\ncores = 1\n", daemon.tag());
    let warnings = || daemon.status().warnings;
    let reload = || daemon.call::<serde_json::Value>("Reload", &serde_json::json!({})).unwrap().to_string();
    daemon.configure(&format!("mode = \"observe\"\n{table}"));
    reload();
    assert!(warnings().iter().all(|warning| warning.code != "provision"), "{:?}", warnings());
    daemon.configure(&table);
    let changes = reload();
    assert!(!changes.contains("missing"), "{changes}");
    assert!(daemon.job("web").is_some_and(|job| !job.cpus.is_empty()), "{:?}", warnings());
}

#[test]
fn a_group_of_administrators_that_does_not_exist_is_a_warning() {
    let daemon = Daemon::start("admin_groups = [\"pjw-no-such-group\", \"0\"]\n");
    let has_warning = || daemon.status().warnings.iter().any(|warning| warning.code == "unknown-group");
    wait_until("the status has the warning", has_warning);
    assert_eq!(daemon.log().matches("there is no group").count(), 1, "{}", daemon.log());
    daemon.configure("");
    daemon.call::<serde_json::Value>("Reload", &serde_json::json!({})).unwrap();
    wait_until("the warning is gone", || !has_warning());
}

#[test]
fn a_follower_of_the_events_receives_the_last_one_too() {
    let mut daemon = Daemon::start("");
    let mut follower =
        daemon.pjwctl_command(&["events", "--follow", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut events = BufReader::new(follower.stdout.take().unwrap());
    let mut first = String::new();
    events.read_line(&mut first).unwrap();
    assert!(first.contains(r#""event":"started""#), "{first}");
    daemon.stop();
    let mut rest = String::new();
    events.read_to_string(&mut rest).unwrap();
    assert!(rest.lines().last().is_some_and(|last| last.contains(r#""event":"stopped""#)), "{rest}");
    assert!(follower.wait().unwrap().success());
}

#[test]
fn the_rule_for_new_processes_survives_a_restart() {
    let mut daemon = Daemon::start("");
    let shell = Shell::start();
    let (job, pid) = (daemon.job_id("a"), shell.pid().to_string());
    let assign = |daemon: &Daemon, rule: &str| {
        let output = daemon.pjwctl(&["assign", &job, "--cores", "1", "--pid", &pid, "--within-job", rule]);
        assert!(output.status.success(), "{output:?}");
    };
    let shown = |daemon: &Daemon| {
        let output = daemon.pjwctl(&["show", &job]);
        String::from_utf8_lossy(&output.stdout).split_ascii_whitespace().collect::<Vec<_>>().join(" ")
    };
    assign(&daemon, "ll");
    daemon.kill();
    daemon.spawn();
    assert_eq!(daemon.job("a").unwrap().within_job.as_deref(), Some("ll"));
    assert!(shown(&daemon).contains("new processes by --within-job ll"), "{}", shown(&daemon));
    let explained = daemon.pjwctl(&["explain", &job]);
    assert!(String::from_utf8_lossy(&explained.stdout).contains("--within-job ll"), "{explained:?}");
    assign(&daemon, "default");
    assert_eq!(daemon.job("a").unwrap().within_job, None);
    assert!(!shown(&daemon).contains("--within-job"), "{}", shown(&daemon));
}

#[test]
fn a_process_that_a_changed_rule_recognises_no_longer_leaves_the_provision_at_a_reload_and_at_a_start() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        for is_restarted in [false, true] {
            check_changed_rule(enforcement, is_restarted);
        }
    }
}

/// Changes the rule of a provision for a reload, or for the next start. Two processes have joined it by the first rule.
/// One of them executes another program, and the second rule recognises only that one.
fn check_changed_rule(enforcement: Enforcement, is_restarted: bool) {
    let mut daemon = Daemon::prepare_with(enforcement, "");
    let programs = ["pjw_before", "pjw_after"].map(|name| daemon.dir().join(name));
    programs.iter().for_each(|program| copy_program("/bin/sh", program));
    let mechanism = if enforcement == Enforcement::Affinity { "affinity" } else { "cpuset" };
    let [first, second] = ["pjw_before", "pjw_after"].map(|name| {
        let tag = daemon.tag();
        let table = format!("[[provision]]\nname = \"web.{tag}\"\ncores = 1\nmatch = \"comm={name}\"\n");
        format!("enforcement = \"{mechanism}\"\n{table}")
    });
    let mut leaving = Shell::from_command(Command::new(&programs[0]));
    let mut staying = Shell::from_command(Command::new(&programs[0]));
    let child = leaving.background("sleep 1000");
    staying.run("echo");
    let place = |pid: u32| (mask(pid), fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap());
    let before = [leaving.pid(), child].map(place);

    daemon.configure(&first);
    daemon.spawn();
    wait_until("all of them are recognised", || daemon.job("web").is_some_and(|job| job.processes == 3));
    let cpus = daemon.job("web").unwrap().cpus;
    let is_inside = |pid: u32| mask(pid).to_string() == cpus;
    wait_until("they are on its cores", || [leaving.pid(), child, staying.pid()].into_iter().all(is_inside));
    staying.send_line(&format!("exec {}", programs[1].display()));
    // The shell reads ahead: it would take a second line with it.
    let name = format!("/proc/{}/comm", staying.pid());
    wait_until("it is the other program", || fs::read_to_string(&name).unwrap() == "pjw_after\n");

    daemon.configure(&second);
    if is_restarted {
        daemon.stop();
        daemon.spawn();
    } else {
        assert!(daemon.pjwctl(&["reload"]).status.success());
    }
    let has_one_process = |daemon: &Daemon| {
        let job = daemon.job("web").unwrap();
        job.processes == 1 && job.cpus == cpus
    };
    wait_until("two of them have left", || has_one_process(&daemon));
    wait_until("they are as before", || [leaving.pid(), child].map(place) == before);
    assert!(is_inside(staying.pid()), "{}", mask(staying.pid()));
    assert!(daemon.pjwctl(&["reload"]).status.success(), "it scans all processes");
    assert!(has_one_process(&daemon), "they do not come back: {:?}", daemon.job("web"));
}
