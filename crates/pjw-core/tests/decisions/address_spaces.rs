//! Processes that share an address space: they are placed in one L3 or NUMA node, and stay together when their job is
//! resized or moved.

use pjw_core::command::Command;
use pjw_core::cpuset::CpuSet;
use pjw_core::explain::{explain_job, explain_process};
use pjw_core::ids::{Comm, Pid, TASK_HOST_NAME};
use pjw_core::job::CpuRequest;
use pjw_core::policy::Policy;
use pjw_core::topology::{Topology, TopologyLevel};
use proptest::prelude::*;

use crate::machine::{Machine, ROOT, assign_of, cpu_set, job, machine_with, regular_topology};

/// A job `a` of this number of cores. Each of these processes runs all the time and is pinned. The processes of each
/// group share an address space, which the scans find after the processes were pinned.
fn busy_job(topology: Topology, cores: u32, pids: &[u32], groups: &[&[u32]]) -> Machine {
    let mut machine = machine_with(topology, Policy::default());
    for &pid in pids {
        machine.spawn(pid, 1, 0);
    }
    machine.assign("a", cores, pids).unwrap();
    run_for_seconds(&mut machine, 6, pids);
    machine.share_memory(groups);
    run_for_seconds(&mut machine, 6, pids);
    machine
}

fn run_for_seconds(machine: &mut Machine, seconds: u32, busy: &[u32]) -> usize {
    let second = |_| {
        machine.run(busy);
        machine.settle().len()
    };
    (0..seconds).map(second).sum()
}

/// Two NUMA nodes of four cores of one PU: node 0 has the PUs 0-3.
fn two_nodes() -> Topology {
    regular_topology(2, 1, 1, 4, 1)
}

fn is_in(machine: &Machine, pids: &[u32], cpus: &str) -> bool {
    pids.iter().all(|&pid| cpu_set(&machine.effective_mask(pid, pid)).is_subset(&cpu_set(cpus)))
}

/// Whether each process has a PU of its own.
fn have_pus_of_their_own(machine: &Machine, pids: &[u32]) -> bool {
    let mut masks: Vec<String> = pids.iter().map(|&pid| machine.effective_mask(pid, pid)).collect();
    masks.sort();
    masks.dedup();
    masks.len() == pids.len() && masks.iter().all(|mask| cpu_set(mask).len() == 1)
}

#[test]
fn tasks_of_one_address_space_are_pinned_in_one_node_each_to_a_core_of_its_own() {
    let pids = [10, 11, 12, 13, 14];
    let mut machine = busy_job(two_nodes(), 8, &pids, &[]);
    assert_eq!((machine.effective_mask(13, 13), machine.effective_mask(14, 14)), ("3".into(), "4".into()));
    machine.share_memory(&[&[13, 14]]);
    run_for_seconds(&mut machine, 6, &pids);
    assert!(is_in(&machine, &[13, 14], "4-7"), "{}", machine.effective_mask(13, 13));
    assert!(have_pus_of_their_own(&machine, &pids));
    assert_eq!(run_for_seconds(&mut machine, 10, &pids), 0, "nothing is left to change");
}

#[test]
fn a_group_that_is_larger_than_a_node_is_placed_like_separate_processes() {
    let pids = [10, 11, 12, 13, 14];
    let mut machine = busy_job(two_nodes(), 8, &pids, &[&pids]);
    assert!(have_pus_of_their_own(&machine, &pids));
    assert_eq!(run_for_seconds(&mut machine, 10, &pids), 0);
}

#[test]
fn a_group_that_fits_into_an_l3_is_not_spread_over_its_node() {
    // Two nodes of two L3 caches of two cores.
    let pids = [10, 11, 12, 13];
    let machine = busy_job(regular_topology(2, 1, 2, 2, 1), 8, &pids, &[&[10, 13], &[11, 12]]);
    assert!(have_pus_of_their_own(&machine, &pids));
    let l3s = ["0-1", "2-3", "4-5", "6-7"];
    for group in [[10, 13], [11, 12]] {
        assert!(l3s.iter().any(|l3| is_in(&machine, &group, l3)), "{group:?}");
    }
}

#[test]
fn a_job_that_shrinks_keeps_the_node_of_its_tasks() {
    let pids = [10, 11, 12, 13, 14, 15, 16];
    for (cores, kept) in [(6, 3), (4, 3), (3, 3), (2, 2)] {
        let mut machine = busy_job(two_nodes(), 8, &pids, &[&[14, 15, 16]]);
        assert!(is_in(&machine, &[14, 15, 16], "4-7"), "node 0 is full of the four other processes");
        machine.assign("a", cores, &[]).unwrap();
        let grant = cpu_set(&machine.grant("a"));
        assert_eq!(grant.len(), cores as usize);
        assert!(grant.intersection(&cpu_set("4-7")).len() >= kept, "{cores}: {grant}");
        run_for_seconds(&mut machine, 10, &[14, 15, 16]);
        assert!(is_in(&machine, &[14, 15, 16], "4-7"), "{cores}: {grant}");
    }
}

#[test]
fn a_job_that_shrinks_keeps_each_of_two_groups_in_one_node() {
    // Without the groups, the job would keep four cores of one node and two of the other one.
    let (one, two) = ([10, 11, 12], [20, 21, 22]);
    let pids = [10, 11, 12, 20, 21, 22];
    let mut machine = busy_job(two_nodes(), 8, &pids, &[&one, &two]);
    machine.assign("a", 6, &[]).unwrap();
    let grant = cpu_set(&machine.grant("a"));
    assert_eq!(
        (grant.intersection(&cpu_set("0-3")).len(), grant.intersection(&cpu_set("4-7")).len()),
        (3, 3),
        "{grant}"
    );
    run_for_seconds(&mut machine, 6, &pids);
    for group in [one, two] {
        assert!(is_in(&machine, &group, "0-3") || is_in(&machine, &group, "4-7"), "{group:?}");
    }
    assert!(have_pus_of_their_own(&machine, &pids));
}

/// The smallest level at which one domain, an L3 cache or a NUMA node, has all PUs of these processes.
fn common_level(machine: &Machine, pids: &[u32]) -> Option<TopologyLevel> {
    let has_all =
        |cpus: &CpuSet| pids.iter().all(|&pid| cpu_set(&machine.effective_mask(pid, pid)).is_subset(cpus));
    let topology = &machine.state.topology;
    let mut levels = [TopologyLevel::L3, TopologyLevel::NumaNode].into_iter();
    levels.find(|&level| topology.domains(level).any(|domain| has_all(&domain.cpus)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]
    #[test]
    fn no_resize_divides_a_group_of_a_job_that_has_a_core_for_each_process(
        pids in Just((10..22).collect::<Vec<u32>>()).prop_shuffle(),
        sizes in proptest::collection::vec(2_usize..5, 1..3),
        others in 0_usize..5,
        resizes in proptest::collection::vec(0_u32..12, 1..4),
    ) {
        let mut groups: Vec<&[u32]> = Vec::new();
        let mut rest = pids.as_slice();
        for size in sizes {
            let (group, left) = rest.split_at(size);
            groups.push(group);
            rest = left;
        }
        let mut busy = pids[..pids.len() - rest.len() + others.min(rest.len())].to_vec();
        busy.sort_unstable();
        let least = u32::try_from(busy.len()).unwrap();
        // Two NUMA nodes of two L3 caches of three cores. The job has a core for each process at any time.
        let mut machine = busy_job(regular_topology(2, 1, 2, 3, 1), 12, &busy, &groups);
        for more in resizes {
            let before: Vec<Option<TopologyLevel>> =
                groups.iter().map(|group| common_level(&machine, group)).collect();
            machine.assign("a", (least + more).min(12), &[]).unwrap();
            run_for_seconds(&mut machine, 6, &busy);
            let grant = machine.grant("a");
            for (group, before) in groups.iter().zip(before) {
                let after = common_level(&machine, group);
                let stays = before.is_none_or(|before| after.is_some_and(|after| after <= before));
                prop_assert!(stays, "{group:?}: {before:?}, then {after:?} on {grant}");
            }
        }
    }
}

#[test]
fn an_idle_group_is_kept_together_where_it_ran_last() {
    let pids = [10, 11, 12, 13, 14, 15];
    let mut machine = busy_job(two_nodes(), 8, &pids, &[&[14, 15]]);
    machine.bind(14, 14, "6");
    machine.bind(15, 15, "7");
    run_for_seconds(&mut machine, 10, &[10, 11, 12, 13]);
    machine.assign("a", 5, &[]).unwrap();
    let grant = cpu_set(&machine.grant("a"));
    assert!(cpu_set("6-7").is_subset(&grant), "{grant}");
}

/// Starts a process that owns the address space of tasks, as `pjwctl spawn --share memory` does. It has run last on
/// this PU.
fn spawn_task_host(machine: &mut Machine, pid: u32, pu: &str) {
    machine.spawn(pid, 1, 0).comm = Comm::from(TASK_HOST_NAME.to_str().unwrap());
    machine.assign("a", 8, &[pid]).unwrap();
    machine.settle();
    machine.bind(pid, pid, pu);
}

#[test]
fn idle_tasks_stay_in_their_node_although_their_host_ran_in_another_one() {
    let pids = [10, 11, 12, 13, 14, 15];
    let mut machine = busy_job(two_nodes(), 8, &pids, &[]);
    spawn_task_host(&mut machine, 20, "0");
    machine.share_memory(&[&[14, 15, 20]]);
    machine.bind(14, 14, "6");
    machine.bind(15, 15, "7");
    run_for_seconds(&mut machine, 10, &[10, 11, 12, 13]);
    let reasons = explain_job(&machine.state, &machine.policy, &machine.state.jobs[&job("manual:a")]);
    assert!(reasons.contains(&"of its processes, 2 share one address space".to_owned()), "{reasons:?}");
    let reasons = explain_process(&machine.state, &machine.policy, Pid(14));
    assert!(
        reasons.iter().any(|reason| reason.starts_with("it shares its address space with process 15:")),
        "{reasons:?}"
    );
    let reasons = explain_process(&machine.state, &machine.policy, Pid(20));
    assert!(
        reasons.contains(&"it owns the address space that processes 14, 15 use".to_owned()),
        "{reasons:?}"
    );
    machine.assign("a", 5, &[]).unwrap();
    let grant = cpu_set(&machine.grant("a"));
    assert!(cpu_set("6-7").is_subset(&grant), "{grant}");
}

/// Two packages of three nodes of two cores: package 0 has the PUs 0-5. The job `a` has the two cores of node 0, and
/// one core of package 1. Three cores of package 1 would be in one package instead of two, but each in another node.
/// The processes 10 and 11 of the job run all the time if they are `busy`. The process 20 owns the address space of
/// tasks.
fn fragmented(groups: &[&[u32]], busy: &[u32]) -> Machine {
    let mut machine = machine_with(regular_topology(2, 3, 1, 2, 1), Policy::default());
    let pids = [10, 11, 20];
    pids.iter().for_each(|&pid| drop(machine.spawn(pid, 1, 0)));
    machine.process(20).comm = Comm::from(TASK_HOST_NAME.to_str().unwrap());
    for (id, cpus) in [("a", "0-1,6"), ("b", "2-5,7,9,11")] {
        machine.command(Command::Assign(assign_of(id, Some(CpuRequest::Exactly(cpu_set(cpus)))))).unwrap();
    }
    machine.assign("a", 3, &pids).unwrap();
    machine.share_memory(groups);
    run_for_seconds(&mut machine, 6, busy);
    assert_eq!(machine.grant("a"), "0-1,6");
    machine
}

#[test]
fn defragmentation_divides_no_group() {
    let grant_after_defragmentation = |groups: &[&[u32]], busy: &[u32]| {
        let mut machine = fragmented(groups, busy);
        machine.command(Command::Defrag { caller: ROOT }).unwrap();
        machine.grant("a")
    };
    for busy in [&[10, 11][..], &[]] {
        assert_eq!(grant_after_defragmentation(&[], busy), "6,8,10");
        assert_eq!(grant_after_defragmentation(&[&[10, 11]], busy), "0-1,6");
        assert_eq!(
            grant_after_defragmentation(&[&[10, 11, 20]], busy),
            "0-1,6",
            "a group with the owner of the address space"
        );
    }
}
