//! Random steps: jobs are assigned and released, their processes end, the use of owners changes, PUs go offline, and
//! the daemon is restarted. After each step, no PU has two borrowers, no PU is borrowed from an owner that does not
//! lend, no owner that needs its cores waits for a borrower, and no borrower is frozen while a core is free. A command
//! with `refuses_frozen` is refused exactly if its new job would be frozen. After the releases nothing is borrowed.

use std::collections::BTreeMap;

use pjw_core::cpuset::Pu;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A job of this number and class requests this number of cores.
    Assign(u32, PriorityClass, u32),
    Release(u32),
    /// The process of the job with this number ends.
    Exit(u32),
    /// The owner of this number uses this number of cores, and runs on this PU.
    Use(u32, u32, Option<u32>),
    Wait(u64),
    SwitchOff(u32),
    Restart,
}

fn any_step() -> impl Strategy<Value = Step> {
    use PriorityClass::{Besteffort, Guaranteed, Normal};
    let class = prop_oneof![Just(Guaranteed), Just(Normal), Just(Besteffort)];
    prop_oneof![
        3 => (0..5u32, class, 1..6u32).prop_map(|(id, class, cores)| Step::Assign(id, class, cores)),
        2 => (0..5u32).prop_map(Step::Release),
        2 => (0..5u32).prop_map(Step::Exit),
        6 => (0..5u32, 0..6u32, proptest::option::of(0..8u32)).prop_map(|(id, used, on)| Step::Use(id, used, on)),
        4 => (0..3_000u64).prop_map(Step::Wait),
        1 => (0..8u32).prop_map(Step::SwitchOff),
        1 => Just(Step::Restart),
    ]
}

/// What an owner of the CPUs 0-5 does.
#[derive(Debug, Clone)]
enum Demand {
    /// It uses this number of cores, and runs on these CPUs.
    Use { cores: u32, runs_on: Vec<u32> },
    /// It sets the number of cores that it wants, or removes it.
    Want(Option<u32>),
}

/// A demand, and the time in ms until the next one.
fn any_demand() -> impl Strategy<Value = (Demand, u64)> {
    let runs_on = proptest::collection::vec(0..6u32, 0..4);
    let uses = (0..7u32, runs_on).prop_map(|(cores, runs_on)| Demand::Use { cores, runs_on });
    let wants = proptest::option::of(0..7u32).prop_map(Demand::Want);
    (prop_oneof![6 => uses, 1 => wants], 1..400u64)
}

fn restart(m: &mut Machine) {
    let records: Vec<Record> = m.state.records();
    let mut restarted = WardenState::new(m.state.topology.clone(), &CpuSet::new());
    records.into_iter().for_each(|record| restarted.apply_record(record));
    m.state = restarted;
}

/// Assigns `cores` to the job `id` by a command with `refuses_frozen`. If the command is refused because the job would
/// be frozen, repeats it without this setting.
fn assign_unless_frozen(m: &mut Machine, id: &str, class: PriorityClass, cores: u32, pid: u32) {
    let is_new = m.state.jobs.get(&job(id)).is_none();
    let assign = |refuses_frozen| {
        let (class, pids) = (Some(class), vec![Pid(pid)]);
        let request = assign_of(id, Some(CpuRequest::Cores(cores)));
        Command::Assign(AssignCommand { class, pids, refuses_frozen, ..request })
    };
    let is_frozen = |reply: &Reply| {
        let Reply::Assigned(job) = reply else { panic!("{reply:?}") };
        job.grant.as_ref().is_some_and(|grant| grant.ownership == Ownership::Frozen)
    };
    match m.command(assign(true)) {
        Err(Refusal::WouldFreeze { .. }) => {
            let reply = m.command(assign(false)).unwrap();
            assert!(is_new && is_frozen(&reply), "{reply:?}");
        }
        Ok(reply) => assert!(!(is_new && is_frozen(&reply)), "{reply:?}"),
        // A refusal changes nothing.
        Err(_) => {}
    }
}

fn take(m: &mut Machine, step: Step) {
    let name = |id: u32| format!("j{id}");
    match step {
        Step::Assign(id, class, cores) => {
            let pid = 100 + id;
            if !m.world().processes.contains_key(&Pid(pid)) {
                m.spawn(pid, 1, 0);
            }
            assign_unless_frozen(m, &name(id), class, cores, pid);
        }
        Step::Release(id) => drop(m.release(&name(id))),
        Step::Exit(id) if m.world().processes.contains_key(&Pid(100 + id)) => m.exit(100 + id),
        Step::Exit(_) => {}
        Step::Use(id, used, runs_on) => {
            let (id, now) = (job(&name(id)), Nanos(m.now()));
            let cores = m.state.grant_of(&id).map_or(0, |grant| grant.cpus.len());
            let runs_on = runs_on.map(|pu| cpu_set(&pu.to_string())).unwrap_or_default();
            m.state.lending.record_use(&id, in_use(used, runs_on), u32::try_from(cores).unwrap(), now);
        }
        Step::Wait(ms) => m.advance(ms * 1_000_000),
        Step::SwitchOff(pu) => m.switch_off(&pu.to_string()),
        Step::Restart => restart(m),
    }
    m.settle();
}

#[track_caller]
fn check(m: &Machine, grace: bool) {
    assert_sound(m);
    let pool = &m.state.pool;
    let online = pool.online_cpus();
    for owner in m.state.jobs.guaranteed_jobs() {
        let Some(used) = m.state.lending.owner_state(&owner.id).and_then(|known| known.used_core_count())
        else {
            continue;
        };
        let own = pool.pus_of(&owner.id).intersection(&online);
        let kept = own.difference(&pool.lent_cpus());
        let needed = (used as usize + 1).min(own.len());
        assert!(
            grace || kept.len() >= needed || own.len() == kept.len(),
            "{} keeps {kept} of {own}",
            owner.id
        );
    }
    let spare = pool.free_cpus().iter().any(|pu| pool.borrower(pu).is_none());
    for borrower in m.state.jobs.borrowers() {
        let is_frozen = borrower.grant.as_ref().is_some_and(|grant| grant.ownership == Ownership::Frozen);
        assert!(!(is_frozen && spare), "{} is frozen while a core is free", borrower.id);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn after_each_random_step_all_loans_are_valid(steps in proptest::collection::vec(any_step(), 1..40), grace in any::<bool>()) {
        let mut m = lending_machine();
        if grace {
            m.policy.lending.revocation_grace = Duration::from_secs(1);
        }
        for step in steps {
            take(&mut m, step);
            check(&m, grace);
        }
        for id in 0..5 {
            take(&mut m, Step::Release(id));
        }
        prop_assert_eq!(m.state.pool.borrowed_pus().count(), 0);
        prop_assert!(m.state.cpusets.paths().next().is_none());
    }

    /// The bound in docs/lending.md, also with exchanges of cores, grace periods, and numbers that the owner wants.
    #[test]
    fn each_core_is_lent_at_most_once_in_each_lend_after(
        demands in proptest::collection::vec(any_demand(), 10..120),
        grace_ms in prop_oneof![2 => Just(0), 1 => 1..3_000u64],
        cores_at_once in 1..5u32,
    ) {
        let mut m = web_and_batch();
        m.policy.lending.revocation_grace = Duration::from_millis(grace_ms);
        m.policy.lending.cores_at_once = cores_at_once;
        let mut lent_at: BTreeMap<Pu, u64> = BTreeMap::new();
        web_uses(&mut m, 0, 3);
        // When these were lent is not known here.
        let mut lent_before = m.state.pool.lent_cpus();
        for (demand, ms) in demands {
            match demand {
                Demand::Use { cores, runs_on } => {
                    let runs_on: CpuSet = runs_on.into_iter().map(Pu).collect();
                    sample(&mut m, cores, &runs_on.to_string());
                    m.settle();
                }
                Demand::Want(cores) => {
                    m.command(Command::Want { job: job("web"), cores, caller: ROOT }).unwrap();
                }
            }
            let lent = m.state.pool.lent_cpus();
            for pu in lent.difference(&lent_before).iter() {
                let before = lent_at.insert(pu, m.now());
                let pause = before.map(|before| Duration::from_nanos(m.now() - before));
                prop_assert!(pause.is_none_or(|pause| pause >= m.policy.lending.lend_after), "{pu:?} after {pause:?}");
            }
            lent_before = lent;
            m.advance(ms * 1_000_000);
        }
    }
}
