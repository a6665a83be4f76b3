//! The number of moves of threads: a program that binds its threads without overload is not changed, a steady load
//! causes few moves, and helpers do not displace workers.

use std::collections::BTreeMap;

use pjw_core::ids::Tid;
use pjw_core::policy::{OversubscriptionPolicy, Policy};

use super::machine::{Machine, SECOND, machine_with, regular_topology};

/// The largest number of moves of a thread in a minute of a load that does not change.
const MAX_MOVES_PER_MINUTE: usize = 2;

/// A load: for each process, its own mask if it has one, and the share of each second in which it runs, in permille.
type Load<'a> = &'a [(u32, Option<&'a str>, u32)];

/// A job on all cores of two NUMA nodes of two cores each, with these processes below process 10.
fn job_of(load: Load<'_>, oversubscription: OversubscriptionPolicy) -> Machine {
    let mut machine =
        machine_with(regular_topology(2, 1, 1, 2, 1), Policy { oversubscription, ..Policy::default() });
    machine.spawn(10, 1, 0);
    machine.assign("a", 4, &[10]).unwrap();
    for &(pid, mask, _) in load {
        machine.spawn(pid, 10, 0);
        mask.into_iter().for_each(|mask| machine.bind(pid, pid, mask));
    }
    machine.settle();
    machine
}

/// Lets this number of seconds of the load pass, with a cycle after each. Returns the number of writes of the mask of
/// each thread.
fn run_and_count_moves(machine: &mut Machine, seconds: u32, load: Load<'_>) -> BTreeMap<Tid, usize> {
    let mut run_and_count_moves = BTreeMap::new();
    let mut ends: Vec<u32> = load.iter().map(|&(_, _, permille)| permille).filter(|&end| end > 0).collect();
    ends.sort_unstable();
    ends.dedup();
    for _ in 0..seconds {
        let mut passed = 0;
        for &end in ends.iter().chain(&[1000]) {
            let busy: Vec<u32> =
                load.iter().filter(|(_, _, permille)| *permille >= end).map(|&(pid, _, _)| pid).collect();
            machine.run_for(&busy, u64::from(end - passed) * SECOND / 1000);
            passed = end;
        }
        for action in machine.settle() {
            *run_and_count_moves.entry(action.thread.tid).or_default() += 1;
        }
    }
    run_and_count_moves
}

#[test]
fn no_mask_is_written_for_a_program_that_binds_its_threads_without_overload() {
    for load in [
        &[(20, Some("0"), 1000), (21, Some("1"), 1000), (22, Some("2"), 1000), (23, Some("3"), 1000)][..],
        &[(20, Some("0-1"), 1000), (21, Some("0-1"), 1000), (22, Some("2-3"), 700)],
        &[(20, Some("0"), 450), (21, Some("0"), 450), (22, Some("3"), 1000)],
    ] {
        for policy in [OversubscriptionPolicy::Float, OversubscriptionPolicy::Spread] {
            let mut machine = job_of(load, policy);
            assert_eq!(run_and_count_moves(&mut machine, 120, load), BTreeMap::new(), "{load:?}");
            machine.release("a").unwrap();
            for &(pid, mask, _) in load {
                assert_eq!(Some(&*machine.effective_mask(pid, pid)), mask);
            }
        }
    }
}

#[test]
fn a_program_that_binds_itself_in_a_part_of_the_machine_causes_no_action_from_its_start_to_its_end() {
    let mut machine = machine_with(regular_topology(2, 1, 1, 2, 1), Policy::default());
    machine.spawn(10, 1, 0);
    machine.assign("a", 2, &[10]).unwrap();
    assert_eq!(machine.grant("a"), "0-1");
    let load: [(u32, Option<&str>, u32); 2] = [(20, Some("0"), 1000), (21, Some("1"), 1000)];
    for (pid, ..) in load {
        machine.spawn(pid, 10, 0);
    }
    let while_unbound = machine.settle();
    assert!(while_unbound.is_empty(), "before it has bound itself: {while_unbound:?}");
    for (pid, mask, _) in load {
        mask.into_iter().for_each(|mask| machine.bind(pid, pid, mask));
    }
    let when_bound = machine.settle();
    assert!(when_bound.is_empty(), "{when_bound:?}");
    assert_eq!(run_and_count_moves(&mut machine, 60, &load), BTreeMap::new());
    for (pid, ..) in load {
        machine.exit(pid);
    }
    let at_the_end = machine.settle();
    assert!(at_the_end.is_empty(), "{at_the_end:?}");
}

#[test]
fn in_a_steady_state_no_thread_moves_more_than_twice_a_minute() {
    let hot = |count: u32| (20..20 + count).map(|pid| (pid, None, 1000)).collect::<Vec<_>>();
    let with = |count: u32, more: Load<'static>| [hot(count), more.to_vec()].concat();
    for load in [
        hot(1),
        hot(4),
        hot(6),
        with(3, &[(40, None, 500), (41, None, 100)]),
        with(2, &[(40, Some("0"), 1000), (41, Some("0"), 1000)]),
        with(0, &[(40, Some("3"), 1000), (41, Some("3"), 1000), (42, Some("2-3"), 1000), (43, None, 620)]),
    ] {
        for policy in [OversubscriptionPolicy::Float, OversubscriptionPolicy::Spread] {
            let mut machine = job_of(&load, policy);
            run_and_count_moves(&mut machine, 30, &load);
            let max_moves = run_and_count_moves(&mut machine, 60, &load).into_values().max().unwrap_or(0);
            assert!(
                max_moves <= MAX_MOVES_PER_MINUTE,
                "{max_moves} moves of one thread in a minute: {load:?}"
            );
        }
    }
}

#[test]
fn the_reader_and_the_writer_of_a_farm_do_not_displace_its_workers() {
    let reader_and_writer = [(30, None, 250), (31, None, 250)];
    // Four workers on four cores: bound as a farm binds them, and pinned by pjw.
    let bound = ["0", "1", "2", "3"].map(Some);
    for own in [bound, [None; 4]] {
        let workers: Vec<_> = (20..).zip(own).map(|(pid, mask)| (pid, mask, 1000)).collect();
        let load = [workers, reader_and_writer.to_vec()].concat();
        let mut machine = job_of(&load, OversubscriptionPolicy::Float);
        run_and_count_moves(&mut machine, 5, &load);
        let masks: Vec<String> = (20..24).map(|pid| machine.effective_mask(pid, pid)).collect();
        assert_eq!(masks, ["0", "1", "2", "3"]);
        assert_eq!(run_and_count_moves(&mut machine, 60, &load), BTreeMap::new());
        assert_eq!(machine.effective_mask(30, 30), "0-3", "the reader may use whatever a worker leaves idle");
    }
}

#[test]
fn a_helper_that_runs_all_the_time_does_not_displace_bound_workers() {
    let workers = [(20, Some("0"), 1000), (21, Some("1"), 1000), (22, Some("2"), 1000)];
    let load = [workers.as_slice(), &[(30, None, 1000)]].concat();
    let mut machine = job_of(&load, OversubscriptionPolicy::Float);
    assert_eq!(run_and_count_moves(&mut machine, 30, &load).into_keys().collect::<Vec<_>>(), [Tid(30)]);
    assert_eq!(machine.effective_mask(30, 30), "3", "the helper gets the idle core");
    let load = [workers.as_slice(), &[(23, Some("3"), 1000), (30, None, 1000), (31, None, 1000)]].concat();
    let mut machine = job_of(&load, OversubscriptionPolicy::Spread);
    let moved = run_and_count_moves(&mut machine, 30, &load);
    assert!(moved.keys().all(|tid| tid.0 >= 30), "only helpers move: {moved:?}");
}

#[test]
fn helper_threads_of_a_rank_leave_the_core_of_the_rank_to_it() {
    let load = [(20, None, 1000), (21, None, 1000), (22, None, 1000), (23, None, 1000), (120, None, 200)];
    let mut machine = job_of(&load[..4], OversubscriptionPolicy::Float);
    machine.clone_thread(20, 120);
    run_and_count_moves(&mut machine, 5, &load);
    assert_eq!(machine.effective_mask(20, 20), "0");
    assert_eq!(machine.effective_mask(20, 120), "0-3", "the helper thread is not pinned");
    assert_eq!(run_and_count_moves(&mut machine, 60, &load), BTreeMap::new());
}

#[test]
fn a_helper_thread_leaves_the_core_to_which_its_rank_is_bound_only_if_it_is_hot() {
    for (permille, expected) in [(200, "0"), (1000, "1")] {
        let load = [(20, Some("0"), 1000), (120, None, permille)];
        let mut machine = job_of(&load[..1], OversubscriptionPolicy::Float);
        machine.clone_thread(20, 120);
        run_and_count_moves(&mut machine, 5, &load);
        assert_eq!(machine.effective_mask(20, 20), "0", "the rank stays");
        assert_eq!(machine.effective_mask(20, 120), expected, "the helper runs for {permille} permille");
        assert_eq!(run_and_count_moves(&mut machine, 60, &load), BTreeMap::new());
    }
}

#[test]
fn each_hot_thread_has_a_core_for_itself_three_seconds_after_a_change() {
    let load = |busy: [u32; 4]| busy.map(|pid| (pid, None, 1000));
    let all: Vec<_> = (20..28).map(|pid| (pid, None, 0)).collect();
    let mut machine = job_of(&all, OversubscriptionPolicy::Float);
    for busy in [[20, 21, 22, 23], [22, 23, 24, 25], [24, 25, 26, 27], [20, 21, 26, 27]] {
        // A cycle each second, as in the default configuration.
        run_and_count_moves(&mut machine, 3, &load(busy));
        let mut masks: Vec<String> = busy.map(|pid| machine.effective_mask(pid, pid)).to_vec();
        masks.sort();
        assert_eq!(masks, ["0", "1", "2", "3"], "{busy:?}");
    }
}
