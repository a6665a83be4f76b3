//! `pjwctl show JOB`: one job with its processes, threads, pins, history and memory.

use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use pjw_ipc::call::{GetJob, GetJobReply, GetMemory};
use pjw_ipc::client::{Client, ClientError};
use pjw_ipc::wire::Memory;

use super::connection::{DaemonAddress, call_for_field, parse_job_id, user_names};
use crate::cli::ShowArgs;
use crate::output;
use crate::render::show::{self, JobDetails};

/// The maximum time that pjwctl waits until pjwd has read the pages of a job.
const READING_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// After this time without a reply, pjwctl prints that the reading takes long, and why.
const NOTICE_DELAY: Duration = Duration::from_secs(2);

/// Runs `pjwctl show`: prints the properties of a job, its memory, its processes and its latest events. `request`
/// contains the command line options.
pub(super) fn run(daemon: &DaemonAddress, request: &ShowArgs) -> anyhow::Result<ExitCode> {
    let mut client = daemon.connect()?;
    let mut details = read_job_by_name(&mut client, &request.job)?;
    let memory = if request.memory {
        let mut client = daemon.connect_with_timeout(READING_TIMEOUT)?;
        let notice = format!(
            "the memory of {} is being read: 1 TiB takes half a minute of CPU time or more, and the readings that others \
             asked for come first; Ctrl-C ends the waiting",
            details.job.id
        );
        run_with_delayed_notice(
            NOTICE_DELAY,
            || output::print_error(&notice),
            || read_memory(&mut client, &details.job.id, request),
        )
        .map(Some)
    } else if details.job.processes > 0 {
        read_memory(&mut client, &details.job.id, request).map(Some)
    } else {
        Ok(None)
    };
    // Without the option the memory is an extra: not every job has an estimate.
    match memory {
        Ok(memory) => details.memory = memory,
        Err(error) if request.memory => return Err(error.into()),
        Err(error) => details.no_memory_reason = Some(error.to_string()),
    }
    output::print_reply(request.json, &details, |details, term| {
        let uids = details.members.iter().map(|member| member.uid).chain([details.job.owner]);
        show::job_details_text(details, &user_names(uids), term)
    })
}

/// Reads the job with the name `name`. If there is no such job and `name` is a number, the error says how to ask for
/// the process with this id.
fn read_job_by_name(client: &mut Client, name: &str) -> anyhow::Result<JobDetails> {
    read_job_details(client, parse_job_id(name)?).map_err(|error| match error {
        ClientError::Refused { message, .. } if name.bytes().all(|byte| byte.is_ascii_digit()) => {
            anyhow!("{message}; for the process {name}: pjwctl explain {name}")
        }
        error => error.into(),
    })
}

fn read_memory(client: &mut Client, job: &str, request: &ShowArgs) -> Result<Memory, ClientError> {
    let parameters = GetMemory {
        job: job.to_owned(),
        estimate: (!request.memory).then_some(true),
        nodes: request.nodes.then_some(true),
    };
    call_for_field(client, "GetMemory", &parameters, "memory")
}

/// Runs `work` and returns its result. If `work` takes longer than `timeout`, another thread calls `print_notice`
/// once, while `work` continues.
fn run_with_delayed_notice<T>(
    timeout: Duration,
    print_notice: impl FnOnce() + Send,
    work: impl FnOnce() -> T,
) -> T {
    let (sender, receiver) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if receiver.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                print_notice();
            }
        });
        let result = work();
        // Wakes the other thread, if it still waits.
        drop(sender);
        result
    })
}

/// Requests the properties of the job with the id `job`, its processes and its latest events. The daemon sends the
/// processes in several replies. Processes can start and end between two replies. For this reason, the list of
/// processes can be longer or shorter than the number of processes in the properties of the job.
pub(super) fn read_job_details(client: &mut Client, job: String) -> Result<JobDetails, ClientError> {
    let mut request = GetJob { job, ..GetJob::default() };
    let GetJobReply { job, mut members, history, mut last_pid, mut last_tid } =
        client.call("GetJob", &request)?;
    while last_pid.is_some() && (last_pid, last_tid) != (request.after, request.after_tid) {
        (request.after, request.after_tid) = (last_pid, last_tid);
        let page: GetJobReply = client.call("GetJob", &request)?;
        for member in page.members {
            match members.last_mut() {
                // The page before ended within this process: append its further threads.
                Some(last) if (last.pid, last.start_time) == (member.pid, member.start_time) => {
                    last.threads.extend(member.threads);
                }
                _ => members.push(member),
            }
        }
        (last_pid, last_tid) = (page.last_pid, page.last_tid);
    }
    Ok(JobDetails { job, members, history, memory: None, no_memory_reason: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_that_takes_long_is_explained() {
        let (sender, receiver) = mpsc::channel();
        let work = || receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(
            run_with_delayed_notice(Duration::ZERO, || sender.send(7).unwrap(), work),
            Ok(7),
            "while the work goes on"
        );
        let hour = Duration::from_secs(3600);
        assert_eq!(run_with_delayed_notice(hour, || panic!("it was done at once"), || 1), 1);
    }
}
