//! The options of a farm, their defaults and their limits.

use super::cpus::WorkerCpus;
use super::error::FarmError;
use super::window::{MAX_ITEMS, MAX_WORKERS};

const MIB: u64 = 1 << 20;
/// The default window (the number of items that can be in work at the same time) of a farm whose number of items is
/// known, and whose results have no order. The window is so large that one long item does not keep the others
/// waiting.
const UNORDERED_WINDOW: u64 = 1 << 20;
/// The default window of any other farm, and the limit of the option `chunk`.
const WINDOW: u64 = 4096;

/// The options of a farm, such as the number of workers and the sizes of the buffers.
#[derive(Debug, Clone)]
pub(crate) struct FarmSettings {
    pub(crate) workers: u32,
    pub(crate) chunk: u64,
    pub(crate) attempts: u32,
    pub(crate) is_in_order: bool,
    /// `None` for the default.
    pub(crate) window: Option<u64>,
    pub(crate) ring_bytes: u64,
    pub(crate) input_bytes: u64,
    pub(crate) cpus: WorkerCpus,
    pub(crate) allows_threads: bool,
}

impl FarmSettings {
    /// Returns the default options for a farm with `workers` worker processes.
    pub(crate) fn new(workers: u32) -> Self {
        Self {
            workers,
            chunk: 1,
            attempts: 3,
            is_in_order: false,
            window: None,
            ring_bytes: MIB / 4,
            input_bytes: 16 * MIB,
            cpus: WorkerCpus::Inherit,
            allows_threads: false,
        }
    }

    /// Checks that each option is within its limits. `items` is the number of items of the farm. `None` if this number
    /// is unknown.
    ///
    /// # Errors
    /// [`FarmError::InvalidOption`] for the first option that is not within its limits.
    pub(crate) fn check(&self, items: Option<u64>) -> Result<(), FarmError> {
        let check = |option, value, least, most| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(FarmError::InvalidOption { option, value, least, most })
        };
        check("workers", self.workers.into(), 1, MAX_WORKERS.into())?;
        check("chunk", self.chunk, 1, WINDOW)?;
        check("attempts", self.attempts.into(), 1, 1000)?;
        check("window", self.window.unwrap_or(1), 1, 1 << 24)?;
        check("ring_bytes", self.ring_bytes, 4096, 1 << 30)?;
        check("input_bytes", self.input_bytes, 4096, 1 << 40)?;
        check("items", items.unwrap_or(0), 0, MAX_ITEMS)
    }

    /// Returns the size of the window: the largest number of items that can be in work at the same time. The size is a
    /// power of two. `items` is the number of items of the farm. `None` if this number is unknown.
    pub(crate) fn window_size(&self, items: Option<u64>) -> u64 {
        let default = if items.is_some() && !self.is_in_order { UNORDERED_WINDOW } else { WINDOW };
        let window = self.window.unwrap_or(default.max(4 * u64::from(self.workers) * self.chunk));
        window.min(items.unwrap_or(u64::MAX)).max(1).next_power_of_two()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_has_room_for_all_chunks_and_not_more_positions_than_items() {
        let mut settings = FarmSettings::new(64);
        assert_eq!(settings.window_size(Some(100)), 128);
        assert_eq!(settings.window_size(Some(1 << 30)), UNORDERED_WINDOW);
        settings.is_in_order = true;
        assert_eq!(settings.window_size(Some(1 << 30)), WINDOW);
        settings.chunk = 100;
        assert_eq!(settings.window_size(None), 32_768);
        settings.window = Some(5);
        assert_eq!(settings.window_size(None), 8);
    }

    type Change = fn(&mut FarmSettings);

    #[test]
    fn each_number_has_limits_that_its_message_names() {
        let wrong: [(Change, &str); 5] = [
            (|settings| settings.workers = 0, "workers is 0: give a number from 1 to 16384"),
            (|settings| settings.chunk = 0, "chunk is 0: give a number from 1 to 4096"),
            (|settings| settings.attempts = 0, "attempts is 0: give a number from 1 to 1000"),
            (|settings| settings.window = Some(0), "window is 0: give a number from 1 to 16777216"),
            (|settings| settings.ring_bytes = 8, "ring_bytes is 8: give a number from 4096 to 1073741824"),
        ];
        for (change, message) in wrong {
            let mut settings = FarmSettings::new(2);
            change(&mut settings);
            assert_eq!(settings.check(Some(1)).unwrap_err().to_string(), message);
        }
        let too_many = FarmSettings::new(1).check(Some(u64::MAX)).unwrap_err();
        assert!(matches!(too_many, FarmError::InvalidOption { option: "items", .. }));
    }
}
