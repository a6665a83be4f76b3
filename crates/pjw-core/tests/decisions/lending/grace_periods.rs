//! Grace periods: a borrower keeps a core for a while after the notice that the core goes back.

use std::collections::BTreeSet;

use pjw_core::core_map::CoreMap;

use super::*;

/// The core map of the job `batch`.
fn map(m: &Machine) -> CoreMap {
    core_map(&m.state, &m.policy, &m.state.jobs[&job("batch")]).unwrap()
}

#[test]
fn a_grace_period_is_announced_in_the_core_map_and_ends() {
    let mut m = web_and_batch();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    web_uses(&mut m, 0, 3);
    sample(&mut m, 6, "");
    m.settle();
    let deadline = m.state.lending.next_grace_period_end().unwrap();
    assert_eq!(
        (map(&m).borrowed, map(&m).leaving, map(&m).leaving_at),
        (cpu_set("2-7"), cpu_set("2-5"), Some(deadline))
    );
    m.advance(4 * SECOND);
    assert!(!would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.advance(SECOND);
    assert!(would_change_loans(&m.state, &m.policy, Nanos(m.now())));
    m.settle();
    assert_eq!(
        (m.grant("batch").as_str(), map(&m).leaving, m.state.lending.next_grace_period_end()),
        ("6-7", cpu_set(""), None)
    );
    assert_sound(&m);
}

#[test]
fn a_core_stays_lent_if_the_owner_leaves_it_idle_for_long_enough_before_the_grace_period_ends() {
    let mut m = web_and_batch();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    web_uses(&mut m, 0, 3);
    let mut texts = Vec::new();
    let mut deadlines = BTreeSet::new();
    // The demand changes for a while, and then there is none for two seconds.
    for used in [6, 0, 6, 0, 6].into_iter().chain([0; 21]) {
        sample(&mut m, used, "");
        m.settle();
        texts.extend(m.events.iter().map(|event| event.text.clone()));
        deadlines.insert(m.state.lending.next_grace_period_end());
        m.advance(SECOND / 10);
    }
    assert_eq!((lent(&m).as_str(), m.state.lending.next_grace_period_end()), ("1-5", None));
    assert_eq!(deadlines.len(), 2, "one notice: {deadlines:?}");
    texts.retain(|text| text.contains("CPUs 2-5"));
    let (announced, withdrawn) =
        ("needs CPUs 2-5: taken back in 5s", "leaves CPUs 2-5 idle again: not taken back");
    assert!(texts.len() == 2 && texts[0].contains(announced) && texts[1].contains(withdrawn), "{texts:?}");
}

#[test]
fn a_grace_period_ends_with_its_borrower() {
    let mut m = web_and_batch();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    web_uses(&mut m, 0, 3);
    sample(&mut m, 6, "");
    m.settle();
    assert!(m.state.lending.next_grace_period_end().is_some());
    m.release("batch").unwrap();
    assert_eq!(m.state.lending.next_grace_period_end(), None);
}

#[test]
fn two_grace_periods_show_the_earlier_end() {
    let mut m = web_and_batch();
    m.policy.lending.revocation_grace = Duration::from_secs(5);
    web_uses(&mut m, 0, 3);
    // Of six cores, three are in use and one is the buffer: two may stay lent.
    sample(&mut m, 3, "");
    m.settle();
    let first_end = map(&m).leaving_at.unwrap();
    assert_eq!((map(&m).borrowed, map(&m).leaving), (cpu_set("2-7"), cpu_set("4-5")));
    m.advance(SECOND);
    sample(&mut m, 6, "");
    m.settle();
    assert_eq!((map(&m).leaving, map(&m).leaving_at), (cpu_set("2-5"), Some(first_end)));
    m.advance(4 * SECOND);
    m.settle();
    let second_end = map(&m).leaving_at.unwrap();
    assert_eq!((map(&m).borrowed, map(&m).leaving), (cpu_set("2-3,6-7"), cpu_set("2-3")));
    assert!(second_end.0 >= first_end.0 + SECOND, "{first_end:?} {second_end:?}");
    m.advance(SECOND);
    m.settle();
    assert_eq!((map(&m).borrowed, map(&m).leaving_at), (cpu_set("6-7"), None));
    assert_sound(&m);
}
