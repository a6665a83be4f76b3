//! OpenPBS, whose hook in Python calls these hooks with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement;

use super::context::{HookInput, JobVariables};
use super::variables;

/// Runs the hook of OpenPBS at the start of a job: registers the job at the daemon. Returns no environment variables.
pub(super) fn execjob_begin(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.register(announcement::from_openpbs(&context.arguments())?)
}

/// Runs the prologue of Torque, before a job starts: registers the job at the daemon. Returns no environment variables.
pub(super) fn torque_prologue(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.register(announcement::from_torque(&context.arguments())?)
}

/// Runs the hook of OpenPBS at the end of a job, or the epilogue of Torque: releases the job. Returns no environment
/// variables.
pub(super) fn job_end(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.release(&announcement::from_openpbs(&context.arguments())?)
}

/// Runs the hook of OpenPBS before a program of a job starts: returns the environment variables for the program, such
/// as `PJW_CPUS`.
pub(super) fn execjob_launch(context: &HookInput) -> anyhow::Result<JobVariables> {
    variables::job_variables(context, &announcement::from_openpbs_task_environment(&context.attributes)?)
}
