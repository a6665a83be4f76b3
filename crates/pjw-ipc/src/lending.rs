//! How the daemon lends cores, as the status says.

use serde::{Deserialize, Serialize};

/// Whether and how pjwd lends cores on this machine. pjwd lends idle cores of jobs of the class `guaranteed` (the
/// owners) to jobs of the class `besteffort`, which have no cores of their own. pjwd takes a lent core back when the
/// owner needs the core. The field names are part of the public JSON format.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Lending {
    /// The reason why pjwd lends no cores on this machine, as text for users. Empty if pjwd lends cores.
    pub why_not: String,
    /// How the daemon detects that an owner needs a lent core:
    ///
    /// - `reported`: a BPF program reports that a thread of the owner runs on the lent core.
    /// - `sampled`: the daemon regularly reads the CPU time of the owner.
    /// - `unknown`: the daemon has not tried to load the BPF program yet, because no job could borrow a core.
    pub demand: String,
    /// The reason why `demand` is `sampled`, as text for users. Empty otherwise.
    pub why_sampled: String,
}
