//! Affinity attempts: a process in a job cpuset that requests PUs outside of it is reported once.

use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, Tid};
use pjw_core::job::CpuRequest;
use pjw_core::plan::{MaskAction, MaskActionKind};
use pjw_core::time::Nanos;

use super::machine::{Machine, SECOND, cpu_set, in_cgroup, job, machine, machine_with_cpusets};

const SLURM_CGROUP: &str = "/slurmstepd.scope/job_4";

/// A machine on which a cpuset of Slurm keeps process 10 on PUs 4-5. Process 20 is in no job.
fn slurm_job_in_cpuset() -> Machine {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:4", SLURM_CGROUP, Some(CpuRequest::Pus(2)));
    m.world().write_cpuset(SLURM_CGROUP, Some(&cpu_set("4-5")));
    m.bind(10, 10, "4-5");
    m.spawn(20, 1, 0);
    m.settle();
    assert_eq!(m.grant("slurm:4"), "4-5");
    m.advance(SECOND);
    m
}

/// Settles the machine. Returns the violations that were reported since the last command or call of this function.
fn violations(m: &mut Machine) -> Vec<Event> {
    m.settle();
    reported_violations(m)
}

/// The violations that were reported since the last command, or since the machine was settled last.
fn reported_violations(m: &Machine) -> Vec<Event> {
    m.events.iter().filter(|event| event.kind == EventKind::Violation).cloned().collect()
}

/// Starts thread 11 of process 10, and lets the threads 10 and 11 run until they are pinned. Returns the PU of thread
/// 10.
fn pin_two_threads(m: &mut Machine) -> String {
    m.clone_thread(10, 11);
    (0..3).for_each(|_| {
        m.run(&[10, 11]);
        m.settle();
    });
    let pinned = m.effective_mask(10, 10);
    assert_eq!(cpu_set(&pinned).len(), 1, "{pinned}");
    pinned
}

fn kinds(actions: &[MaskAction]) -> Vec<MaskActionKind> {
    actions.iter().map(|action| action.kind).collect()
}

#[test]
fn a_request_beyond_the_grant_is_reported_with_the_requested_and_the_resulting_mask() {
    let mut m = slurm_job_in_cpuset();
    m.clone_thread(10, 11);
    m.add_affinity_request(10, 11, "0-7");
    let reported = violations(&mut m);
    let [event] = reported.as_slice() else { panic!("{reported:?}") };
    assert_eq!(
        (event.job.as_ref(), event.pid, event.tid),
        (Some(&job("slurm:4")), Some(Pid(10)), Some(Tid(11)))
    );
    assert_eq!(event.cpus, Some(cpu_set("0-7")));
    let expected =
        "thread 11 of process 10 (mpirun) asked for CPUs 0-7: the cpuset of slurm:4 kept it on CPUs 4-5";
    assert_eq!(event.text, expected);
    assert_eq!(violations(&mut m), [], "it is reported once");
    m.add_affinity_request(10, 11, "5-6");
    assert!(
        violations(&mut m)[0].text.ends_with("asked for CPUs 5-6: the cpuset of slurm:4 kept it on CPU 5")
    );
}

#[test]
fn a_call_that_the_kernel_refused_is_reported_as_refused() {
    let mut m = slurm_job_in_cpuset();
    m.add_affinity_request(10, 10, "0-1").refused = true;
    let reported = violations(&mut m);
    assert!(
        reported.len() == 1
            && reported[0].text.ends_with(
                "asked for CPUs 0-1: the kernel refused, for none of them is in CPUs 4-5 of slurm:4"
            ),
        "{reported:?}"
    );
}

#[test]
fn a_request_within_the_grant_is_not_reported() {
    let mut m = slurm_job_in_cpuset();
    m.add_affinity_request(10, 10, "4");
    m.add_affinity_request(10, 10, "4-5");
    m.add_affinity_request(10, 10, "5,64-127");
    m.add_affinity_request(10, 10, "64").refused = true;
    m.add_affinity_request(20, 20, "0-7");
    m.add_affinity_request(99, 99, "0-7");
    assert_eq!(
        violations(&mut m),
        [],
        "requests of processes outside jobs, and for PUs that do not exist, are not reported"
    );
    m.switch_off("5");
    m.settle();
    m.advance(SECOND);
    m.add_affinity_request(10, 10, "4-5");
    assert_eq!(violations(&mut m), [], "offline PUs belong to no job");
}

#[test]
fn many_attempts_of_one_process_are_one_event() {
    let mut m = slurm_job_in_cpuset();
    m.spawn(12, 10, 1001);
    m.settle();
    for _ in 0..1000 {
        m.add_affinity_request(10, 10, "0-7");
        m.add_affinity_request(12, 12, "0-7");
    }
    let reported = violations(&mut m);
    assert_eq!(reported.iter().map(|event| event.pid).collect::<Vec<_>>(), [Some(Pid(10)), Some(Pid(12))]);
    assert!(reported.iter().all(|event| event.text.ends_with("(and 999 times more)")), "{reported:?}");
}

#[test]
fn an_attempt_of_a_pinned_thread_is_reported_once_and_the_pin_restored() {
    for is_reported_before_the_change in [false, true] {
        let mut m = slurm_job_in_cpuset();
        let pinned = pin_two_threads(&mut m);
        assert!(["4", "5"].contains(&pinned.as_str()), "{pinned}");
        m.run(&[10, 11]);
        m.add_affinity_request(10, 10, "0-7");
        let mut reported = Vec::new();
        if is_reported_before_the_change {
            // The call is reported in a scan of another process.
            let snapshot = m.scan_only(&[20]);
            reported.extend(m.decide(&snapshot, &[]).events);
        }
        m.bind(10, 10, "4-5");
        reported.extend(violations(&mut m));
        assert_eq!(reported.len(), 1, "{reported:?}");
        assert!(reported[0].text.contains("asked for CPUs 0-7"), "{reported:?}");
        assert_eq!(m.effective_mask(10, 10), pinned);
        // The call of this thread is not reported.
        m.run(&[10, 11]);
        m.bind(10, 10, "4-5");
        assert!(violations(&mut m)[0].text.contains("requested every PU: its cpuset kept it on CPUs 4-5"));
    }
}

#[test]
fn a_request_for_every_pu_is_no_attempt_in_a_job_that_has_all_online_pus() {
    for (offline, online, cores) in [("", "0-7", 8), ("6-7", "0-5", 6)] {
        let mut m = machine_with_cpusets(true);
        m.switch_off(offline);
        m.spawn(10, 1, 0);
        m.clone_thread(10, 12);
        m.assign("a", cores, &[10]).unwrap();
        assert_eq!(m.grant("a"), online);
        assert!(m.state.is_in_job_cpuset(&m.state.members[&Pid(10)]));
        m.bind(10, 12, "0");
        pin_two_threads(&mut m);
        // The second mask has offline PUs too, or is the same.
        for requested in [online, "0-7"] {
            m.run(&[10, 11]);
            m.add_affinity_request(10, 10, requested);
            m.bind(10, 10, requested);
            assert_eq!(kinds(&m.settle()), [MaskActionKind::Pin], "{requested} of {online}");
            assert_eq!(reported_violations(&m), []);
            // A call that the affinity monitor lost.
            m.run(&[10, 11]);
            m.bind(10, 10, requested);
            assert_eq!(kinds(&m.settle()), [MaskActionKind::Pin], "{requested} of {online}");
            assert_eq!(reported_violations(&m), []);
        }
        assert_eq!(m.effective_mask(10, 12), "0", "the program's own choice");
    }
}

#[test]
fn a_request_for_the_pus_of_the_job_only_is_no_attempt_if_the_call_is_known() {
    for is_known_before_the_change in [false, true] {
        let mut m = slurm_job_in_cpuset();
        let pinned = pin_two_threads(&mut m);
        m.run(&[10, 11]);
        m.add_affinity_request(10, 10, "4-5");
        if is_known_before_the_change {
            // The call is read in a scan of another process.
            let snapshot = m.scan_only(&[20]);
            let events = m.decide(&snapshot, &[]).events;
            assert!(events.iter().all(|event| event.kind != EventKind::Violation), "{events:?}");
        }
        m.bind(10, 10, "4-5");
        assert_eq!(kinds(&m.settle()), [MaskActionKind::Pin]);
        assert_eq!(reported_violations(&m), []);
        assert_eq!(m.effective_mask(10, 10), pinned);
        // A call that is not known may have been for other PUs too.
        m.run(&[10, 11]);
        m.bind(10, 10, "4-5");
        let repaired = m.settle();
        assert_eq!(kinds(&repaired), [MaskActionKind::Repair]);
        assert_eq!(reported_violations(&m).len(), 1);
        let expected = format!(
            "1 thread put back on CPUs 4-5: the program asked for all CPUs of its cpuset, and perhaps for further ones; CPU \
             {pinned} instead"
        );
        assert_eq!(m.mask_events(repaired)[0].text, expected);
        // The later of two calls was for other PUs.
        m.run(&[10, 11]);
        m.add_affinity_request(10, 10, "4-5");
        m.add_affinity_request(10, 10, "0-7");
        m.bind(10, 10, "4-5");
        assert_eq!(kinds(&m.settle()), [MaskActionKind::Repair]);
        assert_eq!(reported_violations(&m).len(), 1);
    }
}

#[test]
fn without_a_cpuset_a_changed_mask_is_reported_and_a_request_alone_is_not() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.advance(SECOND);
    m.add_affinity_request(10, 10, "0-7");
    assert_eq!(violations(&mut m), [], "the program may have restored its mask since the request");
    m.add_affinity_request(10, 10, "0-7");
    m.bind(10, 10, "0-7");
    let reported = violations(&mut m);
    assert!(
        reported.len() == 1 && reported[0].text.contains("left CPUs 0-1: found on CPUs 0-7"),
        "{reported:?}"
    );
}

#[test]
fn an_attempt_of_an_exited_process_is_reported_for_its_job() {
    let mut m = slurm_job_in_cpuset();
    m.spawn(12, 10, 1001);
    m.settle();
    m.add_affinity_request(12, 12, "0-7");
    m.exit(12);
    assert_eq!(violations(&mut m)[0].job, Some(job("slurm:4")), "a member that has just ended");
    m.add_affinity_request(13, 13, "0-7").caller_parent = Pid(10);
    let reported = violations(&mut m);
    assert_eq!(
        (reported[0].job.as_ref(), reported[0].pid),
        (Some(&job("slurm:4")), Some(Pid(13))),
        "the process was never scanned"
    );
    m.add_affinity_request(13, 13, "0-7").caller_parent = Pid(20);
    assert_eq!(violations(&mut m), [], "a child of a process outside jobs");
    m.spawn(12, 20, 0);
    m.add_affinity_request(12, 12, "0-7").called_at = Nanos(m.now());
    assert_eq!(violations(&mut m), [], "the pid belongs to another process now");
}

#[test]
fn a_request_from_before_the_grant_is_not_an_attempt() {
    let mut m = machine();
    in_cgroup(m.spawn(10, 1, 1001), "slurm:4", SLURM_CGROUP, Some(CpuRequest::Pus(2)));
    m.world().write_cpuset(SLURM_CGROUP, Some(&cpu_set("4-5")));
    m.add_affinity_request(10, 10, "0-7");
    m.advance(SECOND);
    m.settle();
    m.add_affinity_request(10, 10, "0-7").called_at = Nanos(SECOND);
    assert_eq!(violations(&mut m), []);
}

#[test]
fn a_request_for_another_process_is_reported_only_if_it_is_in_the_job() {
    let mut m = slurm_job_in_cpuset();
    m.spawn(12, 10, 1001);
    m.settle();
    m.add_affinity_request(10, 10, "0-7").target = Some(Tid(20));
    assert_eq!(violations(&mut m), []);
    m.add_affinity_request(10, 10, "0-7").target = Some(Tid(12));
    assert!(
        violations(&mut m)[0]
            .text
            .contains("asked for CPUs 0-7 for 12: the cpuset of slurm:4 kept it on CPUs 4-5")
    );
}

#[test]
fn an_attempt_in_an_idle_job_is_reported_without_a_scan_of_it() {
    let mut m = slurm_job_in_cpuset();
    m.add_affinity_request(10, 10, "0-7");
    let snapshot = m.scan_only(&[]);
    let events = m.decide(&snapshot, &[]).events;
    assert_eq!(events.iter().map(|event| event.kind).collect::<Vec<_>>(), [EventKind::Violation]);
}

#[test]
fn attempts_of_a_job_are_limited_per_minute() {
    let mut m = slurm_job_in_cpuset();
    let mut reported = Vec::new();
    for pid in 100..300 {
        m.add_affinity_request(pid, pid, "0-7").caller_parent = Pid(10);
        reported.extend(violations(&mut m));
    }
    assert_eq!(reported.len(), 32);
    assert!(
        reported[31].text.ends_with("; further attempts of its job in this minute are not reported"),
        "{reported:?}"
    );
    assert!(!reported[30].text.contains("are not reported"));
    m.advance(60 * SECOND);
    m.add_affinity_request(300, 300, "0-7").caller_parent = Pid(10);
    assert_eq!(violations(&mut m).len(), 1, "the limit holds for one minute");
}
