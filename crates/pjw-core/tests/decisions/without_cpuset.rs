//! Jobs without a cpuset: masks keep them on their cores, with a warning if a cpuset was required. A process that is
//! already in a cpuset of pjw keeps it.

use pjw_core::command::{AssignCommand, Command};
use pjw_core::cpuset_group::{CpusetChange, EnforcementMethod};
use pjw_core::cpusets::{EffectiveEnforcement, effective_enforcement};
use pjw_core::explain;
use pjw_core::ids::Pid;
use pjw_core::job::CpuRequest;

use super::machine::{Machine, assign_of, in_cgroup, job, machine_with_cpusets};

/// A machine with v1 cpusets, where process 7 of `manual:a` is in the cgroup of a service.
fn job_in_service(enforcement: EnforcementMethod) -> Machine {
    let mut machine = machine_with_cpusets(true);
    machine.policy.enforcement = enforcement;
    machine.spawn(7, 1, 0).cgroup = "/system.slice/x.service".into();
    machine.assign("a", 2, &[7]).unwrap();
    machine
}

fn enforcement_of_a(machine: &Machine) -> EffectiveEnforcement {
    effective_enforcement(&machine.state, &machine.policy, &machine.state.jobs[&job("a")])
}

#[test]
fn a_job_in_a_service_cgroup_is_kept_by_masks_with_a_warning_if_cpusets_are_required() {
    let mut machine = job_in_service(EnforcementMethod::Cpuset);
    machine.settle();
    assert_eq!(machine.effective_mask(7, 7), "0-1");
    let warnings = &machine.last.as_ref().unwrap().warnings;
    let no_cpuset: Vec<_> = warnings.iter().filter(|warning| warning.code == "no-wall").collect();
    assert!(no_cpuset.len() == 1 && no_cpuset[0].text.contains("/system.slice/x.service"), "{warnings:?}");
    assert_eq!(no_cpuset[0].job, Some(job("a")));
}

#[test]
fn a_request_that_needs_a_cpuset_gets_a_warning_without_one() {
    let mut machine = job_in_service(EnforcementMethod::Auto);
    let isolated = AssignCommand { isolated: Some(true), ..assign_of("a", Some(CpuRequest::Cores(2))) };
    machine.command(Command::Assign(isolated)).unwrap();
    let warnings = &machine.last.as_ref().unwrap().warnings;
    let no_cpuset: Vec<_> = warnings.iter().filter(|warning| warning.code == "no-wall").collect();
    assert!(no_cpuset.len() == 1 && no_cpuset[0].text.contains("--isolated"), "{warnings:?}");
}

#[test]
fn an_isolated_job_on_cgroup_v1_has_an_ordinary_cpuset_and_a_warning() {
    let mut machine = machine_with_cpusets(true);
    machine.spawn(7, 1, 0);
    let isolated = AssignCommand {
        isolated: Some(true),
        pids: [Pid(7)].into(),
        ..assign_of("a", Some(CpuRequest::Cores(2)))
    };
    machine.command(Command::Assign(isolated)).unwrap();
    machine.settle();
    assert_eq!(enforcement_of_a(&machine), EffectiveEnforcement::Cpuset { path: Some("/pjw/a".to_owned()) });
    assert_eq!(machine.warnings(), ["no-partition"]);
    machine
        .command(Command::Assign(AssignCommand { isolated: Some(false), ..assign_of("a", None) }))
        .unwrap();
    machine.settle();
    assert_eq!(machine.warnings(), Vec::<&str>::new());
}

#[test]
fn a_job_without_a_process_is_said_to_be_kept_by_the_cpuset_that_its_first_process_gets() {
    let mut machine = machine_with_cpusets(true);
    machine.assign("a", 2, &[]).unwrap();
    machine.settle();
    let cpuset = EffectiveEnforcement::Cpuset { path: Some("/pjw/a".to_owned()) };
    assert_eq!(enforcement_of_a(&machine), cpuset);
    machine.policy.enforcement = EnforcementMethod::Affinity;
    assert!(matches!(enforcement_of_a(&machine), EffectiveEnforcement::Affinity { .. }));
}

#[test]
fn a_missing_cpuset_is_explained_by_the_cgroup_of_the_process() {
    let mut machine = job_in_service(EnforcementMethod::Auto);
    machine.settle();
    assert!(machine.warnings().is_empty(), "masks alone do not need a warning");
    let EffectiveEnforcement::Affinity { why } = enforcement_of_a(&machine) else {
        panic!("{:?}", enforcement_of_a(&machine))
    };
    assert!(why.contains("process 7 stays in /system.slice/x.service"), "{why}");
}

#[test]
fn explain_names_the_enforcement_of_a_job_and_its_process() {
    let mut machine = job_in_service(EnforcementMethod::Auto);
    machine.settle();
    let Machine { state, policy, .. } = &machine;
    let explanations = [
        explain::explain_job(state, policy, &state.jobs[&job("a")]),
        explain::explain_process(state, policy, Pid(7)),
    ];
    for reasons in explanations {
        let why = reasons.iter().find(|sentence| sentence.starts_with("masks on each thread keep "));
        assert!(why.is_some_and(|why| why.contains("stays in /system.slice/x.service")), "{reasons:?}");
    }
}

/// The grant may differ from the one for which the cpuset was made.
#[test]
fn an_unregistered_cpuset_gets_the_settings_of_the_job_inside() {
    let mut machine = machine_with_cpusets(true);
    machine.spawn(7, 1, 0).cgroup = "/pjw/a".into();
    let mut commands = vec![Command::Assign(AssignCommand {
        pids: [Pid(7)].into(),
        ..assign_of("a", Some(CpuRequest::Cores(2)))
    })];
    // The masks are read before a cpuset changes them.
    let created = [(); 3].iter().find_map(|()| {
        let snapshot = machine.scan();
        let commands = std::mem::take(&mut commands);
        let decision = machine.decide(&snapshot, &commands);
        decision.plan.cpuset_actions.iter().find_map(|action| match &action.change {
            CpusetChange::Create { job_cpuset, .. } => {
                Some((job_cpuset.path.clone(), job_cpuset.spec.cpus.to_string()))
            }
            _ => None,
        })
    });
    assert_eq!(created, Some(("/pjw/a".to_owned(), "0-1".to_owned())));
}

#[test]
fn a_process_of_a_schedulers_job_is_confined_as_soon_as_the_schedulers_cgroup_is_read() {
    let mut machine = machine_with_cpusets(true);
    machine.policy.enforcement = EnforcementMethod::Affinity;
    machine.settle();
    let cgroup = "/slurmstepd.scope/job_4";
    in_cgroup(machine.spawn(7, 1, 1001), "slurm:4", cgroup, Some(CpuRequest::Cores(2)));
    // The first scan finds the process. The second scan reads the cgroup, without which a mask can't be interpreted.
    let mut next_scan = Some(machine.state.scan_request(true));
    while let Some(scan) = next_scan {
        next_scan = machine.cycle(&scan, &[]).next_scan;
    }
    assert_eq!((machine.grant("slurm:4"), machine.effective_mask(7, 7)), ("0-1".into(), "0-1".into()));
}
