//! The programs of the tests, and how they are started.

use std::fs;
use std::io::{PipeReader, Read, pipe};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;

use crate::proxy::{ForkError, Template};
use crate::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, Stdio};

/// Compiles a C program with cc and flags such as `-static`.
pub(super) fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (file, program) = (directory.join(format!("{name}.c")), directory.join(name));
    fs::write(&file, source).unwrap();
    let output = Command::new("cc").arg(&file).arg("-o").arg(&program).args(flags).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Writes an executable file. Another process writes it: a file that this process has open for writing can't be
/// executed (`ETXTBSY`), and a child that another test is forking may have it open too.
pub(super) fn write_executable(path: &Path, text: &str) {
    let script = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", script]).arg(path).arg(text).status().unwrap().success());
}

pub(super) fn context(program: &Path, environment: &[&str]) -> SpawnContext {
    let variables = environment.iter().filter_map(|text| text.split_once('='));
    SpawnContext::from_path(program).set_environment(variables)
}

pub(super) fn instance(rank: u32, arguments: &[&str]) -> Instance {
    Instance {
        rank,
        size: 1000,
        arguments: Arc::new(Arguments::parse(arguments).unwrap()),
        variables: Vec::new(),
        placement: Arc::new(Placement::default()),
        stdio: Stdio::default(),
    }
}

pub(super) fn on(mut instance: Instance, cpus: &str) -> Instance {
    instance.placement = Arc::new(Placement::on_cpus(cpus.parse::<CpuSet>().unwrap()));
    instance
}

/// Returns this machine's first two PUs, or its only one twice.
pub(super) fn two_cpus() -> [String; 2] {
    let mask = crate::own_policy::own_mask().unwrap();
    let mut cpus = mask.iter().map(|pu| pu.0.to_string());
    let first = cpus.next().unwrap();
    [first.clone(), cpus.next().unwrap_or(first)]
}

/// Gives an instance a standard output that the test reads.
pub(super) fn with_output(mut instance: Instance) -> (Instance, PipeReader) {
    let (reader, writer) = pipe().unwrap();
    instance.stdio.output = Some(Arc::new(OwnedFd::from(writer)));
    (instance, reader)
}

/// Runs one instance to its end. Returns its output and how it ended.
pub(super) fn run(
    template: &mut Template,
    instance: Instance,
) -> Result<(String, ExitStatus, Child), ForkError> {
    let (instance, mut reader) = with_output(instance);
    let child = template.fork(&instance)?;
    drop(instance);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let exit = child.wait().unwrap();
    Ok((text, exit, child))
}

/// The flags that make a dynamic program, a static one, and a static one that relocates itself.
pub(super) const KINDS: [(&str, &[&str]); 4] = [
    ("dynamic", &[]),
    ("not position independent", &["-no-pie"]),
    ("static", &["-static"]),
    ("static-pie", &["-static-pie"]),
];
