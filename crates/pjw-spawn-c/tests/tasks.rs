//! Programs of C that use pjw_tasks.h: `tasks.c` checks its functions, and the example in `examples/stencil.c` computes
//! the same with and without a shared address space.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // a test may fail

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use spawn::{Arguments, ExitStatus, Instance, SpawnContext, Stdio};

/// The number of ranks of a group.
const RANKS: u32 = 4;

/// Compiles a static program. Returns `None` where that is not possible.
fn compile(source: &str, directory: &Path) -> Option<PathBuf> {
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: tasks run on x86-64 only");
        return None;
    }
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = directory.join("program");
    let output = Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static-pie", "-pthread", "-o"])
        .arg(&program)
        .arg(crate_directory.join(source))
        .arg("-I")
        .arg(crate_directory.join("include"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && errors.contains("cannot find -lc") {
        println!("skipped: there is no static C library");
        return None;
    }
    assert!(output.status.success(), "{errors}");
    Some(program)
}

/// Runs a group of ranks as pjwctl does. Asserts that each ends with exit code 0. Returns the output.
fn run(program: &Path, arguments: &[&str], is_shared: bool) -> String {
    run_ranks(program, arguments, is_shared, RANKS)
}

fn run_ranks(program: &Path, arguments: &[&str], is_shared: bool, ranks: u32) -> String {
    let group =
        format!("{}.{is_shared}.{}", std::process::id(), program.display().to_string().replace('/', "_"));
    let context = SpawnContext::new(program).unwrap().add_rank_variables().set_variable("PJW_GROUP", group);
    let context = if is_shared { context.share_memory().unwrap() } else { context };
    let path = program.to_str().unwrap();
    let arguments: Vec<&str> = std::iter::once(path).chain(arguments.iter().copied()).collect();
    let arguments = Arc::new(Arguments::literal(&arguments).unwrap());
    let (mut reader, writer) = std::io::pipe().unwrap();
    let output = Some(Arc::new(OwnedFd::from(writer)));
    let instances = (0..ranks).map(|rank| Instance {
        rank,
        size: ranks,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::default(),
        stdio: Stdio { output: output.clone(), ..Stdio::default() },
    });
    let instances = instances.collect();
    drop(output);
    // A rank that ends is waited for at once, because the other ranks check whether its process exists.
    let children: Vec<_> = context.spawn_n(instances).unwrap().into_iter().map(Result::unwrap).collect();
    std::thread::scope(|scope| {
        let waiters: Vec<_> = children.iter().map(|child| scope.spawn(|| child.wait())).collect();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Ok(ExitStatus::Code(0)));
        }
    });
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_functions_of_the_header_work_in_one_address_space_and_in_several() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile("tests/tasks.c", directory.path()) else { return };
    run(&program, &["shared"], true);
    run(&program, &["alone"], false);
    // The name of a memory file has the path of the program. Other tests of this process have other programs.
    let own = directory.path().display().to_string().replace('/', "_");
    let remaining_files = fs::read_dir("/dev/shm").unwrap().flatten();
    let remaining_files: Vec<_> =
        remaining_files.filter(|file| file.file_name().to_string_lossy().contains(&own)).collect();
    assert!(remaining_files.is_empty(), "{remaining_files:?}");
}

#[test]
fn a_second_program_of_an_instance_does_not_take_the_rank_of_the_first_one() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile("tests/tasks.c", directory.path()) else { return };
    // The rank 1 never calls pjw_tasks_init().
    let group = format!("{}.second_program", std::process::id());
    let mut command = Command::new(program);
    let status =
        command.arg("first").env("PJW_RANK", "0").env("PJW_SIZE", "2").env("PJW_GROUP", &group).status();
    let user = nix::unistd::Uid::effective();
    fs::remove_file(format!("/dev/shm/pjw-tasks-{user}-{group}")).unwrap();
    assert!(status.unwrap().success());
}

#[test]
fn the_stencil_computes_the_same_with_pointers_and_with_memory_files() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile("examples/stencil.c", directory.path()) else { return };
    let [shared, separate] = [true, false].map(|is_shared| run(&program, &["64", "100"], is_shared));
    assert!(shared.starts_with("sum ") && shared.lines().count() == 1, "{shared}");
    assert_eq!(shared, separate);
}

const PAGES_OF_50: [&str; 2] = ["50", "128"];

#[test]
fn page_tables_of_fifty_tasks_are_near_those_of_fifty_threads() {
    let directory = tempfile::tempdir().unwrap();
    // The program of the bench tasks: each rank uses all pages of 128 MiB.
    let Some(program) = compile("../../benches/src/peers/ranks.c", directory.path()) else { return };
    let kib = |text: &str| text.trim().parse::<f64>().unwrap_or_else(|_| panic!("no number: {text}"));
    // Where the kernel places the stacks of threads differs from run to run, so one run may differ by a tenth.
    let median = |runs: usize, run: &dyn Fn() -> f64| {
        let mut figures: Vec<f64> = (0..runs).map(|_| run()).collect();
        figures.sort_by(f64::total_cmp);
        figures[runs / 2]
    };
    // The address space of the tasks begins as a copy of that of the process that starts them, and other tests run in
    // this one.
    let tasks = median(5, &|| {
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", "fifty_tasks_in_a_process_of_their_own", "--ignored", "--nocapture"]);
        let output = own.env("RANKS", &program).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        kib(text.lines().find_map(|line| line.strip_prefix("page tables:")).unwrap_or(&text))
    });
    let threads = median(25, &|| {
        let output = Command::new(&program).args(["pages", "threads"]).args(PAGES_OF_50).output().unwrap();
        kib(&String::from_utf8_lossy(&output.stdout))
    });
    println!("tasks {tasks} KiB, threads {threads} KiB");
    assert!(tasks <= 1.2 * threads, "tasks {tasks} KiB, threads {threads} KiB");
}

#[test]
#[ignore = "a part of page_tables_of_fifty_tasks_are_near_those_of_fifty_threads"]
fn fifty_tasks_in_a_process_of_their_own() {
    let program = std::env::var_os("RANKS").expect("the other test sets it");
    let arguments = ["pages", "ranks"].into_iter().chain(PAGES_OF_50);
    let figure = run_ranks(Path::new(&program), &arguments.collect::<Vec<_>>(), true, 50);
    println!("\npage tables:{figure}");
}

#[test]
fn a_program_that_was_not_started_by_pjwctl_spawn_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile("examples/stencil.c", directory.path()) else { return };
    let output = Command::new(&program).env_remove("PJW_RANK").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("start it by pjwctl spawn: Invalid argument"), "{errors}");
}
