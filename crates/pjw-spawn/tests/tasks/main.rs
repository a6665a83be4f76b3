//! Tasks: real processes in one address space, of a static program of C that knows nothing of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

#[path = "../programs/mod.rs"]
#[allow(dead_code)] // not all of it is needed here
mod programs;

mod ends;
mod refused;

use std::ffi::c_void;
use std::fs;
use std::io::{BufRead, BufReader, PipeReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Arc;

use pjw_core::ids::Pid;
use pjw_spawn::tasks::AddressSpace;
use pjw_spawn::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, SpawnStep, Stdio};
use tempfile::TempDir;

/// A compiled program. It is removed with the directory.
struct Program {
    path: PathBuf,
    directory: TempDir,
}

/// Compiles a file of tests/programs. `None` if this machine has no static C library for that.
fn compile(source: &str, flags: &[&str]) -> Option<Program> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("task");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let output =
        Command::new("cc").args(flags).arg("-pthread").arg("-o").arg(&path).arg(source).output().unwrap();
    if !output.status.success() {
        println!(
            "skipped: cc {flags:?} can't link a static program: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return None;
    }
    Some(Program { path, directory })
}

fn task_program() -> Option<Program> {
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: tasks run on x86-64 only");
        return None;
    }
    compile("task.c", &["-O1", "-Wall", "-Wextra", "-static-pie"])
}

fn context(program: &Program) -> SpawnContext {
    SpawnContext::new(&program.path).unwrap().add_rank_variables().share_memory().unwrap()
}

fn instance(program: &Program, rank: u32, size: u32, arguments: &[&str]) -> Instance {
    let path = program.path.to_str().unwrap();
    let arguments: Vec<&str> = std::iter::once(path).chain(arguments.iter().copied()).collect();
    Instance {
        rank,
        size,
        arguments: Arc::new(Arguments::literal(&arguments).unwrap()),
        variables: vec![std::ffi::CString::new(format!("OWN={rank}")).unwrap()],
        placement: Arc::default(),
        stdio: Stdio::default(),
    }
}

/// The same with a pipe for its output.
fn with_output(mut instance: Instance) -> (Instance, BufReader<PipeReader>) {
    let (reader, writer) = std::io::pipe().unwrap();
    instance.stdio.output = Some(Arc::new(OwnedFd::from(writer)));
    (instance, BufReader::new(reader))
}

fn line(reader: &mut BufReader<PipeReader>) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Starts a task and returns what it prints first.
fn start_printing(space: &mut AddressSpace, instance: Instance) -> (Child, String) {
    let (instance, mut output) = with_output(instance);
    let child = space.start(&instance).unwrap();
    drop(instance);
    let line = line(&mut output);
    (child, line)
}

fn maps(host: Pid) -> String {
    fs::read_to_string(format!("/proc/{}/maps", host.0)).unwrap()
}

#[test]
fn a_task_follows_the_pointer_of_another_and_has_its_own_variables() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 2, 2).unwrap();
    let (first, address) = start_printing(&mut space, instance(&program, 0, 2, &["offer"]));
    let second = space.start(&instance(&program, 1, 2, &["take", &address])).unwrap();
    assert_eq!(second.wait(), Ok(ExitStatus::Code(0)));
    assert_eq!(first.wait(), Ok(ExitStatus::Code(17)));
}

#[test]
fn tasks_have_their_own_heap_threads_and_thread_local_variables() {
    let Some(program) = task_program() else { return };
    let instances = (0..20).map(|rank| instance(&program, rank, 20, &["live"])).collect();
    let results = context(&program).spawn_n(instances).unwrap();
    for child in results {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
}

#[test]
fn of_tasks_with_large_environments_only_one_that_is_too_large_fails() {
    let Some(program) = task_program() else { return };
    // All requests together have 8 MiB of memory, which is not enough for three of those with 3 MiB.
    let mebibytes = [0, 3, 3, 3, 9, 3, 0];
    let with_variable = |(rank, mebibytes): (u32, usize)| {
        let mut instance = instance(&program, rank, 7, &["live"]);
        let value = "x".repeat(mebibytes << 20);
        instance.variables.push(std::ffi::CString::new(format!("LARGE={value}")).unwrap());
        instance
    };
    let results = context(&program).spawn_n((0..).zip(mebibytes).map(with_variable).collect()).unwrap();
    for (result, mebibytes) in results.into_iter().zip(mebibytes) {
        match result {
            Ok(child) => assert_eq!((mebibytes == 9, child.wait()), (false, Ok(ExitStatus::Code(0)))),
            Err(error) => assert_eq!(
                (mebibytes, error.step, error.errno),
                (9, SpawnStep::Exec, nix::errno::Errno::E2BIG)
            ),
        }
    }
}

/// The line that `a_thread_in_the_heap_of_a_process_of_its_own` prints when its tasks have ended.
const ENDED: &str = "the tasks have ended";

#[test]
fn a_thread_whose_stack_is_in_the_heap_starts_tasks() {
    if task_program().is_none() {
        return;
    }
    // The heap must be that of a process of its own: other threads of this process may move the program break.
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "a_thread_in_the_heap_of_a_process_of_its_own", "--ignored", "--nocapture"]);
    let output = other.output().unwrap();
    let has_ended = String::from_utf8_lossy(&output.stdout).contains(ENDED);
    assert!(output.status.success() && has_ended, "{output:?}");
}

/// Starts two tasks, and waits for their ends. Is called by C, so a panic ends the process.
extern "C" fn start_two_tasks(_: *mut c_void) -> *mut c_void {
    let program = task_program().unwrap();
    let instances = (0..2).map(|rank| instance(&program, rank, 2, &["live"])).collect();
    for child in context(&program).spawn_n(instances).unwrap() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
    ptr::null_mut()
}

#[test]
#[ignore = "a part of a_thread_whose_stack_is_in_the_heap_starts_tasks"]
fn a_thread_in_the_heap_of_a_process_of_its_own() {
    const STACK_BYTES: usize = 2 << 20;
    // SAFETY: the new thread alone uses the memory that is added to the heap, and ends before this function.
    unsafe {
        let stack = libc::sbrk(STACK_BYTES.cast_signed());
        assert_ne!(stack.addr(), usize::MAX, "the heap can't grow");
        let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&raw mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstack(&raw mut attributes, stack, STACK_BYTES), 0);
        let no_argument = ptr::null_mut();
        let created =
            libc::pthread_create(&raw mut thread, &raw const attributes, start_two_tasks, no_argument);
        assert_eq!(created, 0);
        assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
    }
    println!("\n{ENDED}");
}

#[test]
fn a_task_finds_what_execve_would_give_it_and_random_bytes_of_its_own() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 2, 2).unwrap();
    let mut bytes = Vec::new();
    for rank in 0..2 {
        let (child, line) = start_printing(&mut space, instance(&program, rank, 2, &["look"]));
        assert_eq!(child.wait(), Ok(ExitStatus::Code(0)), "{line}");
        let (random, rest) = line.split_once(' ').unwrap();
        assert_eq!(rest, format!("{rank} {rank}"));
        bytes.push(random.to_owned());
    }
    assert_ne!(bytes[0], bytes[1]);
}

#[test]
fn directory_handlers_descriptors_and_environment_of_a_task_are_its_own() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 2, 2).unwrap();
    let (first, said) = start_printing(&mut space, instance(&program, 0, 2, &["change"]));
    assert_eq!(said, "changed");
    let second = space.start(&instance(&program, 1, 2, &["unchanged"])).unwrap();
    assert_eq!(second.wait(), Ok(ExitStatus::Code(0)));
    first.send_signal(libc::SIGUSR1).unwrap();
    assert_eq!(first.wait(), Ok(ExitStatus::Code(0)));
}

#[test]
fn a_task_inherits_the_descriptors_that_execve_would_leave_open() {
    let Some(program) = task_program() else { return };
    // A descriptor without close-on-exec. Other tests of this process may start programs meanwhile, which get it too.
    // The task gets those of the other tests, which are all below 900.
    let kept = fs::File::open("/dev/null").unwrap();
    let kept = nix::fcntl::fcntl(&kept, nix::fcntl::FcntlArg::F_DUPFD(900)).unwrap();
    let _closed = fs::File::open("/dev/null").unwrap();
    let mut space = AddressSpace::create(&context(&program), 3, 3).unwrap();
    let others: Vec<Child> =
        (0..2).map(|rank| start_printing(&mut space, instance(&program, rank, 3, &["wait"])).0).collect();
    let (child, line) = start_printing(&mut space, instance(&program, 2, 3, &["descriptors"]));
    assert_eq!(child.wait(), Ok(ExitStatus::Code(0)));
    let mut found: Vec<i32> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
    found.sort_unstable();
    nix::unistd::close(kept).unwrap();
    assert_eq!(found.iter().filter(|number| **number < 3).count(), 3, "{line}");
    assert!(found.contains(&kept), "{line}");
    // Descriptors of the host, and of other tasks, would be above this one.
    assert_eq!(found.last(), Some(&kept), "{line}");
    for other in others {
        other.send_signal(libc::SIGKILL).unwrap();
        other.wait().unwrap();
    }
}

#[test]
fn a_task_has_the_variable_of_its_own_address_space_alone() {
    let Some(program) = task_program() else { return };
    let context = context(&program).set_environment([("PJW_TASKS", "1000:1")]);
    let mut space = AddressSpace::create(&context, 1, 1).unwrap();
    let (child, line) = start_printing(&mut space, instance(&program, 0, 1, &["variables"]));
    assert_eq!(child.wait(), Ok(ExitStatus::Code(0)));
    assert_eq!(line, "1");
}

#[test]
fn a_task_whose_streams_do_not_fit_the_host_is_not_started_and_the_next_one_is() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 1, 2).unwrap();
    let host = Pid::from_raw(space.host_pid().0.cast_signed());
    let usual = rustix::process::getrlimit(Resource::Nofile);
    prlimit(host, Resource::Nofile, Rlimit { current: Some(3), ..usual }).unwrap();
    let (first, mut output) = with_output(instance(&program, 0, 2, &["variables"]));
    let error = space.start(&first).unwrap_err();
    assert_eq!((error.step, error.errno), (SpawnStep::Stdio, nix::errno::Errno::EMFILE));
    drop(first);
    assert_eq!(line(&mut output), "");
    prlimit(host, Resource::Nofile, usual).unwrap();
    let (child, line) = start_printing(&mut space, instance(&program, 1, 2, &["variables"]));
    assert_eq!((child.wait(), line.as_str()), (Ok(ExitStatus::Code(0)), "1"));
}

#[test]
fn brk_of_a_task_fails_and_malloc_works_on() {
    let Some(program) = task_program() else { return };
    let instances = (0..8).map(|rank| instance(&program, rank, 8, &["brk"])).collect();
    for child in context(&program).spawn_n(instances).unwrap() {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
}

#[test]
fn each_task_is_inside_its_part_at_its_first_instruction() {
    let own_mask = programs::own_mask();
    let parts: Vec<_> = own_mask.iter().collect();
    if parts.len() < 2 {
        println!("skipped: this process has one CPU only, so there is no other part");
        return;
    }
    let flags = ["-O1", "-nostdlib", "-static-pie", "-fPIE", "-ffreestanding", "-fno-stack-protector"];
    let Some(program) = task_program().and_then(|_| compile("first_act.c", &flags)) else { return };
    let output = program.directory.path().join("records");
    let file = fs::File::options().append(true).create(true).open(&output).unwrap();
    let stdio = Stdio { output: Some(Arc::new(file.into())), ..Stdio::default() };
    let placements: Vec<Arc<Placement>> =
        parts.iter().map(|pu| Arc::new(Placement::on_cpus((*pu).into()))).collect();
    let instances = (0..100).map(|rank| Instance {
        placement: Arc::clone(&placements[rank as usize % placements.len()]),
        stdio: stdio.clone(),
        ..instance(&program, rank, 100, &[])
    });
    let results = context(&program).spawn_n(instances.collect()).unwrap();
    assert_eq!(programs::own_mask(), own_mask, "the thread that starts the tasks keeps its mask");
    for (rank, child) in results.into_iter().enumerate() {
        let child = child.unwrap();
        assert_eq!(child.wait(), Ok(ExitStatus::Code(0)));
        let records = programs::records(&output);
        let record = records.iter().find(|record| record.pid == child.pid.0).unwrap();
        assert_eq!(Some(&record.mask), placements[rank % placements.len()].cpus.as_ref());
        assert!(record.mask.contains(record.cpu));
    }
}
