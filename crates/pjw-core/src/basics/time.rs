//! Points in time: since boot to compute with, and since 1970 to show to users.

use serde::{Deserialize, Serialize};

/// A time in nanoseconds since boot, including time in suspend (`CLOCK_BOOTTIME`). The clock never goes back while
/// the machine is up, so times can be compared across restarts of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// A time in milliseconds since 1970 (UTC), for display to users. The clock can be set, so it is not used to measure
/// durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

/// One point in time, as read from two clocks: the time since boot, for measuring, and the UTC time, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// The time since boot (`CLOCK_BOOTTIME`), for computing differences.
    pub since_boot: Nanos,
    /// The UTC time of the wall clock, to show to users.
    pub wall_clock: UnixMillis,
}
