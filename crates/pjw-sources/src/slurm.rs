//! How pjw recognises the jobs of Slurm 22.05 to 26.05.
//!
//! Cgroups, below any path: v2 `[<node>_]slurmstepd.scope/job_<id>/step_<S>/{slurm,user/task_<T>}`, v1
//! `slurm[_<node>]/uid_<uid>/job_<id>/step_<S>`. From 26.05 on the SLUID names the v2 directory: `s` and 13
//! characters of Crockford's base32, unless `CgroupJobIdPaths=yes` (cgroup.conf(5)). The SLUID is then the job id,
//! because only the environment has the number, and the environment could name any job.
//!
//! `<scope>/system` and `step_<S>/slurm` contain slurmstepd alone. The step `extern` contains a `sleep` of root,
//! which is recognised by its command line. pjw-core distinguishes a user's own `sleep` with the same command line by
//! its user.
//!
//! With `ConstrainCores=no` Slurm enables the cpuset controller down to the tasks and never writes
//! `job_<id>/cpuset.cpus`, so the warden may write there. With `ConstrainCores=yes` Slurm writes that file before
//! each step, and its value is the grant (observed with 22.05.8).
//!
//! A member of an array has a job id of its own, so the variables of the array are not needed.
//! `SLURM_JOB_CPUS_PER_NODE` (as `72(x2),36`, one count per name in `SLURM_JOB_NODELIST`) counts for the job.
//! `SLURM_CPUS_ON_NODE` counts for the *step*, which is the job only if there is no step number: in a batch script.
//! Both count the CPUs of Slurm, which are logical CPUs if Slurm is configured with several threads per core. A site
//! that configures cores only, on a machine with several threads per core, should set the count in the hook.

use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{
    BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes, job_number,
    valid_cpu_count,
};
use crate::{counts, error::HookInputError, host::LocalHost, hostlist, number::parse_digits};

/// How pjw recognises the processes and jobs of Slurm. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Slurm,
    launchers: &["slurmstepd"],
    variables: &[
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_SLUID",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_SCRIPT_CONTEXT",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURMD_NODENAME",
        "SLURM_CPUS_ON_NODE",
        "SLURM_TASKS_PER_NODE",
    ],
    process_grouping: JobProcessGrouping::Neither,
    has_narrowable_cpuset: true,
    find_directory_role,
    environ_claim,
};

/// The two names of the variable with the list of the job's nodes: the newer name and the older name.
pub(crate) const JOB_NODE_LISTS: [&str; 2] = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"];
/// The command line of the placeholder process of the step `extern`.
const PLACEHOLDER: &str = "sleep 100000000";

/// Returns the role of the outermost directory of Slurm on the cgroup path of `process`. The role says whether the
/// directory belongs to a job, and to which one: the name of a job's directory contains the job id. A directory in
/// which Slurm keeps only its own processes belongs to no job. `None` if there is no directory of Slurm.
///
/// The role also says whether the process belongs to Slurm and not to the job. This is so for the placeholder process
/// of the step `extern`, in which Slurm collects processes that were not started by a job step.
fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    let directories = process.directories;
    (0..directories.len()).find_map(|at| {
        let below = |n: usize| directories.get(at + n).copied();
        let is_v2 = directories[at] == "slurmstepd.scope" || directories[at].ends_with("_slurmstepd.scope");
        let is_v1 = directories[at] == "slurm" || directories[at].starts_with("slurm_");
        if (is_v2 || is_v1) && below(1) == Some("system") {
            return Some(CgroupDirectoryRole::SchedulerOnly { depth: at + 1 });
        }
        let levels = match below(1)?.strip_prefix("uid_") {
            None if is_v2 => 1,
            Some(user) if is_v1 && parse_digits::<u32>(user).is_some() => 2,
            _ => return None,
        };
        let job = job_of_directory(below(levels)?, is_v2)?;
        let depth = at + levels;
        let step = below(levels + 1).and_then(|part| part.strip_prefix("step_"));
        if is_v2 && step.is_some() && below(levels + 2) == Some("slurm") {
            return Some(CgroupDirectoryRole::SchedulerOnly { depth: depth + 2 });
        }
        let is_placeholder =
            process.comm.as_bytes() == b"sleep" && process.command_line.trim_end() == PLACEHOLDER;
        Some(CgroupDirectoryRole::Job { job, depth, is_helper: is_placeholder && step == Some("extern") })
    })
}

fn job_of_directory(name: &str, is_v2: bool) -> Option<JobId> {
    let id = match name.strip_prefix("job_") {
        Some(number) => job_number(number)?,
        None => sluid(name).filter(|_| is_v2)?,
    };
    JobId::new(JobSource::Slurm, id).ok()
}

/// Returns `text` if it is a SLUID, the cluster-wide unique id of a job. Crockford's alphabet has no I, L, O and U.
fn sluid(text: &str) -> Option<&str> {
    let digits = text.strip_prefix('s')?;
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() && !b"ILOU".contains(&byte.to_ascii_uppercase());
    (digits.len() == 13 && digits.bytes().all(is_digit)).then_some(text)
}

/// Reads the job and its number of PUs (logical CPUs) from the environment of a process. `host` is this machine.
/// `None` if the environment names no valid job, or if the process belongs to Slurm's prolog or epilog, which run for
/// a job but not in the job.
fn environ_claim(environ: BatchEnvironment<'_>, host: &LocalHost) -> Option<EnvironClaim> {
    if let Some("prolog_slurmd" | "epilog_slurmd") = environ.get("SLURM_SCRIPT_CONTEXT") {
        return None;
    }
    let (job, alias) = job_id_and_sluid(environ).ok()?;
    let count = job_cpu_count(environ, host).ok().or_else(|| count_of_batch_step(environ));
    let cpu_request = count.and_then(valid_cpu_count).map(CpuRequest::Pus);
    Some(EnvironClaim { job, alias, cpu_request, tasks: tasks_of_job(environ, host) })
}

/// Returns the number of the job's tasks on this node. Without `--ntasks`, the variable has the value 1.
fn tasks_of_job(environ: BatchEnvironment<'_>, host: &LocalHost) -> Option<u32> {
    count_of_this_node(environ, host, "SLURM_TASKS_PER_NODE", JOB_NODE_LISTS).ok().filter(|&tasks| tasks > 0)
}

/// Returns the number of the job's Slurm CPUs on this machine, from the environment variable
/// `SLURM_JOB_CPUS_PER_NODE`. The variable has one number for each machine of the job.
///
/// # Errors
/// If the variable is not set or invalid, or if the environment does not show which of the numbers is for this
/// machine.
pub(crate) fn job_cpu_count(environ: BatchEnvironment<'_>, host: &LocalHost) -> Result<u32, HookInputError> {
    count_of_this_node(environ, host, "SLURM_JOB_CPUS_PER_NODE", JOB_NODE_LISTS)
}

/// Returns the count for this machine from the environment variable `variable`. This variable has one count for each
/// machine of the job, such as `72(x2),36`. A second variable lists the names of the machines in the same order.
/// `lists` has two possible names of the second variable. The first one that is set is used.
///
/// The name of this machine is the value of `SLURMD_NODENAME`. If `SLURMD_NODENAME` is not set, the name in `host` is
/// used. If all counts are equal, the list of machines is not read.
///
/// # Errors
/// If a variable is missing or invalid, or if the list does not contain this machine.
pub(crate) fn count_of_this_node(
    environ: BatchEnvironment<'_>,
    host: &LocalHost,
    variable: &'static str,
    lists: [&'static str; 2],
) -> Result<u32, HookInputError> {
    let counts = environ.required_value(variable)?;
    let invalid = |why| HookInputError::invalid_list(variable, &why);
    if let Some(count) = counts::count_if_same_on_all_nodes(counts).map_err(invalid)? {
        return Ok(count);
    }
    let (list, nodes) = environ.first_set_variable(lists)?;
    let name = environ.get("SLURMD_NODENAME").unwrap_or(&host.name);
    let position =
        hostlist::find_node(nodes, name).map_err(|why| HookInputError::invalid_list(list, &why))?;
    let index = position.index.ok_or_else(|| HookInputError::host_not_listed(list, name))?;
    counts::count_of_node(counts, index, position.node_count).map_err(invalid)
}

/// Returns the job number (`SLURM_JOB_ID`) as a job id, and the SLUID (Slurm's cluster-wide unique id of a job) as a
/// second id of the same job. The second id is `None` if the environment contains no valid SLUID.
///
/// # Errors
/// If the environment contains no valid job number.
pub(crate) fn job_id_and_sluid(
    environ: BatchEnvironment<'_>,
) -> Result<(JobId, Option<JobId>), HookInputError> {
    let (variable, number) = environ.first_set_variable(["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let invalid = || HookInputError::invalid_job_id(variable, number);
    let job = job_number(number)
        .and_then(|number| JobId::new(JobSource::Slurm, number).ok())
        .ok_or_else(invalid)?;
    let alias =
        environ.get("SLURM_JOB_SLUID").and_then(sluid).and_then(|id| JobId::new(JobSource::Slurm, id).ok());
    Ok((job, alias))
}

/// Returns the number of CPUs of the batch script, which has no step number. `None` in a step, because the variable has
/// the count of the step there. Also `None` if the environment has the counts of the job.
fn count_of_batch_step(environ: BatchEnvironment<'_>) -> Option<u32> {
    let in_step = environ.get("SLURM_STEP_ID").or_else(|| environ.get("SLURM_STEPID")).is_some();
    let has_job_count = environ.get("SLURM_JOB_CPUS_PER_NODE").is_some();
    (!in_step && !has_job_count).then(|| environ.positive_number("SLURM_CPUS_ON_NODE"))?
}
