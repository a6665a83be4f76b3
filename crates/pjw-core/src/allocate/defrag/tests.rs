//! Defragmentation, on fixed machines and on random sequences.

use proptest::prelude::*;
use std::string::String;
use std::string::ToString;
use std::vec::Vec;

use super::*;
use crate::basics::ids::Uid;
use crate::basics::time::UnixMillis;
use crate::terms::job::EndCondition;
use crate::testing::{numbered_job, pjw_grant, regular_topology};

fn state(topology: &Topology, housekeeping: &str) -> WardenState {
    WardenState::new(topology.clone(), &housekeeping.parse().unwrap())
}

/// Gives these PUs to a job, as if it had requested their number.
fn put(state: &mut WardenState, n: usize, request: JobRequest, cpus: &str) {
    let cpus: CpuSet = cpus.parse().unwrap();
    assert!(state.pool.grant_available(&numbered_job(n), &cpus).is_empty());
    let grant = pjw_grant(cpus);
    let job = Job::new(numbered_job(n), Uid(0), EndCondition::Timeout, UnixMillis(0));
    state.jobs.insert(Job { request: Some(request), grant: Some(grant), ..job });
}

fn ask(state: &mut WardenState, n: usize, request: &JobRequest, policy: &Policy) {
    if let Ok(offer) = allocate(&numbered_job(n), request, &state.pool, &state.topology, policy) {
        put(state, n, request.clone(), &offer.cpus.to_string());
    }
}

fn release(state: &mut WardenState, n: usize) {
    state.pool.release(&numbered_job(n));
    state.jobs.remove(&numbered_job(n));
}

/// Applies the steps in order, as a command does.
fn apply(state: &mut WardenState, plan: &DefragPlan) {
    for step in &plan.steps {
        state.pool.release(&step.job);
        state.pool.commit(&step.job, &step.offer).unwrap();
        let cpus = step.offer.cpus.clone();
        state.jobs.update(&step.job, |job| job.grant.as_mut().unwrap().cpus = cpus);
        check_ledger(state);
    }
}

fn check_ledger(state: &WardenState) {
    let mut seen = state.pool.housekeeping_cpus();
    for job in state.jobs.values() {
        let cpus = &job.grant.as_ref().unwrap().cpus;
        assert_eq!(state.pool.pus_of(&job.id), *cpus);
        assert!(!seen.intersects(cpus), "{cpus} has two holders");
        seen = seen.union(cpus);
    }
}

/// Computes the score independently.
fn score(state: &WardenState) -> Score {
    let mut sums = [0; 3];
    state
        .jobs
        .values()
        .for_each(|job| add(&mut sums, domains_used(&state.topology, &job.grant.as_ref().unwrap().cpus)));
    let free = state.pool.free_cpus();
    let largest = |level| {
        let holes = state.topology.domains(level).map(|domain| domain.cpus.intersection(&free));
        holes.map(|hole| state.topology.whole_core_count(&hole)).max().unwrap()
    };
    (sums, Reverse(LEVELS.map(largest)))
}

fn moves_text(plan: &DefragPlan) -> Vec<String> {
    plan.moves.iter().map(|m| format!("{} {} -> {}: {}", m.job, m.from, m.to, m.improvement)).collect()
}

#[test]
fn a_job_on_two_l3s_comes_together_where_one_has_room() {
    let mut state = state(&regular_topology(1, 1, 2, 4, 1), "");
    put(&mut state, 1, JobRequest::with_core_count(4), "2-5");
    let plan = plan_defrag(&state, &Policy::default());
    assert_eq!(moves_text(&plan), ["manual:1 2-5 -> 0-3: it lies on 1 L3 instead of 2"]);
    assert_eq!((plan.largest_requests_before.l3, plan.largest_requests_after.l3), (2, 4));
    apply(&mut state, &plan);
    assert_eq!(plan_defrag(&state, &Policy::default()).moves, []);
}

#[test]
fn small_jobs_are_moved_so_that_a_large_request_fits() {
    let mut state = state(&regular_topology(2, 1, 1, 4, 1), "");
    put(&mut state, 1, JobRequest::with_core_count(2), "0-1");
    put(&mut state, 2, JobRequest::with_core_count(1), "4");
    let plan = plan_defrag(&state, &Policy::default());
    assert_eq!(moves_text(&plan), ["manual:2 4 -> 2: one package can then serve 4 cores instead of 3"]);
    assert_eq!((plan.largest_requests_before.l3, plan.largest_requests_after.l3), (3, 4));
}

#[test]
fn no_job_moves_without_an_improvement() {
    let mut state = state(&regular_topology(2, 1, 1, 4, 1), "");
    put(&mut state, 1, JobRequest::with_core_count(2), "1-2");
    assert_eq!(plan_defrag(&state, &Policy::default()).moves, [], "another pair in the same L3 is no better");
    put(&mut state, 2, JobRequest::with_core_count(4), "4-7");
    assert_eq!(plan_defrag(&state, &Policy::default()).moves, []);
}

#[test]
fn jobs_with_fixed_cores_are_not_moved() {
    let packed = JobRequest::with_core_count(2);
    let requests = [
        JobRequest { class: PriorityClass::Guaranteed, ..packed.clone() },
        JobRequest { placement: Placement::Spread, ..packed.clone() },
        JobRequest {
            cpu_request: CpuRequest::Exactly("3-4".parse().unwrap()),
            placement: Placement::Explicit,
            ..JobRequest::with_core_count(2)
        },
    ];
    for request in requests {
        let mut state = state(&regular_topology(1, 1, 2, 4, 1), "");
        put(&mut state, 1, request.clone(), "3-4");
        assert_eq!(plan_defrag(&state, &Policy::default()).moves, [], "{request:?}");
    }
    let changes: [fn(&mut Job); 4] = [
        |_| {},
        |job| job.was_released = true,
        |job| job.grant.as_mut().unwrap().is_shared = true,
        |job| job.grant.as_mut().unwrap().granted_by = GrantedBy::Scheduler,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut state = state(&regular_topology(1, 1, 2, 4, 1), "");
        put(&mut state, 1, packed.clone(), "3-4");
        state.jobs.update(&numbered_job(1), change);
        assert_eq!(plan_defrag(&state, &Policy::default()).moves.len(), usize::from(at == 0), "change {at}");
    }
    let mut state = state(&regular_topology(1, 1, 2, 4, 1), "");
    put(&mut state, 1, packed, "3-4");
    state.pool.set_online(&"0-3,5-7".parse().unwrap());
    assert_eq!(plan_defrag(&state, &Policy::default()).moves, [], "a core of it is off");
    state.pool.set_online(state.topology.cpus());
    state.pool.grant_available(&numbered_job(1), &"3".parse().unwrap());
    assert_eq!(plan_defrag(&state, &Policy::default()).moves, [], "the ledger has it hold less");
}

#[test]
fn a_moved_job_keeps_its_kind_of_core() {
    let core = |(n, kind): (u32, u32)| crate::machine::topology::Core {
        pus: crate::basics::cpuset::Pu(n).into(),
        kind_index: kind,
    };
    let domain = |(number, cpus): (u32, &str)| crate::machine::topology::TopologyDomain {
        level: TopologyLevel::L3,
        number,
        cpus: cpus.parse().unwrap(),
        memory_bytes: 0,
    };
    let cores = [(0, 1), (1, 1), (2, 0), (3, 0)].map(core).to_vec();
    let topology = Topology::new(cores, [(0, "0-1"), (1, "2-3")].map(domain).to_vec()).unwrap();
    let mut state = state(&topology, "");
    put(&mut state, 1, JobRequest::with_core_count(2), "1-2");
    assert_eq!(
        plan_defrag(&state, &Policy::default()).moves,
        [],
        "one L3 would do, but of cores of one kind"
    );
}

fn any_request() -> impl Strategy<Value = JobRequest> {
    let amount =
        prop_oneof![4 => (1u32..8).prop_map(CpuRequest::Cores), 1 => (1u32..12).prop_map(CpuRequest::Pus)];
    let placement = prop_oneof![4 => Just(Placement::Pack), 1 => Just(Placement::Spread)];
    let class = prop_oneof![4 => Just(PriorityClass::Normal), 1 => Just(PriorityClass::Guaranteed)];
    (amount, placement, class).prop_map(|(cpu_request, placement, class)| JobRequest {
        cpu_request,
        placement,
        class,
        ..JobRequest::with_core_count(1)
    })
}

proptest! {
    #[test]
    fn defrag_keeps_grants_valid_improves_the_score_and_terminates(
        topology in (1u32..4, 1u32..3, 1u32..4, 1u32..6, 1u32..3).prop_map(|(p, n, l, c, t)| regular_topology(p, n, l, c, t)),
        kept in prop_oneof![Just(""), Just("0"), Just("0-1")],
        share_smt in any::<bool>(),
        steps in proptest::collection::vec((any_request(), proptest::option::of(0usize..40)), 1..40),
    ) {
        let policy = Policy { share_smt, ..Policy::default() };
        let kept: CpuSet = kept.parse::<CpuSet>().unwrap().iter().flat_map(|pu| topology.core_cpus(pu).iter().collect::<Vec<_>>()).collect();
        let mut state = state(&topology, &kept.to_string());
        for (n, (request, gone)) in steps.iter().enumerate() {
            ask(&mut state, n, request, &policy);
            gone.iter().for_each(|gone| release(&mut state, gone % (n + 1)));
        }
        let plan = plan_defrag(&state, &policy);
        prop_assert_eq!(&plan, &plan_defrag(&state, &policy), "the same state gives the same moves");
        let mut after = state.clone();
        apply(&mut after, &plan);
        check_ledger(&after);
        prop_assert_eq!(plan.moves.is_empty(), plan.steps.is_empty());
        prop_assert!(plan.moves.is_empty() || score(&after) < score(&state));
        prop_assert_eq!(plan.largest_requests_before, largest_requests(&state.pool, &topology));
        prop_assert_eq!(plan.largest_requests_after, largest_requests(&after.pool, &topology));
        let mut moved: Vec<&JobId> = plan.moves.iter().map(|m| &m.job).collect();
        moved.sort();
        moved.dedup();
        prop_assert_eq!(moved.len(), plan.moves.len(), "each job moves once");
        for (before, after) in state.jobs.values().zip(after.jobs.values()) {
            let (from, to) = (&before.grant.as_ref().unwrap().cpus, &after.grant.as_ref().unwrap().cpus);
            let job_move = plan.moves.iter().find(|m| m.job == before.id);
            prop_assert_eq!(job_move.map(|m| (&m.from, &m.to)), (from != to).then_some((from, to)));
            prop_assert!(job_move.is_none_or(|m| !m.improvement.is_empty()));
            prop_assert_eq!(from.len(), to.len());
            prop_assert_eq!(topology.whole_core_count(from), topology.whole_core_count(to));
            prop_assert!(domains_used(&topology, to) <= domains_used(&topology, from));
            let request = before.request.as_ref().unwrap();
            let may = request.class != PriorityClass::Guaranteed && request.placement == Placement::Pack;
            prop_assert!(may || from == to);
        }
        prop_assert_eq!(plan_defrag(&after, &policy).moves, [], "healed is healed");
    }
}
