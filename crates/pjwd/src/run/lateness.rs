//! The lateness of the event loop: how long a due cycle waits before it starts, and how long a new process waits for
//! its affinity mask.

use std::time::{Duration, Instant};

use pjw_core::time::Nanos;

use crate::view::status::CycleDelay;
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

/// The delays of one cycle (scan, decision and changes) of the daemon. A delay is the time from the due time of a work
/// to the beginning of the cycle that does it.
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkDelays {
    /// The time for which process events waited. 0 if the cycle was not due because of process events.
    pub events: Duration,
    /// The delay of the periodic scan of the processes of jobs. 0 if the cycle does not include it.
    pub scan: Duration,
    /// The longest time for which the CPU budget for process events puts them off.
    pub longest_put_off: Duration,
}

/// The longest delay of the recent late cycles (scan, decision and changes) of the daemon. The delay of a cycle is
/// the time from its due time to its beginning. A cycle is late if its delay is longer than 250 ms. After 5 s without
/// a late cycle, the earlier late cycles no longer count.
#[derive(Debug, Default)]
pub struct LongestCycleDelay {
    /// The longest delay of the recent late cycles, and the time at which the last of them began.
    late: Option<(CycleDelay, Instant)>,
    /// Whether process events were put off since the last cycle.
    were_events_put_off: bool,
}

impl LongestCycleDelay {
    /// Records that process events were put off, because the CPU budget for them was used up.
    pub fn record_events_put_off(&mut self) {
        self.were_events_put_off = true;
    }

    /// Records a cycle (scan, decision and changes) of the daemon. `begun_at` is the time at which the cycle began, and
    /// its delay is the longer one in `delays`.
    ///
    /// A delay of at most 250 ms changes nothing. Of the longer delays, the longest one is stored. It is dropped when
    /// no cycle has had a delay of more than 250 ms for 5 s.
    ///
    /// The CPU budget counts as the cause if events were put off ([`Self::record_events_put_off`]), and if they waited
    /// hardly longer than the budget requires. It does not delay a periodic scan.
    pub fn record(&mut self, delays: WorkDelays, begun_at: Instant) {
        let WorkDelays { events, scan, longest_put_off } = delays;
        let were_put_off = std::mem::take(&mut self.were_events_put_off);
        let is_by_cpu_budget = were_put_off && events >= scan && events <= longest_put_off + THRESHOLD;
        let delay = CycleDelay { length: events.max(scan), is_by_cpu_budget };
        if delay.length > THRESHOLD {
            let before = self.max_delay(begun_at).filter(|before| before.length >= delay.length);
            self.late = Some((before.unwrap_or(delay), begun_at));
        }
    }

    /// Returns the longest delay of the recent late cycles (scan, decision and changes) of the daemon. The delay of a
    /// cycle is the time from its due time to its beginning. A cycle is late if its delay is longer than 250 ms.
    /// `now` is the current time. Returns `None` if no late cycle began in the last 5 s.
    #[must_use]
    pub fn max_delay(&self, now: Instant) -> Option<CycleDelay> {
        let (max_delay, last_begun_at) = self.late?;
        (now.saturating_duration_since(last_begun_at) < RECOVERY_TIME).then_some(max_delay)
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::Pid;

    use super::*;

    const PUT_OFF: Duration = Duration::from_millis(500);

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// The delays of a cycle whose periodic scan is late.
    fn late_scan(delay: Duration) -> WorkDelays {
        WorkDelays { scan: delay, longest_put_off: PUT_OFF, ..WorkDelays::default() }
    }

    #[test]
    fn the_loop_is_late_until_no_cycle_was_late_for_the_recovery_time() {
        let begin = Instant::now();
        let mut lateness = LongestCycleDelay::default();
        let length = |lateness: &LongestCycleDelay, now| lateness.max_delay(now).map(|delay| delay.length);
        lateness.record(late_scan(ms(250)), begin);
        assert_eq!(lateness.max_delay(begin), None, "that is no delay worth telling");
        lateness.record(late_scan(ms(900)), begin);
        lateness.record(late_scan(ms(300)), begin + ms(4000));
        assert_eq!(length(&lateness, begin + ms(8_999)), Some(ms(900)), "the longest of these delays");
        lateness.record(late_scan(ms(1)), begin + ms(8_999));
        assert_eq!(lateness.max_delay(begin + ms(9_000)), None);
        lateness.record(late_scan(ms(300)), begin + ms(14_000));
        assert_eq!(length(&lateness, begin + ms(14_000)), Some(ms(300)), "what is over is forgotten");
    }

    #[test]
    fn a_delay_is_by_the_cpu_budget_if_events_were_put_off_for_about_as_long() {
        let begin = Instant::now();
        let is_by_cpu_budget = |were_put_off: bool, events: u64, scan: u64| {
            let mut lateness = LongestCycleDelay::default();
            if were_put_off {
                lateness.record_events_put_off();
            }
            let (events, scan) = (ms(events), ms(scan));
            lateness.record(WorkDelays { events, scan, longest_put_off: PUT_OFF }, begin);
            let first = lateness.max_delay(begin).unwrap();
            // Events were put off before the first cycle only.
            lateness.record(WorkDelays { events: ms(749), scan: ms(0), longest_put_off: PUT_OFF }, begin);
            let second = lateness.max_delay(begin).unwrap();
            assert!(!second.is_by_cpu_budget || second == first, "{second:?}");
            first.is_by_cpu_budget
        };
        assert!(is_by_cpu_budget(true, 600, 0));
        assert!(!is_by_cpu_budget(false, 600, 0), "pjwd did not run");
        assert!(!is_by_cpu_budget(true, 68_543, 0), "the budget puts events off for 500 ms at most");
        assert!(!is_by_cpu_budget(true, 400, 600), "the scan is later than the events");
        assert!(!is_by_cpu_budget(true, 0, 600));
    }

    #[test]
    fn a_reaction_time_is_the_time_from_the_fork_to_the_mask() {
        let confined_at = Instant::now();
        let fork = ConfinedNewProcess { pid: Pid(7), forked_at: Nanos(2_000_000), confined_at };
        assert_eq!(reaction_time(&fork, (confined_at + ms(3), Nanos(10_000_000))), ms(5));
    }
}
