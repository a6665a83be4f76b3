//! A job stays on its cores, and a release restores its original masks.

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::processes::{KillOnDrop, Shell, has_two_cores, mask, masks};

#[test]
fn assign_returns_when_every_thread_of_every_descendant_is_inside() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "");
        let mut shell = Shell::start();
        let child = shell.background("sleep 1000");
        let _end = KillOnDrop(child);
        let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
        assert_eq!((mask(shell.pid()), mask(child)), (cpus.clone(), cpus.clone()), "{enforcement:?}");
        let born_inside = shell.background("sleep 1000");
        let _end_too = KillOnDrop(born_inside);
        assert_eq!(mask(born_inside), cpus, "{enforcement:?}");
    }
}

#[test]
fn a_release_restores_the_original_masks() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "");
        let mut shell = Shell::start();
        let own = shell.background("sleep 1000");
        let plain = shell.background("sleep 1000");
        let _ends = (KillOnDrop(own), KillOnDrop(plain));
        let last = mask(shell.pid()).last().unwrap();
        pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(own), &CpuSet::from(last)).unwrap();
        let before = masks(&[shell.pid(), own, plain]);
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let late = shell.background("sleep 1000");
        let _end_of_late = KillOnDrop(late);
        let is_known = || daemon.job("a").is_some_and(|job| job.processes == 4);
        wait_until("the new process is a member", is_known);
        assert_ne!(masks(&[shell.pid(), own, plain]), before, "{enforcement:?}");
        daemon.release("a").unwrap();
        daemon.check_after_reply(&daemon.job_id("a"), &before, || masks(&[shell.pid(), own, plain]));
        // A process that started in the job gets the mask of its parent.
        daemon.check_after_reply(&daemon.job_id("a"), &mask(shell.pid()), || mask(late));
    }
}

#[test]
fn a_mask_that_a_job_widens_is_repaired_and_reported() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start_with(Enforcement::Affinity, "interval = \"50ms\"\n");
    let shell = Shell::start();
    let everything = mask(shell.pid());
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    // A daemon that runs may be faster than the check.
    daemon.while_stopped(|| {
        pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(shell.pid())).unwrap();
        assert_eq!(mask(shell.pid()), everything);
    });
    wait_until("the mask is repaired", || mask(shell.pid()) == cpus);
    wait_until("the events are reported", || {
        let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("a") })).unwrap();
        let events = reply["history"]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| event["event"].as_str().unwrap().to_owned());
        let events: Vec<String> = events.collect();
        events.ends_with(&["violation".to_owned(), "repaired".to_owned()])
    });
    let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.job_id("a") })).unwrap();
    let repaired = &reply["history"].as_array().unwrap().last().unwrap()["text"];
    assert!(
        repaired.as_str().unwrap().contains(": the program asked for "),
        "the event has its reason: {repaired}"
    );
    wait_until("no violation is left", || daemon.job("a").is_some_and(|job| job.violations == 0));
    daemon.release("a").unwrap();
    let reply: Value = daemon.call("GetReports", &json!({ "job": daemon.job_id("a") })).unwrap();
    let count = |name: &str| reply["reports"][0][name].as_u64().unwrap();
    assert!(count("violations") >= 1 && count("repairs") >= 1, "the report counts both: {reply}");
}

#[test]
fn a_setsid_double_forked_orphan_stays_a_member() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "interval = \"50ms\"\n");
        let mut shell = Shell::start();
        let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let orphan: u32 = shell
            .run("setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!' 2>/dev/null | cat")
            .parse()
            .unwrap();
        let _end = KillOnDrop(orphan);
        let reason = wait_for("the orphan is a member", || {
            let reply: Value = daemon.call("ExplainPid", &json!({ "pid": orphan })).ok()?;
            (reply["job"] == daemon.job_id("a")).then(|| reply["because"][0].as_str().unwrap().to_owned())
        });
        assert!(reason.contains(&orphan.to_string()), "{reason}");
        assert_eq!(mask(orphan), cpus);
        drop(shell);
        wait_until("only the orphan is a member", || daemon.job("a").is_some_and(|job| job.processes == 1));
        assert_eq!(mask(orphan), cpus);
    }
}

#[test]
fn a_process_that_exports_a_job_id_becomes_no_member() {
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let mut command = std::process::Command::new("sh");
    command.env("SLURM_JOB_ID", "4711").env("SLURM_CPUS_ON_NODE", "1").env("PJW_JOB", "manual:other");
    let shell = Shell::from_command(command);
    wait_until("the process is scanned", || {
        let reply: Result<Value, _> = daemon.call("ExplainPid", &json!({ "pid": shell.pid() }));
        reply.is_ok_and(|reply| reply["job"].is_null() && reply["because"].to_string().contains("slurm:4711"))
    });
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn a_job_ends_with_its_last_process_and_its_cores_are_free() {
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "interval = \"50ms\"\n");
        let shell = Shell::start();
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        drop(shell);
        wait_until("the job is over", || daemon.job("a").is_none());
        let status = daemon.status();
        assert_eq!(status.pool.free, status.node.cpus);
    }
}

#[test]
fn threads_that_run_are_pinned_and_float_again_when_they_sleep() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "interval = \"200ms\"\n");
        let mut shell = Shell::start();
        let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
        let busy = [0, 1].map(|_| shell.background("while :; do :; done"));
        let _ends = busy.map(KillOnDrop);
        // On a busy machine, the shell may have waited for a CPU for so long that it counted as busy. Beside a third
        // busy thread, both of them may have the same core.
        wait_until("both are pinned, and each core has one of them", || {
            let pins = busy.map(|pid| mask(pid).only_pu());
            pins.iter().all(Option::is_some) && pins[0] != pins[1]
        });
        wait_until("the sleeping thread is not pinned", || mask(shell.pid()) == cpus);
        wait_until("the status has two hot and two pinned threads", || {
            daemon.job("a").is_some_and(|job| (job.hot, job.pinned) == (2, 2))
        });
        let stopped = nix::unistd::Pid::from_raw(busy[0].cast_signed());
        nix::sys::signal::kill(stopped, nix::sys::signal::Signal::SIGSTOP).unwrap();
        wait_until("the stopped thread is not pinned", || mask(busy[0]) == cpus);
    }
}
