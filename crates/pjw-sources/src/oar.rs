//! OAR 2.5.
//!
//! Cgroups (v1): `oar/<user>_<jobid>`. Without them, `OAR_JOB_ID` or `OAR_JOBID`. A member of an array is a
//! job with an id of its own. OAR gives every job a cpuset, which says how many cores it has; no variable
//! does.

use pjw_core::job::{JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::Host;
use crate::system::{Environ, Place, Sight, System, Ticket, plain_number};

pub(crate) const SYSTEM: System = System {
    source: Source::Oar,
    launchers: &["oarexec"],
    variables: &["OAR_JOB_ID", "OAR_JOBID"],
    own: OwnUnit::Nothing,
    narrowable: false,
    place,
    ticket,
};

fn place(sight: &Sight<'_>) -> Option<Place> {
    (0..sight.parts.len()).find_map(|at| {
        let [top, directory] = sight.parts.get(at..at + 2)? else { return None };
        let (user, id) = directory.rsplit_once('_').filter(|_| *top == "oar")?;
        (!user.is_empty()).then(|| Some(Place::job(job(id)?, at + 1)))?
    })
}

fn ticket(environ: Environ<'_>, _host: &Host) -> Option<Ticket> {
    job(environ.get("OAR_JOB_ID").or_else(|| environ.get("OAR_JOBID"))?).map(Ticket::of)
}

fn job(id: &str) -> Option<JobId> {
    JobId::new(Source::Oar, plain_number(id)?).ok()
}
