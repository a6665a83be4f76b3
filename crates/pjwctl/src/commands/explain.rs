//! `pjwctl explain PID|JOB`: the reasons for the CPUs of a process or a job.

use std::process::ExitCode;

use anyhow::anyhow;
use pjw_ipc::call::{ExplainJobReply, ExplainPid, ExplainPidReply, JobParameter};
use pjw_ipc::client::{Client, ClientError};

use super::connection::{DaemonAddress, parse_job_id};
use crate::{cli::JsonArg, output, render};

/// Runs `pjwctl explain`: prints why a job or a process has its CPUs. `subject` is a process id if it consists of
/// digits, and a job id otherwise. A job with a number as its name must therefore be given with its source, such as
/// `slurm:7`.
pub(super) fn run(daemon: &DaemonAddress, subject: &str, json: JsonArg) -> anyhow::Result<ExitCode> {
    if subject.is_empty() || !subject.bytes().all(|byte| byte.is_ascii_digit()) {
        let job = parse_job_id(subject)?;
        let reasons: ExplainJobReply = daemon.connect()?.call("ExplainJob", &JobParameter { job })?;
        return output::print_reply(json, &reasons, render::explain::grant_explanation_text);
    }
    let pid = subject.parse().map_err(|_| {
        anyhow!(
            "{subject} is too large for a process id: ps -e lists those there are; a job is given with its source, \
             as in manual:{subject}"
        )
    })?;
    let mut client = daemon.connect()?;
    match read_explanation(&mut client, pid) {
        Ok(reasons) => output::print_reply(json, &reasons, render::explain::process_reasons_text),
        Err(error) => Err(match job_named(&mut client, subject) {
            Some(job) => anyhow!("{error}; there is a job of that name: pjwctl explain {job}"),
            None => error.into(),
        }),
    }
}

/// Returns the id of the job with the name `number`, if the daemon knows such a job. The result is used only for a
/// hint, so a failed call returns `None`.
fn job_named(client: &mut Client, number: &str) -> Option<String> {
    let job = parse_job_id(number).ok()?;
    client.call::<ExplainJobReply>("ExplainJob", &JobParameter { job }).ok().map(|reasons| reasons.job)
}

/// Requests from the daemon why the process `pid` has its CPUs, with all its threads. The daemon sends the threads in
/// pages, because a process may have very many.
fn read_explanation(client: &mut Client, pid: u32) -> Result<ExplainPidReply, ClientError> {
    let mut request = ExplainPid { pid, after_tid: None };
    let mut reasons: ExplainPidReply = client.call("ExplainPid", &request)?;
    while let Some(next) = reasons.last_tid.take().filter(|&next| request.after_tid != Some(next)) {
        request.after_tid = Some(next);
        let page: ExplainPidReply = client.call("ExplainPid", &request)?;
        reasons.threads.extend(page.threads);
        reasons.last_tid = page.last_tid;
    }
    Ok(reasons)
}
