//! Groups whose instances are forks of templates.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

#[allow(dead_code, reason = "the peer is measured by another test")]
mod programs;

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_spawn::proxy::{ForkError, TemplateError};
use pjw_spawn::{Arguments, ExitStatus, Instance, Placement, SpawnContext, Stdio};

use programs::{own_mask, program_without_libc, records};

fn instances(count: u32, output: &std::path::Path) -> Vec<Instance> {
    let output = File::options().append(true).create(true).open(output).unwrap();
    let output = Arc::new(OwnedFd::from(output));
    let mask = own_mask();
    let parts: Vec<_> = mask.iter().map(|pu| Arc::new(Placement::on_cpus(CpuSet::from(pu)))).collect();
    let arguments = Arc::new(Arguments::parse(&["first_act"]).unwrap());
    (0..count)
        .map(|rank| Instance {
            rank,
            size: count,
            arguments: Arc::clone(&arguments),
            variables: Vec::new(),
            placement: Arc::clone(&parts[rank as usize % parts.len()]),
            stdio: Stdio { output: Some(Arc::clone(&output)), ..Stdio::default() },
        })
        .collect()
}

/// Starts `count` instances of a context, and checks that each ran its first instruction inside its own part. Returns
/// the number of forks, and the reason why there is no template.
fn check_group(context: &SpawnContext, count: u32) -> (usize, Option<TemplateError>) {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("records");
    check_instances(context, instances(count, &output), &output)
}

fn check_instances(
    context: &SpawnContext,
    instances: Vec<Instance>,
    output: &std::path::Path,
) -> (usize, Option<TemplateError>) {
    let count = instances.len();
    let mask = |instance: &Instance| instance.placement.cpus.clone().unwrap_or_else(own_mask);
    let masks: Vec<CpuSet> = instances.iter().map(mask).collect();
    let mut batch = context.start(instances).unwrap();
    // The kernel gives the id of a process to no other one before the process was waited for.
    let children: Vec<_> = batch.by_ref().map(|(index, child)| (index, child.unwrap())).collect();
    let mut mask_of_pid = std::collections::BTreeMap::new();
    for (index, child) in children {
        mask_of_pid.insert(child.pid.0, masks[index].clone());
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(0));
    }
    let records = records(output);
    assert_eq!(records.len(), count);
    for record in records {
        let mask = mask_of_pid.remove(&record.pid).unwrap();
        assert!(record.mask == mask && mask.contains(Pu(record.cpu.0)), "process {}", record.pid);
    }
    (batch.forked_count(), batch.template_error())
}

#[test]
fn a_group_of_forks_runs_its_first_instructions_inside_its_parts() {
    let (program, _dir) = program_without_libc();
    let context = SpawnContext::new(&program).unwrap().add_rank_variables().fork_from_templates();
    for (count, forked) in [(1, 0), (2, 2), (7, 7), (10_000, 10_000)] {
        assert_eq!(check_group(&context, count), (forked, None));
    }
    assert_eq!(check_group(&context.kill_when_launcher_ends(), 20), (20, None));
}

#[test]
fn a_part_with_one_instance_of_a_larger_group_has_a_template_too() {
    let (program, dir) = program_without_libc();
    let context = SpawnContext::new(&program).unwrap().fork_from_templates().set_max_spawner_threads(2);
    let output = dir.path().join("records");
    let mut group = instances(16, &output);
    let cpus = CpuSet::from(own_mask().iter().next().unwrap());
    let parts = [Arc::new(Placement::on_cpus(cpus.clone())), Arc::new(Placement::on_cpus(cpus))];
    for (rank, instance) in group.iter_mut().enumerate() {
        instance.placement = Arc::clone(&parts[usize::from(rank == 0)]);
    }
    assert_eq!(check_instances(&context, group, &output), (16, None));
}

#[test]
fn an_instance_without_cpus_has_those_of_the_caller_beside_others_with_cpus() {
    let (program, dir) = program_without_libc();
    let context = SpawnContext::new(&program).unwrap().fork_from_templates().set_max_spawner_threads(1);
    for (name, differing, forked) in [("forked", None, 4), ("executed", Some(3), 3)] {
        let output = dir.path().join(name);
        let mut group = instances(4, &output);
        let cpus = CpuSet::from(own_mask().iter().next().unwrap());
        let parts = [Arc::new(Placement::on_cpus(cpus)), Arc::new(Placement::default())];
        for (rank, instance) in group.iter_mut().enumerate() {
            instance.placement = Arc::clone(&parts[rank % 2]);
        }
        if let Some(rank) = differing {
            group[rank].variables = vec![c"MORE=1".to_owned()];
        }
        assert_eq!(check_instances(&context, group, &output), (forked, None), "{name}");
    }
}

#[test]
fn an_instance_that_differs_from_the_template_is_executed_and_is_not_counted_as_a_fork() {
    let context = SpawnContext::new("true").unwrap().fork_from_templates();
    let directory = tempfile::tempdir().unwrap();
    let mut group = instances(6, &directory.path().join("output"));
    let arguments = Arc::new(Arguments::parse(&["true"]).unwrap());
    group.iter_mut().for_each(|instance| instance.arguments = Arc::clone(&arguments));
    group[4].arguments = Arc::new(Arguments::parse(&["true", "more"]).unwrap());
    let mut batch = context.start(group).unwrap();
    for (_, child) in batch.by_ref() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
    assert_eq!((batch.forked_count(), batch.template_error()), (5, None));
    assert!(matches!(batch.fork_error(), Some(ForkError::Mismatch(_))), "{:?}", batch.fork_error());
}

#[test]
fn a_program_that_can_have_no_template_is_executed_and_the_cause_is_reported() {
    use std::os::unix::fs::PermissionsExt;
    let (program, _dir) = program_without_libc();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let context = SpawnContext::new(&program).unwrap().fork_from_templates();
    assert_eq!(check_group(&context, 10), (0, Some(TemplateError::Privileged)));
}
