//! pjw-sources interprets the attributes that batch systems leave on processes.
//!
//! There is one module for each batch system (`SYSTEMS` is the table). The module has the forms of the system's
//! cgroups, its variables, the names of its launchers, and the form of its core counts. All functions are pure: they
//! get attributes, and return claims.
//!
//! A claim is not a decision. pjw-core weighs the claims, together with the user of the process, which is not known
//! here. The cgroup weighs much, because a job's user cannot choose it. The environment weighs little,
//! because every user can set it. Program names prove nothing. What the attributes do not show is left open: an unknown
//! core count is `None`, and an id that [`pjw_core::job::JobId`] does not allow makes no claim.
//!
//! `docs/sources.md` lists all of this in one table.
#![forbid(unsafe_code)]

pub mod announcement;
mod cgroup_path;
mod condor;
mod config_text;
pub mod counts;
mod error;
mod flux;
mod host;
pub mod hostlist;
mod lsf;
mod number;
mod oar;
mod pbs;
pub mod scheduler;
mod sge;
mod slurm;
pub mod slurm_conf;
mod system;
pub mod task;

use std::collections::BTreeSet;

use pjw_core::snapshot::{BatchAttributes, BatchIdentity, BatchRole, JobIdAttribute, JobReference};
use pjw_core::{cpuset::CpuSet, ids::Comm, job::JobSource};

use cgroup_path::CgroupPath;
use system::{BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes};

pub use host::LocalHost;

/// The recognised batch systems, in the order of [`JobSource::ALL`].
const SYSTEMS: [BatchSystem; 7] = [
    slurm::BATCH_SYSTEM,
    lsf::BATCH_SYSTEM,
    pbs::BATCH_SYSTEM,
    sge::BATCH_SYSTEM,
    condor::BATCH_SYSTEM,
    flux::BATCH_SYSTEM,
    oar::BATCH_SYSTEM,
];

/// The variable with the CPUs on which pjwctl started the process.
const START_CPUS: &str = "PJW_CPUS";
/// The variable that only the instances of `pjwctl spawn` have.
const RANK: &str = "PJW_RANK";

/// Returns the names of all environment variables that [`recognise_jobs`] uses: those of batch systems, and those of
/// `pjwctl spawn`. pjwd must read these variables of each process, and pass them to [`recognise_jobs`].
#[must_use]
pub fn job_variable_names() -> BTreeSet<&'static str> {
    SYSTEMS.iter().flat_map(|system| system.variables).copied().chain([START_CPUS, RANK]).collect()
}

/// Returns the batch systems whose job cpusets pjwd can narrow. Such a batch system gives each job a cgroup with
/// a cpuset. pjwd narrows the cpuset: it removes the PUs (logical CPUs) that pjw has not granted to the job.
#[must_use]
pub fn batch_systems_with_narrowable_cpusets() -> BTreeSet<JobSource> {
    SYSTEMS.iter().filter(|system| system.has_narrowable_cpuset).map(|system| system.source).collect()
}

/// Returns the batch system to which a launcher with the program name `comm` belongs. A launcher is a daemon of
/// a batch system whose child processes belong to a job. `None` if no batch system has a launcher with this
/// name.
///
/// Every user can choose program names. So the caller must check the user of the process.
#[must_use]
pub fn batch_system_of_launcher(comm: &Comm) -> Option<JobSource> {
    let is_launcher =
        |system: &&BatchSystem| system.launchers.iter().any(|name| name.as_bytes() == comm.as_bytes());
    SYSTEMS.iter().find(is_launcher).map(|system| system.source)
}

/// Finds out what the attributes of a process say about jobs. The result has the jobs to which the process possibly
/// belongs, and the role of the process in its batch system. For example, the role is launcher for a daemon whose child
/// processes belong to jobs. The result also has the PUs (logical CPUs) on which `pjwctl spawn` started the process or
/// an ancestor of the process.
///
/// `comm` is the program name of the process. `attributes` has its cgroups, its environment and its command line.
/// `host` describes this machine. Only the batch systems in `enabled_systems` are considered.
///
/// The references to jobs ([`JobReference`]) are in this order:
/// 1. The job that the cgroup path names. If several directories of the path have the form of a job's directory, the
///    outermost one counts, because a user can create directories with any name below the directory of a job.
/// 2. The jobs that environment variables name, at most one for each batch system. A job is left out if the cgroup path
///    names another job of the same batch system. A job that the cgroup path names too is in the result twice.
///
/// The number of cores in a reference comes from the environment variables. There are no references if the process is
/// in a cgroup that a batch system uses only for its own processes.
#[must_use]
pub fn recognise_jobs(
    comm: &Comm,
    attributes: &BatchAttributes,
    host: &LocalHost,
    enabled_systems: &BTreeSet<JobSource>,
) -> BatchIdentity {
    let is_enabled = |source: &JobSource| enabled_systems.contains(source);
    let systems: Vec<&BatchSystem> = SYSTEMS.iter().filter(|system| is_enabled(&system.source)).collect();
    let launcher = batch_system_of_launcher(comm).filter(is_enabled);
    let directory = find_outermost_directory(&systems, comm, attributes, host);

    let helper = directory.as_ref().filter(|(_, role, _)| role.is_of_helper()).map(|(source, ..)| *source);
    let role = match (launcher, helper) {
        (Some(source), _) => BatchRole::Launcher(source),
        (None, Some(source)) => BatchRole::Helper(source),
        (None, None) => BatchRole::Ordinary,
    };
    let cgroup_job = match directory {
        // A directory that has only processes of the scheduler names no job.
        Some((_, CgroupDirectoryRole::SchedulerOnly { .. }, _)) => {
            return BatchIdentity { role, ..BatchIdentity::default() };
        }
        Some((_, CgroupDirectoryRole::Job { job, .. }, path)) => Some((job, path)),
        None => None,
    };

    let environ_claims: Vec<(EnvironClaim, &BatchSystem)> = systems
        .into_iter()
        .filter_map(|system| {
            Some(((system.environ_claim)(BatchEnvironment::new(system, attributes), host)?, system))
        })
        .collect();
    let mut job_references = Vec::new();
    if let Some((job, path)) = &cgroup_job {
        let claim = environ_claims.iter().find(|(environ_claim, _)| environ_claim.is_for_job(job));
        let (cpu_request, tasks) = claim.map_or((None, None), |(environ_claim, _)| {
            (environ_claim.cpu_request.clone(), environ_claim.tasks)
        });
        let kind = JobIdAttribute::Cgroup(path.clone());
        job_references.push(JobReference { job: job.clone(), kind, cpu_request, tasks });
    }
    for (environ_claim, system) in environ_claims {
        let is_contradicted = cgroup_job
            .as_ref()
            .is_some_and(|(job, _)| job.source() == environ_claim.job.source() && *job != environ_claim.job);
        if !is_contradicted {
            let kind = JobIdAttribute::Environment { process_scope: system.process_grouping };
            let EnvironClaim { job, cpu_request, tasks, .. } = environ_claim;
            job_references.push(JobReference { job, kind, cpu_request, tasks });
        }
    }
    let is_instance = attributes.environ.contains_key(RANK);
    let start_cpus = attributes.environ.get(START_CPUS).filter(|_| is_instance);
    let start_cpus = start_cpus.and_then(|cpus| cpus.parse().ok()).filter(|cpus: &CpuSet| !cpus.is_empty());
    BatchIdentity { role, job_references, start_cpus }
}

/// Returns the outermost cgroup directory of a process that one of `systems` recognises. The result has the batch
/// system, the role of the directory, and its path. The role says whether the directory belongs to a job or contains
/// only processes of the batch system. `comm` is the program name of the process.
///
/// Searches the cgroup paths in `attributes` in the order of [`cgroup_path::paths_by_priority`], and uses the first
/// path with such a directory. `None` if no path has one.
fn find_outermost_directory(
    systems: &[&BatchSystem],
    comm: &Comm,
    attributes: &BatchAttributes,
    host: &LocalHost,
) -> Option<(JobSource, CgroupDirectoryRole, String)> {
    cgroup_path::paths_by_priority(&attributes.cgroups).find_map(|line| {
        let path = CgroupPath::new(line, host.flux_user)?;
        let process = ProcessAttributes {
            directories: path.trusted_directories(),
            comm,
            command_line: &attributes.command_line,
        };
        let (source, role) = systems
            .iter()
            .filter_map(|system| Some((system.source, (system.find_directory_role)(&process)?)))
            .min_by_key(|(source, role)| (role.depth(), *source))?;
        let directory = path.path_to_directory(role.depth());
        Some((source, role, directory))
    })
}
