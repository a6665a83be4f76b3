//! Borrowers that can borrow no core: they are squeezed or frozen, and explanations and reports say so.

use pjw_core::command_scan::command_scan_request;
use pjw_core::explain::{explain_mask, explain_process, held_cpus};
use pjw_core::ids::Tid;
use pjw_core::state::dirty::DirtySet;

use super::*;

/// A machine whose housekeeping PUs these are, with a borrower `batch` that has all other cores.
fn starved_machine(housekeeping: &str, starved: StarvedPolicy) -> Machine {
    let mut m = lending_machine();
    m.policy.housekeeping_cpus = cpu_set(housekeeping);
    m.state = WardenState::new(m.state.topology.clone(), &cpu_set(housekeeping));
    m.policy.lending.starved = starved;
    m.spawn(20, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 8, &[20]).unwrap();
    m
}

/// Another job gets all cores.
fn take_all_cores(m: &mut Machine) {
    m.spawn(10, 1, 0);
    let all = u32::try_from(m.state.pool.free_cpus().len()).unwrap();
    m.assign("normal", all, &[10]).unwrap();
}

#[test]
fn a_borrower_without_a_core_shares_the_housekeeping_pus_or_is_frozen() {
    for (housekeeping, starved, can_freeze, ownerships, cpus) in [
        ("0", StarvedPolicy::Squeeze, true, Ownership::Squeezed, "0"),
        ("0", StarvedPolicy::Freeze, true, Ownership::Frozen, "1-7"),
        ("", StarvedPolicy::Squeeze, true, Ownership::Frozen, "0-7"),
        ("0", StarvedPolicy::Freeze, false, Ownership::Squeezed, "0"),
    ] {
        let mut m = starved_machine(housekeeping, starved);
        m.policy.cpuset_support.can_freeze = can_freeze;
        take_all_cores(&mut m);
        assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(ownerships), cpus));
        let spec = &m.state.cpusets.cpuset_of(&job("batch")).unwrap().job_cpuset.spec;
        assert_eq!((spec.idle, spec.frozen), (true, ownerships == Ownership::Frozen));
        let explained_cpus = if spec.frozen { "" } else { cpus };
        assert_eq!(
            held_cpus(&m.state.jobs[&job("batch")]).to_string(),
            explained_cpus,
            "the CPUs that explain names"
        );
        assert_sound(&m);
        m.release("normal").unwrap();
        assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed), "a core became free");
        assert!(!m.state.cpusets.cpuset_of(&job("batch")).unwrap().job_cpuset.spec.frozen);
    }
}

#[test]
fn a_command_with_refuses_frozen_makes_no_job_whose_processes_would_be_frozen() {
    let run = |id: &str, refuses_frozen| {
        let (class, pids) = (Some(PriorityClass::Besteffort), vec![Pid(30)]);
        let request = assign_of(id, Some(CpuRequest::Cores(1)));
        Command::Assign(AssignCommand { class, pids, must_be_new: true, refuses_frozen, ..request })
    };
    for (housekeeping, starved, expected) in [
        ("", StarvedPolicy::Squeeze, Ownership::Frozen),
        ("0", StarvedPolicy::Freeze, Ownership::Frozen),
        ("0", StarvedPolicy::Squeeze, Ownership::Squeezed),
    ] {
        let mut m = starved_machine(housekeeping, starved);
        m.spawn(30, 1, 0);
        m.command(run("early", true)).unwrap();
        assert_eq!(ownership(&m, "early"), Some(Ownership::Borrowed), "batch gave it a core");
        m.release("early").unwrap();
        take_all_cores(&mut m);
        let reply = m.command(run("late", true));
        if expected == Ownership::Frozen {
            let refusal = reply.unwrap_err();
            assert_eq!(refusal, Refusal::WouldFreeze { job: job("late") });
            assert!(!refusal.is_reported() && m.events.iter().all(|event| event.kind != EventKind::Refused));
            assert_eq!((m.state.jobs.get(&job("late")), m.member(30).as_str()), (None, "-"));
            m.command(run("late", false)).unwrap();
        } else {
            reply.unwrap();
        }
        assert_eq!(ownership(&m, "late"), Some(expected), "{housekeeping} {starved:?}");
        assert_sound(&m);
    }
}

#[test]
fn a_borrower_that_masks_keep_is_squeezed_although_it_is_to_be_frozen() {
    let mut m = starved_machine("0", StarvedPolicy::Freeze);
    m.policy.enforcement = EnforcementMethod::Affinity;
    take_all_cores(&mut m);
    assert_eq!((ownership(&m, "batch"), m.grant("batch").as_str()), (Some(Ownership::Squeezed), "0"));
    assert_eq!(m.effective_mask(20, 20), "0", "it is not on the cores of other jobs");
    assert_sound(&m);
}

#[test]
fn a_borrower_that_can_neither_be_squeezed_nor_frozen_is_unconfined_with_a_warning() {
    for starved in [StarvedPolicy::Squeeze, StarvedPolicy::Freeze] {
        let mut m = starved_machine("", starved);
        m.policy.cpuset_support.can_freeze = false;
        take_all_cores(&mut m);
        assert_eq!((ownership(&m, "batch"), m.effective_mask(20, 20).as_str()), (None, "0-7"), "{starved:?}");
        let warnings = &m.last.as_ref().unwrap().warnings;
        let unserved: Vec<_> = warnings.iter().filter(|warning| warning.code == "unserved").collect();
        assert!(
            unserved.len() == 1
                && unserved[0]
                    .text
                    .contains("no housekeeping CPUs that it could share, and it can't be frozen"),
            "{warnings:?}"
        );
        assert!(unserved[0].remedy.contains("housekeeping"), "{unserved:?}");
        m.release("normal").unwrap();
        assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed), "a core became free");
    }
}

#[test]
fn a_frozen_job_holds_no_core_and_does_not_sleep() {
    let mut m = lending_machine();
    m.policy.lending.starved = StarvedPolicy::Freeze;
    m.spawn(20, 1, 0);
    m.spawn(10, 1, 0);
    assign_class(&mut m, "batch", PriorityClass::Besteffort, 2, &[20]).unwrap();
    for _ in 0..12 {
        m.run(&[20]);
        m.settle();
    }
    m.assign("normal", 8, &[10]).unwrap();
    assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
    for _ in 0..60 {
        m.advance(SECOND);
        m.settle();
    }
    m.release("normal").unwrap();
    for _ in 0..12 {
        m.run(&[20]);
        m.settle();
    }
    m.exit(20);
    m.settle();
    let report = m.reports.iter().find(|report| report.id == job("batch")).unwrap();
    assert!(report.is_borrower && report.usage.asleep_ns < 2 * SECOND, "{report:?}");
    assert!((40 * SECOND..=52 * SECOND).contains(&report.usage.held_ns), "24 s on 2 cores: {report:?}");
}

#[test]
fn explain_says_of_a_frozen_process_that_it_is_frozen_why_and_until_when() {
    for (housekeeping, starved, why) in [
        ("0", StarvedPolicy::Freeze, "lending.starved = \"freeze\""),
        ("", StarvedPolicy::Squeeze, "there are no housekeeping CPUs"),
    ] {
        let mut m = starved_machine(housekeeping, starved);
        take_all_cores(&mut m);
        assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
        let of_process = explain_process(&m.state, &m.policy, Pid(20)).join("\n");
        let of_job = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]).join("\n");
        for text in [of_process, of_job] {
            assert!(text.contains("its processes are frozen, because") && text.contains(why), "{text}");
            assert!(text.contains("run again as soon as a core is free"), "{text}");
            assert!(
                !text.contains("keeps it there") && !text.contains("keeps its processes there"),
                "{text}"
            );
            assert!(!text.contains("holds CPUs"), "it holds none: {text}");
        }
        let member = &m.state.members[&Pid(20)];
        let of_thread = explain_mask(&m.state, member, Tid(20), &member.threads[&Tid(20)]);
        assert_eq!(of_thread, "it does not run: its job can borrow no core, and is frozen");
        m.release("normal").unwrap();
        let of_process = explain_process(&m.state, &m.policy, Pid(20)).join("\n");
        assert!(!of_process.contains("frozen"), "{of_process}");
    }
}

#[test]
fn a_job_that_holds_the_housekeeping_cpus_is_the_reason_why_a_borrower_can_not_share_them() {
    for can_freeze in [true, false] {
        let mut m = starved_machine("", StarvedPolicy::Squeeze);
        m.policy.cpuset_support.can_freeze = can_freeze;
        take_all_cores(&mut m);
        // A reload reserves PUs that the other job holds.
        m.policy.housekeeping_cpus = cpu_set("0");
        m.state.pool.set_housekeeping(&cpu_set("0"));
        m.state.dirty = DirtySet::everything();
        m.settle();
        let why = "manual:normal holds the housekeeping CPU 0 until it ends or is released";
        if can_freeze {
            assert_eq!(ownership(&m, "batch"), Some(Ownership::Frozen));
            let text = explain_job(&m.state, &m.policy, &m.state.jobs[&job("batch")]).join("\n");
            assert!(
                text.contains(&format!("its processes are frozen, because {why}: they run again")),
                "{text}"
            );
        } else {
            let warnings = &m.last.as_ref().unwrap().warnings;
            let unserved = warnings.iter().find(|warning| warning.code == "unserved").unwrap();
            assert!(
                unserved.text.contains(why) && !unserved.remedy.contains("set housekeeping"),
                "{unserved:?}"
            );
        }
        m.release("normal").unwrap();
        assert_eq!(ownership(&m, "batch"), Some(Ownership::Borrowed));
    }
}

#[test]
fn the_events_of_a_frozen_job_name_no_cpu_that_it_has() {
    let mut m = starved_machine("", StarvedPolicy::Freeze);
    let text_of_resizing = |m: &Machine| {
        let mut resized = m
            .events
            .iter()
            .filter(|event| event.kind == EventKind::Resized && event.job.as_ref() == Some(&job("batch")));
        resized.next_back().unwrap().text.clone()
    };
    take_all_cores(&mut m);
    assert_eq!(
        text_of_resizing(&m),
        "no CPU instead of CPUs 0-7: no core can be borrowed: it is frozen until there is one"
    );
    m.release("normal").unwrap();
    assert_eq!(text_of_resizing(&m), "CPUs 0-7 instead of no CPU: it borrows cores: CPUs 0-7 are free");
}

#[test]
fn the_use_in_a_second_in_which_a_borrower_lost_its_cores_is_divided_if_its_processes_were_not_read_then() {
    let mut m = starved_machine("", StarvedPolicy::Squeeze);
    m.policy.cpuset_support.can_freeze = false;
    m.run(&[20]);
    m.settle();
    m.run_for(&[20], 4 * SECOND / 10);
    let commands = [Command::Assign(assign_of("normal", Some(CpuRequest::Cores(8))))];
    let scan = command_scan_request(&mut m.state, &commands);
    let _ = m.cycle(&scan, &commands);
    assert_eq!(ownership(&m, "batch"), None, "it runs unconfined");
    m.run_for(&[20], 6 * SECOND / 10);
    m.settle();
    m.release("batch").unwrap();
    let usage = &m.reports[0].usage;
    let tenths = |ns: u64| (ns + SECOND / 20) / (SECOND / 10);
    assert_eq!((tenths(usage.cpu_ns), tenths(usage.held_ns)), (20, 8 * 14), "{usage:?}");
    assert_eq!((tenths(usage.without_pus_ns), tenths(usage.without_pus_cpu_ns)), (6, 6), "{usage:?}");
}
