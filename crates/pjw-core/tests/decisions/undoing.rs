//! Letting go: by order, for a scheduler, over a restart. Whoever was moved comes back to where it was, and only
//! who was moved.

use pjw_core::command::{Caller, Command, Refusal};
use pjw_core::job::{Amount, GrantedBy};
use pjw_core::plan::{Action, ActionKind};
use pjw_core::policy::Mode;
use pjw_core::process::{Pid, Uid};
use pjw_core::record::Record;
use pjw_core::snapshot::{Cgroup, Seen};
use pjw_core::state::WardenState;
use pjw_core::topology::{Regular, Topology};

use crate::machine::{Machine, ROOT, in_cgroup, job, machine, set};

const PLACE: &str = "/system.slice/slurmstepd.scope/job_7";

/// Slurm's job 7 with process 10, whose cpuset is `cpus` if that is given.
fn slurm_job(m: &mut Machine, cpus: Option<&str>) {
    in_cgroup(m.spawn(10, 1, 1001), "slurm:7", PLACE, Some(Amount::Cores(2)));
    if let Some(cpus) = cpus {
        give_cpuset(m, cpus);
    }
}

fn give_cpuset(m: &mut Machine, cpus: &str) {
    let id = pjw_core::process::CgroupId { inode: 1, path: PLACE.to_owned() };
    let place = Cgroup { id, cpus: Some(set(cpus)), populated: true, cpuset: None };
    m.cgroups.insert(PLACE.to_owned(), Seen::Here(place));
}

/// The daemon dies and another reads what it left, on a machine of so many packages of four cores.
fn restart(m: &mut Machine, packages: u32) {
    let shape = Regular { packages, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 4, pus_per_core: 1 };
    let mut state = WardenState::new(Topology::regular(shape), &m.policy.housekeeping);
    m.state.records().into_iter().for_each(|record| state.replay(record));
    m.state = state;
}

#[test]
fn a_schedulers_job_that_is_released_stays_known_and_is_left_alone() {
    let mut m = machine();
    slurm_job(&mut m, None);
    m.settle();
    assert_eq!((m.grant("slurm:7"), m.mask(10, 10)), ("0-1".into(), "0-1".into()));
    m.release("slurm:7").unwrap();
    assert_eq!((m.grant("slurm:7"), m.mask(10, 10)), ("-".into(), "0-7".into()));
    assert!(m.state.jobs[&job("slurm:7")].let_go && m.state.touched.is_empty());
    m.spawn(11, 10, 1001);
    assert!(m.settle().is_empty(), "nor is it found again");
    restart(&mut m, 2);
    assert!(m.settle().is_empty(), "nor by the next daemon");
    m.assign("slurm:7", 2, &[]).unwrap();
    assert_eq!([m.mask(10, 10), m.mask(11, 11)], ["0-1", "0-1"], "until somebody assigns it cores again");
}

#[test]
fn a_job_that_a_prolog_reserved_and_an_epilog_released_goes_with_what_it_left_behind() {
    let mut m = machine();
    m.assign("lsf:7", 2, &[]).unwrap();
    m.spawn(10, 1, 1001);
    m.assign("lsf:7", 2, &[10]).unwrap();
    assert_eq!(m.mask(10, 10), "0-1");
    m.release("lsf:7").unwrap();
    assert_eq!((m.grant("lsf:7"), m.mask(10, 10)), ("-".into(), "0-7".into()));
    m.settle();
    assert!(m.state.jobs[&job("lsf:7")].let_go, "as long as something of it runs");
    m.exit(10);
    m.settle();
    assert!(m.state.jobs.is_empty());
    m.assign("lsf:7", 2, &[]).unwrap();
    m.settle();
    assert_eq!(m.grant("lsf:7"), "0-1", "requeued, it is reserved as the first time");
}

#[test]
fn what_a_scheduler_granted_stays_its_jobs_after_a_release() {
    let mut m = machine();
    slurm_job(&mut m, Some("2-3"));
    m.bind(10, 10, "2-3");
    m.settle();
    m.release("slurm:7").unwrap();
    assert_eq!(m.state.jobs[&job("slurm:7")].grant.as_ref().unwrap().granted_by, GrantedBy::Scheduler);
    assert_eq!(m.assign("a", 6, &[]).unwrap().grant.unwrap().cpus, set("0-1,4-7"), "nobody else gets it");
}

#[test]
fn everything_is_released_even_what_turns_up_in_doing_so() {
    let mut m = machine();
    m.spawn(5, 1, 1001);
    slurm_job(&mut m, None);
    m.settle();
    m.assign("a", 2, &[5]).unwrap();
    m.command(Command::ReleaseAll { caller: ROOT }).unwrap();
    assert_eq!([m.mask(5, 5), m.mask(10, 10)], ["0-7", "0-7"]);
    assert!(m.settle().is_empty());
}

#[test]
fn a_job_whose_cores_its_scheduler_gives_to_another_leaves_them() {
    let mut m = machine();
    m.spawn(20, 1, 1002);
    m.assign("a", 4, &[20]).unwrap();
    m.assign("rest", 4, &[]).unwrap();
    assert_eq!(m.mask(20, 20), "0-3");
    slurm_job(&mut m, Some("0-3"));
    m.bind(10, 10, "0-3");
    m.settle();
    assert_eq!((m.grant("slurm:7"), m.grant("manual:a")), ("0-3".into(), "-".into()));
    assert_eq!(m.mask(20, 20), "0-7", "it has no cores of its own, and must not keep another's");
    m.release("rest").unwrap();
    m.settle();
    assert_eq!((m.grant("manual:a"), m.mask(20, 20)), ("4-7".into(), "4-7".into()));
    m.release("a").unwrap();
    assert_eq!(m.mask(20, 20), "0-7");
}

#[test]
fn a_mask_that_a_program_chose_before_is_its_own_though_it_equals_the_grant() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.clone_thread(10, 12);
    m.bind(11, 11, "0");
    m.bind(10, 12, "0");
    m.now += 1_000_000_000;
    m.assign("a", 1, &[10]).unwrap();
    assert_eq!(m.mask(10, 10), "0");
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    assert_eq!([m.mask(10, 10), m.mask(11, 11), m.mask(10, 12)], ["0-7", "0", "0"]);
}

#[test]
fn who_was_there_when_the_grant_was_made_has_its_mask_from_elsewhere_however_short_it_lived() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.settle();
    m.spawn(11, 10, 0);
    m.clone_thread(11, 12);
    m.bind(11, 11, "0");
    m.bind(11, 12, "0");
    m.assign("a", 1, &[10]).unwrap();
    m.spawn(13, 10, 0);
    m.settle();
    assert_eq!([m.mask(10, 10), m.mask(13, 13)], ["0", "0"]);
    restart(&mut m, 2);
    m.settle();
    m.release("a").unwrap();
    assert_eq!([m.mask(10, 10), m.mask(11, 11), m.mask(11, 12), m.mask(13, 13)], ["0-7", "0", "0", "0-7"]);
}

#[test]
fn a_thread_that_is_younger_than_the_grant_has_its_mask_from_there_however_old_its_process_is() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.spawn(11, 10, 0);
    m.clone_thread(11, 12);
    m.assign("a", 2, &[10]).unwrap();
    m.bind(11, 11, "0");
    m.settle();
    m.now += 1_000_000_000;
    m.clone_thread(11, 13);
    // Its creator has ended, and the first thread's mask is that one's own choice.
    m.bind(11, 13, "0-1");
    m.processes.get_mut(&Pid(11)).unwrap().threads.as_mut().unwrap().retain(|thread| thread.tid.0 != 12);
    m.settle();
    m.release("a").unwrap();
    assert_eq!([m.mask(11, 11), m.mask(11, 13)], ["0", "0-7"]);
}

#[test]
fn deaths_between_saying_and_doing_lose_no_mask() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    let thread = *m.state.touched.keys().next().unwrap();
    let since = m.state.touched[&thread].since;
    // Two intentions, each written, neither carried out.
    for mask in ["0-2", "0-3"] {
        m.state.replay(Record::Touched { thread, before: set("0-7"), set: set(mask), since });
    }
    restart(&mut m, 2);
    assert_eq!(m.mask(10, 10), "0-1");
    m.release("a").unwrap();
    assert_eq!(m.mask(10, 10), "0-7");
}

#[test]
fn who_is_still_to_be_put_back_is_in_the_journal_too() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.state.replay(Record::Ended(job("a")));
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.mask(10, 10), "0-7");
    assert!(m.state.leaving.is_empty() && m.state.touched.is_empty());
}

#[test]
fn members_of_a_job_that_no_record_tells_of_are_put_back_and_haunt_nobody() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    let records = m.state.records().into_iter().filter(|record| !matches!(record, Record::Job(_)));
    let mut state = WardenState::new(m.state.topology.clone(), &set(""));
    records.for_each(|record| state.replay(record));
    m.state = state;
    m.settle();
    assert_eq!(m.mask(10, 10), "0-7");
    m.assign("b", 2, &[10]).unwrap();
}

#[test]
fn a_grant_outlives_a_restart_while_some_of_its_cores_are_off() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("first", 2, &[]).unwrap();
    m.assign("a", 4, &[10]).unwrap();
    m.assign("b", 2, &[]).unwrap();
    assert_eq!((m.grant("a"), m.grant("b")), ("4-7".into(), "2-3".into()));
    m.release("first").unwrap();
    m.assign("a", 6, &[]).unwrap();
    assert_eq!(m.grant("a"), "0-1,4-7");
    let whole = m.state.topology.clone();
    restart(&mut m, 1);
    m.settle();
    assert_eq!((m.grant("a"), m.mask(10, 10)), ("0-1".into(), "0-1".into()), "what is left of it");
    m.state.set_topology(whole, &set(""));
    m.settle();
    assert_eq!((m.state.pool.of(&job("a")), m.state.pool.free()), (set("0-1"), set("4-7")));
}

#[test]
fn a_reservation_that_was_used_starts_anew_when_it_is_empty_also_over_a_restart() {
    let day = 24 * 3600 * 1_000_000_000;
    let mut m = machine();
    m.assign("a", 2, &[]).unwrap();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.now += 3 * day;
    m.settle();
    m.exit(10);
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.grant("a"), "0-1");
    m.now += day / 2;
    restart(&mut m, 2);
    m.settle();
    assert_eq!(m.grant("a"), "0-1");
    m.now += day;
    m.settle();
    assert_eq!(m.grant("a"), "-");
}

#[test]
fn a_warden_that_only_watches_releases_nothing() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.assign("a", 2, &[10]).unwrap();
    m.policy.mode = Mode::Observe;
    assert_eq!(m.release("a"), Err(Refusal::ObserveOnly));
    assert_eq!(m.command(Command::ReleaseAll { caller: ROOT }), Err(Refusal::ObserveOnly));
    assert_eq!(m.grant("a"), "0-1");
}

#[test]
fn who_may_not_move_a_process_promises_it_no_cores() {
    let mut m = machine();
    m.spawn(10, 1, 0);
    m.policy.only_user = Some(Uid(1001));
    let me = Caller { uid: Uid(1001), admin: true };
    let refused = Err(Refusal::OutOfReach { pid: Pid(10), owner: Uid(0), user: Uid(1001) });
    assert_eq!(m.assign_as(me, "a", 1, &[10]), refused);
    assert!(m.state.jobs.is_empty());
}

#[test]
fn a_mask_of_which_a_cpuset_showed_less_is_the_wardens_still_when_the_cpuset_grows() {
    let mut m = machine();
    m.spawn(7, 1, 0);
    m.cut = Some(set("2-3"));
    m.assign("a", 4, &[7]).unwrap();
    assert_eq!((m.grant("a"), m.mask(7, 7)), ("0-3".into(), "2-3".into()));
    restart(&mut m, 2);
    m.cut = None;
    m.bind(7, 7, "0-3");
    assert!(m.settle().is_empty());
    m.release("a").unwrap();
    assert_eq!(m.mask(7, 7), "0-7");
}

#[test]
fn a_mask_of_which_a_cpuset_showed_less_when_putting_it_back_was_refused_is_put_back_later() {
    let mut m = machine();
    m.spawn(7, 1, 0);
    m.assign("a", 3, &[7]).unwrap();
    let thread = *m.state.touched.first_key_value().unwrap().0;
    let (kind, why) = (ActionKind::Restore, String::new());
    let (from, to) = (set("0-1"), set("0-7"));
    m.state.not_applied(&Action { kind, job: job("manual:a"), thread, from, to, walled: false, why });
    m.release("a").unwrap();
    assert_eq!(m.mask(7, 7), "0-7");
}
