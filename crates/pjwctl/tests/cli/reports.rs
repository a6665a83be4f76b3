//! `pjwctl report JOB` while a job of the same name runs.

use pjw_ipc::call::{Call, GetJobReply, Reply};
use pjw_ipc::report::Report;
use pjw_ipc::wire::Job;
use serde_json::Value;

use super::daemon::{CallReplies, Daemon};
use super::{CommandOutput, answer, pjwctl};

const TEN: &str = "2026-05-04T10:00:00Z";
const NOON: &str = "2026-05-04T12:00:00Z";

/// The output of `pjwctl report a --json`. The report is that of a run which began at ten. A job of this name, which
/// the daemon knows now, began at `since`.
fn report_beside_job(since: Option<&'static str>) -> CommandOutput {
    let daemon = Daemon::start(move |call| match (call, since) {
        (Call::GetReports(_), _) => {
            let report = Report { id: "manual:a".into(), started: TEN.into(), ..Report::default() };
            CallReplies::reply(Reply::Reports { reports: vec![report.into()] })
        }
        (Call::GetJob(_), Some(since)) => {
            let job = Job { id: "manual:a".into(), since: since.into(), ..Job::default() };
            let (members, history) = (Vec::new(), Vec::new());
            let reply = GetJobReply { job, members, history, last_pid: None, last_tid: None };
            CallReplies::reply(Reply::JobDetail(Box::new(reply)))
        }
        _ => CallReplies::refusal("there is no job manual:a"),
    });
    answer(&mut pjwctl(&daemon.socket(), &["report", "a", "--json"]))
}

#[test]
fn a_report_beside_a_later_run_of_the_job_says_so_on_standard_error() {
    let output = report_beside_job(Some(NOON));
    let note =
        "pjwctl: manual:a runs again since 2026-05-04T12:00:00Z: this is the report of the run before\n";
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), note));
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(report["started"], TEN);
}

#[test]
fn a_report_of_a_job_that_does_not_run_or_was_released_has_no_note() {
    for since in [None, Some(TEN)] {
        let output = report_beside_job(since);
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{since:?}");
    }
}
