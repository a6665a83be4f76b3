//! How pjw recognises the jobs of HTCondor.
//!
//! Cgroups (both versions): `htcondor/<EXECUTE directory, / as _>_<slot name>`, with one more directory below in
//! newer versions, below the daemon's own cgroup. The path names the *slot*, not the job. The number of the job is in
//! a file that `_CONDOR_JOB_AD` names, which is not read here. So the job id is the name of the slot,
//! `slot1_3@n1.example.org`. A slot runs one job at a time, and HTCondor empties its directory before the next job
//! starts.
//!
//! Without cgroups `_CONDOR_SLOT` names the slot, with or without the machine's name. The number of cores is in
//! another file (`_CONDOR_MACHINE_AD`). `OMP_NUM_THREADS` is not read, because the user can change it.

use pjw_core::job::{JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes};
use crate::{error::HookInputError, host::LocalHost, number::parse_digits};

/// How pjw recognises the processes and jobs of HTCondor. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Condor,
    launchers: &["condor_starter"],
    variables: &["_CONDOR_SLOT"],
    process_grouping: JobProcessGrouping::Neither,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    let at = process.directories.iter().position(|part| *part == "htcondor")?;
    let directory = process.directories.get(at + 1)?;
    let job = JobId::new(JobSource::Condor, slot_of_directory(directory)?).ok()?;
    Some(CgroupDirectoryRole::job_directory(job, at + 1))
}

/// Returns the name of the slot to which a directory belongs: the last part of the directory's name, from `slot` on.
/// Returns the whole name if there is no such part, which is so for slots with other names
/// (`SLOT_TYPE_<N>_NAME_PREFIX`). `None` if this name has no `@`.
fn slot_of_directory(directory: &str) -> Option<&str> {
    let begins_slot = |at: &usize| directory[at + "_slot".len()..].starts_with(|c: char| c.is_ascii_digit());
    let slot = directory.rmatch_indices("_slot").map(|(at, _)| at).find(begins_slot);
    slot.map(|at| &directory[at + 1..]).or_else(|| directory.contains('@').then_some(directory))
}

fn environ_claim(environ: BatchEnvironment<'_>, _host: &LocalHost) -> Option<EnvironClaim> {
    JobId::new(JobSource::Condor, environ.get("_CONDOR_SLOT")?).ok().map(EnvironClaim::from_job_id)
}

/// Returns the value of the attribute `name` in the ClassAd `ad`, which has lines such as `Cpus = 4`. Names are not
/// case-sensitive.
fn attribute<'a>(ad: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        let (attribute, value) = line.split_once('=')?;
        attribute.trim().eq_ignore_ascii_case(name).then(|| value.trim())
    };
    ad.lines().find_map(value)
}

/// Returns the value of the string attribute `name` in the ClassAd `ad`, without the quotes. The value of `Owner` in
/// the line `Owner = "alice"` is `alice`. A ClassAd is HTCondor's list of the attributes of a job or a machine.
/// Returns `None` if `ad` has no attribute `name`, or if the value has no quotes.
pub(crate) fn string_attribute<'a>(ad: &'a str, name: &str) -> Option<&'a str> {
    attribute(ad, name)?.strip_prefix('"')?.strip_suffix('"')
}

/// Returns the number of cores of a slot: the value of the attribute `Cpus` in `machine_ad`. A slot is HTCondor's
/// share of a machine for one job. `machine_ad` is HTCondor's description (ClassAd) of the slot. Returns `None` if
/// the attribute is missing, and an error if the value is no number.
pub(crate) fn slot_core_count(machine_ad: &str) -> Option<Result<u32, HookInputError>> {
    let text = attribute(machine_ad, "Cpus")?;
    let variable = "Cpus in the machine's ad";
    Some(parse_digits(text).ok_or_else(|| HookInputError::invalid_number(variable, text)))
}
