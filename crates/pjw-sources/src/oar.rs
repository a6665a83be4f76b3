//! OAR: a cpuset `oar/<user>_<jobid>` (v1), whose PUs are the job's grant; no variable tells the count.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::path::{pieces, place};
use crate::{Host, Place, Scheduler, Variables, value};

pub(crate) const OAR: Scheduler = Scheduler {
    source: Source::Oar,
    launchers: &["oarexec"],
    variables: &["OAR_JOB_ID", "OAR_JOBID"],
    place: find,
    name,
    amount,
    own: OwnUnit::Nothing,
};

fn find(path: &str) -> Option<Place> {
    let mut before = "";
    for (piece, upto) in pieces(path) {
        if before == "oar" {
            let (_, id) = piece.rsplit_once('_')?;
            return place(upto, id).filter(|_| id.bytes().all(|byte| byte.is_ascii_digit()));
        }
        before = piece;
    }
    None
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "OAR_JOB_ID").or_else(|| value(variables, "OAR_JOBID")).map(str::to_owned)
}

fn amount(_variables: &Variables, _host: &Host) -> Option<Amount> {
    None
}
