//! Refusals: each names the cause, and a remedy that the caller can use.

use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::cpuset::CpuSet;
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, Uid};
use pjw_core::job::CpuRequest;
use pjw_core::policy::ExhaustionPolicy;
use pjw_core::refusal::Refusal;
use pjw_core::state::WardenState;

use crate::machine::{ALICE, Machine, ROOT, assign_of, cpu_set, in_cgroup, job, machine, regular_topology};

const BOB: Caller = Caller { uid: Uid(1002), is_admin: false };

/// The text of the refusal of `pjwctl run --job ID --cores N`.
#[track_caller]
fn refusal_of_run(m: &mut Machine, caller: Caller, id: &str, cores: u32) -> String {
    let run = AssignCommand { must_be_new: true, caller, ..assign_of(id, Some(CpuRequest::Cores(cores))) };
    m.command(Command::Assign(run)).unwrap_err().to_string()
}

#[track_caller]
fn refusal_of_assign(m: &mut Machine, id: &str, cores: u32) -> String {
    m.assign(id, cores, &[]).unwrap_err().to_string()
}

/// Starts process 10 in the cgroup of the Slurm job 7, which requested two cores.
fn spawn_in_slurm_job(m: &mut Machine) {
    in_cgroup(
        m.spawn(10, 1, 1001),
        "slurm:7",
        "/system.slice/slurmstepd.scope/job_7",
        Some(CpuRequest::Cores(2)),
    );
}

#[test]
fn the_refusal_of_run_names_the_taken_name_as_the_cause_also_if_no_core_is_free() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.policy.user_max_cores = 8;
    m.assign_as(ALICE, "a", 8, &[]).unwrap();
    let exists = "there is a job manual:a already: choose another name with --job";
    for caller in [ROOT, ALICE] {
        assert_eq!(refusal_of_run(&mut m, caller, "a", 1), format!("{exists}, or release it first"));
    }
    assert_eq!(
        refusal_of_run(&mut m, BOB, "a", 1),
        exists,
        "a user who may not release the job is not advised to"
    );
}

#[test]
fn the_refusal_for_the_name_of_a_released_job_does_not_say_to_release_it() {
    let mut m = machine();
    spawn_in_slurm_job(&mut m);
    m.settle();
    m.release("slurm:7").unwrap();
    let refusal = refusal_of_run(&mut m, ROOT, "slurm:7", 1);
    assert_eq!(refusal, "there is a job slurm:7 already: choose another name with --job");
}

#[test]
fn the_refusal_of_run_says_that_run_does_not_wait_only_with_on_exhausted_wait() {
    let mut m = machine();
    m.assign("a", 8, &[]).unwrap();
    let full = "1 core was asked for and no whole core is free: have a job released first \
                (pjwctl jobs shows who holds what)";
    assert_eq!(refusal_of_run(&mut m, ROOT, "b", 1), full);
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    let no_waiting = "run does not wait for cores, also with on_exhausted = \"wait\": try again later";
    assert_eq!(refusal_of_run(&mut m, ROOT, "b", 1), format!("{full}; {no_waiting}"));
    assert!(
        !refusal_of_run(&mut m, ROOT, "b", 9).contains("wait"),
        "the machine has fewer cores, so waiting does not help"
    );
    m.assign("b", 1, &[]).unwrap();
    assert_eq!(m.grant("b"), "-", "assign waits");
}

#[test]
fn the_refusal_of_a_resize_says_that_a_job_with_cores_does_not_wait_for_more() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.assign("a", 7, &[]).unwrap();
    m.assign("b", 1, &[]).unwrap();
    let refusal = refusal_of_assign(&mut m, "b", 2);
    assert!(refusal.ends_with("on_exhausted = \"wait\": try again later"), "{refusal}");
    assert!(refusal.contains("a job that has cores keeps them"), "{refusal}");
    assert_eq!(m.grant("b"), "7");
}

#[test]
fn the_refusal_of_a_resize_counts_the_cores_of_the_job_apart_from_the_free_ones() {
    let mut m = machine();
    m.assign("a", 2, &[]).unwrap();
    m.assign("b", 4, &[]).unwrap();
    let jobs = "(pjwctl jobs shows who holds what)";
    assert_eq!(
        refusal_of_assign(&mut m, "a", 5),
        format!(
            "5 cores were asked for, the job has 2, and 2 are free besides (CPUs 2-3); the largest request that fits now is \
             4, 4 within one L3: ask for fewer, or have another job released first {jobs}"
        )
    );
    m.assign("a", 4, &[]).unwrap();
    assert_eq!(m.grant("a"), "0-3", "the number that the refusal names fits");
    assert_eq!(
        refusal_of_assign(&mut m, "a", 5),
        format!(
            "5 cores were asked for, the job has 4, and no other whole core is free: have another job released first {jobs}"
        )
    );
    m.policy.exhaustion_policy = ExhaustionPolicy::Wait;
    m.release("b").unwrap();
    m.assign("b", 3, &[]).unwrap();
    m.assign("c", 2, &[]).unwrap();
    let warnings = &m.last.as_ref().unwrap().warnings;
    let warning = warnings.iter().find(|warning| warning.code == "unserved").unwrap();
    assert!(warning.text.contains("2 cores were asked for and 1 is free (CPU 7);"), "{}", warning.text);
}

#[test]
fn with_on_exhausted_share_a_resize_is_refused_only_beyond_the_machine() {
    let mut m = machine();
    m.policy.exhaustion_policy = ExhaustionPolicy::Share;
    m.assign("a", 2, &[]).unwrap();
    m.assign("b", 4, &[]).unwrap();
    assert_eq!(
        refusal_of_assign(&mut m, "a", 9),
        "9 cores were asked for and this machine has 8 for jobs: ask for at most 8"
    );
    m.assign("a", 5, &[]).unwrap();
}

#[test]
fn the_refusal_for_a_known_job_without_a_count_does_not_call_the_job_new() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", "/system.slice/slurmstepd.scope/job_7", None);
    m.settle();
    let refusal = m.command(Command::Assign(assign_of("slurm:7", None))).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the number of cores of slurm:7 is not known: add --cores N or --cpus LIST"
    );
    m.assign("slurm:7", 1, &[]).unwrap();
}

#[test]
fn the_refusal_for_a_process_in_the_job_of_a_scheduler_does_not_say_to_release_the_job() {
    let mut m = machine();
    spawn_in_slurm_job(&mut m);
    m.spawn(20, 1, 1001);
    m.settle();
    m.assign("a", 1, &[20]).unwrap();
    let of_slurm = m.assign("b", 1, &[10]).unwrap_err().to_string();
    assert!(of_slurm.contains("(pjwctl assign slurm:7 --cores N)"), "{of_slurm}");
    assert!(!of_slurm.contains("release"), "{of_slurm}");
    m.assign("slurm:7", 3, &[]).unwrap();
    let of_manual = m.assign("b", 1, &[20]).unwrap_err().to_string();
    assert_eq!(
        of_manual,
        "process 20 belongs to manual:a: it can join another job when manual:a is released"
    );
    m.release("a").unwrap();
    m.assign("b", 1, &[20]).unwrap();
}

#[test]
fn the_refusal_of_run_and_spawn_inside_a_job_says_how_to_use_the_cores_of_this_job() {
    let mut m = machine();
    m.spawn(20, 1, 1001);
    m.settle();
    m.assign("outer", 1, &[20]).unwrap();
    let run = AssignCommand {
        must_be_new: true,
        pids: vec![Pid(20)],
        ..assign_of("inner", Some(CpuRequest::Cores(1)))
    };
    assert_eq!(
        m.command(Command::Assign(run)).unwrap_err().to_string(),
        "this process (20) is in manual:outer already: inside it, a command has the cores of manual:outer without \
         pjwctl run, and pjwctl spawn divides them among its instances if --job and options for cores are left out; \
         for a job of its own, let a shell start pjwctl (sh -c 'pjwctl ...; exit $?')"
    );
    // The process of a shell that runs in the job may start a program in a job of its own.
    m.spawn(21, 20, 1001);
    m.settle();
    let run = AssignCommand {
        must_be_new: true,
        pids: vec![Pid(21)],
        ..assign_of("inner", Some(CpuRequest::Cores(1)))
    };
    m.command(Command::Assign(run)).unwrap();
}

#[test]
fn a_command_that_keeps_members_leaves_a_child_in_its_job_and_frees_an_adopted_process() {
    let keeps = |id: &str, pid: u32| {
        let pids = vec![Pid(pid)];
        let assign = AssignCommand { keeps_members: true, pids, ..assign_of(id, Some(CpuRequest::Cores(1))) };
        Command::Assign(assign)
    };
    let mut m = machine();
    m.spawn(20, 1, 1001);
    m.spawn(40, 1, 1001);
    m.policy.adopt_unassigned_processes = true;
    m.settle();
    m.assign("outer", 1, &[20]).unwrap();
    m.spawn(21, 20, 1001);
    m.settle();
    assert_eq!([m.member(21), m.member(40)], ["manual:outer by Parent", "manual:outer by Adopted"]);
    let refusal = m.command(keeps("inner", 21)).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "this process (21) is in manual:outer already, and keeps the cores of manual:outer"
    );
    assert!(!refusal.is_reported() && m.events.iter().all(|event| event.kind != EventKind::Refused));
    m.command(keeps("own", 40)).unwrap();
    assert_eq!(m.member(40), "manual:own by Registered");
    m.assign("inner", 1, &[21]).unwrap();
    assert_eq!(m.member(21), "manual:inner by Registered", "without the option the child leaves the job");
}

#[test]
fn a_registered_process_in_the_job_of_a_scheduler_cannot_join_another_job_after_a_release() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("slurm:7", 1, &[10]).unwrap();
    let refusal = |m: &mut Machine| m.assign("b", 1, &[10]).unwrap_err().to_string();
    assert_eq!(
        refusal(&mut m),
        "process 10 belongs to slurm:7: it stays there until slurm ends the job; change the cores of slurm:7 instead \
         (pjwctl assign slurm:7 --cores N)"
    );
    m.release("slurm:7").unwrap();
    assert!(refusal(&mut m).contains("until slurm ends the job"));
    m.assign("slurm:7", 2, &[]).unwrap();
    assert_eq!(m.grant("slurm:7"), "0-1", "the remedy of the refusal works");
}

#[test]
fn the_refusal_above_the_limit_of_a_user_names_the_rest_of_the_limit() {
    let mut m = machine();
    m.policy.user_max_cores = 3;
    let mut refusal_of_assign =
        |id: &str, cores| m.assign_as(ALICE, id, cores, &[]).map(|_| ()).map_err(|e| e.to_string());
    let ask = "or ask an administrator to raise user_max_cores";
    assert_eq!(
        refusal_of_assign("a", 4),
        Err(format!(
            "4 cores were asked for, which makes 4 for you, besteffort jobs included, and the limit is 3: ask for at most 3, {ask}"
        ))
    );
    refusal_of_assign("a", 2).unwrap();
    let text = refusal_of_assign("b", 2).unwrap_err();
    assert!(text.ends_with(&format!("ask for at most 1, release a job of yours first, {ask}")), "{text}");
    refusal_of_assign("b", 1).unwrap();
    let text = refusal_of_assign("c", 1).unwrap_err();
    assert!(text.ends_with(&format!("limit is 3: release a job of yours first, {ask}")), "{text}");
}

#[test]
fn the_refusal_on_a_machine_without_a_core_for_jobs_names_housekeeping() {
    let mut m = machine();
    m.state = WardenState::new(regular_topology(1, 1, 1, 2, 1), &cpu_set("0-1"));
    assert_eq!(
        refusal_of_assign(&mut m, "a", 1),
        "1 core was asked for and this machine has none for jobs: have `housekeeping` changed in the configuration"
    );
}

#[test]
fn every_refusal_of_a_list_names_the_list_and_the_remedy() {
    let mut m = machine();
    m.state = WardenState::new(regular_topology(1, 1, 1, 4, 2), &cpu_set("0,4"));
    m.assign("a", 1, &[]).unwrap();
    let mut refusal_of_assign = |list: &str| {
        let cpus: CpuSet = cpu_set(list);
        m.command(Command::Assign(assign_of("b", Some(CpuRequest::Exactly(cpus))))).unwrap_err().to_string()
    };
    assert_eq!(refusal_of_assign("8-9"), "CPUs 8-9 are not on this machine or offline: choose among 0-7");
    assert_eq!(
        refusal_of_assign("4"),
        "CPU 4 is kept for housekeeping: choose others, or have `housekeeping` changed in the configuration"
    );
    assert_eq!(
        refusal_of_assign("1,5"),
        "CPU 1 belongs to manual:a: choose others, or have manual:a released first"
    );
    assert_eq!(
        refusal_of_assign("2"),
        "CPU 2 shares its core with 6, which the list leaves out: add 6, or have share_smt = true set in the \
         configuration"
    );
    assert_eq!(refusal_of_assign(""), "the CPU list is empty: name at least one");
}

#[test]
fn only_an_administrator_may_use_the_name_of_another_source() {
    let mut m = machine();
    m.policy.user_max_cores = 8;
    let refusal = m.assign_as(ALICE, "session:5", 1, &[]).unwrap_err();
    assert_eq!(refusal, Refusal::SchedulerJobByUser { job: job("session:5") });
    assert_eq!(
        refusal.to_string(),
        "only an administrator may make a job of the source session, such as session:5: choose a name without a source"
    );
    assert_eq!(m.assign("x", 1, &[77]).unwrap_err(), Refusal::NoSuchProcess { pid: Pid(77) });
}
