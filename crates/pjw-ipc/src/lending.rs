//! How the daemon lends cores, as the status says.

use serde::{Deserialize, Serialize};

/// Whether and how pjwd lends cores on this machine. pjwd lends the cores that jobs of the class `guaranteed` (the
/// owners) do not use. The field names are part of the public JSON format.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Lending {
    /// The reason why such cores are not lent on this machine, as text for users. Empty if they are lent.
    pub why_not: String,
    /// How the daemon learns that an owner needs a lent core: `reported` (a BPF program reports the owner's wake-up),
    /// `sampled` (the daemon samples the CPU time of the owner), or `unknown` (the daemon has not tried to load the BPF
    /// program, because no job could borrow a core yet).
    pub demand: String,
    /// The reason why `demand` is `sampled`, as text for users. Empty otherwise.
    pub why_sampled: String,
}
