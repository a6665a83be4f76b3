//! The properties of repaired bindings, on a machine of four cores with two PUs each.

use super::*;
use crate::basics::{Pid, Pu, StartTime, Tid};
use crate::testing::{cpu_set, regular_topology};
use proptest::prelude::*;

/// Two packages of two cores of two PUs. Core n has the PUs n and n + 4.
fn machine() -> Topology {
    regular_topology(2, 1, 1, 2, 2)
}

fn thread(pid: u32, tid: u32, mask: CpuSet) -> HotThread {
    let start = StartTime(1);
    let process = ProcessId { pid: Pid(pid), start };
    HotThread {
        thread: ThreadId { process, tid: Tid(tid), start },
        last_cpu: Pu(0),
        mask,
        pinned_pu: None,
        numa_node: None,
        address_space: None,
    }
}

/// Threads with these masks, each in a process of its own.
fn ranks(masks: &[&str]) -> Vec<HotThread> {
    masks.iter().zip(100..).map(|(mask, pid)| thread(pid, pid, cpu_set(mask))).collect()
}

/// The threads to move if the threads of each process have masks of their own.
fn overloaded(grant: &CpuSet, hot_threads: &[HotThread]) -> BTreeSet<ThreadId> {
    threads_to_unbind(&machine(), grant, hot_threads, &BTreeSet::new())
}

/// The processes whose threads all have the same mask.
fn with_one_mask(hot_threads: &[HotThread]) -> BTreeSet<ProcessId> {
    let mut masks: BTreeMap<ProcessId, BTreeSet<&CpuSet>> = BTreeMap::new();
    for hot_thread in hot_threads {
        masks.entry(hot_thread.thread.process).or_default().insert(&hot_thread.mask);
    }
    masks.into_iter().filter(|(_, masks)| masks.len() == 1).map(|(process, _)| process).collect()
}

/// The numbers of the ranks that move.
fn moved(grant: &str, masks: &[&str]) -> Vec<u32> {
    overloaded(&cpu_set(grant), &ranks(masks)).into_iter().map(|id| id.tid.0 - 100).collect()
}

#[test]
fn as_many_threads_move_as_there_are_idle_pus() {
    assert_eq!(moved("0-3", &["0", "0", "0"]), [1, 2]);
    assert_eq!(moved("0-3", &["0", "0", "0", "1", "2"]), [1]);
    assert_eq!(moved("0-3", &["0", "0", "0-3", "0-3", "0-3"]), [0; 0], "floating threads use the other PUs");
}

#[test]
fn ranks_on_one_core_of_two_pus_move_while_cores_idle() {
    assert_eq!(moved("0-1,4-5", &["0,4", "0,4"]), [1]);
    assert_eq!(
        moved("0-1,4-5", &["0,4", "0,4", "0-1,4-5"]),
        [0; 0],
        "the floating thread has the other core"
    );
    assert_eq!(moved("0-1,4-5", &["0,4", "0"]), [0], "the rank with one PU stays");
    assert_eq!(moved("0-1,4-5", &["0", "4"]), [0; 0], "a program that names two PUs means them");
}

#[test]
fn threads_of_a_process_count_as_many_pus_as_they_can_use_alone() {
    let own = |pid, count| (1..=count).map(move |tid| thread(pid, tid, cpu_set("0,4")));
    let grant = cpu_set("0-7");
    assert_eq!(overloaded(&grant, &own(7, 5).collect::<Vec<_>>()).len(), 0);
    let both: Vec<HotThread> = own(7, 5).chain(own(8, 1)).collect();
    let pids = overloaded(&grant, &both).into_iter().map(|id| id.process.pid.0);
    assert_eq!(pids.collect::<Vec<_>>(), [8], "only the thread of the second process");
}

#[test]
fn threads_of_one_process_that_inherited_one_mask_get_a_core_each_while_cores_idle() {
    let own = |pid, mask: &str, tids: &[u32]| -> Vec<HotThread> {
        tids.iter().map(|&tid| thread(pid, tid, cpu_set(mask))).collect()
    };
    let moved = |grant: &str, hot_threads: &[HotThread]| -> Vec<u32> {
        let inherited = with_one_mask(hot_threads);
        let lifted = threads_to_unbind(&machine(), &cpu_set(grant), hot_threads, &inherited);
        lifted.into_iter().map(|id| id.tid.0).collect()
    };
    assert_eq!(moved("0-7", &own(7, "0,4", &[1, 2, 3, 4])), [2, 3, 4], "each gets a core");
    assert_eq!(moved("0-1,4-5", &own(7, "0,4", &[1, 2, 3, 4])), [3, 4], "each gets a PU");
    assert_eq!(moved("0-3", &own(7, "0", &[1, 2, 3, 4, 5, 6])), [2, 3, 4], "as many as there are idle PUs");
    assert_eq!(moved("0-7", &own(7, "0,4", &[1, 2])), [0; 0], "as many threads as PUs");
    let full = [own(7, "0,4", &[1, 2, 3]), own(8, "0-1,4-5", &[11, 12])].concat();
    assert_eq!(moved("0-1,4-5", &full), [0; 0], "no PU idles");
    let by_itself = [own(7, "0,4", &[1, 2, 3]), own(7, "0-1,4-5", &[4])].concat();
    assert_eq!(moved("0-7", &by_itself), [0; 0], "its program gave its threads different masks");
}

fn any_threads() -> impl Strategy<Value = Vec<HotThread>> {
    let any_mask = prop_oneof![
        (0u32..8).prop_map(|pu| CpuSet::from(Pu(pu))),
        (0u32..4).prop_map(|core| [Pu(core), Pu(core + 4)].into_iter().collect()),
        Just(cpu_set("0-1,4-5")),
        (1u64..256).prop_map(|word| CpuSet::from_words(&[word])),
    ];
    proptest::collection::vec((0u32..6, any_mask), 0..14).prop_map(|threads| {
        threads.into_iter().zip(1..).map(|((pid, mask), tid)| thread(pid, tid, mask)).collect()
    })
}

/// The threads after the repair: those whose binding is lifted may run on the whole grant.
fn repaired(grant: &CpuSet, hot_threads: &[HotThread], lifted: &BTreeSet<ThreadId>) -> Vec<HotThread> {
    let mut threads = hot_threads.to_vec();
    for hot_thread in threads.iter_mut().filter(|hot_thread| lifted.contains(&hot_thread.thread)) {
        hot_thread.mask = grant.clone();
    }
    threads
}

/// Whether more of the bound threads than it has PUs lie in some set of PUs around `mask`.
fn is_in_full_set(grant: &CpuSet, bound: &[&HotThread], mask: &CpuSet) -> bool {
    let sets = (1u64..256).map(|word| CpuSet::from_words(&[word]));
    sets.filter(|pus| mask.is_subset(pus) && pus.is_subset(grant))
        .any(|pus| bound.iter().filter(|hot_thread| hot_thread.mask.is_subset(&pus)).count() > pus.len())
}

proptest! {
    #[test]
    fn only_threads_of_a_full_set_or_a_shared_core_move(hot_threads in any_threads()) {
        let grant = cpu_set("0-7");
        let bound: Vec<&HotThread> = hot_threads.iter().filter(|hot_thread| hot_thread.mask != grant).collect();
        let inherited = with_one_mask(&hot_threads);
        let lifted = threads_to_unbind(&machine(), &grant, &hot_threads, &inherited);
        for hot_thread in hot_threads.iter().filter(|hot_thread| lifted.contains(&hot_thread.thread)) {
            let (mask, process) = (&hot_thread.mask, hot_thread.thread.process);
            let core = machine().core_cpus(mask.first().unwrap());
            let is_apart = |other: &HotThread| other.thread.process != process || inherited.contains(&process);
            let is_shared = *mask == core
                && bound.iter().any(|other| {
                    other.mask.is_subset(&core) && other.thread != hot_thread.thread && is_apart(other)
                });
            prop_assert!(is_shared || is_in_full_set(&grant, &bound, mask), "{hot_thread:?}");
        }
        prop_assert!(lifted.len() + hot_threads.len() - bound.len() <= grant.len(), "each has an idle PU");
        let pids: BTreeSet<ProcessId> = bound.iter().map(|hot_thread| hot_thread.thread.process).collect();
        let is_one_binding = pids.iter().any(|process| inherited.contains(process));
        prop_assert!(pids.len() > 1 || lifted.is_empty() || is_one_binding, "one program chose its own masks");
    }

    #[test]
    fn after_the_repair_no_pu_idles_beside_threads_of_several_processes_that_share_one(hot_threads in any_threads()) {
        let grant = cpu_set("0-7");
        let lifted = overloaded(&grant, &hot_threads);
        let after = repaired(&grant, &hot_threads, &lifted);
        prop_assert!(overloaded(&grant, &after).is_empty(), "the repair is stable");
        let inherited = with_one_mask(&hot_threads);
        let of_inherited = threads_to_unbind(&machine(), &grant, &hot_threads, &inherited);
        let then = repaired(&grant, &hot_threads, &of_inherited);
        let again = threads_to_unbind(&machine(), &grant, &then, &inherited);
        prop_assert!(again.is_empty(), "the repair of inherited masks is stable");
        let backwards: Vec<HotThread> = hot_threads.iter().rev().cloned().collect();
        prop_assert_eq!(overloaded(&grant, &backwards), lifted, "the order of the threads has no effect");

        // Each process of one thread: then each thread that shares a PU shares it with another process.
        let alone: Vec<HotThread> =
            hot_threads.iter().map(|known| thread(known.thread.tid.0, 1, known.mask.clone())).collect();
        let after = repaired(&grant, &alone, &overloaded(&grant, &alone));
        let mut bound: Vec<&HotThread> = after.iter().filter(|hot_thread| hot_thread.mask != grant).collect();
        // Threads with large masks take cores that are left by those with small ones.
        bound.sort_by_key(|hot_thread| hot_thread.mask.len());
        let floating = after.len() - bound.len();
        let topology = machine();
        let mut matching = ThreadPuMatching::new(&topology, &grant);
        let with_pu = bound.iter().filter(|hot_thread| matching.add_thread(&hot_thread.mask)).count();
        prop_assert!(with_pu == bound.len() || with_pu + floating >= grant.len(), "a PU idles: {after:?}");
        // Ranks that are bound to whole cores share none while a core idles.
        let mut on_core: BTreeMap<CpuSet, usize> = BTreeMap::new();
        let cores = bound.iter().filter(|known| known.mask == topology.core_cpus(known.mask.first().unwrap()));
        cores.for_each(|known| *on_core.entry(known.mask.clone()).or_default() += 1);
        let is_shared = on_core.values().any(|&ranks| ranks > 1);
        prop_assert!(!is_shared || matching.idle_core_count() <= floating, "a core idles: {after:?}");
    }
}

#[test]
fn two_hundred_and_fifty_six_threads_that_make_room_for_each_other_are_all_kept() {
    // Chains in which each new thread makes all earlier ones move.
    let topology = regular_topology(2, 2, 2, 16, 2);
    let chain = |n: u32| CpuSet::from_range(Pu(n.saturating_sub(1)), Pu(n));
    let hot_threads: Vec<HotThread> = (0..256)
        .map(|n| thread(n + 1, n + 1, if n == 255 { cpu_set("254-255") } else { chain(n) }))
        .collect();
    let lifted = threads_to_unbind(&topology, topology.cpus(), &hot_threads, &BTreeSet::new());
    assert!(lifted.is_empty(), "{lifted:?}");
}
