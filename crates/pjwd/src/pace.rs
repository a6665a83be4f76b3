//! Whether the warden keeps up with the machine: how long what is due has to wait for its cycle, and a newborn for its
//! mask.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pjw_core::newborn::Birth;
use pjw_core::process::{Pid, ThreadId};
use pjw_core::snapshot::Nanos;

/// Whatever waits longer is late: people would notice.
const LATE: Duration = Duration::from_millis(250);
/// So long nothing may be late before the warden has caught up.
const CALM: Duration = Duration::from_secs(5);

/// How long after its birth, as the kernel dates it, each newborn was right. `now` is the same moment on both clocks.
pub fn reactions(
    births: &BTreeMap<Pid, Birth>,
    welcomed: &[(ThreadId, Instant)],
    now: (Instant, Nanos),
) -> impl Iterator<Item = (Pid, Duration)> {
    let (now, by_kernel) = (now.0, Duration::from_nanos(now.1.0));
    welcomed.iter().filter_map(move |&(thread, done)| {
        let pid = thread.process.pid;
        let born = Duration::from_nanos(births.get(&pid)?.at.0);
        let done = by_kernel.saturating_sub(now.saturating_duration_since(done));
        Some((pid, done.saturating_sub(born)))
    })
}

/// The latest delay that counts.
#[derive(Debug, Default)]
pub struct Pace {
    late: Option<(Duration, Instant)>,
}

impl Pace {
    /// Something was due so long ago when its cycle began.
    pub fn note(&mut self, waited: Duration, now: Instant) {
        let worst = self.behind(now).unwrap_or_default();
        if waited > LATE {
            self.late = Some((worst.max(waited), now));
        }
    }

    /// By how much the warden was late at most, since it last kept up; `None` if it does.
    #[must_use]
    pub fn behind(&self, now: Instant) -> Option<Duration> {
        self.late.filter(|(_, at)| now.saturating_duration_since(*at) < CALM).map(|(by, _)| by)
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::process::{ProcessId, StartTime, Tid};

    use super::*;

    #[test]
    fn whoever_is_late_is_behind_until_nothing_was_late_for_a_while() {
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let mut pace = Pace::default();
        pace.note(ms(250), begin);
        assert_eq!(pace.behind(begin), None, "that is no delay worth telling");
        pace.note(ms(900), begin);
        pace.note(ms(300), begin + ms(4000));
        assert_eq!(pace.behind(begin + ms(8_999)), Some(ms(900)), "the worst of them is told");
        pace.note(ms(1), begin + ms(8_999));
        assert_eq!(pace.behind(begin + ms(9_000)), None);
        pace.note(ms(300), begin + ms(14_000));
        assert_eq!(pace.behind(begin + ms(14_000)), Some(ms(300)), "what is over is forgotten");
    }

    #[test]
    fn a_reaction_is_the_time_from_the_birth_to_the_mask() {
        let (done, ms) = (Instant::now(), Duration::from_millis);
        let birth = |at| Birth { ancestor: Pid(1), at: Nanos(at) };
        let births = BTreeMap::from([(Pid(7), birth(2_000_000)), (Pid(8), birth(9_000_000))]);
        let now = (done + ms(3), Nanos(10_000_000));
        let thread = |pid| ThreadId {
            process: ProcessId { pid: Pid(pid), start: StartTime(1) },
            tid: Tid(pid),
            start: StartTime(1),
        };
        let told: Vec<_> = reactions(&births, &[(thread(7), done), (thread(9), done)], now).collect();
        assert_eq!(told, [(Pid(7), ms(5))], "nobody told of the birth of 9");
    }
}
