//! OpenPBS, whose hook in Python calls these hooks with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement;

use super::context::{HookInput, JobVariables};
use super::variables;

/// Runs for the event `execjob_begin` of OpenPBS, before a job starts: registers the job at the daemon. Returns no
/// environment variables.
pub(super) fn execjob_begin(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.register(announcement::from_openpbs(&context.arguments())?)
}

/// Runs the prologue of Torque, before a job starts: registers the job at the daemon. Returns no environment variables.
pub(super) fn torque_prologue(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.register(announcement::from_torque(&context.arguments())?)
}

/// Runs for the events `execjob_end` and `execjob_abort` of OpenPBS, or as the epilogue of Torque, after a job has
/// ended: releases the job. Returns no environment variables.
pub(super) fn job_end(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.release(&announcement::from_openpbs(&context.arguments())?)
}

/// Runs for the event `execjob_launch` of OpenPBS, before a program of a job starts: returns the environment variables
/// for the program, such as `PJW_CPUS`.
pub(super) fn execjob_launch(context: &HookInput) -> anyhow::Result<JobVariables> {
    variables::job_variables(context, &announcement::from_openpbs_task_environment(&context.attributes)?)
}
