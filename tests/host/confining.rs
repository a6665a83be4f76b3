//! A job stays on its cores whatever it does, and gets its own masks back.

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::{Daemon, Keeping};
use pjw_tests::patience::{until, until_true};
use serde_json::{Value, json};

use crate::processes::{EndOf, Shell, mask, masks, two_cores};

#[test]
fn assign_returns_when_every_thread_of_every_descendant_is_inside() {
    if !two_cores() {
        return;
    }
    for by in Keeping::all() {
        let daemon = Daemon::keeping(by, "");
        let mut shell = Shell::start();
        let child = shell.background("sleep 1000");
        let _end = EndOf(child);
        let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
        assert_eq!((mask(shell.pid()), mask(child)), (cpus.clone(), cpus.clone()), "{by:?}");
        let born_inside = shell.background("sleep 1000");
        let _end_too = EndOf(born_inside);
        assert_eq!(mask(born_inside), cpus, "{by:?}");
    }
}

#[test]
fn a_release_restores_the_original_masks() {
    if !two_cores() {
        return;
    }
    for by in Keeping::all() {
        let daemon = Daemon::keeping(by, "");
        let mut shell = Shell::start();
        let own = shell.background("sleep 1000");
        let plain = shell.background("sleep 1000");
        let _ends = (EndOf(own), EndOf(plain));
        let last = mask(shell.pid()).last().unwrap();
        pjw_linux::sys::affinity::set_mask(pjw_core::ids::Tid(own), &CpuSet::from(last)).unwrap();
        let before = masks(&[shell.pid(), own, plain]);
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let late = shell.background("sleep 1000");
        let _end_of_late = EndOf(late);
        let is_known = || daemon.job("a").is_some_and(|job| job.processes == 4);
        until_true("the newcomer is a member", is_known);
        assert_ne!(masks(&[shell.pid(), own, plain]), before, "{by:?}");
        daemon.release("a").unwrap();
        assert_eq!(masks(&[shell.pid(), own, plain]), before, "{by:?}");
        assert_eq!(mask(late), mask(shell.pid()), "{by:?}: who was born inside gets what its father had");
    }
}

#[test]
fn a_mask_that_a_job_widens_is_repaired_and_reported() {
    if !two_cores() {
        return;
    }
    let daemon = Daemon::keeping(Keeping::Masks, "interval = \"50ms\"\n");
    let shell = Shell::start();
    let everything = mask(shell.pid());
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    pjw_linux::sys::affinity::set_full_mask(pjw_core::ids::Tid(shell.pid())).unwrap();
    assert_eq!(mask(shell.pid()), everything);
    until_true("the thread is back", || mask(shell.pid()) == cpus);
    until_true("it is told of", || {
        let reply: Value = daemon.call("GetJob", &json!({ "job": daemon.id("a") })).unwrap();
        let told = reply["history"]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| event["event"].as_str().unwrap().to_owned());
        let told: Vec<String> = told.collect();
        told.ends_with(&["violation".to_owned(), "repaired".to_owned()])
    });
    assert_eq!(daemon.job("a").unwrap().violations, 0);
}

#[test]
fn a_setsid_double_forked_orphan_stays_a_member() {
    if !two_cores() {
        return;
    }
    for by in Keeping::all() {
        let daemon = Daemon::keeping(by, "interval = \"50ms\"\n");
        let mut shell = Shell::start();
        let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
        let orphan: u32 = shell
            .ask("setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!' 2>/dev/null | cat")
            .parse()
            .unwrap();
        let _end = EndOf(orphan);
        let reason = until("the orphan is known", || {
            let reply: Value = daemon.call("ExplainPid", &json!({ "pid": orphan })).ok()?;
            (reply["job"] == daemon.id("a")).then(|| reply["because"][0].as_str().unwrap().to_owned())
        });
        assert!(reason.contains(&orphan.to_string()), "{reason}");
        assert_eq!(mask(orphan), cpus);
        drop(shell);
        until_true("the shell is gone", || daemon.job("a").is_some_and(|job| job.processes == 1));
        assert_eq!(mask(orphan), cpus);
    }
}

#[test]
fn a_process_that_exports_a_job_id_becomes_no_member() {
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let mut command = std::process::Command::new("sh");
    command.env("SLURM_JOB_ID", "4711").env("SLURM_CPUS_ON_NODE", "1").env("PJW_JOB", "manual:other");
    let shell = Shell::from(command);
    until_true("it is seen", || {
        let reply: Result<Value, _> = daemon.call("ExplainPid", &json!({ "pid": shell.pid() }));
        reply.is_ok_and(|reply| reply["job"].is_null() && reply["because"].to_string().contains("slurm:4711"))
    });
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn a_job_ends_with_its_last_process_and_its_cores_are_free() {
    for by in Keeping::all() {
        let daemon = Daemon::keeping(by, "interval = \"50ms\"\n");
        let shell = Shell::start();
        daemon.assign("a", 1, &[shell.pid()]).unwrap();
        drop(shell);
        until_true("the job is over", || daemon.job("a").is_none());
        let status = daemon.status();
        assert_eq!(status.pool.free, status.node.cpus);
    }
}

#[test]
fn threads_that_run_are_pinned_and_float_again_when_they_sleep() {
    if !two_cores() {
        return;
    }
    for by in Keeping::all() {
        let daemon = Daemon::keeping(by, "interval = \"200ms\"\n");
        let mut shell = Shell::start();
        let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
        let busy = [0, 1].map(|_| shell.background("while :; do :; done"));
        let _ends = busy.map(EndOf);
        let pins = until("both are pinned", || {
            let pins = busy.map(|pid| mask(pid).single());
            pins.iter().all(Option::is_some).then_some(pins)
        });
        assert_ne!(pins[0], pins[1], "one per core before two on any");
        assert_eq!(mask(shell.pid()), cpus, "the sleeper floats");
        until_true("status says so", || daemon.job("a").is_some_and(|job| (job.hot, job.pinned) == (2, 2)));
        let stopped = nix::unistd::Pid::from_raw(busy[0].cast_signed());
        nix::sys::signal::kill(stopped, nix::sys::signal::Signal::SIGSTOP).unwrap();
        until_true("it floats again", || mask(busy[0]) == cpus);
    }
}
