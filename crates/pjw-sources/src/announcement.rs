//! The description of a job that a scheduler gives to a hook: the job's id, its owner, and its amount of this node.
//! The hook may run before the job has a process.
//!
//! The input is plain data: the hook's environment, its arguments, or its standard input. The module of each batch
//! system parses the formats.
//!
//! Nothing is guessed. A value that is missing or impossible is a [`HookInputError`], which names the
//! variable and the remedy. A job without a count can still be released, and the hook's configuration can give
//! the count.

use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::{ids::Uid, snapshot::BatchAttributes};

use crate::system::{BatchEnvironment, valid_cpu_count};
use crate::{condor, flux, host::LocalHost, lsf, number::parse_digits, pbs, sge, slurm};

pub use crate::error::HookInputError;

/// The announcement of a job: the job id, the owner, and the number of cores or PUs (logical CPUs), as a batch
/// system describes them to a hook. A hook is a program that the batch system runs when a job starts or ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobAnnouncement {
    /// The id of the job, such as `slurm:7`.
    pub job: JobId,
    /// A second id of the same job. The name of the job's cgroup may contain this second id instead of `job`.
    /// `None` if the job has only one id.
    pub alias: Option<JobId>,
    /// The user that owns the job. `Err` if the description names no valid user.
    pub owner: Result<JobOwner, HookInputError>,
    /// The number of cores or PUs (logical CPUs) that the batch system allocated to the job on this machine.
    /// For Torque, this number is computed from the resources that the job requested. `Err` if the
    /// description contains no valid number.
    pub cpu_request: Result<CpuRequest, HookInputError>,
}

/// The user that owns a job: a user id or a user name, depending on the batch system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobOwner {
    /// The user id.
    Uid(Uid),
    /// The user name.
    Name(String),
}

/// Makes a request for `count` cores or PUs (logical CPUs), as `unit` says. Fails if no machine can have this number.
fn to_cpu_request(
    count: Result<u32, HookInputError>,
    unit: fn(u32) -> CpuRequest,
) -> Result<CpuRequest, HookInputError> {
    count.and_then(|count| valid_cpu_count(count).map(unit).ok_or(HookInputError::CountOutOfRange(count)))
}

/// Parses `text`, a user id. `variable` names the source of the text in the error. The largest number is refused: it
/// means "no user" (chown(2)).
fn parse_uid(variable: &'static str, text: &str) -> Result<JobOwner, HookInputError> {
    let uid = parse_digits::<u32>(text).filter(|&uid| uid != u32::MAX);
    uid.map(|uid| JobOwner::Uid(Uid(uid))).ok_or_else(|| HookInputError::invalid_user(variable, text))
}

/// Parses `text`, a user name or a user id. `variable` names the source of the text in the error.
///
/// # Errors
/// If `text` is neither.
fn parse_owner(variable: &'static str, text: &str) -> Result<JobOwner, HookInputError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_name_byte = |byte: u8| byte.is_ascii_graphic() && !b":/".contains(&byte);
    if is_number {
        return parse_uid(variable, text);
    }
    let is_name = (1..=256).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(is_name_byte);
    let owner = is_name.then(|| JobOwner::Name(text.to_owned()));
    owner.ok_or_else(|| HookInputError::invalid_user(variable, text))
}

/// Reads the description of a job from `environment`: the environment in which Slurm runs its prolog, epilog and
/// task prolog scripts. The environment says how many CPUs the job has on each of its machines. The variable
/// `SLURMD_NODENAME` says which of these machines is this one. If the variable is not set, the host name in
/// `host` is used instead.
///
/// # Errors
/// If the environment contains no valid job id. Without a valid owner or number of CPUs, the call succeeds, and
/// the field `owner` or `cpu_request` of the result is an error.
pub fn from_slurm(
    environment: &BatchAttributes,
    host: &LocalHost,
) -> Result<JobAnnouncement, HookInputError> {
    const VARIABLES: &[&str] = &[
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_SLUID",
        "SLURM_JOB_UID",
        "SLURM_UID",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURMD_NODENAME",
    ];
    let environ = BatchEnvironment::with_variables(VARIABLES, environment);
    let (job, alias) = slurm::job_id_and_sluid(environ)?;
    let owner = environ
        .first_set_variable(["SLURM_JOB_UID", "SLURM_UID"])
        .and_then(|(variable, text)| parse_uid(variable, text));
    Ok(JobAnnouncement {
        job,
        alias,
        owner,
        cpu_request: to_cpu_request(slurm::job_cpu_count(environ, host), CpuRequest::Pus),
    })
}

/// Reads the description of a job from `environment`: the environment in which LSF runs its pre-execution
/// commands, its post-execution commands and its job starter. The environment says how many LSF slots the job
/// has on each of its machines. The job requests one core for each of its slots on this machine, whose name is in
/// `host`.
///
/// # Errors
/// If the environment contains no valid job id. Without a valid owner or number of cores, the call succeeds,
/// and the field `owner` or `cpu_request` of the result is an error.
pub fn from_lsf(environment: &BatchAttributes, host: &LocalHost) -> Result<JobAnnouncement, HookInputError> {
    const VARIABLES: &[&str] =
        &["LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_JOB_EXECUSER", "LSFUSER"];
    let environ = BatchEnvironment::with_variables(VARIABLES, environment);
    let owner = environ
        .first_set_variable(["LSB_JOB_EXECUSER", "LSFUSER"])
        .and_then(|(variable, text)| parse_owner(variable, text));
    let cpu_request = to_cpu_request(lsf::slot_count(environ, host), CpuRequest::Cores);
    Ok(JobAnnouncement { job: lsf::job_id(environ)?, alias: None, owner, cpu_request })
}

/// Reads the description of a job from the arguments of pjw's hook for OpenPBS. The arguments are:
/// 1. The job id.
/// 2. The user.
/// 3. The `exec_vnode` of the job: OpenPBS's list of the CPUs that the job has on each of its machines.
/// 4. The name of this machine in OpenPBS.
///
/// At the end of a job, only the job id is required. Each CPU in `exec_vnode` counts as one PU (logical CPU).
///
/// # Errors
/// If the first argument is no valid job id. Without a valid owner or number of CPUs, the call succeeds, and
/// the field `owner` or `cpu_request` of the result is an error.
pub fn from_openpbs(arguments: &[&str]) -> Result<JobAnnouncement, HookInputError> {
    let cpu_request = match arguments.get(2..) {
        Some([exec_vnode, node, ..]) => {
            to_cpu_request(pbs::cpu_count_of_node(exec_vnode, node), CpuRequest::Pus)
        }
        _ => Err(HookInputError::CountNotProvided(JobSource::Pbs)),
    };
    pbs_job(arguments, cpu_request)
}

/// Reads the description of a job from the arguments of Torque's prologue script. Not for the epilogue script, which
/// has other arguments. These arguments are used:
///
/// - 1: the job id. Only this argument is required.
/// - 2: the user.
/// - 5: the list of resource limits.
/// - 9: the list of hosts. Only newer versions of Torque pass it.
///
/// The limits and the hosts give the number of cores on this machine.
///
/// # Errors
/// If the first argument is no valid job id. Without a valid owner or number of cores, the call succeeds, and the field
/// `owner` or `cpu_request` of the result is an error.
pub fn from_torque(arguments: &[&str]) -> Result<JobAnnouncement, HookInputError> {
    let limits = arguments.get(4).copied().unwrap_or_default();
    let hosts = arguments.get(8).copied().unwrap_or_default();
    pbs_job(arguments, to_cpu_request(pbs::processors_per_node(limits, hosts), CpuRequest::Cores))
}

/// Makes the announcement of a PBS job from the arguments of a hook: the first is the job id, the second is the user.
/// `cpu_request` is what the job requests on this machine.
///
/// # Errors
/// If the job id is missing or invalid. A missing or invalid user is an error only in the field `owner` of the
/// result.
fn pbs_job(
    arguments: &[&str],
    cpu_request: Result<CpuRequest, HookInputError>,
) -> Result<JobAnnouncement, HookInputError> {
    const ID: &str = "the first argument";
    const USER: &str = "the second argument";
    let id = arguments.first().filter(|id| !id.is_empty()).ok_or(HookInputError::Missing(ID))?;
    let job = pbs::parse_job_id(id).ok_or_else(|| HookInputError::invalid_job_id(ID, id))?;
    let owner =
        arguments.get(1).ok_or(HookInputError::Missing(USER)).and_then(|name| parse_owner(USER, name));
    Ok(JobAnnouncement { job, alias: None, owner, cpu_request })
}

/// Reads the id of a job from `environment`: the environment that OpenPBS passes to an `execjob_launch` hook for
/// a task of the job. This environment contains no owner and no number of cores. So the fields `owner` and
/// `cpu_request` of the result are always errors.
///
/// # Errors
/// If the environment contains no valid job id.
pub fn from_openpbs_task_environment(
    environment: &BatchAttributes,
) -> Result<JobAnnouncement, HookInputError> {
    let id = BatchEnvironment::with_variables(&["PBS_JOBID"], environment).required_value("PBS_JOBID")?;
    pbs_job(&[id], Err(HookInputError::CountNotProvided(JobSource::Pbs)))
}

/// Reads the description of a job from `environment`: the environment in which Grid Engine runs its prolog, its epilog
/// and its starter method. `host` describes this machine.
///
/// `owner` is the user name that Grid Engine substitutes for `$job_owner` in the command line of the prolog or epilog.
/// Pass `None` if the command line does not contain `$job_owner`. The field `owner` of the result is an error then.
///
/// `hostfile_text` is the content of the file whose path is in the variable `PE_HOSTFILE`. This file lists the slots of
/// the job on each of its machines. The number of cores is the number of slots on this machine, but at most the total
/// in `environment`. Pass `None` if the job has no such file. The number of cores is then the total in `environment`.
/// This total is for all machines of the job, so the field `cpu_request` of the result is an error if the job has
/// several machines.
///
/// # Errors
/// If the environment contains no valid job id. Without a valid owner or number of cores, the call succeeds, and the
/// field `owner` or `cpu_request` of the result is an error.
pub fn from_sge(
    environment: &BatchAttributes,
    host: &LocalHost,
    owner: Option<&str>,
    hostfile_text: Option<&str>,
) -> Result<JobAnnouncement, HookInputError> {
    const OWNER: &str = "the first argument ($job_owner)";
    let environ =
        BatchEnvironment::with_variables(&["JOB_ID", "SGE_TASK_ID", "NSLOTS", "NHOSTS"], environment);
    let count = match hostfile_text {
        // A user can set PE_HOSTFILE for a job without a parallel environment.
        Some(text) => sge::slot_count_in_hostfile(text, host)
            .and_then(|count| Ok(count.min(sge::slots_on_all_hosts(environ)?))),
        None => sge::slot_count(environ),
    };
    let owner = owner.ok_or(HookInputError::Missing(OWNER)).and_then(|name| parse_owner(OWNER, name));
    Ok(JobAnnouncement {
        job: sge::job_id(environ)?,
        alias: None,
        owner,
        cpu_request: to_cpu_request(count, CpuRequest::Cores),
    })
}

/// Reads the description of a job from the data that HTCondor gives to its preparation hook and its job wrapper:
///
/// - `environment` has the name of the job's slot (`_CONDOR_SLOT`), from which pjw makes the job id. A slot is
///   HTCondor's share of a machine for one job.
/// - `machine_ad` is the text of the file whose path is in the variable `_CONDOR_MACHINE_AD`. It has the number of
///   cores, and the full name of the slot.
/// - `job_ad` is the text of the file whose path is in the variable `_CONDOR_JOB_AD`. It has the owner.
///
/// Pass an empty text for a file that does not exist.
///
/// # Errors
/// If the environment contains no valid name of a slot. Without a valid owner or number of cores, the call succeeds,
/// and the field `owner` or `cpu_request` of the result is an error.
pub fn from_condor(
    environment: &BatchAttributes,
    machine_ad: &str,
    job_ad: &str,
) -> Result<JobAnnouncement, HookInputError> {
    const OWNER: &str = "Owner in the job's ad";
    let slot =
        BatchEnvironment::with_variables(&["_CONDOR_SLOT"], environment).required_value("_CONDOR_SLOT")?;
    let invalid_id = |_| HookInputError::invalid_job_id("_CONDOR_SLOT", slot);
    let slot_id = JobId::new(JobSource::Condor, slot).map_err(invalid_id)?;
    // The variable may lack the machine's name, which the directory of the cgroup contains.
    let without_machine = |name: &str| name.split('@').next().map(str::to_owned);
    let full_name = condor::string_attribute(machine_ad, "Name")
        .filter(|name| without_machine(name) == without_machine(slot));
    let (job, alias) = match full_name.and_then(|name| JobId::new(JobSource::Condor, name).ok()) {
        Some(full_id) if full_id != slot_id => (full_id, Some(slot_id)),
        _ => (slot_id, None),
    };
    let count = condor::slot_core_count(machine_ad)
        .unwrap_or(Err(HookInputError::CountNotProvided(JobSource::Condor)));
    let owner = condor::string_attribute(job_ad, "Owner").ok_or(HookInputError::Missing(OWNER));
    let owner = owner.and_then(|name| parse_owner(OWNER, name));
    Ok(JobAnnouncement { job, alias, owner, cpu_request: to_cpu_request(count, CpuRequest::Cores) })
}

/// Reads the description of a job from `environment`: the environment in which Flux runs its prolog and epilog.
/// This environment does not contain the number of cores. So the field `cpu_request` of the result is always an
/// error.
///
/// # Errors
/// If the environment contains no valid job id. Without a valid owner, the call succeeds, and the field `owner`
/// of the result is an error.
pub fn from_flux(environment: &BatchAttributes) -> Result<JobAnnouncement, HookInputError> {
    let environ = BatchEnvironment::with_variables(&["FLUX_JOB_ID", "FLUX_JOB_USERID"], environment);
    let id = environ.required_value("FLUX_JOB_ID")?;
    let job = flux::parse_job_id(id).ok_or_else(|| HookInputError::invalid_job_id("FLUX_JOB_ID", id))?;
    let owner = environ.required_value("FLUX_JOB_USERID").and_then(|text| parse_uid("FLUX_JOB_USERID", text));
    Ok(JobAnnouncement {
        job,
        alias: None,
        owner,
        cpu_request: Err(HookInputError::CountNotProvided(JobSource::Flux)),
    })
}
