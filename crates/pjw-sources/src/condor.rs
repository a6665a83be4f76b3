//! HTCondor: `htcondor/<execute directory>_<slot>[/<same>.scope]`. The path names the slot, not the job; a slot
//! runs one job at a time, so the slot's name is the id here. The count stands in a file that is not read.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, value};

pub(crate) const CONDOR: Scheduler = Scheduler {
    source: Source::Condor,
    launchers: &["condor_starter"],
    variables: &["_CONDOR_SLOT"],
    place: find,
    name,
    amount,
    own: OwnUnit::Nothing,
};

fn find(path: &str) -> Option<Place> {
    let mut before = "";
    for (piece, upto) in pieces(path) {
        if before == "htcondor" {
            let slot = &piece[piece.find("slot")?..];
            return place(upto, short_slot(slot));
        }
        before = piece;
    }
    None
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "_CONDOR_SLOT").map(|slot| short_slot(slot).to_owned())
}

/// `slot1_2@host` without the host: the same from the path and the environment.
fn short_slot(slot: &str) -> &str {
    slot.split('@').next().unwrap_or_default()
}

fn amount(_variables: &Variables, _host: &Host) -> Option<Amount> {
    None
}
