//! The lateness of the event loop: how long a due cycle waits before it starts, and how long a new process waits for
//! its affinity mask.

use std::time::{Duration, Instant};

use pjw_core::time::Nanos;

use crate::warden::ConfinedNewProcess;

/// A longer wait counts as late.
const THRESHOLD: Duration = Duration::from_millis(250);
/// After this time without a late cycle, the loop is on time again.
const RECOVERY_TIME: Duration = Duration::from_secs(5);

/// Returns the time from the fork of `new_process` to the change of its affinity mask. The two times in `new_process`
/// come from different clocks: the time of the fork from CLOCK_BOOTTIME ([`Nanos`]), and the time of the change from
/// CLOCK_MONOTONIC ([`Instant`]). `now` and `since_boot` are the current time on CLOCK_MONOTONIC and on CLOCK_BOOTTIME,
/// for the conversion from one clock to the other.
#[must_use]
pub fn reaction_time(new_process: &ConfinedNewProcess, (now, since_boot): (Instant, Nanos)) -> Duration {
    let time_since_change = now.saturating_duration_since(new_process.confined_at);
    let confined_at = Duration::from_nanos(since_boot.0).saturating_sub(time_since_change);
    confined_at.saturating_sub(Duration::from_nanos(new_process.forked_at.0))
}

/// The longest delay of the recent late cycles (scan, decision and changes) of the daemon. The delay of a cycle is
/// the time from its due time to its beginning. A cycle is late if its delay is longer than 250 ms. After 5 s without
/// a late cycle, the earlier late cycles no longer count.
#[derive(Debug, Default)]
pub struct LongestCycleDelay {
    /// The longest delay of the recent late cycles, and the time at which the last of them began.
    late: Option<(Duration, Instant)>,
}

impl LongestCycleDelay {
    /// Records a cycle (scan, decision and changes) of the daemon. `begun_at` is the time at which the cycle began.
    /// `delay` is the time from the due time of the cycle to `begun_at`.
    ///
    /// A delay of at most 250 ms changes nothing. Of the longer delays, the longest one is stored. It is dropped when
    /// no cycle has had a delay of more than 250 ms for 5 s.
    pub fn record(&mut self, delay: Duration, begun_at: Instant) {
        let worst = self.max_delay(begun_at).unwrap_or_default();
        if delay > THRESHOLD {
            self.late = Some((worst.max(delay), begun_at));
        }
    }

    /// Returns the longest delay of the recent late cycles (scan, decision and changes) of the daemon. The delay of a
    /// cycle is the time from its due time to its beginning. A cycle is late if its delay is longer than 250 ms.
    /// `now` is the current time. Returns `None` if no late cycle began in the last 5 s.
    #[must_use]
    pub fn max_delay(&self, now: Instant) -> Option<Duration> {
        let (max_delay, last_begun_at) = self.late?;
        (now.saturating_duration_since(last_begun_at) < RECOVERY_TIME).then_some(max_delay)
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::Pid;

    use super::*;

    #[test]
    fn the_loop_is_late_until_no_cycle_was_late_for_the_recovery_time() {
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let mut lateness = LongestCycleDelay::default();
        lateness.record(ms(250), begin);
        assert_eq!(lateness.max_delay(begin), None, "that is no delay worth telling");
        lateness.record(ms(900), begin);
        lateness.record(ms(300), begin + ms(4000));
        assert_eq!(lateness.max_delay(begin + ms(8_999)), Some(ms(900)), "the longest of these delays");
        lateness.record(ms(1), begin + ms(8_999));
        assert_eq!(lateness.max_delay(begin + ms(9_000)), None);
        lateness.record(ms(300), begin + ms(14_000));
        assert_eq!(lateness.max_delay(begin + ms(14_000)), Some(ms(300)), "what is over is forgotten");
    }

    #[test]
    fn a_reaction_time_is_the_time_from_the_fork_to_the_mask() {
        let (confined_at, ms) = (Instant::now(), Duration::from_millis);
        let fork = ConfinedNewProcess { pid: Pid(7), forked_at: Nanos(2_000_000), confined_at };
        assert_eq!(reaction_time(&fork, (confined_at + ms(3), Nanos(10_000_000))), ms(5));
    }
}
