//! Tests of what is known about owners.

use super::*;
use crate::testing::job;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Nanos {
    Nanos(seconds * 1_000_000_000)
}

#[test]
fn the_most_used_cores_of_a_period_are_known_after_the_period() {
    let (mut state, web) = (LendingState::default(), job("web"));
    let most =
        |state: &LendingState, now| state.owner_state(&web).unwrap().max_used_cores(SECOND * 2, at(now));
    state.record_use(&web, 1, 4, &CpuSet::new(), at(10));
    assert_eq!(most(&state, 11), None, "not sampled for two seconds");
    assert_eq!(most(&state, 12), Some(1));
    state.record_use(&web, 3, 4, &CpuSet::new(), at(13));
    state.record_use(&web, 0, 4, &CpuSet::new(), at(14));
    assert_eq!(most(&state, 15), Some(3), "a peak counts for two seconds");
    assert_eq!(most(&state, 16), Some(0));
}

#[test]
fn each_return_doubles_the_pause_and_quiet_time_halves_it() {
    let (mut state, web) = (LendingState::default(), job("web"));
    let pause = |state: &LendingState, now| {
        state.owner_state(&web).unwrap().required_idle_time(SECOND, at(now)).as_secs()
    };
    for (now, expected) in [(0, 2), (1, 4), (2, 4), (3, 4)] {
        state.record_lending_change(&web, true, SECOND, at(now));
        assert_eq!(pause(&state, now), expected, "after the return at {now} s");
    }
    assert_eq!(pause(&state, 3 + 7), 4);
    assert_eq!(pause(&state, 3 + 8), 2, "two pauses of 4 s");
    assert_eq!(pause(&state, 3 + 8 + 4), 1);
}
