//! Whom the loop never hears of.

use pjw_core::command::Assign;
use pjw_core::job::Amount;

use super::*;

const ME: Caller = Caller { uid: Uid(1001), admin: false };

fn assign(job: &str) -> Assign {
    Assign {
        job: job.parse().unwrap(),
        amount: Some(Amount::Cores(1)),
        placement: None,
        class: None,
        near: None,
        bind_memory: None,
        isolated: None,
        pids: Vec::new(),
        session: None,
        fresh: false,
        owner: None,
        caller: ME,
    }
}

fn release(job: &str) -> Command {
    Command::Release { job: job.parse().unwrap(), caller: ME }
}

/// The answer on a node with a job of mine and one of another's.
fn answer(rules: &Rules, command: &Command) -> Option<Result<Reply, Refusal>> {
    let job = |id: &str, owner| Job { id: id.to_owned(), owner, ..Job::default() };
    foregone(rules, &[job("manual:mine", 1001), job("manual:theirs", 1002)], command)
}

fn refusal(rules: &Rules, command: &Command) -> Option<Refusal> {
    answer(rules, command).map(Result::unwrap_err)
}

#[test]
fn what_the_view_is_enough_to_refuse_never_reaches_the_loop() {
    let none = Rules::default();
    let some = Rules { user_max_cores: 2, ..Rules::default() };
    let observing = Rules { mode: Mode::Observe, ..some.clone() };
    let (mine, theirs): (JobId, JobId) = ("mine".parse().unwrap(), "theirs".parse().unwrap());
    let not_yours = || Some(Refusal::NotYourJob { job: theirs.clone(), owner: Uid(1002) });

    assert_eq!(refusal(&none, &Command::Assign(assign("new"))), Some(Refusal::UsersMayNot));
    assert_eq!(refusal(&observing, &Command::Assign(assign("new"))), Some(Refusal::ObserveOnly));
    assert_eq!(refusal(&some, &Command::Assign(assign("theirs"))), not_yours());
    let fresh = Assign { fresh: true, ..assign("mine") };
    assert_eq!(refusal(&some, &Command::Assign(fresh)), Some(Refusal::JobExists { job: mine }));
    assert_eq!(refusal(&some, &release("theirs")), not_yours());
    let gone = "gone".parse().unwrap();
    assert_eq!(refusal(&some, &release("gone")), Some(Refusal::NoSuchJob { job: gone }));
}

#[test]
fn what_needs_facts_goes_to_the_loop() {
    let none = Rules::default();
    let some = Rules { user_max_cores: 2, ..Rules::default() };
    assert_eq!(answer(&some, &Command::Assign(assign("new"))), None);
    assert_eq!(answer(&none, &Command::Assign(assign("mine"))), None, "own processes may join an own job");
    assert_eq!(answer(&none, &release("mine")), None);
    assert_eq!(answer(&none, &Command::ReleaseAll { caller: ME }), None);
}

#[test]
fn who_has_no_job_has_none_to_release() {
    let caller = Caller { uid: Uid(1003), admin: false };
    let answer = answer(&Rules::default(), &Command::ReleaseAll { caller });
    assert_eq!(answer, Some(Ok(Reply::Released(Vec::new()))));
}

#[test]
fn who_is_no_administrator_moves_nobody() {
    let any = Rules { user_max_cores: 8, ..Rules::default() };
    assert_eq!(refusal(&any, &Command::Defrag { caller: ME }), Some(Refusal::MovesAreForAdmins));
}

#[test]
fn administrators_are_not_judged_here() {
    let caller = Caller { admin: true, ..ME };
    for command in [
        Command::Assign(Assign { caller, ..assign("theirs") }),
        Command::Release { job: "gone".parse().unwrap(), caller },
        Command::ReleaseAll { caller },
        Command::Defrag { caller },
    ] {
        assert_eq!(answer(&Rules { mode: Mode::Observe, ..Rules::default() }, &command), None);
    }
}

#[test]
fn a_user_may_ask_for_so_much_at_once_and_then_now_and_then() {
    let mut rates = Rates::default();
    let mut now = Instant::now();
    let admitted = |rates: &mut Rates, uid, now| (0..100).filter(|_| rates.admit(Uid(uid), now)).count();
    assert_eq!(admitted(&mut rates, 1001, now), BURST as usize);
    assert_eq!(admitted(&mut rates, 1002, now), BURST as usize, "each user has a rate of their own");
    now += PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), 1);
    now += 3 * PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), 3);
    now += 10 * BURST * PERIOD;
    assert_eq!(admitted(&mut rates, 1001, now), BURST as usize, "patience is not saved up");
    assert!(too_often().contains("30 at once and then 2 a second"), "{}", too_often());
}

#[test]
fn users_without_number_are_forgotten_when_they_are_quiet() {
    let mut rates = Rates::default();
    let mut now = Instant::now();
    for uid in 0..100_000 {
        now += PERIOD / 100;
        assert!(rates.admit(Uid(uid), now));
        assert!(rates.until.len() <= MANY_USERS);
    }
}

#[test]
fn refusals_are_a_line_with_a_count_now_and_then() {
    let mut refusals = Refusals::default();
    let start = Instant::now();
    assert_eq!(refusals.due(start), Some(1));
    assert!((1..100).all(|n| refusals.due(start + QUIET * n / 100).is_none()));
    assert_eq!(refusals.due(start + QUIET), Some(100));
}
