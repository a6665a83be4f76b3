//! What a launcher and its instances have to do with each other: the signals of the C library, users, directories.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pjw_spawn::{
    Arguments, Credentials, ExitStatus, Instance, Placement, SpawnContext, Stdio, raise_descriptor_limit,
};

/// The user of instances.
const OTHER_USER: Credentials = Credentials { uid: 65_533, gid: 65_532, groups: Vec::new() };

fn instances(count: u32, arguments: &[&str]) -> Vec<Instance> {
    let arguments = Arc::new(Arguments::parse(arguments).unwrap());
    let placement = Arc::new(Placement::default());
    let instance = |rank| Instance {
        rank,
        size: count,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::clone(&placement),
        stdio: Stdio::default(),
    };
    (0..count).map(instance).collect()
}

#[test]
fn a_launcher_whose_spawner_threads_wait_can_set_its_group() {
    let context = SpawnContext::new("sleep").unwrap().kill_when_launcher_ends();
    let children = context.spawn_n(instances(2, &["sleep", "1000"])).unwrap();
    let (done, end) = mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: sets the group that the process has already. The C library does so in each thread.
        let set = unsafe { libc::setgid(libc::getgid()) };
        let _ = done.send(set);
    });
    assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(0), "setgid(3) waits for a spawner thread");
    drop(context);
    for child in children {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
    }
}

const CAP_SYS_RESOURCE: u32 = 1 << 24;

/// Makes the calling thread one of the user `user`, who is not root and has the capabilities to change users, also as
/// ambient ones: as in a service with `AmbientCapabilities=`. The thread has the capabilities of the set `more` too.
fn take_ambient_capabilities(user: libc::uid_t, more: u32) {
    const VERSION_3: u32 = 0x2008_0522;
    let (setgid, setuid) = (6, 7);
    let set: u32 = 1 << setgid | 1 << setuid | more;
    let (header, data) = ([VERSION_3, 0], [set, set, set, 0, 0, 0]);
    // SAFETY: changes the calling thread only. The kernel reads a header, and two times three sets.
    let results = unsafe {
        let raise = |capability: u64| {
            libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as u64, capability, 0_u64, 0_u64)
        };
        [
            i64::from(libc::prctl(libc::PR_SET_KEEPCAPS, 1_u64, 0_u64, 0_u64, 0_u64)),
            libc::syscall(libc::SYS_setresuid, user, user, user),
            libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()),
            i64::from(raise(setgid)),
            i64::from(raise(setuid)),
        ]
    };
    assert_eq!(results, [0; 5], "{}", nix::errno::Errno::last());
}

#[test]
fn an_instance_of_another_user_has_no_ambient_capabilities() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can give a thread capabilities");
        return;
    }
    let script = "grep -q '^CapAmb:[[:space:]]*0*$' /proc/self/status";
    let context = SpawnContext::new("sh").unwrap().set_credentials(OTHER_USER);
    let end = std::thread::spawn(move || {
        take_ambient_capabilities(65_531, 0);
        let child = context.spawn_n(instances(1, &["sh", "-c", script])).unwrap().remove(0).unwrap();
        child.wait()
    });
    assert_eq!(end.join().unwrap(), Ok(ExitStatus::Code(0)));
}

/// Runs a test of this file again by a shell script, in which `"$@"` is the command of the test. Returns whether this
/// is the process of the script.
fn is_run_again(test: &str, script: &str, directory: &Path) -> bool {
    const VARIABLE: &str = "PJW_TEST_IS_RUN_AGAIN";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(std::env::current_exe().unwrap()).args(["--exact", test]);
    let run = shell.env(VARIABLE, "1").current_dir(directory).output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    false
}

/// As [`is_run_again`], for a test that takes another user. Skips the test if this process may not.
fn is_run_again_as_root(test: &str) -> bool {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root may take another user");
        return false;
    }
    is_run_again(test, "exec \"$@\"", Path::new("/"))
}

#[test]
fn a_relative_program_is_that_of_the_caller_and_not_of_the_working_directory() {
    let dir = tempfile::tempdir().unwrap();
    let name = "a_relative_program_is_that_of_the_caller_and_not_of_the_working_directory";
    // Another process writes the programs: a file that this process has open for writing can't be executed.
    let script = "mkdir other && printf '#!/bin/sh\\nexit 7\\n' >program && \
                  printf '#!/bin/sh\\nexit 8\\n' >other/program && chmod +x program other/program && exec \"$@\"";
    if !is_run_again(name, script, dir.path()) {
        return;
    }
    let other = std::env::current_dir().unwrap().join("other");
    for context in [SpawnContext::new("./program").unwrap(), SpawnContext::from_path(Path::new("program"))] {
        let context = context.set_working_directory(&other);
        let child = context.spawn_n(instances(1, &["program"])).unwrap().remove(0).unwrap();
        assert_eq!(child.wait(), Ok(ExitStatus::Code(7)));
    }
}

#[test]
fn a_thread_that_raises_the_limit_of_descriptors_does_not_undo_what_another_has_raised() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 2000 {
        println!("skipped: the hard limit of open descriptors is {hard}");
        return;
    }
    let name = "a_thread_that_raises_the_limit_of_descriptors_does_not_undo_what_another_has_raised";
    if !is_run_again(name, "exec \"$@\"", Path::new("/")) {
        return;
    }
    for round in 0..200 {
        setrlimit(Resource::RLIMIT_NOFILE, 200, hard).unwrap();
        let both = Barrier::new(2);
        std::thread::scope(|scope| {
            for additional in [300, 1000] {
                let both = &both;
                scope.spawn(move || {
                    both.wait();
                    raise_descriptor_limit(additional).unwrap();
                });
            }
        });
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(soft > 1000, "round {round}: the limit is {soft}");
    }
}

#[test]
fn the_limit_of_processes_is_that_of_the_user_of_the_instances() {
    if !is_run_again_as_root("the_limit_of_processes_is_that_of_the_user_of_the_instances") {
        return;
    }
    // The limit counts all processes of a user, so no other test may start processes of this one.
    let limited = Credentials { uid: 65_526, gid: 65_532, groups: Vec::new() };
    let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    setrlimit(Resource::RLIMIT_NPROC, 0, hard).unwrap();
    let context = SpawnContext::new("true").unwrap().set_credentials(limited.clone());
    let error = context.spawn_n(instances(2, &["true"])).unwrap_err().to_string();
    let begin =
        "there is room for 0 more processes, and 2 were asked for: RLIMIT_NPROC of the user 65526 is 0";
    assert!(error.starts_with(begin), "{error}");
    // A template takes the user of its instances.
    setrlimit(Resource::RLIMIT_NPROC, 2, hard).unwrap();
    let other = Credentials { uid: 65_530, gid: 65_532, groups: Vec::new() };
    let context = SpawnContext::new("true").unwrap().set_credentials(other).fork_from_templates();
    let error = context.spawn_n(instances(2, &["true"])).unwrap_err().to_string();
    let end = "2 were asked for, with 1 more that starts them: RLIMIT_NPROC of the user 65530 is 2";
    assert!(error.contains(end), "{error}");
    setrlimit(Resource::RLIMIT_NPROC, 0, hard).unwrap();
    // A single instance is left to the kernel, which does not count the process itself.
    let context = SpawnContext::new("sleep").unwrap().set_credentials(limited);
    let first = context.spawn_n(instances(1, &["sleep", "1000"])).unwrap().remove(0).unwrap();
    let error = context.spawn_n(instances(1, &["sleep", "1000"])).unwrap().remove(0).unwrap_err();
    let text = "step exec failed: Try again; its user has too many processes: raise ulimit -u";
    assert_eq!(error.to_string(), text);
    first.send_signal(libc::SIGKILL).unwrap();
    assert_eq!(first.wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
}

/// The message with which two tasks are refused if their user may have no further process. `None` if tasks can't run
/// here.
fn refusal_of_tasks_without_room() -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let (path, source) = (dir.path().join("task"), "tests/programs/task.c");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let flags = ["-O1", "-static-pie", "-pthread", "-o"];
    let compiled = Command::new("cc").args(flags).arg(&path).arg(source).status().unwrap();
    if !cfg!(target_arch = "x86_64") || !compiled.success() {
        println!("skipped: cc can't link a static program for x86-64 here");
        return None;
    }
    let context = SpawnContext::new(&path).unwrap().share_memory().unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    let is_root = nix::unistd::geteuid().is_root();
    let start = move || {
        setrlimit(Resource::RLIMIT_NPROC, 0, hard).unwrap();
        if is_root {
            // The limit does not hold for root.
            take_ambient_capabilities(65_525, 0);
        }
        context.spawn_n(instances(2, &["task", "live"])).unwrap_err().to_string()
    };
    Some(std::thread::spawn(start).join().unwrap())
}

#[test]
fn for_tasks_that_the_calling_thread_starts_only_their_host_counts_beside_them() {
    let name = "for_tasks_that_the_calling_thread_starts_only_their_host_counts_beside_them";
    if is_run_again(name, "exec \"$@\"", Path::new("/"))
        && let Some(refusal) = refusal_of_tasks_without_room()
    {
        let begin = "there is room for 0 more processes, and 2 were asked for, with 1 more that starts them: RLIMIT_NPROC";
        assert!(refusal.starts_with(begin), "{refusal}");
    }
}

#[test]
fn instances_of_another_user_do_not_count_in_the_limit_of_the_user_of_the_caller() {
    if !is_run_again_as_root("instances_of_another_user_do_not_count_in_the_limit_of_the_user_of_the_caller")
    {
        return;
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    setrlimit(Resource::RLIMIT_NPROC, 7, hard).unwrap();
    let other = Credentials { uid: 65_529, gid: 65_532, groups: Vec::new() };
    let context = SpawnContext::new("true").unwrap().set_credentials(other);
    // The user of the caller has a thread of the caller, one that starts the instances, and an instance at a time.
    let results = std::thread::spawn(move || {
        take_ambient_capabilities(65_528, 0);
        context.spawn_n(instances(7, &["true"]))
    });
    for child in results.join().unwrap().unwrap() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
}

#[test]
fn a_caller_who_may_exceed_the_limit_of_processes_starts_instances_as_its_own_user_too() {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    let has_capability = u64::from_str_radix(capabilities, 16).unwrap() & u64::from(CAP_SYS_RESOURCE) != 0;
    let namespace = std::fs::read_link("/proc/self/ns/user").unwrap_or_default();
    let is_initial = namespace == Path::new("user:[4026531837]");
    if !nix::unistd::geteuid().is_root() || !has_capability || !is_initial {
        println!("skipped: this needs root with CAP_SYS_RESOURCE in the initial user namespace");
        return;
    }
    let name = "a_caller_who_may_exceed_the_limit_of_processes_starts_instances_as_its_own_user_too";
    if !is_run_again(name, "exec \"$@\"", Path::new("/")) {
        return;
    }
    let own = Credentials { uid: 65_527, gid: 65_532, groups: Vec::new() };
    let context = SpawnContext::new("true").unwrap().set_credentials(own);
    let results = std::thread::spawn(move || {
        take_ambient_capabilities(65_527, CAP_SYS_RESOURCE);
        let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
        setrlimit(Resource::RLIMIT_NPROC, 0, hard).unwrap();
        context.spawn_n(instances(2, &["true"]))
    });
    for child in results.join().unwrap().unwrap() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
}
