//! Programs that can't be tasks, and groups for which there is no room.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::poll::{PollFd, PollFlags};
use pjw_spawn::tasks::AddressSpace;
use pjw_spawn::{Credentials, ExitStatus, Instance, SpawnContext};

use super::{Program, compile, context, instance, task_program, with_output};

/// The message of the refusal of a program, which begins with its path.
fn refusal(path: &Path) -> String {
    let error = SpawnContext::new(path).unwrap().share_memory().unwrap_err().to_string();
    let begin = format!("the program {} can't share its memory with others: ", path.display());
    error.strip_prefix(&begin).unwrap_or_else(|| panic!("{error}")).to_owned()
}

fn executable(program: &Program, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = program.directory.path().join(name);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_dynamic_program_and_one_for_a_fixed_address_are_refused_with_the_way_to_link_them() {
    for (flags, why) in [
        (&["-pie", "-fPIE"][..], "it is linked dynamically; link it with -static-pie"),
        (&["-no-pie"][..], "it is linked dynamically; link it with -static-pie"),
        (&["-static", "-no-pie"][..], "it is static, and not position-independent; link it with -static-pie"),
    ] {
        let Some(program) = compile("task.c", flags) else { continue };
        let refusal = refusal(&program.path);
        assert!(refusal.starts_with(why), "{flags:?}: {refusal}");
    }
}

#[test]
fn other_files_are_refused() {
    let Some(program) = task_program() else { return };
    let bytes = fs::read(&program.path).unwrap();
    let changed = |at: usize, new: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        bytes
    };
    for (name, bytes, why) in [
        ("script", b"#!/bin/sh\n".to_vec(), "it is a script; "),
        ("text", b"hello, world".to_vec(), "it is no complete ELF program; "),
        ("empty", Vec::new(), "it is no complete ELF program; "),
        ("short", bytes[..100].to_vec(), "it is no complete ELF program; "),
        ("aarch64", changed(18, &[183, 0]), "it is for aarch64, and tasks run on x86-64 only; "),
        ("x86", changed(4, &[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 3]), "it is for x86 with 32 bits, "),
        ("sparc", changed(18, &[43, 0]), "it is for another processor (e_machine 43), "),
        ("core", changed(16, &[4, 0]), "it is no complete ELF program; "),
    ] {
        let path = executable(&program, name, &bytes);
        let refusal = refusal(&path);
        assert!(refusal.starts_with(why), "{name}: {refusal}");
    }
}

#[test]
fn a_program_that_is_cut_off_is_refused() {
    if task_program().is_none() {
        return;
    }
    // Without symbols the segments reach nearly to the end of the file.
    let Some(program) = compile("task.c", &["-O1", "-static-pie", "-s"]) else { return };
    let bytes = fs::read(&program.path).unwrap();
    for percent in [80, 90, 99] {
        let path = executable(&program, "cut", &bytes[..bytes.len() * percent / 100]);
        let refusal = refusal(&path);
        assert!(refusal.starts_with("it is no complete ELF program; "), "{percent} %: {refusal}");
    }
}

#[test]
fn a_shared_library_is_refused() {
    // Without -nostdlib the library would name the C library, and be refused as a dynamic program.
    let flags = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,task.so"];
    let Some(program) = task_program().and_then(|_| compile("task.c", &flags)) else { return };
    let refusal = refusal(&program.path);
    assert!(refusal.starts_with("it is a shared library; "), "{refusal}");
}

#[test]
fn a_program_that_gets_rights_by_execve_is_refused() {
    let Some(program) = task_program() else { return };
    let path = executable(&program, "setuid", &fs::read(&program.path).unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    assert!(refusal(&path).starts_with("it is set-user-ID, "));
}

#[test]
fn another_user_is_refused_before_the_first_task() {
    let Some(program) = task_program() else { return };
    let credentials = Credentials { uid: 1, gid: 1, groups: Vec::new() };
    let context = context(&program).set_credentials(credentials);
    let error = context.start(vec![instance(&program, 0, 1, &["live"])]).unwrap_err().to_string();
    assert!(error.contains("another user or group"), "{error}");
}

#[test]
fn a_group_whose_host_can_not_be_made_is_refused_with_the_reason_and_keeps_no_stream() {
    let Some(program) = task_program() else { return };
    // The thread that starts the tasks would live as long as the context.
    let context = context(&program).kill_when_launcher_ends();
    // The host finds no initial values of the variables.
    fs::File::options().write(true).open(&program.path).unwrap().set_len(0).unwrap();
    let (instance, output) = with_output(instance(&program, 0, 1, &["live"]));
    let error = context.start(vec![instance]).unwrap_err().to_string();
    assert!(error.contains("step exec failed: Exec format error"), "{error}");
    let mut ready = [PollFd::new(output.get_ref().as_fd(), PollFlags::POLLIN)];
    let ended = nix::poll::poll(&mut ready, 60_000_u16).unwrap();
    assert_eq!(ended, 1, "a process or a thread holds the pipe after 60 s");
    drop(context);
}

#[test]
fn more_mappings_than_an_address_space_may_have_are_refused_before_the_first_task() {
    let Some(program) = task_program() else { return };
    let most: u32 = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let count = most / 12 + 1;
    if count > 20_000 {
        println!("skipped: vm.max_map_count is {most}");
        return;
    }
    let one = instance(&program, 0, count, &["live"]);
    let instances = (0..count).map(|rank| Instance { rank, ..one.clone() }).collect::<Vec<_>>();
    let error = context(&program).check_instances(&instances).unwrap_err().to_string();
    assert!(error.contains("(vm.max_map_count)") && error.contains("sysctl vm.max_map_count=N"), "{error}");
}

#[test]
fn of_tasks_and_templates_the_last_call_counts() {
    let Some(program) = task_program() else { return };
    for with_templates in [SpawnContext::fork_from_templates, SpawnContext::use_fork_here_templates] {
        let error = AddressSpace::create(&with_templates(context(&program)), 1, 1).unwrap_err().to_string();
        assert!(error.contains("a context without SpawnContext::share_memory"), "{error}");
        let shared = with_templates(SpawnContext::new(&program.path).unwrap()).share_memory().unwrap();
        assert!(AddressSpace::create(&shared, 1, 1).is_ok());
    }
    // A static program has no template: its instances are started by exec.
    let children = context(&program).fork_from_templates().spawn_n(vec![instance(&program, 0, 1, &["live"])]);
    for child in children.unwrap() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
}
