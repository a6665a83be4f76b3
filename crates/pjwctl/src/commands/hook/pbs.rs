//! OpenPBS, whose hook in Python calls these hooks with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement;

use super::context::{HookInput, Variables};
use super::variables;

/// Runs the hook of OpenPBS at the start of a job: registers the job.
pub(super) fn begin(context: &HookInput) -> anyhow::Result<Variables> {
    context.register(announcement::from_openpbs(&context.arguments())?)
}

/// Runs the prologue of Torque: registers the job.
pub(super) fn torque_begin(context: &HookInput) -> anyhow::Result<Variables> {
    context.register(announcement::from_torque(&context.arguments())?)
}

/// Runs the hook of OpenPBS or the epilogue of Torque at the end of a job: releases the job.
pub(super) fn end(context: &HookInput) -> anyhow::Result<Variables> {
    context.release(&announcement::from_openpbs(&context.arguments())?)
}

/// Runs the hook of OpenPBS before a program of the job starts: returns the variables for the program.
pub(super) fn launch(context: &HookInput) -> anyhow::Result<Variables> {
    variables::of_job(context, &announcement::from_openpbs_task_environment(&context.attributes)?)
}
