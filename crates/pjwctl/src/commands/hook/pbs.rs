//! OpenPBS, whose hook in Python calls these hooks with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement;

use super::context::{Context, Variables};
use super::variables;

pub(super) fn begin(context: &Context) -> anyhow::Result<Variables> {
    context.register(announcement::from_openpbs(&context.arguments())?)
}

pub(super) fn torque_begin(context: &Context) -> anyhow::Result<Variables> {
    context.register(announcement::from_torque(&context.arguments())?)
}

pub(super) fn end(context: &Context) -> anyhow::Result<Variables> {
    context.release(&announcement::from_openpbs(&context.arguments())?)
}

pub(super) fn launch(context: &Context) -> anyhow::Result<Variables> {
    variables::of_job(context, &announcement::from_openpbs_task_environment(&context.attributes)?)
}
