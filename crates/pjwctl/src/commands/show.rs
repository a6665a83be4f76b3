//! `pjwctl show JOB`: one job with its processes, threads, pins and history.

use std::process::ExitCode;

use pjw_ipc::call::{GetJob, GetJobReply};
use pjw_ipc::client::{Client, ClientError};

use super::connection::{Warden, job_id, user_names};
use crate::cli::JsonArg;
use crate::output;
use crate::render::show::{self, JobDetails};

pub(super) fn run(warden: &Warden, job: &str, json: JsonArg) -> anyhow::Result<ExitCode> {
    let details = read(&mut warden.connect()?, job_id(job)?)?;
    output::print_reply(json, &details, |details, term| {
        let uids = details.members.iter().map(|member| member.uid).chain([details.job.owner]);
        show::job_details_text(details, &user_names(uids), term)
    })
}

/// Reads all pages. Processes may start and end in between: each page has the state of its own time, and the counts
/// of the job are those of the first page.
pub(super) fn read(client: &mut Client, job: String) -> Result<JobDetails, ClientError> {
    let mut request = GetJob { job, ..GetJob::default() };
    let GetJobReply { job, mut members, history, mut last_pid, mut last_tid } =
        client.call("GetJob", &request)?;
    while last_pid.is_some() && (last_pid, last_tid) != (request.after, request.after_tid) {
        (request.after, request.after_tid) = (last_pid, last_tid);
        let page: GetJobReply = client.call("GetJob", &request)?;
        for member in page.members {
            match members.last_mut() {
                // The page before ended within this process: append its further threads.
                Some(begun) if (begun.pid, begun.start_time) == (member.pid, member.start_time) => {
                    begun.threads.extend(member.threads);
                }
                _ => members.push(member),
            }
        }
        (last_pid, last_tid) = (page.last_pid, page.last_tid);
    }
    Ok(JobDetails { job, members, history })
}
