//! Programs that make themselves the template of their group after their start-up. This test is also that program: it
//! starts itself again.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test with a main function of its own")]

use std::io::{Read, Write, pipe};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use pjw_spawn::proxy::{ForkError, Template, TemplateError};
use pjw_spawn::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, Stdio};

const MODE: &str = "PJW_TEST_MODE";
/// The file to which a program writes the process id of the process that it starts.
const PID_FILE: &str = "PJW_TEST_PID_FILE";

fn main() {
    if cfg!(not(target_arch = "x86_64")) {
        println!("skipped: templates exist for x86_64 only");
        return;
    }
    match std::env::var(MODE).as_deref() {
        Ok("forks") => program(),
        Ok("ends") => std::process::exit(3),
        Ok("has threads") => program_with_threads(),
        Ok("has a process") => program_with_process(),
        Ok("names another process") => false_template(),
        Ok("ends and leaves a process") => {
            start_process();
            std::process::exit(3);
        }
        _ => {
            let tests: [(&str, fn()); 8] = [
                ("a_program_without_a_launcher_goes_on", a_program_without_a_launcher_goes_on),
                (
                    "instances_begin_at_the_fork_with_what_is_their_own",
                    instances_begin_at_the_fork_with_what_is_their_own,
                ),
                (
                    "five_hundred_instances_have_their_own_arguments",
                    five_hundred_instances_have_their_own_arguments,
                ),
                (
                    "a_program_that_ends_before_the_fork_is_refused",
                    a_program_that_ends_before_the_fork_is_refused,
                ),
                (
                    "a_program_that_ends_before_the_fork_and_leaves_a_process_is_refused",
                    a_program_that_ends_before_the_fork_and_leaves_a_process_is_refused,
                ),
                (
                    "a_template_that_is_killed_and_leaves_a_process_says_so",
                    a_template_that_is_killed_and_leaves_a_process_says_so,
                ),
                (
                    "a_template_that_names_a_process_of_others_is_not_believed",
                    a_template_that_names_a_process_of_others_is_not_believed,
                ),
                (
                    "a_program_with_threads_is_refused_with_their_number",
                    a_program_with_threads_is_refused_with_their_number,
                ),
            ];
            for (name, test) in tests {
                test();
                println!("test {name} ... ok");
            }
        }
    }
}

/// The program of the instances. Its start-up computes a result, which all instances have without computing it again.
fn program() {
    let start_up: Vec<u64> = (0..100_000).collect();
    let before = std::process::id();
    let own = pjw_spawn::proxy::fork_here().unwrap().unwrap();
    let sum: u64 = start_up.iter().sum();
    let texts: Vec<&str> = own.arguments().map(|text| text.to_str().unwrap()).collect();
    // A thread works only if the C library knows the right thread id and robust list.
    let in_thread = std::thread::spawn(move || sum + 1).join().unwrap();
    let is_new =
        std::process::id() != before && nix::unistd::gettid().as_raw() == nix::unistd::getpid().as_raw();
    println!(
        "{} {} {in_thread} {is_new} {:?} {}",
        texts.join(" "),
        std::env::var("OWN").unwrap(),
        std::env::var("PJW_SPAWN_CHANNEL").ok(),
        std::fs::read_to_string("/proc/self/cmdline").unwrap().replace('\0', "|"),
    );
    std::process::exit(i32::try_from(texts.len()).unwrap());
}

fn program_with_threads() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || receiver.recv());
    let error = pjw_spawn::proxy::fork_here().unwrap_err();
    assert_eq!(error, pjw_spawn::proxy::ForkHereError::MultipleThreads(2));
    drop(sender);
    std::process::exit(5);
}

/// A program with another process, which inherits its descriptors.
fn program_with_process() {
    start_process();
    pjw_spawn::proxy::fork_here().unwrap();
}

/// Does as a template, and answers each message with the number of a process that is no child of its launcher: 1.
fn false_template() {
    let channel: i32 = std::env::var("PJW_SPAWN_CHANNEL").unwrap().parse().unwrap();
    // SAFETY: the launcher has opened the descriptor for this program.
    let mut channel = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(channel) });
    let addresses = [0x10_0000_u64, 0x20_0000, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
    channel.write_all(&addresses).unwrap();
    let mut message = [0; 16384];
    while channel.read(&mut message).is_ok_and(|length| length > 0) {
        // The result, and the process ids of 16 instances.
        let reply = [0_i32.to_ne_bytes(), 0_i32.to_ne_bytes()].into_iter().chain([1_i32.to_ne_bytes(); 16]);
        channel.write_all(&reply.flatten().collect::<Vec<u8>>()).unwrap();
    }
}

/// Starts a process that sleeps, and writes its process id to the file of the test.
#[expect(clippy::zombie_processes, reason = "the program ends first")]
fn start_process() {
    let process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    std::fs::write(std::env::var(PID_FILE).unwrap(), process.id().to_string()).unwrap();
}

/// Kills the process that a program has started.
fn kill_process_of(file: &std::path::Path) {
    let pid = std::fs::read_to_string(file).unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
}

fn context(mode: &str) -> SpawnContext {
    SpawnContext::from_path(&std::env::current_exe().unwrap()).set_variable(MODE, mode)
}

fn instance(rank: u32, arguments: &[&str]) -> Instance {
    Instance {
        rank,
        size: 500,
        arguments: Arc::new(Arguments::parse(arguments).unwrap()),
        variables: vec![std::ffi::CString::new(format!("OWN=of {rank}")).unwrap()],
        placement: Arc::new(Placement::default()),
        stdio: Stdio::default(),
    }
}

fn a_program_without_a_launcher_goes_on() {
    assert_eq!(pjw_spawn::proxy::fork_here(), Ok(None));
}

fn instances_begin_at_the_fork_with_what_is_their_own() {
    let mut template = Template::load_until_fork_here(&context("forks"), &instance(0, &["p"])).unwrap();
    for (rank, arguments) in [(1, &["p", "r%r"][..]), (20, &["p"]), (3, &["prog", "a", "b", "%n"])] {
        let (mut reader, writer) = pipe().unwrap();
        let mut own = instance(rank, arguments);
        own.stdio.output = Some(Arc::new(OwnedFd::from(writer)));
        let child = template.fork(&own).unwrap();
        let given = own.arguments.expand(rank, 500);
        let given: Vec<&str> = given.iter().map(|text| text.to_str().unwrap()).collect();
        drop(own);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let expected = format!("{} of {rank} 4999950001 true None {}|\n", given.join(" "), given.join("|"));
        assert_eq!(text, expected);
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(i32::try_from(given.len()).unwrap()));
    }
}

fn five_hundred_instances_have_their_own_arguments() {
    let mut template = Template::load_until_fork_here(&context("forks"), &instance(0, &["p"])).unwrap();
    let null = Arc::new(OwnedFd::from(std::fs::File::create("/dev/null").unwrap()));
    let lists: [&[&str]; 3] = [&["p"], &["p", "%r"], &["p", "%r", "x"]];
    let instances: Vec<Instance> = (0..500)
        .map(|rank| {
            let mut own = instance(rank, lists[rank as usize % 3]);
            own.stdio.output = Some(Arc::clone(&null));
            own
        })
        .collect();
    let mut children: Vec<(u32, Child)> = Vec::new();
    template.fork_all(&instances, |instance, child| children.push((instance.rank, child.unwrap())));
    for (rank, child) in children {
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(i32::try_from(rank % 3 + 1).unwrap()));
    }
}

fn a_program_that_ends_before_the_fork_is_refused() {
    let refused = Template::load_until_fork_here(&context("ends"), &instance(0, &["p"])).unwrap_err();
    assert_eq!(refused, TemplateError::Exited(3));
}

fn a_program_that_ends_before_the_fork_and_leaves_a_process_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pid");
    let context = context("ends and leaves a process").set_variable(PID_FILE, &file);
    let refused = Template::load_until_fork_here(&context, &instance(0, &["p"])).unwrap_err();
    assert_eq!(refused, TemplateError::Exited(3));
    kill_process_of(&file);
}

fn a_template_that_names_a_process_of_others_is_not_believed() {
    let own = instance(0, &["p"]);
    let mut template = Template::load_until_fork_here(&context("names another process"), &own).unwrap();
    for _ in 0..2 {
        assert_eq!(template.fork(&own).unwrap_err(), ForkError::Ended);
    }
}

fn a_template_that_is_killed_and_leaves_a_process_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pid");
    let context = context("has a process").set_variable(PID_FILE, &file);
    let mut template = Template::load_until_fork_here(&context, &instance(0, &["p"])).unwrap();
    let pid = nix::unistd::Pid::from_raw(template.pid().0.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
    assert_eq!(template.fork(&instance(1, &["p"])).unwrap_err(), ForkError::Ended);
    kill_process_of(&file);
}

fn a_program_with_threads_is_refused_with_their_number() {
    let refused = Template::load_until_fork_here(&context("has threads"), &instance(0, &["p"])).unwrap_err();
    assert_eq!(refused, TemplateError::Exited(5));
    std::io::stdout().flush().unwrap();
}
