//! How pjw recognises the jobs of Grid Engine and its descendants: Son of Grid Engine (Debian), the systemd fork, Open
//! Cluster Scheduler.
//!
//! Job ids are `<job>.<task>`, the names of Grid Engine's directories on the node. A job without tasks is task 1
//! there, and has `SGE_TASK_ID=undefined` in its environment. Only this form can be read from all attributes.
//!
//! Cgroups: `sge/<job>.<task>` (`USE_CGROUPS=yes`, v1), `sge-<job>.<task>.{scope,service}`. Open Cluster Scheduler,
//! where `<S>` is the slice name of the cell:
//! `<S>.slice/<S>-jobs.slice/[<S>-jobs-<job>[.<task>].slice/]<S>.<job>[.<task>]….scope`, with the suffix `-<petask>`,
//! `.<petask>` or `.master`.
//!
//! No claim is made from groups. The extra group that attributes the processes of a job cannot be forged, but its
//! number alone does not name the job: the file `active_jobs/<job>.<task>/config` of the execution daemon maps groups
//! to jobs. Reading the job from `JOB_ID` for a process with any extra group would turn a variable that every user can
//! set into strong evidence. `JOB_ID` counts only beside `SGE_TASK_ID`, which Grid Engine always sets, because other
//! programs use the name `JOB_ID` too.
//!
//! `NSLOTS` is the sum over all hosts, so it is read only if `NHOSTS` is 1. A slot is read as a core.

use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{
    BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes, job_number,
    valid_cpu_count,
};
use crate::{counts, error::HookInputError, host::LocalHost};

/// How pjw recognises the processes and jobs of Grid Engine. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Sge,
    launchers: &["sge_shepherd"],
    variables: &["JOB_ID", "SGE_TASK_ID", "NSLOTS", "NHOSTS"],
    process_grouping: JobProcessGrouping::Session,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

/// Returns the role of the outermost job directory of Grid Engine on the cgroup path of `process`. The role says to
/// which job the directory belongs: the name of the directory contains the job id. `None` if there is no such
/// directory.
fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    let directories = process.directories;
    (0..directories.len()).find_map(|at| {
        let directory = directories[at];
        let unit = directory.strip_suffix(".scope").or_else(|| directory.strip_suffix(".service"));
        if let Some(name) = unit.and_then(|unit| unit.strip_prefix("sge-")) {
            return Some(CgroupDirectoryRole::job_directory(job_and_task(name)?, at));
        }
        if directory == "sge" {
            return Some(CgroupDirectoryRole::job_directory(job_and_task(directories.get(at + 1)?)?, at + 1));
        }
        let cell = directory.strip_suffix(".slice")?;
        let cell_of_jobs = directories.get(at + 1)?.strip_suffix("-jobs.slice")?;
        let slice_or_scope = directories.get(at + 2)?;
        let name = slice_or_scope
            .strip_suffix(".slice")
            .and_then(|slice| slice.strip_prefix(cell)?.strip_prefix("-jobs-"))
            .or_else(|| slice_or_scope.strip_suffix(".scope")?.strip_prefix(cell)?.strip_prefix('.'));
        let job = job_before_suffix(name.filter(|_| cell_of_jobs == cell)?)?;
        Some(CgroupDirectoryRole::job_directory(job, at + 2))
    })
}

/// Parses `name`, which has the form `<job>.<task>`.
fn job_and_task(name: &str) -> Option<JobId> {
    let (id, task) = name.split_once('.')?;
    make_job_id(id, task)
}

/// Parses the start of `name`, which has the form `<job>[.<task>]`. A suffix that begins with a dot or a dash can
/// follow.
fn job_before_suffix(name: &str) -> Option<JobId> {
    let (id, task_and_suffix) = name.split_at(name.find(['.', '-']).unwrap_or(name.len()));
    let task = task_and_suffix.strip_prefix('.').and_then(|text| job_number(text.split(['.', '-']).next()?));
    make_job_id(id, task.unwrap_or("1"))
}

fn environ_claim(environ: BatchEnvironment<'_>, _host: &LocalHost) -> Option<EnvironClaim> {
    let cpu_request = slot_count(environ).ok().and_then(valid_cpu_count).map(CpuRequest::Cores);
    Some(EnvironClaim { cpu_request, ..EnvironClaim::from_job_id(job_id(environ).ok()?) })
}

/// Returns the job id, such as `7.1`, from Grid Engine's environment variables `JOB_ID` and `SGE_TASK_ID`. For a job
/// without tasks, the id ends in `.1`.
///
/// # Errors
/// If a variable is not set, or if the values are no valid id.
pub(crate) fn job_id(environ: BatchEnvironment<'_>) -> Result<JobId, HookInputError> {
    let (task, number) = (environ.required_value("SGE_TASK_ID")?, environ.required_value("JOB_ID")?);
    make_job_id(number, if task == "undefined" { "1" } else { task })
        .ok_or_else(|| HookInputError::invalid_job_id("JOB_ID", &format!("{number}.{task}")))
}

/// Returns the number of the job's Grid Engine slots: the value of the environment variable `NSLOTS`.
///
/// # Errors
/// - If `NHOSTS` is not 1. The job then has several machines, and `NSLOTS` is the total for all of them.
/// - If `NSLOTS` or `NHOSTS` is not set or is no number.
pub(crate) fn slot_count(environ: BatchEnvironment<'_>) -> Result<u32, HookInputError> {
    if required_number(environ, "NHOSTS")? == 1 {
        slots_on_all_hosts(environ)
    } else {
        Err(HookInputError::CountNotProvided(JobSource::Sge))
    }
}

/// Returns the number of the job's Grid Engine slots on all its machines: the value of the environment variable
/// `NSLOTS`, which Grid Engine sets for each job, after the variables of the user.
///
/// # Errors
/// If `NSLOTS` is not set or is no number.
pub(crate) fn slots_on_all_hosts(environ: BatchEnvironment<'_>) -> Result<u32, HookInputError> {
    required_number(environ, "NSLOTS")
}

fn required_number(environ: BatchEnvironment<'_>, variable: &'static str) -> Result<u32, HookInputError> {
    let text = environ.required_value(variable)?;
    let invalid = || HookInputError::invalid_number(variable, text);
    environ.positive_number(variable).ok_or_else(invalid)
}

/// Returns the number of the job's Grid Engine slots on this machine. `text` is the content of the file whose path is
/// in the environment variable `PE_HOSTFILE`. Each line has a machine, its number of slots, a queue and a range of
/// processors. `host` has the name of this machine.
///
/// # Errors
/// If the text is invalid, or if no line is for this machine.
pub(crate) fn slot_count_in_hostfile(text: &str, host: &LocalHost) -> Result<u32, HookInputError> {
    let variable = "PE_HOSTFILE";
    let host_and_slots = |line: &str| line.split_ascii_whitespace().take(2).collect::<Vec<_>>().join(" ");
    let pairs = text.lines().map(host_and_slots).collect::<Vec<_>>().join(" ");
    let count = counts::slot_count_of_host_in_pairs(&pairs, &host.name)
        .map_err(|why| HookInputError::invalid_list(variable, &why))?;
    count.ok_or_else(|| HookInputError::host_not_listed(variable, &host.name))
}

fn make_job_id(id: &str, task: &str) -> Option<JobId> {
    JobId::new(JobSource::Sge, &format!("{}.{}", job_number(id)?, job_number(task)?)).ok()
}
