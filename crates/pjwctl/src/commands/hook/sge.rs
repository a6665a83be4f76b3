//! Grid Engine: `prolog`, `epilog` and `starter_method` of queue_conf(5).
//!
//! Prolog and epilog run as the job's owner unless their configured command begins with `root@`, and only on the
//! job's first host.

use pjw_sources::announcement::{self, JobAnnouncement};

use super::context::{HookInput, JobVariables, is_root};
use super::variables;

/// Runs the `prolog` of Grid Engine, before a job starts: registers the job at the daemon, if the hook runs as root.
/// Returns no environment variables.
pub(super) fn prolog(context: &HookInput) -> anyhow::Result<JobVariables> {
    if is_root() { context.register(announcement(context)?) } else { Ok(Vec::new()) }
}

/// Runs the `epilog` of Grid Engine, after a job has ended: releases the job, if the hook runs as root. Returns no
/// environment variables.
pub(super) fn epilog(context: &HookInput) -> anyhow::Result<JobVariables> {
    if is_root() { context.release(&announcement(context)?) } else { Ok(Vec::new()) }
}

/// Runs the `starter_method` of Grid Engine, which starts the command of a job: returns the environment variables for
/// the command, such as `PJW_CPUS`.
pub(super) fn starter_method(context: &HookInput) -> anyhow::Result<JobVariables> {
    variables::job_starter_variables(
        context,
        &announcement::from_sge(&context.attributes, &context.host, None, None)?,
    )
}

fn announcement(context: &HookInput) -> anyhow::Result<JobAnnouncement> {
    let hostfile = context.file_named_by_variable("PE_HOSTFILE");
    let owner = context.arguments.first().map(String::as_str);
    Ok(announcement::from_sge(&context.attributes, &context.host, owner, hostfile.as_deref())?)
}
