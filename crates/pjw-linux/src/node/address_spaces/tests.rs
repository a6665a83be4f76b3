//! Which processes are compared, and what is found. The kernel's answers are simulated, except in a test with two
//! thousand processes.

use std::cell::RefCell;
use std::fs::File;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pjw_core::cpuset::Pu;
use pjw_core::ids::{Comm, StartTime, Tid};
use pjw_core::ports::MachineInterface;
use pjw_core::scan::{ScanRequest, ScanScope};

use super::by_kcmp::MAX_CALLS;
use super::*;
use crate::node::LinuxMachine;
use crate::proc::vfork::VforkWait;
use crate::tests::until_true;

thread_local! {
    /// The address space of each simulated process.
    static SPACES: RefCell<BTreeMap<Pid, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// An order that differs from the order of the pids, as that of kcmp(2).
fn compare(one: Pid, other: Pid) -> Result<Ordering, Errno> {
    SPACES.with_borrow(|spaces| {
        let of = |pid| spaces.get(&pid).map(|space| space.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Ok(of(one).ok_or(Errno::ESRCH)?.cmp(&of(other).ok_or(Errno::ESRCH)?))
    })
}

fn set_space(pid: u32, space: Option<u64>) {
    SPACES.with_borrow_mut(|spaces| match space {
        Some(space) => drop(spaces.insert(Pid(pid), space)),
        None => drop(spaces.remove(&Pid(pid))),
    });
}

fn stat(pid: u32, parent: u32, stack: u64) -> Stat {
    Stat {
        comm: Comm::from("test"),
        state: 'S',
        parent: Pid(parent),
        process_group: Pid(1),
        session: Pid(1),
        is_kernel_thread: false,
        run_ticks: 0,
        start: StartTime(u64::from(pid)),
        stack_start: stack,
        last_cpu: Pu(0),
    }
}

fn at(second: u64) -> Nanos {
    Nanos(second * 1_000_000_000)
}

/// A scan of these processes (pid, parent, stack) in the second `second`.
fn scan(spaces: &mut AddressSpaces, second: u64, processes: &[(u32, u32, u64)]) -> Vec<Vec<(u32, char)>> {
    scan_with(spaces, second, processes, |_| VforkWait::NotWaiting)
}

fn scan_with(
    spaces: &mut AddressSpaces,
    second: u64,
    processes: &[(u32, u32, u64)],
    vfork_wait: impl FnMut(Pid) -> VforkWait,
) -> Vec<Vec<(u32, char)>> {
    for &(pid, parent, stack) in processes {
        spaces.record_process(Pid(pid), &stat(pid, parent, stack), None);
    }
    spaces.compare_candidates(at(second), vfork_wait);
    show(&spaces.shared_address_spaces(at(second)))
}

/// The process `parent` waits in vfork(2) for its child `child`. No other process waits.
fn waits_for(parent: u32, child: u32) -> impl FnMut(Pid) -> VforkWait {
    move |pid| {
        if pid == Pid(parent) {
            VforkWait::ForChildren(BTreeSet::from([Pid(child)]))
        } else {
            VforkWait::NotWaiting
        }
    }
}

fn show(list: &AddressSpaceList) -> Vec<Vec<(u32, char)>> {
    let user = |user: &AddressSpaceUser| {
        let check = match user.check {
            AddressSpaceCheck::Sharing => 's',
            AddressSpaceCheck::InVfork => 'v',
            AddressSpaceCheck::NotChecked => '-',
        };
        (user.id.pid.0, check)
    };
    list.shared.iter().map(|space| space.users.iter().map(user).collect()).collect()
}

fn sharing(pids: std::ops::RangeInclusive<u32>) -> Vec<(u32, char)> {
    pids.map(|pid| (pid, 's')).collect()
}

#[test]
fn ten_thousand_ordinary_processes_cost_no_call_of_kcmp() {
    let mut spaces = AddressSpaces::new(compare);
    let processes: Vec<(u32, u32, u64)> =
        (1..=10_000).map(|pid| (pid, 1, 0x7ff0_0000 + u64::from(pid) * 16)).collect();
    processes.iter().for_each(|&(pid, ..)| set_space(pid, Some(pid.into())));
    for second in 1..5 {
        assert!(scan(&mut spaces, second, &processes).is_empty());
    }
    assert_eq!(spaces.calls, 0);
}

/// Processes that end when this value is dropped.
struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}

/// Starts `count` processes of a program without libc, each of which waits for a signal. Returns when all of them
/// execute this program. Makes the program in the directory `dir`. `None` if this machine has no C compiler or allows
/// fewer processes.
fn start_processes(dir: &Path, count: u32) -> Option<Running> {
    let program = dir.join("first_act");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pjw-spawn/tests/programs/first_act.c");
    let flags = ["-O1", "-nostdlib", "-static", "-ffreestanding", "-fno-stack-protector", "-o"];
    let Ok(built) = Command::new("cc").args(flags).arg(&program).arg(source).status() else {
        println!("skipped: there is no C compiler");
        return None;
    };
    assert!(built.success());
    let records = File::options().append(true).create(true).open(dir.join("records")).unwrap();
    let mut running = Running(Vec::new());
    for _ in 0..count {
        let mut command = Command::new(&program);
        command.arg("wait").stdin(Stdio::null()).stdout(records.try_clone().unwrap());
        match command.spawn() {
            Ok(child) => running.0.push(child),
            Err(error) => {
                println!("skipped: {count} processes can't run here: {error}");
                return None;
            }
        }
    }
    // Each process writes a record of 32 bytes first.
    let length = u64::from(count) * 32;
    until_true("all processes execute the program", || records.metadata().unwrap().len() == length);
    Some(running)
}

#[test]
fn two_thousand_real_processes_cost_no_call_of_kcmp() {
    let dir = tempfile::tempdir().unwrap();
    let Some(running) = start_processes(dir.path(), 2000) else { return };
    let mut machine = LinuxMachine::new(BTreeSet::new()).unwrap();
    // The addresses are random. By chance, two processes may have the same one, and would be compared. Only one of them
    // is read.
    let mut by_stack = BTreeMap::new();
    for child in &running.0 {
        let pid = Pid(child.id());
        let stat = machine.cache.proc.thread_stat(pid, Tid(pid.0)).unwrap();
        by_stack.insert(stat.readable_stack_start(), pid);
    }
    if by_stack.len() < 1900 {
        println!("skipped: the addresses of stacks are not random, or this user may not read them");
        return;
    }
    let pids: BTreeSet<Pid> = by_stack.into_values().collect();
    let scan_request = ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        pids_to_read_threads_of: BTreeSet::new(),
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    for _ in 0..3 {
        let snapshot = machine.scan(&scan_request);
        assert!(pids.iter().all(|pid| snapshot.processes[pid].present().is_some()));
    }
    let spaces = &machine.cache.address_spaces;
    assert_eq!((spaces.processes.len(), spaces.calls), (pids.len(), 0));
}

#[test]
fn forked_workers_are_compared_by_bisection_and_twice_only() {
    let mut spaces = AddressSpaces::new(compare);
    let count = 1000;
    let workers: Vec<(u32, u32, u64)> = (1..=count).map(|pid| (pid, 1, 0x7ff0)).collect();
    workers.iter().for_each(|&(pid, ..)| set_space(pid, Some(pid.into())));
    let mut second = 0;
    while second == 0 || !spaces.to_check.is_empty() {
        second += 1;
        let calls = spaces.calls;
        assert!(scan(&mut spaces, second, &workers).is_empty());
        assert!(spaces.calls - calls <= MAX_CALLS + 20, "one scan makes a limited number of calls");
        assert!(second < 100, "{} are left", spaces.to_check.len());
    }
    let calls = spaces.calls;
    assert!(calls <= 2 * 11 * u64::from(count), "{calls}");
    for _ in 0..10 {
        second += 1;
        assert!(scan(&mut spaces, second, &workers).is_empty());
    }
    assert_eq!(spaces.calls, calls, "an idle farm costs nothing");
    let new = count + 1;
    set_space(new, Some(new.into()));
    for _ in 0..3 {
        second += 1;
        scan(&mut spaces, second, &[(new, 1, 0x7ff0)]);
    }
    assert!(spaces.calls - calls <= 2 * 11, "a new worker costs a few calls");
}

#[test]
fn two_groups_beside_forked_workers_are_found_and_none_is_invented() {
    let mut spaces = AddressSpaces::new(compare);
    // All descend from one shell that executed no program.
    let processes: Vec<(u32, u32, u64)> = (1..=14).map(|pid| (pid, 1, 0x7ff0)).collect();
    for pid in 1..=5 {
        set_space(pid, Some(100));
        set_space(pid + 5, Some(50));
    }
    (11..=14).for_each(|pid| set_space(pid, Some(pid.into())));
    let groups = vec![sharing(1..=5), sharing(6..=10)];
    assert_eq!(scan(&mut spaces, 1, &processes), groups);
    assert_eq!(scan(&mut spaces, 2, &processes), groups);
    assert_eq!(scan(&mut spaces, 3, &processes), groups);
    let calls = spaces.calls;
    assert_eq!(scan(&mut spaces, 4, &[]), groups, "the list has all groups after a partial scan, too");
    assert_eq!(spaces.calls, calls);
}

#[test]
fn a_child_of_vfork_is_marked_until_it_executes_a_program() {
    let mut spaces = AddressSpaces::new(compare);
    let both = [(1, 9, 0x7ff0), (2, 1, 0x7ff0)];
    (1..=2).for_each(|pid| set_space(pid, Some(7)));
    for second in 1..5 {
        let found = scan_with(&mut spaces, second, &both, waits_for(1, 2));
        assert_eq!(found, [[(1, 's'), (2, 'v')]]);
    }
    set_space(2, Some(8));
    assert!(scan(&mut spaces, 5, &[(1, 9, 0x7ff0), (2, 1, 0x8ff0)]).is_empty());
}

#[test]
fn siblings_that_were_not_in_vfork_stay_in_the_group_while_their_parent_forks() {
    let mut spaces = AddressSpaces::new(compare);
    let group = [(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0)];
    (1..=4).for_each(|pid| set_space(pid, Some(7)));
    scan(&mut spaces, 1, &group);
    scan(&mut spaces, 2, &group);
    let more = [group.as_slice(), &[(4, 1, 0x7ff0)]].concat();
    let found = scan_with(&mut spaces, 3, &more, |_| VforkWait::ForUnknownChild);
    assert_eq!(found, [[(1, 's'), (2, 's'), (3, 's'), (4, 'v')]]);
}

#[test]
fn a_group_whose_creator_waits_in_vfork_at_each_look_is_found_at_the_first_look() {
    let mut spaces = AddressSpaces::new(compare);
    let group = [(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0)];
    (1..=3).for_each(|pid| set_space(pid, Some(7)));
    for child in 11..=14 {
        set_space(child, Some(7));
        let all = [group.as_slice(), &[(child, 1, 0x7ff0)]].concat();
        let found = scan_with(&mut spaces, child.into(), &all, waits_for(1, child));
        assert_eq!(found, [[(1, 's'), (2, 's'), (3, 's'), (child, 'v')]]);
        // The child ends, and the creator makes the next one.
        set_space(child, None);
        spaces.remove_process(Pid(child));
    }
    // The scan has listed the processes before the creator made the child 15.
    let found = scan_with(&mut AddressSpaces::new(compare), 1, &group, waits_for(1, 15));
    assert_eq!(found, [sharing(1..=3)]);
}

#[test]
fn a_child_of_vfork_stays_one_while_its_parent_waits_though_the_kernel_lists_another_child_last() {
    let mut spaces = AddressSpaces::new(compare);
    let all = [(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0)];
    (1..=3).for_each(|pid| set_space(pid, Some(7)));
    let found = scan_with(&mut spaces, 1, &all, waits_for(1, 2));
    assert_eq!(found, [[(1, 's'), (2, 'v'), (3, 's')]]);
    // Another thread of the parent, which had made process 3, has exited.
    for second in 2..5 {
        let found = scan_with(&mut spaces, second, &all, waits_for(1, 3));
        assert_eq!(found[0][1], (2, 'v'));
    }
}

#[test]
fn a_child_of_vfork_that_executes_a_program_during_a_scan_takes_nobody_out_of_the_group() {
    let mut spaces = AddressSpaces::new(compare);
    let all = [(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0), (4, 3, 0x7ff0)];
    (1..=4).for_each(|pid| set_space(pid, Some(7)));
    for second in 1..4 {
        let found = scan_with(&mut spaces, second, &all, waits_for(3, 4));
        assert_eq!(found, [[(1, 's'), (2, 's'), (3, 's'), (4, 'v')]]);
    }
    // After the scan has read its stack.
    set_space(4, Some(8));
    assert_eq!(scan(&mut spaces, 4, &all), [sharing(1..=3)]);
    assert_eq!(scan(&mut spaces, 5, &[]), [sharing(1..=3)]);
}

#[test]
fn the_process_that_executed_a_program_leaves_the_group_alone() {
    let mut spaces = AddressSpaces::new(compare);
    (1..=3).for_each(|pid| set_space(pid, Some(7)));
    scan(&mut spaces, 1, &[(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0)]);
    // Process 1, with which the others are compared.
    set_space(1, Some(3));
    assert_eq!(scan(&mut spaces, 2, &[]), [sharing(2..=3)]);
}

#[test]
fn an_exec_that_no_scan_has_seen_yet_hides_no_group() {
    let mut spaces = AddressSpaces::new(compare);
    let group = [(1, 9, 0x7ff0), (2, 1, 0x7ff0)];
    (1..=2).for_each(|pid| set_space(pid, Some(7)));
    scan(&mut spaces, 1, &group);
    // Process 1, with which the others are compared, executes a program.
    set_space(1, Some(3));
    set_space(3, Some(7));
    scan(&mut spaces, 2, &[(3, 1, 0x7ff0)]);
    for second in 3..6 {
        scan(&mut spaces, second, &[(1, 9, 0x8000)]);
    }
    assert_eq!(scan(&mut spaces, 6, &[]), [sharing(2..=3)]);
}

#[test]
fn a_process_that_ended_meanwhile_is_removed_and_the_others_are_compared() {
    let mut spaces = AddressSpaces::new(compare);
    let group = [(1, 9, 0x7ff0), (2, 9, 0x7ff0), (3, 9, 0x7ff0)];
    (2..=3).for_each(|pid| set_space(pid, Some(7)));
    set_space(1, None);
    scan(&mut spaces, 1, &group);
    (2..4).for_each(|second| drop(scan(&mut spaces, second, &group[1..])));
    assert_eq!(scan(&mut spaces, 5, &[]), [sharing(2..=3)]);
    spaces.remove_process(Pid(3));
    assert!(scan(&mut spaces, 6, &[]).is_empty());
}

#[test]
fn a_refused_call_is_told_and_not_repeated() {
    for errno in [Errno::EPERM, Errno::ENOSYS] {
        let refuse: Compare =
            if errno == Errno::EPERM { |_, _| Err(Errno::EPERM) } else { |_, _| Err(Errno::ENOSYS) };
        let mut spaces = AddressSpaces::new(refuse);
        for second in 1..10 {
            assert!(scan(&mut spaces, second, &[(1, 9, 0x7ff0), (2, 1, 0x7ff0)]).is_empty());
        }
        assert!(spaces.calls < 8, "{}", spaces.calls);
        let reason = spaces.shared_address_spaces(at(20)).unread_reason.clone().unwrap();
        assert!(reason.contains(errno.desc()), "{reason}");
    }
}

#[test]
fn hidden_addresses_and_kernel_threads_are_no_candidates() {
    let mut spaces = AddressSpaces::new(compare);
    (1..=4).for_each(|pid| set_space(pid, Some(7)));
    assert!(scan(&mut spaces, 1, &[(1, 9, 0), (2, 1, 0), (3, 9, 1), (4, 1, 1)]).is_empty());
    assert_eq!((spaces.calls, spaces.shared_address_spaces(at(2)).unread_reason.clone()), (0, None));
}

fn scanned(number: u64, is_in_vfork: bool) -> Option<ScannedSpace> {
    Some(ScannedSpace { number: NonZeroU64::new(number).unwrap(), is_in_vfork })
}

#[test]
fn the_numbers_of_the_task_scan_need_no_call() {
    let mut spaces = AddressSpaces::new(compare);
    spaces.set_source(true);
    for second in 1..4 {
        for (pid, number, is_in_vfork) in [(1, 70, false), (2, 70, false), (3, 70, true), (4, 71, false)] {
            spaces.record_process(Pid(pid), &stat(pid, 1, 0x7ff0), scanned(number, is_in_vfork));
        }
        assert!(spaces.pids_to_scan(at(second)).is_empty());
        spaces.compare_candidates(at(second), |_| VforkWait::ForUnknownChild);
        assert_eq!(show(&spaces.shared_address_spaces(at(second))), [[(1, 's'), (2, 's'), (3, 'v')]]);
    }
    assert_eq!(spaces.calls, 0);
    let to_check: Vec<u32> = spaces.to_check.iter().map(|pid| pid.0).collect();
    assert_eq!(to_check, [3], "only the child of vfork is checked again");
}

#[test]
fn candidates_without_a_number_are_scanned_again_at_intervals() {
    let mut spaces = AddressSpaces::new(compare);
    spaces.set_source(true);
    spaces.record_process(Pid(1), &stat(1, 9, 0x7ff0), None);
    assert!(spaces.pids_to_scan(at(1)).is_empty(), "a process with an address of its own");
    spaces.record_process(Pid(2), &stat(2, 1, 0x7ff0), None);
    assert_eq!(spaces.pids_to_scan(at(1)), BTreeSet::from([Pid(1), Pid(2)]));
    spaces.record_task_scan(&TaskScanResult::default(), at(1));
    spaces.record_process(Pid(2), &stat(2, 1, 0x7ff0), None);
    assert!(spaces.pids_to_scan(Nanos(at(1).0 + TASK_SCAN_INTERVAL.0 - 1)).is_empty());
    assert_eq!(spaces.pids_to_scan(at(2)), BTreeSet::from([Pid(1), Pid(2)]));
}
