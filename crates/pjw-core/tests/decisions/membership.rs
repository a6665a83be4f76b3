//! Membership: the evidence by which a process belongs to a job.

use pjw_core::ids::{Comm, Pid, StartTime, Uid};
use pjw_core::job::{CpuRequest, JobSource};
use pjw_core::snapshot::{BatchIdentity, BatchRole, JobProcessGrouping};
use pjw_core::time::Nanos;

use crate::machine::{Machine, SECOND, in_cgroup, in_environment, job, machine};
use crate::restore::restart;

const SLURM_JOB: &str = "/system.slice/slurmstepd.scope/job_7";

/// Lets another program move a process to the root cgroup, where no batch system marks it.
fn move_to_root_cgroup(m: &Machine, pid: u32) {
    m.world().move_process(Pid(pid), "/");
    m.process(pid).batch_identity = Some(BatchIdentity::default());
}

#[test]
fn a_descendant_after_setsid_and_double_fork_stays_a_member() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.spawn(11, 10, 1001).session = Pid(11);
    m.settle();
    m.spawn(12, 11, 1001).session = Pid(11);
    m.settle();
    m.exit(11);
    m.exit(10);
    m.settle();
    assert_eq!(m.member(12), "manual:a by Parent");
    m.spawn(13, 12, 1001);
    m.settle();
    assert_eq!(m.member(13), "manual:a by Parent");
}

#[test]
fn existing_descendants_join_with_their_ancestor_and_its_siblings_do_not() {
    let mut m = machine();
    m.spawn(9, 1, 1001);
    m.spawn(10, 9, 1001);
    m.spawn(11, 10, 1001);
    m.spawn(20, 9, 1001);
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!([m.member(9), m.member(11), m.member(20)], ["-", "manual:a by Parent", "-"]);
}

#[test]
fn a_schedulers_cgroup_makes_a_job_and_its_member() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.settle();
    assert_eq!(m.member(10), "slurm:7 by Cgroup");
    assert_eq!(m.grant("slurm:7"), "0-1");
}

#[test]
fn the_daemon_and_its_thaw_watcher_are_no_members_of_the_job_in_whose_cgroup_they_are() {
    let mut m = machine();
    (m.policy.own_pid, m.policy.thaw_watcher_pid) = (Some(Pid(10)), Some(Pid(11)));
    for (pid, parent) in [(10, 1), (11, 10), (12, 1)] {
        in_cgroup(m.spawn(pid, parent, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    }
    m.settle();
    assert_eq!([10, 11, 12].map(|pid| m.member(pid)), ["-", "-", "slurm:7 by Cgroup"]);
}

#[test]
fn a_member_that_is_moved_into_another_cgroup_stays_a_member() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.settle();
    m.world().persistent_cgroups.insert(SLURM_JOB.to_owned());
    move_to_root_cgroup(&m, 10);
    m.settle();
    assert_eq!(m.member(10), "slurm:7 by Cgroup");
}

#[test]
fn a_process_with_the_job_id_of_another_user_in_its_environment_is_no_member() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    in_environment(m.spawn(20, 1, 1002), "slurm:7", JobProcessGrouping::Neither, None);
    in_environment(m.spawn(21, 1, 1002), "slurm:8", JobProcessGrouping::Neither, Some(CpuRequest::Cores(8)));
    m.settle();
    assert_eq!([m.member(20), m.member(21)], ["-", "-"]);
    assert!(!m.state.jobs.contains_key(&job("slurm:8")), "there is no job either");
}

#[test]
fn a_job_id_in_the_environment_makes_a_member_if_the_job_has_the_same_user() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    in_environment(m.spawn(20, 1, 1001), "slurm:7", JobProcessGrouping::Neither, None);
    m.settle();
    assert_eq!(m.member(20), "slurm:7 by Environment");
}

#[test]
fn a_job_id_in_the_environment_makes_a_member_below_the_launcher_of_the_scheduler() {
    let mut m = machine();
    let role = BatchRole::Launcher(JobSource::Slurm);
    m.spawn(5, 1, 0).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
    in_environment(m.spawn(10, 5, 1001), "slurm:7", JobProcessGrouping::Neither, Some(CpuRequest::Cores(3)));
    m.settle();
    assert_eq!([m.member(5), m.member(10)], ["-", "slurm:7 by Environment"]);
    assert_eq!(m.grant("slurm:7"), "0-2");
}

#[test]
fn a_launcher_counts_for_each_process_of_a_long_chain_below_it_and_not_for_one_beside_it() {
    let mut m = machine();
    m.world().pid_max = 10_000;
    let role = BatchRole::Launcher(JobSource::Slurm);
    m.spawn(5, 1, 0).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
    let named = |m: &Machine, pid, parent, id: &str| {
        in_environment(
            m.spawn(pid, parent, 1001),
            id,
            JobProcessGrouping::Neither,
            Some(CpuRequest::Cores(1)),
        );
    };
    m.spawn(10, 5, 1001);
    named(&m, 20, 1, "slurm:8");
    (1000..2500).for_each(|pid| drop(m.spawn(pid, if pid == 1000 { 10 } else { pid - 1 }, 1001)));
    named(&m, 2500, 2499, "slurm:7");
    named(&m, 2501, 2498, "slurm:9");
    m.settle();
    let members = [10, 20, 2499, 2500, 2501].map(|pid| m.member(pid));
    assert_eq!(members, ["-", "-", "-", "slurm:7 by Environment", "slurm:9 by Environment"]);
}

#[test]
fn the_prolog_of_a_scheduler_makes_no_job_of_root() {
    let mut m = machine();
    let role = BatchRole::Launcher(JobSource::Slurm);
    m.spawn(5, 1, 0).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
    in_environment(m.spawn(10, 5, 0), "slurm:7", JobProcessGrouping::Neither, Some(CpuRequest::Cores(3)));
    m.settle();
    assert!(m.state.jobs.is_empty());
}

#[test]
fn a_process_of_a_user_with_the_name_of_a_launcher_is_no_launcher() {
    let mut m = machine();
    let role = BatchRole::Launcher(JobSource::Slurm);
    m.spawn(5, 1, 1001).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
    in_environment(m.spawn(10, 5, 1001), "slurm:7", JobProcessGrouping::Neither, Some(CpuRequest::Cores(8)));
    m.settle();
    assert_eq!(m.member(10), "-");
}

#[test]
fn a_member_that_takes_the_name_of_a_helper_stays_a_member() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    let role = BatchRole::Helper(JobSource::Slurm);
    m.spawn(11, 10, 1001).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
    m.settle();
    assert_eq!(m.member(11), "manual:a by Parent");
}

#[test]
fn a_schedulers_helper_inside_the_jobs_cgroup_is_no_member() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    in_cgroup(m.spawn(11, 1, 0), "slurm:7", SLURM_JOB, None);
    m.process(11).batch_identity.as_mut().unwrap().role = BatchRole::Helper(JobSource::Slurm);
    m.settle();
    assert_eq!([m.member(10), m.member(11)], ["slurm:7 by Cgroup".to_owned(), "-".to_owned()]);
}

#[test]
fn a_session_counts_only_where_the_source_gives_each_job_one() {
    let mut m = machine();
    for (source, launcher, process_scope) in [
        ("pbs", JobSource::Pbs, JobProcessGrouping::Session),
        ("lsf", JobSource::Lsf, JobProcessGrouping::ProcessGroup),
    ] {
        let base = if source == "pbs" { 100 } else { 200 };
        let role = BatchRole::Launcher(launcher);
        m.spawn(base, 1, 0).batch_identity = Some(BatchIdentity { role, ..BatchIdentity::default() });
        in_environment(
            m.spawn(base + 1, base, 1001),
            &format!("{source}:1"),
            process_scope,
            Some(CpuRequest::Cores(1)),
        );
        m.world().setsid(Pid(base + 1));
        // An orphan of the same session in another process group.
        m.spawn(base + 2, 1, 1001).session = Pid(base + 1);
    }
    m.settle();
    assert_eq!([m.member(102), m.member(202)], ["pbs:1 by Session", "-"]);
}

#[test]
fn a_reused_pid_is_another_process() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(11, 1, 1001);
    m.assign("a", 2, &[10, 11]).unwrap();
    m.exit(10);
    m.spawn(10, 1, 1002).id.start = StartTime(111);
    m.settle();
    assert_eq!([m.member(10), m.member(11)], ["-", "manual:a by Registered"]);
}

#[test]
fn a_job_ends_with_its_last_member_and_its_cores_are_free_in_that_cycle() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 8, &[10]).unwrap();
    m.exit(10);
    m.spawn(20, 1, 1001);
    assert_eq!(m.assign("b", 8, &[20]).unwrap().grant.unwrap().cpus.to_string(), "0-7");
    assert_eq!(m.grant("a"), "-");
}

#[test]
fn a_job_ends_when_its_schedulers_cgroup_is_gone() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.settle();
    move_to_root_cgroup(&m, 10);
    m.settle();
    assert_eq!(m.grant("slurm:7"), "-");
    assert_eq!(m.effective_mask(10, 10), "0-7");
}

#[test]
fn an_unknown_core_count_is_not_guessed() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, None);
    m.settle();
    assert_eq!((m.grant("slurm:7").as_str(), m.effective_mask(10, 10).as_str()), ("-", "0-7"));
    assert_eq!(m.warnings(), ["unknown-count"]);
    m.policy.source_cores.insert(JobSource::Slurm, 4);
    m.settle();
    assert_eq!(m.grant("slurm:7"), "0-3");
}

#[test]
fn unassigned_processes_are_reported_and_adopted_only_if_configured_and_if_their_user_has_one_job() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(30, 1, 1001);
    m.spawn(31, 1, 33);
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!((m.member(30).as_str(), m.warnings()), ("-", vec!["stray"]));
    m.policy.adopt_unassigned_processes = true;
    m.settle();
    assert_eq!([m.member(30), m.member(31)], ["manual:a by Adopted", "-"]);
    m.spawn(40, 1, 1001);
    m.spawn(41, 1, 1002);
    m.assign("b", 1, &[41]).unwrap();
    m.spawn(50, 1, 1002);
    m.assign("c", 1, &[50]).unwrap();
    m.spawn(51, 1, 1002);
    m.settle();
    assert_eq!(m.member(51), "-", "two jobs: the right one is unknown");
}

#[test]
fn a_process_is_not_adopted_if_a_later_process_shows_that_its_user_has_a_second_job() {
    let mut m = machine();
    m.policy.adopt_unassigned_processes = true;
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(1)));
    m.spawn(20, 1, 1001);
    let other = "/system.slice/slurmstepd.scope/job_8";
    in_cgroup(m.spawn(30, 1, 1001), "slurm:8", other, Some(CpuRequest::Cores(1)));
    m.settle();
    assert_eq!([m.member(10), m.member(20), m.member(30)], ["slurm:7 by Cgroup", "-", "slurm:8 by Cgroup"]);
}

#[test]
fn each_descendant_in_a_long_chain_joins_with_the_first_one() {
    let mut m = machine();
    m.world().pid_max = 10_000;
    m.spawn(10, 1, 1001);
    (11..1500).for_each(|pid| drop(m.spawn(pid, pid - 1, 1001)));
    m.settle();
    m.assign("a", 2, &[10]).unwrap();
    assert!((11..1500).all(|pid| m.member(pid) == "manual:a by Parent"));
}

#[test]
fn the_processes_of_a_login_are_counted_and_only_the_programs_that_they_start_are_reported() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(30, 1, 1001).comm = Comm::from("systemd");
    m.spawn(31, 1, 1001).comm = Comm::from("sshd-session");
    // A child of process 1 leads a session of its own here. Other processes do not.
    m.spawn(32, 1, 1001).comm = Comm::from("bash");
    m.assign("a", 2, &[10]).unwrap();
    assert_eq!(m.warnings(), Vec::<&str>::new());
    assert_eq!(m.state.unassigned_pids_by_user[&Uid(1001)].len(), 3, "status counts them");
    m.spawn(33, 32, 1001).comm = Comm::from("solver");
    m.spawn(34, 32, 1001).comm = Comm::from("bash");
    m.settle();
    let warnings = &m.last.as_ref().unwrap().warnings;
    let reported: Vec<_> = warnings.iter().map(|warning| (warning.pid, warning.text.as_str())).collect();
    let why = "2 processes of user 1001 belong to no job, though the user has jobs here: pids 33, 34";
    assert_eq!(reported, [(Some(Pid(33)), why)], "a shell inside a shell may be a script");
    m.exit(34);
    m.process(33).comm = Comm::from("sftp-server");
    m.settle();
    assert_eq!(m.warnings(), Vec::<&str>::new(), "it executed another program");
    m.process(32).comm = Comm::from("solver");
    m.settle();
    assert_eq!(m.warnings(), ["stray"]);
    m.policy.adopt_unassigned_processes = true;
    m.settle();
    assert_eq!(
        [m.member(30), m.member(32)],
        ["manual:a by Adopted", "manual:a by Adopted"],
        "all processes of the user are adopted"
    );
}

#[test]
fn the_shell_that_su_or_sudo_starts_for_a_login_is_not_reported_although_it_leads_no_session() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    for (pid, starter) in [(30, "su"), (40, "sudo")] {
        m.spawn(pid, 1, 0).comm = Comm::from(starter);
        let mut shell = m.spawn(pid + 1, pid, 1001);
        (shell.comm, shell.session) = (Comm::from("bash"), Pid(pid));
    }
    m.settle();
    assert_eq!(m.warnings(), Vec::<&str>::new());
    // A script that lost its parent, and one that a shell started.
    m.process(30).comm = Comm::from("systemd");
    m.settle();
    assert_eq!(m.last.as_ref().unwrap().warnings[0].pid, Some(Pid(31)));
    m.process(30).comm = Comm::from("bash");
    m.settle();
    assert_eq!(m.last.as_ref().unwrap().warnings[0].pid, Some(Pid(31)));
}

#[test]
fn a_process_that_executes_a_program_of_pjw_is_no_longer_reported() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.spawn(20, 1, 1001).session = Pid(1);
    m.settle();
    assert_eq!(m.warnings(), ["stray"]);
    m.process(20).comm = Comm::from("pjwctl");
    let snapshot = m.scan_only(&[20]);
    assert!(m.decide(&snapshot, &[]).warnings.is_empty());
    assert!(m.state.unassigned_pids_by_user[&Uid(1001)].is_empty());
}

#[test]
fn an_orphan_of_a_job_is_recognised_by_its_mask() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.spawn(11, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.assign("root", 2, &[11]).unwrap();
    // The parents started and exited between two scans.
    m.advance(SECOND);
    for (pid, uid, mask) in
        [(20, 1001, "0-1"), (21, 1001, "1"), (22, 1001, "1-2"), (23, 1002, "0"), (24, 0, "2-3")]
    {
        m.spawn(pid, 1, uid);
        m.bind(pid, pid, mask);
    }
    m.settle();
    let members = [20, 21, 22, 23, 24].map(|pid| m.member(pid));
    assert_eq!(members, ["manual:a by Parent", "manual:a by Parent", "-", "-", "-"]);
    // A process that was seen outside before has set such a mask itself.
    m.spawn(30, 1, 1001);
    m.settle();
    m.bind(30, 30, "0");
    m.settle();
    assert_eq!(m.member(30), "-");
}

/// `systemd --user` adopts the orphans of its user.
#[test]
fn an_orphan_that_the_service_manager_of_its_user_adopted_is_recognised_by_its_mask() {
    let mut m = machine();
    m.spawn(5, 1, 1001).comm = Comm::from("systemd");
    m.spawn(6, 1, 1001).comm = Comm::from("launcher");
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    for (pid, parent, mask) in [(20, 5, "0-1"), (21, 5, "0-2"), (22, 6, "0-1")] {
        m.spawn(pid, parent, 1001);
        m.bind(pid, pid, mask);
    }
    m.settle();
    assert_eq!([20, 21, 22].map(|pid| m.member(pid)), ["manual:a by Parent", "-", "-"]);
}

#[test]
fn with_fork_events_a_mask_makes_no_member() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    m.state.fork_events_complete_since = Some(Nanos(m.now() - StartTime::TICK.0));
    for (pid, start) in [(20, m.now()), (21, m.now() - SECOND / 2)] {
        m.spawn(pid, 1, 1001).id.start = StartTime(start / StartTime::TICK.0);
        m.bind(pid, pid, "0-1");
    }
    m.settle();
    assert_eq!(
        [m.member(20), m.member(21)],
        ["-", "manual:a by Parent"],
        "process 21 was born before fork events were complete"
    );
}

/// The daemon reads fork events, and then scans: an ancestor that ended before the scan has no event.
#[test]
fn an_orphan_of_unknown_descent_is_recognised_by_its_mask_although_its_own_fork_event_was_read() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    m.spawn(11, 10, 1001);
    m.world().events.clear();
    m.state.fork_events_complete_since = Some(Nanos(m.now()));
    m.advance(SECOND);
    m.spawn(12, 11, 1001);
    m.spawn(13, 12, 1001);
    m.spawn(14, 1, 1001);
    m.exit(11);
    m.exit(12);
    m.bind(14, 14, "0-1");
    let events = std::mem::take(&mut m.world().events);
    m.state.apply_process_events(&events);
    m.settle();
    let members = [13, 14].map(|pid| m.member(pid));
    assert_eq!(
        members,
        ["manual:a by Parent", "-"],
        "the descent of process 14 is known, because its parent is process 1"
    );
}

#[test]
fn the_descent_of_a_child_of_process_1_that_was_born_before_the_first_scan_is_known() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    restart(&mut m, 2);
    m.world().events.clear();
    m.state.fork_events_complete_since = Some(Nanos(m.now()));
    m.advance(SECOND);
    m.spawn(20, 1, 1001);
    m.bind(20, 20, "0-1");
    let events = std::mem::take(&mut m.world().events);
    m.state.apply_process_events(&events);
    m.settle();
    assert_eq!(
        [10, 20].map(|pid| m.member(pid)),
        ["manual:a by Registered", "-"],
        "process 20 requested its mask itself"
    );
}

#[test]
fn the_programs_of_pjw_are_not_reported_as_unassigned() {
    let mut m = machine();
    m.spawn(10, 1, 1001);
    m.assign("a", 2, &[10]).unwrap();
    for (pid, name) in [(20, "pjwctl"), (21, "pjwd"), (22, "pjw-thaw")] {
        m.spawn(pid, 1, 1001).comm = Comm::from(name);
    }
    m.settle();
    assert!(m.warnings().is_empty(), "{:?}", m.warnings());
}

#[test]
fn a_job_goes_on_after_all_processes_were_moved_out_of_its_cgroup() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", SLURM_JOB, Some(CpuRequest::Cores(2)));
    m.settle();
    m.world().persistent_cgroups.insert(SLURM_JOB.to_owned());
    m.world().move_process(Pid(10), "/");
    m.settle();
    assert_eq!(m.grant("slurm:7"), "0-1");
    m.exit(10);
    m.settle();
    assert_eq!(m.grant("slurm:7"), "-");
}
