//! The explanations of jobs and threads.

use pjw_core::explain;
use pjw_core::ids::{Comm, Pid, Tid};
use pjw_core::policy::ExhaustionPolicy;
use pjw_core::state::members::Members;

use pjw_core::time::Nanos;

use super::machine::{Machine, cpu_set, job, machine};

/// A machine where `manual:a` holds CPUs 0-1 for process 7.
fn with_a_job() -> Machine {
    let mut machine = machine();
    machine.spawn(7, 1, 0);
    machine.assign("a", 2, &[7]).unwrap();
    machine.settle();
    machine
}

/// The explanation of the mask of the only thread after a scan has read this mask.
fn mask_reason(machine: &Machine, effective: &str) -> String {
    let mut member = machine.state.members[&Pid(7)].clone();
    let thread = member.threads.get_mut(&Tid(7)).unwrap();
    thread.effective_mask = cpu_set(effective);
    let now = Nanos(machine.now());
    thread.mask_entry.as_mut().unwrap().record_reading(&thread.effective_mask, &machine.limits(), now);
    explain::explain_mask(&machine.state, &member, Tid(7), &member.threads[&Tid(7)])
}

fn job_reasons(machine: &Machine) -> Vec<String> {
    explain::explain_job(&machine.state, &machine.policy, &machine.state.jobs[&job("manual:a")])
}

#[test]
fn a_thread_outside_the_grant_is_not_explained_as_bound_inside() {
    let mut machine = with_a_job();
    for is_journaled in [true, false] {
        for allowed in ["2-3", "1-2", "0-7", ""] {
            let reason = mask_reason(&machine, allowed);
            let outside = "it is outside CPUs 0-1 for now: it may run on";
            assert!(reason.starts_with(outside), "journaled: {is_journaled}, {allowed}: {reason}");
        }
        assert_eq!(mask_reason(&machine, "1"), "it chose CPU 1 itself, inside CPUs 0-1");
        machine.forget_writes();
    }
}

#[test]
fn a_mask_that_pjw_set_and_one_that_it_found_are_explained_differently() {
    let mut machine = with_a_job();
    assert_eq!(
        mask_reason(&machine, "0-1"),
        "it wants a CPU 0 % of the time (running or waiting) and floats over CPUs 0-1"
    );
    machine.forget_writes();
    assert_eq!(
        mask_reason(&machine, "0-1"),
        "it wants a CPU 0 % of the time (running or waiting) and floats over CPUs 0-1, as it was found"
    );
}

#[test]
fn a_pin_and_a_translated_mask_are_explained_with_cpus() {
    let mut machine = machine();
    machine.spawn(7, 1, 0);
    machine.bind(7, 7, "5");
    machine.assign("a", 2, &[7]).unwrap();
    machine.settle();
    let moved = machine.effective_mask(7, 7);
    let reason = mask_reason(&machine, &moved);
    let expected = format!("floats over CPU {moved} (its own CPU 5, moved inside CPUs 0-1)");
    assert!(reason.ends_with(&expected), "{reason}");

    let mut machine = with_a_job();
    machine.clone_thread(7, 8);
    for _ in 0..8 {
        machine.run(&[7, 8]);
        machine.settle();
    }
    let pinned = machine.effective_mask(7, 7);
    assert_eq!(pinned.len(), 1, "one CPU: {pinned}");
    let reason = mask_reason(&machine, &pinned);
    assert!(reason.ends_with(&format!("is pinned to CPU {pinned}")), "{reason}");
}

#[test]
fn a_single_cpu_and_a_single_process_use_the_singular() {
    let mut machine = machine();
    machine.assign("a", 1, &[]).unwrap();
    assert_eq!(job_reasons(&machine)[0], "manual:a holds CPU 0, granted by pjwd");
    assert_eq!(job_reasons(&machine).last().unwrap(), "no process belongs to it: what it holds is reserved");
    for (pid, expected) in [(7, "1 process belongs to it; process 7 "), (8, "2 processes belong to it; ")] {
        machine.spawn(pid, 1, 0);
        machine.assign("a", 1, &[pid]).unwrap();
        assert!(job_reasons(&machine).last().unwrap().starts_with(expected), "{:?}", job_reasons(&machine));
    }
    machine.state.jobs.update(&job("manual:a"), |job| job.grant = None);
    assert!(
        job_reasons(&machine)[0].ends_with("its processes run unconfined"),
        "{:?}",
        job_reasons(&machine)
    );
    machine.state.members = Members::default();
    assert_eq!(job_reasons(&machine), ["manual:a waits for cores; no process belongs to it yet"]);
}

#[test]
fn a_waiting_job_is_explained_with_the_free_cores() {
    let mut machine = machine();
    machine.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    machine.assign("b", 7, &[]).unwrap();
    machine.assign("a", 2, &[]).unwrap();
    let reasons = job_reasons(&machine);
    assert_eq!(reasons[0], "manual:a waits for cores; no process belongs to it yet");
    assert!(reasons[1].contains("2 cores were asked for and 1 is free (CPU 7)"), "{reasons:?}");
}

#[test]
fn a_released_job_is_explained_as_one_that_is_left_alone() {
    let mut machine = with_a_job();
    machine.state.jobs.update(&job("manual:a"), |job| job.was_released = true);
    assert!(job_reasons(&machine)[0].starts_with("manual:a was released: its threads are left alone"));
    assert_eq!(mask_reason(&machine, "0-7"), "it is left on CPUs 0-7: its job holds no cores");
}

#[test]
fn the_warning_about_strays_names_the_first_of_them_and_explain_says_of_each_that_it_is_one() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(20, 1, 1002);
    // A child of process 1 leads a session of its own here.
    m.spawn(30, 1, 1001).comm = Comm::from("bash");
    m.spawn(31, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    let why = |m: &Machine| m.last.as_ref().unwrap().warnings[0].text.clone();
    assert!(why(&m).ends_with(": pid 31"), "{}", why(&m));
    for pid in 32..=37 {
        m.spawn(pid, 1, 1001);
    }
    m.settle();
    assert!(why(&m).ends_with(": pids 31, 32, 33, 34, 35 and 2 more"), "{}", why(&m));
    let explained = |m: &Machine, pid| explain::explain_process(&m.state, &m.policy, Pid(pid)).pop().unwrap();
    assert_eq!(
        explained(&m, 37),
        "it is a stray: user 1001 has jobs here (manual:a), and it is in none; pjwctl assign manual:a --pid 37 makes \
         it a member"
    );
    assert!(explained(&m, 30).starts_with("it is a stray of a login, of which no warning tells: user 1001"));
    assert!(!explained(&m, 20).contains("stray"), "its user has no job: {}", explained(&m, 20));
    m.spawn(40, 1, 1001);
    m.assign("b", 2, &[40]).unwrap();
    m.policy.adopt_unassigned_processes = true;
    m.settle();
    let of_several = explained(&m, 37);
    assert!(of_several.contains("it is kept off the cores of all jobs"), "{of_several}");
    assert!(of_several.ends_with("pjwctl assign JOB --pid 37 makes it a member"), "{of_several}");
}
