//! The memory of jobs: read on request or sampled, by a thread of its own.
//!
//! [`reading`] reads the memory of one job, [`reader`] is the thread that does it, [`turns`] has the order of its
//! callers, [`records`] keeps the latest readings of each job, and [`node_findings`] what samples of pages found.

pub mod node_findings;
pub mod reader;
pub mod reading;
pub mod records;
pub mod turns;

use std::time::Duration;

/// The values of the configuration table `[memory]`: how often pjwd measures the memory use of each job without a
/// request of a client, and how much CPU time these measurements can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySettings {
    /// `memory.sample`: the time between two measurements of the memory use of a job. `None` if pjwd makes no such
    /// measurements. It then only makes the cheap estimates for the reports of ended jobs.
    pub sample_interval: Option<Duration>,
    /// `memory.budget_permille`: the share of the CPU time of one PU (logical CPU) that these measurements may use, in
    /// permille.
    pub budget_permille: u32,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self { sample_interval: None, budget_permille: 5 }
    }
}

impl MemorySettings {
    /// Returns how long pjwd must wait after a memory measurement before the next one. `cost` is the CPU time of the
    /// measurement that has just ended. With these pauses, the measurements use at most the configured share of one
    /// PU (logical CPU).
    #[must_use]
    pub fn pause_after(&self, cost: Duration) -> Duration {
        let permille = self.budget_permille.clamp(1, 1000);
        cost.saturating_mul(1000 - permille) / permille
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_use_no_more_than_the_budget() {
        let settings = |budget_permille| MemorySettings { budget_permille, ..MemorySettings::default() };
        let cost = Duration::from_millis(500);
        assert_eq!(settings(5).pause_after(cost), Duration::from_millis(99_500), "500 ms of 100 s");
        assert_eq!(settings(500).pause_after(cost), cost);
        assert_eq!(settings(1000).pause_after(cost), Duration::ZERO);
        assert!(settings(0).pause_after(Duration::MAX) >= settings(1).pause_after(cost));
    }
}
