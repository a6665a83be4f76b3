//! Flux: the prolog and epilog of the plugin `perilog.so`, run as root on each node.

use pjw_sources::announcement;

use super::context::{HookInput, JobVariables};

/// Runs the prolog of Flux, before a job starts: registers the job at the daemon. Returns no environment variables.
pub(super) fn prolog(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.register(announcement::from_flux(&context.attributes)?)
}

/// Runs the epilog of Flux, after a job has ended: releases the job. Returns no environment variables.
pub(super) fn epilog(context: &HookInput) -> anyhow::Result<JobVariables> {
    context.release(&announcement::from_flux(&context.attributes)?)
}
