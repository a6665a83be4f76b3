//! How pjw recognises the jobs of Flux.
//!
//! Without `sdexec` all jobs share Flux's own cgroup, and only the environment and the ancestors identify a job. With
//! `sdexec` each job is a service `imp-shell-<rank>-<id>.service` of the user that Flux runs as, below
//! `user@<uid>.service` of that user. Every user can start a service with such a name below the *own* service manager,
//! to join another job, or to get cores for jobs that do not exist. So the name counts only below the manager of the
//! user in [`LocalHost::flux_user`], or root's: only Flux can create directories there. A user's own Flux instance
//! (`shell-<rank>-<id>`) is not a batch system of this node, and is ignored.
//!
//! Job ids are F58: `f` or `ƒ` (U+0192), then base58 digits. They are stored with a plain `f`. No variable has the
//! number of cores. No process group or session belongs to one job: each task may have its own.

use pjw_core::job::{JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes};
use crate::{cgroup_path::service_manager_user, host::LocalHost, number::parse_digits};

/// How pjw recognises the processes and jobs of Flux. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Flux,
    launchers: &["flux-shell", "flux-imp"],
    variables: &["FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"],
    process_grouping: JobProcessGrouping::Neither,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    let manager = process.directories.iter().position(|part| service_manager_user(part).is_some())?;
    process.directories.iter().enumerate().skip(manager + 1).find_map(|(depth, part)| {
        let (rank, id) = part.strip_prefix("imp-shell-")?.strip_suffix(".service")?.split_once('-')?;
        parse_digits::<u32>(rank)?;
        Some(CgroupDirectoryRole::job_directory(parse_job_id(id)?, depth))
    })
}

fn environ_claim(environ: BatchEnvironment<'_>, _host: &LocalHost) -> Option<EnvironClaim> {
    let job = parse_job_id(environ.get("FLUX_JOB_ID")?)?;
    Some(EnvironClaim { tasks: tasks_on_this_node(environ), ..EnvironClaim::from_job_id(job) })
}

/// Returns the number of the job's tasks on this node (flux-environment(7)). `None` unless the tasks are divided
/// equally among the nodes of the job.
fn tasks_on_this_node(environ: BatchEnvironment<'_>) -> Option<u32> {
    let (tasks, nodes) =
        (environ.positive_number("FLUX_JOB_SIZE")?, environ.positive_number("FLUX_JOB_NNODES")?);
    tasks.is_multiple_of(nodes).then_some(tasks / nodes)
}

/// Parses a job id of Flux: the letter `f` or `ƒ`, followed by 1 to 11 base58 digits. Returns `None` if `text` does not
/// have this form.
pub(crate) fn parse_job_id(text: &str) -> Option<JobId> {
    let digits = text.strip_prefix(['f', 'ƒ'])?;
    // A number of 64 bits has at most 11 digits. Base58 leaves out characters that look alike.
    let is_base58 = |byte: u8| byte.is_ascii_alphanumeric() && !b"0OIl".contains(&byte);
    let is_id = (1..=11).contains(&digits.len()) && digits.bytes().all(is_base58);
    is_id.then(|| JobId::new(JobSource::Flux, &format!("f{digits}")).ok())?
}
