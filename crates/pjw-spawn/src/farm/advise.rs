//! How many items a farm needs so that its cores are used: Amdahl's law with numbers. Pure functions.
//!
//! A farm occupies all its cores while its serial part runs on one of them. Without a farm, one core needs the time of
//! the serial part plus the time of all items. The efficiency is this time divided by the core time of the farm: the
//! ratio "Athena MJ/AthenaMP" in table 1 of Binet et al., "Multicore in production", J. Phys.: Conf. Ser. 368 (2012)
//! 012018.

use std::time::Duration;

use super::window;

/// The costs of a farm, from which its efficiency is computed: the serial time, the time of one item, and the number of
/// workers. A farm is a group of worker processes that compute numbered work items. In the serial time, only one
/// process works, for example at the start and at the end of the farm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FarmCosts {
    /// The time in which one process works and the workers wait or do not exist: initialisation, merging, the end.
    pub serial: Duration,
    /// The time of one item on one core. It must not be 0.
    pub item: Duration,
    /// The number of workers, each on a core of its own. It must not be 0.
    pub workers: u32,
}

impl FarmCosts {
    /// The largest number of items of a farm.
    pub const MAX_ITEMS: u64 = window::MAX_ITEMS;

    /// Returns the wall-clock time that the farm needs for `items` items: the serial time (in which a single process
    /// works), plus the time that the worker with the most items needs for its items.
    #[must_use]
    pub fn wall_time(&self, items: u64) -> Duration {
        duration(self.wall_ns(items))
    }

    /// Returns the wall-clock time that a single process on one core, without a farm, needs for `items` items: the
    /// serial time, plus the time of all items.
    #[must_use]
    pub fn time_on_one_core(&self, items: u64) -> Duration {
        duration(self.work_ns(items))
    }

    /// Returns the core time that the farm occupies for `items` items: its wall-clock time multiplied by its number
    /// of workers. The cores count also while their workers wait.
    #[must_use]
    pub fn occupied_core_time(&self, items: u64) -> Duration {
        duration(self.wall_ns(items).saturating_mul(u128::from(self.workers)))
    }

    /// Returns the efficiency of the farm for `items` items, in thousandths, rounded down. The efficiency is the time
    /// that a single core needs without a farm, divided by the core time that the farm occupies. At 1000, no core of
    /// the farm ever waits.
    #[must_use]
    pub fn efficiency_permille(&self, items: u64) -> u32 {
        let occupied = self.wall_ns(items).saturating_mul(u128::from(self.workers));
        let permille = self.work_ns(items).saturating_mul(1000).checked_div(occupied);
        permille.map_or(0, |permille| u32::try_from(permille).unwrap_or(u32::MAX))
    }

    /// Returns the smallest number of items with which the farm has at least the efficiency `efficiency_permille`, in
    /// thousandths. [`FarmCosts::efficiency_permille`] defines the efficiency. A value outside the range from 1 to 999
    /// is replaced by the nearest value in this range. Only multiples of the number of workers are considered, so that
    /// all workers have the same number of items. `None` if the farm would need more than [`FarmCosts::MAX_ITEMS`]
    /// items, because an item is too short compared with the serial time. `None` also if the time of an item or the
    /// number of workers is 0.
    #[must_use]
    pub fn min_items_for_efficiency(&self, efficiency_permille: u32) -> Option<u64> {
        let (efficiency, workers) = (u128::from(efficiency_permille.clamp(1, 999)), u128::from(self.workers));
        // (serial + n * item) / (workers * serial + n * item) >= efficiency, for n items in full rounds.
        let serial = self.serial.as_nanos().saturating_mul((efficiency * workers).saturating_sub(1000));
        let round = workers.saturating_mul(self.item.as_nanos()).saturating_mul(1000 - efficiency);
        let rounds = if round == 0 { return None } else { serial.div_ceil(round).max(1) };
        let items = u64::try_from(rounds.checked_mul(workers)?).ok();
        items.filter(|items| *items <= Self::MAX_ITEMS)
    }

    /// Returns the largest number of workers with which a farm has at least the efficiency `efficiency_permille`, in
    /// thousandths, for `items` items. [`FarmCosts::efficiency_permille`] defines the efficiency. The result is at
    /// most the number of workers of this farm. If no number of workers has this efficiency, the result is 1.
    #[must_use]
    pub fn max_workers_for_efficiency(&self, items: u64, efficiency_permille: u32) -> u32 {
        let is_efficient = |workers: &u32| {
            let fewer = Self { workers: *workers, ..*self };
            fewer.efficiency_permille(items) >= efficiency_permille
        };
        (1..=self.workers).rev().find(is_efficient).unwrap_or(1)
    }

    fn wall_ns(&self, items: u64) -> u128 {
        let rounds = u128::from(items.div_ceil(u64::from(self.workers.max(1))));
        self.serial.as_nanos().saturating_add(rounds.saturating_mul(self.item.as_nanos()))
    }

    fn work_ns(&self, items: u64) -> u128 {
        self.serial.as_nanos().saturating_add(u128::from(items).saturating_mul(self.item.as_nanos()))
    }
}

fn duration(nanoseconds: u128) -> Duration {
    const PER_SECOND: u128 = 1_000_000_000;
    let seconds = u64::try_from(nanoseconds / PER_SECOND);
    let subsecond_ns = u32::try_from(nanoseconds % PER_SECOND).unwrap_or(0);
    seconds.map_or(Duration::MAX, |seconds| Duration::new(seconds, subsecond_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn costs(serial_s: u64, item_s: u64, workers: u32) -> FarmCosts {
        FarmCosts { serial: Duration::from_secs(serial_s), item: Duration::from_secs(item_s), workers }
    }

    #[test]
    fn a_farm_takes_its_serial_part_and_full_rounds() {
        let costs = costs(10, 2, 4);
        assert_eq!(costs.wall_time(8), Duration::from_secs(14));
        assert_eq!(costs.wall_time(9), Duration::from_secs(16));
        assert_eq!(costs.time_on_one_core(9), Duration::from_secs(28));
        assert_eq!(costs.occupied_core_time(9), Duration::from_secs(64));
        assert_eq!(costs.efficiency_permille(9), 437);
    }

    #[test]
    fn the_ratios_of_table_1_follow_from_the_serial_part() {
        // On eight cores, items that take 5.46 times the serial part give the first ratio of the table. Faster merging,
        // which makes the serial part 2.5 times shorter, gives the second ratio.
        assert_eq!(costs(1000, 1, 8).efficiency_permille(5464), 480);
        assert_eq!(costs(393, 1, 8).efficiency_permille(5464), 680);
    }

    #[test]
    fn the_number_of_items_is_the_least_that_has_the_efficiency() {
        for costs in [costs(60, 2, 8), costs(3600, 7, 64), costs(1, 100, 2), costs(5, 1, 1)] {
            for efficiency in [500, 750, 900, 950, 990] {
                let items = costs.min_items_for_efficiency(efficiency).unwrap();
                assert!(items.is_multiple_of(costs.workers.into()));
                assert!(costs.efficiency_permille(items) >= efficiency, "{costs:?} {efficiency} {items}");
                let fewer = items - u64::from(costs.workers);
                assert!(fewer == 0 || costs.efficiency_permille(fewer) < efficiency, "{costs:?} {items}");
            }
        }
    }

    #[test]
    fn fewer_workers_use_their_cores_better() {
        let costs = costs(100, 1, 16);
        assert_eq!(costs.max_workers_for_efficiency(1000, 900), 2);
        assert_eq!(costs.max_workers_for_efficiency(1_000_000, 900), 16);
        assert_eq!(costs.max_workers_for_efficiency(1, 999), 1);
    }

    #[test]
    fn a_number_of_items_that_no_farm_can_have_is_not_enough() {
        let costs = FarmCosts { item: Duration::from_micros(10), ..costs(3600, 1, 16_384) };
        assert!(costs.min_items_for_efficiency(500).is_some_and(|items| items <= FarmCosts::MAX_ITEMS));
        assert_eq!(costs.min_items_for_efficiency(900), None);
        assert!(costs.efficiency_permille(FarmCosts::MAX_ITEMS) < 900);
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        let costs = FarmCosts { serial: Duration::MAX, item: Duration::from_nanos(1), workers: u32::MAX };
        assert_eq!(costs.min_items_for_efficiency(999), None);
        assert!(costs.efficiency_permille(u64::MAX) <= 1000);
        assert_eq!(costs.occupied_core_time(u64::MAX), Duration::MAX);
    }
}
