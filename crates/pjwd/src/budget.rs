//! What share of one PU the cycles that events cause may use: a storm of births must not make the warden one.
//!
//! Time is saved up while little happens and spent by cycles. Whoever has spent too much waits until it is earned; the
//! events that come in meanwhile are served together. Cycles of the timer and of people's wishes neither wait nor spend.

use std::time::{Duration, Instant};

/// The most that can be saved up: a burst of births after a quiet time is served one by one.
const MOST_SAVED: Duration = Duration::from_millis(50);
/// The most that one cycle can put it into debt: a long one that was needed once must not make everybody wait.
const MOST_OWED: Duration = Duration::from_millis(100);

/// The account.
#[derive(Debug)]
pub struct Budget {
    permille: u32,
    /// Nanoseconds saved, or owed.
    saved: i128,
    at: Instant,
}

impl Budget {
    /// An account with a full purse.
    #[must_use]
    pub fn new(permille: u32, now: Instant) -> Self {
        Self { permille, saved: nanos(MOST_SAVED), at: now }
    }

    /// Another share from now on.
    pub fn set(&mut self, permille: u32) {
        self.permille = permille;
    }

    /// Takes down what a cycle used.
    pub fn spend(&mut self, used: Duration, now: Instant) {
        self.earn(now);
        self.saved = (self.saved - nanos(used)).max(-nanos(MOST_OWED));
    }

    /// How long events have to wait from now.
    #[must_use]
    pub fn wait(&mut self, now: Instant) -> Duration {
        self.earn(now);
        let owed = u64::try_from(-self.saved).unwrap_or(0);
        Duration::from_nanos(owed.saturating_mul(1000) / u64::from(self.permille.max(1)))
    }

    fn earn(&mut self, now: Instant) {
        let passed = nanos(now.saturating_duration_since(self.at));
        self.at = self.at.max(now);
        self.saved = (self.saved + passed * i128::from(self.permille) / 1000).min(nanos(MOST_SAVED));
    }
}

fn nanos(time: Duration) -> i128 {
    i128::try_from(time.as_nanos()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_was_saved_is_spent_at_once_and_the_rest_has_to_be_earned() {
        let begin = Instant::now();
        let mut budget = Budget::new(100, begin);
        budget.spend(50 * MS, begin);
        assert_eq!(budget.wait(begin), Duration::ZERO);
        budget.spend(2 * MS, begin);
        assert_eq!(budget.wait(begin), 20 * MS, "a tenth of a PU earns 2 ms in 20");
        assert_eq!(budget.wait(begin + 15 * MS), 5 * MS);
        assert_eq!(budget.wait(begin + 20 * MS), Duration::ZERO);
    }

    #[test]
    fn nobody_saves_for_ever_or_owes_for_ever() {
        let begin = Instant::now();
        let mut budget = Budget::new(1000, begin);
        let later = begin + Duration::from_secs(3600);
        budget.spend(51 * MS, later);
        assert_eq!(budget.wait(later), MS);
        budget.spend(Duration::from_secs(60), later);
        assert_eq!(budget.wait(later), 100 * MS);
        budget.set(100);
        assert_eq!(budget.wait(later), 1000 * MS);
    }

    #[test]
    fn a_clock_that_is_asked_late_takes_nothing_back() {
        let begin = Instant::now();
        let mut budget = Budget::new(1000, begin + 10 * MS);
        budget.spend(60 * MS, begin + 10 * MS);
        assert_eq!(budget.wait(begin), 10 * MS);
    }
}
