//! HTCondor: the hook `HOOK_PREPARE_JOB`, and `USER_JOB_WRAPPER`.
//!
//! HTCondor runs both as the job's user, who may not register jobs. If a site runs the hook as root nevertheless, the
//! hook registers the job.

use std::io::Read;

use pjw_sources::announcement::{self, JobAnnouncement};

use super::context::{Context, MAX_FILE_BYTES, Variables, is_root};
use super::variables;

pub(super) fn prepare(context: &Context) -> anyhow::Result<Variables> {
    // HTCondor's starter writes the job's ad to this pipe. The pipe must be read to its end, so that the write does
    // not fail.
    let mut ad = Vec::new();
    let _ = std::io::stdin().lock().take(MAX_FILE_BYTES).read_to_end(&mut ad);
    if !is_root() {
        return Ok(Vec::new());
    }
    context.register(announcement(context, &String::from_utf8_lossy(&ad))?)
}

pub(super) fn wrapper(context: &Context) -> anyhow::Result<Variables> {
    variables::of_starter(context, &announcement(context, "")?)
}

fn announcement(context: &Context, job_ad: &str) -> anyhow::Result<JobAnnouncement> {
    let machine_ad = context.file_of("_CONDOR_MACHINE_AD").unwrap_or_default();
    Ok(announcement::from_condor(&context.attributes, &machine_ad, job_ad)?)
}
