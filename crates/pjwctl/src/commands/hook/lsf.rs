//! LSF and OpenLava: `PRE_EXEC`, `POST_EXEC`, `HOST_PRE_EXEC`, `HOST_POST_EXEC`, and `JOB_STARTER`.
//!
//! The commands before and after the job register and release it only if the site runs them as root. The starter
//! always runs as the job's owner.

use pjw_sources::announcement::{self, JobAnnouncement};

use super::context::{HookInput, JobVariables, is_root};
use super::variables;

/// Runs the hook `PRE_EXEC` or `HOST_PRE_EXEC` of LSF, before a job starts: registers the job at the daemon, if the
/// hook runs as root. Returns no environment variables.
pub(super) fn pre_exec(context: &HookInput) -> anyhow::Result<JobVariables> {
    if is_root() { context.register(announcement(context)?) } else { Ok(Vec::new()) }
}

/// Runs the hook `POST_EXEC` or `HOST_POST_EXEC` of LSF, after a job has ended: releases the job, if the hook runs as
/// root. Returns no environment variables.
pub(super) fn post_exec(context: &HookInput) -> anyhow::Result<JobVariables> {
    if is_root() { context.release_and_log(&announcement(context)?) } else { Ok(Vec::new()) }
}

/// Handles a call of the hook as the `JOB_STARTER` of LSF, which starts the command of a job. Returns the environment
/// variables for the command, such as `PJW_CPUS`.
pub(super) fn job_starter(context: &HookInput) -> anyhow::Result<JobVariables> {
    variables::job_starter_variables(context, &announcement(context)?)
}

fn announcement(context: &HookInput) -> anyhow::Result<JobAnnouncement> {
    Ok(announcement::from_lsf(&context.attributes, &context.host)?)
}
