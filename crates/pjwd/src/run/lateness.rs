//! The lateness of the event loop: how long a due cycle waits before it starts, and how long a new process waits for
//! its affinity mask.

use std::time::{Duration, Instant};

use pjw_core::time::Nanos;

use crate::warden::ConfinedNewProcess;

/// A longer wait counts as late.
const THRESHOLD: Duration = Duration::from_millis(250);
/// After this time without a late cycle, the loop is on time again.
const RECOVERY_TIME: Duration = Duration::from_secs(5);

/// Returns the time from the fork of a process to the change of its affinity mask. The two times in `fork`
/// are from different clocks: the time of the fork is from CLOCK_BOOTTIME ([`Nanos`]), and the time of the
/// change is from CLOCK_MONOTONIC ([`Instant`]). `now` must be the current time on both clocks. The function
/// needs it to convert the time of the change to CLOCK_BOOTTIME.
#[must_use]
pub fn reaction_time(fork: &ConfinedNewProcess, now: (Instant, Nanos)) -> Duration {
    let since_boot = Duration::from_nanos(now.1.0);
    let confined_at = since_boot.saturating_sub(now.0.saturating_duration_since(fork.confined_at));
    confined_at.saturating_sub(Duration::from_nanos(fork.forked_at.0))
}

/// The longest delay among the daemon's recent late cycles (scan, decision and changes). A delay is the time
/// that a cycle waited after it was due. A cycle is late if its delay is longer than 250 ms. The value is
/// forgotten when no cycle was late for 5 s.
#[derive(Debug, Default)]
pub struct CycleDelay {
    late: Option<(Duration, Instant)>,
}

impl CycleDelay {
    /// Records a cycle (scan, decision and changes) of the daemon that began at the time `now`. `waited` is the time
    /// for which the cycle waited after it was due.
    pub fn record(&mut self, waited: Duration, now: Instant) {
        let worst = self.max_wait(now).unwrap_or_default();
        if waited > THRESHOLD {
            self.late = Some((worst.max(waited), now));
        }
    }

    /// Returns the longest time that a recent late cycle (scan, decision and changes) waited after it was due. A cycle
    /// is late if it waited for more than 250 ms. Returns `None` if no cycle was late in the 5 s before `now`.
    /// After 5 s without a late cycle, all earlier late cycles are forgotten.
    #[must_use]
    pub fn max_wait(&self, now: Instant) -> Option<Duration> {
        self.late.filter(|(_, at)| now.saturating_duration_since(*at) < RECOVERY_TIME).map(|(by, _)| by)
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::Pid;

    use super::*;

    #[test]
    fn the_loop_is_late_until_no_cycle_was_late_for_the_recovery_time() {
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let mut lateness = CycleDelay::default();
        lateness.record(ms(250), begin);
        assert_eq!(lateness.max_wait(begin), None, "that is no delay worth telling");
        lateness.record(ms(900), begin);
        lateness.record(ms(300), begin + ms(4000));
        assert_eq!(lateness.max_wait(begin + ms(8_999)), Some(ms(900)), "the worst of them is told");
        lateness.record(ms(1), begin + ms(8_999));
        assert_eq!(lateness.max_wait(begin + ms(9_000)), None);
        lateness.record(ms(300), begin + ms(14_000));
        assert_eq!(lateness.max_wait(begin + ms(14_000)), Some(ms(300)), "what is over is forgotten");
    }

    #[test]
    fn a_reaction_time_is_the_time_from_the_fork_to_the_mask() {
        let (confined_at, ms) = (Instant::now(), Duration::from_millis);
        let fork = ConfinedNewProcess { pid: Pid(7), forked_at: Nanos(2_000_000), confined_at };
        assert_eq!(reaction_time(&fork, (confined_at + ms(3), Nanos(10_000_000))), ms(5));
    }
}
