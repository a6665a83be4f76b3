//! Groups whose instances are forks of templates.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

#[allow(dead_code, reason = "the peer is measured by another test")]
mod programs;

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_spawn::proxy::TemplateError;
use pjw_spawn::{Arguments, Context, ExitStatus, Instance, Placement, Stdio};

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

/// Starts the instances of a context, and checks that each ran its first instruction inside its own part.
fn check_group(context: &Context, count: u32) -> Option<TemplateError> {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("records");
    let instances = instances(count, &output);
    let masks: Vec<CpuSet> =
        instances.iter().map(|instance| instance.placement.cpus.clone().unwrap()).collect();
    let mut batch = context.start(instances).unwrap();
    let mut of_pid = std::collections::BTreeMap::new();
    for (index, child) in batch.by_ref() {
        let child = child.unwrap();
        of_pid.insert(child.pid.0, masks[index].clone());
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(0));
    }
    let records = records(&output);
    assert_eq!(records.len(), count as usize);
    for record in records {
        let mask = of_pid.remove(&record.pid).unwrap();
        assert!(record.mask == mask && mask.contains(Pu(record.cpu.0)), "process {}", record.pid);
    }
    batch.template_error()
}

#[test]
fn a_group_of_forks_runs_its_first_instructions_inside_its_parts() {
    let (program, _dir) = program_without_libc();
    let context = Context::new(&program).unwrap().add_rank_variables().use_templates();
    for count in [1, 2, 7, 300] {
        assert_eq!(check_group(&context, count), None);
    }
    assert_eq!(check_group(&context.kill_when_launcher_ends(), 20), None);
}

#[test]
fn a_program_that_can_have_no_template_is_executed_and_the_cause_is_told() {
    use std::os::unix::fs::PermissionsExt;
    let (program, _dir) = program_without_libc();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let context = Context::new(&program).unwrap().use_templates();
    assert_eq!(check_group(&context, 10), Some(TemplateError::Privileged));
}
