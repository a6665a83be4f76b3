//! Groups of real processes: the CPUs on which they begin, their environment, and the errors of those that fail.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

mod programs;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use pjw_core::cpuset::CpuSet;
use pjw_spawn::{
    Arguments, Credentials, ExitStatus, Instance, Placement, SpawnContext, SpawnError, SpawnStep, Stdio,
};
use programs::{Record, own_mask, peer_records, program_without_libc, records};

/// One placement for each PU of the caller's mask.
fn one_pu_each() -> Vec<Arc<Placement>> {
    own_mask().iter().map(|pu| Arc::new(Placement::on_cpus(CpuSet::from(pu)))).collect()
}

/// Instances with the same arguments. The ranks have the placements in turns.
fn instances(count: u32, arguments: &[&str], placements: &[Arc<Placement>], stdio: &Stdio) -> Vec<Instance> {
    let arguments = Arc::new(Arguments::parse(arguments).unwrap());
    let instance = |rank| Instance {
        rank,
        size: count,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::clone(&placements[rank as usize % placements.len()]),
        stdio: stdio.clone(),
    };
    (0..count).map(instance).collect()
}

fn anywhere() -> Vec<Arc<Placement>> {
    vec![Arc::default()]
}

/// Runs one shell script. Returns its output and its exit status.
fn run_shell(context: &SpawnContext, script: &str) -> (String, ExitStatus) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let output = Some(Arc::new(OwnedFd::from(writer)));
    let stdio = Stdio { output, ..Stdio::default() };
    let group = instances(1, &["sh", "-c", script], &anywhere(), &stdio);
    drop(stdio);
    let child = context.spawn_n(group).unwrap().remove(0).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    (text.trim_end().to_owned(), child.wait().unwrap())
}

#[test]
fn every_instance_is_inside_its_part_at_its_first_instruction_and_a_mask_set_afterwards_is_late() {
    let placements = one_pu_each();
    if placements.len() < 2 {
        println!("skipped: this process has one CPU only, so there is no other part");
        return;
    }
    let (program, dir) = program_without_libc();
    let context = SpawnContext::new(&program).unwrap();
    let count = 10_000;
    let output = dir.path().join("records");
    let stdio = Stdio {
        output: Some(Arc::new(File::options().append(true).create(true).open(&output).unwrap().into())),
        ..Stdio::default()
    };
    let mut expected = BTreeMap::new();
    let results = context.spawn_n(instances(count, &["first_act"], &placements, &stdio)).unwrap();
    for (rank, child) in results.into_iter().enumerate() {
        let child = child.unwrap();
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(0));
        expected.insert(child.pid.0, placements[rank % placements.len()].cpus.clone().unwrap());
    }
    let outside = |records: &[Record], expected: &BTreeMap<u32, CpuSet>| {
        let is_outside = |record: &&Record| {
            !record.mask.is_subset(&expected[&record.pid]) || !expected[&record.pid].contains(record.cpu)
        };
        records.iter().filter(is_outside).count()
    };
    let records = records(&output);
    assert_eq!(records.len(), count as usize);
    assert_eq!(outside(&records, &expected), 0);
    let parts: Vec<CpuSet> = placements.iter().map(|placement| placement.cpus.clone().unwrap()).collect();
    // A mask that is set late is a race, which a process may win many times on an idle machine.
    let is_late = (0..100).any(|round| {
        let (peer, expected) = peer_records(&program, &dir.path().join(format!("peer{round}")), 100, &parts);
        outside(&peer, &expected) > 0
    });
    assert!(is_late, "no process was found outside its part, although its mask was set late");
}

#[test]
fn one_instance_begins_inside_its_part_and_the_mask_of_the_caller_stays() {
    let (program, dir) = program_without_libc();
    let context = SpawnContext::new(&program).unwrap();
    let output = dir.path().join("records");
    let stdio = Stdio {
        output: Some(Arc::new(File::options().append(true).create(true).open(&output).unwrap().into())),
        ..Stdio::default()
    };
    let (before, placements) = (own_mask(), one_pu_each());
    for placement in &placements {
        let group = instances(1, &["first_act"], std::slice::from_ref(placement), &stdio);
        for child in context.spawn_n(group).unwrap() {
            assert_eq!(child.unwrap().wait().unwrap(), ExitStatus::Code(0));
        }
    }
    let records = records(&output);
    assert_eq!(records.len(), placements.len());
    for (record, placement) in records.iter().zip(&placements) {
        assert_eq!(Some(&record.mask), placement.cpus.as_ref());
        assert!(record.mask.contains(record.cpu));
    }
    assert_eq!(own_mask(), before);
}

#[test]
fn a_memory_node_that_does_not_exist_is_refused_before_the_first_instance() {
    if !Path::new("/sys/devices/system/node/has_memory").exists() {
        return eprintln!("skipped: the kernel lists no NUMA nodes");
    }
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("started");
    let on_missing_node = Placement { preferred_numa_node: Some(1000), ..Placement::default() };
    let placements = [Arc::new(Placement::default()), Arc::new(on_missing_node)];
    let arguments = ["touch", started.to_str().unwrap()];
    let context = SpawnContext::new("touch").unwrap();
    let group = instances(2, &arguments, &placements, &Stdio::default());
    for (group, rank) in [(instances(1, &arguments, &placements[1..], &Stdio::default()), 0), (group, 1)] {
        let error = context.spawn_n(group).unwrap_err().to_string();
        let begin = format!(
            "instance {rank} was to prefer the memory of NUMA node 1000, and there is no such node; choose from "
        );
        assert!(error.starts_with(&begin), "{error}");
    }
    assert!(!started.exists(), "an instance was started");
}

#[test]
fn a_mask_outside_of_the_callers_is_refused_before_the_first_instance() {
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("started");
    // No machine has this CPU.
    let outside = Placement::on_cpus("8000".parse().unwrap());
    let placements = [Arc::new(Placement::default()), Arc::new(outside)];
    let arguments = ["touch", started.to_str().unwrap()];
    let context = SpawnContext::new("touch").unwrap();
    let group = instances(2, &arguments, &placements, &Stdio::default());
    for (group, rank) in [(instances(1, &arguments, &placements[1..], &Stdio::default()), 0), (group, 1)] {
        let error = context.spawn_n(group).unwrap_err().to_string();
        let begin = format!("instance {rank} was given the CPUs 8000, and ");
        let end = format!("; choose from {}", own_mask());
        assert!(error.starts_with(&begin) && error.ends_with(&end), "{error}");
    }
    assert!(!started.exists(), "an instance was started");
}

#[test]
fn each_instance_has_its_own_arguments_and_variables() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let stdio = Stdio { output: Some(Arc::new(writer.into())), ..Stdio::default() };
    let script = "echo $1 $PJW_RANK $PJW_SIZE $PJW_CPUS";
    let placements = one_pu_each();
    let group = instances(5, &["sh", "-c", script, "sh", "%r/%n"], &placements, &stdio);
    drop(stdio);
    let context = SpawnContext::new("sh").unwrap().add_rank_variables();
    let children = context.spawn_n(group).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let expected: Vec<String> = (0..5)
        .map(|rank| {
            let cpus = placements[rank % placements.len()].cpus.clone().unwrap();
            format!("{rank}/5 {rank} 5 {cpus}")
        })
        .collect();
    assert_eq!(lines, expected);
    children.into_iter().for_each(|child| assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0))));
}

#[test]
fn exit_codes_and_signals_are_reported_also_real_time_signals() {
    let context = SpawnContext::new("sh").unwrap();
    assert_eq!(run_shell(&context, "exit 42").1, ExitStatus::Code(42));
    assert_eq!(run_shell(&context, "kill -9 $$").1, ExitStatus::Signal(9));
    assert_eq!(run_shell(&context, "kill -40 $$").1, ExitStatus::Signal(40));
}

#[test]
fn the_program_begins_with_the_signals_of_the_caller_and_a_default_sigpipe() {
    let context = SpawnContext::new("sh").unwrap();
    let (status, _) = run_shell(&context, "grep -E '^Sig(Blk|Ign)' /proc/self/status");
    let own = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let blocked = own.lines().find(|line| line.starts_with("SigBlk")).unwrap();
    assert!(status.contains(blocked), "{status}\n{blocked}");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 1 << 12, 0, "SIGPIPE is ignored: {status}");
}

#[test]
fn an_instance_has_the_descriptors_that_any_child_of_the_caller_has() {
    let script = "ls /proc/self/fd";
    let (descriptors, _) = run_shell(&SpawnContext::new("sh").unwrap(), script);
    let other = std::process::Command::new("sh").args(["-c", script]).output().unwrap();
    assert_eq!(descriptors, String::from_utf8(other.stdout).unwrap().trim_end());
}

#[test]
fn the_streams_of_an_instance_may_be_the_same_pipe() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let writer = Arc::new(OwnedFd::from(writer));
    let stdio = Stdio { input: None, output: Some(Arc::clone(&writer)), error: Some(writer) };
    let group = instances(1, &["sh", "-c", "echo out; echo err >&2"], &anywhere(), &stdio);
    drop(stdio);
    SpawnContext::new("sh").unwrap().spawn_n(group).unwrap().remove(0).unwrap().wait().unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "out\nerr\n");
}

#[test]
fn an_instance_with_a_too_large_environment_fails_and_the_others_start() {
    let context = SpawnContext::new("true").unwrap();
    let mut group = instances(10, &["true"], &one_pu_each(), &Stdio::default());
    let large = "x".repeat(200_000);
    group[3].variables.push(std::ffi::CString::new(format!("LARGE={large}")).unwrap());
    let results = context.spawn_n(group).unwrap();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(child) => assert_eq!((rank == 3, child.wait()), (false, Ok(ExitStatus::Code(0)))),
            Err(SpawnError { step, errno }) => {
                assert_eq!((rank, step, errno), (3, SpawnStep::Exec, nix::errno::Errno::E2BIG));
                let text = SpawnError { step, errno }.to_string();
                assert_eq!(text, "step exec failed: Argument list too long");
            }
        }
    }
}

#[test]
fn a_program_that_disappears_after_the_check_is_reported_for_each_instance() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("vanishing");
    std::fs::copy("/bin/true", &program).unwrap();
    let context = SpawnContext::new(&program).unwrap();
    std::fs::remove_file(&program).unwrap();
    let results = context.spawn_n(instances(4, &["vanishing"], &one_pu_each(), &Stdio::default())).unwrap();
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error, SpawnError { step: SpawnStep::Exec, errno: nix::errno::Errno::ENOENT });
        assert_eq!(error.to_string(), "step exec failed: No such file or directory");
    }
}

#[test]
fn a_placement_whose_cgroup_is_another_directory_fails_in_the_step_cgroup() {
    let no_cgroup = File::open("/").unwrap();
    let placement = Placement { cgroup: Some(Arc::new(no_cgroup.into())), ..Placement::default() };
    let group = instances(1, &["true"], &[Arc::new(placement)], &Stdio::default());
    let error = SpawnContext::new("true").unwrap().spawn_n(group).unwrap().remove(0).unwrap_err();
    assert_eq!((error.step, error.errno), (SpawnStep::Cgroup, nix::errno::Errno::EBADF));
}

/// A new cgroup v2, and its path in its hierarchy. It is removed when this value is dropped.
struct Cgroup {
    directory: std::path::PathBuf,
    path: String,
}

impl Cgroup {
    /// Makes a cgroup. Returns `None` without a hierarchy of v2 that can be written.
    fn make() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?.to_owned();
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        let path = format!("{}/pjw-spawn-test-{}", own.trim_end_matches('/'), std::process::id());
        let directory = std::path::PathBuf::from(format!("{mount}{path}"));
        std::fs::create_dir(&directory).ok()?;
        Some(Self { directory, path })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel removes the last process a moment after its end.
        while std::fs::remove_dir(&self.directory)
            .is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
        {
            std::thread::yield_now();
        }
    }
}

#[test]
fn instances_are_born_in_the_cgroup_of_their_placement() {
    let Some(cgroup) = Cgroup::make() else {
        println!("skipped: this user can make no cgroup of v2");
        return;
    };
    for context in
        [SpawnContext::new("cat").unwrap(), SpawnContext::new("cat").unwrap().fork_from_templates()]
    {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let stdio = Stdio { output: Some(Arc::new(writer.into())), ..Stdio::default() };
        let directory = Some(Arc::new(File::open(&cgroup.directory).unwrap().into()));
        let placement = Placement { cgroup: directory, ..Placement::default() };
        let group = instances(20, &["cat", "/proc/self/cgroup"], &[Arc::new(placement)], &stdio);
        drop(stdio);
        let mut batch = context.start(group).unwrap();
        for (_, child) in batch.by_ref() {
            assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
        }
        drop(batch);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let groups: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("0::")).collect();
        assert_eq!(groups, [cgroup.path.as_str(); 20]);
    }
}

#[test]
fn the_results_of_a_batch_are_delivered_while_it_goes_on() {
    let context = SpawnContext::new("true").unwrap();
    let batch = context.start(instances(200, &["true"], &one_pu_each(), &Stdio::default())).unwrap();
    let mut ranks: Vec<usize> = Vec::new();
    for (rank, result) in batch {
        result.unwrap().wait().unwrap();
        ranks.push(rank);
    }
    ranks.sort_unstable();
    assert_eq!(ranks, (0..200).collect::<Vec<_>>());
}

#[test]
fn instances_end_with_their_context_if_it_says_so() {
    let context = SpawnContext::new("sleep").unwrap().kill_when_launcher_ends();
    let children =
        context.spawn_n(instances(4, &["sleep", "1000"], &one_pu_each(), &Stdio::default())).unwrap();
    let children: Vec<_> = children.into_iter().map(Result::unwrap).collect();
    assert!(children.iter().all(|child| child.try_wait() == Ok(None)));
    drop(context);
    assert!(children.iter().all(|child| child.wait() == Ok(ExitStatus::Signal(9))));
}

/// The user and the groups of the tests.
const OTHER_USER: Credentials = Credentials { uid: 65_533, gid: 65_532, groups: Vec::new() };

/// Starts two instances of a shell script by a context. Returns their output, and the number of forks.
fn run_two(context: &SpawnContext, script: &str) -> (String, usize) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let stdio = Stdio { output: Some(Arc::new(writer.into())), ..Stdio::default() };
    let group = instances(2, &["sh", "-c", script], &anywhere(), &stdio);
    drop(stdio);
    let mut batch = context.start(group).unwrap();
    for (_, child) in batch.by_ref() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
    let forked = batch.forked_count();
    drop(batch);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    (text, forked)
}

/// A context whose instances execute the program, and one whose instances are forks. Each has the number of forks among
/// two instances.
fn executed_and_forked_contexts(setup: impl Fn(SpawnContext) -> SpawnContext) -> [(SpawnContext, usize); 2] {
    let forks = if cfg!(target_arch = "x86_64") { 2 } else { 0 };
    let context = || setup(SpawnContext::new("sh").unwrap());
    [(context(), 0), (context().fork_from_templates(), forks)]
}

#[test]
fn instances_have_the_user_and_the_groups_of_their_context() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root may take another user");
        return;
    }
    let groups = vec![7, 8];
    let with_user =
        |context: SpawnContext| context.set_credentials(Credentials { groups: groups.clone(), ..OTHER_USER });
    for (context, forks) in executed_and_forked_contexts(with_user) {
        let (text, forked) = run_two(&context, "echo $(id -ru) $(id -u) $(id -rg) $(id -g) $(id -G)");
        assert_eq!(text, "65533 65533 65532 65532 65532 7 8\n".repeat(2));
        assert_eq!(forked, forks);
    }
}

/// Gives only the calling thread another user, if it is root. The kernel removes its capabilities then.
fn leave_root() {
    let user: libc::uid_t = 65_531;
    if nix::unistd::geteuid().is_root() {
        // SAFETY: the call changes the credentials of the calling thread, and no memory. setresuid(3) would change all
        // threads.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) };
        assert_eq!(changed, 0);
    }
}

#[test]
fn an_unprivileged_user_cannot_start_instances_of_another_user() {
    let context = SpawnContext::new("true").unwrap().set_credentials(OTHER_USER);
    let refused = std::thread::spawn(move || {
        leave_root();
        let instance = instances(1, &["true"], &anywhere(), &Stdio::default()).remove(0);
        context.spawn(instance).unwrap().map(drop).unwrap_err()
    });
    let error = refused.join().unwrap();
    assert_eq!((error.step, error.errno), (SpawnStep::Credentials, nix::errno::Errno::EPERM));
    assert_eq!(error.to_string(), "step credentials failed: Operation not permitted");
}

#[test]
fn instances_begin_in_the_directory_of_their_context() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap();
    for (context, forks) in executed_and_forked_contexts(|context| context.set_working_directory(&path)) {
        assert_eq!(run_two(&context, "pwd -P"), (format!("{0}\n{0}\n", path.display()), forks));
    }
    let own = std::env::current_dir().unwrap().canonicalize().unwrap();
    assert_eq!(run_shell(&SpawnContext::new("sh").unwrap(), "pwd -P").0, own.display().to_string());
}

#[test]
fn a_missing_working_directory_fails_in_the_step_directory() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    for (context, _) in executed_and_forked_contexts(|context| context.set_working_directory(&missing)) {
        for count in [1, 3] {
            let group = instances(count, &["sh", "-c", "exit 0"], &anywhere(), &Stdio::default());
            for result in context.spawn_n(group).unwrap() {
                let error = result.unwrap_err();
                assert_eq!((error.step, error.errno), (SpawnStep::Directory, nix::errno::Errno::ENOENT));
            }
        }
    }
}
