//! Admission of commands from users who are not administrators.
//!
//! Each command that reaches the event loop costs a scan. So a command is refused here if the published status and the
//! configuration are enough to refuse it. The rate of a user's commands is limited. Administrators are not limited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::command::{Caller, Command, Reply};
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::{job::JobId, policy::DaemonMode, refusal::Refusal};
use pjw_ipc::client::COMMANDS_TOO_OFTEN;
use pjw_ipc::wire::Job;
use pjw_linux::proc::thread_group::process_of_thread;
use tracing::{debug, warn};

use crate::config::Settings;

/// How many commands a user may send at once.
const BURST: u32 = 30;
/// After a burst, a user may send one more command per period.
const PERIOD: Duration = Duration::from_millis(500);
/// From this number of users on, idle users are removed from memory.
const PRUNE_FROM: usize = 1000;
/// The largest number of processes that a user may name in one command. pjwd looks at each before it answers others.
const MAX_PROCESSES: usize = 1024;
/// The shortest time between two log lines about refused commands.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// The configured rules for commands: which users are administrators, and which commands of other users are refused.
/// The control server (the part of pjwd that answers the clients) applies these rules. A refused command does not reach
/// the event loop, which executes commands.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdmissionRules {
    /// The names of the Unix groups whose members are administrators of pjwd.
    pub admin_groups: Vec<String>,
    /// The maximum number of cores that the jobs of one user may hold together. It applies to users who are
    /// not administrators. 0 means that these users may not create jobs.
    pub user_max_cores: u32,
    /// Whether the daemon makes the changes on which it decides ([`DaemonMode::Enforce`]), or only shows them
    /// ([`DaemonMode::Observe`]).
    pub mode: DaemonMode,
}

impl From<&Settings> for AdmissionRules {
    fn from(settings: &Settings) -> Self {
        Self {
            admin_groups: settings.admin_groups.clone(),
            user_max_cores: settings.user_max_cores,
            mode: settings.mode,
        }
    }
}

/// Returns the user who sent `command`, and whether this user is an administrator.
#[must_use]
pub fn caller_of(command: &Command) -> Caller {
    match command {
        Command::Assign(request) => request.caller,
        Command::Provision(request) => request.caller,
        Command::Release { caller, .. }
        | Command::Undo { caller, .. }
        | Command::ReleaseAll { caller }
        | Command::Want { caller, .. }
        | Command::Defrag { caller } => *caller,
    }
}

/// Checks the pids in `command` if the command assigns processes to a job ([`Command::Assign`]). Returns a refusal if a
/// pid is in fact the id of a thread that is not the main thread of its process. By such an id, one process could get
/// into two jobs. Returns `None` if all pids are valid, and for every other command. Reads a file in `/proc` for each
/// pid.
#[must_use]
pub fn refusal_of_thread_ids(command: &Command) -> Option<Refusal> {
    let Command::Assign(request) = command else { return None };
    let pids: BTreeSet<Pid> = request.pids.iter().copied().collect();
    pids.into_iter().find_map(|named| {
        let tid = Tid(named.0);
        process_of_thread(tid).filter(|&pid| pid != named).map(|pid| Refusal::IsThread { tid, pid })
    })
}

/// Answers `command` without the event loop, if possible. This saves the scan that the event loop makes for a
/// command. `rules` are the configured rules for users who are not administrators. `jobs` are the jobs in the last
/// published status of the daemon. Almost all of these answers are refusals, for example because the job belongs to
/// another user.
///
/// Returns `None` if only the event loop can answer: the caller must send the command to the event loop. Always
/// returns `None` for a command of an administrator.
#[must_use]
pub fn answer_without_event_loop(
    rules: &AdmissionRules,
    jobs: &[Arc<Job>],
    command: &Command,
) -> Option<Result<Reply, Refusal>> {
    let caller = caller_of(command);
    if caller.is_admin {
        return None;
    }
    let published_job = |id: &JobId| {
        let name = id.to_string();
        jobs.iter().find(|job| job.id == name)
    };
    let refusal_if_not_owned = |id: &JobId, job: &Job| {
        let (job_id, owner) = (id.clone(), Uid(job.owner));
        (owner != caller.uid).then_some(Refusal::JobNotOwned { job: job_id, owner })
    };
    let refusal = match command {
        Command::Assign(_) if rules.mode == DaemonMode::Observe => Some(Refusal::ObserveOnly),
        Command::Assign(request) if request.pids.len() > MAX_PROCESSES => {
            Some(Refusal::TooManyProcesses { given: request.pids.len(), most: MAX_PROCESSES })
        }
        Command::Assign(request) => match published_job(&request.job) {
            Some(job) if request.must_be_new => {
                let is_theirs = job.owner == caller.uid.0 && job.provision.is_none();
                let may_release = is_theirs && job.state != "released";
                Some(Refusal::JobExists { job: request.job.clone(), may_release })
            }
            Some(job) => refusal_if_not_owned(&request.job, job),
            // The event loop first checks whether a process stays in another job: that refusal has precedence.
            None if request.keeps_members => None,
            None => (rules.user_max_cores == 0).then_some(Refusal::AssignNeedsAdmin),
        },
        Command::Release { job: id, .. } | Command::Want { job: id, .. } => match published_job(id) {
            Some(job) => refusal_if_not_owned(id, job),
            None => Some(Refusal::NoSuchJob { job: id.clone() }),
        },
        Command::ReleaseAll { .. } => {
            let has_any = jobs.iter().any(|job| job.owner == caller.uid.0);
            return (!has_any).then(|| Ok(Reply::Released(Vec::new())));
        }
        Command::Provision(_) => Some(Refusal::ProvisionNeedsAdmin),
        Command::Defrag { .. } => Some(Refusal::DefragNeedsAdmin),
        // No client sends this command.
        Command::Undo { .. } => None,
    };
    refusal.map(Err)
}

/// A limit on the rate of commands of each user. A user can send 30 commands in one burst, and then two per second.
/// Commands that release jobs are counted separately, with a limit of the same size. So a user who has sent too many
/// other commands can still release jobs. Administrators have no limit.
#[derive(Debug, Default)]
pub struct RateLimiter {
    /// For each user, the time from which the user may send a full burst again. The releases of a user (true) have
    /// another time than the other commands (false). Each command moves the time [`PERIOD`] later.
    until: BTreeMap<(Uid, bool), Instant>,
}

impl RateLimiter {
    /// Returns whether `command`, which was sent at the time `now`, is within the limit of its user. If true, the
    /// command counts towards the limit. If false, the user has sent too many commands, and the caller must refuse this
    /// command.
    pub fn admit(&mut self, command: &Command, now: Instant) -> bool {
        let Caller { uid, is_admin } = caller_of(command);
        if is_admin {
            return true;
        }
        if self.until.len() >= PRUNE_FROM {
            self.until.retain(|_, until| *until > now);
        }
        let is_release = matches!(command, Command::Release { .. } | Command::ReleaseAll { .. });
        let until = self.until.entry((uid, is_release)).or_insert(now);
        let from = (*until).max(now);
        if from.duration_since(now) > PERIOD * (BURST - 1) {
            return false;
        }
        *until = from + PERIOD;
        true
    }
}

/// Returns the error message for a user who sends more commands than [`RateLimiter`] allows.
#[must_use]
pub fn rate_limit_message() -> String {
    let commands_per_second = Duration::from_secs(1).as_millis() / PERIOD.as_millis();
    format!(
        "{COMMANDS_TOO_OFTEN}: a user who is not an administrator may send {BURST} at once and then {commands_per_second} a second; wait a little and try again"
    )
}

/// Logs the refused commands of users who are not administrators. At most one warning is logged per 10 s, so that no
/// user can fill the log. The warning has the number of refusals since the last warning. At the log level debug, each
/// refusal also gets a log line of its own.
#[derive(Debug, Default)]
pub struct RefusalLog {
    logged_at: Option<Instant>,
    unlogged: u32,
}

impl RefusalLog {
    /// Records that a command of the user `uid` was refused at the time `now`, for the reason `reason`. If the last
    /// warning is at least 10 s old, logs a warning with the reason and the number of refusals since the last warning.
    /// At the log level debug, each refusal also gets a log line of its own.
    pub fn record(&mut self, uid: Uid, reason: &str, now: Instant) {
        debug!(uid = uid.0, "refused: {reason}");
        if let Some(count) = self.count_refusal(now) {
            warn!(count, uid = uid.0, "commands of users were refused, the latest: {reason}");
        }
    }

    /// Counts one refusal. If a log line is due, returns the number of refusals since the last line, and starts a new
    /// count.
    fn count_refusal(&mut self, now: Instant) -> Option<u32> {
        self.unlogged = self.unlogged.saturating_add(1);
        if self.logged_at.is_some_and(|logged_at| now.duration_since(logged_at) < LOG_PERIOD) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests;
