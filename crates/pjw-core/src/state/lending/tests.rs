//! Tests of what is known about owners.

use super::*;
use crate::testing::job;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Nanos {
    Nanos(seconds * 1_000_000_000)
}

#[test]
fn the_most_busy_cores_of_a_period_are_known_after_the_period() {
    let (mut state, web) = (LendingState::default(), job("web"));
    let most =
        |state: &LendingState, now| state.owner_state(&web).unwrap().max_busy_cores(SECOND * 2, at(now));
    let too_busy = |cores| UsedCores { too_busy_to_lend: cores, ..UsedCores::default() };
    state.record_use(&web, too_busy(1), 4, at(10));
    assert_eq!(most(&state, 11), None, "not sampled for two seconds");
    assert_eq!(most(&state, 12), Some(1));
    state.record_use(&web, too_busy(3), 4, at(13));
    state.record_use(&web, too_busy(0), 4, at(14));
    assert_eq!(most(&state, 15), Some(3), "a peak counts for two seconds");
    assert_eq!(most(&state, 16), Some(0));
}

fn pause(state: &LendingState, now: u64) -> u64 {
    state.owner_state(&job("web")).unwrap().required_idle_time(SECOND, at(now)).as_secs()
}

#[test]
fn each_return_after_a_short_loan_doubles_the_pause_and_quiet_time_halves_it() {
    let (mut state, web) = (LendingState::default(), job("web"));
    for (now, expected) in [(0, 2), (1, 4), (2, 4), (3, 4)] {
        state.record_loan(&web, at(now));
        state.record_return(&web, SECOND, at(now));
        assert_eq!(pause(&state, now), expected, "after the return at {now} s");
    }
    assert_eq!(pause(&state, 3 + 7), 4);
    assert_eq!(pause(&state, 3 + 8), 2, "two pauses of 4 s");
    assert_eq!(pause(&state, 3 + 8 + 4), 1);
}

#[test]
fn a_return_after_a_loan_of_four_pauses_leaves_the_pause_as_it_is() {
    let (mut state, web) = (LendingState::default(), job("web"));
    state.record_loan(&web, at(10));
    state.record_return(&web, SECOND, at(14));
    assert_eq!(pause(&state, 14), 1);
    state.record_loan(&web, at(20));
    state.record_return(&web, SECOND, at(23));
    assert_eq!(pause(&state, 23), 2);
    state.record_loan(&web, at(24));
    state.record_return(&web, SECOND, at(28));
    assert_eq!(pause(&state, 28), 1, "the quiet time counts from the return at 23 s");
}
