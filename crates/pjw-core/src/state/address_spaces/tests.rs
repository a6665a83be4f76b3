//! Which processes count as sharing an address space, and when.

use super::*;
use crate::basics::StartTime;
use AddressSpaceCheck::{InVfork, NotChecked, Sharing};

const INTERVAL: Duration = Duration::from_secs(1);

fn id(pid: u32) -> ProcessId {
    ProcessId { pid: Pid(pid), start: StartTime(u64::from(pid)) }
}

fn list(spaces: &[(u64, &[(u32, AddressSpaceCheck)])]) -> Arc<AddressSpaceList> {
    let users = |users: &[(u32, AddressSpaceCheck)]| {
        users.iter().map(|&(pid, check)| AddressSpaceUser { id: id(pid), check }).collect()
    };
    let shared = spaces.iter().map(|&(number, of)| SharedAddressSpace { number, users: users(of) }).collect();
    Arc::new(AddressSpaceList { shared, unread_reason: None })
}

/// The groups after these checks, each with its time in ms.
fn after(checks: &[(u64, Arc<AddressSpaceList>)]) -> AddressSpaceGroups {
    let mut groups = AddressSpaceGroups::default();
    for (at_ms, list) in checks {
        check(&mut groups, *at_ms, list);
    }
    groups
}

fn check(groups: &mut AddressSpaceGroups, at_ms: u64, list: &Arc<AddressSpaceList>) -> Vec<u32> {
    let changed = groups.update(list, Nanos(at_ms * 1_000_000), INTERVAL);
    changed.into_iter().map(|pid| pid.0).collect()
}

fn show(groups: &AddressSpaceGroups) -> Vec<Vec<u32>> {
    groups.groups().map(|(_, pids)| pids.iter().map(|pid| pid.0).collect()).collect()
}

#[test]
fn two_checks_an_interval_apart_make_a_group() {
    let both = list(&[(7, &[(1, Sharing), (2, Sharing), (3, Sharing)])]);
    let mut groups = after(&[(0, Arc::clone(&both))]);
    assert_eq!(show(&groups), Vec::<Vec<u32>>::new(), "one check");
    assert_eq!(check(&mut groups, 500, &both), [], "too early");
    assert_eq!(check(&mut groups, 1000, &both), [1, 2, 3]);
    assert_eq!(show(&groups), [[1, 2, 3]]);
    assert_eq!(groups.group_of(id(1)), groups.group_of(id(3)));
    assert_eq!(check(&mut groups, 2000, &both), []);
}

#[test]
fn the_second_check_may_be_a_little_early() {
    let both = list(&[(7, &[(1, Sharing), (2, Sharing)])]);
    assert_eq!(show(&after(&[(0, Arc::clone(&both)), (995, both)])), [[1, 2]]);
}

#[test]
fn a_child_of_vfork_is_never_in_a_group() {
    let vfork = list(&[(7, &[(1, Sharing), (2, InVfork)])]);
    let checks: Vec<_> = (0..20).map(|second| (second * 1000, Arc::clone(&vfork))).collect();
    assert!(show(&after(&checks)).is_empty());
    // The first check came before the kernel marked the child.
    let early = list(&[(7, &[(1, Sharing), (2, Sharing)])]);
    assert!(show(&after(&[(0, Arc::clone(&early)), (1000, vfork), (1500, early)])).is_empty());
}

#[test]
fn a_scan_without_a_check_of_a_process_is_no_second_check_and_ends_nothing() {
    let sharing = list(&[(7, &[(1, Sharing), (2, Sharing)])]);
    let without = list(&[(7, &[(1, Sharing), (2, NotChecked)])]);
    let mut groups = after(&[(0, Arc::clone(&sharing)), (1000, Arc::clone(&without))]);
    assert!(show(&groups).is_empty());
    check(&mut groups, 2000, &sharing);
    check(&mut groups, 3000, &without);
    assert_eq!(show(&groups), [[1, 2]]);
}

#[test]
fn two_groups_are_kept_apart_and_keep_their_numbers() {
    let both = list(&[(7, &[(1, Sharing), (2, Sharing)]), (8, &[(3, Sharing), (4, Sharing)])]);
    let mut groups = after(&[(0, Arc::clone(&both)), (1000, both)]);
    assert_eq!(show(&groups), [[1, 2], [3, 4]]);
    let number = groups.group_of(id(3));
    let grown = list(&[(8, &[(3, Sharing), (4, Sharing), (5, Sharing)])]);
    assert_eq!(check(&mut groups, 2000, &grown), [1, 2]);
    assert_eq!(check(&mut groups, 3000, &grown), [5]);
    assert_eq!((show(&groups), groups.group_of(id(5))), (vec![vec![3, 4, 5]], number));
}

#[test]
fn exec_and_exit_end_membership() {
    let all = list(&[(7, &[(1, Sharing), (2, Sharing), (3, Sharing)])]);
    let mut groups = after(&[(0, Arc::clone(&all)), (1000, Arc::clone(&all))]);
    assert_eq!(groups.remove_process(Pid(2)), BTreeSet::from([Pid(2)]));
    assert_eq!(show(&groups), [[1, 3]]);
    assert_eq!(groups.remove_process(Pid(9)), BTreeSet::new());
    assert_eq!(
        groups.remove_process(Pid(1)),
        BTreeSet::from([Pid(1), Pid(3)]),
        "nobody is left to share with"
    );
    assert!(show(&groups).is_empty() && groups.group_of(id(3)).is_none());
}

#[test]
fn another_process_with_the_same_pid_is_not_in_the_group() {
    let both = list(&[(7, &[(1, Sharing), (2, Sharing)])]);
    let groups = after(&[(0, Arc::clone(&both)), (1000, both)]);
    let other = ProcessId { pid: Pid(2), start: StartTime(1000) };
    assert!(groups.group_of(id(2)).is_some() && groups.group_of(other).is_none());
}

#[test]
fn a_process_that_changes_to_another_address_space_begins_anew() {
    let one = list(&[(7, &[(1, Sharing), (2, Sharing)])]);
    let other = list(&[(8, &[(1, Sharing), (2, Sharing)])]);
    assert!(show(&after(&[(0, one), (1000, other)])).is_empty());
}
