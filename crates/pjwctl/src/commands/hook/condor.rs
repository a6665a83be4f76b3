//! HTCondor: the hooks `HOOK_PREPARE_JOB` and `HOOK_JOB_EXIT`, and `USER_JOB_WRAPPER`.
//!
//! HTCondor runs all of them as the job's user, who may not register jobs. If a site runs the hooks as root
//! nevertheless, they register and release the job. HTCondor's starter ignores the output of the hook for the end of a
//! job (`StarterHookMgr.h`).

use std::io::Read;

use pjw_sources::announcement::{self, JobAnnouncement};

use super::context::{HookInput, JobVariables, MAX_FILE_BYTES, is_root};
use super::variables;

/// Runs the hook `HOOK_PREPARE_JOB` of HTCondor, before a job starts: registers the job at the daemon, if the hook runs
/// as root. Returns no environment variables.
pub(super) fn hook_prepare_job(context: &HookInput) -> anyhow::Result<JobVariables> {
    let ad = job_ad();
    if is_root() { context.register(announcement(context, &ad)?) } else { Ok(Vec::new()) }
}

/// Runs the hook `HOOK_JOB_EXIT` of HTCondor, after a job has ended: releases the job, if the hook runs as root.
/// Returns no environment variables.
pub(super) fn hook_job_exit(context: &HookInput) -> anyhow::Result<JobVariables> {
    let ad = job_ad();
    if is_root() { context.release_and_log(&announcement(context, &ad)?) } else { Ok(Vec::new()) }
}

/// Reads the ad of the job, which HTCondor's starter writes to the standard input of the hook. This pipe must be read
/// to its end, so that the write does not fail.
fn job_ad() -> String {
    let mut ad = Vec::new();
    let _ = std::io::stdin().lock().take(MAX_FILE_BYTES).read_to_end(&mut ad);
    String::from_utf8_lossy(&ad).into_owned()
}

/// Runs for HTCondor's `USER_JOB_WRAPPER`, before the command of a job starts. Waits until the job has cores, and until
/// the effective affinity mask of this process contains only PUs of the job. At the time limit of the hook, prints a
/// warning and continues. Returns an error if the job has no cores then. Returns the environment variables for the
/// command, such as `PJW_CPUS`, or none if pjwd does not keep the job on its cores. The caller executes the command.
pub(super) fn user_job_wrapper(context: &HookInput) -> anyhow::Result<JobVariables> {
    variables::job_starter_variables(context, &announcement(context, "")?)
}

fn announcement(context: &HookInput, job_ad: &str) -> anyhow::Result<JobAnnouncement> {
    let machine_ad = context.file_named_by_variable("_CONDOR_MACHINE_AD").unwrap_or_default();
    Ok(announcement::from_condor(&context.attributes, &machine_ad, job_ad)?)
}
