//! OpenPBS, whose hook in Python calls these hooks with its arguments, and Torque's prologue and epilogue.

use pjw_sources::announcement::{self, Announcement};

use super::context::{Context, Variables};
use super::variables;

pub(super) fn begin(context: &Context) -> anyhow::Result<Variables> {
    register(context, announcement::openpbs(&context.arguments())?)
}

pub(super) fn torque_begin(context: &Context) -> anyhow::Result<Variables> {
    register(context, announcement::torque(&context.arguments())?)
}

fn register(context: &Context, announcement: Announcement) -> anyhow::Result<Variables> {
    context.client.register(&announcement.job.clone(), announcement, context.cores)?;
    Ok(Vec::new())
}

pub(super) fn end(context: &Context) -> anyhow::Result<Variables> {
    context.client.release(&announcement::openpbs(&context.arguments())?)?;
    Ok(Vec::new())
}

pub(super) fn launch(context: &Context) -> anyhow::Result<Variables> {
    variables::of_job(context, &announcement::pbs_task(&context.attributes)?)
}
