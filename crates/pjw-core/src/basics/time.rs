//! Points in time: since boot to compute with, and since 1970 to show to users.

use serde::{Deserialize, Serialize};

/// Nanoseconds since boot, including time in suspend (`CLOCK_BOOTTIME`). The value never decreases while the
/// machine is up, also not across a restart of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// Milliseconds since 1970 (UTC), to show to users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

/// The same point in time on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// The time since boot, for computing differences.
    pub since_boot: Nanos,
    /// The wall clock time, to show to users.
    pub wall_clock: UnixMillis,
}
