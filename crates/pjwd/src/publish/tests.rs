//! What is published of a state that a test makes up.

use pjw_core::job::{Amount, Grant, Lifetime};
use pjw_core::membership::Evidence;
use pjw_core::process::{Pid, ProcessId, StartTime};
use pjw_core::snapshot::{Claim, Claims, Mark, Nanos, Process};
use pjw_core::state::{Known, Member};
use pjw_core::strays::strays;
use pjw_core::topology::Regular;

use super::*;

#[test]
fn a_text_is_cut_to_a_readable_length_between_characters() {
    let told = |text: &str| event_on_the_wire(&Event::new(EventKind::Refused, text)).text;
    assert_eq!(told(&"x".repeat(LONGEST_TEXT)), "x".repeat(LONGEST_TEXT));
    let long = told(&"ä".repeat(50_000));
    assert!(long.len() <= LONGEST_TEXT && long.ends_with("ä…"), "{} bytes", long.len());
}

/// Four cores of two PUs: 0 and 4, 1 and 5, …
fn machine() -> Topology {
    Topology::regular(Regular {
        packages: 1,
        numa_per_package: 1,
        l3_per_numa: 1,
        cores_per_l3: 4,
        pus_per_core: 2,
    })
}

fn job(id: &str, owner: u32) -> Job {
    Job::new(id.parse().unwrap(), Uid(owner), Lifetime::Members, UnixMillis(0))
}

fn process(pid: u32, uid: u32) -> Process {
    Process {
        id: ProcessId { pid: Pid(pid), start: StartTime(1) },
        parent: Pid(1),
        group: Pid(pid),
        session: Pid(pid),
        uid: Uid(uid),
        comm: "x".into(),
        kernel: false,
        mask: None,
        cgroup: None,
        marks: None,
        claims: None,
        threads: None,
        quiet_until: None,
    }
}

fn state(jobs: Vec<Job>, processes: Vec<Process>) -> WardenState {
    let mut state = WardenState::new(machine(), &CpuSet::new());
    state.jobs = jobs.into_iter().map(|job| (job.id.clone(), job)).collect();
    let known = |process| Known { process, claims: Claims::default(), met: Nanos(0), fresh: false };
    state.processes = processes.into_iter().map(|process| (process.id.pid, known(process))).collect();
    state
}

fn enroll(state: &mut WardenState, pid: u32, job: &str) {
    let member = Member {
        id: state.processes[&Pid(pid)].process.id,
        job: job.parse().unwrap(),
        evidence: Evidence::Cgroup,
        inherited: None,
        met: None,
        threads: BTreeMap::new(),
    };
    state.members.insert(member);
}

fn published_strays(state: &WardenState, policy: &Policy) -> Vec<u32> {
    let mut state = state.clone();
    state.strays = strays(&state, policy);
    let mut tally = Tally::default();
    tally.renew(&state, &Stirred::everything());
    jobs(&state, policy, &tally).0.iter().map(|job| job.strays).collect()
}

#[test]
fn whatever_was_counted_is_published_in_cores() {
    let topology = machine();
    let first = topology.order()[0];
    let cores = |amount: Amount| amount.in_cores(&topology);
    assert_eq!(cores(Amount::Cores(3)), 3);
    assert_eq!([1, 2, 3, 4].map(|n| cores(Amount::Pus(n))), [1, 1, 2, 2]);
    assert_eq!(cores(Amount::Exactly(topology.core_of(first))), 1);
    assert_eq!(cores(Amount::Exactly(CpuSet::from(first))), 1, "half a core is a core");
    assert_eq!(cores(Amount::Exactly(topology.cpus().clone())), 4);
}

#[test]
fn strays_are_counted_by_the_rules_in_force() {
    let processes = vec![process(10, 500), process(11, 500), process(12, 501), process(13, 500)];
    let mut state = state(vec![job("a", 500)], processes);
    enroll(&mut state, 10, "a");
    let usual = Policy::default();
    assert_eq!(published_strays(&state, &usual), [0], "below first_person_uid nobody is a person");
    let own = Policy { first_person_uid: 500, own_pid: Some(Pid(13)), ..Policy::default() };
    assert_eq!(published_strays(&state, &own), [1], "the members, the warden and others' processes are none");
}

fn holding(name: &str, cpus: &str, shared: bool) -> Job {
    let grant = Grant {
        cpus: cpus.parse().unwrap(),
        granted_by: GrantedBy::Warden,
        shared,
        by_pus: false,
        since: Nanos(0),
        because: Vec::new(),
        runner_up: String::new(),
    };
    Job { grant: Some(grant), ..job(name, 0) }
}

#[test]
fn a_job_shares_its_cpus_also_if_it_had_them_first() {
    let jobs_held = vec![holding("a", "0-1", false), holding("b", "1", true), holding("c", "2", false)];
    let state = state(jobs_held, Vec::new());
    let told = jobs(&state, &Policy::default(), &Tally::default()).0;
    assert_eq!(told.iter().map(|job| job.shared).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn a_job_that_holds_what_is_now_the_systems_is_a_warning_until_it_ends() {
    let state = state(vec![holding("a", "0-1", false), holding("b", "2", false)], Vec::new());
    let policy = Policy { housekeeping: "1".parse().unwrap(), ..Policy::default() };
    let told = warnings(&state, &policy, &[], &Troubles::default(), &Tally::default());
    let told: Vec<_> = told.iter().map(|told| (told.code.as_str(), told.job.as_str())).collect();
    assert_eq!(told, [("housekeeping", "manual:a")]);
}

#[test]
fn a_member_that_left_its_schedulers_cgroup_is_a_stray() {
    let there = Job { cgroup: Some("/slurm/job_7".to_owned()), ..job("slurm:7", 0) };
    let mut state = state(vec![there], vec![process(10, 0), process(11, 0)]);
    for pid in [10, 11] {
        enroll(&mut state, pid, "slurm:7");
    }
    let mark = Mark::Cgroup("/slurm/job_7".to_owned());
    let claim = Claim { job: "slurm:7".parse().unwrap(), mark, amount: None };
    state.processes.get_mut(&Pid(10)).unwrap().claims.claims.push(claim);
    assert_eq!(published_strays(&state, &Policy::default()), [1]);
}

#[test]
fn a_users_strays_are_an_event_when_they_are_first_seen() {
    let state = state(vec![job("a", 1000)], vec![process(10, 1000), process(11, 1001)]);
    let (mut publisher, mut published) = Publisher::new("here".to_owned(), &state.topology);
    let stray = |pid: u32| Abstained {
        job: None,
        pid: Some(Pid(pid)),
        tid: None,
        code: "stray",
        why: format!("strays such as {pid}"),
        remedy: String::new(),
    };
    let mut told = |strays: &[u32]| {
        publisher.tell_strays(&state, &strays.iter().map(|&pid| stray(pid)).collect::<Vec<_>>());
        let events = std::iter::from_fn(|| published.events.try_recv().ok());
        events.map(|event| (event.event.clone(), event.pid.unwrap())).collect::<Vec<_>>()
    };
    let event = |pid| ("stray".to_owned(), pid);
    assert_eq!(told(&[10]), [event(10)]);
    assert_eq!(told(&[10]), [], "once");
    assert_eq!(told(&[10, 11]), [event(11)], "another user's are news");
    assert_eq!(told(&[11]), []);
    assert_eq!(told(&[10, 11]), [event(10)], "and so are those that come again");
}

#[test]
fn evidence_has_the_names_that_the_contract_lists() {
    let contract = include_str!("../../../../docs/contract.md");
    for evidence in [
        Evidence::Registered,
        Evidence::Cgroup,
        Evidence::Parent,
        Evidence::Session,
        Evidence::Environment,
        Evidence::Adopted,
    ] {
        let name = evidence_on_the_wire(evidence);
        assert!(contract.contains(&format!("`{name}`")), "{name}");
    }
}
