//! How tasks end, and what they leave.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::process::Command;

use nix::poll::{PollFd, PollFlags};
use pjw_core::ids::Pid;
use pjw_spawn::tasks::AddressSpace;
use pjw_spawn::{Child, ExitStatus, SpawnStep};

use super::{context, instance, maps, start_printing, task_program};

/// How many tasks follow each other. A task that maps 10 MiB takes a debug build about a millisecond.
const MANY: u32 = 1_000;

#[test]
fn a_thousand_tasks_one_after_the_other_leave_no_mapping() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 2, MANY).unwrap();
    let before = maps(space.host_pid());
    for rank in 0..MANY {
        let child = space.start(&instance(&program, rank, MANY, &["leave"])).unwrap();
        assert_eq!(child.wait(), Ok(ExitStatus::Code(0)), "rank {rank}");
    }
    // The host may still be busy with the last one.
    wait_until(|| maps(space.host_pid()) == before, "the mappings of the host are those from before");
    let name = program.path.to_str().unwrap();
    assert!(!maps(Pid(std::process::id())).contains(name), "this process has never mapped the program");
}

/// What the process of the next test prints when it has compared its mappings.
const COMPARED: &str = "the mappings were compared";

#[test]
fn a_thousand_tasks_leave_no_mapping_in_the_process_that_starts_them() {
    if task_program().is_none() {
        return;
    }
    // Other tests map and unmap memory of this process at the same time.
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "ends::a_thousand_tasks_of_a_process_of_their_own", "--ignored", "--nocapture"]);
    let output = other.output().unwrap();
    let is_compared = String::from_utf8_lossy(&output.stdout).contains(COMPARED);
    assert!(output.status.success() && is_compared, "{output:?}");
}

#[test]
#[ignore = "a part of a_thousand_tasks_leave_no_mapping_in_the_process_that_starts_them"]
fn a_thousand_tasks_of_a_process_of_their_own() {
    let Some(program) = task_program() else { return };
    let start_and_wait = |count: u32| {
        let mut space = AddressSpace::create(&context(&program), 2, count).unwrap();
        for rank in 0..count {
            let child = space.start(&instance(&program, rank, count, &["exit", "0"])).unwrap();
            assert_eq!(child.wait(), Ok(ExitStatus::Code(0)), "rank {rank}");
        }
    };
    let own_maps = || maps(Pid(std::process::id()));
    // The allocator of memory keeps what the first ones need.
    start_and_wait(50);
    let before = own_maps();
    start_and_wait(MANY);
    let after = own_maps();
    assert_eq!(mapped_files(&after), mapped_files(&before));
    let more_mappings = after.lines().count().saturating_sub(before.lines().count());
    assert!(more_mappings < 10, "{more_mappings} more: {before}\n{after}");
    // Neighbouring mappings may count as one. One page of each task would be 4 MB.
    let more_bytes = mapped_bytes(&after).saturating_sub(mapped_bytes(&before));
    assert!(more_bytes < u64::from(MANY) * 4096, "{more_bytes} bytes more: {before}\n{after}");
    println!("\n{COMPARED}");
}

/// The files that are mapped, from the text of /proc/PID/maps.
fn mapped_files(maps: &str) -> BTreeSet<&str> {
    maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).collect()
}

/// The size of all mappings.
fn mapped_bytes(maps: &str) -> u64 {
    let size = |line: &str| {
        let (begin, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(begin, 16).ok()?)
    };
    maps.lines().filter_map(size).sum()
}

#[test]
fn the_program_and_the_stack_of_a_task_are_unmapped_while_others_live() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 9, 9).unwrap();
    let (first, _) = start_printing(&mut space, instance(&program, 0, 9, &["wait"]));
    let name = program.path.to_str().unwrap().to_owned();
    let copies = |space: &AddressSpace| {
        let maps = maps(space.host_pid());
        maps.lines().filter(|line| line.ends_with(&name)).count()
    };
    let of_one = copies(&space);
    assert!(of_one > 0);
    for rank in 1..9 {
        let child = space.start(&instance(&program, rank, 9, &["leave"])).unwrap();
        assert_eq!(child.wait(), Ok(ExitStatus::Code(0)));
    }
    wait_until(|| copies(&space) == of_one, "the copies of the program are those of the living task");
    kill(&first);
}

#[test]
fn exit_exec_a_fault_and_a_kill_of_one_leave_the_others_running() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 6, 6).unwrap();
    let (first, _) = start_printing(&mut space, instance(&program, 0, 6, &["wait"]));
    let (killed, _) = start_printing(&mut space, instance(&program, 1, 6, &["wait"]));
    killed.send_signal(libc::SIGKILL).unwrap();
    assert_eq!(killed.wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
    for (rank, act, end) in [
        (2, &["exit", "3"][..], ExitStatus::Code(3)),
        (3, &["exec"][..], ExitStatus::Code(5)),
        (4, &["segv"][..], ExitStatus::Signal(libc::SIGSEGV)),
    ] {
        let child = space.start(&instance(&program, rank, 6, act)).unwrap();
        assert_eq!(child.wait(), Ok(end), "{act:?}");
    }
    assert_eq!(first.try_wait(), Ok(None));
    let last = space.start(&instance(&program, 5, 6, &["live"])).unwrap();
    assert_eq!(last.wait(), Ok(ExitStatus::Code(0)));
    kill(&first);
}

#[test]
fn tasks_go_on_when_the_host_is_killed_and_no_more_can_be_started() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 2, 2).unwrap();
    let (first, address) = start_printing(&mut space, instance(&program, 0, 2, &["offer"]));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(space.host_pid().0.cast_signed()),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    let error = space.start(&instance(&program, 1, 2, &["take", &address])).unwrap_err();
    assert_eq!(error.to_string(), "the process that hosts the tasks was ended by signal 9");
    // Requests that could not be sent take no memory of the next ones. All of these have 10 MB.
    let large = instance(&program, 1, 2, &["take", &"x".repeat(100_000)]);
    for _ in 0..100 {
        assert_eq!(space.start(&large).unwrap_err(), error);
    }
    assert_eq!(first.try_wait(), Ok(None));
    kill(&first);
}

#[test]
fn no_more_tasks_live_at_a_time_than_the_space_has_room_for() {
    let Some(program) = task_program() else { return };
    let mut space = AddressSpace::create(&context(&program), 1, 3).unwrap();
    let (first, _) = start_printing(&mut space, instance(&program, 0, 3, &["wait"]));
    let error = space.start(&instance(&program, 1, 3, &["live"])).unwrap_err();
    assert_eq!((error.step, error.errno), (SpawnStep::Clone, nix::errno::Errno::EAGAIN));
    kill(&first);
    let mut started = Err(error);
    wait_until(
        || {
            started = space.start(&instance(&program, 2, 3, &["live"]));
            started.is_ok()
        },
        "the slot is free",
    );
    assert_eq!(started.unwrap().wait(), Ok(ExitStatus::Code(0)));
}

#[test]
fn a_task_whose_end_the_host_could_not_see_is_killed_and_its_slot_is_not_used_again() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let Some(program) = task_program() else { return };
    // The descriptors of the host are above this one, which the tasks inherit.
    let kept = std::fs::File::open("/dev/null").unwrap();
    let kept = nix::fcntl::fcntl(&kept, nix::fcntl::FcntlArg::F_DUPFD(700)).unwrap();
    let mut space = AddressSpace::create(&context(&program), 2, 3).unwrap();
    nix::unistd::close(kept).unwrap();
    let host = Pid::from_raw(space.host_pid().0.cast_signed());
    let usual = getrlimit(Resource::Nofile);
    // There is a number for the pidfd of a task, and none above 700 to keep it at.
    prlimit(host, Resource::Nofile, Rlimit { current: Some(600), ..usual }).unwrap();
    let error = space.start(&instance(&program, 0, 3, &["wait"])).unwrap_err();
    assert_eq!((error.step, error.errno), (SpawnStep::Clone, nix::errno::Errno::EINVAL));
    prlimit(host, Resource::Nofile, usual).unwrap();
    let (second, _) = start_printing(&mut space, instance(&program, 1, 3, &["wait"]));
    let error = space.start(&instance(&program, 2, 3, &["live"])).unwrap_err();
    assert_eq!((error.step, error.errno), (SpawnStep::Clone, nix::errno::Errno::EAGAIN));
    kill(&second);
}

#[test]
fn the_host_of_a_group_ends_with_its_last_task() {
    let Some(program) = task_program() else { return };
    // The host holds this descriptor until it knows that no more tasks will come.
    let (reader, writer) = std::io::pipe().unwrap();
    let kept = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_DUPFD(600)).unwrap();
    let instances = (0..2).map(|rank| instance(&program, rank, 2, &["live"])).collect();
    let children = context(&program).spawn_n(instances).unwrap();
    nix::unistd::close(kept).unwrap();
    drop(writer);
    for child in children {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
    }
    let mut ready = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
    let ended = nix::poll::poll(&mut ready, 60_000_u16).unwrap();
    assert_eq!(ended, 1, "a process holds the pipe after 60 s");
}

#[test]
fn tasks_end_with_the_thread_that_made_the_space_if_that_was_asked_for() {
    let Some(program) = task_program() else { return };
    let child = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let context = context(&program).kill_when_launcher_ends();
            let mut space = AddressSpace::create(&context, 1, 1).unwrap();
            start_printing(&mut space, instance(&program, 0, 1, &["wait"])).0
        });
        thread.join().unwrap()
    });
    assert_eq!(child.wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
}

fn kill(child: &Child) {
    child.send_signal(libc::SIGKILL).unwrap();
    child.wait().unwrap();
}

/// Waits until a condition holds.
fn wait_until(mut is_true: impl FnMut() -> bool, what: &str) {
    let begin = std::time::Instant::now();
    while !is_true() {
        assert!(begin.elapsed() < std::time::Duration::from_secs(60), "not within 60 s: {what}");
        std::thread::yield_now();
    }
}
