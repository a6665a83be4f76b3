//! What is decided about wishes of plain users before they wake the loop, where each costs a look at the whole node.
//!
//! What the published view and the configuration are enough to refuse is refused here; what remains is bounded in its
//! rate, user by user. Administrators pass.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pjw_core::command::{Caller, Command, Refusal, Reply};
use pjw_core::job::JobId;
use pjw_core::policy::Mode;
use pjw_core::process::Uid;
use pjw_ipc::wire::Job;
use tracing::{debug, warn};

use crate::config::Settings;

/// So many changes a user may ask for at once.
const BURST: u32 = 30;
/// And one more after each of these times.
const PERIOD: Duration = Duration::from_millis(500);
/// With so many users in memory, those who have been quiet are forgotten.
const MANY_USERS: usize = 1000;
/// Refusals of users are worth a line in the log so often at most.
const QUIET: Duration = Duration::from_secs(10);

/// The part of the configuration that decides before the loop does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// Whose members are administrators.
    pub admin_groups: Vec<String>,
    /// How many cores a plain user may hold.
    pub user_max_cores: u32,
    /// Whether anything is changed at all.
    pub mode: Mode,
}

impl From<&Settings> for Rules {
    fn from(settings: &Settings) -> Self {
        Self {
            admin_groups: settings.admin_groups.clone(),
            user_max_cores: settings.user_max_cores,
            mode: settings.mode,
        }
    }
}

/// Who asks, and whose wishes are not judged here.
#[must_use]
pub fn caller(command: &Command) -> Caller {
    match command {
        Command::Assign(wish) => wish.caller,
        Command::Release { caller, .. } | Command::ReleaseAll { caller } | Command::Defrag { caller } => {
            *caller
        }
    }
}

/// The answer to a plain user's wish, if it needs no fact that isn't published.
#[must_use]
pub fn foregone(rules: &Rules, jobs: &[Job], command: &Command) -> Option<Result<Reply, Refusal>> {
    let caller = caller(command);
    if caller.admin {
        return None;
    }
    let find = |id: &JobId| {
        let name = id.to_string();
        jobs.iter().find(|job| job.id == name)
    };
    let not_yours = |id: &JobId, job: &Job| {
        let (job_id, owner) = (id.clone(), Uid(job.owner));
        (owner != caller.uid).then_some(Refusal::NotYourJob { job: job_id, owner })
    };
    let refusal = match command {
        Command::Assign(_) if rules.mode == Mode::Observe => Some(Refusal::ObserveOnly),
        Command::Assign(wish) => match find(&wish.job) {
            Some(_) if wish.fresh => Some(Refusal::JobExists { job: wish.job.clone() }),
            Some(job) => not_yours(&wish.job, job),
            None => (rules.user_max_cores == 0).then_some(Refusal::UsersMayNot),
        },
        Command::Release { job: id, .. } => match find(id) {
            Some(job) => not_yours(id, job),
            None => Some(Refusal::NoSuchJob { job: id.clone() }),
        },
        Command::ReleaseAll { .. } => {
            let has_any = jobs.iter().any(|job| job.owner == caller.uid.0);
            return (!has_any).then(|| Ok(Reply::Released(Vec::new())));
        }
        Command::Defrag { .. } => Some(Refusal::MovesAreForAdmins),
    };
    refusal.map(Err)
}

/// How often each user asks for changes.
#[derive(Debug, Default)]
pub struct Rates {
    /// When all that a user has asked for would be over, had it come one by one.
    until: BTreeMap<Uid, Instant>,
}

impl Rates {
    /// Counts a wish; false if it is one too many for now.
    pub fn admit(&mut self, uid: Uid, now: Instant) -> bool {
        if self.until.len() >= MANY_USERS {
            self.until.retain(|_, until| *until > now);
        }
        let until = self.until.entry(uid).or_insert(now);
        let from = (*until).max(now);
        if from.duration_since(now) > PERIOD * (BURST - 1) {
            return false;
        }
        *until = from + PERIOD;
        true
    }
}

/// What is said to a user who asks too often.
#[must_use]
pub fn too_often() -> String {
    let a_second = Duration::from_secs(1).as_millis() / PERIOD.as_millis();
    format!(
        "you ask for changes too often: a user who is no administrator may ask for {BURST} at once and then \
         {a_second} a second; wait a little and try again"
    )
}

/// Refusals of plain users in the log: counted, not told one by one, for anybody can have as many as they like.
#[derive(Debug, Default)]
pub struct Refusals {
    told: Option<Instant>,
    untold: u32,
}

impl Refusals {
    /// Logs that a wish was refused, if it is time for it.
    pub fn note(&mut self, uid: Uid, why: &str, now: Instant) {
        debug!(uid = uid.0, "refused: {why}");
        if let Some(count) = self.due(now) {
            warn!(count, uid = uid.0, "wishes of users were refused, the latest: {why}");
        }
    }

    /// How many there were since the last line, if it is time for one.
    fn due(&mut self, now: Instant) -> Option<u32> {
        self.untold = self.untold.saturating_add(1);
        if self.told.is_some_and(|told| now.duration_since(told) < QUIET) {
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
#[path = "admission/tests.rs"]
mod tests;
