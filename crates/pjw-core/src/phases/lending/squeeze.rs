//! Why a borrower that can borrow no core can't share the housekeeping PUs either.

use crate::basics::{cpus_text, cpus_with_is_are, prelude::*};
use crate::state::WardenState;
use crate::terms::{JobId, Policy};

/// Returns the reason why a borrower that can borrow no core does not share the housekeeping PUs, which are reserved
/// for the system. The reason is a text for users. Must only be called if no online PU is a housekeeping PU at present.
/// The reason is one of these:
///
/// - The configuration reserves no PUs.
/// - Jobs hold reserved PUs. Such a PU becomes a housekeeping PU when the job releases it.
/// - The reserved PUs are offline.
pub(crate) fn reason_not_to_squeeze(state: &WardenState, policy: &Policy) -> String {
    let reserved = &policy.housekeeping_cpus;
    if reserved.is_empty() {
        return "there are no housekeeping CPUs that it could share".to_owned();
    }
    let held = reserved.intersection(&state.pool.allocated_cpus());
    if held.is_empty() {
        return format!("the housekeeping {} offline", cpus_with_is_are(reserved));
    }
    let holders: BTreeSet<&JobId> = held.iter().filter_map(|pu| state.pool.holder(pu)?.job()).collect();
    let (verb, end) = if holders.len() == 1 {
        ("holds", "it ends or is released")
    } else {
        ("hold", "they end or are released")
    };
    let holders: Vec<String> = holders.into_iter().map(ToString::to_string).collect();
    format!("{} {verb} the housekeeping {} until {end}", holders.join(", "), cpus_text(&held))
}
