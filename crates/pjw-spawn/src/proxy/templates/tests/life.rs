//! The life of a template, and what is left after it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use nix::sys::signal::{SigSet, Signal};

use super::*;
use crate::ExitStatus;
use crate::proxy::{ForkError, Template};

const SLEEP: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }";

/// Whether a process runs or sleeps: not a zombie, not gone.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Waits until a process has ended.
fn wait_for_end(pid: u32) {
    let begin = std::time::Instant::now();
    while is_alive(pid) {
        assert!(begin.elapsed().as_secs() < 60, "process {pid} lives on");
        std::thread::yield_now();
    }
}

/// Kills a process, and waits until it has ended.
pub(super) fn kill_process(pid: u32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::SIGKILL).unwrap();
    wait_for_end(pid);
}

#[test]
fn a_template_sleeps_in_a_system_call_and_is_not_traced() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "sleep", SLEEP, &[]), &[]);
    let template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    let pid = template.pid().0;
    let receiving = || fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap().starts_with("47 ");
    while !receiving() {
        std::thread::yield_now();
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("TracerPid:\t0"), "{status}");
    drop(template);
    assert!(!is_alive(pid));
}

#[test]
fn an_instance_ends_by_its_own_signal_and_lives_longer_than_its_template() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "sleep", SLEEP, &[]), &[]);
    let mut template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    let child = template.fork(&instance(0, &["sleep"])).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", child.pid.0)).unwrap();
    assert!(status.contains("TracerPid:\t0"), "{status}");
    drop(template);
    assert!(is_alive(child.pid.0));
    child.send_signal(libc::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap(), ExitStatus::Signal(libc::SIGTERM));
}

#[test]
fn a_template_that_was_killed_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "sleep", SLEEP, &[]), &[]);
    let mut template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    kill_process(template.pid().0);
    assert_eq!(template.fork(&instance(0, &["sleep"])).unwrap_err(), ForkError::Ended);
}

#[test]
fn a_changed_program_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "sleep", SLEEP, &[]);
    let context = context(&program, &[]);
    let template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    assert!(template.is_up_to_date());
    fs::remove_file(&program).unwrap();
    assert!(!template.is_up_to_date());
}

#[test]
fn an_instance_may_end_with_the_thread_that_has_loaded_its_template() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "sleep", SLEEP, &[]), &[]).kill_when_launcher_ends();
    let (done, wait) = mpsc::channel::<()>();
    let (send, receive) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
        send.send(template.fork(&instance(0, &["sleep"])).unwrap()).unwrap();
        let _ = wait.recv();
    });
    let child = receive.recv().unwrap();
    assert!(is_alive(child.pid.0));
    drop(done);
    thread.join().unwrap();
    assert_eq!(child.wait().unwrap(), ExitStatus::Signal(libc::SIGKILL));
}

/// The launcher that the next test kills. On its own it does nothing.
#[test]
fn launcher() {
    let Ok(program) = std::env::var("PJW_TEST_TEMPLATE_OF") else { return };
    let context = context(program.as_ref(), &[]).kill_when_launcher_ends();
    let mut template = Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    let child = template.fork(&instance(0, &["sleep"])).unwrap();
    println!("\npids {} {}", template.pid(), child.pid);
    let _ = child.wait();
}

/// The launcher that makes templates, instances and spares until the next but one test kills it.
#[test]
fn busy_launcher() {
    let Ok(program) = std::env::var("PJW_TEST_TEMPLATES_OF") else { return };
    let context = context(program.as_ref(), &["A=1"]).kill_when_launcher_ends();
    let instances: Vec<_> = (0..40).map(|rank| instance(rank, &["sleep", "%r"])).collect();
    println!("\nbegins");
    loop {
        let mut template = Template::load_until_main(&context, &instances[0]).unwrap();
        let spare = template.make_spare().unwrap();
        let mut children = vec![template.start_spare(spare, &instances[0]).unwrap()];
        let _spare = template.make_spare().unwrap();
        template.fork_all(&instances, |_, child| children.push(child.unwrap()));
        for child in children {
            child.send_signal(libc::SIGKILL).unwrap();
            child.wait().unwrap();
        }
    }
}

/// The launcher that loads templates while the next test sends signals to it. On its own it does nothing.
#[test]
fn loading_launcher() {
    let Ok(program) = std::env::var("PJW_TEST_SIGNALLED_TEMPLATES_OF") else { return };
    let context = context(program.as_ref(), &["A=1"]);
    println!("\nbegins");
    for _ in 0..50 {
        Template::load_until_main(&context, &instance(0, &["sleep"])).unwrap();
    }
}

#[test]
fn templates_are_loaded_while_the_process_group_gets_signals() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "sleep", SLEEP, &[]);
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "proxy::templates::tests::life::loading_launcher"])
        .env("PJW_TEST_SIGNALLED_TEMPLATES_OF", &program)
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "begins"));
    let group = nix::unistd::Pid::from_raw(launcher.id().cast_signed());
    let begin = std::time::Instant::now();
    let status = loop {
        // A process that is stopped again and again hardly gets CPU time on a busy machine. So the starts that are left
        // after a minute get no signals.
        if begin.elapsed().as_secs() < 60 {
            // A stopped process group goes on with the last one.
            for signal in [Signal::SIGWINCH, Signal::SIGSTOP, Signal::SIGCONT] {
                nix::sys::signal::killpg(group, signal).unwrap();
            }
        } else {
            std::thread::yield_now();
        }
        if let Some(status) = launcher.try_wait().unwrap() {
            break status;
        }
        // All fifty starts, on a machine that may be busy.
        if begin.elapsed().as_secs() > 300 {
            nix::sys::signal::killpg(group, Signal::SIGKILL).unwrap();
            panic!("a start of a template has not ended");
        }
    };
    assert!(status.success(), "{status}");
}

#[test]
fn a_launcher_that_blocks_sigtrap_gets_a_template() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "exits", "int main(void) { return 0; }", &[]);
    // The signals of a thread of its own: the harness may run the tests in its main thread.
    let launcher = std::thread::spawn(move || {
        SigSet::from(Signal::SIGTRAP).thread_block().unwrap();
        let context = context(&program, &[]);
        Template::load_until_main(&context, &instance(0, &["exits"])).err()
    });
    assert_eq!(launcher.join().unwrap(), None);
}

/// Returns the processes of a program, and what has become of them.
fn processes_of(program: &std::path::Path) -> Vec<String> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_its = |pid: &String| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path == program);
    pids.filter(is_its).collect()
}

#[test]
fn a_launcher_that_is_killed_at_fifty_moments_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "sleep", SLEEP, &[]);
    for moment in 0..50 {
        let mut launcher = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "proxy::templates::tests::life::busy_launcher"])
            .env("PJW_TEST_TEMPLATES_OF", &program)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "begins"));
        // The moments are spread over the first rounds. Nothing depends on where they are.
        std::thread::sleep(std::time::Duration::from_micros(moment * 331));
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        let begin = std::time::Instant::now();
        loop {
            let left = processes_of(&program);
            if left.is_empty() {
                break;
            }
            assert!(begin.elapsed().as_secs() < 60, "moment {moment}: {left:?} are left");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_killed_launcher_leaves_no_template_and_no_instance() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "sleep", SLEEP, &[]);
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "proxy::templates::tests::life::launcher"])
        .env("PJW_TEST_TEMPLATE_OF", &program)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let pids =
        lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("pids ")?.to_owned())).unwrap();
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    pids.into_iter().for_each(wait_for_end);
}
