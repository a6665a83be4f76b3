//! pjw's own jobs: `pjwctl run` leaves `PJW_JOB` in the environment of what it starts. It counts as any other
//! variable does: for the job's owner, and only while the job is known.

use pjw_core::job::{Amount, Source};
use pjw_core::snapshot::OwnUnit;

use crate::{Host, Place, Scheduler, Variables, value};

pub(crate) const MANUAL: Scheduler = Scheduler {
    source: Source::Manual,
    launchers: &[],
    variables: &["PJW_JOB"],
    place: find,
    name,
    amount,
    own: OwnUnit::Nothing,
};

fn find(_path: &str) -> Option<Place> {
    None
}

fn name(variables: &Variables) -> Option<String> {
    value(variables, "PJW_JOB")?.strip_prefix("manual:").map(str::to_owned)
}

fn amount(_variables: &Variables, _host: &Host) -> Option<Amount> {
    None
}
