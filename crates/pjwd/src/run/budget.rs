//! A CPU budget, as a share of one PU. The event loop has one for process events, and each thread one for its real-time
//! priority ([`super::realtime`]).
//!
//! Without a budget, a fork storm would make the warden use a whole PU. Credit accrues with time. Reading process
//! events, and the cycles that they trigger, spend credit. While the balance is negative, events wait and are processed
//! together later. Cycles that the timer or a command triggers neither wait nor spend credit.

use std::time::{Duration, Instant};

/// The largest credit. After an idle period, a short burst of fork events is processed without delay.
const MAX_CREDIT: Duration = Duration::from_millis(50);
/// The largest debt. One long cycle delays later events for a bounded time.
const MAX_DEBT: Duration = Duration::from_millis(100);

/// A limit on the CPU time for a kind of work, as a share of one PU (hardware thread). The budget grows with time and
/// shrinks with the CPU time that the work uses. Up to 50 ms of unused CPU time can be used later.
#[derive(Debug)]
pub struct CpuBudget {
    permille: u32,
    /// Credit in nanoseconds of CPU time. Negative if the budget is overdrawn.
    balance: i128,
    /// The time up to which credit has accrued.
    accrued_until: Instant,
}

impl CpuBudget {
    /// Makes a budget that contains 50 ms of CPU time at the time `now`. The budget grows by `permille` thousandths
    /// of the time that passes, but never contains more than 50 ms.
    #[must_use]
    pub fn new(permille: u32, now: Instant) -> Self {
        Self { permille, balance: nanos(MAX_CREDIT), accrued_until: now }
    }

    /// Sets the share of one PU (hardware thread) that the work of this budget can use, in thousandths.
    pub fn set_share(&mut self, permille: u32) {
        self.permille = permille;
    }

    /// Subtracts the CPU time `used` from the budget, at the time `now`. The budget can become negative, but not
    /// below -100 ms.
    pub fn spend(&mut self, used: Duration, now: Instant) {
        self.accrue(now);
        self.balance = (self.balance - nanos(used)).max(-nanos(MAX_DEBT));
    }

    /// Returns how long the work must wait, from the time `now` on, until this budget of CPU time is no longer
    /// negative. Zero if the budget is not negative.
    #[must_use]
    pub fn wait_time(&mut self, now: Instant) -> Duration {
        self.accrue(now);
        let owed = u64::try_from(-self.balance).unwrap_or(0);
        Duration::from_nanos(owed.saturating_mul(1000) / u64::from(self.permille.max(1)))
    }

    /// Returns the longest time for which the work must wait: [`CpuBudget::wait_time`] with the largest debt.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        MAX_DEBT * 1000 / self.permille.max(1)
    }

    /// Returns whether the budget contains at least 25 ms of CPU time at the time `now`: half of its maximum.
    #[must_use]
    pub fn has_reserve(&mut self, now: Instant) -> bool {
        self.accrue(now);
        self.balance >= nanos(MAX_CREDIT) / 2
    }

    fn accrue(&mut self, now: Instant) {
        let passed = nanos(now.saturating_duration_since(self.accrued_until));
        self.accrued_until = self.accrued_until.max(now);
        self.balance = (self.balance + passed * i128::from(self.permille) / 1000).min(nanos(MAX_CREDIT));
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
    fn credit_is_spent_first_and_debt_delays_events() {
        let begin = Instant::now();
        let mut budget = CpuBudget::new(100, begin);
        budget.spend(50 * MS, begin);
        assert_eq!(budget.wait_time(begin), Duration::ZERO);
        budget.spend(2 * MS, begin);
        assert_eq!(budget.wait_time(begin), 20 * MS, "a tenth of a PU earns 2 ms in 20");
        assert_eq!(budget.wait_time(begin + 15 * MS), 5 * MS);
        assert_eq!(budget.wait_time(begin + 20 * MS), Duration::ZERO);
    }

    #[test]
    fn credit_and_debt_are_bounded() {
        let begin = Instant::now();
        let mut budget = CpuBudget::new(1000, begin);
        let later = begin + Duration::from_secs(3600);
        budget.spend(51 * MS, later);
        assert_eq!(budget.wait_time(later), MS);
        budget.spend(Duration::from_secs(60), later);
        assert_eq!((budget.wait_time(later), budget.longest_wait()), (100 * MS, 100 * MS));
        budget.set_share(100);
        assert_eq!((budget.wait_time(later), budget.longest_wait()), (1000 * MS, 1000 * MS));
    }

    #[test]
    fn half_of_the_credit_is_a_reserve() {
        let begin = Instant::now();
        let mut budget = CpuBudget::new(100, begin);
        assert!(budget.has_reserve(begin));
        budget.spend(26 * MS, begin);
        assert!(!budget.has_reserve(begin));
        assert!(budget.has_reserve(begin + 10 * MS));
    }

    #[test]
    fn an_earlier_time_does_not_reduce_the_balance() {
        let begin = Instant::now();
        let mut budget = CpuBudget::new(1000, begin + 10 * MS);
        budget.spend(60 * MS, begin + 10 * MS);
        assert_eq!(budget.wait_time(begin), 10 * MS);
    }
}
