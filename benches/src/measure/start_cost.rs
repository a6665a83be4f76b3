//! What the start of a process costs: CPU time and rate, of a group of processes that are started and waited for.

use std::time::Instant;

use anyhow::Context;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use crate::measure::results::median;

/// The fewest rounds after which a measurement may end. With fewer rounds, their spread is unknown.
const MIN_ROUNDS: usize = 3;
/// The ratio of the largest to the smallest value below which a median is known well enough.
const SETTLED_SPREAD: f64 = 1.1;

/// The cost of starting one process, as the mean over a group of processes that were started together.
#[derive(Debug, Clone, Copy)]
pub struct StartCost {
    /// The CPU time of one process and of its start in the parent process, in µs.
    pub cpu_us: f64,
    /// The number of processes that were started each second, from the start of the first process to the end of the
    /// last one.
    pub rate: f64,
}

impl StartCost {
    /// Returns the cost of each process in a group of `count` processes. `cpu_us` is the CPU time of all of them and of
    /// their parent process. `wall_us` is the time from the start of the first process to the end of the last one. Both
    /// are in µs.
    #[must_use]
    pub fn of_group(count: u32, cpu_us: f64, wall_us: f64) -> Self {
        Self { cpu_us: cpu_us / f64::from(count), rate: f64::from(count) * 1e6 / wall_us }
    }

    /// Measures the cost of each process in a group of processes. `start` must start `count` processes as children of
    /// this program, and wait for the end of each.
    ///
    /// # Errors
    /// The errors of `start`. Also if the CPU time can't be read.
    pub fn measure(count: u32, start: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Self> {
        let (begin, before) = (Instant::now(), own_cpu_us()?);
        start()?;
        let wall = begin.elapsed();
        Ok(Self::of_group(count, own_cpu_us()? - before, wall.as_secs_f64() * 1e6))
    }

    /// Returns whether enough rounds were measured, so that another round would change the medians little. `costs` has
    /// one element for each measured round. True if there are at least three rounds, and the largest value is less than
    /// 1.1 times the smallest, in CPU time and in rate.
    #[must_use]
    pub fn are_settled(costs: &[Self]) -> bool {
        let spread = |field: fn(&Self) -> f64| {
            let values = costs.iter().map(field);
            values.clone().fold(0.0, f64::max) / values.fold(f64::INFINITY, f64::min)
        };
        costs.len() >= MIN_ROUNDS
            && spread(|cost| cost.cpu_us) < SETTLED_SPREAD
            && spread(|cost| cost.rate) < SETTLED_SPREAD
    }

    /// Returns the median CPU time and the median rate of the measured rounds in `costs`. `None` if `costs` is empty.
    #[must_use]
    pub fn median(costs: &[Self]) -> Option<Self> {
        let median_of = |field: fn(&Self) -> f64| median(&costs.iter().map(field).collect::<Vec<_>>());
        Some(Self { cpu_us: median_of(|cost| cost.cpu_us)?, rate: median_of(|cost| cost.rate)? })
    }
}

/// Returns the CPU time of this program and of the children that were waited for, in µs.
fn own_cpu_us() -> anyhow::Result<f64> {
    let cpu_us_of = |who| {
        let usage = getrusage(who).context("can't read the CPU time")?;
        anyhow::Ok(microseconds(usage.user_time()) + microseconds(usage.system_time()))
    };
    Ok(cpu_us_of(UsageWho::RUSAGE_SELF)? + cpu_us_of(UsageWho::RUSAGE_CHILDREN)?)
}

#[expect(clippy::cast_precision_loss, reason = "CPU time of some hours")]
fn microseconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 * 1e6 + time.tv_usec() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_that_differ_little_are_enough() {
        let cost = |cpu_us, rate| StartCost { cpu_us, rate };
        let equal = [cost(100.0, 9.0), cost(105.0, 9.5), cost(101.0, 9.2)];
        assert!(StartCost::are_settled(&equal));
        assert!(!StartCost::are_settled(&equal[..2]));
        assert!(!StartCost::are_settled(&[equal[0], equal[1], cost(120.0, 9.0)]));
        assert!(!StartCost::are_settled(&[equal[0], equal[1], cost(100.0, 12.0)]));
    }

    #[test]
    fn a_group_costs_each_process_its_share() {
        let cost = StartCost::of_group(4, 800.0, 2_000_000.0);
        assert!((cost.cpu_us - 200.0).abs() < 1e-9 && (cost.rate - 2.0).abs() < 1e-9, "{cost:?}");
        let medians = StartCost::median(&[cost, StartCost { cpu_us: 100.0, rate: 9.0 }, cost]).unwrap();
        assert!((medians.cpu_us - 200.0).abs() < 1e-9 && (medians.rate - 2.0).abs() < 1e-9, "{medians:?}");
        assert!(StartCost::median(&[]).is_none());
    }
}
