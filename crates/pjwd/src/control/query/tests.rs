//! Paging: every process and every thread is on exactly one page, and no page exceeds its limits.

use std::collections::BTreeMap;

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{StartTime, Uid};
use pjw_core::job::{EndCondition, Job};
use pjw_core::state::demand::ThreadDemand;
use pjw_core::testing::{pjw_grant, regular_topology};
use pjw_core::time::UnixMillis;

use super::*;

fn thread() -> MemberThread {
    MemberThread {
        start: StartTime(1),
        comm: "x".into(),
        state: 'S',
        last_cpu: Pu(0),
        effective_mask: CpuSet::from(Pu(0)),
        demand: ThreadDemand::default(),
        mask_entry: None,
    }
}

/// A job whose processes have this many threads each. The pids are 100,000, 200,000 and so on.
fn state(processes: &[u32]) -> (WardenState, JobId) {
    let mut state = WardenState::new(regular_topology(1, 1, 1, 2, 1), &CpuSet::new());
    let id: JobId = "a".parse().unwrap();
    let job = Job::new(id.clone(), Uid(7), EndCondition::LastProcessExit, UnixMillis(0));
    state.jobs.insert(job);
    for (number, &threads) in (1..).zip(processes) {
        let pid = Pid(number * 100_000);
        let threads: BTreeMap<Tid, MemberThread> = (0..threads).map(|n| (Tid(pid.0 + n), thread())).collect();
        let member = Member {
            id: ProcessId { pid, start: StartTime(1) },
            job: id.clone(),
            evidence: MembershipEvidence::Registered,
            inherited_mask: None,
            was_new_at_join: true,
            numa_node: None,
            first_seen: None,
            threads,
        };
        state.members.insert(member);
    }
    (state, id)
}

/// All pages: the processes, and how many of their threads are on the page.
fn pages(processes: &[u32], limit: usize) -> Vec<Vec<(u32, usize)>> {
    let (state, job) = state(processes);
    let mut pages = Vec::new();
    let mut told = Vec::new();
    let mut after = None;
    loop {
        let QueryAnswer::Members(Some((page, next))) = members_page(&state, &job, after, limit) else {
            panic!()
        };
        told.extend(page.iter().flat_map(|facts| facts.threads.iter().map(|thread| thread.tid)));
        pages.push(page.iter().map(|facts| (facts.id.pid.0 / 100_000, facts.threads.len())).collect());
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    let all: Vec<Tid> = state.members.values().flat_map(|member| member.threads.keys().copied()).collect();
    assert_eq!(told, all, "every thread once and in order");
    pages
}

#[test]
fn a_page_holds_at_most_the_limit_of_processes() {
    assert_eq!(pages(&[1, 2, 3], 2), [vec![(1, 1), (2, 2)], vec![(3, 3)]]);
    assert_eq!(pages(&[1, 2], 2), [vec![(1, 1), (2, 2)]], "and says when it is the last");
    assert_eq!(pages(&[], 2), [vec![]]);
}

#[test]
fn a_huge_process_is_split_between_pages() {
    assert_eq!(
        pages(&[10, 2500, 5], 100),
        [vec![(1, 10), (2, 990)], vec![(2, 1000)], vec![(2, 510), (3, 5)]]
    );
}

#[test]
fn a_page_that_ends_with_a_process_continues_with_the_next() {
    assert_eq!(pages(&[1000, 0, 3], 100), [vec![(1, 1000)], vec![(2, 0), (3, 3)]]);
    assert_eq!(pages(&[1000], 100), [vec![(1, 1000)]]);
}

#[test]
fn a_process_that_ended_between_two_pages_is_skipped() {
    let (mut state, job) = state(&[2500, 3]);
    let QueryAnswer::Members(Some((_, next))) = members_page(&state, &job, None, 100) else { panic!() };
    assert_eq!(next, Some(PageCursor { pid: Pid(100_000), tid: Some(Tid(100_999)) }));
    state.members.remove(Pid(100_000));
    let QueryAnswer::Members(Some((page, None))) = members_page(&state, &job, next, 100) else { panic!() };
    assert_eq!(page.iter().map(|facts| facts.id.pid.0).collect::<Vec<_>>(), [200_000]);
}

#[test]
fn the_threads_of_one_process_are_paged() {
    let (state, _) = state(&[2500]);
    let mut told = Vec::new();
    let mut after = None;
    loop {
        let QueryAnswer::ProcessReasons(reasons) =
            explain_process(&state, &Policy::default(), Pid(100_000), after)
        else {
            panic!()
        };
        assert!(reasons.threads.len() <= MAX_THREADS_PER_PAGE);
        told.extend(reasons.threads.iter().map(|thread| thread.tid.0));
        after = reasons.continue_after;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(told, (100_000..102_500).collect::<Vec<_>>());
}

#[test]
fn only_hot_threads_of_the_job_are_compared_with_the_memory() {
    let (mut state, job) = state(&[2, 1]);
    state.topology = regular_topology(2, 1, 1, 2, 1);
    let memory = MemoryByNode::from_all_pages(BTreeMap::from([(1, 1 << 30)]));
    let by_node: BTreeMap<Pid, _> =
        [100_000, 200_000, 999].into_iter().map(|pid| (Pid(pid), memory.clone())).collect();
    let far = |state: &WardenState| match processes_with_remote_numa_memory(state, &job, by_node.clone()) {
        QueryAnswer::RemoteNumaMemory(far) => {
            far.iter().map(|far| (far.id.pid, far.hot_threads)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(far(&state), [], "no thread is hot");
    make_hot(&mut state, 100_000, 1);
    assert_eq!(far(&state), [(Pid(100_000), 1)]);
}

/// Makes the first threads of a process hot.
fn make_hot(state: &mut WardenState, pid: u32, count: usize) {
    let mut threads = state.members[&Pid(pid)].threads.clone();
    threads.values_mut().take(count).for_each(|thread| thread.demand.is_hot = true);
    state.members.replace_threads(Pid(pid), threads);
}

/// The idle PUs of the job, as the memory reader gets them.
fn idle_cpus(state: &WardenState, job: &JobId) -> String {
    match member_processes(state, job) {
        QueryAnswer::MemberProcesses(Some(to_read)) => to_read.idle_cpus.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_pus_of_a_job_to_which_no_hot_thread_is_bound_are_idle_unless_there_are_as_many_hot_threads() {
    let (mut state, id) = state(&[2, 1]);
    assert_eq!(idle_cpus(&state, &id), "", "the job holds no PUs");
    let mut job = state.jobs[&id].clone();
    job.grant = Some(pjw_grant("0-1".parse().unwrap()));
    state.jobs.insert(job);
    assert_eq!(idle_cpus(&state, &id), "0-1", "no thread is hot");
    make_hot(&mut state, 100_000, 1);
    assert_eq!(idle_cpus(&state, &id), "1", "the hot thread is bound to PU 0");
    make_hot(&mut state, 100_000, 2);
    assert_eq!(idle_cpus(&state, &id), "", "the second hot thread is lifted to PU 1 soon");
}

/// Sets the state and the PU of the first thread of a process.
fn set_first_thread(state: &mut WardenState, pid: u32, letter: char, last_cpu: u32) {
    let mut threads = state.members[&Pid(pid)].threads.clone();
    for thread in threads.values_mut().take(1) {
        (thread.state, thread.last_cpu) = (letter, Pu(last_cpu));
    }
    state.members.replace_threads(Pid(pid), threads);
}

fn process_id(number: u32) -> ProcessId {
    ProcessId { pid: Pid(number * 100_000), start: StartTime(1) }
}

/// The numbers of the processes to sample.
fn to_sample(state: &WardenState, job: &JobId, order: &SampleOrder) -> Vec<u32> {
    match processes_to_sample(state, job, order) {
        QueryAnswer::MemberProcesses(Some(ProcessesToRead { processes, .. })) => {
            processes.iter().map(|process| process.id.pid.0 / 100_000).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// A job on two NUMA nodes: of each process one thread is hot. Node 0 has the PUs 0 and 1.
fn hot_state(processes: &[u32]) -> (WardenState, JobId) {
    let (mut state, job) = state(processes);
    state.topology = regular_topology(2, 1, 1, 2, 1);
    for number in (1..).take(processes.len()) {
        make_hot(&mut state, process_id(number).pid.0, 1);
    }
    (state, job)
}

#[test]
fn the_processes_with_the_most_hot_threads_are_sampled() {
    let (mut state, job) = state(&[2; 20]);
    for pid in (3..=20).map(|number| number * 100_000) {
        make_hot(&mut state, pid, 1);
    }
    make_hot(&mut state, 2_000_000, 2);
    let order = SampleOrder::default();
    assert_eq!(to_sample(&state, &job, &order), Vec::<u32>::new(), "the machine has one NUMA node");
    state.topology = regular_topology(2, 1, 1, 2, 1);
    assert_eq!(to_sample(&state, &job, &order), [20].into_iter().chain(3..=17).collect::<Vec<_>>());
    let no_job = processes_to_sample(&state, &"other".parse().unwrap(), &order);
    assert!(matches!(no_job, QueryAnswer::MemberProcesses(None)));
}

#[test]
fn equal_processes_are_sampled_in_turns_and_those_that_were_found_each_time() {
    let (state, job) = hot_state(&[1; 20]);
    let order = SampleOrder { first: [process_id(2)].into(), after: Some(process_id(15)) };
    let expected = [2].into_iter().chain(16..=20).chain([1]).chain(3..=11).collect::<Vec<_>>();
    assert_eq!(to_sample(&state, &job, &order), expected);
}

#[test]
fn a_process_with_a_thread_that_may_hold_the_lock_of_its_memory_is_not_sampled() {
    let (mut state, job) = hot_state(&[2, 2, 1, 1]);
    set_first_thread(&mut state, 100_000, 'D', 0);
    pjw_core::testing::share_address_space(&mut state, &[process_id(3), process_id(4)]);
    set_first_thread(&mut state, 400_000, 'D', 0);
    assert_eq!(to_sample(&state, &job, &SampleOrder::default()), [2]);
}

#[test]
fn memory_that_several_processes_share_is_compared_with_the_threads_of_all_of_them() {
    let (mut state, job) = hot_state(&[1, 1, 1]);
    let memory = MemoryByNode::from_all_pages(BTreeMap::from([(0, 1 << 30)]));
    let by_node: BTreeMap<Pid, _> = (1..=3).map(|number| (process_id(number).pid, memory.clone())).collect();
    let far = |state: &WardenState| match processes_with_remote_numa_memory(state, &job, by_node.clone()) {
        QueryAnswer::RemoteNumaMemory(far) => {
            far.iter().map(|far| (far.id.pid.0 / 100_000, far.hot_threads)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let in_turn = SampleOrder::default();
    // The processes 2 and 3 run on node 1, and process 1 on node 0, where the memory is.
    set_first_thread(&mut state, 200_000, 'R', 2);
    set_first_thread(&mut state, 300_000, 'R', 3);
    assert_eq!(far(&state), [(2, 1), (3, 1)], "each has memory of its own");
    assert_eq!(to_sample(&state, &job, &in_turn), [1, 2, 3]);
    pjw_core::testing::share_address_space(&mut state, &[process_id(2), process_id(3)]);
    assert_eq!(far(&state), [(2, 2)], "one address space");
    assert_eq!(to_sample(&state, &job, &in_turn), [2, 1], "it has two hot threads");
    pjw_core::testing::share_address_space(&mut state, &[1, 2, 3].map(process_id));
    assert_eq!(far(&state), [], "process 1 uses the memory too");
    assert_eq!(to_sample(&state, &job, &in_turn), [1]);
    pjw_core::testing::share_address_space(&mut state, &[2, 3, 9].map(process_id));
    assert_eq!(far(&state), [], "process 9 is not in the job");
    assert_eq!(to_sample(&state, &job, &in_turn), [1]);
}
