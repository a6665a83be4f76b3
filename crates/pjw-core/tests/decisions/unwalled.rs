//! Who can have no wall is kept by masks, and people are told of it who asked for walls. Who is in one already has it.

use pjw_core::command::{Assign, Command};
use pjw_core::explain;
use pjw_core::fortify::{Keeping, keeping};
use pjw_core::job::Amount;
use pjw_core::process::Pid;
use pjw_core::reconcile::reconcile;
use pjw_core::snapshot::Seen;
use pjw_core::wall::{Cpusets, Enforcement, WallChange};

use super::machine::{Machine, job, machine, wish};

/// A machine with v1 cpusets, where process 7 of `manual:a` lives in a service's cgroup.
fn with_a_service(enforcement: Enforcement) -> Machine {
    let mut machine = machine();
    machine.policy.enforcement = enforcement;
    machine.policy.ground.cpusets = Cpusets::Legacy;
    machine.cgroups.insert("/pjw/a".to_owned(), Seen::Gone);
    machine.spawn(7, 1, 0).cgroup = Some("/system.slice/x.service".into());
    machine.assign("a", 2, &[7]).unwrap();
    machine
}

fn kept(machine: &Machine) -> Keeping {
    keeping(&machine.state, &machine.policy, &machine.state.jobs[&job("a")])
}

#[test]
fn a_job_in_a_services_cgroup_is_kept_by_masks_and_a_warning_where_cpusets_are_wanted() {
    let mut machine = with_a_service(Enforcement::Cpuset);
    machine.settle();
    assert_eq!(machine.mask(7, 7), "0-1");
    let abstained = &machine.last.as_ref().unwrap().abstained;
    let told: Vec<_> = abstained.iter().filter(|abstained| abstained.code == "no-wall").collect();
    assert!(told.len() == 1 && told[0].why.contains("/system.slice/x.service"), "{abstained:?}");
    assert_eq!(told[0].job, Some(job("a")));
}

#[test]
fn whoever_asked_for_what_only_a_wall_has_is_told_that_there_is_none() {
    let mut machine = with_a_service(Enforcement::Auto);
    let isolated = Assign { isolated: Some(true), ..wish("a", Some(Amount::Cores(2))) };
    machine.command(Command::Assign(isolated)).unwrap();
    let abstained = &machine.last.as_ref().unwrap().abstained;
    let told: Vec<_> = abstained.iter().filter(|abstained| abstained.code == "no-wall").collect();
    assert!(told.len() == 1 && told[0].why.contains("--isolated"), "{abstained:?}");
}

#[test]
fn why_it_has_no_wall_is_where_its_process_lives_and_not_that_nobody_has_built_one_yet() {
    let mut machine = with_a_service(Enforcement::Auto);
    machine.settle();
    assert!(machine.abstained().is_empty(), "masks are what was asked for where there is no wall");
    let Keeping::Affinity { why } = kept(&machine) else { panic!("{:?}", kept(&machine)) };
    assert!(why.contains("process 7 stays in /system.slice/x.service"), "{why}");
}

#[test]
fn explaining_a_job_or_its_process_tells_what_keeps_it() {
    let mut machine = with_a_service(Enforcement::Auto);
    machine.settle();
    let Machine { state, policy, .. } = &machine;
    let told = [explain::job(state, policy, &state.jobs[&job("a")]), explain::process(state, policy, Pid(7))];
    for told in told {
        let why = told.iter().find(|sentence| sentence.starts_with("masks on each thread keep "));
        assert!(why.is_some_and(|why| why.contains("stays in /system.slice/x.service")), "{told:?}");
    }
}

/// Its grant may be another than the one that the wall was built for.
#[test]
fn a_wall_of_which_no_journal_knows_is_given_the_bounds_of_the_job_inside() {
    let mut machine = machine();
    machine.policy.ground.cpusets = Cpusets::Legacy;
    machine.spawn(7, 1, 0).cgroup = Some("/pjw/a".into());
    let mut commands =
        vec![Command::Assign(Assign { pids: [Pid(7)].into(), ..wish("a", Some(Amount::Cores(2))) })];
    // Its masks are looked at before a cpuset changes them.
    let raised = [(); 3].iter().find_map(|()| {
        let snapshot = machine.look();
        let commands = std::mem::take(&mut commands);
        let decision = reconcile(&mut machine.state, &snapshot, &commands, &machine.policy);
        decision.plan.walls.iter().find_map(|action| match &action.change {
            WallChange::Raise { wall, .. } => Some((wall.path.clone(), wall.bounds.cpus.to_string())),
            _ => None,
        })
    });
    assert_eq!(raised, Some(("/pjw/a".to_owned(), "0-1".to_owned())));
}
