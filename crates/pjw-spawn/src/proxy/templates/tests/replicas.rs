//! Replicas of the files of a template.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::*;
use crate::proxy::Template;
use crate::replicate::{ReplicaError, Replicas};
use crate::syscall_filter::refuse_call;
use crate::tasks::descriptors::unshare_descriptor_table;
use crate::{CheckError, ExitStatus, Instance, Placement, SpawnContext};

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

/// The mounts that this process sees whose memory is bound to a node, as that of copies is. Other programs of this
/// machine may mount file systems during a test.
fn mounted_copies() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    text.lines().filter(|line| line.contains("mpol=bind")).map(str::to_owned).collect()
}

#[test]
fn instances_map_copies_on_their_node_which_nobody_else_sees() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "maps", MAPS, &[]);
    let (context, first) = (context(&program, &["A=1"]), instance(0, &["maps"]));
    let probe = Template::load_until_main(&context, &first).unwrap();
    let replicas = Replicas::of_process(probe.pid(), [0]).unwrap();
    drop(probe);
    assert!(replicas.bytes_per_node() > 1_000_000, "{replicas} has the C library");
    let mounts_before = mounted_copies();
    let thread = thread::spawn(move || {
        replicas.enter_namespace_with_copies(0)?;
        let mut template = Template::load_until_main(&context, &first).unwrap();
        assert!(template.is_up_to_date());
        let (text, exit, _) = run(&mut template, first).unwrap();
        assert_eq!(exit, ExitStatus::Code(0));
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
    assert_eq!(mounted_copies(), mounts_before);
}

#[test]
fn a_group_has_replicas_with_exec_and_with_templates() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "maps", MAPS, &[]);
    let mounted = format!(" {} ", program.display());
    for uses_templates in [false, true] {
        let plain = context(&program, &["A=1"]);
        let replicas = replicas_of(&plain);
        let plain = if uses_templates { plain.fork_from_templates() } else { plain };
        let context = plain.set_replicas(replicas);
        // The first and the last have no node.
        let (instances, mut outputs): (Vec<_>, Vec<_>) = (0..20)
            .map(|rank| with_output(on_node(instance(rank, &["maps"]), (1..19).contains(&rank).then_some(0))))
            .unzip();
        let batch = match context.start(instances) {
            Err(CheckError::Replicas(ReplicaError::NotPermitted)) => {
                return eprintln!("skipped: no mount namespaces for this user");
            }
            batch => batch.unwrap(),
        };
        for child in batch.into_results() {
            assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
        }
        for (rank, output) in outputs.iter_mut().enumerate() {
            let mut text = String::new();
            std::io::Read::read_to_string(output, &mut text).unwrap();
            let is_replica = text.lines().any(|line| line.contains(&mounted) && line.contains("mpol=bind:0"));
            assert_eq!(is_replica, (1..19).contains(&rank), "instance {rank}: {text}");
        }
    }
}

fn replicas_of(context: &SpawnContext) -> Replicas {
    let probe = Template::load_until_main(context, &instance(0, &["first"])).unwrap();
    Replicas::of_process(probe.pid(), [0]).unwrap()
}

fn on_node(mut instance: Instance, memory_node: Option<u32>) -> Instance {
    instance.placement = Arc::new(Placement { preferred_numa_node: memory_node, ..Placement::default() });
    instance
}

#[test]
fn nothing_starts_if_a_file_can_not_be_copied() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", "int main(void) { return 0; }", &[]);
    let plain = context(&program, &["A=1"]);
    let replicas = replicas_of(&plain);
    fs::remove_file(&program).unwrap();
    let refused =
        plain.set_replicas(replicas).start(vec![on_node(instance(0, &["true"]), Some(0))]).unwrap_err();
    assert!(matches!(refused, CheckError::Replicas(_)), "{refused}");
}

/// Takes all capabilities from the calling thread.
fn drop_capabilities() {
    let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    // SAFETY: changes the calling thread only. The kernel reads a header of version 3, and two times three sets.
    let dropped = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    assert_eq!(dropped, 0);
}

#[test]
fn nothing_starts_if_instances_on_a_node_need_a_privilege_and_others_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("started");
    let replicas = Replicas::of_process(pjw_core::ids::Pid(std::process::id()), [0]).unwrap();
    let context = context("/usr/bin/touch".as_ref(), &["A=1"]).set_replicas(replicas);
    let own = |node| on_node(instance(0, &["touch", started.to_str().unwrap()]), node);
    let instances = vec![own(None), own(Some(0))];
    let refused = thread::spawn(move || {
        drop_capabilities();
        context.start(instances).map(drop).unwrap_err()
    });
    assert_eq!(refused.join().unwrap(), CheckError::Replicas(ReplicaError::NotPermitted));
    assert!(!started.exists(), "an instance was started");
}

#[test]
fn a_forbidden_mount_is_told_with_a_remedy() {
    if !is_possible() {
        return;
    }
    let replicas = Replicas::of_process(pjw_core::ids::Pid(std::process::id()), [0]).unwrap();
    // The filter holds for this thread only.
    let refused = thread::spawn(move || {
        refuse_call(libc::SYS_mount, Errno::EPERM);
        replicas.enter_namespace_with_copies(0).unwrap_err()
    });
    let refused = refused.join().unwrap();
    if refused == ReplicaError::NotPermitted {
        return eprintln!("skipped: no mount namespaces for this user");
    }
    let expected =
        "no replica of /: make private: Operation not permitted; a seccomp filter, a security module or";
    assert!(refused.to_string().starts_with(expected), "{refused}");
}

/// A program with 64 MB of data in its file.
const LARGE: &str = "#include <unistd.h>\nstatic volatile char image[64 << 20] = {1};\n\
                     int main(void) { for (;;) { pause(); image[0]++; } }";
const LARGE_BYTES: u64 = 64 << 20;

/// The launcher that the next test kills. On its own it does nothing.
#[test]
fn launcher_with_replicas() {
    let Ok(program) = std::env::var("PJW_TEST_REPLICAS_OF") else { return };
    let context = context(program.as_ref(), &["A=1"]).kill_when_launcher_ends();
    let replicas = replicas_of(&context);
    let context = context.set_replicas(replicas);
    println!("\nbegins");
    let instances = (0..4).map(|rank| on_node(instance(rank, &["large"]), Some(0))).collect();
    match context.start(instances) {
        Err(CheckError::Replicas(ReplicaError::NotPermitted)) => println!("not permitted"),
        batch => {
            let children = batch.unwrap().into_results();
            println!("runs");
            for child in children {
                let _ = child.unwrap().wait();
            }
        }
    }
}

/// The bytes of all files in tmpfs, and of shared memory.
fn tmpfs_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Shmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        thread::yield_now();
    }
}

/// Copies the table of descriptors of this process again and again until `is_done`, as each process that is forked
/// meanwhile does. Returns a sender for each of the last hundred copies. A copy is kept until its sender is dropped.
fn copy_descriptor_table<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    is_done: impl Fn() -> bool,
) -> VecDeque<mpsc::Sender<()>> {
    let mut holders = VecDeque::new();
    while !is_done() {
        let ((hold, released), (copied, is_copied)) = (mpsc::channel(), mpsc::channel());
        scope.spawn(move || {
            copied.send(unshare_descriptor_table()).unwrap();
            let _ = released.recv();
        });
        is_copied.recv().unwrap().unwrap();
        holders.push_back(hold);
        if holders.len() > 100 {
            holders.pop_front();
        }
    }
    holders
}

#[test]
fn copies_can_be_executed_although_descriptors_were_copied_while_they_were_written() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Nothing else is copied for a static program. The next test, which may run meanwhile, allows for 8 MB in tmpfs.
    let program = compile(directory.path(), "large", &LARGE.replace("64 << 20", "8 << 20"), &["-static"]);
    let context = context(&program, &["A=1"]);
    let replicas = replicas_of(&context);
    let is_entered = AtomicBool::new(false);
    let loaded = thread::scope(|scope| {
        let launcher = scope.spawn(|| {
            let entered = replicas.enter_namespace_with_copies(0);
            is_entered.store(true, Ordering::Relaxed);
            entered.map(|()| Template::load_until_main(&context, &instance(0, &["large"])).map(drop))
        });
        // A launcher that panics enters no namespace.
        let is_done = || is_entered.load(Ordering::Relaxed) || launcher.is_finished();
        let holders = copy_descriptor_table(scope, is_done);
        let loaded = launcher.join().unwrap();
        drop(holders);
        loaded
    });
    match loaded {
        Err(ReplicaError::NotPermitted) => eprintln!("skipped: no mount namespaces for this user"),
        loaded => assert_eq!(loaded, Ok(Ok(()))),
    }
}

#[test]
fn a_launcher_that_is_killed_leaves_no_mount_and_no_memory() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "large", LARGE, &[]);
    let mounts_before = mounted_copies();
    let start = || {
        let mut launcher = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "proxy::templates::tests::replicas::launcher_with_replicas"])
            .env("PJW_TEST_REPLICAS_OF", &program)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
        (launcher, lines.map_while(Result::ok))
    };
    let before = tmpfs_bytes();
    for moment in 0..10 {
        let (mut launcher, mut lines) = start();
        assert!(lines.any(|line| line == "begins"));
        if moment == 0 {
            if lines.next().unwrap() == "not permitted" {
                launcher.wait().unwrap();
                return eprintln!("skipped: no mount namespaces for this user");
            }
            assert!(tmpfs_bytes() > before + LARGE_BYTES / 2, "the copy is in memory");
        }
        // The moments are spread over the copying and the start. Nothing depends on where they are.
        thread::sleep(Duration::from_millis(moment * 13));
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        wait_until("no instance is left", || no_process_of(&program));
        wait_until("the memory is free again", || tmpfs_bytes() < before + LARGE_BYTES / 2);
        assert_eq!(mounted_copies(), mounts_before);
    }
}

fn no_process_of(program: &Path) -> bool {
    let is_its =
        |entry: fs::DirEntry| fs::read_link(entry.path().join("exe")).is_ok_and(|path| path == program);
    !fs::read_dir("/proc").unwrap().flatten().any(is_its)
}

#[test]
fn a_user_without_the_privilege_is_told_so() {
    if nix::unistd::geteuid().is_root() {
        return;
    }
    let replicas = Replicas::of_process(pjw_core::ids::Pid(std::process::id()), [0]).unwrap();
    let refused = thread::spawn(move || replicas.enter_namespace_with_copies(0)).join().unwrap().unwrap_err();
    assert_eq!(refused, ReplicaError::NotPermitted);
}
