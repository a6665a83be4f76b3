//! How pjw recognises the jobs of IBM Spectrum LSF and of OpenLava.
//!
//! Job ids are `<jobid>`, or `<jobid>[<index>]` for members of arrays, as bjobs(1) prints them. `LSB_JOBINDEX` is 0
//! outside of arrays. Cgroups, v1: `lsf/<cluster>/job.<jobid>[<index>].*`, if LSF is configured to use them. OpenLava
//! has none of this form. The v2 layout is not documented: the same end of the path is expected there.
//!
//! All jobs of a node share the session of sbatchd, so only the process group belongs to one job. Cores: the number
//! after this host's name in `LSB_MCPU_HOSTS` (`hostA 4 hostB 8 `), or the number of times that the name occurs in
//! `LSB_HOSTS`. `LSB_DJOB_NUMPROC` is the sum over all hosts and adds nothing. A slot is read as a core.

use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{
    BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes, job_number,
    valid_cpu_count,
};
use crate::{counts, error::HookInputError, host::LocalHost};

/// How pjw recognises the processes and jobs of LSF. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Lsf,
    launchers: &["res", "sbatchd"],
    variables: &["LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "LSB_HOSTS"],
    process_grouping: JobProcessGrouping::ProcessGroup,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

/// Returns the role of the outermost job directory of LSF on the cgroup path of `process`. The role says to which job
/// the directory belongs: the name of the directory contains the job id. `None` if there is no such directory.
fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    (0..process.directories.len()).find_map(|at| {
        let [top, _cluster, directory] = process.directories.get(at..at + 3)? else { return None };
        let name = directory.strip_prefix("job.").filter(|_| *top == "lsf")?;
        // The text after the next dot is internal to LSF.
        let (id, index) = match name.split('.').next()?.strip_suffix(']') {
            Some(member) => member.split_once('[')?,
            None => (name.split('.').next()?, "0"),
        };
        Some(CgroupDirectoryRole::job_directory(make_job_id(id, index)?, at + 2))
    })
}

fn environ_claim(environ: BatchEnvironment<'_>, host: &LocalHost) -> Option<EnvironClaim> {
    let cpu_request = slot_count(environ, host).ok().and_then(valid_cpu_count).map(CpuRequest::Cores);
    Some(EnvironClaim { cpu_request, ..EnvironClaim::from_job_id(job_id(environ).ok()?) })
}

/// Returns the job id from LSF's environment variables `LSB_JOBID` and `LSB_JOBINDEX` (the index in a job array).
///
/// # Errors
/// If `LSB_JOBID` is not set, or if the values are no valid id.
pub(crate) fn job_id(environ: BatchEnvironment<'_>) -> Result<JobId, HookInputError> {
    let (number, index) = (environ.required_value("LSB_JOBID")?, environ.get("LSB_JOBINDEX").unwrap_or("0"));
    make_job_id(number, index)
        .ok_or_else(|| HookInputError::invalid_job_id("LSB_JOBID", &format!("{number}[{index}]")))
}

/// Returns the number of the job's LSF slots on this machine. `host` has the name of the machine. The number is read
/// from the environment variable `LSB_MCPU_HOSTS`, or else from `LSB_HOSTS`.
///
/// # Errors
/// If neither variable is set, if the list in the variable is invalid, or if the list does not contain this machine.
pub(crate) fn slot_count(environ: BatchEnvironment<'_>, host: &LocalHost) -> Result<u32, HookInputError> {
    let (variable, list) = environ.first_set_variable(["LSB_MCPU_HOSTS", "LSB_HOSTS"])?;
    let count = match variable {
        "LSB_MCPU_HOSTS" => counts::slot_count_of_host_in_pairs(list, &host.name),
        _ => counts::slot_count_of_host_in_list(list, &host.name),
    };
    let count = count.map_err(|why| HookInputError::invalid_list(variable, &why))?;
    count.ok_or_else(|| HookInputError::host_not_listed(variable, &host.name))
}

fn make_job_id(id: &str, index: &str) -> Option<JobId> {
    let id = job_number(id)?;
    let name = if index == "0" { id.to_owned() } else { format!("{id}[{}]", job_number(index)?) };
    JobId::new(JobSource::Lsf, &name).ok()
}
