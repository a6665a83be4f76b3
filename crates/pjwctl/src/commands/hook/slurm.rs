//! Slurm: `Prolog`, `Epilog` and `TaskProlog` of slurm.conf(5).
//!
//! The prolog runs as root before the job's cgroup exists, with almost no environment. If Slurm itself gives the job
//! a cpuset (`ConstrainCores=yes`), or may give it one, the prolog takes no cores, because Slurm would choose others.

use std::path::Path;

use pjw_core::job::JobId;
use pjw_sources::announcement::{self, JobAnnouncement};
use pjw_sources::slurm_conf::SlurmConf;
use pjw_sources::task;

use super::context::{HookInput, JobVariables, read_file};
use super::variables;

/// The configuration file of Slurm, if `SLURM_CONF` names no other.
const DEFAULT_CONF: &str = "/etc/slurm/slurm.conf";

/// Runs the `Prolog` of Slurm, before a job starts: registers the job at the daemon. Has no effect if Slurm confines
/// the job to cores itself (`ConstrainCores=yes`), or if files that were not read decide it: the daemon discovers the
/// job then. Returns no environment variables.
pub(super) fn prolog(context: &HookInput) -> anyhow::Result<JobVariables> {
    let announcement = announcement::from_slurm(&context.attributes, &context.host)?;
    let conf = read_conf(context);
    if conf.gives_cpusets() == Some(false) {
        let job = discovered_id(&announcement, conf);
        context.client.register(&job, announcement, context.cores)?;
    }
    Ok(Vec::new())
}

/// Runs the `Epilog` of Slurm, after a job has ended: releases the job. Returns no environment variables.
pub(super) fn epilog(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.release_and_log(&announcement::from_slurm(&context.attributes, &context.host)?)
}

/// Runs the `TaskProlog` of Slurm, before a task (process) of a job step starts: waits until this process can run only
/// on the cores of the job. Returns the environment variables for the task, such as `OMP_NUM_THREADS`.
pub(super) fn task_prolog(context: &HookInput) -> anyhow::Result<JobVariables> {
    let announcement = announcement::from_slurm(&context.attributes, &context.host)?;
    let Some((status, job)) = context.client.wait_until_confined(&announcement)? else {
        return Ok(Vec::new());
    };
    let task = task::read_slurm_task_cpus(&context.attributes, &context.host);
    variables::slurm_task_variables(context, &status, &job, task)
}

/// Returns the id by which the daemon will discover the job: the id in the name of its cgroup directory.
fn discovered_id(announcement: &JobAnnouncement, conf: SlurmConf) -> JobId {
    let has_sluid = conf.has_sluid_directories && Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    announcement.alias.as_ref().filter(|_| has_sluid).unwrap_or(&announcement.job).clone()
}

fn read_conf(context: &HookInput) -> SlurmConf {
    let path = Path::new(context.variable("SLURM_CONF").unwrap_or(DEFAULT_CONF));
    let cgroup_conf = read_file(&path.with_file_name("cgroup.conf")).unwrap_or_default();
    SlurmConf::parse(read_file(path).as_deref(), &cgroup_conf)
}
