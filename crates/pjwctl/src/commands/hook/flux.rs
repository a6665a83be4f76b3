//! Flux: the prolog and epilog of the plugin `perilog.so`, run as root on each node.

use pjw_sources::announcement;

use super::context::{Context, Variables};

pub(super) fn prolog(context: &Context) -> anyhow::Result<Variables> {
    let announcement = announcement::flux(&context.attributes)?;
    context.client.register(&announcement.job.clone(), announcement, context.cores)?;
    Ok(Vec::new())
}

pub(super) fn epilog(context: &Context) -> anyhow::Result<Variables> {
    context.client.release(&announcement::flux(&context.attributes)?)?;
    Ok(Vec::new())
}
