//! `pjwctl show JOB`: one job with its processes, threads, pins and history.

use std::process::ExitCode;

use pjw_ipc::call::{GetJob, JobDetail};
use pjw_ipc::client::{Client, ClientFault};

use super::{Warden, job_id, user_names};
use crate::cli::Json;
use crate::output;
use crate::render::show::{self, JobStory};

pub(super) fn run(warden: &Warden, job: &str, json: Json) -> anyhow::Result<ExitCode> {
    let story = read(&mut warden.connect()?, job_id(job)?)?;
    if json.json {
        output::print_json(&story)?;
    } else {
        let uids = story.members.iter().map(|member| member.uid).chain([story.job.owner]);
        output::print(&show::story(&story, &user_names(uids), output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads all pages. Processes may come and go in between: each page is what it was at its time, and the job's
/// own numbers are those of the first.
fn read(client: &mut Client, job: String) -> Result<JobStory, ClientFault> {
    let mut wish = GetJob { job, after: None, limit: None };
    let JobDetail { job, mut members, history, mut next } = client.call("GetJob", &wish)?;
    while next.is_some() && next != wish.after {
        wish.after = next;
        let page: JobDetail = client.call("GetJob", &wish)?;
        members.extend(page.members);
        next = page.next;
    }
    Ok(JobStory { job, members, history })
}
