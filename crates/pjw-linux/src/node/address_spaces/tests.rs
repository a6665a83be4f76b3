//! Which processes are compared, and what is found. The kernel's answers are simulated.

use std::cell::RefCell;
use std::num::NonZeroU64;

use pjw_core::cpuset::Pu;
use pjw_core::ids::{Comm, StartTime};

use super::*;

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
    scan_with(spaces, second, processes, |_| false)
}

fn scan_with(
    spaces: &mut AddressSpaces,
    second: u64,
    processes: &[(u32, u32, u64)],
    waits_in_vfork: impl FnMut(Pid) -> bool,
) -> Vec<Vec<(u32, char)>> {
    for &(pid, parent, stack) in processes {
        spaces.record_process(Pid(pid), &stat(pid, parent, stack), None);
    }
    spaces.compare_candidates(at(second), waits_in_vfork);
    show(&spaces.shared_address_spaces(at(second)))
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

#[test]
fn forked_workers_are_compared_by_bisection_and_twice_only() {
    let mut spaces = AddressSpaces::new(compare);
    let count = 1000;
    let workers: Vec<(u32, u32, u64)> = (1..=count).map(|pid| (pid, 1, 0x7ff0)).collect();
    workers.iter().for_each(|&(pid, ..)| set_space(pid, Some(pid.into())));
    let mut second = 0;
    while second == 0 || !spaces.open.is_empty() {
        second += 1;
        let calls = spaces.calls;
        assert!(scan(&mut spaces, second, &workers).is_empty());
        assert!(spaces.calls - calls <= MAX_CALLS + 20, "one scan makes a limited number of calls");
        assert!(second < 100, "{} are left", spaces.open.len());
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
        let found = scan_with(&mut spaces, second, &both, |parent| parent == Pid(1));
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
    let found = scan_with(&mut spaces, 3, &more, |parent| parent == Pid(1));
    assert_eq!(found, [[(1, 's'), (2, 's'), (3, 's'), (4, 'v')]]);
}

#[test]
fn a_child_of_vfork_that_executes_a_program_during_a_scan_takes_nobody_out_of_the_group() {
    let mut spaces = AddressSpaces::new(compare);
    let all = [(1, 9, 0x7ff0), (2, 1, 0x7ff0), (3, 1, 0x7ff0), (4, 3, 0x7ff0)];
    (1..=4).for_each(|pid| set_space(pid, Some(7)));
    for second in 1..4 {
        let found = scan_with(&mut spaces, second, &all, |parent| parent == Pid(3));
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
        spaces.compare_candidates(at(second), |_| true);
        assert_eq!(show(&spaces.shared_address_spaces(at(second))), [[(1, 's'), (2, 's'), (3, 'v')]]);
    }
    assert_eq!(spaces.calls, 0);
    let open: Vec<u32> = spaces.open.iter().map(|pid| pid.0).collect();
    assert_eq!(open, [3], "only the child of vfork is checked again");
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
    assert!(spaces.pids_to_scan(Nanos(at(1).0 + PASS_INTERVAL.0 - 1)).is_empty());
    assert_eq!(spaces.pids_to_scan(at(2)), BTreeSet::from([Pid(1), Pid(2)]));
}
