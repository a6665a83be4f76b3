//! The warning about masks of unknown origin, and the processes that a warning names.

use crate::basics::{Pid, prelude::*};
use crate::state::WardenState;
use crate::terms::Warning;

/// The largest number of processes that a warning about a job names.
const MAX_NAMED: usize = 8;
/// The largest number of processes whose masks one warning names. The next ones are named when these have other masks.
const MAX_NAMED_MASKS: usize = 4096;

/// Returns the warning that an earlier daemon may have set the masks of the processes `pids`. `None` if `pids` is
/// empty.
pub(super) fn unknown_masks_warning(state: &WardenState, pids: &[Pid]) -> Option<Warning> {
    let (first, all) = (pids.first()?, state.topology.cpus());
    let text = format!(
        "the masks of some processes may be those that an earlier pjwd set, and are kept: {}",
        first_pids_text(pids, MAX_NAMED_MASKS)
    );
    let remedy = if pids.len() == 1 {
        format!("taskset -pac {all} {first} widens the mask of a process that did not choose it")
    } else {
        let listed: Vec<String> = pids.iter().take(MAX_NAMED_MASKS).map(ToString::to_string).collect();
        format!(
            "for pid in {}; do taskset -pac {all} $pid; done widens the masks of processes that did not choose them",
            listed.join(" ")
        )
    };
    Some(Warning::new("unknown-masks", text, remedy))
}

/// Formats process ids for a sentence: at most eight pids, and the number of the other pids (`... and 5 more`).
pub(in crate::phases) fn pids_text(pids: &[Pid]) -> String {
    first_pids_text(pids, MAX_NAMED)
}

/// Returns the first `max_count` pids as text, and the number of the other pids.
fn first_pids_text(pids: &[Pid], max_count: usize) -> String {
    let named: Vec<String> = pids.iter().take(max_count).map(ToString::to_string).collect();
    match pids.len().saturating_sub(max_count) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
