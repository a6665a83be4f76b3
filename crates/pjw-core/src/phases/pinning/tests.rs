//! The properties of pins, on a machine of two NUMA nodes of two cores with two PUs each.

use super::*;
use crate::basics::ids::Pid;
use crate::basics::ids::ProcessId;
use crate::basics::ids::StartTime;
use crate::basics::ids::Tid;
use crate::testing::regular_topology;
use proptest::prelude::*;
use std::string::String;

fn machine() -> Topology {
    // 2 packages of 2 cores of 2 PUs; core n holds PUs n and n + 4.
    regular_topology(2, 1, 1, 2, 2)
}

fn thread(n: u32) -> ThreadId {
    let start = StartTime(1);
    ThreadId { process: ProcessId { pid: Pid(100), start }, tid: Tid(100 + n), start }
}

fn floater(n: u32, last_cpu: u32, pinned: Option<u32>) -> HotThread {
    bound_to(n, last_cpu, "", pinned)
}

/// A thread that may run on these PUs; on the whole grant if there is none.
fn bound_to(n: u32, last_cpu: u32, mask: &str, pinned: Option<u32>) -> HotThread {
    let mask = mask.parse().unwrap();
    HotThread {
        thread: thread(n),
        last_cpu: Pu(last_cpu),
        mask,
        pinned_pu: pinned.map(Pu),
        numa_node: None,
        address_space: None,
    }
}

/// The pins of hot threads. A thread without a mask may run on the whole grant.
fn pins_of(grant: &CpuSet, hot_threads: &[HotThread], policy: &Policy) -> BTreeMap<ThreadId, Pu> {
    let mut hot_threads = hot_threads.to_vec();
    for hot_thread in hot_threads.iter_mut().filter(|hot_thread| hot_thread.mask.is_empty()) {
        hot_thread.mask = grant.clone();
    }
    choose_pins(&machine(), grant, &hot_threads, policy)
}

fn spread() -> Policy {
    Policy { oversubscription: OversubscriptionPolicy::Spread, ..Policy::default() }
}

fn show(pins: &BTreeMap<ThreadId, Pu>) -> String {
    let cells: Vec<String> = pins.iter().map(|(thread, pu)| format!("{}:{pu}", thread.tid.0 - 100)).collect();
    cells.join(" ")
}

fn check(grant: &str, hot_threads: &[HotThread], expected: &str) {
    let pins = pins_of(&grant.parse().unwrap(), hot_threads, &spread());
    assert_eq!(show(&pins), expected);
}

#[test]
fn every_core_gets_one_thread_before_any_gets_two() {
    check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None)], "0:0 1:1");
    check("0-1,4-5", &[floater(0, 0, None), floater(1, 4, None), floater(2, 4, None)], "0:0 1:1 2:4");
}

#[test]
fn a_thread_stays_on_its_numa_node() {
    check("1-2,5-6", &[floater(0, 6, None)], "0:6");
    check("0-7", &[floater(0, 3, None), floater(1, 7, None)], "0:3 1:2");
}

#[test]
fn a_thread_goes_to_the_chosen_numa_node_while_a_core_is_idle_there() {
    let to_node_1 = |n, last_cpu| HotThread { numa_node: Some(1), ..floater(n, last_cpu, None) };
    check("0-7", &[to_node_1(0, 0), to_node_1(1, 0)], "0:2 1:3");
    check("0-7", &[to_node_1(0, 0), to_node_1(1, 0), to_node_1(2, 4)], "0:2 1:3 2:4");
    let pinned = HotThread { numa_node: Some(1), ..floater(0, 0, Some(0)) };
    check("0-7", &[pinned], "0:0");
}

#[test]
fn a_balanced_pin_stays() {
    check("0-1,4-5", &[floater(0, 0, Some(5)), floater(1, 0, None)], "0:5 1:0");
}

#[test]
fn two_threads_on_one_core_are_separated_when_another_core_is_idle() {
    check("0-1,4-5", &[floater(0, 0, Some(0)), floater(1, 4, Some(4))], "0:0 1:1");
}

#[test]
fn a_bound_thread_is_counted_and_not_moved() {
    check("0-1,4-5", &[bound_to(9, 0, "0", None), floater(0, 0, None)], "0:1");
    check("0-1,4-5", &[bound_to(9, 0, "0,4", None), floater(0, 0, None)], "0:1");
}

#[test]
fn a_bound_thread_is_counted_where_it_leaves_room_for_the_others() {
    let bound = [bound_to(7, 0, "0-1,4-5", None), bound_to(8, 0, "0,4", None)];
    let floaters = [floater(0, 5, None), floater(1, 4, None)];
    check("0-7", &[bound.as_slice(), &floaters].concat(), "0:2 1:3");
}

#[test]
fn many_threads_bound_to_one_core_do_not_make_others_share_another() {
    let bound: Vec<HotThread> = (10..18).map(|n| bound_to(n, 0, "0,4", None)).collect();
    let floaters = [floater(0, 1, Some(1)), floater(1, 5, Some(5))];
    check("0-7", &[bound.as_slice(), &floaters].concat(), "0:1 1:2");
}

#[test]
fn more_threads_than_pus_float_unless_the_policy_spreads_them() {
    let grant: CpuSet = "0-1,4-5".parse().unwrap();
    let many: Vec<_> = (0..6).map(|n| floater(n, 0, None)).collect();
    let float = Policy { oversubscription: OversubscriptionPolicy::Float, ..Policy::default() };
    assert!(pins_of(&grant, &many, &float).is_empty());
    assert_eq!(pins_of(&grant, &many, &spread()).len(), 6);
}

#[test]
fn a_grant_of_one_pu_needs_no_pin() {
    check("3", &[floater(0, 0, None)], "");
}

/// A thread of a process that shares its address space.
fn grouped(group: u32, thread: HotThread) -> HotThread {
    HotThread { address_space: Some(group), ..thread }
}

#[test]
fn tasks_of_one_address_space_are_placed_in_one_node_where_they_fit() {
    // Node 0 has the PUs 0, 1, 4, 5; node 1 has 2, 3, 6, 7.
    let pair = [grouped(1, floater(0, 0, None)), grouped(1, floater(1, 3, None))];
    check("0-7", &pair, "0:0 1:1");
    let pinned = [grouped(1, floater(0, 0, Some(0))), grouped(1, floater(1, 3, Some(3)))];
    check("0-7", &pinned, "0:0 1:1");
    let alone: Vec<HotThread> =
        pinned.iter().map(|thread| HotThread { address_space: None, ..thread.clone() }).collect();
    check("0-7", &alone, "0:0 1:3");
}

#[test]
fn other_threads_keep_their_pins_and_a_group_goes_where_they_leave_room() {
    let pair = [grouped(1, floater(1, 0, Some(0))), grouped(1, floater(2, 3, Some(3)))];
    let other = [floater(0, 1, Some(1))];
    check("0-7", &[pair.as_slice(), &other].concat(), "0:1 1:2 2:3");
}

#[test]
fn a_group_that_fits_into_no_node_is_balanced_as_other_threads_are() {
    let three: Vec<HotThread> = [0, 1, 2].map(|n| grouped(1, floater(n, n, Some(n)))).into();
    check("0-7", &three, "0:0 1:1 2:2");
    let pair = [grouped(1, floater(0, 0, Some(0))), grouped(1, floater(1, 2, Some(2)))];
    check("0,2,4,6", &pair, "0:0 1:2");
}

#[test]
fn two_groups_get_a_node_each() {
    let threads = [(0, 1, 0), (1, 2, 2), (2, 1, 3), (3, 2, 1)];
    let threads: Vec<HotThread> =
        threads.map(|(n, group, pu)| grouped(group, floater(n, pu, Some(pu)))).into();
    check("0-7", &threads, "0:0 1:2 2:1 3:3");
}

#[test]
fn a_group_leaves_its_pins_where_it_is_in_one_node_already() {
    let pair = [grouped(1, floater(0, 0, Some(3))), grouped(1, floater(1, 0, Some(2)))];
    check("0-7", &pair, "0:3 1:2");
}

#[test]
fn a_group_leaves_the_node_where_another_thread_has_one_of_its_cores() {
    let bound = HotThread { mask: CpuSet::from_words(&[0b1100]), ..floater(9, 0, None) };
    let group = [grouped(1, floater(0, 0, Some(6))), grouped(1, floater(1, 0, Some(3)))];
    let threads: Vec<HotThread> = group.into_iter().chain([bound]).collect();
    check("0-7", &threads, "0:0 1:1");
}

fn any_runners() -> impl Strategy<Value = Vec<HotThread>> {
    proptest::collection::btree_map(0u32..40, (0u32..8, proptest::option::of(0u32..8)), 0..20).prop_map(
        |hot_threads| {
            let runner = |(n, (last, pinned))| HotThread {
                address_space: (n % 4 < 2).then_some(n / 8),
                ..floater(n, last, pinned)
            };
            hot_threads.into_iter().map(runner).collect()
        },
    )
}

proptest! {
    #[test]
    fn pins_are_inside_the_grant_even_and_stable(hot_threads in any_runners(), mask in 1u64..256) {
        let grant = CpuSet::from_words(&[mask]);
        let pins = pins_of(&grant, &hot_threads, &spread());
        if grant.len() < 2 {
            prop_assert!(pins.is_empty());
            return Ok(());
        }
        prop_assert_eq!(pins.len(), hot_threads.len());
        let mut counts: BTreeMap<Pu, usize> = grant.iter().map(|pu| (pu, 0)).collect();
        for pu in pins.values() {
            *counts.get_mut(pu).expect("inside the grant") += 1;
        }
        let whole_cores = machine().cores().iter().filter(|core| core.pus.intersects(&grant)).all(|core| core.pus.is_subset(&grant));
        if whole_cores {
            prop_assert!(counts.values().max().unwrap() - counts.values().min().unwrap() <= 1, "{:?}", counts);
        }
        let again: Vec<HotThread> = hot_threads.iter().map(|hot_thread| HotThread {
            pinned_pu: pins.get(&hot_thread.thread).copied(),
            ..hot_thread.clone()
        }).collect();
        prop_assert_eq!(&pins_of(&grant, &again, &spread()), &pins, "a second call moves no thread");
        let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
        prop_assert_eq!(&pins_of(&grant, &backwards, &spread()), &pins);
    }

    #[test]
    fn pins_beside_bound_threads_are_even_and_stable(
        hot_threads in any_runners(),
        bound in proptest::collection::vec(1u64..256, 0..12),
    ) {
        let grant = CpuSet::from_words(&[255]);
        let bound_threads = bound.iter().zip(100..).map(|(&word, n)| HotThread {
            mask: CpuSet::from_words(&[word]),
            ..floater(n, 0, None)
        });
        let hot_threads: Vec<HotThread> = hot_threads.into_iter().chain(bound_threads).collect();
        let pins = pins_of(&grant, &hot_threads, &spread());
        let is_floating = |known: &&HotThread| known.mask.is_empty() || known.mask == grant;
        prop_assert!(hot_threads.iter().filter(is_floating).map(|known| &known.thread).eq(pins.keys()));
        // A pinned thread shares a PU only if no PU is without a thread.
        let topology = machine();
        let mut matching = ThreadPuMatching::new(&topology, &grant);
        let pinned: Vec<CpuSet> = pins.values().copied().map(CpuSet::from).collect();
        let mut masks: Vec<&CpuSet> =
            hot_threads.iter().filter(|known| !is_floating(known)).map(|known| &known.mask).collect();
        masks.sort_by_key(|mask| mask.len());
        for mask in masks {
            matching.add_thread(mask);
        }
        let shared = pinned.iter().filter(|pin| !matching.add_thread(pin)).count();
        prop_assert!(shared == 0 || matching.free_pus().is_empty(), "{pins:?}");
        let again: Vec<HotThread> = hot_threads
            .iter()
            .map(|known| HotThread { pinned_pu: pins.get(&known.thread).copied(), ..known.clone() })
            .collect();
        prop_assert_eq!(&pins_of(&grant, &again, &spread()), &pins, "a second call moves no thread");
        let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
        prop_assert_eq!(&pins_of(&grant, &backwards, &spread()), &pins);
    }
}
