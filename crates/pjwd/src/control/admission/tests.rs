//! Commands that are answered before they reach the loop.

use pjw_core::command::AssignCommand;
use pjw_core::job::CpuRequest;

use super::*;

const ME: Caller = Caller { uid: Uid(1001), is_admin: false };

fn assign(job: &str) -> AssignCommand {
    AssignCommand { cpu_request: Some(CpuRequest::Cores(1)), ..AssignCommand::new(job.parse().unwrap(), ME) }
}

fn release(job: &str) -> Command {
    Command::Release { job: job.parse().unwrap(), caller: ME }
}

fn want(caller: Caller) -> Command {
    Command::Want { job: "mine".parse().unwrap(), cores: None, caller }
}

/// The answer on a node with one job of this user and one of another user.
fn answer(rules: &AdmissionRules, command: &Command) -> Option<Result<Reply, Refusal>> {
    let job = |id: &str, owner| Job { id: id.to_owned(), owner, ..Job::default() };
    answer_without_event_loop(
        rules,
        &[job("manual:mine", 1001), job("manual:theirs", 1002)].map(Arc::new),
        command,
    )
}

fn refusal(rules: &AdmissionRules, command: &Command) -> Option<Refusal> {
    answer(rules, command).map(Result::unwrap_err)
}

#[test]
fn a_command_that_the_status_decides_does_not_reach_the_loop() {
    let none = AdmissionRules::default();
    let some = AdmissionRules { user_max_cores: 2, ..AdmissionRules::default() };
    let observing = AdmissionRules { mode: DaemonMode::Observe, ..some.clone() };
    let (mine, theirs): (JobId, JobId) = ("mine".parse().unwrap(), "theirs".parse().unwrap());
    let not_yours = || Some(Refusal::JobNotOwned { job: theirs.clone(), owner: Uid(1002) });

    assert_eq!(refusal(&none, &Command::Assign(assign("new"))), Some(Refusal::AssignNeedsAdmin));
    assert_eq!(refusal(&observing, &Command::Assign(assign("new"))), Some(Refusal::ObserveOnly));
    assert_eq!(refusal(&some, &Command::Assign(assign("theirs"))), not_yours());
    let fresh = AssignCommand { must_be_new: true, ..assign("mine") };
    let exists = |job, may_release| Some(Refusal::JobExists { job, may_release });
    assert_eq!(refusal(&some, &Command::Assign(fresh)), exists(mine, true));
    let fresh = AssignCommand { must_be_new: true, ..assign("theirs") };
    assert_eq!(refusal(&some, &Command::Assign(fresh)), exists(theirs.clone(), false));
    assert_eq!(refusal(&some, &release("theirs")), not_yours());
    let gone = "gone".parse().unwrap();
    assert_eq!(refusal(&some, &release("gone")), Some(Refusal::NoSuchJob { job: gone }));
}

#[test]
fn a_user_may_name_a_limited_number_of_processes_in_one_command() {
    let some = AdmissionRules { user_max_cores: 2, ..AdmissionRules::default() };
    let assign_all = |number: u32| {
        Command::Assign(AssignCommand { pids: (1..=number).map(Pid).collect(), ..assign("mine") })
    };
    assert_eq!(answer(&some, &assign_all(1024)), None);
    let refused = refusal(&some, &assign_all(1025));
    assert_eq!(refused, Some(Refusal::TooManyProcesses { given: 1025, most: 1024 }));
}

#[test]
fn other_commands_go_to_the_loop() {
    let none = AdmissionRules::default();
    let some = AdmissionRules { user_max_cores: 2, ..AdmissionRules::default() };
    assert_eq!(answer(&some, &Command::Assign(assign("new"))), None);
    assert_eq!(answer(&none, &Command::Assign(assign("mine"))), None, "own processes may join an own job");
    assert_eq!(answer(&none, &release("mine")), None);
    assert_eq!(answer(&none, &Command::ReleaseAll { caller: ME }), None);
}

#[test]
fn release_all_of_a_user_without_jobs_releases_nothing() {
    let caller = Caller { uid: Uid(1003), is_admin: false };
    let answer = answer(&AdmissionRules::default(), &Command::ReleaseAll { caller });
    assert_eq!(answer, Some(Ok(Reply::Released(Vec::new()))));
}

#[test]
fn only_administrators_may_defragment() {
    let any = AdmissionRules { user_max_cores: 8, ..AdmissionRules::default() };
    assert_eq!(refusal(&any, &Command::Defrag { caller: ME }), Some(Refusal::DefragNeedsAdmin));
}

#[test]
fn administrators_pass_admission() {
    let caller = Caller { is_admin: true, ..ME };
    for command in [
        Command::Assign(AssignCommand { caller, ..assign("theirs") }),
        Command::Release { job: "gone".parse().unwrap(), caller },
        Command::ReleaseAll { caller },
        Command::Defrag { caller },
    ] {
        assert_eq!(
            answer(&AdmissionRules { mode: DaemonMode::Observe, ..AdmissionRules::default() }, &command),
            None
        );
    }
}

#[test]
fn a_user_may_send_a_burst_and_then_one_command_per_period() {
    let mut rates = RateLimiter::default();
    let mut now = Instant::now();
    let admitted = |rates: &mut RateLimiter, uid, now| {
        let command = want(Caller { uid: Uid(uid), is_admin: false });
        (0..100).filter(|_| rates.admit(&command, now)).count()
    };
    assert_eq!(admitted(&mut rates, 1001, now), BURST as usize);
    assert_eq!(admitted(&mut rates, 1002, now), BURST as usize, "each user has a rate of their own");
    now += PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), 1);
    now += 3 * PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), 3);
    now += 10 * BURST * PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), BURST as usize, "patience is not saved up");
    assert!(rate_limit_message().contains("30 at once and then 2 a second"), "{}", rate_limit_message());
}

#[test]
fn a_user_who_sends_other_commands_too_often_may_release() {
    let mut rates = RateLimiter::default();
    let now = Instant::now();
    let mut admitted = |command: &Command| (0..100).filter(|_| rates.admit(command, now)).count();
    assert_eq!(admitted(&Command::Assign(assign("new"))), BURST as usize);
    assert_eq!(admitted(&want(ME)), 0, "all commands but releases have one limit");
    assert_eq!(admitted(&release("mine")), BURST as usize);
    assert_eq!(admitted(&Command::ReleaseAll { caller: ME }), 0, "releases are limited too");
    let admin = Caller { is_admin: true, ..ME };
    assert_eq!(admitted(&want(admin)), 100, "administrators have no limit");
}

#[test]
fn idle_users_are_removed_from_memory() {
    let mut rates = RateLimiter::default();
    let mut now = Instant::now();
    for uid in 0..100_000 {
        now += PERIOD / 100;
        assert!(rates.admit(&want(Caller { uid: Uid(uid), is_admin: false }), now));
        assert!(rates.until.len() <= PRUNE_FROM);
    }
}

#[test]
fn refusals_are_logged_with_a_count_once_per_period() {
    let mut refusals = RefusalLog::default();
    let start = Instant::now();
    assert_eq!(refusals.count_refusal(start), Some(1));
    assert!((1..100).all(|n| refusals.count_refusal(start + LOG_PERIOD * n / 100).is_none()));
    assert_eq!(refusals.count_refusal(start + LOG_PERIOD), Some(100));
}
