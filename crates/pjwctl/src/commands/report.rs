//! `pjwctl report` and `pjwctl jobs --ended`: how jobs that have ended used their cores.

use std::process::ExitCode;

use anyhow::bail;
use jiff::Timestamp;
use pjw_ipc::call::{GetJob, GetJobReply, GetReports};
use pjw_ipc::client::Client;
use pjw_ipc::report::Report;

use super::connection::{DaemonAddress, call_for_field, parse_job_id, read_status, user_names};
use crate::cli::{JsonArg, ReportArgs};
use crate::output;
use crate::render::report::{jobstats_line, report_text, reports_text};

/// Runs `pjwctl report`: prints how a job that has ended used its cores. Without a job in `request`, prints a table of
/// the jobs that have ended.
pub(super) fn run(daemon: &DaemonAddress, request: &ReportArgs) -> anyhow::Result<ExitCode> {
    let Some(job) = &request.job else { return print_ended_jobs(daemon, request.last, request.json) };
    let job = parse_job_id(job)?;
    let parameters = GetReports { job: Some(job.clone()), last: Some(1) };
    let mut client = daemon.connect()?;
    let reports: Vec<Report> = call_for_field(&mut client, "GetReports", &parameters, "reports")?;
    let Some(report) = reports.into_iter().next() else {
        bail!("there is no report of {job}: pjwctl jobs --ended lists the jobs that have one");
    };
    if let Some(since) = start_of_later_run(&mut client, &job, &report) {
        output::print_error(&format!("{job} runs again since {since}: this is the report of the run before"));
    }
    if request.jobstats {
        let host = read_status(&mut client)?.node.hostname;
        output::print(&jobstats_line(&report, &host, total_memory()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let names = user_names([report.owner]);
    output::print_reply(request.json, &report, |report, term| report_text(report, &names, term))
}

/// Returns the start of the job `job` that the daemon knows now, if this is a later run than the run in `report`. The
/// daemon may also still know the run in `report`, after its release: the result is then `None`.
fn start_of_later_run(client: &mut Client, job: &str, report: &Report) -> Option<String> {
    let request = GetJob { job: job.to_owned(), ..GetJob::default() };
    let reply: GetJobReply = client.call("GetJob", &request).ok()?;
    let known_start: Timestamp = reply.job.since.parse().ok()?;
    let reported_start: Timestamp = report.started.parse().ok()?;
    (known_start > reported_start).then_some(reply.job.since)
}

/// Prints a table of the jobs that have ended, and how they used their cores. `last` is the maximum number of jobs in
/// the table: the jobs that ended last. If `last` is `None`, prints all jobs of which the daemon has a report.
pub(super) fn print_ended_jobs(
    daemon: &DaemonAddress,
    last: Option<u32>,
    json: JsonArg,
) -> anyhow::Result<ExitCode> {
    let parameters = GetReports { job: None, last };
    let reports: Vec<Report> = call_for_field(&mut daemon.connect()?, "GetReports", &parameters, "reports")?;
    output::print_reply(json, &reports, |reports, term| {
        let names = user_names(reports.iter().map(|report| report.owner));
        reports_text(reports, &names, Timestamp::now(), term)
    })
}

/// The memory of this node in bytes. 0 if it is unknown.
fn total_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}
