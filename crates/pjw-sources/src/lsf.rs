//! IBM Spectrum LSF, and OpenLava.
//!
//! Jobs are `<jobid>`, members of arrays `<jobid>[<index>]`, as bjobs(1) prints them; `LSB_JOBINDEX` is 0
//! outside arrays. Cgroups, v1: `lsf/<cluster>/job.<jobid>[<index>].*`, if LSF was told to use them;
//! OpenLava has none of this kind. The v2 layout is not documented; the same tail is looked for there.
//!
//! All jobs of a node share sbatchd's session, so only the process group is a job's own. Cores: the number
//! after this host's name in `LSB_MCPU_HOSTS` (`hostA 4 hostB 8 `), or how often the name stands in
//! `LSB_HOSTS`. `LSB_DJOB_NUMPROC` is the sum over all hosts and adds nothing to those. A slot is read as a
//! core.

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::announcement::{Flaw, shown};
use crate::system::{Environ, Place, Sight, System, Ticket, plain_number, plausible};
use crate::{Host, counts};

pub(crate) const SYSTEM: System = System {
    source: Source::Lsf,
    launchers: &["res", "sbatchd"],
    variables: &["LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "LSB_HOSTS"],
    own: OwnUnit::Group,
    narrowable: false,
    place,
    ticket,
};

fn place(sight: &Sight<'_>) -> Option<Place> {
    (0..sight.parts.len()).find_map(|at| {
        let [top, _cluster, directory] = sight.parts.get(at..at + 3)? else { return None };
        let name = directory.strip_prefix("job.").filter(|_| *top == "lsf")?;
        // What follows the next dot is LSF's own business.
        let (id, index) = match name.split('.').next()?.strip_suffix(']') {
            Some(member) => member.split_once('[')?,
            None => (name.split('.').next()?, "0"),
        };
        Some(Place::job(job(id, index)?, at + 2))
    })
}

fn ticket(environ: Environ<'_>, host: &Host) -> Option<Ticket> {
    let amount = count(environ, host).ok().and_then(plausible).map(Amount::Cores);
    Some(Ticket { amount, ..Ticket::of(id(environ).ok()?) })
}

/// The job, or why there is none.
pub(crate) fn id(environ: Environ<'_>) -> Result<JobId, Flaw> {
    let (number, index) = (environ.need("LSB_JOBID")?, environ.get("LSB_JOBINDEX").unwrap_or("0"));
    let value = || shown(&format!("{number}[{index}]"));
    job(number, index).ok_or_else(|| Flaw::NotAnId { variable: "LSB_JOBID", value: value() })
}

/// The job's slots on this host.
pub(crate) fn count(environ: Environ<'_>, host: &Host) -> Result<u32, Flaw> {
    let (variable, list) = environ.first(["LSB_MCPU_HOSTS", "LSB_HOSTS"])?;
    let count = match variable {
        "LSB_MCPU_HOSTS" => counts::in_pairs(list, &host.name),
        _ => counts::in_names(list, &host.name),
    };
    let count = count.map_err(|why| Flaw::Counts { variable, why })?;
    count.ok_or_else(|| Flaw::NotHere { variable, host: shown(&host.name) })
}

fn job(id: &str, index: &str) -> Option<JobId> {
    let id = plain_number(id)?;
    let name = if index == "0" { id.to_owned() } else { format!("{id}[{}]", plain_number(index)?) };
    JobId::new(Source::Lsf, &name).ok()
}
