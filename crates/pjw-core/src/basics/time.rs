//! Points in time: since boot to compute with, and since 1970 to show to users.

use serde::{Deserialize, Serialize};

/// A point in time, in nanoseconds since boot, including the time in suspend (`CLOCK_BOOTTIME`). Also used for
/// durations, in nanoseconds. The clock never goes back while the machine is up. So points in time from before
/// and after a restart of the daemon can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// A point in time, in milliseconds since 1970 (UTC), for display to users. Durations are not computed from such times,
/// because an administrator can set the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

/// One point in time, read from two clocks: the time since boot (for computing durations) and the UTC time
/// (for display).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// The time since boot (`CLOCK_BOOTTIME`), for computing durations.
    pub since_boot: Nanos,
    /// The UTC time (`CLOCK_REALTIME`), for display to users.
    pub wall_clock: UnixMillis,
}
