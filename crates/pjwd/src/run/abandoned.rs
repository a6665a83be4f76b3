//! Commands whose callers have hung up, such as a hook whose timeout has passed.
//!
//! A command that still waits when its caller hangs up is dropped: it would take cores for nobody. A release is carried
//! out nevertheless. So is a command that has begun. A job that such a command made stays, because a hook that gave up
//! does not stop its job: the job begins, and is found on its cores.

use pjw_core::command::{AssignCommand, Command, Reply};
use pjw_core::event::{Event, EventKind};
use pjw_core::refusal::Refusal;
use tracing::{debug, info};

/// Returns the event that `command` was not carried out, because its client closed the connection before pjwd began
/// with it. `None` in these cases:
///
/// - The caller is no administrator: such callers could fill the event history.
/// - The command is not one of `Assign`, `Release` and `Want`.
pub(super) fn dropped_command_event(command: &Command) -> Option<Event> {
    let text = "not carried out: the caller hung up before pjwd began with the request";
    match command {
        Command::Assign(AssignCommand { job, caller, .. })
        | Command::Release { job, caller }
        | Command::Want { job, caller, .. }
            if caller.is_admin =>
        {
            Some(Event::new(EventKind::Refused, text).with_job(job))
        }
        command => {
            debug!(?command, "{text}");
            None
        }
    }
}

/// Logs that a command assigned cores or processes to a job, although its client closed the connection before the
/// answer. The job continues to exist. `result` is the result of the command. Logs nothing for other commands and for
/// refusals.
pub(super) fn log_unanswered_assignment(result: &Result<Reply, Refusal>) {
    if let Ok(Reply::Assigned(job)) = result {
        info!(
            job = %job.id,
            "{}: the caller hung up while the request was carried out; the job stays, without a process until \
             reservation_timeout has passed",
            job.id
        );
    }
}
