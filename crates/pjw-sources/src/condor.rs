//! HTCondor.
//!
//! Cgroups (both versions): `htcondor/<EXECUTE directory, / as _>_<slot name>`, with one more directory
//! below on newer ones, below the daemon's own. The path names the *slot*, not the job, and the job's
//! number stands in a file that `_CONDOR_JOB_AD` names, which is not read here: so a job goes by its slot,
//! `slot1_3@n1.example.org`. A slot serves one job at a time, and HTCondor empties its directory
//! before the next starts.
//!
//! Without cgroups, `_CONDOR_SLOT` says the slot, with or without the machine's name. The number of cores
//! stands in another file (`_CONDOR_MACHINE_AD`); `OMP_NUM_THREADS` is the user's to change, and not read.

use pjw_core::job::{JobId, Source};
use pjw_core::snapshot::OwnUnit;

use crate::announcement::{Flaw, shown};
use crate::system::{Environ, Place, Sight, System, Ticket};
use crate::{Host, counts};

pub(crate) const SYSTEM: System = System {
    source: Source::Condor,
    launchers: &["condor_starter"],
    variables: &["_CONDOR_SLOT"],
    own: OwnUnit::Nothing,
    narrowable: false,
    place,
    ticket,
};

fn place(sight: &Sight<'_>) -> Option<Place> {
    let at = sight.parts.iter().position(|part| *part == "htcondor")?;
    let directory = sight.parts.get(at + 1)?;
    Some(Place::job(JobId::new(Source::Condor, slot_of(directory)?).ok()?, at + 1))
}

/// The slot's name, which is the last part of the directory's; the whole of it where slots have names of
/// their own (`SLOT_TYPE_<N>_NAME_PREFIX`).
fn slot_of(directory: &str) -> Option<&str> {
    let begins_slot = |at: &usize| directory[at + "_slot".len()..].starts_with(|c: char| c.is_ascii_digit());
    let last = directory.rmatch_indices("_slot").map(|(at, _)| at).find(begins_slot);
    last.map(|at| &directory[at + 1..]).or_else(|| directory.contains('@').then_some(directory))
}

fn ticket(environ: Environ<'_>, _host: &Host) -> Option<Ticket> {
    JobId::new(Source::Condor, environ.get("_CONDOR_SLOT")?).ok().map(Ticket::of)
}

/// The value of an attribute in an ad in the long form: lines such as `Cpus = 4`. Names know no case.
fn attribute<'a>(ad: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (attribute, value) = line.split_once('=')?;
        attribute.trim().eq_ignore_ascii_case(name).then(|| value.trim())
    };
    ad.lines().find_map(value)
}

/// An attribute that is a plain text: `Owner = "alice"`.
pub(crate) fn text<'a>(ad: &'a str, name: &str) -> Option<&'a str> {
    attribute(ad, name)?.strip_prefix('"')?.strip_suffix('"')
}

/// The cores of the slot, if its ad tells them.
pub(crate) fn count(machine_ad: &str) -> Option<Result<u32, Flaw>> {
    let text = attribute(machine_ad, "Cpus")?;
    let variable = "Cpus in the machine's ad";
    Some(counts::number(text).ok_or_else(|| Flaw::NotANumber { variable, value: shown(text) }))
}
