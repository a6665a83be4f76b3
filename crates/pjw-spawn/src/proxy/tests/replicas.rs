//! Replicas of the files of a template.

use std::fs;

use super::*;
use crate::Exit;
use crate::proxy::Template;
use crate::replicate::{ReplicaError, Replicas};

/// Prints what the kernel says of its file pages.
const MAPS: &str = r#"
#include <stdio.h>
int main(void) {
    char line[4096]; FILE *f = fopen("/proc/self/numa_maps", "r");
    while (f && fgets(line, sizeof line, f)) fputs(line, stdout);
    f = fopen("/proc/self/mountinfo", "r");
    while (f && fgets(line, sizeof line, f)) fputs(line, stdout);
    return 0;
}
"#;

/// Whether this machine and this user can have replicas.
fn is_possible() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    let is_numa = fs::metadata("/sys/devices/system/node/node0").is_ok();
    if !is_root || !is_numa {
        eprintln!("skipped: replicas need root and a kernel with NUMA");
    }
    is_root && is_numa
}

#[test]
fn instances_map_copies_on_their_node_which_nobody_else_sees() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "maps", MAPS, &[]);
    let (context, first) = (context(&program, &["A=1"]), instance(0, &["maps"]));
    let probe = Template::load(&context, &first).unwrap();
    let replicas = Replicas::of_process(probe.pid(), [0]).unwrap();
    drop(probe);
    assert!(replicas.bytes_per_node() > 1_000_000, "{replicas} has the C library");
    replicas.check_memory(1 << 30).unwrap();
    let mounts_before = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let thread = std::thread::spawn(move || {
        replicas.enter_mount_namespace(0)?;
        let mut template = Template::load(&context, &first).unwrap();
        assert!(template.is_up_to_date());
        let (text, exit, _) = run(&mut template, first).unwrap();
        assert_eq!(exit, Exit::Code(0));
        Ok::<_, ReplicaError>(text)
    });
    let text = match thread.join().unwrap() {
        Ok(text) => text,
        Err(ReplicaError::NotPermitted) => return eprintln!("skipped: no mount namespaces for this user"),
        Err(error) => panic!("{error}"),
    };
    let program = program.to_str().unwrap();
    let mounted = |path: &str| {
        text.lines().any(|line| line.contains(&format!(" {path} ")) && line.contains("mpol=bind:0"))
    };
    assert!(mounted(program), "{text}");
    let libc = text.lines().find_map(|line| {
        let file = line.split(' ').find_map(|field| field.strip_prefix("file="))?;
        file.contains("libc.so").then_some(file)
    });
    assert!(mounted(libc.unwrap()), "{text}");
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts_before);
}

#[test]
fn a_user_without_the_privilege_is_told_so() {
    if nix::unistd::geteuid().is_root() {
        return;
    }
    let replicas = Replicas::of_process(pjw_core::ids::Pid(std::process::id()), [0]).unwrap();
    let refused = std::thread::spawn(move || replicas.enter_mount_namespace(0)).join().unwrap().unwrap_err();
    assert_eq!(refused, ReplicaError::NotPermitted);
}
