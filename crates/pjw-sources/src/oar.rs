//! How pjw recognises the jobs of OAR 2.5.
//!
//! Cgroups (v1): `oar/<user>_<jobid>`. Without cgroups: `OAR_JOB_ID` or `OAR_JOBID`. A member of an array is a job
//! with an id of its own. OAR gives every job a cpuset, which has the number of cores. No variable has it.

use pjw_core::job::{JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::host::LocalHost;
use crate::system::{
    BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes, job_number,
};

/// How pjw recognises the processes and jobs of OAR. An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Oar,
    launchers: &["oarexec"],
    variables: &["OAR_JOB_ID", "OAR_JOBID"],
    process_grouping: JobProcessGrouping::Neither,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    (0..process.directories.len()).find_map(|at| {
        let [top, directory] = process.directories.get(at..at + 2)? else { return None };
        let (user, id) = directory.rsplit_once('_').filter(|_| *top == "oar")?;
        (!user.is_empty()).then(|| Some(CgroupDirectoryRole::job_directory(make_job_id(id)?, at + 1)))?
    })
}

fn environ_claim(environ: BatchEnvironment<'_>, _host: &LocalHost) -> Option<EnvironClaim> {
    let id = environ.get("OAR_JOB_ID").or_else(|| environ.get("OAR_JOBID"))?;
    make_job_id(id).map(EnvironClaim::from_job_id)
}

fn make_job_id(id: &str) -> Option<JobId> {
    JobId::new(JobSource::Oar, job_number(id)?).ok()
}
