//! Refused commands of users who are not administrators. The control server publishes their events.

use std::collections::BTreeSet;

use pjw_core::command::{AssignCommand, Command, Reply};
use pjw_core::event::{Event, EventKind};
use pjw_core::{job::JobId, refusal::Refusal};

/// Returns the refused commands of users who are not administrators. Each has the id of the job and the message of
/// the refusal. `results` has the result of each command in `commands`. Only commands that assign cores or processes
/// to a job, or that release a job, are contained.
pub(super) fn user_refusals(
    commands: &[Command],
    results: &[Result<Reply, Refusal>],
) -> BTreeSet<(JobId, String)> {
    let refused = |(command, result): (&Command, &Result<Reply, Refusal>)| match (command, result) {
        (
            Command::Assign(AssignCommand { job, caller, .. }) | Command::Release { job, caller },
            Err(refusal),
        ) => (!caller.is_admin).then(|| (job.clone(), refusal.to_string())),
        _ => None,
    };
    commands.iter().zip(results).filter_map(refused).collect()
}

/// Returns whether `event` reports one of the refused commands in `refusals`. Each refused command is given by the id
/// of the job and the message of the refusal.
pub(super) fn is_user_refusal(event: &Event, refusals: &BTreeSet<(JobId, String)>) -> bool {
    let job = event.job.as_ref().filter(|_| event.kind == EventKind::Refused);
    job.is_some_and(|job| refusals.contains(&(job.clone(), event.text.clone())))
}
